"""Every check of a single call holds for the entries of an array and of the batch tool (A5).

`CHECKS` is the table. Each check is a function that sends calls in one of three ways: one by one,
as a JSON-RPC array, or through the batch tool. It expects the same from all of them.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.calls import make_app
from tests.mcp.asgi import BASIC, R5, Exchange, HttpClient
from tests.mcp.batches import entry, results
from tests.server.logs import Collector
from wirecall import App, BatchTool, Context, Limits
from wirecall.auth import Identity, Tokens, digest
from wirecall.errors import RpcError
from wirecall.ledger.base import LedgerDown
from wirecall.ratelimit import RateLimit
from wirecall.testing import FakeClock
from wirecall.tracing import Tracing

Json = dict[str, Any]
Calls = Sequence[tuple[str, Json]]


class Way:
    """Sends calls in one of three ways, and returns a result or an error for each."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Headers of every request.
        self.headers: dict[str, str] = {}
        self.status = 0

    def make_app(self, **options: Any) -> App:
        tool = BatchTool(tools="all", destructive="allow")
        return make_app(batch_tool=tool, **options)

    async def send(self, app: App, *calls: tuple[str, Json]) -> list[Json]:
        server = app.asgi()
        if self.name == "array":
            return await self._array(server, calls)
        client = HttpClient(server, R5, headers=self.headers)
        try:
            if self.name == "tool":
                sent = [entry(method, params) for method, params in calls]
                answer = await client.call(
                    "tools/call", {"name": "batch", "arguments": {"calls": sent}}
                )
                self.status = client.last.status if client.last is not None else 0
                if "error" in answer:
                    return [answer] * len(calls)
                return results(answer["result"])
            return [await self._single(client, method, params) for method, params in calls]
        finally:
            await client.close()

    async def _array(self, server: Any, calls: Calls) -> list[Json]:
        body = [
            {"jsonrpc": "2.0", "id": str(id), "method": method, "params": params}
            for id, (method, params) in enumerate(calls)
        ]
        headers = {**BASIC, **self.headers}
        exchange = Exchange(server, "POST", headers, json.dumps(body).encode(), "/rpc")
        await exchange.started()
        self.status = exchange.status
        answer = await exchange.json()
        await exchange.close()
        if isinstance(answer, dict):
            return [answer] * len(calls)
        return list(answer)

    async def _single(self, client: HttpClient, method: str, params: Json) -> Json:
        answer = await client.call("tools/call", {"name": method, "arguments": params})
        assert client.last is not None
        self.status = client.last.status
        if "error" in answer:
            return answer
        result = answer["result"]
        if result.get("isError"):
            return {"error": result["_meta"]["io.wirecall/error"]}
        text = result["content"][0]["text"] if result["content"] else None
        return {"result": result.get("structuredContent", text)}


def codes(answers: Sequence[Json]) -> list[int | None]:
    """Return the code of each answer, None for a result."""
    return [each["error"]["code"] if "error" in each else None for each in answers]


@asynccontextmanager
async def closing(app: App) -> AsyncIterator[App]:
    try:
        yield app
    finally:
        await app.aclose(1.0)


# --- the checks -------------------------------------------------------------------------------------


async def check_scopes(way: Way, _folder: Path) -> None:
    """The scopes of all calls are needed before one of them runs."""
    app = way.make_app(auth=Tokens({digest("few"): Identity("ada", scopes=frozenset({"a"}))}))
    ran: list[str] = []
    app.query(name="allowed", scopes="a")(lambda: ran.append("allowed"))
    app.query(name="refused", scopes="b")(lambda: ran.append("refused"))
    way.headers = {"authorization": "Bearer few"}
    async with closing(app):
        calls: list[tuple[str, Json]] = [("allowed", {}), ("refused", {})]
        await way.send(app, *(calls[1:] if way.name == "one by one" else calls))
        assert way.status == 403
        assert ran == []


async def check_identity(way: Way, _folder: Path) -> None:
    """A handler knows its caller."""
    app = way.make_app(auth=Tokens({digest("t"): Identity("ada")}))

    @app.query
    def whoami(ctx: Context) -> str:
        return f"{ctx.caller} {ctx.identity is not None}"

    way.headers = {"authorization": "Bearer t"}
    async with closing(app):
        answers = await way.send(app, ("whoami", {}), ("whoami", {}))
    assert [each["result"] for each in answers] == ["ada True"] * 2


async def check_middleware(way: Way, _folder: Path) -> None:
    """Middleware is around each call, and may refuse it."""
    seen: list[str] = []

    async def guard(ctx: Context, call_next: Callable[[Context], Awaitable[Any]]) -> Any:
        seen.append(ctx.method)
        if ctx.method == "closed":
            raise RpcError(4030, "not today")
        return await call_next(ctx)

    app = way.make_app(middleware=[guard])
    app.query(name="open")(lambda: "yes")
    app.query(name="closed")(lambda: "no")
    async with closing(app):
        answers = await way.send(app, ("open", {}), ("closed", {}))
    assert codes(answers) == [None, 4030]
    assert [name for name in seen if name != "batch"] == ["open", "closed"]


async def check_rate(way: Way, _folder: Path) -> None:
    """A rate limit counts each call."""
    limit = RateLimit(2, per=60, clock=FakeClock(1000.0).time)
    app = way.make_app(middleware=[limit])
    app.query(name="look")(lambda: 1)
    async with closing(app):
        answers = await way.send(app, *[("look", {})] * 4)
    assert codes(answers) == [None, None, 42910, 42910]


async def check_limit_of_callers(way: Way, _folder: Path) -> None:
    """Calls of one caller in flight: more are refused."""
    tokens = Tokens({digest("t"): Identity("ada")})
    app = way.make_app(auth=tokens, limits=Limits(in_flight_per_caller=2))
    gate = asyncio.Event()
    both_run = asyncio.Event()
    running = 0

    @app.query
    async def hold() -> str:
        nonlocal running
        running += 1
        if running == 2:
            both_run.set()
        await gate.wait()
        return "held"

    way.headers = {"authorization": "Bearer t"}
    hold_one: tuple[str, Json] = ("hold", {})
    messages = [[hold_one, hold_one]]
    if way.name == "one by one":
        messages = [[hold_one], [hold_one]]
    async with closing(app):
        sent = [asyncio.ensure_future(way.send(app, *calls)) for calls in messages]
        await both_run.wait()
        assert codes(await way.send(app, hold_one)) == [42910]
        gate.set()
        held = [codes(answers) for answers in await asyncio.gather(*sent)]
    assert {code for answers in held for code in answers} == {None}


async def check_params(way: Way, _folder: Path) -> None:
    """Params are checked before anything runs, and no record is made."""
    app = way.make_app()
    ran: list[int] = []

    @app.command
    def act(number: int) -> None:
        ran.append(number)

    async with closing(app):
        answers = await way.send(app, ("act", {"number": "five"}), ("act", {}), ("act", {"x": 1}))
    assert codes(answers) == [-32602] * 3
    assert ran == []


async def check_key(way: Way, _folder: Path) -> None:
    """A command that requires a key does not run without one."""
    app = way.make_app()
    app.command(name="act", key="required")(lambda: None)
    async with closing(app):
        answers = await way.send(app, ("act", {}), ("act", {"idempotency_key": "a b"}))
    assert codes(answers) == [-32602] * 2
    kinds = [each["error"]["data"]["type"] for each in answers]
    assert kinds == ["idempotency_key_required", "idempotency_key_invalid"]


async def check_key_place(way: Way, _folder: Path) -> None:
    """A key at the place that the command declares is its key."""
    app = way.make_app()
    ran: list[int] = []

    @app.command(key="required", key_at="meta.key")
    def act(number: int) -> int:
        ran.append(number)
        return number

    def keyed(agent: str) -> tuple[str, Json]:
        return "act", {"number": 1, "meta": {"key": "k", "agent": agent}}

    async with closing(app):
        answers = await way.send(app, keyed("one"), keyed("two"))
        answers += await way.send(app, keyed("three"))
    assert codes(answers) == [None] * 3
    assert ran == [1]


async def check_ledger(way: Way, _folder: Path) -> None:
    """One key is one effect; other params under it are a conflict."""
    app = way.make_app()
    ran: list[int] = []

    @app.command
    def act(number: int) -> int:
        ran.append(number)
        return number

    def keyed(number: int) -> tuple[str, Json]:
        return "act", {"number": number, "idempotency_key": "k"}

    async with closing(app):
        await way.send(app, keyed(1), keyed(1))
        answers = await way.send(app, keyed(1), keyed(2))
    assert codes(answers) == [None, 42210]
    assert ran == [1]


async def check_lost_ledger(way: Way, _folder: Path) -> None:
    """Without its ledger a command is refused, and a query is not."""
    app = way.make_app()
    app.command(name="act")(lambda: "acted")
    app.query(name="look")(lambda: "seen")
    ledger = await app.ledger()
    away = AsyncMock(side_effect=LedgerDown("away"))
    with patch.object(ledger, "claim", away):
        async with closing(app):
            answers = await way.send(app, ("act", {"idempotency_key": "k"}), ("look", {}))
    assert codes(answers) == [50310, None]


async def check_timeout(way: Way, _folder: Path) -> None:
    """A method has its timeout."""
    app = way.make_app()

    @app.query(timeout=0.01)
    async def slow() -> None:
        await asyncio.Event().wait()

    async with closing(app):
        answers = await way.send(app, ("slow", {}))
    assert codes(answers) == [50410]


async def check_failure(way: Way, _folder: Path) -> None:
    """The text of an unexpected exception stays in the log."""
    app = way.make_app(mode="production", ledger="memory:")

    @app.query
    def crash() -> None:
        raise ValueError("secret")

    async with closing(app):
        answers = await way.send(app, ("crash", {}))
    assert codes(answers) == [-32603]
    assert "secret" not in json.dumps(answers)


async def check_result(way: Way, _folder: Path) -> None:
    """In development a result is compared with its declared type."""
    app = way.make_app()
    wrong: Any = "five"

    @app.query
    def number() -> int:
        return wrong  # type: ignore[no-any-return]

    async with closing(app):
        answers = await way.send(app, ("number", {}))
    assert codes(answers) == [-32603]


async def check_lifespan(way: Way, _folder: Path) -> None:
    """A handler gets the value of the lifespan."""

    @asynccontextmanager
    async def lifespan(_app: App) -> AsyncIterator[str]:
        yield "pool"

    app = way.make_app(lifespan=lifespan)

    @app.query
    def state(ctx: Context) -> str:
        return str(ctx.state)

    async with closing(app):
        answers = await way.send(app, ("state", {}))
    assert [each["result"] for each in answers] == ["pool"]


async def check_audit(way: Way, folder: Path) -> None:
    """Each command has its line; that of a batch tool's entry names the batch."""
    app = way.make_app(audit=f"file:{folder / 'audit.jsonl'}")
    app.command(name="act")(lambda: "acted")
    async with closing(app):
        await way.send(app, ("act", {}), ("act", {}))
    lines = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    acts = [line for line in lines if line["method"] in ("act", "tools/call:act")]
    assert [line["outcome"] for line in acts] == ["ok", "ok"]
    assert len({line["call_id"] for line in acts}) == 2
    batches = {line["batch"] for line in acts}
    assert len(batches) == 1
    assert (batches != {None}) == (way.name == "tool")


async def check_log(way: Way, _folder: Path) -> None:
    """Each call has its record, also one that is refused."""
    logger = logging.getLogger("wirecall")
    log = Collector()
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    app = way.make_app()
    app.query(name="look")(lambda: 1)
    app.command(name="act")(lambda: 2)
    try:
        async with closing(app):
            await way.send(app, ("look", {}), ("act", {}), ("act", {"x": 1}))
    finally:
        logger.removeHandler(log)
        logger.setLevel(level)
    seen = [
        (facts["method"].rpartition(":")[2], facts["outcome"])
        for facts in map(vars, log.records)
        if "outcome" in facts
    ]
    expected = [("look", "ok"), ("act", "ok"), ("act", "error")]
    assert [each for each in seen if each[0] != "batch"] == expected
    if way.name == "tool":
        batches = {getattr(record, "batch", None) for record in log.records}
        outer = next(each for each in log.records if getattr(each, "method", "").endswith(":batch"))
        assert batches == {None, outer.__dict__["call_id"]}


async def check_trace(way: Way, _folder: Path) -> None:
    """Each call has its span and is measured; a batch tool's span is the parent of its entries'."""
    provider = TracerProvider(shutdown_on_exit=False)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    reader = InMemoryMetricReader()
    tracing = Tracing(provider, meters=MeterProvider([reader], shutdown_on_exit=False))
    app = way.make_app(middleware=[tracing])
    app.query(name="look")(lambda: 1)
    app.command(name="act")(lambda: 2)
    way.headers = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
    async with closing(app):
        await way.send(app, ("look", {}), ("act", {}))
    spans = {span.name.rpartition(" ")[2]: span for span in exporter.get_finished_spans()}
    parents = {name: span.parent and span.parent.span_id for name, span in spans.items()}
    assert {span.context.trace_id for span in spans.values() if span.context} == {7}
    if way.name == "tool":
        outer = spans["batch"].context
        assert outer is not None
        assert parents == {"batch": 9, "look": outer.span_id, "act": outer.span_id}
    else:
        assert parents == {"look": 9, "act": 9}
    found: Any = reader.get_metrics_data()
    points = found.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
    assert sum(point.count for point in points) == len(spans)


async def check_concurrency(way: Way, _folder: Path) -> None:
    """At most `Limits.concurrency` calls of one message run at once."""
    app = way.make_app(limits=Limits(concurrency=2))
    running = 0
    most = 0

    @app.query
    async def look() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    async with closing(app):
        await way.send(app, *[("look", {})] * 5)
    assert most <= 2


CHECKS = {
    name.removeprefix("check_"): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


@pytest.mark.parametrize("name", ["one by one", "array", "tool"])
@pytest.mark.parametrize("check", CHECKS)
async def test_batch_entry_escapes_no_check(check: str, name: str, tmp_path: Path) -> None:
    """A5: a table of checks, for single calls, arrays and the batch tool."""
    async with asyncio.timeout(60):
        await CHECKS[check](Way(name), tmp_path)
