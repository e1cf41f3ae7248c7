"""Migrations: which programs change the tables of a ledger, and which versions can use them together."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import apsw
import psycopg
import pytest

from tests.calls import call, make_app, result
from tests.cli import ROOT, invoke
from tests.ledger import claim_of, granted, outcome_of, present
from tests.servers import Postgres, PostgresReplica, Redis
from wirecall import Context
from wirecall.ledger.base import (
    LedgerDown,
    Mark,
    OtherTables,
    RecordId,
    open_ledger,
    schema_of,
)
from wirecall.ledger.postgres import migration, queue
from wirecall.ledger.redis import ledger as redis_ledger
from wirecall.ledger.sqlite import file as sqlite_file

PATIENCE = 120.0
_numbers = count(1)

# An addition of a later version: everything that a migration may contain.
ADDITION = {
    "postgres": """
        ALTER TABLE wirecall.ledger ADD COLUMN newer integer;
        ALTER TABLE wirecall.tasks ADD COLUMN newer integer;
        CREATE TABLE wirecall.newer ();
        CREATE OR REPLACE FUNCTION wirecall.seconds(amount float8) RETURNS interval
        LANGUAGE sql IMMUTABLE AS $$
            SELECT make_interval(secs => least(amount, 1e9))
        $$;
    """,
    "sqlite": f"""
        ALTER TABLE wirecall_commands ADD COLUMN newer INTEGER;
        ALTER TABLE wirecall_tasks ADD COLUMN newer INTEGER;
        ALTER TABLE wirecall_meta ADD COLUMN newer INTEGER;
        CREATE TABLE wirecall_newer (id);
        UPDATE wirecall_meta SET level = {len(sqlite_file.SCHEMA) + 1};
    """,
}


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a store without tables."""
    if kind == "sqlite":
        yield f"sqlite:{tmp_path}/ledger.db"
        return
    server: Postgres = request.getfixturevalue("postgres_server")
    name = f"migrations{next(_numbers)}"
    server.run(f"CREATE DATABASE {name}")
    yield server.url_of(name)
    server.run(f"DROP DATABASE {name} WITH (FORCE)")


@contextmanager
def older_wirecall(kind: str) -> Iterator[int]:
    """This process has the version before while the block runs; yield that version."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "sqlite":
            patch.setattr(sqlite_file, "SCHEMA", sqlite_file.SCHEMA[:-1])
            yield len(sqlite_file.SCHEMA)
        else:
            known = len(migration.parts())
            for name in list(queue.SQL):
                if name.startswith((f"schema {known}", f"index {known} ")):
                    patch.delitem(queue.SQL, name)
            yield known - 1


@contextmanager
def newer_wirecall(kind: str) -> Iterator[None]:
    """This process has a version more while the block runs."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "sqlite":
            patch.setattr(sqlite_file, "SCHEMA", [*sqlite_file.SCHEMA, ADDITION[kind]])
        else:
            number = len(migration.parts()) + 1
            patch.setitem(queue.SQL, f"schema {number}", ADDITION[kind])
            index = "CREATE INDEX newer_index ON wirecall.ledger (newer)"
            patch.setitem(queue.SQL, f"index {number} newer_index", index)
        yield


async def make_older(kind: str, url: str) -> int:
    """Make the tables of the version before, with a record in them; return that version."""
    with older_wirecall(kind) as version:
        ledger = await open_ledger(url)
        record = await granted(ledger)
        await ledger.complete(record.token, outcome_of(), 1000)
        await ledger.aclose()
    return version


# --- which programs migrate -----------------------------------------------------------------------


async def test_production_refuses_older_tables_at_the_start(kind: str, url: str) -> None:
    version = await make_older(kind, url)
    app = make_app(ledger=url, mode="production")
    app.command(name="put")(lambda: 1)
    with pytest.raises(OtherTables, match="wirecall ledger migrate"):
        await app.check_tables()
    refused = await app.handle(call("put", key="k"))
    assert refused is not None and b"50310" in refused
    assert (await schema_of(url)).found == version
    await app.aclose()


@pytest.mark.parametrize(
    "terms", [{"mode": "development"}, {"mode": "production", "migrate": "auto"}], ids=len
)
async def test_development_and_auto_migrate_older_tables(
    kind: str, url: str, terms: dict[str, Any]
) -> None:
    await make_older(kind, url)
    app = make_app(ledger=url, **terms)
    app.command(name="put")(lambda: 1)
    await app.check_tables()
    assert result(await app.handle(call("put", key="k"))) == 1
    assert not (await schema_of(url)).is_behind
    await app.aclose()


async def test_production_makes_tables_in_an_empty_store_unless_never(kind: str, url: str) -> None:
    strict = make_app(ledger=url, mode="production", migrate="never")
    with pytest.raises(OtherTables, match="has no tables"):
        await strict.check_tables()
    await strict.aclose()
    assert (await schema_of(url)).found == 0
    app = make_app(ledger=url, mode="production")
    app.command(name="put")(lambda: 1)
    await app.check_tables()
    assert (await schema_of(url)).found == 0
    assert result(await app.handle(call("put", key="k"))) == 1
    assert not (await schema_of(url)).is_behind
    await app.aclose()


def test_serve_in_production_names_the_verb(
    kind: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(make_older(kind, url))
    app = tmp_path / "app.py"
    app.write_text('from wirecall import App\napp = App("shop", mode="production")\n')
    monkeypatch.chdir(tmp_path)
    refused = invoke("serve", "app.py", "--ledger", url, "--http", "127.0.0.1:0")
    assert refused.exit_code == 4, refused.output
    assert "wirecall ledger migrate" in refused.output


def test_migrate_verb_checks_shows_and_migrates(kind: str, url: str) -> None:
    version = asyncio.run(make_older(kind, url))

    def migrate(*words: str) -> tuple[int, dict[str, Any]]:
        ended = invoke("ledger", "migrate", url, "--json", *words)
        document = json.loads(ended.stdout)
        return ended.exit_code, document["result"]

    code, found = migrate("--check")
    assert (code, found) == (9, {"from": version, "to": version + 1, "migrated": False})
    code, found = migrate("--dry-run")
    assert (code, found["migrated"]) == (0, False)
    assert any("CREATE INDEX" in step for step in found["steps"])
    assert asyncio.run(schema_of(url)).found == version
    assert migrate() == (0, {"from": version, "to": version + 1, "migrated": True})
    assert migrate() == (0, {"from": version + 1, "to": version + 1, "migrated": False})
    assert migrate("--check")[0] == 0
    assert json.loads(invoke("ledger", "stats", url, "--json").stdout)["result"]["done"] == 1


def test_migrate_verb_makes_tables(kind: str, url: str) -> None:
    ended = invoke("ledger", "migrate", url)
    assert (ended.exit_code, "from version 0 to" in ended.output) == (0, True)
    assert not asyncio.run(schema_of(url)).is_behind


def test_migrate_verb_refuses_memory() -> None:
    assert "in memory" in invoke("ledger", "migrate", "memory:").output


# --- versions together ----------------------------------------------------------------------------


def read_done(neighbour: "subprocess.Popen[bytes]", number: int) -> None:
    assert neighbour.stdout is not None
    for _ in range(number):
        assert neighbour.stdout.readline() == b"done\n"


@pytest.mark.parametrize("older", [0, 1])
def test_versions_n_and_before_serve_one_store_while_it_migrates(
    kind: str, url: str, older: int
) -> None:
    """0: this version, and the next one, which adds everything that it may; 1: the one before."""
    if older:
        asyncio.run(make_older(kind, url))
    else:
        asyncio.run(fill(url))
    command = [sys.executable, "-m", "tests.ledger.neighbour", url, str(older)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as neighbour:
        assert neighbour.stdin is not None
        read_done(neighbour, 5)
        with _newest(kind, older):
            asyncio.run(migrate_and_serve(url))
        # What it did during the migration, and after it.
        read_done(neighbour, 20)
        neighbour.stdin.close()
        assert neighbour.stdout is not None
        assert set(neighbour.stdout.readlines()) <= {b"done\n"}
    assert neighbour.returncode == 0
    # It can also be started with the newer tables, as after a rollback of the servers.
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as neighbour:
        read_done(neighbour, 5)
        neighbour.kill()


async def migrate_and_serve(url: str) -> None:
    ledger = await open_ledger(url, "update")
    for number in range(20):
        record = await granted(ledger, RecordId("", "put", f"key-{number}"))
        assert await ledger.complete(record.token, outcome_of(), 1000)
    assert (await present(ledger, RecordId("", "put", "n-0"))).outcome is not None
    assert not (await schema_of(url)).is_behind
    await ledger.aclose()


@contextmanager
def _newest(kind: str, older: int) -> Iterator[None]:
    if older:
        yield
    else:
        with newer_wirecall(kind):
            yield


async def test_tables_that_need_a_newer_wirecall_are_refused(kind: str, url: str) -> None:
    await (await open_ledger(url)).aclose()
    if kind == "sqlite":
        with closing(apsw.Connection(url.removeprefix("sqlite:"))) as db:
            db.execute("UPDATE wirecall_meta SET level = 19")
    else:
        with psycopg.connect(url, autocommit=True) as pg:
            pg.execute("INSERT INTO wirecall.version (number) VALUES (-19)")
    await (await open_ledger(url)).aclose()
    if kind == "sqlite":
        with closing(apsw.Connection(url.removeprefix("sqlite:"))) as db:
            db.execute("UPDATE wirecall_meta SET version = 18")
    else:
        with psycopg.connect(url, autocommit=True) as pg:
            pg.execute("INSERT INTO wirecall.version (number) VALUES (18)")
    with pytest.raises(OtherTables, match=r"version 19(.|\n)*knows version \d+(.|\n)*upgrade"):
        await open_ledger(url)


@pytest.mark.parametrize("kind", ["postgres"])
async def test_migration_builds_an_index_again_whose_builder_died(kind: str, url: str) -> None:
    await make_older(kind, url)
    await (await open_ledger(url, "update")).aclose()
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("DELETE FROM wirecall.version WHERE number < 0")
        db.execute(
            "UPDATE pg_index SET indisvalid = false "
            "WHERE indexrelid = 'wirecall.ledger_begun'::regclass"
        )
    async with asyncio.timeout(PATIENCE):
        ledgers = await asyncio.gather(*(open_ledger(url, "update") for _ in range(3)))
    for ledger in ledgers:
        await ledger.aclose()
    with psycopg.connect(url) as db:
        rows = db.execute(
            "SELECT indisvalid FROM pg_index WHERE indrelid = 'wirecall.ledger'::regclass"
        ).fetchall()
    assert set(rows) == {(True,)}


# --- rights and replicas --------------------------------------------------------------------------


def rights() -> str:
    """Return the statements of docs/deploy.md for the role of an app."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    _, _, rest = page.partition("<!-- rights -->\n```sql\n")
    return rest.partition("```")[0]


@pytest.mark.parametrize("kind", ["postgres"])
async def test_role_without_ddl_serves_commands_and_cannot_migrate(kind: str, url: str) -> None:
    """With the rights that docs/deploy.md lists, and no others."""
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("DROP ROLE IF EXISTS shop_app")
        db.execute("CREATE ROLE shop_app LOGIN")
    own = url.replace("postgres@", "shop_app@")
    with pytest.raises(LedgerDown, match="wirecall ledger migrate"):
        await open_ledger(own)
    await make_older(kind, url)
    granted_now = rights()
    # A version may add tables, and then their rights as well.
    granted_before = granted_now.replace(", wirecall.open, wirecall.fronts", "")
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(granted_before.encode())
    with pytest.raises(OtherTables, match="wirecall ledger migrate"):
        await open_ledger(own)
    with pytest.raises(LedgerDown, match="wirecall ledger migrate"):
        await open_ledger(own, "update")
    with newer_wirecall(kind):
        await (await open_ledger(url, "update")).aclose()
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(granted_now.encode())
    app = make_app(ledger=own, mode="production", migrate="never")
    app.command(name="put")(lambda: 1)
    app.command(name="auto", key="auto")(lambda: 2)

    @app.command(on_crash="transactional")
    async def pay(ctx: Context) -> int:
        cursor = await ctx.db.execute("SELECT 3")
        return int((await cursor.fetchone())[0])

    assert result(await app.handle(call("put", key="k"))) == 1
    assert result(await app.handle(call("auto"))) == 2
    assert result(await app.handle(call("pay", key="k"))) == 3
    ledger = await app.ledger()
    record = await granted(ledger, RecordId("", "put", "task"))
    assert await ledger.begin_task(record.token, "task", b"{}", 100)
    task = await ledger.task("task")
    assert task is not None and await ledger.change_task(task)
    assert await ledger.abandon(record.token)
    assert await ledger.resolve(record.id, None)
    await ledger.ping()
    await ledger.sweep()
    await ledger.mark("c", Mark("a", b"1"), 0)
    await ledger.mark("c", Mark("b", b"2"), 60)
    assert await ledger.marks("c", 60) == [Mark("b", b"2")]
    heard: asyncio.Queue[str | None] = asyncio.Queue()
    bus = ledger.join("c", heard.put_nowait)
    assert bus is not None
    async with asyncio.timeout(PATIENCE):
        assert await heard.get() is None
        await bus.send("hello")
        assert await heard.get() == "hello"
    await bus.aclose()
    await app.aclose()
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("DROP OWNED BY shop_app")
        db.execute("DROP ROLE shop_app")


VERBS = (
    ("stats",),
    ("list",),
    ("list", "--tasks"),
    ("show", "TARGET", "charge", "key-1", "--caller", "alice"),
)


def check_verbs(url: str) -> None:
    for verb in VERBS:
        words = [url if word == "TARGET" else word for word in verb]
        ended = invoke("ledger", *words, *(() if url in words else (url,)), "--json")
        assert ended.exit_code == 0, ended.output
    why = ("--reason", "the bank was asked")
    refused = invoke(
        "ledger", "resolve", url, "charge", "key-1", "--caller=alice", "--not-done", *why
    )
    assert refused.exit_code != 0


def test_verbs_read_a_replica_of_postgres(postgres_server: Postgres) -> None:
    name = f"replica{next(_numbers)}"
    postgres_server.run(f"CREATE DATABASE {name}")
    asyncio.run(fill(postgres_server.url_of(name)))
    replica = PostgresReplica(postgres_server)
    try:
        replica.start()
        check_verbs(replica.url_of(name))
    finally:
        replica.close()
        postgres_server.run(f"DROP DATABASE {name} WITH (FORCE)")


def test_verbs_read_a_replica_of_redis() -> None:
    primary = Redis()
    replica = Redis(replicaof=f"127.0.0.1 {primary.port}")
    try:
        primary.start()
        asyncio.run(fill(primary.url))
        replica.start()
        while not replica.is_in_step():
            pass
        check_verbs(replica.url)
    finally:
        replica.close()
        primary.close()


@pytest.mark.parametrize("kind", ["sqlite"])
def test_verbs_read_a_copy_of_a_file_in_a_folder_that_refuses_writes(
    kind: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(fill(url))
    path = Path(url.removeprefix("sqlite:"))
    before = path.read_bytes()
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    real = os.access
    monkeypatch.setattr(os, "access", lambda where, how: how != os.W_OK and real(where, how))
    check_verbs(url)
    assert path.read_bytes() == before


async def fill(url: str) -> None:
    ledger = await open_ledger(url)
    record = await granted(ledger)
    assert await ledger.complete(record.token, outcome_of(), 1000)
    await ledger.aclose()


# --- Redis ----------------------------------------------------------------------------------------


async def test_redis_records_carry_their_version(redis_server: Redis) -> None:
    url = f"{redis_server.url}?prefix=versions:"
    ledger = await open_ledger(url)
    await granted(ledger)
    name = "versions:alice:charge:key-1"
    assert int(redis_server.ask("HGET", name, "v")) == redis_ledger.VERSION
    assert (await schema_of(url)).found == redis_ledger.VERSION
    redis_server.ask("HSET", name, "v", redis_ledger.VERSION + 1)
    assert (await present(ledger)).id.key == "key-1"
    redis_server.ask("HSET", name, "v", redis_ledger.VERSION + 2)
    with pytest.raises(LedgerDown, match="record has version 4, and this wirecall knows version 2"):
        await ledger.get(RecordId("alice", "charge", "key-1"))
    with pytest.raises(LedgerDown, match="upgrade this one"):
        await ledger.claim(claim_of())
    await ledger.aclose()
    redis_server.ask("HSET", "versions:meta", "version", 9, "least", 8)
    with pytest.raises(OtherTables, match="upgrade this one"):
        await open_ledger(url)


def test_redis_of_an_older_version_is_migrated_by_the_verb(
    redis_server: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{redis_server.url}?prefix=older:"

    async def look() -> None:
        ledger = await open_ledger(url)
        assert (await present(ledger)).outcome is not None
        await ledger.aclose()

    asyncio.run(fill(url))
    redis_server.ask("DEL", "older:meta")
    redis_server.ask("HDEL", "older:alice:charge:key-1", "v")
    asyncio.run(look())
    assert "wirecall ledger migrate" in caplog.text
    words = ("ledger", "migrate", url, "--json")
    assert invoke(*words, "--check").exit_code == 9
    assert invoke(*words).exit_code == 0
    assert asyncio.run(schema_of(url)).found == redis_ledger.VERSION
