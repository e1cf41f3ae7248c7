"""Commands through an app, bytes in and bytes out, over every ledger.

A second app on the same ledger counts as another process. A holder that vanished is a claim made directly in the ledger,
whose record is then aged.
"""

import asyncio
import hashlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import apsw
import psycopg
import pytest
from msgspec import Raw, structs

from tests.calls import batch, call, error, make_app, read, result
from tests.contracts import LEASE, answers_again, claim_of, outcome_of
from tests.servers import TRANSACTIONAL, Postgres, Server, Store
from wirecall import App, Context, DomainError
from wirecall.ledger import memory, postgres_transaction
from wirecall.ledger.base import Claim, Ledger, LedgerDown, Record, RecordId, State
from wirecall.policy import fingerprint
from wirecall.terms import CannotTell, Done, NotDone

NewApp = Callable[..., App]

ID = RecordId("", "charge", "k")
PARAMS = {"cents": 5}
PRINT = fingerprint(Raw(b'{"cents":5}'))

transactional = pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
with_server = pytest.mark.parametrize("store", ["redis", "postgres"], indirect=True)


class World:
    """What commands do to the world: handlers that count their effects, and wait where they are told to."""

    def __init__(self) -> None:
        self.effects: list[int] = []
        self.seen: list[Context] = []
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.gate = asyncio.Event()

    def act(self, cents: int) -> Any:
        self.effects.append(cents)
        return {"charged": cents, "number": len(self.effects)}

    async def charge(self, cents: int, ctx: Context) -> Any:
        self.seen.append(ctx)
        return self.act(cents)

    async def held_after(self, cents: int, ctx: Context) -> Any:
        """The effect, then a wait: it never names its commit point, so it has passed it on entry."""
        answer = await self.charge(cents, ctx)
        self.begun.set()
        await self.gate.wait()
        self.ended.set()
        return answer

    async def held_before(self, cents: int, ctx: Context) -> Any:
        """A wait, the commit point, the effect."""
        self.begun.set()
        await self.gate.wait()
        await ctx.commit_point()
        return await self.charge(cents, ctx)

    async def held_between(self, cents: int, ctx: Context) -> Any:
        """The commit point, the effect, a wait."""
        await ctx.commit_point()
        return await self.held_after(cents, ctx)


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture
async def new_app(store: Store) -> AsyncIterator[NewApp]:
    made: list[App] = []

    def make(**options: Any) -> App:
        made.append(make_app(ledger=store.url, **options))
        return made[-1]

    yield make
    for app in made:
        await app.aclose()


@pytest.fixture
def app(new_app: NewApp) -> App:
    return new_app()


def charge(id: Any = 1, *, cents: Any = 5, key: str = "k") -> bytes:
    return call("charge", {"cents": cents}, id=id, key=key)


async def vanish(ledger: Ledger, store: Store, **fields: Any) -> Record:
    """A holder that claimed the command and was never heard of again; its lease is over."""
    record = await ledger.claim(claim_of(ID, fingerprint=PRINT, **fields))
    store.age(ID, LEASE + 1)
    aged = await ledger.get(ID)
    assert aged is not None and aged.token == record.token and aged.lease_left == 0
    return aged


async def stands(ledger: Ledger, id: RecordId = ID) -> State | None:
    record = await ledger.get(id)
    return None if record is None else record.state


def is_unknown(refused: Any, record: Record) -> None:
    """50910 with all that is known."""
    assert refused == {
        "code": 50910,
        "message": refused["message"],
        "data": {
            "type": "outcome_unknown",
            "ran": "unknown",
            "record": "charge/k",
            "started_at": pytest.approx(record.started_at, abs=1e-3),
            "attempts": record.attempts,
        },
    }


def is_in_progress(refused: Any) -> None:
    data = refused["data"]
    assert refused["code"] == 40910
    assert data == {"type": "idempotency_key_in_progress", "ran": "unknown", "retry_after_ms": data["retry_after_ms"]}
    assert data["retry_after_ms"] > 0


CONFLICT = {"type": "idempotency_key_conflict", "ran": "no"}


# --- replay (P5, P10) ------------------------------------------------------------------------------------------------


async def test_a_retry_gets_the_same_answer_under_its_own_id_marked_as_replayed(app: App, world: World) -> None:
    """P5, P10: two calls with one key and different ids are one command."""
    app.command(world.charge)
    replayed: list[Any] = []
    first = await app.handle(charge("first"), replayed=replayed)
    assert read(first) == {"jsonrpc": "2.0", "result": {"charged": 5, "number": 1}, "id": "first"}
    assert replayed == []
    again = await app.handle(charge(2), replayed=replayed)
    assert read(again) == {"jsonrpc": "2.0", "result": {"charged": 5, "number": 1}, "id": 2}
    assert replayed == [2]
    assert await app.handle(charge("first")) == first
    assert world.effects == [5]


async def test_one_id_with_two_keys_is_two_commands(app: App, world: World) -> None:
    """P10: an id is never the key."""
    app.command(world.charge)
    assert result(await app.handle(charge(1, key="a")))["number"] == 1
    assert result(await app.handle(charge(1, key="b")))["number"] == 2


async def test_a_key_belongs_to_its_method(app: App, world: World) -> None:
    """P5: the pair is (method, key)."""
    app.command(world.charge)
    app.command(name="refund")(world.charge)
    assert result(await app.handle(charge()))["number"] == 1
    assert result(await app.handle(call("refund", PARAMS, key="k")))["number"] == 2


async def test_callers_have_keys_of_their_own(app: App, world: World) -> None:
    """P5: within the caller's identity; whose params differ from another's is in no conflict with them."""
    app.command(world.charge)
    for number, caller in enumerate(("", "alice", "bob", "alice/charge"), 1):
        replayed: list[Any] = []
        mine = charge(number, cents=number)
        assert result(await app.handle(mine, caller=caller, replayed=replayed)) == {"charged": number, "number": number}
        assert result(await app.handle(mine, caller=caller, replayed=replayed)) == {"charged": number, "number": number}
        assert replayed == [number]
    assert world.effects == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "value", [None, False, 0, "", {}, [], 0.0, -0.0, 1e300, 2**70, "ä€😀\0", {"b": 1, "a": None}], ids=repr
)
async def test_any_result_is_replayed_byte_for_byte(value: Any, new_app: NewApp) -> None:
    """P5: falsy results are results."""
    calls: list[int] = []
    for _ in range(2):
        app = new_app()

        @app.command(name="charge")
        def handler(cents: int) -> Any:
            calls.append(cents)
            return value

        replies = {await app.handle(charge()) for _ in range(2)}
    assert len(replies) == 1
    assert result(replies.pop()) == value
    assert calls == [5]


async def test_every_app_on_a_ledger_replays_it(new_app: NewApp, world: World) -> None:
    """P9: the record outlives the process that made it."""
    first, second = new_app(), new_app()
    for app in (first, second):
        app.command(world.charge)
    reply = await first.handle(charge())
    await first.aclose()
    replayed: list[Any] = []
    assert await second.handle(charge(), replayed=replayed) == reply
    assert replayed == [1]
    assert world.effects == [5]


@pytest.mark.parametrize("data", [None, {"balance": 3}, [1], "text", 0, False], ids=repr)
async def test_a_domain_error_is_the_command_s_answer_and_replayed_with_a_mark(data: Any, app: App) -> None:
    """P5: the same recorded error."""
    calls: list[int] = []

    @app.command(name="charge")
    async def handler(cents: int) -> None:
        calls.append(cents)
        raise DomainError(4020, "not enough money", data)

    first = error(await app.handle(charge(1)))
    assert first == {"code": 4020, "message": "not enough money"} | ({} if data is None else {"data": data})
    answer = read(await app.handle(charge(2)))
    assert answer["id"] == 2
    again = answer["error"]
    assert (again["code"], again["message"]) == (4020, "not enough money")
    assert again["data"] == {**data, "replayed": True} if isinstance(data, dict) else {"replayed": True, "data": data}
    assert calls == [5]


async def test_a_replayed_error_counts_among_the_replayed_ids(app: App) -> None:
    """`replayed` receives the ids of the answers that came from the ledger; a recorded error is one."""

    @app.command(name="charge")
    async def handler(cents: int) -> None:
        raise DomainError(4020, "not enough money")

    replayed: list[Any] = []
    await app.handle(charge(1), replayed=replayed)
    assert replayed == []
    await app.handle(charge(2), replayed=replayed)
    assert replayed == [2]


@pytest.mark.parametrize(
    ("params", "code"), [({"cents": "five"}, -32602), ({}, -32602), ({"cents": 5, "other": 1}, -32602)], ids=repr
)
async def test_params_that_do_not_fit_take_no_claim(params: Any, code: int, app: App, ledger: Ledger, world: World) -> None:
    app.command(world.charge)
    assert error(await app.handle(call("charge", params, key="k")))["code"] == code
    assert await ledger.get(ID) is None
    assert result(await app.handle(charge()))["number"] == 1


async def test_a_command_without_a_key_leaves_no_record(app: App, ledger: Ledger, world: World) -> None:
    app.command(world.charge)
    for number in (1, 2):
        assert result(await app.handle(call("charge", PARAMS)))["number"] == number
    assert await ledger.list() == []


async def test_queries_never_touch_the_ledger(store: Store, monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    async def refuse(url: str) -> Any:
        raise AssertionError("the ledger was opened")

    monkeypatch.setattr("wirecall.app.open_ledger", refuse)
    app = make_app(ledger=store.url)
    app.query(name="look")(lambda n: n)
    app.command(world.charge)
    assert result(await app.handle(call("look", [1]))) == 1
    assert [each["result"] for each in read(await app.handle(batch(call("look", [1]), call("look", [2]))))] == [1, 2]
    assert error(await app.handle(call("charge", {"cents": "x"}, key="k")))["code"] == -32602
    await app.aclose()


# --- conflict --------------------------------------------------------------------------------------------------------


async def test_other_params_under_the_same_key_are_refused(new_app: NewApp, world: World) -> None:
    for app in (new_app(), new_app()):
        app.command(world.charge)
        await app.handle(charge())
        refused = error(await app.handle(charge(cents=6)))
        assert (refused["code"], refused["data"]) == (42210, CONFLICT)
    assert world.effects == [5]


async def test_what_is_no_difference_is_no_conflict(app: App, world: World) -> None:
    """1 equals 1.0, the order of members and `_meta` do not matter."""

    @app.command(name="charge")
    async def handler(cents: float, to: Any = None) -> Any:
        return world.act(1)

    sent = [
        '{"cents":5,"to":{"a":1,"b":[2]},"idempotency_key":"k"}',
        '{"idempotency_key":"k","to":{"b":[2.0],"a":1.0},"cents":5.0}',
        '{"cents":5,"to":{"a":1,"b":[2]},"idempotency_key":"k","_meta":{"traceparent":"x"}}',
    ]
    for params in sent:
        message = b'{"jsonrpc":"2.0","method":"charge","params":%b,"id":1}' % params.encode()
        assert result(await app.handle(message))["number"] == 1


@pytest.mark.parametrize("state", State)
async def test_other_params_are_a_conflict_in_every_state(
    state: State, app: App, ledger: Ledger, store: Store, world: World
) -> None:
    app.command(world.charge)
    record = await ledger.claim(claim_of(ID, fingerprint=PRINT))
    if state is State.UNKNOWN:
        await ledger.abandon(record.token)
    elif state is State.WAITING:
        await ledger.suspend(record.token, outcome_of(), 1000)
    elif state is not State.RUNNING:
        await ledger.complete(record.token, outcome_of(), 1000)
    if state is State.TOMBSTONE:
        store.age(ID, 1001)
        await ledger.sweep()
    assert await stands(ledger) is state
    refused = error(await app.handle(charge(cents=6)))
    assert (refused["code"], refused["data"]) == (42210, CONFLICT)
    assert await stands(ledger) is state
    assert world.effects == []


async def test_other_params_are_a_conflict_while_the_first_runs(app: App, world: World) -> None:
    app.command(name="charge")(world.held_after)
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    refused = error(await app.handle(charge(cents=6)))
    assert (refused["code"], refused["data"]) == (42210, CONFLICT)
    world.gate.set()
    assert result(await first)["number"] == 1


async def test_wrong_params_do_not_stand_in_the_way_of_right_ones(app: App, world: World) -> None:
    """Both arrive together, the wrong ones first; the record says which are right."""
    app.command(world.charge)
    await app.handle(charge())
    wrong, right = await asyncio.gather(app.handle(charge(1, cents=6)), app.handle(charge(2)))
    assert error(wrong)["data"] == CONFLICT
    assert result(right)["number"] == 1


# --- in progress -----------------------------------------------------------------------------------------------------


async def test_a_duplicate_in_the_same_process_awaits_the_first(app: App, world: World) -> None:
    app.command(name="charge")(world.held_after)
    replayed: list[Any] = []
    tasks = [asyncio.create_task(app.handle(charge(id), replayed=replayed)) for id in range(20)]
    await world.begun.wait()
    world.gate.set()
    replies = [read(await task) for task in tasks]
    assert [reply["id"] for reply in replies] == list(range(20))
    assert all(reply["result"] == {"charged": 5, "number": 1} for reply in replies)
    assert sorted(replayed) == list(range(1, 20))
    assert world.effects == [5]


async def test_a_duplicate_in_the_same_process_does_not_wait_for_ever(app: App, world: World) -> None:
    app.command(name="charge", wait=0.01)(world.held_after)
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    is_in_progress(error(await app.handle(charge())))
    world.gate.set()
    assert result(await first)["number"] == 1


async def test_a_duplicate_elsewhere_is_told_to_come_back_after_its_wait(new_app: NewApp, world: World) -> None:
    here, there = new_app(), new_app()
    here.command(name="charge")(world.held_after)
    there.command(name="charge", wait=0.01)(world.charge)
    first = asyncio.create_task(here.handle(charge()))
    await world.begun.wait()
    is_in_progress(error(await there.handle(charge())))
    world.gate.set()
    assert result(await first)["number"] == 1
    assert result(await there.handle(charge()))["number"] == 1
    assert world.effects == [5]


async def test_a_duplicate_elsewhere_waits_for_the_outcome(new_app: NewApp, world: World) -> None:
    here, there = new_app(), new_app()
    here.command(name="charge")(world.held_after)
    there.command(name="charge")(world.charge)
    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    replayed: list[Any] = []
    claims = await watch(there, "claim")
    second = asyncio.create_task(there.handle(charge(2), replayed=replayed))
    await claims.get()
    world.gate.set()
    assert result(await first) == result(await second) == {"charged": 5, "number": 1}
    assert replayed == [2]


async def test_of_many_calls_to_many_apps_one_takes_effect(new_app: NewApp, world: World) -> None:
    """P5, over what counts as four processes."""
    apps = [new_app() for _ in range(4)]
    for app in apps:
        app.command(world.charge)
    replayed: list[Any] = []
    calls = [apps[n % 4].handle(charge(n), replayed=replayed) for n in range(24)]
    replies = [read(reply) for reply in await asyncio.gather(*calls)]
    assert [reply["id"] for reply in replies] == list(range(24))
    assert all(reply["result"] == {"charged": 5, "number": 1} for reply in replies)
    assert len(replayed) == 23
    assert world.effects == [5]


async def test_a_first_call_that_did_nothing_makes_way_for_its_duplicate(app: App, world: World) -> None:
    """The first is cancelled before its commit point: the one that waited for it runs instead."""
    app.command(name="charge")(world.held_before)
    first = asyncio.create_task(app.handle(charge(1)))
    await world.begun.wait()
    second = asyncio.create_task(app.handle(charge(2)))
    await asyncio.sleep(0)
    first.cancel()
    world.gate.set()
    assert result(await second)["number"] == 1
    assert world.effects == [5]
    with pytest.raises(asyncio.CancelledError):
        await first


async def watch(app: App, method: str) -> "asyncio.Queue[Any]":
    """What the calls of a method of the app's ledger gave, as they come."""
    ledger = await app.ledger()
    inner, given = getattr(ledger, method), asyncio.Queue[Any]()

    async def watched(*args: Any, **options: Any) -> Any:
        answer = await inner(*args, **options)
        given.put_nowait(answer)
        return answer

    setattr(ledger, method, watched)
    return given


# --- a holder that vanished (B2) -------------------------------------------------------------------------------------


async def test_a_holder_that_vanished_leaves_an_unknown_outcome(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    """B2: said aloud, every time, and nothing runs a second time."""
    app.command(world.charge)
    record = await vanish(ledger, store)
    for _ in range(3):
        is_unknown(error(await app.handle(charge())), record)
    assert await stands(ledger) is State.UNKNOWN
    assert world.effects == []


async def test_the_record_of_an_unknown_outcome_is_named_in_full(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    app.command(world.charge)
    id = RecordId("alice", "charge", "order/7")
    await ledger.claim(claim_of(id, fingerprint=PRINT))
    store.age(id, LEASE + 1)
    refused = error(await app.handle(charge(key="order/7"), caller="alice"))
    assert refused["data"]["record"] == "alice/charge/order/7"


async def test_a_holder_that_vanished_before_its_commit_point_did_nothing(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    app.command(world.charge)
    await vanish(ledger, store, committed=False)
    assert result(await app.handle(charge()))["number"] == 1


async def test_a_late_truth_makes_an_unknown_outcome_definite(app: App, ledger: Ledger, store: Store, world: World) -> None:
    """B2: the old holder comes back."""
    app.command(world.charge)
    record = await vanish(ledger, store)
    is_unknown(error(await app.handle(charge())), record)
    assert await ledger.complete(record.token, outcome_of(b'{"late":true}'), 1000)
    replayed: list[Any] = []
    assert result(await app.handle(charge(7), replayed=replayed)) == {"late": True}
    assert replayed == [7]
    assert world.effects == []


async def test_a_paused_holder_comes_back_with_the_truth(
    new_app: NewApp, ledger: Ledger, store: Store, world: World
) -> None:
    """B2: its caller gets the true answer, the retry in between was told that nobody knows, the next one gets it too."""
    here, there = new_app(), new_app()
    here.command(name="charge")(world.held_after)
    there.command(name="charge")(world.charge)
    first = asyncio.create_task(here.handle(charge()))
    await world.begun.wait()
    store.age(ID, LEASE + 1)
    assert error(await there.handle(charge()))["data"]["type"] == "outcome_unknown"
    world.gate.set()
    assert result(await first)["number"] == 1
    assert result(await there.handle(charge()))["number"] == 1
    assert world.effects == [5]


async def test_an_operator_says_that_it_was_done(app: App, ledger: Ledger, store: Store, world: World) -> None:
    app.command(world.charge)
    await vanish(ledger, store)
    await app.handle(charge())
    assert await app.resolve("charge", "k", Done({"charged": 5}))
    assert result(await app.handle(charge())) == {"charged": 5}
    assert world.effects == []


async def test_an_operator_says_that_it_was_not_done(app: App, ledger: Ledger, store: Store, world: World) -> None:
    app.command(world.charge)
    await vanish(ledger, store)
    await app.handle(charge())
    assert await app.resolve("charge", "k", NotDone())
    assert result(await app.handle(charge()))["number"] == 1


async def test_rerun_runs_again_and_tells_the_handler(app: App, ledger: Ledger, store: Store, world: World) -> None:
    app.command(name="charge", on_crash="rerun")(world.charge)
    record = await vanish(ledger, store, on_crash="rerun")
    replayed: list[Any] = []
    assert result(await app.handle(charge(), replayed=replayed))["number"] == 1
    assert replayed == []
    (ctx,) = world.seen
    assert (ctx.attempt, ctx.idempotency_key) == (2, "k")
    assert ctx.fence > record.fence
    assert result(await app.handle(charge()))["number"] == 1


async def test_the_downstream_key_is_the_same_on_every_attempt_and_no_other_command_s(app: App, world: World) -> None:
    @app.command(name="charge", on_crash="rerun")
    async def handler(cents: int, ctx: Context) -> Any:
        await world.charge(cents, ctx)
        raise RuntimeError("after the effect")

    for key in ("k", "k", "other"):
        await app.handle(charge(key=key))
    await app.handle(charge(), caller="alice")
    first, again, other, alice = (ctx.downstream_key for ctx in world.seen)
    assert first == again
    assert len({first, other, alice}) == 3
    assert [ctx.attempt for ctx in world.seen] == [1, 2, 1, 1]


async def test_rerun_gives_up_after_five_attempts(app: App, ledger: Ledger, store: Store, world: World) -> None:
    app.command(name="charge", on_crash="rerun")(world.charge)
    for _ in range(5):
        record = await vanish(ledger, store, on_crash="rerun")
    assert record.attempts == 5
    is_unknown(error(await app.handle(charge())), record)
    assert world.effects == []


async def test_a_holder_that_was_taken_over_answers_with_the_successor_s_outcome(
    new_app: NewApp, store: Store, world: World
) -> None:
    here, there = new_app(), new_app()
    here.command(name="charge", on_crash="rerun")(world.held_after)
    there.command(name="charge", on_crash="rerun")(world.charge)
    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    store.age(ID, LEASE + 1)
    assert result(await there.handle(charge(2)))["number"] == 2
    world.gate.set()
    assert result(await first)["number"] == 2
    assert result(await here.handle(charge(3)))["number"] == 2


@pytest.mark.parametrize("form", ["plain", "async"])
async def test_reconcile_done_is_the_answer(form: str, app: App, ledger: Ledger, store: Store, world: World) -> None:
    """The function gets the params, and the context if it asks for it; the handler does not run."""
    asked: list[Any] = []

    def plain(cents: int, ctx: Context) -> Any:
        asked.append((cents, ctx.idempotency_key, ctx.attempt))
        return Done({"found": cents})

    async def coroutine(cents: int, ctx: Context) -> Any:
        return plain(cents, ctx)

    function: Any = plain if form == "plain" else coroutine
    app.command(name="charge", on_crash="reconcile", reconcile=function)(world.charge)
    await vanish(ledger, store)
    for id in (1, 2):
        assert result(await app.handle(charge(id))) == {"found": 5}
    assert asked == [(5, "k", 2)]
    assert world.effects == []
    assert await stands(ledger) is State.DONE


async def test_reconcile_not_done_runs_it(app: App, ledger: Ledger, store: Store, world: World) -> None:
    app.command(name="charge", on_crash="reconcile", reconcile=lambda cents: NotDone())(world.charge)
    await vanish(ledger, store)
    for id in (1, 2):
        assert result(await app.handle(charge(id)))["number"] == 1
    assert world.seen[0].attempt == 2


@pytest.mark.parametrize("verdict", [CannotTell(), None, True, Done], ids=repr)
async def test_reconcile_that_cannot_tell_leaves_it_unknown(
    verdict: Any, app: App, ledger: Ledger, store: Store, world: World
) -> None:
    """B2: what is not clearly one or the other is not known."""
    asked: list[int] = []

    def reconcile(cents: int) -> Any:
        asked.append(cents)
        return verdict

    app.command(name="charge", on_crash="reconcile", reconcile=reconcile)(world.charge)
    record = await vanish(ledger, store)
    for id in (1, 2):
        is_unknown(error(await app.handle(charge(id))), structs.replace(record, attempts=2))
    assert asked == [5]
    assert await stands(ledger) is State.UNKNOWN
    assert world.effects == []


async def test_reconcile_that_fails_is_asked_again(app: App, ledger: Ledger, store: Store, world: World) -> None:
    verdicts: list[Any] = [Done({"found": 5}), RuntimeError("no connection")]

    def reconcile(cents: int) -> Any:
        verdict = verdicts.pop()
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    app.command(name="charge", on_crash="reconcile", reconcile=reconcile)(world.charge)
    await vanish(ledger, store)
    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "unknown"})
    assert result(await app.handle(charge())) == {"found": 5}
    assert world.effects == []


async def test_a_command_that_never_ran_is_not_reconciled(app: App, world: World) -> None:
    def reconcile(cents: int) -> Any:
        raise AssertionError("asked about a first run")

    app.command(name="charge", on_crash="reconcile", reconcile=reconcile)(world.charge)
    assert result(await app.handle(charge()))["number"] == 1


class Truth:
    """A world that knows what happened in it, for reconcile functions that never lie."""

    def __init__(self, app: App, world: World) -> None:
        async def handler(cents: int, ctx: Context) -> Any:
            await ctx.commit_point()
            return await world.charge(cents, ctx)

        def reconcile(cents: int) -> Any:
            return Done({"found": cents}) if world.effects else NotDone()

        app.command(name="charge", on_crash="reconcile", reconcile=reconcile)(handler)


async def test_a_successor_that_hangs_up_does_not_destroy_the_evidence(
    app: App, ledger: Ledger, store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: the first did it and vanished; the caller of the second goes away while it claims; the third must still ask."""
    Truth(app, world)
    await vanish(ledger, store, on_crash="reconcile")
    world.act(5)
    handle = await app.ledger()
    claim, claimed, answered = handle.claim, asyncio.Event(), asyncio.Event()

    async def slow(wanted: Claim) -> Record:
        record = await claim(wanted)
        claimed.set()
        await answered.wait()
        return record

    monkeypatch.setattr(handle, "claim", slow)
    second = asyncio.create_task(app.handle(charge(2)))
    await claimed.wait()
    second.cancel()
    answered.set()
    with pytest.raises(asyncio.CancelledError):
        await second
    await still_stands(ledger)
    store.age(ID, LEASE + 1)
    monkeypatch.undo()
    assert result(await app.handle(charge(3))) == {"found": 5}
    assert world.effects == [5]


async def test_a_successor_whose_claim_was_not_acknowledged_does_not_destroy_the_evidence(
    app: App, ledger: Ledger, store: Store, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: the same, when the answer to the claim is lost."""
    Truth(app, world)
    await vanish(ledger, store, on_crash="reconcile")
    world.act(5)
    await lose_claim(app, monkeypatch)
    assert error(await app.handle(charge(2)))["code"] == 50310
    await still_stands(ledger)
    store.age(ID, LEASE + 1)
    assert result(await app.handle(charge(3))) == {"found": 5}
    assert world.effects == [5]


async def still_stands(ledger: Ledger) -> None:
    """Give whoever tidies up behind a lost claim more than enough round trips; the record must be there all the time."""
    for _ in range(20):
        await asyncio.sleep(0)
        assert await stands(ledger) is State.RUNNING


async def test_a_rerun_that_stops_before_its_commit_point_leaves_the_evidence_of_the_run_before(
    app: App, ledger: Ledger, store: Store, world: World
) -> None:
    """That this run did nothing says nothing about the one that vanished: the attempts go on counting."""

    @app.command(name="charge", on_crash="rerun")
    async def handler(cents: int, ctx: Context) -> Any:
        if ctx.attempt == 2:
            raise RuntimeError("before the commit point")
        await ctx.commit_point()
        return await world.charge(cents, ctx)

    before = await vanish(ledger, store, on_crash="rerun")
    assert error(await app.handle(charge()))["code"] == -32603
    left = await ledger.get(ID)
    assert left is not None
    assert (left.state, left.committed, left.attempts) == (State.RUNNING, True, 2)
    assert left.started_at == pytest.approx(before.started_at, abs=1e-3)
    assert result(await app.handle(charge()))["number"] == 1
    assert world.seen[0].attempt == 3


async def lose_claim(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next claim takes effect, and its answer is lost."""
    handle = await app.ledger()
    claim = handle.claim

    async def lost(wanted: Claim) -> Record:
        monkeypatch.setattr(handle, "claim", claim)
        await claim(wanted)
        raise LedgerDown("the answer was lost")

    monkeypatch.setattr(handle, "claim", lost)


# --- results that are not kept ---------------------------------------------------------------------------------------


def is_not_retained(refused: Any, digest: bytes, record: Record | None) -> None:
    assert record is not None
    assert refused == {
        "code": 41010,
        "message": refused["message"],
        "data": {
            "type": "result_not_retained",
            "ran": "yes",
            "digest": digest.hex(),
            "completed_at": pytest.approx(record.completed_at, abs=1e-3),
        },
    }


async def test_a_result_too_large_to_keep_is_answered_once_and_then_named_by_its_digest(
    app: App, ledger: Ledger, world: World
) -> None:
    @app.command(name="charge", max_stored_result=100)
    async def handler(cents: int) -> str:
        world.act(cents)
        return "x" * 99

    assert result(await app.handle(charge())) == "x" * 99
    digest = hashlib.sha256(b'"' + b"x" * 99 + b'"').digest()
    is_not_retained(error(await app.handle(charge())), digest, await ledger.get(ID))
    assert world.effects == [5]


async def test_a_result_of_exactly_the_limit_is_kept(app: App, world: World) -> None:
    @app.command(name="charge", max_stored_result=100)
    async def handler(cents: int) -> str:
        world.act(cents)
        return "x" * 98

    for _ in range(2):
        assert result(await app.handle(charge())) == "x" * 98
    assert world.effects == [5]


async def test_after_the_retention_only_the_fact_is_left(app: App, ledger: Ledger, store: Store, world: World) -> None:
    """P9: a TTL per method."""
    app.command(name="charge", retention=100)(world.charge)
    reply = await app.handle(charge())
    store.age(ID, 90)
    assert await app.handle(charge()) == reply
    store.age(ID, 11)
    digest = hashlib.sha256(b'{"charged":5,"number":1}').digest()
    for _ in range(2):
        is_not_retained(error(await app.handle(charge())), digest, await ledger.get(ID))
    assert await stands(ledger) is State.TOMBSTONE
    assert world.effects == [5]


async def test_a_recorded_error_is_not_retained_either(app: App, store: Store) -> None:
    @app.command(name="charge", retention=100)
    async def handler(cents: int) -> None:
        raise DomainError(4020, "no")

    await app.handle(charge())
    store.age(ID, 101)
    assert error(await app.handle(charge()))["data"]["type"] == "result_not_retained"


async def test_after_eight_retentions_the_key_is_forgotten(app: App, ledger: Ledger, store: Store, world: World) -> None:
    app.command(name="charge", retention=100)(world.charge)
    await app.handle(charge())
    store.age(ID, 101)
    await app.handle(charge())
    store.age(ID, 701)
    assert await ledger.sweep() == 1
    assert result(await app.handle(charge()))["number"] == 2


async def test_a_result_that_cannot_be_encoded_was_done_all_the_same(app: App, ledger: Ledger, world: World) -> None:
    @app.command(name="charge")
    async def handler(cents: int) -> Any:
        world.act(cents)
        return {"fine": 1, "not": object()}

    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "yes"})
    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]["type"], refused["data"]["ran"]) == (41010, "result_not_retained", "yes")
    assert set(refused["data"]) == {"type", "ran", "digest", "completed_at"}
    assert await stands(ledger) is State.DONE
    assert world.effects == [5]


# --- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", ["sequential", "parallel"])
async def test_duplicates_in_one_batch_run_once_and_answer_in_their_places(execution: Any, app: App, world: World) -> None:
    """P5, P10; another fingerprint under the same key fails only its own entry."""
    app.command(name="charge", execution=execution)(world.charge)
    app.query(name="look")(lambda: len(world.effects))
    replayed: list[Any] = []
    entries = [charge("a"), call("look", id="q"), charge("b"), charge("c", cents=6), charge("d", key="other"), charge("e")]
    answers = read(await app.handle(batch(*entries), replayed=replayed))
    assert [answer["id"] for answer in answers] == ["a", "q", "b", "c", "d", "e"]
    a, _, b, c, d, e = answers
    assert a["result"] == b["result"] == e["result"]
    assert a["result"]["charged"] == 5
    assert (c["error"]["code"], c["error"]["data"]) == (42210, CONFLICT)
    assert d["result"]["number"] != a["result"]["number"]
    assert sorted(replayed) == ["b", "e"]
    assert world.effects == [5, 5]
    again = read(await app.handle(batch(*entries)))
    assert [answer.get("result") for answer in again if answer["id"] != "q"] == [
        answer.get("result") for answer in answers if answer["id"] != "q"
    ]


async def test_duplicates_in_one_batch_share_a_recorded_error(app: App) -> None:
    @app.command(name="charge")
    async def handler(cents: int) -> None:
        raise DomainError(4020, "no", {"cents": cents})

    first, second = read(await app.handle(batch(charge(1), charge(2))))
    assert first["error"]["data"] == {"cents": 5}
    assert second["error"]["data"] == {"cents": 5, "replayed": True}


async def test_a_batch_that_is_sent_again_one_by_one_is_replayed(app: App, world: World) -> None:
    app.command(world.charge)
    entries = [charge(n, key=str(n)) for n in range(5)]
    together = read(await app.handle(batch(*entries)))
    assert [read(await app.handle(entry)) for entry in entries] == together
    assert len(world.effects) == 5


# --- failures, cancels and deadlines around the commit point ---------------------------------------------------------


async def test_an_exception_before_the_commit_point_did_nothing(app: App, ledger: Ledger, world: World) -> None:
    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> Any:
        if not world.seen:
            world.seen.append(ctx)
            raise RuntimeError("secret")
        await ctx.commit_point()
        return world.act(cents)

    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "no"})
    assert await ledger.get(ID) is None
    assert result(await app.handle(charge()))["number"] == 1
    assert result(await app.handle(charge()))["number"] == 1


@pytest.mark.parametrize("named", [True, False], ids=["after it", "without one"])
async def test_an_exception_after_the_commit_point_leaves_it_unknown(
    named: bool, app: App, ledger: Ledger, world: World
) -> None:
    """B2: deleting the record would invite a second effect. A handler that names no commit point has passed it on entry."""
    if named:

        @app.command(name="charge")
        async def handler(cents: int, ctx: Context) -> Any:
            await ctx.commit_point()
            world.act(cents)
            raise RuntimeError("secret")
    else:

        @app.command(name="charge")
        async def plain(cents: int) -> Any:
            world.act(cents)
            raise RuntimeError("secret")

    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "unknown"})
    record = await ledger.get(ID)
    assert record is not None and record.state is State.UNKNOWN
    is_unknown(error(await app.handle(charge())), record)
    assert world.effects == [5]


async def test_an_exception_of_a_rerun_command_is_tried_again_at_once(app: App, world: World) -> None:
    @app.command(name="charge", on_crash="rerun")
    async def handler(cents: int, ctx: Context) -> Any:
        await world.charge(cents, ctx)
        if ctx.attempt < 3:
            raise RuntimeError("secret")
        return ctx.attempt

    for _ in range(2):
        refused = error(await app.handle(charge()))
        assert (refused["code"], refused["data"]) == (-32603, {"ran": "unknown"})
    assert result(await app.handle(charge())) == 3
    assert result(await app.handle(charge())) == 3
    fences = [ctx.fence for ctx in world.seen]
    assert len(fences) == 3
    assert fences == sorted(set(fences))


async def test_a_domain_error_before_the_commit_point_is_recorded_too(app: App, ledger: Ledger) -> None:
    calls: list[int] = []

    @app.command(name="charge")
    async def handler(cents: int, ctx: Context) -> None:
        calls.append(cents)
        if cents:
            raise DomainError(4020, "no")
        await ctx.commit_point()

    for _ in range(2):
        assert error(await app.handle(charge()))["code"] == 4020
    assert await stands(ledger) is State.DONE
    assert calls == [5]


DEADLINE = 50410


async def test_a_deadline_before_the_commit_point_did_nothing(app: App, ledger: Ledger, world: World) -> None:
    app.command(name="charge", timeout=0.3)(world.held_before)
    await app.ledger()
    refused = error(await app.handle(charge()))
    assert world.begun.is_set()
    assert (refused["code"], refused["data"]) == (DEADLINE, {"type": "deadline_exceeded", "ran": "no"})
    assert await ledger.get(ID) is None
    world.gate.set()
    assert result(await app.handle(charge()))["number"] == 1


@pytest.mark.parametrize("handler", ["held_between", "held_after"])
async def test_a_deadline_after_the_commit_point_lets_the_handler_finish(
    handler: str, app: App, ledger: Ledger, world: World
) -> None:
    """The caller is told that it may have run; the outcome is recorded, and a retry gets it."""
    app.command(name="charge", timeout=0.3)(getattr(world, handler))
    refused = error(await app.handle(charge(1)))
    assert (refused["code"], refused["data"]) == (DEADLINE, {"type": "deadline_exceeded", "ran": "unknown"})
    assert await stands(ledger) is State.RUNNING
    replayed: list[Any] = []
    retry = asyncio.create_task(app.handle(charge(2), replayed=replayed))
    await asyncio.sleep(0)
    world.gate.set()
    assert result(await retry)["number"] == 1
    assert replayed == [2]
    assert await stands(ledger) is State.DONE
    assert world.effects == [5]


async def test_a_deadline_of_a_duplicate_says_nothing_about_the_first(new_app: NewApp, world: World) -> None:
    """The first runs elsewhere: "no" would invite its caller to send it under another key."""
    here, there = new_app(), new_app()
    here.command(name="charge")(world.held_after)
    there.command(name="charge", timeout=0.3)(world.charge)
    await there.ledger()
    first = asyncio.create_task(here.handle(charge()))
    await world.begun.wait()
    refused = error(await there.handle(charge()))
    assert (refused["code"], refused["data"]) == (DEADLINE, {"type": "deadline_exceeded", "ran": "unknown"})
    world.gate.set()
    assert result(await first)["number"] == 1


async def test_a_deadline_of_a_duplicate_in_the_same_process_counts_as_well(app: App, world: World) -> None:
    app.command(name="charge", timeout=0.3)(world.held_after)
    for _ in range(2):
        refused = error(await app.handle(charge()))
        assert (refused["code"], refused["data"]) == (DEADLINE, {"type": "deadline_exceeded", "ran": "unknown"})
    world.gate.set()
    assert result(await app.handle(charge()))["number"] == 1


async def test_a_caller_that_hangs_up_before_the_commit_point_stops_the_handler(
    app: App, ledger: Ledger, world: World
) -> None:
    app.command(name="charge")(world.held_before)
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await ledger.get(ID) is None
    world.gate.set()
    assert result(await app.handle(charge()))["number"] == 1
    assert world.effects == [5]


@pytest.mark.parametrize("handler", ["held_between", "held_after"])
async def test_a_caller_that_hangs_up_after_the_commit_point_loses_nothing(
    handler: str, app: App, ledger: Ledger, world: World
) -> None:
    """P5: the handler is shielded, finishes, and its outcome is recorded."""
    app.command(name="charge")(getattr(world, handler))
    first = asyncio.create_task(app.handle(charge(1)))
    await world.begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not world.ended.is_set()
    world.gate.set()
    replayed: list[Any] = []
    assert result(await app.handle(charge(2), replayed=replayed))["number"] == 1
    assert replayed == [2]
    assert await stands(ledger) is State.DONE
    assert world.effects == [5]


async def test_a_caller_that_hangs_up_on_a_batch(app: App, ledger: Ledger, world: World) -> None:
    """The entry past its commit point is finished, the one behind it in the lane never begins."""
    app.command(name="charge")(world.held_after)
    task = asyncio.create_task(app.handle(batch(charge(1), charge(2, key="next"))))
    await world.begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    world.gate.set()
    assert result(await app.handle(charge(3)))["number"] == 1
    assert await ledger.get(structs.replace(ID, key="next")) is None
    assert world.effects == [5]


async def test_a_caller_that_hangs_up_at_any_step_leaves_one_effect(app: App, ledger: Ledger, world: World) -> None:
    """P5: cut at every turn of the event loop, then sent again; the retry need not wait for what the cut left behind."""
    app.command(name="charge", wait=1)(world.held_between)
    world.gate.set()
    for steps in range(25):
        key = f"k{steps}"
        before = len(world.effects)
        task = asyncio.create_task(app.handle(charge(key=key)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert result(await app.handle(charge(key=key)))["charged"] == 5
        assert len(world.effects) == before + 1
        assert await stands(ledger, structs.replace(ID, key=key)) is State.DONE


async def test_a_commit_point_after_the_lease_is_refused(app: App, ledger: Ledger, store: Store, world: World) -> None:
    """B2: a paused holder stops before its effect, because a successor may be at work."""
    app.command(name="charge")(world.held_before)
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    store.age(ID, LEASE + 1)
    world.gate.set()
    refused = error(await first)
    assert refused["data"]["ran"] in ("no", "unknown")
    assert world.effects == []
    assert result(await app.handle(charge()))["number"] == 1


async def test_a_holder_that_was_taken_over_before_its_commit_point_stops(
    new_app: NewApp, store: Store, world: World
) -> None:
    here, there = new_app(), new_app()
    here.command(name="charge")(world.held_before)
    there.command(name="charge")(world.charge)
    first = asyncio.create_task(here.handle(charge()))
    await world.begun.wait()
    store.age(ID, LEASE + 1)
    assert result(await there.handle(charge()))["number"] == 1
    world.gate.set()
    assert "error" in read(await first)
    assert result(await here.handle(charge()))["number"] == 1
    assert world.effects == [5]


async def test_a_plain_function_may_have_a_commit_point(app: App, ledger: Ledger, world: World) -> None:
    """It blocks, so the function runs in a thread."""

    @app.command(name="charge")
    def handler(cents: int, ctx: Context) -> Any:
        if not world.seen:
            world.seen.append(ctx)
            raise RuntimeError("before")
        ctx.commit_point()
        world.act(cents)
        raise RuntimeError("after")

    assert error(await app.handle(charge()))["data"] == {"ran": "no"}
    assert await ledger.get(ID) is None
    assert error(await app.handle(charge()))["data"] == {"ran": "unknown"}
    assert await stands(ledger) is State.UNKNOWN
    assert world.effects == [5]


async def test_the_lease_is_renewed_for_as_long_as_the_handler_runs(app: App, ledger: Ledger, world: World) -> None:
    app.command(name="charge", lease=0.2)(world.held_after)
    beats = await watch(app, "heartbeat")
    first = asyncio.create_task(app.handle(charge()))
    for _ in range(3):
        assert await beats.get() is True
    world.gate.set()
    assert result(await first)["number"] == 1


async def test_closing_an_app_finishes_what_may_have_happened_and_releases_the_rest(
    new_app: NewApp, ledger: Ledger, world: World
) -> None:
    app, other = new_app(), World()
    app.command(name="charge")(world.held_after)
    app.command(name="refund")(other.held_before)
    committed = asyncio.create_task(app.handle(charge()))
    uncommitted = asyncio.create_task(app.handle(call("refund", PARAMS, key="k")))
    await asyncio.gather(world.begun.wait(), other.begun.wait())
    closing = asyncio.create_task(app.aclose())
    refused = error(await uncommitted)
    assert (refused["code"], refused["data"]["type"], refused["data"]["ran"]) == (50310, "ledger_unavailable", "no")
    assert not closing.done()
    world.gate.set()
    assert result(await committed)["number"] == 1
    await closing
    assert await stands(ledger) is State.DONE
    assert await stands(ledger, structs.replace(ID, method="refund")) is None


# --- the ledger is away ----------------------------------------------------------------------------------------------

UNAVAILABLE = {"type": "ledger_unavailable", "ran": "no"}


async def test_a_claim_whose_answer_was_lost_runs_nothing_and_is_taken_back(
    app: App, ledger: Ledger, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An honest retry is not condemned to "unknown"."""
    app.command(world.charge)
    await lose_claim(app, monkeypatch)
    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (50310, UNAVAILABLE)
    assert world.effects == []
    assert result(await app.handle(charge()))["number"] == 1


def lose_completions(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, times: int) -> list[LedgerDown]:
    """The ledger is away whenever something is to be completed, so many times; gives what is left of the failures."""
    complete = ledger.complete
    failures = [LedgerDown("away") for _ in range(times)]

    async def fragile(*args: Any) -> bool:
        if failures:
            raise failures.pop()
        return await complete(*args)

    monkeypatch.setattr(ledger, "complete", fragile)
    return failures


async def test_an_outcome_that_cannot_be_recorded_is_answered_and_recorded_later(
    app: App, ledger: Ledger, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P5: the ledger is lost after the effect; the caller gets the true outcome, and so does the retry."""
    app.command(world.charge)
    failures = lose_completions(await app.ledger(), monkeypatch, times=2)
    assert result(await app.handle(charge(1)))["number"] == 1
    replayed: list[Any] = []
    assert result(await app.handle(charge(2), replayed=replayed))["number"] == 1
    assert replayed == [2]
    assert failures == []
    assert await stands(ledger) is State.DONE
    assert world.effects == [5]


async def test_an_error_that_cannot_be_recorded_says_so(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The true outcome with `recorded: false`."""

    @app.command(name="charge")
    async def handler(cents: int) -> None:
        raise DomainError(4020, "not enough money", {"balance": 3})

    lose_completions(await app.ledger(), monkeypatch, times=1)
    assert error(await app.handle(charge(1)))["data"] == {"balance": 3, "recorded": False}
    assert error(await app.handle(charge(2)))["data"] == {"balance": 3, "replayed": True}


async def test_a_commit_point_that_cannot_be_written_stops_the_handler(
    app: App, ledger: Ledger, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.command(name="charge")(world.held_between)
    world.gate.set()
    handle = await app.ledger()

    async def away(*args: Any) -> bool:
        raise LedgerDown("away")

    with monkeypatch.context() as patched:
        patched.setattr(handle, "commit_point", away)
        assert error(await app.handle(charge()))["data"]["ran"] in ("no", "unknown")
    assert world.effects == []


@with_server
async def test_a_ledger_that_cannot_be_reached_refuses_commands_and_no_queries(
    store: Store, new_app: NewApp, world: World, request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(f"{store.kind}_server")
    opened, fresh = new_app(), new_app()
    for app in (opened, fresh):
        app.command(world.charge)
        app.query(name="look")(lambda: len(world.effects))
    assert result(await opened.handle(charge(key="before")))["number"] == 1
    server.kill()
    try:
        for app in (opened, fresh):
            refused = error(await app.handle(charge()))
            assert (refused["code"], refused["data"]) == (50310, UNAVAILABLE)
            assert result(await app.handle(call("look"))) == 1
            mixed = read(await app.handle(batch(call("look", id=1), charge(2), call("look", id=3))))
            assert [answer.get("result") for answer in mixed] == [1, None, 1]
    finally:
        server.start()
    for app in (opened, fresh):
        await answers_again(await app.ledger())
        assert result(await app.handle(charge()))["number"] == 2
        assert result(await app.handle(charge(key="before")))["number"] == 1


@with_server
async def test_a_server_that_dies_after_the_effect_costs_the_caller_nothing(
    store: Store, app: App, ledger: Ledger, world: World, request: pytest.FixtureRequest
) -> None:
    """P5, P9: the true outcome is answered; when the server is back, it is recorded, and a retry gets it."""
    server: Server = request.getfixturevalue(f"{store.kind}_server")
    app.command(name="charge")(world.held_after)
    first = asyncio.create_task(app.handle(charge(1)))
    await world.begun.wait()
    server.kill()
    try:
        world.gate.set()
        assert result(await first)["number"] == 1
    finally:
        server.start()
    await answers_again(await app.ledger())
    replayed: list[Any] = []
    assert result(await app.handle(charge(2), replayed=replayed))["number"] == 1
    assert replayed == [2]
    assert world.effects == [5]


# --- one transaction (B1) --------------------------------------------------------------------------------------------


class Effects:
    """A table of the handler's own, in the database of the ledger."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ask("CREATE TABLE IF NOT EXISTS effects (cents INTEGER)")
        self._ask("DELETE FROM effects")

    @staticmethod
    async def add(ctx: Context, cents: int) -> int:
        """The effect, through the open transaction; gives the number of effects there are by then."""
        if hasattr(ctx.db, "pragma"):
            ctx.db.execute("INSERT INTO effects VALUES (?)", (cents,))
            return cast(int, ctx.db.execute("SELECT count(*) FROM effects").get)
        await ctx.db.execute("INSERT INTO effects VALUES (%s)", (cents,))
        cursor = await ctx.db.execute("SELECT count(*) FROM effects")
        return cast(int, (await cursor.fetchone())[0])

    @property
    def all(self) -> list[int]:
        """What others see: that is, what was committed."""
        return sorted(cents for (cents,) in self._ask("SELECT cents FROM effects"))

    def _ask(self, statement: str) -> list[Any]:
        if self._store.kind == "sqlite":
            db = apsw.Connection(self._store.url.removeprefix("sqlite:"))
            try:
                db.set_busy_timeout(5000)
                return db.execute(statement).fetchall()
            finally:
                db.close()
        with psycopg.connect(self._store.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


@pytest.fixture
def effects(store: Store, app: App) -> Effects:
    return Effects(store)


@transactional
async def test_effect_and_record_commit_together(app: App, effects: Effects, ledger: Ledger) -> None:
    """B1: and until the commit, nobody sees either."""
    seen: list[Any] = []

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        number = await effects.add(ctx, cents)
        seen.append((effects.all, await ledger.get(ID)))
        return {"number": number}

    replayed: list[Any] = []
    for id in (1, 2, 3):
        assert result(await app.handle(charge(id), replayed=replayed)) == {"number": 1}
    assert seen == [([], None)]
    assert replayed == [2, 3]
    assert effects.all == [5]
    assert await stands(ledger) is State.DONE


@transactional
async def test_a_domain_error_undoes_the_effect_and_is_recorded(app: App, effects: Effects, ledger: Ledger) -> None:
    """B1, P5."""

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        await effects.add(ctx, cents)
        raise DomainError(4020, "not enough money", {"cents": cents})

    assert error(await app.handle(charge()))["data"] == {"cents": 5}
    assert error(await app.handle(charge()))["data"] == {"cents": 5, "replayed": True}
    assert effects.all == []
    assert await stands(ledger) is State.DONE


@transactional
async def test_a_handler_that_fails_leaves_nothing(app: App, effects: Effects, ledger: Ledger) -> None:
    """B1: no effect, no record; a retry runs."""
    attempts: list[int] = []

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        attempts.append(cents)
        number = await effects.add(ctx, cents)
        if len(attempts) == 1:
            raise RuntimeError("secret")
        return {"number": number}

    refused = error(await app.handle(charge()))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "no"})
    assert effects.all == []
    assert await ledger.get(ID) is None
    assert result(await app.handle(charge())) == {"number": 1}
    assert effects.all == [5]


@transactional
@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_a_transaction_that_is_interrupted_leaves_nothing(
    how: str, app: App, effects: Effects, ledger: Ledger, world: World
) -> None:
    """B1: until the commit, everything can be undone."""

    @app.command(name="charge", on_crash="transactional", timeout=0.3 if how == "deadline" else None)
    async def handler(cents: int, ctx: Context) -> Any:
        number = await effects.add(ctx, cents)
        world.begun.set()
        await world.gate.wait()
        return {"number": number}

    await app.ledger()
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    if how == "cancel":
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
    else:
        refused = error(await first)
        assert (refused["code"], refused["data"]) == (DEADLINE, {"type": "deadline_exceeded", "ran": "no"})
    assert effects.all == []
    assert await ledger.get(ID) is None
    world.gate.set()
    assert result(await app.handle(charge())) == {"number": 1}
    assert effects.all == [5]


@transactional
async def test_a_transaction_past_a_commit_point_of_its_own_is_finished(
    app: App, effects: Effects, ledger: Ledger, world: World
) -> None:
    """B1: it may have done something elsewhere, so its caller cannot stop it any more."""

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        await ctx.commit_point()
        number = await effects.add(ctx, cents)
        world.begun.set()
        await world.gate.wait()
        return {"number": number}

    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    world.gate.set()
    assert result(await app.handle(charge())) == {"number": 1}
    assert effects.all == [5]


@transactional
async def test_of_many_duplicates_one_takes_effect(new_app: NewApp, effects: Effects) -> None:
    """B1, over what counts as three processes."""
    apps = [new_app() for _ in range(3)]
    for each in apps:

        @each.command(name="charge", on_crash="transactional")
        async def handler(cents: int, ctx: Context) -> Any:
            return {"number": await effects.add(ctx, cents)}

    replayed: list[Any] = []
    calls = [apps[n % 3].handle(charge(n), replayed=replayed) for n in range(18)]
    assert [result(reply) for reply in await asyncio.gather(*calls)] == [{"number": 1}] * 18
    assert len(replayed) == 17
    assert effects.all == [5]


@transactional
async def test_different_commands_at_once_all_take_effect(new_app: NewApp, effects: Effects) -> None:
    apps = [new_app() for _ in range(3)]
    for each in apps:

        @each.command(name="charge", on_crash="transactional")
        async def handler(cents: int, ctx: Context) -> Any:
            await effects.add(ctx, cents)
            return cents

    calls = [apps[n % 3].handle(charge(n, cents=n, key=f"k{n}")) for n in range(15)]
    assert [result(reply) for reply in await asyncio.gather(*calls)] == list(range(15))
    assert effects.all == list(range(15))


@transactional
async def test_a_duplicate_of_an_open_transaction_elsewhere_waits_for_its_commit(
    new_app: NewApp, effects: Effects, world: World
) -> None:
    """B1."""
    here, there = new_app(), new_app()
    for each in (here, there):

        @each.command(name="charge", on_crash="transactional")
        async def handler(cents: int, ctx: Context) -> Any:
            number = await effects.add(ctx, cents)
            world.begun.set()
            await world.gate.wait()
            return {"number": number}

    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    replayed: list[Any] = []
    second = asyncio.create_task(there.handle(charge(2), replayed=replayed))
    await asyncio.sleep(0)
    world.gate.set()
    assert result(await first) == result(await second) == {"number": 1}
    assert replayed == [2]
    assert effects.all == [5]


@transactional
async def test_a_duplicate_of_an_open_transaction_waits_as_long_as_its_method_says(
    new_app: NewApp, effects: Effects, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than one turn of its store, and not for ever."""
    here, patient, hasty = new_app(), new_app(), new_app()
    await here.ledger()
    turn = in_short_turns(monkeypatch)
    for each, wait in ((here, 25), (patient, 25), (hasty, 3 * turn)):

        @each.command(name="charge", on_crash="transactional", wait=wait)
        async def handler(cents: int, ctx: Context) -> Any:
            number = await effects.add(ctx, cents)
            world.begun.set()
            await world.gate.wait()
            return {"number": number}

    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    replayed: list[Any] = []
    second = asyncio.create_task(patient.handle(charge(2), replayed=replayed))
    began = asyncio.get_running_loop().time()
    is_in_progress(error(await hasty.handle(charge(3))))
    assert asyncio.get_running_loop().time() - began >= 3 * turn
    assert not second.done()
    world.gate.set()
    assert result(await first) == result(await second) == {"number": 1}
    assert replayed == [2]
    assert effects.all == [5]


def in_short_turns(monkeypatch: pytest.MonkeyPatch) -> float:
    """Shorten the turns in which stores wait for a lock, 5 s in SQLite and 1 s in PostgreSQL; gives their length."""
    for name, module in list(sys.modules.items()):
        if name.startswith("wirecall.ledger.sqlite") and hasattr(module, "PATIENCE"):
            monkeypatch.setattr(module, "PATIENCE", 0.2)
    monkeypatch.setattr(postgres_transaction, "TURN", 0.2)
    return 0.2


only_postgres = pytest.mark.parametrize("store", ["postgres"], indirect=True)


def holding(app: App, effects: Effects, world: World, **terms: Any) -> None:
    """Give an app a transactional command that waits after its effect."""

    @app.command(name="charge", on_crash="transactional", **terms)
    async def handler(cents: int, ctx: Context) -> Any:
        number = await effects.add(ctx, cents)
        world.begun.set()
        await world.gate.wait()
        return {"number": number}


@only_postgres
async def test_a_short_wait_for_an_open_transaction_is_short(
    new_app: NewApp, effects: Effects, world: World, store: Store
) -> None:
    """In SQLite the lock is the file's, and tells not which command has it: there it is 5 s at least."""
    here, there = new_app(), new_app()
    for each in (here, there):
        holding(each, effects, world, wait=0.3)
    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    async with asyncio.timeout(2.5):
        is_in_progress(error(await there.handle(charge(2))))
    world.gate.set()
    assert result(await first) == {"number": 1}
    assert effects.all == [5]


@only_postgres
async def test_duplicates_that_wait_for_open_transactions_leave_connections_to_others(
    new_app: NewApp, effects: Effects, world: World, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_short_turns(monkeypatch)
    here = new_app()
    async with make_app(ledger=f"{store.url}&pool=2") as there:
        for each in (here, there):
            holding(each, effects, world)

        @there.command
        async def other() -> int:
            return 1

        keys = [f"key-{number}" for number in range(6)]
        firsts = [asyncio.create_task(here.handle(charge(key=key))) for key in keys]
        await eventually_open(store, len(keys))
        seconds = [asyncio.create_task(there.handle(charge(key=key))) for key in keys]
        await eventually_open(store, len(keys) + 2)
        async with asyncio.timeout(10):
            assert result(await there.handle(call("other", key="k"))) == 1
        assert not any(task.done() for task in seconds)
        world.gate.set()
        assert [result(await task) for task in firsts] == [result(await task) for task in seconds]
    assert effects.all == [5] * len(keys)


async def eventually_open(store: Store, number: int) -> None:
    """Until so many transactions have written a record, or wait for one."""
    statement = "SELECT count(*) FROM pg_stat_activity WHERE xact_start IS NOT NULL AND application_name = 'wirecall'"
    async with asyncio.timeout(10), await psycopg.AsyncConnection.connect(store.url, autocommit=True) as db:
        while True:
            row = await (await db.execute(statement)).fetchone()
            if row is not None and row[0] >= number:
                return
            await asyncio.sleep(0.01)


@only_postgres
async def test_a_statement_that_a_failed_handler_left_behind_is_waited_for(store: Store, effects: Effects) -> None:
    """Whether the session lives is not asked while somebody waits for its answer: the answer would be lost to them."""
    left: list[asyncio.Task[Any]] = []
    async with make_app(ledger=f"{store.url}&pool=1") as app:

        @app.command(name="charge", on_crash="transactional")
        async def handler(cents: int, ctx: Context) -> Any:
            if not left:
                left.append(asyncio.create_task(ctx.db.execute("SELECT pg_sleep(0.05)")))
                await asyncio.sleep(0.01)
                time.sleep(0.2)  # noqa: ASYNC251  # the answer is there by now, and nobody has read it
                raise psycopg.OperationalError("of another server")
            return await effects.add(ctx, cents)

        refused = error(await app.handle(charge(1)))
        assert (refused["code"], refused["data"]["ran"]) == (-32603, "no")
        async with asyncio.timeout(10):
            assert result(await app.handle(charge(2))) == 1
            await left[0]
    assert effects.all == [5]


@transactional
@pytest.mark.parametrize("how", ["deadline", "hung up", "stop"])
async def test_a_duplicate_that_waits_for_an_open_transaction_can_be_left(
    how: str, new_app: NewApp, effects: Effects, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever leaves does not know what becomes of the first; and an app that stops does not wait for it."""
    here, there = new_app(), new_app()
    await here.ledger()
    in_short_turns(monkeypatch)
    for each in (here, there):
        holding(each, effects, world, timeout=0.3 if how == "deadline" and each is there else None)
    first = asyncio.create_task(here.handle(charge(1)))
    await world.begun.wait()
    second = asyncio.create_task(there.handle(charge(2)))
    async with asyncio.timeout(10):  # `wait` is 25 s
        if how == "deadline":
            refused = error(await second)
            assert (refused["code"], refused["data"]["ran"]) == (50410, "unknown")
        elif how == "hung up":
            await asyncio.sleep(0.1)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
        else:
            await asyncio.sleep(0.1)
            await there.aclose()
            assert error(await second)["code"] == 50310
    world.gate.set()
    assert result(await first) == {"number": 1}
    assert effects.all == [5]


@transactional
async def test_other_params_are_a_conflict_in_a_transaction_too(app: App, effects: Effects) -> None:
    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        return await effects.add(ctx, cents)

    assert result(await app.handle(charge())) == 1
    refused = error(await app.handle(charge(cents=6)))
    assert (refused["code"], refused["data"]) == (42210, CONFLICT)
    assert effects.all == [5]


@transactional
async def test_what_a_transaction_does_not_keep(app: App, effects: Effects, ledger: Ledger, store: Store) -> None:
    @app.command(name="charge", on_crash="transactional", retention=100, max_stored_result=100)
    async def handler(cents: int, ctx: Context) -> Any:
        await effects.add(ctx, cents)
        return {1: "small", 2: "x" * 99, 3: object()}[cents]

    for cents in (1, 2, 3):
        await app.handle(charge(cents=cents, key=str(cents)))
    assert effects.all == [1, 2, 3]
    store.age(structs.replace(ID, key="1"), 101)
    for cents in (1, 2, 3):
        refused = error(await app.handle(charge(cents=cents, key=str(cents))))
        assert (refused["code"], refused["data"]["type"], refused["data"]["ran"]) == (41010, "result_not_retained", "yes")
    assert effects.all == [1, 2, 3]


@transactional
@pytest.mark.parametrize("state", [State.RUNNING, State.UNKNOWN])
async def test_a_transaction_respects_a_record_that_another_mode_left(
    state: State, app: App, effects: Effects, ledger: Ledger
) -> None:
    """The method was declared otherwise before: what it began is not begun again."""

    @app.command(name="charge", on_crash="transactional", wait=0.1)
    async def handler(cents: int, ctx: Context) -> Any:
        return await effects.add(ctx, cents)

    record = await ledger.claim(claim_of(ID, fingerprint=PRINT))
    if state is State.RUNNING:
        is_in_progress(error(await app.handle(charge())))
    else:
        assert await ledger.abandon(record.token)
        is_unknown(error(await app.handle(charge())), record)
    assert effects.all == []
    assert await stands(ledger) is state


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize("when", ["before the effect", "after the effect"])
async def test_a_server_that_dies_in_a_transaction_leaves_nothing_or_everything(
    when: str, app: App, effects: Effects, postgres_server: Postgres
) -> None:
    """B1: exactly one effect in the end, whatever the first answer was."""
    deaths = [when]

    @app.command(name="charge", on_crash="transactional")
    async def handler(cents: int, ctx: Context) -> Any:
        if deaths == ["before the effect"]:
            deaths.clear()
            restart(postgres_server)
        number = await effects.add(ctx, cents)
        if deaths:
            deaths.clear()
            restart(postgres_server)
        return {"number": number}

    first = read(await app.handle(charge()))
    if "error" in first:
        assert (first["error"]["code"], first["error"]["data"]["ran"]) == (50310, "no")
        assert effects.all == []
        await answers_again(await app.ledger())
    assert result(await app.handle(charge())) == {"number": 1}
    assert effects.all == [5]


def restart(server: Server) -> None:
    server.kill()
    server.start()


# --- for this file ---------------------------------------------------------------------------------------------------


def test_the_memory_ledger_of_these_tests_is_the_real_one(store: Store) -> None:
    """Only where it is kept is ours: one URL, one ledger, so that two apps can share it."""
    assert memory.open_url.__module__ == "tests.servers"
    assert json.loads(charge()) == {
        "jsonrpc": "2.0",
        "method": "charge",
        "params": {"cents": 5, "idempotency_key": "k"},
        "id": 1,
    }
