"""How a client and a server find a revision that both speak: newest first.

1. The client tries 2026-07-28 with `server/discover`. A server that answers with its result, or
   with an error that only that revision has, speaks it. If it does not serve the version (-32022),
   the client takes one that it lists, even if that is the one that was sent.
2. Any other answer, of any code or status, comes from an older server: then `initialize` offers the
   newest revision with a handshake, and the server's answer counts if this client speaks it.
3. On a pipe an older server may also stay silent. After `PROBE` seconds the client also sends
   `initialize`, and the first success of the two decides: a server that is slow to start need not
   be an old one.
4. A pinned revision is the only one that the client tries, with its own handshake.
"""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from wirecall.aio import cancel_all
from wirecall.errors import (
    BadAnswer,
    CallFailed,
    ConnectionLost,
    HeaderMismatch,
    MethodNotFound,
    NotSent,
    RpcError,
    TimedOut,
    UnknownVersion,
)
from wirecall.mcp.revisions import HANDSHAKE, REVISIONS, STATELESS, Revision
from wirecall.mcp.types import PREFIX
from wirecall.protocol.messages import UNREADABLE, JsonObject

if TYPE_CHECKING:
    from wirecall.mcp.client.conversation import Conversation

PROBE = 3.0  # seconds of silence on a pipe before the client also sends `initialize`
_BARRED = (401, 403, 407)  # a server that refuses the client does not reveal its revision


class Agreed(Struct, frozen=True):
    """The outcome of a handshake."""

    revision: Revision
    capabilities: JsonObject
    server: JsonObject
    instructions: str | None = None


class _Discovered(Struct, rename="camel"):
    supported_versions: list[str]
    capabilities: JsonObject = {}
    instructions: str | None = None
    # Drafts have it here; the specification has it in `_meta`.
    server_info: JsonObject = {}
    meta: JsonObject = msgspec.field(default_factory=dict, name="_meta")


class _Initialized(Struct, rename="camel"):
    protocol_version: str
    capabilities: JsonObject = {}
    server_info: JsonObject = {}
    instructions: str | None = None


def common(error: UnknownVersion, ours: Iterable[Revision]) -> list[Revision]:
    """Return those of our revisions that the server lists in its refusal (`data.supported`)."""
    if not isinstance(error.data, dict):
        return []
    listed = error.data.get("supported")
    if not isinstance(listed, list):
        return []
    return [revision for revision in ours if revision.name in listed]


class Handshake:
    """Finds the revision to speak with one server."""

    def __init__(self, conversation: "Conversation") -> None:
        self._conversation = conversation
        self._pinned = conversation.pinned
        self._may_be_silent = conversation.link.is_pipe

    async def agree(self) -> Agreed:
        """Return the revision that both sides speak, or raise the refusal."""
        if self._pinned is not None and not self._pinned.is_stateless:
            return await self.initialize(self._pinned)
        if self._pinned is not None:
            try:
                return await self._discover(self._pinned)
            except MethodNotFound:  # a server must have it, but the client does not need it
                return Agreed(self._pinned, {}, {})
        if self._may_be_silent:
            return await self._race()
        try:
            return await self._discover(STATELESS[-1])
        except (RpcError, CallFailed) as error:
            return await self._after(error)

    async def _after(self, refusal: RpcError | CallFailed) -> Agreed:
        """Try the older handshake, unless the refusal would be the same."""
        is_final = isinstance(refusal, HeaderMismatch)
        if isinstance(refusal, CallFailed):
            is_final = (
                isinstance(refusal, (NotSent, ConnectionLost, TimedOut))
                or refusal.status in _BARRED
            )
            if self._may_be_silent and isinstance(refusal, ConnectionLost):  # the process crashed
                is_final = False
        elif isinstance(refusal, UnknownVersion):  # it may list older revisions with a handshake
            is_final = not common(refusal, HANDSHAKE)
        if is_final:
            raise refusal
        try:
            return await self.initialize(HANDSHAKE[-1])
        except RpcError:
            if isinstance(refusal, MethodNotFound):  # it knows neither handshake, so it needs none
                return Agreed(STATELESS[-1], {}, {})
            raise

    async def _race(self) -> Agreed:
        loop = asyncio.get_running_loop()
        discovering = loop.create_task(self._discover(STATELESS[-1]))
        initializing: asyncio.Task[Agreed] | None = None
        try:
            await asyncio.wait([discovering], timeout=PROBE)
            if discovering.done():
                error = discovering.exception()
                if error is None:
                    return discovering.result()
                assert isinstance(error, (RpcError, CallFailed)), error
                return await self._after(error)
            # It is silent, or slow to start: the first success of the two decides, else the error
            # of `initialize`.
            initializing = loop.create_task(self.initialize(HANDSHAKE[-1]))
            try:
                await asyncio.wait([discovering, initializing], return_when=asyncio.FIRST_COMPLETED)
                if initializing.done() and initializing.exception():
                    await asyncio.wait([discovering])
                if discovering.done() and not discovering.exception():
                    return discovering.result()
                return await initializing
            except ConnectionLost:  # the first question crashed the process
                return await self.initialize(HANDSHAKE[-1])
        finally:
            await cancel_all(discovering, initializing)

    async def _discover(self, revision: Revision) -> Agreed:
        conversation = self._conversation
        try:
            raw = await conversation.request(
                "server/discover", {"_meta": conversation.describe(revision)}, revision
            )
        except UnknownVersion as error:
            revision = self._listed(error)
            raw = await conversation.request(
                "server/discover", {"_meta": conversation.describe(revision)}, revision
            )
        try:
            found = msgspec.json.decode(raw, type=_Discovered)
        except UNREADABLE:
            if self._pinned is not None:
                return Agreed(revision, {}, {})
            raise BadAnswer("what answers server/discover is not its result") from None
        if revision.name not in found.supported_versions:
            revision = self._listed(UnknownVersion(supported=found.supported_versions))
        server = found.meta.get(f"{PREFIX}serverInfo", found.server_info)
        if not isinstance(server, dict):
            server = {}
        return Agreed(revision, found.capabilities, server, found.instructions)

    def _listed(self, error: UnknownVersion) -> Revision:
        """Return the newest revision that both sides speak, or raise the error."""
        found = [
            revision for revision in common(error, STATELESS) if self._pinned in (None, revision)
        ]
        if not found:
            raise error
        return found[-1]

    async def initialize(self, revision: Revision) -> Agreed:
        """Return the outcome of `initialize`, the handshake of the older revisions."""
        raw = await self._conversation.request(
            "initialize", self._conversation.offer(revision), None
        )
        try:
            found = msgspec.json.decode(raw, type=_Initialized)
        except UNREADABLE as error:
            raise BadAnswer(f"what answers initialize is not its result: {error}") from None
        agreed = REVISIONS.get(found.protocol_version)
        if agreed is None or not agreed.has("handshake") or self._pinned not in (None, agreed):
            spoken = ", ".join(each.name for each in HANDSHAKE)
            if self._pinned is not None:
                spoken = revision.name
            reason = f"the server speaks MCP {found.protocol_version[:40]!r}, this client {spoken}"
            raise UnknownVersion(
                reason, supported=[found.protocol_version], requested=revision.name
            )
        return Agreed(agreed, found.capabilities, found.server_info, found.instructions)
