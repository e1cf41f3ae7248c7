"""A ledger in PostgreSQL for one test: its own database, which is dropped at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from secrets import token_hex

import psycopg
from psycopg import sql

from wirecall.errors import UsageError
from wirecall.ledger.base import without_password


@contextmanager
def fresh(url: str) -> Iterator[str]:
    """Yield the URL of an empty database of the same server; drop it at the end.

    The database of the URL is only connected to.
    """
    scheme, _, rest = url.partition("://")
    place, _, query = rest.partition("?")
    host = place.partition("/")[0]
    fields = [field for field in query.split("&") if field]
    plain = [field for field in fields if field.partition("=")[0] != "pool"]
    kept = [field for field in fields if field.partition("=")[0] != "dbname"]
    name = f"wirecall_test_{token_hex(8)}"
    try:
        connection = psycopg.connect(f"{scheme}://{place}?{'&'.join(plain)}", autocommit=True)
    except psycopg.Error as error:
        raise _unusable(url, str(error)) from None
    with connection:
        try:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        except psycopg.Error as error:
            raise _unusable(url, str(error)) from None
        try:
            yield f"{scheme}://{host}/{name}?{'&'.join(kept)}"
        finally:
            # FORCE ends the connections that a test has left open.
            connection.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )


def _unusable(url: str, why: str) -> UsageError:
    return UsageError(
        f"There is no ledger for tests at {without_password(url)}.",
        why.strip(),
        "start the server, and use a role that may create databases (CREATEDB)",
    )
