"""Tools: what they say of themselves (T1, T2), what they give in each revision, commands called as tools (P3 to P5)."""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
import pytest
from msgspec import Struct

from tests.calls import lose_completions, make_app
from tests.mcp.asgi import EVERY_WAY, KEY, LEGACY, PATIENCE, R1, R2, R3, R4, R5, REPLAYED, REVISIONS, over_http, speak
from wirecall import App, Context, DomainError, Limits, ToolAnnotations, ToolError, UsageError
from wirecall.mcp import Embedded, Image, ResourceLink, Text, ToolResult

every_revision = pytest.mark.parametrize("revision", REVISIONS)
every_way = pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)


def nothing() -> None:
    """Does nothing."""


# --- annotations -----------------------------------------------------------------------------------------------------

Declare = Callable[[App], Any]
HINTS = ("readOnlyHint", "destructiveHint", "idempotentHint", "openWorldHint")

# What is not said has the specification's default: mutating, destructive, not idempotent, open world.
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
        lambda app: app.tool(annotations=ToolAnnotations(readOnlyHint=True, openWorldHint=False))(nothing),
        (True, None, None, False),
    ),
    (
        "additive tool",
        lambda app: app.tool(annotations=ToolAnnotations(destructiveHint=False, idempotentHint=True))(nothing),
        (False, False, True, True),
    ),
]


@pytest.mark.parametrize(("declare", "expected"), [row[1:] for row in DECLARED], ids=[row[0] for row in DECLARED])
async def test_hints_follow_from_what_was_declared(declare: Declare, expected: tuple[Any, ...]) -> None:
    """T1, T2. A reader that knows the defaults and one that does not must come to the same."""
    app = make_app()
    declare(app)
    for revision in (R2, R3, R4, R5):
        async with over_http(app, revision) as client:
            hints = (await client.result("tools/list"))["tools"][0]["annotations"]
        told = (hints.get("readOnlyHint", False), hints.get("destructiveHint", True), hints.get("idempotentHint", False))
        assert told[0] is expected[0]
        assert hints.get("openWorldHint", True) is expected[3]
        if not expected[0]:  # the two have a meaning only then
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
async def test_a_title_is_told_where_the_revision_has_it(declare: Declare) -> None:
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
    "reads and destroys": lambda app: app.tool(annotations=ToolAnnotations(readOnlyHint=True, destructiveHint=True))(
        nothing
    ),
    "reads once": lambda app: app.tool(annotations=ToolAnnotations(readOnlyHint=True, idempotentHint=False))(nothing),
    "reads with a key": lambda app: app.tool(annotations=ToolAnnotations(readOnlyHint=True), key="required")(nothing),
    "reads and is retried": lambda app: app.tool(annotations=ToolAnnotations(readOnlyHint=True), on_crash="rerun")(nothing),
    "reads and is kept": lambda app: app.tool(annotations=ToolAnnotations(readOnlyHint=True), retention=60)(nothing),
    "two of a name": lambda app: (app.query(nothing), app.tool(nothing)),
    "an unknown rule for keys": lambda app: app.command(key="always")(nothing),  # type: ignore[call-overload]
    "served nowhere": lambda app: app.query(expose=())(nothing),
}


@pytest.mark.parametrize("declare", CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_a_contradiction_is_an_error_at_registration(declare: Declare) -> None:
    with pytest.raises(UsageError):
        declare(make_app())


async def test_what_is_for_json_rpc_alone_is_no_tool() -> None:
    app = make_app()
    app.query(expose=("rpc",), name="hidden")(nothing)
    app.query(expose=("mcp",), name="shown")(nothing)
    async with over_http(app) as client:
        assert [tool["name"] for tool in (await client.result("tools/list"))["tools"]] == ["shown"]
        assert (await client.tool_error("hidden"))["code"] == -32602
        assert (await client.tool_error("rpc.discover"))["code"] == -32602
    assert b"Method not found" in (await app.handle(b'{"jsonrpc":"2.0","id":1,"method":"shown"}') or b"")


# --- schemas ---------------------------------------------------------------------------------------------------------

VERBATIM = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"address": {"$anchor": "a", "type": "object", "properties": {"street": {"type": "string"}}}},
    "properties": {"address": {"$ref": "#/$defs/address"}, "kind": {"enum": ["a", "b"]}},
    "allOf": [{"anyOf": [{"required": ["address"]}, {"required": ["kind"]}]}],
    "if": {"properties": {"kind": {"const": "a"}}},
    "then": {"required": ["address"]},
    "else": {},
    "additionalProperties": False,
}


@every_revision
async def test_a_schema_is_published_as_it_was_written(revision: str) -> None:
    """Trap 53."""
    app = make_app()

    @app.tool(input_schema=VERBATIM)
    def free(**arguments: Any) -> str:
        return json.dumps(arguments, sort_keys=True)

    async with over_http(app, revision) as client:
        assert (await client.result("tools/list"))["tools"][0]["inputSchema"] == VERBATIM
        assert (await client.tool("free", {"kind": "b"}))["content"][0]["text"] == '{"kind": "b"}'


@every_revision
async def test_every_schema_is_one(revision: str) -> None:
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


# --- structured output (matrix 1.6, trap 50) -------------------------------------------------------------------------


class Point(Struct):
    x: int
    y: int = 0


def returning(kind: Any, value: Any) -> Any:
    def give() -> Any:
        return value

    give.__annotations__["return"] = kind
    return give


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
@pytest.mark.parametrize(("kind", "value", "plain"), [row[1:] for row in VALUES], ids=[row[0] for row in VALUES])
async def test_structured_content_fits_its_schema_and_its_revision(revision: str, kind: Any, value: Any, plain: Any) -> None:
    app = make_app()
    app.query(name="give")(returning(kind, value))
    async with over_http(app, revision) as client:
        tool = (await client.result("tools/list"))["tools"][0]
        found = await client.tool("give")
    assert json.loads(found["content"][0]["text"]) == plain  # also as text, for those who read only that
    if revision in (R1, R2):
        assert "structuredContent" not in found and "outputSchema" not in tool
        return
    assert "structuredContent" in found
    jsonschema.validate(found["structuredContent"], tool["outputSchema"], jsonschema.Draft202012Validator)
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
async def test_text_and_content_are_not_structured(revision: str, kind: Any, value: Any, types: list[str]) -> None:
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
        assert (await client.tool("image"))["content"] == [{"type": "image", "data": "//4A", "mimeType": "image/png"}]
        assert (await client.tool("blob"))["content"] == [
            {"type": "resource", "resource": {"uri": "test://x", "blob": "//4A"}}
        ]


async def test_a_whole_result_is_told_as_it_was_stated() -> None:
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


# --- errors ----------------------------------------------------------------------------------------------------------


def failing() -> App:
    app = make_app()

    @app.query
    def says_no() -> str:
        raise ToolError("the shelf is empty")

    @app.query
    def domain() -> str:
        raise DomainError(40401, "no such shelf", {"shelf": 3})

    @app.query
    def breaks() -> str:
        raise ValueError("secret detail")

    @app.query
    def structured() -> Point:
        raise ToolError("no point")

    @app.query
    def nan() -> float:
        return float("nan")

    @app.query
    def stated() -> ToolResult:
        return ToolResult(content=["bad"], is_error=True)

    return app


@every_way
@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("says_no", "the shelf is empty"),
        ("domain", "no such shelf"),
        ("structured", "no point"),
        ("stated", "bad"),
        ("breaks", ""),
    ],
)
async def test_a_tool_that_fails_gives_a_result(transport: str, revision: str, tool: str, text: str) -> None:
    """Trap 18: a tool's failure is for the model, so it is a result."""
    async with speak(transport, failing(), revision) as client:
        found = await client.tool(tool)
    assert found["isError"] is True
    assert text in found["content"][0]["text"]
    assert "secret" not in json.dumps(found)


@every_revision
async def test_what_json_cannot_carry_is_a_failure(revision: str) -> None:
    """J15: NaN is never emitted."""
    async with over_http(failing(), revision) as client:
        answer = await client.call("tools/call", {"name": "nan"})
    assert answer.get("result", {}).get("isError") or answer["error"]["code"] == -32603


@every_revision
async def test_a_command_whose_result_json_cannot_carry_was_done_all_the_same(revision: str) -> None:
    """As over JSON-RPC: the effect has happened, so a retry hears that, and neither runs it again nor doubts it."""
    app, effects = make_app(), list[int]()

    @app.command
    async def put() -> float:
        effects.append(1)
        return float("nan")

    async with over_http(app, revision) as client:
        first = await client.tool("put", meta={KEY: "k"})
        assert first["_meta"]["io.wirecall/error"] == {"code": -32603, "data": {"ran": "yes"}}
        again = await client.tool_error("put", meta={KEY: "k"})
        assert (again["code"], again["data"]["ran"]) == (41010, "yes")
    assert effects == [1]


@every_revision
async def test_a_result_that_is_not_recorded_yet_says_so(revision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger was lost after the effect: the caller gets the truth, and is told that a retry may not yet."""
    app = make_app()
    app.command(name="put")(lambda: 1)
    lose_completions(monkeypatch, await app.ledger(), 1)
    async with over_http(app, revision) as client:
        assert (await client.tool("put", meta={KEY: "k"}))["_meta"]["io.wirecall/recorded"] is False
        assert "io.wirecall/recorded" not in (await client.tool("put", meta={KEY: "l"})).get("_meta", {})


async def test_a_success_does_not_say_that_it_is_an_error() -> None:
    app = make_app()
    app.query(name="give")(returning(str, "x"))
    async with over_http(app) as client:
        assert (await client.tool("give")).get("isError", False) is False


async def test_a_reply_that_is_too_large_is_not_sent() -> None:
    """J11: bytes out."""
    app = make_app(limits=Limits(bytes_out=10_000))
    app.query(name="give")(returning(str, "x" * 20_000))
    async with over_http(app) as client:
        answer = await client.call("tools/call", {"name": "give"})
        assert client.last is not None
    assert "xxxx" not in json.dumps(answer)
    assert (answer["error"]["code"], answer["error"]["data"]["limit"]) == (-32603, "bytes_out")


async def test_a_tool_that_takes_too_long_is_told_so() -> None:
    app = make_app()

    @app.query(timeout=0.05)
    async def slow() -> str:
        await asyncio.Event().wait()
        return ""

    async with over_http(app) as client:
        answer = await client.call("tools/call", {"name": "slow"})
    assert answer["error"]["data"]["type"] == "deadline_exceeded"


async def test_too_many_calls_at_once_are_told_to_come_back() -> None:
    app, entered, gate = make_app(limits=Limits(in_flight=1)), asyncio.Event(), asyncio.Event()

    @app.query
    async def slow() -> str:
        entered.set()
        await gate.wait()
        return ""

    async with over_http(app) as client:
        first = client.post(client.message("tools/call", {"name": "slow"}))
        async with asyncio.timeout(PATIENCE):
            await entered.wait()
        error = await client.tool_error("slow")
        gate.set()
        assert "result" in await first.json()
    assert (error["code"], error["data"]["type"], error["data"]["ran"]) == (42910, "busy", "no")


# --- keys ------------------------------------------------------------------------------------------------------------


class Till:
    """A command that counts its effects."""

    def __init__(self, **options: Any) -> None:
        self.app = make_app(**options)
        self.paid: list[int] = []
        self.keys: list[str | None] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

        @self.app.command(wait=0.05)
        async def pay(cents: int, ctx: Context) -> list[int]:
            self.entered.set()
            await self.gate.wait()
            self.paid.append(cents)
            self.keys.append(ctx.idempotency_key)
            if cents < 0:
                raise ToolError("not that way")
            if cents > 1000:
                raise ValueError("broken")
            return [cents]


PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "meta": lambda key: {"meta": {KEY: key}},
    "camel": lambda key: {"members": {"idempotencyKey": key}},
    "snake": lambda key: {"members": {"idempotency_key": key}},
    "argument": lambda key: {"arguments": {"idempotency_key": key}},
    "header": lambda key: {"headers": {"idempotency-key": key}},
}


def at(*places: tuple[str, str]) -> dict[str, Any]:
    """What gives a call its key in some places."""
    given: dict[str, Any] = {"arguments": {"cents": 5}}
    for place, key in places:
        for name, value in PLACES[place](key).items():
            given[name] = {**given.get(name, {}), **value}
    return given


@every_revision
@pytest.mark.parametrize("place", PLACES)
async def test_a_key_is_found_in_every_place(revision: str, place: str) -> None:
    """P3, P5: the place does not matter, the key does."""
    till = Till()
    async with over_http(till.app, revision) as client:
        first = await client.tool("pay", **at((place, "k")))
        assert REPLAYED not in first.get("_meta", {})
        for again in PLACES:
            found = await client.tool("pay", **at((again, "k")))
            assert found["_meta"][REPLAYED] is True
            assert client.last is not None and client.last.header("idempotent-replayed") == "true"
            assert found["content"] == first["content"]
    assert (till.paid, till.keys) == ([5], ["k"])


@pytest.mark.parametrize("one", PLACES)
@pytest.mark.parametrize("two", PLACES)
async def test_two_keys_in_one_call_are_refused(one: str, two: str) -> None:
    if one == two:
        return
    till = Till()
    async with over_http(till.app) as client:
        error = await client.tool_error("pay", **at((one, "a"), (two, "b")))
        assert (error["code"], error["data"]["type"], till.paid) == (-32602, "idempotency_key_invalid", [])
        assert await client.tool("pay", **at((one, "a"), (two, "a")))


@every_revision
@pytest.mark.parametrize("key", ["", "a b", "ü", "x" * 256, 5, True, None, ["k"], "a\n"])
async def test_a_bad_key_is_refused(revision: str, key: Any) -> None:
    till = Till()
    async with over_http(till.app, revision) as client:
        for place in ("meta", "camel", "snake", "argument"):
            error = await client.tool_error("pay", **at((place, key)))
            assert (error["code"], error["data"]["type"]) == (-32602, "idempotency_key_invalid"), place
    assert till.paid == []


@pytest.mark.parametrize("key", ["", "a b", "x" * 256])
async def test_a_bad_key_in_the_header_is_refused(key: str) -> None:
    till = Till()
    async with over_http(till.app) as client:
        error = await client.tool_error("pay", **at(("header", key)))
    assert (error["data"]["type"], till.paid) == ("idempotency_key_invalid", [])


async def test_a_doubled_key_header_is_400() -> None:
    till = Till()
    async with over_http(till.app) as client:
        message = client.message("tools/call", {"name": "pay", "arguments": {"cents": 5}})
        told = [*client.headers(message).items(), ("idempotency-key", "a"), ("idempotency-key", "a")]
        assert (await client.post(message, told).started()).status == 400
    assert till.paid == []


async def test_without_a_key_every_call_counts() -> None:
    till = Till(mode="production")
    async with over_http(till.app) as client:
        for _ in range(2):
            found = await client.tool("pay", {"cents": 5})
            assert REPLAYED not in found["_meta"]
    assert (till.paid, till.keys) == ([5, 5], [None, None])


@every_way
async def test_replays_in_every_revision_and_on_every_way(transport: str, revision: str) -> None:
    till = Till()
    async with speak(transport, till.app, revision) as client:
        await client.tool("pay", {"cents": 5}, meta={KEY: "k"})
        again = await client.tool("pay", {"cents": 5}, meta={KEY: "k"})
        assert again["_meta"][REPLAYED] is True
    assert till.paid == [5]


@pytest.mark.parametrize("first", REVISIONS)
async def test_a_replay_speaks_the_revision_of_the_one_who_asks(first: str) -> None:
    """What is recorded is whole, whoever called first."""
    app, ran = make_app(), []

    @app.command
    def make() -> ToolResult:
        ran.append(1)
        return ToolResult(content=[ResourceLink(uri="test://made", name="made")], structured={"made": 1})

    async with over_http(app, first) as client:
        await client.tool("make", meta={KEY: "k"})
        for revision in REVISIONS:
            other = type(client)(client.asgi, revision)
            await other.open()
            found = await other.tool("make", meta={KEY: "k"})
            assert found["_meta"][REPLAYED] is True
            assert found["content"][0]["type"] == ("text" if revision in (R1, R2) else "resource_link")
            assert found.get("structuredContent") == (None if revision in (R1, R2) else {"made": 1})
            assert ("resultType" in found) == (revision == R5)
    assert ran == [1]


@every_revision
async def test_a_recorded_failure_is_replayed_too(revision: str) -> None:
    till = Till()
    async with over_http(till.app, revision) as client:
        for replayed in (None, True):
            found = await client.tool("pay", {"cents": -5}, meta={KEY: "k"})
            assert (found["isError"], found["content"][0]["text"]) == (True, "not that way")
            assert found.get("_meta", {}).get(REPLAYED) is replayed
    assert till.paid == [-5]


@every_revision
async def test_the_ledgers_errors_over_mcp(revision: str) -> None:
    till = Till()
    async with over_http(till.app, revision) as client:
        await client.tool("pay", {"cents": 5}, meta={KEY: "used"})
        conflict = await client.tool_error("pay", {"cents": 6}, meta={KEY: "used"})
        assert (conflict["code"], conflict["data"]["type"], conflict["data"]["ran"]) == (
            42210,
            "idempotency_key_conflict",
            "no",
        )

        await client.tool("pay", {"cents": 1001}, meta={KEY: "broken"})
        unknown = await client.tool_error("pay", {"cents": 1001}, meta={KEY: "broken"})
        assert (unknown["code"], unknown["data"]["type"], unknown["data"]["ran"]) == (50910, "outcome_unknown", "unknown")

        till.gate.clear()
        till.entered.clear()
        first = client.post(client.message("tools/call", {"name": "pay", "arguments": {"cents": 7}}, "w", {KEY: "busy"}))
        async with asyncio.timeout(PATIENCE):
            await till.entered.wait()
        busy = await client.tool_error("pay", {"cents": 7}, meta={KEY: "busy"})
        assert (busy["code"], busy["data"]["type"]) == (40910, "idempotency_key_in_progress")
        assert busy["data"]["retry_after_ms"] > 0
        till.gate.set()
        assert "result" in await first.json()
    assert till.paid == [5, 1001, 7]


@every_revision
async def test_a_result_that_was_too_large_to_keep(revision: str) -> None:
    app, ran = make_app(), []

    @app.command(max_stored_result=10)
    def pay() -> str:
        ran.append(1)
        return "x" * 100

    async with over_http(app, revision) as client:
        assert (await client.tool("pay", meta={KEY: "k"}))["content"][0]["text"] == "x" * 100
        error = await client.tool_error("pay", meta={KEY: "k"})
    assert (error["code"], error["data"]["type"], error["data"]["ran"]) == (41010, "result_not_retained", "yes")
    assert ran == [1]


async def test_duplicates_at_once_are_one() -> None:
    app, ran, entered, gate = make_app(), [], asyncio.Event(), asyncio.Event()

    @app.command
    async def pay() -> int:
        entered.set()
        await gate.wait()
        ran.append(1)
        return 1

    async with over_http(app) as client:
        calls = [client.post(client.message("tools/call", {"name": "pay"}, id, {KEY: "k"})) for id in range(5)]
        async with asyncio.timeout(PATIENCE):
            await entered.wait()
        gate.set()
        answers = [await call.json() for call in calls]
    assert ran == [1]
    assert sorted(bool(answer["result"]["_meta"].get(REPLAYED)) for answer in answers) == [False, True, True, True, True]


def who(headers: Mapping[str, str]) -> str | None:
    return headers.get("authorization")


async def test_a_key_belongs_to_its_caller() -> None:
    till = Till(authenticate=who)
    async with over_http(till.app, R5, headers={"authorization": "ann"}) as client:
        await client.tool("pay", {"cents": 5}, meta={KEY: "k"})
        await client.tool("pay", {"cents": 6}, meta={KEY: "k"}, headers={"authorization": "bob"})
    assert till.paid == [5, 6]


async def test_bad_arguments_take_no_claim() -> None:
    till = Till()
    async with over_http(till.app) as client:
        assert (await client.tool("pay", {"cents": "five"}, meta={KEY: "k"}))["isError"]
        assert await client.tool("pay", {"cents": 5}, meta={KEY: "k"})
    assert till.paid == [5]


@every_revision
async def test_a_key_may_be_required(revision: str) -> None:
    app, ran = make_app(), []

    @app.command(key="required")
    def pay() -> str:
        ran.append(1)
        return "paid"

    async with over_http(app, revision) as client:
        tool = (await client.result("tools/list"))["tools"][0]
        assert "idempotency_key" not in tool["inputSchema"]["properties"]
        error = await client.tool_error("pay")
        assert (error["code"], error["data"]["type"], ran) == (-32602, "idempotency_key_required", [])
        assert await client.tool("pay", meta={KEY: "k"})
    assert ran == [1]


@every_revision
async def test_a_key_may_be_asked_of_the_model(revision: str) -> None:
    """A visible argument with a description; the function does not see it."""
    app, ran = make_app(), []

    @app.command(key="ask")
    def pay(cents: int) -> str:
        ran.append(cents)
        return "paid"

    async with over_http(app, revision) as client:
        schema = (await client.result("tools/list"))["tools"][0]["inputSchema"]
        assert schema["properties"]["idempotency_key"]["type"] == "string"
        assert len(schema["properties"]["idempotency_key"]["description"]) > 40
        assert sorted(schema["required"]) == ["cents", "idempotency_key"]
        missing = await client.call("tools/call", {"name": "pay", "arguments": {"cents": 5}})
        if revision in (R4, R5):  # an argument is missing: the model is told
            assert missing["result"]["isError"] and "idempotency_key" in missing["result"]["content"][0]["text"]
        else:
            assert missing["error"]["code"] == -32602
        for _ in range(2):
            assert await client.tool("pay", {"cents": 5, "idempotency_key": "k"})
    assert ran == [5]


async def test_a_query_needs_no_key_and_minds_none() -> None:
    app = make_app()
    app.query(name="give")(returning(str, "x"))
    async with over_http(app) as client:
        for _ in range(2):
            found = await client.tool("give", meta={KEY: "k"}, headers={"idempotency-key": "k"})
            assert REPLAYED not in found["_meta"]


# --- middleware ------------------------------------------------------------------------------------------------------


async def test_middleware_sees_what_comes_over_mcp() -> None:
    app, seen = make_app(), []

    @app.middleware
    async def note(context: Context, call: Any) -> Any:
        seen.append((context.method, context.kind.value, context.caller, context.revision, context.idempotency_key))
        return await call(context)

    app.command(name="pay")(returning(str, "x"))
    app.prompt(name="greet")(returning(str, "hello"))
    app.resource("test://x")(returning(str, "x"))
    async with over_http(app, R3) as client:
        await client.tool("pay", meta={KEY: "k"})
        await client.result("prompts/get", {"name": "greet"})
        await client.result("resources/read", {"uri": "test://x"})
    assert seen[0] == ("pay", "command", "", R3, "k")
    assert [row[1] for row in seen] == ["command", "query", "query"]


@every_revision
async def test_middleware_can_refuse_a_tool(revision: str) -> None:
    app, ran = make_app(), []

    @app.middleware
    async def no(context: Context, call: Any) -> Any:
        raise DomainError(40301, "not you")

    @app.command
    def pay() -> None:
        ran.append(1)

    async with over_http(app, revision) as client:
        answer = await client.call("tools/call", {"name": "pay"}, meta={KEY: "k"})
    assert "not you" in json.dumps(answer)
    assert ran == []


async def test_middleware_authorizes_a_replay_again() -> None:
    app, ran, allowed = make_app(), [], [True]

    @app.middleware
    async def judge(context: Context, call: Any) -> Any:
        if not allowed:
            raise DomainError(40301, "not you")
        return await call(context)

    @app.command
    def pay() -> str:
        ran.append(1)
        return "secret receipt"

    async with over_http(app) as client:
        await client.tool("pay", meta={KEY: "k"})
        allowed.clear()
        answer = await client.call("tools/call", {"name": "pay"}, meta={KEY: "k"})
    assert "receipt" not in json.dumps(answer)
    assert ran == [1]


async def test_middleware_can_change_a_result() -> None:
    app = make_app()

    @app.middleware
    async def change(context: Context, call: Any) -> Any:
        await call(context)
        return "changed"

    app.query(name="give")(returning(str, "x"))
    async with over_http(app) as client:
        assert (await client.tool("give"))["content"] == [{"type": "text", "text": "changed"}]


# --- context ---------------------------------------------------------------------------------------------------------


@every_way
async def test_a_handler_knows_who_calls(transport: str, revision: str) -> None:
    app = make_app()

    @app.query
    def know(ctx: Context) -> dict[str, Any]:
        return {"revision": ctx.revision, "capabilities": ctx.client_capabilities, "trace": ctx.traceparent, "id": ctx.id}

    async with speak(transport, app, revision, capabilities={"roots": {}}) as client:
        found = json.loads((await client.tool("know", id="i-1", meta={"traceparent": "00-a-b-01"}))["content"][0]["text"])
    assert found == {"revision": revision, "capabilities": {"roots": {}}, "trace": "00-a-b-01", "id": "i-1"}


@pytest.mark.parametrize("token", [0, "", 17, "text"])
async def test_progress_has_the_callers_token_and_grows(token: Any) -> None:
    """Trap 55: a token may be falsy; a number that does not grow is not sent."""
    app = make_app()

    @app.query
    async def steps(ctx: Context) -> str:
        for value in (0, 0.5, 0.5, 0.25, 1):
            await ctx.progress(value, total=1)
        return ""

    for revision in REVISIONS:
        async with over_http(app, revision) as client:
            await client.tool("steps", meta={"progressToken": token})
            told = client.told("notifications/progress")
            assert [(params["progressToken"], params["progress"]) for params in told] == [
                (token, 0),
                (token, 0.5),
                (token, 1),
            ]
            client.heard.clear()
            await client.tool("steps")
            assert client.heard == []


async def test_plain_json_rpc_is_served_beside_mcp() -> None:
    app = make_app()
    app.query(name="give")(returning(str, "x"))
    for revision in LEGACY:
        async with speak("stdio", app, revision) as client:
            assert (await client.exchange({"jsonrpc": "2.0", "id": "p", "method": "give"}))["result"] == "x"
            assert await client.tool("give")


# --- refusals --------------------------------------------------------------------------------------------------------


@every_way
async def test_the_message_of_a_refusal_says_what_is_wrong(transport: str, revision: str) -> None:
    """Most clients show a person, or a model, the message of an error and nothing else of it."""
    app = make_app()
    app.query(name="double")(_double)
    async with speak(transport, app, revision) as client:
        unknown = await client.error("tools/call", {"name": "nobody"})
        assert (unknown["code"], unknown["message"]) == (-32602, "Invalid params: there is no tool 'nobody'")
        assert unknown["data"] == {"reason": "there is no tool 'nobody'"}
        if revision in (R1, R2, R3):  # later this is a result
            wrong = await client.error("tools/call", {"name": "double", "arguments": {"n": "2"}})
            assert wrong["message"].endswith(".n: expected int, got str")


def _double(n: int) -> int:
    return 2 * n
