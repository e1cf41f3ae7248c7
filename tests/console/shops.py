"""A watched shop, and messages to it."""

import asyncio
import json
from typing import Annotated, Any

from wirecall import App
from wirecall.console.tap import Capture, Tap
from wirecall.protocol.secrets import Secret


def make_app(capture: Capture = "facts", **options: Any) -> tuple[App, Tap]:
    app = App("shop", references=True, **options)
    tap = Tap(capture)
    app.configure(tap=tap)

    @app.query
    def price(sku: str) -> int:
        return len(sku)

    @app.query
    async def look(sku: str) -> int:
        await asyncio.sleep(0)
        return len(sku)

    @app.query
    def fail(sku: str) -> int:
        raise ValueError(sku)

    @app.command
    async def charge(cents: int, card: Annotated[str, Secret] = "") -> dict[str, int]:
        await asyncio.sleep(0)
        return {"paid": cents}

    return app, tap


def call(id: object, method: str, /, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id, "method": method, "params": params}


async def send(app: App, *calls: dict[str, Any]) -> Any:
    message: object = list(calls)
    if len(calls) == 1:
        message = calls[0]
    reply = await app.handle(json.dumps(message).encode())
    return None if reply is None else json.loads(reply)
