"""Limits, keys and fingerprints."""

import asyncio
import json
import tracemalloc
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from tests.calls import batch, call, error, make_app, read, result
from tests.size import sized
from tests.values import json_values
from wirecall import App, Context, DomainError, Limits, UsageError, connect, jsonrpc
from wirecall.errors import InvalidParams, KeyConflict
from wirecall.server.policy import fingerprint


def counting(**options: Any) -> tuple[App, list[int]]:
    app = make_app(**options)
    ran: list[int] = []
    app.query(name="count", notification_allowed=True)(lambda n=0: ran.append(n))
    return app, ran


# --- limits (J11) ---------------------------------------------------------------------------------


def test_batch_over_the_limit_is_refused_whole_before_anything_runs() -> None:
    app, ran = counting()
    assert len(read(app.handle_sync(batch(*[call("count")] * 50)))) == 50
    ran.clear()
    for entries in (
        [call("count")] * 51,
        [b"{}"] * 51,
        [b'{"jsonrpc":"2.0","method":"count"}'] * 51,
    ):
        answer = read(app.handle_sync(batch(*entries)))
        assert answer["id"] is None
        assert answer["error"]["code"] == -32600
        assert answer["error"]["data"] | {"reason": ""} == {
            "type": "limit_exceeded",
            "reason": "",
            "limit": "batch",
            "max": 50,
            "count": 51,
        }
    assert ran == []


def test_batch_limit_can_be_chosen() -> None:
    app, _ = counting(limits=Limits(batch=2))
    assert len(read(app.handle_sync(batch(call("count"), call("count"))))) == 2
    assert error(app.handle_sync(batch(*[call("count")] * 3)))["data"]["max"] == 2


def test_bytes_in() -> None:
    app, ran = counting(limits=Limits(bytes_in=100))
    assert error(app.handle_sync(call("count") + b" " * 100))["data"]["limit"] == "bytes_in"
    assert error(app.handle_sync(batch(*[call("count")] * 3)))["data"]["limit"] == "bytes_in"
    assert ran == []
    result(app.handle_sync(call("count").ljust(100)))


def test_depth_can_be_chosen() -> None:
    app, ran = counting(limits=Limits(depth=3))
    assert error(app.handle_sync(call("count", [[[[0]]]])))["data"] == {
        "type": "limit_exceeded",
        "reason": "nested deeper than 3 levels",
        "limit": "depth",
        "max": 3,
    }
    assert ran == []
    result(app.handle_sync(call("count", [[0]])))


def test_bytes_out_costs_the_entries_that_do_not_fit() -> None:
    app = make_app(limits=Limits(bytes_out=1000))
    app.query(name="repeat")(lambda n: "x" * n)
    too_long = error(app.handle_sync(call("repeat", [1000])))
    assert too_long["code"] == -32603
    assert too_long["data"]["limit"] == "bytes_out"
    assert too_long["data"]["ran"] == "yes"
    answers = read(
        app.handle_sync(batch(*[call("repeat", [n], id=n) for n in (300, 900, 301, 302)]))
    )
    assert [answer["id"] for answer in answers] == [300, 900, 301, 302]
    assert ["result" in answer for answer in answers] == [True, False, True, False]


def test_error_that_is_too_long_says_whether_the_call_ran() -> None:
    app = make_app(limits=Limits(bytes_out=1000))

    @app.query
    def refuse(data: dict[str, Any]) -> None:
        raise DomainError(40401, "x" * 1000, data)

    for data, ran in (({}, "yes"), ({"ran": "no"}, "no")):
        assert error(app.handle_sync(call("refuse", {"data": data})))["data"]["ran"] == ran
        [answer] = read(app.handle_sync(batch(call("refuse", {"data": data}))))
        assert (answer["error"]["data"]["limit"], answer["error"]["data"]["ran"]) == (
            "bytes_out",
            ran,
        )


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", ["text", "items", "straight", "late", "put"])
async def test_batch_keeps_no_more_than_one_reply_may_hold(name: str, watched: bool) -> None:
    """J11: a result that does not fit is dropped as soon as it is there, and other calls get their
    turn.
    """
    app = make_app(limits=Limits(bytes_out=1_000_000))
    effects = list[int]()
    app.query(name="text")(lambda n: "x" * n)
    app.query(name="items")(lambda n: ["x" * n])

    @app.query
    async def straight(n: int) -> list[str]:
        return ["x" * n]

    @app.query
    async def late(n: int) -> list[str]:
        await asyncio.sleep(0)
        return ["x" * n]

    @app.command(max_stored_result=1000)
    def put(n: int) -> list[str]:
        effects.append(n)
        return ["x" * n]

    if watched:

        @app.middleware
        async def watch(ctx: Context, call_next: Any) -> Any:
            return await call_next(ctx)

    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    keys = [f"k-{number}" if name == "put" else None for number in range(50)]
    message = batch(
        *(call(name, {"n": 900_000}, id=number, key=key) for number, key in enumerate(keys))
    )
    other = asyncio.create_task(other_work())
    await asyncio.sleep(0)
    tracemalloc.start()
    try:
        turns = 0
        answers = read(await app.handle(message))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        other.cancel()
    assert [answer["id"] for answer in answers] == [*range(50)]
    assert ["result" in answer for answer in answers] == [True, *[False] * 49]
    assert {answer["error"]["data"]["ran"] for answer in answers[1:]} == {"yes"}
    assert peak < 25_000_000 and turns > 1
    if name == "put":
        assert len(effects) == 50
        assert error(await app.handle(call("put", {"n": 900_000}, key="k-49")))["code"] == 41010
        assert len(effects) == 50


async def test_calls_beyond_the_in_flight_limit_get_busy() -> None:
    app = make_app(limits=Limits(in_flight=3))
    started = asyncio.Semaphore(0)
    release = asyncio.Event()

    @app.query(notification_allowed=True)
    async def hold() -> str:
        started.release()
        await release.wait()
        return "held"

    async with asyncio.TaskGroup() as group:
        held = [group.create_task(app.handle(call("hold"))) for _ in range(2)]
        for _ in held:
            await started.acquire()
        refused = read(
            await app.handle(
                batch(call("hold", id=8), call("hold", id=9), jsonrpc.make_notification("hold"))
            )
        )
        assert [answer["id"] for answer in refused] == [8, 9]
        assert {answer["error"]["code"] for answer in refused} == {42910}
        assert refused[0]["error"]["data"] == {"type": "busy", "ran": "no", "retry_after_ms": 100}
        third = group.create_task(app.handle(call("hold")))
        await started.acquire()
        assert error(await app.handle(call("hold")))["code"] == 42910
        assert await app.handle(jsonrpc.make_notification("hold")) is None
        release.set()
    assert [result(task.result()) for task in (*held, third)] == ["held"] * 3
    assert result(await app.handle(call("hold"))) == "held"


@pytest.mark.parametrize(
    "field", ["batch", "bytes_in", "bytes_out", "depth", "in_flight", "concurrency"]
)
def test_limit_has_a_name_and_must_admit_something(field: str) -> None:
    assert getattr(Limits(), field) >= 1
    with pytest.raises(UsageError, match=field):
        Limits(**{field: 0})


# --- keys (P3, P4) --------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["a", "~" * 255, "!", "order-7/charge:1", "k"])
def test_keys_of_printable_ascii_are_accepted(key: str) -> None:
    app = make_app(mode="production")
    app.command(name="put")(lambda: 1)
    assert result(app.handle_sync(call("put", key=key))) == 1


@pytest.mark.parametrize(
    "key", ["", "x" * 256, "a b", "\t", "é", "\x7f", "\u2003", 1, 1.5, None, True, [], {}, ["k"]]
)
def test_keys_of_other_characters_are_refused_and_leave_no_record(key: Any) -> None:
    app = make_app(mode="production")
    ran: list[int] = []
    app.command(name="put")(lambda: ran.append(1))
    refused = error(app.handle_sync(call("put", {"idempotency_key": key})))
    assert refused["code"] == -32602
    assert refused["data"]["type"] == "idempotency_key_invalid"
    assert refused["data"]["ran"] == "no"
    assert ran == []
    assert sum(asyncio.run(counts(app)).values()) == 0


async def counts(app: App) -> dict[Any, int]:
    return await (await app.ledger()).counts()


def test_key_that_is_sent_twice_is_one_key() -> None:
    app = make_app()
    app.command(name="put")(lambda: 1)
    data = b'{"jsonrpc":"2.0","method":"put","params":{"idempotency_key":"a","idempotency_key":"a"},"id":1}'
    assert result(app.handle_sync(data)) == 1


@pytest.mark.parametrize(
    "params",
    [
        '{"idempotency_key":"a","idempotency_key":"b"}',
        '{"idempotency_key":"a","idempotency\\u005fkey":"b"}',
        '{"idempotency_key":1,"idempotency_key":"1"}',
        '{"idempotency_key":null,"idempotency_key":"a"}',
        '{"idempotency_key":"a","idempotency_key":["a"]}',
    ],
)
def test_two_keys_in_one_place_are_refused(params: str) -> None:
    app = make_app()
    ran = list[int]()
    app.command(name="put")(lambda: ran.append(1))
    refused = error(app.handle_sync(f'{{"jsonrpc":"2.0","method":"put","params":{params},"id":1}}'))
    assert (refused["code"], refused["data"]["type"], ran) == (
        -32602,
        "idempotency_key_invalid",
        [],
    )


def test_number_that_python_cannot_read_is_an_error_of_the_caller() -> None:
    """Also beside a key and an escape, where the members are looked at one by one."""
    app = make_app()
    ran = list[int]()
    app.command(name="put")(lambda n, s: ran.append(1))
    params = f'{{"n":{"9" * 5000},"s":"\\u0041","idempotency_key":"k"}}'
    refused = error(app.handle_sync(f'{{"jsonrpc":"2.0","method":"put","params":{params},"id":1}}'))
    assert (refused["code"], ran) == (-32602, [])


def test_key_is_for_commands_only() -> None:
    app = make_app()
    app.query(name="look")(lambda: 1)
    assert (
        error(app.handle_sync(call("look", key="k")))["data"]["reason"]
        == "params.idempotency_key: unknown name"
    )


# --- fingerprints ---------------------------------------------------------------------------------


def of(text: str) -> bytes:
    return fingerprint(Raw(text))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1,"b":2}', '{"b":2,"a":1}'),
        ('{"a":1}', '{"a":1.0}'),
        ('{"a":[1,{"x":2}]}', '{"a":[1.0,{"x":2e0}]}'),
        ('{"a":1}', '{"a":1,"idempotency_key":"k","_meta":{}}'),
        ('{"a":"\\u00e9"}', '{"a":"é"}'),
        ('{"a":-0.0}', '{"a":0}'),
        ("{}", '{"_meta":1}'),
        ('{"a":1.50}', '{"a":1.5}'),
        ('{"a":0.1}', '{"a":0.10000000000000000000000}'),
        ('{"a":0.1}', '{"a":1e-1}'),
        ('{"a":0.1}', '{"a":0.000001E+5}'),
        ('{"a":12345678901234567.89}', '{"a":1234567890123456789e-2}'),
        ('{"a":12345678901234567.89}', '{"a":12345678901234567.890}'),
        ('{"a":1000}', '{"a":1e3}'),
        ('{"a":10000000000000000}', '{"a":1e16}'),
        ('{"a":-9007199254740993}', '{"a":-9007199254740993.0}'),
        ('{"a":12345678901234567890123}', '{"a":12345678901234567890123.000}'),
        ('{"a":1%s}' % ("0" * 100), '{"a":1e100}'),
        ('{"b":"%s","a":-1e100}' % ("0" * 30), '{"b":"%s","a":-10E+0099}' % ("0" * 30)),
        ('["0",-1e30]', '["0",-1%s]' % ("0" * 30)),
        ('{"a":1%s5}' % ("0" * 100), '{"a":1%s5.0}' % ("0" * 100)),
        ('{"a":1%s}' % ("0" * 4000), '{"a":1e4000}'),
        ('{"a":0e999999999}', '{"a":0}'),
        ('{"a":1.2345678901e-290}', '{"a":12345678901.00000000000000000e-300}'),
        ('{"a":1.2345678901e-289}', '{"a":12345678901.00000000000000000e-299}'),
        ('{"a":1e999999999}', '{"a":10e999999998}'),
    ],
)
def test_fingerprint_is_equal_for_the_same_params_written_differently(one: str, other: str) -> None:
    assert of(one) == of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1}', '{"a":2}'),
        ('{"a":1}', '{"a":"1"}'),
        ('{"a":1}', '{"a":true}'),
        ('{"a":null}', "{}"),
        ('{"a":[1,2]}', '{"a":[2,1]}'),
        ('{"a":12345678901234567890123}', '{"a":12345678901234567890124}'),
        ('{"a":9007199254740993}', '{"a":9007199254740992}'),
        ('{"a":{"_meta":1}}', '{"a":{}}'),
        ('{"a":"é"}', '{"a":"e\u0301"}'),
        ('{"a":12345678901234567.89}', '{"a":12345678901234567.90}'),
        ('{"a":0.1}', '{"a":0.10000000000000000001}'),
        ('{"a":0.1}', '{"a":"0.1"}'),
        ('{"a":1e-400}', '{"a":0}'),
        ('{"a":1e400}', '{"a":1e401}'),
        ('{"a":1e400}', '{"a":-1e400}'),
        ('{"a":1e400}', '{"a":"1e400"}'),
        ('{"a":1%s}' % ("0" * 100), '{"a":1%s}' % ("0" * 101)),
        ('{"a":"\\"%s1"}' % ("0" * 30), '{"a":"\\"%s1e0"}' % ("0" * 30)),
        ('{"a":1}', '{"a":1,"requestState":"s"}'),
        ('{"a":1}', '{"a":1,"inputResponses":[]}'),
        ('{"a":1}', '{"a":1,"idempotencyKey":1}'),
    ],
)
def test_fingerprint_differs_for_other_params(one: str, other: str) -> None:
    assert of(one) != of(other)


numbers = st.decimals(-(10**30), 10**30, allow_nan=False)


@given(numbers, numbers)
def test_numbers_count_by_their_value(one: Decimal, other: Decimal) -> None:
    assert (of(f'{{"a":{one}}}') == of(f'{{"a":{other}}}')) is (one == other)
    assert of(f'{{"a":{one:f}}}') == of(f'{{"a":{one:e}}}')


def test_fingerprint_of_a_megabyte_of_huge_exponents_uses_little_memory() -> None:
    count = sized(small=10_000, full=30_000)  # under tracemalloc each takes long
    params = b'{"a":[%s]}' % b",".join(
        [b"1e4299", b"1e-999999999", b"9e999999999", b"1e19"] * count
    )
    tracemalloc.start()
    try:
        fingerprint(Raw(params))
        assert tracemalloc.get_traced_memory()[1] < 3500 * count
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", ["1e" + "9" * 5000, "1e-" + "9" * 5000, "9" * 5000])
def test_number_beyond_the_range_is_refused(number: str) -> None:
    with pytest.raises(InvalidParams, match="range"):
        of(f'{{"a":{number}}}')


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("requestState", lambda requestState: requestState),  # noqa: N803
        ("inputResponses", lambda inputResponses: inputResponses),  # noqa: N803
        ("idempotencyKey", lambda idempotencyKey: idempotencyKey),  # noqa: N803
        ("requestState", lambda **others: others["requestState"]),
        ("inputResponses", lambda **others: others["inputResponses"]),
        ("idempotencyKey", lambda **others: others["idempotencyKey"]),
    ],
)
async def test_arguments_of_a_function_all_count_whatever_their_names(
    name: str, function: Any
) -> None:
    """P5: only `idempotency_key` and `_meta` are not the function's own."""
    app = make_app()
    app.command(name="put")(function)
    assert result(await app.handle(call("put", {name: "a"}, key="k"))) == "a"
    assert error(await app.handle(call("put", {name: "b"}, key="k")))["code"] == 42210
    async with connect(app, protocol="mcp") as client:
        assert (await client.call_tool("put", {name: "a"}, key="k")).text == "a"
        with pytest.raises(KeyConflict):
            await client.call_tool("put", {name: "b"}, key="k")


async def test_amounts_that_a_float_cannot_tell_apart_are_two_commands() -> None:
    app = make_app()

    @app.command
    def pay(amount: Decimal) -> str:
        return str(amount)

    message = '{"jsonrpc":"2.0","method":"pay","params":{"amount":%s,"idempotency_key":"k"},"id":1}'
    assert result(await app.handle(message % "12345678901234567.89")) == "12345678901234567.89"
    assert result(await app.handle(message % "1234567890123456789e-2")) == "12345678901234567.89"
    assert error(await app.handle(message % "12345678901234567.90"))["code"] == 42210


def test_params_that_are_missing_equal_an_empty_object() -> None:
    assert fingerprint(UNSET) == of("{}")


@given(
    st.dictionaries(st.text(st.characters(codec="utf-8")), json_values, max_size=5), st.randoms()
)
def test_order_of_members_never_matters(params: dict[str, Any], random: Any) -> None:
    members = list(params.items())
    random.shuffle(members)
    assert of(json.dumps(params)) == of(json.dumps(dict(members)))
