"""Settings of a store by which it may lose commands: `wirecall doctor` warns about them."""

import asyncio
import json
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.cli import invoke
from tests.ledger import granted
from tests.servers import Postgres, PostgresReplica, Redis
from wirecall.ledger.base import open_ledger, risks_of


async def fill(url: str) -> None:
    ledger = await open_ledger(url)
    await granted(ledger)
    await ledger.aclose()


def risks(url: str) -> str:
    return "\n".join(f"{risk.what} {risk.fix}" for risk in asyncio.run(risks_of(url)))


def test_doctor_warns_about_a_redis_that_may_lose_commands(
    redis_server: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{redis_server.url}?prefix=risks:"
    asyncio.run(fill(url))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WIRECALL_LEDGER_URL", url)
    checks = json.loads(invoke("doctor", "--json").stdout)["result"]["checks"]
    found = [each for each in checks if each["name"] == "ledger" and each["level"] == "warn"]
    assert ["appendfsync is no" in each["what"] for each in found] == [True]
    redis_server.ask("CONFIG", "SET", "appendfsync", "always")
    redis_server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        text = risks(url)
    finally:
        redis_server.ask("CONFIG", "SET", "appendfsync", "no")
        redis_server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert "maxmemory-policy is allkeys-lru" in text
    assert "appendfsync" not in text


def test_risk_of_a_postgres_that_does_not_wait_for_its_replicas(postgres_server: Postgres) -> None:
    assert "fsync is off" in risks(postgres_server.url)  # as the servers of the tests are
    assert "replicas" not in risks(postgres_server.url)
    replica = PostgresReplica(postgres_server)
    try:
        replica.start()
        text = ""
        while "replicas" not in text:  # it may need a moment to connect
            text = risks(postgres_server.url)
        assert "synchronous_standby_names = 'ANY 1 (*)'" in text
    finally:
        replica.close()


def test_risk_of_a_postgres_that_waits_for_no_replica_although_it_names_some(
    postgres_server: Postgres,
) -> None:
    url = f"{postgres_server.url}&options=" + quote("-c synchronous_commit=local", safe="")
    assert "synchronous_standby_names" not in risks(url)
    postgres_server.run("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (nobody)'")
    try:
        postgres_server.run("SELECT pg_reload_conf()")
        text = ""
        while "synchronous_commit is local" not in text:  # a reload takes a moment
            text = risks(url)
    finally:
        postgres_server.run("ALTER SYSTEM RESET synchronous_standby_names")
        postgres_server.run("SELECT pg_reload_conf()")


def test_risk_of_a_redis_whose_replicas_are_not_waited_for() -> None:
    primary = Redis()
    replica = Redis()
    try:
        primary.start()
        replica.start()
        assert "replicas" not in risks(primary.url)
        replica.ask("REPLICAOF", "127.0.0.1", primary.port)
        text = ""
        while "replicas" not in text:  # it needs a moment to connect
            text = risks(primary.url)
        assert "waits for none of them" in text
        assert "?replicas=1 in the URL of the ledger" in text
        assert "replicas" not in risks(f"{primary.url}?replicas=1")
    finally:
        primary.close()
        replica.close()


def test_file_has_no_risks_of_settings(tmp_path: Path) -> None:
    assert risks(f"sqlite:{tmp_path}/ledger.db") == ""
