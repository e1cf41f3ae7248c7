"""The audit trail as the console shows, exports, verifies and writes it."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from wirecall import audit
from wirecall.console.source import NotFound
from wirecall.logs import host
from wirecall.protocol.messages import JsonObject

# Bytes of the audit trail that a page reads, from its end.
TRAIL_TAIL = 4 << 20
# Bytes of the trail that are read at once for an export.
BLOCK = 1 << 18


class Trail:
    """The audit trail of a server, by the arguments of `Audit`; with None, there is none."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        self._trail = None if options is None else audit.Audit(**options)
        self._verified: JsonObject | None = None

    def close(self) -> None:
        if self._trail is not None:
            self._trail.close()

    async def page(
        self, filter: str = "", *, limit: int = 100, before: int | None = None
    ) -> JsonObject:
        """Return the newest lines of the audit trail that contain every word of the filter."""
        words = filter.lower().split()
        lines = await self.lines()
        found = [
            line
            for line in reversed(lines)
            if (before is None or line["number"] < before) and _contains(line, words)
        ]
        more = None
        if len(found) > limit:
            found = found[:limit]
            more = found[-1]["number"]
        return {
            "path": None if self._trail is None else str(self._trail.path),
            "lines": found,
            "more": more,
            "verified": self._verified,
        }

    def _read(self) -> list[JsonObject]:
        """Return the end of the audit trail, as its lines."""
        if self._trail is None or not self._trail.path.exists():
            return []
        return list(_last_lines(self._trail.path))

    async def lines(self) -> list[JsonObject]:
        """Return the last lines, the oldest first."""
        return await asyncio.to_thread(self._read)

    async def export(self, filter: str = "") -> AsyncIterator[bytes]:
        """Yield the whole trail, the oldest lines first, or the lines with every word of a filter.

        Without a filter the bytes are those of the files, so a copy can be verified.
        """
        if self._trail is None or not self._trail.path.exists():
            raise NotFound("audit trail", "start the server with --audit file:audit.jsonl")
        words = filter.lower().split()
        for path in (*audit.kept_files(self._trail.path), self._trail.path):
            with await asyncio.to_thread(path.open, "rb") as file:
                while found := await asyncio.to_thread(file.readlines, BLOCK):
                    yield b"".join(line for line in found if _has_words(line, words))

    async def verify(self) -> JsonObject:
        """Check every link of the audit trail."""
        if self._trail is None or not self._trail.path.exists():
            raise NotFound("audit trail", "start the server with --audit file:audit.jsonl")
        report = await asyncio.to_thread(audit.verify, self._trail.path)
        self._verified = {
            "ok": report.ok,
            "lines": report.lines,
            "at": time.time(),
            "problems": [list(problem) for problem in report.problems[:100]],
        }
        return self._verified

    async def note(self, actor: str, action: str, target: str, outcome: str) -> None:
        """Write a line of the audit trail about what a person did."""
        if self._trail is None:
            return
        entry = audit.AuditEntry(
            time=time.time(),
            caller=actor,
            method=target,
            key=None,
            digest="",
            id=None,
            outcome=outcome,
            code=None,
            replayed=False,
            duration_ms=0.0,
            host=host(),
            pid=os.getpid(),
            action={"what": action},
        )
        await asyncio.to_thread(self._trail.append, entry)


def _has_words(line: bytes, words: list[str]) -> bool:
    """Return whether the values of a line contain every word."""
    if not words:
        return True
    try:
        entry = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return _contains(entry, words)


def _contains(entry: JsonObject, words: list[str]) -> bool:
    values = str(list(entry.values())).lower()
    return all(word in values for word in words)


def _last_lines(path: Path) -> Iterator[JsonObject]:
    """Yield the last lines of an audit trail with their numbers."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        skipped = 0
        if size > TRAIL_TAIL:
            while file.tell() < size - TRAIL_TAIL:
                file.readline()
                skipped += 1
        for number, line in enumerate(file, start=skipped + 1):
            try:
                entry = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                entry = {"unreadable": line[:200].decode(errors="replace")}
            if isinstance(entry, dict):
                yield {"number": number, **entry}
