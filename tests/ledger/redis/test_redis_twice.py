"""A driver sends a script again if it lost the first result.

The second finds what the first did.
"""

from typing import Any

import pytest
from msgspec import structs

from tests.ledger import ID, RETENTION, claim_of, granted, outcome_of, present, same
from tests.ledger.contract import CHANGES, TTL
from tests.ledger.keyless import claimed, is_match, is_new, keyless, lose, write
from wirecall.ledger.base import Ledger, State
from wirecall.ledger.redis.connection import Connections

pytestmark = pytest.mark.parametrize("store", ["redis", "cluster"], indirect=True)


@pytest.fixture(autouse=True)
def twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands on records are sent twice, and the second answer counts."""
    once = Connections.ask

    async def ask(self: Connections, *args: Any, **options: Any) -> Any:
        await once(self, *args, **options)
        return await once(self, *args, **options)

    monkeypatch.setattr(Connections, "ask", ask)


async def test_claim_that_is_sent_twice_is_one_attempt(ledger: Ledger) -> None:
    claim = claim_of(on_crash="rerun")
    record = await ledger.claim(claim)
    assert (record.state, record.nonce, record.attempts) == (State.RUNNING, claim.nonce, 1)
    assert await ledger.lapse(record.token)
    assert (await granted(ledger, on_crash="rerun")).attempts == 2


@pytest.mark.parametrize("change", sorted(set(CHANGES) - {"release"}))
async def test_transition_with_a_valid_token_is_accepted_even_if_it_is_sent_twice(
    change: str, ledger: Ledger
) -> None:
    record = await granted(ledger)
    assert await CHANGES[change](ledger, record.token)


async def test_release_that_is_sent_twice_has_released(ledger: Ledger) -> None:
    """No record remains that could show it; so the answer is that the record does not exist."""
    record = await granted(ledger)
    assert not await ledger.release(record.token)
    assert await ledger.get(ID) is None


async def test_transition_by_another_call_with_the_same_token_is_separate(ledger: Ledger) -> None:
    record = await granted(ledger)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    done = await present(ledger)
    assert not await ledger.complete(record.token, outcome_of(b'"other"'), RETENTION)
    assert not await ledger.heartbeat(record.token, 30)
    assert same(await present(ledger), done)


async def test_call_without_a_key_whose_claim_is_sent_twice_is_one_record(ledger: Ledger) -> None:
    record = await claimed(ledger)
    assert [each.id for each in await ledger.list()] == [record.id]
    await lose(ledger, record)
    assert await is_match(ledger, keyless(), record)
    assert len(await ledger.list()) == 1


async def test_claim_that_is_sent_twice_keeps_its_record_despite_losses_in_between(
    ledger: Ledger,
) -> None:
    earlier = await claimed(ledger)
    claim = keyless(beside=frozenset({earlier.id.key}))
    assert await is_new(ledger, claim)
    await lose(ledger, earlier)
    assert await is_new(ledger, claim)
    assert await is_match(ledger, keyless(), earlier)


@pytest.mark.parametrize("tell", [lose, write])
async def test_delivery_that_is_sent_twice_is_one_delivery(tell: Any, ledger: Ledger) -> None:
    record = await claimed(ledger)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    await tell(ledger, record)
    assert (await present(ledger, record.id)).delivery == (
        "undelivered" if tell is lose else "written"
    )
    assert await is_new(ledger, keyless()) == (tell is write)
    taken = await present(ledger, record.id)
    await tell(ledger, record)  # a repetition has the answer now, or it was written
    assert same(await present(ledger, record.id), taken)


async def test_begin_task_that_is_sent_twice_is_one_task(ledger: Ledger) -> None:
    record = await granted(ledger)
    assert await ledger.begin_task(record.token, "task", b"{}", TTL)
    assert (task := await ledger.task_of(ID)) is not None and (task.id, task.version) == ("task", 1)
    assert await ledger.lapse(record.token)
    assert await ledger.orphans() == ["task"]


async def test_task_change_that_is_sent_twice_is_one_change(ledger: Ledger) -> None:
    """The ledger accepts the second despite the new version.

    It refuses an equal change of another call.
    """
    record = await granted(ledger)
    assert await ledger.begin_task(record.token, "task", b"{}", TTL)
    for version in (1, 2):
        task = await ledger.task("task")
        assert task is not None and task.version == version
        assert await ledger.change_task(task)
        assert not await ledger.change_task(task)
        assert not await ledger.change_task(structs.replace(task, document=b"another"))
    assert (task := await ledger.task("task")) is not None and task.document == b"{}"
    assert await ledger.change_task(structs.replace(task, is_over=True))
    assert await ledger.orphans() == []
