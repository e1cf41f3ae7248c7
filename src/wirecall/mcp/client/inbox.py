"""What a server sends on its own: changes, progress, log messages, and questions, which the handlers of the host answer.

    sample(Sampling) -> str or Sampled          sampling/createMessage
    elicit(Form) -> dict, Elicited or None      elicitation/create with a form; None declines
    elicit_url(Visit) -> bool or Elicited       elicitation/create with an address to go to
    roots, or roots() -> places                 roots/list

A handler is a function or a coroutine function. A question has two forms on the wire. With a handshake it is a request of
the server's; at 2026-07-28 it comes with a result that is not complete, and the call is made again with the answers.
`Host.answer` serves both. A question without a handler is not declared as a capability, and is refused if a server asks it
all the same.

    async with client.listen(tools=True, uris=["file:///notes"]) as changes:
        async for change in changes: ...

With a handshake the server reports changes of its lists by itself, and of resources that were subscribed to. At 2026-07-28
it reports them to clients that listen (`subscriptions/listen`), on a stream that may break: then the client opens another,
and since anything may have changed in between, it reports everything that is listened to as changed. A change that waits to
be read is not reported twice.
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
from wirecall.stepping import cancel_all, settled

if TYPE_CHECKING:
    from wirecall.mcp.client.conversation import Conversation

ROUNDS = 16  # of questions and answers in one call
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

Kind: TypeAlias = Literal["tools", "prompts", "resources", "updated"]
Progress: TypeAlias = Callable[[float, float | None, str | None], object]

QUESTIONS = 100  # of a server that wait for an answer
TURNS = 1000  # messages that wait for a coroutine function of the user's
FIRST, FURTHEST = 0.5, 30.0  # seconds before a stream that broke is asked for again

# The notification of each kind.
KINDS: dict[str, Kind] = {
    "notifications/tools/list_changed": "tools",
    "notifications/prompts/list_changed": "prompts",
    "notifications/resources/list_changed": "resources",
    "notifications/resources/updated": "updated",
}


# --- questions -------------------------------------------------------------------------------------------------------


class InputRequest(Struct):
    """A request of the server's in a result, or in the state of a task: it has no id."""

    method: str
    params: Raw = Raw(b"{}")


class Form(Struct, frozen=True, rename="camel"):
    """A server asks a person to fill in a form: a flat object of plain values."""

    message: str = ""
    requested_schema: JsonObject = {}


class Visit(Struct, frozen=True, rename="camel"):
    """A server asks a person to go to an address. Show it to them in full before anything opens it."""

    message: str = ""
    url: str = ""
    elicitation_id: str | None = None

    @property
    def host(self) -> str:
        """The host in the address, or "" if it has none: a user looks at it before they agree."""
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
        contents = [message.get("content") for message in self.messages]
        blocks = [block for content in contents for block in (content if isinstance(content, list) else [content])]
        return "\n".join(block["text"] for block in blocks if isinstance(block, dict) and isinstance(block.get("text"), str))


Sample: TypeAlias = Callable[[Sampling], str | Sampled | Awaitable[str | Sampled]]
Elicit: TypeAlias = Callable[[Form], JsonObject | Elicited | Awaitable[JsonObject | Elicited | None] | None]
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
    extensions: Mapping[str, JsonObject] = {}  # settings by id

    def capabilities(self, revision: Revision) -> JsonObject:
        """Return what is declared to a server: what there is a handler for, as far as the revision knows it; extensions."""
        handlers = {"form": self.elicit, "url": self.elicit_url}
        modes: JsonObject = {mode: {} for mode, handler in handlers.items() if handler}
        has_modes = revision.has("ask elicitation url")
        declared: JsonObject = {}
        if self.sample and revision.has("ask sampling/createMessage"):
            declared["sampling"] = {}
        if revision.has("ask elicitation/create") and (modes if has_modes else self.elicit):
            declared["elicitation"] = modes if has_modes else {}
        if self.roots is not None and revision.has("ask roots/list"):
            declared["roots"] = {}
        if self.extensions and revision.has("capability extensions"):
            declared["extensions"] = self.extensions
        return declared

    async def answer(self, method: str, params: Raw | UnsetType) -> JsonObject:
        """Return the answer to a question, or raise the refusal."""
        given = Raw(b"{}") if params is UNSET else params
        try:
            if method == "sampling/createMessage":
                return await self._sample(given)
            if method == "elicitation/create":
                return await self._elicit(given)
            if method != "roots/list":
                raise MethodNotFound(f"this client does not answer {method[:100]!r}")
            if self.roots is None:
                raise MethodNotFound("this client has no roots")
            places: Any = await settled(self.roots() if callable(self.roots) else self.roots)
            roots = [place if isinstance(place, Root) else Root(str(place)) for place in places]
            return {"roots": [{"uri": root.uri, **({"name": root.name} if root.name else {})} for root in roots]}
        except msgspec.ValidationError as error:
            raise InvalidParams(f"params: {str(error).lower()}") from None
        except RpcError:
            raise
        except Exception as error:
            logger.exception("the handler of %s failed", method)
            raise RpcError(-32603, "Internal error") from error

    async def _sample(self, params: Raw) -> JsonObject:
        if self.sample is None:
            raise MethodNotFound("this client has no model to ask")
        said = await settled(self.sample(msgspec.json.decode(params, type=Sampling)))
        if isinstance(said, str):
            said = Sampled("assistant", {"type": "text", "text": said}, "unknown")
        if not isinstance(said, Sampled):
            raise TypeError(f"a handler of sampling must return a str or a Sampled, got {type(said).__name__}")
        stopped = {"stopReason": said.stop_reason} if said.stop_reason else {}
        return {"role": said.role, "content": said.content, "model": said.model or "unknown", **stopped}

    async def _elicit(self, params: Raw) -> JsonObject:
        mode = msgspec.json.decode(params, type=_Mode).mode
        if mode == "url" and self.elicit_url is not None:
            visit = msgspec.json.decode(params, type=Visit)
            # A server names the address, and a browser opens it: not a file or a script, and not where others can listen.
            scheme = visit.url.partition(":")[0].lower()
            if not visit.host or not (scheme == "https" or (scheme == "http" and visit.host in _LOOPBACK)):
                raise InvalidParams(f"url: expected https, or http to this machine, got {visit.url[:100]!r}")
            agreed = await settled(self.elicit_url(visit))
            if isinstance(agreed, Elicited):
                return {"action": agreed.action}
            return {"action": "accept" if agreed else "decline"}
        if mode != "form" or self.elicit is None:
            raise InvalidParams(f"this client has no elicitation of mode {mode[:40]!r}")
        form = msgspec.json.decode(params, type=Form)
        said = await settled(self.elicit(form))
        if said is None:
            said = Elicited("decline")
        if isinstance(said, dict):
            said = Elicited("accept", said)
        if not isinstance(said, Elicited):
            raise TypeError(f"a handler of elicitation must return a dict, an Elicited or None, got {type(said).__name__}")
        if said.action != "accept":
            return {"action": said.action}
        return {"action": "accept", "content": with_defaults(msgspec.to_builtins(said.content), form.requested_schema)}


class _Mode(Struct):
    mode: str = "form"


def with_defaults(content: Any, schema: JsonObject) -> JsonObject:
    """Return an accepted form with the defaults of the schema in the fields that were left out (2025-11-25)."""
    filled = dict(content) if isinstance(content, dict) else {}
    properties = schema.get("properties")
    for name, field in properties.items() if isinstance(properties, dict) else ():
        if name not in filled and isinstance(field, dict) and "default" in field:
            filled[name] = field["default"]
    return filled


# --- changes ---------------------------------------------------------------------------------------------------------


class Change(Struct, frozen=True):
    """A list of the server's has changed, or a resource was updated."""

    kind: Kind
    uri: str | None = None


class Log(Struct, frozen=True):
    """A log message of the server's."""

    level: str
    data: Any = None
    logger: str | None = None


class Changes:
    """The changes that a program listens to, one after another. The states of a task go to the task itself."""

    def __init__(
        self, lists: Iterable[Kind], uris: Iterable[str], listening: "Listening", *, task: str | None = None
    ) -> None:
        self.lists = frozenset(lists)
        self.uris = frozenset(uris)
        self.task = task
        self.honoured: JsonObject | None = None  # 2026-07-28: the changes that the server has agreed to report
        self.agreed = asyncio.Event()  # the server will report
        self.following: asyncio.Task[None] | None = None  # 2026-07-28: opens one stream after another
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

    def tell(self, change: Change) -> None:
        """Take a change, if it is one of those that are listened to."""
        if change.uri in self.uris if change.kind == "updated" else change.kind in self.lists:
            self._pending[change] = None
            self._news.set()

    def tell_everything(self) -> None:
        """Take every change that the client may have missed."""
        for kind in sorted(self.lists):
            self.tell(Change(kind))
        for uri in sorted(self.uris):
            self.tell(Change("updated", uri))

    def finish(self, error: WirecallError | None = None) -> None:
        """End: nothing more will come."""
        self._over = self._over or error or True
        self._news.set()


# --- listening -------------------------------------------------------------------------------------------------------


class Listening:
    """All listeners of one client, in the manner of its revision."""

    def __init__(self, conversation: "Conversation") -> None:
        self._conversation = conversation
        self._all: list[Changes] = []
        self._streams: dict[Any, tuple[Changes, asyncio.Task[bool]]] = {}  # by the ids of their requests

    def tell(self, change: Change, subscription: Any) -> None:
        """Pass a change on: to one stream if it names that, else to all that listen."""
        for changes in [self._streams[subscription][0]] if subscription in self._streams else self._all:
            changes.tell(change)

    def tell_everything(self) -> None:
        """Report everything as changed: the client may have missed changes."""
        for changes in self._all:
            changes.tell_everything()

    def uris(self) -> set[str]:
        """Return the resources that are listened to."""
        return {uri for changes in self._all if changes.agreed.is_set() for uri in changes.uris}

    def tasks(self) -> list[str]:
        """Return the ids of the tasks that are listened to."""
        return [changes.task for changes in self._all if changes.task is not None]

    async def begin(self, changes: Changes) -> None:
        """Listen; the server has agreed when this returns."""
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
                    reason = f"the server did not say within {timeout:g} s which changes it will report"
                    raise TimedOut(reason) from None
                if changes.following.cancelled():
                    raise ConnectionLost("the client was closed")
                if changes.following.done():
                    changes.following.result()
            else:
                for uri in sorted(changes.uris - self.uris()):
                    await self._conversation.tell("resources/subscribe", {"uri": uri})
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
                await self._conversation.tell("resources/unsubscribe", {"uri": uri})

    async def aclose(self) -> None:
        for changes in self._all:
            changes.finish()
        await cancel_all(*(changes.following for changes in self._all))

    # --- 2026-07-28 --------------------------------------------------------------------------------------------------

    async def _follow(self, changes: Changes) -> None:
        """Open a stream, follow it to its end, and open the next. Raises the server's refusal of the first one."""
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
            if changes.task is not None:  # the client asks for the state of the task before it listens again
                changes.finish()
                return
            await conversation.delivery.clock.sleep(pause)
            pause = min(FURTHEST, pause * 2)

    def acknowledged(self, id: Any, honoured: JsonObject) -> None:
        """Record which changes the server has agreed to report."""
        if id in self._streams:
            changes = self._streams[id][0]
            if changes.honoured is not None:  # it is not the first stream
                changes.tell_everything()
            changes.honoured = honoured
            changes.agreed.set()

    def cancelled(self, id: int | str) -> None:
        """End a stream: on a pipe the server says so with `notifications/cancelled`."""
        if id in self._streams:
            self._streams[id][1].cancel()


# --- messages --------------------------------------------------------------------------------------------------------


class Follower(Struct, weakref=True):
    """The function that follows the progress of a call. The call holds it; with the call it is gone."""

    told: Progress


class _Progress(Struct, rename="camel"):
    progress_token: ProgressToken
    progress: float
    total: float | None = None
    message: str | None = None


class _Complete(Struct, rename="camel"):
    elicitation_id: str


class _Told(Struct):
    uri: str | None = None
    task: str = msgspec.field(default="", name="taskId")
    notifications: JsonObject | None = None
    meta: JsonObject = msgspec.field(default_factory=dict, name="_meta")

    @property
    def subscription(self) -> int | str | None:
        """The id of the `subscriptions/listen` that it belongs to."""
        id = self.meta.get(f"{PREFIX}subscriptionId")
        return id if isinstance(id, (int, str)) else None


class Inbox:
    """Takes requests and notifications of one server.

    1. A callback is called at once, in the order of the messages; a coroutine function runs after the callbacks before it.
       An exception that it raises is logged. If `TURNS` messages wait for coroutine functions, further ones are dropped.
    2. A question of the server's is answered by the host, beside everything else; the server may take it back. At 2026-07-28
       a server must not ask so, and gets no answer.
    3. A message that cannot be read, or is of no known kind, is passed over; so is a question beyond `QUESTIONS` that wait
       for an answer, or under the id of one of them: a server that asks so much does not listen.
    """

    def __init__(self, conversation: "Conversation", host: Host) -> None:
        self.followers: WeakValueDictionary[ProgressToken, Follower] = WeakValueDictionary()
        self.visits: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()  # set when the user has finished
        self._conversation = conversation
        self._host = host
        self._answering: dict[int | str, asyncio.Task[None]] = {}  # questions of the server's, by their ids
        self._turns: asyncio.Queue[tuple[Callable[..., Awaitable[object]], tuple[object, ...]]] = asyncio.Queue(TURNS)
        self._teller: asyncio.Task[None] | None = None

    def receive(self, message: Arrived) -> None:
        """Take one request or notification."""
        params = Raw(b"{}") if message.params is UNSET else message.params
        try:
            if message.id is not UNSET:
                id = message.id
                if self._conversation.is_stateless or not isinstance(id, (int, str)):
                    logger.warning("the server asked %.100r, which it may not do; it gets no answer", message.method)
                elif id in self._answering or len(self._answering) >= QUESTIONS:
                    logger.debug("a question of the server's is passed over: %.100r", message.method)
                else:
                    task = asyncio.get_running_loop().create_task(self._answer(message))
                    self._answering[id] = task
                    task.add_done_callback(lambda _: self._answering.pop(id, None))
            elif message.method in KINDS:
                told = msgspec.json.decode(params, type=_Told)
                kind = KINDS[str(message.method)]
                change = Change(kind, told.uri if kind == "updated" else None)
                self._conversation.lists.forget(change.kind, change.uri)
                self._conversation.listening.tell(change, told.subscription)
                if self._host.on_change is not None:
                    self.tell(self._host.on_change, change)
            elif message.method == "notifications/progress":
                progress = msgspec.json.decode(params, type=_Progress)
                follower = self.followers.get(progress.progress_token)
                if follower is not None:
                    self.tell(follower.told, progress.progress, progress.total, progress.message)
            elif message.method == "notifications/message":
                if self._host.on_log is not None:
                    self.tell(self._host.on_log, msgspec.json.decode(params, type=Log))
            elif message.method == "notifications/tasks":
                told = msgspec.json.decode(params, type=_Told)
                for waiting in self._conversation.waiting:
                    if waiting.id == told.task:
                        waiting.receive(params)
            elif message.method == "notifications/elicitation/complete":
                visit = self.visits.get(msgspec.json.decode(params, type=_Complete).elicitation_id)
                if visit is not None:
                    visit.set()
            elif message.method == "notifications/subscriptions/acknowledged":
                told = msgspec.json.decode(params, type=_Told)
                honoured = told.notifications or {}
                if honoured.keys() != {"taskIds"}:  # a list may have changed before the server agreed
                    self._conversation.lists.forget()
                self._conversation.listening.acknowledged(told.subscription, honoured)
            elif message.method == "notifications/cancelled":
                taken_back = msgspec.json.decode(params, type=Cancelled).id
                if isinstance(taken_back, (int, str)):
                    if taken_back in self._answering:
                        self._answering[taken_back].cancel()
                    self._conversation.listening.cancelled(taken_back)
        except UNREADABLE as error:
            logger.debug("a message of the server's cannot be read: %s", error)

    async def aclose(self) -> None:
        await cancel_all(self._teller, *self._answering.values())

    def tell(self, function: Callable[..., Any], *arguments: object) -> None:
        """Call a function of the user's; a coroutine function waits for its turn."""
        if inspect.iscoroutinefunction(function):
            if self._turns.full():
                return
            self._turns.put_nowait((function, arguments))
            if self._turns.full():
                logger.warning("%d messages of the server's wait for callbacks; further ones are dropped", TURNS)
            if self._teller is None:
                self._teller = asyncio.get_running_loop().create_task(self._tell_in_turn())
            return
        try:
            function(*arguments)
        except Exception:
            logger.exception("a callback failed")

    async def _tell_in_turn(self) -> None:
        while True:
            function, arguments = await self._turns.get()
            try:
                await function(*arguments)
            except Exception:
                logger.exception("a callback failed")

    async def _answer(self, message: Arrived) -> None:
        asked, reply = str(message.method), {"jsonrpc": "2.0", "id": message.id}
        try:
            try:
                result = {} if asked == "ping" else await self._host.answer(asked, message.params)
                line = encode({**reply, "result": result})
            except RpcError as error:
                told = ErrorObject(error.code, error.message, UNSET if error.data is None else error.data)
                line = encode({**reply, "error": told})
        except EncodeError as error:  # of a value that a handler gave: the server waits for an answer all the same
            logger.error("the answer of the handler of %.100r cannot be written as JSON: %s", asked, error)
            line = encode({**reply, "error": ErrorObject(-32603, "Internal error")})
        with suppress(CallFailed):
            await self._conversation.send(line)
