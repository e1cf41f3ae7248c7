"""The schema of a ledger in PostgreSQL, for tests that make it again."""

import psycopg

from tests.servers import Store


def forget_schema(store: Store) -> None:
    """SQLite's file and the keys in Redis are new for every test; in PostgreSQL only the rows are."""
    if store.kind == "postgres":
        with psycopg.connect(store.url, autocommit=True) as db:
            db.execute("DROP SCHEMA IF EXISTS wirecall CASCADE")
