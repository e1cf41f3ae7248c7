"""The meaning of a key (P5, P10), calls that need none, and other params under the same key; every
ledger.
"""

import asyncio
from typing import Any

import pytest

from tests.calls import batch, call, error, make_app, read, result
from tests.commands.charges import CONFLICT, ID, PARAMS, PRINT, NewApp, World, charge, stands
from tests.ledger import claim_of, outcome_of
from tests.servers import Store
from wirecall import App
from wirecall.ledger.base import Ledger, State

# --- a command is its caller, its method and its key ----------------------------------------------


async def test_keys_and_not_ids_identify_a_command(app: App, world: World) -> None:
    """P10: an id is never the key."""
    app.command(world.charge)
    assert result(await app.handle(charge(1, key="a")))["number"] == 1
    assert result(await app.handle(charge(1, key="b")))["number"] == 2


async def test_key_belongs_to_its_method(app: App, world: World) -> None:
    """P5: the pair is (method, key)."""
    app.command(world.charge)
    app.command(name="refund")(world.charge)
    assert result(await app.handle(charge()))["number"] == 1
    assert result(await app.handle(call("refund", PARAMS, key="k")))["number"] == 2


async def test_keys_of_different_callers_are_separate(app: App, world: World) -> None:
    """P5: within the caller's identity; different params of another caller are not a conflict."""
    app.command(world.charge)
    for number, caller in enumerate(("", "alice", "bob", "alice/charge"), 1):
        replayed: list[Any] = []
        mine = charge(number, cents=number)
        assert result(await app.handle(mine, caller=caller, replayed=replayed)) == {
            "charged": number,
            "number": number,
        }
        assert result(await app.handle(mine, caller=caller, replayed=replayed)) == {
            "charged": number,
            "number": number,
        }
        assert replayed == [number]
    assert world.effects == [1, 2, 3, 4]


# --- no record ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "code"),
    [({"cents": "five"}, -32602), ({}, -32602), ({"cents": 5, "other": 1}, -32602)],
    ids=repr,
)
async def test_params_that_do_not_fit_take_no_claim(
    params: Any, code: int, app: App, ledger: Ledger, world: World
) -> None:
    app.command(world.charge)
    assert error(await app.handle(call("charge", params, key="k")))["code"] == code
    assert await ledger.get(ID) is None
    assert result(await app.handle(charge()))["number"] == 1


@pytest.mark.parametrize("key", ["auto", "off"])
async def test_command_without_a_key_has_a_record_unless_it_is_declared_off(
    key: Any, app: App, ledger: Ledger, world: World
) -> None:
    """Each call is a new one: the server does not know its caller, or the caller has its answer."""
    app.command(key=key)(world.charge)
    for number in (1, 2):
        assert result(await app.handle(call("charge", PARAMS)))["number"] == number
    assert len(await ledger.list()) == (2 if key == "auto" else 0)


async def test_queries_never_touch_the_ledger(
    store: Store, monkeypatch: pytest.MonkeyPatch, world: World
) -> None:
    async def refuse(url: str, tables: str) -> Any:
        raise AssertionError("the ledger was opened")

    monkeypatch.setattr("wirecall.app.open_ledger", refuse)
    app = make_app(ledger=store.url)
    app.query(name="look")(lambda n: n)
    app.command(world.charge)
    assert result(await app.handle(call("look", [1]))) == 1
    assert [
        each["result"]
        for each in read(await app.handle(batch(call("look", [1]), call("look", [2]))))
    ] == [1, 2]
    assert error(await app.handle(call("charge", {"cents": "x"}, key="k")))["code"] == -32602
    await app.aclose()


# --- conflict -------------------------------------------------------------------------------------


async def test_other_params_under_the_same_key_are_refused(new_app: NewApp, world: World) -> None:
    for app in (new_app(), new_app()):
        app.command(world.charge)
        await app.handle(charge())
        refused = error(await app.handle(charge(cents=6)))
        assert (refused["code"], refused["data"]) == (42210, CONFLICT)
    assert world.effects == [5]


async def test_equal_params_do_not_conflict(app: App, world: World) -> None:
    """1 equals 1.0, the order of members and `_meta` do not matter."""

    @app.command(name="charge")
    async def handler(cents: float, to: Any = None) -> Any:
        return world.act(1)

    sent = [
        '{"cents":5,"to":{"a":1,"b":[2]},"idempotency_key":"k"}',
        '{"idempotency_key":"k","to":{"b":[2.0],"a":1.0},"cents":5.0}',
        '{"cents":5,"to":{"a":1,"b":[2]},"idempotency_key":"k","_meta":{"traceparent":"x"}}',
    ]
    for params in sent:
        message = b'{"jsonrpc":"2.0","method":"charge","params":%b,"id":1}' % params.encode()
        assert result(await app.handle(message))["number"] == 1


@pytest.mark.parametrize("state", State)
async def test_other_params_are_a_conflict_in_every_state(
    state: State, app: App, ledger: Ledger, store: Store, world: World
) -> None:
    app.command(world.charge)
    record = await ledger.claim(claim_of(ID, fingerprint=PRINT))
    if state is State.UNKNOWN:
        await ledger.abandon(record.token)
    elif state is State.WAITING:
        await ledger.suspend(record.token, outcome_of(), 1000)
    elif state is not State.RUNNING:
        await ledger.complete(record.token, outcome_of(), 1000)
    if state is State.TOMBSTONE:
        store.age(ID, 1001)
        await ledger.sweep()
    assert await stands(ledger) is state
    refused = error(await app.handle(charge(cents=6)))
    assert (refused["code"], refused["data"]) == (42210, CONFLICT)
    assert await stands(ledger) is state
    assert world.effects == []


async def test_other_params_are_a_conflict_while_the_first_runs(app: App, world: World) -> None:
    app.command(name="charge")(world.held_after)
    first = asyncio.create_task(app.handle(charge()))
    await world.begun.wait()
    refused = error(await app.handle(charge(cents=6)))
    assert (refused["code"], refused["data"]) == (42210, CONFLICT)
    world.gate.set()
    assert result(await first)["number"] == 1


async def test_wrong_params_do_not_block_right_ones(app: App, world: World) -> None:
    """Both arrive together, the wrong ones first; the record decides which are right."""
    app.command(world.charge)
    await app.handle(charge())
    wrong, right = await asyncio.gather(app.handle(charge(1, cents=6)), app.handle(charge(2)))
    assert error(wrong)["data"] == CONFLICT
    assert result(right)["number"] == 1
