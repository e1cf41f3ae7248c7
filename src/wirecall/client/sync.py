"""`SyncClient`: the methods of `Client`, blocking, for code without an event loop."""

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Generator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from wirecall.aio import cancel_all
from wirecall.client.client import (
    CallOptions,
    Client,
    Collected,
    Names,
    Openable,
    missing_member,
)
from wirecall.client.exchange import AnyEntry, Arrays, Params
from wirecall.client.pushes import Listener
from wirecall.errors import NotSent, UsageError

T = TypeVar("T")


class SyncOpenable:
    """A connection for code without an event loop: it is open at once.

    Its own thread runs one loop, and the methods wait for the connection's work there. It closes
    when it is garbage collected, and when the program ends.
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
    """The methods of `Client`, blocking. Any thread may call them.

    `connect_sync` makes it.

    >>> with connect_sync(app) as client, client.batch() as batch:
    ...     call = batch.call("price", {"sku": "tea"})
    >>> call.result()
    450
    """

    if not TYPE_CHECKING:
        __getattr__ = missing_member

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
        """Whether calls may be sent together in one array, and why."""
        return self._client.arrays

    @overload
    def call(
        self, method: str, params: Params = None, *, type: type[T], **options: Unpack[CallOptions]
    ) -> T: ...
    @overload
    def call(
        self,
        method: str,
        params: Params = None,
        *,
        type: Any = None,
        **options: Unpack[CallOptions],
    ) -> Any: ...
    def call(
        self,
        method: str,
        params: Params = None,
        *,
        type: Any = None,
        **options: Unpack[CallOptions],
    ) -> Any:
        """Call a method and return its result, as `Client.call` does."""
        return self._loop.run(self._client.call(method, params, type=type, **options))

    def notify(self, method: str, params: Params = None, *, timeout: float | None = None) -> None:
        """Send a notification, as `Client.notify` does."""
        self._loop.run(self._client.notify(method, params, timeout=timeout))

    def on(self, method: str, listener: Listener) -> None:
        """Call a function for each notification of this name, as `Client.on` does.

        It runs in the client's own thread, so it must not make blocking calls of this client.
        """

        async def register() -> None:
            self._client.on(method, listener)

        self._loop.run(register())

    def batch(self) -> "SyncBatch":
        """Return a block whose calls are sent together.

        `with client.batch() as b: one = b.call(...)`.
        """
        return SyncBatch(self._client, self._loop)


class SyncBatch(Collected):
    """Calls that are collected in a block and sent at its end, unless the block fails."""

    def __init__(self, client: Client, loop: "Loop") -> None:
        super().__init__(client)
        self._loop = loop

    def stream(self) -> Generator[AnyEntry, None, None]:
        """Send the calls now, and yield each entry when its answer has come.

        `for entry in batch.stream()`, as `Batch.stream` does.
        """
        answers = self._answers()

        async def following() -> "AnyEntry | None":
            return await anext(answers, None)

        async def close() -> None:
            await answers.aclose()

        try:
            while (entry := self._loop.run(following())) is not None:
                yield entry
        finally:
            with suppress(NotSent):  # closing the client ended the wait
                self._loop.run(close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, *_: TracebackType | BaseException | None
    ) -> None:
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
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="wirecall client", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine while the calling thread waits, and return its result.

        Ctrl+C cancels it.
        """
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            work.close()
            if self._thread.is_alive():
                raise UsageError(
                    "A blocking call in the client's own loop.",
                    "it would wait for itself",
                    "use connect()",
                )
            raise NotSent("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel all tasks, then end the thread."""

        async def end_all() -> None:
            await cancel_all(*(asyncio.all_tasks() - {asyncio.current_task()}))
            await self._loop.shutdown_asyncgens()

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(end_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join()
        self._loop.close()
