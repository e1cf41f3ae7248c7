"""The words of these tests mean what they say."""

import json

from tests.commands.charges import charge
from tests.servers import Store
from wirecall.ledger import memory


def test_the_memory_ledger_of_these_tests_is_the_real_one(store: Store) -> None:
    """Only where it is kept is ours: one URL, one ledger, so that two apps can share it."""
    assert memory.open_url.__module__ == "tests.servers"
    assert json.loads(charge()) == {
        "jsonrpc": "2.0",
        "method": "charge",
        "params": {"cents": 5, "idempotency_key": "k"},
        "id": 1,
    }
