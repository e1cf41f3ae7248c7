"""Many processes send the same commands at the same moment: each takes effect once, and all get the
same answer.
"""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import psycopg
import pytest

from tests.faults import Caller, Child, Effects, check, child, make_shop
from tests.servers import DURABLE, Postgres, Store
from tests.size import sized
from wirecall.ledger.base import State

PROCESSES = sized(small=3, full=8)
COPIES = sized(small=8, full=16)
KEYS = sized(small=50, full=200)
STORM = sized(small=100, full=500)

# Calls of one process in flight at once: below `Limits.in_flight`, otherwise some get "busy".
SIDE_BY_SIDE = 40

durable = pytest.mark.parametrize("store", DURABLE, indirect=True)


@durable
async def test_key_takes_effect_once_if_many_processes_send_it(
    store: Store, effects: Effects
) -> None:
    keys = [f"key-{number}" for number in range(KEYS)]
    async with AsyncExitStack() as stack:
        children = [
            await stack.enter_async_context(child(store.url, effects)) for _ in range(PROCESSES)
        ]
        for one in children:
            # The ledger is open in all of them: the race is about the records.
            await one.call("charge", "before")
        answers_by_key = await race(children, keys, copies=COPIES)
    assert sum(answers.total() for answers in answers_by_key.values()) == PROCESSES * COPIES * KEYS
    assert_each_took_effect_once(answers_by_key, effects, besides=1)
    assert await counts(store) == {State.DONE: KEYS + 1}


@durable
async def test_key_takes_effect_once_in_a_storm_on_an_unopened_ledger(
    store: Store, effects: Effects
) -> None:
    async with AsyncExitStack() as stack:
        children = [
            await stack.enter_async_context(child(store.url, effects)) for _ in range(PROCESSES)
        ]
        answers_by_key = await race(children, ["the-key"], copies=STORM)
    assert answers_by_key["the-key"].total() == PROCESSES * STORM
    assert_each_took_effect_once(answers_by_key, effects)
    assert await counts(store) == {State.DONE: 1}


async def test_database_is_created_once_by_many_processes(
    postgres_server: Postgres, effects: Effects
) -> None:
    with psycopg.connect(postgres_server.url, autocommit=True) as db:
        db.execute("DROP DATABASE IF EXISTS brand_new WITH (FORCE)")
        db.execute("CREATE DATABASE brand_new")
    async with AsyncExitStack() as stack:
        url = postgres_server.url_of("brand_new")
        children = [await stack.enter_async_context(child(url, effects)) for _ in range(PROCESSES)]
        answers_by_key = await race(
            children, [f"key-{number}" for number in range(10)], copies=COPIES
        )
    assert_each_took_effect_once(answers_by_key, effects)


@durable
async def test_apps_in_one_process_are_separate_callers_of_the_ledger(
    store: Store, effects: Effects
) -> None:
    caller = Caller()
    async with make_shop(store.url, effects) as one, make_shop(store.url, effects) as other:
        await asyncio.gather(
            caller.call(one, "charge", "before"), caller.call(other, "charge", "before")
        )
        for number in range(30):
            turn = [one, other] * 8
            answers = await asyncio.gather(
                *(caller.call(app, "charge", f"key-{number}") for app in turn)
            )
            assert all(answer.error is None for answer in answers), answers
            assert sum(not answer.is_replayed for answer in answers) == 1, (
                "one of them ran, and the others got its outcome"
            )
    assert len(effects.all()) == 31
    check(caller.history, effects.all())


@durable
async def test_ledger_is_opened_once_for_an_app(
    store: Store, effects: Effects, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    original = store.open

    async def open_and_count(_url: str, _tables: str) -> Any:
        opened.append(await original())
        return opened[-1]

    monkeypatch.setattr("wirecall.app.open_ledger", open_and_count)
    caller = Caller()
    try:
        async with make_shop(store.url, effects) as app:
            await asyncio.gather(
                *(caller.call(app, "charge", f"key-{number}") for number in range(8))
            )
        assert len(opened) == 1
    finally:
        for ledger in opened:
            await ledger.aclose()


async def race(children: list[Child], keys: list[str], *, copies: int) -> dict[str, Counter[str]]:
    """The answers of all the processes for each key, and how often; they begin together."""
    for one in children:
        await one.send("race", keys, copies, max(1, SIDE_BY_SIDE * COPIES // copies))
    for one in children:
        await one.next_value("ready")
    for one in children:
        await one.send("go")
    answers_by_key: dict[str, Counter[str]] = {key: Counter() for key in keys}
    for answers in await asyncio.gather(*(one.next_value("race") for one in children)):
        for key, counts in answers.items():
            answers_by_key[key].update(counts)
    return answers_by_key


def assert_each_took_effect_once(
    answers_by_key: dict[str, Counter[str]], effects: Effects, *, besides: int = 0
) -> None:
    done = {effect.key: effect.run for effect in effects.all()}
    assert len(effects.all()) == len(done) == len(answers_by_key) + besides
    for key, answers in answers_by_key.items():
        assert list(answers) == [f'jsonrpc:"2.0"result:"{done[key]}"'], (key, answers)


async def counts(store: Store) -> dict[State, int]:
    ledger = await store.open()
    try:
        return {state: number for state, number in (await ledger.counts()).items() if number}
    finally:
        await ledger.aclose()
