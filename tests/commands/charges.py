"""Helpers for the tests of commands: an app that charges, bytes in and bytes out, over every
ledger.

A second app on the same ledger counts as another process. A holder that vanished is a claim made
directly in the ledger, whose record is then aged.
"""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import apsw
import psycopg
import pytest
from msgspec import Raw

from tests.calls import call
from tests.ledger import LEASE, claim_of
from tests.servers import TRANSACTIONAL, Store
from wirecall import App, Context
from wirecall.ledger.base import Claim, Ledger, LedgerDown, Record, RecordId, State
from wirecall.server.policy import fingerprint

NewApp = Callable[..., App]

ID = RecordId("", "charge", "k")
PARAMS = {"cents": 5}
PRINT = fingerprint(Raw(b'{"cents":5}'))

CONFLICT = {"type": "idempotency_key_conflict", "ran": "no"}
PATIENCE = 60.0

transactional = pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)


def late(ran: str, seconds: float) -> Any:
    """The error of a charge that took longer than its timeout."""
    data = {
        "type": "deadline_exceeded",
        "reason": f"charge took longer than its timeout of {seconds:g} s",
        "ran": ran,
    }
    return {"code": 50410, "message": "Deadline exceeded", "data": data}


class World:
    """The effects of commands: handlers that count their effects, and wait where a test asks them
    to.
    """

    def __init__(self) -> None:
        self.effects: list[int] = []
        self.seen: list[Context] = []
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()
        self.gate = asyncio.Event()

    def act(self, cents: int) -> Any:
        self.effects.append(cents)
        return {"charged": cents, "number": len(self.effects)}

    async def charge(self, cents: int, ctx: Context) -> Any:
        self.seen.append(ctx)
        return self.act(cents)

    async def held_after(self, cents: int, ctx: Context) -> Any:
        """Takes effect, then waits.

        It never names its commit point, so it has passed it on entry.
        """
        answer = await self.charge(cents, ctx)
        self.begun.set()
        await self.gate.wait()
        self.ended.set()
        return answer

    async def held_before(self, cents: int, ctx: Context) -> Any:
        """Waits, passes the commit point, takes effect."""
        self.begun.set()
        await self.gate.wait()
        await ctx.commit_point()
        return await self.charge(cents, ctx)

    async def held_between(self, cents: int, ctx: Context) -> Any:
        """Passes the commit point, takes effect, waits."""
        await ctx.commit_point()
        return await self.held_after(cents, ctx)


def charge(id: Any = 1, *, cents: Any = 5, key: str = "k") -> bytes:
    return call("charge", {"cents": cents}, id=id, key=key)


async def vanish(ledger: Ledger, store: Store, **fields: Any) -> Record:
    """A holder that claimed the command and then vanished; its lease has expired."""
    record = await ledger.claim(claim_of(ID, fingerprint=PRINT, **fields))
    store.age(ID, LEASE + 1)
    aged = await ledger.get(ID)
    assert aged is not None and aged.token == record.token and aged.lease_left == 0
    return aged


async def stands(ledger: Ledger, id: RecordId = ID) -> State | None:
    record = await ledger.get(id)
    return None if record is None else record.state


def is_unknown(refused: Any, record: Record) -> None:
    """50910 with everything that the record says."""
    assert refused == {
        "code": 50910,
        "message": refused["message"],
        "data": {
            "type": "outcome_unknown",
            "ran": "unknown",
            "record": "charge/k",
            "started_at": pytest.approx(record.started_at, abs=1e-3),
            "attempts": record.attempts,
        },
    }


def is_in_progress(refused: Any) -> None:
    data = refused["data"]
    assert refused["code"] == 40910
    assert data == {
        "type": "idempotency_key_in_progress",
        "ran": "unknown",
        "retry_after_ms": data["retry_after_ms"],
    }
    assert data["retry_after_ms"] > 0


async def watch(app: App, method: str) -> "asyncio.Queue[Any]":
    """Collect the results of a method of the app's ledger as they arrive."""
    ledger = await app.ledger()
    inner = getattr(ledger, method)
    given = asyncio.Queue[Any]()

    async def watched(*args: Any, **options: Any) -> Any:
        answer = await inner(*args, **options)
        given.put_nowait(answer)
        return answer

    setattr(ledger, method, watched)
    return given


async def hold_claims(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> "asyncio.Queue[asyncio.Future[None]]":
    """Make every claim of the app's ledger wait until a test sets the result of its future."""
    ledger = await app.ledger()
    claim = ledger.claim
    held = asyncio.Queue[asyncio.Future[None]]()

    async def slow(wanted: Claim) -> Record:
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        held.put_nowait(gate)
        await gate
        return await claim(wanted)

    monkeypatch.setattr(ledger, "claim", slow)
    return held


async def lose_claim(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next claim takes effect, but its answer is lost."""
    handle = await app.ledger()
    claim = handle.claim

    async def lost(wanted: Claim) -> Record:
        monkeypatch.setattr(handle, "claim", claim)
        await claim(wanted)
        raise LedgerDown("the answer was lost")

    monkeypatch.setattr(handle, "claim", lost)


class Effects:
    """The handler's own table, in the ledger's database."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ask("CREATE TABLE IF NOT EXISTS effects (cents INTEGER)")
        self._ask("DELETE FROM effects")

    @staticmethod
    async def add(ctx: Context, cents: int) -> int:
        """Take effect in the open transaction; return the number of effects so far."""
        if hasattr(ctx.db, "pragma"):
            ctx.db.execute("INSERT INTO effects VALUES (?)", (cents,))
            return cast(int, ctx.db.execute("SELECT count(*) FROM effects").get)
        await ctx.db.execute("INSERT INTO effects VALUES (%s)", (cents,))
        cursor = await ctx.db.execute("SELECT count(*) FROM effects")
        return cast(int, (await cursor.fetchone())[0])

    @property
    def all(self) -> list[int]:
        """The effects that others see: the committed ones."""
        return sorted(cents for (cents,) in self._ask("SELECT cents FROM effects"))

    def _ask(self, statement: str) -> list[Any]:
        if self._store.kind == "sqlite":
            db = apsw.Connection(self._store.url.removeprefix("sqlite:"))
            try:
                db.set_busy_timeout(5000)
                return db.execute(statement).fetchall()
            finally:
                db.close()
        with psycopg.connect(self._store.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []
