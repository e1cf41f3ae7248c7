"""The arguments that a user types, checked against a schema before anything is sent.

name=text       a string; a number, a list, ... if the method's schema says so
name:=JSON      a value as JSON
name=@file      a file as a string            name:=@file     the JSON in a file
a.b=1           a member of a member          tag[]=x         an entry of a list
--args JSON     the whole object; also @file, and - for standard input;
                single arguments are added to it
"""

import re
import shlex
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from wirecall.cli.failures import CliError, Exit, no_such
from wirecall.cli.terminal import stdin
from wirecall.contract.lock import listed as choices
from wirecall.contract.lock import members, required
from wirecall.contract.lock import resolved as followed
from wirecall.protocol.keys import likely_key
from wirecall.protocol.messages import JsonObject, decode_value, encode
from wirecall.protocol.schemas import DECIMAL

Schema = JsonObject
# References that lead to references.
DEPTH = 40
# Levels of a schema that are put into words.
SHOWN = 4
# Characters of a value that an error quotes.
QUOTED = 60

# The types of JSON Schema: in words, and in Python.
_TYPES: dict[str, tuple[str, tuple[type, ...]]] = {
    "string": ("text", (str,)),
    "integer": ("a whole number", (int,)),
    "number": ("a number", (int, float)),
    "boolean": ("true or false", (bool,)),
    "null": ("null", (type(None),)),
    "array": ("a list", (list,)),
    "object": ("an object", (dict,)),
}

_SEVERAL = {
    "a whole number": "whole numbers",
    "a number": "numbers",
    "a list": "lists",
    "an object": "objects",
}


class Misfit(Exception):
    """A value that its schema does not admit: its place, the expected type, the given value."""


# --- reading a schema -----------------------------------------------------------------------------


def resolved(schema: object, root: Schema) -> Schema:
    """Follow references inside the same document.

    A reference to another document admits anything.
    """
    for _ in range(DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = followed(schema, root)
    if not isinstance(schema, dict) or "$ref" in schema:
        return {}
    return schema


def kinds(schema: Schema) -> list[str]:
    """Return the types that a schema names; an empty list means any type."""
    named = schema.get("type")
    if isinstance(named, str):
        named = [named]
    if not isinstance(named, list):
        return []
    return [kind for kind in named if kind in _TYPES]


def branches(schema: Schema, root: Schema) -> list[Schema]:
    """Return the alternatives of a schema; an empty list means that it has none."""
    listed = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(listed, list):
        return []
    return [resolved(each, root) for each in listed]


def _typed(choice: object) -> str:
    """Return a value that a schema lists as a user types it."""
    if isinstance(choice, str):
        return choice
    return encode(choice).decode()


def words(schema: object, root: Schema, depth: int = 0) -> str:
    """Describe the values that a schema admits, for people; `SHOWN` levels deep."""
    found = resolved(schema, root) if depth < SHOWN else {}
    if (listed := choices(found)) is not None:
        shown = ", ".join(map(_typed, listed))
        if len(listed) == 1:
            return shown
        return f"one of {shown}"
    if parts := branches(found, root):
        return " or ".join(dict.fromkeys(words(part, root, depth + 1) for part in parts))
    names = [_TYPES[kind][0] for kind in kinds(found)]
    if names == ["a list"] and "items" in found:
        inner = words(found["items"], root, depth + 1)
        return f"a list of {_plural(inner)}"
    return " or ".join(names) or "anything"


def _plural(shown: str) -> str:
    """Return the words for several of the values that `words` describes."""
    if " or " in shown:
        return shown
    for one, many in _SEVERAL.items():
        if shown.startswith(one):
            return many + shown.removeprefix(one)
    return shown


def limits(schema: object, root: Schema) -> str:
    """Return the format, the pattern and the limits of a value in words, after a comma."""
    found = resolved(schema, root)
    parts = [part for part in branches(found, root) if kinds(part) != ["null"]]
    if len(parts) == 1:
        found = parts[0]
    stated = []
    if found.get("contentEncoding") == "base64":
        stated.append("base64")
    elif found.get("pattern") == DECIMAL:
        stated.append("decimal")
    else:
        stated += [str(found[word]) for word in ("format",) if word in found]
        stated += [f"matches {found[word]}" for word in ("pattern",) if word in found]
    for least, most, unit in _SIZES:
        stated += _range(found.get(least), found.get(most), unit)
    if "exclusiveMinimum" in found:
        stated.append(f"above {found['exclusiveMinimum']}")
    if "exclusiveMaximum" in found:
        stated.append(f"below {found['exclusiveMaximum']}")
    if "multipleOf" in found:
        stated.append(f"a multiple of {found['multipleOf']}")
    return "".join(f", {each}" for each in stated)


# The limits of a number, of a string, of a list and of an object.
_SIZES = (
    ("minimum", "maximum", ""),
    ("minLength", "maxLength", " characters"),
    ("minItems", "maxItems", " entries"),
    ("minProperties", "maxProperties", " members"),
)


def _range(least: object, most: object, unit: str) -> list[str]:
    """Return two limits in words; an empty list if there are none."""
    if least is not None and most is not None:
        return [f"{least} to {most}{unit}"]
    if least is not None:
        return [f"at least {least}{unit}"]
    if most is not None:
        return [f"at most {most}{unit}"]
    return []


def example(schema: Schema) -> str:
    """Return the required arguments as placeholders."""
    return " ".join(f"{name}=..." for name in members(schema) if name in required(schema))


def described(
    schema: Any, whole: Schema | None = None, depth: int = 0
) -> list[tuple[str, str, str]]:
    """Return name, type and remarks of every argument, and indented those of its members."""
    root = schema if whole is None else whole
    found = resolved(schema, root)
    if parts := [part for part in branches(found, root) if kinds(part) in (["object"], ["array"])]:
        return _described_parts(parts, root, depth)
    if depth >= SHOWN:
        return []
    if kinds(found) == ["array"]:
        return described(found.get("items"), root, depth)
    rows = []
    indent = "  " * depth
    stated = members(found)
    for name, member in stated.items():
        remark = _remark(member, root, is_needed=name in required(found))
        rows.append((indent + name, words(member, root) + limits(member, root), remark))
        rows += described(member, root, depth + 1)
    rest = found.get("additionalProperties")
    if isinstance(rest, dict) and (rest or not stated):
        rows.append((f"{indent}*", words(rest, root), "any name"))
        rows += described(rest, root, depth + 1)
    return rows


def _described_parts(parts: list[Schema], root: Schema, depth: int) -> list[tuple[str, str, str]]:
    """Return the rows of alternatives; several are numbered, and indented below their number."""
    if len(parts) == 1:
        return described(parts[0], root, depth)
    rows = []
    for at, part in enumerate(parts, 1):
        inside = described(part, root, depth + 1)
        if inside:
            rows.append(("  " * depth + f"({at})", words(part, root), ""))
        rows += inside
    return rows


def _remark(member: Any, root: Schema, *, is_needed: bool) -> str:
    """Return whether an argument is required, or its default, and then its description."""
    stated = dict(resolved(member, root))
    if isinstance(member, dict):
        # Beside a reference to a type, they say more than the type.
        stated |= {name: member[name] for name in ("default", "description") if name in member}
    remark = "optional"
    if is_needed:
        remark = "required"
    elif stated.get("default") is not None:
        remark = f"default {stated['default']!r}"
    if text := stated.get("description"):
        remark += f"  {' '.join(str(text).split())}"
    return remark


# --- values ---------------------------------------------------------------------------------------


def read(text: str, schema: object, root: Schema, where: str) -> Any:
    """Convert a string from the command line to the value that the schema expects."""
    found = resolved(schema, root)
    misfit = Misfit(where, words(found, root), f'"{text}"')
    if (listed := choices(found)) is not None:
        for choice in listed:
            if text == _typed(choice):
                return choice
        raise misfit
    names = kinds(found)
    parts = branches(found, root) or [{**found, "type": kind} for kind in names if len(names) > 1]
    if parts:
        # The first alternative that the input fits. Any input fits a string, so strings are tried
        # last.
        for part in sorted(
            parts, key=lambda part: kinds(part) in ([], ["string"]) and choices(part) is None
        ):
            with suppress(Misfit):
                return read(text, part, root, where)
        raise misfit
    if names in ([], ["string"]):
        return text
    # Input that is not JSON fits no other type; +5 and 007 are not JSON.
    value: Any = text
    with suppress(ValueError, RecursionError):
        value = decode_value(text.strip().encode())
    if not _is(value, names[0]):
        raise misfit
    check(value, found, root, where)
    if names == ["integer"]:
        return int(value)  # 1e3 is a whole number, but not to every server
    return value


def check(value: object, schema: object, root: Schema, where: str) -> None:
    """Raise the first `Misfit` of a value."""

    def fits(part: Schema) -> bool:
        with suppress(Misfit):
            check(value, part, root, where)
            return True
        return False

    found = resolved(schema, root)
    listed = choices(found)
    parts = branches(found, root)
    names = kinds(found)
    is_misfit = bool(names) and not any(_is(value, kind) for kind in names)
    if listed is not None:
        is_misfit |= not any(value == each and type(value) is type(each) for each in listed)
    if is_misfit or (parts and not any(fits(part) for part in parts)):
        raise Misfit(where, words(found, root), _quoted(encode(value).decode()))
    if isinstance(value, dict):
        _check_members(value, found, root, where)
    elif isinstance(value, list) and isinstance(found.get("items"), dict):
        for at, item in enumerate(value):
            check(item, found["items"], root, f"{where}[{at}]")


def _check_members(value: JsonObject, schema: Schema, root: Schema, where: str) -> None:
    """Raise the first `Misfit` of an object's members: a wrong one, then a missing one."""
    properties = members(schema)
    prefix = f"{where}." if where else ""
    for name, item in value.items():
        expected = properties.get(name, schema.get("additionalProperties"))
        if isinstance(expected, dict):
            check(item, expected, root, prefix + name)
    missing = required(schema) - value.keys()
    for name in (*properties, *sorted(missing)):
        if name in missing:
            raise Misfit(prefix + name, words(properties.get(name, {}), root), "nothing")


def _quoted(text: str) -> str:
    if len(text) <= QUOTED:
        return text
    return f"{text[: QUOTED - 3]}..."


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()  # JSON Schema: 1.0 is an integer
    return isinstance(value, _TYPES[kind][1])


# --- the command line -----------------------------------------------------------------------------

_WORD = re.compile(r"(?P<path>[^=:]+?)(?P<sign>:=|=)(?P<value>.*)", re.DOTALL)
_OBJECT = """--args '{"name": "value"}'"""


def arguments(
    given: tuple[str, ...], whole: str | None, schema: Schema | None, *, help: str
) -> Any:
    """Return the params of a call; without a schema, values stay strings.

    `help` is a command to suggest.
    """
    # 1. --args: the whole object, or a list whose entries only the server can name.
    params = _whole(whole)
    if isinstance(params, list):
        if given:
            raise CliError(
                "Params by position and by name.", "--args is a list", "give all of them in --args"
            )
        return params
    if not isinstance(params, dict):
        raise CliError(
            "--args is not an object.",
            f"got {_quoted(encode(params).decode())}",
            _OBJECT,
            type="params",
        )

    # 2. Single arguments, each at most once.
    _refuse_doubled(given)
    try:
        for word in given:
            _put(params, _utf8(word), schema or {})

        # 3. Check all of them against the schema.
        if schema is None:
            return params
        names = members(schema)
        unknown = next((name for name in params if name not in names), None)
        if unknown is not None and schema.get("additionalProperties") is False:
            next_step = help
            key = likely_key({unknown: params[unknown]})
            if key is not None:
                next_step = f"give the key as --key {shlex.quote(key)}"
            raise no_such("argument", unknown, list(names), next_step, type="params", field=unknown)
        check(params, schema, schema, "")
    except Misfit as error:
        raise _failure_of(error, help) from None
    except RecursionError:
        why = "it refers to itself without an end"
        raise CliError(
            "The method's schema cannot be followed.", why, help, exit=Exit.PROTOCOL, type="schema"
        ) from None
    return params


def _whole(text: str | None) -> Any:
    """Return the value of --args: JSON, the JSON of a file, or that of standard input."""
    if text is None:
        return {}
    if text == "-":
        source = stdin().read()
    elif text.startswith("@"):
        source = _file(text[1:])
    else:
        source = _utf8(text).encode()
    return _json(source, "--args")


def _refuse_doubled(given: tuple[str, ...]) -> None:
    """Raise an error if an argument that is not an entry of a list is given twice."""
    seen: dict[str, int] = {}
    for word in given:
        match = _WORD.fullmatch(word)
        if match and not match["path"].endswith("[]"):
            seen[match["path"]] = seen.get(match["path"], 0) + 1
    for path, count in seen.items():
        if count > 1:
            next_step = f"give it once, or {path}[]=... for each entry of a list"
            what = f"{path} is given twice."
            raise CliError(what, "it takes one value", next_step, type="params", field=path)


def _failure_of(misfit: Misfit, help: str) -> CliError:
    """Return the error about an argument that does not fit, or is missing."""
    where, expected, got = misfit.args
    if got != "nothing":
        what = f"{where or 'the value'} must be {expected}."
        return CliError(what, f"got {got}", help, type="params", field=where)
    why = "it is required"
    if expected != "anything":
        why = f"it must be {expected}"
    next_step = f"add {where}=..., see: {help}"
    return CliError(f"{where} is missing.", why, next_step, type="params", field=where)


def _put(params: Schema, word: str, root: Schema) -> None:
    """Put one argument into the params, at its place and converted by the schema of that place."""
    match = _WORD.fullmatch(word)
    if match is None:
        why = "there is no = in it"
        if "=" in word:
            why = "there is no name in front of ="
        raise CliError(
            f"{word!r} is not an argument.", why, "name=text, or name:=JSON", type="params"
        )
    path = match["path"]
    steps = path.removesuffix("[]").split(".")
    expected = _member(root, steps[0], root)
    for step, following in pairwise(steps):
        params = params.setdefault(step, {})
        expected = _member(expected, following, root)
        if not isinstance(params, dict):
            raise CliError(
                f"{word!r} does not fit.",
                f"{step} has a value already",
                "give it once",
                type="params",
            )
    if path.endswith("[]"):
        expected = resolved(expected, root).get("items", {})
    value = _value(match["sign"], match["value"], expected, root, path)
    if path.endswith("[]"):
        params.setdefault(steps[-1], []).append(value)
    else:
        params[steps[-1]] = value


def _value(sign: str, text: str, expected: object, root: Schema, path: str) -> Any:
    """Return the value of one argument: JSON after `:=`, else a string that the schema converts."""
    if not text.startswith("@"):
        if sign == ":=":
            return _json(text.encode(), path)
        return read(text, expected, root, path)
    data = _file(text[1:])
    if sign == ":=":
        return _json(data, path)
    try:
        return read(data.decode(), expected, root, path)
    except UnicodeDecodeError:
        what = f"{text[1:]} is not text."
        next_step = "arguments are JSON: encode it first"
        raise CliError(what, "it is not UTF-8", next_step, type="params") from None


def _member(schema: object, name: str, root: Schema) -> object:
    """Return the schema of a member of an object."""
    found = resolved(schema, root)
    for part in (found, *branches(found, root)):
        if name in members(part):
            return members(part)[name]
        if isinstance(part.get("additionalProperties"), dict):
            return part["additionalProperties"]
    return {}


def _json(data: bytes, name: str) -> Any:
    try:
        return decode_value(data)
    except (ValueError, RecursionError) as error:
        next_step = f"{name}=text for a string, {name}:=JSON for JSON"
        if name == "--args":
            next_step = _OBJECT
        why = _why_not_json(data, error)
        raise CliError(f"{name} is not JSON.", why, next_step, type="params") from None


def _why_not_json(data: bytes, error: Exception) -> str:
    text = data.decode("utf-8", "replace")
    shown = _quoted(text)
    if not data.strip():
        return "it is empty"
    if text.encode() != data:
        return "it is not UTF-8"
    if isinstance(error, RecursionError):
        return f"{shown} is nested too deeply"
    if shown[0].isalpha():
        return f'a string in JSON has quotes: "{shown}"'
    if "truncated" in str(error):
        return f"{shown} is not complete"
    return f"{shown}: {error}"


def _utf8(word: str) -> str:
    """Return a word of the command line, whose bytes a locale other than UTF-8 may have decoded."""
    try:
        return word.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise CliError(
            f"{word!r} is not UTF-8.",
            "JSON is UTF-8",
            "give it as JSON: name:='\"\\u00e9\"'",
            type="params",
        ) from None


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        why = error.strerror or str(error)
        next_step = "give the path of a file after @"
        raise CliError(f"{path} cannot be read.", why, next_step, type="params") from None
