"""stdio, through real processes: a server is started, lines are written, and what comes back is
read, with a time limit.
"""

import asyncio
import contextlib
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from wirecall.errors import Gone
from wirecall.protocol.receipt import Receipt
from wirecall.transports.lines import HIGH, Output, Splitter
from wirecall.transports.stdio import serve_streams

PATIENCE = 60.0
GRACE = 600.0  # longer than any test waits: it ends for another reason

# Buffered, as by default: what was printed before must not come out after.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}

SERVER = """
import asyncio, contextvars, ctypes, subprocess, sys, time
from wirecall import App, Limits
from wirecall.transports import stdio

limits = Limits(bytes_in=100_000)
app = App("test", limits=limits)
seen = []
opened = asyncio.Event()
mark = contextvars.ContextVar("mark", default="none")

@app.query
def add(a: int, b: int) -> int:
    return a + b

@app.query
async def note(text: str, wait: bool = False) -> list[str]:
    seen.append(text)
    if wait:
        await opened.wait()
    return seen

@app.query
def let_go() -> str:
    opened.set()
    return "open"

@app.query
async def within(seconds: float) -> str:
    async with asyncio.timeout(PATIENCE):
        await asyncio.sleep(seconds)
    return "done"

@app.query(blocking=True)
def block(seconds: float) -> str:
    print("blocked", file=sys.stderr, flush=True)
    time.sleep(seconds)
    return "done"

@app.query
def hold(seconds: float) -> str:
    print("held", file=sys.stderr, flush=True)
    time.sleep(seconds)
    return "done"

@app.query
async def forever() -> str:
    print("waiting", file=sys.stderr, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("cancelled", file=sys.stderr, flush=True)
    return ""

@app.query
async def stubborn() -> str:
    print("waiting", file=sys.stderr, flush=True)
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            print("cancelled", file=sys.stderr, flush=True)

@app.query
def large(size: int) -> str:
    return "x" * size

@app.query
def leave_mark(text: str) -> str:
    before = mark.get()
    mark.set(text)
    return before

@app.query
def noisy() -> str:
    print("from print")
    early.write("from an early stdout\\n")
    child = "import sys; print('from a child', repr(sys.stdin.read()))"
    subprocess.run([sys.executable, "-c", child], check=True)
    ctypes.CDLL(None).printf(b"from C\\n")
    try:
        return input("from input")
    except EOFError:
        return "nothing to read"

early = sys.stdout

class Plain:
    def __init__(self, send):
        self.send = send

    def handle(self, line, receipt):
        return app.handle(line)

    def ending(self):
        pass

    async def aclose(self):
        print("closed", file=sys.stderr, flush=True)

async def cleanup(grace):
    await app.aclose(grace)
    print("cleaned", file=sys.stderr, flush=True)

grace = float(sys.argv[1]) if len(sys.argv) > 1 else PATIENCE
stdio.serve(Plain, grace=grace, cleanup=cleanup, limits=limits, portable=PORTABLE)
if "quiet" not in sys.argv:
    print("after")
""".replace("PATIENCE", str(PATIENCE))
WATCHED = SERVER.replace("PORTABLE", "False")
THREADS = SERVER.replace("PORTABLE", "True")


class Server:
    """The process, its stdin as `write`, its stdout as `answer`, its stderr as `error_line`."""

    def __init__(self, source: str, *arguments: object) -> None:
        command = [sys.executable, "-c", source, *map(str, arguments)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=ENVIRONMENT
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.stdin = self.process.stdin
        self.stdout = self.process.stdout
        self.stderr = self.process.stderr
        self._read = {self.stdout.fileno(): bytearray(), self.stderr.fileno(): bytearray()}

    def write(self, *lines: bytes) -> None:
        data = memoryview(b"".join(lines))
        while data:
            assert select.select([], [self.stdin], [], PATIENCE)[1], "the server does not read"
            data = data[os.write(self.stdin.fileno(), data[: select.PIPE_BUF]) :]

    def line(self, stream: Any) -> bytes:
        fd = stream.fileno()
        buffer = self._read[fd]
        deadline = time.monotonic() + PATIENCE
        while b"\n" not in buffer:
            assert select.select([fd], [], [], max(0, deadline - time.monotonic()))[0], (
                f"no line; so far: {bytes(buffer)!r}"
            )
            data = os.read(fd, 1 << 16)
            assert data, f"closed; so far: {bytes(buffer)!r}"
            buffer += data
        line, _, rest = bytes(buffer).partition(b"\n")
        self._read[fd] = bytearray(rest)
        return line

    def answer(self) -> Any:
        return msgspec.json.decode(self.line(self.stdout))

    def error_line(self) -> str:
        return self.line(self.stderr).decode()

    def end(self) -> tuple[int, bytes, str]:
        """Close stdin and wait; return the exit code and the rest of stdout and stderr."""
        if not self.stdin.closed:
            self.stdin.close()
        self.process.stdin = None
        before = [
            b"" if stream.closed else bytes(self._read[stream.fileno()])
            for stream in (self.stdout, self.stderr)
        ]
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, before[0] + (out or b""), (before[1] + err).decode()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()


@pytest.fixture(params=[WATCHED, THREADS], ids=["watched", "threads"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Server]]:
    """Start servers, by both ways to read and write: the event loop watches the pipes, or threads
    wait for them.
    """
    servers: list[Server] = []

    def start(*arguments: object) -> Server:
        servers.append(Server(request.param, *arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(start: Callable[..., Server]) -> Server:
    return start()


def call(id: int, method: str, *params: Any) -> bytes:
    return (
        msgspec.json.encode({"jsonrpc": "2.0", "method": method, "params": params, "id": id})
        + b"\n"
    )


def answers(output: bytes) -> dict[int, Any]:
    return {
        answer["id"]: answer["result"] for answer in map(msgspec.json.decode, output.splitlines())
    }


# --- lines ----------------------------------------------------------------------------------------


def test_call_is_answered_and_eof_ends_the_process(server: Server) -> None:
    server.write(call(1, "add", 1, 2))
    assert server.answer() == {"jsonrpc": "2.0", "result": 3, "id": 1}
    code, out, err = server.end()
    assert (code, out) == (0, b"after\n")  # stdout is the program's again
    assert err == "closed\ncleaned\n"


def test_line_ends_and_blank_lines(server: Server) -> None:
    server.write(b"\n \r\n", call(1, "add", 1, 1)[:-1], b"\r\n\n\r\n", call(2, "add", 2, 2)[:-1])
    _, out, _ = server.end()  # the last line has no end
    assert answers(out.removesuffix(b"after\n")) == {1: 2, 2: 4}


@pytest.mark.parametrize(
    "garbage", [b"\x00\x01\xfe\xff", b'{"jsonrpc":"2.0","method":"\xff","id":1}', b"{", b"nonsense"]
)
def test_garbage_is_answered_and_the_next_line_is_served(server: Server, garbage: bytes) -> None:
    server.write(garbage + b"\n", call(1, "add", 1, 2))
    assert server.answer()["error"]["code"] == -32700
    assert server.answer()["result"] == 3


def test_line_that_is_too_long_is_refused_before_it_ends_and_the_next_one_is_served(
    server: Server,
) -> None:
    server.write(b'"' + b"x" * 300_000)
    refused = server.answer()["error"]
    assert refused["code"] == -32600 and refused["data"]["limit"] == "bytes_in"
    server.write(b"x" * 300_000, b'"\n', call(1, "add", 1, 2))
    assert server.answer()["result"] == 3


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_are_the_same_however_they_arrive(size: int) -> None:
    data = b"one\r\n\n12345678\n12345678\r\n123456789\n" + b"y" * 30 + b"\r\n  \nlast"
    lines = Splitter(8)
    found = list[bytes]()
    for start in range(0, len(data), size):
        found += lines.feed(data[start : start + size])
    assert found + lines.rest() == [
        b"one",
        b"12345678",
        b"12345678",
        b"123456789",
        b"yyyyyyyyy",
        b"last",
    ]


# --- many calls -----------------------------------------------------------------------------------


def test_lines_start_in_order_and_one_that_waits_does_not_block_the_others(server: Server) -> None:
    texts = [str(number) for number in range(60)]
    server.write(*(call(id, "note", text, id % 3 == 0) for id, text in enumerate(texts)))
    first = [server.answer() for _ in range(40)]
    assert [answer["id"] for answer in first] == [id for id in range(60) if id % 3]
    assert first[-1]["result"] == texts
    server.write(call(100, "let_go"))
    assert {server.answer()["id"] for _ in range(21)} == {*range(0, 60, 3), 100}


def test_handler_may_use_timeouts_from_its_first_line_to_its_last(server: Server) -> None:
    server.write(*(call(id, "within", 0.01 if id % 2 else 0) for id in range(10)))
    assert {server.answer()["result"] for _ in range(10)} == {"done"}


def test_context_variable_does_not_leak_into_the_next_call(server: Server) -> None:
    server.write(
        call(1, "leave_mark", "one"), call(2, "leave_mark", "two"), call(3, "leave_mark", "three")
    )
    assert [server.answer()["result"] for _ in range(3)] == ["none"] * 3


def test_thousand_lines_at_once(server: Server) -> None:
    server.write(*(call(id, "within", 0.001) for id in range(1000)))
    assert {server.answer()["id"] for _ in range(1000)} == set(range(1000))


def test_lines_beyond_the_in_flight_limit_are_all_served(server: Server) -> None:
    server.write(*(call(id, "note", "", True) for id in range(515)), call(515, "let_go"))
    assert {server.answer()["id"] for _ in range(516)} == set(range(516))


def test_large_answers_to_a_slow_reader_remain_whole(server: Server) -> None:
    server.write(*(call(id, "large", 5_000_000) for id in range(4)), call(4, "add", 1, 1))
    for id in range(4):
        answer = server.answer()
        assert answer["id"] == id and len(answer["result"]) == 5_000_000
    assert server.answer()["result"] == 2


def test_client_that_does_not_read_is_not_read_from(server: Server) -> None:
    # 3,000 answers of 100 KB would be 300 MB; the calls themselves are more than the two pipes
    # hold.
    lines = memoryview(b"".join(call(id, "large", 100_000) for id in range(3000)))
    written = 0
    while written < len(lines) and select.select([], [server.stdin], [], 1)[1]:
        written += os.write(server.stdin.fileno(), lines[written : written + select.PIPE_BUF])
    assert written < len(lines)
    whole = bytes(lines[:written]).count(b"\n")
    assert [server.answer()["id"] for _ in range(whole)] == list(range(whole))


# --- nothing but the protocol on stdout -----------------------------------------------------------


def test_prints_of_handlers_go_to_stderr_and_stdin_is_closed_to_them(server: Server) -> None:
    server.write(call(1, "noisy"), call(2, "add", 1, 2))
    assert server.answer()["result"] == "nothing to read"
    assert server.answer()["result"] == 3
    _, out, err = server.end()
    assert out == b"after\n"
    for text in ("from print", "from an early stdout", "from a child ''", "from C", "from input"):
        assert text in err


# --- other kinds of descriptors -------------------------------------------------------------------


def run(stdin: Any, stdout: Any, stderr: Any = subprocess.PIPE) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-c", WATCHED], stdin=stdin, stdout=stdout, stderr=stderr, env=ENVIRONMENT
    )


def test_stdin_and_stdout_may_be_files(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(
        b"".join(call(id, "add", id, 1) for id in range(5000)) + call(5000, "within", 0.01)[:-1]
    )
    with (tmp_path / "in").open("rb") as stdin, (tmp_path / "out").open("wb") as stdout:
        process = run(stdin, stdout)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    found = answers((tmp_path / "out").read_bytes().removesuffix(b"after\n"))
    assert found == {**{id: id + 1 for id in range(5000)}, 5000: "done"}


def test_stdin_may_be_empty() -> None:
    process = run(subprocess.DEVNULL, subprocess.PIPE)
    assert process.communicate(timeout=PATIENCE) == (b"after\n", b"closed\ncleaned\n")


def test_socket_may_be_both_stdin_and_stdout() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = run(theirs, theirs, subprocess.DEVNULL)
        theirs.close()
        ours.settimeout(PATIENCE)
        ours.sendall(call(1, "large", 3_000_000) + call(2, "add", 1, 2))
        ours.shutdown(socket.SHUT_WR)
        with ours.makefile("rb") as file:
            assert answers(file.read().removesuffix(b"after\n")) == {1: "x" * 3_000_000, 2: 3}
        assert process.wait(PATIENCE) == 0


def test_stdout_and_stderr_as_one_pipe_remain_blocking() -> None:
    process = run(subprocess.PIPE, subprocess.PIPE, subprocess.STDOUT)
    out, _ = process.communicate(call(1, "large", 3_000_000), timeout=PATIENCE)
    assert process.returncode == 0
    assert answers(out.splitlines()[0]) == {1: "x" * 3_000_000}


def test_terminal() -> None:
    ours, theirs = pty.openpty()
    process = run(theirs, theirs, theirs)
    os.close(theirs)
    try:
        os.write(ours, call(1, "add", 20, 22))
        seen = b""
        deadline = time.monotonic() + PATIENCE
        while b'"result":42' not in seen:
            assert select.select([ours], [], [], max(0, deadline - time.monotonic()))[0], seen
            seen += os.read(ours, 1 << 16)
        assert b"one message per line" in seen  # a person would wonder why nothing happens
        assert os.get_blocking(ours)
        os.write(ours, b"\x04")
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# --- the end --------------------------------------------------------------------------------------


def test_call_in_flight_at_eof_is_answered(server: Server) -> None:
    server.write(call(1, "within", 0.3), call(2, "block", 0.3))
    code, out, _ = server.end()
    assert code == 0 and answers(out.removesuffix(b"after\n")) == {1: "done", 2: "done"}


def test_call_that_outlasts_the_grace_is_cancelled(start: Callable[..., Server]) -> None:
    server = start(0.2)
    server.write(call(1, "forever"), call(2, "within", 0.01))
    code, out, err = server.end()
    assert code == 0 and answers(out.removesuffix(b"after\n")) == {2: "done"}
    assert err == "waiting\nclosed\ncancelled\ncleaned\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_lets_the_calls_in_flight_finish(server: Server, number: int) -> None:
    server.write(call(1, "block", 0.5))
    assert server.error_line() == "blocked"
    server.process.send_signal(number)
    assert server.answer()["result"] == "done"
    assert server.process.wait(PATIENCE) == 0
    assert server.end() == (0, b"after\n", "closed\ncleaned\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_ends_an_idle_server(server: Server, number: int) -> None:
    server.write(call(1, "add", 1, 1))
    server.answer()
    server.process.send_signal(number)
    assert server.process.wait(PATIENCE) == 0
    assert server.end() == (0, b"after\n", "closed\ncleaned\n")


def test_second_sighup_does_not_shorten_the_grace(server: Server) -> None:
    """A terminal that is closed sends it twice: the kernel does, and the shell."""
    server.write(call(1, "block", 0.5))
    assert server.error_line() == "blocked"
    server.process.send_signal(signal.SIGHUP)
    server.process.send_signal(signal.SIGHUP)
    assert server.answer()["result"] == "done"
    assert server.process.wait(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signal_without_a_meaning_is_ignored(server: Server, number: signal.Signals) -> None:
    server.write(call(1, "add", 1, 1))
    server.answer()
    server.process.send_signal(number)
    assert server.error_line().startswith(f"{number.name} is ignored")
    server.write(call(2, "add", 1, 2))
    assert server.answer()["result"] == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_ends_at_once(start: Callable[..., Server], number: int) -> None:
    server = start(GRACE)
    server.write(call(1, "forever"))
    assert server.error_line() == "waiting"
    server.process.send_signal(number)
    server.process.send_signal(signal.SIGTERM if number == signal.SIGINT else signal.SIGINT)
    assert server.process.wait(PATIENCE) == 0
    _, out, err = server.end()
    assert out == b"after\n" and "cancelled" in err and "cleaned" in err and "Traceback" not in err


@pytest.mark.parametrize(("method", "said"), [("block", "blocked"), ("hold", "held")])
def test_second_signal_ends_even_a_call_that_cannot_be_cancelled(
    start: Callable[..., Server], method: str, said: str
) -> None:
    server = start(GRACE)
    sent = 0
    server.write(call(1, method, 600))
    assert server.error_line() == said
    deadline = time.monotonic() + PATIENCE
    while server.process.poll() is None:  # two equal signals merge until Python handles the first
        assert time.monotonic() < deadline
        server.process.send_signal(signal.SIGINT)
        sent += 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.process.wait(0.1)
    assert sent > 1 and server.process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in server.end()[2]


@pytest.mark.parametrize(("method", "params"), [("block", [600]), ("stubborn", [])])
def test_call_that_cannot_be_ended_does_not_keep_the_process_alive(
    start: Callable[..., Server], method: str, params: list[Any]
) -> None:
    """A thread, or a handler that ignores its cancellation.

    Most clients close stdin, and send no signal.
    """
    server = start(0.2)
    server.write(call(1, method, *params))
    assert server.error_line() in ("blocked", "waiting")
    code, out, err = server.end()
    assert (code, out) == (0, b"")
    assert "cleaned\n" in err and "stopping with handlers at work that do not end" in err


def test_peer_that_stops_reading_ends_the_server(start: Callable[..., Server]) -> None:
    server = start(GRACE, "quiet")
    server.write(call(1, "forever"))
    assert server.error_line() == "waiting"
    server.stdout.close()
    server.process.stdout = None
    server.write(call(2, "add", 1, 1))
    assert server.process.wait(PATIENCE) == 0
    assert sorted(server.end()[2].split()) == ["cancelled", "cleaned", "closed"]  # and no traceback


# --- inside one loop ------------------------------------------------------------------------------


class Echo:
    def __init__(self, send: Callable[[bytes], Any]) -> None:
        self.send = send
        self.closed = False

    def handle(self, line: bytes, receipt: Receipt, /) -> bytes | None:
        if line == b"fail":
            raise ValueError("a connection with a bug")
        return line

    def ending(self) -> None: ...

    async def aclose(self) -> None:
        self.closed = True


@pytest.fixture
def pipes() -> Iterator[tuple[int, int, int, int]]:
    fds = (*os.pipe(), *os.pipe())
    yield fds
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


async def test_send_writes_lines_between_answers_and_a_bug_in_a_connection_ends_nothing(
    pipes: tuple[int, int, int, int], caplog: pytest.LogCaptureFixture
) -> None:
    reader, ours_in, ours_out, writer = pipes
    connections: list[Echo] = []
    graces: list[float] = []

    def connect(send: Any) -> Echo:
        connections.append(Echo(send))
        return connections[0]

    async def cleanup(grace: float) -> None:
        graces.append(grace)

    os.write(ours_in, b"fail\none\n")
    task = asyncio.create_task(serve_streams(connect, reader, writer, grace=5, cleanup=cleanup))
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.to_thread(os.read, ours_out, 100) == b"one\n"
        await connections[0].send(b"two")
        os.close(ours_in)
        await task
    assert os.read(ours_out, 100) == b"two\n"
    assert connections[0].closed and 0 < graces[0] <= 5 and os.get_blocking(writer)
    assert "a line could not be answered" in caplog.text


async def test_send_waits_for_a_slow_reader_and_reports_when_it_is_gone(
    pipes: tuple[int, int, int, int],
) -> None:
    _, _, ours, writer = pipes
    lost: list[bool] = []
    output = Output(writer, lambda: lost.append(True))
    receipt = asyncio.create_task(output.send(b"x" * (HIGH * 4)))
    await asyncio.sleep(0)
    assert not receipt.done() and output.size > HIGH
    os.close(ours)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(Gone):
            await receipt
        with pytest.raises(Gone):
            await output.send(b"more")
    output.close()
    assert lost == [True]
