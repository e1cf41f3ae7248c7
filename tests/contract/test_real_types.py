"""The types of generated clients: dates, UUIDs, decimals, bytes and enums, and one class each."""

import asyncio
import datetime
import enum
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypedDict, assert_type

import pydantic
import pytest

from wirecall import App, Context
from wirecall.client.connect import connect
from wirecall.contract.changes import changes
from wirecall.contract.generate import generated
from wirecall.contract.lock import Contract, of_app, of_client
from wirecall.mcp import Elicited


class Size(enum.Enum):
    """How large a parcel is."""

    SMALL = "small"
    EXTRA_LARGE = "extra-large"


class Level(enum.IntEnum):
    LOW = -1
    HIGH = 2


@dataclass
class Line:
    sku: str
    price: Decimal


@dataclass
class Order:
    id: uuid.UUID
    at: datetime.datetime
    day: datetime.date
    size: Size
    lines: list[Line] = field(default_factory=list)
    picture: bytes = b""
    gift: Level | None = None


class Guest(pydantic.BaseModel):
    name: str
    born: datetime.date


def shop(**options: Any) -> App:
    app = App("shop", ledger="memory:", **options)

    @app.command
    def place(order: Order, kind: Literal["b", "a"] = "b") -> Order:
        return order

    @app.query
    def orders(day: datetime.date, wait: datetime.timedelta, at: datetime.time) -> list[Order]:
        return []

    @app.query
    def find(id: uuid.UUID | int, price: Decimal, size: Size | None = None) -> list[str]:
        return [type(id).__name__, str(price), str(size)]

    @app.query
    def mixed(value: uuid.UUID | int, other: Size | int) -> str:
        return type(other).__name__

    @app.command
    def invite(guest: Guest) -> Guest:
        return guest

    @app.query
    def guests() -> list[Guest]:
        return [Guest(name="Ada", born=datetime.date(1815, 12, 10))]

    @app.query
    def picture() -> bytes:
        return b"\x00\xff"

    return app


def imported(source: str) -> ModuleType:
    module = ModuleType("generated_client")
    sys.modules["generated_client"] = module
    exec(compile(source, "generated_client.py", "exec"), module.__dict__)
    return module


@pytest.mark.parametrize("protocol", ["jsonrpc", "mcp"])
def test_generated_client_has_real_types(protocol: str) -> None:
    module = imported(generated(of_app(shop()), protocol))
    order = module.Order(
        id=uuid.UUID(int=7),
        at=datetime.datetime(2026, 7, 28, 12, tzinfo=datetime.UTC),
        day=datetime.date(2026, 7, 28),
        size=module.Size.EXTRA_LARGE,
        lines=[module.Line(sku="tea", price=Decimal("4.50"))],
        picture=b"\x00\xff",
        gift=module.Level.VALUE_2,
    )
    with module.SyncShopClient(shop()) as client:
        assert client.place(order=order) == order
        assert (
            client.orders(day=order.day, wait=datetime.timedelta(hours=1), at=datetime.time(7))
            == []
        )
        assert client.find(id=order.id, price=Decimal("0.1"))[:2] == ["UUID", "0.1"]
        [guest] = client.guests()
        assert guest == module.Guest(name="Ada", born=datetime.date(1815, 12, 10))
        assert type(client.invite(guest=guest)) is module.Guest
        assert client.picture() == b"\x00\xff"


@pytest.mark.parametrize("protocol", ["jsonrpc", "mcp"])
def test_generated_client_has_one_class_for_one_schema(protocol: str) -> None:
    source = generated(of_app(shop()), protocol)
    for name in ("Order", "Line", "Guest", "Size", "Level"):
        assert source.count(f"\nclass {name}(") == 1
    assert source.count("(Struct, kw_only=True)") == 3
    assert "class Size(StrEnum):" in source
    assert '    EXTRA_LARGE = "extra-large"' in source
    assert "class Level(IntEnum):" in source
    assert "    VALUE_MINUS_1 = -1" in source
    # msgspec reads one kind of string in a union, and a union of a UUID and an int is clear.
    assert "value: UUID | int" in source
    assert "other: Size | int" in source


def test_generated_client_is_formatted_and_typed(tmp_path: Path) -> None:
    source = generated(of_app(shop()), "mcp")
    file = tmp_path / "client.py"
    file.write_text(source)
    for command in (
        ["ruff", "format", "--isolated", "--check", "-q", str(file)],
        ["ruff", "check", "--isolated", "--select", "F,I", "-q", str(file)],
    ):
        subprocess.run([sys.executable, "-m", *command], check=True)


def test_generated_union_of_two_strings_is_a_string() -> None:
    app = App("shop", ledger="memory:")

    @app.tool(
        input_schema={
            "type": "object",
            "properties": {
                "a": {"anyOf": [{"type": "string"}, {"type": "string", "format": "uuid"}]},
                "b": {"anyOf": [{"$ref": "#/$defs/S"}, {"type": "string", "format": "date"}]},
                "c": {"anyOf": [{"$ref": "#/$defs/N"}, {"enum": [7]}]},
                "d": {"type": "string", "format": "decimal"},
                "e": {"type": "string", "format": "email"},
            },
            "required": ["a", "b", "c", "d", "e"],
            "$defs": {"S": {"enum": ["s"]}, "N": {"enum": [1, 2]}},
        }
    )
    def odd(a: Any, b: Any, c: Any, d: Any, e: Any) -> None:
        pass

    source = generated(of_app(app), "mcp")
    imported(source)
    for line in ("a: str", "b: str", "c: int", "d: Decimal", "e: str"):
        assert f"        {line},\n" in source


@pytest.mark.parametrize("protocol", ["rpc", "mcp"])
def test_contract_does_not_depend_on_the_mode(
    protocol: Literal["rpc", "mcp"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that was made in development opens a server in production with check=True."""

    def app(mode: str) -> App:
        monkeypatch.setenv("WIRECALL_MODE", mode)
        made = shop()
        assert made.mode == mode
        return made

    async def stated(mode: str) -> Contract:
        async with connect(app(mode), protocol=protocol) as client:
            found = await of_client(client)
        assert found is not None
        return found

    development = of_app(app("development"))
    production = of_app(app("production"))
    assert development.canonical() == production.canonical()
    assert production.modes is not None
    assert production.modes["production"].keys == ["invite", "place"]
    assert production.modes["development"].keys == []
    assert asyncio.run(stated("development")).digest == asyncio.run(stated("production")).digest
    module = imported(generated(development, protocol))
    module.SyncShopClient(app("production"), check=True).close()


def test_contract_with_a_place_of_the_key_does_not_depend_on_the_mode() -> None:
    class Meta(TypedDict, total=False):
        note: str

    def app(mode: Literal["development", "production"]) -> Contract:
        made = App("shop", mode=mode, ledger="memory:", key_at="meta.idem.key")

        @made.command
        def charge(cents: int) -> None:
            pass

        @made.command
        def refund(cents: int, meta: Meta | None = None) -> None:
            pass

        @made.command(key_at="body.key")
        def send(body: dict[str, Any]) -> None:
            pass

        @made.command(key="required")
        def close(cents: int) -> None:
            pass

        return of_app(made)

    development = app("development")
    production = app("production")
    assert changes(development, production) == []
    assert development.canonical() == production.canonical()
    assert production.methods is not None
    assert production.methods["close"].params["required"] == ["cents", "meta"]
    assert production.methods["send"].params["required"] == ["body"]


def test_contract_reports_a_key_that_one_mode_requires_now() -> None:
    def app(key: Literal["auto", "required"] | None) -> Contract:
        made = App("shop", ledger="memory:")

        @made.command(key=key)
        def charge() -> None:
            pass

        return of_app(made)

    def found(old: Contract, new: Contract) -> list[tuple[str, str]]:
        return [(each.level, each.text) for each in changes(old, new) if "key" in each.text]

    assert found(app("auto"), app(None)) == [
        ("breaking", "an idempotency key is required in production now")
    ]
    assert found(app(None), app("auto")) == []
    assert ("breaking", "an idempotency key is required now") in found(app(None), app("required"))
    assert found(app("required"), app(None)) == [("fine", "an idempotency key is optional now")]


def test_elicited_content_has_the_type_that_was_asked_for() -> None:
    """mypy checks `assert_type`; the run checks the value."""
    app = App("shop", ledger="memory:")

    @app.query
    async def confirm(ctx: Context) -> list[str]:
        sure = await ctx.elicit("Sure?", bool)
        assert_type(sure, Elicited[bool])
        line = await ctx.elicit("Which one?", Size)
        assert_type(line.content, Size)
        other = await ctx.elicit("Which?", {"type": "object", "properties": {}})
        assert_type(other.content, Any)
        return [str(sure.content), line.content.name]

    def answer(form: Any) -> dict[str, Any]:
        return {"value": True} if "Sure" in form.message else {"value": "small"}

    async def run() -> Any:
        async with connect(app, protocol="mcp", elicit=answer) as client:
            return await client.call_tool("confirm", type=list[str])

    assert asyncio.run(run()) == ["True", "SMALL"]
