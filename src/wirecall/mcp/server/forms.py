"""Forms: the fields that `ctx.elicit` asks a person for, and the check of the answer.

1. A form is a flat object of strings, numbers, booleans and choices; MCP allows nothing else.
   `form_of` makes it from a type or a JSON Schema. A field that a form cannot have is a
   `UsageError` that names the field.
2. 2025-06-18 has fewer keywords for a field than its successors (`RequestedForm.schema`).
3. An answer is checked against the form, even if the client has checked it, and then converted to
   the type. An answer that does not fit is `BadInput`: the client knew the form. The call has done
   nothing yet, and may be sent again.
"""

import re
from collections.abc import Callable, Mapping
from datetime import date, datetime
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct

from wirecall.errors import BadInput, NotCapable, UsageError
from wirecall.mcp.revisions import Revision
from wirecall.protocol.messages import JsonObject
from wirecall.protocol.models import Modelled, decoder_of, problems
from wirecall.protocol.schemas import described_one

Schema = JsonObject

# The name of the only field, where the wanted type is not an object but a single value.
VALUE = "value"

_OF_FORMS = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "title",
    "description",
    "$schema",
}
_LABELS = ("title", "description", "default")
# The formats of MCP, and how an answer is checked.
_FORMATS = {
    "email": lambda text: bool(re.fullmatch(r"[^@\s]+@[^@\s]+", text)),
    "uri": lambda text: bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:\S*", text)),
    "date": lambda text: len(text) == 10 and bool(date.fromisoformat(text)),
    "date-time": lambda text: datetime.fromisoformat(text).tzinfo is not None,
}
_KINDS: JsonObject = {
    "string": str,
    "boolean": bool,
    "number": (int, float),
    "integer": int,
    "array": list,
}


class RequestedForm(Struct, frozen=True):
    """The fields of a form, in the keywords of the newest revision."""

    fields: dict[str, Schema]
    # The names of the fields that a person must fill in; None if the schema says nothing about it.
    required: list[str] | None
    # Converts an answer to the wanted type.
    convert: Callable[[JsonObject], Any]

    def schema(self, revision: Revision) -> Schema:
        """Return `requestedSchema`.

        Raises `NotCapable` if the revision has no keyword for a field.
        """
        fields = self.fields
        if not revision.has("ask elicitation choices"):
            fields = {name: _older(name, field, revision) for name, field in fields.items()}
        schema: Schema = {"type": "object", "properties": fields}
        if self.required is not None:
            schema["required"] = self.required
        return schema

    def read(self, content: object) -> Any:
        """Return the person's answer as the wanted type.

        Raises `BadInput` if it does not fit the form.
        """
        if not isinstance(content, dict):
            raise BadInput("the client's answer: content: expected an object")
        filled_in = {}
        for name, field in self.fields.items():
            value = content.get(name)
            if value is None:  # some clients send an empty field as null
                if name in (self.required or ()):
                    raise BadInput(f"the client's answer: {name}: missing")
                continue
            if field["type"] == "integer" and isinstance(value, float) and value.is_integer():
                value = int(value)
            problem = _problem(value, field)
            if problem:
                raise BadInput(f"the client's answer: {name}: {problem}")
            filled_in[name] = value
        try:
            return self.convert(filled_in)
        # From msgspec or pydantic; pydantic's message would repeat the input.
        except ValueError as error:
            reasons = [str(error)[:200]]
            if hasattr(error, "errors"):
                reasons = problems(error, "")
            joined = "; ".join(reason.removeprefix(".") for reason in reasons)
            raise BadInput(f"the client's answer: {joined}") from None


def _older(name: str, field: Schema, revision: Revision) -> Schema:
    """Return a field in the keywords of 2025-06-18; `NotCapable` if it has none for it."""
    if field["type"] == "array":
        raise NotCapable(
            f"{name}: MCP {revision.name} has no form in which several choices can be made",
            ran="no",
        )
    kept = {key: value for key, value in field.items() if key != "oneOf"}
    if field["type"] != "boolean":
        kept.pop("default", None)
    if titled := field.get("oneOf"):
        kept["enum"] = [choice["const"] for choice in titled]
        kept["enumNames"] = [choice["title"] for choice in titled]
    return kept


def form_of(wanted: Any) -> RequestedForm:
    """Return the form that asks for a type, or that a JSON Schema describes.

    Raises `UsageError` if there is none.
    """
    if isinstance(wanted, dict):
        return _of_schema(wanted)
    try:
        return _of_type(wanted)
    # From msgspec or pydantic: this is not a type that they know.
    except (TypeError, RuntimeError) as error:
        raise _no_form(wanted, str(error)) from error


def _of_schema(wanted: Schema) -> RequestedForm:
    """Return the form that a handwritten schema describes.

    A member that a form cannot have is an error: a client would not honour it.
    """
    properties = wanted.get("properties")
    required = wanted.get("required")
    if wanted.get("type") != "object" or not isinstance(properties, dict):
        raise _no_form("The schema", 'it must be {"type": "object", "properties": {...}}')
    if extra := wanted.keys() - _OF_FORMS:
        raise _no_form("The schema", f"{min(extra)} is not part of a form")
    if required is not None and not set(required) <= properties.keys():
        raise _no_form(
            "The schema",
            f"required names {min(set(required) - properties.keys())}, which is not a property",
        )
    fields = {}
    for name, given in properties.items():
        field = fields[name] = _field(name, given, {}, "The schema")[0]
        if lost := sorted(key for key in given if given[key] != field.get(key)):
            raise _no_form("The schema", f"field {name!r}: {lost[0]} is not part of a form")
        if "default" in field and (problem := _problem(field["default"], field)):
            raise _no_form("The schema", f"field {name!r}: default: {problem}")
    if required is not None:
        required = list(required)
    return RequestedForm(fields, required, lambda content: content)


@lru_cache(maxsize=1000)
def _of_type(wanted: Any) -> RequestedForm:
    """Return the form of a type.

    Pydantic describes its models and types with a `Field`, msgspec describes the others.
    """
    convert: Callable[[Any], Any]
    what = f"The form {getattr(wanted, '__name__', wanted)}"
    if decoder_of(what, wanted) == "pydantic":
        modelled = Modelled(what, wanted, "validation")
        described = modelled.schema
        convert = modelled.read
    else:
        described = described_one(wanted, _no_class)
        convert = lambda value: msgspec.convert(value, wanted)  # noqa: E731
    defs = described.get("$defs", {})
    schema = _resolved(described, defs)
    if schema.get("type") != "object":
        field, is_nullable = _field(VALUE, schema, defs, wanted)
        required = [] if is_nullable else [VALUE]
        return RequestedForm({VALUE: field}, required, lambda content: convert(content.get(VALUE)))

    fields: dict[str, Schema] = {}
    required = []
    # A field that must be given but may be null is one that the person may leave empty.
    empty: list[str] = []
    if "properties" not in schema:
        raise _no_form(wanted, "its fields have no names")
    for name, given in schema["properties"].items():
        fields[name], is_nullable = _field(name, given, defs, wanted)
        if name not in schema.get("required", ()):
            continue
        if is_nullable:
            empty.append(name)
        else:
            required.append(name)
    return RequestedForm(
        fields, required, lambda content: convert({**dict.fromkeys(empty), **content})
    )


def _no_class(kind: Any) -> Schema:
    raise TypeError(f"{kind!r} is not a type that a form can have")


def _field(name: str, given: Any, defs: Mapping[str, Schema], wanted: Any) -> tuple[Schema, bool]:
    """Return a field in the keywords of MCP, and whether it may be null.

    Keywords that only narrow a field are omitted: the type itself checks the answer.
    """
    schema: Schema = {}
    if isinstance(given, dict):
        schema = _resolved(given, defs)
    labels = {key: schema[key] for key in _LABELS if schema.get(key) is not None}
    inner = _without_null(schema, defs)
    is_nullable = inner is not None
    if inner is not None:
        schema = inner
    kind = schema.get("type")
    if "const" in schema or schema.get("enum") is not None:
        field = _choice(name, schema, wanted)
    elif kind == "string" and schema.get("oneOf") is not None:
        field = _titled_choice(name, schema, wanted)
    elif kind == "array":
        field = _several_choices(name, schema, defs, wanted)
    elif kind == "string":
        field = _string(name, schema, wanted)
    elif kind == "boolean":
        field = {"type": "boolean"}
    elif kind in ("integer", "number"):
        field = _number(schema)
    elif kind == "object":
        raise _no_form(wanted, f"field {name!r} is an object, and a form is flat")
    else:
        what = "not a string, a number, a boolean or a choice"
        raise _no_form(wanted, f"field {name!r} is {what}")
    return {**field, **labels}, is_nullable


def _without_null(schema: Schema, defs: Mapping[str, Schema]) -> Schema | None:
    """Return the schema of the value if a schema allows a value or null; None if it does not."""
    members = schema.get("anyOf")
    if not members or {"type": "null"} not in members or len(members) != 2:
        return None
    value = next(member for member in members if member != {"type": "null"})
    # Such as a format of the field.
    around = {key: kept for key, kept in schema.items() if key != "anyOf"}
    return {**around, **_resolved(value, defs)}


def _choice(name: str, schema: Schema, wanted: Any) -> Schema:
    """Return a field with one of several choices."""
    # MCP's choices are strings (client/elicitation, "Requested Schema"; SEP-1330).
    choices = [schema["const"]] if "const" in schema else schema["enum"]
    if not choices or not all(isinstance(choice, str) for choice in choices):
        raise _no_form(wanted, f"field {name!r}: its choices must be strings, got {choices}")
    return {"type": "string", "enum": choices, **_kept(schema, "enumNames")}


def _titled_choice(name: str, schema: Schema, wanted: Any) -> Schema:
    """Return a field with one of several choices, each with a title."""
    titled = schema["oneOf"]
    if not _are_titled(titled):
        raise _no_form(
            wanted, f'field {name!r}: oneOf must be a list of {{"const": text, "title": text}}'
        )
    return {"type": "string", "oneOf": titled}


def _several_choices(name: str, schema: Schema, defs: Mapping[str, Schema], wanted: Any) -> Schema:
    """Return a field with several of several choices."""
    items = _resolved(schema.get("items", {}), defs)
    if _are_titled(items.get("anyOf")):
        items = {"anyOf": items["anyOf"]}
    elif items.get("enum") and all(isinstance(choice, str) for choice in items["enum"]):
        items = {"type": "string", "enum": items["enum"]}
    else:
        raise _no_form(
            wanted,
            f"field {name!r} is a list, and a form has lists of choices only: "
            "use list[Literal[...]]",
        )
    return {"type": "array", "items": items, **_kept(schema, "minItems", "maxItems")}


def _string(name: str, schema: Schema, wanted: Any) -> Schema:
    """Return a field for a string that a person types."""
    if schema.get("format") == "password":
        raise _no_form(
            wanted,
            f"field {name!r} is a secret, which the client must not see: use ctx.elicit_url",
        )
    if "contentEncoding" in schema:
        raise _no_form(wanted, f"field {name!r}: a person cannot type bytes")
    field = {"type": "string", **_kept(schema, "minLength", "maxLength")}
    if schema.get("format") in _FORMATS:
        field["format"] = schema["format"]
    return field


def _number(schema: Schema) -> Schema:
    """Return a field for an integer or a number."""
    field = {"type": schema["type"], **_kept(schema, "minimum", "maximum")}
    if schema["type"] == "integer":
        if "exclusiveMinimum" in schema:
            field["minimum"] = schema["exclusiveMinimum"] + 1
        if "exclusiveMaximum" in schema:
            field["maximum"] = schema["exclusiveMaximum"] - 1
    return field


def _resolved(schema: Schema, defs: Mapping[str, Schema]) -> Schema:
    """Return a schema in place of a reference to it.

    It has the title and description of the field, not of its class.
    """
    reference = schema.get("$ref", "").removeprefix("#/$defs/")
    if reference not in defs:
        return schema
    hidden = ("title", "description")
    found = {key: value for key, value in defs[reference].items() if key not in hidden}
    return {**found, **{key: value for key, value in schema.items() if key != "$ref"}}


def _are_titled(choices: Any) -> bool:
    return bool(choices) and all(
        isinstance(choice, dict) and choice.keys() == {"const", "title"} for choice in choices
    )


def _kept(schema: Schema, *words: str) -> Schema:
    return {word: schema[word] for word in words if word in schema}


def _problem(value: Any, field: Schema) -> str | None:
    """Return the reason why a value does not fit a field; None if it fits."""
    kind = field["type"]
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return f"expected {kind}, got {type(value).__name__}"
    choices = _choices(field)
    if kind == "array":
        if not all(item in choices for item in value):
            return f"expected some of {', '.join(choices)}"
    elif choices:
        if value not in choices:
            return f"expected one of {', '.join(choices)}"
        return None
    return _size_problem(value, field) or _format_problem(value, field)


def _choices(field: Schema) -> list[str]:
    """Return the choices of a field; empty if it has none."""
    titled = field.get("oneOf", ())
    if field["type"] == "array":
        field = field["items"]
        titled = field.get("anyOf", ())
    return field.get("enum") or [choice["const"] for choice in titled]


def _size_problem(value: Any, field: Schema) -> str | None:
    """Return the reason if a number, or the length of a value, is out of bounds."""
    kind = field["type"]
    if kind == "boolean":
        return None
    size = value if kind in ("integer", "number") else len(value)
    unit = {"string": " characters", "array": " choices"}.get(kind, "")
    least = max(field.get(word, size) for word in ("minimum", "minLength", "minItems"))
    if size < least:
        return f"expected at least {least}{unit}, got {size}"
    most = min(field.get(word, size) for word in ("maximum", "maxLength", "maxItems"))
    if size > most:
        return f"expected at most {most}{unit}, got {size}"
    return None


def _format_problem(value: Any, field: Schema) -> str | None:
    """Return the reason if a string does not have the format of a field."""
    if "format" not in field:
        return None
    try:
        fits = _FORMATS[field["format"]](value)
    except ValueError:
        fits = False
    if fits:
        return None
    return f"expected the format {field['format']}"


def _no_form(wanted: object, why: str) -> UsageError:
    name = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", repr(wanted))
    fix = (
        "a form is flat: str, int, float, bool, date, Literal or Enum of strings, "
        "a list of those choices, each with | None"
    )
    return UsageError(f"{name} cannot be asked with a form.", why, fix)
