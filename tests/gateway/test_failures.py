"""The failure table: each way in which a call may end, for a tool that reads and for a command."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import SlowProxy, until
from tests.gateway.bench import Bench
from tests.gateway.fronts import introduction, message_of
from tests.ports import free_port
from wirecall.gateway import UpstreamSettings
from wirecall.gateway.upstream import FAILURES

TOOLS = [
    {"name": "pay", "inputSchema": {"type": "object"}},
    {"name": "look", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
]
JSON = {"Content-Type": "application/json"}


class Faulty:
    """A server of 2025-11-25 over HTTP, whose calls end as their argument `then` says."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.end = asyncio.Event()
        # The paths of requests to other addresses.
        self.elsewhere: list[str] = []
        # The connections on which calls have come.
        self.connections: list[asyncio.BaseTransport] = []

    @property
    def has_none_open(self) -> bool:
        """Whether all of them are closed."""
        return all(each.is_closing() for each in self.connections)

    async def stray(self, request: web.Request) -> web.Response:
        self.elsewhere.append(request.path)
        return web.Response(status=404)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        id = message.get("id")
        method = message["method"]
        if id is None:
            return web.Response(status=202)
        result: dict[str, Any] = {"content": [{"type": "text", "text": "done"}]}
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "faulty", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        elif method == "server/discover":
            return web.Response(status=400)
        elif method == "tools/list":
            result = {"tools": TOOLS}
        elif method == "tools/call":
            params = message["params"]
            assert request.transport is not None
            self.connections.append(request.transport)
            self.calls.append(params["name"])
            return await self._ended(request, id, params["arguments"]["then"], result)
        return web.json_response({"jsonrpc": "2.0", "id": id, "result": result})

    async def _ended(
        self, request: web.Request, id: Any, then: str, result: dict[str, Any]
    ) -> web.StreamResponse:
        kind, _, what = then.partition(" ")
        assert request.transport is not None
        if kind == "status":
            return web.Response(status=int(what), headers={"Location": "/elsewhere"})
        if kind == "link":
            link = {"type": "resource_link", "name": "x", "uri": str(request.url.with_path(what))}
            result["content"] = [link]
        if kind == "code":
            error = {"code": int(what), "message": "theirs", "data": {"x": 0.5}}
            return web.json_response({"jsonrpc": "2.0", "id": id, "error": error})
        if kind == "reset":
            request.transport.abort()
        if kind == "text":
            return web.Response(text=what, headers=JSON)
        if kind == "half":
            answer = web.StreamResponse(headers={**JSON, "Content-Length": "1000"})
            await answer.prepare(request)
            await answer.write(b'{"jsonrpc": "2.0", ')
            request.transport.close()
            return answer
        if kind == "mute":
            await self.end.wait()
        result["isError"] = then == "is_error"
        return web.json_response({"jsonrpc": "2.0", "id": id, "result": result})


@asynccontextmanager
async def faulty(
    folder: Path, *, keepalive: float = 75.0, delay: float = 0.0, **own: Any
) -> AsyncIterator[tuple[Bench, Faulty, str]]:
    """A gateway in front of it, and a session there.

    The server closes connections that are idle for `keepalive` seconds; bytes need `delay`.
    """
    server = Faulty()
    app = web.Application()
    app.router.add_route("*", "/mcp", server.serve)
    app.router.add_route("*", "/{path:.+}", server.stray)
    runner = web.AppRunner(app, shutdown_timeout=0.1, keepalive_timeout=keepalive)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with AsyncExitStack() as stack:
            if delay:
                proxy = SlowProxy(runner.addresses[0][1], delay)
                url = (await stack.enter_async_context(proxy)).url
            more = [UpstreamSettings("faulty", url=f"{url}/mcp", **own)]
            bench = Bench(folder, names=(), more=more)
            await stack.enter_async_context(bench.serving())
            _, session = await bench.post(
                "/mcp/faulty", message_of("initialize", introduction(), 1)
            )
            assert session is not None
            await bench.post("/mcp/faulty", message_of("tools/list", None, 2), session)
            yield bench, server, session
    finally:
        server.end.set()
        await runner.cleanup()


async def called(bench: Bench, session: str, tool: str, then: str, path: str = "faulty") -> Any:
    """Call a tool with one key; return the answer."""
    key = {"io.wirecall/idempotency-key": "k"}
    params = {"name": tool, "arguments": {"then": then}, "_meta": key}
    answer, _ = await bench.post(f"/mcp/{path}", message_of("tools/call", params, 3), session)
    return answer


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


@pytest.mark.parametrize("tool", ["pay", "look"])
@pytest.mark.parametrize("code", ANSWERED_REFUSALS)
async def test_refusal_in_an_answer_is_passed_on(tmp_path: Path, tool: str, code: int) -> None:
    """G6: in the server's own words; a command is released."""
    async with faulty(tmp_path) as (bench, server, session):
        for count in (1, 2):
            error = (await called(bench, session, tool, f"code {code}"))["error"]
            assert (error["code"], error["message"]) == (code, "theirs")
            assert error["data"]["x"] == 0.5
            assert len(server.calls) == count


@pytest.mark.parametrize("tool", ["pay", "look"])
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


@pytest.mark.parametrize("tool", ["pay", "look"])
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
    command = [sys.executable, "-c", "import sys; sys.exit('no licence')"]
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
    assert line == "quits: the server process ended with 1; its last words: no licence"
    assert "bank: ready, 2 tools" in lines
