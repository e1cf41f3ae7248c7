"""Providers: values that handlers take by type."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, NewType, cast

import pytest

from tests.calls import batch, call, error, make_app, read, result
from wirecall import App, Context, DomainError, Done, UsageError, connect
from wirecall.protocol.params import place_of

PATIENCE = 60.0


class Db:
    def __init__(self, name: str = "db") -> None:
        self.name = name


@dataclass
class User:
    name: str


Token = NewType("Token", str)


class Log(list[str]):
    """The providers and handlers of an app, in the order in which they run."""

    def app(self, **options: Any) -> App:
        app = make_app(**options)

        @app.provide
        async def connection() -> AsyncIterator[Db]:
            self.append("open")
            try:
                yield Db()
            except BaseException as error:
                self.append(f"failed {type(error).__name__}")
                raise
            finally:
                self.append("close")

        @app.provide
        def user(ctx: Context, db: Db) -> Iterator[User]:
            self.append("user")
            yield User(f"{ctx.caller or 'anonymous'} of {db.name}")
            self.append("user left")

        return app


async def test_values_are_made_once_per_call_and_cleaned_up_in_reverse() -> None:
    log = Log()
    app = log.app()

    @app.query
    async def who(user: User, db: Db, again: Db) -> list[Any]:
        log.append("handler")
        await asyncio.sleep(0)
        return [user.name, db is again]

    assert result(await app.handle(call("who"), caller="ada")) == ["ada of db", True]
    assert log == ["open", "user", "handler", "user left", "close"]


async def test_providers_and_parameters_of_every_kind() -> None:
    app = make_app()

    @app.provide
    def plain() -> Db:
        return Db("plain")

    @app.provide
    async def waits(db: Db) -> User:
        await asyncio.sleep(0)
        return User(db.name)

    @app.provide
    def token(ctx: Context, length: int = 100) -> Token:
        return Token(ctx.method[:length])

    @app.query
    def positional(a: int, db: Db, b: int = 2, *rest: int) -> list[Any]:
        return [a, db.name, b, *rest]

    @app.query
    def named(
        a: int,
        *,
        user: User,
        ctx: Context,
        db: Annotated[Db, "of the shop"],
        token: Token,
        **more: int,
    ) -> list[Any]:
        return [a, user.name, ctx.method, db.name, token, more]

    @app.query
    def optional(db: Db | None = None) -> str:
        assert db is not None
        return db.name

    for params in ([1], {"a": 1}):
        assert result(await app.handle(call("positional", params))) == [1, "plain", 2]
    assert result(await app.handle(call("positional", [1, 3, 4, 5]))) == [1, "plain", 3, 4, 5]
    assert result(await app.handle(call("named", {"a": 1, "x": 2}))) == [
        1,
        "plain",
        "named",
        "plain",
        "named",
        {"x": 2},
    ]
    assert result(app.handle_sync(call("optional"))) == "plain"


async def test_caller_cannot_see_or_set_what_is_provided() -> None:
    app = Log().app()

    @app.query
    def who(n: int, user: User) -> str:
        return user.name

    @app.query
    def open_ended(user: User, **more: Any) -> str:
        return user.name

    described = result(await app.handle(call("rpc.discover")))
    [who_described] = [method for method in described["methods"] if method["name"] == "who"]
    assert [param["name"] for param in who_described["params"]] == ["n"]
    for method, params in (
        ("who", {"n": 1, "user": {"name": "root"}}),
        ("open_ended", {"user": {"name": "root"}}),
    ):
        refused = error(await app.handle(call(method, params)))
        assert (refused["code"], refused["data"]["reason"]) == (-32602, "params.user: unknown name")
    assert error(await app.handle(call("who", [1, {"name": "root"}])))["code"] == -32602


async def test_params_that_do_not_fit_make_no_value() -> None:
    log = Log()
    app = log.app()
    app.query(name="who")(takes_db)
    assert error(await app.handle(call("who", {"n": "x"})))["code"] == -32602
    assert log == []


def takes_db(n: int, db: Db) -> str:
    return db.name


async def test_entries_of_a_batch_have_their_own_values() -> None:
    app = make_app()
    made = list[Db]()

    @app.provide
    def db() -> Db:
        made.append(Db(str(len(made))))
        return made[-1]

    app.query(name="who")(takes_db)
    answers = read(await app.handle(batch(*(call("who", [i], id=i) for i in range(3)))))
    assert [answer["result"] for answer in answers] == ["0", "1", "2"]


async def test_clean_up_after_an_error_and_after_a_cancel() -> None:
    log = Log()
    app = log.app()
    begun = asyncio.Event()

    @app.query
    async def fails(db: Db) -> None:
        raise DomainError(4040, "no such article")

    @app.query
    async def waits(db: Db) -> None:
        begun.set()
        await asyncio.Event().wait()

    assert error(await app.handle(call("fails"))) == {"code": 4040, "message": "no such article"}
    assert log == ["open", "failed DomainError", "close"]
    log.clear()
    async with asyncio.timeout(PATIENCE):
        task = asyncio.create_task(app.handle(call("waits")))
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})
    assert log == ["open", "failed CancelledError", "close"]


async def test_provider_cannot_turn_an_error_into_a_result() -> None:
    app = make_app()

    @app.provide
    def db() -> Iterator[Db]:
        with suppress(DomainError):
            yield Db()

    @app.query
    def fails(db: Db) -> None:
        raise DomainError(4040, "no such article")

    assert error(await app.handle(call("fails")))["code"] == 4040


async def test_provider_cannot_hide_the_error_of_the_next_one() -> None:
    app = make_app()

    @app.provide
    def db() -> Iterator[Db]:
        with suppress(DomainError):
            yield Db()

    @app.provide
    def user(db: Db) -> User:
        raise DomainError(4010, "no such user")

    @app.query
    def who(user: User) -> str:
        return user.name

    assert error(await app.handle(call("who")))["code"] == 4010


async def test_value_that_a_thread_makes_for_a_call_that_was_cancelled_is_cleaned_up() -> None:
    app = make_app()
    log = list[str]()
    begun = threading.Event()
    go = threading.Event()

    @app.provide(blocking=True)
    def db() -> Iterator[Db]:
        begun.set()
        assert go.wait(PATIENCE)
        log.append("open")
        yield Db()
        log.append("close")

    app.query(name="who")(takes_db)
    async with asyncio.timeout(PATIENCE):
        task = asyncio.create_task(app.handle(call("who", [1])))
        await asyncio.to_thread(begun.wait)
        task.cancel()
        go.set()
        await asyncio.wait({task})
    assert task.cancelled()
    assert log == ["open", "close"]


def test_values_that_need_an_event_loop_are_refused_without_one() -> None:
    app = make_app()
    log = list[str]()

    @app.provide
    async def db() -> AsyncIterator[Db]:
        try:
            yield Db()
        finally:
            log.append("close")

    @app.provide
    async def user() -> User:
        await asyncio.sleep(0)
        return User("ada")

    @app.query
    async def waits(db: Db) -> None:
        await asyncio.sleep(0)

    @app.query
    async def who(db: Db, user: User) -> str:
        return user.name

    app.query(name="quick")(takes_db)
    assert result(app.handle_sync(call("quick", [1]))) == "db"
    for method in ("waits", "who"):
        with pytest.raises(UsageError, match="tried to wait"):
            app.handle_sync(call(method))
    assert log == ["close"] * 3


async def test_blocking_providers_run_in_threads() -> None:
    app = make_app()
    threads = list[bool]()
    here = threading.get_ident()

    @app.provide(blocking=True)
    def db() -> Iterator[Db]:
        threads.append(threading.get_ident() != here)
        yield Db()
        threads.append(threading.get_ident() != here)

    @app.provide(blocking=True)
    def user() -> User:
        threads.append(threading.get_ident() != here)
        return User("ada")

    @app.query(blocking=True)
    def who(db: Db, user: User) -> str:
        threads.append(threading.get_ident() != here)
        return user.name + db.name

    assert result(await app.handle(call("who"))) == "adadb"
    assert threads == [True] * 4


async def test_tools_resources_and_prompts() -> None:
    log = Log()
    app = log.app()

    @app.tool
    def tool(db: Db) -> str:
        return db.name

    @app.resource("shop://{item}")
    async def item(item: str, user: User) -> str:
        return f"{item} for {user.name}"

    @app.prompt
    def ask(topic: str, db: Db) -> str:
        return f"{topic} in {db.name}"

    async with connect(app, protocol="mcp") as client:
        [described] = await client.list_tools()
        assert described.input_schema["properties"] == {}
        assert (await client.call_tool("tool")).text == "db"
        assert "tea for anonymous of db" in str(await client.read_resource("shop://tea"))
        [prompt] = await client.list_prompts()
        assert [argument.name for argument in prompt.arguments] == ["topic"]
        assert "tea in db" in str(await client.get_prompt("ask", {"topic": "tea"}))
    assert log.count("open") == log.count("close") == 3


# --- commands -------------------------------------------------------------------------------------


def plain_db() -> Db:
    return Db()


def db_of_caller(ctx: Context) -> Db:
    return Db(ctx.caller)


async def db_from_afar() -> Db:
    return Db()


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("provider", [plain_db, db_of_caller, db_from_afar])
async def test_wrong_result_is_reported_however_the_values_are_made(
    provider: Callable[..., object], blocking: bool
) -> None:
    app = App("test", mode="development", ledger="memory:")
    app.provide(provider)

    @app.query(blocking=blocking)
    def count(n: int, db: Db) -> int:
        return cast(int, f"{n}")

    async with app:
        reason = error(await app.handle(call("count", {"n": 5})))["data"]["reason"]
    assert reason == "count must return int: result: expected int, got str"


async def test_replay_makes_no_value_and_the_clean_up_comes_before_the_record() -> None:
    log = Log()
    app = log.app()

    @app.command
    async def put(db: Db) -> str:
        log.append("handler")
        return db.name

    for _ in range(2):
        assert result(await app.handle(call("put", key="k"))) == "db"
    assert log == ["open", "handler", "close"]


@pytest.mark.parametrize("on_crash", ["unknown", "rerun"])
async def test_provider_that_raises_has_run_nothing_and_a_retry_runs(on_crash: Any) -> None:
    app = make_app()
    effects = list[str]()
    failures: list[Exception] = [
        DomainError(5031, "no connection is free"),
        ValueError("the pool is broken"),
    ]

    @app.provide
    async def db() -> Db:
        if failures:
            raise failures.pop(0)
        return Db()

    @app.command(on_crash=on_crash)
    def put(db: Db) -> str:
        effects.append(db.name)
        return "done"

    refused = error(await app.handle(call("put", key="k")))
    assert (refused["code"], refused["message"], refused["data"]) == (
        5031,
        "no connection is free",
        {"ran": "no"},
    )
    broken = error(await app.handle(call("put", key="k")))
    assert (broken["code"], broken["data"]["ran"]) == (-32603, "no")
    assert effects == []
    assert result(await app.handle(call("put", key="k"))) == "done"
    assert result(await app.handle(call("put", key="k"))) == "done"
    assert effects == ["db"]


async def test_command_that_is_cancelled_while_a_value_is_made_has_run_nothing() -> None:
    app = make_app()
    effects = list[str]()
    begun = asyncio.Event()
    go = asyncio.Event()
    held = list[str]()

    @app.provide
    async def db() -> AsyncIterator[Db]:
        begun.set()
        try:
            await go.wait()
            yield Db()
        finally:
            held.append("left")

    @app.command(timeout=600)
    async def put(db: Db) -> str:
        effects.append(db.name)
        return "done"

    async with asyncio.timeout(PATIENCE):
        task = asyncio.create_task(app.handle(call("put", key="k")))
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert (effects, held) == ([], ["left"])
        go.set()
        assert result(await app.handle(call("put", key="k"))) == "done"
    assert effects == ["db"]


async def test_handler_that_fails_after_its_values_were_made_has_an_unknown_outcome() -> None:
    log = Log()
    app = log.app()

    @app.command
    async def put(db: Db) -> None:
        raise ValueError("in the middle")

    failed = error(await app.handle(call("put", key="k")))
    assert (failed["code"], failed["data"]["ran"]) == (-32603, "unknown")
    assert log == ["open", "failed ValueError", "close"]
    assert error(await app.handle(call("put", key="k")))["data"]["type"] == "outcome_unknown"


async def test_clean_up_that_fails_is_a_failure_of_the_handler() -> None:
    app = make_app()

    @app.provide
    def db() -> Iterator[Db]:
        yield Db()
        raise ConnectionError("the commit failed")

    @app.command
    def put(db: Db) -> str:
        return "done"

    failed = error(await app.handle(call("put", key="k")))
    assert (failed["code"], failed["data"]["ran"]) == (-32603, "unknown")


async def test_commit_points_and_reconcile_functions_work_with_values() -> None:
    app = make_app()
    log = list[str]()

    @app.provide
    async def db() -> Db:
        return Db()

    async def look(n: int, db: Db) -> Done:
        log.append(f"look into {db.name}")
        return Done("found")

    @app.command(on_crash="reconcile", reconcile=look)
    async def put(n: int, db: Db, ctx: Context) -> str:
        await ctx.commit_point()
        log.append("acted")
        raise ValueError("and failed")

    assert error(await app.handle(call("put", {"n": 1}, key="k")))["data"]["ran"] == "unknown"
    assert result(await app.handle(call("put", {"n": 1}, key="k"))) == "found"
    assert log == ["acted", "look into db"]


async def test_reconcile_function_that_blocks_runs_in_a_thread() -> None:
    app = make_app()
    threads = list[bool]()
    here = threading.get_ident()

    @app.provide
    async def db() -> Db:
        return Db()

    def look(db: Db) -> Done:
        threads.append(threading.get_ident() != here)
        return Done("found")

    @app.command(on_crash="reconcile", reconcile=look, blocking=True)
    def put(db: Db) -> str:
        threads.append(threading.get_ident() != here)
        raise ValueError("and failed")

    await app.handle(call("put", key="k"))
    assert result(await app.handle(call("put", key="k"))) == "found"
    assert threads == [True, True]


def test_commands_without_an_event_loop() -> None:
    app = make_app()

    @app.provide
    def db() -> Iterator[Db]:
        yield Db()

    @app.command
    def put(db: Db) -> str:
        return db.name

    assert result(app.handle_sync(call("put", key="k"))) == "db"


async def test_transaction_is_open_before_the_values_are_made(tmp_path: Any) -> None:
    app = make_app(ledger=f"sqlite:{tmp_path / 'ledger.db'}")

    @app.provide
    def db(ctx: Context) -> Iterator[Db]:
        ctx.db.execute("CREATE TABLE IF NOT EXISTS log (line TEXT)")
        ctx.db.execute("INSERT INTO log VALUES ('begin')")
        yield Db()
        ctx.db.execute("INSERT INTO log VALUES ('end')")

    @app.command(on_crash="transactional")
    def put(fail: bool, db: Db, ctx: Context) -> list[str]:
        if fail:
            raise DomainError(4040, "no")
        return [line for (line,) in ctx.db.execute("SELECT line FROM log")]

    async with app:
        assert error(await app.handle(call("put", {"fail": True}, key="a")))["code"] == 4040
        assert result(await app.handle(call("put", {"fail": False}, key="b"))) == ["begin"]
        assert result(await app.handle(call("put", {"fail": False}, key="c"))) == [
            "begin",
            "end",
            "begin",
        ]


# --- mistakes -------------------------------------------------------------------------------------


def needs_user(user: User) -> Db:
    return Db(user.name)


def needs_db(db: Db) -> User:
    return User(db.name)


async def in_handle(app: App) -> None:
    await app.handle(call("rpc.discover"))


async def in_enter(app: App) -> None:
    async with app:
        raise AssertionError("it was entered")


async def in_connect(app: App) -> None:
    async with connect(app, protocol="mcp"):
        raise AssertionError("it was entered")


@pytest.mark.parametrize("start", [in_handle, in_enter, in_connect])
async def test_unknown_and_a_circular_provider_are_errors_when_the_app_starts(
    start: Callable[[App], Any],
) -> None:
    app = make_app()
    app.provide(needs_user)
    with pytest.raises(UsageError) as unknown:
        await start(app)
    assert "User is not provided" in str(unknown.value)
    assert f"needs_user ({place_of(needs_user)}) -> the parameter user" in str(unknown.value)
    app.provide(needs_db)
    with pytest.raises(UsageError) as circular:
        await start(app)
    chain = [
        f"{function.__name__} ({place_of(function)})"
        for function in (needs_user, needs_db, needs_user)
    ]
    assert " -> ".join(chain) in str(circular.value)


def test_providers_of_one_type_and_late_providers_are_refused() -> None:
    app = make_app()
    app.provide(needs_user)
    app.provide(needs_user)  # the same one again changes nothing

    def another() -> Db:
        return Db()

    with pytest.raises(UsageError) as twice:
        app.provide(another)
    assert place_of(another) in str(twice.value)
    assert place_of(needs_user) in str(twice.value)

    @app.query
    def greet(user: User) -> str:
        return user.name

    with pytest.raises(UsageError, match="register the provider before"):
        app.provide(needs_db)


def text() -> str:
    return "x"


def maybe() -> Db | None:
    return None


async def gives_text() -> AsyncIterator[str]:
    yield "x"


def texts() -> list[str]:
    return []


@pytest.mark.parametrize("function", [lambda: Db(), text, maybe, gives_text, texts])
def test_provider_of_a_type_that_is_not_distinct_is_refused(
    function: Callable[..., object],
) -> None:
    with pytest.raises(UsageError, match="not its own type"):
        make_app().provide(function)


def test_blocking_is_for_plain_functions() -> None:
    async def db() -> Db:
        return Db()

    with pytest.raises(UsageError, match="coroutine function"):
        make_app().provide(blocking=True)(db)


async def test_method_that_is_registered_while_the_app_serves() -> None:
    app = Log().app()
    async with app:
        await app.handle(call("rpc.discover"))
        app.query(name="late")(takes_db)
        assert result(await app.handle(call("late", [1]))) == "db"
