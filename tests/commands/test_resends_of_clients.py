"""Clients that send a call again on the same session or pipe, against a real server process, over
HTTP and stdio.

Some do so intentionally: after they have read the answer from a resumed stream.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import mcp
import pytest

from tests.mcp.asgi import BASIC, R4, hello, notification, request
from tests.mcp.everything import Everything
from tests.servers import Store

PROGRAM = Path(__file__).with_name("parcels.py")
PATIENCE = 120.0
RECOGNISED = "io.wirecall/recognised"


@pytest.fixture(params=["http", "stdio"])
def target(
    request: pytest.FixtureRequest, store: Store, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Where a client finds a new server."""
    monkeypatch.setenv("PARCELS_LEDGER", store.url)
    if request.param == "stdio":
        environment = {"PARCELS_LEDGER": store.url}
        yield mcp.StdioServerParameters(
            command=sys.executable, args=[str(PROGRAM)], env=environment
        )
        return
    with Everything(PROGRAM) as server:
        yield server.url


def text(result: Any) -> str:
    assert not result.is_error, result
    return str(result.content[0].text)


def is_recognised(result: Any) -> bool:
    return bool((result.meta or {}).get(RECOGNISED))


async def test_resend_by_the_official_client_has_one_effect(target: Any) -> None:
    """Its session sends the call twice and cancels nothing, as SDK 1.x does after a timeout."""
    async with asyncio.timeout(PATIENCE), mcp.Client(target, mode="legacy") as client:
        first = asyncio.create_task(client.call_tool("ship", {"order": "7"}))
        await client.call_tool("wait_until_shipped", {})
        again = asyncio.create_task(client.call_tool("ship", {"order": "7"}))
        await client.call_tool("release_when_sent_twice", {})
        results = [await first, await again]
        assert [text(result) for result in results] == ["parcel 1"] * 2
        assert [is_recognised(result) for result in results] == [False, True]
        intended = await client.call_tool("ship", {"order": "7"})
        assert (text(intended), is_recognised(intended)) == ("parcel 2", False)


# --- after a resumed stream -----------------------------------------------------------------------


async def next_event(answer: aiohttp.ClientResponse) -> tuple[str, Any]:
    """Return the id and the message of the next event that has one."""
    id = ""
    while line := (await answer.content.readline()).decode().rstrip():
        id = line.removeprefix("id: ") if line.startswith("id: ") else id
        if line.startswith("data: {"):
            await answer.content.readline()
            return id, json.loads(line.removeprefix("data: "))
        if line.startswith("data:"):  # an event without a message
            await answer.content.readline()
    raise AssertionError(f"the stream has ended: {answer.status}")


@pytest.mark.parametrize("target", ["http"], indirect=True)
async def test_resumed_answer_is_delivered_before_the_next_message_is_read(target: str) -> None:
    """The client reads the answer from a new stream, and orders the same again at once: 30 orders,
    30 boxes.
    """
    fields = {name: value for name, value in BASIC.items() if name != "host"}
    async with asyncio.timeout(PATIENCE), aiohttp.ClientSession(headers=fields) as http:
        async with http.post(target, json=hello(R4)) as opened:
            session = {
                "mcp-session-id": opened.headers["mcp-session-id"],
                "mcp-protocol-version": R4,
            }
        async with http.post(
            target, json=notification("notifications/initialized"), headers=session
        ) as taken:
            assert taken.status == 202
        for number in range(1, 31):
            params = {
                "name": "pack",
                "arguments": {"order": "7"},
                "_meta": {"progressToken": number},
            }
            cut = await http.post(
                target, json=request("tools/call", params, number), headers=session
            )
            assert cut.content_type == "text/event-stream", await cut.json()
            last, _ = await next_event(cut)
            cut.close()
            resumed = await http.get(target, headers={**session, "last-event-id": last})
            door = request("tools/call", {"name": "open_door", "arguments": {}}, f"door {number}")
            async with http.post(target, json=door, headers=session) as released:
                assert released.status == 200
            _, answer = await next_event(resumed)
            assert answer["result"]["content"][0]["text"] == f"box {number}"
            resumed.close()
