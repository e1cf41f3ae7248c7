"""Servers and clients of other projects meet through `wirecall wrap`, as if it were not there."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import mcp
import psutil  # type: ignore[import-untyped]
import pytest
from mcp.client.stdio import stdio_client

from tests.client.peers import until
from tests.gateway.fronts import (
    Client,
    counter,
    effects,
    started,
    wrap_words,
)
from tests.gateway.real_servers import (
    TIME_CALL,
    Server,
    answers,
    differences,
    everything,
    memory,
    talk,
    time_words,
    tool,
)
from tests.size import sized
from wirecall.gateway.pipe import Wrap
from wirecall.gateway.upstream import Origin
from wirecall.mcp.revisions import NAMES

REVISIONS = sized(small=[NAMES[3]], full=list(NAMES[:4]))


def server_named(name: str, folder: Path) -> Server:
    """A server that the environment of the tests has."""
    if name == "time":
        wrong = tool("get_current_time", timezone="Nowhere")
        return Server("time", time_words(), call=TIME_CALL, wrong=wrong)
    if name == "memory":
        folder.mkdir(exist_ok=True)
        return memory(folder)
    return everything()


def call_of(server: Server) -> dict[str, Any]:
    return server.act or server.call


@pytest.mark.parametrize("revision", REVISIONS)
@pytest.mark.parametrize("server", ["time", "memory", "everything"])
async def test_wrap_is_exact_in_front_of_a_real_server(
    tmp_path: Path, server: str, revision: str
) -> None:
    """G1: more than 30 messages with and without `wrap`, compared member by member."""
    told = []
    for number, before in enumerate(([], wrap_words("--ledger", f"sqlite:{tmp_path}/l.db", "--"))):
        asked = server_named(server, tmp_path / f"memory{number}")
        lines = talk(call_of(asked), revision)
        assert len(lines) >= 30
        async with started(*before, *asked.words, env=asked.env) as process:
            told.append(await answers(process, lines))
            if not before:
                process.process.kill()  # some do not end with their stdin
    assert differences(*told) == []


@pytest.mark.parametrize("server", ["time", "memory", "everything"])
async def test_wrap_starts_a_real_server_again_that_was_killed(tmp_path: Path, server: str) -> None:
    """G2: the tools are the same, and the next call is served."""
    asked = server_named(server, tmp_path)
    wrap = Wrap(Origin(name=server, command=asked.words, env=asked.env), ledger="memory:")
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
        assert "result" in await client.ask("tools/call", call_of(asked))
        assert relay.upstream.starts.count == 2
    finally:
        await wrap.aclose(1.0)


async def test_wrap_gives_the_lost_answer_of_a_real_server_again(tmp_path: Path) -> None:
    """G5: a lost answer of a command is replayed; a tool with `readOnlyHint` is not recorded."""
    server = memory(tmp_path)
    wrap = Wrap(Origin(name="memory", command=server.words, env=server.env), ledger="memory:")
    client = Client(wrap)
    try:
        await client.greet()
        first = await client.ask("tools/call", server.act, lose=True)
        again = await client.ask("tools/call", server.act)
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
