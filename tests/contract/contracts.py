"""Contracts from which clients are generated."""

from typing import Any, Literal

import msgspec

from wirecall import App, DomainError
from wirecall.contract.lock import VERSION, Contract, LockedMethod, LockedTool, sealed


class Cat(msgspec.Struct, tag_field="kind", tag="cat"):
    """A cat."""

    name: str
    lives: int = msgspec.field(name="class", default=9)


class Dog(msgspec.Struct, tag_field="kind", tag="dog"):
    name: str
    friends: list["Dog"] = []


Size = Literal["small", "medium", "large", "extra large", "larger than that", "the largest of all"]


def pets() -> App:
    app = App("pets")
    bought: list[str] = []

    @app.query(name="pets.greet")
    def greet(pet: Cat | Dog, class_: int = 1, *, size: Size = "small") -> list[Cat | Dog]:
        """Greet a pet."""
        return [pet, Dog("Rex", [Dog("Max")])]

    @app.command
    def buy(name: str, key: int = 0) -> str:
        bought.append(name)
        return f"{name} {key} {len(bought)}"

    @app.command
    def forget() -> None:
        raise DomainError(7, "no such pet")

    return app


def contract_of(
    names: dict[str, Any],
    text: str = "",
    name: str = "server",
    errors: dict[str, str] | None = None,
) -> Contract:
    """A contract with one method and one tool, whose names and descriptions are a server's."""
    schema = {"type": "object", "properties": names, "required": list(names)}
    methods = {}
    tools = {}
    for each in names:
        methods[each] = LockedMethod(
            params=schema,
            order=list(names),
            result=schema,
            kind="command",
            key="optional",
            errors=errors or {},
        )
        tools[each] = LockedTool(input=schema, output=schema)
    section = {
        f"{place}/{each}/description": text for each in names for place in ("methods", "tools")
    }
    return sealed(
        Contract(
            version=VERSION,
            name=name,
            methods=methods,
            tools=tools,
            honours_keys=True,
            descriptions=section,
        )
    )


NAMES = [
    "class",
    "a-b",
    "a_b",
    "a.b",
    "1st",
    "_id",
    "__init__",
    "self",
    "key",
    "int",
    "list",
    "größe",
    "名前",
    "ａ",
    "²",
    "",
    "params",
]
