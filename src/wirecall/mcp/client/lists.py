"""A server's lists as a client keeps them: read from all their pages, and fresh for as long as they may be.

1. A list is what all its pages say. A cursor is any text, the empty one too; only its absence ends a list. A cursor that
   the server does not know any more means that the list has changed: it is read anew, once.
2. Where the server names a time (2026-07-28, `ttlMs`), a list is kept for it; each page has its own clock, and the first
   that runs out ends it for all. A change that is told ends it at once. Older revisions name no time, and nothing is kept.
3. What calls have to know of a tool (its hints, its marks) is at most `KNOWN` seconds old, or as old as the list may be.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from wirecall.errors import BadAnswer, InvalidParams, RpcError
from wirecall.mcp.client.changes import Change
from wirecall.mcp.client.headers import Marks, callable_tools, marks_of
from wirecall.mcp.client.results import Prompt, Resource, Template, Tool, read_entries
from wirecall.protocol.replies import UNREADABLE

T = TypeVar("T")

PAGES = 1000  # of one list: more of them is a server that goes in circles
KNOWN = 60.0

# What a list is called, and what it is a list of.
_LISTS: dict[str, tuple[str, Any]] = {
    "tools/list": ("tools", Tool),
    "prompts/list": ("prompts", Prompt),
    "resources/list": ("resources", Resource),
    "resources/templates/list": ("resourceTemplates", Template),
}
# Which lists a change is about.
_CHANGED = {
    "tools": ("tools/list",),
    "prompts": ("prompts/list",),
    "resources": ("resources/list", "resources/templates/list"),
    "updated": (),
}


class _Kept(Struct):
    entries: list[Any]
    until: float


class Lists:
    """The lists of one server."""

    def __init__(self, call: Callable[..., Awaitable[Any]], now: Callable[[], float]) -> None:
        self.has_headers = False  # the arguments of tools are repeated in headers, so their marks have to be sound
        self.marks: dict[str, Marks] = {}
        self.left_out: set[str] = set()  # tools whose marks are not
        self._call = call
        self._now = now
        self._kept: dict[str, _Kept] = {}
        self._tools: dict[str, Tool] = {}
        self._known_until = 0.0

    async def read(self, method: str, timeout: float | None = None) -> list[Any]:
        """All entries of a list."""
        kept = self._kept.get(method)
        if kept is None or self._now() >= kept.until:
            try:
                kept = await self._pages(method, timeout)
            except _Restart:
                kept = await self._pages(method, timeout)
            self._kept[method] = kept
            if method == "tools/list":
                self._learn(kept)
        return list(kept.entries)

    async def tool(self, name: str, timeout: float) -> Tool | None:
        """What the server says of a tool; None if it lists none of that name."""
        if name not in self._tools or self._now() >= self._known_until:
            await self.read("tools/list", timeout)
        return self._tools.get(name)

    def forget(self, change: Change | None = None) -> None:
        """What has changed; None: all may have."""
        for method in _LISTS if change is None else _CHANGED[change.kind]:
            self._kept.pop(method, None)
            if method == "tools/list":
                self._known_until = 0.0

    def _learn(self, kept: _Kept) -> None:
        sound = callable_tools(kept.entries) if self.has_headers else kept.entries
        self.left_out = {tool.name for tool in kept.entries} - {tool.name for tool in sound}
        kept.entries = sound
        self._tools = {tool.name: tool for tool in sound}
        self.marks = {tool.name: marks for tool in sound if (marks := marks_of(tool))} if self.has_headers else {}
        self._known_until = max(kept.until, self._now() + KNOWN)

    # --- pages -------------------------------------------------------------------------------------------------------

    async def _pages(self, method: str, timeout: float | None) -> _Kept:
        member, kind = _LISTS[method]
        kept, cursor, seen = _Kept([], float("inf")), None, set[str]()
        while len(seen) <= PAGES:
            page = await self._page(method, cursor, timeout)
            if member not in page:
                raise BadAnswer(f"{method}: the result has no {member!r}", ran="yes")
            kept.entries += read_entries(_decoded(page[member], list[Raw]), kind)
            kept.until = min(kept.until, self._now() + _seconds(page.get("ttlMs")))
            cursor = _decoded(page.get("nextCursor", Raw(b"null")), str | None)
            if cursor is None:
                return kept
            if cursor in seen:
                break
            seen.add(cursor)
        raise BadAnswer(f"{method}: the list has no end", ran="yes")

    async def _page(self, method: str, cursor: str | None, timeout: float | None) -> dict[str, Raw]:
        params = None if cursor is None else {"cursor": cursor}
        try:
            page: dict[str, Raw] = await self._call(method, params, type=dict[str, Raw], timeout=timeout)
        except InvalidParams as error:
            raise error if cursor is None else _Restart(str(error)) from None
        return page


class _Restart(RpcError):
    """A cursor that the server does not know any more."""

    def __init__(self, reason: str) -> None:
        super().__init__(-32602, f"the server's list changes faster than it can be read: {reason}")


def _decoded(raw: Raw, wanted: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=wanted)
    except UNREADABLE as error:
        raise BadAnswer(f"a list that cannot be read: {error}", ran="yes") from None


def _seconds(ttl: Raw | None) -> float:
    """Return `ttlMs` in seconds; 0 if it is left out or is not a number."""
    try:
        value = None if ttl is None else msgspec.json.decode(ttl, type=float)
    except UNREADABLE:
        value = None
    return max(0.0, value / 1000) if value is not None else 0.0
