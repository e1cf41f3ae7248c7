"""Draws architecture.svg, batch.svg and references.svg: `python docs/pictures/draw.py`.

The pictures follow the colour scheme of the reader. Only shapes and words are here; the style is
shared. The layers come from `tests/layers.py`. (`tests/docs_picture.py` draws run.svg.)
"""

import runpy
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
LAYERS = runpy.run_path(str(FOLDER.parents[1] / "tests" / "layers.py"))["LAYERS"]

# Viewers that know neither variables nor colour schemes show the first colours. The dark scheme
# replaces them.
STYLE = """\
<style>
  .paper { fill: #ffffff }
  text { fill: #1f2933 }
  .faint { fill: #52606d }
  .head { font-weight: 600; font-size: 14px }
  .box { fill: #f0f4f8; stroke: #7b8794 }
  .blue { fill: #dceaf9; stroke: #2b6cb0 }
  .green { fill: #e3f4e8; stroke: #2f855a }
  .red { fill: #fde8e8; stroke: #c53030 }
  .way { stroke: #7b8794; stroke-width: 1.5; fill: none; marker-end: url(#tip) }
  .tip { fill: #7b8794 }
  .code { font-family: ui-monospace, monospace; font-size: 11px }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #15191e }
    text { fill: #e4e7eb }
    .faint { fill: #9aa5b1 }
    .box { fill: #232a32; stroke: #9aa5b1 }
    .blue { fill: #14304d; stroke: #63b3ed }
    .green { fill: #17351f; stroke: #68d391 }
    .red { fill: #451a1a; stroke: #fc8181 }
    .way { stroke: #9aa5b1 }
    .tip { fill: #9aa5b1 }
  }
</style>
<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" \
orient="auto"><path class="tip" d="M0 0 10 5 0 10z"/></marker></defs>
"""


def box(
    x: int, y: int, width: int, height: int, *lines: str, kind: str = "box", style: str = ""
) -> str:
    """Return a box with lines of text in its middle; the first of several lines is its name."""
    drawn = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>\n']
    top = y + height / 2 + 4 - (len(lines) - 1) * 8
    for number, line in enumerate(lines):
        name = "head" if number == 0 and len(lines) > 1 else style
        drawn.append(text(x + width // 2, round(top + number * 16), line, name, "middle"))
    return "".join(drawn)


def text(x: int, y: int, line: str, style: str = "", anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(line)}</text>\n'


def way(*points: tuple[int, int]) -> str:
    """Return an arrow along some points."""
    return f'<path class="way" d="M{" ".join(f"{x} {y}" for x, y in points)}"/>\n'


def svg(width: int, height: int, title: str, *shapes: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" '
        f'font-size="12">\n<!-- made by docs/pictures/draw.py -->\n<title>{title}</title>\n{STYLE}'
        f'<rect class="paper" width="{width}" height="{height}" rx="8"/>\n{"".join(shapes)}</svg>\n'
    )


def architecture() -> str:
    steps = ["parse", "admit", "guard", "bind", "claim", "invoke", "reply"]
    shapes = [text(20, 30, "The path of a message", "head")]
    shapes += [box(20, 100, 120, 60, "transports", "HTTP, stdio", kind="blue")]
    for number, step in enumerate(steps):
        x = 200 + number * 114
        shapes += [box(x, 100, 84, 60, f"{number + 1}", step, kind="green")]
        shapes += [way((x - 30 if number else 140, 130), (x - 2, 130))]
    # The reply goes back below the steps; MCP joins them at the third.
    shapes += [
        way((926, 160), (926, 190), (80, 190), (80, 162)),
        text(500, 206, "bytes, or nothing", "faint", "middle"),
    ]
    shapes += [text(168, 122, "bytes", "faint", "middle")]
    shapes += [
        box(200, 44, 198, 34, "mcp.server: session and tool", kind="blue"),
        way((398, 61), (470, 61), (470, 98)),
    ]
    shapes += [way((110, 100), (110, 61), (198, 61)), text(150, 54, "/mcp", "faint", "middle")]
    shapes += [
        box(656, 240, 130, 50, "commands", "states of a run", kind="blue"),
        way((698, 160), (698, 238)),
    ]
    shapes += [
        box(430, 240, 170, 50, "ledger", "of all processes", kind="blue"),
        way((656, 265), (602, 265)),
    ]
    shapes += [
        box(820, 240, 150, 50, "your function", "params, and a Context", kind="green"),
        way((812, 160), (866, 238)),
    ]
    shapes += [
        text(20, 340, "The rooms, in layers: a room imports rooms of lower layers only", "head")
    ]
    for layer, rooms in enumerate(LAYERS):
        y = 356 + (len(LAYERS) - 1 - layer) * 38
        shapes += [text(30, y + 20, str(layer), "faint")]
        width = (860 - (len(rooms) - 1) * 10) // len(rooms)
        shapes += [
            box(50 + number * (width + 10), y, width, 30, room) for number, room in enumerate(rooms)
        ]
    end = 356 + len(LAYERS) * 38
    shapes += [
        way((945, 360), (945, end - 6)),
        text(960, (360 + end) // 2, "imports", "faint"),
    ]
    return svg(
        1020,
        end + 12,
        "The path of a message through the steps of the server, and the layers of its rooms",
        *shapes,
    )


def batch() -> str:
    # The entry, its time (from, to), and its answer.
    entries = [
        ('{"method": "price", "id": 1}', "query", (310, 590), '{"result": 450, "id": 1}'),
        ('{"method": "charge", "id": 2}', "command", (310, 480), '{"result": "paid", "id": 2}'),
        ('{"method": "price", "id": 3}', "query", (310, 460), '{"result": 700, "id": 3}'),
        ('{"id": 4}', "", (0, 0), '{"error": {"code": -32600}, "id": 4}'),
        ('{"method": "seen"}', "notification", (310, 420), ""),
        ('{"method": "ship", "id": 5}', "command", (500, 670), '{"result": "sent", "id": 5}'),
    ]
    shapes = [text(20, 30, "One array in", "head"), text(310, 30, "The entries run", "head")]
    shapes += [text(730, 30, "One array out, in order", "head"), way((440, 26), (690, 26))]
    for number, (entry, kind, (start, end), answer) in enumerate(entries):
        y = 50 + number * 46
        colour = {"query": "green", "command": "blue", "notification": "box"}.get(kind, "red")
        shapes += [box(20, y, 250, 32, entry, style="code")]
        if kind:
            shapes += [
                box(start, y, end - start, 32, kind, kind=colour),
                way((270, y + 16), (start - 2, y + 16)),
            ]
        else:
            shapes += [text(310, y + 20, "malformed: it fails alone", "faint")]
        if answer:
            shapes += [box(730, y, 270, 32, answer, kind="box" if kind else "red", style="code")]
            shapes += [way((end if kind else 470, y + 16), (728, y + 16))]
        else:
            shapes += [text(730, y + 20, "no answer", "faint")]
    # A command waits for the command before it.
    shapes += [way((490, 112), (490, 286), (498, 286))]
    shapes += [
        text(
            310,
            348,
            "Queries run side by side. A command begins when the command before it has ended.",
            "faint",
        )
    ]
    return svg(
        1020, 366, "The entries of a batch: queries side by side, commands in order", *shapes
    )


def references() -> str:
    # The id of a call, its tool, its kind, and its result.
    calls = [
        ("order", "find_order", "query", '{"orders": [{"id": 7, "total": 500}]}'),
        ("pay", "charge", "command", '{"receipt": "R-7"}'),
        ("letter", "write_letter", "query", '"Thank you for R-7."'),
    ]
    shapes = [text(20, 30, "One request of the model", "head")]
    shapes += [text(400, 30, "The server runs the calls", "head")]
    shapes += [text(790, 30, "One answer", "head")]
    for number, (id, tool, kind, result) in enumerate(calls):
        y = 60 + number * 96
        colour = {"query": "green", "command": "blue"}[kind]
        shapes += [box(20, y, 300, 56, f"{id}: {tool}", _needs(id), style="code")]
        shapes += [box(400, y, 130, 56, tool, kind, kind=colour)]
        shapes += [way((320, y + 28), (398, y + 28))]
        shapes += [text(545, y + 20, result, "code")]
    # Parts of a result become arguments of the next call.
    for number, part in enumerate(["order#/orders/0/id and /total", "pay#/receipt"]):
        top = 116 + number * 96
        shapes += [way((465, top), (465, top + 38)), text(475, top + 24, part, "faint")]
    shapes += [box(790, 252, 210, 56, "letter", '"Thank you for R-7."', kind="green")]
    shapes += [way((530, 290), (788, 290))]
    shapes += [
        text(
            20,
            356,
            "A call begins when the calls that it needs have ended. "
            "Only the results that the model asks for come back.",
            "faint",
        )
    ]
    title = "A batch of three calls in one request: each takes a part of an earlier result"
    return svg(1020, 376, title, *shapes)


def _needs(id: str) -> str:
    """Return the arguments of a call in the picture of references."""
    return {
        "order": 'customer: "ada"',
        "pay": "order and cents: from order",
        "letter": "receipt: from pay",
    }[id]


if __name__ == "__main__":
    (FOLDER / "architecture.svg").write_text(architecture())
    (FOLDER / "batch.svg").write_text(batch())
    (FOLDER / "references.svg").write_text(references())
