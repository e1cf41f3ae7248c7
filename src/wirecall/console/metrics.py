"""The numbers of a server for Prometheus, summed over its workers, in the text format 0.0.4.

The listener is for `/metrics` alone. On another address than the loopback it needs a token, which a
scraper sends as `Authorization: Bearer TOKEN`.
"""

import asyncio
import hmac
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from wirecall.console.collect import Collector
from wirecall.console.ring import BOUNDS
from wirecall.console.source import Refusal
from wirecall.errors import UsageError
from wirecall.transports.headers import is_loopback
from wirecall.transports.http_server import HttpServer
from wirecall.transports.request import HttpError, HttpRequest
from wirecall.transports.serve import bind, serve_until
from wirecall.version import __version__

if TYPE_CHECKING:
    import socket

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATH = "/metrics"
# Seconds for requests in flight when the listener stops.
GRACE = 1.0

# Every metric: its type, and its help.
METRICS = {
    "wirecall_info": ("gauge", "The version of wirecall; the value is 1."),
    "wirecall_start_time_seconds": ("gauge", "When the first worker that was seen began."),
    "wirecall_workers": ("gauge", "Worker processes that answer."),
    "wirecall_workers_ended_total": ("counter", "Worker processes that have ended."),
    "wirecall_calls_total": ("counter", "Calls that have ended, by method and kind."),
    "wirecall_errors_total": (
        "counter",
        "Calls that ended with an error, by method and code. The code 0 is a cancelled call.",
    ),
    "wirecall_replays_total": ("counter", "Calls that were answered from the ledger, by method."),
    "wirecall_lost_answers_total": (
        "counter",
        "Answers to calls without a key that did not reach their callers, by method.",
    ),
    "wirecall_call_duration_seconds": (
        "histogram",
        "Time from the message or the start of an entry to the end of the call, by method.",
    ),
    "wirecall_in_flight": ("gauge", "Calls that wait for something."),
    "wirecall_queued": ("gauge", "Entries of batches that have not begun."),
    "wirecall_ledger_up": ("gauge", "1 if the ledger answers, 0 if it does not."),
    "wirecall_ledger_records": ("gauge", "Records of the ledger, by state."),
    "wirecall_ledger_round_trips_total": ("counter", "Round trips to the ledger, by operation."),
    "wirecall_ledger_round_trip_seconds_total": (
        "counter",
        "Time of the round trips to the ledger, by operation.",
    ),
    "wirecall_ledger_failures_total": (
        "counter",
        "Round trips to the ledger that failed, by operation.",
    ),
    "wirecall_upstream_up": (
        "gauge",
        "1 if the last connection to the upstream of a gateway was made, else 0.",
    ),
    "wirecall_upstream_in_flight": ("gauge", "Calls of the upstream that have begun."),
    "wirecall_upstream_queued": ("gauge", "Calls of the upstream that wait for a place."),
    "wirecall_upstream_starts_total": ("counter", "Starts of the upstream's process."),
    "wirecall_uncounted_calls_total": (
        "counter",
        "Calls that ended faster than they could be counted by method.",
    ),
}

# The labels of each metric that has some.
LABELS = {
    "wirecall_info": ("version",),
    "wirecall_calls_total": ("method", "kind"),
    "wirecall_errors_total": ("method", "code"),
    "wirecall_replays_total": ("method",),
    "wirecall_lost_answers_total": ("method",),
    "wirecall_call_duration_seconds": ("method", "le"),
    "wirecall_ledger_records": ("state",),
    "wirecall_ledger_round_trips_total": ("operation",),
    "wirecall_ledger_round_trip_seconds_total": ("operation",),
    "wirecall_ledger_failures_total": ("operation",),
    "wirecall_upstream_up": ("upstream",),
    "wirecall_upstream_in_flight": ("upstream",),
    "wirecall_upstream_queued": ("upstream",),
    "wirecall_upstream_starts_total": ("upstream",),
}

Sample = tuple[str, dict[str, str], float]


async def render(collector: Collector) -> str:
    """Return all metrics in the text format of Prometheus."""
    await collector.read()
    records: dict[str, Any] | None = None
    with suppress(Refusal):
        records = (await collector.workers.ask("counts"))["counts"]
    by_name: dict[str, list[Sample]] = {name: [] for name in METRICS}
    for name, sample in _samples(collector, records):
        by_name[name].append(sample)
    lines: list[str] = []
    for name, (kind, text) in METRICS.items():
        lines.append(f"# HELP {name} {text}")
        lines.append(f"# TYPE {name} {kind}")
        for sample_name, labels, value in by_name[name]:
            lines.append(f"{sample_name}{_labels(labels)} {_number(value)}")
    return "\n".join(lines) + "\n"


def _samples(collector: Collector, records: dict[str, Any] | None) -> Iterator[tuple[str, Sample]]:
    """Yield every sample, with the name of its metric."""

    def one(name: str, value: float, **labels: str) -> tuple[str, Sample]:
        return name, (name, labels, value)

    total = collector.workers.total()
    yield one("wirecall_info", 1, version=__version__)
    since = [worker.numbers.since for worker in collector.workers]
    yield one("wirecall_start_time_seconds", min(since, default=collector.since))
    yield one("wirecall_workers", len(collector.workers.alive()))
    yield one("wirecall_workers_ended_total", collector.workers.ended)
    for method, numbers in sorted(total.methods.items()):
        kind = numbers.kind or "unknown"
        yield one("wirecall_calls_total", numbers.calls, method=method, kind=kind)
        for code, count in sorted(numbers.errors.items()):
            yield one("wirecall_errors_total", count, method=method, code=str(code))
        yield one("wirecall_replays_total", numbers.replays, method=method)
        yield one("wirecall_lost_answers_total", numbers.undelivered, method=method)
        name = "wirecall_call_duration_seconds"
        running = 0
        for bound, count in zip((*BOUNDS, float("inf")), numbers.buckets, strict=True):
            running += count
            labels = {"method": method, "le": _bound(bound)}
            yield name, (f"{name}_bucket", labels, running)
        yield name, (f"{name}_sum", {"method": method}, numbers.seconds)
        yield name, (f"{name}_count", {"method": method}, running)
    yield one("wirecall_in_flight", total.in_flight)
    yield one("wirecall_queued", total.queued)
    yield one("wirecall_ledger_up", int(records is not None))
    for state, count in (records or {}).items():
        yield one("wirecall_ledger_records", count, state=state)
    for operation, trip in sorted(total.trips.items()):
        yield one("wirecall_ledger_round_trips_total", trip.number, operation=operation)
        yield one("wirecall_ledger_round_trip_seconds_total", trip.seconds, operation=operation)
        yield one("wirecall_ledger_failures_total", trip.failed, operation=operation)
    for upstream, facts in collector.workers.upstream_states().items():
        yield one("wirecall_upstream_up", int(facts["up"]), upstream=upstream)
        yield one("wirecall_upstream_in_flight", facts["in_flight"], upstream=upstream)
        yield one("wirecall_upstream_queued", facts["queued"], upstream=upstream)
        yield one("wirecall_upstream_starts_total", facts["starts"], upstream=upstream)
    yield one("wirecall_uncounted_calls_total", total.missed)


def _bound(bound: float) -> str:
    if bound == float("inf"):
        return "+Inf"
    return f"{bound:g}"


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return repr(float(value))


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    shown = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{shown}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class MetricsListener:
    """Serves `/metrics` on its own port."""

    def __init__(
        self,
        collector: Collector,
        host: str,
        port: int,
        token: str | None,
        *,
        shares: bool = False,
    ) -> None:
        if token is None and not is_loopback(host):
            raise UsageError(
                f"/metrics cannot be served on {host} without a token.",
                "the names of methods and their numbers would be open to the network",
                "--metrics-token env:NAME, or --metrics 127.0.0.1:PORT",
            )
        self._collector = collector
        self._host = host
        self._port = port
        # The port is still that of the listener that this one replaces.
        self._shares = shares
        self._token = token
        self.url = ""
        self._stop = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen; return when connections are accepted."""
        bound = bind(self._host, self._port, again=self._shares)
        host, port = bound.getsockname()[:2]
        if ":" in host:
            host = f"[{host}]"
        self.url = f"http://{host}:{port}{PATH}"
        # A token protects against other web pages, so the name of the server does not matter.
        hosts = ["*"] if self._token is not None else []
        server = HttpServer({PATH: self._answer}, hosts=hosts)
        is_open = asyncio.Event()
        self._running = asyncio.create_task(self._serve(server, bound, is_open.set))
        opened = asyncio.create_task(is_open.wait())
        await asyncio.wait({self._running, opened}, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if self._running.done():
            self._running.result()  # it raises

    async def _serve(
        self, server: HttpServer, bound: "socket.socket", serving: Callable[[], None]
    ) -> None:
        with bound:
            await serve_until(
                server, bound, grace=GRACE, stop=self._stop, serving=serving, signals=False
            )

    async def _answer(self, request: HttpRequest) -> None:
        if request.method not in ("GET", "HEAD"):
            raise HttpError(405, "ask with GET", [("allow", "GET, HEAD")])
        if self._token is not None:
            given = request.headers.get("authorization") or ""
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                raise HttpError(
                    401, "expected Authorization: Bearer TOKEN", [("www-authenticate", "Bearer")]
                )
        text = await render(self._collector)
        await request.respond(200, text.encode(), CONTENT_TYPE, [("cache-control", "no-store")])

    async def aclose(self) -> None:
        self._stop.set()
        if self._running is not None:
            with suppress(asyncio.CancelledError):
                await self._running
