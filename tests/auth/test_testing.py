"""`wirecall.testing.auth`: the flows of its authorization server, and each of its faults."""

import base64
import hashlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import msgspec
import pytest

from tests.auth import RESOURCE
from wirecall.auth import Identity, Jwt
from wirecall.testing.auth import AuthFaults, AuthorizationServer
from wirecall.transports.http_client import HttpClient

BACK = "http://127.0.0.1:9/callback"
VERIFIER = "v" * 43
CHALLENGE = (
    base64.urlsafe_b64encode(hashlib.sha256(VERIFIER.encode()).digest()).decode().rstrip("=")
)
FORM = "application/x-www-form-urlencoded"


@pytest.fixture
async def server() -> AsyncIterator[AuthorizationServer]:
    async with AuthorizationServer(scopes=["orders:read", "offline_access"]) as server:
        yield server


async def send(
    server: AuthorizationServer,
    path: str,
    body: Any = None,
    *,
    basic: tuple[str, str] | None = None,
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return the status of a request, its JSON, and the query of the redirect."""
    client = HttpClient(f"{server.issuer}{path}")
    await client.open()
    headers = (
        {}
        if basic is None
        else {"authorization": f"Basic {base64.b64encode(':'.join(basic).encode()).decode()}"}
    )
    is_json = path == "/register"
    if body is None:
        data = b""
    elif is_json:
        data = msgspec.json.encode(body)
    else:
        data = urlencode(body).encode()
    headers["content-type"] = "application/json" if is_json else FORM
    try:
        async with client.request("GET" if body is None else "POST", data, headers) as answer:
            location = urlsplit(answer.headers.get("location", "")).query
            got = await answer.read()
            is_document = answer.media == "application/json" and got
            return (
                answer.status,
                msgspec.json.decode(got) if is_document else {},
                dict(parse_qsl(location)),
            )
    finally:
        await client.aclose()


async def registered(server: AuthorizationServer) -> str:
    status, got, _ = await send(
        server, "/register", {"redirect_uris": [BACK], "token_endpoint_auth_method": "none"}
    )
    assert (status, "client_secret" in got) == (201, False)
    client: str = got["client_id"]
    return client


async def redirected(server: AuthorizationServer, client: str, **more: str) -> dict[str, str]:
    asked = {
        "response_type": "code",
        "client_id": client,
        "redirect_uri": BACK,
        "state": "s",
        "scope": "orders:read",
        "resource": RESOURCE,
        "code_challenge": CHALLENGE,
        "code_challenge_method": "S256",
        **more,
    }
    status, _, got = await send(server, f"/authorize?{urlencode(asked)}")
    assert status == 302
    return got


def exchange(code: str, client: str, **more: str) -> dict[str, str]:
    return {
        "grant_type": "authorization_code",
        "code": code,
        "client_id": client,
        "redirect_uri": BACK,
        "resource": RESOURCE,
        "code_verifier": VERIFIER,
        **more,
    }


async def identity(server: AuthorizationServer, token: str) -> Identity:
    found = await Jwt(server.issuer, resource=RESOURCE).verify(token)
    assert found is not None
    return found


async def test_code_with_pkce_becomes_a_token_that_the_verifier_accepts(
    server: AuthorizationServer,
) -> None:
    client = await registered(server)
    got = await redirected(server, client)
    assert (got["state"], got["iss"]) == ("s", server.issuer)
    status, granted, _ = await send(server, "/token", exchange(got["code"], client))
    assert (status, granted["token_type"], granted["scope"]) == (200, "Bearer", "orders:read")
    found = await identity(server, granted["access_token"])
    assert (found.subject, found.client, found.scopes) == (
        "user",
        client,
        frozenset({"orders:read"}),
    )
    # A code is good once.
    assert (await send(server, "/token", exchange(got["code"], client)))[:2] == (
        400,
        {"error": "invalid_grant"},
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"code_verifier": "w" * 43},
        {"redirect_uri": "http://127.0.0.1:9/other"},
        {"resource": "https://other.example.com"},
        {"code": "invented"},
    ],
)
async def test_code_is_valid_for_its_own_request_only(
    server: AuthorizationServer, wrong: dict[str, str]
) -> None:
    client = await registered(server)
    code = (await redirected(server, client))["code"]
    assert (await send(server, "/token", {**exchange(code, client), **wrong}))[1] == {
        "error": "invalid_grant"
    }


async def test_request_without_pkce_or_of_an_unknown_client_gets_no_code(
    server: AuthorizationServer,
) -> None:
    client = await registered(server)
    assert (await redirected(server, client, code_challenge_method="plain"))[
        "error"
    ] == "invalid_request"
    assert (
        await send(
            server, f"/authorize?{urlencode({'client_id': 'unknown', 'redirect_uri': BACK})}"
        )
    )[0] == 400


async def test_refresh_tokens_rotate(server: AuthorizationServer) -> None:
    client = await registered(server)
    _, granted, _ = await send(
        server, "/token", exchange((await redirected(server, client))["code"], client)
    )
    renewal = {
        "grant_type": "refresh_token",
        "client_id": client,
        "refresh_token": granted["refresh_token"],
    }
    status, renewed, _ = await send(server, "/token", renewal)
    assert (status, renewed["refresh_token"] != granted["refresh_token"]) == (200, True)
    assert (await identity(server, renewed["access_token"])).scopes == {"orders:read"}
    assert (await send(server, "/token", renewal))[1] == {"error": "invalid_grant"}
    server.faults.refuse_refresh = True
    renewal["refresh_token"] = renewed["refresh_token"]
    assert (await send(server, "/token", renewal))[1] == {"error": "invalid_grant"}


async def test_client_credentials_by_basic_and_in_the_form(server: AuthorizationServer) -> None:
    server.clients["robot"] = "pass word"
    asked = {"grant_type": "client_credentials", "resource": RESOURCE, "scope": "orders:read"}
    _, granted, _ = await send(server, "/token", asked, basic=("robot", "pass+word"))
    found = await identity(server, granted["access_token"])
    assert (found.subject, found.client, "refresh_token" in granted) == (None, "robot", False)
    own = {"client_id": "robot", "client_secret": "pass word"}
    assert (await send(server, "/token", {**asked, **own}))[0] == 200
    assert (await send(server, "/token", {**asked, **own, "client_secret": "x"}))[:2] == (
        401,
        {"error": "invalid_client"},
    )


async def test_introspection_and_revocation(server: AuthorizationServer) -> None:
    token = server.token("alice", resource=RESOURCE)
    assert (await send(server, "/introspect", {"token": token}))[1]["active"] is True
    await send(server, "/revoke", {"token": token})
    assert (await send(server, "/introspect", {"token": token}))[1] == {"active": False}
    old = server.token("alice", resource=RESOURCE, lifetime=-1)
    assert (await send(server, "/introspect", {"token": old}))[1] == {"active": False}
    server.faults.inactive = True
    assert (await send(server, "/introspect", {"token": server.token("bob", resource=RESOURCE)}))[
        1
    ] == {"active": False}


async def test_faults_are_those_that_a_client_has_to_notice(server: AuthorizationServer) -> None:
    client = await registered(server)
    metadata = (await send(server, "/.well-known/oauth-authorization-server"))[1]
    assert (metadata["issuer"], metadata["code_challenge_methods_supported"]) == (
        server.issuer,
        ["S256"],
    )
    assert metadata["scopes_supported"] == ["orders:read", "offline_access"]
    server.faults = AuthFaults(
        metadata_issuer="https://evil.test", no_pkce=True, redirect_issuer="https://evil.test"
    )
    metadata = (await send(server, "/.well-known/openid-configuration"))[1]
    assert (metadata["issuer"], "code_challenge_methods_supported" in metadata) == (
        "https://evil.test",
        False,
    )
    assert (await redirected(server, client))["iss"] == "https://evil.test"
    server.faults = AuthFaults(no_redirect_issuer=True, refuse="invalid_scope")
    got = await redirected(server, client)
    assert "iss" not in got
    assert (await send(server, "/token", exchange(got["code"], client)))[:2] == (
        400,
        {"error": "invalid_scope"},
    )
    server.faults = AuthFaults(down=True)
    assert (await send(server, "/jwks"))[0] == 503
    assert server.requests[-1][:2] == ("GET", "/jwks")


async def test_keys_rotate_and_old_ones_can_be_forgotten() -> None:
    server = AuthorizationServer()
    old = server.token("alice", resource=RESOURCE)
    server.rotate()
    assert [key["kid"] for key in server.jwks["keys"]] == ["key-1", "key-2"]
    assert await Jwt(server.issuer, resource=RESOURCE, jwks=server.jwks).verify(old)
    server.forget()
    assert [key["kid"] for key in server.jwks["keys"]] == ["key-2"]
