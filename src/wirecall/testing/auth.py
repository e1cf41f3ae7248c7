"""For tests of programs with authorization: a server in memory, and the faults of real ones.

    async with AuthorizationServer() as server:
        app = App("shop", auth=Jwt(server.issuer, resource="https://api.example.com/mcp"))
        token = server.token("alice", resource="https://api.example.com/mcp", scopes="orders:read")

1. It listens on the loopback while it is open, for servers that fetch its keys and for clients that
   get tokens. A test without a network gives its keys to the verifier instead: `Jwt(server.issuer,
   resource=..., jwks=server.jwks)`.
2. Every user agrees at once: `/authorize` answers with the redirect.
3. It has code with PKCE, refresh tokens that rotate, client credentials, registration,
   introspection and revocation.
4. `faults` change its behaviour at any time, and `requests` lists all requests that it received.
"""

import base64
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote_plus, urlencode

import msgspec
from msgspec import Struct

from wirecall.auth.grants import pyjwt
from wirecall.protocol.messages import JsonObject

if TYPE_CHECKING:
    from aiohttp import web

# The issuer of a server that does not listen.
OFFLINE = "https://auth.test"


class AuthFaults(Struct, kw_only=True):
    """The faults of an authorization server.

    >>> server = AuthorizationServer(faults=AuthFaults(down=True))
    """

    # Every request gets 503.
    down: bool = False
    # Every document has this content.
    body: bytes | None = None
    # The metadata names another issuer.
    metadata_issuer: str | None = None
    # The redirect of /authorize has another `iss`.
    redirect_issuer: str | None = None
    # The redirect has no `iss`, although the metadata promises it.
    no_redirect_issuer: bool = False
    # The metadata does not offer PKCE.
    no_pkce: bool = False
    # The error with which /token refuses everything.
    refuse: str | None = None
    # Refresh tokens are no longer accepted.
    refuse_refresh: bool = False
    # Introspection reports every token as inactive.
    inactive: bool = False


class AuthorizationServer:
    """An authorization server for tests; see the top of `wirecall.testing.auth`.

    `issuer` is its address, `scopes` are those that it offers, and `lifetime` is that of its
    tokens, in seconds. `clock` and `faults` are for tests.

    >>> server = AuthorizationServer()
    """

    def __init__(
        self,
        *,
        issuer: str = OFFLINE,
        faults: AuthFaults | None = None,
        lifetime: float = 3600.0,
        scopes: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._jwt = pyjwt("it signs the tokens")
        from cryptography.hazmat.primitives.asymmetric import ec

        self.issuer = issuer
        self.faults = faults or AuthFaults()
        # Of each request: its method, its path, and its query or form.
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        # Secrets by client id; None for a public client.
        self.clients: dict[str, str | None] = {}
        self._ec = ec
        self._lifetime = lifetime
        self._scopes = list(scopes)
        self._clock = clock
        self._keys: list[tuple[str, Any]] = []
        self._codes: dict[str, dict[str, str]] = {}
        self._refresh: dict[str, dict[str, str]] = {}
        self._revoked: set[str] = set()
        self._runner: web.AppRunner | None = None
        self.rotate()

    # --- keys and tokens --------------------------------------------------------------------------

    def rotate(self) -> None:
        """Sign with a new key from now on; the old ones stay in the set."""
        self._keys.append(
            (f"key-{len(self._keys) + 1}", self._ec.generate_private_key(self._ec.SECP256R1()))
        )

    def forget(self) -> None:
        """Remove the old keys from the set."""
        del self._keys[:-1]

    @property
    def jwks(self) -> JsonObject:
        """The public keys (RFC 7517)."""
        to_jwk = self._jwt.algorithms.ECAlgorithm.to_jwk
        return {
            "keys": [
                {**to_jwk(key.public_key(), as_dict=True), "kid": kid, "use": "sig", "alg": "ES256"}
                for kid, key in self._keys
            ]
        }

    def token(
        self,
        subject: str | None,
        *,
        resource: str | Sequence[str],
        scopes: str | Sequence[str] = (),
        client: str | None = None,
        lifetime: float | None = None,
        header: Mapping[str, Any] | None = None,
        **claims: object,
    ) -> str:
        """Return a signed access token (RFC 9068) with further claims.

        A claim of None is omitted.
        """
        now = int(self._clock())
        sent = {
            "iss": self.issuer,
            "sub": subject,
            "aud": resource if isinstance(resource, str) else list(resource),
            "scope": scopes or None,
            "client_id": client,
            "iat": now,
            "exp": now + int(self._lifetime if lifetime is None else lifetime),
            "jti": secrets.token_hex(8),
            **claims,
        }
        kid, key = self._keys[-1]
        payload = {name: value for name, value in sent.items() if value is not None}
        text: str = self._jwt.encode(
            payload, key, "ES256", {"typ": "at+jwt", "kid": kid, **(header or {})}
        )
        return text

    def revoke(self, token: str) -> None:
        """Make a token inactive for introspection."""
        self._revoked.add(token)

    # --- listening --------------------------------------------------------------------------------

    async def __aenter__(self) -> "AuthorizationServer":
        from aiohttp import web

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        if self.issuer == OFFLINE:
            self.issuer = f"http://{host}:{port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        body = await request.read()
        asked = dict(request.query)
        if request.content_type != "application/json":
            asked |= {name: values[0] for name, values in parse_qs(body.decode()).items()}
        self.requests.append((request.method, request.path, asked))
        if self.faults.down:
            return web.Response(status=503)
        if request.path == "/authorize":
            return self._authorize(asked)
        status = 404
        sent = JsonObject()
        if request.path in (
            "/.well-known/oauth-authorization-server",
            "/.well-known/openid-configuration",
        ):
            status = 200
            sent = self.metadata()
        elif request.path == "/jwks":
            status = 200
            sent = self.jwks
        elif request.path == "/token":
            status, sent = self._token(asked, request.headers.get("authorization"))
        elif request.path == "/register":
            status, sent = self._register(msgspec.json.decode(body))
        elif request.path == "/introspect":
            status = 200
            sent = self._introspect(asked.get("token", ""))
        elif request.path == "/revoke":
            status = 200
            self._revoked.add(asked.get("token", ""))
            self._refresh.pop(asked.get("token", ""), None)
        body = msgspec.json.encode(sent) if self.faults.body is None else self.faults.body
        return web.Response(status=status, body=body, content_type="application/json")

    def metadata(self) -> JsonObject:
        """Return the metadata of the server (RFC 8414)."""
        found: JsonObject = {
            "issuer": self.faults.metadata_issuer or self.issuer,
            **{
                f"{name}_endpoint": f"{self.issuer}/{path}"
                for name, path in (
                    ("authorization", "authorize"),
                    ("token", "token"),
                    ("registration", "register"),
                    ("introspection", "introspect"),
                    ("revocation", "revoke"),
                )
            },
            "jwks_uri": f"{self.issuer}/jwks",
            "response_types_supported": ["code"],
            "grant_types_supported": ["authorization_code", "refresh_token", "client_credentials"],
            "token_endpoint_auth_methods_supported": [
                "none",
                "client_secret_basic",
                "client_secret_post",
            ],
            "authorization_response_iss_parameter_supported": True,
        }
        if self._scopes:
            found["scopes_supported"] = self._scopes
        if not self.faults.no_pkce:
            found["code_challenge_methods_supported"] = ["S256"]
        return found

    # --- endpoints --------------------------------------------------------------------------------

    def _authorize(self, asked: dict[str, str]) -> "web.Response":
        from aiohttp import web

        back = asked.get("redirect_uri", "")
        known = asked.get("client_id") in self.clients or asked.get("client_id", "").startswith(
            "https://"
        )
        if not back or not known:
            return web.Response(status=400, text="unknown client, or no redirect_uri")
        sent = {"state": asked.get("state")}
        if asked.get("response_type") != "code" or asked.get("code_challenge_method") != "S256":
            sent["error"] = "invalid_request"
        else:
            sent["code"] = code = secrets.token_urlsafe(16)
            self._codes[code] = asked
        if not self.faults.no_redirect_issuer:
            sent["iss"] = self.faults.redirect_issuer or self.issuer
        query = urlencode({name: value for name, value in sent.items() if value is not None})
        return web.Response(
            status=302, headers={"location": f"{back}{'&' if '?' in back else '?'}{query}"}
        )

    def _token(self, asked: dict[str, str], authorization: str | None) -> tuple[int, JsonObject]:
        if self.faults.refuse is not None:
            return 400, {"error": self.faults.refuse}
        # The client, by HTTP Basic or in the form (RFC 6749, section 2.3.1).
        client = asked.get("client_id", "")
        secret = asked.get("client_secret")
        if authorization is not None and authorization.lower().startswith("basic "):
            name, _, password = base64.b64decode(authorization[6:]).decode().partition(":")
            client = unquote_plus(name)
            secret = unquote_plus(password)
        if not client.startswith("https://") and (
            client not in self.clients or self.clients[client] != secret
        ):
            return 401, {"error": "invalid_client"}
        grant = asked.get("grant_type")
        if grant == "client_credentials":
            return 200, self._granted(
                {**asked, "client_id": client}, subject=None, is_renewable=False
            )
        if grant == "authorization_code":
            first = self._codes.pop(asked.get("code", ""), None)  # a code is valid once
            digest = hashlib.sha256(asked.get("code_verifier", "").encode()).digest()
            challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
            is_same = first is not None and all(
                first.get(name) == asked.get(name) for name in ("redirect_uri", "resource")
            )
            if (
                first is None
                or not is_same
                or first["client_id"] != client
                or first["code_challenge"] != challenge
            ):
                return 400, {"error": "invalid_grant"}
            return 200, self._granted(first, subject="user", is_renewable=True)
        if grant == "refresh_token":
            first = self._refresh.pop(asked.get("refresh_token", ""), None)  # it rotates
            if first is None or first["client_id"] != client or self.faults.refuse_refresh:
                return 400, {"error": "invalid_grant"}
            return 200, self._granted(
                {**first, "scope": asked.get("scope", first.get("scope", ""))}, "user", True
            )
        return 400, {"error": "unsupported_grant_type"}

    def _granted(
        self, asked: dict[str, str], subject: str | None, is_renewable: bool
    ) -> JsonObject:
        scope = asked.get("scope", "")
        resource = asked.get("resource", "")
        client = asked["client_id"]
        sent: JsonObject = {
            "access_token": self.token(subject, resource=resource, scopes=scope, client=client),
            "token_type": "Bearer",
            "expires_in": int(self._lifetime),
            "scope": scope,
        }
        if is_renewable:
            sent["refresh_token"] = renewal = secrets.token_urlsafe(16)
            self._refresh[renewal] = asked
        return sent

    def _register(self, asked: JsonObject) -> tuple[int, JsonObject]:
        client = f"client-{len(self.clients) + 1}"
        method = asked.get("token_endpoint_auth_method", "client_secret_basic")
        registered = {**asked, "client_id": client}
        self.clients[client] = None
        if method != "none":
            secret = secrets.token_urlsafe(16)
            self.clients[client] = secret
            registered["client_secret"] = secret
        return 201, registered

    def _introspect(self, token: str) -> JsonObject:
        if self.faults.inactive or token in self._revoked:
            return {"active": False}
        try:
            keys = {kid: key.public_key() for kid, key in self._keys}
            key = keys.get(str(self._jwt.get_unverified_header(token).get("kid")))
            claims: JsonObject = {}
            if key is not None:
                claims = self._jwt.decode(
                    token,
                    key,
                    ["ES256"],
                    options={"verify_aud": False, "verify_exp": False, "verify_iat": False},
                )
        except self._jwt.PyJWTError:
            return {"active": False}
        if not claims or claims["exp"] <= self._clock():
            return {"active": False}
        return {"active": True, "token_type": "Bearer", **claims}
