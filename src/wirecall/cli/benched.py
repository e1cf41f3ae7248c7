"""The server processes of `wirecall bench`, which end when their stdin closes.

    python -m wirecall.cli.benched serve shop.py --http 127.0.0.1:0     an app, as `wirecall serve`
    python -m wirecall.cli.benched bare                                 a bare server

A parent that ends, also by SIGKILL, closes the stdin of its children: no server outlives a bench.

The bare server does only the work that no server can save: it reads the request, decodes it, and
encodes and sends a prepared result. Granian serves it with the same settings as an app. Its results
by method, or by tool, are the first line of its stdin.
"""

import os
import signal
import sys
import threading
from collections.abc import Awaitable
from typing import Any

import msgspec
from msgspec import Raw, Struct

from wirecall.mcp.types import PREFIX
from wirecall.transports.http_server import HttpServer
from wirecall.transports.serve import serve

_INFO = {"name": "bare", "version": "1"}


class _Params(Struct):
    name: str = ""
    protocol_version: str = msgspec.field(default="", name="protocolVersion")


class _Call(Struct):
    method: str
    id: int | str | None = None
    # A method of JSON-RPC may take a list.
    params: _Params | list[Any] | None = None


_decode = msgspec.json.Decoder(_Call | list[_Call]).decode
_encode = msgspec.json.Encoder().encode
_HEADERS = [("content-type", "application/json")]


class Bare(HttpServer):
    """Answers each call with the prepared result of its method or tool."""

    def __init__(self, results: dict[str, Raw], revision: str) -> None:
        super().__init__({})
        self._results = results
        self._revision = revision

    def __rsgi__(self, scope: Any, protocol: Any) -> Awaitable[None]:
        return self._rsgi(scope.method, protocol)

    async def _rsgi(self, method: str, protocol: Any) -> None:
        status, body = self.answer(method, await protocol())
        protocol.response_bytes(status, _HEADERS, body)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        data = b""
        more = scope["type"] == "http"
        while more:
            message = await receive()
            data += message.get("body", b"")
            more = message.get("more_body", False)
        status, body = self.answer(scope.get("method", ""), data)
        headers = [(name.encode(), value.encode()) for name, value in _HEADERS]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def answer(self, method: str, data: bytes) -> tuple[int, bytes]:
        """Return the status and the body for a request."""
        if method != "POST":
            return 405, b""
        calls = _decode(data)
        if isinstance(calls, list):
            return 200, _encode([self._answered(call) for call in calls])
        if calls.id is None:
            return 202, b""
        return 200, _encode(self._answered(calls))

    def _answered(self, call: _Call) -> dict[str, Any]:
        name = call.method
        if name == "tools/call" and isinstance(call.params, _Params):
            name = call.params.name
        result = self._results.get(name)
        if result is None:
            result = self._opened(call)
        return {"jsonrpc": "2.0", "id": call.id, "result": result}

    def _opened(self, call: _Call) -> Any:
        """Return the answer to a handshake of MCP."""
        if call.method == "initialize":
            return {"protocolVersion": self._revision, "capabilities": {}, "serverInfo": _INFO}
        return {
            "resultType": "complete",
            "supportedVersions": [self._revision],
            "capabilities": {},
            "_meta": {f"{PREFIX}serverInfo": _INFO},
        }


class Prepared(Struct):
    """The first line of a bare server's stdin."""

    results: dict[str, Raw]
    # The revision of MCP that it answers to a handshake.
    revision: str = ""


def _end_with_stdin() -> None:
    """Stop this process as SIGTERM does when its stdin closes."""

    def wait() -> None:
        while os.read(0, 1 << 16):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _bare() -> None:
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1 << 16)
        if not data:
            return
        line += data
    prepared = msgspec.json.decode(bytes(line), type=Prepared)
    _end_with_stdin()
    serve(Bare(prepared.results, prepared.revision), port=0, grace=1.0)


def main() -> None:
    if sys.argv[1:] == ["bare"]:
        _bare()
        return
    from wirecall.cli import main as command

    _end_with_stdin()
    command(sys.argv[1:])


if __name__ == "__main__":
    main()
