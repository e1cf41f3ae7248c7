"""The bus between hosts while its connection is cut or silent: it listens again, says so, and takes
what was marked in that time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from tests.faults import PATIENCE, eventually
from tests.faults.fronts import Front
from tests.faults.proxy import Direction
from tests.ledger.bus import Heard, channel_of, listening
from wirecall.ledger.base import Bus, Ledger, LedgerDown, open_ledger
from wirecall.ledger.postgres import bus as postgres_bus
from wirecall.ledger.postgres import queue as postgres_queue
from wirecall.ledger.redis import bus as redis_bus
from wirecall.mcp.server.changes import Hub
from wirecall.mcp.server.others import EndedSession, Place, Relay
from wirecall.mcp.server.sessions import Sealer

# What a client sends to listen.
LISTEN = {"redis": b"SUBSCRIBE", "postgres": b"LISTEN"}


@pytest.fixture
def impatient(front: Front, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL through the proxy, of a ledger that soon looks whether its server is there."""
    monkeypatch.setattr(postgres_bus, "QUIET", 0.05)
    monkeypatch.setattr(redis_bus, "QUIET", 0.05)
    monkeypatch.setattr(redis_bus, "PONG_WITHIN", 0.3)
    monkeypatch.setattr(postgres_queue, "PATIENCE", 0.3)
    if front.kind == "redis":
        return f"{front.url}&socket_timeout=0.3"
    return f"{front.url}&connect_timeout=2"


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Ledger]:
    ledger = await open_ledger(url)
    try:
        yield ledger
    finally:
        await ledger.aclose()


async def is_reached(bus: Bus, heard: Heard, message: str) -> bool:
    """Send a message, and return whether it has arrived: the server may have been late to listen."""
    await bus.send(message)
    return message in heard.messages


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_bus_listens_again_after_a_silence(
    front: Front, impatient: str, direction: Direction, caplog: pytest.LogCaptureFixture
) -> None:
    """No end of the connection shows it: a firewall has forgotten the connection, or a host is gone."""
    channel = channel_of()
    async with (
        opened(front.store.url) as near,
        opened(impatient) as far,
        listening(near, channel) as (bus, _),
        listening(far, channel) as (_, heard),
    ):
        front.proxy.stall(direction)

        async def is_reported() -> bool:
            return "messages of other processes do not arrive" in caplog.text

        await eventually(is_reported)
        front.proxy.flow()
        await heard.until(lambda: heard.beginnings >= 2)
        await eventually(partial(is_reached, bus, heard, "after the silence"))


async def test_bus_listens_again_if_the_answer_to_its_first_message_is_lost(
    front: Front, impatient: str
) -> None:
    """The connection stays, and nothing comes."""
    lost = front.proxy.lose("hush", LISTEN[front.kind])
    channel = channel_of()
    async with opened(impatient) as far, listening(far, channel) as (bus, heard):
        assert lost.is_over
        await eventually(partial(is_reached, bus, heard, "to itself"))


# --- what was marked in that time -------------------------------------------------------------------


class Host:
    """One process among several, as far as the others can see."""

    def __init__(self, ledger: Ledger) -> None:
        async def opened() -> Ledger:
            return ledger

        self.ended: list[EndedSession] = []
        self.messages: list[tuple[str, str, bytes]] = []
        self.relay = Relay(Sealer("the same on every host"), opened)
        place = Place(Hub(), lambda: True, self.ended.append, self._take)
        self.relay.add("/mcp", place)

    def _take(self, caller: str, session: str, message: bytes) -> None:
        self.messages.append((caller, session, message))


@asynccontextmanager
async def host(url: str) -> AsyncIterator[Host]:
    async with opened(url) as ledger:
        made = Host(ledger)
        await made.relay.open()
        try:
            yield made
        finally:
            await made.relay.aclose()


async def test_relay_takes_every_mark_of_an_outage_once(front: Front, impatient: str) -> None:
    """And a host that is cut off says so: what it could not mark is refused."""
    sent = [("ann", "token", b"%d" % number) for number in range(40)]
    ended = [EndedSession("ann", f"id{number}", 1) for number in range(20)]
    own = EndedSession("ann", "own", 1)
    async with host(front.store.url) as near, host(impatient) as far:

        async def is_together() -> bool:
            await near.relay.pass_on("/mcp", "ann", "token", b"first")
            return bool(far.messages)

        await eventually(is_together)
        far.messages.clear()
        with front.proxy.away():
            with pytest.raises(LedgerDown):
                await far.relay.announce_end("/mcp", own, 60)
            for session, message in zip([*ended, *ended], sent, strict=True):
                await near.relay.announce_end("/mcp", session, 60)
                await near.relay.pass_on("/mcp", *message)
            assert far.ended == []

        async def has_all() -> bool:
            return set(far.ended) >= set(ended) and {*far.messages} >= {*sent}

        await eventually(has_all)
        assert sorted(message for message in far.messages if message in sent) == sorted(sent)
        async with asyncio.timeout(PATIENCE):
            await far.relay.announce_end("/mcp", own, 60)
        assert await near.relay.is_ended(own)
