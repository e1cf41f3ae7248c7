"""Connections to PostgreSQL: more transactions than connections, and a pooler between."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.calls import call, error, make_app, result
from tests.faults import eventually
from tests.ports import free_port
from tests.servers import Postgres, Server, Store
from wirecall import App, Context
from wirecall.ledger.base import open_ledger, risks_of
from wirecall.ledger.postgres import bus

PGBOUNCER = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
POOL = 10
PATIENCE = 120.0

pytestmark = pytest.mark.parametrize("store", ["postgres"], indirect=True)


class Held:
    """An app with a transactional command that waits until it may continue."""

    def __init__(self, store: Store, **options: Any) -> None:
        self.app: App = make_app(ledger=store.url)
        self.go = asyncio.Event()
        self.begun = asyncio.Semaphore(0)
        self.ran = 0

        @self.app.command(on_crash="transactional", **options)
        async def hold(ctx: Context) -> int:
            self.ran += 1
            self.begun.release()
            await self.go.wait()
            return 1

        @self.app.command(on_crash="unknown")
        async def plain() -> int:
            return 2


async def test_transactions_wait_for_a_connection(store: Store) -> None:
    """60 slow commands at once, and 10 connections."""
    held = Held(store)
    async with held.app, asyncio.timeout(PATIENCE):
        calls = [
            asyncio.create_task(held.app.handle(call("hold", key=f"k{number}")))
            for number in range(60)
        ]
        await held.begun.acquire()
        held.go.set()
        assert [result(await each) for each in calls] == [1] * 60
    assert held.ran == 60


@pytest.mark.parametrize("options", [{"wait": 0.1}, {"timeout": 0.5}])
async def test_transactions_are_busy_where_no_connection_becomes_free(
    store: Store, options: dict[str, float]
) -> None:
    held = Held(store)
    late = Held(store, **options)
    late.app.ledger = held.app.ledger  # type: ignore[method-assign]  # one pool
    async with held.app, asyncio.timeout(PATIENCE):
        # The first command of an app also looks at the store.
        assert result(await late.app.handle(call("plain", key="first"))) == 2
        calls = [
            asyncio.create_task(held.app.handle(call("hold", key=f"k{number}")))
            for number in range(POOL)
        ]
        for _ in range(POOL - 2):  # as many as there are places for transactions
            await held.begun.acquire()
        refused = error(await late.app.handle(call("hold", key="late")))
        assert (refused["code"], refused["data"]["ran"], late.ran) == (42910, "no", 0)
        assert refused["data"]["retry_after_ms"] > 0
        held.go.set()
        await asyncio.gather(*calls)
        late.go.set()
        assert result(await late.app.handle(call("hold", key="late"))) == 1


async def test_transactions_leave_connections_for_other_commands_and_the_probe(
    store: Store,
) -> None:
    held = Held(store)
    async with held.app, asyncio.timeout(PATIENCE):
        calls = [
            asyncio.create_task(held.app.handle(call("hold", key=f"k{number}")))
            for number in range(2 * POOL)
        ]
        for _ in range(POOL - 2):
            await held.begun.acquire()
        assert result(await held.app.handle(call("plain", key="p"))) == 2
        await (await held.app.ledger()).ping()
        held.go.set()
        assert [result(await each) for each in calls] == [1] * (2 * POOL)


# --- behind a pooler ------------------------------------------------------------------------------


class PgBouncer(Server):
    """pgbouncer in transaction mode: each transaction may get another session of the server."""

    def __init__(self, behind: Postgres) -> None:
        super().__init__()
        self._behind = behind
        self.port = free_port()
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def _launch(self, log: Any) -> "subprocess.Popen[bytes]":
        assert PGBOUNCER is not None
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": 4,
            "max_client_conn": 200,
            "ignore_startup_parameters": "extra_float_digits",
        }
        lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
        database = f"* = host={self._behind.folder} user=postgres"
        file = self.folder / "pgbouncer.ini"
        file.write_text(f"[databases]\n{database}\n[pgbouncer]\n{lines}")
        return subprocess.Popen([PGBOUNCER, file], stdout=log, stderr=log, **self._behind.user)

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url).close()
        except psycopg.OperationalError:
            return False
        return True


@pytest.fixture
def pooler(postgres_server: Postgres) -> Iterator[PgBouncer]:
    if PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed: apt-get install pgbouncer")
    server = PgBouncer(postgres_server)
    server.folder.chmod(0o755)  # it does not run as root, and reads its settings there
    try:
        server.start()
        yield server
    finally:
        server.close()


async def test_transactions_work_behind_a_transaction_pooler(
    store: Store, pooler: PgBouncer
) -> None:
    """A statement that is sent often is prepared by the driver, in one session of many."""
    app = make_app(ledger=pooler.url)

    @app.command(on_crash="transactional")
    async def count(ctx: Context, number: int) -> int:
        for _ in range(8):
            await ctx.db.execute("SELECT %s::int", (number,))
        row = await (await ctx.db.execute("SELECT %s::int + 1", (number,))).fetchone()
        return int(row[0])

    async with app, asyncio.timeout(PATIENCE):
        calls = [
            app.handle(call("count", {"number": number}, key=f"k{number}")) for number in range(200)
        ]
        answers = await asyncio.gather(*calls)
    assert [result(answer) for answer in answers] == list(range(1, 201))
    assert Path(pooler.folder / "log").exists()


async def test_bus_receives_nothing_behind_a_transaction_pooler_and_says_so(
    store: Store,
    postgres_server: Postgres,
    pooler: PgBouncer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`doctor` reports it too. With `?listen=` there is a way around the pooler."""
    monkeypatch.setattr(bus, "ECHO_WITHIN", 0.3)

    async def is_reported() -> bool:
        return "a pooler in transaction mode" in caplog.text

    around = f"{pooler.url}?listen={postgres_server.folder}:5432"
    for url, is_deaf in ((pooler.url, True), (around, False)):
        caplog.clear()
        ledger = await open_ledger(url, "update")
        heard: asyncio.Queue[str | None] = asyncio.Queue()
        joined = ledger.join("wirecall-test", heard.put_nowait)
        assert joined is not None
        async with asyncio.timeout(PATIENCE):
            assert await heard.get() is None
            await joined.send("hello")
            if is_deaf:
                await eventually(is_reported)
                assert heard.empty()
            else:
                assert await heard.get() == "hello"
        await joined.aclose()
        await ledger.aclose()
        risks = [risk.fix for risk in await risks_of(url)]
        assert any("?listen=" in fix for fix in risks) == is_deaf
