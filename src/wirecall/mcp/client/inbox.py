"""A server's own messages: changes, progress, log messages, and questions to the host.

    sample(Sampling) -> str or Sampled          sampling/createMessage
    elicit(Form) -> dict, Elicited or None      elicitation/create with a form; None declines
    elicit_url(Visit) -> bool or Elicited       elicitation/create with an address to go to
    roots, or roots() -> places                 roots/list

A handler is a function or a coroutine function. A question has two forms on the wire. With a
handshake it is a request from the server; at 2026-07-28 it is part of an incomplete result, and the
client repeats the call with the answers. `Host.answer` serves both. The client does not declare a
capability for a question without a handler, and refuses such a question if a server still asks it.

    async with client.listen(tools=True, uris=["file:///notes"]) as changes:
        async for change in changes: ...

With a handshake the server reports changes of its lists unasked, and changes of subscribed
resources. At 2026-07-28 it reports them to clients that listen (`subscriptions/listen`), on a
stream that may break: then the client opens another one and reports everything it listens to as
changed, because anything may have changed in between. A pending change is not reported twice.
"""

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.aio import cancel_all, settled
from wirecall.client.delivery import asked_pause
from wirecall.errors import (
    CallFailed,
    ConnectionLost,
    EncodeError,
    InvalidParams,
    MethodNotFound,
    RpcError,
    TimedOut,
    WirecallError,
)
from wirecall.logs import logger
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import PREFIX, Cancelled, Elicited, ProgressToken, Root, Sampled
from wirecall.protocol.messages import UNREADABLE, Arrived, ErrorObject, JsonObject, encode

if TYPE_CHECKING:
    from wirecall.mcp.client.conversation import Conversation

ROUNDS = 16  # max rounds of questions and answers in one call
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NOTHING = Raw(b"{}")

Kind: TypeAlias = Literal["tools", "prompts", "resources", "updated"]
Progress: TypeAlias = Callable[[float, float | None, str | None], object]

QUESTIONS = 100  # max questions of a server that wait for an answer
TURNS = 1000  # max messages that wait for the user's coroutine functions
# Seconds before the client reopens a broken stream.
FIRST = 0.5
FURTHEST = 30.0

# The notification of each kind.
KINDS: dict[str, Kind] = {
    "notifications/tools/list_changed": "tools",
    "notifications/prompts/list_changed": "prompts",
    "notifications/resources/list_changed": "resources",
    "notifications/resources/updated": "updated",
}


# --- questions ------------------------------------------------------------------------------------


class InputRequest(Struct):
    """A server's request in a result, or in the state of a task: it has no id."""

    method: str
    params: Raw = Raw(b"{}")


class Form(Struct, frozen=True, rename="camel"):
    """A server asks a person to fill in a form: a flat object of plain values."""

    message: str = ""
    requested_schema: JsonObject = {}


class Visit(Struct, frozen=True, rename="camel"):
    """A server asks a person to go to an address.

    Show it to them in full before anything opens it.
    """

    message: str = ""
    url: str = ""
    elicitation_id: str | None = None

    @property
    def host(self) -> str:
        """The host in the address, or "" if it has none: a user checks it before they agree."""
        try:
            return urlsplit(self.url).hostname or ""
        except ValueError:
            return ""


class Sampling(Struct, frozen=True, rename="camel"):
    """A server asks the client's model."""

    messages: list[JsonObject] = []
    max_tokens: int | None = None
    system_prompt: str | None = None
    temperature: float | None = None
    stop_sequences: list[str] = []
    model_preferences: JsonObject | None = None
    include_context: str | None = None
    tools: list[JsonObject] = []
    tool_choice: JsonObject | None = None
    metadata: JsonObject | None = None

    @property
    def text(self) -> str:
        """All the text in the messages."""
        found: list[str] = []
        for message in self.messages:
            blocks = message.get("content")
            if not isinstance(blocks, list):
                blocks = [blocks]
            found += [
                block["text"]
                for block in blocks
                if isinstance(block, dict) and isinstance(block.get("text"), str)
            ]
        return "\n".join(found)


Sample: TypeAlias = Callable[[Sampling], str | Sampled | Awaitable[str | Sampled]]
Elicit: TypeAlias = Callable[
    [Form], JsonObject | Elicited | Awaitable[JsonObject | Elicited | None] | None
]
ElicitUrl: TypeAlias = Callable[[Visit], bool | Elicited | Awaitable[bool | Elicited]]
Roots: TypeAlias = Iterable[object] | Callable[[], Iterable[object] | Awaitable[Iterable[object]]]


class Host(Struct, frozen=True, kw_only=True):
    """The handlers of one client, and its callbacks."""

    sample: Sample | None = None
    elicit: Elicit | None = None
    elicit_url: ElicitUrl | None = None
    roots: Roots | None = None
    on_log: "Callable[[Log], object] | None" = None
    on_change: "Callable[[Change], object] | None" = None
    # Settings by id.
    extensions: Mapping[str, JsonObject] = {}

    def capabilities(self, revision: Revision) -> JsonObject:
        """Return the capabilities to declare: those with a handler, and extensions."""
        declared: JsonObject = {}
        if self.sample and revision.has("ask sampling/createMessage"):
            declared["sampling"] = {}
        if revision.has("ask elicitation url"):
            handlers = {"form": self.elicit, "url": self.elicit_url}
            modes: JsonObject = {mode: {} for mode, handler in handlers.items() if handler}
            if modes and revision.has("ask elicitation/create"):
                declared["elicitation"] = modes
        elif self.elicit and revision.has("ask elicitation/create"):
            declared["elicitation"] = {}
        if self.roots is not None and revision.has("ask roots/list"):
            declared["roots"] = {}
        if self.extensions and revision.has("capability extensions"):
            declared["extensions"] = self.extensions
        return declared

    async def answer(self, method: str, params: Raw | UnsetType) -> JsonObject:
        """Return the answer to a question, or raise the refusal."""
        given = _NOTHING if params is UNSET else params
        try:
            if method == "sampling/createMessage":
                return await self._sample(given)
            if method == "elicitation/create":
                return await self._elicit(given)
            if method == "roots/list":
                return {"roots": await self._list_roots()}
            raise MethodNotFound(f"this client does not answer {method[:100]!r}")
        except msgspec.ValidationError as error:
            raise InvalidParams(f"params: {str(error).lower()}") from None
        except RpcError:
            raise
        except Exception as error:
            logger.exception("the handler of %s failed", method)
            raise RpcError(-32603, "Internal error") from error

    async def _list_roots(self) -> list[JsonObject]:
        if self.roots is None:
            raise MethodNotFound("this client has no roots")
        given: object = self.roots
        if callable(self.roots):
            given = self.roots()
        places: Any = await settled(given)
        listed: list[JsonObject] = []
        for place in places:
            root = place
            if not isinstance(root, Root):
                root = Root(str(place))
            entry: JsonObject = {"uri": root.uri}
            if root.name:
                entry["name"] = root.name
            listed.append(entry)
        return listed

    async def _sample(self, params: Raw) -> JsonObject:
        if self.sample is None:
            raise MethodNotFound("this client has no model to ask")
        said = await settled(self.sample(msgspec.json.decode(params, type=Sampling)))
        if isinstance(said, str):
            said = Sampled("assistant", {"type": "text", "text": said}, "unknown")
        if not isinstance(said, Sampled):
            raise TypeError(
                f"a handler of sampling must return a str or a Sampled, got {type(said).__name__}"
            )
        answer: JsonObject = {
            "role": said.role,
            "content": said.content,
            "model": said.model or "unknown",
        }
        if said.stop_reason:
            answer["stopReason"] = said.stop_reason
        return answer

    async def _elicit(self, params: Raw) -> JsonObject:
        mode = msgspec.json.decode(params, type=_Mode).mode
        if mode == "url" and self.elicit_url is not None:
            visit = msgspec.json.decode(params, type=Visit)
            _check_visit(visit)
            agreed = await settled(self.elicit_url(visit))
            if isinstance(agreed, Elicited):
                return {"action": agreed.action}
            if agreed:
                return {"action": "accept"}
            return {"action": "decline"}
        if mode != "form" or self.elicit is None:
            raise InvalidParams(f"this client has no elicitation of mode {mode[:40]!r}")
        form = msgspec.json.decode(params, type=Form)
        said = await settled(self.elicit(form))
        if said is None:
            said = Elicited("decline")
        if isinstance(said, dict):
            said = Elicited("accept", said)
        if not isinstance(said, Elicited):
            raise TypeError(
                "a handler of elicitation must return a dict, an Elicited or None, "
                f"got {type(said).__name__}"
            )
        if said.action != "accept":
            return {"action": said.action}
        return {
            "action": "accept",
            "content": with_defaults(msgspec.to_builtins(said.content), form.requested_schema),
        }


class _Mode(Struct):
    mode: str = "form"


def _check_visit(visit: Visit) -> None:
    """Refuse an address that a browser must not open for a server.

    It must not be a file, a script or an unencrypted page.
    """
    scheme = visit.url.partition(":")[0].lower()
    is_safe = scheme == "https" or (scheme == "http" and visit.host in _LOOPBACK)
    if not visit.host or not is_safe:
        raise InvalidParams(
            f"url: expected https, or http to this machine, got {visit.url[:100]!r}"
        )


def with_defaults(content: Any, schema: JsonObject) -> JsonObject:
    """Return an accepted form whose missing fields have the schema's defaults (2025-11-25)."""
    filled: JsonObject = {}
    if isinstance(content, dict):
        filled |= content
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return filled
    for name, field in properties.items():
        if name not in filled and isinstance(field, dict) and "default" in field:
            filled[name] = field["default"]
    return filled


# --- changes --------------------------------------------------------------------------------------


class Change(Struct, frozen=True):
    """One of the server's lists has changed, or a resource was updated."""

    kind: Kind
    uri: str | None = None


class Log(Struct, frozen=True):
    """A log message from the server."""

    level: str
    data: Any = None
    logger: str | None = None


class Changes:
    """The changes that a program listens to, one after another.

    States of a task go to the `Task` instead.
    """

    def __init__(
        self,
        lists: Iterable[Kind],
        uris: Iterable[str],
        listening: "Listening",
        *,
        task: str | None = None,
    ) -> None:
        self.lists = frozenset(lists)
        self.uris = frozenset(uris)
        self.task = task
        # 2026-07-28: the changes that the server has agreed to report.
        self.honoured: JsonObject | None = None
        # Set when the server has agreed to report changes.
        self.agreed = asyncio.Event()
        # 2026-07-28: opens one stream after another.
        self.following: asyncio.Task[None] | None = None
        self._listening = listening
        self._pending: dict[Change, None] = {}
        self._news = asyncio.Event()
        self._over: WirecallError | bool = False

    @property
    def is_over(self) -> bool:
        return self._over is not False

    async def __aenter__(self) -> "Changes":
        await self._listening.begin(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._listening.end(self)
        self.finish()

    def __aiter__(self) -> "Changes":
        return self

    async def __anext__(self) -> Change:
        while not self._pending:
            if isinstance(self._over, WirecallError):
                raise self._over
            if self._over:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        change = next(iter(self._pending))
        del self._pending[change]
        return change

    def report(self, change: Change) -> None:
        """Take a change, if the program listens to it."""
        if self._wants(change):
            self._pending[change] = None
            self._news.set()

    def _wants(self, change: Change) -> bool:
        if change.kind == "updated":
            return change.uri in self.uris
        return change.kind in self.lists

    def report_everything(self) -> None:
        """Take every change that the client may have missed."""
        for kind in sorted(self.lists):
            self.report(Change(kind))
        for uri in sorted(self.uris):
            self.report(Change("updated", uri))

    def finish(self, error: WirecallError | None = None) -> None:
        """End the changes: no more will arrive."""
        self._over = self._over or error or True
        self._news.set()


# --- listening ------------------------------------------------------------------------------------


class Listening:
    """All listeners of one client, by the rules of its revision."""

    def __init__(self, conversation: "Conversation") -> None:
        self._conversation = conversation
        self._all: list[Changes] = []
        # The open streams, by the id of their request.
        self._streams: dict[Any, tuple[Changes, asyncio.Task[bool]]] = {}

    def report(self, change: Change, subscription: Any) -> None:
        """Forward a change: to the stream that it names, or else to all listeners."""
        if subscription in self._streams:
            self._streams[subscription][0].report(change)
            return
        for changes in self._all:
            changes.report(change)

    def report_everything(self) -> None:
        """Report everything as changed: the client may have missed changes."""
        for changes in self._all:
            changes.report_everything()

    def uris(self) -> set[str]:
        """Return the resources that have listeners."""
        return {uri for changes in self._all if changes.agreed.is_set() for uri in changes.uris}

    def tasks(self) -> list[str]:
        """Return the ids of the tasks that have listeners."""
        return [changes.task for changes in self._all if changes.task is not None]

    async def begin(self, changes: Changes) -> None:
        """Begin to listen; returns when the server has agreed."""
        self._all.append(changes)
        try:
            if self._conversation.is_stateless:
                changes.following = asyncio.get_running_loop().create_task(self._follow(changes))
                changes.following.add_done_callback(lambda _: changes.agreed.set())
                timeout = self._conversation.delivery.options.timeout
                try:
                    async with asyncio.timeout(timeout):
                        await changes.agreed.wait()
                except TimeoutError:
                    reason = (
                        f"the server did not say within {timeout:g} s which changes it will report"
                    )
                    raise TimedOut(reason) from None
                if changes.following.cancelled():
                    raise ConnectionLost("the client was closed")
                if changes.following.done():
                    changes.following.result()
            else:
                for uri in sorted(changes.uris - self.uris()):
                    await self._conversation.perform("resources/subscribe", {"uri": uri})
                changes.agreed.set()
        except BaseException:
            await self.end(changes)
            raise

    async def end(self, changes: Changes) -> None:
        """Stop listening."""
        if changes not in self._all:
            return
        self._all.remove(changes)
        if changes.following is not None:
            await cancel_all(changes.following)
            return
        for uri in changes.uris - self.uris():
            with suppress(WirecallError):
                await self._conversation.perform("resources/unsubscribe", {"uri": uri})

    async def aclose(self) -> None:
        for changes in self._all:
            changes.finish()
        await cancel_all(*(changes.following for changes in self._all))

    # --- 2026-07-28 -------------------------------------------------------------------------------

    async def _follow(self, changes: Changes) -> None:
        """Open a stream, follow it to its end, and open the next.

        Raises the server's refusal of the first one.
        """
        conversation = self._conversation
        wanted: JsonObject = {f"{kind}ListChanged": True for kind in sorted(changes.lists)}
        if changes.uris:
            wanted["resourceSubscriptions"] = sorted(changes.uris)
        if changes.task is not None:
            wanted["taskIds"] = [changes.task]
        pause = FIRST
        while True:
            params = {"notifications": wanted, "_meta": conversation.envelope}
            exchange = conversation.message("subscriptions/listen", params, math.inf)
            exchange.is_standing = True
            entry = exchange.entries[0]
            task = asyncio.get_running_loop().create_task(conversation.link.post(exchange))
            self._streams[entry.id] = changes, task
            try:
                await asyncio.wait([task])
                if not task.cancelled():
                    task.result()
                if entry.error is not None:
                    raise entry.error
                pause = FIRST
            except (RpcError, CallFailed) as error:
                if changes.honoured is None:
                    raise
                if isinstance(error, RpcError) or changes.task is not None:
                    changes.finish(error)
                    return
                logger.debug("a stream of changes broke: %s", error)
                pause = max(pause, asked_pause(error))
            finally:
                del self._streams[entry.id]
                await cancel_all(task)
            # The client requests the state of the task before it listens again.
            if changes.task is not None:
                changes.finish()
                return
            await conversation.delivery.clock.sleep(pause)
            pause = min(FURTHEST, pause * 2)

    def acknowledged(self, id: Any, honoured: JsonObject) -> None:
        """Record which changes the server has agreed to report."""
        if id in self._streams:
            changes = self._streams[id][0]
            if changes.honoured is not None:  # this is not the first stream
                changes.report_everything()
            changes.honoured = honoured
            changes.agreed.set()

    def cancelled(self, id: int | str) -> None:
        """End a stream: on a pipe the server announces that with `notifications/cancelled`."""
        if id in self._streams:
            self._streams[id][1].cancel()


# --- messages -------------------------------------------------------------------------------------


class Follower(Struct, weakref=True):
    """The callback for the progress of a call. It lives as long as the call, which holds it."""

    on_progress: Progress


class _Progress(Struct, rename="camel"):
    progress_token: ProgressToken
    progress: float
    total: float | None = None
    message: str | None = None


class _Complete(Struct, rename="camel"):
    elicitation_id: str


class _Notice(Struct):
    """The members of several notifications."""

    uri: str | None = None
    task: str = msgspec.field(default="", name="taskId")
    notifications: JsonObject | None = None
    meta: JsonObject = msgspec.field(default_factory=dict, name="_meta")

    @property
    def subscription(self) -> int | str | None:
        """The id of the `subscriptions/listen` that it belongs to."""
        id = self.meta.get(f"{PREFIX}subscriptionId")
        if isinstance(id, (int, str)):
            return id
        return None


class Inbox:
    """Takes requests and notifications of one server.

    1. A callback is called at once, in the order of the messages; a coroutine function runs after
       the callbacks before it. Its exceptions are logged. If `TURNS` messages wait for coroutine
       functions, later ones are dropped.
    2. The host answers a server's question concurrently; the server may cancel it. At 2026-07-28 a
       server must not ask this way, and gets no answer.
    3. The inbox ignores a message that cannot be read or has an unknown kind. It also ignores a
       question if `QUESTIONS` are pending, or under the id of a pending one: a server that asks so
       much does not listen.
    """

    def __init__(self, conversation: "Conversation", host: Host) -> None:
        # The callbacks for progress, by token.
        self.followers: WeakValueDictionary[ProgressToken, Follower] = WeakValueDictionary()
        # By the id of a visit: set when the server reports that the visit is complete.
        self.visits: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()
        self._conversation = conversation
        self._host = host
        # The tasks that answer the server's questions, by the id of the question.
        self._answering: dict[int | str, asyncio.Task[None]] = {}
        # Coroutine functions of the user, with their arguments, that wait for their turn.
        self._turns: asyncio.Queue[tuple[Callable[..., Awaitable[object]], tuple[object, ...]]] = (
            asyncio.Queue(TURNS)
        )
        self._calling: asyncio.Task[None] | None = None

    def receive(self, message: Arrived) -> None:
        """Take one request or notification."""
        if message.id is not UNSET:
            self._take_question(message, message.id)
            return
        params = _NOTHING if message.params is UNSET else message.params
        try:
            if message.method in KINDS:
                self._take_change(KINDS[str(message.method)], params)
            elif message.method in _TAKE:
                _TAKE[str(message.method)](self, params)
        except UNREADABLE as error:
            logger.debug("a message of the server's cannot be read: %s", error)

    def _take_question(self, message: Arrived, id: Any) -> None:
        if self._conversation.is_stateless or not isinstance(id, (int, str)):
            logger.warning(
                "the server asked %.100r, which it may not do; it gets no answer", message.method
            )
        elif id in self._answering or len(self._answering) >= QUESTIONS:
            logger.debug("a question of the server's is passed over: %.100r", message.method)
        else:
            task = asyncio.get_running_loop().create_task(self._answer(message))
            self._answering[id] = task
            task.add_done_callback(lambda _: self._answering.pop(id, None))

    def _take_change(self, kind: Kind, params: Raw) -> None:
        notice = msgspec.json.decode(params, type=_Notice)
        change = Change(kind)
        if kind == "updated":
            change = Change(kind, notice.uri)
        self._conversation.lists.forget(change.kind, change.uri)
        self._conversation.listening.report(change, notice.subscription)
        if self._host.on_change is not None:
            self._call_back(self._host.on_change, change)

    def _take_progress(self, params: Raw) -> None:
        made = msgspec.json.decode(params, type=_Progress)
        follower = self.followers.get(made.progress_token)
        if follower is not None:
            self._call_back(follower.on_progress, made.progress, made.total, made.message)

    def _take_log(self, params: Raw) -> None:
        if self._host.on_log is not None:
            self._call_back(self._host.on_log, msgspec.json.decode(params, type=Log))

    def _take_task(self, params: Raw) -> None:
        """Pass the state of a task to those who wait for it."""
        notice = msgspec.json.decode(params, type=_Notice)
        for waiting in self._conversation.waiting:
            if waiting.id == notice.task:
                waiting.receive(params)

    def _take_visit(self, params: Raw) -> None:
        """Take the report that a visit is complete."""
        visit = self.visits.get(msgspec.json.decode(params, type=_Complete).elicitation_id)
        if visit is not None:
            visit.set()

    def _take_agreement(self, params: Raw) -> None:
        """Take the list of the changes that the server will report."""
        notice = msgspec.json.decode(params, type=_Notice)
        honoured = notice.notifications or {}
        # A list may have changed before the server agreed.
        if honoured.keys() != {"taskIds"}:
            self._conversation.lists.forget()
        self._conversation.listening.acknowledged(notice.subscription, honoured)

    def _take_cancel(self, params: Raw) -> None:
        """Stop answering a question, or end a stream, that the server has cancelled."""
        id = msgspec.json.decode(params, type=Cancelled).id
        if isinstance(id, (int, str)):
            if id in self._answering:
                self._answering[id].cancel()
            self._conversation.listening.cancelled(id)

    async def aclose(self) -> None:
        await cancel_all(self._calling, *self._answering.values())

    def _call_back(self, function: Callable[..., Any], *arguments: object) -> None:
        """Call a function of the user; a coroutine function waits for its turn."""
        if inspect.iscoroutinefunction(function):
            if self._turns.full():
                return
            self._turns.put_nowait((function, arguments))
            if self._turns.full():
                logger.warning(
                    "%d messages of the server's wait for callbacks; further ones are dropped",
                    TURNS,
                )
            if self._calling is None:
                self._calling = asyncio.get_running_loop().create_task(self._call_in_turn())
            return
        try:
            function(*arguments)
        except Exception:
            logger.exception("a callback failed")

    async def _call_in_turn(self) -> None:
        while True:
            function, arguments = await self._turns.get()
            try:
                await function(*arguments)
            except Exception:
                logger.exception("a callback failed")

    async def _answer(self, message: Arrived) -> None:
        asked = str(message.method)
        reply = {"jsonrpc": "2.0", "id": message.id}
        try:
            try:
                result: JsonObject = {}
                if asked != "ping":
                    result = await self._host.answer(asked, message.params)
                line = encode({**reply, "result": result})
            except RpcError as error:
                refusal = ErrorObject(error.code, error.message, error.data)
                if error.data is None:
                    refusal = ErrorObject(error.code, error.message)
                line = encode({**reply, "error": refusal})
        except EncodeError as error:  # in a handler's value: the server still waits for an answer
            logger.error(
                "the answer of the handler of %.100r cannot be written as JSON: %s", asked, error
            )
            line = encode({**reply, "error": ErrorObject(-32603, "Internal error")})
        with suppress(CallFailed):
            await self._conversation.send(line)


# How the inbox takes each notification, except changes (`KINDS`).
_TAKE: dict[str, Callable[[Inbox, Raw], None]] = {
    "notifications/progress": Inbox._take_progress,
    "notifications/message": Inbox._take_log,
    "notifications/tasks": Inbox._take_task,
    "notifications/elicitation/complete": Inbox._take_visit,
    "notifications/subscriptions/acknowledged": Inbox._take_agreement,
    "notifications/cancelled": Inbox._take_cancel,
}
