"""MCP over HTTP where every request describes itself (2026-07-28).

1. Body and headers have to agree: envelope, headers, version, marked arguments, in this order, before anything runs. What
   is refused then is told by the status as well.
2. An answer is plain JSON until something is told before it: then it is a stream.
3. The client's leaving is its cancellation.
"""

from typing import Any

from msgspec import UNSET, Raw

from wirecall.errors import (
    Gone,
    HeaderMismatch,
    InvalidParams,
    InvalidRequest,
    MethodNotFound,
    NotCapable,
    ParseError,
    RpcError,
    UnknownVersion,
)
from wirecall.mcp import headers
from wirecall.mcp.revisions import REQUESTS, STATELESS
from wirecall.mcp.server.catalog import input_schema
from wirecall.mcp.server.http_rules import REPLAYED, key_of, refuse, while_there
from wirecall.mcp.server.requests import BadEnvelope, described_params, described_revision, described_session
from wirecall.mcp.server.results import failure
from wirecall.mcp.server.server import Server
from wirecall.mcp.server.streams import Direct
from wirecall.mcp.types import CallTool, Params
from wirecall.protocol.messages import Envelope
from wirecall.transports.request import Request

# Refusals that are told by the status, before a stream begins.
_STATUS: dict[type[RpcError], int] = {
    ParseError: 400,
    InvalidRequest: 400,
    BadEnvelope: 400,
    HeaderMismatch: 400,
    NotCapable: 400,
    UnknownVersion: 400,
    MethodNotFound: 404,
}


class Stateless:
    """Serves the requests that describe themselves."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._marked: dict[str, dict[tuple[str, ...], str]] = {}

    async def post(self, request: Request, message: Envelope) -> None:
        if message.id is UNSET:
            await self._notified(request, message)
            return
        try:
            params = self._agreed(request, message)
            answer: Any = self._server.tools.at_once(message, params)
            if answer is not None and type(answer) is not bytes:
                answer = await while_there(request, answer, Direct(request))
        except RpcError as error:
            await refuse(request, error, message.id, STATELESS[-1], _STATUS.get(type(error), 200))
            return
        if answer is None:
            await self._served(request, message, params)
        else:
            await request.respond(200, answer)

    async def _served(self, request: Request, message: Envelope, params: Params) -> None:
        """A request that may wait, and may have something to tell before its answer."""
        outlet = Direct(request)
        try:
            session = described_session(params)
            work = self._server.respond(
                message, session, outlet, caller=request.caller, key=key_of(request), cancellable=False, params=params
            )
            answer = await while_there(request, work, outlet)
        except Gone:
            if outlet.refusal is not None and not outlet.is_cut:  # `subscriptions/listen` needs a stream, and there is none
                raise outlet.refusal from None
            raise
        except RpcError as error:
            if not outlet.is_open:
                await refuse(request, error, message.id, STATELESS[-1], _STATUS.get(type(error), 200))
                return
            answer = failure(message.id, error, STATELESS[-1])
        finally:
            outlet.close()
        if outlet.is_open:
            await outlet.finish(answer)
        elif answer is None:
            await request.respond(202)
        else:
            await request.respond(200, answer, headers=[(REPLAYED, "true")] if outlet.replayed else ())

    async def _notified(self, request: Request, message: Envelope) -> None:
        """The core of the revision sends no notifications over HTTP: what comes is looked at, and that is all."""
        try:
            if message.method in REQUESTS:
                raise InvalidRequest(f"{message.method} is a request: it needs an id")
            headers.check_notification(request.headers, message.method)
        except RpcError as error:
            await refuse(request, error, None, STATELESS[-1])
            return
        await request.respond(202)

    def _agreed(self, request: Request, message: Envelope) -> Params:
        """The params of a request that describes itself, once body and headers are found to agree."""
        params = described_params(message)
        headers.check(request.headers, message.method, params)
        described_revision(params)  # raises if it is none of ours
        if type(params) is CallTool:
            self._check_marked(request, params)
        return params

    def _check_marked(self, request: Request, call: CallTool) -> None:
        marked = self._marked.get(call.name)
        if marked is None:
            try:
                schema = input_schema(self._server.catalog.tool(call.name))
            except InvalidParams:
                return  # no such tool: the server will say so
            marked = self._marked[call.name] = headers.marked(schema)
        if marked:
            headers.check_marked(request.headers, Raw(b"{}") if call.arguments is UNSET else call.arguments, marked)
