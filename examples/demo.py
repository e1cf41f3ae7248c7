"""What wirecall does, in a few seconds: `make demo`.

Every line below is a real message to a real app, and every answer is checked: the demo ends with exit code 1 if one of
them is not what it should be.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from wirecall import App

COLOUR = (sys.stdout.isatty() and "NO_COLOR" not in os.environ) or "FORCE_COLOR" in os.environ


def paint(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if COLOUR else text


def make_app(ledger: str) -> App:
    app = App("demo", version="1.0", mode="production", ledger=ledger)
    charged: list[int] = []

    @app.query(name="sum")
    def total(*numbers: int) -> int:
        return sum(numbers)

    @app.query
    def subt(minuend: int, subtrahend: int) -> int:
        return minuend - subtrahend

    @app.query(notification_allowed=True)
    def notify_hello(times: int) -> None: ...

    @app.command
    async def charge(order: str, cents: int) -> dict[str, Any]:
        charged.append(cents)
        return {"order": order, "receipt": f"r-{len(charged)}"}

    @app.query
    def charges() -> list[int]:
        return charged

    return app


class Demo:
    def __init__(self, app: App) -> None:
        self.app = app
        self.failed = 0

    def title(self, text: str) -> None:
        print(f"\n{paint('1', text)}")

    async def send(self, message: str, expected: Any, replayed: list[Any] | None = None) -> None:
        """Send a message, show the answer, and check the part of it that matters."""
        ids: list[Any] = []
        reply = await self.app.handle(message, replayed=ids)
        answer = None if reply is None else json.loads(reply)
        good = essence(answer) == expected and ids == (replayed or [])
        self.failed += not good
        print(f"  {paint('36', '-->')} {message}")
        mark = paint("33", "  replayed from the ledger") if ids else ""
        print(f"  {paint('32' if good else '31', '<--')} {reply.decode() if reply else paint('2', '(nothing)')}{mark}")
        if not good:
            print(paint("31", f"      expected {expected}"))


def essence(answer: Any) -> Any:
    """Ids with results or error codes, in the order of the answers."""
    if isinstance(answer, list):
        return [essence(entry) for entry in answer]
    if answer is None:
        return None
    return (answer["id"], answer["result"] if "result" in answer else answer["error"]["code"])


async def show(demo: Demo) -> None:
    demo.title("Many calls in one message: two calls and a notification")
    await demo.send(
        '[{"jsonrpc":"2.0","method":"sum","params":[1,2,3],"id":1},'
        '{"jsonrpc":"2.0","method":"notify_hello","params":[7]},'
        '{"jsonrpc":"2.0","method":"subt","params":[42,23],"id":2}]',
        [(1, 6), (2, 19)],
    )
    demo.title("A malformed entry costs only itself, and keeps its id and its place")
    await demo.send(
        '[{"jsonrpc":"2.0","method":"sum","params":[1,2,3],"id":1},{"id":2},'
        '{"jsonrpc":"2.0","method":"sum","params":["x"],"id":3},{"jsonrpc":"2.0","method":"subt","params":[42,23],"id":4}]',
        [(1, 6), (2, -32600), (3, -32602), (4, 19)],
    )
    demo.title("Broken JSON is one error; an empty batch is one error; only notifications are answered by nothing")
    await demo.send('[{"jsonrpc":"2.0","method":"sum","params":[1,2', (None, -32700))
    await demo.send("[]", (None, -32600))
    await demo.send('[{"jsonrpc":"2.0","method":"notify_hello","params":[7]}]', None)
    demo.title("A command without an id is refused, and so is one without a key")
    await demo.send('{"jsonrpc":"2.0","method":"charge","params":{"order":"7","cents":500}}', (None, -32600))
    await demo.send('{"jsonrpc":"2.0","method":"charge","params":{"order":"7","cents":500},"id":1}', (1, -32602))
    demo.title("The answer was lost, the caller tries again under a new id: charged once")
    charge = '{"jsonrpc":"2.0","method":"charge","params":{"order":"7","cents":500,"idempotency_key":"order-7"},"id":%d}'
    receipt = {"order": "7", "receipt": "r-1"}
    await demo.send(charge % 1, (1, receipt))
    await demo.send(charge % 2, (2, receipt), replayed=[2])
    await demo.send('{"jsonrpc":"2.0","method":"charges","id":3}', (3, [500]))
    demo.title("The same key for another amount is a bug of the caller, and nothing runs")
    await demo.send((charge % 4).replace("500", "900"), (4, 42210))
    await demo.send('{"jsonrpc":"2.0","method":"charges","id":5}', (5, [500]))


async def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        async with make_app(f"sqlite:{Path(folder) / 'ledger.db'}") as app:
            demo = Demo(app)
            await show(demo)
    verdict = ("31", f"{demo.failed} answers were wrong") if demo.failed else ("32", "all answers as they should be")
    print(f"\n{paint(*verdict)}")
    return 1 if demo.failed else 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
