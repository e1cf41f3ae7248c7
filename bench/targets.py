"""The targets of the benchmarks, and their results.

`python bench/targets.py` prints the last results.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

# This folder has an http.py, which would hide the standard library's from later imports.
sys.path[:] = [
    folder
    for folder in sys.path
    if Path(folder or ".").resolve() != Path(__file__).resolve().parent
]

RESULTS = Path(__file__).with_name("results.json")


class Target(NamedTuple):
    """A figure, another one to compare it with, and the ratio that it must reach.

    The other figure is the bare engine's, that of the best other library, or another one of
    wirecall.
    """

    work: str
    unit: str
    ours: float
    sign: Literal["<=", ">="]
    target: float
    bare: float | None = None
    peer: float | None = None
    own: float | None = None
    inverse: bool = False  # the ratio is the other figure divided by ours

    @property
    def ratio(self) -> float:
        other = next(figure for figure in (self.bare, self.peer, self.own) if figure is not None)
        return other / self.ours if self.inverse else self.ours / other

    @property
    def is_reached(self) -> bool:
        return self.ratio <= self.target if self.sign == "<=" else self.ratio >= self.target


def report(benchmark: str, targets: Sequence[Target], figures: Mapping[str, float]) -> int:
    """Print one line per target and keep all in `results.json`; the exit code is 1 if a target was
    missed.
    """
    print()
    for each in targets:
        print(
            f"  {'ok  ' if each.is_reached else 'MISS'} {each.ratio:6.2f}  {each.sign} "
            f"{each.target:<4}  {each.work}"
        )
    rows = [{**each._asdict(), "ratio": each.ratio, "reached": each.is_reached} for each in targets]
    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[benchmark] = {"quick": "--quick" in sys.argv, "targets": rows, "figures": figures}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    return 0 if all(each.is_reached for each in targets) else 1


def main() -> None:
    """Print one table of all benchmarks."""

    def cell(figure: float | None) -> str:
        if figure is None:
            return ""
        return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"

    print(f"\n{'':62} {'unit':12} {'ours':>9} {'bare':>9} {'best peer':>9} {'ratio':>7}  target")
    for benchmark, result in json.loads(RESULTS.read_text()).items():
        for row in result["targets"]:
            figures = " ".join(f"{cell(row[name]):>9}" for name in ("ours", "bare", "peer"))
            work = f"{benchmark}: {row['work']}"
            reached = "" if row["reached"] else "  MISS"
            print(
                f"{work:62} {row['unit']:12} {figures} {row['ratio']:7.2f}  {row['sign']} "
                f"{row['target']:g}{reached}"
            )


if __name__ == "__main__":
    main()
