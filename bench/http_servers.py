"""The servers of bench/http.py: the same tool, as an ASGI application, each in its own way.

python bench/http_servers.py NAME        prints its port when it listens
"""

import asyncio
import os
import socket
import sys
from typing import Any

import msgspec

from wirecall import App
from wirecall.auth import Jwt

SERVER = "uvicorn"


def bare() -> Any:
    """What cannot be saved: read the body, decode it, encode the answer, send it."""
    decode, encode = msgspec.json.Decoder().decode, msgspec.json.Encoder().encode
    info = {"io.modelcontextprotocol/serverInfo": {"name": "shop", "version": "1.0"}}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        message = await receive()
        call = decode(message["body"])
        price = len(call["params"]["arguments"]["sku"])
        content = [{"type": "text", "text": str(price)}]
        result = {"resultType": "complete", "_meta": info, "content": content, "structuredContent": price}
        body = encode({"jsonrpc": "2.0", "id": call["id"], "result": result})
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


def ours() -> Any:
    app = App("shop", version="1.0", mode="production", ledger="memory:")  # development checks each result

    @app.query
    def price(sku: str) -> int:
        """The price of an article."""
        return len(sku)

    @app.query(task=True)
    def render(sku: str) -> int:
        """A picture of an article."""
        return len(sku)

    return app.asgi()


def guarded() -> Any:
    """The same with a token that has a scope."""
    issuer, resource, keys = (os.environ[f"BENCH_{name}"] for name in ("ISSUER", "RESOURCE", "KEYS"))
    auth = Jwt(issuer, resource=resource, jwks=msgspec.json.decode(keys))
    app = App("shop", version="1.0", mode="production", ledger="memory:", auth=auth)

    @app.query(scopes="prices:read")
    def price(sku: str) -> int:
        """The price of an article."""
        return len(sku)

    return app.asgi()


def official() -> Any:
    from mcp.server import MCPServer

    server = MCPServer("shop", version="1.0")

    @server.tool()
    def price(sku: str) -> int:
        """The price of an article."""
        return len(sku)

    return server.streamable_http_app(json_response=True, stateless_http=True)


def fastmcp() -> Any:
    import logging

    from fastmcp import FastMCP

    logging.disable(logging.INFO)
    server: Any = FastMCP("shop")

    @server.tool  # type: ignore[untyped-decorator]
    def price(sku: str) -> int:
        """The price of an article."""
        return len(sku)

    return server.http_app(path="/mcp", json_response=True, stateless_http=True)


APPS = {"bare": bare, "ours": ours, "guarded": guarded, "official": official, "fastmcp": fastmcp}


def main() -> None:
    import uvicorn

    # Named as TCP: asyncio turns Nagle's algorithm off only then, and every answer would wait 40 ms otherwise.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(APPS[sys.argv[1]](), log_level="error", access_log=False, lifespan="auto")
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


if __name__ == "__main__":
    main()
