"""Receipts: whether the answer to a call without a key reached its caller.

There are two state machines in `commands`: the run of a command (`run.TABLE`), and the receipt of a
call without a key (`TABLE` here). docs/commands.md draws both. A transport knows whether an answer
is written or lost (`protocol.receipt`); a `KeylessReceipt` says what that means for the record.

1. Calls without a key are compared by digests: of caller and method, and of the params. A call
   without a known caller has no digest, so it matches nothing.
2. An answer is pending until its transport has taken the last byte, or its caller is gone. Answers
   that are pending in this process are not lost: an equal call that arrives then is a new one. But
   a caller may have left a moment ago, and its transport may not have noticed yet. So an equal call
   first waits a moment, unless it came in the same message. If its own caller leaves during that
   wait, it does not run: a repetition may overtake the call that it repeats, and then that call is
   the one that waits.
3. A loss is marked in the ledger at once; a repetition in this process also writes the mark itself.
   Written answers are marked together, a moment later, so that they share a commit. Both writes are
   retried while the ledger is down. If a process dies before it has marked its last answers, they
   count as undelivered: an equal call within the loss window gets such an answer again, and does
   not run.
4. A caller may give up silently: it does not cancel or close anything, and sends the call again. On
   the same session or pipe, an equal call that arrives more than `resend_after` after the first,
   while that one runs, is that call. The first gives its answer up, as if it were lost, and the
   repetition takes it over (`Receipts._repeat`).
5. A caller may leave before the ledger has answered its claim. Its repetition waits for that
   answer: if the ledger saw the repetition first, it would grant both.
6. A caller may even leave before its message is served, and a busy server may serve the repetition
   first, in another process. So such a call does not run. It is as if the message had not arrived.
"""

import asyncio
import enum
import time
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import sha256
from typing import Literal, TypeAlias

import msgspec
from msgspec import Struct

from wirecall.aio import wake
from wirecall.commands.background import Background
from wirecall.commands.run import Run
from wirecall.errors import Gone
from wirecall.ledger.base import Claim, Delivered, Ledger, Record
from wirecall.logs import logger
from wirecall.protocol.receipt import Arrival, Receipt
from wirecall.server.call import Call

# Seconds after which written answers are marked: ten successive commands share a commit. An equal
# call in another process waits for the mark, and looks again after 0.025 s at the earliest
# (`claim.FIRST_POLL`).
MARK_AFTER = 0.02

# Seconds in which a transport notices that a client has left, even on a busy machine. An equal call
# of the same caller waits up to this long.
NOTICED_AFTER = 0.25

# Max lost answers of indistinguishable callers that are remembered for the log.
MOST_STRANGERS = 1024

# Reports the end of a call, and its error, to the log and other observers.
Report: TypeAlias = Callable[[Call, BaseException | None], None]


# --- the table ------------------------------------------------------------------------------------


class ReceiptState(enum.Enum):
    """A state of a receipt. The docs show the value."""

    # The table is asked several times for each call, and an enum's own hash is slow.
    __hash__ = object.__hash__

    UNASSIGNED = "The ledger has not said yet which record's answer this call delivers."
    LOST_EARLY = "The caller disconnected before the ledger assigned a record to this call."
    ABANDONED_EARLY = "The caller gave up before the ledger assigned a record to this call."
    UNRECORDED = "The call has ended, and its answer is not the outcome of a record."
    PENDING = "This call delivers the answer of a record; the caller has not received it yet."
    WRITTEN = "The transport has written the answer."
    LOST = "The caller disconnected without the answer. A resumed stream may still write it."
    UNDECIDED = "The outcome is unknown, so the answer that the caller gets is not the outcome."
    ABANDONED = "The caller gave up, or got no outcome; nothing sent now counts as delivery."


class ReceiptEvent(enum.Enum):
    """An event of a receipt."""

    __hash__ = object.__hash__

    ASSIGN = "the ledger assigns the answer of a record to this call"
    WITHDRAW = "the answer belongs to another call, or the store rolls the claim back"
    WRITE = "the transport writes the answer; without a transport, the call ends with it"
    LOSE = "the transport notices that the caller has disconnected"
    ABANDON = "the caller cancels, runs out of time, must retry, or has sent the call again"
    DOUBT = "the call ends, and its outcome is unknown"
    END = "the call ends"


_S = ReceiptState
_E = ReceiptEvent

TABLE: dict[tuple[ReceiptState, ReceiptEvent], ReceiptState] = {
    # Which record? A claim may be made several times, and each has its answer.
    (_S.UNASSIGNED, _E.ASSIGN): _S.PENDING,
    (_S.UNASSIGNED, _E.WITHDRAW): _S.UNASSIGNED,
    (_S.PENDING, _E.ASSIGN): _S.PENDING,
    (_S.PENDING, _E.WITHDRAW): _S.UNASSIGNED,
    (_S.UNASSIGNED, _E.END): _S.UNRECORDED,
    # The answer arrives, or not.
    (_S.PENDING, _E.WRITE): _S.WRITTEN,
    (_S.PENDING, _E.LOSE): _S.LOST,
    (_S.LOST, _E.WRITE): _S.WRITTEN,
    (_S.PENDING, _E.ABANDON): _S.ABANDONED,
    (_S.LOST, _E.ABANDON): _S.ABANDONED,
    # The client of a task has received the task, and the run of the task is given up.
    (_S.WRITTEN, _E.ABANDON): _S.ABANDONED,
    # The caller leaves before the ledger answers. The loss is marked when it does.
    (_S.UNASSIGNED, _E.LOSE): _S.LOST_EARLY,
    (_S.UNASSIGNED, _E.ABANDON): _S.ABANDONED_EARLY,
    (_S.LOST_EARLY, _E.ASSIGN): _S.LOST,
    (_S.LOST_EARLY, _E.WITHDRAW): _S.LOST_EARLY,
    (_S.LOST_EARLY, _E.ABANDON): _S.ABANDONED_EARLY,
    (_S.LOST_EARLY, _E.END): _S.ABANDONED_EARLY,
    (_S.ABANDONED_EARLY, _E.ASSIGN): _S.ABANDONED,
    (_S.ABANDONED_EARLY, _E.WITHDRAW): _S.ABANDONED_EARLY,
    (_S.ABANDONED_EARLY, _E.END): _S.ABANDONED_EARLY,
    (_S.UNRECORDED, _E.LOSE): _S.ABANDONED_EARLY,
    # It leaves while the claim is made again.
    (_S.LOST, _E.ASSIGN): _S.LOST,
    (_S.LOST, _E.WITHDRAW): _S.LOST_EARLY,
    (_S.ABANDONED, _E.ASSIGN): _S.ABANDONED,
    (_S.ABANDONED, _E.WITHDRAW): _S.ABANDONED_EARLY,
    # An unknown outcome: whether its answer is written or lost, the outcome is not delivered.
    (_S.PENDING, _E.DOUBT): _S.UNDECIDED,
    (_S.LOST, _E.DOUBT): _S.UNDECIDED,
    (_S.UNDECIDED, _E.WRITE): _S.ABANDONED,
    (_S.UNDECIDED, _E.LOSE): _S.ABANDONED,
}

# In these states the answer is lost.
LOST_STATES = frozenset({_S.LOST_EARLY, _S.ABANDONED_EARLY, _S.LOST, _S.ABANDONED})

# In these states this call delivers the answer of a record, and the ledger has no loss of it.
_DELIVERING = frozenset({_S.PENDING, _S.WRITTEN, _S.UNDECIDED})

# Looked up once, since every call without a key needs them.
_UNASSIGNED = _S.UNASSIGNED
_PENDING = _S.PENDING
_ABANDONED = _S.ABANDONED
_LOST = _S.LOST
_ASSIGN = _E.ASSIGN
_WRITE = _E.WRITE


class KeylessReceipt(Struct, eq=False):
    """The receipt of a call without a key."""

    # The receipt of the transport. None: no transport watches the answer.
    transport: Receipt | None
    state: ReceiptState = _UNASSIGNED
    # When the first of the calls that get this answer arrived, by the loop's clock. Set only in a
    # session.
    since: float = 0.0
    # How often the caller has sent the call again.
    resends: int = 0
    # Gives the answer up, because the caller waits for another one. None: the call has ended, or
    # has no session.
    give_up: Callable[[], None] | None = None

    def to(self, event: ReceiptEvent) -> None:
        """Move to the state that the table has for an event."""
        self.state = TABLE[self.state, event]

    def accept(self, event: ReceiptEvent) -> bool:
        """Move if the table has the event for this state; return whether it has it."""
        state = TABLE.get((self.state, event))
        if state is None:
            return False
        self.state = state
        return True

    @property
    def is_lost(self) -> bool:
        """Return whether the answer is lost: the caller is gone, or got no outcome."""
        return self.state in LOST_STATES

    @property
    def is_late(self) -> bool:
        """Return whether the caller had left before the message of this call was served."""
        return self.transport is not None and self.transport.message.has_left_before


# --- the sender of the call -------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def origin_of(sender: str | None, method: str) -> bytes | None:
    """Return the digest of a unique sender and a method; None without a unique sender."""
    if sender is None:
        return None
    return sha256(f"{sender}\0{method}".encode(errors="surrogatepass")).digest()[:10]


def recognised(call: Call, run: Run) -> None:
    """Give a call the key of the earlier call that it repeats."""
    call.key = run.claim.id.key
    call.recognised = True
    if call.peer is not None:
        call.peer.named(call.key)


class Strangers:
    """Lost answers of callers that cannot be distinguished.

    A repetition is not recognised, and the log says so. This remembers the latest losses, by method
    and params.
    """

    def __init__(self) -> None:
        # The time until which an equal call counts as a repetition.
        self.lost: dict[bytes, float] = {}

    def note_lost(self, run: Run) -> None:
        """Remember that the answer of a run is lost, if a repetition of it cannot be recognised."""
        if run.claim.keyless is None or run.claim.keyless.likeness is not None:
            return
        if len(self.lost) >= MOST_STRANGERS:
            del self.lost[next(iter(self.lost))]  # the oldest
        self.lost[_sort_of(run.claim.id.method, run.claim.fingerprint)] = (
            time.monotonic() + run.method.terms.loss_window
        )

    def settle(self, run: Run) -> None:
        """Forget a run that has ended and done nothing: its repetition is right to run."""
        if self.lost and run.ran == "no":
            self.lost.pop(_sort_of(run.claim.id.method, run.claim.fingerprint), None)

    def warn(self, call: Call) -> None:
        """Log a call that repeats one whose answer was lost."""
        assert call.fingerprint is not None
        until = self.lost.pop(_sort_of(call.record, call.fingerprint), None)
        if until is None or time.monotonic() > until:
            return
        logger.warning(
            "%s: not recognised: anonymous caller; "
            "the call repeats one whose answer was lost, and runs again; "
            "name the callers with auth=, or, if all of them are one user, "
            "use single_user=True (wirecall serve --single-user)",
            call.method.name,
            extra={
                "method": call.method.name,
                "correlation_id": call.correlation_id,
                **call.ids.facts(),
            },
        )


def _sort_of(record: str, fingerprint: bytes) -> bytes:
    """Return the method and the params of a call, by which anonymous calls are compared."""
    return record.encode(errors="surrogatepass") + fingerprint


# --- the receipts of a process --------------------------------------------------------------------


class Receipts:
    """The receipts of calls without a key that the ledger has not recorded yet."""

    def __init__(self, background: Background, strangers: Strangers, report: Report) -> None:
        self._background = background
        self._strangers = strangers
        self._report = report
        # By digest and key: answers that are pending, or written and not marked yet.
        self._not_lost: defaultdict[bytes, dict[str, KeylessReceipt]] = defaultdict(dict)
        # By digest: marks that are not in the ledger yet. An equal call writes them before it
        # claims.
        self._unmarked: dict[bytes, list[Delivered]] = {}
        # By digest and key: answers that were lost before the ledger answered their claims.
        self._doubtful: dict[bytes, dict[str, asyncio.Future[None]]] = {}
        # Written answers that are not marked yet.
        self._written: list[tuple[Claim, KeylessReceipt]] = []

    # --- from the call to its end -----------------------------------------------------------------

    def expect(self, call: Call, run: Run, receipt: KeylessReceipt) -> bool:
        """Register the answer to a call as pending, before the ledger is asked.

        Equal calls that arrive later do not wait for its record. If the caller sends the call again
        on the same session or pipe, the answer goes to the repetition. Return whether there are
        answers to equal calls.
        """
        transport = receipt.transport
        if transport is None:
            return self._register(run, receipt)
        resend_after = run.method.terms.resend_after
        if transport.session is not None and not isinstance(resend_after, str):
            assert run.loop is not None
            receipt.since = run.loop.time()
            receipt.give_up = partial(self.abandon, call, run)
            self._repeat(run, receipt, resend_after)
        has_equals = self._register(run, receipt)
        transport.listen(partial(self._note, call, run))
        return has_equals

    def _register(self, run: Run, receipt: KeylessReceipt) -> bool:
        """Register an answer as pending; return whether there are answers to equal calls."""
        digest = _digest_of(run.claim)
        if digest is None:
            return False
        receipts = self._not_lost[digest]
        receipts[run.claim.id.key] = receipt
        return len(receipts) > 1

    def _repeat(self, run: Run, receipt: KeylessReceipt, resend_after: float) -> None:
        """Make a running call give up its answer, if this call repeats it on the same session.

        A call that was not repeated yet comes first: a caller may have sent two at once, and repeat
        both.
        """
        digest = _digest_of(run.claim)
        if digest is None or digest not in self._not_lost:
            return
        earlier = [
            other
            for other in self._not_lost[digest].values()
            if _is_repeated(other, receipt, resend_after)
        ]
        if not earlier:
            return
        first = min(earlier, key=lambda other: (other.resends, other.since))
        receipt.since = first.since
        receipt.resends = first.resends + 1
        assert first.give_up is not None
        first.give_up()

    def assign(self, run: Run, receipt: KeylessReceipt, record: Record) -> bool:
        """Note which record a claim found; return whether this call delivers its answer.

        Only the deliverer does. If the call repeats one whose answer was lost, it has the key of
        that call from here on.
        """
        claim = run.claim
        if record.deliverer != claim.nonce:
            receipt.to(ReceiptEvent.WITHDRAW)
            return False
        receipt.state = TABLE[receipt.state, _ASSIGN]
        if record.id != claim.id:
            self._forget(run)
            run.claim = msgspec.structs.replace(claim, id=record.id)
            self._register(run, receipt)
        if receipt.state in LOST_STATES:
            # The caller left while the claim was pending. Each claim makes the answer pending again.
            self._mark_lost(run)
            self._settle(claim)
        return True

    def end(self, run: Run, receipt: KeylessReceipt) -> None:
        """Note that a call has ended: its answer is sent now."""
        receipt.give_up = None
        if receipt.state is not _PENDING:
            if receipt.state in LOST_STATES:
                self._settle(run.claim)
                self._strangers.settle(run)
            if receipt.accept(ReceiptEvent.END):
                self._forget(run)  # nothing sent to the caller now is the outcome of a record
        if receipt.transport is None:
            self._write(run, receipt)

    def landed(self, run: Run, receipt: KeylessReceipt) -> None:
        """Note that a run has ended, with its transaction if it has one."""
        if receipt.state not in LOST_STATES:
            return
        if run.claims_in_transaction and receipt.state in (_LOST, _ABANDONED):
            self._mark_lost(run)  # the ledger has the record now
        self._strangers.settle(run)

    # --- what becomes of the answer ---------------------------------------------------------------

    def _note(self, call: Call, run: Run, written: bool) -> None:
        """Called by the transport when the answer is written or lost."""
        assert run.receipt is not None
        if written:
            self._write(run, run.receipt)
        else:
            self._lose(call, run, ReceiptEvent.LOSE)

    def _write(self, run: Run, receipt: KeylessReceipt) -> None:
        """Note that an answer is written. A resumed stream may write a lost one."""
        before = receipt.state
        after = TABLE.get((before, _WRITE))
        if after is None:
            return
        receipt.state = after
        if after is _ABANDONED:  # the answer was not an outcome
            if run.method.repeats_unknown:
                self._mark_lost(run)
            else:
                self._forget(run)
                self._mark_now(run, "written")
        elif run.has_open_record:  # the ledger has no such record yet
            self._forget(run)
        elif before is _LOST:  # an equal call that arrives now is a new one
            self._mark_now(run, "written")
        else:
            # It is marked a moment later, together with others.
            self._written.append((run.claim, receipt))
            if len(self._written) == 1:
                assert run.ledger is not None
                self._background.start(self._mark_written(run.ledger))

    def abandon(self, call: Call, run: Run) -> None:
        """Note that the caller has not received the outcome, whatever is sent to it afterwards."""
        self._lose(call, run, ReceiptEvent.ABANDON)

    def _lose(self, call: Call, run: Run, event: ReceiptEvent) -> None:
        """Note that the answer is lost."""
        receipt = run.receipt
        assert receipt is not None
        before = receipt.state
        if not receipt.accept(event) or before in LOST_STATES:
            return
        if call.frame.reported:
            self._report(call, Gone("the answer did not reach its caller"))
        self._strangers.note_lost(run)
        if before in _DELIVERING:
            self._mark_lost(run)
        elif before is _UNASSIGNED:
            self._doubt(run)

    def _mark_lost(self, run: Run) -> None:
        """Mark the answer as lost, after the commit if the record is in a transaction (`landed`)."""
        self._forget(run)
        if not run.has_open_record:
            self._mark_now(run, "undelivered")

    def _mark_now(self, run: Run, delivery: Literal["written", "undelivered"]) -> None:
        ledger = run.ledger
        digest = _digest_of(run.claim)
        assert ledger is not None
        end = Delivered(run.claim.id, run.claim.nonce, delivery)
        if digest is not None:
            self._unmarked.setdefault(digest, []).append(end)

        async def mark() -> None:
            try:
                await self._background.persist(partial(ledger.deliver, [end]))
            finally:
                if digest is not None:
                    self._unmarked[digest].remove(end)
                    if not self._unmarked[digest]:
                        del self._unmarked[digest]

        self._background.start(mark())

    async def _mark_written(self, ledger: Ledger) -> None:
        """Mark the written answers after a moment, or at once if the app stops.

        A task that waits, and not a timer that starts a task: a loop that closes cancels the tasks
        that it has, and none that a timer starts later.
        """
        await self._background.pause(MARK_AFTER)
        written = self._written
        self._written = []
        ends = [Delivered(claim.id, claim.nonce, "written") for claim, _ in written]
        try:
            await self._background.persist(partial(ledger.deliver, ends))
        finally:
            for claim, receipt in written:
                self._drop(claim, receipt)

    def _forget(self, run: Run) -> None:
        """Note that the caller of a run no longer waits."""
        assert run.receipt is not None
        self._drop(run.claim, run.receipt)

    def _drop(self, claim: Claim, receipt: KeylessReceipt) -> None:
        """Drop an answer, unless a repetition has taken its place."""
        digest = _digest_of(claim)
        if digest is None or digest not in self._not_lost:
            return
        receipts = self._not_lost[digest]
        if receipts.get(claim.id.key) is receipt:
            del receipts[claim.id.key]
            if not receipts:
                del self._not_lost[digest]

    # --- equal calls ------------------------------------------------------------------------------

    async def notice(self, run: Run) -> None:
        """Give the transports of equal calls a moment to notice that their callers have left.

        A call does not wait for others of the same message, and stops waiting when its own caller
        leaves. Without a transport that watches, a leaving caller is noticed at once.
        """
        assert run.receipt is not None
        mine = run.receipt.transport
        digest = _digest_of(run.claim)
        if digest is None:
            return
        loop = asyncio.get_running_loop()
        noticed: list[asyncio.Future[None]] = []

        def end(futures: "list[asyncio.Future[None]]", _written: bool) -> None:
            for future in futures:
                wake(future, None)

        for receipt in list(self._not_lost.get(digest, {}).values()):
            other = receipt.transport
            if other is None or (mine is not None and other.message is mine.message):
                continue
            if other.look is not None:
                other.look()
            if other.arrival is not Arrival.WRITTEN:
                noticed.append(loop.create_future())
                other.listen(partial(end, noticed[-1:]))
        if noticed:
            if mine is not None:
                mine.listen(partial(end, noticed))
            await asyncio.wait(noticed, timeout=NOTICED_AFTER)

    def must_look(self, claim: Claim) -> bool:
        """Return whether equal calls in this process matter to a claim."""
        keyless = claim.keyless
        if keyless is None or keyless.likeness is None:
            return False
        if self._unmarked or self._doubtful:
            return True
        if keyless.beside:  # they mattered before, and may have changed
            return True
        receipts = self._not_lost.get(keyless.likeness)
        return receipts is not None and (len(receipts) > 1 or claim.id.key not in receipts)

    async def look(self, ledger: Ledger, run: Run) -> Claim:
        """Return the claim with the keys of equal calls in this process that are not lost.

        Those that are lost are marked first. A call whose caller has left stops waiting, in
        particular for itself, so no two calls wait for each other.
        """
        claim = run.claim
        keyless = claim.keyless
        assert run.receipt is not None
        if keyless is None or keyless.likeness is None:
            return claim
        while not run.receipt.is_lost and (doubtful := self._doubtful.get(keyless.likeness)):
            await asyncio.wait(doubtful.values())
        if unmarked := self._unmarked.get(keyless.likeness):
            # The background does that too, perhaps too late for this call.
            await ledger.deliver(list(unmarked))
        beside = frozenset(self._not_lost.get(keyless.likeness, ()))
        return msgspec.structs.replace(
            claim, keyless=msgspec.structs.replace(keyless, beside=beside)
        )

    def _doubt(self, run: Run) -> None:
        """Note that a caller has left while its claim is pending."""
        digest = _digest_of(run.claim)
        if digest is not None:
            self._forget(run)
            answered = asyncio.get_running_loop().create_future()
            self._doubtful.setdefault(digest, {}).setdefault(run.claim.id.key, answered)

    def _settle(self, claim: Claim) -> None:
        """Note that the ledger has answered a claim."""
        digest = _digest_of(claim)
        if digest is None or digest not in self._doubtful:
            return
        doubtful = self._doubtful[digest]
        if claim.id.key in doubtful:
            doubtful.pop(claim.id.key).set_result(None)
            if not doubtful:
                del self._doubtful[digest]


def _digest_of(claim: Claim) -> bytes | None:
    """Return the digests by which a claim is compared with others. None: it is not compared."""
    if claim.keyless is None:
        return None
    return claim.keyless.likeness


def _is_repeated(first: KeylessReceipt, second: KeylessReceipt, resend_after: float) -> bool:
    """Return whether a call repeats a running one. Calls of one message are separate calls."""
    if first.give_up is None or first.transport is None or second.transport is None:
        return False
    if first.transport.message is second.transport.message:
        return False
    if first.transport.session != second.transport.session:
        return False
    return second.since - first.since > resend_after
