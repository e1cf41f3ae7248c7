"""The servers of bench/http.py: the same tool, each in its own way and served as its documentation
says.

Ours by `wirecall serve`, the bare ones by granian's command with uvloop, the others by their own
`run`:

python -m bench.servers.prices official PORT
"""

import os
import sys
from typing import Any

import msgspec

from wirecall import App, Context
from wirecall.auth import Jwt

# --- bare: what cannot be saved: read the body, decode it, encode the answer, send it -------------

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
_INFO = {"io.modelcontextprotocol/serverInfo": {"name": "shop", "version": "1.0"}}


def _answer(body: bytes) -> bytes:
    call = _decode(body)
    price = len(call["params"]["arguments"]["sku"])
    content = [{"type": "text", "text": str(price)}]
    result = {
        "resultType": "complete",
        "_meta": _INFO,
        "content": content,
        "structuredContent": price,
    }
    return _encode({"jsonrpc": "2.0", "id": call["id"], "result": result})


async def bare_asgi(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        body = _answer((await receive())["body"])
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def bare_rsgi(_: Any, protocol: Any) -> None:
    body = _answer(await protocol())
    protocol.response_bytes(
        200, [("content-type", "application/json"), ("content-length", str(len(body)))], body
    )


def _plain_answer(body: Any) -> bytes:
    call = _decode(body)
    price = len(call["params"]["sku"])
    return _encode({"jsonrpc": "2.0", "result": price, "id": call["id"]})


async def bare_socket(scope: Any, protocol: Any) -> None:
    """Plain JSON-RPC over HTTP and over a WebSocket."""
    if scope.proto == "http":
        body = _plain_answer(await protocol())
        protocol.response_bytes(
            200, [("content-type", "application/json"), ("content-length", str(len(body)))], body
        )
        return
    transport = await protocol.accept()
    # The kind of the message that ends a connection is 0.
    while (message := await transport.receive()).kind:
        await transport.send_str(_plain_answer(message.data).decode())
    protocol.close()


# --- ours -----------------------------------------------------------------------------------------

# Development checks each result.
ours = App("shop", version="1.0", mode="production", ledger="memory:")


@ours.query
def price(sku: str) -> int:
    """The price of an article."""
    return len(sku)


@ours.query(task=True)
def render(sku: str) -> int:
    """A picture of an article."""
    return len(sku)


@ours.query
async def follow(sku: str, ctx: Context) -> int:
    """The price of an article, with a word about its progress."""
    await ctx.progress(1, 1)
    return len(sku)


if "BENCH_KEYS" in os.environ:  # the same with a token that has a scope
    issuer, resource, keys = (
        os.environ[f"BENCH_{name}"] for name in ("ISSUER", "RESOURCE", "KEYS")
    )
    auth = Jwt(issuer, resource=resource, jwks=msgspec.json.decode(keys))
    guarded = App("shop", version="1.0", mode="production", ledger="memory:", auth=auth)
    guarded.query(name="price", scopes="prices:read")(price)

    @guarded.command(destructive=False)
    async def buy(sku: str) -> int:
        """Order an article."""
        return len(sku)


# --- others ---------------------------------------------------------------------------------------


def official(port: int) -> None:
    from mcp.server import MCPServer

    server = MCPServer("shop", version="1.0", log_level="ERROR")
    server.tool()(price)
    server.run(
        "streamable-http", host="127.0.0.1", port=port, json_response=True, stateless_http=True
    )


def fastmcp(port: int) -> None:
    import logging

    from fastmcp import FastMCP

    logging.disable(logging.INFO)
    server: Any = FastMCP("shop")
    server.tool(price)
    more = {"json_response": True, "stateless_http": True, "uvicorn_config": {"log_level": "error"}}
    server.run("http", host="127.0.0.1", port=port, path="/mcp", show_banner=False, **more)


if __name__ == "__main__":
    {"official": official, "fastmcp": fastmcp}[sys.argv[1]](int(sys.argv[2]))
