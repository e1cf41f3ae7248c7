"""MCP as a dialect of the client: the handshake, what messages carry, the rounds of a call.

    begin -> handshake -> call: params (envelope, key, progress, round) -> answer
                                  ^-------- questions answered, headers fixed, version replaced
                                  ---------'

At 2026-07-28 a result may be a question (`input_required`): the host answers, and the client sends
the same call again with the answers, the server's unchanged state, a new id and the same key. After
a refusal for a missing header (-32020) the client lists the tools again; after one for the version
(-32022) it takes a version that the server lists. It does both once, and both are safe: nothing has
run. The result of a tool may also be a task: the call waits until the task ends (`tasks`), and
cancels it if its caller stops waiting.

At 2025-11-25 a server may refuse a call until the user has visited a page (-32042). The host's
`elicit_url` leads the user there, and the client sends the call again at once. If the server
refuses it again, the client waits until the server reports that the visit is complete
(`notifications/elicitation/complete`), at most for the call's timeout, and tries again.

For every call the conversation decides whether to confirm it first, whether it has a key, and
whether it may be repeated:

1. Lists, resources, prompts and completions only read, and are repeated.
2. A tool is repeated if it is called with an idempotency key and the server declares that it
   honours keys; for such a server the client mints a key for every call. For any other server a key
   is harmless, but does not allow repetition.
3. A tool is repeated if its annotations mark it as read-only or idempotent, and they are trusted
   (`trust=`).
4. `confirm=` is awaited before a call of a destructive tool; if it declines, nothing is sent. Hints
   of an untrusted server can only make a tool more dangerous: with `confirm_unknown=True` all its
   tools are confirmed, even those that it does not mark as destructive.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.aio import settled
from wirecall.client.delivery import (
    LEAST,
    Dialect,
    Options,
    Outgoing,
    asked_pause,
    decode_members,
    may_help,
    mint_key,
)
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
from wirecall.mcp.client.inbox import (
    QUESTIONS,
    ROUNDS,
    Changes,
    Follower,
    Host,
    Inbox,
    InputRequest,
    Kind,
    Listening,
)
from wirecall.mcp.client.links import FAREWELL, McpHttpLink, McpLink
from wirecall.mcp.client.negotiate import Agreed, Handshake, common
from wirecall.mcp.client.results import (
    Lists,
    Tool,
    TypedAnswer,
    decode_typed,
    read_called,
    read_contents,
    referred_value,
)
from wirecall.mcp.client.tasks import LONGEST_ID, Task, read_state
from wirecall.mcp.revisions import HANDSHAKE, REVISIONS, STATELESS, Revision
from wirecall.mcp.types import (
    AFTER_META,
    KEY_META,
    KEYS_CAPABILITY,
    PREFIX,
    REFS_CAPABILITY,
    REFS_META,
    REPLAYED_META,
    TASKS,
    Embedded,
    checked_extensions,
    declared_extensions,
)
from wirecall.protocol.keys import likely_key, may_have_key, own_key
from wirecall.protocol.messages import UNREADABLE, JsonObject, decode_value, encode
from wirecall.version import __version__

if TYPE_CHECKING:
    from wirecall.server.references import ReferenceLimits
    from wirecall.tracing import ClientCall

T = TypeVar("T")
Trust: TypeAlias = bool | Callable[[Tool], bool]
Confirm: TypeAlias = Callable[[Tool, JsonObject], bool | Awaitable[bool]]

ARRAY_PROBE = 2.0  # seconds for a server on a pipe to answer its first array
BEGINNINGS = 3  # max attempts for each message of a handshake
AGREEING = 2.0  # seconds for a server to agree to send the states of a task
STREAMS = 16  # max tasks whose states the server sends: each needs a connection; others are polled
_OLD = (400, 404, 405)  # how a server of 2024-11-05 answers a POST to its stream
_MODERN = (HeaderMismatch, NotCapable, UnknownVersion)  # errors that only newer servers have
_MAY_ASK = frozenset({"tools/call", "prompts/get", "resources/read"})
# Methods that only read, or that are safe to repeat.
_READS = (
    "tools/list",
    "prompts/",
    "resources/",
    "completion/",
    "server/discover",
    "ping",
    "logging/",
    "tasks/",
)


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
    # Older servers omit it (2026-07-28, basic).
    result_type: str = "complete"


class Extra(Struct):
    """The data of an MCP entry in addition to its params."""

    # Makes the result from the entry.
    read: Callable[[AnyEntry], Any] | None = None
    # Raise an answer that is an error.
    check: bool = True
    follower: Follower | None = None
    # The call may become a task.
    tasks: bool = True
    # The last result, if it is a tool's and already decoded.
    answer: TypedAnswer | None = None
    # The last result, if it is a question.
    asked: _Asked | None = None
    # `inputResponses` and `requestState` of this attempt.
    round: JsonObject = {}
    rounds: int = 0
    # The client has tried to remove the reason of a refusal.
    is_mended: bool = False
    # The caller does not wait for the task.
    is_background: bool = False
    # The task that the call has become.
    task: "Task[Any] | None" = None
    # Visits that the user accepted, by id. An event is set when its visit is complete.
    visits: dict[str, asyncio.Event] = {}
    # The client has waited for the pending visits.
    has_waited: bool = False
    trace: "ClientCall | None" = None


_kind_of = msgspec.json.Decoder(_Kind).decode
_asked_in = msgspec.json.Decoder(_Asked).decode


class Settings(Host, frozen=True, kw_only=True):
    """The options of a client of MCP, with the handlers of its host; `connect` explains them."""

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
            raise UsageError(
                f"revision={self.revision!r} is not known.", "MCP has five", f"use one of {known}"
            )
        msgspec.structs.force_setattr(self, "extensions", checked_extensions(self.extensions))
        if TASKS in self.extensions:
            raise UsageError(
                f"{TASKS} is not for extensions=.",
                "the client declares it",
                "use tasks=False, or drop it",
            )


class Conversation(Dialect):
    """The client's side of one conversation."""

    def __init__(self, link: McpLink, settings: Settings, options: Options) -> None:
        # The only revision that the client speaks. None: any.
        self.pinned: Revision | None = None
        if settings.revision is not None:
            self.pinned = REVISIONS[settings.revision]
        # None: not negotiated yet.
        self.revision: Revision | None = None
        # The server declares that it runs a tool once per key.
        self.honours_keys = False
        self.server: JsonObject = {}
        self.capabilities: JsonObject = {}
        self.instructions: str | None = None
        self.lists = Lists(self.ask, options.clock.time, options.timeout)
        self.listening = Listening(self)
        # Tasks with a waiting caller.
        self.waiting: list[Task[Any]] = []
        self.is_over = False
        # The server has refused references that it had announced.
        self._has_lost_references = False
        # A person sees the arguments, so references in them are filled before.
        self.shows_params = settings.confirm is not None
        self._options = options
        self._settings = settings
        self._me = Raw(
            encode(dict(settings.identity or {"name": "wirecall", "version": __version__}))
        )
        self._has_tried_arrays = False
        # The class of spans. None: no call was traced yet. False: calls cannot be traced.
        self._span: type[ClientCall] | Literal[False] | None = None
        self._level: str | None = None
        self._inbox = Inbox(self, settings)
        self._subscribed: Changes | None = None
        # False once the server has failed to agree to send the states of a task.
        self._sends_states = True
        # They cancel tasks without a waiting caller.
        self._leaving: set[asyncio.Task[None]] = set()
        self._seal()
        self._speak_on(link)

    def extension(self, id: str) -> JsonObject | None:
        """Return the server's settings of an extension; None if the server has not declared it."""
        if self.revision is None:
            return None
        return declared_extensions(self.capabilities, self.revision).get(id)

    def _speak_on(self, link: McpLink) -> None:
        self.link = link
        link.on_message = self._inbox.receive
        link.marks = self.lists.marks_of

    # --- beginning and end ------------------------------------------------------------------------

    async def begin(self) -> None:
        """Agree on a revision, and listen to all lists if `on_change` was given."""
        try:
            agreed = await Handshake(self).agree()
        except (Refused, RpcError) as refusal:
            if self.link.older is None or not self._may_be_old(refusal):
                raise
            await self._use_older(self.link.older(), refusal)
            agreed = await Handshake(self).initialize(self.pinned or HANDSHAKE[-1])
        await self._adopt(agreed)
        if self._settings.on_change is not None and self.is_stateless:
            await self.listen_to(())

    def _may_be_old(self, refusal: Refused | RpcError) -> bool:
        """Return whether a server that refuses the handshake may be one of 2024-11-05.

        Such a server has another transport.
        """
        if isinstance(refusal, _MODERN) or (self.pinned is not None and self.pinned.is_stateless):
            return False
        return not isinstance(refusal, Refused) or refusal.status in _OLD

    async def _use_older(self, older: McpLink, refusal: Refused | RpcError) -> None:
        """Use the link of 2024-11-05 from now on; raise the refusal if it cannot be opened."""
        try:
            await older.open()
        except CallFailed:
            raise refusal from None
        newer = self.link
        older.url = newer.url
        self._speak_on(older)
        self.delivery.link = self._options.wrap(older)
        await newer.aclose()

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
        return {
            "protocolVersion": revision.name,
            "capabilities": capabilities,
            "clientInfo": self._me,
        }

    def describe(self, revision: Revision, tasks: bool = True) -> JsonObject:
        """Return the envelope of 2026-07-28.

        It declares that the client can wait for tasks, unless `tasks` is False.
        """
        capabilities = self._settings.capabilities(revision)
        if tasks and self._settings.tasks:
            capabilities["extensions"] = {**self._settings.extensions, TASKS: {}}
        envelope: JsonObject = {
            f"{PREFIX}protocolVersion": revision.name,
            f"{PREFIX}clientCapabilities": Raw(encode(capabilities)),
            f"{PREFIX}clientInfo": self._me,
        }
        if self._level is not None:
            envelope[f"{PREFIX}logLevel"] = self._level
        return envelope

    def _seal(self) -> None:
        """Cache the `_meta` of every request.

        Its encoded form is for requests that add nothing to it.
        """
        # The negotiated revision has an envelope in every request instead of sessions.
        self.is_stateless = False
        self.envelope: JsonObject = {}
        if self.revision is not None and self.revision.is_stateless:
            self.is_stateless = True
            self.envelope = self.describe(self.revision)
        self._sealed = Raw(encode(self.envelope))

    async def _adopt(self, agreed: Agreed) -> None:
        """Use the negotiated revision."""
        revision = agreed.revision
        self.revision = self.link.revision = revision
        self._seal()
        self.has_rounds = revision.is_stateless or revision.has("visit required")
        self.server = agreed.server
        self.capabilities = agreed.capabilities
        self.instructions = agreed.instructions
        experimental = agreed.capabilities.get("experimental")
        self.honours_keys = isinstance(experimental, dict) and KEYS_CAPABILITY in experimental
        self.lists.has_headers = isinstance(self.link, McpHttpLink) and revision.has(
            "http headers repeat the body"
        )
        # Else keep what was learned about arrays.
        if self.delivery.arrays.legal or not revision.has_arrays:
            has = "has no"
            if revision.has_arrays:
                has = "has"
            self.delivery.arrays = Arrays(revision.has_arrays, f"MCP {revision.name} {has} arrays")
        if revision.is_stateless:
            return
        # Before this a server should send only ping requests (2025-03-26, lifecycle,
        # initialization).
        await self.send(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')
        self.link.renew = self._renew
        self.link.restore = self._restore
        await self.link.listen()

    async def _renew(self) -> None:
        """Repeat the handshake with a new server or session."""
        revision = self.revision
        assert revision is not None
        await self._adopt(await Handshake(self).initialize(revision))
        await self._restore()

    async def _restore(self) -> None:
        """Restore the log level and the subscriptions, and forget what may have changed."""
        revision = self.revision
        assert revision is not None
        self.lists.forget()
        again = [("resources/subscribe", {"uri": uri}) for uri in self.listening.uris()]
        if self._level is not None:
            again.insert(0, ("logging/setLevel", {"level": self._level}))
        for method, params in again:
            with suppress(RpcError, CallFailed):  # its failure must not fail the waiting call
                await self.request(method, params, revision)
        self.listening.report_everything()

    async def request(self, method: str, params: JsonObject, revision: Revision | None) -> Raw:
        """Send a request below retries and wrappers: a handshake must not wait for itself.

        Return the result.
        """
        self.link.revision = revision
        clock = self._options.clock
        retry = self._options.retry
        attempt = 1
        deadline = clock.time() + self._options.timeout
        while True:
            entry = await self._post(method, params, self._options.timeout)
            error = entry.error
            if error is None:
                return entry.raw
            pause = retry.pause(attempt, asked_pause(error), self._options.chance())
            may_go = (
                not self.link.is_pipe and attempt < BEGINNINGS and clock.time() + pause < deadline
            )
            if not may_go or not may_help(error) or isinstance(error, TimedOut):
                raise error
            await clock.sleep(pause)
            attempt += 1

    async def _post(
        self, method: str, params: Any, timeout: float, *, array: bool = False
    ) -> AnyEntry:
        """Send one request, once and in any session; return its settled entry."""
        exchange = self.message(method, params, timeout, array=array)

        async def send(exchange: Exchange) -> None:
            if await self.link.post(exchange):
                raise ConnectionLost("the server does not know the session it has just begun")

        await self.delivery.carry(exchange, timeout, send)
        return exchange.entries[0]

    def message(self, method: str, params: Any, timeout: float, *, array: bool = False) -> Exchange:
        """Return a message with one request, to be sent unchanged."""
        entry: AnyEntry = Entry(method, None, lambda _entry: None, timeout=timeout)
        entry.id = self.delivery.next_id()
        message: Any = Outgoing(method, params, entry.id)
        if array:
            message = [message]
        return Exchange(encode(message), [entry], array)

    async def send(self, message: bytes) -> None:
        """Send a message without an answer.

        The server must read it within the timeout of a call.
        """
        seconds = self._options.timeout
        try:
            async with asyncio.timeout(seconds):
                await self.link.send(message)
        except TimeoutError:
            raise TimedOut(f"the server did not take a message within {seconds:g} s") from None

    async def try_arrays(self, entries: Sequence[AnyEntry]) -> None:
        """Find out with a ping whether a server on a pipe silently drops arrays.

        A lost ping does no harm.
        """
        arrays = self.delivery.arrays
        if not arrays.legal or not self.link.is_pipe or self._has_tried_arrays or self.honours_keys:
            return
        entry = await self._post("ping", UNSET, ARRAY_PROBE, array=True)
        self._has_tried_arrays = True
        if not entry.ok:
            arrays.legal = False
            arrays.reason = "the server did not answer an array"

    # --- calls ------------------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        params: JsonObject | None,
        read: Callable[[Raw], T],
        timeout: float | None = None,
    ) -> T:
        """Call a method of MCP, and return the result that `read` makes."""
        given = self._options.timeout if timeout is None else timeout
        extra = Extra(read=lambda entry: read(entry.raw))
        entry: Entry[T] = Entry(method, params, self.read, timeout=given, extra=extra)
        await self.delivery.run(entry)
        return entry.result()

    async def read_resource(self, uri: str, timeout: float | None = None) -> list[Embedded]:
        """Return the contents of a resource: cached ones while they are fresh, else new ones."""
        kept = self.lists.contents(uri)
        if kept is not None:
            return kept
        before = self.lists.changes

        def read(entry: AnyEntry) -> list[Embedded]:
            # A result that depends on the user's answers must not be cached (2026-07-28,
            # server/utilities/caching, "Cache Key").
            if entry.extra.round:
                return read_contents(entry.raw)
            return self.lists.keep(uri, entry.raw, before)

        extra = Extra(read=read)
        given = self._options.timeout if timeout is None else timeout
        entry: Entry[list[Embedded]] = Entry(
            "resources/read", {"uri": uri}, self.read, timeout=given, extra=extra
        )
        await self.delivery.run(entry)
        return entry.result()

    async def perform(self, method: str, params: JsonObject) -> None:
        """Call a method of MCP whose result is empty."""
        await self.ask(method, params, lambda _raw: None)

    def check(self, entry: AnyEntry) -> None:
        if isinstance(entry.params, (list, tuple)):
            raise UsageError(
                f"{entry.method}: params by position.", "MCP has them by name only", "use a dict"
            )
        if isinstance(entry.params, Struct):
            entry.params = msgspec.to_builtins(entry.params)
        if entry.extra is None:
            entry.extra = Extra()

    async def prepare(self, entry: AnyEntry) -> None:
        if entry.method != "tools/call":
            if not isinstance(entry.key, str):
                entry.key = None
            entry.safe = entry.method.startswith(_READS) or entry.query is True
        else:
            is_harmless = False
            try:
                if self._settings.trust or self._settings.confirm:
                    is_harmless = await self._judge(entry)
                elif self.lists.left_out:
                    self._check_callable(str((entry.params or {}).get("name")))
            except (CallFailed, RpcError) as error:
                entry.fail(error)
                return
            if not isinstance(entry.key, str):
                arguments = (entry.params or {}).get("arguments")
                if type(arguments) is dict and may_have_key(arguments):
                    await self._learn_place_of_key(entry)
                entry.key = self._new_key(entry)
            entry.safe = (
                entry.query is True or is_harmless or (entry.key is not None and self.honours_keys)
            )
        # A program that traces has imported OpenTelemetry.
        if "opentelemetry.trace" in sys.modules and self._span is not False:
            self._begin_span(entry)

    async def _judge(self, entry: AnyEntry) -> bool:
        """Confirm the call of a tool, if it needs that; return whether it is safe to repeat it.

        Raises `Declined` if a person does not confirm it.
        """
        params = entry.params or {}
        name = str(params.get("name"))
        tool = await self.lists.tool(name, entry.timeout)
        if tool is not None and tool.name != name:
            name = tool.name
            entry.params = {**params, "name": name}
        self._check_callable(name)
        is_trusted = tool is not None and self.trusts(tool)
        confirm = self._settings.confirm
        if confirm is not None and self._needs_confirmation(tool, is_trusted):
            if not await settled(confirm(tool or Tool(name), params.get("arguments") or {})):
                raise Declined(f"{name} was not confirmed")
            # A person may have taken their time.
            entry.deadline = self._options.clock.time() + entry.timeout
        return tool is not None and is_trusted and tool.idempotent

    def _check_callable(self, name: str) -> None:
        """Raise NotSent for a tool that `tools/list` describes wrongly."""
        if name in self.lists.left_out:
            raise NotSent(
                f"the tool {name!r} cannot be called over HTTP: "
                "its x-mcp-header are against the rules"
            )

    def _needs_confirmation(self, tool: Tool | None, is_trusted: bool) -> bool:
        """Return whether a person has to confirm the call of a tool.

        The hints of an untrusted server count against a tool, and never for it.
        """
        if tool is not None and is_trusted:
            return tool.destructive
        if self._settings.confirm_unknown:
            return True
        return tool is not None and tool.annotations is not None and tool.destructive

    async def _learn_place_of_key(self, entry: AnyEntry) -> None:
        """Read the list of tools if the arguments of a call seem to have the key inside them."""
        params = entry.params or {}
        arguments = params.get("arguments")
        if self.lists.are_known or not self.honours_keys:
            return
        if own_key(arguments) is None and likely_key(arguments) is not None:
            # Without the list, the call is sent with a second key, and the server explains it.
            with suppress(CallFailed, RpcError):
                await self.lists.tool(str(params.get("name")), entry.timeout)

    def _new_key(self, entry: AnyEntry) -> str | None:
        """Return the key of a tool call whose caller named none.

        It is the model's, in the arguments, or a new one if that helps.
        """
        if self.honours_keys:
            params = entry.params or {}
            path: tuple[str, ...] = ()
            if self.lists.key_paths:
                path = self.lists.key_path_of(str(params.get("name")))
            own = own_key(params.get("arguments"), path)
            if own is not None:
                return own
            if entry.key is None:
                return mint_key()
        if entry.key is True:
            return mint_key()
        return None

    def _begin_span(self, entry: AnyEntry) -> None:
        """Begin the span of a call, while the caller's span is the current one."""
        revision = None
        if self.revision is not None:
            revision = self.revision.name
        try:
            if self._span is None:
                from wirecall.tracing import ClientCall

                self._span = ClientCall
            assert self._span
            entry.extra.trace = self._span(
                entry.method,
                entry.params,
                revision=revision,
                url=self.link.url,
                baggage=self._settings.baggage,
            )
        except Exception as error:  # an outdated OpenTelemetry must not stop a call
            self._span = False
            logger.warning("calls are not traced: %s", error)

    def ended(self, entry: AnyEntry) -> None:
        extra: Extra | None = entry.extra
        if extra is not None and extra.trace is not None:
            is_answered = entry.is_settled or (extra.is_background and extra.task is not None)
            error: BaseException | None = asyncio.CancelledError()
            if is_answered:
                error = entry.error
            extra.trace.end(entry.id, error, entry.raw)
            extra.trace = None

    def trusts(self, tool: Tool) -> bool:
        trust = self._settings.trust
        if callable(trust):
            return bool(trust(tool))
        return trust

    async def only_reads(self, entry: AnyEntry) -> bool:
        if await super().only_reads(entry):
            return True
        # Every tool call has a key here. Use its annotations, trusted or not: a false one only
        # causes fewer repeats.
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
        if extra.trace is not None and (traced := extra.trace.meta):
            meta = {**meta, **traced}
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
            extra.asked = None
            extra.answer = None
            try:
                try:
                    if entry.method == "tools/call":
                        extra.answer = decode_typed(entry.raw)
                        kind = extra.answer.result_type
                    else:
                        kind = _kind_of(entry.raw).result_type
                # Another member is malformed. If the result is complete, `extra.read` reports it.
                except msgspec.ValidationError:
                    kind = _kind_of(entry.raw).result_type
                if kind != "complete":
                    self._read_incomplete(entry, kind)
            except UNREADABLE as error:
                raise BadAnswer(f"{entry.method}: the result cannot be read: {error}") from None
            if kind != "complete" and entry.method != "tasks/get":
                entry.is_settled = False  # the result is still pending
                return None
        if extra.read is None:
            return super().read(entry)
        return extra.read(entry)

    def _read_incomplete(self, entry: AnyEntry, kind: str) -> None:
        """Read a result that is a question or a task; raise BadAnswer for any other type."""
        extra: Extra = entry.extra
        if kind == "input_required" and entry.method in _MAY_ASK and extra.task is None:
            extra.asked = _asked_in(entry.raw)
            return
        if kind == "task":
            may_be_task = extra.tasks and self._settings.tasks and extra.task is None
            if entry.method == "tools/call" and may_be_task:
                state = read_state(entry.raw)
                extra.task = Task(self, entry, state.id, state)
                entry.replayed = entry.replayed or (state.meta or {}).get(REPLAYED_META) is True
                return
            # Some servers answer `tasks/get` with that type, as two examples of SEP-2663 do.
            if entry.method == "tasks/get":
                return
        # A result of an unknown type is invalid (2026-07-28, basic); so is a task where none is
        # allowed.
        raise BadAnswer(f"{entry.method}: a result of the unknown type {kind[:40]!r}")

    # --- references -------------------------------------------------------------------------------

    async def reference_limits(self, timeout: float) -> "ReferenceLimits | None":
        experimental = self.capabilities.get("experimental")
        is_announced = isinstance(experimental, dict) and REFS_CAPABILITY in experimental
        if self.revision is None or not self.revision.has_arrays or not is_announced:
            return None
        if self._has_lost_references:
            return None
        from wirecall.server.references import LIMITS

        return LIMITS

    def forget_references(self) -> None:
        self._has_lost_references = True

    def linked(self, entry: AnyEntry) -> Any:
        """Return the message of an entry with references, which are in its `_meta` (R13)."""
        assert entry.links is not None
        params = self.params(entry)
        meta = params.get("_meta", {})
        if isinstance(meta, Raw):
            meta = decode_members(meta)
        if entry.links.refs:
            refs = {
                place: {"id": target.id, "path": _path_in(target, path)}
                for place, target, path in entry.links.refs
            }
            meta = {**meta, REFS_META: refs}
        if entry.links.after:
            meta = {**meta, AFTER_META: [target.id for target in entry.links.after]}
        return Outgoing(entry.method, {**params, "_meta": meta}, entry.id)

    def referred(self, entry: AnyEntry, path: tuple[str, ...]) -> bytes:
        if entry.method != "tools/call":
            return bytes(entry.raw)
        assert self.revision is not None
        return referred_value(entry.raw, path, self.revision)

    def failure(self, entry: AnyEntry) -> WirecallError | None:
        # With `check=False`, the answer of a tool that failed is not an error of the entry.
        if entry.error is None and entry.method == "tools/call":
            try:
                return read_called(entry.raw).error()
            except BadAnswer as error:  # nothing has read the result before
                return error
        return super().failure(entry)

    def filled(self, params: bytes) -> Any:
        return decode_value(params)

    @property
    def can_elicit(self) -> bool:
        """Whether a server can ask this client's user."""
        return self._settings.elicit is not None

    @property
    def may_have_batch_tool(self) -> bool:
        """Whether a batch could be sent through a tool of the server (A13).

        A server with such a tool honours keys, so no other server is asked for its tools.
        """
        if self.revision is None or self.revision.has_arrays or not self.honours_keys:
            return False
        return not self.lists.are_known or self.lists.batch_tool() is not None

    async def batch_tool(self, timeout: float) -> Tool | None:
        """Return the tool of the server that calls other tools; None if it has none."""
        if not self.lists.are_known:
            with suppress(CallFailed, RpcError):
                await self.lists.read(Tool, timeout)
        return self.lists.batch_tool()

    # --- rounds -----------------------------------------------------------------------------------

    async def next_round(self, entry: AnyEntry) -> bool:
        extra: Extra = entry.extra
        error = entry.error
        if extra.task is not None:
            if not extra.is_background:
                await self._await_task(entry, extra.task)
            return False
        if error is None and extra.asked is None:
            return False
        if extra.rounds >= ROUNDS:
            if error is None:
                entry.fail(
                    BadAnswer(f"{entry.method}: the server still asks after {ROUNDS} rounds")
                )
            return False
        extra.rounds += 1
        if error is None and extra.asked is not None:
            return await self._answer_questions(entry, extra.asked)
        if isinstance(error, VisitRequired) and (
            self.revision is not None and self.revision.has("visit required")
        ):
            return await self._visit(entry, error)
        if extra.is_mended:
            return False
        extra.is_mended = True
        return await self._mend(entry)

    async def _await_task(self, entry: AnyEntry, task: "Task[Any]") -> None:
        """Wait until a task settles the entry. If this ends before that, cancel the task."""
        try:
            async for _ in task.watch(entry.deadline, entry.timeout):
                pass
        except BaseException as failure:
            if not isinstance(failure, TaskGone):
                self._cancel(task)
            if not isinstance(failure, WirecallError):
                raise
            entry.fail(failure)

    async def _answer_questions(self, entry: AnyEntry, asked: _Asked) -> bool:
        """Let the host answer the questions of a result; return whether to send the call again."""
        try:
            answers = await self.answers(asked.input_requests)
        except BadAnswer as refusal:
            entry.fail(refusal)
            return False
        round: JsonObject = {}
        if answers:
            round["inputResponses"] = answers
        # Send the state back unchanged, and only if there is one (2026-07-28, `requestState`).
        if asked.request_state is not UNSET:
            round["requestState"] = asked.request_state
        entry.extra.round = round
        # A person may have taken their time.
        entry.deadline = self._options.clock.time() + entry.timeout
        return True

    async def _mend(self, entry: AnyEntry) -> bool:
        """Take back what made the server refuse a call; return whether to send the call again."""
        error = entry.error
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
            raise BadAnswer(
                f"the server asks {len(asked)} questions at once; {QUESTIONS} are allowed"
            )
        try:
            return {
                key: await self._settings.answer(question.method, question.params)
                for key, question in asked.items()
            }
        except RpcError as refusal:
            raise BadAnswer(f"the server asks what this client cannot answer: {refusal}") from None

    async def _visit(self, entry: AnyEntry, error: VisitRequired) -> bool:
        """Send the user to the pages that a call needs; return whether to send the call again."""
        extra: Extra = entry.extra
        if self._settings.elicit_url is None:
            return False
        # Step 1: a visit that the user has accepted, and that is not complete yet.
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
                # Before the handler runs: the server may report the end of a visit while the
                # handler still waits for it.
                id = visit.elicitation_id
                extra.visits[id] = self._inbox.visits.setdefault(id, asyncio.Event())
                agreed = await self._settings.answer("elicitation/create", Raw(encode(visit)))
                if agreed["action"] != "accept":
                    return False
        except msgspec.ValidationError as problem:
            entry.fail(
                BadAnswer(
                    f"{entry.method}: the server requires a visit "
                    f"and does not say where: {problem}",
                    ran="no",
                )
            )
            return False
        except RpcError as refusal:
            entry.fail(
                BadAnswer(
                    f"{entry.method}: the server asks what this client cannot answer: {refusal}",
                    ran="no",
                )
            )
            return False
        extra.has_waited = False
        # A person may have taken their time.
        entry.deadline = self._options.clock.time() + entry.timeout
        return bool(new)

    async def set_log_level(self, level: str) -> None:
        """Request log messages from this level upwards, in this session and the next."""
        self._level = level
        if self.is_stateless:
            self._seal()
        else:
            await self.perform("logging/setLevel", {"level": level})

    # --- tasks ------------------------------------------------------------------------------------

    def task(self, entry: "Entry[T]", id: str) -> "Task[T]":
        """Return the task with an id from an earlier call; its result settles the entry."""
        if not 0 < len(id) <= LONGEST_ID:
            raise UsageError(
                f"The id of a task must have 1 to {LONGEST_ID} characters, got {len(id)}."
            )
        if not self._settings.tasks or (self.revision is not None and not self.is_stateless):
            raise UsageError(
                "This client has no tasks.",
                "they need MCP 2026-07-28",
                "connect without tasks=False and revision=",
            )
        entry.extra.task = task = Task(self, entry, id)
        return task

    async def stream_of(self, id: str, left: float) -> Changes | None:
        """Return a stream of the states of a task; None if the server does not agree."""
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
        """Cancel a task in a separate asyncio task.

        The caller that waited for it may itself be being cancelled.
        """

        async def cancel() -> None:
            with suppress(WirecallError):
                await self.ask("tasks/cancel", {"taskId": task.id}, lambda _raw: None, FAREWELL)

        leaving = asyncio.get_running_loop().create_task(cancel())
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    # --- the server's own messages
    # ------------------------------------------------------------------------------------

    def changes(self, lists: Iterable[Kind], uris: Iterable[str]) -> Changes:
        """Return a block that listens to changes of these lists and of these resources."""
        return Changes(lists, uris, self.listening)

    async def listen_to(self, uris: Iterable[str]) -> None:
        """Report changes of all lists and these resources to `on_change`; streams overlap."""
        lists: tuple[Kind, ...] = ()
        if self.is_stateless:
            lists = ("tools", "prompts", "resources")
        old = self._subscribed
        self._subscribed = await self.changes(lists, uris).__aenter__()
        if old is not None:
            await old.__aexit__()

    def subscribed(self) -> set[str]:
        """Return the resources whose changes `on_change` receives."""
        if self._settings.on_change is None:
            raise UsageError(
                "There is no callback for changes.",
                fix="connect(..., on_change=...), or use client.listen(uris=...)",
            )
        if self._subscribed is None:
            return set()
        return set(self._subscribed.uris)


def _path_in(target: AnyEntry, path: str) -> str:
    """Return a path into the result of a target: that of a tool is in its structured content."""
    if target.method != "tools/call":
        return path
    return f"/structuredContent{path}"
