"""Helpers for commands whose effects are in the ledger's own database."""

from contextlib import closing
from typing import Any, cast

import apsw
import psycopg
import pytest

from tests.servers import TRANSACTIONAL, Store
from wirecall.ledger.base import Transaction

transactional = pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)


only_postgres = pytest.mark.parametrize("store", ["postgres"], indirect=True)


class Effects:
    """A table beside the ledger."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.ask("CREATE TABLE IF NOT EXISTS effects (cents integer)")
        self.ask("DELETE FROM effects")

    async def act(self, transaction: Transaction) -> None:
        inserted = transaction.db.execute("INSERT INTO effects VALUES (5)")
        if self._store.kind == "postgres":
            await inserted

    @property
    def number(self) -> int:
        return cast(int, self.ask("SELECT count(*) FROM effects")[0][0])

    def ask(self, statement: str) -> Any:
        if self._store.kind == "sqlite":
            with closing(apsw.Connection(self._store.url.removeprefix("sqlite:"))) as db:
                return db.execute(statement).fetchall()
        with psycopg.connect(self._store.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else None
