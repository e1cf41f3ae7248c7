"""Fixtures of the tests of commands: what is done to the world, and apps on the store."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.calls import make_app
from tests.commands.charges import Effects, NewApp, World
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
def effects(store: Store, app: App) -> Effects:
    return Effects(store)
