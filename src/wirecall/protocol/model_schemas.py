"""JSON Schemas of pydantic's types, in the words of `schemas`.

The module is imported when the first type of pydantic's is registered.
"""

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from wirecall.protocol.messages import JsonObject
from wirecall.protocol.schemas import BASE64, DECIMAL, base64_length, listed_values

# Limits of a Decimal, which a pattern cannot state.
_DECIMAL_LIMITS = frozenset(("ge", "gt", "le", "lt", "multiple_of", "max_digits", "decimal_places"))


class ModelSchema(GenerateJsonSchema):
    """Describes a type of pydantic's as msgspec's types are described."""

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonObject:
        described = super().literal_schema(schema)
        if "const" in described:  # several model APIs do not know it
            return listed_values([described["const"]])
        return described

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonObject:
        # An alias repeats the value of its member.
        members = list(dict.fromkeys(schema["members"]))
        return super().enum_schema(core_schema.EnumSchema(**{**schema, "members": members}))

    def decimal_schema(self, schema: core_schema.DecimalSchema) -> JsonObject:
        if _DECIMAL_LIMITS & schema.keys():
            return super().decimal_schema(schema)
        return {"type": "string", "pattern": DECIMAL}

    def bytes_schema(self, schema: core_schema.BytesSchema) -> JsonObject:
        described = super().bytes_schema(schema)
        if described.get("format") != "base64url":  # the bytes of the string itself
            return described
        described = {word: value for word, value in described.items() if word != "format"}
        if self.mode == "serialization":
            # With `-` and `_`, which the format does not have.
            return {**described, "contentEncoding": "base64url"}
        for word in ("minLength", "maxLength"):
            if word in described:
                described[word] = base64_length(described[word])
        return {**described, **BASE64}

    def tuple_schema(self, schema: core_schema.TupleSchema) -> JsonObject:
        described = super().tuple_schema(schema)
        if "prefixItems" in described:
            described.setdefault("items", False)
        return _without_any(described)

    def list_schema(self, schema: core_schema.ListSchema) -> JsonObject:
        return _without_any(super().list_schema(schema))

    def set_schema(self, schema: core_schema.SetSchema) -> JsonObject:
        return _without_any(super().set_schema(schema))

    def frozenset_schema(self, schema: core_schema.FrozenSetSchema) -> JsonObject:
        return _without_any(super().frozenset_schema(schema))

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonObject:
        described = super().dict_schema(schema)
        if described.get("additionalProperties") is True:
            del described["additionalProperties"]
        return described


def _without_any(described: JsonObject) -> JsonObject:
    """Return the schema of a list, without a word about entries that may be anything."""
    if described.get("items") == {}:
        del described["items"]
    return described
