"""How a client gets a token: the requests to the endpoints of an authorization server, and the signatures in them.

`TokenEndpoint.send` is the only place that sends a secret, and it quotes none of them: not in errors, and not if the server
repeats what it was sent. Assertions (RFC 7523) and proofs of possession (DPoP, RFC 9449) need `wirecall[auth]`.
"""

import base64
import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any
from urllib.parse import quote, urlsplit

from msgspec import Struct

from wirecall.auth.discovery import SHOWN, Answer, Issuer, Network, origin
from wirecall.auth.store import Login, Registration
from wirecall.errors import NotAuthorized, UsageError

JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
LIFETIME = 300  # seconds of an assertion
_ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_SECRETS = (
    *("assertion", "client_assertion", "client_secret", "code", "code_verifier"),
    *("refresh_token", "subject_token", "token"),
)
_TOKEN = re.compile(r"[!-~]+")  # it becomes part of a header
_CODE = re.compile(r"[!#-\[\]-~]{1,60}")  # of an error (RFC 6749, section 5.2)


# --- signatures -----------------------------------------------------------------------------------------------------


def _jwt() -> ModuleType:
    try:
        import jwt  # late: an extra
    except ImportError:
        raise UsageError("PyJWT is not installed.", "keys and DPoP need it", "pip install 'wirecall[auth]'") from None
    return jwt


def client_assertion(key: str, algorithm: str, client_id: str, audience: str) -> str:
    """Return the text by which a client authenticates with its private key (PEM) at a token endpoint."""
    now, jwt = int(time.time()), _jwt()
    claims = {"iss": client_id, "sub": client_id, "aud": audience, "iat": now, "exp": now + LIFETIME}
    try:
        text: str = jwt.encode({**claims, "jti": secrets.token_urlsafe(16)}, key, algorithm=algorithm)
    except (ValueError, TypeError, NotImplementedError, jwt.PyJWTError) as error:  # without the key itself
        why = f"{type(error).__name__} with {algorithm}"
        raise UsageError("The client's key cannot sign.", why, "give a private key as PEM, and its algorithm=") from None
    return text


class DpopKey:
    """A key that a token is bound to: each request proves that the client has it."""

    def __init__(self, pem: str | None = None) -> None:
        self._jwt: Any = _jwt()
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        if pem is None:
            self._key: Any = ec.generate_private_key(ec.SECP256R1())
        else:
            self._key = serialization.load_pem_private_key(pem.encode(), None)
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        self.pem: str = self._key.private_bytes(*form).decode()
        self._jwk = self._jwt.algorithms.ECAlgorithm.to_jwk(self._key.public_key(), as_dict=True)

    def proof(self, method: str, url: str, *, nonce: str | None = None, token: str | None = None) -> str:
        """Return the proof for one request; each has an id of its own."""
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
        text: str = self._jwt.encode(claims, self._key, algorithm="ES256", headers={"typ": "dpop+jwt", "jwk": self._jwk})
        return text


def sha256_text(text: str) -> str:
    """Return the digest of a text as OAuth writes it: base64url without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


# --- clients and answers --------------------------------------------------------------------------------------------


def basic(client_id: str, secret: str) -> str:
    """Return the credentials of a client as HTTP Basic."""
    # RFC 6749, section 2.3.1: both parts are encoded as in a form before they are joined. A space is %20 and not "+": every
    # reader of forms takes both, and a server that only decodes %XX, such as Authlib's, takes this one.
    pair = f"{quote(client_id, safe='')}:{quote(secret, safe='')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def method_for(issuer: Issuer, secret: str | None) -> str:
    """Return how a client authenticates, where its registration does not say so."""
    if secret is None:
        return "none"
    offered = issuer.token_endpoint_auth_methods_supported
    # Without a list it is Basic (RFC 8414, section 2).
    if offered is None or "client_secret_basic" in offered:
        return "client_secret_basic"
    return "client_secret_post" if "client_secret_post" in offered else "none"


class Denied(NotAuthorized):
    """An authorization server refused a request; `code` is its reason."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class _Problem(Struct):
    error: str = ""
    error_description: str = ""


def denied(answer: Answer, what: str, secrets: Iterable[str] = ()) -> Denied:
    """Return the refusal of an endpoint, without the secrets that it was sent."""
    problem = answer.document(_Problem) or _Problem()
    told = ": ".join(filter(None, (problem.error if _CODE.fullmatch(problem.error) else "", problem.error_description)))
    for secret in secrets:
        told = told.replace(secret, "…")
    shown = ascii(told[:SHOWN])[1:-1] if told else f"HTTP {answer.status}"
    return Denied(f"{what} refused the request: {shown}", problem.error)


class Issued(Struct, frozen=True):
    """The answer of a token endpoint (RFC 6749, section 5.1)."""

    access_token: str
    token_type: str = "Bearer"
    expires_in: float | str | None = None  # some servers send a text
    refresh_token: str | None = None

    def __repr__(self) -> str:
        return f"Issued(token_type={self.token_type!r})"  # and no secret

    @property
    def expires(self) -> float | None:
        """The Unix time at which the token ends."""
        try:
            return None if self.expires_in is None else time.time() + float(self.expires_in)
        except ValueError:
            return None


# --- the token endpoint ---------------------------------------------------------------------------------------------


class TokenEndpoint(Struct, frozen=True):
    """The token endpoint of one authorization server."""

    network: Network
    url: str
    issuer: str
    key: DpopKey | None = None
    nonces: dict[str, str] = {}  # of DPoP, by origin

    async def send(self, client: Registration, form: Mapping[str, str], sign: Callable[[], str] | None = None) -> Answer:
        """Send a request in the name of the client, which `sign` authenticates if it has a key; raise its refusal."""
        sent, headers = dict(form), {}
        if client.client_method == "client_secret_basic":
            headers["Authorization"] = basic(client.client_id, client.client_secret or "")
        elif client.client_id:  # a workload may not have one
            sent["client_id"] = client.client_id
        if client.client_method == "client_secret_post" and client.client_secret is not None:
            sent["client_secret"] = client.client_secret
        for is_last in (False, True):
            if sign is not None:
                sent["client_assertion_type"], sent["client_assertion"] = _ASSERTION_TYPE, sign()  # one serves once
            if self.key is not None:
                headers["DPoP"] = self.key.proof("POST", self.url, nonce=self.nonces.get(origin(self.url)))
            answer = await self.network.post(self.url, "the token endpoint", sent, headers)
            nonce = next((value for name, value in answer.headers.items() if name.lower() == "dpop-nonce"), None)
            if nonce is not None:
                self.nonces[origin(self.url)] = nonce
            if answer.status == 200:
                return answer
            pair = headers.get("Authorization", "").removeprefix("Basic ")
            secrets = [client.client_secret, pair, *(sent.get(name) for name in _SECRETS)]
            refusal = denied(answer, f"the authorization server {self.issuer[:SHOWN]}", filter(None, secrets))
            # The server names the nonce that a proof must have (RFC 9449, section 8).
            if is_last or refusal.code != "use_dpop_nonce" or nonce is None or self.key is None:
                raise refusal
        raise AssertionError("the last answer is returned or raised")

    async def ask(self, client: Registration, form: Mapping[str, str], sign: Callable[[], str] | None = None) -> Issued:
        """Return the token for a grant."""
        answer = await self.send(client, form, sign)
        token, what = answer.document(Issued), f"the authorization server {self.issuer[:SHOWN]}"
        if token is None or not _TOKEN.fullmatch(token.access_token):
            raise NotAuthorized(f"{what} did not answer with a token")
        if self.key is not None and token.token_type.lower() == "bearer":
            # A token that is not bound to the key works for a thief as well (RFC 9449, section 5).
            raise NotAuthorized(f"{what} does not bind tokens to a key, as dpop=True asks for")
        return token


class Flow(Struct, kw_only=True):
    """What is known when a new token is asked for."""

    network: Network
    server: str
    resource: str | None
    issuer: Issuer
    scopes: list[str]
    earlier: Login | None  # at the same issuer
    key: DpopKey | None
    nonces: dict[str, str]

    @property
    def common(self) -> dict[str, str]:
        """The parameters of every request: the resource (RFC 8707) and the scopes."""
        resource = {} if self.resource is None else {"resource": self.resource}
        return {**resource, **({"scope": " ".join(self.scopes)} if self.scopes else {})}

    async def token(self, client: Registration, form: Mapping[str, str], sign: Callable[[], str] | None = None) -> Login:
        """Return a login with the token for a grant."""
        endpoint = self.issuer.token_endpoint
        if endpoint is None:
            raise NotAuthorized(f"the authorization server {self.issuer.issuer[:SHOWN]} does not have a token endpoint")
        token = await TokenEndpoint(self.network, endpoint, self.issuer.issuer, self.key, self.nonces).ask(
            client, form, sign
        )
        return Login(
            server=self.server,
            issuer=self.issuer.issuer,
            client_id=client.client_id,
            client_secret=client.client_secret,
            client_method=client.client_method,
            client_scopes=client.client_scopes,
            client_expires=client.client_expires,
            redirect_uri=client.redirect_uri,
            resource=self.resource,
            token_endpoint=endpoint,
            revocation_endpoint=self.issuer.revocation_endpoint,
            scopes=self.scopes,
            access_token=token.access_token,
            token_type=token.token_type,
            refresh_token=token.refresh_token,
            expires=token.expires,
            dpop_key=None if self.key is None else self.key.pem,
            private=self.network.private,
        )
