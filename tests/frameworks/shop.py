"""The shop of examples/shop.py.

Its first charge of an order waits, after the effect, until its connection is cut.

The harness listens on the port in GATE. A connection to it says that an order is charged; its end
releases the answer.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from runpy import run_path

from wirecall import App, Context

module = run_path(str(Path(__file__).parents[2] / "examples" / "shop.py"))
app: App = module["app"]
paid: dict[str, int] = module["paid"]
port = int(os.environ["GATE"])
waited: set[str] = set()


@app.query(expose=("rpc",))
def paid_for(order: str) -> int:
    """Return what an order has cost its customer so far."""
    return paid.get(order, 0)


@app.middleware
async def gate(ctx: Context, call_next: Callable[[Context], Awaitable[object]]) -> object:
    result = await call_next(ctx)
    new = paid.keys() - waited
    if new:
        waited.update(new)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await reader.read()
        writer.close()
    return result
