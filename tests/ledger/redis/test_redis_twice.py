"""A driver may send a script twice, when it does not know what became of the first. The second finds what the first did."""

from typing import Any

import pytest

from tests.ledger import ID, RETENTION, claim_of, granted, outcome_of, present, same
from tests.ledger.contract import CHANGES
from tests.ledger.contract.test_delivery import claimed, is_match, is_new, keyless, lose, write
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


async def test_a_claim_that_is_sent_twice_is_one_attempt(ledger: Ledger) -> None:
    claim = claim_of(on_crash="rerun")
    record = await ledger.claim(claim)
    assert (record.state, record.nonce, record.attempts) == (State.RUNNING, claim.nonce, 1)
    assert await ledger.lapse(record.token)
    assert (await granted(ledger, on_crash="rerun")).attempts == 2


@pytest.mark.parametrize("change", sorted(set(CHANGES) - {"release"}))
async def test_a_transition_with_a_valid_token_is_accepted_even_if_it_is_sent_twice(change: str, ledger: Ledger) -> None:
    record = await granted(ledger)
    assert await CHANGES[change](ledger, record.token)


async def test_a_release_that_is_sent_twice_has_released(ledger: Ledger) -> None:
    """Nothing is left that could tell; so the answer is that the record is not there."""
    record = await granted(ledger)
    assert not await ledger.release(record.token)
    assert await ledger.get(ID) is None


async def test_another_call_with_the_same_token_is_another_call(ledger: Ledger) -> None:
    record = await granted(ledger)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    done = await present(ledger)
    assert not await ledger.complete(record.token, outcome_of(b'"other"'), RETENTION)
    assert not await ledger.heartbeat(record.token, 30)
    assert same(await present(ledger), done)


async def test_a_call_without_a_key_whose_claim_is_sent_twice_is_one_record(ledger: Ledger) -> None:
    record = await claimed(ledger)
    assert [each.id for each in await ledger.list()] == [record.id]
    await lose(ledger, record)
    assert await is_match(ledger, keyless(), record)
    assert len(await ledger.list()) == 1


async def test_a_claim_that_is_sent_twice_keeps_its_record_whatever_was_lost_in_between(ledger: Ledger) -> None:
    earlier = await claimed(ledger)
    claim = keyless(beside=frozenset({earlier.id.key}))
    assert await is_new(ledger, claim)
    await lose(ledger, earlier)
    assert await is_new(ledger, claim)
    assert await is_match(ledger, keyless(), earlier)


@pytest.mark.parametrize("tell", [lose, write])
async def test_the_end_of_an_answer_that_is_sent_twice_is_one_end(tell: Any, ledger: Ledger) -> None:
    record = await claimed(ledger)
    assert await ledger.complete(record.token, outcome_of(), RETENTION)
    await tell(ledger, record)
    assert (await present(ledger, record.id)).delivery == ("undelivered" if tell is lose else "written")
    assert await is_new(ledger, keyless()) == (tell is write)
    taken = await present(ledger, record.id)
    await tell(ledger, record)  # a repetition has the answer now, or it was written
    assert same(await present(ledger, record.id), taken)
