"""Tasks: calls of tools that go on after their request is answered (extension io.modelcontextprotocol/tasks, SEP-2663).

1. A task is a command's run like any other, with a record in the ledger and a second row about it: the id that its client
   has, the arguments, the questions and answers so far (`Document`). So it outlives its request, its client and its process.
2. A call becomes a task when it is handed over: before its handler starts (`task=True`), after some seconds (`task=2.0`), or
   where the handler says so (`ctx.hand_over()`). The row is written first, so `tasks/get` finds every task that a client
   has heard of, in any process. A call that finds the record of a task gets that task: one key, one task.
3. The process that takes the call runs it. If that process dies, or stops, another adopts the task when the lease of its
   record is over. `ledger.base.decide` judges that as it judges a retry: what `on_crash` says. A process that lacks the tool
   leaves the task to others, until its time is over.
4. A question inside a task ends a leg: the record is WAITING, and `tasks/get` shows the question. The process that gets the
   last answer (`tasks/update`) runs the next leg: the function starts from the top, with all the answers.
5. `tasks/cancel` is a wish. A task that has done nothing ends; one past its commit point finishes. A process that runs the
   task for another one hears of the wish when it renews the lease, other workers of the host at once.
6. A task that has ended does not change. Its answer is its record's, unless the record cannot give one: then `final` keeps
   what was first told.
7. The id is not a secret shared with others: a task of another caller is answered like an unknown one.
"""

import asyncio
import os
import random
import re
import time
from base64 import urlsafe_b64encode
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct

from wirecall.commands.run import LostLease, Run, answer, recorded, unavailable
from wirecall.errors import (
    Busy,
    DeadlineExceeded,
    InternalError,
    InvalidParams,
    KeyInProgress,
    LedgerUnavailable,
    OutcomeUnknown,
    RpcError,
    UsageError,
)
from wirecall.ledger.base import Claim, Ledger, LedgerDown, Record, State, Task
from wirecall.logs import logger
from wirecall.mcp.revisions import REVISIONS
from wirecall.mcp.server.calls import Calls, as_result
from wirecall.mcp.server.catalog import Catalog
from wirecall.mcp.server.changes import Hub, Listener
from wirecall.mcp.server.messages import error_object
from wirecall.mcp.server.peer import Peer, Question, Questions, Session, check_answer
from wirecall.mcp.server.streams import Nowhere
from wirecall.mcp.types import REPLAYED_META, CallTool
from wirecall.protocol.messages import JsonObject, Limits, encode
from wirecall.server.call import InputRequired, Running, Shape
from wirecall.server.identity import Identity, Permit
from wirecall.server.method import Method

if TYPE_CHECKING:
    from wirecall.server.dispatch import Dispatcher

T = TypeVar("T")

# How often a client should ask: after a tenth of the task's age, within these bounds.
FIRST_POLL_MS = 1_000
LAST_POLL_MS = 10_000

NOTE_EVERY = 1.0  # seconds between two writes of a status message
LOOK_EVERY = 1.0  # seconds between two looks at all the tasks of a caller


class Document(Struct, omit_defaults=True):
    """What the server keeps of a task, besides its record."""

    tool: str
    arguments: Raw
    revision: str
    capabilities: JsonObject
    ttl_ms: int
    lasts: float  # seconds that the task may run or wait; `ttl_ms` counts the time that its answer is kept as well
    created: float  # by the clock on the wall: people read it
    updated: float
    client: dict[str, str] | None = None
    identity: Identity | None = None  # of the caller, without the claims of its token
    message: str | None = None
    is_cancelled: bool = False
    asked: dict[str, str] = {}  # digests of all questions, by key
    answers: dict[str, JsonObject] = {}
    leg: int = 0  # how often the task has asked
    is_ready: bool = False  # all questions of this leg are answered
    final: JsonObject | None = None  # how the task ended, where its record does not tell


_OVER = ("completed", "failed", "cancelled")
_ID = re.compile(r"[A-Za-z0-9_-]{43}")  # 32 bytes in base64
_decode = msgspec.json.Decoder(Document).decode
_decode_questions = msgspec.json.Decoder(dict[str, Any]).decode


class Work:
    """A call that is a task, or may become one, in the process that runs it (`server.call.Detachable`)."""

    def __init__(self, tasks: "Tasks", method: Method, id: str, document: Document, *, is_adopted: bool) -> None:
        self.id = id
        self.method = method
        self.at_once = is_adopted or not (method.hands_over or isinstance(method.task, float))
        self.is_handed_over = is_adopted
        self.handed_over = asyncio.get_running_loop().create_future()
        self.document = document
        self.peer: TaskPeer | None = None
        self.run: Run | None = None
        self._tasks = tasks
        self._lock = asyncio.Lock()
        self._is_asking = False  # within the request, which ends with the question
        self._noted = 0.0
        self._is_noting = False
        self._questions: JsonObject = {}  # with which this leg ends

    async def found(self, record: Record) -> None:
        if self.is_handed_over:
            return
        known = await (await self._tasks.ledger()).task_of(record.id)
        if known is not None:
            raise InputRequired(created(known.id, _decode(known.document), {REPLAYED_META: True}))

    async def begin(self, run: Running) -> bool:
        assert isinstance(run, Run)
        self.run = run
        if self.is_handed_over:
            # Another process may have ended the task, and given its record back, before this one claimed it: then the claim
            # made a new record, for a task that is over.
            known = await (await self._tasks.ledger()).task(self.id)
            if known is None or known.is_over:
                raise LostLease(f"task {self.id} has ended")
            if self.peer is not None:
                # Or that one has gone on with it, and the client has answered more since.
                self.document = _decode(known.document)
                self.peer.answers = self.document.answers
            return True
        if not self.at_once:
            return True
        has_place = self._tasks.has_place
        known = await (await self._tasks.ledger()).task_of(run.claim.id) if run.attempt > 1 else None
        if known is not None and not known.is_over and self.peer is not None:
            # The call has taken over the record of a task whose process has died: it goes on with that task.
            self.id, self.document = known.id, _decode(known.document)
            self.peer.answers = self.document.answers
            self._go_on()
            return has_place
        if not await self.hand_over():
            raise LostLease(f"{run.claim.id}: another run has taken the record over")
        return has_place

    async def hand_over(self) -> bool:
        """Make the call a task; False if it has ended meanwhile. From here on it goes on without its request."""
        async with self._lock:  # the timer and the handler may come at once
            if self.is_handed_over:
                return True
            run, document = self.run, self.document
            if run is None or self.peer is None or self._is_asking or run.is_over:
                return False
            # Answers that the client gave before, in the rounds of its request, go on with the task.
            document.answers = self.peer.answers
            commands, ttl, is_begun = self._tasks.dispatcher().commands, document.ttl_ms / 1000, False
            await self._tasks.take_place(self.peer.caller, self.id)
            try:
                if is_begun := await commands.hand_over(run, self.id, encode(document), ttl):
                    self._go_on()
            finally:
                if not is_begun:
                    self._tasks.leave_place(self.peer.caller, self.id)
            return is_begun

    def _go_on(self) -> None:
        """Go on without the request."""
        self.is_handed_over = True
        self._tasks.works[self.id] = self
        self.handed_over.set_result(None)

    async def settle(self) -> None:
        async with self._lock:
            return

    async def end(self, error: BaseException | None) -> None:
        failed = error if isinstance(error, RpcError) else InternalError(ran="no")

        def edit(document: Document) -> bool:
            is_new, ending = document.final is None, self._tasks.ending(failed, document)
            document.final = document.final or ({"status": "cancelled"} if document.is_cancelled else ending)
            return is_new

        await self._tasks.change(self.id, edit)

    async def look(self) -> None:
        found = await (await self._tasks.ledger()).task(self.id)
        # A run before this one may have acted, if its process died past the commit point: then the task finishes.
        is_begun = found is not None and found.now is not None and found.now.committed
        if found is not None and not is_begun and _decode(found.document).is_cancelled:
            self._tasks.dispatcher().commands.cancel(found.record)

    def note(self, message: str) -> None:
        """Set the status message, at most once a second: the last one is written when its time has come."""
        # A task that has ended does not change, and its handler may have left a part of itself behind. While a handler has a
        # transaction, nothing else is written: an SQLite file has one writer.
        if self.run is not None and self.run.is_over:
            return
        self.document.message = message[:1000].encode(errors="replace").decode()  # a path may have halves of characters
        if self._is_noting or (self.run is not None and self.run.db is not None):
            return
        loop = asyncio.get_running_loop()
        wait = self._noted + NOTE_EVERY - loop.time()

        async def write() -> None:
            self._is_noting, self._noted = False, loop.time()

            def edit(document: Document) -> bool:
                document.message = self.document.message
                return True

            try:
                if self.id in self._tasks.works and not (self.run is not None and self.run.is_over):
                    await self._tasks.change(self.id, edit)
            except LedgerDown as error:
                logger.warning("the status of task %s was not written: %s", self.id, error)

        self._is_noting = True
        # The handler does not wait for it.
        loop.call_later(max(0.0, wait), lambda: self._tasks.dispatcher().commands.start(write()))

    async def interim(self, questions: JsonObject) -> bytes | None:
        """Return the questions with which this leg ends, as the record keeps them; None if the request asks them."""
        async with self._lock:  # in the moment in which the call becomes a task, its question waits to see which it is
            if not self.is_handed_over:
                self._is_asking = True
                return None
            self._questions = questions
            return encode({"leg": f"{self.id}.{self.document.leg + 1}", "inputRequests": questions})

    async def pause(self) -> None:
        leg, digests = self.document.leg + 1, {key: _digest(question) for key, question in self._questions.items()}

        def edit(document: Document) -> bool:
            if document.leg > leg:  # written again, because a reply was lost, and the task has gone on
                return False
            document.asked.update(digests)
            # The client may have answered already, where this is written again or another server has asked the same.
            document.leg, document.is_ready = leg, digests.keys() <= document.answers.keys()
            return True

        await self._tasks.change(self.id, edit)


class TaskPeer(Peer):
    """The client of a call that can become a task: after that it hears of the task, and not of the call."""

    work: Work | None = None

    @property
    def _task(self) -> Work | None:
        return self.work if self.work is not None and self.work.is_handed_over else None

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        if self._task is None:
            await super().progress(progress, total, message)
        else:
            self._task.note(message or (f"{progress:g}" if total is None else f"{progress:g} of {total:g}"))

    async def log(self, level: str, data: object, logger: str | None) -> None:
        if self._task is None:
            await super().log(level, data, logger)
        elif level != "debug":
            self._task.note(data if isinstance(data, str) else encode(data).decode())

    async def hand_over(self) -> None:
        if self.work is not None and not await self.work.hand_over():
            raise LostLease("the call has ended, or another run has taken its record over")

    async def ask(self, questions: Sequence[Question]) -> list[Any]:
        if self._task is not None:
            # A key stands for one question for the life of a task (SEP-2663, "Input Requests").
            for question in questions:
                digest = _digest({"method": question.method, "params": question.params})
                if self._task.document.asked.get(question.key, digest) != digest:
                    raise UsageError(
                        f"The question {question.key!r} of {self._task.method.name} is another one than before.",
                        "a task asks one question under one key, and starts from the top with the answer",
                        "ask the same in the same order, or name the questions: ctx.elicit(..., key=...)",
                    )
        return await super().ask(questions)

    async def pause(self, questions: JsonObject) -> bytes:
        interim = None if self.work is None else await self.work.interim(questions)
        return await super().pause(questions) if interim is None else interim


class Tasks:
    """The tasks of a server."""

    def __init__(
        self,
        catalog: Catalog,
        calls: Calls,
        questions: Questions,
        hub: Hub,
        limits: Limits,
        dispatcher: "Callable[[], Dispatcher]",
        ledger: Callable[[], Coroutine[Any, Any, Ledger]],
    ) -> None:
        self.works: dict[str, Work] = {}  # tasks that run in this process
        self.dispatcher = dispatcher
        self.ledger = ledger
        self.permit: Permit | None = None  # asks for the scopes of a caller
        self._catalog = catalog
        self._calls = calls
        self._questions = questions
        self._hub = hub
        self._limits = limits
        self._open: dict[
            str, set[str]
        ] = {}  # by caller: tasks that ran here, and have not ended as far as this process knows
        self._looked: dict[str, float] = {}  # when the ledger was last asked for those of a caller
        self._left: set[str] = set()  # tasks that are left to servers that have their tools
        self._lacking: set[str] = set()  # those tools
        self._adopting: asyncio.TimerHandle | None = None
        self._is_closed = False
        hub.on_task = self._heard

    @property
    def is_needed(self) -> bool:
        """Whether the server has tools that can become tasks."""
        return any(method.task is not None for method in self._catalog.tools.values())

    @property
    def has_place(self) -> bool:
        return len(self.works) < self._limits.tasks

    async def take_place(self, caller: str, id: str) -> None:
        """Count a task of a caller. Raises `Busy` if the caller has too many that have not ended."""
        most, now = self._limits.tasks_per_caller, asyncio.get_running_loop().time()
        if len(self._open.get(caller, ())) >= most and self._looked.get(caller, 0.0) <= now - LOOK_EVERY:
            self._looked[caller] = now
            for each in [*self._open[caller]]:  # other processes may have ended some
                if (found := await (await self.ledger()).task(each)) is None or summary(found)["status"] in _OVER:
                    self.leave_place(caller, each)
        if (count := len(self._open.get(caller, ()))) >= most:
            reason = f"{count} tasks of this caller have not ended: wait for one of them, answer it or cancel it"
            raise Busy(reason, ran="no", limit="tasks_per_caller", max=most, retry_after_ms=FIRST_POLL_MS)
        self._open.setdefault(caller, set()).add(id)

    def leave_place(self, caller: str, id: str) -> None:
        """Count a task no more."""
        if (ids := self._open.get(caller)) is not None:
            ids.discard(id)
            if not ids:
                del self._open[caller]
                self._looked.pop(caller, None)

    # --- a call that becomes a task ----------------------------------------------------------------------------------

    async def call(
        self, peer: Peer, method: Method, arguments: Raw, shape: Shape, key: str | None, identity: bytes | None
    ) -> tuple[bytes, JsonObject]:
        """Return the result of a call with its marks, or a task that stands for it (`resultType: "task"`)."""
        self.watch()
        loop, now = asyncio.get_running_loop(), time.time()
        id = urlsafe_b64encode(os.urandom(32)).decode().rstrip("=")
        # Every task has a record. A further round of a call has the key of the first one, in its state.
        if key is None and peer.params.state is UNSET and (not method.is_command or method.key == "off"):
            key = id
        document = Document(
            tool=method.name,
            arguments=Raw(bytes(arguments)),  # a copy: the other one keeps the whole message
            revision=peer.session.revision.name,
            capabilities=peer.session.capabilities,
            ttl_ms=int((method.task_ttl + method.terms.retention) * 1000),
            lasts=method.task_ttl,
            created=now,
            updated=now,
            client=peer.session.client,
            identity=None if peer.identity is None else msgspec.structs.replace(peer.identity, claims={}),
        )
        work = Work(self, method, id, document, is_adopted=False)
        work.peer = mine = TaskPeer(
            *(peer.session, peer.outlet, peer.questions, peer.id, peer.raw, peer.params),
            *(peer.caller, peer.key, peer.position, peer.identity),
            work=work,
        )
        name = f"tools/call:{method.name}"
        running = self._calls.run(mine, method, arguments, shape, record=name, key=key, identity=identity, task=work)
        run, handing = loop.create_task(running), None
        try:
            patience = method.task if isinstance(method.task, float) else None
            await asyncio.wait({run, work.handed_over}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not run.done() and not work.is_handed_over:
                handing = loop.create_task(work.hand_over())
                await asyncio.wait({handing})
                if not work.is_handed_over:  # it ended in that moment, waits for another run, or the ledger is down
                    await asyncio.wait({run})
        except asyncio.CancelledError:
            if handing is not None:
                await asyncio.wait({handing})
            if not work.is_handed_over:
                run.cancel()
                await asyncio.wait({run})
            raise
        finally:
            if handing is not None and handing.done() and not handing.cancelled() and handing.exception() is not None:
                logger.warning("task %s was not handed over: %s", id, handing.exception())
            if work.is_handed_over:
                self.dispatcher().commands.start(self._follow(work, run))
        return (created(work.id, work.document) if work.is_handed_over else run.result()), mine.marks

    async def _follow(self, work: Work, run: "asyncio.Task[bytes]") -> None:
        """Wait for the end of a leg."""
        assert work.peer is not None
        with self.dispatcher().set_aside(work.peer.caller):
            await asyncio.wait({run})
        if self.works.get(work.id) is work:  # else a retry has taken the task over
            del self.works[work.id]
        error = None if run.cancelled() else run.exception()
        # A leg that was refused before it had its record, because its arguments do not fit any more, or its caller may not
        # call the tool, is refused for good. A server that is busy, or stops, is not such a reason, nor is one that works on
        # the task already.
        passing = (Busy, KeyInProgress, LedgerUnavailable)
        refusal = error if isinstance(error, RpcError) and not isinstance(error, passing) else None
        try:
            found = await (await self.ledger()).task(work.id)
            if work.run is None and refusal is not None and found is not None and not found.is_over:
                # If a run before it may have acted, the refusal must not pass for a result that says that nothing was done.
                is_begun = found.now is not None and found.now.committed and found.now.state is State.RUNNING
                unsure = _failed(refusal.telling("unknown"))
                await self._end(found, unsure if is_begun else self.ending(refusal, _decode(found.document)))
            elif found is None or summary(found)["status"] in _OVER:
                self.leave_place(work.peer.caller, work.id)
            elif work.run is not None and found.is_ready and found.now is not None and found.now.state is State.WAITING:
                # It was cancelled before it asked, or answered before this process heard that it waits.
                self.dispatcher().commands.start(self.resume(work.id))
        except LedgerDown as down:
            logger.warning("the end of task %s was not written or read: %s", work.id, down)
        self._hub.tell("task", work.id)

    def ending(self, error: RpcError, document: Document) -> JsonObject:
        """Return the end of a task whose call has failed: an error that its model reads is a result."""
        method = self._catalog.tools.get(document.tool)
        try:
            if method is None:
                raise error
            return {"status": "completed", "result": Raw(as_result(error, method, REVISIONS[document.revision]))}
        except RpcError as raised:
            return _failed(raised)

    # --- tasks that no process works on ------------------------------------------------------------------------------

    def open(self) -> None:
        """Look for tasks to adopt, now and from now on."""
        self._is_closed = False
        self.watch()
        self.dispatcher().commands.start(self.adopt())

    def watch(self) -> None:
        """Look for tasks to adopt every half lease."""
        if self._adopting is None and not self._is_closed:
            leases = (method.terms.lease for method in self._catalog.tools.values() if method.task is not None)
            delay = min(leases, default=30) / 2 * random.uniform(0.5, 1.0)
            self._adopting = asyncio.get_running_loop().call_later(delay, self._adopt_soon)

    def _adopt_soon(self) -> None:
        self._adopting = None
        self.open()

    async def adopt(self) -> None:
        """Run tasks whose process has died, or that wait for a place."""
        room = self._limits.tasks - len(self.works)
        if room <= 0:
            return
        try:
            # Those that are left to others must not hide those that this server can run.
            found = await (await self.ledger()).orphans(room + len(self._left))
            self._left &= set(found)
            for id in found:
                self.dispatcher().commands.start(self.resume(id))
        except (LedgerDown, UsageError) as error:
            logger.warning("the ledger was not asked for tasks: %s", error)

    def close(self) -> None:
        """Adopt nothing more."""
        self._is_closed = True
        if self._adopting is not None:
            self._adopting.cancel()
            self._adopting = None

    async def resume(self, id: str) -> None:
        """Run a leg of a task that no process works on, if there is a place for it."""
        try:
            found = await (await self.ledger()).task(id)
            if found is None or found.is_over or id in self.works or not self.has_place:
                return
            document = _decode(found.document)
            record, method = found.now, self._catalog.tools.get(document.tool)
            if record is None or (record.state is State.WAITING and not found.is_ready):
                return
            is_begun = record.committed and record.state is State.RUNNING
            if document.is_cancelled and not is_begun:
                await self._end(found, {"status": "cancelled"})
                return
            if method is None:
                # While servers are replaced one after another, some have a tool and others have not yet, or not any more.
                if not _is_late(found, document):
                    if document.tool not in self._lacking:
                        self._lacking.add(document.tool)
                        logger.warning("tasks of %r wait for a server that has this tool: this one has not", document.tool)
                    self._left.add(id)
                    return
                reason = f"there is no tool {document.tool!r} any more"
                await self._end(found, _failed(InvalidParams(reason, ran="unknown" if is_begun else "no")))
                return
        except LedgerDown as error:
            logger.warning("task %s was not adopted: %s", id, error)
            return
        self.works[id] = work = Work(self, method, id, document, is_adopted=True)
        self._open.setdefault(found.record.caller, set()).add(id)
        session = Session(REVISIONS[document.revision], document.capabilities, client=document.client)
        work.peer = peer = TaskPeer(
            *(session, Nowhere(), self._questions, id, document.arguments),
            *(CallTool(name=document.tool, arguments=document.arguments), found.record.caller, None, None),
            identity=document.identity,
            answers=document.answers,
            work=work,
        )
        if record.state is State.WAITING:
            peer.continues = f"{id}.{document.leg}"
        shape, name, key = self._calls.shape(method), found.record.method, found.record.key
        running = self._calls.run(peer, method, document.arguments, shape, record=name, key=key, task=work)
        await self._follow(work, asyncio.get_running_loop().create_task(running))

    async def _end(self, task: Task, final: JsonObject) -> None:
        """End a task that no process works on, and give its record back unless its effect may have happened."""

        def edit(document: Document) -> bool:
            document.final = document.final or final
            return True

        record, ledger = task.now, await self.ledger()
        if record is None:
            await self.change(task.id, edit)
            return
        # The record first: a process that has claimed it meanwhile goes on, and the task ends as that one says.
        claim = Claim(
            id=record.id,
            fingerprint=record.fingerprint,
            nonce=os.urandom(16),
            lease=30,
            retention=86_400,
            on_crash="rerun",
            committed=False,
            continues=True,
        )
        taken = await ledger.claim(claim)
        if taken.state is State.RUNNING and taken.nonce == claim.nonce:
            await self.change(task.id, edit)
            await (ledger.abandon(taken.token) if taken.committed else ledger.release(taken.token))
            self.leave_place(record.id.caller, task.id)

    async def change(self, id: str, edit: Callable[[Document], bool]) -> None:
        """Change the document of a task, and tell its listeners. `edit` returns False if nothing is to be written."""
        ledger = await self.ledger()
        while (found := await ledger.task(id)) is not None:
            document = _decode(found.document)
            if not edit(document):
                return
            document.updated = max(time.time(), document.updated)
            # A cancelled task needs no answers to go on, which is to end. Its handler may ask before it hears of the wish.
            is_ready = document.is_ready or document.is_cancelled
            written = msgspec.structs.replace(
                found, document=encode(document), is_ready=is_ready, is_over=document.final is not None
            )
            if await ledger.change_task(written):
                self._hub.tell("task", id)
                return

    # --- what clients ask for ----------------------------------------------------------------------------------------

    async def get(self, peer: Peer) -> object:
        """Answer `tasks/get`."""
        return await self._told(await self._own(peer, peer.params.task_id))

    async def update(self, peer: Peer) -> object:
        """Answer `tasks/update`: take answers to the questions of a task."""
        found = await self._own(peer, peer.params.task_id)
        # Step 1: an answer must fit its question. Answers that were not asked for, or are there already, are ignored
        # (SEP-2663, "tasks/update").
        questions = _open_questions(found)
        given = {key: told for key, told in peer.params.responses.items() if key in questions}
        for key, told in given.items():
            check_answer(questions[key], told)

        # Step 2: the next `tasks/get` shows them. The last one makes the next leg ready.
        def edit(document: Document) -> bool:
            fresh = {key: told for key, told in given.items() if key not in document.answers}
            document.answers.update(fresh)
            document.is_ready = all(key in document.answers for key in questions)
            return bool(fresh) and document.final is None

        if given:
            await self._within(self.change(found.id, edit))
            self.dispatcher().commands.start(self.resume(found.id))
        return b"{}"

    async def cancel(self, peer: Peer) -> object:
        """Answer `tasks/cancel`: the task ends if it has done nothing yet."""
        found = await self._own(peer, peer.params.task_id)

        def edit(document: Document) -> bool:
            record = found.now
            is_over = document.final is not None or record is None or record.state not in (State.RUNNING, State.WAITING)
            is_new = not document.is_cancelled and not is_over
            document.is_cancelled = True
            if is_new and record is not None and record.committed and record.state is State.RUNNING:
                document.message = "cancelled after its commit point: it finishes"
            return is_new

        await self._within(self.change(found.id, edit))  # the hub tells every worker, this one included
        if found.id not in self.works:
            self.dispatcher().commands.start(self._cancel_orphan(found.id))
        return b"{}"

    async def _cancel_orphan(self, id: str) -> None:
        """End a cancelled task at once if no process works on it: it waits for an answer, or for a place."""
        try:
            found = await (await self.ledger()).task(id)
            record = None if found is None else found.now
            if found is None or record is None or found.is_over:
                return
            if record.state is State.WAITING or (record.lease_left == 0 and not record.committed):
                await self._end(found, {"status": "cancelled"})
        except LedgerDown as error:
            logger.warning("task %s was not cancelled yet: %s", id, error)

    def _heard(self, id: str) -> None:
        """Look whether a task of this process was cancelled: another worker, or this one, has changed it."""
        if (work := self.works.get(id)) is not None and work.run is not None and work.run.stops:
            self.dispatcher().commands.start(self._look(work))

    async def _look(self, work: Work) -> None:
        try:
            await work.look()
        except LedgerDown as error:
            logger.warning("task %s was not looked at: %s", work.id, error)

    async def listen(
        self, ids: frozenset[str], caller: str, send: Callable[[JsonObject], Coroutine[Any, Any, None]]
    ) -> None:
        """Send every change of some tasks, beginning with their present states; ends when the coroutine is cancelled."""
        changed = set(ids)

        def wants(kind: str, uri: str | None) -> bool:
            if kind != "task" or uri not in ids:
                return False
            changed.add(uri)
            return True

        told: dict[str, bytes] = {}
        listener = Listener(wants)
        self._hub.add(listener)
        try:
            while True:
                pause = LAST_POLL_MS
                for id in changed.copy():
                    changed.discard(id)
                    try:
                        state = await self._told(await self._find(caller, id))
                    except RpcError:  # it is forgotten, or the ledger is down: the client asks for itself
                        continue
                    pause = min(pause, state["pollIntervalMs"])
                    if told.get(id) != (now := encode(state)):
                        told[id] = now
                        await send(state)
                try:
                    # Not `wait_for`: until Python 3.12 it drops a cancel that comes in the turn of a change.
                    async with asyncio.timeout(pause / 1000):
                        await listener.next()
                except TimeoutError:
                    changed.update(ids)  # tasks of other hosts change without a word
        finally:
            self._hub.remove(listener)

    async def known(self, ids: Sequence[str], peer: Peer) -> list[str]:
        """Return those ids that are tasks of a request's caller."""
        found = []
        for id in dict.fromkeys(ids):
            try:
                await self._own(peer, id)
                found.append(id)
            except InvalidParams:
                continue
        return found

    async def _own(self, peer: Peer, id: str) -> Task:
        """Return a task of a request's caller. It asks for the scopes of the task's call: its result needs them, too."""
        found = await self._find(peer.caller, id)
        if peer.identity is not None and self.permit is not None:
            document = _decode(found.document)
            method = self._catalog.tools.get(document.tool)
            scopes = None if method is None else method.scopes
            self.permit(peer.identity, () if scopes is None else scopes.of(document.arguments))
        return found

    async def _find(self, caller: str, id: str) -> Task:
        """Return a task of a caller. A task of another one is unknown: its id must not tell that it exists."""
        if not _ID.fullmatch(id):
            raise InvalidParams("taskId: there is no such task, or it is no longer kept")
        found = await self._within((await self._within(self.ledger())).task(id))
        if found is None or found.record.caller != caller or (found.now is not None and found.now.state is State.TOMBSTONE):
            raise InvalidParams("taskId: there is no such task, or it is no longer kept")
        return found

    async def _within(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except LedgerDown as error:
            raise unavailable(error) from error

    async def _told(self, task: Task) -> JsonObject:
        """Return a task as its client sees it, with its result, error or questions."""
        document = _decode(task.document)
        record = task.now
        told = _members(task.id, document)
        if document.final is None and record is not None and record.state is State.WAITING:
            if _is_late(task, document):
                late = DeadlineExceeded("the task was not answered in time", ran="no")
                await self._within(self._end(task, _failed(late)))
                return await self._told(await self._find(task.record.caller, task.id))
            if questions := _open_questions(task):
                return {**told, "status": "input_required", "inputRequests": questions}
        if document.final is not None:
            return {**told, **document.final}
        if record is None:  # an operator has settled an unknown outcome before the task was asked for
            return {**told, **_failed(OutcomeUnknown("the record of the task is gone", ran="unknown"))}
        if record.state in (State.RUNNING, State.WAITING):
            return told
        try:
            return {**told, "status": "completed", "result": answer(recorded(record), replayed=False)}
        except RpcError as raised:
            error = raised
        if record.state is State.UNKNOWN:
            # Frozen when it is first told: a late truth settles the record, and a task that has ended does not change.
            final = _failed(error)

            def edit(document: Document) -> bool:
                is_new, document.final = document.final is None, document.final or final
                return is_new

            now = (await self._find(task.record.caller, task.id)).now
            if now is not None and now.state is State.UNKNOWN:  # else the truth came in this moment
                await self._within(self.change(task.id, edit))
            return await self._told(await self._find(task.record.caller, task.id))
        return {**told, **self.ending(error, document)}


def created(id: str, document: Document, meta: JsonObject | None = None) -> bytes:
    """Return the answer to a call that has become a task."""
    told = {"resultType": "task", **_members(id, document)}
    return encode({**told, "_meta": meta} if meta else told)


def summary(task: Task) -> JsonObject:
    """Return a task in short, for an operator, without its questions and its answer."""
    document, record = _decode(task.document), task.now
    status = "working"
    if document.final is not None:
        status = document.final["status"]
    elif record is None:
        status = "failed"
    elif _open_questions(task):
        status = "input_required"
    elif record.state not in (State.RUNNING, State.WAITING):
        try:
            answer(recorded(record), replayed=False)
            status = "completed"
        except RpcError as error:  # one that a model reads is a result
            status = "completed" if REVISIONS[document.revision].reports_in_result(error, asks_key=False) else "failed"
    told: JsonObject = {"id": task.id, "status": status, "message": document.message}
    return {**told, "created": _iso(document.created), "updated": _iso(document.updated)}


def _members(id: str, document: Document) -> JsonObject:
    """Return the members that every form of a task has; it works unless the caller says otherwise."""
    age_ms = (time.time() - document.created) * 1000
    told: JsonObject = {
        "taskId": id,
        "status": "working",
        "createdAt": _iso(document.created),
        "lastUpdatedAt": _iso(document.updated),
        "ttlMs": document.ttl_ms,
        "pollIntervalMs": int(min(max(age_ms / 10, FIRST_POLL_MS), LAST_POLL_MS)) // 1000 * 1000,
    }
    if document.message is not None:
        told["statusMessage"] = document.message
    return told


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _digest(question: JsonObject) -> str:
    return sha256(encode([question["method"], question["params"]])).hexdigest()[:16]


def _failed(error: RpcError) -> JsonObject:
    told = error_object(error)
    return {"status": "failed", "statusMessage": told.message, "error": told}


def _is_late(task: Task, document: Document) -> bool:
    """Return whether the time in which a task may run or wait is over; the rest of its ttl is that of its answer."""
    return task.ttl_left <= document.ttl_ms / 1000 - document.lasts


def _open_questions(task: Task) -> JsonObject:
    """Return the questions of a task that are not answered yet, by key."""
    document = _decode(task.document)
    record = task.now
    if document.final is not None or record is None or record.state is not State.WAITING or record.outcome is None:
        return {}
    questions = _decode_questions(record.outcome.payload or b"{}").get("inputRequests", {})
    return {key: question for key, question in questions.items() if key not in document.answers}
