"""A command that is done is answered from its record, byte for byte (P5, P9, P10); every ledger."""

from typing import Any

import pytest

from tests.calls import error, read, result
from tests.commands.charges import NewApp, World, charge
from wirecall import App, DomainError


async def test_retry_gets_the_same_answer_under_its_own_id_marked_as_replayed(
    app: App, world: World
) -> None:
    """P5, P10: two calls with one key and different ids are one command."""
    app.command(world.charge)
    replayed: list[Any] = []
    first = await app.handle(charge("first"), replayed=replayed)
    assert read(first) == {"jsonrpc": "2.0", "result": {"charged": 5, "number": 1}, "id": "first"}
    assert replayed == []
    again = await app.handle(charge(2), replayed=replayed)
    assert read(again) == {"jsonrpc": "2.0", "result": {"charged": 5, "number": 1}, "id": 2}
    assert replayed == [2]
    assert await app.handle(charge("first")) == first
    assert world.effects == [5]


@pytest.mark.parametrize(
    "value",
    [None, False, 0, "", {}, [], 0.0, -0.0, 1e300, 2**70, "ä€😀\0", {"b": 1, "a": None}],
    ids=repr,
)
async def test_any_result_is_replayed_byte_for_byte(value: Any, new_app: NewApp) -> None:
    """P5: falsy results are results."""
    calls: list[int] = []
    for _ in range(2):
        app = new_app()

        @app.command(name="charge")
        def handler(cents: int) -> Any:
            calls.append(cents)
            return value

        replies = {await app.handle(charge()) for _ in range(2)}
    assert len(replies) == 1
    assert result(replies.pop()) == value
    assert calls == [5]


async def test_every_app_on_a_ledger_replays_it(new_app: NewApp, world: World) -> None:
    """P9: the record outlives the process that made it."""
    first = new_app()
    second = new_app()
    for app in (first, second):
        app.command(world.charge)
    reply = await first.handle(charge())
    await first.aclose()
    replayed: list[Any] = []
    assert await second.handle(charge(), replayed=replayed) == reply
    assert replayed == [1]
    assert world.effects == [5]


@pytest.mark.parametrize("data", [None, {"balance": 3}, [1], "text", 0, False], ids=repr)
async def test_domain_error_is_the_command_s_answer_and_replayed_with_a_mark(
    data: Any, app: App
) -> None:
    """P5: the same recorded error."""
    calls: list[int] = []

    @app.command(name="charge")
    async def handler(cents: int) -> None:
        calls.append(cents)
        raise DomainError(4020, "not enough money", data)

    first = error(await app.handle(charge(1)))
    assert first == {"code": 4020, "message": "not enough money"} | (
        {} if data is None else {"data": data}
    )
    answer = read(await app.handle(charge(2)))
    assert answer["id"] == 2
    again = answer["error"]
    assert (again["code"], again["message"]) == (4020, "not enough money")
    assert (
        again["data"] == {**data, "replayed": True}
        if isinstance(data, dict)
        else {"replayed": True, "data": data}
    )
    assert calls == [5]


async def test_replayed_error_counts_among_the_replayed_ids(app: App) -> None:
    """`replayed` receives the ids of the answers that came from the ledger; a recorded error is
    one.
    """

    @app.command(name="charge")
    async def handler(cents: int) -> None:
        raise DomainError(4020, "not enough money")

    replayed: list[Any] = []
    await app.handle(charge(1), replayed=replayed)
    assert replayed == []
    await app.handle(charge(2), replayed=replayed)
    assert replayed == [2]
