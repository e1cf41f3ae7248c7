"""docs/bench.md: each command runs exactly as the page prints it, and its report has the same lines.

The times differ from run to run. `test_docs.py` compares the outputs that do not.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import PATIENCE, ROOT

PAGE = (ROOT / "docs" / "bench.md").read_text()
BLOCKS = re.findall(r"^```text\n\$ ([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def labels(report: str) -> list[str]:
    """Return the names of the lines of a report, without the histogram."""
    head, _, rest = report.partition("\n\n")
    first, *lines = head.splitlines()
    checks = [line.partition(":")[0] for line in rest.splitlines() if "--fail-if" in line]
    return [first, *(line.split("  ")[0] for line in lines if not line.startswith(" ")), *checks]


def test_page_shows_runs() -> None:
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize(("command", "expected"), BLOCKS, ids=[each[0][15:60] for each in BLOCKS])
def test_command_of_the_page_prints_such_a_report(command: str, expected: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE * 2,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    if "--json" not in command:
        assert labels(run.stdout) == labels(expected)
        return
    found = json.loads(run.stdout)["result"]
    shown = json.loads(expected)["result"]
    assert list(found) == list(shown)
    for name in ("rate", "calls", "late", "latency"):
        assert list(found[name]) == list(shown[name])
