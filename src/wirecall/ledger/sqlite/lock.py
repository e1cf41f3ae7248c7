"""The write lock of the file in the hands of a handler: a connection of its own, in the middle of a transaction.

All of it happens in the writer's thread, but for what the handler does with `db`, and `is_dropped`.
"""

from collections.abc import Callable

import apsw

from wirecall.files import real_path
from wirecall.ledger.base import Claim, CommitUnknown, Locked, NotCommitted, Record
from wirecall.ledger.sqlite.file import PATIENCE, SQL, connect
from wirecall.ledger.sqlite.rows import Fences, Table, take_fences


class HandlerLock:
    """Until `take` it has nothing; after it, a `record`, and a `db` unless that record was there already."""

    record: Record
    db: apsw.Connection | None = None

    def __init__(self, path: str, table: Table) -> None:
        self.is_dropped = False  # nobody wants it any more: what is not committed yet is undone
        self.is_held = False
        self._path = path
        self._table = table
        self._may_commit = False

    def take(self, claim: Claim) -> None:
        db = connect(real_path(self._path, "The ledger"))
        try:
            db.pragma("foreign_keys", True)  # the handler could not: inside a transaction it has no effect
            db.execute(SQL["begin"])
            self._take_on(db, claim)
        except apsw.BusyError:
            raise self.too_late() from None
        finally:
            if not self.is_held:
                db.close()

    def _take_on(self, db: apsw.Connection, claim: Claim) -> None:
        cursor = db.cursor()
        row = self._table.find(cursor, claim.id)
        if row is not None:
            self.record = self._table.seen(row, claim)
            return
        self.record = self._table.insert(claim, cursor, take_fences(cursor, 1))
        db.execute(SQL["before_handler"])
        db.set_commit_hook(lambda: not self._may_commit)
        self.db = db
        self.is_held = True

    def complete(self, complete: Callable[[apsw.Cursor, Fences], bool], undo: bool) -> None:
        db = self.db
        assert db is not None
        if undo and db.in_transaction:
            db.execute(SQL["undo_handler"])
        if not db.in_transaction or not complete(db.cursor(), Fences()):
            raise NotCommitted(  # for certain: until now, the hook has refused every commit
                "The transaction ended inside the handler, so all of it was undone.",
                "the handler ended it, or went on after SQLite had to, for example because the disk was full",
                "leave BEGIN, COMMIT and ROLLBACK to wirecall, and let SQLite's errors pass; savepoints are free to use",
            )
        self._commit(db)

    def _commit(self, db: apsw.Connection) -> None:
        self._may_commit = True
        try:
            db.execute(SQL["commit"])
        except apsw.IOError as error:  # its frames may be in the WAL, and a crash before the next commit would find them
            raise CommitUnknown(f"The ledger {self._path} failed in the middle of a commit: {error}") from error
        except (apsw.ConstraintError, apsw.BusyError) as error:  # a deferred foreign key; a blob that was left open
            raise NotCommitted("What the handler did cannot be committed, so all of it was undone.", str(error)) from error
        finally:
            self._may_commit = False

    def end(self) -> None:
        """Close the connection, which undoes what was not committed; try again later while it is still held."""
        assert self.db is not None
        self.is_dropped = True
        try:
            self.db.close(True)  # with whatever cursor the handler left open
            self.is_held = False
        except apsw.ThreadingViolationError:  # a handler that nobody waits for any more is in the middle of a statement
            self.db.interrupt()

    def too_late(self) -> Locked:
        return Locked(f"The ledger {self._path} was locked for more than {PATIENCE:g} s.")
