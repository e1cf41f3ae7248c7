"""OpenTelemetry spans per call and per batch entry, and W3C trace context in and out (P11)."""

import asyncio
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.calls import batch, call, make_app, result
from wirecall import App, DomainError, jsonrpc
from wirecall.tracing import Tracing, trace_meta

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.fixture
def traced() -> tuple[App, InMemorySpanExporter]:
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
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


async def test_a_span_per_call_and_per_entry(traced: tuple[App, InMemorySpanExporter]) -> None:
    app, exporter = traced
    await app.handle(call("q", id=7))
    await app.handle(batch(call("q", id="a"), jsonrpc.make_notification("q"), call("c", key="k", id=3)))
    await app.handle(call("c", key="k", id=4))
    spans = exporter.get_finished_spans()
    facts = [dict(span.attributes or {}) for span in spans]
    assert [span.name for span in spans] == ["q", "q", "q", "c", "c"]
    assert [fact.get("wirecall.batch.position") for fact in facts] == [None, 0, 1, 2, None]
    assert [fact.get("rpc.jsonrpc.request_id") for fact in facts] == ["7", "a", None, "3", "4"]
    assert all(fact["wirecall.correlation_id"] for fact in facts)
    assert [fact["wirecall.replayed"] for fact in facts] == [False, False, False, False, True]
    assert facts[3]["wirecall.kind"] == "command"


async def test_the_caller_s_trace_goes_on_through_the_handler(traced: tuple[App, InMemorySpanExporter]) -> None:
    app, exporter = traced
    handed_on = result(await app.handle(call("onward", {"_meta": {"traceparent": PARENT, "tracestate": "a=b", "x": 1}})))
    (span,) = exporter.get_finished_spans()
    assert span.context is not None
    assert format(span.context.trace_id, "032x") == TRACE
    assert span.parent is not None
    assert format(span.parent.span_id, "016x") == "b7ad6b7169203331"
    assert handed_on == {"traceparent": f"00-{TRACE}-{span.context.span_id:016x}-01", "tracestate": "a=b"}


@pytest.mark.parametrize("meta", [{"traceparent": "junk"}, {"traceparent": 5}, {}, {"traceparent": ["x"]}])
async def test_an_invalid_traceparent_starts_a_new_trace(traced: tuple[App, InMemorySpanExporter], meta: Any) -> None:
    app, exporter = traced
    await app.handle(call("q", {"_meta": meta}))
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


async def test_failures_are_marked_without_their_text(traced: tuple[App, InMemorySpanExporter]) -> None:
    app, exporter = traced
    await app.handle(batch(call("refuse", id=1), call("crash", id=2)))
    refused, crashed = exporter.get_finished_spans()
    assert refused.status.status_code is crashed.status.status_code is StatusCode.ERROR
    assert (refused.attributes or {})["rpc.jsonrpc.error_code"] == 7
    assert (crashed.attributes or {})["rpc.jsonrpc.error_code"] == -32603
    assert "secret" not in crashed.to_json()
