"""The contract of `ledger.base`, kept by every store."""

from collections.abc import Awaitable, Callable

import pytest

from tests.ledger import LEASE, RETENTION, outcome_of
from tests.servers import DURABLE, Store
from wirecall.ledger.base import Ledger, State, Token

TTL = 5000.0  # of a task

Change = Callable[[Ledger, Token], Awaitable[bool]]

durable_only = pytest.mark.parametrize("store", [*DURABLE, "cluster"], indirect=True)

# Every transition that a token allows, and the states in which it does.
CHANGES: dict[str, Change] = {
    "heartbeat": lambda ledger, token: ledger.heartbeat(token, LEASE),
    "commit_point": lambda ledger, token: ledger.commit_point(token, LEASE),
    "complete": lambda ledger, token: ledger.complete(token, outcome_of(b'"another"'), RETENTION),
    "suspend": lambda ledger, token: ledger.suspend(token, outcome_of(b'"another"'), RETENTION),
    "release": lambda ledger, token: ledger.release(token),
    "abandon": lambda ledger, token: ledger.abandon(token),
    "lapse": lambda ledger, token: ledger.lapse(token),
    "begin_task": lambda ledger, token: ledger.begin_task(
        token, f"task of {token.nonce.hex()}", b"{}", TTL
    ),
}
ALLOWED = {name: {State.RUNNING} for name in CHANGES} | {"complete": {State.RUNNING, State.UNKNOWN}}


async def close_at_once(store: Store) -> None:
    ledger = await store.open()
    await ledger.aclose()
