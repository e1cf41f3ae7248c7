"""Raw messages to a server, and whatever comes back: for verbs that look at how a server behaves.

A wire sends one message and gives a `Reply`: every JSON document that came for it, in order, and what came that is not JSON.
Nothing is judged here. A wire to a process or an app is a new conversation; one to an address is stateless.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from wirecall import App
from wirecall.cli.targets import Target
from wirecall.errors import CallFailed
from wirecall.protocol.messages import encode
from wirecall.transports.child import Child
from wirecall.transports.http_client import HttpAnswer, HttpClient
from wirecall.transports.memory import MemoryPipe

JSON, EVENTS = "application/json", "text/event-stream"
SHOWN = 80  # characters of noise that are quoted
NOISE = 5  # lines of it that are kept
ROOM = 16 << 20  # bytes of lines for one message; what a server says beyond them is dropped
COST = 200  # bytes that a line takes besides its own


class Reply(Struct):
    """What came for a message."""

    documents: list[Any] = []
    noise: list[str] = []
    status: int | None = None  # of HTTP
    media: str = ""
    headers: Mapping[str, str] = {}
    is_silent: bool = False  # an answer was owed, and none came in time

    def is_echo(self, message: Any) -> bool:
        """Whether what came is the message itself. One that is owed no answer may be told to others, and to us."""
        return bool(ids_of(message)) and message in self.documents

    def take(self, text: bytes) -> Any:
        """One document more, or noise."""
        try:
            document = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            if len(self.noise) < NOISE:
                self.noise.append(text[:SHOWN].decode("utf-8", "replace"))
            return None
        self.documents.append(document)
        return document


class Wire(Protocol):
    """A way to a server."""

    is_http: bool

    @property
    def said(self) -> str:
        """What it told people, as far as that can be known."""
        ...

    async def open(self) -> None: ...
    async def send(self, message: Any, headers: Mapping[str, str], patience: float) -> Reply:
        """A message (bytes go as they are) and what comes for it. Who cannot be reached raises `CallFailed`."""
        ...

    async def aclose(self) -> None: ...


def wire_to(target: Target, path: str, headers: Mapping[str, str], app: App | None) -> Wire:
    """A new wire. `path` is for addresses that have none."""
    if target.kind == "url":
        has_path = "/" in target.text.partition("://")[2].rstrip("/")
        return HttpWire(target.text if has_path else f"{target.text.rstrip('/')}{path}", headers)
    if target.kind == "command":
        return LineWire(lambda: Child(target.command, stderr="keep"))
    assert app is not None
    return LineWire(lambda: MemoryPipe(app._connect))


def ids_of(message: Any) -> list[Any]:
    """The ids that answers are owed for. Of bytes that are not JSON it is null."""
    if isinstance(message, bytes):
        return [None]
    entries = message if isinstance(message, list) else [message]
    owed = [entry["id"] for entry in entries if "id" in entry]
    return owed or ([None] if message == [] else [])


def answers(document: Any) -> list[dict[str, Any]]:
    """The answers in a document, which is one itself, or an array of them."""
    entries = document if isinstance(document, list) else [document]
    return [entry for entry in entries if isinstance(entry, dict) and "method" not in entry]


def _is_answer(document: Any, ids: list[Any]) -> bool:
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

    async def send(self, message: Any, headers: Mapping[str, str], patience: float) -> Reply:
        body = message if isinstance(message, bytes) else encode(message)
        told = {"Content-Type": JSON, "Accept": f"{JSON}, {EVENTS}", **headers}
        reply = Reply()
        try:
            async with asyncio.timeout(patience), self._http.request("POST", body, told) as answer:
                reply.status, reply.media, reply.headers = answer.status, answer.media, dict(answer.headers)
                await self._read(answer, reply, ids_of(message))
        except TimeoutError:
            reply.is_silent = True
        return reply

    async def _read(self, answer: HttpAnswer, reply: Reply, ids: list[Any]) -> None:
        if answer.media != EVENTS:
            body = await answer.read()
            if body.strip():
                reply.take(body)
            return
        async for event in answer.events():
            if event.data and _is_answer(reply.take(event.data.encode()), ids):
                return


class LineWire:
    """Lines to a process, or to an app in this one."""

    is_http = False

    def __init__(self, make: Callable[[], Child | MemoryPipe]) -> None:
        self._pipe = make()
        self._lines: asyncio.Queue[bytes | CallFailed] = asyncio.Queue()
        self._room = ROOM

    async def open(self) -> None:
        await self._pipe.open(self._hear, self._lines.put_nowait)

    def _hear(self, line: bytes) -> None:
        if self._room > 0:
            self._room -= len(line) + COST
            self._lines.put_nowait(line)

    @property
    def said(self) -> str:
        return self._pipe.said if isinstance(self._pipe, Child) else ""

    async def aclose(self) -> None:
        await self._pipe.aclose()

    async def send(self, message: Any, headers: Mapping[str, str], patience: float) -> Reply:
        reply, ids = Reply(), ids_of(message)
        self._room = ROOM
        await self._pipe.write(message if isinstance(message, bytes) else encode(message))
        try:
            async with asyncio.timeout(patience):
                while ids:
                    line = await self._lines.get()
                    if isinstance(line, CallFailed):
                        self._lines.put_nowait(line)  # it will say no more, whoever asks
                        raise line
                    document = reply.take(line) if line.strip() else None
                    if _is_answer(document, ids) or document == message:  # what is sent back answers nothing, and ends it
                        break
        except TimeoutError:
            reply.is_silent = True
        return reply
