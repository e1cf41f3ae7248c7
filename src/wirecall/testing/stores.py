"""A ledger for one test: `ledger(url)` makes it, empty, and removes it at the end."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wirecall.errors import UsageError, extra_fix
from wirecall.ledger.base import check_url


@contextmanager
def ledger(url: str = "memory:") -> Iterator[str]:
    """Yield the URL of an empty ledger, for `App(ledger=...)`; remove the ledger at the end.

    `url` names the store: "memory:", "sqlite:" (a file in a folder for this test), "redis://..."
    (a prefix for this test) or "postgresql://..." (a database for this test, so its role must be
    allowed to create databases). Nothing that is already there is read or changed.

    >>> with testing.ledger("sqlite:") as url:
    ...     app = App("shop", ledger=url)
    """
    if not isinstance(url, str):
        raise UsageError(
            f"ledger(): url must be a string, got {type(url).__name__}.",
            fix='use ledger("sqlite:")',
        )
    scheme = check_url(url)
    if scheme == "memory":  # every app has its own
        yield url
        return
    if scheme == "sqlite":
        # Windows cannot delete a file that a test has left open.
        with tempfile.TemporaryDirectory(
            prefix="wirecall-test-", ignore_cleanup_errors=True
        ) as folder:
            yield f"sqlite:{Path(folder) / 'ledger.db'}"
        return
    try:
        if scheme in ("postgresql", "postgres"):
            from wirecall.ledger.postgres.fresh import fresh
        else:
            from wirecall.ledger.redis.fresh import fresh
    except ModuleNotFoundError as error:
        extra = "postgres" if scheme.startswith("postgres") else "redis"
        raise UsageError(
            f"A ledger of {scheme}: needs a driver.", f"there is no {error.name}", extra_fix(extra)
        ) from error
    with fresh(url) as made:
        yield made
