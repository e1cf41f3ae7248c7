"""JSON Schema as far as a command line needs it: say it in words, read a text by it, find what does not fit.

Only what can be told for certain is refused: types, choices, missing and unknown members. Anything else (patterns, ranges,
formats, schemas that lie elsewhere) is the server's to judge. Nothing is ever fetched.
"""

from typing import Any

from wirecall.protocol.messages import decode_value, encode

Schema = dict[str, Any]
DEPTH = 40  # of references that lead to references
SHOWN = 4  # levels of a schema that are put into words

_WORDS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


class Misfit(Exception):
    """A value that its schema does not admit: where, what is expected, what came."""

    def __init__(self, where: str, expected: str, got: str) -> None:
        super().__init__(f"{where} must be {expected}; got {got}")
        self.where = where
        self.expected = expected
        self.got = got


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema that a reference within the same document leads to; what leads elsewhere admits anything."""
    for _ in range(DEPTH):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        schema = _at(root, schema["$ref"])
    return schema if isinstance(schema, dict) and "$ref" not in schema else {}


def _at(root: Any, reference: str) -> Any:
    if not reference.startswith("#/"):
        return {}
    for step in reference[2:].split("/"):
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def kinds(schema: Schema) -> list[str]:
    """The types that a schema names; none: any."""
    named = schema.get("type")
    found = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return [kind for kind in found if kind in _WORDS]


def choices(schema: Schema) -> "list[Any] | None":
    """The values that are admitted, where they are told one by one."""
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def branches(schema: Schema, root: Schema) -> list[Schema]:
    """The alternatives of a schema; none: it is what it says."""
    listed = schema.get("anyOf") or schema.get("oneOf")
    return [resolved(each, root) for each in listed] if isinstance(listed, list) else []


def words(schema: Any, root: Schema, depth: int = 0) -> str:
    """What a schema admits, for people; of what lies deep inside of it they do not want to know."""
    schema = resolved(schema, root) if depth < SHOWN else {}
    if (listed := choices(schema)) is not None:
        shown = ", ".join(each if isinstance(each, str) else encode(each).decode() for each in listed)
        return shown if len(listed) == 1 else f"one of {shown}"
    if parts := branches(schema, root):
        return " or ".join(dict.fromkeys(words(part, root, depth + 1) for part in parts))
    found = [_WORDS[kind] for kind in kinds(schema)]
    if found == ["a list"] and "items" in schema:
        inner = words(schema["items"], root, depth + 1)
        return f"a list of {inner.removeprefix('a ').removeprefix('an ')}"
    return " or ".join(found) or "anything"


# --- reading a text -------------------------------------------------------------------------------------------------


def read(text: str, schema: Any, root: Schema, where: str) -> Any:
    """The value that a text on the command line stands for."""
    schema = resolved(schema, root)
    if (listed := choices(schema)) is not None:
        return _chosen(text, listed, schema, root, where)
    if parts := branches(schema, root):
        return _first(text, parts, root, where, words(schema, root))
    found = kinds(schema)
    if not found:
        return text
    if len(found) == 1:
        return _plain(text, found[0], schema, root, where)
    return _first(text, [{**schema, "type": kind} for kind in found], root, where, words(schema, root))


def _chosen(text: str, listed: list[Any], schema: Schema, root: Schema, where: str) -> Any:
    for value in listed:
        if text == (value if isinstance(value, str) else encode(value).decode()):
            return value
    raise Misfit(where, words(schema, root), f'"{text}"')


def _first(text: str, parts: list[Schema], root: Schema, where: str, expected: str) -> Any:
    """The first alternative that the text fits. A text fits any text, so that one is asked last."""
    for part in sorted(parts, key=lambda part: kinds(part) in ([], ["string"]) and choices(part) is None):
        try:
            return read(text, part, root, where)
        except Misfit:
            continue
    raise Misfit(where, expected, f'"{text}"')


def _plain(text: str, kind: str, schema: Schema, root: Schema, where: str) -> Any:
    if kind == "string":
        return text
    value = _json(text)
    if not _is(value, kind):
        raise Misfit(where, _WORDS[kind], f'"{text}"')
    check(value, schema, root, where)
    return int(value) if kind == "integer" else value  # 1e3 is a whole number, but not to every server


def _json(text: str) -> Any:
    """JSON, or what is none: the text itself, which then fits no other type. +5 and 007 are none, as in JSON."""
    try:
        return decode_value(text.strip().encode())
    except (ValueError, RecursionError):
        return text


# --- checking a value -----------------------------------------------------------------------------------------------


def check(value: Any, schema: Any, root: Schema, where: str) -> None:
    """Raise the first `Misfit` of a value."""
    schema = resolved(schema, root)
    listed = choices(schema)
    if listed is not None and not any(value == each and type(value) is type(each) for each in listed):
        raise Misfit(where, words(schema, root), _shown(value))
    if (parts := branches(schema, root)) and not any(_fits(value, part, root, where) for part in parts):
        raise Misfit(where, words(schema, root), _shown(value))
    found = kinds(schema)
    if found and not any(_is(value, kind) for kind in found):
        raise Misfit(where, words(schema, root), _shown(value))
    if isinstance(value, dict):
        _check_members(value, schema, root, where)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for at, item in enumerate(value):
            check(item, schema["items"], root, f"{where}[{at}]")


def _check_members(value: dict[str, Any], schema: Schema, root: Schema, where: str) -> None:
    properties: dict[str, Any] = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
    for name, item in value.items():
        expected = properties.get(name, schema.get("additionalProperties"))
        if isinstance(expected, dict):
            check(item, expected, root, f"{where}.{name}" if where else name)
    for name in schema.get("required") or ():
        if name not in value:
            raise Misfit(f"{where}.{name}" if where else name, words(properties.get(name, {}), root), "nothing")


def _fits(value: Any, schema: Schema, root: Schema, where: str) -> bool:
    try:
        check(value, schema, root, where)
    except Misfit:
        return False
    return True


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()  # JSON Schema: 1.0 is an integer
    return isinstance(value, _KINDS[kind])


def _shown(value: Any) -> str:
    text = encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."
