"""`Client`: calls, notifications and batches to one server, each with a deadline and one outcome.

    call -> Entry -> Delivery (see `delivery`), in a dialect -> result or error

1. A call gets its key once, before it is first sent. The key decides whether the call may be
   repeated.
2. The client checks user input before it sends anything, and a result after it has read it: a
   result that does not fit its `type` is the error of a call that ran.
3. A client is a `Client(link, dialect)`: `JsonRpc` is the dialect of plain JSON-RPC, and MCP has
   another. `SyncClient` is a client for code without an event loop.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Never, Self, TypedDict, TypeVar, Unpack, overload

from msgspec import Struct

from wirecall.aio import cancel_all
from wirecall.client.delivery import Delivery, Dialect, Options
from wirecall.client.exchange import AnyEntry, Arrays, Entry, Link, Params, Wire
from wirecall.client.jsonrpc import is_by_position
from wirecall.client.pushes import Listener, Pushes
from wirecall.client.refs import ResultRef
from wirecall.errors import ConnectionLost, KeyInvalid, UsageError, no_option
from wirecall.protocol.models import wanted
from wirecall.protocol.params import KEY
from wirecall.server.policy import check_key

T = TypeVar("T")
R = TypeVar("R")

_PARAMS = (dict, list, tuple, Struct, Mapping)  # the common ones first


class CallOptions(TypedDict, total=False):
    """The options of a call; `Client.call` explains them."""

    timeout: float | None
    key: str | bool | None
    query: bool | None


class Names(Generic[R]):
    """Methods as attributes.

    `rpc.price(sku="tea")` calls `price`, and `rpc.order.place(...)` calls `order.place`.
    """

    __slots__ = ("_call", "_path")

    def __init__(self, call: Callable[[str, Params], R], path: str = "") -> None:
        self._call = call
        self._path = path

    def __getattr__(self, name: str) -> "Names[R]":
        if name.startswith("__"):
            raise AttributeError(name)
        if self._path:
            name = f"{self._path}.{name}"
        return Names(self._call, name)

    def __call__(self, *by_position: Any, **by_name: Any) -> R:
        if by_position and by_name:
            raise UsageError(
                f"{self._path} got params by position and by name.",
                "JSON-RPC carries an array or an object",
                "use one of both",
            )
        return self._call(self._path, list(by_position) or by_name or None)


def misplaced(
    verb: str, name: str, params: object, wrong: Mapping[str, object], known: Collection[str]
) -> UsageError:
    """Return the error for arguments of a call that are not its options.

    They are params of the method, or mistyped options.
    """
    first = next(iter(wrong))
    error = no_option(verb, first, ["type", *sorted(known)])
    if "fix:" in str(error):
        return error
    given = wrong
    if isinstance(params, Mapping):
        given = {**params, **wrong}
    members = ", ".join(f'"{each}": ...' for each in given)
    return UsageError(
        f"{verb}() has no option {first!r}.",
        "the params of a method are one object, beside the options of the call",
        f'use {verb}("{name}", {{{members}}})',
    )


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


# The members of MCP's clients that this one lacks. Those are in a higher layer, so a test compares
# the names.
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


def missing_member(client: object, name: str) -> Any:
    """Raise the error for a member that a client lacks.

    Methods of MCP's clients need `protocol="mcp"`.
    """
    hint = ""
    if name in MCP_ONLY:
        hint = '; it speaks JSON-RPC: for MCP, use connect(..., protocol="mcp")'
    raise AttributeError(
        f"{type(client).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=client
    )


class Client(Openable):
    """Calls to one server.

    `connect` makes it.

    >>> async def ask_twice() -> list[int]:
    ...     async with connect(app) as client, client.batch() as batch:
    ...         calls = [batch.call("price", {"sku": sku}) for sku in ("tea", "coffee")]
    ...     return [call.result() for call in calls]
    >>> asyncio.run(ask_twice())
    [450, 450]
    """

    if not TYPE_CHECKING:  # a type checker reports the unknown name itself
        __getattr__ = missing_member

    def __init__(
        self, link: Link, dialect: Dialect, options: Options, pushes: Pushes | None = None
    ) -> None:
        # The functions that receive notifications. None: the link carries only answers.
        self._pushes = pushes
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
        """Whether calls may be sent together in one array, and why."""
        return self._delivery.arrays

    async def open(self) -> None:
        await self._delivery.open()

    async def aclose(self) -> None:
        if self._pushes is not None:
            await self._pushes.aclose()
        await self._delivery.aclose()

    def on(self, method: str, listener: Listener) -> None:
        """Call a function with the params of each notification of this name that the server sends.

        A handler sends them with `ctx.notify`. The function is sync or async. Notifications are
        handled in their order, and an exception is logged.
        """
        if self._pushes is None:
            raise UsageError(
                f"on({method!r}, ...): expected a link that can push.",
                "HTTP, MCP and an app in memory carry only answers to such a client",
                'connect over "ws://HOST:PORT/rpc", or to a server on stdio',
            )
        self._pushes.on(method, listener)

    # --- calls ------------------------------------------------------------------------------------

    @overload
    async def call(
        self, method: str, params: Params = None, *, type: type[T], **options: Unpack[CallOptions]
    ) -> T: ...
    @overload
    async def call(
        self,
        method: str,
        params: Params = None,
        *,
        type: Any = None,
        **options: Unpack[CallOptions],
    ) -> Any: ...
    async def call(
        self,
        method: str,
        params: Params = None,
        *,
        type: Any = None,
        **options: Unpack[CallOptions],
    ) -> Any:
        """Call a method and return its result, read as `type`.

        `timeout` is the time for all attempts.

        `key` is the idempotency key: a string, True to mint one, False for none. By default a call
        gets one if the server declares its method as a command. `query=True` declares that the
        method only reads.
        """
        entry = self.entry(method, params, type=type, **options)
        await self._delivery.run(entry)
        return entry.result()

    async def notify(
        self, method: str, params: Params = None, *, timeout: float | None = None
    ) -> None:
        """Send a notification. The server does not answer it, not even with an error."""
        entry = self.entry(method, params, timeout=timeout, is_notification=True)
        await self._delivery.run(entry)
        entry.result()

    def batch(self) -> "Batch":
        """Return a block whose calls are sent together.

        `async with client.batch() as b: one = b.call(...)`.
        """
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
        **wrong: Never,
    ) -> AnyEntry:
        """Return a checked call, not sent yet. Its timeout begins when it is sent."""
        if wrong:
            raise misplaced("call", method, params, wrong, CallOptions.__optional_keys__)
        given = self._timeout if timeout is None else timeout
        entry: AnyEntry = Entry(
            method, params, self._dialect.read, given, type, key, query, is_notification, extra
        )
        if params is not None and not isinstance(params, _PARAMS):
            kind = params.__class__.__name__
            raise UsageError(
                f"{method}: params of type {kind}.",
                "JSON-RPC carries an array or an object",
                "use a dict",
            )
        if key:
            _check_key(method, params, key)
        if type is not None:
            wanted(type)  # raises before anything is sent
        self._dialect.check(entry)
        return entry


def _check_key(method: str, params: Params, key: str | bool) -> None:
    if isinstance(key, str):
        try:
            check_key(key)
        except KeyInvalid as error:
            raise UsageError(
                f"{method}: {key!r} is not a key.", str(error.data["reason"])
            ) from None
    if is_by_position(params):
        raise UsageError(
            f"{method}: a key needs params by name.",
            f"it travels as the member {KEY}",
            "use a dict of params",
        )


class Collected:
    """Collected calls, to be sent together."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.entries: list[AnyEntry] = []
        # An entry waits for others by `after=`.
        self._has_after = False
        # The references that were made before the first entry: they are not to this batch.
        self._earlier_refs = ResultRef.made
        self._is_sent = False
        self.wire: Wire | None = None
        self.reason = "nothing was sent"
        self.rpc: Names[AnyEntry] = Names(self.call)

    @overload
    def call(
        self,
        method: str,
        params: Params = None,
        *,
        type: type[T],
        after: Sequence[AnyEntry] = (),
        **options: Unpack[CallOptions],
    ) -> Entry[T]: ...
    @overload
    def call(
        self,
        method: str,
        params: Params = None,
        *,
        type: Any = None,
        after: Sequence[AnyEntry] = (),
        **options: Unpack[CallOptions],
    ) -> AnyEntry: ...
    def call(
        self,
        method: str,
        params: Params = None,
        *,
        type: Any = None,
        after: Sequence[AnyEntry] = (),
        **options: Unpack[CallOptions],
    ) -> AnyEntry:
        """Add a call. Its outcome is in the entry after the block.

        Its params may contain parts of earlier results: `entry.ref("/orders/0/id")`. It runs only
        if the entries in `after` have succeeded.
        """
        return self._add(self._client.entry(method, params, type=type, **options), after)

    def notify(self, method: str, params: Params = None) -> Entry[None]:
        """Add a notification: the server does not answer it."""
        return self._add(self._client.entry(method, params, is_notification=True))

    def _add(self, entry: AnyEntry, after: Sequence[AnyEntry] = ()) -> AnyEntry:
        if self._is_sent:
            raise _sent_already()
        if after:
            entry.after = _targets(entry, after)
            self._has_after = True
        self.entries.append(entry)
        return entry

    async def _leave(self) -> None:
        """Send the calls at the end of the block, unless `stream` has sent them."""
        if self.entries and not self._is_sent:
            self._is_sent = True
            self.wire, self.reason = await self._send()

    async def _answers(self) -> AsyncGenerator[AnyEntry, None]:
        """Send the calls, and yield each entry as soon as it is settled.

        Nothing is sent before the first answer is asked for. An entry whose answer has not come when
        the generator is closed fails.
        """
        if self._is_sent:
            raise _sent_already()
        if not self.entries:
            return
        self._is_sent = True
        # The entries that are settled, and None when all of them are.
        settled: asyncio.Queue[AnyEntry | None] = asyncio.Queue()
        left = {entry for entry in self.entries if not entry.is_notification}
        for entry in left:
            entry.wants_stream = True
            entry.waiter = asyncio.get_running_loop().create_future()
            entry.waiter.add_done_callback(partial(_put, settled, entry))
        sending = asyncio.create_task(self._send())
        sending.add_done_callback(partial(_put, settled, None))
        try:
            while (each := await settled.get()) is not None:
                left.discard(each)
                yield each
            self.wire, self.reason = sending.result()
            # Entries that were not sent: a person has declined them, for example.
            for entry in [each for each in self.entries if each in left]:
                left.discard(entry)
                yield entry
        finally:
            await cancel_all(sending)
            for entry in left:
                if not entry.is_settled:
                    entry.fail(ConnectionLost(f"{entry.method}: the answers are not awaited"))

    @property
    def _is_linked(self) -> bool:
        """Whether an entry needs another one."""
        if self._has_after:
            return True
        if ResultRef.made == self._earlier_refs:
            return False
        return any(entry.is_target for entry in self.entries)

    async def _send(self) -> tuple[Wire, str]:
        """Settle all entries; return how they were sent, and why."""
        client = self._client
        if self._is_linked:
            from wirecall.client.linked import LinkedBatch

            return await LinkedBatch(client._delivery, client._dialect, self.entries).run()
        return await client._delivery.run_together(self.entries)


def _sent_already() -> UsageError:
    return UsageError("The batch was sent already.", fix="begin another: client.batch()")


def _put(queue: "asyncio.Queue[AnyEntry | None]", entry: "AnyEntry | None", _done: object) -> None:
    queue.put_nowait(entry)


def _targets(entry: AnyEntry, after: Sequence[AnyEntry]) -> tuple[AnyEntry, ...]:
    """Return the entries that `after=` lists; UsageError if it lists anything else."""
    targets: tuple[Any, ...] = (after,)
    if isinstance(after, Sequence):
        targets = tuple(after)
    for target in targets:
        if isinstance(target, Entry) and not target.is_notification:
            continue
        what = type(target).__name__
        if isinstance(target, Entry):
            what = "a notification"
        raise UsageError(
            f"{entry.method}: after= has {what}.",
            "expected entries of the same batch that get an answer",
            "first = batch.call(...); batch.call(..., after=[first])",
        )
    return targets


class Batch(Collected):
    """Calls that are collected in a block and sent at its end, unless the block fails."""

    def stream(self) -> AsyncGenerator[AnyEntry, None]:
        """Send the calls now, and yield each entry when its answer has come.

        `async for entry in batch.stream()`. Over HTTP the client asks the server for a stream.
        """
        return self._answers()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None
    ) -> None:
        if kind is None:
            await self._leave()
