"""The servers of bench/gateway.py: a shop, the bare relays in front of it, and FastMCP's proxy.

A bare relay does what no relay can save. It takes a body, passes it on, and passes the answer back.
It knows where the id stands in the messages of the bench, so it parses nothing.

    granian --interface rsgi bench.servers.relay:to_http     UPSTREAM is the address of the shop
    granian --interface rsgi bench.servers.relay:to_stdio
    python -m bench.servers.relay pipe                       between stdin and stdout and the shop
    python -m bench.servers.relay fastmcp PORT               UPSTREAM, or the shop on stdio
"""

import asyncio
import json
import os
import sys
from asyncio import subprocess
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from wirecall import App

# The command line of the shop on stdio.
CHILD: list[str] = json.loads(os.environ.get("BENCH_CHILD", "[]"))
# How each message of the bench, and each answer of the shop, begins.
HEAD = b'{"jsonrpc":"2.0","id":'


async def price(sku: str) -> int:
    """The price of an article."""
    return len(sku)


async def buy(sku: str) -> int:
    """Order an article."""
    return len(sku)


# A server that keeps no records, as most do.
shop = App("shop", version="1.0", mode="production", ledger="memory:")
shop.query(price)
shop.command(key="off", destructive=False)(buy)

# Our own server with a ledger: what a record adds to its own command.
recorded = App(
    "shop",
    version="1.0",
    mode="production",
    ledger=os.environ.get("BENCH_LEDGER", "memory:"),
    single_user=True,
)
recorded.query(price)
recorded.command(key="auto", destructive=False)(buy)


# Many tools, from a number to a number.
shelf = App("shelf", version="1.0", mode="production", ledger="memory:")
first, _, end = os.environ.get("BENCH_SHELF", "0-0").partition("-")
for nth in range(int(first), int(end)):
    shelf.query(name=f"price_{nth}")(price)


# --- bare relays ----------------------------------------------------------------------------------


class ToHttp:
    """Passes bodies on to a server over HTTP."""

    def __init__(self) -> None:
        self._http: Any = None

    async def __rsgi__(self, scope: Any, protocol: Any) -> None:
        if self._http is None:
            import aiohttp

            self._http = aiohttp.ClientSession(auto_decompress=False)
        body = await protocol()
        headers = {
            name: value
            for name, value in scope.headers.items()
            if name not in ("host", "content-length")
        }
        async with self._http.post(os.environ["UPSTREAM"], data=body, headers=headers) as answer:
            found = await answer.read()
        protocol.response_bytes(200, [("content-type", "application/json")], found)


class ToStdio:
    """Passes bodies on to a child, each under another id."""

    def __init__(self) -> None:
        self._ids = count(1)
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._opening: asyncio.Task[None] | None = None
        self._child: Any = None

    async def _open(self) -> None:
        self._child = await asyncio.create_subprocess_exec(
            *CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 20
        )
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while line := await self._child.stdout.readline():
            id, _, rest = line[len(HEAD) :].partition(b",")
            self._waiting.pop(id).set_result(rest)

    async def __rsgi__(self, scope: Any, protocol: Any) -> None:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        if self._child is None:
            await self._opening
        body = await protocol()
        theirs, _, rest = body[len(HEAD) :].partition(b",")
        id = b"%d" % next(self._ids)
        answered = self._waiting[id] = asyncio.get_running_loop().create_future()
        self._child.stdin.write(HEAD + id + b"," + rest + b"\n")
        found = HEAD + theirs + b"," + await answered
        protocol.response_bytes(200, [("content-type", "application/json")], found)


class Passing(asyncio.Protocol):
    """Passes bytes on as they come."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set_result(None)


async def on_pipe() -> None:
    """Pass bytes on between stdin and stdout and a child, until stdin ends."""
    ours, its = os.pipe()
    child = await asyncio.create_subprocess_exec(*CHILD, stdin=subprocess.PIPE, stdout=its)
    os.close(its)
    assert child.stdin is not None
    asked = Passing(child.stdin.write)
    answered = Passing(partial(os.write, 1))
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: answered, os.fdopen(ours, "rb", 0))
    await loop.connect_read_pipe(lambda: asked, sys.stdin)
    await asked.over
    child.stdin.close()
    await child.wait()


def pipe() -> None:
    import uvloop

    uvloop.run(on_pipe())


to_http = ToHttp()
to_stdio = ToStdio()


# --- others ---------------------------------------------------------------------------------------


def fastmcp(port: int) -> None:
    import logging

    from fastmcp.server import create_proxy

    logging.disable(logging.INFO)
    target: Any = os.environ.get("UPSTREAM")
    if target is None:
        stdio = {"command": CHILD[0], "args": CHILD[1:], "transport": "stdio"}
        target = {"mcpServers": {"shop": stdio}}
    server: Any = create_proxy(target)
    more = {"json_response": True, "stateless_http": True, "uvicorn_config": {"log_level": "error"}}
    server.run("http", host="127.0.0.1", port=port, path="/mcp", show_banner=False, **more)


if __name__ == "__main__":
    if sys.argv[1] == "pipe":
        pipe()
    else:
        fastmcp(int(sys.argv[2]))
