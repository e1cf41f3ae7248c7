"""Servers over HTTP behind the gateway: both eras, the status of errors, marked arguments, logs."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import served
from tests.gateway.bench import BOTH, Bench
from tests.gateway.fronts import enveloped, message_of
from wirecall import App, Context, Header, connect
from wirecall.gateway import UpstreamSettings
from wirecall.mcp.revisions import NAMES

NEWEST = NAMES[-1]


def shop() -> App:
    """A server that speaks every revision."""
    app = App("shop", version="3", ledger="memory:", list_ttl=60)

    @app.query
    def stock(region: Annotated[str, Header("Region")]) -> str:
        return region

    @app.query
    async def chat(ctx: Context) -> int:
        await ctx.log("info", "hello")
        return 1

    return app


@pytest.fixture
async def web(tmp_path: Path) -> AsyncIterator[Bench]:
    async with served(shop()) as url:
        upstreams = [
            UpstreamSettings("shop", url=f"{url}/mcp"),
            UpstreamSettings("own", url=f"{url}/mcp", share="session"),
        ]
        async with Bench(tmp_path, names=(), more=upstreams).serving() as bench:
            yield bench


async def post(
    bench: Bench, method: str, params: dict[str, Any], **headers: str
) -> tuple[int, dict[str, Any]]:
    """Send a request of the newest revision; return the status and the answer."""
    fields = {**BOTH, "MCP-Protocol-Version": NEWEST, "Mcp-Method": method}
    fields |= {name.replace("_", "-"): value for name, value in headers.items()}
    message = message_of(method, enveloped(params), 1)
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{bench.url}/mcp/shop", data=message, headers=fields) as answer,
    ):
        return answer.status, json.loads(await answer.read())


async def test_gateway_speaks_its_own_era_to_each_client_of_a_web_server(web: Bench) -> None:
    """G12: a server that has both eras is not translated, in either order of its clients."""
    async with web.client("/mcp/shop", revision="2025-11-25") as old:
        assert (await old.call_tool("stock", {"region": "eu"})).content[0].text == "eu"
        status, answer = await post(web, "tools/list", {})
        # Only the server itself knows how long its list may be kept.
        assert (status, answer["result"]["ttlMs"]) == (200, 60_000)
        async with web.client("/mcp/shop", revision=NEWEST) as new:
            assert (await new.call_tool("stock", {"region": "eu"})).content[0].text == "eu"
        assert (await old.call_tool("stock", {"region": "us"})).content[0].text == "us"


async def test_gateway_gives_the_error_of_a_server_its_status(web: Bench) -> None:
    """G10: at 2026-07-28 a method that the server does not have is HTTP 404, as without a gateway."""
    for method in ("ping", "x/unknown"):
        status, answer = await post(web, method, {})
        assert (status, answer["error"]["code"]) == (404, -32601)


@pytest.mark.parametrize(
    ("header", "status"), [({"Mcp_Param_Region": "eu"}, 200), ({"Mcp_Param_Region": "us"}, 400)]
)
async def test_gateway_repeats_marked_arguments(
    web: Bench, header: dict[str, str], status: int
) -> None:
    """G10: headers are made from the body, and those of a client must agree with its body."""
    await post(web, "tools/list", {})
    params = {"name": "stock", "arguments": {"region": "eu"}}
    found, answer = await post(web, "tools/call", params, Mcp_Name="stock", **header)
    assert found == status
    if status == 200:
        assert answer["result"]["content"][0]["text"] == "eu"


async def test_gateway_passes_logs_of_an_owned_session_on(web: Bench) -> None:
    """G10: log messages of a server reach its one client while a call of it is open."""
    heard: list[Any] = []
    client = connect(
        f"{web.url}/mcp/own", protocol="mcp", revision="2025-11-25", on_log=heard.append
    )
    async with client:
        await client.call_tool("chat")
    assert [entry.data for entry in heard] == ["hello"]
