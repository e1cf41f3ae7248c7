"""Servers and clients of other projects meet through `wirecall wrap`, as if it were not there."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import mcp
import psutil  # type: ignore[import-untyped]
import pytest
from mcp.client.stdio import stdio_client

from tests.client.peers import until
from tests.gateway.fronts import (
    Client,
    Process,
    counter,
    effects,
    introduction,
    message_of,
    started,
    wrap_words,
)
from tests.mcp.node import installed, node
from tests.size import sized
from wirecall.gateway.pipe import Wrap
from wirecall.gateway.upstream import Origin
from wirecall.mcp.revisions import NAMES

PACKAGES = {
    "memory": "@modelcontextprotocol/server-memory@2026.8.31",
    "everything": "@modelcontextprotocol/server-everything@2026.8.31",
}
REVISIONS = sized(small=[NAMES[3]], full=list(NAMES[:4]))
# A call of each server that has the same result each time.
CALLS: dict[str, dict[str, Any]] = {
    "time": {
        "name": "convert_time",
        "arguments": {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"},
    },
    "memory": {
        "name": "create_entities",
        "arguments": {
            "entities": [{"name": "ann", "entityType": "person", "observations": ["tall"]}]
        },
    },
    "everything": {"name": "echo", "arguments": {"message": "é 0.10"}},
}


def words_of(server: str) -> list[str]:
    if server == "time":
        return [sys.executable, "-m", "mcp_server_time", "--local-timezone", "UTC"]
    package = PACKAGES[server].rpartition("@")[0]
    script = installed(PACKAGES[server]) / package / "dist" / "index.js"
    return [str(node()), str(script)]


def talk(server: str, revision: str) -> list[bytes]:
    """Messages of a client: most methods, odd members, good calls and bad ones."""
    lines = [message_of("initialize", introduction(revision), 1)]
    lines.append(message_of("notifications/initialized"))
    methods = ("ping", "tools/list", "prompts/list", "resources/list", "resources/templates/list")
    for method in methods:
        lines.append(message_of(method, None, f"{method} bare"))
        lines.append(message_of(method, {}, f"{method} empty"))
        lines.append(message_of(method, {"_meta": {"x": 0.5}}, f"{method} meta"))
    lines += [
        message_of("x/unknown", {"a": 1}, 40),
        message_of("tools/call", CALLS[server], 41),
        message_of("tools/call", {**CALLS[server], "_meta": {"x": [1.0]}}, "42"),
        message_of("tools/call", {"name": "no such tool", "arguments": {}}, 43),
        message_of("tools/call", {"name": CALLS[server]["name"], "arguments": {}}, 44),
        message_of("tools/call", {}, 45),
        message_of("prompts/get", {"name": "none"}, 46),
        message_of("resources/read", {"uri": "x://none"}, 47),
        message_of("logging/setLevel", {"level": "error"}, 48),
        message_of("completion/complete", {"ref": {"type": "ref/prompt", "name": "x"}}, 49),
        message_of("resources/subscribe", {"uri": "x://none"}, 50),
        message_of("resources/unsubscribe", {"uri": "x://none"}, 51),
        message_of("tools/list", {"cursor": "none"}, 52),
        message_of("ping", None, 53),
    ]
    return lines


async def answers(process: Process, lines: list[bytes]) -> dict[Any, Any]:
    """The answers by id. Questions of the server are refused, other messages are left out."""
    found: dict[Any, Any] = {}
    for line in lines:
        await process.send(line)
        id = json.loads(line).get("id")
        while id is not None and id not in found:
            message = json.loads(await process.line())
            if "method" not in message:
                found[message.pop("id")] = message
            elif "id" in message:
                error = {"code": -32601, "message": "no"}
                refusal = {"jsonrpc": "2.0", "id": message["id"], "error": error}
                await process.send(json.dumps(refusal).encode())
    return found


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("server", ["time", "memory", "everything"])
async def test_wrap_is_exact_in_front_of_a_real_server(
    tmp_path: Path, server: str, revision: str
) -> None:
    """G1: more than 30 messages with and without `wrap`, compared member by member."""
    lines = talk(server, revision)
    assert len(lines) >= 30
    told = []
    for number, before in enumerate(([], wrap_words("--ledger", f"sqlite:{tmp_path}/l.db", "--"))):
        env = {"MEMORY_FILE_PATH": str(tmp_path / f"memory{number}.json")}
        async with started(*before, *words_of(server), env=env) as process:
            told.append(await answers(process, lines))
            if not before:
                process.process.kill()  # some do not end with their stdin
    direct, wrapped = told
    # Ours: a call whose name is missing does not become a record.
    refused = wrapped.pop(45)
    assert refused["error"]["code"] == -32602 and "error" in direct.pop(45)
    assert wrapped == direct


@pytest.mark.parametrize("server", ["time", "memory", "everything"])
async def test_wrap_starts_a_real_server_again_that_was_killed(server: str) -> None:
    """G2: the tools are the same, and the next call is served."""
    wrap = Wrap(Origin(name=server, command=words_of(server)), ledger="memory:")
    client = Client(wrap)
    try:
        await client.greet()
        before = await client.ask("tools/list")
        relay = client.front._relay
        pid = relay.upstream.children[-1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        link: Any = relay.session.link
        await until(lambda: not link.is_open)
        assert (await client.ask("tools/list"))["result"] == before["result"]
        assert "result" in await client.ask("tools/call", CALLS[server])
        assert relay.upstream.starts.count == 2
    finally:
        await wrap.aclose(1.0)


async def test_wrap_gives_the_lost_answer_of_a_real_server_again(tmp_path: Path) -> None:
    """G5: a lost answer of a command is replayed; a tool with `readOnlyHint` is not recorded."""
    env = {"MEMORY_FILE_PATH": str(tmp_path / "memory.json")}
    wrap = Wrap(Origin(name="memory", command=words_of("memory"), env=env), ledger="memory:")
    client = Client(wrap)
    try:
        await client.greet()
        first = await client.ask("tools/call", CALLS["memory"], lose=True)
        again = await client.ask("tools/call", CALLS["memory"])
        assert again["result"].pop("_meta")["io.wirecall/replayed"] is True
        assert again["result"] == first["result"]
        reading = {"name": "read_graph", "arguments": {}}
        await client.ask("tools/call", reading, lose=True)
        assert "_meta" not in (await client.ask("tools/call", reading))["result"]
    finally:
        await wrap.aclose(1.0)


# --- the official client --------------------------------------------------------------------------


def server_of(tmp_path: Path, file: Path) -> mcp.StdioServerParameters:
    words = wrap_words("--ledger", f"sqlite:{tmp_path}/ledger.db", "--name", "bank", "--")
    command = [*words, *counter(file)]
    return mcp.StdioServerParameters(command=command[0], args=command[1:])


async def test_official_python_client_keeps_its_tools_when_the_server_dies(tmp_path: Path) -> None:
    """G2: the session of the client survives the death of its server."""
    file = tmp_path / "effects"
    async with (
        stdio_client(server_of(tmp_path, file)) as (reader, writer),
        mcp.ClientSession(reader, writer) as session,
    ):
        introduced = await session.initialize()
        assert introduced.server_info.name == "counter"
        listed = await session.list_tools()
        assert [tool.name for tool in listed.tools] == ["pay", "look"]
        with pytest.raises(mcp.MCPError, match="unknown"):
            await session.call_tool("pay", {"to": "ann", "then": "die"})
        done = await session.call_tool("pay", {"to": "bob"})
        assert not done.is_error and effects(file) == 2
        assert [tool.name for tool in (await session.list_tools()).tools] == ["pay", "look"]


async def test_official_python_client_that_times_out_and_calls_again_pays_once(
    tmp_path: Path,
) -> None:
    """G5, G7: it cancels with the words "timed out"; the payment is awaited, and given again."""
    file = tmp_path / "effects"
    async with (
        stdio_client(server_of(tmp_path, file)) as (reader, writer),
        mcp.ClientSession(reader, writer) as session,
    ):
        await session.initialize()
        with pytest.raises(mcp.MCPError):
            await session.call_tool("pay", {"to": "ann", "then": "wait"}, read_timeout_seconds=3.0)
        await until(lambda: effects(file) == 1)
        file.with_suffix(".go").touch()
        again = await session.call_tool("pay", {"to": "ann", "then": "wait"})
        assert not again.is_error and effects(file) == 1


async def test_wrapped_servers_of_a_client_end_with_it(tmp_path: Path) -> None:
    """G9: after the session no process remains, not even the reaper."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    file = tmp_path / "effects"
    async with (
        stdio_client(server_of(tmp_path, file)) as (reader, writer),
        mcp.ClientSession(reader, writer) as session,
    ):
        await session.initialize()
        during = {child.pid for child in psutil.Process().children(recursive=True)} - before
        assert len(during) >= 2
    async with asyncio.timeout(60.0):
        await until(lambda: not any(psutil.pid_exists(pid) for pid in during))
