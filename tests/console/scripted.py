"""A source of the console with facts that a test chooses: rows, batches, records, faults."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

from wirecall.console.filter import read_filter
from wirecall.console.source import FeedEvent, NotFound, Refusal
from wirecall.console.typed import message_of

AT = 1_790_000_000.0
ANSWER = {"text": '{"paid":5}', "kind": "result", "bytes": 10, "digest": "0088cb05" * 8}
WORKER = "a1b2c3"

FIRST_CALL = "wirecall call http://127.0.0.1:9000 stock"

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "order": {"type": "string", "description": "The number of the order"},
        "cents": {"type": "integer", "examples": [1200]},
        "currency": {"enum": ["EUR", "CHF"], "default": "EUR"},
        "express": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "lines": {"type": "array", "items": {"type": "string"}},
        "odd": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    },
    "required": ["order", "cents"],
}


def row(number: int, **facts: Any) -> dict[str, Any]:
    """Return the row of one call."""
    return {
        "id": f"{WORKER}-{number}",
        "n": number,
        "worker": WORKER,
        "gone": False,
        "at": AT + number / 10,
        "ms": 1.5,
        "method": "price",
        "tool": None,
        "kind": "query",
        "transport": "rpc",
        "caller": "",
        "outcome": "ok",
        "code": None,
        "ran": "yes",
        "replayed": False,
        "recognised": False,
        "attempt": 1,
        "key": None,
        "rpc_id": str(number),
        "batch": None,
        "position": None,
        "size": None,
        "bytes": 311,
        "revision": None,
        "call_id": f"call-{number}",
        "trace_id": None,
        **facts,
    }


def record_id(caller: str, method: str, key: str) -> str:
    text = json.dumps([caller, method, key], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def record(key: str, state: str = "unknown", **facts: Any) -> dict[str, Any]:
    """Return a record of `charge`."""
    paths = {"unknown": ["absent", "running", "unknown"], "done": ["absent", "running", "done"]}
    return {
        "id": record_id("ada", "charge", key),
        "caller": "ada",
        "method": "charge",
        "key": key,
        "state": state,
        "attempts": 2,
        "committed": True,
        "started_at": AT,
        "completed_at": None,
        "lease_left_s": 0.0,
        "delivery": None,
        "resolved_by": None,
        "digest": None,
        "fence": 4,
        "fingerprint": "5e" * 16,
        "path": paths.get(state, ["absent", state]),
        "now": state,
        "can_resolve": state == "unknown",
        "why_not": None if state == "unknown" else "The outcome is known.",
        "params": '{"order": "7", "cents": 12345678901234567890}',
        "answer": None if state != "done" else ANSWER,
        "after": {
            "happened": "Retries get the result that you give.",
            "not_happened": "The next call with this key runs.",
            "leave": "Retries get error 409, and nothing runs.",
        },
        "audit": [],
        "calls": [],
        "task": None,
        "returns": {"type": "string"},
        **facts,
    }


def upstream(name: str, **facts: Any) -> dict[str, Any]:
    """Return a server behind a gateway."""
    return {
        "name": name,
        "up": True,
        "since": "2026-09-21T14:00:00Z",
        "label": f"{name}.3f9a0c",
        "transport": "stdio",
        "revisions": ["2025-11-25"],
        "client_revisions": ["2025-11-25", "2026-07-28"],
        "sessions": 1,
        "pids": [4711],
        "age_s": 3725.0,
        "starts": 1,
        "in_flight": 2,
        "limit": 32,
        "queued": 0,
        "breaker": "closed",
        "breaker_left_s": 0.0,
        "reason": None,
        "stderr": [f"{name}: listening on stdio", f"{name}: 3 tools"],
        "calls": 812,
        "errors": 9,
        "total_ms": 9744.0,
        "p50_ms": 12.0,
        "p95_ms": 60.0,
        "tools": [
            {
                "name": "search",
                "kind": "query",
                "recorded": False,
                "annotations": {"readOnlyHint": True, "openWorldHint": True},
            },
            {
                "name": "delete_repository",
                "kind": "command",
                "recorded": True,
                "annotations": {"readOnlyHint": False, "destructiveHint": True},
            },
        ],
        **facts,
    }


class ScriptedSource:
    """Facts in memory. `push` sends rows to every open feed."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.batches: dict[str, Any] = {}
        self.records: dict[str, dict[str, Any]] = {}
        self.bodies: dict[str, Any] = {}
        self.originals: dict[str, str] = {}
        self.lines: dict[str, list[dict[str, Any]]] = {}
        # The servers behind it, by name; with some it is a gateway.
        self.servers: dict[str, dict[str, Any]] = {}
        self.actions: list[tuple[str, str, str, str]] = []
        self.attempts: list[dict[str, Any]] = []
        self.trail: list[dict[str, Any]] = []
        self.epoch = "e1"
        # Set when a feed is open.
        self.watched = asyncio.Event()
        self._watchers: set[asyncio.Queue[list[dict[str, Any]]]] = set()

    # --- for tests --------------------------------------------------------------------------------

    def push(self, *rows: dict[str, Any]) -> None:
        self.rows.extend(rows)
        for watcher in self._watchers:
            watcher.put_nowait(list(rows))

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    # --- the interface ----------------------------------------------------------------------------

    async def now(self) -> Any:
        unknown = [each for each in self.records.values() if each["state"] == "unknown"]
        person = []
        if unknown:
            person.append(
                {
                    "kind": "unknown",
                    "count": len(unknown),
                    "oldest_at": AT,
                    "open": "/ledger?state=unknown",
                }
            )
        return {
            "at": AT + 700,
            "since": AT - 3600,
            "workers": [
                {"worker": WORKER, "pid": 71, "gone": False, "in_flight": 2, "queued": 0},
                {"worker": "d4e5f6", "pid": 72, "gone": False, "in_flight": 1, "queued": 0},
            ],
            "tiles": {"calls_per_s": 42.5, "errors_per_s": 0.3, "p95_ms": 8.2, "saved": 31},
            "sparks": {
                "step_s": 15,
                "calls": [30 + 12 * (index % 7) - index % 3 for index in range(60)],
                "errors": [int(index % 17 == 0) for index in range(60)],
                "p95_ms": [6 + (index * 7 % 5) for index in range(60)],
                "saved": [index % 4 for index in range(60)],
            },
            "person": person,
            "methods": [
                {
                    "method": name,
                    "calls": calls,
                    "errors": errors,
                    "total_ms": total,
                    "p50_ms": total / calls * 0.8,
                    "p95_ms": total / calls * 2.1,
                }
                for name, calls, errors, total in [
                    ("charge", 812, 9, 33_240.0),
                    ("tools/call:refund", 61, 2, 8_800.0),
                    ("price", 9_204, 0, 5_120.0),
                    ("stock", 3_001, 0, 1_310.0),
                ]
            ][: 4 if self.rows else 0],
            "errors": [
                {
                    "method": "charge",
                    "code": 402,
                    "count": 9,
                    "last_at": AT + 640,
                    "call": f"{WORKER}-3",
                }
            ][: len(self.rows)],
            "ledger": {"running": 1, "waiting": 0, "done": 10, "unknown": len(unknown)},
            "ledger_error": None,
            "first_call": FIRST_CALL,
            "totals": {
                "calls": len(self.rows),
                "errors": 0,
                "replays": 0,
                "undelivered": 0,
                "lost_rows": 0,
            },
        }

    async def calls(self, filter: str = "", *, limit: int = 200, before: Any = None) -> Any:
        wanted = read_filter(filter)
        fits = [each for each in self.rows if wanted.fits(each, AT + 1000)]
        return {
            "rows": fits[::-1][:limit],
            "more": None,
            "hidden": len(self.rows) - len(fits),
            "total": len(self.rows),
            "lost": 0,
            "filter": filter,
            "first_call": FIRST_CALL,
        }

    async def call(self, id: str) -> Any:
        found = next((each for each in self.rows if each["id"] == id), None)
        if found is None:
            raise NotFound(f"call {id}", "The ring keeps the newest calls.")
        return {
            "row": found,
            "phases": [
                {"name": "waited", "start_ms": 0.0, "ms": 0.2},
                {"name": "claimed", "start_ms": 0.2, "ms": 0.3},
                {"name": "ran", "start_ms": 0.5, "ms": 0.8},
                {"name": "encoded", "start_ms": 1.3, "ms": 0.2},
            ],
            "body": self.bodies.get(id),
            "capture": "bodies",
            "record": None,
            "batch": found["batch"],
            "original": self.originals.get(id),
            "replays": [later for later, first in self.originals.items() if first == id],
            "lines": self.lines.get(id, []),
            "can_try": not self.servers,
            "commands": {
                "cli": f"wirecall call http://127.0.0.1:8420/rpc {found['method']} --key {found['key']}",
                "python": "await client.call(...)",
                "curl": "curl http://127.0.0.1:8420/rpc",
                "json": "{}",
            },
        }

    async def batch(self, id: str) -> Any:
        if id not in self.batches:
            raise NotFound(f"batch {id}")
        return self.batches[id]

    async def ledger(self, **asked: Any) -> Any:
        found = list(self.records.values())
        counts: dict[str, int] = {}
        for each in found:
            counts[each["state"]] = counts.get(each["state"], 0) + 1
        if asked.get("state"):
            found = [each for each in found if each["state"] == asked["state"]]
        if asked.get("method"):
            found = [each for each in found if each["method"] == asked["method"]]
        return {"counts": counts, "records": found, "next": None, "state": asked.get("state")}

    async def record(self, id: str) -> Any:
        if id not in self.records:
            raise NotFound("record")
        return self.records[id]

    async def resolve(self, id: str, request: Any, *, actor: str) -> Any:
        found = self.records[id]
        if request["tail"] != found["key"][-6:]:
            raise Refusal(
                400,
                {
                    "error": {
                        "type": "tail",
                        "message": "These are not its last characters.",
                        "hint": "",
                    }
                },
            )
        if (request["fence"], request["state"]) != (found["fence"], found["state"]):
            raise Refusal(
                409,
                {
                    "error": {"type": "changed", "message": "Another person was faster."},
                    "record": found,
                },
            )
        made = record(found["key"], "done", resolved_by=actor, fence=found["fence"] + 1)
        self.records[id] = made
        self.actions.append((actor, f"resolve {request['verdict']}", id, request["reason"]))
        return {"state": "done", "record": made}

    async def methods(self) -> Any:
        methods = [await self.method(name) for name in ("price", "charge", "erase")]
        return {"methods": methods, "discover": FIRST_CALL}

    async def method(self, name: str) -> Any:
        hints: dict[str, Any] = {
            "price": {"readOnlyHint": True, "openWorldHint": False},
            "charge": {"readOnlyHint": False, "destructiveHint": False, "idempotentHint": None},
            "erase": {"readOnlyHint": False, "destructiveHint": True, "openWorldHint": True},
        }
        if name not in hints:
            raise NotFound(f"method {name}")
        is_query = name == "price"
        stated = ["destructiveHint", "idempotentHint", "openWorldHint"]
        return {
            "name": name,
            "rows": [name, f"tools/call:{name}"],
            "kind": "query" if is_query else "command",
            "tool": True,
            "title": None,
            "description": f"What {name} does, in a sentence. <img src=x onerror=alert(1)>",
            "annotations": {**dict.fromkeys(stated), **hints[name]},
            "badges": [] if is_query else ["writes", "keyed 24h"],
            "key": None if is_query else "optional",
            "calls": 812,
            "errors": 9,
            "p50_ms": 12.0,
            "p95_ms": 60.0,
            "params": ORDER,
            "returns": {"type": "string"},
        }

    async def attempt(self, name: str, request: Any, *, actor: str) -> Any:
        is_repeated = any(each["key"] == request["key"] for each in self.attempts)
        self.attempts.append(request)
        return {
            "message": message_of(name, request),
            "answer": '{"jsonrpc":"2.0","result":"done","id":1}',
            "replayed": is_repeated,
            "ms": 3.5,
            "call": None,
        }

    async def audit(self, filter: str = "", *, limit: int = 100, before: Any = None) -> Any:
        lines = [each for each in self.trail if filter in json.dumps(each)]
        return {
            "path": "audit.jsonl" if self.trail else None,
            "lines": lines[::-1][:limit],
            "more": None,
            "verified": None,
        }

    async def verify_audit(self) -> Any:
        return {"ok": True, "lines": len(self.trail), "at": AT, "problems": []}

    async def export_audit(self, filter: str = "") -> AsyncIterator[bytes]:
        if not self.trail:
            raise NotFound("audit trail")
        for line in self.trail:
            text = json.dumps(line)
            if filter in text:
                yield text.encode() + b"\n"

    async def upstreams(self) -> Any:
        return {
            "at": AT,
            "is_gateway": bool(self.servers),
            "upstreams": list(self.servers.values()),
        }

    async def upstream(self, name: str) -> Any:
        if name not in self.servers:
            raise NotFound(f"upstream {name}")
        return self.servers[name]

    async def probe(self, name: str, *, actor: str) -> Any:
        found = await self.upstream(name)
        self.actions.append((actor, "probe", name, "ok"))
        if found["breaker"] == "open":
            return {"ok": False, "error": found["reason"], "ms": 1.5, "upstream": found}
        return {"ok": True, "tools": len(found["tools"]), "ms": 4.5, "upstream": found}

    async def settings(self) -> Any:
        return {
            "name": "shop",
            "version": "1.0",
            "wirecall": "0.1",
            "capture": "bodies",
            "paused": False,
            "readonly": False,
            "values": [
                {"name": "ledger.url", "value": "sqlite:shop.db", "origin": "wirecall.toml"},
                {"name": "auth.secret", "value": "env:SHOP_SECRET", "origin": "wirecall.toml"},
            ],
            "workers": [],
        }

    async def pause(self, paused: bool) -> Any:
        return {"paused": paused}

    async def feed(self, filter: str = "", after: str | None = None) -> AsyncIterator[FeedEvent]:
        wanted = read_filter(filter)
        queue: asyncio.Queue[list[dict[str, Any]]] = asyncio.Queue()
        self._watchers.add(queue)
        self.watched.set()
        try:
            unknown = sum(each["state"] == "unknown" for each in self.records.values())
            yield FeedEvent("numbers", {"is_gateway": bool(self.servers), "unknown": unknown})
            if after is not None:
                epoch, _, number = after.rpartition("-")
                missed = [each for each in self.rows if each["n"] > int(number)]
                lost = 0 if epoch == self.epoch else -1
                yield self._rows(missed if lost == 0 else [], lost)
            while True:
                rows = [each for each in await queue.get() if wanted.fits(each, AT + 1000)]
                for start in range(0, len(rows), 200):
                    yield self._rows(rows[start : start + 200], 0)
        finally:
            self._watchers.discard(queue)

    def _rows(self, rows: list[dict[str, Any]], lost: int) -> FeedEvent:
        last = self.rows[-1]["n"] if self.rows else 0
        data = {"rows": rows, "sampled": 1, "lost": lost}
        return FeedEvent("rows", data, f"{self.epoch}-{last}")

    async def note_action(self, actor: str, action: str, target: str, outcome: str) -> None:
        self.actions.append((actor, action, target, outcome))
