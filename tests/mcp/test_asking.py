"""Asking the client: requests on the call's own stream until 2025-11-25, several rounds at
2026-07-28; one handler.
"""

import asyncio
import json
from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import (
    R1,
    R2,
    R3,
    R4,
    R5,
    HttpClient,
    LineClient,
    Refusal,
    over_http,
    over_stdio,
    speak,
)
from tests.mcp.desk import (
    ALL,
    ANN,
    CASES,
    FORM,
    READS,
    REPLIES,
    ROOTS,
    answered,
    desk,
    every_transport,
    text,
)
from wirecall import Context
from wirecall.mcp import Audio, Message

# --- both eras ------------------------------------------------------------------------------------


@every_transport
@pytest.mark.parametrize("revision", [R3, R4])
@pytest.mark.parametrize("tool", CASES)
async def test_question_is_a_request_on_the_stream_of_the_call(
    transport: str, revision: str, tool: str
) -> None:
    """Trap 46. Ids of the server's requests are its own."""
    async with speak(transport, desk(), revision, ALL, REPLIES) as client:
        found = await client.tool(tool, id=1)
    asked = [message for message in client.heard if "id" in message]
    assert text(found) == CASES[tool]
    assert len({json.dumps(message["id"]) for message in asked}) == len(asked)
    assert {message["method"] for message in asked} <= REPLIES.keys()


@every_transport
@pytest.mark.parametrize("tool", CASES)
async def test_question_is_a_result_at_2026_07_28(transport: str, tool: str) -> None:
    async with speak(transport, desk(), R5, ALL) as client:
        found = await answered(client, "tools/call", {"name": tool})
    assert text(found) == CASES[tool]
    # A server sends no requests there.
    assert not [message for message in client.heard if "id" in message]


@every_transport
@pytest.mark.parametrize("revision", [R1, R2])
@pytest.mark.parametrize("tool", ["sample", "roots"])
async def test_questions_are_answered_at_the_oldest_revisions(
    transport: str, revision: str, tool: str
) -> None:
    async with speak(transport, desk(), revision, ALL, REPLIES) as client:
        assert text(await client.tool(tool)) == CASES[tool]


@every_transport
@pytest.mark.parametrize(
    ("method", "params", "said"),
    [
        ("prompts/get", {"name": "greet"}, "hello Ann"),
        ("resources/read", {"uri": "test://private"}, "for Ann"),
    ],
)
async def test_prompts_and_resources_may_ask_questions(
    transport: str, method: str, params: Any, said: str
) -> None:
    async with speak(transport, desk(), R5, ALL) as client:
        assert said in json.dumps(await answered(client, method, params))
    async with speak(transport, desk(), R4, ALL, REPLIES) as client:
        assert said in json.dumps(await client.result(method, params))


# --- the shape of the questions -------------------------------------------------------------------


async def test_elicitation_has_the_specified_shape() -> None:
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
    assert question.keys() == {"method", "params"}  # bare: without jsonrpc and id
    assert (question["method"], question["params"]["requestedSchema"]) == (
        "elicitation/create",
        FORM,
    )
    assert isinstance(result["requestState"], str)


async def test_elicitation_of_a_struct_has_a_flat_schema() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        schema = (await client.tool("typed"))["inputRequests"]["user_name"]["params"][
            "requestedSchema"
        ]
    assert schema["type"] == "object" and "$ref" not in json.dumps(schema)
    assert schema["properties"]["name"]["type"] == "string"
    assert schema["required"] == ["name"]


@pytest.mark.parametrize("revision", [R4, R5])
async def test_elicitation_of_a_page_has_the_specified_shape(revision: str) -> None:
    """Matrix 1.5: `elicitationId` at 2025-11-25 alone."""
    async with over_http(
        desk(), revision, capabilities=ALL, replies={"elicitation/create": {"action": "accept"}}
    ) as client:
        result = await client.tool("url")
        params = (
            client.told("elicitation/create")[0]
            if revision == R4
            else next(iter(result["inputRequests"].values()))["params"]
        )
    assert (params["mode"], params["url"]) == ("url", "https://example.com/in")
    assert ("elicitationId" in params) == (revision == R4)
    assert "requestedSchema" not in params


async def test_sampling_request_has_the_specified_shape() -> None:
    async with over_http(desk(), R4, capabilities=ALL, replies=REPLIES) as client:
        await client.tool("sample")
    params = client.told("sampling/createMessage")[0]
    assert (params["maxTokens"], params["systemPrompt"]) == (7, "Be brief")
    assert params["messages"] == [
        {"role": "user", "content": {"type": "text", "text": "Think"}},
        {"role": "assistant", "content": {"type": "text", "text": "Hm"}},
    ]


@pytest.mark.parametrize("revision", [R1, R2])
async def test_sampling_does_not_send_audio_before_2025_03_26(revision: str) -> None:
    app = make_app()

    @app.tool(annotations=READS)
    async def hear(ctx: Context) -> str:
        return (await ctx.sample([Message("user", Audio(data=b"x", mime_type="audio/wav"))])).text

    async with over_http(app, revision, capabilities=ALL, replies=REPLIES) as client:
        await client.tool("hear")
    kinds = [
        message["content"]["type"]
        for params in client.told("sampling/createMessage")
        for message in params["messages"]
    ]
    assert ("audio" in kinds) == (revision == R2)


async def test_questions_asked_at_once_are_one_round() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        asked = (await client.tool("all"))["inputRequests"]
    assert sorted(q["method"] for q in asked.values()) == [
        "elicitation/create",
        "roots/list",
        "sampling/createMessage",
    ]


async def test_questions_asked_at_once_are_sent_together_in_the_older_revisions() -> None:
    async with over_stdio(desk(), R4, capabilities=ALL) as client:
        client.write(client.message("tools/call", {"name": "all"}, 1))
        asked = [await client.hear() for _ in range(3)]  # all three before any is answered
        for question in reversed(asked):
            client.write(
                {"jsonrpc": "2.0", "id": question["id"], "result": REPLIES[question["method"]]}
            )
        assert text((await client.line())["result"]) == CASES["all"]


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_question_may_be_declined(action: str) -> None:
    for tool, said in (("elicit", f"{action} None"), ("typed", action)):
        async with over_http(
            desk(), R4, capabilities=ALL, replies={"elicitation/create": {"action": action}}
        ) as client:
            assert text(await client.tool(tool)) == said
        async with over_http(desk(), R5, capabilities=ALL) as client:
            found = await client.tool(
                tool, members={"inputResponses": {"user_name": {"action": action}}}
            )
            assert text(found) == said


@pytest.mark.parametrize("revision", [R3, R4])
async def test_question_may_be_refused_by_the_client(revision: str) -> None:
    """The error is the client's, not the server's: the call fails, and its answer says so."""
    replies = {"elicitation/create": Refusal(-1, "user rejected")}
    async with over_http(desk(), revision, capabilities=ALL, replies=replies) as client:
        answer = await client.call("tools/call", {"name": "elicit"})
        assert answer.get("result", {}).get("isError") or "error" in answer
        assert text(await client.tool("stubborn")) == "caught"


BAD: list[Any] = [
    {},
    {"action": "maybe"},
    {"action": 5},
    {"action": "accept", "content": {"name": 5}},
    {"action": "accept"},
]


@pytest.mark.parametrize("bad", BAD)
async def test_answer_that_is_invalid_is_an_error(bad: Any) -> None:
    """Matrix 1.8: malformed answers SHOULD be a JSON-RPC error."""
    async with over_http(desk(), R5, capabilities=ALL) as client:
        answer = await client.call(
            "tools/call", {"name": "typed", "inputResponses": {"user_name": bad}}
        )
    assert answer["error"]["code"] == -32602


WRONG: list[tuple[str, Any, str]] = [
    ("elicit", {"action": "ACCEPT"}, ".action: invalid enum value 'ACCEPT'"),
    (
        "sample",
        {"role": "assistant", "content": {"type": "text", "text": None}},
        ".content: expected an object or a list",
    ),
    (
        "sample",
        {"role": "assistant", "content": [{"type": "text", "text": 5}]},
        ".content: expected an object or a list",
    ),
    ("sample", {"role": "assistant", "content": "deep"}, ".content: expected an object or a list"),
    ("roots", {"roots": [{"uri": 5}]}, ".roots[0].uri: expected str, got int"),
]


@every_transport
@pytest.mark.parametrize("revision", [R3, R4])
@pytest.mark.parametrize(("tool", "wrong", "said"), WRONG)
async def test_answer_that_is_wrong_is_quoted_as_received(
    transport: str, revision: str, tool: str, wrong: Any, said: str
) -> None:
    replies = dict.fromkeys(REPLIES, wrong)
    async with speak(transport, desk(), revision, ALL, replies) as client:
        answer = await client.call("tools/call", {"name": tool})
    assert f"the client's answer{said}" in answer["error"]["message"]


async def test_answer_with_a_number_that_no_float_can_hold_is_wrong() -> None:
    async with over_stdio(desk(), R4, capabilities=ALL) as client:
        call = asyncio.create_task(client.call("tools/call", {"name": "elicit"}))
        asked = await client.hear()
        client.write(
            b'{"jsonrpc":"2.0","id":%b,"result":{"action":1e400}}'
            % json.dumps(asked["id"]).encode()
        )
        assert "the client's answer[...]: number out of range" in (await call)["error"]["message"]


@pytest.mark.parametrize(
    "responses", [None, [], "x", {"user_name": 12345}, {"user_name": None}, {"user_name": []}]
)
async def test_invalid_input_responses_are_an_error(responses: Any) -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        answer = await client.call("tools/call", {"name": "elicit", "inputResponses": responses})
    assert answer["error"]["code"] == -32602


@pytest.mark.parametrize("responses", [{}, {"someone_else": ANN}])
async def test_answer_that_is_missing_is_requested_again(responses: Any) -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        first = await client.tool("elicit")
        members = {"inputResponses": responses, "requestState": first["requestState"]}
        again = await client.tool("elicit", members=members)
    assert again["resultType"] == "input_required"
    assert again["inputRequests"].keys() == {"user_name"}


async def test_answers_to_questions_that_were_not_asked_are_ignored() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        found = await client.tool(
            "elicit", members={"inputResponses": {"user_name": ANN, "more": ANN}}
        )
    assert text(found) == CASES["elicit"]


async def test_answers_to_some_of_several_questions_are_kept() -> None:
    async with over_http(desk(), R5, capabilities=ALL) as client:
        first = await client.tool("all")
        keys = {question["method"]: key for key, question in first["inputRequests"].items()}
        one = {keys["roots/list"]: ROOTS}
        second = await client.tool(
            "all", members={"inputResponses": one, "requestState": first["requestState"]}
        )
        assert second["inputRequests"].keys() == {
            keys["elicitation/create"],
            keys["sampling/createMessage"],
        }
        rest = {
            key: REPLIES[question["method"]] for key, question in second["inputRequests"].items()
        }
        third = await client.tool(
            "all", members={"inputResponses": rest, "requestState": second["requestState"]}
        )
    assert text(third) == CASES["all"]


# --- capabilities ---------------------------------------------------------------------------------

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
async def test_capabilities_are_used_only_if_declared(
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
    (
        "elicit",
        {"elicitation": {"url": {}}},
        {"elicitation": {}},
        "has not declared elicitation.form",
    ),
    (
        "with_tools",
        {"sampling": {}},
        {"sampling": {"tools": {}}},
        "has not declared sampling.tools",
    ),
    (
        "with_context",
        {"sampling": {}},
        {"sampling": {"context": {}}},
        "has not declared sampling.context",
    ),
]


@pytest.mark.parametrize(("tool", "declared", "needed", "said"), MISSING)
async def test_capabilities_that_are_missing_are_named(
    tool: str, declared: Any, needed: Any, said: str
) -> None:
    async with over_http(desk(), R5, capabilities=declared) as client:
        error = await client.tool_error(tool)
    assert error["data"]["requiredCapabilities"] == needed
    assert error["data"]["reason"].endswith(said)


async def test_capabilities_come_from_the_request_not_from_the_previous_one() -> None:
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


# --- clients with and without answers--------------------------------------------------------------


async def test_answer_counts_only_from_the_session_that_was_asked() -> None:
    async with over_http(desk(), R4, capabilities=ALL) as client:
        asking = client.post(client.message("tools/call", {"name": "elicit"}, 1))
        question = await asking.message()
        other = HttpClient(client.asgi, R4, ALL)
        await other.open()
        forged = {
            "jsonrpc": "2.0",
            "id": question["id"],
            "result": {"action": "accept", "content": {"name": "Eve"}},
        }
        await other.post(forged).started()
        await client.post({**forged, "result": ANN}).started()
        assert "Ann" in text((await asking.message())["result"])


async def test_answer_to_an_answered_question_is_ignored() -> None:
    async with over_http(desk(), R4, capabilities=ALL) as client:
        asking = client.post(client.message("tools/call", {"name": "rounds"}, 1))
        first = await asking.message()
        for _ in range(2):
            taken = await client.post(
                {"jsonrpc": "2.0", "id": first["id"], "result": ANN}
            ).started()
            assert taken.status == 202
        second = await asking.message()
        assert second["params"]["message"] == "Name 1?"
        await client.notify("notifications/cancelled", {"requestId": 1})


@every_transport
async def test_call_that_waits_for_an_answer_can_be_cancelled(transport: str) -> None:
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


@pytest.mark.parametrize("revision", [R4, R5])
async def test_question_that_is_not_awaited_has_an_error_that_says_so(
    revision: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()

    @app.tool
    async def ask(ctx: Context) -> str:
        answer: Any = ctx.elicit("Sure?", bool)
        return str(answer.content)

    async with over_http(app, revision, capabilities={"elicitation": {}}) as client:
        await client.call("tools/call", {"name": "ask"})
    assert (
        "a question has no 'content', its answer may have: use `await ctx.elicit(...)`"
        in caplog.text
    )
