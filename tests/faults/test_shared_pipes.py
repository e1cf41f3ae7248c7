"""Servers on stdio that share a ledger: real processes, with calls that have no key."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import PATIENCE

ROOT = Path(__file__).parents[2]

SOURCE = """
import asyncio, os, pathlib
from wirecall import App

app = App("harbour")
ships = pathlib.Path(__file__).with_name("ships")
gate = asyncio.Event()


@app.command
async def ship(order: str) -> str:
    with ships.open("a") as file:
        file.write(order + "\\n")
    number = len(ships.read_text().splitlines())
    print("began", flush=True)
    if "HOLD" in os.environ:
        await gate.wait()
    return f"parcel {number}"


@app.command(lease=1.0)
async def dock(order: str) -> str:
    return await ship(order)


@app.query
def let_go() -> None:
    gate.set()
"""

# A client in a separate process: it starts a server, sends the lines of its stdin, and leaves when
# they end.
CLIENT = """
import subprocess, sys
with subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE) as server:
    for line in sys.stdin:
        server.stdin.write(line.encode())
        server.stdin.flush()
    server.stdin.close()
    server.wait()
"""

SERVERS = {
    "direct": [],
    "shell": ["sh", "-c", '"$@"; exit $?', "sh"],  # a launcher: the server is its child
    "client": [sys.executable, "-c", CLIENT],  # another window
}


class Pipe:
    """A server on stdio, and the one client of it."""

    def __init__(self, folder: Path, way: str, *, holds: bool) -> None:
        (folder / "harbour.py").write_text(SOURCE)
        words = [
            sys.executable,
            "-m",
            "wirecall",
            "serve",
            "harbour.py",
            "--stdio",
            "--ledger",
            "sqlite:ledger.db",
        ]
        words = [*SERVERS[way], *words]
        environment = {"PYTHONPATH": str(ROOT / "src"), **({"HOLD": "1"} if holds else {})}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=environment
        )
        self._watchdog = threading.Timer(PATIENCE, self.process.kill)
        self._watchdog.start()

    def send(self, method: str, params: Any = None) -> None:
        assert self.process.stdin is not None
        message = {"jsonrpc": "2.0", "method": method, "params": params or {}, "id": method}
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def ship(self, method: str = "ship") -> None:
        """Send the call, and wait until its handler runs."""
        self.send(method, {"order": "7"})
        assert self.process.stderr is not None
        while (line := self.process.stderr.readline()) != "began\n":  # handlers print to stderr
            assert line, "the server has ended"

    def answer(self, method: str = "ship") -> Any:
        """Return the answer to a call, with the answers before it skipped."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            answer = json.loads(line)
            if answer["id"] == method:
                return answer
        raise AssertionError("the server has ended")

    def lose(self) -> None:
        """Let the handler end after the client has stopped reading, and wait until the server has
        ended.
        """
        assert self.process.stdout is not None and self.process.stdin is not None
        self.process.stdout.close()
        self.send("let_go")
        self.process.stdin.close()
        self.process.wait()

    def close(self) -> None:
        self._watchdog.cancel()
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                stream.close()
        self.process.wait()


class Harbour:
    """Servers that share a ledger."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pipes: list[Pipe] = []

    def open(self, way: str = "direct", *, holds: bool = False) -> Pipe:
        self._pipes.append(Pipe(self._folder, way, holds=holds))
        return self._pipes[-1]

    @property
    def ships(self) -> int:
        return len((self._folder / "ships").read_text().splitlines())

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()


@pytest.fixture
def harbour(tmp_path: Path) -> Iterator[Harbour]:
    opened = Harbour(tmp_path)
    yield opened
    opened.close()


@pytest.mark.parametrize("way", SERVERS)
def test_stdio_servers_that_share_a_ledger_do_not_delay_each_other(
    way: str, harbour: Harbour
) -> None:
    """Of one client, behind a launcher, and of two clients."""
    first = harbour.open(way, holds=True)
    second = harbour.open(way)
    first.ship()
    second.send("ship", {"order": "7"})
    assert second.answer().get("result") == "parcel 2"
    first.send("let_go")
    assert first.answer()["result"] == "parcel 1"
    assert harbour.ships == 2


@pytest.mark.parametrize("way", ["direct", "shell"])
def test_stdio_server_restarted_by_its_client_recognises_a_lost_call(
    way: str, harbour: Harbour
) -> None:
    beside = harbour.open(way)  # another server of the client stays
    beside.ship()
    beside.answer()
    first = harbour.open(way, holds=True)
    first.ship()
    first.lose()
    again = harbour.open(way)
    again.send("ship", {"order": "7"})
    assert again.answer()["result"] == "parcel 2"
    assert harbour.ships == 2
    again.ship()
    # The answer was delivered, so an equal call is a new one.
    assert again.answer()["result"] == "parcel 3"


def test_stdio_server_restarted_after_a_kill_recognises_a_lost_call(harbour: Harbour) -> None:
    first = harbour.open(holds=True)
    first.ship("dock")
    first.process.kill()
    first.process.wait()
    again = harbour.open()
    again.send("dock", {"order": "7"})
    assert again.answer("dock")["error"]["code"] in (40910, 50910)  # in progress, or unknown
    assert harbour.ships == 1


def test_stdio_server_does_not_recognise_the_lost_call_of_another_client(harbour: Harbour) -> None:
    first = harbour.open("direct", holds=True)
    first.ship()
    first.lose()
    other = harbour.open("client")
    other.send("ship", {"order": "7"})
    assert other.answer()["result"] == "parcel 2"
