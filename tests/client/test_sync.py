"""The client for scripts: the same methods, from any thread, and it closes itself."""

import gc
import inspect
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.client.shops import CHILD, Price, shop
from wirecall import UsageError, connect_sync
from wirecall.client.client import Client
from wirecall.client.sync import SyncClient
from wirecall.errors import MethodNotFound, NotSent
from wirecall.mcp.client.client import McpClient, SyncMcpClient


@pytest.mark.parametrize("target", [None, [sys.executable, "-c", CHILD]])
def test_calls_and_batches(target: Any) -> None:
    with connect_sync(target or shop()) as client:
        assert client.revision is None
        assert client.call("price", ["tea"], type=Price) == Price("tea", 300)
        assert client.rpc.stock.add(sku="tea", number=1) == 1
        client.notify("note", {"text": "hello"})
        with pytest.raises(MethodNotFound):
            client.call("nothing")
        with client.batch() as batch:
            one = batch.call("price", ["tea"], type=Price)
            two = batch.rpc.stock.count("tea")
        assert batch.wire == "array"
        assert (one.result(), two.result()) == (Price("tea", 300), 1)


@pytest.mark.parametrize(("twin", "original"), [(SyncClient, Client), (SyncMcpClient, McpClient)])
def test_sync_client_has_every_method_with_the_same_parameters(twin: type, original: type) -> None:
    """Written out, so that an editor sees them."""
    # It opens itself, has `close`, and these two make batches.
    own = {"open", "aclose", "entry", "tool_entry"}
    names = {name for name in dir(original) if not name.startswith("_")} - own
    assert {name for name in dir(twin) if not name.startswith("_")} == names | {"close"}
    for name in names:
        method = getattr(original, name)
        if not isinstance(method, property):
            assert (
                inspect.signature(getattr(twin, name)).parameters
                == inspect.signature(method).parameters
            ), name


def test_sync_client_speaks_mcp() -> None:
    """Tools, batches and changes: the methods that give more than a value."""
    app = shop()
    with connect_sync(app, protocol="mcp") as client:
        assert (
            client.revision == "2026-07-28"
            and client.honours_keys
            and client.server["name"] == "shop"
        )
        assert "price" in [tool.name for tool in client.list_tools(order="safest")]
        assert client.call_tool("price", {"sku": "tea"}, type=Price) == Price("tea", 300)
        with client.batch() as batch:
            one = batch.call_tool("price", {"sku": "tea"})
            two = batch.call("tools/list")
        assert one.result().structured == {"sku": "tea", "cents": 300} and "tools" in two.result()
        with client.listen(tools=True) as changes:
            app.changed("tools")
            assert next(changes).kind == "tools"
        assert list(changes) == []
        client.ping()
        with pytest.raises(UsageError, match="on_change"):
            client.subscribe("shop://x")


def test_sync_client_works_from_many_threads() -> None:
    with connect_sync(shop()) as client, ThreadPoolExecutor(8) as pool:
        sums = list(
            pool.map(lambda _n: client.call("stock.add", {"sku": "tea", "number": 1}), range(100))
        )
    assert sorted(sums) == list(range(1, 101))


def test_client_that_is_closed_and_one_that_cannot_open() -> None:
    client = connect_sync(shop())
    client.close()
    client.close()
    with pytest.raises(NotSent, match="the client is closed"):
        client.call("price", ["tea"])
    with pytest.raises(NotSent):
        connect_sync(["/nowhere/server"])


def test_sync_client_closes_itself() -> None:
    before = threading.active_count()
    client = connect_sync(shop())
    assert client.call("price", ["tea"], type=Price).cents == 300
    assert threading.active_count() == before + 1
    del client
    gc.collect()
    assert threading.active_count() == before


def test_script_that_forgets_to_close_ends(tmp_path: Any) -> None:
    script = f"""
import logging, sys
from wirecall import connect_sync
logging.getLogger("asyncio").setLevel("ERROR")  # a slow machine is a warning there
client = connect_sync([sys.executable, "-c", {CHILD!r}], stderr="keep")
print(client.rpc.price(sku="tea"))
"""
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "{'sku': 'tea', 'cents': 300}\n", "")
