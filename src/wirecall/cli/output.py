"""How a verb prints: its payload on stdout, everything else on stderr.

`--json` puts exactly one document on stdout: `{"ok": true, "result": ...}`, or `{"ok": false, "error": ...}`, which the
command itself prints when a verb raises. Without it the payload is for people: tables by rich where stdout is a terminal,
the same columns without colour and lines where it is not. Colour alone never carries a meaning.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO

import click
import msgspec
from msgspec import UNSET

from wirecall.cli.failures import CliError, Exit
from wirecall.logs import escaped, printable
from wirecall.protocol.messages import encode

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
            with _writing():
                show()
        else:
            text = pretty(value) if show is None else show
            # Bytes unless stdout is a terminal: click would strip everything from a text that looks like colour.
            with _writing():
                click.echo(printable(text) if is_terminal(sys.stdout) else text.encode("utf-8", "backslashreplace"))

    def note(self, text: str, mark: str = "") -> None:
        """Print a line beside the payload."""
        text = escaped(text)
        click.echo(f"{marked(mark)} {text}" if mark else text, err=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows for people, on stdout."""
        rows = [[escaped(cell) for cell in row] for row in rows]
        if not is_terminal(sys.stdout):
            widths = [max(len(row[at]) for row in (columns, *rows)) for at in range(len(columns))]
            for row in (columns, *rows):
                click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
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


# The option `--json`, as the parameter `out`, a `Printer`.
json_option = click.option(
    "--json",
    "out",
    is_flag=True,
    callback=lambda _context, _option, as_json: Printer(as_json),
    help="Print one JSON document, also on failure.",
)


class Unwritten(CliError):
    """Stdout cannot be written, for example because the disk is full. A closed pipe (EPIPE) is not reported."""

    def __init__(self, error: OSError) -> None:
        why = error.strerror or str(error)
        super().__init__("The output cannot be written.", why, "write it elsewhere", exit=Exit.FAULT, type="output")


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise Unwritten(error) from error


def json_line(document: object) -> bytes:
    """Return a document on one line. Its texts steer no terminal: for a program, an escape of JSON is the same character."""
    return printable(encode(document).decode()).encode()


def print_json(document: object, stdout: IO[str] | None = None) -> None:
    """Print one document on one line."""
    with _writing():
        click.echo(json_line(document), stdout)


def print_raw(data: bytes, stdout: IO[str] | None = None, *, err: bool = False) -> None:
    """Print bytes of a server unchanged; on a terminal, escape control characters."""
    stream = stdout or (sys.stderr if err else sys.stdout)
    with _writing():
        text = printable(data.decode("utf-8", "backslashreplace")) if is_terminal(stream) else data
        click.echo(text, stdout, nl=False, err=err)


def print_lines(documents: Sequence[object], stdout: TextIO | None) -> None:
    """Print many documents, one per line, in one write: `click.echo` for each took as long as the calls."""
    if stdout is None:  # the parent process closed it
        return
    with _writing():
        stdout.flush()
        stdout.buffer.write(b"".join([json_line(document) + b"\n" for document in documents]))
        stdout.buffer.flush()


def print_failure(failure: CliError, as_json: bool) -> None:
    """Print the error that ends the command; on stderr if stdout cannot be written."""
    if as_json:
        with suppress(Unwritten):
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
