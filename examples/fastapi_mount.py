"""An app inside a FastAPI application: `/shop/rpc` and `/shop/mcp` beside the pages and endpoints
of the other.

    uvicorn examples.fastapi_mount:web          (pip install fastapi uvicorn)

FastAPI does not forward the lifespan protocol to mounted apps. So its own lifespan contains the
app's: both start and stop together, and if a pool cannot be opened, neither starts.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from wirecall import App, Context

PRICES = {"tea": 450, "coffee": 700}


@asynccontextmanager
async def open_prices(_: App) -> AsyncIterator[dict[str, int]]:
    yield dict(PRICES)  # in a real shop: a pool of connections


shop = App("shop", version="1.0", lifespan=open_prices)


@shop.query
def price(sku: str, ctx: Context) -> int:
    """Price of an article in cents."""
    prices: dict[str, int] = ctx.state
    return prices[sku]


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    async with shop:
        yield


web = FastAPI(lifespan=lifespan)
web.mount("/shop", shop.asgi())


@web.get("/")
def home() -> dict[str, str]:
    return {"rpc": "/shop/rpc", "mcp": "/shop/mcp"}
