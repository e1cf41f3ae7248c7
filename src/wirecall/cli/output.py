"""What a verb prints: its payload on stdout, everything else on stderr.

`--json` puts exactly one document on stdout: `{"ok": true, "result": ...}`, or `{"ok": false, "error": ...}`, which the
command itself prints when a verb raises. Without it the payload is for people: tables by rich where stdout is a terminal,
the same columns without colour and lines where it is not. No mark means anything by its colour alone.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, BinaryIO, TextIO

import click

from wirecall.logs import escaped, printable
from wirecall.protocol.messages import encode

# Marks, and what stands for them where the terminal has no Unicode.
_MARKS = {"ok": ("✓", "ok"), "failed": ("✗", "x"), "replayed": ("↻", "replay"), "unknown": ("?", "?"), "warning": ("!", "!")}
_COLOURS = {"ok": "green", "failed": "red", "replayed": "cyan", "unknown": "yellow", "warning": "yellow"}


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option `--json`, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document, also on failure.")(function)


class Output:
    """The way of one verb to its user."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    def result(self, value: Any, show: Callable[[], None] | str | None = None, **more: Any) -> None:
        """The payload: `value` and further members for programs; for people what `show` is or prints, else the value."""
        if self.as_json:
            print_json({"ok": True, "result": value, **more})
        elif callable(show):
            with _writing():
                show()
        else:
            text = pretty(value) if show is None else show
            # Bytes where it is no terminal: of a text, click would take away what looks like colour.
            with _writing():
                click.echo(printable(text) if is_terminal(sys.stdout) else text.encode("utf-8", "backslashreplace"))

    def note(self, text: str, mark: str = "") -> None:
        """A line beside the payload."""
        text = escaped(text)
        click.echo(f"{marked(mark)} {text}" if mark else text, err=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Rows for people, on stdout."""
        rows = [[escaped(cell) for cell in row] for row in rows]
        if is_terminal(sys.stdout):
            _rich_table(columns, rows)
            return
        widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
        for row in (columns, *rows):
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


class Unwritten(click.ClickException):
    """Stdout takes no more: a full disk, say. That nobody reads it any more (EPIPE) is not told: nobody listens."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror or str(error))


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritten(error) from error


def print_json(document: Any, stdout: IO[str] | None = None) -> None:
    """One document on one line, to stdout or to what it was."""
    with _writing():
        click.echo(encode(document), stdout)


def print_raw(data: bytes, stdout: IO[str] | None = None, *, err: bool = False) -> None:
    """Print bytes of a server as they are; for a terminal, escape what would steer it."""
    stream = stdout or (sys.stderr if err else sys.stdout)
    with _writing():
        text = printable(data.decode("utf-8", "backslashreplace")) if is_terminal(stream) else data
        click.echo(text, stdout, nl=False, err=err)


def print_lines(documents: Sequence[Any], stdout: TextIO | None) -> None:
    """Many documents, one per line, in one write: `click.echo` for each took as long as the calls."""
    if stdout is None:  # closed by who started us
        return
    with _writing():
        stdout.flush()
        stdout.buffer.write(b"".join([encode(document) + b"\n" for document in documents]))
        stdout.buffer.flush()


def print_failure(document: dict[str, Any], text: str, as_json: bool) -> None:
    """How the command tells what went wrong; on stderr if stdout takes no more."""
    if as_json:
        with suppress(Unwritten):
            print_json({"ok": False, "error": document})
            return
    click.echo(f"{marked('failed')} {printable(text)}", err=True)


def count_of(number: int, noun: str) -> str:
    """A number and what is counted."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def pretty(value: Any) -> str:
    """A value for people: text as it is, anything else as JSON, indented if it does not fit a line."""
    if isinstance(value, str):
        return value
    line = encode(value).decode()
    if len(line) <= 100:
        return line
    import msgspec

    return msgspec.json.format(line, indent=2)


def marked(name: str) -> str:
    """A mark, in colour where there is some."""
    try:
        sign = _MARKS[name][0]
        sign.encode(getattr(sys.stderr, "encoding", None) or "ascii")  # there is no stderr if it was closed
    except UnicodeEncodeError:
        sign = _MARKS[name][1]
    return click.style(sign, fg=_COLOURS[name]) if has_colour(sys.stderr) else sign


def stdin() -> BinaryIO:
    """What comes on standard input, which may have been closed by who started us."""
    if sys.stdin is None:
        raise click.UsageError("There is no standard input: it is closed.")
    return sys.stdin.buffer


class Input(click.File):
    """A file of bytes to read, or `-` for standard input: the `type=` of an argument."""

    def __init__(self) -> None:
        super().__init__("rb")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return stdin() if value == "-" else super().convert(value, param, ctx)


def is_terminal(stream: IO[Any] | None) -> bool:
    return stream is not None and stream.isatty()


def has_colour(stream: IO[Any] | None) -> bool:
    """NO_COLOR (no-color.org): present and not empty means no."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def ask(question: str) -> bool | None:
    """A question on the terminal; None where there is nobody to ask. Who leaves (Ctrl-D, Ctrl-C) says no."""
    if not (is_terminal(sys.stdin) and is_terminal(sys.stderr)):
        return None
    try:
        return click.confirm(question, err=True)
    except click.Abort:
        click.echo(err=True)
        return False


@contextmanager
def progress(total: int | None, what: str, *, hidden: bool = False) -> "Iterator[Callable[[int], None]]":
    """A bar on stderr while something long runs; the block calls `advance(n)`. Nothing if stderr is no terminal."""
    if hidden or not is_terminal(sys.stderr):
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # never markup: names come from servers
    Console().print(table)
