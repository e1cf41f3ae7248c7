"""`Client`: calls, notifications and batches to one server, each with a deadline and one outcome.

    call -> Entry -> Delivery (see `delivery`), in the words of a dialect -> result or error

1. A call gets its key once, before it is first sent, and with that it is decided whether it may be repeated.
2. What users give is checked before anything is sent, and what comes back after it was read: a result that does not fit its
   `type` is the error of a call that ran.
3. `Client(link, dialect)` is all there is: `JsonRpc` is the dialect of plain JSON-RPC, MCP brings its own.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Mapping
from typing import Any, Self, TypeVar, Unpack, overload

import msgspec
from msgspec import UNSET, Struct

from wirecall.client.delivery import Delivery, Dialect, Options
from wirecall.client.exchange import AnyEntry, Arrays, Batch, CallOptions, Entry, Names, Params, Wire
from wirecall.client.links import Link
from wirecall.errors import BadAnswer, ConnectionLost, KeyInvalid, NotSent, UsageError
from wirecall.protocol.messages import UNREADABLE, decode_value
from wirecall.protocol.params import KEY
from wirecall.server.policy import check_key

T = TypeVar("T")

DISCOVERY = 5.0  # seconds that `rpc.discover` may take, and no more than half of a call's time

_BY_POSITION = (list, tuple)
_PARAMS = (dict, list, tuple, Struct, Mapping)  # the common ones first


class Client:
    """Calls to one server."""

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
        """Open the connection; `async with` does it."""
        await self._delivery.open()

    async def aclose(self) -> None:
        """Close the connection. Calls in flight fail."""
        await self._delivery.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- calls -------------------------------------------------------------------------------------------------------

    @overload
    async def call(self, method: str, params: Params = None, *, type: type[T], **options: Unpack[CallOptions]) -> T: ...
    @overload
    async def call(self, method: str, params: Params = None, *, type: Any = None, **options: Unpack[CallOptions]) -> Any: ...
    async def call(
        self,
        method: str,
        params: Params = None,
        *,
        type: Any = None,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
    ) -> Any:
        """Call a method and return its result, read as `type`. `timeout` is the time for all attempts.

        `key` is the idempotency key: a text, True to mint one, False for none; without it, commands of servers that say
        which of their methods are commands get one. `query=True` says that the method only reads.
        """
        entry = self.entry(method, params, type=type, timeout=timeout, key=key, query=query)
        await self._delivery.run(entry)
        return entry.result()

    async def notify(self, method: str, params: Params = None, *, timeout: float | None = None) -> None:
        """Send a notification. The server does not answer it, and does not say whether it understood."""
        entry = self.entry(method, params, timeout=timeout, is_notification=True)
        await self._delivery.run(entry)
        entry.result()

    def batch(self) -> Batch:
        """Return a block of calls that leave together: `async with client.batch() as b: one = b.call(...)`."""
        return Batch(self)

    async def send_batch(self, entries: list[AnyEntry]) -> tuple[Wire, str]:
        """Send all entries and settle them; return how they went, and why so. `batch` does it."""
        return await self._delivery.run_together(entries)

    def entry(self, method: str, params: Params = None, *, timeout: float | None = None, **options: Any) -> AnyEntry:
        """Return a call to be made, checked. Its time begins when it is sent."""
        given = self._timeout if timeout is None else timeout
        entry: AnyEntry = Entry(method, params, self._dialect.read, timeout=given, **options)
        if params is not None and not isinstance(params, _PARAMS):
            kind = type(params).__name__
            raise UsageError(f"{method}: params of type {kind}.", "JSON-RPC carries an array or an object", "use a dict")
        if entry.key:
            if isinstance(entry.key, str):
                try:
                    check_key(entry.key)
                except KeyInvalid as error:
                    raise UsageError(f"{method}: {entry.key!r} is not a key.", str(error.data["reason"])) from None
            if isinstance(params, _BY_POSITION):
                raise UsageError(
                    f"{method}: a key needs params by name.", f"it travels as the member {KEY}", "use a dict of params"
                )
        self._dialect.check(entry)
        return entry


class JsonRpc:
    """The dialect of JSON-RPC 2.0, which adds nothing to it but idempotency keys.

    Which methods are commands, and so get a key, our servers tell by `rpc.discover`, an OpenRPC document with `x-kind`. One
    call asks, the others wait for it; none gives more than a good half of its own time to that. A server that refuses is not
    asked again, one that was not reached is.
    """

    delivery: Delivery
    has_rounds = False

    def __init__(self, kinds: Mapping[str, str] | None) -> None:
        self._kinds = kinds  # "query" or "command", by name; None: not asked yet
        self._asking = asyncio.Lock()

    async def begin(self) -> None: ...

    async def end(self) -> None: ...

    def check(self, entry: AnyEntry) -> None: ...

    async def prepare(self, entry: AnyEntry) -> None:
        kind = None
        if entry.key is None and entry.query is None:
            if self._kinds is None:
                await self._discover(entry.timeout)
            kind = (self._kinds or {}).get(entry.method)
        if entry.key is True or (kind == "command" and not isinstance(entry.params, _BY_POSITION)):
            entry.key = mint_key()
        entry.key = entry.key if isinstance(entry.key, str) else None
        entry.safe = entry.key is not None or entry.query is True or kind == "query"

    async def _discover(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout * 0.6), self._asking:
                if self._kinds is not None:
                    return
                answer = await self.delivery.ask("rpc.discover", min(DISCOVERY, timeout / 2))
                if isinstance(answer.error, NotSent | ConnectionLost):
                    return
                document = answer.result() if answer.ok else None
                methods = document.get("methods") if isinstance(document, dict) else None
                described = [one for one in methods if isinstance(one, dict)] if isinstance(methods, list) else []
                pairs = [(one.get("name"), one.get("x-kind")) for one in described]
                self._kinds = {name: kind for name, kind in pairs if isinstance(name, str) and isinstance(kind, str)}

    def params(self, entry: AnyEntry) -> Any:
        if entry.key is None:
            return UNSET if entry.params is None else entry.params
        if isinstance(entry.params, Struct):
            members = {name: getattr(entry.params, name) for name in entry.params.__struct_fields__}
        else:
            members = dict(entry.params or {})
        return {**members, KEY: entry.key}

    def read(self, entry: AnyEntry) -> Any:
        return decoded(entry)

    async def only_reads(self, entry: AnyEntry) -> bool:
        return entry.key is None or entry.query is True

    async def goes_on(self, entry: AnyEntry) -> bool:
        return False

    async def try_arrays(self) -> None: ...


def decoded(entry: AnyEntry) -> Any:
    """Return a raw result as its `type`. One that does not fit is a bad answer to a call that ran."""
    assert entry.raw is not None
    try:
        return decode_value(entry.raw) if entry.type is None else msgspec.json.decode(entry.raw, type=entry.type)
    except UNREADABLE as error:
        raise BadAnswer(f"{entry.method}: the result is not as expected: {error}", ran="yes") from None


def mint_key() -> str:
    """Return a UUID of version 7 (RFC 9562, section 5.7): 48 bits of Unix time in milliseconds, the version, and chance."""
    moment, chance = f"{time.time_ns() // 1_000_000:012x}", os.urandom(10).hex()
    variant = "89ab"[int(chance[3], 16) & 3]
    return f"{moment[:8]}-{moment[8:]}-7{chance[:3]}-{variant}{chance[4:7]}-{chance[7:19]}"
