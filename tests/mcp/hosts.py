"""Several servers of one app, each as on a separate host: a process, an address and a folder for
temporary files. They share a secret and a ledger.

Run as a program, this file is one of the servers.
"""

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

COUNT = 4
PATIENCE = 60.0
META = "io.modelcontextprotocol/"
TASKS = f"{META}tasks"
NEWEST = "2026-07-28"
SESSIONS = "2025-11-25"
THING = "test://thing"


# --- the app --------------------------------------------------------------------------------------


def serve(ledger: str, effects: str) -> None:
    """Serve the app of these tests."""
    from wirecall import App, Context, Limits
    from wirecall.middleware import RateLimit

    rate: dict[str, Any] = {}
    app = App(
        "hosts",
        mode="development",
        ledger=ledger,
        secret="the same on every host",
        limits=Limits(waiting_per_caller=2),
    )
    if ledger.startswith("redis"):
        rate["ledger"] = app.ledger
    limit = RateLimit(2, per=86_400, **rate)
    gates: dict[str, asyncio.Event] = {}

    def gate(name: str) -> asyncio.Event:
        return gates.setdefault(name, asyncio.Event())

    def note(text: str) -> None:
        with open(effects, "a") as file:
            file.write(f"{text}\n")

    @app.query
    def host() -> int:
        return os.getpid()

    @app.query
    async def open_gate(name: str) -> None:
        gate(name).set()

    @app.query
    async def wait_for(name: str) -> None:
        await gate(name).wait()

    @app.command
    async def charge(account: str) -> int:
        note(f"charge {account}")
        return os.getpid()

    @app.command(key="auto")
    async def charge_late(account: str) -> int:
        note(f"charge {account}")
        gate(f"charged {account}").set()
        await gate(f"late {account}").wait()
        return os.getpid()

    @app.command
    async def wait(ctx: Context, account: str) -> str:
        await ctx.progress(1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            gate(f"cancelled {account}").set()
            raise
        await ctx.commit_point()
        note(f"wait {account}")
        return account

    @app.tool
    async def ask(ctx: Context) -> str:
        form = {"type": "object", "properties": {"name": {"type": "string"}}}
        answer = await ctx.elicit("Who?", form)
        return f"hello {answer.content['name']}"

    @app.query
    async def look_up(ctx: Context) -> str:
        form = {"type": "object", "properties": {"name": {"type": "string"}}}
        answer = await ctx.elicit("Whom?", form)
        return f"found {answer.content['name']}"

    @app.tool
    async def sample(ctx: Context) -> str:
        sampled = await ctx.sample("Say something", max_tokens=10)
        return f"the model: {sampled.text}"

    @app.tool
    async def list_roots(ctx: Context) -> str:
        return ", ".join(root.uri for root in await ctx.roots())

    @app.query
    async def chatter(ctx: Context) -> str:
        for level in ("info", "error"):
            await ctx.log(level, f"an {level}")
        return "said"

    @app.tool(task=True)
    async def work(ctx: Context, name: str) -> str:
        gate(f"working {name}").set()
        try:
            await gate(f"work {name}").wait()
        except asyncio.CancelledError:
            gate(f"cancelled {name}").set()
            raise
        await ctx.commit_point()
        note(f"work {name}")
        return f"done by {os.getpid()}"

    @app.tool(task=True)
    async def work_asking(ctx: Context) -> str:
        form = {"type": "object", "properties": {"name": {"type": "string"}}}
        answer = await ctx.elicit("Who?", form)
        await ctx.commit_point()
        return f"done for {answer.content['name']}"

    @app.query
    def touch(uri: str) -> None:
        app.updated(uri)

    @app.query
    def grow() -> None:
        app.changed("tools")

    @app.query
    async def limited(ctx: Context) -> str:
        async def call_next(_: Context) -> str:
            return "admitted"

        return str(await limit(ctx, call_next))

    @app.resource(THING)
    def thing() -> str:
        return "it"

    @app.resource("test://long/{name}")
    def long(name: str) -> str:
        return name

    for number in range(250):
        app.resource(f"test://many/{number:03}", name=f"many{number:03}")(lambda: "one of many")

    if not ledger.startswith("redis"):

        @app.command(on_crash="transactional")
        async def book(ctx: Context, account: str) -> int:
            insert = f"INSERT INTO bookings VALUES ('{account}')"
            if ledger.startswith("sqlite"):
                ctx.db.execute(insert)
            else:
                await ctx.db.execute(insert)
            return os.getpid()

    app.run("http", port=0, grace=1.0)


# --- its clients ----------------------------------------------------------------------------------


class Stream:
    """An answer that comes in events, and the connection that it needs."""

    def __init__(
        self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse
    ) -> None:
        self._connection = connection
        self.answer = answer
        self.status = answer.status
        # The id of the last event.
        self.last = ""

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield messages to the end of the stream, past comments and events without data."""
        end = time.monotonic() + PATIENCE
        while line := self.answer.readline():
            assert time.monotonic() < end, "nothing but comments"
            if line.startswith(b"id: "):
                self.last = line[4:].strip().decode()
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])

    def next(self, method: str | None = None) -> dict[str, Any]:
        """Return the next message; the next one of a method, if that is given."""
        for message in self.messages():
            if method is None or message.get("method") == method:
                return message
        raise AssertionError("the stream has ended")

    def is_over(self) -> bool:
        """Wait for the end of the stream; return whether no answer came before."""
        return all("result" not in message for message in self.messages())

    def leave(self) -> None:
        """Close the connection."""
        self.answer.close()
        self._connection.close()

    def open(self) -> "Stream":
        """Wait until the server has opened the stream."""
        assert self.answer.readline().startswith(b":")
        return self


class Host:
    """One server, and a client that opens a connection for each request."""

    def __init__(self, ledger: str, folder: Path, effects: Path) -> None:
        folder.mkdir()
        self._connections: list[Any] = []
        self.effects = effects
        self._folder = folder
        self._log = folder / "log"
        self._ledger = ledger
        self.start()

    def start(self) -> None:
        """Begin to start; `ready` waits for it."""
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.mcp.hosts", self._ledger, str(self.effects)],
                stderr=log,
                env={**os.environ, "TMPDIR": str(self._folder)},
            )
        self.pid = self.process.pid

    def ready(self) -> None:
        """Wait until it serves."""
        end = time.monotonic() + PATIENCE
        while not (found := re.findall(r"http://[^:]+:(\d+)", self._log.read_text())):
            assert self.process.poll() is None and time.monotonic() < end, self._log.read_text()
            time.sleep(0.02)
        self.port = int(found[0])

    def send(self, method: str, path: str, body: Any, headers: dict[str, str]) -> Stream:
        connection = self.connect()
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        self._connections.append(answer)
        return Stream(connection, answer)

    def connect(self) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        self._connections.append(connection)
        return connection

    def post(self, message: Any, token: str = "") -> Stream:
        """Send a message of MCP: in a session, or one that describes itself."""
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        }
        if token:
            headers |= {"Mcp-Session-Id": token, "Mcp-Protocol-Version": SESSIONS}
        elif isinstance(message, dict) and message.get("params", {}).get("_meta"):
            headers |= {"Mcp-Protocol-Version": NEWEST, "Mcp-Method": message["method"]}
            params = message["params"]
            named = params.get("name") or params.get("uri") or params.get("taskId")
            if named:
                headers["Mcp-Name"] = named
        return self.send("POST", "/mcp", message, headers)

    def answer(self, message: Any, token: str = "") -> Any:
        answer = self.post(message, token).answer
        body = answer.read()
        assert answer.status == 200, body
        if answer.headers["content-type"] == "application/json":
            return json.loads(body)
        (found,) = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")][-1:]
        return json.loads(found)

    def listen(self, token: str, last: str = "") -> Stream:
        headers = {"Accept": "text/event-stream", "Mcp-Session-Id": token}
        if last:
            headers["Last-Event-Id"] = last
        return self.send("GET", "/mcp", None, headers)

    def delete(self, token: str) -> int:
        return self.send("DELETE", "/mcp", None, {"Mcp-Session-Id": token}).status

    def session(self) -> str:
        """Open a session, and return its token."""
        params = {
            "protocolVersion": SESSIONS,
            "capabilities": {"elicitation": {}, "sampling": {}, "roots": {}},
            "clientInfo": {"name": "t", "version": "1"},
        }
        opening = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        answer = self.post(opening).answer
        answer.read()
        token = answer.headers["Mcp-Session-Id"]
        assert token
        return str(token)

    def call(self, method: str, **params: Any) -> Any:
        """Call a method over plain JSON-RPC, and return its answer."""
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        answer = self.send("POST", "/rpc", message, {"Content-Type": "application/json"})
        return json.loads(answer.answer.read())

    def noted(self, text: str) -> int:
        """Return how many times a handler has noted this, on any host."""
        if not self.effects.exists():
            return 0
        return self.effects.read_text().splitlines().count(text)

    def ask_to_stop(self) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.close()
        self._connections.clear()
        self.process.send_signal(signal.SIGTERM)

    def stopped(self) -> None:
        self.process.wait(PATIENCE)


def tool(name: str, id: int = 1, **arguments: Any) -> dict[str, Any]:
    """Return a call of a tool in a session."""
    params = {"name": name, "arguments": arguments, "_meta": {"progressToken": id}}
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}


def newest(method: str, id: int = 1, **params: Any) -> dict[str, Any]:
    """Return a request that describes itself."""
    capabilities: dict[str, Any] = {"elicitation": {"form": {}}, "extensions": {TASKS: {}}}
    meta = {
        f"{META}protocolVersion": NEWEST,
        f"{META}clientCapabilities": capabilities,
        f"{META}clientInfo": {"name": "t", "version": "1"},
    }
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": {**params, "_meta": meta}}


if __name__ == "__main__":
    serve(*sys.argv[1:])
