"""The client of a call: its session, and the notifications and questions that it gets.

A `Session` is the negotiated state of a client: of a connection or a session token in the revisions
with a handshake, of a single request where every request describes itself. A `Peer` is one request
and the client at its other end; the handler meets it as `ctx.progress`, `ctx.log`, `ctx.elicit`,
`ctx.sample` and `ctx.roots`.

A question has one form for the handler and two on the wire. With a handshake it is a request to the
client, and the handler waits, outside of the calls in flight (`Questions.place`). At 2026-07-28 a
server sends no requests: a question that is already answered returns the answer, any other raises
`InputRequired`. The call ends with `input_required`, the client calls again with the answers, and
the handler starts from the top (`Questions.resume`, `pause`):

1. Between two rounds the client keeps a sealed string, the state. The server keeps nothing: any
   worker takes the next round.
2. The next round is the same call with the answers and the state. The state holds the answers of
   all earlier rounds and the idempotency key of the first: a round that omits the key is still the
   same command.
3. A state belongs to one caller, one method and one set of arguments, and is good for
   `STATE_LIFETIME` seconds.
4. A state of a command leads to one outcome, however often it is sent. From the second round on the
   command has a record in the ledger: under its key, or, if it came without one, under a key that
   its first question made and the state carries. So the ledger answers a state that is sent again
   with its recorded outcome. A state does not outlive the record.
5. A command takes answers only to the questions that its state asked. A call that only reads has no
   effect to protect: it ignores answers that it did not ask for, as the specification recommends.
"""

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.aio import Signal, wake
from wirecall.errors import BadInput, Busy, Gone, NotCapable, RpcError, UsageError, rebuilt
from wirecall.limits import Limits
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
from wirecall.protocol.messages import ErrorObject, JsonObject, decode_any, decode_value, encode
from wirecall.protocol.params import explain
from wirecall.protocol.receipt import Receipt
from wirecall.protocol.sender import Sender
from wirecall.server.call import Call, ClientInfo, InputRequired
from wirecall.server.identity import Identity
from wirecall.server.method import Method
from wirecall.server.policy import fingerprint

if TYPE_CHECKING:
    from wirecall.mcp.server.sessions import Sealer
    from wirecall.server.dispatch import Dispatcher

T = TypeVar("T")

# When to try again while a person answers.
RETRY_AFTER_MS = 1000
# Seconds; a person may take this long to answer a question.
STATE_LIFETIME = 3600.0
# Characters of a client's name or version that are kept.
LONGEST_NAME = 100

# The ids of our questions differ in every process, since an answer may reach another process.
_PREFIX = os.urandom(4).hex()
_numbers = itertools.count(1)


class Outlet(Protocol):
    """How a transport sends messages before the answer."""

    # Set when the server is about to stop.
    stopping: Signal
    # The ids of requests whose answers come from the ledger.
    replayed: list[Id]
    # Other calls use the same connection for their messages.
    is_shared: bool
    # The answer has become a stream of messages.
    is_stream: bool

    async def send(self, message: bytes) -> None:
        """Send one message to the client, as part of the response to its message."""
        ...

    async def hang_up(self, retry: float) -> None:
        """End the connection, if the client can open it again."""
        ...

    async def until_left(self, patience: float) -> None:
        """Return when the client has had no connection for `patience` seconds."""
        ...


class AnswerStream(Protocol):
    """Sends the answers to an array one by one."""

    async def send(self, message: bytes, receipt: Receipt | None = None) -> None:
        """Send one answer, whose delivery `receipt` is."""
        ...


async def sent(sending: Awaitable[None]) -> bool:
    """Await an outlet's work for a running call; False if it failed.

    A fault of the transport does not reach the handler: the handler may have made its effect
    already, and has to finish so that the outcome is recorded.
    """
    try:
        await sending
    except Gone:
        return False
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return False  # the transport has cancelled its own future; the call continues
    except Exception as error:
        logger.warning("sending a message before an answer failed: %r", error)
        return False
    return True


class Session(Struct, eq=False):
    """The negotiated state of a client: its revision, its capabilities and its calls."""

    revision: Revision
    capabilities: JsonObject = {}
    # The least log level that the client wants to see; None if it has set none.
    level: str | None = None
    # The calls that the client may cancel.
    calls: dict[Id, asyncio.Task[object]] = {}
    # The URIs of the resources that it subscribed to.
    subscriptions: set[str] = set()
    # The caller of a session that is kept in this process: subscriptions count as the caller's.
    caller: str | None = None
    # The number of calls that wait for answers of the client.
    waiting: int = 0
    # The name and version of the client, from `initialize`.
    client: dict[str, str] | None = None
    # The random part of the token of a session over HTTP. Alone it gives no access.
    id: str | None = None
    # Questions that it has not answered yet. An error is a value of the future and not its
    # exception: asyncio reports an exception that is not retrieved, and a call that is cancelled at
    # the same moment does not retrieve it.
    # Questions that are not of a call have no peer.
    asked: "dict[Id, tuple[Peer | None, asyncio.Future[Raw | RpcError]]]" = {}

    @property
    def extensions(self) -> dict[str, JsonObject]:
        """The extensions that the client declares.

        It declares them in its session or, at 2026-07-28, in each request.
        """
        return declared_extensions(self.capabilities, self.revision)

    async def request(self, peer: "Peer", method: str, params: JsonObject) -> Raw:
        """Send a request to the client, and return its result.

        The request goes through the outlet of one of the client's calls.
        """
        id = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        loop = asyncio.get_running_loop()
        limits = peer.questions.limits
        answer: asyncio.Future[Raw | RpcError] = loop.create_future()
        self.asked[id] = peer, answer
        left = loop.create_task(peer.outlet.until_left(limits.away_time))
        try:
            message = encode({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
            if len(message) > limits.bytes_out:
                why = (
                    f"{method} of {len(message)} bytes is longer than "
                    f"Limits.bytes_out, {limits.bytes_out}"
                )
                raise UsageError("The handler asked its client.", why, "ask a shorter question")
            if not await sent(peer.outlet.send(message)):
                raise NotCapable("the question could not be sent to the client", ran="unknown")
            coming: list[asyncio.Future[Raw | RpcError] | asyncio.Task[None]] = [answer, left]
            await asyncio.wait(
                coming, timeout=limits.answer_time, return_when=asyncio.FIRST_COMPLETED
            )
            if answer.done():
                return _result_of(answer.result(), method, params)
            why = f"has not answered within {limits.answer_time:g} s"
            if left.done():
                why = "has left without an answer"
            raise NotCapable(f"the client {why}", ran="unknown")
        finally:
            del self.asked[id]
            left.cancel()

    def abandon(self, peer: "Peer | None" = None) -> None:
        """Stop waiting for answers that will not come.

        They are those of one call, or of all calls if the client has left.
        """
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
            reported = msgspec.json.decode(error, type=ErrorObject)
        except msgspec.ValidationError:
            answer.set_result(
                BadInput("the client's answer: error: expected an object with code and message")
            )
            return True
        data = None if reported.data is UNSET else reported.data
        answer.set_result(rebuilt(RpcError, reported.code, reported.message, data))
        return True


def _result_of(answer: Raw | RpcError, method: str, params: JsonObject) -> Raw:
    """Return the result in the answer to a question; raise its error."""
    if not isinstance(answer, RpcError):
        return answer
    if answer.is_remote:
        raise _about(answer, method, params)
    raise answer


def _about(error: RpcError, method: str, params: JsonObject) -> RpcError:
    """Return a client's error answer to a question, with the question in its message.

    A client that declares elicitation without a handler answers "Method not found", which is not
    about the tool.
    """
    question = method
    if isinstance(params.get("message"), str):
        question = f"{params['message'][:100]!r}, {method}"
    message = f"{error.message} (the client's answer to {question})"
    return rebuilt(RpcError, error.code, message, error.data)


def described_session(
    params: Params, calls: "dict[Id, asyncio.Task[object]] | None" = None
) -> Session:
    """Return the session of a request that describes itself (2026-07-28).

    It lives as long as the request.
    """
    meta = params.meta
    # `Server.described`.
    assert meta is not UNSET and meta.version is not UNSET and meta.capabilities is not UNSET
    level = None if meta.level is UNSET else meta.level
    return Session(
        REVISIONS[meta.version], meta.capabilities, level, {} if calls is None else calls
    )


def named_client(info: object) -> dict[str, str]:
    """Return the name and version in a client's description of itself, if they are strings."""
    if not isinstance(info, dict):
        return {}
    return {
        name: info[name][:LONGEST_NAME]
        for name in ("name", "version")
        if isinstance(info.get(name), str)
    }


class _State(Struct):
    """The state that a client keeps between two rounds."""

    # The digest of the method and the arguments of the call.
    digest: str
    # The idempotency key of the first round.
    key: str | None
    # The keys of the questions of this round.
    asked: list[str]
    # The answers of all earlier rounds, by the key of their question.
    answers: dict[str, JsonObject]
    # The keys of the commands that a batch tool has called so far, by the id of their entry; the
    # digests of filled arguments, by "ID/arguments".
    keys: dict[str, str] = {}


class Questions:
    """The questions of all calls: seals their states, and counts the calls that wait.

    A person may take an hour, so calls that wait do not count towards `Limits.in_flight`: a client
    that leaves many questions open would block all other callers. They have separate limits, which
    block only that client.
    """

    def __init__(
        self, sealer: "Sealer", limits: Limits, dispatcher: "Callable[[], Dispatcher]"
    ) -> None:
        self.limits = limits
        self._sealer = sealer
        self._dispatcher = dispatcher
        # How many calls of each caller wait.
        self._waiting: Counter[str] = Counter()

    @contextmanager
    def place(self, session: Session, caller: str, *, is_in_flight: bool = True) -> Iterator[None]:
        """Count a call as waiting, and not as in flight.

        Raises `Busy` if too many of its session or caller wait.
        """
        for limit, count in (
            ("waiting_per_session", session.waiting),
            ("waiting_per_caller", self._waiting[caller]),
        ):
            most = getattr(self.limits, limit)
            if count >= most:
                reason = (
                    f"{count} calls already wait for answers of this client: "
                    "answer or cancel one of them"
                )
                raise Busy(reason, ran="no", limit=limit, max=most, retry_after_ms=RETRY_AFTER_MS)
        session.waiting += 1
        self._waiting[caller] += 1
        try:
            with ExitStack() as aside:
                if is_in_flight:
                    aside.enter_context(self._dispatcher().set_aside(caller))
                yield
        finally:
            session.waiting -= 1
            self._waiting[caller] -= 1
            if not self._waiting[caller]:
                del self._waiting[caller]

    def resume(self, call: Call, peer: "Peer") -> None:
        """Begin a round of a call (2026-07-28).

        It gets the answers of this and earlier rounds, and its key.
        """
        params: Resumed = peer.params
        given = {} if params.responses is UNSET else params.responses
        # The entries of a batch may be commands.
        is_command = call.method.is_command or call.method.is_batch
        if params.state is not UNSET:
            # Step 1: the state is ours, was sealed for this caller, and belongs to this call. Any
            # client may have written it, and its integrity must be checked (basic/patterns/mrtr,
            # "Server Requirements").
            found = self._sealer.open("state", call.frame.sender.caller, params.state)
            if found is None:
                raise BadInput("requestState: it was not issued for this call, or has expired")
            state = msgspec.json.decode(found.value, type=_State)
            if state.digest != _digest(call.record, call.params):
                raise BadInput("requestState: it belongs to another call")
            if call.key not in (None, state.key):
                raise BadInput(
                    "requestState: the call began with another idempotency key, or without one"
                )
            # Step 2: a command takes answers only to the questions that the state asked. A call
            # that only reads ignores the others, as "Error Handling" there recommends.
            unasked = sorted(given.keys() - state.asked)
            if unasked and is_command:
                raise BadInput(
                    f"inputResponses: {unasked[0][:100]!r} was not asked; expected {', '.join(state.asked)}"
                )
            call.key = state.key
            peer.continues = params.state
            peer.answers = {**state.answers, **given}
            peer.keys = state.keys
        elif given:
            if is_command:
                raise BadInput(
                    "inputResponses: this call has not asked; send the requestState of the call that asked"
                )
            peer.answers = given

    def pause(self, peer: "Peer", questions: JsonObject) -> bytes:
        """Return the result of a round that asks."""
        assert peer.about is not None
        method, record, params, key = peer.about
        lifetime = STATE_LIFETIME
        if method.is_command:
            # A call with key="off" has no key so far. Its further rounds have one, so that one
            # state leads to one effect.
            key = key or os.urandom(16).hex()
            lifetime = min(lifetime, method.terms.retention)
        lifetime = min(lifetime, peer.lifetime)
        state = _State(_digest(record, params), key, list(questions), peer.answers, peer.keys)
        sealed = self._sealer.seal("state", peer.caller, state, lifetime)
        return encode(
            {"resultType": "input_required", "inputRequests": questions, "requestState": sealed}
        )


def _digest(record: str, params: Raw | UnsetType) -> str:
    return f"{record} {fingerprint(params).hex()}"


class Question(Struct, eq=False):
    """Something to ask the client; awaiting it returns the answer."""

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
            raise AttributeError(
                f"a question has no {name!r}, its answer may have: use `await ctx.elicit(...)`"
            )


class Linked(Struct):
    """A request in an array whose requests refer to each other."""

    # Its fingerprint, if it has references.
    digest: bytes | None = None
    # The full result of a tool, for references to it.
    result: bytes | None = None


class Peer(Struct, eq=False):
    """One request, and the client at its other end."""

    session: Session
    outlet: Outlet
    questions: Questions
    id: Id
    # The params of the request, as they came.
    raw: Raw | UnsetType
    # The same params, decoded.
    params: Any
    sender: Sender
    # The idempotency key in the HTTP header.
    key: str | None = None
    # The position of the request in an array.
    position: int | None = None
    # The answers of the client, by the key of their question.
    answers: dict[str, JsonObject] = {}
    # The state of the round before; None in the first round.
    continues: str | None = None
    # The handler has called ctx.commit_point().
    is_committed: bool = False
    # The part of the result's `_meta` that comes from the ledger.
    marks: JsonObject = {}
    # The call that a state is about: its method, record, params and key.
    about: tuple[Method, str, Raw | UnsetType, str | None] | None = None
    # Of a batch tool: the keys of the commands that it has called, and digests of arguments.
    keys: dict[str, str] = {}
    # Seconds for which a state is good. It must not outlive the records of a batch.
    lifetime: float = STATE_LIFETIME
    # Set in an array with references.
    linked: Linked | None = None
    # The last progress that was sent.
    _progress: float | None = None
    # How many questions the handler has asked.
    _count: int = 0
    # How many asyncio tasks of the call wait for answers.
    _asking: int = 0
    # The place of a call that waits.
    _place: ExitStack | None = None
    _closed: bool = False

    @property
    def caller(self) -> str:
        """The name of the caller."""
        return self.sender.caller

    @property
    def identity(self) -> Identity | None:
        """The verified identity of the caller, if a token named it."""
        return self.sender.identity

    def named(self, key: str) -> None:
        """Keep the key of a call that came without one, for the states of its further rounds."""
        if self.about is not None:
            self.about = *self.about[:3], key

    def close(self) -> None:
        """End the conversation with the client: the call is answered or cancelled.

        A question that still waits fails.
        """
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
        info = session.client or {}
        if session.revision.is_stateless:
            info = named_client(self.meta.get(f"{PREFIX}clientInfo"))
        return ClientInfo(info.get("name"), info.get("version"), session.extensions)

    @property
    def meta(self) -> JsonObject:
        params = {} if self.raw is UNSET else decode_any(self.raw)
        if not isinstance(params, dict):
            return {}
        meta = params.get("_meta")
        return meta if isinstance(meta, dict) else {}

    # --- notifications ----------------------------------------------------------------------------

    @property
    def wants_progress(self) -> bool:
        """Whether the client has asked for progress notifications."""
        return self.params.meta is not UNSET and self.params.meta.token is not UNSET

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Send a progress notification, if the client has asked for them.

        The number must be above the last one.
        """
        # Only with the client's token, and the number must increase (basic/utilities/progress,
        # "Progress Flow").
        token = UNSET if self.params.meta is UNSET else self.params.meta.token
        if token is UNSET or (self._progress is not None and progress <= self._progress):
            return
        self._progress = progress
        params: JsonObject = {"progressToken": token, "progress": progress}
        if total is not None:
            params["total"] = total
        if message is not None and self.session.revision.has("progress message"):
            params["message"] = message
        await self._notify("notifications/progress", params)

    def wants(self, level: str) -> bool:
        # Without a level, a client gets messages from `info` up, and none at 2026-07-28
        # (server/utilities, "Logging").
        least = self.session.level
        if not least:
            if self.session.revision.is_stateless:
                return False
            least = "info"
        return not self._closed and LEVELS.index(level) >= LEVELS.index(least)

    async def log(self, level: str, data: object, logger: str | None) -> None:
        params: JsonObject = {"level": level}
        if logger:
            params["logger"] = logger
        params["data"] = data
        await self._notify("notifications/message", params)

    async def _notify(self, method: str, params: JsonObject) -> None:
        """Send a notification, unless the call is answered."""
        if self._closed:
            return
        message = encode({"jsonrpc": "2.0", "method": method, "params": params})
        most = self.questions.limits.bytes_out
        if len(message) > most:
            # The handler continues: its outcome matters more than its notifications.
            logger.warning(
                "%s of %d bytes is not sent: Limits.bytes_out is %d", method, len(message), most
            )
            return
        await sent(self.outlet.send(message))

    async def hang_up(self, retry: float) -> None:
        if not self._closed:
            await sent(self.outlet.hang_up(retry))

    async def hand_over(self) -> None:
        """Do nothing: the call cannot become a task."""

    # --- questions --------------------------------------------------------------------------------

    def elicit(self, message: str, schema: Any, key: str | None) -> Question:
        form = form_of(schema)
        revision = self.session.revision
        params = {"message": message, "requestedSchema": form.schema(revision)}
        if revision.has("ask elicitation url"):
            params = {"mode": "form", **params}
        return self._question(
            key, "elicitation/create", params, lambda answer: _elicited(answer, form)
        )

    def elicit_url(self, message: str, url: str, key: str | None) -> Question:
        # For secrets: a form must not ask for one (client/elicitation, "User Interaction Model").
        params = {"mode": "url", "message": message, "url": url}
        if not self.session.revision.is_stateless:
            params["elicitationId"] = os.urandom(12).hex()
        return self._question(
            key, "elicitation/create", params, lambda answer: _elicited(answer, None)
        )

    def sample(
        self,
        messages: str | Sequence[Message],
        max_tokens: int,
        system: str | None,
        key: str | None,
        more: JsonObject,
    ) -> Question:
        several = [Message("user", messages)] if isinstance(messages, str) else messages
        known = self.session.revision.known
        wire = [
            {"role": message.role, "content": known(block(message.content))} for message in several
        ]
        params = {"messages": wire, "maxTokens": max_tokens, **more}
        if system is not None:
            params["systemPrompt"] = system
        return self._question(key, "sampling/createMessage", params, _sampled)

    def roots(self, key: str | None) -> Question:
        return self._question(key, "roots/list", {}, lambda answer: _as(answer, Roots).roots)

    def check_question(self, question: Question) -> None:
        """Do nothing: a call that is not a task may ask anything."""

    async def ask(self, questions: Sequence[Any]) -> list[Any]:
        """Return the answers to some questions.

        Raises `InputRequired` if asking them takes another round.
        """
        if self._closed:
            raise NotCapable("the call has ended: ask the client before the handler returns")
        for question in questions:
            check_capability(self.session, question.method, question.params)
        if self.session.revision.is_stateless:
            missing = [question for question in questions if question.key not in self.answers]
            if missing:
                await self._ask_in_next_round(missing)
            return [question.decode(self.answers[question.key]) for question in questions]
        # A call may ask from several of its tasks at once. It waits once, until the last of them
        # has its answer.
        if self._place is None:
            place = ExitStack()
            # Raises if too many wait.
            place.enter_context(self.questions.place(self.session, self.caller))
            self._place = place
        self._asking += 1
        requests = [asyncio.ensure_future(self._ask_now(question)) for question in questions]
        try:
            return list(await asyncio.gather(*requests))
        finally:
            # If one of several fails, the call does not wait for the others.
            for request in requests:
                request.cancel()
            self._asking -= 1
            if not self._asking:
                self._place.close()
                self._place = None

    async def _ask_in_next_round(self, questions: Sequence[Question]) -> NoReturn:
        """End this round with questions (2026-07-28)."""
        if self.about is None:
            why = "at 2026-07-28 only tools, prompts and resources can ask (basic/patterns/mrtr)"
            raise UsageError("The handler asked its client.", why, "ask in a tool")
        if self.is_committed:
            why = "the client's answer starts it from the top, and its effect would happen again"
            raise UsageError(
                "The handler asked its client after its commit point.", why, "ask before it"
            )
        wire = {
            question.key: {"method": question.method, "params": question.params}
            for question in questions
        }
        raise InputRequired(await self.pause(wire))

    async def _ask_now(self, question: Question) -> Any:
        """Return the answer to a question that is a request to the client."""
        answer = await self.session.request(self, question.method, question.params)
        try:
            return question.decode(decode_value(answer))
        except msgspec.ValidationError as error:  # a number that no float can hold
            raise BadInput(explain(error, "the client's answer")) from None

    async def pause(self, questions: JsonObject) -> bytes:
        """Return the answer of a call that ends with questions."""
        return self.questions.pause(self, questions)

    def _question(
        self, key: str | None, method: str, params: JsonObject, decode: Callable[[object], Any]
    ) -> Question:
        self._count += 1
        return Question(self, key or f"input-{self._count}", method, params, decode)


def undeclared(extension: str) -> NotCapable:
    """Return the refusal of a request that needs an extension of its client (SEP-2133)."""
    needed: JsonObject = {"extensions": {extension: {}}}
    return NotCapable(f"the client has not declared {extension}", requiredCapabilities=needed)


def check_capability(session: Session, method: str, params: JsonObject) -> None:
    """Raise `NotCapable` unless the client has declared everything that a question needs of it."""
    # A server must not ask for what its client has not declared (2026-07-28, basic/patterns/mrtr,
    # "Server Requirements").
    revision = session.revision
    name = method.partition("/")[0]
    declared = session.capabilities.get(name)
    exists = revision.has(f"ask {method}")
    modes = []
    if params.get("mode") == "url":
        exists = revision.has("ask elicitation url")
        modes = ["url"]
    if "tools" in params or "toolChoice" in params:
        exists = revision.has("ask sampling tools")
        modes = ["tools"]
    # Before 2025-11-25 a client that samples could not declare that it adds context: every one
    # could be asked to.
    if params.get("includeContext", "none") != "none" and revision.has("ask sampling context"):
        modes = [*modes, "context"]

    if not exists:
        reason = f"MCP {revision.name} does not have this request"
    elif not isinstance(declared, dict):
        reason = f"the client has not declared {name}"
    elif lacking := [mode for mode in modes if mode not in declared]:
        reason = f"the client has not declared {name}.{lacking[0]}"
    # `elicitation: {}` means forms.
    elif name == "elicitation" and not modes and declared and "form" not in declared:
        reason = "the client has not declared elicitation.form"
    else:
        return
    request = method
    if modes:
        request = f"{method} with {' and '.join(modes)}"
    needed: JsonObject = {name: {mode: {} for mode in modes}}
    raise NotCapable(
        f"the call sends {request} to its client, but {reason}", requiredCapabilities=needed
    )


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
    sampled = _as(answer, Sampled)
    blocks = sampled.content if isinstance(sampled.content, list) else [sampled.content]
    for each in blocks:
        if not isinstance(each, dict) or not isinstance(each.get("text", ""), str):
            raise BadInput(
                "the client's answer.content: expected an object or a list of objects, "
                "with a str as each text"
            )
    return sampled


def _elicited(answer: object, form: RequestedForm | None) -> Elicited:
    elicited = _as(answer, Elicited)
    if elicited.action != "accept":
        return Elicited(elicited.action)
    if form is None:
        return Elicited("accept", {})
    return Elicited("accept", form.read(elicited.content))
