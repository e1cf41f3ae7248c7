"""A handler's transaction in an SQLite ledger: its record and its own writes are committed
together, or not at all.

It has its own connection, and with it the write lock of the file. The writer's thread begins and
ends it; in between, the handler uses `db` where it runs.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

import apsw

from wirecall.ledger.base import Claim, CommitUnknown, Locked, NotCommitted, Outcome, Record, Token
from wirecall.ledger.sqlite.file import SQL
from wirecall.ledger.sqlite.writer import Job, Writer, too_late

# Seconds between two looks at an equal call without a key that is in progress.
TURN = 0.05


class HandlerTransaction(AbstractAsyncContextManager["HandlerTransaction"]):
    """A transaction that holds a record; or only a record, if another claim holds that.

    `look` reads the record; `enter` finds it or inserts it, and returns whether this claim holds
    it; `finish` records an outcome; `leave` gives back the answer that a call without a key has
    taken over.
    """

    record: Record
    db: Any = None

    def __init__(
        self,
        writer: Writer,
        claim: Claim,
        wait: float,
        look: Callable[[Claim], Awaitable[Record | None]],
        enter: Callable[[Claim, apsw.Cursor], tuple[Record, bool]],
        finish: Callable[[Token, Outcome, float, apsw.Cursor], bool],
        leave: Callable[[Claim, apsw.Cursor, int], None],
    ) -> None:
        # Whether the handler is gone: what is not committed yet is undone.
        self.is_dropped = False
        self._writer = writer
        self._claim = claim
        self._wait = wait
        if claim.alone:
            self._wait = 0.0
        self._look = look
        self._enter = enter
        self._finish = finish
        self._leave = leave
        self._may_commit = False

    async def __aenter__(self) -> "HandlerTransaction":
        until = time.monotonic() + self._wait
        try:
            # In turns of PATIENCE, at least one: the lock is the file's, so another command may
            # hold it.
            while True:
                began = time.monotonic()
                try:
                    found = await self._look(self._claim)
                    if found is not None:
                        self.record = found
                    else:
                        await self._writer.ask(Job(self.begin, "begin"))
                    return self
                except Locked:
                    if time.monotonic() >= until:
                        raise
                await asyncio.sleep(began + TURN - time.monotonic())
        except BaseException as error:
            self._writer.drop(self)
            if self._claim.keyless is not None and not isinstance(error, Locked):
                self._writer.send(Job(partial(self._leave, self._claim), "unclaim"))
            raise

    async def __aexit__(self, *_: object) -> None:
        if self.db is not None:
            self._writer.drop(self)

    async def complete(self, outcome: Outcome, retention: float, *, undo: bool) -> None:
        """Record the outcome and commit; `undo` drops the handler's writes, but not the record."""
        if self.db is None or self.is_dropped:
            raise NotCommitted(
                "There is no transaction to complete.",
                "the record was there already, or it is over",
            )
        await self._writer.ask(Job(partial(self._complete, outcome, retention, undo), "complete"))

    # --- in the writer's thread -------------------------------------------------------------------

    def begin(self) -> None:
        """Take the write lock and enter the record.

        If the record is not this claim's, the transaction ends at once.
        """
        if self.is_dropped:
            return
        self._writer.file.check()
        db = self._writer.file.connect()
        try:
            # The handler could not: inside a transaction it has no effect.
            db.pragma("foreign_keys", True)
            db.execute(SQL["begin"])
            self.record, is_held = self._enter(self._claim, db.cursor())
            if is_held:
                db.execute(SQL["before_handler"])
                db.set_commit_hook(lambda: not self._may_commit)
                self.db = db
                self._writer.holder = self
            else:
                # A call without a key has taken over the answer of an earlier one.
                db.execute(SQL["commit"])
        except apsw.BusyError:
            raise too_late(self._writer.path) from None
        finally:
            if self.db is None:
                db.close()

    def _complete(self, outcome: Outcome, retention: float, undo: bool) -> None:
        db = self.db
        try:
            if undo and db.in_transaction:
                db.execute(SQL["undo_handler"])
            if not db.in_transaction or not self._finish(
                self.record.token, outcome, retention, db.cursor()
            ):
                raise NotCommitted(  # for certain: until now, the hook has refused every commit
                    "The transaction ended inside the handler, so all of it was undone.",
                    "the handler ended it, or continued after SQLite had ended it, for example "
                    "because the disk was full",
                    "leave BEGIN, COMMIT and ROLLBACK to wirecall, and let SQLite's errors pass; "
                    "savepoints are free to use",
                )
            self._may_commit = True
            db.execute(SQL["commit"])
        except apsw.IOError as error:
            if not self._may_commit:
                raise
            # Its frames may be in the WAL, and a crash before the next commit would find them.
            raise CommitUnknown(
                f"The ledger {self._writer.path} failed in the middle of a commit: {error}"
            ) from error
        # A deferred foreign key; a blob that is still open.
        except (apsw.ConstraintError, apsw.BusyError) as error:
            if not self._may_commit:
                raise
            raise NotCommitted(
                "What the handler did cannot be committed, so all of it was undone.", str(error)
            ) from error
        finally:
            self._may_commit = False
            self.end()

    def end(self) -> None:
        """Close the connection, which undoes what was not committed.

        If the handler is in a statement, interrupt it.
        """
        self.is_dropped = True
        try:
            self.db.close(True)  # with any cursor that the handler left open
            self._writer.holder = None
        except apsw.ThreadingViolationError:  # `end` is called again
            self.db.interrupt()
