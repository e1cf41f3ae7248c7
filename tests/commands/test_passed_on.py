"""A command that another server answered: its refusal releases the record, a lost call is unknown."""

from collections.abc import AsyncIterator

import pytest

from tests.calls import call, error, make_app, result
from tests.servers import Store
from wirecall import App
from wirecall.errors import OutcomeUnknown, UpstreamUnavailable
from wirecall.ledger.base import RecordId, State


@pytest.fixture
async def app(store: Store) -> AsyncIterator[App]:
    async with make_app(ledger=store.url) as app:
        yield app


async def state_of(app: App, key: str) -> State | None:
    record = await (await app.ledger()).get(RecordId("", "pay", key))
    return None if record is None else record.state


async def test_call_that_was_not_sent_to_another_server_releases_the_record(app: App) -> None:
    """Section 7: no link: 50210, ran = no."""
    failures = [UpstreamUnavailable("it does not start", upstream="bank", ran="no")]

    @app.command
    async def pay() -> str:
        if failures:
            raise failures.pop()
        return "paid"

    refused = error(await app.handle(call("pay", key="k")))
    assert (refused["code"], refused["data"]) == (
        50210,
        {
            "type": "upstream_unavailable",
            "reason": "it does not start",
            "upstream": "bank",
            "ran": "no",
        },
    )
    assert await state_of(app, "k") is None
    assert result(await app.handle(call("pay", key="k"))) == "paid"


async def test_lost_call_of_another_server_is_unknown_with_its_reason(app: App) -> None:
    """Section 7: the write began, then the link ended: unknown, with the upstream and the reason."""
    runs: list[int] = []

    @app.command
    async def pay() -> str:
        runs.append(1)
        raise OutcomeUnknown("its process ended", upstream="bank")

    lost = error(await app.handle(call("pay", key="k")))
    assert (lost["code"], lost["data"]["reason"]) == (50910, "its process ended")
    assert (lost["data"]["upstream"], lost["data"]["ran"]) == ("bank", "unknown")
    assert "pay" in lost["data"]["record"]
    assert await state_of(app, "k") is State.UNKNOWN
    assert error(await app.handle(call("pay", key="k")))["code"] == 50910
    assert runs == [1]
