"""How a person settles a command whose outcome is unknown: in Python, in the terminal, in the console.

1. Only a record whose outcome is unknown can be settled. A committed run whose lease is over counts
   as unknown.
2. The person states a reason of 10 to 500 characters, and the last characters of the key. A person
   who has typed the whole key has stated them.
3. The request carries the fence and the state that the person has seen. The store compares them in
   the same step in which it changes the record. If another person or the late outcome was faster,
   nothing is overwritten.
4. A result must fit the type that the method returns.
5. The audit trail gets one line: the person, the time, both states and the reason. The record
   keeps the name of the person, and replays of a tool say so in `_meta`.
"""

import os
import time
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec import Struct

from wirecall.audit import AuditEntry
from wirecall.commands.outcome import outcome_of
from wirecall.errors import WirecallError
from wirecall.ledger.base import DIGEST, Ledger, Outcome, Record, RecordId, State
from wirecall.logs import host
from wirecall.mcp.server.calls import call_result
from wirecall.mcp.types import RESOLVED_META
from wirecall.protocol.messages import JsonObject
from wirecall.server.method import Method, Terms

# Characters of a reason.
SHORTEST_REASON = 10
LONGEST_REASON = 500
# Characters of the end of a key that a person types.
TAIL = 6

Note = Callable[[AuditEntry], None]
Settled = Literal["done", "absent", "unknown"]
Refused = Literal["reason", "tail", "result", "changed", "not_unknown"]


class NotSettled(WirecallError):
    """A verdict that changed nothing. `record` is the record as it is now, if it matters."""

    def __init__(self, kind: Refused, message: str, hint: str, record: Record | None) -> None:
        super().__init__(message)
        self.kind = kind
        self.hint = hint
        self.record = record

    @property
    def was_late(self) -> bool:
        """Whether the record was settled already, or is not unknown."""
        return self.kind in ("changed", "not_unknown")


class Resolution(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a person decided, and what the person had seen."""

    fence: int
    state: str
    verdict: Literal["happened", "not_happened", "leave"]
    reason: str
    # The last characters of the key.
    tail: str
    # The result as JSON text, for "happened".
    result: str = "null"


def check_reason(reason: str) -> str:
    """Return a reason without surrounding space; refuse one that says too little or too much."""
    reason = " ".join(reason.split())
    if SHORTEST_REASON <= len(reason) <= LONGEST_REASON:
        return reason
    raise _refused(
        "reason",
        f"A reason must have {SHORTEST_REASON} to {LONGEST_REASON} characters, got {len(reason)}.",
        "say how you found out, for the readers of the audit trail",
    )


async def settle(
    ledger: Ledger,
    id: RecordId,
    resolution: Resolution,
    *,
    declared: Method | None,
    actor: str,
    note: Note | None,
) -> Settled:
    """Settle a record by a person's verdict; return its state."""
    reason = check_reason(resolution.reason)
    if resolution.tail != id.key[-TAIL:]:
        raise _refused(
            "tail",
            f"Expected the last {TAIL} characters of the key, got {resolution.tail!r}.",
            "they make sure that this is the record you mean",
        )
    outcome: Outcome | None = None
    if resolution.verdict == "happened":
        outcome = stated_outcome(id, declared, resolution.result, actor)
    record = await ledger.get(id)
    if record is None:
        raise _changed(id, None)
    if record.standing.value != resolution.state or record.fence != resolution.fence:
        raise _changed(id, record)
    if record.standing is not State.UNKNOWN:
        raise NotSettled("not_unknown", f"{id} is not unknown.", why_not(record) or "", record)
    state: Settled = "unknown"
    if resolution.verdict != "leave":
        terms = Terms() if declared is None else declared.terms
        if not await ledger.resolve(id, outcome, terms.retention, fence=record.fence):
            raise _changed(id, await ledger.get(id))
        state = "done" if outcome is not None else "absent"
    if note is not None:
        note(_line(record, resolution.verdict, state, reason, actor, outcome))
    return state


def stated_outcome(id: RecordId, declared: Method | None, result: str, actor: str) -> Outcome:
    """Return the outcome to record for a result in JSON that a person states."""
    try:
        value = msgspec.json.decode(result)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _refused(
            "result", f"The result is not JSON: {error}", 'for example {"paid": 500}'
        ) from None
    is_tool = id.method.startswith("tools/call:")
    is_wrapped = isinstance(value, dict) and isinstance(value.get("content"), list)
    if not (is_tool and is_wrapped):
        _check_type(declared, result)
    if is_tool:
        value = _as_tool_result(declared, value, is_wrapped=is_wrapped)
        if isinstance(value, dict):
            meta = value.get("_meta")
            known = meta if isinstance(meta, dict) else {}
            value = {**value, "_meta": {**known, RESOLVED_META: actor}}
    return outcome_of("result", value, id).stated_by(actor)


def _as_tool_result(declared: Method | None, value: Any, *, is_wrapped: bool) -> Any:
    """Return the result of `tools/call`, with the value inside, as the record of a tool holds it."""
    if is_wrapped:
        return value
    if declared is not None:
        return msgspec.json.decode(msgspec.json.encode(call_result(declared)(value)))
    text = value
    if not isinstance(value, str):
        text = msgspec.json.encode(value).decode()
    return {
        "resultType": "complete",
        "content": [{"type": "text", "text": text}],
        "structuredContent": value,
    }


def _check_type(declared: Method | None, result: str) -> None:
    """Refuse a result that callers of the method could not read; null stands for no result."""
    if declared is None or result.strip() == "null":
        return
    returns = declared.signature.returns
    if returns is Any:
        return
    try:
        msgspec.json.decode(result, type=returns)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise _refused(
            "result",
            f"The result does not fit the method: {declared.name} returns {type_name(returns)}: {error}",
            "give the result that it returned, or null",
        ) from None
    except TypeError:  # pydantic's types, and others that only their own library decodes
        return


def type_name(returns: object) -> str:
    """Return the name of a type for people."""
    if isinstance(returns, type) and not hasattr(returns, "__args__"):
        return returns.__name__
    return str(returns)


def _line(
    record: Record,
    verdict: str,
    state: str,
    reason: str,
    actor: str,
    outcome: Outcome | None,
) -> AuditEntry:
    action: JsonObject = {
        "what": "resolve",
        "verdict": verdict,
        "of": record.id.caller,
        "from": record.standing.value,
        "to": state,
        "fence": record.fence,
        "reason": reason,
    }
    if outcome is not None:
        action["result_digest"] = outcome.digest[:DIGEST].hex()
    return action_entry(
        actor,
        record.id.method,
        "resolved",
        action,
        key=record.id.key,
        digest=record.fingerprint.hex(),
    )


def action_entry(
    actor: str,
    method: str,
    outcome: str,
    action: JsonObject,
    *,
    key: str | None = None,
    digest: str = "",
) -> AuditEntry:
    """Return the line of the audit trail about what a person has done."""
    return AuditEntry(
        time=time.time(),
        caller=actor,
        method=method,
        key=key,
        digest=digest,
        id=None,
        outcome=outcome,
        code=None,
        replayed=False,
        duration_ms=0.0,
        host=host(),
        pid=os.getpid(),
        action=action,
    )


def operator() -> str:
    """Return the name of the person at this machine, as the record keeps it."""
    import getpass

    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # the user has no name
        name = f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"
    return f"{name}@{host()}"


def why_not(record: Record) -> str | None:
    """Return why a record cannot be resolved; None if it can."""
    if record.standing is State.UNKNOWN:
        return None
    if record.state is State.RUNNING and record.lease_left > 0:
        return f"It runs: its lease ends in {record.lease_left:.0f} s unless its server renews it."
    if record.state is State.RUNNING:
        return (
            "Its process ended before the commit point, so nothing was done: "
            "the next call with this key runs."
        )
    if record.state is State.WAITING:
        return "It waits for an answer of its caller, which may still come."
    return "Its outcome is known."


def _refused(kind: Refused, message: str, hint: str) -> NotSettled:
    return NotSettled(kind, message, hint, None)


def _changed(id: RecordId, record: Record | None) -> NotSettled:
    """Return the error after another person, or the late outcome, was faster."""
    if record is None:
        message = f"There is no record {id}."
        return NotSettled("changed", message, "it was resolved as not done, or removed", None)
    by = record.resolved_by
    message = f"{id} is {record.standing.value} now, not as you have seen it."
    if by is not None:
        message = f"{id} was resolved by {by}."
    return NotSettled("changed", message, "look at it again: nothing was changed", record)
