"""Tokens of another project's authorization server, Authlib's: our client gets them, and our server
judges them.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.auth.authlib_server import RESOURCE_SERVER, Server
from tests.auth.world import visit
from tests.cli import wirecall
from tests.client.peers import served
from tests.ports import free_port
from wirecall import App, Context, connect
from wirecall.auth import Browser, ClientCredentials, FileStore, Introspection, Jwt, MemoryStore
from wirecall.errors import NotAuthorized, Refused
from wirecall.mcp.client.client import McpClient
from wirecall.transports.http_client import HttpClient

SECRET = "s p+c/ial:%"  # each of its signs means something in a form or in HTTP Basic


@pytest.fixture(params=["jwt", "opaque"])
async def issuer(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    async with Server(opaque=request.param == "opaque") as server:
        yield server


@pytest.fixture
async def jwts() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture
async def opaque() -> AsyncIterator[Server]:
    async with Server(opaque=True) as server:
        yield server


def shop(issuer: Server) -> Callable[[str], App]:
    """Return what makes the app at an address.

    It verifies tokens with the issuer's keys, or by introspection.
    """

    def make(url: str) -> App:
        issuer.audience = f"{url}/mcp"
        common: dict[str, Any] = {"resource": issuer.audience, "scopes": "prices:read"}
        auth: Jwt | Introspection = Jwt(issuer.issuer, **common)
        if issuer.is_opaque:
            place = f"{issuer.issuer}/introspect"
            secret = issuer.clients[RESOURCE_SERVER].secret
            auth = Introspection(
                place, RESOURCE_SERVER, secret, issuer=issuer.issuer, keeps=0, **common
            )
        app = App("shop", auth=auth)

        @app.tool
        def whoami(ctx: Context) -> dict[str, Any]:
            assert ctx.identity is not None
            return {
                "caller": ctx.caller,
                "client": ctx.identity.client,
                "scopes": sorted(ctx.identity.scopes),
            }

        @app.tool(scopes="orders:write")
        def order() -> str:
            return "ordered"

        return app

    return make


async def whoami(calls: McpClient) -> dict[str, Any]:
    found: dict[str, Any] = await calls.call_tool("whoami", type=dict)
    return found


def paths(issuer: Server) -> list[str]:
    """Return the requests to the issuer, but for those of the server and those for metadata."""
    left_out = ("/introspect", "/jwks", "/.well-known/oauth-authorization-server")
    return [path for path, _ in issuer.asked if path not in left_out]


@pytest.mark.parametrize("method", ["client_secret_basic", "client_secret_post"])
async def test_program_gets_a_token_that_the_server_accepts(issuer: Server, method: str) -> None:
    issuer.add_client("robot", SECRET, method, "client_credentials")
    issuer.methods = [method]
    async with served(shop(issuer)) as url:
        way = ClientCredentials("robot", secret=SECRET, issuer=issuer.issuer)
        async with connect(f"{url}/mcp", protocol="mcp", auth=way) as calls:
            told = await whoami(calls)
            assert told == {
                "caller": f"{issuer.issuer} robot",
                "client": "robot",
                "scopes": ["prices:read"],
            }
            assert (await calls.call_tool("order")).text == "ordered"
    assert paths(issuer) == ["/token", "/token"]
    assert [form["scope"].split() for path, form in issuer.asked if path == "/token"] == [
        ["prices:read"],
        ["prices:read", "orders:write"],
    ]


@pytest.mark.parametrize("known", ["registered", "preset"])
async def test_person_logs_in_and_the_server_knows_the_name(issuer: Server, known: str) -> None:
    port = free_port()
    way = Browser(visit=visit, store=MemoryStore(), port=port)
    if known == "preset":
        grants = ("authorization_code", "refresh_token")
        back = f"http://127.0.0.1:{port}/callback"
        issuer.add_client("page", SECRET, "client_secret_basic", *grants, redirect_uri=back)
        way = Browser(
            visit=visit,
            store=MemoryStore(),
            port=port,
            client_id="page",
            client_secret=SECRET,
            issuer=issuer.issuer,
        )
    async with (
        served(shop(issuer)) as url,
        connect(f"{url}/mcp", protocol="mcp", auth=way) as calls,
    ):
        told = await whoami(calls)
    (client,) = {*issuer.clients} - {RESOURCE_SERVER}
    assert told == {"caller": f"{issuer.issuer} alice", "client": client, "scopes": ["prices:read"]}
    assert paths(issuer) == [
        *(["/register"] if known == "registered" else []),
        "/authorize",
        "/token",
    ]
    (asked,) = [form for path, form in issuer.asked if path == "/authorize"]
    assert asked["code_challenge_method"] == "S256"
    assert not issuer.codes


async def test_login_is_refreshed_with_refresh_tokens_that_rotate(issuer: Server) -> None:
    issuer.lifetime = 30  # less than the minute before expiry at which a token is refreshed
    store = MemoryStore()
    async with served(shop(issuer)) as url:
        async with connect(
            f"{url}/mcp", protocol="mcp", auth=Browser(visit=visit, store=store)
        ) as calls:
            for _ in range(3):
                assert (await whoami(calls))["caller"] == f"{issuer.issuer} alice"
        (login,) = await store.logins(f"{url}/mcp")
    assert paths(issuer).count("/authorize") == 1
    *old, last = issuer.tokens
    assert len(old) >= 3
    assert [token.refresh_revoked for token in issuer.tokens] == [*[True] * len(old), False]
    assert (login.access_token, login.refresh_token) == (last.access_token, last.refresh_token)


async def test_revoked_token_is_refused_and_the_client_refreshes_it(opaque: Server) -> None:
    store = MemoryStore()
    async with served(shop(opaque)) as url:
        async with connect(
            f"{url}/mcp", protocol="mcp", auth=Browser(visit=visit, store=store)
        ) as calls:
            await whoami(calls)
            opaque.tokens[-1].revoked = True
            await whoami(calls)
        revoked, fresh = opaque.tokens
        status, challenge = await challenged(f"{url}/mcp", revoked.access_token)
        assert (status, 'error="invalid_token"' in challenge) == (401, True)
        assert paths(opaque) == ["/register", "/authorize", "/token", "/token"]
        async with connect(f"{url}/mcp", protocol="mcp", auth=fresh.access_token) as calls:
            assert (await whoami(calls))["caller"] == f"{opaque.issuer} alice"


async def test_token_for_another_server_is_refused(issuer: Server) -> None:
    issuer.add_client("robot", SECRET, "client_secret_basic", "client_credentials")
    async with served(shop(issuer)) as url:
        issuer.audience = "https://other.example/mcp"
        way = ClientCredentials("robot", secret=SECRET, issuer=issuer.issuer)
        with pytest.raises(
            NotAuthorized, match="refuses the token that its authorization server has just issued"
        ):
            async with connect(f"{url}/mcp", protocol="mcp", auth=way) as calls:
                await whoami(calls)
        status, challenge = await challenged(f"{url}/mcp", issuer.tokens[-1].access_token)
        assert (status, 'error_description="the token is for another audience"' in challenge) == (
            401,
            True,
        )


async def test_opaque_token_cannot_be_invented(opaque: Server) -> None:
    async with served(shop(opaque)) as url:
        with pytest.raises(Refused, match="401"):
            async with connect(f"{url}/mcp", protocol="mcp", auth="x" * 48) as calls:
                await whoami(calls)


async def login_and_logout(url: str) -> tuple[dict[str, Any], str]:
    """Log in, log out with the command, and return what it printed of the login, and the access
    token.
    """
    async with connect(url, protocol="mcp", auth=Browser(visit=visit)) as calls:
        await whoami(calls)
    (login,) = await FileStore().logins(url)
    run = await asyncio.to_thread(wirecall, "logout", url, "--json")
    assert run.returncode == 0, run.stderr
    (told,) = json.loads(run.stdout)["result"]
    assert await FileStore().logins(url) == []
    return told, login.access_token


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))


@pytest.mark.usefixtures("home")
async def test_logout_revokes_both_tokens(opaque: Server) -> None:
    async with served(shop(opaque)) as url:
        told, token = await login_and_logout(f"{url}/mcp")
        assert told["revoked"] is True
        assert [(each.revoked, each.refresh_revoked) for each in opaque.tokens] == [(True, True)]
        assert (await challenged(f"{url}/mcp", token))[0] == 401


@pytest.mark.usefixtures("home")
async def test_logout_says_that_a_jwt_expires_without_revocation(jwts: Server) -> None:
    """Authlib revokes the refresh token, and refuses to revoke a JWT (RFC 7009, section 2.2.1)."""
    async with served(shop(jwts)) as url:
        told, _ = await login_and_logout(f"{url}/mcp")
        assert [each.refresh_revoked for each in jwts.tokens] == [True]
        assert told["revoked"] is False
        assert told["why"] == f"{jwts.issuer} does not revoke access tokens; this one expires"


async def challenged(url: str, token: str) -> tuple[int, str]:
    """Send a request with a token as it is; return the status and the challenge."""
    http = HttpClient(url)
    await http.open()
    try:
        fields = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
        }
        async with http.request(
            "POST", b'{"jsonrpc":"2.0","id":1,"method":"ping"}', fields
        ) as answer:
            await answer.read()
            return answer.status, answer.headers.get("www-authenticate", "")
    finally:
        await http.aclose()
