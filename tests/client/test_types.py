"""`type=`: a client reads results as the types that a server writes them from, pydantic's included."""

import dataclasses
import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import pydantic
import pytest

from wirecall import App, UsageError, connect_sync
from wirecall.errors import BadAnswer

T = TypeVar("T")
NOON = datetime.datetime(2026, 7, 28, 12, tzinfo=datetime.UTC)


class Guest(pydantic.BaseModel):
    name: str = pydantic.Field(alias="fullName")
    born: datetime.datetime = NOON

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def greeting(self) -> str:
        return f"Dear {self.name}"


class Page(pydantic.BaseModel, Generic[T]):
    items: list[T]


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"


class Table(msgspec.Struct):
    number: int
    guests: list[Guest]


@dataclasses.dataclass
class Seat:
    guest: Guest | None
    at: datetime.datetime = NOON


Pet = Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]
ADA = Guest(fullName="Ada")
CASES: list[tuple[Any, Any]] = [
    (Guest, ADA),
    (list[Guest], [ADA]),
    (dict[str, Guest], {"a": ADA}),
    (Guest | None, None),
    (Guest | None, ADA),
    (Page[Guest], Page(items=[ADA])),
    (Pet, Dog()),
    (Table, Table(7, [ADA])),
    (Seat, Seat(ADA)),
    (dict[int, str], {7: "seven"}),
    (pydantic.PositiveInt, 7),
]


@pytest.mark.parametrize("protocol", ["jsonrpc", "mcp"])
@pytest.mark.parametrize(("kind", "value"), CASES, ids=[str(kind) for kind, _ in CASES])
def test_result_is_decoded_as_its_type(kind: Any, value: Any, protocol: Any) -> None:
    app = App("x")

    def give() -> Any:
        return value

    give.__annotations__["return"] = kind
    app.query(give)
    options: list[dict[str, Any]] = (
        [{}]
        if protocol == "jsonrpc"
        else [{"revision": "2025-03-26"}, {"revision": "2025-06-18"}, {}]
    )
    for each in options:
        client: Any
        with connect_sync(app, protocol=protocol, **each) as client:
            read = client.call if protocol == "jsonrpc" else client.call_tool
            assert read("give", type=kind) == value


@pytest.mark.parametrize("protocol", ["jsonrpc", "mcp"])
def test_result_that_a_model_refuses_is_reported_like_params(protocol: Any) -> None:
    app = App("x")

    @app.query
    def give() -> dict[str, Any]:
        return {"number": 7, "guests": [{"born": "today"}]}

    client: Any
    with connect_sync(app, protocol=protocol) as client:
        read = client.call if protocol == "jsonrpc" else client.call_tool
        with pytest.raises(BadAnswer, match=r"result\.fullName: missing") as caught:
            read("give", type=Guest)
        assert caught.value.ran == "yes"
        with pytest.raises(
            BadAnswer, match=r"result\.guests\[0?\.*\]\.fullName: missing; result\.guests"
        ):
            read("give", type=Table)


def test_type_that_cannot_be_read_fails_before_anything_is_sent() -> None:
    app = App("x")
    ran = []

    @app.command
    def give() -> int:
        ran.append(1)
        return 1

    class Mixed(msgspec.Struct):
        n: Annotated[int, pydantic.Field(gt=0)]

    wrong: list[Any] = [Mixed, Seat | Table | dict[str, int]]
    with connect_sync(app) as client:
        for kind in wrong:
            with pytest.raises(UsageError, match="type="):
                client.call("give", type=kind)
    assert not ran


def test_params_may_be_models() -> None:
    app = App("x")

    @app.query
    def greet(guests: list[Guest]) -> str:
        return guests[0].greeting

    with connect_sync(app) as client, connect_sync(app, protocol="mcp") as agent:
        assert client.call("greet", {"guests": [ADA]}) == "Dear Ada"
        assert agent.call_tool("greet", {"guests": [ADA]}, type=str) == "Dear Ada"
