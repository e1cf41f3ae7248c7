"""The methods of MCP, and their answers in each revision.

`Server.answer` takes one message of a client and returns the bytes of its answer, or None. The table of revisions says which
methods there are; `Server.methods` maps them to their handlers, and is the index of the files beside this one.

1. Params are decoded once. An error in them names its place: `params.name: expected str, got int`.
2. A method that the revision does not have, or that serves something which this server does not offer, is not found.
3. A call that may take long is a task of its own, so that `notifications/cancelled` ends it and nothing else.
4. An `RpcError` is sent as it is; any other exception is an internal error, and its text stays in the log.
5. A notification is owed no answer, not even an unknown one.
6. At 2026-07-28 there is no handshake. Every request carries an envelope in `params._meta`: its revision and what its client
   can do. A request without it is a `BadEnvelope`, refused before anything runs.
"""

import asyncio
import base64
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.errors import Gone, InternalError, InvalidParams, InvalidRequest, MethodNotFound, RpcError, UnknownVersion
from wirecall.logs import failed
from wirecall.mcp import headers
from wirecall.mcp.revisions import REQUESTS, REVISIONS, STATELESS, offered
from wirecall.mcp.server.arrays import ClientAnswer, Incoming
from wirecall.mcp.server.asking import Id, Outlet, Peer, Questions, Session
from wirecall.mcp.server.calls import Calls
from wirecall.mcp.server.catalog import Catalog
from wirecall.mcp.server.changes import Hub, listen, subscribe, unsubscribe
from wirecall.mcp.server.results import Answers, failure
from wirecall.mcp.server.sealed import Seals
from wirecall.mcp.types import (
    LEVELS,
    PREFIX,
    CallTool,
    Cancelled,
    Complete,
    GetPrompt,
    Initialize,
    Listen,
    ListPage,
    Params,
    ReadResource,
    SetLevel,
    Subscribe,
)
from wirecall.protocol.messages import Envelope, Invalid, JsonObject, Limits, encode
from wirecall.server.dispatch import Dispatcher

Handler = Callable[[Peer], Coroutine[Any, Any, object]]

PARAMS: dict[str, type[Params]] = {
    "ping": Params,
    "server/discover": Params,
    "logging/setLevel": SetLevel,
    "tools/list": ListPage,
    "tools/call": CallTool,
    "prompts/list": ListPage,
    "prompts/get": GetPrompt,
    "resources/list": ListPage,
    "resources/templates/list": ListPage,
    "resources/read": ReadResource,
    "resources/subscribe": Subscribe,
    "resources/unsubscribe": Subscribe,
    "subscriptions/listen": Listen,
    "completion/complete": Complete,
}

PAGE = 200  # entries of a list in one answer
TTL_MS = 60_000  # how long a client may keep a list; a client that listens hears of a change before that

# The capability of a method. A server that does not declare it does not have the method (basic/lifecycle, "Capability
# Negotiation").
_NEEDS = {"tools": "tools", "prompts": "prompts", "resources": "resources", "completion": "completions"}

# Methods that may take long enough for a client to cancel them.
_CANCELLABLE = frozenset({"tools/call", "prompts/get", "resources/read", "completion/complete", "subscriptions/listen"})

_EMPTY = Raw(b"{}")
_DECODERS = {wanted: msgspec.json.Decoder(wanted) for wanted in {*PARAMS.values(), Initialize}}
_DECODE = {name: _DECODERS[wanted].decode for name, wanted in PARAMS.items()}


class Identity(Struct, frozen=True):
    """The name, version and instructions of a server."""

    name: str
    version: str
    instructions: str | None = None


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
        limits: Limits,
    ) -> None:
        self.catalog = catalog
        self.seals = seals
        self.hub = Hub()
        self._info = {"name": identity.name, "version": identity.version}
        self._instructions = {"instructions": identity.instructions} if identity.instructions else {}
        self.answers = Answers(self._info, limits.bytes_out)
        self._questions = Questions(seals, limits, dispatcher)
        self.calls = Calls(catalog, dispatcher, self._questions, self.answers)
        # How long a client may keep a list (2026-07-28). It may share the list only if all callers are anonymous.
        self._kept = {"ttlMs": TTL_MS, "cacheScope": "public" if is_public else "private"}
        self.methods: dict[str, Handler] = {
            "ping": self._ping,
            "server/discover": self._discover,
            "logging/setLevel": self._set_level,
            "tools/list": partial(self._list, "tools"),
            "tools/call": self.calls.call_tool,
            "prompts/list": partial(self._list, "prompts"),
            "prompts/get": self.calls.get_prompt,
            "resources/list": partial(self._list, "resources"),
            "resources/templates/list": partial(self._list, "resourceTemplates"),
            "resources/read": self.calls.read_resource,
            "resources/subscribe": subscribe,
            "resources/unsubscribe": unsubscribe,
            "subscriptions/listen": partial(listen, self.hub, self.catalog),
            "completion/complete": self.calls.complete,
        }

    # --- one message -------------------------------------------------------------------------------------------------

    async def answer(
        self,
        message: Incoming,
        session: Session,
        outlet: Outlet,
        *,
        caller: str,
        key: str | None = None,
        position: int | None = None,
        cancellable: bool = True,
    ) -> bytes | None:
        """Return the answer to one message, as bytes; None if it is owed none, or was cancelled."""
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
        key: str | None = None,
        position: int | None = None,
        cancellable: bool = True,
        params: Any = None,
    ) -> bytes | None:
        """Return the same as `answer`, but raise errors. `params` are those of the message, if they are decoded already."""
        if isinstance(message, Invalid):
            raise message.error
        if isinstance(message, ClientAnswer) or message.id is UNSET:
            self.take(message, session)
            return None
        # Step 1: the method, if the revision has it and the server has something to serve with it.
        name, revision, id = message.method, session.revision, message.id
        assert isinstance(id, (int, str))  # `arrays.read` has seen to it
        if name not in revision.requests:
            elsewhere = f"; MCP {revision.name} does not have it" if name in REQUESTS else ""
            raise MethodNotFound(f"there is no method {name[:100]!r}{elsewhere}")
        needed = _NEEDS.get(name.partition("/")[0])
        if needed is not None and not self.catalog.offers(needed):
            raise MethodNotFound(f"{name}: this server has no {needed}")
        # Step 2: its params, and the client it came from.
        if type(params) is not PARAMS[name]:
            params = params_of(message, PARAMS[name])
        peer = Peer(
            *(session, outlet, self._questions),
            id=id,
            raw=message.params,
            params=params,
            caller=caller,
            key=key,
            position=position,
        )
        # Step 3: its result. A call that may take long is a task of its own, so that `notifications/cancelled` can end it
        # (basic/utilities, "Cancellation"). Nothing can interrupt a plain function that reads, so that needs no task.
        handler, is_long = self.methods[name], cancellable and name in _CANCELLABLE
        if is_long and isinstance(params, CallTool):
            tool = self.catalog.tools.get(params.name)
            is_long = tool is None or not tool.plain or tool.is_async
        try:
            if not is_long:
                result = await handler(peer)
            elif id in session.calls:
                raise InvalidRequest(f"id: {id!r} is in use by a request that is not answered yet")
            else:
                task = session.calls[id] = asyncio.get_running_loop().create_task(handler(peer))
                try:
                    result = await task
                except asyncio.CancelledError:
                    this = asyncio.current_task()
                    if task.cancelled() and not (this is not None and this.cancelling()):
                        return None  # only the call is cancelled: its client does not want an answer
                    task.cancel()
                    raise
                finally:
                    del session.calls[id]
        except (RpcError, Gone):
            raise
        except Exception as error:
            failed(name, id, error)
            raise InternalError from error
        return None if result is None else self.answers.to(id, result, revision)

    def take(self, message: "Envelope | ClientAnswer", session: Session) -> bool:
        """Take an answer of the client or a notification; False if this process does not know the call or the question."""
        if isinstance(message, ClientAnswer):
            return session.answered(message.id, message.result, message.error)
        if message.method in REQUESTS:
            raise InvalidRequest(f"{message.method} is a request: it needs an id")
        if message.method != "notifications/cancelled":
            return True  # the other notifications, known or not, change nothing here
        try:
            id = UNSET if message.params is UNSET else msgspec.json.decode(message.params, type=Cancelled).id
        except msgspec.ValidationError:
            return True
        task = session.calls.get(id) if isinstance(id, (int, str)) else None
        if task is not None:
            task.cancel()
        return task is not None

    def is_command(self, message: Incoming) -> bool:
        """Return whether an entry of an array changes something: those run one after another, in array order (J13)."""
        if not isinstance(message, Envelope) or message.method != "tools/call":
            return False
        try:
            method = self.catalog.tools.get(params_of(message, CallTool).name)
        except RpcError:
            return False
        return method is not None and method.is_command

    # --- methods -----------------------------------------------------------------------------------------------------

    def opened(self, message: Envelope) -> tuple[Session, bytes]:
        """Return the session that `initialize` opens, and its result. Raises `InvalidParams` if the params do not fit."""
        params = params_of(message, Initialize)
        revision = offered(params.version)
        capabilities = self.catalog.capabilities(revision)
        introduction = {"protocolVersion": revision.name, "capabilities": capabilities, "serverInfo": self._info}
        return Session(revision, params.capabilities), encode({**introduction, **self._instructions})

    async def _discover(self, peer: Peer) -> object:
        """Answer `server/discover` (2026-07-28): the members of `initialize`, without a session."""
        supported = [revision.name for revision in STATELESS]
        capabilities = self.catalog.capabilities(peer.session.revision)
        return {"supportedVersions": supported, "capabilities": capabilities, **self._instructions, **self._kept}

    async def _ping(self, _: Peer) -> object:
        return b"{}"

    async def _set_level(self, peer: Peer) -> object:
        if peer.params.level not in LEVELS:
            raise InvalidParams(f"level: expected one of {', '.join(LEVELS)}")
        peer.session.level = peer.params.level
        return b"{}"

    async def _list(self, kind: str, peer: Peer) -> object:
        """Return one page of a list, with a cursor for the next one while there is more.

        A cursor must be one that this server gave: the empty text is not (server/utilities, "Pagination").
        """
        revision, cursor, start = peer.session.revision, peer.params.cursor, 0
        entries = self.catalog.list(kind, revision)
        if cursor is not None:
            try:
                start = int(base64.b64decode(cursor, altchars=b"-_", validate=True).removeprefix(b"from "))
            except ValueError:
                start = -1
            if not 0 < start < len(entries) or cursor != _cursor(start):
                raise InvalidParams("cursor: expected the nextCursor of an earlier page; the list may have changed since")
        page: JsonObject = {kind: entries[start : start + PAGE]}
        if start + PAGE < len(entries):
            page["nextCursor"] = _cursor(start + PAGE)
        return {**page, **self._kept} if revision.has("caching") else page


def _cursor(offset: int) -> str:
    return base64.urlsafe_b64encode(b"from %d" % offset).decode()


# --- params ----------------------------------------------------------------------------------------------------------


def params_of(message: Envelope, wanted: type[Params]) -> Any:
    """Return the params of a message, as one of the types in `PARAMS`, or as those of `initialize`."""
    try:
        return _DECODERS[wanted].decode(_EMPTY if message.params is UNSET else message.params)
    except msgspec.ValidationError as error:
        raise InvalidParams(_explained(error)) from None
    except (RecursionError, msgspec.DecodeError) as error:
        raise InvalidParams(f"params: {error}") from None


def _explained(error: Exception) -> str:
    """Return the text of msgspec's error, with the place first: `params.name: expected str, got int`."""
    what, _, where = str(error).partition(" - at `$")
    return f"params{where.rstrip('`')}: {what[:1].lower()}{what[1:]}".replace("`", "")


class BadEnvelope(InvalidParams):
    """The envelope of a request lacks a member that it must have."""


def described_params(message: Envelope, fields: headers.Fields | None = None) -> Params:
    """Return the params of a request that describes itself (2026-07-28). Raises if envelope, headers or version are wrong.

    The params are decoded for their method; params that do not fit it are decoded as any params, since the envelope is
    checked first.
    """
    # Step 1: the envelope in `_meta` (2026-07-28): version and capabilities are required.
    try:
        params: Params = _DECODE[message.method](message.params)  # type: ignore[arg-type]
    except (KeyError, TypeError, msgspec.ValidationError):
        try:
            params = Params() if message.params is UNSET else _DECODERS[Params].decode(message.params)
        except msgspec.ValidationError as error:
            raise BadEnvelope(_explained(error)) from None
    meta = params.meta
    if meta is UNSET or meta.version is UNSET or meta.capabilities is UNSET:
        raise BadEnvelope(f"params._meta must have {PREFIX}protocolVersion and {PREFIX}clientCapabilities")
    # Step 2: the HTTP headers agree with the body, if there are any.
    if fields is not None:
        headers.check(fields, message.method, params)
    # Step 3: a version without a handshake, and a log level that exists.
    revision = REVISIONS.get(meta.version)
    if revision is None or not revision.is_stateless:
        supported = [revision.name for revision in STATELESS]
        raise UnknownVersion(f"{meta.version[:40]!r} is not served", supported=supported, requested=meta.version)
    if meta.level is not UNSET and meta.level not in LEVELS:
        raise BadEnvelope(f"{PREFIX}logLevel: expected one of {', '.join(LEVELS)}")
    return params


def described_session(params: Params, calls: "dict[Id, asyncio.Task[object]] | None" = None) -> Session:
    """Return the session of a request that describes itself: it lives as long as the request."""
    meta = params.meta
    assert meta is not UNSET and meta.version is not UNSET and meta.capabilities is not UNSET  # `described_params`
    level = None if meta.level is UNSET else meta.level
    return Session(REVISIONS[meta.version], meta.capabilities, level=level, calls=calls)
