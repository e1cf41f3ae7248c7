"""A shop whose calls without a key run in transactions."""

import asyncio
from typing import Any

from tests.ledger import RETENTION, outcome_of
from tests.ledger.effects import Effects
from tests.servers import Store
from wirecall.ledger.base import Claim, Ledger, Record, Transaction

WAIT = 20.0


# The wait of a call that will be refused. In SQLite, calls wait for the lock of the whole file in
# long steps.
BRIEFLY = {"sqlite": 0.0, "postgres": 0.3}


class Shop:
    """A ledger, and a table of effects beside it."""

    def __init__(self, ledger: Ledger, store: Store) -> None:
        self.ledger: Any = ledger
        self.briefly = BRIEFLY[store.kind]
        self._is_locking = store.kind == "postgres"
        self._effects = Effects(store)

    @property
    def effects(self) -> int:
        return self._effects.number

    async def run(self, claim: Claim, wait: float = WAIT) -> Record:
        """Run a command: one effect, if its claim made the record."""
        async with self.ledger.transaction(claim, wait) as transaction:
            record: Record = transaction.record
            if record.nonce == claim.nonce:
                await self.act(transaction)
            return record

    async def act(self, transaction: Transaction) -> None:
        await self.begin(transaction)
        await transaction.complete(outcome_of(), RETENTION, undo=False)

    async def begin(self, transaction: Transaction) -> None:
        """Write the effect, and do not complete the command."""
        await self._effects.act(transaction)

    async def waits(self, task: "asyncio.Task[Any]") -> None:
        """Wait until a call waits for another; in PostgreSQL, until the server blocks its session."""
        await asyncio.sleep(0)
        async with asyncio.timeout(WAIT):
            locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while self._is_locking and self._effects.ask(locks) == [(0,)]:
                assert not task.done()
                await asyncio.sleep(0.01)
