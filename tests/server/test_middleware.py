"""Middleware: its order, what it sees, and what it may change."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec import UNSET

from tests.calls import batch, call, error, make_app, read, result
from tests.mcp.asgi import REVISIONS
from wirecall import Context, DomainError, RpcError, UsageError, connect, jsonrpc
from wirecall.errors import InternalError, InvalidRequest, rebuilt


async def test_middleware_is_called_once_per_entry_of_every_form() -> None:
    app = make_app()
    seen: list[Any] = []

    @app.middleware
    async def watch(ctx: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        seen.append((ctx.method, None if ctx.is_notification else ctx.id, ctx.position))
        return await call_next(ctx)

    app.query(name="q", notification_allowed=True)(lambda: 1)
    app.command(name="c")(lambda: 2)
    await app.handle(call("q", id="single"))
    await app.handle(jsonrpc.make_notification("q"))
    reply = await app.handle(
        batch(
            call("q", id="x"),
            jsonrpc.make_notification("q"),
            b"{}",
            call("nobody"),
            call("c", key="k"),
        )
    )
    assert seen == [
        ("q", "single", None),
        ("q", None, None),
        ("q", "x", 0),
        ("q", None, 1),
        ("c", 1, 4),
    ]
    assert [answer.get("result") for answer in read(reply)] == [1, None, None, 2]


async def test_middleware_wraps_in_order_sees_the_sealed_result_and_may_refuse_or_replace() -> None:
    order: list[str] = []

    async def outer(ctx: Context, call_next: Any) -> Any:
        order.append("outer")
        if ctx.method == "secret":
            raise RpcError(40100, "who are you?")
        answered = await call_next(ctx)
        order.append(bytes(answered).decode())
        return answered

    async def inner(ctx: Context, call_next: Any) -> Any:
        order.append("inner")
        ctx.state["from"] = "inner"
        await call_next(ctx)
        return {"replaced": True}

    app = make_app(middleware=[outer, inner])
    app.query(name="open")(lambda who: None)

    @app.query(name="state")
    def state(ctx: Context) -> Any:
        return ctx.state

    app.query(name="secret")(lambda: 1)
    assert error(app.handle_sync(call("secret"))) == {
        "code": 40100,
        "message": "who are you?",
        "data": {"ran": "no"},
    }
    assert order == ["outer"]
    order.clear()
    app = make_app(middleware=[outer])
    app.query(name="value")(lambda: {"x": [1, None]})
    assert result(app.handle_sync(call("value"))) == {"x": [1, None]}
    assert order == ["outer", '{"x":[1,null]}']
    app = make_app(middleware=[inner])
    app.query(name="value")(lambda: 1)
    assert result(app.handle_sync(call("value"))) == {"replaced": True}


@pytest.mark.parametrize(
    ("refusal", "data"),
    [
        (DomainError(40300, "not yours"), {"ran": "no"}),
        (DomainError(40300, "not yours", {"role": "admin"}), {"role": "admin", "ran": "no"}),
        (DomainError(40300, "not yours", ["admin"]), {"data": ["admin"], "ran": "no"}),
        # "yes" is about a call elsewhere.
        (rebuilt(RpcError, 40300, "not yours", {"ran": "yes"}), {"ran": "no"}),
        (InternalError(), {"ran": "no"}),
        (InvalidRequest("no"), {"reason": "no"}),  # its code says it
    ],
)
async def test_call_that_its_middleware_refused_has_not_run(refusal: RpcError, data: Any) -> None:
    """The error says so, over JSON-RPC and at every revision. An error after the run does not."""
    app = make_app()
    effects = list[int]()

    @app.middleware
    async def guard(ctx: Context, call_next: Any) -> Any:
        if ctx.params is not UNSET and b"late" in bytes(ctx.params):
            await call_next(ctx)
        raise refusal

    @app.command
    def put(late: bool = False) -> None:
        effects.append(1)

    assert error(await app.handle(call("put")))["data"] == data
    async with connect(app) as client:
        with pytest.raises(RpcError, match=refusal.message) as refused:
            await client.call("put")
        assert refused.value.ran == "no"
    for revision in REVISIONS:
        async with connect(app, protocol="mcp", revision=revision) as tools:
            with pytest.raises(RpcError) as refused:
                await tools.call_tool("put")
            assert refused.value.ran == "no"
    assert effects == []
    assert error(await app.handle(call("put", {"late": True}))).get("data") == refusal.data
    assert effects == [1]


async def test_replay_passes_the_middleware_again() -> None:
    """A caller that may not make the call does not get a replay."""
    app = make_app()
    allowed = True

    @app.middleware
    async def guard(ctx: Context, call_next: Any) -> Any:
        if not allowed:
            raise RpcError(40300, "not yours")
        return await call_next(ctx)

    app.command(name="put")(lambda: "secret")
    assert result(await app.handle(call("put", key="k"))) == "secret"
    allowed = False
    assert error(await app.handle(call("put", key="k")))["code"] == 40300


@pytest.mark.parametrize("as_text", [bytes, bytes.decode, memoryview])
async def test_key_beside_an_array_is_refused_and_nothing_runs(
    as_text: Callable[[bytes], Any],
) -> None:
    """Every entry would have it: of two commands the second would be a repetition of the first."""
    app = make_app()
    effects = list[int]()
    app.command(name="put")(lambda n: effects.append(n))
    for message in (
        batch(call("put", {"n": 1})),
        b"\n " + batch(call("put", {"n": 1}, id=1), call("put", {"n": 2}, id=2)),
    ):
        with pytest.raises(
            UsageError, match=r"single call[\s\S]*why: [\s\S]*fix: .*idempotency_key"
        ):
            await app.handle(as_text(message), key="k")
    assert effects == []
    assert result(await app.handle(call("put", {"n": 3}), key="k")) is None
    assert effects == [3]


async def test_middleware_that_fails_affects_only_its_own_entry(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app()

    @app.middleware
    async def fragile(ctx: Context, call_next: Any) -> Any:
        if ctx.id == 1:
            raise ZeroDivisionError("inside")
        return await call_next(ctx)

    app.query(name="q")(lambda: "fine")
    answers = read(await app.handle(batch(call("q", id=1), call("q", id=2))))
    assert answers[0]["error"] == {"code": -32603, "message": "Internal error"}
    assert answers[1]["result"] == "fine"
    assert "ZeroDivisionError" in caplog.text


async def test_middleware_may_name_the_exception_of_a_query_but_not_of_a_recorded_command() -> None:
    app = make_app()

    @app.middleware
    async def named(ctx: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        try:
            return await call_next(ctx)
        except KeyError as missing:
            raise DomainError(4040, f"there is no {missing.args[0]}") from missing

    @app.query
    def price(sku: str) -> int:
        return {"tea": 450}[sku]

    app.command(name="sell")(price)
    assert error(await app.handle(call("price", ["milk"])))["message"] == "there is no milk"
    assert (
        error(await app.handle(call("sell", {"sku": "milk"}, key="k")))["message"]
        == "Internal error"
    )
