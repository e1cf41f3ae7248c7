"""The clock of the running event loop, which a test puts forward: a deadline passes when the test
wants it, not when the machine is busy. It is also a clock for `connect`, whose own does not follow
the loop's.
"""

import asyncio

import pytest


class LoopClock:
    sleep = staticmethod(asyncio.sleep)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._real = loop.time
        self._ahead = 0.0
        monkeypatch.setattr(loop, "time", self.time)

    def time(self) -> float:
        return self._real() + self._ahead

    def advance(self, seconds: float) -> None:
        """Advance the clock at once. The timers that are due fire in the loop's next iteration."""
        self._ahead += seconds
