"""Limits, keys and fingerprints."""

import asyncio
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw

from tests.calls import batch, call, error, make_app, read, result
from tests.test_jsonrpc import json_values
from wirecall import App, Limits, UsageError, jsonrpc
from wirecall.digests import SHORT, sha256
from wirecall.server.policy import fingerprint


def counting(**options: Any) -> tuple[App, list[int]]:
    app = make_app(**options)
    ran: list[int] = []
    app.query(name="count", notification_allowed=True)(lambda n=0: ran.append(n))
    return app, ran


# --- limits (J11) ------------------------------------------------------------------------------------------------------


def test_a_batch_over_the_limit_is_refused_whole_before_anything_runs() -> None:
    app, ran = counting()
    assert len(read(app.handle_sync(batch(*[call("count")] * 50)))) == 50
    ran.clear()
    for entries in ([call("count")] * 51, [b"{}"] * 51, [b'{"jsonrpc":"2.0","method":"count"}'] * 51):
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


def test_the_batch_limit_can_be_chosen() -> None:
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
    answers = read(app.handle_sync(batch(*[call("repeat", [n], id=n) for n in (300, 900, 301, 302)])))
    assert [answer["id"] for answer in answers] == [300, 900, 301, 302]
    assert ["result" in answer for answer in answers] == [True, False, True, False]


async def test_in_flight_calls_are_bounded_and_the_rest_told_to_come_back() -> None:
    app = make_app(limits=Limits(in_flight=3))
    started, release = asyncio.Semaphore(0), asyncio.Event()

    @app.query(notification_allowed=True)
    async def hold() -> str:
        started.release()
        await release.wait()
        return "held"

    async with asyncio.TaskGroup() as group:
        held = [group.create_task(app.handle(call("hold"))) for _ in range(2)]
        for _ in held:
            await started.acquire()
        refused = read(await app.handle(batch(call("hold", id=8), call("hold", id=9), jsonrpc.make_notification("hold"))))
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


@pytest.mark.parametrize("field", ["batch", "bytes_in", "bytes_out", "depth", "in_flight", "concurrency"])
def test_every_limit_has_a_name_and_must_admit_something(field: str) -> None:
    assert getattr(Limits(), field) >= 1
    with pytest.raises(UsageError, match=field):
        Limits(**{field: 0})


# --- keys (P3, P4) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["a", "~" * 255, "!", "order-7/charge:1", "k"])
def test_keys_of_printable_ascii_are_taken(key: str) -> None:
    app = make_app(mode="production")
    app.command(name="put")(lambda: 1)
    assert result(app.handle_sync(call("put", key=key))) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "a b", "\t", "é", "\x7f", "\u2003", 1, 1.5, None, True, [], {}, ["k"]])
def test_anything_else_is_refused_and_leaves_no_record(key: Any) -> None:
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


def test_the_same_key_twice_is_one_key() -> None:
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
    app, ran = make_app(), list[int]()
    app.command(name="put")(lambda: ran.append(1))
    refused = error(app.handle_sync(f'{{"jsonrpc":"2.0","method":"put","params":{params},"id":1}}'))
    assert (refused["code"], refused["data"]["type"], ran) == (-32602, "idempotency_key_invalid", [])


def test_a_number_that_python_cannot_read_is_the_caller_s_mistake() -> None:
    """Also beside a key and an escape, where the members are looked at one by one."""
    app, ran = make_app(), list[int]()
    app.command(name="put")(lambda n, s: ran.append(1))
    params = f'{{"n":{"9" * 5000},"s":"\\u0041","idempotency_key":"k"}}'
    refused = error(app.handle_sync(f'{{"jsonrpc":"2.0","method":"put","params":{params},"id":1}}'))
    assert (refused["code"], ran) == (-32602, [])


def test_a_key_is_a_command_s_affair() -> None:
    app = make_app()
    app.query(name="look")(lambda: 1)
    assert error(app.handle_sync(call("look", key="k")))["data"]["reason"] == "params.idempotency_key: unknown name"


# --- fingerprints ------------------------------------------------------------------------------------------------------


def of(text: str) -> bytes:
    return fingerprint(Raw(text))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1,"b":2}', '{"b":2,"a":1}'),
        ('{"a":1}', '{"a":1.0}'),
        ('{"a":[1,{"x":2}]}', '{"a":[1.0,{"x":2e0}]}'),
        ('{"a":1}', '{"a":1,"idempotency_key":"k","_meta":{},"requestState":"s","inputResponses":[],"idempotencyKey":1}'),
        ('{"a":"\\u00e9"}', '{"a":"é"}'),
        ('{"a":-0.0}', '{"a":0}'),
        ("{}", '{"_meta":1}'),
        ('{"a":1.50}', '{"a":1.5}'),
    ],
)
def test_the_same_params_written_differently(one: str, other: str) -> None:
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
    ],
)
def test_other_params(one: str, other: str) -> None:
    assert of(one) != of(other)


def test_no_params_are_an_empty_object() -> None:
    assert fingerprint(UNSET) == of("{}")


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), json_values, max_size=5), st.randoms())
def test_the_order_of_members_never_matters(params: dict[str, Any], random: Any) -> None:
    members = list(params.items())
    random.shuffle(members)
    assert of(json.dumps(params)) == of(json.dumps(dict(members)))


@pytest.mark.parametrize("length", [0, 11, SHORT - 1, SHORT, 100_000])
@pytest.mark.parametrize("plain", [True, False])
def test_a_digest_is_sha_256_whoever_makes_it(length: int, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not plain:
        monkeypatch.setattr("wirecall.digests._plain", None)
    assert sha256(b"x" * length) == hashlib.sha256(b"x" * length).digest()
