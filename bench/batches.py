"""Many calls over a slow link: one by one, in an array, with references, as a stream, by the batch
tool; beside FastMCP's bulk caller and its code mode.

    make bench            or   python bench/batches.py [--quick]

A proxy in this process holds back every byte for 40 ms in each direction, so a round trip takes 80
ms. Each tool works for 10 ms. There are two tasks: twelve prices, which do not depend on each
other, and three calls of which each needs the one before: find an order, charge it, get its
receipt. A connection is open before the clock starts.

Round trips are counted by the proxy: each time a client sends after it has received. The bytes that
reach a model are those of the results that its client hands to it: the `content` of tools, and the
answers of plain JSON-RPC.

The cost of an entry is compared without the delay, by the time of one batch of fifty calls that do
not wait, in turns: queries, which cost an array next to nothing, and commands, each with a key and
a record. Requests are encoded before the clock starts, and answers are received and not decoded.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from targets import Target, report

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.environments import environment  # noqa: E402  # the environments of the tests

QUICK = "--quick" in sys.argv
ROUNDS = 2 if QUICK else 5
BURSTS = 30 if QUICK else 200
ONE_WAY = 0.04
WORK = 0.01
SLOW = 0.5
BATCH = 50
SKUS = [f"tea-{number}" for number in range(12)]
# Its sandbox runs code of a model. The tests do not need it, so it has its own environment, where
# the server also imports wirecall.
CODE_MODE = ["fastmcp[code-mode]==4.1.2", "msgspec"]

Json = Any


# --- a link with a delay --------------------------------------------------------------------------


class Link:
    """A proxy that delays every byte, and counts round trips."""

    def __init__(self, port: int) -> None:
        self._target = port
        self.trips = 0
        self._is_answered = True
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def reset(self) -> None:
        self.trips = 0
        self._is_answered = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner = await asyncio.open_connection("127.0.0.1", self._target)
        for source, sink, is_request in ((reader, inner[1], True), (inner[0], writer, False)):
            task = asyncio.create_task(self._pass(source, sink, is_request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, is_request: bool
    ) -> None:
        loop = asyncio.get_running_loop()
        while data := await source.read(1 << 16):
            if is_request and self._is_answered:
                self.trips += 1
            self._is_answered = not is_request
            loop.call_later(ONE_WAY, sink.write, data)
        loop.call_later(ONE_WAY, sink.close)

    def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()


# --- clients: as few bytes and steps as the protocols allow ---------------------------------------


class Http:
    """One connection, and requests on it one after another."""

    async def open(self, port: int) -> "Http":
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        return self

    def close(self) -> None:
        self._writer.close()

    async def post(self, path: str, body: Json, **fields: str) -> bytes:
        """Return the body of the answer."""
        await self.begin(path, body, **fields)
        parts = [part async for part in self.pieces()]
        return b"".join(parts)

    async def begin(self, path: str, body: Json, **fields: str) -> None:
        self._writer.write(request(path, body, **fields))

    async def exchange(self, data: bytes) -> bytes:
        """Send a request that is encoded already; return the body of the answer."""
        self._writer.write(data)
        return b"".join([part async for part in self.pieces()])

    async def pieces(self) -> Any:
        """Yield the body as it comes."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).lower()
        if b"content-length:" in head:
            length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
            yield await self._reader.readexactly(length)
            return
        while size := int(await self._reader.readline(), 16):
            yield (await self._reader.readexactly(size + 2))[:-2]
        await self._reader.readline()


def request(path: str, body: Json, **fields: str) -> bytes:
    """A whole request, encoded."""
    data = json.dumps(body).encode()
    accept = fields.pop("accept", "application/json, text/event-stream")
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:80\r\ncontent-type: application/json\r\n"
        f"accept: {accept}\r\n{head}content-length: {len(data)}\r\n\r\n".encode()
        + data
    )


def plain(id: int | str, method: str, params: Json, **more: Json) -> Json:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params, **more}


META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
}


def tool_call(name: str, arguments: Json) -> tuple[Json, dict[str, str]]:
    """A call of a tool at 2026-07-28, and the headers that repeat it."""
    fields = {
        "mcp_protocol_version": "2026-07-28",
        "mcp_method": "tools/call",
        "mcp_name": name,
    }
    return plain(1, "tools/call", {"name": name, "arguments": arguments, "_meta": META}), fields


class Shop:
    """The calls of both tasks, in each way. A way returns the bytes that reach the model."""

    def __init__(self, http: Http, *, is_ours: bool = True) -> None:
        self._http = http
        self._is_ours = is_ours

    async def rpc(self, body: Json, accept: str = "application/json") -> tuple[Json, int]:
        answer = await self._http.post("/rpc", body, accept=accept)
        if accept == "application/json":
            return json.loads(answer), len(answer)
        lines = answer.splitlines()
        return [json.loads(line) for line in lines if line], len(answer)

    async def tool(self, name: str, arguments: Json) -> tuple[Json, int]:
        """Call a tool; return its structured content, and the bytes of its content."""
        body, fields = tool_call(name, arguments)
        if not self._is_ours:
            body = plain(1, "tools/call", {"name": name, "arguments": arguments})
            fields = {"mcp_protocol_version": "2025-06-18"}
        data = await self._http.post("/mcp", body, **fields)
        result = json.loads(data)["result"]
        assert not result.get("isError"), data
        shown = sum(len(block.get("text", "")) for block in result["content"])
        return result.get("structuredContent"), shown

    # twelve calls that do not depend on each other

    async def prices_by_calls(self) -> int:
        answers = [await self.rpc(plain(1, "price", {"sku": sku})) for sku in SKUS]
        return sum(size for _, size in answers)

    async def prices_by_array(self) -> int:
        _, size = await self.rpc([plain(id, "price", {"sku": sku}) for id, sku in enumerate(SKUS)])
        return size

    async def prices_by_stream(self) -> int:
        batch = [plain(id, "price", {"sku": sku}) for id, sku in enumerate(SKUS)]
        records, size = await self.rpc(batch, "application/jsonl")
        assert records[-1]["params"]["answered"] == len(SKUS)
        return size

    async def prices_by_tools(self) -> int:
        return sum([(await self.tool("price", {"sku": sku}))[1] for sku in SKUS])

    async def prices_by_batch_tool(self) -> int:
        calls = [{"tool": "price", "arguments": {"sku": sku}} for sku in SKUS]
        found, size = await self.tool("batch", {"calls": calls})
        assert [each["result"] for each in found["results"]] == [len(sku) for sku in SKUS]
        return size

    async def prices_by_bulk_caller(self) -> int:
        calls = [{"tool": "price", "arguments": {"sku": sku}} for sku in SKUS]
        _, size = await self.tool("call_tools_bulk", {"tool_calls": calls})
        return size

    async def prices_by_code(self) -> int:
        code = f"return [await call_tool('price', {{'sku': sku}}) for sku in {SKUS!r}]"
        _, size = await self.tool("execute", {"code": code})
        return size

    # three calls of which each needs the one before

    async def order_by_calls(self) -> int:
        found, first = await self.rpc(plain(1, "find_order", {"customer": "ada"}))
        order = found["result"]["orders"][0]
        paid = {"order": order["id"], "cents": order["total"]}
        paid["idempotency_key"] = f"k-{time.time_ns()}"
        _, second = await self.rpc(plain(2, "charge", paid))
        letter, third = await self.rpc(plain(3, "receipt", {"order": order["id"]}))
        assert letter["result"] == {"receipt": "r-o-0"}
        return first + second + third

    async def order_by_references(self) -> int:
        refs = {"/order": {"id": 1, "path": "/orders/0/id"}}
        cents = {"/cents": {"id": 1, "path": "/orders/0/total"}}
        key = {"idempotency_key": f"k-{time.time_ns()}"}
        answers, size = await self.rpc(
            [
                plain(1, "find_order", {"customer": "ada"}),
                plain(2, "charge", key, refs=refs | cents),
                plain(3, "receipt", {}, refs=refs, after=[2]),
            ]
        )
        assert answers[2]["result"] == {"receipt": "r-o-0"}
        return size

    async def order_by_tools(self) -> int:
        found, first = await self.tool("find_order", {"customer": "ada"})
        order = found["orders"][0]
        _, second = await self.tool("charge", {"order": order["id"], "cents": order["total"]})
        letter, third = await self.tool("receipt", {"order": order["id"]})
        assert letter == {"receipt": "r-o-0"}
        return first + second + third

    async def order_by_batch_tool(self) -> int:
        order = {"$ref": "order#/orders/0/id"}
        calls = [
            {"id": "order", "tool": "find_order", "arguments": {"customer": "ada"}},
            {
                "id": "pay",
                "tool": "charge",
                "arguments": {"order": order, "cents": {"$ref": "order#/orders/0/total"}},
            },
            {"id": "letter", "tool": "receipt", "arguments": {"order": order}, "after": ["pay"]},
        ]
        found, size = await self.tool("batch", {"calls": calls, "return": ["letter"]})
        assert found["results"][-1].get("result") == {"receipt": "r-o-0"}, found
        return size

    async def order_by_code(self) -> int:
        code = (
            "found = await call_tool('find_order', {'customer': 'ada'})\n"
            "order = found['orders'][0]\n"
            "await call_tool('charge', {'order': order['id'], 'cents': order['total']})\n"
            "return await call_tool('receipt', {'order': order['id']})"
        )
        _, size = await self.tool("execute", {"code": code})
        return size


class Figure(NamedTuple):
    """One way through one task."""

    trips: int
    seconds: float
    size: int


async def measured(link: Link, way: Callable[[], Awaitable[int]]) -> Figure:
    """The best of several rounds."""
    found = []
    for _ in range(ROUNDS):
        link.reset()
        began = time.perf_counter()
        size = await way()
        found.append(Figure(link.trips, time.perf_counter() - began, size))
    return min(found, key=lambda figure: figure.seconds)


async def over_the_link(ports: dict[str, int]) -> dict[str, Figure]:
    """Every way of each server."""
    found: dict[str, Figure] = {}
    for server, port in ports.items():
        link = Link(port)
        http = await Http().open(await link.open())
        shop = Shop(http, is_ours=server == "ours")
        for name, way in ways(server, shop).items():
            await way()  # once before the clock starts
            found[name] = await measured(link, way)
        http.close()
        link.close()
    return found


def ways(server: str, shop: Shop) -> dict[str, Callable[[], Awaitable[int]]]:
    if server == "ours":
        return {
            "12 calls one by one": shop.prices_by_calls,
            "12 calls in an array": shop.prices_by_array,
            "12 calls as a stream": shop.prices_by_stream,
            "12 tools one by one": shop.prices_by_tools,
            "12 tools by the batch tool": shop.prices_by_batch_tool,
            "3 dependent calls one by one": shop.order_by_calls,
            "3 dependent calls with references": shop.order_by_references,
            "3 dependent tools one by one": shop.order_by_tools,
            "3 dependent tools by the batch tool": shop.order_by_batch_tool,
        }
    if server == "fastmcp":
        return {
            "FastMCP: 12 tools one by one": shop.prices_by_tools,
            "FastMCP: 12 tools by the bulk caller": shop.prices_by_bulk_caller,
            "FastMCP: 3 dependent tools one by one": shop.order_by_tools,
        }
    return {
        "FastMCP: 12 tools in code mode": shop.prices_by_code,
        "FastMCP: 3 dependent tools in code mode": shop.order_by_code,
    }


async def first_answers(port: int) -> dict[str, float]:
    """Seconds until answers of a stream with one slow entry, and those of single calls."""
    link = Link(port)
    http = await Http().open(await link.open())
    shop = Shop(http)
    found: dict[str, list[float]] = {}
    batch = [plain(0, "slow", {"seconds": SLOW})]
    batch += [plain(id, "price", {"sku": sku}) for id, sku in enumerate(SKUS, 1)]

    def note(name: str, began: float) -> None:
        found.setdefault(name, []).append(time.perf_counter() - began)

    for _ in range(ROUNDS):
        began = time.perf_counter()
        await shop.rpc(plain(1, "price", {"sku": "tea"}))
        note("one price alone", began)
        began = time.perf_counter()
        await shop.rpc(plain(1, "slow", {"seconds": SLOW}))
        note("the slow call alone", began)
        began = time.perf_counter()
        await http.begin("/rpc", batch, accept="application/jsonl")
        is_first = True
        async for _piece in http.pieces():
            if is_first:
                note("first answer of a stream", began)
            is_first = False
        note("last answer of a stream", began)
        began = time.perf_counter()
        await shop.rpc(batch)
        note("an array", began)
    http.close()
    link.close()
    return {name: min(values) for name, values in found.items()}


def cost_requests(burst: int) -> dict[str, bytes]:
    """Requests of fifty entries each, whose commands have keys of this burst."""

    def array(method: str, keyed: bool) -> list[Json]:
        return [plain(id, method, arguments(id, keyed)) for id in range(BATCH)]

    def arguments(number: int, keyed: bool) -> Json:
        key = {"idempotency_key": f"k-{burst}-{number}"} if keyed else {}
        return {"number": number, **key}

    def by_tool(name: str, keyed: bool) -> bytes:
        calls = [{"tool": name, "arguments": arguments(id, keyed)} for id in range(BATCH)]
        body, fields = tool_call("batch", {"calls": calls})
        return request("/mcp", body, **fields)

    queries = array("count", keyed=False)
    return {
        "array": request("/rpc", queries, accept="application/json"),
        "stream": request("/rpc", queries, accept="application/jsonl"),
        "tool": by_tool("count", keyed=False),
        "array of commands": request("/rpc", array("put", keyed=True), accept="application/json"),
        "tool with commands": by_tool("put", keyed=True),
    }


async def costs(port: int) -> dict[str, float]:
    """Microseconds of an entry: in an array, in a stream, and through the batch tool."""
    http = await Http().open(port)
    found: dict[str, float] = {}
    for burst in range(2 * BURSTS):
        # The keys of the tool's commands and of the array's are those of different commands: the
        # ledger distinguishes `put` and `tools/call:put`.
        for name, data in cost_requests(burst).items():
            began = time.perf_counter()
            answer = await http.exchange(data)
            took = 1e6 * (time.perf_counter() - began) / BATCH
            assert b'"error"' not in answer, answer
            found[name] = min(found.get(name, took), took)
    http.close()
    return found


# --- servers --------------------------------------------------------------------------------------


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int, child: "subprocess.Popen[bytes]") -> None:
    import socket

    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError(f"{child.args!r} ended with {child.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{child.args!r} does not listen")


def pythons() -> dict[str, str]:
    """The Python of each server."""
    found = {"ours": sys.executable, "fastmcp": sys.executable}
    try:
        found["code_mode"] = str(environment("fastmcp_code_mode", CODE_MODE))
    except subprocess.SubprocessError as error:
        print(f"without FastMCP's code mode, which could not be installed: {error}")
    return found


@contextmanager
def serving() -> Iterator[dict[str, int]]:
    """The servers, and the port of each."""
    known = pythons()
    ports = {name: free_port() for name in known}
    commands = {
        name: [known[name], "-P", "-m", "bench.servers.orders", name, str(port)]
        for name, port in ports.items()
    }
    commands["ours"] = [
        sys.executable,
        "-P",
        "-m",
        "wirecall",
        "serve",
        "--http",
        f"127.0.0.1:{ports['ours']}",
        "bench/servers/orders.py:ours",
    ]
    folders = (str(ROOT), os.environ.get("PYTHONPATH", ""), str(ROOT / "src"))
    path = os.pathsep.join(each for each in folders if each)
    children = []
    nowhere = subprocess.DEVNULL
    try:
        for name, command in commands.items():
            child = subprocess.Popen(
                command,
                stdin=nowhere,
                stdout=nowhere,
                stderr=nowhere,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
            )
            children.append(child)
            wait_for(ports[name], child)
        yield ports
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.wait(20)


def main() -> int:
    with serving() as ports:
        found = asyncio.run(over_the_link(ports))
        waits = asyncio.run(first_answers(ports["ours"]))
        entries = asyncio.run(costs(ports["ours"]))
    print(f"{'over a link of 80 ms':40} round trips      ms   bytes to the model")
    for name, figure in found.items():
        print(f"  {name:38} {figure.trips:11} {1e3 * figure.seconds:7.0f} {figure.size:7}")
    print(f"with one entry of {1e3 * SLOW:.0f} ms")
    for name, seconds in waits.items():
        print(f"  {name:38} {1e3 * seconds:19.0f}")
    print(f"microseconds of an entry, in batches of {BATCH}, without the delay")
    for name, took in entries.items():
        print(f"  {name:38} {took:19.1f}")

    chain = 2 * ONE_WAY + WORK
    long_chain = 2 * ONE_WAY + 3 * WORK
    tool = found["12 tools by the batch tool"]
    dependent = found["3 dependent tools by the batch tool"]
    references = found["3 dependent calls with references"]
    bulk = found["FastMCP: 12 tools by the bulk caller"]
    targets = [
        Target("round trips of 12 calls by the batch tool", "trips", tool.trips, "<=", 1, own=1),
        Target(
            "round trips of 3 dependent calls by the batch tool",
            "trips",
            dependent.trips,
            "<=",
            1,
            own=1,
        ),
        Target(
            "round trips of 3 dependent calls with references",
            "trips",
            references.trips,
            "<=",
            1,
            own=1,
        ),
        Target(
            "time of 12 calls by the batch tool, times one round trip and one call",
            "s",
            tool.seconds,
            "<=",
            1.15,
            own=chain,
        ),
        Target(
            "time of 3 dependent calls by the batch tool, times their chain",
            "s",
            dependent.seconds,
            "<=",
            1.15,
            own=long_chain,
        ),
        Target(
            "time of 3 dependent calls with references, times their chain",
            "s",
            references.seconds,
            "<=",
            1.15,
            own=long_chain,
        ),
        Target(
            "time of 12 calls by the batch tool, times FastMCP's bulk caller",
            "s",
            tool.seconds,
            "<=",
            1,
            peer=bulk.seconds,
        ),
        Target(
            "bytes to the model of 3 dependent calls, times those of single calls",
            "bytes",
            dependent.size,
            "<=",
            0.5,
            own=found["3 dependent tools one by one"].size,
        ),
        Target(
            "first answer of a stream with a slow entry, times one call alone",
            "s",
            waits["first answer of a stream"],
            "<=",
            1.2,
            own=waits["one price alone"],
        ),
        Target(
            "slow answer in a stream, times that call alone",
            "s",
            waits["last answer of a stream"],
            "<=",
            1.2,
            own=waits["the slow call alone"],
        ),
        Target(
            "an entry through the batch tool, times one in an array",
            "µs",
            entries["tool"],
            "<=",
            1.5,
            own=entries["array"],
        ),
        Target(
            "a command through the batch tool, times one in an array",
            "µs",
            entries["tool with commands"],
            "<=",
            1.5,
            own=entries["array of commands"],
        ),
        Target(
            "an entry in a stream, times one in an array",
            "µs",
            entries["stream"],
            "<=",
            1 / 0.7,
            own=entries["array"],
        ),
    ]
    figures = {name: figure.seconds for name, figure in found.items()} | waits | entries
    return report("batches", targets, figures)


if __name__ == "__main__":
    sys.exit(main())
