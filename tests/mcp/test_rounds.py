"""Calls of several rounds and their state (2026-07-28; matrix 1.8, trap 39)."""

import base64
from collections.abc import Mapping
from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import (
    R4,
    R5,
    HttpClient,
    over_http,
)
from tests.mcp.desk import ALL, ANN, FORM, READS, desk, text
from wirecall import App, Context


async def test_state_changes_from_round_to_round() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        states: list[str] = []
        given: dict[str, Any] = {}
        for number in range(3):
            result = await client.tool("rounds", members=given)
            (key,) = result["inputRequests"]
            states.append(result["requestState"])
            reply = {"action": "accept", "content": {"name": f"n{number}"}}
            given = {"inputResponses": {key: reply}, "requestState": result["requestState"]}
        assert text(await client.tool("rounds", members=given)) == "n0 n1 n2"
    assert len(set(states)) == 3


def forged(state: str) -> list[str]:
    head, _, tail = state.partition(".")
    flip = "A" if head[5] != "A" else "B"
    unsealed = base64.urlsafe_b64encode(b'["state"]').decode()
    return [
        f"{state}-TAMPERED",
        state[:-1],
        head,
        f".{tail}",
        "",
        "x",
        f"{head[:5]}{flip}{head[6:]}.{tail}",
        f"{unsealed}.{tail}",
    ]


@pytest.mark.parametrize("number", range(8))
async def test_state_that_was_changed_is_an_error(number: int) -> None:
    """Re-prompting is not enough."""
    async with over_http(desk(), R5, capabilities=ALL) as client:
        state = forged((await client.tool("elicit"))["requestState"])[number]
        members = {"inputResponses": {"user_name": ANN}, "requestState": state}
        assert (await client.tool_error("elicit", members=members))["code"] == -32602


def who(headers: Mapping[str, str]) -> str | None:
    return headers.get("authorization")


async def test_state_is_for_one_call_one_caller_and_one_server() -> None:
    app = make_app(authenticate=who)

    @app.tool(annotations=READS)
    async def ask(about: str, ctx: Context) -> str:
        return str((await ctx.elicit(about, FORM, key="k")).action)

    @app.tool(annotations=READS)
    async def other(about: str, ctx: Context) -> str:
        return str((await ctx.elicit(about, FORM, key="k")).action)

    async with over_http(app, R5, capabilities=ALL, headers={"authorization": "ann"}) as client:
        state = (await client.tool("ask", {"about": "a"}))["requestState"]
        members = {"inputResponses": {"k": ANN}, "requestState": state}
        bob = {"authorization": "bob"}
        assert (await client.tool_error("ask", {"about": "b"}, members=members))["code"] == -32602
        assert (await client.tool_error("other", {"about": "a"}, members=members))["code"] == -32602
        assert (await client.tool_error("ask", {"about": "a"}, members=members, headers=bob))[
            "code"
        ] == -32602
        assert text(await client.tool("ask", {"about": "a"}, members=members)) == "accept"
        strange = HttpClient(desk().asgi(), R5, ALL)
        found = await strange.call("tools/call", {"name": "elicit", **members})
        assert found["error"]["code"] == -32602


async def test_session_id_is_not_accepted_as_a_state() -> None:
    """One seal for one use."""
    app = desk()
    async with over_http(app, R4) as old, over_http(app, R5, capabilities=ALL) as client:
        members = {"inputResponses": {"user_name": ANN}, "requestState": old.session}
        assert (await client.tool_error("elicit", members=members))["code"] == -32602
        state = (await client.tool("elicit"))["requestState"]
        answer = await old.post(
            old.message("ping"), {**old.headers(), "mcp-session-id": state}
        ).started()
        assert answer.status == 404


async def test_state_that_is_old_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from wirecall.mcp.server import peer

    monkeypatch.setattr(peer, "STATE_LIFETIME", -1.0)
    async with over_http(desk(), R5, capabilities=ALL) as client:
        state = (await client.tool("elicit"))["requestState"]
        members = {"inputResponses": {"user_name": ANN}, "requestState": state}
        assert (await client.tool_error("elicit", members=members))["code"] == -32602


async def test_round_may_be_served_by_any_worker() -> None:
    def worker() -> App:
        app = make_app(secret="shared")

        @app.tool(annotations=READS)
        async def rounds(ctx: Context) -> str:
            return " ".join([(await ctx.elicit(f"{n}", FORM)).content["name"] for n in range(2)])

        return app

    params: Any = {"name": "rounds"}
    for _ in range(2):
        async with over_http(worker(), R5, capabilities=ALL) as client:
            result = await client.result("tools/call", params)
            (key,) = result["inputRequests"]
            params = {
                "name": "rounds",
                "inputResponses": {key: ANN},
                "requestState": result["requestState"],
            }
    async with over_http(worker(), R5, capabilities=ALL) as client:
        assert text(await client.result("tools/call", params)) == "Ann Ann"


@pytest.mark.parametrize(
    "method", ["tools/list", "prompts/list", "resources/list", "server/discover"]
)
async def test_rounds_are_ignored_by_other_methods(method: str) -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        assert (await client.result(method, {"inputResponses": {}}))["resultType"] == "complete"


async def test_progress_before_a_question_opens_a_stream_that_ends_with_the_question() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        result = await client.tool("told", meta={"progressToken": 1})
        assert client.last is not None and client.last.header("content-type") == "text/event-stream"
    assert (result["resultType"], len(client.heard)) == ("input_required", 1)
