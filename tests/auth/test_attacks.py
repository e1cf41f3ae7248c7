"""Servers that lie: about themselves, about their authorization servers, and in their answers to a
login.
"""

import asyncio
import logging
import webbrowser
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from tests.auth.world import ISSUER, RESOURCE, Request, World, reply, visit
from tests.client.peers import http
from wirecall import connect
from wirecall.auth import Browser, ClientCredentials, MemoryStore
from wirecall.auth.discovery import Network, require_address
from wirecall.auth.grants import listening
from wirecall.errors import NotAuthorized, NotSent, UsageError
from wirecall.transports.http_client import HttpClient


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


async def refused(world: World, **options: Any) -> NotAuthorized:
    """The error of a call that cannot be authorized."""
    way = Browser(**{"visit": visit, "store": MemoryStore(), **options})
    async with connect(world.url, auth=way, discover=False) as calls:
        with pytest.raises(NotAuthorized) as caught:
            await calls.call("price")
    assert caught.value.ran == "no"
    return caught.value


# --- mix-up (RFC 9700, section 4.4) ---------------------------------------------------------------


def mix_up(evil: World, honest: World) -> None:
    """Let one server name the login page of another, and its own token endpoint.

    Neither sends `iss`.
    """
    honest.answer = {"iss": ""}
    evil.issuer = {
        "authorization_endpoint": f"{honest.base}/authorize",
        "authorization_response_iss_parameter_supported": None,
    }


async def test_browser_does_not_bring_the_code_of_one_issuer_to_another(world: World) -> None:
    async with World() as honest:
        mix_up(world, honest)
        error = await refused(world)
        assert f"its authorization_endpoint is at '{honest.base}'" in str(error)
        assert "Browser(endpoints={ISSUER: [ORIGIN]})" in str(error.fix)
        assert not honest.requests  # the page was not opened
        assert not world.asked("/token")


async def test_browser_accepts_an_endpoint_that_is_named_for_its_issuer(world: World) -> None:
    async with World() as other:
        mix_up(world, other)
        world.codes = other.codes  # both are parts of one authorization server
        way = Browser(visit=visit, store=MemoryStore(), endpoints={world.base: [other.base]})
        async with connect(world.url, auth=way, discover=False) as calls:
            assert await calls.call("price") == "fine"
        error = await refused(world, endpoints={other.base: [other.base]})
        assert "another origin" in str(error)


async def test_browser_waits_for_each_issuer_on_a_path_of_that_issuer(world: World) -> None:
    async with World() as other:
        paths = []
        for each in (world, other, world):
            async with connect(
                each.url, auth=Browser(visit=visit, store=MemoryStore()), discover=False
            ) as calls:
                assert await calls.call("price") == "fine"
            paths.append(urlsplit(each.asked("/authorize")[-1].query["redirect_uri"]).path)
    first, second, again = paths
    assert first == again != second

    async def elsewhere(url: str) -> str | None:
        """A browser that comes back on the path of another issuer, with the state of this login."""
        back = await visit(url)
        return None if back is None else back.replace(first, second)

    assert "the answer to another login" in str(await refused(world, visit=elsewhere))
    assert len(world.asked("/token")) == 2


@pytest.mark.parametrize(
    "wrong", [["https://a.example"], {"https://a.example": "https://b.example"}]
)
def test_browser_refuses_endpoints_that_name_no_issuer(wrong: Any) -> None:
    with pytest.raises(UsageError, match="expected the origins that are accepted for each issuer"):
        Browser(endpoints=wrong)


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://auth.example.com/token",
        "javascript:alert(1)",
        "file:///etc/passwd",
        "https:///token",
        "https://",
        "https://auth.example.com/a b",
        "https://auth.example.com/\nHost: x",
        "https://auth.example.com/`id`",
        "https://user:password@auth.example.com/",
        "https://auth.example.com:port/",
        "https://[::1",
        "//auth.example.com/token",
        "HTTPS://auth.example.com/\u202e",
        "",
    ],
)
def test_addresses_that_are_not_https_are_refused(url: str) -> None:
    with pytest.raises(NotAuthorized, match="cannot be used"):
        require_address(url, "the page")


@pytest.mark.parametrize(
    "url",
    [
        "https://auth.example.com/a?b=c",
        "http://localhost:1/x",
        "http://127.0.0.1/",
        "http://[::1]/",
    ],
)
def test_https_and_this_machine_are_allowed(url: str) -> None:
    require_address(url, "the page")


@pytest.mark.parametrize(
    "page", ["javascript:alert(1)", "file:///etc/passwd", "http://evil.example/x", "$(touch x)"]
)
async def test_login_page_with_another_kind_of_address_is_not_opened(
    world: World, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    world.issuer = {"authorization_endpoint": page}
    assert "authorization endpoint cannot be used" in str(await refused(world, visit=None))
    assert not opened


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "[::1]",
        "localhost",
        "0.0.0.0",
        "[::ffff:7f00:1]",
    ],
)
async def test_public_server_cannot_send_the_client_to_a_private_address(
    world: World, host: str
) -> None:
    port = urlsplit(world.url).port
    with pytest.raises(NotAuthorized, match=r"public address|cannot be used"):
        await Network(private=False).get(f"https://{host}:{port}/x", "the metadata")
    assert not world.requests


async def test_name_is_checked_where_the_connection_is_made(world: World) -> None:
    client = HttpClient(world.url.replace("127.0.0.1", "localhost"), public=True)
    await client.open()
    with pytest.raises(NotSent, match="not at a public address"):
        async with client.request("POST", b"{}"):
            pass
    await client.aclose()
    assert not world.requests


async def test_server_is_private_by_the_address_that_it_was_reached_at(world: World) -> None:
    client = HttpClient(world.url.replace("127.0.0.1", "localhost"))
    await client.open()
    async with client.request("POST", b"{}") as answer:
        assert answer.is_private
    await client.aclose()


# --- documents ------------------------------------------------------------------------------------


async def test_metadata_of_ten_megabytes_is_not_read(world: World) -> None:
    world.instead[RESOURCE] = http(b" " * (10 << 20))
    assert "are allowed" in str(await refused(world))


async def test_endless_document_is_not_read(world: World) -> None:
    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    world.instead[ISSUER] = (
        head + b"10000\r\n" + b" " * 0x10000 + b"\r\n" + b"f0000\r\n" + b" " * 0xF0000 + b"\r\n"
    )
    assert "more than 262144 bytes" in str(await refused(world))


@pytest.mark.parametrize("path", [RESOURCE, ISSUER, "/register", "/token"])
async def test_redirects_are_not_followed(world: World, path: str) -> None:
    world.instead[path] = http(b"", "307 Temporary Redirect", f"Location: {world.base}/elsewhere")
    assert "redirect" in str(await refused(world))
    assert world.count("/elsewhere") == 0


@pytest.mark.parametrize("path", [RESOURCE, ISSUER, "/register", "/token"])
async def test_server_that_does_not_answer_ends_the_login(world: World, path: str) -> None:
    world.silent.add(path)  # indefinitely: only the time limit of a request ends it
    assert "did not answer within" in str(await refused(world, timeout=0.2))


async def test_metadata_about_another_server_is_refused(world: World) -> None:
    for resource in (
        "https://other.example/rpc",
        f"{world.base}/other",
        f"{world.url}2",
        "",
        "https://[",
        world.url.replace("127", "128"),
    ):
        world.resource = {"resource": resource}
        assert "about another server" in str(await refused(world))
    assert world.count(ISSUER) == 0


@pytest.mark.parametrize("named", ["https://evil.example", "/", "{}/"])
async def test_metadata_of_another_issuer_is_refused(world: World, named: str) -> None:
    world.issuer = {"issuer": named.format(world.base)}
    assert "that of another one" in str(await refused(world))
    assert world.count("/register") == world.count("/authorize") == world.count("/token") == 0


@pytest.mark.parametrize(
    "issuer",
    ["https://[", "https://a\n/", "https://a:port/", "//a", "\0", "http://auth.example.com"],
)
async def test_authorization_server_without_an_address_is_refused(
    world: World, issuer: str
) -> None:
    world.resource = {"authorization_servers": [issuer]}
    assert "the authorization server cannot be used" in str(await refused(world))


async def test_metadata_with_a_wrong_member_is_refused_with_the_reason(world: World) -> None:
    world.issuer = {"scopes_supported": "read write"}
    assert "Expected `array | null`, got `str` - at `$.scopes_supported`" in str(
        await refused(world)
    )


@pytest.mark.parametrize(
    "document", [b"", b"[]", b"<html>", b"{}", b'{"resource": 1}', b"[" * 100_000]
)
async def test_documents_that_are_not_documents_are_refused(world: World, document: bytes) -> None:
    world.instead[RESOURCE] = http(document)
    await refused(world)
    assert world.count("/authorize") == 0


async def test_client_tries_at_most_three_authorization_servers(world: World) -> None:
    world.resource = {"authorization_servers": [f"{world.base}/{number}" for number in range(10)]}
    await refused(world)
    tried = {
        request.path.rpartition("/")[2]
        for request in world.requests
        if request.path.startswith(f"{ISSUER}/")
    }
    assert tried == {"0", "1", "2"}


# --- answers to a login ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"iss": "https://evil.example"}, "names another issuer"),
        ({"iss": ""}, "does not name its issuer"),
        ({"state": "made up"}, "another login"),
        ({"state": ""}, "another login"),
        ({"code": ""}, "does not have a code"),
        (
            {"code": "", "error": "access_denied", "error_description": "<b>no</b>\x1b[2J"},
            r"access_denied: <b>no</b>\x1b[2J",
        ),
        (
            {"iss": "https://evil.example", "error": "x", "error_description": "call 555-1234"},
            "names another issuer",
        ),
    ],
)
async def test_answers_that_are_not_from_the_issuer_of_this_login_are_refused(
    world: World, answer: dict[str, str], text: str
) -> None:
    world.answer = answer
    error = str(await refused(world))
    assert text in error
    assert "555-1234" not in error
    assert world.count("/token") == 0


async def test_issuer_in_the_answer_is_checked_even_if_not_announced(world: World) -> None:
    world.issuer = {"authorization_response_iss_parameter_supported": None}
    world.answer = {"iss": f"{world.base}/"}
    assert "names another issuer" in str(await refused(world))


async def test_code_that_is_used_twice_does_not_return_a_second_token(world: World) -> None:
    codes: list[str] = []

    async def replay(url: str) -> str | None:
        back = await visit(url)
        assert back is not None
        world.codes.pop(next(iter(world.codes)))  # another client was faster
        codes.append(back)
        return back

    assert "invalid_grant" in str(await refused(world, visit=replay))
    assert codes


async def test_callback_echoes_nothing_and_accepts_one_answer(world: World) -> None:
    async with listening(0, "/callback", may_change=False) as callback:
        callback.state = "s"
        port = urlsplit(callback.uri).port
        script = "<script>alert(1)</script>"
        pages = []
        for line, host in (
            (
                f"GET /callback?{urlencode({'state': 's', 'error': 'x', 'error_description': script})}",
                "evil.example",
            ),
            ("POST /callback?state=s", f"127.0.0.1:{port}"),
            ("GET /callback?state=s&state=s", f"127.0.0.1:{port}"),
            (
                f"GET /callback?{urlencode({'state': 's', 'error': 'x', 'error_description': script})}",
                f"127.0.0.1:{port}",
            ),
            ("GET /callback?state=s&code=second", f"127.0.0.1:{port}"),
            ("nonsense", f"127.0.0.1:{port}"),
            ("GET /" + "x" * (1 << 17), f"127.0.0.1:{port}"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{line} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            try:
                pages.append(await reader.read())
            # The server closed it before it had read all of a long line.
            except ConnectionResetError:
                pages.append(b"HTTP/1.1 400 Bad Request")
            writer.close()
        assert (await callback.answer)["error_description"] == script
    assert [page[9:12] for page in pages] == [
        b"400",
        b"400",
        b"400",
        b"200",
        b"400",
        b"400",
        b"400",
    ]
    assert not any(b"script" in page for page in pages)


async def test_login_that_is_not_completed_ends(world: World) -> None:
    async def nothing(url: str) -> None:
        """A person who closes the page."""

    assert "was not completed" in str(await refused(world, visit=nothing, patience=0.05))


# --- secrets --------------------------------------------------------------------------------------


async def test_secrets_are_not_in_errors_logs_and_representations(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    def echo(request: Request) -> bytes:
        """Repeat everything that was sent in the text of the error."""
        sent = " ".join(request.form.values()) + request.headers.get("authorization", "")
        return reply({"error": "invalid_request", "error_description": sent}, "400 Bad Request")

    world.instead["/token"] = echo
    store = MemoryStore()
    error = await refused(world, store=store)
    sent = world.asked("/token")[0].form
    assert not any(sent[name] in f"{error}{error!r}" for name in ("code", "code_verifier"))
    assert "invalid_request" in str(error)

    way = ClientCredentials("me", secret="hush-hush", issuer=world.base)
    async with connect(world.url, auth=way, discover=False) as calls:
        with pytest.raises(NotAuthorized) as caught:
            await calls.call("price")
        world.instead.clear()
        await calls.call("price")
        assert way.store is not None
        (login,) = await way.store.logins()
    assert world.asked("/token")[-1].headers["authorization"].partition(" ")[2] not in str(
        caught.value
    )
    assert "hush" not in f"{caught.value}{caught.value!r}{way!r}{login!r}{calls!r}"
    assert login.access_token not in f"{login!r}{calls!r}"
    assert "hush" not in caplog.text
    assert login.access_token not in caplog.text


@pytest.mark.parametrize("token", ["", " ", "a\r\nX-Evil: 1", "ünicode"])
async def test_token_that_cannot_be_a_header_is_refused(world: World, token: str) -> None:
    world.instead["/token"] = reply({"access_token": token})
    await refused(world)
    assert world.count("/rpc") == 1
