"""How a client gets a token: the requests to the endpoints of an authorization server.

`TokenEndpoint.ask` is the only place that sends a secret, and it quotes none of them: not in errors, and not if the server
repeats what it was sent.
"""

import base64
import re
import time
from collections.abc import Iterable, Mapping
from urllib.parse import quote

from msgspec import Struct

from wirecall.auth.discovery import Issuer, origin
from wirecall.auth.network import SHOWN, Answer, Network
from wirecall.auth.proof import DpopKey, client_assertion
from wirecall.auth.store import Login
from wirecall.errors import NotAuthorized

JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_ASSERTION_TYPE = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_SECRETS = (
    *("assertion", "client_assertion", "client_secret", "code", "code_verifier"),
    *("refresh_token", "subject_token", "token"),
)
_TOKEN = re.compile(r"[!-~]+")  # it becomes part of a header
_CODE = re.compile(r"[!#-\[\]-~]{1,60}")  # of an error (RFC 6749, section 5.2)


class Denied(NotAuthorized):
    """An authorization server refused a request; `code` is its reason."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class Registration(Struct, frozen=True, kw_only=True):
    """The client, as one authorization server knows it."""

    client_id: str
    secret: str | None = None
    method: str = "none"
    key: str | None = None  # PEM
    algorithm: str = "ES256"
    scopes: list[str] | None = None
    expires: float | None = None
    redirect_uri: str | None = None

    def __repr__(self) -> str:
        return f"Registration(client_id={self.client_id!r}, method={self.method!r})"  # and no secret


class Issued(Struct, frozen=True):
    """The answer of a token endpoint (RFC 6749, section 5.1)."""

    access_token: str
    token_type: str = "Bearer"
    expires_in: float | str | None = None  # some servers send a text
    refresh_token: str | None = None
    scope: str | None = None

    def __repr__(self) -> str:
        return f"Issued(token_type={self.token_type!r})"  # and no secret

    @property
    def expires(self) -> float | None:
        """The Unix time at which the token ends."""
        try:
            return None if self.expires_in is None else time.time() + float(self.expires_in)
        except ValueError:
            return None


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


def basic(client_id: str, secret: str) -> str:
    """Return the credentials of a client as HTTP Basic."""
    # RFC 6749, section 2.3.1: both parts are encoded as in a form before they are joined. A space is %20 and not "+": every
    # reader of forms takes both, and a server that only decodes %XX, such as Authlib's, takes this one.
    pair = f"{quote(client_id, safe='')}:{quote(secret, safe='')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def method_for(issuer: Issuer, has_secret: bool) -> str:
    """Return how a client authenticates, where its registration does not say so."""
    if not has_secret:
        return "none"
    offered = issuer.token_endpoint_auth_methods_supported
    # Without a list it is Basic (RFC 8414, section 2).
    if offered is None or "client_secret_basic" in offered:
        return "client_secret_basic"
    return "client_secret_post" if "client_secret_post" in offered else "none"


class TokenEndpoint:
    """The token endpoint of one authorization server."""

    def __init__(self, network: Network, url: str, issuer: str, key: DpopKey | None, nonces: dict[str, str]) -> None:
        self._network = network
        self._url = url
        self._issuer = issuer
        self._what = f"the authorization server {issuer[:SHOWN]}"
        self._key = key
        self._nonces = nonces  # of DPoP, by origin

    async def send(self, client: Registration, form: Mapping[str, str]) -> Answer:
        """Send a request in the name of the client; raise its refusal."""
        sent, headers = dict(form), {}
        if client.method == "client_secret_basic":
            headers["Authorization"] = basic(client.client_id, client.secret or "")
        elif client.client_id:  # a workload may not have one
            sent["client_id"] = client.client_id
        if client.method == "client_secret_post" and client.secret is not None:
            sent["client_secret"] = client.secret
        elif client.method == "private_key_jwt" and client.key is not None:
            sent["client_assertion_type"] = _ASSERTION_TYPE
            sent["client_assertion"] = client_assertion(client.key, client.algorithm, client.client_id, self._issuer)
        for is_last in (False, True):
            if self._key is not None:
                headers["DPoP"] = self._key.proof("POST", self._url, nonce=self._nonces.get(origin(self._url)))
            answer = await self._network.post(self._url, "the token endpoint", sent, headers)
            nonce = next((value for name, value in answer.headers.items() if name.lower() == "dpop-nonce"), None)
            if nonce is not None:
                self._nonces[origin(self._url)] = nonce
            if answer.status == 200:
                return answer
            pair = headers.get("Authorization", "").removeprefix("Basic ")
            secrets = [client.secret, pair, *(sent.get(name) for name in _SECRETS)]
            refusal = denied(answer, self._what, filter(None, secrets))
            # The server names the nonce that a proof must have (RFC 9449, section 8).
            if is_last or refusal.code != "use_dpop_nonce" or nonce is None or self._key is None:
                raise refusal
            if "client_assertion" in sent and client.key is not None:  # one serves once
                sent["client_assertion"] = client_assertion(client.key, client.algorithm, client.client_id, self._issuer)
        raise AssertionError("the last answer is returned or raised")

    async def ask(self, client: Registration, form: Mapping[str, str]) -> Issued:
        """Return the token for a grant."""
        what, answer = self._what, await self.send(client, form)
        token = answer.document(Issued)
        if token is None or not _TOKEN.fullmatch(token.access_token):
            raise NotAuthorized(f"{what} did not answer with a token")
        if self._key is not None and token.token_type.lower() == "bearer":
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

    async def token(self, client: Registration, form: Mapping[str, str]) -> Login:
        """Return a login with the token for a grant."""
        endpoint = self.issuer.token_endpoint
        if endpoint is None:
            raise NotAuthorized(f"the authorization server {self.issuer.issuer[:SHOWN]} does not have a token endpoint")
        asking = TokenEndpoint(self.network, endpoint, self.issuer.issuer, self.key, self.nonces)
        token = await asking.ask(client, form)
        return Login(
            server=self.server,
            issuer=self.issuer.issuer,
            client_id=client.client_id,
            client_secret=client.secret,
            client_method=client.method,
            client_scopes=client.scopes,
            client_expires=client.expires,
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
