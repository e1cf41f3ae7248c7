"""The client for code without an event loop: the same methods, blocking, from any thread.

One thread of its own runs one loop, and the methods wait for what the client does there. The client closes itself when it is
no longer used, and when the program ends.
"""

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, overload

from wirecall.client.client import Client
from wirecall.client.exchange import Arrays, CallOptions, Collected, Names, Params
from wirecall.errors import NotSent, UsageError

T = TypeVar("T")


class SyncClient:
    """A `Client` whose methods block."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop = Loop()
        try:
            self._loop.run(client.__aenter__())
        except BaseException:
            self._loop.stop()
            raise
        self._finalizer = weakref.finalize(self, _close, self._loop, client)
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
    def call(
        self,
        method: str,
        params: Params = None,
        *,
        type: Any = None,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
    ) -> Any:
        """Call a method and return its result, as `Client.call` does."""
        return self._loop.run(self._client.call(method, params, type=type, timeout=timeout, key=key, query=query))

    def notify(self, method: str, params: Params = None, *, timeout: float | None = None) -> None:
        """Send a notification, as `Client.notify` does."""
        self._loop.run(self._client.notify(method, params, timeout=timeout))

    def batch(self) -> "SyncBatch":
        """Return a block of calls that leave together: `with client.batch() as b: one = b.call(...)`."""
        return SyncBatch(self._client, self._loop)

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def _close(loop: "Loop", client: Client) -> None:
    try:
        loop.run(client.aclose())
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
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            if threading.current_thread() is not self._thread:
                self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
