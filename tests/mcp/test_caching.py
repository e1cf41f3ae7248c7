"""How long clients may keep lists and contents (SEP-2549, 2026-07-28): the server says it, and our
client honours it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.calls import make_app
from tests.mcp.asgi import LEGACY, R4, R5, TRANSPORTS, over_http, over_stdio, speak
from tests.mcp.scripted import Answer, Reply, Scripted, Seen, event, newest, older, result
from wirecall import App, Context, UsageError, connect
from wirecall.mcp.client.client import McpClient
from wirecall.testing import FakeClock

LISTS = (
    "server/discover",
    "tools/list",
    "prompts/list",
    "resources/list",
    "resources/templates/list",
)


def library(**options: Any) -> App:
    """Resources that say how long they stay unchanged."""
    app = make_app(**options)
    app.query(name="look")(lambda: 1)
    app.prompt(name="greet")(lambda: "hello")
    app.resource("test://plain")(lambda: "plain")
    app.resource("test://kept", ttl=12.5)(lambda: "kept")
    app.resource("test://shared", ttl=3600, scope="public")(lambda: "shared")
    app.resource("test://page/{number}", ttl=0.57, scope="public")(lambda number: number)

    @app.resource("test://asked", ttl=60, scope="public")
    async def asked(ctx: Context) -> str:
        return str((await ctx.elicit("Which?", str)).content)

    return app


def caller(headers: Any) -> str:
    return "ann"


async def hints(client: Any, method: str, params: Any = None) -> tuple[int, str]:
    found = await client.result(method, params)
    return found["ttlMs"], found["cacheScope"]


# --- the server -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("options", "ttl"), [({}, 60_000), ({"list_ttl": 0}, 0), ({"list_ttl": 1.5}, 1500)]
)
async def test_lists_say_how_long_they_may_be_kept(transport: str, options: Any, ttl: int) -> None:
    async with speak(transport, library(**options), R5) as client:
        assert {await hints(client, method) for method in LISTS} == {(ttl, "public")}


READS = {
    "test://plain": (0, "private"),
    "test://kept": (12_500, "private"),
    "test://shared": (3_600_000, "public"),
    "test://page/7": (570, "public"),
}


@pytest.mark.parametrize("uri", READS)
async def test_resource_says_how_long_it_may_be_kept(uri: str) -> None:
    async with over_stdio(library()) as client:
        assert await hints(client, "resources/read", {"uri": uri}) == READS[uri]


async def test_caching_is_never_public_while_callers_are_authenticated() -> None:
    """A shared cache may give a public answer to any caller."""
    async with over_http(library(authenticate=caller)) as client:
        scopes = [await hints(client, method) for method in LISTS]
        scopes += [await hints(client, "resources/read", {"uri": uri}) for uri in READS]
    assert {scope for _, scope in scopes} == {"private"}
    assert scopes[-2:] == [(3_600_000, "private"), (570, "private")]


async def test_read_that_asked_the_user_is_not_kept() -> None:
    """2026-07-28, caching, "Cache Key": it depends on input that is not part of the key."""
    async with over_http(library(), capabilities={"elicitation": {}}) as client:
        first = await client.result("resources/read", {"uri": "test://asked"})
        assert not {"ttlMs", "cacheScope"} & first.keys()
        (key,) = first["inputRequests"]
        answers = {key: {"action": "accept", "content": {"value": "this"}}}
        more = {
            "uri": "test://asked",
            "requestState": first["requestState"],
            "inputResponses": answers,
        }
        assert await hints(client, "resources/read", more) == (0, "private")


@pytest.mark.parametrize("revision", LEGACY)
async def test_hints_are_not_sent_to_older_revisions(revision: str) -> None:
    async with over_http(library(list_ttl=5), revision) as client:
        assert (
            not {"ttlMs", "cacheScope"}
            & (await client.result("resources/read", {"uri": "test://kept"})).keys()
        )


@pytest.mark.parametrize(
    "ttl", [-1, -0.1, float("nan"), float("inf"), 2**31 + 1, 10**400, True, "60", None]
)
def test_ttl_that_is_not_a_time_is_refused(ttl: Any) -> None:
    with pytest.raises(
        UsageError, match=r"list_ttl must be a number of seconds from 0 to 2147483648"
    ):
        App("test", list_ttl=ttl)
    with pytest.raises(UsageError, match=r"ttl of test://x must be a number of seconds"):
        App("test").resource("test://x", ttl=ttl)


def test_cache_scope_that_does_not_exist_is_refused() -> None:
    scope: Any = "shared"
    with pytest.raises(UsageError, match="must be one of public, private, got 'shared'"):
        App("test").resource("test://x", scope=scope)


# --- our client -----------------------------------------------------------------------------------


@asynccontextmanager
async def reading(answer: Answer, **options: Any) -> AsyncIterator[tuple[Scripted, McpClient]]:
    """A scripted server, and a client of it whose clock stands still."""
    given = {"clock": FakeClock(), **options}
    async with Scripted(answer) as server, connect(server.url, protocol="mcp", **given) as client:
        yield server, client


def contents(message: Any, **hint: Any) -> Reply:
    found = [{"uri": message["params"]["uri"], "text": f"text {message['id']}"}]
    return result(message, {"resultType": "complete", "contents": found, **hint})


async def test_read_is_kept_for_the_time_that_the_server_names() -> None:
    clock = FakeClock()
    answer = newest(lambda message, _: contents(message, ttlMs=2000, cacheScope="private"))
    async with reading(answer, clock=clock) as (server, client):
        first = await client.read_resource("test://a")
        first.clear()  # the caller's own list
        for now, count in ((1.9, 1), (2.0, 2), (3.9, 2), (4.1, 3)):
            clock.now = now
            assert [item.uri for item in await client.read_resource("test://a")] == ["test://a"]
            assert server.methods().count("resources/read") == count
        await client.read_resource("test://b")
        assert server.methods().count("resources/read") == 4


@pytest.mark.parametrize(
    "hint", [{}, {"ttlMs": 0}, {"ttlMs": -5}, {"ttlMs": "60000"}, {"ttlMs": None}]
)
async def test_read_without_a_time_is_not_kept(hint: Any) -> None:
    async with reading(newest(lambda message, _: contents(message, **hint))) as (server, client):
        for count in (1, 2):
            await client.read_resource("test://a")
            assert server.methods().count("resources/read") == count


CHANGES = {
    "notifications/resources/updated": {"uri": "test://a"},
    "notifications/resources/list_changed": {},
}


@pytest.mark.parametrize("method", CHANGES)
async def test_read_is_not_kept_past_a_change(method: str) -> None:
    """Also one that arrives while the resource is read: the contents may be older than the change."""
    changes = [False, True, True, False]

    def answer(message: Any, seen: Seen) -> Reply:
        if seen.method == "tools/list" or changes.pop():
            change = {"jsonrpc": "2.0", "method": method, "params": CHANGES[method]}
            told = (
                {"tools": [], "ttlMs": 0}
                if seen.method == "tools/list"
                else {"contents": [], "ttlMs": 60_000}
            )
            answer = {
                "jsonrpc": "2.0",
                "id": message["id"],
                "result": {"resultType": "complete", **told},
            }
            return Reply(events=[event(change), event(answer)])
        return contents(message, ttlMs=60_000)

    async with reading(newest(answer)) as (server, client):
        await client.read_resource("test://a")  # nothing changes during this read
        await client.read_resource("test://a")
        assert server.methods().count("resources/read") == 1
        await client.list_tools()  # brings the change
        for count in (2, 3, 4, 4):
            await client.read_resource("test://a")
            assert server.methods().count("resources/read") == count


async def test_list_that_changes_while_it_is_read_is_not_kept() -> None:
    asked: list[Any] = []

    def answer(message: Any, seen: Seen) -> Reply:
        asked.append(message)
        told = {"resultType": "complete", "tools": [], "ttlMs": 60_000}
        if len(asked) > 1:
            return result(message, told)
        change = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
        return Reply(
            events=[event(change), event({"jsonrpc": "2.0", "id": message["id"], "result": told})]
        )

    async with reading(newest(answer)) as (_, client):
        for count in (1, 2, 2):
            await client.list_tools()
            assert len(asked) == count


async def test_read_with_questions_is_not_kept() -> None:
    """2026-07-28, caching, "Cache Key": whatever the server says."""

    def answer(message: Any, seen: Seen) -> Reply:
        if "requestState" in message["params"]:
            return contents(message, ttlMs=60_000)
        return result(message, {"resultType": "input_required", "requestState": "s"})

    async with reading(newest(answer)) as (server, client):
        for count in (2, 4):
            await client.read_resource("test://a")
            assert server.methods().count("resources/read") == count


async def test_client_keeps_a_limited_number_of_reads() -> None:
    async with reading(newest(lambda message, _: contents(message, ttlMs=60_000))) as (
        server,
        client,
    ):
        for number in range(101):
            await client.read_resource(f"test://{number}")
        await client.read_resource("test://100")
        assert server.methods().count("resources/read") == 101
        await client.read_resource("test://0")
        assert server.methods().count("resources/read") == 102


async def test_client_keeps_a_limited_number_of_bytes() -> None:
    def answer(message: Any, _: Seen) -> Reply:
        found = [{"uri": message["params"]["uri"], "text": "x" * (4 << 20)}]
        return result(message, {"resultType": "complete", "contents": found, "ttlMs": 60_000})

    async with reading(newest(answer)) as (server, client):
        for uri, count in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("b", 3), ("a", 4)):
            await client.read_resource(f"test://{uri}")
            assert server.methods().count("resources/read") == count


async def test_client_does_not_keep_reads_at_older_revisions() -> None:
    async with reading(older(lambda message, _: contents(message)), revision=R4) as (
        server,
        client,
    ):
        for count in (1, 2):
            await client.read_resource("test://a")
            assert server.methods().count("resources/read") == count


async def test_our_client_keeps_what_our_server_allows() -> None:
    app = make_app()
    reads = []

    @app.resource("test://counted", ttl=60)
    def counted() -> str:
        reads.append(1)
        return str(len(reads))

    async with connect(app, protocol="mcp", clock=FakeClock()) as client:
        assert [(await client.read_resource("test://counted"))[0].text for _ in range(3)] == [
            "1",
            "1",
            "1",
        ]
        async with client.listen(uris=["test://counted"]) as changes:
            await client.read_resource("test://counted")
            app.updated("test://counted")
            async for _ in changes:
                break
            assert (await client.read_resource("test://counted"))[0].text == str(len(reads))
    assert len(reads) > 1
