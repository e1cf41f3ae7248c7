"""`wirecall ledger`: looks at the records of commands, and settles unknown ones, for operators.

Method and key name a record, and its caller if callers are known. Four verbs change something:
`ledger sweep` does the housekeeping that servers do automatically, `ledger resolve` records what an
operator found out, `ledger accept` accepts a store that servers doubt, and `ledger migrate` brings
the tables up to date. The others only read, so they work on a replica.
"""

import base64
import binascii
import math
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import click
import msgspec
from msgspec import Struct

from wirecall.app import App
from wirecall.audit import Audit, AuditEntry
from wirecall.cli.failures import CliError, Exit, Interrupted, not_named
from wirecall.cli.targets import (
    DRIVERS,
    F,
    Target,
    app_of,
    configured,
    factory_option,
    is_target,
    moment,
    opened_ledger,
    parse,
    reaching,
)
from wirecall.cli.terminal import (
    Printer,
    Spinner,
    ask,
    ask_text,
    count_of,
    json_option,
    progress,
    run,
)
from wirecall.config import load_config
from wirecall.errors import UsageError, nearest
from wirecall.ledger.base import (
    DIGEST,
    Ledger,
    Only,
    Place,
    Record,
    RecordId,
    Schema,
    State,
    Task,
    check_url,
    open_ledger,
    schema_of,
)
from wirecall.ledger.identity import Doubt, Identity, Lost, accept, all_lost, doubts, identity_of
from wirecall.logs import escaped
from wirecall.protocol.messages import JsonObject
from wirecall.resolve import (
    LONGEST_REASON,
    SHORTEST_REASON,
    TAIL,
    NotSettled,
    Resolution,
    action_entry,
    check_reason,
    operator,
    settle,
    stated_outcome,
    type_name,
)
from wirecall.server.method import Method

T = TypeVar("T")

# Records that are read at once.
PAGE = 500
# Characters of the params that a table shows; `ledger show` and --json have all of them.
PARAMS_SHOWN = 60


class Found(Struct, frozen=True):
    """A ledger, the origin of its URL, and the app that uses it."""

    url: str
    # The file, the variable or the command line that names it.
    origin: str
    # The app, if it is known: loaded, or as a target.
    app: App | Target | None = None

    def method(self, name: str) -> Method | None:
        """Return the method of a record. The record of a tool has the method `tools/call:NAME`."""
        app = self._loaded()
        if app is None:
            return None
        tool = name.removeprefix("tools/call:")
        if tool == name:
            return app.registry.methods.get(name)
        return app.registry.tools.get(tool)

    def _loaded(self) -> App | None:
        if isinstance(self.app, Target):
            return self.app.app()
        return self.app

    def trail(self) -> Audit | None:
        """Return the audit trail of the server that uses the ledger, if it is known."""
        app = self._loaded()
        stated = load_config().audit
        if stated is None and app is not None:
            return app.new_trail()
        if stated is None:
            return None
        return Audit(stated.removeprefix("file:").partition("?")[0])


def found(text: str | None) -> Found:
    """Return the ledger with this name.

    Without a name, it is that of wirecall.toml, of the app that wirecall.toml names, or of the
    gateway in it.
    """
    if text is None:
        config = load_config()
        url = config.values["ledger.url"]
        named = configured(config)
        if url.value is not None:
            return Found(url.value, url.origin, named)
        if named is None and config.has_gateway:
            return Found(config.get("gateway.ledger"), config.origin("gateway.ledger"))
    elif is_app(text):
        named = parse(text)
    else:
        if Path(text).is_file():
            raise CliError(
                f"{text!r} is not a ledger.", "it is the path of a file", f"sqlite:{text}"
            )
        try:
            check_url(text)
        except UsageError:
            why = "expected the URL of a ledger or a Python file"
            next_step = "sqlite:ledger.db, redis://..., postgresql://..., or a file: app.py"
            raise CliError(f"{text!r} is not a ledger.", why, next_step) from None
        return Found(text, "the command line")
    if named is None:
        next_step = "wirecall ledger ... sqlite:ledger.db, or [ledger] url = ... in wirecall.toml"
        raise not_named("Which ledger?", next_step)
    app = app_of(named)
    assert app is not None  # it is a file
    stated = load_config().values["ledger.url"]
    origin = named.of(named.text) if stated.value is None else stated.origin
    return Found(app.ledger_url, origin, app)


def is_app(word: str) -> bool:
    """Return whether a word names an app, and not a ledger: `sqlite:PATH` has the form of both."""
    scheme = word.partition(":")[0]
    return is_target(word) and scheme not in (*DRIVERS, "sqlite", "memory", "http", "https")


def _check_durable(where: Found) -> None:
    if where.url.startswith("memory:"):
        why = "it lives inside the server's process, and ends with it"
        next_step = (
            'use a ledger that outlives it: ledger="sqlite:PATH", or --ledger of wirecall serve'
        )
        raise CliError("A ledger in memory cannot be inspected.", why, next_step)


def _with(where: Found, work: Callable[[Ledger], Awaitable[T]], *, writes: bool = False) -> T:
    """Open a ledger that exists, and return the result of the work on it.

    Unless the work `writes`, the ledger may be a replica.
    """
    _check_durable(where)
    scheme, _, path = where.url.partition(":")
    if scheme == "sqlite" and not Path(path.removeprefix("//")).exists():
        why = f"named by {where.origin}; looked in {Path.cwd()}"
        next_step = "is this the server's folder? The first command with a key creates the ledger"
        raise CliError(f"There is no ledger at {path}.", why, next_step, type="no_ledger")

    async def session() -> T:
        async with opened_ledger(where.url, writes=writes) as ledger:
            return await work(ledger)

    return run(session())


# --- the ledger -----------------------------------------------------------------------------------


def _ledger_argument(verb: F) -> F:
    return factory_option(click.argument("target", required=False, metavar="[TARGET]")(verb))


def _record_argument(verb: F) -> F:
    return factory_option(click.argument("words", nargs=-1, metavar="[TARGET] METHOD KEY")(verb))


_CALLER = click.option("--caller", default="", help="Caller of the command. [default: anonymous]")


@click.group("ledger")
def ledger_command() -> None:
    """Look at the records of commands, and resolve unknown outcomes.

    TARGET is a ledger's URL (sqlite:PATH, redis://..., postgresql://...), a file with an app, or by
    default the ledger that wirecall.toml names. For an app in a file it is the ledger that
    `wirecall serve` would use here: that of wirecall.toml, or else the app's own.
    """


@ledger_command.command("list")
@_ledger_argument
@click.option(
    "--state",
    type=click.Choice([state.value for state in State]),
    help="Only records in this state.",
)
@click.option(
    "--tasks", is_flag=True, help="Only commands that are tasks, with their ids and states."
)
@click.option("--method", help="Only records of this method; that of a tool is tools/call:NAME.")
@click.option("--caller", help="Only records of this caller.")
@click.option(
    "--since", type=moment, metavar="TIME", help="Only those that began since: 1h, 7d, 2026-11-18."
)
@click.option("--until", type=moment, metavar="TIME", help="Only those that began before.")
@click.option(
    "--limit", type=click.IntRange(1), default=50, show_default=True, help="Most records to list."
)
@click.option(
    "--after", metavar="CURSOR", help="Continue after a page, with the cursor that it printed."
)
@json_option
def list_records(
    target: str | None,
    state: str | None,
    tasks: bool,
    method: str | None,
    caller: str | None,
    since: float | None,
    until: float | None,
    limit: int,
    after: str | None,
    out: Printer,
) -> None:
    """List records in the order of time, the newest first.

    Params are shown for methods with record_params=True.

    \b
    wirecall ledger list sqlite:ledger.db --state unknown
    wirecall ledger list sqlite:ledger.db --method charge --since 1h
    wirecall ledger list sqlite:ledger.db --tasks
    """
    place = _place_of(after) if after else None
    wanted = State(state) if state else None
    only = Only(
        method,
        caller,
        -math.inf if since is None else since,
        math.inf if until is None else until,
    )

    async def look(ledger: Ledger) -> list[_Row]:
        # One record more than asked for: it shows whether a page follows.
        asked: dict[str, Any] = {"limit": limit + 1, "after": place, "only": only}
        with Spinner(lambda: "Reading; an index makes it fast: wirecall ledger migrate"):
            if tasks:
                return [_row_of(task) for task in await ledger.list_tasks(wanted, **asked)]
            return [(record, None) for record in await ledger.list(wanted, **asked)]

    page = _with(found(target), look)
    cursor = None
    if len(page) > limit:
        page = page[:limit]
        cursor = _cursor_of(page[-1][0])
    documents = []
    for record, task in page:
        document = _document(record)
        if task is not None:
            document["task"] = task
        documents.append(document)
    out.result(documents, lambda: out.table(*_table_of(page, tasks)), next=cursor)
    if out.as_json:
        return
    if cursor:
        out.note(f"There are more: --after {cursor}")
    unknown = [record for record, _ in page if record.standing is State.UNKNOWN]
    if unknown:
        next_step = resolving([target] if target else [], unknown[0].id)
        out.note(f"To resolve the first that is unknown, {next_step}", "unknown")


# A record, and the task that it is, in short.
_Row: TypeAlias = tuple[Record, JsonObject | None]


def _place_of(cursor: str) -> Place:
    """Return the place in time of a record from its cursor.

    A cursor is one word: base64 of JSON, because the parts of a place may contain any character.
    """
    try:
        data = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        at, *names = msgspec.json.decode(data, type=tuple[float, str, str, str])
    except (binascii.Error, msgspec.DecodeError, ValueError):
        next_step = "give the cursor that the page before printed"
        raise CliError(f"{cursor!r} is not a cursor.", "", next_step) from None
    return at, RecordId(*names)


def _cursor_of(record: Record) -> str:
    at, id = record.place
    data = msgspec.json.encode([at, id.caller, id.method, id.key])
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _row_of(task: Task) -> "_Row":
    """Return the record of a task, and the task in short."""
    from wirecall.mcp.server.task_state import summary

    assert task.now is not None  # a list has only tasks with a record
    return task.now, summary(task)


def _table_of(page: list[_Row], tasks: bool) -> tuple[list[str], list[Sequence[str]]]:
    """Return the columns and the rows of a table of records, or of tasks."""
    columns = ["STATE", "METHOD", "KEY", "CALLER", "STARTED", "TRIES", "ANSWER"]
    if tasks:
        columns = ["STATUS", "METHOD", "KEY", "CALLER", "STARTED", "TASK"]
    has_params = any(record.params is not None for record, _ in page)
    if has_params:
        columns.append("PARAMS")
    rows: list[Sequence[str]] = []
    for record, task in page:
        names = [record.id.method, record.id.key, record.id.caller, _time(record.started_at)]
        if task is not None:
            row = [task["status"], *names, task["id"]]
        else:
            row = [record.standing.value, *names, str(record.attempts), record.delivery or "-"]
        if has_params:
            row.append(_in_short(record.params))
        rows.append(row)
    return columns, rows


@ledger_command.command("show")
@_record_argument
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
    shown |= {"lease_left": round(max(record.lease_left, 0.0), 1), "fence": record.fence}
    shown["fingerprint"] = record.fingerprint.hex()
    if record.outcome is not None:
        payload = record.outcome.payload
        shown[record.outcome.kind] = "not kept"
        if payload is not None:
            shown[record.outcome.kind] = msgspec.json.decode(payload)
        shown["digest"] = record.outcome.digest[:DIGEST].hex()
    if task is not None:
        from wirecall.mcp.server.task_state import summary

        shown["task"] = summary(task)
    # Each on one line, so that a caller's name cannot forge another.
    lines = [f"{name:<12} {escaped(_shown(value))}" for name, value in shown.items()]
    out.result(shown, "\n".join(lines))


def _shown(value: object) -> str:
    """Return a member of a record for people."""
    if value in (None, ""):
        return "-"
    if isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


@ledger_command.command("stats")
@_ledger_argument
@json_option
def count_records(target: str | None, out: Printer) -> None:
    """Count the records in each state."""

    async def count(ledger: Ledger) -> dict[State, int]:
        with Spinner(lambda: "Counting"):
            return await ledger.counts()

    counts = _with(found(target), count)
    numbers = {state.value: counts.get(state, 0) for state in State}
    rows = [(name, str(count)) for name, count in numbers.items()]
    out.result(numbers, lambda: out.table(["STATE", "RECORDS"], rows))
    if numbers["unknown"] and not out.as_json:
        words = ["wirecall", "ledger", "list", *filter(None, [target]), "--state", "unknown"]
        out.note(
            f"Some outcomes are unknown. To see them, and how to resolve them: {shlex.join(words)}",
            "unknown",
        )


@ledger_command.command("migrate", short_help="Bring the tables up to date.")
@_ledger_argument
@click.option(
    "--check", is_flag=True, help="Change nothing. Exit code 9 if there is something to migrate."
)
@click.option("--dry-run", is_flag=True, help="Change nothing. Print what would be executed.")
@json_option
def migrate_tables(target: str | None, check: bool, dry_run: bool, out: Printer) -> Exit | None:
    """Make the tables of a ledger, or bring them up to date.

    Servers of the version before continue to work, so migrate first and then replace the servers
    one by one. In production a server does not migrate the tables: it refuses to start.

    \b
    wirecall ledger migrate postgresql://owner@db/shop --check
    wirecall ledger migrate postgresql://owner@db/shop
    """
    where = found(target)
    _check_durable(where)
    with reaching(where.url):
        schema = run(schema_of(where.url))
        if schema.is_too_new:
            schema.check("read")
        if schema.is_behind and not check and not dry_run:
            run(_migrate(where.url))
    return _show_schema(schema, check, dry_run, out)


async def _migrate(url: str) -> None:
    with Spinner(lambda: "Migrating; a large ledger takes minutes"):
        ledger = await open_ledger(url, "update")
        await ledger.aclose()


def _show_schema(schema: Schema, check: bool, dry_run: bool, out: Printer) -> Exit | None:
    """Print what was migrated, or would be; return the exit code of `--check`."""
    is_changed = schema.is_behind and not check and not dry_run
    facts: JsonObject = {"from": schema.found, "to": schema.known, "migrated": is_changed}
    if not schema.is_behind:
        facts["to"] = schema.found
    lines = [f"The tables have version {schema.found}: there is nothing to migrate"]
    if schema.is_behind:
        verb = "were brought" if is_changed else "would be brought"
        lines = [f"The tables {verb} from version {schema.found} to {schema.known}"]
    if dry_run:
        facts["steps"] = list(schema.steps)
        lines += schema.steps
    out.result(facts, "\n".join(lines))
    if check and schema.is_behind:
        return Exit.FOUND
    return None


@ledger_command.command("sweep", short_help="Do the housekeeping that is due.")
@_ledger_argument
@json_option
def sweep_records(target: str | None, out: Printer) -> None:
    """Do the housekeeping that is due.

    It drops expired records, and marks commands whose lease ended a minute ago, or longer, as
    unknown.
    """

    async def sweep(ledger: Ledger) -> int:
        with progress(None, "Sweeping") as advance:
            changed = 0
            while count := await ledger.sweep(PAGE):
                changed += count
                advance(count)
        return changed

    changed = _with(found(target), sweep, writes=True)
    out.result({"changed": changed}, f"{count_of(changed, 'record')} changed")


@ledger_command.command("resolve", short_help="Resolve a command whose outcome is unknown.")
@_record_argument
@_CALLER
@click.option(
    "--done", is_flag=True, help="It took effect: retries get --result, which must be given."
)
@click.option("--not-done", is_flag=True, help="It did not: the next call with this key runs.")
@click.option(
    "--result", metavar="JSON", help="With --done: the result that the command returned, or null."
)
@click.option(
    "--reason",
    metavar="TEXT",
    help=f"How you found out, {SHORTEST_REASON} to {LONGEST_REASON} characters; for the audit "
    "trail.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def resolve_record(
    words: tuple[str, ...],
    caller: str,
    done: bool,
    not_done: bool,
    result: str | None,
    reason: str | None,
    yes: bool,
    out: Printer,
) -> None:
    """Resolve a command whose outcome is unknown, after you have found it out.

    If another person or the server was faster, nothing is changed. The reason goes into the audit
    trail of the server, if wirecall.toml or the app names one, and the record keeps your name.

    \b
    wirecall ledger resolve sqlite:ledger.db charge order-7 --done --result '{"paid": 500}' \\
        --reason 'the bank has the payment 4711'
    wirecall ledger resolve sqlite:ledger.db charge order-8 --not-done \\
        --reason 'the bank knows no such payment'
    """
    where, id = _named(words, caller)
    if done == not_done:
        why = "it cannot be both done and not done"
        if not done:
            why = "only you can tell"
        raise CliError("What did you find out?", why, "--done --result JSON, or --not-done")
    if not done and result is not None:
        raise CliError(
            "A command that was not done has no result.",
            "--result is for --done",
            "drop --result, or give --done",
        )
    verdict: Literal["happened", "not_happened"] = "not_happened"
    effect = "The next call with this key will run"
    if done:
        verdict = "happened"
        result = _checked_result(where, id, result)
        effect = "Retries will get this result"
    # Mistakes are found before the question, so that the user confirms only what is possible.
    reason = _checked_reason(reason)
    record = _with(where, lambda ledger: _get(ledger, id))
    if record.standing is not State.UNKNOWN:
        raise CliError(
            f"{id} is not unknown.",
            f"it is {record.state.value}",
            _not_yet(record),
            type="not_unknown",
        )
    question = f"{id} began {_time(record.started_at)}. {effect}. Is this what you found out?"
    if not yes and ask(question) is False:
        raise Interrupted("nothing was changed", "find out, then try again")
    resolution = Resolution(
        fence=record.fence,
        state=record.standing.value,
        verdict=verdict,
        reason=reason,
        # A user of the command line has typed the whole key.
        tail=id.key[-TAIL:],
        result=result or "null",
    )
    state = _settle(where, id, resolution)
    text = "was not done: the next call with this key runs"
    if done:
        text = "is done: retries get its result"
    out.result({**msgspec.structs.asdict(id), "state": state}, escaped(f"{id} {text}"))


def _checked_reason(
    reason: str | None,
    question: str = "How did you find out?",
    example: str = "the bank has the payment 4711",
) -> str:
    """Return the reason, which a person at a terminal is asked for."""
    next_step = f"--reason {shlex.quote(example)}"
    if reason is None:
        reason = ask_text(f"{question} It goes into the audit trail")
    if reason is None:
        raise CliError(
            "A reason is missing.",
            f"expected --reason with {SHORTEST_REASON} to {LONGEST_REASON} characters, got none",
            next_step,
        )
    try:
        return check_reason(reason)
    except NotSettled as error:
        raise CliError(str(error), "", next_step) from None


# --- acceptance -----------------------------------------------------------------------------------


@ledger_command.command("accept", short_help="Accept a ledger that came back empty or older.")
@_ledger_argument
@click.option(
    "--reason",
    metavar="TEXT",
    help=f"Why it is right, {SHORTEST_REASON} to {LONGEST_REASON} characters; for the audit trail.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def accept_ledger(target: str | None, reason: str | None, yes: bool, out: Printer) -> None:
    """Accept a ledger that servers doubt, so that they run commands again.

    Servers refuse commands when their ledger comes back empty, as another one, or older than they
    have seen it. This verb prints their doubts, and the commands that they had acknowledged and the
    ledger does not have. Those become unknown: a retry does not run them. All servers notice the
    acceptance within seconds, without a restart.

    \b
    wirecall ledger accept sqlite:ledger.db --reason 'restored the backup of 03:00'
    """
    where = found(target)

    async def look(ledger: Ledger) -> list[Doubt]:
        seen = await ledger.see()
        return list((await doubts(ledger, identity_of(seen.identity))).values())

    opened = _with(where, look, writes=True)
    if not opened:
        raise CliError(
            "No server doubts this ledger.",
            "there is nothing to accept",
            "is it the ledger of the servers that refuse commands? Their log names it",
            type="no_doubt",
        )
    lost = all_lost(opened)
    _show_doubts(opened, lost, out)
    reason = _checked_reason(reason, "Why is it right?", "restored the backup of 03:00")
    question = f"Accept this ledger, and make {count_of(len(lost), 'command')} unknown?"
    if not yes and ask(question) is False:
        raise Interrupted("nothing was changed", "find out what happened, then try again")
    accepted = _accept(where, opened, reason)
    facts: JsonObject = {
        "identity": accepted.name,
        "epoch": accepted.epoch,
        "doubts": [{"kind": each.kind, "process": each.process} for each in opened],
        "unknown": [msgspec.structs.asdict(each.id) for each in lost],
    }
    text = f"Accepted: epoch {accepted.epoch} of {accepted.name}"
    if lost:
        listing = shlex.join(["wirecall", "ledger", "list", *filter(None, [target])])
        text += f"\nThe lost commands are unknown now: {listing} --state unknown"
    out.result(facts, text)


def _show_doubts(opened: Sequence[Doubt], lost: Sequence[Lost], out: Printer) -> None:
    """Print what will be accepted."""
    if out.as_json:
        return
    for doubt in opened:
        click.echo(escaped(f"{doubt.process}: expected {doubt.expected}; found {doubt.found}"))
    if lost:
        click.echo("Acknowledged, and not in the ledger:")
    for each in lost:
        click.echo(escaped(f"  {_words(each.id)}"))


def _accept(where: Found, opened: Sequence[Doubt], reason: str) -> Identity:
    """Accept the ledger; add a line to the audit trail for it, and one for each lost command."""
    actor = operator()
    trail = where.trail()
    try:
        accepted = _with(where, lambda ledger: accept(ledger, opened, actor, reason), writes=True)
        if trail is not None:
            trail.append(_line_of(accepted, opened))
        return accepted
    finally:
        if trail is not None:
            trail.close()


def _line_of(accepted: Identity, opened: Sequence[Doubt]) -> AuditEntry:
    """Return the line of the audit trail about an acceptance."""
    action: JsonObject = {
        "what": "accept ledger",
        "identity": accepted.name,
        "epoch": accepted.epoch,
        "replaces": list(accepted.replaces),
        "reason": accepted.reason,
        "doubts": [f"{each.process}: {each.kind}" for each in opened],
        "unknown": [str(each.id) for each in all_lost(opened)],
    }
    return action_entry(accepted.accepted_by, "wirecall.ledger.accept", "accepted", action)


def _settle(where: Found, id: RecordId, resolution: Resolution) -> str:
    """Settle a record by the rules that the console has, too."""
    actor = operator()
    trail = where.trail()

    async def work(ledger: Ledger) -> str:
        return await settle(
            ledger,
            id,
            resolution,
            declared=where.method(id.method),
            actor=actor,
            note=None if trail is None else trail.append,
        )

    try:
        return _with(where, work, writes=True)
    except NotSettled as error:
        why = "another process has resolved it"
        if error.record is not None:
            why = str(error)
        raise CliError(
            f"{id} is not unknown any more.",
            why,
            "wirecall ledger show prints its outcome",
            type="changed",
        ) from None
    finally:
        if trail is not None:
            trail.close()


def resolving(target: Sequence[str], id: RecordId) -> str:
    """Return the lines that resolve a record, for a shell."""
    words = ["wirecall", "ledger", "resolve", *target]
    if id.caller:
        words.append(f"--caller={id.caller}")  # one word, since a name may begin with a dash
    names = [id.method, id.key]
    if any(name.startswith("-") for name in names):
        names.insert(0, "--")
    why = ["--reason", "how you found out"]
    not_done = shlex.join([*words, "--not-done", *why, *names])
    done = shlex.join([*words, "--done", "--result", "JSON", *why, *names])
    return f"find out whether it took effect, then: {not_done}, or: {done}"


def _not_yet(record: Record) -> str:
    """Return the next step for a record that cannot be resolved."""
    if record.state is State.RUNNING and record.lease_left > 0:
        left = f"{record.lease_left:.0f} s"
        return f"its lease ends in {left} unless its server renews it: try again then"
    if record.state is State.RUNNING:
        return (
            "its process ended before the commit point, so nothing was done: "
            "the next call with this key runs"
        )
    if record.state is State.WAITING:
        return "it waits for an answer of its caller, which may still come"
    return "wirecall ledger show prints how it ended"


def _checked_result(where: Found, id: RecordId, result: str | None) -> str:
    """Return the result of a command that was done, if callers can read it."""
    declared = where.method(id.method)
    if result is None:
        expected = ""
        if declared is not None:
            expected = f" of type {type_name(declared.signature.returns)}"
        why = f"retries get it as the command's result for good; expected JSON{expected}, got none"
        next_step = (
            "--done --result JSON; if it returned nothing, or you do not know: --done --result null"
        )
        raise CliError("Which result did it return?", why, next_step)
    try:
        stated_outcome(id, declared, result, "")
    except NotSettled as error:
        what, _, why = str(error).partition(": ")
        raise CliError(
            f"{what.replace('The result', '--result')}.",
            why,
            error.hint,
        ) from None
    return result


# --- records --------------------------------------------------------------------------------------


async def _records(
    ledger: Ledger, state: State | None = None, after: Place | None = None
) -> AsyncIterator[Record]:
    """Yield the records in their order.

    They are read page by page: a ledger may have millions of them.
    """
    while page := await ledger.list(state, limit=PAGE, after=after):
        for record in page:
            yield record
        after = page[-1].place


async def _get(ledger: Ledger, id: RecordId) -> Record:
    record = await ledger.get(id)
    if record is not None:
        return record
    others: list[RecordId] = []
    async for each in _records(ledger):
        others.append(each.id)
        if len(others) == 2 * PAGE:  # enough to find a typo
            break
    # As an error of a server names it, in one string.
    same = [_words(each) for each in others if str(each) == str(id)]
    near = same[0] if same else nearest(_words(id), [_words(each) for each in others])
    callers = sorted(
        {each.caller for each in others if (each.method, each.key) == (id.method, id.key)}
    )
    why = ""
    next_step = "wirecall ledger list shows the records"
    if callers:
        why = f"callers that have one: {', '.join(map(repr, callers))}"
        next_step = f"--caller {shlex.quote(callers[0])}"
    elif near:
        why = f"the nearest is {near}"
    raise CliError(f"There is no record {_words(id)}.", why, next_step, type="no_record")


def _words(id: RecordId) -> str:
    """Name a record as the command line does, so that its parts are distinct."""
    words = [id.method, id.key]
    if id.caller:
        words += ["--caller", id.caller]
    return shlex.join(words)


def _in_short(params: bytes | None) -> str:
    """Return the params of a record for a table."""
    if params is None:
        return "-"
    text = params.decode(errors="replace")
    if len(text) <= PARAMS_SHOWN:
        return text
    return f"{text[: PARAMS_SHOWN - 3]}..."


def _named(words: tuple[str, ...], caller: str) -> tuple[Found, RecordId]:
    """Return the ledger and the record that the words name."""
    scheme = words[0].partition(":")[0] if words else ""
    has_target = scheme in (*DRIVERS, "sqlite") or (bool(words) and is_app(words[0]))
    if len(words) not in (2 + has_target, 3):
        why = f"expected a method and a key, got {' '.join(words[has_target:]) or 'none'}"
        raise CliError("Which record?", why, "[TARGET] METHOD KEY, such as: charge order-7")
    *target, method, key = words
    return found(target[0] if target else None), RecordId(caller, method, key)


def _document(record: Record) -> JsonObject:
    completed = None
    if record.completed_at is not None:
        completed = _time(record.completed_at)
    document = {
        **msgspec.structs.asdict(record.id),
        "state": record.standing.value,
        "attempts": record.attempts,
        "committed": record.committed,
        "started": _time(record.started_at),
        "completed": completed,
        # Whether the answer to a call without a key arrived.
        "delivery": record.delivery,
    }
    if record.resolved_by is not None:
        document["resolved_by"] = record.resolved_by
    if record.params is not None:
        document["params"] = msgspec.json.decode(record.params)
    return document


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")
