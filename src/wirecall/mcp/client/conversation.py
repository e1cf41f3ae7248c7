"""MCP as a dialect of the client: how a conversation begins, what every message carries, and the rounds of a call.

    begin -> handshake -> call: params (envelope, key, progress, round) -> answer
                                  ^-------- questions answered, headers mended, version replaced --------'

At 2026-07-28 a result may be a question (`input_required`): the host answers, and the same call goes again with the
answers, the server's state exactly as it came, a new id and the same key. A refusal for a header that is missing (-32020)
lists the tools anew, one for the version (-32022) takes one that the server lists; both once, and both are safe: nothing has
run. The result of a tool may also be a task: the call waits for the end of the task (`tasks`), and cancels it if its
caller stops waiting.

At 2025-11-25 a server may refuse a call until the user has visited a page (-32042). The host's `elicit_url` leads the user
there, and the call goes again at once. If the server refuses it again, the client waits until the server reports that the
visit is complete (`notifications/elicitation/complete`), at most for the time of the call, and tries once more.

For every call the conversation decides whether it is confirmed first, whether it has a key, and whether it may be repeated:

1. Lists, resources, prompts and completions only read, and are repeated.
2. A tool is repeated if it is called with an idempotency key and the server says that it honours keys; for such a server a
   key is minted for every call. To any other server a key is harmless, but no reason to repeat.
3. A tool is repeated if its annotations say that it is read-only or idempotent, and they are trusted (`trust=`).
4. `confirm=` is awaited before a call of a tool that is destructive; if it declines, nothing is sent. Hints of a server that
   is not trusted can only make a tool more dangerous: with `confirm_unknown=True` all its tools that do not say that they
   are destructive are confirmed as well.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.client.delivery import LEAST, Dialect, Options, Outgoing, asked_pause, may_help, mint_key
from wirecall.client.exchange import AnyEntry, Arrays, Entry, Exchange
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    Declined,
    HeaderMismatch,
    InvalidParams,
    NotCapable,
    NotSent,
    Refused,
    RpcError,
    TaskGone,
    TimedOut,
    UnknownVersion,
    UsageError,
    VisitRequired,
    WirecallError,
)
from wirecall.logs import logger
from wirecall.mcp.client.inbox import QUESTIONS, ROUNDS, Changes, Follower, Host, Inbox, InputRequest, Kind, Listening
from wirecall.mcp.client.links import FAREWELL, McpHttpLink, McpLink
from wirecall.mcp.client.negotiate import Agreed, Handshake, common
from wirecall.mcp.client.results import Lists, Tool, TypedAnswer, decode_typed, read_contents
from wirecall.mcp.client.tasks import LONGEST_ID, Task, read_state
from wirecall.mcp.revisions import HANDSHAKE, REVISIONS, STATELESS, Revision
from wirecall.mcp.types import (
    KEY_META,
    KEYS_CAPABILITY,
    PREFIX,
    REPLAYED_META,
    TASKS,
    Embedded,
    checked_extensions,
    declared_extensions,
)
from wirecall.protocol.messages import UNREADABLE, JsonObject, encode
from wirecall.protocol.params import KEY
from wirecall.stepping import settled
from wirecall.version import __version__

if TYPE_CHECKING:
    from wirecall.tracing import ClientCall

T = TypeVar("T")
Trust: TypeAlias = bool | Callable[[Tool], bool]
Confirm: TypeAlias = Callable[[Tool, JsonObject], bool | Awaitable[bool]]

ARRAY_PROBE = 2.0  # seconds in which a server on a pipe has to answer its first array
BEGINNINGS = 3  # attempts of each message of a handshake
AGREEING = 2.0  # seconds in which a server has to agree to send the states of a task
STREAMS = 16  # tasks whose states are sent at a time: each has a connection; others are asked for
_OLD = (400, 404, 405)  # how a server of 2024-11-05 answers a POST to its stream
_MODERN = (HeaderMismatch, NotCapable, UnknownVersion)  # errors that only newer servers have
_MAY_ASK = frozenset({"tools/call", "prompts/get", "resources/read"})
# Methods that only read, or that can be repeated without harm.
_READS = ("tools/list", "prompts/", "resources/", "completion/", "server/discover", "ping", "logging/", "tasks/")


class _Asked(Struct, rename="camel"):
    """A result that is a question."""

    input_requests: dict[str, InputRequest] = {}
    request_state: Any = UNSET


class _Visit(Struct, rename="camel"):
    """A page that the user has to visit before a call (-32042)."""

    elicitation_id: str
    url: str
    message: str = ""
    mode: Literal["url"] = "url"


class _Visits(Struct):
    elicitations: list[_Visit]


class _Kind(Struct, rename="camel"):
    result_type: str = "complete"  # what older servers leave out (2026-07-28, basic)


class Extra(Struct):
    """What an entry of MCP has beside its params."""

    read: Callable[[AnyEntry], Any] | None = None  # makes the result
    check: bool = True  # an answer that is an error is raised
    follower: Follower | None = None
    tasks: bool = True  # the call may become a task
    answer: TypedAnswer | None = None  # the last result, if a tool gave it and it was decoded for its type
    asked: _Asked | None = None  # the last result, if it is a question
    round: JsonObject = {}  # `inputResponses` and `requestState` of this attempt
    rounds: int = 0
    is_mended: bool = False
    is_background: bool = False  # and that is not waited for
    task: "Task[Any] | None" = None  # that the call has become
    visits: dict[str, asyncio.Event] = {}  # that the user has agreed to, by id; set when the server reports one as complete
    has_waited: bool = False  # for the last of them
    trace: "ClientCall | None" = None


_kind_of = msgspec.json.Decoder(_Kind).decode
_asked_in = msgspec.json.Decoder(_Asked).decode


class Settings(Host, frozen=True, kw_only=True):
    """The options of a client of MCP, with the handlers of its host; `connect` explains each of them."""

    revision: str | None = None
    trust: Trust = False
    confirm: Confirm | None = None
    confirm_unknown: bool = False
    identity: Mapping[str, Any] | None = None
    tasks: bool = True
    baggage: bool = False

    def __post_init__(self) -> None:
        if self.revision is not None and self.revision not in REVISIONS:
            known = ", ".join(REVISIONS)
            raise UsageError(f"revision={self.revision!r} is not known.", "MCP has five", f"use one of {known}")
        msgspec.structs.force_setattr(self, "extensions", checked_extensions(self.extensions))
        if TASKS in self.extensions:
            raise UsageError(
                f"{TASKS} is not for extensions=.", "the client declares it by itself", "use tasks=False, or drop it"
            )


class Conversation(Dialect):
    """The client's side of one conversation."""

    def __init__(self, link: McpLink, settings: Settings, options: Options) -> None:
        self.pinned = None if settings.revision is None else REVISIONS[settings.revision]
        self.revision: Revision | None = None  # None: nothing is agreed yet
        self.honours_keys = False  # the server says that of the calls of a tool with one key, one runs
        self.server: JsonObject = {}
        self.capabilities: JsonObject = {}
        self.instructions: str | None = None
        self.lists = Lists(self.ask, options.clock.time, options.timeout)
        self.listening = Listening(self)
        self.waiting: list[Task[Any]] = []  # tasks that are waited for
        self.is_over = False
        self._options = options
        self._settings = settings
        self._me = Raw(encode(dict(settings.identity or {"name": "wirecall", "version": __version__})))
        self._has_tried_arrays = False
        self._span: type[ClientCall] | Literal[False] | None = None  # None: no call was traced yet; False: none can be
        self._level: str | None = None
        self._inbox = Inbox(self, settings)
        self._subscribed: Changes | None = None
        self._sends_states = True  # the server has not failed to agree to it
        self._leaving: set[asyncio.Task[None]] = set()  # cancel tasks that are no longer waited for
        self._seal()
        self._speak_on(link)

    def extension(self, id: str) -> JsonObject | None:
        """Return the server's settings of an extension; None if the server has not declared it."""
        return None if self.revision is None else declared_extensions(self.capabilities, self.revision).get(id)

    def _speak_on(self, link: McpLink) -> None:
        self.link = link
        link.on_message = self._inbox.receive
        link.marks = lambda name: self.lists.marks.get(name, {})

    # --- beginning and end -------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Agree on a revision, and listen to all lists if `on_change` was given."""
        try:
            agreed = await Handshake(self).agree()
        except (Refused, RpcError) as refusal:
            # A server that refuses `initialize` may be one of 2024-11-05, which has another transport.
            status = refusal.status if isinstance(refusal, Refused) else 400
            older = self.link.older() if self.link.older is not None else None
            is_modern = isinstance(refusal, _MODERN) or (self.pinned is not None and self.pinned.is_stateless)
            if older is None or status not in _OLD or is_modern:
                raise
            try:
                await older.open()
            except CallFailed:
                raise refusal from None
            await self.link.aclose()
            older.url = self.link.url
            self._speak_on(older)
            self.delivery.link = self._options.wrap(older)
            agreed = await Handshake(self).initialize(self.pinned or HANDSHAKE[-1])
        await self._adopt(agreed)
        if self._settings.on_change is not None and self.is_stateless:
            await self.listen_to(())

    async def end(self) -> None:
        self.is_over = True
        for task in self.waiting:
            task.wake()
        await asyncio.gather(*self._leaving)
        await self.listening.aclose()
        await self._inbox.aclose()

    def offer(self, revision: Revision) -> JsonObject:
        """Return the params of `initialize`."""
        capabilities = self._settings.capabilities(revision)
        return {"protocolVersion": revision.name, "capabilities": capabilities, "clientInfo": self._me}

    def describe(self, revision: Revision, tasks: bool = True) -> JsonObject:
        """Return the envelope of 2026-07-28. It declares that the client can wait for tasks, unless `tasks` is False."""
        capabilities = self._settings.capabilities(revision)
        if tasks and self._settings.tasks:
            capabilities["extensions"] = {**self._settings.extensions, TASKS: {}}
        told = {
            f"{PREFIX}protocolVersion": revision.name,
            f"{PREFIX}clientCapabilities": Raw(encode(capabilities)),
            f"{PREFIX}clientInfo": self._me,
        }
        return told if self._level is None else {**told, f"{PREFIX}logLevel": self._level}

    def _seal(self) -> None:
        """Keep what every request carries in `_meta`, also as it travels if there is nothing else in it."""
        # Whether the revision that was agreed has no sessions, and an envelope with every request.
        self.is_stateless = self.revision is not None and self.revision.is_stateless
        self.envelope = self.describe(self.revision) if self.revision is not None and self.is_stateless else {}
        self._sealed = Raw(encode(self.envelope))

    async def _adopt(self, agreed: Agreed) -> None:
        """Speak as was agreed."""
        revision = agreed.revision
        self.revision = self.link.revision = revision
        self._seal()
        self.has_rounds = revision.is_stateless or revision.has("visit required")
        self.server, self.capabilities, self.instructions = agreed.server, agreed.capabilities, agreed.instructions
        experimental = agreed.capabilities.get("experimental")
        self.honours_keys = isinstance(experimental, dict) and KEYS_CAPABILITY in experimental
        self.lists.has_headers = isinstance(self.link, McpHttpLink) and revision.has("http headers repeat the body")
        if self.delivery.arrays.legal or not revision.has_arrays:  # what was learned of the server's arrays stays
            has = "has" if revision.has_arrays else "has no"
            self.delivery.arrays = Arrays(revision.has_arrays, f"MCP {revision.name} {has} arrays")
        if revision.is_stateless:
            return
        # Before this a server should send no request but a ping (2025-03-26, lifecycle, initialization).
        await self.send(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
        self.link.renew = self._renew
        await self.link.listen()

    async def _renew(self) -> None:
        """Begin again, because the server or its session is a new one: set its log level and its subscriptions anew."""
        revision = self.revision
        assert revision is not None
        await self._adopt(await Handshake(self).initialize(revision))
        self.lists.forget()
        again = [("resources/subscribe", {"uri": uri}) for uri in self.listening.uris()]
        if self._level is not None:
            again.insert(0, ("logging/setLevel", {"level": self._level}))
        for method, params in again:
            with suppress(RpcError, CallFailed):  # its failure is not one of the call that waits
                await self.request(method, params, revision)
        self.listening.tell_everything()

    async def request(self, method: str, params: JsonObject, revision: Revision | None) -> Raw:
        """Send one request beneath retries and wrappers, because a handshake must not wait for itself; return the result."""
        self.link.revision = revision
        clock, retry = self._options.clock, self._options.retry
        attempt, deadline = 1, clock.time() + self._options.timeout
        while True:
            entry = await self._post(method, params, self._options.timeout)
            error = entry.error
            if error is None:
                return entry.raw
            pause = retry.pause(attempt, asked_pause(error), self._options.chance())
            may_go = not self.link.is_pipe and attempt < BEGINNINGS and clock.time() + pause < deadline
            if not may_go or not may_help(error) or isinstance(error, TimedOut):
                raise error
            await clock.sleep(pause)
            attempt += 1

    async def _post(self, method: str, params: Any, timeout: float, *, array: bool = False) -> AnyEntry:
        """Send one request, once and in any session; return it settled."""
        exchange = self.message(method, params, timeout, array=array)

        async def send(exchange: Exchange) -> None:
            if await self.link.post(exchange):
                raise ConnectionLost("the server does not know the session it has just begun")

        await self.delivery.carry(exchange, timeout, send)
        return exchange.entries[0]

    def message(self, method: str, params: Any, timeout: float, *, array: bool = False) -> Exchange:
        """Return a message of one request that is sent as it is."""
        entry: AnyEntry = Entry(method, None, lambda _entry: None, timeout=timeout)
        entry.id = self.delivery.next_id()
        message = Outgoing(method, params, entry.id)
        return Exchange(encode([message] if array else message), [entry], array)

    async def send(self, message: bytes) -> None:
        """Send a message that is not answered. A server that does not take it has no more time than for a call."""
        seconds = self._options.timeout
        try:
            async with asyncio.timeout(seconds):
                await self.link.send(message)
        except TimeoutError:
            raise TimedOut(f"the server did not take a message within {seconds:g} s") from None

    async def try_arrays(self) -> None:
        """Find out by a ping whether a server on a pipe silently drops arrays. A lost ping does no harm."""
        arrays = self.delivery.arrays
        if not arrays.legal or not self.link.is_pipe or self._has_tried_arrays or self.honours_keys:
            return
        entry = await self._post("ping", UNSET, ARRAY_PROBE, array=True)
        self._has_tried_arrays = True
        if not entry.ok:
            arrays.legal, arrays.reason = False, "the server did not answer an array"

    # --- calls -------------------------------------------------------------------------------------------------------

    async def ask(self, method: str, params: JsonObject | None, read: Callable[[Raw], T], timeout: float | None = None) -> T:
        """Call a method of MCP's own, and return its result as `read` makes it."""
        given, extra = self._options.timeout if timeout is None else timeout, Extra(read=lambda entry: read(entry.raw))
        entry: Entry[T] = Entry(method, params, self.read, timeout=given, extra=extra)
        await self.delivery.run(entry)
        return entry.result()

    async def read_resource(self, uri: str, timeout: float | None = None) -> list[Embedded]:
        """Return the contents of a resource: those that are kept while they are fresh, else new ones."""
        kept = self.lists.contents(uri)
        if kept is not None:
            return kept
        extra, before = Extra(), self.lists.changes
        # A result that depends on answers of the user must not be kept (2026-07-28, server/utilities/caching, "Cache Key").
        extra.read = lambda entry: read_contents(entry.raw) if extra.round else self.lists.keep(uri, entry.raw, before)
        given = self._options.timeout if timeout is None else timeout
        entry: Entry[list[Embedded]] = Entry("resources/read", {"uri": uri}, self.read, timeout=given, extra=extra)
        await self.delivery.run(entry)
        return entry.result()

    async def tell(self, method: str, params: JsonObject) -> None:
        """Call a method of MCP's own whose result says nothing."""
        await self.ask(method, params, lambda _raw: None)

    def check(self, entry: AnyEntry) -> None:
        if isinstance(entry.params, (list, tuple)):
            raise UsageError(f"{entry.method}: params by position.", "MCP has them by name only", "use a dict")
        if isinstance(entry.params, Struct):
            entry.params = msgspec.to_builtins(entry.params)
        if entry.extra is None:
            entry.extra = Extra()

    async def prepare(self, entry: AnyEntry) -> None:
        if entry.method != "tools/call":
            entry.key = entry.key if isinstance(entry.key, str) else None
            entry.safe = entry.method.startswith(_READS) or entry.query is True
        else:
            params = entry.params or {}
            name, arguments = str(params.get("name")), params.get("arguments")
            confirm = self._settings.confirm
            try:
                tool = await self.lists.tool(name, entry.timeout) if self._settings.trust or confirm else None
                if name in self.lists.left_out:
                    raise NotSent(f"the tool {name!r} cannot be called over HTTP: its x-mcp-header are against the rules")
                is_trusted = tool is not None and self.trusts(tool)
                # 1. Confirmation: the word of a server that is not trusted counts against a tool, and never for it.
                if confirm is not None:
                    if tool is not None and is_trusted:
                        is_asked = tool.destructive
                    else:
                        is_asked = self._settings.confirm_unknown or (
                            tool is not None and tool.annotations is not None and tool.destructive
                        )
                    if is_asked:
                        if not await settled(confirm(tool or Tool(name), arguments or {})):
                            raise Declined(f"{name} was not confirmed")
                        entry.deadline = self._options.clock.time() + entry.timeout  # a person may have taken their time
            except (CallFailed, RpcError) as error:
                entry.fail(error)
                return
            # 2. The key: the caller's, or the model's among the arguments, or a new one where that helps.
            if not isinstance(entry.key, str):
                own = arguments.get(KEY) if isinstance(arguments, dict) else None
                if isinstance(own, str) and self.honours_keys:
                    entry.key = own
                else:
                    entry.key = mint_key() if entry.key is True or (entry.key is None and self.honours_keys) else None
            is_harmless = tool is not None and is_trusted and tool.idempotent
            entry.safe = entry.query is True or is_harmless or (entry.key is not None and self.honours_keys)
        # A program that traces has imported OpenTelemetry. The span begins here, where the caller's one is the current one.
        if "opentelemetry.trace" in sys.modules and self._span is not False:
            try:
                if self._span is None:
                    from wirecall.tracing import ClientCall

                    self._span = ClientCall
                entry.extra.trace = self._span(
                    entry.method,
                    entry.params,
                    revision=None if self.revision is None else self.revision.name,
                    url=self.link.url,
                    baggage=self._settings.baggage,
                )
            except Exception as error:  # an OpenTelemetry that is too old must not stop a call
                self._span = False
                logger.warning("calls are not traced: %s", error)

    def ended(self, entry: AnyEntry) -> None:
        extra: Extra | None = entry.extra
        if extra is not None and extra.trace is not None:
            is_answered = entry.is_settled or (extra.is_background and extra.task is not None)
            error = entry.error if is_answered else asyncio.CancelledError()
            extra.trace.end(entry.id, error, entry.raw)
            extra.trace = None

    def trusts(self, tool: Tool) -> bool:
        trust = self._settings.trust
        return bool(trust(tool)) if callable(trust) else trust

    async def only_reads(self, entry: AnyEntry) -> bool:
        if await super().only_reads(entry):
            return True
        # Every call of a tool has a key here. Its annotations tell, trusted or not: a false one only lets it repeat less.
        with suppress(WirecallError):
            left = max(entry.deadline - self._options.clock.time(), LEAST)
            tool = await self.lists.tool(str((entry.params or {}).get("name")), left)
            return tool is not None and tool.read_only
        return False

    def params(self, entry: AnyEntry) -> Any:
        members: JsonObject = {**entry.params} if entry.params else {}
        extra: Extra = entry.extra
        meta = self.envelope
        if not extra.tasks and self.revision is not None and self.is_stateless:
            meta = self.describe(self.revision, tasks=False)
        if extra.trace is not None and (told := extra.trace.meta):
            meta = {**meta, **told}
        if own := members.get("_meta"):
            meta = {**meta, **own}
        if entry.key is not None and entry.method == "tools/call":
            meta = {**meta, KEY_META: entry.key}
        if extra.follower is not None:
            meta = {**meta, "progressToken": entry.id}
            self._inbox.followers[entry.id] = extra.follower
        if meta is not self.envelope:
            members["_meta"] = meta
        elif meta:
            members["_meta"] = self._sealed
        if extra.round:
            members |= extra.round
        return members or UNSET

    def read(self, entry: AnyEntry) -> Any:
        extra: Extra = entry.extra
        if self.is_stateless:
            try:
                is_tool, extra.asked = entry.method == "tools/call", None
                try:
                    typed = decode_typed(entry.raw) if is_tool else _kind_of(entry.raw)
                except msgspec.ValidationError:  # of another member: `extra.read` reports it, if the result is complete
                    typed = _kind_of(entry.raw)
                kind = typed.result_type
                extra.answer = typed if isinstance(typed, TypedAnswer) else None
                if kind == "complete":
                    pass
                elif kind == "input_required" and entry.method in _MAY_ASK and extra.task is None:
                    extra.asked = _asked_in(entry.raw)
                elif kind == "task" and is_tool and extra.tasks and self._settings.tasks and extra.task is None:
                    state = read_state(entry.raw)
                    extra.task = Task(self, entry, state.id, state)
                    entry.replayed = entry.replayed or (state.meta or {}).get(REPLAYED_META) is True
                # A result of an unknown type is invalid (2026-07-28, basic); so is a task where it may not be one. But some
                # servers answer `tasks/get` with that type, as two examples of SEP-2663 do.
                elif kind != "task" or entry.method != "tasks/get":
                    raise BadAnswer(f"{entry.method}: a result of the unknown type {kind[:40]!r}")
            except UNREADABLE as error:
                raise BadAnswer(f"{entry.method}: the result cannot be read: {error}") from None
            if kind != "complete" and entry.method != "tasks/get":
                entry.is_settled = False  # the result is still to come
                return None
        return super().read(entry) if extra.read is None else extra.read(entry)

    async def goes_on(self, entry: AnyEntry) -> bool:
        extra: Extra = entry.extra
        error, task = entry.error, extra.task
        if task is not None:
            if not extra.is_background:
                try:
                    async for _ in task.watch(entry.deadline, entry.timeout):
                        pass
                except BaseException as failure:
                    if not isinstance(failure, TaskGone):
                        self._cancel(task)
                    if not isinstance(failure, WirecallError):
                        raise
                    entry.fail(failure)
            return False
        if error is None and extra.asked is None:
            return False
        if extra.rounds >= ROUNDS:
            if error is None:
                entry.fail(BadAnswer(f"{entry.method}: the server goes on asking after {ROUNDS} rounds"))
            return False
        extra.rounds += 1
        if error is None and extra.asked is not None:
            asked = extra.asked
            try:
                answers = await self.answers(asked.input_requests)
            except BadAnswer as refusal:
                entry.fail(refusal)
                return False
            # The state goes back exactly as it came, and only if there is one (2026-07-28, `requestState`).
            state = {} if asked.request_state is UNSET else {"requestState": asked.request_state}
            extra.round = {**({"inputResponses": answers} if answers else {}), **state}
            entry.deadline = self._options.clock.time() + entry.timeout  # a person may have taken their time
            return True
        if isinstance(error, VisitRequired) and self.revision is not None and self.revision.has("visit required"):
            return await self._visit(entry, error)
        if extra.is_mended:
            return False
        extra.is_mended = True
        if isinstance(error, HeaderMismatch):
            if entry.method != "tools/call" or not self.lists.has_headers:
                return False
            self.lists.forget("tools")
            with suppress(WirecallError):
                await self.lists.read(Tool)
                return True
        if isinstance(error, UnknownVersion):
            listed = common(error, STATELESS)
            if listed and self.pinned in (None, listed[-1]):
                self.revision = self.link.revision = listed[-1]
                self._seal()
                return True
        return False

    async def answers(self, asked: Mapping[str, InputRequest]) -> JsonObject:
        """Return the host's answers to questions, by key."""
        if len(asked) > QUESTIONS:
            raise BadAnswer(f"the server asks {len(asked)} questions at once; {QUESTIONS} are allowed")
        try:
            return {key: await self._settings.answer(question.method, question.params) for key, question in asked.items()}
        except RpcError as refusal:
            raise BadAnswer(f"the server asks what this client cannot answer: {refusal}") from None

    async def _visit(self, entry: AnyEntry, error: VisitRequired) -> bool:
        """Send the user to the pages that a call needs; return whether to send the call again."""
        extra: Extra = entry.extra
        if self._settings.elicit_url is None:
            return False
        # Step 1: a visit that the user has agreed to, and that is not complete yet.
        pending = [complete for complete in extra.visits.values() if not complete.is_set()]
        if pending and not extra.has_waited:
            extra.has_waited = True
            with suppress(TimeoutError):
                async with asyncio.timeout(entry.timeout):
                    for complete in pending:
                        await complete.wait()
            entry.deadline = self._options.clock.time() + entry.timeout
            return True
        # Step 2: pages that the user has not been asked about yet.
        try:
            wanted = msgspec.convert(error.data, _Visits).elicitations
            new = [visit for visit in wanted if visit.elicitation_id not in extra.visits]
            if len(new) > QUESTIONS:
                raise InvalidParams(f"{len(new)} visits at once; {QUESTIONS} are allowed")
            for visit in new:
                # Before the handler is asked: the server may report the end of a visit while the handler still waits for it.
                id = visit.elicitation_id
                extra.visits[id] = self._inbox.visits.setdefault(id, asyncio.Event())
                agreed = await self._settings.answer("elicitation/create", Raw(encode(visit)))
                if agreed["action"] != "accept":
                    return False
        except msgspec.ValidationError as problem:
            entry.fail(BadAnswer(f"{entry.method}: the server requires a visit and does not say where: {problem}", ran="no"))
            return False
        except RpcError as refusal:
            entry.fail(BadAnswer(f"{entry.method}: the server asks what this client cannot answer: {refusal}", ran="no"))
            return False
        extra.has_waited = False
        entry.deadline = self._options.clock.time() + entry.timeout  # a person may have taken their time
        return bool(new)

    async def set_log_level(self, level: str) -> None:
        """Ask for log messages from this level upwards, in this session and the next."""
        self._level = level
        if self.is_stateless:
            self._seal()
        else:
            await self.tell("logging/setLevel", {"level": level})

    # --- tasks -------------------------------------------------------------------------------------------------------

    def task(self, entry: "Entry[T]", id: str) -> "Task[T]":
        """Return the task of an id that was noted earlier; its result settles the entry."""
        if not 0 < len(id) <= LONGEST_ID:
            raise UsageError(f"The id of a task must have 1 to {LONGEST_ID} characters, got {len(id)}.")
        if not self._settings.tasks or (self.revision is not None and not self.is_stateless):
            raise UsageError(
                "This client has no tasks.", "they need MCP 2026-07-28", "connect without tasks=False and revision="
            )
        entry.extra.task = task = Task(self, entry, id)
        return task

    async def stream_of(self, id: str, left: float) -> Changes | None:
        """Return a stream on which the server sends the states of a task; None if it does not agree to it."""
        if not self._sends_states or len(self.listening.tasks()) >= STREAMS:
            return None
        stream = Changes((), (), self.listening, task=id)
        try:
            async with asyncio.timeout(min(left, AGREEING)):
                await stream.__aenter__()
        except (RpcError, CallFailed, TimeoutError) as error:
            self._sends_states = isinstance(error, (NotSent, ConnectionLost))
            return None
        honoured = (stream.honoured or {}).get("taskIds")
        if isinstance(honoured, list) and id in honoured:
            return stream
        self._sends_states = False
        await stream.__aexit__()
        return None

    def _cancel(self, task: "Task[Any]") -> None:
        """Cancel a task beside everything else: the caller that waited for it may be in the middle of being cancelled."""

        async def cancel() -> None:
            with suppress(WirecallError):
                await self.ask("tasks/cancel", {"taskId": task.id}, lambda _raw: None, FAREWELL)

        leaving = asyncio.get_running_loop().create_task(cancel())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    # --- what the server sends on its own ----------------------------------------------------------------------------

    def changes(self, lists: Iterable[Kind], uris: Iterable[str]) -> Changes:
        """Return a block that listens to changes of these lists and of these resources."""
        return Changes(lists, uris, self.listening)

    async def listen_to(self, uris: Iterable[str]) -> None:
        """Report changes of all lists and of these resources to `on_change`; begin anew before the old stream ends."""
        lists: tuple[Kind, ...] = ("tools", "prompts", "resources") if self.is_stateless else ()
        old, self._subscribed = self._subscribed, await self.changes(lists, uris).__aenter__()
        if old is not None:
            await old.__aexit__()

    def subscribed(self) -> set[str]:
        """Return the resources whose changes `on_change` gets."""
        if self._settings.on_change is None:
            raise UsageError(
                "There is no callback for changes.", fix="connect(..., on_change=...), or use client.listen(uris=...)"
            )
        return set(self._subscribed.uris) if self._subscribed else set()
