"""Forms are what the specification allows, for every type that has one; answers are checked and
typed.

The rules are not ours: `forms.json` has the definitions of each revision's schema, here made strict
(only words that they name), and the official SDK judges the same forms with its own types.
"""

import dataclasses
import enum
import json
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import jsonschema
import mcp_types._v2025_11_25 as sdk_r4
import mcp_types._v2026_07_28 as sdk_r5
import mcp_types.methods as sdk
import pydantic
import pytest
from mcp.server.elicitation import render_elicitation_schema
from msgspec import Meta, Struct

from tests.calls import make_app
from tests.mcp.asgi import R3, R4, R5, over_http
from wirecall import App, Context, ToolAnnotations, UsageError
from wirecall.errors import BadInput
from wirecall.mcp.revisions import REVISIONS
from wirecall.mcp.server.forms import form_of

CAPABLE: dict[str, Any] = {"elicitation": {}}
ASKING = (R3, R4, R5)

# --- the rules ------------------------------------------------------------------------------------

RULES = json.loads((Path(__file__).parent / "forms.json").read_text())


def strict(schema: Any) -> Any:
    """Only the words that a definition names: a strict client accepts no others."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if (
        "properties" in schema
        and schema.get("type") == "object"
        and "additionalProperties" not in schema
    ):
        closed["additionalProperties"] = False
    return closed


def check_form(schema: Any, revision: str) -> None:
    """Check a form against the revision's schema, against the SDK, and against JSON Schema itself."""
    rules = {"$ref": "#/$defs/RequestedSchema", "$defs": strict(RULES[revision]["$defs"])}
    jsonschema.Draft202012Validator(rules).validate(schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert set(schema.get("required", ())) <= schema["properties"].keys()
    params = {"message": "?", "requestedSchema": schema}
    if revision != R5:
        sdk.parse_server_request("elicitation/create", revision, params)
    definitions: list[Any] = [sdk_r4.PrimitiveSchemaDefinition, sdk_r5.PrimitiveSchemaDefinition]
    for definition in definitions:
        for field in schema["properties"].values():
            pydantic.TypeAdapter(definition).validate_python(field)


# --- asking ---------------------------------------------------------------------------------------


class Desk:
    """A tool that asks for one type, and keeps the answer."""

    def __init__(self, wanted: Any) -> None:
        self.app: App = make_app()
        self.got: list[Any] = []

        @self.app.tool(annotations=ToolAnnotations(readOnlyHint=True))
        async def ask(ctx: Context) -> str:
            answer = await ctx.elicit("Well?", wanted, key="q")
            self.got.append(answer.content)
            return answer.action


async def asked(wanted: Any, revision: str, content: Any) -> tuple[Any, Any, Any]:
    """The form on the wire, the answer to the call once it is filled in, and what the function
    received.
    """
    desk = Desk(wanted)
    replies = {"elicitation/create": {"action": "accept", "content": content}}
    async with over_http(desk.app, revision, capabilities=CAPABLE, replies=replies) as client:
        answer = await client.call("tools/call", {"name": "ask"})
        if revision != R5:
            form = client.told("elicitation/create")[0]["requestedSchema"]
        else:
            sdk.parse_server_result("tools/call", R5, answer["result"])
            form = answer["result"]["inputRequests"]["q"]["params"]["requestedSchema"]
            state = answer["result"]["requestState"]
            more = {"inputResponses": {"q": replies["elicitation/create"]}, "requestState": state}
            answer = await client.call("tools/call", {"name": "ask", **more})
    return form, answer, desk.got[0] if desk.got else None


class Color(enum.Enum):
    """Not shown to anybody."""

    RED = "red"
    BLUE = "blue"


class Person(Struct):
    name: Annotated[str, Meta(min_length=2, max_length=20, description="As in the passport")]
    age: Annotated[int, Meta(gt=17, le=120)]
    sure: bool = False
    size: Literal["S", "M", "L"] = "M"
    color: Color = Color.RED
    other: Color | None = None
    weight: Annotated[float, Meta(ge=0)] | None = None
    born: date | None = None
    nick: str | None = None


class Camel(Struct, rename="camel", forbid_unknown_fields=True):
    first_name: str


@dataclasses.dataclass
class Booking:
    guests: int
    note: str | None
    breakfast: bool = True


class Ticket(TypedDict):
    title: str
    urgent: NotRequired[bool]


class Contact(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)

    mail: str = pydantic.Field(description="Where to write to", min_length=3, pattern="@")
    age: int = pydantic.Field(30, gt=17, title="Your age")
    how: Literal["mail", "phone"] | None = None
    color: Color = Color.BLUE
    since: date | None = None
    page: pydantic.AnyUrl | None = None
    only: Literal["yes"] = "yes"
    nick: str = pydantic.Field("", alias="nickName")


@pydantic.dataclasses.dataclass
class Room:
    beds: int = pydantic.Field(gt=0, lt=9)


@dataclasses.dataclass
class Desktop:
    screens: Annotated[int, pydantic.Field(ge=1)]


FLAT: list[tuple[Any, Any, Any]] = [
    (
        Person,
        {
            "name": "Ann",
            "age": 18,
            "sure": True,
            "size": "L",
            "color": "blue",
            "weight": 60,
            "born": "2000-01-31",
        },
        Person("Ann", 18, True, "L", Color.BLUE, None, 60.0, date(2000, 1, 31)),
    ),
    (Person, {"name": "Ann", "age": 18}, Person("Ann", 18)),
    (Person, {"name": "Ann", "age": 18.0, "other": None}, Person("Ann", 18)),
    (Camel, {"firstName": "Ann", "more": 1}, Camel("Ann")),
    (Booking, {"guests": 2, "breakfast": False}, Booking(2, None, False)),
    (Ticket, {"title": "x"}, {"title": "x"}),
    (
        Contact,
        {
            "mail": "a@b",
            "how": "phone",
            "color": "red",
            "since": "2020-02-29",
            "page": "https://x.org",
            "nickName": "A",
        },
        Contact(
            mail="a@b",
            age=30,
            how="phone",
            color=Color.RED,
            since=date(2020, 2, 29),
            page=pydantic.AnyUrl("https://x.org"),
            nickName="A",
        ),
    ),
    (Room, {"beds": 8}, Room(8)),
    (Desktop, {"screens": 1}, Desktop(1)),
    (bool, {"value": False}, False),
    (int, {"value": 3}, 3),
    (Literal["a", "b"], {"value": "b"}, "b"),
    (Color, {"value": "blue"}, Color.BLUE),
    (bool | None, {}, None),
    (Annotated[int, Meta(ge=1)], {"value": 1}, 1),
    (Annotated[int, pydantic.Field(ge=1)] | None, {"value": 1}, 1),
    (type("Nothing", (Struct,), {}), {}, None),
]


@pytest.mark.parametrize("revision", ASKING)
@pytest.mark.parametrize(("wanted", "content", "value"), FLAT)
async def test_elicit_asks_for_a_type_with_a_form_and_returns_that_type(
    revision: str, wanted: Any, content: Any, value: Any
) -> None:
    form, answer, got = await asked(wanted, revision, content)
    check_form(form, revision)
    assert answer["result"]["content"][0]["text"] == "accept"
    assert got == value or type(got).__name__ == "Nothing"
    assert type(got) is type(value) or value is None
    jsonschema.validate({name: given for name, given in content.items() if given is not None}, form)


def test_form_fields_have_their_schemas() -> None:
    fields = form_of(Person).schema(REVISIONS[R5])["properties"]
    assert fields["name"] == {
        "type": "string",
        "minLength": 2,
        "maxLength": 20,
        "description": "As in the passport",
    }
    assert fields["age"] == {"type": "integer", "minimum": 18, "maximum": 120}
    assert fields["sure"] == {"type": "boolean", "default": False}
    assert fields["size"] == {"type": "string", "enum": ["S", "M", "L"], "default": "M"}
    assert fields["color"] == {"type": "string", "enum": ["red", "blue"], "default": "red"}
    assert fields["other"] == {"type": "string", "enum": ["red", "blue"]}
    assert fields["weight"] == {"type": "number", "minimum": 0}
    assert fields["born"] == {"type": "string", "format": "date"}
    assert form_of(Person).schema(REVISIONS[R5])["required"] == ["name", "age"]
    mail, age = (
        form_of(Contact).schema(REVISIONS[R5])["properties"][name] for name in ("mail", "age")
    )
    assert mail == {
        "type": "string",
        "minLength": 3,
        "title": "Mail",
        "description": "Where to write to",
    }
    assert age == {"type": "integer", "minimum": 18, "title": "Your age", "default": 30}


def test_form_defaults_at_2025_06_18_are_only_for_booleans() -> None:
    fields = form_of(Person).schema(REVISIONS[R3])["properties"]
    assert [name for name, field in fields.items() if "default" in field] == ["sure"]


class Simple(pydantic.BaseModel):
    name: str = pydantic.Field(description="x", min_length=2)
    age: int = pydantic.Field(ge=18, le=120)
    sure: bool = False
    size: Literal["S", "M"] = "M"
    note: str | None = None


def test_simple_model_has_the_form_that_the_official_sdk_gives_it() -> None:
    theirs = render_elicitation_schema(Simple)
    assert form_of(Simple).schema(REVISIONS[R4]) == {
        name: theirs[name] for name in ("type", "properties", "required")
    }


class Mail(pydantic.BaseModel):
    address: str | None = pydantic.Field(None, json_schema_extra={"format": "email"})
    page: pydantic.HttpUrl
    copies: pydantic.PositiveInt = 1

    @pydantic.field_validator("copies")
    @classmethod
    def is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("copies are made in pairs")
        return value


def test_pydantic_types_and_formats_become_words_of_a_form() -> None:
    form = form_of(Mail).schema(REVISIONS[R4])
    check_form(form, R4)
    assert form == {
        "type": "object",
        "properties": {
            "address": {"type": "string", "format": "email", "title": "Address"},
            "page": {
                "type": "string",
                "format": "uri",
                "minLength": 1,
                "maxLength": 2083,
                "title": "Page",
            },
            "copies": {"type": "integer", "minimum": 1, "default": 1, "title": "Copies"},
        },
        "required": ["page"],
    }
    assert form_of(pydantic.PositiveInt).schema(REVISIONS[R4])["properties"] == {
        "value": {"type": "integer", "minimum": 1}
    }


def test_pydantic_validator_refuses_an_answer_in_our_words() -> None:
    with pytest.raises(BadInput) as caught:
        form_of(Mail).read({"page": "https://x.org", "copies": 3})
    assert caught.value.data["reason"] == "the client's answer: copies: copies are made in pairs"


class MailStruct(Struct):
    copies: Annotated[int, pydantic.Field(gt=0)]


class MailModel(pydantic.BaseModel):
    copies: Annotated[int, Meta(gt=0)]


@pytest.mark.parametrize("wanted", [MailStruct, MailModel])
def test_constraint_that_a_form_would_ignore_is_refused(wanted: Any) -> None:
    with pytest.raises(UsageError, match=r"The form Mail[A-Z][a-z]+ has .* which would be ignored"):
        form_of(wanted)


# --- choices of several (from 2025-11-25 on) ------------------------------------------------------


class Several(Struct):
    colors: list[Color]
    sizes: Annotated[set[Literal["S", "M"]], Meta(min_length=1, max_length=2)]


@pytest.mark.parametrize("revision", [R4, R5])
async def test_form_with_several_choices(revision: str) -> None:
    form, _, got = await asked(Several, revision, {"colors": ["red", "blue"], "sizes": ["S"]})
    check_form(form, revision)
    assert got == Several([Color.RED, Color.BLUE], {"S"})
    assert form["properties"]["colors"] == {
        "type": "array",
        "items": {"type": "string", "enum": ["red", "blue"]},
    }
    form, _, got = await asked(list[Color], revision, {"value": ["red"]})
    check_form(form, revision)
    assert got == [Color.RED]


async def test_form_with_several_choices_is_refused_at_2025_06_18() -> None:
    desk = Desk(Several)
    async with over_http(desk.app, R3, capabilities=CAPABLE) as client:
        found = await client.tool("ask")
    assert found["isError"] is True and client.heard == []
    assert "colors: MCP 2025-06-18 has no form" in found["content"][0]["text"]


# --- what has no form -----------------------------------------------------------------------------


class Inner(Struct):
    x: int


def struct(hint: Any) -> Any:
    return type("Odd", (Struct,), {"__annotations__": {"odd": hint}})


def model(hint: Any) -> Any:
    return pydantic.create_model("Odd", odd=(hint, ...))


class InnerModel(pydantic.BaseModel):
    x: int


class Number(enum.Enum):
    ONE = 1


NO_FIELD = [
    Inner,
    Inner | None,
    list[Inner],
    list[str],
    dict[str, int],
    str | int,
    Any,
    Literal[1, 2],
    Number,
    bytes,
]
NO_MODEL_FIELD = [
    InnerModel,
    list[InnerModel],
    list[str],
    dict[str, int],
    str | int,
    Any,
    Literal["a", 2],
    pydantic.SecretStr,
]


@pytest.mark.parametrize("wanted", [*map(struct, NO_FIELD), *map(model, NO_MODEL_FIELD)])
def test_field_that_a_form_cannot_have_is_named(wanted: Any) -> None:
    with pytest.raises(UsageError, match="Odd cannot be asked with a form") as raised:
        form_of(wanted)
    assert "'odd'" in str(raised.value)


@pytest.mark.parametrize(
    "wanted", [dict[str, int], list[str], Any, object, str | int, 5, "Person", None, Number]
)
def test_type_without_a_form_is_an_error_that_names_it(wanted: Any) -> None:
    with pytest.raises(UsageError, match="cannot be asked with a form"):
        form_of(wanted)


async def test_elicit_of_a_type_without_a_form_fails_and_does_not_ask_the_client() -> None:
    desk = Desk(struct(Inner))
    async with over_http(desk.app, R5, capabilities=CAPABLE) as client:
        assert (await client.tool("ask"))["isError"] is True


# --- forms that are written by hand ---------------------------------------------------------------


def by_hand(*required: str, **fields: Any) -> Any:
    return {"type": "object", "properties": fields, "required": list(required)}


TITLED = [{"const": "r", "title": "Red"}, {"const": "b", "title": "Blue"}]
EVERY_FIELD = by_hand(
    "sure",
    sure={"type": "boolean", "title": "Sure?", "default": False},
    name={"type": "string", "minLength": 1, "maxLength": 5, "default": "x"},
    mail={"type": "string", "format": "email"},
    count={"type": "integer", "minimum": 1, "maximum": 3, "description": "How many"},
    score={"type": "number", "default": 9.5},
    one={"type": "string", "enum": ["a", "b"], "default": "a"},
    old={"type": "string", "enum": ["a", "b"], "enumNames": ["A", "B"]},
    titled={"type": "string", "oneOf": TITLED},
)
OF_SEVERAL = by_hand(
    many={
        "type": "array",
        "items": {"type": "string", "enum": ["a", "b"]},
        "minItems": 1,
        "maxItems": 2,
        "default": ["a"],
    },
    titled={"type": "array", "items": {"anyOf": TITLED}},
)


@pytest.mark.parametrize("revision", ASKING)
@pytest.mark.parametrize("wanted", [EVERY_FIELD, OF_SEVERAL])
async def test_form_may_be_written_by_hand(revision: str, wanted: Any) -> None:
    if wanted is OF_SEVERAL and revision == R3:
        pytest.skip("2025-06-18 has no choice of several")
    form, _, got = await asked(
        wanted,
        revision,
        {"sure": True, "titled": ["r"] if wanted is OF_SEVERAL else "r", "more": 1},
    )
    check_form(form, revision)
    assert form == wanted or revision == R3
    assert got.pop("titled") in ("r", ["r"])
    # The function gets only the form's fields.
    assert got == ({} if wanted is OF_SEVERAL else {"sure": True})
    if revision == R3:
        assert form["properties"]["titled"] == {
            "type": "string",
            "enum": ["r", "b"],
            "enumNames": ["Red", "Blue"],
        }


NOT_BY_HAND: list[Any] = [
    {},
    {"type": "object"},
    {"type": "array", "properties": {}},
    {**by_hand(a={"type": "string"}), "oneOf": []},
    by_hand("b", a={"type": "string"}),
    by_hand(a={}),
    by_hand(a=True),
    by_hand(a={"type": "null"}),
    by_hand(a={"type": "object", "properties": {}}),
    by_hand(a={"type": "array", "items": {"type": "string"}}),
    by_hand(a={"type": "array", "items": {"type": "string", "enum": ["a"]}, "uniqueItems": True}),
    by_hand(a={"$ref": "#/$defs/A"}),
    by_hand(a={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    by_hand(a={"type": "string", "enum": [1]}),
    by_hand(a={"type": "string", "enum": []}),
    by_hand(a={"type": "string", "pattern": "x"}),
    by_hand(a={"type": "string", "format": "time"}),
    by_hand(a={"type": "string", "format": "password"}),
    by_hand(a={"type": "string", "oneOf": [{"const": "a"}]}),
    by_hand(a={"type": "number", "exclusiveMinimum": 0}),
    by_hand(a={"type": "integer", "minimum": 1, "default": 0}),
    by_hand(a={"type": "boolean", "default": "no"}),
]


@pytest.mark.parametrize("wanted", NOT_BY_HAND)
def test_schema_that_is_not_a_form_is_an_error(wanted: Any) -> None:
    with pytest.raises(UsageError, match="The schema cannot be asked with a form"):
        form_of(wanted)


# --- answers that do not fit ----------------------------------------------------------------------

BAD: list[tuple[Any, Any, str]] = [
    (by_hand("sure", sure={"type": "boolean"}), {"sure": "no"}, "sure: expected boolean, got str"),
    (by_hand("sure", sure={"type": "boolean"}), {"sure": 0}, "sure: expected boolean, got int"),
    (by_hand("sure", sure={"type": "boolean"}), {}, "sure: missing"),
    (by_hand("sure", sure={"type": "boolean"}), {"sure": None}, "sure: missing"),
    (by_hand("sure", sure={"type": "boolean"}), None, "content: expected an object"),
    (by_hand("sure", sure={"type": "boolean"}), [True], "content: expected an object"),
    (EVERY_FIELD, {"sure": True, "name": ""}, "name: expected at least 1 characters, got 0"),
    (EVERY_FIELD, {"sure": True, "name": "abcdef"}, "name: expected at most 5 characters, got 6"),
    (EVERY_FIELD, {"sure": True, "name": ["a"]}, "name: expected string, got list"),
    (EVERY_FIELD, {"sure": True, "count": 4}, "count: expected at most 3, got 4"),
    (EVERY_FIELD, {"sure": True, "count": 1.5}, "count: expected integer, got float"),
    (EVERY_FIELD, {"sure": True, "count": True}, "count: expected integer, got bool"),
    (EVERY_FIELD, {"sure": True, "score": "9"}, "score: expected number, got str"),
    (EVERY_FIELD, {"sure": True, "one": "c"}, "one: expected one of a, b"),
    (EVERY_FIELD, {"sure": True, "titled": "Red"}, "titled: expected one of r, b"),
    (EVERY_FIELD, {"sure": True, "mail": "x"}, "mail: expected the format email"),
    (
        by_hand(a={"type": "string", "format": "date"}),
        {"a": "2020-02-30"},
        "a: expected the format date",
    ),
    (
        by_hand(a={"type": "string", "format": "date-time"}),
        {"a": "2020-02-03T10:00:00"},
        "a: expected the format date-time",
    ),
    (by_hand(a={"type": "string", "format": "uri"}), {"a": "x y"}, "a: expected the format uri"),
    (OF_SEVERAL, {"many": []}, "many: expected at least 1 choices, got 0"),
    (OF_SEVERAL, {"many": ["a", "c"]}, "many: expected some of a, b"),
    (OF_SEVERAL, {"many": "a"}, "many: expected array, got str"),
    (Person, {"name": "Ann", "age": 17}, "age: expected at least 18, got 17"),
    (Person, {"name": "Ann", "age": 18, "sure": "no"}, "sure: expected boolean, got str"),
    (Person, {"age": 18}, "name: missing"),
    (Contact, {"mail": "abc"}, "mail: string should match pattern '@'"),
    (Contact, {"mail": "a@b", "only": "no"}, "only: expected one of yes"),
    (bool, {"value": "no"}, "value: expected boolean, got str"),
    (Annotated[float, Meta(gt=0)], {"value": 0}, "Expected `float` > 0.0"),
]


@pytest.mark.parametrize("revision", [R4, R5])
@pytest.mark.parametrize(("wanted", "content", "said"), BAD)
async def test_answer_that_does_not_fit_is_refused(
    revision: str, wanted: Any, content: Any, said: str
) -> None:
    """The form says what fits.

    The function does not see such an answer, and a model cannot correct it.
    """
    _, answer, got = await asked(wanted, revision, content)
    assert got is None
    assert (answer["error"]["code"], answer["error"]["data"]["type"]) == (-32602, "input_invalid")
    assert said in answer["error"]["data"]["reason"]


async def test_answer_that_fits_is_accepted_after_one_that_did_not() -> None:
    desk = Desk(bool)
    async with over_http(desk.app, R5, capabilities=CAPABLE) as client:
        state = (await client.tool("ask"))["requestState"]
        for value, ends in (("no", "error"), (True, "result")):
            more = {
                "inputResponses": {"q": {"action": "accept", "content": {"value": value}}},
                "requestState": state,
            }
            assert ends in await client.call("tools/call", {"name": "ask", **more})
    assert desk.got == [True]
