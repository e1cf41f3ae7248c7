"""Many messages, one per line.

`wirecall batch` makes a call of each line, `wirecall send` sends the lines untouched. `batch` reads
a call per line, of a method or of a tool of MCP, and prints an outcome per line, in the same order:

    {"method": "price", "params": {"sku": "tea"}}
    {"method": "charge", "params": {...}, "key": "k-7"}    with an idempotency key
    {"line": 1, "ok": true, "result": 450}                 with "id" if the line had one,
    {"line": 2, "ok": false, "error": {...}}               "key" and "replayed"

A line may use the result of an earlier one, with `refs` and `after` as in a JSON-RPC array:

    {"id": "order", "method": "find_order", "params": {"customer": "ada"}}
    {"method": "charge", "params": {"cents": 5}, "refs": {"/order": {"id": "order", "path": "/id"}}}

With `--stream` the outcomes are in the order in which they come.

A line that cannot be read fails alone. Lines are sent in arrays, or side by side where the protocol
has no arrays, one window at a time, so that a file of any length takes the memory of one window.
The writer of a pipe may pause, as `tail -f` does, and wants the answers during the pause: a window
ends when it is full, `LINGER` after its first line, or with the input. The event loop keeps running
while it waits for lines, because servers may ask their clients questions.
"""

import asyncio
import os
import shutil
import stat
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import redirect_stdout, suppress
from itertools import islice, takewhile
from typing import Any, BinaryIO, TypeAlias

import click
import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

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
    is_terminal,
    json_option,
    marked,
    print_json,
    print_raw,
    progress,
    reading,
    result_of,
    run,
    stated,
)
from wirecall.errors import (
    ConnectionLost,
    DependencyFailed,
    ReferenceInvalid,
    RpcError,
    UsageError,
    WirecallError,
    rebuilt,
)
from wirecall.files import IS_PORTABLE
from wirecall.logs import escaped
from wirecall.protocol.messages import Id, JsonObject, encode
from wirecall.server.references import read_references, write_pointer

# Lines in flight together.
WINDOW = 1000
# Seconds after which finished calls are printed while others are in flight.
TICK = 0.2
# Seconds from the first line of a window to its end.
LINGER = 0.2
# Bytes that are read at once.
CHUNK = 1 << 16

Numbered: TypeAlias = tuple[int, bytes]


class Line(Struct, frozen=True):
    """One line of the input. A JSON-RPC request is a line too; its other members are ignored."""

    method: str
    params: JsonObject | list[Any] | None = None
    key: str | None = None
    id: str | int | UnsetType | None = UNSET
    # The values that it takes from earlier lines: by place, the id of a line and a JSON Pointer.
    refs: Any = UNSET
    # The ids of lines that must have succeeded.
    after: Any = UNSET


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
        """Return the totals of the batch if it ends now."""
        text = f"{count_of(self.lines, 'line')} answered, {self.failed} failed"
        open = self.sent - self.lines
        if open:
            text += f"; {count_of(open, 'line')} may have run, or may still run"
        return text

    def exit(self) -> int:
        """Return the exit code: some failed, unless all failed for one reason outside the lines."""
        if self.failed == self.lines and self.exits in (
            {Exit.AUTH},
            {Exit.UNREACHABLE},
            {Exit.PROTOCOL},
        ):
            return self.exits.pop()
        if self.failed:
            return Exit.SOME_FAILED
        return Exit.DONE


@click.command("batch", cls=TargetCommand)
@target_argument
@click.argument("lines", type=input_file, default="-", metavar="[FILE|-]")
@click.option("--stream", is_flag=True, help="Print each outcome as soon as it comes.")
@ledger_option
@way_options
@json_option
def batch_command(
    target: Target, lines: BinaryIO, stream: bool, ledger: str | None, way: Way, out: Printer
) -> int:
    """Make the calls in FILE (or on standard input), one JSON object per line.

    The outcomes are on stdout, one JSON object per line, in the order of the input, with or without
    --json. With --stream they are in the order in which they come, and for people if stdout is a
    terminal and --json is not given.

    A line can use the result of an earlier line, which it names by its id.

    \b
    {"method": "price", "params": {"sku": "tea"}}
    {"method": "charge", "params": {"order": "7", "cents": 450}, "key": "order-7", "id": "paid"}
    {"method": "echo", "refs": {"/value": {"id": "paid", "path": "/order"}}, "after": ["paid"]}
    """
    totals = Totals()
    try:
        run(_batch(target, lines, ledger, way, totals, Output(stream, out.as_json)))
    except Interrupted as stopped:
        stopped.why = totals.answered()
        raise
    line = f"{count_of(totals.lines, 'line')}, {totals.failed} failed"
    if totals.replayed:
        line += f", {totals.replayed} replayed"
    out.note(line, "failed" if totals.failed else "ok")
    return totals.exit()


class Output:
    """How the outcomes are printed."""

    def __init__(self, stream: bool, as_json: bool) -> None:
        self.stream = stream
        # The parent process may have closed it.
        self._stdout = sys.stdout
        # Lines for people, which a bar must not overwrite.
        self.is_live = stream and not as_json and is_terminal(sys.stdout)

    def print(self, documents: list[JsonObject]) -> None:
        if self._stdout is None:
            return
        if not self.is_live:
            print_json(*documents, stdout=self._stdout)
            return
        for document in documents:
            click.echo(_live_line(document), self._stdout)


def _live_line(document: JsonObject) -> str:
    """Return an outcome as one line of a terminal."""
    mark = "failed"
    if document["ok"]:
        mark = "replayed" if "replayed" in document else "ok"
        shown = encode(document["result"]).decode()
    else:
        error = document["error"]
        if error["exit"] == Exit.UNKNOWN:
            mark = "unknown"
        shown = f"{error['message']} {error.get('why', '')}".rstrip()
    line = f"line {document['line']}"
    if document.get("id") is not None:
        line += f" ({document['id']})"
    line = escaped(f"{line}: {shown}")
    # The mark and a space are before it.
    width = shutil.get_terminal_size().columns - 8
    if len(line) > width:
        line = f"{line[: max(width, 10)]}..."
    return f"{marked(mark)} {line}"


async def _batch(
    target: Target,
    source: BinaryIO,
    ledger: str | None,
    way: Way,
    totals: Totals,
    output: Output,
) -> None:
    app = app_of(target, ledger)
    if app is not None:
        # A wrong ledger fails here once, not in every line. Only a requested one is opened: queries
        # need none.
        check_ledger(app.ledger_url)
        if ledger:
            await ready(app)
    lines = InputLines(source)
    count = None
    is_mcp = way.protocol_to(target) == "mcp"
    if source.seekable():  # the lines of a file can be counted before they are read
        begin = source.tell()
        count = sum(1 for line in source if line.strip())
        source.seek(begin)
    with progress(count, "Calls", hidden=source.isatty() or output.is_live) as advance:

        def report(documents: list[JsonObject]) -> None:
            totals.count(documents)
            output.print(documents)
            advance(len(documents))

        async with opened(target, way, app=app) as client:
            # A key allows a repetition if the server honours it, and keeps it longer than this
            # command takes.
            is_kept = app is None or not app.ledger_url.startswith("memory:")
            has_keys = is_kept and (not is_mcp or client.honours_keys)
            while block := await lines.block(WINDOW):
                totals.sent += len(block)
                sending = _Window(client, is_mcp, has_keys, report)
                if output.stream:
                    await sending.stream(block)
                else:
                    await sending.send(block)


class _Sent(Struct, eq=False):
    """A line and its call."""

    number: int
    line: Line | None
    # An entry of the batch, or a CliError.
    entry: Any


class _Window:
    """The lines that are sent together."""

    def __init__(
        self,
        client: Any,
        is_mcp: bool,
        has_keys: bool,
        report: Callable[[list[JsonObject]], None],
    ) -> None:
        self._client = client
        self._is_mcp = is_mcp
        self._has_keys = has_keys
        self._report = report
        self._lines: list[_Sent] = []
        # The calls by the ids of their lines, as JSON: 1 and "1" are two ids.
        self._named: dict[bytes, list[_Sent]] = {}

    async def send(self, block: list[Numbered]) -> None:
        """Make the calls of a block.

        Report finished calls while others are in flight, in the order of the lines.
        """
        sending = asyncio.create_task(self._send_all(block))
        reported = 0
        try:
            while not sending.done():
                await asyncio.wait([sending], timeout=TICK)
                settled = self._lines
                if not sending.done():
                    settled = list(takewhile(_is_final, self._lines))
                self._report([self._document(sent) for sent in settled[reported:]])
                reported = len(settled)
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_all(self, block: list[Numbered]) -> None:
        async with self._client.batch() as batch:
            self._add(batch, block)

    async def stream(self, block: list[Numbered]) -> None:
        """Make the calls of a block, and report each of them when its answer comes."""
        batch = self._client.batch()
        self._add(batch, block)
        wrong = [sent for sent in self._lines if isinstance(sent.entry, CliError)]
        self._report([self._document(sent) for sent in wrong])
        lines = {sent.entry: sent for sent in self._lines if not isinstance(sent.entry, CliError)}
        async for entry in batch.stream():
            self._report([self._document(lines[entry])])

    def _add(self, batch: Any, block: list[Numbered]) -> None:
        for number, text in block:
            line, entry = self._added(batch, text)
            sent = _Sent(number, line, entry)
            self._lines.append(sent)
            is_named = line is not None and line.id is not UNSET and line.id is not None
            if line is not None and is_named:
                self._named.setdefault(encode(line.id), []).append(sent)

    def _added(self, batch: Any, text: bytes) -> tuple[Line | None, Any]:
        """Add a line to the batch; return it with its entry, or with its error."""
        try:
            line = _decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return None, CliError(
                "This line is not a call.",
                str(error),
                '{"method": "...", "params": {...}}',
                type="line",
            )
        if self._is_mcp and isinstance(line.params, list):
            return line, CliError(
                f"{line.method}: params by position.",
                "tools of MCP take an object",
                "use names",
                type="line",
            )
        call = batch.call_tool if self._is_mcp else batch.call
        try:
            params, after = self._linked(line)
            return line, call(line.method, params, key=line.key, after=after)
        except (UsageError, RpcError) as error:
            return line, failure_of(error)

    def _linked(self, line: Line) -> tuple[Any, list[Any]]:
        """Return the params of a line with its references, and the calls that it waits for."""
        if line.refs is UNSET and line.after is UNSET:
            return line.params, []
        params = Raw(encode({} if line.params is None else line.params))
        links = read_references(line.refs, line.after, params)
        filled = line.params
        if links.refs:
            filled = msgspec.json.decode(params)
            for ref in links.refs:
                parent = filled
                for token in ref.place[:-1]:
                    parent = parent[int(token) if isinstance(parent, list) else token]
                parent[ref.place[-1]] = self._target(ref.target).ref(write_pointer(ref.path))
        return filled, [self._target(id) for id in links.after]

    def _target(self, id: Id) -> Any:
        """Return the call of the line with an id."""
        found = self._named.get(encode(id), [])
        if len(found) != 1:
            what = "no earlier line of this window has"
            if found:
                what = f"{len(found)} lines have"
            raise ReferenceInvalid(
                f"{what} the id {encode(id).decode()[:100]}; "
                f"a reference names one of the last {WINDOW} lines",
                ran="no",
            )
        if isinstance(found[0].entry, CliError):
            raise ReferenceInvalid(
                f"line {found[0].number}, which this one needs, is not a call", ran="no"
            )
        return found[0].entry

    def _document(self, sent: _Sent) -> JsonObject:
        """Return the outcome of a line as it is printed."""
        document: JsonObject = {"line": sent.number}
        if sent.line is not None and sent.line.id is not UNSET:
            document["id"] = sent.line.id
        entry = sent.entry
        if isinstance(entry, CliError):
            return {**document, "ok": False, "error": entry.document()}
        more = stated(key=entry.key, replayed=entry.replayed)
        if entry.error is None:
            return {**document, "ok": True, "result": result_of(entry.result()), **more}
        failure = failure_of(self._named_cause(entry.error))
        if failure.exit == Exit.UNKNOWN:
            failure.next = (
                "repeat the line if it only reads; else find out first whether it took effect"
            )
            if entry.key and self._has_keys:
                failure.next = f'repeat the line with "key": "{entry.key}": it takes effect once'
        return {**document, "ok": False, "error": failure.document(), **more}

    def _named_cause(self, error: WirecallError) -> WirecallError:
        """Return an error that names the line which caused it, and not the id of its message."""
        if not isinstance(error, DependencyFailed) or not isinstance(error.data, dict):
            return error
        for sent in self._lines:
            if not isinstance(sent.entry, CliError) and sent.entry.id == error.data.get("id"):
                data = {**error.data, "line": sent.number}
                data.pop("id")
                if sent.line is not None and sent.line.id is not UNSET:
                    data["id"] = sent.line.id
                return rebuilt(type(error), error.code, error.message, data)
        return error


def _is_final(sent: _Sent) -> bool:
    # The client may still retry a call that failed.
    return isinstance(sent.entry, CliError) or sent.entry.ok


# --- raw messages ---------------------------------------------------------------------------------

# Seconds for a process to exit after it closed its stdout.
LEAVE = 1.0


@click.command("send", cls=TargetCommand)
@target_argument
@click.argument("messages", type=input_file, default="-", metavar="[MESSAGES|-]")
@way_options
def send_command(target: Target, messages: BinaryIO, way: Way) -> int:
    """Send messages to TARGET unchanged, and print the answers.

    MESSAGES has one message per line; the default is standard input. A message without an answer
    prints nothing. An app in a file receives them as JSON-RPC.

    \b
    echo '{"jsonrpc":"2.0","method":"sum","params":[1,2,3],"id":1}' | wirecall send examples/hello.py
    """
    target.check_no_link("send")
    stdout = sys.stdout
    app = app_of(target)

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
        if target.kind == "url":
            return run(_to_address(target, messages, way))
        return run(_to_process(target, messages, way))
    except TimeoutError:
        what = "The server has not answered every message."
        why = f"no answer within {way.timeout:g} s"
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
    # A pipe for stderr too: a server must not send control characters to the terminal there either.
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *target.command, stdin=pipe, stdout=pipe, stderr=pipe
        )
    except OSError as error:
        why = error.strerror or str(error)
        raise Unreachable(
            f"{target.command[0]} cannot be started.", why, "check the command"
        ) from None
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
        # It has ended, or closed its stdin; its output is still printed.
        with suppress(ConnectionError):
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
            # Raises if our stdout is closed: the input may be endless, and its answers lost.
            output.result()
            with suppress(TimeoutError):  # it exits, or keeps reading without output
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
        # A pipe that is not read to its end outlives the event loop. A grandchild may keep one
        # open.
        unread = asyncio.create_task(_drained(process.stdout))
        await asyncio.wait([unread, errors], timeout=LEAVE)
    if code and not said:
        why = f"it ended with {code}, and printed nothing on stdout"
        next_step = "run the command alone to see more"
        raise Unreachable("The server ended without an answer.", why, next_step)
    return Exit.DONE


async def _drained(source: asyncio.StreamReader) -> None:
    while await source.read(CHUNK):
        pass


# --- lines ----------------------------------------------------------------------------------------


class InputLines:
    """The lines of an input that are not blank, with their numbers from 1."""

    def __init__(self, source: BinaryIO, *, portable: bool = IS_PORTABLE) -> None:
        self._source = source
        self._number = 0
        self._numbered = self._of(source)
        self._come: deque[Numbered] = deque()
        # The parts of an incomplete line.
        self._begun: list[bytes] = []
        self._is_over = False
        try:
            mode = os.fstat(source.fileno()).st_mode
            is_pipe = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or source.isatty()
        except (OSError, ValueError):  # bytes that only look like a file
            is_pipe = False
        # Whether the writer may not have written the next line yet, and the event loop can wait for
        # it.
        self._may_wait = is_pipe and not portable

    async def block(self, most: int) -> list[Numbered]:
        """Return the next lines, at most `most`; an empty list at the end of the input."""
        if not self._may_wait:
            with reading():
                return list(islice(self._numbered, most))
        loop = asyncio.get_running_loop()
        # When the block ends; None until its first line is there.
        due = None
        if self._come:
            due = loop.time() + LINGER
        while len(self._come) < most and not self._is_over:
            try:
                async with asyncio.timeout_at(due):
                    await self._read()
            except TimeoutError:
                break
            if due is None and self._come:
                due = loop.time() + LINGER
        return [self._come.popleft() for _ in range(min(most, len(self._come)))]

    async def each(self) -> AsyncIterator[bytes]:
        """Yield the lines one by one, without numbers."""
        while block := await self.block(1):
            yield block[0][1]

    async def _read(self) -> None:
        """Wait for data and take the whole lines in it."""
        loop = asyncio.get_running_loop()
        handle = self._source.fileno()
        ready = asyncio.Event()
        # The descriptor is shared with the parent process, so it must stay blocking: it is read
        # only when data is there.
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
