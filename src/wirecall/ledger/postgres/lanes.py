"""Transitions of one kind go out together: one round trip and one flush to disk serve all that wait at the moment.

The rules of the file:

1. Claims, completions, and questions for a record have a queue each (`Lane`): however many ask what became of a claim, a new
   one goes out.
2. Within a statement each id is there once, and they are in order, so that two statements never wait for each other.
3. A statement is sent again, once, after its connection was lost, or where the server undid it: a claim finds its own
   nonce, a completion its own token done, a question changes nothing. Nothing else is sent twice.
4. If the server refuses a list, each of it goes out alone: the others need not suffer for one.
"""

import asyncio
from collections import deque

import psycopg
from msgspec import Struct

from wirecall.ledger.base import Claim, LedgerDown, RecordId
from wirecall.ledger.postgres.errors import UNDONE, down, is_lost
from wirecall.ledger.postgres.pool import Pool, refuse
from wirecall.ledger.postgres.rows import SQL, Completion, Row, Rows, array, check, encode

# Of each kind, statements under way at once, and what one of them carries at most. Two, so that one is made ready while the
# server works on the other; more only make them smaller.
FLIGHTS = 2
BATCH = 64
BATCH_BYTES = 1_000_000


class Lanes:
    """The queues of one event loop, over its connections."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.claims = Lane(pool, SQL["claim"])
        self.completions = Lane(pool, SQL["complete"])
        self.questions = Lane(pool, SQL["get"])


class _Waiting(Struct):
    id: RecordId
    item: bytes
    answer: "asyncio.Future[Row | None]"


class Lane:
    """One queue. What waits in it goes out together, and rows with their ids come back."""

    def __init__(self, pool: Pool, statement: str) -> None:
        self._pool = pool
        self._statement = statement
        self._waiting: deque[_Waiting] = deque()
        self._flights = 0

    async def send(self, id: RecordId, item: Claim | Completion | RecordId) -> Row | None:
        check(id)
        answer: asyncio.Future[Row | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(id, encode(item), answer))
        self._start()
        return await answer

    def _start(self) -> None:
        if self._waiting and self._flights < FLIGHTS:
            self._flights += 1
            self._pool.spawn(self._fly())

    async def _fly(self) -> None:
        try:
            if batch := self._batch():
                await self._deliver(batch)
        finally:
            self._flights -= 1
        self._start()

    def _batch(self) -> list[_Waiting]:
        """What goes out together: of each id one. Whoever was cancelled by now does not go at all."""
        batch: dict[RecordId, _Waiting] = {}
        size = 0
        while self._waiting and len(batch) < BATCH and size < BATCH_BYTES and self._waiting[0].id not in batch:
            waiting = self._waiting.popleft()
            if not waiting.answer.done():
                batch[waiting.id] = waiting
                size += len(waiting.item)
        return [batch[id] for id in sorted(batch)]

    async def _deliver(self, batch: list[_Waiting]) -> None:
        try:
            rows = await self._sent(batch)
        except psycopg.Error as error:
            if len(batch) == 1 or is_lost(error):
                return self._fail(batch, down(error))
            # One of them is at fault, or has to wait for someone: the others need not suffer.
            await asyncio.gather(*(self._deliver([waiting]) for waiting in batch))
        except LedgerDown as error:
            self._fail(batch, error)
        except BaseException:
            self._fail(batch, LedgerDown("the ledger was stopped"))
            raise
        else:
            found = {row[:3]: row for row in rows}
            for waiting in batch:
                if not waiting.answer.done():
                    waiting.answer.set_result(found.get((waiting.id.caller, waiting.id.method, waiting.id.key)))

    async def _sent(self, batch: list[_Waiting]) -> Rows:
        items = array([waiting.item for waiting in batch])
        try:
            return await self._pool.ask(self._statement, {"items": items, "again": False})
        except psycopg.Error as error:
            if not is_lost(error) and error.sqlstate not in UNDONE:
                raise
        return await self._pool.ask(self._statement, {"items": items, "again": True})

    def _fail(self, batch: list[_Waiting], error: LedgerDown) -> None:
        for waiting in batch:
            refuse(waiting.answer, error)
        while self._waiting and self._pool.is_away:  # it would be no better for them
            refuse(self._waiting.popleft().answer, error)
