"""Which methods of a server are commands, and which are queries, as far as it says so.

Our servers tell it by `rpc.discover`, an OpenRPC document with `x-kind`. One call asks, the others wait for it; none gives
more than a good half of its own time to that. A server that refuses is not asked again, one that was not reached is.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from wirecall.client.exchange import Entry
from wirecall.errors import ConnectionLost, NotSent

DISCOVERY = 5.0  # seconds that the question may take, and no more than half of a call's time


class Kinds:
    """The kinds of a server's methods; `ask` calls a method within so many seconds, and gives the settled entry."""

    def __init__(self, known: Mapping[str, str] | None, ask: Callable[[str, float], Awaitable[Entry]]) -> None:
        self._known = known  # "query" or "command", by name; None: not asked yet
        self._ask = ask
        self._asking = asyncio.Lock()

    async def of(self, entry: Entry) -> str | None:
        """What the server says that the method of this call is; None: it does not."""
        if self._known is None:
            await self._learn(entry)
        return (self._known or {}).get(entry.method)

    async def _learn(self, entry: Entry) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(entry.timeout * 0.6), self._asking:
                if self._known is None:
                    self._known = await self._discovered(min(DISCOVERY, entry.timeout / 2))

    async def _discovered(self, timeout: float) -> Mapping[str, str] | None:
        answer = await self._ask("rpc.discover", timeout)
        if isinstance(answer.error, NotSent | ConnectionLost):
            return None
        return _kinds_in(answer.result()) if answer.ok else {}


def _kinds_in(document: Any) -> dict[str, str]:
    """`x-kind` of the methods in an OpenRPC document."""
    methods = document.get("methods") if isinstance(document, dict) else None
    described = [method for method in methods if isinstance(method, dict)] if isinstance(methods, list) else []
    return {m["name"]: m["x-kind"] for m in described if isinstance(m.get("name"), str) and isinstance(m.get("x-kind"), str)}
