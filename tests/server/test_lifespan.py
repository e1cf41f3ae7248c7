"""The lifespan of an app: entered once before the first call, with every kind of server, and left
after the last one.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from tests.calls import call, error, make_app, result
from tests.cli import running, serving, wirecall
from tests.mcp.asgi import Exchange
from tests.transports import ask
from wirecall import App, Context, Limits, UsageError, connect, connect_sync, testing
from wirecall.errors import OtherLoop, StartFailed
from wirecall.transports.stdio import serve_streams

PATIENCE = 60.0


class Pools:
    """A lifespan that counts, and the log of everything that happens in its app."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.held: asyncio.Event | None = None  # if it is set, `__aenter__` waits for it
        self.begun = asyncio.Event()
        self.task: asyncio.Task[Any] | None = None

    @asynccontextmanager
    async def lifespan(self, app: App) -> AsyncIterator[dict[str, str]]:
        self.log.append(f"enter {app.name}")
        self.task = asyncio.current_task()
        self.begun.set()
        if self.held is not None:
            await self.held.wait()
        try:
            yield {"pool": f"of {app.name}"}
        finally:
            assert asyncio.current_task() is self.task
            self.log.append("leave")

    def app(self, **options: Any) -> App:
        app = make_app(lifespan=self.lifespan, **options)

        @app.query
        def pool(ctx: Context) -> str:
            self.log.append("call")
            return str(ctx.state["pool"])

        @app.command
        def put(ctx: Context) -> str:
            self.log.append("call")
            return str(ctx.state["pool"])

        @app.tool
        async def tool(ctx: Context) -> str:
            self.log.append("call")
            return str(ctx.state["pool"])

        return app


async def through_handle(app: App) -> list[Any]:
    async with app:
        return [
            result(await app.handle(call("pool"))),
            result(app.handle_sync(call("put", key="k"))),
        ]


async def through_connect(app: App) -> list[Any]:
    async with connect(app) as client:
        return [await client.call("pool"), await client.call("put")]


async def through_testing(app: App) -> list[Any]:
    async with testing.client(app, protocol="mcp") as client:
        return [(await client.call_tool(name)).text for name in ("tool", "put")]


async def through_two_clients(app: App) -> list[Any]:
    async with connect(app) as first:
        async with connect(app, protocol="mcp") as second:
            told = [(await second.call_tool("tool")).text]
        return [*told, await first.call("pool")]


async def through_asgi(app: App) -> list[Any]:
    served = app.asgi()
    answers = list[Any]()
    steps: list[str] = ["startup", "shutdown"]

    async def receive() -> Any:
        step = steps.pop(0)
        if step == "shutdown":
            for method in ("pool", "put"):
                answers.append((await ask(served, body=call(method))).json["result"])
        return {"type": f"lifespan.{step}"}

    async def send(message: Any) -> None:
        assert message["type"].endswith(".complete"), message

    await served({"type": "lifespan"}, receive, send)
    return answers


async def through_stdio(app: App) -> list[Any]:
    reader, stdin = os.pipe()
    stdout, writer = os.pipe()
    os.write(stdin, call("pool", id=1) + b"\n" + call("put", id=2) + b"\n")
    os.close(stdin)
    await serve_streams(app._connect, reader, writer, startup=app._enter, cleanup=app.aclose)
    os.close(reader)
    os.close(writer)
    with os.fdopen(stdout, "rb") as answers:
        return [
            each["result"]
            for each in sorted(map(json.loads, answers), key=lambda each: int(each["id"]))
        ]


@pytest.mark.parametrize(
    "way",
    [
        through_handle,
        through_connect,
        through_testing,
        through_two_clients,
        through_asgi,
        through_stdio,
    ],
)
async def test_lifespan_is_entered_once_before_the_first_call_and_left_after_the_last(
    way: Callable[[App], Any],
) -> None:
    pools = Pools()
    async with asyncio.timeout(PATIENCE):
        assert await way(pools.app()) == ["of test"] * 2
    assert pools.log == ["enter test", "call", "call", "leave"]


def test_lifespan_is_entered_and_left_by_a_blocking_client() -> None:
    pools = Pools()
    with connect_sync(pools.app()) as client:
        assert client.call("pool") == "of test"
    assert pools.log == ["enter test", "call", "leave"]


async def test_mounted_app_enters_the_lifespan_at_its_first_request_and_others_wait() -> None:
    """Starlette does not forward the lifespan protocol to a mount, so the first request is the
    first sign of life.
    """
    pools = Pools()
    pools.held = asyncio.Event()
    app = pools.app()
    served = app.asgi()
    async with asyncio.timeout(PATIENCE):
        assert (await ask(served, "/healthz", method="GET")).status == 200
        assert pools.log == []
        requests = [asyncio.create_task(ask(served, body=call("pool", id=i))) for i in range(3)]
        await pools.begun.wait()
        requests[0].cancel()  # the call that began it: the others still get their answers
        pools.held.set()
        assert [(await request).json["result"] for request in requests[1:]] == ["of test"] * 2
        await app.aclose()
    assert pools.log == ["enter test", "call", "call", "leave"]


async def test_mounted_app_whose_lifespan_fails_refuses_requests_and_tries_again() -> None:
    failures = [ConnectionError("the database at 10.0.0.7 is away")]

    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[int]:
        if failures:
            raise failures.pop()
        yield 7

    app = make_app(lifespan=lifespan)
    app.query(name="state")(state_of)
    served = app.asgi()
    async with asyncio.timeout(PATIENCE):
        refused = await ask(served, body=call("state"))
        assert refused.status == 503
        assert b"10.0.0.7" not in refused.body
        assert (await ask(served, body=call("state"))).json["result"] == 7
        await app.aclose()


async def test_starlette_mounts_an_app_and_its_first_request_starts_it() -> None:
    pools = Pools()
    app = pools.app()
    web = Starlette(routes=[Mount("/shop", app.asgi())])
    local = {"host": "localhost", "content-type": "application/json"}
    async with asyncio.timeout(PATIENCE), web.router.lifespan_context(web):
        assert pools.log == []
        for _ in range(2):
            asked = Exchange(web, "POST", local, call("pool"), path="/shop/rpc")
            assert (await asked.json())["result"] == "of test"
    assert pools.log == ["enter test", "call", "call"]
    await app.aclose()
    assert pools.log[-1] == "leave"


def state_of(ctx: Context) -> Any:
    return ctx.state


async def test_lifespan_ends_after_a_query_in_flight() -> None:
    pools = Pools()
    app = pools.app()
    begun = asyncio.Event()
    go = asyncio.Event()

    @app.query
    async def slow() -> str:
        begun.set()
        await go.wait()
        pools.log.append("slow")
        return "done"

    async with asyncio.timeout(PATIENCE):
        answering = asyncio.create_task(app.handle(call("slow")))
        await begun.wait()
        closing = asyncio.create_task(app.aclose())
        await asyncio.sleep(0)
        go.set()
        await closing
        assert result(await answering) == "done"
    assert pools.log == ["enter test", "slow", "leave"]


async def test_closed_app_enters_the_lifespan_again() -> None:
    pools = Pools()
    app = pools.app()
    for _ in range(2):
        assert result(await app.handle(call("pool"))) == "of test"
        await app.aclose()
    await app.aclose()
    assert pools.log == ["enter test", "call", "leave"] * 2


def test_lifespan_works_in_one_loop_after_another_and_ends_with_each_loop() -> None:
    pools = Pools()
    app = pools.app()
    for _ in range(2):
        assert result(asyncio.run(app.handle(call("pool")))) == "of test"
    assert pools.log == ["enter test", "call", "leave"] * 2


async def test_second_loop_while_the_first_is_alive_is_refused() -> None:
    app = Pools().app()
    async with app:
        with pytest.raises(OtherLoop):
            await asyncio.to_thread(asyncio.run, app.handle(call("pool")))


def test_handle_sync_says_how_the_app_is_started() -> None:
    pools = Pools()
    with pytest.raises(UsageError, match="async with app"):
        pools.app().handle_sync(call("pool"))
    assert pools.log == []


async def test_failure_to_enter_has_its_own_message_and_the_cause() -> None:
    cause = ConnectionError("no route to the database")

    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[None]:
        raise cause
        yield

    app = make_app(lifespan=lifespan)
    with pytest.raises(StartFailed, match="ConnectionError: no route to the database") as failed:
        async with app:
            raise AssertionError("it was not entered")
    assert failed.value.__cause__ is cause
    with pytest.raises(StartFailed, match="no route"):
        async with connect(app):
            raise AssertionError("it was not entered")


@pytest.mark.parametrize("stubborn", [False, True])
async def test_lifespan_that_never_returns_ends_at_its_deadline(stubborn: bool) -> None:
    go = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[None]:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                if not stubborn:
                    raise
        yield

    app = make_app(lifespan=lifespan, limits=Limits(start_time=1))
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(StartFailed, match=r"not entered within 1 s \(Limits.start_time\)"):
            await app.handle(call("rpc.discover"))
        go.set()


async def test_function_that_is_not_a_context_manager_is_explained() -> None:
    async def lifespan(_: App) -> AsyncIterator[None]:
        yield

    wrong: Callable[[App], Any] = lifespan
    with pytest.raises(StartFailed, match="@contextlib"):
        await make_app(lifespan=wrong).handle(call("rpc.discover"))


async def test_start_that_is_cancelled_is_cleaned_up() -> None:
    pools = Pools()
    pools.held = asyncio.Event()
    app = pools.app()
    async with asyncio.timeout(PATIENCE):
        opening = asyncio.create_task(app.__aenter__())
        await pools.begun.wait()
        assert pools.task is not None
        opening.cancel()
        await asyncio.wait({opening, pools.task})
    assert pools.task.cancelled()
    pools.held.set()
    assert result(await app.handle(call("pool"))) == "of test"
    await app.aclose()


async def test_client_that_remains_open_starts_a_closed_app_again() -> None:
    pools = Pools()
    app = pools.app()
    async with connect(app, protocol="mcp") as client:
        assert (await client.call_tool("tool")).text == "of test"
        await app.aclose()
        assert (await client.call_tool("tool")).text == "of test"
        async with connect(app) as other:
            assert await other.call("pool") == "of test"
    await app.aclose()
    assert pools.log == ["enter test", "call", "leave", "enter test", "call", "call", "leave"]


async def test_calls_that_wait_for_a_start_fail_if_it_is_given_up() -> None:
    pools = Pools()
    pools.held = asyncio.Event()
    app = pools.app()
    async with asyncio.timeout(PATIENCE):
        opening = asyncio.create_task(app.__aenter__())
        await pools.begun.wait()
        waiting = asyncio.create_task(app.handle(call("pool")))
        await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(StartFailed, match="cancelled"):
            await waiting


async def test_failure_at_the_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[None]:
        yield
        raise ValueError("the pool has leaks")

    async with make_app(lifespan=lifespan):
        pass
    assert "the lifespan failed at its end" in caplog.text
    assert "the pool has leaks" in caplog.text


async def test_lifespan_that_ends_early_makes_the_app_not_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = asyncio.Event()
    lives = list[Any]()

    async def watch() -> None:
        await broken.wait()
        raise ConnectionError("the subscription broke")

    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[str]:
        async with asyncio.TaskGroup() as group:
            watching = group.create_task(watch())
            lives.append(asyncio.current_task())
            yield "state"
            watching.cancel()

    app = make_app(lifespan=lifespan)
    app.query(name="state")(state_of)
    served = app.asgi()
    async with asyncio.timeout(PATIENCE), app:
        assert result(await app.handle(call("state"))) == "state"
        assert (await ask(served, "/readyz", method="GET")).json == {"status": "ready"}
        broken.set()
        await asyncio.wait(lives)
        assert "the lifespan has ended while the app serves" in caplog.text
        told = await ask(served, "/readyz", method="GET")
        assert told.json == {"status": "not ready", "reason": "the lifespan of the app has ended"}


async def test_middleware_keeps_its_own_values_beside_the_state() -> None:
    async def named(ctx: Context, call_next: Any) -> Any:
        ctx.values["user"] = "ada"
        return await call_next(ctx)

    pools = Pools()
    app = make_app(lifespan=pools.lifespan, middleware=[named])
    app.query(name="both")(partial(both))
    async with app:
        assert result(await app.handle(call("both"))) == [{"pool": "of test"}, {"user": "ada"}]
        assert result(await app.handle(call("both"))) == [{"pool": "of test"}, {"user": "ada"}]


def both(ctx: Context) -> list[Any]:
    return [ctx.state, ctx.values]


# --- servers in separate processes ----------------------------------------------------------------

SHOP = """
import asyncio, sys
from contextlib import asynccontextmanager
from wirecall import App, Context

@asynccontextmanager
async def lifespan(app):
    print("entering", file=sys.stderr, flush=True)
    {entering}
    yield {{"pool": 7}}
    print("left", file=sys.stderr, flush=True)

app = App("shop", lifespan=lifespan)

@app.query
def pool(ctx: Context) -> int:
    return ctx.state["pool"]
"""


def shop(folder: Path, entering: str = "pass") -> str:
    (folder / "shop.py").write_text(SHOP.format(entering=entering))
    return str(folder / "shop.py")


@pytest.mark.parametrize(
    "words",
    [
        ["--http", "127.0.0.1:0"],
        ["--stdio"],
        ["--http", "127.0.0.1:0", "--workers", "2", "--ledger", "sqlite:ledger.db"],
    ],
)
def test_server_that_cannot_start_says_why_and_exits_with_1(
    tmp_path: Path, words: list[str]
) -> None:
    run = wirecall(
        "serve",
        shop(tmp_path, "raise ConnectionError('the database is away')"),
        *words,
        cwd=tmp_path,
    )
    assert run.returncode == 1
    assert b"The app cannot start" in run.stderr
    assert b"ConnectionError: the database is away" in run.stderr
    assert b"Traceback" not in run.stderr
    assert run.stdout == b""


@pytest.mark.parametrize("server", ["granian", "uvicorn"])
def test_lifespan_of_a_server_over_http(tmp_path: Path, server: str) -> None:
    with running("serve", shop(tmp_path), "--http", "127.0.0.1:0", "--server", server) as run:
        run.wait_for("entering")
        address = run.wait_for("Listening on").split()[-1]
        assert wirecall("call", address, "pool").stdout == b"7\n"
        assert run.end()[0] == 0
        assert "".join(run.said).count("entering") == 1


def test_lifespan_is_separate_in_each_worker(tmp_path: Path) -> None:
    with serving(
        shop(tmp_path), "--workers", "2", "--ledger", f"sqlite:{tmp_path / 'ledger.db'}"
    ) as address:
        assert wirecall("call", address, "pool").stdout == b"7\n"


def test_lifespan_is_entered_and_left_by_a_call_from_the_command_line(tmp_path: Path) -> None:
    run = wirecall("call", shop(tmp_path), "pool")
    assert (run.returncode, run.stdout) == (0, b"7\n")
    assert [line for line in run.stderr.splitlines() if line in (b"entering", b"left")] == [
        b"entering",
        b"left",
    ]


IGNORES = """
import asyncio
from contextlib import asynccontextmanager
from wirecall import App, Limits

@asynccontextmanager
async def lifespan(app):
    while True:
        try:
            await asyncio.sleep(600)
        except BaseException:
            pass
    yield

App("shop", lifespan=lifespan, limits=Limits(start_time=1)).run({options}, grace=0.1)
"""


@pytest.mark.parametrize(
    "options", ['"http", port=0', '"http", port=0, server="uvicorn"', '"stdio"']
)
def test_start_that_ignores_its_cancellation_does_not_keep_the_process_alive(options: str) -> None:
    """Such as a loop that tries to reach a database again after every exception."""
    code = IGNORES.format(options=options)
    run = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 1
    assert (
        b"The app cannot start: the lifespan was not entered within 1 s (Limits.start_time)"
        in run.stderr
    )


@pytest.mark.parametrize("words", [["--http", "127.0.0.1:0"], ["--stdio"]])
def test_signal_stops_a_start_that_hangs(tmp_path: Path, words: list[str]) -> None:
    with running("serve", shop(tmp_path, "await asyncio.Event().wait()"), *words) as run:
        run.wait_for("entering")
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(PATIENCE) in (0, 130)


async def test_errors_of_calls_are_not_errors_of_the_lifespan() -> None:
    pools = Pools()
    app = pools.app()

    @app.query
    def fails() -> None:
        raise ValueError("no")

    async with app:
        assert error(await app.handle(call("fails")))["code"] == -32603
        assert result(await app.handle(call("pool"))) == "of test"
    assert pools.log == ["enter test", "call", "leave"]


def test_types() -> None:
    manager: Callable[[App], AbstractAsyncContextManager[object]] = Pools().lifespan
    App("x", lifespan=manager)
