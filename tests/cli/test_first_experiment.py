"""The reader's first experiment: a call over HTTP without a key is cut and sent again.

Each test runs a server process and talks to it through sockets.
"""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.cli import PATIENCE, Running, running
from tests.mcp.asgi import enveloped, repeated

SERVERS = ("granian", "granian-asgi", "uvicorn")
WAYS = ("/rpc", "/mcp")
ONE_USER = ", anonymous callers are one user. Listening on http://"
FORWARDING = (
    "Forwarded",
    "X-Forwarded-For",
    "X-Forwarded-Proto",
    "X-Forwarded-Host",
    "X-Real-IP",
    "Via",
)
FIXES = ("auth=", "single_user=True", "--single-user")

SOURCE = """
import asyncio, sys
from wirecall import App

app = App("harbour")
ships = []
gate = asyncio.Event()


@app.command{options}
async def ship(order: str) -> str:
    ships.append(order)
    print("ship", order, "began", file=sys.stderr, flush=True)
    await gate.wait()
    return f"parcel {{len(ships)}}"


@app.query
def let_go() -> int:
    gate.set()
    gate.clear()
    return len(ships)


@app.query
def count() -> int:
    return len(ships)
"""


class Curl:
    """A client that sends each request on a separate connection."""

    def __init__(self, address: str, way: str, headers: Mapping[str, str] | None = None) -> None:
        self._address = urlsplit(address)
        self._way = way
        self._headers = dict(headers or {})

    def send(self, method: str, params: Any = None) -> socket.socket:
        """Send a call; the caller reads its answer, or cuts the connection."""
        message: Any = {"jsonrpc": "2.0", "method": method, "params": params or {}, "id": 1}
        fields = {"Host": "localhost", "Content-Type": "application/json", "Connection": "close"}
        if self._way == "/mcp":
            message = enveloped("tools/call", {"name": method, "arguments": params or {}})
            fields |= {"Accept": "application/json, text/event-stream", **repeated(message)}
        body = json.dumps(message).encode()
        fields |= {**self._headers, "Content-Length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        host = (self._address.hostname or "").replace("0.0.0.0", "127.0.0.1")
        connection = socket.create_connection((host, self._address.port or 0), timeout=PATIENCE)
        connection.sendall(f"POST {self._way} HTTP/1.1\r\n{head}\r\n".encode() + body)
        return connection

    def read(self, connection: socket.socket) -> Any:
        """Return the value of the answer, or the code of its error."""
        with connection:
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, body = data.partition(b"\r\n\r\n")
        if b"chunked" in head.lower():
            body = body.partition(b"\r\n")[2].partition(b"\r\n")[0]
        answer = json.loads(body)
        if "error" in answer:
            return answer["error"]["code"]
        result = answer["result"]
        return (
            json.loads(json.dumps(result["content"][0]["text"])) if self._way == "/mcp" else result
        )

    def call(self, method: str, params: Any = None) -> Any:
        return self.read(self.send(method, params))


def app_file(folder: Path, options: str = "") -> str:
    path = folder / "harbour.py"
    path.write_text(SOURCE.format(options=options))
    return str(path)


def ship_twice(run: Running, curl: Curl, *, runs_again: bool = False) -> str:
    """Send a call, cut it in its handler, send it again, and return the answer to the second."""
    cut = curl.send("ship", {"order": "7"})
    run.wait_for("ship 7 began")
    cut.close()
    if runs_again:  # what the server says about the second call depends on the loss of the first
        run.wait_for("undelivered")
    again = curl.send("ship", {"order": "7"})
    if runs_again:
        run.wait_for("not recognised: anonymous caller")
        run.wait_for("ship 7 began")
    curl.call("let_go")
    answer: str = curl.read(again)
    return answer


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("server", SERVERS)
def test_serve_recognises_a_call_that_was_cut_and_sent_again(
    server: str, way: str, tmp_path: Path
) -> None:
    with running("serve", app_file(tmp_path), "--http", "127.0.0.1:0", "--server", server) as run:
        line = run.wait_for("Listening on")
        assert ONE_USER in line
        curl = Curl(line.split()[-1], way)
        assert ship_twice(run, curl) == "parcel 1"
        assert int(curl.call("count")) == 1
        new = curl.send("ship", {"order": "7"})  # the answer to the one before was delivered
        run.wait_for("ship 7 began")
        curl.call("let_go")
        assert curl.read(new) == "parcel 2"


def test_dev_recognises_a_call_that_was_cut_and_sent_again(tmp_path: Path) -> None:
    with running("dev", app_file(tmp_path), "--http", "127.0.0.1:0") as run:
        line = run.wait_for("Listening on")
        assert ONE_USER in line
        curl = Curl(line.split()[-1], "/rpc")
        assert ship_twice(run, curl) == "parcel 1"
        run.end()


@pytest.mark.parametrize("server", SERVERS)
def test_serve_does_not_treat_forwarded_requests_as_one_user(server: str, tmp_path: Path) -> None:
    words = ("--http", "127.0.0.1:0", "--server", server, "--log", "text")
    with running("serve", app_file(tmp_path), *words) as run:
        address = run.wait_for("Listening on").split()[-1]
        count = 0
        for way in WAYS:
            for field in FORWARDING:
                count += 2
                answer = ship_twice(
                    run, Curl(address, way, {field: "for=192.0.2.1"}), runs_again=True
                )
                assert answer == f"parcel {count}", (way, field)


@pytest.mark.parametrize(
    ("words", "mode", "options"),
    [
        (["--http", "0.0.0.0:0", "--allow-host", "localhost"], "development", ""),
        (["--http", "127.0.0.1:0"], "production", '(key="auto")'),
    ],
)
@pytest.mark.parametrize("server", SERVERS)
def test_serve_warns_where_callers_cannot_be_distinguished(
    server: str, words: list[str], mode: str, options: str, tmp_path: Path
) -> None:
    words = [*words, "--server", server, "--log", "text"]
    with running(
        "serve", app_file(tmp_path, options), *words, cwd=tmp_path, env={"WIRECALL_MODE": mode}
    ) as run:
        line = run.wait_for("Listening on")
        assert "one user" not in line
        warning = run.wait_for("anonymous callers cannot be distinguished")
        assert all(fix in warning for fix in FIXES)
        curl = Curl(line.split()[-1], "/rpc")
        assert ship_twice(run, curl, runs_again=True) == "parcel 2"
        assert "cannot be distinguished" not in run.end()[2]


@pytest.mark.parametrize(
    ("words", "mode", "number"),
    [
        (["--http", "127.0.0.1:0", "--single-user"], "production", 1),
        (["--http", "0.0.0.0:0", "--single-user"], "development", 1),
        (["--http", "127.0.0.1:0", "--no-single-user", "--log", "text"], "development", 2),
    ],
)
def test_serve_does_what_single_user_says_and_does_not_warn(
    words: list[str], mode: str, number: int, tmp_path: Path
) -> None:
    target = app_file(tmp_path, '(key="auto")')
    with running("serve", target, *words, cwd=tmp_path, env={"WIRECALL_MODE": mode}) as run:
        line = run.wait_for("Listening on")
        assert (ONE_USER in line) is (number == 1)
        curl = Curl(line.split()[-1], "/rpc")
        assert ship_twice(run, curl, runs_again=number == 2) == f"parcel {number}"
        assert "cannot be distinguished" not in "".join(run.said) + run.end()[2]


def test_no_single_user_flag_overrides_wirecall_toml(tmp_path: Path) -> None:
    (tmp_path / "wirecall.toml").write_text("[server]\nsingle_user = true\n")
    words = ("--http", "127.0.0.1:0", "--no-single-user")
    with running("serve", app_file(tmp_path), *words, cwd=tmp_path) as run:
        assert "one user" not in run.wait_for("Listening on")


def test_wirecall_toml_may_say_that_callers_are_several(tmp_path: Path) -> None:
    (tmp_path / "wirecall.toml").write_text("[server]\nsingle_user = false\n")
    with running("serve", app_file(tmp_path), "--http", "127.0.0.1:0", cwd=tmp_path) as run:
        assert "one user" not in run.wait_for("Listening on")


def test_serve_does_not_warn_about_an_app_that_needs_keys(tmp_path: Path) -> None:
    target = app_file(tmp_path, '(key="required")')
    with running(
        "serve", target, "--http", "127.0.0.1:0", cwd=tmp_path, env={"WIRECALL_MODE": "production"}
    ) as run:
        run.wait_for("Listening on")
        assert "cannot be distinguished" not in run.end()[2]


def test_serve_runs_no_equal_call_after_a_kill_while_the_outcome_is_unknown(tmp_path: Path) -> None:
    """A real SIGKILL: the first retry waits for the end of the lease, and none of them runs."""
    words = ["serve", app_file(tmp_path, "(lease=1)"), "--http", "127.0.0.1:0"]
    words += ["--ledger", f"sqlite:{tmp_path / 'ledger.db'}"]
    with running(*words) as run:
        curl = Curl(run.wait_for("Listening on").split()[-1], "/rpc")
        cut = curl.send("ship", {"order": "7"})
        run.wait_for("ship 7 began")
        run.process.kill()
        run.process.wait(PATIENCE)
        cut.close()
    with running(*words) as run:
        curl = Curl(run.wait_for("Listening on").split()[-1], "/rpc")
        assert [curl.call("ship", {"order": "7"}) for _ in range(4)] == [50910] * 4
        assert curl.call("count") == 0
