"""`/readyz` asks the ledger: whether a command could be recorded now. `/healthz` asks nothing."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.calls import make_app
from tests.faults import PATIENCE, Effects, child, eventually
from tests.faults.probe import Probe
from tests.servers import Postgres, Redis, RedisCluster
from tests.transports import ask
from wirecall import App
from wirecall.ledger.base import LedgerDown
from wirecall.ledger.memory import MemoryLedger
from wirecall.transports.request import HttpRequest


@pytest.fixture(scope="module", params=[Redis, RedisCluster, Postgres])
def server(request: pytest.FixtureRequest) -> Iterator[Redis | RedisCluster | Postgres]:
    """A server that a test may kill, as long as it starts it again."""
    server = request.param()
    try:
        server.start()
        yield server
    finally:
        server.close()


async def test_killed_server_is_not_ready_until_it_returns(
    server: Redis | RedisCluster | Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirecall.app.ASK_WITHIN", PATIENCE)
    async with make_app(ledger=server.url) as app:
        probe = Probe(app)
        assert await probe.is_ready()
        await asyncio.to_thread(server.kill)
        await eventually(probe.is_not_ready)
        assert await probe.reason() == "the ledger cannot be reached, or does not accept writes"
        assert await probe.status("/healthz") == 200
        await asyncio.to_thread(server.start)
        await eventually(probe.is_ready)


async def test_frozen_server_is_not_ready_within_the_deadline(
    server: Redis | RedisCluster | Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirecall.app.ASK_EVERY", 0)
    monkeypatch.setattr("wirecall.app.ASK_WITHIN", PATIENCE)
    async with make_app(ledger=server.url) as app:
        probe = Probe(app)
        assert await probe.is_ready()
        with frozen(server):
            monkeypatch.setattr("wirecall.app.ASK_WITHIN", 0.05)
            assert await probe.reason() == "the ledger did not answer within 0.05 s"
            assert await probe.status("/healthz") == 200
        monkeypatch.setattr("wirecall.app.ASK_WITHIN", PATIENCE)
        await eventually(probe.is_ready)


@contextmanager
def frozen(server: Redis | RedisCluster | Postgres) -> Iterator[None]:
    """All processes of a server stand still in this block."""
    servers = server.nodes if isinstance(server, RedisCluster) else [server]
    for one in servers:
        one.send(signal.SIGSTOP)
    try:
        yield
    finally:
        for one in servers:
            one.send(signal.SIGCONT)


@pytest.mark.parametrize("server", [Redis, Postgres], indirect=True, scope="module")
async def test_server_that_refuses_writes_is_not_ready(
    server: Redis | Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirecall.app.ASK_EVERY", 0)
    monkeypatch.setattr("wirecall.app.ASK_WITHIN", PATIENCE)
    async with make_app(ledger=server.url) as app:
        probe = Probe(app)
        assert await probe.is_ready()
        order(
            server, "CONFIG SET maxmemory 1", "ALTER SYSTEM SET default_transaction_read_only = on"
        )
        await eventually(probe.is_not_ready)
        order(server, "CONFIG SET maxmemory 0", "ALTER SYSTEM RESET default_transaction_read_only")
        await eventually(probe.is_ready)


def order(server: Redis | Postgres, redis: str, postgres: str) -> None:
    if isinstance(server, Redis):
        server.ask(*redis.split())
    else:
        server.run(postgres, "SELECT pg_reload_conf()")


async def test_cluster_is_ready_while_a_primary_remains() -> None:
    """Without full coverage, the other primaries still record: to send all work away would end that
    too.
    """
    cluster = RedisCluster()
    try:
        cluster.start()
        for node in cluster.nodes:
            node.ask("CONFIG", "SET", "cluster-require-full-coverage", "no")
        async with make_app(ledger=cluster.url) as app:
            ledger = await app.ledger()
            for node in cluster.nodes[:2]:
                await ledger.ping()
                await asyncio.to_thread(node.kill)
            await ledger.ping()
            await asyncio.to_thread(cluster.nodes[2].kill)
            with pytest.raises(LedgerDown):
                await ledger.ping()
    finally:
        cluster.close()


async def test_file_that_is_moved_away_is_not_ready_until_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wirecall.app.ASK_EVERY", 0)
    monkeypatch.setattr("wirecall.app.ASK_WITHIN", PATIENCE)
    path = tmp_path / "ledger.db"
    async with make_app(ledger=f"sqlite:{path}") as app:
        probe = Probe(app)
        assert await probe.is_ready()
        path.rename(tmp_path / "away")
        assert await probe.is_not_ready()
        (tmp_path / "away").rename(path)
        assert await probe.is_ready()


async def test_disk_without_room_is_not_ready(tmp_path: Path) -> None:
    """RLIMIT_FSIZE is for a process what a full disk is for all of them."""
    async with child(f"sqlite:{tmp_path / 'ledger.db'}", Effects(tmp_path / "effects")) as one:

        async def is_not_ready() -> bool:
            return bool(await one.ask("ready") == 503)

        async def is_ready() -> bool:
            return bool(await one.ask("ready") == 200)

        await eventually(is_ready)
        await one.ask("limit", 0)
        await eventually(is_not_ready)
        await one.ask("limit", -1)
        await eventually(is_ready)


async def test_probes_share_one_question_and_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wirecall.app.ASK_EVERY", 1000)
    asked = 0
    begun = asyncio.Event()
    answer = asyncio.Event()

    async def ping(_: MemoryLedger) -> None:
        nonlocal asked
        asked += 1
        begun.set()
        await answer.wait()

    monkeypatch.setattr(MemoryLedger, "ping", ping)
    async with make_app() as app:
        probe = Probe(app)
        probes = [asyncio.create_task(probe.status()) for _ in range(50)]
        await begun.wait()
        answer.set()
        assert set(await asyncio.gather(*probes)) == {200}
        assert (await probe.status(), asked) == (200, 1)
        monkeypatch.setattr("wirecall.app.ASK_EVERY", 0)
        assert (await probe.status(), asked) == (200, 2)


async def test_ledger_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question may hold a connection; a late answer still counts when it arrives."""
    monkeypatch.setattr("wirecall.app.ASK_EVERY", 0)
    monkeypatch.setattr("wirecall.app.ASK_WITHIN", 0.01)
    asked = 0
    answer = asyncio.Event()

    async def ping(_: MemoryLedger) -> None:
        nonlocal asked
        asked += 1
        await answer.wait()

    monkeypatch.setattr(MemoryLedger, "ping", ping)
    async with make_app() as app:
        probe = Probe(app)
        assert [await probe.status() for _ in range(5)] == [503] * 5
        assert asked == 1
        answer.set()
        await eventually(probe.is_ready)


async def test_readiness_also_asks_the_program_around_the_app() -> None:
    """`asgi(routes=, ready=)` adds endpoints, and reasons for not being ready."""
    reasons: list[str | None] = ["bank is down", None]

    async def ready() -> str | None:
        return reasons.pop(0)

    async def status(request: HttpRequest) -> None:
        await request.respond(200, b'{"sessions":0}')

    app = App("test", ledger="memory:")
    server = app.asgi(routes={"/status": status}, ready=ready)
    refused = await ask(server, "/readyz", method="GET")
    assert (refused.status, refused.json["reason"]) == (503, "bank is down")
    assert (await ask(server, "/readyz", method="GET")).status == 200
    assert (await ask(server, "/status", method="GET")).json == {"sessions": 0}
    await app.aclose()
