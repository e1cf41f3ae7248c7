"""`Authorization`: the token of a client at one server, starting with the first refusal.

    headers -> request -> 401: metadata -> refresh, or a new login -> request
                          403: the same with more scopes            -> request

1. A token is sent until the server refuses it. One that expires within a minute is refreshed first.
2. One renewal runs at a time, in this process and, through the lock of the store, in others. A call
   that waited for it, or that was sent with an older token, is sent again with the new one.
3. Credentials belong to their issuer: if the server names another one, they stay where they are
   (SEP-2352).
4. The client gives up if a new token is refused with 401, after a 403 for scopes that it asked for
   already, and at the third step in a row.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TypeAlias
from urllib.parse import urlsplit

from msgspec.structs import replace

from wirecall.auth.discovery import (
    SHOWN,
    Challenge,
    Issuer,
    Network,
    ProtectedResource,
    asked,
    choose_issuer,
    find_resource,
    origin,
)
from wirecall.auth.grants import Denied, DpopKey, Flow, TokenEndpoint, TokenWay
from wirecall.auth.store import Login, Store
from wirecall.errors import MissingScopes, NotAuthorized, NotSent, UsageError
from wirecall.transports.http_client import Auth, HttpAnswer, HttpClient

EARLY = 60.0  # seconds before its expiry at which a token is refreshed
STEPS = 2  # new logins for more scopes, before one of them is accepted
LONGEST_NONCE = 1000  # characters

# Refusals of a token endpoint that say nothing about the refresh token; "" is one without a reason,
# such as a 503.
_LATER = ("", "server_error", "temporarily_unavailable")
_SCOPE = re.compile(r"[A-Za-z0-9._:/*+-]+")

Credentials: TypeAlias = "TokenWay | str | Callable[[], Awaitable[str]]"


def authorization(credentials: Credentials, url: str) -> Auth:
    """Return the object that authorizes the requests to a server."""
    if isinstance(credentials, TokenWay):
        return Authorization(credentials, url)
    if isinstance(credentials, str):
        _bearer(credentials)  # a mistake shows at once

        async def same() -> str:
            return credentials

        return Function(same)
    if callable(credentials):
        return Function(credentials)
    known = "a way of wirecall.auth, a token, or an async function that returns one"
    raise UsageError(f"auth= cannot be of type {type(credentials).__name__}.", fix=f"use {known}")


def _bearer(token: object) -> dict[str, str]:
    """Return the header with a token as it is (RFC 6750)."""
    if (
        not isinstance(token, str)
        or not token.isascii()
        or not token.isprintable()
        or not token.strip()
    ):
        raise UsageError(
            "auth= is not a token.",
            "expected ASCII characters without line breaks",
            "check where it is from",
        )
    return {"Authorization": f"Bearer {token}"}


def _missing(scopes: frozenset[str], names: str = "", fix: str = "") -> MissingScopes:
    """Return the error about scopes that a client's token lacks; `names` are those to show."""
    shown = names or " ".join(sorted(scopes))
    return MissingScopes(
        f"the server asks for scopes that the token does not have, {shown[:SHOWN]!a}",
        scopes,
        fix=fix,
    )


def _param(challenge: Challenge | None, name: str) -> str | None:
    """Return a parameter of the challenge in a refusal, None if there is no such parameter."""
    if challenge is None:
        return None
    return challenge.params.get(name)


class Function:
    """Tokens from a function: the first one, and another when the server refuses the last."""

    is_interactive = False

    def __init__(self, function: Callable[[], Awaitable[str]]) -> None:
        self._function = function
        self._headers: Mapping[str, str] | None = None
        # Headers with a token that the server has not accepted yet.
        self._new: Mapping[str, str] | None = None
        self._lock = asyncio.Lock()

    async def headers(self, method: str, url: str) -> Mapping[str, str]:
        async with self._lock:
            if self._headers is None:
                self._headers = _bearer(await self._function())
        return self._headers

    async def answered(self, answer: HttpAnswer, sent: Mapping[str, str]) -> bool:
        if answer.status not in (401, 403):
            self._new = None
            return False
        challenge = asked(answer.values("www-authenticate"))
        if answer.status == 403:
            if challenge is None or _param(challenge, "error") != "insufficient_scope":
                return False
            raise _missing(challenge.scopes)
        async with self._lock:
            if sent == self._headers and self._new != sent:
                self._new = self._headers = _bearer(await self._function())
        if sent == self._headers:
            self._new = None  # the next call asks the function again
            reason = ""
            if why := _param(challenge, "error_description"):
                reason = f": {why[:SHOWN]!a}"
            raise NotAuthorized(f"the server refuses the token of auth= with HTTP 401{reason}")
        return True


class Authorization:
    """The login of a client at one server, by one kind of grant."""

    def __init__(self, way: TokenWay, url: str) -> None:
        assert way.store is not None  # `TokenWay` makes one
        self.is_interactive = way.is_interactive
        self._way = way
        self._url = url
        self._store: Store = way.store
        self._login: Login | None = None
        self._has_read = False
        self._lock = asyncio.Lock()
        # The last nonce for proofs of DPoP, by origin.
        self._nonces: dict[str, str] = {}
        self._key: DpopKey | None = None
        # A token that the server has not accepted yet, and how the client got it.
        self._new: tuple[str, str] | None = None
        self._steps = 0

    # --- requests ---------------------------------------------------------------------------------

    async def headers(self, method: str, url: str) -> Mapping[str, str]:
        if not self._has_read:
            async with self._lock:
                await self._read()
        login = self._login
        if (
            login is not None
            and login.refresh_token
            and login.expires is not None
            and login.expires - EARLY < time.time()
        ):
            # One refresh, unless another call or process has done it by now. If it fails, the
            # server's own refusal says more, and leads to a new login.
            async with self._lock, self._store.lock(self._url):
                await self._read()
                if self._login is None or self._login.access_token == login.access_token:
                    self._login = login
                    with suppress(NotAuthorized):
                        await self._refresh(login)
            login = self._login
        if login is None or not login.access_token:
            return {}
        if login.dpop_key is None:
            return {"Authorization": f"Bearer {login.access_token}"}
        if self._key is None or self._key.pem != login.dpop_key:
            self._key = DpopKey(login.dpop_key)
        proof = self._key.proof(
            method, url, nonce=self._nonces.get(origin(url)), token=login.access_token
        )
        return {"Authorization": f"DPoP {login.access_token}", "DPoP": proof}

    async def answered(self, answer: HttpAnswer, sent: Mapping[str, str]) -> bool:
        nonce = answer.headers.get("dpop-nonce")
        if nonce is not None and len(nonce) <= LONGEST_NONCE:
            self._nonces[origin(self._url)] = nonce
        used = sent.get("Authorization", "").partition(" ")[2]
        if answer.status not in (401, 403):
            if self._new is not None and self._new[0] == used:
                self._new = None
                self._steps = 0
            return False
        challenge = asked(answer.values("www-authenticate"))
        error = _param(challenge, "error")
        if nonce is not None and error == "use_dpop_nonce" and "DPoP" in sent:
            return True
        if answer.status == 403 and error != "insufficient_scope":
            return False
        network = Network(private=self._way.private or answer.is_private, timeout=self._way.timeout)
        async with self._lock, self._store.lock(self._url):
            await self._read()
            if self._login is not None and self._login.access_token not in ("", used):
                return True  # another call, or another process, has renewed it
            await self._renew(network, challenge, used, more_scopes=answer.status == 403)
        return True

    # --- logins -----------------------------------------------------------------------------------

    async def login(self) -> Login:
        """Log in now, even if the store has a login, and return the new login."""
        http = HttpClient(self._url)
        await http.open()
        kind = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        ping = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
        try:
            async with (
                asyncio.timeout(self._way.timeout),
                http.request("POST", ping, kind) as answer,
            ):
                challenge = None
                if answer.status == 401:
                    challenge = asked(answer.values("www-authenticate"))
                network = Network(
                    private=self._way.private or answer.is_private, timeout=self._way.timeout
                )
        except TimeoutError:
            raise NotSent(f"the server did not answer within {self._way.timeout:g} s") from None
        finally:
            await http.aclose()
        async with self._lock, self._store.lock(self._url):
            await self._read()
            resource = await find_resource(network, self._url, challenge)
            await self._obtain(network, resource, challenge)
            assert self._login is not None
            return self._login

    async def logout(self) -> list[tuple[Login, str]]:
        """Forget all logins at the server.

        Return them, each with the reason why it could not be revoked, or "".
        """
        found = []
        async with self._store.lock(self._url):
            for login in await self._store.logins(self._url):
                try:
                    await self._revoke(login)
                    fault = ""
                except NotAuthorized as error:
                    fault = str(error)
                await self._store.remove(login)
                found.append((login, fault))
        self._login = None
        return found

    async def _revoke(self, login: Login) -> None:
        """Revoke the tokens at the authorization server (RFC 7009)."""
        if login.revocation_endpoint is None:
            raise NotAuthorized(f"{login.issuer} does not revoke tokens; they expire")
        network = Network(private=login.private, timeout=self._way.timeout)
        tokens = {"refresh_token": login.refresh_token, "access_token": login.access_token}
        endpoint = TokenEndpoint(network, login.revocation_endpoint, login.issuer)
        for kind, token in tokens.items():
            if token:
                try:
                    await endpoint.send(login, {"token": token, "token_type_hint": kind})
                except Denied as refusal:
                    if kind != "access_token" or refusal.code != "unsupported_token_type":
                        raise
                    # Some servers revoke no access tokens, such as JWTs (RFC 7009, section 2.2.1).
                    why = f"{login.issuer} does not revoke access tokens; this one expires"
                    raise NotAuthorized(why) from None

    async def _read(self) -> None:
        """Take the newest login that fits from the store."""
        logins = await self._store.logins(self._url)
        self._login = next(filter(self._way.fits, logins), self._login)
        self._has_read = True

    async def _renew(
        self, network: Network, challenge: Challenge | None, used: str, *, more_scopes: bool
    ) -> None:
        """Get a token that the server may accept, after it refused the token `used`."""
        login = self._login
        is_new = self._new is not None and self._new[0] == used
        if more_scopes:
            self._check_scopes(challenge)
            self._steps += 1
        elif self._new == (used, "login"):
            raise NotAuthorized(
                "the server refuses the token that its authorization server has just issued"
            )
        can_refresh = not more_scopes and not is_new
        if login is None or login.refresh_token is None:
            can_refresh = False
        resource = None
        if self._way.can_obtain or can_refresh:
            resource = await find_resource(network, self._url, challenge)
        if login is not None and can_refresh and await self._try_refresh(login, resource):
            return
        if not self._way.can_obtain:
            raise NotAuthorized(
                "the server does not accept a login that is kept", fix=f"wirecall login {self._url}"
            )
        await self._obtain(network, resource, challenge)

    def _check_scopes(self, challenge: Challenge | None) -> None:
        """Raise `MissingScopes`, unless a new login may get the scopes that the server asks for."""
        wanted: frozenset[str] = frozenset()
        if challenge is not None:
            wanted = challenge.scopes
        missing = wanted
        if self._login is not None:
            missing = wanted - set(self._login.scopes)
        if missing and self._steps < STEPS and self._way.can_obtain:
            return
        names = " ".join(sorted(missing or wanted))
        fix = ""
        # A user copies the command into a shell.
        if not self._way.can_obtain and all(_SCOPE.fullmatch(name) for name in missing):
            fix = f"wirecall login {self._url} --scope '{names}'"
        raise _missing(wanted, names, fix)

    async def _try_refresh(self, login: Login, resource: ProtectedResource | None) -> bool:
        """Refresh a login; return False if only a new login can help."""
        if resource is not None and login.issuer not in resource.authorization_servers:
            return False
        try:
            await self._refresh(login)
        except Denied as refusal:
            if refusal.code in _LATER:
                raise
            login.refresh_token = None  # it has expired, or was used already
            # The authorization server has forgotten the client, so the client registers again.
            if refusal.code == "invalid_client":
                login.redirect_uri = None
            return False
        return True

    async def _obtain(
        self, network: Network, resource: ProtectedResource | None, challenge: Challenge | None
    ) -> None:
        """Get a new token, and keep it."""
        way = self._way
        issuer = await choose_issuer(network, self._url, resource, way.issuer)
        earlier = self._login
        if earlier is not None and earlier.issuer != issuer.issuer:
            earlier = None
        name = way.resource
        if not isinstance(name, str | None):
            name = self._resource_name(resource)
        key = None
        if way.dpop:
            key = DpopKey()
            if earlier is not None and earlier.dpop_key:
                key = DpopKey(earlier.dpop_key)
        flow = Flow(
            network=network,
            server=self._url,
            resource=name,
            issuer=issuer,
            scopes=self._scopes_to_request(issuer, resource, challenge, earlier),
            earlier=earlier,
            key=key,
            nonces=self._nonces,
        )
        login = await way.obtain(flow)
        await self._keep(login, "login")

    def _resource_name(self, resource: ProtectedResource | None) -> str:
        """Return the name of the server in a request for a token (RFC 8707)."""
        if resource is not None:
            return resource.resource
        parts = urlsplit(self._url)
        name = parts._replace(fragment="").geturl()
        if parts.path == "/":
            name = name.removesuffix("/")
        return name

    def _scopes_to_request(
        self,
        issuer: Issuer,
        resource: ProtectedResource | None,
        challenge: Challenge | None,
        earlier: Login | None,
    ) -> list[str]:
        """Return the scopes of a new login, each once.

        The challenge names the scopes of this operation, or else the server lists its own. Earlier
        scopes stay (SEP-2350).
        """
        scopes: list[str] = []
        if earlier is not None:
            scopes += earlier.scopes
        scopes += self._way.scopes
        if challenge is not None and challenge.scopes:
            scopes += sorted(challenge.scopes)
        elif resource is not None:
            scopes += sorted(resource.scopes_supported or ())
        if self._way.can_refresh and "offline_access" in (issuer.scopes_supported or ()):
            scopes.append("offline_access")
        return list(dict.fromkeys(scopes))

    async def _refresh(self, login: Login) -> None:
        network = Network(private=login.private, timeout=self._way.timeout)
        key = None
        if login.dpop_key:
            key = DpopKey(login.dpop_key)
        form = {"grant_type": "refresh_token", "refresh_token": login.refresh_token or ""}
        if login.resource is not None:
            form["resource"] = login.resource
        endpoint = TokenEndpoint(network, login.token_endpoint, login.issuer, key, self._nonces)
        token = await endpoint.ask(login, form)
        # If the answer omits the refresh token or the scopes, they stay valid (RFC 6749, section
        # 6).
        renewed = replace(
            login,
            access_token=token.access_token,
            token_type=token.token_type,
            refresh_token=token.refresh_token or login.refresh_token,
            expires=token.expires,
        )
        await self._keep(renewed, "refresh")

    async def _keep(self, login: Login, how: str) -> None:
        login.saved = time.time()
        self._login = login
        self._new = (login.access_token, how)
        await self._store.save(login)
