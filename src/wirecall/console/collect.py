"""The data of all workers of a server, in one place: what the console's process reads and merges.

It asks each worker once a second, and 20 times a second while there are watchers. Rows get a number
here, in the order in which they came; a gap in these numbers means that rows were lost. A worker
that has ended keeps its rows, which are marked as gone.
"""

import asyncio
import shlex
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from wirecall.console.calls import Calls
from wirecall.console.conflicts import CODE, conflict_of
from wirecall.console.filter import read_filter
from wirecall.console.history import History
from wirecall.console.numbers import figures, merged
from wirecall.console.records import word_of
from wirecall.console.ring import MethodTotals
from wirecall.console.rows import (
    Seen,
    critical_path,
    decode_batch,
    decode_rows,
    passed_of,
    phases_of,
    seen_of,
)
from wirecall.console.snippets import discovery, first_call, snippets
from wirecall.console.source import FeedEvent, NotFound, Refusal
from wirecall.console.trail import Trail
from wirecall.console.typed import message_of
from wirecall.console.worker import Gone, Served
from wirecall.console.workers import Workers
from wirecall.errors import UsageError
from wirecall.ledger.base import RecordId
from wirecall.protocol.messages import Json, JsonObject

# Seconds between two questions to the workers: without watchers, and with some.
CALM = 1.0
LIVE = 0.05
# Seconds without an event after which a feed sends a sign of life.
BEAT = 15.0


class Collector:
    """Reads all workers of one server. It implements `Source`."""

    def __init__(
        self,
        served: Served,
        *,
        readonly: bool = False,
        audit: dict[str, Any] | None = None,
        settings: Sequence[JsonObject] = (),
    ) -> None:
        self.served = served
        # The settings that the file, the environment and the command line state.
        self._stated = {str(each["name"]): each for each in settings}
        self._readonly = readonly
        self._trail = Trail(audit)
        self.since = time.time()
        self.kept = Calls()
        self.workers = Workers(served.folder, self.kept.grey)
        self._history = History()
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
        self.workers.close()
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

    async def _read_rows(self) -> None:
        # One reading at a time: two would take the same rows twice.
        async with self._reading:
            await self._take_rows()

    async def _take_rows(self) -> None:
        self.workers.find()
        self.kept.limit(len(self.workers))
        found: list[Seen] = []
        lost = 0
        for worker in self.workers.alive():
            try:
                answer = decode_rows(await worker.link.ask_raw("rows", after=worker.read))
            except Gone:
                self.workers.lose(worker)
                continue
            rows = [raw for raw in answer.rows if raw[0] > worker.read]
            lost += answer.last - worker.read - len(rows)
            worker.read = answer.last
            worker.offset = answer.offset
            for raw in rows:
                found.append(seen_of(raw, worker.name, answer.offset, worker.previous))
                worker.previous = raw[1]
        if len(self.workers) > 1:
            found.sort(key=lambda seen: seen.at)
        self.kept.add(found, lost)
        if found or lost:
            self._tell()

    def _tell(self) -> None:
        """Wake every feed."""
        news = self._news
        self._news = asyncio.Event()
        news.set()

    async def _read_numbers(self) -> None:
        await self.workers.read_numbers()
        methods = self.methods_total()
        self._history.add(methods)

    async def _count_unknown(self) -> None:
        try:
            self._unknown = int((await self.workers.ask("counts"))["counts"]["unknown"])
        except Refusal:
            self._unknown = None

    def methods_total(self) -> dict[str, MethodTotals]:
        """Return the numbers of every method, summed over all workers that were seen."""
        return self.workers.total().methods

    # --- pages ------------------------------------------------------------------------------------

    async def now(self) -> JsonObject:
        """Return what happens now."""
        await self.read()
        methods = self.methods_total()
        counts: JsonObject | None = None
        ledger_error: Json = None
        person: list[Json] = []
        try:
            found = await self.workers.ask("counts")
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
        down = [name for name, each in self.workers.upstream_states().items() if not each["up"]]
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
            "sparks": self._history.sparks(),
            "person": person,
            "methods": [{"method": name, **figures(each)} for name, each in shown],
            "errors": self.kept.errors(),
            "ledger": counts,
            "ledger_error": ledger_error,
            "first_call": await self._first_call(),
        }

    async def _first_call(self) -> str | None:
        """Return a command line for the first call; None if there are calls, or it is a gateway."""
        if self.kept.last or self.workers.is_gateway:
            return None
        try:
            return first_call(self.served, (await self.workers.ask("methods"))["methods"])
        except Refusal:
            return None

    def _live(self, methods: dict[str, MethodTotals]) -> JsonObject:
        """Return the numbers that change every second."""
        newest = self._history.newest
        return {
            "workers": [
                {
                    "worker": worker.name,
                    "pid": worker.numbers.pid,
                    "gone": worker.is_gone,
                    "in_flight": worker.numbers.in_flight,
                    "queued": worker.numbers.queued,
                }
                for worker in self.workers
            ],
            "is_gateway": self.workers.is_gateway,
            "tiles": self._history.rates(),
            "totals": {
                "calls": newest.calls,
                "errors": newest.errors,
                "replays": newest.saved,
                "undelivered": sum(each.undelivered for each in methods.values()),
                "lost_rows": self.kept.lost,
            },
        }

    # --- the servers behind a gateway -------------------------------------------------------------

    async def upstreams(self) -> JsonObject:
        """Return the state and the figures of every upstream."""
        await self._read_numbers()
        return {
            "at": time.time(),
            "is_gateway": self.workers.is_gateway,
            "upstreams": [
                self._described(name, state)
                for name, state in self.workers.upstream_states().items()
            ],
        }

    def _described(self, name: str, state: JsonObject) -> JsonObject:
        """Return an upstream with the figures of the calls that were passed on to it."""
        place = f":{state['label']}/"
        calls = [each for method, each in self.methods_total().items() if place in method]
        return {"name": name, **state, **figures(merged(calls))}

    async def upstream(self, name: str) -> JsonObject:
        """Return one upstream, with its tools."""
        found = await self.workers.ask("upstream", name=name)
        await self._read_numbers()
        return self._described(name, found)

    async def probe(self, name: str, *, actor: str) -> JsonObject:
        """Ask an upstream for its tools, for a person."""
        found = await self.workers.ask("probe", name=name)
        await self.note_action(actor, "probe", name, "ok" if found["ok"] else "error")
        return {**found, "upstream": await self.upstream(name)}

    async def calls(
        self, filter: str = "", *, limit: int = 200, before: str | None = None
    ) -> JsonObject:
        """Return the newest calls that fit a filter."""
        read_filter(filter)  # it refuses a wrong one before the workers are asked
        await self._read_rows()
        page = self.kept.page(filter, limit=limit, before=before)
        return {**page, "first_call": await self._first_call()}

    async def call(self, id: str) -> JsonObject:
        """Return everything about one call."""
        await self._read_rows()
        seen = self.kept.find(id)
        row = seen.row
        worker = self.workers.get(seen.worker)
        body = await self._body(seen)
        record: Json = None
        if row["key"] is not None and row["kind"] == "command":
            record = word_of(RecordId(str(row["caller"]), str(row["method"]), str(row["key"])))
        params = None
        if body["body"] is not None:
            params = body["body"]["params"]
        lines: list[Json] = []
        if worker is not None and row["call_id"] is not None:
            try:
                lines = (await worker.link.ask("lines", call_id=row["call_id"]))["lines"]
            except Gone:
                self.workers.lose(worker)
        return {
            "row": row,
            "phases": phases_of(seen),
            "passed": passed_of(seen),
            "body": body["body"],
            "capture": body["capture"],
            "record": record,
            "batch": row["batch"],
            "lines": lines,
            "original": self.kept.original(row),
            "replays": self.kept.replays(row),
            "can_try": not self.workers.is_gateway,
            "commands": snippets(self.served, row, params),
        }

    async def batch(self, id: str) -> JsonObject:
        """Return the entries of one batch, with the phases of each."""
        await self._read_rows()
        entries = [seen for seen in self.kept.rows if seen.row["batch"] == id]
        if not entries:
            raise NotFound(f"batch {id[:100]}", "only the last calls are kept")
        refs: dict[int, list[int]] = {}
        concurrency: Json = None
        mark = entries[0].raw[2]
        worker = self.workers.get(entries[0].worker)
        if worker is not None and mark.batch:
            try:
                data = await worker.link.ask_raw("batch", number=mark.batch)
            except Gone:
                self.workers.lose(worker)
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
            "at": min(seen.at for seen in entries),
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
        return await self.workers.ask(
            "records", state=state, method=method, caller=caller, limit=limit, after=after
        )

    async def record(self, id: str) -> JsonObject:
        """Return everything about one record."""
        found = await self.workers.ask("record", id=id)
        await self._read_rows()
        found["calls"] = self.kept.of(found, 50)
        found["conflict"] = await self._conflict(found)
        wanted = f"{found['method']}\n{found['key']}"
        lines = await self._trail.lines()
        found["audit"] = [
            line for line in lines if f"{line.get('method')}\n{line.get('key')}" == wanted
        ][-50:]
        return found

    async def _conflict(self, record: JsonObject) -> JsonObject | None:
        """Return how the newest call with the same key and other params differs from a record."""
        found = next((row for row in record["calls"] if row["code"] == CODE), None)
        if found is None:
            return None
        body = await self._body(self.kept.find(found["id"]))
        return conflict_of(found["id"], record["params"], body)

    async def _body(self, seen: Seen) -> JsonObject:
        """Return the content of a call, if its worker has it."""
        worker = self.workers.get(seen.worker)
        if worker is not None:
            try:
                return await worker.link.ask("body", number=seen.raw[0])
            except Gone:
                self.workers.lose(worker)
        return {"body": None, "capture": "facts"}

    async def resolve(self, id: str, request: JsonObject, *, actor: str) -> JsonObject:
        """Settle a record whose outcome is unknown."""
        self._check_writable()
        return await self.workers.ask("resolve", id=id, request=request, actor=actor)

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
        found = await self.workers.ask("methods")
        await self._read_numbers()
        totals = self.methods_total()
        described = []
        for method in found["methods"]:
            both = [totals[name] for name in method["rows"] if name in totals]
            described.append({**method, **figures(merged(both))})
        return {"methods": described, "discover": discovery(self.served)}

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
        message = message_of(name, request)
        answer = await self.workers.ask("try", is_action=True, message=message)
        await self.note_action(actor, "try", name, "replayed" if answer["replayed"] else "sent")
        await self._read_rows()
        return {
            "message": message,
            "answer": answer["answer"],
            "replayed": answer["replayed"],
            "ms": answer["ms"],
            "call": self.kept.newest_of(name),
        }

    # --- the audit trail --------------------------------------------------------------------------

    async def audit(
        self, filter: str = "", *, limit: int = 100, before: int | None = None
    ) -> JsonObject:
        """Return the newest lines of the audit trail that contain every word of the filter."""
        page = await self._trail.page(filter, limit=limit, before=before)
        if page["path"] is None and not self.workers.is_gateway:
            words = ["wirecall", "serve", self.served.target, "--audit", "file:audit.jsonl"]
            page["start"] = shlex.join(words)
        return page

    def export_audit(self, filter: str = "") -> AsyncIterator[bytes]:
        """Yield the whole trail, or its lines with every word of a filter."""
        return self._trail.export(filter)

    async def verify_audit(self) -> JsonObject:
        """Check every link of the audit trail."""
        return await self._trail.verify()

    async def note_action(self, actor: str, action: str, target: str, outcome: str) -> None:
        """Write a line of the audit trail about what a person did."""
        await self._trail.note(actor, action, target, outcome)

    # --- settings ---------------------------------------------------------------------------------

    async def settings(self) -> JsonObject:
        """Return the effective settings, without secrets."""
        found = await self.workers.ask("settings")
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
        for worker in self.workers.alive():
            try:
                await worker.link.ask("pause", paused=paused)
            except Gone:
                self.workers.lose(worker)
        return {"paused": paused}

    # --- the feed ---------------------------------------------------------------------------------

    async def feed(self, filter: str = "", after: str | None = None) -> AsyncIterator[FeedEvent]:
        """Yield the calls that fit a filter as they come, from a place on or from now on."""
        wanted = read_filter(filter)
        place, lost = self.kept.place_of(after)
        self._watchers += 1
        self._wake.set()
        loop = asyncio.get_running_loop()
        spoke = loop.time()
        counted_at = 0.0
        try:
            while not self._is_stopping:
                news = self._news
                event, place, lost = self.kept.next_rows(wanted, place, lost)
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


def _shares(entries: list[Seen]) -> JsonObject:
    """Return how many entries went to each server behind a gateway, the largest number first."""
    found = Counter(str(seen.row["upstream"]) for seen in entries if seen.row["upstream"])
    return dict(found.most_common())


def _renewed(entries: list[Seen], rows: list[Any]) -> list[Seen]:
    """Return the entries with their rows as the worker has them now."""
    by_number = {raw[0]: raw for raw in rows}
    for seen in entries:
        seen.raw = by_number.get(seen.raw[0], seen.raw)
    return entries


def _error(kind: str, message: str, hint: str = "") -> JsonObject:
    return {"error": {"type": kind, "message": message, "hint": hint}}


def open_collector(
    served: Served,
    *,
    readonly: bool = False,
    audit: dict[str, Any] | None = None,
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
