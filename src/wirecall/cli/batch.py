"""Many messages, one per line: `wirecall batch` makes a call of each line, `wirecall send` sends the lines untouched.

`batch` reads a call per line and prints an outcome per line, in the same order:

    {"method": "price", "params": {"sku": "tea"}}          a method, or a tool of MCP with its arguments
    {"method": "charge", "params": {...}, "key": "k-7"}    with an idempotency key
    {"line": 1, "ok": true, "result": 450}                 an outcome; with "id" if the line had one, "key", "replayed"
    {"line": 2, "ok": false, "error": {...}}

A line that cannot be read fails alone. Lines are sent in arrays, or side by side where the protocol has no arrays, one
window at a time, so that a file of any length takes the memory of one window. The writer of a pipe may pause, as `tail -f`
does, and wants the answers meanwhile: a window ends when it is full, `LINGER` after its first line, or with the input. The
event loop runs on while no line comes, because servers ask their clients things, too.
"""

import asyncio
import os
import stat
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import redirect_stdout, suppress
from itertools import islice, takewhile
from typing import Any, BinaryIO, TypeAlias

import click
import msgspec
from msgspec import UNSET, Struct, UnsetType

from wirecall.app import App
from wirecall.cli.failures import CliError, Exit, Interrupted, Unreachable, failure_of
from wirecall.cli.targets import (
    Target,
    TargetCommand,
    Way,
    app_of,
    check_ledger,
    http_client,
    ledger_option,
    opened,
    ready,
    target_argument,
    way_options,
)
from wirecall.cli.terminal import (
    Printer,
    count_of,
    input_file,
    json_option,
    print_json,
    print_raw,
    progress,
    reading,
    result_of,
    run,
)
from wirecall.errors import ConnectionLost, UsageError
from wirecall.files import IS_PORTABLE
from wirecall.protocol.messages import JsonObject

WINDOW = 1000  # lines in flight together
TICK = 0.2  # seconds after which finished calls are printed while others are in flight
LINGER = 0.2  # seconds from the first line of a window to its end
CHUNK = 1 << 16

Numbered: TypeAlias = tuple[int, bytes]


class Line(Struct, frozen=True):
    """One line of the input. A JSON-RPC request is a line too; its other members are ignored."""

    method: str
    params: JsonObject | list[Any] | None = None
    key: str | None = None
    id: str | int | UnsetType | None = UNSET


_decode = msgspec.json.Decoder(Line).decode


class Totals:
    """The counts of all lines."""

    def __init__(self) -> None:
        self.sent = self.lines = self.failed = self.replayed = 0
        self.exits: set[int] = set()

    def count(self, documents: list[JsonObject]) -> None:
        failed = [document["error"]["exit"] for document in documents if not document["ok"]]
        self.lines += len(documents)
        self.failed += len(failed)
        self.replayed += sum(1 for document in documents if "replayed" in document)
        self.exits.update(failed)

    def answered(self) -> str:
        """Return the state of the batch if it ends now."""
        open = self.sent - self.lines
        left = f"; {count_of(open, 'line')} may have run, or may still run" if open else ""
        return f"{count_of(self.lines, 'line')} answered, {self.failed} failed{left}"

    def exit(self) -> int:
        """Return the exit code: some failed, unless all failed for one reason that lies outside the lines."""
        if self.failed == self.lines and self.exits in ({Exit.AUTH}, {Exit.UNREACHABLE}, {Exit.PROTOCOL}):
            return self.exits.pop()
        return Exit.SOME_FAILED if self.failed else Exit.DONE


@click.command("batch", cls=TargetCommand)
@target_argument
@click.argument("lines", type=input_file, default="-", metavar="[FILE|-]")
@ledger_option
@way_options
@json_option
def batch_command(target: Target, lines: BinaryIO, ledger: str | None, way: Way, out: Printer) -> int:
    """Make the calls in FILE (or on standard input), one JSON object per line.

    The outcomes are on stdout, one JSON object per line, in the order of the input, with or without --json.

    \b
    {"method": "price", "params": {"sku": "tea"}}
    {"method": "charge", "params": {"order": "7", "cents": 450}, "key": "order-7"}
    """
    totals = Totals()
    try:
        run(_batch(target, lines, ledger, way, totals))
    except Interrupted as stopped:
        stopped.why = totals.answered()
        raise
    replayed = f", {totals.replayed} replayed" if totals.replayed else ""
    out.note(f"{count_of(totals.lines, 'line')}, {totals.failed} failed{replayed}", "failed" if totals.failed else "ok")
    return totals.exit()


async def _batch(target: Target, source: BinaryIO, ledger: str | None, way: Way, totals: Totals) -> None:
    app = app_of(target, ledger)
    if app is not None:
        # A wrong ledger fails here once, not in every line. Only one that was asked for is opened: queries need none.
        check_ledger(app.ledger_url)
        if ledger:
            await ready(app)
    stdout, lines, count = sys.stdout, InputLines(source), None
    is_mcp = way.protocol_to(target) == "mcp"
    if source.seekable():  # the lines of a file can be counted before they are read
        begin = source.tell()
        count = sum(1 for line in source if line.strip())
        source.seek(begin)
    with progress(count, "Calls", hidden=source.isatty()) as advance:

        def report(documents: list[JsonObject]) -> None:
            totals.count(documents)
            if stdout is not None:  # the parent process may have closed it
                print_json(*documents, stdout=stdout)
            advance(len(documents))

        async with opened(target, way, app=app) as client:
            # A key is for a repetition if the server honours it, and keeps it longer than this command takes.
            is_kept = app is None or not app.ledger_url.startswith("memory:")
            has_keys = is_kept and (not is_mcp or client.honours_keys)
            while block := await lines.block(WINDOW):
                totals.sent += len(block)
                await _send(client, is_mcp, has_keys, block, report)


async def _send(
    client: Any, is_mcp: bool, has_keys: bool, block: list[Numbered], report: Callable[[list[JsonObject]], None]
) -> None:
    """Make the calls of a block. Report finished calls while others are in flight, in the order of the lines."""
    entries: list[tuple[int, Line | None, Any]] = []  # the last is an entry of the batch, or a CliError

    async def send() -> None:
        async with client.batch() as batch:
            entries.extend((number, *_added(batch, is_mcp, text)) for number, text in block)

    def is_final(entry: tuple[int, Line | None, Any]) -> bool:
        return isinstance(entry[2], CliError) or entry[2].ok  # the client may still retry a call that failed

    sending, reported = asyncio.create_task(send()), 0
    try:
        while not sending.done():
            await asyncio.wait([sending], timeout=TICK)
            settled = entries if sending.done() else list(takewhile(is_final, entries))
            report([_document(*entry, has_keys) for entry in settled[reported:]])
            reported = len(settled)
        await sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


def _added(batch: Any, is_mcp: bool, text: bytes) -> tuple[Line | None, Any]:
    """Add a line to the batch; return it with its entry, or with its error."""
    try:
        line = _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return None, CliError("This line is not a call.", str(error), '{"method": "...", "params": {...}}', type="line")
    if is_mcp and isinstance(line.params, list):
        return line, CliError(f"{line.method}: params by position.", "tools of MCP take an object", "use names", type="line")
    try:
        return line, (batch.call_tool if is_mcp else batch.call)(line.method, line.params, key=line.key)
    except UsageError as error:
        return line, failure_of(error)


def _document(number: int, line: Line | None, entry: Any, has_keys: bool) -> JsonObject:
    """Return the outcome of a line as it is printed."""
    id = {} if line is None or line.id is UNSET else {"id": line.id}
    if isinstance(entry, CliError):
        return {"line": number, **id, "ok": False, "error": entry.document()}
    more = ({"key": entry.key} if entry.key else {}) | ({"replayed": True} if entry.replayed else {})
    if entry.error is None:
        return {"line": number, **id, "ok": True, "result": result_of(entry.result()), **more}
    failure = failure_of(entry.error)
    if failure.exit == Exit.UNKNOWN:
        safe = f'repeat the line with "key": "{entry.key}": it takes effect once'
        failure.next = (
            safe
            if entry.key and has_keys
            else "repeat the line if it only reads; else find out first whether it took effect"
        )
    return {"line": number, **id, "ok": False, "error": failure.document(), **more}


# --- raw messages ---------------------------------------------------------------------------------------------------

LEAVE = 1.0  # seconds for a process to end by itself after it closed its stdout


@click.command("send", cls=TargetCommand)
@target_argument
@click.argument("messages", type=input_file, default="-", metavar="[MESSAGES|-]")
@way_options
def send_command(target: Target, messages: BinaryIO, way: Way) -> int:
    """Send messages to TARGET unchanged, one per line of MESSAGES (standard input by default), and print the answers.

    A message without an answer prints nothing. An app in a file receives them as JSON-RPC.

    \b
    echo '{"jsonrpc":"2.0","method":"sum","params":[1,2,3],"id":1}' | wirecall send examples/hello.py
    """
    stdout, app = sys.stdout, app_of(target)

    async def to_app(app: App) -> int:
        async with app:
            async for line in InputLines(messages).each():
                with redirect_stdout(sys.stderr):
                    reply = await app.handle(line)
                if reply is not None:
                    print_raw(reply + b"\n", stdout)
        return Exit.DONE

    try:
        if app is not None:
            return run(to_app(app))
        return run((_to_address if target.kind == "url" else _to_process)(target, messages, way))
    except TimeoutError:
        what, why = "The server has not answered every message.", f"no answer within {way.timeout:g} s"
        next_step = f"give it more time: --timeout {way.timeout * 10:g}s"
        raise CliError(what, why, next_step, exit=Exit.UNKNOWN, type="timed_out") from None


async def _to_address(target: Target, messages: BinaryIO, way: Way) -> int:
    worst = Exit.DONE
    http = await http_client(way.address(target), way.headers)
    await http.open()
    media = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    try:
        async for line in InputLines(messages).each():
            async with asyncio.timeout(way.timeout), http.request("POST", line, media) as answer:
                body = await answer.read()
            if body.strip():
                print_raw(body.rstrip(b"\n") + b"\n")
            if answer.status >= 300:
                click.echo(f"HTTP {answer.status}", err=True)
                worst = Exit.AUTH if answer.status in (401, 403) else Exit.REMOTE
    except ConnectionLost as error:
        failure = failure_of(error)
        failure.next = "find out whether it took effect before you send it again"
        raise failure from None
    finally:
        await http.aclose()
    return worst


async def _to_process(target: Target, messages: BinaryIO, way: Way) -> int:
    """Write lines to its stdin, close it, and print its output until it ends."""
    # A pipe for stderr too: what a server prints there must not steer the terminal either.
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*target.command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        why = error.strerror or str(error)
        raise Unreachable(f"{target.command[0]} cannot be started.", why, "check the command") from None
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None

    async def copy(source: asyncio.StreamReader, *, err: bool) -> bytes:
        last = b""
        while data := await source.read(CHUNK):  # not by lines: a line may have any length
            last = data[-1:]
            print_raw(data, err=err)
        if not err and last not in (b"", b"\n"):
            click.echo()
        return last

    async def feed(sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):  # it has ended, or closed its stdin; its output is printed all the same
            async for line in InputLines(messages).each():
                sink.write(line + b"\n")
                await sink.drain()
            sink.close()

    feeding = asyncio.create_task(feed(process.stdin))
    output = asyncio.create_task(copy(process.stdout, err=False))
    errors = asyncio.create_task(copy(process.stderr, err=True))
    try:
        await asyncio.wait([feeding, output], return_when=asyncio.FIRST_COMPLETED)
        if output.done():
            output.result()  # raises if our own stdout is closed: the input may be endless, and its answers go nowhere
            with suppress(TimeoutError):  # it ends, or goes on reading without an output
                async with asyncio.timeout(LEAVE):
                    await process.wait()
        if process.returncode is None:
            await feeding
        async with asyncio.timeout(way.timeout):
            said = await output
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE):
                await process.wait()
        code = process.returncode
    finally:
        feeding.cancel()
        output.cancel()
        for end in (process.terminate, process.kill):
            if process.returncode is None:
                end()
                with suppress(TimeoutError):
                    async with asyncio.timeout(LEAVE):
                        await process.wait()
        # A pipe that is not read to its end outlives the event loop. A grandchild may keep one open.
        unread = asyncio.create_task(_drained(process.stdout))
        await asyncio.wait([unread, errors], timeout=LEAVE)
    if code and not said:
        why, next_step = f"it ended with {code}, and printed nothing on stdout", "run the command by itself to see more"
        raise Unreachable("The server ended without an answer.", why, next_step)
    return Exit.DONE


async def _drained(source: asyncio.StreamReader) -> None:
    while await source.read(CHUNK):
        pass


# --- lines ----------------------------------------------------------------------------------------------------------


class InputLines:
    """The lines of an input that are not blank, with their numbers from 1."""

    def __init__(self, source: BinaryIO, *, portable: bool = IS_PORTABLE) -> None:
        self._source = source
        self._number = 0
        self._numbered = self._of(source)
        self._come: deque[Numbered] = deque()
        self._begun: list[bytes] = []  # the parts of a line whose end has not come
        self._is_over = False
        try:
            mode = os.fstat(source.fileno()).st_mode
            is_pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or source.isatty()
        except (OSError, ValueError):  # bytes that only look like a file
            is_pipe = False
        # Whether the next line may not be written yet, and the event loop can wait for it.
        self._may_wait = is_pipe and not portable

    async def block(self, most: int) -> list[Numbered]:
        """Return the next lines, at most `most`; an empty list at the end of the input."""
        if not self._may_wait:
            with reading():
                return list(islice(self._numbered, most))
        loop = asyncio.get_running_loop()
        due = loop.time() + LINGER if self._come else None
        while len(self._come) < most and not self._is_over:
            try:
                async with asyncio.timeout_at(due):
                    await self._read()
            except TimeoutError:
                break
            due = due or (loop.time() + LINGER if self._come else None)
        return [self._come.popleft() for _ in range(min(most, len(self._come)))]

    async def each(self) -> AsyncIterator[bytes]:
        """Yield one line after the other, without numbers."""
        while block := await self.block(1):
            yield block[0][1]

    async def _read(self) -> None:
        """Wait for data and take the whole lines in it."""
        loop, handle = asyncio.get_running_loop(), self._source.fileno()
        ready = asyncio.Event()
        # The descriptor is shared with the parent process, so it must stay blocking: it is read only when data is there.
        loop.add_reader(handle, ready.set)
        try:
            with reading(blocks=False):
                await ready.wait()
        finally:
            loop.remove_reader(handle)
        data = os.read(handle, CHUNK)
        *whole, rest = data.split(b"\n")
        if whole:
            whole[0] = b"".join([*self._begun, whole[0]])
            self._begun = []
        self._begun.append(rest)
        if not data:
            self._is_over = True
            whole.append(b"".join(self._begun))
        self._come.extend(self._of(whole))

    def _of(self, lines: "BinaryIO | list[bytes]") -> Iterator[Numbered]:
        for line in lines:
            self._number += 1
            if line.strip():
                yield self._number, line.rstrip(b"\r\n")
