"""Short words for tests: make a message, read an answer."""

import json
from typing import TYPE_CHECKING, Any

from wirecall import App, jsonrpc
from wirecall.ledger.base import Ledger, LedgerDown

if TYPE_CHECKING:
    import pytest  # not for the processes that tests start: it takes longer to import than wirecall


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


def lose_completions(monkeypatch: "pytest.MonkeyPatch", ledger: Ledger, times: int) -> list[LedgerDown]:
    """The ledger is away when it should hear how a command ended, so often; then it is there again. Gives the times that are
    left."""
    complete, failures = ledger.complete, [LedgerDown("away") for _ in range(times)]

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
