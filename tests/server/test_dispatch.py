"""The seven steps: concurrency, middleware, time, cancellation, failures."""

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from tests.calls import batch, call, error, make_app, read, result
from tests.mcp.asgi import REVISIONS
from wirecall import App, Context, DomainError, Limits, RpcError, UsageError, connect, jsonrpc
from wirecall.errors import InternalError, InvalidParams, InvalidRequest, rebuilt


class Stage:
    """Handlers that say when they begin and end, and wait until they are told to go on."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.begun: dict[str, asyncio.Event] = {}

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    def has_begun(self, name: str) -> asyncio.Event:
        return self.begun.setdefault(name, asyncio.Event())

    async def act(self, name: str) -> str:
        self.log.append(f"+{name}")
        self.has_begun(name).set()
        await self.gate(name).wait()
        self.log.append(f"-{name}")
        return name


def staged(**options: Any) -> tuple[App, Stage]:
    app, stage = make_app(**options), Stage()
    app.query(name="query")(stage.act)
    app.command(name="command")(stage.act)
    app.query(name="held", execution="sequential")(stage.act)
    app.command(name="free", execution="parallel")(stage.act)

    @app.query
    def plain(name: str) -> str:
        stage.log.append(f"={name}")
        return name

    return app, stage


def entries(*calls: str) -> bytes:
    """ "query:a" is a call of `query` with "a", under the id "a"."""
    return batch(*(call(one.split(":")[0], [one.split(":")[1]], id=one.split(":")[1]) for one in calls))


async def settle() -> None:
    """Let everything that can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)


# --- batches (J4, J13) -------------------------------------------------------------------------------------------------


async def test_queries_run_side_by_side_and_answers_keep_the_order_of_the_input() -> None:
    app, stage = staged()
    task = asyncio.create_task(app.handle(entries("query:a", "plain:p", "query:b", "query:c")))
    for name in "abc":
        await stage.has_begun(name).wait()
    for name in "cba":
        stage.gate(name).set()
        await settle()
    assert [answer["result"] for answer in read(await task)] == ["a", "p", "b", "c"]
    assert stage.log == ["+a", "=p", "+b", "+c", "-c", "-b", "-a"]


async def test_commands_run_one_after_another_in_array_order_while_queries_go_on() -> None:
    app, stage = staged()
    task = asyncio.create_task(app.handle(entries("command:a", "query:q", "command:b", "plain:p", "command:c")))
    await stage.has_begun("q").wait()
    await settle()
    assert stage.log == ["+a", "+q", "=p"]
    stage.gate("b").set()
    await settle()
    assert "+b" not in stage.log
    stage.gate("a").set()
    await stage.has_begun("c").wait()
    stage.gate("c").set()
    stage.gate("q").set()
    assert [answer["result"] for answer in read(await task)] == ["a", "q", "b", "p", "c"]
    assert [entry for entry in stage.log if entry[1] in "abc"] == ["+a", "-a", "+b", "-b", "+c", "-c"]


async def test_an_app_can_be_sequential() -> None:
    app, stage = staged(execution="sequential")
    task = asyncio.create_task(app.handle(entries("query:a", "plain:p", "query:b", "free:c")))
    await stage.has_begun("a").wait()
    await settle()
    assert stage.log == ["+a", "+c"]  # `free` says for itself that it is parallel
    for name in "abc":
        stage.gate(name).set()
    await task
    assert [entry for entry in stage.log if entry[1] != "c"] == ["+a", "-a", "=p", "+b", "-b"]


async def test_an_app_can_be_parallel() -> None:
    app, stage = staged(execution="parallel")
    task = asyncio.create_task(app.handle(entries("command:a", "command:b", "held:c", "held:d")))
    await stage.has_begun("b").wait()
    await stage.has_begun("c").wait()
    await settle()
    assert stage.log == ["+a", "+b", "+c"]  # `held` says for itself that it is sequential
    for name in "abcd":
        stage.gate(name).set()
    assert len(read(await task)) == 4


async def test_no_more_entries_run_side_by_side_than_the_limit() -> None:
    app, stage = staged(limits=Limits(concurrency=2))
    task = asyncio.create_task(app.handle(entries("query:a", "query:b", "query:c", "query:d")))
    await stage.has_begun("b").wait()
    await settle()
    assert stage.log == ["+a", "+b"]
    stage.gate("b").set()
    await stage.has_begun("c").wait()
    await settle()
    assert stage.log == ["+a", "+b", "-b", "+c"]
    for name in "acd":
        stage.gate(name).set()
    assert [answer["result"] for answer in read(await task)] == ["a", "b", "c", "d"]


async def test_a_handler_lives_in_one_task_so_that_its_timeouts_and_groups_work() -> None:
    app = make_app()

    @app.query
    async def timed(n: int) -> str:
        begun_in = asyncio.current_task()
        try:
            async with asyncio.timeout(0.001 * n):
                await asyncio.Event().wait()
        except TimeoutError:
            assert asyncio.current_task() is begun_in
            return f"timed out {n}"
        return "never"

    @app.query
    async def grouped(n: int) -> int:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asyncio.sleep(0, i)) for i in range(n)]
        return sum(task.result() for task in tasks)

    messages = [call("timed" if i % 2 else "grouped", [i], id=i) for i in range(20)]
    answers = read(await app.handle(batch(*messages)))
    assert [answer["result"] for answer in answers] == [f"timed out {i}" if i % 2 else sum(range(i)) for i in range(20)]


async def test_context_variables_of_one_entry_do_not_leak_into_another() -> None:
    app = make_app()
    variable = contextvars.ContextVar("variable", default="clean")

    @app.middleware
    async def mark(ctx: Context, call_next: Any) -> Any:
        token = variable.set(str(ctx.id))
        try:
            return await call_next(ctx)
        finally:
            variable.reset(token)

    @app.query
    async def look() -> str:
        before = variable.get()
        await asyncio.sleep(0)
        return f"{before} {variable.get()}"

    answers = read(await app.handle(batch(*[call("look", id=i) for i in range(5)])))
    assert [answer["result"] for answer in answers] == [f"{i} {i}" for i in range(5)]


@settings(max_examples=100)
@given(
    st.lists(st.sampled_from(["now", "later", "put", "fail", "crash", "nobody", "notify", "junk"]), min_size=1, max_size=12)
)
def test_a_batch_answers_as_its_entries_do_alone(kinds: list[str]) -> None:
    """J4, J5, over handlers that wait and handlers that do not."""
    app = make_app()
    app.query(name="now", notification_allowed=True)(lambda n: n)

    @app.query
    async def later(n: int) -> int:
        await asyncio.sleep(0)
        return n

    @app.command
    async def put(n: int) -> int:
        await asyncio.sleep(0)
        return n

    @app.query
    def fail(n: int) -> int:
        raise DomainError(n, "no")

    @app.query
    async def crash(n: int) -> int:
        raise ValueError

    def entry(kind: str, n: int) -> bytes:
        if kind == "junk":
            return b'{"id":%d}' % n
        return jsonrpc.make_notification("now", [n]) if kind == "notify" else call(kind, [n], id=n)

    async def scenario() -> tuple[list[bytes | None], bytes | None]:
        messages = [entry(kind, n) for n, kind in enumerate(kinds)]
        return [await app.handle(message) for message in messages], await app.handle(batch(*messages))

    alone, together = asyncio.run(scenario())
    assert together == jsonrpc.make_reply(alone, is_batch=True)


# --- middleware (step 3) -----------------------------------------------------------------------------------------------


async def test_middleware_is_called_once_per_entry_alike_for_all_forms() -> None:
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
        batch(call("q", id="x"), jsonrpc.make_notification("q"), b"{}", call("nobody"), call("c", key="k"))
    )
    assert seen == [("q", "single", None), ("q", None, None), ("q", "x", 0), ("q", None, 1), ("c", 1, 4)]
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
    app.query(name="open")(lambda ctx: None)

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
        (rebuilt(RpcError, 40300, "not yours", {"ran": "yes"}), {"ran": "no"}),  # "yes" was said of a call elsewhere
        (InternalError(), {"ran": "no"}),
        (InvalidRequest("no"), {"reason": "no"}),  # its code says it
    ],
)
async def test_a_call_that_its_middleware_refused_has_not_run(refusal: RpcError, data: Any) -> None:
    """Clients hear it, over JSON-RPC and at every revision. The same error after the call has run does not say so."""
    app, effects = make_app(), list[int]()

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


async def test_a_replay_passes_the_middleware_again() -> None:
    """A replay leaks to nobody who may not make the call."""
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
async def test_a_key_beside_an_array_is_refused_and_nothing_runs(as_text: Callable[[bytes], Any]) -> None:
    """Every entry would have it: of two commands the second would be a repetition of the first."""
    app, effects = make_app(), list[int]()
    app.command(name="put")(lambda n: effects.append(n))
    for message in (batch(call("put", {"n": 1})), b"\n " + batch(call("put", {"n": 1}, id=1), call("put", {"n": 2}, id=2))):
        with pytest.raises(UsageError, match=r"single call[\s\S]*why: [\s\S]*fix: .*idempotency_key"):
            await app.handle(as_text(message), key="k")
    assert effects == []
    assert result(await app.handle(call("put", {"n": 3}), key="k")) is None
    assert effects == [3]


async def test_a_middleware_that_breaks_costs_its_own_entry(caplog: pytest.LogCaptureFixture) -> None:
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


# --- failures (J15) ----------------------------------------------------------------------------------------------------


class Hostile:
    def __init__(self, raises: BaseException) -> None:
        self._raises = raises

    def model_dump(self, mode: str) -> Any:
        raise self._raises


endless: list[Any] = []
endless.append(endless)

FAILURES: dict[str, Callable[[], Any]] = {
    "nan": lambda: float("nan"),
    "nested infinity": lambda: {"a": [1, {"b": -float("inf")}], "c": None},
    "object": object,
    "lone surrogate": lambda: "\ud800",
    "recursive": lambda: endless,
    "hostile": lambda: Hostile(ZeroDivisionError()),
    "complex keys": lambda: {1j: 1},
    "generator": lambda: (n for n in range(3)),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("guarded", [False, True])
def test_a_result_that_cannot_be_sent_hurts_no_neighbour(name: str, guarded: bool, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    if guarded:

        @app.middleware
        async def through(ctx: Context, call_next: Any) -> Any:
            return await call_next(ctx)

    app.query(name="fail")(FAILURES[name])
    app.query(name="fine")(lambda: [None, 1.5])
    assert error(app.handle_sync(call("fail"))) == {"code": -32603, "message": "Internal error"}
    answers = read(app.handle_sync(batch(call("fine", id="a"), call("fail", id="b"), call("fine", id="c"))))
    assert [answer.get("result") for answer in answers] == [[None, 1.5], None, [None, 1.5]]
    assert answers[1] == {"jsonrpc": "2.0", "error": {"code": -32603, "message": "Internal error"}, "id": "b"}
    assert any(getattr(record, "correlation_id", None) == "b" for record in caplog.records)


RAISED: list[BaseException] = [
    ValueError("secret"),
    StopIteration("secret"),
    StopAsyncIteration("secret"),
    SystemExit("secret"),
    asyncio.CancelledError("secret"),
    RecursionError("secret"),
    BaseException("secret"),
    TimeoutError("secret"),
]


@pytest.mark.parametrize("raised", RAISED, ids=lambda raised: type(raised).__name__)
@pytest.mark.parametrize("kind", ["query", "command"])
@pytest.mark.parametrize("form", ["plain", "async", "waiting", "context"])
async def test_whatever_a_handler_raises_is_32603_with_no_detail(
    raised: BaseException, kind: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()

    def plain() -> None:
        raise raised

    async def coroutine() -> None:
        raise raised

    async def waiting() -> None:
        await asyncio.sleep(0)
        raise raised

    def context(ctx: Context) -> None:
        raise raised

    function = {"plain": plain, "async": coroutine, "waiting": waiting, "context": context}[form]
    getattr(app, kind)(name="fail")(function)
    app.query(name="fine")(lambda: 1)
    reply = await app.handle(batch(call("fine", id=1), call("fail", id="bad"), call("fine", id=3)))
    answers = read(reply)
    assert b"secret" not in (reply or b"")
    assert answers[1] == {"jsonrpc": "2.0", "error": {"code": -32603, "message": "Internal error"}, "id": "bad"}
    assert [answers[0].get("result"), answers[2].get("result")] == [1, 1]
    logged = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [getattr(record, "correlation_id", None) for record in logged] == ["bad"]
    assert "secret" in caplog.text or type(raised) in (StopIteration, StopAsyncIteration)


@pytest.mark.parametrize("raised", [DomainError(7, "no"), RpcError(8, "nope", {"x": 1}), InvalidParams("too much")])
def test_an_error_a_handler_raises_on_purpose_reaches_the_caller(raised: RpcError) -> None:
    app = make_app()

    @app.query
    def fail() -> None:
        raise raised

    answer = error(app.handle_sync(call("fail")))
    assert (answer["code"], answer["message"], answer.get("data")) == (raised.code, raised.message, raised.data)


def test_an_error_whose_data_cannot_be_sent_is_an_internal_error() -> None:
    app = make_app()

    @app.query
    def fail() -> None:
        raise DomainError(7, "no", {"x": float("nan")})

    assert error(app.handle_sync(call("fail"))) == {"code": -32603, "message": "Internal error"}


def test_a_keyboard_interrupt_is_nobody_s_answer() -> None:
    app = make_app()

    @app.query
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        app.handle_sync(call("stop"))


def test_a_notification_that_fails_is_silent_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()

    @app.query(notification_allowed=True)
    def fail() -> None:
        raise ValueError("noticed")

    assert app.handle_sync(jsonrpc.make_notification("fail")) is None
    assert "noticed" in caplog.text


# --- threads, time, cancellation ---------------------------------------------------------------------------------------


async def test_a_blocking_handler_runs_in_a_thread_beside_the_loop() -> None:
    app = make_app()
    go = threading.Event()

    @app.query(blocking=True)
    def wait() -> bool:
        assert go.wait(10)
        return threading.current_thread() is threading.main_thread()

    @app.query
    async def release() -> None:
        go.set()

    answers = read(await app.handle(batch(call("wait"), call("release"))))
    assert answers[0]["result"] is False
    assert app.handle_sync(call("wait")) is not None  # without a loop there is nothing to keep free


async def test_a_timeout_per_method() -> None:
    app = make_app()

    @app.query(timeout=0.01)
    async def slow() -> None:
        await asyncio.Event().wait()

    @app.command(timeout=0.01)
    async def slow_command() -> None:
        await asyncio.Event().wait()

    @app.query(timeout=10)
    async def own_timeout() -> None:
        raise TimeoutError("the handler's own")

    refused = error(await app.handle(call("slow")))
    assert (refused["code"], refused["data"]) == (50410, {"type": "deadline_exceeded", "ran": "no"})
    refused = error(await app.handle(call("slow_command")))
    assert (refused["code"], refused["data"]["ran"]) == (50410, "unknown")
    assert error(await app.handle(call("own_timeout")))["code"] == -32603


async def test_cancellation_reaches_every_handler_and_leaves_no_task_behind() -> None:
    app = make_app()
    begun, ended = asyncio.Semaphore(0), []

    @app.query
    async def hold(n: int) -> None:
        begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # a clean-up that waits
            ended.append(n)

    @app.command
    async def lane(n: int) -> None:
        await hold(n)

    messages = [call("hold" if n % 2 else "lane", [n], id=n) for n in range(10)]
    task = asyncio.create_task(app.handle(batch(*messages)))
    for _ in range(6):
        await begun.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == [0, 1, 3, 5, 7, 9]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert result(await app.handle(call("rpc.discover")))["openrpc"]
    assert app._dispatcher is not None
    assert app._dispatcher._in_flight == 0


async def test_a_single_call_is_cancelled_with_its_caller() -> None:
    app, stage = staged()
    task = asyncio.create_task(app.handle(call("query", ["a"])))
    await stage.has_begun("a").wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


def leaving(app: App) -> list[str]:
    """Methods that raise GeneratorExit by themselves, in every form; their names."""

    def at_once() -> None:
        raise GeneratorExit

    async def begun() -> None:
        raise GeneratorExit

    async def later() -> None:
        await asyncio.sleep(0)
        raise GeneratorExit

    forms: dict[str, Any] = {"at_once": at_once, "begun": begun, "later": later, "returned": lambda: later()}
    for name, form in forms.items():
        app.query(name=f"query_{name}")(form)
        app.command(name=f"command_{name}")(form)
    app.query(name="query_thread", blocking=True)(at_once)
    app.command(name="command_thread", blocking=True)(at_once)
    return [name for name in app.registry.methods if not name.startswith("rpc.")]


@pytest.mark.parametrize("logged", [False, True])
async def test_a_handler_that_raises_generator_exit_has_failed_like_any_other(
    logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It used to escape from `handle`, as if the coroutine were being closed."""
    if logged:
        caplog.set_level("INFO", "wirecall")
    app = make_app()
    names = leaving(app)
    app.query(name="fine")(lambda: 1)
    async with asyncio.timeout(10):
        for name in names:
            keys = [None, "k"] if name.startswith("command") else [None]
            for message in [call(name, key=key) for key in keys]:
                assert error(await app.handle(message))["code"] == -32603, name
            answers = read(await app.handle(batch(call("fine"), call(name, id=2), call("fine", id=3))))
            assert [answer.get("result") for answer in answers] == [1, None, 1]
        for name in ("query_at_once", "query_begun", "command_at_once", "command_begun"):
            assert error(app.handle_sync(call(name)))["code"] == -32603
        assert error(await app.handle(call("command_later", key="k")))["data"]["type"] == "outcome_unknown"
        await app.aclose()


@pytest.mark.parametrize(("name", "key"), [("query", None), ("command", None), ("command", "k")])
async def test_a_call_can_be_closed_from_outside(name: str, key: str | None) -> None:
    app, go, closed = make_app(), asyncio.Event(), list[str]()

    async def wait() -> int:
        try:
            await go.wait()
        except GeneratorExit:
            closed.append("closed")
            raise
        return 1

    app.query(name="query")(wait)
    app.command(name="command")(wait)
    await app.ledger()
    pending: Any = app.handle(call(name, key=key))
    pending.send(None)
    pending.close()
    assert closed == ([] if key else ["closed"])  # with a key, its effect does not depend on who waits for it
    go.set()
    async with asyncio.timeout(10):
        assert result(await app.handle(call(name, key=key))) == 1
        await app.aclose()


async def test_a_batch_can_be_closed_from_outside() -> None:
    """It used to wait for its workers, which a coroutine that is being closed may not."""
    app, stage = staged()
    pending: Any = app.handle(entries("query:a", "command:b", "query:c", "command:d"))  # d waits for b
    pending.send(None)
    await stage.has_begun("c").wait()
    pending.close()
    async with asyncio.timeout(10):
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)


# --- what reviewers found ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logged", [False, True])
async def test_anything_that_can_be_awaited_is(logged: bool, caplog: pytest.LogCaptureFixture) -> None:
    if logged:
        caplog.set_level("INFO", "wirecall")
    app = make_app()

    async def inner() -> list[int]:
        await asyncio.sleep(0)
        return [1]

    app.query(name="future")(lambda: asyncio.ensure_future(inner()))
    app.query(name="coroutine")(lambda: inner())
    app.query(name="thread", blocking=True)(lambda: inner())
    reply = await app.handle(batch(call("future"), call("coroutine"), call("thread")))
    assert [answer["result"] for answer in read(reply)] == [[1], [1], [1]]


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("raw", [b"", b"{oops", b"NaN", b"1 2"])
def test_a_raw_result_that_is_no_json_costs_its_own_entry(raw: bytes, key: str | None) -> None:
    app = make_app()
    app.query(name="fine")(lambda: 1)
    app.command(name="raw")(lambda: Raw(raw))
    answers = read(app.handle_sync(batch(call("fine", id=1), call("raw", id=2, key=key), call("fine", id=3))))
    assert [answer.get("result") for answer in answers] == [1, None, 1]
    assert answers[1]["error"]["code"] == -32603


def test_a_raw_result_is_written_on_one_line() -> None:
    app = make_app()
    app.query(name="raw")(lambda: Raw(b'{\n"a":\t1}'))
    app.query(name="unset")(lambda: UNSET)
    assert app.handle_sync(call("raw")) == b'{"jsonrpc":"2.0","result":{"a":1},"id":1}'
    assert error(app.handle_sync(call("unset")))["code"] == -32603


@pytest.mark.parametrize("levels", [100, 400, 700, 5000, 100_000])
def test_deep_results_with_null_are_sent_or_refused_and_nothing_is_raised(levels: int) -> None:
    app = make_app()

    @app.query
    def deep() -> Any:
        value: Any = None
        for _ in range(levels):
            value = [value]
        return value

    answer = read(app.handle_sync(call("deep")))
    if "result" in answer:
        assert levels <= 5000  # Python 3.13 has a stack for C of its own, and 10,000 levels in it
    else:
        assert levels > 700 and answer["error"]["code"] == -32603


async def test_a_cancelled_batch_begins_nothing_more_whatever_a_handler_makes_of_it() -> None:
    app, begun, effects = make_app(limits=Limits(concurrency=2)), asyncio.Semaphore(0), list[int]()

    @app.query
    async def stubborn() -> None:
        begun.release()
        try:
            await asyncio.Event().wait()
        except BaseException:
            raise DomainError(1, "never") from None

    app.command(name="effect")(lambda: effects.append(1))
    task = asyncio.create_task(app.handle(batch(call("stubborn"), call("stubborn"), *[call("effect")] * 10)))
    await begun.acquire()
    await begun.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert effects == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_worker_that_joins_does_not_inherit_what_a_middleware_has_set() -> None:
    app, seen, all_begun = make_app(), list[str](), asyncio.Event()
    variable = contextvars.ContextVar("variable", default="clean")

    @app.middleware
    async def mark(ctx: Context, call_next: Any) -> Any:
        seen.append(variable.get())
        variable.set(str(ctx.id))
        if len(seen) == 4:
            all_begun.set()
        await all_begun.wait()
        return await call_next(ctx)

    app.query(name="look")(lambda: 1)
    await app.handle(batch(*[call("look", id=i) for i in range(4)]))
    assert seen == ["clean"] * 4


async def test_syntax_outranks_busy_and_a_batch_larger_than_the_limit_is_served_when_nobody_waits() -> None:
    app, stage = staged(limits=Limits(in_flight=2))
    held = asyncio.create_task(app.handle(call("query", ["a"])))
    await stage.has_begun("a").wait()
    assert error(await app.handle(b"{broken"))["code"] == -32700
    assert error(await app.handle(b"[]"))["code"] == -32600
    assert {answer["error"]["code"] for answer in read(await app.handle(entries("plain:x", "plain:y")))} == {42910}
    stage.gate("a").set()
    await held
    assert len(read(await app.handle(entries("plain:x", "plain:y", "plain:z")))) == 3


async def test_commands_whose_callers_left_count_as_in_flight() -> None:
    app, stage = staged(limits=Limits(in_flight=1))
    caller = asyncio.create_task(app.handle(call("command", {"name": "a"}, key="k")))
    await stage.has_begun("a").wait()
    caller.cancel()
    await asyncio.wait([caller])
    assert error(await app.handle(call("plain", ["x"])))["code"] == 42910
    stage.gate("a").set()
    await settle()
    assert result(await app.handle(call("plain", ["x"]))) == "x"
