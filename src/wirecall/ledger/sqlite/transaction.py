"""A handler's transaction in an SQLite ledger: its record and what it does are committed together, or not at all."""

import time
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from wirecall.ledger.base import Claim, Locked, NotCommitted, Outcome, Record
from wirecall.ledger.sqlite.jobs import Job
from wirecall.ledger.sqlite.lock import HandlerLock
from wirecall.ledger.sqlite.turns import Turns


class HandlerTransaction(AbstractAsyncContextManager["HandlerTransaction"]):
    """A transaction on a connection of its own; or, if there was a record already, nothing but that."""

    record: Record
    db: Any = None

    def __init__(self, turns: Turns, claim: Claim, found: Record | None, wait: float) -> None:
        self._turns = turns
        self._lock = HandlerLock(turns.path, turns.table)
        self._claim = claim
        self._found = found
        self._wait = 0.0 if claim.alone else wait

    async def __aenter__(self) -> "HandlerTransaction":
        if self._found is not None:
            self.record = self._found
            return self
        try:
            await self._begin(time.monotonic() + self._wait)
        except BaseException:
            self._turns.writer.drop(self._lock)
            raise
        self.record, self.db = self._lock.record, self._lock.db
        return self

    async def _begin(self, until: float) -> None:
        """In turns of PATIENCE, and one at least: the lock is the file's, so it may be another command that we wait for."""
        while True:
            try:
                await self._turns.ask(Job("begin", partial(self._turns.writer.begin, self._lock, self._claim)))
                return
            except Locked:
                if time.monotonic() >= until:
                    raise

    async def __aexit__(self, *_: object) -> None:
        if self.db is not None:
            self._turns.writer.drop(self._lock)

    async def complete(self, outcome: Outcome, retention: float, *, undo: bool) -> None:
        if self.db is None or self._lock.is_dropped:
            raise NotCommitted("There is no transaction to complete.", "the record was there already, or it is over")
        complete = partial(self._turns.table.complete, self.record.token, outcome, retention)
        await self._turns.ask(Job("complete", partial(self._turns.writer.complete, self._lock, complete, undo)))
