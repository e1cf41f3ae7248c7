"""Log records that a test collects."""

import asyncio
import logging
from typing import Any

from tests.calls import call, make_app
from wirecall import App, DomainError


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def facts(self, *names: str) -> list[tuple[Any, ...]]:
        return [tuple(getattr(record, name) for name in names) for record in self.records]


def served() -> App:
    app = make_app()
    app.query(name="q", notification_allowed=True)(lambda: 1)
    app.command(name="c")(lambda: 2)

    @app.query
    async def refuse() -> None:
        await asyncio.sleep(0)
        raise DomainError(4020, "no")

    @app.query
    def crash() -> None:
        raise ValueError("secret")

    return app


# A new line, a terminal's colour, the same with C1, text turned around, other line ends, invisible
# characters.
HOSTILE = (
    "a\r\n2026-11-16 INFO b \x1b[31m \x9b31m \u202e \u2066 \u2028 \u200b \x00 \x7f \U000e0001 z"
)


def hostile(kind: str) -> tuple[App, bytes, str]:
    """An app, a call with hostile text in one place, and its caller."""
    app = served()

    @app.command
    def fail(text: str) -> None:
        raise ValueError(text)

    params: dict[str, Any] = {"text": HOSTILE if kind == "exception" else "x"}
    name = HOSTILE if kind == "method" else "fail"
    return (
        app,
        call(name, params, id=HOSTILE if kind == "id" else 1),
        HOSTILE if kind == "caller" else "ada",
    )
