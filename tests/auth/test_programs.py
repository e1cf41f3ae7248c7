"""Authorization without a person: tokens as they are, functions, client credentials, identities,
and DPoP.
"""

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.auth.world import ISSUER, Request, World, reply, visit
from tests.client.peers import http
from wirecall import App, connect, connect_sync
from wirecall.auth import Browser, ClientCredentials, IdJag, MemoryStore, Stored, Workload
from wirecall.errors import MissingScopes, NotAuthorized, Refused, UsageError


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with World() as made:
        yield made


@pytest.fixture(scope="module")
def key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


async def call(world: World, auth: Any) -> Any:
    async with connect(world.url, auth=auth, discover=False) as calls:
        return await calls.call("price")


# --- tokens ---------------------------------------------------------------------------------------


async def test_token_is_sent_as_it_is(world: World) -> None:
    world.tokens["sk-1"] = ""
    assert await call(world, "sk-1") == "fine"
    with pytest.raises(Refused, match="401"):
        await call(world, "sk-2")
    assert [request.headers["authorization"] for request in world.requests] == [
        "Bearer sk-1",
        "Bearer sk-2",
    ]


@pytest.mark.parametrize("protocol", ["jsonrpc", "mcp"])
async def test_connect_raises_not_authorized_for_a_token_that_is_refused(
    world: World, protocol: Any
) -> None:
    world.challenge = ', error="invalid_token", error_description="the token has expired"'

    async def function() -> str:
        return "sk-3"

    for auth in ("sk-2", function):
        with pytest.raises(NotAuthorized, match="the token has expired") as caught:
            async with connect(world.url, protocol=protocol, auth=auth, discover=False) as calls:
                await calls.call("price")
        assert not isinstance(caught.value, MissingScopes)
        assert (caught.value.status, caught.value.ran) == (401, "no")


async def test_connect_raises_missing_scopes_for_a_token_without_them(world: World) -> None:
    world.tokens["sk-1"] = "prices:read"
    world.needs = frozenset({"orders:write"})
    with pytest.raises(MissingScopes, match="orders:write") as caught:
        await call(world, "sk-1")
    assert (caught.value.scopes, caught.value.status, caught.value.ran) == (
        frozenset({"orders:write"}),
        403,
        "no",
    )
    assert world.count("/rpc") == 1


async def test_function_is_called_again_at_the_next_call_after_a_failure(world: World) -> None:
    given = iter(["old", "older", "new"])
    world.tokens["new"] = ""

    async def token() -> str:
        return next(given)

    async with connect(world.url, auth=token, discover=False) as calls:
        with pytest.raises(NotAuthorized):
            await calls.call("price")
        assert await calls.call("price") == "fine"
    sent = [request.headers["authorization"] for request in world.requests]
    assert sent == ["Bearer old", "Bearer older", "Bearer older", "Bearer new"]


async def test_function_is_called_again_when_its_token_is_refused(world: World) -> None:
    given = iter(["old", "new"])
    world.tokens["new"] = ""

    async def token() -> str:
        return next(given)

    async with connect(world.url, auth=token, discover=False) as calls:
        assert await calls.call("price") == "fine"
        assert await calls.call("price") == "fine"
    assert [request.headers["authorization"] for request in world.requests] == [
        "Bearer old",
        "Bearer new",
        "Bearer new",
    ]


async def test_function_that_returns_the_refused_token_is_not_called_forever(world: World) -> None:
    async def token() -> str:
        return "old"

    with pytest.raises(Refused, match="401"):
        await call(world, token)
    assert world.count("/rpc") == 1


@pytest.mark.parametrize("given", [None, 5, "", "two\nlines"])
async def test_function_must_return_a_token(world: World, given: Any) -> None:
    async def token() -> Any:
        return given

    with pytest.raises(UsageError, match="is not a token"):
        await call(world, token)
    assert not world.requests


@pytest.mark.parametrize("auth", ["", "two\nlines", 5])
def test_auth_of_another_type_is_refused(auth: Any) -> None:
    with pytest.raises(UsageError, match="auth="):
        connect("http://127.0.0.1:1/rpc", auth=auth)


def test_auth_is_for_http_and_the_only_authorization() -> None:
    with pytest.raises(UsageError, match="for HTTP"):
        connect(App("shop"), auth="sk-1")
    with pytest.raises(UsageError, match="Authorization header"):
        connect("http://127.0.0.1:1/rpc", auth="sk-1", headers={"authorization": "Bearer x"})


# --- credentials ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("methods", "in_header"),
    [(None, True), (["client_secret_basic"], True), (["client_secret_post"], False)],
)
async def test_secret_is_sent_where_the_issuer_expects_it(
    world: World, methods: list[str] | None, in_header: bool
) -> None:
    world.issuer = {"token_endpoint_auth_methods_supported": methods}
    world.challenge = ', scope="read"'
    assert await call(world, ClientCredentials("me:you", secret="a b", issuer=world.base)) == "fine"
    (request,) = world.asked("/token")
    assert request.form["grant_type"] == "client_credentials"
    assert request.form["scope"] == "read"
    assert request.form["resource"] == world.url
    if in_header:  # both encoded as in a form (RFC 6749, section 2.3.1)
        assert (
            request.headers["authorization"]
            == f"Basic {base64.b64encode(b'me%3Ayou:a%20b').decode()}"
        )
        assert "client_secret" not in request.form
    else:
        assert (request.form["client_id"], request.form["client_secret"]) == ("me:you", "a b")


async def test_key_signs_an_assertion_for_the_issuer(
    world: World, key: ec.EllipticCurvePrivateKey
) -> None:
    form = (
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    assert (
        await call(
            world, ClientCredentials("me", key=key.private_bytes(*form).decode(), issuer=world.base)
        )
        == "fine"
    )
    (request,) = world.asked("/token")
    assert (
        request.form["client_assertion_type"]
        == "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
    )
    claims = jwt.decode(
        request.form["client_assertion"],
        key.public_key(),
        algorithms=["ES256"],
        audience=world.base,
    )
    assert claims["iss"] == claims["sub"] == "me"
    assert claims["jti"]


async def test_key_that_is_not_a_key_is_not_shown(world: World) -> None:
    with pytest.raises(UsageError, match="cannot sign") as caught:
        await call(world, ClientCredentials("me", key="not a key", issuer=world.base))
    assert "not a key" not in str(caught.value)


async def test_credentials_need_an_issuer() -> None:
    for make in (
        lambda: ClientCredentials("me", secret="hush"),
        lambda: Workload("jwt"),
        lambda: IdJag(
            client_id="me", id_token="t", idp="https://idp.example/token", idp_client_id="me"
        ),
    ):
        with pytest.raises(UsageError, match="needs issuer="):
            make()


async def test_program_asks_for_more_scopes_once(world: World) -> None:
    way = ClientCredentials("me", secret="hush", issuer=world.base, scopes="read")
    world.needs = frozenset({"write"})
    assert await call(world, way) == "fine"
    assert [request.form["scope"] for request in world.asked("/token")] == ["read", "read write"]


async def test_workload_sends_the_jwt_of_its_platform_once(world: World) -> None:
    async def read() -> str:
        return "platform-jwt"

    assert await call(world, Workload(read, issuer=world.base)) == "fine"
    (request,) = world.asked("/token")
    assert request.form["grant_type"] == "urn:ietf:params:oauth:grant-type:jwt-bearer"
    assert request.form["assertion"] == "platform-jwt"
    assert "client_id" not in request.form


async def test_workload_that_is_refused_does_not_try_again(world: World) -> None:
    world.instead["/token"] = reply({"error": "invalid_grant"}, "400 Bad Request")
    with pytest.raises(NotAuthorized, match="invalid_grant"):
        await call(world, Workload("platform-jwt", issuer=world.base))
    assert world.count("/token") == 1


async def test_id_token_becomes_a_grant_for_the_server(world: World) -> None:
    world.instead["/idp"] = reply({"access_token": "id-jag", "token_type": "N_A"})
    way = IdJag(
        client_id="me",
        client_secret="hush",
        issuer=world.base,
        id_token=lambda: "id-token",
        idp=f"{world.base}/idp",
        idp_client_id="me-there",
    )
    assert await call(world, way) == "fine"
    exchange = world.asked("/idp")[0].form
    grant = world.asked("/token")[0].form
    assert exchange == {
        "grant_type": "urn:ietf:params:oauth:grant-type:token-exchange",
        "requested_token_type": "urn:ietf:params:oauth:token-type:id-jag",
        "audience": world.base,
        "resource": world.url,
        "subject_token": "id-token",
        "subject_token_type": "urn:ietf:params:oauth:token-type:id_token",
        "client_id": "me-there",
    }
    assert grant["assertion"] == "id-jag"
    assert "id-token" not in str(grant)


async def test_credentials_do_not_need_the_metadata_of_the_server(world: World) -> None:
    world.instead["/rpc"] = lambda request: (
        None if "authorization" in request.headers else http(b"", "401 Unauthorized")
    )
    for path in (
        "/.well-known/oauth-protected-resource/rpc",
        "/.well-known/oauth-protected-resource",
    ):
        world.instead[path] = http(b"", "404 Not Found")
    assert await call(world, ClientCredentials("me", secret="hush", issuer=world.base)) == "fine"
    assert world.asked("/token")[0].form["resource"] == world.url
    assert world.count(ISSUER) == 1


# --- stored logins --------------------------------------------------------------------------------


async def test_stored_login_is_refreshed_and_never_made(world: World) -> None:
    store = MemoryStore()
    with pytest.raises(NotAuthorized, match=f"wirecall login {world.url}"):
        await call(world, Stored(store=store))
    assert await call(world, Browser(visit=visit, store=store)) == "fine"
    world.tokens.clear()
    assert await call(world, Stored(store=store)) == "fine"
    world.needs = frozenset({"write"})
    with pytest.raises(MissingScopes, match=f"wirecall login {world.url} --scope 'write'"):
        await call(world, Stored(store=store))
    world.tokens.clear()
    world.refresh_tokens.clear()
    with pytest.raises(NotAuthorized, match=f"wirecall login {world.url}"):
        await call(world, Stored(store=store))
    assert world.count("/authorize") == 1


# --- DPoP -----------------------------------------------------------------------------------------


def _proof(request: Request) -> dict[str, Any]:
    """Return the claims of a proof, whose signature is that of the key in it (RFC 9449, section
    4.3).
    """
    text = request.headers["dpop"]
    head = jwt.get_unverified_header(text)
    assert head["typ"] == "dpop+jwt"
    assert "d" not in head["jwk"]
    claims: dict[str, Any] = jwt.decode(text, jwt.PyJWK(head["jwk"], "ES256"), algorithms=["ES256"])
    return {**claims, "jwk": json.dumps(head["jwk"])}


async def test_dpop_binds_requests_to_one_key(world: World) -> None:
    def token(request: Request) -> bytes:
        if _proof(request).get("nonce") != "n1":
            return reply({"error": "use_dpop_nonce"}, "400 Bad Request", "DPoP-Nonce: n1")
        return reply({"access_token": "bound", "token_type": "DPoP"})

    def call_of(request: Request) -> bytes | None:
        if "dpop" in request.headers and _proof(request).get("nonce") != "n2":
            challenge = 'WWW-Authenticate: DPoP error="use_dpop_nonce"'
            return http(b"", "401 Unauthorized", challenge, "DPoP-Nonce: n2")
        return None

    world.instead = {"/token": token, "/rpc": call_of}
    world.tokens["bound"] = ""
    way = ClientCredentials("me", secret="hush", issuer=world.base, dpop=True)
    async with connect(world.url, auth=way, discover=False) as calls:
        assert await calls.call("price") == "fine"
        assert await calls.call("price") == "fine"
    proofs = [_proof(request) for request in world.requests if "dpop" in request.headers]
    assert len({proof["jwk"] for proof in proofs}) == 1
    assert len({proof["jti"] for proof in proofs}) == len(proofs)
    last = world.requests[-1]
    assert last.headers["authorization"] == "DPoP bound"
    assert (proofs[-1]["htm"], proofs[-1]["htu"]) == ("POST", world.url)
    assert (
        proofs[-1]["ath"]
        == base64.urlsafe_b64encode(hashlib.sha256(b"bound").digest()).rstrip(b"=").decode()
    )
    assert "ath" not in proofs[0]


async def test_dpop_refuses_a_token_that_is_not_bound(world: World) -> None:
    with pytest.raises(NotAuthorized, match="does not bind"):
        await call(world, ClientCredentials("me", secret="hush", issuer=world.base, dpop=True))


# --- what is loaded -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("auth", "loaded"),
    [
        ("None", set()),
        ("Browser()", {"wirecall.auth"}),
        ("ClientCredentials('me', secret='x', issuer='y')", {"wirecall.auth"}),
    ],
)
def test_client_loads_what_it_uses(auth: str, loaded: set[str]) -> None:
    script = f"""
import sys, wirecall.client.connect
if {auth!r} != "None":
    from wirecall.auth import Browser, ClientCredentials
wirecall.connect("https://a.example/mcp", auth={auth})
print(*({{"wirecall.auth", "jwt", "cryptography", "keyring"}} & sys.modules.keys()))
"""
    printed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert set(printed.split()) == loaded


def test_blocking_client_accepts_auth_too(world: World) -> None:
    with pytest.raises(UsageError, match="auth="):
        connect_sync(world.url, auth=" ")
