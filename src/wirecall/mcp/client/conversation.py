"""A client's conversation with one server of MCP: how it begins, what every message carries, how a call goes on to its end.

    open -> handshake -> call: _params (envelope, key, progress, round) -> answer
                                  ^-------- questions answered, headers mended, version replaced --------'

At 2026-07-28 a result may be a question (`input_required`): the host answers, and the same call goes again with the
answers, the server's state as it came, a new id and the same key. A refusal for a header that is missing (-32020) has the
tools listed anew, one for the version (-32022) takes one that the server lists; both once, and both are safe: nothing has
run.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.client.client import Client, decoded
from wirecall.client.exchange import Arrays, Entry, Exchange
from wirecall.client.links import Link
from wirecall.client.options import Options
from wirecall.client.retries import asked_pause, may_help
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    HeaderMismatch,
    NotCapable,
    Refused,
    RpcError,
    TimedOut,
    UnknownVersion,
    UsageError,
)
from wirecall.mcp.client.changes import Change
from wirecall.mcp.client.headers import Marks
from wirecall.mcp.client.host import Host
from wirecall.mcp.client.inbox import Inbox, Log
from wirecall.mcp.client.listening import Listening
from wirecall.mcp.client.negotiate import Agreed, Handshake
from wirecall.mcp.client.rounds import Extra, asked_by
from wirecall.mcp.revisions import HANDSHAKE, REVISIONS, STATELESS, Revision
from wirecall.mcp.types import KEY_META, KEYS_CAPABILITY, PREFIX
from wirecall.protocol.messages import encode
from wirecall.protocol.replies import Arrived

ROUNDS = 16  # of questions and answers in one call
ARRAY_PROBE = 2.0  # seconds in which a server on a pipe has to answer its first array
BEGINNINGS = 3  # attempts of each message of a handshake
_OLD = (400, 404, 405)  # how a server of 2024-11-05 answers a POST to its stream
_MODERN = (HeaderMismatch, NotCapable, UnknownVersion)  # errors that only newer servers have


class Way(Link, Protocol):
    """A link that speaks MCP: `McpHttpLink` or `McpLineLink`."""

    revision: Revision | None
    heard: Callable[[Arrived], None]
    renew: Any
    marks: Callable[[str], Marks]

    @property
    def is_pipe(self) -> bool: ...
    @property
    def older(self) -> "Callable[[], Way] | None": ...
    async def post(self, exchange: Exchange) -> bool: ...
    async def send(self, message: bytes) -> None: ...
    async def listen(self) -> None: ...


class _Message(Struct, tag_field="jsonrpc", tag="2.0"):
    id: int
    method: str
    params: Any = UNSET


class Conversation(Client):
    """A client as far as the protocol goes; `McpClient` has the methods that users call."""

    def __init__(
        self,
        way: Way,
        options: Options,
        host: Host,
        *,
        identity: Mapping[str, Any],
        on_log: Callable[[Log], Any] | None = None,
        on_change: Callable[[Change], Any] | None = None,
    ) -> None:
        super().__init__(options.wrap(way), options, kinds={})
        self.honours_keys = False  # the server says that of the calls of a tool with one key, one runs
        self.server: dict[str, Any] = {}
        self.capabilities: dict[str, Any] = {}
        self.instructions: str | None = None
        self._host = host
        self._me = Raw(encode(dict(identity)))
        self._pinned = _known(options.revision)
        self._spoken: Revision | None = None
        self._is_stateless = False
        self._has_tried_arrays = False
        self._level: str | None = None
        self._seal({})
        self._on_change = on_change
        self._inbox = Inbox(host, lambda message: self._way.send(message), on_log, self._changed)
        self._listening = Listening(self.call, self._listen, options.timeout)
        self._inbox.acknowledged = self._acknowledged
        self._inbox.cancelled = self._cancelled
        self._listens: dict[int, asyncio.Task[bool]] = {}
        self._go(way)

    def _go(self, way: Way) -> None:
        """Which way messages go from now on."""
        self._way = way
        way.heard = self._inbox.hear

    # --- beginning and end -------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the connection, and agree on a revision."""
        await super().open()
        try:
            agreed = await self._handshake().agree()
        except (Refused, RpcError) as refusal:
            agreed = await self._agree_in_the_old_way(refusal)
        await self._adopt(agreed)

    async def _agree_in_the_old_way(self, refusal: Refused | RpcError) -> Agreed:
        """A server that refuses `initialize` may be one of 2024-11-05, which has another transport (its successors tell)."""
        status = refusal.status if isinstance(refusal, Refused) else 400
        if self._way.older is None or status not in _OLD or isinstance(refusal, _MODERN):
            raise refusal
        if self._pinned is not None and self._pinned.is_stateless:
            raise refusal
        older = self._way.older()
        try:
            await older.open()
        except CallFailed:
            raise refusal from None
        await self._way.aclose()
        self._go(older)
        self._link = self._options.wrap(older)
        return await self._handshake().initialize(self._pinned or HANDSHAKE[-1])

    async def aclose(self) -> None:
        """Close the connection. Calls under way fail."""
        await self._listening.aclose()
        await self._inbox.aclose()
        await super().aclose()

    def _handshake(self) -> Handshake:
        is_pipe = self._way.is_pipe
        return Handshake(self._ask, self._describe, self._offer, pinned=self._pinned, may_be_silent=is_pipe)

    def _offer(self, revision: Revision) -> dict[str, Any]:
        capabilities = self._host.capabilities(revision)
        return {"protocolVersion": revision.name, "capabilities": capabilities, "clientInfo": self._me}

    def _describe(self, revision: Revision) -> dict[str, Any]:
        """The envelope of 2026-07-28."""
        told = {
            f"{PREFIX}protocolVersion": revision.name,
            f"{PREFIX}clientCapabilities": Raw(encode(self._host.capabilities(revision))),
            f"{PREFIX}clientInfo": self._me,
        }
        return told if self._level is None else {**told, f"{PREFIX}logLevel": self._level}

    def _seal(self, envelope: dict[str, Any]) -> None:
        """What every request carries in `_meta`, and the same as it travels if there is nothing else in it."""
        self._envelope = envelope
        self._sealed = Raw(encode(envelope))

    async def _adopt(self, agreed: Agreed) -> None:
        """Speak as was agreed."""
        revision = agreed.revision
        self.revision, self._spoken, self._is_stateless = revision.name, revision, revision.is_stateless
        self.server, self.capabilities, self.instructions = agreed.server, agreed.capabilities, agreed.instructions
        experimental = agreed.capabilities.get("experimental")
        self.honours_keys = isinstance(experimental, dict) and KEYS_CAPABILITY in experimental
        self._way.revision = self._inbox.revision = revision
        self._listening.is_stateless = revision.is_stateless
        if self.arrays.legal or not revision.has_arrays:  # what was learned of the server's arrays stays
            has = "has" if revision.has_arrays else "has no"
            self.arrays = Arrays(revision.has_arrays, f"MCP {revision.name} {has} arrays")
        if revision.is_stateless:
            self._seal(self._describe(revision))
            return
        await self._way.send(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
        self._way.renew = self._renew
        await self._way.listen()

    async def _renew(self) -> None:
        """The server, or its session, is a new one: begin again."""
        assert self._spoken is not None
        await self._adopt(await self._handshake().initialize(self._spoken))
        self._forget()
        await self._begun_again()

    async def _begun_again(self) -> None:
        """What a new session has to be told."""
        if self._level is not None:
            await self._plainly("logging/setLevel", {"level": self._level})
        for uri in self._listening.uris():
            await self._plainly("resources/subscribe", {"uri": uri})
        self._listening.missed()

    async def _plainly(self, method: str, params: dict[str, Any]) -> None:
        """A call beneath the renewing of sessions. What it meets is no matter of the call that waits for it."""
        try:
            await self._ask(method, params, self._spoken)
        except (RpcError, CallFailed):
            return

    async def _ask(self, method: str, params: dict[str, Any], revision: Revision | None) -> Raw:
        """One request beneath retries and wrappers: a handshake must not wait for itself."""
        self._way.revision = revision
        attempt, deadline = 1, self._clock.time() + self._options.timeout
        while True:
            entry = await self._ask_once(method, params)
            error: Any = entry.error
            if error is None:
                assert entry.raw is not None
                return entry.raw
            if self._way.is_pipe or attempt >= BEGINNINGS or not may_help(error) or isinstance(error, TimedOut):
                raise error
            pause = self._options.retry.pause(attempt, asked_pause(error), self._options.chance())
            if self._clock.time() + pause >= deadline:
                raise error
            await self._clock.sleep(pause)
            attempt += 1

    async def _ask_once(self, method: str, params: dict[str, Any]) -> Entry:
        entry = Entry(method, params, lambda _entry: None, timeout=self._options.timeout)
        self._last_id = entry.id = self._last_id + 1
        exchange = Exchange(encode(_Message(entry.id, method, params)), [entry], False, lambda _entry: None)
        try:
            async with asyncio.timeout(entry.timeout):
                if await self._way.post(exchange):
                    raise ConnectionLost("the server does not know the session it has just begun")
            exchange.end_of_answers()
        except CallFailed as error:
            exchange.end(error)
        except TimeoutError:
            exchange.end(self._timed_out(exchange, entry.timeout))
        return entry

    # --- what a call carries -----------------------------------------------------------------------------------------

    def entry(self, method: str, params: Any = None, *, timeout: float | None = None, **options: Any) -> Entry:
        """A call to be made. Its time begins when it is sent."""
        extra = options.pop("extra", None)
        if isinstance(params, (list, tuple)):
            raise UsageError(f"{method}: params by position.", "MCP has them by name only", "use a dict")
        entry = super().entry(method, params, timeout=timeout, **options)
        if isinstance(entry.params, Struct):
            entry.params = msgspec.to_builtins(entry.params)
        entry.extra = extra or Extra()
        return entry

    def _params(self, entry: Entry) -> Any:
        members: dict[str, Any] = {**entry.params} if entry.params else {}
        extra: Extra = entry.extra
        own: dict[str, Any] = members.get("_meta", {})
        if entry.key is not None and entry.method == "tools/call":
            own = {**own, KEY_META: entry.key}
        if extra.follower is not None:
            own = {**own, "progressToken": entry.id}
            self._inbox.followers[entry.id] = extra.follower
        if own:
            members["_meta"] = {**self._envelope, **own}
        elif self._envelope:
            members["_meta"] = self._sealed
        if extra.round:
            members |= extra.round
        return members or UNSET

    def _converted(self, entry: Entry) -> Any:
        extra: Extra = entry.extra
        if self._is_stateless:
            extra.asked = asked_by(entry)
            if extra.asked is not None:
                return None  # the result is still to come
        return decoded(entry) if extra.read is None else extra.read(entry)

    # --- to the end of a call ----------------------------------------------------------------------------------------

    async def _deliver(self, entries: list[Entry], *, array: bool = False) -> list[Entry]:
        returned = await super()._deliver(entries, array=array)
        for entry in entries if self._is_stateless else ():
            if entry.error is not None or entry.extra.asked is not None:
                await self._go_on(entry)
        return returned

    async def _go_on(self, entry: Entry) -> None:
        for _ in range(ROUNDS):
            if not (await self._mended(entry) or await self._questioned(entry)):
                return
            entry.attempts = 0
            await super()._deliver([entry])
        entry.fail(BadAnswer(f"{entry.method}: the server goes on asking after {ROUNDS} rounds"))

    async def _mended(self, entry: Entry) -> bool:
        """Whether a refused call may go again as the server wants it."""
        error, extra = entry.error, entry.extra
        if extra.is_mended or not isinstance(error, (HeaderMismatch, UnknownVersion)):
            return False
        extra.is_mended = True
        if isinstance(error, HeaderMismatch):
            return await self._refreshed(entry)
        listed = error.data.get("supported") if isinstance(error.data, dict) else None
        common = [revision for revision in STATELESS if revision.name in (listed if isinstance(listed, list) else ())]
        if not common or self._pinned not in (None, common[-1]):
            return False
        self.revision, self._spoken, self._way.revision = common[-1].name, common[-1], common[-1]
        self._seal(self._describe(common[-1]))
        return True

    async def _questioned(self, entry: Entry) -> bool:
        """Answer what the result asks; False if it asks nothing, or if nobody can answer."""
        extra: Extra = entry.extra
        if entry.error is not None or extra.asked is None:
            return False
        try:
            extra.round = await extra.asked.answered(self._host)
        except RpcError as error:
            entry.fail(BadAnswer(f"{entry.method}: the server asks what this client cannot answer: {error}"))
            return False
        entry.deadline = self._clock.time() + entry.timeout  # a person may have taken their time
        return True

    async def _refreshed(self, entry: Entry) -> bool:
        """Whether what is known of the server's tools is new, so that a call may be put in its words."""
        raise NotImplementedError

    # --- arrays ------------------------------------------------------------------------------------------------------

    async def _deliver_arrays(self, entries: list[Entry]) -> list[Entry]:
        if self.arrays.legal and self._way.is_pipe and not (self._has_tried_arrays or self.honours_keys):
            await self._try_an_array()
        return await super()._deliver_arrays(entries)

    async def _try_an_array(self) -> None:
        """On a pipe some servers drop an array without a word. A ping does nothing: its loss tells it, and loses nothing."""
        entry = Entry("ping", None, lambda _entry: None, timeout=ARRAY_PROBE)
        self._last_id = entry.id = self._last_id + 1
        exchange = Exchange(encode([_Message(entry.id, "ping")]), [entry], True, lambda _entry: None)
        try:
            async with asyncio.timeout(ARRAY_PROBE):
                await self._way.post(exchange)
        except (CallFailed, TimeoutError):
            exchange.end(TimedOut("no answer"))
        self._has_tried_arrays = True
        if not entry.ok:
            self.arrays.legal, self.arrays.reason = False, "the server did not answer an array"

    # --- what the server says on its own -----------------------------------------------------------------------------

    def _changed(self, change: Change, subscription: Any) -> None:
        self._forget(change)
        self._listening.tell(change, subscription)
        if self._on_change is not None:
            self._inbox.tell(self._on_change, change)

    def _forget(self, change: Change | None = None) -> None:
        """A list that was kept may be another one now; None: all of them."""

    def _acknowledged(self, id: Any, honoured: dict[str, Any]) -> None:
        self._forget()
        self._listening.acknowledged(id, honoured)

    def _cancelled(self, id: Any) -> None:
        """On a pipe a server ends a stream of changes so."""
        if id in self._listens:
            self._listens[id].cancel()

    async def _listen(self, params: dict[str, Any], began: Callable[[int], None]) -> None:
        """One `subscriptions/listen`, until it ends. It has no deadline."""
        entry = Entry("subscriptions/listen", params, lambda _entry: None, timeout=1.0)
        self._last_id = entry.id = self._last_id + 1
        began(entry.id)
        told = {**params, "_meta": self._envelope}
        exchange = Exchange(encode(_Message(entry.id, entry.method, told)), [entry], False, lambda _entry: None)
        task = self._listens[entry.id] = asyncio.get_running_loop().create_task(self._way.post(exchange))
        try:
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
            if entry.error is not None:
                raise entry.error
        finally:
            del self._listens[entry.id]
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _known(name: str | None) -> Revision | None:
    if name is not None and name not in REVISIONS:
        raise UsageError(f"revision={name!r} is not known.", "MCP has five", f"use one of {', '.join(REVISIONS)}")
    return None if name is None else REVISIONS[name]
