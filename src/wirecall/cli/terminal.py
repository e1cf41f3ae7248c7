"""The user's side of a verb: what it prints, reads and asks, and Ctrl-C.

1. The payload goes to stdout, everything else to stderr. `--json` puts exactly one document on stdout: `{"ok": true,
   "result": ...}`, or `{"ok": false, "error": ...}`, which the command itself prints when a verb raises. Without it the
   payload is for people: tables by rich where stdout is a terminal, the same columns without colour and lines where it is
   not. Colour alone never carries a meaning.
2. Ctrl-C cancels the verb, so that its calls in flight are cancelled at their server too; a second one ends the process.
"""

import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, BinaryIO, Literal, TypeVar

import click
import msgspec
from msgspec import UNSET

from wirecall.cli.failures import CliError, Exit, Interrupted
from wirecall.logs import escaped, printable
from wirecall.protocol.messages import encode

T = TypeVar("T")

# Marks, their replacements on a terminal without Unicode, and their colours.
_MARKS = {
    "ok": ("✓", "ok", "green"),
    "failed": ("✗", "x", "red"),
    "replayed": ("↻", "replay", "cyan"),
    "unknown": ("?", "?", "yellow"),
    "warning": ("!", "!", "yellow"),
}


class Printer:
    """Prints the result and the notes of one verb."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    def result(self, value: object, show: Callable[[], None] | str | None = None, **more: object) -> None:
        """Print the payload: for programs `value` and `more`; for people `show` (a text or a function), else the value."""
        if self.as_json:
            print_json({"ok": True, "result": value, **more})
        elif callable(show):
            show()
        else:
            text = pretty(value) if show is None else show
            print_raw(f"{text}\n".encode("utf-8", "backslashreplace"))

    def note(self, text: str, mark: str = "") -> None:
        """Print a line beside the payload."""
        text = escaped(text)
        click.echo(f"{marked(mark)} {text}" if mark else text, err=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows for people, on stdout."""
        rows = [[escaped(cell) for cell in row] for row in rows]
        if not is_terminal(sys.stdout):
            for line in aligned([columns, *rows]):
                click.echo(line)
            return
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))  # never markup: names come from servers
        Console().print(table)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of texts as lines, with their columns below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


# The option `--json`, as the parameter `out`, a `Printer`.
json_option = click.option(
    "--json",
    "out",
    is_flag=True,
    callback=lambda _context, _option, as_json: Printer(as_json),
    help="Print one JSON document, also on failure.",
)


def print_raw(data: bytes, stdout: IO[str] | None = None, *, err: bool = False) -> None:
    """Print bytes unchanged; on a terminal, escape control characters."""
    # As bytes unless it is a terminal: click would strip everything from a text that looks like colour.
    shown = is_terminal(stdout or (sys.stderr if err else sys.stdout))
    click.echo(printable(data.decode("utf-8", "backslashreplace")) if shown else data, stdout, nl=False, err=err)


def print_json(*documents: object, stdout: IO[str] | None = None) -> None:
    """Print documents, one per line, in one write: `click.echo` for each of a batch took as long as its calls."""
    # Their texts steer no terminal: for a program, an escape of JSON is the same character.
    lines = [f"{printable(encode(document).decode())}\n" for document in documents]
    print_raw("".join(lines).encode(), stdout)


def print_failure(failure: CliError, as_json: bool) -> None:
    """Print the error that ends the command; on stderr if stdout cannot be written."""
    if as_json:
        with suppress(OSError):
            print_json({"ok": False, "error": failure.document()})
            return
    click.echo(f"{marked('failed')} {printable(failure.text())}", err=True)


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, which gets an "s" unless the number is 1."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def pretty(value: object) -> str:
    """Return a value for people: a text unchanged, anything else as JSON, indented if it does not fit on a line."""
    if isinstance(value, str):
        return value
    line = encode(value).decode()
    if len(line) <= 100:
        return line
    return msgspec.json.format(line, indent=2)


def result_of(value: Any) -> Any:
    """Return a result as JSON. For a tool: its structured content, else its text, else its content blocks."""
    if not hasattr(value, "structured"):
        return value
    if value.structured is not UNSET:
        only = isinstance(value.structured, dict) and list(value.structured) == ["result"]
        return value.structured["result"] if only else value.structured  # before 2026-07-28 it must be an object
    kinds = {type(item).__name__ for item in value.content}
    return value.text if kinds <= {"Text"} else [item.on_wire() for item in value.content]


def readable(value: Any) -> str:
    """Return a result for people, without binary data."""
    if not hasattr(value, "structured") or value.structured is not UNSET:
        return pretty(result_of(value))
    lines = []
    for item in value.content:
        if hasattr(item, "mime_type") and isinstance(getattr(item, "data", None), bytes):
            lines.append(f"[{item.mime_type}, {len(item.data)} bytes]")
        else:
            lines.append(item.text if getattr(item, "text", None) is not None else pretty(item.on_wire()))
    return "\n".join(lines)


def marked(name: str) -> str:
    """Return a mark, coloured if stderr has colour."""
    sign, plain, colour = _MARKS[name]
    try:
        sign.encode(getattr(sys.stderr, "encoding", None) or "ascii")  # stderr is None if it was closed
    except UnicodeEncodeError:
        sign = plain
    # NO_COLOR (no-color.org): present and not empty turns colour off.
    coloured = is_terminal(sys.stderr) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return click.style(sign, fg=colour) if coloured else sign


def is_terminal(stream: IO[str] | IO[bytes] | None) -> bool:
    return stream is not None and stream.isatty()


def ask(question: str) -> bool | None:
    """Ask a question on the terminal; return None without a terminal. Ctrl-D and Ctrl-C mean no."""
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        return None
    try:
        return click.confirm(escaped(question), err=True)
    except click.Abort:
        click.echo(err=True)
        return False


@contextmanager
def progress(total: int | None, what: str, *, hidden: bool = False) -> "Iterator[Callable[[int], None]]":
    """Show a bar on stderr while the block runs; the block calls `advance(n)`. Show nothing if stderr is not a terminal."""
    if hidden or not is_terminal(sys.stderr):
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


# --- input ----------------------------------------------------------------------------------------------------------


def stdin() -> BinaryIO:
    """Return standard input, unless the parent process closed it."""
    if sys.stdin is None:
        raise click.UsageError("There is no standard input: it is closed.")
    return sys.stdin.buffer


def input_file(path: str) -> BinaryIO:
    """Open a file to read, or take standard input for `-`: the `type=` of an argument."""
    if path == "-":
        return stdin()
    try:
        return click.get_current_context().with_resource(open(path, "rb"))
    except OSError as error:
        why, next_step = error.strerror or str(error), "give the path of a file, or - for standard input"
        raise CliError(f"{path} cannot be read.", why, next_step) from None


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


class _Now:
    """The state of the command when Ctrl-C arrives."""

    waits: Literal["", "blocked", "idle"] = ""  # for its user: no call is in flight that Ctrl-C could cancel
    asked = False  # Ctrl-C was pressed before


@contextmanager
def reading(*, blocks: bool = True) -> Iterator[None]:
    """Mark a wait for the user, which Ctrl-C ends. A read that blocks the event loop is ended at once."""
    from asyncio import CancelledError

    _Now.waits = "blocked" if blocks else "idle"
    try:
        if _Now.asked:  # the loop has not cancelled this task yet
            raise CancelledError
        yield
    finally:
        _Now.waits = ""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine. Ctrl-C cancels it, so that calls in flight are cancelled at their server too."""
    import asyncio  # late: a mistake on the command line is reported without it

    from wirecall.transports.child import kill_all

    _Now.asked = False

    async def guarded() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(*_: object) -> None:
            if _Now.asked:
                kill_all()  # the server processes that this command started
                os._exit(Exit.INTERRUPTED)
            _Now.asked = True
            # The empty line is for the ^C that a terminal shows.
            print("" if _Now.waits else "\nCancelling; Ctrl-C again stops at once.", file=sys.stderr, flush=True)
            if _Now.waits == "blocked":
                raise asyncio.CancelledError
            loop.call_soon_threadsafe(task.cancel)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            return await work
        finally:
            signal.signal(signal.SIGINT, before)

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise Interrupted from None
