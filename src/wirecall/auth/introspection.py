"""Tokens that only their authorization server can read: it is asked about each (RFC 7662)."""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from urllib.parse import urlencode

from wirecall.auth.access import Verifier, check_address, check_resource
from wirecall.auth.documents import ask, connected
from wirecall.auth.grants import basic
from wirecall.auth.jwt import audiences
from wirecall.errors import BadAnswer, ConnectionLost, Unauthorized, UsageError
from wirecall.server.identity import Identity, scope_names
from wirecall.transports.http_client import HttpClient

KEPT = 60.0  # seconds; a token that is revoked stays good for as long


class Introspection(Verifier):
    """Accepts the tokens that an authorization server calls active and issued for this server.

    `url` is its introspection endpoint, `client_id` and `secret` are the credentials of this server there. The answer must
    have the server in `aud`: its `resource`, or `audience` where the authorization server uses another name. A token stays
    accepted for `keeps` seconds, at most 60, and not beyond its expiry.
    """

    def __init__(
        self,
        url: str,
        client_id: str,
        secret: str,
        *,
        issuer: str,
        resource: str,
        audience: str | Sequence[str] | None = None,
        scopes: str | Sequence[str] = (),
        keeps: float = KEPT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if not 0 <= keeps <= KEPT:
            raise UsageError(
                f"keeps must be 0 to {KEPT:g} seconds, got {keeps!r}.", "a revoked token stays good for as long"
            )
        self.url = check_address("url", url)
        self.issuer: str = check_address("issuer", issuer)
        self.resource = check_resource(resource)
        self.audience = audiences(resource, audience)
        self.scopes = scope_names("scopes of Introspection", scopes)
        self.keeps = keeps
        self._clock = clock
        self._http: HttpClient | None = None  # while a server is open
        self._opened = AsyncExitStack()
        self._headers = {
            "authorization": basic(client_id, secret),
            "content-type": "application/x-www-form-urlencoded",
        }

    async def verify(self, token: str) -> Identity | None:
        form = urlencode({"token": token, "token_type_hint": "access_token"}).encode()
        answer = None
        if (http := self._http) is not None:
            with suppress(ConnectionLost):  # the endpoint has closed a connection that was idle
                answer = await ask(http, "POST", form, self._headers)
        if answer is None:
            async with connected(self.url) as http:
                answer = await ask(http, "POST", form, self._headers)
        status, told = answer
        if status != 200:
            raise BadAnswer(f"{self.url}: expected 200, got {status}; check client_id and secret")
        if told.get("active") is not True:
            return None
        if told.get("iss", self.issuer) != self.issuer:
            return None
        given = told.get("aud")
        if not any(name in self.audience for name in (given if isinstance(given, list) else [given])):
            raise Unauthorized("the token is for another audience")
        now, expires, begins = self._clock(), told.get("exp"), told.get("nbf")
        if isinstance(expires, (int, float)) and now >= expires:
            raise Unauthorized("the token has expired")
        if isinstance(begins, (int, float)) and now < begins:
            raise Unauthorized("the token is not valid yet")
        return Identity.of_claims(told, self.issuer)

    async def open(self) -> None:
        if self._http is None:
            self._http = await self._opened.enter_async_context(connected(self.url))

    async def aclose(self) -> None:
        self._http = None
        await self._opened.aclose()

    async def check(self) -> str:
        await self.verify("wirecall-doctor")  # a token that is not active anywhere
        return f"{self.url} answers"
