"""An app whose tools wait, stream and record what happened to them, and helpers for the tests over
HTTP.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

import pytest
from msgspec import Meta

from tests.calls import make_app
from tests.mcp.asgi import (
    LEGACY,
    PATIENCE,
    REVISIONS,
    Exchange,
    enveloped,
)
from wirecall import App, Context, ToolAnnotations

every_revision = pytest.mark.parametrize("revision", REVISIONS)
legacy = pytest.mark.parametrize("revision", LEGACY)
READS = ToolAnnotations(readOnlyHint=True)
FORM = {"type": "object", "properties": {"name": {"type": "string"}}}


class Lab:
    """An app whose tools wait, stream and record what happened to them."""

    def __init__(self, **options: Any) -> None:
        self.app: App = make_app(**options)
        self.ran: list[str] = []
        self.entered = asyncio.Event()
        self.gate = asyncio.Event()
        self.over = asyncio.Event()
        app = self.app

        @app.query
        def look() -> str:
            self.ran.append("look")
            return "seen"

        @app.tool(annotations=READS)
        async def wait() -> str:
            self.entered.set()
            try:
                await self.gate.wait()
                self.ran.append("waited")
            except asyncio.CancelledError:
                self.ran.append("cancelled")
                raise
            finally:
                self.over.set()
            return "waited"

        @app.tool(annotations=READS)
        async def stream(ctx: Context, count: int = 1) -> str:
            for number in range(count):
                await ctx.log("error", number)
            self.entered.set()
            try:
                await self.gate.wait()
                await ctx.log("error", "last")
                self.ran.append("streamed")
            except asyncio.CancelledError:
                self.ran.append("cancelled")
                raise
            finally:
                self.over.set()
            return "streamed"

        @app.command
        async def pay(ctx: Context) -> str:
            self.entered.set()
            await self.gate.wait()
            await ctx.progress(1)
            self.ran.append("paid")
            self.over.set()
            return "paid"

        @app.tool(annotations=READS)
        async def many(count: int, ctx: Context) -> str:
            for number in range(count):
                await ctx.log("error", number)
            return "all"

        @app.tool(annotations=READS)
        async def hang(ctx: Context) -> str:
            await ctx.log("error", "before")
            await ctx.hang_up(0.5)
            await self.gate.wait()
            return "after"

        @app.tool(annotations=READS)
        def region(
            place: Annotated[str | None, Meta(extra_json_schema={"x-mcp-header": "Place"})] = None,
            count: Annotated[int, Meta(extra_json_schema={"x-mcp-header": "Count"})] = 0,
            deep: Annotated[bool, Meta(extra_json_schema={"x-mcp-header": "Deep"})] = False,
        ) -> str:
            self.ran.append("region")
            return f"{place} {count} {deep}"

        @app.prompt
        def grüße() -> str:
            return "hallo"

        @app.resource("test://ä b")
        def odd() -> str:
            return "odd"

    async def wait_for(self, event: asyncio.Event) -> None:
        async with asyncio.timeout(PATIENCE):
            await event.wait()


async def refused(exchange: Exchange) -> tuple[int, Any]:
    """Status and code of a refusal."""
    await exchange.started()
    body = await exchange.json()
    return exchange.status, body["error"]["code"]


def pairs(headers: Mapping[str, str], *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [*headers.items(), *more]


def call(name: str = "look", **arguments: Any) -> Any:
    return enveloped("tools/call", {"name": name, "arguments": arguments}, 5)


def who(headers: Mapping[str, str]) -> str | None:
    """Name a caller by its header."""
    return headers.get("authorization")
