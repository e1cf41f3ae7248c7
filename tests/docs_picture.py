"""Generates docs/pictures/run.svg, the states of a run, from `commands/run.py`.

`python -m tests.docs_picture` writes it, and a test compares it. The places of the states are
chosen here; states, events, arrows and colours come from the table. An arrow for every final
transition would hide the others, so a state lists the events that end it in its box.
"""

from pathlib import Path

from tests.docs_run import transitions
from wirecall.commands.run import NOTHING_DONE, TABLE, RunEvent, RunState

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "run.svg"

# The column and the row of each state.
PLACES = {
    RunState.CLAIMING: (1, 0),
    RunState.FOLLOWING: (2, 0),
    RunState.LEAVING: (3, 0),
    RunState.ASKING: (0, 1),
    RunState.GRANTED: (1, 1),
    RunState.CANCELLED: (2, 1),
    RunState.ENTERED: (0, 2),
    RunState.FREE: (1, 2),
    RunState.STOPPING: (2, 2),
    RunState.OPEN: (3, 2),
    RunState.COMMITTED: (0, 3),
    RunState.MARKING: (1, 3),
    RunState.SPILLED: (3, 3),
    RunState.RECORDING: (0, 4),
    RunState.UNDONE: (1, 4),
    RunState.DOUBTFUL: (2, 4),
}
ENDS = (RunState.RECORDING, RunState.UNDONE, RunState.DOUBTFUL)

# Of a box.
WIDTH = 236
HEIGHT = 84
# From one box to the next.
ACROSS = 306
DOWN = 144
MARGIN = 20

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
font-family="system-ui, sans-serif" font-size="12">
<!-- made by tests/docs_picture.py -->
<title>The states of a run of a command</title>
<style>
  .paper {{ fill: #ffffff }}
  text {{ fill: #1f2933 }}
  .safe {{ fill: #e3f4e8; stroke: #2f855a }}
  .done {{ fill: #fdf0dc; stroke: #b7791f }}
  .name {{ font-weight: 600; font-size: 14px }}
  .way {{ stroke: #7b8794; stroke-width: 1.5; fill: none; marker-end: url(#tip) }}
  .tip {{ fill: #7b8794 }}
  .event, .gap {{ text-anchor: middle }}
  .gap {{ stroke: #ffffff; stroke-width: 5px }}
  @media (prefers-color-scheme: dark) {{
    .paper {{ fill: #15191e }}
    text {{ fill: #e4e7eb }}
    .safe {{ fill: #17351f; stroke: #68d391 }}
    .done {{ fill: #3d2c10; stroke: #f6ad55 }}
    .way {{ stroke: #9aa5b1 }}
    .tip {{ fill: #9aa5b1 }}
    .gap {{ stroke: #15191e }}
  }}
</style>
<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" \
orient="auto"><path class="tip" d="M0 0 10 5 0 10z"/></marker></defs>
<rect class="paper" width="{width}" height="{height}" rx="8"/>
"""


def picture() -> str:
    """Return the picture as it should be."""
    ways = transitions(TABLE)
    drawn = {
        pair: events for pair, events in ways.items() if pair[0] not in ENDS and pair[1] not in ENDS
    }
    height = round(MARGIN * 2 + 4 * DOWN + HEIGHT + 30)
    lines = [HEAD.format(width=MARGIN * 2 + 3 * ACROSS + WIDTH, height=height)]
    lines += [arrow(a, b, events, both=(b, a) in drawn) for (a, b), events in drawn.items()]
    for state, (column, row) in PLACES.items():
        x = MARGIN + column * ACROSS
        y = MARGIN + row * DOWN
        kind = "safe" if state in NOTHING_DONE else "done"
        lines.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>\n'
        )
        lines.append(f'<text class="name" x="{x + 10}" y="{y + 20}">{state.name}</text>\n')
        ends = [
            (events, b) for (a, b), events in ways.items() if a is state and (a, b) not in drawn
        ]
        for number, (events, end) in enumerate(ends):
            lines.append(
                f'<text x="{x + 10}" y="{y + 38 + 15 * number}">{names(events)} → {end.name}</text>\n'
            )
    y = height - MARGIN - 14
    for x, kind, text in (
        (MARGIN, "safe", "nothing is done: the caller gets ran: “no”"),
        (MARGIN + 330, "done", "something may be done: the caller gets ran: “unknown”"),
    ):
        lines.append(f'<rect class="{kind}" x="{x}" y="{y}" width="20" height="14" rx="3"/>\n')
        lines.append(f'<text x="{x + 28}" y="{y + 12}">{text}</text>\n')
    return "".join([*lines, "</svg>\n"])


def arrow(a: RunState, b: RunState, events: list[RunEvent], *, both: bool) -> str:
    """Return the arrow between two boxes; if there is one for each direction, they lie side by
    side.
    """
    (from_x, from_y), (to_x, to_y) = (middle(state) for state in (a, b))
    across = to_x - from_x
    down = to_y - from_y
    length = (across**2 + down**2) ** 0.5
    # The line between the middles, cut off where it leaves the first box and where it enters the
    # second one.
    cut = min(WIDTH / 2 / abs(across) if across else 1.0, HEIGHT / 2 / abs(down) if down else 1.0)
    aside = 22 if both else 0
    shift_x = -down / length * aside
    shift_y = across / length * aside
    points = [from_x + across * cut, from_y + down * cut, to_x - across * cut, to_y - down * cut]
    x1, y1, x2, y2 = (
        round(value + (shift_y if odd % 2 else shift_x)) for odd, value in enumerate(points)
    )
    # On a slanted arrow the label is near the start, where it does not collide with labels of
    # crossing arrows.
    share = 0.5 if not across or not down else 0.32
    x = round(x1 + (x2 - x1) * share)
    y = round(y1 + (y2 - y1) * share) + (-7 if not down else 4)
    text = f'x="{x}" y="{y}">{names(events)}</text>\n'
    # A thick outline of the text in the colour of the paper interrupts the line behind it.
    return f'<path class="way" d="M{x1} {y1} {x2} {y2}"/>\n<text class="gap" {text}<text class="event" {text}'


def middle(state: RunState) -> tuple[float, float]:
    column, row = PLACES[state]
    return MARGIN + column * ACROSS + WIDTH / 2, MARGIN + row * DOWN + HEIGHT / 2


def names(events: list[RunEvent]) -> str:
    return ", ".join(event.name.lower() for event in events)


if __name__ == "__main__":
    PICTURE.write_text(picture())
