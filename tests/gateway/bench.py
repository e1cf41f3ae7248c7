"""A gateway in front of servers that count, and a clock that a test moves."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.client.peers import served
from tests.gateway.fronts import counter
from wirecall import connect
from wirecall.gateway import Gateway, GatewaySettings, UpstreamSettings
from wirecall.gateway.upstream import REAL

BOTH = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


def newest(folder: Path, name: str = "new", **own: Any) -> UpstreamSettings:
    """A server of 2026-07-28 alone, which counts and asks."""
    return UpstreamSettings(name, command=[*counter(folder / name), "newest"], **own)


class Bench:
    """A gateway in front of servers that count, over HTTP."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        names = options.pop("names", ("bank", "shop"))
        own = options.pop("own", {})
        upstreams = [
            UpstreamSettings(name, command=counter(self.file(name)), **own.get(name, {}))
            for name in names
        ]
        upstreams += options.pop("more", [])
        ledger = options.pop("ledger", f"sqlite:{folder / 'ledger.db'}")
        clock = options.pop("clock", REAL)
        if options.pop("prefixes", False):
            options["names"] = "prefix"
        settings = GatewaySettings(upstreams, ledger=ledger, **options)
        self.gateway = Gateway(settings, clock=clock)
        self.url = ""

    def file(self, name: str) -> Path:
        return self.folder / name

    @asynccontextmanager
    async def serving(self) -> "AsyncIterator[Bench]":
        async with served(self.gateway) as self.url:
            yield self

    def client(self, path: str = "/mcp", **options: Any) -> Any:
        return connect(f"{self.url}{path}", protocol="mcp", **options)

    async def post(
        self, path: str, message: bytes, session: str | None = None
    ) -> tuple[Any, str | None]:
        """Send a message over HTTP; return the answer and the session."""
        headers = dict(BOTH)
        if session is not None:
            headers["Mcp-Session-Id"] = session
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.url}{path}", data=message, headers=headers) as answer,
        ):
            body = await answer.read()
            return (json.loads(body) if body else None), answer.headers.get("Mcp-Session-Id")

    async def stream(self, path: str, message: bytes, session: str | None) -> list[Any]:
        """Send a message over HTTP; return the messages of its stream, the answer last."""
        headers = dict(BOTH)
        if session is not None:
            headers["Mcp-Session-Id"] = session
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.url}{path}", data=message, headers=headers) as answer,
        ):
            lines = (await answer.read()).splitlines()
        return [
            json.loads(line.removeprefix(b"data: "))
            for line in lines
            if line.startswith((b"data: {", b"{"))
        ]


class Held:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        # The times until which tasks sleep, and what wakes them.
        self.sleeping: list[tuple[float, asyncio.Future[None]]] = []

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        awake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sleeping.append((until, awake))
        await awake

    def move(self, seconds: float) -> None:
        """Move the time, and wake those that sleep until then."""
        self.now += seconds
        due = [each for each in self.sleeping if each[0] <= self.now]
        for each in due:
            self.sleeping.remove(each)
            if not each[1].done():
                each[1].set_result(None)
