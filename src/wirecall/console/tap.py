"""The tap of one process: its ring of calls, its bodies, and the socket on which it answers.

A tap writes one tuple per call and nothing else on the path of a call (`server.tapped`). Bodies are
separate: they are kept only with `capture="bodies"`, without secrets, and cut at 64 KB.
"""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.console.bodies import LONGEST_BODY, Bodies
from wirecall.console.lines import LogLines
from wirecall.console.ring import Ring, Totals
from wirecall.errors import RpcError
from wirecall.ledger.base import Ledger, LedgerDown
from wirecall.logs import logger
from wirecall.protocol.messages import failure
from wirecall.protocol.secrets import Plan, Redactor, hidden, plan_of, text_without_named
from wirecall.server.call import PASSED, Call, Mark, Word, clock
from wirecall.server.tapped import More, array_of, row_id

if TYPE_CHECKING:
    from wirecall.app import App
    from wirecall.console.worker import WorkerServer
    from wirecall.server.method import Method

Capture = Literal["facts", "bodies"]

# Batches with references whose plans are kept.
PLANS = 256
# Seconds between two readings of the ring.
COUNT_EVERY = 0.2


# The calls of a ledger that are counted, one round trip each.
TRIPS = (
    "claim",
    "heartbeat",
    "commit_point",
    "complete",
    "suspend",
    "release",
    "abandon",
    "deliver",
    "sweep",
)


class Trip(Struct):
    """The round trips of one kind."""

    number: int = 0
    failed: int = 0
    seconds: float = 0.0


class Tap:
    """Watches the calls of an app in one process, or in each of its workers after a fork.

    `folder` is where each process answers the questions of a console; None: there is no console.
    """

    def __init__(self, capture: Capture = "facts", folder: str | None = None) -> None:
        self.capture: Capture = capture
        # A person has paused the capture of bodies.
        self.is_paused = False
        self._folder = folder
        self._server: WorkerServer | None = None
        self._counting: asyncio.Task[None] | None = None
        # By the method itself: another one may get the id of one that was removed.
        self._redactors: WeakKeyDictionary[Method, Redactor] = WeakKeyDictionary()
        self._plans: WeakKeyDictionary[Method, Plan] = WeakKeyDictionary()
        self._reset()

    def _reset(self) -> None:
        """Begin without rows, initially and after a fork."""
        self._pid = os.getpid()
        self.name = os.urandom(3).hex()
        self.since = time.time()
        self.ring = Ring()
        self.note = self.ring.note
        self.note_bundle = self.ring.note_bundle
        self.totals = Totals(self.ring)
        self.bodies = Bodies()
        # By number of the batch: the positions that each entry waits for.
        self.plans: OrderedDict[int, dict[int, tuple[int, ...]]] = OrderedDict()
        self.trips: dict[str, Trip] = {}
        # Batches whose replies are not complete.
        self.batches: set[Mark] = set()
        self.lines = LogLines()

    # --- for the app ------------------------------------------------------------------------------

    @property
    def rows(self) -> "Tap":
        """What the dispatcher writes to."""
        if self._pid != os.getpid():
            self._reset()
        return self

    async def open(self, app: "App") -> None:
        """Answer the questions of a console, and count the calls a few times a second."""
        if self._counting is not None:
            return
        _ = self.rows
        self._counting = asyncio.get_running_loop().create_task(self._count())
        if self._folder is not None:
            from wirecall.console.worker import WorkerServer  # late: it needs the pages' modules

            server = WorkerServer(self, app, self._folder)
            try:
                await server.open()
            except OSError as error:
                # A server that serves is worth more than one that is watched.
                logger.error("the console cannot see this process: %s", error)
                return
            self._server = server
            self.lines.open()

    async def aclose(self) -> None:
        """Stop answering."""
        self.lines.close()
        server = self._server
        self._server = None
        if server is not None:
            await server.aclose()
        counting = self._counting
        self._counting = None
        if counting is not None and counting.get_loop() is asyncio.get_running_loop():
            counting.cancel()
            await asyncio.wait({counting})

    def watch_ledger(self, ledger: Ledger) -> None:
        """Count the round trips to the ledger, and their time."""
        for name in TRIPS:
            setattr(ledger, name, partial(self._trip, name, getattr(ledger, name)))

    async def _trip(
        self, name: str, work: Callable[..., Awaitable[object]], *args: Any, **options: Any
    ) -> object:
        trip = self.trips.setdefault(name, Trip())
        began = clock()
        try:
            return await work(*args, **options)
        except LedgerDown:
            trip.failed += 1
            raise
        finally:
            trip.number += 1
            trip.seconds += clock() - began

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(COUNT_EVERY)
            self.totals.count()

    # --- for the dispatcher -----------------------------------------------------------------------

    @property
    def captures(self) -> bool:
        return self.capture == "bodies"

    @property
    def queued(self) -> int:
        """Entries of batches that have not begun."""
        return sum(mark.size - 1 - mark.reached for mark in self.batches)

    def opened(self, mark: Mark) -> None:
        self.batches.add(mark)

    def closed(self, mark: Mark) -> None:
        self.batches.discard(mark)

    def note_references(self, mark: Mark, waits: dict[int, tuple[int, ...]]) -> None:
        self.plans[mark.batch] = waits
        if len(self.plans) > PLANS:
            self.plans.popitem(last=False)

    def ended(
        self, call: Call, outcome: Word, code: int | None, error: BaseException | None
    ) -> None:
        """Write the row of a call that took all the steps."""
        method = call.method
        mark = call.frame.mark
        if mark is None:
            # A call of the gateway's relay, which has its own frames.
            mark = array_of(call.frame.sender) or Mark(
                call.started, call.frame.sender.caller, 0, "mcp"
            )
            call.frame.mark = mark
        attempt = 0
        call_id = call.ids.made_call_id
        trace_id = None
        if call.run is not None:
            attempt = call.run.attempt
        if method.is_command:
            call_id = call.ids.call_id
            trace_id = call.ids.trace_id
        more = More(
            method.kind.value,
            outcome,
            _ran(call, outcome, error),
            call.key,
            call.replayed,
            call.recognised,
            attempt,
            call.started,
            call.entered,
            call.left,
            call_id,
            trace_id,
            call.batch,
        )
        if PASSED in call.values:
            more.passed = call.values[PASSED]()
        position = call.position
        if call.frame.sender.entry is not None:
            position = call.frame.sender.entry.position
        mark.note(position)
        number = self.ring.note_packed(
            clock(), mark, call.record, row_id(call.id), code, position, more
        )
        if self.capture == "bodies" and not self.is_paused and outcome != "undelivered":
            self._keep_body(number, call, error)

    # --- bodies -----------------------------------------------------------------------------------

    def _keep_body(self, number: int, call: Call, error: BaseException | None) -> None:
        """Keep the params and the result of a call, without secrets."""
        cut = False
        params: bytes | None = None
        if call.params is not UNSET:
            params, cut = self._shown_params(call, call.params)
        result: bytes | None = None
        if isinstance(error, RpcError):
            result = _shown_result(None, failure(None, error).error)
        elif error is None and not call.replayed:
            result = _shown_result(self._plan(call), call.result)
        self.bodies.add(number, params, result, cut=cut)

    def _plan(self, call: Call) -> Plan:
        """Return what is secret in the results of a method."""
        method = call.method
        if method not in self._plans:
            self._plans[method] = plan_of(method.signature.returns, {})
        return self._plans[method]

    def _shown_params(self, call: Call, params: Raw) -> tuple[bytes, bool]:
        """Return params as JSON text without secrets, and whether they are too long for it."""
        if len(params) > LONGEST_BODY:
            # Not cut: a part of the text cannot be searched for secrets.
            return b"%d bytes, more than are kept" % len(params), True
        redactor = self._redactors.get(call.method)
        if redactor is None:
            redactor = Redactor(call.method.signature, LONGEST_BODY, by_name=True)
            self._redactors[call.method] = redactor
        try:
            return redactor(params), False
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return b"not readable", True


def _shown_result(plan: Plan, result: object) -> bytes | None:
    """Return a result as JSON text without secrets."""
    try:
        data = bytes(result) if isinstance(result, Raw) else msgspec.json.encode(result)
        if plan is not None:
            data = msgspec.json.encode(hidden(plan, msgspec.json.decode(data)))
        return text_without_named(data)
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError):
        return None


def _ran(call: Call, outcome: Word, error: BaseException | None) -> Literal["yes", "no", "unknown"]:
    if isinstance(error, RpcError):
        return error.ran
    if outcome == "cancelled" and call.method.is_command:
        return "unknown"
    return "yes"
