"""MCP servers that a test scripts, over HTTP: `Scripted` answers each message with the result of a
function.

    async with Scripted(answer) as server: ...

`answer(message, request)` returns a `Reply`, a result, or None for 202. `server.seen` has the
method, headers and body of every request.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeAlias

from aiohttp import web

PATIENCE = 60.0

Json: TypeAlias = dict[str, Any]


class Seen(NamedTuple):
    verb: str
    headers: dict[str, str]
    body: Any
    query: str = ""

    @property
    def method(self) -> str:
        return (
            str(self.body["method"])
            if isinstance(self.body, dict) and "method" in self.body
            else ""
        )


class Reply(NamedTuple):
    """A JSON answer, or a stream of events (strings); `hold` keeps it open until the client leaves."""

    body: Any = None
    status: int = 200
    events: Sequence[str] | None = None
    headers: Mapping[str, str] = MappingProxyType({})
    hold: bool = False
    tear: bool = False  # end the connection without the end of the stream
    # Returns further events, and None at the end.
    more: Callable[[], Awaitable[str | None]] | None = None


Answer: TypeAlias = Callable[[Any, Seen], "Reply | Awaitable[Reply]"]


class Scripted:
    def __init__(self, answer: Answer) -> None:
        self.seen: list[Seen] = []
        self.url = ""
        self._answer = answer
        self.over = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/mcp", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/mcp"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.over.set()
        assert self._runner is not None
        await asyncio.wait_for(self._runner.cleanup(), PATIENCE)

    def methods(self) -> list[str]:
        return [one.method for one in self.seen if one.verb == "POST"]

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        headers = {name.lower(): value for name, value in request.headers.items()}
        seen = Seen(
            request.method, headers, json.loads(text) if text else None, request.query_string
        )
        self.seen.append(seen)
        made = self._answer(seen.body, seen)
        reply = made if isinstance(made, Reply) else await made
        if reply.events is None:
            body = b"" if reply.body is None else json.dumps(reply.body).encode()
            return web.Response(
                body=body,
                status=reply.status,
                headers=reply.headers,
                content_type="application/json",
            )
        return await self._stream(request, reply)

    async def _stream(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"content-type": "text/event-stream", **reply.headers}
        )
        await response.prepare(request)
        for event in reply.events or ():
            await response.write(event.encode())
        if reply.hold:
            await self.over.wait()
        while reply.more is not None and (further := await reply.more()) is not None:
            await response.write(further.encode())
        if reply.tear:
            assert request.transport is not None
            request.transport.abort()
        return response


def result(message: Json, value: Any, **more: Any) -> Reply:
    return Reply({"jsonrpc": "2.0", "id": message["id"], "result": value}, **more)


def refusal(
    message: Json, code: int, text: str = "no", data: Any = None, status: int = 200
) -> Reply:
    error = {"code": code, "message": text, **({} if data is None else {"data": data})}
    return Reply({"jsonrpc": "2.0", "id": message["id"], "error": error}, status)


def event(message: Any, id: str | None = None) -> str:
    return (f"id: {id}\n" if id else "") + f"event: message\ndata: {json.dumps(message)}\n\n"


def text(said: str) -> Json:
    return {"content": [{"type": "text", "text": said}]}


def older(
    answer: Answer,
    revision: str = "2025-11-25",
    session: str | None = "s1",
    capabilities: Any = None,
) -> Answer:
    """A server with a handshake; `answer` serves the rest. It has no standing stream."""

    def reply(message: Any, seen: Seen) -> "Reply | Awaitable[Reply]":
        if seen.verb == "DELETE":
            return Reply(status=204)
        if seen.method == "server/discover":
            return Reply(
                {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "Bad Request"}},
                400,
            )
        if seen.method == "initialize":
            told = {
                "protocolVersion": revision,
                "capabilities": capabilities or {},
                "serverInfo": {"name": "older"},
            }
            return result(message, told, headers={"mcp-session-id": session} if session else {})
        if seen.verb == "GET" and "last-event-id" not in seen.headers:
            return Reply(status=405)
        if seen.verb == "POST" and isinstance(message, dict) and "id" not in message:
            return Reply(status=202)
        return answer(message, seen)

    return reply


def newest(answer: Answer, capabilities: Any = None) -> Answer:
    """A server of 2026-07-28; `answer` serves the rest."""

    def reply(message: Any, seen: Seen) -> "Reply | Awaitable[Reply]":
        if seen.method == "server/discover":
            told = {
                "supportedVersions": ["2026-07-28"],
                "capabilities": capabilities or {},
                "ttlMs": 0,
            }
            return result(message, {"resultType": "complete", **told})
        return answer(message, seen)

    return reply
