"""Small MCP clients for tests, written from the specification: one over ASGI, one over a pair of
pipes.

`Exchange` is one HTTP request in all its details. `HttpClient` and `LineClient` speak a whole
revision and look the same, so that one test covers both transports:

    async with speak("http", app, R4, capabilities={"roots": {}}, replies={"roots/list": {"roots":
    []}}) as client:
        answer = await client.call("tools/call", {"name": "count"})

`client.heard` has what arrives before an answer; `client.replies` has the answers to requests of
the server. `PATIENCE` bounds every wait.
"""

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias

from tests.rsgi import drive
from wirecall import App
from wirecall.transports.stdio import serve_streams

PATIENCE = 60.0

R1, R2, R3, R4, R5 = REVISIONS = (
    "2024-11-05",
    "2025-03-26",
    "2025-06-18",
    "2025-11-25",
    "2026-07-28",
)
LEGACY = REVISIONS[:4]
TRANSPORTS = ("http", "stdio")
EVERY_WAY = [(transport, revision) for revision in REVISIONS for transport in TRANSPORTS]

PREFIX = "io.modelcontextprotocol/"
KEY = "io.wirecall/idempotency-key"
REPLAYED = "io.wirecall/replayed"

BASIC = {
    "host": "localhost",
    "content-type": "application/json",
    "accept": "application/json, text/event-stream",
}

Json: TypeAlias = dict[str, Any]
Pairs: TypeAlias = Sequence[tuple[str, str]]
Asgi: TypeAlias = Callable[[Any, Any, Any], Coroutine[Any, Any, None]]


# --- messages -------------------------------------------------------------------------------------


def request(method: str, params: Any = None, id: Any = 1) -> Json:
    return {
        "jsonrpc": "2.0",
        "id": id,
        "method": method,
        **({} if params is None else {"params": params}),
    }


def notification(method: str, params: Any = None) -> Json:
    return {"jsonrpc": "2.0", "method": method, **({} if params is None else {"params": params})}


def response(id: Any, result: Any = None) -> Json:
    return {"jsonrpc": "2.0", "id": id, "result": {} if result is None else result}


def envelope(capabilities: Any = None, version: Any = R5, **more: Any) -> Json:
    """`_meta` of a request at 2026-07-28."""
    return {
        f"{PREFIX}protocolVersion": version,
        f"{PREFIX}clientCapabilities": capabilities or {},
        **more,
    }


def enveloped(method: str, params: Any = None, id: Any = 1, **meta: Any) -> Json:
    """A request of 2026-07-28."""
    given = dict(params or {})
    own = given.pop("_meta", {})
    return request(method, {**given, "_meta": {**envelope(**meta), **own}}, id)


def repeated(message: Json, version: str = R5) -> dict[str, str]:
    """The headers that repeat a message of 2026-07-28."""
    told = {"mcp-protocol-version": version, "mcp-method": message["method"]}
    named = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
    member = "taskId" if message["method"].startswith("tasks/") else named.get(message["method"])
    params = message.get("params")
    name = params.get(member or "") if isinstance(params, dict) else None
    return {**told, **({"mcp-name": name} if isinstance(name, str) else {})}


def hello(version: str = R4, capabilities: Any = None, id: Any = 0) -> Json:
    who = {"name": "test", "version": "1"}
    return request(
        "initialize",
        {"protocolVersion": version, "capabilities": capabilities or {}, "clientInfo": who},
        id,
    )


# --- one HTTP request -----------------------------------------------------------------------------


class Event(NamedTuple):
    """One server-sent event; a field that was not sent is None."""

    id: str | None
    kind: str | None
    data: str | None
    retry: str | None


class Exchange:
    """A pending request, and what the server has sent back so far."""

    def __init__(
        self,
        asgi: Asgi,
        method: str,
        headers: Mapping[str, str] | Pairs,
        body: bytes | Iterable[bytes] = b"",
        path: str = "/mcp",
    ) -> None:
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        fields = [
            (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in pairs
        ]
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": fields,
            "query_string": b"",
            "root_path": "",
        }
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.comments: list[str] = []
        self._chunks = [body] if isinstance(body, bytes) else list(body)
        self._left = asyncio.Event()
        self.reads = asyncio.Event()  # cleared: the client does not read
        self.reads.set()
        self.is_full = asyncio.Event()  # the server waits for a client that does not read
        self._started = asyncio.Event()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._text = b""
        self._ended = False
        self.task = asyncio.get_running_loop().create_task(
            drive(asgi, scope, self._receive, self._send)
        )
        self.task.add_done_callback(self._over)

    async def _receive(self) -> Json:
        if self._chunks:
            chunk = self._chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(name.decode(), value.decode()) for name, value in message["headers"]]
            self._started.set()
            return
        if not self.reads.is_set():
            self.is_full.set()
        await self.reads.wait()
        self._parts.put_nowait(message.get("body", b""))
        if not message.get("more_body"):
            self._parts.put_nowait(None)

    def _over(self, _: Any) -> None:
        self._started.set()
        self._parts.put_nowait(None)

    def header(self, name: str) -> str | None:
        return dict(self.headers).get(name)

    async def started(self) -> "Exchange":
        async with asyncio.timeout(PATIENCE):
            await self._started.wait()
        return self

    async def read(self) -> bytes:
        """The rest of the body."""
        parts = [self._text]
        while (part := await self._part()) is not None:
            parts.append(part)
        self._text = b""
        return b"".join(parts)

    async def json(self) -> Any:
        return json.loads(await self.read())

    async def event(self) -> Event | None:
        """The next event; None at the end. Comments are put aside."""
        while True:
            while b"\n\n" not in self._text:
                part = await self._part()
                if part is None:
                    return None
                self._text += part
            block, _, self._text = self._text.partition(b"\n\n")
            lines = [line for line in block.decode().split("\n") if not self._is_comment(line)]
            if lines:
                fields = {
                    name: text.removeprefix(" ")
                    for name, _, text in (line.partition(":") for line in lines)
                }
                return Event(
                    fields.get("id"), fields.get("event"), fields.get("data"), fields.get("retry")
                )

    def _is_comment(self, line: str) -> bool:
        if line.startswith(":"):
            self.comments.append(line)
        return line.startswith(":")

    async def events(self) -> list[Event]:
        found = []
        while (event := await self.event()) is not None:
            found.append(event)
        return found

    async def message(self) -> Any:
        """The next message of the stream; None at its end.

        Events without data are skipped, as clients must.
        """
        while (event := await self.event()) is not None:
            if event.data:
                return json.loads(event.data)
        return None

    async def messages(self) -> list[Any]:
        """All messages there are: of a stream, or of a JSON body."""
        await self.started()
        if self.header("content-type") != "text/event-stream":
            body = await self.read()
            found = json.loads(body) if body else []
            return found if isinstance(found, list) else [found]
        found = []
        while (message := await self.message()) is not None:
            found.append(message)
        return found

    async def _part(self) -> bytes | None:
        if self._ended:
            return None
        async with asyncio.timeout(PATIENCE):
            part = await self._parts.get()
        self._ended = part is None
        return part

    def leave(self) -> None:
        """Disconnect."""
        self._left.set()

    async def close(self) -> None:
        """Disconnect, and wait until the server has noticed."""
        self.leave()
        done, _ = await asyncio.wait([self.task], timeout=1.0)
        if not done:
            self.task.cancel()
            await asyncio.wait([self.task], timeout=PATIENCE)


# --- clients --------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """A client's "no" to a request of the server."""

    code: int
    message: str
    data: Any = None


class Client:
    """The common part of the two transports."""

    def __init__(self, revision: str, capabilities: Any, replies: Mapping[str, Any] | None) -> None:
        self.revision = revision
        self.capabilities = capabilities or {}
        self.replies = dict(replies or {})
        self.heard: list[Json] = []  # notifications and requests of the server, in order
        self.info: Json = {}  # the result of `initialize`
        self._ids = itertools.count(1)

    async def call(
        self,
        method: str,
        params: Any = None,
        *,
        id: Any = None,
        meta: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        raise NotImplementedError

    async def notify(self, method: str, params: Any = None) -> None:
        raise NotImplementedError

    async def result(self, method: str, params: Any = None, **more: Any) -> Json:
        answer = await self.call(method, params, **more)
        assert "result" in answer, answer
        result: Json = answer["result"]
        return result

    async def error(self, method: str, params: Any = None, **more: Any) -> Json:
        answer = await self.call(method, params, **more)
        assert "error" in answer, answer
        error: Json = answer["error"]
        return error

    async def tool(
        self, name: str, arguments: Any = None, *, members: Json | None = None, **more: Any
    ) -> Json:
        given = {} if arguments is None else {"arguments": arguments}
        return await self.result("tools/call", {"name": name, **given, **(members or {})}, **more)

    async def tool_error(
        self, name: str, arguments: Any = None, *, members: Json | None = None, **more: Any
    ) -> Json:
        given = {} if arguments is None else {"arguments": arguments}
        return await self.error("tools/call", {"name": name, **given, **(members or {})}, **more)

    def told(self, method: str) -> list[Json]:
        """The params of the notifications of one kind so far."""
        return [
            message.get("params", {}) for message in self.heard if message.get("method") == method
        ]

    def message(self, method: str, params: Any = None, id: Any = None, meta: Any = None) -> Json:
        """A request in the form of this revision."""
        id = next(self._ids) if id is None else id
        if self.revision == R5:
            return enveloped(
                method, {**(params or {}), "_meta": meta or {}}, id, capabilities=self.capabilities
            )
        if meta is not None:
            params = {**(params or {}), "_meta": meta}
        return request(method, params, id)

    def reply(self, asked: Json) -> Json:
        wanted = self.replies[asked["method"]]
        value = wanted(asked.get("params", {})) if callable(wanted) else wanted
        if isinstance(value, Refusal):
            told = {name: member for name, member in value._asdict().items() if member is not None}
            return {"jsonrpc": "2.0", "id": asked["id"], "error": told}
        return response(asked["id"], value)


class HttpClient(Client):
    def __init__(
        self,
        asgi: Asgi,
        revision: str,
        capabilities: Any = None,
        replies: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(revision, capabilities, replies)
        self.asgi = asgi
        self.session: str | None = None
        self.last: Exchange | None = None  # the exchange of the last `call`
        self._own = dict(headers or {})
        self._exchanges: list[Exchange] = []

    async def open(self) -> None:
        if self.revision == R5:
            return
        answered = await self.post(hello(self.revision, self.capabilities)).started()
        self.session = answered.header("mcp-session-id")
        self.info = (await answered.json())["result"]
        await self.notify("notifications/initialized")

    def headers(self, message: Any = None) -> dict[str, str]:
        """Return the headers that a client of this revision sends with a message."""
        told = {**BASIC, **self._own}
        if self.revision == R5:
            is_request = isinstance(message, dict) and "method" in message
            return {**told, **(repeated(message) if is_request else {"mcp-protocol-version": R5})}
        if self.session is not None:
            told["mcp-session-id"] = self.session
            if self.revision in (R3, R4):
                told["mcp-protocol-version"] = self.revision
        return told

    def post(self, message: Any, headers: Mapping[str, str] | Pairs | None = None) -> Exchange:
        """A POST of any message, or of bytes, with the usual headers or with those given."""
        body = message if isinstance(message, bytes) else json.dumps(message).encode()
        return self.exchange("POST", self.headers(message) if headers is None else headers, body)

    def exchange(
        self, method: str, headers: Mapping[str, str] | Pairs | None = None, body: Any = b""
    ) -> Exchange:
        exchange = Exchange(self.asgi, method, self.headers() if headers is None else headers, body)
        self._exchanges.append(exchange)
        return exchange

    def listen(self, last_event: str | None = None) -> Exchange:
        """The GET stream."""
        more = {} if last_event is None else {"last-event-id": last_event}
        return self.exchange("GET", {**self.headers(), "accept": "text/event-stream", **more})

    async def call(
        self,
        method: str,
        params: Any = None,
        *,
        id: Any = None,
        meta: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        message = self.message(method, params, id, meta)
        self.last = await self.post(message, {**self.headers(message), **(headers or {})}).started()
        if self.last.header("content-type") != "text/event-stream":
            answer: Json = await self.last.json()
            return answer
        while (found := await self.last.message()) is not None:
            if "method" not in found:
                final: Json = found
                return final
            self.heard.append(found)
            if "id" in found:
                taken = await self.post(self.reply(found)).started()
                assert taken.status == 202, await taken.read()
        raise AssertionError("the stream ended without an answer")

    async def notify(self, method: str, params: Any = None) -> None:
        taken = await self.post(notification(method, params)).started()
        assert (taken.status, await taken.read()) == (202, b"")

    async def close(self) -> None:
        for exchange in self._exchanges:
            await exchange.close()


class LineClient(Client):
    def __init__(
        self,
        app: App,
        revision: str,
        capabilities: Any = None,
        replies: Mapping[str, Any] | None = None,
        grace: float = 5.0,
    ) -> None:
        super().__init__(revision, capabilities, replies)
        self._app = app
        self._grace = grace
        self._waiting: dict[str, asyncio.Future[Json]] = {}
        # Lines that answer no `call`, arrays among them.
        self.unasked: asyncio.Queue[Any] = asyncio.Queue()
        self.news: asyncio.Queue[Json] = asyncio.Queue()  # the same messages, as a queue to wait on

    async def open(self, *, handshake: bool = True) -> None:
        reader, self._stdin = os.pipe()
        self._stdout, writer = os.pipe()
        self._fds = [reader, writer]
        stream = asyncio.StreamReader(limit=1 << 24)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(self._stdout, "rb", 0)
        )
        serving = serve_streams(
            self._app._connect, reader, writer, grace=self._grace, limits=self._app.limits
        )
        self.server = loop.create_task(serving)
        self._reading = loop.create_task(self._read(stream))
        if handshake and self.revision != R5:
            self.info = (await self.exchange(hello(self.revision, self.capabilities)))["result"]
            self.write(notification("notifications/initialized"))

    def write(self, message: Any) -> None:
        """Write one line."""
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        os.write(self._stdin, data + b"\n")

    async def exchange(self, message: Json) -> Json:
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._waiting[json.dumps(message["id"])] = answer
        self.write(message)
        async with asyncio.timeout(PATIENCE):
            return await answer

    async def line(self) -> Any:
        """The next line that answers no `call`."""
        async with asyncio.timeout(PATIENCE):
            return await self.unasked.get()

    async def hear(self) -> Json:
        """The next notification or request of the server."""
        async with asyncio.timeout(PATIENCE):
            return await self.news.get()

    async def call(
        self,
        method: str,
        params: Any = None,
        *,
        id: Any = None,
        meta: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        assert not headers, "lines have no headers"
        return await self.exchange(self.message(method, params, id, meta))

    async def notify(self, method: str, params: Any = None) -> None:
        self.write(notification(method, params))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            message = json.loads(line)
            if isinstance(message, list):
                self.unasked.put_nowait(message)
            elif "method" in message:
                self._hear(message)
            else:
                waiting = self._waiting.pop(json.dumps(message.get("id")), None)
                if waiting is None:
                    self.unasked.put_nowait(message)
                else:
                    waiting.set_result(message)

    def _hear(self, message: Json) -> None:
        self.heard.append(message)
        self.news.put_nowait(message)
        if "id" in message and message["method"] in self.replies:
            self.write(self.reply(message))

    def hang_up(self) -> None:
        """Close stdin."""
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    async def end(self) -> None:
        """Close stdin, and read all that the server writes until it ends."""
        self.hang_up()
        done, _ = await asyncio.wait([self.server], timeout=PATIENCE)
        assert done, "the server did not end"
        while self._fds:
            os.close(self._fds.pop())
        async with asyncio.timeout(PATIENCE):
            await self._reading
        self.server.result()

    async def close(self) -> None:
        try:
            await self.end()
        finally:
            self._transport.close()


@asynccontextmanager
async def speak(
    transport: str,
    app: App,
    revision: str,
    capabilities: Any = None,
    replies: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[Any]:
    """Yield a client of a revision after its handshake, and close the app at the end."""
    client: HttpClient | LineClient
    if transport == "http":
        client = HttpClient(app.asgi(), revision, capabilities, replies, headers)
    else:
        client = LineClient(app, revision, capabilities, replies)
    try:
        await client.open()
        yield client
    finally:
        await client.close()
        await app.aclose(1.0)


@asynccontextmanager
async def over_http(app: App, revision: str = R5, **more: Any) -> AsyncIterator[HttpClient]:
    async with speak("http", app, revision, **more) as client:
        assert isinstance(client, HttpClient)
        yield client


@asynccontextmanager
async def over_stdio(app: App, revision: str = R5, **more: Any) -> AsyncIterator[LineClient]:
    async with speak("stdio", app, revision, **more) as client:
        assert isinstance(client, LineClient)
        yield client
