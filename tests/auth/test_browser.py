"""`connect(url, auth=Browser())`: a person logs in, and the login is used, refreshed and widened."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qsl, urlsplit

import pytest
from msgspec.structs import replace

from tests.auth.world import ISSUER, RESOURCE, World, reply, visit
from tests.client.peers import http
from wirecall import connect
from wirecall.aio import Timeouts
from wirecall.auth import Browser, MemoryStore
from wirecall.auth.client import authorization
from wirecall.client.client import Client
from wirecall.client.exchange import Entry, Exchange
from wirecall.errors import MissingScopes, NotAuthorized, UsageError
from wirecall.transports.http_client import HttpClient


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


def client(world: World, way: Browser, timeout: float = 60.0) -> Client:
    return connect(world.url, auth=way, discover=False, timeout=timeout)


async def test_refused_call_leads_to_a_login_and_is_sent_again(world: World) -> None:
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        assert await calls.call("price") == "fine"
        assert await calls.call("price") == "fine"
    assert [request.path for request in world.requests] == [
        *("/rpc", RESOURCE, ISSUER, "/register", "/authorize", "/token", "/rpc", "/rpc")
    ]
    asked = world.asked("/authorize")[0].query
    assert asked["code_challenge_method"] == "S256"
    assert asked["resource"] == world.asked("/token")[0].form["resource"] == world.url
    assert "scope" not in asked
    assert len(asked["state"]) >= 43  # 32 bytes
    # The client sent the same message again: a command with a key takes effect once.
    refused, answered, _ = world.asked("/rpc")
    assert refused.body == answered.body


async def test_browser_returns_to_a_port_of_this_machine(world: World) -> None:
    pages = []

    async def browser(url: str) -> None:
        """A browser that follows the redirect, after a page elsewhere has tried to get in before
        it.
        """
        back = await visit(url)
        assert back is not None
        for address in (
            back.replace("state=", "state=x"),
            back.replace("/callback/", "/other/"),
            back,
        ):
            page = HttpClient(address)
            await page.open()
            async with page.request("GET") as answer:
                pages.append(
                    (answer.status, await answer.read(), answer.headers["content-security-policy"])
                )
            await page.aclose()

    async def go(url: str) -> None:
        browsing.append(asyncio.create_task(browser(url)))

    browsing: list[asyncio.Task[None]] = []
    async with client(world, Browser(visit=go, store=MemoryStore())) as calls:
        assert await calls.call("price") == "fine"
        await asyncio.gather(*browsing)
    assert [status for status, _, _ in pages] == [400, 400, 200]
    assert len({page for _, page, _ in pages}) == 1
    assert all(policy.startswith("default-src 'none'") for _, _, policy in pages)


async def test_simultaneous_calls_share_one_login(world: World) -> None:
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        assert await asyncio.gather(*(calls.call("price") for _ in range(10))) == ["fine"] * 10
    assert world.count("/authorize") == 1


async def test_deadline_of_a_call_is_paused_while_a_person_acts(world: World) -> None:
    class Message:
        sent = False
        is_paused = False

        @contextmanager
        def paused(self) -> Iterator[None]:
            self.is_paused = True
            yield
            self.is_paused = False

    message = Message()
    paused = []

    async def person(url: str) -> str | None:
        paused.append(message.is_paused)
        return await visit(url)

    http = HttpClient(
        world.url, auth=authorization(Browser(visit=person, store=MemoryStore()), world.url)
    )
    await http.open()
    async with http.request("POST", b'{"id":1}', exchange=message) as answer:
        assert answer.status == 200
        assert paused == [True]
        assert not message.is_paused
    await http.aclose()


async def test_pause_moves_the_limit_of_an_attempt_and_the_deadlines_in_it() -> None:
    entry: Entry[str] = Entry("price", None, lambda _entry: None, timeout=1.0, deadline=10.0)
    exchange = Exchange(b"", [entry], False)
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    with Timeouts().within(0.01) as exchange.limit:
        begun = exchange.limit.when
        with exchange.paused():
            loop.call_later(0.05, over.set)
            await over.wait()
        assert exchange.stood_still >= 0.05
        assert entry.deadline == pytest.approx(10.0 + exchange.stood_still)
        assert exchange.limit.when == pytest.approx((begun or 0.0) + exchange.stood_still)


async def test_login_that_is_kept_is_used_by_the_next_client(world: World) -> None:
    store = MemoryStore()
    for _ in range(2):
        async with client(world, Browser(visit=visit, store=store)) as calls:
            assert await calls.call("price") == "fine"
    assert world.count("/authorize") == 1


async def test_token_that_expires_soon_is_refreshed_before_it_is_sent(world: World) -> None:
    store = MemoryStore()
    async with client(world, Browser(visit=visit, store=store)) as calls:
        await calls.call("price")
    (login,) = await store.logins()
    await store.save(replace(login, expires=time.time() + 5))
    async with client(world, Browser(visit=visit, store=store)) as calls:
        await calls.call("price")
    assert world.count("/authorize") == 1
    first, refresh = world.asked("/token")
    assert refresh.form["grant_type"] == "refresh_token"
    assert refresh.form["resource"] == first.form["resource"]
    assert [request.headers.get("authorization") for request in world.asked("/rpc")][
        -1
    ] == "Bearer access-secret-5"


async def test_refused_token_is_refreshed_and_the_login_stays(world: World) -> None:
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        await calls.call("price")
        world.tokens.clear()
        assert await calls.call("price") == "fine"
    assert world.count("/authorize") == 1


@pytest.mark.parametrize("code", ["invalid_grant", "invalid_request", "token_expired"])
async def test_expired_refresh_token_leads_to_a_new_login_of_the_same_client(
    world: World, code: str
) -> None:
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        await calls.call("price")
        world.tokens.clear()
        world.instead["/token"] = lambda request: (
            reply({"error": code}, "400 Bad Request")
            if request.form["grant_type"] == "refresh_token"
            else None
        )
        assert await calls.call("price") == "fine"
    assert world.count("/register") == 1
    assert len({request.query["client_id"] for request in world.asked("/authorize")}) == 1


async def test_answer_without_a_refresh_token_keeps_the_old_one(world: World) -> None:
    store = MemoryStore()
    async with client(world, Browser(visit=visit, store=store)) as calls:
        await calls.call("price")
        (before,) = await store.logins()
        world.tokens.clear()
        world.refreshes = False
        await calls.call("price")
    (after,) = await store.logins()
    assert after.refresh_token == before.refresh_token
    assert after.access_token != before.access_token


async def test_refusal_for_scopes_asks_for_all_of_them(world: World) -> None:
    world.challenge = ', scope="read"'
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        await calls.call("price")
        world.needs = frozenset({"write"})
        assert await calls.call("charge") == "fine"
    assert [request.query["scope"] for request in world.asked("/authorize")] == [
        "read",
        "read write",
    ]


async def test_scopes_that_were_asked_for_already_are_missing_for_good(world: World) -> None:
    world.needs = frozenset({"write"})
    world.instead["/token"] = lambda request: reply({"access_token": "narrow"})
    world.tokens["narrow"] = "read"
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        with pytest.raises(MissingScopes, match="write") as caught:
            await calls.call("charge")
    assert caught.value.scopes == {"write"}
    assert caught.value.ran == "no"
    assert caught.value.status == 403
    assert world.count("/authorize") == 2


async def test_client_gives_up_on_a_server_that_asks_for_another_scope_each_time(
    world: World,
) -> None:
    world.instead["/rpc"] = lambda request: http(
        b"",
        "403 Forbidden",
        f'WWW-Authenticate: Bearer error="insufficient_scope", scope="s{len(world.requests)}"',
    )
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        with pytest.raises(MissingScopes):
            await calls.call("charge")
    assert world.count("/authorize") == 2


async def test_new_token_that_is_refused_is_an_error(world: World) -> None:
    world.instead["/token"] = reply({"access_token": "odd"})
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        with pytest.raises(NotAuthorized, match="just issued") as caught:
            await calls.call("price")
    assert caught.value.ran == "no"
    assert world.count("/authorize") == 1


async def test_scopes_of_the_server_are_asked_for_where_the_challenge_names_none(
    world: World,
) -> None:
    world.resource = {"scopes_supported": ["b", "a"]}
    async with client(world, Browser(visit=visit, store=MemoryStore(), scopes="extra")) as calls:
        await calls.call("price")
    assert world.asked("/authorize")[0].query["scope"] == "extra a b"


async def test_offline_access_is_asked_for_where_the_issuer_has_it(world: World) -> None:
    world.issuer = {"scopes_supported": ["offline_access"]}
    async with client(world, Browser(visit=visit, store=MemoryStore(), scopes=["read"])) as calls:
        await calls.call("price")
    asked = world.asked("/authorize")[0].query
    assert (asked["scope"], asked["prompt"]) == ("read offline_access", "consent")


@pytest.mark.parametrize(("given", "sent"), [(None, None), ("urn:shop", "urn:shop")])
async def test_resource_can_be_replaced_and_left_out(
    world: World, given: str | None, sent: str | None
) -> None:
    async with client(world, Browser(visit=visit, store=MemoryStore(), resource=given)) as calls:
        await calls.call("price")
    assert world.asked("/authorize")[0].query.get("resource") == sent
    assert world.asked("/token")[0].form.get("resource") == sent


async def test_given_credentials_take_precedence_over_a_document_and_a_registration(
    world: World,
) -> None:
    world.issuer = {"client_id_metadata_document_supported": True}
    url = "https://example.com/client.json"
    way = Browser(visit=visit, store=MemoryStore(), metadata_url=url)
    async with client(world, way) as calls:
        await calls.call("price")
    known = Browser(
        visit=visit,
        store=MemoryStore(),
        metadata_url=url,
        client_id="me",
        client_secret="hush",
        issuer=world.base,
    )
    async with client(world, known) as calls:
        await calls.call("price")
    assert [request.query["client_id"] for request in world.asked("/authorize")] == [url, "me"]
    assert world.count("/register") == 0
    assert world.asked("/token")[1].headers["authorization"] == "Basic bWU6aHVzaA=="


async def test_given_credentials_stay_with_their_issuer(world: World) -> None:
    way = Browser(
        visit=visit,
        store=MemoryStore(),
        client_id="me",
        client_secret="hush",
        issuer="https://auth.example.com",
    )
    async with client(world, way) as calls:
        with pytest.raises(
            NotAuthorized, match=r"credentials are those of https://auth\.example\.com"
        ):
            await calls.call("price")
    assert [request.path for request in world.requests] == ["/rpc", RESOURCE]


async def test_server_that_moves_to_another_issuer_gets_a_new_client(world: World) -> None:
    async with World() as other:
        async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
            await calls.call("price")
            world.tokens.clear()
            world.resource = {"authorization_servers": [other.base]}
            world.tokens = other.tokens
            assert await calls.call("price") == "fine"
        assert world.count("/token") == 1
        assert other.count("/register") == 1
        assert "refresh_token" not in other.asked("/token")[0].form


async def test_server_without_metadata_is_its_own_issuer(world: World) -> None:
    for path in (RESOURCE, "/.well-known/oauth-protected-resource", ISSUER):
        world.instead[path] = http(b"", "404 Not Found")
    world.instead["/rpc"] = lambda request: (
        None if "authorization" in request.headers else http(b"", "401 Unauthorized")
    )
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        assert await calls.call("price") == "fine"
    assert world.count("/register") == world.count("/authorize") == world.count("/token") == 1


async def test_metadata_that_is_temporarily_unavailable_does_not_count_as_missing(
    world: World,
) -> None:
    world.instead["/rpc"] = http(b"", "401 Unauthorized")
    world.instead[RESOURCE] = http(b"", "503 Service Unavailable")
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        with pytest.raises(NotAuthorized, match="503"):
            await calls.call("price")
    assert [request.path for request in world.requests] == ["/rpc", RESOURCE]


@pytest.mark.parametrize("methods", [None, [], ["plain"]])
async def test_issuer_without_pkce_is_refused(world: World, methods: list[str] | None) -> None:
    world.issuer = {"code_challenge_methods_supported": methods}
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        with pytest.raises(NotAuthorized, match="PKCE"):
            await calls.call("price")
    assert world.count("/register") == world.count("/authorize") == 0


async def test_other_403_is_the_answer_of_the_server(world: World) -> None:
    world.instead["/rpc"] = http(b"not you", "403 Forbidden")
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        with pytest.raises(Exception, match="HTTP 403") as caught:
            await calls.call("price")
    assert not isinstance(caught.value, NotAuthorized)
    assert world.count(RESOURCE) == 0


def test_secret_needs_its_issuer() -> None:
    with pytest.raises(UsageError, match="issuer="):
        Browser(client_id="me", client_secret="hush", store=MemoryStore())


async def test_state_and_the_verifier_are_new_for_each_login(world: World) -> None:
    for _ in range(2):
        async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
            await calls.call("price")
    first, second = (dict(request.query) for request in world.asked("/authorize"))
    assert first["state"] != second["state"]
    assert first["code_challenge"] != second["code_challenge"]


async def test_address_of_the_page_keeps_the_query_of_its_endpoint(world: World) -> None:
    world.issuer = {"authorization_endpoint": f"{world.base}/authorize?tenant=a%20b"}
    seen = []

    async def look(url: str) -> str | None:
        seen.append(dict(parse_qsl(urlsplit(url).query)))
        return await visit(url)

    async with client(world, Browser(visit=look, store=MemoryStore())) as calls:
        await calls.call("price")
    assert seen[0]["tenant"] == "a b"
    assert seen[0]["response_type"] == "code"


async def test_authorization_server_that_is_away_does_not_end_the_login(world: World) -> None:
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        await calls.call("price")
        world.tokens.clear()
        world.instead["/token"] = http(b"", "503 Service Unavailable")
        with pytest.raises(NotAuthorized, match="503"):
            await calls.call("price")
        world.instead.clear()
        assert await calls.call("price") == "fine"
    assert world.count("/authorize") == 1


async def test_client_that_the_issuer_has_forgotten_registers_again(world: World) -> None:
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        await calls.call("price")
        world.tokens.clear()
        forgotten = world.asked("/token")[0].form["client_id"]
        world.instead["/token"] = lambda request: (
            reply({"error": "invalid_client"}, "401 Unauthorized")
            if request.form["client_id"] == forgotten
            else None
        )
        assert await calls.call("price") == "fine"
    assert world.count("/register") == 2


async def test_refreshed_token_that_is_refused_leads_to_a_login(world: World) -> None:
    async with client(world, Browser(visit=visit, store=MemoryStore())) as calls:
        await calls.call("price")
        world.tokens.clear()
        world.instead["/token"] = lambda request: (
            reply({"access_token": "dead"})
            if request.form["grant_type"] == "refresh_token"
            else None
        )
        assert await calls.call("price") == "fine"
    assert world.count("/authorize") == 2


async def test_login_of_another_client_is_not_used(world: World) -> None:
    store = MemoryStore()
    for id in ("me", "you"):
        async with client(world, Browser(visit=visit, store=store, client_id=id)) as calls:
            await calls.call("price")
    assert [request.query["client_id"] for request in world.asked("/authorize")] == ["me", "you"]
    assert len(await store.logins(world.url)) == 2


async def test_refusal_of_an_array_reaches_each_of_its_calls(world: World) -> None:
    world.instead["/token"] = reply({"error": "server_error"}, "400 Bad Request")
    async with (
        client(world, Browser(visit=visit, store=MemoryStore())) as calls,
        calls.batch() as batch,
    ):
        entries = [batch.call("price") for _ in range(3)]
    assert [type(entry.error).__mro__[1] for entry in entries] == [NotAuthorized] * 3
    assert world.count("/authorize") == 1
