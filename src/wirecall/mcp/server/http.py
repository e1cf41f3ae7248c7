"""MCP over Streamable HTTP: one address, five revisions.

A POST is judged in this order; the first check that fails answers (section 2.5 of the protocol matrix):

    1 media types          406, 415
    2 the body             400 with -32700 or -32600
    3 its era              an envelope in the body, or a version header that no older revision has: 2026-07-28. Else older
    4 2026-07-28           envelope, headers, version, method, marked arguments: 400 and 404 before anything runs
    4 an array             the rules of `messages.admitted`, for the revision of its session
    4 older                `initialize`, or a session, or neither: then the version header counts, or else 2025-03-26

An answer is plain JSON until something is sent before it: then it is a stream. The eras differ in a client that leaves. At
2026-07-28 leaving cancels the call. In the older revisions the call goes on, and its events are kept for a reader that comes
back (`streams`); messages that belong to another worker are passed on (`workers`).
"""

import asyncio
from collections.abc import Coroutine
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

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
from wirecall.jsonrpc import make_batch
from wirecall.mcp import headers
from wirecall.mcp.revisions import REVISIONS, STATELESS, UNSTATED, Revision
from wirecall.mcp.server import messages
from wirecall.mcp.server.catalog import input_schema
from wirecall.mcp.server.changes import forward, session_listener
from wirecall.mcp.server.messages import BadEnvelope, ClientAnswer, Incoming
from wirecall.mcp.server.peer import Session, described_session
from wirecall.mcp.server.sessions import Known, Sessions
from wirecall.mcp.server.streams import Channel, Direct, Nowhere, Shelf, event
from wirecall.mcp.server.workers import Relay
from wirecall.mcp.types import CallTool, Params
from wirecall.protocol.messages import Envelope, Invalid, Limits
from wirecall.stepping import resume
from wirecall.transports.request import JSON, KEY, REPLAYED, HttpError, HttpRequest, Pairs, replayed_mark

if TYPE_CHECKING:
    from wirecall.mcp.server.server import Beside, Server

T = TypeVar("T")

SESSION = "mcp-session-id"
LAST_EVENT = "last-event-id"
EVENTS = "text/event-stream"
BOTH = frozenset({JSON, EVENTS})
_NEWEST = STATELESS[-1].name

# Requests that change the state of a session in every worker.
_FOR_ALL = frozenset({"logging/setLevel", "resources/subscribe", "resources/unsubscribe"})

# Errors at 2026-07-28 that have a status of their own, as long as no stream has begun (basic/transports/streamable-http,
# "Request Metadata").
_STATUS: dict[type[RpcError], int] = {
    ParseError: 400,
    InvalidRequest: 400,
    BadEnvelope: 400,
    HeaderMismatch: 400,
    NotCapable: 400,
    UnknownVersion: 400,
    MethodNotFound: 404,
}


class McpEndpoint:
    """Serves `/mcp`."""

    def __init__(self, server: "Server", limits: Limits, *, shared: bool) -> None:
        self._server = server
        self._limits = limits
        self._marked: dict[str, dict[tuple[str, ...], str]] = {}  # arguments of each tool that a header repeats
        self._relay = Relay(
            server.hub, server.seals, shared=shared, on_end=lambda ended: self.sessions.end(ended), on_message=self._heard
        )
        self.sessions = Sessions(server.seals, self._relay.know_ended, server.extensions, server.subscribed)
        self.shelf = Shelf()
        self._work: set[asyncio.Task[bytes | None]] = set()

    async def open(self) -> None:
        """Listen to the other workers, if there may be any. Called before the first request."""
        await self._relay.open()

    async def aclose(self, grace: float) -> None:
        """End the calls that still run for clients that have left; the ledger's commands end by themselves."""
        for task in self._work:
            task.cancel()
        if self._work:
            await asyncio.wait(self._work, timeout=grace)
        await self._relay.aclose()

    async def __call__(self, request: HttpRequest) -> None:
        if request.method != "POST":
            serve = {"GET": self._get, "DELETE": self._delete}.get(request.method)
            if serve is None:
                raise HttpError(405, "expected POST, GET or DELETE", [("allow", "POST, GET, DELETE")])
            self._server.permit(request.identity, ())
            await serve(request)
            return
        # Step 1: media types. A client takes both, since an answer may be either (transports, "Sending Messages to the
        # Server").
        request.check_json()
        fields = request.headers
        if not _takes(fields.get("accept") if fields.has_doubles else fields.first.get("accept"), BOTH):
            raise HttpError(406, f"Accept: expected both {JSON} and {EVENTS}, since an answer may be either")
        # Step 2: the body is one message, or an array of them.
        message = messages.read(await request.body(), self._limits)
        # Step 3: its era. Most requests name the newest revision, so that is asked first.
        if type(message) is Envelope and not fields.has_doubles and fields.first.get("mcp-protocol-version") == _NEWEST:
            await self._post_described(request, message)
            return
        version = _single(request, headers.VERSION)
        is_owed = isinstance(message, Envelope) and message.id is not UNSET
        if not is_owed and version is not None and version not in REVISIONS:
            raise HttpError(400, f"{headers.VERSION}: {version[:40]!r} is not served")
        if isinstance(message, list):
            await self._post_array(request, message, version)
        elif isinstance(message, Invalid):
            await self._refuse(request, message.error, message.id, REVISIONS.get(version or "", UNSTATED))
        elif isinstance(message, Envelope) and (_is_newer(version) or messages.has_envelope(message)):
            await self._post_described(request, message)
        else:
            await self._post_older(request, message, version)

    async def _post_described(self, request: HttpRequest, message: Envelope) -> None:
        """Answer a message of 2026-07-28, which describes itself. A client that leaves cancels its call."""
        # The revision has no notifications of clients over HTTP: one that comes is checked and has no effect.
        if message.id is UNSET:
            try:
                if self._server.is_request(message.method):
                    raise InvalidRequest(f"{message.method} is a request: it needs an id")
                headers.check_notification(request.headers, message.method)
                self._server.permit(request.identity, ())
            except RpcError as error:
                await self._refuse(request, error, None, STATELESS[-1])
                return
            await request.respond(202)
            return
        assert isinstance(message.id, (int, str))  # `messages.read` has checked it
        outlet: Direct | None = None
        try:
            # Step 1: body and headers agree: envelope, headers, version, marked arguments.
            params = self._server.described(message, request.headers)
            if type(params) is CallTool:
                marked = self._marked.get(params.name)
                if marked is None and (tool := self._server.catalog.tools.get(params.name)) is not None:
                    marked = self._marked[params.name] = headers.marked(input_schema(tool))
                if marked:
                    arguments = Raw(b"{}") if params.arguments is UNSET else params.arguments
                    headers.check_marked(request.headers, arguments, marked)
            # Step 2: the token has the scopes of the request (403), before anything runs and before a stream begins.
            if request.identity is not None:
                self._server.permit(request.identity, self._server.scopes(message, params))
            # Step 3: the answer. A plain function that reads gives it at once; anything else may wait, and may have
            # something to send before its answer.
            answer: bytes | None
            ready = self._server.calls.at_once(message.id, params, STATELESS[-1])
            if isinstance(ready, bytes):
                await request.respond(200, ready)
                return
            outlet = Direct(request)
            work: Coroutine[Any, Any, bytes | None] | None = ready
            if work is None:
                beside: Beside = {
                    "caller": request.caller,
                    "identity": request.identity,
                    "headers": request.headers,
                    "key": request.key(),
                }
                work = self._server.respond(message, described_session(params), outlet, params=params, **beside)
            answer = await _while_there(request, work, outlet)
        except Gone:
            if outlet is not None and outlet.refusal is not None and not outlet.is_cut:
                raise outlet.refusal from None  # `subscriptions/listen` needs a stream, and none is free
            raise
        except RpcError as error:
            if outlet is None or not outlet.is_stream:
                await self._refuse(request, error, message.id, STATELESS[-1], _STATUS.get(type(error), 200))
                return
            answer = self._server.answers.failure(message.id, error, STATELESS[-1])
        finally:
            if outlet is not None:
                outlet.close()
        # Step 4: it goes out, at the end of the stream if one was opened.
        if outlet.is_stream:
            await request.close_stream(b"" if answer is None else event(answer))
            outlet.sending.written()
        elif answer is None:
            await request.respond(202)
        else:
            await request.respond(200, answer, headers=[(REPLAYED, "true")] if outlet.replayed else ())

    async def _post_older(self, request: HttpRequest, message: "Envelope | ClientAnswer", version: str | None) -> None:
        """Answer a message of a revision with a handshake."""
        params = self._server.params_of(message) if isinstance(message, Envelope) else None
        if request.identity is not None:
            self._server.permit(request.identity, self._server.scopes(message, params))
        # `initialize` opens a session. Its id comes with every further request.
        if isinstance(message, Envelope) and message.method == "initialize" and message.id is not UNSET:
            try:
                session, answer = self._server.opened(message)
            except RpcError as error:
                await self._refuse(request, error, message.id, UNSTATED)
                return
            token: Pairs = ()
            if session.revision.has("http session"):
                token = [(SESSION, self.sessions.token(request.caller, session))]
            await request.respond(200, answer, headers=token)
            return
        if isinstance(message, ClientAnswer) and _is_newer(version):
            refused = InvalidRequest(f"MCP {version} does not send requests to clients, so this answers no request")
            await self._refuse(request, refused, None, STATELESS[-1])
            return
        known = self._session(request, version)
        session = known.session
        # A notification and an answer to a question get 202, or 400 with the reason (2025-11-25, transports, "Sending
        # Messages to the Server").
        if isinstance(message, ClientAnswer) or message.id is UNSET:
            try:
                is_useful = self._server.take(message, session)
            except RpcError as error:
                await self._refuse(request, error, None, session.revision)
                return
            if not is_useful:
                self._relay.pass_on(request.caller, request.headers.get(SESSION), await request.body())
            await request.respond(202)
            return
        # A request: its answer is JSON, or the last event of its stream.
        if message.method in _FOR_ALL:
            self._relay.pass_on(request.caller, request.headers.get(SESSION), await request.body())
        await self._serve(request, known, message, params)

    async def _post_array(self, request: HttpRequest, entries: list[Incoming], version: str | None) -> None:
        """Answer the messages of an array (2025-03-26): as an array, or one by one in the stream if there is one."""
        known = None if _is_newer(version) else self._session(request, version)
        revision = STATELESS[-1] if known is None else known.session.revision
        try:
            entries = messages.admitted(entries, revision)
            if _single(request, KEY) is not None:
                raise InvalidParams("Idempotency-Key is for a single call: use _meta in each entry")
        except RpcError as error:
            await self._refuse(request, error, None, revision)
            return
        assert known is not None
        # One entry without its scopes refuses them all: a client that gets more scope sends the whole array again.
        scopes = [scope for entry in entries for scope in self._server.scopes(entry)] if request.identity is not None else ()
        self._server.permit(request.identity, scopes)
        await self._serve(request, known, entries)

    async def _serve(
        self, request: HttpRequest, known: Known, message: Envelope | list[Incoming], params: Params | None = None
    ) -> None:
        """Answer a request or an array of an older revision: with its answers, or with the events of its channel."""
        session, key = known.session, request.key()
        caller, identity, fields = request.caller, request.identity, request.headers
        # A plain function that reads gives its answer at once. It has no events, and nothing could cancel it.
        begun: Coroutine[Any, Any, bytes | None] | None = None
        if params is not None and isinstance(message, Envelope):
            assert isinstance(message.id, (int, str))  # `messages.read` has checked it
            try:
                ready = self._server.calls.at_once(message.id, params, session.revision)
            except RpcError as error:
                ready = self._server.answers.failure(message.id, error, session.revision)
            if isinstance(ready, bytes):
                await request.respond(200, ready)
                return
            begun = ready  # a plain function that returned an awaitable
        request.holder = request.holder or known.id
        has, unread = session.revision.has, self._limits.unread_bytes
        numbered, primed = has("http resume"), has("http priming event")
        peer = f"session {known.id}" if known.id else None
        channel = Channel(request, self.shelf, unread, peer=peer, numbered=numbered, primed=primed)

        async def work() -> bytes | None:
            if isinstance(message, list):
                answers = await self._server.answer_array(
                    message, session, channel, caller=caller, identity=identity, headers=fields
                )
            else:
                answer: bytes | None
                try:
                    beside: Beside = {"caller": caller, "identity": identity, "headers": fields, "key": key}
                    answer = await (begun or self._server.respond(message, session, channel, params=params, **beside))
                except RpcError as error:
                    answer = self._server.answers.failure(message.id, error, session.revision)
                answers = [] if answer is None else [answer]
            if not channel.is_stream:
                return None if not answers else make_batch(answers) if isinstance(message, list) else answers[0]
            for answer in answers:
                channel.put(answer)
            return None

        def over(_: object) -> None:
            channel.finish()
            channel.started.set()
            self.shelf.put(known.channels, channel)

        # A disconnect does not cancel the work (2025-11-25, transports, "Sending Messages to the Server"), so the work is a
        # task of its own.
        task = self._start(work())
        task.add_done_callback(over)
        with channel.reading(request.enter_stream):
            await channel.started.wait()
            if task.cancelled():
                raise Gone("the server stops")
            answer = task.result() if task.done() else None
            if answer is not None:
                marks = replayed_mark(channel.replayed, is_array=isinstance(message, list)) if channel.replayed else ()
                await request.respond(200, answer, headers=marks)
            elif channel.is_stream or not task.done():
                known.keep(channel)
                await channel.follow(request)
            else:
                await request.respond(202)

    def _start(self, work: Coroutine[Any, Any, bytes | None]) -> "asyncio.Task[bytes | None]":
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _heard(self, caller: str, token: str, data: bytes) -> None:
        """Take a message that a session has sent to another worker."""
        try:
            known = self.sessions.find(caller, token)
        except HttpError:
            return
        message = messages.read(data, self._limits)
        if isinstance(message, (Envelope, ClientAnswer)):
            self._start(self._server.answer(message, known.session, Nowhere(), caller=caller))

    # --- GET and DELETE ----------------------------------------------------------------------------------------------

    async def _get(self, request: HttpRequest) -> None:
        """Send the standing stream of a session, or the rest of a stream that was cut."""
        known = self._standing_session(request)
        if not _takes(request.headers.get("accept"), frozenset({EVENTS})):
            raise HttpError(406, f"Accept: expected {EVENTS}")
        request.holder = request.holder or known.id
        # The id of an event names its stream, so only events of that one are sent again (2025-11-25, transports,
        # "Resumability and Redelivery").
        last = request.headers.get(LAST_EVENT)
        if last is not None:
            name, _, number = last.partition(".")
            channel = known.channels.get(name)
            is_number = number.isdecimal() and len(number) < 19
            if channel is None or not is_number or not channel.has_all_after(int(number)):
                # Not 404: that would say that the session is over.
                raise HttpError(400, f"{LAST_EVENT}: no such stream here, or its events are gone")
            request.sending = channel.sending
            with channel.reading():
                await channel.follow(request, int(number))
            return
        outlet = Direct(request)
        listener = session_listener(known.session)
        self._server.hub.add(listener)
        try:
            await outlet.open()
            known.stand(listener)
            await _while_there(request, forward(listener, outlet, self._server.lasts(request.identity)), outlet)
            await request.close_stream()
        finally:
            outlet.close()
            known.leave(listener)
            self._server.hub.remove(listener)

    async def _delete(self, request: HttpRequest) -> None:
        ended = self._standing_session(request).ended
        assert ended is not None
        self.sessions.end(ended)
        self._relay.tell_ended(ended)
        await request.respond(204)

    async def _refuse(
        self, request: HttpRequest, error: RpcError, id: object, revision: Revision, status: int = 400
    ) -> None:
        """Answer with an error and its status."""
        await request.respond(status, self._server.answers.failure(None if id is UNSET else id, error, revision))

    def _standing_session(self, request: HttpRequest) -> Known:
        """Return the session of a GET or a DELETE, which need one."""
        version = _single(request, headers.VERSION)
        if version is not None and version not in REVISIONS:
            raise HttpError(400, f"{headers.VERSION}: {version[:40]!r} is not served")
        if request.headers.get(SESSION) is None:
            if version in REVISIONS and not _is_newer(version):
                raise HttpError(400, f"{SESSION}: missing")
            raise HttpError(405, "expected POST: GET and DELETE need a session", [("allow", "POST")])
        if _is_newer(version):
            raise HttpError(405, f"expected POST: MCP {version} has no other method", [("allow", "POST")])
        return self._session(request, version)

    def _session(self, request: HttpRequest, version: str | None) -> Known:
        """Return the session of a request; without a token, a session for this request alone, by its version header."""
        token = _single(request, SESSION)
        if token is not None:
            return self.sessions.find(request.caller, token)
        # Without a header 2025-03-26 is assumed (2025-11-25, transports, "Protocol Version Header").
        return Known(Session(REVISIONS.get(version or "", UNSTATED)))


# --- requests and answers --------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)  # clients send few different ones
def _takes(accepted: str | None, media: frozenset[str]) -> bool:
    """Return whether an Accept header lists these media types. A request without one takes all (RFC 9110, 12.5.1)."""
    kinds = {kind.partition(";")[0].strip().lower() for kind in (accepted or "*/*").split(",")}
    return all(kinds & {one, "*/*", one.partition("/")[0] + "/*"} for one in media)


def _single(request: HttpRequest, name: str) -> str | None:
    """Return a header that decides something. Raises if it is there twice: a proxy may have read the other value."""
    fields = request.headers
    if fields.has_doubles and len(fields.all(name)) > 1:
        raise HttpError(400, f"more than one {name} header")
    return fields.get(name)


def _is_newer(version: str | None) -> bool:
    """Return whether a version header names something else than an older revision."""
    return version is not None and (version not in REVISIONS or REVISIONS[version].is_stateless)


async def _while_there(request: HttpRequest, work: Coroutine[Any, Any, T], outlet: Direct) -> T:
    """Await work that ends when its client leaves. The client is watched only if the work has to wait."""
    try:
        awaited = work.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    this = asyncio.current_task()
    assert this is not None
    request.watch(outlet.cut)
    outlet.on_cut = this.cancel
    try:
        return await resume(work, awaited)
    except asyncio.CancelledError:
        if outlet.is_cut and this.uncancel() == 0:
            raise Gone("the client has left") from None
        raise
    finally:
        outlet.on_cut = None
