"""A function's signature as the decoder of its params.

`Signature(function, inject=Context)` reads a signature once, at registration, and builds everything
a call needs:

    caller(function)         a function of raw params that calls a `simple` function
    bind(raw)                raw params -> positional arguments, for a `simple` function
    bind_all(raw, injected)  raw params -> positional and keyword arguments, for any function
    schema, result_schema    JSON Schema 2020-12

A `simple` function takes no context and no keyword-only parameters.

The rules of the file:

1. Params come by name (an object) or by position (an array); msgspec decodes both straight into the
   declared types. A parameter whose type is pydantic's stays JSON there, and pydantic decodes and
   describes it (`models`).
2. An untyped parameter takes any JSON. `*rest` takes the surplus positions, or a list under its own
   name.
3. `_meta` is accepted beside every method's params and `idempotency_key` beside a command's;
   neither is passed to a function that does not declare it.
4. `Header("Region")` in an Annotated marks a parameter that MCP clients repeat in an HTTP header
   (`x-mcp-header`).
5. Every mismatch is an `InvalidParams` that says what and where: `params.cents: expected int, got
   str`.
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
from wirecall.protocol.messages import CompleteResult, JsonObject, Unsendable, encode

if TYPE_CHECKING:
    from wirecall.protocol.keys import KeyPlace
    from wirecall.protocol.models import Modelled, ModelledParameter

T = TypeVar("T")

META = "_meta"
KEY = "idempotency_key"
MARK = "x-mcp-header"
_NOT_IN_A_TOOL_NAME = re.compile(r"[^A-Za-z0-9_-]")
# A name in a header (RFC 9110, section 5.6.2).
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
REQUIRED: object = type("REQUIRED", (), {"__repr__": lambda _: "REQUIRED"})()

# Normal, keyword-only, *args, **kwargs.
ParameterKind: TypeAlias = Literal["position", "name", "rest", "others"]
# Returns the provided type for an annotation, if there is one.
Find: TypeAlias = Callable[[object], object | None]

_NO_PARAMS = Raw(b"[]")
_SCALARS = (type(None), bool, int, float, str)
# Parameter types that a header can repeat.
_HEADER_TYPES = {str: "string", int: "integer", bool: "boolean"}
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode


class Header(Struct, frozen=True):
    """Marks a parameter of a tool that MCP clients repeat in an HTTP header (2026-07-28).

    The header is `Mcp-Param-NAME`. `Annotated[str, Header("Region")]` lets a proxy route by the
    region without reading bodies.

    `name` is the part of the header behind `Mcp-Param-`.

    >>> from typing import Annotated
    >>> @App("shop").tool
    ... def stock(region: Annotated[str, Header("Region")]) -> int:
    ...     return 7
    """

    name: str


class Parameter(Struct, frozen=True):
    """One declared parameter that the caller may fill."""

    # The name in params: the name in the function, or an alias.
    name: str
    type: object
    default: object = REQUIRED
    kind: ParameterKind = "position"
    # The name in the function.
    keyword: str = ""
    # Decodes the parameter, if its type is pydantic's.
    model: "ModelledParameter | None" = None

    @property
    def required(self) -> bool:
        return self.default is REQUIRED and self.kind in ("position", "name")

    def absent(self) -> Any:
        """Return the value of a parameter that is not given."""
        # As in Python, every call without the argument gets the one default object, unless a
        # pydantic Field has it.
        if self.model is None or self.kind == "rest":
            return self.default
        return self.model.default()


class Signature:
    """How one function takes its params."""

    def __init__(
        self,
        function: Callable[..., object],
        *,
        inject: type,
        keyed: bool = False,
        key_at: "KeyPlace | None" = None,
        find: Find | None = None,
    ) -> None:
        # Step 1: the parameters, by the ways in which they are filled.
        self.function = function
        self.parameters, self.injected, self.provided, self.returns = read_signature(
            function, inject, find
        )
        names = [p.name for p in self.parameters]
        if len({*names}) < len(names):
            same = ", ".join(sorted(names))
            raise UsageError(
                f"Two parameters of {name_of(function)} have the same name: {same}.",
                "an alias is the name of a parameter for its callers",
                "give one of them another alias",
            )
        self.takes_key = KEY in names
        self.key_position = next(
            (i for i, p in enumerate(self.parameters) if p.name == KEY and p.kind == "position"),
            None,
        )
        # The names that are accepted beside the params.
        self._beside: list[str] = []
        if META not in names:
            self._beside.append(META)
        if keyed and KEY not in names:
            self._beside.append(KEY)
        if key_at is not None and key_at.path[0] not in (*names, *self._beside):
            self._beside.append(key_at.path[0])
        self._named = [p for p in self.parameters if p.kind != "others"]
        self._positional = [p for p in self.parameters if p.kind == "position"]
        self._rest = next((p for p in self.parameters if p.kind == "rest"), None)
        self._others = next((p for p in self.parameters if p.kind == "others"), None)
        self._modelled = [p for p in self.parameters if p.model is not None]
        is_plain = self._named == self._positional or (
            self._named == [self._rest] and not self._modelled
        )
        self.is_flat = is_plain and self._others is None
        self.simple = self.is_flat and not self.injected and not self.provided
        # Names that must not arrive in `**others`: `self` of a method, the arguments of a partial,
        # the context.
        self._taken = {*_argument_names(function), *self.injected, *self.provided}
        # The parameters that no caller fills.
        self._filled = self._in_order_of_insertion()
        # Step 2: the decoders.
        self._make_decoders()
        self.bind: Callable[[Raw | UnsetType], Sequence[object]] = self.caller(lambda *args: args)
        # Step 3: the schemas.
        # Writes the result, if its type is pydantic's.
        self.result: Modelled | None = None
        self.schema, self.result_schema = self._describe()
        self.has_headers = self._mark()

    def _in_order_of_insertion(self) -> list[tuple[str, int | None]]:
        """Return the parameters that no caller fills, with their positions. None: by name."""
        places = {**self.injected}
        for name, (_, index) in self.provided.items():
            places[name] = index

        def order(place: tuple[str, int | None]) -> int:
            index = place[1]
            return index if index is not None else -1

        return sorted(places.items(), key=order)

    def _make_decoders(self) -> None:
        from wirecall.protocol import models  # late: `import wirecall` stays light

        # The fields of the structs have made-up names, because `_meta` or `self` cannot be a
        # field's name.
        fields = [_field(i, p) for i, p in enumerate(self._named)]
        beside = [
            (f"beside{i}", Any, msgspec.field(default=UNSET)) for i in range(len(self._beside))
        ]
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
            msgspec.defstruct(
                "Params", in_order, array_like=True, forbid_unknown_fields=True, gc=False
            )
        )
        self._one_by_one: dict[str, msgspec.json.Decoder[Any]] = {}
        if self._rest or self._others:
            for p in self.parameters:
                if p.model is None:
                    self._one_by_one[p.name] = self._decoder(p.type)
        self._named_values = _getter(len(self._named))
        self._positional_values = _getter(len(self._positional))
        self._parts = {
            p.name: [part for part, _ in models.parts(p.type, set())] for p in self.parameters
        }
        self._has_dataclasses = any(
            hasattr(part, "__dataclass_fields__")
            for p in self.parameters
            if not p.model
            for part in self._parts[p.name]
        )

    def bind_all(
        self, raw: Raw | UnsetType, injected: object
    ) -> tuple[Sequence[object], Mapping[str, object]]:
        """Return the arguments of any function.

        `injected` goes to the parameters of the injected type. A provided parameter is None until
        its value is made.
        """
        if self.simple:
            return self.bind(raw), {}
        given = raw if raw is not UNSET else _NO_PARAMS
        args: list[object] = []
        keywords: dict[str, object] = {}
        # Step 1: the arguments of the caller, by name or by position.
        try:
            if bytes(given)[:1] == b"{":
                self._bind_object(given, args, keywords)
            else:
                self._bind_array(given, args, keywords)
        except (msgspec.ValidationError, RecursionError) as error:
            return self.bind_all(self._whole(given, error), injected)
        if self._has_dataclasses:
            _completed([*args, *keywords.values()])
        # Step 2: those that no caller fills.
        for name, index in self._filled:
            value: object = None
            if name in self.injected:
                value = injected
            if index is None:
                keywords[name] = value
            else:
                args.insert(index, value)
        return args, keywords

    def _bind_object(self, given: Raw, args: list[object], keywords: dict[str, object]) -> None:
        """Add the arguments in an object of params."""
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
        if self._others is None:
            return
        known = {p.name for p in self._named} | set(self._beside)
        for name, item in _decode_members(given).items():
            if name in known:
                continue
            if name in self._taken:
                raise InvalidParams(f"params.{name}: unknown name")
            keywords[name] = self._decode_one(self._others, item, f"params.{name}")

    def _bind_array(self, given: Raw, args: list[object], keywords: dict[str, object]) -> None:
        """Add the arguments in an array of params."""
        if self._rest is None:
            values: Sequence[Any] = self._positional_values(self._by_position.decode(given))
            if self._modelled:
                values = self._decode_models(self._positional, values)
            args += values
        else:
            self._bind_items(_decode_items(given), self._rest, args)
        for parameter in self._named:
            if parameter.kind != "name":
                continue
            if parameter.required:
                raise InvalidParams(
                    f"params.{parameter.name}: missing; it can only be given by name"
                )
            keywords[parameter.keyword] = parameter.absent()

    def _bind_items(self, items: list[Raw], rest: Parameter, args: list[object]) -> None:
        """Add the items of an array, each decoded by its type.

        A struct has no place for `*rest`.
        """
        takers = list(self._positional)
        absent = self._positional[len(items) :]
        surplus = items[len(self._positional) :]
        if rest.model is None:
            takers += [rest] * len(surplus)
        for i, (taker, item) in enumerate(zip(takers, items, strict=False)):
            args.append(self._decode_one(taker, item, f"params[{i}]"))
        if any(p.required for p in absent):
            raise InvalidParams(self._wrong_count(len(items)))
        args += [p.absent() for p in absent]
        if surplus and rest.model is not None:
            # Pydantic decodes them as one list.
            whole = Raw(b"[%b]" % b",".join(map(bytes, surplus)))
            [values] = self._decode_models([rest], [whole])
            args += values

    def finisher(self, name: str, *, is_checked: bool) -> Callable[[object], object] | None:
        """Return the function that makes a result of a value; None if it is the value itself.

        It encodes pydantic's values. With `is_checked` it compares the value with the declared
        type: the JSON that a caller would get must fit that type. A misfit is returned as
        `Unsendable`.
        """
        modelled = self.result
        declared = self.returns
        decode: Callable[[bytes], object] | None = None
        if is_checked and modelled is None and declared is not Any:
            try:  # models inside msgspec's types are not checked: their JSON may have other names
                decode = msgspec.json.Decoder(declared, dec_hook=_taken_as_it_is).decode
            except (TypeError, RuntimeError):
                decode = None  # msgspec describes the type but cannot read it, so it cannot compare
        if modelled is None and decode is None:
            return None
        kind = _title(bare_type(declared))

        def finish(value: object) -> object:
            first = value
            if isinstance(value, (list, tuple)) and value:
                first = value[0]
            if isinstance(first, CompleteResult):
                return value
            misfits: list[str] = []
            try:
                if modelled is not None:
                    # First: a value that cannot be encoded is another failure.
                    plain = modelled.plain(value)
                    if is_checked:
                        misfits = modelled.misfits(value, "result")
                    value = plain
                elif decode is not None:
                    decode(encode(value))
            except EncodeError as error:
                return Unsendable(error)
            except (msgspec.ValidationError, RecursionError) as error:
                misfits = _problems(declared, Raw(encode(value)), "result", error)
            if misfits:
                return Unsendable(
                    ResultMisfit(f"{name} must return {kind}: {'; '.join(misfits[:MOST_PROBLEMS])}")
                )
            return value

        return finish

    def caller(self, function: Callable[..., T]) -> Callable[[Raw | UnsetType], T]:
        """Return a function that decodes raw params and calls a simple function with them."""

        def complete(*args: object) -> T:
            given = _completed(args)
            if self._modelled:
                given = self._decode_models(self._named, given)
            return function(*given)

        called: Callable[..., T] = function
        if self._modelled or self._has_dataclasses:
            called = complete
        # Up to three arguments are spelled out: unpacking a tuple takes a tenth of a plain query.
        spelled: list[Callable[[Any], T]] = [
            lambda _: called(),
            lambda params: called(params.f0),
            lambda params: called(params.f0, params.f1),
            lambda params: called(params.f0, params.f1, params.f2),
        ]
        values: Callable[[object], Any] = self._named_values
        if self._rest is not None:  # a list is the arguments as it is
            values = attrgetter("f0")

        def spread_all(params: Any) -> T:
            return called(*values(params))

        spread: Callable[[Any], T] = spread_all
        if self._rest is None and len(self._named) < len(spelled):
            spread = spelled[len(self._named)]
        by_name = self._by_name.decode
        by_position = self._by_position.decode

        if self._rest or (self._positional and all(p.required for p in self._positional)):
            # One decoder takes both objects and arrays.
            struct: object = self._by_name.type
            array: Any = types.GenericAlias(tuple, tuple(_wire_type(p) for p in self._positional))
            if self._rest:
                array = _wire_type(self._rest)
            decode = self._decoder(self._by_name.type | array).decode

            def call(raw: Raw | UnsetType) -> T:
                try:
                    params = decode(raw if raw is not UNSET else _NO_PARAMS)
                except (msgspec.ValidationError, RecursionError) as error:
                    params = decode(self._whole(raw, error))
                if type(params) is struct:
                    return spread(params)
                return called(*params)

        else:

            def call(raw: Raw | UnsetType) -> T:
                given = raw if raw is not UNSET else _NO_PARAMS
                try:
                    params = by_name(given) if bytes(given)[:1] == b"{" else by_position(given)
                except (msgspec.ValidationError, RecursionError) as error:
                    params = by_name(self._whole(given, error))
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
                _show_default(schema, p.default)
        if twice := [
            name for name in definitions.keys() & shared.keys() if definitions[name] != shared[name]
        ]:
            raise UsageError(
                f"Two types of the parameters of {name_of(self.function)} are called {twice[0]}.",
                "msgspec describes the one and pydantic the other, under the same name",
                "give one of them another name",
            )
        definitions |= shared
        params: JsonObject = {
            "type": "object",
            "properties": {p.name: schemas[p.name] for p in self._named},
            "required": [p.name for p in self._named if p.required],
            "additionalProperties": self._others is not None,
        }
        if definitions:
            params["$defs"] = definitions

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
        if definitions:
            result = {**result, "$defs": definitions}
        return params, result

    def _mark(self) -> bool:
        """Put the headers of marked parameters into the schema; return whether there are any."""
        # Only plain properties of three types can be marked, each with its own header (2026-07-28,
        # basic/transports/streamable-http, "Schema Extension"). Clients ignore tools that break the
        # rules.
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
            schema = self.schema["properties"].get(p.name, {})
            name = str(marks[0].name)
            kind = _header_type(schema)
            why = fix = ""
            if len(own) != 1 or marks != own:
                why = "one header repeats one parameter as a whole"
                fix = "mark a parameter of the function itself, once"
            elif not TOKEN.fullmatch(name):
                why = "the name of a header has letters, digits, and marks such as -"
                fix = 'use a name like Header("Region")'
            elif name.lower() in seen:
                why = "another parameter has the same header"
                fix = "give one of them another name"
            elif kind not in _HEADER_TYPES.values():
                why = "only a str, an int, a bool, or a Literal of one of these fits into a header"
                fix = "use one of these types; a parameter that may be left out has a default"
            if why:
                raise UsageError(
                    f"The parameter {p.name} of {name_of(self.function)} cannot have {marks[0]!r}.",
                    why,
                    fix,
                )
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
                return self._decode_model(parameter, raw)
            except (ValueError, RecursionError) as error:
                raise InvalidParams("; ".join(parameter.model.problems(error, where))) from None
        decoder = self._one_by_one[parameter.name]
        try:
            return decoder.decode(raw)
        except (msgspec.ValidationError, RecursionError) as error:
            whole = self._with_integers_in(parameter, raw)
            try:
                return decoder.decode(whole)
            except (msgspec.ValidationError, RecursionError):
                raise InvalidParams(explain(error, where)) from None

    def _with_integers_in(self, parameter: Parameter, raw: Raw) -> Raw:
        """Return the value of a parameter with 5 for 5.0; unchanged if it has no other reading."""
        if not _has_fractions(raw):
            return raw
        from wirecall.protocol import readings  # late: few params come here

        declared = self.schema["properties"].get(parameter.name, {})
        if parameter.kind == "rest":
            declared = declared.get("items", {})
        whole = readings.of_value(raw, declared, self.schema.get("$defs", {}))
        return raw if whole is None else whole

    def _decode_model(self, parameter: Parameter, raw: Raw) -> object:
        """Return a value that pydantic decodes. 5.0 is an int, as for msgspec's types."""
        assert parameter.model is not None
        try:
            return parameter.model.decode(raw)
        except ValueError:
            whole = raw
            if parameter.model.is_strict:  # else a model or a field has declared its mode
                whole = self._with_integers_in(parameter, raw)
            if whole is raw:
                raise
            return parameter.model.decode(whole)

    def _decode_models(self, parameters: Sequence[Parameter], values: Sequence[Any]) -> list[Any]:
        """Decode the values whose types are pydantic's; they are still JSON."""
        decoded = list(values)
        problems = []
        for index, parameter in enumerate(parameters):
            if parameter.model is not None and type(values[index]) is Raw:
                try:
                    decoded[index] = self._decode_model(parameter, values[index])
                except (ValueError, RecursionError) as error:
                    problems += parameter.model.problems(error, f"params.{parameter.name}")
        if problems:
            raise InvalidParams("; ".join(problems[:MOST_PROBLEMS]))
        return decoded

    # --- other readings ---------------------------------------------------------------------------

    def understood(self, raw: Raw | UnsetType) -> Raw | None:
        """Return params that do not fit as their only other meaning; None if there is none.

        This is the lenient reading of arguments that models send.
        """
        if self._fits(raw):
            return None
        found = [each for each in self._readings(raw, is_lenient=True) if self._fits(each)]
        if len(found) != 1:
            return None
        return found[0]

    def _whole(self, raw: Raw | UnsetType, error: Exception) -> Raw:
        """Return params that do not fit with 5 for 5.0, as an object, if they fit then.

        JSON Schema says that 5.0 is an integer. Raises `InvalidParams` if they do not fit.
        """
        found: list[Raw] = []
        if raw is not UNSET and _has_fractions(raw):
            found = self._readings(raw, is_lenient=False)
        if len(found) == 1:
            try:
                self._by_name.decode(found[0])
                return found[0]
            except (msgspec.ValidationError, RecursionError):
                pass
        raise self._misfit(raw, error) from None

    def _readings(self, raw: Raw | UnsetType, *, is_lenient: bool) -> list[Raw]:
        from wirecall.protocol import readings  # late: few params come here

        members: dict[str, Raw] = {}
        if raw is not UNSET and bytes(raw)[:1] == b"{":
            members = _decode_members(raw)
        elif raw is not UNSET and bytes(raw)[:1] == b"[":
            items = _decode_items(raw)
            if self._wrong_count(len(items)):
                return []
            members = {p.name: item for p, item in zip(self._positional, items, strict=False)}
            surplus = items[len(self._positional) :]
            if self._rest is not None and surplus:
                members[self._rest.name] = Raw(b"[%b]" % b",".join(map(bytes, surplus)))
        return readings.of_params(members, self.schema, is_lenient=is_lenient)

    def _fits(self, raw: Raw | UnsetType) -> bool:
        """Return whether params can be bound."""
        try:
            self.bind_all(raw, None)
        except InvalidParams:
            return False
        return True

    # --- errors -----------------------------------------------------------------------------------

    def _unusable(self, error: Exception) -> UsageError:
        """Return the error for a type unreadable from JSON.

        It names the parameter if one fails alone.
        """
        name = ""
        for parameter in self._named:
            try:
                if parameter.model is None:
                    _schemas([_wire_type(parameter)], "validation")
            except TypeError:
                name = f" {parameter.name}"
                break
        return UsageError(
            f"The parameter{name or 's'} of {name_of(self.function)} cannot be decoded from JSON.",
            str(error),
            "use a JSON type, a dataclass, a TypedDict, a msgspec Struct or a pydantic model, "
            "or no annotation. Pydantic decodes further types: Annotated[Path, pydantic.Field()]. "
            "A value that callers do not send needs a provider",
        )

    def _misfit(self, raw: Raw | UnsetType, error: Exception) -> InvalidParams:
        """Return the error that says why params do not fit.

        A wrong number of arguments comes first.
        """
        # msgspec reports the first problem. Refused params are decoded again, one by one, to report
        # more.
        first = explain(error, "params", [p.name for p in self._positional])
        given: dict[str, Raw] = {}
        if raw is UNSET or bytes(raw)[:1] == b"[":
            items: list[Raw] = []
            if raw is not UNSET:
                items = _decode_items(raw)
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
            if p.name in given:
                problems += _problems_of(p, given[p.name])
            elif p.required:
                problems.append(f"params.{p.name}: missing")
        known = {*self._beside, *(p.name for p in self._named)}
        if self._others is None:
            problems += [
                f"params.{name[:100]}: unknown name" for name in given if name not in known
            ]
        return InvalidParams("; ".join(_with_first(first, problems)[:MOST_PROBLEMS]))

    def _wrong_count(self, count: int) -> str:
        """Return the reason why a number of arguments is wrong, or ""."""
        least = sum(p.required for p in self._positional)
        most = len(self._positional)
        if least <= count and (self._rest or count <= most):
            return ""
        expected = f"{least} to {most}"
        if self._rest:
            expected = f"at least {least}"
        elif least == most:
            expected = f"{least}"
        noun = "arguments"
        if expected in ("1", "at least 1"):
            noun = "argument"
        names = ", ".join(p.name for p in self._positional)
        return f"params: expected {expected} {noun}{names and f' ({names})'}, got {count}"


def _has_fractions(raw: Raw) -> bool:
    """Return whether JSON may have a number with a fraction or an exponent."""
    data = bytes(raw)
    return b"." in data or b"e" in data or b"E" in data


class RawSignature(Signature):
    """The signature of a function that reads its params itself, from its context.

    Nothing is decoded or checked. Only the context and provided values are arguments.
    """

    def _bind_object(self, given: Raw, args: list[object], keywords: dict[str, object]) -> None:
        """Bind nothing."""

    def _bind_array(self, given: Raw, args: list[object], keywords: dict[str, object]) -> None:
        """Bind nothing."""


def read_signature(
    function: Callable[..., object], inject: type, find: Find | None = None
) -> tuple[list[Parameter], dict[str, int | None], dict[str, tuple[object, int | None]], object]:
    """Return a function's parameters and its result type.

    Between them are the positions of the parameters of type `inject` (None: by name), and the types
    and positions of those that `find` knows.
    """
    import inspect  # late: `import wirecall` stays light

    from wirecall.protocol import models  # late too

    # Step 1: the signature and the annotations.
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise UsageError(
            f"The signature of {name_of(function)} cannot be read.",
            str(error),
            "wrap it in a function",
        ) from error
    is_function = isinstance(
        function, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type)
    )
    target = function
    if not is_function:
        target = getattr(function, "func", type(function).__call__)
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
        place: int | None = index
        if declared.kind is inspect.Parameter.KEYWORD_ONLY:
            place = None
        if inject in choices_of(hint):
            injected[name] = place
            continue
        if find is not None and (known := find(hint)) is not None:
            provided[name] = known, place
            continue
        default = declared.default
        if default is inspect.Parameter.empty:
            default = REQUIRED
        kind: ParameterKind = kinds.get(declared.kind, "position")
        what = f"The parameter {name} of {name_of(function)}"
        decoder = models.decoder_of(what, hint, default)
        hint = models.described(hint, decoder)
        if decoder == "msgspec":
            parameters.append(Parameter(name, hint, default, kind, name))
            continue
        whole = hint
        if kind == "rest":
            whole = types.GenericAlias(list, (hint,))
        theirs = default
        if default is REQUIRED:
            theirs = ...
        model = models.ModelledParameter(what, name, index, whole, theirs)
        if model.required:
            default = REQUIRED
        parameters.append(Parameter(model.name, hint, default, kind, name, model))
    return parameters, injected, provided, hints.get("return", Any)


def _argument_names(function: object) -> Sequence[str]:
    """Return the names of all arguments of a function, or of the function in a partial."""
    code = getattr(function, "__code__", None)
    if code is None:
        code = getattr(getattr(function, "func", None), "__code__", None)
    if code is None:
        return ()
    names: Sequence[str] = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return names


def bare_type(hint: Any) -> Any:
    """Return a type without the notes of an `Annotated`."""
    if typing.get_origin(hint) is typing.Annotated:
        return typing.get_args(hint)[0]
    return hint


def choices_of(hint: object) -> tuple[object, ...]:
    """Return the types of a union, or the one type."""
    bare = bare_type(hint)
    if typing.get_origin(bare) in (typing.Union, types.UnionType):
        return typing.get_args(bare)
    return (bare,)


def _title(bare: object) -> str:
    """Return the name of a type in a message."""
    if bare is type(None):
        return "None"
    if isinstance(bare, type):
        return bare.__name__
    return str(bare)


def _show_default(schema: JsonObject, given: object) -> None:
    """Put the default of a parameter into its schema, if it is JSON."""
    try:
        default = msgspec.to_builtins(given)
        # An infinity is not JSON.
        if msgspec.json.decode(msgspec.json.encode(default)) == default:
            schema["default"] = default
    except (TypeError, ValueError, msgspec.DecodeError):
        return


def _header_type(schema: JsonObject) -> object:
    """Return the JSON type of a parameter, or that of all its choices."""
    kinds = {_HEADER_TYPES.get(type(value)) for value in schema.get("enum", ())}
    kind: object = None
    if len(kinds) == 1:
        kind = kinds.pop()
    return schema.get("type", kind)


def _completed(values: Sequence[object]) -> Sequence[object]:
    """Set the defaults of every dataclass among decoded values.

    msgspec leaves them to the class, where an encoder and `vars` do not find them.
    """
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
            whole = {
                field.name: getattr(value, field.name)
                for field in fields(value)
                if hasattr(value, field.name)
            }
            own = getattr(value, "__dict__", None)
            if own is not None:  # else it has slots, and msgspec fills those
                whole |= own
                own.clear()  # so that the members are in the order of the class
                own |= whole
            left.extend(whole.values())
    return values


def _taken_as_it_is(model: Any, _: object) -> object:
    """Return an empty instance of a model for any JSON.

    It is a hook of decoders that only check the rest.
    """
    return model.model_construct()


def _wire_type(parameter: Parameter) -> object:
    if parameter.model is not None:
        return Raw
    if parameter.kind == "rest":
        return types.GenericAlias(list, (parameter.type,))
    return parameter.type


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
    few: list[Callable[[Any], tuple[Any, ...]]] = [
        lambda _: (),
        lambda s: (s.f0,),
        lambda s: (s.f0, s.f1),
    ]
    if count < len(few):
        return few[count]
    return attrgetter(*(f"f{index}" for index in range(count)))


def finishing(
    function: Callable[..., Any], finish: Callable[[object], object], *, is_async: bool
) -> Callable[..., object]:
    """Return a function whose values pass through a `finisher`."""

    async def run(*args: object, **keywords: object) -> object:
        return finish(await function(*args, **keywords))

    async def later(value: Any) -> object:
        return finish(await value)

    def run_plain(*args: object, **keywords: object) -> object:
        value = function(*args, **keywords)
        if hasattr(value, "__await__"):
            return later(value)
        return finish(value)

    if is_async:
        return update_wrapper(run, function)
    return update_wrapper(run_plain, function)


def name_of(function: object) -> str:
    return getattr(function, "__qualname__", repr(function))


def tool_name_of(name: str) -> str:
    """Return the name that MCP clients see.

    Model APIs refuse a whole request for any other character.
    """
    return _NOT_IN_A_TOOL_NAME.sub("_", name)


def place_of(function: object) -> str:
    """Return the file and the line of a function."""
    written = getattr(function, "__wrapped__", function)
    code = getattr(getattr(written, "func", written), "__code__", None)
    if isinstance(code, types.CodeType):
        return f"{code.co_filename}:{code.co_firstlineno}"
    return repr(function)


def _schemas(
    types: list[object], mode: Literal["validation", "serialization"]
) -> tuple[list[JsonObject], JsonObject]:
    """Return the schemas of types, and the definitions that they share.

    A pydantic model has two schemas, for reading and for writing: they may differ in aliases,
    computed fields and defaults.
    """
    from wirecall.protocol import models, schemas  # late: `import wirecall` stays light

    inner: JsonObject = {}

    def hook(type: Any) -> JsonObject:
        schema = models.model_schema(type, mode)
        definitions = schema.pop("$defs", {})
        if twice := [
            name for name in definitions.keys() & inner.keys() if definitions[name] != inner[name]
        ]:
            raise TypeError(f"two types are called {twice[0]}")
        inner.update(definitions)
        return schema

    found, definitions = schemas.described(types, hook)
    return found, definitions | inner


# --- messages -------------------------------------------------------------------------------------


def _problems_of(parameter: Parameter, raw: Raw) -> list[str]:
    """Return why JSON does not fit a parameter."""
    where = f"params.{parameter.name}"
    if parameter.model is None:
        return _problems(_wire_type(parameter), raw, where)
    try:
        parameter.model.decode(raw)
    except (ValueError, RecursionError) as misfit:
        return parameter.model.problems(misfit, where)
    return []


def _problems(hint: Any, raw: Raw, where: str, error: Exception | None = None) -> list[str]:
    """Return why JSON does not fit a type.

    If the type has members, it is the first problem of each.
    """
    from wirecall.protocol import models

    if error is None:
        try:
            msgspec.json.Decoder(hint, dec_hook=models.decode_model).decode(raw)
            return []
        except (msgspec.ValidationError, RecursionError) as misfit:
            error = misfit
    first = explain(error, where)
    # Step 1: the members, of an object that has them.
    members: dict[str, object] = {}
    if bytes(raw)[:1] == b"{":
        members = _members_of(bare_type(hint))
    if members:
        found: list[str] = []
        given = _decode_members(raw)
        for name, member in members.items():
            if name in given:
                found += _problems(member, given[name], f"{where}.{name}")
        return _with_first(first, found)
    # Step 2: the values of an enum. msgspec quotes the value that it got.
    if "invalid enum value" in first:
        first += f", expected one of {', '.join(map(str, _choices_in(hint)[:20]))}"
    return [first]


def _members_of(bare: object) -> dict[str, object]:
    """Return the types of the members of a Struct, a dataclass or a TypedDict, by their names."""
    if not isinstance(bare, type):
        return {}
    if issubclass(bare, Struct):
        return {field.encode_name: field.type for field in msgspec.structs.fields(bare)}
    if hasattr(bare, "__dataclass_fields__"):
        import dataclasses  # the class has loaded it

        hints = typing.get_type_hints(bare, include_extras=True)
        # Without ClassVars.
        fields = dataclasses.fields(typing.cast(Any, bare))
        return {field.name: hints[field.name] for field in fields}
    members: dict[str, object] = {}
    if typing.is_typeddict(bare):
        # Required[int] is a type only inside a TypedDict: a decoder of the member alone takes int.
        for name, member in typing.get_type_hints(bare, include_extras=True).items():
            members[name] = member
            if typing.get_origin(member) in (typing.Required, typing.NotRequired):
                members[name] = typing.get_args(member)[0]
    return members


def _choices_in(hint: object) -> list[object]:
    """Return the values of the enums and literals in a type."""
    from wirecall.protocol import models

    parts = [part for part, _ in models.parts(hint, set())]
    values: list[object] = []
    for part in parts:
        if typing.get_origin(part) is Literal:
            values += typing.get_args(part)
    for part in parts:
        if isinstance(part, type) and issubclass(part, enum.Enum):
            values += [each.value for each in part]
    return values


def _with_first(first: str, found: list[str]) -> list[str]:
    """Return problems together with the one that msgspec reports, unless they contain it."""
    if any(text.startswith(first) for text in found):
        return found
    return [first, *found]


def explain(error: Exception, root: str, positions: Sequence[str] = ()) -> str:
    """Return msgspec's message in our form.

    The place comes first, and there are no quotes and at most one line of the caller's.
    """
    if isinstance(error, RecursionError):
        return f"{root}: nested too deeply"
    what = str(error)
    where = ""
    if " - at `$" in what:
        what, _, where = what.rpartition(" - at `$")
    what = what.replace("`", "")
    where = where.removesuffix("`")
    # A place in the array of params is shown by the parameter's name.
    index = ""
    if where.startswith("["):
        index = where[1 : where.find("]")]
    if index.isdigit() and int(index) < len(positions):
        where = f".{positions[int(index)]}{where[len(index) + 2 :]}"
    if isinstance(error.__cause__, ValueError) and hasattr(
        error.__cause__, "errors"
    ):  # pydantic's, about a model inside msgspec's types
        from wirecall.protocol.models import problems

        return "; ".join(problems(error.__cause__, root + where)[:MOST_PROBLEMS])
    for lead, word in (
        ("Object missing required field ", "missing"),
        ("Object contains unknown field ", "unknown name"),
    ):
        if what.startswith(lead):
            return f"{root}{where}.{what.removeprefix(lead)[:100]}: {word}"
    return f"{root}{where}: {what[:1].lower()}{what[1:200]}"
