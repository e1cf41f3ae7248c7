"""The seven steps: failures, threads, time and cancellation."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET, Raw

from tests.calls import batch, call, error, make_app, read, result
from tests.server.stage import entries, settle, staged
from wirecall import App, Context, DomainError, Limits, RpcError, jsonrpc
from wirecall.errors import InvalidParams

# --- failures (J15) -------------------------------------------------------------------------------


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
    "object": lambda: object(),
    "lone surrogate": lambda: "\ud800",
    "recursive": lambda: endless,
    "hostile": lambda: Hostile(ZeroDivisionError()),
    "complex keys": lambda: {1j: 1},
    "generator": lambda: (n for n in range(3)),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("guarded", [False, True])
def test_result_that_cannot_be_sent_does_not_affect_its_neighbours(
    name: str, guarded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    if guarded:

        @app.middleware
        async def through(ctx: Context, call_next: Any) -> Any:
            return await call_next(ctx)

    app.query(name="fail")(FAILURES[name])
    app.query(name="fine")(lambda: [None, 1.5])
    assert error(app.handle_sync(call("fail"))) == {"code": -32603, "message": "Internal error"}
    answers = read(
        app.handle_sync(batch(call("fine", id="a"), call("fail", id="b"), call("fine", id="c")))
    )
    assert [answer.get("result") for answer in answers] == [[None, 1.5], None, [None, 1.5]]
    assert answers[1] == {
        "jsonrpc": "2.0",
        "error": {"code": -32603, "message": "Internal error"},
        "id": "b",
    }
    assert any(getattr(record, "correlation_id", None) == "b" for record in caplog.records)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [1, 2])
def test_number_that_json_does_not_have_is_logged_under_its_method(
    number: float, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    app.query(name="odd")(lambda: number)
    entries = [call("odd", id=id) for id in range(count)]
    app.handle_sync(entries[0] if count == 1 else batch(*entries))
    assert [getattr(record, "method", None) for record in caplog.records] == ["odd"] * count


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
@pytest.mark.parametrize("kind", ["query", "command", "unrecorded"])
@pytest.mark.parametrize("form", ["plain", "async", "waiting", "context"])
async def test_exception_of_a_handler_is_32603_without_detail(
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

    function: Any = {"plain": plain, "async": coroutine, "waiting": waiting, "context": context}[
        form
    ]
    if kind == "query":
        app.query(name="fail")(function)
    else:
        app.command(name="fail", key="auto" if kind == "command" else "off")(function)
    app.query(name="fine")(lambda: 1)
    reply = await app.handle(batch(call("fine", id=1), call("fail", id="bad"), call("fine", id=3)))
    answers = read(reply)
    assert b"secret" not in (reply or b"")
    failed: dict[str, Any] = {"code": -32603, "message": "Internal error"}
    if kind == "command":  # its record says that it may have taken effect
        failed["data"] = {"ran": "unknown"}
    assert answers[1] == {"jsonrpc": "2.0", "error": failed, "id": "bad"}
    assert [answers[0].get("result"), answers[2].get("result")] == [1, 1]
    logged = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [getattr(record, "correlation_id", None) for record in logged] == ["bad"]
    assert "secret" in caplog.text or type(raised) in (StopIteration, StopAsyncIteration)


@pytest.mark.parametrize(
    "raised", [DomainError(7, "no"), RpcError(8, "nope", {"x": 1}), InvalidParams("too much")]
)
def test_error_that_a_handler_raises_on_purpose_reaches_the_caller(raised: RpcError) -> None:
    app = make_app()

    @app.query
    def fail() -> None:
        raise raised

    answer = error(app.handle_sync(call("fail")))
    assert (answer["code"], answer["message"], answer.get("data")) == (
        raised.code,
        raised.message,
        raised.data,
    )


def test_error_whose_data_cannot_be_sent_is_an_internal_error() -> None:
    app = make_app()

    @app.query
    def fail() -> None:
        raise DomainError(7, "no", {"x": float("nan")})

    assert error(app.handle_sync(call("fail"))) == {"code": -32603, "message": "Internal error"}


def test_keyboard_interrupt_is_not_answered() -> None:
    app = make_app()

    @app.query
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        app.handle_sync(call("stop"))


def test_notification_that_fails_is_silent_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()

    @app.query(notification_allowed=True)
    def fail() -> None:
        raise ValueError("noticed")

    assert app.handle_sync(jsonrpc.make_notification("fail")) is None
    assert "noticed" in caplog.text


# --- threads, time, cancellation ------------------------------------------------------------------


async def test_blocking_handler_runs_in_a_thread_beside_the_loop() -> None:
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


async def test_timeout_per_method() -> None:
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
    reason = "slow took longer than its timeout of 0.01 s"
    assert (refused["code"], refused["data"]) == (
        50410,
        {"type": "deadline_exceeded", "reason": reason, "ran": "no"},
    )
    refused = error(await app.handle(call("slow_command")))
    assert (refused["code"], refused["data"]["ran"]) == (50410, "unknown")
    assert error(await app.handle(call("own_timeout")))["code"] == -32603


async def test_cancellation_reaches_every_handler_and_leaves_no_task_behind() -> None:
    app = make_app()
    begun = asyncio.Semaphore(0)
    ended = []

    @app.query
    async def hold(n: int) -> None:
        begun.release()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # a clean-up that waits
            ended.append(n)

    @app.command(key="off")
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


async def test_single_call_is_cancelled_with_its_caller() -> None:
    app, stage = staged()
    task = asyncio.create_task(app.handle(call("query", ["a"])))
    await stage.has_begun("a").wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == {asyncio.current_task()}


def leaving(app: App) -> list[str]:
    """Add methods of every form that raise GeneratorExit; return their names."""

    def at_once() -> None:
        raise GeneratorExit

    async def begun() -> None:
        raise GeneratorExit

    async def later() -> None:
        await asyncio.sleep(0)
        raise GeneratorExit

    forms: dict[str, Any] = {
        "at_once": at_once,
        "begun": begun,
        "later": later,
        "returned": lambda: later(),
    }
    for name, form in forms.items():
        app.query(name=f"query_{name}")(form)
        app.command(name=f"command_{name}")(form)
    app.query(name="query_thread", blocking=True)(at_once)
    app.command(name="command_thread", blocking=True)(at_once)
    return [name for name in app.registry.methods if not name.startswith("rpc.")]


@pytest.mark.parametrize("logged", [False, True])
async def test_handler_that_raises_generator_exit_has_failed_like_any_other(
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
            answers = read(
                await app.handle(batch(call("fine"), call(name, id=2), call("fine", id=3)))
            )
            assert [answer.get("result") for answer in answers] == [1, None, 1]
        for name in ("query_at_once", "query_begun", "command_at_once", "command_begun"):
            assert error(app.handle_sync(call(name)))["code"] == -32603
        assert (
            error(await app.handle(call("command_later", key="k")))["data"]["type"]
            == "outcome_unknown"
        )
        await app.aclose()


@pytest.mark.parametrize(
    ("name", "key"), [("query", None), ("unrecorded", None), ("command", None), ("command", "k")]
)
async def test_call_can_be_closed_from_outside(name: str, key: str | None) -> None:
    app = make_app()
    go = asyncio.Event()
    closed = list[str]()

    async def wait() -> int:
        try:
            await go.wait()
        except GeneratorExit:
            closed.append("closed")
            raise
        return 1

    app.query(name="query")(wait)
    app.command(name="unrecorded", key="off")(wait)
    app.command(name="command")(wait)
    await app.ledger()
    pending: Any = app.handle(call(name, key=key))
    pending.send(None)
    pending.close()
    # An effect does not depend on its caller's patience.
    assert closed == ([] if name == "command" else ["closed"])
    go.set()
    async with asyncio.timeout(10):
        assert result(await app.handle(call(name, key=key))) == 1
        await app.aclose()


async def test_batch_can_be_closed_from_outside() -> None:
    """It used to wait for its workers, which a coroutine that is being closed may not."""
    app, stage = staged(key="off")
    # D waits for b.
    pending: Any = app.handle(entries("query:a", "command:b", "query:c", "command:d"))
    pending.send(None)
    await stage.has_begun("c").wait()
    pending.close()
    async with asyncio.timeout(10):
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)


# --- what reviewers found -------------------------------------------------------------------------


@pytest.mark.parametrize("logged", [False, True])
async def test_awaitable_of_any_kind_is_awaited(
    logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
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
def test_raw_result_that_is_not_json_fails_only_its_own_entry(raw: bytes, key: str | None) -> None:
    app = make_app()
    app.query(name="fine")(lambda: 1)
    app.command(name="raw")(lambda: Raw(raw))
    answers = read(
        app.handle_sync(batch(call("fine", id=1), call("raw", id=2, key=key), call("fine", id=3)))
    )
    assert [answer.get("result") for answer in answers] == [1, None, 1]
    assert answers[1]["error"]["code"] == -32603


def test_raw_result_is_written_on_one_line() -> None:
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
        assert levels <= 5000  # Python 3.13 has a separate stack for C, with 10,000 levels
    else:
        assert levels > 700 and answer["error"]["code"] == -32603


async def test_cancelled_batch_starts_no_more_entries_even_if_a_handler_swallows_the_cancel() -> (
    None
):
    app = make_app(limits=Limits(concurrency=2))
    begun = asyncio.Semaphore(0)
    effects = list[int]()

    @app.query
    async def stubborn() -> None:
        begun.release()
        try:
            await asyncio.Event().wait()
        except BaseException:
            raise DomainError(1, "never") from None

    app.command(name="effect")(lambda: effects.append(1))
    task = asyncio.create_task(
        app.handle(batch(call("stubborn"), call("stubborn"), *[call("effect")] * 10))
    )
    await begun.acquire()
    await begun.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert effects == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_joining_worker_does_not_inherit_context_variables_of_middleware() -> None:
    app = make_app()
    seen = list[str]()
    all_begun = asyncio.Event()
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


async def test_syntax_outranks_busy_and_an_idle_app_serves_a_batch_larger_than_the_limit() -> None:
    app, stage = staged(limits=Limits(in_flight=2))
    held = asyncio.create_task(app.handle(call("query", ["a"])))
    await stage.has_begun("a").wait()
    assert error(await app.handle(b"{broken"))["code"] == -32700
    assert error(await app.handle(b"[]"))["code"] == -32600
    assert {
        answer["error"]["code"] for answer in read(await app.handle(entries("plain:x", "plain:y")))
    } == {42910}
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


async def test_log_warns_once_about_a_function_that_blocks_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("wirecall.server.dispatch.BLOCKS", -1.0)  # every function takes longer
    app = make_app()
    app.configure(dev=True)
    app.query(name="plain")(lambda: 1)
    app.query(name="thread", blocking=True)(lambda: 2)
    app.command(name="put")(lambda: 3)

    @app.query
    async def waits() -> int:
        return 4

    for method in ("plain", "plain", "thread", "waits"):
        await app.handle(call(method))
    for key in "ab":
        await app.handle(call("put", key=key))
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(" ")[0] for text in told] == ["plain", "waits", "put"]
    assert all("blocking=True" in text for text in told)
    caplog.clear()
    app = make_app()  # not in development with `wirecall dev`
    app.query(name="plain")(lambda: 1)
    await app.handle(call("plain"))
    assert caplog.records == []
