"""Tools: how they describe themselves (T1, T2), and what they return in each revision."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from msgspec import Struct

from tests.calls import make_app, returning
from tests.mcp.asgi import EVERY_WAY, R1, R2, R3, R4, R5, REVISIONS, over_http, speak
from wirecall import App, ToolAnnotations, UsageError
from wirecall.mcp import Embedded, Image, Text, ToolResult

every_revision = pytest.mark.parametrize("revision", REVISIONS)
every_way = pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)


def nothing() -> None:
    """Does nothing."""


# --- annotations ----------------------------------------------------------------------------------

Declare = Callable[[App], Any]
HINTS = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")

# An undeclared hint has the specification's default: mutating, destructive, not idempotent, open
# world.
DECLARED: list[tuple[str, Declare, tuple[bool, bool | None, bool | None, bool]]] = [
    ("query", lambda app: app.query(nothing), (True, None, None, True)),
    ("closed query", lambda app: app.query(open_world=False)(nothing), (True, None, None, False)),
    ("command", lambda app: app.command(nothing), (False, True, False, True)),
    ("additive", lambda app: app.command(destructive=False)(nothing), (False, False, False, True)),
    ("destructive", lambda app: app.command(destructive=True)(nothing), (False, True, False, True)),
    ("idempotent", lambda app: app.command(idempotent=True)(nothing), (False, True, True, True)),
    ("closed", lambda app: app.command(open_world=False)(nothing), (False, True, False, False)),
    (
        "all",
        lambda app: app.command(destructive=False, idempotent=True, open_world=False)(nothing),
        (False, False, True, False),
    ),
    ("bare tool", lambda app: app.tool(nothing), (False, True, False, True)),
    (
        "reading tool",
        lambda app: app.tool(annotations=ToolAnnotations(readOnlyHint=True))(nothing),
        (True, None, None, True),
    ),
    (
        "reading tool, closed",
        lambda app: app.tool(annotations=ToolAnnotations(readOnlyHint=True, openWorldHint=False))(
            nothing
        ),
        (True, None, None, False),
    ),
    (
        "additive tool",
        lambda app: app.tool(
            annotations=ToolAnnotations(destructiveHint=False, idempotentHint=True)
        )(nothing),
        (False, False, True, True),
    ),
]


@pytest.mark.parametrize(
    ("declare", "expected"), [row[1:] for row in DECLARED], ids=[row[0] for row in DECLARED]
)
async def test_hints_follow_from_the_declaration(
    declare: Declare, expected: tuple[Any, ...]
) -> None:
    """T1, T2.

    A reader that knows the defaults and one that does not must reach the same conclusion.
    """
    app = make_app()
    declare(app)
    for revision in (R2, R3, R4, R5):
        async with over_http(app, revision) as client:
            hints = (await client.result("tools/list"))["tools"][0]["annotations"]
        told = (
            hints.get("readOnlyHint", False),
            hints.get("destructiveHint", True),
            hints.get("idempotentHint", False),
        )
        assert told[0] is expected[0]
        assert hints.get("openWorldHint", True) is expected[3]
        if not expected[0]:  # only then do the two have a meaning
            assert told[1:] == expected[1:3]
        elif "destructiveHint" in hints:
            assert hints["destructiveHint"] is False


@pytest.mark.parametrize(
    "declare",
    [
        lambda app: app.query(title="Nice")(nothing),
        lambda app: app.command(title="Nice")(nothing),
        lambda app: app.tool(title="Nice")(nothing),
        lambda app: app.tool(annotations=ToolAnnotations(title="Nice"))(nothing),
    ],
)
async def test_title_is_sent_if_the_revision_has_it(declare: Declare) -> None:
    app = make_app()
    declare(app)
    for revision in REVISIONS:
        async with over_http(app, revision) as client:
            tool = (await client.result("tools/list"))["tools"][0]
        assert tool.get("title") == ("Nice" if revision in (R3, R4, R5) else None)
        assert tool.get("annotations", {}).get("title") == (None if revision == R1 else "Nice")


CONTRADICTIONS: dict[str, Declare] = {
    "a destructive query": lambda app: app.query(destructive=True)(nothing),
    "a query that cannot be repeated": lambda app: app.query(idempotent=False)(nothing),
    "reads and destroys": lambda app: app.tool(
        annotations=ToolAnnotations(readOnlyHint=True, destructiveHint=True)
    )(nothing),
    "reads once": lambda app: app.tool(
        annotations=ToolAnnotations(readOnlyHint=True, idempotentHint=False)
    )(nothing),
    "reads with a key": lambda app: app.tool(
        annotations=ToolAnnotations(readOnlyHint=True), key="required"
    )(nothing),
    "reads and is retried": lambda app: app.tool(
        annotations=ToolAnnotations(readOnlyHint=True), on_crash="rerun"
    )(nothing),
    "reads and is kept": lambda app: app.tool(
        annotations=ToolAnnotations(readOnlyHint=True), retention=60
    )(nothing),
    "two of a name": lambda app: (app.query(nothing), app.tool(nothing)),
    "an unknown rule for keys": lambda app: app.command(key="always")(nothing),  # type: ignore[call-overload]
    "served nowhere": lambda app: app.query(expose=())(nothing),
}


@pytest.mark.parametrize("declare", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_contradiction_is_an_error_at_registration(declare: Declare) -> None:
    with pytest.raises(UsageError):
        declare(make_app())


async def test_method_for_json_rpc_only_is_not_a_tool() -> None:
    app = make_app()
    app.query(expose=("rpc",), name="hidden")(nothing)
    app.query(expose=("mcp",), name="shown")(nothing)
    async with over_http(app) as client:
        assert [tool["name"] for tool in (await client.result("tools/list"))["tools"]] == ["shown"]
        assert (await client.tool_error("hidden"))["code"] == -32602
        assert (await client.tool_error("rpc.discover"))["code"] == -32602
    assert b"Method not found" in (
        await app.handle(b'{"jsonrpc":"2.0","id":1,"method":"shown"}') or b""
    )


# --- schemas --------------------------------------------------------------------------------------

VERBATIM = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {"$anchor": "a", "type": "object", "properties": {"street": {"type": "string"}}}
    },
    "properties": {"address": {"$ref": "#/$defs/address"}, "kind": {"enum": ["a", "b"]}},
    "allOf": [{"anyOf": [{"required": ["address"]}, {"required": ["kind"]}]}],
    "if": {"properties": {"kind": {"const": "a"}}},
    "then": {"required": ["address"]},
    "else": {},
    "additionalProperties": False,
}


@every_revision
async def test_schema_is_published_as_it_was_written(revision: str) -> None:
    """Trap 53."""
    app = make_app()

    @app.tool(input_schema=VERBATIM)
    def free(**arguments: Any) -> str:
        return json.dumps(arguments, sort_keys=True)

    async with over_http(app, revision) as client:
        assert (await client.result("tools/list"))["tools"][0]["inputSchema"] == VERBATIM
        assert (await client.tool("free", {"kind": "b"}))["content"][0]["text"] == '{"kind": "b"}'


class Street(Struct):
    name: str


class Address(Struct):
    street: Street
    neighbours: "list[Address]" = []


class Receipt(Struct):
    number: int


async def test_schema_carries_the_definitions_that_it_uses_and_no_others() -> None:
    app = make_app()

    @app.query
    def send(to: Address) -> Receipt:
        return Receipt(1)

    app.query(name="look")(returning(Receipt, Receipt(1)))
    app.query(name="find")(lambda where: None)

    @app.query
    def both(street: Street) -> Street:
        return street

    async with over_http(app) as client:
        tools = {tool["name"]: tool for tool in (await client.result("tools/list"))["tools"]}
    used = {
        name: tuple(
            sorted(tool.get(side, {}).get("$defs", {})) for side in ("inputSchema", "outputSchema")
        )
        for name, tool in tools.items()
    }
    assert used == {
        "send": (["Address", "Street"], ["Receipt"]),
        "look": ([], ["Receipt"]),
        "find": ([], []),
        "both": (["Street"], ["Street"]),
    }


@every_revision
async def test_schema_of_every_tool_is_valid(revision: str) -> None:
    app = make_app()

    @app.command(key="ask")
    def many(a: int, b: list[str], c: dict[str, float] | None = None) -> dict[str, list[int]]:
        return {}

    app.query(nothing)
    async with over_http(app, revision) as client:
        for tool in (await client.result("tools/list"))["tools"]:
            assert tool["inputSchema"]["type"] == "object"
            jsonschema.Draft202012Validator.check_schema(tool["inputSchema"])
            jsonschema.Draft202012Validator.check_schema(tool.get("outputSchema", {}))


# --- structured output (matrix 1.6, trap 50) ------------------------------------------------------


class Point(Struct):
    x: int
    y: int = 0


VALUES: list[tuple[str, Any, Any, Any]] = [
    ("struct", Point, Point(1, 2), {"x": 1, "y": 2}),
    ("dict", dict[str, int], {"a": 1}, {"a": 1}),
    ("empty dict", dict[str, int], {}, {}),
    ("int", int, 5, 5),
    ("zero", int, 0, 0),
    ("false", bool, False, False),
    ("float", float, 1.5, 1.5),
    ("list", list[int], [1, 2], [1, 2]),
    ("empty list", list[Point], [], []),
    ("list of structs", list[Point], [Point(1)], [{"x": 1, "y": 0}]),
    ("struct or null", Point | None, None, None),
    ("union", int | list[int], [3], [3]),
    ("a member called result", dict[str, int], {"result": 1}, {"result": 1}),
    ("a member called _meta", dict[str, Any], {"_meta": 1}, {"_meta": 1}),
]


@every_revision
@pytest.mark.parametrize(
    ("kind", "value", "plain"), [row[1:] for row in VALUES], ids=[row[0] for row in VALUES]
)
async def test_structured_content_fits_its_schema_and_its_revision(
    revision: str, kind: Any, value: Any, plain: Any
) -> None:
    app = make_app()
    app.query(name="give")(returning(kind, value))
    async with over_http(app, revision) as client:
        tool = (await client.result("tools/list"))["tools"][0]
        found = await client.tool("give")
    # Also as text, for those who read only that.
    assert json.loads(found["content"][0]["text"]) == plain
    if revision in (R1, R2):
        assert "structuredContent" not in found and "outputSchema" not in tool
        return
    assert "structuredContent" in found
    jsonschema.validate(
        found["structuredContent"], tool["outputSchema"], jsonschema.Draft202012Validator
    )
    if revision == R5:
        assert found["structuredContent"] == plain
    else:
        assert tool["outputSchema"]["type"] == "object"
        assert isinstance(found["structuredContent"], dict)
        assert found["structuredContent"] in (plain, {"result": plain})


@every_revision
@pytest.mark.parametrize(
    ("kind", "value", "types"),
    [
        (str, "hi", ["text"]),
        (str, "", ["text"]),
        (None, None, []),
        (Text, Text(text="hi"), ["text"]),
        (list[Text], [Text(text="a"), Text(text="b")], ["text", "text"]),
        (Image, Image(data=b"\xff", mime_type="image/png"), ["image"]),
        (Embedded, Embedded(uri="test://x", blob=b"\x00\xff", mime_type="a/b"), ["resource"]),
    ],
)
async def test_text_and_content_are_not_structured(
    revision: str, kind: Any, value: Any, types: list[str]
) -> None:
    app = make_app()
    app.query(name="give")(returning(kind, value))
    async with over_http(app, revision) as client:
        tool = (await client.result("tools/list"))["tools"][0]
        found = await client.tool("give")
    assert [block["type"] for block in found["content"]] == types
    assert "structuredContent" not in found and "outputSchema" not in tool


async def test_bytes_travel_as_base64() -> None:
    app = make_app()
    app.query(name="image")(returning(Image, Image(data=b"\xff\xfe\x00", mime_type="image/png")))
    app.query(name="blob")(returning(Embedded, Embedded(uri="test://x", blob=b"\xff\xfe\x00")))
    async with over_http(app) as client:
        assert (await client.tool("image"))["content"] == [
            {"type": "image", "data": "//4A", "mimeType": "image/png"}
        ]
        assert (await client.tool("blob"))["content"] == [
            {"type": "resource", "resource": {"uri": "test://x", "blob": "//4A"}}
        ]


async def test_tool_result_is_sent_unchanged() -> None:
    app = make_app()

    @app.tool(output_schema={"type": "array", "items": {"type": "integer"}})
    def whole() -> ToolResult:
        return ToolResult(content=["a", Text(text="b")], structured=[1], meta={"example.com/x": 1})

    async with over_http(app, R5) as client:
        found = await client.tool("whole")
        assert [block["text"] for block in found["content"]] == ["a", "b"]
        assert (found["structuredContent"], found["_meta"]["example.com/x"]) == ([1], 1)
    async with over_http(app, R4) as client:
        assert (await client.tool("whole"))["structuredContent"] == {"result": [1]}


# --- refusals -------------------------------------------------------------------------------------


@every_way
async def test_message_of_a_refusal_contains_the_reason(transport: str, revision: str) -> None:
    """Most clients show a person, or a model, only the message of an error."""
    app = make_app()
    app.query(name="double")(_double)
    async with speak(transport, app, revision) as client:
        unknown = await client.error("tools/call", {"name": "nobody"})
        assert (unknown["code"], unknown["message"]) == (
            -32602,
            "Invalid params: there is no tool 'nobody'",
        )
        assert unknown["data"] == {"reason": "there is no tool 'nobody'"}
        if revision in (R1, R2, R3):  # later this is a result
            wrong = await client.error("tools/call", {"name": "double", "arguments": {"n": "2"}})
            assert wrong["message"].endswith(".n: expected int, got str")


def _double(n: int) -> int:
    return 2 * n
