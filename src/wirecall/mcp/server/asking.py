"""The other side: what is known of a client, what it is told and asked while a call runs.

A `Session` is the negotiated state of a client: of a connection or a session token in the revisions with a handshake, of a
single request where every request describes itself. A `Peer` is the client's side of one request; the handler meets it as
`ctx.progress`, `ctx.log`, `ctx.elicit`, `ctx.sample` and `ctx.roots`.

A question has one form for the handler and two on the wire. With a handshake it is a request to the client, and the handler
waits. Where every request describes itself there are no requests to clients: the call ends with `input_required`, and the
client calls again with the answers. So a question whose answer is at hand gives it; any other raises `InputRequired`, and
the handler starts again from the top when the answers come. Answers of earlier rounds travel in the sealed state.
"""

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.commands.outcome import RETRY_AFTER_MS
from wirecall.errors import BadInput, Busy, Gone, NotCapable, RpcError, UsageError
from wirecall.logs import logger
from wirecall.mcp.revisions import Revision
from wirecall.mcp.server.forms import Form, form_of
from wirecall.mcp.types import LEVELS, Elicited, Message, ProgressToken, Roots, Sampled, block
from wirecall.protocol.limits import Limits
from wirecall.protocol.messages import decode_any, encode
from wirecall.server.context import InputRequired
from wirecall.server.dispatch import Dispatcher

Id = int | str

# Ids of our questions, different in every process: an answer may reach another one.
_PREFIX = os.urandom(4).hex()
_numbers = itertools.count(1)


class Outlet(Protocol):
    """Where a transport lets messages out that come before the answer."""

    stopping: asyncio.Event  # set when the server is about to stop
    replayed: list[Id]  # whose answers come from the ledger
    is_shared: bool  # messages of other calls go the same way

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

    A handler meets its transport here and nowhere else. A fault of the transport does not reach the handler: the handler may
    have made its effect already, and has to finish so that the outcome is recorded.
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
        logger.warning("a message before an answer could not be sent: %r", error)
        return False
    return True


class Session:
    """A client, as far as it has told about itself."""

    def __init__(
        self,
        revision: Revision,
        capabilities: dict[str, Any] | None = None,
        *,
        level: str | None = None,
        calls: "dict[Id, asyncio.Task[Any]] | None" = None,
    ) -> None:
        self.revision = revision
        self.capabilities = capabilities or {}
        self.level = level  # the least log level it wants to see; None: none was set
        self.calls = {} if calls is None else calls  # what it may cancel
        self.subscriptions: set[str] = set()  # URIs of resources
        self.waiting = 0  # calls that wait for its answers
        self._asked: dict[Id, tuple[Peer, asyncio.Future[Raw]]] = {}  # what it has not answered yet

    def wants(self, level: str) -> bool:
        """With a handshake the server decides until a level is set; without one, no level means no messages."""
        if self.level is None:
            return not self.revision.is_stateless and LEVELS.index(level) >= LEVELS.index("info")
        return LEVELS.index(level) >= LEVELS.index(self.level)

    async def request(self, call: "Peer", method: str, params: dict[str, Any]) -> Raw:
        """Send a request to the client, on the way of one of its calls, and return the client's result."""
        id = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
        loop, limits = asyncio.get_running_loop(), call.waiting.limits
        answer: asyncio.Future[Raw] = loop.create_future()
        self._asked[id] = call, answer
        left = loop.create_task(call.outlet.until_left(limits.away_time))
        try:
            message = encode({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
            if not await sent(call.outlet.send(message)):
                raise NotCapable("the question could not be sent to the client", ran="unknown")
            coming: list[asyncio.Future[Any]] = [answer, left]
            await asyncio.wait(coming, timeout=limits.answer_time, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            why = "has left without an answer" if left.done() else f"has not answered within {limits.answer_time:g} s"
            raise NotCapable(f"the client {why}", ran="unknown")
        finally:
            left.cancel()
            del self._asked[id]

    def abandon(self, call: "Peer | None" = None) -> None:
        """End the wait for answers that will not come: those of one call, or all of them if the client has left."""
        for asking, answer in self._asked.values():
            if call in (None, asking) and not answer.done():
                answer.set_exception(NotCapable("the client has left without an answer", ran="unknown"))

    def answered(self, id: Any, result: Raw | UnsetType, error: Raw | UnsetType) -> bool:
        """Take an answer of the client; False if there is no such question."""
        _, answer = self._asked.get(id, (None, None))
        if answer is None or answer.done():
            return False
        if error is not UNSET:
            answer.set_exception(_refusal(error))
        else:
            answer.set_result(Raw(b"{}") if result is UNSET else result)
        return True


def _refusal(error: Raw) -> RpcError:
    try:
        told = msgspec.json.decode(error, type=_Error)
    except msgspec.ValidationError:
        return BadInput("the client answered with an error that is none")
    return RpcError(told.code, told.message, None if told.data is UNSET else told.data)


class _Error(Struct):
    code: int
    message: str
    data: Any = UNSET


class Waiting:
    """The calls that wait for an answer of their client.

    A person may take an hour, so these calls take no place of `Limits.in_flight`: a client that leaves many questions open
    would stop all other callers. They have limits of their own, which stop that client and no other.
    """

    def __init__(self, limits: Limits, dispatcher: Callable[[], Dispatcher]) -> None:
        self.limits = limits
        self._dispatcher = dispatcher
        self._of_caller: Counter[str] = Counter()

    @contextmanager
    def place(self, session: Session, caller: str) -> Iterator[None]:
        """Count a call as waiting, and not as in flight. Raises `Busy` if too many of its session or caller wait."""
        for limit, count in (("waiting_per_session", session.waiting), ("waiting_per_caller", self._of_caller[caller])):
            most = getattr(self.limits, limit)
            if count >= most:
                reason = f"{count} calls wait for answers of this client already: answer or cancel one of them"
                raise Busy(reason, ran="no", limit=limit, max=most, retry_after_ms=RETRY_AFTER_MS)
        session.waiting += 1
        self._of_caller[caller] += 1
        try:
            with self._dispatcher().set_aside():
                yield
        finally:
            session.waiting -= 1
            self._of_caller[caller] -= 1
            if not self._of_caller[caller]:
                del self._of_caller[caller]


class Question:
    """Something to ask the client; awaited, it is the answer."""

    __slots__ = ("call", "decode", "key", "method", "params")

    def __init__(self, call: "Peer", key: str, method: str, params: dict[str, Any], decode: Callable[[Any], Any]) -> None:
        self.call = call
        self.key = key
        self.method = method
        self.params = params
        self.decode = decode

    def __await__(self) -> Generator[Any, Any, Any]:
        answers = yield from self.call.ask([self]).__await__()
        return answers[0]


class Peer:
    """The client's side of one request."""

    def __init__(
        self,
        session: Session,
        outlet: Outlet,
        caller: str,
        waiting: Waiting,
        token: ProgressToken | UnsetType,
        params: Raw | UnsetType,
    ) -> None:
        self.outlet = outlet
        self.waiting = waiting
        self._session = session
        self._caller = caller
        self._token = token
        self._params = params
        self._progress: float | None = None
        self._count = 0
        self.answers: dict[str, dict[str, Any]] = {}  # by the key of their question
        self.continues = False  # this is a further round of a call
        self._closed = False
        self.pause: Callable[[dict[str, Any], dict[str, Any]], bytes] | None = None  # what a call that asks is answered with

    def close(self) -> None:
        """End the conversation with the client: the call is answered or cancelled. A handler that still waits is told."""
        self._closed = True
        self._session.abandon(self)

    # --- what it knows -----------------------------------------------------------------------------------------------

    @property
    def revision(self) -> str:
        return self._session.revision.name

    @property
    def capabilities(self) -> dict[str, Any]:
        return self._session.capabilities

    @property
    def meta(self) -> dict[str, Any]:
        params = {} if self._params is UNSET else decode_any(self._params)
        meta = params.get("_meta") if isinstance(params, dict) else None
        return meta if isinstance(meta, dict) else {}

    # --- what it is told ---------------------------------------------------------------------------------------------

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        """What is not above the last number stays here: MCP allows only growth, and no call should fail for it."""
        if self._token is UNSET or (self._progress is not None and progress <= self._progress):
            return
        self._progress = progress
        told: dict[str, Any] = {"progressToken": self._token, "progress": progress}
        if total is not None:
            told["total"] = total
        if message is not None and self._session.revision.has("progress message"):
            told["message"] = message
        await self._tell("notifications/progress", told)

    async def log(self, level: str, data: Any, logger: str | None) -> None:
        if level not in LEVELS:
            raise UsageError(f"{level!r} is not a log level.", "", f"use one of {', '.join(LEVELS)}")
        if self._session.wants(level):
            await self._tell(
                "notifications/message", {"level": level, **({"logger": logger} if logger else {}), "data": data}
            )

    async def _tell(self, method: str, params: dict[str, Any]) -> None:
        """Send a notification, unless the call is answered."""
        if not self._closed and self._session.revision.has(f"tell {method}"):
            await sent(self.outlet.send(encode({"jsonrpc": "2.0", "method": method, "params": params})))

    async def hang_up(self, retry: float) -> None:
        if not self._closed:
            await sent(self.outlet.hang_up(retry))

    # --- what it is asked --------------------------------------------------------------------------------------------

    def elicit(self, message: str, schema: Any, key: str | None) -> Question:
        form, revision = form_of(schema), self._session.revision
        params = {"message": message, "requestedSchema": form.schema(revision)}
        if revision.has("ask elicitation url"):
            params = {"mode": "form", **params}
        return self._question(key, "elicitation/create", params, lambda answer: _elicited(answer, form))

    def elicit_url(self, message: str, url: str, key: str | None) -> Question:
        params = {"mode": "url", "message": message, "url": url}
        if not self._session.revision.is_stateless:
            params["elicitationId"] = os.urandom(12).hex()
        return self._question(key, "elicitation/create", params, lambda answer: _elicited(answer, None))

    def sample(
        self, messages: str | Sequence[Message], max_tokens: int, system: str | None, key: str | None, more: dict[str, Any]
    ) -> Question:
        several = [Message("user", messages)] if isinstance(messages, str) else messages
        known = self._session.revision.known
        wire = [{"role": message.role, "content": known(block(message.content))} for message in several]
        params = {"messages": wire, "maxTokens": max_tokens, **more}
        if system is not None:
            params["systemPrompt"] = system
        return self._question(key, "sampling/createMessage", params, lambda answer: _as(answer, Sampled))

    def roots(self, key: str | None) -> Question:
        return self._question(key, "roots/list", {}, lambda answer: _as(answer, Roots).roots)

    async def ask(self, questions: Sequence[Any]) -> list[Any]:
        if self._closed:
            raise NotCapable("the call is over: its client cannot be asked any more")
        for question in questions:
            check_capability(self._session, question.method, question.params)
        if self._session.revision.is_stateless:
            return self._at_hand(questions)
        with self.waiting.place(self._session, self._caller):
            asked = [asyncio.ensure_future(self._request(question)) for question in questions]
            try:
                return list(await asyncio.gather(*asked))
            finally:
                for one in asked:  # if one of several fails, the others are not waited for
                    one.cancel()

    def _question(self, key: str | None, method: str, params: dict[str, Any], decode: Callable[[Any], Any]) -> Question:
        self._count += 1
        return Question(self, key or f"input-{self._count}", method, params, decode)

    async def _request(self, question: Question) -> Any:
        raw = await self._session.request(self, question.method, question.params)
        return question.decode(decode_any(raw))

    def _at_hand(self, questions: Sequence[Question]) -> list[Any]:
        missing = [question for question in questions if question.key not in self.answers]
        if missing:
            assert self.pause is not None
            wire = {question.key: {"method": question.method, "params": question.params} for question in missing}
            raise InputRequired(self.pause(self.answers, wire))
        return [question.decode(self.answers[question.key]) for question in questions]


def check_capability(session: Session, method: str, params: dict[str, Any]) -> None:
    """Raise `NotCapable` unless the client has declared everything that a question needs of it."""
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
        reason = f"MCP {revision.name} does not have that"
    elif not isinstance(declared, dict):
        reason = f"the client has not declared {name}"
    elif lacking := [mode for mode in modes if mode not in declared]:
        reason = f"the client has not declared {name}.{lacking[0]}"
    elif name == "elicitation" and not modes and declared and "form" not in declared:  # `elicitation: {}` means forms
        reason = "the client has not declared elicitation.form"
    else:
        return
    with_ = f" with {' and '.join(modes)}" if modes else ""
    needed: dict[str, Any] = {name: {mode: {} for mode in modes}}
    raise NotCapable(f"the call sends {method}{with_} to its client, but {reason}", requiredCapabilities=needed)


def _as(answer: Any, wanted: Any) -> Any:
    try:
        return msgspec.convert(answer, wanted)
    except msgspec.ValidationError as error:
        raise BadInput(f"the client's answer: {str(error).lower()}") from None


def _elicited(answer: Any, form: Form | None) -> Elicited:
    told = _as(answer, Elicited)
    if told.action != "accept":
        return Elicited(told.action)
    return Elicited("accept", {} if form is None else form.read(told.content))
