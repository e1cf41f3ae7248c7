"""Clocks that a test sets, for ledgers in SQLite."""

from pathlib import Path

from wirecall.ledger.sqlite.ledger import SqliteLedger


class Clock:
    """Two clocks: one that people set, and one that they cannot."""

    def __init__(self) -> None:
        self.wall_time = 1.8e9
        self.since_boot = 5000.0

    def wall(self) -> float:
        return self.wall_time

    def boot(self) -> float:
        return self.since_boot


async def opened(path: Path, clock: Clock) -> SqliteLedger:
    ledger = SqliteLedger(path, clock=clock.boot, wall=clock.wall)
    await ledger.open()
    return ledger
