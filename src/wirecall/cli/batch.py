"""`wirecall batch`: a call per line in, an outcome per line out, in the same order.

    {"method": "price", "params": {"sku": "tea"}}          a method, or a tool of MCP with its arguments
    {"method": "charge", "params": {...}, "key": "k-7"}    with an idempotency key
    {"line": 1, "ok": true, "result": 450}                 an outcome; with "id" if the line had one, "key", "replayed"
    {"line": 2, "ok": false, "error": {...}}

A line that cannot be read fails alone. Lines are sent in arrays, or side by side where the protocol has no arrays, one
window at a time, so that a file of any length takes the memory of one window. From a pipe, a window is sent before it is
full.
"""

import asyncio
import sys
from collections.abc import Callable
from itertools import takewhile
from typing import Any, BinaryIO

import click
import msgspec
from msgspec import UNSET, Struct, UnsetType

from wirecall.cli.connecting import Way, opened, way_options
from wirecall.cli.failures import CliError, Exit, Interrupted, failure_of
from wirecall.cli.input import Input, InputLines, Numbered, run
from wirecall.cli.output import Printer, count_of, json_option, print_lines, progress, result_of
from wirecall.cli.stores import check_ledger, ledger_option, ready
from wirecall.cli.targets import Target, TargetCommand, app_of, target_argument
from wirecall.errors import UsageError
from wirecall.protocol.messages import JsonObject

WINDOW = 1000  # lines in flight together
TICK = 0.2  # seconds after which finished calls are printed while others are in flight


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
@click.argument("lines", type=Input(), default="-", metavar="[FILE|-]")
@ledger_option
@way_options
@json_option
def command(target: Target, lines: BinaryIO, ledger: str | None, way: Way, out: Printer) -> int:
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
            print_lines(documents, stdout)
            advance(len(documents))

        async with opened(target, way, app=app) as client:
            while block := await lines.block(WINDOW):
                totals.sent += len(block)
                await _send(client, is_mcp, block, report)


async def _send(client: Any, is_mcp: bool, block: list[Numbered], report: Callable[[list[JsonObject]], None]) -> None:
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
            report([_document(*entry) for entry in settled[reported:]])
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


def _document(number: int, line: Line | None, entry: Any) -> JsonObject:
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
        failure.next = safe if entry.key else "repeat the line if it only reads; else find out first whether it took effect"
    return {"line": number, **id, "ok": False, "error": failure.document(), **more}
