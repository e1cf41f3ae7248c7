"""The methods of MCP: what a server answers, in each revision.

`Server.answer` takes one message of a client and gives the bytes of its answer, or None. Which methods there are is the
revision's business (`revisions`), what they offer is the catalog's, and a call of a tool takes the core's steps
(`Dispatcher.call`): middleware, binding, ledger. What is left for this file is MCP's own: names and shapes.

Results are made in the fullest form and encoded once; `_result` adds what 2026-07-28 wants in every result, and
`catalog.project` takes away what older revisions do not know.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from wirecall.dispatch import Dispatcher
from wirecall.errors import (
    BadInput,
    FixedError,
    InternalError,
    InvalidParams,
    InvalidRequest,
    KeyInProgress,
    KeyInvalid,
    KeyRequired,
    MethodNotFound,
    NotCapable,
    RpcError,
    UnknownVersion,
)
from wirecall.frames import Envelope, ErrorObject, Invalid, encode
from wirecall.logs import failed
from wirecall.mcp import catalog as shapes
from wirecall.mcp.catalog import CallResult, Catalog
from wirecall.mcp.gate import Incoming, Response, meta_of
from wirecall.mcp.hub import Hub, Listener
from wirecall.mcp.peer import Call, Id, Outlet, Session, check_capability
from wirecall.mcp.revisions import REQUESTS, REVISIONS, STATELESS, Revision, offered
from wirecall.mcp.sealed import BrokenSeal, Seals
from wirecall.mcp.types import (
    ERROR_META,
    LEVELS,
    PREFIX,
    RECORDED_META,
    REPLAYED_META,
    CallTool,
    Cancelled,
    Complete,
    GetPrompt,
    Initialize,
    Listen,
    ListPage,
    Params,
    ReadResource,
    Resumed,
    SetLevel,
    Subscribe,
)
from wirecall.methods import Context, InputRequired, Method
from wirecall.policy import agreed_key, fingerprint, take_key
from wirecall.runs import RETRY_AFTER_MS

PAGE = 200  # entries of a list in one answer
LIST_TTL_MS = 60_000  # how long a client may keep a list: a changed one is told to those who listen
STATE_LIFETIME = 3600.0  # a person may take this long to answer a question
MAX_SUBSCRIPTIONS = 1000
MAX_SUBSCRIBED = 128 << 10  # characters of all URIs of a session

_EMPTY = Raw(b"{}")
_INPUT_REQUIRED = b'{"resultType":"input_required"'


class Identity(Struct, frozen=True):
    """What the server tells about itself."""

    name: str
    version: str
    instructions: str | None = None


class Request(Struct):
    """One request of a client, on its way."""

    id: Id
    raw: Raw | UnsetType
    params: Any
    session: Session
    outlet: Outlet
    caller: str
    key: Any  # from the HTTP header
    position: int | None

    def call(self) -> Call:
        meta = self.params.meta
        token = UNSET if meta is UNSET else meta.token
        return Call(self.session, self.outlet, token, self.raw)


Handler = Callable[["Server", Request], Awaitable[Any]]


class Server:
    """Answers MCP's methods for the methods of an app."""

    def __init__(
        self,
        identity: Identity,
        catalog: Catalog,
        dispatcher: Callable[[], Dispatcher],
        seals: Seals,
        *,
        is_public: bool,
        bytes_out: int,
    ) -> None:
        self.identity = identity
        self.catalog = catalog
        self.seals = seals
        self.hub = Hub()
        self._dispatcher = dispatcher
        self._bytes_out = bytes_out
        self._scope = "public" if is_public else "private"
        self._info = {"name": identity.name, "version": identity.version}
        info = encode({f"{PREFIX}serverInfo": self._info})
        self._stamp = b'"resultType":"complete","_meta":' + info
        self._only_meta = b'"_meta":' + info
        self._shape = lru_cache(maxsize=None)(shapes.call_result)

    # --- one message -------------------------------------------------------------------------------------------------

    async def answer(
        self,
        message: Incoming,
        session: Session,
        outlet: Outlet,
        *,
        caller: str,
        key: Any = UNSET,
        position: int | None = None,
        cancellable: bool = True,
    ) -> bytes | None:
        """The answer to one message, as bytes; None if it is owed none, or was cancelled."""
        try:
            return await self.respond(
                message, session, outlet, caller=caller, key=key, position=position, cancellable=cancellable
            )
        except RpcError as error:
            return failure(None if message.id is UNSET else message.id, error, session.revision)

    async def respond(
        self,
        message: Incoming,
        session: Session,
        outlet: Outlet,
        *,
        caller: str,
        key: Any = UNSET,
        position: int | None = None,
        cancellable: bool = True,
        params: Any = None,
    ) -> bytes | None:
        """The same, but what is refused is raised. `params` are the message's, if they are decoded already."""
        if isinstance(message, Invalid):
            raise message.error
        if isinstance(message, Response) or message.id is UNSET:
            self.take(message, session)
            return None
        id: Any = message.id
        handler, wanted = self._find(message.method, session.revision)
        if type(params) is not wanted:
            params = _decode(message, wanted)
        request = Request(id, message.params, params, session, outlet, caller, key, position)
        try:
            if not cancellable or message.method not in _CANCELLABLE or self._is_instant(params):
                result = await handler(self, request)
            else:
                result = await self._cancellable(handler(self, request), id, session)
        except RpcError:
            raise
        except Exception as error:
            failed(message.method, id, error)
            raise InternalError from error
        return None if result is None else self._answer(id, result, session.revision)

    def _answer(self, id: Id, result: Any, revision: Revision) -> bytes:
        answer = success(id, self._result(result, revision))
        if len(answer) > self._bytes_out:
            raise self._too_long()
        return answer

    def _too_long(self) -> RpcError:
        reason = f"the answer is longer than {self._bytes_out} bytes"
        return InternalError(reason, type="limit_exceeded", limit="bytes_out", max=self._bytes_out, ran="yes")

    def at_once(self, message: Envelope, params: Params) -> "bytes | Coroutine[Any, Any, bytes] | None":
        """The answer to a call of a plain function that reads; None if the request is anything else.

        Nobody waits, nothing is told before the answer and nobody asks for a context: so no session is made for it, no
        stream and no coroutine. At 2026-07-28 that is 0.6 instead of 0.47 of a bare ASGI application.
        """
        if not isinstance(params, CallTool):
            return None
        method, dispatcher = self.catalog.find(params.name), self._dispatcher()
        if method is None or method.is_async or not dispatcher.is_short(method):
            return None
        id: Any = message.id
        revision, arguments = STATELESS[-1], _arguments(params)
        try:
            result = dispatcher.call_plain(method, arguments, self._shape(method), id)
        except RpcError as error:
            result = encode(_as_result(error, method, revision))
        if type(result) is bytes:
            return self._answer(id, result, revision)
        return self._answer_later(id, result, method, revision)  # a plain function that gave something to await

    async def _answer_later(self, id: Id, coming: Any, method: Method, revision: Revision) -> bytes:
        try:
            result: bytes = await coming
        except RpcError as error:
            result = encode(_as_result(error, method, revision))
        return self._answer(id, result, revision)

    def fitting(self, entries: Sequence[Incoming], answers: Sequence[bytes | None], session: Session) -> list[bytes]:
        """The answers of an array, in one reply that is not too long: an entry whose answer does not fit is told so."""
        room, kept = self._bytes_out, []
        for entry, answer in zip(entries, answers, strict=True):
            if answer is None:
                continue
            if len(answer) > room:
                answer = failure(entry.id, self._too_long(), session.revision)
            room -= len(answer)
            kept.append(answer)
        return kept

    def _find(self, name: str, revision: Revision) -> tuple[Handler, Any]:
        if name not in revision.requests:
            elsewhere = f"; MCP {revision.name} does not have it" if name in REQUESTS else ""
            raise MethodNotFound(f"there is no method {name[:100]!r}{elsewhere}")
        needed = _NEEDS.get(name.partition("/")[0])
        if needed is not None and not self.catalog.offers(needed):
            raise MethodNotFound(f"{name}: this server has no {needed}")
        return _METHODS[name]

    def _is_instant(self, params: Any) -> bool:
        """A plain function that reads cannot be interrupted, so nobody has to be able to: a task less."""
        method = self.catalog.find(params.name) if type(params) is CallTool else None
        return method is not None and method.plain and not method.is_async

    async def _cancellable(self, work: Any, id: Id, session: Session) -> Any:
        """The work in a task of its own, so that a `notifications/cancelled` ends it and nothing else."""
        if id in session.calls:
            work.close()
            raise InvalidRequest(f"id: {id!r} is in use by a request that is not answered yet")
        task = session.calls[id] = asyncio.get_running_loop().create_task(work)
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and not _is_cancelled():
                return None  # the client wants no answer any more
            task.cancel()
            raise
        finally:
            del session.calls[id]

    def take(self, message: "Envelope | Response", session: Session) -> bool:
        """An answer of the client's, or a notification. False: it is about something that is not known here."""
        if isinstance(message, Response):
            return session.answered(message.id, message.result, message.error)
        if message.method == "notifications/cancelled":
            return self._cancel(message, session)
        if message.method in REQUESTS:
            raise InvalidRequest(f"{message.method} is a request: it needs an id")
        return True  # what is unknown, or of no use to us, is met with silence

    def _cancel(self, message: Envelope, session: Session) -> bool:
        try:
            id = UNSET if message.params is UNSET else msgspec.json.decode(message.params, type=Cancelled).id
        except msgspec.ValidationError:
            return True
        task = session.calls.get(id) if isinstance(id, (int, str)) else None
        if task is not None:
            task.cancel()
        return task is not None

    def _result(self, result: Any, revision: Revision) -> bytes:
        """A result as bytes, with what the revision wants in every one."""
        data = result if type(result) is bytes else encode(result)
        if not revision.has_result_type:
            return data
        if data == b"{}":
            return b"{" + self._stamp + b"}"
        if data.startswith(_INPUT_REQUIRED):
            return b"{" + self._only_meta + b"," + data[1:]
        if b'"_meta"' not in data:
            return b"{" + self._stamp + b"," + data[1:]
        members = msgspec.json.decode(data)
        meta = {**members.get("_meta", {}), f"{PREFIX}serverInfo": self._info}
        return encode({"resultType": "complete", **members, "_meta": meta})

    def is_command(self, message: Incoming) -> bool:
        """Whether an entry of an array changes something: those run one after another, in array order (J13)."""
        if not isinstance(message, Envelope) or message.method != "tools/call":
            return False
        try:
            return self.catalog.tool(_decode(message, CallTool).name).is_command
        except RpcError:
            return False

    # --- beginning ---------------------------------------------------------------------------------------------------

    def opened(self, message: Envelope) -> tuple[Session, bytes]:
        """`initialize`: the session it opens, and its result. Raises what is wrong with it."""
        params = _decode(message, Initialize)
        revision = offered(params.version)
        return Session(revision, params.capabilities), encode(self._introduction(revision))

    def _introduction(self, revision: Revision) -> dict[str, Any]:
        told = {"instructions": self.identity.instructions} if self.identity.instructions else {}
        capabilities = self.catalog.capabilities(revision)
        return {"protocolVersion": revision.name, "capabilities": capabilities, "serverInfo": self._info, **told}

    def envelope(self, message: Envelope) -> Params:
        """The params of a request that describes itself (2026-07-28). Raises if it does not say what it must.

        They are decoded as those of their method, or as any params if they are not; what is wrong is told in its turn.
        """
        try:
            params: Params = _DECODE[message.method](message.params)  # type: ignore[arg-type]
        except (KeyError, TypeError, msgspec.ValidationError):
            params = _meta(message)
        meta = params.meta
        if meta is UNSET or meta.version is UNSET or meta.capabilities is UNSET:
            raise BadEnvelope(f"params._meta must have {PREFIX}protocolVersion and {PREFIX}clientCapabilities")
        return params

    def check_described(self, params: Params) -> Revision:
        """The revision that a request names, if it is one that works like this, and its log level is one."""
        meta = params.meta
        assert meta is not UNSET and meta.version is not UNSET
        revision = REVISIONS.get(meta.version)
        if revision is None or not revision.is_stateless:
            supported = [revision.name for revision in STATELESS]
            raise UnknownVersion(f"{meta.version[:40]!r} is not served", supported=supported, requested=meta.version)
        if meta.level is not UNSET and meta.level not in LEVELS:
            raise BadEnvelope(f"{PREFIX}logLevel: expected one of {', '.join(LEVELS)}")
        return revision

    def described(self, params: Params, calls: dict[Id, Any] | None = None) -> Session:
        """The session of a request that describes itself."""
        revision = self.check_described(params)
        meta = params.meta
        assert meta is not UNSET and meta.capabilities is not UNSET
        return Session(revision, meta.capabilities, level=None if meta.level is UNSET else meta.level, calls=calls)

    async def _ping(self, _: Request) -> Any:
        return b"{}"

    async def _discover(self, request: Request) -> Any:
        introduction = self._introduction(request.session.revision)
        told = {name: introduction[name] for name in ("capabilities", "instructions") if name in introduction}
        return {"supportedVersions": [revision.name for revision in STATELESS], **told, **self._cached(LIST_TTL_MS)}

    async def _set_level(self, request: Request) -> Any:
        if request.params.level not in LEVELS:
            raise InvalidParams(f"level: expected one of {', '.join(LEVELS)}")
        request.session.level = request.params.level
        return b"{}"

    def _cached(self, ttl: int) -> dict[str, Any]:
        return {"ttlMs": ttl, "cacheScope": self._scope}

    # --- lists -------------------------------------------------------------------------------------------------------

    async def _list(self, request: Request, kind: str) -> Any:
        revision = request.session.revision
        entries = self.catalog.list(kind, revision)
        start = _offset(request.params.cursor, len(entries))
        page: dict[str, Any] = {kind: entries[start : start + PAGE]}
        if start + PAGE < len(entries):
            page["nextCursor"] = _cursor(start + PAGE)
        return {**page, **self._cached(LIST_TTL_MS)} if revision.has("caching") else page

    async def _tools(self, request: Request) -> Any:
        return await self._list(request, "tools")

    async def _prompts(self, request: Request) -> Any:
        return await self._list(request, "prompts")

    async def _resources(self, request: Request) -> Any:
        return await self._list(request, "resources")

    async def _templates(self, request: Request) -> Any:
        return await self._list(request, "resourceTemplates")

    # --- calls -------------------------------------------------------------------------------------------------------

    async def _call_tool(self, request: Request) -> Any:
        params: CallTool = request.params
        revision = request.session.revision
        method = self.catalog.tool(params.name)
        arguments = _arguments(params)
        marks: dict[str, Any] = {}
        try:
            dispatcher = self._dispatcher()
            if dispatcher.is_short(method):
                plain: Any = dispatcher.call_plain(method, arguments, self._shape(method), request.id)
                result: bytes = plain if type(plain) is bytes else await plain
            else:
                result = await self._run_tool(request, method, arguments, marks)
        except RpcError as error:
            result = encode(_as_result(error, method, revision))
        return self._told(result, method, revision, marks)

    async def _run_tool(self, request: Request, method: Method, arguments: Raw, marks: dict[str, Any]) -> bytes:
        key = _key_of(method, request.params, arguments, request.key)
        context = self._context(request, method, arguments, f"tools/call:{method.name}", key)
        context._shape = self._shape(method)
        try:
            result = await self._run(context)
            if context.replayed and result.startswith(_INPUT_REQUIRED):
                self._check_waiting(result, request.session)
            return result
        finally:
            if context.replayed:
                request.outlet.replayed.append(request.id)
                marks[REPLAYED_META] = True
            if not context.recorded:
                marks[RECORDED_META] = False

    def _check_waiting(self, interim: bytes, session: Session) -> None:
        """Another call with this key waits for answers: only a client that could give them is asked the same again."""
        if not session.revision.is_stateless:
            raise KeyInProgress("the first call waits for its client", ran="no", retry_after_ms=RETRY_AFTER_MS)
        for question in msgspec.json.decode(interim)["inputRequests"].values():
            check_capability(session, question["method"], question["params"])

    def _told(self, result: bytes, method: Method, revision: Revision, marks: dict[str, Any]) -> Any:
        """A tool's result for a revision."""
        if result.startswith(_INPUT_REQUIRED) or (revision.value("structured") == "any" and not marks):
            return result
        told = shapes.project(result, method, revision)
        if marks:
            told.meta = {**(told.meta or {}), **marks}
        return told

    async def _get_prompt(self, request: Request) -> Any:
        prompt = self.catalog.prompt(request.params.name)
        texts = request.params.arguments
        arguments = shapes.from_texts(prompt.method, {} if texts is UNSET else texts)
        context = self._context(request, prompt.method, arguments, prompt.method.name, None)
        context._shape = shapes.prompt_result(prompt.method)
        result = await self._run(context)
        revision = request.session.revision
        if result.startswith(_INPUT_REQUIRED) or revision.value("structured") == "any":
            return result
        return shapes.known_messages(msgspec.json.decode(result), revision)

    async def _read_resource(self, request: Request) -> Any:
        uri, revision = request.params.uri, request.session.revision
        found = self.catalog.resource(uri)
        if found is None:
            raise RpcError(int(revision.value("resource not found") or 0), "Resource not found", {"uri": uri})
        resource, names = found
        context = self._context(
            request, resource.method, shapes.from_texts(resource.method, names), resource.method.name, None
        )
        context._shape = shapes.read_result(resource, uri)
        result = await self._run(context)
        if result.startswith(_INPUT_REQUIRED) or not revision.has("caching"):
            return result
        return result[:-1] + b',"ttlMs":0,"cacheScope":"private"}'

    async def _complete(self, request: Request) -> Any:
        params: Complete = request.params
        of = params.ref.name if params.ref.type == "ref/prompt" else params.ref.uri
        self._check_ref(params.ref.type, of)
        method = self.catalog.completions.get((of, params.argument.name))
        if method is None:
            return shapes.completed([])
        arguments = [params.argument.value, params.context.arguments][: len(method.signature.parameters)]
        context = self._context(request, method, Raw(encode(arguments)), method.name, None)
        context._shape = shapes.completed
        return await self._run(context)

    def _check_ref(self, kind: str, of: str) -> None:
        known: dict[str, dict[str, Any]] = {
            "ref/prompt": self.catalog.prompts,
            "ref/resource": {**self.catalog.resources, **self.catalog.templates},
        }
        if of not in known.get(kind, {}):
            raise InvalidParams(f"ref: there is no {kind.removeprefix('ref/')[:20]} {of[:100]!r}")

    def _context(self, request: Request, method: Method, params: Raw, record: str, key: str | None) -> Context:
        context = Context(
            method,
            id=request.id,
            params=params,
            caller=request.caller,
            position=request.position,
            idempotency_key=key,
            record=record,
        )
        context._peer = request.call()
        if request.session.revision.is_stateless and isinstance(request.params, Resumed):
            self._resume(context, request.params)
        return context

    async def _run(self, context: Context) -> bytes:
        """The result of a call, or the questions it waits for, as bytes."""
        try:
            return bytes(await self._dispatcher().call(context))
        except InputRequired as pause:
            return pause.interim
        finally:
            context._peer.close()

    # --- calls of several rounds -------------------------------------------------------------------------------------

    def _resume(self, context: Context, params: Resumed) -> None:
        """Give the call the answers of this round and of those before, and a way to ask."""
        call: Call = context._peer
        if params.state is not UNSET or params.responses is not UNSET:
            call.continues = True
            call.answers = self._answers(context, params)
        # No reference back to the context: a cycle for every call would keep the garbage collector busy.
        call.pause = partial(self._pause, context.record, context.params, context.caller, context.idempotency_key)

    def _answers(self, context: Context, params: Resumed) -> dict[str, dict[str, Any]]:
        given = {} if params.responses is UNSET else params.responses
        if params.state is UNSET:
            return given
        try:
            _, value = self.seals.open("state", context.caller, params.state)
        except BrokenSeal:
            raise BadInput("requestState: not the one that was given for this call, or too old") from None
        state = msgspec.json.decode(value, type=_State)
        if state.digest != _digest(context.record, context.params):
            raise BadInput("requestState: it belongs to another call")
        if context.idempotency_key not in (None, state.key):
            raise BadInput("requestState: the call began with another idempotency key, or without one")
        context.idempotency_key = state.key  # a round that leaves it out is the same command still
        return {**state.answers, **given}

    def _pause(
        self,
        record: str,
        params: Raw | UnsetType,
        caller: str,
        key: str | None,
        answers: dict[str, dict[str, Any]],
        questions: dict[str, Any],
    ) -> bytes:
        sealed = self.seals.seal("state", caller, _State(_digest(record, params), key, answers), STATE_LIFETIME)
        return encode({"resultType": "input_required", "inputRequests": questions, "requestState": sealed})

    # --- changes -----------------------------------------------------------------------------------------------------

    async def _subscribe(self, request: Request) -> Any:
        subscriptions = request.session.subscriptions
        if request.params.uri in subscriptions:
            return b"{}"
        if len(subscriptions) >= MAX_SUBSCRIPTIONS:
            raise InvalidRequest(f"a session may subscribe to {MAX_SUBSCRIPTIONS} resources", limit="subscriptions")
        if len(request.params.uri) + sum(map(len, subscriptions)) > MAX_SUBSCRIBED:
            reason = f"the URIs that a session subscribes to may have {MAX_SUBSCRIBED} characters in all"
            raise InvalidRequest(reason, limit="subscriptions")
        subscriptions.add(request.params.uri)
        return b"{}"

    async def _unsubscribe(self, request: Request) -> Any:
        request.session.subscriptions.discard(request.params.uri)
        return b"{}"

    def listener(self, session: Session) -> Listener:
        """Hears what a session with a handshake is told: every change of a list, and of the resources it subscribed to."""
        return Listener(lambda kind, uri: kind != "updated" or uri in session.subscriptions)

    async def _listen(self, request: Request) -> Any:
        """2026-07-28: tell of changes until the client leaves or the server stops."""
        wanted = request.params.notifications
        meta = {f"{PREFIX}subscriptionId": request.id}
        honoured = self._honoured(wanted)
        uris = frozenset(honoured.get("resourceSubscriptions", ()))
        listener = Listener(lambda kind, uri: uri in uris if kind == "updated" else f"{kind}ListChanged" in honoured, meta)
        acknowledged = {"_meta": meta, "notifications": honoured}
        method = "notifications/subscriptions/acknowledged"
        self.hub.add(listener)
        try:
            await request.outlet.send(encode({"jsonrpc": "2.0", "method": method, "params": acknowledged}))
            await forward(listener, request.outlet)
        finally:
            self.hub.remove(listener)
        if request.outlet.is_shared:  # on a pipe the end of a stream is told by a message
            cancelled = {"requestId": request.id, "_meta": meta}
            await request.outlet.send(encode({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": cancelled}))
        return {"_meta": meta}

    def _honoured(self, wanted: Any) -> dict[str, Any]:
        """Of what a listener asks for, what can happen here."""
        has = self.catalog.capabilities(STATELESS[-1])
        kinds = {
            "tools": wanted.tools_list_changed,
            "prompts": wanted.prompts_list_changed,
            "resources": wanted.resources_list_changed,
        }
        honoured: dict[str, Any] = {f"{kind}ListChanged": True for kind, asked in kinds.items() if asked and kind in has}
        if wanted.resource_subscriptions and "resources" in has:
            honoured["resourceSubscriptions"] = wanted.resource_subscriptions[:MAX_SUBSCRIPTIONS]
        return honoured


class BadEnvelope(InvalidParams):
    """The envelope of a request lacks what it must have: refused before anything runs, over HTTP with status 400."""


class _State(Struct):
    """What a client keeps for us between the rounds of a call."""

    digest: str
    key: str | None
    answers: dict[str, dict[str, Any]]


_METHODS: dict[str, tuple[Handler, Any]] = {
    "ping": (Server._ping, Params),
    "server/discover": (Server._discover, Params),
    "logging/setLevel": (Server._set_level, SetLevel),
    "tools/list": (Server._tools, ListPage),
    "tools/call": (Server._call_tool, CallTool),
    "prompts/list": (Server._prompts, ListPage),
    "prompts/get": (Server._get_prompt, GetPrompt),
    "resources/list": (Server._resources, ListPage),
    "resources/templates/list": (Server._templates, ListPage),
    "resources/read": (Server._read_resource, ReadResource),
    "resources/subscribe": (Server._subscribe, Subscribe),
    "resources/unsubscribe": (Server._unsubscribe, Subscribe),
    "subscriptions/listen": (Server._listen, Listen),
    "completion/complete": (Server._complete, Complete),
}

# What a method is there for; without it the method is not there either (the rule of unadvertised capabilities).
_NEEDS = {"tools": "tools", "prompts": "prompts", "resources": "resources", "completion": "completions"}

# What can take long enough to be cancelled.
_CANCELLABLE = frozenset({"tools/call", "prompts/get", "resources/read", "completion/complete", "subscriptions/listen"})

_DECODERS = {wanted: msgspec.json.Decoder(wanted) for wanted in {*(wanted for _, wanted in _METHODS.values()), Initialize}}

_DECODE = {name: _DECODERS[wanted].decode for name, (_, wanted) in _METHODS.items()}


def _decode(message: Envelope, wanted: Any) -> Any:
    try:
        return _DECODERS[wanted].decode(_EMPTY if message.params is UNSET else message.params)
    except msgspec.ValidationError as error:
        raise InvalidParams(_explained(error)) from None
    except (RecursionError, msgspec.DecodeError) as error:
        raise InvalidParams(f"params: {error}") from None


def _meta(message: Envelope) -> Params:
    try:
        return meta_of(message)
    except msgspec.ValidationError as error:
        raise BadEnvelope(_explained(error)) from None


def _explained(error: Exception) -> str:
    """msgspec's words, with the place first: `params.name: expected str, got int`."""
    what, _, where = str(error).partition(" - at `$")
    return f"params{where.rstrip('`')}: {what[:1].lower()}{what[1:]}".replace("`", "")


def _arguments(params: CallTool) -> Raw:
    if params.arguments is UNSET:
        return _EMPTY
    if bytes(params.arguments)[:1] != b"{":
        raise InvalidParams("params.arguments: expected an object")
    return params.arguments


def _key_of(method: Method, params: CallTool, arguments: Raw, header: Any) -> str | None:
    """The one idempotency key of a tool call, wherever the client put it."""
    if not method.is_command:
        return None
    meta = UNSET if params.meta is UNSET else params.meta.key
    key = agreed_key(meta, params.idempotency_key, params.key, take_key(arguments), header)
    if key is None and method.key != "optional":
        raise KeyRequired(f"{method.name} needs an idempotency_key: one value per intent, the same on every retry", ran="no")
    return key


def _as_result(error: RpcError, method: Method, revision: Revision) -> CallResult:
    """An error as the result it is for a model; raises those that are the protocol's."""
    if isinstance(error, InvalidParams):
        is_arguments = not isinstance(error, (KeyInvalid, BadInput)) and not (
            isinstance(error, KeyRequired) and method.key != "ask"
        )
        if not is_arguments or revision.value("bad arguments") == "error":
            raise error
        return _error_result(str((error.data or {}).get("reason", error.message)).replace("params", "arguments", 1))
    if isinstance(error, NotCapable) and revision.value("capability of the client missing") == "result":
        return _error_result(str((error.data or {}).get("reason", error.message)))
    if isinstance(error, FixedError) and not isinstance(error, InternalError):
        raise error
    told = {ERROR_META: {"code": error.code, **({} if error.data is None else {"data": error.data})}}
    return _error_result(error.message, told)


def _error_result(text: str, meta: Any = UNSET) -> CallResult:
    return CallResult([{"type": "text", "text": text}], is_error=True, meta=meta)


def _digest(record: str, params: Raw | UnsetType) -> str:
    """Which call a state belongs to: its method and its arguments."""
    return f"{record} {fingerprint(params).hex()}"


async def forward(listener: Listener, outlet: Outlet) -> None:
    """Send what a listener hears, until it is closed or the server stops."""
    stopped = asyncio.get_running_loop().create_task(outlet.stopping.wait())
    stopped.add_done_callback(lambda _: listener.close())
    try:
        while (message := await listener.next()) is not None:
            await outlet.send(message)
    finally:
        stopped.cancel()


def _cursor(offset: int) -> str:
    return base64.urlsafe_b64encode(b"from %d" % offset).decode()


def _offset(cursor: str | None, count: int) -> int:
    """Where a page begins. An empty string is a cursor like any other, and not one of ours."""
    if cursor is None:
        return 0
    try:
        offset = int(base64.b64decode(cursor, altchars=b"-_", validate=True).removeprefix(b"from "))
    except ValueError:
        offset = -1
    if not 0 < offset < count or cursor != _cursor(offset):
        raise InvalidParams("cursor: not one that this server gave, or of a list that has changed since")
    return offset


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# --- bytes -----------------------------------------------------------------------------------------------------------


def success(id: Id, result: bytes) -> bytes:
    told = b"%d" % id if type(id) is int else encode(id)
    return b'{"jsonrpc":"2.0","id":' + told + b',"result":' + result + b"}"


def failure(id: Any, error: RpcError, revision: Revision | None) -> bytes:
    """An error's answer. An id that cannot be told is null in the older revisions and left out in the newer ones."""
    body = encode(ErrorObject(error.code, error.message, UNSET if error.data is None else error.data))
    if id is not None and id is not UNSET:
        return b'{"jsonrpc":"2.0","id":' + encode(id) + b',"error":' + body + b"}"
    if revision is None or revision.value("id of an unreadable message") == "null":
        return b'{"jsonrpc":"2.0","id":null,"error":' + body + b"}"
    return b'{"jsonrpc":"2.0","error":' + body + b"}"
