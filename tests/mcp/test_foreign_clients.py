"""Clients of other projects talk to `examples/everything.py` (V8): the SDKs for Python and
TypeScript, and FastMCP.

Every client runs the same story, over HTTP and over stdin and stdout, at the newest revision and at
older ones, and reports what it saw. The expected report depends only on the revision: see
`expected`.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import fastmcp
import mcp
import mcp_types
import pytest
from fastmcp.client.transports import StdioTransport
from mcp_types import (
    CreateMessageResult,
    ElicitResult,
    ListRootsResult,
    PromptReference,
    Root,
    TextContent,
)
from pydantic import FileUrl

from tests.mcp.everything import PROGRAM, Everything
from tests.mcp.node import installed, node

# The SDKs warn of features that the newest revision deprecates (sampling, roots); these tests
# ignore that.
pytestmark = pytest.mark.filterwarnings("ignore::mcp.MCPDeprecationWarning")

PATIENCE = 120.0  # seconds for the stories of one client
TYPESCRIPT = ("@modelcontextprotocol/sdk@1.32.2", "@modelcontextprotocol/client@2.4.0")
COMMAND = (sys.executable, str(PROGRAM))

NEWEST = "2026-07-28"
HANDSHAKES = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")

# The second call needs the result of the first.
BATCH = {
    "calls": [
        {"id": "here", "tool": "structured_output", "arguments": {"place": "Paris"}},
        {"tool": "structured_output", "arguments": {"place": {"$ref": "here#/signs/0"}}},
    ],
    "return": ["1"],
}
BATCH_ASKED = {"calls": [{"tool": "test_input_required_result_elicitation"}]}

Story: TypeAlias = dict[str, Any]
Server: TypeAlias = Everything | None  # over HTTP; None makes the client start its own


def expected(revision: str) -> Story:
    weather = {"place": "Paris", "celsius": 21.5, "signs": ["dry", "calm"]}
    return {
        "revision": revision,
        "server": "everything",
        "first_tool": "test_simple_text",
        "text": [False, "This is a simple text response for testing."],
        "structured": weather if revision >= "2025-06-18" else None,
        "structured_text": weather,
        "audio": "audio" if revision >= "2025-03-26" else "text",
        "link": "resource_link" if revision >= "2025-06-18" else "text",
        "failed": [True, "This tool intentionally returns an error for testing"],
        "header": [False, "Looked for all in north"],
        "resource": "This is the content of the static text resource.",
        "template": "7",
        "prompt": "Prompt with arguments: arg1='a', arg2='b'",
        "completion": ["paris", "park", "party"],
        "progressed": [False, "Progress is complete"],
        "progress": [[0, 100], [50, 100], [100, 100]],
        "reconnected": [False, "Reconnection test completed successfully"],
        "sampled": [False, "LLM response: 42"],
        "elicited": [False, "Hello, Ann!"],
        "two_rounds": [False, "Ann likes Ann"],
        "roots": [False, "Roots: file:///project"],
        "batch": [
            False,
            [
                {
                    "id": "1",
                    "tool": "structured_output",
                    "ok": True,
                    "result": {**weather, "place": "dry"},
                }
            ],
        ],
        "batch_asked": [
            False,
            [
                {
                    "id": "0",
                    "tool": BATCH_ASKED["calls"][0]["tool"],
                    "ok": True,
                    "result": "Hello, Ann!",
                }
            ],
        ],
        "unknown_resource": -32602 if revision == NEWEST else -32002,
    }


def check(story: Story, revision: str) -> None:
    wanted = expected(revision)
    # These revisions have no elicitation: the tool fails, for the model to see.
    if revision < "2025-06-18":
        for part in ("elicited", "two_rounds", "batch_asked"):
            assert story[part][0] is True
            del story[part], wanted[part]
    assert story == wanted


@pytest.fixture(scope="module")
def everything() -> Iterator[Everything]:
    with Everything() as server:
        yield server


@pytest.fixture(params=["http", "stdio"])
def server(request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue("everything") if request.param == "http" else None


@pytest.fixture
def offered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The revision that the Python clients offer; by default they offer only their newest of each
    kind.
    """
    revision = str(request.param)
    if revision != NEWEST:
        monkeypatch.setattr("mcp.client.session.LATEST_HANDSHAKE_VERSION", revision)
    return revision


# --- what the user and the model of the client say ------------------------------------------------


async def sample(context: Any, params: mcp_types.CreateMessageRequestParams) -> CreateMessageResult:
    return CreateMessageResult(
        role="assistant", content=TextContent(type="text", text="42"), model="m"
    )


async def elicit(context: Any, params: Any) -> ElicitResult:
    return ElicitResult(
        action="accept", content=dict.fromkeys(params.requested_schema["properties"], "Ann")
    )


async def roots(context: Any) -> ListRootsResult:
    return ListRootsResult(roots=[Root(uri=FileUrl("file:///project"), name="project")])


# --- the official SDK for Python ------------------------------------------------------------------


def python_client(server: Server, revision: str, **handlers: Any) -> mcp.Client:
    target = (
        server.url
        if server
        else mcp.StdioServerParameters(command=COMMAND[0], args=list(COMMAND[1:]))
    )
    mode = "auto" if revision == NEWEST else "legacy"
    return mcp.Client(
        target,
        mode=mode,
        sampling_callback=sample,
        elicitation_callback=elicit,
        list_roots_callback=roots,
        **handlers,
    )


@pytest.mark.parametrize("offered", [NEWEST, *HANDSHAKES], indirect=True)
async def test_python_sdk_runs_the_story(server: Server, offered: str) -> None:
    async with asyncio.timeout(PATIENCE), python_client(server, offered) as client:
        story = await tell(client)
    check(story, offered)


async def test_changes_reach_a_listener_of_the_python_sdk(server: Server) -> None:
    async with asyncio.timeout(PATIENCE), python_client(server, NEWEST) as client:
        watched = client.listen(
            tools_list_changed=True, resource_subscriptions=["test://watched-resource"]
        )
        async with watched as subscription:
            events = aiter(subscription)
            await client.call_tool("test_trigger_tool_change", {})
            assert type(await anext(events)).__name__ == "ToolsListChanged"
            await client.call_tool("trigger_resource_update", {})
            assert getattr(await anext(events), "uri", None) == "test://watched-resource"


async def test_changes_reach_a_session_of_the_python_sdk(server: Server) -> None:
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def hear(message: Any) -> None:
        seen.put_nowait(message.method)

    async with (
        asyncio.timeout(PATIENCE),
        python_client(server, "2025-11-25", message_handler=hear) as client,
    ):
        await client.subscribe_resource("test://watched-resource")
        for trigger, method in (
            ("test_trigger_tool_change", "notifications/tools/list_changed"),
            ("trigger_resource_update", "notifications/resources/updated"),
        ):
            await client.call_tool(trigger, {})
            while await seen.get() != method:
                pass


@pytest.mark.parametrize("offered", [NEWEST, "2025-11-25"], indirect=True)
async def test_log_messages_reach_the_python_sdk_from_the_level_it_asked_for(
    server: Server, offered: str
) -> None:
    seen: list[Any] = []

    async def hear(params: mcp_types.LoggingMessageNotificationParams) -> None:
        seen.append((params.level, params.logger, params.data))

    asked = {"log_level": "warning"} if offered == NEWEST else {}
    async with (
        asyncio.timeout(PATIENCE),
        python_client(server, offered, logging_callback=hear, **asked) as client,
    ):
        if offered != NEWEST:
            await client.set_logging_level("warning")
        await client.call_tool("test_tool_with_logging", {})  # three of level info
        await client.call_tool("test_logging_tool", {})
    assert seen == [("warning", "storage", {"disk": "nearly full", "left": 0.07})]


# --- FastMCP --------------------------------------------------------------------------------------


@pytest.mark.parametrize("offered", [NEWEST, "2025-11-25"], indirect=True)
async def test_fastmcp_runs_the_story(server: Server, offered: str) -> None:
    target: Any = (
        server.url if server else StdioTransport(command=COMMAND[0], args=list(COMMAND[1:]))
    )
    client = fastmcp.Client(
        target,
        mode="auto" if offered == NEWEST else "legacy",
        sampling_handler=lambda messages, params, context: "42",
        elicitation_handler=lambda message, kind, params, context: elicit(context, params),
        roots=["file:///project"],
    )
    async with asyncio.timeout(PATIENCE), client:
        story = await tell(by_the_names_of_the_sdk(client))
    check(story, offered)


def by_the_names_of_the_sdk(client: Any) -> Any:
    async def call_tool(name: str, arguments: dict[str, Any], progress_callback: Any = None) -> Any:
        return await client.call_tool(
            name, arguments, progress_handler=progress_callback, raise_on_error=False
        )

    return SimpleNamespace(
        protocol_version=client.protocol_version,
        server_info=client.server_info,
        list_tools=client.list_tools_mcp,
        call_tool=call_tool,
        read_resource=client.read_resource_mcp,
        get_prompt=client.get_prompt,
        complete=client.complete_mcp,
    )


# --- the official SDK for TypeScript --------------------------------------------------------------


OFFERED = {1: HANDSHAKES, 2: (NEWEST, "2025-11-25", "2025-03-26")}


@cache
def told_by_typescript(sdk: int, url: str | None) -> dict[str, str]:
    """The stories by revision, from one process: loading the SDK takes longer than running a story."""
    wanted: Story = {"modules": str(installed(*TYPESCRIPT)), "sdk": sdk}
    wanted |= {"revisions": OFFERED[sdk], "batch": BATCH, "batch_asked": BATCH_ASKED}
    where = {"url": url} if url else {"command": COMMAND}
    program = Path(__file__).with_name("typescript_client.mjs")
    run = subprocess.run(
        [node(), program, json.dumps({**wanted, **where})],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return dict(zip(OFFERED[sdk], run.stdout.splitlines(), strict=True))


@pytest.mark.parametrize(
    ("sdk", "revision"),
    [(sdk, revision) for sdk, offered in OFFERED.items() for revision in offered],
)
def test_typescript_sdk_runs_the_story(server: Server, sdk: int, revision: str) -> None:
    story = json.loads(told_by_typescript(sdk, server.url if server else None)[revision])
    steps = expected(revision)["progress"]
    told = story.pop("progress")
    # It drops the progress that it reads together with the answer.
    assert told and told == steps[: len(told)]
    story["progress"] = steps
    if sdk == 2:  # it reports the newest revision's code to its user, whichever the server sent
        assert story["unknown_resource"] == -32602
        story["unknown_resource"] = expected(revision)["unknown_resource"]
    check(story, revision)


# --- the story ------------------------------------------------------------------------------------


async def tell(client: Any) -> Story:
    """Run the story with a Python client."""

    async def tool(name: str, arguments: dict[str, Any] | None = None, **options: Any) -> list[Any]:
        result = await client.call_tool(name, arguments or {}, **options)
        return [result.is_error, text_of(result.content[0])]

    async def batch(calls: dict[str, Any]) -> list[Any]:
        failed, text = await tool("batch", calls)
        return [failed, json.loads(text)["results"]]

    async def kind(name: str) -> str:
        content: str = (await client.call_tool(name, {})).content[0].type
        return content

    steps: list[list[float | None]] = []

    async def step(progress: float, total: float | None, message: str | None) -> None:
        steps.append([progress, total])

    tools = (await client.list_tools()).tools
    structured = await client.call_tool("structured_output", {"place": "Paris"})
    prompt = await client.get_prompt("test_prompt_with_arguments", {"arg1": "a", "arg2": "b"})
    reference = PromptReference(type="ref/prompt", name="test_prompt_with_arguments")
    completion = await client.complete(reference, {"name": "arg1", "value": "par"})
    return {
        "revision": client.protocol_version,
        "server": client.server_info.name,
        "first_tool": tools[0].name,
        "text": await tool("test_simple_text"),
        "structured": structured.structured_content,
        "structured_text": json.loads(text_of(structured.content[0])),
        "audio": await kind("test_audio_content"),
        "link": await kind("resource_link"),
        "failed": await tool("test_error_handling"),
        "header": await tool("custom_header", {"region": "north"}),
        "resource": text_of((await client.read_resource("test://static-text")).contents[0]),
        "template": json.loads(
            text_of((await client.read_resource("test://template/7/data")).contents[0])
        )["id"],
        "prompt": text_of(prompt.messages[0].content),
        "completion": completion.completion.values,
        "progressed": await tool("test_tool_with_progress", progress_callback=step),
        "progress": steps,
        "reconnected": await tool("test_reconnection"),
        "batch": await batch(BATCH),
        "batch_asked": await batch(BATCH_ASKED),
        "sampled": await tool("test_sampling", {"prompt": "?"}),
        "elicited": await tool("test_input_required_result_elicitation"),
        "two_rounds": await tool("test_input_required_result_multi_round"),
        "roots": await tool("test_input_required_result_list_roots"),
        "unknown_resource": await code_of(lambda: client.read_resource("test://nothing")),
    }


def text_of(content: Any) -> str:
    text: str = content.text
    return text


async def code_of(call: Callable[[], Awaitable[Any]]) -> int | None:
    try:
        await call()
    except mcp.MCPError as error:
        return error.code
    return None
