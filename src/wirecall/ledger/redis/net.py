"""Which server of Redis holds a record: the only one there is, or one of a cluster.

1. A server that is alone holds everything. In a cluster a key belongs to one of 16,384 slots, and a slot to a primary; the
   `Map` knows which, for all event loops. A `Net` has one loop's connections to the servers.
2. A server that does not hold a key says who does (MOVED, ASK) and has run nothing, so what it was asked is sent on.
   Nothing else is sent twice.
3. A server that is gone is `LedgerDown` for what it holds, at once. Meanwhile, in the background, the others are asked
   whether a replica has taken its place. Nobody waits for that, and one that is silent holds up nobody else's records.
"""

import asyncio
import random
from typing import Any, TypeAlias

from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, NoScriptError, ResponseError

from wirecall.ledger.base import LedgerDown
from wirecall.ledger.redis.wire import Command, Options, Wire

# How often a command is sent on before the servers count as being at odds with each other.
HOPS = 5

Address: TypeAlias = tuple[str, int]


class Map:
    """Who holds which slot, as far as is known. Without slots, the server that the URL names holds everything."""

    def __init__(self, home: Address) -> None:
        self.home = home
        self._slots: list[Address] = []

    @property
    def is_cluster(self) -> bool:
        return bool(self._slots)

    @property
    def primaries(self) -> list[Address]:
        """All who hold something."""
        return sorted(set(self._slots)) or [self.home]

    @property
    def known(self) -> list[Address]:
        """Whom to ask for news: in any order, but the server that the URL names comes last."""
        others = list({*self._slots} - {self.home})
        return [*random.sample(others, len(others)), self.home]

    def holder(self, name: bytes) -> Address:
        return self._slots[key_slot(name)] if self._slots else self.home

    def learn(self, told: list[Any], teller: Address) -> None:
        """Believe an answer to CLUSTER SLOTS: first slot, last slot, primary, replicas. A node may not know its own name."""
        slots: list[Address | None] = [None] * SLOTS
        for first, last, (host, port, *_), *_replicas in told:
            holder = (host or b"").decode() or teller[0], int(port)
            slots[first : last + 1] = [holder] * (last + 1 - first)
        held = [holder for holder in slots if holder]
        if len(held) < SLOTS:
            raise LedgerDown(f"{teller[0]}:{teller[1]} knows of no server for {SLOTS - len(held)} slots of the cluster")
        self._slots = held

    def move(self, slot: int, holder: Address) -> None:
        if not self._slots:  # only now does it turn out to be a cluster
            self._slots = [self.home] * SLOTS
        self._slots[slot] = holder


class Net:
    """The connections of one event loop."""

    def __init__(self, map: Map, options: Options, replicas: int) -> None:
        self._map = map
        self._options = options
        self._replicas = replicas
        self._wires: dict[Address, Wire] = {}
        self._news: asyncio.Task[None] | None = None
        self._is_open = True

    async def ask(self, name: bytes, command: Command, *, writes: bool) -> Any:
        """The answer of the server that holds this key."""
        address = self._map.holder(name)
        commands: tuple[Command, ...] = (command,)
        for _ in range(HOPS):
            answer = await self._answer(address, *commands, writes=writes)
            if not isinstance(answer, AskError):
                return answer
            address = answer.host or address[0], answer.port
            if isinstance(answer, MovedError):  # one kind of AskError in redis-py
                self._map.move(answer.slot_id, address)
                self._seek_news()
                commands = (command,)
            else:  # the slot is on its way there, and this key has arrived, or would be new
                commands = ("ASKING",), command
        raise LedgerDown(f"{self.where(address)}: sent from server to server {HOPS} times")

    async def ask_at(self, address: Address, *command: Any) -> Any:
        """The answer of this server."""
        return await self._answer(address, command)

    async def learn(self, address: Address) -> None:
        self._map.learn(await self.ask_at(address, "CLUSTER", "SLOTS"), address)

    def where(self, address: Address) -> str:
        return f"redis://{address[0]}:{address[1]}/{self._options['db']}"

    async def aclose(self) -> None:
        """Let what is under way end."""
        self._is_open = False
        if self._news is not None:
            self._news.cancel()
        for wire in self._wires.values():
            await wire.aclose()

    async def _answer(self, address: Address, *commands: Command, writes: bool = False) -> Any:
        wire = self._wires.get(address) or await self._connected(address)
        answer = await wire.ask(*commands, writes=writes)
        if not isinstance(answer, Exception):
            return answer
        if elsewhere := _redirection(answer):
            return elsewhere
        if self._map.is_cluster and not isinstance(answer, NoScriptError):
            self._seek_news()
        raise LedgerDown(f"{self.where(address)}: {answer}") from answer

    async def _connected(self, address: Address) -> Wire:
        host, port = address
        wire = self._wires[address] = Wire({**self._options, "host": host, "port": port}, self._replicas)
        await wire.open()
        return wire

    def _seek_news(self) -> None:
        if self._is_open and (self._news is None or self._news.done()):
            self._news = asyncio.get_running_loop().create_task(self._learn_from_any())

    async def _learn_from_any(self) -> None:
        for address in self._map.known:
            try:
                await self.learn(address)
            except LedgerDown:
                continue
            return


def _redirection(answer: Exception) -> AskError | None:
    """MOVED or ASK; an older redis-py reads them as such only in its own client for clusters."""
    if isinstance(answer, AskError):
        return answer
    kind, _, rest = str(answer).partition(" ")
    if isinstance(answer, ResponseError) and kind in ("MOVED", "ASK"):
        return MovedError(rest) if kind == "MOVED" else AskError(rest)
    return None
