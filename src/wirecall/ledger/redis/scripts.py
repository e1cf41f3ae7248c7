"""What goes to Redis and what comes back: the scripts of the folder `lua`, their arguments, and the record they return.

1. A script touches one record, and where that is of a call without a key, the index of its likeness and the records there;
   or it touches one task. Its keys are in one slot, so it runs on a server alone and in a cluster alike.
2. Times and durations are whole microseconds, by the server's clock.
3. A record or a task comes as one string of fields, which `cut` takes apart.
"""

import hashlib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from msgspec import Struct

from wirecall.ledger.base import MAX_ATTEMPTS, TOMBSTONE_FACTOR, Outcome, Record, RecordId, State

# How long the key outlives the record: a duplicate that waits elsewhere looks twice a second, however short the retention.
GRACE = 60.0

# A lease or retention of "forever" is 100 years, so that every time stays a number that Lua holds exactly.
FOREVER = 100 * 365 * 86_400.0


# --- arguments and answers -------------------------------------------------------------------------------------------


def micros(seconds: float) -> int:
    return int(min(seconds, FOREVER) * 1e6)


def fields_of(outcome: Outcome) -> tuple[Any, ...]:
    bare = outcome.kind, outcome.digest
    return bare if outcome.payload is None else (*bare, outcome.payload)


def record_of(id: RecordId, seen: bytes) -> Record:
    """A record from what `view` in common.lua returns."""
    (
        state,
        fence,
        nonce,
        fingerprint,
        committed,
        attempts,
        lease_left,
        started_at,
        completed_at,
        kind,
        digest,
        payload,
        delivery,
        deliverer,
    ) = cut(seen)
    return Record(
        id=id,
        fingerprint=fingerprint,
        state=STATES[state],
        fence=int(fence),
        nonce=nonce,
        committed=committed == b"1",
        attempts=int(attempts),
        lease_left=int(lease_left) / 1e6,
        started_at=int(started_at) / 1e6,
        completed_at=None if completed_at is None else int(completed_at) / 1e6,
        outcome=None if kind is None else Outcome(kind.decode(), payload, digest),
        delivery=None if delivery is None else delivery.decode(),
        deliverer=deliverer or b"",
    )


def cut(seen: bytes) -> Iterator[Any]:
    """The fields that `joined` in common.lua puts together: first their lengths, -1 for none, then all of them."""
    lengths, _, fields = seen.partition(b"\n")
    start = 0
    for length in map(int, lengths.split()):
        if length < 0:
            yield None
        else:
            yield fields[start : (start := start + length)]


STATES = {state.value.encode(): state for state in State}


# --- scripts ---------------------------------------------------------------------------------------------------------


class Script(Struct, frozen=True):
    """A script, and the name under which a server knows it once it has seen it."""

    source: bytes
    sha: str
    writes: bool


def _script(name: str, *, writes: bool = True) -> Script:
    constants = f"""
    local MAX_ATTEMPTS, TOMBSTONE_FACTOR, GRACE = {MAX_ATTEMPTS}, {TOMBSTONE_FACTOR}, {micros(GRACE)}
    """
    folder = files("wirecall.ledger.redis") / "lua"
    source = constants.encode() + (folder / "common.lua").read_bytes() + (folder / f"{name}.lua").read_bytes()
    return Script(source, hashlib.sha1(source, usedforsecurity=False).hexdigest(), writes)


CLAIM = _script("claim")
DELIVER = _script("deliver")
BEGIN_TASK = _script("begin_task")
WRITE_TASK = _script("write_task")
CHANGE_TASK = _script("change_task")
HEARTBEAT = _script("heartbeat")
COMMIT_POINT = _script("commit_point")
COMPLETE = _script("complete")
SUSPEND = _script("suspend")
RELEASE = _script("release")
ABANDON = _script("abandon")
LAPSE = _script("lapse")
RESOLVE = _script("resolve")
SWEEP = _script("sweep")
PING = _script("ping")
SPEND = _script("spend")
DUE = _script("due", writes=False)
GET = _script("get", writes=False)
STATE = _script("state", writes=False)
TASK = _script("task", writes=False)
