"""The data of all workers of a server, in one place: what the console's process reads and merges.

It asks each worker once a second, and 20 times a second while there are watchers. Rows get a number
here, in the order in which they came; a gap in these numbers means that rows were lost. A worker
that has ended keeps its rows, which are marked as gone.
"""

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from wirecall.audit import Audit, AuditEntry, kept_files, verify
from wirecall.console.conflicts import CODE, conflict_of
from wirecall.console.filter import read_filter
from wirecall.console.records import word_of
from wirecall.console.ring import BOUNDS, SIZE, MethodTotals, quantile
from wirecall.console.rows import (
    Seen,
    critical_path,
    decode_batch,
    decode_rows,
    passed_of,
    phases_of,
    seen_of,
)
from wirecall.console.snippets import snippets
from wirecall.console.source import FeedEvent, NotFound, Refusal
from wirecall.console.tap import Trip
from wirecall.console.worker import SOCKET, Gone, Served, WorkerLink
from wirecall.errors import UsageError
from wirecall.ledger.base import RecordId
from wirecall.logs import host
from wirecall.protocol.messages import Json, JsonObject

# Seconds between two questions to the workers: without watchers, and with some.
CALM = 1.0
LIVE = 0.05
# Seconds without an event after which a feed sends a sign of life.
BEAT = 15.0
# Rows that are kept for each worker, and those of one event of a feed.
KEPT = SIZE
SENT = 200
# Workers that have ended and whose rows are kept.
GONE = 8
# Seconds of a step of the small charts, and their number.
STEP = 15
STEPS = 60
# Seconds over which the rates are measured.
WINDOW = 10
# Repetitions of a call that its page links to.
REPLAYS = 20


class Numbers(Struct):
    """The numbers of one worker, as it answers them."""

    worker: str
    pid: int
    since: float
    last: int = 0
    missed: int = 0
    in_flight: int = 0
    queued: int = 0
    methods: dict[str, MethodTotals] = {}
    trips: dict[str, Trip] = {}
    # The state of each server behind a gateway. None: it is not a gateway.
    upstreams: dict[str, JsonObject] | None = None


decode_numbers = msgspec.json.Decoder(Numbers).decode


class Worker:
    """One worker, alive or gone."""

    def __init__(self, link: WorkerLink) -> None:
        self.link = link
        self.name = link.name
        self.is_gone = False
        # The number of its last row that was read.
        self.read = 0
        # The end of that row, by its clock.
        self.previous = 0.0
        self.offset = 0.0
        self.numbers = Numbers(link.name, 0, time.time())


class Snapshot(Struct):
    """The sums over all workers at one moment."""

    at: float
    calls: int
    errors: int
    saved: int
    buckets: list[int]


class Collector:
    """Reads all workers of one server. It implements `Source`."""

    def __init__(
        self,
        served: Served,
        *,
        readonly: bool = False,
        audit: str | None = None,
        settings: Sequence[JsonObject] = (),
    ) -> None:
        self.served = served
        # The settings that the file, the environment and the command line state.
        self._stated = {str(each["name"]): each for each in settings}
        self._readonly = readonly
        self._trail = None if audit is None else Audit(audit)
        self._verified: JsonObject | None = None
        self.workers: dict[str, Worker] = {}
        # The sum of the workers that were forgotten.
        self._retired: list[Numbers] = []
        # Workers that have ended.
        self.ended = 0
        self.since = time.time()
        self._epoch = os.urandom(3).hex()
        self._rows: deque[Seen] = deque(maxlen=KEPT)
        # The number of the newest row, and of those that were lost.
        self._last = 0
        self._lost = 0
        self._snapshots: deque[Snapshot] = deque(maxlen=STEP * STEPS + WINDOW)
        # Records whose outcome is unknown; None if the ledger does not answer.
        self._unknown: int | None = None
        self._watchers = 0
        self._polling: asyncio.Task[None] | None = None
        self._reading = asyncio.Lock()
        self._news = asyncio.Event()
        self._wake = asyncio.Event()
        self._is_stopping = False

    # --- reading ----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Read the workers from now on."""
        await self.read()
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def aclose(self) -> None:
        """End every feed, and forget the workers."""
        self._is_stopping = True
        self._tell()
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait({self._polling})
        for worker in self.workers.values():
            worker.link.close()
        if self._trail is not None:
            self._trail.close()

    async def _poll(self) -> None:
        counted = 0.0
        while True:
            await self._read_rows()
            now = time.monotonic()
            if now - counted >= CALM * 0.9:
                counted = now
                await self._read_numbers()
                if self._watchers:
                    await self._count_unknown()
            self._wake.clear()
            pause = LIVE if self._watchers else CALM
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def read(self) -> None:
        """Read all workers now."""
        await self._read_rows()
        await self._read_numbers()

    def _find_workers(self) -> None:
        names = {path.name.removesuffix(SOCKET): path for path in self._sockets()}
        for name, path in names.items():
            known = self.workers.get(name)
            if known is None:
                self.workers[name] = Worker(WorkerLink(path))
        for name, worker in self.workers.items():
            if name not in names:
                self._lose(worker)
        gone = [worker for worker in self.workers.values() if worker.is_gone]
        for worker in gone[: max(0, len(gone) - GONE)]:
            del self.workers[worker.name]
            # Its calls stay in the sums: a counter never goes back.
            self._retired.append(worker.numbers)
            self._retired = [_sum_of_numbers(self._retired)]
        self._rows_limit(len(self.workers))

    def _rows_limit(self, workers: int) -> None:
        wanted = KEPT * max(1, workers)
        if self._rows.maxlen != wanted:
            self._rows = deque(self._rows, maxlen=wanted)

    def _sockets(self) -> list[Path]:
        return sorted(Path(self.served.folder).glob(f"[0-9a-f]*{SOCKET}"))

    def _lose(self, worker: Worker) -> None:
        """Mark a worker that has ended, and its rows."""
        if worker.is_gone:
            return
        worker.is_gone = True
        self.ended += 1
        worker.link.close()
        worker.numbers.in_flight = 0
        worker.numbers.queued = 0
        worker.numbers.upstreams = None
        for seen in self._rows:
            if seen.row["worker"] == worker.name:
                seen.row["gone"] = True

    def alive(self) -> list[Worker]:
        """Return the workers that have not ended."""
        return [worker for worker in self.workers.values() if not worker.is_gone]

    async def _read_rows(self) -> None:
        # One reading at a time: two would take the same rows twice.
        async with self._reading:
            await self._take_rows()

    async def _take_rows(self) -> None:
        self._find_workers()
        found: list[Seen] = []
        lost = 0
        for worker in self.alive():
            try:
                answer = decode_rows(await worker.link.ask_raw("rows", after=worker.read))
            except Gone:
                self._lose(worker)
                continue
            lost += answer.last - worker.read - len(answer.rows)
            worker.read = answer.last
            worker.offset = answer.offset
            for raw in answer.rows:
                found.append(seen_of(raw, worker.name, answer.offset, worker.previous))
                worker.previous = raw[1]
        self._last += lost
        self._lost += lost
        if len(self.workers) > 1:
            found.sort(key=lambda seen: float(seen.row["at"]))
        for seen in found:
            self._last += 1
            seen.row["n"] = self._last
        self._rows.extend(found)
        if found or lost:
            self._tell()

    def _tell(self) -> None:
        """Wake every feed."""
        news = self._news
        self._news = asyncio.Event()
        news.set()

    async def _read_numbers(self) -> None:
        for worker in self.alive():
            try:
                worker.numbers = decode_numbers(await worker.link.ask_raw("numbers"))
            except Gone:
                self._lose(worker)
        methods = self.methods_total()
        self._snapshots.append(
            Snapshot(
                time.time(),
                sum(each.calls for each in methods.values()),
                sum(sum(each.errors.values()) for each in methods.values()),
                sum(each.replays for each in methods.values()),
                _sum_of([each.buckets for each in methods.values()]),
            )
        )

    async def _count_unknown(self) -> None:
        try:
            self._unknown = int((await self.ask("counts"))["counts"]["unknown"])
        except Refusal:
            self._unknown = None

    def total(self) -> Numbers:
        """Return the numbers summed over all workers that were seen."""
        return _sum_of_numbers(
            [*self._retired, *(worker.numbers for worker in self.workers.values())]
        )

    def methods_total(self) -> dict[str, MethodTotals]:
        """Return the numbers of every method, summed over all workers that were seen."""
        return self.total().methods

    async def ask(self, what: str, **rest: Any) -> JsonObject:
        """Ask any worker that is alive."""
        for worker in self.alive():
            try:
                return await worker.link.ask(what, **rest)
            except Gone:
                self._lose(worker)
        raise Refusal(
            503,
            _error("no_worker", "No worker of the server answers.", "it is starting, or it ended"),
        )

    # --- pages ------------------------------------------------------------------------------------

    async def now(self) -> JsonObject:
        """Return what happens now."""
        await self.read()
        methods = self.methods_total()
        counts: JsonObject | None = None
        ledger_error: Json = None
        person: list[Json] = []
        try:
            found = await self.ask("counts")
            counts = found["counts"]
            if counts is not None and counts["unknown"]:
                person.append(
                    {
                        "kind": "unknown",
                        "count": counts["unknown"],
                        "oldest_at": found["oldest_unknown"],
                        "open": "/ledger?state=unknown",
                    }
                )
        except Refusal as refusal:
            ledger_error = str(refusal)
        down = [name for name, each in self.upstream_states().items() if not each["up"]]
        if down:
            person.append(
                {
                    "kind": "upstream",
                    "count": len(down),
                    "names": down,
                    "oldest_at": None,
                    "open": "/upstreams",
                }
            )
        shown = sorted(methods.items(), key=lambda each: -each[1].seconds)[:20]
        return {
            "at": time.time(),
            "since": self.since,
            **self._live(methods),
            "sparks": self._sparks(),
            "person": person,
            "methods": [{"method": name, **_figures(each)} for name, each in shown],
            "errors": self._errors(),
            "ledger": counts,
            "ledger_error": ledger_error,
        }

    def _live(self, methods: dict[str, MethodTotals]) -> JsonObject:
        """Return the numbers that change every second."""
        newest = self._snapshots[-1]
        before = next(
            (each for each in reversed(self._snapshots) if each.at <= newest.at - WINDOW),
            self._snapshots[0],
        )
        seconds = max(newest.at - before.at, 1.0)
        buckets = [new - old for new, old in zip(newest.buckets, before.buckets, strict=True)]
        return {
            "workers": [
                {
                    "worker": worker.name,
                    "pid": worker.numbers.pid,
                    "gone": worker.is_gone,
                    "in_flight": worker.numbers.in_flight,
                    "queued": worker.numbers.queued,
                }
                for worker in self.workers.values()
            ],
            "is_gateway": self.is_gateway,
            "tiles": {
                "calls_per_s": (newest.calls - before.calls) / seconds,
                "errors_per_s": (newest.errors - before.errors) / seconds,
                "p95_ms": quantile(buckets, 0.95),
                "saved": newest.saved,
            },
            "totals": {
                "calls": newest.calls,
                "errors": newest.errors,
                "replays": newest.saved,
                "undelivered": sum(each.undelivered for each in methods.values()),
                "lost_rows": self._lost,
            },
        }

    # --- the servers behind a gateway -------------------------------------------------------------

    @property
    def is_gateway(self) -> bool:
        return any(worker.numbers.upstreams is not None for worker in self.workers.values())

    def upstream_states(self) -> dict[str, JsonObject]:
        """Return the state of each upstream; of several workers, that of the first that is alive."""
        for worker in self.alive():
            if worker.numbers.upstreams is not None:
                return worker.numbers.upstreams
        return {}

    async def upstreams(self) -> JsonObject:
        """Return the state and the figures of every upstream."""
        await self._read_numbers()
        return {
            "at": time.time(),
            "is_gateway": self.is_gateway,
            "upstreams": [
                self._described(name, state) for name, state in self.upstream_states().items()
            ],
        }

    def _described(self, name: str, state: JsonObject) -> JsonObject:
        """Return an upstream with the figures of the calls that were passed on to it."""
        place = f":{state['label']}/"
        calls = [each for method, each in self.methods_total().items() if place in method]
        return {"name": name, **state, **_figures(_merged(calls))}

    async def upstream(self, name: str) -> JsonObject:
        """Return one upstream, with its tools."""
        found = await self.ask("upstream", name=name)
        await self._read_numbers()
        return self._described(name, found)

    async def probe(self, name: str, *, actor: str) -> JsonObject:
        """Ask an upstream for its tools, for a person."""
        found = await self.ask("probe", name=name)
        await self.note_action(actor, "probe", name, "ok" if found["ok"] else "error")
        return {**found, "upstream": await self.upstream(name)}

    def _sparks(self) -> JsonObject:
        """Return the last 15 minutes in steps, the oldest first."""
        now = time.time()
        edges = [now - STEP * each for each in range(STEPS, -1, -1)]
        at_edges: list[Snapshot | None] = []
        snapshots = iter(self._snapshots)
        last: Snapshot | None = None
        following = next(snapshots, None)
        for edge in edges:
            while following is not None and following.at <= edge:
                last = following
                following = next(snapshots, None)
            at_edges.append(last)
        if self._snapshots:
            at_edges[-1] = self._snapshots[-1]
        sparks: dict[str, list[Json]] = {"calls": [], "errors": [], "p95_ms": [], "saved": []}
        empty = Snapshot(0.0, 0, 0, 0, [0] * (len(BOUNDS) + 1))
        for old, new in pairwise(at_edges):
            start = old or empty
            end = new or start
            buckets = [high - low for high, low in zip(end.buckets, start.buckets, strict=True)]
            sparks["calls"].append(end.calls - start.calls)
            sparks["errors"].append(end.errors - start.errors)
            sparks["p95_ms"].append(quantile(buckets, 0.95))
            sparks["saved"].append(end.saved - start.saved)
        return {"step_s": STEP, **sparks}

    def _errors(self) -> list[JsonObject]:
        """Return the errors among the rows, by method and code, the most frequent first."""
        groups: dict[tuple[Json, Json], JsonObject] = {}
        for seen in self._rows:
            row = seen.row
            if row["outcome"] != "error":
                continue
            group = groups.setdefault(
                (row["method"], row["code"]),
                {"method": row["method"], "code": row["code"], "count": 0},
            )
            group["count"] += 1
            group["last_at"] = row["at"]
            group["call"] = row["id"]
        return sorted(groups.values(), key=lambda group: -group["count"])[:20]

    async def calls(
        self, filter: str = "", *, limit: int = 200, before: str | None = None
    ) -> JsonObject:
        """Return the newest calls that fit a filter."""
        wanted = read_filter(filter)
        await self._read_rows()
        now = time.time()
        rows: list[JsonObject] = []
        hidden = 0
        more: Json = None
        is_after = before is None
        for seen in reversed(self._rows):
            if not is_after:
                is_after = seen.row["id"] == before
                continue
            if not wanted.fits(seen.row, now):
                hidden += 1
                continue
            if len(rows) == max(1, min(limit, 1000)):
                more = rows[-1]["id"]
                break
            rows.append(seen.row)
        return {
            "rows": rows,
            "more": more,
            "hidden": hidden,
            "total": len(self._rows),
            "lost": self._lost,
            "filter": filter,
        }

    async def call(self, id: str) -> JsonObject:
        """Return everything about one call."""
        await self._read_rows()
        seen = self._find(id)
        row = seen.row
        worker = self.workers.get(str(row["worker"]))
        body = await self._body(seen)
        record: Json = None
        if row["key"] is not None and row["kind"] == "command":
            record = word_of(RecordId(str(row["caller"]), str(row["method"]), str(row["key"])))
        params = None
        if body["body"] is not None:
            params = body["body"]["params"]
        lines: list[Json] = []
        if worker is not None and not worker.is_gone and row["call_id"] is not None:
            lines = (await worker.link.ask("lines", call_id=row["call_id"]))["lines"]
        return {
            "row": row,
            "phases": phases_of(seen),
            "passed": passed_of(seen),
            "body": body["body"],
            "capture": body["capture"],
            "record": record,
            "batch": row["batch"],
            "lines": lines,
            "original": self._original(row),
            "replays": self._replays(row),
            "can_try": not self.is_gateway,
            "commands": snippets(self.served, row, params),
        }

    def _find(self, id: str) -> Seen:
        for seen in reversed(self._rows):
            if seen.row["id"] == id:
                return seen
        raise NotFound(f"call {id[:100]}", "only the last calls are kept")

    def _original(self, row: JsonObject) -> Json:
        """Return the call that ran, if this one got its answer and it is still here."""
        if not row["replayed"]:
            return None
        same = ("caller", "method", "key")
        for seen in reversed(self._rows):
            other = seen.row
            is_first = not other["replayed"] and other["outcome"] != "undelivered"
            if is_first and all(other[name] == row[name] for name in same):
                return other["id"]
        return None

    def _replays(self, row: JsonObject) -> list[Json]:
        """Return the later calls that got the answer of this one, the newest first."""
        if row["key"] is None or row["replayed"]:
            return []
        same = ("caller", "method", "key")
        return [
            seen.row["id"]
            for seen in reversed(self._rows)
            if seen.row["replayed"] and all(seen.row[name] == row[name] for name in same)
        ][:REPLAYS]

    async def batch(self, id: str) -> JsonObject:
        """Return the entries of one batch, with the phases of each."""
        await self._read_rows()
        entries = [seen for seen in self._rows if seen.row["batch"] == id]
        if not entries:
            raise NotFound(f"batch {id[:100]}", "only the last calls are kept")
        refs: dict[int, list[int]] = {}
        concurrency: Json = None
        mark = entries[0].raw[2]
        worker = self.workers.get(str(entries[0].row["worker"]))
        if worker is not None and not worker.is_gone and mark.batch:
            try:
                data = await worker.link.ask_raw("batch", number=mark.batch)
            except Gone:
                self._lose(worker)
            else:
                answer = decode_batch(data)
                entries = _renewed(entries, answer.rows)
                refs = {int(position): found for position, found in answer.waits.items()}
                concurrency = answer.concurrency
        mark = entries[0].raw[2]
        entries.sort(key=lambda seen: int(seen.row["position"] or 0))
        critical = critical_path(entries, refs)
        size = mark.size if mark.batch else len(entries)
        ended = mark.ended or max(seen.raw[1] for seen in entries)
        return {
            "id": id,
            "at": min(float(seen.row["at"]) for seen in entries),
            "size": size,
            "bytes": mark.bytes,
            "caller": mark.caller,
            "ms": round((ended - mark.begun) * 1000, 4),
            "concurrency": concurrency,
            "whole": len(entries) == size and mark.ended > 0,
            "missing": size - len(entries),
            "upstreams": _shares(entries),
            "entries": [
                {
                    "position": seen.row["position"],
                    "row": seen.row,
                    "phases": phases_of(seen),
                    "refs": refs.get(int(seen.row["position"] or 0), []),
                    "critical": int(seen.row["position"] or 0) in critical,
                }
                for seen in entries
            ],
        }

    async def ledger(
        self,
        *,
        state: str | None = None,
        method: str | None = None,
        caller: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> JsonObject:
        """Return a page of records, the newest first."""
        return await self.ask(
            "records", state=state, method=method, caller=caller, limit=limit, after=after
        )

    async def record(self, id: str) -> JsonObject:
        """Return everything about one record."""
        found = await self.ask("record", id=id)
        await self._read_rows()
        same = ("caller", "method", "key")
        found["calls"] = [
            seen.row
            for seen in reversed(self._rows)
            if all(seen.row[name] == found[name] for name in same)
        ][:50]
        found["conflict"] = await self._conflict(found)
        wanted = f"{found['method']}\n{found['key']}"
        lines = await asyncio.to_thread(self._read_trail)
        found["audit"] = [
            line for line in lines if f"{line.get('method')}\n{line.get('key')}" == wanted
        ][-50:]
        return found

    async def _conflict(self, record: JsonObject) -> JsonObject | None:
        """Return how the newest call with the same key and other params differs from a record."""
        found = next((row for row in record["calls"] if row["code"] == CODE), None)
        if found is None:
            return None
        body = await self._body(self._find(found["id"]))
        return conflict_of(found["id"], record["params"], body)

    async def _body(self, seen: Seen) -> JsonObject:
        """Return the content of a call, if its worker has it."""
        worker = self.workers.get(str(seen.row["worker"]))
        if worker is not None and not worker.is_gone:
            try:
                return await worker.link.ask("body", number=seen.raw[0])
            except Gone:
                self._lose(worker)
        return {"body": None, "capture": "facts"}

    async def resolve(self, id: str, request: JsonObject, *, actor: str) -> JsonObject:
        """Settle a record whose outcome is unknown."""
        self._check_writable()
        return await self.ask("resolve", id=id, request=request, actor=actor)

    def _check_writable(self) -> None:
        if self._readonly:
            raise Refusal(
                403,
                _error(
                    "readonly",
                    "This console changes nothing.",
                    "start the server without --console-readonly",
                ),
            )

    async def methods(self) -> JsonObject:
        """Return every method with its numbers."""
        found = await self.ask("methods")
        await self._read_numbers()
        totals = self.methods_total()
        described = []
        for method in found["methods"]:
            names = (method["name"], f"tools/call:{method['tool_name']}")
            both = [totals[name] for name in names if name in totals]
            described.append({**method, **_figures(_merged(both))})
        return {"methods": described}

    async def method(self, name: str) -> JsonObject:
        """Return one method."""
        for each in (await self.methods())["methods"]:
            if name in (each["name"], each["tool_name"]):
                return dict(each)
        raise NotFound(f"method {name[:100]!r}", "open it from the list")

    async def attempt(self, name: str, request: JsonObject, *, actor: str) -> JsonObject:
        """Make one call for a person."""
        self._check_writable()
        method = await self.method(name)
        called = name
        name = method["name"]
        is_harmless = method["kind"] == "query" or method["annotations"]["destructiveHint"] is False
        if not is_harmless and request.get("confirm") not in (name, called):
            raise Refusal(
                400,
                _error(
                    "confirm",
                    f"{name} may destroy something: expected its name as `confirm`.",
                    "type the name of the method",
                ),
            )
        if not method["rpc"]:
            raise Refusal(
                400,
                _error(
                    "transport", f"{name} is offered over MCP only.", f"wirecall call ... {name}"
                ),
            )
        message = _message(name, request)
        answer = await self.ask("try", message=message)
        await self.note_action(actor, "try", name, "replayed" if answer["replayed"] else "sent")
        await self._read_rows()
        call = next(
            (seen.row["id"] for seen in reversed(self._rows) if seen.row["method"] == name), None
        )
        return {
            "message": message,
            "answer": answer["answer"],
            "replayed": answer["replayed"],
            "ms": answer["ms"],
            "call": call,
        }

    # --- the audit trail --------------------------------------------------------------------------

    async def audit(
        self, filter: str = "", *, limit: int = 100, before: int | None = None
    ) -> JsonObject:
        """Return the newest lines of the audit trail that contain every word of the filter."""
        words = filter.lower().split()
        lines = await asyncio.to_thread(self._read_trail)
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

    def _read_trail(self) -> list[JsonObject]:
        """Return the end of the audit trail, as its lines."""
        if self._trail is None or not self._trail.path.exists():
            return []
        return list(_last_lines(self._trail.path))

    async def export_audit(self, filter: str = "") -> AsyncIterator[bytes]:
        """Yield the whole trail, the oldest lines first, or the lines with every word of a filter.

        Without a filter the bytes are those of the files, so a copy can be verified.
        """
        if self._trail is None or not self._trail.path.exists():
            raise NotFound("audit trail", "start the server with --audit file:audit.jsonl")
        words = filter.lower().split()
        for path in (*kept_files(self._trail.path), self._trail.path):
            with await asyncio.to_thread(path.open, "rb") as file:
                while found := await asyncio.to_thread(file.readlines, BLOCK):
                    yield b"".join(line for line in found if _has_words(line, words))

    async def verify_audit(self) -> JsonObject:
        """Check every link of the audit trail."""
        if self._trail is None or not self._trail.path.exists():
            raise NotFound("audit trail", "start the server with --audit file:audit.jsonl")
        report = await asyncio.to_thread(verify, self._trail.path)
        self._verified = {
            "ok": report.ok,
            "lines": report.lines,
            "at": time.time(),
            "problems": [list(problem) for problem in report.problems[:100]],
        }
        return self._verified

    async def note_action(self, actor: str, action: str, target: str, outcome: str) -> None:
        """Write a line of the audit trail about what a person did."""
        if self._trail is None:
            return
        entry = AuditEntry(
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

    # --- settings ---------------------------------------------------------------------------------

    async def settings(self) -> JsonObject:
        """Return the effective settings, without secrets."""
        found = await self.ask("settings")
        await self.read()
        rest = dict(self._stated)
        values = []
        for each in found["values"]:
            stated = rest.pop(each["name"], None)
            if stated is not None and stated["origin"] != "default":
                each = {**each, "origin": stated["origin"]}
            values.append(each)
        return {
            **found,
            "values": [*values, *rest.values()],
            "readonly": self._readonly,
            "target": self.served.target,
            "address": self.served.address,
            "workers": self._live({})["workers"],
        }

    async def pause(self, paused: bool) -> JsonObject:
        """Pause the capture of bodies in all workers, or continue it."""
        for worker in self.alive():
            try:
                await worker.link.ask("pause", paused=paused)
            except Gone:
                self._lose(worker)
        return {"paused": paused}

    # --- the feed ---------------------------------------------------------------------------------

    async def feed(self, filter: str = "", after: str | None = None) -> AsyncIterator[FeedEvent]:
        """Yield the calls that fit a filter as they come, from a place on or from now on."""
        wanted = read_filter(filter)
        place, lost = self._place_of(after)
        self._watchers += 1
        self._wake.set()
        loop = asyncio.get_running_loop()
        spoke = loop.time()
        counted_at = 0.0
        try:
            while not self._is_stopping:
                news = self._news
                event, place, lost = self._next_rows(wanted, place, lost)
                now = loop.time()
                if event is not None:
                    spoke = now
                    yield event
                if now - counted_at >= CALM:
                    counted_at = now
                    spoke = now
                    live = self._live(self.methods_total())
                    yield FeedEvent("numbers", {**live, "unknown": self._unknown})
                elif now - spoke >= BEAT:
                    spoke = now
                    yield FeedEvent("beat", {})
                if event is not None:
                    # At most 20 events a second.
                    await asyncio.sleep(LIVE)
                    continue
                try:
                    async with asyncio.timeout(CALM):
                        await news.wait()
                except TimeoutError:
                    pass
            yield FeedEvent("end", {"reason": "stopping"})
        finally:
            self._watchers -= 1

    def _place_of(self, after: str | None) -> tuple[int, int]:
        """Return the number after which a feed continues, and how many rows it has lost.

        -1: it is not known.
        """
        if after is None:
            return self._last, 0
        epoch, _, number = after.partition("-")
        if epoch != self._epoch or not number.isdecimal():
            return self._last, -1
        return min(int(number), self._last), 0

    def _next_rows(self, wanted: Any, place: int, lost: int) -> tuple[FeedEvent | None, int, int]:
        """Return the event with the rows after a place, and the place after it."""
        if place == self._last and not lost:
            return None, place, 0
        fresh: list[JsonObject] = []
        for seen in reversed(self._rows):
            if seen.row["n"] <= place:
                break
            fresh.append(seen.row)
        fresh.reverse()
        if lost >= 0:
            lost += self._last - place - len(fresh)
        now = time.time()
        rows = [row for row in fresh if wanted.fits(row, now)]
        step = 1
        if len(rows) > SENT:
            step = -(-len(rows) // SENT)
            rows = rows[::step]
        if not rows and not lost:
            return None, self._last, 0
        data: JsonObject = {"rows": rows, "sampled": step, "lost": lost}
        return FeedEvent("rows", data, f"{self._epoch}-{self._last}"), self._last, 0


def _renewed(entries: list[Seen], rows: list[Any]) -> list[Seen]:
    """Return the entries with their rows as the worker has them now."""
    by_number = {raw[0]: raw for raw in rows}
    for seen in entries:
        seen.raw = by_number.get(seen.raw[0], seen.raw)
    return entries


def _shares(entries: list[Seen]) -> JsonObject:
    """Return how many entries went to each server behind a gateway, the largest number first."""
    found = Counter(str(seen.row["upstream"]) for seen in entries if seen.row["upstream"])
    return dict(found.most_common())


def _sum_of(lists: list[list[int]]) -> list[int]:
    total = [0] * (len(BOUNDS) + 1)
    for each in lists:
        total = [left + right for left, right in zip(total, each, strict=True)]
    return total


def _sum_of_numbers(several: list[Numbers]) -> Numbers:
    total = Numbers("", 0, 0.0, methods={}, trips={})
    for numbers in several:
        total.missed += numbers.missed
        total.in_flight += numbers.in_flight
        total.queued += numbers.queued
        for name, each in numbers.methods.items():
            found = total.methods.setdefault(name, MethodTotals(each.kind))
            found.calls += each.calls
            found.replays += each.replays
            found.seconds += each.seconds
            found.undelivered += each.undelivered
            for code, number in each.errors.items():
                found.errors[code] = found.errors.get(code, 0) + number
            found.buckets = _sum_of([found.buckets, each.buckets])
        for name, trip in numbers.trips.items():
            whole = total.trips.setdefault(name, Trip())
            whole.number += trip.number
            whole.failed += trip.failed
            whole.seconds += trip.seconds
    return total


def _merged(totals: list[MethodTotals]) -> MethodTotals:
    if len(totals) == 1:
        return totals[0]
    whole = MethodTotals()
    for each in totals:
        whole.calls += each.calls
        whole.seconds += each.seconds
        whole.replays += each.replays
        for code, number in each.errors.items():
            whole.errors[code] = whole.errors.get(code, 0) + number
        whole.buckets = _sum_of([whole.buckets, each.buckets])
    return whole


def _figures(totals: MethodTotals) -> JsonObject:
    """Return the numbers of a method as a page shows them."""
    return {
        "calls": totals.calls,
        "errors": sum(totals.errors.values()),
        "total_ms": round(totals.seconds * 1000, 3),
        "p50_ms": quantile(totals.buckets, 0.5),
        "p95_ms": quantile(totals.buckets, 0.95),
    }


def _message(name: str, request: JsonObject) -> str:
    """Return the message of a person's call. The text of the params stays as it was typed."""
    text = str(request.get("params") or "{}")
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal(
            400, _error("params", f"The params are not JSON: {error}", '{"name": "value"}')
        ) from None
    key = request.get("key")
    if key is not None:
        if not isinstance(value, dict):
            raise Refusal(400, _error("params", "A key needs params by name.", '{"name": "value"}'))
        inside = text.strip()[1:].lstrip()
        comma = "" if inside.startswith("}") else ","
        text = '{"idempotency_key":' + msgspec.json.encode(str(key)).decode() + comma + inside
    method = msgspec.json.encode(name).decode()
    return f'{{"jsonrpc":"2.0","id":1,"method":{method},"params":{text}}}'


# Bytes of the audit trail that a page reads, from its end.
TRAIL_TAIL = 4 << 20
# Bytes of the trail that are read at once for an export.
BLOCK = 1 << 18


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


def _error(kind: str, message: str, hint: str = "") -> JsonObject:
    return {"error": {"type": kind, "message": message, "hint": hint}}


def open_collector(
    served: Served,
    *,
    readonly: bool = False,
    audit: str | None = None,
    settings: Sequence[JsonObject] = (),
) -> Collector:
    """Return a collector of a server; `UsageError` if this system has no Unix sockets."""
    if not hasattr(asyncio, "open_unix_connection"):
        raise UsageError(
            "Calls cannot be watched on this system.",
            "it has no Unix sockets",
            "use Linux or macOS",
        )
    return Collector(served, readonly=readonly, audit=audit, settings=settings)
