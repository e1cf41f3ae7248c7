"""The records of commands, for operators: `wirecall ledger` looks at them and settles unknown ones, and `wirecall audit`
prints and verifies the audit trail.

A record is named by method and key, and by its caller where callers are known. Only two verbs change something: `ledger
sweep` does the housekeeping that servers do by themselves, and `ledger resolve` records what an operator found out.
"""

import base64
import binascii
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, TypeVar

import click
import msgspec
from msgspec import Struct

from wirecall.app import App
from wirecall.audit import verify_lines
from wirecall.cli.failures import CliError, Exit, Interrupted, nearest
from wirecall.cli.targets import DRIVERS, app_of, opened_ledger, parse
from wirecall.cli.terminal import Printer, ask, count_of, json_option, print_json, progress, run
from wirecall.config import load_config
from wirecall.errors import UsageError
from wirecall.ledger.base import Ledger, Outcome, Record, RecordId, State, Task, check_url
from wirecall.logs import escaped
from wirecall.protocol.messages import JsonObject
from wirecall.server.method import Method

T = TypeVar("T")

RETENTION = 86_400.0  # seconds, where the app that declares a method is not known
PAGE = 500  # records that are read at once


class Found(Struct, frozen=True):
    """A ledger's URL, the origin of that URL, and the app that uses it, if it is known: loaded, or as a target."""

    url: str
    origin: str
    app: App | str | None = None

    def method(self, name: str) -> Method | None:
        """Return the method of a record. The record of a tool has the method `tools/call:NAME`."""
        app = parse(self.app).app() if isinstance(self.app, str) else self.app
        if app is None:
            return None
        tool = name.removeprefix("tools/call:")
        return app.registry.methods.get(name) if tool == name else app.registry.tools.get(tool)

    def retention(self, method: str) -> float:
        declared = self.method(method)
        return RETENTION if declared is None else declared.terms.retention


def found(text: str | None) -> Found:
    """Return the ledger that a text names; without a text, that of wirecall.toml, or of the app that it names."""
    named = text
    if text is None:
        config = load_config()
        url, named = config.values["ledger.url"], config.get("server.app")
        if url.value is not None:
            return Found(url.value, url.origin, named)
    elif not text.partition(":")[0].endswith(".py"):
        if Path(text).is_file():
            raise CliError(f"{text!r} is not a ledger.", "it is the path of a file", f"sqlite:{text}")
        try:
            check_url(text)
        except UsageError:
            why = "expected the URL of a ledger or a Python file"
            next_step = "sqlite:ledger.db, redis://..., postgresql://..., or a file: app.py"
            raise CliError(f"{text!r} is not a ledger.", why, next_step) from None
        return Found(text, "the command line")
    if named is None:
        next_step = "wirecall ledger ... sqlite:ledger.db, or [ledger] url = ... in wirecall.toml"
        raise CliError("Which ledger?", "neither the command line nor wirecall.toml names one", next_step)
    app = app_of(parse(named))
    assert app is not None  # it is a file
    stated = load_config().values["ledger.url"]
    return Found(app.ledger_url, named if stated.value is None else stated.origin, app)


def _with(where: Found, work: Callable[[Ledger], Awaitable[T]]) -> T:
    """Open a ledger that exists, and return the result of the work on it."""
    scheme, _, path = where.url.partition(":")
    if scheme == "memory":
        why = "it lives inside the server's process, and ends with it"
        next_step = 'use a ledger that outlives it: ledger="sqlite:PATH", or --ledger of wirecall serve'
        raise CliError("A ledger in memory cannot be inspected.", why, next_step)
    if scheme == "sqlite" and not Path(path.removeprefix("//")).exists():
        why = f"named by {where.origin}; looked in {Path.cwd()}"
        next_step = "is this the server's folder? The first command with a key creates the ledger"
        raise CliError(f"There is no ledger at {path}.", why, next_step, type="no_ledger")

    async def session() -> T:
        async with opened_ledger(where.url) as ledger:
            return await work(ledger)

    return run(session())


# --- the ledger -----------------------------------------------------------------------------------------------------

_WHERE = click.argument("target", required=False, metavar="[TARGET]")
_WORDS = click.argument("words", nargs=-1, metavar="[TARGET] METHOD KEY")
_CALLER = click.option("--caller", default="", help="Caller of the command. [default: anonymous]")


@click.group("ledger")
def ledger_command() -> None:
    """Look at the records of commands, and resolve unknown outcomes.

    TARGET is a ledger's URL (sqlite:PATH, redis://..., postgresql://...), a file with an app, or by default the ledger
    that wirecall.toml names. For an app in a file it is the ledger that `wirecall serve` would use here: that of
    wirecall.toml, or else the app's own.
    """


@ledger_command.command("list")
@_WHERE
@click.option("--state", type=click.Choice([state.value for state in State]), help="Only records in this state.")
@click.option("--tasks", is_flag=True, help="Only commands that are tasks, with their ids and states.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Most records to list.")
@click.option("--after", metavar="CURSOR", help="Continue after a page, with the cursor that it printed.")
@json_option
def list_records(target: str | None, state: str | None, tasks: bool, limit: int, after: str | None, out: Printer) -> None:
    """List records, in the order of their callers, methods and keys.

    \b
    wirecall ledger list sqlite:ledger.db --state unknown
    wirecall ledger list sqlite:ledger.db --tasks
    """
    # A cursor is a record's id as one word: base64 of JSON, because its parts may contain any character.
    place = None
    if after:
        try:
            data = base64.urlsafe_b64decode(after + "=" * (-len(after) % 4))
            place = RecordId(*msgspec.json.decode(data, type=tuple[str, str, str]))
        except (binascii.Error, msgspec.DecodeError, ValueError):
            raise CliError(f"{after!r} is not a cursor.", "", "give the cursor that the page before printed") from None

    async def look(ledger: Ledger) -> list[tuple[Record, JsonObject | None]]:
        from wirecall.mcp.server.tasks import summary

        page: list[tuple[Record, JsonObject | None]] = []
        async for record in _records(ledger, State(state) if state else None, place):
            task = await ledger.task_of(record.id) if tasks and record.id.method.startswith("tools/call:") else None
            if task is not None or not tasks:
                page.append((record, None if task is None else summary(task)))
            if len(page) > limit:  # one record more than asked for: it shows whether a page follows
                break
        return page

    page = _with(found(target), look)
    cursor = None
    if len(page) > limit:
        page = page[:limit]
        last = page[-1][0].id
        cursor = base64.urlsafe_b64encode(msgspec.json.encode(msgspec.structs.astuple(last))).decode().rstrip("=")
    if tasks:
        columns = ["STATUS", "METHOD", "KEY", "CALLER", "STARTED", "TASK"]
    else:
        columns = ["STATE", "METHOD", "KEY", "CALLER", "STARTED", "TRIES", "ANSWER"]
    rows: list[tuple[str, ...]] = []
    for record, task in page:
        row = (record.id.method, record.id.key, record.id.caller, _time(record.started_at))
        if task is not None:
            rows.append((task["status"], *row, task["id"]))
        else:
            rows.append((record.state.value, *row, str(record.attempts), record.delivery or "-"))
    documents = [_document(record) | ({} if task is None else {"task": task}) for record, task in page]
    out.result(documents, lambda: out.table(columns, rows), next=cursor)
    if cursor and not out.as_json:
        out.note(f"There are more: --after {cursor}")


@ledger_command.command("show")
@_WORDS
@_CALLER
@json_option
def show_record(words: tuple[str, ...], caller: str, out: Printer) -> None:
    """Show everything about one command.

    \b
    wirecall ledger show sqlite:ledger.db charge order-7
    """
    where, id = _named(words, caller)

    async def look(ledger: Ledger) -> tuple[Record, Task | None]:
        return await _get(ledger, id), await ledger.task_of(id)

    record, task = _with(where, look)
    shown = _document(record)
    shown |= {"lease_left": round(max(record.lease_left, 0.0), 1), "fence": record.fence, "params": record.fingerprint.hex()}
    if record.outcome is not None:
        payload = record.outcome.payload
        shown[record.outcome.kind] = "not kept" if payload is None else msgspec.json.decode(payload)
        shown["digest"] = record.outcome.digest.hex()
    if task is not None:
        from wirecall.mcp.server.tasks import summary

        shown["task"] = summary(task)
    lines = []
    for name, value in shown.items():
        text = "-" if value in (None, "") else value if isinstance(value, str) else msgspec.json.encode(value).decode()
        lines.append(f"{name:<12} {escaped(text)}")  # on one line, so that a caller's name cannot forge another
    out.result(shown, "\n".join(lines))


@ledger_command.command("stats")
@_WHERE
@json_option
def count_records(target: str | None, out: Printer) -> None:
    """Count the records in each state."""
    counts = _with(found(target), lambda ledger: ledger.counts())
    numbers = {state.value: counts.get(state, 0) for state in State}
    out.result(numbers, lambda: out.table(["STATE", "RECORDS"], [(name, str(count)) for name, count in numbers.items()]))
    if numbers["unknown"] and not out.as_json:
        out.note("Some outcomes are unknown: wirecall ledger list --state unknown, then wirecall ledger resolve", "unknown")


@ledger_command.command("sweep", short_help="Do the housekeeping that is due.")
@_WHERE
@json_option
def sweep_records(target: str | None, out: Printer) -> None:
    """Do the housekeeping that is due: drop expired records, and mark commands whose lease has ended as unknown."""

    async def sweep(ledger: Ledger) -> int:
        with progress(None, "Sweeping") as advance:
            changed = 0
            while count := await ledger.sweep(PAGE):
                changed += count
                advance(count)
        return changed

    changed = _with(found(target), sweep)
    out.result({"changed": changed}, f"{count_of(changed, 'record')} changed")


@ledger_command.command("resolve", short_help="Resolve a command whose outcome is unknown.")
@_WORDS
@_CALLER
@click.option("--done", is_flag=True, help="It took effect: retries get --result.")
@click.option("--not-done", is_flag=True, help="It did not: the next call with this key runs.")
@click.option(
    "--result", metavar="JSON", help="With --done: the result that the command would have returned. [default: null]"
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def resolve_record(
    words: tuple[str, ...], caller: str, done: bool, not_done: bool, result: str | None, yes: bool, out: Printer
) -> None:
    """Resolve a command whose outcome is unknown, after you have found it out.

    \b
    wirecall ledger resolve sqlite:ledger.db charge order-7 --done --result '{"paid": 500}'
    wirecall ledger resolve sqlite:ledger.db charge order-8 --not-done
    """
    where, id = _named(words, caller)
    if done == not_done:
        why = "only you can tell" if not done else "it cannot be both done and not done"
        raise CliError("What did you find out?", why, "--done --result JSON, or --not-done")
    if not done and result is not None:
        raise CliError(
            "A command that was not done has no result.", "--result is for --done", "drop --result, or give --done"
        )
    outcome = _outcome(where, id, result) if done else None
    # Mistakes are found before the question, so that a yes is about something that can be done.
    record = _with(where, lambda ledger: _get(ledger, id))
    if record.state is not State.UNKNOWN:
        nexts = {
            State.RUNNING: "wait until its lease ends, then: wirecall ledger sweep",
            State.WAITING: "it waits for an answer of its caller, which may still come",
        }
        next_step = nexts.get(record.state, "wirecall ledger show prints how it ended")
        raise CliError(f"{id} is not unknown.", f"it is {record.state.value}", next_step, type="not_unknown")
    effect = "Retries will get this result" if outcome else "The next call with this key will run"
    question = f"{id} began {_time(record.started_at)}. {effect}. Is this what you found out?"
    if not yes and ask(question) is False:
        raise Interrupted("nothing was changed", "find out, then try again")
    if not _with(where, lambda ledger: ledger.resolve(id, outcome, where.retention(id.method))):
        why = "another process resolved it meanwhile"
        raise CliError(f"{id} is not unknown any more.", why, "wirecall ledger show prints its outcome")
    state = "done" if outcome else "absent"
    text = "is done: retries get its result" if outcome else "was not done: the next call with this key runs"
    out.result({**msgspec.structs.asdict(id), "state": state}, escaped(f"{id} {text}"))


def _outcome(where: Found, id: RecordId, result: str | None) -> Outcome:
    """Return the outcome to record for a result in JSON."""
    from wirecall.commands.run import outcome_of
    from wirecall.mcp.server.calls import call_result

    try:
        value = msgspec.json.decode(result or "null")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise CliError("--result is not JSON.", str(error), """--result '{"paid": 500}', --result '"text"'""") from None
    is_wrapped = isinstance(value, dict) and isinstance(value.get("content"), list)
    if id.method.startswith("tools/call:"):
        # The record of a tool holds the result of `tools/call`, with the value inside.
        if (declared := where.method(id.method)) is not None:
            value = call_result(declared)(value)
        elif not is_wrapped:
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            value = {"resultType": "complete", "content": [{"type": "text", "text": text}], "structuredContent": value}
    return outcome_of("result", value, id)


# --- records --------------------------------------------------------------------------------------------------------


async def _records(ledger: Ledger, state: State | None = None, after: RecordId | None = None) -> AsyncIterator[Record]:
    """Yield the records in their order. They are read page by page: a ledger may have millions of them."""
    while page := await ledger.list(state, limit=PAGE, after=after):
        for record in page:
            yield record
        after = page[-1].id


async def _get(ledger: Ledger, id: RecordId) -> Record:
    record = await ledger.get(id)
    if record is not None:
        return record
    others: list[RecordId] = []
    async for each in _records(ledger):
        others.append(each.id)
        if len(others) == 2 * PAGE:  # enough to find a typing error
            break
    near = nearest(str(id), [str(each) for each in others])
    callers = sorted({each.caller for each in others if (each.method, each.key) == (id.method, id.key)})
    why = f"callers that have one: {', '.join(map(repr, callers))}" if callers else f"the nearest is {near}" if near else ""
    next_step = f"--caller {callers[0]}" if callers else "wirecall ledger list shows the records"
    raise CliError(f"There is no record {id}.", why, next_step, type="no_record")


def _named(words: tuple[str, ...], caller: str) -> tuple[Found, RecordId]:
    """Return the ledger and the record that the words name."""
    scheme = words[0].partition(":")[0] if words else ""
    is_target = scheme in (*DRIVERS, "sqlite") or scheme.endswith(".py")
    if len(words) not in (2 + is_target, 3):
        why = f"expected a method and a key, got {' '.join(words[is_target:]) or 'none'}"
        raise CliError("Which record?", why, "[TARGET] METHOD KEY, such as: charge order-7")
    *target, method, key = words
    return found(target[0] if target else None), RecordId(caller, method, key)


def _document(record: Record) -> JsonObject:
    return {
        **msgspec.structs.asdict(record.id),
        "state": record.state.value,
        "attempts": record.attempts,
        "committed": record.committed,
        "started": _time(record.started_at),
        "completed": None if record.completed_at is None else _time(record.completed_at),
        "delivery": record.delivery,  # of the answer to a call without a key
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")


# --- the audit trail ------------------------------------------------------------------------------------------------

POLL = 0.2  # seconds between two looks at a file that is followed
BLOCK = 65_536
_TRAIL = click.argument("file", required=False, metavar="[FILE]")


@click.group("audit")
def audit_command() -> None:
    """Look at the audit trail, and verify it.

    FILE is the trail; by default, the one that wirecall.toml names.
    """


@audit_command.command("verify")
@_TRAIL
@json_option
def verify_file(file: str | None, out: Printer) -> Exit | None:
    """Check every link of the chain, and list the lines where it breaks. Exit code 9 if it does.

    Keep the hash of the last line elsewhere too: with write access to the whole file the whole chain can be forged.
    """
    path = _trail(file)
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
            out.note("The chain is intact.", "ok")

    out.result({"file": str(path), "lines": report.lines, "last": report.last, "problems": problems}, show)
    return Exit.FOUND if problems else None


@audit_command.command("tail")
@_TRAIL
@click.option("-n", "count", type=click.IntRange(0), default=20, show_default=True, help="Lines from the end.")
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines as they are written, until Ctrl-C.")
@json_option
def tail_file(file: str | None, count: int, follow: bool, out: Printer) -> None:
    """Print the last entries. With --follow and --json, one document per line."""
    path = _trail(file)
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
                # A trail that was rotated continues in a new file of the same name.
                if path.exists() and path.stat().st_ino != os.fstat(opened.fileno()).st_ino:
                    opened = path.open("rb")


def _entry_of(line: bytes) -> JsonObject:
    try:
        entry = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        entry = None
    is_entry = isinstance(entry, dict) and type(entry.get("time")) in (int, float) and isinstance(entry.get("method"), str)
    return entry if is_entry else {"unreadable": line.decode("utf-8", "replace")}


def _print_entries(lines: list[bytes], out: Printer) -> None:
    for entry in (_entry_of(line) for line in lines if line.strip()):
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


def _trail(file: str | None) -> Path:
    """Return the path of a trail that exists and can be read."""
    if file is None:
        file = load_config().get("audit.file")
        if file is None:
            why = "neither the command line nor wirecall.toml names one"
            raise CliError("Which audit trail?", why, "wirecall audit ... audit.jsonl")
    path = Path(file.removeprefix("file:"))
    if path.is_dir():
        raise CliError(f"{path} is a folder.", "an audit trail is a file", "name the file: audit.jsonl", type="no_trail")
    if not path.is_file():
        next_step = "is this the server's folder? The first command creates the trail"
        raise CliError(f"There is no audit trail {path}.", f"looked in {Path.cwd()}", next_step, type="no_trail")
    if not os.access(path, os.R_OK):
        raise CliError(f"{path} cannot be read.", "Permission denied", "ask its owner, or the server's", type="no_trail")
    return path
