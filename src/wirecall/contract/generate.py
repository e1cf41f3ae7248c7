"""A contract as a Python module: a typed client that an editor can read.

Everything in a contract is a server's word, and reaches the module as a name that `Scope` has made, as a string literal, or
as the text of a docstring; nothing else of it becomes code. The rules of names:

1. Characters that Python does not allow become `_`, and leading ones are dropped; a name that begins with a digit, or is
   empty, gets `x_` in front.
2. Python's keywords, and the names that the module uses itself, get `_` behind; a name that is taken gets `_2`, `_3`, ...
3. A member whose name had to change keeps its own name on the wire: `class_: str = field(name="class")`.

The layout is that of `ruff format`: a statement is on one line if it fits, else it has one item on each line and a comma
behind the last.
"""

import builtins
import inspect
import keyword
import re
import textwrap
import unicodedata
from collections.abc import Collection, Iterator, Sequence

import msgspec
from msgspec import Struct

from wirecall.contract.lock import Contract, LockedMethod, LockedTool, listed, members, required, resolved, step_of
from wirecall.errors import UsageError
from wirecall.protocol.messages import Json, JsonObject
from wirecall.protocol.params import KEY

MARK = "# Made by `wirecall client`: make it again instead of editing it."
WIDTH = 88  # ruff's own
LONG = 40  # characters of a type; a longer one gets a name
STEPS = 500_000  # parts of all types; references can multiply them without an end
NAME = 64  # characters of a name

# The names that the module uses itself. A member of this name would hide the type.
OWN = frozenset(
    (
        *("annotations", "Any", "Literal", "Union", "UNSET", "Struct", "UnsetType", "field"),
        *("RpcError", "Called", "Caller", "SyncCaller"),
        *("str", "int", "float", "bool", "list", "dict", "tuple"),
    )
)
_UNNAMEABLE = re.compile(r'[\x00-\x1f"\\]')
_ATTRIBUTES = ("client", "open", "aclose", "close", "PROTOCOL", "DIGEST", "ERRORS", "CALLER")
_ARGUMENTS = ("self", "key", "timeout", "params", "result")


# --- names and texts ----------------------------------------------------------------------------------------------------


class Scope:
    """The names of one scope: each is given once, and is not one of an `outer` scope. `own` have a meaning already."""

    def __init__(self, own: Collection[str], outer: Collection[str] = ()) -> None:
        self.taken: set[str] = set()
        self.own = own
        self._outer = outer
        self._counts: dict[str, int] = {}

    def make(self, text: str) -> str:
        """Return a name for Python."""
        plain = "".join(sign if f"a{sign}".isidentifier() else "_" for sign in unicodedata.normalize("NFKC", text))
        plain = plain.lstrip("_")[:NAME]
        if not plain.isidentifier():
            plain = f"x_{plain}"
        if keyword.iskeyword(plain) or plain in self.own:
            plain += "_"
        name, count = plain, self._counts.get(plain, 1)
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
    """Return a text as a literal, in the quotes that need fewer escapes."""
    quote = "'" if text.count('"') > text.count("'") else '"'
    signs = []
    for sign in text:
        if sign in ("\\", quote):
            sign = f"\\{sign}"
        elif not sign.isprintable():
            sign = sign.encode("unicode_escape").decode()
        signs.append(sign)
    return f"{quote}{''.join(signs)}{quote}"


def docstring(indent: str, *texts: str) -> list[str]:
    """Return texts as the lines of a docstring; no line if they are empty."""
    lines: list[str] = []
    for text in texts:
        told = inspect.cleandoc("\n".join(text.splitlines()))
        told = "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in told).strip()
        if told:
            lines += [""] if lines else []
            lines += [part for line in told.split("\n") for part in textwrap.wrap(line, WIDTH - len(indent) - 6) or [""]]
    # A backslash and three quotes are the only signs that have a meaning in a docstring.
    lines = [line.replace("\\", "\\\\").replace('"""', "'''") for line in lines]
    if not lines:
        return []
    if lines[0].startswith('"'):
        lines[0] = f" {lines[0]}"
    if len(lines) == 1:
        return [f'{indent}"""{lines[0]}{" " if lines[0].endswith(chr(34)) else ""}"""']
    return [f'{indent}"""{lines[0]}', *(f"{indent}{line}".rstrip() for line in lines[1:]), f'{indent}"""']


def statement(indent: str, before: str, items: Sequence[str], after: str) -> list[str]:
    """Return a statement around items: on one line, or on a line for each item."""
    line = f"{indent}{before}{', '.join(items)}{after}"
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in line if not sign.isascii())  # they take two columns
    if len(line) + wide <= WIDTH or not items:
        return [line]
    return [f"{indent}{before}", *(f"{indent}    {item}," for item in items), f"{indent}{after}"]


# --- types --------------------------------------------------------------------------------------------------------------


class Type(Struct):
    """A union of types, with at most one of each kind: msgspec could not tell two of a kind apart."""

    plain: set[str] = set()  # of "Any", "None", "bool", "int", "float", "str"
    literals: dict[str | int, None] = {}
    entries: "Type | None" = None  # of a list
    values: "Type | None" = None  # of a dict with any names
    classes: dict[str, None] = {}
    fixed: "list[Type] | None" = None  # the entries of a tuple


class Class(Struct):
    """A class of the module: the schema of an object."""

    name: str
    text: str = ""
    fields: dict[str, tuple[Type, bool]] = {}  # by the name on the wire: its type, and whether it is required
    constants: dict[str, str] = {}  # members that always have one text
    tag: str | None = None  # the member that tells this class from others


class Types:
    """The classes of a module, made as they are needed."""

    def __init__(self, names: Scope, texts: dict[str, str]) -> None:
        self.names = names
        self.classes: dict[str, Class] = {}
        self.aliases: list[list[str]] = []
        self._texts = texts
        self._steps = 0
        self._known: dict[bytes, str] = {}  # classes by what they mean
        self._meant: dict[tuple[int, str], bytes] = {}  # what the schemas of a contract mean, by themselves and their hint
        self._named: dict[tuple[str, ...], str] = {}  # long types by what they mean

    def of(self, schema: Json, root: Json, hint: str, place: str, followed: tuple[str, ...] = ()) -> Type:
        """Return the type of a schema. `hint` names a class that it needs; `place` is that of its texts."""
        self._steps += 1
        if self._steps > STEPS:
            raise UsageError("A type of the server cannot be generated.", f"it consists of more than {STEPS} parts")
        if not isinstance(schema, dict):
            return Type(plain={"Any"})
        if "$ref" in schema:
            reference = str(schema["$ref"])
            target = resolved(schema, root)
            if target is None or reference in followed:
                return Type(plain={"Any"})  # elsewhere, or a type that consists of itself
            name = reference.rpartition("/")[2]
            inside = "/".join([*place.split("/")[:3], "$defs", name])  # methods/NAME/params/$defs/...
            return self.of(target, root, _last(name), inside, (*followed, reference))
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                parts = [
                    self.of(part, root, f"{hint} {at or ''}", f"{place}/{word}/{at}", followed)
                    for at, part in enumerate(schema[word])
                ]
                return self._union(parts)
        if isinstance(schema.get("allOf"), list):
            is_one = len(schema["allOf"]) == 1 and "type" not in schema and "properties" not in schema
            return self.of(schema["allOf"][0], root, hint, f"{place}/allOf/0", followed) if is_one else Type(plain={"Any"})
        if (values := listed(schema)) is not None:
            return self._union([_constant(value) for value in values])
        named = schema.get("type")
        kinds = named if isinstance(named, list) else [named]
        return self._union([self._single(kind, schema, root, hint, place, followed) for kind in kinds])

    def _single(self, kind: Json, schema: JsonObject, root: Json, hint: str, place: str, followed: tuple[str, ...]) -> Type:
        plain = {"null": "None", "boolean": "bool", "integer": "int", "number": "float", "string": "str"}
        if isinstance(kind, str) and kind in plain:
            return Type(plain={plain[kind]})
        if kind == "array":
            first, items = schema.get("prefixItems"), schema.get("items", True)
            if isinstance(first, list) and first and items is False and schema.get("minItems") == len(first):
                parts = enumerate(first)
                return Type(fixed=[self.of(one, root, f"{hint} {at}", f"{place}/prefixItems/{at}") for at, one in parts])
            # References inside a list may come back to it, but not as its own entries.
            item = Type(plain={"Any"}) if first else self.of(items, root, f"{hint} item", f"{place}/items", followed)
            return Type(entries=item)
        if kind != "object":
            return Type(plain={"Any"})
        rest, stated = schema.get("additionalProperties"), members(schema)
        if not stated and isinstance(rest, dict):
            return Type(values=self.of(rest, root, f"{hint} value", f"{place}/additionalProperties", followed))
        # A struct would lose further members, and msgspec does not rename a member to these signs.
        if not stated or rest not in (None, False) or any(_UNNAMEABLE.search(each) for each in stated):
            return Type(values=Type(plain={"Any"}))
        if (id(schema), hint) not in self._meant:
            self._meant[id(schema), hint] = _meaning(hint, schema, root)
        known = self._meant[id(schema), hint]
        if known in self._known:
            return Type(classes={self._known[known]: None})
        self._known[known] = name = self.names.make_class(hint)
        made = self.classes[name] = Class(name, self._texts.get(f"{place}/description", ""))
        needed = required(schema)
        for each, part in stated.items():
            values = listed(part)
            if each in needed and values is not None and len(values) == 1 and isinstance(values[0], str):
                made.constants[each] = values[0]
        for each, part in sorted(stated.items()):
            found = self.of(part, root, f"{name} {each}", f"{place}/properties/{step_of(each)}")
            made.fields[each] = (found, each in needed)
        return Type(classes={name: None})

    def _union(self, parts: Sequence[Type]) -> Type:
        """Return one type for all of them. It may admit more: msgspec reads one kind of object and one of list."""
        if len(parts) == 1:
            return parts[0]
        whole = Type(
            plain=set().union(*(part.plain for part in parts)),
            literals={value: None for part in parts for value in part.literals},
            classes={name: None for part in parts for name in part.classes},
        )
        lists = [part.entries for part in parts if part.entries is not None]
        tuples = [part.fixed for part in parts if part.fixed is not None]
        if len(tuples) == 1 and not lists:
            whole.fixed = tuples[0]
        elif lists or tuples:
            whole.entries = self._union(lists) if not tuples else Type(plain={"Any"})
        dicts = [part.values for part in parts if part.values is not None]
        if dicts and not whole.classes:
            whole.values = self._union(dicts)
        elif dicts or (len(whole.classes) > 1 and not self._tagged([self.classes[name] for name in whole.classes])):
            whole.classes, whole.values = {}, Type(plain={"Any"})
        if "Any" in whole.plain:
            return Type(plain={"Any"})
        if "float" in whole.plain:
            whole.plain.discard("int")
        numbers = bool(whole.plain & {"int", "float"})
        whole.literals = {
            value: None
            for value in whole.literals
            if not (isinstance(value, str) and "str" in whole.plain) and not (isinstance(value, int) and numbers)
        }
        return whole

    def _tagged(self, classes: Sequence[Class]) -> bool:
        """Let a member tell classes apart, if one has another text in each of them."""
        for name in sorted(classes[0].constants):
            tags = {each.constants.get(name) for each in classes}
            if len(tags) == len(classes) and None not in tags and all(each.tag in (None, name) for each in classes):
                for each in classes:
                    each.tag = name
                return True
        return False

    def text(self, type: Type, hint: str) -> str:
        """Return a type as it is written; a long one gets a name."""
        parts = []
        if type.literals:
            values = [literal(value) if isinstance(value, str) else str(value) for value in type.literals]
            parts.append(f"Literal[{', '.join(values)}]")
            if len(parts[0]) > LONG:
                parts[0] = self._alias(hint, "Literal[", values)
        parts += [name for name in ("str", "int", "float", "bool") if name in type.plain]
        if type.entries is not None:
            parts.append(f"list[{self.text(type.entries, f'{hint} item')}]")
        if type.fixed is not None:
            entries = [self.text(each, f"{hint} {at}") for at, each in enumerate(type.fixed)]
            shown = f"tuple[{', '.join(entries)}]"
            parts.append(shown if len(shown) <= LONG else self._alias(hint, "tuple[", entries))
        if type.values is not None:
            parts.append(f"dict[str, {self.text(type.values, f'{hint} value')}]")
        parts += [*type.classes, *(name for name in ("Any", "None") if name in type.plain)]
        shown = " | ".join(parts) or "Any"  # without parts, an empty enum or anyOf admits nothing
        return shown if len(shown) <= LONG or len(parts) == 1 else self._alias(hint, "Union[", parts)

    def _alias(self, hint: str, before: str, items: Sequence[str]) -> str:
        meant = (before, *items)
        if meant not in self._named:
            self._named[meant] = name = self.names.make_class(hint)
            self.aliases.append(statement("", f"{name} = {before}", items, "]"))
        return self._named[meant]


def _last(name: str) -> str:
    """Return the name of a type without the method that wirecall puts in front: order.place.result.Order is Order."""
    return name.rpartition(".")[2] or name


def _constant(value: Json) -> Type:
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63):
        return Type(literals={value: None})
    kinds = {bool: "bool", float: "float", int: "int"}
    return Type(plain={"None" if value is None else kinds.get(type(value), "Any")})


def _meaning(hint: str, schema: JsonObject, root: Json) -> bytes:
    """Return a text that is equal for equal classes: their name, their schema, and all definitions that it refers to."""
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
    # Two methods may mean one type, which wirecall lists once for each: pets.Tree and tree.grow.Tree.
    names = {reference: _last(reference.rpartition("/")[2]) for reference in found}
    if len(set(names.values())) < len(names):
        names = {}
    text = msgspec.json.encode([hint, schema, {names.get(each, each): found[each] for each in found}], order="sorted")
    written = {msgspec.json.encode({"$ref": each}): msgspec.json.encode({"$ref": name}) for each, name in names.items()}
    return re.sub(rb'\{"\$ref":"(?:[^"\\]|\\.)*"\}', lambda found: written.get(found[0], found[0]), text)


# --- the module ---------------------------------------------------------------------------------------------------------


class Callable(Struct):
    """A method or a tool, as the module calls it."""

    name: str
    text: str
    arguments: list[tuple[str, Type, bool, str]]  # name on the wire, type, required, text
    returns: Type
    keyed: bool = False
    reads: bool = False
    is_content: bool = False  # a tool without a schema of its result answers with content


def generated(contract: Contract, protocol: str, name: str | None = None) -> str:
    """Return the module of a client. `name` is the class, else it is made from the server's name."""
    try:
        # The same bytes, whether the contract comes from a server or from a file, where it is sorted.
        contract = msgspec.json.decode(contract.spoken(protocol).canonical(), type=Contract)
        text = "\n".join(_module(contract, protocol, name)) + "\n"
        compile(text, "client", "exec")  # a type that this process can walk may be too deep for Python's own parser
        return text
    except (RecursionError, SyntaxError) as error:
        is_deep = isinstance(error, RecursionError) or "nested" in str(error.msg)
        why = "it is nested too deep" if is_deep else f"Python cannot read the module: {error}"
        raise UsageError("A type of the server cannot be generated.", why, "flatten the type") from error


def _module(contract: Contract, protocol: str, title: str | None) -> Iterator[str]:
    # 1. Everything that is called, and the types that it needs.
    names = Scope({*OWN, *dir(builtins)})
    title = title or f"{Scope(names.own).make_class(contract.name or 'server')}Client"
    names.taken |= {title, f"Sync{title}"}
    errors = {code: text for method in (contract.methods or {}).values() for code, text in method.errors.items()}
    raised = {
        code: names.make_class(text if any(map(str.isalpha, text)) else f"Error {code}")
        for code, text in sorted(errors.items())
    }
    types = Types(names, contract.descriptions)
    calls = [
        *(_of_method(each, method, contract, types) for each, method in sorted((contract.methods or {}).items())),
        *(_of_tool(each, tool, contract, types) for each, tool in sorted((contract.tools or {}).items())),
    ]
    if not calls:
        raise UsageError(
            "There is nothing to call.", "the contract has no methods and no tools", "check the target, or --as"
        )

    # 2. The names of long types. They come first, because members must not have these names.
    for made in list(types.classes.values()):
        for each, (found, _) in made.fields.items():
            types.text(found, f"{made.name} {each}")
    for call in calls:
        types.text(call.returns, f"{call.name} result")
        for argument, found, _, _ in call.arguments:
            types.text(found, f"{call.name} {argument}")
    fields = {each.name: list(_fields(each, types)) for each in types.classes.values()}
    methods = Scope({*OWN, *_ATTRIBUTES}, names.taken)
    named = [(each, methods.make(each.name)) for each in calls]
    bodies = [[line for each, own in named for line in _method(each, own, types, is_async)] for is_async in (True, False)]

    # 3. The head: the imports that are used.
    body = "\n".join(line for lines in (*fields.values(), *types.aliases, bodies[0]) for line in lines)
    yield MARK
    yield from docstring("", f"A client of {contract.name or 'a server'}.")
    yield ""
    yield "from __future__ import annotations"
    yield ""
    body += " Struct" if fields else ""
    for package, offered in (
        ("typing", ("Any", "Literal", "Union")),
        ("msgspec", ("UNSET", "Struct", "UnsetType", "field")),
    ):
        if used := [each for each in offered if _uses(body, each)]:
            yield f"from {package} import {', '.join(used)}"
            yield ""
    if raised:
        yield "from wirecall import RpcError"
    yield "from wirecall.contract import Caller, SyncCaller"
    if _uses(body, "Called"):
        yield "from wirecall.mcp.client.results import Called"
    yield ""

    # 4. The types, the errors, and the two clients.
    for made in types.classes.values():
        yield ""
        options = ["Struct", "kw_only=True"]
        if made.tag is not None:
            options += [f"tag_field={literal(made.tag)}", f"tag={literal(made.constants[made.tag])}"]
        yield from statement("", f"class {made.name}(", options, "):")
        lines = docstring("    ", made.text)
        yield from lines
        if lines and fields[made.name]:
            yield ""
        yield from fields[made.name] or ([] if lines else ["    pass"])
        yield ""
    for at, lines in enumerate(types.aliases):
        if at == 0 and types.classes:
            yield ""
        yield from lines
    if types.aliases:
        yield ""
    for code, each_name in raised.items():
        yield ""
        yield f"class {each_name}(RpcError):"
        yield from docstring("    ", f"Code {code}: {errors[code]}")
        yield ""
    yield ""
    yield f"class {title}(Caller):"
    yield '    """Calls that wait in an event loop."""'
    yield ""
    yield f"    PROTOCOL = {literal(protocol)}"
    yield f"    DIGEST = {literal(contract.digest)}"
    if raised:
        yield from statement("    ", "ERRORS = {", [f"{code}: {each}" for code, each in raised.items()], "}")
    yield from bodies[0]
    yield ""
    yield ""
    yield f"class Sync{title}(SyncCaller):"
    yield '    """The same calls, blocking."""'
    yield ""
    yield f"    CALLER = {title}"
    yield from bodies[1]


def _uses(body: str, name: str) -> bool:
    """Return whether a name is in the code. A text may have it too: an import too many is not an error."""
    return re.search(rf"\b{name}\b", body) is not None


def _of_method(name: str, method: LockedMethod, contract: Contract, types: Types) -> Callable:
    place, texts = f"methods/{step_of(name)}", contract.descriptions
    return Callable(
        name,
        texts.get(f"{place}/description") or texts.get(f"{place}/summary", ""),
        _arguments(name, method.params, method.order, f"{place}/params", contract, types),
        types.of(method.result, method.result, f"{name} result", f"{place}/result"),
        keyed=method.key is not None,
        reads=method.kind == "query",
    )


def _of_tool(name: str, tool: LockedTool, contract: Contract, types: Types) -> Callable:
    place, texts = f"tools/{step_of(name)}", contract.descriptions
    order = [each for each in sorted(members(tool.input)) if each != KEY or not contract.honours_keys]
    return Callable(
        name,
        texts.get(f"{place}/description") or texts.get(f"{place}/title", ""),
        _arguments(name, tool.input, order, f"{place}/input", contract, types),
        types.of(tool.output, tool.output, f"{name} result", f"{place}/output"),
        keyed=bool(contract.honours_keys) and tool.read_only is not True,
        reads=tool.read_only is True,
        is_content=tool.output is None,
    )


def _arguments(
    name: str, schema: JsonObject, order: Sequence[str], place: str, contract: Contract, types: Types
) -> list[tuple[str, Type, bool, str]]:
    found, stated, needed = [], members(schema), required(schema)
    for each in order:
        inside = f"{place}/properties/{step_of(each)}"
        made = types.of(stated.get(each), schema, f"{name} {each}", inside)
        found.append((each, made, each in needed, contract.descriptions.get(f"{inside}/description", "")))
    return found


def _fields(of: Class, types: Types) -> Iterator[str]:
    names = Scope(OWN, types.names.taken)
    for wire, (found, needed) in of.fields.items():
        if wire == of.tag:
            continue
        name = names.make(wire)
        shown = types.text(found, f"{of.name} {wire}")
        options = ([] if needed else ["default=UNSET"]) + ([] if name == wire else [f"name={literal(wire)}"])
        declared = f"{name}: {shown}{'' if needed or shown == 'Any' else ' | UnsetType'}"
        if not needed and name == wire:
            yield f"    {declared} = UNSET"
        elif options:
            yield from statement("    ", f"{declared} = field(", options, ")")
        else:
            yield f"    {declared}"


def _method(of: Callable, name: str, types: Types, is_async: bool) -> Iterator[str]:
    names, made = {}, Scope({*OWN, *_ARGUMENTS}, types.names.taken)
    needed: list[str] = []
    others: list[str] = []
    told: list[str] = []
    for wire, found, is_needed, text in of.arguments:
        names[wire] = made.make(wire)
        shown = types.text(found, f"{of.name} {wire}")
        unset = "" if shown == "Any" else " | UnsetType"
        (needed if is_needed else others).append(f"{names[wire]}: {shown}" + ("" if is_needed else f"{unset} = UNSET"))
        told += [f"{names[wire]}: {' '.join(text.split())}"] if text.strip() else []
    keyed = ["key: str | bool | None = None"] if of.keyed else []
    returns = "Called" if of.is_content else types.text(of.returns, f"{of.name} result")
    yield ""
    prefix = "async def" if is_async else "def"
    given = ["self", "*", *needed, *others, *keyed, "timeout: float | None = None"]
    yield from statement("    ", f"{prefix} {name}(", given, f") -> {returns}:")
    yield from docstring("        ", of.text, *["\n".join(told)] if told else [])
    if names:
        yield from statement("        ", "params = {", [f"{literal(wire)}: {own}" for wire, own in names.items()], "}")
    wait = "await " if is_async else ""
    options = [literal(of.name), "params" if names else "{}"]
    options += [] if of.is_content or returns == "None" else [f"returns={returns}"]
    options += (["key=key"] if of.keyed else []) + ["timeout=timeout"] + (["query=True"] if of.reads else [])
    if returns == "None":
        yield from statement("        ", f"{wait}self._call(", options, ")")
    elif returns == "Any":
        yield from statement("        ", f"return {wait}self._call(", options, ")")
    else:
        yield from statement("        ", f"result: {returns} = {wait}self._call(", options, ")")
        yield "        return result"
