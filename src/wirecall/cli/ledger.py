"""The ledger, for operators: `wirecall ledger` looks at the records of commands, and settles unknown ones.

1. The ledger that a verb uses: its option, its URL, and errors that say what is wrong with its store or its driver.
2. A record is named by method and key, and by its caller where callers are known. Only two verbs change something: `sweep`
   does the housekeeping that servers do by themselves, and `resolve` records what an operator found out.
"""

import base64
import binascii
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Struct

from wirecall.app import App
from wirecall.cli.failures import CliError, Exit, Interrupted, failure_of, nearest
from wirecall.cli.input import run
from wirecall.cli.output import Printer, ask, count_of, json_option, progress
from wirecall.cli.targets import app_of, parse
from wirecall.config import Config, load_config
from wirecall.errors import UsageError
from wirecall.ledger.base import Ledger, LedgerDown, Outcome, Record, RecordId, State, Task, check_url, open_ledger
from wirecall.logs import escaped
from wirecall.protocol.messages import JsonObject
from wirecall.server.method import Method

RETENTION = 86_400.0
# By scheme: the package of its driver, and the extra of wirecall that installs it.
DRIVERS = {
    "redis": ("redis", "redis"),
    "rediss": ("redis", "redis"),
    "valkey": ("redis", "redis"),
    "postgresql": ("psycopg", "postgres"),
    "postgres": ("psycopg", "postgres"),
}

# The option `--ledger`, as the parameter `ledger`.
ledger_option = click.option(
    "--ledger", metavar="URL", help="Ledger of an app in a file: sqlite:PATH, redis://..., postgresql://..., memory:"
)


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
    """Return the ledger that a text names; without a text, that of wirecall.toml."""
    if text is None:
        where = configured_ledger(load_config())
        if where is None:
            next_step = "wirecall ledger ... sqlite:ledger.db, or [ledger] url = ... in wirecall.toml"
            raise CliError("Which ledger?", "the command line and wirecall.toml name none", next_step)
        return where
    if text.partition(":")[0].endswith(".py"):
        return _of_app(text)
    if Path(text).is_file():
        raise CliError(f"{text!r} is not a ledger.", "it is the path of a file", f"sqlite:{text}")
    try:
        check_url(text)
    except UsageError:
        next_step = "sqlite:ledger.db, redis://..., postgresql://..., or a file: app.py"
        raise CliError(f"{text!r} is not a ledger.", "expected the URL of a ledger or a Python file", next_step) from None
    return Found(text, "the command line")


def configured_ledger(config: Config) -> Found | None:
    """Return the ledger of a configuration, or of the app that it names."""
    app, url = config.get("server.app"), config.values["ledger.url"]
    if url.value is not None:
        return Found(url.value, url.origin, app)
    return _of_app(app) if app else None


def _of_app(text: str) -> Found:
    app = app_of(parse(text))
    assert app is not None  # it is a file
    stated = load_config().values["ledger.url"]
    return Found(app.ledger_url, text if stated.value is None else stated.origin, app)


@asynccontextmanager
async def opened_ledger(url: str, named_by: str) -> AsyncIterator[Ledger]:
    """Open a ledger that exists. A store that cannot be reached is exit 4."""
    check_ledger(url, named_by=named_by)
    try:
        ledger = await open_ledger(url)
        try:
            yield ledger
        finally:
            await ledger.aclose()
    except LedgerDown as error:
        raise _unreachable(url, error) from error


async def ready(app: App) -> None:
    """Open the ledger of an app in this process before a command needs it, so that an error can be explained here."""
    check_ledger(app.ledger_url)
    try:
        await app.ledger()
    except LedgerDown as error:
        raise _unreachable(app.ledger_url, error) from error


def check_ledger(url: str, *, named_by: str = "") -> None:
    """Refuse a ledger whose driver is not installed, or whose file is a folder; with `named_by`, one that does not exist."""
    scheme, _, path = url.partition(":")
    driver, extra = DRIVERS.get(scheme, ("", ""))
    # Found, not imported: a driver takes longer to import than most verbs take to run.
    if driver and find_spec(driver) is None:
        why = f"ledgers of {scheme}: are reached with the package {driver}"
        raise CliError(f"{driver} is not installed.", why, f'pip install "wirecall[{extra}]"', type="ledger")
    if scheme == "sqlite" and Path(path.removeprefix("//")).is_dir():
        raise CliError(f"The ledger {path} is a folder.", "SQLite keeps it in a file", "name a file in it", type="ledger")
    if named_by and scheme == "memory":
        why = "it lives inside the server's process, and ends with it"
        next_step = 'use a ledger that outlives it: ledger="sqlite:PATH", or --ledger of wirecall serve'
        raise CliError("A ledger in memory cannot be looked at.", why, next_step)
    if named_by and scheme == "sqlite" and not Path(path.removeprefix("//")).is_file():
        why = f"named by {named_by}; looked in {Path.cwd()}"
        next_step = "is this the server's folder? The first command with a key creates the ledger"
        raise CliError(f"There is no ledger at {path}.", why, next_step, type="no_ledger")


def _unreachable(url: str, error: Exception) -> CliError:
    failure = failure_of(UsageError(str(error)))
    if not failure.why and not failure.next:  # otherwise the error has a why and a fix of its own
        failure = CliError(f"The ledger {shown(url)} cannot be used.", " ".join(failure.what.split()))
    next_step = failure.next or "is it running, and is this its URL?"
    return CliError(failure.what, failure.why, next_step, exit=Exit.UNREACHABLE, type="ledger_unavailable")


def shown(url: str) -> str:
    """Return a URL without its password."""
    password = urlsplit(url).password if "://" in url else None
    return url.replace(f":{password}@", ":***@") if password else url


# --- the verbs ------------------------------------------------------------------------------------------------------

PAGE = 500
_WHERE = click.argument("target", required=False, metavar="[TARGET]")
_WORDS = click.argument("words", nargs=-1, metavar="[TARGET] METHOD KEY")
_CALLER = click.option("--caller", default="", help="Caller of the command. [default: anonymous]")
T = TypeVar("T")


@click.group("ledger")
def ledger_command() -> None:
    """Look at the records of commands, and settle unknown ones.

    TARGET is a ledger's URL (sqlite:PATH, redis://..., postgresql://...), a file with an app, or by default the ledger
    that wirecall.toml names. For an app in a file it is the ledger that `wirecall serve` would use here: that of
    wirecall.toml, or else the app's own.
    """


def _with(where: Found, work: Callable[[Ledger], Awaitable[T]]) -> T:
    """Open the ledger, and return the result of the work on it."""

    async def session() -> T:
        async with opened_ledger(where.url, where.origin) as ledger:
            return await work(ledger)

    return run(session())


# --- looking --------------------------------------------------------------------------------------------------------


@ledger_command.command("list")
@_WHERE
@click.option("--state", type=click.Choice([state.value for state in State]), help="Only records of this state.")
@click.option("--tasks", is_flag=True, help="Only commands that are tasks, with their ids and states.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Records at most.")
@click.option("--after", metavar="CURSOR", help="Continue after a page: the cursor that it printed.")
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
    wanted = State(state) if state else None
    # One record more than asked for: it shows whether a page follows.
    page = _with(found(target), lambda ledger: _page_of(ledger, wanted, limit + 1, place, tasks=tasks))
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


# --- changing -------------------------------------------------------------------------------------------------------


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


@ledger_command.command("resolve", short_help="Settle a command of unknown outcome.")
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
    """Settle a command whose outcome is unknown, after you have found out.

    \b
    wirecall ledger resolve sqlite:ledger.db charge order-7 --done --result '{"paid": 500}'
    wirecall ledger resolve sqlite:ledger.db charge order-8 --not-done
    """
    where, id = _named(words, caller)
    if done == not_done:
        why = "only you can tell" if not done else "it cannot be both done and not done"
        raise CliError("What did you find out?", why, "--done --result JSON, or --not-done")
    if not done and result is not None:
        raise CliError("A command that was not done has no result.", "--not-done and --result", "drop one of them")
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
    from wirecall.commands.outcome import outcome_of
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


async def _page(ledger: Ledger, state: State | None, limit: int, after: RecordId | None) -> list[Record]:
    records: list[Record] = []
    while len(records) < limit:
        page = await ledger.list(state, limit=min(PAGE, limit - len(records)), after=after)
        if not page:
            break
        records += page
        after = page[-1].id
    return records


async def _page_of(
    ledger: Ledger, state: State | None, limit: int, after: RecordId | None, *, tasks: bool
) -> list[tuple[Record, JsonObject | None]]:
    """Return records; with `tasks` those alone that are tasks, and what their clients see of them."""
    if not tasks:
        return [(record, None) for record in await _page(ledger, state, limit, after)]
    from wirecall.mcp.server.tasks import summary

    found: list[tuple[Record, JsonObject | None]] = []
    while records := await _page(ledger, state, PAGE, after):
        for record in records:
            if record.id.method.startswith("tools/call:") and (task := await ledger.task_of(record.id)) is not None:
                found.append((record, summary(task)))
                if len(found) == limit:
                    return found
        after = records[-1].id
    return found


async def _get(ledger: Ledger, id: RecordId) -> Record:
    record = await ledger.get(id)
    if record is not None:
        return record
    # Two pages are enough to find a typing error; a ledger may have millions of records.
    others = [each.id for each in await _page(ledger, None, 2 * PAGE, None)]
    near = nearest(str(id), [str(each) for each in others])
    callers = sorted({each.caller for each in others if (each.method, each.key) == (id.method, id.key)})
    why = f"callers that have one: {', '.join(map(repr, callers))}" if callers else f"the nearest is {near}" if near else ""
    next_step = f"--caller {callers[0]}" if callers else "wirecall ledger list shows the records"
    raise CliError(f"There is no record {id}.", why, next_step, type="no_record")


def _named(words: tuple[str, ...], caller: str) -> tuple[Found, RecordId]:
    """Return the ledger and the record that the words name."""
    if len(words) not in (2, 3):
        why = f"expected 2 or 3 words, got {len(words)}"
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
