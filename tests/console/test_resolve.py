"""Resolving an unknown outcome: the rules of `console.resolve`, on every store."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.console.records import ID, unknown
from tests.servers import Store
from wirecall import App
from wirecall.audit import Audit, AuditEntry, verify
from wirecall.console.resolve import Resolution, settle
from wirecall.console.source import Refusal
from wirecall.ledger.base import Ledger, Outcome, Record, RecordId, State


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


async def refused(ledger: Ledger, stated: Resolution, **more: Any) -> Refusal:
    with pytest.raises(Refusal) as raised:
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


async def test_resolve_with_a_stale_fence_gets_409_and_the_fresh_record(ledger: Ledger) -> None:
    old = await unknown(ledger)
    assert await ledger.resolve(ID, None, fence=old.fence)
    fresh = await unknown(ledger, nonce=b"m" * 16)
    assert fresh.fence > old.fence
    refusal = await refused(ledger, resolution(old))
    assert refusal.status == 409
    assert refusal.document["error"]["type"] == "changed"
    assert refusal.document["record"]["fence"] == fresh.fence
    assert await ledger.get(ID) == fresh


async def test_ledger_resolve_compares_the_fence(ledger: Ledger) -> None:
    record = await unknown(ledger)
    outcome = Outcome("result", b"1", b"d" * 32)
    assert not await ledger.resolve(ID, outcome, fence=record.fence + 1)
    assert not await ledger.resolve(ID, None, fence=record.fence - 1)
    assert await ledger.get(ID) == record
    assert await ledger.resolve(ID, outcome, fence=record.fence)


async def test_resolve_after_the_late_outcome_gets_409(ledger: Ledger) -> None:
    record = await unknown(ledger)
    late = Outcome("result", b'"late"', b"d" * 32)
    assert await ledger.complete(record.token, late, 60)
    refusal = await refused(ledger, resolution(record))
    assert refusal.status == 409
    assert refusal.document["record"]["state"] == "done"
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
    lost = [each for each in outcomes if isinstance(each, Refusal)]
    assert len(won) == 1 and len(lost) == 1 and lost[0].status == 409
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
    assert (refusal.status, refusal.document["error"]["type"]) == (400, kind)
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
    with pytest.raises(Refusal) as raised:
        await settle(ledger, ID, stated, declared=app.registry.get("charge"), actor="a", note=None)
    assert raised.value.document["error"]["type"] == "result"


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
