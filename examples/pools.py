"""A pool of connections that opens before the first call, and a connection for each call that takes
one.

    python examples/pools.py postgresql://localhost/shop        serves http://127.0.0.1:8420/rpc and /mcp

The lifespan opens the pool and closes it. The provider takes a connection out of it for one call:
its transaction commits when the handler returns, and is rolled back if the handler raises.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from wirecall import App, Context, DomainError, Router

Db = AsyncConnection[tuple[Any, ...]]
Pool = AsyncConnectionPool[Db]

TABLE = "CREATE TABLE IF NOT EXISTS articles (sku text PRIMARY KEY, cents bigint NOT NULL)"

articles = Router(prefix="articles.")


@articles.provide
async def connection(ctx: Context) -> AsyncIterator[Db]:
    pool: Pool = ctx.state
    async with pool.connection() as db:
        yield db


@articles.query
async def price(sku: str, db: Db) -> int:
    """Price of an article in cents."""
    found = await (await db.execute("SELECT cents FROM articles WHERE sku = %s", (sku,))).fetchone()
    if found is None:
        raise DomainError(4040, f"there is no article {sku!r}")
    return int(found[0])


@articles.command(on_crash="rerun", destructive=True)  # the same price again changes nothing
async def reprice(sku: str, cents: int, db: Db) -> int:
    """Set the price of an article, and return it."""
    await db.execute(
        "INSERT INTO articles VALUES (%s, %s) ON CONFLICT (sku) DO UPDATE SET cents = excluded.cents",
        (sku, cents),
    )
    if cents <= 0:
        raise DomainError(4220, "a price is more than 0 cents")  # the transaction is rolled back
    return cents


def make_app(url: str) -> App:
    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[Pool]:
        pool: Pool = AsyncConnectionPool(url, min_size=1, max_size=10, open=False)
        async with pool:
            async with pool.connection() as db:
                await db.execute(TABLE)
            yield pool

    app = App("shop", version="1.0", lifespan=lifespan)
    app.include(articles)
    return app


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/pools.py postgresql://localhost/shop")
    make_app(sys.argv[1]).run("http")
