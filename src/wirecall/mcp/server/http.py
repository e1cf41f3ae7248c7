"""MCP over Streamable HTTP: one address, five revisions.

A POST is checked in this order; the first check that fails gives the answer:

    1 media types    406, 415
    2 the body       400 with -32700 or -32600
    3 its era        2026-07-28 if the body has an envelope, or the version header no older revision
    4 2026-07-28     envelope, headers, version, method, marked arguments: 400 or 404 before it runs
    4 an array       the rules of `messages.admitted`, for the revision of its session
    4 older          `initialize`, or a session; without one, the version header or else 2025-03-26

An answer is plain JSON unless something is sent before it: then it is a stream. The eras differ
when a client leaves. At 2026-07-28 leaving cancels the call. In the older revisions the call
continues, and its events are kept for a reader that comes back (`streams`); messages that belong to
another process are passed on (`others`).
"""

import asyncio
from collections.abc import Coroutine, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET

from wirecall.aio import resume
from wirecall.errors import (
    Gone,
    HeaderMismatch,
    InvalidParams,
    InvalidRequest,
    MethodNotFound,
    NotCapable,
    ParseError,
    ReferencesOff,
    RpcError,
    UnknownVersion,
)
from wirecall.jsonrpc import make_batch
from wirecall.ledger.base import LedgerDown
from wirecall.limits import Limits
from wirecall.logs import logger
from wirecall.mcp import headers
from wirecall.mcp.revisions import REVISIONS, STATELESS, UNSTATED, Revision
from wirecall.mcp.server import messages
from wirecall.mcp.server.changes import forward, session_listener, setting_of
from wirecall.mcp.server.messages import BadEnvelope, ClientAnswer, Incoming
from wirecall.mcp.server.others import KEPT, Place, Relay
from wirecall.mcp.server.peer import Session, described_session
from wirecall.mcp.server.sessions import Known, Sessions
from wirecall.mcp.server.streams import (
    Channel,
    Direct,
    NoOutlet,
    StreamStore,
    event,
    name_of_process,
)
from wirecall.mcp.types import CallTool, Params
from wirecall.protocol.messages import Envelope, Invalid
from wirecall.protocol.sender import Sender
from wirecall.server.call import BATCH, shape_of
from wirecall.transports.accept import prefers_events
from wirecall.transports.request import (
    JSON,
    KEY,
    REPLAYED,
    HttpError,
    HttpRequest,
    Pairs,
    replayed_mark,
)

if TYPE_CHECKING:
    from wirecall.mcp.server.server import Server

T = TypeVar("T")

SESSION = "mcp-session-id"
LAST_EVENT = "last-event-id"
EVENTS = "text/event-stream"
BOTH = frozenset({JSON, EVENTS})
_NEWEST = STATELESS[-1].name

CANCELLED = "notifications/cancelled"

# Requests that change the state of a session in every process.
_FOR_ALL = frozenset({"logging/setLevel", "resources/subscribe", "resources/unsubscribe"})

# Seconds that the first request of a session waits for what it has set elsewhere.
MET_WITHIN = 1.0

# Errors at 2026-07-28 that have their own HTTP status, as long as no stream has begun
# (basic/transports/streamable-http, "Request Metadata").
_STATUS: dict[type[RpcError], int] = {
    ParseError: 400,
    InvalidRequest: 400,
    BadEnvelope: 400,
    HeaderMismatch: 400,
    NotCapable: 400,
    ReferencesOff: 400,
    UnknownVersion: 400,
    MethodNotFound: 404,
}


class McpEndpoint:
    """Serves `/mcp`."""

    def __init__(self, server: "Server", limits: Limits, relay: Relay, path: str) -> None:
        self._server = server
        self._relay = relay
        self._path = path
        self._limits = limits
        self.sessions = Sessions(server.sealer, self._meet, server.extensions, server.subscribed)
        relay.add(
            path,
            Place(
                server.hub,
                lambda: len(self.sessions) > 0,
                lambda ended: self.sessions.end(ended),
                self._take_relayed,
            ),
        )
        self.store = StreamStore(self._limits)
        self._work: set[asyncio.Task[Any]] = set()

    async def aclose(self, grace: float) -> None:
        """Cancel calls that still run for clients that have left.

        Commands with a record end separately.
        """
        for task in self._work:
            task.cancel()
        if self._work:
            await asyncio.wait(self._work, timeout=grace)

    async def __call__(self, request: HttpRequest) -> None:
        if request.method != "POST":
            serve = {"GET": self._get, "DELETE": self._delete}.get(request.method)
            if serve is None:
                raise HttpError(
                    405, "expected POST, GET or DELETE", [("allow", "POST, GET, DELETE")]
                )
            self._server.permit(request.identity, ())
            await serve(request)
            return
        # Step 1: media types. A client accepts both, since an answer may be either (transports,
        # "Receipt Messages to the Server").
        request.check_json()
        fields = request.headers
        accepted = fields.first.get("accept")
        if fields.has_doubles:
            accepted = fields.get("accept")
        if not _takes(accepted, BOTH):
            raise HttpError(
                406, f"Accept: expected both {JSON} and {EVENTS}, since an answer may be either"
            )
        # Step 2: the body is one message, or an array of them.
        message = messages.read(await request.body(), self._limits)
        # Step 3: its era. Most requests name the newest revision, so that is checked first.
        if (
            type(message) is Envelope
            and not fields.has_doubles
            and fields.first.get("mcp-protocol-version") == _NEWEST
        ):
            await self._post_described(request, message)
            return
        version = _single(request, headers.VERSION)
        is_owed = isinstance(message, Envelope) and message.id is not UNSET
        if not is_owed and version is not None and version not in REVISIONS:
            raise HttpError(400, f"{headers.VERSION}: {version[:40]!r} is not served")
        if isinstance(message, list):
            await self._post_array(request, message, version)
        elif isinstance(message, Invalid):
            method = shape_of(await request.body())
            self._server.note_refusal(method, message.id, message.error, request.sender())
            await self._refuse(
                request, message.error, message.id, REVISIONS.get(version or "", UNSTATED)
            )
        elif isinstance(message, Envelope) and (
            _is_newer(version) or messages.has_envelope(message)
        ):
            await self._post_described(request, message)
        else:
            await self._post_older(request, message, version)

    async def _post_described(self, request: HttpRequest, message: Envelope) -> None:
        """Answer a message of 2026-07-28, which describes itself.

        A client that leaves cancels its call.
        """
        if message.id is UNSET:
            await self._ignore_notification(request, message.method)
            return
        assert isinstance(message.id, (int, str))  # `messages.read` has checked it
        outlet: Direct | None = None
        try:
            # Step 1: body and headers agree: envelope, headers, version, marked arguments.
            params = self._server.described(message, request.headers)
            if type(params) is CallTool:
                marked = self._server.marks(params.name)
                if marked:
                    headers.check_marked(request.headers, params.arguments, marked)
            # Step 2: the token has the scopes of the request (403), before anything runs and before
            # a stream begins.
            if request.identity is not None:
                self._server.permit(request.identity, self._server.scopes(message, params))
            # Step 3: the answer. A plain function that reads gives it at once; anything else may
            # wait, and may send messages before its answer.
            answer: bytes | None
            ready = self._server.calls.at_once(message.id, params, STATELESS[-1])
            if isinstance(ready, bytes):
                await request.respond(200, ready)
                return
            outlet = Direct(request)
            work: Coroutine[Any, Any, bytes | None] | None = ready
            if work is None:
                # A request of 2026-07-28 has no session, so its sender has no link.
                sender = request.sender()
                session = described_session(params)
                key = request.key()
                work = self._server.respond(
                    message, session, outlet, sender, params=params, key=key
                )
            answer = await _while_there(request, work, outlet)
        except Gone:
            if outlet is not None and outlet.refusal is not None and not outlet.is_cut:
                # `subscriptions/listen` needs a stream, and none is free.
                raise outlet.refusal from None
            raise
        except RpcError as error:
            if outlet is None or not outlet.is_stream:
                await self._refuse(
                    request, error, message.id, STATELESS[-1], _STATUS.get(type(error), 200)
                )
                return
            answer = self._server.answers.failure(message.id, error, STATELESS[-1])
        finally:
            if outlet is not None:
                outlet.close()
        # Step 4: send the answer, at the end of the stream if one was opened.
        if outlet.is_stream:
            await request.close_stream(b"" if answer is None else event(answer))
            request.written()
        elif answer is None:
            await request.respond(202)
        elif outlet.replayed:
            await request.respond(200, answer, headers=[(REPLAYED, "true")])
        else:
            await request.respond(200, answer)

    async def _ignore_notification(self, request: HttpRequest, method: str) -> None:
        """Check a notification of 2026-07-28, and ignore it.

        At this revision clients send no notifications over HTTP.
        """
        try:
            if self._server.is_request(method):
                raise InvalidRequest(f"{method} is a request: it needs an id")
            headers.check_notification(request.headers, method)
            self._server.permit(request.identity, ())
        except RpcError as error:
            await self._refuse(request, error, None, STATELESS[-1])
            return
        await request.respond(202)

    async def _post_older(
        self, request: HttpRequest, message: "Envelope | ClientAnswer", version: str | None
    ) -> None:
        """Answer a message of a revision with a handshake."""
        params: Params | None = None
        if isinstance(message, Envelope):
            params = self._server.params_of(message)
        if request.identity is not None:
            self._server.permit(request.identity, self._server.scopes(message, params))
        # `initialize` opens a session. Every further request carries its id.
        if isinstance(message, Envelope) and message.id is not UNSET:
            if message.method == "initialize":
                await self._initialize(request, message)
                return
            known = await self._session(request, version)
            if message.method in _FOR_ALL:
                await self._remember(known, message)
                await self._pass_on(request, sets=True)
            await self._serve_one(request, known, message, params)
            return
        if isinstance(message, ClientAnswer) and _is_newer(version):
            refused = InvalidRequest(
                f"MCP {version} does not send requests to clients, so this answers no request"
            )
            await self._refuse(request, refused, None, STATELESS[-1])
            return
        # A notification and an answer to a question get 202, or 400 with the reason (2025-11-25,
        # transports, "Receipt Messages to the Server").
        known = await self._session(request, version)
        try:
            is_useful = self._server.take(message, known.session)
        except RpcError as error:
            await self._refuse(request, error, None, known.session.revision)
            return
        if not is_useful:
            await self._pass_on(request)
        await request.respond(202)

    async def _initialize(self, request: HttpRequest, message: Envelope) -> None:
        """Open a session."""
        try:
            session, answer = await self._server.open_session(message, request.caller)
        except RpcError as error:
            await self._refuse(request, error, message.id, UNSTATED)
            return
        token: Pairs = ()
        if session.revision.has("http session"):
            sealed = self.sessions.token(request.caller, session)
            token = [(SESSION, sealed)]
            if self._relay.is_shared:  # so that its first request does not ask the ledger
                self.sessions.trust(request.caller, sealed).is_met = True
        await request.respond(200, answer, headers=token)

    async def _pass_on(self, request: HttpRequest, *, sets: bool = False) -> None:
        """Send the other processes a message: they may know its call or its question."""
        data = await request.body()
        token = request.headers.get(SESSION)
        try:
            await self._relay.pass_on(self._path, request.caller, token, data, sets=sets)
        except LedgerDown as error:
            raise _unreachable("the message cannot reach the process it is for", error) from error

    async def _remember(self, known: Known, message: Envelope) -> None:
        """Keep a setting of a session for processes that start later."""
        setting = setting_of(message.method, self._server.params_of(message), known.session)
        if setting is None or known.ended is None:
            return
        name, content, is_kept = setting
        # What is undone has to be known only as long as a process may have seen it.
        lasts = known.until - self._server.sealer.clock() if is_kept else KEPT
        try:
            await self._relay.remember(known.ended, name, content, lasts)
        except LedgerDown as error:
            raise _unreachable("the setting cannot be kept for other processes", error) from error

    async def _meet(self, known: Known) -> bool:
        """Learn what a session that is new here has set; return False if it has ended elsewhere."""
        assert known.ended is not None
        async with known.meeting:
            if known.is_met:
                return True
            known.late = []
            try:
                if await self._relay.is_ended(known.ended):
                    return False
                settings = await self._relay.recall(known.ended)
                if settings:
                    work = self._start(self._take_all(known, settings))
                    # A server behind this one may be slow to take a subscription.
                    await asyncio.wait([work], timeout=MET_WITHIN)
                known.is_met = True
            except LedgerDown as error:
                reason = "whether the session has ended is not known"
                raise _unreachable(reason, error) from error
            finally:
                late = known.late
                known.late = None
                for data in late:
                    self._start(self._take_read(known, data))
        return True

    async def _post_array(
        self, request: HttpRequest, entries: list[Incoming], version: str | None
    ) -> None:
        """Answer the messages of an array (2025-03-26).

        The answers are an array, or go out one by one if there is a stream. A client that prefers
        events gets each answer when it is ready.
        """
        known: Known | None = None
        revision = STATELESS[-1]
        if not _is_newer(version):
            known = await self._session(request, version)
            revision = known.session.revision
        try:
            entries = messages.admitted(entries, revision)
            if _single(request, KEY) is not None:
                raise InvalidParams("Idempotency-Key is for a single call: use _meta in each entry")
        except RpcError as error:
            self._server.note_refusal(BATCH, None, error, request.sender())
            await self._refuse(request, error, None, revision)
            return
        assert known is not None
        # If one entry lacks its scopes, all are refused: a client with more scopes sends the whole
        # array again.
        if request.identity is not None:
            scopes = [scope for entry in entries for scope in self._server.scopes(entry)]
            self._server.permit(request.identity, scopes)
        passed = [entry for entry in entries if _is_for_others(entry, known.session)]
        if passed:
            settings = [entry for entry in passed if _is_setting(entry)]
            for entry in settings:
                assert isinstance(entry, Envelope)
                await self._remember(known, entry)
            await self._pass_on(request, sets=len(settings) == len(passed))
        channel, sender = await self._open_channel(request, known)
        channel.is_eager = prefers_events(request.headers.get("accept") or "")
        work = self._answer_array(entries, known.session, channel, sender)
        await self._follow(request, known, channel, work, is_array=True)

    async def _serve_one(
        self, request: HttpRequest, known: Known, message: Envelope, params: Params | None
    ) -> None:
        """Answer a request of an older revision: its answer is JSON, or the end of its stream."""
        assert isinstance(message.id, (int, str))  # `messages.read` has checked it
        key = request.key()
        # A plain function that reads gives its answer at once. It has no events, and nothing could
        # cancel it.
        coming: Coroutine[Any, Any, bytes] | None = None
        if params is not None:
            revision = known.session.revision
            try:
                ready = self._server.calls.at_once(message.id, params, revision)
            except RpcError as error:
                ready = self._server.answers.failure(message.id, error, revision)
            if isinstance(ready, bytes):
                await request.respond(200, ready)
                return
            coming = ready
        channel, sender = await self._open_channel(request, known)
        work = self._answer_one(
            message, known.session, channel, sender, params=params, key=key, coming=coming
        )
        await self._follow(request, known, channel, work, is_array=False)

    async def _open_channel(self, request: HttpRequest, known: Known) -> tuple[Channel, Sender]:
        """Return the channel for the events of a request, and its sender."""
        if known.resumed:
            await known.delivered()
        request.holder = request.holder or known.id
        has = known.session.revision.has
        channel = Channel(
            request,
            self.store,
            self._limits.unread_bytes,
            link=known.link,
            numbered=has("http resume"),
            primed=has("http priming event"),
        )
        return channel, request.sender(known.link)

    async def _answer_one(
        self,
        message: Envelope,
        session: Session,
        channel: Channel,
        sender: Sender,
        *,
        params: Params | None,
        key: str | None,
        coming: Coroutine[Any, Any, bytes] | None,
    ) -> bytes | None:
        """Return the answer to a request; None if there is none, or its channel has it.

        `coming` is the answer of a plain function that returned an awaitable.
        """
        answer: bytes | None
        try:
            if coming is not None:
                answer = await coming
            else:
                answer = await self._server.respond(
                    message, session, channel, sender, params=params, key=key
                )
        except RpcError as error:
            answer = self._server.answers.failure(message.id, error, session.revision)
        if not channel.is_stream:
            return answer
        channel.end([] if answer is None else [answer])
        return None

    async def _answer_array(
        self, entries: list[Incoming], session: Session, channel: Channel, sender: Sender
    ) -> bytes | None:
        """Return the answers to an array; None if there are none, or its channel has them."""
        into: Channel | None = None
        if channel.is_eager:
            into = channel
        answers = await self._server.answer_array(entries, session, channel, sender, into)
        if channel.is_stream:
            channel.end(answers)
            return None
        if not answers:
            return None
        return make_batch(answers)

    async def _follow(
        self,
        request: HttpRequest,
        known: Known,
        channel: Channel,
        work: Coroutine[Any, Any, bytes | None],
        *,
        is_array: bool,
    ) -> None:
        """Send the client the answer of some work, or the events of its channel."""
        # A disconnect does not cancel the work (2025-11-25, transports, "Receipt Messages to the
        # Server"), so the work is a separate task.
        task = self._start(work)
        task.add_done_callback(partial(self._keep_events, known, channel))
        with channel.reading(request.enter_stream):
            await channel.started.wait()
            if task.cancelled():
                raise Gone("the server stops")
            answer = task.result() if task.done() else None
            if answer is not None:
                marks: Pairs = ()
                if channel.replayed:
                    marks = replayed_mark(channel.replayed, is_array=is_array)
                await request.respond(200, answer, headers=marks)
            elif channel.is_stream or not task.done():
                known.keep(channel)
                await channel.follow(request)
            else:
                await request.respond(202)

    def _keep_events(self, known: Known, channel: Channel, _: object) -> None:
        """Keep the events of a channel for a reader that comes back: its work is over."""
        channel.finish()
        channel.started.set()
        self.store.put(known.channels, channel)

    def _start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _take_relayed(self, caller: str, token: str, data: bytes) -> None:
        """Take a message that a session has sent to another process, or an array of them."""
        try:
            known = self.sessions.trust(caller, token)
        except HttpError:
            return
        if known.late is not None:
            known.late.append(data)
        else:
            self._start(self._take_read(known, data))

    async def _take_all(self, known: Known, settings: Sequence[str]) -> None:
        """Take the requests that have set something."""
        for content in settings:
            await self._take_read(known, content.encode())

    async def _take_read(self, known: Known, data: bytes) -> None:
        """Take what a session has sent to another process, in its order."""
        sender = Sender(known.session.caller or "")
        read = messages.read(data, self._limits)
        for message in read if isinstance(read, list) else [read]:
            if isinstance(message, (Envelope, ClientAnswer)) and _may_be_for_others(message):
                await self._server.answer(message, known.session, NoOutlet(), sender)

    # --- GET and DELETE ---------------------------------------------------------------------------

    async def _get(self, request: HttpRequest) -> None:
        """Send the standing stream of a session, or the rest of an interrupted stream."""
        known = await self._standing_session(request)
        if not _takes(request.headers.get("accept"), frozenset({EVENTS})):
            raise HttpError(406, f"Accept: expected {EVENTS}")
        request.holder = request.holder or known.id
        # The id of an event names its stream, so only events of that one are sent again
        # (2025-11-25, transports, "Resumability and Redelivery").
        last = request.headers.get(LAST_EVENT)
        if last is not None:
            name, _, number = last.partition(".")
            channel = known.channels.get(name)
            is_number = number.isdecimal() and len(number) < 19
            if channel is None or not is_number or not channel.has_all_after(int(number)):
                # Not 404: that would say that the session is over.
                raise HttpError(400, f"{LAST_EVENT}: {_no_stream(name)}")
            request.receipt = channel.receipt
            with known.resuming(channel):
                await channel.follow(request, int(number))
            return
        outlet = Direct(request)
        listener = session_listener(known.session)
        self._server.hub.add(listener)
        try:
            await outlet.open()
            known.stand(listener)
            await _while_there(
                request, forward(listener, outlet, self._server.lasts(request.identity)), outlet
            )
            await request.close_stream()
        finally:
            outlet.close()
            known.leave(listener)
            self._server.hub.remove(listener)

    async def _delete(self, request: HttpRequest) -> None:
        known = await self._standing_session(request)
        assert known.ended is not None
        lasts = known.until - self._server.sealer.clock()
        try:
            await self._relay.announce_end(self._path, known.ended, lasts)
        except LedgerDown as error:
            raise _unreachable("the session has not ended", error) from error
        self._server.ended(known.session)
        self.sessions.end(known.ended)
        await request.respond(204)

    async def _refuse(
        self,
        request: HttpRequest,
        error: RpcError,
        id: object,
        revision: Revision,
        status: int = 400,
    ) -> None:
        """Answer with an error and its status."""
        await request.respond(status, self._server.answers.failure(id, error, revision))

    async def _standing_session(self, request: HttpRequest) -> Known:
        """Return the session of a GET or a DELETE, which need one."""
        version = _single(request, headers.VERSION)
        if version is not None and version not in REVISIONS:
            raise HttpError(400, f"{headers.VERSION}: {version[:40]!r} is not served")
        if request.headers.get(SESSION) is None:
            if version in REVISIONS and not _is_newer(version):
                raise HttpError(400, f"{SESSION}: missing")
            raise HttpError(
                405, "expected POST: GET and DELETE need a session", [("allow", "POST")]
            )
        if _is_newer(version):
            raise HttpError(
                405, f"expected POST: MCP {version} has no other method", [("allow", "POST")]
            )
        return await self._session(request, version)

    async def _session(self, request: HttpRequest, version: str | None) -> Known:
        """Return the session of a request.

        Without a token, it is a session for this request alone, by its version header.
        """
        token = _single(request, SESSION)
        if token is not None:
            return await self.sessions.find(request.caller, token)
        # Without a header 2025-03-26 is assumed (2025-11-25, transports, "Protocol Version
        # Header").
        return Known(Session(REVISIONS.get(version or "", UNSTATED)))


# --- requests and answers -------------------------------------------------------------------------


@lru_cache(maxsize=256)  # clients send few different ones
def _takes(accepted: str | None, media: frozenset[str]) -> bool:
    """Return whether an Accept header lists these media types.

    Without one, all are (RFC 9110, 12.5.1).
    """
    kinds = {kind.partition(";")[0].strip().lower() for kind in (accepted or "*/*").split(",")}
    return all(kinds & {one, "*/*", one.partition("/")[0] + "/*"} for one in media)


def _single(request: HttpRequest, name: str) -> str | None:
    """Return a header that matters.

    Raises if it occurs twice: a proxy may have read the other value.
    """
    fields = request.headers
    if fields.has_doubles and len(fields.all(name)) > 1:
        raise HttpError(400, f"more than one {name} header")
    return fields.get(name)


def _unreachable(what: str, error: LedgerDown) -> HttpError:
    """Return the answer to a request that needs the ledger."""
    logger.warning("%s: %s", what, error)
    return HttpError(
        503, f"{what}: the ledger cannot be reached; send it again", [("retry-after", "1")]
    )


def _may_be_for_others(message: "Envelope | ClientAnswer") -> bool:
    """Return whether a message of a session may change something in another process."""
    if isinstance(message, ClientAnswer):
        return True
    if message.id is UNSET:
        return message.method == CANCELLED
    return message.method in _FOR_ALL


def _is_setting(entry: Incoming) -> bool:
    """Return whether an entry of an array sets something for its session."""
    return isinstance(entry, Envelope) and entry.id is not UNSET and entry.method in _FOR_ALL


def _is_for_others(entry: Incoming, session: Session) -> bool:
    """Return the same for an entry of an array."""
    if isinstance(entry, ClientAnswer):
        return entry.id not in session.asked
    return isinstance(entry, Envelope) and _may_be_for_others(entry)


def _no_stream(name: str) -> str:
    """Return why a stream cannot be resumed here."""
    if name.startswith(name_of_process()):
        return "there is no such stream, or its events are gone"
    return (
        "this stream began in another process, and only that one has its events; send the call "
        "again, with its idempotency key if it has one"
    )


def _is_newer(version: str | None) -> bool:
    """Return whether a version header names something other than an older revision."""
    return version is not None and (version not in REVISIONS or REVISIONS[version].is_stateless)


async def _while_there(request: HttpRequest, work: Coroutine[Any, Any, T], outlet: Direct) -> T:
    """Await work that ends when its client leaves.

    The connection is watched only if the work has to wait, and not for the first moment of that.
    """
    try:
        awaited = work.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    this = asyncio.current_task()
    assert this is not None
    request.watch_soon(outlet.cut)
    outlet.on_cut = this.cancel
    try:
        return await resume(work, awaited)
    except asyncio.CancelledError:
        if outlet.is_cut and this.uncancel() == 0:
            raise Gone("the client has left") from None
        raise
    finally:
        outlet.on_cut = None
