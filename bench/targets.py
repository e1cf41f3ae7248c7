"""What a benchmark must reach, and whether it did."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

# This folder has an http.py, which would hide the standard library's from whatever is imported after this.
sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != Path(__file__).resolve().parent]

Target = tuple[str, float, Literal["<=", ">="], float]


def report(targets: Iterable[Target]) -> int:
    """Print one line per target; the exit code is 1 if one was missed."""
    print()
    missed = 0
    for text, value, sign, target in targets:
        reached = value <= target if sign == "<=" else value >= target
        missed += not reached
        print(f"  {'ok  ' if reached else 'MISS'} {value:6.2f}  {sign} {target:<4}  {text}")
    return 1 if missed else 0
