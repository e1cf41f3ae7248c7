"""A shop that a client reaches in every way."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec import Struct

from tests.client.peers import served
from wirecall import App, connect


class Price(Struct):
    sku: str
    cents: int


def shop() -> App:
    app = App("shop")
    stock: dict[str, int] = {}

    @app.query
    def price(sku: str) -> Price:
        return Price(sku, len(sku) * 100)

    @app.query(name="stock.count")
    def count(sku: str) -> int:
        return stock.get(sku, 0)

    @app.command(name="stock.add")
    async def add(sku: str, number: int) -> int:
        stock[sku] = stock.get(sku, 0) + number
        return stock[sku]

    @app.query(notification_allowed=True)
    def note(text: str) -> None:
        stock[text] = 1

    return app


CHILD = """
from tests.client.shops import shop
shop().run("stdio")
"""


@asynccontextmanager
async def connected(way: str, **options: Any) -> AsyncIterator[Any]:
    if way == "memory":
        async with connect(shop(), **options) as client:
            yield client
    elif way == "child":
        async with connect([sys.executable, "-c", CHILD], **options) as client:
            yield client
    else:
        async with served(shop(), way) as url, connect(f"{url}/rpc", **options) as client:
            yield client


WAYS = pytest.mark.parametrize("way", ["memory", "child", "uvicorn", "granian"])
