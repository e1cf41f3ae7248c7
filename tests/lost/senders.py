"""Clients that send a call, lose its answer, and send it again, as clients without keys do.

`Raw` speaks /rpc and every revision of MCP over HTTP, from the specification. `PythonSdk` and
`TypeScriptSdk` are the official clients, behind a proxy that cuts their connections.

    flight = sender.begin(order)     a pending call
    await flight.cut("cut")          its connection is gone; "cancel": its client gives up, and says
                                     so as its protocol does
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
from wirecall.transports.arrivals import CONFIRM_AFTER

How: TypeAlias = Literal["cut", "cancel"]
# Of an answer, which its client reads.
Part: TypeAlias = Literal["none", "first byte", "half", "all but one byte"]

PARTS: tuple[Part, ...] = ("none", "first byte", "half", "all but one byte")

PATIENCE = 90.0  # seconds after which a client without an answer is a fault
# Seconds after which a client gives up a call whose connection was cut, unless it has noticed.
GIVE_UP = 0.1
MANY = 1 << 20  # bytes that no buffer of a narrow client holds
FILLER = b"xxxxxxxx"  # the rest of a result that is long
NARROW = 4096  # bytes that a client takes in advance, if a long answer will be cut in the middle
ADDRESS = "127.0.0.1"
# The codes of wirecall's own errors begin here. The clients have codes below for what they report
# themselves: a closed connection, a status of HTTP.
FIRST_CODE = 10_000

TYPESCRIPT = ("@modelcontextprotocol/sdk@1.32.2", "@modelcontextprotocol/client@2.4.0")


class Cut(Exception):
    """The connection ended before the answer."""


class CutInAnswer(Cut):
    """The client ended the connection after it had received a part of the answer to its call."""


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
    ran: str | None = None  # what an error says of the effect


def read_answer(message: Any, *, is_replayed: bool = False) -> Answer:
    if "error" in message:
        error = message["error"]
        ran = (error.get("data") or {}).get("ran")
        return Answer(code=error["code"], is_replayed=is_replayed, ran=ran)
    result = message["result"]
    if "content" not in result:
        return Answer(result["run"], is_replayed=is_replayed)
    marks = result.get("_meta") or {}
    told = bool(marks.get("io.wirecall/replayed")), bool(marks.get("io.wirecall/recognised"))
    if result.get("isError"):
        return Answer(None, (marks.get("io.wirecall/error") or {}).get("code", -1), *told)
    return Answer(json.loads(result["content"][0]["text"])["run"], None, *told)


class Flight:
    """A pending call."""

    def __init__(self, work: Awaitable[Answer], cut: Callable[[How], Awaitable[None]]) -> None:
        self.task = asyncio.ensure_future(work)
        self._cut = cut

    async def cut(self, how: How) -> None:
        """End the call without an answer; it is gone completely when this returns."""
        await self._cut(how)
        done, _ = await asyncio.wait([self.task], timeout=GIVE_UP)
        if not done and how == "cut":  # some clients resume a stream that was cut: those cancel
            await self._cut("cancel")
            await asyncio.wait([self.task], timeout=GIVE_UP)
        if not self.task.done():
            self.task.cancel()
            await asyncio.wait([self.task])

    async def answer(self) -> Answer:
        async with asyncio.timeout(PATIENCE):
            return await self.task

    def answered(self) -> Answer | None:
        """The answer, if it has arrived."""
        if not self.task.done() or self.task.cancelled() or self.task.exception() is not None:
            return None
        return self.task.result()

    def is_cut_in_answer(self) -> bool:
        """Whether a part of the answer had arrived when the connection was cut."""
        if not self.task.done() or self.task.cancelled():
            return False
        return isinstance(self.task.exception(), CutInAnswer)


class Sender:
    """One caller. `name` is in `_meta` of each call, and so in each of its effects."""

    can_cancel = False
    is_matched = True  # the server can recognise its calls

    def __init__(self, kind: str, name: str, caller: str = "") -> None:
        self.kind = kind
        self.name = name
        self.caller = caller
        self.ids = count(1)

    @property
    def is_plain(self) -> bool:
        """It speaks JSON-RPC without MCP."""
        return self.kind.endswith("/rpc")

    def record(self, order: Order) -> str:
        """The ledger's name for the method."""
        return order.method if self.is_plain else f"tools/call:{order.method}"

    async def open(self) -> None:
        """Connect, until calls can be sent."""

    def begin(self, order: Order) -> Flight:
        """Send the call."""
        raise NotImplementedError

    async def close(self) -> None:
        """Leave nothing behind."""


# --- raw HTTP -------------------------------------------------------------------------------------


class Raw(Sender):
    """/rpc, or a revision of MCP."""

    def __init__(
        self,
        way: str,
        name: str,
        port: int,
        caller: str = "",
        *,
        is_matched: bool = True,
        path: str = "/mcp",
    ) -> None:
        super().__init__(f"raw {way}", name, caller)
        self.is_matched = is_matched
        self.can_cancel = way in LEGACY
        self.way = way
        self._port = port
        self._path = "/rpc" if way == "/rpc" else path
        self._url = f"http://{ADDRESS}:{port}{self._path}"
        self._session = ""
        self._http = aiohttp.ClientSession()
        self._narrow = aiohttp.ClientSession(connector=_narrow())

    async def open(self) -> None:
        if self.way in LEGACY:
            async with asyncio.timeout(PATIENCE):
                while not self._session:
                    with suppress(aiohttp.ClientError, OSError):  # another trial kills the server
                        async with self._http.post(
                            self._url, json=hello(self.way), headers=self._headers()
                        ) as answer:
                            self._session = answer.headers["mcp-session-id"]
                    await asyncio.sleep(0.02)
            await self._post(notification("notifications/initialized"))

    def begin(self, order: Order, *, short_of: int | None = None) -> Flight:
        """Send the call; `short_of` cuts the connection after so many bytes of the answer."""
        message = self._message(order)

        async def cut(how: How) -> None:
            if how == "cancel":
                await self._post(
                    notification("notifications/cancelled", {"requestId": message["id"]})
                )
            else:
                flight.task.cancel()

        flight = Flight(self._exchange(message, short_of), cut)
        return flight

    def begin_bare(
        self,
        order: Order,
        *,
        behind: bytes = b"",
        part: Part | None = None,
        half_close_at: asyncio.Event | None = None,
    ) -> Flight:
        """Send the call on a bare socket, with bytes behind it.

        After `part` of the answer the connection is closed. When `half_close_at` is set, the sender
        ends its sending side. granian drops a request that arrives together with that end.
        """
        message = self._message(order, is_plain=part is not None)

        async def cut(how: How) -> None:
            flight.task.cancel()

        flight = Flight(self._exchange_bare(message, behind, part, half_close_at), cut)
        return flight

    def _message(self, order: Order, *, is_plain: bool = False) -> Any:
        id = next(self.ids)
        # Every other answer of MCP becomes a stream.
        is_stream = bool(id % 2) and self.way != "/rpc" and not is_plain
        meta = {"sender": self.name, **({"progressToken": id} if is_stream else {})}
        if self.way == "/rpc":
            return request(order.method, {**order.params, "_meta": meta}, id)
        params = {"name": order.method, "arguments": order.params, "_meta": meta}
        return (
            enveloped("tools/call", params, id)
            if self.way == R5
            else request("tools/call", params, id)
        )

    async def _exchange_bare(
        self, message: Any, behind: bytes, part: Part | None, half_close_at: asyncio.Event | None
    ) -> Answer:
        body = json.dumps(message).encode()
        fields = {**self._headers(message), "content-length": str(len(body))}
        lines = [
            f"POST {self._path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in fields.items()),
            "",
            "",
        ]
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with socket.socket() as made:
            made.setblocking(False)
            try:
                await loop.sock_connect(made, (ADDRESS, self._port))
                await loop.sock_sendall(made, "\r\n".join(lines).encode() + body + behind)
                if half_close_at is not None:
                    await half_close_at.wait()
                    made.shutdown(socket.SHUT_WR)
                if part is not None:
                    await _read_part(made, part)
                    # A server waits so long for the reset of a client that does not want its answer.
                    is_soon = loop.time() - begun < CONFIRM_AFTER / 2
                    raise CutInAnswer if is_soon else Cut
                seen = b""
                while not _is_whole(seen):
                    piece = await loop.sock_recv(made, 1 << 16)
                    if not piece:
                        raise Cut
                    seen += piece
            except OSError as error:
                raise Cut from error
        return self._read_bare(seen, message)

    def _read_bare(self, seen: bytes, message: Any) -> Answer:
        if isinstance(message, list):
            return _read_record(seen.partition(b"\r\n\r\n")[2], message[0]["id"])
        head, _, body = seen.partition(b"\r\n\r\n")
        headers = {}
        if b"idempotent-replayed: true" in head.lower():
            headers = {"idempotent-replayed": "true"}
        lines = [
            line.removeprefix(b"data: ")
            for line in body.split(b"\n")
            if line.startswith((b"data: {", b"{"))
        ]
        for line in lines:
            told = json.loads(line)
            if told.get("id") == message["id"] and "method" not in told:
                return self._read(message, line, headers)
        raise Cut

    async def _exchange(self, message: Any, short_of: int | None) -> Answer:
        http = self._http if short_of is None else self._narrow
        try:
            async with http.post(self._url, json=message, headers=self._headers(message)) as answer:
                if short_of is not None:
                    seen = await _read_up_to(answer.content, short_of)
                    if len(seen) == answer.content_length:  # it is short, and has come
                        return self._read(message, seen, answer.headers)
                    answer.close()
                    raise CutInAnswer if _is_long(answer, seen) else Cut
                body = await answer.read()
                if answer.content_type == "text/event-stream":
                    lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
                    body = lines[-1].removeprefix(b"data: ") if lines else b""
        except (aiohttp.ClientError, OSError) as error:
            raise Cut from error
        # The call was cancelled, or its stream ended with the server.
        if not body or answer.status == 202:
            raise Cut
        return self._read(message, body, answer.headers)

    def _read(self, message: Any, body: bytes, headers: Any) -> Answer:
        """Read the body of a whole answer."""
        told = json.loads(body)
        if "method" in told:  # the stream of a call that was cancelled ends with its progress
            raise Cut
        if told.get("id") != message["id"]:
            raise RuntimeError(f"not the answer: {body[:300]!r}")
        return read_answer(told, is_replayed=headers.get("idempotent-replayed") == "true")

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


class RawStream(Raw):
    """/rpc, by an array whose answers are a stream. A query is beside the call."""

    def __init__(self, name: str, port: int, caller: str = "", *, is_matched: bool = True) -> None:
        super().__init__("/rpc", name, port, caller, is_matched=is_matched)
        self.kind = "raw stream /rpc"

    def _message(self, order: Order, *, is_plain: bool = False) -> Any:
        call = super()._message(order, is_plain=is_plain)
        if is_plain:  # then the answer has its length
            return [call]
        return [call, request("rpc.discover", {}, -call["id"])]

    def _headers(self, message: Any = None) -> dict[str, str]:
        return {**super()._headers(message), "accept": "application/jsonl"}

    def _read(self, message: Any, body: bytes, headers: Any) -> Answer:
        return _read_record(body, message[0]["id"])


class RawTool(Raw):
    """A revision of MCP, by the batch tool."""

    def __init__(
        self, way: str, name: str, port: int, caller: str = "", *, is_matched: bool = True
    ) -> None:
        super().__init__(way, name, port, caller, is_matched=is_matched)
        self.kind = f"raw batch tool {way}"

    def _message(self, order: Order, *, is_plain: bool = False) -> Any:
        message = super()._message(order, is_plain=is_plain)
        entry = {"id": "it", "tool": order.method, "arguments": order.params}
        message["params"] |= {"name": "batch", "arguments": {"calls": [entry]}}
        return message

    def _read(self, message: Any, body: bytes, headers: Any) -> Answer:
        told = json.loads(body)
        if "method" in told:  # the stream of a call that was cancelled ends with its progress
            raise Cut
        if "error" in told:
            return Answer(code=told["error"]["code"])
        entry = json.loads(told["result"]["content"][0]["text"])["results"][0]
        is_replayed = bool(entry.get("replayed"))
        if not entry["ok"]:
            return Answer(None, entry["error"]["code"], is_replayed)
        return Answer(entry["result"]["run"], None, is_replayed, is_replayed)


def _read_record(body: bytes, id: object) -> Answer:
    """Read the record of a stream with an id. A stream without its end was cut."""
    for line in body.splitlines():
        if not line.startswith(b"{"):
            continue
        try:
            told = json.loads(line)
        except ValueError:  # the end of a stream that was cut
            continue
        if told.get("id") == id and "method" not in told:
            return read_answer(told, is_replayed=bool(told.get("replayed")))
    raise Cut


async def _read_part(made: socket.socket, part: Part) -> None:
    """Wait until the answer has begun, and read so much of it; the kernel keeps the rest."""
    loop = asyncio.get_running_loop()
    arrived = asyncio.Event()
    head = b""
    while b"\r\n\r\n" not in head:
        loop.add_reader(made, arrived.set)
        try:
            await arrived.wait()
        finally:
            loop.remove_reader(made)
        arrived.clear()
        head = made.recv(1 << 16, socket.MSG_PEEK)
        if not head:
            raise Cut
    head = head[: head.index(b"\r\n\r\n") + 4]
    whole = len(head) + int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    wanted = {"none": 0, "first byte": 1, "half": whole // 2, "all but one byte": whole - 1}[part]
    while wanted > 0:
        piece = await loop.sock_recv(made, min(wanted, 1 << 16))
        if not piece:
            raise Cut
        wanted -= len(piece)


def _is_long(answer: aiohttp.ClientResponse, seen: bytes) -> bool:
    """Whether the beginning of a body belongs to a long result, which no buffer holds.

    A stream may begin with progress, or with the answer to another entry; and an error is short.
    """
    return (answer.content_length or 0) > MANY or FILLER in seen


async def _read_up_to(content: aiohttp.StreamReader, count: int) -> bytes:
    """Read so many bytes, or all if there are fewer."""
    seen = b""
    while len(seen) < count and (piece := await content.read(count - len(seen))):
        seen += piece
    return seen


def _is_whole(seen: bytes) -> bool:
    head, end, body = seen.partition(b"\r\n\r\n")
    if not end:
        return False
    _, is_told, length = head.lower().partition(b"content-length: ")
    if is_told:
        return len(body) >= int(length.partition(b"\r\n")[0])
    return b"0\r\n\r\n" in body


def _narrow() -> aiohttp.TCPConnector:
    def make(info: Any) -> socket.socket:
        family, kind, protocol, *_ = info
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NARROW)
        return made

    return aiohttp.TCPConnector(socket_factory=make, force_close=True)


# --- the official clients -------------------------------------------------------------------------


class Proxy(Listening):
    """Passes bytes both ways, until all its connections are cut at once."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    def cut(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        # A connection that takes little in advance: the server notices when its client reads no
        # more.
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
        pumps = [
            asyncio.create_task(self._pass(reader, out)),
            asyncio.create_task(self._pass(upstream, writer)),
        ]
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
    """An official client behind a proxy.

    A client that has lost a connection is replaced by a new one.
    """

    can_cancel = True

    def __init__(self, kind: str, name: str, port: int) -> None:
        super().__init__(kind, name)
        self.proxy = Proxy(port)

    async def open(self) -> None:
        await self.proxy.__aenter__()

    async def close(self) -> None:
        await self.proxy.__aexit__()


class PythonSdk(Sdk):
    """`mcp.Client`, in a separate task: a client that loses its connection ends its `async with`
    block.
    """

    def __init__(self, revision: str, name: str, port: int, connecting: asyncio.Lock) -> None:
        super().__init__(f"python {revision}", name, port)
        self._revision = revision
        self._connecting = connecting
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
                # By default it offers only its newest revision. The setting is the module's, so
                # clients connect one by one.
                async with self._connecting:
                    if self._revision != R5:
                        vars(session)["LATEST_HANDSHAKE_VERSION"] = self._revision
                    mode: Any = "auto" if self._revision == R5 else "legacy"
                    client = await stack.enter_async_context(
                        mcp.Client(f"{self.proxy.url}/mcp", mode=mode)
                    )
                while True:
                    order, answered = await self._orders.get()
                    meta: Any = {"sender": self.name}
                    self._call = asyncio.create_task(
                        client.call_tool(order.method, order.params, meta=meta)
                    )
                    try:
                        result = await self._call
                    except asyncio.CancelledError:
                        if not self._call.cancelled():  # the client ends
                            self._call.cancel()
                            raise
                        _fail(answered, "it gave up")
                        continue
                    except mcp.MCPError as error:
                        if error.code < FIRST_CODE:  # the client's own error
                            raise
                        _note_error(answered, error.code, repr(error))
                        continue
                    told = result.model_dump(mode="json", by_alias=True, exclude_none=True)
                    if not answered.done():
                        answered.set_result(read_answer({"result": told}))
        except Exception as error:
            if answered is not None:
                _fail(answered, repr(error))
            # It could not even connect, or was ending when the order came.
            while not self._orders.empty():
                _fail(self._orders.get_nowait()[1], repr(error))


def _note_error(answered: "asyncio.Future[Answer]", code: object, why: str) -> None:
    """End a call whose client raised an error: the server's answer, or the loss of it."""
    if isinstance(code, int) and code >= FIRST_CODE:
        if not answered.done():
            answered.set_result(Answer(code=code))
        return
    _fail(answered, why)


def _fail(answered: "asyncio.Future[Answer]", why: str) -> None:
    if not answered.done():
        answered.set_exception(Cut(why))
        answered.exception()  # retrieved: its call may have been given up


class TypeScriptSdk(Sdk):
    """The client for TypeScript, 1.x or 2.x, in a separate process."""

    def __init__(self, sdk: int, revision: str, name: str, port: int, log: IO[bytes]) -> None:
        super().__init__(f"typescript {sdk} {revision}", name, port)
        self._sdk = sdk
        self._revision = revision
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Answer]] = {}

    async def open(self) -> None:
        await super().open()
        modules = await asyncio.to_thread(installed, *TYPESCRIPT)
        wanted = {
            "modules": str(modules),
            "sdk": self._sdk,
            "revision": self._revision,
            "url": f"{self.proxy.url}/mcp",
        }
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
        self._write(
            {
                "id": id,
                "call": {
                    "name": order.method,
                    "arguments": order.params,
                    "_meta": {"sender": self.name},
                },
            }
        )

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
                _note_error(answered, message.get("code"), message["error"])
            elif not answered.done():
                answered.set_result(read_answer(message))
