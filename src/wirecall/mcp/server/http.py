"""MCP over Streamable HTTP: one address, five revisions.

A POST is judged in this order; the first that fails answers (section 2.5 of the protocol matrix):

    1 media types          406, 415
    2 the body             400 with -32700 or -32600
    3 an array             the gate's rules, for the revision of its session
    4 its era              an envelope in the body, or a version header that no older revision has: 2026-07-28. Else older
    5 2026-07-28           envelope, headers, version, method, marked arguments: 400 and 404 before anything runs
    5 older                `initialize`, or a session, or neither: then the version header counts, or else 2025-03-26

This file judges 1 to 4; `http_stateless` and `http_handshake` are 5.
"""

from collections.abc import Awaitable

from msgspec import UNSET

from wirecall.mcp import headers
from wirecall.mcp.revisions import REVISIONS, STATELESS, UNSTATED
from wirecall.mcp.server import gate
from wirecall.mcp.server.http_handshake import Handshake
from wirecall.mcp.server.http_rules import check_media, is_newer, refuse, single
from wirecall.mcp.server.http_stateless import Stateless
from wirecall.mcp.server.server import Server
from wirecall.protocol.limits import Limits
from wirecall.protocol.messages import Envelope, Invalid
from wirecall.transports.request import HttpError, Request


class McpEndpoint:
    """Serves `/mcp`."""

    def __init__(self, server: Server, limits: Limits, *, shared: bool) -> None:
        self._limits = limits
        self._stateless = Stateless(server)
        self._handshake = Handshake(server, limits, shared=shared)

    async def open(self) -> None:
        """Before the first request."""
        await self._handshake.open()

    async def aclose(self, grace: float) -> None:
        """After the last one."""
        await self._handshake.aclose(grace)

    def __call__(self, request: Request) -> Awaitable[None]:
        if request.method == "POST":
            return self._post(request)
        if request.method == "GET":
            return self._handshake.get(request)
        if request.method == "DELETE":
            return self._handshake.delete(request)
        raise HttpError(405, "MCP is spoken with POST, GET and DELETE", [("allow", "POST, GET, DELETE")])

    async def _post(self, request: Request) -> None:
        check_media(request)
        message = gate.read(await request.body(), self._limits)
        if type(message) is Envelope and headers.names(request.headers, STATELESS[-1].name):
            await self._stateless.post(request, message)  # nearly always, so it is asked first
            return
        version = single(request, headers.VERSION)
        owed = isinstance(message, Envelope) and message.id is not UNSET
        if not owed and version is not None and version not in REVISIONS:
            raise HttpError(400, f"{headers.VERSION}: {version[:40]!r} is not served")
        if isinstance(message, list):
            await self._handshake.post_array(request, message, version)
        elif isinstance(message, Invalid):
            known = REVISIONS.get(version or "")
            await refuse(request, message.error, message.id, known or UNSTATED)
        elif isinstance(message, Envelope) and (is_newer(version) or gate.has_envelope(message)):
            await self._stateless.post(request, message)
        else:
            await self._handshake.post(request, message, version)
