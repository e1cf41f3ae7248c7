"""Load on a server: calls that are due at fixed times, whether or not earlier ones were answered.

1. The load is open: a schedule decides when a call is due, not the server's last answer. The
   latency of a call begins when it is due, so a server that stops for a second delays all calls of
   that second, and the figures show it ("coordinated omission" would hide it).
2. `Load` takes the next call of the schedule on each free connection. If none is free, the call
   starts late. Calls that did not start before the end were never sent; they count with their age.
3. A call is not repeated when it fails. After a cut by `--cut` the load repeats it itself.
4. `Twins` sends commands a second time with the same key, and compares the answers.
5. `Relay` is between a connection and an HTTP server, and drops the connection when it is armed.
"""

import asyncio
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import accumulate
from typing import Any, Literal, TypeVar, cast
from urllib.parse import urlsplit

from msgspec import Struct, field

from wirecall.cli.failures import failure_of
from wirecall.cli.figures import Arrivals, Latencies, arrivals
from wirecall.cli.terminal import result_of
from wirecall.client.client import Client
from wirecall.client.delivery import Clock, RealClock, mint_key
from wirecall.errors import (
    AuditUnavailable,
    Busy,
    CallFailed,
    ConnectionLost,
    KeyInProgress,
    LedgerUnavailable,
    NotSent,
    RpcError,
    WirecallError,
)
from wirecall.protocol.messages import encode

T = TypeVar("T")

# Stands for the number of the call in the strings of its params. The first number has so many
# digits that it is not confused with another number in an answer.
NUMBER = "{n}"
FIRST = 1_000_000
# Seconds after which a call counts as started late.
LATE = 0.010
# The share of commands that `--keys` sends twice.
TWICE = 0.1
# Attempts after a cut, and the seconds before the second of them; each later pause is doubled.
ATTEMPTS = 6
PAUSE = 0.05
CHUNK = 1 << 16
# Seconds between two looks at a connection whose answer must not be read.
GLANCE = 0.001

# After these a command that was cut may be sent again.
_AGAIN = (NotSent, ConnectionLost, KeyInProgress, Busy, LedgerUnavailable, AuditUnavailable)


class CallNumber:
    """Stands for the number of the call where a method takes a number."""

    def __repr__(self) -> str:
        return NUMBER


CALL_NUMBER = CallNumber()


class Call(Struct, frozen=True):
    """One kind of call of the mix.

    In its params, `CALL_NUMBER` stands for the number of the call, and so does `{n}` in strings.
    """

    name: str
    params: Any
    weight: float = 1.0
    # The method takes an idempotency key, and gets one.
    is_keyed: bool = False

    def request(self, number: int) -> "Request":
        """Return the call with this number, with a new key if it takes one."""
        params = self.params
        if NUMBER in str(params):
            params = _numbered(params, str(number))
        key = None
        if self.is_keyed:
            key = mint_key()
        return Request(self, params, key, str(number))


def _numbered(value: Any, number: str) -> Any:
    if value is CALL_NUMBER:
        return int(number)
    if isinstance(value, str):
        return value.replace(NUMBER, number)
    if isinstance(value, list):
        return [_numbered(each, number) for each in value]
    if isinstance(value, dict):
        return {name: _numbered(each, number) for name, each in value.items()}
    return value


class Request(Struct, frozen=True):
    """One call. It may be sent more than once."""

    call: Call
    params: Any
    key: str | None
    number: str


class Answer(Struct, frozen=True):
    """The outcome of a call."""

    request: Request
    # The result as JSON.
    result: bytes = b""
    error: WirecallError | None = None
    replayed: bool = False

    @property
    def is_final(self) -> bool:
        """Whether the server answered, with a result or an error, and not about a duplicate."""
        if self.error is None:
            return True
        return isinstance(self.error, RpcError) and not isinstance(self.error, _AGAIN)

    @property
    def shape(self) -> str:
        """The answer without the number of its call: equal calls have equal ones."""
        return self.says().replace(self.request.number, NUMBER)

    def says(self) -> str:
        """Return what the server answered, to compare it and to show it."""
        if isinstance(self.error, RpcError):
            return f"error {self.error.code}: {self.error.message}"
        return self.result.decode()


class Mix:
    """The calls to choose from, each as often as its weight says."""

    def __init__(self, calls: Sequence[Call], seed: int = 0) -> None:
        self._calls = list(calls)
        self._weights = list(accumulate(call.weight for call in calls))
        self._chance = random.Random(seed)
        self._taken = FIRST

    def take(self, count: int) -> list[Request]:
        """Return the next calls."""
        chosen = self._calls * count
        if len(self._calls) > 1:
            chosen = self._chance.choices(self._calls, cum_weights=self._weights, k=count)
        first = self._taken + 1
        self._taken += count
        return [call.request(number) for number, call in enumerate(chosen, first)]


# --- figures --------------------------------------------------------------------------------------


class Failure(Struct):
    """Errors of one kind."""

    type: str
    message: str
    code: int | None = None
    count: int = 0
    # The exit code of the command if all calls fail like this.
    exit: int = 0


class Difference(Struct, frozen=True):
    """Two answers to one key that are not equal."""

    method: str
    key: str
    first: str
    second: str


class Equality(Struct):
    """What is known about calls that were sent more than once with one key."""

    compared: int = 0
    differ: int = 0
    # The server marked the second answer as a replay.
    replayed: int = 0
    # One of the two was not answered, or refused because the other was in progress.
    unanswered: int = 0
    example: Difference | None = None

    def compare(self, one: Answer, other: Answer) -> None:
        if not (one.is_final and other.is_final):
            self.unanswered += 1
            return
        self.compared += 1
        self.replayed += one.replayed or other.replayed
        if one.says() == other.says():
            return
        self.differ += 1
        if self.example is None:
            request = one.request
            key = request.key or ""
            self.example = Difference(request.call.name, key, one.says(), other.says())


class Cuts(Struct):
    """What is known about calls whose connection was dropped."""

    cut: int = 0
    # Sent again with the same key, and without a key.
    with_key: int = 0
    without_key: int = 0
    # Answered after the cut; of these, with an answer that the server marked as a replay.
    answered: int = 0
    replayed: int = 0
    failed: int = 0
    # Answered after the cut, by a method that answers all calls without a cut alike; of these,
    # answers that differ: the call may have had its effect twice.
    compared: int = 0
    differ: int = 0
    example: Difference | None = None


class Shapes:
    """The answers to calls without a cut, and the answers after a cut to compare with them."""

    def __init__(self) -> None:
        # By call, two of them at most: more are not needed to see that they vary.
        self._usual: dict[int, set[str]] = {}
        self._after_cut: Counter[tuple[int, str]] = Counter()
        self._names: dict[int, str] = {}

    def usual(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            known = self._usual.setdefault(id(answer.request.call), set())
            if answer.is_final and len(known) < 2:
                known.add(answer.shape)

    def after_cut(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            if answer.is_final:
                call = answer.request.call
                self._names[id(call)] = call.name
                self._after_cut[id(call), answer.shape] += 1

    def compare(self, cuts: Cuts) -> None:
        """Write the comparison into the figures."""
        cuts.compared = 0
        cuts.differ = 0
        for (call, shape), count in self._after_cut.items():
            usual = self._usual.get(call, set())
            if len(usual) != 1:
                continue
            cuts.compared += count
            if shape not in usual:
                cuts.differ += count
                cuts.example = Difference(self._names[call], "", min(usual), shape)


class Figures(Struct):
    """What was measured. Counts are of calls; an array has several."""

    due: int = 0
    answered: int = 0
    unsent: int = 0
    # Started late: no connection was free, or this process was busy.
    waited: int = 0
    lagged: int = 0
    latest: float = 0.0
    seconds: float = 0.0
    latencies: Latencies = field(default_factory=Latencies)
    failures: dict[str, Failure] = {}
    twins: Equality = field(default_factory=Equality)
    cuts: Cuts = field(default_factory=Cuts)
    shapes: Shapes = field(default_factory=Shapes)

    @property
    def failed(self) -> int:
        return sum(failure.count for failure in self.failures.values())

    @property
    def late(self) -> int:
        return self.waited + self.lagged

    @property
    def rate(self) -> float:
        """Calls that were answered per second."""
        return self.answered / self.seconds if self.seconds else 0.0

    def started(self, late: float, is_free: bool, count: int) -> None:
        """Note how late a call started, on a connection that was free when it was due or not."""
        self.latest = max(self.latest, late)
        if late <= LATE:
            return
        if is_free:
            self.lagged += count
        else:
            self.waited += count

    def ended(self, seconds: float, answers: Sequence[Answer]) -> None:
        """Count calls, and the time from when they were due to their outcome."""
        self.latencies.add(seconds, len(answers))
        for answer in answers:
            if answer.error is None:
                self.answered += 1
            else:
                self._failed(answer.error)

    def _failed(self, error: WirecallError) -> None:
        code = error.code if isinstance(error, RpcError) else None
        name = str(code or type(error).__name__)
        if name not in self.failures:
            failure = failure_of(error)
            text = f"{failure.what} {failure.why}".strip()
            self.failures[name] = Failure(failure.type, text, code, exit=failure.exit)
        self.failures[name].count += 1


# --- connections ----------------------------------------------------------------------------------


class Connection:
    """One client of the server; with `churn`, a new one for each message."""

    def __init__(
        self, connect: Callable[[], Client], *, churn: bool = False, relay: "Relay | None" = None
    ) -> None:
        self.relay = relay
        self._connect = connect
        self._churn = churn
        self._client: Client | None = None

    async def open(self) -> None:
        if self._churn:
            return
        self._client = self._connect()
        await self._client.__aenter__()
        if self._client.revision is None:
            # JSON-RPC has no handshake: the answer, also an error, shows that the server runs.
            with suppress(WirecallError):
                await self._client.call("rpc.discover", query=True)

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.aclose()

    async def send(self, requests: Sequence[Request]) -> list[Answer]:
        """Make one call, or several in one array; return the outcomes."""
        if self._client is not None:
            return await sent(self._client, requests)
        try:
            async with self._connect() as client:
                return await sent(client, requests)
        except (CallFailed, RpcError) as error:
            return [Answer(request, error=error) for request in requests]


async def sent(client: Any, requests: Sequence[Request]) -> list[Answer]:
    """Make calls with a client; return their outcomes."""
    async with client.batch() as batch:
        add = batch.call_tool if client.revision else batch.call
        # False: the client must not add a key.
        entries = [add(each.call.name, each.params, key=each.key or False) for each in requests]
    answers = []
    for request, entry in zip(requests, entries, strict=True):
        result = b""
        if entry.error is None:
            result = encode(result_of(entry.result()))
        answers.append(Answer(request, result, entry.error, entry.replayed))
    return answers


class Relay:
    """Passes bytes between a client and a server on this machine, and drops a connection on demand.

    It is one for each connection of the load, so that it drops the connection of the next call.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._parts = parts
        self._host = parts.hostname or ""
        self._port = parts.port or 80
        self._server: asyncio.Server | None = None
        self._armed: Literal["", "request", "answer"] = ""
        self._open: set[asyncio.Task[None]] = set()
        self.url = url

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = self._parts._replace(netloc=f"127.0.0.1:{port}").geturl()

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def arm(self, where: Literal["request", "answer"]) -> None:
        """Drop the connection of the next request: behind it, or at the beginning of its answer."""
        self._armed = where

    def disarm(self) -> bool:
        """Return whether no connection was dropped, and drop none."""
        was_armed = bool(self._armed)
        self._armed = ""
        return was_armed

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            # A client that left, a server that cannot be reached, or the end of the load.
            with suppress(OSError, asyncio.CancelledError):
                await self._pass(reader, writer)
        finally:
            self._open.discard(task)
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(self._host, self._port)
        dropped = asyncio.Event()
        work = [
            asyncio.create_task(self._requests(reader, requests, dropped)),
            asyncio.create_task(_copied(answers, writer)),
            asyncio.create_task(dropped.wait()),
        ]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            requests.transport.abort()

    async def _requests(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, dropped: asyncio.Event
    ) -> None:
        while data := await source.read(CHUNK):
            where = self._armed
            self._armed = ""
            if where:
                cast(asyncio.Transport, sink.transport).pause_reading()
            if where == "answer":
                watch = asyncio.create_task(_drop_unread(sink, dropped))
                self._open.add(watch)
                watch.add_done_callback(self._open.discard)
            sink.write(data)
            await sink.drain()
            if where == "request":
                dropped.set()


async def _copied(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(CHUNK):
        sink.write(data)
        await sink.drain()


async def _drop_unread(connection: asyncio.StreamWriter, dropped: asyncio.Event) -> None:
    """Drop a connection when an answer is here, without reading it: the server can see that."""
    # A second handle of the connection must be closed before the first one: the connection lasts
    # as long as one of them.
    with (
        socket.socket(fileno=os.dup(connection.get_extra_info("socket").fileno())) as peeking,
        suppress(OSError),
    ):
        while not dropped.is_set() and not _has_data(peeking):  # noqa: ASYNC110  # no event says it
            await asyncio.sleep(GLANCE)
    dropped.set()


def _has_data(connection: socket.socket) -> bool:
    """Return whether there is something to read, or the end."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    return True


# --- the load -------------------------------------------------------------------------------------


class Load:
    """Makes the calls of a mix on some connections.

    `depth` calls are in flight on a connection at most. With `twice`, some commands are sent twice,
    the second time on `spare` if it is given, else on the same connection.
    """

    def __init__(
        self,
        mix: Mix,
        connections: Sequence[Connection],
        *,
        depth: int = 1,
        batch: int = 1,
        twice: bool = False,
        spare: Connection | None = None,
        cut: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        self._mix = mix
        self._connections = connections
        self._depth = depth
        self._batch = batch
        self._twice = twice
        self._spare = spare
        self._cut = cut
        self._clock: Clock = clock or RealClock()
        self._chance = random.Random(1)
        # Second calls in flight, which do not delay the schedule.
        self._checks: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["Load"]:
        """Open all connections in a block."""
        used = [*self._connections]
        if self._spare is not None:
            used.append(self._spare)
        try:
            for connection in used:
                if connection.relay is not None:
                    await connection.relay.open()
            await asyncio.gather(*(connection.open() for connection in used))
            yield self
        finally:
            for check in self._checks:
                check.cancel()
            await asyncio.gather(*self._checks, return_exceptions=True)
            for connection in used:
                await connection.aclose()
                if connection.relay is not None:
                    await connection.relay.aclose()

    async def at_full_speed(self, seconds: float) -> float:
        """Make calls one after another on each connection; return the calls answered per second.

        The first half of the time does not count.
        """
        start = self._clock.time()
        half = start + seconds / 2
        end = start + seconds
        counted = 0

        async def work(connection: Connection) -> None:
            nonlocal counted
            while self._clock.time() < end:
                answers = await connection.send(self._mix.take(self._batch))
                if half <= self._clock.time() < end:
                    counted += sum(1 for answer in answers if answer.error is None)

        await self._on_each(work)
        return counted / (end - half)

    async def at_rate(
        self,
        rate: float,
        seconds: float,
        figures: Figures,
        kind: Arrivals = "even",
        seed: int = 0,
    ) -> None:
        """Make calls when they are due, so many per second, and count them in the figures."""
        count = max(round(rate * seconds / self._batch), 1)
        schedule = arrivals(count, seconds, kind, seed)
        taken = 0
        unsent_since: float | None = None
        clock = self._clock
        start = clock.time()
        end = start + seconds

        async def work(connection: Connection) -> None:
            nonlocal taken, unsent_since
            for offset in schedule:
                due = start + offset
                now = clock.time()
                if now >= end:
                    if unsent_since is None:
                        unsent_since = due
                    return
                taken += 1
                is_free = now <= due
                if now < due:
                    await clock.sleep(due - now)
                figures.started(clock.time() - due, is_free, self._batch)
                answers = await self._made(connection, figures)
                figures.ended(clock.time() - due, answers)

        await self._on_each(work)
        while self._checks:
            await asyncio.gather(*self._checks)
        figures.shapes.compare(figures.cuts)
        figures.due += count * self._batch
        figures.seconds += max(clock.time() - start, seconds)
        if taken < count and unsent_since is not None:
            figures.unsent += (count - taken) * self._batch
            figures.latencies.add_unsent(end - unsent_since, (count - taken) * self._batch)

    async def _on_each(self, work: Callable[[Connection], Any]) -> None:
        async with asyncio.TaskGroup() as group:
            for connection in self._connections:
                for _ in range(self._depth):
                    group.create_task(work(connection))

    # --- one message ------------------------------------------------------------------------------

    async def _made(self, connection: Connection, figures: Figures) -> list[Answer]:
        """Make the next calls; cut their connection, or send them twice, as often as asked."""
        requests = self._mix.take(self._batch)
        if connection.relay is not None and self._chance.random() < self._cut:
            return await self._after_cut(connection, connection.relay, requests, figures)
        has_keys = any(request.key for request in requests)
        if not self._twice or not has_keys or self._chance.random() >= TWICE:
            answers = await connection.send(requests)
            if self._cut:
                figures.shapes.usual(answers)
            return answers
        other = self._spare or connection
        # Half of them race with the first, half come after its answer.
        if self._chance.random() < 0.5:
            twin = self._check(other.send(requests))
            answers = await connection.send(requests)
            self._check(self._compared(answers, twin, figures))
            return answers
        answers = await connection.send(requests)
        self._check(self._compared(answers, other.send(requests), figures))
        return answers

    async def _after_cut(
        self, connection: Connection, relay: Relay, requests: list[Request], figures: Figures
    ) -> list[Answer]:
        """Make calls whose connection is dropped, and make them again until they are answered."""
        relay.arm("request" if self._chance.random() < 0.5 else "answer")
        answers = await connection.send(requests)
        if relay.disarm():
            return answers
        cuts = figures.cuts
        cuts.cut += len(requests)
        if all(answer.is_final for answer in answers):  # the answer resumed on another connection
            cuts.answered += len(requests)
            return answers
        cuts.with_key += sum(1 for request in requests if request.key)
        cuts.without_key += sum(1 for request in requests if not request.key)
        pause = PAUSE
        for _ in range(ATTEMPTS):
            answers = await connection.send(requests)
            if not any(isinstance(answer.error, _AGAIN) for answer in answers):
                break
            await self._clock.sleep(pause)
            pause *= 2
        for answer in answers:
            cuts.failed += not answer.is_final
            cuts.answered += answer.is_final
            cuts.replayed += answer.replayed
        figures.shapes.after_cut(answers)
        if self._twice and any(request.key for request in requests):
            other = self._spare or connection
            self._check(self._compared(answers, other.send(requests), figures))
        return answers

    def _check(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start work that does not delay the schedule."""
        task = asyncio.create_task(work)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)
        return task

    async def _compared(
        self, answers: list[Answer], again: Awaitable[list[Answer]], figures: Figures
    ) -> None:
        for one, other in zip(answers, await again, strict=True):
            if one.request.key is not None:
                figures.twins.compare(one, other)


def most_common(figures: Figures) -> list[Failure]:
    """Return the kinds of errors, the most frequent first."""
    counts = Counter({name: failure.count for name, failure in figures.failures.items()})
    return [figures.failures[name] for name, _ in counts.most_common()]
