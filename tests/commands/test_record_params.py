"""`record_params=True`: the ledger keeps the params of a command for operators, without secrets;
every ledger.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pytest

from tests.calls import call, result
from tests.commands.charges import NewApp
from tests.servers import Store
from wirecall import App, Secret
from wirecall.ledger.base import Ledger, RecordId


class Card(msgspec.Struct, rename="camel"):
    last_digits: str
    card_number: Annotated[str, Secret]
    parent: "Card | None" = None


@dataclass
class Person:
    name: str
    cards: list[Card]


async def shown(app: App, ledger: Ledger, params: Any) -> Any:
    result(await app.handle(call("pay", params, key="k")))
    record = await ledger.get(RecordId("", "pay", "k"))
    assert record is not None
    return None if record.params is None else json.loads(record.params)


async def test_params_are_not_recorded_by_default(app: App, ledger: Ledger) -> None:
    @app.command
    def pay(order: str) -> None: ...

    assert await shown(app, ledger, {"order": "7"}) is None


@pytest.mark.parametrize(
    "params", [{"order": "7", "pin": "1234"}, ["7", "1234"]], ids=["by name", "by position"]
)
async def test_params_are_recorded_without_secrets(params: Any, app: App, ledger: Ledger) -> None:
    @app.command(record_params=True)
    def pay(order: str, pin: Annotated[str, Secret]) -> None: ...

    if isinstance(params, list):
        message = {"jsonrpc": "2.0", "id": 1, "method": "pay", "params": params}
        result(await app.handle(json.dumps(message), key="k"))
        record = await ledger.get(RecordId("", "pay", "k"))
        assert record is not None and record.params == b'["7","***"]'
    else:
        assert await shown(app, ledger, params) == {"order": "7", "pin": "***"}


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (Annotated[str, Secret()], "x", "***"),
        (list[Annotated[str, Secret]], ["x"], "***"),
        (Annotated[str, Secret] | None, None, "***"),
        (dict[str, Annotated[int, Secret]], {"a": 1}, "***"),
        (
            Card,
            {
                "lastDigits": "1",
                "cardNumber": "2",
                "parent": {"lastDigits": "3", "cardNumber": "4"},
            },
            {
                "lastDigits": "1",
                "cardNumber": "***",
                "parent": {"lastDigits": "3", "cardNumber": "***"},
            },
        ),
        (
            dict[str, list[Card]],
            {"home": [{"lastDigits": "1", "cardNumber": "2"}]},
            {"home": [{"lastDigits": "1", "cardNumber": "***"}]},
        ),
        (
            Person,
            {"name": "ada", "cards": [{"lastDigits": "1", "cardNumber": "2"}]},
            {"name": "ada", "cards": [{"lastDigits": "1", "cardNumber": "***"}]},
        ),
    ],
    ids=lambda value: None if isinstance(value, (dict, list, str)) else str(value),
)
@pytest.mark.parametrize("store", ["memory"], indirect=True)
async def test_secret_parts_are_hidden(
    kind: Any, value: Any, expected: Any, app: App, ledger: Ledger, store: Store
) -> None:
    def pay(value: Any) -> None: ...

    pay.__annotations__["value"] = kind
    app.command(record_params=True)(pay)
    assert await shown(app, ledger, {"value": value}) == {"value": expected}


@pytest.mark.parametrize("store", ["memory"], indirect=True)
async def test_long_params_are_not_recorded(app: App, ledger: Ledger, store: Store) -> None:
    @app.command(record_params=True, max_stored_result=100)
    def pay(order: str) -> None: ...

    assert "more than max_stored_result" in await shown(app, ledger, {"order": "7" * 200})


@pytest.mark.parametrize("store", ["memory"], indirect=True)
async def test_params_of_calls_without_a_key_are_recorded(
    new_app: NewApp, ledger: Ledger, store: Store
) -> None:
    app = new_app()

    @app.command(record_params=True)
    def pay(order: str) -> None: ...

    result(await app.handle(call("pay", {"order": "7"})))
    assert [record.params for record in await ledger.list()] == [b'{"order":"7"}']
