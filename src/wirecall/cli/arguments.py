"""The values that a user types, checked against a schema before anything is sent: the arguments of a call,

    name=text       a text; a number, a list, ... where the method's schema says so
    name:=JSON      a value as JSON
    name=@file      the text of a file            name:=@file     the JSON in a file
    a.b=1           a member of a member          tag[]=x         an entry of a list
    --args JSON     the whole object; also @file, and - for standard input; single arguments go on top of it

and the answers to what a server asks while a call runs: `--answer` in a script, and the terminal, field by field.
"""

import re
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wirecall.cli.failures import CliError, Exit, no_such
from wirecall.cli.terminal import ask, is_terminal, reading, stdin
from wirecall.contract.lock import listed as choices
from wirecall.contract.lock import members, required
from wirecall.contract.lock import resolved as followed
from wirecall.logs import escaped
from wirecall.mcp.types import Elicited
from wirecall.protocol.messages import JsonObject, decode_value, encode

if TYPE_CHECKING:
    from wirecall.mcp.client.inbox import Form, Visit

Schema = JsonObject
DEPTH = 40  # references that lead to references
SHOWN = 4  # levels of a schema that are put into words
QUOTED = 60  # characters of a value that an error quotes

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


class Misfit(Exception):
    """A value that its schema does not admit: its place, the expected type, the value that came."""


# --- reading a schema -----------------------------------------------------------------------------------------------


def resolved(schema: object, root: Schema) -> Schema:
    """Follow references inside the same document. A reference to another document admits anything."""
    for _ in range(DEPTH):
        if not isinstance(schema, dict) or "$ref" not in schema:
            break
        schema = followed(schema, root)
    return schema if isinstance(schema, dict) and "$ref" not in schema else {}


def kinds(schema: Schema) -> list[str]:
    """Return the types that a schema names; an empty list means any type."""
    named = schema.get("type")
    found = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    return [kind for kind in found if kind in _TYPES]


def branches(schema: Schema, root: Schema) -> list[Schema]:
    """Return the alternatives of a schema; an empty list means that it has none."""
    listed = schema.get("anyOf") or schema.get("oneOf")
    return [resolved(each, root) for each in listed] if isinstance(listed, list) else []


def words(schema: object, root: Schema, depth: int = 0) -> str:
    """Describe the values that a schema admits, for people; `SHOWN` levels deep."""
    found = resolved(schema, root) if depth < SHOWN else {}
    if (listed := choices(found)) is not None:
        shown = ", ".join(each if isinstance(each, str) else encode(each).decode() for each in listed)
        return shown if len(listed) == 1 else f"one of {shown}"
    if parts := branches(found, root):
        return " or ".join(dict.fromkeys(words(part, root, depth + 1) for part in parts))
    names = [_TYPES[kind][0] for kind in kinds(found)]
    if names == ["a list"] and "items" in found:
        inner = words(found["items"], root, depth + 1)
        return f"a list of {inner.removeprefix('a ').removeprefix('an ')}"
    return " or ".join(names) or "anything"


def example(schema: Schema) -> str:
    """Return the required arguments as words to be filled in."""
    return " ".join(f"{name}=..." for name in members(schema) if name in required(schema))


def described(schema: Any, whole: Schema | None = None, depth: int = 0) -> list[tuple[str, str, str]]:
    """Return name, type and remarks of every argument; below it, indented, those of the object or the list in it."""
    root = schema if whole is None else whole
    found = resolved(schema, root)
    rows = []
    if parts := [part for part in branches(found, root) if kinds(part) in (["object"], ["array"])]:
        for at, part in enumerate(parts, 1):
            inside = described(part, root, depth + (len(parts) > 1))
            rows += [("  " * depth + f"({at})", words(part, root), "")] * (len(parts) > 1 and bool(inside)) + inside
        return rows
    if kinds(found) == ["array"] and depth < SHOWN:
        return described(found.get("items"), root, depth)
    stated = members(found) if depth < SHOWN else {}
    for name, member in stated.items():
        inner = resolved(member, root)
        default = inner.get("default")
        remark = "required" if name in required(found) else f"default {default!r}" if default is not None else "optional"
        text = inner.get("description") or (member.get("description") if isinstance(member, dict) else "") or ""
        rows.append(
            ("  " * depth + name, words(member, root), f"{remark}{'  ' if text else ''}{' '.join(str(text).split())}")
        )
        rows += described(member, root, depth + 1)
    rest = found.get("additionalProperties")
    if isinstance(rest, dict) and depth < SHOWN and (rest or not stated):
        rows += [("  " * depth + "*", words(rest, root), "any name"), *described(rest, root, depth + 1)]
    return rows


# --- values ---------------------------------------------------------------------------------------------------------


def read(text: str, schema: object, root: Schema, where: str) -> Any:
    """Convert a text of the command line to the value that the schema expects."""
    found = resolved(schema, root)
    misfit = Misfit(where, words(found, root), f'"{text}"')
    if (listed := choices(found)) is not None:
        for choice in listed:
            if text == (choice if isinstance(choice, str) else encode(choice).decode()):
                return choice
        raise misfit
    names = kinds(found)
    parts = branches(found, root) or [{**found, "type": kind} for kind in names if len(names) > 1]
    if parts:
        # The first alternative that the text fits. Any text fits a string, so strings are tried last.
        for part in sorted(parts, key=lambda part: kinds(part) in ([], ["string"]) and choices(part) is None):
            with suppress(Misfit):
                return read(text, part, root, where)
        raise misfit
    if names in ([], ["string"]):
        return text
    value: Any = text  # a text that is not JSON fits no other type; +5 and 007 are not JSON
    with suppress(ValueError, RecursionError):
        value = decode_value(text.strip().encode())
    if not _is(value, names[0]):
        raise misfit
    check(value, found, root, where)
    return int(value) if names == ["integer"] else value  # 1e3 is a whole number, but not to every server


def check(value: object, schema: object, root: Schema, where: str) -> None:
    """Raise the first `Misfit` of a value."""

    def fits(part: Schema) -> bool:
        with suppress(Misfit):
            check(value, part, root, where)
            return True
        return False

    found = resolved(schema, root)
    listed, parts, names = choices(found), branches(found, root), kinds(found)
    if (
        (listed is not None and not any(value == each and type(value) is type(each) for each in listed))
        or (parts and not any(fits(part) for part in parts))
        or (names and not any(_is(value, kind) for kind in names))
    ):
        raise Misfit(where, words(found, root), _quoted(encode(value).decode()))
    if isinstance(value, dict):
        properties = members(found)
        prefix = f"{where}." if where else ""
        for name, item in value.items():
            expected = properties.get(name, found.get("additionalProperties"))
            if isinstance(expected, dict):
                check(item, expected, root, prefix + name)
        missing = required(found) - value.keys()
        for name in (*properties, *sorted(missing)):
            if name in missing:
                raise Misfit(prefix + name, words(properties.get(name, {}), root), "nothing")
    elif isinstance(value, list) and isinstance(found.get("items"), dict):
        for at, item in enumerate(value):
            check(item, found["items"], root, f"{where}[{at}]")


def _quoted(text: str) -> str:
    return text if len(text) <= QUOTED else f"{text[: QUOTED - 3]}..."


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()  # JSON Schema: 1.0 is an integer
    return isinstance(value, _TYPES[kind][1])


# --- the command line -----------------------------------------------------------------------------------------------

_WORD = re.compile(r"(?P<path>[^=:]+?)(?P<sign>:=|=)(?P<value>.*)", re.DOTALL)
_OBJECT = """--args '{"name": "value"}'"""


def arguments(given: tuple[str, ...], whole: str | None, schema: Schema | None, *, help: str) -> Any:
    """Return the params of a call. Without a schema texts stay texts. `help` is the command that explains the method."""
    # 1. --args: the whole object, or a list, whose entries only the server can name.
    params: Any = {}
    if whole is not None:
        source = stdin().read() if whole == "-" else _file(whole[1:]) if whole.startswith("@") else _utf8(whole).encode()
        params = _json(source, "--args")
    if isinstance(params, list):
        if given:
            raise CliError("Params by position and by name.", "--args is a list", "give all of them in --args")
        return params
    if not isinstance(params, dict):
        raise CliError("--args is not an object.", f"got {_quoted(encode(params).decode())}", _OBJECT, type="params")

    # 2. Single arguments, each at most once.
    paths = [match["path"] for word in given if (match := _WORD.fullmatch(word)) and not match["path"].endswith("[]")]
    if doubled := next((path for path in paths if paths.count(path) > 1), None):
        next_step = f"give it once, or {doubled}[]=... for each entry of a list"
        raise CliError(f"{doubled} is given twice.", "it takes one value", next_step, type="params", field=doubled)
    try:
        for word in given:
            _put(params, _utf8(word), schema or {})

        # 3. All of them against the schema.
        if schema is None:
            return params
        names = members(schema)
        unknown = next((name for name in params if name not in names), None)
        if unknown is not None and schema.get("additionalProperties") is False:
            raise no_such("argument", unknown, list(names), help, type="params", field=unknown)
        check(params, schema, schema, "")
    except Misfit as error:
        where, expected, got = error.args
        if got != "nothing":
            what = f"{where or 'the value'} must be {expected}."
            raise CliError(what, f"got {got}", help, type="params", field=where) from None
        why = "it is required" if expected == "anything" else f"it must be {expected}"
        next_step = f"add {where}=..., see: {help}"
        raise CliError(f"{where} is missing.", why, next_step, type="params", field=where) from None
    except RecursionError:
        why = "it refers to itself without an end"
        raise CliError("The method's schema cannot be followed.", why, help, exit=Exit.PROTOCOL, type="schema") from None
    return params


def _put(params: Schema, word: str, root: Schema) -> None:
    """Put one argument into the params, at its place and converted by the schema of that place."""
    match = _WORD.fullmatch(word)
    if match is None:
        why = "there is no name in front of =" if "=" in word else "there is no = in it"
        raise CliError(f"{word!r} is not an argument.", why, "name=text, or name:=JSON", type="params")
    path, text = match["path"], match["value"]
    steps = path.removesuffix("[]").split(".")
    expected = _member(root, steps[0], root)
    for step, following in pairwise(steps):
        params, expected = params.setdefault(step, {}), _member(expected, following, root)
        if not isinstance(params, dict):
            raise CliError(f"{word!r} does not fit.", f"{step} has a value already", "give it once", type="params")
    if path.endswith("[]"):
        expected = resolved(expected, root).get("items", {})
    if match["sign"] == ":=":
        value = _json(_file(text[1:]) if text.startswith("@") else text.encode(), path)
    elif text.startswith("@"):
        try:
            value = read(_file(text[1:]).decode(), expected, root, path)
        except UnicodeDecodeError:
            what, next_step = f"{text[1:]} is not text.", "arguments are JSON: encode it first"
            raise CliError(what, "it is not UTF-8", next_step, type="params") from None
    else:
        value = read(text, expected, root, path)
    if path.endswith("[]"):
        params.setdefault(steps[-1], []).append(value)
    else:
        params[steps[-1]] = value


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
        text = data.decode("utf-8", "replace")
        shown = _quoted(text)
        if not data.strip():
            why = "it is empty"
        elif text.encode() != data:
            why = "it is not UTF-8"
        elif isinstance(error, RecursionError):
            why = f"{shown} is nested too deeply"
        elif shown[0].isalpha():
            why = f'a text in JSON has quotes: "{shown}"'
        else:
            why = f"{shown} is not complete" if "truncated" in str(error) else f"{shown}: {error}"
        next_step = _OBJECT if name == "--args" else f"{name}=text for a text, {name}:=JSON for JSON"
        raise CliError(f"{name} is not JSON.", why, next_step, type="params") from None


def _utf8(word: str) -> str:
    """Return a word of the command line, whose bytes may have come through a locale that is not UTF-8."""
    try:
        return word.encode("utf-8", "surrogateescape").decode()
    except UnicodeError:
        raise CliError(
            f"{word!r} is not UTF-8.", "JSON is UTF-8", "give it as JSON: name:='\"\\u00e9\"'", type="params"
        ) from None


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        why, next_step = error.strerror or str(error), "give the path of a file after @"
        raise CliError(f"{path} cannot be read.", why, next_step, type="params") from None


# --- questions of a server ------------------------------------------------------------------------------------------

answer_option = click.option(
    "--answer",
    "answers",
    multiple=True,
    metavar="FIELD=VALUE",
    help="MCP: the answer to a field of a form that the server asks for; may be repeated.",
)


class Dialogue:
    """The questions of one call, and the answers that the command line gives.

    A handler of MCP's client must return an answer, and an error in it would reach the server. So a question that cannot be
    answered is declined, and `failure` keeps the reason, which the verb raises when the call is over.
    """

    def __init__(self, answers: tuple[str, ...]) -> None:
        self.failure: CliError | None = None
        self.asked = False  # the server has sent a form
        self._answers = {word.partition("=")[0].removesuffix(":").split(".")[0].removesuffix("[]"): word for word in answers}
        if wrong := next((word for word in answers if "=" not in word or word.startswith(("=", ":="))), None):
            raise CliError(f"{wrong!r} is not an answer.", "expected a field and a value", "--answer size=large")
        self.unused = set(self._answers)

    def elicit(self, form: "Form") -> JsonObject | Elicited:
        """Fill in a form: from the command line, then on the terminal."""
        self.asked = True
        schema = form.requested_schema
        fields = members(schema)
        needed = required(schema) & fields.keys()
        try:
            # 1. Answers of the command line, each converted by the schema of its field.
            given = tuple(word for name, word in self._answers.items() if name in fields)
            free = {**schema, "required": [], "additionalProperties": True}
            content: Any = arguments(given, None, free, help="correct the value of --answer")
            self.unused -= fields.keys()

            # 2. The other fields, on the terminal.
            open = [name for name in fields if name not in content]
            if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
                missing = [name for name in open if name in needed and "default" not in fields[name]]
                if missing and self.unused:
                    raise no_such("field", min(self.unused), list(fields), f"--answer {missing[0]}=...")
                if missing or not (content or not fields):
                    raise CliError(
                        "The server asks a question, and there is no terminal.",
                        escaped(form.message),
                        " ".join(f"--answer {name}=..." for name in missing or fields),
                    )
                return dict(content)
            with reading():
                if open or not fields:
                    click.echo(f"? {escaped(form.message)}", err=True)
                for name in open:
                    value = self._field(name, fields[name], schema, name in needed)
                    content |= {} if value is None else {name: value}
                if not fields and not click.confirm("Agree?", err=True):
                    return Elicited("decline")
            return dict(content)
        except click.Abort:
            click.echo(err=True)
            self.failure = _declined("The question was not answered.", "you ended the input")
        except CliError as error:
            self.failure = _declined(error.what, error.why, error.next)
        return Elicited("decline")

    def visit(self, visit: "Visit") -> bool:
        """Ask the user to open a page. It is shown, and not opened."""
        question = f"{visit.message} The server asks you to visit {visit.url} on the host {visit.host}. Have you done so?"
        with reading():
            agreed = ask(question)
        if agreed is None:
            why = f"{escaped(visit.message)} {visit.url}".strip()
            self.failure = _declined("The server asks for a visit to a page, and there is no terminal.", why)
        return bool(agreed)

    @staticmethod
    def _field(name: str, field: Any, root: JsonObject, is_needed: bool) -> Any:
        """Ask for one field, until its value fits. None leaves it out: it is optional, or has a default."""
        found = resolved(field, root)
        about = [words(field, root), *([str(found["description"])] if found.get("description") else [])]
        may_skip = not is_needed or "default" in found
        about += [f"default {found['default']!r}" if "default" in found else "optional"] if may_skip else []
        while True:
            text = click.prompt(f"  {escaped(name)} ({escaped(', '.join(about))})", default="", show_default=False, err=True)
            if not text and may_skip:
                return None
            try:
                value = read(text, field, root, name)
                check(value, field, root, name)
                if text:
                    return value
                raise Misfit(name, words(field, root), "nothing")
            except Misfit as misfit:
                click.echo(f"  {escaped(name)} must be {escaped(misfit.args[1])}, got {escaped(misfit.args[2])}", err=True)


def _declined(what: str, why: str = "", next: str = "") -> CliError:
    return CliError(what, why, next, exit=Exit.INTERRUPTED, type="unanswered")
