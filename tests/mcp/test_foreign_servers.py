"""Our client talks to servers of other projects: FastMCP, and the official SDKs for Python and
TypeScript.

The same story with each of them, over HTTP and with a child process, at the newest revision that
both speak and at 2025-03-26, where a batch is one array if the server takes it (V7): the TypeScript
servers do over HTTP, the Python ones refuse, and on a pipe all of them drop arrays silently.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.mcp.asgi import R1, R2, R4, R5
from tests.mcp.clients import client_of
from tests.mcp.node import installed, node
from tests.ports import free_port
from tests.size import sized
from wirecall import ToolError
from wirecall.errors import Declined

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds until a server answers for the first time
TYPESCRIPT = {
    "typescript-1": ("@modelcontextprotocol/sdk@1.32.2", "@modelcontextprotocol/client@2.4.0"),
    "typescript-2": ("@modelcontextprotocol/server@2.4.0",),
}
NEWEST = {"fastmcp": R5, "sdk": R5, "typescript-1": R4, "typescript-2": R5}


def command(kind: str, port: int | None = None, *more: str) -> list[str]:
    if kind not in TYPESCRIPT:
        return [
            sys.executable,
            "-m",
            "tests.mcp.foreign_server",
            kind,
            *(["--port", str(port)] if port else []),
            *more,
        ]
    modules = str(installed(*TYPESCRIPT[kind]))
    wanted = {"modules": modules, "sdk": int(kind[-1]), **({"port": port} if port else {})}
    return [str(node()), str(Path(__file__).with_name("typescript_server.mjs")), json.dumps(wanted)]


@contextmanager
def running(kind: str, *more: str, path: str = "/mcp") -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        command(kind, port, *more), cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(process, port)
        yield f"http://127.0.0.1:{port}{path}"
    finally:
        process.terminate()
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {process.args!r}")


PEERS = [(kind, way) for kind in NEWEST for way in ("http", "stdio")]
# A process on stdio takes seconds to import its modules, so tests that use FEW start only one of
# them.
FEW = sized(small=[*((kind, "http") for kind in NEWEST), ("typescript-2", "stdio")], full=PEERS)


# Of a module: pytest runs the tests of one server together, and a process that tests it starts no
# other. A server is there before a test counts its processes.
@pytest.fixture(scope="module", params=PEERS, ids="-".join)
def peer(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Any]]:
    kind, way = request.param
    if way == "stdio":
        yield kind, way, command(kind)
    else:
        with running(kind) as url:
            yield kind, way, url


@pytest.fixture(scope="module")
def old() -> Iterator[str]:
    with running("sdk", "--transport", "sse", path="/sse") as url:
        yield url


def options_of(way: str) -> dict[str, Any]:
    return (
        {"cwd": str(ROOT), "stderr": "keep", "timeout": PATIENCE}
        if way == "stdio"
        else {"timeout": PATIENCE}
    )


async def test_client_runs_the_story_at_the_newest_revision(peer: tuple[str, str, Any]) -> None:
    kind, way, target = peer
    async with client_of(target, **options_of(way), elicit=lambda _: {"name": "Ann"}) as client:
        assert (
            client.revision == NEWEST[kind]
            and client.server["name"] == "strange"
            and not client.honours_keys
        )
        await tell(client)
        if kind.startswith("typescript"):  # 2.x asks in a result, 1.x by a request
            assert (await client.call_tool("hello")).text == "Hello, Ann"
        async with client.batch() as batch:
            entries = [batch.call_tool("add", {"a": n, "b": n}, type=int) for n in range(8)]
            failed = batch.call_tool("fail", {"what": "this"})
        assert batch.wire == "singles" and batch.reason == f"MCP {NEWEST[kind]} has no arrays"
        assert [entry.result() for entry in entries] == [2 * n for n in range(8)]
        assert isinstance(failed.error, ToolError)


@pytest.mark.parametrize("revision", [None, R1, R2])
async def test_client_speaks_the_transport_of_the_first_revision(
    old: str, revision: str | None
) -> None:
    """HTTP with SSE: the refusal of `initialize` reveals it; it serves any revision with a
    handshake.
    """
    async with client_of(
        old, revision, timeout=PATIENCE, elicit=lambda _: {"name": "Ann"}
    ) as client:
        assert client.revision == (revision or R4)
        await tell(client)
        if revision is None:
            assert (await client.call_tool("hello")).text == "Hello, Ann"
        async with client.batch() as batch:
            entries = [batch.call_tool("add", {"a": n, "b": n}, type=int) for n in range(8)]
        assert batch.wire == "singles" and [entry.result() for entry in entries] == [
            2 * n for n in range(8)
        ]


async def tell(client: Any) -> None:
    told: list[tuple[float, float, str]] = []
    assert {tool.name for tool in await client.list_tools()} == {"add", "fail", "steps", "hello"}
    assert await client.call_tool("add", {"a": 2, "b": 3}, type=int) == 5
    # The SDK hides the reason.
    with pytest.raises(ToolError, match=r"this does not work|Error executing tool fail"):
        await client.call_tool("fail", {"what": "this"})
    steps = await client.call_tool("steps", progress=lambda *said: told.append(said))
    assert steps.text == "both steps" and [one[:2] for one in told] == [(1, 2), (2, 2)]
    assert (await client.read_resource("note://7"))[0].text == "note 7"
    assert [one.uri_template for one in await client.list_resource_templates()] == ["note://{id}"]
    prompted = await client.get_prompt("greet", {"who": "Ann"})
    assert prompted.messages[0].text == "Say hello to Ann"
    await client.ping()


@pytest.mark.parametrize("peer", FEW, indirect=True, ids="-".join, scope="module")
async def test_elicitation_works_with_a_handshake(peer: tuple[str, str, Any]) -> None:
    kind, way, target = peer
    if (kind, way) == ("typescript-2", "http"):
        pytest.skip("it serves the older revisions without sessions, and asks nobody there")
    async with client_of(target, R4, **options_of(way), elicit=lambda _: {"name": "Ann"}) as client:
        assert (await client.call_tool("hello")).text == "Hello, Ann"


async def test_batch_works_at_the_revision_that_has_arrays(peer: tuple[str, str, Any]) -> None:
    kind, way, target = peer
    async with client_of(target, R2, **options_of(way)) as client:
        assert client.revision == R2
        await tell(client)
        for _ in range(2):
            async with client.batch() as batch:
                entries = [batch.call_tool("add", {"a": n, "b": n}, type=int) for n in range(8)]
                failed = batch.call_tool("fail", {"what": "this"})
            assert [entry.result() for entry in entries] == [2 * n for n in range(8)]
            assert isinstance(failed.error, ToolError)
            if kind.startswith("typescript") and way == "http":
                assert (batch.wire, batch.reason) == ("array", "MCP 2025-03-26 has arrays")
            else:
                reason = (
                    "the server refused an array"
                    if way == "http"
                    else "the server did not answer an array"
                )
                assert batch.wire == "singles" and batch.reason.startswith(reason)


@pytest.mark.parametrize("peer", FEW, indirect=True, ids="-".join, scope="module")
async def test_destructive_tool_is_confirmed(peer: tuple[str, str, Any]) -> None:
    """T3, T4: the hints of a trusted server make some confirmations unnecessary."""
    _, way, target = peer
    asked: list[str] = []

    def confirm(tool: Any, _: Any) -> bool:
        asked.append(tool.name)
        return False

    async with client_of(target, **options_of(way), trust=True, confirm=confirm) as client:
        assert await client.call_tool("add", {"a": 2, "b": 3}, type=int) == 5
        with pytest.raises(Declined):
            await client.call_tool("fail", {"what": "this"})
        assert (await client.list_tools(order="safest"))[0].name == "add"
    assert asked == ["fail"]
