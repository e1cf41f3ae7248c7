"""Reads what `/metrics` answers."""

import re

SAMPLE = re.compile(r'([a-z_]+)(\{(?:[a-z]+="(?:[^"\\]|\\.)*",?)*\})? (\S+)')


def parsed(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the labels and the value of every sample, by its name."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        labels = dict(re.findall(r'([a-z]+)="((?:[^"\\]|\\.)*)"', match[2] or ""))
        found.setdefault(match[1], []).append((labels, float(match[3])))
    return found
