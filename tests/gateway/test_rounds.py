"""Calls of several rounds: a server of 2026-07-28 asks, and clients of both eras answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import until
from tests.gateway.bench import BOTH, Bench, newest
from tests.gateway.fronts import effects, enveloped, introduction, message_of, wrapped
from wirecall.errors import RpcError
from wirecall.gateway import ToolSettings
from wirecall.ledger.base import State
from wirecall.mcp.revisions import NAMES
from wirecall.server.identity import Identity

OLD = NAMES[3]
ACCEPTED = {"elicitation/create": {"action": "accept", "content": {}}}


@asynccontextmanager
async def asked(folder: Path, **options: Any) -> AsyncIterator[Bench]:
    """A gateway in front of a server that asks."""
    own = options.pop("own", {})
    async with Bench(folder, names=(), more=[newest(folder, **own)], **options).serving() as bench:
        yield bench


async def verify(token: str) -> Identity | None:
    return Identity(token) if token in ("ann", "bob") else None


class Caller:
    """A client of 2026-07-28, which sends the rounds of a call itself."""

    def __init__(self, bench: Bench, path: str = "/mcp/new", token: str | None = None) -> None:
        self._url = f"{bench.url}{path}"
        self._headers = {**BOTH, "Mcp-Protocol-Version": NAMES[-1]}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    async def ask(self, method: str = "tools/call", name: str = "ask", **more: Any) -> Any:
        meta: dict[str, Any] = {
            "io.modelcontextprotocol/clientCapabilities": {"elicitation": {"form": {}}}
        }
        params = enveloped({"name": name, "_meta": {**meta, **more.pop("meta", {})}, **more})
        own = {"Mcp-Method": method, "Mcp-Name": name}
        message = message_of(method, params, 1)
        async with (
            aiohttp.ClientSession(headers={**self._headers, **own}) as http,
            http.post(self._url, data=message) as answer,
        ):
            return await answer.json()

    async def state(self, **more: Any) -> str:
        """The state of a first round."""
        answer = await self.ask(**more)
        return str(answer["result"]["requestState"])


def rounds(folder: Path) -> list[str]:
    lines = (folder / "new").read_text().splitlines()
    return [line.removeprefix("round ") for line in lines if line.startswith("round ")]


# --- both at 2026-07-28 ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/mcp/new", "/mcp"])
async def test_rounds_of_a_new_client_carry_the_exact_state(tmp_path: Path, path: str) -> None:
    """G12, new / new: questions, answers and the server's own state arrive as they are."""
    async with asked(tmp_path) as bench:
        caller = Caller(bench, path)
        arguments = {"to": "ann", "rounds": 2}
        first = (await caller.ask(arguments=arguments))["result"]
        assert first["resultType"] == "input_required"
        questions = first["inputRequests"]
        assert questions["elicitation/create"]["params"] == {"message": "sure?"}
        more: Any = {"arguments": arguments, "inputResponses": ACCEPTED}
        second = (await caller.ask(requestState=first["requestState"], **more))["result"]
        assert second["resultType"] == "input_required"
        assert effects(tmp_path / "new") == 0
        done = (await caller.ask(requestState=second["requestState"], **more))["result"]
        assert done["content"] and done["x"] == 0.1
        assert effects(tmp_path / "new") == 1
        accepted = json.dumps(ACCEPTED)
        assert rounds(tmp_path) == [
            " null",
            f"their state {accepted}",
            f"their state their state {accepted}",
        ]


async def test_rounds_have_a_state_if_the_server_has_none(tmp_path: Path) -> None:
    """A command needs its key in the next round; the server gets no state that it did not make."""
    async with asked(tmp_path) as bench:
        caller = Caller(bench)
        arguments = {"state": "none"}
        state = await caller.state(arguments=arguments)
        done = await caller.ask(
            arguments=arguments, requestState=state, inputResponses={"elicitation/create": {}}
        )
        assert "content" in done["result"]
        assert rounds(tmp_path)[1] == ' {"elicitation/create": {}}'


async def test_record_waits_between_rounds_and_a_round_that_is_sent_again_runs_once(
    tmp_path: Path,
) -> None:
    """Section 6: the record is WAITING between legs; one state leads to one round."""
    async with asked(tmp_path) as bench:
        caller = Caller(bench)
        state = await caller.state()
        ledger = await bench.gateway.ledger()
        [waiting] = await ledger.list(state=State.WAITING, limit=10)
        assert waiting.id.method.startswith("tools/call:new.")
        more: Any = {"requestState": state, "inputResponses": ACCEPTED}
        answers = [await caller.ask(**more) for _ in range(3)]
        texts = {answer["result"]["content"][0]["text"] for answer in answers}
        assert len(texts) == 1 and effects(tmp_path / "new") == 1
        marks = [answer["result"].get("_meta", {}) for answer in answers]
        assert [mark.get("io.wirecall/replayed") for mark in marks] == [None, True, True]


async def test_rounds_of_a_tool_without_records_run_once_for_each_state(tmp_path: Path) -> None:
    """`key = "off"` has no record for the first round; a state leads to one effect too."""
    own = {"tools": {"ask": ToolSettings(key="off")}}
    async with asked(tmp_path, own=own) as bench:
        caller = Caller(bench)
        state = await caller.state()
        for _ in range(2):
            answer = await caller.ask(requestState=state, inputResponses=ACCEPTED)
            assert "content" in answer["result"]
        assert effects(tmp_path / "new") == 1


async def test_prompt_that_asks_has_a_sealed_state_too(tmp_path: Path) -> None:
    """A request that only reads has no record; its state is bound to the request too."""
    async with asked(tmp_path) as bench:
        caller = Caller(bench)
        state = await caller.state(method="prompts/get")
        other = await caller.ask(method="prompts/get", arguments={"a": "b"}, requestState=state)
        assert other["error"]["code"] == -32602
        done = await caller.ask(method="prompts/get", requestState=state, inputResponses=ACCEPTED)
        assert done["result"]["x"] == 0.5
        tool = await caller.ask(requestState=state)
        assert tool["error"]["code"] == -32602


async def test_state_that_does_not_belong_to_the_call_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bad input: forged, of another call, with another key, or old: -32602, and nothing is sent."""
    async with asked(tmp_path) as bench:
        caller = Caller(bench)
        state = await caller.state()

        async def refused(state: object, **more: Any) -> bool:
            answer = await caller.ask(requestState=state, inputResponses=ACCEPTED, **more)
            return bool(answer["error"]["code"] == -32602)

        for forged in ("x.y", state[:-2], 7, "their state", ""):
            assert await refused(forged)
        assert await refused(state, arguments={"to": "bob"})
        assert await refused(state, name="pay")
        assert await refused(state, meta={"io.wirecall/idempotency-key": "another"})
        now = bench.gateway.sealer.clock
        monkeypatch.setattr(bench.gateway.sealer, "clock", lambda: now() + 4000)
        assert await refused(state)
        assert len(rounds(tmp_path)) == 1 and effects(tmp_path / "new") == 0


async def test_state_of_another_caller_is_refused(tmp_path: Path) -> None:
    """Bad input and section 8, confused deputy: a state is good for its caller alone."""
    async with asked(tmp_path, auth=verify) as bench:
        state = await Caller(bench, token="ann").state()
        stolen = await Caller(bench, token="bob").ask(requestState=state, inputResponses=ACCEPTED)
        assert stolen["error"]["code"] == -32602 and effects(tmp_path / "new") == 0
        own = await Caller(bench, token="ann").ask(requestState=state, inputResponses=ACCEPTED)
        assert "content" in own["result"]


async def test_state_of_a_call_that_is_gone_is_refused(tmp_path: Path) -> None:
    """Bad input: the record is the only evidence that a round has not run."""
    async with asked(tmp_path) as bench:
        state = await Caller(bench).state()
    for file in tmp_path.glob("ledger.db*"):
        if file.suffix != ".secret":
            file.unlink()
    async with asked(tmp_path) as bench:
        answer = await Caller(bench).ask(requestState=state, inputResponses=ACCEPTED)
        assert answer["error"]["code"] == -32602 and "gone" in answer["error"]["data"]["reason"]
    assert effects(tmp_path / "new") == 0


async def test_round_that_may_have_run_is_unknown(tmp_path: Path) -> None:
    """Bad input: 50910, also for the same state again: the round is not sent a second time."""
    async with asked(tmp_path) as bench:
        caller = Caller(bench)
        arguments = {"then": "die"}
        state = await caller.state(arguments=arguments)
        for _ in range(2):
            answer = await caller.ask(
                arguments=arguments, requestState=state, inputResponses=ACCEPTED
            )
            assert answer["error"]["code"] == 50910
        assert effects(tmp_path / "new") == 1


async def test_round_continues_after_a_restart_of_the_gateway(tmp_path: Path) -> None:
    """X21, between legs: the secret and the record are kept."""
    async with asked(tmp_path) as bench:
        state = await Caller(bench).state()
    async with asked(tmp_path) as bench:
        done = await Caller(bench).ask(requestState=state, inputResponses=ACCEPTED)
        assert "content" in done["result"] and effects(tmp_path / "new") == 1


async def test_wrap_passes_the_state_of_its_server_on_as_it_is(tmp_path: Path) -> None:
    """Exactness: one client needs no seal; a round that is lost is recognised."""
    words = newest(tmp_path).command
    async with wrapped(tmp_path / "new", revision=None, command=words) as client:
        meta: dict[str, Any] = {"io.modelcontextprotocol/clientCapabilities": {"elicitation": {}}}
        params = enveloped({"name": "ask", "arguments": {}, "_meta": meta})
        first = (await client.ask("tools/call", params))["result"]
        assert first["requestState"] == "their state"
        more = {"requestState": "their state", "inputResponses": ACCEPTED}
        await client.ask("tools/call", {**params, **more}, lose=True)
        again = await client.ask("tools/call", {**params, **more})
        assert again["result"]["_meta"]["io.wirecall/replayed"] is True
        assert effects(tmp_path / "new") == 1


# --- an older client ------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", [NAMES[2], NAMES[3]])
@pytest.mark.parametrize("path", ["/mcp/new", "/mcp"])
async def test_old_client_is_asked_inside_its_call(
    tmp_path: Path, path: str, revision: str
) -> None:
    """G12, old / new: `input_required` becomes requests; the next leg has the answers and the state."""
    seen: list[Any] = []

    def elicit(form: Any) -> dict[str, Any]:
        seen.append(form.message)
        return {"name": "Ann"}

    async def roots() -> list[str]:
        return ["file:///a"]

    questions = ["elicitation/create", "sampling/createMessage", "roots/list"]
    async with (
        asked(tmp_path) as bench,
        bench.client(
            path, revision=revision, elicit=elicit, sample=lambda _: "hello", roots=roots
        ) as client,
    ):
        arguments = {"to": "ann", "rounds": 2, "questions": questions}
        paid = await client.call_tool("ask", arguments)
        assert paid.content[0].text.startswith("paid") and "resultType" not in paid.meta
        status = (await bench.gateway.status())["upstreams"]["new"]
        assert status["in_flight"] == 0
    assert seen == ["sure?", "sure?"] and effects(tmp_path / "new") == 1
    legs = rounds(tmp_path)
    assert [leg.count("their state") for leg in legs] == [0, 1, 2]
    answers = json.loads(legs[1].removeprefix("their state "))
    assert answers["elicitation/create"]["content"] == {"name": "Ann"}
    assert answers["sampling/createMessage"]["content"]["text"] == "hello"
    assert answers["roots/list"]["roots"] == [{"uri": "file:///a"}]


async def test_new_server_gets_exactly_what_an_old_client_has_declared(tmp_path: Path) -> None:
    """Section 6: a client without the capability has not declared it, so the server says so."""
    async with asked(tmp_path) as bench, bench.client("/mcp/new", revision=OLD) as client:
        with pytest.raises(RpcError, match="not declared"):
            await client.call_tool("ask", {})
    assert "declared {}" in (tmp_path / "new").read_text()
    assert effects(tmp_path / "new") == 0


async def test_question_that_the_client_refuses_ends_its_call(tmp_path: Path) -> None:
    """The server has done nothing, so the record is released and the next call runs."""
    refusals = [ValueError("no")]

    def elicit(_: Any) -> dict[str, Any]:
        if refusals:
            raise refusals.pop()
        return {}

    async with (
        asked(tmp_path) as bench,
        bench.client("/mcp/new", revision=OLD, elicit=elicit) as client,
    ):
        with pytest.raises(RpcError, match="elicitation/create"):
            await client.call_tool("ask", {}, key="k")
        assert effects(tmp_path / "new") == 0
        await client.call_tool("ask", {}, key="k")
        assert effects(tmp_path / "new") == 1


@pytest.mark.parametrize("gone", ["cancels", "leaves"])
async def test_client_that_ends_while_it_is_asked_runs_nothing(tmp_path: Path, gone: str) -> None:
    """A question has an end: the client cancels its call, or ends its session."""
    async with asked(tmp_path) as bench:
        hello = {**introduction(), "capabilities": {"elicitation": {}}}
        _, session = await bench.post("/mcp/new", message_of("initialize", hello, 1))
        assert session is not None
        headers = {**BOTH, "Mcp-Session-Id": session}
        async with aiohttp.ClientSession(headers=headers) as http:
            message = message_of("tools/call", {"name": "ask", "arguments": {}}, "c")
            async with http.post(f"{bench.url}/mcp/new", data=message) as stream:
                async with asyncio.timeout(60):
                    while b"elicitation/create" not in await stream.content.readline():
                        pass
                assert len(bench.gateway.upstreams["new"].methods) == 1
                if gone == "cancels":
                    params = {"requestId": "c", "reason": "no time"}
                    cancel = message_of("notifications/cancelled", params)
                    await bench.post("/mcp/new", cancel, session)
                else:
                    await http.delete(f"{bench.url}/mcp/new")
        ledger = await bench.gateway.ledger()

        async def are_released() -> bool:
            return not await ledger.list(state=State.RUNNING, limit=10)

        async with asyncio.timeout(60):
            while not await are_released():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await until(lambda: bench.gateway.upstreams["new"].places.taken == 0)
        assert effects(tmp_path / "new") == 0


async def test_call_that_waits_for_its_client_has_no_place(tmp_path: Path) -> None:
    """A person may take an hour: other calls are served in that time, with `in_flight = 1` as well."""
    answered = asyncio.Event()

    async def elicit(_: Any) -> dict[str, Any]:
        await answered.wait()
        return {}

    own = {"in_flight": 1}
    async with (
        asked(tmp_path, own=own) as bench,
        bench.client("/mcp/new", revision=OLD, elicit=elicit) as client,
    ):
        asking = asyncio.create_task(client.call_tool("ask", {}))
        await until(lambda: (tmp_path / "new").exists() and rounds(tmp_path))
        assert not (await client.call_tool("look")).is_error
        answered.set()
        assert (await asking).content[0].text.startswith("paid")
