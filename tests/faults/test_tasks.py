"""Tasks whose beginning, change or end is lost in transit: the next attempt finds what the first
did.
"""

from typing import Any

import psycopg
import pytest

from tests.faults.fronts import Front, Loss, losses
from tests.ledger import ID, LEASE, RETENTION, claim_of, granted, outcome_of, present, same
from wirecall.ledger.base import LedgerDown, State, Task, TryAgain, open_ledger
from wirecall.ledger.redis.ledger import SCRIPTS

TTL = 1000.0

# The bytes of the steps that are sent to the server.
STEPS = {
    "redis": {
        "name": SCRIPTS["begin_task"][1].encode(),
        "write": SCRIPTS["write_task"][1].encode(),
        "hint": b"ZADD",
        "change": SCRIPTS["change_task"][1].encode(),
    },
    "postgres": {"write": b"INSERT INTO wirecall.tasks", "change": b"UPDATE wirecall.tasks"},
}


@losses
@pytest.mark.parametrize(
    ("front", "step"),
    [("redis", "name"), ("redis", "write"), ("redis", "hint"), ("postgres", "write")],
    indirect=["front"],
)
async def test_begin_task_that_was_lost_is_sent_again_as_one_task(
    front: Front, loss: Loss, step: str
) -> None:
    ledger = await open_ledger(front.url)
    record = await granted(ledger)
    # The server has the scripts now.
    assert await ledger.begin_task(record.token, "known", b"{}", TTL)
    fault = front.proxy.lose(loss, STEPS[front.kind][step])
    with pytest.raises(LedgerDown):
        await ledger.begin_task(record.token, "task", b"{}", TTL)
    assert fault.is_over
    assert (await present(ledger)).token == record.token
    assert await ledger.begin_task(record.token, "task", b"{}", TTL)
    assert (task := await ledger.task_of(ID)) is not None and (task.id, task.version) == ("task", 1)
    assert await ledger.lapse(record.token)
    assert "task" in await ledger.orphans()
    await ledger.aclose()


@losses
async def test_task_change_that_was_lost_is_made_or_not(front: Front, loss: Loss) -> None:
    """The answer is `LedgerDown` either way, and the version shows which it was."""
    ledger = await open_ledger(front.url)
    record = await granted(ledger)
    assert await ledger.begin_task(record.token, "task", b"first", TTL)
    task = Task("task", ID, 1, b"second", False, False, TTL)
    assert await ledger.change_task(task)
    fault = front.proxy.lose(loss, STEPS[front.kind]["change"])
    with pytest.raises(LedgerDown):
        await ledger.change_task(Task("task", ID, 2, b"third", False, False, TTL))
    assert fault.is_over
    found = await ledger.task("task")
    assert found is not None
    assert (found.version, found.document) == (
        (3, b"third") if loss == "answer" else (2, b"second")
    )
    await ledger.aclose()


@losses
@pytest.mark.parametrize("front", ["postgres"], indirect=True)
async def test_unconfirmed_commit_on_a_record_under_a_lease_is_settled(
    front: Front, loss: Loss
) -> None:
    """The record existed before the commit, so its existence proves nothing."""
    with psycopg.connect(front.store.url, autocommit=True) as db:
        db.execute("DROP TABLE IF EXISTS public.bookings")
        db.execute("CREATE TABLE public.bookings (run integer)")
    ledger: Any = await open_ledger(front.url)
    claim = claim_of(on_crash="transactional")
    record = await ledger.claim(claim)
    async with ledger.transaction(claim, LEASE) as transaction:
        await transaction.db.execute("INSERT INTO public.bookings VALUES (1)")
        fault = front.proxy.lose(loss, b"COMMIT")
        if loss == "answer":
            await transaction.complete(outcome_of(), RETENTION, undo=False)
        else:
            with pytest.raises(TryAgain):
                await transaction.complete(outcome_of(), RETENTION, undo=False)
    assert fault.is_over
    with psycopg.connect(front.store.url, autocommit=True) as db:
        assert db.execute("SELECT count(*) FROM public.bookings").fetchone() == (
            1 if loss == "answer" else 0,
        )
    after = await present(ledger)
    assert after.state is (State.DONE if loss == "answer" else State.RUNNING)
    assert loss == "answer" or same(after, record)
    await ledger.aclose()
