"""Resolving an unknown outcome: the rules of `wirecall.resolve`, on every store."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.console.records import ID, unknown
from tests.servers import Store
from wirecall import App, Done, NotDone
from wirecall.audit import Audit, AuditEntry, verify
from wirecall.console.records import refusal_of
from wirecall.errors import UsageError
from wirecall.ledger.base import Ledger, Outcome, Record, RecordId, State
from wirecall.resolve import NotSettled, Resolution, operator, settle


def resolution(record: Record, **changes: Any) -> Resolution:
    stated = Resolution(
        fence=record.fence,
        state="unknown",
        verdict="happened",
        reason="the bank has the payment",
        tail="r-4711",
        result='{"paid": 5}',
    )
    return msgspec.structs.replace(stated, **changes)


async def refused(ledger: Ledger, stated: Resolution, **more: Any) -> NotSettled:
    with pytest.raises(NotSettled) as raised:
        await settle(ledger, ID, stated, declared=None, actor="ada", note=None, **more)
    return raised.value


async def test_resolve_keeps_the_operator_and_writes_a_line(ledger: Ledger, tmp_path: Path) -> None:
    record = await unknown(ledger)
    trail = Audit(str(tmp_path / "audit.jsonl"))
    note = trail.append
    state = await settle(ledger, ID, resolution(record), declared=None, actor="ada@host", note=note)
    trail.close()
    assert state == "done"
    found = await ledger.get(ID)
    assert found is not None and found.state is State.DONE
    assert found.resolved_by == "ada@host"
    assert found.outcome is not None and found.outcome.payload == b'{"paid":5}'
    lines = (tmp_path / "audit.jsonl").read_bytes().splitlines()
    line = json.loads(lines[0])
    assert len(lines) == 1 and verify(tmp_path / "audit.jsonl").ok
    assert (line["caller"], line["outcome"], line["key"]) == ("ada@host", "resolved", ID.key)
    action = line["action"]
    assert (action["from"], action["to"], action["verdict"]) == ("unknown", "done", "happened")
    assert action["reason"] == "the bank has the payment"
    assert action["fence"] == record.fence


async def test_resolve_not_happened_releases_the_record(ledger: Ledger) -> None:
    record = await unknown(ledger)
    stated = resolution(record, verdict="not_happened")
    notes: list[AuditEntry] = []
    state = await settle(ledger, ID, stated, declared=None, actor="ada", note=notes.append)
    assert state == "absent"
    assert await ledger.get(ID) is None
    assert len(notes) == 1


async def test_resolve_leave_changes_nothing_but_the_trail(ledger: Ledger) -> None:
    record = await unknown(ledger)
    notes: list[AuditEntry] = []
    stated = resolution(record, verdict="leave")
    state = await settle(ledger, ID, stated, declared=None, actor="ada", note=notes.append)
    assert state == "unknown"
    assert await ledger.get(ID) == record
    assert notes[0].action is not None and notes[0].action["to"] == "unknown"


async def test_resolve_with_a_stale_fence_gets_the_fresh_record(ledger: Ledger) -> None:
    old = await unknown(ledger)
    assert await ledger.resolve(ID, None, fence=old.fence)
    fresh = await unknown(ledger, nonce=b"m" * 16)
    assert fresh.fence > old.fence
    refusal = await refused(ledger, resolution(old))
    assert refusal.kind == "changed" and refusal.was_late
    assert refusal.record is not None and refusal.record.fence == fresh.fence
    shown = refusal_of(refusal, None)
    assert shown.status == 409 and shown.document["record"]["fence"] == fresh.fence
    assert await ledger.get(ID) == fresh


async def test_ledger_resolve_compares_the_fence(ledger: Ledger) -> None:
    record = await unknown(ledger)
    outcome = Outcome("result", b"1", b"d" * 32)
    assert not await ledger.resolve(ID, outcome, fence=record.fence + 1)
    assert not await ledger.resolve(ID, None, fence=record.fence - 1)
    assert await ledger.get(ID) == record
    assert await ledger.resolve(ID, outcome, fence=record.fence)


async def test_resolve_after_the_late_outcome_changes_nothing(ledger: Ledger) -> None:
    record = await unknown(ledger)
    late = Outcome("result", b'"late"', b"d" * 32)
    assert await ledger.complete(record.token, late, 60)
    refusal = await refused(ledger, resolution(record))
    shown = refusal_of(refusal, None)
    assert shown.status == 409
    assert shown.document["record"]["state"] == "done"
    found = await ledger.get(ID)
    assert found is not None and found.outcome == late and found.resolved_by is None


async def test_two_people_resolve_at_once_and_one_wins(ledger: Ledger) -> None:
    record = await unknown(ledger)
    stated = resolution(record)
    outcomes = await asyncio.gather(
        *(
            settle(ledger, ID, stated, declared=None, actor=name, note=None)
            for name in ("ada", "bob")
        ),
        return_exceptions=True,
    )
    won = [each for each in outcomes if each == "done"]
    lost = [each for each in outcomes if isinstance(each, NotSettled)]
    assert len(won) == 1 and len(lost) == 1 and lost[0].was_late
    found = await ledger.get(ID)
    assert found is not None
    assert found.resolved_by == ("ada" if outcomes[0] == "done" else "bob")


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"reason": "too short"}, "reason"),
        ({"reason": " " * 40}, "reason"),
        ({"reason": "x" * 501}, "reason"),
        ({"tail": "-4711"}, "tail"),
        ({"tail": ""}, "tail"),
        ({"result": "{"}, "result"),
    ],
)
async def test_resolve_refuses_before_it_reads_the_ledger(
    changes: dict[str, Any], kind: str
) -> None:
    from wirecall.ledger.memory import MemoryLedger

    ledger: Any = MemoryLedger()
    record = await unknown(ledger)
    refusal = await refused(ledger, resolution(record, **changes))
    assert refusal.kind == kind and not refusal.was_late
    shown = refusal_of(refusal, None)
    assert (shown.status, shown.document["error"]["type"]) == (400, kind)
    assert await ledger.get(ID) == record


async def test_resolve_checks_the_result_against_the_method() -> None:
    from wirecall.ledger.memory import MemoryLedger

    app = App("shop")

    @app.command
    def charge() -> dict[str, int]:
        return {}

    ledger: Any = MemoryLedger()
    record = await unknown(ledger)
    stated = resolution(record, result='{"paid": "five"}')
    with pytest.raises(NotSettled) as raised:
        await settle(ledger, ID, stated, declared=app.registry.get("charge"), actor="a", note=None)
    assert raised.value.kind == "result"


async def test_replay_of_a_resolved_tool_says_so_in_meta(store: Store) -> None:
    """A caller that repeats the call sees in `_meta` that a person stated the result."""
    id = RecordId("", "tools/call:charge", "order-4711")
    ledger = await store.open()
    record = await unknown(ledger, id)
    await settle(ledger, id, resolution(record), declared=None, actor="ada", note=None)
    found = await ledger.get(id)
    await ledger.aclose()
    assert found is not None and found.outcome is not None and found.outcome.payload is not None
    result = json.loads(found.outcome.payload)
    assert result["_meta"]["io.wirecall/resolved-by"] == "ada"
    assert result["structuredContent"] == {"paid": 5}


async def test_app_resolve_follows_the_rules(tmp_path: Path) -> None:
    """The reason, the fence that was seen, the line of the trail and the name, as in the console."""
    app = App(
        "shop", ledger=f"sqlite:{tmp_path / 'l.db'}", audit=f"file:{tmp_path / 'audit.jsonl'}"
    )

    @app.command
    def charge() -> dict[str, int]:
        return {}

    reason = "the bank has the payment"
    verdict = Done({"paid": 5})
    assert not await app.resolve("charge", ID.key, verdict, reason=reason), "there is no record"
    ledger = await app.ledger()
    record = await unknown(ledger)
    with pytest.raises(UsageError, match="A reason must have 10 to 500 characters, got 2"):
        await app.resolve("charge", ID.key, verdict, reason="ok")
    with pytest.raises(UsageError, match="does not fit the method"):
        await app.resolve("charge", ID.key, Done({"paid": "five"}), reason=reason)
    stale = record.fence + 1
    assert not await app.resolve("charge", ID.key, verdict, reason=reason, fence=stale)
    assert await ledger.get(ID) == record
    assert await app.resolve("charge", ID.key, verdict, reason=reason, operator="ada")
    assert not await app.resolve("charge", ID.key, NotDone(), reason=reason, operator="bob")
    found = await ledger.get(ID)
    assert found is not None and found.resolved_by == "ada"
    await app.aclose()
    (line,) = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert (line["caller"], line["action"]["reason"]) == ("ada", reason)
    assert verify(tmp_path / "audit.jsonl").ok


async def test_app_resolve_keeps_the_user_of_the_process(tmp_path: Path) -> None:
    app = App("shop", ledger=f"sqlite:{tmp_path / 'l.db'}")
    ledger = await app.ledger()
    await unknown(ledger)
    assert await app.resolve("charge", ID.key, Done(5), reason="the bank has the payment")
    found = await ledger.get(ID)
    await app.aclose()
    assert found is not None and found.resolved_by == operator()
