"""The life of a command, on the ledger in memory: interruptions, refusals, odd handlers, stopping."""

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.calls import batch, call, error, lose_completions, make_app, read, result
from tests.clock import LoopClock
from wirecall import App, CannotTell, Context, DomainError, Done, NotDone, RpcError, UsageError
from wirecall.errors import Busy, InternalError, InvalidParams
from wirecall.ledger.base import Claim, LedgerDown, Record, RecordId, State
from wirecall.ledger.memory import MemoryLedger


async def state_of(app: App, key: str = "k", method: str = "put") -> State | None:
    record = await (await app.ledger()).get(RecordId("", method, key))
    return record.state if record else None


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# --- handlers of every kind -----------------------------------------------------------------------


async def test_sync_handler_that_returns_an_awaitable_is_shielded_like_a_coroutine() -> None:
    app = make_app()
    begun = asyncio.Event()
    go = asyncio.Event()
    effects = list[int]()

    async def inner() -> int:
        begun.set()
        await go.wait()
        effects.append(1)
        return 1

    app.command(name="put")(lambda: inner())
    caller = asyncio.create_task(app.handle(call("put", key="k")))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go.set()
    assert result(await app.handle(call("put", key="k"))) == 1
    assert effects == [1]
    await app.aclose()


async def test_handler_that_waits_in_any_way_gets_its_own_task() -> None:
    """Wirecall reads Python's bytecode, which differs by version: 3.12 inlines comprehensions."""
    app = make_app()
    tasks = dict[str, Any]()

    class Waits:
        def __init__(self, name: str) -> None:
            self.name = name

        async def __aenter__(self) -> None:
            tasks[self.name] = asyncio.current_task()
            await asyncio.sleep(0)

        async def __aexit__(self, *_: object) -> None:
            pass

        async def __aiter__(self) -> AsyncIterator[int]:
            async with self:
                yield 1

    @app.command(name="with")
    async def enters() -> None:
        async with Waits("with"):
            pass

    @app.command(name="for")
    async def loops() -> None:
        async for _ in Waits("for"):
            pass

    @app.command
    async def comprehension() -> list[int]:
        return [n async for n in Waits("comprehension")]

    @app.command(name="finally")
    async def ends() -> None:
        try:
            return
        finally:
            await Waits("finally").__aenter__()

    names = ["with", "for", "comprehension", "finally"]
    for name in names:
        read(await app.handle(call(name, key="k")))
    assert list(tasks) == names
    assert len({asyncio.current_task(), *tasks.values()}) == 5


async def test_sync_handler_in_a_thread_may_return_a_coroutine() -> None:
    app = make_app()
    effects = list[int]()

    @app.command
    def put(ctx: Context) -> Any:
        async def inner() -> int:
            await ctx.commit_point()
            effects.append(1)
            return len(effects)

        return inner()

    assert result(await app.handle(call("put", key="k"))) == 1
    assert result(await app.handle(call("put", key="k"))) == 1
    assert effects == [1]


async def test_sync_handler_with_a_commit_point_runs_in_a_thread() -> None:
    app = make_app()

    @app.command
    def put(fail: bool, ctx: Context) -> str:
        if fail:
            raise ValueError
        ctx.commit_point()
        return threading.current_thread().name

    assert app.registry.methods["put"].blocking
    refused = error(await app.handle(call("put", {"fail": True}, key="a")))
    assert (refused["code"], refused["data"]["ran"]) == (-32603, "no")
    assert await state_of(app, "a") is None
    assert result(await app.handle(call("put", {"fail": False}, key="b"))) != "MainThread"
    assert result(app.handle_sync(call("put", {"fail": False}, key="c"))) == "MainThread"


@pytest.mark.parametrize("key", [None, "k"])
async def test_sync_handler_in_a_thread_may_raise_stop_iteration(key: str | None) -> None:
    """A future cannot carry that exception: asyncio's own to_thread waits indefinitely."""
    app = make_app()
    app.command(name="put", blocking=True)(lambda: next(iter(())))
    async with asyncio.timeout(60):
        assert error(await app.handle(call("put", key=key)))["code"] == -32603
    await app.aclose()


async def test_reconcile_function_in_a_thread_may_raise_stop_iteration() -> None:
    app = make_app()
    app.command(
        name="put", on_crash="reconcile", reconcile=lambda n: next(iter(())), blocking=True
    )(lambda n: n)
    await vanished(app, "reconcile")
    async with asyncio.timeout(60):
        assert error(await app.handle(call("put", {"n": 1}, key="k")))["data"]["ran"] == "unknown"
    await app.aclose()


def test_commit_point_of_another_object_is_not_ours() -> None:
    class Database:
        def commit_point(self) -> None: ...

    app = make_app()
    effects = list[int]()
    database = Database()

    @app.command
    def put() -> None:
        database.commit_point()
        effects.append(1)
        raise ValueError

    assert error(app.handle_sync(call("put", key="k")))["data"]["ran"] == "unknown"
    assert error(app.handle_sync(call("put", key="k")))["code"] == 50910
    assert effects == [1]


def test_commit_point_without_a_key_does_nothing_and_does_not_warn() -> None:
    app = make_app()

    @app.command
    def put(ctx: Context) -> int:
        ctx.commit_point()
        return 1

    assert result(app.handle_sync(call("put"))) == 1


async def test_cancelled_thread_stops_at_its_commit_point(clock: LoopClock) -> None:
    """The caller left before the commit point, so the handler must not act after it, and a retry
    runs.
    """
    app = make_app()
    begun = threading.Event()
    go = threading.Event()
    effects = list[str]()

    @app.command(timeout=60)
    def put(ctx: Context) -> int:
        begun.set()
        assert go.wait(60)
        ctx.commit_point()
        effects.append("effect")
        return 1

    calling = asyncio.create_task(app.handle(call("put", key="k")))
    assert await asyncio.to_thread(begun.wait, 60)
    clock.advance(60)
    refused = error(await calling)
    assert (refused["code"], refused["data"]["ran"]) == (50410, "no")
    go.set()
    assert result(await app.handle(call("put", key="k"))) == 1
    assert effects == ["effect"]


# --- records --------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [Busy(ran="no"), InvalidParams("too much")])
def test_refusal_is_not_an_outcome(refusal: RpcError) -> None:
    app = make_app()
    answers = [refusal, None]

    @app.command
    def put() -> int:
        refused = answers.pop(0)
        if refused:
            raise refused
        return 1

    assert error(app.handle_sync(call("put", key="k")))["code"] == refusal.code
    assert result(app.handle_sync(call("put", key="k"))) == 1


def test_internal_error_raised_by_a_handler_is_not_an_outcome() -> None:
    app = make_app()

    @app.command
    def put() -> int:
        raise InternalError

    assert error(app.handle_sync(call("put", key="k")))["code"] == -32603
    assert error(app.handle_sync(call("put", key="k")))["code"] == 50910


def test_replayed_error_is_among_the_replayed_ids() -> None:
    app = make_app()

    @app.command
    def put() -> None:
        raise DomainError(4020, "no")

    ids: list[Any] = []
    app.handle_sync(call("put", key="k", id=1), replayed=ids)
    app.handle_sync(call("put", key="k", id=2), replayed=ids)
    assert ids == [2]


def test_large_error_keeps_its_code_and_message() -> None:
    app = make_app()

    @app.command(max_stored_result=100)
    def put() -> None:
        raise DomainError(4020, "no", {"why": "x" * 1000})

    assert len(error(app.handle_sync(call("put", key="k")))["data"]["why"]) == 1000
    assert error(app.handle_sync(call("put", key="k"))) == {
        "code": 4020,
        "message": "no",
        "data": {"replayed": True},
    }


def test_command_with_a_positional_key_is_protected() -> None:
    app = make_app()
    effects = list[int]()

    @app.command
    def put(value: int, idempotency_key: str) -> int:
        effects.append(value)
        return len(effects)

    for _ in range(2):
        assert result(app.handle_sync(call("put", [7, "k"]))) == 1
    assert (
        error(app.handle_sync(call("put", [7, "two words"])))["data"]["type"]
        == "idempotency_key_invalid"
    )
    assert effects == [7]


def test_keyboard_interrupt_propagates_and_leaves_a_true_record() -> None:
    app = make_app()

    @app.command
    def put() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        app.handle_sync(call("put", key="k"))
    assert error(app.handle_sync(call("put", key="k")))["code"] == 50910


def test_batch_results_are_encoded_when_each_call_ends() -> None:
    app = make_app()
    cart = list[int]()

    @app.command
    def add(n: int) -> list[int]:
        cart.append(n)
        return cart

    app.query(name="look")(lambda: cart)
    reply = read(
        app.handle_sync(
            batch(
                call("add", [1], 1),
                call("look", None, 2),
                call("add", [2], 3),
                call("look", None, 4),
            )
        )
    )
    assert [entry["result"] for entry in reply] == [[1], [1], [1, 2], [1, 2]]


# --- without an event loop ------------------------------------------------------------------------


def test_key_in_use_is_not_waited_for_without_a_loop() -> None:
    app = make_app()

    @app.command
    def put() -> Any:
        return app.handle_sync(call("put", key="k", id=2)).decode()  # type: ignore[union-attr]

    assert '"code":40910' in result(app.handle_sync(call("put", key="k", id=1)))


@pytest.mark.parametrize("key", [None, "k"])
def test_handler_that_waits_without_a_loop_raises_an_error_that_says_so(key: str | None) -> None:
    app = make_app()

    @app.command
    async def put() -> None:
        await asyncio.sleep(1)

    with pytest.raises(UsageError, match="tried to wait"):
        app.handle_sync(call("put", key=key))


# --- on_crash -------------------------------------------------------------------------------------


async def vanished(
    app: App, on_crash: Any = "unknown", *, committed: bool = True
) -> tuple[MemoryLedger, Clock]:
    """A ledger in which a holder of the key has claimed, and its lease is over."""
    clock = Clock()
    ledger = MemoryLedger(clock=clock)
    app._ledger = ledger
    from msgspec import Raw

    from wirecall.server.policy import fingerprint

    claim = Claim(
        id=RecordId("", "put", "k"),
        fingerprint=fingerprint(Raw(b'{"n":1}')),
        nonce=b"n" * 16,
        lease=30,
        retention=60,
        on_crash=on_crash,
        committed=committed,
    )
    await ledger.claim(claim)
    clock.now += 31
    return ledger, clock


@pytest.mark.parametrize(
    ("verdict", "expected", "runs"),
    [
        (Done("found"), "found", 0),
        (NotDone(), 1, 1),
        (CannotTell(), 50910, 0),
        ("garbage", 50910, 0),
    ],
)
@pytest.mark.parametrize("form", ["plain", "async", "blocking"])
async def test_reconcile(verdict: Any, expected: Any, runs: int, form: str) -> None:
    app = make_app()
    ran = list[int]()

    def plain(n: int) -> Any:
        return verdict

    async def coroutine(n: int) -> Any:
        return verdict

    reconcile = coroutine if form == "async" else plain

    @app.command(on_crash="reconcile", reconcile=reconcile, blocking=form == "blocking")
    def put(n: int) -> int:
        ran.append(n)
        return n

    await vanished(app, "reconcile")
    answer = read(await app.handle(call("put", {"n": 1}, key="k")))
    assert answer.get("result", answer.get("error", {}).get("code")) == expected
    assert len(ran) == runs


def test_reconcile_function_that_is_unusable_is_refused_at_registration() -> None:
    with pytest.raises(UsageError, match=r"it takes \(order\), the command takes \(order, cents\)"):
        make_app().command(name="put", on_crash="reconcile", reconcile=lambda order: NotDone())(
            lambda order, cents: 1
        )
    with pytest.raises(UsageError, match="asked only with"):
        make_app().command(name="put", reconcile=lambda: NotDone())(lambda: 1)
    with pytest.raises(UsageError, match="must be one of unknown, rerun"):
        make_app().command(name="put", on_crash="unkown")(lambda: 1)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="must be one of sequential"):
        make_app().query(name="get", execution="seq")(lambda: 1)  # type: ignore[call-overload]


async def test_run_that_fails_before_its_commit_point_keeps_evidence_of_an_earlier_run() -> None:
    app = make_app()
    asked = list[str]()

    def reconcile(n: int) -> NotDone:
        asked.append("asked")
        return NotDone()

    @app.command(on_crash="reconcile", reconcile=reconcile)
    async def put(n: int, ctx: Context) -> int:
        if len(asked) == 1:
            raise ValueError
        await ctx.commit_point()
        return n

    await vanished(app, "reconcile")
    assert error(await app.handle(call("put", {"n": 1}, key="k")))["data"]["ran"] == "no"
    assert result(await app.handle(call("put", {"n": 1}, key="k"))) == 1
    assert asked == ["asked", "asked"]


# --- stopping -------------------------------------------------------------------------------------


async def test_lease_renewal_waits_for_the_last_one_on_a_slow_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server used to renew after every third of the lease, even while the last renewal was
    pending.
    """
    app = make_app()
    under_way = 0
    most = 0
    ended = asyncio.Semaphore(0)

    @app.command(lease=0.06)
    async def put() -> None:
        for _ in range(3):
            await ended.acquire()

    async def slow(*_: Any) -> bool:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.1)
        under_way -= 1
        ended.release()
        return True

    monkeypatch.setattr(await app.ledger(), "heartbeat", slow)
    async with asyncio.timeout(10):
        result(await app.handle(call("put", key="k")))
        await app.aclose()
    assert most == 1


async def test_lease_of_the_shortest_duration_does_not_keep_the_loop_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = make_app()
    beats = list[float]()
    enough = asyncio.Event()

    @app.command(lease=1e-6)
    async def put() -> None:
        await enough.wait()

    async def renew(*_: Any) -> bool:
        beats.append(asyncio.get_running_loop().time())
        if len(beats) == 10:
            enough.set()
        return True

    monkeypatch.setattr(await app.ledger(), "heartbeat", renew)
    async with asyncio.timeout(10):
        result(await app.handle(call("put", key="k")))
        await app.aclose()
    assert (beats[9] - beats[0]) / 9 > 0.008


@pytest.mark.parametrize("method", ["heartbeat", "get"])
async def test_renewal_leaves_no_record_behind_a_run_that_has_given_it_back(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The renewal finds no record, since the run ends while the store is asked."""
    app = make_app()
    ledger = await app.ledger()
    asked = asyncio.Event()
    answered = asyncio.Event()

    @app.command(lease=0.03)
    async def put() -> None:
        await asked.wait()
        if method == "get":  # the store has lost it
            for record in await ledger.list():
                await ledger.release(record.token)
        raise Busy("not now")

    async def late(*words: Any) -> Any:
        asked.set()
        await answered.wait()
        return await original(*words)

    async def gone(*_: Any) -> bool:
        return False

    original = getattr(ledger, method)
    if method == "get":
        monkeypatch.setattr(ledger, "heartbeat", gone)
    monkeypatch.setattr(ledger, method, late)
    async with asyncio.timeout(60):
        assert error(await app.handle(call("put", key="k")))["data"]["ran"] == "no"
        answered.set()
        await app.aclose()
    monkeypatch.undo()
    assert await ledger.get(RecordId("", "put", "k")) is None


async def test_commands_do_not_start_after_the_app_has_stopped() -> None:
    app = make_app()
    ran = list[int]()
    app.command(name="put", wait=5)(lambda n: ran.append(n))
    ledger, clock = await vanished(app)
    clock.now -= 31  # the other holder is alive
    waiting = asyncio.create_task(app.handle(call("put", {"n": 1}, key="k")))
    await asyncio.sleep(0)
    await app.aclose(1)
    for record in await ledger.list():
        await ledger.release(record.token)
    assert error(await waiting)["code"] in (40910, 50310)
    assert ran == []


async def test_stop_waits_for_an_outcome_that_is_not_recorded_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = make_app()
    app.command(name="put")(lambda: 1)
    ledger = await app.ledger()
    lose_completions(monkeypatch, ledger, 3)
    assert result(await app.handle(call("put", key="k"))) == 1
    await app.aclose(5)
    record = await ledger.get(RecordId("", "put", "k"))
    assert record is not None
    assert record.state is State.DONE


async def test_outcome_is_recorded_even_with_the_shortest_retention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result has expired by then; the fact that the command ran has not."""
    app = make_app()
    failures = [LedgerDown("away")] * 5
    recorded = asyncio.Event()
    app.command(name="put", retention=0.001)(lambda: 1)
    ledger = await app.ledger()
    complete = ledger.complete

    async def flaky(*args: Any) -> bool:
        if failures:
            raise failures.pop()
        recorded.set()
        return await complete(*args)

    monkeypatch.setattr(ledger, "complete", flaky)
    assert result(await app.handle(call("put", key="k"))) == 1
    async with asyncio.timeout(10):
        await recorded.wait()
    await app.aclose()


async def test_error_that_is_not_recorded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()

    @app.command
    def put() -> None:
        raise DomainError(7, "no")

    lose_completions(monkeypatch, await app.ledger(), 1)
    assert error(await app.handle(call("put", key="k")))["data"] == {"recorded": False}
    await app.aclose()


async def test_handler_that_ignores_its_cancellation_does_not_block_shutdown() -> None:
    app = make_app()
    begun = asyncio.Event()
    release = asyncio.Event()

    @app.command
    async def put() -> None:
        begun.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    caller = asyncio.create_task(app.handle(call("put", key="k")))
    await begun.wait()
    async with asyncio.timeout(60):
        await app.aclose(0.01)
    release.set()
    await asyncio.wait([caller])


async def test_handler_that_ignores_its_cancellation_does_not_block_its_caller() -> None:
    app = make_app()
    release = asyncio.Event()
    effects = list[int]()

    @app.command(timeout=0.01)
    async def put(ctx: Context) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        await ctx.commit_point()
        effects.append(1)

    async with asyncio.timeout(60):
        refused = error(await app.handle(call("put", key="k")))
    assert (refused["code"], refused["data"]["ran"]) == (50410, "no")
    release.set()
    await app.aclose(1)
    assert effects == []  # the caller got a true answer: the commit point refuses


def test_middleware_must_be_added_before_serving() -> None:
    app = make_app()
    app.query(name="look")(lambda: 1)
    app.handle_sync(call("look"))
    with pytest.raises(UsageError, match="serving already"):
        app.middleware(lambda ctx, call_next: call_next(ctx))


async def test_ledger_is_opened_once_for_the_first_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[MemoryLedger] = []

    async def slow_open(url: str, tables: str) -> MemoryLedger:
        await asyncio.sleep(0)
        opened.append(MemoryLedger())
        return opened[-1]

    monkeypatch.setattr("wirecall.app.open_ledger", slow_open)
    app = make_app(ledger="sqlite:not-made.db")  # a ledger in memory opens without a wait
    app.command(name="put")(lambda: 1)
    await asyncio.gather(*(app.handle(call("put", key=f"k{n}")) for n in range(20)))
    assert len(opened) == 1


async def test_claim_with_a_lost_answer_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    ran = list[int]()
    app.command(name="put", wait=0.01)(lambda: ran.append(1))
    ledger = await app.ledger()
    claim = ledger.claim
    lost = [LedgerDown("the answer was lost")]

    async def flaky(wanted: Claim) -> Record:
        record = await claim(wanted)
        if lost:
            raise lost.pop()
        return record

    monkeypatch.setattr(ledger, "claim", flaky)
    refused = error(await app.handle(call("put", key="k")))
    assert (refused["code"], refused["data"]["ran"]) == (50310, "no")
    await asyncio.sleep(0)
    result(await app.handle(call("put", key="k")))
    assert ran == [1]
    await app.aclose()


# --- an operator's verdict ------------------------------------------------------------------------


async def with_an_unknown_outcome() -> App:
    app = make_app()

    @app.command
    def put() -> None:
        raise ValueError

    await app.handle(call("put", key="k"))
    return app


async def test_verdict_with_an_unencodable_result_settles_nothing() -> None:
    app = await with_an_unknown_outcome()
    with pytest.raises(UsageError, match="cannot be replayed"):
        await app.resolve("put", "k", Done(float("nan")), reason="it was looked up")
    assert await state_of(app) is State.UNKNOWN


@pytest.mark.parametrize("verdict", [Done, NotDone, CannotTell(), "done", True, None])
async def test_invalid_verdict_settles_nothing(verdict: Any) -> None:
    """Otherwise a forgotten pair of brackets would remove the evidence, and the command would run
    again.
    """
    app = await with_an_unknown_outcome()
    with pytest.raises(UsageError, match="must be Done"):
        await app.resolve("put", "k", verdict, reason="it was looked up")
    assert await state_of(app) is State.UNKNOWN
