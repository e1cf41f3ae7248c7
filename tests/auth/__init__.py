"""Authorization on the server: a shop whose methods ask for scopes, and tokens of every kind for
it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.mcp.asgi import BASIC, R5, Exchange, enveloped, repeated
from wirecall import App, Context
from wirecall.auth import Access, Jwt
from wirecall.testing.auth import AuthorizationServer
from wirecall.transports.http_server import HttpServer

RESOURCE = "https://api.example.com/mcp"
METADATA = "https://api.example.com/.well-known/oauth-protected-resource/mcp"
NOW = 1_800_000_000.0


class Clock:
    """A clock that a test sets."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_shop(access: Access, **options: Any) -> App:
    """Return an app with something of every kind that can ask for scopes.

    `ran` in its state has the calls that ran.
    """
    app = App("shop", auth=access, extensions={"com.example/loyalty": {}}, **options)

    @app.query
    def whoami(ctx: Context) -> dict[str, Any]:
        identity = ctx.identity
        return {
            "caller": ctx.caller,
            "subject": identity and identity.subject,
            "client": identity and identity.client,
            "scopes": sorted(identity.scopes) if identity else None,
            "team": identity and identity.claims.get("team"),
        }

    @app.query(scopes="prices:read")
    def price(sku: str) -> int:
        return len(sku)

    @app.command(scopes=["orders:write", "orders:audit"], key="auto")
    def order(sku: str) -> str:
        app.catalog().extensions["com.example/loyalty"].setdefault("ran", []).append(sku)
        return f"ordered {sku}"

    @app.tool(scopes=lambda id: [f"orders:{id}"])
    def cancel(id: str, reason: str = "") -> str:
        return f"cancelled {id}{reason}"

    @app.resource("shop://news", scopes="news:read")
    def news() -> str:
        return "none"

    @app.resource("shop://orders/{id}", scopes=lambda id: ["orders:read", f"orders:{id}"])
    def one(id: int) -> str:
        return f"order {id}"

    @app.prompt(scopes="prompts:use")
    def greet(name: str) -> str:
        return f"hello {name}"

    @app.completion("greet", "name")
    def names(value: str) -> list[str]:
        return [f"{value}da"]

    @app.extension_method("loyalty/points", extension="com.example/loyalty", scopes="points:read")
    def points() -> dict[str, int]:
        return {"points": 3}

    return app


def ran(app: App) -> list[str]:
    """Return the orders that ran."""
    done: list[str] = app.catalog().extensions["com.example/loyalty"].get("ran", [])
    return done


class Shop:
    """The shop, its authorization server, and requests to it."""

    def __init__(
        self, *, clock: Clock | None = None, scopes: Sequence[str] = (), **options: Any
    ) -> None:
        self.clock = clock or Clock()
        self.issuer = AuthorizationServer(clock=self.clock)
        jwt = Jwt(
            self.issuer.issuer,
            resource=RESOURCE,
            jwks=self.issuer.jwks,
            scopes=scopes,
            clock=self.clock,
        )
        more = {
            name: options.pop(name)
            for name in ("hierarchy", "hide", "name", "title")
            if name in options
        }
        self.app = make_shop(
            Access(jwt, clock=self.clock, **more), hosts=["api.example.com"], **options
        )
        self.server: HttpServer = self.app.asgi()

    def token(self, scopes: str = "", subject: str | None = "alice", **claims: Any) -> str:
        return self.issuer.token(
            subject, resource=claims.pop("resource", RESOURCE), scopes=scopes, **claims
        )

    async def ask(
        self,
        method: str,
        path: str,
        token: str | None = None,
        message: Any = None,
        headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    ) -> "Told":
        """Send one request, as JSON, and return its answer."""
        given = [*(headers.items() if isinstance(headers, Mapping) else headers)]
        fields = [
            *BASIC.items(),
            *([("authorization", f"Bearer {token}")] if token is not None else []),
            *given,
        ]
        names = {name for name, _ in given}
        fields = [(name, value) for name, value in BASIC.items() if name not in names] + fields[
            len(BASIC) :
        ]
        if message is None:
            body = b""
        elif isinstance(message, bytes):
            body = message
        else:
            body = json.dumps(message).encode()
        exchange = await Exchange(self.server, method, fields, body, path).started()
        answer = Told(exchange.status, dict(exchange.headers), await exchange.read())
        await exchange.close()
        return answer

    async def rpc(self, token: str | None, message: Any, **headers: str) -> "Told":
        return await self.ask(
            "POST",
            "/rpc",
            token,
            message,
            {name.replace("_", "-"): each for name, each in headers.items()},
        )

    async def mcp(
        self, token: str | None, method: str, params: Any = None, capabilities: Any = None
    ) -> "Told":
        """Send one request of 2026-07-28."""
        message = enveloped(method, params, capabilities=capabilities)
        return await self.ask("POST", "/mcp", token, message, repeated(message, R5))


class Told:
    """An answer: its status, its header and its body."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def challenge(self) -> str:
        return self.headers.get("www-authenticate", "")

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def call(method: str, params: Any = None, id: Any = 1) -> dict[str, Any]:
    return {
        "jsonrpc": "2.0",
        "id": id,
        "method": method,
        **({} if params is None else {"params": params}),
    }
