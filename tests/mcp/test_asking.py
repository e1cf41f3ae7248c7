"""Asking the client: requests on the call's own stream until 2025-11-25, several rounds at 2026-07-28; one handler."""

import asyncio
import base64
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from tests.calls import make_app
from tests.mcp.asgi import (
    KEY,
    PATIENCE,
    PREFIX,
    R1,
    R2,
    R3,
    R4,
    R5,
    REPLAYED,
    REVISIONS,
    TRANSPORTS,
    Client,
    HttpClient,
    LineClient,
    Refusal,
    over_http,
    over_stdio,
    speak,
)
from wirecall import App, Context, ToolAnnotations
from wirecall.ledger.base import RecordId, State
from wirecall.mcp import Audio, Message, Text

READS = ToolAnnotations(readOnlyHint=True)
ALL: dict[str, Any] = {"sampling": {}, "elicitation": {"form": {}, "url": {}}, "roots": {}}
FORM = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}

every_transport = pytest.mark.parametrize("transport", TRANSPORTS)


class Name(Struct):
    name: str


def desk() -> App:
    """Tools that ask."""
    app = make_app()

    @app.tool(annotations=READS)
    async def elicit(ctx: Context) -> str:
        answer = await ctx.elicit("Who?", FORM, key="user_name")
        return f"{answer.action} {answer.content}"

    @app.tool(annotations=READS)
    async def typed(ctx: Context) -> str:
        answer = await ctx.elicit("Who?", Name, key="user_name")
        return answer.content.name if answer.action == "accept" else answer.action

    @app.tool(annotations=READS)
    async def url(ctx: Context) -> str:
        return (await ctx.elicit_url("Sign in", "https://example.com/in")).action

    @app.tool(annotations=READS)
    async def sample(ctx: Context) -> str:
        found = await ctx.sample(
            [Message("user", "Think"), Message("assistant", Text(text="Hm"))], max_tokens=7, system="Be brief"
        )
        return f"{found.role} {found.model} {found.text}"

    @app.tool(annotations=READS)
    async def with_tools(ctx: Context) -> str:
        return (await ctx.sample("Think", tools=[{"name": "add", "inputSchema": {"type": "object"}}])).text

    @app.tool(annotations=READS)
    async def with_choice(ctx: Context) -> str:
        return (await ctx.sample("Think", toolChoice={"mode": "none"})).text

    @app.tool(annotations=READS)
    async def with_context(ctx: Context) -> str:
        return (await ctx.sample("Think", includeContext="thisServer")).text

    @app.tool(annotations=READS)
    async def without_context(ctx: Context) -> str:
        return (await ctx.sample("Think", includeContext="none")).text

    @app.tool(annotations=READS)
    async def roots(ctx: Context) -> str:
        return " ".join(root.uri for root in await ctx.roots())

    @app.tool(annotations=READS)
    async def all(ctx: Context) -> str:
        name, thought, places = await ctx.ask(ctx.elicit("Who?", FORM), ctx.sample("Think"), ctx.roots())
        return f"{name.content['name']} {thought.text} {places[0].uri}"

    @app.tool(annotations=READS)
    async def rounds(ctx: Context) -> str:
        names = [(await ctx.elicit(f"Name {number}?", FORM)).content["name"] for number in range(3)]
        return " ".join(names)

    @app.tool(annotations=READS)
    async def told(ctx: Context) -> str:
        await ctx.progress(1)
        answer = await ctx.elicit("Who?", FORM, key="user_name")
        await ctx.progress(2)
        return str(answer.action)

    @app.tool(annotations=READS)
    async def stubborn(ctx: Context) -> str:
        try:
            answer = await ctx.elicit("Who?", FORM, key="user_name")
        except Exception:
            return "caught"
        return str(answer.action)

    @app.prompt
    async def greet(ctx: Context) -> str:
        answer = await ctx.elicit("Who?", FORM, key="user_name")
        return f"hello {answer.content['name']}"

    @app.resource("test://private")
    async def private(ctx: Context) -> str:
        answer = await ctx.elicit("Who?", FORM, key="user_name")
        return f"for {answer.content['name']}"

    return app


ANN = {"action": "accept", "content": {"name": "Ann"}}
THOUGHT = {"role": "assistant", "model": "m-1", "content": {"type": "text", "text": "deep"}, "stopReason": "endTurn"}
ROOTS = {"roots": [{"uri": "file:///home", "name": "home"}]}
REPLIES = {"elicitation/create": ANN, "sampling/createMessage": THOUGHT, "roots/list": ROOTS}

CASES = {
    "elicit": "accept {'name': 'Ann'}",
    "typed": "Ann",
    "sample": "assistant m-1 deep",
    "roots": "file:///home",
    "all": "Ann deep file:///home",
    "rounds": "Ann Ann Ann",
    "told": "accept",
}


def text(result: Any) -> Any:
    return result["content"][0]["text"]


async def answered(client: Client, method: str, params: Any, **more: Any) -> Any:
    """The result of a call of 2026-07-28, in as many rounds as it takes."""
    given = dict(params)
    for _ in range(10):
        result = await client.result(method, given, **more)
        if result["resultType"] != "input_required":
            return result
        assert not {"ttlMs", "cacheScope"} & result.keys()
        given = {**params, "inputResponses": {k: REPLIES[q["method"]] for k, q in result["inputRequests"].items()}}
        if "requestState" in result:
            given["requestState"] = result["requestState"]
    raise AssertionError("it asks for ever")


# --- both eras -------------------------------------------------------------------------------------------------------


@every_transport
@pytest.mark.parametrize("revision", [R3, R4])
@pytest.mark.parametrize("tool", CASES)
async def test_a_question_is_a_request_on_the_way_of_the_call(transport: str, revision: str, tool: str) -> None:
    """Trap 46. Ids of the server's requests are its own."""
    async with speak(transport, desk(), revision, ALL, REPLIES) as client:
        found = await client.tool(tool, id=1)
    asked = [message for message in client.heard if "id" in message]
    assert text(found) == CASES[tool]
    assert len({json.dumps(message["id"]) for message in asked}) == len(asked)
    assert {message["method"] for message in asked} <= REPLIES.keys()


@every_transport
@pytest.mark.parametrize("tool", CASES)
async def test_a_question_is_a_result_at_2026_07_28(transport: str, tool: str) -> None:
    async with speak(transport, desk(), R5, ALL) as client:
        found = await answered(client, "tools/call", {"name": tool})
    assert text(found) == CASES[tool]
    assert not [message for message in client.heard if "id" in message]  # a server has no requests there


@every_transport
@pytest.mark.parametrize("revision", [R1, R2])
@pytest.mark.parametrize("tool", ["sample", "roots"])
async def test_what_the_oldest_revisions_can_ask(transport: str, revision: str, tool: str) -> None:
    async with speak(transport, desk(), revision, ALL, REPLIES) as client:
        assert text(await client.tool(tool)) == CASES[tool]


@every_transport
@pytest.mark.parametrize(
    ("method", "params", "said"),
    [("prompts/get", {"name": "greet"}, "hello Ann"), ("resources/read", {"uri": "test://private"}, "for Ann")],
)
async def test_prompts_and_resources_may_ask_too(transport: str, method: str, params: Any, said: str) -> None:
    async with speak(transport, desk(), R5, ALL) as client:
        assert said in json.dumps(await answered(client, method, params))
    async with speak(transport, desk(), R4, ALL, REPLIES) as client:
        assert said in json.dumps(await client.result(method, params))


# --- the shape of the questions --------------------------------------------------------------------------------------


async def test_what_an_elicitation_looks_like() -> None:
    for revision in (R3, R4):
        async with over_http(desk(), revision, capabilities=ALL, replies=REPLIES) as client:
            await client.tool("elicit")
            params = client.told("elicitation/create")[0]
        assert (params["message"], params["requestedSchema"]) == ("Who?", FORM)
        assert params.get("mode") in ((None,) if revision == R3 else (None, "form"))
    async with over_http(desk(), R5, capabilities=ALL) as client:
        result = await client.tool("elicit")
    assert result["inputRequests"].keys() == {"user_name"}
    question = result["inputRequests"]["user_name"]
    assert question.keys() == {"method", "params"}  # bare: neither jsonrpc nor id
    assert (question["method"], question["params"]["requestedSchema"]) == ("elicitation/create", FORM)
    assert isinstance(result["requestState"], str)


async def test_a_struct_becomes_a_flat_schema() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        schema = (await client.tool("typed"))["inputRequests"]["user_name"]["params"]["requestedSchema"]
    assert schema["type"] == "object" and "$ref" not in json.dumps(schema)
    assert schema["properties"]["name"]["type"] == "string"
    assert schema["required"] == ["name"]


@pytest.mark.parametrize("revision", [R4, R5])
async def test_a_page_to_open(revision: str) -> None:
    """Matrix 1.5: `elicitationId` at 2025-11-25 alone."""
    async with over_http(desk(), revision, capabilities=ALL, replies={"elicitation/create": {"action": "accept"}}) as client:
        result = await client.tool("url")
        params = (
            client.told("elicitation/create")[0]
            if revision == R4
            else next(iter(result["inputRequests"].values()))["params"]
        )
    assert (params["mode"], params["url"]) == ("url", "https://example.com/in")
    assert ("elicitationId" in params) == (revision == R4)
    assert "requestedSchema" not in params


async def test_what_a_sampling_request_looks_like() -> None:
    async with over_http(desk(), R4, capabilities=ALL, replies=REPLIES) as client:
        await client.tool("sample")
    params = client.told("sampling/createMessage")[0]
    assert (params["maxTokens"], params["systemPrompt"]) == (7, "Be brief")
    assert params["messages"] == [
        {"role": "user", "content": {"type": "text", "text": "Think"}},
        {"role": "assistant", "content": {"type": "text", "text": "Hm"}},
    ]


@pytest.mark.parametrize("revision", [R1, R2])
async def test_a_model_is_not_sent_a_sound_before_2025_03_26(revision: str) -> None:
    app = make_app()

    @app.tool(annotations=READS)
    async def hear(ctx: Context) -> str:
        return (await ctx.sample([Message("user", Audio(data=b"x", mime_type="audio/wav"))])).text

    async with over_http(app, revision, capabilities=ALL, replies=REPLIES) as client:
        await client.tool("hear")
    kinds = [
        message["content"]["type"] for params in client.told("sampling/createMessage") for message in params["messages"]
    ]
    assert ("audio" in kinds) == (revision == R2)


async def test_several_at_once_are_one_round() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        asked = (await client.tool("all"))["inputRequests"]
    assert sorted(q["method"] for q in asked.values()) == ["elicitation/create", "roots/list", "sampling/createMessage"]


async def test_several_at_once_are_asked_together_in_the_older_revisions() -> None:
    async with over_stdio(desk(), R4, capabilities=ALL) as client:
        client.write(client.message("tools/call", {"name": "all"}, 1))
        asked = [await client.hear() for _ in range(3)]  # all three before any is answered
        for question in reversed(asked):
            client.write({"jsonrpc": "2.0", "id": question["id"], "result": REPLIES[question["method"]]})
        assert text((await client.line())["result"]) == CASES["all"]


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_person_may_say_no(action: str) -> None:
    for tool, said in (("elicit", f"{action} None"), ("typed", action)):
        async with over_http(desk(), R4, capabilities=ALL, replies={"elicitation/create": {"action": action}}) as client:
            assert text(await client.tool(tool)) == said
        async with over_http(desk(), R5, capabilities=ALL) as client:
            found = await client.tool(tool, members={"inputResponses": {"user_name": {"action": action}}})
            assert text(found) == said


@pytest.mark.parametrize("revision", [R3, R4])
async def test_a_client_may_refuse_to_ask(revision: str) -> None:
    """Its error is not the server's: the call fails, and says so."""
    replies = {"elicitation/create": Refusal(-1, "user rejected")}
    async with over_http(desk(), revision, capabilities=ALL, replies=replies) as client:
        answer = await client.call("tools/call", {"name": "elicit"})
        assert answer.get("result", {}).get("isError") or "error" in answer
        assert text(await client.tool("stubborn")) == "caught"


BAD: list[Any] = [{}, {"action": "maybe"}, {"action": 5}, {"action": "accept", "content": {"name": 5}}, {"action": "accept"}]


@pytest.mark.parametrize("bad", BAD)
async def test_an_answer_that_is_none_is_an_error(bad: Any) -> None:
    """Matrix 1.8: malformed answers SHOULD be a JSON-RPC error."""
    async with over_http(desk(), R5, capabilities=ALL) as client:
        answer = await client.call("tools/call", {"name": "typed", "inputResponses": {"user_name": bad}})
    assert answer["error"]["code"] == -32602


@pytest.mark.parametrize("responses", [None, [], "x", {"user_name": 12345}, {"user_name": None}, {"user_name": []}])
async def test_input_responses_that_are_none_are_an_error(responses: Any) -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        answer = await client.call("tools/call", {"name": "elicit", "inputResponses": responses})
    assert answer["error"]["code"] == -32602


@pytest.mark.parametrize("responses", [{}, {"someone_else": ANN}])
async def test_a_missing_answer_is_asked_for_again(responses: Any) -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        first = await client.tool("elicit")
        members = {"inputResponses": responses, "requestState": first["requestState"]}
        again = await client.tool("elicit", members=members)
    assert again["resultType"] == "input_required"
    assert again["inputRequests"].keys() == {"user_name"}


async def test_answers_nobody_asked_for_are_ignored() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        found = await client.tool("elicit", members={"inputResponses": {"user_name": ANN, "more": ANN}})
    assert text(found) == CASES["elicit"]


async def test_some_of_several_answers_are_kept() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        first = await client.tool("all")
        keys = {question["method"]: key for key, question in first["inputRequests"].items()}
        one = {keys["roots/list"]: ROOTS}
        second = await client.tool("all", members={"inputResponses": one, "requestState": first["requestState"]})
        assert second["inputRequests"].keys() == {keys["elicitation/create"], keys["sampling/createMessage"]}
        rest = {key: REPLIES[question["method"]] for key, question in second["inputRequests"].items()}
        third = await client.tool("all", members={"inputResponses": rest, "requestState": second["requestState"]})
    assert text(third) == CASES["all"]


# --- several rounds and their state (matrix 1.8, trap 39) ------------------------------------------------------------


async def test_the_state_changes_from_round_to_round() -> None:
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
async def test_a_state_that_was_changed_is_an_error(number: int) -> None:
    """Re-prompting is not enough."""
    async with over_http(desk(), R5, capabilities=ALL) as client:
        state = forged((await client.tool("elicit"))["requestState"])[number]
        members = {"inputResponses": {"user_name": ANN}, "requestState": state}
        assert (await client.tool_error("elicit", members=members))["code"] == -32602


def who(headers: Mapping[str, str]) -> str | None:
    return headers.get("authorization")


async def test_a_state_is_for_one_call_one_caller_and_one_server() -> None:
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
        assert (await client.tool_error("ask", {"about": "a"}, members=members, headers=bob))["code"] == -32602
        assert text(await client.tool("ask", {"about": "a"}, members=members)) == "accept"
        strange = HttpClient(desk().asgi(), R5, ALL)
        found = await strange.call("tools/call", {"name": "elicit", **members})
        assert found["error"]["code"] == -32602


async def test_a_session_id_is_no_state() -> None:
    """One seal for one use."""
    app = desk()
    async with over_http(app, R4) as old, over_http(app, R5, capabilities=ALL) as client:
        members = {"inputResponses": {"user_name": ANN}, "requestState": old.session}
        assert (await client.tool_error("elicit", members=members))["code"] == -32602
        state = (await client.tool("elicit"))["requestState"]
        answer = await old.post(old.message("ping"), {**old.headers(), "mcp-session-id": state}).started()
        assert answer.status == 404


async def test_an_old_state_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from wirecall.mcp.server import asking

    monkeypatch.setattr(asking, "STATE_LIFETIME", -1.0)
    async with over_http(desk(), R5, capabilities=ALL) as client:
        state = (await client.tool("elicit"))["requestState"]
        members = {"inputResponses": {"user_name": ANN}, "requestState": state}
        assert (await client.tool_error("elicit", members=members))["code"] == -32602


async def test_any_worker_takes_the_next_round() -> None:
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
            params = {"name": "rounds", "inputResponses": {key: ANN}, "requestState": result["requestState"]}
    async with over_http(worker(), R5, capabilities=ALL) as client:
        assert text(await client.result("tools/call", params)) == "Ann Ann"


@pytest.mark.parametrize("method", ["tools/list", "prompts/list", "resources/list", "server/discover"])
async def test_nothing_else_takes_rounds(method: str) -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        assert (await client.result(method, {"inputResponses": {}}))["resultType"] == "complete"


async def test_progress_before_a_question_opens_a_stream_that_ends_with_the_question() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        result = await client.tool("told", meta={"progressToken": 1})
        assert client.last is not None and client.last.header("content-type") == "text/event-stream"
    assert (result["resultType"], len(client.heard)) == ("input_required", 1)


# --- capabilities ----------------------------------------------------------------------------------------------------

# tool, revision, what the client declares, whether that is enough
CAPABLE: list[tuple[str, str, Any, bool]] = [
    ("sample", R1, {}, False),
    ("sample", R1, {"sampling": {}}, True),
    ("roots", R2, {}, False),
    ("roots", R2, {"roots": {"listChanged": True}}, True),
    ("elicit", R1, ALL, False),
    ("elicit", R2, ALL, False),
    ("elicit", R3, {}, False),
    ("elicit", R3, {"elicitation": {}}, True),
    ("elicit", R4, {"elicitation": {}}, True),
    ("elicit", R4, {"elicitation": {"form": {}}}, True),
    ("elicit", R4, {"elicitation": {"url": {}}}, False),
    ("url", R3, ALL, False),
    ("url", R4, {"elicitation": {}}, False),
    ("url", R4, {"elicitation": {"url": {}}}, True),
    ("elicit", R5, {"sampling": {}}, False),
    ("elicit", R5, {"elicitation": {}}, True),
    ("elicit", R5, {"elicitation": {"url": {}}}, False),
    ("url", R5, {"elicitation": {}}, False),
    ("url", R5, {"elicitation": {"url": {}}}, True),
    ("sample", R5, {}, False),
    ("roots", R5, {"roots": {"listChanged": True}}, True),
    ("all", R5, {"sampling": {}, "roots": {}}, False),
    *(("with_tools", revision, {"sampling": {"tools": {}}}, False) for revision in (R1, R2, R3)),
    *(("with_tools", revision, {"sampling": {}}, False) for revision in (R4, R5)),
    *(("with_tools", revision, {"sampling": {"context": {}}}, False) for revision in (R4, R5)),
    *(("with_tools", revision, {"sampling": {"tools": {}}}, True) for revision in (R4, R5)),
    *(("with_choice", revision, {"sampling": {}}, False) for revision in (R4, R5)),
    *(("with_context", revision, {"sampling": {}}, True) for revision in (R1, R2, R3)),
    *(("with_context", revision, {"sampling": {"tools": {}}}, False) for revision in (R4, R5)),
    *(("with_context", revision, {"sampling": {"context": {}}}, True) for revision in (R4, R5)),
    ("without_context", R4, {"sampling": {}}, True),
    ("without_context", R5, {"sampling": {}}, True),
]


@every_transport
@pytest.mark.parametrize(("tool", "revision", "declared", "enough"), CAPABLE)
async def test_only_what_the_client_declared_is_asked(
    transport: str, tool: str, revision: str, declared: Any, enough: bool
) -> None:
    """Trap 40: `elicitation: {}` means forms alone."""
    async with speak(transport, desk(), revision, declared, REPLIES) as client:
        answer = await client.call("tools/call", {"name": tool}, id=4)
        if enough:
            assert "result" in answer and "isError" not in answer["result"], answer
            return
        assert client.heard == []
        if revision != R5:
            assert answer["result"]["isError"] is True
            return
        assert (answer["id"], answer["error"]["code"]) == (4, -32021)
        assert isinstance(answer["error"]["data"]["requiredCapabilities"], dict)
        if isinstance(client, HttpClient):
            assert client.last is not None and client.last.status == 400


MISSING = [
    ("sample", {}, {"sampling": {}}, "has not declared sampling"),
    ("roots", {}, {"roots": {}}, "has not declared roots"),
    ("url", {}, {"elicitation": {"url": {}}}, "has not declared elicitation"),
    ("url", {"elicitation": {}}, {"elicitation": {"url": {}}}, "has not declared elicitation.url"),
    ("elicit", {"elicitation": {"url": {}}}, {"elicitation": {}}, "has not declared elicitation.form"),
    ("with_tools", {"sampling": {}}, {"sampling": {"tools": {}}}, "has not declared sampling.tools"),
    ("with_context", {"sampling": {}}, {"sampling": {"context": {}}}, "has not declared sampling.context"),
]


@pytest.mark.parametrize(("tool", "declared", "needed", "said"), MISSING)
async def test_what_is_missing_is_named(tool: str, declared: Any, needed: Any, said: str) -> None:
    async with over_http(desk(), R5, capabilities=declared) as client:
        error = await client.tool_error(tool)
    assert error["data"]["requiredCapabilities"] == needed
    assert error["data"]["reason"].endswith(said)


async def test_capabilities_are_of_the_request_not_of_the_one_before() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        await client.tool("sample")
        client.capabilities = {}
        assert (await client.tool_error("sample"))["code"] == -32021


async def test_plain_json_rpc_cannot_be_asked() -> None:
    app = make_app()

    @app.query
    async def ask(ctx: Context) -> str:
        return str((await ctx.elicit("?", FORM)).action)

    answer = json.loads(await app.handle(b'{"jsonrpc":"2.0","id":1,"method":"ask"}') or b"")
    assert "error" in answer


# --- who answers, and who does not -----------------------------------------------------------------------------------


async def test_an_answer_comes_from_the_session_that_was_asked() -> None:
    async with over_http(desk(), R4, capabilities=ALL) as client:
        asking = client.post(client.message("tools/call", {"name": "elicit"}, 1))
        question = await asking.message()
        other = HttpClient(client.asgi, R4, ALL)
        await other.open()
        forged = {"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept", "content": {"name": "Eve"}}}
        await other.post(forged).started()
        await client.post({**forged, "result": ANN}).started()
        assert "Ann" in text((await asking.message())["result"])


async def test_a_second_answer_is_ignored() -> None:
    async with over_http(desk(), R4, capabilities=ALL) as client:
        asking = client.post(client.message("tools/call", {"name": "rounds"}, 1))
        first = await asking.message()
        for _ in range(2):
            taken = await client.post({"jsonrpc": "2.0", "id": first["id"], "result": ANN}).started()
            assert taken.status == 202
        second = await asking.message()
        assert second["params"]["message"] == "Name 1?"
        await client.notify("notifications/cancelled", {"requestId": 1})


@every_transport
async def test_a_call_that_waits_for_an_answer_can_be_cancelled(transport: str) -> None:
    async with speak(transport, desk(), R4, ALL) as client:
        message = client.message("tools/call", {"name": "elicit"}, 9)
        if isinstance(client, LineClient):
            client.write(message)
            await client.hear()
        else:
            asking = client.post(message)
            await asking.message()
        await client.notify("notifications/cancelled", {"requestId": 9})
        if not isinstance(client, LineClient):
            assert await asking.message() is None
        assert await client.result("ping") == {}


# --- commands that ask -----------------------------------------------------------------------------------------------


class Till:
    """A command that asks before it acts."""

    def __init__(self, **options: Any) -> None:
        self.app = make_app(**options)
        self.paid: list[str] = []
        self.begun = 0

        @self.app.command
        async def pay(cents: int, ctx: Context) -> str:
            self.begun += 1
            answer = await ctx.elicit(f"Pay {cents}?", FORM, key="who")
            if answer.action != "accept":
                return "not paid"
            self.paid.append(answer.content["name"])
            return f"paid by {answer.content['name']}"

        @self.app.command
        async def pay_twice(cents: int, ctx: Context) -> str:
            self.begun += 1
            names = [(await ctx.elicit(f"Pay {cents}?", FORM, key=key)).content["name"] for key in ("who", "also")]
            self.paid += names
            return f"paid by {' and '.join(names)}"

        @self.app.command(retention=10)
        async def pay_soon(ctx: Context) -> str:
            return str((await ctx.elicit("Pay?", FORM, key="who")).action)

        @self.app.command
        async def hasty(ctx: Context) -> str:
            await ctx.commit_point()
            self.paid.append("hasty")
            await ctx.elicit("Sure?", FORM, key="who")
            return "done"

    async def state(self, tool: str = "pay", key: str = "k") -> State | None:
        record = await (await self.app.ledger()).get(RecordId("", f"tools/call:{tool}", key))
        return record.state if record else None


KEYED = {KEY: "k"}


def again(result: Any, reply: Any = ANN) -> Any:
    return {"inputResponses": {"who": reply}, "requestState": result["requestState"]}


@every_transport
async def test_a_command_that_asks_takes_effect_once(transport: str) -> None:
    till = Till()
    async with speak(transport, till.app, R5, ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        assert (asked["resultType"], await till.state()) == ("input_required", State.WAITING)
        done = await client.tool("pay", {"cents": 5}, members=again(asked), meta=KEYED)
        assert (text(done), await till.state()) == ("paid by Ann", State.DONE)
        assert REPLAYED not in done["_meta"]
        members: Any
        for members in (again(asked), {}):
            replay = await client.tool("pay", {"cents": 5}, members=members, meta=KEYED)
            assert (text(replay), replay["_meta"][REPLAYED]) == ("paid by Ann", True)
    assert till.paid == ["Ann"]


async def test_a_duplicate_while_the_command_waits_gets_the_same_question() -> None:
    """The first leg sent again, because its answer was lost: it must be able to go on from it."""
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        first = await client.tool("pay", {"cents": 5}, meta=KEYED)
        second = await client.tool("pay", {"cents": 5}, meta=KEYED)
        assert second["resultType"] == "input_required"
        assert second["inputRequests"] == first["inputRequests"]
        assert await till.state() == State.WAITING
        assert text(await client.tool("pay", {"cents": 5}, members=again(second), meta=KEYED)) == "paid by Ann"
    assert till.paid == ["Ann"]


@pytest.mark.parametrize("revision", [R1, R2, R3, R4])
async def test_a_waiting_command_is_not_told_to_older_revisions_as_a_result(revision: str) -> None:
    """`input_required` is a word of 2026-07-28: to others the command is in progress."""
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        other = HttpClient(client.asgi, revision, ALL, REPLIES)
        await other.open()
        answer = await other.call("tools/call", {"name": "pay", "arguments": {"cents": 5}}, meta=KEYED)
        assert "inputRequests" not in json.dumps(answer), answer
        assert answer["error"]["data"]["type"] == "idempotency_key_in_progress"
        assert text(await client.tool("pay", {"cents": 5}, members=again(asked), meta=KEYED)) == "paid by Ann"
    assert till.paid == ["Ann"]


async def test_a_waiting_command_asks_nothing_that_the_duplicate_cannot_answer() -> None:
    """Matrix 1.8: no kind that is not declared in this request's capabilities."""
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        await client.tool("pay", {"cents": 5}, meta=KEYED)
        client.capabilities = {}
        answer = await client.call("tools/call", {"name": "pay", "arguments": {"cents": 5}}, meta=KEYED)
        assert "inputRequests" not in json.dumps(answer), answer
    assert till.paid == []


async def test_other_arguments_while_the_command_waits_are_a_conflict() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        await client.tool("pay", {"cents": 5}, meta=KEYED)
        error = await client.tool_error("pay", {"cents": 6}, meta=KEYED)
        assert error["data"]["type"] == "idempotency_key_conflict"
    assert till.paid == []


async def test_a_forged_state_leaves_the_command_waiting() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        forged = {**again(asked), "requestState": asked["requestState"] + "x"}
        assert (await client.tool_error("pay", {"cents": 5}, members=forged, meta=KEYED))["code"] == -32602
        assert await till.state() == State.WAITING
        bad = again(asked, {"action": "maybe"})
        assert (await client.tool_error("pay", {"cents": 5}, members=bad, meta=KEYED))["code"] == -32602
        assert text(await client.tool("pay", {"cents": 5}, members=again(asked), meta=KEYED)) == "paid by Ann"
    assert till.paid == ["Ann"]


async def test_a_round_without_the_key_is_the_same_command_still() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        assert text(await client.tool("pay", {"cents": 5}, members=again(asked))) == "paid by Ann"
        assert text(await client.tool("pay", {"cents": 5}, members=again(asked), meta=KEYED)) == "paid by Ann"
        assert await till.state() == State.DONE
    assert till.paid == ["Ann"]


async def test_a_round_with_another_key_is_refused() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        other = {KEY: "another"}
        assert (await client.tool_error("pay", {"cents": 5}, members=again(asked), meta=other))["code"] == -32602
        assert await till.state() == State.WAITING
    assert till.paid == []


async def test_two_answers_at_once_are_one_effect() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        params = {"name": "pay", "arguments": {"cents": 5}, **again(asked)}
        both = [client.post(client.message("tools/call", params, id, KEYED)) for id in (8, 9)]
        assert [text((await one.json())["result"]) for one in both] == ["paid by Ann", "paid by Ann"]
    assert till.paid == ["Ann"]


async def test_a_no_is_an_outcome() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        assert (
            text(await client.tool("pay", {"cents": 5}, members=again(asked, {"action": "decline"}), meta=KEYED))
            == "not paid"
        )
        replay = await client.tool("pay", {"cents": 5}, members=again(asked), meta=KEYED)
        assert text(replay) == "not paid"
    assert till.paid == []


async def test_asking_after_the_commit_point_is_never_run_again() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        answer = await client.call("tools/call", {"name": "hasty"}, meta=KEYED)
        assert answer.get("result", {}).get("resultType") != "input_required"
        later = await client.call("tools/call", {"name": "hasty"}, meta=KEYED)
        assert later["error"]["data"]["type"] == "outcome_unknown"
    assert till.paid == ["hasty"]


async def test_asking_after_the_commit_point_is_fine_where_the_handler_waits() -> None:
    till = Till()
    async with over_http(till.app, R4, capabilities=ALL, replies=REPLIES) as client:
        assert text(await client.tool("hasty", meta=KEYED)) == "done"
        assert (await client.tool("hasty", meta=KEYED))["_meta"][REPLAYED] is True
    assert till.paid == ["hasty"]


# --- one state, one outcome ------------------------------------------------------------------------------------------


def named(name: str) -> Any:
    return {"action": "accept", "content": {"name": name}}


@every_transport
async def test_a_state_that_is_sent_again_has_no_second_effect(transport: str) -> None:
    """Without a key: the ledger answers the state with the outcome that it had, whatever the answers beside it say now."""
    till = Till()
    async with speak(transport, till.app, R5, ALL) as client:
        asked = await client.tool("pay", {"cents": 5})
        for reply, replayed in ((ANN, None), (ANN, True), (named("Eve"), True), ({"action": "decline"}, True)):
            found = await client.tool("pay", {"cents": 5}, members=again(asked, reply))
            assert (text(found), found["_meta"].get(REPLAYED)) == ("paid by Ann", replayed)
        await client.tool("pay", {"cents": 5})  # another call is another intent, and asks anew
    assert till.paid == ["Ann"]


async def test_a_state_that_is_sent_several_times_at_once_has_one_effect() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5})
        params = {"name": "pay", "arguments": {"cents": 5}, **again(asked)}
        several = [client.post(client.message("tools/call", params, id)) for id in range(10, 14)]
        assert {text((await one.json())["result"]) for one in several} == {"paid by Ann"}
    assert till.paid == ["Ann"]


async def test_a_state_has_one_effect_in_all_processes(tmp_path: Path) -> None:
    tills = [Till(secret="shared", ledger=f"sqlite:{tmp_path / 'ledger.db'}") for _ in range(2)]
    async with (
        over_http(tills[0].app, R5, capabilities=ALL) as first,
        over_http(tills[1].app, R5, capabilities=ALL) as second,
    ):
        asked = await first.tool("pay", {"cents": 5})
        for client in (second, first):
            assert text(await client.tool("pay", {"cents": 5}, members=again(asked))) == "paid by Ann"
    assert [till.paid for till in tills] == [[], ["Ann"]]


async def test_states_of_several_rounds_have_one_effect() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        first = await client.tool("pay_twice", {"cents": 5})
        seconds = [await client.tool("pay_twice", {"cents": 5}, members=again(first, named(name))) for name in "AB"]
        for second in seconds:
            members = {"inputResponses": {"also": named("C")}, "requestState": second["requestState"]}
            assert text(await client.tool("pay_twice", {"cents": 5}, members=members)).startswith("paid by A and C")
        assert text(await client.tool("pay_twice", {"cents": 5}, members=again(first))).startswith("paid by A and C")
    assert till.paid == ["A", "C"]


async def test_a_state_does_not_outlive_the_record_of_its_command() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        before = time.time()
        state = (await client.tool("pay_soon"))["requestState"]
        payload = state.partition(".")[0]
        until = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))[2]
    assert until <= time.time() + 10 and until >= before + 10


@pytest.mark.parametrize("meta", [{}, KEYED])
async def test_a_command_takes_no_answer_to_a_question_that_it_did_not_ask(meta: Any) -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        unsolicited = {"inputResponses": {"who": ANN}}
        error = await client.tool_error("pay", {"cents": 5}, members=unsolicited, meta=meta)
        assert (error["code"], error["data"]["type"]) == (-32602, "input_invalid")
        assert till.begun == 0
        asked = await client.tool("pay_twice", {"cents": 5}, meta=meta)
        early = {**again(asked), "inputResponses": {"who": ANN, "also": ANN}}
        error = await client.tool_error("pay_twice", {"cents": 5}, members=early, meta=meta)
        assert (error["code"], error["data"]["type"]) == (-32602, "input_invalid")
        assert till.begun == 1
        found = await client.tool("pay_twice", {"cents": 5}, members=again(asked), meta=meta)
        assert found["inputRequests"].keys() == {"also"}
    assert till.paid == []


@every_transport
async def test_a_command_that_asks_in_the_older_revisions(transport: str) -> None:
    till = Till()
    async with speak(transport, till.app, R4, ALL, REPLIES) as client:
        for replayed in (None, True):
            found = await client.tool("pay", {"cents": 5}, meta=KEYED)
            assert (text(found), found.get("_meta", {}).get(REPLAYED)) == ("paid by Ann", replayed)
    assert (till.paid, till.begun) == (["Ann"], 1)


async def test_a_missing_capability_takes_no_claim() -> None:
    till = Till()
    async with over_http(till.app, R5) as client:
        assert (await client.tool_error("pay", {"cents": 5}, meta=KEYED))["code"] == -32021
        client.capabilities = ALL
        assert (await client.tool("pay", {"cents": 5}, meta=KEYED))["resultType"] == "input_required"
    assert till.paid == []


@pytest.mark.parametrize("revision", REVISIONS)
async def test_no_client_waits_for_ever(revision: str) -> None:
    """A question that is never answered ends with the tool's time limit."""
    app = make_app()

    @app.tool(annotations=READS, timeout=0.05)
    async def ask(ctx: Context) -> str:
        return (await ctx.sample("?")).text

    async with over_stdio(app, revision, capabilities=ALL) as client:
        async with asyncio.timeout(PATIENCE):
            answer = await client.call("tools/call", {"name": "ask"}, meta={f"{PREFIX}logLevel": "error"})
        assert ("error" in answer) == (revision != R5)
