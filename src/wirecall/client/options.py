"""What a client was told when it was made: `connect` names every option and says what it is for."""

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from wirecall.client.retries import Clock, RealClock, Retry

if TYPE_CHECKING:
    from wirecall.client.links import Link

TIMEOUT = 30.0
MAX_BYTES = 10 << 20  # of one answer: as much as one of our servers sends


class Options(Struct, kw_only=True):
    """What `connect` was told."""

    timeout: float = TIMEOUT
    retry: Retry = Retry()
    headers: Mapping[str, str] = {}
    coalesce: float | None = None
    discover: bool = True
    max_bytes: int = MAX_BYTES
    revision: str | None = None
    trust: Any = False
    confirm: Any = None
    clock: Clock = RealClock()
    chance: Callable[[], float] = random.random
    wrap: "Callable[[Link], Link]" = lambda link: link
