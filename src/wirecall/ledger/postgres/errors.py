"""What psycopg's errors mean to a ledger: the server is away, it said no, it undid a transaction, or a handler ended one."""

import psycopg

from wirecall.errors import UsageError
from wirecall.ledger.base import LedgerDown, NotCommitted, RecordId, TryAgain

UNDONE = ("40001", "40P01")  # serialization failure, deadlock: the server took the transaction back
FAILED = "25P02"  # the transaction goes no further, because of an error before
ENDED = ("3B001", "25P01", "WC001")  # no such savepoint, no transaction, no record


def is_lost(error: psycopg.Error) -> bool:
    """Whether the connection failed, or could not be made, in contrast to a server that said no."""
    return isinstance(error, psycopg.OperationalError) and (error.sqlstate or "08000").startswith(("08", "57P"))


def down(error: psycopg.Error) -> LedgerDown:
    what = "cannot be reached" if is_lost(error) else "refused"
    return LedgerDown(f"PostgreSQL {what}: {error.diag.message_primary or ' '.join(str(error).split())}")


def undone(error: BaseException) -> TryAgain | None:
    """Whether an exception, or what led to it, says that the server took the transaction back."""
    if _sqlstates(error).isdisjoint(UNDONE):
        return None
    return TryAgain("PostgreSQL undid the transaction in favour of another one")


def _sqlstates(error: BaseException | None) -> set[str]:
    found: set[str] = set()
    for _ in range(10):
        found.add(getattr(error, "sqlstate", None) or "")
        error = error and (error.__cause__ or error.__context__)
    return found


def refused(error: psycopg.Error) -> TryAgain | NotCommitted:
    """What it means that the server would not commit, and undid everything instead."""
    return undone(error) or NotCommitted(
        "What the handler did cannot be committed, so all of it was undone.",
        "a statement of it had failed" if error.sqlstate == FAILED else str(error.diag.message_primary),
        "let PostgreSQL's errors pass; `async with ctx.db.transaction()` is a part that may fail",
    )


def misused(id: RecordId) -> UsageError:
    return UsageError(
        f"The handler of {id} ended its transaction itself.",
        "a COMMIT or ROLLBACK in SQL takes the writes and the record of the command apart",
        "leave both out; `async with ctx.db.transaction()` is a part that can be undone",
    )
