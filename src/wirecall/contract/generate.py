"""A contract as a Python module: a typed client that an editor can read.

A server controls everything in a contract. It reaches the module as a name that `Scope` has made,
as a string literal, or in a docstring; nothing else of it becomes code. The rules of names:

1. Characters that Python does not allow become `_`, and leading ones are dropped; a name that
   begins with a digit, or is empty, gets `x_` in front.
2. Python's keywords, and the names that the module uses itself, get `_` at the end; a name that is
   taken gets `_2`, ...
3. A member whose name had to change keeps its own name on the wire: `class_: str =
   field(name="class")`.

A string of a known format has Python's type (`UUID`, `dt.date`, `Decimal`, `bytes`), and a named
list of values is an enum. A schema is one class, however often it occurs: one without a name takes
that of the first place.

The layout is that of `ruff format`: a statement is on one line if it fits, else it has one item on
each line and a comma after the last.
"""

import builtins
import inspect
import keyword
import re
import textwrap
import unicodedata
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from wirecall.contract.lock import (
    Contract,
    LockedMethod,
    LockedTool,
    listed,
    members,
    required,
    resolved,
    step_of,
)
from wirecall.errors import UsageError
from wirecall.protocol.keys import without_key
from wirecall.protocol.messages import Json, JsonObject
from wirecall.protocol.params import KEY
from wirecall.protocol.schemas import DECIMAL

MARK = "# Made by `wirecall client`: make it again instead of editing it."
# Columns of a line, as ruff has them by default.
WIDTH = 88
# Characters of a type; a longer one gets a name.
LONG = 40
# Parts of all types; references can multiply them without limit.
STEPS = 500_000
# Characters of a name.
NAME = 64

# The names that the module uses itself. A member of this name would hide the type.
OWN = frozenset(
    (
        *("annotations", "Any", "Literal", "Union", "UNSET", "Struct", "UnsetType", "field"),
        *("RpcError", "Called", "Caller", "SyncCaller"),
        *("str", "int", "float", "bool", "bytes", "list", "dict", "tuple"),
        *("dt", "Decimal", "UUID", "IntEnum", "StrEnum"),
    )
)
_UNNAMEABLE = re.compile(r'[\x00-\x1f"\\]')
_ATTRIBUTES = ("client", "open", "aclose", "close", "PROTOCOL", "DIGEST", "ERRORS", "CALLER")
_ARGUMENTS = ("self", "key", "timeout", "params", "result")


# --- names and strings ----------------------------------------------------------------------------


class Scope:
    """The names of one scope: each is unique, also among the `outer` scopes.

    `own` are in use already.
    """

    def __init__(self, own: Collection[str], outer: Collection[str] = ()) -> None:
        self.taken: set[str] = set()
        self.own = own
        self._outer = outer
        self._counts: dict[str, int] = {}

    def make(self, text: str) -> str:
        """Return a name for Python."""
        signs = []
        for sign in unicodedata.normalize("NFKC", text):
            if not f"a{sign}".isidentifier():
                sign = "_"
            signs.append(sign)
        plain = "".join(signs).lstrip("_")[:NAME]
        if not plain.isidentifier():
            plain = f"x_{plain}"
        if keyword.iskeyword(plain) or plain in self.own:
            plain += "_"
        name = plain
        count = self._counts.get(plain, 1)
        while name in self.taken or name in self._outer:
            count += 1
            name = f"{plain}_{count}"
        self._counts[plain] = count
        self.taken.add(name)
        return name

    def make_class(self, text: str) -> str:
        """Return a name for a class: order.place becomes OrderPlace."""
        words = "".join(sign if sign.isalnum() else " " for sign in text).split()
        return self.make("".join(word[:1].upper() + word[1:] for word in words))


def literal(text: str) -> str:
    """Return a string as a literal, in the quotes that need fewer escapes."""
    quote = '"'
    if text.count('"') > text.count("'"):
        quote = "'"
    signs = []
    for sign in text:
        if sign in ("\\", quote):
            sign = f"\\{sign}"
        elif not sign.isprintable():
            sign = sign.encode("unicode_escape").decode()
        signs.append(sign)
    return f"{quote}{''.join(signs)}{quote}"


def docstring(indent: str, *texts: str) -> list[str]:
    """Return paragraphs as the lines of a docstring; no line if they are empty."""
    lines: list[str] = []
    for text in texts:
        paragraph = _wrapped(text, WIDTH - len(indent) - 6)
        if lines and paragraph:
            lines.append("")
        lines += paragraph
    # A backslash and three quotes are the only special characters in a docstring.
    lines = [line.replace("\\", "\\\\").replace('"""', "'''") for line in lines]
    if not lines:
        return []
    if lines[0].startswith('"'):
        lines[0] = f" {lines[0]}"
    if len(lines) == 1:
        if lines[0].endswith('"'):
            lines[0] += " "
        return [f'{indent}"""{lines[0]}"""']
    return [
        f'{indent}"""{lines[0]}',
        *(f"{indent}{line}".rstrip() for line in lines[1:]),
        f'{indent}"""',
    ]


def _wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a paragraph, without the characters that cannot be printed."""
    clean = inspect.cleandoc("\n".join(text.splitlines()))
    clean = "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in clean).strip()
    if not clean:
        return []
    lines = []
    for line in clean.split("\n"):
        lines += textwrap.wrap(line, width) or [""]
    return lines


def statement(indent: str, before: str, items: Sequence[str], after: str) -> list[str]:
    """Return a statement around items: on one line, or on a line for each item."""
    line = f"{indent}{before}{', '.join(items)}{after}"
    # They take two columns.
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in line if not sign.isascii())
    if len(line) + wide <= WIDTH or not items:
        return [line]
    return [f"{indent}{before}", *(f"{indent}    {item}," for item in items), f"{indent}{after}"]


# --- types ----------------------------------------------------------------------------------------


class Type(Struct):
    """A union of types, with at most one of each kind.

    msgspec could not distinguish two of a kind.
    """

    # Some of "Any", "None", "bool", "int", "float", "str", and the types of `_FORMATS`.
    plain: set[str] = set()
    literals: dict[str | int, None] = {}
    # The enums of the module, and whether their values are strings.
    enums: dict[str, bool] = {}
    # The entries of a list.
    entries: "Type | None" = None
    # The values of a dict with any names.
    values: "Type | None" = None
    classes: dict[str, None] = {}
    # The entries of a tuple.
    fixed: "list[Type] | None" = None


class Class(Struct):
    """A class of the module: the schema of an object."""

    name: str
    text: str = ""
    # By the name on the wire: its type, and whether it is required.
    fields: dict[str, tuple[Type, bool]] = {}
    # Members that always have the same string.
    constants: dict[str, str] = {}
    # The member that distinguishes this class from others.
    tag: str | None = None


class Values(Struct):
    """An enum of the module: the schema of a named list of values."""

    name: str
    text: str
    values: list[str | int]


class Types:
    """The classes of a module, made as they are needed."""

    def __init__(self, names: Scope, texts: dict[str, str]) -> None:
        self.names = names
        self.classes: dict[str, Class] = {}
        self.enums: dict[str, Values] = {}
        self.aliases: list[list[str]] = []
        self._texts = texts
        self._steps = 0
        # The names of classes, by their meaning.
        self._known: dict[bytes, str] = {}
        # Meanings of the contract's schemas, by schema and hint.
        self._meanings: dict[tuple[int, str], bytes] = {}
        # The names of long types, by their meaning.
        self._named: dict[tuple[str, ...], str] = {}

    def of(
        self,
        schema: Json,
        root: Json,
        hint: str,
        place: str,
        followed: tuple[str, ...] = (),
        *,
        is_named: bool = False,
    ) -> Type:
        """Return the type of a schema.

        `hint` names a class that it needs, and `is_named` says that the server has given the name;
        `place` locates its descriptions.
        """
        self._steps += 1
        if self._steps > STEPS:
            raise UsageError(
                "A type of the server cannot be generated.",
                f"it consists of more than {STEPS} parts",
            )
        if not isinstance(schema, dict):
            return Type(plain={"Any"})
        if "$ref" in schema:
            reference = str(schema["$ref"])
            target = resolved(schema, root)
            if target is None or reference in followed:
                return Type(plain={"Any"})  # in another document, or a type that consists of itself
            name = reference.rpartition("/")[2]
            # Methods/NAME/params/$defs/...
            inside = "/".join([*place.split("/")[:3], "$defs", name])
            further = (*followed, reference)
            return self.of(target, root, _last(name), inside, further, is_named=True)
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                parts = [
                    self.of(part, root, f"{hint} {at or ''}", f"{place}/{word}/{at}", followed)
                    for at, part in enumerate(schema[word])
                ]
                return self._union(parts)
        if isinstance(schema.get("allOf"), list):
            is_one = len(schema["allOf"]) == 1
            if is_one and "type" not in schema and "properties" not in schema:
                return self.of(schema["allOf"][0], root, hint, f"{place}/allOf/0", followed)
            return Type(plain={"Any"})
        if (values := listed(schema)) is not None:
            if is_named and _are_names(values):
                return self._enum(values, hint, place)
            return self._union([_constant(value) for value in values])
        named = schema.get("type")
        kinds = named if isinstance(named, list) else [named]
        return self._union(
            [self._single(kind, schema, root, hint, place, followed, is_named) for kind in kinds]
        )

    def _single(
        self,
        kind: Json,
        schema: JsonObject,
        root: Json,
        hint: str,
        place: str,
        followed: tuple[str, ...],
        is_named: bool,
    ) -> Type:
        if kind == "string":
            return Type(plain={_string(schema)})
        if isinstance(kind, str) and kind in _PLAIN:
            return Type(plain={_PLAIN[kind]})
        if kind == "array":
            return self._list(schema, root, hint, place, followed)
        if kind != "object":
            return Type(plain={"Any"})
        rest = schema.get("additionalProperties")
        stated = members(schema)
        if not stated and isinstance(rest, dict):
            inside = f"{place}/additionalProperties"
            return Type(values=self.of(rest, root, f"{hint} value", inside, followed))
        # A struct would lose further members, and msgspec does not rename a member to these
        # characters.
        is_unnameable = any(_UNNAMEABLE.search(each) for each in stated)
        if not stated or rest not in (None, False) or is_unnameable:
            return Type(values=Type(plain={"Any"}))
        title = self._texts.get(f"{place}/title")
        if title and not is_named:
            hint = title
            is_named = True
        return Type(classes={self._class(schema, root, hint, place, is_named): None})

    def _enum(self, values: Sequence[str | int], hint: str, place: str) -> Type:
        """Return the type of a named list of values: an enum, which is made if it is new."""
        meaning = msgspec.json.encode(["enum", hint, values])
        if meaning not in self._known:
            name = self.names.make_class(hint)
            text = self._texts.get(f"{place}/description", "")
            self._known[meaning] = name
            self.enums[name] = Values(name, text, list(values))
        return Type(enums={self._known[meaning]: isinstance(values[0], str)})

    def _list(
        self, schema: JsonObject, root: Json, hint: str, place: str, followed: tuple[str, ...]
    ) -> Type:
        """Return the type of a list, or of a tuple if the number of its entries is fixed."""
        first = schema.get("prefixItems")
        items = schema.get("items", True)
        is_closed = items is False and isinstance(first, list)
        if first and is_closed and schema.get("minItems") == len(first):
            return Type(
                fixed=[
                    self.of(one, root, f"{hint} {at}", f"{place}/prefixItems/{at}")
                    for at, one in enumerate(first)
                ]
            )
        if first:
            return Type(entries=Type(plain={"Any"}))
        # References inside a list may lead back to it, but not as its own entries.
        return Type(entries=self.of(items, root, f"{hint} item", f"{place}/items", followed))

    def _class(self, schema: JsonObject, root: Json, hint: str, place: str, is_named: bool) -> str:
        """Return the name of the class of an object, which is made if it is new."""
        named = hint if is_named else ""
        if (id(schema), named) not in self._meanings:
            self._meanings[id(schema), named] = _meaning(named, schema, root)
        meaning = self._meanings[id(schema), named]
        if meaning in self._known:
            return self._known[meaning]
        name = self.names.make_class(hint)
        made = Class(name, self._texts.get(f"{place}/description", ""))
        self._known[meaning] = name
        if is_named:
            # The same schema without a name is the same class.
            self._known.setdefault(_meaning("", schema, root), name)
        self.classes[name] = made
        needed = required(schema)
        for each, part in members(schema).items():
            values = listed(part) or []
            if each in needed and len(values) == 1 and isinstance(values[0], str):
                made.constants[each] = values[0]
        for each, part in sorted(members(schema).items()):
            found = self.of(part, root, f"{name} {each}", f"{place}/properties/{step_of(each)}")
            made.fields[each] = (found, each in needed)
        return name

    def _union(self, parts: Sequence[Type]) -> Type:
        """Return one type for all of them.

        It may admit more: msgspec reads one kind of object and of list.
        """
        if len(parts) == 1:
            return parts[0]
        whole = Type(
            plain=set().union(*(part.plain for part in parts)),
            literals={value: None for part in parts for value in part.literals},
            enums={name: is_text for part in parts for name, is_text in part.enums.items()},
            classes={name: None for part in parts for name in part.classes},
        )
        self._unite_lists(whole, parts)
        self._unite_objects(whole, parts)
        if "Any" in whole.plain:
            return Type(plain={"Any"})
        if "float" in whole.plain:
            whole.plain.discard("int")
        _unite_strings(whole)
        _unite_integers(whole)
        return whole

    def _unite_lists(self, whole: Type, parts: Sequence[Type]) -> None:
        """Set the one kind of list, or the one tuple, of a union."""
        lists = [part.entries for part in parts if part.entries is not None]
        tuples = [part.fixed for part in parts if part.fixed is not None]
        if len(tuples) == 1 and not lists:
            whole.fixed = tuples[0]
        elif tuples:
            whole.entries = Type(plain={"Any"})
        elif lists:
            whole.entries = self._union(lists)

    def _unite_objects(self, whole: Type, parts: Sequence[Type]) -> None:
        """Set the one kind of dict of a union, or keep its classes if a tag distinguishes them."""
        dicts = [part.values for part in parts if part.values is not None]
        if dicts and not whole.classes:
            whole.values = self._union(dicts)
            return
        classes = [self.classes[name] for name in whole.classes]
        if dicts or (len(classes) > 1 and not self._tag(classes)):
            whole.classes = {}
            whole.values = Type(plain={"Any"})

    def _tag(self, classes: Sequence[Class]) -> bool:
        """Make a member the tag of the classes, if it has a different string in each of them.

        Returns whether there is such a member.
        """
        for name in sorted(classes[0].constants):
            tags = {each.constants.get(name) for each in classes}
            is_distinct = len(tags) == len(classes) and None not in tags
            if is_distinct and all(each.tag in (None, name) for each in classes):
                for each in classes:
                    each.tag = name
                return True
        return False

    def text(self, type: Type, hint: str) -> str:
        """Return a type as it is written; a long one gets a name."""
        parts = []
        if type.literals:
            values = [
                literal(value) if isinstance(value, str) else str(value) for value in type.literals
            ]
            parts.append(self._short(hint, "Literal[", values))
        parts += type.enums
        shown_first = ("str", *_FORMATS.values(), "Decimal", "bytes", "int", "float", "bool")
        parts += [name for name in shown_first if name in type.plain]
        if type.entries is not None:
            parts.append(f"list[{self.text(type.entries, f'{hint} item')}]")
        if type.fixed is not None:
            entries = [self.text(each, f"{hint} {at}") for at, each in enumerate(type.fixed)]
            parts.append(self._short(hint, "tuple[", entries))
        if type.values is not None:
            parts.append(f"dict[str, {self.text(type.values, f'{hint} value')}]")
        parts += [*type.classes, *(name for name in ("Any", "None") if name in type.plain)]
        shown = " | ".join(parts) or "Any"  # without parts, an empty enum or anyOf admits nothing
        if len(shown) > LONG and len(parts) > 1:
            return self._alias(hint, "Union[", parts)
        return shown

    def _short(self, hint: str, before: str, items: Sequence[str]) -> str:
        """Return a type with items in brackets, or its name if it is long."""
        shown = f"{before}{', '.join(items)}]"
        if len(shown) > LONG:
            return self._alias(hint, before, items)
        return shown

    def _alias(self, hint: str, before: str, items: Sequence[str]) -> str:
        meaning = (before, *items)
        if meaning not in self._named:
            name = self.names.make_class(hint)
            self._named[meaning] = name
            self.aliases.append(statement("", f"{name} = {before}", items, "]"))
        return self._named[meaning]


# The types of JSON Schema that are one type of Python.
_PLAIN = {"null": "None", "boolean": "bool", "integer": "int", "number": "float"}
# The types of strings that have a format.
_FORMATS = {
    "date-time": "dt.datetime",
    "date": "dt.date",
    "time": "dt.time",
    "duration": "dt.timedelta",
    "uuid": "UUID",
}
# All types that JSON writes as a string.
_STRINGS = frozenset(("str", "Decimal", "bytes", *_FORMATS.values()))


def _string(schema: JsonObject) -> str:
    """Return the type of a string."""
    format = schema.get("format")
    if schema.get("contentEncoding") == "base64":
        return "bytes"
    if schema.get("pattern") == DECIMAL or format == "decimal":
        return "Decimal"
    if isinstance(format, str):
        return _FORMATS.get(format, "str")
    return "str"


def _unite_strings(whole: Type) -> None:
    """Make one type of all that are strings: msgspec could not distinguish two of them."""
    strings = whole.plain & _STRINGS
    texts = [each for each in whole.literals if isinstance(each, str)]
    enums = [name for name, is_text in whole.enums.items() if is_text]
    if len(strings) + bool(texts) + len(enums) < 2:
        return
    whole.plain = (whole.plain - _STRINGS) | {"str"}
    whole.literals = {each: None for each in whole.literals if not isinstance(each, str)}
    whole.enums = {name: is_text for name, is_text in whole.enums.items() if not is_text}


def _unite_integers(whole: Type) -> None:
    """Make one type of all that are integers."""
    plain = whole.plain & {"int", "float"}
    numbers = [each for each in whole.literals if isinstance(each, int)]
    enums = [name for name, is_text in whole.enums.items() if not is_text]
    if len(plain) + bool(numbers) + len(enums) < 2:
        return
    if not plain:
        whole.plain = whole.plain | {"int"}
    whole.literals = {each: None for each in whole.literals if isinstance(each, str)}
    whole.enums = {name: is_text for name, is_text in whole.enums.items() if is_text}


def _are_names(values: Sequence[Json]) -> bool:
    """Return whether values can be those of an enum: strings, or integers of 64 bits."""
    if all(isinstance(each, str) for each in values):
        return bool(values)
    return all(
        isinstance(each, int) and not isinstance(each, bool) and -(2**63) <= each < 2**63
        for each in values
    )


def _last(name: str) -> str:
    """Return the name of a type without wirecall's prefix, the method.

    order.place.result.Order is Order.
    """
    return name.rpartition(".")[2] or name


def _constant(value: Json) -> Type:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, str) or (is_number and -(2**63) <= value < 2**63):
        return Type(literals={value: None})
    kinds = {type(None): "None", bool: "bool", float: "float", int: "int"}
    return Type(plain={kinds.get(type(value), "Any")})


def _meaning(hint: str, schema: JsonObject, root: Json) -> bytes:
    """Return bytes that are equal for equal classes.

    They consist of the name, the schema, and all definitions that it refers to.
    """
    # A schema that is a whole document includes the definitions.
    schema = {word: value for word, value in schema.items() if word != "$defs"}
    found: JsonObject = {}
    open: list[Json] = [schema]
    while open:
        part = open.pop()
        if isinstance(part, list):
            open += part
        elif isinstance(part, dict):
            if isinstance(part.get("$ref"), str) and part["$ref"] not in found:
                found[part["$ref"]] = target = resolved(part, root)
                open.append(target)
            open += [value for word, value in part.items() if word != "$defs"]
    # Two methods may mean one type, which wirecall lists once for each: pets.Tree and
    # tree.grow.Tree.
    names = {reference: _last(reference.rpartition("/")[2]) for reference in found}
    if len(set(names.values())) < len(names):
        names = {}
    text = msgspec.json.encode(
        [hint, schema, {names.get(each, each): found[each] for each in found}], order="sorted"
    )
    written = {
        msgspec.json.encode({"$ref": each}): msgspec.json.encode({"$ref": name})
        for each, name in names.items()
    }
    return re.sub(
        rb'\{"\$ref":"(?:[^"\\]|\\.)*"\}', lambda found: written.get(found[0], found[0]), text
    )


# --- the module -----------------------------------------------------------------------------------


class Callable(Struct):
    """A method or a tool, as the module calls it."""

    name: str
    text: str
    # Of each: its name on the wire, its type, whether it is required, and its description.
    arguments: list[tuple[str, Type, bool, str]]
    returns: Type
    keyed: bool = False
    reads: bool = False
    # A tool without a result schema, which answers with content.
    is_content: bool = False


def generated(contract: Contract, protocol: str, name: str | None = None) -> str:
    """Return the module of a client.

    `name` is the class, else it is made from the server's name.
    """
    if protocol == "jsonrpc":
        protocol = "rpc"
    try:
        # The bytes are the same whether the contract comes from a server or from a file, where it
        # is sorted.
        contract = msgspec.json.decode(contract.spoken(protocol).canonical(), type=Contract)
        text = "\n".join(_module(contract, protocol, name)) + "\n"
        # A type that this process can walk may be too deep for Python's own parser.
        compile(text, "client", "exec")
        return text
    except (RecursionError, SyntaxError) as error:
        why = "it is nested too deep"
        if isinstance(error, SyntaxError) and "nested" not in str(error.msg):
            why = f"Python cannot read the module: {error}"
        raise UsageError(
            "A type of the server cannot be generated.", why, "flatten the type"
        ) from error


def _module(contract: Contract, protocol: str, title: str | None) -> Iterator[str]:
    # 1. All methods and tools, and the types that they need.
    names = Scope({*OWN, *dir(builtins)})
    title = title or f"{Scope(names.own).make_class(contract.name or 'server')}Client"
    names.taken |= {title, f"Sync{title}"}
    errors = _errors(contract)
    raised = _names_of(errors, names)
    types = Types(names, contract.descriptions)
    calls = _calls(contract, types)

    # 2. The names of long types. They come first, because members must not have these names.
    _name_long_types(types, calls)
    fields = {each.name: list(_fields(each, types)) for each in types.classes.values()}
    methods = Scope({*OWN, *_ATTRIBUTES}, names.taken)
    named = [(each, methods.make(each.name)) for each in calls]
    waiting = [line for each, own in named for line in _method(each, own, types, is_async=True)]
    blocking = [line for each, own in named for line in _method(each, own, types, is_async=False)]

    # 3. The head: the imports that are used.
    code = (*fields.values(), *types.aliases, waiting)
    body = "\n".join(line for lines in code for line in lines)
    if fields:
        body += " Struct"
    for values in types.enums.values():
        body += f" {_base_of(values)}"
    yield MARK
    yield from docstring("", f"A client of {contract.name or 'a server'}.")
    yield ""
    yield from _imports(body, raises=bool(raised))

    # 4. The types, the errors, and the two clients.
    yield from _type_lines(types, fields)
    for number, name in raised.items():
        yield ""
        yield f"class {name}(RpcError):"
        yield from docstring("    ", f"Code {number}: {errors[number]}")
        yield ""
    yield ""
    yield f"class {title}(Caller):"
    yield '    """Calls that wait in an event loop."""'
    yield ""
    yield f"    PROTOCOL = {literal(protocol)}"
    yield f"    DIGEST = {literal(contract.digest)}"
    if raised:
        entries = [f"{number}: {each}" for number, each in raised.items()]
        yield from statement("    ", "ERRORS = {", entries, "}")
    yield from waiting
    yield ""
    yield ""
    yield f"class Sync{title}(SyncCaller):"
    yield '    """The same calls, blocking."""'
    yield ""
    yield f"    CALLER = {title}"
    yield from blocking


def _type_lines(types: Types, fields: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the lines of the enums, the structs and the names of long types."""
    for values in types.enums.values():
        yield from _enum_lines(values)
    for made in types.classes.values():
        yield from _class_lines(made, fields[made.name])
    if types.aliases:
        if types.classes or types.enums:
            yield ""
        for lines in types.aliases:
            yield from lines
        yield ""


def _errors(contract: Contract) -> dict[str, str]:
    """Return the messages of all errors that methods state, by code."""
    errors: dict[str, str] = {}
    for method in (contract.methods or {}).values():
        errors |= method.errors
    return errors


def _names_of(errors: dict[str, str], names: Scope) -> dict[str, str]:
    """Return the names of the classes of errors, by code."""
    raised = {}
    for code, text in sorted(errors.items()):
        if not any(map(str.isalpha, text)):
            text = f"Error {code}"
        raised[code] = names.make_class(text)
    return raised


def _calls(contract: Contract, types: Types) -> list[Callable]:
    """Return all methods and tools of a contract."""
    methods = sorted((contract.methods or {}).items())
    tools = sorted((contract.tools or {}).items())
    calls = [_of_method(name, method, contract, types) for name, method in methods]
    calls += [_of_tool(name, tool, contract, types) for name, tool in tools]
    if not calls:
        raise UsageError(
            "There is nothing to call.",
            "the contract has no methods and no tools",
            "check the target, or --as",
        )
    return calls


def _name_long_types(types: Types, calls: Sequence[Callable]) -> None:
    """Write every type once, so that the long ones have their names."""
    for made in list(types.classes.values()):
        for each, (found, _) in made.fields.items():
            types.text(found, f"{made.name} {each}")
    for call in calls:
        types.text(call.returns, f"{call.name} result")
        for argument, found, _, _ in call.arguments:
            types.text(found, f"{call.name} {argument}")


def _imports(body: str, *, raises: bool) -> Iterator[str]:
    """Yield the imports that the body of the module uses."""
    yield "from __future__ import annotations"
    yield ""
    of_python = list(_imports_of_python(body))
    if of_python:
        yield from of_python
        yield ""
    offered = ("UNSET", "Struct", "UnsetType", "field")
    if used := [each for each in offered if _uses(body, each)]:
        yield f"from msgspec import {', '.join(used)}"
        yield ""
    if raises:
        yield "from wirecall import RpcError"
    yield "from wirecall.contract import Caller, SyncCaller"
    if _uses(body, "Called"):
        yield "from wirecall.mcp.client.results import Called"
    yield ""


def _imports_of_python(body: str) -> Iterator[str]:
    if _uses(body, "dt"):
        yield "import datetime as dt"
    for package, offered in (
        ("decimal", ("Decimal",)),
        ("enum", ("IntEnum", "StrEnum")),
        ("typing", ("Any", "Literal", "Union")),
        ("uuid", ("UUID",)),
    ):
        if used := [each for each in offered if _uses(body, each)]:
            yield f"from {package} import {', '.join(used)}"


def _base_of(values: Values) -> str:
    return "StrEnum" if isinstance(values.values[0], str) else "IntEnum"


def _enum_lines(made: Values) -> Iterator[str]:
    """Yield the lines of an enum. The names of its members are those of its values."""
    yield ""
    yield f"class {made.name}({_base_of(made)}):"
    text = docstring("    ", made.text)
    yield from text
    if text:
        yield ""
    names = Scope(OWN)
    for value in made.values:
        if isinstance(value, str):
            yield f"    {names.make(value.upper())} = {literal(value)}"
        else:
            yield f"    {names.make(f'VALUE_{value}'.replace('-', 'MINUS_'))} = {value}"
    yield ""


def _class_lines(made: Class, fields: list[str]) -> Iterator[str]:
    """Yield the lines of a struct."""
    yield ""
    options = ["Struct", "kw_only=True"]
    if made.tag is not None:
        tag = made.constants[made.tag]
        options += [f"tag_field={literal(made.tag)}", f"tag={literal(tag)}"]
    yield from statement("", f"class {made.name}(", options, "):")
    text = docstring("    ", made.text)
    yield from text
    if text and fields:
        yield ""
    yield from fields
    if not text and not fields:
        yield "    pass"
    yield ""


def _uses(body: str, name: str) -> bool:
    """Return whether a name is in the code.

    A string may contain it too: an unused import is not an error.
    """
    return re.search(rf"\b{name}\b", body) is not None


def _of_method(name: str, method: LockedMethod, contract: Contract, types: Types) -> Callable:
    place = f"methods/{step_of(name)}"
    texts = contract.descriptions
    # The client sends the keys itself.
    taken = without_key(method.params)
    order = [each for each in method.order if each in members(taken)]
    return Callable(
        name,
        texts.get(f"{place}/description") or texts.get(f"{place}/summary", ""),
        _arguments(name, taken, order, f"{place}/params", contract, types),
        types.of(method.result, method.result, f"{name} result", f"{place}/result"),
        keyed=method.key is not None,
        reads=method.kind == "query",
    )


def _of_tool(name: str, tool: LockedTool, contract: Contract, types: Types) -> Callable:
    place = f"tools/{step_of(name)}"
    texts = contract.descriptions
    # The client sends the keys itself.
    taken = tool.input
    if contract.honours_keys:
        taken = without_key(tool.input)
    order = [each for each in sorted(members(taken)) if each != KEY or not contract.honours_keys]
    return Callable(
        name,
        texts.get(f"{place}/description") or texts.get(f"{place}/title", ""),
        _arguments(name, taken, order, f"{place}/input", contract, types),
        types.of(tool.output, tool.output, f"{name} result", f"{place}/output"),
        keyed=bool(contract.honours_keys) and tool.read_only is not True,
        reads=tool.read_only is True,
        is_content=tool.output is None,
    )


def _arguments(
    name: str,
    schema: JsonObject,
    order: Sequence[str],
    place: str,
    contract: Contract,
    types: Types,
) -> list[tuple[str, Type, bool, str]]:
    found = []
    stated = members(schema)
    needed = required(schema)
    for each in order:
        inside = f"{place}/properties/{step_of(each)}"
        made = types.of(stated.get(each), schema, f"{name} {each}", inside)
        found.append(
            (each, made, each in needed, contract.descriptions.get(f"{inside}/description", ""))
        )
    return found


def _fields(of: Class, types: Types) -> Iterator[str]:
    names = Scope(OWN, types.names.taken)
    for wire, (found, needed) in of.fields.items():
        if wire == of.tag:
            continue
        name = names.make(wire)
        shown = types.text(found, f"{of.name} {wire}")
        declared = f"{name}: {_optional(shown, needed)}"
        options = []
        if not needed:
            options.append("default=UNSET")
        if name != wire:
            options.append(f"name={literal(wire)}")
        if options == ["default=UNSET"]:
            yield f"    {declared} = UNSET"
        elif options:
            yield from statement("    ", f"{declared} = field(", options, ")")
        else:
            yield f"    {declared}"


def _optional(shown: str, is_needed: bool) -> str:
    """Return a type with that of an omitted value, if it may be omitted."""
    if is_needed or shown == "Any":
        return shown
    return f"{shown} | UnsetType"


def _method(of: Callable, name: str, types: Types, *, is_async: bool) -> Iterator[str]:
    """Yield the lines of a method of a client."""
    names = {}
    made = Scope({*OWN, *_ARGUMENTS}, types.names.taken)
    needed: list[str] = []
    others: list[str] = []
    texts: list[str] = []
    for wire, found, is_needed, text in of.arguments:
        names[wire] = made.make(wire)
        shown = _optional(types.text(found, f"{of.name} {wire}"), is_needed)
        if is_needed:
            needed.append(f"{names[wire]}: {shown}")
        else:
            others.append(f"{names[wire]}: {shown} = UNSET")
        if text.strip():
            texts.append(f"{names[wire]}: {' '.join(text.split())}")
    if of.keyed:
        others.append("key: str | bool | None = None")
    returns = types.text(of.returns, f"{of.name} result")
    if of.is_content:
        returns = "Called"
    yield ""
    define = "async def" if is_async else "def"
    given = ["self", "*", *needed, *others, "timeout: float | None = None"]
    yield from statement("    ", f"{define} {name}(", given, f") -> {returns}:")
    yield from docstring("        ", of.text, "\n".join(texts))
    if names:
        entries = [f"{literal(wire)}: {own}" for wire, own in names.items()]
        yield from statement("        ", "params = {", entries, "}")
    options = [literal(of.name), "params" if names else "{}", *_call_options(of, returns)]
    call = "await self._call(" if is_async else "self._call("
    if returns == "None":
        yield from statement("        ", call, options, ")")
    elif returns == "Any":
        yield from statement("        ", f"return {call}", options, ")")
    else:
        yield from statement("        ", f"result: {returns} = {call}", options, ")")
        yield "        return result"


def _call_options(of: Callable, returns: str) -> list[str]:
    """Return the options with which a method of a client makes its call."""
    options = []
    if not of.is_content and returns != "None":
        options.append(f"returns={returns}")
    if of.keyed:
        options.append("key=key")
    options.append("timeout=timeout")
    if of.reads:
        options.append("query=True")
    return options
