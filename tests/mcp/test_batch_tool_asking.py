"""What a batch tool asks and shows while it runs: consent, questions of entries, progress, cancel."""

import asyncio
import json
from typing import Annotated, Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import (
    KEY,
    R1,
    R2,
    R3,
    R4,
    R5,
    REVISIONS,
    Refusal,
    over_http,
    over_stdio,
    speak,
)
from tests.mcp.batches import entry, ref, results, run, send, shop
from tests.mcp.desk import FORM
from wirecall import App, BatchTool, Context, Secret

every_revision = pytest.mark.parametrize("revision", REVISIONS)
ASKED: dict[str, Any] = {"elicitation": {}}
ANN = {"action": "accept", "content": {"name": "Ann"}}
DESTROYS = (
    entry("find_order", {"customer": "ada"}, "order"),
    entry("delete_order", {"order": ref("order", "/orders/0/id")}, "gone"),
    entry("delete_order", {"order": 9}, "gone-too"),
)


async def rounds(
    client: Any, calls: list[dict[str, Any]], answers: Any, **more: Any
) -> tuple[list[Any], Any]:
    """Answer the questions of a batch at 2026-07-28 until it ends: all questions, and the result."""
    asked: list[Any] = []
    members: dict[str, Any] = {}
    while True:
        result = await client.tool("batch", {"calls": calls}, members=members, **more)
        if result["resultType"] != "input_required":
            return asked, result
        asked.append(result["inputRequests"])
        members = {
            "requestState": result["requestState"],
            "inputResponses": {
                key: answers(key, question["params"])
                for key, question in result["inputRequests"].items()
            },
        }


# --- consent --------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [R3, R4])
@pytest.mark.parametrize("action", ["accept", "decline", "cancel"])
async def test_batch_asks_once_for_all_destructive_entries(revision: str, action: str) -> None:
    """A7: one question lists them before anything runs; without consent the others run."""
    app = make_app(batch_tool="all")
    done = shop(app)
    answer = {"action": action, **({"content": {}} if action == "accept" else {})}
    async with over_stdio(
        app, revision, capabilities=ASKED, replies={"elicitation/create": answer}
    ) as client:
        found = await run(client, *DESTROYS)
    asked = [each["params"] for each in client.heard if each["method"] == "elicitation/create"]
    assert len(asked) == 1
    assert "2 calls" in asked[0]["message"]
    assert 'gone: delete_order {"order":{"$ref":"order#/orders/0/id"}}' in asked[0]["message"]
    assert 'gone-too: delete_order {"order":9}' in asked[0]["message"]
    assert asked[0]["requestedSchema"] == {"type": "object", "properties": {}}
    assert found["order"]["ok"]
    if action == "accept":
        assert done == ["delete 7", "delete 9"]
        return
    assert done == []
    for id in ("gone", "gone-too"):
        assert found[id]["error"]["code"] == 42810
        assert found[id]["error"]["data"]["type"] == "confirm_required"
        assert found[id]["error"]["data"]["ran"] == "no"


@pytest.mark.parametrize("action", ["accept", "decline"])
async def test_batch_asks_for_consent_in_a_round(action: str) -> None:
    """A7: at 2026-07-28 the question is a round, and nothing runs before its answer."""
    app = make_app(batch_tool="all")
    done = shop(app)
    seen: list[int] = []

    def answer(key: str, params: Any) -> Any:
        seen.append(len(done))
        assert key == "confirm"
        assert "gone-too: delete_order" in params["message"]
        return {"action": action, "content": {}} if action == "accept" else {"action": action}

    async with over_http(app, R5, capabilities=ASKED) as client:
        asked, result = await rounds(client, list(DESTROYS), answer)
    assert len(asked) == 1
    assert seen == [0]
    assert done == (["delete 7", "delete 9"] if action == "accept" else [])
    assert [each["ok"] for each in results(result)] == [
        True,
        action == "accept",
        action == "accept",
    ]


@every_revision
async def test_batch_without_elicitation_runs_the_others(revision: str) -> None:
    """A7: a client that cannot be asked gets `confirm_required` for these entries."""
    app = make_app(batch_tool="all")
    done = shop(app)
    async with over_stdio(app, revision) as client:
        found = await run(client, *DESTROYS, entry("charge", {"order": 1, "cents": 2}, "pay"))
    assert found["gone"]["error"]["data"]["type"] == "confirm_required"
    assert found["pay"]["ok"]
    assert done == ["charge 1 2"]


async def test_batch_whose_client_cannot_ask_its_user_runs_the_others() -> None:
    """A7: a client may declare elicitation and still refuse the question."""
    app = make_app(batch_tool="all")
    done = shop(app)
    replies = {"elicitation/create": Refusal(-32601, "Method not found")}
    async with over_stdio(app, R4, capabilities=ASKED, replies=replies) as client:
        found = await run(client, *DESTROYS)
    assert found["gone"]["error"]["data"]["type"] == "confirm_required"
    assert found["order"]["ok"]
    assert done == []


async def test_batch_tool_may_allow_destructive_entries() -> None:
    """A7: `destructive="allow"` does not ask."""
    app = make_app(batch_tool=BatchTool(tools="all", destructive="allow"))
    done = shop(app)
    async with over_stdio(app, R5) as client:
        found = await run(client, *DESTROYS)
    assert done == ["delete 7", "delete 9"]
    assert all(each["ok"] for each in found.values())


async def test_batch_consent_must_be_asked_for() -> None:
    """A7: an answer without the state of the question is refused, and nothing runs."""
    app = make_app(batch_tool="all")
    done = shop(app)
    members = {"inputResponses": {"confirm": {"action": "accept", "content": {}}}}
    async with over_http(app, R5, capabilities=ASKED) as client:
        answer = await client.call(
            "tools/call", {"name": "batch", "arguments": {"calls": list(DESTROYS)}, **members}
        )
    assert "has not asked" in json.dumps(answer)
    assert done == []


async def test_batch_consent_is_for_these_arguments() -> None:
    """A7: a state of one batch does not confirm another one."""
    app = make_app(batch_tool="all")
    done = shop(app)
    async with over_http(app, R5, capabilities=ASKED) as client:
        asked = await send(client, *DESTROYS)
        members = {
            "requestState": asked["requestState"],
            "inputResponses": {"confirm": {"action": "accept", "content": {}}},
        }
        other = {"calls": [entry("delete_order", {"order": 1})]}
        answer = await client.call("tools/call", {"name": "batch", "arguments": other, **members})
    assert "belongs to another call" in json.dumps(answer)
    assert done == []


async def test_batch_consent_hides_secrets() -> None:
    """A7: the question does not show secret arguments."""
    app = make_app(batch_tool="all")

    @app.command
    def log_in(name: str, password: Annotated[str, Secret()]) -> str:
        return name

    async with over_http(app, R5, capabilities=ASKED) as client:
        asked = await send(client, entry("log_in", {"name": "ada", "password": "hunter2"}))
    message = asked["inputRequests"]["confirm"]["params"]["message"]
    assert "ada" in message
    assert "hunter2" not in message


# --- questions of entries -----------------------------------------------------------------------------


class Desk:
    """An app whose tools ask, and what they have done."""

    def __init__(self, **options: Any) -> None:
        self.app: App = make_app(batch_tool=BatchTool(tools="all", destructive="allow"), **options)
        self.done: list[str] = []
        self.price = 5

        @self.app.query
        def price() -> int:
            return self.price

        @self.app.query
        async def greet(ctx: Context) -> str:
            answer = await ctx.elicit("Who?", FORM)
            return f"hello {answer.content['name']}"

        @self.app.command
        async def pay(cents: int, ctx: Context) -> str:
            answer = await ctx.elicit(f"Pay {cents}?", FORM)
            self.done.append(f"pay {cents}")
            return f"{answer.content['name']} paid {cents}"

        @self.app.command
        async def pay_twice(ctx: Context) -> str:
            first = await ctx.elicit("First?", FORM, key="first")
            second = await ctx.elicit("Second?", FORM, key="second")
            self.done.append("pay twice")
            return f"{first.content['name']} {second.content['name']}"

        @self.app.command
        def act(name: str) -> str:
            self.done.append(name)
            return name

        @self.app.command(key="off")
        def unrecorded(name: str) -> str:
            self.done.append(name)
            return name

        @self.app.command(execution="parallel")
        async def free(ctx: Context) -> str:
            return str((await ctx.elicit("Free?", FORM)).action)


ASKING = [
    entry("act", {"name": "first"}, "a"),
    entry("unrecorded", {"name": "off"}, "u"),
    entry("price", id="p"),
    entry("pay", {"cents": ref("p")}, "pay"),
    entry("act", {"name": "last"}, "z"),
    entry("act", {"name": ref("pay")}, "after"),
    entry("greet", id="g"),
]


@pytest.mark.parametrize("revision", [R3, R4])
@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_batch_entries_ask_under_the_call(transport: str, revision: str) -> None:
    """A10: with a handshake, questions are requests on the stream of the batch's call."""
    desk = Desk()
    async with speak(transport, desk.app, revision, ASKED, {"elicitation/create": ANN}) as client:
        found = await run(client, *ASKING)
    assert found["pay"]["result"] == "Ann paid 5"
    assert found["g"]["result"] == "hello Ann"
    assert desk.done == ["first", "off", "pay 5", "last", "Ann paid 5"]
    asked = [each for each in client.heard if each["method"] == "elicitation/create"]
    assert len(asked) == 2


@pytest.mark.parametrize("keyed", [True, False])
async def test_batch_entries_ask_together_in_a_round(keyed: bool) -> None:
    """A10: at 2026-07-28 several entries' questions come together. The next leg replays the commands
    that have an outcome and continues; no command overtakes one that waits for an answer.
    """
    desk = Desk(single_user=True)
    seen: list[list[str]] = []

    def answer(_key: str, _params: Any) -> Any:
        seen.append(list(desk.done))
        return ANN

    more = {"meta": {KEY: "k"}} if keyed else {}
    async with over_http(desk.app, R5, capabilities=ASKED) as client:
        asked, result = await rounds(client, ASKING, answer, **more)
    assert [list(each) for each in asked] == [["pay/input-1", "g/input-1"]]
    assert seen == [["first", "off"], ["first", "off"]]
    assert desk.done == ["first", "off", "pay 5", "last", "Ann paid 5"]
    found = {each["id"]: each for each in results(result)}
    assert found["a"]["replayed"] and found["u"]["replayed"]
    assert "replayed" not in found["z"]
    assert found["after"]["result"] == "Ann paid 5"


async def test_batch_entry_may_ask_in_several_rounds() -> None:
    """A10: each round of an entry continues its record, and a state that is sent again replays."""
    desk = Desk(single_user=True)
    calls = [entry("act", {"name": "x"}, "a"), entry("pay_twice", id="t")]
    states: list[Any] = []
    async with over_http(desk.app, R5, capabilities=ASKED) as client:
        members: dict[str, Any] = {}
        for key in ("t/first", "t/second"):
            result = await client.tool("batch", {"calls": calls}, members=members)
            assert list(result["inputRequests"]) == [key]
            members = {"requestState": result["requestState"], "inputResponses": {key: ANN}}
            states.append(members)
        last = await client.tool("batch", {"calls": calls}, members=members)
        late = await client.tool("batch", {"calls": calls}, members=states[0])
        again = await client.tool("batch", {"calls": calls}, members=states[1])
    assert results(last)[1]["result"] == "Ann Ann"
    assert results(again)[1]["result"] == "Ann Ann"
    assert results(late)[1]["result"] == "Ann Ann"
    assert desk.done == ["x", "pay twice"]


async def test_batch_state_sent_again_asks_the_same() -> None:
    """A10: a state whose next round has asked gets these questions again, and no effect."""
    desk = Desk(single_user=True)
    calls = [entry("pay_twice", id="t")]
    async with over_http(desk.app, R5, capabilities=ASKED) as client:
        first = await client.tool("batch", {"calls": calls})
        members = {
            "requestState": first["requestState"],
            "inputResponses": {"t/first": ANN},
        }
        second = await client.tool("batch", {"calls": calls}, members=members)
        again = await client.tool("batch", {"calls": calls}, members=members)
    assert list(second["inputRequests"]) == list(again["inputRequests"]) == ["t/second"]
    assert desk.done == []


async def test_batch_entry_asks_again_about_other_arguments() -> None:
    """A10: an answer is for the arguments that its question had; a query has changed them."""
    desk = Desk(single_user=True)
    calls = [entry("price", id="p"), entry("pay", {"cents": ref("p")}, "pay")]
    messages: list[str] = []

    def answer(_key: str, params: Any) -> Any:
        messages.append(params["message"])
        desk.price = 9
        return ANN

    async with over_http(desk.app, R5, capabilities=ASKED) as client:
        _, result = await rounds(client, calls, answer)
    assert messages == ["Pay 5?", "Pay 9?"]
    assert results(result)[1]["result"] == "Ann paid 9"
    assert desk.done == ["pay 9"]


async def test_batch_entry_that_asks_without_the_capability_fails_alone() -> None:
    """A10: the client has not declared elicitation."""
    desk = Desk()
    async with over_http(desk.app, R5) as client:
        found = await run(client, entry("greet", id="g"), entry("act", {"name": "x"}, "a"))
    assert found["g"]["error"]["code"] == -32021
    assert found["a"]["ok"]


async def test_batch_entry_meets_the_waiting_record_of_another_call() -> None:
    """A10: a single call with the same key waits for its own client."""
    desk = Desk()
    async with over_http(desk.app, R5, capabilities=ASKED) as client:
        alone = await client.tool("pay", {"cents": 5}, meta={KEY: "k"})
        found = await run(client, entry("pay", {"cents": 5}, "p", idempotency_key="k"))
    assert alone["resultType"] == "input_required"
    assert found["p"]["error"]["data"]["type"] == "idempotency_key_in_progress"


# --- progress and cancel ------------------------------------------------------------------------------


@every_revision
async def test_batch_progress_counts_entries(revision: str) -> None:
    """A9: "3 of 12: charge"."""
    app = make_app(batch_tool="all")
    shop(app)

    @app.query
    async def slow(ctx: Context) -> str:
        await ctx.progress(1, 2, "half")
        return "done"

    calls = [
        entry("find_order", {"customer": "ada"}, "a"),
        entry("charge", {"order": 1, "cents": 2}, "b"),
        entry("slow", id="s", after=["b"]),
        entry("nothing", id="c", after=["s"]),
    ]
    async with over_stdio(app, revision) as client:
        await run(client, *calls, meta={"progressToken": "t"})
        seen = client.told("notifications/progress")
        await run(client, *calls)
    whole = [each for each in seen if each["progress"] == int(each["progress"])]
    assert [(each["progress"], each["total"]) for each in whole] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sorted(each["progress"] for each in seen) == [each["progress"] for each in seen]
    if revision != R1:
        messages = [each["message"] for each in seen]
        assert "2 of 4: charge" in messages or "2 of 4: nothing" in messages
        assert "s: half" in messages
    assert len(client.told("notifications/progress")) == len(seen)


@pytest.mark.parametrize("revision", [R2, R4, R5])
async def test_batch_cancel_stops_what_has_not_passed_its_commit_point(revision: str) -> None:
    """A9: the rest is recorded, and a batch that is sent again continues."""
    app = make_app(batch_tool=BatchTool(tools="all", destructive="allow"))
    done: list[str] = []
    acting = asyncio.Event()
    gate = asyncio.Event()
    was_cancelled = asyncio.Event()

    @app.command(execution="parallel")
    async def act(ctx: Context) -> str:
        await ctx.commit_point()
        acting.set()
        await gate.wait()
        done.append("act")
        return "acted"

    @app.command(execution="parallel")
    async def careful(ctx: Context) -> str:
        if not gate.is_set():
            try:
                await asyncio.Event().wait()
            finally:
                was_cancelled.set()
        await ctx.commit_point()
        done.append("careful")
        return "careful"

    calls = {"calls": [entry("careful", id="c"), entry("act", id="a")]}
    async with over_stdio(app, revision) as client:
        client.write(
            client.message("tools/call", {"name": "batch", "arguments": calls}, 77, {KEY: "k"})
        )
        await acting.wait()
        await client.notify("notifications/cancelled", {"requestId": 77})
        await was_cancelled.wait()
        gate.set()
        found = results(await client.tool("batch", calls, meta={KEY: "k"}))
    assert done == ["act", "careful"]
    assert [each.get("replayed") for each in found] == [None, True]
