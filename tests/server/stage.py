"""Handlers that a test holds and releases, one by one."""

import asyncio
from typing import Any, Literal

from tests.calls import batch, call, make_app
from wirecall import App


class Stage:
    """Handlers that report their start and end, and wait for the test to continue."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.begun: dict[str, asyncio.Event] = {}

    def gate(self, name: str) -> asyncio.Event:
        return self.gates.setdefault(name, asyncio.Event())

    def has_begun(self, name: str) -> asyncio.Event:
        return self.begun.setdefault(name, asyncio.Event())

    async def act(self, name: str) -> str:
        self.log.append(f"+{name}")
        self.has_begun(name).set()
        await self.gate(name).wait()
        self.log.append(f"-{name}")
        return name


def staged(key: Literal["auto", "off"] = "auto", **options: Any) -> tuple[App, Stage]:
    app = make_app(**options)
    stage = Stage()
    app.query(name="query")(stage.act)
    app.command(name="command", key=key)(stage.act)
    app.query(name="held", execution="sequential")(stage.act)
    app.command(name="free", execution="parallel")(stage.act)

    @app.query
    def plain(name: str) -> str:
        stage.log.append(f"={name}")
        return name

    return app, stage


def entries(*calls: str) -> bytes:
    """ "query:a" is a call of `query` with "a", under the id "a"."""
    return batch(
        *(call(one.split(":")[0], [one.split(":")[1]], id=one.split(":")[1]) for one in calls)
    )


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)
