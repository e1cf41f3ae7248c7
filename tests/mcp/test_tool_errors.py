"""How a tool fails: a result for the model, or an error of the protocol; and what middleware and
the context see of it.
"""

import asyncio
import json
from typing import Any, cast

import pytest
from msgspec import Struct

from tests.calls import lose_completions, make_app, returning
from tests.mcp.asgi import (
    EVERY_WAY,
    KEY,
    LEGACY,
    PATIENCE,
    R1,
    R2,
    R3,
    R5,
    REVISIONS,
    over_http,
    request,
    speak,
)
from wirecall import (
    App,
    Context,
    DomainError,
    Limits,
    ProtocolError,
    RpcError,
    ToolError,
    connect_sync,
)
from wirecall.errors import InvalidParams, InvalidRequest
from wirecall.mcp import ToolResult

every_revision = pytest.mark.parametrize("revision", REVISIONS)
every_way = pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)


class Point(Struct):
    x: int


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
async def test_tool_that_fails_gives_a_result(
    transport: str, revision: str, tool: str, text: str
) -> None:
    """Trap 18: a tool's failure is for the model, so it is a result."""
    async with speak(transport, failing(), revision) as client:
        found = await client.tool(tool)
    assert found["isError"] is True
    assert text in found["content"][0]["text"]
    assert "secret" not in json.dumps(found)


@every_way
@pytest.mark.parametrize(
    "error",
    [ToolError("no"), InvalidParams("no"), InvalidRequest("no"), ValueError("no")],
    ids=repr,
)
async def test_plain_function_fails_as_a_coroutine_function_does(
    transport: str, revision: str, error: Exception
) -> None:
    """A plain function that reads takes a shorter path; so does one that returns an awaitable."""
    app = make_app()

    async def fails() -> str:
        raise error

    @app.query
    def at_once() -> str:
        raise error

    @app.query
    def later() -> Any:
        return fails()

    app.query(name="coroutine")(fails)
    async with speak(transport, app, revision) as client:
        told = [
            await client.call("tools/call", {"name": name})
            for name in ("coroutine", "at_once", "later")
        ]
    for answer in told:
        del answer["id"]
    assert told[1:] == [told[0], told[0]]
    assert "error" in told[0] or told[0]["result"]["isError"]


@every_revision
async def test_result_that_json_cannot_hold_is_a_failure(revision: str) -> None:
    """J15: NaN is never emitted."""
    async with over_http(failing(), revision) as client:
        answer = await client.call("tools/call", {"name": "nan"})
    assert answer.get("result", {}).get("isError") or answer["error"]["code"] == -32603


@every_way
@pytest.mark.parametrize(
    "error",
    [
        DomainError(5, "no", {"level": float("nan")}),
        DomainError(5, "no", object()),
        ToolError("half a character: \ud800"),
        ProtocolError(5, "no", {1, object()}),
    ],
    ids=["nan", "object", "surrogate", "protocol"],
)
async def test_error_that_json_cannot_hold_is_answered(
    transport: str, revision: str, error: RpcError
) -> None:
    """The handler chooses the text and the data of an error.

    Whatever they are, the caller waits for an answer under its id.
    """
    app = make_app()

    # Raised again, an exception keeps the frames of the last time, and logging them takes longer
    # every time.
    async def fails() -> str:
        raise error.with_traceback(None)

    def fails_at_once() -> str:
        raise error.with_traceback(None)

    app.query(name="coroutine")(fails)
    app.query(name="plain")(fails_at_once)
    app.query(name="awaitable")(lambda: fails())
    app.prompt(name="prompt")(fails)
    app.resource("test://resource")(fails)
    app.tool(name="off", key="off")(fails)
    tools = [("tools/call", {"name": name}) for name in ("coroutine", "plain", "awaitable", "off")]
    others = [("prompts/get", {"name": "prompt"}), ("resources/read", {"uri": "test://resource"})]
    async with speak(transport, app, revision) as client:
        for method, params in [*tools, *others]:
            answer = await client.call(method, params)
            assert answer["id"] is not None
            assert answer.get("result", {}).get("isError") or answer["error"]["code"] == -32603


@every_way
@pytest.mark.parametrize(
    "returned",
    [
        ToolResult(content=["a"], meta=cast(Any, ["a"])),
        ToolResult(content=["a"], is_error=cast(Any, "yes")),
    ],
    ids=["meta", "is_error"],
)
async def test_tool_result_with_members_of_other_types_is_a_failure(
    transport: str, revision: str, returned: ToolResult
) -> None:
    app = make_app()

    async def later() -> ToolResult:
        return returned

    app.query(name="coroutine")(later)
    app.query(name="plain")(lambda: returned)
    async with speak(transport, app, revision) as client:
        for name in ("coroutine", "plain"):
            answer = await client.tool(name)
            assert (answer["isError"], answer["_meta"]["io.wirecall/error"]["code"]) == (
                True,
                -32603,
            )


@every_revision
async def test_command_whose_result_json_cannot_carry_counts_as_done(revision: str) -> None:
    """As over JSON-RPC: the effect has happened, so a retry reports `ran: yes` and does not run it
    again.
    """
    app = make_app()
    effects = list[int]()

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
async def test_result_that_is_not_recorded_yet_says_so(
    revision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger was lost after the effect: the caller gets the outcome, marked as not recorded
    yet.
    """
    app = make_app()
    app.command(name="put")(lambda: 1)
    lose_completions(monkeypatch, await app.ledger(), 1)
    async with over_http(app, revision) as client:
        assert (await client.tool("put", meta={KEY: "k"}))["_meta"]["io.wirecall/recorded"] is False
        assert "io.wirecall/recorded" not in (await client.tool("put", meta={KEY: "l"})).get(
            "_meta", {}
        )


async def test_success_does_not_say_that_it_is_an_error() -> None:
    app = make_app()
    app.query(name="give")(returning(str, "x"))
    async with over_http(app) as client:
        assert (await client.tool("give")).get("isError", False) is False


async def test_reply_that_is_too_large_is_not_sent() -> None:
    """J11: bytes out."""
    app = make_app(limits=Limits(bytes_out=10_000))
    app.query(name="give")(returning(str, "x" * 20_000))
    async with over_http(app) as client:
        answer = await client.call("tools/call", {"name": "give"})
        assert client.last is not None
    assert "xxxx" not in json.dumps(answer)
    assert (answer["error"]["code"], answer["error"]["data"]["limit"]) == (-32603, "bytes_out")


@every_way
async def test_error_that_is_too_large_is_not_sent(transport: str, revision: str) -> None:
    """J11: bytes out. The error in its place also says whether the call ran."""
    app = make_app(limits=Limits(bytes_out=10_000))
    much = "x" * 20_000

    @app.query
    def plain() -> str:
        raise DomainError(40401, "no such shelf", {"shelf": much})

    @app.query
    async def later(ctx: Context) -> str:
        raise ToolError(much, {"ran": "no"})

    @app.command
    def put() -> str:
        raise ProtocolError(40402, "no such shelf", {"shelf": much, "ran": "unknown"})

    @app.query
    def stated() -> ToolResult:
        return ToolResult(content=[much], is_error=True)

    @app.prompt
    def ask() -> str:
        raise DomainError(40403, much)

    @app.resource("shop://shelf")
    def shelf() -> str:
        raise DomainError(40404, "no such shelf", much)

    async with speak(transport, app, revision) as client:
        for method, params, ran in (
            ("tools/call", {"name": "plain"}, "yes"),
            ("tools/call", {"name": "later"}, "no"),
            ("tools/call", {"name": "put"}, "unknown"),
            ("tools/call", {"name": "stated"}, "yes"),
            ("prompts/get", {"name": "ask"}, "yes"),
            ("resources/read", {"uri": "shop://shelf"}, "yes"),
        ):
            error = await client.error(method, params)
            assert "longer than 10000 bytes" in error["message"]
            assert (error["code"], error["data"]["limit"], error["data"]["ran"]) == (
                -32603,
                "bytes_out",
                ran,
            )


async def test_errors_count_towards_the_length_of_an_array() -> None:
    app = make_app(limits=Limits(bytes_out=10_000))

    @app.query
    def refused() -> str:
        raise ToolError("x" * 4000, {"ran": "no"})

    async with over_http(app, R2) as client:
        calls = [request("tools/call", {"name": "refused"}, number) for number in range(4)]
        answers = await client.post(calls).json()
    assert ["result" in answer for answer in answers] == [True, True, False, False]
    assert [answer["error"]["data"]["ran"] for answer in answers[2:]] == ["no", "no"]


@every_way
async def test_message_before_the_answer_is_not_sent_if_it_is_too_large(
    transport: str, revision: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(limits=Limits(bytes_out=10_000))
    much = "x" * 20_000

    @app.tool
    async def tell(ctx: Context) -> str:
        await ctx.log("error", much)
        await ctx.log("error", "short")
        await ctx.progress(1, message=much)
        return "told"

    @app.tool
    async def ask(ctx: Context) -> str:
        await ctx.elicit(much, bool)
        return "answered"

    meta = {"progressToken": "t", "io.modelcontextprotocol/logLevel": "debug"}
    async with speak(transport, app, revision, capabilities={"elicitation": {}}) as client:
        assert (await client.tool("tell", meta=meta))["content"][0]["text"] == "told"
        assert [told["data"] for told in client.told("notifications/message")] == ["short"]
        assert (
            "notifications/message of 20" in caplog.text
            and "Limits.bytes_out is 10000" in caplog.text
        )
        if revision in (R1, R2):
            return  # they have no questions
        answer = await client.call("tools/call", {"name": "ask"})
        assert "xxxx" not in json.dumps(answer)
        if revision == R5:  # the questions are its answer
            assert (answer["error"]["data"]["limit"], answer["error"]["data"]["ran"]) == (
                "bytes_out",
                "unknown",
            )
        else:
            assert answer["result"]["isError"] is True and "ask a shorter question" in caplog.text


async def test_tool_that_takes_too_long_times_out() -> None:
    app = make_app()

    @app.query(timeout=0.05)
    async def slow() -> str:
        await asyncio.Event().wait()
        return ""

    async with over_http(app) as client:
        answer = await client.call("tools/call", {"name": "slow"})
    assert answer["error"]["data"]["type"] == "deadline_exceeded"
    assert (
        answer["error"]["message"]
        == "Deadline exceeded: slow took longer than its timeout of 0.05 s"
    )


async def test_calls_beyond_the_limit_get_busy() -> None:
    app = make_app(limits=Limits(in_flight=1))
    entered = asyncio.Event()
    gate = asyncio.Event()

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


# --- middleware -----------------------------------------------------------------------------------


async def test_middleware_sees_calls_over_mcp() -> None:
    app = make_app()
    seen = []

    @app.middleware
    async def note(context: Context, call: Any) -> Any:
        seen.append(
            (
                context.method,
                context.kind.value,
                context.caller,
                context.revision,
                context.idempotency_key,
            )
        )
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
    app = make_app()
    ran = []

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
    app = make_app()
    ran = []
    allowed = [True]

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


# --- context --------------------------------------------------------------------------------------


@every_way
async def test_handler_knows_its_caller(transport: str, revision: str) -> None:
    app = make_app()

    @app.query
    def know(ctx: Context) -> dict[str, Any]:
        return {
            "revision": ctx.revision,
            "capabilities": ctx.client_capabilities,
            "trace": ctx.traceparent,
            "id": ctx.id,
        }

    async with speak(transport, app, revision, capabilities={"roots": {}}) as client:
        found = json.loads(
            (await client.tool("know", id="i-1", meta={"traceparent": "00-a-b-01"}))["content"][0][
                "text"
            ]
        )
    assert found == {
        "revision": revision,
        "capabilities": {"roots": {}},
        "trace": "00-a-b-01",
        "id": "i-1",
    }


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
            assert (await client.exchange({"jsonrpc": "2.0", "id": "p", "method": "give"}))[
                "result"
            ] == "x"
            assert await client.tool("give")


def test_problems_of_arguments_have_their_places_in_the_words_of_mcp() -> None:
    app = App("x")

    @app.query
    def move(to: Point, steps: int) -> int:
        return to.x

    with connect_sync(app, protocol="mcp") as client:
        called = client.call_tool("move", {"to": {"x": "a"}, "step": 1}, check=False)
    assert (
        called.text
        == "arguments.to.x: expected int, got str; arguments.steps: missing; arguments.step: unknown name"
    )


def test_result_of_another_type_is_named_in_the_text_that_clients_show_in_development() -> None:
    app = App("x")

    @app.query
    def count() -> int:
        return "many"  # type: ignore[return-value]

    with connect_sync(app, protocol="mcp") as client:
        called = client.call_tool("count", check=False)
    assert called.text == "Internal error: count must return int: result: expected int, got str"


def test_prompt_argument_that_does_not_fit_is_named_as_in_a_tool() -> None:
    app = App("x")

    @app.prompt
    def remind(days: int) -> str:
        return f"in {days} days"

    with connect_sync(app, protocol="mcp") as client:
        assert client.get_prompt("remind", {"days": "7"}).messages
        with pytest.raises(InvalidParams, match=r"arguments\.days: expected int, got str"):
            client.get_prompt("remind", {"days": "soon"})
