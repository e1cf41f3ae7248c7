"""A child process on stdio: its end, its last output, and that nothing of it remains."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import Struct

from tests.client.peers import PATIENCE, kill_at_once, until
from wirecall import Retry, connect
from wirecall.client.client import Client
from wirecall.client.delivery import Options
from wirecall.client.jsonrpc import JsonRpc
from wirecall.client.links import LineLink
from wirecall.errors import BadAnswer, CallFailed, ConnectionLost, NotSent, TimedOut
from wirecall.mcp.client.inbox import QUESTIONS, Host, Inbox
from wirecall.protocol.messages import Arrived
from wirecall.transports.child import TURN, Child

ECHO = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    entries = message if isinstance(message, list) else [message]
    replies = [{"jsonrpc": "2.0", "id": m["id"], "result": m.get("params")} for m in entries if "id" in m]
    %s
    for reply in replies:
        print(json.dumps(reply), flush=True)
"""


def echo(inserted: str = "pass") -> list[str]:
    return [sys.executable, "-c", ECHO % inserted]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_many_calls_at_once() -> None:
    async with connect(echo(), discover=False) as client:
        assert await asyncio.gather(*(client.call("x", [n]) for n in range(200))) == [
            [n] for n in range(200)
        ]
        async with client.batch() as batch:
            entries = [batch.call("x", [n]) for n in range(5)]
        assert [entry.result() for entry in entries] == [[n] for n in range(5)]


async def test_line_above_the_limit_fails_the_call_that_it_answers_at_once() -> None:
    """Its id is at the beginning, so the other call in flight gets its answer."""
    long = 'replies[0]["result"] = "x" * (5000 if message.get("params", {}).get("name") == "long" else 5)'
    calls = ("long", {"name": "long"}), ("short", {"name": "short"})
    async with connect(echo(long), discover=False, max_bytes=1000, timeout=PATIENCE) as client:
        failed, got = await asyncio.gather(
            *(client.call(*call) for call in calls), return_exceptions=True
        )
        assert isinstance(failed, BadAnswer)
        assert "a line of more than 1000 bytes; connect(max_bytes=...) allows longer ones" in str(
            failed
        )
        assert got == "xxxxx"


@pytest.mark.parametrize("order", ["reply", "dict(reversed(reply.items()))"])
async def test_line_above_the_limit_fails_the_only_call_in_flight(order: str) -> None:
    """Its id is beyond the limit, if it is the last member."""
    long = f'replies = [{order} for reply in [dict(replies[0], result="x" * 5000)]]'
    async with connect(echo(long), discover=False, max_bytes=1000, timeout=PATIENCE) as client:
        with pytest.raises(BadAnswer, match="a line of more than 1000 bytes"):
            await client.call("x")


async def test_notification_above_the_limit_fails_no_call(caplog: pytest.LogCaptureFixture) -> None:
    long = (
        'print(json.dumps({"jsonrpc": "2.0", "method": "log", "params": ["x" * 5000]}), flush=True)'
    )
    async with connect(echo(long), discover=False, max_bytes=1000, timeout=PATIENCE) as client:
        assert await client.call("x", [1]) == [1]
    assert [line for line in caplog.messages if "1000 bytes" in line]


async def test_answers_in_another_order_and_invalid_lines() -> None:
    garbage = (
        'print("starting up..."); print(); print(json.dumps({"jsonrpc": "2.0", "method": '
        '"hello"})); replies.reverse()'
    )
    async with connect(echo(garbage), discover=False) as client:
        async with client.batch() as batch:
            entries = [batch.call("x", [n]) for n in range(5)]
        assert [entry.result() for entry in entries] == [[n] for n in range(5)]


async def test_type_that_fails_fails_only_its_call() -> None:
    """The code of a type runs where lines are read: the client still reads the lines after that."""

    class Stock(Struct):
        name: str

        def __post_init__(self) -> None:
            raise KeyError(self.name)

    async with connect(echo(), discover=False) as client:
        with pytest.raises(
            BadAnswer, match="x: the result cannot be read as the wanted type: KeyError: 'tea'"
        ) as caught:
            await client.call("x", {"name": "tea"}, type=Stock)
        assert caught.value.ran == "yes" and isinstance(caught.value.__cause__, KeyError)
        async with client.batch() as batch:
            entries = [batch.call("x", {"name": "tea"}, type=kind) for kind in (None, Stock, None)]
        assert [entry.ok for entry in entries] == [True, False, True]


async def test_child_that_dies_is_reported_with_its_last_output_and_restarted() -> None:
    dies = 'message["method"] == "die" and (print("out of tea", file=sys.stderr), sys.exit(3))'
    async with connect(echo(dies), discover=False) as client:
        assert await client.call("x", [1]) == [1]
        with pytest.raises(
            ConnectionLost, match="ended with 3; its last words: out of tea"
        ) as caught:
            await client.call("die")
        assert caught.value.ran == "unknown"
        assert await client.call("x", [2]) == [2]


async def test_child_that_ends_before_the_first_write_is_reported_with_its_last_output(
    tmp_path: Path,
) -> None:
    go = tmp_path / "go"
    wait = f"while not os.path.exists({str(go)!r}): time.sleep(0.01)"
    code = f"import os, time\nos.close(0)\n{wait}\nraise SystemExit('no licence')"
    child = Child([sys.executable, "-c", code], stderr="keep", grace=PATIENCE)

    async def write_until_it_fails() -> None:
        while True:
            await child.write(b"{}")
            await asyncio.sleep(0)

    await child.open(lambda line: None, lambda error: None)
    try:
        writing = asyncio.create_task(write_until_it_fails())
        # The pipe is probably closed by now, but the child lives.
        await asyncio.wait({writing}, timeout=0.3)
        go.touch()
        with pytest.raises(
            (NotSent, ConnectionLost), match="ended with 1; its last words: no licence"
        ):
            await writing
    finally:
        go.touch()
        await child.aclose()


@pytest.mark.skipif(sys.platform == "win32", reason="waits for a process of POSIX")
async def test_child_that_ended_before_the_write_gets_nothing() -> None:
    """Although the loop has not seen its end: the call did not run."""
    ends: list[CallFailed] = []
    child = Child(echo())
    await child.open(lambda _line: None, ends.append)
    try:
        assert child.pid is not None
        kill_at_once(child.pid)
        assert not ends
        with pytest.raises(NotSent, match="was ended by signal 9"):
            await child.write(b"{}")
    finally:
        await child.aclose()


async def test_keyed_call_survives_the_death_of_the_child(tmp_path: Path) -> None:
    once = (
        f"import pathlib; p = pathlib.Path({str(tmp_path / 'died')!r}); "
        "p.exists() or (p.touch(), sys.exit(1))"
    )
    async with connect(echo(once), discover=False, retry=Retry(first=0.01)) as client:
        assert await client.call("x", {"a": 1}, key="k") == {"a": 1, "idempotency_key": "k"}


class Fleeting:
    """A pipe that ends while a line is written, and still accepts the line."""

    async def open(
        self, _on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]
    ) -> None:
        self._on_end = on_end

    async def write(self, _line: bytes) -> None:
        self._on_end(ConnectionLost("its last words"))

    async def aclose(self) -> None: ...


async def test_pipe_that_ends_while_a_line_is_written_is_reported() -> None:
    async with Client(LineLink(Fleeting), JsonRpc({}), Options(timeout=PATIENCE)) as client:
        with pytest.raises(ConnectionLost, match="its last words"):
            await client.call("x")
        await client.notify("x")  # a notification needs only the write


async def test_command_that_does_not_exist() -> None:
    with pytest.raises(NotSent, match="cannot be started"):
        async with connect(["/nowhere/server"]):
            pass


@pytest.mark.parametrize("portable", [False, True])
async def test_lines_and_the_last_output_of_a_child(portable: bool) -> None:
    """Both ways to read: the event loop watches the pipes, or threads wait for them."""
    received: list[bytes] = []
    ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    script = (
        "import sys\nfor line in sys.stdin: print(line * 1000, end='', flush=True)\n"
        "sys.exit('last words')"
    )
    child = Child([sys.executable, "-c", script], stderr="keep", portable=portable)
    await child.open(received.append, ended.set_result)
    for number in range(20):
        await child.write(b"%d" % number)
    await until(lambda: len(received) == 20_000)
    assert received == [b"%d" % number for number in range(20) for _ in range(1000)]
    await child.aclose()
    with pytest.raises(NotSent):
        await child.write(b"x")


@pytest.mark.parametrize("portable", [False, True])
async def test_child_that_fails_is_reported(portable: bool) -> None:
    ended: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    script = "import sys\nsys.stdin.readline()\nsys.exit('last words')"
    child = Child([sys.executable, "-c", script], stderr="keep", portable=portable)
    await child.open(lambda _line: None, ended.set_result)
    await child.write(b"x")
    error = await asyncio.wait_for(ended, PATIENCE)
    assert isinstance(error, ConnectionLost)
    assert "ended with 1; its last words: last words" in str(error)
    await child.aclose()


@pytest.mark.parametrize("portable", [False, True])
async def test_child_that_never_answers_and_never_ends(tmp_path: Path, portable: bool) -> None:
    """It ignores the end of its input and SIGTERM, and has its own child: both are gone afterwards."""
    stubborn = f"""
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(tmp_path / "pids.new")!r}).write_text(f"{{os.getpid()}} {{grandchild.pid}}")
os.rename({str(tmp_path / "pids.new")!r}, {str(tmp_path / "pids")!r})
time.sleep(600)
"""
    child: Any = Child([sys.executable, "-c", stubborn], grace=0.2, portable=portable)
    await child.open(lambda _line: None, lambda _error: None)
    try:
        await until(lambda: (tmp_path / "pids").exists())
    finally:
        await asyncio.wait_for(child.aclose(), PATIENCE)
    own, other = map(int, (tmp_path / "pids").read_text().split())
    assert not is_alive(own)
    await until(
        lambda: not is_alive(other) or _state(other) == "Z"
    )  # the process that adopts it may take its time to reap it


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"


async def test_child_that_never_stops_writing_does_not_block_the_loop() -> None:
    """The client reads a pipe full of short lines in pieces, and stops at `aclose`: deadlines hold."""
    received: list[int] = [0]  # lines per iteration of the loop

    def tick() -> None:
        received.append(0)
        if child.pid is not None:
            asyncio.get_running_loop().call_soon(tick)

    def on_line(_line: bytes) -> None:
        assert child.pid is not None, "a line arrived after the end was asked for"
        received[-1] += 1

    child = Child([sys.executable, "-c", "while True: print('y\\n' * 100_000)"], grace=0.1)
    await child.open(on_line, lambda _error: None)
    tick()
    try:
        await until(lambda: sum(received) > 100_000)
    finally:
        await asyncio.wait_for(child.aclose(), PATIENCE)
    assert (
        max(received) <= 2 * TURN
    )  # two pieces: the end of one read, and the beginning of the next


async def test_server_that_asks_endlessly_gets_a_limited_number_of_answers() -> None:
    """It does not read: the answers to it would wait indefinitely."""
    sent: list[Any] = []

    async def send(message: bytes) -> None:
        sent.append(message)
        await asyncio.Event().wait()

    conversation: Any = SimpleNamespace(is_stateless=False, send=send)
    inbox = Inbox(conversation, Host())
    for n in range(20_000):
        inbox.receive(Arrived("2.0", id=n // 2, method="ping"))
    await asyncio.sleep(0)
    assert len(sent) == QUESTIONS
    await inbox.aclose()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_cancel_as_the_child_exits_is_not_lost() -> None:
    """A call whose deadline expires while it cleans up after the last child would hang."""
    child: Any = Child([sys.executable, "-c", ""])
    await child.open(lambda _line: None, lambda _error: None)
    process = child._process
    wait = child._process.wait

    async def ends() -> None:
        await wait()
        process.wait = wait
        closing.cancel()

    process.wait = ends
    closing = asyncio.create_task(child.aclose())
    with pytest.raises(asyncio.CancelledError):
        await closing
    await wait()


async def test_deaf_child_times_out_and_the_client_remains_usable() -> None:
    deaf = 'replies = [] if message["method"] == "deaf" else replies'
    async with connect(echo(deaf), discover=False) as client:
        with pytest.raises(TimedOut):
            await client.call("deaf", timeout=0.2)
        assert await client.call("x", [1]) == [1]


async def test_batch_ends_with_the_last_of_its_entries() -> None:
    """The call with the most time is answered: the others end at their own deadlines."""
    deaf = 'replies = [reply for reply, m in zip(replies, entries) if m["method"] != "deaf"]'
    async with connect(echo(deaf), discover=False) as client, asyncio.timeout(PATIENCE):
        async with client.batch() as batch:
            patient = batch.call("x", [1], timeout=10 * PATIENCE)
            deaf_one = batch.call("deaf", timeout=0.2)
        assert patient.result() == [1]
        assert isinstance(deaf_one.error, TimedOut)
        assert await client.call("x", [2]) == [2]


async def test_array_in_the_wrong_place_and_an_answer_given_twice() -> None:
    array = (
        'message["method"] == "array" and (print(json.dumps(replies), flush=True), replies.clear())'
    )
    twice = 'message["method"] == "twice" and replies.append(replies[0])'
    async with connect(echo(f"{array}; {twice}"), discover=False) as client:
        with pytest.raises(Exception, match="a single call was answered with an array"):
            await client.call("array")
        with suppress(BadAnswer):  # the first counts, if it was delivered before the second arrived
            assert await client.call("twice", [1]) == [1]
        assert await client.call("x", [2]) == [2]


async def test_child_does_not_receive_the_interrupt_of_the_terminal() -> None:
    child: Any = Child([sys.executable, "-c", "import sys; sys.stdin.read()"])
    await child.open(lambda _line: None, lambda _error: None)
    try:
        assert os.getpgid(child.pid) != os.getpgid(0)
        assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    finally:
        await asyncio.wait_for(child.aclose(), PATIENCE)


async def test_child_that_has_ended_before_it_is_watched_says_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = asyncio.create_subprocess_exec

    async def start_late(*words: Any, **options: Any) -> asyncio.subprocess.Process:
        process = await start(*words, **options)
        assert process.stdin is not None
        await process.wait()
        await process.stdin.wait_closed()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_late)
    child = Child([sys.executable, "-c", "raise SystemExit(3)"])
    await child.open(lambda line: None, lambda error: None)
    with pytest.raises(NotSent, match="ended with 3"):
        await child.write(b"{}")
    await child.aclose()
