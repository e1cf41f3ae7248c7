"""The answers of one batch while some of its entries still run.

The server puts answers in as entries end. A transport takes them out, and writes them to its
client. The queue between them is bounded: while it is full, the server begins no other entry.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wirecall.protocol.messages import Id
    from wirecall.protocol.receipt import Receipt

# A reader that is slower than the entries keeps this much waiting, and no more entries begin. Both
# numbers count records that are being written, too.
MOST_RECORDS = 64
MOST_BYTES = 1 << 20


class Answers:
    """The queue of a batch's answers, and what is known about its end."""

    def __init__(
        self, whole: "Receipt", *, in_input_order: bool = False, marks_replays: bool = True
    ) -> None:
        # The delivery of the stream. That of a record is a part of it.
        self.whole = whole
        self.in_input_order = in_input_order
        # Whether a record says that its answer came from the ledger.
        self.marks_replays = marks_replays
        # How many answers were put in.
        self.answered = 0
        # How many entries have not ended. The server sets it before the first one begins.
        self.entries_left = 0
        # The ids of the answers that came from the ledger.
        self.replayed: list[Id] = []
        # Whether any entry owes an answer. A batch of notifications does not.
        self.owes_answers = True
        # Whether every answer is in the queue.
        self.is_finished = False
        # Whether the reader has left.
        self.is_closed = False
        # Whether the reader has to catch up before other entries begin.
        self.is_full = False
        # The answers that the reader can take: values that are encoded when they are sent, many in
        # one step.
        self.ready: list[object] = []
        # The position whose answer is due next, in input order.
        self.next = 0
        # Encodes one answer, if all of them together cannot be encoded.
        self.seal: Callable[[Any], bytes] | None = None
        # Called when the reader leaves.
        self.on_close: Callable[[], None] | None = None
        # When the reader last looked, by the clock of `time.perf_counter`.
        self.taken_at = time.perf_counter()
        # The receipts of those that a call wants to know about.
        self._receipts: list[Receipt] = []
        # Answers that wait for an earlier one, in input order. None stands for no answer.
        self._early: dict[int, tuple[object, int, Receipt | None]] = {}
        # The bytes of those that are ready.
        self._ready_bytes = 0
        # The records and bytes that the reader has not written yet.
        self._records = 0
        self._bytes = 0
        # The part of them that the reader has taken.
        self._taken_records = 0
        self._taken_bytes = 0
        self._taken_receipts: list[Receipt] = []
        # The reader, while it waits.
        self._reader: asyncio.Future[None] | None = None
        # Entries that wait for room.
        self._entries: list[asyncio.Future[None]] = []

    # --- for the server ---------------------------------------------------------------------------

    def put(
        self, position: int, answer: object, size: int = 0, receipt: "Receipt | None" = None
    ) -> None:
        """Add the answer of the entry at a position, and its size. None: it gets no answer."""
        if self.is_closed:
            return
        self.entries_left -= 1
        if not self.entries_left:
            self.is_finished = True
        if answer is not None:
            self.answered += 1
            self._records += 1
            self._bytes += size
            if self._records >= MOST_RECORDS or self._bytes >= MOST_BYTES:
                self.is_full = True
        if self.in_input_order:
            self._put_in_order(position, answer, size, receipt)
        elif answer is not None:
            self.ready.append(answer)
            self._ready_bytes += size
            if receipt is not None:
                self._receipts.append(receipt)
        if self._reader is not None and (self.ready or self.is_finished):
            _wake(self._reader)

    def put_all(self, answers: list[object], size: int) -> None:
        """Add the answers of several entries that ended without a wait, and their size together.

        Only in completion order.
        """
        if self.is_closed:
            return
        count = len(answers)
        self.entries_left -= count
        if not self.entries_left:
            self.is_finished = True
        self.answered += count
        self._records += count
        self._bytes += size
        if self._records >= MOST_RECORDS or self._bytes >= MOST_BYTES:
            self.is_full = True
        self.ready += answers
        self._ready_bytes += size
        _wake(self._reader)

    def _put_in_order(
        self, position: int, answer: object, size: int, receipt: "Receipt | None"
    ) -> None:
        self._early[position] = answer, size, receipt
        while self.next in self._early:
            answer, size, receipt = self._early.pop(self.next)
            self.next += 1
            if answer is not None:
                self.ready.append(answer)
                self._ready_bytes += size
            if receipt is not None:
                self._receipts.append(receipt)
        self._wake_entries()  # the entry that is due next begins, however full the queue is

    async def until_changed(self) -> None:
        """Wait until there may be room for another entry, or the reader has left."""
        change = asyncio.get_running_loop().create_future()
        self._entries.append(change)
        await change

    def finish(self) -> None:
        """Note that no answer will be put in."""
        self.is_finished = True
        _wake(self._reader)

    # --- for the transport ------------------------------------------------------------------------

    def take(self) -> list[object]:
        """Return the answers that are ready. They count as unwritten until `written`."""
        taken = self.ready
        self.ready = []
        self._taken_records = len(taken)
        self._taken_bytes = self._ready_bytes
        self._ready_bytes = 0
        self._taken_receipts = self._receipts
        self._receipts = []
        self.taken_at = time.perf_counter()
        return taken

    def written(self) -> "list[Receipt]":
        """Note that the records of the last `take` are written, and return their receipts."""
        self._records -= self._taken_records
        self._bytes -= self._taken_bytes
        self._taken_records = 0
        self._taken_bytes = 0
        self.is_full = self._records >= MOST_RECORDS or self._bytes >= MOST_BYTES
        self._wake_entries()
        receipts = self._taken_receipts
        self._taken_receipts = []
        return receipts

    async def until_ready(self) -> None:
        """Wait until there is a record, or the end, or the reader has left."""
        while not (self.ready or self.is_finished or self.is_closed):
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def close(self) -> None:
        """Note that the reader has left: no other entry begins."""
        if self.is_closed:
            return
        self.is_closed = True
        self.ready.clear()
        self._early.clear()
        self._wake_entries()
        _wake(self._reader)
        if self.on_close is not None:
            self.on_close()

    def _wake_entries(self) -> None:
        entries = self._entries
        self._entries = []
        for entry in entries:
            _wake(entry)


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
