"""MCP clients of an app in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.client.conftest import nothing_is_left as nothing_is_left
from wirecall import (
    connect,
)
from wirecall.mcp.client.client import McpClient

PATIENCE = 60.0


@asynccontextmanager
async def client_of(
    target: Any, revision: str | None = None, **options: Any
) -> AsyncIterator[McpClient]:
    async with (
        asyncio.timeout(PATIENCE),
        connect(target, protocol="mcp", revision=revision, **options) as client,
    ):
        yield client
