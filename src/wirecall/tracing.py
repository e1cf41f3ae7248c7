"""OpenTelemetry: spans of calls, the duration of MCP calls, and W3C trace context in and out (extra `otel`, P11).

    from wirecall.tracing import Tracing
    app = App("shop", middleware=[Tracing()])

1. The server: `Tracing` opens one span per call and per batch entry. Inside the handler the span is the current one, so
   every instrumented client that it uses carries the trace on.
2. The MCP client: `ClientCall` is the span of one call. The client makes it by itself if the program has imported
   OpenTelemetry. Without a provider a span costs little and goes nowhere.
3. The names: an MCP call has those of OpenTelemetry's conventions for MCP, which ask for them in place of `rpc.*`; plain
   JSON-RPC has `rpc.*`. The URI of a resource is in an attribute of the span, never in a name or in a metric: there may be
   any number of them.
4. The caller's context comes as `_meta.traceparent` and `_meta.tracestate` (SEP-414). `_meta.baggage` is read and sent only
   where that is switched on: it carries an application's own values, and leaks them to the other side.
"""

import time
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw, Struct
from opentelemetry import context as contexts
from opentelemetry import metrics, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.metrics import Histogram, Meter, MeterProvider
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from wirecall.errors import InternalError, RpcError
from wirecall.mcp.headers import named
from wirecall.mcp.revisions import REVISIONS
from wirecall.server.call import Context, InputRequired, Next, call_of

_trace_context = TraceContextTextMapPropagator()
_baggage = W3CBaggagePropagator()

# The records of a call to the ledger are named after these methods: `tools/call:price`.
_RECORDED = ("tools/call", "prompts/get", "resources/read", "completion/complete")
_SECONDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300]

Facts = dict[str, str | int | bool]


class _Flag(Struct):
    is_error: bool | None = msgspec.field(default=None, name="isError")


_decode_flag = msgspec.json.Decoder(_Flag).decode


def _durations(meter: Meter, side: str) -> Histogram:
    words = "the MCP request or notification as observed on the"
    return meter.create_histogram(
        f"mcp.{side}.operation.duration",
        unit="s",
        description=f"The duration of {words} {'receiver' if side == 'server' else 'sender'}.",
        explicit_bucket_boundaries_advisory=_SECONDS,
    )


def _mcp_facts(method: str, name: str | None, revision: str | None, transport: str) -> tuple[str, Facts]:
    """Return the name of the span of an MCP call, and the attributes that its span and its metric share."""
    facts: Facts = {"mcp.method.name": method, "network.transport": transport}
    if transport == "tcp":
        facts["network.protocol.name"] = "http"
    if revision is not None:
        facts["mcp.protocol.version"] = revision
    if method == "tools/call":
        facts["gen_ai.operation.name"] = "execute_tool"
    if name is None or method not in ("tools/call", "prompts/get"):
        return method, facts
    facts["gen_ai.tool.name" if method == "tools/call" else "gen_ai.prompt.name"] = name
    return f"{method} {name}", facts


def _is_tool_error(result: object) -> bool:
    """Return whether the result of a tool call says that the tool failed."""
    try:
        return isinstance(result, (bytes, Raw)) and _decode_flag(result).is_error is True
    except msgspec.DecodeError:
        return False


# --- the server ------------------------------------------------------------------------------------------------------


class Tracing:
    """A middleware that opens a span around every call, and measures MCP calls.

    Without `provider` and `meters` it takes those that the program has set globally. `baggage=True` gives the caller's
    baggage to the handler.
    """

    def __init__(
        self, provider: TracerProvider | None = None, *, meters: MeterProvider | None = None, baggage: bool = False
    ) -> None:
        self._tracer = trace.get_tracer("wirecall", tracer_provider=provider)
        self._durations = _durations(metrics.get_meter("wirecall", meter_provider=meters), "server")
        self._baggage = baggage

    async def __call__(self, context: Context, call_next: Next) -> object:
        # Step 1: the parent is the caller's span; the span around the transport, if there is one, is linked to.
        carrier = {name: value for name, value in context.meta.items() if isinstance(value, str)}
        around = trace.get_current_span().get_span_context()
        parent = _trace_context.extract(carrier, contexts.get_current())
        if self._baggage:
            parent = _baggage.extract(carrier, parent)
        is_linked = around.is_valid and trace.get_current_span(parent).get_span_context() != around
        # Step 2: the names.
        peer, began = call_of(context).peer, time.perf_counter()
        shared: Facts = {}
        own: dict[str, object] = {
            "wirecall.correlation_id": str(context.correlation_id),
            "wirecall.kind": context.kind.value,
            "wirecall.batch.position": context.position,
        }
        id = None if context.is_notification else str(context.correlation_id)
        if peer is None:
            title = context.method
            own |= {"rpc.system": "jsonrpc", "rpc.method": title, "rpc.jsonrpc.version": "2.0", "rpc.jsonrpc.request_id": id}
        else:
            method, _, name = context.record.partition(":")
            method, name = (method, name) if method in _RECORDED else (context.record, "")
            title, shared = _mcp_facts(method, name, peer.revision, peer.transport)
            own |= {"jsonrpc.request.id": id, "mcp.resource.uri": peer.uri, "mcp.session.id": peer.session_id}
        # Step 3: the call.
        failure: Facts = {}
        token = contexts.attach(parent)
        try:
            with self._tracer.start_as_current_span(
                title,
                kind=SpanKind.SERVER,
                attributes={**shared, **{name: value for name, value in own.items() if isinstance(value, (str, int))}},
                links=[Link(around)] if is_linked else (),
                record_exception=False,  # a handler's text may be secret: it goes to the log, not to the collector
                set_status_on_exception=False,
            ) as span:
                try:
                    result = await call_next(context)
                    if peer is not None and _is_tool_error(result):
                        failure = {"error.type": "tool_error"}
                        span.set_status(Status(StatusCode.ERROR))
                    span.set_attribute("wirecall.replayed", context.replayed)
                    return result
                except InputRequired:  # the call goes on when its client has answered
                    raise
                except BaseException as error:
                    told = error if isinstance(error, RpcError) else InternalError()
                    if peer is None:
                        failure = {"rpc.jsonrpc.error_code": told.code}
                    elif not isinstance(error, Exception):  # cancelled: there is no answer
                        failure = {"error.type": type(error).__name__}
                    elif shared["mcp.method.name"] == "tools/call" and REVISIONS[peer.revision].reports_in_result(
                        told, asks_key=call_of(context).method.key == "ask"
                    ):
                        failure = {"error.type": "tool_error"}
                    else:
                        failure = {"error.type": str(told.code), "rpc.response.status_code": str(told.code)}
                    span.set_status(Status(StatusCode.ERROR, told.message if told is error else type(error).__name__))
                    raise
                finally:
                    span.set_attributes(failure)
        finally:
            contexts.detach(token)
            if peer is not None:
                self._durations.record(time.perf_counter() - began, {**shared, **failure})


# --- the client ------------------------------------------------------------------------------------------------------

# These take the providers that the program has set globally, also if it sets them later.
_tracer = trace.get_tracer("wirecall")
_client_durations = _durations(metrics.get_meter("wirecall"), "client")


class ClientCall:
    """One call of an MCP client: its span, and the `_meta` members that tell the server of it."""

    def __init__(self, method: str, params: object, *, revision: str | None, url: str | None, baggage: bool) -> None:
        self._began = time.perf_counter()
        title, self._facts = _client_facts(method, named(method, params), revision, url)
        uri = params.get("uri") if isinstance(params, Mapping) else None
        self._span = _tracer.start_span(
            title,
            kind=SpanKind.CLIENT,
            attributes={**self._facts, "mcp.resource.uri": uri} if isinstance(uri, str) else self._facts,
            record_exception=False,
            set_status_on_exception=False,
        )
        # Without a provider there is nothing to tell, unless a caller's span is passed on.
        is_told = baggage or self._span.get_span_context().is_valid
        self.meta = _injected(trace.set_span_in_context(self._span), baggage) if is_told else {}

    def end(self, id: int, error: BaseException | None, result: object) -> None:
        """End the span, with the error or the result of the call."""
        failure: Facts = {}
        if self._facts["mcp.method.name"] == "tools/call" and _is_tool_error(result):
            failure = {"error.type": "tool_error"}
        elif isinstance(error, RpcError):
            failure = {"error.type": str(error.code), "rpc.response.status_code": str(error.code)}
        elif error is not None:
            failure = {"error.type": type(error).__name__}
        if failure:
            words = error.message if isinstance(error, RpcError) and "rpc.response.status_code" in failure else None
            self._span.set_status(Status(StatusCode.ERROR, words))
        self._span.set_attributes({"jsonrpc.request.id": str(id), **failure})
        self._span.end()
        _client_durations.record(time.perf_counter() - self._began, {**self._facts, **failure} if failure else self._facts)


@lru_cache
def _client_facts(method: str, name: str | None, revision: str | None, url: str | None) -> tuple[str, Facts]:
    """Return the same for a call of the client. It is cached: a client makes the same few calls again and again."""
    title, facts = _mcp_facts(method, name, revision, "pipe" if url is None else "tcp")
    if url is not None:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        facts |= {"server.address": parts.hostname or "", "server.port": port}
    return title, facts


def trace_meta(*, baggage: bool = False) -> dict[str, str]:
    """Return the current span as `_meta` members, for a call to another server."""
    return _injected(contexts.get_current(), baggage)


def _injected(context: contexts.Context, baggage: bool) -> dict[str, str]:
    carrier: dict[str, str] = {}
    _trace_context.inject(carrier, context)
    if baggage:
        _baggage.inject(carrier, context)
    return carrier
