"""JSON Schemas of the types that msgspec decodes.

They keep what was declared: the values of an enum or a `Literal`, the members of a class and the
choices of a union are in the order of the declaration, and a type that JSON writes as a string has
its format. `model_schemas` describes pydantic's types in the same words.

The types are read with `msgspec.inspect`. That sorts the values of a `Literal` and the members of a
TypedDict, so their order is taken from the annotations.
"""

import re
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct, inspect

from wirecall.protocol.messages import JsonObject

# A Decimal as Python writes it. "decimal" is not a format of JSON Schema: validators warn about it.
DECIMAL = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
# The bytes of a value that JSON writes as base64. Validators know the format from OpenAPI.
BASE64: JsonObject = {"type": "string", "format": "byte", "contentEncoding": "base64"}

# Describes a class that msgspec does not know.
Hook: TypeAlias = Callable[[Any], JsonObject]
Fields: TypeAlias = inspect.StructType | inspect.TypedDictType | inspect.DataclassType
Named: TypeAlias = Fields | inspect.NamedTupleType | inspect.EnumType

_NAMED = typing.get_args(Named)
_WITH_FIELDS = tuple(each for each in _NAMED if each is not inspect.EnumType)
_LISTS = (inspect.ListType, inspect.VarTupleType, inspect.SetType, inspect.FrozenSetType)
_SETS = (inspect.SetType, inspect.FrozenSetType)
# A frozen dict exists from Python 3.15 on.
_DICTS = tuple(
    getattr(inspect, name) for name in ("DictType", "FrozenDictType") if hasattr(inspect, name)
)
_BYTES = (inspect.BytesType, inspect.ByteArrayType, inspect.MemoryViewType)
_STRINGS: dict[type, JsonObject] = {
    inspect.DateType: {"format": "date"},
    inspect.TimeDeltaType: {"format": "duration"},
    inspect.UUIDType: {"format": "uuid"},
    inspect.DecimalType: {"pattern": DECIMAL},
}
_JSON_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
# The keyword of each limit of a number, and of each limit of a length.
_NUMBER_LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
# Default values that a factory makes, and that are shown.
_SHOWN_FACTORIES = (list, dict, set, bytearray)
_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9.\-_]")


def described(
    types: Sequence[Any], hook: Hook, ref_template: str = "#/$defs/{name}"
) -> tuple[list[JsonObject], JsonObject]:
    """Return the schemas of types, and the definitions that they share.

    Raises `TypeError` for a type that JSON cannot carry.
    """
    infos = inspect.multi_type_info(types)
    named: dict[Any, Named] = {}
    for info in infos:
        _collect(info, named)
    names = _names(named)
    writer = _Writer(names, hook, ref_template)
    schemas = [writer.of_hint(info, hint) for info, hint in zip(infos, types, strict=True)]
    definitions = {names[key]: writer.definition(info) for key, info in named.items()}
    return schemas, definitions


def described_one(hint: Any, hook: Hook) -> JsonObject:
    """Return the schema of one type, with its definitions."""
    [schema], definitions = described([hint], hook)
    if definitions:
        schema["$defs"] = definitions
    return schema


def listed_values(values: Sequence[Any]) -> JsonObject:
    """Return the schema of some constant values."""
    schema: JsonObject = {"enum": list(values)}
    kinds = {type(value) for value in values}
    if len(kinds) == 1:
        kind = _JSON_TYPES.get(kinds.pop())
        if kind is not None:
            schema["type"] = kind
    return schema


def base64_length(count: int) -> int:
    """Return how many characters base64 has for a number of bytes."""
    return 4 * ((count + 2) // 3)


def _collect(info: inspect.Type, named: dict[Any, Named]) -> None:
    """Find all types that get a name in the definitions."""
    if isinstance(info, inspect.EnumType):
        named[info.cls] = info
    elif isinstance(info, _WITH_FIELDS):
        if info.cls not in named:
            named[info.cls] = info
            for field in info.fields:
                _collect(field.type, named)
    elif isinstance(info, inspect.Metadata):
        _collect(info.type, named)
    elif isinstance(info, _LISTS):
        _collect(info.item_type, named)
    elif isinstance(info, inspect.TupleType):
        for each in info.item_types:
            _collect(each, named)
    elif isinstance(info, _DICTS):
        pair: Any = info
        _collect(pair.key_type, named)
        _collect(pair.value_type, named)
    elif isinstance(info, inspect.UnionType):
        for each in info.types:
            _collect(each, named)


def _names(named: Mapping[Any, Named]) -> dict[Any, str]:
    """Return the names of classes: two classes of the same name get their modules' names."""
    short = {key: _NOT_IN_A_NAME.sub("_", _class_name(key)) for key in named}
    used = list(short.values())
    names = {}
    for key, name in short.items():
        names[key] = name
        if used.count(name) > 1:
            names[key] = _NOT_IN_A_NAME.sub("_", f"{key.__module__}.{key.__qualname__}")
    return names


def _class_name(key: Any) -> str:
    """Return the name of a class; a generic one has its arguments."""
    if not hasattr(key, "__origin__"):
        return str(key.__name__)
    arguments = [each.__name__ if isinstance(each, type) else repr(each) for each in key.__args__]
    return f"{key.__origin__.__name__}[{', '.join(arguments)}]"


def _bare(info: inspect.Type) -> inspect.Type:
    while isinstance(info, inspect.Metadata):
        info = info.type
    return info


# --- the order of a declaration -------------------------------------------------------------------


# The orders in which literals have the same values, by these values with their types. A writer meets
# the literals of an annotation in the order of the annotation.
Orders: TypeAlias = dict[frozenset[tuple[type, object]], list[Sequence[object]]]


def _orders(hint: Any, found: Orders) -> Orders:
    """Return the values of the literals in an annotation, without those in fields of classes."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        found.setdefault(_values(arguments), []).append(arguments)
        return found
    for each in arguments:
        _orders(each, found)
    # NewType; a `type` statement (3.12).
    behind = getattr(hint, "__supertype__", None) or getattr(hint, "__value__", None)
    if behind is not None:
        _orders(behind, found)
    return found


def _values(values: Sequence[object]) -> frozenset[tuple[type, object]]:
    return frozenset((type(value), value) for value in values)


def _hints(key: Any) -> dict[str, Any]:
    """Return the annotations of a class, in the order of their declaration."""
    kind = typing.get_origin(key) or key
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except (NameError, TypeError):  # msgspec could resolve them, or the class was made by code
        return {}


# --- writing --------------------------------------------------------------------------------------


class _Writer(Struct):
    """Writes the schemas of types that `msgspec.inspect` has read."""

    # The names of classes in the definitions.
    names: dict[Any, str]
    hook: Hook
    ref_template: str
    # The order of the literals in the annotation that is being written.
    orders: Orders = {}

    def of_hint(self, info: inspect.Type, hint: Any) -> JsonObject:
        """Return the schema of an annotation."""
        self.orders = _orders(hint, {})
        return self.of(info)

    def of(self, info: inspect.Type) -> JsonObject:
        """Return the schema of a type, which is a reference if the type has a name."""
        extra: JsonObject = {}
        while isinstance(info, inspect.Metadata):
            extra = {**(info.extra_json_schema or {}), **extra}
            info = info.type
        key = getattr(info, "cls", None)
        try:
            name = self.names.get(key)
        except TypeError:  # a class whose instances cannot be compared
            name = None
        if name is not None:
            return {**extra, "$ref": self.ref_template.format(name=name)}
        return {**self._plain(info), **extra}

    def _plain(self, info: inspect.Type) -> JsonObject:
        if isinstance(info, (inspect.AnyType, inspect.RawType)):
            return {}
        if isinstance(info, inspect.NoneType):
            return {"type": "null"}
        if isinstance(info, inspect.BoolType):
            return {"type": "boolean"}
        if isinstance(info, inspect.IntType):
            return {"type": "integer", **_limits(info)}
        if isinstance(info, inspect.FloatType):
            return {"type": "number", **_limits(info)}
        if isinstance(info, inspect.StrType):
            return _string(info)
        if isinstance(info, _BYTES):
            return _base64(info)
        if isinstance(info, (inspect.DateTimeType, inspect.TimeType)):
            return _moment(info)
        if type(info) in _STRINGS:
            return {"type": "string", **_STRINGS[type(info)]}
        if isinstance(info, _LISTS):
            return self._list(info)
        if isinstance(info, inspect.TupleType):
            return self._tuple(info)
        if isinstance(info, _DICTS):
            return self._dict(info)
        if isinstance(info, inspect.UnionType):
            return self._union(info)
        if isinstance(info, inspect.LiteralType):
            return listed_values(self._in_declared_order(info.values))
        if isinstance(info, inspect.CustomType):
            return self.hook(info.cls)
        raise TypeError(f"{info!r} is not a type that JSON can carry")

    def _in_declared_order(self, values: Sequence[object]) -> Sequence[object]:
        """Return the values of the next literal that has them."""
        orders = self.orders.get(_values(values), [values])
        if len(orders) > 1:
            return orders.pop(0)
        return orders[0]

    def _list(self, info: Any) -> JsonObject:
        schema: JsonObject = {"type": "array"}
        if not isinstance(info.item_type, inspect.AnyType):
            schema["items"] = self.of(info.item_type)
        if isinstance(info, _SETS):
            schema["uniqueItems"] = True
        return {**schema, **_sizes(info, "Items")}

    def _tuple(self, info: inspect.TupleType) -> JsonObject:
        count = len(info.item_types)
        schema: JsonObject = {"type": "array", "minItems": count, "maxItems": count}
        if count:
            schema["prefixItems"] = [self.of(each) for each in info.item_types]
            schema["items"] = False
        return schema

    def _dict(self, info: Any) -> JsonObject:
        schema: JsonObject = {"type": "object"}
        names = self._property_names(info.key_type)
        if names:
            schema["propertyNames"] = names
        if not isinstance(info.value_type, inspect.AnyType):
            schema["additionalProperties"] = self.of(info.value_type)
        return {**schema, **_sizes(info, "Properties")}

    def _property_names(self, info: inspect.Type) -> JsonObject:
        """Return the schema of the names in a dict; {} if every string fits.

        A name is a string in JSON, so a limit of a number says nothing about it.
        """
        schema = self.of(info)
        bare = _bare(info)
        if isinstance(bare, inspect.EnumType):
            values = [each.value for each in bare.cls]
            return schema if all(isinstance(each, str) for each in values) else {}
        if schema.get("type") != "string":
            return {}
        return {word: value for word, value in schema.items() if word != "type"}

    def _union(self, info: inspect.UnionType) -> JsonObject:
        """Return the schema of a union.

        Null is the last choice. A tag distinguishes several structs.
        """
        structs: list[inspect.StructType] = []
        choices: list[JsonObject] = []
        null: list[JsonObject] = []
        for each in info.types:
            bare = _bare(each)
            if isinstance(bare, inspect.StructType) and not bare.array_like:
                structs.append(bare)
            elif isinstance(bare, inspect.NoneType):
                null.append(self.of(each))
            else:
                choices.append(self.of(each))
        if len(structs) == 1:
            choices.append(self.of(structs[0]))
        elif structs:
            tagged = self._tagged(structs)
            if not choices and not null:
                return tagged
            choices.append(tagged)
        return {"anyOf": [*choices, *null]}

    def _tagged(self, structs: Sequence[inspect.StructType]) -> JsonObject:
        schemas = [self.of(each) for each in structs]
        mapping = {each.tag: schema["$ref"] for each, schema in zip(structs, schemas, strict=True)}
        return {
            "anyOf": schemas,
            "discriminator": {"propertyName": structs[0].tag_field, "mapping": mapping},
        }

    # --- definitions ------------------------------------------------------------------------------

    def definition(self, info: Named) -> JsonObject:
        """Return the schema of a class."""
        schema: JsonObject = {"title": _class_name(info.cls)}
        text = _text(info)
        if text:
            schema["description"] = text
        if isinstance(info, inspect.EnumType):
            return schema | listed_values([each.value for each in info.cls])
        properties: dict[str, JsonObject] = {}
        required: list[str] = []
        if isinstance(info, inspect.StructType) and info.tag_field is not None:
            properties[info.tag_field] = listed_values([info.tag])
            required.append(info.tag_field)
        hints = _hints(info.cls)
        for field in _in_order(info.fields, hints):
            # A generic class has literals among its arguments.
            self.orders = {**_orders(info.cls, {}), **_orders(hints.get(field.name), {})}
            properties[field.encode_name] = self.of(field.type) | _default(field, info)
            if field.required:
                required.append(field.encode_name)
        if isinstance(info, inspect.NamedTupleType):
            size = {"minItems": len(required), "maxItems": len(properties)}
            return {**schema, "type": "array", "prefixItems": [*properties.values()], **size}
        if isinstance(info, inspect.StructType) and info.array_like:
            schema |= {"type": "array", "prefixItems": [*properties.values()]}
            schema["minItems"] = _least(info, len(properties))
            if info.forbid_unknown_fields:
                schema["maxItems"] = len(properties)
            return schema
        schema |= {"type": "object", "properties": properties}
        if required:
            schema["required"] = required
        if isinstance(info, inspect.StructType) and info.forbid_unknown_fields:
            schema["additionalProperties"] = False
        return schema


def _least(info: inspect.StructType, count: int) -> int:
    """Return how many entries a struct that is an array has at least."""
    for field in reversed(info.fields):
        if field.required:
            break
        count -= 1
    return count


def _in_order(fields: Sequence[inspect.Field], hints: Mapping[str, Any]) -> list[inspect.Field]:
    """Return fields in the order of their declaration."""
    places = {name: place for place, name in enumerate(hints)}
    if not all(field.name in places for field in fields):
        return list(fields)
    return sorted(fields, key=lambda field: places[field.name])


def _default(field: inspect.Field, of: Named) -> JsonObject:
    """Return the default of a field as a part of its schema."""
    if field.default is not msgspec.NODEFAULT:
        return {"default": msgspec.to_builtins(field.default, str_keys=True)}
    factory = field.default_factory
    # A Struct makes a factory of a literal `[]`.
    if isinstance(of, inspect.StructType) and factory in _SHOWN_FACTORIES:
        made: Any = factory
        return {"default": msgspec.to_builtins(made(), str_keys=True)}
    return {}


def _text(info: Named) -> str:
    """Return the docstring of a class, without one that Python has made."""
    kind = typing.get_origin(info.cls) or info.cls
    text = textwrap.dedent(getattr(kind, "__doc__", None) or "").strip("\r\n")
    is_made = text == "An enumeration."
    if isinstance(info, (inspect.NamedTupleType, inspect.DataclassType)):
        is_made = text.startswith(f"{kind.__name__}(") and text.endswith(")")
    return "" if is_made else text


def _limits(info: inspect.IntType | inspect.FloatType) -> JsonObject:
    """Return the limits of a number."""
    stated = {word: getattr(info, limit) for limit, word in _NUMBER_LIMITS.items()}
    return {word: limit for word, limit in stated.items() if limit is not None}


def _sizes(info: Any, noun: str) -> JsonObject:
    """Return the limits of a length: minItems, maxLength, ..."""
    stated = {f"min{noun}": info.min_length, f"max{noun}": info.max_length}
    return {word: limit for word, limit in stated.items() if limit is not None}


def _string(info: inspect.StrType) -> JsonObject:
    schema: JsonObject = {"type": "string", **_sizes(info, "Length")}
    if info.pattern is not None:
        schema["pattern"] = info.pattern
    return schema


def _base64(info: Any) -> JsonObject:
    sizes = {word: base64_length(limit) for word, limit in _sizes(info, "Length").items()}
    return {**BASE64, **sizes}


def _moment(info: inspect.DateTimeType | inspect.TimeType) -> JsonObject:
    """Return the schema of a datetime or a time.

    The formats of JSON Schema have a time zone, so a type that refuses one has no format.
    """
    if info.tz is False:
        return {"type": "string"}
    format = "time"
    if isinstance(info, inspect.DateTimeType):
        format = "date-time"
    return {"type": "string", "format": format}
