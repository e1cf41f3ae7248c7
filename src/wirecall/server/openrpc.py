"""The registered methods as an OpenRPC document, which `rpc.discover` answers (J16)."""

import re
from collections.abc import Iterable
from typing import get_args

from wirecall.protocol.keys import ONLY_FOR_KEY, KeyPlace, with_key
from wirecall.protocol.messages import Json, JsonObject
from wirecall.protocol.params import KEY
from wirecall.server.method import Method, Mode
from wirecall.server.policy import needs_key

VERSION = "1.3.2"

KEY_PARAM: JsonObject = {
    "name": KEY,
    "summary": "One value per intent: a retry sends the same value, another command another one.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}


def document(name: str, version: str, registry: Iterable[Method], mode: Mode) -> JsonObject:
    """Return an OpenRPC document; the names of members outside the format begin with `x-`."""
    methods = [method for method in registry if not method.name.startswith("rpc.")]
    schemas: JsonObject = {}
    for method in methods:
        # Two methods may use one name for two types, so the method's name is the prefix. The params
        # and the result of one method may too, and then the types of the result get different
        # names.
        taken, given = (
            schema.get("$defs", {})
            for schema in (method.signature.schema, method.signature.result_schema)
        )
        schemas |= {
            _component(method, each): _placed(schema, method) for each, schema in taken.items()
        }
        schemas |= {
            _component(method, each, given): _placed(schema, method, given)
            for each, schema in given.items()
        }
    whole: JsonObject = {
        "openrpc": VERSION,
        "info": {"title": name, "version": version},
        "methods": [_describe(method, mode) for method in methods],
    }
    if schemas:
        whole["components"] = {"schemas": schemas}
    return whole


def _describe(method: Method, mode: Mode) -> JsonObject:
    schema = method.signature.schema
    result = method.signature.result_schema
    params: list[JsonObject] = [
        {"name": name, "required": name in schema["required"], "schema": _placed(described, method)}
        for name, described in schema["properties"].items()
    ]
    is_required = needs_key(method, mode)
    if method.key_place is not None:
        # The key is required at one of both places.
        _place_key(params, method.key_place, required=is_required)
        is_required = False
    if method.is_command and not method.signature.takes_key:
        params.append({**KEY_PARAM, "required": is_required})
    about: JsonObject = {
        "summary": method.title,
        "description": method.description,
        "tags": [{"name": tag} for tag in method.tags],
    }
    structure = "either"
    if any(p.kind == "name" for p in method.signature.parameters):
        structure = "by-name"
    hints: JsonObject = {
        "x-destructive": method.destructive,
        "x-idempotent": method.idempotent,
        "x-open-world": method.open_world,
    }
    if method.is_command:
        hints["x-key-required"] = [each for each in get_args(Mode) if needs_key(method, each)]
    return {
        "name": method.name,
        **{name: value for name, value in about.items() if value},
        "params": params,
        "paramStructure": structure,
        "result": {"name": "result", "schema": _placed(result, method, result.get("$defs", {}))},
        "x-kind": method.kind.value,
        "x-notification-allowed": method.notification_allowed,
        **{name: hint for name, hint in hints.items() if hint is not None},
    }


def _place_key(params: list[JsonObject], place: KeyPlace, *, required: bool) -> None:
    """Add the place of the key to the params of a method."""
    name = place.path[0]
    described = next((param for param in params if param["name"] == name), None)
    if described is None:
        described = {"name": name, "required": False, "schema": {}}
        params.append(described)
    schema = {"properties": {name: described["schema"]}}
    if not described["schema"]:
        schema = {"properties": {}}
    whole = with_key(schema, place, {**KEY_PARAM["schema"]}, required=required)
    described["schema"] = whole["properties"][name]
    if required and not described["required"]:
        described["required"] = True
        described[ONLY_FOR_KEY] = True


def _component(method: Method, name: str, given: JsonObject | None = None) -> str:
    """Return the name of a component, in the characters that OpenRPC allows.

    For a definition of the result, `given` are all of the result's definitions.
    """
    taken = method.signature.schema.get("$defs", {})
    prefix = f"{method.name}."
    if given is not None and any(
        taken[each] != given[each] for each in taken.keys() & given.keys()
    ):
        prefix += "result."
    return re.sub(r"[^A-Za-z0-9._-]", "_", prefix + name)


def _placed(schema: Json, method: Method, given: JsonObject | None = None) -> Json:
    """Return a schema whose references point into the document's components."""
    if isinstance(schema, list):
        return [_placed(item, method, given) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _placed(item, method, given) for name, item in schema.items() if name != "$defs"}
    discriminator = moved.get("discriminator")
    # References without `$ref`.
    if isinstance(discriminator, dict) and isinstance(discriminator.get("mapping"), dict):
        mapping = {
            tag: _placed({"$ref": place}, method, given)
            for tag, place in discriminator["mapping"].items()
        }
        moved["discriminator"] = {
            **discriminator,
            "mapping": {tag: found["$ref"] for tag, found in mapping.items()},
        }
    reference = moved.get("$ref")
    if isinstance(reference, str):
        moved["$ref"] = (
            f"#/components/schemas/{_component(method, reference.removeprefix('#/$defs/'), given)}"
        )
    return moved
