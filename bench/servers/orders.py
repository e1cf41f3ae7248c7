"""The servers of bench/batches.py: a shop whose tools each take a moment, ours and FastMCP's.

python -m bench.servers.orders fastmcp PORT
"""

import asyncio
import sys
from typing import Any

from wirecall import App, BatchTool

# Seconds that each tool waits for its database.
WORK = 0.01

ours = App(
    "orders",
    version="1.0",
    mode="production",
    ledger="memory:",
    references=True,
    batch_tool=BatchTool(tools="all", destructive="allow"),
    single_user=True,
)


async def price(sku: str) -> int:
    """The price of an article."""
    await asyncio.sleep(WORK)
    return len(sku)


async def find_order(customer: str) -> dict[str, Any]:
    """The orders of a customer, with all that a shop keeps about them."""
    await asyncio.sleep(WORK)
    orders = [
        {
            "id": f"o-{number}",
            "total": 1250 + number,
            "customer": customer,
            "lines": [{"sku": f"tea-{line}", "count": line} for line in range(8)],
        }
        for number in range(4)
    ]
    return {"orders": orders}


async def charge(order: str, cents: int) -> dict[str, Any]:
    """Charge an order."""
    await asyncio.sleep(WORK)
    return {"charge": f"c-{order}", "cents": cents, "state": "paid", "by": "card", "fee": 25}


async def receipt(order: str) -> dict[str, Any]:
    """The receipt of an order."""
    await asyncio.sleep(WORK)
    return {"receipt": f"r-{order}"}


async def slow(seconds: float) -> float:
    """A query that takes a while."""
    await asyncio.sleep(seconds)
    return seconds


def count(number: int) -> int:
    """A query that does not wait, to compare the costs of an entry."""
    return number


def put(number: int) -> int:
    """A command that does not wait, to compare the costs of an entry."""
    return number


for tool in (price, find_order, receipt, slow, count):
    ours.query(tool)
ours.command(key="auto", destructive=False)(charge)
ours.command(key="auto", destructive=False)(put)


def fastmcp(port: int) -> None:
    import logging

    from fastmcp import FastMCP
    from fastmcp.contrib.bulk_tool_caller import BulkToolCaller

    logging.disable(logging.INFO)
    server: Any = FastMCP("orders")
    for tool in (price, find_order, charge, receipt):
        server.tool(tool)
    BulkToolCaller().register_tools(server)
    _run(server, port)


def code_mode(port: int) -> None:
    import logging

    from fastmcp import FastMCP
    from fastmcp.experimental.transforms.code_mode import CodeMode

    logging.disable(logging.INFO)
    server: Any = FastMCP("orders", transforms=[CodeMode()])
    for tool in (price, find_order, charge, receipt):
        server.tool(tool)
    _run(server, port)


def _run(server: Any, port: int) -> None:
    more = {"json_response": True, "stateless_http": True, "uvicorn_config": {"log_level": "error"}}
    server.run("http", host="127.0.0.1", port=port, path="/mcp", show_banner=False, **more)


if __name__ == "__main__":
    {"fastmcp": fastmcp, "code_mode": code_mode}[sys.argv[1]](int(sys.argv[2]))
