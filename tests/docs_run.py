"""Generates the two tables of states in docs/commands.md from `commands`.

The run of a command comes from `commands/run.py`, the receipt of a call without a key from
`commands/receipts.py`. `python -m tests.docs_run` writes both, and a test compares them.
"""

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from wirecall.commands import receipts, run
from wirecall.commands.receipts import LOST_STATES, ReceiptEvent, ReceiptState
from wirecall.commands.run import NOTHING_DONE, STOPS, RunEvent, RunState

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
RUN = "<!-- made by tests/docs_run.py -->\n"
RECEIPT = "<!-- receipts, made by tests/docs_run.py -->\n"
END = "<!-- end -->\n"


def transitions(table: Mapping[tuple[S, E], S]) -> dict[tuple[S, S], list[E]]:
    """Return the events that lead from one state to another, by both states."""
    arrows: dict[tuple[S, S], list[E]] = {}
    for (state, event), to in table.items():
        if to is not state:
            arrows.setdefault((state, to), []).append(event)
    return arrows


def diagram(table: Mapping[tuple[S, E], S], first: S, last: list[S]) -> list[str]:
    """Return a table as a diagram."""
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    lines += [
        f"    {a.name} --> {b.name}: {', '.join(each.name.lower() for each in by)}"
        for (a, b), by in transitions(table).items()
    ]
    lines += [f"    {state.name} --> [*]" for state in last]
    return [*lines, "```", ""]


def events_of(kind: type[enum.Enum]) -> list[str]:
    lines = ["", "| Event | When |", "| --- | --- |"]
    return lines + [f"| {event.name.lower()} | {event.value} |" for event in kind]


def run_section() -> str:
    """Return the states of a run as they should be."""
    left = {a for a, b in transitions(run.TABLE) if b is not RunState.FOLLOWING}
    lines = diagram(
        run.TABLE, RunState.CLAIMING, [state for state in RunState if state not in left]
    )
    lines += [
        "| State | Meaning | If cancelled, the run | The caller gets |",
        "| --- | --- | --- | --- |",
    ]
    for state in RunState:
        stops = "stops" if state in STOPS else "finishes"
        ran = "no" if state in NOTHING_DONE else "unknown"
        lines.append(f'| {state.name} | {state.value} | {stops} | `ran: "{ran}"` |')
    return "\n".join(lines + events_of(RunEvent)) + "\n"


def receipt_section() -> str:
    """Return the states of a receipt as they should be."""
    lines = diagram(
        receipts.TABLE,
        ReceiptState.UNASSIGNED,
        [ReceiptState.UNRECORDED, ReceiptState.WRITTEN, ReceiptState.LOST, ReceiptState.ABANDONED],
    )
    lines += ["| State | Meaning | The answer |", "| --- | --- | --- |"]
    for state in ReceiptState:
        answer = "is lost" if state in LOST_STATES else "is not lost"
        lines.append(f"| {state.name} | {state.value} | {answer} |")
    return "\n".join(lines + events_of(ReceiptEvent)) + "\n"


def page() -> str:
    """Return the page with both sections as they should be."""
    text = PAGE.read_text()
    for start, section in ((RUN, run_section()), (RECEIPT, receipt_section())):
        before, rest = text.split(start)
        text = before + start + section + END + rest.split(END, 1)[1]
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
