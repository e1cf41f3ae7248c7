"""The registered methods as an OpenRPC document, which `rpc.discover` answers (J16)."""

import re
from collections.abc import Iterable

from wirecall.protocol.messages import Json, JsonObject
from wirecall.protocol.params import KEY
from wirecall.server.method import Method, Mode
from wirecall.server.policy import needs_key

VERSION = "1.3.2"

KEY_PARAM = {
    "name": KEY,
    "summary": "One value per intent: a retry sends the same value, another command another one.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}


def document(name: str, version: str, registry: Iterable[Method], mode: Mode) -> JsonObject:
    """Return an OpenRPC document; members that the format does not know have names that begin with `x-`."""
    methods = [method for method in registry if not method.name.startswith("rpc.")]
    schemas: JsonObject = {}
    for method in methods:
        # Two methods may mean two types by one name, so the method's name goes in front. So may the params and the result
        # of one method, and then the types of the result have names of their own.
        taken, given = (schema.get("$defs", {}) for schema in (method.signature.schema, method.signature.result_schema))
        schemas |= {_component(method, each): _placed(schema, method) for each, schema in taken.items()}
        schemas |= {_component(method, each, given): _placed(schema, method, given) for each, schema in given.items()}
    return {
        "openrpc": VERSION,
        "info": {"title": name, "version": version},
        "methods": [_describe(method, mode) for method in methods],
        **({"components": {"schemas": schemas}} if schemas else {}),
    }


def _describe(method: Method, mode: Mode) -> JsonObject:
    schema, result = method.signature.schema, method.signature.result_schema
    params: list[JsonObject] = [
        {"name": name, "required": name in schema["required"], "schema": _placed(described, method)}
        for name, described in schema["properties"].items()
    ]
    if method.is_command and not method.signature.takes_key:
        params.append({**KEY_PARAM, "required": needs_key(method, mode)})
    texts = {"summary": method.title, "description": method.description}
    hints = {"x-destructive": method.destructive, "x-idempotent": method.idempotent, "x-open-world": method.open_world}
    return {
        "name": method.name,
        **{name: text for name, text in texts.items() if text},
        **({"tags": [{"name": tag} for tag in method.tags]} if method.tags else {}),
        "params": params,
        "paramStructure": "by-name" if any(p.kind == "name" for p in method.signature.parameters) else "either",
        "result": {"name": "result", "schema": _placed(result, method, result.get("$defs", {}))},
        "x-kind": method.kind.value,
        "x-notification-allowed": method.notification_allowed,
        **{name: hint for name, hint in hints.items() if hint is not None},
    }


def _component(method: Method, name: str, given: JsonObject | None = None) -> str:
    """Return the name of a component, in the few characters that OpenRPC allows. For a definition of the result, `given` are
    all of the result's definitions."""
    taken = method.signature.schema.get("$defs", {})
    is_other = given is not None and any(taken[name] != given[name] for name in taken.keys() & given.keys())
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{method.name}.{'result.' if is_other else ''}{name}")


def _placed(schema: Json, method: Method, given: JsonObject | None = None) -> Json:
    """Return a schema whose references point into the document's components."""
    if isinstance(schema, list):
        return [_placed(item, method, given) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _placed(item, method, given) for name, item in schema.items() if name != "$defs"}
    discriminator = moved.get("discriminator")
    if isinstance(discriminator, dict) and isinstance(discriminator.get("mapping"), dict):  # references without `$ref`
        mapping = {tag: _placed({"$ref": place}, method, given) for tag, place in discriminator["mapping"].items()}
        moved["discriminator"] = {**discriminator, "mapping": {tag: found["$ref"] for tag, found in mapping.items()}}
    reference = moved.get("$ref")
    if isinstance(reference, str):
        moved["$ref"] = f"#/components/schemas/{_component(method, reference.removeprefix('#/$defs/'), given)}"
    return moved
