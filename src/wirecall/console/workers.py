"""The workers of one server: those that answer, and the last ones that have ended."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from wirecall.console.numbers import Numbers, decode_numbers, sum_of_numbers
from wirecall.console.source import Refusal
from wirecall.console.worker import SOCKET, Gone, WorkerLink
from wirecall.protocol.messages import JsonObject

# Workers that have ended and whose rows are kept.
GONE = 8
# Seconds before a worker that did not answer is asked again.
AGAIN = 5.0
NO_WORKER: JsonObject = {
    "error": {
        "type": "no_worker",
        "message": "No worker of the server answers.",
        "hint": "it is starting, or it ended",
    }
}
NO_ANSWER: JsonObject = {
    "error": {
        "type": "no_answer",
        "message": "The worker ended before it answered. The call may have run.",
        "hint": "look for it among the calls, and for its record in the ledger",
    }
}


class Worker:
    """One worker, alive or gone."""

    def __init__(self, link: WorkerLink) -> None:
        self.link = link
        self.name = link.name
        self.is_gone = False
        # The number of its last row that was read.
        self.read = 0
        # The end of that row, by its clock.
        self.previous = 0.0
        self.offset = 0.0
        # Whether it answers again, and when it may be asked that.
        self.asking: asyncio.Task[None] | None = None
        self.again_at = 0.0
        self.numbers = Numbers(link.name, 0, time.time())


class Workers:
    """All workers of a server by name. `note_lost` gets the name of each that ends."""

    def __init__(self, folder: str, note_lost: Callable[[str], None]) -> None:
        self._folder = folder
        self._note_lost = note_lost
        self._known: dict[str, Worker] = {}
        # The names of those that were forgotten, and were killed: their sockets are still there.
        self._forgotten: set[str] = set()
        # The sum of the workers that were forgotten.
        self._retired: list[Numbers] = []
        # Workers that have ended.
        self.ended = 0

    def __len__(self) -> int:
        return len(self._known)

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._known.values()))

    def get(self, name: str) -> Worker | None:
        """Return a worker that answers; None if there is none of this name."""
        worker = self._known.get(name)
        if worker is None or worker.is_gone:
            return None
        return worker

    def close(self) -> None:
        for worker in self:
            worker.link.close()
            if worker.asking is not None:
                worker.asking.cancel()

    async def read_numbers(self) -> None:
        """Read the numbers of every worker."""
        for worker in self.alive():
            try:
                worker.numbers = decode_numbers(await worker.link.ask_raw("numbers"))
            except Gone:
                self.lose(worker)

    def find(self) -> None:
        """Find the workers that began or ended."""
        names = {path.name.removesuffix(SOCKET): path for path in self._sockets()}
        for name, path in names.items():
            known = self._known.get(name)
            if known is None and name not in self._forgotten:
                self._known[name] = Worker(WorkerLink(path))
        self._forgotten &= names.keys()
        for name, worker in self._known.items():
            if name not in names:
                self.lose(worker)
            elif worker.is_gone:
                self._ask_again(worker)
        gone = [worker for worker in self._known.values() if worker.is_gone]
        for worker in gone[: max(0, len(gone) - GONE)]:
            del self._known[worker.name]
            self._forgotten.add(worker.name)
            # Its calls stay in the sums: a counter never goes back.
            self._retired.append(worker.numbers)
            self._retired = [sum_of_numbers(self._retired)]

    def _sockets(self) -> list[Path]:
        return sorted(Path(self._folder).glob(f"[0-9a-f]*{SOCKET}"))

    def lose(self, worker: Worker) -> None:
        """Mark a worker that has ended, or does not answer, and its rows."""
        if worker.is_gone:
            return
        worker.is_gone = True
        worker.again_at = time.monotonic() + AGAIN
        self.ended += 1
        worker.link.close()
        worker.numbers.in_flight = 0
        worker.numbers.queued = 0
        worker.numbers.upstreams = None
        self._note_lost(worker.name)

    def _ask_again(self, worker: Worker) -> None:
        """Ask a worker in the background whether it answers again: a handler may have blocked it."""
        is_asking = worker.asking is not None and not worker.asking.done()
        if not is_asking and time.monotonic() >= worker.again_at:
            worker.asking = asyncio.get_running_loop().create_task(self._await_back(worker))

    async def _await_back(self, worker: Worker) -> None:
        try:
            numbers = decode_numbers(await worker.link.ask_raw("numbers"))
        except Gone:
            worker.again_at = time.monotonic() + AGAIN
            return
        if worker.name in self._known:
            worker.numbers = numbers
            worker.is_gone = False

    def alive(self) -> list[Worker]:
        """Return the workers that have not ended."""
        return [worker for worker in self._known.values() if not worker.is_gone]

    def total(self) -> Numbers:
        """Return the numbers summed over all workers that were seen."""
        return sum_of_numbers([*self._retired, *(worker.numbers for worker in self)])

    async def ask(self, what: str, *, is_action: bool = False, **rest: Any) -> JsonObject:
        """Ask any worker that is alive; no other one if it may have begun an action."""
        for worker in self.alive():
            try:
                return await worker.link.ask(what, **rest)
            except Gone as error:
                self.lose(worker)
                if is_action and error.was_asked:
                    raise Refusal(502, NO_ANSWER) from error
        raise Refusal(503, NO_WORKER)

    @property
    def is_gateway(self) -> bool:
        """Whether there are servers behind it."""
        return any(worker.numbers.upstreams is not None for worker in self._known.values())

    def upstream_states(self) -> dict[str, JsonObject]:
        """Return the state of each upstream; of several workers, that of the first that is alive."""
        for worker in self.alive():
            if worker.numbers.upstreams is not None:
                return worker.numbers.upstreams
        return {}
