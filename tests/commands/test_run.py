"""The table of a run's states: what must hold whatever happens in which order."""

from hypothesis import given
from hypothesis import strategies as st

from wirecall.commands.run import INTERRUPTIBLE, NOTHING_DONE, STOPS, TABLE, Event, State

LAST = {State.RECORDING, State.UNDONE, State.DOUBTFUL}


def reached(start: State) -> set[State]:
    """Return every state that a run can come to from another one."""
    found, left = {start}, [start]
    while left:
        state = left.pop()
        new = {to for (origin, _), to in TABLE.items() if origin is state} - found
        found |= new
        left += new
    return found


def test_every_state_is_reached_and_every_run_can_end() -> None:
    assert reached(State.CLAIMING) == set(State)
    assert all(reached(state) & LAST for state in State)
    assert {event for _, event in TABLE} == set(Event)


def test_a_cancel_stops_only_what_has_done_nothing_or_waits_for_another_run() -> None:
    for (state, event), to in TABLE.items():
        if event is Event.CANCEL:
            assert state in NOTHING_DONE | {State.FOLLOWING}
            assert to in (State.CANCELLED, State.STOPPING, State.LEAVING)
    assert INTERRUPTIBLE < STOPS


def test_a_handler_that_fails_past_its_commit_point_is_never_called_undone() -> None:
    for event in (Event.RAISE, Event.REFUSE):
        assert TABLE[State.COMMITTED, event] is State.DOUBTFUL
        assert TABLE[State.MARKING, event] is State.DOUBTFUL
    assert TABLE[State.ENTERED, Event.RAISE] is State.DOUBTFUL
    # A caller that leaves hears "no" only where nothing can have happened.
    assert not NOTHING_DONE & {
        State.MARKING,
        State.COMMITTED,
        State.ENTERED,
        State.SPILLED,
        State.ASKING,
        *LAST - {State.UNDONE},
    }


@given(st.lists(st.sampled_from(Event), max_size=40))
def test_once_the_ledger_has_the_commit_point_no_order_of_events_leads_back(events: list[Event]) -> None:
    state = State.COMMITTED
    for event in events:
        state = TABLE.get((state, event), state)
        if event is Event.UNDO:
            break  # only a store undoes a transaction, and its run is never COMMITTED
        assert state not in NOTHING_DONE


@given(st.lists(st.sampled_from(Event), max_size=40))
def test_a_handler_begins_only_with_a_granted_record(events: list[Event]) -> None:
    state, granted = State.CLAIMING, False
    for event in events:
        to = TABLE.get((state, event), state)
        granted = granted or to is State.GRANTED
        assert granted or to in {State.CLAIMING, State.FOLLOWING, State.LEAVING, State.UNDONE, State.DOUBTFUL}
        state = to
