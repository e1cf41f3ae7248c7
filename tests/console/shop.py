"""The facts of a small shop, for pages that should have something on them."""

from typing import Any

from tests.console.scripted import AT, ScriptedSource, record, row, upstream

BATCH = "a1b2c3-B4"
# Every page.
PAGES = [
    *("/", "/calls", "/calls/a1b2c3-3", f"/batches/{BATCH}", f"/batches/{BATCH}?view=table"),
    *(
        "/ledger",
        "/ledger/RECORD",
        "/ledger/DONE",
        "/methods",
        "/methods/charge/try",
        "/audit",
        "/settings",
    ),
    *("/upstreams", "/upstreams/github", "/upstreams/calendar"),
]

# Method, when its work begins, the ms of its key check and of its run, and what it refers to.
ENTRIES: list[tuple[str, float, float, float, list[int]]] = [
    ("customer", 0.3, 0.1, 6.2, []),
    ("stock", 0.4, 0.1, 4.1, []),
    ("price", 5.6, 0.1, 1.3, [1]),
    ("price", 0.7, 0.1, 3.0, []),
    ("discount", 7.6, 0.1, 3.9, [0, 2]),
    ("reserve", 5.5, 1.2, 6.9, [1]),
    ("charge", 14.2, 1.6, 19.5, [4, 5]),
    ("charge", 1.0, 1.4, 0.0, []),
    ("notify", 1.2, 0.1, 2.2, []),
    ("invoice", 35.8, 0.9, 8.4, [6]),
    ("label", 14.0, 0.2, 9.0, [5]),
    ("ship", 45.5, 1.1, 11.0, [9, 10]),
]
CRITICAL = {1, 5, 6, 9, 11}


def phases(begin: float, check: float, run: float) -> list[dict[str, Any]]:
    return [
        {"name": "waited", "start_ms": 0.0, "ms": begin},
        {"name": "claimed", "start_ms": begin, "ms": check},
        {"name": "ran", "start_ms": begin + check, "ms": run},
        {"name": "encoded", "start_ms": begin + check + run, "ms": 0.6},
    ]


def batch() -> dict[str, Any]:
    """Return a batch of twelve: one replayed, one failed, one notification, with references."""
    entries = []
    for position, (method, begin, check, run, refs) in enumerate(ENTRIES):
        is_command = method in ("reserve", "charge", "invoice", "ship")
        facts: dict[str, Any] = {
            "method": method,
            "kind": "command" if is_command else "query",
            "ms": begin + check + run + 0.6,
            "batch": BATCH,
            "position": position,
            "size": len(ENTRIES),
            "key": f"order-7-{method}" if is_command else None,
            "caller": "ada",
        }
        if position == 7:
            facts |= {"replayed": True, "ran": "no"}
        if position == 8:
            facts |= {"rpc_id": None}
        if position == 10:
            facts |= {"outcome": "error", "code": 503}
        entries.append(
            {
                "position": position,
                "row": row(40 + position, **facts),
                "phases": phases(begin, check, run),
                "refs": refs,
                "critical": position in CRITICAL,
            }
        )
    return {
        "id": BATCH,
        "at": AT,
        "size": len(ENTRIES),
        "bytes": 2_310,
        "caller": "ada",
        "ms": 58.4,
        "concurrency": 5,
        "whole": True,
        "missing": 0,
        "entries": entries,
    }


def rows() -> list[dict[str, Any]]:
    """Return calls of many kinds, those of the batch among them."""
    made = []
    for number in range(1, 40):
        facts: dict[str, Any] = {"ms": 0.8 + number % 7 * 1.7, "bytes": 180 + number * 7}
        if number % 3 == 0:
            facts |= {
                "method": "charge",
                "kind": "command",
                "key": f"order-{number}",
                "caller": "ada",
                "ms": 31.0 + number,
            }
        if number % 9 == 0:
            facts |= {"replayed": True, "ran": "no", "attempt": 2, "ms": 1.1}
        if number % 10 == 0:
            facts |= {"outcome": "error", "code": 402}
        if number % 4 == 0:
            facts |= {
                "method": "tools/call:refund",
                "tool": "refund",
                "transport": "mcp",
                "revision": "2026-07-28",
                "kind": "command",
                "key": f"auto-{number}",
            }
        made.append(row(number, **facts))
    return made + [each["row"] for each in batch()["entries"]]


def shop() -> ScriptedSource:
    """Return a source with the facts of a shop."""
    source = ScriptedSource()
    source.rows = rows()
    source.batches[BATCH] = batch()
    for key, state in [("order-7", "unknown"), ("order-8", "unknown"), ("order-9", "done")]:
        made = record(key, state)
        source.records[made["id"]] = made
    source.bodies["a1b2c3-3"] = {
        "params": '{"order": "7", "cents": 1.10}',
        "result": '"done"',
        "cut": False,
    }
    source.originals["a1b2c3-47"] = "a1b2c3-46"
    source.lines["a1b2c3-3"] = [
        {"at": AT + 3, "level": "INFO", "logger": "shop", "text": "order 7: 110 cents"},
        {"at": AT + 3.02, "level": "WARNING", "logger": "shop.bank", "text": "slow: 29 ms"},
    ]
    source.trail = [
        {
            "number": number,
            "time": AT + number,
            "caller": "ada",
            "method": "charge",
            "key": f"order-{number}",
            "outcome": "ok",
            "code": None,
            "replayed": number % 5 == 0,
            "duration_ms": 31.5,
            "hash": f"{number:064x}",
        }
        for number in range(1, 13)
    ]
    return source


def servers() -> dict[str, dict[str, Any]]:
    """Return the servers behind a gateway: three of them, one is down."""
    reason = "node cannot be started: it ended 5 times within a minute, with exit code 1"
    down: dict[str, Any] = {
        "up": False,
        "breaker": "open",
        "breaker_left_s": 7.4,
        "reason": reason,
        "pids": [],
        "age_s": None,
        "revisions": [],
        "client_revisions": [],
        "sessions": 0,
        "starts": 5,
        "in_flight": 0,
        "calls": 0,
        "errors": 0,
        "stderr": ["Error: connect ECONNREFUSED 127.0.0.1:5432", "    at TCPConnectWrap"],
        "tools": [],
    }
    web: dict[str, Any] = {"transport": "http", "pids": [], "age_s": None, "starts": 0}
    return {
        "github": upstream("github"),
        "calendar": upstream("calendar", **down),
        "search": upstream("search", **web, stderr=[], revisions=["2026-07-28"]),
    }


def address(source: ScriptedSource, page: str) -> str:
    """Return the address of a page. For those of a gateway, the source becomes one."""
    source.servers = servers() if page.startswith("/upstreams") else {}
    done = next(id for id, each in source.records.items() if each["state"] == "done")
    return page.replace("RECORD", first_record(source)).replace("DONE", done)


def first_record(source: ScriptedSource) -> str:
    return next(iter(source.records))
