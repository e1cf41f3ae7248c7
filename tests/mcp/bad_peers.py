"""MCP servers that misbehave."""

from collections.abc import Callable
from typing import Any

import msgspec

from tests.client.conftest import nothing_is_left as nothing_is_left
from tests.client.peers import Peer, Writer, http
from wirecall import Retry

encode = msgspec.json.encode


Answer = Callable[[Any], bytes]  # maps a message, or the header of a GET, to a whole HTTP answer


HANDSHAKE = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {}}


DISCOVERED = {
    "resultType": "complete",
    "supportedVersions": ["2026-07-28"],
    "capabilities": {},
    "ttlMs": 0,
}


QUICK = Retry(attempts=3, first=0.001)


def result(value: Any) -> Answer:
    """An answer with a result: a value, or the bytes of one."""
    text = value if isinstance(value, bytes) else encode(value)
    return lambda message: http(b'{"jsonrpc":"2.0","id":%d,"result":%s}' % (message["id"], text))


def stream(events: bytes) -> Answer:
    """A stream of events that ends with these."""
    return lambda _: (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + events
    )


def no_stream(_: Any) -> bytes:
    return http(b"", "405 Method Not Allowed")


class McpPeer(Peer):
    """A server of 2025-11-25, or of 2026-07-28; `call` and `get` answer all but the handshake."""

    PATH = "/mcp"

    def __init__(
        self,
        call: Answer,
        *,
        session: bytes = b"s",
        get: Answer = no_stream,
        is_newest: bool = False,
    ) -> None:
        super().__init__(self._answer)
        self._call = call
        self._session = session
        self._get = get
        self._is_newest = is_newest

    async def _answer(self, _peer: Peer, body: bytes, writer: Writer) -> None:
        message = msgspec.json.decode(body) if body else {}
        method = message.get("method")
        verb = self.heads[-1].partition(b" ")[0]
        if verb == b"GET":
            answer = self._get(self.heads[-1])
        elif verb == b"DELETE" or "id" not in message:
            answer = http(b"", "202 Accepted")
        elif method == "server/discover":
            answer = (
                result(DISCOVERED)(message) if self._is_newest else http(b"", "400 Bad Request")
            )
        elif method == "initialize":
            answer = result(HANDSHAKE)(message).replace(
                b"\r\n\r\n", b"\r\nMcp-Session-Id: %s\r\n\r\n" % self._session, 1
            )
        else:
            answer = self._call(message)
        writer.write(answer)
        await writer.drain()
        if b"\r\nConnection: close\r\n" in answer:
            writer.close()

    def methods(self) -> list[str]:
        return [body["method"] if body else "" for body in self.bodies]
