"""OpenTelemetry's names for MCP calls on both sides, and trace context in `_meta` (SEP-414).

The expected names are those of OpenTelemetry's semantic conventions for MCP
(semantic-conventions-genai, gen-ai/mcp.md).
"""

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry import baggage, trace
from opentelemetry import context as contexts
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags

from tests.calls import call, make_app
from tests.mcp.asgi import EVERY_WAY, LEGACY, R2, R3, R4, R5, over_http, over_stdio, speak
from tests.mcp.scripted import Reply, Scripted, newest, older, result, text
from tests.mcp.task_servers import DONE, Server, client_to
from wirecall import Context, DomainError, connect, connect_sync
from wirecall.mcp import ToolResult
from wirecall.tracing import Tracing

TRACE = 0x0AF7651916CD43DD8448EB211C80319C
SPAN = 0xB7AD6B7169203331
PARENT = f"00-{TRACE:032x}-{SPAN:016x}-01"
VENDOR = "com.example/loyalty"


class Traced:
    """An app with one function of each kind, its spans and its metrics."""

    def __init__(self, **options: Any) -> None:
        provider = TracerProvider(shutdown_on_exit=False)
        self._exporter = InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        tracing = Tracing(
            provider, meters=MeterProvider([self._reader], shutdown_on_exit=False), **options
        )
        self.app = app = make_app(middleware=[tracing], extensions={VENDOR: {}})
        self.tracer = provider.get_tracer("test")
        app.query(name="look")(lambda: 1)
        app.prompt(name="greet")(lambda name="you": f"hello {name}")
        app.resource("test://page/{number}")(lambda number: number)
        app.completion("greet", "name")(lambda value: [value])
        app.extension_method("loyalty/points", extension=VENDOR)(lambda: {"points": 1})
        app.query(name="flagged")(lambda: ToolResult(content=["bad luck"], is_error=True))

        @app.query
        def typed(number: int) -> int:
            return number

        @app.query
        def refuse() -> None:
            raise DomainError(7, "no")

        @app.query
        def crash() -> None:
            raise ValueError("secret")

        @app.prompt
        def broken() -> str:
            raise ValueError("secret")

        @app.query
        def luggage() -> dict[str, object]:
            return dict(baggage.get_all())

        @app.query
        async def ask(ctx: Context) -> str:
            return str((await ctx.elicit("Who?", str)).action)

    def spans(self) -> list[ReadableSpan]:
        """The spans since the last time."""
        found = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return found

    def facts(self) -> dict[str, Any]:
        (span,) = self.spans()
        return dict(span.attributes or {})

    def points(self) -> dict[str, list[Any]]:
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        scopes = [scope for one in data.resource_metrics for scope in one.scope_metrics]
        return {
            f"{metric.name} {metric.unit}": [*metric.data.data_points]
            for scope in scopes
            for metric in scope.metrics
        }


REQUESTS: list[tuple[str, Any, str, dict[str, str]]] = [
    (
        "tools/call",
        {"name": "look", "arguments": {}},
        "tools/call look",
        {"gen_ai.tool.name": "look", "gen_ai.operation.name": "execute_tool"},
    ),
    ("prompts/get", {"name": "greet"}, "prompts/get greet", {"gen_ai.prompt.name": "greet"}),
    (
        "resources/read",
        {"uri": "test://page/7"},
        "resources/read",
        {"mcp.resource.uri": "test://page/7"},
    ),
    (
        "completion/complete",
        {
            "ref": {"type": "ref/prompt", "name": "greet"},
            "argument": {"name": "name", "value": "a"},
        },
        "completion/complete",
        {},
    ),
]


@pytest.mark.parametrize(("transport", "revision"), EVERY_WAY)
async def test_mcp_call_has_the_names_of_the_conventions(transport: str, revision: str) -> None:
    traced = Traced()
    async with speak(transport, traced.app, revision) as client:
        for method, params, title, facts in REQUESTS:
            await client.result(method, params, id="request-7")
            (span,) = traced.spans()
            found = {
                name: value
                for name, value in (span.attributes or {}).items()
                if not name.startswith("wirecall.")
            }
            session = found.pop("mcp.session.id", None)
            assert (span.name, span.kind) == (title, SpanKind.SERVER)
            assert found == {
                "mcp.method.name": method,
                "mcp.protocol.version": revision,
                "jsonrpc.request.id": "request-7",
                "network.transport": "tcp" if transport == "http" else "pipe",
                **({"network.protocol.name": "http"} if transport == "http" else {}),
                **facts,
            }
            assert (session is not None) == (transport == "http" and revision in LEGACY)


async def test_extension_method_has_its_own_name() -> None:
    traced = Traced()
    async with over_stdio(traced.app, capabilities={"extensions": {VENDOR: {}}}) as client:
        await client.result("loyalty/points")
    (span,) = traced.spans()
    assert (span.name, (span.attributes or {})["mcp.method.name"]) == (
        "loyalty/points",
        "loyalty/points",
    )


async def test_session_id_in_a_trace_is_not_the_token() -> None:
    """The token opens the session; the id in a trace does not."""
    traced = Traced()
    async with over_http(traced.app, R4) as client:
        await client.tool("look")
        first = traced.facts()["mcp.session.id"]
        await client.tool("look")
        assert traced.facts()["mcp.session.id"] == first
        assert client.session is not None and first not in client.session
        refused = await client.post(
            client.message("ping"), {**client.headers(), "mcp-session-id": first}
        ).started()
        assert refused.status == 404


FAILURES: list[tuple[str, str, Any, str, tuple[str, str | None]]] = [
    ("tools/call", "refuse", {}, R5, ("tool_error", None)),
    ("tools/call", "crash", {}, R5, ("tool_error", None)),
    ("tools/call", "flagged", {}, R5, ("tool_error", None)),
    ("tools/call", "typed", {"number": "x"}, R4, ("tool_error", None)),  # a result since 2025-11-25
    ("tools/call", "typed", {"number": "x"}, R3, ("-32602", "-32602")),
    ("tools/call", "ask", {}, R4, ("tool_error", None)),  # the client has not declared elicitation
    ("tools/call", "ask", {}, R5, ("-32021", "-32021")),
    ("prompts/get", "broken", {}, R5, ("-32603", "-32603")),
]


@pytest.mark.parametrize(("method", "name", "arguments", "revision", "expected"), FAILURES)
async def test_failures_have_the_type_that_the_client_sees(
    method: str, name: str, arguments: Any, revision: str, expected: tuple[str, str | None]
) -> None:
    traced = Traced()
    async with over_stdio(traced.app, revision) as client:
        answer = await client.call(method, {"name": name, "arguments": arguments})
    (span,) = traced.spans()
    facts = span.attributes or {}
    assert (facts["error.type"], facts.get("rpc.response.status_code")) == expected
    assert answer.get("error", {}).get("code") == (
        None if expected[1] is None else int(expected[1])
    )
    assert span.status.status_code is StatusCode.ERROR
    assert "secret" not in span.to_json()


async def test_question_is_not_a_failure() -> None:
    traced = Traced()
    async with over_stdio(traced.app, capabilities={"elicitation": {}}) as client:
        asked = await client.tool("ask")
        answers = {key: {"action": "decline"} for key in asked["inputRequests"]}
        more = {"requestState": asked["requestState"], "inputResponses": answers}
        await client.tool("ask", members=more)
    assert [(span.name, span.status.status_code) for span in traced.spans()] == [
        ("tools/call ask", StatusCode.UNSET)
    ] * 2


async def test_mcp_calls_are_measured_in_seconds() -> None:
    traced = Traced()
    async with over_http(traced.app, R5) as client:
        await client.tool("look")
        await client.tool("look")
        await client.tool("refuse")
        await client.result("resources/read", {"uri": "test://page/1"})
    await traced.app.handle(call("look"))  # plain JSON-RPC has its own metric
    points = traced.points()
    assert sorted(points) == ["mcp.server.operation.duration s", "rpc.server.call.duration s"]
    counted = {
        frozenset((point.attributes or {}).items()): point
        for point in points["mcp.server.operation.duration s"]
    }
    shared = {
        "mcp.protocol.version": R5,
        "network.transport": "tcp",
        "network.protocol.name": "http",
    }
    tool = {**shared, "mcp.method.name": "tools/call", "gen_ai.operation.name": "execute_tool"}
    assert {facts: point.count for facts, point in counted.items()} == {
        frozenset({**tool, "gen_ai.tool.name": "look"}.items()): 2,
        frozenset({**tool, "gen_ai.tool.name": "refuse", "error.type": "tool_error"}.items()): 1,
        frozenset({**shared, "mcp.method.name": "resources/read"}.items()): 1,
    }
    bounds = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
    assert all(
        tuple(point.explicit_bounds) == bounds and point.sum < 60 for point in counted.values()
    )


async def test_rpc_calls_keep_the_names_of_rpc() -> None:
    traced = Traced()
    await traced.app.handle(call("look", id=7))
    (span,) = traced.spans()
    found = {
        name: value
        for name, value in (span.attributes or {}).items()
        if not name.startswith("wirecall.")
    }
    system = {"rpc.system": "jsonrpc", "rpc.system.name": "jsonrpc"}
    expected = {
        **system,
        "rpc.method": "look",
        "rpc.jsonrpc.version": "2.0",
        "rpc.jsonrpc.request_id": "7",
    }
    assert (span.name, found) == ("look", expected)


async def test_rpc_calls_are_measured_in_seconds_like_those_of_mcp() -> None:
    traced = Traced()
    for name in ("look", "look", "refuse", "crash"):
        await traced.app.handle(call(name))
    ((title, points),) = traced.points().items()
    assert title == "rpc.server.call.duration s"
    shared = {"rpc.system": "jsonrpc", "rpc.system.name": "jsonrpc"}

    def failed(code: int) -> dict[str, Any]:
        return {
            "rpc.jsonrpc.error_code": code,
            "rpc.response.status_code": str(code),
            "error.type": str(code),
        }

    assert {frozenset((point.attributes or {}).items()): point.count for point in points} == {
        frozenset({**shared, "rpc.method": "look"}.items()): 2,
        frozenset({**shared, "rpc.method": "refuse", **failed(7)}.items()): 1,
        frozenset({**shared, "rpc.method": "crash", **failed(-32603)}.items()): 1,
    }
    assert all(point.explicit_bounds[0] == 0.005 and point.sum < 60 for point in points)


async def test_span_of_the_caller_is_the_parent_and_the_transport_s_is_linked() -> None:
    """The span of the transport, such as HTTP's, is independent of the caller's."""
    traced = Traced()
    async with over_http(traced.app) as client:
        with traced.tracer.start_as_current_span("POST /mcp") as around:
            await client.tool("look", meta={"traceparent": PARENT})
        span, transport = traced.spans()
        assert span.parent is not None and span.parent.span_id == SPAN
        assert [link.context.span_id for link in span.links] == [around.get_span_context().span_id]
        with traced.tracer.start_as_current_span("POST /mcp") as around:
            await client.tool("look")
        span, transport = traced.spans()
        assert span.parent is not None and span.parent.span_id == around.get_span_context().span_id
        assert (list(span.links), transport.name) == ([], "POST /mcp")


@pytest.mark.parametrize(("options", "seen"), [({}, {}), ({"baggage": True}, {"user": "ann"})])
async def test_baggage_of_the_caller_reaches_the_handler_only_if_enabled(
    options: Any, seen: Any
) -> None:
    traced = Traced(**options)
    async with over_http(traced.app) as client:
        told = await client.tool("luggage", meta={"traceparent": PARENT, "baggage": "user=ann"})
    assert told["structuredContent"] == seen


# --- our client -----------------------------------------------------------------------------------

CURRENT = trace.set_span_in_context(
    NonRecordingSpan(SpanContext(TRACE, SPAN, False, TraceFlags(TraceFlags.SAMPLED)))
)
LOADED = baggage.set_baggage("user", "ann", CURRENT)


class Within:
    """Makes a context the current one, for the length of a block."""

    def __init__(self, context: contexts.Context) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._token = contexts.attach(self._context)

    def __exit__(self, *_: object) -> None:
        contexts.detach(self._token)


def metas(server: Scripted, method: str) -> list[Any]:
    bodies = [
        one
        for seen in server.seen
        for one in (seen.body if isinstance(seen.body, list) else [seen.body])
    ]
    return [one["params"].get("_meta") for one in bodies if one and one.get("method") == method]


@pytest.mark.parametrize("revision", [R2, R4, R5])
async def test_client_sends_the_current_span_to_the_server(revision: str) -> None:
    answer = newest(lambda message, _: result(message, text("ok")))
    if revision != R5:
        answer = older(lambda message, _: result(message, text("ok")), revision)
    async with (
        Scripted(answer) as server,
        connect(server.url, protocol="mcp", revision=revision) as client,
    ):
        with Within(LOADED):
            await client.call_tool("t")
            await client.call_tool("t", key=None)
            await client.call("prompts/get", {"name": "p", "_meta": {"traceparent": "mine"}})
        await client.call_tool("t")
    first, second, third = metas(server, "tools/call")
    assert first["traceparent"] == second["traceparent"] == PARENT
    assert "baggage" not in first
    assert metas(server, "prompts/get")[0]["traceparent"] == "mine"  # the caller's own value wins
    assert "traceparent" not in (third or {})


async def test_baggage_is_sent_only_if_enabled() -> None:
    answer = newest(lambda message, _: result(message, text("ok")))
    async with (
        Scripted(answer) as server,
        connect(server.url, protocol="mcp", baggage=True) as client,
    ):
        with Within(LOADED):
            await client.call_tool("t")
    (meta,) = metas(server, "tools/call")
    assert (meta["traceparent"], meta["baggage"]) == (PARENT, "user=ann")


async def test_calls_sent_together_keep_the_spans_of_their_callers() -> None:
    def several(message: Any, _: Any) -> Reply:
        entries = message if isinstance(message, list) else [message]
        answers = [{"jsonrpc": "2.0", "id": one["id"], "result": text("ok")} for one in entries]
        return Reply(answers if isinstance(message, list) else answers[0])

    other = trace.set_span_in_context(
        NonRecordingSpan(SpanContext(TRACE, 5, False, TraceFlags(TraceFlags.SAMPLED)))
    )
    options: Any = {"protocol": "mcp", "revision": R2, "coalesce": 0.05}
    async with Scripted(older(several, R2)) as server, connect(server.url, **options) as client:

        async def call_within(context: contexts.Context) -> None:
            with Within(context):
                await client.call("tools/call", {"name": "t"}, query=True)

        await asyncio.gather(*(call_within(context) for context in (CURRENT, other)))
    assert [meta["traceparent"][36:52] for meta in metas(server, "tools/call")] == [
        f"{SPAN:016x}",
        f"{5:016x}",
    ]


def test_blocking_client_sends_the_caller_s_span_to_the_server() -> None:
    app = make_app()

    @app.query
    def told(ctx: Context) -> str:
        return ctx.traceparent or "nothing"

    with connect_sync(app, protocol="mcp") as client:
        with Within(CURRENT):
            assert client.call_tool("told").text == PARENT
        assert client.call_tool("told").text == "nothing"


def run(script: str) -> Any:
    """Run a separate program, because a process sets its providers once; return the JSON that it
    prints.
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


CLIENT = """
import json
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from wirecall import App, DomainError, connect_sync
from wirecall.errors import WirecallError
from wirecall.tracing import Tracing

provider, exporter, reader = TracerProvider(), InMemorySpanExporter(), InMemoryMetricReader()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))

app = App("shop", middleware=[Tracing()])
app.query(name="look")(lambda: 1)
app.resource("test://a")(lambda: "a")

@app.query
def refuse():
    raise DomainError(7, "no")

with connect_sync(app, protocol="mcp") as client:
    with provider.get_tracer("test").start_as_current_span("agent"):
        client.call_tool("look")
        client.read_resource("test://a")
        for name in ("refuse", "unknown"):
            try:
                client.call_tool(name)
            except WirecallError:
                pass
spans = [
    {
        "name": span.name,
        "kind": span.kind.name,
        "id": span.context.span_id,
        "parent": span.parent and span.parent.span_id,
        "status": span.status.status_code.name,
        "facts": dict(span.attributes),
    }
    for span in exporter.get_finished_spans()
]
found = [m for r in reader.get_metrics_data().resource_metrics for s in r.scope_metrics for m in s.metrics]
counts = {m.name: [m.unit, [[dict(p.attributes), p.count] for p in m.data.data_points]] for m in found}
print(json.dumps({"spans": spans, "counts": counts}))
"""


def test_client_has_spans_and_durations() -> None:
    told = run(CLIENT)
    client = {span["name"]: span for span in told["spans"] if span["kind"] == "CLIENT"}
    server = {span["name"]: span for span in told["spans"] if span["kind"] == "SERVER"}
    (agent,) = [span for span in told["spans"] if span["name"] == "agent"]
    # The caller's span, the client's and the server's are a chain.
    assert {span["parent"] for span in client.values()} == {agent["id"]}
    assert all(span["parent"] == client[name]["id"] for name, span in server.items())
    assert list(client) == [
        "tools/call look",
        "resources/read",
        "tools/call refuse",
        "tools/call unknown",
    ]
    shared = {"network.transport": "pipe", "mcp.protocol.version": R5}
    tool = {**shared, "mcp.method.name": "tools/call", "gen_ai.operation.name": "execute_tool"}
    facts = {name: {**span["facts"], "jsonrpc.request.id": None} for name, span in client.items()}
    id = {"jsonrpc.request.id": None}
    no = {"error.type": "-32602", "rpc.response.status_code": "-32602"}
    assert facts == {
        "tools/call look": {**tool, **id, "gen_ai.tool.name": "look"},
        "resources/read": {
            **shared,
            **id,
            "mcp.method.name": "resources/read",
            "mcp.resource.uri": "test://a",
        },
        "tools/call refuse": {
            **tool,
            **id,
            "gen_ai.tool.name": "refuse",
            "error.type": "tool_error",
        },
        "tools/call unknown": {**tool, **id, "gen_ai.tool.name": "unknown", **no},
    }
    assert [span["status"] for span in client.values()] == ["UNSET", "UNSET", "ERROR", "ERROR"]
    unit, points = told["counts"]["mcp.client.operation.duration"]
    measured = {
        point["gen_ai.tool.name"]: point for point, _ in points if "gen_ai.tool.name" in point
    }
    assert unit == "s" and set(told["counts"]) == {
        "mcp.client.operation.duration",
        "mcp.server.operation.duration",
    }
    assert measured["unknown"] == {**tool, "gen_ai.tool.name": "unknown", **no}
    assert not any(
        "mcp.resource.uri" in point or "jsonrpc.request.id" in point for point, _ in points
    )


async def test_client_span_has_the_address_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("wirecall.tracing._tracer", provider.get_tracer("test"))
    answer = newest(lambda message, _: result(message, text("ok")))
    async with Scripted(answer) as server, connect(server.url, protocol="mcp") as client:
        await client.call_tool("t")
    (span,) = exporter.get_finished_spans()
    facts = dict(span.attributes or {})
    assert (facts["network.transport"], facts["network.protocol.name"]) == ("tcp", "http")
    assert f"http://{facts['server.address']!s}:{facts['server.port']!s}/mcp" == server.url


async def test_client_span_ends_with_its_task_or_for_a_started_one_with_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("wirecall.tracing._tracer", provider.get_tracer("test"))
    async with Server(DONE) as server, client_to(server) as client:
        await client.call_tool("t")
        started = await client.start_tool("t")
        ended = [span.name for span in exporter.get_finished_spans()]
        await started
    assert ended == ["tasks/get", "tools/call t", "tools/call t"]
    assert {span.status.status_code for span in exporter.get_finished_spans()} == {StatusCode.UNSET}


def test_opentelemetry_is_not_loaded_by_a_program_without_it() -> None:
    script = """
import json, sys
from wirecall import App, connect_sync
app = App("shop")
app.query(name="look")(lambda: 1)
with connect_sync(app, protocol="mcp") as client:
    client.call_tool("look")
unwanted = ("opentelemetry", "wirecall.tracing")
print(json.dumps([name for name in sys.modules if name.startswith(unwanted)]))
"""
    assert run(script) == []


def test_opentelemetry_that_does_not_fit_does_not_stop_a_call() -> None:
    script = """
import json, logging, sys, types
sys.modules["opentelemetry"] = types.ModuleType("opentelemetry")
sys.modules["opentelemetry.trace"] = types.ModuleType("opentelemetry.trace")
from wirecall import App, connect_sync
seen = []
handler = logging.Handler()
handler.emit = lambda record: seen.append(record.getMessage())
logging.getLogger("wirecall").addHandler(handler)
app = App("shop")
app.query(name="look")(lambda: "seen")
with connect_sync(app, protocol="mcp") as client:
    print(json.dumps([client.call_tool("look").text, client.call_tool("look").text, len(seen), seen[0][:24]]))
"""
    assert run(script) == ["seen", "seen", 1, "calls are not traced: ca"]
