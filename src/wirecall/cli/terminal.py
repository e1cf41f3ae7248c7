"""The user's side of a verb: what it prints, reads and asks, and Ctrl-C.

1. The payload goes to stdout, everything else to stderr. `--json` puts exactly one document on
   stdout: `{"ok": true, "result": ...}`, or `{"ok": false, "error": ...}`, which the command itself
   prints when a verb raises. Without it the payload is for people: tables by rich if stdout is a
   terminal, else the same columns without colour and lines. Colour alone never carries a meaning.
2. Ctrl-C cancels the verb, so that its calls in flight are cancelled at their server too; a second
   one ends the process.
"""

import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, Protocol, TypeVar

import click
import msgspec
from msgspec import UNSET

from wirecall.cli.failures import CliError, Exit, Interrupted
from wirecall.logs import escaped, printable
from wirecall.protocol.messages import encode, write

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, TimerHandle

    from rich.console import RenderableType
    from rich.live import Live

T = TypeVar("T")

# Seconds.
SPINNER_AFTER = 1.0

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

    def result(
        self, value: object, show: Callable[[], None] | str | None = None, **more: object
    ) -> None:
        """Print the payload: for programs `value` and `more`, for people `show` or `value`."""
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
        if mark:
            text = f"{marked(mark)} {text}"
        click.echo(text, err=True)

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
    """Return rows of strings as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


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
    stream = stdout or (sys.stderr if err else sys.stdout)
    # As bytes unless it is a terminal: click would strip everything that looks like colour from a
    # string.
    shown: bytes | str = data
    if is_terminal(stream):
        shown = printable(data.decode("utf-8", "backslashreplace"))
    click.echo(shown, stdout, nl=False, err=err)


def print_json(*documents: object, stdout: IO[str] | None = None) -> None:
    """Print documents, one per line, in one write:

    `click.echo` for each of a batch took as long as its calls.
    """
    # Their strings cannot control a terminal: for a program, an escape of JSON is the same
    # character.
    lines = [f"{printable(encode(document).decode())}\n" for document in documents]
    print_raw("".join(lines).encode(), stdout)


def print_read_json(documents: Sequence[object]) -> None:
    """Print documents that were read from JSON, one per line.

    `print_json` looks for NaN in each, which takes ten times as long.
    """
    lines = [f"{printable(write(document).decode())}\n" for document in documents]
    print_raw("".join(lines).encode())


def print_failure(failure: CliError, as_json: bool) -> None:
    """Print the error that ends the command; on stderr if stdout cannot be written."""
    if as_json:
        with suppress(OSError):
            print_json({"ok": False, "error": failure.document()})
            return
    click.echo(f"{marked('failed')} {printable(failure.text())}", err=True)


def stated(**members: Any) -> dict[str, Any]:
    """Return the members of a document that have a value."""
    return {name: value for name, value in members.items() if value}


def count_of(number: int, noun: str) -> str:
    """Return a number with its noun, which gets an "s" unless the number is 1."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {noun}s"


def pretty(value: object) -> str:
    """Return a value for people: a string unchanged, anything else as JSON.

    JSON that exceeds a line is indented.
    """
    if isinstance(value, str):
        return value
    line = encode(value).decode()
    if len(line) <= 100:
        return line
    return msgspec.json.format(line, indent=2)


def result_of(value: Any) -> Any:
    """Return a result as JSON.

    For a tool: its structured content, else its text, else its content blocks.
    """
    if not hasattr(value, "structured"):
        return value
    found = value.structured
    if found is not UNSET:
        if isinstance(found, dict) and list(found) == ["result"]:
            return found["result"]  # before 2026-07-28 it must be an object
        return found
    if {type(item).__name__ for item in value.content} <= {"Text"}:
        return value.text
    return [item.on_wire() for item in value.content]


def readable(value: Any) -> str:
    """Return a result for people, without binary data."""
    if not hasattr(value, "structured") or value.structured is not UNSET:
        return pretty(result_of(value))
    return "\n".join(_readable_item(item) for item in value.content)


def _readable_item(item: Any) -> str:
    if hasattr(item, "mime_type") and isinstance(getattr(item, "data", None), bytes):
        return f"[{item.mime_type}, {len(item.data)} bytes]"
    if getattr(item, "text", None) is not None:
        return str(item.text)
    return pretty(item.on_wire())


def marked(name: str) -> str:
    """Return a mark, coloured if stderr has colour."""
    sign, plain, colour = _MARKS[name]
    try:
        # Stderr is None if it was closed.
        sign.encode(getattr(sys.stderr, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        sign = plain
    # NO_COLOR (no-color.org): present and not empty turns colour off.
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    if is_plain or not is_terminal(sys.stderr):
        return sign
    return click.style(sign, fg=colour)


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


def ask_text(question: str) -> str | None:
    """Ask for a line on the terminal; return None without a terminal, or after Ctrl-D."""
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        return None
    try:
        return str(click.prompt(escaped(question), err=True))
    except click.Abort:
        click.echo(err=True)
        return None


class Advance(Protocol):
    """Moves a bar by a number of steps, and names the next one beside it."""

    def __call__(self, count: int, what: str = "", /) -> None: ...


@contextmanager
def progress(total: int | None, what: str, *, hidden: bool = False) -> Iterator[Advance]:
    """Show a bar on stderr while the block runs; the block calls `advance(n)`.

    Show nothing if stderr is not a terminal.
    """
    if hidden or not is_terminal(sys.stderr):
        yield lambda _count, _what="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count, step="": bar.update(task, advance=count, description=step or None)


class Spinner:
    """One line on the terminal for a wait that takes longer than `SPINNER_AFTER`.

    It shows nothing unless stderr is a terminal. `describe` is called ten times a second, in the
    spinner's thread.
    """

    def __init__(self, describe: Callable[[], str]) -> None:
        self._describe = describe
        self._timer: TimerHandle | None = None
        self._live: Live | None = None

    def __enter__(self) -> "Spinner":
        # Late: a mistake on the command line is reported without it.
        from asyncio import get_running_loop

        if is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb":
            self._timer = get_running_loop().call_later(SPINNER_AFTER, self._show)
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._live is not None:
            self._live.stop()
            self._live = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the line while something else is written to the terminal."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def _show(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner as Sign
        from rich.text import Text

        sign = Sign("line")

        def line() -> Sign:
            # Never markup: servers write it.
            sign.update(text=Text(self._describe(), overflow="ellipsis", no_wrap=True))
            return sign

        self._live = Live(
            get_renderable=line,
            console=Console(stderr=True),
            transient=True,
            refresh_per_second=10,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()


class LiveTable:
    """A table on the terminal that is drawn again when its rows change, with a line below it."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._rows: Sequence[Sequence[str]] = ()
        self._line = ""
        self._live: Live | None = None

    def __enter__(self) -> "LiveTable":
        from rich.live import Live

        self._live = Live(
            get_renderable=self._drawn,
            refresh_per_second=10,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def height(self) -> int:
        """The number of rows that fit."""
        import shutil

        return max(3, shutil.get_terminal_size().lines - 4)

    def show(self, rows: Sequence[Sequence[str]], line: str) -> None:
        """Replace the rows and the line."""
        self._rows = rows
        self._line = line

    def _drawn(self) -> "RenderableType":
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
        for column in self._columns:
            table.add_column(column, overflow="ellipsis", no_wrap=True)
        for row in self._rows:
            table.add_row(*(Text(escaped(cell)) for cell in row))  # never markup
        return Group(table, Text(escaped(self._line), style="dim"))


# --- input ----------------------------------------------------------------------------------------


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
        why = error.strerror or str(error)
        next_step = "give the path of a file, or - for standard input"
        raise CliError(f"{path} cannot be read.", why, next_step) from None


# --- Ctrl-C ---------------------------------------------------------------------------------------


class _Now:
    """The state of the command when Ctrl-C arrives."""

    # Whether it waits for its user: then no call is in flight that Ctrl-C could cancel.
    waits: Literal["", "blocked", "idle"] = ""
    # Whether Ctrl-C was pressed before.
    asked = False


@contextmanager
def reading(*, blocks: bool = True) -> Iterator[None]:
    """Mark a wait for the user, which Ctrl-C ends.

    A read that blocks the event loop is ended at once.
    """
    from asyncio import CancelledError

    _Now.waits = "idle"
    if blocks:
        _Now.waits = "blocked"
    try:
        if _Now.asked:  # the loop has not cancelled this task yet
            raise CancelledError
        yield
    finally:
        _Now.waits = ""


def run(
    work: Coroutine[Any, Any, T], *, new_loop: "Callable[[], AbstractEventLoop] | None" = None
) -> T:
    """Run a coroutine, in a loop that `new_loop` makes if it is given.

    Ctrl-C cancels it, so that calls in flight are cancelled at their server too.
    """
    import asyncio  # late: a mistake on the command line is reported without it

    from wirecall.transports.child import kill_all

    _Now.asked = False

    async def guarded() -> T:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None

        def interrupt(*_: object) -> None:
            if _Now.asked:
                kill_all()  # the server processes that this command started
                os._exit(Exit.INTERRUPTED)
            _Now.asked = True
            # The empty line is for the ^C that a terminal shows.
            line = ""
            if not _Now.waits:
                line = "\nCancelling; Ctrl-C again stops at once."
            print(line, file=sys.stderr, flush=True)
            if _Now.waits == "blocked":
                raise asyncio.CancelledError
            loop.call_soon_threadsafe(task.cancel)

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            return await work
        finally:
            signal.signal(signal.SIGINT, before)

    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(guarded())
    except asyncio.CancelledError:
        raise Interrupted from None
