"""`wirecall watch`, `--console` and `--metrics` with real servers: workers, a pipe, a kill."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from tests.cli import invoke, wirecall
from tests.cli.terminals import typed
from tests.ports import free_port
from wirecall.cli.failures import Exit
from wirecall.files import IS_PORTABLE

pytestmark = pytest.mark.skipif(IS_PORTABLE, reason="there are no Unix sockets")

PATIENCE = 60.0
APP = """
import os
from wirecall import App

app = App("shop")

@app.query
def who(name: str) -> int:
    return os.getpid()

@app.command
def charge(cents: int) -> dict:
    return {"paid": cents}
"""


class Server:
    """A server in its own folder, which is also the one of its sockets."""

    def __init__(self, folder: Path, *options: str) -> None:
        (folder / "shop.py").write_text(APP)
        self.folder = folder
        self.environment = {**os.environ, "TMPDIR": str(folder)}
        command = [sys.executable, "-m", "wirecall", "serve", "shop.py"]
        command += ["--http", f"127.0.0.1:{free_port()}"]
        self.process = subprocess.Popen(
            [*command, "--ledger", "sqlite:ledger.db", *options],
            cwd=folder,
            stderr=subprocess.PIPE,
            env=self.environment,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self.wait_for(r"Listening on (\S+)")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.decode())
                self._news.notify_all()

    def wait_for(self, pattern: str) -> str:
        def found() -> str | None:
            match = re.search(pattern, "".join(self.lines))
            return None if match is None else match[1]

        with self._news:
            assert self._news.wait_for(found, PATIENCE), self.lines
            return found() or ""

    def call(self, method: str, **params: Any) -> Any:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        request = urllib.request.Request(
            f"{self.url}/rpc",
            json.dumps(message).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    def watch(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        return wirecall("watch", *words, cwd=self.folder, env={"TMPDIR": str(self.folder)})

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE) == 0
        self.close()

    def close(self) -> None:
        assert self.process.stderr is not None
        self._reader.join(PATIENCE)
        self.process.stderr.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Short: the path of a Unix socket has at most 103 bytes.
    import tempfile

    return Path(tempfile.mkdtemp(prefix="w", dir=tmp_path_factory.getbasetemp().parents[1]))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    made = Server(folder, "--workers", "2", "--metrics", "127.0.0.1:0")
    yield made
    made.stop()
    assert not list(folder.glob("wirecall-watch-*/*")), "the server has left its folder"


def test_watch_shows_calls_of_all_workers_over_a_pipe(server: Server) -> None:
    pids = set()
    for number in range(200):
        pids.add(server.call("who", name=str(number))["result"])
        if len(pids) == 2 and number > 5:
            break
    assert len(pids) == 2
    shown = server.watch("shop.py", "method:who", "--count", "4", "--json")
    rows = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(rows) == 4 and {row["method"] for row in rows} == {"who"}
    lines = server.watch(server.url, "--count", "3").stdout.decode().splitlines()
    assert len(lines) == 3 and all(" who " in line for line in lines)


def test_watch_follows_what_comes(server: Server) -> None:
    command = [sys.executable, "-m", "wirecall", "watch", "shop", "kind:command", "--json"]
    with subprocess.Popen(
        [*command, "--last", "0", "--count", "2"],
        cwd=server.folder,
        env=server.environment,
        stdout=subprocess.PIPE,
    ) as watch:
        assert watch.stdout is not None
        timer = threading.Timer(PATIENCE, watch.kill)
        timer.start()
        number = 0
        done = threading.Event()

        def call() -> None:
            nonlocal number
            while not done.wait(0.05):
                number += 1
                server.call("charge", cents=number, idempotency_key=f"f-{number}")

        calling = threading.Thread(target=call)
        calling.start()
        rows = [json.loads(line) for line in watch.stdout]
        done.set()
        calling.join()
        timer.cancel()
        assert watch.wait() == 0
    assert [row["method"] for row in rows] == ["charge", "charge"]


def test_watch_draws_a_table_on_a_terminal(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(server.folder))
    server.call("charge", cents=1, idempotency_key="table-1")
    server.call("charge", cents=1, idempotency_key="table-1")
    server.call("evil\x1b[2J\u202e")
    words = ["watch", server.url, "key:table-1,nothing", "--count", "2"]
    code, shown = typed(server.folder, *words, lines=[])
    assert code == 0
    for word in ("METHOD", "OUTCOME", "CALLER", "✓", "↻", "replayed", "table-1"):
        assert word in shown
    assert f"shop at {server.url}" in shown
    code, shown = typed(server.folder, "watch", server.url, "evil", "--count", "1", lines=[])
    assert code == 0 and "error -32601" in shown
    assert "\x1b[2J" not in shown and "\u202e" not in shown


def test_watch_ends_quietly_when_its_reader_does(server: Server) -> None:
    server.call("who", name="a")
    line = f"{sys.executable} -m wirecall watch shop.py | head -1"
    with subprocess.Popen(
        ["sh", "-c", line],
        cwd=server.folder,
        env=server.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as shell:
        # A pipe breaks only when more is written.
        timer = threading.Timer(PATIENCE, shell.kill)
        timer.start()
        while shell.poll() is None:
            server.call("who", name="b")
        timer.cancel()
        shown, noise = shell.communicate()
    assert shown.count(b"\n") == 1
    assert b"Traceback" not in noise


def test_metrics_are_those_of_all_workers(server: Server) -> None:
    url = server.wait_for(r"Metrics: (\S+)")
    server.call("charge", cents=1, idempotency_key="m")
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
        text = answer.read().decode()
    assert "wirecall_workers 2\n" in text
    assert 'wirecall_calls_total{method="charge",kind="command"}' in text
    assert "wirecall_ledger_up 1\n" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["metod:x"], "There is no filter metod:."),
        (["shop.py", "duration:fast"], "Expected a number, got 'fast'."),
        (["other.py"], "There is no server 'other.py'."),
        (
            ["http://example.org:1"],
            "No server of this user at http://example.org:1 can be watched.",
        ),
    ],
)
def test_watch_explains_what_is_wrong(server: Server, words: list[str], message: str) -> None:
    shown = server.watch(*words)
    assert shown.returncode in (Exit.USAGE, Exit.UNREACHABLE)
    assert message in shown.stderr.decode()


def test_watch_without_a_server_says_how_to_start_one(tmp_path: Path) -> None:
    shown = wirecall("watch", env={"TMPDIR": str(tmp_path)})
    assert shown.returncode == Exit.UNREACHABLE
    assert "wirecall serve app.py --console" in shown.stderr.decode()


def test_companion_serves_the_console_if_the_port_of_metrics_is_taken(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        made = Server(folder, "--metrics", address, "--console", "--console-port", "0")
        why = made.wait_for(r"There is no /metrics: (Cannot listen on \S+)")
        assert why == f"Cannot listen on {address}."
        assert made.wait_for("fix: (.*)") == "name another port: --metrics HOST:PORT"
        url = made.wait_for(r"Console: (\S+)/#link=")
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            assert answer.status == 200
        made.stop()


def test_companion_ends_with_a_server_that_is_killed(folder: Path) -> None:
    own = folder / "k"
    own.mkdir()
    server = Server(own, "--metrics", "127.0.0.1:0")
    server.wait_for(r"Metrics: (\S+)")
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert children
    server.process.kill()
    server.process.wait(PATIENCE)
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert not alive
    server.close()
    # The folder of the killed server is removed by the next look.
    assert wirecall("watch", env={"TMPDIR": str(own)}).returncode == Exit.UNREACHABLE
    assert not list(own.glob("wirecall-watch-*/*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--console-port", "1"], "--console-port is for --console."),
        (["--console-readonly"], "--console-readonly is for --console."),
        (["--metrics-token", "env:X"], "--metrics-token is for --metrics."),
        (["--metrics", "0.0.0.0:0"], "/metrics cannot be served on 0.0.0.0 without a token."),
        (["--metrics", "9464"], "'9464' is not an address."),
        (["--metrics", "127.0.0.1:0", "--metrics-token", "abc"], "does not belong on the command"),
        (["--metrics", "127.0.0.1:0", "--metrics-token", "env:NO_SUCH"], "is empty."),
    ],
)
def test_serve_refuses_options_that_cannot_work(
    tmp_path: Path, words: list[str], message: str
) -> None:
    (tmp_path / "shop.py").write_text(APP)
    result = invoke("serve", str(tmp_path / "shop.py"), "--http", "127.0.0.1:0", *words)
    assert result.exit_code == Exit.USAGE
    assert message in result.stderr
