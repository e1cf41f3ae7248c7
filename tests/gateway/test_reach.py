"""How a server behind the gateway is reached: greetings that fail, and what is up by then."""

import sys
from pathlib import Path

import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import until
from tests.gateway.bench import Bench
from tests.gateway.faulty import called, faulty
from tests.gateway.fronts import introduction, message_of
from tests.ports import free_port
from wirecall import RpcError
from wirecall.gateway import UpstreamSettings
from wirecall.gateway.upstream import FAILURES
from wirecall.mcp.revisions import NAMES

HELLO = message_of("initialize", introduction(), 1)


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        ("code -32603", "theirs"),
        ("status 500", "500"),
        ("reset", "connection"),
        ("mute", "did not answer initialize within 0.1 s"),
    ],
)
async def test_command_in_front_of_a_server_that_refuses_another_session_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greeting: str, words: str
) -> None:
    """G6: the session is gone, and an answer to the next greeting does not answer the command."""
    monkeypatch.setattr("wirecall.gateway.upstream.ATTEMPT_PAUSE", 0.0)
    async with faulty(tmp_path) as (bench, server, session):
        monkeypatch.setattr("wirecall.gateway.session.START_TIME", 0.1)
        server.session = "2"
        server.greeting = greeting
        error = (await called(bench, session, "pay", "done"))["error"]
        assert (error["code"], error["data"]["ran"]) == (50210, "no"), error
        assert words in error["message"].lower()
        monkeypatch.setattr("wirecall.gateway.session.START_TIME", 60.0)
        server.greeting = ""
        assert "result" in await called(bench, session, "pay", "done")
        assert server.calls == ["pay"]


async def test_server_that_is_down_is_not_said_to_refuse_the_revision_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G11: the error names what is wrong, and not a setting that is right."""
    monkeypatch.setattr("wirecall.gateway.upstream.ATTEMPT_PAUSE", 0.0)
    url = f"http://127.0.0.1:{free_port()}/mcp"
    more = [UpstreamSettings("away", url=url, revision="2025-06-18")]
    async with Bench(tmp_path, names=(), more=more).serving() as bench:
        answer, _ = await bench.post("/mcp/away", HELLO)
        assert "refused" in answer["error"]["message"].lower()
        assert "is set for it" not in answer["error"]["message"], answer


async def test_breaker_counts_a_call_of_the_newest_revision_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G6: a server that is down is not greeted in the older way too."""
    monkeypatch.setattr("wirecall.gateway.upstream.ATTEMPT_PAUSE", 0.0)
    away = UpstreamSettings("away", url=f"http://127.0.0.1:{free_port()}/mcp")
    async with Bench(tmp_path, names=(), more=[away]).serving() as bench:
        upstream = bench.gateway.upstreams["away"]
        await until(lambda: upstream.breaker.reason)
        upstream.breaker.succeeded()
        with pytest.raises(RpcError, match="refused"):
            async with bench.client("/mcp/away", revision=NAMES[-1]) as client:
                await client.list_tools()
        assert upstream.breaker._failures == 1


@pytest.mark.parametrize("greeting", ["code -32603", "text garbage", "text {}", "status 401"])
async def test_breaker_opens_for_a_server_over_http_that_cannot_be_greeted(
    tmp_path: Path, greeting: str
) -> None:
    """G6: an answer that refuses the greeting does not show that the server serves."""
    async with faulty(tmp_path) as (_, server, _session):
        server.greeting = greeting
        more = [UpstreamSettings("odd", url=f"http://127.0.0.1:{server.port}/mcp")]
        (tmp_path / "odd").mkdir()
        async with Bench(tmp_path / "odd", names=(), more=more).serving() as odd:
            upstream = odd.gateway.upstreams["odd"]
            for _ in range(FAILURES):
                answer, _ = await odd.post("/mcp/odd", HELLO)
                assert answer["error"]
                assert not upstream.is_up, answer
            assert upstream.breaker.is_open


ONE_ONLY = """
import json, os, sys

try:
    os.mkdir(sys.argv[1])
except FileExistsError:
    sys.exit("it runs already")
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    info = {"name": "x", "version": "1"}
    capabilities = {"tools": {}}
    result = {"protocolVersion": "2025-11-25", "capabilities": capabilities, "serverInfo": info}
    if message["method"] == "tools/list":
        result = {"tools": []}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


async def test_server_that_runs_once_is_up_although_a_second_process_ends(tmp_path: Path) -> None:
    """G6: the answers of the first show it; `/readyz` may depend on it."""
    command = [sys.executable, "-c", ONE_ONLY, str(tmp_path / "lock")]
    one = UpstreamSettings("one", command=command, share="session")
    async with Bench(tmp_path, names=(), more=[one]).serving() as bench:
        upstream = bench.gateway.upstreams["one"]
        await until(lambda: ("one", "tools") in bench.gateway.seen)
        _, session = await bench.post("/mcp/one", HELLO)
        answer, _ = await bench.post("/mcp/one", message_of("tools/list", None, 2), session)
        assert "it runs already" in answer["error"]["message"]
        assert not upstream.is_up
        await bench.gateway.entries(upstream, "tools", "", bench.gateway._someone())
        assert upstream.is_up


async def test_greeting_ends_although_its_notification_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad input: a server that answers `initialize`, and hangs at what follows it."""
    async with faulty(tmp_path) as (_, server, _session):
        server.ignored.add("notifications/initialized")
        more = [UpstreamSettings("odd", url=f"http://127.0.0.1:{server.port}/mcp")]
        (tmp_path / "odd").mkdir()
        monkeypatch.setattr("wirecall.gateway.session.START_TIME", 0.1)
        async with Bench(tmp_path / "odd", names=(), more=more).serving() as odd:
            answer, _ = await odd.post("/mcp/odd", HELLO)
        words = "it did not take notifications/initialized within 0.1 s"
        assert answer["error"]["code"] == 50210 and words in answer["error"]["message"]
