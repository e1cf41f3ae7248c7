"""Lost answers: calls are cut at random points of their exchange and sent again, without a key, and
effects are counted.

A trial is one intent of one sender: a call that is cut once or more often, and then sent until it
is answered. It is cut

    sent        at a random moment after it was sent: before the handler, in it, or after it
    entered     while its handler has done nothing yet
    acted       while its handler has taken effect
    writing     in the middle of its answer, after some bytes
    reading     after its client has received the whole answer, and has read none of it, its first
                byte, half of it, or all but its last byte

by the end of its connection, by a cancellation in the words of its protocol, or by SIGKILL of the
server, which cuts every other pending call as well. The next sending comes during the first run, or
after it. Some calls have bytes behind them on their connection: servers read ahead, and then do not
see its end.

The checker holds a trial to these rules:

1. A sender has one effect for one intent. Two effects are doubled, which is a fault. Five cases are
   not, and are counted: `again`: a second run under the same key after a kill, which
   on_crash="rerun" allows (docs/commands.md, "on_crash"). `unseen`: a second key, where the record
   of the first answer says `written`: the server had handed its last byte to the transport without
   an error, so the next equal call is a new one (docs/commands.md, "Calls without a key").
   `forgotten`: the same, but a kill came before the server had recorded `written`, which it does a
   moment later. `elsewhere`: a second key, which another worker ran before the worker of the first
   had noticed the loss. Only a record that says `undelivered` is matched, and an equal call waits
   for a loss only within its own process. `overtaken`: a second key, where the first call was
   cancelled as soon as it was sent. Call and cancellation are two requests: a server that gets the
   cancellation first ignores it (MCP, "Cancellation"), and runs a call that comes late. If that run
   is killed, its answer stays pending forever. The same holds for a call on a new connection that
   is cut as soon as it is sent: a busy server may read it after its repetition, which came on an
   open connection and was answered (docs/commands.md, "The limits, and the proof").
2. An only cut is never unseen if its handler stood still until the ledger had recorded the loss
   (the ledger shows nothing of an open transaction). Neither is one in the middle of its answer,
   whether or not the client has received the rest. What counts is what the cut has met, and not
   what the trial wanted: a connection may end before the handler is reached, and a stream may begin
   with progress, or with the answer to another entry.
3. An answer names a run of the same sender. A name in `_meta` identifies senders; the server
   ignores it when it compares calls. Now and then another sender sends an equal call at the same
   time, and must have a separate effect.
4. An outcome is unknown only after a kill.
5. A call that is sent again after its answer came is another intent: each of the equal calls has
   its effect, and no answer is a replay.
"""

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from tests.lost.senders import (
    PARTS,
    PATIENCE,
    Answer,
    Cut,
    How,
    Order,
    Part,
    PythonSdk,
    Raw,
    RawStream,
    RawTool,
    Sender,
    TypeScriptSdk,
)
from tests.lost.shop import Effect
from tests.lost.stand import Delivery, Hold, Stand
from tests.mcp.asgi import LEGACY, R2, R4, R5, REVISIONS
from tests.servers import TRANSACTIONAL
from wirecall.ledger.base import RecordId

Moment: TypeAlias = Literal["sent", "entered", "acted", "writing", "reading"]

WAYS = ("/rpc", *REVISIONS)
# A call as an entry of a batch: in a stream of answers, and through the batch tool.
BATCHES = ("stream", f"tool {R2}", f"tool {R4}", f"tool {R5}")
# The client 1.x, and 2.x.
TYPESCRIPT = (*((1, revision) for revision in LEGACY), (2, R2), (2, R4), (2, R5))
MODES = ("unknown", "point", "rerun", "reconcile", "plain")
MOMENTS: tuple[Moment, ...] = ("sent", "entered", "acted", "writing", "reading")
BEHIND = (b"\r\n", b"x", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")

IN_PROGRESS = 40910
UNAVAILABLE = 50310
UNKNOWN = 50910
BUSY = 42910
AGAIN = (IN_PROGRESS, UNAVAILABLE, BUSY)  # answers that are not the outcome: the sender calls again

LONG = 8 << 20  # bytes of an answer that no buffer holds
QUIET = 0.5  # seconds without an effect after which a stand is quiet
NOTICE = 30.0  # seconds that a server may take to notice that a client is gone
MARK = 2.0  # seconds in which a server that is not killed has recorded how an answer ended


class Trial(Struct, frozen=True, kw_only=True):
    """The events of one intent."""

    mode: str
    moment: Moment
    how: How | Literal["kill"] = "cut"
    cuts: int = 1
    is_overlapping: bool = False  # the next sending comes while the first run stands still
    is_watched: bool = False  # before the first run continues, the server has to record the loss
    has_rival: bool = False
    delay: float = 0.0  # seconds until the cut, at a random moment
    nap: float = 0.0  # seconds that the handler takes
    short_of: int = 0  # bytes of the answer that still come
    behind: bytes = b""  # what follows the call on its connection
    part: Part = "none"  # of the answer, which is read before the cut
    size: int = 0  # bytes of that answer

    @property
    def detail(self) -> str:
        """The part that was read, or the bytes that came behind."""
        if self.moment == "reading":
            return f"read: {self.part}"
        return f"behind: {self.behind[:3]!r}" if self.behind else "nothing behind"


def random_trials(
    sender: Sender, stand: Stand, rng: random.Random, *, kills: float
) -> Iterator[Trial]:
    """Endless trials that this sender can do on this stand; so many of them, of 1, kill the server."""
    has_rivals = isinstance(sender, Raw) and stand.plan.access != "single user"
    modes = [*MODES, *(["transactional"] if stand.plan.ledger in TRANSACTIONAL else [])]
    while True:
        mode = rng.choice(modes)
        moment = rng.choices(MOMENTS, (36, 25, 30, 3, 6))[0] if mode != "plain" else "sent"
        if moment in ("writing", "reading") and not isinstance(sender, Raw):
            # Official clients wait a minute for the rest of an answer that was cut, or resume it.
            continue
        how: How | Literal["kill"] = "cut"
        if stand.plan.can_be_killed and rng.random() < kills:
            how = "kill"
        elif moment not in ("writing", "reading") and sender.can_cancel and rng.random() < 0.3:
            how = "cancel"
        has_behind = (
            isinstance(sender, Raw) and how == "cut" and moment in ("sent", "entered", "acted")
        )
        yield Trial(
            mode=mode,
            moment=moment,
            how=how,
            cuts=rng.choice((1, 1, 1, 2, 3)),
            is_overlapping=rng.random() < 0.5,
            # A client that gives up may say so a moment later.
            is_watched=how == "cancel" or rng.random() < 0.5,
            has_rival=has_rivals and mode != "plain" and rng.random() < 0.1,
            delay=2 ** rng.uniform(-14, -4),
            nap=rng.choice((0.0, 0.0, 2 ** rng.uniform(-10, -5))),
            short_of=int(2 ** rng.uniform(0, 15)),
            behind=rng.choice(BEHIND) if has_behind and rng.random() < 0.3 else b"",
            part=rng.choice(PARTS),
            size=int(10 * 30_000 ** rng.random()) if moment == "reading" else 0,
        )


class Story(Struct):
    """The outcome of a trial."""

    trial: Trial
    order: Order
    sender: str  # its name
    kind: str  # of the sender
    place: tuple[str, str] = ("", "")  # the caller and the method of its records
    is_matched: bool = True
    cuts: int = 0
    must_be_seen: bool = False  # the server could notice the latest cut, in time and for certain
    kills: int = 0  # that met this trial
    ended: float = 0.0
    answer: Answer | None = None
    rival: Answer | None = None
    effects: list[Effect] = []
    again: int = 0
    unseen: int = 0
    forgotten: int = 0
    elsewhere: int = 0
    overtaken: int = 0
    faults: list[str] = []

    def __str__(self) -> str:
        trial = self.trial
        ways = {
            "overlapping": trial.is_overlapping,
            "watched": trial.is_watched,
            "with a rival": trial.has_rival,
        }
        shape = " ".join(way for way, is_so in ways.items() if is_so)
        effects = [(effect.key[-6:], effect.run, effect.attempt) for effect in self.effects]
        return (
            f"{self.order.name}: {trial.mode} {trial.moment} by {trial.how} {shape}, {self.cuts} cuts, "
            f"{self.kills} kills: {self.answer}, {effects}: {'; '.join(self.faults)}"
        )


class Teller:
    """Runs a trial."""

    def __init__(
        self, stand: Stand, sender: Sender, rival: Sender | None, trial: Trial, name: str
    ) -> None:
        self._stand = stand
        self._sender = sender
        self._rival = rival
        self._trial = trial
        size = trial.size
        if trial.moment == "writing":
            size = LONG
            if not sender.is_plain:  # MCP's answer holds the result twice: as text, and as data
                size = LONG // 2
        self._order = Order(trial.mode, name, trial.nap, size)
        place = (sender.caller, sender.record(self._order))
        self.story = Story(trial, self._order, sender.name, sender.kind, place, sender.is_matched)

    async def tell(self) -> Story:
        stand = self._stand
        story = self.story
        trial = self._trial
        name = self._order.name
        stand.active[name] = story.place
        kills = len(stand.kills)
        held = None
        if trial.moment in ("entered", "acted"):
            held = stand.hold(name, "entered" if trial.moment == "entered" else "acted")
        try:
            for nth in range(trial.cuts):
                await self._lose(held if nth == 0 else None)
                if story.answer is not None:
                    break
                if held is not None and not trial.is_overlapping:
                    held.release()
            if trial.has_rival and self._rival is not None:
                story.rival, _ = await asyncio.gather(
                    self._insist(self._rival, None), self._finish(held)
                )
            else:
                await self._finish(held)
        except Exception as error:  # the other trials continue
            story.faults.append(repr(error))
        finally:
            if held is not None:
                held.release()
            story.kills = len(stand.kills) - kills
            story.ended = time.monotonic()
            del stand.active[name]
            stand.records.pop(name, None)
        return story

    async def _finish(self, held: Hold | None) -> None:
        if self.story.answer is None:
            self.story.answer = await self._insist(self._sender, held)

    async def _lose(self, held: Hold | None) -> None:
        """Send the call, and cut it; one that is answered before that has its answer."""
        trial = self._trial
        story = self.story
        stand = self._stand
        await stand.is_up.wait()
        kills = len(stand.kills)
        if trial.moment == "writing":
            assert isinstance(self._sender, Raw)
            flight = self._sender.begin(self._order, short_of=trial.short_of)
        elif trial.moment == "reading" or trial.behind:
            assert isinstance(self._sender, Raw)
            part = trial.part if trial.moment == "reading" else None
            flight = self._sender.begin_bare(self._order, behind=trial.behind, part=part)
        else:
            flight = self._sender.begin(self._order)
        if held is not None:
            reached = asyncio.create_task(held.reached.wait())
            await asyncio.wait(
                [flight.task, reached], timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED
            )
            reached.cancel()
            if not held.reached.is_set() and not flight.task.done():
                raise RuntimeError("the handler was not reached")
        else:
            await asyncio.wait(
                [flight.task], timeout=trial.delay if trial.moment == "sent" else PATIENCE
            )
        if not flight.task.done():
            if trial.how == "kill":
                await stand.kill()
                await asyncio.wait([flight.task], timeout=PATIENCE)
            else:
                await flight.cut(trial.how)
        if (answer := flight.answered()) is not None:  # before the cut, or at the same moment
            story.answer = None if answer.code in AGAIN else answer
            return
        story.cuts += 1
        story.must_be_seen = flight.is_cut_in_answer()
        if (
            trial.is_watched
            and held is not None
            and held.record is not None
            and len(stand.kills) == kills
        ):
            # The ledger has no such record if it was released, or if it is in an open transaction.
            found = await stand.end_of(held.record, NOTICE)
            story.must_be_seen = found is not None and found[1] == "undelivered"
            if found is not None and not story.must_be_seen and len(stand.kills) == kills:
                story.faults.append(f"the server did not notice the loss: {found}")

    async def _insist(self, sender: Sender, held: Hold | None) -> Answer:
        """Send until an answer is the outcome."""
        async with asyncio.timeout(2 * PATIENCE):
            while True:
                await self._stand.is_up.wait()
                flight = sender.begin(self._order)
                if held is not None:  # the first run continues while the repetition waits for it
                    asyncio.get_running_loop().call_later(self._trial.delay, held.release)
                try:
                    answer = await flight.answer()
                    if answer.code not in AGAIN:
                        return answer
                except Cut:
                    if sender is self._sender:
                        self.story.cuts += 1
                await asyncio.sleep(0.02)


async def check(story: Story, stand: Stand, effects: list[Effect]) -> None:
    """Find every fault of a story, once its stand is quiet. `effects` are those of its order."""
    trial = story.trial
    answer = story.answer
    mine = story.effects = [effect for effect in effects if effect.sender == story.sender]
    if answer is None:
        story.faults.append("it was not answered")
        return
    # Rule 3: an answer names a run of the same sender.
    for told, is_rival in ((answer, False), (story.rival, True)):
        if told is not None and told.run is not None:
            owners = [effect.sender for effect in effects if effect.run == told.run]
            if len(owners) != 1 or (owners[0] != story.sender) != is_rival:
                story.faults.append(f"the answer is of another caller: {owners}")
    # Rule 4: an outcome, or an unknown one after a kill.
    if answer.code is not None and not (answer.code == UNKNOWN and story.kills):
        story.faults.append(f"it was answered with {answer.code}")
    if not story.is_matched:
        if answer.is_replayed or answer.is_recognised:
            story.faults.append("the call of an anonymous caller was recognised")
        return
    # Rule 1: one effect under one key.
    keys = Counter(effect.key for effect in mine)
    for key, times in keys.items():
        if times > 1 and trial.mode == "rerun" and story.kills:
            story.again += times - 1
        elif times > 1:
            story.faults.append(f"doubled: {times} effects under the key {key!r}")
    # Rule 1: one key for one intent.
    answered = {effect.key for effect in mine if effect.run == answer.run} or {*list(keys)[-1:]}
    for key in keys.keys() - answered:
        found = await stand.end_of(RecordId(*story.place, key), MARK)
        is_forgotten = story.kills == 0 and any(0 <= at - story.ended < MARK for at in stand.kills)
        if story.must_be_seen and story.cuts == 1:
            story.faults.append(f"doubled: a loss was not seen, and the record is {found}")
        elif found is not None and found[1] == "written":
            story.unseen += 1
        elif found is not None and found[1] == "pending" and is_forgotten:
            story.forgotten += 1
        elif found is not None and found[1] == "undelivered" and stand.plan.workers > 1:
            story.elsewhere += 1
        elif _is_overtaken(story, key, answered, found):
            story.overtaken += 1
        else:
            story.faults.append(f"doubled: another key, whose record is {found}")


def _is_overtaken(story: Story, key: str, answered: set[str], found: Delivery) -> bool:
    """Return whether the server read the cut call after its repetition, or after its cancellation."""
    trial = story.trial
    if trial.moment != "sent" or found is None:
        return False
    if trial.how == "cancel":
        return found[1] == "undelivered" or (found[1] == "pending" and story.kills > 0)
    order = [effect.key for effect in story.effects]
    return bool(trial.behind) and all(order.index(key) > order.index(other) for other in answered)


# --- many of them ---------------------------------------------------------------------------------


def make_senders(stand: Stand) -> list[Sender]:
    """All senders for a server of this kind."""
    senders: list[Sender] = [raw_sender(stand, way, f"raw {way}") for way in (*WAYS, *BATCHES)]
    if stand.plan.access == "single user":
        senders += official_senders(stand)
    return senders


def official_senders(stand: Stand) -> list[Sender]:
    """The official clients. They name no caller: each of them is the single user."""
    connecting = asyncio.Lock()
    python = [
        PythonSdk(revision, f"python {revision}", stand.port, connecting) for revision in REVISIONS
    ]
    typescript = [
        TypeScriptSdk(sdk, revision, f"typescript {sdk} {revision}", stand.port, stand.log)
        for sdk, revision in TYPESCRIPT
    ]
    return [*python, *typescript]


def raw_sender(stand: Stand, way: str, name: str) -> Raw:
    kind, _, revision = way.rpartition(" ")
    is_matched = stand.plan.access != "anonymous" or revision in LEGACY
    caller = name if stand.plan.access == "authenticated" else ""
    if way == "stream":
        return RawStream(name, stand.port, caller, is_matched=is_matched)
    if kind == "tool":
        return RawTool(revision, name, stand.port, caller, is_matched=is_matched)
    return Raw(way, name, stand.port, caller, is_matched=is_matched)


class Repeats(Struct):
    """Equal calls, each sent after the answer to the one before it, or some at once."""

    kind: str
    calls: int = 0
    runs: set[str] = set()  # that their answers name
    replays: int = 0

    @property
    def swallowed(self) -> int:
        return self.calls - len(self.runs)


class Run:
    """The stories of one stand."""

    def __init__(self, stand: Stand, seed: str) -> None:
        self.stand = stand
        self._seed = seed
        self.stories: list[Story] = []
        self.repeats: list[Repeats] = []

    async def live(self, cuts: int, repeats: int, kills: float) -> None:
        """Run about so many intended repeats, then trials until there were so many cuts; and the
        check.
        """
        stand = self.stand
        async with stand.opened(), AsyncExitStack() as stack:
            senders = make_senders(stand)
            for sender in senders:
                stack.push_async_callback(sender.close)
                await sender.open()
            self.repeats += await asyncio.gather(
                *(self._repeat(sender, -(-repeats // len(senders))) for sender in senders)
            )
            await asyncio.gather(
                *(self._try(sender, -(-cuts // len(senders)), kills) for sender in senders)
            )
            effects: list[Effect] = []
            while len(found := stand.effects()) > len(effects):
                effects = found
                await asyncio.sleep(QUIET)
            by_order = defaultdict(list)
            for effect in effects:
                by_order[effect.order].append(effect)
            for told in self.repeats:  # an answer without an effect is swallowed too
                told.runs &= {effect.run for effect in by_order[f"{told.kind} repeats"]}
            for story in self.stories:
                await check(story, stand, by_order[story.order.name])
        # Once the server has ended, nothing can take effect.
        late = Counter(effect.order for effect in stand.effects())
        for story in self.stories:
            if late[story.order.name] != len(by_order[story.order.name]):
                story.faults.append("it took effect after all the others")

    async def _try(self, sender: Sender, most: int, kills: float) -> None:
        rng = random.Random(f"{self._seed} {sender.kind}")
        cuts = 0
        async with AsyncExitStack() as stack:
            rival: Raw | None = None
            if isinstance(sender, Raw):
                rival = raw_sender(self.stand, sender.way, f"rival {sender.name}")
                stack.push_async_callback(rival.close)
                await rival.open()
            for nth, trial in enumerate(random_trials(sender, self.stand, rng, kills=kills)):
                if cuts >= most:
                    break
                story = await Teller(
                    self.stand, sender, rival, trial, f"{sender.kind} {nth}"
                ).tell()
                cuts += story.cuts
                self.stories.append(story)

    async def _repeat(self, sender: Sender, count: int) -> Repeats:
        """Send so many equal calls, all of them answered; some of them have a long answer."""
        told = Repeats(sender.kind)
        rng = random.Random(f"{self._seed} {sender.kind} repeats")
        mode = rng.choice(("unknown", "plain", "point"))

        async def answered() -> tuple[bool, bool]:
            """Return whether a connection was cut, and whether the answer is a replay."""
            order = Order(
                mode, f"{sender.kind} repeats", size=LONG // 8 if rng.random() < 0.02 else 0
            )
            is_cut = False
            while True:
                try:
                    answer = await sender.begin(order).answer()
                    if answer.code not in AGAIN:
                        break
                except Cut:  # the server closes a connection that was idle
                    is_cut = True
            assert answer.run is not None, answer
            told.runs.add(answer.run)
            return is_cut, answer.is_replayed or answer.is_recognised

        while told.calls < count:
            together = rng.choice((1, 1, 1, 2, 3)) if isinstance(sender, Raw) else 1
            group = await asyncio.gather(*(answered() for _ in range(together)))
            told.calls += together
            # The answer that a cut lost may reach any of the equal calls, and then it is a replay.
            if not any(is_cut for is_cut, _ in group):
                told.replays += sum(is_replay for _, is_replay in group)
        return told


class Tally(Struct):
    """The outcomes of the trials in one row of the summary."""

    trials: int = 0
    cuts: int = 0
    effects: Counter[int] = msgspec.field(default_factory=Counter)
    replays: int = 0
    unknown: int = 0
    again: int = 0
    unseen: int = 0
    forgotten: int = 0
    elsewhere: int = 0
    overtaken: int = 0
    wrong: int = 0


def summary(stories: Iterable[Story], row: Callable[[Story], str]) -> str:
    """A table of cuts, effects and answers. `row` names the row that a story belongs to."""
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    for story in stories:
        tally = tallies[row(story)]
        answer = story.answer
        tally.trials += 1
        tally.cuts += story.cuts
        tally.effects[min(len(story.effects), 2)] += 1
        tally.replays += answer is not None and (answer.is_recognised or answer.is_replayed)
        tally.unknown += answer is not None and answer.code == UNKNOWN
        tally.again += story.again
        tally.unseen += story.unseen
        tally.forgotten += story.forgotten
        tally.elsewhere += story.elsewhere
        tally.overtaken += story.overtaken
        tally.wrong += bool(story.faults)
    counted = ("trials", "cuts", "0", "1", "2+", "replays", "unknown")
    head = (*counted, "again", "unseen", "forgotten", "elsewhere", "overtaken", "wrong")
    lines = [f"{'':34}" + "".join(f"{word:>10}" for word in head)]
    for name, tally in sorted(tallies.items()):
        allowed = (tally.again, tally.unseen, tally.forgotten, tally.elsewhere, tally.overtaken)
        effects = (tally.effects[number] for number in (0, 1, 2))
        numbers = (
            tally.trials,
            tally.cuts,
            *effects,
            tally.replays,
            tally.unknown,
            *allowed,
            tally.wrong,
        )
        lines.append(f"{name:34}" + "".join(f"{number:10}" for number in numbers))
    return "\n".join(lines)
