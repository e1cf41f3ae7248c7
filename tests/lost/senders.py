"""Clients that send a call, lose its answer, and send it again, as they would without knowing of keys.

`Raw` speaks /rpc and every revision of MCP over HTTP, from the specification. `PythonSdk` and `TypeScriptSdk` are the
official clients, behind a proxy that cuts their connections.

    flight = sender.begin(order)     a call on its way
    await flight.cut("cut")          its connection is gone; "cancel": its client gives up, and says so as its protocol does
    await flight.answer()            what came back; `Cut` if the connection ended before
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from itertools import count
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import aiohttp
import mcp
from mcp.client import session
from msgspec import Struct

from tests.client.peers import Listening, Reader, Writer
from tests.mcp.asgi import BASIC, LEGACY, R5, enveloped, hello, notification, repeated, request
from tests.mcp.node import installed, node

How: TypeAlias = Literal["cut", "cancel"]

PATIENCE = 90.0  # seconds after which a client that hears nothing is a fault
GIVE_UP = 0.1  # seconds after which a client gives up a call whose connection was cut, unless it has found out by itself
NARROW = 4096  # bytes that a client takes in advance, if a long answer is to be cut in the middle
ADDRESS = "127.0.0.1"

TYPESCRIPT = ("@modelcontextprotocol/sdk@1.32.2", "@modelcontextprotocol/client@2.4.0")


class Cut(Exception):
    """The connection ended before the answer."""


class Order(Struct, frozen=True):
    """The command of one trial: equal orders are equal calls."""

    method: str
    name: str
    nap: float = 0.0  # seconds that the handler takes
    size: int = 0  # bytes of its result, beside the rest

    @property
    def params(self) -> dict[str, Any]:
        return {"order": self.name, "nap": self.nap, "size": self.size}


class Answer(Struct, frozen=True):
    """An answer: the run that it names, or the code of its error."""

    run: str | None = None
    code: int | None = None
    is_replayed: bool = False
    is_recognised: bool = False


def read_answer(message: Any, *, is_replayed: bool = False) -> Answer:
    if "error" in message:
        return Answer(code=message["error"]["code"], is_replayed=is_replayed)
    result = message["result"]
    if "content" not in result:
        return Answer(result["run"], is_replayed=is_replayed)
    marks = result.get("_meta") or {}
    told = bool(marks.get("io.wirecall/replayed")), bool(marks.get("io.wirecall/recognised"))
    if result.get("isError"):
        return Answer(None, (marks.get("io.wirecall/error") or {}).get("code", -1), *told)
    return Answer(json.loads(result["content"][0]["text"])["run"], None, *told)


class Flight:
    """A call on its way."""

    def __init__(self, work: Awaitable[Answer], cut: Callable[[How], Awaitable[None]]) -> None:
        self.task = asyncio.ensure_future(work)
        self._cut = cut

    async def cut(self, how: How) -> None:
        """End the call without an answer; nothing is left of it when this returns."""
        await self._cut(how)
        done, _ = await asyncio.wait([self.task], timeout=GIVE_UP)
        if not done and how == "cut":  # some clients resume a stream that was cut: those cancel, and want it no more
            await self._cut("cancel")
            await asyncio.wait([self.task], timeout=GIVE_UP)
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])

    async def answer(self) -> Answer:
        async with asyncio.timeout(PATIENCE):
            return await self.task

    def answered(self) -> Answer | None:
        """The answer, if it has come."""
        if not self.task.done() or self.task.cancelled() or self.task.exception() is not None:
            return None
        return self.task.result()


class Sender:
    """One caller. `name` is in `_meta` of each call, and so in each of its effects."""

    can_cancel = False
    is_matched = True  # the server can recognise its calls

    def __init__(self, kind: str, name: str, caller: str = "") -> None:
        self.kind, self.name, self.caller = kind, name, caller
        self.ids = count(1)

    @property
    def is_plain(self) -> bool:
        """It speaks JSON-RPC without MCP."""
        return self.kind.endswith("/rpc")

    def record(self, order: Order) -> str:
        """The ledger's name for the method."""
        return order.method if self.is_plain else f"tools/call:{order.method}"

    async def open(self) -> None:
        """Get to where calls can be sent."""

    def begin(self, order: Order) -> Flight:
        """Send the call."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leave nothing behind."""


# --- raw HTTP -------------------------------------------------------------------------------------------------------


class Raw(Sender):
    """/rpc, or a revision of MCP."""

    def __init__(self, way: str, name: str, port: int, caller: str = "", *, is_matched: bool = True) -> None:
        super().__init__(f"raw {way}", name, caller)
        self.is_matched = is_matched
        self.can_cancel = way in LEGACY
        self.way, self._url = way, f"http://{ADDRESS}:{port}{'/rpc' if way == '/rpc' else '/mcp'}"
        self._session = ""
        self._http, self._narrow = aiohttp.ClientSession(), aiohttp.ClientSession(connector=_narrow())

    async def open(self) -> None:
        if self.way in LEGACY:
            async with asyncio.timeout(PATIENCE):
                while not self._session:
                    with suppress(aiohttp.ClientError, OSError):  # another trial kills the server
                        async with self._http.post(self._url, json=hello(self.way), headers=self._headers()) as answer:
                            self._session = answer.headers["mcp-session-id"]
                    await asyncio.sleep(0.02)
            await self._post(notification("notifications/initialized"))

    def begin(self, order: Order, *, short_of: int | None = None) -> Flight:
        """Send the call; `short_of` cuts the connection after so many bytes of the answer."""
        id = next(self.ids)
        # Every other answer of MCP becomes a stream.
        meta = {"sender": self.name, **({"progressToken": id} if id % 2 and self.way != "/rpc" else {})}
        if self.way == "/rpc":
            message = request(order.method, {**order.params, "_meta": meta}, id)
        else:
            params = {"name": order.method, "arguments": order.params, "_meta": meta}
            message = enveloped("tools/call", params, id) if self.way == R5 else request("tools/call", params, id)

        async def cut(how: How) -> None:
            if how == "cancel":
                await self._post(notification("notifications/cancelled", {"requestId": id}))
            else:
                flight.task.cancel()

        flight = Flight(self._exchange(message, short_of), cut)
        return flight

    async def _exchange(self, message: Any, short_of: int | None) -> Answer:
        http = self._http if short_of is None else self._narrow
        try:
            async with http.post(self._url, json=message, headers=self._headers(message)) as answer:
                if short_of is not None:
                    await answer.content.read(short_of)
                    answer.close()
                    raise Cut
                body = await answer.read()
                replayed = answer.headers.get("idempotent-replayed") == "true"
                if answer.content_type == "text/event-stream":
                    lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
                    body = lines[-1].removeprefix(b"data: ") if lines else b""
        except (aiohttp.ClientError, OSError) as error:
            raise Cut from error
        if not body or answer.status == 202:  # the call was cancelled, or its stream ended with the server
            raise Cut
        told = json.loads(body)
        if "method" in told:  # the stream of a call that was cancelled ends with its progress
            raise Cut
        if told.get("id") != message["id"]:
            raise RuntimeError(f"HTTP {answer.status}: {body[:300]!r}")
        return read_answer(told, is_replayed=replayed)

    async def _post(self, message: Any) -> None:
        with suppress(aiohttp.ClientError, OSError):
            async with self._http.post(self._url, json=message, headers=self._headers()) as answer:
                await answer.read()

    def _headers(self, message: Any = None) -> dict[str, str]:
        told = {**BASIC, "host": "localhost", **({"caller": self.caller} if self.caller else {})}
        if self.way == R5 and message is not None:
            return {**told, **repeated(message)}
        return {**told, "mcp-session-id": self._session} if self._session else told

    async def close(self) -> None:
        await self._http.close()
        await self._narrow.close()
        await asyncio.sleep(0)  # aiohttp closes its connections in the next turn of the loop


def _narrow() -> aiohttp.TCPConnector:
    def make(info: Any) -> socket.socket:
        family, kind, protocol, *_ = info
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW)
        return made

    return aiohttp.TCPConnector(socket_factory=make, force_close=True)


# --- the official clients -------------------------------------------------------------------------------------------


class Proxy(Listening):
    """Passes bytes both ways, until all its connections are cut at once."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def cut(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        # A connection that takes little in advance: the server notices when its client reads no more.
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW)
        try:
            await asyncio.get_running_loop().sock_connect(made, (ADDRESS, self._port))
            upstream, out = await asyncio.open_connection(sock=made)
        except BaseException as error:
            made.close()
            if isinstance(error, OSError):
                return
            raise
        pumps = [asyncio.create_task(self._pass(reader, out)), asyncio.create_task(self._pass(upstream, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            out.transport.abort()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pass(self, reader: Reader, writer: Writer) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()


class Sdk(Sender):
    """An official client behind a proxy. A client that has lost a connection is replaced by a new one."""

    can_cancel = True

    def __init__(self, kind: str, name: str, port: int) -> None:
        super().__init__(kind, name)
        self.proxy = Proxy(port)

    async def open(self) -> None:
        await self.proxy.__aenter__()

    async def close(self) -> None:
        await self.proxy.__aexit__()


class PythonSdk(Sdk):
    """`mcp.Client`, in a task of its own: a client that loses its connection ends the block that it was entered with."""

    def __init__(self, revision: str, name: str, port: int, connecting: asyncio.Lock) -> None:
        super().__init__(f"python {revision}", name, port)
        self._revision, self._connecting = revision, connecting
        self._orders: asyncio.Queue[tuple[Order, asyncio.Future[Answer]]] = asyncio.Queue()
        self._life: asyncio.Task[None] | None = None
        self._call: asyncio.Task[Any] | None = None

    def begin(self, order: Order) -> Flight:
        if self._life is None or self._life.done():
            self._life = asyncio.create_task(self._live())
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait((order, answered))

        async def cut(how: How) -> None:
            if how == "cut":
                self.proxy.cut()
            elif self._call is not None:
                self._call.cancel()

        return Flight(answered, cut)

    async def close(self) -> None:
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life], timeout=PATIENCE)
        await super().close()

    async def _live(self) -> None:
        """Serve orders, until one of them ends without an answer."""
        answered: asyncio.Future[Answer] | None = None
        try:
            async with AsyncExitStack() as stack:
                # Left alone, it offers only its newest revision. The word is the module's, so clients connect one by one.
                async with self._connecting:
                    if self._revision != R5:
                        vars(session)["LATEST_HANDSHAKE_VERSION"] = self._revision
                    mode: Any = "auto" if self._revision == R5 else "legacy"
                    client = await stack.enter_async_context(mcp.Client(f"{self.proxy.url}/mcp", mode=mode))
                while True:
                    order, answered = await self._orders.get()
                    meta: Any = {"sender": self.name}
                    self._call = asyncio.create_task(client.call_tool(order.method, order.params, meta=meta))
                    try:
                        result = await self._call
                    except asyncio.CancelledError:
                        if not self._call.cancelled():  # the client ends
                            self._call.cancel()
                            raise
                        _fail(answered, "it gave up")
                        continue
                    told = result.model_dump(mode="json", by_alias=True, exclude_none=True)
                    if not answered.done():
                        answered.set_result(read_answer({"result": told}))
        except Exception as error:
            if answered is not None:
                _fail(answered, repr(error))
            while not self._orders.empty():  # it could not even connect, or was ending when the order came
                _fail(self._orders.get_nowait()[1], repr(error))


def _fail(answered: "asyncio.Future[Answer]", why: str) -> None:
    if not answered.done():
        answered.set_exception(Cut(why))
        answered.exception()  # retrieved: its call may have been given up


class TypeScriptSdk(Sdk):
    """The client for TypeScript, 1.x or 2.x, in a process of its own."""

    def __init__(self, sdk: int, revision: str, name: str, port: int, log: IO[bytes]) -> None:
        super().__init__(f"typescript {sdk} {revision}", name, port)
        self._sdk, self._revision, self._log = sdk, revision, log
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    async def open(self) -> None:
        await super().open()
        modules = await asyncio.to_thread(installed, *TYPESCRIPT)
        wanted = {"modules": str(modules), "sdk": self._sdk, "revision": self._revision, "url": f"{self.proxy.url}/mcp"}
        self._process = await asyncio.create_subprocess_exec(
            *(node(), Path(__file__).with_name("client.mjs"), json.dumps(wanted)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            limit=1 << 25,
        )
        self._listening = asyncio.create_task(self._listen())

    def begin(self, order: Order) -> Flight:
        id = next(self.ids)
        answered = self._waiting[id] = asyncio.get_running_loop().create_future()
        self._write({"id": id, "call": {"name": order.method, "arguments": order.params, "_meta": {"sender": self.name}}})

        async def cut(how: How) -> None:
            if how == "cut":
                self.proxy.cut()
            else:
                self._write({"id": id, "abort": True})

        return Flight(answered, cut)

    async def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        await super().close()

    def _write(self, message: Any) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _listen(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            message = json.loads(line)
            answered = self._waiting.pop(message["id"])
            if "error" in message:
                _fail(answered, message["error"])
            elif not answered.done():
                answered.set_result(read_answer(message))
