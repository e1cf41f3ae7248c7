"""`Client`: calls, notifications and batches to one server, each with a deadline and one outcome.

    entry -> _prepare (key, safe) -> _deliver (see `delivery`) -> result or error

The rules of the file:

1. A call gets its key once, before it is first sent, and with that it is decided whether it may be repeated.
2. What users give is checked before anything is sent, and what comes back after it was read: a result that does not fit its
   `type` is the error of a call that ran.
3. A protocol above JSON-RPC overrides `open`, `_prepare`, `_params`, `_converted` and `arrays`, and brings its own link.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar, overload

import msgspec
from msgspec import UNSET, Struct

from wirecall.client.coalescing import Coalescer
from wirecall.client.delivery import Delivery, side_by_side
from wirecall.client.exchange import Batch, Entry, Names, Wire
from wirecall.client.kinds import Kinds
from wirecall.client.links import Link
from wirecall.client.options import Options
from wirecall.client.retries import mint_key
from wirecall.errors import BadAnswer, CallFailed, KeyInvalid, RpcError, UsageError
from wirecall.protocol import messages as frames
from wirecall.protocol.params import KEY
from wirecall.protocol.replies import UNREADABLE
from wirecall.server.policy import check_key

T = TypeVar("T")
C = TypeVar("C", bound="Client")

_BY_POSITION = (list, tuple)
_PARAMS = (dict, list, tuple, Struct, Mapping)  # the common ones first


class Client(Delivery):
    """A client of plain JSON-RPC, and what the one of MCP is built on."""

    revision: str | None = None  # of MCP

    def __init__(self, link: Link, options: Options, kinds: Mapping[str, str] | None = None) -> None:
        super().__init__(link, options)
        self.rpc = Names(self.call)
        self._kinds = Kinds(kinds if kinds is not None or options.discover else {}, self._ask_plainly)
        self._coalescer = Coalescer(options.coalesce, self._deliver_together) if options.coalesce is not None else None

    # --- the connection ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Open the connection; `async with` does it."""
        await self._link.open()
        self._state = "open"

    async def aclose(self) -> None:
        """Close the connection. Calls under way fail."""
        if self._state == "closed":
            return
        self._state = "closed"
        if self._coalescer is not None:
            await self._coalescer.aclose()
        await self._link.aclose()

    async def __aenter__(self: C) -> C:
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
    async def call(
        self,
        method: str,
        params: Any = None,
        *,
        type: type[T],
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
    ) -> T: ...
    @overload
    async def call(
        self,
        method: str,
        params: Any = None,
        *,
        type: Any = None,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
    ) -> Any: ...
    async def call(
        self,
        method: str,
        params: Any = None,
        *,
        type: Any = None,
        timeout: float | None = None,
        key: str | bool | None = None,
        query: bool | None = None,
    ) -> Any:
        """Call a method and wait for its result, read as `type`. `timeout` is the time for all attempts.

        `key` is the idempotency key: a text, True to mint one, False for none; without it, commands of servers that say
        which of their methods are commands get one. `query=True` says that the method only reads.
        """
        entry = self.entry(method, params, type=type, timeout=timeout, key=key, query=query)
        await self._run(entry)
        return entry.result()

    async def notify(self, method: str, params: Any = None, *, timeout: float | None = None) -> None:
        """Send a notification. Nobody will say whether it was understood."""
        entry = self.entry(method, params, timeout=timeout, is_notification=True)
        await self._run(entry)
        entry.result()

    def batch(self) -> Batch:
        """Calls that leave together: `async with client.batch() as b: one = b.call(...)`."""
        return Batch(self)

    def entry(self, method: str, params: Any = None, *, timeout: float | None = None, **options: Any) -> Entry:
        """A call to be made. Its time begins when it is sent."""
        given = self._options.timeout if timeout is None else timeout
        entry = Entry(method, params, self._converted, timeout=given, **options)
        _check(entry)
        return entry

    async def _run(self, entry: Entry) -> None:
        self._begin(entry)
        await self._ready(entry)
        if entry.is_settled:
            return
        if self._coalescer is not None and entry.safe and self.arrays.legal:
            await self._coalescer.add(entry, self.arrays.chunk)
        else:
            await self._deliver([entry])

    async def _ready(self, entry: Entry) -> None:
        if entry.is_notification:
            entry.key = None
            return
        try:
            await self._prepare(entry)
        except (CallFailed, RpcError) as error:
            entry.fail(error)

    async def send_batch(self, entries: list[Entry]) -> tuple[Wire, str]:
        """Send all, settle all; gives how they went, and why so."""
        for entry in entries:
            self._begin(entry)
        for entry in entries:
            await self._ready(entry)
        left = [entry for entry in entries if not entry.is_settled]
        if len(left) < 2:
            reason = "there is one entry" if left else "nothing was sent"
            await side_by_side([partial(self._deliver, [entry]) for entry in left])
            return "singles", reason
        left = await self._deliver_arrays(left)
        if not left:
            return "array", self.arrays.reason
        await side_by_side([partial(self._deliver, [entry]) for entry in left])
        return "singles", self.arrays.reason

    async def _ask_plainly(self, method: str, timeout: float) -> Entry:
        """A query of our own, as it is settled: it needs no preparation."""
        question = Entry(method, None, decoded, timeout=timeout, query=True)
        question.safe = True
        self._begin(question)
        await self._deliver([question])
        return question

    # --- to be overridden --------------------------------------------------------------------------------------------

    async def _prepare(self, entry: Entry) -> None:
        """Before the first attempt: decide on its key and on whether it may be repeated (`safe`)."""
        kind = None
        if entry.key is None and entry.query is None:
            kind = await self._kinds.of(entry)
        if entry.key is True or (kind == "command" and not isinstance(entry.params, _BY_POSITION)):
            entry.key = mint_key()
        entry.key = entry.key if isinstance(entry.key, str) else None
        entry.safe = entry.key is not None or entry.query is True or kind == "query"

    def _params(self, entry: Entry) -> Any:
        """The params as they travel; UNSET for none."""
        if entry.key is None:
            return UNSET if entry.params is None else entry.params
        return {**_members(entry.params), KEY: entry.key}

    def _converted(self, entry: Entry) -> Any:
        """The result as its caller wants it."""
        return decoded(entry)


# --- helpers --------------------------------------------------------------------------------------------------------


def _check(entry: Entry) -> None:
    if entry.params is not None and not isinstance(entry.params, _PARAMS):
        kind = type(entry.params).__name__
        raise UsageError(f"{entry.method}: params of type {kind}.", "JSON-RPC carries an array or an object", "use a dict")
    if entry.timeout <= 0:
        raise UsageError(f"{entry.method}: timeout={entry.timeout!r} has passed already.", fix="use a number above 0")
    if isinstance(entry.key, str):
        try:
            check_key(entry.key)
        except KeyInvalid as error:
            raise UsageError(f"{entry.method}: {entry.key!r} is not a key.", str(error.data["reason"])) from None
    if entry.key and isinstance(entry.params, _BY_POSITION):
        raise UsageError(
            f"{entry.method}: a key needs params by name.", f"it travels as the member {KEY}", "use a dict of params"
        )


def _members(params: Any) -> dict[str, Any]:
    if params is None:
        return {}
    if isinstance(params, Mapping):
        return dict(params)
    members: dict[str, Any] = {name: getattr(params, name) for name in params.__struct_fields__}
    return members


def decoded(entry: Entry) -> Any:
    """A raw result as its `type`. One that does not fit is a bad answer to a call that ran."""
    assert entry.raw is not None
    try:
        if entry.type is None:
            return frames.decode_value(entry.raw)
        return msgspec.json.decode(entry.raw, type=entry.type)
    except UNREADABLE as error:
        raise BadAnswer(f"{entry.method}: the result is not as expected: {error}", ran="yes") from None
