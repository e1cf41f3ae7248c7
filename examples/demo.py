"""A demo of wirecall in a few seconds: `make demo`.

It runs three servers, foreign clients, a wirecall client, connections that break in the middle, MCP
sessions over the loopback, and a server without wirecall behind `wirecall wrap`. It checks every
answer and ends with exit code 1 if one of them is wrong.
"""

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from wirecall import connect

EXAMPLES = Path(__file__).parent
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
        print(
            f"  {paint('36', what)}  "
            f"{paint('32' if good else '31', str(got))}{note and '  ' + paint('33', note)}"
        )
        if not good:
            print(paint("31", f"    expected {expected}"))

    def explain(self, text: str) -> None:
        print(f"  {paint('33', text)}")


def paint(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if COLOUR else text


# --- a server, and a bad connection to it ---------------------------------------------------------


@contextmanager
def server(example: str, ledger: str) -> Iterator[int]:
    """Run `wirecall serve` with an example, and yield its port."""
    app = str(EXAMPLES / example)
    command = [
        sys.executable,
        "-m",
        "wirecall",
        "serve",
        app,
        "--http",
        "127.0.0.1:0",
        "--ledger",
        ledger,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        print(f"  {paint('36', f'$ wirecall serve examples/{example} --ledger sqlite:...')}")
        print(f"  {line.strip()}")
        yield int(line.strip().rpartition(":")[2])
    finally:
        process.terminate()
        process.wait(15)
        process.stderr.close()


@asynccontextmanager
async def cutting(port: int, cuts: int, at: bytes) -> AsyncIterator[int]:
    """Run a proxy before the server.

    It forwards requests, and cuts the connection at the first answers that contain `at`.
    """
    left = cuts
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal left
        there, to = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.create_task(pump(reader, to))
        try:
            while data := await there.read(65536):
                if left and at in data:
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


# --- the steps ------------------------------------------------------------------------------------


def post(port: int, method: str, params: dict[str, str], timeout: float | None = None) -> Any:
    """Call a method as any HTTP client does: without a key, and without wirecall."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    message = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
    try:
        connection.request(
            "POST", "/rpc", json.dumps(message), {"Content-Type": "application/json"}
        )
        return json.load(connection.getresponse())["result"]
    finally:
        connection.close()


def show_foreign(demo: Demo, ledger: str) -> None:
    demo.title(
        "A foreign client (plain HTTP, no key) gives up after 0.2 s and sends its call again: one effect"
    )
    with server("impatient.py", ledger) as port:
        try:
            post(port, "ship", {"order": "7"}, timeout=0.2)
            demo.show("ship        ", "answered", "no answer")
        except TimeoutError:
            demo.show(
                "ship        ",
                "no answer",
                "no answer",
                "the client closes its connection; the order is shipped",
            )
        again = post(port, "ship", {"order": "7"})
        demo.show(
            "ship again  ",
            again,
            "order 7, parcel 1",
            "the server saw that the answer was lost, and replays it",
        )
        demo.show("parcels     ", post(port, "parcels", {}), 1)


async def show_batch(demo: Demo, port: int) -> None:
    demo.title("Many calls in one message, each with its own outcome")
    async with connect(f"http://127.0.0.1:{port}/rpc") as client:
        async with client.batch() as batch:
            tea = batch.call("price", {"sku": "tea"})
            milk = batch.call("price", {"sku": "milk"})
            paid = batch.call("charge", {"order": "6", "cents": 450})
        demo.show("price tea   ", tea.result(), 450)
        demo.show(
            "price milk  ",
            str(milk.error),
            "there is no article 'milk' (4040): {'articles': ['coffee', 'tea']}",
        )
        demo.show("charge      ", paid.result(), {"order": "6", "paid": 450})
        demo.show("sent as     ", batch.wire, "array")


async def show_cut(demo: Demo, port: int) -> None:
    demo.title(
        "The connection is cut after the charge: the client repeats it, and it is charged once"
    )
    async with (
        cutting(port, cuts=2, at=b'"paid":500') as proxy,
        connect(f"http://127.0.0.1:{proxy}/rpc") as client,
    ):
        async with client.batch() as batch:
            charge = batch.call("charge", {"order": "7", "cents": 500})
        note = (
            f"after {charge.attempts} attempts, replayed from the ledger"
            if charge.replayed
            else "not replayed"
        )
        demo.show("charge      ", charge.result(), {"order": "7", "paid": 500}, note)
        demo.show("replayed    ", charge.replayed, True)
        demo.explain(
            "3 attempts: a proxy cut the first two connections before the answer, and the third got it."
        )


def show_ledger(demo: Demo, ledger: str) -> None:
    demo.title("The ledger knows what was done")
    command = [sys.executable, "-m", "wirecall", "ledger", "list", ledger]
    table = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in table.stdout.splitlines():
        print(f"  {line}")
    demo.show(
        "records     ",
        {name: table.stdout.count(f" {name} ") for name in ("charge", "ship")},
        {"charge": 2, "ship": 1},
    )
    demo.explain(
        "ANSWER is how the answer to a call without a key was delivered; "
        "-: the call had a key, so it does not matter."
    )


async def show_mcp(demo: Demo, port: int) -> None:
    demo.title("The same server for MCP clients, old and new: an array where the revision has it")
    for revision, wire in (("2025-03-26", "array"), ("2026-07-28", "singles")):
        async with connect(
            f"http://127.0.0.1:{port}/mcp", protocol="mcp", revision=revision
        ) as client:
            tools = {tool.name: tool for tool in await client.list_tools()}
            async with client.batch() as batch:
                calls = [batch.call_tool("price", {"sku": sku}) for sku in ("tea", "coffee")]
            demo.show(f"MCP {client.revision}", sorted(tools), ["charge", "price", "refund"])
            demo.show("  two calls as", batch.wire, wire)
            demo.show("  prices      ", [call.result().text for call in calls], ["450", "700"])


async def show_chain(demo: Demo, ledger: str) -> None:
    demo.title(
        "Three calls that need each other, in one message at any revision of MCP; its answer is cut"
    )
    with server("agent_batch.py", ledger) as port:
        async with (
            cutting(port, cuts=1, at=b"R-7-450") as proxy,
            connect(f"http://127.0.0.1:{proxy}/mcp", protocol="mcp") as client,
        ):
            async with client.batch() as batch:
                orders = batch.call_tool("find_orders", {"customer": "ada"})
                pay = batch.call_tool(
                    "charge", {"order": orders.ref("/0/id"), "cents": orders.ref("/0/cents")}
                )
                letter = batch.call_tool("letter", {"receipt": pay.ref("/receipt")})
            demo.show("find_orders ", orders.result().structured[0], {"id": 7, "cents": 450})
            demo.show(
                "charge      ",
                pay.result().structured,
                {"receipt": "R-7-450"},
                f"order and cents come from find_orders; after {pay.attempts} attempts",
            )
            demo.show(
                "letter      ",
                letter.result().text,
                "Thank you! Your receipt is R-7-450.",
                "its receipt comes from charge",
            )
            demo.show(f"MCP {client.revision}", batch.wire, "tool", "one round trip for the three")
            charges = await client.call_tool("charges")
            demo.show("charges     ", charges.structured, 1, "nothing was done twice")


async def show_all(demo: Demo, ledger: str) -> None:
    with server("shop.py", ledger) as port:
        await show_batch(demo, port)
        await show_cut(demo, port)
        show_ledger(demo, ledger)
        await show_mcp(demo, port)


class Pipe:
    """An MCP client of 2025-06-18 on the stdin and stdout of a process, without wirecall."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._sent = 0
        hello = {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": {"name": "pipe", "version": "1"},
        }
        self.request("initialize", hello)
        self.notify("notifications/initialized", {})

    def notify(self, method: str, params: dict[str, Any]) -> None:
        self._write({"jsonrpc": "2.0", "method": method, "params": params})

    def send(self, method: str, params: dict[str, Any]) -> int:
        """Send a request, and return its id."""
        self._sent += 1
        self._write({"jsonrpc": "2.0", "id": self._sent, "method": method, "params": params})
        return self._sent

    def request(self, method: str, params: dict[str, Any]) -> Any:
        """Return the result of a request."""
        id = self.send(method, params)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if message.get("id") == id:
                return message["result"]
        raise EOFError("the server closed its stdout")

    def call(self, tool: str, **arguments: str) -> str:
        """Return the text of a tool's result."""
        result = self.request("tools/call", {"name": tool, "arguments": arguments})
        text: str = result["content"][0]["text"]
        return text

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()


def show_wrap(demo: Demo, folder: Path) -> None:
    demo.title(
        "A server that others wrote, behind `wirecall wrap`: one effect, and it survives a kill"
    )
    notes = folder / "notes.txt"
    notes.touch()
    command = [
        sys.executable,
        "-m",
        "wirecall",
        "wrap",
        "--ledger",
        f"sqlite:{folder / 'notes.db'}",
    ]
    server = [sys.executable, str(EXAMPLES / "notes_server.py"), str(notes)]
    print(f"  {paint('36', '$ wirecall wrap -- python examples/notes_server.py notes.txt')}")
    with subprocess.Popen(
        [*command, "--", *server], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        client = Pipe(process)
        given_up = client.send(
            "tools/call", {"name": "add_note", "arguments": {"text": "pay the rent"}}
        )
        while not notes.read_text():
            time.sleep(0.01)
        client.notify(
            "notifications/cancelled", {"requestId": given_up, "reason": "Request timed out"}
        )
        demo.explain("add_note: the note is written, and the client gives up before the answer")
        demo.show(
            "add_note    ",
            client.call("add_note", text="pay the rent"),
            "note 1",
            "the same call again gets the answer that was lost",
        )
        before = client.call("process")
        os.kill(int(before), signal.SIGKILL)
        demo.explain(f"kill -9 {before}: the server is gone")
        tools = [tool["name"] for tool in client.request("tools/list", {})["tools"]]
        demo.show("tools       ", tools, ["add_note", "process"], "still there")
        demo.show("new process ", client.call("process") != before, True)
        demo.show("notes       ", notes.read_text().splitlines(), ["pay the rent"])
        assert process.stdin is not None
        process.stdin.close()


def main() -> int:
    demo = Demo()
    with tempfile.TemporaryDirectory() as folder:
        ledger = f"sqlite:{Path(folder) / 'ledger.db'}"
        show_foreign(demo, ledger)
        demo.title("A server: its methods are JSON-RPC and MCP tools at once")
        asyncio.run(show_all(demo, ledger))
        asyncio.run(show_chain(demo, ledger))
        show_wrap(demo, Path(folder))
    verdict = (
        ("31", f"{demo.failed} answers were wrong")
        if demo.failed
        else ("32", "all answers as they should be")
    )
    print(f"\n{paint(*verdict)}")
    return 1 if demo.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
