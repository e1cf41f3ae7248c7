"""What each setting of an upstream does, through a gateway that serves."""

import asyncio
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import until
from tests.gateway.bench import Bench
from tests.gateway.fronts import counter, effects, introduction, message_of
from wirecall.cli.gateway_run import _reachable
from wirecall.gateway import ToolSettings, UpstreamSettings
from wirecall.server.identity import Identity


async def opened(bench: Bench, path: str = "/mcp/bank") -> str:
    _, session = await bench.post(path, message_of("initialize", introduction(), 1))
    assert session is not None
    return session


async def called(
    bench: Bench, session: str, name: str, key: str | None = None, **arguments: Any
) -> Any:
    params: dict[str, Any] = {"name": name, "arguments": arguments}
    if key is not None:
        params["_meta"] = {"io.wirecall/idempotency-key": key}
    answer, _ = await bench.post("/mcp/bank", message_of("tools/call", params, 2), session)
    return answer


def banked(folder: Path, **own: Any) -> Bench:
    """A gateway in front of one server, with a tool `put` that may be repeated."""
    put = {"name": "put", "annotations": {"idempotentHint": True}}
    (folder / "bank.tools").write_text(json.dumps([put]))
    return Bench(folder, names=("bank",), own={"bank": own})


async def run(*words: str) -> tuple[int | None, str]:
    """Run wirecall; return its exit code and its stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "wirecall",
        *words,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    return process.returncode, said.decode()


# --- what a tool is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trust", "tool", "code", "count"),
    [
        ("none", "put", 50910, 1),
        ("hints", "put", 50910, 1),
        ("full", "put", 50210, 2),
        ("full", "pay", 50910, 1),
    ],
)
async def test_trust_decides_which_lost_calls_are_sent_again(
    tmp_path: Path, trust: str, tool: str, code: int, count: int
) -> None:
    async with banked(tmp_path, trust=trust).serving() as bench:
        error = (await called(bench, await opened(bench), tool, then="die"))["error"]
        assert error["code"] == code and effects(bench.file("bank")) == count


@pytest.mark.parametrize("trust", ["none", "full"])
async def test_kind_outranks_hints_and_trust(tmp_path: Path, trust: str) -> None:
    kinds = {"look": ToolSettings(kind="command"), "pay": ToolSettings(kind="query")}
    async with banked(tmp_path, trust=trust, tools=kinds).serving() as bench:
        session = await opened(bench)
        looks = [await called(bench, session, "look", "k") for _ in range(2)]
        assert looks[1]["result"]["_meta"]["io.wirecall/replayed"] is True
        for _ in range(2):
            paid = await called(bench, session, "pay", "k")
            assert "_meta" not in paid["result"]
        assert effects(bench.file("bank")) == 2


async def test_tool_that_requires_a_key_is_refused_without_one(tmp_path: Path) -> None:
    own = {"pay": ToolSettings(key="required")}
    async with banked(tmp_path, tools=own).serving() as bench:
        session = await opened(bench)
        error = (await called(bench, session, "pay"))["error"]
        assert (error["code"], error["data"]["ran"]) == (-32602, "no")
        assert error["data"]["type"] == "idempotency_key_required"
        assert effects(bench.file("bank")) == 0
        assert "result" in await called(bench, session, "pay", "k")


async def test_tool_without_a_key_has_no_record(tmp_path: Path) -> None:
    own = {"pay": ToolSettings(key="off")}
    async with banked(tmp_path, tools=own).serving() as bench:
        assert "result" in await called(bench, await opened(bench), "pay")
        assert not await (await bench.gateway.ledger()).list()
        assert effects(bench.file("bank")) == 1


@pytest.mark.parametrize(
    "params",
    [
        b'{"name": "pay", "arguments": {"to": 1, "to": 2}}',
        b'{"name": "look", "name": "pay", "arguments": {}}',
        b'{"name": "pay", "arguments": {}, "arguments": {"to": 1}}',
        b'{"name": "pay", "arguments": {}, "_meta": {"a": 1, "a": 2}}',
    ],
)
@pytest.mark.parametrize("path", ["/mcp", "/mcp/bank"])
async def test_command_with_a_member_twice_is_refused_at_both_addresses(
    tmp_path: Path, path: str, params: bytes
) -> None:
    """Bad input: -32602, nothing is sent."""
    async with banked(tmp_path).serving() as bench:
        message = message_of("tools/call", params, 2)
        answer, _ = await bench.post(path, message, await opened(bench, path))
        assert (answer["error"]["code"], answer["error"]["data"]["ran"]) == (-32602, "no")
        assert "twice" in answer["error"]["message"]
        assert effects(bench.file("bank")) == 0


# --- where it runs --------------------------------------------------------------------------------


async def test_command_has_its_folder_and_its_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VALUE_OF_TEST", "read")
    script = 'import os, sys; sys.exit(f\'{os.environ["GIVEN"]} {os.environ["PLAIN"]}\')'
    speaks = UpstreamSettings(
        "speaks",
        command=[sys.executable, "-c", script],
        env={"GIVEN": "env:VALUE_OF_TEST", "PLAIN": "blue"},
    )
    words = [*counter(tmp_path)[:2], "notes.txt"]
    here = UpstreamSettings("here", command=words, cwd=str(tmp_path))
    async with Bench(tmp_path, names=(), more=[speaks, here]).serving() as bench:
        hello = message_of("initialize", introduction(), 1)
        answer, _ = await bench.post("/mcp/speaks", hello)
        assert "its last words: read blue" in answer["error"]["message"]
        await bench.post("/mcp/here", hello)
        assert effects(tmp_path / "notes.txt", "initialize") >= 1


async def test_names_may_always_have_a_prefix(tmp_path: Path) -> None:
    async with (
        Bench(tmp_path, names=("bank",), prefixes=True).serving() as bench,
        bench.client() as client,
    ):
        assert [tool.name for tool in await client.list_tools()] == ["bank__pay", "bank__look"]
        assert not (await client.call_tool("bank__pay", {"to": "ann"})).is_error


async def test_gateway_is_not_ready_without_an_upstream_that_is_required(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = f'[ -e {go} ] || exit 3; exec "$@"'
    words = ["/bin/sh", "-c", script, "x", *counter(tmp_path / "late")]
    late = UpstreamSettings("late", command=words, required=True)
    down = UpstreamSettings("down", command=["/no/such/program"])
    async with Bench(tmp_path, names=(), more=[late, down]).serving() as bench:

        async def ready() -> tuple[int, str]:
            async with (
                aiohttp.ClientSession() as http,
                http.get(f"{bench.url}/readyz") as answer,
            ):
                return answer.status, await answer.text()

        status, text = await ready()
        assert status == 503 and "the upstream late is down" in text
        go.touch()
        upstream = bench.gateway.upstreams["late"]
        upstream.starts.forgive()
        await bench.post("/mcp/late", message_of("initialize", introduction(), 1))
        await until(lambda: upstream.is_up)
        assert (await ready())[0] == 200


async def test_status_asks_for_a_login_where_callers_have_one(tmp_path: Path) -> None:
    """Section 8: servers may print anything. A command line with a token gets it."""

    async def verify(token: str) -> Identity | None:
        return Identity(token) if token == "token-of-ann" else None

    command = ["/bin/sh", "-c", "echo password of the database >&2; exit 3"]
    bad = UpstreamSettings("bad", command=command)
    async with Bench(tmp_path, names=(), more=[bad], auth=verify).serving() as bench:
        await bench.gateway.reach_all()
        async with aiohttp.ClientSession() as http, http.get(f"{bench.url}/status") as answer:
            text = await answer.text()
        assert answer.status == 401 and "password" not in text
        address = bench.url.removeprefix("http://")
        words = ["gateway", "status", "--http", address]
        code, said = await run(*words)
        assert code == 3 and f"wirecall login http://{address}/mcp, or --header" in said
        header = "Authorization: Bearer token-of-ann"
        code, said = await run(*words, "--header", header)
        assert code == 0 and "password of the database" in said


@pytest.mark.parametrize(
    ("stated", "asked"),
    [("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]"), ("127.0.0.1", "127.0.0.1"), ("host", "host")],
)
def test_status_asks_this_machine_for_a_gateway_that_serves_all_addresses(
    stated: str, asked: str
) -> None:
    assert _reachable(f"{stated}:8430") == f"{asked}:8430"


async def test_answer_is_kept_for_fifteen_minutes_and_the_arguments_are_not(tmp_path: Path) -> None:
    """Section 8, secrets at rest: the record has a digest of the arguments."""
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    async with Bench(tmp_path, names=("bank",), ledger=ledger).serving() as bench:
        session = await opened(bench)
        assert "result" in await called(bench, session, "pay", "k", to="argument-91c2")
        [record] = await (await bench.gateway.ledger()).list()
        assert record.params is None and record.outcome is not None
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
            [(kept,)] = database.execute("SELECT lease FROM wirecall_commands").fetchall()
            stored = "\n".join(database.iterdump())
        assert kept == 900.0  # of a record that has ended, it is the retention
        assert "argument-91c2" not in stored and b"paid" in (record.outcome.payload or b"")
