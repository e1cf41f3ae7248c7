"""The arguments of a call, as they are typed:

    name=text       a text; a number, a list, ... where the method's schema says so
    name:=JSON      a value as JSON
    name=@file      the text of a file            name:=@file     the JSON in a file
    a.b=1           a member of a member          tag[]=x         an entry of a list
    --args JSON     the whole object; also @file, and - for standard input; single arguments go on top of it

What does not fit the schema is told here, before anything is sent.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from wirecall.cli.failures import Exit, Failure, nearest
from wirecall.cli.output import stdin
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
    value: Any = text  # a text that is not JSON fits no other type; +5 and 007 are not JSON
    with suppress(ValueError, RecursionError):
        value = decode_value(text.strip().encode())
    if not _is(value, kind):
        raise Misfit(where, _WORDS[kind], f'"{text}"')
    check(value, schema, root, where)
    return int(value) if kind == "integer" else value  # 1e3 is a whole number, but not to every server


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


_WORD = re.compile(r"(?P<path>[^=:]+?)(?P<sign>:=|=)(?P<value>.*)", re.DOTALL)
_ANY: Schema = {}
QUOTED = 60  # characters of what is not JSON


def arguments(given: tuple[str, ...], whole: str | None, schema: Schema | None, *, help: str) -> Any:
    """The params of a call. Without a schema texts stay texts. `help` is the command that explains the method."""
    params = _whole(whole) if whole is not None else {}
    if isinstance(params, list):
        if given:
            raise Failure("Params by position and by name.", "--args is a list", "give all of them in --args")
        return params  # which is which only the server knows
    _refuse_doubled(given)
    try:
        for word in given:
            _put(params, _utf8(word), schema or _ANY)
        if schema is not None:
            _refuse_unknown(params, schema, help)
            check(params, schema, schema, "")
    except Misfit as error:
        raise _told(error, help) from None
    except RecursionError:
        why = "it refers to itself without an end"
        raise Failure("The method's schema cannot be followed.", why, help, exit=Exit.PROTOCOL, type="schema") from None
    return params


def _whole(text: str) -> Any:
    source = stdin().read() if text == "-" else _file(text[1:]) if text.startswith("@") else _utf8(text).encode()
    params = _json(source, "--args")
    if not isinstance(params, dict | list):
        raise Failure(
            "--args is not an object.", f"it is {type(params).__name__}", """--args '{"name": "value"}'""", type="params"
        )
    return params


def _put(params: dict[str, Any], word: str, schema: Schema) -> None:
    match = _WORD.fullmatch(word)
    if match is None:
        why = "there is no name in front of =" if "=" in word else "there is no = in it"
        raise Failure(f"{word!r} is not an argument.", why, "name=text, or name:=JSON", type="params")
    steps = match["path"].split(".")
    is_item = steps[-1].endswith("[]")
    steps[-1] = steps[-1].removesuffix("[]")
    place, expected = _place(params, steps, schema, word)
    if is_item:
        expected = resolved(expected, schema).get("items", _ANY)
        place.setdefault(steps[-1], []).append(_value(match, expected, schema))
    else:
        place[steps[-1]] = _value(match, expected, schema)


def _place(params: dict[str, Any], steps: list[str], root: Schema, word: str) -> tuple[dict[str, Any], Any]:
    """The object that an argument goes into, and the schema of the member."""
    schema: Any = root
    for step in steps[:-1]:
        schema = _member(schema, step, root)
        params = params.setdefault(step, {})
        if not isinstance(params, dict):
            raise Failure(f"{word!r} does not fit.", f"{step} has a value already", "give it once", type="params")
    return params, _member(schema, steps[-1], root)


def _member(schema: Any, name: str, root: Schema) -> Any:
    schema = resolved(schema, root)
    for part in (schema, *(resolved(each, root) for each in schema.get("anyOf") or ())):
        properties = part.get("properties")
        if isinstance(properties, dict) and name in properties:
            return properties[name]
        if isinstance(part.get("additionalProperties"), dict):
            return part["additionalProperties"]
    return _ANY


def _value(match: "re.Match[str]", expected: Any, root: Schema) -> Any:
    path, text = match["path"], match["value"]
    if match["sign"] == ":=":
        return _json(_file(text[1:]) if text.startswith("@") else text.encode(), path)
    if text.startswith("@"):
        text = _text(_file(text[1:]), text[1:])
    return read(text, expected, root, path)


def _json(data: bytes, name: str) -> Any:
    try:
        return decode_value(data)
    except (ValueError, RecursionError) as error:
        next = """--args '{"name": "value"}'""" if name == "--args" else f"{name}=text for a text, {name}:=JSON for JSON"
        raise Failure(f"{name} is not JSON.", _fault(data, error), next, type="params") from None


def _fault(data: bytes, error: Exception) -> str:
    if not data.strip():
        return "there is nothing in it"
    try:
        shown = data.decode()
    except UnicodeDecodeError:
        return "it is not UTF-8"
    shown = shown if len(shown) <= QUOTED else f"{shown[:QUOTED]}..."
    if shown[0].isalpha():
        return f'a text in JSON has quotes: "{shown}"'
    return f"{shown} is not complete" if "truncated" in str(error) else f"{shown}: {error}"


def _utf8(word: str) -> str:
    """A word of the command line, whose bytes may have come through a locale that is not UTF-8."""
    try:
        return word.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise Failure(f"{word!r} is not UTF-8.", "JSON is", "give it as JSON: name:='\"\\u00e9\"'", type="params") from None


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise Failure(
            f"{path} cannot be read.", error.strerror or str(error), "give the path of a file after @", type="params"
        ) from None


def _text(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise Failure(
            f"{path} is not text.", "it is not UTF-8", "arguments are JSON: encode it first", type="params"
        ) from None


# --- what is wrong --------------------------------------------------------------------------------------------------


def _refuse_doubled(words: tuple[str, ...]) -> None:
    paths = [match["path"] for word in words if (match := _WORD.fullmatch(word)) and not match["path"].endswith("[]")]
    if doubled := next((path for path in paths if paths.count(path) > 1), None):
        next_step = f"give it once, or {doubled}[]=... for each entry of a list"
        raise Failure(f"{doubled} is given twice.", "only one of them can be meant", next_step, type="params", field=doubled)


def _refuse_unknown(params: dict[str, Any], schema: Schema, help: str) -> None:
    if schema.get("additionalProperties") is not False:
        return
    names = schema.get("properties") or {}
    for name in params:
        if name not in names:
            near = nearest(name, names)
            why = f"did you mean {near}?" if near else f"there are {', '.join(names)}" if names else "it takes none"
            raise Failure(f"There is no argument {name!r}.", why, help, type="params", field=name)


def _told(error: Misfit, help: str) -> Failure:
    if error.got == "nothing":
        return Failure(
            f"{error.where} is missing.",
            f"it must be {error.expected}",
            f"add {error.where}=..., see: {help}",
            type="params",
            field=error.where,
        )
    return Failure(
        f"{error.where or 'the value'} must be {error.expected}.", f"got {error.got}", help, type="params", field=error.where
    )


def example(schema: Schema) -> str:
    """The required arguments, ready to be filled in."""
    properties = schema.get("properties") or {}
    return " ".join(f"{name}=..." for name in schema.get("required") or () if name in properties)


def described(schema: Schema) -> list[tuple[str, str, str]]:
    """Name, type and remarks of every argument."""
    required = schema.get("required") or ()
    rows = []
    for name, member in (schema.get("properties") or {}).items():
        inner = resolved(member, schema)
        default = inner.get("default")
        remark = "required" if name in required else f"default {default!r}" if default is not None else "optional"
        text = inner.get("description") or (member.get("description") if isinstance(member, dict) else "") or ""
        rows.append((name, words(member, schema), f"{remark}{'  ' if text else ''}{' '.join(str(text).split())}"))
    return rows
