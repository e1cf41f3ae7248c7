"""Generates the states of a run in docs/commands.md from `commands/run.py`.

`python -m tests.docs_run` writes them, and a test compares them.
"""

from pathlib import Path

from wirecall.commands.run import NOTHING_DONE, STOPS, TABLE, RunEvent, RunState

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
START, END = "<!-- made by tests/docs_run.py -->\n", "<!-- end -->\n"


def transitions() -> dict[tuple[RunState, RunState], list[RunEvent]]:
    """Return the events that lead from one state to another, by both states."""
    arrows: dict[tuple[RunState, RunState], list[RunEvent]] = {}
    for (state, event), to in TABLE.items():
        if to is not state:
            arrows.setdefault((state, to), []).append(event)
    return arrows


def section() -> str:
    """Return the diagram and the table of states as they should be."""
    arrows = transitions()
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {RunState.CLAIMING.name}"]
    lines += [f"    {a.name} --> {b.name}: {', '.join(each.name.lower() for each in by)}" for (a, b), by in arrows.items()]
    lines += [
        f"    {state.name} --> [*]"
        for state in RunState
        if not any(a is state for a, b in arrows if b is not RunState.FOLLOWING)
    ]
    lines += ["```", "", "| State | Meaning | If cancelled, the run | The caller gets |", "| --- | --- | --- | --- |"]
    for state in RunState:
        stops = "stops" if state in STOPS else "finishes"
        ran = "no" if state in NOTHING_DONE else "unknown"
        lines.append(f'| {state.name} | {state.value} | {stops} | `ran: "{ran}"` |')
    lines += ["", "| Event | When |", "| --- | --- |"]
    lines += [f"| {event.name.lower()} | {event.value} |" for event in RunEvent]
    return "\n".join(lines) + "\n"


def page() -> str:
    """Return the page with the section as it should be."""
    before, rest = PAGE.read_text().split(START)
    return before + START + section() + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(page())
