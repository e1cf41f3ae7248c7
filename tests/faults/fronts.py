"""Ledgers behind a proxy that loses messages on purpose, and handlers that stand still."""

import asyncio
from typing import Literal
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.calls import call, result
from tests.faults import LEASE, PATIENCE, Answer, Caller, Effects, eventually, make_shop
from tests.faults.proxy import Proxy
from tests.servers import DURABLE, Store
from wirecall import App, Context
from wirecall.ledger.base import Record, RecordId, State
from wirecall.ledger.redis.ledger import SCRIPTS

Loss = Literal["request", "answer"]


durable = pytest.mark.parametrize("store", DURABLE, indirect=True)


losses = pytest.mark.parametrize("loss", ["request", "answer"])


# The bytes of a transition that is sent to the server.
TRANSITIONS = {
    "redis": {
        "claim": SCRIPTS["claim"][1].encode(),
        "commit_point": SCRIPTS["commit_point"][1].encode(),
        "complete": SCRIPTS["complete"][1].encode(),
        "release": SCRIPTS["release"][1].encode(),
        "abandon": SCRIPTS["abandon"][1].encode(),
        "heartbeat": SCRIPTS["heartbeat"][1].encode(),
        "get": SCRIPTS["get"][1].encode(),
    },
    "postgres": {
        "claim": b"wirecall.claim(",
        "commit_point": b"wirecall.commit_points(",
        "complete": b"wirecall.complete(",
        "release": b"DELETE FROM wirecall.ledger",
        "abandon": b"SET state = 'unknown'",
        "heartbeat": b"SET lease_until = clock_timestamp() + wirecall.seconds(",
        "get": b"SELECT seen.*",
    },
}


# How often the ledger sends it before it gives up: PostgreSQL's sends what it groups a second time.
SENDINGS = {
    ("postgres", "claim"): 2,
    ("postgres", "commit_point"): 2,
    ("postgres", "complete"): 2,
}


class Pause:
    """Where a handler stands still: `entered` waits until it is there, `go` lets it continue."""

    def __init__(self) -> None:
        self._entered = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self) -> None:
        self._entered.set()
        await self.go.wait()

    async def entered(self) -> None:
        async with asyncio.timeout(PATIENCE):
            await self._entered.wait()


class Front:
    """A store behind a proxy: `url` leads through it, `store.url` past it."""

    def __init__(self, kind: str, store: Store, proxy: Proxy) -> None:
        self.kind = kind
        self.store = store
        self.proxy = proxy
        port = urlsplit(store.url).port
        self.url = (
            store.url.replace(f":{port}/", f":{proxy.port}/")
            if kind == "redis"
            else f"postgresql://postgres@127.0.0.1:{proxy.port}/postgres?sslmode=disable&gssencmode=disable"
        )

    def pattern(self, transition: str) -> bytes:
        return TRANSITIONS[self.kind][transition]

    def sendings(self, transition: str) -> int:
        return SENDINGS.get((self.kind, transition), 1)


def target(store: Store) -> tuple[str, int] | str:
    parts = urlsplit(store.url)
    if store.kind == "redis":
        return "127.0.0.1", parts.port or 0
    return parse_qs(parts.query)["host"][0] + "/.s.PGSQL.5432"


class Two:
    """The app whose connections are cut, and one without faults, with the same commands."""

    def __init__(self, front: Front, effects: Effects) -> None:
        self._failed: set[str | None] = set()
        self._effects = effects
        self.pause = Pause()
        self.cut = self._with_more(make_shop(front.url, effects, pause=self.pause))
        self.safe = self._with_more(make_shop(front.store.url, effects))

    async def held(self, caller: Caller, method: str) -> asyncio.Task[Answer]:
        """A call of the app that is cut, which stands still in its pause."""
        held = asyncio.create_task(caller.call(self.cut, method, "key"))
        await self.pause.entered()
        return held

    def _with_more(self, app: App) -> App:
        @app.command(commit_point=True, lease=LEASE)
        async def careful(order: int, context: Context) -> str:
            await context.commit_point()
            return self._effects.add(context)

        @app.command(commit_point=True, lease=LEASE)
        def careful_in_a_thread(order: int, context: Context) -> str:
            context.commit_point()
            return self._effects.add(context)

        @app.command(lease=LEASE)
        async def break_after(order: int, context: Context) -> str:
            self._effects.add(context)
            raise ValueError("after the effect")

        @app.command(commit_point=True, lease=LEASE)
        async def fail_once(order: int, context: Context) -> str:
            if context.idempotency_key not in self._failed:
                self._failed.add(context.idempotency_key)
                raise ValueError("before the commit point")
            await context.commit_point()
            return self._effects.add(context)

        return app


async def reads_until(app: App, *calls: asyncio.Task[Answer]) -> int:
    """Queries work while commands wait: return how many there were until these calls had ended."""
    queries = 0
    while not all(one.done() for one in calls):
        assert result(await app.handle(call("read"))) == 1
        queries += 1
        await asyncio.sleep(0.005)
    return queries


async def find(store: Store, method: str, key: str) -> Record | None:
    ledger = await store.open()
    try:
        return await ledger.get(RecordId("", method, key))
    finally:
        await ledger.aclose()


async def lease_is_over(store: Store, method: str, key: str) -> None:
    async def is_over() -> bool:
        record = await find(store, method, key)
        return record is not None and record.lease_left == 0

    await eventually(is_over)


async def is_done(store: Store, method: str, key: str) -> bool:
    record = await find(store, method, key)
    return record is not None and record.state is State.DONE
