"""The table of a run's states: invariants that hold for every order of events."""

from hypothesis import given
from hypothesis import strategies as st

from wirecall.commands.run import INTERRUPTIBLE, NOTHING_DONE, STOPS, TABLE, RunEvent, RunState

LAST = {RunState.RECORDING, RunState.UNDONE, RunState.DOUBTFUL}


def reached(start: RunState) -> set[RunState]:
    """Return every state that a run can reach from another one."""
    found = {start}
    left = [start]
    while left:
        state = left.pop()
        new = {to for (origin, _), to in TABLE.items() if origin is state} - found
        found |= new
        left += new
    return found


def test_table_reaches_every_state_and_every_run_can_end() -> None:
    assert reached(RunState.CLAIMING) == set(RunState)
    assert all(reached(state) & LAST for state in RunState)
    assert {event for _, event in TABLE} == set(RunEvent)


def test_cancel_stops_only_runs_that_did_nothing_or_wait_for_another() -> None:
    for (state, event), to in TABLE.items():
        if event is RunEvent.CANCEL:
            assert state in NOTHING_DONE | {RunState.FOLLOWING}
            assert to in (RunState.CANCELLED, RunState.STOPPING, RunState.LEAVING)
    assert INTERRUPTIBLE < STOPS


def test_handler_that_fails_past_its_commit_point_is_never_reported_as_undone() -> None:
    for event in (RunEvent.RAISE, RunEvent.REFUSE):
        assert TABLE[RunState.COMMITTED, event] is RunState.DOUBTFUL
        assert TABLE[RunState.MARKING, event] is RunState.DOUBTFUL
    assert TABLE[RunState.ENTERED, RunEvent.RAISE] is RunState.DOUBTFUL
    # A caller that leaves receives "no" only where nothing can have happened.
    assert not NOTHING_DONE & {
        RunState.MARKING,
        RunState.COMMITTED,
        RunState.ENTERED,
        RunState.SPILLED,
        RunState.ASKING,
        *LAST - {RunState.UNDONE},
    }


@given(st.lists(st.sampled_from(RunEvent), max_size=40))
def test_commit_point_in_the_ledger_is_final_in_every_order_of_events(
    events: list[RunEvent],
) -> None:
    state = RunState.COMMITTED
    for event in events:
        state = TABLE.get((state, event), state)
        if event is RunEvent.UNDO:
            break  # only a store undoes a transaction, and its run is never COMMITTED
        assert state not in NOTHING_DONE


@given(st.lists(st.sampled_from(RunEvent), max_size=40))
def test_handler_begins_only_with_a_granted_record(events: list[RunEvent]) -> None:
    state = RunState.CLAIMING
    granted = False
    for event in events:
        to = TABLE.get((state, event), state)
        granted = granted or to is RunState.GRANTED
        assert granted or to in {
            RunState.CLAIMING,
            RunState.FOLLOWING,
            RunState.LEAVING,
            RunState.UNDONE,
            RunState.DOUBTFUL,
        }
        state = to
