"""Servers that cannot keep the contract are refused when they are opened, and those that might not
are warned about.

Real servers are configured where that is possible; a fake server plays other versions and roles.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from urllib.parse import parse_qs, urlsplit

import apsw
import psycopg
import pytest
import redis

from tests.calls import call, error, make_app, result
from tests.servers import Postgres, Redis, Store
from wirecall.ledger.base import LedgerDown, RecordId, open_ledger


@pytest.fixture(scope="module")
def server() -> Iterator[Redis]:
    """A server that this test may kill."""
    own = Redis()
    try:
        own.start()
        yield own
    finally:
        own.close()


@pytest.fixture
def configure(server: Redis) -> Iterator[Callable[..., None]]:
    """Changes the server's settings, for one test."""
    with closing(redis.Redis.from_url(server.url)) as client:
        before = {
            name: str(client.config_get(name)[name])
            for name in ("maxmemory", "maxmemory-policy", "appendonly")
        }

        def set_all(**settings: str) -> None:
            for name, value in settings.items():
                client.config_set(name.replace("_", "-"), value)

        yield set_all
        for name, value in before.items():
            client.config_set(name, value)


# --- a real one -----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "allkeys-random"])
async def test_server_that_evicts_is_refused_until_it_stops(
    policy: str, server: Redis, configure: Callable[..., None]
) -> None:
    app = make_app(ledger=server.url)
    effects = list[int]()
    app.command(name="put")(lambda: effects.append(1))
    app.query(name="look")(lambda: 1)
    configure(maxmemory="100mb", maxmemory_policy=policy)
    with pytest.raises(LedgerDown, match="drops records when memory runs out") as caught:
        await open_ledger(server.url)
    assert "CONFIG SET maxmemory-policy noeviction" in str(caught.value)
    refused = error(await app.handle(call("put", key=policy)))
    assert (refused["code"], refused["data"]["ran"], effects) == (50310, "no", [])
    assert result(await app.handle(call("look"))) == 1
    configure(maxmemory_policy="noeviction")
    assert result(await app.handle(call("put", key=policy))) is None
    assert effects == [1]
    await app.aclose()


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({"appendonly": "no"}, "appendonly is no"),
        ({"maxmemory_policy": "allkeys-lru"}, "set noeviction before you set maxmemory"),
        ({}, None),
    ],
)
async def test_server_that_may_forget_is_warned_about(
    settings: dict[str, str],
    warning: str | None,
    server: Redis,
    configure: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    configure(**settings)
    with caplog.at_level(logging.WARNING, "wirecall"):
        await (await open_ledger(server.url)).aclose()
    assert caplog.text == "" if warning is None else warning in caplog.text


@pytest.mark.parametrize("store", ["redis"], indirect=True)
async def test_record_in_redis_is_one_key(store: Store, redis_server: Redis) -> None:
    """So that a script touches one, and a record cannot be half there."""
    app = make_app(ledger=store.url)
    app.command(name="put")(lambda: 1)
    with closing(redis.Redis.from_url(redis_server.url)) as client:
        for n in range(5):
            result(await app.handle(call("put", key=f"k{n}")))
        made = client.keys(f"{parse_qs(urlsplit(store.url).query)['prefix'][0]}*")
        # The others are there for operators.
        made = [name for name in made if str(name).count(":") == 3]
        assert len(made) == 5
        assert {client.type(name) for name in made} == {b"hash"}
        assert all(client.ttl(name) == -1 for name in made), (
            "a clock that jumps forward would remove the evidence"
        )
    await app.aclose()


# --- one that says so -----------------------------------------------------------------------------

FIT = {
    "redis_version": "7.2.4",
    "role": "master",
    "maxmemory": "0",
    "maxmemory_policy": "noeviction",
    "aof_enabled": "1",
}


@asynccontextmanager
async def saying(info: dict[str, str] | None) -> AsyncIterator[str]:
    """A single server.

    It answers INFO, or forbids it, and answers OK to everything else. Yields its URL.
    """

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while count := await reader.readline():
            words = [
                (await reader.readline(), await reader.readline())[1].strip()
                for _ in range(int(count[1:]))
            ]
            text = "".join(f"{name}:{value}\r\n" for name, value in (info or {}).items()).encode()
            if words[0].upper() == b"CLUSTER":
                writer.write(b"-ERR This instance has cluster support disabled\r\n")
            elif words[0].upper() == b"HMGET":
                writer.write(b"*2\r\n$-1\r\n$-1\r\n")
            elif words[0].upper() == b"SCAN":
                writer.write(b"*2\r\n$1\r\n0\r\n*0\r\n")
            elif words[0].upper() != b"INFO":
                writer.write(b"+OK\r\n")
            elif info is None:
                writer.write(b"-NOPERM this user has no permissions to run the 'info' command\r\n")
            else:
                writer.write(b"$%d\r\n%b\r\n" % (len(text), text))
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        yield f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}/0"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"redis_version": "6.0.16"}, "it is version 6.0.16"),
        ({"redis_version": "5.0.7"}, "it is version 5.0.7"),
        ({"role": "slave"}, "it is a replica"),
    ],
)
async def test_server_that_cannot_be_a_ledger_is_refused(said: dict[str, str], why: str) -> None:
    async with saying({**FIT, **said}) as url:
        with pytest.raises(LedgerDown, match=why) as caught:
            await open_ledger(url)
    assert "fix:" in str(caught.value)


@pytest.mark.parametrize("version", ["6.2.0", "6.2.14", "7.0.0", "10.1"])
async def test_server_that_is_new_enough_is_accepted(
    version: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with saying({**FIT, "redis_version": version}) as url:
        await (await open_ledger(url)).aclose()
    assert caplog.text == ""


async def test_server_that_forbids_info_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    async with saying(None) as url:
        await (await open_ledger(url)).aclose()
    assert "could not check whether it keeps its data" in caplog.text


# --- PostgreSQL -----------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
async def test_schema_of_a_newer_wirecall_stays_unchanged(
    store: Store, postgres_server: Postgres
) -> None:
    await (await store.open()).aclose()
    app = make_app(ledger=store.url)
    effects = list[int]()
    app.command(name="put")(lambda: effects.append(1))
    with psycopg.connect(postgres_server.url, autocommit=True) as db:
        try:
            db.execute("INSERT INTO wirecall.version (number) VALUES (999)")
            with pytest.raises(LedgerDown, match="upgrade"):
                await open_ledger(store.url)
            refused = error(await app.handle(call("put", key="k")))
            assert (refused["code"], refused["data"]["ran"], effects) == (50310, "no", [])
        finally:
            db.execute("DELETE FROM wirecall.version WHERE number = 999")
    result(await app.handle(call("put", key="k")))
    assert effects == [1]
    await app.aclose()


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize("durable", ["on", "off"])
async def test_database_that_may_forget_is_warned_about(
    durable: str, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{store.url}&options=-c%20synchronous_commit%3D{durable}"
    await (await open_ledger(url)).aclose()
    # The servers of the tests run without fsync, so there is always a warning; it names the
    # setting.
    assert f"synchronous_commit is {durable}, fsync is off" in caplog.text


# --- the tables themselves ------------------------------------------------------------------------

NEVER = [
    *(
        f"{column} = NULL"
        for column in (
            "lease_until",
            "fingerprint",
            "nonce",
            "fence",
            "attempts",
            "expires_at",
            "state",
        )
    ),
    "key = ''",
    "key = '" + "x" * 256 + "'",
    "state = 'none'",
    "digest = NULL",  # of a record that is done
    "delivery = 'somewhere'",
    "delivery = 'pending'",  # of a record without a deliverer
]


def write(store: Store, change: str) -> None:
    """Change the records by hand."""
    if store.kind == "sqlite":
        with closing(apsw.Connection(store.url.removeprefix("sqlite:"))) as file:
            file.execute(f"UPDATE wirecall_commands SET {change}")
    else:
        with psycopg.connect(store.url, autocommit=True) as db:
            db.execute(f"UPDATE wirecall.ledger SET {change}".encode())


@pytest.mark.parametrize("store", ["sqlite", "postgres"], indirect=True)
@pytest.mark.parametrize("change", NEVER)
async def test_record_without_a_lease_a_token_or_a_key_cannot_be_written(
    change: str, store: Store
) -> None:
    """Others took a record without a lease for one whose holder was gone, and one with an empty key
    ran for a month.
    """
    async with make_app(ledger=store.url) as app:
        app.command(name="put")(lambda: 1)
        result(await app.handle(call("put", key="k")))
        with pytest.raises((apsw.ConstraintError, psycopg.IntegrityError, psycopg.DataError)):
            write(store, change)
        assert await (await app.ledger()).get(RecordId("", "put", "k"))
