"""`Client`: calls, notifications and batches to one server, each with a deadline and one outcome.

    call -> Entry -> Delivery (see `delivery`), in the words of a dialect -> result or error

1. A call gets its key once, before it is first sent, and with that it is decided whether it may be repeated.
2. What users give is checked before anything is sent, and what comes back after it was read: a result that does not fit its
   `type` is the error of a call that ran.
3. `Client(link, dialect)` is all there is: `JsonRpc` is the dialect of plain JSON-RPC, MCP brings its own.
"""

import asyncio
import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypedDict, TypeVar, Unpack, overload

import msgspec
from msgspec import Raw, Struct

from wirecall.client.delivery import Delivery, Dialect, Options, mint_key
from wirecall.client.exchange import AnyEntry, Arrays, Entry, Link, Params, Wire
from wirecall.errors import ConnectionLost, KeyInvalid, NotSent, UsageError
from wirecall.protocol.messages import encode
from wirecall.protocol.models import wanted
from wirecall.protocol.params import KEY
from wirecall.server.policy import check_key
from wirecall.stepping import cancel_all

T = TypeVar("T")
R = TypeVar("R")

DISCOVERY = 5.0  # seconds that `rpc.discover` may take, and no more than half of a call's time

_PARAMS = (dict, list, tuple, Struct, Mapping)  # the common ones first


class CallOptions(TypedDict, total=False):
    """The options of a call; `Client.call` explains them."""

    timeout: float | None
    key: str | bool | None
    query: bool | None


class Names(Generic[R]):
    """Methods as attributes: `rpc.price(sku="tea")` calls `price`, and `rpc.order.place(...)` calls `order.place`."""

    __slots__ = ("_call", "_path")

    def __init__(self, call: Callable[[str, Params], R], path: str = "") -> None:
        self._call = call
        self._path = path

    def __getattr__(self, name: str) -> "Names[R]":
        if name.startswith("__"):
            raise AttributeError(name)
        return Names(self._call, f"{self._path}.{name}" if self._path else name)

    def __call__(self, *by_position: Any, **by_name: Any) -> R:
        if by_position and by_name:
            raise UsageError(
                f"{self._path} got params by position and by name.",
                "JSON-RPC carries an array or an object",
                "use one of both",
            )
        return self._call(self._path, list(by_position) or by_name or None)


def _is_by_position(params: Params) -> bool:
    """Return whether params travel as an array, which has no place for a key."""
    return isinstance(params, (list, tuple)) or (isinstance(params, Struct) and params.__struct_config__.array_like)


class Openable(ABC):
    """A connection that is open in its block."""

    @abstractmethod
    async def open(self) -> None:
        """Open the connection; `async with` does it."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connection. Calls in flight fail."""

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


# The members of MCP's clients that this one lacks. They lie in a higher layer, so a test compares the names with theirs.
MCP_ONLY = {
    "call_tool",
    "capabilities",
    "complete",
    "extension",
    "get_prompt",
    "honours_keys",
    "instructions",
    "list_prompts",
    "list_resource_templates",
    "list_resources",
    "list_tools",
    "listen",
    "ping",
    "read_resource",
    "server",
    "set_log_level",
    "start_tool",
    "subscribe",
    "task",
    "tool_entry",
    "unsubscribe",
}


def _missing(client: object, name: str) -> Any:
    """Raise the error for a member that a client lacks: the methods of MCP's clients come with `protocol="mcp"`."""
    hint = '; it speaks JSON-RPC: for MCP, use connect(..., protocol="mcp")' if name in MCP_ONLY else ""
    raise AttributeError(f"{type(client).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=client)


class Client(Openable):
    """Calls to one server."""

    if not TYPE_CHECKING:  # a type checker reports the unknown name itself
        __getattr__ = _missing

    def __init__(self, link: Link, dialect: Dialect, options: Options) -> None:
        self._delivery = Delivery(link, dialect, options)
        self._dialect = dialect
        self._timeout = options.timeout
        self.rpc: Names[Awaitable[Any]] = Names(self.call)

    @property
    def revision(self) -> str | None:
        """The revision of MCP that is spoken; None: it is plain JSON-RPC."""
        return None

    @property
    def arrays(self) -> Arrays:
        """Whether calls may leave together in one array, and why."""
        return self._delivery.arrays

    async def open(self) -> None:
        await self._delivery.open()

    async def aclose(self) -> None:
        await self._delivery.aclose()

    # --- calls -------------------------------------------------------------------------------------------------------

    @overload
    async def call(self, method: str, params: Params = None, *, type: type[T], **options: Unpack[CallOptions]) -> T: ...
    @overload
    async def call(self, method: str, params: Params = None, *, type: Any = None, **options: Unpack[CallOptions]) -> Any: ...
    async def call(self, method: str, params: Params = None, *, type: Any = None, **options: Unpack[CallOptions]) -> Any:
        """Call a method and return its result, read as `type`. `timeout` is the time for all attempts.

        `key` is the idempotency key: a text, True to mint one, False for none; without it, commands of servers that say
        which of their methods are commands get one. `query=True` says that the method only reads.
        """
        entry = self.entry(method, params, type=type, **options)
        await self._delivery.run(entry)
        return entry.result()

    async def notify(self, method: str, params: Params = None, *, timeout: float | None = None) -> None:
        """Send a notification. The server does not answer it, and does not say whether it understood."""
        entry = self.entry(method, params, timeout=timeout, is_notification=True)
        await self._delivery.run(entry)
        entry.result()

    def batch(self) -> "Batch":
        """Return a block of calls that leave together: `async with client.batch() as b: one = b.call(...)`."""
        return Batch(self)

    def entry(
        self,
        method: str,
        params: Params = None,
        *,
        type: Any = None,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
        is_notification: bool = False,
        extra: Any = None,
    ) -> AnyEntry:
        """Return a call to be made, checked. Its time begins when it is sent."""
        given = self._timeout if timeout is None else timeout
        entry: AnyEntry = Entry(method, params, self._dialect.read, given, type, key, query, is_notification, extra)
        if params is not None and not isinstance(params, _PARAMS):
            kind = params.__class__.__name__
            raise UsageError(f"{method}: params of type {kind}.", "JSON-RPC carries an array or an object", "use a dict")
        if entry.key:
            if isinstance(entry.key, str):
                try:
                    check_key(entry.key)
                except KeyInvalid as error:
                    raise UsageError(f"{method}: {entry.key!r} is not a key.", str(error.data["reason"])) from None
            if _is_by_position(params):
                raise UsageError(
                    f"{method}: a key needs params by name.", f"it travels as the member {KEY}", "use a dict of params"
                )
        if type is not None:
            wanted(type)  # raises before anything is sent
        self._dialect.check(entry)
        return entry


class Collected:
    """Calls that are collected, to leave together."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.entries: list[AnyEntry] = []
        self.wire: Wire | None = None
        self.reason = "nothing was sent"
        self.rpc: Names[AnyEntry] = Names(self.call)

    @overload
    def call(self, method: str, params: Params = None, *, type: type[T], **options: Unpack[CallOptions]) -> Entry[T]: ...
    @overload
    def call(self, method: str, params: Params = None, *, type: Any = None, **options: Unpack[CallOptions]) -> AnyEntry: ...
    def call(self, method: str, params: Params = None, *, type: Any = None, **options: Unpack[CallOptions]) -> AnyEntry:
        """Add a call. Its outcome is in the entry when the block is over."""
        return self._add(self._client.entry(method, params, type=type, **options))

    def notify(self, method: str, params: Params = None) -> Entry[None]:
        """Add a notification: the server does not answer it."""
        return self._add(self._client.entry(method, params, is_notification=True))

    def _add(self, entry: AnyEntry) -> AnyEntry:
        if self.wire is not None:
            raise UsageError("The batch was sent already.", fix="begin another: client.batch()")
        self.entries.append(entry)
        return entry

    async def _leave(self) -> None:
        if self.entries:
            self.wire, self.reason = await self._client._delivery.run_together(self.entries)


class Batch(Collected):
    """Calls that are collected in a block and sent at its end; nothing is sent if the block fails."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        if kind is None:
            await self._leave()


# --- JSON-RPC ---------------------------------------------------------------------------------------------------------


class JsonRpc(Dialect):
    """The dialect of JSON-RPC 2.0, which adds nothing to it but idempotency keys.

    Which methods are commands, and so get a key, our servers tell by `rpc.discover`, an OpenRPC document with `x-kind`. One
    call asks, the others wait for it; none gives more than a good half of its own time to that. A server that refuses is not
    asked again, one that was not reached is.
    """

    def __init__(self, kinds: Mapping[str, str] | None) -> None:
        self._kinds = kinds  # "query" or "command", by name; None: not asked yet
        self._asking = asyncio.Lock()

    async def prepare(self, entry: AnyEntry) -> None:
        kind = None
        if entry.key is None and entry.query is None:
            if self._kinds is None:
                await self._discover(entry.timeout)
            kind = (self._kinds or {}).get(entry.method)
        if entry.key is True or (kind == "command" and not _is_by_position(entry.params)):
            entry.key = mint_key()
        entry.key = entry.key if isinstance(entry.key, str) else None
        entry.safe = entry.key is not None or entry.query is True or kind == "query"

    async def _discover(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout * 0.6), self._asking:
                if self._kinds is not None:
                    return
                answer: AnyEntry = Entry("rpc.discover", None, self.read, min(DISCOVERY, timeout / 2), query=True)
                answer.safe, answer.deadline = True, self.delivery.clock.time() + answer.timeout
                await self.delivery.deliver([answer])
                if isinstance(answer.error, NotSent | ConnectionLost):
                    return
                document = answer.result() if answer.ok else None
                methods = document.get("methods") if isinstance(document, dict) else None
                described = [one for one in methods if isinstance(one, dict)] if isinstance(methods, list) else []
                pairs = [(one.get("name"), one.get("x-kind")) for one in described]
                self._kinds = {name: kind for name, kind in pairs if isinstance(name, str) and isinstance(kind, str)}

    def params(self, entry: AnyEntry) -> Any:
        if entry.key is None:
            return super().params(entry)
        members = entry.params or {}
        if isinstance(members, Struct):  # with the names and the members that it has in JSON
            members = msgspec.json.decode(encode(members), type=dict[str, Raw])
        return {**members, KEY: entry.key}


# --- without an event loop --------------------------------------------------------------------------------------------


class SyncOpenable:
    """A connection for code without an event loop: it is open at once.

    One thread of its own runs one loop, and the methods wait for what the connection does there. It closes itself when it is
    no longer used, and when the program ends.
    """

    def __init__(self, connection: Openable) -> None:
        self._loop = Loop()
        try:
            self._loop.run(connection.__aenter__())
        except BaseException:
            self._loop.stop()
            raise
        self._finalizer = weakref.finalize(self, _close, self._loop, connection)

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncClient(SyncOpenable):
    """The client for code without an event loop: the methods of `Client`, blocking, from any thread."""

    if not TYPE_CHECKING:
        __getattr__ = _missing

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._client = client
        self.rpc: Names[Any] = Names(self.call)

    @property
    def revision(self) -> str | None:
        """The revision of MCP that is spoken; None: it is plain JSON-RPC."""
        return self._client.revision

    @property
    def arrays(self) -> Arrays:
        """Whether calls may leave together in one array, and why."""
        return self._client.arrays

    @overload
    def call(self, method: str, params: Params = None, *, type: type[T], **options: Unpack[CallOptions]) -> T: ...
    @overload
    def call(self, method: str, params: Params = None, *, type: Any = None, **options: Unpack[CallOptions]) -> Any: ...
    def call(self, method: str, params: Params = None, *, type: Any = None, **options: Unpack[CallOptions]) -> Any:
        """Call a method and return its result, as `Client.call` does."""
        return self._loop.run(self._client.call(method, params, type=type, **options))

    def notify(self, method: str, params: Params = None, *, timeout: float | None = None) -> None:
        """Send a notification, as `Client.notify` does."""
        self._loop.run(self._client.notify(method, params, timeout=timeout))

    def batch(self) -> "SyncBatch":
        """Return a block of calls that leave together: `with client.batch() as b: one = b.call(...)`."""
        return SyncBatch(self._client, self._loop)


class SyncBatch(Collected):
    """Calls that are collected in a block and sent at its end; nothing is sent if the block fails."""

    def __init__(self, client: Client, loop: "Loop") -> None:
        super().__init__(client)
        self._loop = loop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None) -> None:
        if kind is None:
            self._loop.run(self._leave())


def _close(loop: "Loop", connection: Openable) -> None:
    try:
        loop.run(connection.aclose())
    finally:
        loop.stop()


class Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wirecall client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, waited for in the calling thread. Ctrl+C cancels it."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            work.close()
            if self._thread.is_alive():
                raise UsageError("A blocking call in the client's own loop.", "it would wait for itself", "use connect()")
            raise NotSent("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End what still runs, then the thread."""

        async def end_all() -> None:
            await cancel_all(*(asyncio.all_tasks() - {asyncio.current_task()}))
            await self._loop.shutdown_asyncgens()

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(end_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join()
        self._loop.close()
