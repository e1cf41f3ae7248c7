"""Commands that ask: one effect, whatever arrives twice, and answers only to questions that were
asked.
"""

import asyncio
import base64
import json
import time
from copy import copy
from pathlib import Path
from typing import Any

import pytest

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
    HttpClient,
    Refusal,
    over_http,
    over_stdio,
    speak,
)
from tests.mcp.desk import ALL, ANN, FORM, READS, REPLIES, every_transport, text
from wirecall import Context
from wirecall.ledger.base import RecordId, State
from wirecall.ledger.memory import MemoryLedger


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
            names = [
                (await ctx.elicit(f"Pay {cents}?", FORM, key=key)).content["name"]
                for key in ("who", "also")
            ]
            self.paid += names
            return f"paid by {' and '.join(names)}"

        @self.app.command(retention=10)
        async def pay_soon(ctx: Context) -> str:
            return str((await ctx.elicit("Pay?", FORM, key="who")).action)

        async def hasty(ctx: Context) -> str:
            await ctx.commit_point()
            self.paid.append("hasty")
            await ctx.elicit("Sure?", FORM, key="who")
            return "done"

        self.app.command(hasty)
        self.app.command(name="unrecorded", key="off")(hasty)

    async def state(self, tool: str = "pay", key: str = "k") -> State | None:
        record = await (await self.app.ledger()).get(RecordId("", f"tools/call:{tool}", key))
        return record.state if record else None


KEYED = {KEY: "k"}


def again(result: Any, reply: Any = ANN) -> Any:
    return {"inputResponses": {"who": reply}, "requestState": result["requestState"]}


@every_transport
async def test_command_that_asks_takes_effect_once(transport: str) -> None:
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


async def test_command_that_waits_asks_a_duplicate_the_same_question() -> None:
    """The client repeats the first leg because its answer was lost.

    The question lets it continue.
    """
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        first = await client.tool("pay", {"cents": 5}, meta=KEYED)
        second = await client.tool("pay", {"cents": 5}, meta=KEYED)
        assert second["resultType"] == "input_required"
        assert second["inputRequests"] == first["inputRequests"]
        assert await till.state() == State.WAITING
        assert (
            text(await client.tool("pay", {"cents": 5}, members=again(second), meta=KEYED))
            == "paid by Ann"
        )
    assert till.paid == ["Ann"]


@pytest.mark.parametrize("revision", [R1, R2, R3, R4])
async def test_command_that_waits_is_not_a_result_at_older_revisions(revision: str) -> None:
    """`input_required` exists only at 2026-07-28: for other revisions the command is in progress."""
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        other = HttpClient(client.asgi, revision, ALL, REPLIES)
        await other.open()
        answer = await other.call(
            "tools/call", {"name": "pay", "arguments": {"cents": 5}}, meta=KEYED
        )
        assert "inputRequests" not in json.dumps(answer), answer
        assert answer["error"]["data"]["type"] == "idempotency_key_in_progress"
        assert (
            text(await client.tool("pay", {"cents": 5}, members=again(asked), meta=KEYED))
            == "paid by Ann"
        )
    assert till.paid == ["Ann"]


async def test_command_that_waits_asks_only_questions_that_the_duplicate_can_answer() -> None:
    """Matrix 1.8: only kinds that this request's capabilities declare."""
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        await client.tool("pay", {"cents": 5}, meta=KEYED)
        client.capabilities = {}
        answer = await client.call(
            "tools/call", {"name": "pay", "arguments": {"cents": 5}}, meta=KEYED
        )
        assert "inputRequests" not in json.dumps(answer), answer
    assert till.paid == []


async def test_command_that_waits_conflicts_with_other_arguments() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        await client.tool("pay", {"cents": 5}, meta=KEYED)
        error = await client.tool_error("pay", {"cents": 6}, meta=KEYED)
        assert error["data"]["type"] == "idempotency_key_conflict"
    assert till.paid == []


async def test_command_continues_to_wait_after_a_forged_state() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        forged = {**again(asked), "requestState": asked["requestState"] + "x"}
        assert (await client.tool_error("pay", {"cents": 5}, members=forged, meta=KEYED))[
            "code"
        ] == -32602
        assert await till.state() == State.WAITING
        bad = again(asked, {"action": "maybe"})
        assert (await client.tool_error("pay", {"cents": 5}, members=bad, meta=KEYED))[
            "code"
        ] == -32602
        assert (
            text(await client.tool("pay", {"cents": 5}, members=again(asked), meta=KEYED))
            == "paid by Ann"
        )
    assert till.paid == ["Ann"]


async def test_command_is_the_same_in_a_round_without_the_key() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        assert text(await client.tool("pay", {"cents": 5}, members=again(asked))) == "paid by Ann"
        assert (
            text(await client.tool("pay", {"cents": 5}, members=again(asked), meta=KEYED))
            == "paid by Ann"
        )
        assert await till.state() == State.DONE
    assert till.paid == ["Ann"]


async def test_command_refuses_a_round_with_another_key() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        other = {KEY: "another"}
        assert (await client.tool_error("pay", {"cents": 5}, members=again(asked), meta=other))[
            "code"
        ] == -32602
        assert await till.state() == State.WAITING
    assert till.paid == []


async def test_command_answered_twice_at_once_has_one_effect() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        params = {"name": "pay", "arguments": {"cents": 5}, **again(asked)}
        both = [client.post(client.message("tools/call", params, id, KEYED)) for id in (8, 9)]
        assert [text((await one.json())["result"]) for one in both] == [
            "paid by Ann",
            "paid by Ann",
        ]
    assert till.paid == ["Ann"]


async def test_command_has_an_outcome_after_a_declined_question() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5}, meta=KEYED)
        assert (
            text(
                await client.tool(
                    "pay", {"cents": 5}, members=again(asked, {"action": "decline"}), meta=KEYED
                )
            )
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


async def test_asking_after_the_commit_point_is_not_possible_without_a_key_either() -> None:
    """The next round would start from the top, without a record in the ledger that could stop it."""
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        found = await client.tool("hasty")
        assert found["isError"] is True and "inputRequests" not in found
    assert till.paid == ["hasty"]


async def test_asking_after_the_commit_point_is_fine_where_the_handler_waits() -> None:
    till = Till()
    async with over_http(till.app, R4, capabilities=ALL, replies=REPLIES) as client:
        assert text(await client.tool("hasty", meta=KEYED)) == "done"
        assert (await client.tool("hasty", meta=KEYED))["_meta"][REPLAYED] is True
    assert till.paid == ["hasty"]


@pytest.mark.parametrize("revision", [R3, R4])
@pytest.mark.parametrize("name", ["hasty", "unrecorded"])
@pytest.mark.parametrize(
    ("capable", "reply"),
    [(ALL, {"action": "accept", "content": {"name": 5}}), (ALL, {"nonsense": 1}), ({}, {})],
)
async def test_question_refused_after_the_commit_point_has_an_unknown_outcome(
    revision: str, name: str, capable: Any, reply: Any
) -> None:
    """Without a key, too: a client that reads "no" repeats the call, and the effect happens twice."""
    till = Till()
    async with over_http(
        till.app, revision, capabilities=capable, replies={"elicitation/create": reply}
    ) as client:
        answer = await client.call("tools/call", {"name": name})
    error = answer["error"] if "error" in answer else answer["result"]["_meta"]["io.wirecall/error"]
    refused = -32602 if capable else -32021
    assert (error["code"], error["data"]["ran"]) == (
        -32603 if name == "hasty" else refused,
        "unknown",
    )
    assert till.paid == ["hasty"]


@every_transport
@pytest.mark.parametrize("name", ["hasty", "unrecorded"])
@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(4001, "no", {"ran": "no"}),
        Refusal(-32601, "no such question"),
        Refusal(-32602, "no", ["why"]),
    ],
)
async def test_command_decides_whether_it_ran_when_the_client_answers_with_an_error(
    refusal: Refusal, name: str, transport: str
) -> None:
    """The handler is past its commit point.

    The `ran` of the client, or its code, is about the question, not the call.
    """
    till = Till()
    async with speak(transport, till.app, R4, ALL, {"elicitation/create": refusal}) as client:
        for _ in range(2 if name == "hasty" else 1):  # the second is a replay
            answer = await client.call(
                "tools/call", {"name": name}, meta=KEYED if name == "hasty" else None
            )
            error = (
                answer["error"]
                if "error" in answer
                else answer["result"]["_meta"]["io.wirecall/error"]
            )
            assert (error["code"], error["data"]["ran"]) == (
                refusal.code,
                "yes" if name == "hasty" else "unknown",
            )
    assert till.paid == ["hasty"]


async def test_command_is_not_done_if_the_client_answers_with_an_error_before_the_commit_point() -> (
    None
):
    app = make_app()

    @app.command
    async def careful(ctx: Context) -> None:
        await ctx.elicit("Sure?", FORM)
        await ctx.commit_point()

    replies = {"elicitation/create": Refusal(4001, "no", {"ran": "yes", "why": "busy"})}
    async with over_http(app, R4, capabilities=ALL, replies=replies) as client:
        refused = await client.tool("careful", meta=KEYED)
    assert refused["_meta"]["io.wirecall/error"] == {
        "code": 4001,
        "data": {"ran": "no", "why": "busy"},
    }


# --- one state, one outcome -----------------------------------------------------------------------


def named(name: str) -> Any:
    return {"action": "accept", "content": {"name": name}}


@every_transport
async def test_state_that_is_sent_again_has_no_second_effect(transport: str) -> None:
    """Without a key: the ledger returns the recorded outcome of the state, whatever answers come
    with it.
    """
    till = Till()
    async with speak(transport, till.app, R5, ALL) as client:
        asked = await client.tool("pay", {"cents": 5})
        for reply, replayed in (
            (ANN, None),
            (ANN, True),
            (named("Eve"), True),
            ({"action": "decline"}, True),
        ):
            found = await client.tool("pay", {"cents": 5}, members=again(asked, reply))
            assert (text(found), found["_meta"].get(REPLAYED)) == ("paid by Ann", replayed)
        await client.tool("pay", {"cents": 5})  # another call is another intent, and asks again
    assert till.paid == ["Ann"]


async def test_state_that_is_sent_several_times_at_once_has_one_effect() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay", {"cents": 5})
        params = {"name": "pay", "arguments": {"cents": 5}, **again(asked)}
        several = [client.post(client.message("tools/call", params, id)) for id in range(10, 14)]
        assert {text((await one.json())["result"]) for one in several} == {"paid by Ann"}
    assert till.paid == ["Ann"]


async def test_state_has_one_effect_in_all_processes(tmp_path: Path) -> None:
    tills = [Till(secret="shared", ledger=f"sqlite:{tmp_path / 'ledger.db'}") for _ in range(2)]
    async with (
        over_http(tills[0].app, R5, capabilities=ALL) as first,
        over_http(tills[1].app, R5, capabilities=ALL) as second,
    ):
        asked = await first.tool("pay", {"cents": 5})
        for client in (second, first):
            assert (
                text(await client.tool("pay", {"cents": 5}, members=again(asked))) == "paid by Ann"
            )
    assert [till.paid for till in tills] == [[], ["Ann"]]


async def test_states_of_several_rounds_have_one_effect() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        first = await client.tool("pay_twice", {"cents": 5})
        seconds = [
            await client.tool("pay_twice", {"cents": 5}, members=again(first, named(name)))
            for name in "AB"
        ]
        assert seconds[0]["requestState"] == seconds[1]["requestState"]  # one state, one next leg
        for second in seconds:
            members = {
                "inputResponses": {"also": named("C")},
                "requestState": second["requestState"],
            }
            assert text(await client.tool("pay_twice", {"cents": 5}, members=members)).startswith(
                "paid by A and C"
            )
        assert text(await client.tool("pay_twice", {"cents": 5}, members=again(first))).startswith(
            "paid by A and C"
        )
    assert till.paid == ["A", "C"]


async def test_state_does_not_outlive_the_record_of_its_command() -> None:
    till = Till()
    async with over_http(till.app, R5, capabilities=ALL) as client:
        before = time.time()
        state = (await client.tool("pay_soon"))["requestState"]
        payload = state.partition(".")[0]
        until = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))[2]
    assert until <= time.time() + 10 and until >= before + 10


@pytest.mark.parametrize("meta", [{}, KEYED])
async def test_command_does_not_take_an_answer_to_a_question_that_it_did_not_ask(meta: Any) -> None:
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
async def test_command_asks_in_the_older_revisions(transport: str) -> None:
    till = Till()
    async with speak(transport, till.app, R4, ALL, REPLIES) as client:
        for replayed in (None, True):
            found = await client.tool("pay", {"cents": 5}, meta=KEYED)
            assert (text(found), found.get("_meta", {}).get(REPLAYED)) == ("paid by Ann", replayed)
    assert (till.paid, till.begun) == (["Ann"], 1)


async def test_command_is_not_claimed_if_a_capability_is_missing() -> None:
    till = Till()
    async with over_http(till.app, R5) as client:
        assert (await client.tool_error("pay", {"cents": 5}, meta=KEYED))["code"] == -32021
        client.capabilities = ALL
        assert (await client.tool("pay", {"cents": 5}, meta=KEYED))[
            "resultType"
        ] == "input_required"
    assert till.paid == []


@pytest.mark.parametrize("revision", REVISIONS)
async def test_question_ends_with_the_time_limit_of_its_tool(revision: str) -> None:
    """A question that is never answered ends with the tool's time limit."""
    app = make_app()

    @app.tool(annotations=READS, timeout=0.05)
    async def ask(ctx: Context) -> str:
        return (await ctx.sample("?")).text

    async with over_stdio(app, revision, capabilities=ALL) as client:
        async with asyncio.timeout(PATIENCE):
            answer = await client.call(
                "tools/call", {"name": "ask"}, meta={f"{PREFIX}logLevel": "error"}
            )
        assert ("error" in answer) == (revision != R5)


async def test_command_whose_second_leg_was_lost_by_a_failover_takes_effect_once() -> None:
    """The store has the record of the first leg again, which waits for the second one."""
    till = Till()
    ledger = await till.app.ledger()
    assert isinstance(ledger, MemoryLedger)

    @till.app.command
    async def pay_slowly(cents: int, ctx: Context) -> str:
        name = (await ctx.elicit(f"Pay {cents}?", FORM, key="who")).content["name"]
        till.paid.append(name)
        ledger._rows[id] = first_leg
        return f"paid by {name}"

    async with over_http(till.app, R5, capabilities=ALL) as client:
        asked = await client.tool("pay_slowly", {"cents": 5}, meta=KEYED)
        id = RecordId("", "tools/call:pay_slowly", "k")
        first_leg = copy(ledger._rows[id])
        for _ in range(2):
            done = await client.tool("pay_slowly", {"cents": 5}, members=again(asked), meta=KEYED)
            assert text(done) == "paid by Ann"
    assert till.paid == ["Ann"]
