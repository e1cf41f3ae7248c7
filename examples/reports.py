"""Long work as tasks, and a web page beside it: `/` is the page, `/rpc` and `/mcp` are the server.

    uvicorn examples.reports:web                (pip install starlette uvicorn)

A report takes a while. An MCP client that knows tasks gets one at once, looks at its progress, and
fetches the result later, also after its connection broke. The page lists the reports that are done.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html import escape

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Mount, Route

from wirecall import App, Context

MONTHS = 12
app = App("reports", version="1.0")
done: dict[str, int] = {}


@app.command(task=True, destructive=False)
async def report(year: int, ctx: Context) -> dict[str, int]:
    """Add up the sales of a year, month by month."""
    total = 0
    for month in range(1, MONTHS + 1):
        await asyncio.sleep(0.01)  # in a real shop: a query that takes its time
        total += year % 100 * month
        await ctx.progress(month, MONTHS)
    done[str(year)] = total
    return {"year": year, "total": total}


async def page(_: Request) -> HTMLResponse:
    rows = "".join(f"<li>{escape(year)}: {total}</li>" for year, total in done.items())
    return HTMLResponse(f"<!doctype html><title>Reports</title><ul>{rows}</ul>")


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    async with app:  # tasks in flight end with the page's server
        yield


web = Starlette(routes=[Route("/", page), Mount("/", app.asgi())], lifespan=lifespan)
