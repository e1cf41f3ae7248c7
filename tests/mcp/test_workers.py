"""Several workers behind one address: any of them serves any request, and passes on messages for
another.

The server runs for real, with four workers; every request opens its own connection, so that each
gets some.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

WORKERS = 4
PATIENCE = 60.0
SERVER = """
import os
from wirecall import App, Context

app = App("workers", ledger="sqlite:ledger.db")

@app.query
def worker() -> int:
    return os.getpid()

@app.tool
async def ask(ctx: Context) -> str:
    answer = await ctx.elicit("Who?", {"type": "object", "properties": {"name": {"type": "string"}}})
    return f"hello {answer.content['name']}"

@app.query
async def wait(ctx: Context) -> str:
    import asyncio
    await ctx.progress(1)
    await asyncio.Event().wait()
    return ""

@app.query
def touch() -> str:
    app.updated("test://thing")
    return "touched"

@app.resource("test://thing")
def thing() -> str:
    return "it"

app.run("http", port=0, workers=%d)
"""


class Server:
    def __init__(self, folder: Path) -> None:
        self._connections: list[Any] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER % WORKERS],
            cwd=folder,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        assert self.process.stderr is not None
        self.port = int(re.findall(rb":(\d+)", self.process.stderr.readline())[0])

    def ask(
        self, method: str, body: str | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        """Send a request over a new connection, which another worker may accept."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        self._connections.append(connection)
        connection.request(method, "/mcp", body, headers)
        answer = connection.getresponse()
        self._connections.append(answer)
        return answer

    def post(self, message: Any, token: str | None = None) -> http.client.HTTPResponse:
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        }
        return self.ask(
            "POST", json.dumps(message), headers | ({"Mcp-Session-Id": token} if token else {})
        )

    def stream(self, token: str) -> http.client.HTTPResponse:
        return self.ask("GET", None, {"Accept": "text/event-stream", "Mcp-Session-Id": token})

    def delete(self, token: str) -> int:
        return self.ask("DELETE", None, {"Mcp-Session-Id": token}).status

    def session(self) -> str:
        params = {
            "protocolVersion": "2025-11-25",
            "capabilities": {"elicitation": {}},
            "clientInfo": {"name": "t", "version": "1"},
        }
        answer = self.post({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})
        answer.read()
        token = answer.headers["Mcp-Session-Id"]
        assert token
        return str(token)

    def stop(self) -> int:
        for connection in self._connections:
            connection.close()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def call(id: int, name: str, **meta: Any) -> dict[str, Any]:
    params = {"name": name, "arguments": {}, **({"_meta": meta} if meta else {})}
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}


def messages(stream: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The messages of a stream to its end, past comments and events without data.

    Comments alone time out.
    """
    end = time.monotonic() + PATIENCE
    while line := stream.readline():
        assert time.monotonic() < end, "nothing but comments"
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def event(stream: http.client.HTTPResponse) -> dict[str, Any]:
    return next(messages(stream))


def test_session_is_served_by_all_workers(server: Server) -> None:
    token = server.session()
    with ThreadPoolExecutor(8) as pool:
        answers = [
            json.loads(a.read())
            for a in pool.map(lambda i: server.post(call(i, "worker"), token), range(1, 100))
        ]
    workers = {answer["result"]["structuredContent"]["result"] for answer in answers}
    assert len(workers) > 1
    assert server.stop() == 0


def test_answer_reaches_the_worker_that_asked(server: Server) -> None:
    token = server.session()
    for number in range(1, 13):  # by chance alone, one in four answers would
        stream = server.post(call(number, "ask"), token)
        question = event(stream)
        assert question["method"] == "elicitation/create"
        result = {"action": "accept", "content": {"name": f"Ann {number}"}}
        assert (
            server.post({"jsonrpc": "2.0", "id": question["id"], "result": result}, token).status
            == 202
        )
        assert event(stream)["result"]["content"][0]["text"] == f"hello Ann {number}"


def test_cancellation_reaches_the_worker_that_runs_the_call(server: Server) -> None:
    token = server.session()
    for number in range(1, 9):
        stream = server.post(call(number, "wait", progressToken=number), token)
        assert event(stream)["method"] == "notifications/progress"
        cancelled = {
            "jsonrpc": "2.0",
            "method": "notifications/cancelled",
            "params": {"requestId": number},
        }
        assert server.post(cancelled, token).status == 202
        assert list(messages(stream)) == []  # it ends, without an answer


def test_change_reaches_streams_of_all_workers(server: Server) -> None:
    token = server.session()
    stream = server.stream(token)
    assert stream.readline().startswith(b":")
    subscribe = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "resources/subscribe",
        "params": {"uri": "test://thing"},
    }
    assert json.loads(server.post(subscribe, token).read())["result"] == {}
    for number in range(2, 12):
        server.post(call(number, "touch"), token).read()
    for _ in range(2):
        assert event(stream)["method"] == "notifications/resources/updated"


def test_session_that_has_ended_is_over_for_all_workers(server: Server) -> None:
    token = server.session()
    assert server.delete(token) == 204
    left = PATIENCE
    statuses = [200]
    while 200 in statuses and left > 0:  # the others learn it a moment later
        statuses = [server.post(call(number, "worker"), token).status for number in range(1, 20)]
        left -= 1
    assert set(statuses) == {404}


def test_worker_that_is_killed_is_replaced_and_sessions_continue(server: Server) -> None:
    """Whatever it leaves behind in the workers' folder, the others and its replacement continue to
    serve.
    """
    token = server.session()

    def served() -> set[int]:
        """Return the worker that answers; a connection to the killed one may break."""
        found = set()
        for number in range(1, 30):
            with suppress(OSError, http.client.HTTPException):
                answer = server.post(call(number, "worker"), token)
                assert answer.status == 200
                found.add(json.loads(answer.read())["result"]["structuredContent"]["result"])
        return found

    killed = set()
    for _ in range(2):  # the second one is young: the server must not give up
        victim = max(served())
        killed.add(victim)
        os.kill(victim, signal.SIGKILL)
        end = time.monotonic() + PATIENCE
        while len(alive := served()) < WORKERS or victim in alive:
            assert time.monotonic() < end, alive
    assert killed.isdisjoint(alive)
    for number in range(1, 9):  # the workers find each other
        stream = server.post(call(number, "ask"), token)
        question = event(stream)
        result = {"action": "accept", "content": {"name": "Ann"}}
        assert (
            server.post({"jsonrpc": "2.0", "id": question["id"], "result": result}, token).status
            == 202
        )
        assert event(stream)["result"]["content"][0]["text"] == "hello Ann"
    assert server.stop() == 0


def test_workers_do_not_outlive_their_parent(server: Server) -> None:
    """A killed parent cannot make them stop: they would hold the address indefinitely."""
    server.process.kill()
    server.process.wait(PATIENCE)
    end = time.monotonic() + PATIENCE
    with suppress(ConnectionError):
        while time.monotonic() < end:
            server.session()
    server.stop()
    assert time.monotonic() < end
