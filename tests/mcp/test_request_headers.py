"""`ctx.headers`: the header of the HTTP request that a call came with."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests import rsgi
from tests.calls import batch, call, make_app
from tests.mcp.asgi import EVERY_WAY, R2, R5, over_http, request, speak
from tests.transports import ask
from wirecall import App, Context, connect

TASKS = "io.modelcontextprotocol/tasks"
SECRETS = {
    "Authorization": "Bearer secret",
    "Proxy-Authorization": "Basic secret",
    "Cookie": "session=secret",
    "Mcp-Session-Id": "secret",
}


@pytest.fixture(autouse=True, params=rsgi.INTERFACES)
def interface(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs over both interfaces."""
    monkeypatch.setattr(rsgi, "interface", request.param)


def looking() -> App:
    app = make_app()

    @app.query
    def look(ctx: Context) -> dict[str, str]:
        return dict(ctx.headers)

    @app.command
    async def put(ctx: Context) -> dict[str, str]:
        return dict(ctx.headers)

    @app.prompt
    def review(ctx: Context) -> str:
        return ctx.headers.get("X-Tenant", "none")

    @app.resource("shop://tenant")
    def tenant(ctx: Context) -> str:
        return ctx.headers.get("x-tenant", "none")

    @app.tool(task=True)
    async def work(ctx: Context) -> dict[str, str]:
        return dict(ctx.headers)

    return app


@pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)
async def test_headers_are_visible_to_mcp_handlers(transport: str, revision: str) -> None:
    tenant = "acme" if transport == "http" else "none"
    async with speak(transport, looking(), revision, headers={"X-Tenant": "acme"}) as client:
        for name in ("look", "put"):
            seen = (await client.tool(name))["content"][0]["text"]
            assert ('"x-tenant":"acme"' in seen) is (transport == "http")
            assert "mcp-session-id" not in seen
        assert (await client.result("prompts/get", {"name": "review"}))["messages"][0]["content"][
            "text"
        ] == tenant
        assert (await client.result("resources/read", {"uri": "shop://tenant"}))["contents"][0][
            "text"
        ] == tenant


async def test_headers_are_visible_to_the_entries_of_an_array() -> None:
    async with over_http(looking(), R2, headers={"X-Tenant": "acme"}) as client:
        answers = await client.post(
            [request("tools/call", {"name": name}, name) for name in ("look", "put")]
        ).json()
    assert all('"x-tenant":"acme"' in answer["result"]["content"][0]["text"] for answer in answers)


async def test_headers_without_credentials_are_visible_to_rpc_handlers_and_middleware() -> None:
    app = looking()
    seen = list[str]()

    @app.middleware
    async def note(context: Context, following: Callable[[Context], Awaitable[Any]]) -> Any:
        seen.append(context.headers["X-TENANT"])
        return await following(context)

    fields = [("X-Tenant", "acme"), ("Via", "one"), ("Via", " two "), *SECRETS.items()]
    server = app.asgi()
    told = (await ask(server, "/rpc", call("look"), headers=fields)).json["result"]
    assert {name: told.get(name) for name in ("x-tenant", "via", "host")} == {
        "x-tenant": "acme",
        "via": "one, two",
        "host": "localhost:8420",
    }
    assert "secret" not in str(told)
    answers = (
        await ask(server, "/rpc", batch(call("look", id=1), call("put", id=2)), headers=fields)
    ).json
    assert [answer["result"]["x-tenant"] for answer in answers] == ["acme", "acme"]
    assert seen == ["acme"] * 3
    # A value that RSGI leaves out is not shown as another one.
    told = (
        await ask(
            server, "/rpc", call("look"), headers=[("X-Tenant", "acme"), ("X-Name", "J\u00fcrgen")]
        )
    ).json["result"]
    assert told.get("x-name") in (None, "J\u00fcrgen")


async def test_headers_are_absent_from_calls_without_a_request() -> None:
    app = looking()
    assert b'"result":{}' in (await app.handle(call("look")) or b"")
    async with connect(app) as client, connect(app, protocol="mcp") as agent:
        assert await client.call("look") == {}
        assert await agent.call_tool("look", type=dict) == {}


async def test_headers_cannot_be_changed() -> None:
    app = make_app()

    @app.query
    def change(ctx: Context) -> str:
        headers: Any = ctx.headers
        with pytest.raises(TypeError):
            headers["x-tenant"] = "other"
        return "unchanged"

    assert (await ask(app.asgi(), "/rpc", call("change"))).json["result"] == "unchanged"
    assert b"unchanged" in (await app.handle(call("change")) or b"")


async def test_headers_are_absent_from_a_task() -> None:
    """It outlives its request, and another process may continue it."""
    app = looking()
    async with over_http(
        app, R5, headers={"X-Tenant": "acme"}, capabilities={"extensions": {TASKS: {}}}
    ) as client:
        task = await client.result("tools/call", {"name": "work"})
        assert task["resultType"] == "task"
        while (found := await client.result("tasks/get", {"taskId": task["taskId"]}))[
            "status"
        ] == "working":
            pass
    assert found["result"]["structuredContent"] == {}
