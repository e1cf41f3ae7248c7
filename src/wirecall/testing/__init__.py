"""For tests of programs: a client without sockets, network faults, a fast clock, and a ledger.

    async with testing.client(app, faults=Faults(drop_reply=1)) as client:
        # The first answer is lost, and the second attempt brings it.
        await client.call("order", {"sku": "tea"})

`Faults` affect the calls of the program, not the messages of a handshake.
"""

import asyncio
from collections.abc import Callable, Collection
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from wirecall.client.client import Client
from wirecall.client.connect import ConnectOptions, McpOptions, Protocol, connect
from wirecall.client.exchange import Exchange, Link
from wirecall.contract.changes import changes
from wirecall.contract.lock import of_app, read_lock
from wirecall.errors import CallFailed, ConnectionLost, NotSent, RpcError, UsageError
from wirecall.protocol.messages import Received
from wirecall.testing.stores import ledger as ledger

if TYPE_CHECKING:
    from wirecall.app import App
    from wirecall.mcp.client.client import McpClient

_PRELUDE = frozenset({"rpc.discover", "server/discover", "initialize", "notifications/initialized"})


class FakeClock:
    """A clock whose sleep returns at once and advances the time.

    `slept` lists the seconds of each sleep.

    `now` is the time at which it begins.

    >>> clock = FakeClock(100.0)
    >>> asyncio.run(clock.sleep(60))
    >>> clock.time()
    160.0
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.slept: list[float] = []

    def time(self) -> float:
        """Return the time, in seconds."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """Advance the time, and let other tasks run."""
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Faults:
    """Faults between a client and its server.

    `drop_reply` answers are lost after the server has sent them; every answer takes `delay` seconds
    longer; after `cut_after` messages the server cannot be reached, until `heal`.

    >>> async def ask_twice() -> int:
    ...     async with testing.client(app, faults=Faults(drop_reply=1)) as client:
    ...         return await client.call("price", {"sku": "tea"})
    >>> asyncio.run(ask_twice())
    450
    """

    def __init__(
        self, *, drop_reply: int = 0, delay: float = 0.0, cut_after: int | None = None
    ) -> None:
        self.drop_reply = drop_reply
        self.delay = delay
        self.cut_after = cut_after
        # The number of messages that reached the server.
        self.messages = 0

    def heal(self) -> None:
        """End all faults."""
        self.drop_reply = 0
        self.delay = 0.0
        self.cut_after = None

    def on(self, link: Link) -> Link:
        """Return a link with these faults."""
        return _Faulty(link, self)


@overload
def client(
    app: "App",
    *,
    protocol: Literal["mcp"],
    faults: Faults | None = None,
    **options: Unpack[McpOptions],
) -> "McpClient": ...
@overload
def client(
    app: "App",
    *,
    protocol: Literal["rpc", "jsonrpc"] | None = None,
    faults: Faults | None = None,
    **options: Unpack[ConnectOptions],
) -> Client: ...
def client(
    app: "App", *, protocol: Protocol | None = None, faults: Faults | None = None, **options: Any
) -> Client:
    """Return a client that calls an app in memory. `options` are those of `connect`.

    `app` is called directly. `protocol` is that of `connect`, and `faults` are what happens between
    both.

    >>> app = App("shop")
    >>> @app.query
    ... def price(sku: str) -> int:
    ...     return 450
    >>> async def ask() -> int:
    ...     async with testing.client(app) as client:
    ...         return await client.call("price", {"sku": "tea"})
    >>> asyncio.run(ask())
    450
    """
    if faults is not None and "wrap" in options:
        raise UsageError("faults= and wrap= are one thing.", fix="use one of both")
    if faults is not None:
        options["wrap"] = faults.on
    return connect(app, protocol=protocol, **options)


def assert_contract(app: "App", path: "str | PathLike[str]") -> None:
    """Raise `AssertionError` if the app breaks callers that rely on a lock file.

    `wirecall lock` writes the file.

    `app` is the app, and `path` its lock file.

    >>> assert_contract(app, "missing.json")
    Traceback (most recent call last):
    wirecall.contract.lock.NotALock: There is no lock file missing.json.
      fix: write it: wirecall lock TARGET -o missing.json
    """
    broken = [
        change for change in changes(read_lock(path), of_app(app)) if change.level == "breaking"
    ]
    if broken:
        lines = [f"  {change.place}: {change.text}" for change in broken]
        accept = f"wirecall diff {path} TARGET --accept"
        fix = f"  fix: keep the old contract, or accept the new one: {accept}"
        raise AssertionError("\n".join([f"The app breaks its contract in {path}.", *lines, fix]))


class _Faulty:
    def __init__(self, link: Link, faults: Faults) -> None:
        self._link = link
        self._faults = faults
        self.open = link.open
        self.aclose = link.aclose

    async def exchange(self, exchange: Exchange) -> None:
        faults = self._faults
        if all(entry.method in _PRELUDE for entry in exchange.entries):
            await self._link.exchange(exchange)
            return
        if faults.cut_after is not None and faults.messages >= faults.cut_after:
            raise NotSent("the connection is cut")
        faults.messages += 1
        held = _Held(exchange)
        await self._link.exchange(held)
        if faults.drop_reply > 0:
            faults.drop_reply -= 1
            raise ConnectionLost("the answer was dropped")
        if faults.delay:
            await asyncio.sleep(faults.delay)
        held.release()


class _Held(Exchange):
    """Holds back the answers of an exchange until they are released."""

    __slots__ = ("_held", "_real")

    def __init__(self, real: Exchange) -> None:
        super().__init__(real.data, real.entries, real.array)
        self._real = real
        self._held: list[Callable[[], None]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "sent" and value:
            self._real.sent = True

    def take(self, message: Received, in_array: bool = False) -> None:
        self._held.append(lambda: self._real.take(message, in_array))
        if isinstance(message.id, int):
            self.open.pop(message.id, None)

    def replayed(self, ids: Collection[Any] | None = None) -> None:
        self._held.append(lambda: self._real.replayed(ids))

    def refuse(self, error: RpcError | CallFailed) -> None:
        self._held.append(lambda: self._real.refuse(error))
        self.open.clear()

    def release(self) -> None:
        for pass_on in self._held:
            pass_on()
