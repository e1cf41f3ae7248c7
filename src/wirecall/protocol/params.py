"""A function's signature as the decoder of its params.

`Signature(function, inject=Context)` reads a signature once, at registration, and builds everything a call needs:

    bind(raw)                raw params -> positional arguments, for a `simple` function (no context, no keyword-only)
    bind_all(raw, injected)  raw params -> positional and keyword arguments, for any function
    schema, result_schema    JSON Schema 2020-12

The rules of the file:

1. Params come by name (an object) or by position (an array); msgspec decodes both straight into the declared types.
2. An untyped parameter takes any JSON. `*rest` takes the surplus positions, or a list under its own name.
3. `_meta` is accepted beside every method's params and `idempotency_key` beside a command's; neither is passed to a
   function that does not declare it.
4. Every misfit is an `InvalidParams` that says what and where: `params.cents: expected int, got str`.
"""

import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import InvalidParams, UsageError

META = "_meta"
KEY = "idempotency_key"
REQUIRED: Any = type("REQUIRED", (), {"__repr__": lambda _: "REQUIRED"})()

Binder = Callable[[Raw | UnsetType], Sequence[Any]]

_NO_PARAMS = Raw(b"[]")
_SCALARS = (type(None), bool, int, float, str)
_decode_items = msgspec.json.Decoder(list[Raw]).decode
_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode


class Parameter(Struct, frozen=True):
    """One declared parameter that the caller may fill."""

    name: str
    type: Any
    default: Any = REQUIRED
    kind: Literal["position", "name", "rest", "others"] = "position"  # normal, keyword-only, *args, **kwargs

    @property
    def required(self) -> bool:
        return self.default is REQUIRED and self.kind in ("position", "name")


class Signature:
    """How one function takes its params."""

    def __init__(self, function: Callable[..., Any], *, inject: type, keyed: bool = False) -> None:
        self.function = function
        self.parameters, self.injected, self.returns = _inspect(function, inject)
        names = [p.name for p in self.parameters]
        self.takes_key = KEY in names
        self.key_position = next((i for i, p in enumerate(self.parameters) if p.name == KEY and p.kind == "position"), None)
        self._beside = [name for name in ((META, KEY) if keyed else (META,)) if name not in names]
        self._named = [p for p in self.parameters if p.kind != "others"]
        self._positional = [p for p in self.parameters if p.kind == "position"]
        self._taken = _names_taken(function, self.injected)
        self._rest = _only(self.parameters, "rest")
        self._others = _only(self.parameters, "others")
        self.simple = not self.injected and self._named in (self._positional, [self._rest]) and self._others is None
        self._by_name = self._decoder(self._named_struct())
        self._by_position = self._decoder(self._positional_type())
        self._one_by_one = {p.name: self._decoder(p.type) for p in self.parameters} if self._rest or self._others else {}
        self._has_dataclasses = any(
            hasattr(part, "__dataclass_fields__") for p in self.parameters for part in _parts(p.type, set())
        )
        self.bind: Binder = self._simple_binder() if self.simple else self._refuse_simple
        if self.simple and self._has_dataclasses:
            bind = self.bind
            self.bind = lambda raw: _completed(bind(raw))
        self.schema, self.result_schema = self._describe()

    def bind_all(self, raw: Raw | UnsetType, injected: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The arguments of any function; `injected` goes to the parameters annotated with the injected type."""
        if self.simple:
            return self.bind(raw), {}
        given = _NO_PARAMS if raw is UNSET else raw
        try:
            args, keywords = self._from_object(given) if _is_object(given) else self._from_array(given)
        except (msgspec.ValidationError, RecursionError) as error:
            raise self._misfit(given, error) from None
        if self._has_dataclasses:
            _completed([*args, *keywords.values()])
        for name, index in self.injected.items():
            if index is None:
                keywords[name] = injected
            else:
                args.insert(index, injected)
        return args, keywords

    # --- a simple function: one decode to a sequence of arguments --------------------------------------------------

    def _simple_binder(self) -> Binder:
        """The shortest way from raw params to arguments. Where msgspec can, one decoder takes objects and arrays alike."""
        if self._rest:
            return self._bind_either(_wire_type(self._rest))
        if self._positional and all(p.required for p in self._positional):
            return self._bind_either(types.GenericAlias(tuple, tuple(p.type for p in self._positional)))
        return self._bind_by_form()

    def _bind_either(self, array: Any) -> Binder:
        struct = self._by_name.type
        decode = self._decoder(struct | array).decode
        values = self._values(self._named)
        spread = self._rest is not None

        def bind(raw: Raw | UnsetType) -> Sequence[Any]:
            try:
                value = decode(_NO_PARAMS if raw is UNSET else raw)
            except (msgspec.ValidationError, RecursionError) as error:
                raise self._misfit(raw, error) from None
            if type(value) is struct:
                value = values(value)[0] if spread else values(value)
            return value  # type: ignore[no-any-return]

        return bind

    def _bind_by_form(self) -> Binder:
        values = self._values(self._named)
        by_name, by_position = self._by_name.decode, self._by_position.decode

        def bind(raw: Raw | UnsetType) -> Sequence[Any]:
            given = _NO_PARAMS if raw is UNSET else raw
            try:
                return values(by_name(given) if _is_object(given) else by_position(given))
            except (msgspec.ValidationError, RecursionError) as error:
                raise self._misfit(given, error) from None

        return bind

    def _refuse_simple(self, _: Raw | UnsetType) -> Sequence[Any]:
        raise AssertionError("a function with a context or keyword-only parameters is bound by bind_all")

    # --- any function ----------------------------------------------------------------------------------------------

    def _from_object(self, raw: Raw) -> tuple[list[Any], dict[str, Any]]:
        values = self._values(self._named)(self._by_name.decode(raw))
        pairs = list(zip(self._named, values, strict=True))
        args = [value for p, value in pairs if p.kind == "position"]
        args += [item for p, value in pairs if p.kind == "rest" for item in value]
        return args, {p.name: value for p, value in pairs if p.kind == "name"} | self._surplus(raw)

    def _surplus(self, raw: Raw) -> dict[str, Any]:
        if self._others is None:
            return {}
        known = {p.name for p in self._named} | set(self._beside)
        surplus = {name: value for name, value in _decode_members(raw).items() if name not in known}
        for name in surplus.keys() & self._taken:
            raise InvalidParams(f"params.{name}: unknown name")
        return {name: self._decode_one(self._others, value, f"params.{name}") for name, value in surplus.items()}

    def _from_array(self, raw: Raw) -> tuple[list[Any], dict[str, Any]]:
        args = self._from_items(raw) if self._rest else [*self._values(self._positional)(self._by_position.decode(raw))]
        missing = [p.name for p in self._named if p.kind == "name" and p.required]
        if missing:
            raise InvalidParams(f"params.{missing[0]}: missing; it can only be given by name")
        return args, {p.name: p.default for p in self._named if p.kind == "name"}

    def _from_items(self, raw: Raw) -> list[Any]:
        items = _decode_items(raw)
        lead = self._positional
        args = [
            self._decode_one(lead[i] if i < len(lead) else self._rest, item, f"params[{i}]") for i, item in enumerate(items)
        ]
        absent = lead[len(items) :]
        if any(p.required for p in absent):
            raise InvalidParams(self._wrong_count(len(items)))
        return args + [p.default for p in absent]

    def _decode_one(self, parameter: Parameter | None, raw: Raw, where: str) -> Any:
        assert parameter is not None
        try:
            return self._one_by_one[parameter.name].decode(raw)
        except (msgspec.ValidationError, RecursionError) as error:
            raise InvalidParams(_explain(error, where)) from None

    # --- building --------------------------------------------------------------------------------------------------

    def _named_struct(self) -> type[Struct]:
        """One struct for params by name. Its fields have made-up names, because `_meta` or `self` cannot be theirs."""
        fields = [_field(i, p) for i, p in enumerate(self._named)]
        beside = [(f"beside{i}", Any, msgspec.field(default=UNSET)) for i in range(len(self._beside))]
        wire = [p.name for p in self._named] + self._beside
        return msgspec.defstruct(
            "Params",
            fields + beside,
            rename={field[0]: name for field, name in zip(fields + beside, wire, strict=True)},
            forbid_unknown_fields=self._others is None,
            kw_only=True,
            gc=False,
        )

    def _positional_type(self) -> Any:
        fields = [_field(i, p) for i, p in enumerate(self._positional)]
        return msgspec.defstruct("Params", fields, array_like=True, forbid_unknown_fields=True, gc=False)

    def _decoder(self, type: Any) -> msgspec.json.Decoder[Any]:
        try:
            return msgspec.json.Decoder(type, dec_hook=_decode_hook)
        except Exception as error:
            raise self._unusable(error) from error

    def _values(self, parameters: list[Parameter]) -> Callable[[Any], tuple[Any, ...]]:
        names = [f"f{self._named.index(p)}" for p in parameters]
        if len(names) > 1:
            return attrgetter(*names)
        if not names:
            return lambda _: ()
        get = attrgetter(names[0])
        return lambda struct: (get(struct),)

    def _describe(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the JSON Schemas of params and result, each with its own definitions.

        A result that is undeclared, or that msgspec cannot describe, is any JSON.
        """
        try:
            schemas, definitions = _schemas([_wire_type(p) for p in self._named], "validation")
        except TypeError as error:
            raise self._unusable(error) from error
        params = {
            "type": "object",
            "properties": {p.name: {**schema, **_default_of(p)} for p, schema in zip(self._named, schemas, strict=True)},
            "required": [p.name for p in self._named if p.required],
            "additionalProperties": self._others is not None,
            **({"$defs": definitions} if definitions else {}),
        }
        if self.returns is Any:
            return params, {}
        try:
            [result], definitions = _schemas([self.returns], "serialization")
        except TypeError:
            self.returns = Any
            return params, {}
        return params, {**result, **({"$defs": definitions} if definitions else {})}

    def _unusable(self, error: Exception) -> UsageError:
        return UsageError(
            f"The parameters of {_name_of(self.function)} cannot be decoded from JSON.",
            str(error),
            "annotate with JSON types, dataclasses, TypedDict, msgspec Struct or pydantic models, or leave untyped",
        )

    # --- errors ----------------------------------------------------------------------------------------------------

    def _misfit(self, raw: Raw | UnsetType, error: Exception) -> InvalidParams:
        if raw is UNSET or bytes(raw)[:1] == b"[":
            items = [] if raw is UNSET else _decode_items(raw)
            least, most = self._counts()
            if not least <= len(items) <= most:
                return InvalidParams(self._wrong_count(len(items)))
        return InvalidParams(_explain(error, "params", [p.name for p in self._positional]))

    def _counts(self) -> tuple[int, float]:
        least = sum(p.required for p in self._positional)
        return least, float("inf") if self._rest else len(self._positional)

    def _wrong_count(self, count: int) -> str:
        least, most = self._counts()
        expected = f"at least {least}" if most == float("inf") else f"{least}" if least == most else f"{least} to {most}"
        names = ", ".join(p.name for p in self._positional)
        return f"params: expected {expected} arguments{names and f' ({names})'}, got {count}"


def _inspect(function: Callable[..., Any], inject: type) -> tuple[list[Parameter], dict[str, int | None], Any]:
    import inspect  # late: `import wirecall` stays light

    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise UsageError(f"{_name_of(function)} has no signature to read.", str(error), "wrap it in a function") from error
    hints = _hints(function)
    kinds: dict[Any, Any] = {
        inspect.Parameter.KEYWORD_ONLY: "name",
        inspect.Parameter.VAR_POSITIONAL: "rest",
        inspect.Parameter.VAR_KEYWORD: "others",
    }
    parameters: list[Parameter] = []
    injected: dict[str, int | None] = {}
    for index, (name, declared) in enumerate(signature.parameters.items()):
        hint = hints.get(name, Any)
        if _injects(hint, inject):
            injected[name] = None if declared.kind is inspect.Parameter.KEYWORD_ONLY else index
            continue
        default = REQUIRED if declared.default is inspect.Parameter.empty else declared.default
        for found in (default, *(note for part in _parts(hint, set()) for note in getattr(part, "__metadata__", ()))):
            if type(found).__module__.partition(".")[0] in ("pydantic", "annotated_types"):
                raise UsageError(
                    f"The parameter {name} of {_name_of(function)} has {found!r}, which would be ignored.",
                    "arguments are decoded by msgspec, which knows neither pydantic's fields nor annotated_types",
                    f"use Annotated[{_name_of(hint)}, msgspec.Meta(gt=0)] and a plain default, or a pydantic model",
                )
        parameters.append(Parameter(name, hint, default, kinds.get(declared.kind, "position")))
    return parameters, injected, hints.get("return", Any)


def _parts(hint: Any, seen: set[Any]) -> Iterator[Any]:
    """Give a type and all types in it: its arguments, and the fields of its classes."""
    yield hint
    for part in typing.get_args(hint):
        yield from _parts(part, seen)
    is_class = isinstance(hint, type) and hint not in seen and not hasattr(hint, "model_validate")
    if is_class and any(hasattr(hint, mark) for mark in ("__struct_fields__", "__dataclass_fields__", "__total__")):
        seen.add(hint)
        for part in typing.get_type_hints(hint, include_extras=True).values():
            yield from _parts(part, seen)


def _completed(values: Sequence[Any]) -> Sequence[Any]:
    """Give every dataclass among decoded values its defaults. msgspec leaves them to the class, where an encoder and `vars`
    do not find them."""
    from dataclasses import fields  # late: `import wirecall` stays light

    left = list(values)
    while left:
        value = left.pop()
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


def _names_taken(function: Any, injected: Mapping[str, Any]) -> set[str]:
    """Names that a caller's surplus must not have: `self` of a method, what a partial has filled, the context."""
    code = getattr(function, "__code__", None) or getattr(getattr(function, "func", None), "__code__", None)
    own = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ()
    return {*own, *injected}


def _injects(hint: Any, inject: type) -> bool:
    if typing.get_origin(hint) is typing.Annotated:
        hint = typing.get_args(hint)[0]
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return hint is inject or (is_union and inject in typing.get_args(hint))


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    is_function = isinstance(function, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type))
    target = function if is_function else getattr(function, "func", type(function).__call__)
    try:
        return typing.get_type_hints(target, include_extras=True)
    except TypeError:  # a builtin: nothing is declared
        return {}
    except NameError as error:
        raise UsageError(
            f"An annotation of {_name_of(function)} cannot be resolved: {error}.",
            "annotations are read when the function is registered, in the namespace of its module",
            "define the type at module level, before the function",
        ) from error


def _only(parameters: list[Parameter], kind: str) -> Parameter | None:
    return next((p for p in parameters if p.kind == kind), None)


def _wire_type(parameter: Parameter) -> Any:
    return types.GenericAlias(list, (parameter.type,)) if parameter.kind == "rest" else parameter.type


def _field(index: int, parameter: Parameter) -> tuple[str, Any, Any]:
    if parameter.kind == "rest":
        return (f"f{index}", _wire_type(parameter), msgspec.field(default_factory=list))
    if parameter.default is REQUIRED:
        return (f"f{index}", parameter.type, msgspec.field())
    if isinstance(parameter.default, _SCALARS):
        return (f"f{index}", parameter.type, msgspec.field(default=parameter.default))
    # As in Python, every call without the argument gets the one default object.
    return (f"f{index}", parameter.type, msgspec.field(default_factory=lambda: parameter.default))


def _is_object(raw: Raw) -> bool:
    return bytes(raw)[:1] == b"{"


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function))


# --- pydantic models, without importing pydantic -----------------------------------------------------------------------


def _decode_hook(type: Any, value: Any) -> Any:
    try:
        return type.model_validate(value)
    except ValueError as error:
        problems: list[dict[str, Any]] = getattr(error, "errors", list)()
        raise ValueError("; ".join(_problem(problem) for problem in problems[:3]) or str(error)) from None


def _problem(problem: dict[str, Any]) -> str:
    where = ".".join(map(str, problem["loc"]))
    return f"{where}: {problem['msg']}" if where else str(problem["msg"])


# --- schemas -----------------------------------------------------------------------------------------------------------


def _schemas(types: list[Any], mode: Literal["validation", "serialization"]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the schemas of types, and the definitions that they share. Of a pydantic model, what it takes and what it gives
    may differ: aliases, computed fields, defaults."""
    inner: dict[str, Any] = {}

    def hook(type: Any) -> dict[str, Any]:
        if not hasattr(type, "model_json_schema"):
            raise TypeError(f"{_name_of(type)} is not a type that JSON can carry")
        schema: dict[str, Any] = type.model_json_schema(mode=mode, ref_template="#/$defs/{model}")
        inner.update(schema.pop("$defs", {}))
        return schema

    schemas, definitions = msgspec.json.schema_components(types, schema_hook=hook, ref_template="#/$defs/{name}")
    return list(schemas), definitions | inner


def _default_of(parameter: Parameter) -> dict[str, Any]:
    if parameter.default is REQUIRED:
        return {}
    try:
        default = msgspec.to_builtins(parameter.default)
        is_json = msgspec.json.decode(msgspec.json.encode(default)) == default  # an infinity is not
    except (TypeError, ValueError, msgspec.DecodeError):
        return {}
    return {"default": default} if is_json else {}


# --- texts -------------------------------------------------------------------------------------------------------------


def _explain(error: Exception, root: str, positions: Sequence[str] = ()) -> str:
    """msgspec's words as ours: where first, no quoting, never more than a line of the caller's own text."""
    if isinstance(error, RecursionError):
        return f"{root}: nested too deeply"
    what, _, where = str(error).partition(" - at `$")
    what = what.replace("`", "")
    path = _path(root, where.removesuffix("`"), positions)
    for lead, word in (("Object missing required field ", "missing"), ("Object contains unknown field ", "unknown name")):
        if what.startswith(lead):
            return f"{path}.{what.removeprefix(lead)[:100]}: {word}"
    return f"{path}: {what[:1].lower()}{what[1:200]}"


def _path(root: str, path: str, positions: Sequence[str]) -> str:
    index = path[1 : path.find("]")] if path.startswith("[") else ""
    if index.isdigit() and int(index) < len(positions):
        return f"{root}.{positions[int(index)]}{path[len(index) + 2 :]}"
    return root + path
