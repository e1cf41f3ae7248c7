"""Every example is run, and does what it says."""

import asyncio
import html
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mcp.asgi import Exchange
from tests.servers import Postgres
from wirecall import RpcError, connect, jsonrpc
from wirecall.errors import KeyConflict, KeyRequired
from wirecall.gateway.settings import load_settings

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(*command: str, given: str = "") -> str:
    program = [sys.executable, *command]
    done = subprocess.run(
        program, input=given, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_have_a_test_each() -> None:
    tested = {
        "hello",
        "shop",
        "batch_client",
        "demo",
        "payments_postgres",
        "agents",
        "agent_batch",
        "notes_server",
        "impatient",
        "render",
        "pools",
        "fastapi_mount",
        "commerce",
        "reports",
        "tutorial_client",  # by the page docs/tutorial.md, like its server
        "tutorial_server",
        "everything",  # by tests/mcp/conformance.py
    }
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


def test_gateway_file_is_valid_and_shows_each_kind_of_upstream() -> None:
    settings = load_settings(EXAMPLES / "gateway.toml", {})
    assert [each.name for each in settings.upstreams] == ["github", "linear", "browser"]
    assert settings.is_single_user


def test_hello() -> None:
    call = '{"jsonrpc":"2.0","method":"sum","params":[1,2,3],"id":1}\n'
    assert (
        run("-m", "wirecall", "send", "examples/hello.py", given=call)
        == '{"jsonrpc":"2.0","result":6,"id":1}\n'
    )


def test_shop() -> None:
    assert run(
        "-m", "wirecall", "call", "examples/shop.py", "price", "sku=tea", "--json"
    ).startswith('{"ok":true,"result":450')


def test_agents() -> None:
    assert run("examples/agents.py").splitlines() == [
        "the answer is lost: Request 'tools/call' timed out",
        "the same call again: order 7, parcel 1",
        "another one: order 7, parcel 2",
        "parcels: 2",
    ]


def test_agent_batch() -> None:
    assert run("examples/agent_batch.py").splitlines() == [
        "tools: find_orders charge letter charges batch",
        "letter: Thank you! Your receipt is R-7-450.",
    ]


def test_agents_names_the_package_that_it_needs() -> None:
    """README sends no reader there without it."""
    program = (
        "import sys; sys.modules['mcp'] = None; import runpy; runpy.run_path('examples/agents.py')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (
        1,
        "This example needs the official SDK: pip install mcp\n",
    )


def test_impatient() -> None:
    assert run("examples/impatient.py").splitlines() == [
        "the answer is lost: timed out",
        "the same call again: order 7, parcel 1",
        "another one: order 7, parcel 2",
        "parcels: 2",
    ]


def test_render() -> None:
    assert run("examples/render.py").splitlines() == [
        "killed after some frames: True",
        "dawn: 20 frames, by 2 processes",
    ]


def test_batch_client() -> None:
    assert run("examples/batch_client.py").splitlines() == [
        "tea      450",
        "coffee   700",
        "milk     there is no article 'milk' (4040): {'articles': ['coffee', 'tea']}",
        "charge   {'order': '7', 'paid': 1150}",
        "sent as  array: JSON-RPC 2.0 has arrays",
    ]


@pytest.mark.long
def test_demo() -> None:
    shown = run("examples/demo.py")
    assert shown.endswith("\nall answers as they should be\n")
    assert "after 3 attempts, replayed from the ledger" in shown
    assert "3 attempts: a proxy cut the first two connections" in shown
    assert "ship again    order 7, parcel 1" in shown
    assert "-: the call had a key" in shown
    assert "charges       1  nothing was done twice" in shown
    assert "tools         ['add_note', 'process']  still there" in shown
    assert "\x1b" not in shown or "FORCE_COLOR" in os.environ
    # The recording in README shows lines of this demo. Ports and process ids differ.
    recording = (EXAMPLES.parent / "docs" / "pictures" / "demo.svg").read_text()
    lines = [html.unescape(line) for line in re.findall(r"<text [^>]*>(.*)</text>", recording)]
    printed = [re.sub(r"\d+", "0", line) for line in shown.splitlines()]
    assert len(lines) > 15
    for line in lines:
        start = re.sub(r"\d+", "0", line.removesuffix("…"))
        assert any(each.startswith(start) for each in printed), f"run: make pictures ({line})"


async def test_payments_are_made_once_with_their_record(postgres_server: Postgres) -> None:
    example = runpy.run_path(str(EXAMPLES / "payments_postgres.py"))
    async with example["make_app"](postgres_server.url) as app, connect(app) as client:
        assert await client.call("deposit", {"account": "ann", "cents": 1000}, key="d-1") == 1000
        assert await client.call("deposit", {"account": "ann", "cents": 1000}, key="d-1") == 1000
        assert await client.call("deposit", {"account": "bob", "cents": 1}, key="d-2") == 1
        paid = {"payer": "ann", "payee": "bob", "cents": 600}
        first = await client.call("pay", paid, key="p-1")
        assert await client.call("pay", paid, key="p-1") == first
        with pytest.raises(RpcError, match="ann does not have 600 cents"):
            await client.call("pay", paid, key="p-2")
        with pytest.raises(KeyConflict):
            await client.call("pay", {**paid, "cents": 1}, key="p-1")
        assert await client.call("deposit", {"account": "bob", "cents": 0}, key="d-3") == 601
        async with connect(app, protocol="mcp") as agent:  # clients of MCP have no keys
            assert (
                await agent.call_tool(
                    "deposit", {"account": "bob", "cents": 9}, key=False, type=int
                )
                == 610
            )


async def test_pools(postgres_server: Postgres) -> None:
    example = runpy.run_path(str(EXAMPLES / "pools.py"))
    async with connect(example["make_app"](postgres_server.url)) as client:
        assert await client.call("articles.reprice", {"sku": "tea", "cents": 450}, key="r-1") == 450
        assert await client.call("articles.price", {"sku": "tea"}) == 450
        with pytest.raises(RpcError, match="more than 0 cents"):
            await client.call("articles.reprice", {"sku": "tea", "cents": -1}, key="r-2")
        # The write was rolled back.
        assert await client.call("articles.price", {"sku": "tea"}) == 450
        with pytest.raises(RpcError, match="there is no article 'milk'"):
            await client.call("articles.price", {"sku": "milk"})


async def test_fastapi_mount() -> None:
    web = runpy.run_path(str(EXAMPLES / "fastapi_mount.py"))["web"]
    local = {"host": "localhost", "content-type": "application/json"}
    async with asyncio.timeout(60), web.router.lifespan_context(web):
        home = Exchange(web, "GET", local, path="/")
        assert await home.json() == {"rpc": "/shop/rpc", "mcp": "/shop/mcp"}
        asked = Exchange(
            web, "POST", local, jsonrpc.make_request("price", {"sku": "tea"}, 1), path="/shop/rpc"
        )
        assert await asked.json() == {"jsonrpc": "2.0", "result": 450, "id": 1}


async def test_commerce_takes_the_key_from_meta() -> None:
    module = runpy.run_path(str(EXAMPLES / "commerce.py"))
    lines = [{"sku": "tea", "count": 2}]
    keyed = {"lines": lines, "meta": {"idempotency-key": "checkout-1"}}
    async with asyncio.timeout(60), connect(module["app"], protocol="mcp") as client:
        assert (await client.call_tool("quote", {"lines": lines})).structured == 900
        first = await client.call_tool("complete_checkout", keyed, key=False)
        again = await client.call_tool("complete_checkout", keyed, key=False)
        assert first.structured == again.structured == {"order": "order-1", "cents": 900}
        with pytest.raises(KeyRequired):
            await client.call_tool("complete_checkout", {"lines": lines}, key=False)
    assert module["orders"] == ["order-1"]


async def test_reports_are_tasks_beside_a_page() -> None:
    module = runpy.run_path(str(EXAMPLES / "reports.py"))
    web = module["web"]
    local = {"host": "localhost", "content-type": "application/json"}
    async with asyncio.timeout(60), web.router.lifespan_context(web):
        async with connect(module["app"], protocol="mcp") as client:
            task = await client.start_tool("report", {"year": 2026})
            assert task.id is not None
            assert (await task.result()).structured == {"year": 2026, "total": 26 * 78}
        page = Exchange(web, "GET", local, path="/")
        assert "<li>2026: 2028</li>" in (await page.read()).decode()
        asked = Exchange(
            web, "POST", local, jsonrpc.make_request("rpc.discover", {}, 1), path="/rpc"
        )
        assert (await asked.json())["result"]["info"]["title"] == "reports"
