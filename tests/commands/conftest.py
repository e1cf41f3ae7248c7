"""Fixtures of the tests of commands: the effects of handlers, and apps on the store."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.calls import make_app
from tests.commands.charges import Effects, NewApp, World
from tests.commands.wires import Wire, Wires, make_wire
from tests.servers import Store
from wirecall import App


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture
async def new_app(store: Store) -> AsyncIterator[NewApp]:
    made: list[App] = []

    def make(**options: Any) -> App:
        made.append(make_app(ledger=store.url, **options))
        return made[-1]

    yield make
    for app in made:
        await app.aclose()


@pytest.fixture
def app(new_app: NewApp) -> App:
    return new_app()


@pytest.fixture
async def wires() -> AsyncIterator[Wires]:
    """Open wires to apps, as `alice` where callers are authenticated, and close them at the end."""
    opened: list[Wire] = []

    async def open_wire(way: str, app: App, caller: str = "alice") -> Wire:
        opened.append(make_wire(way, app, caller))
        await opened[-1].open()
        return opened[-1]

    yield open_wire
    for wire in opened:
        await wire.close()


@pytest.fixture
def effects(store: Store, app: App) -> Effects:
    return Effects(store)
