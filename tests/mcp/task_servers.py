"""MCP servers whose tools become tasks, scripted by a test; a client whose pauses pass at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.mcp.clients import client_of
from tests.mcp.scripted import Reply, Scripted, Seen, event, newest, refusal, result, text
from wirecall import Retry
from wirecall.mcp.client.client import McpClient
from wirecall.mcp.client.inbox import Form
from wirecall.testing import FakeClock

META = "io.modelcontextprotocol/"
TASKS = f"{META}tasks"
KEYS: dict[str, Any] = {"experimental": {"io.wirecall/idempotency": {}}, "tools": {}}
KEY = "io.wirecall/idempotency-key"
ID = "786512e2-9e0d-44bd-8f29-789f320fe840"
TIMES: dict[str, Any] = {
    "createdAt": "2026-11-16T10:30:00Z",
    "lastUpdatedAt": "2026-11-16T10:40:00Z",
    "ttlMs": 60000,
}
QUICK = Retry(attempts=2, first=0.0, cap=0.0)


def task(status: str = "working", **more: Any) -> dict[str, Any]:
    """A state of the task, as `tasks/get` returns it."""
    return {
        "resultType": "complete",
        "taskId": ID,
        "status": status,
        **TIMES,
        "pollIntervalMs": 1000,
        **more,
    }


DONE = task("completed", result={**text("done"), "isError": False})
CREATED = {**task(), "resultType": "task"}
CANCELLED = task("cancelled")

ERRORS: list[Any] = [
    {"code": -32603, "message": "Internal error"},
    {"code": 50910, "message": "?", "data": {"type": "outcome_unknown", "ran": "unknown"}},
    {"code": 4711, "message": "no", "data": [1]},
    {"code": -32602, "message": "Invalid params"},
]


def question(message: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    return {
        "method": "elicitation/create",
        "params": {"mode": "form", "message": message, "requestedSchema": schema},
    }


def asking(*keys: str) -> dict[str, Any]:
    return task("input_required", inputRequests={key: question(key) for key in keys})


class Server(Scripted):
    """A server whose tools become tasks.

    Each `tasks/get` returns the next of `states`, and the last one from then on. A state is a
    result, a whole `Reply`, or a function of the message. `on` answers other methods.
    """

    def __init__(
        self, *states: Any, created: Any = CREATED, capabilities: Any = None, **on: Any
    ) -> None:
        super().__init__(newest(self._reply, capabilities or {"extensions": {TASKS: {}}}))
        self._states = list(states)
        self._created = created
        self._on: dict[str, Any] = {
            "subscriptions/listen": lambda message: refusal(message, -32601),
            **on,
        }

    def _reply(self, message: Any, seen: Seen) -> Any:
        acks: dict[str, Any] = {"tasks/update": {}, "tasks/cancel": {}}
        if seen.method in self._on:
            made = self._on[seen.method]
        elif seen.method == "tasks/get":
            made = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        else:
            made = acks.get(seen.method, self._created)
        made = made(message) if callable(made) else made
        return (
            made if isinstance(made, Reply) or asyncio.iscoroutine(made) else result(message, made)
        )

    def sent(self, method: str) -> list[Any]:
        return [one.body["params"] for one in self.seen if one.method == method]


@asynccontextmanager
async def client_to(server: Scripted, **options: Any) -> AsyncIterator[McpClient]:
    """A client whose pauses pass at once, and are as long as the server asks for."""
    given = {"clock": FakeClock(), "chance": lambda: 0.5, "retry": QUICK, **options}
    async with client_of(server.url, **given) as client:
        yield client


class Still(FakeClock):
    """A clock that stands still until `goes` is set: no pause ends before."""

    def __init__(self) -> None:
        super().__init__()
        self.goes = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.goes.wait()
        self.now += seconds


class Pushing(Server):
    """A server that sends the states of tasks that the test puts into `told`; None ends the stream."""

    def __init__(self, *states: Any, honours: bool = True, **more: Any) -> None:
        super().__init__(*states, **{"subscriptions/listen": self._listen, **more})
        self.told: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._honours = honours

    async def _listen(self, message: Any) -> Reply:
        meta = {f"{META}subscriptionId": message["id"]}
        honoured = message["params"]["notifications"] if self._honours else {}
        method = "notifications/subscriptions/acknowledged"
        ack = {
            "jsonrpc": "2.0",
            "method": method,
            "params": {"_meta": meta, "notifications": honoured},
        }

        async def more() -> str | None:
            telling = asyncio.create_task(self.told.get())
            over = asyncio.create_task(self.over.wait())
            await asyncio.wait([telling, over], return_when=asyncio.FIRST_COMPLETED)
            state = None if over.done() else telling.result()
            for one in (telling, over):
                one.cancel()
            if state is None:
                return None
            return event(
                {
                    "jsonrpc": "2.0",
                    "method": "notifications/tasks",
                    "params": {**state, "_meta": meta},
                }
            )

        return Reply(events=[event(ack)], more=more)


class Asked:
    """A user who fills in forms, and notes them."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def __call__(self, form: Form) -> dict[str, str]:
        self.messages.append(form.message)
        return {"name": f"{form.message}!"}


def answers(server: Server) -> list[dict[str, Any]]:
    given = [params["inputResponses"] for params in server.sent("tasks/update")]
    return [
        {key: answer.get("content", {}).get("name") for key, answer in one.items()} for one in given
    ]
