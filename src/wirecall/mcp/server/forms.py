"""Forms: the fields that `ctx.elicit` asks a person for, and the check of the answer.

1. A form is a flat object of texts, numbers, booleans and choices; MCP allows nothing else. `form_of` makes it of a type or
   of a JSON Schema. A field that a form cannot have is a `UsageError` that names the field.
2. 2025-06-18 has fewer words for a field than its successors (`RequestedForm.schema`).
3. An answer is checked against the form, even if the client has checked it, and then converted to the type. An answer that
   does not fit is `BadInput`: the client knew the form. The call has done nothing yet, and may be sent again.
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

Schema = JsonObject

# The name of the only field, where the wanted type is not an object but a single value.
VALUE = "value"

_OF_FORMS = {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}
_LABELS = ("title", "description", "default")
_FORMATS = {  # what MCP has, and how an answer is checked
    "email": lambda text: bool(re.fullmatch(r"[^@\s]+@[^@\s]+", text)),
    "uri": lambda text: bool(re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*:\S*", text)),
    "date": lambda text: len(text) == 10 and bool(date.fromisoformat(text)),
    "date-time": lambda text: datetime.fromisoformat(text).tzinfo is not None,
}
_KINDS: JsonObject = {"string": str, "boolean": bool, "number": (int, float), "integer": int, "array": list}


class RequestedForm(Struct, frozen=True):
    """The fields of a form, in the words of the newest revision, and the function that converts an answer."""

    fields: dict[str, Schema]
    required: list[str] | None  # None: the schema says nothing about it
    convert: Callable[[JsonObject], Any]

    def schema(self, revision: Revision) -> Schema:
        """Return `requestedSchema`; raise `NotCapable` if the revision has no word for a field."""
        fields = self.fields
        if not revision.has("ask elicitation choices"):
            fields = {}
            for name, field in self.fields.items():
                if field["type"] == "array":
                    raise NotCapable(
                        f"{name}: MCP {revision.name} has no form in which several choices can be made", ran="no"
                    )
                kept = {key: value for key, value in field.items() if key != "oneOf"}
                if field["type"] != "boolean":
                    kept.pop("default", None)
                if titled := field.get("oneOf"):
                    kept["enum"] = [choice["const"] for choice in titled]
                    kept["enumNames"] = [choice["title"] for choice in titled]
                fields[name] = kept
        required = {} if self.required is None else {"required": self.required}
        return {"type": "object", "properties": fields, **required}

    def read(self, content: object) -> Any:
        """Return the person's answer as the wanted type. Raises `BadInput` if it does not fit the form."""
        if not isinstance(content, dict):
            raise BadInput("the client's answer: content: expected an object")
        filled_in = {}
        for name, field in self.fields.items():
            value = content.get(name)
            if value is None:  # JSON's null is how some clients send a field that was left empty
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
        except ValueError as error:  # from msgspec or pydantic; pydantic's text would repeat what the person typed
            texts = problems(error, "") if hasattr(error, "errors") else [str(error)[:200]]
            raise BadInput(f"the client's answer: {'; '.join(text.removeprefix('.') for text in texts)}") from None


def form_of(wanted: Any) -> RequestedForm:
    """Return the form that asks for a type, or that a JSON Schema describes. Raises `UsageError` if there is none."""
    if not isinstance(wanted, dict):
        try:
            return _of_type(wanted)
        except (TypeError, RuntimeError) as error:  # from msgspec or pydantic: this is not a type that they know
            raise _no_form(wanted, str(error)) from error
    # A schema that was written by hand. A member that a form cannot have is an error: a client would not honour it.
    properties, required = wanted.get("properties"), wanted.get("required")
    if wanted.get("type") != "object" or not isinstance(properties, dict):
        raise _no_form("The schema", 'it must be {"type": "object", "properties": {...}}')
    if extra := wanted.keys() - _OF_FORMS:
        raise _no_form("The schema", f"{min(extra)} is not part of a form")
    if required is not None and not set(required) <= properties.keys():
        raise _no_form("The schema", f"required names {min(set(required) - properties.keys())}, which is not a property")
    fields = {}
    for name, given in properties.items():
        field = fields[name] = _field(name, given, {}, "The schema")[0]
        if lost := sorted(key for key in given if given[key] != field.get(key)):
            raise _no_form("The schema", f"field {name!r}: {lost[0]} is not part of a form")
        if "default" in field and (problem := _problem(field["default"], field)):
            raise _no_form("The schema", f"field {name!r}: default: {problem}")
    return RequestedForm(fields, None if required is None else list(required), lambda content: content)


@lru_cache(maxsize=1000)
def _of_type(wanted: Any) -> RequestedForm:
    """Return the form of a type: pydantic describes its models and types with a `Field`, msgspec describes the others."""
    convert: Callable[[Any], Any]
    what = f"The form {getattr(wanted, '__name__', wanted)}"
    if decoder_of(what, wanted) == "pydantic":
        modelled = Modelled(what, wanted, "validation")
        described, convert = modelled.schema, modelled.read
    else:
        described = msgspec.json.schema(wanted)
        convert = lambda value: msgspec.convert(value, wanted)  # noqa: E731
    defs = described.get("$defs", {})
    schema = _resolved(described, defs)
    if schema.get("type") != "object":
        field, nullable = _field(VALUE, schema, defs, wanted)
        return RequestedForm({VALUE: field}, [] if nullable else [VALUE], lambda content: convert(content.get(VALUE)))

    fields: dict[str, Schema] = {}
    required: list[str] = []
    empty: list[str] = []
    if "properties" not in schema:
        raise _no_form(wanted, "its fields have no names")
    for name, given in schema["properties"].items():
        fields[name], nullable = _field(name, given, defs, wanted)
        if name in schema.get("required", ()):
            (empty if nullable else required).append(name)
    # A field that must be given but may be null is one that the person may leave empty.
    return RequestedForm(fields, required, lambda content: convert({**dict.fromkeys(empty), **content}))


def _field(name: str, given: Any, defs: Mapping[str, Schema], wanted: Any) -> tuple[Schema, bool]:
    """Return a field in the words of MCP, and whether it may be null. Words that only narrow a field are left out: the type
    itself checks the answer."""
    schema = _resolved(given, defs) if isinstance(given, dict) else {}
    labels = {key: schema[key] for key in _LABELS if schema.get(key) is not None}
    nullable = False
    members = schema.get("anyOf")
    if members and {"type": "null"} in members and len(members) == 2:
        nullable = True
        around = {key: value for key, value in schema.items() if key != "anyOf"}  # such as a format of the field
        schema = {**around, **_resolved(next(member for member in members if member != {"type": "null"}), defs)}
    kind = schema.get("type")
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    titled = schema.get("oneOf")

    # Step 1: one of several choices. MCP's choices are texts (client/elicitation, "Requested Schema"; SEP-1330).
    if choices is not None:
        if not choices or not all(isinstance(choice, str) for choice in choices):
            raise _no_form(wanted, f"field {name!r}: its choices must be strings, got {choices}")
        names = {"enumNames": schema["enumNames"]} if "enumNames" in schema else {}
        return {"type": "string", "enum": choices, **names, **labels}, nullable
    if kind == "string" and titled is not None:
        if not _are_titled(titled):
            raise _no_form(wanted, f'field {name!r}: oneOf must be a list of {{"const": text, "title": text}}')
        return {"type": "string", "oneOf": titled, **labels}, nullable

    # Step 2: several of several choices.
    if kind == "array":
        items = _resolved(schema.get("items", {}), defs)
        if _are_titled(items.get("anyOf")):
            items = {"anyOf": items["anyOf"]}
        elif items.get("enum") and all(isinstance(choice, str) for choice in items["enum"]):
            items = {"type": "string", "enum": items["enum"]}
        else:
            raise _no_form(wanted, f"field {name!r} is a list, and a form has lists of choices only: use list[Literal[...]]")
        return {"type": "array", "items": items, **_kept(schema, "minItems", "maxItems"), **labels}, nullable

    # Step 3: a single value.
    if kind == "string":
        if schema.get("format") == "password":
            raise _no_form(wanted, f"field {name!r} is a secret, which the client must not see: use ctx.elicit_url")
        if "contentEncoding" in schema:
            raise _no_form(wanted, f"field {name!r}: a person cannot type bytes")
        form = {"format": schema["format"]} if schema.get("format") in _FORMATS else {}
        return {"type": "string", **_kept(schema, "minLength", "maxLength"), **form, **labels}, nullable
    if kind == "boolean":
        return {"type": "boolean", **labels}, nullable
    if kind in ("integer", "number"):
        bounds = _kept(schema, "minimum", "maximum")
        if kind == "integer" and "exclusiveMinimum" in schema:
            bounds["minimum"] = schema["exclusiveMinimum"] + 1
        if kind == "integer" and "exclusiveMaximum" in schema:
            bounds["maximum"] = schema["exclusiveMaximum"] - 1
        return {"type": kind, **bounds, **labels}, nullable
    what = "an object, and a form is flat" if kind == "object" else "not a text, a number, a boolean or a choice"
    raise _no_form(wanted, f"field {name!r} is {what}")


def _resolved(schema: Schema, defs: Mapping[str, Schema]) -> Schema:
    """Return a schema in place of a reference to it, with the title and description of the field, not of its class."""
    reference = schema.get("$ref", "").removeprefix("#/$defs/")
    found = {key: value for key, value in defs.get(reference, {}).items() if key not in ("title", "description")}
    return {**found, **{key: value for key, value in schema.items() if key != "$ref"}} if reference in defs else schema


def _are_titled(choices: Any) -> bool:
    return bool(choices) and all(isinstance(choice, dict) and choice.keys() == {"const", "title"} for choice in choices)


def _kept(schema: Schema, *words: str) -> Schema:
    return {word: schema[word] for word in words if word in schema}


def _problem(value: Any, field: Schema) -> str | None:
    """Return the reason why a value does not fit a field; None if it fits."""
    kind = field["type"]
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return f"expected {kind}, got {type(value).__name__}"
    if kind == "array":
        items = field["items"]
        choices = items.get("enum") or [choice["const"] for choice in items["anyOf"]]
        if not all(item in choices for item in value):
            return f"expected some of {', '.join(choices)}"
    elif choices := field.get("enum") or [choice["const"] for choice in field.get("oneOf", ())]:
        return None if value in choices else f"expected one of {', '.join(choices)}"
    size = value if kind in ("integer", "number") else len(value) if kind != "boolean" else 0
    least = max(field.get(word, size) for word in ("minimum", "minLength", "minItems"))
    most = min(field.get(word, size) for word in ("maximum", "maxLength", "maxItems"))
    if not least <= size <= most:
        unit = {"string": " characters", "array": " choices"}.get(kind, "")
        return f"expected at {f'least {least}' if size < least else f'most {most}'}{unit}, got {size}"
    if "format" in field:
        try:
            fits = _FORMATS[field["format"]](value)
        except ValueError:
            fits = False
        if not fits:
            return f"expected the format {field['format']}"
    return None


def _no_form(wanted: object, why: str) -> UsageError:
    name = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", repr(wanted))
    fix = (
        "a form is flat: str, int, float, bool, date, Literal or Enum of strings, a list of those choices, each with | None"
    )
    return UsageError(f"{name} cannot be asked with a form.", why, fix)
