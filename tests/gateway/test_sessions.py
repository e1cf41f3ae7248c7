"""How long the gateway keeps a session or a process of an upstream, and how it is opened."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from aiohttp import web

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import served, until
from tests.gateway.bench import Bench, Held
from tests.gateway.fronts import counter, effects, introduction, message_of
from wirecall import App, Context
from wirecall.errors import UsageError
from wirecall.gateway import UpstreamSettings
from wirecall.gateway.forward import REFUSED
from wirecall.gateway.fronts import MergedFront
from wirecall.gateway.gateway import MOST_SESSIONS
from wirecall.mcp.revisions import NAMES

OLD = NAMES[3]
IDLE = 60.0


async def pids(bench: Bench, name: str = "bank") -> list[int]:
    found = (await bench.gateway.status())["upstreams"][name]["pids"]
    return [pid for pid in found if psutil.pid_exists(pid)]


async def sessions(bench: Bench, name: str = "bank") -> int:
    return int((await bench.gateway.status())["upstreams"][name]["sessions"])


@asynccontextmanager
async def banked(folder: Path, **own: Any) -> AsyncIterator[tuple[Bench, Held]]:
    """A gateway in front of one process, with a clock that the test moves."""
    clock = Held()
    bench = Bench(folder, names=("bank",), own={"bank": own}, clock=clock)
    async with bench.serving():
        yield bench, clock


class Shop:
    """A server over HTTP with sessions, which notes what it is asked."""

    def __init__(self, revision: str | None = None) -> None:
        # The revision that it answers, whatever was offered. None: the one that was offered.
        self.revision = revision
        # The method of each message, and DELETE.
        self.asked: list[str] = []
        # The session of each call of a tool.
        self.called: list[str | None] = []
        self.open: set[str] = set()
        self.go = asyncio.Event()

    async def serve(self, request: web.Request) -> web.Response:
        session = request.headers.get("Mcp-Session-Id")
        if request.method == "DELETE":
            self.asked.append("DELETE")
            self.open.discard(session or "")
            return web.Response(status=204)
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        self.asked.append(message["method"])
        if "id" not in message:
            return web.Response(status=202)
        if message["method"] != "initialize" and session not in self.open:
            return web.Response(status=404)
        head = {"jsonrpc": "2.0", "id": message["id"]}
        headers = {}
        if message["method"] == "initialize":
            headers["Mcp-Session-Id"] = f"session-{len(self.asked)}"
            self.open.add(headers["Mcp-Session-Id"])
        answer = await self.answer(message["method"], message.get("params", {}), session)
        return web.json_response({**head, **answer}, headers=headers)

    async def answer(self, method: str, params: Any, session: str | None) -> dict[str, Any]:
        if method == "initialize":
            return {
                "result": {
                    "protocolVersion": self.revision or params["protocolVersion"],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": "shop", "version": "1"},
                }
            }
        if method == "tools/list":
            schema = {"type": "object"}
            return {"result": {"tools": [{"name": "pay", "inputSchema": schema}]}}
        if method != "tools/call":
            return {"error": {"code": -32601, "message": "no such method"}}
        self.called.append(session)
        arguments = params.get("arguments", {})
        if "error" in arguments:
            return {"error": arguments["error"]}
        if arguments.get("wait"):
            await self.go.wait()
        return {"result": {"content": [{"type": "text", "text": "paid"}]}}


@asynccontextmanager
async def shopped(
    folder: Path, shop: Shop | None = None, **own: Any
) -> AsyncIterator[tuple[Bench, Shop, Held]]:
    """A gateway in front of a server over HTTP."""
    clock = Held()
    shop = shop or Shop()
    app = web.Application()
    app.router.add_route("*", "/mcp", shop.serve)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        more = [UpstreamSettings("shop", url=f"http://127.0.0.1:{port}/mcp", **own)]
        async with Bench(folder, names=(), more=more, clock=clock).serving() as bench:
            yield bench, shop, clock
    finally:
        await runner.cleanup()


# --- idle -----------------------------------------------------------------------------------------


async def test_gateway_ends_a_process_that_is_idle_and_starts_it_for_the_next_call(
    tmp_path: Path,
) -> None:
    """G10: `idle` ends the process; a call before that counts as use."""
    async with banked(tmp_path, idle=IDLE) as (bench, clock), bench.client("/mcp/bank") as client:
        await client.call_tool("look")
        [first] = await pids(bench)
        await until(lambda: clock.sleeping)
        clock.move(IDLE - 1)
        await client.call_tool("look")
        clock.move(1)
        await until(lambda: clock.sleeping)
        assert await pids(bench) == [first]
        clock.move(IDLE)
        await until(lambda: not psutil.pid_exists(first))
        assert await sessions(bench) == 0
        for _ in range(7):  # an end that the gateway makes does not count as a crash
            assert not (await client.call_tool("look")).is_error
            [pid] = await pids(bench)
            await until(lambda: clock.sleeping)
            clock.move(IDLE)
            await until(lambda pid=pid: not psutil.pid_exists(pid))  # type: ignore[misc]


async def test_gateway_does_not_end_a_process_that_runs_a_call(tmp_path: Path) -> None:
    """G10: a call in flight is use, also after its caller has left."""
    file = tmp_path / "bank"
    async with banked(tmp_path, idle=IDLE) as (bench, clock):
        _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
        params = {"name": "pay", "arguments": {"to": "ann", "then": "wait"}}
        paying = asyncio.create_task(
            bench.post("/mcp/bank", message_of("tools/call", params, 2), session)
        )
        await until(lambda: effects(file) == 1)
        [pid] = await pids(bench)
        clock.move(IDLE)
        paying.cancel()
        await asyncio.wait([paying])
        clock.move(IDLE)
        file.with_suffix(".go").touch()
        again, _ = await bench.post("/mcp/bank", message_of("tools/call", params, 3), session)
        assert "result" in again and effects(file) == 1
        assert await pids(bench) == [pid]
        await until(lambda: clock.sleeping)
        clock.move(IDLE)
        await until(lambda: not psutil.pid_exists(pid))


async def test_gateway_ends_a_session_over_http_that_is_idle(tmp_path: Path) -> None:
    """G10: the server is asked to end its session, and the next call opens another."""
    async with (
        shopped(tmp_path, idle=IDLE) as (bench, shop, clock),
        bench.client("/mcp/shop", revision=OLD) as client,
    ):
        await client.call_tool("pay")
        await until(lambda: clock.sleeping)
        clock.move(IDLE)
        await until(lambda: not shop.open)
        assert not (await client.call_tool("pay", {"to": "bob"})).is_error
        assert shop.asked.count("initialize") == 2 and len({*shop.called}) == 2


async def test_gateway_repeats_subscriptions_after_an_idle_end(tmp_path: Path) -> None:
    """G2: the next process gets the log level and the subscriptions of the first."""
    async with banked(tmp_path, idle=IDLE) as (bench, clock):
        _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
        wanted = {"uri": "file:///a"}
        await bench.post("/mcp/bank", message_of("resources/subscribe", wanted, 2), session)
        [pid] = await pids(bench)
        await until(lambda: clock.sleeping)
        clock.move(IDLE)
        await until(lambda: not psutil.pid_exists(pid))
        look = message_of("tools/call", {"name": "look"}, 3)
        answer, _ = await bench.post("/mcp/bank", look, session)
        assert "result" in answer
        conversation = bench.gateway._conversations["bank", ""].result()
        assert [*conversation.wishes.subscriptions] == ["file:///a"]


async def test_gateway_ends_the_session_of_one_client_ten_minutes_after_its_last_call(
    tmp_path: Path,
) -> None:
    """G10: `share = "session"` without `idle`; the session of the client continues after that."""
    async with shopped(tmp_path, share="session") as (bench, shop, clock):
        _, session = await bench.post("/mcp/shop", message_of("initialize", introduction(), 1))

        async def pay(to: str) -> None:
            params = {"name": "pay", "arguments": {"to": to}}
            answer, _ = await bench.post("/mcp/shop", message_of("tools/call", params, 2), session)
            assert "result" in answer

        await pay("ann")
        await until(lambda: len(clock.sleeping) == len(shop.open))
        clock.move(599.0)
        await pay("bob")
        [own] = {*shop.called}
        clock.move(1.0)
        await until(lambda: shop.open == {own} and len(clock.sleeping) == 1)
        clock.move(599.0)
        await until(lambda: not shop.open)
        await pay("eve")
        assert shop.called[-1] not in (None, own)


async def test_gateway_starts_a_process_for_each_of_many_sessions(tmp_path: Path) -> None:
    """G10: the limit of starts a minute is for a process that crashes."""
    bench = Bench(tmp_path, names=("bank",), own={"bank": {"share": "session"}})
    look = message_of("tools/call", {"name": "look"}, 2)
    found = set()
    async with bench.serving():
        for _ in range(7):
            _, session = await bench.post("/mcp/bank", message_of("initialize", introduction(), 1))
            answer, _ = await bench.post("/mcp/bank", look, session)
            found.add(answer["result"]["pid"])
        assert found <= {*await pids(bench)}, "the status names every process"
    assert len(found) == 7


# --- revision -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stated", NAMES[:4])
@pytest.mark.parametrize("client", [NAMES[3], NAMES[-1]])
async def test_gateway_speaks_the_revision_of_the_settings(
    tmp_path: Path, stated: str, client: str
) -> None:
    """G12: with a handshake, whatever the client speaks."""
    async with (
        banked(tmp_path, revision=stated) as (bench, _),
        bench.client("/mcp/bank", revision=client) as asking,
    ):
        assert asking.revision == client
        assert not (await asking.call_tool("pay", {"to": "ann"})).is_error
    [greeting] = [
        line for line in (tmp_path / "bank").read_text().splitlines() if "initialize " in line
    ]
    assert json.loads(greeting.removeprefix("initialize "))["protocolVersion"] == stated


@pytest.mark.parametrize("client", [NAMES[3], NAMES[-1]])
async def test_gateway_speaks_the_newest_revision_of_the_settings(
    tmp_path: Path, client: str
) -> None:
    """G12: without a handshake, although the server has both and the client has one."""
    requests: list[str] = []

    async def middleware(ctx: Context, call_next: Any) -> Any:
        requests.append(ctx.headers.get("mcp-protocol-version", ""))
        return await call_next(ctx)

    behind = App("behind", ledger="memory:", middleware=[middleware])

    @behind.command(key="off")
    def pay() -> str:
        return "paid"

    async with served(behind) as url:
        more = [UpstreamSettings("behind", url=f"{url}/mcp", revision=NAMES[-1])]
        bench = Bench(tmp_path, names=(), more=more)
        async with bench.serving(), bench.client("/mcp/behind", revision=client) as asking:
            assert not (await asking.call_tool("pay")).is_error
    assert requests == [NAMES[-1]]


async def refused(bench: Bench, name: str) -> str:
    """The error of a call whose upstream does not have the revision of its settings."""
    answer, _ = await bench.post(f"/mcp/{name}", message_of("initialize", introduction(), 1))
    assert (answer["error"]["code"], answer["error"]["data"]["ran"]) == (50210, "no")
    return str(answer["error"]["message"])


async def test_gateway_names_the_revision_that_a_server_refuses(tmp_path: Path) -> None:
    """G12: another revision, an error, and no `server/discover`: each names the setting."""
    async with shopped(tmp_path, Shop(NAMES[1]), revision=NAMES[2]) as (bench, _, _):
        reason = await refused(bench, "shop")
        assert f'revision = "{NAMES[2]}"' in reason and NAMES[1] in reason
    async with shopped(tmp_path, revision=NAMES[-1]) as (bench, shop, _):
        assert f'revision = "{NAMES[-1]}"' in await refused(bench, "shop")
        assert "tools/list" not in shop.asked
    more = [UpstreamSettings("new", command=[*counter(tmp_path / "new"), "newest"], revision=OLD)]
    async with Bench(tmp_path, names=(), more=more).serving() as bench:
        assert f'revision = "{OLD}"' in await refused(bench, "new")


# --- share = "call" -------------------------------------------------------------------------------


async def test_gateway_opens_a_session_for_each_call_and_ends_it(tmp_path: Path) -> None:
    """G10: `share = "call"`, also for calls at the same time; lists are read each time."""
    async with (
        shopped(tmp_path, share="call") as (bench, shop, _),
        bench.client("/mcp/shop", revision=OLD) as client,
    ):
        shop.go.set()
        paying = [client.call_tool("pay", {"to": str(to), "wait": True}) for to in range(5)]
        answers = await asyncio.gather(*paying)
        assert not any(answer.is_error for answer in answers)
        assert len({*shop.called}) == 5 and None not in shop.called
        await until(lambda: not shop.open)
        assert shop.asked.count("DELETE") == shop.asked.count("initialize")
        assert await sessions(bench, "shop") == 0
        asked = shop.asked.count("tools/list")
        async with bench.client("/mcp", revision=OLD) as other:
            await other.list_tools()
            await other.list_tools()
        assert shop.asked.count("tools/list") == asked + 2


async def test_gateway_keeps_the_session_of_a_call_whose_caller_has_left(tmp_path: Path) -> None:
    """G5: the answer of the command is awaited, recorded and given again; then the session ends."""
    async with shopped(tmp_path, share="call") as (bench, shop, _):
        _, session = await bench.post("/mcp/shop", message_of("initialize", introduction(), 1))
        await until(lambda: not shop.open)
        call = {"name": "pay", "arguments": {"wait": True}}
        paying = asyncio.create_task(
            bench.post("/mcp/shop", message_of("tools/call", call, 2), session)
        )
        await until(lambda: shop.called)
        paying.cancel()
        await asyncio.wait([paying])
        again = asyncio.create_task(
            bench.post("/mcp/shop", message_of("tools/call", call, 3), session)
        )
        await until(lambda: shop.asked.count("initialize") > shop.asked.count("DELETE") + 1)
        assert shop.called[0] in shop.open
        shop.go.set()
        answer, _ = await again
        assert "result" in answer and len(shop.called) == 1
        await until(lambda: not shop.open)


async def test_gateway_refuses_a_subscription_in_a_session_of_one_call(tmp_path: Path) -> None:
    """G10: the session would end before the first change."""
    async with shopped(tmp_path, share="call") as (bench, shop, _):
        _, session = await bench.post("/mcp/shop", message_of("initialize", introduction(), 1))
        wanted = message_of("resources/subscribe", {"uri": "file:///a"}, 2)
        answer, _ = await bench.post("/mcp/shop", wanted, session)
        assert answer["error"]["code"] == -32600
        assert "share" in answer["error"]["data"]["reason"]
        assert "resources/subscribe" not in shop.asked


async def test_gateway_limits_the_sessions_of_calls(tmp_path: Path) -> None:
    """Section 8: 16 sessions of one upstream; the calls beyond them wait."""
    async with (
        shopped(tmp_path, share="call") as (bench, shop, _),
        bench.client("/mcp/shop", revision=OLD) as client,
    ):
        paying = [
            asyncio.create_task(client.call_tool("pay", {"to": str(to), "wait": True}))
            for to in range(MOST_SESSIONS + 4)
        ]
        await until(lambda: len(shop.called) == MOST_SESSIONS)
        assert len(shop.open) == MOST_SESSIONS
        shop.go.set()
        assert not any(answer.is_error for answer in await asyncio.gather(*paying))
        assert len({*shop.called}) == MOST_SESSIONS + 4


async def test_gateway_limits_the_sessions_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Section 8: 16 sessions of one upstream; one that is unused ends, and a call may wait for it."""
    hello = message_of("initialize", introduction(), 1)
    async with shopped(tmp_path, share="session") as (bench, shop, clock):
        clients = []
        for _ in range(MOST_SESSIONS + 2):
            _, session = await bench.post("/mcp/shop", hello)
            clients.append(session)

        async def pay(client: int, *, wait: bool = False) -> Any:
            params = {"name": "pay", "arguments": {"to": str(client), "wait": wait}}
            message = message_of("tools/call", params, 2)
            return (await bench.post("/mcp/shop", message, clients[client]))[0]

        *_, last, further = range(MOST_SESSIONS + 2)
        # Each is used a second after the one before it.
        for client in range(MOST_SESSIONS):
            assert "result" in await pay(client)
            clock.now += 1.0
        assert "result" in await pay(0)
        second = shop.called[1]
        assert "result" in await pay(last)
        await until(lambda: second not in shop.open)
        assert len(shop.open) == MOST_SESSIONS and shop.called[0] in shop.open
        # All of them are in use.
        busy = [client for client in range(MOST_SESSIONS + 1) if client != 1]
        before = len(shop.called)
        paying = [asyncio.create_task(pay(client, wait=True)) for client in busy]
        await until(lambda: len(shop.called) == before + MOST_SESSIONS)
        with monkeypatch.context() as patch:
            patch.setattr("wirecall.gateway.gateway.LINK_TIME", 0.01)
            error = (await pay(further))["error"]
        assert (error["code"], error["data"]["ran"]) == (50210, "no")
        assert "it has 16 sessions, and all of them are in use" in error["message"]
        waiting = asyncio.create_task(pay(further))
        shop.go.set()
        assert all("result" in answer for answer in await asyncio.gather(waiting, *paying))
        assert len(shop.open) <= MOST_SESSIONS


def test_settings_refuse_idle_for_sessions_of_one_call() -> None:
    with pytest.raises(UsageError, match="idle has no effect"):
        UpstreamSettings("shop", url="http://127.0.0.1:9/mcp", share="call", idle=1.0)


# --- errors of the server -------------------------------------------------------------------------


ERRORS = [
    *(
        {"code": code, "message": "their words", "data": {"ran": "no", "their": [0.5, None]}}
        for code in (-32603, -32000, 40000, 40910, 42910, 50310, 7)
    ),
    *({"code": code, "message": "their refusal", "data": "theirs"} for code in sorted(REFUSED)),
    {"code": -32602, "message": "their refusal"},
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error["code"]))
async def test_gateway_passes_a_refusal_of_the_server_on_unchanged(
    tmp_path: Path, error: dict[str, Any]
) -> None:
    """G6: code, message and data are the server's, and a repetition runs: nothing was recorded."""
    async with shopped(tmp_path) as (bench, shop, _):
        _, session = await bench.post("/mcp/shop", message_of("initialize", introduction(), 1))
        meta = {"io.wirecall/idempotency-key": "k"}
        call = {"name": "pay", "arguments": {"error": error}, "_meta": meta}
        for id in (2, 3):
            answer, _ = await bench.post("/mcp/shop", message_of("tools/call", call, id), session)
            assert answer["error"] == error
        assert len(shop.called) == 2


async def test_list_of_a_client_waits_again_if_the_background_has_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G11: a list that was late once is not left out for as long as all sessions are in use."""
    monkeypatch.setattr("wirecall.gateway.gateway.MOST_SESSIONS", 1)
    monkeypatch.setattr("wirecall.gateway.gateway.LINK_TIME", 0.05)
    monkeypatch.setattr("wirecall.gateway.gateway.BACK_AFTER", 0.01)
    bench = Bench(tmp_path, names=("bank",), own={"bank": {"share": "session"}})
    async with bench.serving():
        gateway = bench.gateway
        await until(lambda: ("bank", "tools") in gateway.seen)
        _, session = await bench.post("/mcp", message_of("initialize", introduction(), 1))
        look = message_of("tools/call", {"name": "look"}, 2)
        assert "result" in (await bench.post("/mcp", look, session))[0]
        [talk] = gateway._talks(gateway.upstreams["bank"])
        talk.enter()
        gateway.await_back("bank", "tools", is_late=True)
        await until(lambda: not gateway.is_late("bank", "tools"))
        listed, _ = await bench.post("/mcp", message_of("tools/list", None, 3), session)
        assert "_meta" not in listed["result"]
        talk.leave()


async def test_list_whose_client_leaves_leaves_no_task(tmp_path: Path) -> None:
    """G11: a list is not read, and a session is not awaited, for a caller that has left."""
    mute = UpstreamSettings("mute", command=["/bin/sh", "-c", "cat >/dev/null"])
    async with Bench(tmp_path, names=(), more=[mute]).serving() as bench:
        gateway = bench.gateway
        upstream = gateway.upstreams["mute"]
        await until(lambda: gateway._conversations)
        key = ("mute", "")
        for number in range(MOST_SESSIONS):
            gateway._conversations["mute", f"caller {number}"] = gateway._conversations[key]
        front = gateway.mcp()
        assert isinstance(front, MergedFront)
        someone = gateway._someone()
        works = ("coro=<_quiet()", "coro=<MergedFront._entries()")

        def working() -> int:
            return sum(any(each in repr(task) for each in works) for task in asyncio.all_tasks())

        callers = [
            asyncio.create_task(front._read_entries([upstream], "tools", "", someone)),
            asyncio.create_task(gateway._room(upstream)),
        ]
        await until(lambda: working() > MOST_SESSIONS)
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        await until(lambda: not working())


async def test_tables_of_callers_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G11: each caller has its own, and callers may be many."""
    monkeypatch.setattr("wirecall.gateway.fronts.MOST_TABLES", 2)
    async with Bench(tmp_path, names=("bank",)).serving() as bench:
        front = bench.gateway.mcp()
        assert isinstance(front, MergedFront)
        for caller in ("ann", "bob", "eve"):
            await front._table("tools", caller, bench.gateway._someone())
        assert [caller for _, caller in front._tables] == ["bob", "eve"]
