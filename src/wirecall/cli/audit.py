"""`wirecall audit`: prints and verifies the audit trail, for operators."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from wirecall.audit import Report, is_missing, kept_files, verify_lines
from wirecall.cli.failures import CliError, Exit, not_named
from wirecall.cli.targets import moment
from wirecall.cli.terminal import Advance, Printer, count_of, json_option, print_json, progress
from wirecall.config import load_config
from wirecall.logs import escaped
from wirecall.protocol.messages import JsonObject

# Seconds between two reads of a followed file.
POLL = 0.2
# Bytes that are read at once.
BLOCK = 65_536
_TRAIL = click.argument("file", required=False, metavar="[FILE]")


@click.group("audit")
def audit_command() -> None:
    """Look at the audit trail, and verify it.

    FILE is the trail; by default, the one that wirecall.toml names.
    """


@audit_command.command("verify")
@_TRAIL
@click.option(
    "--archived",
    metavar="HASH",
    multiple=True,
    help="Last hash of a file that was moved elsewhere on purpose.",
)
@json_option
def verify_file(file: str | None, archived: tuple[str, ...], out: Printer) -> Exit | None:
    """Check every link of the chain, and list the lines where it breaks. Exit code 9 if it does.

    The files of a trail that was rotated are verified too: FILE.1, FILE.2 and so on. If one is
    missing, the file after it is named; also if the newest one is missing, and a server has begun
    another.

    Keep the hash of the last line elsewhere too: with write access to the whole file the whole
    chain can be forged.
    """
    path = _trail(file)
    paths = [*kept_files(path), path]
    size = sum(each.stat().st_size for each in paths)
    with progress(size, "Verifying") as advance:
        reports = {each: _verified(each, advance) for each in paths}
    problems: list[JsonObject] = []
    older: Path | None = None
    for each, report in reports.items():
        found = [*report.problems]
        others = [other for name, other in reports.items() if name != each]
        if is_missing(report, others) and report.continues not in archived:
            what = f"continues a file that is missing: its last hash is {report.continues}"
            found.insert(0, (1, what))
        is_fresh = report.continues is None and report.lines > 0
        if older is not None and is_fresh and reports[older].last not in archived:
            found.insert(0, (1, _fresh_after(older, reports[older])))
        problems += [{"file": str(each), "line": line, "what": what} for line, what in found]
        older = each
    lines = sum(report.lines for report in reports.values())
    last = reports[path].last

    def show() -> None:
        for problem in problems:
            click.echo(f"{problem['file']}:{problem['line']}: {problem['what']}")
        if problems:
            counts = f"{count_of(len(problems), 'problem')} in {count_of(lines, 'line')}"
            out.note(f"The chain breaks at line {problems[0]['line']}: {counts}", "failed")
        else:
            click.echo(f"{path}: {count_of(lines, 'line')}, last hash {last}")
            out.note("The chain is intact.", "ok")

    facts: JsonObject = {"file": str(path), "lines": lines, "last": last, "problems": problems}
    facts["files"] = [str(each) for each in paths]
    out.result(facts, show)
    if problems:
        return Exit.FOUND
    return None


def _fresh_after(older: Path, report: Report) -> str:
    """Return what is wrong with a file that begins a chain although there is an older one."""
    return (
        f"begins a new chain, although {older.name} is older: a file after that may be missing; "
        f"if {older.name} was moved while no server ran, say --archived {report.last}"
    )


def _verified(path: Path, advance: Advance) -> Report:
    with path.open("rb") as opened:

        def lines() -> Iterator[bytes]:
            seen = 0
            for line in opened:
                seen += len(line)
                # Moving the bar for every line would take longer than verifying it.
                if seen > BLOCK:
                    advance(seen)
                    seen = 0
                yield line

        return verify_lines(lines())


@audit_command.command("list")
@_TRAIL
@click.option("--open-world", is_flag=True, help="Only methods that may touch the outside.")
@click.option("--destructive", is_flag=True, help="Only methods that may destroy something.")
@click.option("--method", help="Only this method; that of a tool is tools/call:NAME.")
@click.option("--caller", help="Only this caller.")
@click.option("--since", type=moment, metavar="TIME", help="Only since: 1h, 7d, 2026-11-18.")
@click.option("--until", type=moment, metavar="TIME", help="Only before.")
@json_option
def list_entries(
    file: str | None,
    open_world: bool,
    destructive: bool,
    method: str | None,
    caller: str | None,
    since: float | None,
    until: float | None,
    out: Printer,
) -> None:
    """Print the entries of a trail and of its rotated files, the oldest first.

    \b
    wirecall audit list --open-world --since 24h
    """
    path = _trail(file)
    paths = [*kept_files(path), path]

    def is_wanted(entry: JsonObject) -> bool:
        at = entry["time"]
        return (
            # An entry of an older version does not say; without a declaration, it may.
            (not open_world or entry.get("open_world") is not False)
            and (not destructive or entry.get("destructive") is not False)
            and method in (None, entry["method"])
            and caller in (None, entry.get("caller"))
            and (since is None or at >= since)
            and (until is None or at < until)
        )

    found: list[JsonObject] = []
    unreadable = 0
    with progress(sum(each.stat().st_size for each in paths), "Reading") as advance:
        for each in paths:
            with each.open("rb") as opened:
                for line in opened:
                    entry = _entry_of(line)
                    if "unreadable" in entry:
                        unreadable += 1
                    elif is_wanted(entry):
                        found.append(entry)
            advance(each.stat().st_size)

    def show() -> None:
        for entry in found:
            click.echo(_line_of(entry))
        if unreadable:
            what = f"{count_of(unreadable, 'line')} of the trail cannot be read"
            out.note(f"{what}: wirecall audit verify {path}", "failed")

    out.result(found, show, unreadable=unreadable)


@audit_command.command("tail")
@_TRAIL
@click.option(
    "-n", "count", type=click.IntRange(0), default=20, show_default=True, help="Lines from the end."
)
@click.option(
    "-f",
    "--follow",
    is_flag=True,
    help="Continue with new lines as they are written, until Ctrl-C.",
)
@json_option
def tail_file(file: str | None, count: int, follow: bool, out: Printer) -> None:
    """Print the last entries. With --follow and --json, one document per line."""
    path = _trail(file)
    with ExitStack() as files:
        opened: BinaryIO = files.enter_context(path.open("rb"))
        lines = _last_lines(opened, count)
        if out.as_json and not follow:
            out.result([_entry_of(line) for line in lines])
            return
        _print_entries(lines, out)
        rest = b""
        while follow:
            rest += opened.read()
            *lines, rest = rest.split(b"\n")
            _print_entries(lines, out)
            if not lines:
                time.sleep(POLL)
                # A trail that was rotated continues in a new file of the same name. The last lines of
                # the old one may have come since it was read.
                if path.exists() and path.stat().st_ino != os.fstat(opened.fileno()).st_ino:
                    rest += opened.read()
                    opened.close()
                    opened = files.enter_context(path.open("rb"))


def _last_lines(opened: BinaryIO, count: int) -> list[bytes]:
    """Return the last lines of a file, which is read from its end in blocks."""
    end = opened.seek(0, os.SEEK_END)
    position = end
    data = b""
    while position and data.count(b"\n") <= count:
        step = min(BLOCK, position)
        position -= step
        opened.seek(position)
        data = opened.read(step) + data
    opened.seek(end)
    if not count:
        return []
    return data.splitlines()[-count:]


def _entry_of(line: bytes) -> JsonObject:
    try:
        entry = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        entry = None
    is_entry = (
        isinstance(entry, dict)
        and type(entry.get("time")) in (int, float)
        and isinstance(entry.get("method"), str)
    )
    if not is_entry:
        return {"unreadable": line.decode("utf-8", "replace")}
    found: JsonObject = entry
    return found


def _print_entries(lines: list[bytes], out: Printer) -> None:
    for entry in (_entry_of(line) for line in lines if line.strip()):
        if out.as_json:
            print_json(entry)
        elif "unreadable" in entry:
            click.echo(f"? not a line of an audit trail: {escaped(entry['unreadable'])[:60]}")
        else:
            click.echo(_line_of(entry))


def _line_of(entry: JsonObject) -> str:
    """Return an entry of the trail for people."""
    at = datetime.fromtimestamp(float(entry.get("time", 0)), UTC)
    outcome = str(entry.get("outcome"))
    if entry.get("replayed") and outcome != "undelivered":
        outcome = "recognised" if entry.get("recognised") else "replayed"
    if entry.get("code") is not None:
        outcome += f" {entry['code']}"
    names = "  ".join(escaped(str(entry.get(name) or "-")) for name in ("method", "key", "caller"))
    took = escaped(str(entry.get("duration_ms")))
    return f"{at.isoformat(' ', 'milliseconds')}  {escaped(outcome):<12} {names}  {took} ms"


def _trail(file: str | None) -> Path:
    """Return the path of a trail that exists and can be read."""
    if file is None:
        file = load_config().get("audit.file")
        if file is None:
            raise not_named("Which audit trail?", "wirecall audit ... audit.jsonl")
    path = Path(file.removeprefix("file:").partition("?")[0])
    if path.is_dir():
        raise CliError(
            f"{path} is a folder.",
            "an audit trail is a file",
            "name the file: audit.jsonl",
            type="no_trail",
        )
    if not path.is_file():
        next_step = "is this the server's folder? The first command creates the trail"
        raise CliError(
            f"There is no audit trail {path}.",
            f"looked in {Path.cwd()}",
            next_step,
            type="no_trail",
        )
    if not os.access(path, os.R_OK):
        raise CliError(
            f"{path} cannot be read.",
            "Permission denied",
            "ask its owner, or the server's",
            type="no_trail",
        )
    return path
