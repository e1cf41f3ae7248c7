"""The arguments of a call, as they are typed:

    name=text       a text; a number, a list, ... where the method's schema says so
    name:=JSON      a value as JSON
    name=@file      the text of a file            name:=@file     the JSON in a file
    a.b=1           a member of a member          tag[]=x         an entry of a list
    --args JSON     the whole object; also @file, and - for standard input; single arguments go on top of it

What does not fit the schema is told here, before anything is sent.
"""

import re
from pathlib import Path
from typing import Any

from wirecall.cli.exits import Exit
from wirecall.cli.failures import Failure, nearest
from wirecall.cli.output import stdin
from wirecall.cli.schemas import Misfit, Schema, check, read, resolved, words
from wirecall.protocol.messages import decode_value

_WORD = re.compile(r"(?P<path>[^=:]+?)(?P<sign>:=|=)(?P<value>.*)", re.DOTALL)
_ANY: Schema = {}
SHOWN = 60  # characters of what is not JSON


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
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
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
