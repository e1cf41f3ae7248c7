"""A server's lists and resources as a client keeps them: fresh for as long as they may be.

1. A list is what all its pages say. A cursor is any text, the empty one too; only its absence ends a list. A cursor that
   the server does not know any more means that the list has changed: it is read anew, once.
2. Where the server names a time (2026-07-28, `ttlMs`), a list is kept for it; each page has its own clock, and the first
   that runs out ends it for all. A notification of a change ends it at once. Older revisions name no time, so nothing is
   kept.
3. The contents of a resource are kept in the same way, up to `READS` of them with `READ_BYTES` in all.
4. The hints and marks of tools, which calls need, are at most `KNOWN` seconds old, or as old as the list may be.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import msgspec
from msgspec import Raw, Struct

from wirecall.errors import BadAnswer, InvalidParams, RpcError
from wirecall.logs import logger
from wirecall.mcp.client.results import Prompt, Resource, Template, Tool, read_contents, read_entries
from wirecall.mcp.headers import Marks, fault_of, marked
from wirecall.mcp.types import Embedded
from wirecall.protocol.messages import UNREADABLE, JsonObject

T = TypeVar("T", Tool, Prompt, Resource, Template)

PAGES = 1000  # of one list: more of them is a server that goes in circles
KNOWN = 60.0
READS = 100
READ_BYTES = 10 << 20

# The method of each list, and the member of its result that holds the entries.
_LISTS: dict[type, tuple[str, str]] = {
    Tool: ("tools/list", "tools"),
    Prompt: ("prompts/list", "prompts"),
    Resource: ("resources/list", "resources"),
    Template: ("resources/templates/list", "resourceTemplates"),
}
# The lists that a change is about.
_CHANGED: dict[str, tuple[type, ...]] = {
    "tools": (Tool,),
    "prompts": (Prompt,),
    "resources": (Resource, Template),
    "updated": (),
}


_Ask: TypeAlias = Callable[[str, JsonObject | None, Callable[[Raw], Raw], float | None], Awaitable[Raw]]


class _Kept(Struct):
    entries: list[Any]
    until: float
    size: int = 0  # bytes of JSON


class Lists:
    """The lists of one server."""

    def __init__(self, ask: _Ask, now: Callable[[], float]) -> None:
        self.has_headers = False  # headers repeat the arguments of tools, so their marks have to be sound
        self.marks: dict[str, Marks] = {}
        self.left_out: set[str] = set()  # tools whose marks are not
        self._ask = ask  # calls a method of MCP's own
        self._now = now
        self._kept: dict[type, _Kept] = {}
        self._read: dict[str, _Kept] = {}  # contents of resources, by URI, the oldest first
        self._tools: dict[str, Tool] = {}
        self._known_until = 0.0
        self.changes = 0  # counts what was forgotten: something that was read meanwhile may be old already

    async def read(self, kind: type[T], timeout: float | None = None) -> list[T]:
        """Return all entries of a list."""
        kept = self._kept.get(kind)
        if kept is None or self._now() >= kept.until:
            before = self.changes
            kept = self._kept[kind] = await self._pages(kind, timeout)
            kept.until = kept.until if self.changes == before else 0.0
            if kind is Tool:
                # What calls have to know of tools. One whose marks are not sound is left out, as the specification demands.
                tools: list[Tool] = kept.entries
                faults = {tool.name: fault_of(tool.input_schema) if self.has_headers else None for tool in tools}
                self.left_out = {name for name, fault in faults.items() if fault}
                for name in sorted(self.left_out):
                    logger.warning("the tool %r is left out: %s", name, faults[name])
                kept.entries = tools = [tool for tool in tools if tool.name not in self.left_out]
                self._tools = {tool.name: tool for tool in tools}
                marks = {tool.name: marked(tool.input_schema) for tool in tools} if self.has_headers else {}
                self.marks = {name: found for name, found in marks.items() if found}
                self._known_until = max(kept.until, self._now() + KNOWN)
        return list(kept.entries)

    async def tool(self, name: str, timeout: float) -> Tool | None:
        """Return what the server says of a tool; None if it lists none of that name."""
        if name not in self._tools or self._now() >= self._known_until:
            await self.read(Tool, timeout)
        return self._tools.get(name)

    def contents(self, uri: str) -> list[Embedded] | None:
        """Return the contents of a resource that are kept, or None."""
        kept = self._read.get(uri)
        return None if kept is None or self._now() >= kept.until else list(kept.entries)

    def keep(self, uri: str, raw: Raw, before: int) -> list[Embedded]:
        """Return the contents in a result, and keep them for the time that it names.

        `before` are the changes before the result was asked for: if there were more since, it may be old already.
        """
        contents, size = read_contents(raw), memoryview(raw).nbytes
        self._read.pop(uri, None)
        ttl = _ttl(msgspec.json.decode(raw, type=dict[str, Raw]))
        if ttl > 0 and size <= READ_BYTES and self.changes == before:
            self._read[uri] = _Kept(contents, self._now() + ttl, size)
            while len(self._read) > READS or sum(kept.size for kept in self._read.values()) > READ_BYTES:
                del self._read[next(iter(self._read))]
        return list(contents)

    def forget(self, changed: str | None = None, uri: str | None = None) -> None:
        """Forget what has changed, and the contents of the resource if it is one; None: all may have changed."""
        self.changes += 1
        if changed == "updated":
            self._read.pop(uri or "", None)
        elif changed in (None, "resources"):
            self._read.clear()
        for kind in _LISTS if changed is None else _CHANGED[changed]:
            self._kept.pop(kind, None)
            if kind is Tool:
                self._known_until = 0.0

    async def _pages(self, kind: type[Any], timeout: float | None, is_again: bool = False) -> _Kept:
        method, member = _LISTS[kind]
        kept, seen = _Kept([], float("inf")), set[str]()
        cursor: str | None = None
        while len(seen) <= PAGES:
            params = None if cursor is None else {"cursor": cursor}
            try:
                raw = await self._ask(method, params, lambda raw: raw, timeout)
            except InvalidParams as error:
                # A server answers a cursor that it does not know with -32602 (2025-03-26, pagination).
                if cursor is None:
                    raise
                if is_again:
                    reason = f"the server's list changes faster than it can be read: {error}"
                    raise RpcError(error.code, reason) from None
                return await self._pages(kind, timeout, is_again=True)
            try:
                page = msgspec.json.decode(raw, type=dict[str, Raw])
                if member not in page:
                    raise BadAnswer(f"{method}: the result has no {member!r}", ran="yes")
                kept.entries += read_entries(msgspec.json.decode(page[member], type=list[Raw]), kind)
                cursor = msgspec.json.decode(page.get("nextCursor", Raw(b"null")), type=str | None)
            except UNREADABLE as error:
                raise BadAnswer(f"a list that cannot be read: {error}", ran="yes") from None
            kept.until = min(kept.until, self._now() + _ttl(page))
            if cursor is None:
                return kept
            if cursor in seen:
                break
            seen.add(cursor)
        raise BadAnswer(f"{method}: the list has no end", ran="yes")


def _ttl(result: dict[str, Raw]) -> float:
    """Return the seconds for which a result may be kept: 0 if its `ttlMs` is left out, negative or not a number."""
    try:
        return max(0.0, msgspec.json.decode(result.get("ttlMs", Raw(b"0")), type=float) / 1000)
    except UNREADABLE:
        return 0.0
