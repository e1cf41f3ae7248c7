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
from collections.abc import Callable
from functools import lru_cache, partial
from hashlib import sha256

import msgspec

from wirecall.commands.background import Background
from wirecall.commands.run import Run
from wirecall.ledger.base import Claim, Delivered, Keyless, Ledger
from wirecall.protocol.messages import Sending
from wirecall.stepping import wake

# Seconds after which written answers are marked: ten commands one after another share a commit. An equal call in another
# process waits for the mark, and does not look again before 0.025 s (`execute.FIRST_POLL`).
MARK_AFTER = 0.02

# Seconds in which a transport notices that a client has left, also on a machine that is busy: an equal call of the same
# caller comes so much later.
NOTICED_AFTER = 0.25


def keyless_of(whose: str | None, method: str, fingerprint: bytes, window: float) -> Keyless:
    """Return what a call without a key is compared by. `whose` is None where two callers could be mistaken for one."""
    # It is short, since the key holds it too. If 8 bytes do not tell two params apart, their fingerprints do: the call is
    # refused with a conflict, and never gets the other answer.
    return Keyless(None if whose is None else _origin(whose, method) + fingerprint[:8], window)


@lru_cache(maxsize=1024)
def _origin(whose: str, method: str) -> bytes:
    return sha256(f"{whose}\0{method}".encode(errors="surrogatepass")).digest()[:10]


class Deliveries:
    """The answers to calls without a key whose end the ledger does not know yet."""

    def __init__(self, background: Background) -> None:
        self._background = background
        # By likeness and key: answers on their way, or written and not marked yet. None: no transport watches the answer.
        self._not_lost: dict[bytes, dict[str, Sending | None]] = {}
        self.lost: dict[bytes, list[Delivered]] = {}  # not marked yet
        self.doubtful: dict[bytes, dict[str, asyncio.Future[None]]] = {}  # lost before their claims were answered
        self._written: list[Run] = []
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, keyless: Keyless, key: str, sending: Sending | None) -> bool:
        """Note that an answer is on its way, or its claim, from the record with this key; return whether equal ones are."""
        likeness = keyless.likeness
        if likeness is None:
            return False
        keys = self._not_lost.get(likeness)
        if keys is None:
            self._not_lost[likeness] = {key: sending}
            return False
        keys[key] = sending
        return len(keys) > 1

    async def notice(self, keyless: Keyless, sending: Sending | None) -> None:
        """Give the transports of equal calls a moment to notice that their callers have left.

        `sending` is the way of the answer to the call that waits: no call waits for the others of its own message, nor when
        its own caller has left. Where no transport watches, a caller that leaves is noticed at once.
        """
        if keyless.likeness is None:
            return
        loop, noticed = asyncio.get_running_loop(), []

        def end(futures: "list[asyncio.Future[None]]", _written: bool) -> None:
            for future in futures:
                wake(future, None)

        for other in self._not_lost.get(keyless.likeness, {}).values():
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

    def doubt(self, keyless: Keyless, key: str) -> None:
        """Note that a caller has left while its claim, with this key, is on its way."""
        if keyless.likeness is not None:
            self.forget(keyless, key)
            self.doubtful.setdefault(keyless.likeness, {}).setdefault(key, asyncio.get_running_loop().create_future())

    def settle(self, keyless: Keyless, key: str) -> None:
        """Note that the ledger has answered that claim."""
        if keyless.likeness is None:
            return
        if (doubtful := self.doubtful.get(keyless.likeness)) and key in doubtful:
            doubtful.pop(key).set_result(None)
            if not doubtful:
                del self.doubtful[keyless.likeness]

    def note_written(self, run: Run) -> None:
        """Note that the answer that is this run's to give has arrived; the mark follows with those of others."""
        if run.is_open:  # the ledger has no such record yet
            assert run.keyless is not None and run.answers is not None
            self.forget(run.keyless, run.answers.key)
            return
        self._written.append(run)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(MARK_AFTER, self.flush)

    def note_lost(self, run: Run) -> None:
        """Mark that the answer that is this run's to give is lost."""
        ledger, keyless, id = run.ledger, run.keyless, run.answers
        assert ledger is not None and keyless is not None and id is not None
        self.forget(keyless, id.key)
        if run.is_open:  # the ledger hears of a loss after the commit
            return
        likeness, end = keyless.likeness, Delivered(id, run.claim.nonce, "undelivered")
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
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        written, self._written = self._written, []
        if not written:
            return
        ledger = written[0].ledger
        assert ledger is not None
        ends = [Delivered(run.answers, run.claim.nonce, "written") for run in written if run.answers is not None]

        async def mark() -> None:
            try:
                await self._background.persist(partial(ledger.deliver, ends))
            finally:
                for run, end in zip(written, ends, strict=True):
                    if run.keyless is not None:
                        self.forget(run.keyless, end.id.key)

        self._background.start(mark())

    def forget(self, keyless: Keyless, key: str) -> None:
        """Note that an answer is not on its way any more, or not from the record with this key."""
        if keyless.likeness is not None and (keys := self._not_lost.get(keyless.likeness)):
            keys.pop(key, None)
            if not keys:
                del self._not_lost[keyless.likeness]
