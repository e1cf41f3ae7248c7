"""`App(strict=False)`: what it accepts beyond JSON-RPC 2.0, and how it answers.

The strict app beside it shows the rule.
"""

import asyncio
import json
from typing import Any

import pytest

from tests.calls import read
from tests.client.peers import PATIENCE
from wirecall import App, Limits
from wirecall.client.links import MemoryPipe
from wirecall.testing import client as in_memory


def make(strict: bool = False, **options: Any) -> tuple[App, list[str]]:
    app = App("lax", strict=strict, **options)
    ran = list[str]()

    @app.query
    def add(a: int = 1, b: int = 0) -> int:
        ran.append("add")
        return a + b

    @app.query
    async def later(a: int = 1) -> int:
        ran.append("later")
        return a

    @app.query(notification_allowed=True)
    def touch() -> None:
        ran.append("touch")

    @app.command(key="auto")
    async def put(a: int = 1) -> int:
        ran.append("put")
        return a

    return app, ran


NEW = '"jsonrpc":"2.0",'


# --- notifications --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "notification",
    [
        '{"jsonrpc":"2.0","method":"add"}',
        '{"jsonrpc":"2.0","method":"put"}',
        '{"jsonrpc":"2.0","method":"add","params":7}',
        '{"jsonrpc":"2.0","method":"nothing","params":7}',
        '{"method":"add"}',
        '[{"jsonrpc":"2.0","method":"add"},{"jsonrpc":"2.0","method":"put"}]',
    ],
)
async def test_lax_app_does_not_answer_a_refused_notification(notification: str) -> None:
    app, ran = make()
    assert await app.handle(notification) is None
    strict, _ = make(strict=True)
    assert await strict.handle(notification) is not None
    assert ran == []


async def test_lax_app_does_not_answer_a_batch_of_too_many_notifications() -> None:
    app, ran = make(limits=Limits(batch=2))
    notification = {"jsonrpc": "2.0", "method": "touch"}
    assert await app.handle(json.dumps([notification] * 3)) is None
    call = {**notification, "id": 1}
    assert (
        read(await app.handle(json.dumps([notification, notification, call])))["error"]["code"]
        == -32600
    )
    assert ran == []


async def test_lax_app_answers_messages_other_than_notifications() -> None:
    app, _ = make()
    for message in ("{", "[]", "7", '{"jsonrpc":"2.0","method":7}', '{"jsonrpc":"2.0"}'):
        assert read(await app.handle(message))["id"] is None
    assert (
        read(await app.handle('{"jsonrpc":"2.0","method":"put","id":null}'))["error"]["code"]
        == -32600
    )


# --- params ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("id", ["1", '"a"', "1.50", "null", "12345678901234567890123"])
async def test_lax_app_reads_params_of_null_as_missing(id: str) -> None:
    """Ids of all kinds, since unusual ones are read on another path."""
    message = f'{{"jsonrpc":"2.0","method":"add","params":null,"id":{id}}}'
    app, _ = make()
    assert await app.handle(message) == f'{{"jsonrpc":"2.0","result":1,"id":{id}}}'.encode()
    assert await app.handle(f"[{message},{message}]") is not None
    strict, _ = make(strict=True)
    assert read(await strict.handle(message))["error"]["code"] == -32600


@pytest.mark.parametrize("params", ["7", "true", '"x"', '"null"'])
async def test_lax_app_refuses_other_params(params: str) -> None:
    app, _ = make()
    reply = read(await app.handle(f'{{"jsonrpc":"2.0","method":"add","params":{params},"id":1}}'))
    assert (reply["error"]["code"], reply["id"]) == (-32600, 1)


# --- JSON-RPC 1.0 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", '"jsonrpc":"1.0",', '"jsonrpc":1.0,', '"version":"1.1",'])
@pytest.mark.parametrize("method", ["add", "later", "put"])
async def test_lax_app_answers_json_rpc_1_in_its_form(version: str, method: str) -> None:
    app, _ = make()
    reply = await app.handle(f'{{{version}"method":"{method}","params":[3],"id":1.50}}')
    assert reply == b'{"result":3,"error":null,"id":1.50}'
    reply = await app.handle(f'{{{version}"method":"{method}","params":["x"],"id":"q"}}')
    answer = read(reply)
    assert list(answer) == ["result", "error", "id"]
    assert (answer["result"], answer["error"]["code"], answer["id"]) == (None, -32602, "q")
    await app.aclose()


@pytest.mark.parametrize(
    "version", ['"jsonrpc":"2.0",', '"jsonrpc":2.0,', '"jsonrpc":"2",', '"jsonrpc":null,']
)
async def test_lax_app_answers_other_versions_as_2(version: str) -> None:
    app, _ = make()
    assert (
        await app.handle(f'{{{version}"method":"add","id":1}}')
        == b'{"jsonrpc":"2.0","result":1,"id":1}'
    )


async def test_lax_app_reads_the_id_null_of_json_rpc_1_as_a_notification() -> None:
    app, ran = make()
    assert await app.handle('{"method":"touch","params":[],"id":null}') is None
    assert await app.handle('{"method":"nothing","params":[],"id":null}') is None
    # A command needs an id.
    assert await app.handle('{"method":"put","params":[],"id":null}') is None
    assert ran == ["touch"]
    assert (
        await app.handle('{"jsonrpc":"2.0","method":"touch","id":null}')
        == b'{"jsonrpc":"2.0","result":null,"id":null}'
    )


async def test_lax_app_reads_arrays_as_2() -> None:
    app, _ = make()
    reply = await app.handle('[{"method":"add","params":[3],"id":1},{"method":"touch","id":null}]')
    assert (
        reply == b'[{"jsonrpc":"2.0","result":3,"id":1},{"jsonrpc":"2.0","result":null,"id":null}]'
    )


async def test_lax_app_keeps_the_limits_and_the_syntax() -> None:
    app, ran = make(limits=Limits(bytes_in=100, depth=5))
    long = read(await app.handle(f'{{"method":"add","params":["{"x" * 100}"],"id":1}}'))
    assert long["error"]["data"]["limit"] == "bytes_in"
    deep = read(await app.handle(f'{{"method":"add","params":{"[" * 9}{"]" * 9},"id":1}}'))
    assert deep["error"]["data"]["limit"] == "depth"
    for broken in (b'{"method":"add","id":1', b'{"method":"add","params":["\xff"],"id":1}'):
        assert read(await app.handle(broken))["error"]["code"] == -32700
    assert ran == []


async def test_lax_app_replays_a_command_of_json_rpc_1() -> None:
    app, ran = make()
    message = '{"method":"put","params":{"a":3,"idempotency_key":"k"},"id":1}'
    replayed: list[Any] = []
    assert [await app.handle(message, replayed=replayed) for _ in range(2)] == [
        b'{"result":3,"error":null,"id":1}'
    ] * 2
    assert (ran, replayed) == (["put"], [1])
    await app.aclose()


def test_lax_app_without_a_loop() -> None:
    app, _ = make()
    assert app.handle_sync(b'{"method":"later","id":1}') == b'{"result":1,"error":null,"id":1}'


async def test_lax_app_serves_our_client() -> None:
    app, _ = make()
    async with in_memory(app) as client:
        assert await client.call("put", {"a": 3}) == 3


async def test_lax_app_serves_json_rpc_1_on_a_pipe() -> None:
    app, _ = make()
    lines: asyncio.Queue[Any] = asyncio.Queue()
    pipe = MemoryPipe(app._connect, app._enter, app._leave)
    await pipe.open(lines.put_nowait, lines.put_nowait)
    for line in (
        b'{"method":"touch","params":[],"id":null}',
        b'{"method":"add","params":[3],"id":1}',
    ):
        await pipe.write(line)
    async with asyncio.timeout(PATIENCE):
        assert await lines.get() == b'{"result":3,"error":null,"id":1}'
    await pipe.aclose()
