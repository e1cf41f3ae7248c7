"""Transports of a call to an app: each has a caller that reads the answer, or leaves before it
arrives.

    app = new_app(**known("2025-11-25"))
    wire = await wires("2025-11-25", app)
    lost = wire.send("charge", {"cents": 5})
    ...                                         # until the handler is where the test wants it
    await lost.leave()
    answer = await wire.call("charge", {"cents": 5})

A wire is one caller that the app knows (`known`): over /rpc and at 2026-07-28 an authenticated one,
in the older revisions a session, on a pipe its one peer. `leave` ends the connection, as a client
that is killed does; the next call of a pipe uses a new one.
"""

import asyncio
import json
import os
import select
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from tests.calls import read
from tests.mcp.asgi import (
    BASIC,
    PATIENCE,
    R5,
    REVISIONS,
    Asgi,
    Exchange,
    HttpClient,
    envelope,
    hello,
    notification,
    request,
)
from wirecall import App
from wirecall.transports.stdio import serve_streams

RECOGNISED = "io.wirecall/recognised"
REPLAYED = "io.wirecall/replayed"

# In memory, plain JSON-RPC over HTTP and on a pipe, and every revision of MCP over HTTP and on a
# pipe.
HTTP = ("/rpc", *REVISIONS)
STATELESS = ("/rpc", R5)
PIPES = ("pipe", *(f"pipe {revision}" for revision in REVISIONS))
WAYS = ("memory", *HTTP, *PIPES)


class Told(NamedTuple):
    """The answer to a caller: the value of the function or an error, and the marks of a replay."""

    value: Any = None
    error: Any = None
    is_replayed: bool = False
    is_recognised: bool = False  # plain JSON-RPC has no place to say so


def told_of(answer: Any, *, is_replayed: bool = False) -> Told:
    """Read one answer. Of a tool's result, the value is in its text."""
    if "error" in answer:
        return Told(error=answer["error"], is_replayed=is_replayed)
    result = answer["result"]
    if not isinstance(result, dict) or "content" not in result:
        return Told(result, is_replayed=is_replayed)
    marks = result.get("_meta", {})
    text = result["content"][0]["text"]
    if result.get("isError"):
        error = marks.get("io.wirecall/error") or text
        return Told(None, error, marks.get(REPLAYED, False), marks.get(RECOGNISED, False))
    assert is_replayed is marks.get(REPLAYED, False) or not is_replayed
    return Told(json.loads(text), None, marks.get(REPLAYED, False), marks.get(RECOGNISED, False))


class Sent:
    """A pending call.

    After `pause` the caller reads nothing: a long answer is written until `is_full`.
    """

    def __init__(
        self,
        told: Callable[[], Awaitable[Any]],
        leave: Callable[[], Awaitable[None]],
        pause: Callable[[], None] = lambda: None,
        is_full: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._told = told
        self.leave = leave
        self.pause = pause
        self._is_full = is_full

    async def is_full(self) -> None:
        """Wait until the server waits for the caller to read."""
        assert self._is_full is not None, "in memory an answer has no parts"
        async with asyncio.timeout(PATIENCE):
            await self._is_full()

    async def told(self) -> Any:
        """Wait for the answer: of one call `Told`, of an array a list of them."""
        async with asyncio.timeout(PATIENCE):
            return await self._told()


class Wire:
    """The transport of one caller."""

    def __init__(self) -> None:
        self.ids = count(1)

    async def open(self) -> None:
        """Connect, until calls can be sent."""

    def send(self, method: str, params: Any = None, *, id: int | None = None) -> Sent:
        return self.post(self.message(method, params, next(self.ids) if id is None else id))

    async def call(self, method: str, params: Any = None) -> Told:
        told = await self.send(method, params).told()
        assert isinstance(told, Told)
        return told

    def message(self, method: str, params: Any, id: int) -> Any:
        return request(method, params, id)

    def post(self, message: Any) -> Sent:
        raise NotImplementedError

    async def cancel(self, id: int) -> None:
        """Send `notifications/cancelled`."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leave nothing behind."""


class MemoryWire(Wire):
    """`App.handle`, whose caller leaves by cancelling."""

    def __init__(self, app: App, caller: str) -> None:
        super().__init__()
        self._app = app
        self._caller = caller

    def post(self, message: Any) -> Sent:
        replayed: list[Any] = []
        data = json.dumps(message).encode()
        task = asyncio.create_task(self._app.handle(data, caller=self._caller, replayed=replayed))

        async def told() -> Any:
            answer = read(await task)
            if isinstance(answer, list):
                return [told_of(each, is_replayed=each["id"] in replayed) for each in answer]
            return told_of(answer, is_replayed=bool(replayed))

        async def leave() -> None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

        return Sent(told, leave)


class RpcWire(Wire):
    """Plain JSON-RPC over HTTP."""

    def __init__(self, app: App, caller: str) -> None:
        super().__init__()
        self.asgi: Asgi = app.asgi()
        self._headers = {**BASIC, **({"caller": caller} if caller else {})}
        self._exchanges: list[Exchange] = []

    def post(self, message: Any) -> Sent:
        exchange = Exchange(
            self.asgi, "POST", self._headers, json.dumps(message).encode(), path="/rpc"
        )
        self._exchanges.append(exchange)

        async def told() -> Any:
            answer = await (await exchange.started()).json()
            replayed = json.loads(exchange.header("idempotent-replayed") or "false")
            if isinstance(answer, list):
                return [
                    told_of(each, is_replayed=bool(replayed) and each["id"] in replayed)
                    for each in answer
                ]
            return told_of(answer, is_replayed=replayed)

        return over_http(exchange, told)

    async def close(self) -> None:
        for exchange in self._exchanges:
            await exchange.close()


def over_http(exchange: Exchange, told: Callable[[], Awaitable[Any]]) -> Sent:
    async def leave() -> None:
        exchange.leave()
        exchange.reads.set()  # a server drops what it has for a client that has left

    return Sent(told, leave, exchange.reads.clear, exchange.is_full.wait)


class McpWire(Wire):
    """A revision of MCP over HTTP."""

    def __init__(self, app: App, revision: str, caller: str) -> None:
        super().__init__()
        self.client = HttpClient(
            app.asgi(), revision, headers={"caller": caller} if caller else None
        )

    async def open(self) -> None:
        await self.client.open()

    def message(self, method: str, params: Any, id: int) -> Any:
        return self.client.message("tools/call", {"name": method, "arguments": params or {}}, id)

    def post(self, message: Any) -> Sent:
        exchange = self.client.post(message)

        async def told() -> Any:
            answers = [told_of(each) for each in await exchange.messages() if "method" not in each]
            return answers if isinstance(message, list) else answers[0]

        return over_http(exchange, told)

    async def cancel(self, id: int) -> None:
        await self.client.notify("notifications/cancelled", {"requestId": id})

    async def close(self) -> None:
        await self.client.close()


class PipeWire(Wire):
    """Lines on a pair of pipes, of a revision of MCP or of plain JSON-RPC."""

    def __init__(self, app: App, revision: str) -> None:
        super().__init__()
        self._app = app
        self._revision = revision
        self._served: list[asyncio.Task[None]] = []
        self._transport: asyncio.ReadTransport | None = None
        self._waiting: dict[str, asyncio.Future[Any]] = {}

    async def open(self) -> None:
        if self._served:  # a process serves one pair of pipes at a time
            await asyncio.wait(self._served, timeout=PATIENCE)
        reader, self._stdin = os.pipe()
        stdout, writer = os.pipe()
        stream = asyncio.StreamReader(limit=1 << 24)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(stdout, "rb", 0)
        )

        async def serve() -> None:
            try:
                await serve_streams(
                    self._app._connect, reader, writer, grace=PATIENCE, limits=self._app.limits
                )
            finally:
                os.close(reader)
                os.close(writer)

        async def listen() -> None:
            while line := await stream.readline():
                answer = json.loads(line)
                self._waiting.pop(_name(answer)).set_result(answer)

        self._served += [loop.create_task(serve()), loop.create_task(listen())]
        if self._revision not in ("", R5):
            await self._exchange(hello(self._revision))
            self._write(notification("notifications/initialized"))

    def message(self, method: str, params: Any, id: int) -> Any:
        if not self._revision:
            return request(method, params, id)
        named = {"name": method, "arguments": params or {}}
        return request(
            "tools/call", {**named, **({"_meta": envelope()} if self._revision == R5 else {})}, id
        )

    def post(self, message: Any) -> Sent:
        answered = self._exchange(message)

        async def told() -> Any:
            answer = await answered
            return (
                [told_of(each) for each in answer] if isinstance(answer, list) else told_of(answer)
            )

        transport = self._transport
        assert transport is not None

        async def is_full() -> None:
            pipe = transport.get_extra_info("pipe")
            # A part arrived, the pipe is full.
            await asyncio.to_thread(select.select, [pipe], [], [], PATIENCE)

        return Sent(told, self.leave, transport.pause_reading, is_full)

    def stop_reading(self) -> None:
        """Close the end that answers come from; `leave` closes both."""
        assert self._transport is not None
        self._transport.close()

    async def leave(self) -> None:
        """Both ends are closed, as those of a process that is killed.

        The next call needs `open`.
        """
        assert self._transport is not None
        os.close(self._stdin)
        self._transport.close()
        self._transport = None

    async def cancel(self, id: int) -> None:
        self._write(notification("notifications/cancelled", {"requestId": id}))

    async def close(self) -> None:
        if self._transport is not None:
            os.close(self._stdin)
            await asyncio.wait(self._served, timeout=PATIENCE)
            self._transport.close()
        done, _ = await asyncio.wait(self._served, timeout=PATIENCE)
        assert len(done) == len(self._served), "a pipe did not end"

    def _exchange(self, message: Any) -> "asyncio.Future[Any]":
        answered = self._waiting[_name(message)] = asyncio.get_running_loop().create_future()
        self._write(message)
        return answered

    def _write(self, message: Any) -> None:
        os.write(self._stdin, json.dumps(message).encode() + b"\n")


def _name(message: Any) -> str:
    """The common part of a message and its answer."""
    return json.dumps(
        [each["id"] for each in message] if isinstance(message, list) else message["id"]
    )


def make_wire(way: str, app: App, caller: str) -> Wire:
    """`caller` counts where a caller is authenticated; "" is an anonymous one."""
    if way == "memory":
        return MemoryWire(app, caller)
    if way == "/rpc":
        return RpcWire(app, caller)
    kind, _, revision = way.rpartition(" ")
    if way in PIPES:
        return PipeWire(app, revision if kind else "")
    return McpWire(app, revision, caller)


def authenticate(headers: Any) -> str | None:
    """The caller that a header names."""
    name: str | None = headers.get("caller")
    return name


def known(way: str) -> dict[str, Any]:
    """Options of an app that knows its callers.

    Stateless ones are anonymous unless authenticated.
    """
    return {"authenticate": authenticate} if way in STATELESS else {}


Wires: TypeAlias = Callable[..., Awaitable[Wire]]
