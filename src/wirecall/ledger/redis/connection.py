"""Access to Redis: one event loop's connections to a server or a cluster, and queues of commands.

1. All commands that wait for a server are sent together, as one pipeline. A caller that is
   cancelled only leaves the queue; no connection is given up halfway.
2. The map of a cluster is redis-py's. A queue belongs to one server, so one that is gone or silent
   holds up only its own records. While it does, redis-py asks the others in the background whether
   a replica has taken its place.
3. We send nothing twice: a lost answer is an error, and the caller finds out by asking. A server
   that does not hold a key (MOVED, ASK) has run nothing, so the command is sent to the one it
   names. redis-py would do that too, but it sends ASKING on one connection and the command on
   another, and closes all connections after some MOVED.
4. With `replicas`, one WAIT follows each pipeline: the server counts the replicas that hold
   everything that this connection has written. If they are too few, none of these writes counts.
"""

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from typing import Any, TypeAlias

from msgspec import Struct
from redis.asyncio import ConnectionPool, Redis, RedisCluster, SSLConnection
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeout

from wirecall.aio import start, wake
from wirecall.errors import UsageError
from wirecall.ledger.base import LedgerDown
from wirecall.logs import logger

PREFIX = "wirecall:"
OLDEST = (6, 2)

# Connections per loop and server, and the most commands sent at once on one of them.
# `max_connections` in the URL changes the former. With 64 commands in flight each connection has
# half of them, so the server works on one half while the loop works on the other; in one batch,
# each would wait for the other. From 300 in flight on, 100 would be a tenth faster.
LANES = 2
BATCH = 32

# How often a command is redirected before the servers count as contradicting each other.
HOPS = 5

# Seconds that the replicas have to confirm a write; half of the socket's timeout, if that is
# shorter.
REPLICATED_WITHIN = 1.0

Command: TypeAlias = tuple[Any, ...]
Options: TypeAlias = dict[str, Any]
# A primary of a cluster, or None for the only server.
Node: TypeAlias = ClusterNode | None


def options_of(url: str) -> tuple[Options, str, int]:
    """Return redis-py's options of the URL, with our defaults; and `prefix` and `replicas`."""
    defaults = {
        "host": "localhost",
        "port": 6379,
        "db": 0,
        "socket_connect_timeout": 2.0,
        "socket_timeout": 5.0,
        "protocol": 2,
    }
    fixed = {"decode_responses": False, "retry": Retry(NoBackoff(), 0)}
    try:
        options: Options = {**defaults, **parse_url(re.sub("^valkey:", "redis:", url)), **fixed}
        prefix = options.pop("prefix", PREFIX)
        replicas = int(options.pop("replicas", 0))
        if replicas < 0:
            raise ValueError(f"replicas is {replicas}")
        # An empty hash tag switches off those in the rest of a name.
        if re.match(r"[^{]*{}", prefix):
            raise ValueError(
                f"prefix is {prefix}, and with {{}} in it a cluster would part records that "
                "belong together"
            )
        pool: Any = ConnectionPool(**options)
        pool.make_connection()  # this does not connect: it checks the options
    except (ValueError, TypeError, RedisError) as error:
        raise UsageError(
            "The URL of the ledger is not one that redis-py takes.",
            str(error),
            "for example redis://localhost:6379/0?prefix=shop:",
        ) from error
    return options, prefix, replicas


class Connections:
    """The connections of one event loop.

    They lead to the server that the URL names, or to the primaries of its cluster.
    """

    def __init__(
        self, options: Options, replicas: int, is_cluster: bool, reached: Callable[[], None]
    ) -> None:
        """`reached` is called when another server may answer from now on.

        That is at each new connection. In a cluster it is when a slot has moved, when the primaries
        are others, and when one answers for the first time or after a lost answer. It is not called
        when a primary goes away: the others are those that were known.
        """
        self.lifetime = self._live()
        self._options = options
        self._replicas = replicas
        self._reached = reached
        self._pool = ConnectionPool(**options, redis_connect_func=self._connected)
        self._server = Redis(connection_pool=self._pool)
        self._cluster: RedisCluster | None = None
        # The map of the cluster is read from these at first.
        self._first: list[ClusterNode] = []
        self._queues: dict[Node, Queue] = {}
        self._news: asyncio.Task[None] | None = None
        self._is_closed = False
        if is_cluster:
            given = {name: value for name, value in options.items() if name != "max_connections"}
            given["ssl"] = given.pop("connection_class", None) is SSLConnection
            self._cluster = RedisCluster(**given)
            self._first = [*self._cluster.nodes_manager.startup_nodes.values()]

    async def _connected(self, connection: Any) -> None:
        await connection.on_connect()
        self._reached()

    async def _live(self) -> AsyncGenerator[None, None]:
        """Stay suspended until the loop ends, or the ledger is forgotten.

        A loop closes its asynchronous generators before it ends.
        """
        try:
            yield
        finally:
            with suppress(RedisError, OSError):
                await self._pool.disconnect()
            nodes = [node for node in self._queues if node is not None]
            if self._cluster is not None:
                with suppress(RedisError, OSError):
                    await self._cluster.aclose()
                # redis-py closes the nodes on its map, up to the first that takes too long. A
                # server that left the map and came back has a new node there; the server that the
                # URL names has one more.
                nodes += *self._first, *self._cluster.get_nodes()
            for node in nodes:
                with suppress(RedisError, OSError):
                    await node.disconnect()

    async def aclose(self) -> None:
        """Let the operations in flight end.

        After that redis-py must not be used: it would open connections again.
        """
        while senders := {sender for queue in self._queues.values() for sender in queue.senders}:
            # It may continue after its answer: on another server, or with a whole script.
            await asyncio.wait(senders)
        self._is_closed = True
        if self._news is not None:
            self._news.cancel()
            await asyncio.wait([self._news])
        await self.lifetime.aclose()

    async def primaries(self) -> list[Node]:
        """Return all servers that hold records."""
        if self._cluster is None:
            return [None]
        await self._know()
        return [*self._cluster.get_primaries()]

    async def holder(self, name: bytes) -> Node:
        """Return the server that holds a key, as far as is known."""
        if self._cluster is None:
            return None
        await self._know()
        try:
            # It takes bytes as well.
            return self._cluster.get_node_from_key(name)  # type: ignore[arg-type]
        except RedisClusterException as error:
            raise LedgerDown(f"{self.where(None)}: {error}") from error

    async def _know(self) -> None:
        """Read the map of the cluster, once."""
        assert self._cluster is not None
        try:
            await self._cluster.initialize()
        except Exception as error:  # a server that is not Redis may confuse the driver in any way
            raise LedgerDown(f"{self.where(None)}: {error}") from error
        # By now, and redis-py does not close a client that is still reading the map.
        if self._is_closed:
            await self._cluster.aclose()
            raise LedgerDown("the ledger is closed")

    def where(self, node: Node) -> str:
        host = self._options["host"]
        port = self._options["port"]
        if node is not None:
            host = node.host
            port = node.port
        return f"redis://{host}:{port}/{self._options['db']}"

    async def ask(self, name: bytes, command: Command, *, writes: bool) -> Any:
        """Return the answer of the server that holds this key."""
        node: Node = None
        if self._cluster is not None:
            node = await self.holder(name)
        commands: tuple[Command, ...] = (command,)
        for _ in range(HOPS):
            answer = await self._answer(node, commands, writes)
            if not isinstance(answer, AskError):
                return answer
            self._reached()
            self.seek_news()
            elsewhere: Node = None
            if self._cluster is not None and node is not None:
                elsewhere = self._cluster.get_node(answer.host or node.host, answer.port)
            if elsewhere is None:
                raise LedgerDown(
                    f"{self.where(node)}: {answer}, and that server is not known yet"
                ) from answer
            # MOVED is one kind of AskError in redis-py. After ASK the slot is being moved, and this
            # key has arrived there, or would be new.
            node = elsewhere
            commands = (("ASKING",), command)
            if isinstance(answer, MovedError):
                commands = (command,)
        raise LedgerDown(f"{self.where(node)}: sent from server to server {HOPS} times")

    async def ask_at(self, node: Node, *command: Any) -> Any:
        """Return the answer of this server."""
        return await self._answer(node, (command,), False)

    async def _answer(self, node: Node, commands: tuple[Command, ...], writes: bool) -> Any:
        queue = self._queues.get(node)
        if queue is None:
            queue = self._queues[node] = Queue(self, node)
        losses = queue.losses
        answer = await queue.ask(commands, writes)
        if isinstance(answer, AskError):
            return answer
        if isinstance(answer, Exception):
            if _may_be_another_next(answer):
                queue.losses += 1
            if not isinstance(answer, NoScriptError):
                self.seek_news()
            raise LedgerDown(f"{self.where(node)}: {answer}") from answer
        # It was sent after a loss that no answer followed yet.
        if self._cluster is not None and losses > queue.made_up:
            queue.made_up = losses
            self._reached()
        return answer

    def seek_news(self) -> None:
        """Have redis-py read the map of the cluster again. No caller waits for that."""
        cluster = self._cluster
        if cluster is None or self._is_closed or (self._news is not None and not self._news.done()):
            return

        async def learn() -> None:
            before = {node.name for node in cluster.get_primaries()}
            with suppress(Exception):  # the next failure asks again
                await cluster.nodes_manager.initialize()
            if {node.name for node in cluster.get_primaries()} != before:
                self._reached()

        self._news = start(asyncio.get_running_loop(), learn())

    async def exchange(self, node: Node, asks: "list[_Ask]") -> list[Any]:
        """Send commands to one server in one pipeline; return the last answer to each ask."""
        commands = [command for ask in asks for command in ask.commands]
        is_to_last = self._replicas > 0 and any(ask.writes for ask in asks)
        if is_to_last:
            patience = int(1000 * min(REPLICATED_WITHIN, self._options["socket_timeout"] / 2))
            commands.append(("WAIT", self._replicas, patience))
        if self._cluster is None:
            pipeline: Any = self._server.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers = await pipeline.execute(raise_on_error=False)
        else:
            pipeline = self._cluster.pipeline()
            for command in commands:
                pipeline.execute_command(*command, target_nodes=node)
            answers = await pipeline.execute(raise_on_error=False, allow_redirections=False)
        if any(
            isinstance(answer, ResponseError) and "READONLY" in str(answer) for answer in answers
        ):
            # A primary that was demoted keeps its connections; a new one may lead to its successor.
            await self._pool.disconnect(inuse_connections=False)
        held: Any = self._replicas
        if is_to_last:
            held = answers.pop()
        each = iter(answers)
        last = [[next(each) for _ in ask.commands][-1] for ask in asks]
        if isinstance(held, int) and held >= self._replicas:
            return last
        # The writes count as failed: a caller takes its own back, or reports that it is not
        # recorded.
        lost = RedisError(
            f"replicas={self._replicas} have to hold a write, and this one is held by: {held}"
        )
        for number, ask in enumerate(asks):
            if ask.writes and not isinstance(last[number], Exception):
                last[number] = lost
        return last

    @property
    def lanes(self) -> int:
        return self._options.get("max_connections") or LANES


class _Ask(Struct, eq=False):
    """Commands, and the future of the answer to the last of them."""

    commands: tuple[Command, ...]
    writes: bool
    answer: "asyncio.Future[Any]"


class Queue:
    """The commands that wait for a connection to one server."""

    def __init__(self, connections: Connections, node: Node) -> None:
        self.senders: set[asyncio.Task[None]] = set()
        # How many answers were lost, and how many of these were before an ask that was answered. At
        # first no answer is known, as after a loss.
        self.losses = 1
        self.made_up = 0
        self._connections = connections
        self._node = node
        self._waiting: deque[_Ask] = deque()

    def ask(self, commands: tuple[Command, ...], writes: bool) -> "asyncio.Future[Any]":
        """Return a future answer to the last of these commands, sent side by side.

        An error is an answer.
        """
        loop = asyncio.get_running_loop()
        ask = _Ask(commands, writes, loop.create_future())
        self._waiting.append(ask)
        if len(self.senders) < self._connections.lanes:
            sender = start(loop, self._send())
            self.senders.add(sender)
            # A sender that is cancelled before it begins does not discard itself.
            sender.add_done_callback(self.senders.discard)
        return ask.answer

    async def _send(self) -> None:
        def take(most: int) -> list[_Ask]:
            taken = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            return [ask for ask in taken if not ask.answer.done()]

        while self._waiting:
            asks = take(BATCH)
            answers: list[Any] = [LedgerDown("the event loop ended")] * len(asks)
            try:
                if asks:
                    answers = await self._connections.exchange(self._node, asks)
            except Exception as error:  # garbage from the server is a ValueError in the driver
                # The server is silent: one timeout is enough for all that wait.
                if isinstance(error, RedisTimeout):
                    asks += take(len(self._waiting))
                answers = [error] * len(asks)
            finally:
                for ask, answer in zip(asks, answers, strict=True):
                    wake(ask.answer, answer)
        # Now, not when the loop gets to it: the next ask must start another.
        self.senders.discard(asyncio.current_task())


def _may_be_another_next(error: Exception) -> bool:
    """Return whether a failure says that the next answer may be from another server.

    A server that refuses a command has answered; it is the one that was known.
    """
    if isinstance(error, ResponseError):
        return isinstance(error, (ClusterError, ReadOnlyError))
    return True


def check_server(where: str, info: dict[str, Any], replicas: int) -> None:
    """Refuse a server that cannot keep the contract, and warn about one that might not."""

    def faults() -> Iterator[tuple[bool, str, str]]:
        version = str(info.get("redis_version", "7.0"))
        yield (
            tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST,
            f"it is version {version}",
            f"use {OLDEST[0]}.{OLDEST[1]} or newer",
        )
        yield (
            info.get("role") == "slave",
            "it is a replica, and takes no writes",
            "name the primary",
        )
        yield (
            policy != "noeviction" and info.get("maxmemory", 0) > 0,
            f"it drops records when memory runs out: maxmemory-policy is {policy}",
            "CONFIG SET maxmemory-policy noeviction",
        )
        has = info.get("connected_slaves", replicas)
        yield (
            has < replicas,
            f"it has {has} replicas, and with replicas={replicas} a write counts when so many "
            "hold it",
            "start the replicas, or take a smaller number",
        )

    policy = info.get("maxmemory_policy", "noeviction")
    for is_wrong, why, fix in faults():
        if is_wrong:
            raise LedgerDown(f"{where} cannot be a ledger.\n  why: {why}\n  fix: {fix}")
    hidden = {"redis_version", "role", "maxmemory", "maxmemory_policy", "aof_enabled"} - info.keys()
    if hidden:
        logger.warning(
            "the ledger at %s: could not check whether it keeps its data: INFO does not report %s",
            where,
            ", ".join(sorted(hidden)),
        )
    if policy != "noeviction":
        logger.warning(
            "the ledger at %s: maxmemory-policy is %s: set noeviction before you set maxmemory",
            where,
            policy,
        )
    if info.get("aof_enabled") == 0:
        logger.warning(
            "the ledger at %s: appendonly is no; after a crash of the server, commands may run a "
            "second time",
            where,
        )
