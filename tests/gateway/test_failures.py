"""The failure table: each way in which a call may end, for a tool that reads and for a command."""

import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import until
from tests.gateway.bench import Bench
from tests.gateway.faulty import called, faulty
from tests.gateway.fronts import introduction, message_of
from tests.ports import free_port
from wirecall.gateway import UpstreamSettings
from wirecall.gateway.upstream import FAILURES

BOTH = ["pay", "look"]
REFUSED = ["status 301", "status 307", "status 400", "status 401", "status 403", "status 429"]
ANSWERED_REFUSALS = [-32700, -32600, -32601, -32602, -32020, -32021, -32022]
LOST = ["status 303", "status 500", "status 503", "reset", "half", "text garbage", "text "]
LOST += ['text {"jsonrpc": "2.0", "id": 99999, "result": {}}', "text []", "status 200"]


@pytest.mark.parametrize("then", REFUSED)
async def test_refusal_of_a_command_releases_it(tmp_path: Path, then: str) -> None:
    """G6: 50210, ran = no; the same key is sent to the server again."""
    async with faulty(tmp_path) as (bench, server, session):
        for count in (1, 2):
            error = (await called(bench, session, "pay", then))["error"]
            assert (error["code"], error["data"]["ran"]) == (50210, "no")
            assert error["data"]["upstream"] == "faulty"
            assert len(server.calls) == count


@pytest.mark.parametrize("then", REFUSED)
async def test_refusal_of_a_query_is_an_error(tmp_path: Path, then: str) -> None:
    """G6: 50210, and the server is not asked a second time."""
    async with faulty(tmp_path) as (bench, server, session):
        error = (await called(bench, session, "look", then))["error"]
        assert (error["code"], error["data"]["ran"]) == (50210, "no")
        assert server.calls == ["look"]


@pytest.mark.parametrize("tool", BOTH)
@pytest.mark.parametrize("code", ANSWERED_REFUSALS)
async def test_refusal_in_an_answer_is_passed_on(tmp_path: Path, tool: str, code: int) -> None:
    """G6: in the server's own words; a command is released."""
    async with faulty(tmp_path) as (bench, server, session):
        for count in (1, 2):
            error = (await called(bench, session, tool, f"code {code}"))["error"]
            assert (error["code"], error["message"]) == (code, "theirs")
            assert error["data"]["x"] == 0.5
            assert len(server.calls) == count


@pytest.mark.parametrize("tool", BOTH)
@pytest.mark.parametrize("then", ["code -32000", "code 7", "is_error", "done"])
async def test_answer_of_a_command_is_recorded(tmp_path: Path, tool: str, then: str) -> None:
    """G6: a command is replayed, a tool that reads is asked again."""
    async with faulty(tmp_path) as (bench, server, session):
        answers = [await called(bench, session, tool, then) for _ in range(2)]
        assert len(server.calls) == (1 if tool == "pay" else 2)
        for answer in answers:
            if then.startswith("code"):
                assert (answer["error"]["code"], answer["error"]["message"]) == (
                    int(then.removeprefix("code ")),
                    "theirs",
                )
            else:
                assert answer["result"]["isError"] is (then == "is_error")


@pytest.mark.parametrize("then", LOST)
async def test_lost_answer_of_a_command_is_unknown(tmp_path: Path, then: str) -> None:
    """G6, X10: 50910 with the upstream and the reason, once; the same key is not sent again."""
    async with faulty(tmp_path) as (bench, server, session):
        error = (await called(bench, session, "pay", then))["error"]
        assert (error["code"], error["data"]["ran"]) == (50910, "unknown")
        assert error["data"]["upstream"] == "faulty" and "faulty: " in error["message"]
        again = (await called(bench, session, "pay", then))["error"]
        assert (again["code"], again["data"]["ran"]) == (50910, "unknown")
        assert server.calls == ["pay"]
        done = await called(bench, session, "look", "done")
        assert "result" in done, "the link stays, or is made again"


@pytest.mark.parametrize("then", LOST)
async def test_lost_answer_of_a_query_is_asked_for_a_second_time(tmp_path: Path, then: str) -> None:
    """G6: then it is an error that names the upstream."""
    async with faulty(tmp_path) as (bench, server, session):
        error = (await called(bench, session, "look", then))["error"]
        assert error["code"] == 50210 and error["data"]["upstream"] == "faulty"
        assert server.calls == ["look", "look"]


@pytest.mark.parametrize(("tool", "code", "count"), [("pay", 50910, 1), ("look", 50210, 2)])
async def test_call_that_is_not_answered_ends_with_its_timeout(
    tmp_path: Path, tool: str, code: int, count: int
) -> None:
    """G6: `timeout` of an upstream, for commands and queries."""
    async with faulty(tmp_path, timeout=0.1) as (bench, server, session):
        error = (await called(bench, session, tool, "mute"))["error"]
        assert error["code"] == code and "no answer within 0.1 s" in error["message"]
        assert len(server.calls) == count


@pytest.mark.parametrize("tool", BOTH)
@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://127.0.0.1:{port}/mcp", "refused"),
        ("http://no-such-host.invalid/mcp", "no-such-host.invalid"),
        ("https://127.0.0.1:{port}/mcp", "refused"),
    ],
)
async def test_call_without_a_link_does_not_run(
    tmp_path: Path, tool: str, url: str, why: str
) -> None:
    """G6: 50210, ran = no, with the upstream and the reason; the others are served."""
    more = [UpstreamSettings("away", url=url.format(port=free_port()))]
    async with Bench(tmp_path, names=("bank",), more=more).serving() as bench:
        _, session = await bench.post("/mcp", message_of("initialize", introduction(), 1))
        assert session is not None
        error = (await called(bench, session, f"away__{tool}", "done", "away"))["error"]
        assert (error["code"], error["data"]["ran"]) == (50210, "no"), error
        assert error["data"]["upstream"] == "away" and why in error["message"].lower()
        assert "result" in await called(bench, session, "look", "done", "bank")
    await asyncio.get_running_loop().shutdown_default_executor()  # it looked for the host


@pytest.mark.parametrize("tool", BOTH)
async def test_call_of_a_server_without_tls_does_not_run(tmp_path: Path, tool: str) -> None:
    """G6: an address with https in front of a server that speaks plain HTTP."""
    async with faulty(tmp_path) as (_, server, _session):
        more = [UpstreamSettings("away", url=f"https://127.0.0.1:{server.port}/mcp")]
        (tmp_path / "tls").mkdir()
        async with Bench(tmp_path / "tls", names=("bank",), more=more).serving() as bench:
            _, session = await bench.post("/mcp", message_of("initialize", introduction(), 1))
            assert session is not None
            error = (await called(bench, session, f"away__{tool}", "done", "away"))["error"]
        assert (error["code"], error["data"]["ran"]) == (50210, "no"), error
        assert "it does not agree to TLS (https)" in error["message"]
        assert server.calls == []


@pytest.mark.parametrize(("tool", "code", "count"), [("pay", 50910, 1), ("look", 50210, 4)])
async def test_answer_that_is_too_long_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, code: int, count: int
) -> None:
    """G6: above 16 MB, here above 10 kB; the same key is not sent to the server again."""
    monkeypatch.setattr("wirecall.gateway.upstream.MAX_BYTES", 10_000)
    async with faulty(tmp_path) as (bench, server, session):
        errors = [
            (await called(bench, session, tool, f"text {'x' * 20_000}"))["error"] for _ in range(2)
        ]
        assert [error["code"] for error in errors] == [code, code]
        assert "10000 are allowed" in errors[0]["message"]
        assert len(server.calls) == count


async def test_call_in_front_of_an_open_breaker_is_refused_at_once(tmp_path: Path) -> None:
    """G6: after five links in a row that failed."""
    more = [UpstreamSettings("away", url=f"http://127.0.0.1:{free_port()}/mcp")]
    async with Bench(tmp_path, names=(), more=more).serving() as bench:
        upstream = bench.gateway.upstreams["away"]
        for _ in range(FAILURES):
            upstream.breaker.failed("their reason")
        call = message_of("initialize", introduction(), 1)
        answer, _ = await bench.post("/mcp/away", call)
        assert (
            answer["error"]["code"] == 50210 and "not tried again yet" in answer["error"]["message"]
        )
        status = (await bench.gateway.status())["upstreams"]["away"]
        assert status["breaker"] == "open"


async def test_server_over_http_that_goes_away_is_down_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G6: three attempts for each call, then the breaker; a command never tries whether it is back."""
    monkeypatch.setattr("wirecall.gateway.upstream.ATTEMPT_PAUSE", 0.0)
    async with faulty(tmp_path) as (bench, server, session):

        async def state() -> tuple[object, object]:
            found = (await bench.gateway.status())["upstreams"]["faulty"]
            return found["up"], found["breaker"]

        assert await state() == (True, "closed")
        await server.go_away()
        for count in range(1, FAILURES + 1):
            error = (await called(bench, session, "pay" if count % 2 else "look", "done"))["error"]
            assert (error["code"], error["data"]["ran"]) == (50210, "no")
            assert "Connection refused" in error["message"]
            assert await state() == (False, "open" if count == FAILURES else "closed")
        await server.begin()
        server.asked.clear()
        error = (await called(bench, session, "pay", "done"))["error"]
        assert "not tried again yet" in error["message"] and server.asked == []
        monkeypatch.setattr("wirecall.gateway.upstream.REST", 0.0)
        assert "result" in await called(bench, session, "pay", "done")
        assert server.asked == ["ping", "tools/call"]
        assert await state() == (True, "closed")


async def test_call_waits_for_a_server_over_http_that_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G6: a call whose first attempt found nothing runs once when the server is back."""
    monkeypatch.setattr("wirecall.gateway.upstream.ATTEMPTS", 1000)
    monkeypatch.setattr("wirecall.gateway.upstream.ATTEMPT_PAUSE", 0.02)
    async with faulty(tmp_path) as (bench, server, session):
        await server.go_away()
        calls = [asyncio.create_task(called(bench, session, tool, "done")) for tool in BOTH]
        upstream = bench.gateway.upstreams["faulty"]
        await until(lambda: upstream.is_cut)
        await server.begin()
        answers = await asyncio.gather(*calls)
        assert all("result" in answer for answer in answers)
        assert sorted(server.calls) == sorted(BOTH)


async def test_gateway_is_not_ready_without_an_upstream_that_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G9: and it is ready when that is back, although no call comes."""
    monkeypatch.setattr("wirecall.gateway.upstream.ATTEMPT_PAUSE", 0.0)
    monkeypatch.setattr("wirecall.gateway.gateway.BACK_AFTER", 0.01)
    async with faulty(tmp_path, required=True) as (bench, server, session):

        async def ready() -> tuple[int, str]:
            async with aiohttp.ClientSession() as http, http.get(f"{bench.url}/readyz") as answer:
                return answer.status, await answer.text()

        assert (await ready())[0] == 200
        await server.go_away()
        assert "error" in await called(bench, session, "look", "done")
        status, text = await ready()
        assert status == 503 and "the upstream faulty is down" in text
        await server.begin()
        await until(lambda: bench.gateway.upstreams["faulty"].is_up)
        assert (await ready())[0] == 200


async def test_call_beyond_the_queue_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G6: `in_flight` calls run, the queue is full, and the next one gets 50210, ran = no."""
    monkeypatch.setattr("wirecall.gateway.upstream.QUEUE", 1)
    async with faulty(tmp_path, in_flight=1) as (bench, server, session):
        first = asyncio.create_task(called(bench, session, "look", "mute"))
        await until(lambda: server.calls)
        second = asyncio.create_task(called(bench, session, "look", "done"))
        await until(lambda: bench.gateway.upstreams["faulty"].places.waiting == 1)
        for tool in ("pay", "look"):
            error = (await called(bench, session, tool, "done"))["error"]
            assert (error["code"], error["data"]["ran"]) == (50210, "no")
            assert "in flight" in error["message"]
        assert server.calls == ["look"]
        server.end.set()
        assert "result" in await first and "result" in await second


async def test_server_that_quits_is_down_in_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G9: it could be started, but not greeted; its last words are in the status and on stderr."""
    command = [sys.executable, "-c", "import sys; sys.exit('no licence\\n\\nbuy one')"]
    more = [UpstreamSettings("quits", command=command)]
    async with Bench(tmp_path, names=("bank",), more=more).serving() as bench:
        await bench.gateway.reach_all()
        found = (await bench.gateway.status())["upstreams"]
        assert (found["quits"]["up"], found["quits"]["sessions"]) == (False, 0)
        assert found["quits"]["pids"] == [] and "no licence" in found["quits"]["reason"]
        assert (found["bank"]["up"], found["bank"]["sessions"]) == (True, 1)
        assert len(found["bank"]["pids"]) == 1 and found["bank"]["in_flight"] == 0
    lines = capsys.readouterr().err.splitlines()
    [line] = {line for line in lines if line.startswith("quits:")}
    expected = "quits: the server process ended with 1; its last words: no licence buy one"
    assert line == expected, "on one line"
    assert "bank: ready, 2 tools" in lines
