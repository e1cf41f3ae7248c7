"""Servers of the version before are replaced by those of this one, and back, under load."""

import asyncio
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.balancer import Balancer
from tests.cli import ROOT
from tests.cli.rolling import (
    APP,
    CLIENTS,
    LEASE_OF_KILLED,
    ROUNDS,
    Server,
    are_true,
    effects,
    kill,
    persistent,
    replace,
)
from tests.ports import free_port
from tests.servers import Postgres

THIS = ["-m", "wirecall"]
# `wirecall` as it was before the last migration: it does not know the newest tables.
BEFORE = [
    "-c",
    f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.ledger.neighbour import forget_versions
from wirecall.cli import main
forget_versions(1)
main(prog_name="wirecall")
""",
]
WORDS = ["--workers", "1", "--drain", "1s"]
_numbers = count(1)


@pytest.fixture(params=["sqlite", "postgres"])
def ledger(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a ledger without tables."""
    if request.param == "sqlite":
        yield "sqlite:ledger.db"
        return
    server: Postgres = request.getfixturevalue("postgres_server")
    name = f"upgrades{next(_numbers)}"
    server.run(f"CREATE DATABASE {name}")
    yield server.url_of(name)
    server.run(f"DROP DATABASE {name} WITH (FORCE)")


async def migrate(folder: Path, ledger: str, *words: str) -> int:
    done = await asyncio.create_subprocess_exec(
        sys.executable, *THIS, "ledger", "migrate", ledger, *words, cwd=folder
    )
    return await done.wait()


async def test_servers_are_upgraded_and_downgraded_and_killed_without_a_doubled_effect(
    ledger: str, tmp_path: Path
) -> None:
    """The tables are migrated once, under load. In each round, one server is killed and one stops."""
    (tmp_path / "effects.py").write_text(APP.replace(*LEASE_OF_KILLED))
    first, second = [Server(tmp_path, free_port(), *WORDS, ledger=ledger) for _ in range(2)]
    balancer = Balancer([first.port, second.port])
    stop = asyncio.Event()
    try:
        async with balancer.watching(), asyncio.TaskGroup() as group:
            for each in (first, second):
                each.program = BEFORE
                await each.start()
                await balancer.until(each.port, is_ready=True)
            assert await migrate(tmp_path, ledger, "--check") == 9
            clients = [
                group.create_task(persistent(number, balancer, stop)) for number in range(CLIENTS)
            ]
            assert await migrate(tmp_path, ledger) == 0
            for _ in range(ROUNDS):
                for program in (THIS, BEFORE):
                    for each in (first, second):
                        each.program = program
                    await kill(first, balancer)
                    await replace(second, balancer)
                    first, second = second, first
            stop.set()
        said = {order: ran for each in clients for order, ran in each.result().items()}
    finally:
        for each in (first, second):
            await each.close()
    are_true(said, effects(tmp_path), kills=2 * ROUNDS)
    assert all(balancer.counts[each.port] for each in (first, second))
    assert await migrate(tmp_path, ledger, "--check") == 0
