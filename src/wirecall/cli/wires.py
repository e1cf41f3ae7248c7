"""Raw messages to a server, and everything that comes back: for `wirecall probe`.

A wire sends one message and returns a `Reply`: every JSON document that came for it, in order, and every text that is not
JSON. It does not judge them. A wire to a process or an app is a new conversation; one to an address is stateless.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from wirecall.app import App
from wirecall.cli.targets import Target
from wirecall.client.links import MemoryPipe
from wirecall.errors import CallFailed
from wirecall.protocol.messages import JsonObject, encode
from wirecall.transports.child import Child
from wirecall.transports.http_client import HttpClient

JSON, EVENTS = "application/json", "text/event-stream"
SHOWN = 80  # characters of noise that are quoted
NOISE = 5  # lines of noise that are kept
ROOM = 16 << 20  # bytes of lines for one message; everything beyond them is dropped
COST = 200  # bytes that a line takes besides its own


class Reply(Struct):
    """Everything that came for one message."""

    documents: list[Any] = []
    noise: list[str] = []
    status: int | None = None  # of HTTP
    media: str = ""
    headers: Mapping[str, str] = {}
    is_silent: bool = False  # an answer was due and did not come in time

    def is_echo(self, message: object) -> bool:
        """Return whether the message itself came back. A notification may: a server can pass it on to all clients."""
        return bool(ids_of(message)) and message in self.documents

    def take(self, text: bytes) -> object:
        """Add a document, or noise."""
        try:
            document = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if len(self.noise) < NOISE:
                self.noise.append(text[:SHOWN].decode("utf-8", "replace"))
            return None
        self.documents.append(document)
        return document


class RawWire(Protocol):
    """A way to a server."""

    is_http: bool

    @property
    def said(self) -> str:
        """The last text that the server printed on stderr, if it is known."""
        ...

    async def open(self) -> None: ...
    async def send(self, message: object, headers: Mapping[str, str], patience: float) -> Reply:
        """Send a message (bytes unchanged) and return its reply. A server that cannot be reached raises `CallFailed`."""
        ...

    async def aclose(self) -> None: ...


def wire_to(target: Target, path: str, headers: Mapping[str, str], app: App | None) -> RawWire:
    """Return a new wire. `path` is for addresses that have none."""
    if target.kind == "url":
        has_path = "/" in target.text.partition("://")[2].rstrip("/")
        return HttpWire(target.text if has_path else f"{target.text.rstrip('/')}{path}", headers)
    if target.kind == "command":
        return LineWire(lambda: Child(target.command, stderr="keep"))
    assert app is not None
    return LineWire(lambda: MemoryPipe(app._connect))


def ids_of(message: object) -> list[Any]:
    """Return the ids that answers are due for; [None] for bytes that are not JSON."""
    if isinstance(message, bytes):
        return [None]
    entries = message if isinstance(message, list) else [message]
    owed = [entry["id"] for entry in entries if isinstance(entry, dict) and "id" in entry]
    return owed or ([None] if message == [] else [])


def answers(document: object) -> list[JsonObject]:
    """Return the answers in a document, which is an answer itself, or an array of them."""
    entries = document if isinstance(document, list) else [document]
    return [entry for entry in entries if isinstance(entry, dict) and "method" not in entry]


def _is_answer(document: object, ids: list[Any]) -> bool:
    return any(entry.get("id") in ids or entry.get("id") is None for entry in answers(document))


class HttpWire:
    """POSTs to one address."""

    is_http = True
    said = ""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._http = HttpClient(url, headers=headers)

    async def open(self) -> None:
        await self._http.open()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def send(self, message: object, headers: Mapping[str, str], patience: float) -> Reply:
        body = message if isinstance(message, bytes) else encode(message)
        headers = {"Content-Type": JSON, "Accept": f"{JSON}, {EVENTS}", **headers}
        reply, ids = Reply(), ids_of(message)
        try:
            async with asyncio.timeout(patience), self._http.request("POST", body, headers) as answer:
                reply.status, reply.media, reply.headers = answer.status, answer.media, dict(answer.headers)
                if answer.media == EVENTS:
                    async for event in answer.events():
                        if event.data and _is_answer(reply.take(event.data.encode()), ids):
                            break
                elif (text := await answer.read()).strip():
                    reply.take(text)
        except TimeoutError:
            reply.is_silent = True
        return reply


class LineWire:
    """Lines to a process, or to an app in this one."""

    is_http = False

    def __init__(self, make: Callable[[], Child | MemoryPipe]) -> None:
        self._pipe = make()
        self._lines: asyncio.Queue[bytes | CallFailed] = asyncio.Queue()
        self._room = ROOM

    async def open(self) -> None:
        def hear(line: bytes) -> None:
            if self._room > 0:
                self._room -= len(line) + COST
                self._lines.put_nowait(line)

        await self._pipe.open(hear, self._lines.put_nowait)

    @property
    def said(self) -> str:
        return self._pipe.said if isinstance(self._pipe, Child) else ""

    async def aclose(self) -> None:
        await self._pipe.aclose()

    async def send(self, message: object, headers: Mapping[str, str], patience: float) -> Reply:
        reply, ids = Reply(), ids_of(message)
        self._room = ROOM
        await self._pipe.write(message if isinstance(message, bytes) else encode(message))
        try:
            async with asyncio.timeout(patience):
                while ids:
                    line = await self._lines.get()
                    if isinstance(line, CallFailed):
                        self._lines.put_nowait(line)  # the pipe is closed: the next message fails the same way
                        raise line
                    document = reply.take(line) if line.strip() else None
                    if _is_answer(document, ids) or document == message:  # an echo is not an answer, but ends the wait
                        break
        except TimeoutError:
            reply.is_silent = True
        return reply
