"""What a server says on its own: progress, log messages, changes, questions.

1. A function that is told is called at once, in the order of the messages; a coroutine function has its turn after those
   that were told before. What it raises is logged, and disturbs nobody.
2. A question of the server's is answered beside everything else, by the host; the server may take it back. At 2026-07-28
   there are none: the client must not answer, so it does not.
3. What cannot be read, or is of no known kind, is passed over; so is a question more than `QUESTIONS` that are not answered
   yet, or under the id of one of them: whoever asks so much does not listen.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import UNSET, Struct

from wirecall.errors import CallFailed, RpcError
from wirecall.logs import logger
from wirecall.mcp.client.changes import KINDS, Change
from wirecall.mcp.client.host import Host
from wirecall.mcp.revisions import Revision
from wirecall.mcp.types import PREFIX, Cancelled, ProgressToken
from wirecall.protocol.messages import ErrorObject, encode
from wirecall.protocol.replies import UNREADABLE, Arrived

QUESTIONS = 100


class Log(Struct, frozen=True):
    """A log message of the server's."""

    level: str
    data: Any = None
    logger: str | None = None


class Follower(Struct, weakref=True):
    """Who follows the progress of a call. The call holds it; with the call it is gone."""

    told: Callable[[float, float | None, str | None], Any]


class _Progress(Struct, rename="camel"):
    progress_token: ProgressToken
    progress: float
    total: float | None = None
    message: str | None = None


class _Told(Struct):
    uri: str | None = None
    notifications: dict[str, Any] | None = None
    meta: dict[str, Any] = msgspec.field(default_factory=dict, name="_meta")

    @property
    def subscription(self) -> Any:
        return self.meta.get(f"{PREFIX}subscriptionId")


class Inbox:
    """The receiving end of one client."""

    def __init__(
        self,
        host: Host,
        send: Callable[[bytes], Awaitable[None]],
        on_log: Callable[[Log], Any] | None,
        on_change: Callable[[Change, Any], None],
    ) -> None:
        self.revision: Revision | None = None
        self.followers: WeakValueDictionary[ProgressToken, Follower] = WeakValueDictionary()
        self.acknowledged: Callable[[Any, dict[str, Any]], None] = lambda _id, _honoured: None
        self.cancelled: Callable[[Any], None] = lambda _id: None
        self._host = host
        self._send = send
        self._on_log = on_log
        self._on_change = on_change
        self._answering: dict[Any, asyncio.Task[None]] = {}  # questions of the server's, by their ids
        self._turns: asyncio.Queue[tuple[Any, tuple[Any, ...]]] = asyncio.Queue()
        self._teller: asyncio.Task[None] | None = None

    def hear(self, message: Arrived) -> None:
        """One request or notification."""
        try:
            if message.id is not UNSET:
                self._asked(message)
            elif message.method in KINDS:
                self._changed(message)
            elif message.method in _TOLD:
                _TOLD[message.method](self, b"{}" if message.params is UNSET else message.params)
        except UNREADABLE as error:
            logger.debug("a message of the server's cannot be read: %s", error)

    async def aclose(self) -> None:
        tasks = [task for task in (self._teller, *self._answering.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- notifications -----------------------------------------------------------------------------------------------

    def _progressed(self, params: bytes) -> None:
        told = msgspec.json.decode(params, type=_Progress)
        follower = self.followers.get(told.progress_token)
        if follower is not None:
            self.tell(follower.told, told.progress, told.total, told.message)

    def _logged(self, params: bytes) -> None:
        if self._on_log is not None:
            self.tell(self._on_log, msgspec.json.decode(params, type=Log))

    def _changed(self, message: Arrived) -> None:
        told = _Told() if message.params is UNSET else msgspec.json.decode(message.params, type=_Told)
        kind = KINDS[str(message.method)]
        self._on_change(Change(kind, told.uri if kind == "updated" else None), told.subscription)

    def _acknowledged(self, params: bytes) -> None:
        told = msgspec.json.decode(params, type=_Told)
        self.acknowledged(told.subscription, told.notifications or {})

    def _taken_back(self, params: bytes) -> None:
        id = msgspec.json.decode(params, type=Cancelled).id
        if isinstance(id, (int, str)):
            if id in self._answering:
                self._answering[id].cancel()
            self.cancelled(id)

    def tell(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function of the user's; if it wants to wait, it waits in its turn."""
        if inspect.iscoroutinefunction(function):
            self._turns.put_nowait((function, arguments))
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

    # --- questions ---------------------------------------------------------------------------------------------------

    def _asked(self, message: Arrived) -> None:
        if (self.revision is not None and self.revision.is_stateless) or type(message.id) not in (int, str):
            logger.warning("the server asked %.100r, which it may not do; it gets no answer", message.method)
            return
        id: Any = message.id
        if id in self._answering or len(self._answering) >= QUESTIONS:
            logger.debug("a question of the server's is passed over: %.100r", message.method)
            return
        task = asyncio.get_running_loop().create_task(self._answer(message))
        self._answering[id] = task
        task.add_done_callback(lambda _: self._answering.pop(id, None))

    async def _answer(self, message: Arrived) -> None:
        try:
            asked = str(message.method)
            result = {} if asked == "ping" else await self._host.answer(asked, message.params)
            reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message.id, "result": result}
        except RpcError as error:
            told = ErrorObject(error.code, error.message, UNSET if error.data is None else error.data)
            reply = {"jsonrpc": "2.0", "id": message.id, "error": told}
        with suppress(CallFailed):
            await self._send(encode(reply))


_TOLD: dict[Any, Any] = {
    "notifications/progress": Inbox._progressed,
    "notifications/message": Inbox._logged,
    "notifications/subscriptions/acknowledged": Inbox._acknowledged,
    "notifications/cancelled": Inbox._taken_back,
}
