"""The load of `wirecall bench`: latency from when a call is due, late and unsent calls, twins, cuts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Literal

import pytest

from wirecall.cli.load import (
    FIRST,
    Answer,
    Call,
    Connection,
    Cuts,
    Equality,
    Figures,
    Load,
    Mix,
    Relay,
    Request,
    Shapes,
    most_common,
)
from wirecall.errors import ConnectionLost, DomainError, KeyInProgress, TimedOut, WirecallError

PRICE = Call("price", {"sku": "tea"})
CHARGE = Call("charge", {"order": "{n}"}, is_keyed=True)


class Clock:
    """A clock that moves when something sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def time(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class Scripted(Connection):
    """A server whose answer to each message takes a time, and is made by a function."""

    def __init__(
        self,
        clock: Clock,
        takes: Callable[[int], float],
        answer: Callable[[Request], Answer] = lambda request: Answer(request, b"1"),
    ) -> None:
        super().__init__(lambda: pytest.fail("nothing connects"), churn=True)
        self.requests: list[Request] = []
        self._clock = clock
        self._takes = takes
        self._answer = answer

    async def send(self, requests: Sequence[Request]) -> list[Answer]:
        number = len(self.requests)
        self.requests.extend(requests)
        await self._clock.sleep(self._takes(number))
        return [self._answer(request) for request in requests]


def answered(request: Request, result: bytes = b"1", error: WirecallError | None = None) -> Answer:
    return Answer(request, result, error)


async def test_latency_begins_when_a_call_is_due() -> None:
    """A pause of the server delays all calls that are due in it, and each of them counts."""
    clock = Clock()
    server = Scripted(clock, lambda number: 0.5 if number == 2 else 0.01)
    figures = Figures()
    await Load(Mix([PRICE]), [server], clock=clock).at_rate(10, 1.0, figures)
    assert (figures.due, figures.answered, figures.unsent) == (10, 10, 0)
    # Due at 0.2, 0.3, 0.4, 0.5, 0.6: the answers come at 0.7, 0.71, 0.72, 0.73, 0.74.
    assert figures.latencies.total == pytest.approx(
        0.5 + 0.41 + 0.32 + 0.23 + 0.14 + 5 * 0.01 + 0.04
    )
    assert figures.latencies.max == pytest.approx(0.5)
    assert figures.latencies.percentile(60) > 0.1
    assert (figures.waited, figures.lagged) == (5, 0)
    assert figures.latest == pytest.approx(0.4)


async def test_call_that_a_free_connection_starts_late_is_the_fault_of_this_process() -> None:
    class Slow(Clock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds + 0.02)

    clock = Slow()
    figures = Figures()
    server = Scripted(clock, lambda _: 0.0)
    await Load(Mix([PRICE]), [server], clock=clock).at_rate(10, 1.0, figures)
    assert figures.waited == 0
    assert figures.lagged == 9  # the first is due at once


async def test_calls_that_did_not_start_before_the_end_count_with_their_age() -> None:
    clock = Clock()
    figures = Figures()
    server = Scripted(clock, lambda _: 0.5)
    await Load(Mix([PRICE]), [server], clock=clock).at_rate(10, 1.0, figures)
    assert (figures.due, figures.answered, figures.unsent) == (10, 2, 8)
    assert figures.latencies.count == 10
    # The oldest was due at 0.2.
    assert figures.latencies.max == pytest.approx(0.9)
    assert figures.rate == pytest.approx(2.0)


async def test_array_counts_each_of_its_calls() -> None:
    clock = Clock()
    figures = Figures()
    server = Scripted(clock, lambda _: 0.0)
    await Load(Mix([PRICE]), [server], batch=5, clock=clock).at_rate(10, 1.0, figures)
    assert (figures.due, figures.answered, figures.latencies.count) == (10, 10, 10)
    assert figures.rate == pytest.approx(10)


async def test_full_speed_counts_the_second_half() -> None:
    clock = Clock()
    server = Scripted(clock, lambda _: 0.125 if clock.now < 101 else 0.0078125)
    found = await Load(Mix([PRICE]), [server], clock=clock).at_full_speed(2.0)
    assert found == pytest.approx(128, abs=2)


async def test_errors_are_counted_by_code() -> None:
    clock = Clock()
    errors: list[WirecallError] = [TimedOut("late"), DomainError(7, "no"), DomainError(7, "never")]

    def answer(request: Request) -> Answer:
        return answered(request, error=errors.pop() if errors else None)

    figures = Figures()
    server = Scripted(clock, lambda _: 0.0, answer)
    await Load(Mix([PRICE]), [server], clock=clock).at_rate(10, 1.0, figures)
    assert (figures.answered, figures.failed) == (7, 3)
    assert [(each.code, each.type, each.count, each.exit) for each in most_common(figures)] == [
        (7, "remote", 2, 5),
        (None, "timed_out", 1, 6),
    ]


# --- the mix --------------------------------------------------------------------------------------


def test_mix_takes_calls_by_weight_and_keys_only_keyed_ones() -> None:
    requests = Mix([often := Call("a", None, 3.0), Call("b", None, 1.0, True)]).take(4000)
    share = sum(1 for each in requests if each.call is often) / len(requests)
    assert share == pytest.approx(0.75, abs=0.05)
    assert all(bool(each.key) == (each.call.name == "b") for each in requests)
    keys = [each.key for each in requests if each.key]
    assert len(set(keys)) == len(keys)


def test_mix_numbers_calls_in_their_strings() -> None:
    call = Call("x", {"a": "{n}", "b": ["no {n}", 5, {"c": "{n}{n}"}], "d": None})
    one, two = Mix([call]).take(2)
    number = str(FIRST + 1)
    assert one.params == {"a": number, "b": [f"no {number}", 5, {"c": number * 2}], "d": None}
    assert two.params["a"] == str(FIRST + 2)
    assert Mix([PRICE]).take(1)[0].params is PRICE.params


# --- twins ----------------------------------------------------------------------------------------


def request_of(call: Call = CHARGE, number: int = FIRST) -> Request:
    return call.request(number)


@pytest.mark.parametrize(
    ("one", "other", "compared", "differ", "unanswered"),
    [
        ((b"1", None), (b"1", None), 1, 0, 0),
        ((b"1", None), (b"2", None), 1, 1, 0),
        ((b"", DomainError(7, "no")), (b"", DomainError(7, "no")), 1, 0, 0),
        ((b"", DomainError(7, "no")), (b"1", None), 1, 1, 0),
        ((b"1", None), (b"", ConnectionLost("cut")), 0, 0, 1),
        ((b"1", None), (b"", KeyInProgress()), 0, 0, 1),
        ((b"", TimedOut("late")), (b"1", None), 0, 0, 1),
    ],
)
def test_equality_compares_answers_to_one_key(
    one: tuple[bytes, WirecallError | None],
    other: tuple[bytes, WirecallError | None],
    compared: int,
    differ: int,
    unanswered: int,
) -> None:
    request = request_of()
    twins = Equality()
    twins.compare(answered(request, *one), answered(request, *other))
    assert (twins.compared, twins.differ, twins.unanswered) == (compared, differ, unanswered)
    assert (twins.example is not None) == bool(differ)


async def test_load_sends_a_tenth_of_the_commands_twice_with_one_key() -> None:
    clock = Clock()
    server = Scripted(clock, lambda _: 0.0)
    spare = Scripted(clock, lambda _: 0.0, lambda request: answered(request, b"2"))
    figures = Figures()
    load = Load(Mix([CHARGE, PRICE]), [server], twice=True, spare=spare, clock=clock)
    await load.at_rate(1000, 1.0, figures)
    twice = {each.key for each in spare.requests}
    assert 25 < len(twice) < 90  # a tenth of the half that takes keys
    assert twice <= {each.key for each in server.requests}
    assert figures.twins.compared == figures.twins.differ == len(twice)
    assert figures.due == 1000


# --- cuts -----------------------------------------------------------------------------------------


def test_shapes_find_an_answer_that_is_unlike_all_others() -> None:
    shapes = Shapes()
    cuts = Cuts()
    usual = [request_of(number=FIRST + number) for number in range(3)]
    shapes.usual([answered(each, b'{"n":%s,"paid":1}' % each.number.encode()) for each in usual])
    shapes.after_cut([answered(request_of(), b'{"n":1000000,"paid":1}')])
    shapes.after_cut([answered(request_of(), b'{"n":1000000,"paid":2}')])
    shapes.after_cut([answered(request_of(), error=ConnectionLost("again"))])
    shapes.compare(cuts)
    assert (cuts.compared, cuts.differ) == (2, 1)
    assert cuts.example is not None
    assert cuts.example.second == '{"n":{n},"paid":2}'


def test_shapes_say_nothing_about_a_method_whose_answers_vary() -> None:
    shapes = Shapes()
    cuts = Cuts()
    shapes.usual([answered(request_of(), b"1"), answered(request_of(), b"2")])
    shapes.after_cut([answered(request_of(), b"3")])
    shapes.compare(cuts)
    assert (cuts.compared, cuts.differ) == (0, 0)


@asynccontextmanager
async def echoing(relay_to: list[bytes]) -> AsyncIterator[str]:
    """Run a server that keeps each line that it gets, and sends it back."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            relay_to.append(line)
            writer.write(line)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/rpc"
    finally:
        server.close()


@pytest.mark.parametrize("where", ["request", "answer"])
async def test_relay_drops_the_connection_of_the_next_request(
    where: Literal["request", "answer"],
) -> None:
    received: list[bytes] = []
    async with echoing(received) as url:
        relay = Relay(url)
        await relay.open()
        try:
            assert relay.url != url and relay.url.endswith("/rpc")
            port = int(relay.url.split(":")[2].split("/")[0])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"one\n")
            assert await reader.readline() == b"one\n"
            relay.arm(where)
            writer.write(b"two\n")
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
            assert not relay.disarm()
            writer.close()
            if where == "answer":
                assert received == [b"one\n", b"two\n"]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"three\n")
            assert await reader.readline() == b"three\n"
            writer.close()
        finally:
            await relay.aclose()


async def test_relay_that_dropped_nothing_says_so() -> None:
    relay = Relay("http://127.0.0.1:1/rpc")
    relay.arm("answer")
    assert relay.disarm()
    assert not relay.disarm()
