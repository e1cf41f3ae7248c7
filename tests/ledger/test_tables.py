"""The tables of a ledger: which programs make or migrate them, and how long that may take."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import apsw
import psycopg
import pytest
from click.testing import Result

from tests.calls import call, error, make_app, result
from tests.cli import invoke
from tests.cli.terminals import watched
from tests.ledger import claim_of
from tests.servers import Postgres
from wirecall.ledger.base import OtherTables, open_ledger
from wirecall.ledger.postgres import queue
from wirecall.ledger.sqlite import file as sqlite_file

PATIENCE = 120.0
_numbers = count(1)

VERBS = (
    ("ledger", "stats"),
    ("ledger", "list"),
    ("ledger", "sweep"),
    ("ledger", "show", "TARGET", "put", "k"),
    (
        *("ledger", "resolve", "TARGET", "put", "k", "--not-done", "--yes"),
        *("--reason", "the bank was asked"),
    ),
)


@pytest.fixture
def database(postgres_server: Postgres) -> Iterator[str]:
    """The URL of a new database."""
    name = f"tables{next(_numbers)}"
    postgres_server.run(f"CREATE DATABASE {name}")
    yield postgres_server.url_of(name)
    postgres_server.run(f"DROP DATABASE {name} WITH (FORCE)")


def run_verb(verb: tuple[str, ...], url: str) -> Result:
    words = [url if word == "TARGET" else word for word in verb]
    return invoke(*words, *(() if url in words else (url,)), "--json")


def problem_of(refused: Result) -> dict[str, str]:
    problem: dict[str, str] = json.loads(refused.stdout)["error"]
    return problem


def schemas(url: str) -> list[int] | None:
    """Return the versions that a database has had; None if it has no schema `wirecall`."""
    with psycopg.connect(url) as db:
        if db.execute("SELECT to_regnamespace('wirecall') IS NULL").fetchone() == (True,):
            return None
        return [
            number
            for (number,) in db.execute("SELECT abs(number) FROM wirecall.version ORDER BY 1")
        ]


async def make_older(url: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Make the tables as a server does, and then pretend that this wirecall has a newer version."""
    await (await open_ledger(url)).aclose()
    known = len([name for name in queue.SQL if name.startswith("schema ")])
    monkeypatch.setitem(queue.SQL, f"schema {known + 1}", "CREATE TABLE wirecall.newer ()")
    return known


# --- PostgreSQL -----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_ledger_verbs_make_no_schema(verb: tuple[str, ...], database: str) -> None:
    refused = run_verb(verb, database)
    problem = problem_of(refused)
    assert (refused.exit_code, problem["type"]) == (4, "ledger_tables")
    assert "has no tables of wirecall" in problem["message"]
    assert "wirecall serve" in problem["next"]
    assert schemas(database) is None


@pytest.mark.parametrize("verb", VERBS)
def test_ledger_verbs_change_no_schema(
    verb: tuple[str, ...], database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = asyncio.run(make_older(database, monkeypatch))
    problem = problem_of(run_verb(verb, database))
    assert (
        f"has tables of version {known}, and this wirecall knows version {known + 1}"
        in problem["message"]
    )
    assert "wirecall ledger migrate" in problem["next"]
    assert schemas(database) == [*range(1, known + 1)]


def test_ledger_verbs_name_the_fix_for_a_newer_schema(database: str) -> None:
    asyncio.run(open_ledger(database))
    with psycopg.connect(database, autocommit=True) as db:
        db.execute("INSERT INTO wirecall.version (number) VALUES (999)")
    problem = problem_of(run_verb(("ledger", "stats"), database))
    assert (problem["type"], problem["next"]) == ("ledger_tables", "upgrade this one")


def test_doctor_and_call_make_no_schema(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("app.py").write_text(
        'from wirecall import App\napp = App("shop")\napp.command(name="put")(lambda: 1)\n'
    )
    monkeypatch.setenv("WIRECALL_LEDGER_URL", database)
    found = {
        each["name"]: each
        for each in json.loads(invoke("doctor", "--json").stdout)["result"]["checks"]
    }
    assert (found["ledger"]["level"], "no tables of wirecall yet" in found["ledger"]["what"]) == (
        "ok",
        True,
    )
    assert invoke("call", "app.py", "put", "--key", "k").exit_code != 0
    assert schemas(database) is None


async def test_servers_make_and_migrate_a_schema(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = await make_older(database, monkeypatch)
    async with make_app(ledger=database) as app:
        app.command(name="put")(lambda: 1)
        assert result(await app.handle(call("put", key="k"))) == 1
    assert schemas(database) == [*range(1, known + 2)]


@pytest.mark.parametrize(
    "name", ["statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"]
)
async def test_migration_outlasts_the_timeouts_of_commands(
    name: str, database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of this process, and those that an operator has set for the database."""
    known = await make_older(database, monkeypatch)
    monkeypatch.setitem(queue.SQL, f"schema {known + 1}", "SELECT pg_sleep(1)")
    monkeypatch.setattr(queue, "PATIENCE", 0.3)
    with psycopg.connect(database, autocommit=True) as db:
        db.execute(f"ALTER DATABASE {db.info.dbname} SET {name} = '200ms'".encode())
    async with asyncio.timeout(PATIENCE):
        # Two wait for the one.
        ledgers = await asyncio.gather(*(open_ledger(database, "update") for _ in range(3)))
        for ledger in ledgers:
            await ledger.aclose()
    assert schemas(database) == [*range(1, known + 2)]
    assert "did not answer in time" not in caplog.text
    assert f"brought from version {known} to {known + 1}" in caplog.text


async def test_migration_continues_after_its_first_command_has_left(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = await make_older(database, monkeypatch)
    monkeypatch.setattr(queue, "PATIENCE", 0.3)
    app = make_app(ledger=database)

    @app.command(timeout=0.2)
    async def hasty() -> int:
        return 1

    app.command(name="put")(lambda: 2)
    with psycopg.connect(database) as db:
        db.execute("LOCK wirecall.ledger IN ACCESS EXCLUSIVE MODE")
        monkeypatch.setitem(
            queue.SQL, f"schema {known + 1}", "ALTER TABLE wirecall.ledger ADD COLUMN newer int"
        )
        async with app, asyncio.timeout(PATIENCE):
            assert error(await app.handle(call("hasty", key="k")))["data"]["ran"] == "no"
            later = asyncio.create_task(app.handle(call("put", key="p")))
            db.rollback()
            assert result(await later) == 2
    assert schemas(database) == [*range(1, known + 2)]


@pytest.mark.parametrize(
    ("verb", "shown"),
    [
        (("stats",), "Counting"),
        (("list",), "Reading"),
        (("list", "--tasks"), "Reading"),
        (("migrate",), "Migrating"),
    ],
    ids=str,
)
def test_ledger_verbs_that_take_long_say_what_they_do(
    verb: tuple[str, ...], shown: str, database: str, tmp_path: Path
) -> None:
    """On a terminal, after a second. The tables are locked until then."""
    asyncio.run(put(database))
    locked = "wirecall.ledger"
    if verb == ("migrate",):
        locked = "wirecall.fronts"  # an older version lacks what the migration makes again
    with psycopg.connect(database) as db:
        if verb == ("migrate",):
            db.execute(
                "DELETE FROM wirecall.version WHERE abs(number) = "
                "(SELECT max(abs(number)) FROM wirecall.version)"
            )
            db.commit()
        db.execute(f"LOCK {locked} IN ACCESS EXCLUSIVE MODE".encode())
        code, text = watched(
            tmp_path, "ledger", *verb, database, until=shown, then=lambda: db.rollback()
        )
    assert code == 0, text
    assert shown in text


async def put(url: str) -> None:
    ledger = await open_ledger(url)
    record = await ledger.claim(claim_of())
    assert await ledger.release(record.token)
    await ledger.aclose()


# --- SQLite ---------------------------------------------------------------------------------------


def tables_of(path: Path) -> set[str]:
    with closing(apsw.Connection(str(path))) as db:
        return {
            name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }


@pytest.mark.parametrize("verb", VERBS)
def test_ledger_verbs_make_no_tables_in_a_file_of_the_user(
    verb: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "shop.db"
    with closing(apsw.Connection(str(path))) as db:
        db.execute("CREATE TABLE orders (id)")
    before = path.read_bytes()
    assert problem_of(run_verb(verb, f"sqlite:{path}"))["type"] == "ledger_tables"
    assert tables_of(path) == {"orders"}
    assert path.read_bytes() == before


@pytest.mark.parametrize("verb", VERBS)
def test_ledger_verbs_leave_a_file_of_an_older_version(
    verb: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "ledger.db"
    with closing(apsw.Connection(str(path))) as db:
        db.execute(sqlite_file.SQL["schema 1"])
    before = path.read_bytes()
    problem = problem_of(run_verb(verb, f"sqlite:{path}"))
    assert (
        f"has tables of version 1, and this wirecall knows version {len(sqlite_file.SCHEMA)}"
        in problem["message"]
    )
    assert path.read_bytes() == before


def test_call_begins_a_file_and_leaves_one_of_an_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("app.py").write_text(
        'from wirecall import App\napp = App("shop")\napp.command(name="put")(lambda: 1)\n'
    )
    assert invoke("call", "app.py", "put", "--key", "k", "--ledger", "sqlite:new.db").exit_code == 0
    with closing(apsw.Connection("old.db")) as db:
        db.execute(sqlite_file.SQL["schema 1"])
    refused = invoke("call", "app.py", "put", "--key", "k", "--ledger", "sqlite:old.db", "--json")
    assert refused.exit_code != 0
    assert "wirecall_tasks" not in tables_of(tmp_path / "old.db")


async def test_ledger_that_is_only_read_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(OtherTables, match="does not exist"):
        await open_ledger(f"sqlite:{tmp_path}/deep/ledger.db", "leave")
    assert not (tmp_path / "deep").exists()
    ledger = await open_ledger(f"sqlite:{tmp_path}/deep/ledger.db")
    await ledger.claim(claim_of())
    await ledger.aclose()
    seen = await open_ledger(f"sqlite:{tmp_path}/deep/ledger.db", "leave")
    assert len(await seen.list()) == 1
    await seen.aclose()
