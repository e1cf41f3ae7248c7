"""Every call has a unique name: in the log, in the audit trail, and in the records that its handler
logs.
"""

import asyncio
import gc
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from tests.calls import batch, call, make_app, read
from tests.mcp.asgi import EVERY_WAY, R4, R5, over_http, request, speak
from tests.server.logs import Collector
from tests.transports import ask
from wirecall import App, Context, Limits, jsonrpc
from wirecall.logs import CallIds, JsonFormatter
from wirecall.tracing import Tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def own() -> Iterator[Collector]:
    """The records of a program's own logger, whose handler asks for the ids."""
    collector = Collector()
    logger = logging.getLogger("shop")
    collector.addFilter(CallIds())
    logger.addHandler(collector)
    logger.setLevel(logging.INFO)
    yield collector
    logger.removeHandler(collector)
    logger.setLevel(logging.NOTSET)


def talking(**options: Any) -> App:
    """An app whose handlers log what they do, each in its own way."""
    app = make_app(**options)
    logger = logging.getLogger("shop")
    both_wait = asyncio.Barrier(2)

    @app.query(notification_allowed=True)
    def plain(word: str = "plain") -> None:
        logger.info(word)

    @app.query
    async def wait(word: str) -> None:
        await both_wait.wait()
        logger.info(word)

    @app.command
    async def act() -> None:
        await asyncio.sleep(0)
        logger.info("act")

    @app.command(blocking=True)
    def block() -> None:
        logger.info("block")

    @app.query
    async def thread(ctx: Context) -> str:
        await asyncio.to_thread(logger.info, "thread")
        return ctx.call_id

    @app.query
    def ids(ctx: Context) -> list[Any]:
        return [ctx.correlation_id, ctx.call_id, ctx.trace_id, ctx.request_id, ctx.traceparent]

    @app.query(notification_allowed=True)
    def crash() -> None:
        raise ValueError("secret")

    return app


# --- the log and the audit trail ------------------------------------------------------------------


async def test_call_id_differs_where_the_ids_of_two_clients_are_equal(log: Collector) -> None:
    app = talking()
    for _ in range(100):
        await app.handle(call("plain", id=1))
    facts = log.facts("correlation_id", "call_id", "host", "pid")
    assert {fact[0] for fact in facts} == {1}
    assert len({fact[1] for fact in facts}) == 100
    assert all(len(fact[1]) == 16 and fact[1].isascii() for fact in facts)
    assert {fact[2:] for fact in facts} == {(socket.gethostname(), os.getpid())}


@pytest.mark.parametrize(
    "message",
    [
        call("plain", id=None).replace(b'"params":null,', b""),
        jsonrpc.make_notification("plain"),
        batch(*[call("plain")] * 3),  # beyond the limit
        b"[]",
        b"{",
        b"{}",
        call("nobody", id=None),
        call("act", id=None),
    ],
)
async def test_log_record_has_both_ids_for_a_message_without_an_id(
    message: bytes,
    log: Collector,
) -> None:
    await talking(limits=Limits(batch=2)).handle(message)
    (record,) = log.records
    fact = json.loads(JsonFormatter().format(record))
    assert fact["call_id"]
    assert fact["correlation_id"] == f"n-{fact['call_id']}"
    assert fact["method"]
    assert (fact["host"], fact["pid"]) == (socket.gethostname(), os.getpid())


@pytest.mark.parametrize(
    ("message", "method", "reason"),
    [
        (batch(*[call("plain")] * 3), "(batch)", "3 entries, 2 are allowed"),
        (b" [ ]", "(batch)", "an empty array"),
        (b'["', "(batch)", "truncated"),
        (b"{}", "(invalid)", '"jsonrpc" must be'),
        (call("nobody"), "nobody", "there is no method 'nobody'"),
        (call("act", id=None), "act", "act is a command"),
    ],
)
async def test_log_record_of_a_refusal_has_a_method_and_a_reason(
    message: bytes,
    method: str,
    reason: str,
    log: Collector,
) -> None:
    await talking(limits=Limits(batch=2)).handle(message, caller="ada")
    ((found, words, outcome, caller),) = log.facts("method", "reason", "outcome", "caller")
    assert (found, outcome, caller) == (method, "error", "ada")
    assert reason in words


@pytest.mark.parametrize("transport", ["http", "stdio"])
async def test_log_record_of_an_array_that_mcp_refuses_has_a_method_and_a_reason(
    transport: str,
    log: Collector,
) -> None:
    array = [request("tools/list", {}, id=1), request("tools/list", {}, id=2)]
    async with speak(transport, talking(), R4) as client:
        if transport == "http":
            await client.post(array).started()
        else:
            client.write(array)
            await client.line()
    ((method, reason, correlation_id, call_id),) = log.facts(
        "method", "reason", "correlation_id", "call_id"
    )
    assert (method, correlation_id) == ("(batch)", f"n-{call_id}")
    assert "has no arrays" in reason


async def test_failure_of_a_handler_has_the_ids_of_its_call(log: Collector) -> None:
    app = talking()
    await app.handle(call("crash", {"_meta": {"traceparent": PARENT}}, id=7))
    failure, ended = log.facts("correlation_id", "call_id", "trace_id")
    assert failure == ended
    assert failure[::2] == (7, TRACE)


def test_failure_of_a_plain_query_has_ids_although_calls_are_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    talking().handle_sync(call("crash", {"_meta": {"traceparent": PARENT}}, id=7))
    (record,) = caplog.records
    fact = json.loads(JsonFormatter().format(record))
    assert (fact["correlation_id"], fact["trace_id"], len(fact["call_id"])) == (7, TRACE, 16)


async def test_audit_entry_has_the_ids_of_the_log(log: Collector, tmp_path: Path) -> None:
    trail = tmp_path / "audit.jsonl"
    async with talking(audit=f"file:{trail}") as app:
        await app.handle(call("act", {"_meta": {"traceparent": PARENT}}, key="k", id=1))
        await app.handle(call("act", {"_meta": {"traceparent": PARENT}}, key="k", id=1))
    entries = [json.loads(line) for line in trail.read_text().splitlines()]
    assert [(entry["id"], entry["trace_id"], entry["replayed"]) for entry in entries] == [
        (1, TRACE, False),
        (1, TRACE, True),
    ]
    assert [(entry["call_id"],) for entry in entries] == log.facts("call_id")
    assert entries[0]["call_id"] != entries[1]["call_id"]
    assert {(entry["host"], entry["pid"]) for entry in entries} == {
        (socket.gethostname(), os.getpid())
    }


# --- records of handlers --------------------------------------------------------------------------


async def test_own_records_of_every_kind_of_handler_have_the_ids_of_its_call(
    own: Collector,
) -> None:
    app = talking()
    for number, name in enumerate(("plain", "act", "block", "thread")):
        await app.handle(call(name, id=f"id{number}"))
    assert log_words(own) == ["plain", "act", "block", "thread"]
    facts = own.facts("correlation_id", "call_id", "host", "pid")
    assert [fact[0] for fact in facts] == ["id0", "id1", "id2", "id3"]
    assert len({fact[1] for fact in facts}) == 4
    assert {fact[2:] for fact in facts} == {(socket.gethostname(), os.getpid())}


def log_words(collector: Collector) -> list[str]:
    return [record.getMessage() for record in collector.records]


async def test_own_records_of_calls_side_by_side_do_not_mix_their_ids(own: Collector) -> None:
    app = talking()
    await app.handle(
        batch(
            call("wait", ["a"], id="a"), call("plain", ["p"], id="p"), call("wait", ["b"], id="b")
        )
    )
    await asyncio.gather(
        app.handle(call("wait", ["c"], id="c")), app.handle(call("wait", ["d"], id="d"))
    )
    found = own.facts("msg", "correlation_id")
    assert sorted(found) == [(name, name) for name in "abcdp"]


def test_own_records_outside_of_calls_have_no_ids(own: Collector) -> None:
    talking().handle_sync(call("plain"))
    logging.getLogger("shop").info("outside")
    assert own.facts("call_id", "correlation_id", "trace_id", "request_id")[1] == (
        None,
        None,
        None,
        None,
    )
    assert own.records[1].__dict__["pid"] == os.getpid()


@pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)
async def test_own_records_of_a_tool_have_the_ids_of_its_call(
    transport: str, revision: str, own: Collector
) -> None:
    meta = {"traceparent": PARENT}
    async with speak(transport, talking(), revision) as client:
        for name in ("plain", "act", "block"):
            await client.call("tools/call", {"name": name, "arguments": {}}, meta=meta)
    assert log_words(own) == ["plain", "act", "block"]
    facts = own.facts("correlation_id", "call_id", "trace_id")
    assert all(fact[0] is not None for fact in facts)
    assert len({fact[1] for fact in facts}) == 3
    assert {fact[2] for fact in facts} == {TRACE}


def test_json_formatter_writes_the_ids_of_records_of_any_logger(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = logging.StreamHandler(sys.stdout)
    logger = logging.getLogger("shop")
    handler.setFormatter(JsonFormatter())
    handler.addFilter(CallIds())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        talking().handle_sync(call("plain", id=5))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    line = json.loads(capsys.readouterr().out)
    assert (line["logger"], line["message"], line["correlation_id"]) == ("shop", "plain", 5)
    assert line["call_id"]


def test_plain_query_makes_no_ids_unless_something_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without an observer, the short path runs the same lines as before: it does not make ids or
    set the context.
    """
    gc.collect()  # a filter of an earlier test may remain until then
    app = talking()
    app.query(name="one")(lambda: 1)
    app.handle_sync(call("one"))
    monkeypatch.setattr("wirecall.server.dispatch.Ids", lambda *_: pytest.fail("ids were made"))
    monkeypatch.setattr("wirecall.server.call.Ids", lambda *_: pytest.fail("ids were made"))
    app.handle_sync(call("one"))
    app.handle_sync(batch(call("one"), call("one")))
    asked = CallIds()
    with pytest.raises(pytest.fail.Exception):
        app.handle_sync(call("one"))
    del asked
    app.handle_sync(call("one"))


# --- what comes from the caller -------------------------------------------------------------------


async def test_context_shows_the_ids_of_the_http_request() -> None:
    reply = await ask(
        talking().asgi(),
        body=call("ids", id=3),
        headers=[("X-Request-Id", "r-17"), ("traceparent", PARENT)],
    )
    correlation, call_id, trace_id, request_id, traceparent = reply.json["result"]
    assert (correlation, trace_id, request_id, traceparent) == (3, TRACE, "r-17", PARENT)
    assert len(call_id) == 16
    assert reply.headers["x-request-id"] == "r-17"


@pytest.mark.parametrize("value", ["", "x" * 129, "a\tb", "caf\xe9", "a\x01b"])
async def test_request_id_that_is_not_printable_ascii_is_ignored(value: str) -> None:
    reply = await ask(talking().asgi(), body=call("ids"), headers=[("X-Request-Id", value)])
    assert reply.json["result"][3] is None
    assert "x-request-id" not in reply.headers


@pytest.mark.parametrize(
    "value",
    [
        "junk",
        f"ff-{TRACE}-b7ad6b7169203331-01",
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"{PARENT}-more",
        PARENT.upper(),
    ],
)
async def test_traceparent_that_is_not_valid_has_no_trace_id(value: str) -> None:
    reply = await ask(talking().asgi(), body=call("ids"), headers=[("traceparent", value)])
    assert reply.json["result"][2] is None


async def test_traceparent_of_the_call_outranks_that_of_its_request() -> None:
    body = call("ids", {"_meta": {"traceparent": PARENT.replace("0af7", "0bf7")}})
    reply = await ask(talking().asgi(), body=body, headers=[("traceparent", PARENT)])
    assert reply.json["result"][2] == TRACE.replace("0af7", "0bf7")


@pytest.mark.parametrize("revision", [R4, R5])
async def test_ids_of_the_http_request_hold_on_mcp(revision: str, log: Collector) -> None:
    app = talking()
    async with over_http(app, revision) as client:
        fields = {"x-request-id": "r-18", "traceparent": PARENT}
        await client.call("tools/call", {"name": "plain", "arguments": {}}, headers=fields)
        assert client.last is not None
        assert client.last.header("x-request-id") == "r-18"
    assert log.facts("request_id", "trace_id")[-1] == ("r-18", TRACE)


async def test_failure_of_a_plain_query_over_http_has_the_ids_of_its_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    headers = [("X-Request-Id", "r-19"), ("traceparent", PARENT)]
    await ask(talking().asgi(), body=call("crash", id=1), headers=headers)
    (record,) = caplog.records
    assert (record.__dict__["request_id"], record.__dict__["trace_id"]) == ("r-19", TRACE)


async def test_trace_id_of_the_log_is_that_of_the_span(log: Collector) -> None:
    app = talking(middleware=[Tracing(TracerProvider(shutdown_on_exit=False))])
    trace_id = read(await app.handle(call("ids")))["result"][2]
    assert len(trace_id) == 32
    assert log.facts("trace_id") == [(trace_id,)]


async def test_trace_id_without_a_traceparent_is_that_of_the_current_span() -> None:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("around"):
        current = trace.get_current_span().get_span_context().trace_id
        assert read(await talking().handle(call("ids")))["result"][2] == f"{current:032x}"


async def test_lifespan_that_a_call_enters_does_not_inherit_its_ids(own: Collector) -> None:
    """The resources of an app outlive the call that opens them."""

    @asynccontextmanager
    async def lifespan(_: App) -> AsyncIterator[None]:
        logging.getLogger("shop").info("opened")
        yield

    app = talking(lifespan=lifespan)
    await ask(app.asgi(), body=call("plain"), headers=[("X-Request-Id", "r-20")])
    await app.aclose()
    assert own.facts("msg", "request_id") == [("opened", None), ("plain", "r-20")]


async def test_ids_of_a_call_are_not_part_of_a_cycle() -> None:
    app = talking()
    await app.handle(call("act"))
    gc.collect()
    gc.disable()
    try:
        # So many that what earlier tests have left for the collector does not count.
        for number in range(1000):
            await app.handle(call("act", key=f"k{number}"))
        found = gc.collect()
    finally:
        gc.enable()
    assert found < 1000
