"""Traps of a gateway: clocks, sleep, kills at each step, processes, sessions and callers."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import kill_at_once, until
from tests.gateway.bench import BOTH, Bench
from tests.gateway.faulty import called, faulty
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
from tests.gateway.process import settings
from tests.ledger.sqlite.clocks import Clock, opened
from tests.ports import free_port
from wirecall.gateway.pipe import Wrap
from wirecall.gateway.upstream import IDLE
from wirecall.server.identity import Identity

HOUR = 3600.0
WAIT: dict[str, Any] = {"to": "ann", "then": "wait"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "effects"


# --- ids ------------------------------------------------------------------------------------------


async def test_ids_of_many_clients_may_be_equal(tmp_path: Path) -> None:
    """X1: 64 clients of one process use the same ids; each answer has its call's own content."""
    ids: list[Any] = [0, -5, 2**53, "", "1", 1, "é", "a b"]
    own = {"bank": {"in_flight": 600}}
    async with Bench(tmp_path, names=("bank",), own=own).serving() as bench:
        file = bench.file("bank")
        sessions = [await session_of(bench) for _ in range(64)]

        async def paid(client: int, id: Any) -> tuple[Any, str]:
            arguments = {"to": f"{client} {id!r}", "then": "wait", "echo": True}
            call = message_of("tools/call", {"name": "pay", "arguments": arguments}, id)
            answer, _ = await bench.post("/mcp/bank", call, sessions[client])
            return answer["id"], answer["result"]["to"]

        calls = [(client, id) for client in range(64) for id in ids[client % 8 :][:2]]
        paying = [asyncio.create_task(paid(*call)) for call in calls]
        await until(lambda: effects(file) == len(calls))
        file.with_suffix(".go").touch()
        answers = await asyncio.gather(*paying)
    assert answers == [(id, f"{client} {id!r}") for client, id in calls]


# --- clocks and sleep -----------------------------------------------------------------------------


@asynccontextmanager
async def clocked(file: Path) -> AsyncIterator[tuple[Client, Clock]]:
    """A client of `wrap`, whose ledger has a clock that a test sets."""
    clock = Clock()
    wrap = Wrap(origin(file), ledger=f"sqlite:{file}.db")
    wrap.app._ledger = await opened(Path(f"{file}.db"), clock)
    client = Client(wrap)
    try:
        await client.greet()
        yield client, clock
    finally:
        await client.front.aclose()
        await wrap.aclose(1.0)


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
@pytest.mark.parametrize("step", ["while it runs", "after its loss"])
async def test_clock_that_is_set_doubles_no_effect(file: Path, jump: float, step: str) -> None:
    """X11: a lost answer is given again, whatever the clock of the wall says."""
    async with clocked(file) as (client, clock):
        paying = asyncio.create_task(client.pay(lose=True, **WAIT))
        await until(lambda: effects(file) == 1)
        if step == "while it runs":
            clock.wall_time += jump
        file.with_suffix(".go").touch()
        await paying
        if step == "after its loss":
            clock.wall_time += jump
        again = await client.pay(**WAIT)
        assert again["result"]["_meta"]["io.wirecall/replayed"] is True
        assert effects(file) == 1


async def test_loss_window_counts_the_seconds_of_the_machine(file: Path) -> None:
    """X11: an answer that was lost long ago serves no call, although the clock was set back."""
    async with clocked(file) as (client, clock):
        await client.pay(to="ann", lose=True)
        await client.pay(to="bob")  # the loss is marked before this one is recorded
        clock.wall_time -= HOUR
        clock.since_boot += HOUR
        assert "result" in await client.pay(to="ann")
        assert effects(file, "pay ann") == 2


SHORT = """\
import asyncio, sys
from wirecall.gateway import Gateway, forward
from wirecall.gateway.settings import load_settings

forward.LEASE = 0.3
asyncio.run(Gateway(load_settings()).serve(port=int(sys.argv[1])))
"""


@asynccontextmanager
async def gateway_at(folder: Path) -> AsyncIterator[tuple[Process, str]]:
    """A gateway as a process, with leases of less than a second; the address of its upstream."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    async with started(sys.executable, "-c", SHORT, str(port), cwd=folder) as process:
        for _ in range(10_000):
            try:
                async with (
                    aiohttp.ClientSession() as http,
                    http.get(f"http://{address}/healthz"),
                ):
                    break
            except aiohttp.ClientError:
                await asyncio.sleep(0.01)
        try:
            yield process, f"http://{address}/mcp/bank"
        finally:
            with suppress(ProcessLookupError):  # a test may have killed it
                process.process.terminate()


async def paid_at(url: str, key: str | None = "k") -> Any:
    """Greet a gateway, and send the call; return the answer."""
    async with aiohttp.ClientSession(headers=BOTH) as http:
        async with http.post(url, data=message_of("initialize", introduction(), 1)) as answer:
            own = {"Mcp-Session-Id": answer.headers["Mcp-Session-Id"]}
        meta = {} if key is None else {"io.wirecall/idempotency-key": key}
        call = message_of("tools/call", {"name": "pay", "arguments": WAIT, "_meta": meta}, 2)
        async with http.post(url, data=call, headers=own) as answer:
            return json.loads(await answer.read())


async def test_gateway_that_sleeps_longer_than_a_lease_doubles_no_effect(tmp_path: Path) -> None:
    """X11: another one calls the outcome unknown; its own client gets the answer when it wakes."""
    file = tmp_path / "bank"
    upstreams = {"bank": {"command": counter(file)}}
    (tmp_path / "wirecall.toml").write_text(settings(upstreams, ledger="sqlite:gateway.db"))
    async with gateway_at(tmp_path) as (sleeper, url), gateway_at(tmp_path) as (_, other):
        first = asyncio.create_task(paid_at(url))
        await until(lambda: effects(file) == 1)
        sleeper.process.send_signal(signal.SIGSTOP)
        try:
            error = (await paid_at(other))["error"]
            assert (error["code"], error["data"]["ran"]) == (50910, "unknown")
            file.with_suffix(".go").touch()
        finally:
            sleeper.process.send_signal(signal.SIGCONT)
        assert (await first)["result"]["content"]
        again = (await paid_at(other))["result"]
        assert again["_meta"]["io.wirecall/replayed"] is True, "the truth came late"
    assert effects(file) == 1


async def test_gateway_that_is_killed_leaves_one_unknown_outcome(tmp_path: Path) -> None:
    """X12: its orphan serves one call at the other gateway of the ledger; the next one runs."""
    file = tmp_path / "bank"
    upstreams = {"bank": {"command": counter(file)}}
    (tmp_path / "wirecall.toml").write_text(settings(upstreams, ledger="sqlite:gateway.db"))
    async with gateway_at(tmp_path) as (killed, url), gateway_at(tmp_path) as (_, other):
        first = asyncio.create_task(paid_at(url, key=None))
        await until(lambda: effects(file) == 1)
        killed.process.kill()
        with pytest.raises(aiohttp.ClientError):
            await first
        error = (await paid_at(other, key=None))["error"]
        assert (error["code"], error["data"]["ran"]) == (50910, "unknown")
        assert effects(file) == 1
        file.with_suffix(".go").touch()
        assert "result" in await paid_at(other, key=None)
    assert effects(file) == 2


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("then", ["die_before", "die", "die_half", "die_after"])
async def test_server_that_dies_at_a_step_doubles_no_effect(
    file: Path, then: str, is_lost: bool
) -> None:
    """X10: its outcome is unknown, aloud. Once that is delivered, an equal call is a new one."""
    async with wrapped(file) as client:
        link: Any = client.front._relay.session.link
        first = await client.pay(to="ann", then=then, lose=is_lost)
        await until(lambda: not link.is_open)
        again = await client.pay(to="ann", then=then)
        await until(lambda: not link.is_open)
        for answer in (first, again):
            if then == "die_after":
                assert "result" in answer
            else:
                assert (answer["error"]["code"], answer["error"]["data"]["ran"]) == (
                    50910,
                    "unknown",
                )
        runs = 1 if is_lost else 2
        assert effects(file) == (0 if then == "die_before" else runs)
        assert "result" in await client.pay(to="bob"), "the client keeps its tools"


@pytest.mark.parametrize("step", ["greeting", "list", "call"])
async def test_server_that_is_killed_between_calls_runs_each_of_them_once(
    file: Path, step: str
) -> None:
    """X10: nothing was written to it, so nothing is unknown."""
    async with wrapped(file) as client:
        if step != "greeting":
            await client.ask("tools/list")
        if step == "call":
            await client.pay(to="bob")
        [child] = client.front._relay.upstream.children
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        link: Any = client.front._relay.session.link
        await until(lambda: not link.is_open)
        assert "result" in await client.pay(to="ann")
        paid = [line for line in file.read_text().splitlines() if line.startswith("pay ann")]
        assert paid == ["pay ann"]


@pytest.mark.parametrize("is_lost", [False, True])
async def test_server_that_is_killed_in_a_call_doubles_no_effect(file: Path, is_lost: bool) -> None:
    """X10: by a signal, while the command runs. The next equal call is a new one once that was delivered."""
    async with wrapped(file) as client:

        async def killed(lose: bool) -> Any:
            before = effects(file)
            running = asyncio.create_task(client.pay(**WAIT, lose=lose))
            await until(lambda: effects(file) > before)
            child = client.front._relay.upstream.children[-1]
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            return await running

        first = await killed(is_lost)
        if is_lost:
            again = await client.pay(**WAIT)
        else:
            again = await killed(lose=False)
        for answer in (first, again):
            assert (answer["error"]["code"], answer["error"]["data"]["ran"]) == (50910, "unknown")
        assert effects(file) == (1 if is_lost else 2)


async def test_command_right_after_the_end_of_its_server_runs_once(file: Path) -> None:
    """X10: the gateway has not seen the end yet, and nothing was sent: nothing is unknown."""
    async with wrapped(file) as client:
        for count in (1, 2):
            assert "result" in await client.pay(to=f"ann {count}")
            child = client.front._relay.upstream.children[-1]
            assert child.pid is not None
            kill_at_once(child.pid)
            assert "result" in await client.pay(to=f"bob {count}")
            assert effects(file) == 2 * count


LAUNCHER = """\
import os, signal, subprocess, sys

signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
children = [
    subprocess.Popen([sys.executable, "-c", deaf], stdin=subprocess.DEVNULL),
    subprocess.Popen(sys.argv[2:]),
]
with open(sys.argv[1], "w") as file:
    file.write(" ".join(str(pid) for pid in [os.getpid(), *(each.pid for each in children)]))
for each in children:
    each.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", ["leaves", "is killed"])
async def test_launcher_and_its_processes_end_with_their_client(file: Path, end: str) -> None:
    """X6: processes below a launcher that ignore the end of stdin and SIGTERM."""
    script = file.with_name("launcher.py")
    script.write_text(LAUNCHER)
    pids = file.with_name("pids")
    words = [sys.executable, str(script), str(pids), *counter(file)]
    async with started(*wrap_words("--ledger", f"sqlite:{file}.db", "--", *words)) as process:
        await process.greet()
        assert "result" in await process.ask("tools/call", {"name": "pay"})
        if end == "leaves":
            process.close()
        else:
            process.process.kill()
        await process.ended()
    found = [Path(f"/proc/{pid}") for pid in pids.read_text().split()]
    assert len(found) == 3
    await until(lambda: not any(each.exists() for each in found))


# --- sessions and callers -------------------------------------------------------------------------


async def session_of(bench: Bench, path: str = "/mcp/bank", id: int = 1) -> str:
    _, session = await bench.post(path, message_of("initialize", introduction(), id))
    assert session is not None
    return session


def paying(bench: Bench, session: str, id: int) -> "asyncio.Task[Any]":
    call = message_of("tools/call", {"name": "pay", "arguments": WAIT}, id)
    return asyncio.create_task(bench.post("/mcp/bank", call, session))


@pytest.mark.parametrize(("silence", "count"), [(0.001, 1), (None, 2)])
async def test_equal_call_in_one_session_is_a_repetition_in_silence(
    tmp_path: Path, silence: float | None, count: int
) -> None:
    """X16: over HTTP, while the first runs; with "off" both run."""
    own = {"bank": {"resend_after": silence}}
    async with Bench(tmp_path, names=("bank",), own=own).serving() as bench:
        file = bench.file("bank")
        session = await session_of(bench)
        first = paying(bench, session, 2)
        await until(lambda: effects(file) == 1)
        second = paying(bench, session, 3)
        await asyncio.wait([second], timeout=0.2)
        file.with_suffix(".go").touch()
        answers = [(await each)[0] for each in (first, second)]
    assert all("result" in answer for answer in answers)
    assert effects(file) == count


async def test_equal_calls_of_two_sessions_are_two_calls(tmp_path: Path) -> None:
    """X16: two windows that do the same at the same time do it twice."""
    own = {"bank": {"resend_after": 0.001}}
    async with Bench(tmp_path, names=("bank",), own=own).serving() as bench:
        file = bench.file("bank")
        calls = [paying(bench, await session_of(bench), id) for id in (2, 3)]
        await until(lambda: effects(file) >= 1)
        file.with_suffix(".go").touch()
        answers = [(await each)[0] for each in calls]
    assert all("result" in answer for answer in answers) and effects(file) == 2


async def test_equal_calls_at_the_same_moment_are_two_calls(file: Path) -> None:
    """X16: the first has not run for `resend_after` when the second comes."""
    async with wrapped(file) as client:
        calls = [asyncio.create_task(client.pay(**WAIT)) for _ in range(2)]
        await until(lambda: effects(file) == 2)
        file.with_suffix(".go").touch()
        assert all("result" in answer for answer in await asyncio.gather(*calls))


@pytest.mark.parametrize("share", ["all", "caller", "session"])
async def test_caller_uses_a_session_of_another_one_only_if_it_is_shared(
    tmp_path: Path, share: str
) -> None:
    """X15, X13: two callers with tokens, and two sessions of each."""

    async def verify(token: str) -> Identity | None:
        return Identity(token) if token in ("ann", "bob") else None

    bench = Bench(tmp_path, names=("bank",), own={"bank": {"share": share}}, auth=verify)
    look = message_of("tools/call", {"name": "look"}, 2)
    pids: dict[str, set[int]] = {"ann": set(), "bob": set()}
    async with bench.serving():
        for caller in ("ann", "bob", "ann", "bob"):
            headers = {**BOTH, "Authorization": f"Bearer {caller}"}
            url = f"{bench.url}/mcp/bank"
            async with aiohttp.ClientSession(headers=headers) as http:
                greeting = message_of("initialize", introduction(), 1)
                async with http.post(url, data=greeting) as answer:
                    own = {"Mcp-Session-Id": answer.headers["Mcp-Session-Id"]}
                async with http.post(url, data=look, headers=own) as answer:
                    pids[caller].add((await answer.json())["result"]["pid"])
    several = {"all": 1, "caller": 1, "session": 2}[share]
    assert [len(each) for each in pids.values()] == [several, several]
    assert (pids["ann"] == pids["bob"]) is (share == "all")


async def test_two_gateways_of_one_user_run_equal_calls_one_after_the_other(
    tmp_path: Path,
) -> None:
    """X12: the second waits until the answer of the first is delivered, and then runs."""
    async with (
        Bench(tmp_path, names=("bank",)).serving() as one,
        Bench(tmp_path, names=("bank",)).serving() as two,
    ):
        file = one.file("bank")
        sessions = [await session_of(one), await session_of(two)]
        first = paying(one, sessions[0], 2)
        await until(lambda: effects(file) == 1)
        second = paying(two, sessions[1], 3)
        await asyncio.wait([second], timeout=0.2)
        assert effects(file) == 1
        file.with_suffix(".go").touch()
        answers = [(await each)[0] for each in (first, second)]
    assert all("result" in answer for answer in answers) and effects(file) == 2


async def test_idle_connection_is_not_used_for_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X18: the gateway closes it first, and the next command has another connection."""
    assert IDLE < 5.0, "many servers close a connection that is idle for five seconds"
    monkeypatch.setattr("wirecall.gateway.upstream.IDLE", 0.05)
    async with faulty(tmp_path) as (bench, server, session):
        for count in (1, 2, 3):
            assert "result" in await called(bench, session, "look", "done")
            await until(lambda: server.has_none_open)
            assert len({*server.connections}) == count


async def test_calls_around_the_idle_end_of_a_server_are_never_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X18: 120 commands, of which 90 are sent when the server has just closed what was idle.

    The news of an end arrives late, as over a network. Here a connection is too old for a command
    at once, and not after 4 s.
    """
    monkeypatch.setattr("wirecall.gateway.upstream.IDLE", 1e-6)
    lanes = 30
    rounds = 4
    async with faulty(tmp_path, delay=0.02) as (bench, server, session):

        async def pay(number: int, turn: int) -> Any:
            arguments = {"then": f"done {number} {turn}"}
            call = message_of("tools/call", {"name": "pay", "arguments": arguments}, number)
            return (await bench.post("/mcp/faulty", call, session))[0]

        answers = []
        for turn in range(rounds):
            answers += await asyncio.gather(*(pay(number, turn) for number in range(lanes)))
            server.close_idle()
        assert [answer for answer in answers if "error" in answer] == []
        assert len(server.calls) == len(answers) == lanes * rounds
