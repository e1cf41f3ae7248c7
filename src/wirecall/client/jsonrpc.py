"""`JsonRpc`: the dialect of plain JSON-RPC 2.0, which adds idempotency keys and nothing else.

Our servers declare in `rpc.discover`, an OpenRPC document, which methods are commands and get a key
(`x-kind`), how many entries an array may have (`x-limits`), and whether entries may refer to each
other (`x-wirecall`). One call asks, the others wait for
it; each spends at most 60 % of its time on that. The client asks again if it did not reach the
server, but not if the server refused.
"""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw, Struct

from wirecall.client.delivery import Dialect, mint_key
from wirecall.client.exchange import AnyEntry, Entry, Params
from wirecall.errors import ConnectionLost, NotSent
from wirecall.protocol.keys import marked_path, own_key
from wirecall.protocol.messages import JsonObject, encode
from wirecall.protocol.params import KEY

if TYPE_CHECKING:
    from wirecall.server.references import ReferenceLimits

DISCOVERY = 5.0  # seconds that `rpc.discover` may take, but at most half of a call's time


def is_by_position(params: Params) -> bool:
    """Return whether params are sent as an array, which has no place for a key."""
    return isinstance(params, (list, tuple)) or (
        isinstance(params, Struct) and params.__struct_config__.array_like
    )


class JsonRpc(Dialect):
    """The dialect of JSON-RPC 2.0, with idempotency keys."""

    def __init__(
        self,
        kinds: Mapping[str, str] | None,
        batch: int | None = None,
        announced: object = None,
        key_paths: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        # "query" or "command" by method name. None: the client has not asked the server yet.
        self._kinds = kinds
        # Where a command has its key among the params, besides the usual place.
        self._key_paths = dict(key_paths or {})
        # The largest number of entries in an array, if the client knows it.
        self._batch = batch
        # What the server announces beyond OpenRPC: `x-wirecall`.
        self._announced = announced
        self._asking = asyncio.Lock()

    async def begin(self) -> None:
        if self._batch is not None:
            self.delivery.arrays.chunk = self._batch

    async def try_arrays(self, entries: Sequence[AnyEntry]) -> None:
        if self._kinds is None and len(entries) > self.delivery.arrays.chunk:
            await self._discover(min(entry.timeout for entry in entries))

    async def prepare(self, entry: AnyEntry) -> None:
        kind = None
        if entry.key is None and entry.query is None:
            if self._kinds is None:
                await self._discover(entry.timeout)
            kind = (self._kinds or {}).get(entry.method)
        if entry.key is True or (kind == "command" and not is_by_position(entry.params)):
            entry.key = own_key(entry.params, self._key_paths.get(entry.method, ())) or mint_key()
        if not isinstance(entry.key, str):
            entry.key = None
        entry.safe = entry.key is not None or entry.query is True or kind == "query"

    async def _discover(self, timeout: float) -> None:
        """Ask the server for its document, unless another call has."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout * 0.6), self._asking:
                if self._kinds is not None:
                    return
                answer: AnyEntry = Entry(
                    "rpc.discover", None, self.read, min(DISCOVERY, timeout / 2), query=True
                )
                answer.safe = True
                answer.deadline = self.delivery.clock.time() + answer.timeout
                await self.delivery.deliver([answer])
                if isinstance(answer.error, NotSent | ConnectionLost):
                    return
                document: Any = None
                if answer.ok:
                    document = answer.result()
                if not isinstance(document, dict):
                    document = {}
                self._learn(document)

    def _learn(self, document: JsonObject) -> None:
        """Take the kinds of methods and the limit of arrays from an OpenRPC document."""
        kinds: dict[str, str] = {}
        methods = document.get("methods")
        if isinstance(methods, list):
            for method in methods:
                if not isinstance(method, dict):
                    continue
                name = method.get("name")
                kind = method.get("x-kind")
                if isinstance(name, str) and isinstance(kind, str):
                    kinds[name] = kind
                    path = _key_path(method.get("params"))
                    if path:
                        self._key_paths[name] = path
        self._kinds = kinds
        self._announced = document.get("x-wirecall")
        limits = document.get("x-limits")
        if isinstance(limits, dict):
            batch = limits.get("batch")
            if type(batch) is int and batch > 0:
                self.delivery.arrays.chunk = batch

    async def reference_limits(self, timeout: float) -> "ReferenceLimits | None":
        if self._kinds is None:
            await self._discover(timeout)
        announced = self._announced
        if not isinstance(announced, dict) or announced.get("references") != 1:
            return None
        from wirecall.server.references import LIMITS, ReferenceLimits

        try:
            return msgspec.convert(announced.get("limits"), ReferenceLimits)
        except msgspec.ValidationError:
            return LIMITS

    def forget_references(self) -> None:
        self._announced = None

    def params(self, entry: AnyEntry) -> Any:
        if entry.key is None:
            return super().params(entry)
        members = entry.params or {}
        if isinstance(members, Struct):  # use its names and members in JSON
            members = msgspec.json.decode(encode(members), type=dict[str, Raw])
        return {**members, KEY: entry.key}


def _key_path(params: object) -> tuple[str, ...]:
    """Return the path to the key among the params of a method; () if the document marks none."""
    if not isinstance(params, list):
        return ()
    declared = {
        param["name"]: param.get("schema")
        for param in params
        if isinstance(param, dict) and isinstance(param.get("name"), str)
    }
    return marked_path({"properties": declared})
