"""Generates the tables of settings in docs/gateway.md from `wirecall.config`.

`python -m tests.docs_gateway` writes them, and a test compares them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wirecall.config import FAMILIES, SETTINGS, Setting

PAGE = Path(__file__).parents[1] / "docs" / "gateway.md"
START = "<!-- settings, made by tests/docs_gateway.py -->\n"
END = "<!-- end of settings -->\n"


def shown(key: str, value: Any) -> str:
    """Return a default as the file would have it."""
    if key == "idle":
        return '`"off"`'
    if value is None or value in ([], {}):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        names = {3600.0: "1h", 2.0: "2s"}
        return f'`"{names[value]}"`'
    if isinstance(value, list):
        return f"`{value}`".replace("'", '"')
    return f"`{value}`" if isinstance(value, int) else f'`"{value}"`'


def table(settings: Mapping[str, Setting]) -> str:
    lines = ["| Key | Value | Default | Meaning |", "| --- | --- | --- | --- |"]
    for key, setting in settings.items():
        default = shown(key, setting.default)
        lines.append(f"| `{key}` | {setting.expected} | {default} | {setting.about} |")
    return "\n".join(lines) + "\n"


def section() -> str:
    """Return the tables as they should be."""
    own = {
        place.removeprefix("gateway."): setting
        for place, setting in SETTINGS.items()
        if place.startswith("gateway.")
    }
    upstream = FAMILIES["upstream"]
    return (
        f"`[gateway]`\n\n{table(own)}\n"
        f"`[upstream.NAME]`; the name has {upstream.expected}\n\n{table(upstream.settings)}\n"
        f"`[upstream.NAME.tool.TOOL]`\n\n{table(upstream.families['tool'].settings)}"
    )


def page() -> str:
    """Return the page with the tables."""
    text = PAGE.read_text()
    start = text.index(START) + len(START)
    return text[:start] + "\n" + section() + "\n" + text[text.index(END) :]


if __name__ == "__main__":
    PAGE.write_text(page())
