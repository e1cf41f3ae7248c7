"""How a person settles a command whose outcome is unknown: the rules of every way to do it.

1. Only a record whose outcome is unknown can be settled. A committed run whose lease is over counts
   as unknown.
2. The person states a reason of 10 to 500 characters, and the last characters of the key.
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
from wirecall.console.records import details, why_not
from wirecall.console.source import NotFound, Refusal
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
    """Settle a record by a person's verdict; return its state. `Refusal`: nothing was changed."""
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
        raise _changed(id, None, declared)
    if record.standing.value != resolution.state or record.fence != resolution.fence:
        raise _changed(id, record, declared)
    if record.standing is not State.UNKNOWN:
        raise Refusal(
            409,
            {
                "error": {
                    "type": "not_unknown",
                    "message": f"{id} is not unknown.",
                    "hint": why_not(record),
                },
                "record": details(record, declared),
            },
        )
    state: Settled = "unknown"
    if resolution.verdict != "leave":
        terms = Terms() if declared is None else declared.terms
        if not await ledger.resolve(id, outcome, terms.retention, fence=record.fence):
            raise _changed(id, await ledger.get(id), declared)
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
    if declared is not None:
        return msgspec.json.decode(msgspec.json.encode(call_result(declared)(value)))
    if is_wrapped:
        return value
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
    return AuditEntry(
        time=time.time(),
        caller=actor,
        method=record.id.method,
        key=record.id.key,
        digest=record.fingerprint.hex(),
        id=None,
        outcome="resolved",
        code=None,
        replayed=False,
        duration_ms=0.0,
        host=host(),
        pid=os.getpid(),
        action=action,
    )


def _refused(kind: str, message: str, hint: str) -> Refusal:
    return Refusal(400, {"error": {"type": kind, "message": message, "hint": hint}})


def _changed(id: RecordId, record: Record | None, declared: Method | None) -> Refusal:
    """Return the refusal after another person, or the late outcome, was faster."""
    if record is None:
        missing = NotFound(f"record {id}").document["error"]
        missing = {**missing, "type": "changed", "hint": "it was resolved as not done, or removed"}
        return Refusal(409, {"error": missing, "record": None})
    by = record.resolved_by
    message = f"{id} is {record.standing.value} now, not as you have seen it."
    if by is not None:
        message = f"{id} was resolved by {by}."
    return Refusal(
        409,
        {
            "error": {
                "type": "changed",
                "message": message,
                "hint": "look at it again: nothing was changed",
            },
            "record": details(record, declared),
        },
    )
