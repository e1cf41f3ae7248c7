"""A demo of wirecall in a few seconds: `make demo`.

It runs a server process, a client, a connection that is cut in the middle, and two MCP sessions over the loopback. It checks
every answer and ends with exit code 1 if one of them is wrong.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from wirecall import connect

SHOP = Path(__file__).parent / "shop.py"
COLOUR = (sys.stdout.isatty() and "NO_COLOR" not in os.environ) or "FORCE_COLOR" in os.environ


class Demo:
    """Prints each step and counts the wrong answers."""

    def __init__(self) -> None:
        self.failed = 0

    def title(self, text: str) -> None:
        print(f"\n{paint('1', text)}")

    def show(self, what: str, got: Any, expected: Any, note: str = "") -> None:
        good = got == expected
        self.failed += not good
        print(f"  {paint('36', what)}  {paint('32' if good else '31', str(got))}{note and '  ' + paint('33', note)}")
        if not good:
            print(paint("31", f"    expected {expected}"))


def paint(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if COLOUR else text


# --- a server, and a bad connection to it ----------------------------------------------------------------------------


@contextmanager
def server(ledger: str) -> Iterator[int]:
    """Run `wirecall serve examples/shop.py`, and yield its port."""
    command = [sys.executable, "-m", "wirecall", "serve", str(SHOP), "--http", "127.0.0.1:0", "--ledger", ledger]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        print(f"  {paint('36', '$ wirecall serve examples/shop.py --ledger sqlite:...')}  {line.strip()}")
        yield int(line.strip().rpartition(":")[2])
    finally:
        process.terminate()
        process.wait(15)
        process.stderr.close()


@asynccontextmanager
async def cutting(port: int, cuts: int) -> AsyncIterator[int]:
    """Run a proxy in front of the server. It forwards requests, and cuts the connection when the first answers come back."""
    left = cuts
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        there, to = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.create_task(pump(reader, to))
        try:
            while data := await there.read(65536):
                if left and b'"paid":500' in data:
                    left -= 1
                    break
                writer.write(data)
        finally:
            sending.cancel()
            writer.close()
            to.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(serve(reader, writer)))

    proxy = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with proxy:
        yield proxy.sockets[0].getsockname()[1]
        for connection in connections:  # since Python 3.12 the end of the block waits for them
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)


# --- the steps -------------------------------------------------------------------------------------------------------


async def show_batch(demo: Demo, port: int) -> None:
    demo.title("Many calls in one message, each with its own outcome")
    async with connect(f"http://127.0.0.1:{port}/rpc") as client:
        async with client.batch() as batch:
            tea = batch.call("price", {"sku": "tea"})
            milk = batch.call("price", {"sku": "milk"})
            paid = batch.call("charge", {"order": "6", "cents": 450})
        demo.show("price tea   ", tea.result(), 450)
        demo.show("price milk  ", str(milk.error), "there is no article 'milk' (4040): {'articles': ['coffee', 'tea']}")
        demo.show("charge      ", paid.result(), {"order": "6", "paid": 450})
        demo.show("sent as     ", batch.wire, "array")


async def show_cut(demo: Demo, port: int) -> None:
    demo.title("The connection is cut after the charge: the client repeats it, and it is charged once")
    async with cutting(port, cuts=2) as proxy, connect(f"http://127.0.0.1:{proxy}/rpc") as client:
        async with client.batch() as batch:
            charge = batch.call("charge", {"order": "7", "cents": 500})
        note = f"after {charge.attempts} attempts, replayed from the ledger" if charge.replayed else "not replayed"
        demo.show("charge      ", charge.result(), {"order": "7", "paid": 500}, note)
        demo.show("replayed    ", charge.replayed, True)


def show_ledger(demo: Demo, ledger: str) -> None:
    demo.title("The ledger knows what was done")
    command = [sys.executable, "-m", "wirecall", "ledger", "list", ledger]
    table = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in table.stdout.splitlines():
        print(f"  {line}")
    demo.show("records     ", table.stdout.count("charge"), 2)


async def show_mcp(demo: Demo, port: int) -> None:
    demo.title("The same server for MCP clients, old and new: an array where the revision has it")
    for revision, wire in (("2025-03-26", "array"), ("2026-07-28", "singles")):
        async with connect(f"http://127.0.0.1:{port}/mcp", protocol="mcp", revision=revision) as client:
            tools = {tool.name: tool for tool in await client.list_tools()}
            async with client.batch() as batch:
                calls = [batch.call_tool("price", {"sku": sku}) for sku in ("tea", "coffee")]
            demo.show(f"MCP {client.revision}", sorted(tools), ["charge", "price", "refund"])
            demo.show("  two calls as", batch.wire, wire)
            demo.show("  prices      ", [call.result().text for call in calls], ["450", "700"])


async def show_all(demo: Demo, ledger: str) -> None:
    with server(ledger) as port:
        await show_batch(demo, port)
        await show_cut(demo, port)
        show_ledger(demo, ledger)
        await show_mcp(demo, port)


def main() -> int:
    demo = Demo()
    demo.title("A server: its methods are JSON-RPC and MCP tools at once")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(show_all(demo, f"sqlite:{Path(folder) / 'ledger.db'}"))
    verdict = ("31", f"{demo.failed} answers were wrong") if demo.failed else ("32", "all answers as they should be")
    print(f"\n{paint(*verdict)}")
    return 1 if demo.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
