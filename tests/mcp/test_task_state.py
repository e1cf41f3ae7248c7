"""The status of a task: one function derives it from the task's document and its record."""

from hashlib import sha256
from typing import Any, Literal

import pytest
from msgspec import Raw
from msgspec.structs import replace

from wirecall.ledger.base import Outcome, Record, RecordId, State, Task
from wirecall.mcp.server.task_state import (
    Document,
    has_acted,
    is_over,
    is_unanswered,
    is_undecided,
    members,
    new_id,
    status_of,
    summary,
)
from wirecall.protocol.messages import encode

QUESTIONS = {
    key: {"method": "elicitation/create", "params": {"message": key}} for key in ("one", "two")
}
ASKED = encode({"leg": "x.1", "inputRequests": QUESTIONS})
DOMAIN = encode({"code": 4711, "message": "no tea", "data": {"sku": "tea"}})
PROTOCOL = encode({"code": -32602, "message": "no tea", "is_protocol": True})


def task(record: Record | None, ttl_left: float = 200.0, **members: Any) -> Task:
    document = Document(
        tool="brew",
        arguments=Raw(b"{}"),
        revision="2026-07-28",
        capabilities={},
        ttl_ms=300_000,
        lasts=200.0,
        created=1_000.0,
        updated=1_001.0,
        **members,
    )
    id = RecordId("ann", "tools/call:brew", "k")
    return Task(new_id(), id, 1, encode(document), False, False, ttl_left, record)


def record(
    state: State,
    kind: Literal["result", "error"] = "result",
    payload: bytes | None = None,
    *,
    committed: bool = False,
) -> Record:
    id = RecordId("ann", "tools/call:brew", "k")
    outcome = Outcome(kind, payload, sha256(payload or b"").digest())
    return Record(id, b"f", state, 1, b"n", committed, 1, 5.0, 1_000.0, outcome=outcome)


@pytest.mark.parametrize(
    ("found", "status"),
    [
        (task(record(State.RUNNING)), "working"),
        (task(record(State.WAITING, payload=ASKED)), "input_required"),
        (
            task(record(State.WAITING, payload=ASKED), answers={"one": {}}),
            "input_required",
        ),
        (task(record(State.WAITING, payload=ASKED), answers={"one": {}, "two": {}}), "working"),
        (task(record(State.DONE, payload=b'{"content":[]}')), "completed"),
        (task(record(State.DONE, "error", DOMAIN)), "completed"),
        (task(record(State.DONE, "error", PROTOCOL)), "failed"),
        (task(record(State.DONE)), "failed"),
        (task(record(State.UNKNOWN)), "failed"),
        (task(None), "failed"),
        (task(record(State.RUNNING), final={"status": "cancelled"}), "cancelled"),
        (task(None, final={"status": "cancelled"}), "cancelled"),
    ],
)
def test_status_follows_from_document_and_record(found: Task, status: str) -> None:
    assert status_of(found)["status"] == summary(found)["status"] == status
    assert is_over(found) == (status in ("completed", "failed", "cancelled"))


def test_status_shows_the_questions_that_are_open() -> None:
    found = task(record(State.WAITING, payload=ASKED), answers={"one": {}})
    assert status_of(found) == {
        "status": "input_required",
        "inputRequests": {"two": QUESTIONS["two"]},
    }


def test_status_of_a_domain_error_does_not_depend_on_the_tools_of_the_server() -> None:
    """A task that has ended does not change, also if a later server lacks its tool."""
    shown = status_of(task(record(State.DONE, "error", DOMAIN)))
    assert shown["status"] == "completed"
    assert b'"isError":true' in bytes(shown["result"])
    assert b'"text":"no tea"' in bytes(shown["result"])


def test_members_have_the_status_working_until_another_is_added() -> None:
    found = task(record(State.DONE, "error", PROTOCOL), message="half")
    document = Document(
        tool="brew",
        arguments=Raw(b"{}"),
        revision="2026-07-28",
        capabilities={},
        ttl_ms=300_000,
        lasts=200.0,
        created=1_000.0,
        updated=1_001.0,
        message="half",
    )
    shown = members(found.id, document)
    assert (shown["status"], shown["statusMessage"]) == ("working", "half")
    assert {**shown, **status_of(found)}["statusMessage"] == "no tea"


def test_is_undecided_until_the_unknown_outcome_is_the_end() -> None:
    unknown = record(State.UNKNOWN)
    assert is_undecided(task(unknown))
    assert not is_undecided(task(unknown, final={"status": "failed"}))
    assert not is_undecided(task(record(State.RUNNING)))
    assert not is_undecided(task(None))


def test_is_unanswered_when_the_time_to_wait_is_over() -> None:
    waiting = task(record(State.WAITING, payload=ASKED), ttl_left=100.5)
    assert not is_unanswered(waiting)
    late = replace(waiting, ttl_left=100.0)
    assert is_unanswered(late)
    assert not is_unanswered(replace(late, now=record(State.RUNNING)))
    assert not is_unanswered(task(late.now, ttl_left=0.0, final={"status": "cancelled"}))


def test_has_acted_when_a_run_is_past_its_commit_point() -> None:
    assert has_acted(task(record(State.RUNNING, committed=True)))
    assert not has_acted(task(record(State.RUNNING)))
    assert not has_acted(task(record(State.WAITING, committed=True)))
    assert not has_acted(task(None))
