"""MCP over HTTP with a handshake: the revisions before 2026-07-28.

1. `initialize` opens a session, and its id comes with every further request. One without an id counts for itself alone, at
   the revision that its version header says, or else at 2025-03-26.
2. A disconnect is no cancellation: the call goes on, and its events are kept for a reader who comes back (`streams`).
3. An answer is plain JSON until something is told before it: then it is a stream. So are the answers of an array, of which
   each goes out when it is ready.
4. What belongs to another worker, or to all of them, is passed on (`workers`).
"""

import asyncio
import json
from functools import partial
from typing import Any

from msgspec import UNSET

from wirecall.errors import Gone, InvalidParams, InvalidRequest, RpcError
from wirecall.jsonrpc import make_batch
from wirecall.mcp import headers
from wirecall.mcp.revisions import REVISIONS, STATELESS, UNSTATED
from wirecall.mcp.server import gate
from wirecall.mcp.server.asking import Session
from wirecall.mcp.server.gate import Incoming, Response
from wirecall.mcp.server.http_rules import EVENTS, REPLAYED, accepts, is_newer, key_of, refuse, single, while_there
from wirecall.mcp.server.results import Room, success
from wirecall.mcp.server.server import Server
from wirecall.mcp.server.sessions import Known, Sessions
from wirecall.mcp.server.streams import Channel, Direct, Nowhere, Shelf
from wirecall.mcp.server.subscriptions import forward, session_listener
from wirecall.mcp.server.workers import Workers
from wirecall.protocol.limits import Limits
from wirecall.protocol.messages import Envelope
from wirecall.server.batch import run_batch
from wirecall.transports.request import HttpError, Pairs, Request

SESSION = "mcp-session-id"
LAST_EVENT = "last-event-id"

# Requests that change what every worker should know of a session.
_FOR_ALL = frozenset({"logging/setLevel", "resources/subscribe", "resources/unsubscribe"})


class Handshake:
    """Serves sessions, and what comes without one."""

    def __init__(self, server: Server, limits: Limits, *, shared: bool) -> None:
        self._server = server
        self._limits = limits
        self._others = Workers(
            server.hub, server.seals, shared=shared, on_end=lambda ended: self._sessions.end(ended), on_message=self._heard
        )
        self._sessions = Sessions(server.seals, self._others.know_ended)
        self._shelf = Shelf()
        self._work: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Listen to the other workers, if there may be any."""
        await self._others.open()

    async def aclose(self, grace: float) -> None:
        """Nobody is served any more: what still runs for clients that have left is over, but for the ledger's commands."""
        for task in self._work:
            task.cancel()
        if self._work:
            await asyncio.wait(self._work, timeout=grace)
        await self._others.aclose()

    # --- POST --------------------------------------------------------------------------------------------------------

    async def post(self, request: Request, message: "Envelope | Response", version: str | None) -> None:
        if isinstance(message, Envelope) and message.method == "initialize" and message.id is not UNSET:
            await self._initialize(request, message)
            return
        if isinstance(message, Response) and is_newer(version):
            refused = InvalidRequest(f"MCP {version} asks clients nothing, so there is nothing to answer")
            await refuse(request, refused, None, STATELESS[-1])
            return
        known = self._known(request, version)
        session = known.session
        if isinstance(message, Response) or message.id is UNSET:
            await self._take(request, message, session)
            return
        if message.method in _FOR_ALL:
            self._others.pass_on(request.caller, request.headers.get(SESSION), await request.body())
        channel = self._channel(request, known)
        answering = self._server.answer(message, session, channel, caller=request.caller, key=key_of(request))
        await self._serve(request, known, channel, _one(answering, channel))

    async def _initialize(self, request: Request, message: Envelope) -> None:
        id: Any = message.id
        try:
            session, result = self._server.opened(message)
        except RpcError as error:
            await refuse(request, error, id, UNSTATED)
            return
        await request.respond(200, success(id, result), headers=self._token(request.caller, session))

    def _token(self, caller: str, session: Session) -> Pairs:
        if not session.revision.has("http session"):
            return ()
        return [(SESSION, self._sessions.token(caller, session))]

    async def _take(self, request: Request, message: "Envelope | Response", session: Session) -> None:
        """What is owed no answer: 202, or 400 with the reason."""
        try:
            useful = self._server.take(message, session)
        except RpcError as error:
            await refuse(request, error, None, session.revision)
            return
        if not useful:
            self._others.pass_on(request.caller, request.headers.get(SESSION), await request.body())
        await request.respond(202)

    # --- an array ----------------------------------------------------------------------------------------------------

    async def post_array(self, request: Request, entries: list[Incoming], version: str | None) -> None:
        known = None if is_newer(version) else self._known(request, version)
        revision = STATELESS[-1] if known is None else known.session.revision
        try:
            gate.check_array(entries, revision)
        except RpcError as error:
            await refuse(request, error, None, revision)
            return
        assert known is not None
        if key_of(request) is not UNSET:
            reason = "Idempotency-Key is for a single call: use _meta in each entry"
            await refuse(request, InvalidParams(reason), None, revision)
            return
        channel = self._channel(request, known)
        begin = partial(self._entry, known.session, channel, request.caller, self._server.answers.room(revision))
        limit = self._limits.concurrency
        entries = gate.without_doubles(entries)
        answering: Any = run_batch(entries, begin, self._server.tools.is_command, concurrency=limit)
        await self._serve(request, known, channel, _several(answering, channel))

    async def _entry(
        self, session: Session, channel: Channel, caller: str, room: Room, entry: Incoming, position: int
    ) -> bytes | None:
        answer = await self._server.answer(entry, session, channel, caller=caller, position=position)
        if answer is not None and channel.is_used:
            await channel.send(answer)  # the stream is open: each answer goes out when it is ready
            return None
        return await room.kept(entry, answer)

    # --- work --------------------------------------------------------------------------------------------------------

    async def _serve(self, request: Request, known: Known, channel: Channel, work: Any) -> None:
        """The work goes on when the client leaves (a disconnect is no cancel); so it is a task of its own."""
        task = self._begun(work)
        task.add_done_callback(lambda _: channel.started.set())
        task.add_done_callback(lambda _: self._shelf.put(known.channels, channel))
        with channel.reading():
            await channel.started.wait()
            if task.cancelled():
                raise Gone("the server stops")
            answer = task.result() if task.done() else None
            if answer is not None:
                await request.respond(200, answer, headers=_replayed(channel, answer))
            elif channel.is_used or not task.done():
                known.keep(channel)
                await channel.follow(request)
            else:
                await request.respond(202)

    def _channel(self, request: Request, known: Known) -> Channel:
        request.holder = request.holder or known.id
        has = known.session.revision.has
        unread = self._limits.unread_bytes
        return Channel(request, self._shelf, unread, numbered=has("http resume"), primed=has("http priming event"))

    def _begun(self, work: Any) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    def _heard(self, caller: str, token: str, data: bytes) -> None:
        """A session has said something to another worker."""
        try:
            known = self._sessions.find(caller, token)
        except HttpError:
            return
        message = gate.read(data, self._limits)
        if isinstance(message, (Envelope, Response)):
            self._begun(self._server.answer(message, known.session, Nowhere(), caller=caller, cancellable=False))

    # --- GET and DELETE ----------------------------------------------------------------------------------------------

    async def get(self, request: Request) -> None:
        """The standing stream of a session, or the rest of one that was cut."""
        known = self._of_session(request)
        if not accepts(request, frozenset({EVENTS})):
            raise HttpError(406, f"Accept: a stream is {EVENTS}")
        last = request.headers.get(LAST_EVENT)
        if last is not None:
            await self._resume(request, known, last)
        else:
            await self._stand(request, known)

    async def _resume(self, request: Request, known: Known, last: str) -> None:
        name, _, number = last.partition(".")
        channel = known.channels.get(name)
        is_number = number.isdecimal() and len(number) < 19
        if channel is None or not is_number or not channel.has_all_after(int(number)):
            # Not 404: that would say that the session is over.
            raise HttpError(400, f"{LAST_EVENT}: no such stream here, or its events are gone")
        with channel.reading():
            await channel.follow(request, int(number))

    async def _stand(self, request: Request, known: Known) -> None:
        request.holder = request.holder or known.id
        outlet = Direct(request)
        listener = session_listener(known.session)
        self._server.hub.add(listener)
        try:
            await outlet.open()
            known.stand(listener)
            await while_there(request, forward(listener, outlet), outlet)
            await outlet.finish(None)
        finally:
            outlet.close()
            known.leave(listener)
            self._server.hub.remove(listener)

    async def delete(self, request: Request) -> None:
        ended = self._of_session(request).ended
        assert ended is not None
        self._sessions.end(ended)
        self._others.tell_ended(ended)
        await request.respond(204)

    def _of_session(self, request: Request) -> Known:
        version = single(request, headers.VERSION)
        if version is not None and version not in REVISIONS:
            raise HttpError(400, f"{headers.VERSION}: {version[:40]!r} is not served")
        if request.headers.get(SESSION) is None:
            if version in REVISIONS and not is_newer(version):
                raise HttpError(400, f"{SESSION}: missing")
            raise HttpError(405, "without a session there is only POST", [("allow", "POST")])
        if is_newer(version):
            raise HttpError(405, f"MCP {version} has only POST", [("allow", "POST")])
        return self._known(request, version)

    def _known(self, request: Request, version: str | None) -> Known:
        """The session a request belongs to; without one, what its version header says, for this request alone."""
        token = single(request, SESSION)
        if token is not None:
            return self._sessions.find(request.caller, token)
        return Known(Session(REVISIONS.get(version or "", UNSTATED)))


def _replayed(channel: Channel, answer: bytes) -> Pairs:
    """Which answers come from the ledger: of an array their ids, in ASCII as everything in a header."""
    if not channel.replayed:
        return ()
    return [(REPLAYED, json.dumps(channel.replayed) if answer.startswith(b"[") else "true")]


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


async def _several(answering: Any, channel: Channel) -> bytes | None:
    """The answers as one array, or one by one in the stream if that is open."""
    try:
        answers = [answer for answer in await answering if answer is not None]
        if not channel.is_used:
            return make_batch(answers) if answers else None
        for answer in answers:
            channel.put(answer)
        return None
    finally:
        channel.finish()
