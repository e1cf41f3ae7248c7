"""Records of the ledger as the console's pages show them."""

import base64
import binascii

import msgspec

from wirecall.console.source import NotFound, Refusal
from wirecall.ledger.base import DIGEST, Place, Record, RecordId, State
from wirecall.protocol.messages import Json, JsonObject
from wirecall.resolve import NotSettled, why_not
from wirecall.server.method import Method

# Bytes of a stored answer that a page shows.
SHOWN = 65_536

# The states that a record passed through, by its state now.
_PATHS = {
    State.RUNNING: ["absent", "running"],
    State.WAITING: ["absent", "running", "waiting"],
    State.DONE: ["absent", "running", "done"],
    State.UNKNOWN: ["absent", "running", "unknown"],
    State.TOMBSTONE: ["absent", "running", "done", "tombstone"],
}


def word_of(id: RecordId) -> str:
    """Return a record's id as one word that is safe in an address."""
    data = msgspec.json.encode([id.caller, id.method, id.key])
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def record_id(word: str) -> RecordId:
    """Return the id of a record from its word."""
    try:
        names = msgspec.json.decode(_decoded(word), type=tuple[str, str, str])
    except (binascii.Error, msgspec.DecodeError, ValueError):
        raise NotFound(f"record {word[:100]!r}", "open it from the list") from None
    return RecordId(*names)


def cursor_of(record: Record) -> str:
    """Return where a page ends, as one word."""
    at, id = record.place
    data = msgspec.json.encode([at, id.caller, id.method, id.key])
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def place_of_cursor(cursor: str) -> Place:
    """Return the place in time from the word of `cursor_of`."""
    try:
        at, *names = msgspec.json.decode(_decoded(cursor), type=tuple[float, str, str, str])
    except (binascii.Error, msgspec.DecodeError, ValueError):
        message = f"{cursor[:100]!r} is not a cursor."
        hint = "take the one that the page before has"
        raise Refusal(
            400, {"error": {"type": "cursor", "message": message, "hint": hint}}
        ) from None
    return at, RecordId(*names)


def _decoded(word: str) -> bytes:
    return base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))


def brief(record: Record) -> JsonObject:
    """Return a record as a row of a list."""
    return {
        "id": word_of(record.id),
        "caller": record.id.caller,
        "method": record.id.method,
        "key": record.id.key,
        "state": record.standing.value,
        "attempts": record.attempts,
        "committed": record.committed,
        "started_at": record.started_at,
        "completed_at": record.completed_at,
        "lease_left_s": round(max(record.lease_left, 0.0), 1),
        "delivery": record.delivery,
        "resolved_by": record.resolved_by,
        "digest": None if record.outcome is None else record.outcome.digest[:DIGEST].hex(),
    }


def details(record: Record, declared: Method | None) -> JsonObject:
    """Return everything that a page shows about one record."""
    state = record.standing
    answer: Json = None
    if record.outcome is not None:
        payload = record.outcome.payload
        answer = {
            "kind": record.outcome.kind,
            "text": None if payload is None else payload[:SHOWN].decode(errors="replace"),
            "bytes": None if payload is None else len(payload),
            "digest": record.outcome.digest[:DIGEST].hex(),
        }
    params = None
    if record.params is not None:
        params = record.params[:SHOWN].decode(errors="replace")
    return {
        **brief(record),
        "fence": record.fence,
        "fingerprint": record.fingerprint.hex(),
        "path": _PATHS[state],
        "now": state.value,
        "can_resolve": state is State.UNKNOWN,
        "why_not": why_not(record),
        "params": params,
        "answer": answer,
        "after": AFTER,
        "task": None,
        "returns": None if declared is None else dict(declared.signature.result_schema),
    }


# What a retry gets after each verdict.
AFTER = {
    "happened": "The record is done: every retry with this key gets the result that you state.",
    "not_happened": "The record is released: the next call with this key runs.",
    "leave": "Nothing changes: a retry gets the error that its outcome is unknown.",
}


def refusal_of(error: NotSettled, declared: Method | None) -> Refusal:
    """Return the answer to a verdict that changed nothing."""
    stated: JsonObject = {"type": error.kind, "message": str(error), "hint": error.hint}
    if not error.was_late:
        return Refusal(400, {"error": stated})
    shown = None if error.record is None else details(error.record, declared)
    return Refusal(409, {"error": stated, "record": shown})
