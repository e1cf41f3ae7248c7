"""The methods of MCP, and their answers in each revision.

`Server.answer` takes one message of a client and returns the bytes of its answer, or None.
`Server.methods` is the table of the methods and the index of the neighbouring files; `Server.add`
adds a row, also for an extension's method.

1. Params are decoded once. An error in them names its place: `params.name: expected str, got int`.
2. A method that the revision does not have, or that serves something which this server does not
   offer, is not found.
3. A method of an extension is served to clients that have declared the extension (SEP-2133). The
   order of its refusals: the server does not have it (-32601), envelope, headers (-32020), not
   declared (-32021), params (-32602).
4. A call that may take long is a separate asyncio task, so that `notifications/cancelled` ends only
   this call.
5. An `RpcError` is sent as it is; any other exception is an internal error, with its message only
   in the log.
6. A notification gets no answer, not even if it is unknown.
7. At 2026-07-28 there is no handshake. Every request carries an envelope in `params._meta`: its
   revision and what its client can do. A request without it is a `BadEnvelope`, refused before
   anything runs.
"""

import asyncio
import base64
import re
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from logging import INFO
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.errors import (
    Gone,
    InternalError,
    InvalidParams,
    InvalidRequest,
    MethodNotFound,
    RpcError,
    UnknownVersion,
)
from wirecall.ledger.base import Ledger
from wirecall.limits import Limits
from wirecall.logs import failed, logger
from wirecall.mcp import headers, types
from wirecall.mcp.revisions import REVISIONS, STATELESS, Revision, offered
from wirecall.mcp.server.calls import Calls, check_alone
from wirecall.mcp.server.catalog import Catalog, MethodEntry, input_schema
from wirecall.mcp.server.changes import Hub, Subscribed, listen, subscribe, unsubscribe
from wirecall.mcp.server.messages import Answers, BadEnvelope, ClientAnswer, Id, Incoming
from wirecall.mcp.server.peer import (
    AnswerStream,
    Linked,
    Outlet,
    Peer,
    Questions,
    Session,
    named_client,
    undeclared,
)
from wirecall.mcp.server.sessions import Sealer
from wirecall.mcp.server.task_run import TaskRunner
from wirecall.mcp.server.tasks import Tasks
from wirecall.mcp.types import LEVELS, PREFIX, CallTool, Params
from wirecall.protocol.messages import Envelope, Invalid, JsonObject
from wirecall.protocol.sender import Entry, Sender
from wirecall.server.batch import run_batch
from wirecall.server.call import clock, log_refusal
from wirecall.server.identity import Identity
from wirecall.server.ids import Ids
from wirecall.server.method import Method
from wirecall.transports.request import HttpError

if TYPE_CHECKING:
    from wirecall.auth.access import Access
    from wirecall.mcp.server.array_links import ArrayLinks
    from wirecall.server.call import Mark
    from wirecall.server.dispatch import Dispatcher

Handler = Callable[[Peer], Coroutine[Any, Any, object]]

# Entries of a list in one answer.
PAGE = 200

# The capabilities that a server declares, each with the kind of offer that it needs
# (basic/lifecycle, "Capability Negotiation").
_CAPABILITIES: dict[str, tuple[JsonObject, str | None]] = {
    "tools": ({"listChanged": True}, "tools"),
    "prompts": ({"listChanged": True}, "prompts"),
    "resources": ({"subscribe": True, "listChanged": True}, "resources"),
    "completions": ({}, "completions"),
    "logging": ({}, None),
    # A client may repeat a call that has a key.
    "experimental": ({types.KEYS_CAPABILITY: {}}, "tools"),
}

# The names of the references of a request in an array.
REFERS = re.compile(rb"io\.wirecall/(refs|after)")

_EMPTY = Raw(b"{}")
_decode_params = msgspec.json.Decoder(Params).decode
_decode_initialize = msgspec.json.Decoder(types.Initialize).decode
_decode_cancelled = msgspec.json.Decoder(types.Cancelled).decode


class ServerInfo(Struct, frozen=True):
    """The name, version and instructions of a server, and how to show it."""

    name: str
    version: str
    instructions: str | None = None
    title: str | None = None
    website: str | None = None
    icons: Sequence[JsonObject] = ()

    def described(self, revision: Revision) -> JsonObject:
        """Return `serverInfo` in the words of a revision."""
        info: JsonObject = {"name": self.name, "version": self.version}
        if self.title and revision.has("title"):
            info["title"] = self.title
        if self.website and revision.has("website"):
            info["websiteUrl"] = self.website
        if self.icons and revision.has("icons"):
            info["icons"] = self.icons
        return info


class McpMethod(Struct, frozen=True):
    """A row in the table of methods: how the server answers a request, and to which clients."""

    handle: Handler
    params: type[Params]
    decode: Callable[[Raw], Any]
    # The names of the revisions that have it.
    revisions: frozenset[str]
    # The kind of offer without which the server does not have the method.
    needs: str | None
    # The id of the extension that its client must have declared (SEP-2133).
    extension: str | None
    # It may take long enough for a client to cancel it.
    is_long: bool


class Extension(Struct, frozen=True):
    """An extension of MCP that the server offers."""

    settings: JsonObject
    # The names of the revisions at which it is offered.
    revisions: frozenset[str]
    # Returns whether the app has something that uses it.
    is_needed: Callable[[], bool]


class Server:
    """Answers MCP's methods for the methods of an app."""

    # Decides which entries of an array run one after another: a message, and its params. None: the
    # commands of the app do.
    in_lane: Callable[[tuple[Incoming, Any]], bool] | None = None

    def __init__(
        self,
        info: ServerInfo,
        catalog: Catalog,
        dispatcher: "Callable[[], Dispatcher]",
        sealer: Sealer,
        ledger: Callable[[], Coroutine[Any, Any, Ledger]],
        *,
        list_ttl_ms: int,
        is_public: bool,
        limits: Limits,
        access: "Access | None" = None,
        references: bool = False,
    ) -> None:
        self.catalog = catalog
        self.sealer = sealer
        self.hub = hub = Hub()
        self.subscribed = subscribed = Subscribed(limits.subscribed_bytes)
        # The extensions that the server offers, by id.
        self.extensions: dict[str, Extension] = {}
        self._info = info
        self._instructions: JsonObject = {}
        if info.instructions:
            self._instructions["instructions"] = info.instructions
        self._limits = limits
        self._access = access
        # Requests of an array may refer to each other.
        self._has_references = references
        # Every result of 2026-07-28 names its server, and only `server/discover` shows it in full:
        # an icon may be long.
        self.answers = Answers({"name": info.name, "version": info.version}, limits.bytes_out)
        self._questions = Questions(sealer, limits, dispatcher)
        self.calls = calls = Calls(
            catalog, dispatcher, self._questions, self.answers, is_public=is_public
        )
        self.task_runner = TaskRunner(
            catalog, calls, self._questions, hub, limits, dispatcher, ledger
        )
        calls.task_runner = self.task_runner
        self.tasks = tasks = Tasks(catalog, hub, self.task_runner, access)
        # How long a client may keep a list (2026-07-28). It may share the list only if all callers
        # are anonymous.
        self._kept = {"ttlMs": list_ttl_ms, "cacheScope": "public" if is_public else "private"}

        # The arguments of each tool that a header repeats, and the tool, since another tool may get
        # its name.
        self._marks: dict[str, tuple[Method, headers.Marks]] = {}
        self.methods: dict[str, McpMethod] = {}
        self.add("ping", self._ping)
        self.add("server/discover", self._discover)
        self.add("logging/setLevel", self._set_level, types.SetLevel)
        self.add("tools/list", partial(self._list, "tools"), types.ListPage, needs="tools")
        self.add("tools/call", calls.call_tool, CallTool, needs="tools", is_long=True)
        self.add("prompts/list", partial(self._list, "prompts"), types.ListPage, needs="prompts")
        self.add("prompts/get", calls.get_prompt, types.GetPrompt, needs="prompts", is_long=True)
        self.add(
            "resources/list", partial(self._list, "resources"), types.ListPage, needs="resources"
        )
        self.add(
            "resources/templates/list",
            partial(self._list, "resourceTemplates"),
            types.ListPage,
            needs="resources",
        )
        self.add(
            "resources/read",
            calls.read_resource,
            types.ReadResource,
            needs="resources",
            is_long=True,
        )
        self.add(
            "resources/subscribe",
            partial(subscribe, subscribed),
            types.Subscribe,
            needs="resources",
        )
        self.add(
            "resources/unsubscribe",
            partial(unsubscribe, subscribed),
            types.Subscribe,
            needs="resources",
        )
        listening = partial(listen, hub, subscribed, catalog, tasks, self.lasts)
        self.add("subscriptions/listen", listening, types.Listen, is_long=True)
        self.add(
            "completion/complete", calls.complete, types.Complete, needs="completions", is_long=True
        )

        self.offer(types.TASKS, {}, revisions=STATELESS, is_needed=lambda: tasks.is_needed)
        self.add("tasks/get", tasks.get, types.TaskParams, extension=types.TASKS)
        self.add("tasks/update", tasks.update, types.UpdateTask, extension=types.TASKS)
        self.add("tasks/cancel", tasks.cancel, types.TaskParams, extension=types.TASKS)
        for id, settings in catalog.extensions.items():
            self.offer(id, settings)
        for entry in catalog.methods.values():
            self._add_entry(entry)
        catalog.on_method = self._add_entry

    def add(
        self,
        name: str,
        handle: Handler,
        params: type[Params] = Params,
        *,
        revisions: Iterable[Revision] | None = None,
        needs: str | None = None,
        extension: str | None = None,
        is_long: bool = False,
    ) -> None:
        """Add a method.

        Without `revisions`, it belongs to those that have its extension or list it.
        """
        if revisions is None:
            having: Collection[str] = ()
            if extension is not None:
                having = self.extensions[extension].revisions
            revisions = [
                each for each in REVISIONS.values() if each.name in having or name in each.requests
            ]
        names = frozenset(revision.name for revision in revisions)
        decode = msgspec.json.Decoder(params).decode
        self.methods[name] = McpMethod(handle, params, decode, names, needs, extension, is_long)

    def offer(
        self,
        id: str,
        settings: JsonObject,
        *,
        revisions: Iterable[Revision] | None = None,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Offer an extension while it is needed.

        Without `revisions`, at all that have extensions.
        """
        if revisions is None:
            revisions = [
                revision for revision in REVISIONS.values() if revision.has("capability extensions")
            ]
        self.extensions[id] = Extension(
            settings, frozenset(revision.name for revision in revisions), is_needed
        )

    def _add_entry(self, entry: MethodEntry) -> None:
        """Add a method that the app has registered for an extension."""
        handle = partial(self.calls.call_method, entry.method)
        self.add(entry.method.name, handle, extension=entry.extension, is_long=True)

    def is_request(self, name: str) -> bool:
        """Return whether MCP, in any revision, has a request of this name.

        The transports answer `initialize`.
        """
        return name in self.methods or name == "initialize"

    def capabilities(self, revision: Revision) -> JsonObject:
        """Return everything that the server declares to clients of a revision."""
        declared: JsonObject = {}
        for name, (value, kind) in _CAPABILITIES.items():
            if revision.has(f"capability {name}") and (
                kind is None or any(self.catalog.offered[kind])
            ):
                declared[name] = value
        if self._has_references and revision.has_arrays:
            experimental = declared.get("experimental", {})
            declared["experimental"] = {**experimental, types.REFS_CAPABILITY: {}}
        # Settings by the id of the extension (2026-07-28, basic/versioning, "Extension
        # Negotiation"). Hosts of 2025-11-25 read them as well: MCP Apps began there.
        extensions = {
            id: extension.settings
            for id, extension in self.extensions.items()
            if self._has(id, revision)
        }
        if extensions:
            declared["extensions"] = extensions
        return declared

    def _has(self, extension: str, revision: Revision) -> bool:
        """Return whether the server offers an extension to clients of a revision."""
        found = self.extensions.get(extension)
        return found is not None and revision.name in found.revisions and found.is_needed()

    # --- one message ------------------------------------------------------------------------------

    async def answer(
        self,
        message: Incoming,
        session: Session,
        outlet: Outlet,
        sender: Sender,
        *,
        params: Any = None,
        position: int | None = None,
    ) -> bytes | None:
        """Return the answer to one message, as bytes; None if it gets none, or was cancelled.

        `params` are those of the message, if they are decoded already. `position` is its place in
        an array.
        """
        try:
            return await self.respond(
                message, session, outlet, sender, params=params, position=position
            )
        except RpcError as error:
            return self.answers.failure(message.id, error, session.revision)

    # complexity: the steps of every request in order; a further function would slow each of them.
    async def respond(
        self,
        message: Incoming,
        session: Session,
        outlet: Outlet,
        sender: Sender,
        *,
        params: Any = None,
        key: str | None = None,
        position: int | None = None,
        linked: Linked | None = None,
    ) -> bytes | None:
        """Return the same as `answer`, but raise errors. `key` is that of the HTTP header."""
        if isinstance(message, Invalid):
            raise message.error
        if isinstance(message, ClientAnswer) or message.id is UNSET:
            self.take(message, session)
            return None
        # Step 1: the method. One side alone cannot use an extension: the other falls back to the
        # core protocol or refuses (2026-07-28, basic/versioning, "Extension Negotiation").
        name = message.method
        revision = session.revision
        id = message.id
        assert isinstance(id, (int, str))  # `messages.read` has checked it
        method = self._find(name, revision)
        if method.extension is not None and method.extension not in session.extensions:
            raise undeclared(method.extension)
        # Step 2: its params, and the client it came from.
        if type(params) is not method.params:
            params = _decoded(message, method.decode)
        if linked is None:
            check_alone(params)
        peer = Peer(
            session, outlet, self._questions, id, message.params, params, sender, key, position
        )
        if linked is not None:
            peer.linked = linked
        # Step 3: its result. A call that may take long is a separate task, so that
        # `notifications/cancelled` can end it (basic/utilities, "Cancellation"). It does not need
        # one at 2026-07-28 over HTTP, where a client cancels by leaving, or if it is a plain
        # function that reads, which nothing can interrupt.
        is_long = method.is_long and (outlet.is_shared or not revision.is_stateless)
        if is_long and isinstance(params, CallTool):
            tool = self.catalog.registry.called.get(params.name)
            is_long = tool is None or not tool.plain or tool.is_async
        try:
            if not is_long:
                result = await method.handle(peer)
            elif id in session.calls:
                raise InvalidRequest(f"id: {id!r} is in use by a request that is not answered yet")
            else:
                result = await _cancellable(session, id, method.handle(peer))
        except (RpcError, Gone, HttpError):
            raise
        except Exception as error:
            failed(name, id, error)
            raise InternalError from error
        if result is None:
            return None
        return self.answers.to(id, result, revision)

    def note_refusal(self, method: str, id: object, error: RpcError, sender: Sender) -> None:
        """Log a message that was refused before it became a call."""
        if logger.isEnabledFor(INFO):
            known = id if isinstance(id, (int, str)) else None
            log_refusal(Ids(known, UNSET, sender.headers), method, error, caller=sender.caller)

    def permit(self, identity: Identity | None, scopes: Collection[str]) -> None:
        """Raise `HttpError` 403 unless the caller has these scopes.

        It also needs those that every request asks for.
        """
        if identity is not None and self._access is not None:
            self._access.permit(identity, scopes)

    def lasts(self, identity: Identity | None) -> float | None:
        """Return the seconds for which the token of a caller is accepted from now on.

        Returns None if the token does not expire, or the caller has none.
        """
        if identity is None or self._access is None:
            return None
        return self._access.lasts(identity)

    def scopes(self, entry: Incoming, params: Any = None) -> Collection[str]:
        """Return the scopes that a message asks for.

        `params` are those of the message, if they are decoded already.
        """
        if not isinstance(entry, Envelope) or (method := self.methods.get(entry.method)) is None:
            return ()
        if type(params) is not method.params and (params := self.params_of(entry)) is None:
            return ()  # the request is refused for its params, before it runs
        return self.calls.scopes(entry.method, params, entry.params)

    def params_of(self, message: Envelope) -> Any:
        """Return the params of a request.

        Returns None if there is no such method, or if they do not fit it.
        """
        method = self.methods.get(message.method)
        if method is None:
            return None
        try:
            return _decoded(message, method.decode)
        except RpcError:
            return None

    def _find(self, name: str, revision: Revision) -> McpMethod:
        """Return a method.

        Raises `MethodNotFound` if the revision lacks it, or the server has nothing to serve with
        it.
        """
        method = self.methods.get(name)
        if method is None or revision.name not in method.revisions:
            reason = f"there is no method {name[:100]!r}"
            if self.is_request(name):
                reason = f"{reason}; MCP {revision.name} does not have it"
            raise MethodNotFound(reason)
        if method.needs is not None and not any(self.catalog.offered[method.needs]):
            raise MethodNotFound(f"{name}: this server has no {method.needs}")
        if method.extension is not None and not self._has(method.extension, revision):
            raise MethodNotFound(f"{name}: this server does not offer {method.extension}")
        return method

    def begin_array(self, sender: Sender, size: int) -> "Mark | None":
        """Return what the rows of an array share, for a tap. Only a gateway's rows have it."""
        return None

    # complexity: the entries of an array share what is counted and kept here.
    async def answer_array(
        self,
        entries: Sequence[Incoming],
        session: Session,
        outlet: Outlet,
        sender: Sender,
        into: AnswerStream | None = None,
    ) -> list[bytes]:
        """Return the answers to the messages of an array (2025-03-26), in their order.

        Those that a stream has sent are not among them: `into` gets each answer when it is ready.
        All answers fit into one reply. An error takes the place of an answer that does not, as soon
        as that is made, so an array keeps no more than one reply may hold.
        """
        left = self._limits.bytes_out
        links: ArrayLinks | None = None
        # The answers that no stream has sent, by position.
        kept: dict[int, bytes] = {}

        calls = [
            entry
            for entry in entries
            if isinstance(entry, Envelope) and entry.method == "tools/call"
        ]
        mark = self.begin_array(sender, len(calls))

        async def begin(session: Session, message: tuple[Incoming, Any], position: int) -> None:
            nonlocal left
            entry, params = message
            own = sender
            if mark is not None:
                own = msgspec.structs.replace(own, entry=Entry(mark, position))
            if into is not None and sender.receipt is not None:
                own = msgspec.structs.replace(own, receipt=sender.receipt.part())
            answer: bytes | None
            try:
                if links is not None:
                    answer = await links.answer(
                        position,
                        lambda message, linked: self.respond(
                            message, session, outlet, own, position=position, linked=linked
                        ),
                    )
                else:
                    answer = await self.respond(
                        entry, session, outlet, own, params=params, position=position
                    )
            except RpcError as error:
                answer = self.answers.failure(entry.id, error, session.revision)
            if answer is None:
                return
            if into is None and outlet.is_stream:  # each answer goes out when it is ready
                await self._send_kept(kept, outlet)
                await outlet.send(answer)
                return
            if len(answer) > left:
                answer = self.answers.failure(
                    entry.id, self.answers.too_long(answer), session.revision
                )
                # Making and encoding a long answer blocks the loop: other calls get their turn.
                await asyncio.sleep(0)
            left -= len(answer)
            kept[position] = answer
            if into is not None:
                with suppress(Gone):  # no stream is free: it stays among the kept ones
                    receipt = own.receipt
                    if receipt is not None and not receipt.listeners:
                        receipt = None
                    await into.send(answer, receipt)
                    del kept[position]

        def changes_something(message: tuple[Incoming, Any]) -> bool:
            """Commands run one after another, in array order (J13)."""
            params = message[1]
            if not isinstance(params, CallTool):
                return False
            tool = self.catalog.registry.called.get(params.name)
            return tool is not None and tool.is_command

        is_linked = False
        messages: list[tuple[Incoming, Any]] = []
        for entry in entries:
            params = None
            if isinstance(entry, Envelope):
                params = self.params_of(entry)
                if entry.params is not UNSET and REFERS.search(entry.params) is not None:
                    is_linked = True
            messages.append((entry, params))
        if is_linked:
            from wirecall.mcp.server import array_links  # late: few arrays need it

            links = array_links.ArrayLinks(entries, self.catalog, allowed=self._has_references)
        limit = self._limits.concurrency
        _: list[None] = await run_batch(
            session, messages, begin, self.in_lane or changes_something, concurrency=limit
        )
        if mark is not None:
            mark.ended = clock()
        return [kept[position] for position in sorted(kept)]

    async def _send_kept(self, kept: dict[int, bytes], outlet: Outlet) -> None:
        """Send the answers that were ready before the answer to their array became a stream."""
        while kept:
            await outlet.send(kept.pop(min(kept)))

    def take(self, message: "Envelope | ClientAnswer", session: Session) -> bool:
        """Take an answer of the client or a notification.

        Returns False if this process does not know the call or the question.
        """
        if isinstance(message, ClientAnswer):
            return session.answered(message.id, message.result, message.error)
        if self.is_request(message.method):
            raise InvalidRequest(f"{message.method} is a request: it needs an id")
        if message.method != "notifications/cancelled":
            return True  # the other notifications, known or not, change nothing here
        # A cancellation that is wrong or comes too late is ignored (basic/utilities/cancellation,
        # "Behavior Requirements").
        try:
            id = _decode_cancelled(_EMPTY if message.params is UNSET else message.params).id
        except msgspec.ValidationError:
            return True
        if not isinstance(id, (int, str)) or id not in session.calls:
            return False
        session.calls[id].cancel()
        return True

    # --- the beginning of a conversation ----------------------------------------------------------

    def ended(self, session: Session) -> None:
        """Do nothing: a client has ended its session. A server in front of others ends theirs."""

    def opened(self, message: Envelope) -> tuple[Session, bytes]:
        """Return the session that `initialize` opens, and the answer.

        Raises `InvalidParams` if the params do not fit.
        """
        assert isinstance(message.id, (int, str))  # `messages.read` has checked it
        params = _decoded(message, _decode_initialize)
        revision = offered(params.version)
        introduction = {
            "protocolVersion": revision.name,
            "capabilities": self.capabilities(revision),
            "serverInfo": self._info.described(revision),
            **self._instructions,
        }
        session = Session(revision, params.capabilities, client=named_client(params.client))
        return session, self.answers.to(message.id, introduction, revision)

    # `open_session` awaits another server, so `opened` has no answer.
    waits_to_open = False

    async def open_session(self, message: Envelope, _caller: str) -> tuple[Session, bytes]:
        """Return the same as `opened`. A server that is in front of another one may wait here."""
        return self.opened(message)

    def marks(self, tool: str) -> headers.Marks:
        """Return the arguments of a tool that a header repeats."""
        method = self.catalog.tools.get(tool)
        if method is None:
            self._marks.pop(tool, None)
            return {}
        known = self._marks.get(tool)
        if known is None or known[0] is not method:
            known = self._marks[tool] = (method, headers.marked(input_schema(method)))
        return known[1]

    def described(self, message: Envelope, fields: headers.Fields | None = None) -> Params:
        """Return the params of a request that describes itself (2026-07-28).

        Raises if envelope, headers or version are wrong.

        The params are decoded for their method; params that do not fit it are decoded as any
        params, since the envelope is checked first.
        """
        # Step 1: a method of an extension that the server does not offer is not found, whatever
        # comes with it.
        method = self.methods.get(message.method)
        if method is not None and method.extension is not None:
            self._find(message.method, STATELESS[-1])
        # Step 2: the envelope in `_meta`: version and capabilities are required (basic, "`_meta`").
        raw = _EMPTY if message.params is UNSET else message.params
        try:
            params: Params = _decode_params(raw) if method is None else method.decode(raw)
        except msgspec.ValidationError:
            try:
                params = _decode_params(raw)
            except msgspec.ValidationError as error:
                raise BadEnvelope(_explained(error)) from None
        meta = params.meta
        if meta is UNSET or meta.version is UNSET or meta.capabilities is UNSET:
            raise BadEnvelope(
                f"params._meta must have {PREFIX}protocolVersion and {PREFIX}clientCapabilities"
            )
        # Step 3: the HTTP headers agree with the body, if there are any.
        if fields is not None:
            headers.check(fields, meta.version, message.method, params)
        # Step 4: a version without a handshake, and a log level that exists.
        revision = REVISIONS.get(meta.version)
        if revision is None or not revision.is_stateless:
            supported = [revision.name for revision in STATELESS]
            raise UnknownVersion(
                f"{meta.version[:40]!r} is not served", supported=supported, requested=meta.version
            )
        if meta.level is not UNSET and meta.level not in LEVELS:
            raise BadEnvelope(f"{PREFIX}logLevel: expected one of {', '.join(LEVELS)}")
        return params

    async def _discover(self, peer: Peer) -> object:
        """Answer `server/discover` (2026-07-28): the members of `initialize`, without a session."""
        revision = peer.session.revision
        return {
            "supportedVersions": [each.name for each in STATELESS],
            "capabilities": self.capabilities(revision),
            **self._instructions,
            **self._kept,
            "_meta": {f"{types.PREFIX}serverInfo": self._info.described(revision)},
        }

    # --- small methods ----------------------------------------------------------------------------

    async def _ping(self, _: Peer) -> object:
        return b"{}"

    async def _set_level(self, peer: Peer) -> object:
        if peer.params.level not in LEVELS:
            raise InvalidParams(f"level: expected one of {', '.join(LEVELS)}")
        peer.session.level = peer.params.level
        return b"{}"

    async def _list(self, kind: str, peer: Peer) -> object:
        """Return one page of a list, with a cursor for the next one while there is more."""
        revision = peer.session.revision
        may: Callable[[Method], bool] | None = None
        may_call: Callable[[Method], bool] | None = None
        if self._access is not None:
            may = partial(_may_see, self._access, peer.identity)
            may_call = partial(_may_call, self._access, peer.identity)
        entries = self.catalog.list(kind, revision, may, may_call)
        start = 0
        if peer.params.cursor is not None:
            start = _offset(peer.params.cursor, len(entries))
        page: JsonObject = {kind: entries[start : start + PAGE]}
        if start + PAGE < len(entries):
            page["nextCursor"] = _cursor(start + PAGE)
        if revision.has("caching"):
            page |= self._kept
        return page


async def _cancellable(session: Session, id: Id, work: Coroutine[Any, Any, object]) -> object:
    """Await a call as a separate task, which `notifications/cancelled` ends.

    Returns None if only the call is cancelled: its client does not want an answer.
    """
    task = session.calls[id] = asyncio.get_running_loop().create_task(work)
    try:
        return await task
    except asyncio.CancelledError:
        this = asyncio.current_task()
        if task.cancelled() and not (this is not None and this.cancelling()):
            return None
        task.cancel()
        raise
    finally:
        del session.calls[id]


def _may_see(access: "Access", identity: Identity | None, method: Method) -> bool:
    """Return whether lists show a method to a caller."""
    return method.scopes is None or access.may(identity, method.scopes.always)


def _may_call(access: "Access", identity: Identity | None, method: Method) -> bool:
    """Return whether a caller has the scopes of a method, as far as they are known."""
    return method.scopes is None or access.has(identity, method.scopes.always)


def _cursor(offset: int) -> str:
    return base64.urlsafe_b64encode(b"from %d" % offset).decode()


def _offset(cursor: str, count: int) -> int:
    """Return the offset that a cursor stands for, in a list of `count` entries.

    Raises `InvalidParams` unless this server has issued the cursor: it never issues ""
    (server/utilities/pagination, "Error Handling").
    """
    try:
        data = base64.b64decode(cursor, altchars=b"-_", validate=True)
        offset = int(data.removeprefix(b"from "))
    except ValueError:
        offset = -1
    if not 0 < offset < count or cursor != _cursor(offset):
        raise InvalidParams(
            "cursor: expected the nextCursor of an earlier page; the list may have changed since"
        )
    return offset


def _decoded(message: Envelope, decode: Callable[[Raw], Any]) -> Any:
    """Return the params of a message."""
    try:
        return decode(_EMPTY if message.params is UNSET else message.params)
    except msgspec.ValidationError as error:
        raise InvalidParams(_explained(error)) from None
    except (RecursionError, msgspec.DecodeError) as error:
        raise InvalidParams(f"params: {error}") from None


def _explained(error: Exception) -> str:
    """Return the message of msgspec's error, with the place first.

    An example is `params.name: expected str, got int`.
    """
    what, _, where = str(error).partition(" - at `$")
    return f"params{where.rstrip('`')}: {what[:1].lower()}{what[1:]}".replace("`", "")
