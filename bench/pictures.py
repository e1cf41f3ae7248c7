"""Draws the two pictures of README from the results of the last `make bench`: `make pictures`.

The pictures follow the colour scheme of the reader: matplotlib draws in the light scheme's colours,
which every viewer shows, and a style sheet replaces each of them in the dark scheme.
"""

import io
import json
from collections.abc import Mapping

from targets import RESULTS

FOLDER = RESULTS.parents[1] / "docs" / "pictures"

# The light and the dark colour by name.
COLOURS = {
    "paper": ("#fefefe", "#15191e"),
    "ink": ("#1f2933", "#e4e7eb"),
    "ours": ("#2b6cb0", "#63b3ed"),
    "bare": ("#7b8794", "#9aa5b1"),
    "peer": ("#cbd2d9", "#52606d"),
}


def _kind(name: str) -> str:
    """Return whose figure it is, which decides its colour."""
    if name.startswith("wirecall"):
        return "ours"
    if name.startswith("bare"):
        return "bare"
    return "peer"


def bars(title: str, figures: Mapping[str, float], unit: str) -> str:
    """Return a picture of horizontal bars, in the order of the figures."""
    # Late: until `targets` is imported, this folder is on the path, and its http.py hides the
    # standard library's.
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "wirecall", "font.family": "sans-serif"}
    )
    from matplotlib import pyplot

    light = {name: pair[0] for name, pair in COLOURS.items()}
    kinds = [_kind(name) for name in figures]
    figure, axes = pyplot.subplots(
        figsize=(7.0, 0.7 + 0.34 * len(figures)), facecolor=light["paper"]
    )
    drawn = axes.barh(
        list(figures), list(figures.values()), color=[light[kind] for kind in kinds], height=0.7
    )
    labels = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in figures.values()]
    axes.bar_label(drawn, labels, padding=4, color=light["ink"])
    axes.set_title(f"{title} ({unit})", loc="left", color=light["ink"], fontsize=11)
    axes.set_facecolor(light["paper"])
    axes.set_xlim(0, max(figures.values()) * 1.12)
    axes.invert_yaxis()
    axes.xaxis.set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=light["ink"])
    axes.spines[:].set_visible(False)
    figure.tight_layout()
    file = io.StringIO()
    figure.savefig(
        file, format="svg", facecolor=light["paper"], metadata={"Date": None, "Creator": None}
    )
    pyplot.close(figure)
    return with_schemes(file.getvalue())


def with_schemes(svg: str) -> str:
    """Return a picture with a style sheet that replaces its colours in the dark scheme."""
    # The colours are in the style of each shape, and only an important rule is stronger.
    dark = " ".join(
        f'[style*="fill: {light}"] {{ fill: {dark} !important }}'
        for light, dark in COLOURS.values()
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {dark} }}</style>"
    return svg.replace("<defs>", f"{style}\n <defs>", 1)


def main() -> None:
    results = json.loads(RESULTS.read_text())
    core = results["core"]["figures"]
    http = results["http"]["figures"]
    peers = sorted(
        ("json-rpc", "pjrpc", "ajsonrpc", "jsonrpcserver"), key=lambda name: core[f"{name}, 50"]
    )
    entry = {"bare msgspec": core["bare, 50"], "wirecall": core["wirecall sync, 50"]}
    entry |= {name: core[f"{name}, 50"] for name in peers}
    calls = {"bare ASGI": http["bare ASGI"]}
    calls |= {
        name: value for name, value in http.items() if name.endswith(("2026-07-28", "2025-06-18"))
    }
    FOLDER.joinpath("entry.svg").write_text(
        bars("One entry in a batch of 50, typed params", entry, "µs, less is better")
    )
    FOLDER.joinpath("http.svg").write_text(
        bars("tools/call over HTTP", calls, "calls/s, more is better")
    )
    if any(results[name]["quick"] for name in ("core", "http")):
        print(
            "These figures are of a quick run: run make bench on a quiet machine before you publish them."
        )


if __name__ == "__main__":
    main()
