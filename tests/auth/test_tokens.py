"""Which tokens are accepted: by an issuer's keys, by introspection, and from a fixed list."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.auth import METADATA, NOW, RESOURCE, Clock, Shop, call
from tests.client.peers import PATIENCE, Listening, Reader, Writer, http, served, until
from tests.transports import Client, ask, piece, scope_of
from wirecall import App, Context, Unauthorized, UsageError
from wirecall.auth import Access, Identity, Introspection, Jwt, Tokens, Verifier, digest
from wirecall.testing.auth import AuthFaults, AuthorizationServer
from wirecall.transports.http_server import HttpServer
from wirecall.transports.serve import ServerName

WHOAMI = json.dumps(call("whoami")).encode()


def make_server(*auth: Any, clock: Clock | None = None, **options: Any) -> HttpServer:
    app = App("shop", auth=Access(*auth, clock=clock or Clock()), **options)

    @app.query
    def whoami(ctx: Context) -> str:
        return ctx.caller

    return app.asgi()


async def status(server: HttpServer, token: str) -> tuple[int, str]:
    """Return the status of a call with a token, and the caller's name or the reason of the refusal."""
    reply = await ask(server, body=WHOAMI, headers=[("authorization", f"Bearer {token}")])
    got = reply.json.get("result") or reply.json["error"]["message"]
    return reply.status, got


# --- what is wrong with a token -------------------------------------------------------------------


def crafted(shop: Shop, header: dict[str, Any], signature: bytes = b"", **claims: Any) -> str:
    """A token with any header, and a signature that was not made with a key of the issuer."""
    payload = {
        "iss": shop.issuer.issuer,
        "sub": "alice",
        "aud": RESOURCE,
        "exp": int(shop.clock.now) + 60,
        **claims,
    }
    parts = [json.dumps(header).encode(), json.dumps(payload).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


def hs256(shop: Shop) -> str:
    """A token signed with the public key of the issuer as the secret of an HMAC."""
    import hashlib
    import hmac

    key = jwt.PyJWK(shop.issuer.jwks["keys"][0]).key.public_bytes(
        Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    )
    unsigned = crafted(shop, {"alg": "HS256", "typ": "at+jwt", "kid": "key-1"})[:-1]
    seal = hmac.new(key, unsigned.encode(), hashlib.sha256).digest()
    return f"{unsigned}.{base64.urlsafe_b64encode(seal).rstrip(b'=').decode()}"


def other_key(shop: Shop, **header: Any) -> str:
    """A token of another key under the name of the issuer's."""
    claims = {
        "iss": shop.issuer.issuer,
        "sub": "alice",
        "aud": RESOURCE,
        "exp": int(shop.clock.now) + 60,
    }
    return jwt.encode(
        claims, ec.generate_private_key(ec.SECP256R1()), "ES256", {"kid": "key-1", **header}
    )


BAD: dict[str, Callable[[Shop], str]] = {
    "another issuer": lambda shop: shop.token(iss="https://evil.example.com"),
    "the issuer with a slash": lambda shop: shop.token(iss=f"{shop.issuer.issuer}/"),
    "no issuer": lambda shop: shop.token(iss=None),
    "another audience": lambda shop: shop.token(resource="https://other.example.com/mcp"),
    "the audience with a slash": lambda shop: shop.token(resource=f"{RESOURCE}/"),
    "an audience that begins the same": lambda shop: shop.token(resource=f"{RESOURCE}2"),
    "no audience": lambda shop: shop.token(aud=None),
    "an audience that is a number": lambda shop: shop.token(aud=7),
    "expired": lambda shop: shop.token(exp=int(shop.clock.now) - 30),
    "no expiry": lambda shop: shop.token(exp=None),
    "an expiry that is a text": lambda shop: crafted(shop, {"alg": "ES256"}, exp="never"),
    "an expiry that is not a time": lambda shop: shop.token(exp=10**400),
    "an expiry that is not a number": lambda shop: shop.token(exp=float("nan")),
    "an expiry without an end": lambda shop: shop.token(exp=float("inf")),
    "a beginning that is not a time": lambda shop: shop.token(nbf=-(10**400)),
    "not valid yet": lambda shop: shop.token(nbf=int(shop.clock.now) + 31),
    "neither subject nor client": lambda shop: shop.token(subject=None),
    "alg none": lambda shop: crafted(shop, {"alg": "none", "typ": "at+jwt"}),
    "alg none in other letters": lambda shop: crafted(shop, {"alg": "nOnE"}),
    "no alg": lambda shop: crafted(shop, {"typ": "JWT"}),
    "HS256 with the public key": hs256,
    "an alg that the key is not for": lambda shop: crafted(
        shop, {"alg": "RS256", "kid": "key-1"}, b"x" * 256
    ),
    "crit": lambda shop: shop.token(header={"crit": ["exp"], "exp": 1}),
    "crit that is empty": lambda shop: shop.token(header={"crit": []}),
    "an ID-JAG": lambda shop: shop.token(header={"typ": "oauth-id-jag+jwt"}),
    "a DPoP proof": lambda shop: shop.token(header={"typ": "dpop+jwt"}),
    "a typ that is a number": lambda shop: crafted(shop, {"alg": "ES256", "typ": 7}),
    "an unknown key": lambda shop: shop.token(header={"kid": "key-9"}),
    "its own key in the header": lambda shop: other_key(shop, jwk=shop.issuer.jwks["keys"][0]),
    "another key by the same name": other_key,
    "no signature": lambda shop: shop.token().rpartition(".")[0] + ".",
    "a changed signature": lambda shop: shop.token()[:-4] + "AAAA",
    "truncated": lambda shop: shop.token()[:-20],
    "one part": lambda shop: shop.token().partition(".")[0],
    "four parts": lambda shop: shop.token() + ".eA",
    "a payload that is not JSON": lambda shop: "eyJhbGciOiJFUzI1NiJ9.eA.eA",
    "a payload that is a list": lambda shop: "eyJhbGciOiJFUzI1NiJ9.W10.eA",
    "1 MB": lambda shop: shop.token(more="x" * (1 << 20)),
    "not a JWT": lambda shop: "secret",
}


@pytest.mark.parametrize("bad", BAD)
async def test_bad_token_gets_401_and_is_not_written_anywhere(
    bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shop = Shop()
    token = BAD[bad](shop)
    for send in (
        shop.rpc(token, call("whoami")),
        shop.mcp(token, "tools/call", {"name": "whoami"}),
    ):
        answer = await send
        assert (answer.status, 'error="invalid_token"' in answer.challenge) == (401, True), (
            answer.body
        )
        assert "result" not in answer.json
        written = caplog.text + answer.body.decode() + str(answer.headers)
        assert not any(len(part) > 5 and part in written for part in token.split("."))


async def test_token_that_is_too_long_is_a_bad_token() -> None:
    answer = await Shop().rpc("x" * (1 << 20), call("whoami"))
    assert answer.status == 401
    assert answer.challenge == (
        'Bearer error="invalid_token", error_description="the token is longer than 16384 bytes", '
        f'resource_metadata="{METADATA}"'
    )


@pytest.mark.parametrize("more", [("x-long", "x" * (32 << 10)), ("cookie", "x" * (32 << 10))])
async def test_header_that_is_too_long_without_its_token_is_431(more: tuple[str, str]) -> None:
    for token in ("x", "x" * (1 << 20)):
        assert (await Shop().ask("POST", "/rpc", token, call("whoami"), [more])).status == 431


@pytest.mark.parametrize("server", ["uvicorn", "granian"])
@pytest.mark.parametrize(("size", "status"), [(40 << 10, 401), (1 << 20, 431)])
async def test_parser_refuses_a_token_beyond_its_buffer(
    server: ServerName,
    size: int,
    status: int,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Beyond about twice the limit of a header, the application does not see the request."""
    caplog.set_level(logging.DEBUG)
    token = "secret" * (size // 6)
    head = (
        f"POST /rpc HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
        "Content-Length: 0\r\n\r\n"
    )
    async with served(App("shop", auth=Tokens({})), server) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(url).port)
        writer.write(head.encode())
        async with asyncio.timeout(PATIENCE):
            first = await reader.readline()
        writer.transport.abort()
    assert int(first.split()[1]) == status
    assert "secret" not in caplog.text + "".join(capfd.readouterr())


async def test_two_headers_are_refused_whichever_is_valid() -> None:
    shop = Shop()
    good = ("authorization", f"Bearer {shop.token()}")
    assert (await shop.ask("POST", "/rpc", None, call("whoami"), [good])).status == 200
    for second in (good, ("authorization", "Bearer other"), ("authorization", "Basic YTpi")):
        for fields in ([good, second], [second, good]):
            answer = await shop.ask("POST", "/rpc", None, call("whoami"), fields)
            assert answer.status == 401, fields
            assert answer.challenge.startswith("Bearer ")


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ("RS256", rsa.generate_private_key(65537, 2048)),
        ("PS256", rsa.generate_private_key(65537, 2048)),
        ("ES256", ec.generate_private_key(ec.SECP256R1())),
        ("EdDSA", ed25519.Ed25519PrivateKey.generate()),
    ],
)
@pytest.mark.parametrize("kid", ["main", None])
async def test_allowed_algorithms_verify_with_and_without_a_key_id(
    algorithm: str, key: Any, kid: str | None
) -> None:
    found = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
    jwks = {
        "keys": [
            {"kty": "oct", "k": "AAAA"},
            {**found, "kid": "main"},
            {"kty": "RSA", "n": "AQAB", "e": "AQAB"},
        ]
    }
    server = make_server(Jwt("https://auth.test", resource=RESOURCE, jwks=jwks, clock=Clock()))
    claims = {"iss": "https://auth.test", "sub": "alice", "aud": [RESOURCE], "exp": NOW + 9}
    assert await status(
        server, jwt.encode(claims, key, algorithm, {"kid": kid} if kid else None)
    ) == (
        200,
        "https://auth.test alice",
    )


async def test_rsa_key_below_2048_bits_is_not_used(recwarn: pytest.WarningsRecorder) -> None:
    key = rsa.generate_private_key(65537, 1024)
    jwks = {"keys": [jwt.get_algorithm_by_name("RS256").to_jwk(key.public_key(), as_dict=True)]}
    server = make_server(Jwt("https://auth.test", resource=RESOURCE, jwks=jwks, clock=Clock()))
    header = {"alg": "RS256"}
    claims = {"iss": "https://auth.test", "sub": "a", "aud": RESOURCE, "exp": NOW + 9}
    parts = [
        base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=")
        for each in (header, claims)
    ]
    from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
    from cryptography.hazmat.primitives.hashes import SHA256

    seal = key.sign(b".".join(parts), PKCS1v15(), SHA256())
    token = b".".join([*parts, base64.urlsafe_b64encode(seal).rstrip(b"=")]).decode()
    assert (await status(server, token))[0] == 401


async def test_clocks_may_differ_by_the_leeway() -> None:
    shop = Shop()
    for token in (
        shop.token(exp=int(NOW) - 29),
        shop.token(nbf=int(NOW) + 29),
        shop.token(iat=int(NOW) + 1000),
    ):
        assert (await shop.rpc(token, call("whoami"))).status == 200


# --- the identity ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "scopes", "client"),
    [
        ({"scope": "a b", "azp": "web"}, ["a", "b"], "web"),  # Keycloak
        ({"scp": ["a", "b"], "cid": "web"}, ["a", "b"], "web"),  # Okta
        ({"scp": "a b", "appid": "web"}, ["a", "b"], "web"),  # Entra
        ({"client_id": "web", "azp": "other"}, [], "web"),  # RFC 9068
    ],
)
async def test_scopes_and_client_are_read_as_each_issuer_writes_them(
    claims: dict[str, Any], scopes: list[str], client: str
) -> None:
    shop = Shop()
    answer = await shop.rpc(shop.token(team="tea", **claims), call("whoami"))
    assert answer.json["result"] == {
        "caller": "https://auth.test alice",
        "subject": "alice",
        "client": client,
        "scopes": scopes,
        "team": "tea",
    }


async def test_client_without_a_person_is_the_caller_itself() -> None:
    shop = Shop()
    answer = await shop.mcp(
        shop.token(subject=None, client="robot"), "tools/call", {"name": "whoami"}
    )
    assert answer.json["result"]["structuredContent"]["caller"] == "https://auth.test robot"


async def test_name_maps_an_identity_to_a_caller() -> None:
    shop = Shop(name=lambda identity: f"user:{identity.subject}")
    assert (await shop.rpc(shop.token(), call("whoami"))).json["result"]["caller"] == "user:alice"


async def test_token_without_a_subject_is_401_where_the_subject_names_the_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shop = Shop(name=lambda identity: identity.subject)
    assert (await shop.rpc(shop.token(), call("whoami"))).json["result"]["caller"] == "alice"
    reply = await shop.rpc(shop.token(subject=None, client="robot"), call("whoami"))
    assert reply.status == 401
    assert 'error="invalid_token"' in reply.headers["www-authenticate"]
    assert reply.json["error"]["message"] == "the token does not name its caller"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_verifier_that_returns_an_identity_without_a_name_refuses_the_token() -> None:
    found = await status(make_server(lambda token: Identity(None)), "x")
    assert found == (401, "the token does not name its caller")


# --- caches ---------------------------------------------------------------------------------------


class Counting(Verifier):
    """Counts the questions that it receives, and answers when the test lets it."""

    keeps = 300.0

    def __init__(self, expires: float | None = None) -> None:
        self.asked: list[str] = []
        self.begun = asyncio.Event()
        self.may = asyncio.Event()
        self.may.set()
        self.expires = expires

    async def verify(self, token: str) -> Identity | None:
        self.asked.append(token)
        self.begun.set()
        await self.may.wait()
        return Identity(f"name of {token}", expires=self.expires) if token != "bad" else None


async def test_new_token_costs_one_verification() -> None:
    clock = Clock()
    verifier = Counting()
    server = make_server(verifier, clock=clock)
    for _ in range(3):
        assert await status(server, "one") == (200, "name of one")
    assert await status(server, "two") == (200, "name of two")
    assert verifier.asked == ["one", "two"]
    clock.now += 299
    await status(server, "one")
    assert verifier.asked == ["one", "two"]
    clock.now += 2
    await status(server, "one")
    assert verifier.asked == ["one", "two", "one"]


async def test_many_tokens_are_verified_once_each() -> None:
    verifier = Counting()
    server = make_server(verifier)
    tokens = [f"token-{number}" for number in range(200)]
    for token in tokens * 2:
        assert await status(server, token) == (200, f"name of {token}")
    assert verifier.asked == tokens


async def test_requests_with_the_same_new_token_share_one_verification() -> None:
    verifier = Counting()
    server = make_server(verifier)
    verifier.may.clear()
    waiting = [asyncio.create_task(status(server, "one")) for _ in range(5)]
    await verifier.begun.wait()
    waiting[0].cancel()  # the client of the first request leaves
    verifier.may.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert found[1:] == [(200, "name of one")] * 4
    assert verifier.asked == ["one"]


async def test_token_is_not_remembered_beyond_its_expiry() -> None:
    clock = Clock()
    verifier = Counting(expires=NOW + 10)
    server = make_server(verifier, clock=clock)
    await status(server, "one")
    clock.now += 10
    await status(server, "one")
    assert verifier.asked == ["one", "one"]


async def test_refused_token_is_not_remembered() -> None:
    verifier = Counting()
    server = make_server(verifier)
    assert [(await status(server, "bad"))[0] for _ in range(2)] == [401, 401]
    assert verifier.asked == ["bad", "bad"]


async def test_expired_token_is_refused_although_it_was_verified_before() -> None:
    shop = Shop()
    token = shop.token(lifetime=100)
    assert (await shop.rpc(token, call("whoami"))).status == 200
    shop.clock.now += 131
    assert (await shop.rpc(token, call("whoami"))).status == 401


# --- the keys of an issuer ------------------------------------------------------------------------


@pytest.fixture
async def issuer() -> AsyncIterator[AuthorizationServer]:
    async with AuthorizationServer(clock=Clock()) as server:
        yield server


def paths(issuer: AuthorizationServer) -> list[str]:
    return [path for _, path, _ in issuer.requests]


async def test_keys_are_found_by_the_metadata_and_kept_for_an_hour(
    issuer: AuthorizationServer,
) -> None:
    clock = Clock()
    server = make_server(Jwt(issuer.issuer, resource=RESOURCE, clock=clock), clock=clock)
    for subject in ("alice", "bob"):
        token = issuer.token(subject, resource=RESOURCE, exp=NOW + 9000)
        assert await status(server, token) == (200, f"{issuer.issuer} {subject}")
    assert paths(issuer) == ["/.well-known/oauth-authorization-server", "/jwks"]
    clock.now += 3601
    assert (await status(server, issuer.token("carol", resource=RESOURCE, exp=NOW + 9000)))[
        0
    ] == 200
    assert len(paths(issuer)) == 4


async def test_new_tokens_at_once_share_one_fetch_of_the_keys(issuer: AuthorizationServer) -> None:
    server = make_server(Jwt(issuer.issuer, resource=RESOURCE, clock=Clock()))
    found = await asyncio.gather(
        *(status(server, issuer.token(f"user {n}", resource=RESOURCE)) for n in range(10))
    )
    assert {code for code, _ in found} == {200}
    assert paths(issuer) == ["/.well-known/oauth-authorization-server", "/jwks"]


async def test_unknown_key_is_looked_for_at_most_every_30_seconds(
    issuer: AuthorizationServer,
) -> None:
    clock = Clock()
    server = make_server(
        Jwt(issuer.issuer, resource=RESOURCE, jwks=f"{issuer.issuer}/jwks", clock=clock),
        clock=clock,
    )
    await status(server, issuer.token("alice", resource=RESOURCE))
    issuer.rotate()
    token = issuer.token("alice", resource=RESOURCE)
    assert (await status(server, token))[0] == 401
    assert len(paths(issuer)) == 1
    clock.now += 30
    assert (await status(server, token))[0] == 200
    assert (await status(server, issuer.token("a", resource=RESOURCE, header={"kid": "invented"})))[
        0
    ] == 401
    assert len(paths(issuer)) == 2


async def test_issuer_that_is_down_causes_503_and_old_keys_remain_in_use(
    issuer: AuthorizationServer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    server = make_server(Jwt(issuer.issuer, resource=RESOURCE, clock=clock), clock=clock)
    issuer.faults.down = True
    token = issuer.token("alice", resource=RESOURCE, exp=NOW + 9000)
    reply = await ask(server, body=WHOAMI, headers=[("authorization", f"Bearer {token}")])
    assert (reply.status, reply.headers["retry-after"], "www-authenticate" in reply.headers) == (
        503,
        "2",
        False,
    )
    assert token not in caplog.text
    issuer.faults.down = False
    clock.now += 1
    assert (await status(server, token))[0] == 200
    # An hour later the keys are old, and cannot be fetched: they remain in use. Another key may
    # exist.
    issuer.faults.down = True
    clock.now += 3601
    assert (await status(server, issuer.token("bob", resource=RESOURCE, exp=NOW + 9000)))[0] == 200
    issuer.rotate()
    assert (await status(server, issuer.token("bob", resource=RESOURCE, exp=NOW + 9000)))[0] == 503


async def test_metadata_of_another_issuer_is_not_used(issuer: AuthorizationServer) -> None:
    issuer.faults.metadata_issuer = "https://evil.example.com"
    server = make_server(Jwt(issuer.issuer, resource=RESOURCE, clock=Clock()))
    assert (await status(server, issuer.token("alice", resource=RESOURCE)))[0] == 503
    assert paths(issuer) == [
        "/.well-known/oauth-authorization-server",
        "/.well-known/openid-configuration",
    ]


# --- introspection --------------------------------------------------------------------------------


def introspection(issuer: AuthorizationServer, clock: Clock) -> Introspection:
    url = f"{issuer.issuer}/introspect"
    return Introspection(url, "rs", "p:w %", issuer=issuer.issuer, resource=RESOURCE, clock=clock)


async def test_introspection_accepts_what_is_active_and_for_this_server(
    issuer: AuthorizationServer,
) -> None:
    clock = Clock()
    server = make_server(introspection(issuer, clock), clock=clock)
    token = issuer.token("alice", resource=RESOURCE)
    for _ in range(2):
        assert await status(server, token) == (200, f"{issuer.issuer} alice")
    [(method, path, form)] = issuer.requests
    assert (method, path, form) == (
        "POST",
        "/introspect",
        {"token": token, "token_type_hint": "access_token"},
    )
    assert (await status(server, issuer.token("alice", resource="https://other.example.com")))[
        0
    ] == 401
    assert (await status(server, issuer.token("alice", resource=RESOURCE, aud=None)))[0] == 401
    assert (
        await status(server, issuer.token("alice", resource=RESOURCE, iss="https://evil.test"))
    )[0] == 401
    assert (await status(server, issuer.token("alice", resource=RESOURCE, nbf=NOW + 60)))[0] == 401
    assert (await status(server, "unknown"))[0] == 401


async def test_revoked_token_is_valid_for_a_minute_at_most(issuer: AuthorizationServer) -> None:
    clock = Clock()
    server = make_server(introspection(issuer, clock), clock=clock)
    token = issuer.token("alice", resource=RESOURCE)
    await status(server, token)
    issuer.revoke(token)
    clock.now += 60
    assert (await status(server, token))[0] == 401


async def test_introspection_refuses_an_expiry_that_is_not_a_time(
    issuer: AuthorizationServer,
) -> None:
    issuer.faults.body = b'{"active":true,"sub":"a","aud":"%s","exp":1%s}' % (
        RESOURCE.encode(),
        b"0" * 400,
    )
    assert await status(make_server(introspection(issuer, Clock())), "one") == (
        401,
        "the token is not valid",
    )


class Endpoint(Listening):
    """An introspection endpoint that knows every token, and counts its connections."""

    PATH = "/introspect"

    def __init__(self, *, hangs_up: bool = False) -> None:
        super().__init__()
        self.connections = self.open = self.asked = 0
        self._hangs_up = hangs_up

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        self.open += 1
        try:
            with suppress(asyncio.IncompleteReadError):
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    await reader.readexactly(
                        int(head.lower().partition(b"content-length:")[2].split()[0])
                    )
                    self.asked += 1
                    writer.write(
                        http(json.dumps({"active": True, "sub": "alice", "aud": RESOURCE}).encode())
                    )
                    await writer.drain()
                    if self._hangs_up:  # as an idle connection is closed while a request arrives
                        await reader.read(1)
                        return
        finally:
            self.open -= 1


@pytest.mark.parametrize("hangs_up", [False, True])
async def test_introspection_keeps_its_connection_while_a_server_is_open(hangs_up: bool) -> None:
    async with Endpoint(hangs_up=hangs_up) as endpoint:
        server = make_server(
            Introspection(
                endpoint.url, "shop", "hush", issuer="https://auth.test", resource=RESOURCE
            )
        )
        for _ in range(2):  # a server may open again
            await server.open()
            before = endpoint.connections
            for number in range(3):
                assert await status(server, f"token-{before}-{number}") == (
                    200,
                    "https://auth.test alice",
                )
            if not hangs_up:
                assert (endpoint.connections - before, endpoint.open) == (1, 1)
            await server.aclose()
            await until(lambda: not endpoint.open)
    assert hangs_up or (endpoint.connections, endpoint.asked) == (2, 6)


async def test_introspection_endpoint_that_is_down_causes_503(issuer: AuthorizationServer) -> None:
    issuer.faults = AuthFaults(down=True)
    server = make_server(introspection(issuer, Clock()))
    assert (await status(server, issuer.token("alice", resource=RESOURCE)))[0] == 503


# --- fixed tokens, functions and lists ------------------------------------------------------------


async def test_fixed_tokens_are_known_by_their_digests() -> None:
    server = make_server(Tokens({digest("secret"): Identity("ci")}))
    assert await status(server, "secret") == (200, "ci")
    assert (await status(server, "secret2"))[0] == 401


async def test_function_verifies_tokens() -> None:
    def verify(token: str) -> Identity | str | None:
        if token == "refused":
            raise Unauthorized("not on Sundays")
        known: dict[str, Identity | str] = {
            "a": "alice",
            "b": Identity("bob", issuer="https://auth.test"),
        }
        return known.get(token)

    async def later(token: str) -> str | None:
        return "later" if token == "c" else None

    server = make_server(verify, later)
    assert await status(server, "a") == (200, "alice")
    assert await status(server, "b") == (200, "https://auth.test bob")
    assert await status(server, "c") == (200, "later")
    assert await status(server, "d") == (401, "the token is not for this server")
    assert await status(server, "refused") == (401, "not on Sundays")


async def test_first_verifier_that_knows_a_token_decides(issuer: AuthorizationServer) -> None:
    shop = Shop()
    ours = Jwt(shop.issuer.issuer, resource=RESOURCE, jwks=shop.issuer.jwks, clock=shop.clock)
    theirs = Jwt(issuer.issuer, resource=RESOURCE, clock=shop.clock)
    server = make_server(ours, theirs, Tokens({digest("secret"): Identity("ci")}))
    assert await status(server, shop.token()) == (200, "https://auth.test alice")
    assert paths(issuer) == []
    assert await status(server, issuer.token("bob", resource=RESOURCE)) == (
        200,
        f"{issuer.issuer} bob",
    )
    assert await status(server, "secret") == (200, "ci")
    # An issuer that is down does not affect the tokens of the others.
    issuer.faults.down = True
    assert (await status(server, "secret"))[0] == 200


async def test_verifier_that_returns_another_type_is_an_error_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = make_server(lambda token: NUMBER)
    assert await status(server, "a") == (500, "Internal error")
    assert "must return an Identity" in caplog.text


# --- mistakes -------------------------------------------------------------------------------------

NUMBER: Any = 7
MISTAKES: dict[str, Callable[[], object]] = {
    "both": lambda: App("a", auth=lambda token: token, authenticate=lambda headers: "x"),
    "not a verifier": lambda: App("a", auth=NUMBER),
    "an empty list": lambda: App("a", auth=[]),
    "no audience": lambda: Jwt("https://a.test", resource=RESOURCE, audience=[]),
    "an empty audience": lambda: Jwt("https://a.test", resource=RESOURCE, audience=""),
    "http": lambda: Jwt("http://a.test", resource=RESOURCE),
    "http for keys": lambda: Jwt("https://a.test", resource=RESOURCE, jwks="http://a.test/jwks"),
    "a shared secret": lambda: Jwt("https://a.test", resource=RESOURCE, algorithms=["HS256"]),
    "alg none": lambda: Jwt("https://a.test", resource=RESOURCE, algorithms=["none"]),
    "a fragment": lambda: Jwt("https://a.test", resource=f"{RESOURCE}#x"),
    "a slash": lambda: Jwt("https://a.test", resource="https://api.example.com/"),
    "two resources": lambda: Access(
        Jwt("https://a.test", resource=RESOURCE),
        Jwt("https://b.test", resource="https://other.test/mcp"),
    ),
    "a token and not its digest": lambda: Tokens({"secret": Identity("ci")}),
    "introspection that remembers for an hour": lambda: Introspection(
        "https://a.test/i", "a", "b", issuer="https://a.test", resource=RESOURCE, keeps=3600
    ),
    "a scope with a space": lambda: Jwt("https://a.test", resource=RESOURCE, scopes="a b"),
    "scopes that are not words": lambda: App("a").query(scopes=[NUMBER])(lambda: 1),
    "scopes of another parameter": lambda: App("a").query(scopes=lambda other: "x")(lambda: 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_found_when_the_app_is_made(mistake: str) -> None:
    with pytest.raises(UsageError):
        MISTAKES[mistake]()


async def test_scopes_without_auth_are_a_mistake_over_http_only() -> None:
    app = App("shop")
    app.query(scopes="prices:read", name="price")(lambda: 3)
    assert b'"result":3' in (await app.handle(json.dumps(call("price")).encode()) or b"")
    with pytest.raises(UsageError, match="no auth="):
        app.asgi()


# --- what an issuer could make the server do ------------------------------------------------------


@pytest.mark.parametrize(
    "jwks_uri",
    [
        "http://169.254.169.254/latest",
        "file:///etc/passwd",
        "",
        "http://127.0.0.1.evil.test/jwks",
        None,
    ],
)
async def test_keys_are_not_fetched_from_an_address_without_tls(
    issuer: AuthorizationServer, jwks_uri: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = {**issuer.metadata(), "jwks_uri": jwks_uri}
    monkeypatch.setattr(issuer, "metadata", lambda: got)
    server = make_server(Jwt(issuer.issuer, resource=RESOURCE, clock=Clock()))
    assert (await status(server, issuer.token("alice", resource=RESOURCE)))[0] == 503


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b"[]", b"\xff", b"", b'{"keys":{}}', b'{"keys":[7,{"kty":[]}]}']
)
async def test_keys_that_are_invalid_count_as_an_issuer_that_does_not_answer(
    issuer: AuthorizationServer, body: bytes
) -> None:
    issuer.faults.body = body
    server = make_server(
        Jwt(issuer.issuer, resource=RESOURCE, jwks=f"{issuer.issuer}/jwks", clock=Clock())
    )
    found = await ask(
        server,
        body=WHOAMI,
        headers=[("authorization", f"Bearer {issuer.token('a', resource=RESOURCE)}")],
    )
    assert found.status == (401 if b"kty" in body else 503)


async def test_document_that_is_too_long_is_not_read(
    issuer: AuthorizationServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = {**issuer.metadata(), "more": "x" * (256 << 10)}
    monkeypatch.setattr(issuer, "metadata", lambda: got)
    server = make_server(Jwt(issuer.issuer, resource=RESOURCE, clock=Clock()))
    assert (await status(server, issuer.token("alice", resource=RESOURCE)))[0] == 503
    assert "/jwks" not in paths(issuer)


async def test_token_in_the_query_is_not_read() -> None:
    shop = Shop()
    scope = scope_of("POST", "/rpc", [("host", "localhost"), ("content-type", "application/json")])
    scope["query_string"] = f"access_token={shop.token()}".encode()
    client = Client(piece(WHOAMI))
    await shop.server(scope, client.receive, client.send)
    assert client.reply.status == 401


async def test_audit_trail_names_the_caller_and_has_no_token(tmp_path: Path) -> None:
    shop = Shop(audit=f"file:{tmp_path}/audit.jsonl")
    token = shop.token("orders:write orders:audit")
    await shop.rpc(token, call("order", {"sku": "tea", "idempotency_key": "k"}))
    await shop.app.aclose()
    written = (tmp_path / "audit.jsonl").read_text()
    assert '"https://auth.test alice"' in written
    assert token.rpartition(".")[2] not in written
