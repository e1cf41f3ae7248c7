"""Mounted apps: names, lifespans, middleware, providers, one ledger, tasks, and what is refused."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from tests.calls import batch, call, error, make_app, read, result
from wirecall import App, Context, DomainError, Done, Router, UsageError, connect, testing
from wirecall.errors import StartFailed
from wirecall.ledger.base import Claim, RecordId
from wirecall.middleware import RateLimit
from wirecall.protocol.sender import ANONYMOUS
from wirecall.server.policy import fingerprint

Lifespan = Callable[[App], AbstractAsyncContextManager[object]]


def living(log: list[str], name: str, fails: str = "") -> Lifespan:
    """Return a lifespan that notes its steps, and fails in one of them."""

    @asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[str]:
        log.append(f"enter {name}")
        if fails == "enter":
            raise RuntimeError("no room")
        yield f"state of {name} in {app.name}"
        log.append(f"leave {name}")
        if fails == "leave":
            raise RuntimeError("lost the key")

    return lifespan


def closing(log: list[str], name: str) -> Lifespan:
    """Return a lifespan that notes its end, whatever the reason."""

    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[None]:
        try:
            yield
        finally:
            log.append(f"close {name}")

    return lifespan


def noting(log: list[Any], name: str) -> Any:
    async def layer(context: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        log.append((name, context.method, context.state))
        return await call_next(context)

    return layer


def guest(name: str, **options: Any) -> App:
    """Return an app with one query, which returns its state."""
    app = App(name, mode="development", **options)

    @app.query
    def state(ctx: Context) -> str:
        return str(ctx.state)

    return app


class Room:
    def __init__(self, number: int) -> None:
        self.number = number


def make_stays(**options: Any) -> App:
    stays = App("stays", mode="development", **options)
    stays.booked = []  # type: ignore[attr-defined]

    @stays.provide
    def room() -> Room:
        return Room(7)

    @stays.query
    def search(city: str, room: Room) -> str:
        """Find a stay."""
        return f"{city} {room.number}"

    @stays.query
    def nights(count: int) -> int:
        return count

    @stays.command(destructive=False)
    def book(city: str, ctx: Context) -> list[Any]:
        stays.booked.append(city)  # type: ignore[attr-defined]
        return [ctx.method, ctx.record, ctx.state]

    @stays.tool(task=True)
    async def inspect(city: str) -> str:
        return f"inspected {city}"

    @stays.resource("stays://{city}")
    def page(city: str) -> str:
        return f"stays in {city}"

    @stays.prompt
    def plan(city: str) -> str:
        return f"plan {city}"

    @stays.completion("plan", "city")
    def cities(typed: str) -> list[str]:
        return [f"{typed}nn"]

    return stays


def travel(stays: App, **options: Any) -> App:
    app = App("travel", **{"mode": "development", "ledger": "memory:", **options})
    app.mount("stays", stays)
    return app


# --- names ----------------------------------------------------------------------------------------


async def test_mounted_methods_have_the_prefix_over_json_rpc() -> None:
    async with connect(travel(make_stays())) as client:
        assert await client.call("stays.search", {"city": "Bonn"}) == "Bonn 7"
        assert await client.call("stays.nights", [3]) == 3
        found = await client.call("rpc.discover")
    names = [method["name"] for method in found["methods"]]
    assert names == ["stays.search", "stays.nights", "stays.book"]


async def test_mounted_tools_prompts_and_resources_answer_over_mcp() -> None:
    async with testing.client(travel(make_stays()), protocol="mcp") as client:
        tools = [tool.name for tool in await client.list_tools()]
        searched = await client.call_tool("stays_search", {"city": "Bonn"})
        inspected = await client.call_tool("stays_inspect", {"city": "Bonn"})
        page = await client.read_resource("stays://bonn")
        plan = await client.get_prompt("stays.plan", {"city": "Bonn"})
        words = await client.complete("stays.plan", "city", "Bo")
    assert tools == ["stays_search", "stays_nights", "stays_book", "stays_inspect"]
    assert searched.text == "Bonn 7"
    assert inspected.text == "inspected Bonn"
    assert "stays in bonn" in repr(page)
    assert "plan Bonn" in repr(plan)
    assert "Bonn" in repr(words)


async def test_mounted_tool_becomes_a_task_of_the_outer_app() -> None:
    async with testing.client(travel(make_stays()), protocol="mcp") as client:
        task = await client.start_tool("stays_inspect", {"city": "Bonn"})
        assert (await task.result()).text == "inspected Bonn"


async def test_mounted_tools_are_in_the_batch_tool() -> None:
    app = travel(make_stays(), batch_tool="queries")
    async with testing.client(app, protocol="mcp") as client:
        tools = {tool.name: tool for tool in await client.list_tools()}
        assert "stays_search" in str(tools["batch"].input_schema)
        answer = await client.call_tool(
            "batch",
            {"calls": [{"id": "a", "tool": "stays_search", "arguments": {"city": "Bonn"}}]},
        )
    assert "Bonn 7" in str(answer.structured)


async def test_mounted_app_is_still_served_alone() -> None:
    stays = make_stays()
    travel(stays)
    async with connect(stays) as client:
        assert await client.call("search", {"city": "Bonn"}) == "Bonn 7"


async def test_apps_mounted_in_mounted_apps_join_their_names() -> None:
    log: list[Any] = []
    stays = make_stays(lifespan=living(log, "stays"), middleware=[noting(log, "stays")])
    region = make_app(lifespan=living(log, "region"), middleware=[noting(log, "region")])
    region.mount("stays", stays)
    app = make_app(middleware=[noting(log, "outer")])
    app.mount("eu", region)
    async with connect(app) as client:
        named = await client.call("eu.stays.book", {"city": "Bonn"})
    assert named == ["book", "eu.stays.book", "state of stays in stays"]
    assert log[:2] == ["enter region", "enter stays"]
    assert log[3:5] == [
        ("region", "stays.book", "state of region in test"),
        ("stays", "book", "state of stays in stays"),
    ]
    assert log[2][:2] == ("outer", "eu.stays.book")
    assert log[5:] == ["leave stays", "leave region"]


# --- lifespans ------------------------------------------------------------------------------------


async def test_lifespans_are_entered_in_order_and_left_in_reverse() -> None:
    log: list[str] = []
    app = make_app(lifespan=living(log, "outer"))
    for name in ("a", "b"):
        app.mount(name, guest(name, lifespan=living(log, name)))
    async with app:
        assert log == ["enter outer", "enter a", "enter b"]
        assert result(await app.handle(call("b.state"))) == "state of b in b"
    assert log[3:] == ["leave b", "leave a", "leave outer"]


async def test_lifespan_that_fails_leaves_those_entered_before_and_names_its_app() -> None:
    log: list[str] = []
    app = make_app(lifespan=living(log, "outer"))
    app.mount("a", guest("a", lifespan=closing(log, "a")))
    app.mount("b", guest("b", lifespan=living(log, "b", fails="enter")))
    with pytest.raises(StartFailed, match=r"RuntimeError: no room .*mounted app 'b'"):
        await app.handle(call("a.state"))
    await app.aclose()
    assert log == ["enter outer", "enter b", "close a"]


async def test_lifespan_that_fails_at_its_end_does_not_keep_the_others_open() -> None:
    log: list[str] = []
    app = make_app(lifespan=closing(log, "outer"))
    app.mount("a", guest("a", lifespan=living(log, "a")))
    app.mount("b", guest("b", lifespan=living(log, "b", fails="leave")))
    app.mount("c", guest("c", lifespan=closing(log, "c")))
    async with app:
        log.clear()
    # The exception of `b` closes `a`, whose code after the `yield` does not run.
    assert log == ["close c", "leave b", "close outer"]


async def test_state_of_an_app_without_a_lifespan_stays_its_values() -> None:
    app = make_app(lifespan=living([], "outer"))
    app.mount("stays", make_stays())

    @app.query
    def own(ctx: Context) -> str:
        return str(ctx.state)

    async with connect(app) as client:
        assert (await client.call("stays.book", {"city": "Bonn"}))[2] == {}
        assert await client.call("own") == "state of outer in test"


async def test_reconcile_function_of_a_mounted_command_sees_its_own_state() -> None:
    seen: list[Any] = []

    def found(city: str, ctx: Context) -> Done:
        seen.append((ctx.method, ctx.state))
        return Done("was booked")

    stays = App("stays", mode="development", lifespan=living([], "stays"))

    @stays.command(on_crash="reconcile", reconcile=found)
    async def book(city: str) -> str:
        raise AssertionError("the command must not run again")

    app = make_app()
    app.mount("stays", stays)
    message = call("stays.book", {"city": "Bonn"}, key="k")
    params = Raw(b'{"city":"Bonn"}')
    async with app:
        vanished = Claim(
            id=RecordId(ANONYMOUS, "stays.book", "k"),
            fingerprint=fingerprint(params),
            nonce=b"gone",
            lease=1e-9,
            retention=60,
            on_crash="reconcile",
        )
        await (await app.ledger()).claim(vanished)
        got = result(await app.handle(message))
    assert got == "was booked"
    assert seen == [("book", "state of stays in stays")]


# --- middleware -----------------------------------------------------------------------------------


async def test_middleware_of_a_mounted_app_surrounds_its_methods_alone() -> None:
    log: list[Any] = []
    app = make_app()

    @app.query
    def own() -> int:
        return 1

    app.mount("stays", make_stays(middleware=[noting(log, "stays")]))
    reply = read(await app.handle(batch(call("own"), call("stays.nights", [3], id=2))))
    assert [each["result"] for each in reply] == [1, 3]
    assert log == [("stays", "nights", {})]


async def test_middleware_counts_mounted_methods_by_their_own_names() -> None:
    limit = RateLimit(2, per=3600, cost={"search": 2, "nights": 0.1}, key=lambda _: "all")
    app = travel(make_stays(middleware=[limit]))
    searched = call("stays.search", ["Bonn"])
    assert result(await app.handle(searched)) == "Bonn 7"
    assert error(await app.handle(searched))["code"] == 42910
    assert error(await app.handle(call("stays.nights", [3])))["code"] == 42910


async def test_middleware_that_replaces_a_result_of_a_mounted_method() -> None:
    async def louder(context: Context, call_next: Any) -> Any:
        await call_next(context)
        return "loud"

    app = travel(make_stays(middleware=[louder]))
    assert result(await app.handle(call("stays.nights", [3]))) == "loud"
    async with testing.client(app, protocol="mcp") as client:
        assert (await client.call_tool("stays_nights", {"count": 3})).text == "loud"


# --- the ledger -----------------------------------------------------------------------------------


async def test_commands_of_all_apps_share_the_ledger_of_the_outer_one(tmp_path: Path) -> None:
    stays = make_stays()
    url = f"sqlite:{tmp_path / 'ledger.db'}"
    app = travel(stays, ledger=url)
    async with app:
        for _ in range(2):
            result(await app.handle(call("stays.book", {"city": "Bonn"}, key="k")))
        assert stays.booked == ["Bonn"]  # type: ignore[attr-defined]
        assert await stays.ledger() is await app.ledger()
        records = await (await app.ledger()).list()
    assert [record.id.method for record in records] == ["stays.book"]


async def test_mounted_app_with_the_same_ledger_is_taken(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'ledger.db'}"
    app = travel(make_stays(ledger=url), ledger=url)
    async with connect(app) as client:
        await client.call("stays.book", {"city": "Bonn"})


def test_second_ledger_is_refused_with_both_names_and_without_passwords() -> None:
    stays = make_stays(ledger="postgresql://me:secret@db/stays")
    with pytest.raises(UsageError) as refused:
        travel(stays, ledger="sqlite:travel.db")
    assert "postgresql://me:***@db/stays" in str(refused.value)
    assert "sqlite:travel.db" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_transactional_command_needs_the_outer_ledger_to_have_transactions() -> None:
    stays = App("stays", mode="production")  # its ledger is SQLite by default

    @stays.command(on_crash="transactional")
    def book(city: str, ctx: Context) -> None:
        ctx.db.execute("SELECT 1")

    with pytest.raises(UsageError, match="ledger is memory"):
        travel(stays, mode="production")


async def test_error_of_a_mounted_command_is_recorded_and_replayed() -> None:
    stays = App("stays", mode="development")
    ran: list[str] = []

    @stays.command
    def book(city: str) -> None:
        ran.append(city)
        raise DomainError(4020, "full")

    app = travel(stays)
    for _ in range(2):
        refused = error(await app.handle(call("stays.book", {"city": "Bonn"}, key="k")))
        assert refused["code"] == 4020
    assert ran == ["Bonn"]


# --- changes --------------------------------------------------------------------------------------


async def test_mounted_app_notifies_the_clients_of_the_outer_one() -> None:
    stays = make_stays()
    async with (
        testing.client(travel(stays), protocol="mcp") as client,
        client.listen(uris=["stays://bonn"]) as changes,
        asyncio.timeout(60),
    ):
        stays.updated("stays://bonn")
        change = await anext(aiter(changes))
    assert "stays://bonn" in repr(change)


async def test_mounted_method_is_removed_from_the_outer_app() -> None:
    app = travel(make_stays())
    assert result(await app.handle(call("stays.nights", [3]))) == 3
    app.remove("stays.nights")
    assert error(await app.handle(call("stays.nights", [3])))["code"] == -32601


# --- what is refused ------------------------------------------------------------------------------


def test_mount_under_a_taken_name_is_refused() -> None:
    app = travel(make_stays())
    with pytest.raises(UsageError, match="'stays' is mounted under this name"):
        app.mount("stays", make_stays())


def test_mount_of_a_method_that_exists_names_both_places() -> None:
    app = make_app()

    @app.query(name="stays.search")
    def own() -> None: ...

    with pytest.raises(UsageError, match=r"stays\.search.*test_mounting\.py.*test_mounting\.py"):
        app.mount("stays", make_stays())


def test_mount_of_a_resource_that_exists_is_refused() -> None:
    app = make_app()
    app.mount("a", make_stays())
    with pytest.raises(UsageError, match=r"resource 'stays://\{city\}' exists already"):
        app.mount("b", make_stays())


def test_mount_in_a_circle_is_refused() -> None:
    a = make_app()
    b = App("b", mode="development")
    with pytest.raises(UsageError, match="'test' contains 'test'"):
        a.mount("a", a)
    a.mount("b", b)
    with pytest.raises(UsageError, match="'test' contains 'b'"):
        b.mount("a", a)


def test_mount_of_one_app_twice_is_refused() -> None:
    stays = App("stays", mode="development")
    region = App("region", mode="development")
    region.mount("stays", stays)
    app = make_app()
    app.mount("stays", stays)
    for other in (stays, region):
        with pytest.raises(UsageError, match="a lifespan is entered once"):
            app.mount("again", other)


async def test_mount_after_the_start_is_refused() -> None:
    living_app = make_app(lifespan=living([], "outer"))
    async with living_app:
        with pytest.raises(UsageError, match="it is serving already"):
            living_app.mount("stays", make_stays())
    serving = make_app()
    await serving.handle(call("x"))
    with pytest.raises(UsageError, match="it is serving already"):
        serving.mount("stays", make_stays())


def test_declaration_after_the_mount_is_refused() -> None:
    stays = make_stays()
    travel(stays)
    router = Router()

    @router.query
    def late() -> None: ...

    def free() -> Room:
        return Room(1)

    for declare in (
        lambda: stays.query(late),
        lambda: stays.tool(name="x")(late),
        lambda: stays.resource("stays://late")(late),
        lambda: stays.prompt(late),
        lambda: stays.provide(free),
        lambda: stays.include(router),
        lambda: stays.middleware(noting([], "late")),
        lambda: stays.remove("nights"),
        lambda: stays.mount("more", App("more", mode="development")),
    ):
        with pytest.raises(UsageError, match="'stays' is mounted in 'travel' already"):
            declare()


@pytest.mark.parametrize("name", ["", "a b", ".a", "a.", "a/b", 7, None])
def test_mount_needs_a_name(name: Any) -> None:
    with pytest.raises(UsageError, match=r"mount\(\) takes a name"):
        make_app().mount(name, make_stays())


def test_mount_under_a_reserved_or_too_long_name_is_refused() -> None:
    with pytest.raises(UsageError, match=r'"rpc\." belong to the protocol'):
        make_app().mount("rpc", make_stays())
    with pytest.raises(UsageError, match="characters, and a tool's may have 64"):
        make_app().mount("s" * 60, make_stays())


def test_mount_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes an App, got Router"):
        make_app().mount("x", Router())  # type: ignore[arg-type]


def test_mount_of_another_mode_or_audit_trail_is_refused(tmp_path: Path) -> None:
    strict = App("strict", mode="production")
    with pytest.raises(UsageError, match="'strict' is 'production', that of 'test' is 'dev"):
        make_app().mount("strict", strict)
    audited = App("audited", mode="development", audit=f"file:{tmp_path}/a.jsonl?required")
    with pytest.raises(UsageError, match=r"'audited' has file:.*a\.jsonl, 'test' has none"):
        make_app().mount("audited", audited)


def test_mount_joins_extensions_and_refuses_contradictions() -> None:
    loyal = App("loyal", mode="development", extensions={"com.example/loyalty": {"level": 1}})

    @loyal.extension_method("loyalty/points", extension="com.example/loyalty")
    def points() -> dict[str, int]:
        return {"points": 3}

    app = make_app()
    app.mount("loyal", loyal)
    assert app.catalog().extensions == {"com.example/loyalty": {"level": 1}}
    assert list(app.catalog().methods) == ["loyalty/points"]
    other = App("other", mode="development", extensions={"com.example/loyalty": {"level": 2}})
    with pytest.raises(UsageError, match=r"'com\.example/loyalty', with different settings"):
        app.mount("other", other)
