"""Short words for tests: make a message, read an answer."""

import json
from typing import TYPE_CHECKING, Any

from wirecall import App, jsonrpc
from wirecall.ledger.base import Ledger, LedgerDown

if TYPE_CHECKING:
    # Not in the processes that tests start: pytest takes longer to import than wirecall.
    import pytest


def call(method: str, params: Any = None, id: Any = 1, key: str | None = None) -> bytes:
    if key is not None:
        params = {**(params or {}), "idempotency_key": key}
    return jsonrpc.make_request(method, params, id)


def batch(*messages: bytes) -> bytes:
    return jsonrpc.make_batch(messages)


def read(reply: bytes | None) -> Any:
    assert reply is not None, "nothing was answered"
    return json.loads(reply)


def result(reply: bytes | None) -> Any:
    answer = read(reply)
    assert "result" in answer, answer
    return answer["result"]


def error(reply: bytes | None) -> Any:
    answer = read(reply)
    assert "error" in answer, answer
    return answer["error"]


def make_app(**options: Any) -> App:
    return App("test", **{"mode": "development", "ledger": "memory:", **options})


def lose_completions(
    monkeypatch: "pytest.MonkeyPatch", ledger: Ledger, times: int
) -> list[LedgerDown]:
    """Let `ledger.complete` fail with `LedgerDown` that many times.

    Return the failures still to come.
    """
    complete = ledger.complete
    failures = [LedgerDown("away") for _ in range(times)]

    async def flaky(*args: Any) -> bool:
        if failures:
            raise failures.pop()
        return await complete(*args)

    monkeypatch.setattr(ledger, "complete", flaky)
    return failures


def returning(kind: Any, value: Any) -> Any:
    def give() -> Any:
        return value

    give.__annotations__["return"] = kind
    return give
