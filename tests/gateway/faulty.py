"""A server over HTTP whose calls end in any way, behind a gateway."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.client.peers import SlowProxy
from tests.gateway.bench import Bench
from tests.gateway.fronts import introduction, message_of
from wirecall.gateway import UpstreamSettings

TOOLS = [
    {"name": "pay", "inputSchema": {"type": "object"}},
    {"name": "look", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
]
JSON = {"Content-Type": "application/json"}


class Faulty:
    """A server of 2025-11-25 over HTTP, whose calls end as their argument `then` says."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.end = asyncio.Event()
        # The paths of requests to other addresses.
        self.elsewhere: list[str] = []
        # The only token that it takes. None: it takes any request.
        self.token: str | None = None
        # The connections on which calls have come.
        self.connections: list[asyncio.BaseTransport] = []
        # The methods of all messages.
        self.asked: list[str] = []
        # The id of its session. One that asks with another id has to greet it again.
        self.session = "1"
        # How `initialize` ends, as a call does. "": it is answered.
        self.greeting = ""
        # The notifications that it does not answer.
        self.ignored: set[str] = set()
        self._runner = web.AppRunner(self._routes(), shutdown_timeout=0.1)
        self._site: web.TCPSite | None = None
        self._open: set[asyncio.BaseTransport] = set()
        self.port = 0

    def _routes(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/mcp", self.serve)
        app.router.add_route("*", "/{path:.+}", self.stray)
        return app

    async def begin(self) -> None:
        """Serve, on the port of before if there was one."""
        if self._site is None:
            await self._runner.setup()
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def go_away(self) -> None:
        """Refuse connections until `begin`."""
        assert self._site is not None
        await self._site.stop()
        for each in self._open:
            each.close()
        self._open.clear()

    async def aclose(self) -> None:
        self.end.set()
        await self._runner.cleanup()

    @property
    def has_none_open(self) -> bool:
        """Whether all of them are closed."""
        return all(each.is_closing() for each in self.connections)

    def close_idle(self) -> None:
        """Close the connections on which calls have come and were answered."""
        for each in self.connections:
            each.close()
        self.connections.clear()

    async def stray(self, request: web.Request) -> web.Response:
        self.elsewhere.append(request.path)
        return web.Response(status=404)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.method != "POST":
            return web.Response(status=405)
        if self.token not in (None, request.headers.get("Authorization", "")[len("Bearer ") :]):
            return web.Response(status=401)
        message = await request.json()
        assert request.transport is not None
        self._open.add(request.transport)
        self.asked.append(message["method"])
        id = message.get("id")
        method = message["method"]
        if request.headers.get("Mcp-Session-Id", self.session) != self.session:
            return web.Response(status=404)
        if id is None:
            if method in self.ignored:
                await self.end.wait()
            return web.Response(status=202)
        result: dict[str, Any] = {"content": [{"type": "text", "text": "done"}]}
        if method == "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "faulty", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
            if self.greeting:
                return await self._ended(request, id, self.greeting, result)
            own = {"Mcp-Session-Id": self.session}
            return web.json_response({"jsonrpc": "2.0", "id": id, "result": result}, headers=own)
        if method == "server/discover":
            return web.Response(status=400)
        if method == "tools/list":
            result = {"tools": TOOLS}
        elif method == "tools/call":
            params = message["params"]
            self.connections.append(request.transport)
            self.calls.append(params["name"])
            return await self._ended(request, id, params["arguments"]["then"], result)
        return web.json_response({"jsonrpc": "2.0", "id": id, "result": result})

    async def _ended(
        self, request: web.Request, id: Any, then: str, result: dict[str, Any]
    ) -> web.StreamResponse:
        kind, _, what = then.partition(" ")
        assert request.transport is not None
        if kind == "status":
            return web.Response(status=int(what), headers={"Location": "/elsewhere"})
        if kind == "link":
            link = {"type": "resource_link", "name": "x", "uri": str(request.url.with_path(what))}
            result["content"] = [link]
        if kind == "code":
            error = {"code": int(what), "message": "theirs", "data": {"x": 0.5}}
            return web.json_response({"jsonrpc": "2.0", "id": id, "error": error})
        if kind == "reset":
            request.transport.abort()
        if kind == "text":
            return web.Response(text=what, headers=JSON)
        if kind == "half":
            answer = web.StreamResponse(headers={**JSON, "Content-Length": "1000"})
            await answer.prepare(request)
            await answer.write(b'{"jsonrpc": "2.0", ')
            request.transport.close()
            return answer
        if kind == "mute":
            await self.end.wait()
        result["isError"] = then == "is_error"
        return web.json_response({"jsonrpc": "2.0", "id": id, "result": result})


@asynccontextmanager
async def faulty(
    folder: Path, *, delay: float = 0.0, **own: Any
) -> AsyncIterator[tuple[Bench, Faulty, str]]:
    """A gateway in front of it, and a session there. Bytes need `delay` seconds."""
    server = Faulty()
    await server.begin()
    try:
        url = f"http://127.0.0.1:{server.port}"
        async with AsyncExitStack() as stack:
            if delay:
                proxy = SlowProxy(server.port, delay)
                url = (await stack.enter_async_context(proxy)).url
            more = [UpstreamSettings("faulty", url=f"{url}/mcp", **own)]
            bench = Bench(folder, names=(), more=more)
            await stack.enter_async_context(bench.serving())
            _, session = await bench.post(
                "/mcp/faulty", message_of("initialize", introduction(), 1)
            )
            assert session is not None
            await bench.post("/mcp/faulty", message_of("tools/list", None, 2), session)
            yield bench, server, session
    finally:
        await server.aclose()


async def called(bench: Bench, session: str, tool: str, then: str, path: str = "faulty") -> Any:
    """Call a tool with one key; return the answer."""
    key = {"io.wirecall/idempotency-key": "k"}
    params = {"name": tool, "arguments": {"then": then}, "_meta": key}
    answer, _ = await bench.post(f"/mcp/{path}", message_of("tools/call", params, 3), session)
    return answer
