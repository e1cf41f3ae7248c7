"""`wirecall ledger`: the records of commands, for who operates a server.

A record is named by method and key, and by its caller where callers are known. All verbs only look, but for two: `sweep`
does the housekeeping that servers do by themselves, and `resolve` writes down what an operator found out.
"""

import base64
import binascii
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from wirecall.cli.connecting import Interrupted, run
from wirecall.cli.failures import Exit, Failure, nearest
from wirecall.cli.ledgers import Found, found, opened_ledger
from wirecall.cli.output import Output, ask, count_of, json_option, progress
from wirecall.ledger.base import Ledger, Outcome, Record, RecordId, State

PAGE = 500
STATES = [state.value for state in State]
_WHERE = click.argument("target", required=False, metavar="[TARGET]")
_WORDS = click.argument("words", nargs=-1, metavar="[TARGET] METHOD KEY")
_CALLER = click.option("--caller", default="", help="Whose command; nobody's in particular by default.")


@click.group("ledger")
def command() -> None:
    """Look at the records of commands, and settle unknown ones.

    TARGET is a ledger's URL (sqlite:PATH, redis://..., postgresql://...), a file with an app, or, if left out, what
    wirecall.toml names. Of an app in a file it is the ledger that `wirecall serve` would give it here: that of
    wirecall.toml, or else the app's own.
    """


# --- looking --------------------------------------------------------------------------------------------------------


@command.command("list")
@_WHERE
@click.option("--state", type=click.Choice(STATES), help="Only records of this state.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="Records at most.")
@click.option("--after", metavar="CURSOR", help="Go on behind a page: the cursor that it printed.")
@json_option
def list_records(target: str | None, state: str | None, limit: int, after: str | None, as_json: bool) -> None:
    """Records, in the order of their callers, methods and keys.

    \b
    wirecall ledger list sqlite:ledger.db --state unknown
    """
    place = _place(after) if after else None

    async def read(ledger: Ledger) -> list[Record]:
        return await _page(ledger, State(state) if state else None, limit + 1, place)

    records = _with(found(target), read)
    more = len(records) > limit
    records = records[:limit]
    cursor = _cursor(records[-1].id) if more else None
    out = Output(as_json)
    out.result([_document(each) for each in records], lambda: _table(out, records), next=cursor)
    if cursor and not as_json:
        out.note(f"There are more: --after {cursor}")


@command.command("show")
@_WORDS
@_CALLER
@json_option
def show_record(words: tuple[str, ...], caller: str, as_json: bool) -> None:
    """All that is known of one command.

    \b
    wirecall ledger show sqlite:ledger.db charge order-7
    """
    where, id = _named(words, caller)

    async def read(ledger: Ledger) -> Record:
        return await _get(ledger, id)

    record = _document(_with(where, read), whole=True)
    Output(as_json).result(record, "\n".join(f"{name:<12} {_cell(value)}" for name, value in record.items()))


@command.command("stats")
@_WHERE
@json_option
def count_records(target: str | None, as_json: bool) -> None:
    """How many records there are in each state."""
    counts = _with(found(target), lambda ledger: ledger.counts())
    numbers = {state.value: counts.get(state, 0) for state in State}
    out = Output(as_json)
    out.result(numbers, lambda: out.table(["STATE", "RECORDS"], [(name, str(count)) for name, count in numbers.items()]))
    if numbers["unknown"] and not as_json:
        out.note("Some outcomes are unknown: wirecall ledger list --state unknown, then wirecall ledger resolve", "unknown")


# --- changing -------------------------------------------------------------------------------------------------------


@command.command("sweep", short_help="Do the housekeeping that is due.")
@_WHERE
@json_option
def sweep_records(target: str | None, as_json: bool) -> None:
    """Do the housekeeping that is due: drop what is past its time, and say of the lost that they are unknown."""

    async def sweep(ledger: Ledger) -> int:
        with progress(None, "Sweeping") as advance:
            changed = 0
            while count := await ledger.sweep(PAGE):
                changed += count
                advance(count)
        return changed

    changed = _with(found(target), sweep)
    Output(as_json).result({"changed": changed}, f"{count_of(changed, 'record')} changed")


@command.command("resolve", short_help="Settle a command of unknown outcome.")
@_WORDS
@_CALLER
@click.option("--done", is_flag=True, help="It took effect: retries get --result.")
@click.option("--not-done", is_flag=True, help="It did not: the next call with this key runs.")
@click.option("--result", metavar="JSON", help="With --done: what the command would have returned. [default: null]")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def resolve_record(
    words: tuple[str, ...], caller: str, done: bool, not_done: bool, result: str | None, yes: bool, as_json: bool
) -> None:
    """Settle a command whose outcome is unknown, after you have found out.

    \b
    wirecall ledger resolve sqlite:ledger.db charge order-7 --done --result '{"paid": 500}'
    wirecall ledger resolve sqlite:ledger.db charge order-8 --not-done
    """
    where, id = _named(words, caller)
    if done == not_done:
        why = "only you can tell" if not done else "it cannot be both done and not done"
        raise Failure("What did you find out?", why, "--done --result JSON, or --not-done")
    outcome = _outcome(where, id, done, result)

    async def read(ledger: Ledger) -> Record:
        return _check_unknown(await _get(ledger, id))

    _confirm(_with(where, read), outcome, yes)
    if not _with(where, lambda ledger: ledger.resolve(id, outcome, where.retention(id.method))):
        raise Failure(f"{id} was settled by somebody else.", "it is not unknown any more", "wirecall ledger show tells how")
    state = "done" if outcome else "absent"
    text = "is done: retries get its result" if outcome else "was not done: the next call with this key runs"
    Output(as_json).result({**_names(id), "state": state}, f"{id} {text}")


def _outcome(where: Found, id: RecordId, done: bool, result: str | None) -> Outcome | None:
    from wirecall.commands.outcome import outcome_of

    if not done:
        if result is not None:
            raise Failure("What was not done has no result.", "--not-done and --result", "drop one of them")
        return None
    try:
        value = msgspec.json.decode(result or "null")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise Failure("--result is not JSON.", str(error), """--result '{"paid": 500}', --result '"text"'""") from None
    return outcome_of("result", _as_kept(where, id.method, value), id)


def _as_kept(where: Found, method: str, value: Any) -> Any:
    """A tool's record holds what MCP clients get (`tools/call`), with the value inside."""
    if not method.startswith("tools/call:"):
        return value
    from wirecall.mcp.server.results import call_result

    declared = where.method(method)
    if declared is not None:
        return call_result(declared)(value)
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        return value
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return {"resultType": "complete", "content": [{"type": "text", "text": text}], "structuredContent": value}


def _check_unknown(record: Record) -> Record:
    if record.state is State.UNKNOWN:
        return record
    nexts = {
        State.RUNNING: "wait until its lease is over, then: wirecall ledger sweep",
        State.WAITING: "its caller was asked something, and may still answer",
    }
    next = nexts.get(record.state, "wirecall ledger show tells how it ended")
    raise Failure(f"{record.id} is not unknown.", f"it is {record.state.value}", next, type="not_unknown")


def _confirm(record: Record, outcome: Outcome | None, yes: bool) -> None:
    effect = "Retries will get this result" if outcome else "The next call with this key will run"
    begun = f"{record.id} began {_time(record.started_at)}"
    if not yes and ask(f"{begun}. {effect}. Is this what you found out?") is False:
        raise Interrupted("nothing was changed", "find out, then try again")


# --- records --------------------------------------------------------------------------------------------------------


def _with(where: Found, work: Callable[[Ledger], Awaitable[Any]]) -> Any:
    """What a piece of work on the ledger gives."""

    async def session() -> Any:
        async with opened_ledger(where) as ledger:
            return await work(ledger)

    return run(session())


async def _page(ledger: Ledger, state: State | None, limit: int, after: RecordId | None) -> list[Record]:
    records: list[Record] = []
    while len(records) < limit:
        page = await ledger.list(state, limit=min(PAGE, limit - len(records)), after=after)
        if not page:
            break
        records += page
        after = page[-1].id
    return records


async def _get(ledger: Ledger, id: RecordId) -> Record:
    record = await ledger.get(id)
    if record is not None:
        return record
    others = [each.id for each in await _page(ledger, None, 2 * PAGE, None)]
    near = nearest(str(id), [str(each) for each in others])
    callers = sorted({each.caller for each in others if (each.method, each.key) == (id.method, id.key)})
    why = f"callers that have one: {', '.join(map(repr, callers))}" if callers else f"the nearest is {near}" if near else ""
    next = f"--caller {callers[0]}" if callers else "wirecall ledger list shows what there is"
    raise Failure(f"There is no record {id}.", why, next, exit=Exit.USAGE, type="no_record")


def _named(words: tuple[str, ...], caller: str) -> tuple[Found, RecordId]:
    if len(words) not in (2, 3):
        raise Failure(
            "Which record?", f"{count_of(len(words), 'word')} given", "[TARGET] METHOD KEY, such as: charge order-7"
        )
    *target, method, key = words
    return found(target[0] if target else None), RecordId(caller, method, key)


def _cursor(id: RecordId) -> str:
    """A record's id as one word; its parts may hold any sign."""
    return base64.urlsafe_b64encode(msgspec.json.encode(msgspec.structs.astuple(id))).decode().rstrip("=")


def _place(cursor: str) -> RecordId:
    try:
        parts = msgspec.json.decode(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), type=tuple[str, str, str])
    except (binascii.Error, msgspec.DecodeError, ValueError):
        raise Failure(f"{cursor!r} is not a cursor.", "", "give what the page before printed") from None
    return RecordId(*parts)


def _names(id: RecordId) -> dict[str, str]:
    return {"caller": id.caller, "method": id.method, "key": id.key}


def _document(record: Record, *, whole: bool = False) -> dict[str, Any]:
    told: dict[str, Any] = {
        **_names(record.id),
        "state": record.state.value,
        "attempts": record.attempts,
        "committed": record.committed,
        "started": _time(record.started_at),
        "completed": None if record.completed_at is None else _time(record.completed_at),
    }
    if not whole:
        return told
    told |= {"lease_left": round(max(record.lease_left, 0.0), 1), "fence": record.fence, "params": record.fingerprint.hex()}
    return {**told, **_ended(record.outcome)} if record.outcome is not None else told


def _ended(outcome: Outcome) -> dict[str, Any]:
    kept = "not kept" if outcome.payload is None else msgspec.json.decode(outcome.payload)
    return {outcome.kind: kept, "digest": outcome.digest.hex()}


def _table(out: Output, records: Sequence[Record]) -> None:
    columns = ["STATE", "METHOD", "KEY", "CALLER", "STARTED", "TRIES"]
    rows = [
        (each.state.value, each.id.method, each.id.key, each.id.caller, _time(each.started_at), str(each.attempts))
        for each in records
    ]
    out.table(columns, rows)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(" ", "seconds")


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
