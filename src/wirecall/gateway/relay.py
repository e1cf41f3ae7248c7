"""One client in front of one server: everything that either of them sends reaches the other.

    request of the client       its own id stays here; commands go through the ledger (`forward`)
    notification of the client  passed on; a cancellation by the rules below
    answer of the client        passed on under the id of the server's request
    request of the server       passed on under an id of this relay
    notification of the server  passed on; progress under the client's token

A client cancels on every timeout, and a command that has begun finishes anyway. So:

1. The cancellation of a query is passed on, and nothing waits for its answer any more.
2. The cancellation of a command is passed on only if it has a reason that does not speak of time.
   Its answer is awaited and recorded in any case.
3. `initialize` is never cancelled.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import (
    BadInput,
    CallFailed,
    Gone,
    InvalidParams,
    KeyRequired,
    RpcError,
    UpstreamUnavailable,
)
from wirecall.gateway import tasks, translate
from wirecall.gateway.forward import ASK, FORWARD, Forward, Interim, forwarded, guarded
from wirecall.gateway.offers import there_are
from wirecall.gateway.rounds import STATE_MEMBER, Bridge, Declined, asks, resumed
from wirecall.gateway.session import START_TIME, Report, UpstreamSession
from wirecall.gateway.upstream import Slot
from wirecall.gateway.wire import (
    META,
    answer,
    members_of,
    raw_of,
    refuse_doubles,
    request,
    token_of,
    with_member,
    with_meta,
)
from wirecall.logs import logger
from wirecall.mcp.revisions import REVISIONS, STATELESS, Revision
from wirecall.mcp.server.messages import Answers, ClientAnswer, Id
from wirecall.mcp.server.peer import Session, undeclared
from wirecall.mcp.server.sessions import Sealer
from wirecall.mcp.types import (
    KEY_META,
    PREFIX,
    RECOGNISED_META,
    RECORDED_META,
    REPLAYED_META,
    TASKS,
    Cancelled,
)
from wirecall.protocol.messages import Arrived, Envelope, encode
from wirecall.protocol.sender import Sender
from wirecall.server.call import PASSED, Call, Frame, InputRequired
from wirecall.server.policy import identify

if TYPE_CHECKING:
    from wirecall.server.dispatch import Dispatcher
    from wirecall.server.method import Method

Ask: TypeAlias = Callable[[], Awaitable[Raw]]
Send: TypeAlias = Callable[[bytes], Awaitable[None]]

# Messages of the server that wait for a client that does not read.
MOST_WAITING = 10_000
# Methods that are kept for the tools of one server.
MOST_METHODS = 1000
# Pages of a list of tools that are read to find the kind of a tool.
MOST_PAGES = 100
# Methods that only read, so a lost answer is asked for a second time.
_READS = frozenset(
    {
        "initialize",
        "ping",
        "server/discover",
        "tools/list",
        "prompts/list",
        "prompts/get",
        "resources/list",
        "resources/templates/list",
        "resources/read",
        "completion/complete",
        "logging/setLevel",
        "resources/subscribe",
        "resources/unsubscribe",
    }
)
_NO_ARGUMENTS = Raw(b"{}")
_VERSION = f"{PREFIX}protocolVersion"

_decode_cancelled = msgspec.json.Decoder(Cancelled).decode
_decode_text = msgspec.json.Decoder(str).decode


class Called(Struct):
    """The params of `tools/call` that matter here."""

    name: str
    arguments: Raw = _NO_ARGUMENTS
    idempotency_key: Any = UNSET
    key: Any = msgspec.field(default=UNSET, name="idempotencyKey")
    meta: dict[str, Raw] = msgspec.field(default_factory=dict, name=META)

    @property
    def stated_key(self) -> object:
        """The key in `_meta`, if there is one."""
        stated = self.meta.get(KEY_META)
        if stated is None:
            return UNSET
        return msgspec.json.decode(stated)


decode_called = msgspec.json.Decoder(Called).decode


class _Reason(Struct):
    reason: Any = None


_decode_reason = msgspec.json.Decoder(_Reason).decode


class Flying(Struct, eq=False):
    """One request of the client that is not answered yet."""

    is_command: bool
    forward: Forward
    # The task that waits for the answer.
    task: "asyncio.Task[Any] | None"
    is_cancelled: bool = False


class Outbox:
    """The messages of a server for one client, in their order.

    Of several reports of one call that wait, the last is sent.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: dict[object, bytes] = {}
        self._numbers = count()
        self._news: asyncio.Future[None] | None = None
        self._pump: asyncio.Task[None] | None = None
        self._is_ending = False

    def put(self, message: bytes, key: object = None) -> None:
        """Send a message soon. One with the same key, if it still waits, is replaced."""
        if len(self._pending) >= MOST_WAITING:
            logger.warning("a client does not read: a message of its server is dropped")
            return
        if key is None:
            key = ("message", next(self._numbers))
        self._pending[key] = message
        if self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._run())
        elif self._news is not None and not self._news.done():
            self._news.set_result(None)

    def drop(self, key: object) -> None:
        """Do not send a message that still waits."""
        self._pending.pop(key, None)

    async def _run(self) -> None:
        while True:
            while self._pending:
                key = next(iter(self._pending))
                with suppress(Gone):
                    await self._send(self._pending.pop(key))
            if self._is_ending:
                return
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    async def finish(self) -> None:
        """Send what still waits, and end."""
        self._is_ending = True
        if self._pump is None:
            return
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        await asyncio.wait([self._pump])

    async def aclose(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])


class Relay:
    """One client in front of one server."""

    def __init__(
        self,
        session: UpstreamSession,
        dispatcher: "Callable[[], Dispatcher]",
        answers: Answers,
        send: Send,
        flying: "dict[Id, Flying] | None" = None,
        sealer: Sealer | None = None,
        *,
        is_guarded: bool = False,
    ) -> None:
        self.upstream = session.upstream
        self.session = session
        self.outbox = Outbox(send)
        self._dispatcher = dispatcher
        self._answers = answers
        # Middleware sees the calls of tools that only read, too.
        self._is_guarded = is_guarded
        # Seals the states of a server that several callers share. None: there is one client.
        self._sealer = sealer
        # The requests of the client that are not answered yet, by id.
        self._flying: dict[Id, Flying] = {} if flying is None else flying
        # The ids of the server's requests by ours.
        self._questions: dict[int, object] = {}
        # The renewals of the conversation when they were asked.
        self._renewals = 0
        self._numbers = count(1)

    def own(self) -> None:
        """Take everything that the server sends: this client is its only one."""
        self.session.on_request = self._asked
        self.session.on_notification = self._notified

    @property
    def revision(self) -> Revision | None:
        """The revision of the handshake; None before it, and without one."""
        return self.session.revision

    async def aclose(self) -> None:
        """End the conversation with the server."""
        await self.outbox.aclose()
        await self.session.aclose()

    # --- requests of the client -------------------------------------------------------------------

    async def answer(
        self,
        message: Envelope,
        sender: Sender,
        key: str | None = None,
        client: Session | None = None,
        bridge: "Callable[[], Bridge] | None" = None,
    ) -> bytes | None:
        """Return the answer to a request; None if the client has cancelled it.

        `client` is that of the request, if its revision may differ from the server's. `bridge`
        makes what asks it.
        """
        id = message.id
        assert isinstance(id, (int, str))  # `messages.read` has checked it
        task = asyncio.current_task()
        forward = Forward(
            self.session,
            message.method,
            message.params,
            self._report(message),
            sender.caller,
            self._sealer,
        )
        flying = Flying(False, forward, task)
        revision = self.revision if client is None else client.revision
        forward.client = revision
        if id in self._flying or message.method == "initialize":
            flying.task = None  # it cannot be cancelled by its id
        else:
            self._flying[id] = flying
        try:
            if client is None:
                self._speak_for(message)
            if bridge is not None and translate.is_older(client, self.revision):
                forward.bridge = bridge()
            forward.awaits_tasks = client is not None and TASKS not in client.extensions
            forward.params = translate.params_for(message.params, client, self.revision)
            self._resume(forward, revision)
            result = await self._result(message, id, flying, sender, key)
            worded = translate.result_for(
                result, client, self.revision, self.session, message.method
            )
            return answer(id, worded)
        except RpcError as error:
            own = self._worded(flying, error)
            if client is not None:
                # Over HTTP, the front also gives it a status.
                raise translate.error_for(own, message.method, client, self.revision) from None
            return self._answers.failure(id, own, revision)
        except asyncio.CancelledError:
            if task is None or not flying.is_cancelled or task.cancelling() > 1:
                raise
            task.uncancel()
            return None
        finally:
            if self._flying.get(id) is flying:
                del self._flying[id]
            if forward.report is not None:
                self.outbox.drop(("progress", id))

    def _resume(self, forward: Forward, client: Revision | None) -> None:
        """Take the state of a further round: the server gets its own, and the record its key."""
        params = forward.params
        if self._sealer is None or client is None or not client.is_stateless:
            return
        if params is UNSET or bytes(params).find(STATE_MEMBER.encode()) < 0:
            return
        if STATE_MEMBER not in members_of(params):
            return
        label = self.upstream.origin.label
        forward.params, forward.leg, forward.follows = resumed(
            self._sealer, forward.caller, label, forward.method, params
        )

    def _worded(self, flying: Flying, error: RpcError) -> RpcError:
        """Return an error for the client: the server's own words, if it has sent the error."""
        own = flying.forward.error
        if own is not None and own.code == error.code and own.message == error.message:
            return own
        return error

    async def _result(
        self, message: Envelope, id: Id, flying: Flying, sender: Sender, key: str | None
    ) -> bytes:
        """Return the result of a request."""
        method = message.method
        params = flying.forward.params
        if method == "tools/call":
            return await self._call(message, id, flying, sender, key)
        if method in tasks.METHODS and self._sealer is not None and self.revision in STATELESS:
            return await self._about_task(flying, self._sealer)

        ask = flying.forward.send
        if method == "initialize":
            ask = partial(self.session.initialize, params)
        result = await self._again(flying, ask, repeats=method in _READS)
        if method == "tools/list":
            self.upstream.learn(result, is_first="cursor" not in members_of(params))
        self.session.note(method, params)
        return self._read(flying.forward, result)

    def _read(self, forward: Forward, result: Raw) -> bytes:
        """Return the result of a request that only reads, or its questions."""
        if asks(result):
            return forward.questions(result)
        return bytes(forward.task(result))

    async def _about_task(self, flying: Flying, sealer: Sealer) -> bytes:
        """Return the result of a request about a task, which is known here by a sealed id."""
        forward = flying.forward
        if forward.awaits_tasks:
            raise undeclared(TASKS)
        stated = members_of(forward.params).get("taskId")
        task = tasks.named(sealer, forward.caller, forward.params)
        if task.label != self.upstream.origin.label:
            raise BadInput("taskId: it is a task of another server", ran="no")
        forward.params = tasks.with_id(forward.params, task.id)
        repeats = forward.method == "tasks/get"
        result = await self._again(flying, forward.send, repeats=repeats)
        return bytes(tasks.with_id(result, stated))

    def _speak_for(self, message: Envelope) -> None:
        """Use the revision of a message: over HTTP, headers repeat it.

        A request of 2026-07-28 names its own. Others have that of the handshake, also those of a
        client that has tried both.
        """
        self.session.link.revision = _named_revision(message.params) or self.session.revision

    async def _again(self, flying: Flying, ask: Ask, *, repeats: bool) -> Raw:
        """Send a request that is not a command, a second time if its answer is lost and it reads.

        An answer that does not come within the `timeout` of the upstream is lost.

        Raises `UpstreamUnavailable` if no answer comes.
        """
        upstream = self.upstream
        for is_last in (not repeats, True):
            try:
                await upstream.places.take()
                slot = flying.forward.slot = Slot(upstream.places)
                try:
                    await self.session.ready()
                    return await ask()
                finally:
                    if slot.is_held:
                        upstream.places.give_back()
            except Declined:
                raise
            except RpcError as error:
                if not isinstance(error, UpstreamUnavailable) or error.is_remote:
                    flying.forward.error = error
                raise
            except TimeoutError as error:
                if is_last:
                    reason = f"no answer within {upstream.origin.timeout:g} s"
                    raise upstream.unavailable(reason) from error
            except CallFailed as error:
                if is_last or error.ran == "no":
                    raise upstream.unavailable(upstream.lost(error)) from error
        raise AssertionError("the last attempt returns or raises")

    # --- calls of tools ---------------------------------------------------------------------------

    async def _call(
        self, message: Envelope, id: Id, flying: Flying, sender: Sender, key: str | None
    ) -> bytes:
        """Return the result of `tools/call`."""
        params = flying.forward.params
        try:
            call = decode_called(_NO_ARGUMENTS if params is UNSET else params)
        except msgspec.DecodeError as error:
            raise InvalidParams(f"params: {error}", ran="no") from None
        if params is message.params:
            # Written by us: of a member that occurs twice, server and gateway see the same one.
            flying.forward.params = raw_of(members_of(params))
        if not self.upstream.allows(call.name):
            what = f"the tool {call.name[:100]!r} is denied here"
            if self.upstream.tools is not None:
                what += f"; {there_are(filter(self.upstream.allows, self.upstream.tools))}"
            raise InvalidParams(what, ran="no")
        if self.upstream.tools is None:
            await self._know(call.name, params)
        if self.upstream.use_of(call.name) == "again":
            return self._read(flying.forward, await self._query(id, call, flying, sender))
        refuse_doubles(message.params)
        flying.is_command = True
        if flying.forward.bridge is not None:
            flying.forward.bridge.is_command = True
        return await self._command(id, call, flying, sender, key)

    async def _query(self, id: Id, params: Called, flying: Flying, sender: Sender) -> Raw:
        """Return the result of a tool that only reads. Middleware sees the call, if there is any."""
        ask = partial(self._again, flying, flying.forward.send, repeats=True)
        if not self._is_guarded:
            return await ask()
        queries = self.upstream.queries
        method = queries.get(params.name)
        if method is None:
            _make_room(queries)
            method = queries[params.name] = guarded(self.upstream, params.name)
        call = Call(
            method,
            Frame(sender),
            id=id,
            params=params.arguments,
            record=f"tools/call:{method.record}",
            values={ASK: ask, PASSED: flying.forward.passed},
        )
        return await self._dispatcher().call(call)

    async def _know(self, name: str, params: Raw | UnsetType) -> None:
        """Read the list of tools if the kind of a tool is not known.

        A server that does not give it has commands only.
        """
        upstream = self.upstream
        if name in upstream.origin.kinds or upstream.origin.trust == "none":
            return
        members: dict[str, Any] = {}
        envelope = members_of(members_of(params).get(META, UNSET))
        envelope.pop("progressToken", None)
        if _VERSION in envelope:
            members[META] = raw_of(envelope)
        try:
            async with asyncio.timeout(START_TIME):
                await self.session.ready()
                for page in range(MOST_PAGES):
                    listed = await self.session.ask("tools/list", raw_of(members))
                    cursor = upstream.learn(listed, is_first=page == 0)
                    if cursor is None:
                        return
                    members["cursor"] = cursor
        except TimeoutError:
            upstream.tools = {}  # the next call does not wait for it again
        except (RpcError, CallFailed):
            return

    async def _command(
        self, id: Id, params: Called, flying: Flying, sender: Sender, key: str | None
    ) -> bytes:
        """Return the result of a command: its own, or the recorded one of an equal call."""
        method = self._method(params.name)
        arguments = params.arguments
        header = UNSET if key is None else key
        key, digest = identify(
            arguments, params.stated_key, params.idempotency_key, params.key, header
        )
        forward = flying.forward
        follows: str | None = None
        if forward.leg is not None:
            if key not in (None, forward.leg.key):
                raise BadInput(
                    "requestState: the call began with another idempotency key, or without one",
                    ran="no",
                )
            key = forward.leg.key
            if forward.leg.has_record:
                follows = forward.follows
        if key is None and method.key == "required":
            raise KeyRequired(
                f"the tool {params.name[:100]!r} needs an idempotency key, as {KEY_META!r} in _meta "
                "or as its argument idempotency_key: one value per intent, the same on every retry",
                ran="no",
            )
        call = Call(
            method,
            Frame(sender),
            id=id,
            params=arguments,
            record=f"tools/call:{method.record}",
            key=key,
            keyless=method.key != "off",
            digest=digest,
            values={FORWARD: forward, PASSED: forward.passed},
            follows=follows,
        )
        try:
            result = await self._dispatcher().call(call)
        except Interim as asked:
            return bytes(asked.result)
        except InputRequired as asked:
            return asked.interim
        marks: dict[str, Any] = {}
        if call.replayed:
            marks[REPLAYED_META] = True
        if call.recognised:
            marks[RECOGNISED_META] = True
        if not call.recorded:
            marks[RECORDED_META] = False
        if marks and not asks(result):
            result = with_meta(result, marks)
        return bytes(result)

    def _method(self, tool: str) -> "Method":
        methods = self.upstream.methods
        method = methods.get(tool)
        if method is None:
            _make_room(methods)
            method = methods[tool] = forwarded(self.upstream, tool)
        return method

    # --- progress ---------------------------------------------------------------------------------

    def _report(self, message: Envelope) -> Report | None:
        """Return the function that sends the progress of a request to the client."""
        token = token_of(message.params)
        if token is None:
            return None
        known = token
        key = ("progress", message.id)

        def report(params: Raw | UnsetType) -> None:
            own = with_member(params, "progressToken", known)
            self.outbox.put(request(None, "notifications/progress", own), key)

        return report

    # --- what the client sends without an answer --------------------------------------------------

    async def take(self, message: Envelope) -> None:
        """Take a notification of the client."""
        try:
            if message.method == "notifications/cancelled":
                await cancel(self._flying, message.params)
            else:
                self._speak_for(message)
                await self.session.notify(message.method, message.params)
        except CallFailed as error:
            logger.debug("a notification of a client was not taken: %s", error)

    async def answered(self, message: ClientAnswer) -> None:
        """Take the client's answer to a request of the server."""
        questions = self._open_questions()
        if type(message.id) is not int or message.id not in questions:
            return
        theirs = encode(questions.pop(message.id))
        name = b"result" if message.error is UNSET else b"error"
        value = message.result if message.error is UNSET else message.error
        body = b"{}" if value is UNSET else bytes(value)
        try:
            await self.session.send(b'{"jsonrpc":"2.0","id":%b,"%b":%b}' % (theirs, name, body))
        except CallFailed as error:
            logger.debug("an answer of a client was not taken: %s", error)

    # --- what the server sends --------------------------------------------------------------------

    def _open_questions(self) -> dict[int, object]:
        """Return the questions of the server. One that was started again has its own ids."""
        if self._renewals != self.session.renewals:
            self._renewals = self.session.renewals
            self._questions.clear()
        return self._questions

    def _asked(self, message: Arrived) -> None:
        """Pass a request of the server on, under an id of this relay."""
        id = next(self._numbers)
        self._open_questions()[id] = message.id
        assert isinstance(message.method, str)
        self.outbox.put(request(id, message.method, message.params))

    def _notified(self, message: Arrived) -> None:
        """Pass a notification of the server on."""
        assert isinstance(message.method, str)
        params = message.params
        if message.method == "notifications/tools/list_changed":
            self.upstream.tools = None
        if message.method == "notifications/cancelled":
            members = members_of(params)
            theirs = members.get("requestId")
            if theirs is None:
                return
            known = msgspec.json.decode(theirs)
            questions = self._open_questions()
            ours = [id for id, question in questions.items() if question == known]
            if not ours:
                return
            del questions[ours[0]]
            members["requestId"] = Raw(encode(ours[0]))
            params = raw_of(members)
        self.outbox.put(request(None, message.method, params))


def _named_revision(params: Raw | UnsetType) -> Revision | None:
    """Return the revision that the envelope of a request names."""
    if params is UNSET or bytes(params).find(b"protocolVersion") < 0:
        return None
    stated = members_of(members_of(params).get(META, UNSET)).get(_VERSION)
    if stated is None:
        return None
    try:
        return REVISIONS.get(_decode_text(stated))
    except msgspec.DecodeError:
        return None


def _make_room(methods: "dict[str, Method]") -> None:
    """Forget the methods of tools if there are too many: clients may name any."""
    if len(methods) >= MOST_METHODS:
        methods.clear()


async def cancel(requests: dict[Id, Flying], params: Raw | UnsetType) -> None:
    """Cancel one of these requests, as a client asks."""
    try:
        id = _decode_cancelled(_NO_ARGUMENTS if params is UNSET else params).id
    except msgspec.DecodeError:
        return
    flying = None
    if isinstance(id, (int, str)):
        flying = requests.get(id)
    if flying is None or flying.task is None or flying.is_cancelled:
        return
    flying.is_cancelled = True
    session = flying.forward.session
    sent = flying.forward.sent
    if not flying.is_command and sent is not None:
        session.give_up(sent)
    flying.task.cancel()
    if flying.forward.bridge is not None:
        flying.forward.bridge.close()
    if sent is not None and (not flying.is_command or is_meant(params)):
        await session.cancel(sent, params)


def is_meant(params: Raw | UnsetType) -> bool:
    """Return whether a person has cancelled a call. Clients also cancel on every timeout."""
    try:
        reason = _decode_reason(_NO_ARGUMENTS if params is UNSET else params).reason
    except msgspec.DecodeError:
        return False
    if not isinstance(reason, str) or not reason.strip():
        return False
    words = reason.lower()
    return "time" not in words and "deadline" not in words
