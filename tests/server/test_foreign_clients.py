"""Clients of others that need an option of the app, each as it is published; docs/clients.md has
the table.

A test shows what a client meets without the option, and that it works with it.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonrpclib
import pytest
from bitcoinrpc.authproxy import AuthServiceProxy, JSONRPCException
from jsonrpc_async import Server
from jsonrpc_base import TransportError
from jsonrpclib.jsonrpc import ProtocolError
from jsonrpclib.jsonrpc import TransportError as PelixTransportError
from tinyrpc import RPCClient
from tinyrpc.client import RPCCall
from tinyrpc.exc import RPCError
from tinyrpc.protocols.jsonrpc import JSONRPCProtocol
from tinyrpc.transports.http import HttpPostClientTransport

from tests.client.peers import PATIENCE, served
from tests.mcp.node import installed, node
from wirecall import App, Limits

ETHEREUM = ("ethers@6.16.0", "viem@2.43.5")
SCRIPT = Path(__file__).with_name("ethereum_clients.mjs")


def make_app(**options: Any) -> tuple[App, list[str]]:
    app = App("chain", **options)
    ran = list[str]()

    @app.query
    def add(a: int = 1, b: int = 0) -> int:
        ran.append("add")
        return a + b

    @app.query(notification_allowed=True)
    def touch(text: str = "") -> None:
        ran.append("touch")

    @app.command(key="auto")
    def put(a: int) -> int:
        ran.append("put")
        return a

    @app.query(name="eth_getBalance")
    def balance(address: str, block: str) -> str:
        return hex(int(address, 16))

    return app, ran


# --- ethers and viem ------------------------------------------------------------------------------


async def balances(number: int, size: str = "", **options: Any) -> dict[str, Any]:
    """Return what ethers and viem get for so many balances."""
    app, _ = make_app(**options)
    modules = await asyncio.to_thread(installed, *ETHEREUM)
    async with served(app) as url:
        words = (str(node()), str(SCRIPT), str(modules), f"{url}/rpc", str(number), size)
        process = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(4 * PATIENCE):
            text, _ = await process.communicate()
    found: dict[str, Any] = json.loads(text)
    return found


async def test_ethers_and_viem_cannot_read_a_single_refusal() -> None:
    found = await balances(60)
    assert found["ethers"]["values"] == found["viem"]["values"] == []
    assert "missing response for request" in found["ethers"]["error"]
    assert "Cannot read properties of undefined" in found["viem"]["error"]


async def test_ethers_and_viem_show_the_reason_of_a_refusal_by_entries() -> None:
    found = await balances(60, batch_refusal="entries")
    for client in ("ethers", "viem"):
        assert found[client]["values"] == []
        assert "a batch of 60 entries, 50 are allowed" in found[client]["error"]


async def test_ethers_and_viem_work_with_a_limit_of_100() -> None:
    found = await balances(250, "100", limits=Limits(batch=100), batch_refusal="entries")
    for client in ("ethers", "viem"):
        assert found[client] == {"values": list(range(250)), "error": None}


# --- jsonrpclib-pelix -----------------------------------------------------------------------------


def pelix(url: str, version: float) -> tuple[list[Any], list[Any]]:
    """Return what calls get, and what notifications raise: allowed, refused by a query, refused by
    a command.
    """
    config = jsonrpclib.config.Config(version=version)
    results: list[Any] = []
    calls: list[Callable[[Any], Any]] = [
        lambda proxy: proxy.add(1, 2),
        lambda proxy: proxy.add(),
        lambda proxy: proxy.nothing(),
    ]
    for call in calls:
        proxy = jsonrpclib.ServerProxy(url, config=config)
        try:
            results.append(call(proxy))
        except ProtocolError as error:
            results.append(error.args[0][0])
        proxy("close")()
    raised: list[Any] = []
    for name in ("touch", "add", "put"):
        proxy = jsonrpclib.ServerProxy(url, config=config)
        try:
            getattr(proxy._notify, name)(1 if name != "touch" else "x")
            raised.append(None)
        except (ProtocolError, PelixTransportError) as error:
            raised.append(type(error).__name__)
        proxy("close")()
    return results, raised


@pytest.mark.parametrize(
    ("version", "strict", "results", "raised"),
    [
        (2.0, True, [3, 1, -32601], ["TransportError", "ProtocolError", "ProtocolError"]),
        (2.0, False, [3, 1, -32601], [None, None, None]),
        (1.0, True, [-32600, -32600, -32600], ["ProtocolError", "ProtocolError", "ProtocolError"]),
        (1.0, False, [3, 1, -32601], [None, None, None]),
    ],
)
async def test_jsonrpclib_pelix_needs_an_app_that_is_not_strict(
    version: float, strict: bool, results: list[Any], raised: list[Any]
) -> None:
    app, ran = make_app(strict=strict)
    async with served(app) as url:
        assert await asyncio.to_thread(pelix, f"{url}/rpc", version) == (results, raised)
    assert "put" not in ran


async def test_jsonrpclib_pelix_sends_arrays() -> None:
    def together(url: str) -> list[Any]:
        proxy = jsonrpclib.ServerProxy(url)
        calls = jsonrpclib.MultiCall(proxy)
        calls.add(1, 2)
        calls._notify.touch("x")
        calls._notify.add(1)  # is refused: an app that is not strict does not answer it
        calls.add(3, 4)
        results = list(calls())
        proxy("close")()
        return results

    app, _ = make_app(strict=False)
    async with served(app) as url:
        assert await asyncio.to_thread(together, f"{url}/rpc") == [3, 7]


# --- tinyrpc --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
async def test_tinyrpc_needs_nothing(strict: bool) -> None:
    def ask(url: str) -> list[Any]:
        client = RPCClient(
            JSONRPCProtocol(), HttpPostClientTransport(url, headers={"Connection": "close"})
        )
        proxy = client.get_proxy()
        silent = client.get_proxy(one_way=True)
        results = [
            proxy.add(1, 2),
            proxy.add(a=3, b=4),
            proxy.add(),
            silent.touch("x"),
            silent.add(1),
        ]
        with pytest.raises(RPCError):
            proxy.nothing()
        answers = client.batch_call([RPCCall("add", [1], {}), RPCCall("add", [2], {})])
        return [*results, *(answer.result for answer in answers)]

    app, _ = make_app(strict=strict)
    async with served(app) as url:
        assert await asyncio.to_thread(ask, f"{url}/rpc") == [3, 7, 1, None, None, 1, 2]


# --- python-bitcoinrpc ----------------------------------------------------------------------------


def bitcoin(url: str) -> list[Any]:
    proxy = AuthServiceProxy(url.replace("http://", "http://user:password@"))
    results: list[Any] = []
    calls: list[Callable[[], Any]] = [
        lambda: proxy.add(1, 2),
        lambda: proxy.add(),
        lambda: proxy.nothing(),
    ]
    for call in calls:
        try:
            results.append(call())
        except JSONRPCException as error:
            results.append(error.code)
    proxy._AuthServiceProxy__conn.close()
    return results


@pytest.mark.parametrize(("strict", "results"), [(True, [-32600] * 3), (False, [3, 1, -32601])])
async def test_python_bitcoinrpc_needs_an_app_that_is_not_strict(
    strict: bool, results: list[Any]
) -> None:
    app, _ = make_app(strict=strict)
    async with served(app) as url:
        assert await asyncio.to_thread(bitcoin, f"{url}/rpc") == results


# --- jsonrpc-async --------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
async def test_jsonrpc_async_needs_an_app_that_is_not_strict_for_notifications(
    strict: bool,
) -> None:
    app, ran = make_app(strict=strict)
    async with served(app) as url, Server(f"{url}/rpc") as server:
        assert [await server.add(1, 2), await server.add(a=3, b=4), await server.add()] == [3, 7, 1]
        if strict:
            with pytest.raises(TransportError, match="HTTP 204"):
                await server.touch("x", _notification=True)
        else:
            for name in ("touch", "add", "put", "nothing"):
                assert await getattr(server, name)(_notification=True) is None
    assert ran.count("touch") == 1 and "put" not in ran
