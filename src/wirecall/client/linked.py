"""Batches whose entries use the results of earlier ones, or wait for them (R1 to R12).

    1 plan     params with references, `after`  ->  which entry waits for which
    2 choose   one array with `refs`, if the server resolves references; else waves
    3 send     the array until each entry is settled, or one wave after another

The functions of `server.references` plan and fill, as they do in a server. So both forms have the
same answers and the same errors. A wave has the entries whose targets are settled, and it is an
array or single calls, like any batch. A command is never in an earlier wave than a command before
it (R5).

An array with references that was lost, in whole or in part, is sent again with the same references
and keys. A target that is already answered goes with it, for the server to resolve the references;
its first answer counts. The server knows a command with references by its params as sent and by the
calls that it refers to (R9). With filled params it would be another command, so (R10):

| An entry with references | The server takes the array again | It no longer resolves references |
| --- | --- | --- |
| has surely not run | sent again | a wave, with filled params |
| may have run, and has a key | sent again, under its key | `OutcomeUnknown` |
| may have run, and only reads | sent again | a wave, with filled params |
| may have run, and is neither | not sent again | not sent again |

The last column also holds if a target must not run again: it has no key and is not a query.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET, Struct, UnsetType

from wirecall.aio import wake
from wirecall.client.delivery import Delivery, Dialect, changes_nothing, unwritable
from wirecall.client.exchange import AnyEntry, Entry, EntryLinks, Wire
from wirecall.client.refs import take_refs
from wirecall.errors import (
    CallFailed,
    DependencyFailed,
    DependencyUnknown,
    EncodeError,
    OutcomeUnknown,
    ReferenceInvalid,
    ReferenceNotFound,
    ReferencesOff,
    RpcError,
    WirecallError,
)
from wirecall.protocol.messages import Id, encode
from wirecall.server.references import (
    LIMITS,
    NO_LINKS,
    Links,
    Plan,
    Planned,
    Reference,
    ReferenceLimits,
    Room,
    blocked,
    check_number,
    fill,
    make_plan,
    read_pointer,
    write_pointer,
)


class _Sketch(Struct):
    """An entry before the plan."""

    links: Links | RpcError = NO_LINKS
    # The params without references, as JSON. Empty: they have none.
    params: bytes = b""
    # A reference fills an item of an array, and not a member of an object.
    fills_item: bool = False


class LinkedBatch:
    """Sends the entries of one batch with references until each is settled."""

    def __init__(self, delivery: Delivery, dialect: Dialect, entries: list[AnyEntry]) -> None:
        self._delivery = delivery
        self._dialect = dialect
        self._entries = entries
        self._plan: list[Planned] = []
        self._sketches: list[_Sketch] = []
        self._limits = LIMITS
        self._room = Room()
        # Copies of answered targets that are sent again for the entries that refer to them.
        self._copies: dict[int, AnyEntry] = {}
        # The entries have their keys, and a person has confirmed them.
        self._is_prepared = False

    async def run(self) -> tuple[Wire, str]:
        """Settle all entries; return how they were sent, and why."""
        for entry in self._entries:
            self._delivery.begin(entry)
        try:
            timeout = min(entry.timeout for entry in self._entries)
            limits = await self._reference_limits(timeout)
            left = self._make_plan(limits or LIMITS)
            if not self._dialect.shows_params:
                await self._prepare(left)
            return await self._send(left, limits)
        finally:
            for entry in self._entries:
                self._dialect.ended(entry)

    async def _reference_limits(self, timeout: float) -> ReferenceLimits | None:
        """Return the limits of a server that resolves references, None for any other."""
        return await self._dialect.reference_limits(timeout)

    async def _send(self, left: list[int], limits: ReferenceLimits | None) -> tuple[Wire, str]:
        """Settle the entries that have no outcome; return how they were sent, and why."""
        obstacle = self._obstacle(limits, left)
        if obstacle is not None:
            return await self._send_waves(left), obstacle
        remaining = await self._send_array(left)
        if remaining:
            return await self._send_waves(remaining), "the server stopped resolving references"
        return self._array_wire(), "the server resolves references"

    def _array_wire(self) -> Wire:
        if any(entry.was_streamed for entry in self._entries):
            return "stream"
        return "array"

    # --- step 1: the plan -------------------------------------------------------------------------

    def _make_plan(self, limits: ReferenceLimits) -> list[int]:
        """Plan the batch, fail the entries that cannot be sent, and return the others."""
        self._limits = limits
        self._room = Room(limits.batch_bytes)
        positions = {entry: position for position, entry in enumerate(self._entries)}
        self._sketches = [self._sketch(entry, positions) for entry in self._entries]
        ids: list[Id | UnsetType] = [
            UNSET if entry.is_notification else self._name(position)
            for position, entry in enumerate(self._entries)
        ]
        plan: Plan = make_plan(ids, [sketch.links for sketch in self._sketches], limits)
        self._plan = list(plan.entries)
        for position, planned in enumerate(self._plan):
            if planned.error is not None:
                self._fail(position, planned.error)
            else:
                self._check_params(position)
        return self._unblocked(range(len(self._entries)))

    def _name(self, position: int) -> str:
        """Return the id of an entry in the plan, which errors show."""
        return f"{position + 1} ({self._entries[position].method})"

    def _sketch(self, entry: AnyEntry, positions: dict[AnyEntry, int]) -> _Sketch:
        rest, found = take_refs(entry.params)
        if not found and not entry.after:
            return _Sketch()
        sketch = _Sketch()
        try:
            check_number("after", len(entry.after), self._limits)
            after = tuple(self._target(target, positions) for target in entry.after)
            check_number("refs", len(found), self._limits)
            refs = tuple(
                Reference(
                    each.place,
                    self._target(each.ref.entry, positions),
                    read_pointer(each.ref.pointer, "path", self._limits),
                )
                for each in found
            )
            if entry.is_notification:
                raise ReferenceInvalid("a notification takes no references", ran="no")
            if refs and not isinstance(rest, dict):
                raise ReferenceInvalid(
                    "params: references need params by name, got an array", ran="no"
                )
            sketch.links = Links(refs, after)
        except RpcError as error:
            sketch.links = error
        if found:
            sketch.fills_item = any(each.is_item for each in found)
            entry.params = rest
        return sketch

    def _target(self, target: AnyEntry, positions: dict[AnyEntry, int]) -> Id:
        position = positions.get(target)
        if position is None:
            raise ReferenceInvalid(
                f"{target.method} is an entry of another batch; "
                "expected one of the same batch, added before this call",
                ran="no",
            )
        return self._name(position)

    def _check_params(self, position: int) -> None:
        """Fail an entry whose params cannot be written: a server could not refer to it."""
        entry = self._entries[position]
        params = entry.params
        if isinstance(params, Mapping):
            params = dict(params)
        try:
            written = encode(params)
        except EncodeError as error:
            self._fail(position, unwritable(entry, error))
            return
        if self._plan[position].links.refs:
            self._sketches[position].params = written

    async def _prepare(self, left: Iterable[int]) -> None:
        self._is_prepared = not self._dialect.shows_params
        for position in left:
            entry = self._entries[position]
            if not entry.is_notification:
                await self._dialect.prepare(entry)
            if entry.is_settled:
                wake(entry.waiter, None)

    # --- step 2: the form -------------------------------------------------------------------------

    def _obstacle(self, limits: ReferenceLimits | None, left: list[int]) -> str | None:
        """Return why the batch is sent in waves, None if it is sent as one array."""
        arrays = self._delivery.arrays
        if limits is None:
            return "the server does not resolve references"
        if not arrays.legal:
            return arrays.reason
        if any(self._sketches[position].fills_item for position in left):
            return "a reference fills an item of an array, which `refs` cannot name"
        if len(left) > arrays.chunk:
            return f"the server takes {arrays.chunk} entries in an array"
        return None

    # --- outcomes of targets ----------------------------------------------------------------------

    def _fail(self, position: int, error: WirecallError) -> None:
        """Settle an entry that is not sent, or not sent again."""
        entry = self._entries[position]
        if entry.id == 0:  # the error of a dependant names it
            entry.id = self._delivery.next_id()
        entry.fail(error)
        self._delivery.finish(entry)
        wake(entry.waiter, None)

    def _unblocked(self, positions: Iterable[int]) -> list[int]:
        """Fail the entries whose targets have failed; return those that have no outcome (R6)."""
        left = []
        for position in positions:
            entry = self._entries[position]
            if entry.is_settled:
                continue
            cause = self._cause(position)
            if cause is None:
                left.append(position)
            elif entry.unclear and not changes_nothing(entry):
                self._fail(position, _unknown(entry, "a call that it needs has failed"))
            else:
                self._fail(position, cause)
        return left

    def _cause(self, position: int) -> RpcError | None:
        """Return the error that a settled target causes, None if there is none."""
        for source in self._plan[position].waits_for:
            target = self._entries[source]
            if not target.is_settled:
                continue
            error = self._dialect.failure(target)
            if error is not None:
                return _caused(target, error)
        return None

    # --- step 3: waves ----------------------------------------------------------------------------

    async def _send_waves(self, left: list[int]) -> Wire:
        """Settle entries level by level."""
        sent = 0
        wire: Wire = "singles"
        open = set(left)
        for level in self._levels():
            unblocked = self._unblocked(each for each in level if each in open)
            ready = [position for position in unblocked if self._fill(position)]
            if not self._is_prepared:
                await self._prepare(ready)
            entries = [self._entries[each] for each in ready if not self._entries[each].is_settled]
            if entries:
                sent += 1
                wire = await self._delivery.deliver_together(entries)
        if all(self._plan[position].depth == 0 for position in left):
            return wire
        return f"waves({sent})"

    def _levels(self) -> list[list[int]]:
        """Return the entries by wave: each after its targets, commands in their order (R5)."""
        levels: list[list[int]] = []
        waves: list[int] = []
        # The wave of the last command.
        lane = 0
        for position, planned in enumerate(self._plan):
            wave = max((waves[source] + 1 for source in planned.waits_for), default=0)
            in_lane = self._delivery.arrays.legal and not changes_nothing(self._entries[position])
            if in_lane:
                wave = lane = max(wave, lane)
            waves.append(wave)
            while len(levels) <= wave:
                levels.append([])
            levels[wave].append(position)
        return levels

    def _fill(self, position: int) -> bool:
        """Put the values of references into the params; return whether the entry can be sent."""
        planned = self._plan[position]
        entry = self._entries[position]
        entry.links = None
        if not planned.links.refs:
            return True
        sources = [self._entries[source] for source in planned.sources]
        refs = [
            Reference(ref.place, source.id, ref.path)
            for ref, source in zip(planned.links.refs, sources, strict=True)
        ]
        try:
            results = [
                self._dialect.referred(source, ref.path)
                for ref, source in zip(refs, sources, strict=True)
            ]
            params = self._sketches[position].params
            entry.params = self._dialect.filled(
                fill(params, refs, results, self._limits, self._room)
            )
        except RpcError as error:
            self._fail(position, error)
            return False
        return True

    # --- step 3: one array ------------------------------------------------------------------------

    async def _send_array(self, left: list[int]) -> list[int]:
        """Settle entries in arrays with references; return those that must be sent in waves."""
        waves: list[int] = []
        while left:
            left = self._settle_unrepeatable(self._unblocked(left), waves)
            if not left:
                break
            message = self._message(left)
            is_refused = await self._attempt(message)
            sent_back = [each for each in left if self._is_sent_back(self._entries[each])]
            if is_refused:
                sent_back = left
            if sent_back:
                return [*waves, *await self._without_references(left, message, sent_back)]
            left = await self._repeated(left, message)
        return waves

    async def _attempt(self, message: list[AnyEntry]) -> bool:
        """Send an array, which settles every entry in it; return whether the server refused it."""
        exchange = await self._delivery.attempt(message, array=True)
        return exchange is not None and self._delivery.arrays.learn(exchange)

    def _message(self, left: list[int]) -> list[AnyEntry]:
        """Return the entries of the next array: those that are open, and their targets."""
        parts: dict[int, AnyEntry] = {}
        for position in sorted(self._with_targets(left)):
            entry = self._entries[position]
            if position not in left:
                entry = self._copy(position)
            planned = self._plan[position]
            if planned.waits_for:
                refs = zip(planned.links.refs, planned.sources, strict=True)
                entry.links = EntryLinks(
                    tuple(
                        (write_pointer(ref.place), parts[source], write_pointer(ref.path))
                        for ref, source in refs
                    ),
                    tuple(
                        parts[each] for each in planned.waits_for if self._is_after(position, each)
                    ),
                )
            parts[position] = entry
        return list(parts.values())

    def _is_after(self, position: int, source: int) -> bool:
        """Return whether an entry names another one in `after`."""
        return self._name(source) in self._plan[position].links.after

    def _with_targets(self, positions: Iterable[int]) -> set[int]:
        """Return entries, and all that they refer to."""
        found: set[int] = set()
        waiting = list(positions)
        while waiting:
            position = waiting.pop()
            if position not in found:
                found.add(position)
                waiting.extend(self._plan[position].waits_for)
        return found

    def _copy(self, position: int) -> AnyEntry:
        """Return a copy of an answered entry: its new answer does not replace the first one."""
        copy = self._copies.get(position)
        if copy is None:
            entry = self._entries[position]
            copy = Entry(
                entry.method, entry.params, lambda _entry: None, entry.timeout, key=entry.key
            )
            copy.query = entry.query
            copy.extra = entry.extra
            copy.safe = entry.safe
            copy.wants_stream = entry.wants_stream
            self._copies[position] = copy
        copy.deadline = max(each.deadline for each in self._entries)
        return copy

    def _settle_unrepeatable(self, left: list[int], waves: list[int]) -> list[int]:
        """Take out the entries with an answered target that must not run again.

        Those that only read, or have not run, are added to `waves`.
        """
        repeatable = []
        for position in left:
            targets = self._with_targets([position]) - set(left)
            if all(self._entries[each].safe for each in targets):
                repeatable.append(position)
            else:
                self._leave_array(position, waves, "a call that it refers to must not run again")
        return repeatable

    def _leave_array(self, position: int, waves: list[int], why: str) -> None:
        """Send an entry in a wave, unless its key may have run with references (R10)."""
        entry = self._entries[position]
        is_linked = bool(self._plan[position].links.refs)
        if is_linked and entry.unclear and not changes_nothing(entry):
            self._fail(position, _unknown(entry, why))
            return
        entry.is_settled = False
        waves.append(position)

    def _is_sent_back(self, entry: AnyEntry) -> bool:
        """Return whether the server did not run an entry because of the form of the batch."""
        return isinstance(entry.error, ReferencesOff)

    async def _without_references(
        self, left: list[int], message: list[AnyEntry], sent_back: list[int]
    ) -> list[int]:
        """Return the entries to send in waves, because the server refused the form of the batch."""
        why = "the server now refuses the batch"
        if any(isinstance(self._entries[each].error, ReferencesOff) for each in sent_back):
            self._dialect.forget_references()
            why = "the server does not resolve references any more"
        waves: list[int] = []
        for position in await self._repeated(left, message, sent_back):
            self._leave_array(position, waves, why)
        return waves

    async def _repeated(
        self, left: list[int], message: list[AnyEntry], sent_back: Sequence[int] = ()
    ) -> list[int]:
        """Return the entries to send again, after a pause: also those that were sent back.

        Those that failed because of such an entry are sent again with it.
        """
        held = [each for each in left if each not in sent_back and _is_blocked(self._entries[each])]
        unjudged = {self._entries[each] for each in (*held, *sent_back)}
        judged = [each for each in message if each not in unjudged and not _is_blocked(each)]
        repeated = set(await self._delivery.repeated(judged))
        again = {
            position
            for position, entry in enumerate(self._entries)
            if entry in repeated or self._copies.get(position) in repeated
        }.union(sent_back)
        now = self._delivery.clock.time()
        for position in held:
            entry = self._entries[position]
            is_again = not again.isdisjoint(self._with_targets([position]) - {position})
            if is_again and now < entry.deadline:
                again.add(position)
            else:
                self._delivery.finish(entry)
        left = [each for each in left if each in again]
        for position in left:
            self._entries[position].is_settled = False
        return left


def _is_blocked(entry: AnyEntry) -> bool:
    """Return whether an entry failed because a target did."""
    error = entry.error
    return isinstance(error, DependencyFailed) and not isinstance(error, ReferenceNotFound)


def _unknown(entry: AnyEntry, why: str) -> OutcomeUnknown:
    """Return the error of an entry that may have run, and that is not sent again (R10)."""
    return OutcomeUnknown(
        f"{entry.method} was sent with references and may have run; {why}, so it is not sent again",
        ran="unknown",
    )


def _caused(target: AnyEntry, error: WirecallError) -> RpcError:
    """Return the error of an entry whose target has failed (R6)."""
    if isinstance(error, RpcError) and not (target.unclear and error.ran == "unknown"):
        return blocked(target.id, error)
    if isinstance(error, (RpcError, CallFailed)) and error.ran == "unknown":
        return DependencyUnknown(
            "the outcome of an entry that this one needs is unknown; "
            "send it again when that one is settled",
            ran="no",
            id=target.id,
            code=OutcomeUnknown.CODE,
        )
    return DependencyFailed(str(error), ran="no", id=target.id, code=None)
