"""The lists of a server, page by page.

1. A page has `PAGE` entries, and a cursor for the next one while there is more.
2. A cursor is ours or it is refused. The empty text is a cursor like any other, and not one of ours.
3. 2026-07-28 tells how long a client may keep a list, and whether it may share it: only if nobody has to say who they are.
"""

import base64
from typing import Any

from wirecall.errors import InvalidParams
from wirecall.mcp.revisions import Revision
from wirecall.mcp.server.catalog import Catalog

PAGE = 200  # entries of a list in one answer
TTL_MS = 60_000  # how long a client may keep a list: a changed one is told to those who listen


class Pages:
    """The lists of a catalog."""

    def __init__(self, catalog: Catalog, *, is_public: bool) -> None:
        self._catalog = catalog
        self.kept = {"ttlMs": TTL_MS, "cacheScope": "public" if is_public else "private"}

    def page(self, kind: str, cursor: str | None, revision: Revision) -> dict[str, Any]:
        entries = self._catalog.list(kind, revision)
        start = _offset(cursor, len(entries))
        page: dict[str, Any] = {kind: entries[start : start + PAGE]}
        if start + PAGE < len(entries):
            page["nextCursor"] = _cursor(start + PAGE)
        return {**page, **self.kept} if revision.has("caching") else page


def _cursor(offset: int) -> str:
    return base64.urlsafe_b64encode(b"from %d" % offset).decode()


def _offset(cursor: str | None, count: int) -> int:
    """Where a page begins."""
    if cursor is None:
        return 0
    try:
        offset = int(base64.b64decode(cursor, altchars=b"-_", validate=True).removeprefix(b"from "))
    except ValueError:
        offset = -1
    if not 0 < offset < count or cursor != _cursor(offset):
        raise InvalidParams("cursor: not one that this server gave, or of a list that has changed since")
    return offset
