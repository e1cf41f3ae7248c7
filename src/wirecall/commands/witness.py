"""The witness: is the ledger still the one that this process knew?

A store may come back empty, as another one, or older: flushed or evicted, restored from a backup,
or promoted although it lacked the last writes. Then records are gone, and retries would run again.
So a process remembers what it saw of its ledger, and refuses commands when the ledger contradicts
that, until an operator accepts the store (`ledger.identity`). There is one state machine (`TABLE`).

1. It costs a command no round trip. The process looks at the store every second, and before the
   next command runs after the ledger has connected again (`Ledger.reached`).
2. A process remembers the last commands that it has acknowledged: at least `REMEMBERED`. When
   another server or file answers, it asks for all of them; otherwise for the last one. It never
   runs one of them again, even before it has looked.
3. When another server answers, commands wait for `SETTLE` seconds, in which the other processes
   look, too, and report what they miss. The doubt of one process counts for all.
4. Nothing is kept beside the store: a process that starts after the change sees only the doubts of
   those that run.
"""

import asyncio
import enum
import os
from collections.abc import Callable
from typing import NamedTuple

from msgspec import Struct

from wirecall.aio import clock_from_boot, has_loop, start
from wirecall.errors import LedgerUnavailable, OutcomeUnknown
from wirecall.ledger.base import Ledger, LedgerDown, Record, RecordId, Seen, State, Token
from wirecall.ledger.identity import (
    Doubt,
    DoubtKind,
    Identity,
    Lost,
    all_lost,
    doubts,
    identity_of,
    new_identity,
    put_back,
    report,
)
from wirecall.logs import host, logger

# Seconds between two looks at the store, and seconds that commands wait after its server changed.
LOOK_EVERY = 1.0
SETTLE = 2.0
# Commands that are remembered: at least so many, at most twice as many.
REMEMBERED = 1000
# Records that are asked for at once.
AT_ONCE = 64
# Seconds after which a report is written again, well within the life of a mark.
REPORT_EVERY = 60.0
# Lost commands that one line of the log names.
NAMED = 50

# The part of its retention in which a record must be there: the store has begun to count earlier, and
# its clock may be a little faster.
SURE = 0.99

# No ledger has this number.
_NEVER = 0

# Time in which the machine sleeps counts for the store, too.
clock = clock_from_boot()


class LedgerState(enum.Enum):
    """What a process thinks of its ledger."""

    FRESH = "Not compared yet, or another server answers since a moment ago: commands wait."
    STEADY = "It is as this process knew it: commands run."
    SUSPECT = "It contradicts what a process knew: commands are refused."
    ACCEPTED = "An operator has accepted it, and lost commands are put back: commands wait."


class LedgerEvent(enum.Enum):
    """What a look at the store has shown."""

    MATCH = "It is as expected."
    MOVE = "Another server or file answers, and misses nothing that this process remembers."
    DOUBT = "It is empty, another one, or older; or another process says so."
    ACCEPT = "An operator has accepted it."
    RESTORE = "The lost commands of this process are recorded as unknown."


_S = LedgerState
_E = LedgerEvent

TABLE: dict[tuple[LedgerState, LedgerEvent], LedgerState] = {
    (_S.FRESH, _E.MATCH): _S.STEADY,
    (_S.FRESH, _E.MOVE): _S.FRESH,
    (_S.FRESH, _E.DOUBT): _S.SUSPECT,
    (_S.FRESH, _E.ACCEPT): _S.ACCEPTED,
    (_S.STEADY, _E.MATCH): _S.STEADY,
    (_S.STEADY, _E.MOVE): _S.FRESH,
    (_S.STEADY, _E.DOUBT): _S.SUSPECT,
    (_S.STEADY, _E.ACCEPT): _S.ACCEPTED,
    # The store that was expected is back.
    (_S.SUSPECT, _E.MATCH): _S.STEADY,
    (_S.SUSPECT, _E.MOVE): _S.FRESH,
    (_S.SUSPECT, _E.DOUBT): _S.SUSPECT,
    (_S.SUSPECT, _E.ACCEPT): _S.ACCEPTED,
    (_S.ACCEPTED, _E.RESTORE): _S.STEADY,
    # The store went away, or became another one again, before they were put back.
    (_S.ACCEPTED, _E.ACCEPT): _S.ACCEPTED,
    (_S.ACCEPTED, _E.MATCH): _S.STEADY,
    (_S.ACCEPTED, _E.MOVE): _S.FRESH,
    (_S.ACCEPTED, _E.DOUBT): _S.SUSPECT,
}


class _Known(NamedTuple):
    """What the process has seen of the store."""

    identity: Identity
    fence: int
    history: str


class _Done(Struct, frozen=True, gc=False):
    """A command that this process has acknowledged."""

    token: Token
    fingerprint: bytes
    # Until when the store has its record, by the clock of this process.
    until: float

    @property
    def lost(self) -> Lost:
        return Lost(self.token.id, self.fingerprint)


class Witness:
    """What this process remembers of its ledger."""

    def __init__(self) -> None:
        # `Ledger.reached` at the last look that allowed commands. Any other value: look first.
        self.reached = _NEVER
        self.state = LedgerState.FRESH
        self.doubt: Doubt | None = None
        self._known: _Known | None = None
        # The commands that were acknowledged, in two generations.
        self._young: dict[RecordId, _Done] = {}
        self._old: dict[RecordId, _Done] = {}
        # The last one of them that the store was asked for.
        self._checked: Token | None = None
        self._settles_at = 0.0
        # The history of the store that is in doubt.
        self._doubted = ""
        self._reports_at = 0.0
        # Called when the store may lack the records of runs: another server answers, or a doubt
        # begins, or ends by an acceptance.
        self.moved: Callable[[], None] = lambda: None
        self._looking: asyncio.Task[None] | None = None
        self._name = os.urandom(8).hex()

    # --- on the path of a command -----------------------------------------------------------------

    async def admit(self, ledger: Ledger, id: RecordId) -> None:
        """Return when commands may run; refuse this one otherwise."""
        if not ledger.outlives:
            self.reached = ledger.reached
            return
        while self.reached != ledger.reached:
            # A timer looks at a suspect store: refusals need not.
            if self.doubt is None or not has_loop():
                await self.look(ledger)
            if self.doubt is not None:
                raise self._refusal(id)
            if self.reached == _NEVER:
                if not has_loop():
                    raise self._refusal(id)
                await asyncio.sleep(max(0.0, self._settles_at - clock()))

    def look_first(self) -> None:
        """Look at the store before the next command."""
        self.reached = _NEVER

    def is_sure(self, ledger: Ledger, record: Record) -> bool:
        """Return whether a record that was just granted may run."""
        id = record.id
        return self.reached == ledger.reached and id not in self._young and id not in self._old

    async def confirm(self, ledger: Ledger, record: Record) -> None:
        """Check that a granted record may run; refuse it otherwise.

        The ledger has connected again, or the process has acknowledged this command.
        """
        done = self._young.get(record.id) or self._old.get(record.id)
        if done is not None and clock() < done.until:
            identity = self._known.identity if self._known else None
            self._suspect(self._doubt_of("lost", identity, [done.lost]))
            self._to(LedgerEvent.DOUBT)
        else:
            await self.admit(ledger, record.id)
        if self.doubt is not None:
            raise self._refusal(record.id)

    def note(self, token: Token, fingerprint: bytes, retention: float) -> None:
        """Remember a command whose outcome is recorded."""
        if self._known is None:  # the store ends with this process
            return
        if len(self._young) >= REMEMBERED:
            self._old = self._young
            self._young = {}
        self._young[token.id] = _Done(token, fingerprint, clock() + SURE * retention)

    def _refusal(self, id: RecordId) -> LedgerUnavailable | OutcomeUnknown:
        """Return the error for a command; one that is lost has run."""
        if self.doubt is not None and any(each.id == id for each in self.doubt.lost):
            return OutcomeUnknown(
                "the ledger lost its record", ran="unknown", record=str(id), attempts=1
            )
        return LedgerUnavailable(
            "the ledger is not as this server knew it: an operator has to accept it", ran="no"
        )

    def _to(self, event: LedgerEvent) -> None:
        self.state = TABLE[self.state, event]

    # --- looks ------------------------------------------------------------------------------------

    async def look(self, ledger: Ledger) -> None:
        """Compare the store with what is known of it. Callers at one moment share a look."""
        if not has_loop():
            await self._look(ledger)
            return
        loop = asyncio.get_running_loop()
        looking = self._looking
        if looking is None or looking.done() or looking.get_loop() is not loop:
            looking = self._looking = start(loop, self._look(ledger))
        await asyncio.wait({looking})
        if looking.cancelled():
            raise LedgerDown("the server stopped before the ledger answered")
        looking.result()

    def stop(self) -> None:
        """End a look that waits for the store, because the app stops."""
        looking = self._looking
        if looking is not None and not looking.get_loop().is_closed():
            looking.cancel()

    async def _look(self, ledger: Ledger) -> None:
        reached = ledger.reached
        doubt = self.doubt
        least = max((each.token.fence for each in self._acknowledged()), default=0)
        seen = await ledger.see()
        if seen.identity is None and self._known is None:
            seen = await ledger.see(new_identity())
        found = identity_of(seen.identity)
        others = await doubts(ledger, found)
        others.pop(self._name, None)
        event = await self._judge(ledger, seen, found, least, list(others.values()))
        if event is LedgerEvent.MATCH and self.doubt is not doubt:
            return  # a command has shown a loss in between
        self.reached = _NEVER
        self._to(event)
        if event is LedgerEvent.DOUBT:
            await self._report(ledger)
            return
        if event is LedgerEvent.ACCEPT:
            assert found is not None
            await self._restore(ledger, seen, found)
            if self.state is not LedgerState.ACCEPTED:
                return  # a command has shown another loss in between
            self._to(LedgerEvent.RESTORE)
        elif doubt is not None:
            logger.warning("the ledger is the one that this process knew: commands run again")
        self.doubt = None
        if self.state is LedgerState.STEADY:
            self.reached = reached

    async def _judge(
        self,
        ledger: Ledger,
        seen: Seen,
        found: Identity | None,
        least: int,
        others: list[Doubt],
    ) -> LedgerEvent:
        """Return what a look has shown. `least` is a fence that the store gave before it."""
        known = self._known
        if found is not None and known is None:
            known = self._known = _Known(found, seen.fence, seen.history)
        if known is not None and least > known.fence > 0:
            known = self._known = known._replace(fence=least)
        if known is None:  # another process has removed the identity a moment ago
            return LedgerEvent.MOVE
        if found is not None and found.follows(known.identity):
            self.moved()
            return LedgerEvent.ACCEPT
        kind = self._contradiction(seen, found, known)
        has_moved = seen.history != known.history
        lost: list[Lost] = []
        asks_all = kind is not None or has_moved or self.state is LedgerState.SUSPECT
        if asks_all or await self._missing(ledger, self._newest()):
            lost = await self._missing(ledger, self._acknowledged())
        if lost and kind is None:
            kind = "lost"
        if kind is None and others:
            kind = "reported"
            lost = all_lost(others)
        if kind is not None:
            self._suspect_at(seen.history, self._doubt_of(kind, found, lost, seen, others))
            return LedgerEvent.DOUBT
        # What this process knows, grows.
        self._known = _Known(known.identity, max(known.fence, seen.fence), seen.history)
        if has_moved:
            self._settles_at = clock() + SETTLE
            self.moved()
        if clock() < self._settles_at:
            return LedgerEvent.MOVE
        return LedgerEvent.MATCH

    def _contradiction(self, seen: Seen, found: Identity | None, known: _Known) -> DoubtKind | None:
        """Return what contradicts the known facts about the store."""
        if found is None:
            return "empty"
        if found.name != known.identity.name:
            return "other"
        if found.epoch < known.identity.epoch:
            return "older"
        if 0 < seen.fence < known.fence:
            return "older"
        doubt = self.doubt
        # Its fences may have caught up since; what it lost has not come back.
        if doubt is not None and doubt.kind == "older" and seen.history == self._doubted:
            return "older"
        return None

    def _acknowledged(self) -> list[_Done]:
        now = clock()
        done = [*self._old.values(), *self._young.values()]
        return [each for each in done if now < each.until]

    def _newest(self) -> list[_Done]:
        """Return the command that was acknowledged last, unless the store was asked for it."""
        done = self._acknowledged()[-1:]
        if not done or done[0].token is self._checked:
            return []
        self._checked = done[0].token
        return done

    async def _missing(self, ledger: Ledger, done: list[_Done]) -> list[Lost]:
        """Return the commands that the store does not have as done."""
        missing: list[Lost] = []
        for first in range(0, len(done), AT_ONCE):
            asked = done[first : first + AT_ONCE]
            records = await _records(ledger, asked)
            for each, record in zip(asked, records, strict=True):
                if not _has(record, each.token) and clock() < each.until:
                    missing.append(each.lost)
        return missing

    # --- doubts -----------------------------------------------------------------------------------

    def _doubt_of(
        self,
        kind: DoubtKind,
        found: Identity | None,
        lost: list[Lost],
        seen: Seen | None = None,
        others: list[Doubt] | None = None,
    ) -> Doubt:
        known = self._known
        assert known is not None
        expected = f"identity {known.identity.name}, epoch {known.identity.epoch}"
        met = "no identity: the store is empty"
        if found is not None:
            met = f"identity {found.name}, epoch {found.epoch}"
        if known.fence:
            expected += f", fence {known.fence} or higher"
            met += f", fence {seen.fence if seen else 'not asked'}"
        if kind == "lost":
            expected = "a record of each command that was acknowledged"
            met = f"{len(lost)} of them have none"
        if kind == "reported" and others:
            first = others[0]
            expected = first.expected
            met = f"{first.found} (reported by {first.process})"
            if first.kind == "reported":
                met = first.found
        name = "" if found is None else found.name
        epoch = 0 if found is None else found.epoch
        process = f"{host()} process {os.getpid()}"
        return Doubt(kind, expected, met, known.identity.name, name, epoch, tuple(lost), process)

    def _suspect_at(self, history: str, doubt: Doubt) -> None:
        """Refuse commands because of what this server says. It may lack the records of runs."""
        if self.doubt is None or history != self._doubted:
            self.moved()
        self._suspect(doubt)
        self._doubted = history

    def _suspect(self, doubt: Doubt) -> None:
        """Refuse commands from now on; say why, once."""
        before = self.doubt
        self.reached = _NEVER
        self.doubt = doubt
        if before is None:
            self._doubted = ""
        if before is not None and before.lost == doubt.lost and before.kind == doubt.kind:
            return
        self._reports_at = 0.0
        logger.error(
            "the ledger is not as this process knew it (%s): expected %s, found %s; commands are "
            "refused until an operator accepts it: wirecall ledger accept",
            doubt.kind,
            doubt.expected,
            doubt.found,
        )
        for first in range(0, len(doubt.lost), NAMED):
            names = [str(each.id) for each in doubt.lost[first : first + NAMED]]
            logger.error("the ledger lost commands that were acknowledged: %s", ", ".join(names))

    async def _report(self, ledger: Ledger) -> None:
        """Write the doubt into the store, for the other processes and the operator."""
        now = clock()
        if self.doubt is None or now < self._reports_at:
            return
        try:
            await report(ledger, self._name, self.doubt)
        except LedgerDown as error:  # it may be a replica
            logger.warning("the doubt about the ledger was not written: %s", error)
            return
        self._reports_at = now + REPORT_EVERY

    async def _restore(self, ledger: Ledger, seen: Seen, found: Identity) -> None:
        """Record the lost commands of this process as unknown: the operator may not know them."""
        done = self._acknowledged()
        lost = await self._missing(ledger, done)
        await put_back(ledger, lost)
        gone = {each.id for each in lost}
        kept = {each.token.id: each for each in done if each.token.id not in gone}
        self._old = kept
        self._young = {}
        self._known = _Known(found, seen.fence, seen.history)
        self._settles_at = 0.0
        logger.warning(
            "the ledger was accepted by %s: %s", found.accepted_by or "an operator", found.reason
        )


async def _records(ledger: Ledger, done: list[_Done]) -> list[Record | None]:
    """Return the records of commands, in their order."""
    if has_loop():
        return await asyncio.gather(*(ledger.get(each.token.id) for each in done))
    return [await ledger.get(each.token.id) for each in done]


def _has(record: Record | None, token: Token) -> bool:
    """Return whether the store has the outcome of a run."""
    if record is None or record.nonce != token.nonce:
        return False
    return record.state in (State.DONE, State.TOMBSTONE)


def reason_of(doubt: Doubt) -> str:
    """Return the doubt for `/readyz`. Keys are for the log: this answer is for everyone."""
    text = f"the ledger is not as this process knew it ({doubt.kind})"
    if doubt.lost:
        text += f", and {len(doubt.lost)} acknowledged commands are lost"
    return f"{text}: wirecall ledger accept"
