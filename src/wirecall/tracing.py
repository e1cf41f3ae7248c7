"""OpenTelemetry: spans of calls, their durations, and W3C trace context (extra `otel`, P11).

    from wirecall.tracing import Tracing
    app = App("shop", middleware=[Tracing()])

1. The server: `Tracing` opens one span per call and per batch entry. Inside the handler the span is
   the current one, so every instrumented client that it uses continues the trace.
2. The MCP client: `ClientCall` is the span of one call. The client makes it automatically if the
   program has imported OpenTelemetry. Without a provider a span costs little and is not exported.
3. The names: an MCP call has those of OpenTelemetry's conventions for MCP, which ask for them in
   place of `rpc.*`; plain JSON-RPC has `rpc.*`. The URI of a resource is in an attribute of the
   span, never in a name or in a metric: there may be any number of them.
4. The caller's context comes as `_meta.traceparent` and `_meta.tracestate` (SEP-414), or as fields
   of its HTTP request, unless the transport already has a span. `baggage` is read and sent only if
   enabled: it carries an application's own values, and leaks them to the other side.
5. A span names its call as the log does: `wirecall.call_id`, host and process. It has the digest of
   an idempotency key.
"""

import os
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
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
from wirecall.logs import host
from wirecall.mcp.headers import named
from wirecall.mcp.revisions import REVISIONS
from wirecall.server.call import Call, InputRequired, with_true_ran
from wirecall.server.context import Context, Next, call_of

_trace_context = TraceContextTextMapPropagator()
_baggage = W3CBaggagePropagator()

# The attribute that names the tool or the prompt of a call.
_NAME_ATTRIBUTE = {"tools/call": "gen_ai.tool.name", "prompts/get": "gen_ai.prompt.name"}
# The records of a call to the ledger are named after these methods: `tools/call:price`.
_RECORDED = ("tools/call", "prompts/get", "resources/read", "completion/complete")
_RPC_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10]
# Header fields of an HTTP request.
_FIELDS = ("traceparent", "tracestate", "baggage")
_SECONDS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300]

_PORTS = {"http": 80, "https": 443}

Facts = dict[str, str | int | bool]


class _Flag(Struct):
    is_error: bool | None = msgspec.field(default=None, name="isError")


_decode_flag = msgspec.json.Decoder(_Flag).decode


def _durations(meter: Meter, side: str, role: str) -> Histogram:
    words = "the MCP request or notification as observed on the"
    return meter.create_histogram(
        f"mcp.{side}.operation.duration",
        unit="s",
        description=f"The duration of {words} {role}.",
        explicit_bucket_boundaries_advisory=_SECONDS,
    )


def _rpc_durations(meter: Meter) -> Histogram:
    return meter.create_histogram(
        "rpc.server.call.duration",
        unit="s",
        description="The duration of a JSON-RPC call on the server.",
        explicit_bucket_boundaries_advisory=_RPC_SECONDS,
    )


def _mcp_facts(
    method: str, name: str | None, revision: str | None, transport: str
) -> tuple[str, Facts]:
    """Return the name of an MCP call's span, and the attributes that span and metric share."""
    facts: Facts = {"mcp.method.name": method, "network.transport": transport}
    if transport == "tcp":
        facts["network.protocol.name"] = "http"
    if revision is not None:
        facts["mcp.protocol.version"] = revision
    if method == "tools/call":
        facts["gen_ai.operation.name"] = "execute_tool"
    attribute = _NAME_ATTRIBUTE.get(method)
    if name is None or attribute is None:
        return method, facts
    facts[attribute] = name
    return f"{method} {name}", facts


def _is_tool_error(result: object) -> bool:
    """Return whether the result of a tool call says that the tool failed."""
    try:
        return isinstance(result, (bytes, Raw)) and _decode_flag(result).is_error is True
    except msgspec.DecodeError:
        return False


# --- the server -----------------------------------------------------------------------------------


class Tracing:
    """A middleware that opens a span around every call, and measures it.

    Without `provider` and `meters` it uses those that the program has set globally. `baggage=True`
    passes the caller's baggage to the handler.

    >>> app = App("shop", middleware=[Tracing()])
    """

    def __init__(
        self,
        provider: TracerProvider | None = None,
        *,
        meters: MeterProvider | None = None,
        baggage: bool = False,
    ) -> None:
        meter = metrics.get_meter("wirecall", meter_provider=meters)
        self._tracer = trace.get_tracer("wirecall", tracer_provider=provider)
        self._durations = _durations(meter, "server", "receiver")
        self._rpc_durations = _rpc_durations(meter)
        self._baggage = baggage

    async def __call__(self, context: Context, call_next: Next) -> object:
        call = call_of(context)
        began = time.perf_counter()
        parent, links = self._around(context, call)
        title, shared, own = _facts(context, call)
        durations = self._rpc_durations if call.peer is None else self._durations
        failure: Facts = {}
        ran: str = "yes"
        token = contexts.attach(parent)
        try:
            with self._tracer.start_as_current_span(
                title,
                kind=SpanKind.SERVER,
                attributes={**shared, **own},
                links=links,
                # A handler's text may be secret: it goes to the log, not to the collector.
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                made = span.get_span_context()
                call.ids.span = None
                if made.is_valid:
                    call.ids.span = f"{made.trace_id:032x}"
                try:
                    result = await call_next(context)
                    if call.peer is not None and _is_tool_error(result):
                        failure = {"error.type": "tool_error"}
                        span.set_status(Status(StatusCode.ERROR))
                    return result
                except InputRequired:  # the call continues when its client has answered
                    ran = "no"
                    if call.run is not None:
                        ran = call.run.ran
                    raise
                except RpcError as error:
                    failure = _failure(call, shared, error)
                    ran = with_true_ran(call, error).ran
                    span.set_status(Status(StatusCode.ERROR, error.message))
                    raise
                except Exception as error:
                    failure = _failure(call, shared, InternalError())
                    ran = InternalError().ran
                    span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                    raise
                except BaseException as error:  # cancelled: there is no answer
                    failure = {"error.type": type(error).__name__}
                    ran = "unknown"
                    if call.run is not None:
                        ran = call.run.ran
                    span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                    raise
                finally:
                    span.set_attributes({**failure, **_outcome(call, ran)})
        finally:
            contexts.detach(token)
            durations.record(time.perf_counter() - began, {**shared, **failure})

    def _around(self, context: Context, call: Call) -> tuple[contexts.Context, Sequence[Link]]:
        """Return the parent of a call's span, and a link to the span around the transport.

        There is no link if that span is the parent.
        """
        around = trace.get_current_span().get_span_context()
        carrier = {name: value for name, value in context.meta.items() if isinstance(value, str)}
        headers = call.frame.sender.headers
        if headers is not None and "traceparent" not in carrier and not around.is_valid:
            # A span of the transport has already read these, and is a child of the caller's.
            fields = {name: headers.get(name) for name in _FIELDS}
            carrier = {
                **{name: value for name, value in fields.items() if value is not None},
                **carrier,
            }
        parent = _trace_context.extract(carrier, contexts.get_current())
        if self._baggage:
            parent = _baggage.extract(carrier, parent)
        if not around.is_valid or trace.get_current_span(parent).get_span_context() == around:
            return parent, ()
        return parent, [Link(around)]


def _facts(context: Context, call: Call) -> tuple[str, Facts, Facts]:
    """Return the name and the attributes of a call's span.

    The first attributes are those that span and metric share, the second those of the span alone.
    """
    ids = call.ids
    peer = call.peer
    id = None
    if not context.is_notification:
        id = str(ids.correlation_id)
    own: dict[str, object] = {
        "wirecall.correlation_id": str(ids.correlation_id),
        "wirecall.call_id": ids.call_id,
        "wirecall.request_id": ids.request_id,
        "wirecall.kind": context.kind.value,
        "wirecall.batch.position": context.position,
        "wirecall.host": host(),
        "wirecall.pid": os.getpid(),
    }
    if peer is None:
        title = context.method
        shared: Facts = {"rpc.system": "jsonrpc", "rpc.system.name": "jsonrpc", "rpc.method": title}
        own |= {"rpc.jsonrpc.version": "2.0", "rpc.jsonrpc.request_id": id}
    else:
        method, _, name = context.record.partition(":")
        if method not in _RECORDED:
            method = context.record
            name = ""
        title, shared = _mcp_facts(method, name, peer.revision, peer.transport)
        own |= {
            "jsonrpc.request.id": id,
            "mcp.resource.uri": peer.uri,
            "mcp.session.id": peer.session_id,
        }
    return (
        title,
        shared,
        {name: value for name, value in own.items() if isinstance(value, (str, int))},
    )


def _failure(call: Call, shared: Facts, error: RpcError) -> Facts:
    """Return the attributes of a failure: `error` is the one that the caller gets."""
    code = str(error.code)
    if call.peer is None:
        return {
            "rpc.jsonrpc.error_code": error.code,
            "rpc.response.status_code": code,
            "error.type": code,
        }
    reports_in_result = REVISIONS[call.peer.revision].reports_in_result
    if shared["mcp.method.name"] == "tools/call" and reports_in_result(
        error, asks_key=call.method.key == "ask"
    ):
        return {"error.type": "tool_error"}
    return {"error.type": code, "rpc.response.status_code": code}


def _outcome(call: Call, ran: str) -> Facts:
    """Return the attributes of a call that has ended."""
    facts: Facts = {"wirecall.replayed": call.replayed, "wirecall.ran": ran}
    if call.key is not None:  # includes the generated key of a keyless command
        facts["wirecall.idempotency_key.sha256"] = sha256(call.key.encode()).hexdigest()
    return facts


# --- the client -----------------------------------------------------------------------------------

# These use the providers that the program has set globally, even if it sets them later.
_tracer = trace.get_tracer("wirecall")
_client_durations = _durations(metrics.get_meter("wirecall"), "client", "sender")


class ClientCall:
    """One call of an MCP client: its span, and the `_meta` members that announce it."""

    def __init__(
        self, method: str, params: object, *, revision: str | None, url: str | None, baggage: bool
    ) -> None:
        self._began = time.perf_counter()
        title, self._facts = _client_facts(method, named(method, params), revision, url)
        attributes = self._facts
        if isinstance(params, Mapping) and isinstance(uri := params.get("uri"), str):
            attributes = {**self._facts, "mcp.resource.uri": uri}
        self._span = _tracer.start_span(
            title,
            kind=SpanKind.CLIENT,
            attributes=attributes,
            record_exception=False,
            set_status_on_exception=False,
        )
        # Without a provider there is nothing to send, unless a caller's span is forwarded.
        self.meta: dict[str, str] = {}
        if baggage or self._span.get_span_context().is_valid:
            self.meta = _injected(trace.set_span_in_context(self._span), baggage)

    def end(self, id: int, error: BaseException | None, result: object) -> None:
        """End the span, with the error or the result of the call."""
        failure: Facts = {}
        message: str | None = None
        if self._facts["mcp.method.name"] == "tools/call" and _is_tool_error(result):
            failure = {"error.type": "tool_error"}
        elif isinstance(error, RpcError):
            failure = {"error.type": str(error.code), "rpc.response.status_code": str(error.code)}
            message = error.message
        elif error is not None:
            failure = {"error.type": type(error).__name__}
        facts = self._facts
        if failure:
            facts = {**self._facts, **failure}
            self._span.set_status(Status(StatusCode.ERROR, message))
        self._span.set_attributes({"jsonrpc.request.id": str(id), **failure})
        self._span.end()
        _client_durations.record(time.perf_counter() - self._began, facts)


@lru_cache
def _client_facts(
    method: str, name: str | None, revision: str | None, url: str | None
) -> tuple[str, Facts]:
    """Return the same as `_mcp_facts` for a call of the client.

    It is cached: a client makes the same few calls again and again.
    """
    if url is None:
        return _mcp_facts(method, name, revision, "pipe")
    title, facts = _mcp_facts(method, name, revision, "tcp")
    parts = urlsplit(url)
    port = parts.port or _PORTS.get(parts.scheme, 80)
    facts |= {"server.address": parts.hostname or "", "server.port": port}
    return title, facts


def trace_meta(*, baggage: bool = False) -> dict[str, str]:
    """Return the current span as `_meta` members, for a call to another server.

    With `baggage=True` also the current baggage. Without a span it is empty.

    >>> trace_meta()
    {}
    """
    return _injected(contexts.get_current(), baggage)


def _injected(context: contexts.Context, baggage: bool) -> dict[str, str]:
    carrier: dict[str, str] = {}
    _trace_context.inject(carrier, context)
    if baggage:
        _baggage.inject(carrier, context)
    return carrier
