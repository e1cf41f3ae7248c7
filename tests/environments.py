"""Separate environments for programs of other projects, whose versions do not fit beside ours.

They are in `.venv-frameworks`, which git ignores and `make clean` removes.
"""

import os
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

ENVIRONMENTS = Path(__file__).parents[1] / ".venv-frameworks"
INSTALLING = 900.0  # seconds for one environment


def environment(name: str, packages: Sequence[str]) -> Path:
    """Return the Python of an environment, which is made if it is not there or has other versions."""
    folder = ENVIRONMENTS / name
    python = folder / "bin" / "python"
    mark = folder / "installed.txt"
    wanted = "\n".join(packages)
    if mark.exists() and mark.read_text() == wanted:
        return python
    venv.create(folder, with_pip=True, clear=True)
    options = ["--quiet", "--disable-pip-version-check"]
    outside = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    command = [str(python), "-m", "pip", "install", *options, *packages]
    subprocess.run(command, check=True, timeout=INSTALLING, env=outside, stdin=subprocess.DEVNULL)
    mark.write_text(wanted)
    return python
