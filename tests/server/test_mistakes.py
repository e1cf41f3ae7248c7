"""Mistakes of programs that use wirecall: each is an error that says what is wrong and how to fix
it.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.auth import RESOURCE
from tests.calls import batch, call, error, make_app, read, result
from tests.mcp.asgi import R5, speak
from wirecall import App, Context, Limits, RpcError, UsageError, connect, connect_sync
from wirecall.auth import Access, Identity
from wirecall.errors import InternalError, MethodNotFound
from wirecall.middleware import RateLimit
from wirecall.protocol.sender import Sender

PATIENCE = 60
VERBS = ("query", "command", "tool")

# Without their types, as in a program without a type checker.
limits: Any = Limits
open_client: Any = connect
open_blocking: Any = connect_sync
rate: Any = RateLimit


# --- registration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("default", [[], [1], {}, {"a": 1}, set(), bytearray()])
@pytest.mark.parametrize("verb", VERBS)
def test_registration_refuses_a_mutable_default(verb: str, default: Any) -> None:
    def collect(items=default):  # type: ignore[no-untyped-def]
        return items

    with pytest.raises(
        UsageError,
        match=r"the default of items is a \w+: all callers would share it[\s\S]*items=None",
    ):
        getattr(make_app(), verb)(collect)


@pytest.mark.parametrize("default", [None, (), "", 0, frozenset()])
def test_registration_accepts_a_default_that_cannot_change(default: Any) -> None:
    make_app().query(lambda items=default: 1)


@pytest.mark.parametrize("verb", [*VERBS, "prompt"])
def test_registration_refuses_a_class(verb: str) -> None:
    class Price:
        def __init__(self, sku: str) -> None: ...

    with pytest.raises(
        UsageError, match=r"The class Price cannot be registered[\s\S]*app\.query\(shop\.price\)"
    ):
        getattr(make_app(), verb)(Price)


@pytest.mark.parametrize("verb", VERBS)
def test_registration_refuses_ctx_without_annotation(verb: str) -> None:
    def price(sku: str, ctx):  # type: ignore[no-untyped-def]
        return ctx

    app = make_app()
    for function in (price, partial(price, "tea")):
        with pytest.raises(UsageError, match=r"ctx has no annotation[\s\S]*ctx: Context"):
            getattr(app, verb)(name="price")(function)

    def other(ctx: Any) -> Any:
        return ctx

    app.query(other)  # it is declared to be the caller's


def test_app_refuses_a_class_as_middleware() -> None:
    class Layer:
        async def __call__(self, context: Context, following: Any) -> Any: ...

    made: Any = Layer
    with pytest.raises(UsageError, match=r"got the class Layer[\s\S]*Layer\(\.\.\.\)"):
        make_app(middleware=[made])
    with pytest.raises(UsageError, match="got the class Layer"):
        make_app().middleware(made)
    wrong: Any = 7
    with pytest.raises(UsageError, match="got int"):
        make_app().middleware(wrong)


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: limits(bach=1), r"Limits\(\) has no option 'bach'[\s\S]*use batch="),
        (lambda: limits(wholly_new=1), r"Limits\(\) has no option 'wholly_new'\.$"),
        (
            lambda: open_client("http://127.0.0.1:9/rpc", tiemout=5),
            r"connect\(\) has no option 'tiemout'[\s\S]*use timeout=",
        ),
        (
            lambda: open_blocking("http://127.0.0.1:9/mcp", tiemout=5),
            r"has no option 'tiemout'[\s\S]*use timeout=",
        ),
        (lambda: open_client("http://127.0.0.1:9/rpc", protocoll="mcp"), r"use protocol="),
        (lambda: rate(1, brust=2), r"RateLimit\(\) has no option 'brust'[\s\S]*use burst="),
        (
            lambda: rate(1, per="minute"),
            r"per must be a number above 0, got 'minute'[\s\S]*seconds[\s\S]*per=60",
        ),
        (lambda: rate("many"), r"calls must be a number above 0, got 'many'"),
        (lambda: rate(1, per=True), r"per must be a number above 0, got True"),
        (lambda: rate(1, cost={"m": "x"}), r"cost of m must be a number"),
        (lambda: rate(1, key="caller"), r"key must be a function, got str"),
    ],
)
def test_option_that_does_not_exist_or_fit_is_named(
    make: Callable[[], object], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        make()


def test_limits_accept_valid_values() -> None:
    assert Limits(batch=3).batch == 3
    assert Limits() == Limits(batch=50)


async def test_client_call_with_params_as_options_says_where_they_go() -> None:
    app = make_app()
    app.query(name="price")(lambda sku: sku)
    async with (
        asyncio.timeout(PATIENCE),
        connect(app) as client,
        connect(app, protocol="mcp") as agent,
    ):
        calls: list[Any] = [client, agent]
        for each in calls:
            with pytest.raises(
                UsageError, match=r'call\("price", \{"a": \.\.\., "sku": \.\.\.\}\)'
            ):
                await each.call("price", {"a": 1}, sku="tea")
            with pytest.raises(
                UsageError, match=r"call\(\) has no option 'tiemout'[\s\S]*use timeout="
            ):
                await each.call("price", {"sku": "tea"}, tiemout=5)
        with pytest.raises(UsageError, match=r'call_tool\("price", \{"sku": \.\.\.\}\)'):
            await calls[1].call_tool("price", sku="tea")
        with pytest.raises(UsageError, match=r'use call\("price"'):
            calls[0].batch().call("price", sku="tea")
    with connect_sync(app) as blocking:
        plain: Any = blocking
        with pytest.raises(UsageError, match=r'use call\("price", \{"sku": \.\.\.\}\)'):
            plain.call("price", sku="tea")


# --- middleware -----------------------------------------------------------------------------------


async def forgets(context: Context, following: Any) -> Any:
    await following(context)


def plain_layer(context: Context, following: Any) -> Any:
    return {"not": "awaitable"}


def layered(layer: Any, **options: Any) -> App:
    app = make_app(middleware=[layer], **options)
    app.query(name="price")(lambda: 450)
    app.query(name="nothing")(lambda: None)
    return app


@pytest.mark.parametrize(
    ("layer", "why"), [(forgets, "dropped the result of price"), (plain_layer, "not an awaitable")]
)
async def test_middleware_that_returns_nothing_is_an_error_in_development(
    layer: Any, why: str
) -> None:
    app = layered(layer, mode="development")
    refused = error(await app.handle(call("price")))
    assert refused["code"] == -32603
    assert why in refused["data"]["reason"]
    assert layer.__name__ in refused["data"]["reason"]
    assert "call_next(context)" in refused["data"]["reason"]
    async with asyncio.timeout(PATIENCE), speak("http", app, R5) as client:
        told = await client.tool("price")
        assert told["isError"] is True or "error" in told


async def test_middleware_may_return_nothing_for_nothing() -> None:
    assert result(await layered(forgets, mode="development").handle(call("nothing"))) is None
    assert result(await layered(forgets, mode="production").handle(call("price"))) is None


# --- handlers -------------------------------------------------------------------------------------


def unawaited(**options: Any) -> App:
    app = make_app(**options)

    @app.command
    async def pay(ctx: Context) -> str:
        ctx.commit_point()  # the mistake
        return "paid"

    return app


@pytest.mark.filterwarnings("ignore:coroutine.*was never awaited:RuntimeWarning")
async def test_commit_point_without_await_is_an_error_in_development(tmp_path: Path) -> None:
    async with (
        asyncio.timeout(PATIENCE),
        unawaited(ledger=f"sqlite:{tmp_path}/ledger.db", mode="development") as app,
    ):
        refused = error(await app.handle(call("pay", key="k")))
        assert refused["code"] == -32603
        assert "pay called ctx.commit_point() without await" in refused["data"]["reason"]
        assert refused["data"]["ran"] == "unknown"
        again = error(await app.handle(call("pay", key="k")))
        assert again["data"]["type"] == "outcome_unknown"


@pytest.mark.filterwarnings("ignore:coroutine.*was never awaited:RuntimeWarning")
async def test_commit_point_without_await_is_logged_in_production(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async with (
        asyncio.timeout(PATIENCE),
        unawaited(ledger=f"sqlite:{tmp_path}/ledger.db", mode="production") as app,
    ):
        assert result(await app.handle(call("pay", key="k"))) == "paid"
    assert "pay called ctx.commit_point() without await" in caplog.text


async def test_async_handler_that_blocks_the_loop_is_reported_in_dev(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app()
    app.configure(dev=True)

    @app.query
    async def early() -> int:
        burn()
        return 1

    @app.query
    async def late() -> int:
        await asyncio.sleep(0)
        burn()
        await asyncio.sleep(0)
        return 2

    @app.command
    async def stubborn(ctx: Context) -> int:
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.01)
        except TimeoutError:
            burn()
        return 3

    @app.query
    async def patient() -> int:
        await asyncio.sleep(0.3)
        return 4

    with caplog.at_level(logging.WARNING, logger="wirecall"):
        for name, expected in (("early", 1), ("late", 2), ("patient", 4), ("late", 2)):
            assert result(await app.handle(call(name))) == expected
        assert result(await app.handle(call("stubborn", key="k"))) == 3
    told = [
        record.getMessage()
        for record in caplog.records
        if "blocked the event loop" in record.getMessage()
    ]
    assert [text.split()[0] for text in told] == ["early", "late", "stubborn"]
    assert all("await calls that do not block" in text for text in told)


def burn() -> None:
    """Keep the processor busy, as a blocking library does."""
    ends = time.perf_counter() + 0.15
    while time.perf_counter() < ends:
        pass


# --- unknown methods ------------------------------------------------------------------------------


def priced(**options: Any) -> App:
    app = make_app(**options)
    app.query(name="orders.price")(lambda: 1)
    app.query(name="stock")(lambda: 2)
    return app


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("orders.prise", "orders.price"),
        ("price", "orders.price"),
        ("Stock", "stock"),
        ("stok", "stock"),
        ("wholly", None),
    ],
)
async def test_unknown_method_suggests_the_near_name(name: str, near: str | None) -> None:
    app = priced()
    refused = error(await app.handle(call(name)))
    assert refused["code"] == -32601
    assert refused["data"].get("did_you_mean") == near
    assert (f"did you mean {near!r}?" in refused["data"]["reason"]) is (near is not None)
    async with asyncio.timeout(PATIENCE), connect(app) as client:
        with pytest.raises(MethodNotFound) as raised:
            await client.call(name)
        assert (repr(near) in str(raised.value)) is (near is not None)


async def test_unknown_tool_suggests_the_near_name() -> None:
    async with asyncio.timeout(PATIENCE), speak("http", priced(), R5) as client:
        refused = await client.tool_error("orders_prise")
        assert refused["data"]["did_you_mean"] == "orders_price"
        assert "did_you_mean" not in (await client.tool_error("wholly")).get("data", {})


async def test_unknown_methods_of_a_batch_get_few_suggestions() -> None:
    answers = read(await priced().handle(batch(*(call("stok", id=number) for number in range(10)))))
    near = [answer["error"]["data"].get("did_you_mean") for answer in answers]
    assert near == ["stock"] * 3 + [None] * 7


async def test_suggestion_does_not_name_a_method_that_lists_hide() -> None:
    async def verify(token: str) -> Identity:
        return Identity(subject=token, scopes=frozenset({"all"} if token == "admin" else set()))

    app = make_app(auth=Access(verify, resource=RESOURCE, hide=True))
    app.query(name="secret", scopes="all")(lambda: 1)
    for token, near in (("admin", "secret"), ("guest", None)):
        identity = await verify(token)
        reply: Any = app._serving().handle(call("secrit"), Sender(token, identity))
        refused = error(reply)
        assert refused["data"].get("did_you_mean") == near


def test_removed_name_is_suggested() -> None:
    with pytest.raises(UsageError, match=r"There is no method 'stok'"):
        priced().remove("stok")


# --- the ledger -----------------------------------------------------------------------------------


async def test_missing_driver_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    for name in [
        name for name in sys.modules if name.startswith(("wirecall.ledger.redis", "redis."))
    ]:
        monkeypatch.delitem(sys.modules, name)
    app = make_app(ledger="redis://localhost", mode="development")
    opened = []
    opening = app.ledger

    async def counted() -> Any:
        opened.append(1)
        return await opening()

    monkeypatch.setattr(app, "ledger", counted)
    app.command(name="pay")(lambda: 1)
    async with asyncio.timeout(PATIENCE), connect(app) as client:
        with pytest.raises(RpcError) as raised:
            await client.call("pay", key="k")
    assert isinstance(raised.value, InternalError)
    assert raised.value.ran == "no"
    assert "needs a driver" in str(raised.value)
    assert len(opened) == 1


async def test_sqlite_folder_is_made_only_inside_an_existing_one(tmp_path: Path) -> None:
    app = make_app(ledger=f"sqlite:{tmp_path}/tipo/shop/ledger.db")
    with pytest.raises(UsageError, match=r"the folder .*tipo does not exist[\s\S]*mkdir -p"):
        await app.ledger()
    assert not (tmp_path / "tipo").exists()
    async with make_app(ledger=f"sqlite:{tmp_path}/shop/ledger.db") as other:
        await other.ledger()
    assert (tmp_path / "shop").stat().st_mode & 0o777 == 0o700
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) == '["shop"]'
