"""The servers that `wirecall bench` starts, and their end.

1. An app in a file is served in a separate process, as `wirecall serve` serves it here, over HTTP
   or on stdio; or it stays in this process (`memory`).
2. The app gets a new ledger, which is removed afterwards: a bench must not fill the ledger of a
   project. `--ledger` names another.
3. A bare server answers the same calls with prepared results (`benched`).
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from wirecall.app import App
from wirecall.cli.benched import Prepared
from wirecall.cli.failures import CliError, Unreachable
from wirecall.cli.targets import Target, flags_of
from wirecall.config import load_config
from wirecall.errors import CallFailed, InternalError
from wirecall.transports.child import Child

Over = Literal["http", "stdio", "memory"]

# Seconds that a server may take to start, and to end.
PATIENCE = 60.0
GRACE = 5.0
_LISTENING = "Listening on "
_LEDGER = "The ledger is "


class Place(Struct, frozen=True):
    """Where the server of a bench is."""

    target: Target
    over: Over
    # The app, if it is in this process.
    app: App | None = None
    # A sentence about the ledger of an app in a file.
    ledger: str = ""


def over_of(target: Target, over: Over | None) -> Over:
    """Return how the server is reached: an app in a file may choose, the others are what they are."""
    if target.kind == "file":
        return over or "http"
    own: Over = "http"
    if target.kind == "command":
        own = "stdio"
    if over not in (None, own):
        raise CliError(
            f"--over {over} is for an app in a file.",
            f"{target.text} is reached over {own}",
            "drop --over",
        )
    return own


@asynccontextmanager
async def served(
    target: Target, over: Over, app: App | None, ledger: str | None
) -> AsyncIterator[Place]:
    """Serve the app in a file while the block runs; any other target is served already."""
    if app is None:
        yield Place(target, over)
        return
    with tempfile.TemporaryDirectory(prefix="wirecall-bench-") as folder:
        about = f"ledger {ledger}"
        url = ledger or ""
        if not url:
            url, about = _own_ledger(app, over, folder)
        words = [*target.words(), "--ledger", url]
        # The trail of a project must not have the calls of a bench.
        audit = f"file:{folder}/audit.jsonl" if load_config(flags=flags_of(url)).audit else None
        if audit is not None:
            words += ["--audit", audit]
        if over == "memory":
            app.configure(ledger=url, audit=audit, tables="create")
            yield Place(target, over, app, about)
        elif over == "stdio":
            command = (sys.executable, "-m", "wirecall", "serve", *words, "--stdio")
            yield Place(Target("command", target.text, command=command), over, ledger=about)
        else:
            async with started(["serve", *words, "--http", "127.0.0.1:0"]) as address:
                yield Place(Target("url", address), over, ledger=about)


def _own_ledger(app: App, over: Over, folder: str) -> tuple[str, str]:
    """Return a new ledger for a bench of an app, and a sentence about it."""
    # The processes on stdio share a ledger.
    if app.ledger_url.startswith("memory:") and over != "stdio":
        return "memory:", "ledger in memory, as the app has it"
    return f"sqlite:{Path(folder, 'ledger.db')}", "ledger in a new SQLite file, removed afterwards"


@asynccontextmanager
async def bare(results: dict[str, Raw], revision: str | None) -> AsyncIterator[str]:
    """Run a bare server while the block runs; yield its address."""
    prepared = Prepared(results, revision or "")
    async with started(["bare"], msgspec.json.encode(prepared)) as address:
        yield address


@asynccontextmanager
async def started(words: list[str], line: bytes | None = None) -> AsyncIterator[str]:
    """Run a server process of `benched` while the block runs; yield its address."""
    command = [sys.executable, "-m", "wirecall.cli.benched", *words]
    child = Child(command, stderr="keep", grace=GRACE)
    ended = asyncio.Event()

    def end(_error: CallFailed) -> None:
        ended.set()

    try:
        await child.open(lambda _line: None, end)
        if line is not None:
            await child.write(line)
        address = await _address(child, ended)
        before = child.said
        try:
            yield address
        except CliError as error:
            # The cause is in the log of this server, which is not shown.
            log = _logged(child.said.removeprefix(before))
            if error.facts.get("code") == InternalError.CODE and log:
                error.why = f"{error.why}\nthe server's log: {log}"
            raise
    finally:
        await child.aclose()


def _logged(said: str) -> str:
    """Return what a server has logged, without the line that announces its ledger.

    That line follows the one with the address, so it may arrive after the address was read.
    """
    lines = said.strip().splitlines()
    if lines and lines[0].startswith(_LEDGER):
        del lines[0]
    return "\n".join(lines)


async def _address(child: Child, ended: asyncio.Event) -> str:
    """Wait until a server listens; return its address."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while _LISTENING not in child.said:
        if ended.is_set() or loop.time() > deadline:
            raise Unreachable(
                "The server of the bench did not start.",
                child.said or "it did not say why",
                "start it with `wirecall serve` to see more",
            )
        await asyncio.sleep(0.02)
    return child.said.partition(_LISTENING)[2].split()[0]
