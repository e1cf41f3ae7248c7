"""The transcripts: what is sent (`-->`) and what must come back (`<--`, nothing at all where it is
empty).

`<--` compares JSON values; members of `error.data` beyond the ones written down are welcome. `<==`
compares bytes.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wirecall import App, Context, DomainError, jsonrpc

FOLDER = Path(__file__).parent / "transcripts"

Exchange = tuple[int, bytes, str, bytes]


def exchanges(name: str) -> Iterator[Exchange]:
    """(line number, sent, `<--` or `<==`, expected)."""
    sent = b""
    for number, line in enumerate((FOLDER / f"{name}.txt").read_bytes().splitlines(), start=1):
        arrow, _, rest = line.partition(b" ")
        if arrow == b"-->":
            sent = rest
        elif arrow in (b"<--", b"<=="):
            yield number, sent, arrow.decode(), rest


def agrees(expected: Any, actual: Any) -> bool:
    """Equal, but for members of an error's data that the transcript does not mention."""
    if isinstance(expected, list) and isinstance(actual, list):
        return len(expected) == len(actual) and all(map(agrees, expected, actual))
    if isinstance(expected, dict) and isinstance(actual, dict) and "error" in expected:
        wanted = dict(expected["error"])
        got = dict(actual.get("error", {}))
        told = wanted.pop("data", {})
        given = got.pop("data", {})
        got_told = {name: given.get(name) for name in told}
        return (
            wanted == got
            and told == got_told
            and {**expected, "error": 0} == {**actual, "error": 0}
        )
    return bool(expected == actual) and type(expected) is type(actual)


def replay(name: str, handle: Callable[[bytes], bytes | None]) -> None:
    count = 0
    for number, sent, arrow, expected in exchanges(name):
        reply = handle(sent)
        where = f"{name}.txt:{number}: {sent!r} was answered {reply!r}"
        if not expected:
            assert reply is None, where
        elif arrow == "<==":
            assert reply == expected, where
        else:
            assert reply is not None, where
            assert agrees(json.loads(expected), json.loads(reply)), where
            assert b"\n" not in reply
        count += 1
    assert count, f"{name}.txt holds no exchange"


def arithmetic() -> App:
    app = App("arithmetic", mode="development")
    heard: list[Any] = []

    @app.query
    def subtract(minuend: int, subtrahend: int) -> int:
        return minuend - subtrahend

    @app.query(name="sum")
    def total(*numbers: int) -> int:
        return sum(numbers)

    @app.query
    def get_data() -> list[Any]:
        return ["hello", 5]

    for name in ("update", "notify_hello", "notify_sum"):
        app.query(name=name, notification_allowed=True)(lambda *numbers: heard.append(numbers))
    return app


def shop(mode: Any) -> App:
    app = App("shop", mode=mode, ledger="memory:")
    effects: list[str] = []

    @app.query(name="effects")
    def done() -> list[str]:
        return effects

    @app.query
    def read() -> int:
        return len(effects)

    @app.query(notification_allowed=True)
    def touch(times: int = 1) -> None:
        effects.append("touch")

    @app.command
    def put(value: int) -> dict[str, int]:
        effects.append("put")
        return {"value": value, "effects": len(effects)}

    @app.command
    def refuse() -> None:
        effects.append("refuse")
        raise DomainError(4020, "not enough money", {"missing": 5})

    @app.command
    def key_of(ctx: Context) -> str | None:
        effects.append("key_of")
        return ctx.idempotency_key

    @app.command
    def own_key(idempotency_key: str) -> str:
        effects.append("own_key")
        return idempotency_key

    return app


def test_specification_examples() -> None:
    replay("specification", arithmetic().handle_sync)


def test_specification_examples_by_dispatch_line() -> None:
    """J3: the same answers from a plain callable, without an App."""

    def handler(method: str, params: Any) -> Any:
        if method == "subtract":
            return (
                params[0] - params[1]
                if isinstance(params, list)
                else params["minuend"] - params["subtrahend"]
            )
        if method == "sum":
            return sum(params or [])
        if method == "get_data":
            return ["hello", 5]
        if method in ("update", "notify_hello", "notify_sum"):
            return None
        raise jsonrpc.MethodNotFound

    replay("specification", lambda data: jsonrpc.dispatch_line(data, handler))


@pytest.mark.parametrize("name", ["specification", "messages"])
async def test_messages_with_an_event_loop(name: str) -> None:
    app = arithmetic()
    replies = {sent: await app.handle(sent) for _, sent, _, _ in exchanges(name)}
    replay(name, lambda data: replies[data])


def test_messages() -> None:
    """J4, J5, J8, J12, J14."""
    replay("messages", arithmetic().handle_sync)


def test_policy() -> None:
    """P1, P2, P3, P5, P6, P7, P10."""
    replay("policy", shop("development").handle_sync)


def test_production() -> None:
    """P4."""
    replay("production", shop("production").handle_sync)
