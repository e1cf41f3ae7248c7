"""Clients of `wrap`: in memory in front of a real child, and as a separate process."""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from wirecall.gateway.pipe import PipeFront, Wrap
from wirecall.gateway.upstream import Origin
from wirecall.mcp.revisions import NAMES
from wirecall.protocol.receipt import Receipt

PATIENCE = 60.0
ROOT = Path(__file__).parents[2]


def counter(file: Path) -> list[str]:
    """The command line of the server that counts its effects."""
    return [sys.executable, str(Path(__file__).with_name("server.py")), str(file)]


def effects(file: Path, name: str = "pay") -> int:
    """How often the server has acted."""
    if not file.exists():
        return 0
    return sum(line.startswith(name) for line in file.read_text().splitlines())


def introduction(revision: str = "2025-11-25") -> dict[str, Any]:
    client = {"name": "test", "version": "1"}
    return {"protocolVersion": revision, "capabilities": {"roots": {}}, "clientInfo": client}


def message_of(method: str, params: Any = None, id: Any = None) -> bytes:
    """A request, or a notification without an id. Params may be bytes."""
    head = {"jsonrpc": "2.0", "method": method}
    if id is not None:
        head["id"] = id
    text = json.dumps(head).encode()
    if params is None:
        return text
    written = params if isinstance(params, bytes) else json.dumps(params).encode()
    return text[:-1] + b', "params": ' + written + b"}"


def enveloped(params: dict[str, Any]) -> dict[str, Any]:
    """Params with the envelope of the newest revision."""
    prefix = "io.modelcontextprotocol/"
    meta = {f"{prefix}protocolVersion": NAMES[-1], f"{prefix}clientCapabilities": {}}
    return {**params, "_meta": {**meta, **params.get("_meta", {})}}


class Client:
    """A client in memory, at the end of one pipe."""

    def __init__(self, wrap: Wrap, link: str = "pipe of one") -> None:
        self._ids = itertools.count(1)
        self.heard: list[Any] = []
        self._news = asyncio.Event()
        self.front: PipeFront = wrap.connect(self._hear, link)

    async def _hear(self, line: bytes) -> None:
        self.heard.append(json.loads(line))
        self._news.set()

    async def hears(self, method: str) -> Any:
        """The next message of the server that names a method."""
        async with asyncio.timeout(PATIENCE):
            while True:
                for message in self.heard:
                    if message.get("method") == method:
                        self.heard.remove(message)
                        return message
                self._news.clear()
                await self._news.wait()

    async def line(self, line: bytes, *, lose: bool = False) -> bytes | None:
        """Send a line; return its answer, which does not arrive if it is lost."""
        receipt = Receipt(session=self)
        reply = self.front.handle(line, receipt)
        if reply is not None and not isinstance(reply, bytes):
            async with asyncio.timeout(PATIENCE):
                reply = await reply
        if lose or reply is None:
            receipt.lost()
        else:
            receipt.written()
        return reply

    async def ask(
        self, method: str, params: Any = None, *, id: Any = None, lose: bool = False
    ) -> Any:
        """Send a request; return the answer."""
        number = next(self._ids) if id is None else id
        reply = await self.line(message_of(method, params, number), lose=lose)
        if reply is None:
            return None
        answer = json.loads(reply)
        assert answer["id"] == number
        return answer

    async def pay(self, *, lose: bool = False, id: Any = None, **arguments: Any) -> Any:
        params = {"name": "pay", "arguments": arguments}
        return await self.ask("tools/call", params, lose=lose, id=id)

    async def pid(self) -> int:
        answer = await self.ask("tools/call", {"name": "look"})
        return int(answer["result"]["pid"])

    async def tell(self, method: str, params: Any = None) -> None:
        assert await self.line(message_of(method, params)) is None

    async def greet(self, revision: str = "2025-11-25") -> Any:
        answer = await self.ask("initialize", introduction(revision))
        await self.tell("notifications/initialized")
        return answer


def origin(file: Path, **options: Any) -> Origin:
    return Origin(**{"name": "bank", "command": counter(file), **options})


@asynccontextmanager
async def wrapped(
    file: Path, *, ledger: str = "memory:", revision: str | None = "2025-11-25", **options: Any
) -> AsyncIterator[Client]:
    """A client in front of the server that counts, greeted unless `revision` is None."""
    wrap = Wrap(origin(file, **options), ledger=ledger)
    client = Client(wrap)
    try:
        if revision is not None:
            await client.greet(revision)
        yield client
    finally:
        await client.front.aclose()
        await wrap.aclose(1.0)


class Process:
    """`wirecall wrap` as a separate process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._ids = itertools.count(1)

    async def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        await self.process.stdin.drain()

    async def line(self) -> bytes:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            return (await self.process.stdout.readline()).rstrip(b"\n")

    async def ask(self, method: str, params: Any = None) -> Any:
        id = next(self._ids)
        await self.send(message_of(method, params, id))
        while True:
            answer = json.loads(await self.line())
            if answer.get("id") == id and "method" not in answer:
                return answer

    async def greet(self, revision: str = "2025-11-25") -> Any:
        answer = await self.ask("initialize", introduction(revision))
        await self.send(message_of("notifications/initialized"))
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()


@asynccontextmanager
async def started(
    *words: str, env: dict[str, str] | None = None, cwd: Path = ROOT
) -> AsyncIterator[Process]:
    """A process of a command line with pipes."""
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        limit=32 << 20,
    )
    talk = Process(process)
    try:
        yield talk
    finally:
        if process.returncode is None:
            talk.close()
            try:
                async with asyncio.timeout(PATIENCE):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()


def wrap_words(*words: str) -> list[str]:
    return [sys.executable, "-m", "wirecall", "wrap", *words]
