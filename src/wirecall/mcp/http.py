"""MCP over Streamable HTTP: one address, five revisions.

A POST is judged in this order; the first that fails answers (section 2.5 of the protocol matrix):

    1 media types          406, 415
    2 the body             400 with -32700 or -32600
    3 an array             the gate's rules, for the revision of its session
    4 its era              an envelope in the body, or a version header that no older revision has: 2026-07-28. Else older
    5 2026-07-28           envelope, headers, version, method, marked arguments: 400 and 404 before anything runs
    5 older                `initialize`, or a session, or neither: then the version header counts, or else 2025-03-26

Sessions of the older revisions are kept by `sessions`, streams by `streams`; what belongs to another worker goes by `relay`.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import lru_cache, partial
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
from wirecall.frames import Envelope, Invalid
from wirecall.jsonrpc import make_batch
from wirecall.lanes import resume, run_batch
from wirecall.mcp import gate, headers
from wirecall.mcp.answers import failure, success
from wirecall.mcp.catalog import input_schema
from wirecall.mcp.gate import Incoming, Response
from wirecall.mcp.peer import Session
from wirecall.mcp.relay import Relay
from wirecall.mcp.requests import BadEnvelope, described_params, described_revision, described_session
from wirecall.mcp.revisions import REQUESTS, REVISIONS, STATELESS, UNSTATED, Revision
from wirecall.mcp.server import Server
from wirecall.mcp.sessions import Known, Sessions
from wirecall.mcp.streams import Channel, Direct, Nowhere, Shelf
from wirecall.mcp.subscriptions import forward, session_listener
from wirecall.mcp.types import CallTool, Params
from wirecall.policy import Limits
from wirecall.transports.http_request import HttpError, Pairs, Request

SESSION = "mcp-session-id"
LAST_EVENT = "last-event-id"
KEY = "idempotency-key"
REPLAYED = "idempotent-replayed"
JSON, EVENTS = "application/json", "text/event-stream"
BOTH = frozenset({JSON, EVENTS})

# Requests that change what every worker should know of a session.
_FOR_ALL = frozenset({"logging/setLevel", "resources/subscribe", "resources/unsubscribe"})

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


class McpEndpoint:
    """Serves `/mcp`."""

    def __init__(self, server: Server, limits: Limits, *, shared: bool) -> None:
        self._server = server
        self._limits = limits
        self._relay = Relay(server.seals, self._heard) if shared else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions = Sessions(server.seals, self._relay.is_marked if self._relay else lambda _id: False)
        self._shelf = Shelf()
        self._work: set[asyncio.Task[Any]] = set()
        self._marked: dict[str, dict[tuple[str, ...], str]] = {}

    def __call__(self, request: Request) -> Awaitable[None]:
        if request.method == "POST":
            return self._post(request)
        if request.method == "GET":
            return self._get(request)
        if request.method == "DELETE":
            return self._delete(request)
        raise HttpError(405, "MCP is spoken with POST, GET and DELETE", [("allow", "POST, GET, DELETE")])

    # --- other workers -----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Listen to the other workers, if there may be any."""
        if self._relay is not None:
            self._loop = asyncio.get_running_loop()
            await self._relay.open()
            self._server.hub.beyond = self._changed

    async def aclose(self, grace: float) -> None:
        """Nobody is served any more: what still runs for clients that have left is over, but for the ledger's commands."""
        for task in self._work:
            task.cancel()
        if self._work:
            await asyncio.wait(self._work, timeout=grace)
        if self._relay is not None:
            self._server.hub.beyond = None
            await self._relay.aclose()

    def _pass_on(self, request: Request, data: bytes) -> None:
        """What a session has said, to whoever has use for it."""
        token = request.headers.get(SESSION)
        if self._relay is not None and token is not None:
            self._relay.tell({"caller": request.caller, "session": token, "message": data.decode()})

    def _changed(self, kind: str, uri: str | None) -> None:
        if self._relay is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._relay.tell, {"kind": kind, "uri": uri})

    def _heard(self, told: dict[str, Any]) -> None:
        """Another worker tells: a list or a resource has changed, a session has ended, or has said something."""
        if "kind" in told:
            self._server.hub.tell_here(told["kind"], told["uri"])
        elif "ended" in told:
            self._sessions.end(told["ended"])
        else:
            self._heard_message(told["caller"], told["session"], told["message"].encode())

    def _heard_message(self, caller: str, token: str, data: bytes) -> None:
        try:
            known = self._sessions.find(caller, token)
        except HttpError:
            return
        message = gate.read(data, self._limits)
        if isinstance(message, (Envelope, Response)):
            work = self._server.answer(message, known.session, Nowhere(), caller=caller, cancellable=False)
            task = asyncio.get_running_loop().create_task(work)
            self._work.add(task)
            task.add_done_callback(self._work.discard)

    # --- POST --------------------------------------------------------------------------------------------------------

    async def _post(self, request: Request) -> None:
        _check_media(request)
        message = gate.read(await request.body(), self._limits)
        if type(message) is Envelope and headers.names(request.headers, STATELESS[-1].name):
            await self._modern(request, message)  # nearly always, so it is asked first
            return
        version = _single(request, headers.VERSION)
        owed = isinstance(message, Envelope) and message.id is not UNSET
        if not owed and version is not None and version not in REVISIONS:
            raise HttpError(400, f"{headers.VERSION}: {version[:40]!r} is not served")
        if isinstance(message, list):
            await self._array(request, message, version)
        elif isinstance(message, Invalid):
            known = REVISIONS.get(version or "")
            await _refuse(request, message.error, message.id, known or UNSTATED)
        elif isinstance(message, Envelope) and self._is_modern(message, version):
            await self._modern(request, message)
        else:
            await self._older(request, message, version)

    def _is_modern(self, message: Envelope, version: str | None) -> bool:
        revision = REVISIONS.get(version or "")
        if version is not None and (revision is None or revision.is_stateless):
            return True
        return gate.has_envelope(message)

    # --- 2026-07-28 --------------------------------------------------------------------------------------------------

    async def _modern(self, request: Request, message: Envelope) -> None:
        if message.id is UNSET:
            await self._notified(request, message)
            return
        try:
            params = self._agreed(request, message)
            answer: Any = self._server.tools.at_once(message, params)
            if answer is not None and type(answer) is not bytes:
                answer = await _while_there(request, answer, Direct(request))
        except RpcError as error:
            await _refuse(request, error, message.id, STATELESS[-1], _STATUS.get(type(error), 200))
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
                message, session, outlet, caller=request.caller, key=_key(request), cancellable=False, params=params
            )
            answer = await _while_there(request, work, outlet)
        except Gone:
            if outlet.refusal is not None:  # it is nothing without a stream, and there is none
                raise outlet.refusal from None
            raise
        except RpcError as error:
            if not outlet.is_open:
                await _refuse(request, error, message.id, STATELESS[-1], _STATUS.get(type(error), 200))
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
            await _refuse(request, error, None, STATELESS[-1])
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

    # --- the older revisions -----------------------------------------------------------------------------------------

    async def _older(self, request: Request, message: "Envelope | Response", version: str | None) -> None:
        if isinstance(message, Envelope) and message.method == "initialize" and message.id is not UNSET:
            await self._initialize(request, message)
            return
        if isinstance(message, Response) and _is_newer(version):
            refused = InvalidRequest(f"MCP {version} asks clients nothing, so there is nothing to answer")
            await _refuse(request, refused, None, STATELESS[-1])
            return
        known = self._known(request, version)
        session = known.session
        if isinstance(message, Response) or message.id is UNSET:
            await self._take(request, message, session)
            return
        if message.method in _FOR_ALL:
            self._pass_on(request, await request.body())
        channel = self._channel(request, session.revision)
        answering = self._server.answer(message, session, channel, caller=request.caller, key=_key(request))
        await self._serve(request, known, channel, _one(answering, channel))

    async def _take(self, request: Request, message: "Envelope | Response", session: Session) -> None:
        """What is owed no answer: 202, or 400 with the reason."""
        try:
            useful = self._server.take(message, session)
        except RpcError as error:
            await _refuse(request, error, None, session.revision)
            return
        if not useful:
            self._pass_on(request, await request.body())
        await request.respond(202)

    async def _initialize(self, request: Request, message: Envelope) -> None:
        id: Any = message.id
        try:
            session, result = self._server.opened(message)
        except RpcError as error:
            await _refuse(request, error, id, UNSTATED)
            return
        await request.respond(200, success(id, result), headers=self._token(request.caller, session))

    def _token(self, caller: str, session: Session) -> Pairs:
        if not session.revision.has("http session"):
            return ()
        return [(SESSION, self._sessions.token(caller, session))]

    async def _array(self, request: Request, entries: list[Incoming], version: str | None) -> None:
        known = None if _is_newer(version) else self._known(request, version)
        revision = STATELESS[-1] if known is None else known.session.revision
        try:
            gate.check_array(entries, revision)
        except RpcError as error:
            await _refuse(request, error, None, revision)
            return
        assert known is not None
        if _key(request) is not UNSET:
            reason = "Idempotency-Key is for a single call: use _meta in each entry"
            await _refuse(request, InvalidParams(reason), None, revision)
            return
        channel = self._channel(request, revision)
        begin = partial(self._entry, known.session, channel, request.caller)
        limit = self._limits.concurrency
        entries = gate.without_doubles(entries)
        answering: Any = run_batch(entries, begin, self._server.tools.is_command, concurrency=limit)
        fitting = partial(self._server.answers.fitting, entries, revision=revision)
        await self._serve(request, known, channel, _several(answering, fitting, channel))

    async def _entry(self, session: Session, channel: Channel, caller: str, entry: Incoming, position: int) -> bytes | None:
        answer = await self._server.answer(entry, session, channel, caller=caller, position=position)
        if answer is not None and channel.is_used:
            channel.put(answer)  # the stream is open: nobody waits for the slowest
            return None
        return answer

    async def _serve(self, request: Request, known: Known, channel: Channel, work: Any) -> None:
        """The work goes on when the client leaves (a disconnect is no cancel); so it is a task of its own."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        task.add_done_callback(lambda _: channel.started.set())
        with channel.reading():
            await channel.started.wait()
            if task.cancelled():
                raise Gone("the server stops")
            answer = task.result() if task.done() else None
            if answer is not None:
                await request.respond(200, answer, headers=_replayed(channel, answer))
            elif channel.is_used or not task.done():
                known.keep(channel)
                task.add_done_callback(lambda _: self._shelf.put(known.channels, channel))
                await channel.follow(request)
            else:
                await request.respond(202)

    def _channel(self, request: Request, revision: Revision) -> Channel:
        return Channel(request.stopping, numbered=revision.has("http resume"), primed=revision.has("http priming event"))

    # --- sessions ----------------------------------------------------------------------------------------------------

    def _known(self, request: Request, version: str | None) -> Known:
        """The session a request belongs to; without one, what its version header says, for this request alone."""
        token = _single(request, SESSION)
        if token is not None:
            return self._sessions.find(request.caller, token)
        return Known(Session(REVISIONS.get(version or "", UNSTATED)))

    async def _get(self, request: Request) -> None:
        """The standing stream of a session, or the rest of one that was cut."""
        known = self._of_session(request)
        if not _accepts(request, frozenset({EVENTS})):
            raise HttpError(406, f"Accept: a stream is {EVENTS}")
        last = request.headers.get(LAST_EVENT)
        if last is not None:
            name, _, number = last.partition(".")
            channel = known.channels.get(name)
            is_number = number.isdecimal() and len(number) < 19
            if channel is None or not is_number or not channel.has_all_after(int(number)):
                # Not 404: that would say that the session is over.
                raise HttpError(400, f"{LAST_EVENT}: no such stream here, or its events are gone")
            with channel.reading():
                await channel.follow(request, int(number))
            return
        outlet = Direct(request)
        listener = session_listener(known.session)
        self._server.hub.add(listener)
        try:
            await outlet.open()
            known.stand(listener)
            await _while_there(request, forward(listener, outlet), outlet)
            await outlet.finish(None)
        finally:
            outlet.close()
            known.leave(listener)
            self._server.hub.remove(listener)

    async def _delete(self, request: Request) -> None:
        self._of_session(request)
        id = self._sessions.id(request.caller, request.headers[SESSION])
        self._sessions.end(id)
        if self._relay is not None:
            self._relay.tell({"ended": id})
            self._relay.mark(id)
        await request.respond(204)

    def _of_session(self, request: Request) -> Known:
        version = _single(request, headers.VERSION)
        if version is not None and version not in REVISIONS:
            raise HttpError(400, f"{headers.VERSION}: {version[:40]!r} is not served")
        if request.headers.get(SESSION) is None:
            if version in REVISIONS and not _is_newer(version):
                raise HttpError(400, f"{SESSION}: missing")
            raise HttpError(405, "without a session there is only POST", [("allow", "POST")])
        if _is_newer(version):
            raise HttpError(405, f"MCP {version} has only POST", [("allow", "POST")])
        return self._known(request, version)


# --- what is said before anything runs -------------------------------------------------------------------------------


def _check_media(request: Request) -> None:
    if request.headers.first.get(b"content-type") != b"application/json":
        media = request.headers.get("content-type") or ""
        if media.partition(";")[0].strip().lower() != JSON:
            raise HttpError(415, f"Content-Type: expected {JSON}, got {(media or 'none')[:100]}")
    if not _accepts(request, BOTH):
        raise HttpError(406, f"Accept: it must list {JSON} and {EVENTS}, an answer may be either")


def _accepts(request: Request, media: frozenset[str]) -> bool:
    fields = request.headers
    accepted = ",".join(fields.all("accept")).encode() if fields.has_doubles else fields.first.get(b"accept")
    return not accepted or media <= _media(accepted)


@lru_cache(maxsize=256)  # clients send few different ones
def _media(accepted: bytes) -> frozenset[str]:
    """Those of our two media types that an Accept header lists."""
    kinds = {kind.partition(";")[0].strip().lower() for kind in accepted.decode("latin-1").split(",")}
    return frozenset(media for media in BOTH if kinds & {media, "*/*", media.partition("/")[0] + "/*"})


def _single(request: Request, name: str) -> str | None:
    if headers.is_doubled(request.headers, name):
        raise HttpError(400, f"more than one {name} header")
    return request.headers.get(name)


def _is_newer(version: str | None) -> bool:
    """Whether a version header names no older revision."""
    return version is not None and (version not in REVISIONS or REVISIONS[version].is_stateless)


def _key(request: Request) -> Any:
    key = _single(request, KEY)
    return UNSET if key is None else key


async def _refuse(request: Request, error: RpcError, id: Any, revision: Revision, status: int = 400) -> None:
    await request.respond(status, failure(None if id is UNSET else id, error, revision))


def _replayed(channel: Channel, answer: bytes) -> Pairs:
    """Which answers come from the ledger: of an array their ids, in ASCII as everything in a header."""
    if not channel.replayed:
        return ()
    return [(REPLAYED, json.dumps(channel.replayed) if answer.startswith(b"[") else "true")]


# --- work ------------------------------------------------------------------------------------------------------------


async def _one(answering: Any, channel: Channel) -> bytes | None:
    """The answer as JSON, or None if it went into the stream, or if there is none."""
    try:
        answer: bytes | None = await answering
        if answer is not None and channel.is_used:
            channel.put(answer)
            return None
        return answer
    finally:
        channel.finish()


async def _several(answering: Any, fitting: Callable[[list[bytes | None]], list[bytes]], channel: Channel) -> bytes | None:
    """The answers as one array, or one by one in the stream if that is open."""
    try:
        answers = fitting(await answering)
        if not channel.is_used:
            return make_batch(answers) if answers else None
        for answer in answers:
            channel.put(answer)
        return None
    finally:
        channel.finish()


async def _while_there(request: Request, work: Any, outlet: Direct) -> Any:
    """Await work whose client's leaving is its cancellation. Whoever leaves is watched only if the work has to wait."""
    try:
        awaited = work.send(None)
    except StopIteration as finished:
        return finished.value
    return await _watched(request, resume(work, awaited), outlet)


async def _watched(request: Request, work: Any, outlet: Direct) -> Any:
    this = asyncio.current_task()
    assert this is not None
    watcher = asyncio.get_running_loop().create_task(request.gone())
    watcher.add_done_callback(lambda _: None if watcher.cancelled() else outlet.cut())
    outlet.on_cut = this.cancel
    try:
        return await work
    except asyncio.CancelledError:
        if outlet.is_cut and this.uncancel() == 0:
            raise Gone("the client has left") from None
        raise
    finally:
        outlet.on_cut = None
        watcher.cancel()
