"""How a command ended, as the ledger keeps it and as the caller hears it.

Values become bytes once (`outcome_of`); what is kept of them may be less (`stored`); a record gives them back, or the reason
why it cannot (`recorded`); and an outcome becomes an answer (`answer`), marked when it is a replay.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.digests import sha256
from wirecall.errors import EncodeError, InternalError, OutcomeUnknown, ResultNotRetained, RpcError
from wirecall.ledger.base import Outcome, Record, RecordId, State
from wirecall.logs import failed
from wirecall.protocol.messages import ErrorObject, encode, failure

Ended = tuple[Outcome, bool]  # an outcome, and whether another run left it


class Sealed(Struct, frozen=True, gc=False):
    """A result as bytes, and whether it comes from the ledger."""

    result: Raw
    replayed: bool


def outcome_of(kind: Literal["result", "error"], value: Any, id: RecordId) -> Outcome:
    """An outcome as bytes. Of a result that cannot be encoded only the fact remains, since the effect has happened; of an
    error its code and its message: it is still an error, and what a transaction did is undone."""
    try:
        payload = encode(failure(None, value).error if kind == "error" else value)
    except EncodeError as error:
        failed(id.method, None, error, caller=id.caller, key=id.key)
        if kind == "result":
            return Outcome("result", None, b"")
        payload = encode(ErrorObject(value.code, value.message.encode(errors="replace").decode()))
    return Outcome(kind, payload, sha256(payload))


def stored(outcome: Outcome, limit: int) -> Outcome:
    """What the ledger keeps: of a large result only the digest, of a large error its code and the start of its message."""
    if outcome.payload is None or len(outcome.payload) <= limit:
        return outcome
    if outcome.kind == "result":
        return Outcome(outcome.kind, None, outcome.digest)
    error = _decode_error(outcome.payload)
    return Outcome(outcome.kind, encode(ErrorObject(error.code, error.message[:200])), outcome.digest)


def recorded(record: Record) -> Outcome:
    """The outcome a record holds, or the error that says why it holds none."""
    if record.state is State.UNKNOWN:
        raise unknown(record.id, record)
    assert record.outcome is not None
    if record.outcome.payload is None:
        raise ResultNotRetained(ran="yes", digest=record.outcome.digest.hex(), completed_at=record.completed_at)
    return record.outcome


def answer(outcome: Outcome, *, replayed: bool, recorded: bool = True) -> Sealed:
    """What the caller gets: a result, or the recorded error raised, with its marks in `data`."""
    if outcome.payload is None:
        raise InternalError(ran="yes")
    if outcome.kind == "result":
        return Sealed(Raw(outcome.payload), replayed)
    raise _as_error(outcome.payload, {"replayed": True} if replayed else {} if recorded else {"recorded": False})


def unknown(id: RecordId, record: Record | None) -> OutcomeUnknown:
    """Nobody knows; what is known of the record helps whoever finds out."""
    known: dict[str, Any] = {} if record is None else {"started_at": record.started_at, "attempts": record.attempts}
    return OutcomeUnknown(ran="unknown", record=str(id), **known)


_decode_error = msgspec.json.Decoder(ErrorObject).decode


def _as_error(payload: bytes, marks: dict[str, bool]) -> RpcError:
    error = _decode_error(payload)
    data = None if error.data is UNSET else error.data
    if marks:
        data = {**data, **marks} if isinstance(data, dict) else {**marks, **({} if data is None else {"data": data})}
    return RpcError(error.code, error.message, data)
