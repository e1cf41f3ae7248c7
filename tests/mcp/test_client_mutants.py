"""Mutated answers of an MCP server: each call has a result, or an error that docs/client.md lists."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import PATIENCE, http
from tests.mcp.bad_peers import QUICK, McpPeer, stream
from tests.mcp.clients import client_of
from tests.size import sized
from wirecall.errors import WirecallError
from wirecall.mcp.client.client import McpClient

encode = msgspec.json.encode

BLOCKS = [
    {"type": "text", "text": "a", "annotations": {"audience": ["user"]}},
    {"type": "image", "data": "aGk=", "mimeType": "image/png"},
    {"type": "resource_link", "uri": "a:b", "name": "x", "size": 5},
    {"type": "resource", "resource": {"uri": "a:b", "blob": "aGk="}},
]
FORM = {
    "method": "elicitation/create",
    "params": {"message": "?", "requestedSchema": {"properties": {"a": {"default": 1}}}},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "x-mcp-header": "Abc"}}}
TASK = {"resultType": "task", "taskId": "a", "status": "working", "pollIntervalMs": 1}
ASKED = {
    "resultType": "input_required",
    "inputRequests": {"q": FORM, "r": {"method": "roots/list"}},
    "requestState": "x",
}
RESULTS: dict[str, list[Any]] = {
    "tools/list": [
        {
            "ttlMs": 5,
            "tools": [{"name": "x", "inputSchema": SCHEMA, "annotations": {"readOnlyHint": True}}],
        }
    ],
    "tools/call": [
        {"content": BLOCKS, "structuredContent": {"result": 5}, "_meta": {"io.wirecall/error": {}}},
        TASK,
        ASKED,
    ],
    "prompts/list": [{"prompts": [{"name": "p", "arguments": [{"name": "a", "required": True}]}]}],
    "prompts/get": [{"messages": [{"role": "user", "content": block} for block in BLOCKS]}],
    "resources/list": [{"resources": [{"uri": "a:b", "name": "x", "size": 5}], "nextCursor": "2"}],
    "resources/read": [{"ttlMs": 100, "contents": [{"uri": "a:b", "text": "x"}]}],
    "completion/complete": [{"completion": {"values": ["a"], "total": 1, "hasMore": False}}],
    "tasks/get": [
        {"taskId": "a", "status": "completed", "result": {"content": BLOCKS}, "pollIntervalMs": 1},
        {"taskId": "a", "status": "failed", "error": {"code": 1, "message": "x"}},
        {
            "taskId": "a",
            "status": "input_required",
            "inputRequests": {"q": FORM},
            "pollIntervalMs": 1,
        },
    ],
}
TOLD: list[Any] = [
    {
        "method": "notifications/progress",
        "params": {"progressToken": 1, "progress": 0.5, "total": 1},
    },
    {"method": "notifications/message", "params": {"level": "info", "data": {"a": 1}}},
    {"method": "notifications/resources/updated", "params": {"uri": "a:b"}},
    {"method": "notifications/cancelled", "params": {"requestId": 1}},
    {"method": "notifications/tasks", "params": {"taskId": "a", "status": "working"}},
    {
        "method": "sampling/createMessage",
        "id": 5,
        "params": {"messages": [{"content": {"text": "x"}}]},
    },
]
CODES = [-32601, -32602, -32603, -32020, -32021, -32022, -32042, 409, 413, 429, 503, 7]
DATA = [
    None,
    {"supported": ["2026-07-28"]},
    {"elicitations": [{"elicitationId": "a", "url": "https://a.b/"}]},
    {"max": 5},
]
ANYTHING: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    2**63,
    1e308,
    "",
    "x",
    "\0",
    [],
    {},
    [[]],
    {"a": None},
    "complete",
    "2026-07-28",
]
SHORT: Any = {"timeout": 0.3}  # of each call; the handshake before it has more time
CALLS: list[Callable[[McpClient], Awaitable[Any]]] = [
    lambda client: client.list_tools(order="safest", **SHORT),
    lambda client: client.list_prompts(**SHORT),
    lambda client: client.list_resources(**SHORT),
    lambda client: client.call_tool("x", {"a": "b"}, progress=lambda *_: None, **SHORT),
    lambda client: client.call_tool("x", {"a": "b"}, type=int, **SHORT),
    lambda client: client.call_tool("x", check=False, **SHORT),
    lambda client: client.start_tool("x", **SHORT),
    lambda client: client.read_resource("a:b", **SHORT),
    lambda client: client.get_prompt("p", **SHORT),
    lambda client: client.complete("p", "a", "b", **SHORT),
]


class Mutants:
    """Makes answers with a part replaced, omitted or doubled."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def __call__(self, message: Any) -> bytes:
        dice = self._dice
        result = {"resultType": "complete", **dice.choice(RESULTS.get(message["method"], [{}]))}
        answer: Any = {"jsonrpc": "2.0", "id": message["id"], "result": self._mutant(result, 0.07)}
        if dice.random() < 0.2:
            error = self._mutant(
                {"code": dice.choice(CODES), "message": "no", "data": dice.choice(DATA)}, 0.1
            )
            answer = {"jsonrpc": "2.0", "id": message["id"], "error": error}
        if dice.random() < 0.05:
            answer = self._mutant(answer, 0.3)
        if dice.random() < 0.3:
            got = [self._mutant({"jsonrpc": "2.0", **one}, 0.05) for one in dice.sample(TOLD, 3)]
            events = [*got, *[answer] * dice.choice([0, 1, 1, 1, 2])]
            return stream(b"".join(b"data: %s\n\n" % encode(event) for event in events))(message)
        return http(
            encode(answer),
            "200 OK" if dice.random() < 0.9 else dice.choice(["404 x", "500 x", "503 x", "302 x"]),
        )

    def _mutant(self, value: Any, share: float) -> Any:
        if self._dice.random() < share:
            return self._dice.choice(ANYTHING)
        if isinstance(value, dict):
            return {
                name: self._mutant(item, share)
                for name, item in value.items()
                if self._dice.random() > share
            }
        if isinstance(value, list):
            return [self._mutant(item, share) for item in value] * self._dice.choice([1, 1, 1, 2])
        return value


@pytest.mark.parametrize("is_newest", [True, False])
async def test_answer_is_a_result_or_one_of_our_errors(is_newest: bool) -> None:
    dice = random.Random(3)
    host: Any = {
        "elicit": lambda _form: {},
        "roots": ["file:///a"],
        "elicit_url": lambda _visit: True,
        "on_log": print,
    }
    for seed in range(sized(small=15, full=300)):
        host["trust"] = dice.random() < 0.5
        server = McpPeer(Mutants(seed), is_newest=is_newest)
        async with server, client_of(server.url, retry=QUICK, **host) as client:
            for call in dice.sample(CALLS, len(CALLS)):
                with suppress(WirecallError):
                    async with asyncio.timeout(PATIENCE):
                        await call(client)
