"""A function's signature as the decoder of its params.

`Signature(function, inject=Context)` reads a signature once, at registration, and builds everything a call needs:

    caller(function)         a function of raw params that calls a `simple` function (no context, no keyword-only)
    bind(raw)                raw params -> positional arguments, for a `simple` function
    bind_all(raw, injected)  raw params -> positional and keyword arguments, for any function
    schema, result_schema    JSON Schema 2020-12

The rules of the file:

1. Params come by name (an object) or by position (an array); msgspec decodes both straight into the declared types.
   A parameter whose type is pydantic's is left as JSON there, and decoded and described by pydantic (`models`).
2. An untyped parameter takes any JSON. `*rest` takes the surplus positions, or a list under its own name.
3. `_meta` is accepted beside every method's params and `idempotency_key` beside a command's; neither is passed to a
   function that does not declare it.
4. `Header("Region")` in an Annotated marks a parameter that MCP clients repeat in an HTTP header (`x-mcp-header`).
5. Every mismatch is an `InvalidParams` that says what and where: `params.cents: expected int, got str`.
"""

import enum
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import MOST_PROBLEMS, EncodeError, InvalidParams, ResultMisfit, UsageError
from wirecall.protocol.messages import JsonObject, Unsendable, Whole, encode

if TYPE_CHECKING:
    from wirecall.protocol.models import Modelled, ModelledParameter

T = TypeVar("T")

META = "_meta"
KEY = "idempotency_key"
MARK = "x-mcp-header"
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # a name in a header (RFC 9110, section 5.6.2)
REQUIRED: object = type("REQUIRED", (), {"__repr__": lambda _: "REQUIRED"})()

ParameterKind: TypeAlias = Literal["position", "name", "rest", "others"]  # normal, keyword-only, *args, **kwargs
Find: TypeAlias = Callable[[object], object | None]  # returns the provided type for an annotation, if there is one

_NO_PARAMS = Raw(b"[]")
_SCALARS = (type(None), bool, int, float, str)
_HEADER_TYPES = {str: "string", int: "integer", bool: "boolean"}  # of parameters that a header can repeat
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode


class Header(Struct, frozen=True):
    """Marks a parameter of a tool: MCP clients repeat its value in the HTTP header `Mcp-Param-NAME` (2026-07-28).

    `Annotated[str, Header("Region")]` lets a proxy route by the region without reading bodies.
    """

    name: str


class Parameter(Struct, frozen=True):
    """One declared parameter that the caller may fill."""

    name: str  # in params: the name in the function, or an alias
    type: object
    default: object = REQUIRED
    kind: ParameterKind = "position"
    keyword: str = ""  # the name in the function
    model: "ModelledParameter | None" = None  # decodes it, if its type is pydantic's

    @property
    def required(self) -> bool:
        return self.default is REQUIRED and self.kind in ("position", "name")

    def absent(self) -> Any:
        """Return the value of a parameter that is not given."""
        # As in Python, every call without the argument gets the one default object, unless a pydantic Field has it.
        return self.default if self.model is None or self.kind == "rest" else self.model.default()


class Signature:
    """How one function takes its params."""

    def __init__(
        self, function: Callable[..., object], *, inject: type, keyed: bool = False, find: Find | None = None
    ) -> None:
        from wirecall.protocol import models  # late: `import wirecall` stays light

        self.function = function
        self.parameters, self.injected, self.provided, self.returns = read_signature(function, inject, find)
        names = [p.name for p in self.parameters]
        if len({*names}) < len(names):
            raise UsageError(
                f"Two parameters of {name_of(function)} have the same name: {', '.join(sorted(names))}.",
                "an alias is the name of a parameter for its callers",
                "give one of them another alias",
            )
        self.takes_key = KEY in names
        self.key_position = next((i for i, p in enumerate(self.parameters) if p.name == KEY and p.kind == "position"), None)
        self._beside = [name for name in ((META, KEY) if keyed else (META,)) if name not in names]
        self._named = [p for p in self.parameters if p.kind != "others"]
        self._positional = [p for p in self.parameters if p.kind == "position"]
        self._rest = next((p for p in self.parameters if p.kind == "rest"), None)
        self._others = next((p for p in self.parameters if p.kind == "others"), None)
        self._modelled = [p for p in self.parameters if p.model is not None]
        is_plain = self._named == self._positional or (self._named == [self._rest] and not self._modelled)
        self.is_flat = is_plain and self._others is None
        self.simple = self.is_flat and not self.injected and not self.provided

        # Names that must not arrive in `**others`: `self` of a method, the arguments of a partial, the context.
        code = getattr(function, "__code__", None) or getattr(getattr(function, "func", None), "__code__", None)
        self._taken = {*(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ())}
        self._taken |= {*self.injected, *self.provided}
        # The parameters that no caller fills, in the order in which they are inserted.
        places = {**self.injected, **{name: index for name, (_, index) in self.provided.items()}}
        self._filled = sorted(places.items(), key=lambda place: -1 if place[1] is None else place[1])

        # The decoders. The fields of the structs have made-up names, because `_meta` or `self` cannot be a field's name.
        fields = [_field(i, p) for i, p in enumerate(self._named)]
        beside = [(f"beside{i}", Any, msgspec.field(default=UNSET)) for i in range(len(self._beside))]
        wire = [p.name for p in self._named] + self._beside
        self._by_name = self._decoder(
            msgspec.defstruct(
                "Params",
                fields + beside,
                rename={field[0]: name for field, name in zip(fields + beside, wire, strict=True)},
                forbid_unknown_fields=self._others is None,
                kw_only=True,
                gc=False,
            )
        )
        in_order = [_field(i, p) for i, p in enumerate(self._positional)]
        self._by_position = self._decoder(
            msgspec.defstruct("Params", in_order, array_like=True, forbid_unknown_fields=True, gc=False)
        )
        one_by_one = self.parameters if self._rest or self._others else []
        self._one_by_one = {p.name: self._decoder(p.type) for p in one_by_one if p.model is None}
        self._named_values = _getter(len(self._named))
        self._positional_values = _getter(len(self._positional))
        self._parts = {p.name: [part for part, _ in models.parts(p.type, set())] for p in self.parameters}
        self._has_dataclasses = any(
            hasattr(part, "__dataclass_fields__") for p in self.parameters if not p.model for part in self._parts[p.name]
        )
        self.bind: Callable[[Raw | UnsetType], Sequence[object]] = self.caller(lambda *args: args)
        self.result: Modelled | None = None  # writes the result, if its type is pydantic's
        self.schema, self.result_schema = self._describe()
        self.has_headers = self._mark()

    def bind_all(self, raw: Raw | UnsetType, injected: object) -> tuple[Sequence[object], Mapping[str, object]]:
        """Return the arguments of any function; `injected` goes to the parameters of the injected type. A provided parameter
        is None until its value is made."""
        if self.simple:
            return self.bind(raw), {}
        given = _NO_PARAMS if raw is UNSET else raw
        args: list[object] = []
        keywords: dict[str, object] = {}
        try:
            if bytes(given)[:1] == b"{":
                values: Sequence[Any] = self._named_values(self._by_name.decode(given))
                if self._modelled:
                    values = self._decode_models(self._named, values)
                for parameter, value in zip(self._named, values, strict=True):
                    if parameter.kind == "position":
                        args.append(value)
                    elif parameter.kind == "rest":
                        args += value
                    else:
                        keywords[parameter.keyword] = value
                if self._others is not None:
                    known = {p.name for p in self._named} | set(self._beside)
                    for name, item in _decode_members(given).items():
                        if name in known:
                            continue
                        if name in self._taken:
                            raise InvalidParams(f"params.{name}: unknown name")
                        keywords[name] = self._decode_one(self._others, item, f"params.{name}")
            else:
                if self._rest is None:
                    values = self._positional_values(self._by_position.decode(given))
                    args += self._decode_models(self._positional, values) if self._modelled else values
                else:  # each item by its own type, since a struct has no place for the rest
                    items = _decode_items(given)
                    absent, surplus = self._positional[len(items) :], items[len(self._positional) :]
                    takers = [*self._positional, *([self._rest] * len(surplus) if self._rest.model is None else [])]
                    args += [
                        self._decode_one(taker, item, f"params[{i}]")
                        for i, (taker, item) in enumerate(zip(takers, items, strict=False))
                    ]
                    if any(p.required for p in absent):
                        raise InvalidParams(self._wrong_count(len(items)))
                    args += [p.absent() for p in absent]
                    if surplus and self._rest.model is not None:  # pydantic decodes them as one list
                        [rest] = self._decode_models([self._rest], [Raw(b"[%b]" % b",".join(map(bytes, surplus)))])
                        args += rest
                for parameter in self._named:
                    if parameter.kind == "name":
                        if parameter.required:
                            raise InvalidParams(f"params.{parameter.name}: missing; it can only be given by name")
                        keywords[parameter.keyword] = parameter.absent()
        except (msgspec.ValidationError, RecursionError) as error:
            raise self._misfit(given, error) from None
        if self._has_dataclasses:
            _completed([*args, *keywords.values()])
        for name, index in self._filled:
            value = injected if name in self.injected else None
            if index is None:
                keywords[name] = value
            else:
                args.insert(index, value)
        return args, keywords

    def finisher(self, name: str, *, is_checked: bool) -> Callable[[object], object] | None:
        """Return the function that makes a result of the function's value; None if it is the value itself.

        It writes what pydantic writes. With `is_checked` it compares the value with the declared type: the JSON that a
        caller would get must be one of that type. A misfit is returned as `Unsendable`.
        """
        modelled, declared = self.result, self.returns
        decode: Callable[[bytes], object] | None = None
        if is_checked and modelled is None and declared is not Any:
            try:  # models inside of msgspec's types are taken as they are: what is written may have other names
                decode = msgspec.json.Decoder(declared, dec_hook=_taken_as_it_is).decode
            except (TypeError, RuntimeError):
                decode = None  # msgspec describes the type, but cannot read it, so there is nothing to compare with
        if modelled is None and decode is None:
            return None
        bare = typing.get_args(declared)[0] if typing.get_origin(declared) is typing.Annotated else declared
        kind = "None" if bare is type(None) else bare.__name__ if isinstance(bare, type) else str(bare)

        def finish(value: object) -> object:
            first = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(first, Whole):
                return value
            misfits: list[str] = []
            try:
                if modelled is not None:
                    plain = modelled.plain(value)  # first: a value that cannot be written at all is another failure
                    misfits = modelled.misfits(value, "result") if is_checked else []
                    value = plain
                elif decode is not None:
                    decode(encode(value))
            except EncodeError as error:
                return Unsendable(error)
            except (msgspec.ValidationError, RecursionError) as error:
                misfits = _problems(declared, Raw(encode(value)), "result", error)
            if misfits:
                return Unsendable(ResultMisfit(f"{name} must return {kind}: {'; '.join(misfits[:MOST_PROBLEMS])}"))
            return value

        return finish

    def caller(self, function: Callable[..., T]) -> Callable[[Raw | UnsetType], T]:
        """Return a function that decodes raw params and calls another one with them, as a simple function is called."""

        def complete(*args: object) -> T:
            given = _completed(args)
            return function(*(self._decode_models(self._named, given) if self._modelled else given))

        called = complete if self._modelled or self._has_dataclasses else function
        # Up to three arguments are spelled out: to unpack a tuple takes a tenth of a plain query.
        spelled: list[Callable[[Any], T]] = [
            lambda _: called(),
            lambda params: called(params.f0),
            lambda params: called(params.f0, params.f1),
            lambda params: called(params.f0, params.f1, params.f2),
        ]
        values = self._named_values if self._rest is None else attrgetter("f0")  # a list is the arguments as it is
        is_short = self._rest is None and len(self._named) < len(spelled)
        spread = spelled[len(self._named)] if is_short else lambda params: called(*values(params))
        by_name, by_position = self._by_name.decode, self._by_position.decode

        if self._rest or (self._positional and all(p.required for p in self._positional)):
            # One decoder takes objects and arrays alike.
            struct: object = self._by_name.type
            array: Any = types.GenericAlias(tuple, tuple(_wire_type(p) for p in self._positional))
            decode = self._decoder(self._by_name.type | (_wire_type(self._rest) if self._rest else array)).decode

            def call(raw: Raw | UnsetType) -> T:
                try:
                    params = decode(_NO_PARAMS if raw is UNSET else raw)
                except (msgspec.ValidationError, RecursionError) as error:
                    raise self._misfit(raw, error) from None
                return spread(params) if type(params) is struct else called(*params)

        else:

            def call(raw: Raw | UnsetType) -> T:
                given = _NO_PARAMS if raw is UNSET else raw
                try:
                    params = by_name(given) if bytes(given)[:1] == b"{" else by_position(given)
                except (msgspec.ValidationError, RecursionError) as error:
                    raise self._misfit(given, error) from None
                return spread(params)

        return call

    def _describe(self) -> tuple[JsonObject, JsonObject]:
        """Return the JSON Schemas of params and result, each with its own definitions.

        A result that is undeclared, or that msgspec cannot describe, is any JSON.
        """
        from wirecall.protocol import models

        # Step 1: the params, by msgspec and by pydantic.
        others = [p for p in self._named if p.model is None]
        modelled = [p.model for p in self._named if p.model is not None]
        schemas, shared = models.describe(f"The parameters of {name_of(self.function)}", modelled)
        try:
            found, definitions = _schemas([_wire_type(p) for p in others], "validation")
        except TypeError as error:
            raise self._unusable(error) from error
        for p, schema in zip(others, found, strict=True):
            schemas[p.name] = schema
            if p.default is not REQUIRED:
                try:
                    default = msgspec.to_builtins(p.default)
                    if msgspec.json.decode(msgspec.json.encode(default)) == default:  # an infinity is not JSON
                        schema["default"] = default
                except (TypeError, ValueError, msgspec.DecodeError):
                    pass  # the default is not JSON either; the schema does not show it
        if twice := [name for name in definitions.keys() & shared.keys() if definitions[name] != shared[name]]:
            raise UsageError(
                f"Two types of the parameters of {name_of(self.function)} are called {twice[0]}.",
                "msgspec describes the one and pydantic the other, under the same name",
                "give one of them another name",
            )
        definitions |= shared
        params = {
            "type": "object",
            "properties": {p.name: schemas[p.name] for p in self._named},
            "required": [p.name for p in self._named if p.required],
            "additionalProperties": self._others is not None,
            **({"$defs": definitions} if definitions else {}),
        }

        # Step 2: the result.
        if self.returns is Any:
            return params, {}
        what = f"The result of {name_of(self.function)}"
        if models.decoder_of(what, self.returns) == "pydantic":
            self.result = models.Modelled(what, self.returns, "serialization")
            return params, self.result.schema
        try:
            [result], definitions = _schemas([self.returns], "serialization")
        except TypeError:
            self.returns = Any
            return params, {}
        return params, {**result, **({"$defs": definitions} if definitions else {})}

    def _mark(self) -> bool:
        """Put the headers of marked parameters into the schema; return whether there are any."""
        # Only plain properties of three types can be marked, each with a header of its own (2026-07-28,
        # basic/transports/streamable-http, "Schema Extension"). Clients leave out a tool that breaks these rules.
        seen: set[str] = set()
        for p in self.parameters:
            own = [note for note in getattr(p.type, "__metadata__", ()) if isinstance(note, Header)]
            marks = [
                note
                for part in self._parts[p.name]
                for note in getattr(part, "__metadata__", ())
                if isinstance(note, Header)
            ]
            if not marks:
                continue
            schema, name = self.schema["properties"].get(p.name, {}), str(marks[0].name)
            kinds = {_HEADER_TYPES.get(type(value)) for value in schema.get("enum", ())}
            kind = schema.get("type", kinds.pop() if len(kinds) == 1 else None)
            why = fix = ""
            if len(own) != 1 or marks != own:
                why, fix = "one header repeats one parameter as a whole", "mark a parameter of the function itself, once"
            elif not TOKEN.fullmatch(name):
                why, fix = (
                    "the name of a header has letters, digits, and marks such as -",
                    'use a name like Header("Region")',
                )
            elif name.lower() in seen:
                why, fix = "another parameter has the same header", "give one of them another name"
            elif kind not in _HEADER_TYPES.values():
                why = "only a str, an int, a bool, or a Literal of one of these fits into a header"
                fix = "use one of these types; a parameter that may be left out has a default"
            if why:
                raise UsageError(f"The parameter {p.name} of {name_of(self.function)} cannot have {marks[0]!r}.", why, fix)
            seen.add(name.lower())
            schema |= {"type": kind, MARK: name}
        return bool(seen)

    def _decoder(self, type: object) -> msgspec.json.Decoder[Any]:
        from wirecall.protocol import models

        try:
            return msgspec.json.Decoder(type, dec_hook=models.decode_model)
        except Exception as error:
            raise self._unusable(error) from error

    def _decode_one(self, parameter: Parameter, raw: Raw, where: str) -> object:
        if parameter.model is not None:
            try:
                return parameter.model.decode(raw)
            except (ValueError, RecursionError) as error:
                raise InvalidParams("; ".join(parameter.model.problems(error, where))) from None
        try:
            return self._one_by_one[parameter.name].decode(raw)
        except (msgspec.ValidationError, RecursionError) as error:
            raise InvalidParams(explain(error, where)) from None

    def _decode_models(self, parameters: Sequence[Parameter], values: Sequence[Any]) -> list[Any]:
        """Decode the values whose types are pydantic's; they are still JSON."""
        decoded, problems = list(values), []
        for index, parameter in enumerate(parameters):
            if parameter.model is not None and type(values[index]) is Raw:
                try:
                    decoded[index] = parameter.model.decode(values[index])
                except (ValueError, RecursionError) as error:
                    problems += parameter.model.problems(error, f"params.{parameter.name}")
        if problems:
            raise InvalidParams("; ".join(problems[:MOST_PROBLEMS]))
        return decoded

    # --- errors ----------------------------------------------------------------------------------------------------

    def _unusable(self, error: Exception) -> UsageError:
        """Return the error for a type that cannot be read from JSON. It names the parameter, if one alone fails too."""
        name = ""
        for parameter in self._named:
            try:
                _schemas([] if parameter.model else [_wire_type(parameter)], "validation")
            except TypeError:
                name = f" {parameter.name}"
                break
        return UsageError(
            f"The parameter{name or 's'} of {name_of(self.function)} cannot be decoded from JSON.",
            str(error),
            "use a JSON type, a dataclass, a TypedDict, a msgspec Struct or a pydantic model, or no annotation. Pydantic "
            "decodes further types: Annotated[Path, pydantic.Field()]. A value that callers do not send needs a provider",
        )

    def _misfit(self, raw: Raw | UnsetType, error: Exception) -> InvalidParams:
        """Return the error that says why params do not fit; a wrong number of arguments comes first."""
        # msgspec reports the first problem. Params that were refused are decoded once more, one by one, to report more.
        first = explain(error, "params", [p.name for p in self._positional])
        if raw is UNSET or bytes(raw)[:1] == b"[":
            items = [] if raw is UNSET else _decode_items(raw)
            wrong = self._wrong_count(len(items))
            if wrong:
                return InvalidParams(wrong)
            given = {p.name: item for p, item in zip(self._positional, items, strict=False)}
        elif bytes(raw)[:1] == b"{" and not isinstance(error, RecursionError):
            given = _decode_members(raw)
        else:
            return InvalidParams(first)
        problems: list[str] = []
        for p in self._named:
            if p.name not in given:
                problems += [f"params.{p.name}: missing"] if p.required else []
            elif p.model is None:
                problems += _problems(_wire_type(p), given[p.name], f"params.{p.name}")
            else:
                try:
                    p.model.decode(given[p.name])
                except (ValueError, RecursionError) as misfit:
                    problems += p.model.problems(misfit, f"params.{p.name}")
        known = {*self._beside, *(p.name for p in self._named)}
        if self._others is None:
            problems += [f"params.{name[:100]}: unknown name" for name in given if name not in known]
        return InvalidParams("; ".join(_with_first(first, problems)[:MOST_PROBLEMS]))

    def _wrong_count(self, count: int) -> str:
        """Return the reason why a number of arguments is wrong, or ""."""
        least, most = sum(p.required for p in self._positional), len(self._positional)
        if least <= count and (self._rest or count <= most):
            return ""
        expected = f"at least {least}" if self._rest else f"{least}" if least == most else f"{least} to {most}"
        noun = "argument" if expected in ("1", "at least 1") else "arguments"
        names = ", ".join(p.name for p in self._positional)
        return f"params: expected {expected} {noun}{names and f' ({names})'}, got {count}"


def read_signature(
    function: Callable[..., object], inject: type, find: Find | None = None
) -> tuple[list[Parameter], dict[str, int | None], dict[str, tuple[object, int | None]], object]:
    """Return the parameters of a function, the positions of those of type `inject` (None: by name), the types and positions
    of those that `find` knows, and its result type."""
    import inspect  # late: `import wirecall` stays light

    from wirecall.protocol import models  # late too

    # Step 1: the signature and the annotations.
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise UsageError(
            f"The signature of {name_of(function)} cannot be read.", str(error), "wrap it in a function"
        ) from error
    is_function = isinstance(function, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type))
    target = function if is_function else getattr(function, "func", type(function).__call__)
    try:
        hints: dict[str, object] = typing.get_type_hints(target, include_extras=True)
    except TypeError:  # a builtin: nothing is declared
        hints = {}
    except NameError as error:
        raise UsageError(
            f"An annotation of {name_of(function)} cannot be resolved: {error}.",
            "annotations are read when the function is registered, in the namespace of its module",
            "define the type at module level, before the function",
        ) from error

    # Step 2: each parameter.
    kinds: dict[object, ParameterKind] = {
        inspect.Parameter.KEYWORD_ONLY: "name",
        inspect.Parameter.VAR_POSITIONAL: "rest",
        inspect.Parameter.VAR_KEYWORD: "others",
    }
    parameters: list[Parameter] = []
    injected: dict[str, int | None] = {}
    provided: dict[str, tuple[object, int | None]] = {}
    for index, (name, declared) in enumerate(signature.parameters.items()):
        hint = hints.get(name, Any)
        bare = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
        choices = typing.get_args(bare) if typing.get_origin(bare) in (typing.Union, types.UnionType) else (bare,)
        place = None if declared.kind is inspect.Parameter.KEYWORD_ONLY else index
        if inject in choices:
            injected[name] = place
            continue
        if find is not None and (known := find(hint)) is not None:
            provided[name] = known, place
            continue
        default = REQUIRED if declared.default is inspect.Parameter.empty else declared.default
        kind: ParameterKind = kinds.get(declared.kind, "position")
        what = f"The parameter {name} of {name_of(function)}"
        decoder = models.decoder_of(what, hint, default)
        hint = models.described(hint, decoder)
        if decoder == "msgspec":
            parameters.append(Parameter(name, hint, default, kind, name))
            continue
        whole = types.GenericAlias(list, (hint,)) if kind == "rest" else hint
        model = models.ModelledParameter(what, name, index, whole, ... if default is REQUIRED else default)
        parameters.append(Parameter(model.name, hint, REQUIRED if model.required else default, kind, name, model))
    return parameters, injected, provided, hints.get("return", Any)


def _completed(values: Sequence[object]) -> Sequence[object]:
    """Give every dataclass among decoded values its defaults. msgspec leaves them to the class, where an encoder and `vars`
    do not find them."""
    from dataclasses import fields  # late: `import wirecall` stays light

    left = list(values)
    while left:
        value: Any = left.pop()
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            left.extend(value)
        elif isinstance(value, Struct):
            left.extend(getattr(value, name) for name in value.__struct_fields__)
        elif hasattr(value, "__dataclass_fields__"):
            whole = {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
            own = getattr(value, "__dict__", None)
            if own is not None:  # else it has slots, and msgspec fills those
                whole |= own
                own.clear()  # so that the members are in the order of the class
                own |= whole
            left.extend(whole.values())
    return values


def _taken_as_it_is(model: Any, _: object) -> object:
    """Return an empty instance of a model, whatever was written: a hook of decoders that only check the rest."""
    return model.model_construct()


def _wire_type(parameter: Parameter) -> object:
    if parameter.model is not None:
        return Raw
    return types.GenericAlias(list, (parameter.type,)) if parameter.kind == "rest" else parameter.type


def _field(index: int, parameter: Parameter) -> tuple[str, Any, Any]:
    name = f"f{index}"
    if parameter.kind == "rest":
        return (name, _wire_type(parameter), msgspec.field(default_factory=list))
    if parameter.default is REQUIRED:
        return (name, _wire_type(parameter), msgspec.field())
    if parameter.model is not None:
        return (name, Raw, msgspec.field(default_factory=parameter.absent))
    if isinstance(parameter.default, _SCALARS):
        return (name, parameter.type, msgspec.field(default=parameter.default))
    return (name, parameter.type, msgspec.field(default_factory=parameter.absent))


def _getter(count: int) -> Callable[[object], tuple[Any, ...]]:
    """Return a function that takes the first fields of a struct as a tuple."""
    few: list[Callable[[Any], tuple[Any, ...]]] = [lambda _: (), lambda s: (s.f0,), lambda s: (s.f0, s.f1)]
    return few[count] if count < len(few) else attrgetter(*(f"f{index}" for index in range(count)))


def finishing(function: Callable[..., Any], finish: Callable[[object], object], *, is_async: bool) -> Callable[..., object]:
    """Return a function whose values pass through a `finisher`."""

    async def run(*args: object, **keywords: object) -> object:
        return finish(await function(*args, **keywords))

    async def later(value: Any) -> object:
        return finish(await value)

    def run_plain(*args: object, **keywords: object) -> object:
        value = function(*args, **keywords)
        return later(value) if hasattr(value, "__await__") else finish(value)

    return update_wrapper(run if is_async else run_plain, function)


def name_of(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))


def place_of(function: object) -> str:
    """Return the file and the line of a function."""
    written = getattr(function, "__wrapped__", function)
    code = getattr(getattr(written, "func", written), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else repr(function)


def _schemas(types: list[object], mode: Literal["validation", "serialization"]) -> tuple[list[JsonObject], JsonObject]:
    """Return the schemas of types, and the definitions that they share. A pydantic model has two schemas, for reading and
    for writing: they may differ in aliases, computed fields and defaults."""
    inner: JsonObject = {}

    def hook(type: Any) -> JsonObject:
        if not hasattr(type, "model_json_schema"):
            raise TypeError(f"{name_of(type)} is not a type that JSON can carry")
        schema: JsonObject = type.model_json_schema(mode=mode, ref_template="#/$defs/{model}")
        definitions = schema.pop("$defs", {})
        if twice := [name for name in definitions.keys() & inner.keys() if definitions[name] != inner[name]]:
            raise TypeError(f"two types are called {twice[0]}")
        inner.update(definitions)
        return schema

    schemas, definitions = msgspec.json.schema_components(types, schema_hook=hook, ref_template="#/$defs/{name}")
    return [dict(schema) for schema in schemas], definitions | inner


# --- texts -------------------------------------------------------------------------------------------------------------


def _problems(hint: Any, raw: Raw, where: str, error: Exception | None = None) -> list[str]:
    """Return why JSON does not fit a type: the first problem of each member, where the type has members."""
    from wirecall.protocol import models

    if error is None:
        try:
            msgspec.json.Decoder(hint, dec_hook=models.decode_model).decode(raw)
            return []
        except (msgspec.ValidationError, RecursionError) as misfit:
            error = misfit
    first = explain(error, where)
    # Step 1: the members, of an object that has them.
    bare = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    members: dict[str, object] = {}
    if isinstance(bare, type) and bytes(raw)[:1] == b"{":
        if issubclass(bare, Struct):
            members = {field.encode_name: field.type for field in msgspec.structs.fields(bare)}
        elif hasattr(bare, "__dataclass_fields__"):
            import dataclasses  # the class has loaded it

            hints = typing.get_type_hints(bare, include_extras=True)
            members = {
                field.name: hints[field.name] for field in dataclasses.fields(typing.cast(Any, bare))
            }  # without ClassVars
        elif typing.is_typeddict(bare):
            # Required[int] is a type only inside of a TypedDict: a decoder of the member alone takes int.
            for name, member in typing.get_type_hints(bare, include_extras=True).items():
                is_marked = typing.get_origin(member) in (typing.Required, typing.NotRequired)
                members[name] = typing.get_args(member)[0] if is_marked else member
    given = _decode_members(raw) if members else {}
    found = [text for name in members if name in given for text in _problems(members[name], given[name], f"{where}.{name}")]
    if members:
        return _with_first(first, found)
    # Step 2: the values of an enum. msgspec quotes the value that it got.
    if "invalid enum value" in first:
        parts = [part for part, _ in models.parts(hint, set())]
        values = [value for part in parts if typing.get_origin(part) is Literal for value in typing.get_args(part)]
        enums = [part for part in parts if isinstance(part, type) and issubclass(part, enum.Enum)]
        values += [each.value for part in enums for each in part]
        first += f", expected one of {', '.join(map(str, values[:20]))}"
    return [first]


def _with_first(first: str, found: list[str]) -> list[str]:
    """Return problems together with the one that msgspec reports, unless they contain it."""
    return found if any(text.startswith(first) for text in found) else [first, *found]


def explain(error: Exception, root: str, positions: Sequence[str] = ()) -> str:
    """Return msgspec's message in our form: the place first, no quotes, at most a line of the caller's own text."""
    if isinstance(error, RecursionError):
        return f"{root}: nested too deeply"
    what, _, where = str(error).rpartition(" - at `$") if " - at `$" in str(error) else (str(error), "", "")
    what, where = what.replace("`", ""), where.removesuffix("`")
    # A place in the array of params is shown by the parameter's name.
    index = where[1 : where.find("]")] if where.startswith("[") else ""
    if index.isdigit() and int(index) < len(positions):
        where = f".{positions[int(index)]}{where[len(index) + 2 :]}"
    if isinstance(error.__cause__, ValueError) and hasattr(
        error.__cause__, "errors"
    ):  # pydantic's, about a model inside of msgspec's types
        from wirecall.protocol.models import problems

        return "; ".join(problems(error.__cause__, root + where)[:MOST_PROBLEMS])
    for lead, word in (("Object missing required field ", "missing"), ("Object contains unknown field ", "unknown name")):
        if what.startswith(lead):
            return f"{root}{where}.{what.removeprefix(lead)[:100]}: {word}"
    return f"{root}{where}: {what[:1].lower()}{what[1:200]}"
