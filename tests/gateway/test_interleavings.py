"""Two things at once behind a gateway: each test fixes the order in which they happen."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import Raw

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import until
from tests.gateway.bench import BOTH, Bench, Held
from tests.gateway.fronts import Client, introduction, message_of, wrapped
from wirecall.errors import BadAnswer, RpcError
from wirecall.gateway import fronts, gateway, relay
from wirecall.gateway.fronts import Listing, read_list
from wirecall.gateway.gateway import TELL_EVERY
from wirecall.gateway.session import UpstreamSession, Wishes
from wirecall.gateway.upstream import LINK_TIME, STARTS, Origin, PacedChild, Starts, Upstream
from wirecall.mcp.revisions import HANDSHAKE
from wirecall.mcp.server.peer import Session
from wirecall.protocol.messages import Arrived

CHANGED = Arrived("2.0", method="notifications/tools/list_changed")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with Bench(tmp_path).serving() as bench:
        await reached(bench)
        yield bench


@pytest.fixture
async def owned(tmp_path: Path) -> AsyncIterator[Bench]:
    """A gateway that starts a process of each server for each session."""
    own = {"share": "session"}
    async with Bench(tmp_path, own={"bank": own, "shop": own}).serving() as bench:
        await reached(bench)
        yield bench


async def reached(bench: Bench) -> None:
    """Wait until the gateway has reached its servers for itself."""
    await until(lambda: len(bench.gateway.seen) == len(bench.gateway.upstreams))


async def opened(bench: Bench, path: str = "/mcp") -> str:
    _, session = await bench.post(path, message_of("initialize", introduction(), 1))
    assert session is not None
    return session


def talks(bench: Bench, name: str) -> list[UpstreamSession]:
    return bench.gateway._talks(bench.gateway.upstreams[name])


def owned_lists(bench: Bench) -> list[tuple[str, str, str]]:
    """The lists that the gateway keeps for sessions of clients."""
    return [key for key in bench.gateway._lists if key[1] != "session "]


async def end(bench: Bench, session: str, path: str = "/mcp") -> None:
    headers = {**BOTH, "Mcp-Session-Id": session}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.delete(f"{bench.url}{path}") as answer,
    ):
        assert answer.status < 300


# --- lists ----------------------------------------------------------------------------------------


async def test_list_that_changes_while_it_is_read_is_read_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's answer and its notification may come in one piece of bytes."""
    reads: list[str] = []

    async def read(conversation: UpstreamSession, kind: str) -> Listing:
        found = await read_list(conversation, kind)
        reads.append(kind)
        if len(reads) == 1:
            bench.gateway._notified(conversation, "", CHANGED)
        return found

    monkeypatch.setattr(gateway, "read_list", read)
    bench.gateway._lists.clear()
    upstream = bench.gateway.upstreams["bank"]
    for _ in range(3):
        await bench.gateway.entries(upstream, "tools", "", Session(HANDSHAKE[-1]))
    assert len(reads) == 2


async def test_clients_are_notified_of_a_list_only_if_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Section 6: a flood of `list_changed` is compared at once, and then every 250 ms."""
    clock = Held()
    async with Bench(tmp_path, names=("bank",), clock=clock).serving() as bench:
        gate = bench.gateway
        await until(lambda: gate._lists)
        [conversation] = gate._talks(gate.upstreams["bank"])
        seen: list[str] = []
        monkeypatch.setattr(gate._fronts["/mcp"].hub, "notify", seen.append)

        def flood() -> None:
            for _ in range(100):
                gate._notified(conversation, "", CHANGED)

        flood()
        await until(lambda: clock.sleeping)
        assert seen == [] and gate._lists, "it is what it was"
        bench.file("bank").with_suffix(".tools").write_text('[{"name": "more"}]')
        flood()
        assert seen == []
        clock.move(TELL_EVERY)
        await until(lambda: seen and clock.sleeping)
        assert seen == ["tools"]
        clock.move(TELL_EVERY)
        await until(lambda: not gate._comparing)
        assert seen == ["tools"] and gate._lists


async def test_list_that_cannot_be_read_is_a_bad_answer() -> None:
    class Odd:
        revision = HANDSHAKE[-1]
        upstream = Upstream(Origin(name="odd", command=["odd"]))

        async def ask(self, method: str, params: object) -> Raw:
            return Raw(b'{"tools": 7}')

    conversation: Any = Odd()
    with pytest.raises(BadAnswer, match="the list of tools cannot be read"):
        await read_list(conversation, "tools")


# --- sessions -------------------------------------------------------------------------------------


async def test_call_that_fails_before_it_is_passed_on_gives_its_conversation_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await opened(bench)
    look = message_of("tools/call", {"name": "bank__look"}, 2)
    await bench.post("/mcp", message_of("logging/setLevel", {"level": "debug"}, 3), session)
    assert "result" in (await bench.post("/mcp", look, session))[0]

    async def fails(*_: object) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(bench.gateway, "want_level", fails)
    assert "error" in (await bench.post("/mcp", look, session))[0]
    [conversation] = talks(bench, "bank")
    assert not conversation.is_busy


async def test_end_of_a_session_ends_a_server_beside_one_that_still_runs_a_call(
    owned: Bench,
) -> None:
    session = await opened(owned)
    look = message_of("tools/call", {"name": "shop__look"}, 2)
    wait = message_of("tools/call", {"name": "bank__pay", "arguments": {"then": "wait"}}, 3)
    assert "result" in (await owned.post("/mcp", look, session))[0]
    await owned.post("/mcp", message_of("tools/list", {}, 4), session)
    paying = asyncio.create_task(owned.post("/mcp", wait, session))
    await until(lambda: owned.file("bank").exists() and "pay" in owned.file("bank").read_text())
    assert owned_lists(owned)
    await end(owned, session)
    # The gateway has one of each for itself.
    await until(lambda: len(owned.gateway.upstreams["shop"].children) == 1)
    assert len(owned.gateway.upstreams["bank"].children) == 2
    assert not owned_lists(owned)
    owned.file("bank").with_suffix(".go").touch()
    await until(lambda: len(owned.gateway.upstreams["bank"].children) == 1)
    await asyncio.wait([paying])


async def test_session_that_is_being_opened_is_not_ended_for_another(
    owned: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many clients may come at once, after a restart of the gateway for example."""
    monkeypatch.setattr(gateway, "MOST_SESSIONS", 1)
    opens = owned.gateway._opened
    go = asyncio.Event()
    began: list[str] = []

    async def slowly(*place: Any) -> UpstreamSession:
        began.append(place[0].name)
        await go.wait()
        return await opens(*place)

    sessions = [await opened(owned) for _ in range(3)]
    monkeypatch.setattr(owned.gateway, "_opened", slowly)
    look = message_of("tools/call", {"name": "bank__look"}, 2)
    calls = [asyncio.create_task(owned.post("/mcp", look, session)) for session in sessions]
    await until(lambda: began)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len({*began}) == len(began), "the others wait for it"
    go.set()
    for answer, _ in await asyncio.gather(*calls):
        assert "result" in answer


async def test_session_that_ends_while_it_is_opened_answers_its_call(
    owned: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> UpstreamSession:
        raise asyncio.CancelledError  # as if it had been ended

    monkeypatch.setattr(owned.gateway, "_opened", never)
    upstream = owned.gateway.upstreams["bank"]
    with pytest.raises(Exception, match="its session was ended") as refused:
        await owned.gateway.borrow(upstream, "another", Session(HANDSHAKE[-1]))
    assert getattr(refused.value, "ran", None) == "no"


async def test_session_that_makes_room_for_another_keeps_its_subscriptions(
    owned: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "MOST_SESSIONS", 1)
    first, second = [await opened(owned) for _ in range(2)]
    look = message_of("tools/call", {"name": "bank__look"}, 2)
    await owned.post("/mcp", look, first)
    [conversation] = talks(owned, "bank")
    conversation.wishes.subscriptions["note:1"] = Raw(b'{"uri":"note:1"}')
    await owned.post("/mcp", look, second)
    await owned.post("/mcp", look, first)
    [conversation] = [
        each for each in talks(owned, "bank") if "note:1" in each.wishes.subscriptions
    ]
    await until(lambda: len(owned.gateway.upstreams["bank"].children) == 1)


async def test_session_may_end_while_its_next_server_gets_its_subscriptions(
    owned: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    wishes = Wishes()
    wishes.subscriptions["a"] = Raw(b"{}")
    gate = owned.gateway
    upstream = gate.upstreams["bank"]
    session = Session(HANDSHAKE[-1])
    key = ("bank", gate._unit(upstream, "ann", session))
    gate._wishes[key] = wishes

    async def repeat(_conversation: UpstreamSession, _wishes: object) -> None:
        gate._wishes.clear()

    monkeypatch.setattr(UpstreamSession, "repeat", repeat)
    async with gate.conversation(upstream, "ann", session) as conversation:
        assert conversation.is_busy


async def test_subscriptions_of_a_session_with_its_own_server_are_counted(owned: Bench) -> None:
    session = await opened(owned, "/mcp/bank")
    held = owned.gateway._fronts["/mcp/bank"].subscribed._held

    async def ask(method: str) -> None:
        answer, _ = await owned.post("/mcp/bank", message_of(method, {"uri": "note:1"}, 2), session)
        assert answer["result"] == {}

    await ask("resources/subscribe")
    assert sum(held.values()) > 0
    await ask("resources/unsubscribe")
    assert not held
    await ask("resources/subscribe")
    await end(owned, session, "/mcp/bank")
    assert not held


async def test_subscription_that_is_refused_is_refused_to_each_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversation = UpstreamSession(Upstream(Origin(name="bank", command=["bank"])))
    asked: list[str] = []
    go = asyncio.Event()

    async def nothing() -> None:
        return

    async def ask(method: str, _params: object) -> None:
        asked.append(method)
        await go.wait()
        raise RpcError(-32602, "no such resource")

    monkeypatch.setattr(conversation, "ready", nothing)
    monkeypatch.setattr(conversation, "ask", ask)
    watching = [asyncio.create_task(conversation.watch("a")) for _ in range(2)]
    await until(lambda: len(asked) == 2)
    go.set()
    found = await asyncio.gather(*watching, return_exceptions=True)
    assert all(isinstance(each, RpcError) for each in found)
    assert not conversation.wishes.watched and not conversation.wishes.subscriptions


async def test_subscription_may_end_while_the_next_server_gets_them() -> None:
    conversation = UpstreamSession(Upstream(Origin(name="bank", command=["bank"])))
    wishes = conversation.wishes
    for uri in ("a", "b"):
        wishes.watched[uri] = 1
        wishes.subscriptions[uri] = Raw(b"{}")
    asked: list[object] = []

    async def ask(method: str, params: object) -> None:
        asked.append(method)
        wishes.forget("b")

    conversation._repeat = ask  # type: ignore[method-assign]
    await conversation.repeat(wishes)
    assert asked == ["resources/subscribe"] * 2 and not wishes.subscriptions.get("b")


async def test_lists_and_levels_of_sessions_that_are_not_ended_are_limited(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "MOST_LISTS", 3)
    monkeypatch.setattr(gateway, "MOST_LEVELS", 3)
    gate = bench.gateway
    gate._lists = {("bank", f"session {number}", "tools"): Listing([]) for number in range(3)}
    gate._levels = {("bank", f"session {number}"): "error" for number in range(3)}
    session = Session(HANDSHAKE[-1])
    await gate.entries(gate.upstreams["bank"], "tools", "", session)
    await gate.want_level(gate.upstreams["bank"], "", session, "debug")
    assert next(iter(gate._lists)) == ("bank", "session 1", "tools") and len(gate._lists) == 3
    assert next(iter(gate._levels)) == ("bank", "session 1") and len(gate._levels) == 3


# --- questions ------------------------------------------------------------------------------------


async def restarted(client: Client, ask: Callable[[int], Any]) -> tuple[Any, Any]:
    """Let a server ask and die, and the next one ask; return both questions, and the call."""
    first = asyncio.create_task(ask(100))
    question = await client.hears("roots/list")
    os.kill(await client.pid(), signal.SIGKILL)
    await asyncio.wait([first])
    return question, asyncio.create_task(ask(101))


async def test_answer_to_a_server_that_has_ended_is_not_given_to_the_next(tmp_path: Path) -> None:
    """Both ask under the same id: a person has answered another question."""
    async with wrapped(tmp_path / "bank") as client:
        question, second = await restarted(client, lambda id: client.ask("x/ask", {}, id=id))
        now = await client.hears("roots/list")
        for id, word in ((question["id"], "old"), (now["id"], "new")):
            answer = {"jsonrpc": "2.0", "id": id, "result": {"roots": [word]}}
            assert await client.line(json.dumps(answer).encode()) is None
        assert (await second)["result"]["their"] == {"roots": ["new"]}


async def test_gateway_drops_an_answer_for_a_server_that_has_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(HANDSHAKE[-1])
    gate = bench.gateway
    sent: list[bytes] = []

    async with gate.conversation(gate.upstreams["bank"], "", session) as conversation:
        front = gate._fronts["/mcp/bank"]

        async def send(message: bytes) -> None:
            sent.append(message)

        async def answers(*_: object) -> Raw:
            return Raw(b"{}")

        async def answers_late(*_: object) -> Raw:
            conversation.renewals += 1
            return Raw(b"{}")

        monkeypatch.setattr(conversation, "send", send)
        question = Arrived("2.0", 1, method="roots/list")
        outlet = fronts.Standing(front.hub, session)
        monkeypatch.setattr(fronts, "ask_client", answers)
        await front._ask(conversation, session, outlet, question)
        assert len(sent) == 1
        monkeypatch.setattr(fronts, "ask_client", answers_late)
        await front._ask(conversation, session, outlet, question)
        assert len(sent) == 1


# --- processes ------------------------------------------------------------------------------------


async def test_process_whose_start_is_cancelled_is_not_among_those_that_run() -> None:
    class Slow:
        write = None

        async def open(self, *_: object) -> None:
            await asyncio.Event().wait()

    running: list[Any] = []
    slow: Any = Slow()
    paced = PacedChild(slow, Starts(), running)
    opening = asyncio.create_task(paced.open(lambda _line: None, lambda _error: None))
    await until(lambda: running == [slow])
    opening.cancel()
    await asyncio.wait([opening])
    assert running == []


async def test_starts_for_many_sessions_at_once_do_not_count_as_crashes() -> None:
    """A server may take seconds until it is greeted. Children that have ended count."""

    class Quick:
        write = None

        async def open(self, *_: object) -> None:
            return

        async def aclose(self) -> None:
            return

    clock = Held()
    starts = Starts(clock)
    running: list[Any] = []
    paced: list[PacedChild] = []
    for _ in range(2 * STARTS):
        clock.move(starts.pause())
        quick: Any = Quick()
        paced.append(PacedChild(quick, starts, running))
        await paced[-1].open(lambda _line: None, lambda _error: None)
    assert clock.now < 1002.0
    starts.fresh += starts.fresh * 2  # a crowd
    starts._times.extend([clock.now] * len(starts.fresh))
    assert starts.pause() > LINK_TIME
    del starts.fresh[2 * STARTS :]
    starts.welcome()
    for each in paced[1:]:
        await each.aclose()
    assert starts.pause() > LINK_TIME


# --- names ----------------------------------------------------------------------------------------


async def test_names_that_clients_make_up_are_not_kept_forever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "MOST_METHODS", 3)
    session = await opened(bench, "/mcp/bank")
    for number in range(8):
        call = message_of("tools/call", {"name": f"none-{number}", "arguments": {"then": "x"}}, 2)
        await bench.post("/mcp/bank", call, session)
    assert 0 < len(bench.gateway.upstreams["bank"].methods) <= 3
