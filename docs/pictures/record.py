"""Records examples/demo.py as demo.svg: `python docs/pictures/record.py`, part of `make pictures`.

Each line appears when the demo printed it, with shorter pauses. A viewer without animations, and
a reader whose system asks for less motion, see all lines at once.
"""

import os
import subprocess
import sys
import time
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
DEMO = FOLDER.parents[1] / "examples" / "demo.py"
# The parts of the demo that the recording shows, by the beginning of their first line.
PARTS = ("A foreign client", "The connection is cut", "A server that others wrote")
LONGEST_PAUSE = 1.2  # seconds
# Lines of one part appear at once, so the eye needs a moment for each.
SHORTEST_PAUSE = 0.35
COLUMNS = 108

STYLE = """\
<style>
  .paper { fill: #ffffff; stroke: #cbd2d9 }
  text { fill: #1f2933; font: 12px ui-monospace, monospace; white-space: pre }
  .head { font-weight: 600 }
  .faint { fill: #52606d }
  .good { fill: #276749 }
  @media (prefers-color-scheme: dark) {
    .paper { fill: #15191e; stroke: #52606d }
    text { fill: #e4e7eb }
    .faint { fill: #9aa5b1 }
    .good { fill: #68d391 }
  }
  @media (prefers-reduced-motion: no-preference) {
    text { animation: appear 0.2s ease-out backwards }
  }
  @keyframes appear { from { opacity: 0 } }
</style>
"""


def recorded() -> list[tuple[float, str]]:
    """Run the demo, and return its lines with their times."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-u", str(DEMO)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        lines = [(time.monotonic() - began, line.rstrip()) for line in process.stdout]
    if process.returncode:
        raise SystemExit(f"the demo failed with {process.returncode}")
    return lines


def chosen(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the lines of the parts that are shown, with short pauses."""
    shown = []
    is_shown = False
    at = 0.0
    before = 0.0
    for moment, line in lines:
        if line and not line.startswith(" "):
            is_shown = line.startswith(PARTS)
        if is_shown and line:
            at += min(max(moment - before, SHORTEST_PAUSE), LONGEST_PAUSE)
            shown.append((at, line))
        before = moment
    return shown


def drawn(lines: list[tuple[float, str]]) -> str:
    """Return the recording as a picture."""
    rows = []
    y = 22
    for at, line in lines:
        kind = "line"
        if not line.startswith(" "):
            y += 8
            kind = "head"
        elif line.startswith("  $"):
            kind = "faint"
        elif "replay" in line or "the same call again" in line:
            kind = "good"
        text = line if len(line) <= COLUMNS else f"{line[: COLUMNS - 1]}…"
        rows.append(
            f'<text class="{kind}" x="14" y="{y}" style="animation-delay: {at:.2f}s">'
            f"{escape(text, quote=False)}</text>"
        )
        y += 18
    width = 14 * 2 + round(COLUMNS * 7.3)
    title = "<title>The demo of wirecall: lost answers, and one effect each</title>\n"
    paper = f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{y - 1}" rx="6"/>\n'
    body = "\n".join(rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" role="img">\n'
        f"{title}{STYLE}{paper}{body}\n</svg>\n"
    )


def main() -> None:
    (FOLDER / "demo.svg").write_text(drawn(chosen(recorded())))


if __name__ == "__main__":
    main()
