"""OpenTelemetry spans, one per call and per batch entry, as a middleware (extra `otel`, P11).

    from wirecall.tracing import Tracing
    app = App("shop", middleware=[Tracing()])

The caller's trace context comes in as `_meta.traceparent` and `_meta.tracestate` (W3C); inside the handler the span is the
current one, so every instrumented client it uses carries the trace on. `trace_meta()` gives the same as a `_meta` object.
"""

from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from wirecall.errors import RpcError
from wirecall.server.call import Context
from wirecall.server.dispatch import Next

_propagator = TraceContextTextMapPropagator()


class Tracing:
    """Opens a span around every call; without a provider it takes the one that the program has set globally."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("wirecall", tracer_provider=provider)

    async def __call__(self, context: Context, call_next: Next) -> object:
        parent = _propagator.extract({name: value for name, value in context.meta.items() if isinstance(value, str)})
        facts = {
            "rpc.system": "jsonrpc",
            "rpc.method": context.method,
            "rpc.jsonrpc.version": "2.0",
            "rpc.jsonrpc.request_id": None if context.is_notification else str(context.correlation_id),
            "wirecall.correlation_id": str(context.correlation_id),
            "wirecall.kind": context.kind.value,
            "wirecall.batch.position": context.position,
        }
        with self._tracer.start_as_current_span(
            context.method,
            context=parent,
            kind=SpanKind.SERVER,
            attributes={name: value for name, value in facts.items() if value is not None},
            record_exception=False,  # a handler's text may be secret: it goes to the log, not to the collector
            set_status_on_exception=False,
        ) as span:
            try:
                result = await call_next(context)
            except BaseException as error:
                code, text = (error.code, error.message) if isinstance(error, RpcError) else (-32603, type(error).__name__)
                span.set_attribute("rpc.jsonrpc.error_code", code)
                span.set_status(Status(StatusCode.ERROR, text))
                raise
            span.set_attribute("wirecall.replayed", context.replayed)
            return result


def trace_meta() -> dict[str, str]:
    """Return the current span as `_meta` members, for a call to another server."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier
