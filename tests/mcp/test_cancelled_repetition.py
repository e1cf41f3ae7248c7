"""A call is cancelled and repeated at once: the server recognises the repetition before the first
ends.
"""

import asyncio
import json
import os
from typing import Any

from tests.calls import make_app
from tests.mcp.asgi import PATIENCE, R5
from wirecall.transports.stdio import serve_streams

META = {
    "io.modelcontextprotocol/protocolVersion": R5,
    "io.modelcontextprotocol/clientCapabilities": {},
}


def line(method: str, params: dict[str, Any], **members: Any) -> bytes:
    return (
        json.dumps({"jsonrpc": "2.0", "method": method, "params": params, **members}).encode()
        + b"\n"
    )


def call(id: int) -> bytes:
    return line("tools/call", {"name": "pay", "arguments": {}, "_meta": META}, id=id)


async def test_call_cancelled_and_repeated_in_one_message_has_one_effect() -> None:
    app = make_app()
    begun = asyncio.Event()
    gate = asyncio.Event()
    effects = list[int]()

    @app.command
    async def pay() -> int:
        effects.append(1)
        begun.set()
        await gate.wait()
        return len(effects)

    reader, to_server = os.pipe()
    from_server, writer = os.pipe()
    async with asyncio.timeout(PATIENCE):
        serving = asyncio.ensure_future(
            serve_streams(app._connect, reader, writer, cleanup=app.aclose)
        )
        os.write(to_server, call(1))
        await begun.wait()
        cancel = line("notifications/cancelled", {"requestId": 1})
        os.write(to_server, cancel + call(2))
        loop = asyncio.get_running_loop()
        answers = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(answers), os.fdopen(from_server, "rb")
        )
        loop.call_soon(gate.set)
        answer = json.loads(await answers.readline())
        os.close(to_server)
        await serving
        transport.close()
        os.close(reader)
        os.close(writer)
    assert answer["id"] == 2
    assert effects == [1]
    assert answer["result"]["_meta"]["io.wirecall/recognised"] is True
