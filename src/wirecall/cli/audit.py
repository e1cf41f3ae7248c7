"""`wirecall audit`: print an audit trail, and verify that it was not changed."""

import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from wirecall.audit import verify_lines
from wirecall.cli.failures import CliError, Exit
from wirecall.cli.output import Printer, count_of, json_option, print_json, progress
from wirecall.logs import escaped
from wirecall.protocol.messages import JsonObject

POLL = 0.2  # seconds between two looks at a file that is followed
BLOCK = 65_536
_FILE = click.argument("file", required=False, metavar="[FILE]")


@click.group("audit")
def audit_command() -> None:
    """Look at the audit trail, and verify it.

    FILE is the trail; by default, the one that wirecall.toml names.
    """


@audit_command.command("verify")
@_FILE
@json_option
def verify_file(file: str | None, out: Printer) -> Exit | None:
    """Check every link of the chain, and list the lines where it breaks. Exit code 9 if it does.

    Keep the hash of the last line elsewhere too: with write access to the whole file the whole chain can be forged.
    """
    path = _existing(file)
    with path.open("rb") as opened, progress(path.stat().st_size, "Verifying") as advance:

        def lines() -> Iterator[bytes]:
            seen = 0
            for line in opened:
                seen += len(line)
                if seen > BLOCK:  # to move the bar for every line would take longer than to verify it
                    advance(seen)
                    seen = 0
                yield line

        report = verify_lines(lines())
    problems = [{"line": line, "what": what} for line, what in report.problems]

    def show() -> None:
        for line, what in report.problems:
            click.echo(f"{path}:{line}: {what}")
        if report.problems:
            counts = f"{count_of(len(problems), 'problem')} in {count_of(report.lines, 'line')}"
            out.note(f"The chain breaks at line {report.problems[0][0]}: {counts}", "failed")
        else:
            click.echo(f"{path}: {count_of(report.lines, 'line')}, last hash {report.last}")
            out.note("The chain is whole.", "ok")

    out.result({"file": str(path), "lines": report.lines, "last": report.last, "problems": problems}, show)
    return Exit.FOUND if problems else None


@audit_command.command("tail")
@_FILE
@click.option("-n", "count", type=click.IntRange(0), default=20, show_default=True, help="Lines from the end.")
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines as they are written, until Ctrl-C.")
@json_option
def tail_file(file: str | None, count: int, follow: bool, out: Printer) -> None:
    """Print the last entries. With --follow and --json, one document per line."""
    path = _existing(file)
    opened: BinaryIO
    with path.open("rb") as opened:
        # The last lines, read from the end in blocks.
        position = end = opened.seek(0, os.SEEK_END)
        data = b""
        while position and data.count(b"\n") <= count:
            step = min(BLOCK, position)
            position -= step
            opened.seek(position)
            data = opened.read(step) + data
        opened.seek(end)
        lines = data.splitlines()[-count:] if count else []
        if out.as_json and not follow:
            out.result([_entry(line) for line in lines])
            return
        _print(lines, out)
        rest = b""
        while follow:
            rest += opened.read()
            *lines, rest = rest.split(b"\n")
            _print(lines, out)
            if not lines:
                time.sleep(POLL)
                # A trail that was rotated continues in a new file of the same name.
                if path.exists() and path.stat().st_ino != os.fstat(opened.fileno()).st_ino:
                    opened = path.open("rb")


def _entry(line: bytes) -> JsonObject:
    try:
        entry = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        entry = None
    is_entry = isinstance(entry, dict) and type(entry.get("time")) in (int, float) and isinstance(entry.get("method"), str)
    return entry if is_entry else {"unreadable": line.decode("utf-8", "replace")}


def _print(lines: list[bytes], out: Printer) -> None:
    for entry in (_entry(line) for line in lines if line.strip()):
        if out.as_json:
            print_json(entry)
        elif "unreadable" in entry:
            click.echo(f"? not a line of an audit trail: {escaped(entry['unreadable'])[:60]}")
        else:
            when = datetime.fromtimestamp(float(entry.get("time", 0)), UTC).isoformat(" ", "milliseconds")
            outcome = str(entry.get("outcome"))
            if entry.get("replayed") and outcome != "undelivered":
                outcome = "recognised" if entry.get("recognised") else "replayed"
            code = f" {entry['code']}" if entry.get("code") is not None else ""
            names = "  ".join(escaped(str(entry.get(name) or "-")) for name in ("method", "key", "caller"))
            click.echo(f"{when}  {escaped(outcome + code):<12} {names}  {escaped(str(entry.get('duration_ms')))} ms")


def _existing(file: str | None) -> Path:
    """Return the path of a trail that exists and can be read."""
    if file is None:
        from wirecall.config import load_config

        file = load_config().get("audit.file")
        if file is None:
            why = "the command line and wirecall.toml name none"
            raise CliError("Which audit trail?", why, "wirecall audit ... audit.jsonl")
    path = Path(file.removeprefix("file:"))
    if not path.is_file():
        next_step = "is this the server's folder? The first command creates the trail"
        why = "it is a folder" if path.is_dir() else f"looked in {Path.cwd()}"
        raise CliError(f"There is no audit trail {path}.", why, next_step, type="no_trail")
    if not os.access(path, os.R_OK):
        raise CliError(f"{path} cannot be read.", "Permission denied", "ask its owner, or the server's", type="no_trail")
    return path
