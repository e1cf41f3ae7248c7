"""The methods of MCP: what a server answers, in each revision.

`Server.answer` takes one message of a client and gives the bytes of its answer, or None. Which methods there are is the
revision's business (`revisions`); what answers them is in the table of `Server._table`, which is the index of the files
beside this one. What is left for this file is the way of one message:

1. A method that the revision does not have, or that is there for something this server does not offer, is not found.
2. What may take long is a task of its own, so that `notifications/cancelled` ends it and nothing else.
3. What is refused is told as it is; any other exception is an internal error, and its text stays here.
4. A notification is owed nothing, and one that is unknown is met with silence.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Struct

from wirecall.errors import Gone, InternalError, InvalidParams, InvalidRequest, MethodNotFound, RpcError
from wirecall.logs import failed
from wirecall.mcp.revisions import REQUESTS, STATELESS, Revision, offered
from wirecall.mcp.server.arrays import Incoming, Response
from wirecall.mcp.server.asking import Id, Outlet, Session
from wirecall.mcp.server.calls import Calls
from wirecall.mcp.server.catalog import Catalog
from wirecall.mcp.server.changes import Hub, listen, subscribe, unsubscribe
from wirecall.mcp.server.pages import Pages
from wirecall.mcp.server.requests import PARAMS, Request, params_of
from wirecall.mcp.server.results import Answers, failure
from wirecall.mcp.server.sealed import Seals
from wirecall.mcp.server.states import States
from wirecall.mcp.server.tools import Tools
from wirecall.mcp.types import LEVELS, Cancelled, Initialize
from wirecall.protocol.limits import Limits
from wirecall.protocol.messages import Envelope, Invalid, encode
from wirecall.server.dispatch import Dispatcher

Handler = Callable[[Request], Awaitable[Any]]

# What a method is there for; without it the method is not there either (the rule of unadvertised capabilities).
_NEEDS = {"tools": "tools", "prompts": "prompts", "resources": "resources", "completion": "completions"}

# What can take long enough to be cancelled.
_CANCELLABLE = frozenset({"tools/call", "prompts/get", "resources/read", "completion/complete", "subscriptions/listen"})


class Identity(Struct, frozen=True):
    """What the server tells about itself."""

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
        calls = Calls(catalog, dispatcher, States(seals), limits)
        self.tools = Tools(catalog, dispatcher, calls, self.answers)
        self._pages = Pages(catalog, is_public=is_public)
        self._handlers = self._table(calls)

    def _table(self, calls: Calls) -> dict[str, Handler]:
        return {
            "ping": self._ping,
            "server/discover": self._discover,
            "logging/setLevel": self._set_level,
            "tools/list": partial(self._list, "tools"),
            "tools/call": self.tools.call,
            "prompts/list": partial(self._list, "prompts"),
            "prompts/get": calls.get_prompt,
            "resources/list": partial(self._list, "resources"),
            "resources/templates/list": partial(self._list, "resourceTemplates"),
            "resources/read": calls.read_resource,
            "resources/subscribe": subscribe,
            "resources/unsubscribe": unsubscribe,
            "subscriptions/listen": partial(listen, self.hub, self.catalog),
            "completion/complete": calls.complete,
        }

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
            params = params_of(message, wanted)
        request = Request(id, message.params, params, session, outlet, caller, key, position)
        try:
            if not cancellable or message.method not in _CANCELLABLE or self.tools.is_instant(params):
                result = await handler(request)
            else:
                result = await _cancellable(handler(request), id, session)
        except (RpcError, Gone):
            raise
        except Exception as error:
            failed(message.method, id, error)
            raise InternalError from error
        return None if result is None else self.answers.to(id, result, session.revision)

    def _find(self, name: str, revision: Revision) -> tuple[Handler, Any]:
        """What answers a method, and the type of its params."""
        if name not in revision.requests:
            elsewhere = f"; MCP {revision.name} does not have it" if name in REQUESTS else ""
            raise MethodNotFound(f"there is no method {name[:100]!r}{elsewhere}")
        needed = _NEEDS.get(name.partition("/")[0])
        if needed is not None and not self.catalog.offers(needed):
            raise MethodNotFound(f"{name}: this server has no {needed}")
        return self._handlers[name], PARAMS[name]

    def take(self, message: "Envelope | Response", session: Session) -> bool:
        """An answer of the client's, or a notification. False: it is about something that is not known here."""
        if isinstance(message, Response):
            return session.answered(message.id, message.result, message.error)
        if message.method == "notifications/cancelled":
            return _cancel(message, session)
        if message.method in REQUESTS:
            raise InvalidRequest(f"{message.method} is a request: it needs an id")
        return True  # what is unknown, or of no use to us, is met with silence

    # --- methods -----------------------------------------------------------------------------------------------------

    def opened(self, message: Envelope) -> tuple[Session, bytes]:
        """`initialize`: the session it opens, and its result. Raises what is wrong with it."""
        params = params_of(message, Initialize)
        revision = offered(params.version)
        capabilities = self.catalog.capabilities(revision)
        introduction = {"protocolVersion": revision.name, "capabilities": capabilities, "serverInfo": self._info}
        return Session(revision, params.capabilities), encode({**introduction, **self._instructions})

    async def _discover(self, request: Request) -> Any:
        """2026-07-28: what `initialize` tells, without opening anything."""
        supported = [revision.name for revision in STATELESS]
        capabilities = self.catalog.capabilities(request.session.revision)
        return {"supportedVersions": supported, "capabilities": capabilities, **self._instructions, **self._pages.kept}

    async def _ping(self, _: Request) -> Any:
        return b"{}"

    async def _set_level(self, request: Request) -> Any:
        if request.params.level not in LEVELS:
            raise InvalidParams(f"level: expected one of {', '.join(LEVELS)}")
        request.session.level = request.params.level
        return b"{}"

    async def _list(self, kind: str, request: Request) -> Any:
        return self._pages.page(kind, request.params.cursor, request.session.revision)


# --- cancelling ------------------------------------------------------------------------------------------------------


async def _cancellable(work: Any, id: Id, session: Session) -> Any:
    """The work in a task of its own; None if the client has cancelled it."""
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


def _is_cancelled() -> bool:
    """Whether it is us who are cancelled, not only the work."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancel(message: Envelope, session: Session) -> bool:
    try:
        id = UNSET if message.params is UNSET else msgspec.json.decode(message.params, type=Cancelled).id
    except msgspec.ValidationError:
        return True
    task = session.calls.get(id) if isinstance(id, (int, str)) else None
    if task is not None:
        task.cancel()
    return task is not None
