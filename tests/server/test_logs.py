"""One structured record per call, and no work at all when the log is off (P8)."""

import json
import logging
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.calls import batch, call, make_app
from tests.server.logs import HOSTILE, Collector, hostile, served
from wirecall import App, Context, jsonrpc
from wirecall.logs import JsonFormatter


async def test_log_has_one_record_per_call(log: Collector) -> None:
    app = served()
    await app.handle(call("q", id=7))
    await app.handle(
        batch(
            call("refuse", id="r"),
            call("q", id=1),
            b"{}",
            call("nobody", id=2),
            call("c", key="k", id=3),
        )
    )
    await app.handle(call("c", key="k", id=4))
    found = sorted(
        log.facts("method", "correlation_id", "kind", "position", "outcome", "code"), key=str
    )
    unreadable = found.pop(0)
    assert unreadable == ("(invalid)", unreadable[1], None, 2, "error", -32600)
    assert found == [
        ("c", 3, "command", 4, "ok", None),
        ("c", 4, "command", None, "replayed", None),
        ("nobody", 2, None, 3, "error", -32601),
        ("q", 1, "query", 1, "ok", None),
        ("q", 7, "query", None, "ok", None),
        ("refuse", "r", "query", 0, "error", 4020),
    ]
    assert all(
        record.levelno == logging.INFO and record.__dict__["duration_ms"] >= 0
        for record in log.records
    )


def test_notification_gets_a_correlation_id_for_logs_only(log: Collector) -> None:
    """P8."""
    app = make_app()
    seen: list[Any] = []

    @app.query(notification_allowed=True)
    def note(ctx: Context) -> None:
        seen.append(ctx.correlation_id)
        raise ValueError

    assert app.handle_sync(jsonrpc.make_notification("note")) is None
    assert app.handle_sync(jsonrpc.make_notification("note")) is None
    assert [facts[0] for facts in log.facts("correlation_id")] == [
        seen[0],
        seen[0],
        seen[1],
        seen[1],
    ]
    assert seen[0] != seen[1]


def test_crash_is_logged_with_its_correlation_id_and_an_unsendable_result_is_a_failure(
    log: Collector,
) -> None:
    app = served()
    app.query(name="nan")(lambda: float("nan"))
    app.handle_sync(call("crash", id="x"))
    app.handle_sync(call("nan", id="y"))
    errors = [record for record in log.records if record.levelno == logging.ERROR]
    assert [getattr(record, "correlation_id", None) for record in errors] == ["x", "y"]
    assert errors[0].exc_info is not None
    outcomes = [
        (getattr(r, "correlation_id", 0), getattr(r, "outcome", 0))
        for r in log.records
        if r.levelno == logging.INFO
    ]
    assert outcomes == [("x", "error"), ("y", "error")]


async def test_command_is_named_as_in_the_ledger(log: Collector) -> None:
    """P8: a JSON-RPC id is unique only within one client, so it does not find a record."""
    app = served()
    app.command(name="odd")(lambda: object())
    app.command(name="broken")(lambda: 1 / 0)
    await app.handle(call("c", key="k", id=1), caller="ada")
    await app.handle(call("odd", key="o", id=1), caller="ada")
    await app.handle(call("broken", key="b", id=1), caller="ada")
    await app.handle(call("q", id=1))
    assert log.facts("method", "caller", "idempotency_key") == [
        ("c", "ada", "k"),
        ("odd", "ada", "o"),
        ("odd", "ada", "o"),
        ("broken", "ada", "b"),
        ("broken", "ada", "b"),
        ("q", None, None),
    ]
    assert log.records[1].getMessage() == "odd failed, caller ada, key o"
    assert log.records[3].getMessage() == "broken failed, correlation_id 1, caller ada, key b"


def test_log_that_is_off_builds_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call pays nothing for a log that is off."""
    app = served()
    app.handle_sync(call("q"))
    logger = logging.getLogger("wirecall")
    assert not logger.isEnabledFor(logging.INFO)
    monkeypatch.setattr(logger, "makeRecord", lambda *_: pytest.fail("a record was made"))
    monkeypatch.setattr(
        "wirecall.server.dispatch.Context", lambda *_: pytest.fail("a context was made")
    )
    app.handle_sync(call("q"))
    app.handle_sync(batch(call("q"), call("q")))


def test_library_does_not_write_to_stderr_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    served().handle_sync(call("q"))
    assert capfd.readouterr() == ("", "")


def test_json_formatter_writes_one_object_per_record(log: Collector) -> None:
    app = served()
    app.handle_sync(call("q", id=7))
    app.handle_sync(call("crash", id="x\ny"))
    lines = [JsonFormatter().format(record) for record in log.records]
    assert all("\n" not in line for line in lines)
    first, failed, last = (json.loads(line) for line in lines)
    assert first["correlation_id"] == 7
    assert first["method"] == "q"
    assert first["kind"] == "query"
    assert first["outcome"] == "ok"
    assert first["level"] == "INFO"
    assert first["logger"] == "wirecall"
    assert "position" not in first
    assert "ValueError: secret" in failed["exception"]
    assert last["code"] == -32603


# --- what callers choose forges nothing -----------------------------------------------------------

SHOWN = (
    r"a\u000d\u000a2026-11-16 INFO b \u001b[31m \u009b31m \u202e \u2066 \u2028 \u200b"
    r" \u0000 \u007f \udb40\udc01 z"
)


@pytest.mark.parametrize("kind", ["method", "id", "caller", "exception"])
async def test_text_from_a_caller_is_escaped_for_every_formatter(log: Collector, kind: str) -> None:
    app, message, caller = hostile(kind)
    await app.handle(message, caller=caller)
    formats = (
        logging.Formatter(),
        logging.Formatter(
            "%(message)s %(method)s %(correlation_id)s %(caller)s %(idempotency_key)s"
        ),
        JsonFormatter(),
    )
    printed = [each.format(record) for record in log.records for each in formats]
    lines = [line for text in printed for line in text.split("\n")]
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("2026") for line in lines)
    shown = SHOWN.replace("\\", "\\\\")
    if kind == "exception":
        assert any("2026-11-16 INFO b \\u001b" in line for line in lines)
    else:
        assert any(SHOWN in line for line in lines)
        assert any(shown in line and json.loads(line) for line in lines if line.startswith("{"))


async def test_key_of_a_record_is_escaped_too(log: Collector) -> None:
    """Keys are checked before a call runs; the log of a refused one still has the caller's string."""
    from wirecall.logs import called, failed

    called(
        method=HOSTILE, outcome="error", duration_ms=1.0, idempotency_key=HOSTILE, caller=HOSTILE
    )
    failed(HOSTILE, HOSTILE, ValueError("x"), caller=HOSTILE, key=HOSTILE)
    assert log.facts("method", "idempotency_key", "caller") == [(SHOWN, SHOWN, SHOWN)] * 2
    assert [record.getMessage().count(SHOWN) for record in log.records] == [1, 4]


@pytest.mark.parametrize("how", ["default", "text", "json"])
def test_stderr_has_no_forged_line(how: str) -> None:
    """With Python's default logging, and with `wirecall serve --log`."""
    script = f"""
from tests.server.logs import hostile
from wirecall.cli.serve import log_calls
import sys
log_calls("off" if {how!r} == "default" else {how!r})
for kind in ("method", "id", "exception"):
    app, message, caller = hostile(kind)
    app.handle_sync(message)
    print("the end of", kind, file=sys.stderr)
"""
    path = Path(__file__).parents[2]
    printed = subprocess.run(
        [sys.executable, "-c", script], cwd=path, capture_output=True, check=True
    ).stderr.decode()
    lines = printed.removesuffix("\n").split("\n")
    assert all(line.isprintable() and not line.startswith("2026") for line in lines)
    ends = [lines.index(f"the end of {kind}") for kind in ("method", "id", "exception")]
    assert how == "default" or all(end - begin > 1 for begin, end in pairwise([-1, *ends]))


# --- messages of handlers -------------------------------------------------------------------------

LEVELS = {
    "debug": "DEBUG",
    "info": "INFO",
    "notice": "INFO",
    "warning": "WARNING",
    "error": "ERROR",
    "critical": "CRITICAL",
    "alert": "CRITICAL",
    "emergency": "CRITICAL",
}


def talking() -> App:
    app = make_app()

    @app.query
    async def talk(ctx: Context, level: Any) -> None:
        await ctx.log(level, {"said": level}, logger="shop" if level == "error" else None)

    return app


async def test_message_of_a_handler_is_logged_where_there_is_no_client(log: Collector) -> None:
    logging.getLogger("wirecall").setLevel(logging.DEBUG)
    app = talking()
    for level in LEVELS:
        await app.handle(call("talk", {"level": level}, id=7), caller="ann")
    records = [record for record in log.records if "said" in record.getMessage()]
    assert [record.levelname for record in records] == list(LEVELS.values())
    assert records[0].getMessage() == "talk: {'said': 'debug'}"
    assert records[4].getMessage() == "talk, shop: {'said': 'error'}"
    assert log.facts("correlation_id", "method", "caller")[0] == (7, "talk", "ann")


async def test_message_below_the_level_of_the_log_is_not_made(log: Collector) -> None:
    logging.getLogger("wirecall").setLevel(logging.WARNING)
    await talking().handle(call("talk", {"level": "notice"}))
    assert log.records == []


async def test_message_that_forges_a_line_is_escaped(log: Collector) -> None:
    app = make_app()

    @app.query
    async def talk(ctx: Context) -> None:
        await ctx.log("error", "one\nERROR two")

    await app.handle(call("talk"))
    assert log.records[0].getMessage() == "talk: one\\u000aERROR two"


async def test_error_of_several_lines_is_one_line_without_escapes(
    log: Collector, tmp_path: Path
) -> None:
    (tmp_path / "ledger.db").write_text("not a database" * 10)
    app = App("x", ledger=f"sqlite:{tmp_path}/ledger.db")
    app.command(name="put")(lambda: 1)
    await app.handle(call("put", key="k"))
    await app.aclose()
    messages = [
        record.getMessage() for record in log.records if "unavailable" in record.getMessage()
    ]
    assert messages[0].endswith(
        "ledger.db is not an SQLite file: file is not a database; fix: name another file"
    )


async def test_unknown_level_is_a_mistake_everywhere() -> None:
    answer = await talking().handle(call("talk", {"level": "loud"}))
    assert b"-32603" in (answer or b"")
