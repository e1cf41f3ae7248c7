"""A server whose command waits until a query releases it: `parcels.py` serves lines, `parcels.py
--port N` HTTP.

Its clients read what happened through queries, so no test has to wait for a time to pass.
"""

import asyncio
import os
import sys

from wirecall import App, Context
from wirecall.server.context import Next

sent_twice = asyncio.Event()
arrivals: list[str] = []


async def note_arrival(ctx: Context, call_next: Next) -> object:
    """Note each call of `ship` before its command begins."""
    if ctx.method == "ship":
        arrivals.append(ctx.method)
        if len(arrivals) == 2:
            sent_twice.set()
    return await call_next(ctx)


app = App(
    "parcels",
    ledger=os.environ.get("PARCELS_LEDGER", "memory:"),
    middleware=[note_arrival],
)
shipped: list[str] = []
begun = asyncio.Event()
gate = asyncio.Event()
packed: list[str] = []
door = asyncio.Event()


@app.command(resend_after=1e-6, wait=60)
async def ship(order: str) -> str:
    """Ship an order, and answer when it is released.

    Repetitions arrive over a microsecond later.
    """
    shipped.append(order)
    begun.set()
    await gate.wait()
    return f"parcel {len(shipped)}"


@app.command
async def pack(order: str, ctx: Context) -> str:
    """Pack an order, send an event, and answer when the door is opened."""
    packed.append(order)
    await ctx.progress(1)
    await door.wait()
    door.clear()
    return f"box {len(packed)}"


@app.query
def open_door() -> None:
    door.set()


@app.query
async def wait_until_shipped() -> str:
    await begun.wait()
    return "shipped"


@app.query
async def release_when_sent_twice() -> int:
    """Release the order once the repetition has arrived.

    Over HTTP each call has a connection, so a later call may overtake the repetition.
    """
    await sent_twice.wait()
    gate.set()
    return len(shipped)


if __name__ == "__main__":
    if "--port" in sys.argv:
        app.run("http", port=int(sys.argv[-1]))
    else:
        app.run("stdio")
