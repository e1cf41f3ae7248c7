"""OpenTelemetry spans per call and per batch entry, and W3C trace context in and out (P11)."""

import asyncio
from hashlib import sha256
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.calls import batch, call, make_app, read, result
from tests.mcp.asgi import over_http
from tests.transports import ask
from wirecall import App, Context, DomainError, RpcError, jsonrpc
from wirecall.tracing import Tracing, trace_meta

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def traced() -> tuple[App, InMemorySpanExporter]:
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = make_app(middleware=[Tracing(provider)])
    app.query(name="q", notification_allowed=True)(lambda: 1)
    app.command(name="c")(lambda: 2)

    @app.query
    async def onward() -> Any:
        await asyncio.sleep(0)
        return trace_meta()

    @app.query
    def refuse() -> None:
        raise DomainError(7, "no")

    @app.query
    def crash() -> None:
        raise ValueError("secret")

    return app, exporter


async def test_span_per_call_and_per_entry(traced: tuple[App, InMemorySpanExporter]) -> None:
    app, exporter = traced
    await app.handle(call("q", id=7))
    await app.handle(
        batch(call("q", id="a"), jsonrpc.make_notification("q"), call("c", key="k", id=3))
    )
    await app.handle(call("c", key="k", id=4))
    spans = exporter.get_finished_spans()
    facts = [dict(span.attributes or {}) for span in spans]
    assert [span.name for span in spans] == ["q", "q", "q", "c", "c"]
    assert [fact.get("wirecall.batch.position") for fact in facts] == [None, 0, 1, 2, None]
    assert [fact.get("rpc.jsonrpc.request_id") for fact in facts] == ["7", "a", None, "3", "4"]
    assert all(fact["wirecall.correlation_id"] for fact in facts)
    assert [fact["wirecall.replayed"] for fact in facts] == [False, False, False, False, True]
    assert facts[3]["wirecall.kind"] == "command"


async def test_trace_of_the_caller_continues_in_the_handler(
    traced: tuple[App, InMemorySpanExporter],
) -> None:
    app, exporter = traced
    handed_on = result(
        await app.handle(
            call("onward", {"_meta": {"traceparent": PARENT, "tracestate": "a=b", "x": 1}})
        )
    )
    (span,) = exporter.get_finished_spans()
    assert span.context is not None
    assert format(span.context.trace_id, "032x") == TRACE
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    assert handed_on == {
        "traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01",
        "tracestate": "a=b",
    }


@pytest.mark.parametrize(
    "meta", [{"traceparent": "junk"}, {"traceparent": 5}, {}, {"traceparent": ["x"]}]
)
async def test_invalid_traceparent_starts_a_new_trace(
    traced: tuple[App, InMemorySpanExporter], meta: Any
) -> None:
    app, exporter = traced
    await app.handle(call("q", {"_meta": meta}))
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


async def test_failures_are_marked_without_their_message(
    traced: tuple[App, InMemorySpanExporter],
) -> None:
    app, exporter = traced
    await app.handle(batch(call("refuse", id=1), call("crash", id=2)))
    refused, crashed = exporter.get_finished_spans()
    assert refused.status.status_code is crashed.status.status_code is StatusCode.ERROR
    assert (refused.attributes or {})["rpc.jsonrpc.error_code"] == 7
    assert (crashed.attributes or {})["rpc.jsonrpc.error_code"] == -32603
    assert "secret" not in crashed.to_json()


def facts_of(exporter: InMemorySpanExporter) -> list[dict[str, Any]]:
    return [dict(span.attributes or {}) for span in exporter.get_finished_spans()]


async def test_span_has_the_digest_of_the_key_and_not_the_key(
    traced: tuple[App, InMemorySpanExporter],
) -> None:
    app, exporter = traced
    await app.handle(call("c", key="order-7"))
    await app.handle(call("c", key="order-7"))
    await app.handle(call("c"))
    await app.handle(call("q"))
    name = "wirecall.idempotency_key.sha256"
    first, replay, generated, query = facts_of(exporter)
    assert first[name] == replay[name] == sha256(b"order-7").hexdigest()
    assert len(generated[name]) == 64
    assert name not in query
    assert [fact["wirecall.replayed"] for fact in (first, replay, generated, query)] == [
        False,
        True,
        False,
        False,
    ]
    assert not any("order-7" in span.to_json() for span in exporter.get_finished_spans())


async def test_span_has_ran_as_the_caller_gets_it(traced: tuple[App, InMemorySpanExporter]) -> None:
    app, exporter = traced

    @app.middleware
    async def guard(ctx: Context, call_next: Any) -> Any:
        if ctx.caller == "bob":
            raise RpcError(40300, "members only")
        return await call_next(ctx)

    @app.command
    async def half(ctx: Context) -> None:
        await ctx.commit_point()
        raise ValueError

    replies = [
        await app.handle(call("c", key="k")),
        await app.handle(call("c", key="k"), caller="bob"),
        await app.handle(call("half", key="h")),
        await app.handle(call("refuse")),
        await app.handle(call("c", {"unknown": 1}, key="u")),
    ]
    assert [fact["wirecall.ran"] for fact in facts_of(exporter)] == [
        "yes",
        "no",
        "unknown",
        "yes",
        "no",
    ]
    errors = [RpcError(**{"data": None, **read(reply)["error"]}) for reply in replies[1:]]
    assert [error.ran for error in errors] == ["no", "unknown", "yes", "no"]


async def test_replay_of_an_error_is_marked_on_its_span(
    traced: tuple[App, InMemorySpanExporter],
) -> None:
    app, exporter = traced

    @app.command
    def fail() -> None:
        raise DomainError(7, "no")

    await app.handle(call("fail", key="k"))
    await app.handle(call("fail", key="k"))
    found = [(fact["wirecall.replayed"], fact["wirecall.ran"]) for fact in facts_of(exporter)]
    assert found == [(False, "yes"), (True, "yes")]


async def test_span_names_its_call_as_the_log_does(
    traced: tuple[App, InMemorySpanExporter], caplog: pytest.LogCaptureFixture
) -> None:
    app, exporter = traced
    caplog.set_level("INFO", "wirecall")
    await app.handle(call("q", id=1))
    await app.handle(call("q", id=1))
    names = ("call_id", "host", "pid")
    logged = [tuple(record.__dict__[name] for name in names) for record in caplog.records]
    assert [
        tuple(fact[f"wirecall.{name}"] for name in names) for fact in facts_of(exporter)
    ] == logged
    assert logged[0] != logged[1]
    traces = [
        span.context.trace_id for span in exporter.get_finished_spans() if span.context is not None
    ]
    assert [record.__dict__["trace_id"] for record in caplog.records] == [
        f"{trace:032x}" for trace in traces
    ]


async def test_traceparent_of_an_http_request_is_the_parent(
    traced: tuple[App, InMemorySpanExporter],
) -> None:
    app, exporter = traced
    await ask(app.asgi(), body=call("q"), headers=[("traceparent", PARENT), ("tracestate", "a=b")])
    async with over_http(app) as client:
        await client.call(
            "tools/call", {"name": "q", "arguments": {}}, headers={"traceparent": PARENT}
        )
    spans = exporter.get_finished_spans()
    assert len(spans) == 2
    for span in spans:
        assert span.parent is not None
        assert f"{span.parent.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"


async def test_span_around_an_http_request_remains_the_parent(
    traced: tuple[App, InMemorySpanExporter],
) -> None:
    """Instrumentation of the transport has read the field: its span is the child of the caller's."""
    app, exporter = traced
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    with tracer.start_as_current_span("POST /rpc") as around:
        await ask(app.asgi(), body=call("q"), headers=[("traceparent", PARENT)])
    (span,) = exporter.get_finished_spans()
    assert span.parent is not None
    assert span.parent.span_id == around.get_span_context().span_id
