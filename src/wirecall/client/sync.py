"""The client for code without an event loop: the same methods, blocking, from any thread.

One thread of its own runs one loop. What the client's method gives is waited for there: a coroutine becomes its result, an
asynchronous iterator an iterator, an asynchronous block a block. It closes itself when it is no longer used, and when the
program ends.
"""

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from wirecall.client.client import Client
from wirecall.client.exchange import Names
from wirecall.errors import NotSent, UsageError


class SyncClient:
    """A `Client`, or the one of MCP, whose methods block."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._loop = _Loop()
        try:
            self._client: Client = self._loop.run(_opened(make))
        except BaseException:
            self._loop.stop()
            raise
        self._finalizer = weakref.finalize(self, _close, self._loop, self._client)
        self.rpc = Names(self.call)

    def call(self, method: str, params: Any = None, **options: Any) -> Any:
        """As `Client.call`."""
        return self._loop.run(self._client.call(method, params, **options))

    def notify(self, method: str, params: Any = None, *, timeout: float | None = None) -> None:
        """As `Client.notify`."""
        self._loop.run(self._client.notify(method, params, timeout=timeout))

    def batch(self) -> Any:
        """As `Client.batch`, with a plain `with`."""
        return _Block(self._loop, self._client.batch())

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._finalizer()

    def __enter__(self) -> "SyncClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return _blocking(self._loop, getattr(self._client, name))


async def _opened(make: Callable[[], Client]) -> Client:
    client = make()
    return await client.__aenter__()


def _close(loop: "_Loop", client: Client) -> None:
    try:
        loop.run(client.aclose())
    finally:
        loop.stop()


class _Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wirecall client", daemon=True)
        self._thread.start()

    def run(self, work: "Coroutine[Any, Any, Any]") -> Any:
        """The result of a coroutine, waited for in the calling thread. Ctrl+C cancels it."""
        if not self._thread.is_alive() or threading.current_thread() is self._thread:
            work.close()
            if self._thread.is_alive():
                raise UsageError("A blocking call in the client's own loop.", "nobody would answer it", "use connect()")
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


def _blocking(loop: _Loop, value: Any) -> Any:
    """A value of the client's world as one of its user's."""
    if asyncio.iscoroutine(value):
        return _blocking(loop, loop.run(value))
    if hasattr(value, "__aenter__"):
        return _Block(loop, value)
    if hasattr(value, "__anext__"):
        return _iterated(loop, value)
    if callable(value) and hasattr(value, "__self__"):
        return lambda *args, **options: _blocking(loop, loop.run(_called(value, *args, **options)))
    return value


async def _called(method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """In the loop's own thread: some methods begin their work before they are awaited."""
    value = method(*args, **options)
    return await value if asyncio.iscoroutine(value) else value


def _iterated(loop: _Loop, iterator: Any) -> Iterator[Any]:
    while True:
        try:
            yield loop.run(_next(iterator))
        except StopAsyncIteration:
            return


async def _next(iterator: Any) -> Any:
    return await iterator.__anext__()


class _Block:
    """An asynchronous block as a plain one. In it, everything the block offers is at hand, blocking."""

    def __init__(self, loop: _Loop, block: Any) -> None:
        self._loop = loop
        self._block = block
        self._inside: Any = None

    def __enter__(self) -> "_Block":
        self._inside = self._loop.run(self._block.__aenter__())
        return self

    def __exit__(self, *error: object) -> Any:
        return self._loop.run(self._block.__aexit__(*error))

    def __iter__(self) -> Iterator[Any]:
        return _iterated(self._loop, self._inside.__aiter__())

    def __getattr__(self, name: str) -> Any:
        return _blocking(self._loop, getattr(self._inside if self._inside is not None else self._block, name))
