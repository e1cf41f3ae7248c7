"""An empty ledger of each kind that keeps the contract of `ledger.base`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import KINDS, MEMORIES, Store, make_store, open_memory
from wirecall.ledger import memory


@pytest.fixture(params=[*KINDS, "cluster"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Store]:
    """Here, Redis counts twice: a server alone, and a cluster of three."""
    monkeypatch.setattr(memory, "open_url", open_memory)
    yield make_store(request.param, tmp_path, request.getfixturevalue)
    MEMORIES.clear()
