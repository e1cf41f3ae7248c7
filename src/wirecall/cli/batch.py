"""`wirecall batch`: a call per line in, an outcome per line out, in the same order.

    {"method": "price", "params": {"sku": "tea"}}          a method, or a tool of MCP with its arguments
    {"method": "charge", "params": {...}, "key": "k-7"}    with an idempotency key
    {"line": 1, "ok": true, "result": 450}                 what comes out; with "id" if the line had one, "key", "replayed"
    {"line": 2, "ok": false, "error": {...}}

A line that cannot be read fails alone. Lines are sent in arrays, or side by side where the protocol has none, a window of
them at a time, so that a file of any length takes the memory of one window. Of a pipe nobody waits for a window to be full.
"""

import asyncio
import sys
from collections.abc import Callable
from itertools import takewhile
from typing import Any, BinaryIO

import click
import msgspec
from msgspec import UNSET, Struct, UnsetType

from wirecall.cli.call import result_of
from wirecall.cli.connecting import Interrupted, Way, opened, run, way_options
from wirecall.cli.failures import Exit, Failure, failure_of
from wirecall.cli.lines import Lines, Numbered
from wirecall.cli.output import Input, Output, count_of, json_option, print_lines, progress
from wirecall.cli.settings import app_of, ledger_option
from wirecall.cli.targets import Target, TargetCommand, target_argument
from wirecall.errors import UsageError

WINDOW = 1000  # lines that are under way together
TICK = 0.2  # seconds after which those that are answered are told, while others are not


class Line(Struct, frozen=True):
    """One line of the input. JSON-RPC's own requests are lines too; their other members are let go."""

    method: str
    params: dict[str, Any] | list[Any] | None = None
    key: str | None = None
    id: str | int | UnsetType | None = UNSET


_decode = msgspec.json.Decoder(Line).decode


class Totals:
    """What became of all lines."""

    def __init__(self) -> None:
        self.sent = self.lines = self.failed = self.replayed = 0
        self.exits: set[int] = set()

    def count(self, documents: list[dict[str, Any]]) -> None:
        failed = [document["error"]["exit"] for document in documents if not document["ok"]]
        self.lines += len(documents)
        self.failed += len(failed)
        self.replayed += sum(1 for document in documents if "replayed" in document)
        self.exits.update(failed)

    def answered(self) -> str:
        """Where it stands if it is left now."""
        open = self.sent - self.lines
        left = f"; {count_of(open, 'line')} may have run, or may still" if open else ""
        return f"{count_of(self.lines, 'line')} answered, {self.failed} failed{left}"

    def exit(self) -> int:
        """Some failed, unless all failed for one reason that no line is to blame for."""
        if self.failed == self.lines and self.exits in ({Exit.AUTH}, {Exit.UNREACHABLE}, {Exit.PROTOCOL}):
            return self.exits.pop()
        return Exit.SOME_FAILED if self.failed else Exit.DONE


@click.command("batch", cls=TargetCommand)
@target_argument()
@click.argument("lines", type=Input(), default="-", metavar="[FILE|-]")
@ledger_option
@way_options
@json_option
def command(target: Target, lines: BinaryIO, ledger: str | None, way: Way, as_json: bool) -> int:
    """Make the calls in FILE (or on standard input), one JSON object per line.

    The outcomes are on stdout, one JSON object per line, in the order of the input, with or without --json.

    \b
    {"method": "price", "params": {"sku": "tea"}}
    {"method": "charge", "params": {"order": "7", "cents": 450}, "key": "order-7"}
    """
    out, totals = Output(as_json), Totals()
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
        from wirecall.cli.ledgers import check_ledger, ready

        check_ledger(app.ledger_url)
        if ledger:
            await ready(app)
    stdout, lines = sys.stdout, Lines(source)
    is_mcp = way.protocol_to(target) == "mcp"
    with progress(_count(source), "Calls", hidden=source.isatty()) as advance:

        def tell(documents: list[dict[str, Any]]) -> None:
            totals.count(documents)
            print_lines(documents, stdout)
            advance(len(documents))

        async with opened(target, way, app=app) as client:
            while block := await lines.block(WINDOW):
                totals.sent += len(block)
                await _made(client, is_mcp, block, tell)


def _count(lines: BinaryIO) -> int | None:
    """How many there are, if that can be known before they are read."""
    if not lines.seekable():
        return None
    begin = lines.tell()
    total = sum(1 for line in lines if line.strip())
    lines.seek(begin)
    return total


async def _made(client: Any, is_mcp: bool, block: list[Numbered], tell: Callable[[list[dict[str, Any]]], None]) -> None:
    """Make the calls of a block. What is answered is told while others are under way, in the order of the lines."""
    entries: list[tuple[int, Line | None, Any]] = []

    async def send() -> None:
        async with client.batch() as batch:
            entries.extend((number, *_added(batch, is_mcp, text)) for number, text in block)

    sending, told = asyncio.create_task(send()), 0
    try:
        while not sending.done():
            await asyncio.wait([sending], timeout=TICK)
            settled = entries if sending.done() else list(takewhile(_is_final, entries))
            tell([_document(*entry) for entry in settled[told:]])
            told = len(settled)
        await sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


def _is_final(entry: tuple[int, Line | None, Any]) -> bool:
    """Whether nothing more becomes of it: a call that failed may yet be repeated by the client."""
    return isinstance(entry[2], Failure) or entry[2].ok


def _added(batch: Any, is_mcp: bool, text: bytes) -> tuple[Line | None, Any]:
    """A line and its entry in the batch, or the failure that it is."""
    try:
        line = _decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return None, Failure("This line is not a call.", str(error), '{"method": "...", "params": {...}}', type="line")
    if is_mcp and isinstance(line.params, list):
        return line, Failure(f"{line.method}: params by position.", "tools of MCP take an object", "use names", type="line")
    try:
        return line, (batch.call_tool if is_mcp else batch.call)(line.method, line.params, key=line.key)
    except UsageError as error:
        return line, failure_of(error)


def _document(number: int, line: Line | None, entry: Any) -> dict[str, Any]:
    id = {} if line is None or line.id is UNSET else {"id": line.id}
    if isinstance(entry, Failure):
        return {"line": number, **id, "ok": False, "error": entry.document()}
    key = {"key": entry.key} if entry.key else {}
    replayed = {"replayed": True} if entry.replayed else {}
    if entry.error is not None:
        return {"line": number, **id, "ok": False, "error": _failed(entry).document(), **key, **replayed}
    return {"line": number, **id, "ok": True, "result": result_of(entry.result()), **key, **replayed}


def _failed(entry: Any) -> Failure:
    failure = failure_of(entry.error)
    if failure.exit_code == Exit.UNKNOWN:
        safe = f'repeat the line with "key": "{entry.key}": it takes effect once'
        failure.next = safe if entry.key else "repeat the line if it only reads; else find out first whether it took effect"
    return failure
