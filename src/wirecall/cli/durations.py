"""Times on the command line: `30`, `30s`, `500ms`, `2m`, `24h`."""

import re

from wirecall.cli.failures import Failure

_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration(text: str | float) -> float:
    """Seconds, above 0: the `type=` of an option."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|)", str(text).strip())
    if match is None or float(match[1]) == 0:
        raise Failure(f"{text!r} is not a time.", "it must be above 0, with or without a unit", "30s, 500ms, 2m, 24h")
    return float(match[1]) * _UNITS[match[2]]


DURATION = duration
