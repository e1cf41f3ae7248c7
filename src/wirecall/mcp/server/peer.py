"""The client of a call: its session, and the notifications and questions it gets while the call runs.

A `Session` is the negotiated state of a client: of a connection or a session token in the revisions with a handshake, of a
single request where every request describes itself. A `Peer` is one request and the client at its other end; the handler
meets it as `ctx.progress`, `ctx.log`, `ctx.elicit`, `ctx.sample` and `ctx.roots`.

A question has one form for the handler and two on the wire. With a handshake it is a request to the client, and the handler
waits, outside of the calls in flight (`Questions.place`). At 2026-07-28 a server sends no requests: a question whose answer
is at hand returns it, any other raises `InputRequired`. The call ends with `input_required`, the client calls again with the
answers, and the handler starts from the top (`Questions.resume`, `pause`):

1. Between two rounds the client keeps a sealed text, the state. Nothing of it stays here: any worker takes the next round.
2. The next round is the same call with the answers and the state. The state holds the answers of all rounds before and the
   idempotency key of the first: a round that leaves the key out is still the same command.
3. A state belongs to one caller, one method and one set of arguments, and is good for `STATE_LIFETIME` seconds.
4. A state of a command leads to one outcome, however often it is sent. From the second round on the command has a record in
   the ledger: under its key, or, if it came without one, under a key that its first question made and the state carries. So
   the ledger answers a state that comes again with the outcome that it had. A state does not outlive the record.
5. A command takes answers only to the questions that its state asked. A call that only reads has no effect to protect: it
   ignores answers that it did not ask for, as the specification recommends.
"""

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.errors import BadInput, Busy, Gone, NotCapable, RpcError, UsageError, rebuilt
from wirecall.logs import logger
from wirecall.mcp.revisions import REVISIONS, Revision
from wirecall.mcp.server.forms import RequestedForm, form_of
from wirecall.mcp.server.messages import Id
from wirecall.mcp.types import (
    LEVELS,
    PREFIX,
    Elicited,
    Message,
    Params,
    Resumed,
    Roots,
    Sampled,
    block,
    declared_extensions,
)
from wirecall.protocol.messages import ErrorObject, JsonObject, Limits, Sending, decode_any, decode_value, encode
from wirecall.protocol.params import explain
from wirecall.server.call import Call, ClientInfo, HttpHeader, InputRequired
from wirecall.server.identity import Identity
from wirecall.server.method import Method
from wirecall.server.policy import fingerprint
from wirecall.stepping import Signal, wake

if TYPE_CHECKING:
    from wirecall.mcp.server.sessions import Seals
    from wirecall.server.dispatch import Dispatcher

T = TypeVar("T")

RETRY_AFTER_MS = 1000  # while a person answers
STATE_LIFETIME = 3600.0  # seconds; a person may take this long to answer a question
LONGEST_NAME = 100  # characters of a client's name or version that are kept

# Ids of our questions, different in every process: an answer may reach another one.
_PREFIX = os.urandom(4).hex()
_numbers = itertools.count(1)


class Outlet(Protocol):
    """Where a transport lets messages out that come before the answer."""

    stopping: Signal  # set when the server is about to stop
    replayed: list[Id]  # whose answers come from the ledger
    is_shared: bool  # messages of other calls go the same way
    is_stream: bool  # the answer has become a stream of messages
    sending: Sending  # the way of the answer

    @property
    def peer(self) -> str | None:
        """The name of an anonymous client that is the only one of its kind: its session, or its pipe."""

    async def send(self, message: bytes) -> None:
        """Send one message to the client, as part of what answers the message at hand."""
        ...

    async def hang_up(self, retry: float) -> None:
        """End the connection, if there is one to come back to."""
        ...

    async def until_left(self, patience: float) -> None:
        """Return when the client has had no connection for `patience` seconds."""
        ...


async def sent(sending: Awaitable[None]) -> bool:
    """Await what an outlet does for a running call; False if it failed.

    A fault of the transport does not reach the handler: the handler may have made its effect already, and has to finish so
    that the outcome is recorded.
    """
    try:
        await sending
    except Gone:
        return False
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return False  # the transport has cancelled its own future; the call itself goes on
    except Exception as error:
        logger.warning("sending a message before an answer failed: %r", error)
        return False
    return True


class Session(Struct, eq=False):
    """The negotiated state of a client: its revision, its capabilities and its calls."""

    revision: Revision
    capabilities: JsonObject = {}
    level: str | None = None  # the least log level it wants to see; None: none was set
    calls: dict[Id, asyncio.Task[object]] = {}  # what it may cancel
    subscriptions: set[str] = set()  # URIs of resources
    caller: str | None = None  # of a session that this process keeps: its subscriptions count as the caller's
    waiting: int = 0  # calls that wait for its answers
    client: dict[str, str] | None = None  # its name and version, from `initialize`
    id: str | None = None  # of a session over HTTP: the random part of its token, which opens nothing by itself
    # Questions that it has not answered yet. An error is a value of the future and not its exception: asyncio reports an
    # exception that is not retrieved, and a call that is cancelled in the same moment does not retrieve it.
    asked: "dict[Id, tuple[Peer, asyncio.Future[Raw | RpcError]]]" = {}

    @property
    def extensions(self) -> dict[str, JsonObject]:
        """Return the extensions that the client declares in this session or, at 2026-07-28, in this request."""
        return declared_extensions(self.capabilities, self.revision)

    async def request(self, peer: "Peer", method: str, params: JsonObject) -> Raw:
        """Send a request to the client, on the way of one of its calls, and return the client's result."""
        id = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        loop, limits = asyncio.get_running_loop(), peer.questions.limits
        answer: asyncio.Future[Raw | RpcError] = loop.create_future()
        self.asked[id] = peer, answer
        left = loop.create_task(peer.outlet.until_left(limits.away_time))
        try:
            message = encode({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
            if len(message) > limits.bytes_out:
                why = f"{method} of {len(message)} bytes is longer than Limits.bytes_out, {limits.bytes_out}"
                raise UsageError("The handler asked its client.", why, "ask a shorter question")
            if not await sent(peer.outlet.send(message)):
                raise NotCapable("the question could not be sent to the client", ran="unknown")
            coming: list[asyncio.Future[Raw | RpcError] | asyncio.Task[None]] = [answer, left]
            await asyncio.wait(coming, timeout=limits.answer_time, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                told = answer.result()
                if isinstance(told, RpcError):
                    raise told
                return told
            why = "has left without an answer" if left.done() else f"has not answered within {limits.answer_time:g} s"
            raise NotCapable(f"the client {why}", ran="unknown")
        finally:
            del self.asked[id]
            left.cancel()

    def abandon(self, peer: "Peer | None" = None) -> None:
        """End the wait for answers that will not come: those of one call, or all of them if the client has left."""
        for asking, answer in self.asked.values():
            if peer in (None, asking):
                wake(answer, NotCapable("the client has left without an answer", ran="unknown"))

    def answered(self, id: Id, result: Raw | UnsetType, error: Raw | UnsetType) -> bool:
        """Take an answer of the client; False if no question has this id."""
        _, answer = self.asked.get(id, (None, None))
        if answer is None or answer.done():
            return False
        if error is UNSET:
            answer.set_result(Raw(b"{}") if result is UNSET else result)
            return True
        try:
            told = msgspec.json.decode(error, type=ErrorObject)
            answer.set_result(rebuilt(RpcError, told.code, told.message, None if told.data is UNSET else told.data))
        except msgspec.ValidationError:
            answer.set_result(BadInput("the client's answer: error: expected an object with code and message"))
        return True


def described_session(params: Params, calls: "dict[Id, asyncio.Task[object]] | None" = None) -> Session:
    """Return the session of a request that describes itself (2026-07-28): it lives as long as the request."""
    meta = params.meta
    assert meta is not UNSET and meta.version is not UNSET and meta.capabilities is not UNSET  # `Server.described`
    level = None if meta.level is UNSET else meta.level
    return Session(REVISIONS[meta.version], meta.capabilities, level, {} if calls is None else calls)


def named_client(info: object) -> dict[str, str]:
    """Return the name and version in a client's description of itself, as far as they are texts."""
    members = info if isinstance(info, dict) else {}
    return {name: members[name][:LONGEST_NAME] for name in ("name", "version") if isinstance(members.get(name), str)}


class _State(Struct):
    """The state that a client keeps between two rounds."""

    digest: str  # of the call: its method and its arguments
    key: str | None
    asked: list[str]
    answers: dict[str, JsonObject]


class Questions:
    """The questions of all calls: seals their states, and counts the calls that wait.

    A person may take an hour, so calls that wait do not count towards `Limits.in_flight`: a client that leaves many
    questions open would stop all other callers. They have limits of their own, which stop only that client.
    """

    def __init__(self, seals: "Seals", limits: Limits, dispatcher: "Callable[[], Dispatcher]") -> None:
        self.limits = limits
        self._seals = seals
        self._dispatcher = dispatcher
        self._waiting: Counter[str] = Counter()  # calls of each caller

    @contextmanager
    def place(self, session: Session, caller: str) -> Iterator[None]:
        """Count a call as waiting, and not as in flight. Raises `Busy` if too many of its session or caller wait."""
        for limit, count in (("waiting_per_session", session.waiting), ("waiting_per_caller", self._waiting[caller])):
            most = getattr(self.limits, limit)
            if count >= most:
                reason = f"{count} calls already wait for answers of this client: answer or cancel one of them"
                raise Busy(reason, ran="no", limit=limit, max=most, retry_after_ms=RETRY_AFTER_MS)
        session.waiting += 1
        self._waiting[caller] += 1
        try:
            with self._dispatcher().set_aside(caller):
                yield
        finally:
            session.waiting -= 1
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]

    def resume(self, call: Call, peer: "Peer") -> None:
        """Begin a round of a call: give it the answers of this round and of those before, and its key (2026-07-28)."""
        params: Resumed = peer.params
        given, is_command = {} if params.responses is UNSET else params.responses, call.method.is_command
        if params.state is not UNSET:
            # Step 1: the state is ours, was sealed for this caller, and belongs to this call. Any client may have written
            # it, and its integrity must be checked (basic/patterns/mrtr, "Server Requirements").
            found = self._seals.open("state", call.frame.caller, params.state)
            if found is None:
                raise BadInput("requestState: it was not issued for this call, or has expired")
            state = msgspec.json.decode(found.value, type=_State)
            if state.digest != _digest(call.record, call.params):
                raise BadInput("requestState: it belongs to another call")
            if call.key not in (None, state.key):
                raise BadInput("requestState: the call began with another idempotency key, or without one")
            # Step 2: a command takes answers only to the questions that the state asked. A call that only reads ignores the
            # others, as "Error Handling" there recommends.
            unasked = sorted(given.keys() - state.asked)
            if unasked and is_command:
                raise BadInput(f"inputResponses: {unasked[0][:100]!r} was not asked; expected {', '.join(state.asked)}")
            call.key = state.key
            peer.continues, peer.answers = params.state, {**state.answers, **given}
        elif given:
            if is_command:
                raise BadInput("inputResponses: this call has not asked; send the requestState of the call that asked")
            peer.answers = given

    def pause(self, peer: "Peer", questions: JsonObject) -> bytes:
        """Return the result of a round that asks."""
        assert peer.about is not None
        method, record, params, key = peer.about
        lifetime = STATE_LIFETIME
        if method.is_command:
            # A call of key="off" has none so far. Its further rounds have one, so that one state leads to one effect.
            key, lifetime = key or os.urandom(16).hex(), min(lifetime, method.terms.retention)
        state = _State(_digest(record, params), key, list(questions), peer.answers)
        sealed = self._seals.seal("state", peer.caller, state, lifetime)
        return encode({"resultType": "input_required", "inputRequests": questions, "requestState": sealed})


def _digest(record: str, params: Raw | UnsetType) -> str:
    return f"{record} {fingerprint(params).hex()}"


class Question(Struct, eq=False):
    """Something to ask the client; awaited, it is the answer."""

    peer: "Peer"
    key: str
    method: str
    params: JsonObject
    decode: Callable[[object], Any]

    def __await__(self) -> Generator[Any, Any, Any]:
        answers = yield from self.peer.ask([self]).__await__()
        return answers[0]

    if not TYPE_CHECKING:  # a type checker reports the missing `await` itself

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"a question has no {name!r}, its answer may have: use `await ctx.elicit(...)`")


class Peer(Struct, eq=False):
    """One request, and the client at its other end."""

    session: Session
    outlet: Outlet
    questions: Questions
    id: Id
    raw: Raw | UnsetType  # its params, as they came
    params: Any  # decoded
    caller: str
    key: str | None = None  # from the HTTP header
    position: int | None = None  # in an array
    identity: Identity | None = None  # of the caller, where a token named it
    headers: HttpHeader | None = None  # of the HTTP request
    answers: dict[str, JsonObject] = {}  # by the key of their question
    continues: str | None = None  # the state of the round before; None in the first round
    is_committed: bool = False  # the handler has called ctx.commit_point()
    marks: JsonObject = {}  # `_meta` of the result, as far as the ledger has to do with it
    about: tuple[Method, str, Raw | UnsetType, str | None] | None = None  # what a state is about
    _progress: float | None = None  # the last number sent
    _count: int = 0  # questions so far
    _asking: int = 0  # tasks of the call that wait for answers
    _place: ExitStack | None = None  # of a call that waits
    _closed: bool = False

    def named(self, key: str) -> None:
        """Keep the key of a call that came without one, for the states of its further rounds."""
        if self.about is not None:
            self.about = *self.about[:3], key

    def close(self) -> None:
        """End the conversation with the client: the call is answered or cancelled. A question that still waits fails."""
        self._closed = True
        if self.session.asked:
            self.session.abandon(self)

    @property
    def revision(self) -> str:
        return self.session.revision.name

    @property
    def transport(self) -> Literal["pipe", "tcp"]:
        return "pipe" if self.outlet.is_shared else "tcp"

    @property
    def session_id(self) -> str | None:
        return self.session.id

    @property
    def uri(self) -> str | None:
        """The URI of the resource that the request is for."""
        uri = getattr(self.params, "uri", None)
        return uri if isinstance(uri, str) else None

    @property
    def capabilities(self) -> JsonObject:
        return self.session.capabilities

    @property
    def client(self) -> ClientInfo:
        session = self.session
        told = named_client(self.meta.get(f"{PREFIX}clientInfo")) if session.revision.is_stateless else session.client or {}
        return ClientInfo(told.get("name"), told.get("version"), session.extensions)

    @property
    def meta(self) -> JsonObject:
        params = {} if self.raw is UNSET else decode_any(self.raw)
        meta = params.get("_meta") if isinstance(params, dict) else None
        return meta if isinstance(meta, dict) else {}

    # --- notifications -----------------------------------------------------------------------------------------------------

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Send a progress notification, if the client has asked for them and the number is above the last one."""
        # Only with the client's token, and the number must increase (basic/utilities/progress, "Progress Flow").
        token = UNSET if self.params.meta is UNSET else self.params.meta.token
        if token is UNSET or (self._progress is not None and progress <= self._progress):
            return
        self._progress = progress
        told: JsonObject = {"progressToken": token, "progress": progress}
        if total is not None:
            told["total"] = total
        if message is not None and self.session.revision.has("progress message"):
            told["message"] = message
        await self._tell("notifications/progress", told)

    def wants(self, level: str) -> bool:
        # A client that has set no level gets messages from `info` on, and none at 2026-07-28 (server/utilities, "Logging").
        least = self.session.level or ("info" if not self.session.revision.is_stateless else None)
        return not self._closed and least is not None and LEVELS.index(level) >= LEVELS.index(least)

    async def log(self, level: str, data: object, logger: str | None) -> None:
        named = {"logger": logger} if logger else {}
        await self._tell("notifications/message", {"level": level, **named, "data": data})

    async def _tell(self, method: str, params: JsonObject) -> None:
        """Send a notification, unless the call is answered."""
        if self._closed:
            return
        message, most = encode({"jsonrpc": "2.0", "method": method, "params": params}), self.questions.limits.bytes_out
        if len(message) <= most:
            await sent(self.outlet.send(message))
        else:  # the handler goes on: its outcome counts, and not what it reports on the way
            logger.warning("%s of %d bytes is not sent: Limits.bytes_out is %d", method, len(message), most)

    async def hang_up(self, retry: float) -> None:
        if not self._closed:
            await sent(self.outlet.hang_up(retry))

    async def hand_over(self) -> None:
        """Do nothing: the call cannot become a task."""

    # --- questions ------------------------------------------------------------------------------------------------------

    def elicit(self, message: str, schema: Any, key: str | None) -> Question:
        form, revision = form_of(schema), self.session.revision
        params = {"message": message, "requestedSchema": form.schema(revision)}
        if revision.has("ask elicitation url"):
            params = {"mode": "form", **params}
        return self._question(key, "elicitation/create", params, lambda answer: _elicited(answer, form))

    def elicit_url(self, message: str, url: str, key: str | None) -> Question:
        # For secrets: a form must not ask for one (client/elicitation, "User Interaction Model").
        params = {"mode": "url", "message": message, "url": url}
        if not self.session.revision.is_stateless:
            params["elicitationId"] = os.urandom(12).hex()
        return self._question(key, "elicitation/create", params, lambda answer: _elicited(answer, None))

    def sample(
        self, messages: str | Sequence[Message], max_tokens: int, system: str | None, key: str | None, more: JsonObject
    ) -> Question:
        several = [Message("user", messages)] if isinstance(messages, str) else messages
        known = self.session.revision.known
        wire = [{"role": message.role, "content": known(block(message.content))} for message in several]
        params = {"messages": wire, "maxTokens": max_tokens, **more}
        if system is not None:
            params["systemPrompt"] = system
        return self._question(key, "sampling/createMessage", params, _sampled)

    def roots(self, key: str | None) -> Question:
        return self._question(key, "roots/list", {}, lambda answer: _as(answer, Roots).roots)

    async def ask(self, questions: Sequence[Any]) -> list[Any]:
        """Return the answers to some questions; raise `InputRequired` if they have to be asked in a round of their own."""
        if self._closed:
            raise NotCapable("the call has ended: ask the client before the handler returns")
        for question in questions:
            check_capability(self.session, question.method, question.params)
        if self.session.revision.is_stateless:
            missing = [question for question in questions if question.key not in self.answers]
            if missing and self.about is None:
                why = "at 2026-07-28 only tools, prompts and resources can ask (basic/patterns/mrtr)"
                raise UsageError("The handler asked its client.", why, "ask in a tool")
            if missing and self.is_committed:
                why = "the client's answer starts it from the top, and its effect would happen again"
                raise UsageError("The handler asked its client after its commit point.", why, "ask before it")
            if missing:
                wire = {question.key: {"method": question.method, "params": question.params} for question in missing}
                raise InputRequired(await self.pause(wire))
            return [question.decode(self.answers[question.key]) for question in questions]

        async def asked(question: Question) -> Any:
            answer = await self.session.request(self, question.method, question.params)
            try:
                return question.decode(decode_value(answer))
            except msgspec.ValidationError as error:  # a number that no float can hold
                raise BadInput(explain(error, "the client's answer")) from None

        # A call may ask from several of its tasks at once. It waits once, until the last of them has its answer.
        if self._place is None:
            place = ExitStack()
            place.enter_context(self.questions.place(self.session, self.caller))  # raises if too many wait
            self._place = place
        self._asking += 1
        requests = [asyncio.ensure_future(asked(question)) for question in questions]
        try:
            return list(await asyncio.gather(*requests))
        finally:
            for request in requests:  # if one of several fails, the others are not waited for
                request.cancel()
            self._asking -= 1
            if not self._asking:
                self._place.close()
                self._place = None

    async def pause(self, questions: JsonObject) -> bytes:
        """Return the answer of a call that ends with questions."""
        return self.questions.pause(self, questions)

    def _question(self, key: str | None, method: str, params: JsonObject, decode: Callable[[object], Any]) -> Question:
        self._count += 1
        return Question(self, key or f"input-{self._count}", method, params, decode)


def check_capability(session: Session, method: str, params: JsonObject) -> None:
    """Raise `NotCapable` unless the client has declared everything that a question needs of it."""
    # A server must not ask for what its client has not declared (2026-07-28, basic/patterns/mrtr, "Server Requirements").
    revision, name = session.revision, method.partition("/")[0]
    declared = session.capabilities.get(name)
    exists, modes = revision.has(f"ask {method}"), []
    if params.get("mode") == "url":
        exists, modes = revision.has("ask elicitation url"), ["url"]
    if "tools" in params or "toolChoice" in params:
        exists, modes = revision.has("ask sampling tools"), ["tools"]
    # Before 2025-11-25 a client that samples could not declare that it adds context: every one could be asked to.
    if params.get("includeContext", "none") != "none" and revision.has("ask sampling context"):
        modes = [*modes, "context"]

    if not exists:
        reason = f"MCP {revision.name} does not have this request"
    elif not isinstance(declared, dict):
        reason = f"the client has not declared {name}"
    elif lacking := [mode for mode in modes if mode not in declared]:
        reason = f"the client has not declared {name}.{lacking[0]}"
    elif name == "elicitation" and not modes and declared and "form" not in declared:  # `elicitation: {}` means forms
        reason = "the client has not declared elicitation.form"
    else:
        return
    with_ = f" with {' and '.join(modes)}" if modes else ""
    needed: JsonObject = {name: {mode: {} for mode in modes}}
    raise NotCapable(f"the call sends {method}{with_} to its client, but {reason}", requiredCapabilities=needed)


def check_answer(question: JsonObject, answer: object) -> None:
    """Raise `BadInput` unless an answer fits the question, as it was sent."""
    if question["method"] == "elicitation/create":
        schema = question["params"].get("requestedSchema")
        _elicited(answer, None if schema is None else form_of(schema))
    elif question["method"] == "roots/list":
        _as(answer, Roots)
    else:
        _sampled(answer)


def _as(answer: object, wanted: type[T]) -> T:
    try:
        return msgspec.convert(answer, wanted)
    except msgspec.ValidationError as error:
        raise BadInput(explain(error, "the client's answer")) from None


def _sampled(answer: object) -> Sampled:
    told = _as(answer, Sampled)
    for each in told.content if isinstance(told.content, list) else [told.content]:
        if not isinstance(each, dict) or not isinstance(each.get("text", ""), str):
            raise BadInput("the client's answer.content: expected an object or a list of objects, with a str as each text")
    return told


def _elicited(answer: object, form: RequestedForm | None) -> Elicited:
    told = _as(answer, Elicited)
    if told.action != "accept":
        return Elicited(told.action)
    return Elicited("accept", {} if form is None else form.read(told.content))
