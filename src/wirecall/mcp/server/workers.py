"""What this worker tells the others, and what it hears from them; nothing where it is alone.

kind, uri                  a list or a resource has changed: those who listen there are told
ended                      a session has ended; workers that start later find a mark
caller, session, message   a session has said something that is of no use here, or of use everywhere
"""

import asyncio
from collections.abc import Callable
from typing import Any

from wirecall.mcp.server.hub import Hub
from wirecall.mcp.server.relay import Relay
from wirecall.mcp.server.sealed import Seals


class OtherWorkers:
    """The workers that share our secret. `on_end` and `on_message` take what they tell of sessions."""

    def __init__(
        self,
        hub: Hub,
        seals: Seals,
        *,
        shared: bool,
        on_end: Callable[[str], None],
        on_message: Callable[[str, str, bytes], None],
    ) -> None:
        self._hub = hub
        self._relay = Relay(seals, self._heard) if shared else None
        self._on_end = on_end
        self._on_message = on_message
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        if self._relay is not None:
            self._loop = asyncio.get_running_loop()
            await self._relay.open()
            self._hub.beyond = self._changed

    async def aclose(self) -> None:
        if self._relay is not None:
            self._hub.beyond = None
            await self._relay.aclose()

    def pass_on(self, caller: str, token: str | None, data: bytes) -> None:
        """What a session has said, to whoever has use for it."""
        if self._relay is not None and token is not None:
            self._relay.tell({"caller": caller, "session": token, "message": data.decode()})

    def tell_ended(self, id: str) -> None:
        """A session has ended, for those who are there and for those who start later."""
        if self._relay is not None:
            self._relay.tell({"ended": id})
            self._relay.mark(id)

    def know_ended(self, id: str) -> bool:
        """Whether one of them has seen the end of a session."""
        return self._relay is not None and self._relay.is_marked(id)

    def _changed(self, kind: str, uri: str | None) -> None:
        if self._relay is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._relay.tell, {"kind": kind, "uri": uri})

    def _heard(self, told: dict[str, Any]) -> None:
        if "kind" in told:
            self._hub.tell_here(told["kind"], told["uri"])
        elif "ended" in told:
            self._on_end(told["ended"])
        else:
            self._on_message(told["caller"], told["session"], told["message"].encode())
