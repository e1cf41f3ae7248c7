"""The servers of batches that the crash tests kill: each dies when it has recorded some entries.

As a program this file is a fork server, as `task_child` is.
"""

import os
import signal
from typing import Any, cast
from unittest.mock import patch

from msgspec import Struct

import wirecall.mcp.server.batch_run  # noqa: F401
from tests.crash.task_child import serve_orders
from wirecall import App, BatchTool
from wirecall.ledger.base import Ledger, Outcome, Tables, Token, open_ledger


class BatchOrder(Struct, frozen=True, kw_only=True):
    """The orders of a server."""

    url: str
    # The effects are lines of files in it, one file for each batch.
    folder: str
    # The server dies when it has recorded so many entries. None: it does not.
    die_after: int | None = None
    lease: float
    price: int = 100


def serve(order: BatchOrder) -> None:
    recorded = 0

    class WatchedLedger:
        """A ledger that counts the entries that it has recorded."""

        def __init__(self, ledger: Ledger) -> None:
            self._ledger: Any = ledger

        def __getattr__(self, name: str) -> Any:
            return getattr(self._ledger, name)

        async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
            nonlocal recorded
            applied: bool = await self._ledger.complete(token, outcome, retention)
            recorded += 1
            if recorded == order.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            return applied

    async def opened(url: str, tables: Tables) -> Ledger:
        return cast(Ledger, WatchedLedger(await open_ledger(url, tables)))

    app = App(
        "batches",
        mode="development",
        ledger=order.url,
        single_user=True,
        batch_tool=BatchTool(tools="all", destructive="allow", task=True),
    )

    @app.query
    def price(name: str) -> dict[str, int]:
        return {"cents": order.price}

    @app.command(lease=order.lease)
    async def pay(name: str, cents: int) -> dict[str, int]:
        note(order.folder, name, f"pay {cents}")
        return {"paid": cents}

    @app.command(lease=order.lease)
    def ship(name: str, cents: int) -> dict[str, str]:
        note(order.folder, name, f"ship {cents}")
        return {"parcel": f"{name}-{cents}"}

    @app.command(lease=order.lease)
    async def write(name: str, parcel: str) -> str:
        note(order.folder, name, f"write {parcel}")
        return f"letter about {parcel}"

    with patch("wirecall.app.open_ledger", opened):
        app.run(grace=5)


def note(folder: str, name: str, effect: str) -> None:
    """Add an effect to the file of a batch."""
    log = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, effect.encode() + b"\n")
    os.fsync(log)
    os.close(log)


if __name__ == "__main__":
    serve_orders(BatchOrder, serve)
