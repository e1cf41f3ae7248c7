"""The helpers of these tests do what their names say."""

import json

from tests.commands.charges import charge
from tests.servers import Store
from wirecall.ledger import memory


def test_memory_ledger_of_these_tests_is_the_real_one(store: Store) -> None:
    """Only its storage is replaced: one URL, one ledger, so that two apps can share it."""
    assert memory.open_url.__module__ == "tests.servers"
    assert json.loads(charge()) == {
        "jsonrpc": "2.0",
        "method": "charge",
        "params": {"cents": 5, "idempotency_key": "k"},
        "id": 1,
    }
