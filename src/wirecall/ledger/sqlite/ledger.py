"""The ledger in an SQLite file: one host, many processes, nothing to install. The default in production.

The rules of the file:

1. One thread of the process writes (`Writer`). All transitions that wait at a moment go into one transaction and one
   fsync, and nobody is answered before that. Whatever wants the write lock of the file asks this thread for it, so its
   queue is the order; only while that is empty, an event loop commits what its tasks have asked for (`Turns`).
2. Readers wait for nobody (WAL): a claim that changes nothing is answered by a read in the calling thread.
3. Leases are measured by the clock that counts from boot, which cannot be set, and a record tells which boot it means: a
   lease of another boot is over. Retention is over when the wall clock says so and, within one boot, that clock too. The
   times that people read are wall time.
4. The file may be the user's own, with the tables that `transactional` handlers write to. So its `user_version` is left
   alone, its `application_id` is set only in a file that we made, and the version of our tables is in one of them. In the
   same process use apsw for it: Python's sqlite3 is a second copy of SQLite, and two copies release each other's locks.
5. Of SQLite's errors only `LedgerDown` leaves this file. It never means that the writer is broken: when the disk has room
   again, or the lock is free, the next call works.

Without a running event loop the methods wait in the calling thread, so that `handle_sync` can use this ledger.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import apsw

from wirecall import process
from wirecall.errors import UsageError
from wirecall.ledger.base import (
    Claim,
    LedgerDown,
    Outcome,
    Record,
    RecordId,
    State,
    Token,
)
from wirecall.ledger.sqlite.file import as_down
from wirecall.ledger.sqlite.jobs import Job, nothing
from wirecall.ledger.sqlite.rows import Row, Table, all_rows, clock_from_boot, parts, with_token
from wirecall.ledger.sqlite.transaction import HandlerTransaction
from wirecall.ledger.sqlite.turns import Turns


async def open_url(url: str) -> "SqliteLedger":
    """The ledger in the file of `sqlite:PATH`; its folder is made if need be, with mode 0700."""
    ledger = SqliteLedger(_path(url))
    await ledger.open()
    return ledger


def _path(url: str) -> str:
    path = url.removeprefix("sqlite:")
    if not path.strip("/") or path.endswith(("/", ":memory:")):
        raise UsageError(
            f"{url!r} names no file.",
            "a ledger in SQLite is there to survive the process",
            'use "sqlite:ledger.db", or "memory:" for a test',
        )
    if path.startswith("//") and not path.startswith("///"):
        raise UsageError(
            f"{url!r} names a host.",
            "an SQLite file is on this one",
            f'"sqlite:{path[2:]}" is a relative path, "sqlite:/{path[1:]}" an absolute one',
        )
    return path.removeprefix("//")


class SqliteLedger:
    """A ledger in a file, for any number of event loops, threads and processes."""

    is_tidy = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Callable[[], float] | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._path = os.path.abspath(path)  # the working directory may change later
        self._table = Table(clock or clock_from_boot(), wall)
        self._turns: Turns | None = None
        self._starting = threading.Lock()
        self._is_closed = False

    async def open(self) -> None:
        """Open the file now; a call would do it too."""
        await self._running().ask(Job("nothing", nothing))

    async def claim(self, claim: Claim) -> Record:
        turns = self._running()
        job = Job("write", partial(self._table.claim, claim), claim)
        try:
            granted: Record = await turns.ask(job, on_the_spot=not claim.alone)
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
            job.cancel()  # it may not be on its way yet; and if it is done already, it is undone
            turns.writer.send([Job("unclaim", partial(self._table.unclaim, claim))])
            raise
        return granted

    async def heartbeat(self, token: Token, lease: float) -> bool:
        return await self._change("heartbeat", token, lease=lease)

    async def commit_point(self, token: Token, lease: float) -> bool:
        return await self._change("commit_point", token, lease=lease)

    def complete(self, token: Token, outcome: Outcome, retention: float) -> Coroutine[Any, Any, bool]:
        complete = partial(self._table.complete, token, outcome, retention)
        return self._running().ask(Job("write", complete, size=len(outcome.payload or b"")))

    async def suspend(self, token: Token, interim: Outcome, retention: float) -> bool:
        return await self._change("suspend", token, retention=retention, **parts(interim))

    async def release(self, token: Token) -> bool:
        return await self._change("release", token)

    async def abandon(self, token: Token) -> bool:
        return await self._change("abandon", token)

    async def lapse(self, token: Token) -> bool:
        return await self._change("lapse", token)

    async def resolve(self, id: RecordId, outcome: Outcome | None, retention: float = 86_400) -> bool:
        anyone = Token(id, 0, b"")  # these two statements ask for no token
        if outcome is None:
            return await self._change("resolve_absent", anyone)
        return await self._change("resolve_done", anyone, retention=retention, **parts(outcome))

    async def get(self, id: RecordId) -> Record | None:
        row = self._read(self._table.find, id)
        return row and self._table.record(row)

    async def list(self, state: State | None = None, *, limit: int = 100, after: RecordId | None = None) -> list[Record]:
        first = after or RecordId("", "", "")
        values = {"caller": first.caller, "method": first.method, "key": first.key, "limit": limit}
        if state is None:
            rows = self._read(all_rows, "page", values)
        else:
            name = "page_of_few" if state in (State.UNKNOWN, State.WAITING) else "page_of_many"
            rows = self._read(all_rows, name, {**values, "state": state.value})
        return [self._table.record(Row(*row)) for row in rows]

    async def counts(self) -> dict[State, int]:
        found = dict(self._read(all_rows, "counts", ()))
        return {state: found.get(state.value, 0) for state in State}

    async def sweep(self, limit: int = 500) -> int:
        changed: int = await self._running().ask(Job("sweep", partial(self._table.sweep, limit)))
        return changed

    async def ping(self) -> None:
        await self._running().ask(Job("sweep", self._table.ping))

    def transaction(self, claim: Claim, wait: float) -> HandlerTransaction:
        """The write lock of the file, until the end of the block: all other writes wait for it, so be short.

        `db` is an apsw connection. The handler may use savepoints on it, but cannot commit: if it ends the transaction,
        everything is undone.
        """
        row = self._read(self._table.find, claim.id)
        return HandlerTransaction(self._running(), claim, row and self._table.seen(row, claim), wait)

    async def aclose(self) -> None:
        """Write what waits and close the file; the last process to close it folds the WAL into it."""
        with self._starting:
            self._is_closed = True
            turns, self._turns = self._turns, None
        if turns is not None:
            await turns.aclose()

    async def _change(self, name: str, token: Token, **values: Any) -> bool:
        change = partial(self._table.change, name, with_token(token, values))
        changed: bool = await self._running().ask(Job("write", change, size=len(values.get("payload") or b"")))
        return changed

    def _read(self, look: Callable[..., Any], *args: Any) -> Any:
        writer = self._running().writer
        reader = writer.reader
        try:
            with writer.reading:  # apsw refuses a connection that two threads use at once
                return look(reader, *args)
        except (apsw.Error, UnicodeEncodeError) as error:
            raise as_down(self._path, error) from error

    def _running(self) -> Turns:
        turns = self._turns
        if turns is None or turns.writer.failure is not None or turns.writer.pid != process.pid:
            return self._start()
        return turns

    def _start(self) -> Turns:
        with self._starting:
            old = self._turns
            if self._is_closed:
                raise LedgerDown(f"The ledger {self._path} is closed.")
            if old is not None and old.writer.failure is None and old.writer.pid == process.pid:
                return old  # another thread was faster
            self._turns = Turns(self._path, self._table, owner=self)
            return self._turns
