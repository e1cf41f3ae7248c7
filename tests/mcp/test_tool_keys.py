"""Commands called as tools: where their key may be, what is replayed, and what the ledger refuses
(P3 to P5).
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

from tests.calls import make_app, returning
from tests.mcp.asgi import (
    EVERY_WAY,
    KEY,
    PATIENCE,
    R1,
    R2,
    R4,
    R5,
    REPLAYED,
    REVISIONS,
    over_http,
    speak,
)
from wirecall import Context, ToolError
from wirecall.mcp import ResourceLink, ToolResult

every_revision = pytest.mark.parametrize("revision", REVISIONS)
every_way = pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)


class Till:
    """A command that counts its effects."""

    def __init__(self, key: Literal["auto", "off"] = "auto", **options: Any) -> None:
        self.app = make_app(**options)
        self.paid: list[int] = []
        self.keys: list[str | None] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

        @self.app.command(wait=0.05, key=key)
        async def pay(cents: int, ctx: Context) -> list[int]:
            self.entered.set()
            await self.gate.wait()
            self.paid.append(cents)
            self.keys.append(ctx.idempotency_key)
            if cents < 0:
                raise ToolError("not that way")
            if cents > 1000:
                raise ValueError("broken")
            return [cents]


PLACES: dict[str, Callable[[str], dict[str, Any]]] = {
    "meta": lambda key: {"meta": {KEY: key}},
    "camel": lambda key: {"members": {"idempotencyKey": key}},
    "snake": lambda key: {"members": {"idempotency_key": key}},
    "argument": lambda key: {"arguments": {"idempotency_key": key}},
    "header": lambda key: {"headers": {"idempotency-key": key}},
}


def at(*places: tuple[str, str]) -> dict[str, Any]:
    """The arguments that put a key into each of the given places."""
    given: dict[str, Any] = {"arguments": {"cents": 5}}
    for place, key in places:
        for name, value in PLACES[place](key).items():
            given[name] = {**given.get(name, {}), **value}
    return given


@every_revision
@pytest.mark.parametrize("place", PLACES)
async def test_key_is_found_in_every_place(revision: str, place: str) -> None:
    """P3, P5: the place does not matter, the key does."""
    till = Till()
    async with over_http(till.app, revision) as client:
        first = await client.tool("pay", **at((place, "k")))
        assert REPLAYED not in first.get("_meta", {})
        for again in PLACES:
            found = await client.tool("pay", **at((again, "k")))
            assert found["_meta"][REPLAYED] is True
            assert client.last is not None and client.last.header("idempotent-replayed") == "true"
            assert found["content"] == first["content"]
    assert (till.paid, till.keys) == ([5], ["k"])


@pytest.mark.parametrize("one", PLACES)
@pytest.mark.parametrize("two", PLACES)
async def test_call_with_two_keys_is_refused(one: str, two: str) -> None:
    if one == two:
        return
    till = Till()
    async with over_http(till.app) as client:
        error = await client.tool_error("pay", **at((one, "a"), (two, "b")))
        assert (error["code"], error["data"]["type"], till.paid) == (
            -32602,
            "idempotency_key_invalid",
            [],
        )
        assert await client.tool("pay", **at((one, "a"), (two, "a")))


@every_revision
@pytest.mark.parametrize("key", ["", "a b", "ü", "x" * 256, 5, True, None, ["k"], "a\n"])
async def test_bad_key_is_refused(revision: str, key: Any) -> None:
    till = Till()
    async with over_http(till.app, revision) as client:
        for place in ("meta", "camel", "snake", "argument"):
            error = await client.tool_error("pay", **at((place, key)))
            assert (error["code"], error["data"]["type"]) == (-32602, "idempotency_key_invalid"), (
                place
            )
    assert till.paid == []


@pytest.mark.parametrize("key", ["", "a b", "x" * 256])
async def test_bad_key_in_the_header_is_refused(key: str) -> None:
    till = Till()
    async with over_http(till.app) as client:
        error = await client.tool_error("pay", **at(("header", key)))
    assert (error["data"]["type"], till.paid) == ("idempotency_key_invalid", [])


async def test_doubled_key_header_is_400() -> None:
    till = Till()
    async with over_http(till.app) as client:
        message = client.message("tools/call", {"name": "pay", "arguments": {"cents": 5}})
        told = [
            *client.headers(message).items(),
            ("idempotency-key", "a"),
            ("idempotency-key", "a"),
        ]
        assert (await client.post(message, told).started()).status == 400
    assert till.paid == []


async def test_call_without_a_key_counts_each_time_its_answer_arrives() -> None:
    till = Till(mode="production")
    async with over_http(till.app) as client:
        for _ in range(2):
            found = await client.tool("pay", {"cents": 5})
            assert REPLAYED not in found["_meta"]
    assert till.paid == [5, 5]
    assert len(set(till.keys)) == 2 and all(key and key.startswith("auto-") for key in till.keys)


async def test_command_without_a_record_has_no_key() -> None:
    till = Till(key="off")
    async with over_http(till.app) as client:
        await client.tool("pay", {"cents": 5})
    assert till.keys == [None]


@every_way
async def test_replays_are_marked_in_every_revision_on_every_transport(
    transport: str, revision: str
) -> None:
    till = Till()
    async with speak(transport, till.app, revision) as client:
        await client.tool("pay", {"cents": 5}, meta={KEY: "k"})
        again = await client.tool("pay", {"cents": 5}, meta={KEY: "k"})
        assert again["_meta"][REPLAYED] is True
    assert till.paid == [5]


@pytest.mark.parametrize("first", REVISIONS)
async def test_replay_has_the_form_of_the_retry_s_revision(first: str) -> None:
    """The record holds the full result, whatever the revision of the first call."""
    app = make_app()
    ran = []

    @app.command
    def make() -> ToolResult:
        ran.append(1)
        return ToolResult(
            content=[ResourceLink(uri="test://made", name="made")], structured={"made": 1}
        )

    async with over_http(app, first) as client:
        await client.tool("make", meta={KEY: "k"})
        for revision in REVISIONS:
            other = type(client)(client.asgi, revision)
            await other.open()
            found = await other.tool("make", meta={KEY: "k"})
            assert found["_meta"][REPLAYED] is True
            assert found["content"][0]["type"] == (
                "text" if revision in (R1, R2) else "resource_link"
            )
            assert found.get("structuredContent") == (None if revision in (R1, R2) else {"made": 1})
            assert ("resultType" in found) == (revision == R5)
    assert ran == [1]


@every_revision
async def test_recorded_failure_is_replayed_too(revision: str) -> None:
    till = Till()
    async with over_http(till.app, revision) as client:
        for replayed in (None, True):
            found = await client.tool("pay", {"cents": -5}, meta={KEY: "k"})
            assert (found["isError"], found["content"][0]["text"]) == (True, "not that way")
            assert found.get("_meta", {}).get(REPLAYED) is replayed
    assert till.paid == [-5]


@every_revision
async def test_ledgers_errors_over_mcp(revision: str) -> None:
    till = Till()
    async with over_http(till.app, revision) as client:
        await client.tool("pay", {"cents": 5}, meta={KEY: "used"})
        conflict = await client.tool_error("pay", {"cents": 6}, meta={KEY: "used"})
        assert (conflict["code"], conflict["data"]["type"], conflict["data"]["ran"]) == (
            42210,
            "idempotency_key_conflict",
            "no",
        )

        await client.tool("pay", {"cents": 1001}, meta={KEY: "broken"})
        unknown = await client.tool_error("pay", {"cents": 1001}, meta={KEY: "broken"})
        assert (unknown["code"], unknown["data"]["type"], unknown["data"]["ran"]) == (
            50910,
            "outcome_unknown",
            "unknown",
        )

        till.gate.clear()
        till.entered.clear()
        first = client.post(
            client.message(
                "tools/call", {"name": "pay", "arguments": {"cents": 7}}, "w", {KEY: "busy"}
            )
        )
        async with asyncio.timeout(PATIENCE):
            await till.entered.wait()
        busy = await client.tool_error("pay", {"cents": 7}, meta={KEY: "busy"})
        assert (busy["code"], busy["data"]["type"]) == (40910, "idempotency_key_in_progress")
        assert busy["data"]["retry_after_ms"] > 0
        till.gate.set()
        assert "result" in await first.json()
    assert till.paid == [5, 1001, 7]


@every_revision
async def test_result_that_was_too_large_to_keep_is_reported(revision: str) -> None:
    app = make_app()
    ran = []

    @app.command(max_stored_result=10)
    def pay() -> str:
        ran.append(1)
        return "x" * 100

    async with over_http(app, revision) as client:
        assert (await client.tool("pay", meta={KEY: "k"}))["content"][0]["text"] == "x" * 100
        error = await client.tool_error("pay", meta={KEY: "k"})
    assert (error["code"], error["data"]["type"], error["data"]["ran"]) == (
        41010,
        "result_not_retained",
        "yes",
    )
    assert ran == [1]


async def test_duplicates_at_once_have_one_effect() -> None:
    app = make_app()
    ran = []
    entered = asyncio.Event()
    gate = asyncio.Event()

    @app.command
    async def pay() -> int:
        entered.set()
        await gate.wait()
        ran.append(1)
        return 1

    async with over_http(app) as client:
        calls = [
            client.post(client.message("tools/call", {"name": "pay"}, id, {KEY: "k"}))
            for id in range(5)
        ]
        async with asyncio.timeout(PATIENCE):
            await entered.wait()
        gate.set()
        answers = [await call.json() for call in calls]
    assert ran == [1]
    assert sorted(bool(answer["result"]["_meta"].get(REPLAYED)) for answer in answers) == [
        False,
        True,
        True,
        True,
        True,
    ]


def who(headers: Mapping[str, str]) -> str | None:
    return headers.get("authorization")


async def test_key_belongs_to_its_caller() -> None:
    till = Till(authenticate=who)
    async with over_http(till.app, R5, headers={"authorization": "ann"}) as client:
        await client.tool("pay", {"cents": 5}, meta={KEY: "k"})
        await client.tool("pay", {"cents": 6}, meta={KEY: "k"}, headers={"authorization": "bob"})
    assert till.paid == [5, 6]


async def test_bad_arguments_do_not_claim_the_key() -> None:
    till = Till()
    async with over_http(till.app) as client:
        assert (await client.tool("pay", {"cents": "five"}, meta={KEY: "k"}))["isError"]
        assert await client.tool("pay", {"cents": 5}, meta={KEY: "k"})
    assert till.paid == [5]


@every_revision
async def test_key_may_be_required(revision: str) -> None:
    app = make_app()
    ran = []

    @app.command(key="required")
    def pay() -> str:
        ran.append(1)
        return "paid"

    async with over_http(app, revision) as client:
        tool = (await client.result("tools/list"))["tools"][0]
        assert tool["inputSchema"]["required"] == ["idempotency_key"]
        assert tool["inputSchema"]["properties"]["idempotency_key"]["maxLength"] == 255
        error = await client.tool_error("pay")
        assert (error["code"], error["data"]["type"], ran) == (
            -32602,
            "idempotency_key_required",
            [],
        )
        assert await client.tool("pay", meta={KEY: "k"})
        assert await client.tool("pay", {"idempotency_key": "k"})
    assert ran == [1]
    document = json.loads(
        await app.handle(b'{"jsonrpc":"2.0","id":1,"method":"rpc.discover"}') or b""
    )["result"]
    assert [(param["name"], param["required"]) for param in document["methods"][0]["params"]] == [
        ("idempotency_key", True)
    ]


@every_revision
async def test_key_may_be_requested_from_the_model(revision: str) -> None:
    """A visible argument with a description; the function does not see it."""
    app = make_app()
    ran = []

    @app.command(key="ask")
    def pay(cents: int) -> str:
        ran.append(cents)
        return "paid"

    async with over_http(app, revision) as client:
        schema = (await client.result("tools/list"))["tools"][0]["inputSchema"]
        assert schema["properties"]["idempotency_key"]["type"] == "string"
        assert len(schema["properties"]["idempotency_key"]["description"]) > 40
        assert sorted(schema["required"]) == ["cents", "idempotency_key"]
        missing = await client.call("tools/call", {"name": "pay", "arguments": {"cents": 5}})
        if revision in (R4, R5):  # an argument is missing: the model gets the error
            assert (
                missing["result"]["isError"]
                and "idempotency_key" in missing["result"]["content"][0]["text"]
            )
        else:
            assert missing["error"]["code"] == -32602
        for _ in range(2):
            assert await client.tool("pay", {"cents": 5, "idempotency_key": "k"})
    assert ran == [5]


async def test_query_works_with_and_without_a_key() -> None:
    app = make_app()
    app.query(name="give")(returning(str, "x"))
    async with over_http(app) as client:
        for _ in range(2):
            found = await client.tool("give", meta={KEY: "k"}, headers={"idempotency-key": "k"})
            assert REPLAYED not in found["_meta"]
