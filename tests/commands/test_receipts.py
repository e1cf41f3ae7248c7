"""The table of a receipt's states: invariants that hold for every order of events; and the marks."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from tests.calls import call
from wirecall import App
from wirecall.commands import receipts
from wirecall.commands.receipts import LOST_STATES, TABLE, ReceiptEvent, ReceiptState

# A record is assigned to the call.
ASSIGNED = {
    ReceiptState.PENDING,
    ReceiptState.WRITTEN,
    ReceiptState.LOST,
    ReceiptState.UNDECIDED,
    ReceiptState.ABANDONED,
}
EVENTS = st.lists(st.sampled_from(ReceiptEvent), max_size=40)


def after(state: ReceiptState, event: ReceiptEvent) -> ReceiptState:
    """Return the next state; an event that the table lacks is ignored."""
    return TABLE.get((state, event), state)


def reached(start: ReceiptState) -> set[ReceiptState]:
    """Return every state that a receipt can reach from another one."""
    found = {start}
    left = [start]
    while left:
        state = left.pop()
        new = {after(state, event) for event in ReceiptEvent} - found
        found |= new
        left += new
    return found


def test_receipt_table_reaches_every_state_by_every_event() -> None:
    assert reached(ReceiptState.UNASSIGNED) == set(ReceiptState)
    assert {event for _, event in TABLE} == set(ReceiptEvent)


def test_receipt_of_an_abandoned_call_is_never_written() -> None:
    for state in (ReceiptState.ABANDONED, ReceiptState.ABANDONED_EARLY, ReceiptState.UNDECIDED):
        assert ReceiptState.WRITTEN not in reached(state)


def test_receipt_of_a_lost_caller_changes_back_only_when_a_stream_is_resumed() -> None:
    for (state, event), to in TABLE.items():
        if state in LOST_STATES and to not in LOST_STATES:
            assert (state, event) in {
                (ReceiptState.LOST, ReceiptEvent.WRITE),
                (ReceiptState.LOST, ReceiptEvent.DOUBT),
            }


def test_receipt_of_every_state_in_a_claim_accepts_the_answer_of_the_ledger() -> None:
    """A claim is answered whatever has happened since it was made."""
    claiming = reached(ReceiptState.UNASSIGNED) - {
        ReceiptState.UNRECORDED,
        ReceiptState.WRITTEN,
        ReceiptState.UNDECIDED,
    }
    for state in claiming:
        assert TABLE[state, ReceiptEvent.ASSIGN] in ASSIGNED
        assert TABLE[state, ReceiptEvent.WITHDRAW] not in ASSIGNED


@given(EVENTS)
def test_receipt_is_written_only_if_a_record_was_assigned(events: list[ReceiptEvent]) -> None:
    state = ReceiptState.UNASSIGNED
    assigned = False
    for event in events:
        state = after(state, event)
        assigned = assigned or event is ReceiptEvent.ASSIGN
        assert assigned or state not in ASSIGNED


@given(EVENTS)
def test_receipt_of_a_caller_that_gave_up_stays_lost(events: list[ReceiptEvent]) -> None:
    state = ReceiptState.PENDING
    for event in (ReceiptEvent.ABANDON, *events):
        state = after(state, event)
        assert state in LOST_STATES


class ClockedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock the test sets."""

    now = 0.0

    def time(self) -> float:
        return self.now


def test_mark_of_a_written_answer_ends_with_its_loop() -> None:
    """The mark is due in the last turn of a loop that closes as `asyncio.run` does."""
    app = App("shop", single_user=True)
    app.command(name="pay", key="auto")(lambda: "paid")
    loop = ClockedLoop()

    async def pay() -> None:
        assert b"paid" in (await app.handle(call("pay")) or b"")

    async def pass_time() -> None:
        loop.now += receipts.MARK_AFTER

    loop.run_until_complete(pay())
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(pass_time())
    assert asyncio.all_tasks(loop) == set()
    loop.close()
