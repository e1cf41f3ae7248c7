"""What the console, `wirecall watch` and `/metrics` read: one object for every page.

A page is one method of `Source`, and its answer is ready to be written as JSON. The classes here
have no behaviour, so that the listener of the console depends on nothing else.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from wirecall.errors import WirecallError
from wirecall.protocol.messages import JsonObject


class Refusal(WirecallError):
    """A request of a page that is refused, with the status and the document that answer it."""

    def __init__(self, status: int, document: JsonObject) -> None:
        error = document.get("error")
        text = "refused"
        if isinstance(error, dict):
            text = str(error.get("message", text))
        super().__init__(text)
        self.status = status
        self.document = document


class NotFound(Refusal):
    """The page is about something that is not there, or no longer."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(
            404, {"error": {"type": "not_found", "message": f"There is no {what}.", "hint": hint}}
        )


class FeedEvent(Struct, frozen=True):
    """One event of the live feed: "rows", "numbers", "beat" or "end"."""

    event: str
    data: JsonObject
    # The place in the feed from which a reader can continue.
    id: str | None = None


class ListenerSettings(Struct, frozen=True):
    """How the console listens, and what it may do."""

    host: str = "127.0.0.1"
    # 0 takes a free one.
    port: int = 8421
    # The console changes nothing: no resolve, no call.
    readonly: bool = False
    # The file that keeps the digests of sessions, so that a restarted server knows them; without it
    # they end with the process.
    sessions: str | None = None
    # The port is still that of the console that this one replaces.
    shares: bool = False


class Listener(Protocol):
    """The open listener of the console."""

    url: str

    def link(self) -> str:
        """Return a new link that signs a person in once."""
        ...

    async def aclose(self) -> None:
        """End every stream, and close."""
        ...


@runtime_checkable
class WithUpstreams(Protocol):
    """An app with servers behind it: the gateway."""

    def states(self) -> dict[str, Any]:
        """Return the state of each upstream. Nothing is asked for it."""
        ...

    def tools_of(self, name: str) -> list[dict[str, Any]]:
        """Return the tools of an upstream that clients get, as they were last seen."""
        ...

    async def probe(self, name: str) -> dict[str, Any]:
        """Ask an upstream for its tools; return how long it took, or why it failed."""
        ...


class Source(Protocol):
    """The data of every page. A refused request raises `Refusal`."""

    async def now(self) -> JsonObject: ...
    async def calls(
        self, filter: str = "", *, limit: int = 200, before: str | None = None
    ) -> JsonObject: ...
    async def call(self, id: str) -> JsonObject: ...
    async def batch(self, id: str) -> JsonObject: ...
    async def ledger(
        self,
        *,
        state: str | None = None,
        method: str | None = None,
        caller: str | None = None,
        limit: int = 50,
        after: str | None = None,
    ) -> JsonObject: ...
    async def record(self, id: str) -> JsonObject: ...
    async def resolve(self, id: str, request: JsonObject, *, actor: str) -> JsonObject: ...
    async def methods(self) -> JsonObject: ...
    async def method(self, name: str) -> JsonObject: ...
    async def attempt(self, name: str, request: JsonObject, *, actor: str) -> JsonObject: ...
    async def audit(
        self, filter: str = "", *, limit: int = 100, before: int | None = None
    ) -> JsonObject: ...
    async def verify_audit(self) -> JsonObject: ...
    def export_audit(self, filter: str = "") -> AsyncIterator[bytes]: ...
    async def upstreams(self) -> JsonObject: ...
    async def upstream(self, name: str) -> JsonObject: ...
    async def probe(self, name: str, *, actor: str) -> JsonObject: ...
    async def settings(self) -> JsonObject: ...
    async def pause(self, paused: bool) -> JsonObject: ...
    def feed(self, filter: str = "", after: str | None = None) -> AsyncIterator[FeedEvent]: ...
    async def note_action(self, actor: str, action: str, target: str, outcome: str) -> None: ...
