"""The registered methods as an OpenRPC document, which `rpc.discover` answers (J16)."""

import re
from collections.abc import Mapping
from typing import Any

from wirecall.protocol.params import KEY
from wirecall.server.method import Method, Registry

VERSION = "1.3.2"

KEY_PARAM = {
    "name": KEY,
    "summary": "One value per intent: a retry sends the same value, another command another one.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}


def document(name: str, version: str, registry: Registry, mode: str) -> dict[str, Any]:
    """An OpenRPC document; what the format has no word for stands under names that begin with `x-`."""
    methods = [method for method in registry if not method.name.startswith("rpc.")]
    schemas = {key: schema for method in methods for key, schema in _components(method).items()}
    return {
        "openrpc": VERSION,
        "info": {"title": name, "version": version},
        "methods": [_describe(method, mode) for method in methods],
        **({"components": {"schemas": schemas}} if schemas else {}),
    }


def _describe(method: Method, mode: str) -> dict[str, Any]:
    texts = {"summary": method.title, "description": method.description}
    result = method.signature.result_schema
    return {
        "name": method.name,
        **{name: text for name, text in texts.items() if text},
        "params": _params(method, mode),
        "paramStructure": "by-name" if any(p.kind == "name" for p in method.signature.parameters) else "either",
        "result": {"name": "result", "schema": _placed(result, method, result.get("$defs", {}))},
        "x-kind": method.kind.value,
        "x-notification-allowed": method.notification_allowed,
        **_hints(method),
    }


def _hints(method: Method) -> dict[str, bool]:
    """What a method says about its effects, where it says something."""
    stated = {"x-destructive": method.destructive, "x-idempotent": method.idempotent, "x-open-world": method.open_world}
    return {name: value for name, value in stated.items() if value is not None}


def _params(method: Method, mode: str) -> list[dict[str, Any]]:
    schema = method.signature.schema
    params: list[dict[str, Any]] = [
        {"name": name, "required": name in schema["required"], "schema": _placed(described, method)}
        for name, described in schema["properties"].items()
    ]
    if method.is_command and not method.signature.takes_key:
        params.append({**KEY_PARAM, "required": mode == "production" or method.key != "optional"})
    return params


def _components(method: Method) -> dict[str, Any]:
    """The types a method names. Two methods may mean two types by one name, so the method's name goes in front; so may the
    params and the result of one method, and then those of the result have names of their own."""
    signature = method.signature
    taken = {_component(method, name): _placed(s, method) for name, s in signature.schema.get("$defs", {}).items()}
    given = signature.result_schema.get("$defs", {})
    return taken | {_component(method, name, given): _placed(s, method, given) for name, s in given.items()}


def _component(method: Method, name: str, given: Mapping[str, Any] | None = None) -> str:
    """The name of a component; OpenRPC allows few characters in it. `given` are the definitions of the result, if it is one
    of theirs."""
    taken = method.signature.schema.get("$defs", {})
    is_other = given is not None and any(taken[name] != given[name] for name in taken.keys() & given.keys())
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{method.name}.{'result.' if is_other else ''}{name}")


def _placed(schema: Any, method: Method, given: Mapping[str, Any] | None = None) -> Any:
    """A schema with its references pointing into the document's components."""
    if isinstance(schema, list):
        return [_placed(item, method, given) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _placed(item, method, given) for name, item in schema.items() if name != "$defs"}
    reference = moved.get("$ref")
    if isinstance(reference, str):
        moved["$ref"] = f"#/components/schemas/{_component(method, reference.removeprefix('#/$defs/'), given)}"
    return moved
