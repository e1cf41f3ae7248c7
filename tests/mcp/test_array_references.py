"""References between the requests of an array of 2025-03-26 (R13)."""

from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import (
    EVERY_WAY,
    KEY,
    R2,
    R4,
    HttpClient,
    over_http,
    over_stdio,
    request,
    speak,
)
from tests.mcp.batches import shop
from wirecall import App
from wirecall.auth import Identity, Tokens, digest

REFS = "io.wirecall/refs"
AFTER = "io.wirecall/after"


def call(id: Any, tool: str, arguments: Any = None, **meta: Any) -> Any:
    named = {"refs": REFS, "after": AFTER, "key": KEY}
    params: dict[str, Any] = {"name": tool, "arguments": arguments or {}}
    if meta:
        params["_meta"] = {named[name]: value for name, value in meta.items()}
    return request("tools/call", params, id)


def take(id: Any, path: str) -> Any:
    return {"id": id, "path": path}


THREE = [
    call(1, "find_order", {"customer": "ada"}),
    call(
        2,
        "charge",
        refs={
            "/arguments/order": take(1, "/structuredContent/orders/0/id"),
            "/arguments/cents": take(1, "/structuredContent/orders/0/total"),
        },
    ),
    call(
        3,
        "receipt",
        refs={"/arguments/order": take(1, "/structuredContent/orders/0/id")},
        after=[2],
    ),
]


async def send(client: HttpClient, *messages: Any) -> list[Any]:
    exchange = await client.post(list(messages)).started()
    if exchange.header("content-type") == "text/event-stream":
        return sorted(await exchange.messages(), key=lambda each: int(each["id"]))
    answers: list[Any] = await exchange.json()
    return answers


def made(**options: Any) -> tuple[App, list[str]]:
    app = make_app(references=True, **options)
    return app, shop(app)


async def test_array_fills_arguments_from_structured_content() -> None:
    """R13: the path starts in the result, and may use content that the revision does not send."""
    app, done = made()
    async with over_http(app, R2) as client:
        answers = await send(client, *THREE)
        experimental = client.info["capabilities"]["experimental"]
    assert [each["id"] for each in answers] == [1, 2, 3]
    assert "structuredContent" not in answers[0]["result"]
    assert answers[2]["result"]["content"][0]["text"] == "receipt of 7"
    assert done == ["charge 7 500"]
    assert "io.wirecall/references" in experimental


async def test_array_on_stdio_fills_arguments() -> None:
    """R13: on every transport."""
    app, done = made()
    async with over_stdio(app, R2) as client:
        client.write(THREE)
        answers = await client.line()
    assert [each["id"] for each in answers] == [1, 2, 3]
    assert done == ["charge 7 500"]


async def test_array_sent_again_with_new_ids_replays() -> None:
    """R9, R13: the fingerprint of a request has no ids and no values."""
    app, done = made()
    async with over_http(app, R2) as client:
        for first in (1, 11):
            answers = await send(
                client,
                call(first, "find_order", {"customer": "ada"}),
                call(
                    first + 1,
                    "charge",
                    {"order": 1},
                    refs={"/arguments/cents": take(first, "/structuredContent/orders/1/total")},
                    key="k",
                ),
            )
    assert done == ["charge 1 20"]
    assert answers[1]["result"]["_meta"]["io.wirecall/replayed"] is True


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        (call(2, "receipt", refs={"/arguments/order": take(3, "")}), "reference_invalid"),
        (call(2, "receipt", refs={"/arguments/order": take(2, "")}), "reference_invalid"),
        (call(2, "receipt", refs={"/arguments/order": take(1, "/none")}), "reference_not_found"),
        (
            call(2, "receipt", {"order": 1}, refs={"/arguments/order": take(1, "")}),
            "reference_invalid",
        ),
        (call(2, "receipt", {"order": 1}, after=[9]), "reference_invalid"),
        (call(2, "receipt", {"order": 1}, after=5), "reference_invalid"),
        (
            request("ping", {"_meta": {REFS: {"/x": take(1, "")}}}, 2),
            "reference_invalid",
        ),
    ],
)
async def test_array_reference_fault_fails_only_its_entry(second: Any, kind: str) -> None:
    """R3, R6, R13."""
    app, _ = made()
    async with over_http(app, R2) as client:
        answers = await send(
            client,
            call(1, "find_order", {"customer": "ada"}),
            second,
            call(3, "receipt", {"order": 5}),
        )
    assert answers[1]["error"]["data"]["type"] == kind
    assert answers[2]["result"]["content"][0]["text"] == "receipt of 5"


async def test_array_reference_to_a_failed_request() -> None:
    """R6, R13: a JSON-RPC error and a result with `isError` both block what needs them."""
    app, done = made()

    @app.query
    def fail() -> None:
        raise ValueError("no")

    needs = {"/arguments/order": take(1, "/content/0/text")}
    async with over_http(app, R2) as client:
        failed = await send(client, call(1, "fail"), call(2, "receipt", refs=needs))
        refused = await send(client, call(1, "receipt"), call(2, "receipt", refs=needs))
    for answers in (failed, refused):
        assert answers[1]["error"]["data"]["type"] == "dependency_failed"
        assert answers[1]["error"]["data"]["id"] == 1
    assert done == []


async def test_array_references_are_off_by_default() -> None:
    """R14: an entry with references is refused, never run with a hole."""
    app = make_app()
    done = shop(app)
    async with over_http(app, R2) as client:
        answers = await send(client, *THREE)
        assert "io.wirecall/references" not in client.info["capabilities"]["experimental"]
    assert [each.get("error", {}).get("code") for each in answers] == [None, -32600, -32600]
    assert answers[1]["error"]["data"]["type"] == "references_off"
    assert done == []


async def test_references_are_announced_where_there_are_arrays() -> None:
    """R12, R13."""
    app, _ = made()
    async with over_http(app, R4) as client:
        assert "io.wirecall/references" not in client.info["capabilities"]["experimental"]


async def test_tool_with_scopes_by_argument_takes_no_references() -> None:
    """R13: its scopes are checked before anything runs, so its arguments must be known."""
    tokens = Tokens({digest("t"): Identity("ada", scopes=frozenset({"orders:7"}))})
    app, _ = made(auth=tokens)

    @app.query(scopes=lambda order: [f"orders:{order}"])
    def secret(order: int) -> str:
        return "secret"

    headers = {"authorization": "Bearer t"}
    async with over_http(app, R2, headers=headers) as client:
        answers = await send(
            client,
            call(1, "find_order", {"customer": "ada"}),
            call(2, "secret", refs={"/arguments/order": take(1, "/structuredContent/orders/1/id")}),
        )
    assert answers[1]["error"]["data"]["type"] == "reference_invalid"


@pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)
@pytest.mark.parametrize("allowed", [True, False])
async def test_reference_outside_of_an_array_is_refused(
    transport: str, revision: str, allowed: bool
) -> None:
    """R1, R14: a plain tool, a command and a list; nothing runs."""
    app = make_app(references=allowed)
    done = shop(app)
    refs = {REFS: {"/arguments/order": take(1, "")}}
    order = {"order": 7, "cents": 5}
    requests = [
        ("tools/call", {"name": "receipt", "arguments": {"order": 7}}, refs),
        ("tools/call", {"name": "charge", "arguments": order}, refs),
        ("tools/call", {"name": "charge", "arguments": order}, {AFTER: [1]}),
        ("tools/list", {}, {AFTER: []}),
    ]
    async with speak(transport, app, revision) as client:
        for method, params, meta in requests:
            answer = await client.call(method, params, meta=meta)
            error = answer["error"]
            assert (error["code"], error["data"]["type"]) == (-32600, "references_off")
            assert "array" in error["message"] and error["data"]["ran"] == "no"
    assert done == []
