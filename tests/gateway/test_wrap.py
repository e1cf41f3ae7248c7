"""`wirecall wrap`: exact, survives the end of its server, and no command takes effect twice."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import until
from tests.gateway.fronts import (
    Client,
    Process,
    counter,
    effects,
    introduction,
    message_of,
    origin,
    started,
    wrap_words,
    wrapped,
)
from tests.size import IS_FULL
from wirecall.errors import NotSent
from wirecall.gateway.forward import LEASE
from wirecall.gateway.pipe import Wrap
from wirecall.gateway.upstream import Breaker, Places, Starts
from wirecall.ledger.base import LedgerDown, State, open_ledger
from wirecall.mcp.client.links import GAVE_UP
from wirecall.mcp.revisions import NAMES

CALL = {"name": "pay", "arguments": {"to": "ann"}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "effects"


@pytest.fixture
async def client(file: Path) -> AsyncIterator[Client]:
    async with wrapped(file) as client:
        yield client


# --- exact ----------------------------------------------------------------------------------------


TALK = [
    message_of("initialize", introduction(), 1),
    message_of("notifications/initialized"),
    message_of("tools/list", None, 2),
    message_of("tools/list", {"cursor": "x", "x-unknown": 0.5}, "three"),
    message_of("ping", None, 4),
    message_of("x/echo", b'{"n": 1.50}', 5),
    message_of("tools/call", b'{"name": "look", "arguments": {"n": 1.0, "x": 1e2}}', 6),
    message_of("tools/call", {"name": "pay", "arguments": {"then": "refuse"}}, 7),
    message_of("tools/call", {"name": "pay", "arguments": {"then": "error"}}, 8),
    message_of("tools/call", {"name": "pay", "arguments": {"then": "is_error"}}, 9),
    message_of("tools/call", b'{"name": "pay", "arguments": {"n": 0.10}, "x": 1.0}', "ten"),
    message_of("logging/setLevel", {"level": "debug"}, 11),
    message_of("prompts/list", None, 12),
    message_of("resources/templates/list", None, 13),
]


async def talk(process: Process) -> list[bytes]:
    """The bytes of each answer after its id."""
    told = []
    for line in TALK:
        await process.send(line)
        if b'"id"' in line:
            answer = await process.line()
            names = (b'"result":', b'"error":')
            place = min(at for at in map(answer.find, names) if at >= 0)
            told.append(answer[place:])
    return told


async def test_wrap_passes_results_on_byte_for_byte(tmp_path: Path) -> None:
    """G1: name, version, capabilities, definitions and results are the server's, also unknown ones."""
    async with started(*counter(tmp_path / "direct")) as direct:
        expected = await talk(direct)
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    words = wrap_words("--name", "bank", "--", *counter(tmp_path / "wrapped"))
    async with started(*words, env=state) as process:
        got = await talk(process)
    pid = b'"pid": '
    for ours, theirs in zip(got, expected, strict=True):
        if ours.startswith(b'"error":'):  # its members keep their values
            assert json.loads(b"{" + ours) == json.loads(b"{" + theirs)
        else:
            head = ours.partition(pid)[0].replace(b'"result":', b'"result": ')
            assert head == theirs.partition(pid)[0]
    # G3: the ledger is in the user's state folder, and only the user can read it.
    ledger = tmp_path / "state" / "wirecall" / "wrap" / "bank.db"
    assert ledger.stat().st_mode & 0o077 == ledger.parent.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("revision", NAMES[:4])
async def test_wrap_speaks_the_revision_of_its_client(file: Path, revision: str) -> None:
    """G1, X20: the server gets the client's revision, name and capabilities."""
    async with wrapped(file, revision=None) as client:
        answer = await client.greet(revision)
        assert answer["result"]["protocolVersion"] == revision
        seen = file.read_text().splitlines()[0].removeprefix("initialize ")
        assert json.loads(seen) == introduction(revision)


async def test_wrap_passes_unknown_notifications_on_in_both_directions(
    client: Client, file: Path
) -> None:
    """G1."""
    await client.tell("x/tell", {"n": 1})
    told = await client.hears("x/told")
    assert told["params"] == {"n": 0.10}
    assert 'x/tell {"n": 1}' in file.read_text()


async def test_wrap_passes_a_question_of_the_server_on(client: Client) -> None:
    """G1, old / old: a request of the server reaches the client, and the answer goes back."""
    asking = asyncio.create_task(client.ask("x/ask"))
    question = await client.hears("roots/list")
    assert question["params"] == {"x": 0.10}
    await client.line(
        json.dumps({"jsonrpc": "2.0", "id": question["id"], "result": {"roots": [1]}}).encode()
    )
    assert (await asking)["result"] == {"their": {"roots": [1]}, "id": "q-1"}


async def test_wrap_keeps_the_ids_of_clients_at_the_front(client: Client, file: Path) -> None:
    """G1, X1: ids of all shapes, many at once: every answer has its own id."""
    ids: list[Any] = [0, -5, 2**53, "", "1", "é", "a b", *range(1, 50)]
    first = [
        asyncio.create_task(client.pay(id=id, to=str(number), then="wait"))
        for number, id in enumerate(ids)
    ]
    await until(lambda: effects(file) == 32)  # the calls in flight
    file.with_suffix(".go").touch()
    answers = await asyncio.gather(*first)
    assert [answer["id"] for answer in answers] == ids
    assert effects(file) == len(ids)


async def test_wrap_reports_progress_under_the_token_of_the_client(client: Client) -> None:
    """G1, X2: the server knows our token alone, and the client its own."""
    params = {**CALL, "_meta": {"progressToken": "mine"}}
    answer = await client.ask("tools/call", params)
    assert "result" in answer
    report = await client.hears("notifications/progress")
    assert report["params"] == {"progressToken": "mine", "progress": 0, "x": 1}


async def test_wrap_drops_reports_that_nothing_asked_for(client: Client) -> None:
    """G1, X2: forged, late and foreign tokens are dropped; of a flood the last report arrives."""
    params = {"name": "pay", "arguments": {"reports": 10_000}, "_meta": {"progressToken": 1.5}}
    answer = await client.ask("tools/call", params)
    assert "result" in answer
    reports = [each["params"] for each in client.heard]
    assert reports and reports[-1]["progress"] == 9_999
    assert {each["progressToken"] for each in reports} == {1.5}
    session = client.front._relay.session
    before = len(client.heard)
    for token in (b"1", b"99", b'"mine"', b"null", b"true"):
        text = b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":%b}}'
        session.link._line(text % token)  # type: ignore[attr-defined]
    assert (await client.ask("ping"))["result"] == {}
    assert len(client.heard) == before


# --- it survives ----------------------------------------------------------------------------------


async def test_wrap_starts_a_server_that_was_killed_and_greets_it_as_before(
    client: Client, file: Path
) -> None:
    """G2: the next call starts it; the client keeps its tools, its log level and subscriptions."""
    await client.ask("logging/setLevel", {"level": "debug"})
    await client.ask("resources/subscribe", {"uri": "file:///a"})
    first = await client.pid()
    os.kill(first, signal.SIGKILL)
    await until(lambda: not client.front._relay.session.link.is_open)  # type: ignore[attr-defined]
    second = await client.pid()
    assert second != first
    greetings = [each for each in file.read_text().splitlines() if each.startswith("initialize")]
    assert len(greetings) == 2 and greetings[0] == greetings[1]
    assert effects(file, "notifications/initialized") == 2
    assert (await client.pay(to="ann"))["result"]["content"][0]["text"].startswith("paid")


async def test_wrap_answers_a_list_right_after_its_server_was_killed(client: Client) -> None:
    """G2: before its end was noticed, or after it."""
    for _ in range(3):
        os.kill(await client.pid(), signal.SIGKILL)
        assert "result" in await client.ask("tools/list", {})


async def test_wrap_starts_a_server_again_that_ended_before_a_command_was_sent(
    client: Client, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G2, G6: nothing was sent, so the command has one effect."""
    link: Any = client.front._relay.session.link
    inner = link.exchange

    async def ended(_exchange: object) -> None:
        monkeypatch.setattr(link, "exchange", inner)
        raise NotSent("the server process was ended by signal 9")

    await client.ask("tools/list", {})
    monkeypatch.setattr(link, "exchange", ended)
    assert "result" in await client.pay(to="ann")
    assert effects(file) == 1


async def test_wrap_sends_a_query_again_if_its_server_dies(client: Client) -> None:
    """G6, section 7: a lost query is sent again; nothing happened twice."""
    params = {"name": "look", "arguments": {"then": "die_once"}}
    assert "result" in await client.ask("tools/call", params)


async def test_wrap_gives_a_query_up_whose_server_always_dies(client: Client) -> None:
    answer = await client.ask("tools/call", {"name": "look", "arguments": {"then": "die"}})
    assert answer["error"]["code"] == 50210
    message = answer["error"]["message"]
    assert message.count("bank: ") == 1 and "ended with 3" in message


class Stopped:
    """A clock that moves when it is waited for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(round(seconds, 3))
        self.now += seconds


async def test_starts_pause_longer_each_time_and_stop_after_five_a_minute() -> None:
    """G2: 0.1 s, doubled; five starts a minute."""
    clock = Stopped()
    starts = Starts(clock)
    for _ in range(5):
        await starts.turn()
    assert clock.slept == [0.1, 0.2, 0.4, 0.8]
    with pytest.raises(Exception, match="started 5 times within a minute"):
        await starts.turn()
    clock.now += 60.0
    await starts.turn()
    assert starts.count == 6


async def test_starts_pause_thirty_seconds_at_most() -> None:
    """G2: doubled to 30 s."""
    clock = Stopped()
    starts = Starts(clock)
    for _ in range(20):
        clock.now += max(0.0, starts.pause())
        await starts.turn()
        clock.now += 20.0
    assert starts.pause() <= 30.0


async def test_breaker_opens_after_five_failures_and_lets_one_pass_after_a_rest() -> None:
    """G6, section 7: five failed links in a row, half-open after 10 s."""
    clock = Stopped()
    breaker = Breaker(clock)
    for _ in range(5):
        assert not breaker.is_open
        breaker.failed("refused")
    assert breaker.is_open
    clock.now += 10.0
    assert not breaker.is_open
    breaker.failed("refused")
    assert breaker.is_open
    clock.now += 10.0
    breaker.succeeded()
    assert not breaker.is_open


async def test_places_refuse_a_call_beyond_those_that_wait() -> None:
    """Section 8: 32 in flight and 128 in the queue."""
    places = Places(1)
    async with places.one():
        waiting = [asyncio.create_task(places.one().__aenter__()) for _ in range(128)]
        await asyncio.sleep(0)
        with pytest.raises(Exception, match="128 wait"):
            async with places.one():
                pass
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


# --- bad servers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/no/such/program"], "cannot be started"),
        (
            [sys.executable, "-c", "import sys; sys.exit('no licence')"],
            "its last words: no licence",
        ),
        ([sys.executable, "-c", "print('hello'); print('{}')"], "ended with 0"),
    ],
)
async def test_wrap_of_a_server_that_cannot_run_says_why(
    file: Path, command: list[str], words: str
) -> None:
    """G9, bad input: 50210 with the upstream, the reason and its last words."""
    async with wrapped(file, revision=None, command=command) as client:
        answer = await client.ask("initialize", introduction())
        error = answer["error"]
        assert (error["code"], error["data"]["upstream"]) == (50210, "bank")
        assert (error["data"]["ran"], words in error["message"]) == ("no", True)


async def test_wrap_asks_a_server_that_is_mute_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G9, bad input: the client gets its error after one greeting, not after two."""
    monkeypatch.setattr("wirecall.gateway.session.START_TIME", 0.2)
    log = file.with_suffix(".log")
    command = ["/bin/sh", "-c", f"cat >{log}"]
    async with wrapped(file, revision=None, command=command) as client:
        error = (await client.ask("initialize", introduction()))["error"]
        assert (error["code"], error["data"]["ran"]) == (50210, "no")
        assert "it did not answer initialize within 0.2 s" in error["message"]
        assert "server/discover" not in (log.read_text() if log.exists() else "")


@pytest.mark.parametrize(
    ("then", "words"),
    [
        ("wrong_id", "answered id 99999, which was not asked"),
        ("die", "ended with 3"),
        ("big", "more than 16777216 bytes"),
    ],
)
async def test_wrap_calls_a_command_unknown_whose_answer_is_wrong(
    client: Client, file: Path, then: str, words: str
) -> None:
    """G9, bad input, X10: unknown, once, with the reason; the next call is served."""
    answer = await client.pay(then=then, size=17 << 20)
    error = answer["error"]
    assert (error["code"], error["data"]["ran"]) == (50910, "unknown")
    assert words in error["message"] and error["data"]["upstream"] == "bank"
    assert effects(file) == 1
    assert "result" in await client.pay(to="other")


async def test_wrap_calls_a_command_unknown_until_that_answer_is_delivered(
    client: Client, file: Path
) -> None:
    """Trap 10: the next equal call is a new one. Nothing is doubled without an "unknown" between."""
    codes = []
    counts = []
    for lose in (True, True, False, False):
        answer = await client.pay(then="die", lose=lose)
        codes.append(answer["error"]["code"])
        counts.append(effects(file))
        await until(lambda: not client.front._relay.session.link_is_there)
    assert codes == [50910] * 4
    assert counts == [1, 1, 1, 2]


async def test_wrap_of_a_server_that_answers_twice_keeps_its_link(
    client: Client, file: Path
) -> None:
    """G9, bad input: the first answer counts, or, if the second comes with it, neither."""
    answer = await client.pay(then="twice")
    if "error" in answer:
        assert (answer["error"]["code"], answer["error"]["data"]["ran"]) == (50910, "unknown")
    else:
        assert answer["result"]["content"][0]["text"].startswith("paid")
    assert (await client.ask("ping"))["result"] == {}
    assert effects(file) == 1


async def test_wrap_calls_a_command_unknown_that_is_never_answered(file: Path) -> None:
    """G6, section 7: `timeout` is over."""
    async with wrapped(file, timeout=0.05) as client:
        answer = await client.pay(then="mute")
        assert answer["error"]["code"] == 50910
        assert "no answer within 0.05 s" in answer["error"]["message"]


@pytest.mark.parametrize(
    "params",
    [
        b'{"name": "pay", "arguments": {"to": 1, "to": 2}}',
        b'{"name": "pay", "arguments": {"a": [{"to": 1, "t\\u006f": 2}]}}',
        b'{"name": "look", "name": "pay", "arguments": {}}',
        b'{"name": "pay", "arguments": {}, "_meta": {"a": 1, "a": 2}}',
    ],
)
async def test_wrap_refuses_a_member_that_occurs_twice(
    client: Client, file: Path, params: bytes
) -> None:
    """G9, X9: -32602, and nothing is sent."""
    answer = await client.ask("tools/call", params)
    assert (answer["error"]["code"], answer["error"]["data"]["ran"]) == (-32602, "no")
    assert "twice" in answer["error"]["message"]
    assert effects(file) == 0


# --- one effect -----------------------------------------------------------------------------------


async def test_wrap_gives_a_lost_answer_again_and_runs_once(client: Client, file: Path) -> None:
    """G5, loss: the same call after a lost answer is replayed, and the one after that runs."""
    first = await client.pay(to="ann", lose=True)
    second = await client.pay(to="ann")
    assert effects(file) == 1
    marks = second["result"].pop("_meta")
    assert marks == {"io.wirecall/replayed": True, "io.wirecall/recognised": True}
    assert second["result"] == first["result"]
    third = await client.pay(to="ann")
    assert effects(file) == 2 and "_meta" not in third["result"]


@pytest.mark.parametrize("place", ["_meta", "idempotencyKey", "argument"])
async def test_wrap_runs_a_key_once(client: Client, file: Path, place: str) -> None:
    """G5, explicit: `_meta`, `params.idempotencyKey`, or the tool's own argument, which is passed on."""
    params: dict[str, Any] = {"name": "pay", "arguments": {"to": "ann"}}
    if place == "_meta":
        params["_meta"] = {"io.wirecall/idempotency-key": "k"}
    elif place == "idempotencyKey":
        params["idempotencyKey"] = "k"
    else:
        params["arguments"]["idempotency_key"] = "k"
    first = await client.ask("tools/call", params)
    second = await client.ask("tools/call", params)
    assert effects(file) == 1
    assert second["result"]["_meta"] == {"io.wirecall/replayed": True}
    assert second["result"]["content"] == first["result"]["content"]


async def test_wrap_replays_without_its_server(client: Client, file: Path) -> None:
    """G5: a replay needs no upstream."""
    await client.pay(to="ann", lose=True)
    os.kill(await client.pid(), signal.SIGKILL)
    link: Any = client.front._relay.session.link
    await until(lambda: not link.is_open)
    again = await client.pay(to="ann")
    assert again["result"]["_meta"]["io.wirecall/replayed"] is True
    assert not link.is_open and effects(file) == 1


async def test_wrap_recognises_a_call_that_is_sent_again_in_silence(file: Path) -> None:
    """G5, silence, X16: an equal call on one pipe, while the first runs, is that call."""
    async with wrapped(file, resend_after=1e-6) as client:
        first = asyncio.create_task(client.pay(to="ann", then="wait"))
        await until(lambda: effects(file) == 1)
        second = asyncio.create_task(client.pay(to="ann", then="wait"))
        await asyncio.wait([second], timeout=0.3)
        file.with_suffix(".go").touch()
        assert (await second)["result"]["content"] == (await first)["result"]["content"]
        assert effects(file) == 1


async def test_wrap_runs_equal_calls_of_two_clients_twice(tmp_path: Path, file: Path) -> None:
    """G5, X12: pipes of two parents are two callers; neither waits for the other."""
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    wraps = [Wrap(origin(file), ledger=ledger) for _ in range(2)]
    clients = [Client(wrap, f"pipe of {number}") for number, wrap in enumerate(wraps)]
    try:
        for each in clients:
            await each.greet()
        calls = [asyncio.create_task(each.pay(to="ann", then="wait")) for each in clients]
        await until(lambda: effects(file) == 2)
        file.with_suffix(".go").touch()
        assert all("result" in answer for answer in await asyncio.gather(*calls))
    finally:
        for wrap in wraps:
            await wrap.aclose(1.0)


async def test_wrap_releases_a_command_that_its_server_refused(client: Client, file: Path) -> None:
    """G6, section 7: -32602 is passed on, released, ran = no."""
    key = {"io.wirecall/idempotency-key": "k"}
    params = {"name": "pay", "arguments": {"then": "refuse"}, "_meta": key}
    for _ in range(2):
        answer = await client.ask("tools/call", params)
        assert answer["error"] == {
            "code": -32602,
            "message": "their refusal",
            "data": {"their": 0.5},
        }
    assert effects(file) == 0


@pytest.mark.parametrize("then", ["error", "is_error"])
async def test_wrap_records_an_error_that_is_the_answer(
    client: Client, file: Path, then: str
) -> None:
    """G6, section 7: another error and `isError` are recorded: they are the answer."""
    first = await client.pay(then=then, lose=True)
    again = await client.pay(then=then)
    assert effects(file) == 1
    if then == "error":
        assert first["error"]["data"] == {"their": 0.5}
        assert again["error"]["data"] == {"their": 0.5, "replayed": True}
    else:
        assert again["result"]["isError"] is True
        assert again["result"]["_meta"]["io.wirecall/replayed"] is True


@pytest.mark.parametrize(
    ("size", "code"), [(1 << 10, None), (3 << 20, None), (5 << 20, 41010), (15 << 20, 41010)]
)
async def test_wrap_keeps_answers_up_to_four_megabytes(
    client: Client, file: Path, size: int, code: int | None
) -> None:
    """G5, X8: a larger answer is passed on, and a re-send gets 41010 with its digest."""
    first = await client.pay(then="big", size=size, lose=True)
    assert len(first["result"]["content"][0]["text"]) == size
    again = await client.pay(then="big", size=size)
    assert again.get("error", {}).get("code") == code
    assert effects(file) == 1


async def test_wrap_refuses_commands_without_a_ledger_and_serves_queries(
    client: Client, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """G9, bad input: ledger down: queries are answered, commands get 50310, ran = no."""

    async def down(*_: object) -> Any:
        raise LedgerDown("away")

    ledger = await client.front._relay._dispatcher().commands._ledger()  # type: ignore[attr-defined]
    monkeypatch.setattr(ledger, "claim", down)
    answer = await client.pay(to="ann")
    assert (answer["error"]["code"], answer["error"]["data"]["ran"]) == (50310, "no")
    assert effects(file) == 0 and await client.pid()


async def test_wrap_with_trust_none_records_every_tool(file: Path) -> None:
    """G5: `trust = "none"` makes every tool a command; no list is read for it."""
    async with wrapped(file, trust="none") as client:
        params = {"name": "look", "_meta": {"io.wirecall/idempotency-key": "k"}}
        await client.ask("tools/call", params)
        again = await client.ask("tools/call", params)
        assert again["result"]["_meta"]["io.wirecall/replayed"] is True


# --- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "is_passed_on"),
    [
        (None, False),
        ("", False),
        ("Request timed out", False),
        ("McpError: deadline exceeded", False),
        ("timeout", False),
        (GAVE_UP, False),
        ("user cancelled", True),
    ],
)
async def test_wrap_passes_a_cancelled_command_on_only_if_a_person_meant_it(
    client: Client, file: Path, reason: str | None, is_passed_on: bool
) -> None:
    """G7, X3: the answer is awaited and recorded in any case."""
    paying = asyncio.create_task(client.pay(to="ann", then="wait", id="c"))
    await until(lambda: effects(file) == 1)
    params: dict[str, Any] = {"requestId": "c"}
    if reason is not None:
        params["reason"] = reason
    await client.tell("notifications/cancelled", params)
    assert await paying is None
    assert (await client.ask("ping"))["result"] == {}
    assert effects(file, "notifications/cancelled") == int(is_passed_on)
    file.with_suffix(".go").touch()
    again = await client.pay(to="ann", then="wait")
    assert again["result"]["_meta"]["io.wirecall/replayed"] is True
    assert effects(file) == 1


async def test_wrap_passes_a_cancelled_query_on_at_once(client: Client, file: Path) -> None:
    """G7, section 4: with our id, and with the client's own words."""
    params = {"name": "look", "arguments": {"then": "mute"}}
    await client.ask("tools/list")
    asking = asyncio.create_task(client.ask("tools/call", params, id="c"))
    await until(lambda: "c" in client.front._relay._flying)
    await asyncio.sleep(0)
    await client.tell("notifications/cancelled", {"requestId": "c", "reason": "timeout", "x": 1})
    assert await asking is None
    await until(lambda: effects(file, "notifications/cancelled") == 1)
    told = file.read_text().splitlines()[-1].removeprefix("notifications/cancelled ")
    sent = json.loads(told)
    assert sent.pop("requestId") != "c" and sent == {"reason": "timeout", "x": 1}


# --- arrays ---------------------------------------------------------------------------------------


async def test_wrap_takes_arrays_and_each_entry_takes_all_steps(file: Path) -> None:
    """G8, X14: commands in array order, answers in input order, keys and refusals per entry."""
    async with wrapped(file, revision="2025-03-26") as client:
        key = {"io.wirecall/idempotency-key": "k"}
        entries = [
            message_of("tools/call", {"name": "pay", "arguments": {"to": "a"}, "_meta": key}, 1),
            message_of("tools/call", {"name": "look"}, 2),
            message_of("tools/call", {"name": "pay", "arguments": {"to": "a"}, "_meta": key}, 3),
            message_of("tools/call", b'{"name": "pay", "arguments": {"a": 1, "a": 1}}', 4),
            message_of("tools/call", {"name": "pay", "arguments": {"to": "b"}}, 5),
            message_of("notifications/x"),
        ]
        reply = await client.line(b"[" + b",".join(entries) + b"]")
        assert reply is not None
        answers = json.loads(reply)
        assert [answer["id"] for answer in answers] == [1, 2, 3, 4, 5]
        assert answers[2]["result"]["_meta"] == {"io.wirecall/replayed": True}
        assert answers[3]["error"]["code"] == -32602
        paid = [each for each in file.read_text().splitlines() if each.startswith("pay")]
        assert paid == ["pay a", "pay b"]


async def test_wrap_refuses_arrays_at_revisions_that_do_not_have_them(client: Client) -> None:
    """G8: 2025-11-25 has none."""
    reply = await client.line(b"[" + message_of("ping", None, 1) + b"]")
    assert reply is not None and json.loads(reply)["error"]["code"] == -32600


# --- the end --------------------------------------------------------------------------------------


async def test_wrap_finishes_a_command_when_its_client_leaves(tmp_path: Path, file: Path) -> None:
    """G5, X7: stdin ends while a command runs: it is awaited and recorded, then the child ends."""
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    words = wrap_words("--ledger", ledger, "--name", "bank", "--", *counter(file))
    async with started(*words) as process:
        await process.greet()
        await process.send(
            message_of("tools/call", {"name": "pay", "arguments": {"then": "wait"}}, 9)
        )
        await until(lambda: effects(file) == 1)
        process.close()
        file.with_suffix(".go").touch()
        assert json.loads(await process.line())["id"] == 9
        assert await process.ended() == 0


@pytest.mark.parametrize("waits", ["for nothing", "for its effect", "for its answer"])
async def test_wrap_has_a_record_of_each_effect_when_its_client_leaves(
    tmp_path: Path, file: Path, waits: str
) -> None:
    """X7: stdin ends at any step: a command that took effect has a record, and no other has one."""
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    words = wrap_words("--ledger", ledger, "--name", "bank", "--", *counter(file))
    async with started(*words) as process:
        await process.greet()
        call = message_of("tools/call", {"name": "pay", "arguments": {"to": "ann"}}, 9)
        await process.send(call)
        if waits == "for its effect":
            await until(lambda: effects(file) == 1)
        if waits == "for its answer":
            assert json.loads(await process.line())["id"] == 9
        process.close()
        assert await process.ended() == 0
    records = await open_ledger(ledger)
    try:
        found = await records.list(limit=10)
    finally:
        await records.aclose()
    assert [each.state for each in found] == [State.DONE] * effects(file)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_wrap_ends_at_a_signal(tmp_path: Path, file: Path, number: signal.Signals) -> None:
    """G9: while it waits for its client, the loop that it uses runs the handler of the signal."""
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    async with started(*wrap_words("--ledger", ledger, "--", *counter(file))) as process:
        await process.greet()
        process.process.send_signal(number)
        assert await process.ended() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_wrap_that_is_killed_leaves_no_process(tmp_path: Path, file: Path) -> None:
    """G9, X6: the child ends, although nothing closes its group."""
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    async with started(*wrap_words("--ledger", ledger, "--", *counter(file))) as process:
        await process.greet()
        looked = await process.ask("tools/call", {"name": "look"})
        pid = looked["result"]["pid"]
        process.process.kill()
        await process.ended()
    await until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.skipif(not IS_FULL, reason="waits for the end of a lease, 10 s")
async def test_wrap_that_was_killed_in_a_command_calls_it_unknown(
    tmp_path: Path, file: Path
) -> None:
    """G5, bad input: after at most one lease a re-send gets "unknown", and nothing runs twice."""
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    words = wrap_words("--ledger", ledger, "--name", "bank", "--", *counter(file))
    params = {"name": "pay", "arguments": {"then": "wait"}}
    async with started(*words) as process:
        await process.greet()
        await process.send(message_of("tools/call", params, 9))
        await until(lambda: effects(file) == 1)
        process.process.kill()
        await process.ended()
    async with started(*words) as process:
        await process.greet()
        answer = await process.ask("tools/call", params)
        assert (answer["error"]["code"], answer["error"]["data"]["ran"]) == (50910, "unknown")
    assert effects(file) == 1


@pytest.mark.skipif(not IS_FULL, reason="stands still for longer than a lease, 10 s")
async def test_wrap_that_stood_still_does_not_give_its_command_up(
    tmp_path: Path, file: Path
) -> None:
    """Trap 11: a machine that sleeps while a command runs. The call that is sent again gets the
    answer of the first one.
    """
    ledger = f"sqlite:{tmp_path / 'ledger.db'}"
    words = wrap_words("--ledger", ledger, "--name", "bank", "--", *counter(file))
    params = {"name": "pay", "arguments": {"then": "wait"}}
    async with started(*words) as process:
        await process.greet()
        await process.send(message_of("tools/call", params, 9))
        await until(lambda: effects(file) == 1)
        process.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE + 1.0)
        await process.send(message_of("tools/call", params, 10))
        process.process.send_signal(signal.SIGCONT)
        assert "result" in await process.ask("tools/call", {"name": "look"})
        file.with_suffix(".go").touch()
        told = [json.loads(await process.line()) for _ in range(2)]
        again = {answer["id"]: answer for answer in told}[10]
        assert again["result"]["_meta"]["io.wirecall/replayed"] is True
        assert effects(file) == 1


def test_wrap_refuses_a_name_that_is_not_a_file(tmp_path: Path) -> None:
    """G3: the name of a server is also the name of its ledger."""
    import subprocess

    words = [*wrap_words("--name", "../x", "--", "true")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60.0)
    assert done.returncode == 2 and "cannot be a name" in done.stderr
