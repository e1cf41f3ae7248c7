"""A protected server and its authorization server at one address, which can be made to misbehave."""

import asyncio
import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit

from msgspec import Struct

from tests.client.peers import Listening, Reader, Writer, http
from wirecall.transports.http_client import HttpClient

RESOURCE = "/.well-known/oauth-protected-resource/rpc"
ISSUER = "/.well-known/oauth-authorization-server"


class Request(Struct):
    """A request that the world has received."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def form(self) -> dict[str, str]:
        return dict(parse_qsl(self.body.decode(), keep_blank_values=True))


Answer: TypeAlias = bytes | Callable[[Request], bytes | None]


def reply(document: object, status: str = "200 OK", *more: str) -> bytes:
    return http(json.dumps(document).encode(), status, *more)


class World(Listening):
    """Serves `/rpc` to callers with a token, and gives out tokens."""

    PATH = "/rpc"

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []
        self.instead: dict[str, Answer] = {}  # by path; None of a function is the usual answer
        self.resource: dict[str, Any] = {}  # members that replace those of the documents
        self.issuer: dict[str, Any] = {}
        self.challenge = ""  # further parameters
        self.needs: frozenset[str] = frozenset()  # scopes that a call needs
        self.expires_in: int | None = 3600
        self.refreshes = True
        self.answer: dict[str, str] = {}  # replaces the parameters of the authorization endpoint
        self.tokens: dict[str, str] = {}  # valid ones, with their scopes
        self.refresh_tokens: dict[str, str] = {}
        self.codes: dict[str, dict[str, str]] = {}
        self.hang = asyncio.Event()  # paths in `silent` wait for it
        self.silent: set[str] = set()
        self._count = 0

    @property
    def base(self) -> str:
        return self.url.removesuffix("/rpc")

    def count(self, path: str) -> int:
        return Counter(request.path for request in self.requests)[path]

    def asked(self, path: str) -> list[Request]:
        return [request for request in self.requests if request.path == path]

    async def _serve(self, reader: Reader, writer: Writer) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.rstrip().split("\r\n")
                method, target, _ = first.split(" ")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines)
                }
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                parts = urlsplit(target)
                request = Request(method, parts.path, dict(parse_qsl(parts.query)), headers, body)
                self.requests.append(request)
                if request.path in self.silent:
                    await self.hang.wait()
                planted = self.instead.get(request.path)
                answer = planted(request) if callable(planted) else planted
                writer.write(answer or self._answer(request))
                await writer.drain()

    def _answer(self, request: Request) -> bytes:
        if request.path == "/rpc":
            return self._call(request)
        if request.path == RESOURCE:
            return reply(
                {"resource": self.url, "authorization_servers": [self.base], **self.resource}
            )
        if request.path == ISSUER:
            document = {
                "issuer": self.base,
                "authorization_endpoint": f"{self.base}/authorize",
                "token_endpoint": f"{self.base}/token",
                "registration_endpoint": f"{self.base}/register",
                "revocation_endpoint": f"{self.base}/revoke",
                "code_challenge_methods_supported": ["S256"],
                "authorization_response_iss_parameter_supported": True,
                **self.issuer,
            }
            return reply({name: value for name, value in document.items() if value is not None})
        if request.path == "/register":
            return reply(
                {**json.loads(request.body), "client_id": self._new("client")}, "201 Created"
            )
        if request.path == "/authorize":
            code = self._new("code")
            self.codes[code] = request.query
            back = {"code": code, "state": request.query["state"], "iss": self.base, **self.answer}
            members = urlencode({key: value for key, value in back.items() if value})
            location = f"{request.query['redirect_uri']}?{members}"
            return http(b"", "302 Found", f"Location: {location}")
        if request.path == "/token":
            return self._token(request.form)
        if request.path == "/revoke":
            self.tokens.pop(request.form["token"], None)
            self.refresh_tokens.pop(request.form["token"], None)
            return http(b"")
        return http(b"", "404 Not Found")

    def _call(self, request: Request) -> bytes:
        token = request.headers.get("authorization", "").partition(" ")[2]
        where = f'resource_metadata="{self.base}{RESOURCE}"'
        if token not in self.tokens:
            return http(
                b"", "401 Unauthorized", f"WWW-Authenticate: Bearer {where}{self.challenge}"
            )
        if not self.needs <= set(self.tokens[token].split()):
            missing = f'error="insufficient_scope", scope="{" ".join(sorted(self.needs))}"'
            return http(b"", "403 Forbidden", f"WWW-Authenticate: Bearer {where}, {missing}")
        return reply({"jsonrpc": "2.0", "id": json.loads(request.body)["id"], "result": "fine"})

    def _token(self, form: dict[str, str]) -> bytes:
        scope = form.get("scope", "")
        if form["grant_type"] == "authorization_code":
            asked = self.codes.pop(form["code"], None)  # a code works once
            digest = hashlib.sha256(form["code_verifier"].encode()).digest()
            if (
                asked is None
                or asked["code_challenge"] != base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            ):
                return reply({"error": "invalid_grant"}, "400 Bad Request")
            scope = asked.get("scope", "")
        elif form["grant_type"] == "refresh_token":
            if form["refresh_token"] not in self.refresh_tokens:
                return reply({"error": "invalid_grant"}, "400 Bad Request")
            scope = self.refresh_tokens.pop(form["refresh_token"])  # the refresh token rotates
        token = self._new("access")
        refresh = self._new("refresh")
        self.tokens[token] = scope
        found: dict[str, Any] = {"access_token": token, "token_type": "Bearer"}
        if self.expires_in is not None:
            found["expires_in"] = self.expires_in
        if self.refreshes and form["grant_type"] in ("authorization_code", "refresh_token"):
            self.refresh_tokens[refresh] = scope
            found["refresh_token"] = refresh
        return reply(found)

    def _new(self, kind: str) -> str:
        self._count += 1
        return f"{kind}-secret-{self._count}"


async def visit(url: str) -> str | None:
    """Go to the page as a browser does, and return where it leads back to."""
    page = HttpClient(url)
    await page.open()
    try:
        async with page.request("GET") as answer:
            return answer.headers["location"]
    finally:
        await page.aclose()
