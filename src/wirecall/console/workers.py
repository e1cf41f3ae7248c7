"""The workers of one server: those that answer, and the last ones that have ended."""

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
NO_WORKER: JsonObject = {
    "error": {
        "type": "no_worker",
        "message": "No worker of the server answers.",
        "hint": "it is starting, or it ended",
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
        self.numbers = Numbers(link.name, 0, time.time())


class Workers:
    """All workers of a server by name. `note_lost` gets the name of each that ends."""

    def __init__(self, folder: str, note_lost: Callable[[str], None]) -> None:
        self._folder = folder
        self._note_lost = note_lost
        self._known: dict[str, Worker] = {}
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
            if known is None:
                self._known[name] = Worker(WorkerLink(path))
        for name, worker in self._known.items():
            if name not in names:
                self.lose(worker)
        gone = [worker for worker in self._known.values() if worker.is_gone]
        for worker in gone[: max(0, len(gone) - GONE)]:
            del self._known[worker.name]
            # Its calls stay in the sums: a counter never goes back.
            self._retired.append(worker.numbers)
            self._retired = [sum_of_numbers(self._retired)]

    def _sockets(self) -> list[Path]:
        return sorted(Path(self._folder).glob(f"[0-9a-f]*{SOCKET}"))

    def lose(self, worker: Worker) -> None:
        """Mark a worker that has ended, and its rows."""
        if worker.is_gone:
            return
        worker.is_gone = True
        self.ended += 1
        worker.link.close()
        worker.numbers.in_flight = 0
        worker.numbers.queued = 0
        worker.numbers.upstreams = None
        self._note_lost(worker.name)

    def alive(self) -> list[Worker]:
        """Return the workers that have not ended."""
        return [worker for worker in self._known.values() if not worker.is_gone]

    def total(self) -> Numbers:
        """Return the numbers summed over all workers that were seen."""
        return sum_of_numbers([*self._retired, *(worker.numbers for worker in self)])

    async def ask(self, what: str, **rest: Any) -> JsonObject:
        """Ask any worker that is alive."""
        for worker in self.alive():
            try:
                return await worker.link.ask(what, **rest)
            except Gone:
                self.lose(worker)
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
