"""`wirecall audit`: what an audit trail says, and whether it is still the one that was written."""

import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import click
import msgspec

from wirecall.audit import Report, verify
from wirecall.cli.failures import Exit, Failure
from wirecall.cli.output import Output, count_of, json_option, print_json, progress
from wirecall.logs import escaped

POLL = 0.2  # seconds between two looks at a file that is followed, or that is being verified
BLOCK = 65_536
_FILE = click.argument("file", required=False, metavar="[FILE]")


@click.group("audit")
def command() -> None:
    """Look at the audit trail, and verify it.

    FILE is the trail; if it is left out, the one that wirecall.toml names.
    """


# --- verify ---------------------------------------------------------------------------------------------------------


@command.command("verify")
@_FILE
@json_option
def verify_file(file: str | None, as_json: bool) -> Exit | None:
    """Check every link of the chain, and tell the lines where it breaks. Exit code 9 if it does.

    Keep the hash of the last line elsewhere too: who can rewrite the whole file can forge the whole chain.
    """
    path = _existing(file)
    report = _verified(path)
    out = Output(as_json)
    problems = [{"line": line, "what": what} for line, what in report.problems]
    told = {"file": str(path), "lines": report.lines, "last": report.last, "problems": problems}
    out.result(told, lambda: _show(out, path, report))
    return Exit.FOUND if problems else None


def _show(out: Output, path: Path, report: Report) -> None:
    for line, what in report.problems:
        click.echo(f"{path}:{line}: {what}")
    if report.problems:
        out.note(
            f"The chain breaks at line {report.problems[0][0]}: "
            f"{count_of(len(report.problems), 'problem')} in {count_of(report.lines, 'line')}",
            "failed",
        )
    else:
        click.echo(f"{path}: {count_of(report.lines, 'line')}, last hash {report.last}")
        out.note("The chain is whole.", "ok")


def _verified(path: Path) -> Report:
    """`verify` in a thread; the position in the file, which both descriptors share, tells how far it is."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    found: list[Report | BaseException] = []

    def work() -> None:
        try:
            found.append(verify(cast(Any, os.dup(file))))
        except BaseException as error:
            found.append(error)

    try:
        worker = threading.Thread(target=work, daemon=True)
        with progress(os.fstat(file).st_size, "Verifying") as advance:
            worker.start()
            seen = 0
            while worker.is_alive():
                worker.join(POLL)
                position = os.lseek(file, 0, os.SEEK_CUR)
                advance(position - seen)
                seen = position
    finally:
        os.close(file)
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


# --- tail -----------------------------------------------------------------------------------------------------------


@command.command("tail")
@_FILE
@click.option("-n", "count", type=click.IntRange(0), default=20, show_default=True, help="Lines from the end.")
@click.option("-f", "--follow", is_flag=True, help="Go on with lines as they are written, until Ctrl-C.")
@json_option
def tail_file(file: str | None, count: int, follow: bool, as_json: bool) -> None:
    """The last entries. With --follow and --json, one document per line."""
    path = _existing(file)
    with path.open("rb") as opened:
        lines = _last(opened, count)
        if as_json and not follow:
            Output(True).result([_entry(line) for line in lines])
            return
        for line in lines:
            _print(line, as_json)
        for line in _written(opened, path) if follow else ():
            _print(line, as_json)


def _last(file: Any, count: int) -> list[bytes]:
    """The last lines, read from the end; the file is left standing behind them."""
    position = end = file.seek(0, os.SEEK_END)
    data = b""
    while position and data.count(b"\n") <= count:
        step = min(BLOCK, position)
        position -= step
        file.seek(position)
        data = file.read(step) + data
    file.seek(end)
    return data.splitlines()[-count:] if count else []


def _written(file: Any, path: Path) -> Iterator[bytes]:
    """Lines as they come. A trail that was moved away is followed at its old place."""
    rest = b""
    while True:
        rest += file.read()
        *lines, rest = rest.split(b"\n")
        yield from lines
        if not lines:
            time.sleep(POLL)
            if path.exists() and path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                file = path.open("rb")


def _entry(line: bytes) -> dict[str, Any]:
    try:
        entry = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        entry = None
    is_entry = isinstance(entry, dict) and type(entry.get("time")) in (int, float) and isinstance(entry.get("method"), str)
    return entry if is_entry else {"unreadable": line.decode("utf-8", "replace")}


def _print(line: bytes, as_json: bool) -> None:
    if not line.strip():
        return
    entry = _entry(line)
    if as_json:
        print_json(entry)
    elif "unreadable" in entry:
        click.echo(f"? not a line of an audit trail: {escaped(entry['unreadable'])[:60]}")
    else:
        click.echo(_sentence(entry))


def _sentence(entry: dict[str, Any]) -> str:
    when = datetime.fromtimestamp(float(entry.get("time", 0)), UTC).isoformat(" ", "milliseconds")
    outcome = "replayed" if entry.get("replayed") else str(entry.get("outcome"))
    code = f" {entry['code']}" if entry.get("code") is not None else ""
    names = "  ".join(escaped(str(entry.get(name) or "-")) for name in ("method", "key", "caller"))
    return f"{when}  {escaped(outcome + code):<12} {names}  {escaped(str(entry.get('duration_ms')))} ms"


def _existing(file: str | None) -> Path:
    if file is None:
        from wirecall.config import load_config

        file = load_config().get("audit.file")
        if file is None:
            raise Failure(
                "Which audit trail?", "none was named, and wirecall.toml names none", "wirecall audit ... audit.jsonl"
            )
    path = Path(file.removeprefix("file:"))
    if not path.is_file():
        next = "is this the server's folder? The trail is made by the first command"
        why = "it is a folder" if path.is_dir() else f"looked in {Path.cwd()}"
        raise Failure(f"There is no audit trail {path}.", why, next, type="no_trail")
    if not os.access(path, os.R_OK):
        raise Failure(f"{path} cannot be read.", "Permission denied", "ask its owner, or the server's", type="no_trail")
    return path
