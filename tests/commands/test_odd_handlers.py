"""Handlers that do unexpected things, over every ledger: no effect is doubled, and every answer is
true.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from msgspec import UNSET

from tests.calls import call, error, make_app, read, result
from tests.ledger import LEASE, claim_of
from tests.servers import TRANSACTIONAL, Store
from wirecall import App, Context, DomainError, connect
from wirecall.errors import RpcError
from wirecall.ledger.base import Ledger, LedgerDown, RecordId, State
from wirecall.protocol.messages import ErrorObject, remote_error
from wirecall.server.context import Next
from wirecall.server.policy import fingerprint


@pytest.fixture
async def app(store: Store) -> AsyncIterator[App]:
    async with make_app(ledger=store.url) as app:
        yield app


async def stands(app: App, key: str = "k", method: str = "put") -> State | None:
    record = await (await app.ledger()).get(RecordId("", method, key))
    return None if record is None else record.state


def fails_once(ledger: Ledger, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of these transitions does not reach the store."""
    transition = getattr(ledger, name)
    failures = [LedgerDown("away")]

    async def flaky(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return await transition(*args)

    monkeypatch.setattr(ledger, name, flaky)


# --- the commit point -----------------------------------------------------------------------------


async def test_commit_point_that_is_tried_again_is_written_again(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the second try passed because of the first, a crash after the effect would look like
    "nothing".
    """
    effects: list[int] = []

    @app.command
    async def put(ctx: Context) -> None:
        try:
            await ctx.commit_point()
        except LedgerDown:
            await ctx.commit_point()
        effects.append(1)
        raise ValueError

    fails_once(await app.ledger(), "commit_point", monkeypatch)
    assert error(await app.handle(call("put", key="k")))["data"]["ran"] == "unknown"
    assert error(await app.handle(call("put", key="k")))["code"] == 50910
    assert effects == [1]


async def test_commit_point_that_was_refused_stays_refused(app: App, store: Store) -> None:
    effects: list[int] = []

    @app.command
    async def put(ctx: Context) -> None:
        store.age(RecordId("", "put", "k"), 31)
        for _ in range(3):
            try:
                await ctx.commit_point()
            except Exception:  # a handler that tries everything
                continue
            effects.append(1)
        await ctx.commit_point()

    assert error(await app.handle(call("put", key="k")))["code"] == 40910
    assert effects == []


async def test_commit_points_called_at_once_both_wait_for_the_ledger(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[str]()
    passed = list[bool]()

    @app.command
    async def put(ctx: Context) -> int:
        async def reach() -> None:
            await ctx.commit_point()
            passed.append(bool(written))

        await asyncio.gather(reach(), reach())
        return 1

    ledger = await app.ledger()
    commit_point = ledger.commit_point

    async def slow(*args: Any) -> bool:
        is_written = await commit_point(*args)
        await asyncio.sleep(0)
        written.append("written")
        return is_written

    monkeypatch.setattr(ledger, "commit_point", slow)
    assert result(await app.handle(call("put", key="k"))) == 1
    assert passed == [True, True]


# --- errors that cannot be written ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (DomainError(4020, "no", {"why": object()}), "no"),
        (DomainError(4020, "no", float("nan")), "no"),
        (DomainError(4020, "no \udcff", None), "no ?"),
    ],
)
async def test_error_that_cannot_be_written_is_still_an_error(
    refusal: DomainError, told: str, app: App
) -> None:
    @app.command
    async def put() -> None:
        raise refusal

    assert error(await app.handle(call("put", key="k"))) == {"code": 4020, "message": told}
    assert error(await app.handle(call("put", key="k"))) == {
        "code": 4020,
        "message": told,
        "data": {"replayed": True},
    }


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
async def test_error_that_cannot_be_written_undoes_the_transaction(app: App) -> None:
    @app.command(on_crash="transactional")
    async def put(ctx: Context) -> None:
        made = ctx.db.execute("CREATE TABLE made (n INTEGER)")
        if asyncio.iscoroutine(made):
            await made
        raise DomainError(4020, "no", {"why": object()})

    for key in ("a", "b"):  # the second would find the table of the first
        assert error(await app.handle(call("put", key=key))) == {"code": 4020, "message": "no"}


# --- errors of other servers ----------------------------------------------------------------------

REMOTE = [
    ErrorObject(-32602, "Invalid params"),
    ErrorObject(-32601, "Method not found"),
    ErrorObject(42910, "Busy", {"type": "busy", "ran": "no"}),
    ErrorObject(50310, "The ledger is unavailable", {"type": "ledger_unavailable", "ran": "no"}),
    ErrorObject(40910, "In progress", {"type": "idempotency_key_in_progress", "ran": "unknown"}),
    ErrorObject(
        50910, "Unknown", {"type": "outcome_unknown", "ran": "unknown", "record": "theirs"}
    ),
]


@pytest.mark.parametrize("theirs", REMOTE, ids=lambda theirs: str(theirs.code))
async def test_refusal_of_another_server_says_nothing_about_this_command(
    theirs: ErrorObject, app: App
) -> None:
    """The handler did something, then called a server that refused: "nothing ran" is true there,
    and not here.
    """
    effects: list[int] = []

    @app.command
    async def put() -> None:
        effects.append(1)
        raise remote_error(theirs)

    refused = error(await app.handle(call("put", key="k")))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "unknown"})
    assert error(await app.handle(call("put", key="k")))["data"]["record"] == "put/k"
    assert effects == [1]


async def test_domain_error_of_another_server_is_the_command_s_answer(app: App) -> None:
    @app.command
    async def put() -> None:
        raise remote_error(ErrorObject(4020, "not enough money"))

    await app.handle(call("put", key="k"))
    assert error(await app.handle(call("put", key="k"))) == {
        "code": 4020,
        "message": "not enough money",
        "data": {"replayed": True},
    }


@pytest.mark.parametrize(
    "data",
    [{"ran": "no"}, {"ran": "unknown", "why": 1}, {"ran": "yes"}],
    ids=lambda data: str(data["ran"]),
)
async def test_error_of_another_server_does_not_decide_whether_the_command_ran(
    data: Any, app: App
) -> None:
    """Its `ran` is about the call there. Here, the command's commit point decides."""

    @app.command
    async def put() -> None:
        raise remote_error(ErrorObject(4020, "not enough money", data))

    @app.command(commit_point=True)
    async def ask() -> None:
        raise remote_error(ErrorObject(4020, "not enough money", data))

    for method, ran in (("put", "yes"), ("ask", "no")):
        assert error(await app.handle(call(method, key="k")))["data"] == {**data, "ran": ran}
        assert error(await app.handle(call(method, key="k")))["data"] == {
            **data,
            "ran": ran,
            "replayed": True,
        }


async def test_error_of_another_server_does_not_say_that_an_unrecorded_command_did_nothing(
    app: App,
) -> None:
    @app.command(key="off")
    async def put() -> None:
        raise remote_error(ErrorObject(4020, "not enough money", {"ran": "no"}))

    @app.query
    async def look() -> None:
        raise remote_error(ErrorObject(4020, "not enough money", {"ran": "no"}))

    assert error(await app.handle(call("put")))["data"] == {"ran": "unknown"}
    assert error(await app.handle(call("look")))["data"] == {"ran": "no"}  # a query changes nothing


RESERVED = [-32700, -32600, -32601, -32602, -32603, -32020, -32042]


@pytest.mark.parametrize("code", RESERVED)
async def test_domain_error_with_a_reserved_code_says_that_the_command_ran(
    code: int, app: App
) -> None:
    """The effect is done, regardless of the protocol's meaning of the code.

    The replay says the same.
    """
    effects: list[int] = []

    @app.command
    async def put(ctx: Context) -> None:
        await ctx.commit_point()
        effects.append(1)
        raise DomainError(code, "no room", {"shelf": 3})

    first = error(await app.handle(call("put", key="k")))
    assert first == {"code": code, "message": "no room", "data": {"shelf": 3, "ran": "yes"}}
    again = error(await app.handle(call("put", key="k")))
    assert again["data"] == {"shelf": 3, "ran": "yes", "replayed": True}
    assert effects == [1]


async def test_domain_error_with_a_reserved_code_before_the_commit_point_did_not_run(
    app: App,
) -> None:
    @app.command
    async def put(ctx: Context, early: bool = True) -> None:
        if early:
            raise DomainError(-32602, "no room")
        await ctx.commit_point()

    async with connect(app) as client:
        with pytest.raises(RpcError) as raised:
            await client.call("put")
    assert raised.value.ran == "no"


async def test_domain_error_with_a_reserved_code_keeps_the_ran_that_its_data_states(
    app: App,
) -> None:
    @app.command
    def put() -> None:
        raise DomainError(-32602, "no room", {"ran": "no"})

    assert error(await app.handle(call("put", key="k")))["data"] == {"ran": "no"}


async def test_domain_error_with_a_reserved_code_says_that_an_unrecorded_command_ran(
    app: App,
) -> None:
    @app.command(key="off")
    def put() -> None:
        raise DomainError(-32602, "no room")

    assert error(await app.handle(call("put")))["data"] == {"ran": "yes"}


async def test_domain_error_of_middleware_behind_the_run_says_that_the_command_ran(
    store: Store,
) -> None:
    async def strict(ctx: Context, inner: Next) -> object:
        await inner(ctx)
        raise DomainError(-32602, "no room")

    async with make_app(ledger=store.url, middleware=[strict]) as app:

        @app.command
        def put() -> str:
            return "done"

        assert error(await app.handle(call("put", key="k")))["data"] == {"ran": "yes"}


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
async def test_error_of_another_server_undoes_a_transaction_and_says_so(app: App) -> None:
    @app.command(on_crash="transactional")
    async def put(ctx: Context) -> None:
        raise remote_error(ErrorObject(4020, "not enough money", {"ran": "yes"}))

    for marks in ({}, {"replayed": True}):
        assert error(await app.handle(call("put", key="k")))["data"] == {"ran": "no", **marks}


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
@pytest.mark.parametrize("theirs", REMOTE, ids=lambda theirs: str(theirs.code))
async def test_refusal_of_another_server_undoes_a_transaction(
    theirs: ErrorObject, app: App
) -> None:
    refusals: list[RpcError | None] = [remote_error(theirs), None]

    @app.command(on_crash="transactional")
    async def put(ctx: Context) -> int:
        if refused := refusals.pop(0):
            raise refused
        return 1

    refused = error(await app.handle(call("put", key="k")))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "no"})
    assert result(await app.handle(call("put", key="k"))) == 1


# --- a method that is declared differently later --------------------------------------------------


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
@pytest.mark.parametrize("committed", [True, False])
async def test_transaction_takes_over_the_record_of_a_vanished_holder_of_another_mode(
    committed: bool, app: App, ledger: Ledger, store: Store
) -> None:
    """It used to stay "in progress" for its whole retention, although no run held it."""
    effects: list[int] = []

    @app.command(on_crash="transactional")
    async def put(ctx: Context) -> int:
        effects.append(1)
        return 1

    id = RecordId("", "put", "k")
    await ledger.claim(claim_of(id, fingerprint=fingerprint(UNSET), committed=committed))
    # Its lease has not expired.
    assert error(await app.handle(call("put", key="k")))["code"] == 40910
    store.age(id, LEASE + 1)
    for _ in range(2):
        answer = read(await app.handle(call("put", key="k")))
        assert answer["error"]["code"] == 50910 if committed else answer["result"] == 1
    assert len(effects) == (0 if committed else 1)
    assert await stands(app) is (State.UNKNOWN if committed else State.DONE)


# --- handlers that end their transaction themselves -----------------------------------------------


async def run_sql(db: Any, statement: str) -> Any:
    cursor = db.execute(statement)
    return await cursor if asyncio.iscoroutine(cursor) else cursor


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK"])
async def test_transaction_ended_by_its_handler_is_never_ran_no_if_it_acted(
    statement: str, fails: bool, app: App, store: Store
) -> None:
    """Record and effect are separate then.

    The caller's answer must be true, and nothing may run twice.
    """

    @app.command(on_crash="transactional")
    async def prepare(ctx: Context) -> None:
        await run_sql(ctx.db, "CREATE TABLE IF NOT EXISTS ended (n INTEGER)")
        await run_sql(ctx.db, "DELETE FROM ended")

    @app.command(on_crash="transactional")
    async def put(ctx: Context) -> None:
        await run_sql(ctx.db, "INSERT INTO ended VALUES (1)")
        await run_sql(ctx.db, statement)
        if fails:
            raise ValueError

    @app.command(on_crash="transactional")
    async def count(ctx: Context) -> Any:
        cursor = await run_sql(ctx.db, "SELECT count(*) FROM ended")
        return (await cursor.fetchone() if store.kind == "postgres" else cursor.fetchone())[0]

    result(await app.handle(call("prepare", key="p")))
    ran = [error(await app.handle(call("put", key="k")))["data"]["ran"] for _ in range(2)]
    effects = result(await app.handle(call("count", key="c")))
    assert effects <= 1
    if effects:
        assert "no" not in ran
    if store.kind == "sqlite" or statement == "ROLLBACK":
        assert effects == 0


ENDINGS = {
    "begins another": ["COMMIT", "BEGIN"],
    "writes in another": ["COMMIT", "BEGIN", "INSERT INTO ended VALUES (2)"],
    "chains": ["COMMIT AND CHAIN"],
    "fails in another": ["COMMIT", "BEGIN", "oops"],
    "names it alike": ["COMMIT", "BEGIN", "SAVEPOINT wirecall", "oops"],
    "commits another": ["ROLLBACK", "INSERT INTO ended VALUES (1)", "BEGIN"],
}


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize("leaves", ["raises", "times out"])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_transaction_committed_and_reopened_by_its_handler_is_not_ran_no(
    ending: str, leaves: str, app: App
) -> None:
    """A transaction was open when it failed; the server undid that one, and took it for the
    committed one.
    """
    effects: list[int] = []

    @app.command(on_crash="transactional")
    async def prepare(ctx: Context) -> None:
        await run_sql(ctx.db, "CREATE TABLE IF NOT EXISTS ended (n INTEGER)")
        await run_sql(ctx.db, "DELETE FROM ended")

    @app.command(on_crash="transactional", timeout=None if leaves == "raises" else 0.5)
    async def put(ctx: Context) -> None:
        effects.append(1)
        await run_sql(ctx.db, "INSERT INTO ended VALUES (1)")
        for statement in ENDINGS[ending]:
            try:
                await run_sql(ctx.db, statement)
            except Exception:
                assert statement == "oops"
        if leaves == "times out":
            await asyncio.Event().wait()
        raise ValueError

    @app.command(on_crash="transactional")
    async def count(ctx: Context) -> Any:
        return (await (await run_sql(ctx.db, "SELECT count(*) FROM ended")).fetchone())[0]

    async with asyncio.timeout(30):
        result(await app.handle(call("prepare", key="p")))
        assert error(await app.handle(call("put", key="k")))["data"]["ran"] == "unknown"
        assert result(await app.handle(call("count", key="c"))) == 1
    assert effects == [1]


@pytest.mark.parametrize("store", TRANSACTIONAL, indirect=True)
@pytest.mark.parametrize("statement", ["SELECT 1", "oops"])
async def test_transaction_opened_by_a_handler_that_fails_has_done_nothing(
    statement: str, app: App
) -> None:
    failures = [ValueError()]

    @app.command(on_crash="transactional")
    async def put(ctx: Context) -> int:
        await run_sql(ctx.db, "CREATE TABLE made (n INTEGER)")
        if failures:
            with suppress(Exception):
                await run_sql(ctx.db, statement)
            raise failures.pop()
        await run_sql(ctx.db, "DROP TABLE made")
        return 1

    assert error(await app.handle(call("put", key="k")))["data"]["ran"] == "no"
    assert result(await app.handle(call("put", key="k"))) == 1


# Ways in which a handler can make its transaction impossible to commit although it returns, by
# ledger. SQLite undoes only the statement that failed; and only we commit, so that after a ROLLBACK
# there is nothing.
DEFERRED = [
    "CREATE TABLE owner (n INTEGER PRIMARY KEY)",
    "CREATE TABLE owned (n INTEGER REFERENCES owner (n) DEFERRABLE INITIALLY DEFERRED)",
    "INSERT INTO owned VALUES (7)",
]
SPOILT = [
    ("sqlite", ["ROLLBACK"]),
    ("sqlite", ["COMMIT"]),
    ("sqlite", ["ROLLBACK", "BEGIN"]),
    ("sqlite", DEFERRED),
    ("postgres", ["oops"]),
    ("postgres", ["SAVEPOINT mine", "oops"]),
    ("postgres", DEFERRED),
]


@pytest.mark.parametrize(("store", "statements"), SPOILT, indirect=["store"])
async def test_transaction_that_cannot_be_committed_is_ran_no(
    statements: list[str], app: App
) -> None:
    """The caller used to receive "unknown", although all of it was certainly undone."""
    spoils = [statements]

    @app.command(on_crash="transactional")
    async def put(ctx: Context) -> int:
        await run_sql(ctx.db, "CREATE TABLE made (n INTEGER)")
        for statement in spoils.pop() if spoils else ["DROP TABLE made"]:
            with suppress(Exception):
                await run_sql(ctx.db, statement)
        return 1

    refused = error(await app.handle(call("put", key="k")))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "no"})
    assert await stands(app) is None
    assert result(await app.handle(call("put", key="k"))) == 1


@pytest.mark.parametrize("store", ["postgres"], indirect=True)
@pytest.mark.parametrize(
    "statements",
    [["COMMIT", "BEGIN", "oops"], ["ROLLBACK", "INSERT INTO ended VALUES (1)", "BEGIN", "oops"]],
)
async def test_transaction_committed_by_its_handler_is_not_ran_no(
    statements: list[str], app: App
) -> None:
    @app.command(on_crash="transactional")
    async def prepare(ctx: Context) -> None:
        await run_sql(ctx.db, "CREATE TABLE IF NOT EXISTS ended (n INTEGER)")

    @app.command(on_crash="transactional")
    async def put(ctx: Context) -> None:
        await run_sql(ctx.db, "INSERT INTO ended VALUES (1)")
        for statement in statements:
            with suppress(Exception):
                await run_sql(ctx.db, statement)

    result(await app.handle(call("prepare", key="p")))
    assert error(await app.handle(call("put", key="k")))["data"]["ran"] == "unknown"


# --- handlers that cancel themselves --------------------------------------------------------------


async def test_cancellation_that_a_handler_leaves_pending_does_not_lose_an_outcome(
    app: App,
) -> None:
    """`asyncio.timeout` of Python 3.11 does so if it fires in the same turn in which its block
    ends.
    """
    effects: list[int] = []

    @app.command
    async def put() -> int:
        effects.append(1)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return 1

    async with asyncio.timeout(10):
        assert result(await app.handle(call("put", key="k"))) == 1
        assert result(await app.handle(call("put", key="k"))) == 1
    assert effects == [1]
    assert await stands(app) is State.DONE


@pytest.mark.parametrize("waits", [True, False])
async def test_handler_that_cancels_itself_is_an_unexpected_error(waits: bool, app: App) -> None:
    @app.command
    async def put() -> None:
        task = asyncio.current_task()
        assert task is not None
        if waits:
            task.cancel()
            await asyncio.sleep(10)
        raise asyncio.CancelledError

    async with asyncio.timeout(10):
        refused = error(await app.handle(call("put", key="k")))
    assert (refused["code"], refused["data"]) == (-32603, {"ran": "unknown"})
    assert error(await app.handle(call("put", key="k")))["code"] == 50910
