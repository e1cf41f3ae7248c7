"""The server of docs/tutorial.md: wirecall serve examples/tutorial_server.py"""

import asyncio

from wirecall import App

app = App("shop")
paid: dict[str, int] = {}


@app.command(destructive=False)
async def charge(order: str, cents: int) -> int:
    """Take money for an order, and return what it has cost so far."""
    paid[order] = paid.get(order, 0) + cents
    await asyncio.sleep(0.5)  # the bank takes a moment to confirm
    return paid[order]
