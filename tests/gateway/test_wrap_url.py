"""`wirecall wrap URL`: a client of pipes in front of a server over HTTP, in both eras."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import served, until
from tests.gateway.fronts import Client, enveloped, introduction, message_of
from tests.ports import free_port
from wirecall import App, Context
from wirecall.auth.store import FileStore, Login
from wirecall.gateway.login import StoredLogin
from wirecall.gateway.pipe import Wrap
from wirecall.gateway.upstream import Origin
from wirecall.mcp.revisions import NAMES
from wirecall.transports.http_client import HttpAnswer

NEWEST = NAMES[-1]


def shop(runs: list[str], **options: Any) -> App:
    """A server that keeps no records: `key="off"`."""
    app = App("shop", version="3", ledger="memory:", **options)

    @app.command(key="off")
    async def pay(ctx: Context, to: str) -> str:
        runs.append(to)
        await ctx.progress(1, 2)
        return f"paid {to}"

    @app.query
    def look(to: str = "") -> str:
        return f"looked {to}"

    return app


@asynccontextmanager
async def wrapped_url(url: str, **options: Any) -> AsyncIterator[Client]:
    wrap = Wrap(Origin(name="shop", url=url, **options), ledger="memory:")
    client = Client(wrap)
    try:
        yield client
    finally:
        await wrap.aclose(1.0)


@pytest.mark.parametrize("revision", NAMES)
async def test_wrap_url_serves_both_eras_and_runs_a_lost_call_once(revision: str) -> None:
    """G4, G5: list, call, progress and a lost answer, at the revision of the client."""
    runs: list[str] = []
    async with served(shop(runs)) as url, wrapped_url(f"{url}/mcp") as client:
        envelope = enveloped if revision == NEWEST else dict
        if revision != NEWEST:
            answer = await client.greet(revision)
            assert answer["result"]["serverInfo"]["name"] == "shop"
            assert answer["result"]["protocolVersion"] == revision
        listed = await client.ask("tools/list", envelope({}))
        assert [tool["name"] for tool in listed["result"]["tools"]] == ["pay", "look"]
        looked = await client.ask("tools/call", envelope({"name": "look"}))
        assert looked["result"]["content"][0]["text"] == "looked "
        paying = {"name": "pay", "arguments": {"to": "ann"}}
        first = await client.ask(
            "tools/call", envelope({**paying, "_meta": {"progressToken": "t"}}), lose=True
        )
        report = await client.hears("notifications/progress")
        assert report["params"]["progressToken"] == "t"
        again = await client.ask("tools/call", envelope(paying))
        assert again["result"]["content"] == first["result"]["content"]
        assert again["result"]["_meta"]["io.wirecall/replayed"] is True
        assert runs == ["ann"]


async def test_wrap_url_does_not_take_a_server_that_is_down_for_an_older_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G5: a client without a handshake gets the reason, and no gateway that translates."""
    monkeypatch.setattr("wirecall.gateway.upstream.ATTEMPT_PAUSE", 0.0)
    url = f"http://127.0.0.1:{free_port()}/mcp"
    wrap = Wrap(Origin(name="shop", url=url), ledger="memory:")
    try:
        answer = await Client(wrap).ask("tools/list", enveloped({}))
        assert answer["error"]["code"] == 50210
        assert "refused" in answer["error"]["message"]
        assert wrap._gateway is None
    finally:
        await wrap.aclose(1.0)


@pytest.mark.parametrize("order", [["discover", "initialize"], ["initialize", "discover"]])
@pytest.mark.parametrize("waits", [True, False])
async def test_wrap_url_serves_a_client_that_tries_both_greetings(
    order: list[str], waits: bool
) -> None:
    """G4, G12: a client may send `initialize` while it waits for the answer to the other one."""
    messages = {
        "discover": message_of("server/discover", enveloped({}), 1),
        "initialize": message_of("initialize", introduction(), 2),
    }
    async with served(shop([])) as url, wrapped_url(f"{url}/mcp") as client:
        greetings = []
        for kind in order:
            greetings.append(asyncio.create_task(client.line(messages[kind])))
            if waits:
                await greetings[-1]
        answers = [json.loads(await each or b"{}") for each in greetings]
        assert all("result" in answer for answer in answers), answers
        for params in ({"name": "look"}, enveloped({"name": "look"}), {"name": "look"}):
            answer = await client.ask("tools/call", params, id="look")
            assert answer["result"]["content"][0]["text"] == "looked "


class Slow:
    """An older server over HTTP, which holds the answers to both greetings."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.second = asyncio.Event()
        self.introduced = asyncio.Event()

    async def serve(self, request: web.Request) -> web.Response:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        method = message["method"]
        self.asked.append(method)
        if "id" not in message:
            return web.Response(status=202)
        head = {"jsonrpc": "2.0", "id": message["id"]}
        if method == "server/discover":
            if self.asked.count(method) == 2:
                await self.second.wait()
            return web.json_response({**head, "error": {"code": -32601, "message": "no"}})
        result: dict[str, Any] = {"tools": []}
        if method == "initialize":
            await self.introduced.wait()
            server = {"name": "slow", "version": "1"}
            result = {"protocolVersion": NAMES[-2], "capabilities": {}, "serverInfo": server}
        return web.json_response({**head, "result": result})


async def test_wrap_url_does_not_end_the_session_of_a_greeting_in_flight() -> None:
    """G4, G12: `server/discover` is refused while `initialize` waits for its answer."""
    server = Slow()
    app = web.Application()
    app.router.add_route("*", "/mcp", server.serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with wrapped_url(f"http://127.0.0.1:{runner.addresses[0][1]}/mcp") as client:
            discovering = asyncio.create_task(client.ask("server/discover", enveloped({}), id="d"))
            await until(lambda: server.asked.count("server/discover") == 2)
            greeting = asyncio.create_task(client.ask("initialize", introduction(), id="i"))
            await until(lambda: "initialize" in server.asked)
            server.second.set()
            assert (await discovering)["error"]["code"] == -32601
            server.introduced.set()
            assert (await greeting)["result"]["serverInfo"]["name"] == "slow"
            assert (await client.ask("tools/list"))["result"] == {"tools": []}
    finally:
        await runner.cleanup()


async def test_wrap_url_of_a_server_that_is_not_there_says_so() -> None:
    """G9: 50210, ran = no."""
    async with wrapped_url("http://127.0.0.1:9/mcp") as client:
        answer = await client.ask("initialize", introduction())
        assert (answer["error"]["code"], answer["error"]["data"]["ran"]) == (50210, "no")
        assert "shop" in answer["error"]["message"]


async def test_wrap_url_of_a_server_that_refuses_the_client_says_so() -> None:
    """G6: 401 is a refusal: nothing ran."""
    app = shop([], authenticate=lambda headers: headers.get("x-key"))
    async with served(app) as url, wrapped_url(f"{url}/mcp") as client:
        answer = await client.ask("initialize", introduction())
        assert (answer["error"]["code"], answer["error"]["data"]["ran"]) == (50210, "no")
        assert "401" in answer["error"]["message"]


class Token:
    """A login, as `wirecall login` stores it."""

    is_interactive = False

    def __init__(self, _url: str) -> None: ...

    async def headers(self, _method: str, _url: str) -> Mapping[str, str]:
        return {"X-Key": "ann"}

    async def answered(self, _answer: HttpAnswer, _sent: Mapping[str, str]) -> bool:
        return False


async def test_wrap_url_sends_the_login_of_the_address() -> None:
    """G4."""
    runs: list[str] = []
    app = shop(runs, authenticate=lambda headers: headers.get("x-key"))
    async with served(app) as url, wrapped_url(f"{url}/mcp", auth=Token) as client:
        await client.greet()
        assert "result" in await client.ask("tools/call", {"name": "look"})


async def test_stored_login_of_an_address_without_one_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G4."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    login = StoredLogin("http://127.0.0.1:9/mcp")
    assert await login.headers("POST", "http://127.0.0.1:9/mcp") == {}
    (tmp_path / "wirecall" / "logins").mkdir(parents=True, mode=0o700)
    assert await login.headers("POST", "http://127.0.0.1:9/mcp") == {}
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_wrap_url_reads_a_login_that_is_made_after_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G4: the first request is refused, then the user logs in, and no restart is needed."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    app = shop([], authenticate=_bearer)
    async with served(app) as url, wrapped_url(f"{url}/mcp", auth=StoredLogin) as client:
        refused = await client.ask("initialize", introduction())
        assert "401" in refused["error"]["message"]
        login = Login(
            client_id="c",
            server=f"{url}/mcp",
            issuer=url,
            token_endpoint=f"{url}/token",
            access_token="right",
        )
        await FileStore().save(login)
        await client.greet()
        assert "result" in await client.ask("tools/call", {"name": "look"})
    await asyncio.get_running_loop().shutdown_default_executor()


def _bearer(headers: Mapping[str, str]) -> str | None:
    if headers.get("authorization") == "Bearer right":
        return "ann"
    return None


async def test_wrap_url_makes_a_session_that_is_gone_again() -> None:
    """G2: a server that has forgotten its sessions is greeted again, and the call is served."""
    runs: list[str] = []
    async with served(shop(runs)) as url, wrapped_url(f"{url}/mcp") as client:
        await client.greet()
        link: Any = client.front._relay.session.link
        link.session = "forgotten"
        answer = await client.ask("tools/call", {"name": "pay", "arguments": {"to": "ann"}})
        assert "result" in answer and runs == ["ann"]
