"""The ledger as a process sees it: the states, and the commands that are remembered."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tests.calls import call, error, make_app, result
from tests.ledger import PRINT, claim_of, granted, outcome_of
from wirecall.commands import background
from wirecall.commands import witness as module
from wirecall.commands.witness import TABLE, LedgerEvent, LedgerState, Witness
from wirecall.errors import LedgerUnavailable, OutcomeUnknown
from wirecall.ledger.base import (
    IDENTITY,
    IDENTITY_CHANNEL,
    Ledger,
    Mark,
    RecordId,
    Seen,
    open_ledger,
)
from wirecall.ledger.identity import (
    DOUBTS_CHANNEL,
    Doubt,
    accept,
    doubts,
    identity_of,
    put_back,
    report,
)


@pytest.fixture
async def ledger(tmp_path: Path):  # type: ignore[no-untyped-def]
    ledger = await open_ledger(f"sqlite:{tmp_path}/ledger.db")
    yield ledger
    await ledger.aclose()


async def done(ledger: Ledger, witness: Witness, key: str) -> RecordId:
    """A command that this process has run and acknowledged."""
    id = RecordId("", "pay", key)
    await witness.admit(ledger, id)
    record = await granted(ledger, id)
    assert witness.is_sure(ledger, record)
    assert await ledger.complete(record.token, outcome_of(), 1000)
    witness.note(record.token, PRINT, 1000)
    return id


def state_of(witness: Witness) -> LedgerState:
    return witness.state


async def remove(ledger: Ledger, id: RecordId) -> None:
    """Lose a record, as no verb does."""
    store = ledger._running().file.db  # type: ignore[attr-defined]
    store.execute("DELETE FROM wirecall_commands WHERE key = ?", (id.key,))


def test_every_state_has_its_doubt_and_its_end() -> None:
    for state in LedgerState:
        assert TABLE[state, LedgerEvent.DOUBT] is LedgerState.SUSPECT
        assert TABLE[state, LedgerEvent.ACCEPT] is LedgerState.ACCEPTED
    assert TABLE[LedgerState.ACCEPTED, LedgerEvent.RESTORE] is LedgerState.STEADY
    assert (LedgerState.STEADY, LedgerEvent.RESTORE) not in TABLE
    assert [state for (state, event), to in TABLE.items() if to is LedgerState.STEADY] != []


async def test_first_look_makes_a_store_steady(ledger: Ledger) -> None:
    witness = Witness()
    assert state_of(witness) is LedgerState.FRESH
    await witness.admit(ledger, RecordId("", "pay", "a"))
    assert state_of(witness) is LedgerState.STEADY
    assert witness.reached == ledger.reached


async def test_ledger_in_memory_is_not_looked_at() -> None:
    ledger = await open_ledger("memory:")
    witness = Witness()
    await witness.admit(ledger, RecordId("", "pay", "a"))
    assert (await ledger.see()).identity is None
    record = await granted(ledger)
    witness.note(record.token, PRINT, 1000)
    assert witness.is_sure(ledger, record)


async def test_lost_record_of_the_last_command_is_found_by_the_next_look(ledger: Ledger) -> None:
    witness = Witness()
    first = await done(ledger, witness, "a")
    second = await done(ledger, witness, "b")
    await witness.look(ledger)
    await remove(ledger, first)  # it was not the last
    await witness.look(ledger)
    assert state_of(witness) is LedgerState.STEADY
    third = await done(ledger, witness, "c")
    await remove(ledger, third)
    await remove(ledger, second)
    await witness.look(ledger)
    assert witness.doubt is not None
    assert [each.id for each in witness.doubt.lost] == [first, second, third]
    with pytest.raises(OutcomeUnknown):
        await witness.admit(ledger, third)
    with pytest.raises(LedgerUnavailable) as refused:
        await witness.admit(ledger, RecordId("", "pay", "new"))
    assert refused.value.ran == "no"


async def test_acknowledged_command_that_is_granted_again_is_refused(ledger: Ledger) -> None:
    witness = Witness()
    id = await done(ledger, witness, "a")
    await remove(ledger, id)
    record = await granted(ledger, id)
    assert not witness.is_sure(ledger, record)
    with pytest.raises(OutcomeUnknown):
        await witness.confirm(ledger, record)
    assert state_of(witness) is LedgerState.SUSPECT
    other = await ledger.claim(claim_of(RecordId("else", "pay", "a")))
    fresh = Witness()
    await fresh.admit(ledger, other.id)
    await fresh.confirm(ledger, other)  # of another caller


async def test_lost_command_is_refused_although_another_method_took_its_key(
    ledger: Ledger,
) -> None:
    witness = Witness()
    paid = await done(ledger, witness, "a")
    posted = await granted(ledger, RecordId("", "post", "a"))
    assert witness.is_sure(ledger, posted)
    assert await ledger.complete(posted.token, outcome_of(), 1000)
    witness.note(posted.token, PRINT, 1000)
    await remove(ledger, paid)
    record = await granted(ledger, paid)
    assert not witness.is_sure(ledger, record)
    with pytest.raises(OutcomeUnknown):
        await witness.confirm(ledger, record)


async def test_command_may_run_again_after_its_retention(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = Witness()
    id = await done(ledger, witness, "a")
    await remove(ledger, id)
    now = module.clock()
    monkeypatch.setattr(module, "clock", lambda: now + 1001)
    await witness.look(ledger)
    await witness.confirm(ledger, await granted(ledger, id))
    assert state_of(witness) is LedgerState.STEADY


async def test_remembered_commands_are_bounded(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 5)
    witness = Witness()
    ids = [await done(ledger, witness, f"k{number}") for number in range(23)]
    for id in ids:
        await remove(ledger, id)
    await witness.look(ledger)
    assert witness.doubt is not None
    lost = [each.id for each in witness.doubt.lost]
    assert 5 <= len(lost) <= 10
    assert lost == ids[-len(lost) :]


async def test_fence_that_goes_back_is_doubted_until_the_operator_accepts(ledger: Ledger) -> None:
    witness = Witness()
    await done(ledger, witness, "a")
    await done(ledger, witness, "b")
    await witness.look(ledger)
    db = ledger._running().file.db  # type: ignore[attr-defined]
    db.execute("UPDATE wirecall_meta SET fence = 1")
    await witness.look(ledger)
    assert witness.doubt is not None and witness.doubt.kind == "older"
    db.execute("UPDATE wirecall_meta SET fence = 100")  # others have taken some
    await witness.look(ledger)
    assert state_of(witness) is LedgerState.SUSPECT
    found = await doubts(ledger, identity_of((await ledger.see()).identity))
    await accept(ledger, found.values(), "ada", "it is right")
    await witness.look(ledger)
    assert state_of(witness) is LedgerState.STEADY


async def test_doubt_of_another_process_counts(ledger: Ledger) -> None:
    witness = Witness()
    await done(ledger, witness, "a")
    identity = identity_of((await ledger.see()).identity)
    assert identity is not None
    await report(ledger, "other", Doubt("lost", "x", "y", identity.name, identity.name))
    await witness.look(ledger)
    assert witness.doubt is not None and witness.doubt.kind == "reported"
    late = Witness()  # a process that starts now
    with pytest.raises(LedgerUnavailable):
        await late.admit(ledger, RecordId("", "pay", "b"))


async def test_identity_that_comes_back_ends_the_doubt(ledger: Ledger) -> None:
    witness = Witness()
    await done(ledger, witness, "a")
    right = (await ledger.see()).identity
    assert right is not None
    await ledger.mark(IDENTITY_CHANNEL, Mark(IDENTITY, b'{"name":"wrong"}'), 1000)
    await witness.look(ledger)
    assert witness.doubt is not None and witness.doubt.kind == "other"
    await ledger.mark(IDENTITY_CHANNEL, Mark(IDENTITY, right), 1000)
    await witness.look(ledger)
    assert state_of(witness) is LedgerState.STEADY


async def test_change_of_the_server_makes_commands_wait_for_the_others(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(module, "clock", lambda: now)
    witness = Witness()
    await done(ledger, witness, "a")
    see = ledger.see

    async def elsewhere(identity: bytes | None = None):  # type: ignore[no-untyped-def]
        seen = await see(identity)
        return type(seen)(seen.identity, seen.fence, "another server")

    monkeypatch.setattr(ledger, "see", elsewhere)
    await witness.look(ledger)
    assert state_of(witness) is LedgerState.FRESH
    assert witness.reached != ledger.reached
    now += module.SETTLE
    await witness.look(ledger)
    assert state_of(witness) is LedgerState.STEADY


def test_command_without_a_loop_is_served_and_remembered(tmp_path: Path) -> None:
    app = make_app(ledger=f"sqlite:{tmp_path}/ledger.db")
    app.command(name="pay")(lambda: 1)
    assert result(app.handle_sync(call("pay", key="a"))) == 1
    ledger = app._ledger
    assert ledger is not None
    db = ledger._running().file.db  # type: ignore[attr-defined]
    db.execute("DELETE FROM wirecall_commands")
    assert error(app.handle_sync(call("pay", key="a")))["code"] == 50910
    assert error(app.handle_sync(call("pay", key="b")))["code"] == 50310


# --- its clock, and its looks ---------------------------------------------------------------------


def test_clock_counts_the_time_in_which_the_machine_sleeps() -> None:
    """The ledgers count it, so a record may be gone when the machine wakes."""
    number = getattr(time, "CLOCK_BOOTTIME", None)
    if number is None:
        pytest.skip("this system has no such clock")
    assert module.clock.args == (number,)  # type: ignore[attr-defined]


async def test_record_may_be_gone_a_little_before_the_end_of_its_retention(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store has begun to count before it has answered, and its clock may be faster."""
    witness = Witness()
    id = await done(ledger, witness, "a")
    await remove(ledger, id)
    now = module.clock()
    monkeypatch.setattr(module, "clock", lambda: now + 995)
    await witness.look(ledger)
    await witness.confirm(ledger, await granted(ledger, id))
    assert state_of(witness) is LedgerState.STEADY


async def test_loss_that_shows_while_lost_commands_are_put_back_is_doubted(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = Witness()
    first = await done(ledger, witness, "a")
    second = await done(ledger, witness, "b")
    await remove(ledger, first)
    found = await doubts(ledger, identity_of((await ledger.see()).identity))
    await accept(ledger, found.values(), "ada", "it is right")

    async def put_back_late(*args: Any) -> None:
        await put_back(*args)
        await remove(ledger, second)
        with pytest.raises(OutcomeUnknown):
            await witness.confirm(ledger, await granted(ledger, second))

    monkeypatch.setattr(module, "put_back", put_back_late)
    await witness.look(ledger)
    assert state_of(witness) is LedgerState.SUSPECT
    assert witness.doubt is not None


async def test_ledger_is_looked_at_again_after_a_look_that_failed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LOOK_EVERY", 0.001)
    looks: list[int] = []
    again = asyncio.Event()

    class Odd(Witness):
        async def look(self, ledger: Ledger) -> None:
            looks.append(len(looks))
            if len(looks) == 1:
                raise ValueError("what it has read is odd")
            again.set()

    work = background.Background()
    work.plan_look(Odd(), ledger)
    async with asyncio.timeout(60.0):
        await again.wait()
    work.stop()


async def test_moved_is_called_whenever_another_server_answers_and_after_the_acceptance(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    witness = Witness()
    await done(ledger, witness, "a")
    moves: list[str] = []
    see = ledger.see
    history = "b"

    async def elsewhere(identity: bytes | None = None) -> Seen:
        return Seen(None, 0, history)

    witness.moved = lambda: moves.append(history)
    monkeypatch.setattr(ledger, "see", elsewhere)
    await witness.look(ledger)
    await witness.look(ledger)
    assert (state_of(witness), moves) == (LedgerState.SUSPECT, ["b"])
    history = "c"
    await witness.look(ledger)
    await witness.look(ledger)
    assert (state_of(witness), moves) == (LedgerState.SUSPECT, ["b", "c"])
    monkeypatch.setattr(ledger, "see", see)
    await accept(ledger, [], "ann", "restored")
    await witness.look(ledger)
    assert (state_of(witness), moves) == (LedgerState.STEADY, ["b", "c", "c"])


async def test_moved_is_called_after_a_command_has_shown_a_loss(ledger: Ledger) -> None:
    witness = Witness()
    moves: list[int] = []
    id = await done(ledger, witness, "a")
    await remove(ledger, id)
    witness.moved = lambda: moves.append(1)
    with pytest.raises(OutcomeUnknown):
        await witness.confirm(ledger, await granted(ledger, id))
    await witness.look(ledger)
    assert moves == [1]


async def test_look_at_a_silent_store_ends_with_the_app(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that waits for it is refused, and no task remains."""
    app = make_app(ledger=f"sqlite:{tmp_path}/ledger.db")
    app.command(name="pay")(lambda: None)
    asked = asyncio.Event()

    async def silent(identity: bytes | None = None) -> Seen:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    monkeypatch.setattr(await app.ledger(), "see", silent)
    before = asyncio.all_tasks()
    waiting = asyncio.create_task(app.handle(call("pay", key="a")))
    async with asyncio.timeout(60.0):
        await asked.wait()
        await app.aclose(grace=0.0)
        refused = error(await waiting)
    assert (refused["code"], refused["data"]["ran"]) == (50310, "no")
    assert asyncio.all_tasks() <= before


@pytest.mark.parametrize("channel", [IDENTITY_CHANNEL, DOUBTS_CHANNEL])
async def test_commands_are_refused_while_a_mark_about_the_ledger_cannot_be_read(
    channel: str, ledger: Ledger, tmp_path: Path
) -> None:
    """Perhaps a newer version has made it. Nothing runs until it can be read."""
    app = make_app(ledger=f"sqlite:{tmp_path}/ledger.db")
    app.command(name="pay")(lambda: "paid")
    await ledger.mark(channel, Mark(IDENTITY, b'{"kind":"new"}'), 1000)
    refused = error(await app.handle(call("pay", key="a")))
    assert (refused["code"], refused["data"]["ran"]) == (50310, "no")
    await app.aclose()
