"""Helpers that talk to a server about its tasks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.calls import make_app
from tests.mcp.asgi import (
    PATIENCE,
    R5,
    Client,
    speak,
)
from wirecall import (
    App,
)

TASKS = "io.modelcontextprotocol/tasks"


DECLARED: dict[str, Any] = {"extensions": {TASKS: {}}, "elicitation": {}}


OVER = {"completed", "failed", "cancelled"}


BOOL = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}


@asynccontextmanager
async def talk(
    app: App, transport: str = "http", capabilities: Any = None
) -> AsyncIterator[Client]:
    async with (
        asyncio.timeout(PATIENCE),
        app,
        speak(transport, app, R5, capabilities=capabilities or DECLARED) as client,
    ):
        yield client


async def start(
    client: Client, name: str, arguments: Any = None, members: Any = None, **more: Any
) -> Any:
    """Call a tool that becomes a task, and return the task."""
    told = await client.tool(name, arguments or {}, members=members, **more)
    assert told["resultType"] == "task", told
    assert not {"result", "error", "inputRequests", "requestState"} & told.keys()
    return told


async def get(client: Client, task: Any) -> Any:
    told = await client.result("tasks/get", {"taskId": task["taskId"]})
    assert told["resultType"] == "complete"
    assert told["taskId"] == task["taskId"]
    return told


async def until(client: Client, task: Any, *statuses: str) -> Any:
    while True:
        told = await get(client, task)
        if told["status"] in statuses:
            return told
        assert told["status"] not in OVER, told


class Desk:
    """An app whose commands wait for a gate, and the effects that they had."""

    def __init__(self, **options: Any) -> None:
        self.app = make_app(**options)
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.effects = list[str]()

    async def act(self, name: str) -> str:
        self.effects.append(name)
        self.begun.set()
        await self.gate.wait()
        return f"{name} is done"
