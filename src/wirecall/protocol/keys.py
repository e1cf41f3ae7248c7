"""The place of a command's key inside its params, besides the usual places.

Other protocols on top of MCP put the key into the arguments of a tool: `meta["idempotency-key"]`,
or `meta.idempotency_key`. `key_at="meta.idempotency-key"` declares the place.

1. The value there is the key. It does not count in the fingerprint.
2. An object that only holds the key, because the function does not declare it, is accepted beside
   the params. The function does not see it, so nothing of it counts in the fingerprint.
3. The published schema has the place (`with_key`), and marks it, so that a client that sends keys
   itself does not ask its user for one (`without_key`).
"""

import re
from collections.abc import Sequence

from msgspec import UNSET, Struct

from wirecall.errors import InvalidParams, UsageError
from wirecall.protocol.messages import JsonObject

# A keyword of the published schema: this member is the key, or an object that only the key needs.
MARK = "x-idempotency-key"
# Marks a param that is required only because the key is.
ONLY_FOR_KEY = "x-required-for-key"
_USUAL = "idempotency_key"
_STEP = re.compile(r"[A-Za-z0-9_-]+")


class KeyPlace(Struct, frozen=True):
    """A path of names from the params to the key."""

    path: tuple[str, ...]
    # The function has a parameter of the first name.
    is_declared: bool = False

    @property
    def shown(self) -> str:
        """The place in the words of an error."""
        return ".".join(("params", *self.path))

    @property
    def quoted(self) -> bytes:
        """The last name as JSON writes it."""
        return f'"{self.path[-1]}"'.encode()

    def take(self, params: JsonObject) -> object:
        """Remove the key from params and return it; UNSET if there is none."""
        holders = [params]
        for at, name in enumerate(self.path[:-1], 1):
            inner = holders[-1].get(name, UNSET)
            if inner is UNSET:
                return UNSET
            if not isinstance(inner, dict):
                where = ".".join(("params", *self.path[:at]))
                kind = type(inner).__name__
                if inner is None:
                    kind = "null"
                raise InvalidParams(f"{where}: expected object, got {kind}")
            holders.append(inner)
        key = holders[-1].pop(self.path[-1], UNSET)
        # An object that held only the key is not given if the key comes another way.
        for holder, name in zip(reversed(holders[:-1]), reversed(self.path[:-1]), strict=True):
            if not holder[name]:
                del holder[name]
        return key

    def forget(self, params: JsonObject) -> None:
        """Remove the object that only the key is read from."""
        if not self.is_declared:
            params.pop(self.path[0], None)


def place_of_key(given: object) -> KeyPlace:
    """Return the place that `key_at` declares. Raises `UsageError` if it is not a path."""
    steps: Sequence[str] = ()
    if isinstance(given, str):
        steps = given.split(".")
    if not steps or not all(_STEP.fullmatch(step) for step in steps):
        raise UsageError(
            f"key_at={given!r} is not a place of a key.",
            "it is a path of names, with dots between them",
            'use key_at="meta.idempotency-key"',
        )
    if steps[0] in ("_meta", "idempotency_key"):
        raise UsageError(
            f"key_at={given!r} cannot be the place of a key.",
            f"{steps[0]} belongs to the protocol, and its keys are read without it",
            "drop key_at",
        )
    return KeyPlace(tuple(steps))


def with_key(schema: JsonObject, place: KeyPlace, key: JsonObject, *, required: bool) -> JsonObject:
    """Return the schema of params with the key at its place."""
    return _with_key(schema, place.path, {**key, MARK: True}, required)


def _with_key(
    schema: JsonObject, path: Sequence[str], key: JsonObject, required: bool
) -> JsonObject:
    name, *rest = path
    declared = schema.get("properties", {}).get(name)
    made = key
    if rest:
        only_for_key = {"type": "object", MARK: True}
        if not isinstance(declared, dict):
            made = _with_key(only_for_key, rest, key, required)
        elif "$ref" in declared:
            made = {"allOf": [declared, _with_key(only_for_key, rest, key, required)]}
        else:
            made = _with_key(declared, rest, key, required)
    whole = {**schema, "properties": {**schema.get("properties", {}), name: made}}
    needed = list(schema.get("required", ()))
    if required and name not in needed:
        needed.append(name)
    if needed or "required" in schema:
        whole["required"] = needed
    return whole


def with_optional_key(schema: JsonObject) -> JsonObject:
    """Return the schema of params in which a key that is marked may be omitted."""
    properties = schema.get("properties")
    whole = dict(schema)
    if isinstance(schema.get("allOf"), list):
        whole["allOf"] = [with_optional_key(part) for part in schema["allOf"]]
    if not isinstance(properties, dict):
        return whole
    kept = {}
    ours = set[str]()
    for name, declared in properties.items():
        kept[name] = declared
        if isinstance(declared, dict):
            kept[name] = with_optional_key(declared)
            if declared.get(MARK):
                ours.add(name)
    whole["properties"] = kept
    needed = [name for name in schema.get("required", ()) if name not in ours]
    whole.pop("required", None)
    if needed:
        whole["required"] = needed
    return whole


def without_key(schema: JsonObject) -> JsonObject:
    """Return the schema of params without a key that is marked, or an object that only it needs."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return schema
    kept = {}
    for name, declared in properties.items():
        if not isinstance(declared, dict):
            kept[name] = declared
        elif not declared.get(MARK):
            kept[name] = _declared(declared)
    needed = [name for name in schema.get("required", ()) if name in kept or name not in properties]
    return {**schema, "properties": kept, **({"required": needed} if "required" in schema else {})}


def _declared(schema: JsonObject) -> JsonObject:
    """Return the schema of a member as the function declares it, without the key inside it."""
    parts = schema.get("allOf")
    if isinstance(parts, list):
        others = [part for part in parts if not (isinstance(part, dict) and part.get(MARK))]
        if len(others) == 1 < len(parts) and isinstance(others[0], dict):
            rest = {name: value for name, value in schema.items() if name != "allOf"}
            return {**others[0], **rest}
    bare = without_key(schema)
    # A type whose members are not named was given `properties` for the key alone.
    if schema.get("properties") and not bare["properties"]:
        del bare["properties"]
        if not bare.get("required"):
            bare.pop("required", None)
    return bare


def marked_path(schema: object, depth: int = 8) -> tuple[str, ...]:
    """Return the path to the key in the published schema of params; () if none is marked."""
    if not isinstance(schema, dict) or depth == 0:
        return ()
    parts = schema.get("allOf")
    if isinstance(parts, list):
        for part in parts:
            path = marked_path(part, depth - 1)
            if path:
                return path
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return ()
    for name, member in properties.items():
        path = marked_path(member, depth - 1)
        if path:
            return (name, *path)
        if isinstance(member, dict) and member.get(MARK):
            return (name,)
    return ()


def own_key(params: object, path: Sequence[str] = ()) -> str | None:
    """Return the key that a caller, or a model, put among the params; None if there is none.

    It is at the usual place, or at the path that the server declares. With another key beside it,
    the server would refuse the call.
    """
    if not isinstance(params, dict):
        return None
    key = params.get(_USUAL)
    if key is None and path:
        key = params
        for name in path:
            if not isinstance(key, dict):
                return None
            key = key.get(name)
    if isinstance(key, str):
        return key
    return None


def may_have_key(params: JsonObject) -> bool:
    """Return whether params may have a key at a place that only the schema names. It is quick."""
    for name, value in params.items():
        if type(value) is dict or (type(name) is str and "idempotency" in name):
            return True
    return False


def likely_key(params: object, depth: int = 4) -> str | None:
    """Return a string among the params whose name says that it is a key; None if there is none.

    It is the key only if the server declares so: it may also be data that is passed on.
    """
    if not isinstance(params, dict) or depth == 0:
        return None
    for name, value in params.items():
        if isinstance(value, str) and isinstance(name, str) and "idempotency" in name.lower():
            return value
        inner = likely_key(value, depth - 1)
        if inner is not None:
            return inner
    return None
