"""Calls without a key: how a repetition is recognised, and the way of their answers to their callers.

1. Calls without a key are compared by their likeness: digests of caller and method, and of the params. A call without a
   known caller has none, so it matches nothing.
2. An answer is on its way until its transport has taken the last byte, or its caller is gone. Answers that are on their way
   in this process are not lost: an equal call meanwhile is a new one. But a caller may have left a moment ago, and its
   transport not have noticed yet. So an equal call first waits a moment, unless it came in the same message. If its own
   caller leaves meanwhile, it does not run: a repetition may arrive before the call that it repeats, which then is the
   one that waits.
3. A loss is marked in the ledger at once; a repetition in this process sees to the mark itself. Written answers are marked
   together, a moment later, so that they cost no commit of their own. Both are retried while the ledger is down. A process
   that dies in that moment has not said that its last answers were written, so they count as undelivered: an equal call
   within the loss window gets such an answer again, and does not run.
4. A caller may leave before the ledger has answered its claim. Its repetition waits for that answer: if the ledger saw the
   repetition first, it would grant both.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import sha256

import msgspec

from wirecall.commands.background import Background
from wirecall.commands.run import Run
from wirecall.ledger.base import Claim, Delivered, Ledger
from wirecall.protocol.messages import Sending
from wirecall.server.call import ANONYMOUS
from wirecall.stepping import wake

# Seconds after which written answers are marked: ten commands one after another share a commit. An equal call in another
# process waits for the mark, and does not look again before 0.025 s (`execute.FIRST_POLL`).
MARK_AFTER = 0.02

# Seconds in which a transport notices that a client has left, also on a machine that is busy: an equal call of the same
# caller comes so much later.
NOTICED_AFTER = 0.25


@lru_cache(maxsize=1024)
def origin_of(caller: str, peer: str | None, method: str) -> bytes | None:
    """Return the digest of a method and the one sender that can repeat its calls; None: there may be several."""
    sender = peer if caller == ANONYMOUS else f"caller {caller}"
    return None if sender is None else sha256(f"{sender}\0{method}".encode(errors="surrogatepass")).digest()[:10]


class Deliveries:
    """The answers to calls without a key whose end the ledger does not know yet."""

    def __init__(self, background: Background) -> None:
        self._background = background
        # By likeness and key: answers on their way, or written and not marked yet. None: no transport watches the answer.
        self._not_lost: defaultdict[bytes, dict[str, Sending | None]] = defaultdict(dict)
        self.lost: dict[bytes, list[Delivered]] = {}  # not marked yet
        self.doubtful: dict[bytes, dict[str, asyncio.Future[None]]] = {}  # lost before their claims were answered
        self._written: list[Claim] = []  # their claims; not marked yet
        self._timer: asyncio.TimerHandle | None = None  # set while there are some
        self._ledger: Ledger | None = None  # their ledger

    def begin(self, claim: Claim, sending: Sending | None) -> bool:
        """Note that a claim, or the answer from its record, is on its way; return whether equal ones are."""
        if claim.keyless is None or (likeness := claim.keyless.likeness) is None:
            return False
        keys = self._not_lost[likeness]
        keys[claim.id.key] = sending
        return len(keys) > 1

    async def notice(self, claim: Claim, sending: Sending | None) -> None:
        """Give the transports of equal calls a moment to notice that their callers have left.

        `sending` is the way of the answer to the call that waits: no call waits for the others of its own message, nor when
        its own caller has left. Where no transport watches, a caller that leaves is noticed at once.
        """
        if claim.keyless is None or claim.keyless.likeness is None:
            return
        loop, noticed = asyncio.get_running_loop(), []

        def end(futures: "list[asyncio.Future[None]]", _written: bool) -> None:
            for future in futures:
                wake(future, None)

        for other in self._not_lost.get(claim.keyless.likeness, {}).values():
            if other is not None and other is not sending and not other.is_written:
                noticed.append(loop.create_future())
                other.listen(partial(end, noticed[-1:]))
        if noticed:
            if sending is not None:
                sending.listen(partial(end, noticed))
            await asyncio.wait(noticed, timeout=NOTICED_AFTER)

    async def look(self, ledger: Ledger, claim: Claim, is_lost: Callable[[], bool]) -> Claim:
        """Return the claim with the keys of equal calls in this process that are not lost, and mark those that are.

        `is_lost` says whether the caller has left, perhaps in the meantime: such a call waits no longer, least of all for
        itself, so no two wait for each other.
        """
        keyless = claim.keyless
        if keyless is None or keyless.likeness is None:
            return claim
        while not is_lost() and (doubtful := self.doubtful.get(keyless.likeness)):
            await asyncio.wait(doubtful.values())
        if lost := self.lost.get(keyless.likeness):
            await ledger.deliver(list(lost))  # the background does that too, perhaps too late for this call
        beside = frozenset(self._not_lost.get(keyless.likeness, ()))
        return msgspec.structs.replace(claim, keyless=msgspec.structs.replace(keyless, beside=beside))

    def doubt(self, claim: Claim) -> None:
        """Note that a caller has left while its claim is on its way."""
        if claim.keyless is not None and (likeness := claim.keyless.likeness) is not None:
            self.forget(claim)
            answered = asyncio.get_running_loop().create_future()
            self.doubtful.setdefault(likeness, {}).setdefault(claim.id.key, answered)

    def settle(self, claim: Claim) -> None:
        """Note that the ledger has answered that claim."""
        if claim.keyless is None or (likeness := claim.keyless.likeness) is None:
            return
        if (doubtful := self.doubtful.get(likeness)) and claim.id.key in doubtful:
            doubtful.pop(claim.id.key).set_result(None)
            if not doubtful:
                del self.doubtful[likeness]

    def note_written(self, run: Run) -> None:
        """Note that the answer that is this run's to give has arrived; the mark follows with those of others."""
        if run.is_open:  # the ledger has no such record yet
            self.forget(run.claim)
            return
        self._written.append(run.claim)
        if self._timer is None:
            self._ledger, self._timer = run.ledger, asyncio.get_running_loop().call_later(MARK_AFTER, self.flush)

    def note_lost(self, run: Run) -> None:
        """Mark that the answer that is this run's to give is lost."""
        ledger, keyless, end = run.ledger, run.claim.keyless, Delivered(run.claim.id, run.claim.nonce, "undelivered")
        assert ledger is not None and keyless is not None
        self.forget(run.claim)
        if run.is_open:  # the ledger hears of a loss after the commit
            return
        likeness = keyless.likeness
        if likeness is not None:
            self.lost.setdefault(likeness, []).append(end)

        async def mark() -> None:
            try:
                await self._background.persist(partial(ledger.deliver, [end]))
            finally:
                if likeness is not None:
                    self.lost[likeness].remove(end)
                    if not self.lost[likeness]:
                        del self.lost[likeness]

        self._background.start(mark())

    def flush(self) -> None:
        """Mark the written answers now."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        written, self._written, ledger = self._written, [], self._ledger
        assert ledger is not None
        ends = [Delivered(claim.id, claim.nonce, "written") for claim in written]

        async def mark() -> None:
            try:
                await self._background.persist(partial(ledger.deliver, ends))
            finally:
                self.forget(*written)

        self._background.start(mark())

    def forget(self, *claims: Claim) -> None:
        """Note that neither claims nor their answers are on their way any more."""
        for claim in claims:
            if claim.keyless is not None and (likeness := claim.keyless.likeness) is not None:
                keys = self._not_lost[likeness]
                keys.pop(claim.id.key, None)
                if not keys:
                    del self._not_lost[likeness]
