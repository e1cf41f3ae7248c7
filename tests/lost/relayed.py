"""Lost answers through the gateway: servers without keys and records stand behind
`wirecall gateway run` and `wirecall wrap`, calls are cut and sent again, and effects are counted.

A trial is one intent of one client, as in `harness`: a call that is lost once or more often, and
then sent until it has a result. It is lost

    sent        at a random moment after it was sent
    entered     while the tool has done nothing yet
    acted       while the tool has taken effect
    writing     in the middle of its answer
    reading     after its client has received the whole answer, and has read a part of it

by the end of its connection or pipe (cut), by a cancellation whose reason is a timeout (cancel), by a
client that gives up without a word on its pipe (silence), or by SIGKILL: of the server behind the
gateway, with the client still there (upstream) or gone (orphan), or of the gateway itself (gateway).

The checker holds a trial to these rules:

1. It has one effect, and one more for each "unknown" that its client received. A further
   record that says `written` is counted as `unseen`: the gateway had handed the last byte of that
   answer to the transport without an error, so the next equal call is a new one
   (docs/commands.md, "Calls without a key").
2. No call is unseen whose tool stood still until the ledger had recorded the loss, or whose answer
   was cut in the middle.
3. Every `ran` is true. After "no", each effect so far was reported as unknown, or is that of an
   unseen call. "unknown" comes only after a kill. A result names a run of this trial.
4. A call that is sent again after its answer came is another intent: it has its own effect, and its
   answer is not a replay.
5. In the end no process remains.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, Protocol, TypeAlias

import msgspec
from msgspec import Struct

from tests.gateway.fronts import introduction, message_of, wrap_words
from tests.gateway.process import GatewayProcess
from tests.lost.harness import AGAIN, BEHIND, NOTICE, UNKNOWN, Moment
from tests.lost.senders import (
    ADDRESS,
    PARTS,
    PATIENCE,
    Answer,
    Cut,
    Flight,
    How,
    Order,
    Part,
    Raw,
    Sender,
    read_answer,
)
from tests.lost.shop import Effect
from tests.lost.stand import Control, Hold
from tests.mcp.asgi import LEGACY, R4, REVISIONS
from tests.ports import free_port
from tests.servers import Store
from wirecall.gateway.forward import LEASE
from wirecall.ledger.base import Ledger, Only, Record, RecordId, State, open_ledger

Quiet: TypeAlias = Literal["cut", "cancel", "silence"]
Kill: TypeAlias = Literal["upstream", "orphan", "gateway"]

MOMENTS: tuple[Moment, ...] = ("sent", "entered", "acted", "writing", "reading")
ROOT = Path(__file__).parents[2]
UNAVAILABLE = 50210
REFUSED = (*AGAIN, UNAVAILABLE)  # answers after which the call is sent again
LONG = 3 << 20  # bytes of an answer that no buffer holds, and that the gateway keeps
RESEND_AFTER = 0.1  # seconds, of `wrap`
# Seconds between two kills of one child: sooner, the gateway would make its next start wait.
CHILD_LIVES = 31.0
REASON = "timed out"  # of a cancellation
MARK = 2.0  # seconds in which a gateway that is not killed has recorded how an answer ended
QUIET = 0.3  # seconds without an effect after which nothing runs any more


class Trial(Struct, frozen=True, kw_only=True):
    """The events of one intent."""

    moment: Moment
    how: Quiet | Kill = "cut"
    times: int = 1
    is_overlapping: bool = False  # the next sending comes while the tool stands still
    is_watched: bool = False  # before the tool continues, the ledger has to record the loss
    delay: float = 0.0  # seconds until the loss, at a random moment
    nap: float = 0.0  # seconds that the tool takes
    short_of: int = 0  # bytes of the answer that still come
    behind: bytes = b""  # what follows the call on its connection
    part: Part = "none"  # of the answer, which is read before the cut
    size: int = 0  # bytes of the answer

    @property
    def is_held(self) -> bool:
        return self.moment in ("entered", "acted")

    def __str__(self) -> str:
        return f"{self.moment}, by {self.how}"


class Story(Struct):
    """The outcome of a trial."""

    kind: str
    order: Order
    trial: Trial
    sendings: int = 0
    losses: int = 0
    must_be_seen: bool = False  # the gateway could notice the only loss, for certain
    kills: int = 0  # that met this trial
    unknowns: int = 0  # that its client received
    refusals: Counter[int] = msgspec.field(default_factory=Counter)  # by code
    # The most effects after which an answer said `ran: "no"`, beyond those reported as unknown.
    denied: int = 0
    answer: Answer | None = None
    effects: int = 0
    unseen: int = 0
    # The states of its records, and how their answers ended, if there are more effects than known.
    ends: list[tuple[str, str | None]] = []
    faults: list[str] = []

    def __str__(self) -> str:
        trial = self.trial
        shape = f"overlapping {trial.is_overlapping}, watched {trial.is_watched}"
        if trial.moment == "reading":
            shape = f"{trial.part} of {trial.size} bytes"
        met = f"{self.losses} losses, {self.kills} kills, {self.unknowns} unknown"
        return (
            f"{self.kind}, {self.order.method}: {trial}, {shape}: {met}, {self.effects} effects, "
            f"refusals {dict(self.refusals)}, records {self.ends}, {self.answer}: "
            f"{'; '.join(self.faults)}"
        )


# --- the ledger in front --------------------------------------------------------------------------


class Books:
    """The ledger of a gateway, as the harness sees it."""

    def __init__(self, url: str) -> None:
        self._store = Store("sqlite", url)
        self._ledger: Ledger | None = None
        self._aged: set[tuple[RecordId, int, bytes]] = set()
        # The method of a record without its tool, by the upstream.
        self._methods: dict[str, str] = {}

    async def open(self) -> None:
        self._ledger = await open_ledger(self._store.url)

    async def aclose(self) -> None:
        if self._ledger is not None:
            await self._ledger.aclose()

    async def records(self, tool: str) -> Sequence[Record]:
        """The records of a tool, which is named after its upstream. Each trial has its own."""
        assert self._ledger is not None
        upstream = tool.split("-")[1]
        if upstream in self._methods:
            only = Only(method=f"{self._methods[upstream]}/{tool}")
            return await self._ledger.list(limit=100, only=only)
        every = await self._ledger.list(limit=1000)
        found = [record for record in every if record.id.method.endswith(f"/{tool}")]
        if found:
            self._methods[upstream] = found[0].id.method.removesuffix(f"/{tool}")
        return found

    async def until_lost(self, tool: str, patience: float) -> bool:
        """Wait until no answer of a tool is pending; return whether one is recorded as lost."""
        deadline = time.monotonic() + patience
        while True:
            found = await self.records(tool)
            ends = [record.delivery for record in found]
            if "pending" not in ends or time.monotonic() > deadline:
                return "undelivered" in ends
            await asyncio.sleep(0.01)

    async def age(self) -> None:
        """Let the leases of a dead process expire, as if the time had passed."""
        assert self._ledger is not None
        for record in await self._ledger.list(limit=1000):
            if record.state is not State.RUNNING and record.delivery != "pending":
                continue
            holder = (record.id, record.attempts, record.deliverer)
            if holder not in self._aged:
                self._aged.add(holder)
                self._store.age(record.id, LEASE + 1)


# --- the servers behind ---------------------------------------------------------------------------


class Hall:
    """A gateway in front of several servers, which count their effects in one file."""

    def __init__(self, folder: Path, log: IO[bytes], children: int) -> None:
        self.folder = folder
        self.log = log
        self.kills: list[float] = []
        self.is_up = asyncio.Event()
        self.control = Control(folder / "control", lambda _: None)
        self.web_port = free_port()
        self._web: asyncio.subprocess.Process | None = None
        self._killed: dict[str, float] = {}
        self._killing = asyncio.Lock()
        # The bytes of the file of effects that were read, and those effects by their order.
        self._seen = 0
        self._effects: defaultdict[str, list[Effect]] = defaultdict(list)
        self.children = [f"child{number}" for number in range(children)]
        upstreams: dict[str, dict[str, Any]] = {
            name: {"command": self.till(), "cwd": str(ROOT)} for name in self.children
        }
        upstreams["web"] = {"url": f"http://{ADDRESS}:{self.web_port}/mcp"}
        self.gateway = GatewayProcess(folder / "gateway", upstreams)
        self.books = Books(f"sqlite:{folder / 'gateway' / 'gateway.db'}")

    def till(self, *more: str) -> list[str]:
        """The command line of a server."""
        effects = str(self.folder / "effects")
        return [sys.executable, "-m", "tests.lost.till", effects, self.control.path, *more]

    def effects(self, order: str) -> list[Effect]:
        """The effects of an order so far."""
        file = self.folder / "effects"
        if file.exists():
            with file.open("rb") as lines:
                lines.seek(self._seen)
                # A line that is being written may have come in part.
                new, end, _ = lines.read().rpartition(b"\n")
            self._seen += len(new) + len(end)
            for line in new.splitlines():
                effect = msgspec.json.decode(line, type=Effect)
                self._effects[effect.order].append(effect)
        return self._effects[order]

    @asynccontextmanager
    async def opened(self) -> "AsyncIterator[Hall]":
        async with self.control.opened():
            await self._start_web()
            await asyncio.to_thread(self.gateway.start)
            try:
                await self.books.open()
                self.is_up.set()
                yield self
            finally:
                self.control.release()
                await self.books.aclose()
                await asyncio.to_thread(self.gateway.end)
                await self._end_web()

    async def _start_web(self) -> None:
        self._web = await asyncio.create_subprocess_exec(
            *self.till(str(self.web_port)), stdout=self.log, stderr=self.log, cwd=ROOT
        )
        async with asyncio.timeout(PATIENCE):
            while True:
                with suppress(OSError):
                    _, writer = await asyncio.open_connection(ADDRESS, self.web_port)
                    writer.close()
                    return
                await asyncio.sleep(0.02)

    async def _end_web(self) -> None:
        assert self._web is not None
        self._web.kill()
        await self._web.wait()

    def can_kill(self, upstream: str) -> bool:
        pause = 0.0 if upstream == "web" else CHILD_LIVES
        return time.monotonic() - self._killed.get(upstream, -pause) >= pause

    async def kill_upstream(self, name: str) -> None:
        """End a server at any point of its work. That over HTTP is started again."""
        async with self._killing:
            self.kills.append(time.monotonic())
            self._killed[name] = time.monotonic()
            if name == "web":
                await self._end_web()
                await self._start_web()
                return
            status = await asyncio.to_thread(self.gateway.status)
            for pid in status[name]["pids"]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def kill_gateway(self) -> None:
        """End the gateway at any point of its work, and start another. Its records outlive it."""
        self.is_up.clear()
        async with self._killing:
            self.kills.append(time.monotonic())
            await asyncio.to_thread(self.gateway.kill)
            await self.books.age()
            await asyncio.to_thread(self.gateway.start)
            self.is_up.set()


# --- clients --------------------------------------------------------------------------------------


class Door(Protocol):
    """A client in front of one server, and the ways in which it loses an answer."""

    kind: str
    moments: tuple[Moment, ...]
    losses: tuple[Quiet, ...]
    kills: tuple[Kill, ...]
    sender: Sender
    books: Books

    async def open(self) -> None: ...
    async def aclose(self) -> None: ...
    async def ready(self) -> None: ...
    def can_kill(self) -> bool: ...
    async def kill_upstream(self) -> None: ...
    async def kill_gateway(self) -> None: ...
    def killed(self) -> int: ...


KILLS: tuple[Kill, ...] = ("upstream", "orphan", "gateway")


class HttpDoor:
    """A client of `/mcp/NAME`."""

    moments = MOMENTS
    kills = KILLS

    def __init__(
        self, hall: Hall, upstream: str, revision: str, sender: Sender | None = None
    ) -> None:
        self.kind = f"{upstream} {revision}"
        self._hall = hall
        self._upstream = upstream
        self.books = hall.books
        path = f"/mcp/{upstream}"
        if sender is None:
            sender = Raw(revision, self.kind, hall.gateway.port, path=path)
        self.sender = sender
        self.losses: tuple[Quiet, ...] = ("cut", "cancel") if revision in LEGACY else ("cut",)
        self.open = self.sender.open
        self.aclose = self.sender.close

    async def ready(self) -> None:
        await self._hall.is_up.wait()

    def can_kill(self) -> bool:
        return self._hall.can_kill(self._upstream)

    async def kill_upstream(self) -> None:
        await self._hall.kill_upstream(self._upstream)

    async def kill_gateway(self) -> None:
        await self._hall.kill_gateway()

    def killed(self) -> int:
        return len(self._hall.kills)


class Pipe(Sender):
    """Lines to `wirecall wrap`."""

    def __init__(self, name: str, words: list[str], log: IO[bytes]) -> None:
        super().__init__(name, name)
        self.can_cancel = True
        self._words = words
        self._log = log
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._reading: asyncio.ReadTransport | None = None
        self.process: asyncio.subprocess.Process | None = None

    async def open(self) -> None:
        # Our own pipe, so that its reading end can be closed while the process runs.
        ours, its = os.pipe()
        reader = asyncio.StreamReader(limit=32 << 20)
        self._reading, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", 0)
        )
        self.process = await asyncio.create_subprocess_exec(
            *self._words,
            stdin=asyncio.subprocess.PIPE,
            stdout=its,
            stderr=self._log,
            cwd=ROOT,
        )
        os.close(its)
        self._listening = asyncio.create_task(self._listen(reader))
        greeted = self._ask("initialize", introduction(R4))
        async with asyncio.timeout(PATIENCE):
            await asyncio.wait([greeted])
        await self._write(message_of("notifications/initialized"))

    def _ask(self, method: str, params: dict[str, Any]) -> "asyncio.Future[Answer]":
        id = next(self.ids)
        answered = self._waiting[id] = asyncio.get_running_loop().create_future()
        assert self.process is not None and self.process.stdin is not None
        self.process.stdin.write(message_of(method, params, id) + b"\n")
        return answered

    async def _write(self, line: bytes) -> None:
        assert self.process is not None and self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(line + b"\n")
            await self.process.stdin.drain()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            message = json.loads(line)
            answered = self._waiting.pop(message.get("id"), None)
            if answered is None or answered.done():
                continue
            if "serverInfo" in message.get("result", {}):
                answered.set_result(Answer())
            else:
                answered.set_result(read_answer(message))
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(Cut("the pipe has ended"))
                answered.exception()  # retrieved: its call may have been given up
        self._waiting.clear()

    def begin(self, order: Order) -> Flight:
        meta = {"sender": self.name}
        params = {"name": order.method, "arguments": order.params, "_meta": meta}
        answered = self._ask("tools/call", params)
        id = next(each for each, future in self._waiting.items() if future is answered)

        async def cut(how: How) -> None:
            if how == "cancel":
                cancelled = {"requestId": id, "reason": REASON}
                await self._write(message_of("notifications/cancelled", cancelled))
            else:
                await self.leave()

        return Flight(answered, cut)

    async def leave(self) -> None:
        """Close the pipe at both ends, and start another `wrap` when this one has ended.

        Two that run side by side are two windows of one client, each with its own calls.
        """
        process = self._gone()
        assert process is not None and process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(PATIENCE):
            await process.wait()
        await self.open()

    async def kill(self, before: Callable[[], Awaitable[None]]) -> None:
        """End `wrap` without a word, and start another one."""
        process = self._gone()
        assert process is not None
        process.kill()
        await process.wait()
        await before()
        await self.open()

    def _gone(self) -> asyncio.subprocess.Process | None:
        process = self.process
        self.process = None
        if self._listening is not None and self._reading is not None:
            self._listening.cancel()
            self._reading.close()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(Cut("its client has left"))
                answered.exception()
        self._waiting.clear()
        return process

    async def close(self) -> None:
        process = self._gone()
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            async with asyncio.timeout(PATIENCE):
                await process.wait()


class PipeDoor:
    """A client of `wirecall wrap`."""

    moments: tuple[Moment, ...] = ("sent", "entered", "acted")
    losses: tuple[Quiet, ...] = ("cut", "cancel", "silence")
    # A client that leaves ends `wrap`, and so the server.
    kills: tuple[Kill, ...] = ("upstream", "gateway")

    def __init__(self, hall: Hall, name: str, target: list[str]) -> None:
        self.kind = name
        self._hall = hall
        self._killed = -CHILD_LIVES
        self._kills = 0
        ledger = f"sqlite:{hall.folder / name}.db"
        self.books = Books(ledger)
        options = ["--ledger", ledger, "--name", name, "--resend-after", f"{RESEND_AFTER}s"]
        self._pipe = Pipe(name, wrap_words(*options, *target), hall.log)
        self.sender: Sender = self._pipe

    async def open(self) -> None:
        await self._pipe.open()
        await self.books.open()

    async def aclose(self) -> None:
        await self._pipe.close()
        await self.books.aclose()

    async def ready(self) -> None:
        """Do nothing: `kill_gateway` returns when the next `wrap` is there."""

    def can_kill(self) -> bool:
        return time.monotonic() - self._killed >= CHILD_LIVES

    async def kill_upstream(self) -> None:
        self._kills += 1
        self._killed = time.monotonic()
        assert self._pipe.process is not None
        for pid in children_of(self._pipe.process.pid):
            if b"tests.lost.till" in command_of(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def kill_gateway(self) -> None:
        self._kills += 1
        await self._pipe.kill(self.books.age)

    def killed(self) -> int:
        return self._kills + len(self._hall.kills)


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children_of(parent: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    found.append(int(entry.name))
    return found


def processes_naming(text: str) -> list[int]:
    """The processes with this text in their command lines, but for this one."""
    every = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [pid for pid in every if pid != os.getpid() and text.encode() in command_of(pid)]


# --- a trial --------------------------------------------------------------------------------------


def random_trials(door: Door, rng: random.Random, kills: float) -> Iterator[Trial]:
    """Endless trials that this client can do; so many of them, of 1, kill a process."""
    while True:
        moment = rng.choices(door.moments, (30, 25, 30, 5, 10)[: len(door.moments)])[0]
        how: Quiet | Kill = rng.choice(door.losses)
        if rng.random() < kills:
            how = rng.choice(door.kills)
        if how in ("upstream", "orphan") and not door.can_kill():
            how = "cut"
        if how == "silence" and moment == "sent":
            continue  # an answer that came before the next sending was delivered
        if moment in ("writing", "reading"):
            how = "cut"
        is_bare = isinstance(door.sender, Raw) and how == "cut" and moment != "writing"
        yield Trial(
            moment=moment,
            how=how,
            times=rng.choice((1, 1, 2, 3)),
            is_overlapping=how == "silence" or rng.random() < 0.5,
            is_watched=how != "silence" and rng.random() < 0.5,
            delay=2 ** rng.uniform(-12, -4),
            nap=rng.choice((0.0, 0.0, 2 ** rng.uniform(-10, -5))),
            short_of=int(2 ** rng.uniform(0, 15)),
            behind=rng.choice(BEHIND) if is_bare and rng.random() < 0.2 else b"",
            part=rng.choice(PARTS),
            size=int(10 * 30_000 ** rng.random()) if moment == "reading" else 0,
        )


class Teller:
    """Runs a trial."""

    def __init__(self, hall: Hall, door: Door, trial: Trial, tool: str) -> None:
        self._hall = hall
        self._door = door
        self._trial = trial
        size = LONG if trial.moment == "writing" else trial.size
        self._order = Order(tool, tool, trial.nap, size)
        self.story = Story(door.kind, self._order, trial)

    async def tell(self) -> Story:
        trial = self._trial
        story = self.story
        door = self._door
        kills = door.killed()
        held = None
        if trial.is_held:
            held = self._hall.control.hold(
                self._order.name, "entered" if trial.moment == "entered" else "acted"
            )
        try:
            async with asyncio.timeout(2 * PATIENCE):
                for nth in range(trial.times):
                    await self._lose(held if nth == 0 else None)
                    if story.answer is not None:
                        break
                    if held is not None and not trial.is_overlapping:
                        held.release()
                await self._insist(held)
        except Exception as error:  # the other trials continue
            story.faults.append(repr(error))
        finally:
            if held is not None:
                held.release()
            story.kills = door.killed() - kills
        return story

    def _begin(self, held: Hold | None, *, is_lost: bool) -> Flight:
        trial = self._trial
        sender = self._door.sender
        self.story.sendings += 1
        if isinstance(sender, Raw) and is_lost:
            if trial.moment == "writing":
                return sender.begin(self._order, short_of=trial.short_of)
            if trial.moment == "reading":
                return sender.begin_bare(self._order, part=trial.part)
            if trial.behind:
                return sender.begin_bare(self._order, behind=trial.behind)
        flight = sender.begin(self._order)
        if held is not None and not is_lost:  # it continues while the repetition waits for it
            asyncio.get_running_loop().call_later(trial.delay, held.release)
        return flight

    async def _lose(self, held: Hold | None) -> None:
        """Send the call, and lose its answer; one that comes before has come."""
        trial = self._trial
        story = self.story
        door = self._door
        await door.ready()
        kills = door.killed()
        flight = self._begin(held, is_lost=True)
        if held is not None:
            reached = asyncio.create_task(held.reached.wait())
            await asyncio.wait(
                [flight.task, reached], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED
            )
            reached.cancel()
        else:
            patience = trial.delay if trial.moment in ("sent", "entered", "acted") else PATIENCE
            await asyncio.wait([flight.task], timeout=patience)
        stands = held is not None and held.reached.is_set() and not flight.task.done()
        if not flight.task.done():
            if held is not None and isinstance(door.sender, Pipe) and trial.how == "cut":
                held.release()  # `wrap` ends with its commands
            await self._end(flight)
        if self._take(flight.answered()):
            return
        story.losses += 1
        story.must_be_seen = flight.is_cut_in_answer()
        if stands and trial.is_watched and trial.how in ("cut", "cancel"):
            is_lost = await door.books.until_lost(self._order.method, NOTICE)
            story.must_be_seen = is_lost
            if not is_lost and door.killed() == kills:
                story.faults.append("the gateway did not notice the loss")

    async def _end(self, flight: Flight) -> None:
        """Lose the answer of a call, as the trial wants."""
        how = self._trial.how
        door = self._door
        if how == "silence":
            await asyncio.sleep(1.5 * RESEND_AFTER)
        elif how == "upstream":
            await door.kill_upstream()
            await asyncio.wait([flight.task], timeout=PATIENCE)
        elif how == "gateway":
            await door.kill_gateway()
            await asyncio.wait([flight.task], timeout=PATIENCE)
        elif how == "orphan":
            await flight.cut("cut")
            await door.ready()
            await door.kill_upstream()
        else:
            await flight.cut(how)

    def _take(self, answer: Answer | None) -> bool:
        """Note an answer; return whether there is one."""
        story = self.story
        if answer is None:
            return False
        effects = len(self._hall.effects(self._order.name))
        if answer.code is None:
            story.answer = answer
        elif answer.code == UNKNOWN:
            story.unknowns += 1
            if answer.ran != "unknown":
                story.faults.append(f"unknown says ran: {answer.ran}")
        elif answer.code in REFUSED:
            story.refusals[answer.code] += 1
        else:
            story.faults.append(f"it was answered with {answer.code}")
            story.answer = answer
        if answer.ran == "no":
            story.denied = max(story.denied, effects - story.unknowns)
        return True

    async def _insist(self, held: Hold | None) -> None:
        """Send until the answer is a result."""
        while self.story.answer is None:
            await self._door.ready()
            flight = self._begin(held, is_lost=False)
            try:
                self._take(await flight.answer())
            except Cut:
                self.story.losses += 1
            if self.story.answer is None:
                await asyncio.sleep(0.05)


async def check(story: Story, door: Door, effects: list[Effect]) -> None:
    """Find every fault of a story, once its tool is quiet."""
    answer = story.answer
    story.effects = len(effects)
    if answer is None:
        story.faults.append("it was not answered")
        return
    if answer.code is None and answer.run not in [effect.run for effect in effects]:
        story.faults.append("the answer names a run that there was not")
    if story.unknowns and not story.kills:
        story.faults.append("unknown without a kill")
    if len({effect.run for effect in effects}) != len(effects):
        story.faults.append("a run has two effects")
    extra = len(effects) - 1 - story.unknowns
    if extra > 0:
        await _check_extra(story, door, extra)
    # Of an unseen call the gateway knows nothing more, so the next one is a call that did not run.
    if story.denied > story.unseen:
        story.faults.append(f"an answer says ran: no, after {story.denied} effects")


async def _check_extra(story: Story, door: Door, extra: int) -> None:
    """Find out whether the gateway could see each loss of a story with more effects than intents."""
    await door.books.until_lost(story.order.method, MARK)
    records = await door.books.records(story.order.method)
    ends = story.ends = [(record.state.value, record.delivery) for record in records]
    handed_over = len([end for end in ends if end[1] == "written"])
    if ("done", "written") not in ends:  # a kill came before the mark of the last answer
        handed_over += 1
    if handed_over - 1 - story.unknowns < extra:
        story.faults.append(f"doubled: {ends}")
    elif story.must_be_seen and story.losses == 1:
        story.faults.append(f"doubled: a loss was not seen: {ends}")
    else:
        story.unseen = extra


# --- many of them ---------------------------------------------------------------------------------


class Repeats(Struct):
    """Equal calls, each sent after the answer to the one before it."""

    kind: str
    calls: int = 0
    runs: set[str] = set()
    replays: int = 0

    @property
    def swallowed(self) -> int:
        return self.calls - len(self.runs)


class Run:
    """The stories of one hall."""

    def __init__(self, hall: Hall, seed: str, revisions: tuple[str, ...] = REVISIONS) -> None:
        self.hall = hall
        self._seed = seed
        self._revisions = revisions
        self.stories: list[Story] = []
        self.repeats: list[Repeats] = []
        self.left: list[int] = []

    def _doors(self) -> list[Door]:
        hall = self.hall
        names = [*hall.children, "web"]
        doors: list[Door] = [
            HttpDoor(hall, name, revision) for revision in self._revisions for name in names
        ]
        doors.append(PipeDoor(hall, "pipe-child", ["--", *hall.till()]))
        url = f"http://{ADDRESS}:{hall.web_port}/mcp"
        doors.append(PipeDoor(hall, "pipe-web", [url]))
        return doors

    async def live(self, sendings: int, repeats: int, kills: float) -> None:
        """Run about so many intended repeats, then trials until so many calls were sent again."""
        async with self.hall.opened(), AsyncExitStack() as stack:
            doors = self._doors()
            for door in doors:
                stack.push_async_callback(door.aclose)
            await asyncio.gather(*(door.open() for door in doors))
            await asyncio.gather(*(self._repeat(door, -(-repeats // len(doors))) for door in doors))
            share = -(-sendings // len(doors))
            told = await asyncio.gather(*(self._try(door, share, kills) for door in doors))
            await self._quiet()
            for door, stories in zip(doors, told, strict=True):
                for story in stories:
                    await check(story, door, self.hall.effects(story.order.name))
        await self._ended()
        for story in self.stories:
            if len(self.hall.effects(story.order.name)) != story.effects:
                story.faults.append("it took effect after all the others")

    async def _ended(self) -> None:
        """Wait until no server remains; note those that do."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self.left = processes_naming(self.hall.control.path)
            if not self.left or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.05)

    async def _quiet(self) -> None:
        file = self.hall.folder / "effects"
        size = -1
        while (found := file.stat().st_size if file.exists() else 0) != size:
            size = found
            await asyncio.sleep(QUIET)

    async def _try(self, door: Door, most: int, kills: float) -> list[Story]:
        rng = random.Random(f"{self._seed} {door.kind}")
        again = 0
        told = []
        for nth, trial in enumerate(random_trials(door, rng, kills)):
            if again >= most:
                break
            tool = f"pay-{door.kind.replace(' ', '-')}-{nth}"
            story = await Teller(self.hall, door, trial, tool).tell()
            again += story.sendings - 1
            told.append(story)
            self.stories.append(story)
        return told

    async def _repeat(self, door: Door, count: int) -> None:
        told = Repeats(door.kind)
        order = Order("pay-again", f"{door.kind} again")
        while told.calls < count:
            await door.ready()
            answer = await door.sender.begin(order).answer()
            assert answer.run is not None, answer
            told.calls += 1
            told.runs.add(answer.run)
            told.replays += answer.is_replayed or answer.is_recognised
        told.runs &= {effect.run for effect in self.hall.effects(order.name)}
        self.repeats.append(told)


def summary(stories: list[Story], row: Callable[[Story], str]) -> str:
    """A table of losses, effects and answers."""
    tallies: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for story in stories:
        answer = story.answer
        tallies[row(story)] += Counter(
            {
                "trials": 1,
                "sent again": story.sendings - 1,
                "effects": story.effects,
                "replays": int(answer is not None and answer.is_replayed),
                "unknown": story.unknowns,
                "unseen": story.unseen,
                "wrong": int(bool(story.faults)),
            }
        )
    head = ("trials", "sent again", "effects", "replays", "unknown", "unseen", "wrong")
    lines = [f"{'':30}" + "".join(f"{word:>12}" for word in head)]
    for name, tally in sorted(tallies.items()):
        lines.append(f"{name:30}" + "".join(f"{tally[word]:12}" for word in head))
    return "\n".join(lines)
