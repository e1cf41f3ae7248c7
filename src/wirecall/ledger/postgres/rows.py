"""What goes into PostgreSQL and what comes out of it: the named statements, the values they take, the rows they give.

The rules of the file:

1. All SQL is in `postgres.sql`, in named parts; `SQL` has them by their names, `SCHEMA` the migrations in their order.
2. What goes out in numbers (claims, completions, questions) is JSON, a list in one parameter; all else is named parameters.
3. Text in PostgreSQL holds no NUL: a record id with one is refused, as the store's limit, with `LedgerDown`.
"""

import re
from importlib.resources import files
from typing import Any, TypeAlias

from msgspec import Struct, json

from wirecall.ledger.base import (
    MAX_ATTEMPTS,
    TOMBSTONE_FACTOR,
    Claim,
    LedgerDown,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
)

FOREVER = 1e10  # seconds, some 300 years

Params: TypeAlias = dict[str, Any]
Row: TypeAlias = tuple[Any, ...]
Rows: TypeAlias = list[Row]


def _parts() -> dict[str, str]:
    """The named parts of the SQL file, their constants filled in."""
    text = files("wirecall.ledger.postgres").joinpath("postgres.sql").read_text("utf-8")
    constants = {"max_attempts": MAX_ATTEMPTS, "forever": FOREVER, "burial": TOMBSTONE_FACTOR - 1}
    filled = re.sub(r"\{(\w+)\}", lambda name: str(constants[name[1]]), text)
    _, *parts = re.split(r"^-- name: (.+)\n", filled, flags=re.MULTILINE)
    return {name: part.strip() for name, part in zip(parts[::2], parts[1::2], strict=True)}


SQL = _parts()
SCHEMA = [part for name, part in SQL.items() if name.startswith("schema ")]


# --- values that go in -----------------------------------------------------------------------------------------------

encode = json.Encoder().encode


class Completion(Struct, frozen=True):
    id: RecordId
    fence: int
    nonce: bytes
    outcome: Outcome
    retention: float


def completion_of(token: Token, outcome: Outcome, retention: float) -> Completion:
    return Completion(token.id, token.fence, token.nonce, outcome, retention)


def check(id: RecordId) -> None:
    try:
        if b"\0" not in f"{id.caller}{id.method}{id.key}".encode():
            return
    except UnicodeEncodeError:
        pass
    raise LedgerDown(f"PostgreSQL cannot store a record id with a NUL, or with half a character: {str(id)!a}")


def array(items: list[bytes]) -> str:
    return f"[{b','.join(items).decode()}]"


def id_of(id: RecordId) -> Params:
    check(id)
    return {"caller": id.caller, "method": id.method, "key": id.key}


def token_of(token: Token) -> Params:
    return {**id_of(token.id), "fence": token.fence, "nonce": token.nonce}


def outcome_of(outcome: Outcome) -> Params:
    return {"kind": outcome.kind, "payload": outcome.payload, "digest": outcome.digest}


# --- rows that come out ----------------------------------------------------------------------------------------------


def running(claim: Claim, fence: int, started_at: float) -> Record:
    return Record(
        id=claim.id,
        fingerprint=claim.fingerprint,
        state=State.RUNNING,
        fence=fence,
        nonce=claim.nonce,
        committed=claim.committed,
        attempts=1,
        lease_left=claim.lease,
        started_at=started_at,
    )


def record_of(row: Row) -> Record:
    caller, method, key, fingerprint, state, fence, nonce, committed, attempts, left, started, completed, *outcome = row
    kept = None if outcome[0] is None else Outcome(*outcome)
    id = RecordId(caller, method, key)
    return Record(id, fingerprint, State(state), fence, nonce, committed, attempts, left, started, completed, kept)
