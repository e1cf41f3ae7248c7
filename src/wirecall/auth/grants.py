"""Grants: how a client gets a token, as `connect(auth=...)` takes them, and what they send.

| Class | Grant |
| --- | --- |
| `Browser` | a person logs in: authorization code with PKCE, and refresh tokens |
| `ClientCredentials` | the program itself, by a secret or a key |
| `IdJag` | an employee, by the ID token of the company (enterprise-managed authorization) |
| `Workload` | the program itself, by the JWT of its platform (workload identity federation) |
| `Stored` | the login that `wirecall login` has kept; never a new one |

`TokenEndpoint.send` is the only place that sends a secret. It never quotes one in an error, even if
the server repeats it. Assertions (RFC 7523) and proofs of possession (DPoP, RFC 9449) need the
extra `auth`.
"""

import asyncio
import base64
import hashlib
import inspect
import re
import secrets
import sys
import time
import webbrowser
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, ClassVar, TypeAlias
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import msgspec
from msgspec import UNSET, Struct, UnsetType

from wirecall.auth.discovery import SHOWN, TIMEOUT, Answer, Issuer, Network, origin, require_address
from wirecall.auth.store import FileStore, Login, MemoryStore, Registration, Store
from wirecall.errors import NotAuthorized, UsageError, extra_fix

JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
LIFETIME = 300  # seconds of an assertion
_ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_SECRETS = (
    *("assertion", "client_assertion", "client_secret", "code", "code_verifier"),
    *("refresh_token", "subject_token", "token"),
)
_TOKEN = re.compile(r"[!-~]+")  # it becomes part of a header
_CODE = re.compile(r"[!#-\[\]-~]{1,60}")  # of an error (RFC 6749, section 5.2)

PATH = "/callback"
ISSUER_DIGEST = 16  # characters of an issuer's digest, in the path to which its answers are sent
_ENDPOINTS = (
    "authorization_endpoint",
    "token_endpoint",
    "registration_endpoint",
    "revocation_endpoint",
)
PATIENCE = 300.0  # seconds for a person to log in
READING = 10.0  # seconds for the browser to send its request
MAX_BYTES = 16 << 10

_ID_JAG = "urn:ietf:params:oauth:token-type:id-jag"
_ID_TOKEN = "urn:ietf:params:oauth:token-type:id_token"
_EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
_WHY_ISSUER = "without an issuer, the server would choose where the credentials go"

# The page that the browser shows at the end. It is always the same, and contains nothing from the
# request.
_PAGE = (
    b"<!doctype html><html lang=en><meta charset=utf-8><title>wirecall</title>"
    b"<p>You can close this page and go back to your program."
)
_HEAD = (
    b"HTTP/1.1 %s\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: %d\r\n"
    b"Connection: close\r\nCache-Control: no-store\r\nReferrer-Policy: no-referrer\r\n"
    b"X-Content-Type-Options: nosniff\r\n"
    b"Content-Security-Policy: default-src 'none'; frame-ancestors 'none'\r\n\r\n"
)

Text: TypeAlias = str | Callable[[], str | Awaitable[str]]


# --- signatures -----------------------------------------------------------------------------------


def pyjwt(why: str) -> Any:
    """Return PyJWT, which takes a tenth of a second to import.

    It is an extra; `why` is the reason to install it.
    """
    try:
        import jwt
        import jwt.algorithms
    except ImportError:
        raise UsageError("PyJWT is not installed.", why, extra_fix("auth")) from None
    return jwt


def client_assertion(key: str, algorithm: str, client_id: str, audience: str) -> str:
    """Return the JWT by which a client with a private key (PEM) authenticates."""
    now = int(time.time())
    jwt = pyjwt("a key signs with it")
    claims = {
        "iss": client_id,
        "sub": client_id,
        "aud": audience,
        "iat": now,
        "exp": now + LIFETIME,
    }
    try:
        text: str = jwt.encode(
            {**claims, "jti": secrets.token_urlsafe(16)}, key, algorithm=algorithm
        )
    # Without the key itself.
    except (ValueError, TypeError, NotImplementedError, jwt.PyJWTError) as error:
        why = f"{type(error).__name__} with {algorithm}"
        raise UsageError(
            "The client's key cannot sign.", why, "give a private key as PEM, and its algorithm="
        ) from None
    return text


class DpopKey:
    """A key that a token is bound to: each request proves that the client has it."""

    def __init__(self, pem: str | None = None) -> None:
        self._jwt = pyjwt("DPoP needs it")
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        if pem is None:
            self._key: Any = ec.generate_private_key(ec.SECP256R1())
        else:
            self._key = serialization.load_pem_private_key(pem.encode(), None)
        form = (
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        self.pem: str = self._key.private_bytes(*form).decode()
        self._jwk = self._jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True)

    def proof(
        self, method: str, url: str, *, nonce: str | None = None, token: str | None = None
    ) -> str:
        """Return the proof for one request; each has its own id."""
        claims: dict[str, Any] = {
            "jti": secrets.token_urlsafe(16),
            "htm": method,
            "htu": urlsplit(url)._replace(query="", fragment="").geturl(),
            "iat": int(time.time()),
        }
        if nonce is not None:
            claims["nonce"] = nonce
        if token is not None:
            claims["ath"] = sha256_text(token)
        text: str = self._jwt.encode(
            claims, self._key, algorithm="ES256", headers={"typ": "dpop+jwt", "jwk": self._jwk}
        )
        return text


def sha256_text(text: str) -> str:
    """Return the digest of a string as OAuth writes it: base64url without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


# --- clients and answers --------------------------------------------------------------------------


def basic(client_id: str, secret: str) -> str:
    """Return the credentials of a client as HTTP Basic."""
    # RFC 6749, section 2.3.1: both parts are encoded as in a form before they are joined. A space
    # is %20 and not "+": every form decoder accepts both, and a server that only decodes %XX, such
    # as Authlib's, accepts this one.
    pair = f"{quote(client_id, safe='')}:{quote(secret, safe='')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def method_for(issuer: Issuer, secret: str | None) -> str:
    """Return how a client authenticates, if its registration does not say."""
    if secret is None:
        return "none"
    offered = issuer.token_endpoint_auth_methods_supported
    # Without a list, the method is Basic (RFC 8414, section 2).
    if offered is None or "client_secret_basic" in offered:
        return "client_secret_basic"
    if "client_secret_post" in offered:
        return "client_secret_post"
    return "none"


class Denied(NotAuthorized):
    """An authorization server refused a request; `code` is its reason."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class _Problem(Struct):
    error: str = ""
    error_description: str = ""


def denied(answer: Answer, what: str, secrets: Iterable[str] = ()) -> Denied:
    """Return the refusal of an endpoint, without the secrets in its request."""
    problem = answer.document(_Problem) or _Problem()
    reasons = [problem.error_description]
    if _CODE.fullmatch(problem.error):
        reasons.insert(0, problem.error)
    reason = ": ".join(filter(None, reasons))
    for secret in secrets:
        reason = reason.replace(secret, "…")
    shown = f"HTTP {answer.status}"
    if reason:
        shown = ascii(reason[:SHOWN])[1:-1]
    return Denied(f"{what} refused the request: {shown}", problem.error)


class Issued(Struct, frozen=True):
    """The answer of a token endpoint (RFC 6749, section 5.1)."""

    access_token: str
    token_type: str = "Bearer"
    # Some servers send a string.
    expires_in: float | str | None = None
    refresh_token: str | None = None

    def __repr__(self) -> str:
        return f"Issued(token_type={self.token_type!r})"  # without a secret

    @property
    def expires(self) -> float | None:
        """The Unix time at which the token expires."""
        if self.expires_in is None:
            return None
        try:
            return time.time() + float(self.expires_in)
        except ValueError:
            return None


# --- the token endpoint ---------------------------------------------------------------------------


class TokenEndpoint(Struct, frozen=True):
    """The token endpoint of one authorization server."""

    network: Network
    url: str
    issuer: str
    key: DpopKey | None = None
    # The last nonce for proofs of DPoP, by origin.
    nonces: dict[str, str] = {}

    async def send(
        self, client: Registration, form: Mapping[str, str], sign: Callable[[], str] | None = None
    ) -> Answer:
        """Send a request for the client, and return the answer; raise a refusal.

        `sign` authenticates a client that has a key.
        """
        sent = dict(form)
        headers = {}
        if client.client_method == "client_secret_basic":
            headers["Authorization"] = basic(client.client_id, client.client_secret or "")
        elif client.client_id:  # a workload may not have one
            sent["client_id"] = client.client_id
        if client.client_method == "client_secret_post" and client.client_secret is not None:
            sent["client_secret"] = client.client_secret
        for is_last in (False, True):
            if sign is not None:
                # Each is used once.
                sent["client_assertion_type"] = _ASSERTION_TYPE
                sent["client_assertion"] = sign()
            if self.key is not None:
                headers["DPoP"] = self.key.proof(
                    "POST", self.url, nonce=self.nonces.get(origin(self.url))
                )
            answer = await self.network.post(self.url, "the token endpoint", sent, headers)
            nonce = answer.headers.get("dpop-nonce")
            if nonce is not None:
                self.nonces[origin(self.url)] = nonce
            if answer.status == 200:
                return answer
            pair = headers.get("Authorization", "").removeprefix("Basic ")
            secrets = [client.client_secret, pair, *(sent.get(name) for name in _SECRETS)]
            refusal = denied(
                answer, f"the authorization server {self.issuer[:SHOWN]}", filter(None, secrets)
            )
            # The server names the nonce that a proof must have (RFC 9449, section 8).
            if is_last or refusal.code != "use_dpop_nonce" or nonce is None or self.key is None:
                raise refusal
        raise AssertionError("the last answer is returned or raised")

    async def ask(
        self, client: Registration, form: Mapping[str, str], sign: Callable[[], str] | None = None
    ) -> Issued:
        """Return the token for a grant."""
        answer = await self.send(client, form, sign)
        token = answer.document(Issued)
        what = f"the authorization server {self.issuer[:SHOWN]}"
        if token is None or not _TOKEN.fullmatch(token.access_token):
            raise NotAuthorized(f"{what} did not answer with a token")
        if self.key is not None and token.token_type.lower() == "bearer":
            # A token that is not bound to the key works for a thief as well (RFC 9449, section 5).
            raise NotAuthorized(f"{what} does not bind tokens to a key, as dpop=True asks for")
        return token


class Flow(Struct, kw_only=True):
    """Everything that a request for a new token needs."""

    network: Network
    server: str
    resource: str | None
    issuer: Issuer
    scopes: list[str]
    # An earlier login at the same issuer.
    earlier: Login | None
    key: DpopKey | None
    nonces: dict[str, str]

    @property
    def common(self) -> dict[str, str]:
        """The parameters of every request: the resource (RFC 8707) and the scopes."""
        return {**self.target, **self.scope}

    @property
    def target(self) -> dict[str, str]:
        """The parameter that names the resource (RFC 8707), if it has a name."""
        if self.resource is None:
            return {}
        return {"resource": self.resource}

    @property
    def scope(self) -> dict[str, str]:
        """The parameter that names the scopes, if there are any."""
        if not self.scopes:
            return {}
        return {"scope": " ".join(self.scopes)}

    async def token(
        self, client: Registration, form: Mapping[str, str], sign: Callable[[], str] | None = None
    ) -> Login:
        """Return a login with the token for a grant."""
        endpoint = self.issuer.token_endpoint
        if endpoint is None:
            raise NotAuthorized(
                f"the authorization server {self.issuer.issuer[:SHOWN]} "
                "does not have a token endpoint"
            )
        token = await TokenEndpoint(
            self.network, endpoint, self.issuer.issuer, self.key, self.nonces
        ).ask(client, form, sign)
        dpop_key = None
        if self.key is not None:
            dpop_key = self.key.pem
        return Login(
            server=self.server,
            issuer=self.issuer.issuer,
            **{name: getattr(client, name) for name in Registration.__struct_fields__},
            resource=self.resource,
            token_endpoint=endpoint,
            revocation_endpoint=self.issuer.revocation_endpoint,
            scopes=self.scopes,
            access_token=token.access_token,
            token_type=token.token_type,
            refresh_token=token.refresh_token,
            expires=token.expires,
            dpop_key=dpop_key,
            private=self.network.private,
        )


# --- the options that all grants share ------------------------------------------------------------


class TokenWay(Struct, kw_only=True, frozen=True, repr_omit_defaults=True):
    """The options of every grant.

    `scopes` are asked for in addition to those that the server names. `resource` replaces the
    server's own identifier in requests for tokens; None omits it, for authorization servers that
    refuse the parameter. `issuer` is the only authorization server that gets the credentials.
    `private=True` allows a public server to name authorization servers in private networks.
    `dpop=True` binds tokens to a key. `timeout` is the time of one request to an authorization
    server. `store` keeps logins.
    """

    is_interactive: ClassVar[bool] = False
    can_refresh: ClassVar[bool] = False
    can_obtain: ClassVar[bool] = True
    needs_issuer: ClassVar[bool] = True

    scopes: Iterable[str] = ()
    resource: str | UnsetType | None = UNSET
    issuer: str | None = None
    store: Store | None = None
    private: bool = False
    dpop: bool = False
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        scopes = self.scopes
        if isinstance(scopes, str):
            scopes = scopes.split()
        msgspec.structs.force_setattr(self, "scopes", tuple(dict.fromkeys(scopes)))
        if self.store is None:
            store: Store = MemoryStore()
            if self.can_refresh:  # such a login outlives the process
                store = FileStore()
            msgspec.structs.force_setattr(self, "store", store)
        if self.needs_issuer and self.issuer is None:
            raise UsageError(
                f"{type(self).__name__} needs issuer=.",
                _WHY_ISSUER,
                'issuer="https://auth.example.com"',
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(...)"  # without a secret

    def fits(self, login: Login) -> bool:
        """Return whether a stored login can come from this grant."""
        is_ours = getattr(self, "client_id", None) in (None, login.client_id)
        return (
            is_ours
            and self.issuer in (None, login.issuer)
            and (login.dpop_key is not None or not self.dpop)
        )

    @abstractmethod
    async def obtain(self, flow: Flow) -> Login:
        """Return a login with a new token."""


async def _text(source: Text) -> str:
    if not callable(source):
        return source
    found = source()
    if inspect.isawaitable(found):
        return await found
    return found


# --- a person -------------------------------------------------------------------------------------


class Browser(TokenWay, kw_only=True, frozen=True):
    """A person logs in with a browser, and the login is kept for the next time.

    The authorization server knows the client by `client_id` (and `client_secret`), or by
    `metadata_url`, the address of a document that describes it; without both the client registers
    itself as `client_name`. The browser comes back to `port` of this machine, and has `patience`
    seconds for that. `visit` replaces opening the browser: it gets the address of the login
    page, and returns the address that the browser was sent back to, or None if the browser comes to the port.

    The endpoints of an authorization server have the origin of its issuer. Otherwise it could name
    the login page of another server, and get the code that the other server issues. `endpoints`
    accepts further origins, by issuer: `{"https://accounts.example.com":
    ["https://tokens.example.com"]}`.

    >>> from wirecall import connect
    >>> client = connect("https://api.example.com/mcp", auth=Browser(scopes=["orders:read"]))
    """

    is_interactive: ClassVar[bool] = True
    can_refresh: ClassVar[bool] = True
    needs_issuer: ClassVar[bool] = False

    client_id: str | None = None
    client_secret: str | None = None
    metadata_url: str | None = None
    client_name: str = "wirecall"
    port: int = 0
    patience: float = PATIENCE
    endpoints: Mapping[str, Iterable[str]] = {}
    visit: Callable[[str], Awaitable[str | None]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.client_secret is not None and (self.client_id is None or self.issuer is None):
            fix = 'client_id="...", issuer="https://auth.example.com"'
            raise UsageError("client_secret= needs client_id= and issuer=.", _WHY_ISSUER, fix)
        if self.metadata_url is not None:
            parts = urlsplit(self.metadata_url)
            if parts.scheme != "https" or parts.path in ("", "/"):
                why = "the id of a client is an HTTPS address with a path"
                raise UsageError(
                    f"metadata_url={self.metadata_url!r} cannot be used.",
                    why,
                    "https://example.com/client.json",
                )
        given: object = self.endpoints
        if not isinstance(given, Mapping) or any(
            isinstance(origins, str) for origins in given.values()
        ):
            raise UsageError(
                f"endpoints={self.endpoints!r} cannot be used.",
                "expected the origins that are accepted for each issuer",
                'endpoints={"https://accounts.example.com": ["https://tokens.example.com"]}',
            )

    async def obtain(self, flow: Flow) -> Login:
        issuer = flow.issuer
        self._check_endpoints(issuer)
        if issuer.authorization_endpoint is None:
            raise NotAuthorized(
                f"the authorization server {issuer.issuer[:SHOWN]} "
                "does not have an authorization endpoint"
            )
        require_address(issuer.authorization_endpoint, "the authorization endpoint")
        # Without PKCE, a stolen code is a stolen login (2025-11-25, authorization code protection).
        if "S256" not in (issuer.code_challenge_methods_supported or ()):
            raise NotAuthorized(
                f"the authorization server {issuer.issuer[:SHOWN]} does not support PKCE with S256"
            )
        # The port that the client is registered with, if it is free: some servers do not accept
        # another (RFC 8252, 7.3).
        registered = None
        if flow.earlier is not None and flow.earlier.redirect_uri:
            registered = urlsplit(flow.earlier.redirect_uri).port
        path = self._redirect_path(issuer)
        async with listening(
            self.port or registered or 0, path, may_change=not self.port
        ) as callback:
            client = await self._client(flow, callback.uri)
            verifier = secrets.token_urlsafe(48)
            callback.state = secrets.token_urlsafe(32)
            asked = {
                "response_type": "code",
                "client_id": client.client_id,
                "redirect_uri": callback.uri,
                "state": callback.state,
                "code_challenge": sha256_text(verifier),
                "code_challenge_method": "S256",
                **flow.common,
            }
            # A refresh token needs the user's consent (OpenID Connect Core, section 11).
            if "offline_access" in flow.scopes:
                asked["prompt"] = "consent"
            parts = urlsplit(issuer.authorization_endpoint)
            query = "&".join(filter(None, (parts.query, urlencode(asked))))
            page = parts._replace(query=query, fragment="").geturl()
            if self.visit is None:
                # Never a shell: a server has chosen the address.
                if not await asyncio.to_thread(webbrowser.open, page):
                    print(f"Open this address to log in:\n{page}", file=sys.stderr)
            elif (redirected := await self.visit(page)) is not None and not callback.take(
                redirected
            ):
                raise NotAuthorized("the browser came back with the answer to another login")
            try:
                async with asyncio.timeout(self.patience):
                    brought = await callback.answer
            except TimeoutError:
                raise NotAuthorized(
                    f"the login was not completed within {self.patience:g} s"
                ) from None
            _check_answer(brought, issuer)
            form = {
                "grant_type": "authorization_code",
                "code": brought["code"],
                "redirect_uri": callback.uri,
                "code_verifier": verifier,
                **flow.target,
            }
            return await flow.token(client, form)

    def _check_endpoints(self, issuer: Issuer) -> None:
        """Refuse an authorization server that names the endpoint of another one.

        That would be a mix-up (RFC 9700, section 4.4).
        """
        accepted = {origin(issuer.issuer), *self.endpoints.get(issuer.issuer, ())}
        for name in _ENDPOINTS:
            url = getattr(issuer, name)
            if url is None:
                continue
            require_address(url, f"the {name.replace('_', ' ')}")
            if origin(url) not in accepted:
                what = f"the authorization server {issuer.issuer[:SHOWN]!a}"
                raise NotAuthorized(
                    f"{what} names an endpoint of another origin: "
                    f"its {name} is at {origin(url)[:SHOWN]!a}",
                    fix="if you know that both belong together: --issuer ISSUER --endpoint ORIGIN, "
                    "or Browser(endpoints={ISSUER: [ORIGIN]})",
                )

    def _redirect_path(self, issuer: Issuer) -> str:
        """Return the path that the browser comes back to.

        It differs by issuer (RFC 9700, section 4.4.2).

        An issuer's answer comes back to that issuer's path, so no other login takes it. A client
        that an issuer knows in advance, or that a document describes, has the one address that is
        registered there.
        """
        is_registered = self.client_id is not None and self.issuer is not None
        is_described = (
            self.metadata_url is not None and issuer.client_id_metadata_document_supported
        )
        if is_registered or is_described:
            return PATH
        return f"{PATH}/{sha256_text(issuer.issuer)[:ISSUER_DIGEST]}"

    async def _client(self, flow: Flow, redirect_uri: str) -> Registration:
        """Return the client as the authorization server knows it."""
        issuer = flow.issuer
        earlier = flow.earlier
        known = partial(Registration, redirect_uri=redirect_uri)
        # 1. Credentials that the program passed.
        if self.client_id is not None:
            method = method_for(issuer, self.client_secret)
            return known(
                client_id=self.client_id, client_secret=self.client_secret, client_method=method
            )
        # 2. A document that describes the client.
        if self.metadata_url is not None and issuer.client_id_metadata_document_supported:
            return known(client_id=self.metadata_url)
        # 3. An earlier registration at this issuer, if it fits.
        if earlier is not None and earlier.redirect_uri == redirect_uri:
            lasts = earlier.client_expires is None or earlier.client_expires > time.time()
            if lasts and (
                earlier.client_scopes is None or set(flow.scopes) <= set(earlier.client_scopes)
            ):
                return earlier
        # 4. A new one.
        return await self._register(flow, redirect_uri)

    async def _register(self, flow: Flow, redirect_uri: str) -> Registration:
        """Register this client at the authorization server (RFC 7591)."""
        issuer = flow.issuer
        if issuer.registration_endpoint is None:
            why = f"the authorization server {issuer.issuer[:SHOWN]} does not register clients"
            raise NotAuthorized(
                f"{why}: give the client_id (and client_secret) that it knows this program by"
            )
        offered = issuer.token_endpoint_auth_methods_supported or ["none"]
        wanted = next(
            (
                each
                for each in ("none", "client_secret_basic", "client_secret_post")
                if each in offered
            ),
            "none",
        )
        document = {
            "client_name": self.client_name,
            "application_type": "native",  # SEP-837
            "redirect_uris": [redirect_uri],
            "grant_types": ["authorization_code", "refresh_token"],
            "response_types": ["code"],
            "token_endpoint_auth_method": wanted,
            **flow.scope,
        }
        answer = await flow.network.post_json(
            issuer.registration_endpoint, "the registration endpoint", document
        )
        if answer.status not in (200, 201):
            raise denied(answer, f"the registration at {issuer.issuer[:SHOWN]}")
        made = answer.document(_Registered)
        if made is None or not made.client_id:
            raise NotAuthorized(
                f"the registration at {issuer.issuer[:SHOWN]} did not bring a client_id"
            )
        scopes = None
        if made.scope is not None:
            scopes = made.scope.split()
        return Registration(
            redirect_uri=redirect_uri,
            client_id=made.client_id,
            client_secret=made.client_secret,
            client_method=made.token_endpoint_auth_method or method_for(issuer, made.client_secret),
            client_scopes=scopes,
            client_expires=made.client_secret_expires_at or None,  # 0: never
        )


class _Registered(Struct):
    """The answer of a registration endpoint (RFC 7591, section 3.2.1)."""

    client_id: str
    client_secret: str | None = None
    client_secret_expires_at: float | None = None
    token_endpoint_auth_method: str | None = None
    scope: str | None = None


def _check_answer(brought: dict[str, str], issuer: Issuer) -> None:
    """Refuse an answer of another authorization server, before its code is sent.

    RFC 9207, section 2.4, requires it.
    """
    named = brought.get("iss")
    if named is None and issuer.authorization_response_iss_parameter_supported:
        raise NotAuthorized(
            "the answer to the login does not name its issuer, "
            f"as {issuer.issuer[:SHOWN]} always does"
        )
    # As strings; the error shows nothing of that answer.
    if named is not None and named != issuer.issuer:
        raise NotAuthorized(
            f"the answer to the login must be from {issuer.issuer[:SHOWN]}, "
            "and names another issuer"
        )
    if "error" in brought:
        reason = ": ".join(filter(None, (brought["error"], brought.get("error_description"))))
        raise NotAuthorized(f"the login was refused: {ascii(reason[:SHOWN])[1:-1]}")
    if not brought.get("code"):
        raise NotAuthorized("the answer to the login does not have a code")


class Callback:
    """The address that the browser comes back to, and the answer that it brings.

    The browser sends a GET of `path`, with the Host of this address.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        # The state of the pending login.
        self.state = ""
        self.host = ""
        self.serving: set[asyncio.Task[None]] = set()
        # Shows its page to the browser that brought the answer.
        self.answering: asyncio.Task[None] | None = None
        # The parameters that the browser brings.
        self.answer: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()

    @property
    def uri(self) -> str:
        return f"http://{self.host}{self.path}"

    def take(self, redirected: str) -> bool:
        """Take the address that the browser came back to; return whether it is of this login."""
        address = urlsplit(redirected)
        if address.path != self.path:  # the answer to a login at another issuer
            return False
        found = parse_qs(address.query, keep_blank_values=True)
        # Another login's answer, or one that a page has forged, has another state (RFC 6749,
        # section 10.12). A repeated parameter is invalid (section 3.1).
        if (
            any(len(values) > 1 for values in found.values())
            or found.get("state") != [self.state]
            or self.answer.done()
        ):
            return False
        self.answer.set_result({name: values[0] for name, values in found.items()})
        return True

    def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a browser in a task."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        status = b"400 Bad Request"
        with suppress(ValueError, TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            async with asyncio.timeout(READING):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("ascii")
            first, *lines = head.split("\r\n")
            method, target, _ = first.split(" ")
            hosts = [
                value.strip()
                for name, _, value in (line.partition(":") for line in lines)
                if name.lower() == "host"
            ]
            if method == "GET" and hosts == [self.host] and self.take(target):
                status = b"200 OK"
                self.answering = asyncio.current_task()
        try:
            writer.write(_HEAD % (status, len(_PAGE)) + _PAGE)
            with suppress(TimeoutError, OSError):
                async with asyncio.timeout(READING):
                    await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def listening(port: int, path: str, *, may_change: bool) -> AsyncIterator[Callback]:
    """Listen on a port of this machine in a block.

    It is any free port if `port` is 0, or if that port is in use and may change.
    """
    callback = Callback(path)
    try:
        server = await asyncio.start_server(callback.connected, "127.0.0.1", port, limit=MAX_BYTES)
    except OSError as error:
        if not may_change:
            raise NotAuthorized(
                f"the browser cannot come back to port {port}: {error.strerror}"
            ) from None
        server = await asyncio.start_server(callback.connected, "127.0.0.1", 0, limit=MAX_BYTES)
    callback.host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield callback
    finally:
        server.close()
        for task in callback.serving - {callback.answering}:
            task.cancel()
        await asyncio.gather(*callback.serving, return_exceptions=True)


# --- programs -------------------------------------------------------------------------------------


class ClientCredentials(TokenWay, frozen=True):
    """The program itself is the user: `secret`, or a private `key` (PEM) with its `algorithm`.

    `client_id` is the program's name at the authorization server.

    >>> login = ClientCredentials("shop", "a secret", issuer="https://auth.example.com")
    >>> client = connect("https://api.example.com/mcp", auth=login)
    """

    client_id: str
    secret: str | None = None
    key: str | None = None
    algorithm: str = "ES256"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.secret is None) == (self.key is None):
            raise UsageError(
                "ClientCredentials needs a secret or a key.", fix="secret=..., or key=PEM"
            )

    async def obtain(self, flow: Flow) -> Login:
        method = method_for(flow.issuer, self.secret)
        sign = None
        if self.key is not None:
            method = "private_key_jwt"
            sign = partial(
                client_assertion, self.key, self.algorithm, self.client_id, flow.issuer.issuer
            )
        client = Registration(
            client_id=self.client_id, client_secret=self.secret, client_method=method
        )
        return await flow.token(client, {"grant_type": "client_credentials", **flow.common}, sign)


class IdJag(TokenWay, kw_only=True, frozen=True):
    """An employee: the ID token of the identity provider becomes a grant (SEP-990).

    The grant is for the server's authorization server.

    `id_token` is a string, or a function that returns the current one. `idp` is the token endpoint
    of the identity provider.

    `client_id` and `client_secret` are the program's at the authorization server of the server,
    `idp_client_id` and `idp_client_secret` those at the identity provider.

    >>> login = IdJag(
    ...     client_id="shop",
    ...     id_token=lambda: "eyJhbGciOi...",
    ...     idp="https://idp.example.com/token",
    ...     idp_client_id="desk",
    ...     issuer="https://auth.example.com",
    ... )
    """

    client_id: str
    client_secret: str | None = None
    id_token: Text
    idp: str
    idp_client_id: str
    idp_client_secret: str | None = None

    async def obtain(self, flow: Flow) -> Login:
        method = "none"
        if self.idp_client_secret is not None:
            method = "client_secret_post"
        provider = Registration(
            client_id=self.idp_client_id,
            client_secret=self.idp_client_secret,
            client_method=method,
        )
        exchange = {
            "grant_type": _EXCHANGE,
            "requested_token_type": _ID_JAG,
            "audience": flow.issuer.issuer,
            "subject_token": await _text(self.id_token),
            "subject_token_type": _ID_TOKEN,
            **flow.common,
        }
        grant = await TokenEndpoint(flow.network, self.idp, self.idp).ask(provider, exchange)
        method = method_for(flow.issuer, self.client_secret)
        client = Registration(
            client_id=self.client_id, client_secret=self.client_secret, client_method=method
        )
        return await flow.token(
            client, {"grant_type": JWT_BEARER, "assertion": grant.access_token, **flow.common}
        )


class Workload(TokenWay, frozen=True):
    """The program itself, by the JWT of its platform.

    `jwt` is a string, or a function that returns the current one.

    `client_id` is the program's name at the authorization server, if it needs one.

    >>> login = Workload(lambda: "eyJhbGciOi...", "shop", issuer="https://auth.example.com")
    >>> client = connect("https://api.example.com/mcp", auth=login)
    """

    jwt: Text
    client_id: str | None = None

    async def obtain(self, flow: Flow) -> Login:
        form = {"grant_type": JWT_BEARER, "assertion": await _text(self.jwt), **flow.common}
        return await flow.token(Registration(client_id=self.client_id or ""), form)


class Stored(TokenWay, kw_only=True, frozen=True):
    """The login that `wirecall login` has kept. It is refreshed, but a new one needs a person.

    >>> client = connect("https://api.example.com/mcp", auth=Stored())
    """

    can_refresh: ClassVar[bool] = True
    can_obtain: ClassVar[bool] = False
    needs_issuer: ClassVar[bool] = False

    async def obtain(self, flow: Flow) -> Login:
        raise UsageError(
            "Stored() does not log in.", "a person has to", f"wirecall login {flow.server}"
        )
