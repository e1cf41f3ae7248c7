"""The client for scripts: the same methods, from any thread, and it closes itself."""

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.client.test_calls import CHILD, Price, shop
from wirecall import connect_sync
from wirecall.errors import MethodNotFound, NotSent


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


def test_from_many_threads() -> None:
    with connect_sync(shop()) as client, ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda _n: client.call("stock.add", {"sku": "tea", "number": 1}), range(100)))
    assert sorted(sums) == list(range(1, 101))


def test_a_client_that_is_closed_and_one_that_cannot_open() -> None:
    client = connect_sync(shop())
    client.close()
    client.close()
    with pytest.raises(NotSent, match="the client is closed"):
        client.call("price", ["tea"])
    with pytest.raises(NotSent):
        connect_sync(["/nowhere/server"])


def test_it_closes_itself() -> None:
    before = threading.active_count()
    client = connect_sync(shop())
    assert client.call("price", ["tea"], type=Price).cents == 300
    assert threading.active_count() == before + 1
    del client
    gc.collect()
    assert threading.active_count() == before


def test_a_script_that_forgets_to_close_ends(tmp_path: Any) -> None:
    script = f"""
import sys
from wirecall import connect_sync
client = connect_sync([sys.executable, "-c", {CHILD!r}], stderr="keep")
print(client.rpc.price(sku="tea"))
"""
    ran = subprocess.run(
        [sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "{'sku': 'tea', 'cents': 300}\n", "")
