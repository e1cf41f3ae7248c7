"""A row of a worker's ring as the JSON that every page, the feed and `wirecall watch` show."""

import msgspec
from msgspec import Struct

from wirecall.console.ring import start_of
from wirecall.mcp.revisions import STATELESS
from wirecall.protocol.messages import Json, JsonObject
from wirecall.server.tapped import RawRow

TOOL = "tools/call:"
STATELESS_NAMES = {revision.name for revision in STATELESS}


class RowsAnswer(Struct):
    """The answer of a worker to the question for its rows."""

    worker: str
    pid: int
    last: int
    offset: float
    rows: list[RawRow]


class BatchAnswer(Struct):
    """The answer of a worker to the question for one batch."""

    offset: float
    rows: list[RawRow]
    waits: dict[str, list[int]]
    concurrency: int


decode_rows = msgspec.json.Decoder(RowsAnswer).decode
decode_batch = msgspec.json.Decoder(BatchAnswer).decode


class Seen(Struct):
    """One call that the console's process keeps.

    Its row is made when it is shown: most calls of a busy server are never shown.
    """

    raw: RawRow
    worker: str
    # Adding it to a reading of the worker's clock makes it a time.
    offset: float
    # When it began, by the worker's clock.
    start: float
    # The number that it got from the console's process.
    number: int = 0
    # Its worker has ended.
    is_gone: bool = False
    _row: JsonObject | None = None

    @property
    def at(self) -> float:
        """When it began, as a time."""
        return self.start + self.offset

    @property
    def row(self) -> JsonObject:
        if self._row is None:
            self._row = _row_of(self)
        return self._row

    def grey(self) -> None:
        """Mark a call whose worker has ended."""
        self.is_gone = True
        if self._row is not None:
            self._row["gone"] = True


def seen_of(raw: RawRow, worker: str, offset: float, previous: float) -> Seen:
    """Return a call from a row of a worker; `previous` is the end of the row before it."""
    return Seen(raw, worker, offset, start_of(raw, previous))


def _row_of(seen: Seen) -> JsonObject:
    number, ended, mark, name, id, code, position, more = seen.raw
    worker = seen.worker
    tool: Json = None
    if name.startswith(TOOL):
        tool = name.removeprefix(TOOL)
    batch: Json = None
    if mark.batch:
        batch = f"{worker}-B{mark.batch}"
    row: JsonObject = {
        "id": f"{worker}-{number}",
        "n": seen.number,
        "worker": worker,
        "gone": seen.is_gone,
        "at": seen.at,
        "ms": round((ended - seen.start) * 1000, 4),
        "method": name,
        "tool": tool,
        "kind": "query",
        "transport": mark.transport,
        "caller": mark.caller,
        "outcome": "ok" if code is None else "error",
        "code": code,
        "ran": "yes",
        "replayed": False,
        "recognised": False,
        "attempt": 0,
        "key": None,
        "rpc_id": None if id is None else msgspec.json.encode(id).decode(),
        "batch": batch,
        "position": position,
        "size": mark.size if mark.batch else None,
        "bytes": 0 if position else mark.bytes,
        "revision": mark.revision,
        "call_id": None,
        "trace_id": None,
        "reason": None,
        "upstream": None,
    }
    if more is not None:
        row |= {
            "kind": more.kind,
            "outcome": more.outcome,
            "ran": more.ran,
            "replayed": more.replayed,
            "recognised": more.recognised,
            "attempt": more.attempt,
            "key": more.key,
            "call_id": more.call_id,
            "trace_id": more.trace_id,
            "reason": more.reason,
        }
        if more.passed is not None:
            row["upstream"] = more.passed.upstream
            row["revision"] = more.passed.client_revision
        if more.parent is not None:
            row["batch"] = f"{worker}-T{more.parent}"
    return row


def phases_of(seen: Seen) -> list[JsonObject]:
    """Return the phases of a call that are known, in milliseconds since its message was complete."""
    _, ended, mark, _, _, _, _, more = seen.raw
    points = [("waited", mark.begun, seen.start)]
    if more is None or not more.entered:
        points.append(("ran", seen.start, ended))
    else:
        left = more.left or ended
        points.append(("claimed", seen.start, more.entered))
        points.append(("ran", more.entered, left))
        points.append(("encoded", left, ended))
    if mark.ended > ended:
        points.append(("written", ended, mark.ended))
    return [
        {
            "name": name,
            "start_ms": round((begin - mark.begun) * 1000, 4),
            "ms": round(max(0.0, end - begin) * 1000, 4),
        }
        for name, begin, end in points
    ]


def passed_of(seen: Seen) -> JsonObject | None:
    """Return what a gateway changed in a call, line by line; None if there is none."""
    more = seen.raw[7]
    if more is None or more.passed is None:
        return None
    passed = more.passed
    lines = [_line("revision", passed.client_revision, passed.revision)]
    if passed.id is not None:
        own_id = str(seen.row["rpc_id"])
        lines.append(_line("id", own_id, str(passed.id)))
        if passed.has_token:
            lines.append(_line("progress token", "the client's own", str(passed.id)))
        if passed.crosses and passed.revision in STATELESS_NAMES:
            lines.append(_line("_meta", "said in the handshake", "revision, client, capabilities"))
        elif passed.crosses:
            lines.append(_line("_meta", "revision, client, capabilities", "said in the handshake"))
        if passed.has_headers:
            lines.append(_line("headers", "the client's own", "written again from the body"))
    return {
        "upstream": passed.upstream,
        "was_sent": passed.id is not None,
        "crosses": passed.crosses,
        "lines": lines,
    }


def _line(what: str, client: str | None, upstream: str | None) -> JsonObject:
    return {
        "what": what,
        "client": client,
        "upstream": upstream,
        "is_changed": client != upstream,
    }


def critical_path(entries: list[Seen], refs: dict[int, list[int]]) -> set[int]:
    """Return the positions of the entries that a batch had to wait for, one after another.

    It begins with the entry that ended last. Before an entry comes the last of those that it refers
    to, or else the last one that ended before it began.
    """
    by_position = {_position(seen): seen for seen in entries}
    path: set[int] = set()
    current = max(entries, key=_ended, default=None)
    while current is not None and _position(current) not in path:
        path.add(_position(current))
        start = current.start
        named = [
            by_position[each] for each in refs.get(_position(current), []) if each in by_position
        ]
        before = named or [seen for seen in entries if _ended(seen) <= start]
        current = max(before, key=_ended, default=None)
    return path


def _position(seen: Seen) -> int:
    return seen.raw[6] or 0


def _ended(seen: Seen) -> float:
    return seen.raw[1]
