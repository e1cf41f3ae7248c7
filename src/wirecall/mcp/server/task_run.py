"""A call that becomes a task: the run behind it, its adoption by another server, and its legs.

1. A call becomes a task when it is handed over: before its handler starts (`task=True`), after some
   seconds (`task=2.0`), or where the handler says so (`ctx.hand_over()`). The row is written first,
   so `tasks/get` finds every task whose id a client has, in any process. A call that finds the
   record of a task gets that task: one key, one task.
2. The process that takes the call runs it. If that process dies or stops, another adopts the task
   when the lease of its record expires. `ledger.base.decide` treats that like a retry, as
   `on_crash` says. A process that lacks the tool leaves the task to others until the task expires.
3. A question inside a task ends a leg: the record is WAITING, and `tasks/get` shows the question.
   The process that gets the last answer (`tasks/update`) runs the next leg: the function starts
   from the top, with all the answers.
4. A task ends before its record is released: otherwise another process could see a task without a
   record and without an end.

A run and its task call each other. `commands` leads the run and calls `TaskRun` at six points
(`server.call.Detachable`); in between, `TaskRun` and `TaskRunner` call `commands`:

    commands calls    when                                     the task
    found             the ledger has the record already        is the answer, if the record is a task's
    begin             before the handler starts                is written, if it begins at once
    pause             a question has ended the leg             keeps what was asked; then the record waits
    settle            the handler has failed                   finishes a handover that is being written
    end               before the record is released            keeps how it ended
    look              the lease is renewed                     checks whether its client has cancelled it

    commands.hand_over    the timer or the handler hands the call over: the row is written
    commands.cancel       the client has cancelled the task, and nothing was done yet
    commands.start        work outlives its request: following a leg, resuming, writing a message
"""

import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Raw

from wirecall.commands.run import LostLease, Run
from wirecall.errors import (
    Busy,
    InternalError,
    InvalidParams,
    KeyInProgress,
    LedgerUnavailable,
    RpcError,
    UsageError,
)
from wirecall.ledger.base import Claim, Ledger, LedgerDown, Record, State, Task
from wirecall.limits import Limits
from wirecall.logs import logger, outside
from wirecall.mcp.revisions import REVISIONS
from wirecall.mcp.server.calls import Calls, batch_identity
from wirecall.mcp.server.catalog import Catalog
from wirecall.mcp.server.changes import Hub
from wirecall.mcp.server.peer import Peer, Question, Questions, Session
from wirecall.mcp.server.streams import NoOutlet
from wirecall.mcp.server.task_state import (
    CANCELLED,
    FIRST_POLL_MS,
    Document,
    created,
    digest_of,
    ending,
    failed,
    has_acted,
    is_late,
    is_over,
    new_id,
    read_document,
)
from wirecall.mcp.types import REPLAYED_META, CallTool
from wirecall.protocol.messages import JsonObject, encode
from wirecall.protocol.receipt import Receipt
from wirecall.protocol.sender import Sender
from wirecall.server.call import InputRequired, Running, Shape
from wirecall.server.method import Method

if TYPE_CHECKING:
    from wirecall.server.dispatch import Dispatcher

# Seconds between two writes of a status message.
NOTE_EVERY = 1.0
# Seconds between two looks at all the tasks of a caller.
LOOK_EVERY = 1.0

# Refusals of a leg that may succeed later, or on another server.
_PASSING = (Busy, KeyInProgress, LedgerUnavailable)


class TaskRun:
    """A call that is a task, or may become one, in the process that runs it.

    It implements `server.call.Detachable`.
    """

    def __init__(
        self, runner: "TaskRunner", method: Method, id: str, document: Document, *, is_adopted: bool
    ) -> None:
        self.id = id
        self.method = method
        self.at_once = is_adopted or not (method.hands_over or isinstance(method.task, float))
        self.is_handed_over = is_adopted
        self.handed_over = asyncio.get_running_loop().create_future()
        self.document = document
        self.peer: TaskPeer | None = None
        # The run of the command, once it has its record.
        self.run: Run | None = None
        self._runner = runner
        # Held while the ledger writes the task.
        self._lock = asyncio.Lock()
        # The call asks within its request, which ends with the question.
        self._is_asking = False
        # When the status message was last written, and whether a write of it is planned.
        self._noted = 0.0
        self._is_noting = False
        # The questions that end this leg.
        self._questions: JsonObject = {}

    # --- called by commands -----------------------------------------------------------------------

    async def found(self, record: Record) -> None:
        if self.is_handed_over:
            return
        known = await (await self._runner.ledger()).task_of(record.id)
        if known is not None:
            marks: JsonObject = {REPLAYED_META: True}
            raise InputRequired(created(known.id, read_document(known.document), marks))

    async def begin(self, run: Running) -> bool:
        assert isinstance(run, Run)
        self.run = run
        if self.is_handed_over:
            await self._refresh()
            return True
        if not self.at_once:
            return True
        has_place = self._runner.has_place
        if run.attempt > 1 and await self._take_over(run):
            return has_place
        if not await self.hand_over():
            raise LostLease(f"{run.claim.id}: another run has taken the record over")
        return has_place

    async def pause(self) -> None:
        leg = self.document.leg + 1
        digests = {key: digest_of(question) for key, question in self._questions.items()}

        def edit(document: Document) -> bool:
            # Written again because a reply was lost, and the task has continued.
            if document.leg > leg:
                return False
            document.asked.update(digests)
            # The client may have answered already, if this is a second write or another server has
            # asked.
            document.leg = leg
            document.is_ready = digests.keys() <= document.answers.keys()
            return True

        await self._runner.change(self.id, edit)

    async def settle(self) -> None:
        async with self._lock:
            return

    async def end(self, error: BaseException | None) -> None:
        failure = error if isinstance(error, RpcError) else InternalError(ran="no")

        def edit(document: Document) -> bool:
            if document.final is not None:
                return False
            if document.is_cancelled:
                document.final = CANCELLED
            else:
                document.final = self.ending(failure, document)
            return True

        await self._runner.change(self.id, edit)

    async def look(self) -> None:
        found = await (await self._runner.ledger()).task(self.id)
        if found is None:
            return
        # An earlier run may have acted, if its process died past the commit point: then the task
        # finishes.
        is_committed = found.now is not None and found.now.committed
        if not is_committed and read_document(found.document).is_cancelled:
            self._runner.dispatcher().commands.cancel(found.record)

    # --- the handover -----------------------------------------------------------------------------

    async def hand_over(self) -> bool:
        """Make the call a task, which continues without its request.

        Returns False if the call has already ended.
        """
        # The timer and the handler may both hand over.
        async with self._lock:
            if self.is_handed_over:
                return True
            run = self.run
            document = self.document
            if run is None or self.peer is None or self._is_asking or run.is_over:
                return False
            # The task keeps the answers that the client gave before, in the rounds of its request.
            document.answers = self.peer.answers
            commands = self._runner.dispatcher().commands
            ttl = document.ttl_ms / 1000
            is_begun = False
            await self._runner.take_place(self.peer.caller, self.id)
            try:
                is_begun = await commands.hand_over(run, self.id, encode(document), ttl)
                if is_begun:
                    self._detach()
            finally:
                if not is_begun:
                    self._runner.leave_place(self.peer.caller, self.id)
            return is_begun

    async def _take_over(self, run: Run) -> bool:
        """Continue the task whose record the call has taken over, since its process has died.

        Returns False if the record is not a task's, or its task is over.
        """
        known = await (await self._runner.ledger()).task_of(run.claim.id)
        if known is None or known.is_over or self.peer is None:
            return False
        self.id = known.id
        self._continue_from(known, self.peer)
        self._detach()
        return True

    async def _refresh(self) -> None:
        """Read the document of an adopted task again, now that this process has its record.

        Raises `LostLease` if another process has ended the task and released its record before this
        one claimed it: then the claim made a new record, for a task that is over.
        """
        known = await (await self._runner.ledger()).task(self.id)
        if known is None or known.is_over:
            raise LostLease(f"task {self.id} has ended")
        # Or the other process has continued the task, and the client has answered more since.
        if self.peer is not None:
            self._continue_from(known, self.peer)

    def _continue_from(self, known: Task, peer: "TaskPeer") -> None:
        self.document = read_document(known.document)
        peer.answers = self.document.answers

    def _detach(self) -> None:
        """Continue without the request."""
        self.is_handed_over = True
        self._runner.runs[self.id] = self
        self.handed_over.set_result(None)

    # --- questions and messages of the handler ----------------------------------------------------

    async def interim(self, questions: JsonObject) -> bytes | None:
        """Return the questions that end this leg, as the record keeps them.

        Returns None if the request asks them, since the call is not a task yet.
        """
        # A question asked during the handover waits to see which it belongs to.
        async with self._lock:
            if not self.is_handed_over:
                self._is_asking = True
                return None
            self._questions = questions
            return encode({"leg": f"{self.id}.{self.document.leg + 1}", "inputRequests": questions})

    def note(self, message: str) -> None:
        """Set the status message. At most one a second is written, always the latest."""
        # A task that has ended does not change, although code that its handler started may still
        # run.
        if self._has_ended:
            return
        # A path may have halves of characters.
        self.document.message = message[:1000].encode(errors="replace").decode()
        # While a handler has a transaction, nothing else is written: an SQLite file has one writer.
        has_transaction = self.run is not None and self.run.db is not None
        if self._is_noting or has_transaction:
            return
        self._is_noting = True
        loop = asyncio.get_running_loop()
        wait = max(0.0, self._noted + NOTE_EVERY - loop.time())
        # The handler does not wait for it.
        loop.call_later(
            wait, lambda: self._runner.dispatcher().commands.start(self._write_message())
        )

    async def _write_message(self) -> None:
        self._is_noting = False
        self._noted = asyncio.get_running_loop().time()

        def edit(document: Document) -> bool:
            document.message = self.document.message
            return True

        if self.id not in self._runner.runs or self._has_ended:
            return
        try:
            await self._runner.change(self.id, edit)
        except LedgerDown as error:
            logger.warning("the status of task %s was not written: %s", self.id, error)

    @property
    def _has_ended(self) -> bool:
        return self.run is not None and self.run.is_over

    def ending(self, error: RpcError, document: Document) -> JsonObject:
        """Return the end of this task if its call fails with an error."""
        return ending(error, document, asks_key=self.method.key == "ask")


class TaskPeer(Peer):
    """The client of a call that can become a task.

    After that, messages update the task, not the request.
    """

    work: TaskRun | None = None

    @property
    def _task(self) -> TaskRun | None:
        if self.work is None or not self.work.is_handed_over:
            return None
        return self.work

    async def progress(self, progress: float, total: float | None, message: str | None) -> None:
        task = self._task
        if task is None:
            await super().progress(progress, total, message)
        elif message:
            task.note(message)
        elif total is None:
            task.note(f"{progress:g}")
        else:
            task.note(f"{progress:g} of {total:g}")

    async def log(self, level: str, data: object, logger: str | None) -> None:
        task = self._task
        if task is None:
            await super().log(level, data, logger)
        elif level != "debug":
            task.note(data if isinstance(data, str) else encode(data).decode())

    async def hand_over(self) -> None:
        if self.work is not None and not await self.work.hand_over():
            raise LostLease("the call has ended, or another run has taken its record over")

    @property
    def wants_progress(self) -> bool:
        return self._task is not None or super().wants_progress

    def check_question(self, question: Question) -> None:
        task = self._task
        if task is not None:
            _check_same(question, task)

    async def ask(self, questions: Sequence[Question]) -> list[Any]:
        for question in questions:
            self.check_question(question)
        return await super().ask(questions)

    async def pause(self, questions: JsonObject) -> bytes:
        interim = None
        if self.work is not None:
            interim = await self.work.interim(questions)
        if interim is None:
            return await super().pause(questions)
        return interim


def _check_same(question: Question, task: TaskRun) -> None:
    """Raise `UsageError` if a task has asked another question under the same key."""
    # A key stands for one question for the life of a task (SEP-2663, "Input Requests").
    digest = digest_of({"method": question.method, "params": question.params})
    if task.document.asked.get(question.key, digest) != digest:
        raise UsageError(
            f"The question {question.key!r} of {task.method.name} is another one than before.",
            "a task asks one question under one key, and starts from the top with the answer",
            "ask the same in the same order, or name the questions: ctx.elicit(..., key=...)",
        )


class TaskRunner:
    """Runs the tasks of a server in this process, and adopts those that no process works on."""

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
        # The tasks that run in this process, by id.
        self.runs: dict[str, TaskRun] = {}
        self.dispatcher = dispatcher
        self.ledger = ledger
        self._catalog = catalog
        self._calls = calls
        self._questions = questions
        self._hub = hub
        self._limits = limits
        # By caller: tasks that ran here and have not ended as far as this process knows.
        self._open: dict[str, set[str]] = {}
        # When the ledger was last asked for the tasks of a caller.
        self._looked: dict[str, float] = {}
        # Tasks that this server leaves to servers that have their tools.
        self._lacking: set[str] = set()
        # The tools that those tasks need.
        self._lacking_tools: set[str] = set()
        self._adopting: asyncio.TimerHandle | None = None
        self._is_closed = False
        hub.on_task = self._changed

    # --- places -----------------------------------------------------------------------------------

    @property
    def has_place(self) -> bool:
        return len(self.runs) < self._limits.tasks

    async def take_place(self, caller: str, id: str) -> None:
        """Count a task of a caller.

        Raises `Busy` if the caller has too many that have not ended.
        """
        most = self._limits.tasks_per_caller
        if len(self._open.get(caller, ())) >= most:
            await self._leave_ended(caller)
        count = len(self._open.get(caller, ()))
        if count >= most:
            raise Busy(
                f"{count} tasks of this caller have not ended: "
                "wait for one of them, answer it or cancel it",
                ran="no",
                limit="tasks_per_caller",
                max=most,
                retry_after_ms=FIRST_POLL_MS,
            )
        self._open.setdefault(caller, set()).add(id)

    async def _leave_ended(self, caller: str) -> None:
        """Stop counting the tasks of a caller that other processes have ended.

        The ledger is asked once in `LOOK_EVERY` seconds.
        """
        now = asyncio.get_running_loop().time()
        if self._looked.get(caller, 0.0) > now - LOOK_EVERY:
            return
        self._looked[caller] = now
        for id in [*self._open[caller]]:
            found = await (await self.ledger()).task(id)
            if found is None or is_over(found):
                self.leave_place(caller, id)

    def leave_place(self, caller: str, id: str) -> None:
        """Stop counting a task."""
        ids = self._open.get(caller)
        if ids is None:
            return
        ids.discard(id)
        if not ids:
            del self._open[caller]
            self._looked.pop(caller, None)

    # --- a call that becomes a task ---------------------------------------------------------------

    async def call(
        self,
        peer: Peer,
        method: Method,
        arguments: Raw,
        shape: Shape,
        key: str | None,
        identity: bytes | None,
    ) -> tuple[bytes, JsonObject]:
        """Return the result of a call with its marks, or the task that replaces it.

        A task has `resultType: "task"`.
        """
        self.watch()
        id = new_id()
        # Every task has a record. A further round of a call has the key of the first one, in its
        # state. A batch without a key is recognised by its loss, as its commands would be.
        if method.is_batch:
            key, identity = batch_identity(peer, arguments)
        has_own_key = method.is_batch or (method.is_command and method.key != "off")
        if key is None and peer.params.state is UNSET and not has_own_key:
            key = id
        document = _new_document(peer, method, arguments)
        work = TaskRun(self, method, id, document, is_adopted=False)
        work.peer = TaskPeer(
            peer.session,
            peer.outlet,
            peer.questions,
            peer.id,
            peer.raw,
            peer.params,
            # A task outlives its request, so its handler gets no headers.
            msgspec.structs.replace(peer.sender, headers=None),
            peer.key,
            peer.position,
            work=work,
        )
        running = self._calls.run(
            work.peer,
            method,
            arguments,
            shape,
            record=f"tools/call:{method.record}",
            key=key,
            identity=identity,
            task=work,
        )
        run = asyncio.get_running_loop().create_task(running)
        try:
            await self._until_ended_or_task(work, run)
        finally:
            if work.is_handed_over:
                self.dispatcher().commands.start(self._follow(work, run))
        if work.is_handed_over:
            return created(work.id, work.document), work.peer.marks
        return run.result(), work.peer.marks

    async def _until_ended_or_task(self, work: TaskRun, run: "asyncio.Task[bytes]") -> None:
        """Wait until a call has ended or has become a task, and hand it over when it takes long.

        If the request is cancelled, the call is cancelled with it unless it is a task.
        """
        handing: asyncio.Task[bool] | None = None
        patience = work.method.task if isinstance(work.method.task, float) else None
        try:
            await asyncio.wait(
                {run, work.handed_over}, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
            if run.done() or work.is_handed_over:
                return
            handing = asyncio.get_running_loop().create_task(work.hand_over())
            await asyncio.wait({handing})
            # It has just ended, waits for another run, or the ledger is down.
            if not work.is_handed_over:
                await asyncio.wait({run})
        except asyncio.CancelledError:
            if handing is not None:
                await asyncio.wait({handing})
            if not work.is_handed_over:
                run.cancel()
                await asyncio.wait({run})
            raise
        finally:
            if handing is not None and handing.done() and not handing.cancelled():
                failure = handing.exception()
                if failure is not None:
                    logger.warning("task %s was not handed over: %s", work.id, failure)

    async def _follow(self, work: TaskRun, run: "asyncio.Task[bytes]") -> None:
        """Wait for the end of a leg."""
        assert work.peer is not None
        with self.dispatcher().set_aside(work.peer.caller):
            await asyncio.wait({run})
        # Else a retry has taken the task over.
        if self.runs.get(work.id) is work:
            del self.runs[work.id]
        error = None
        if not run.cancelled():
            error = run.exception()
        try:
            await self._after_leg(work, work.peer.caller, error)
        except LedgerDown as down:
            logger.warning("the end of task %s was not written or read: %s", work.id, down)
        self._hub.notify("task", work.id)

    async def _after_leg(self, work: TaskRun, caller: str, error: BaseException | None) -> None:
        """End a task whose leg was refused for good, or begin the next leg if it is ready."""
        found = await (await self.ledger()).task(work.id)
        refusal = _refusal_of(work, error)
        if refusal is not None and found is not None and not found.is_over:
            # If an earlier run may have acted, the refusal must not say that nothing was done.
            if has_acted(found):
                final = failed(refusal.with_ran("unknown"))
            else:
                final = work.ending(refusal, read_document(found.document))
            await self.end(found, final)
        elif found is None or is_over(found):
            self.leave_place(caller, work.id)
        elif work.run is not None and found.is_ready and _waits(found):
            # It was cancelled before it asked, or answered before this process learned that it
            # waits.
            self.dispatcher().commands.start(self.resume(work.id))

    # --- tasks that no process works on -----------------------------------------------------------

    def open(self) -> None:
        """Look for tasks to adopt, now and from now on."""
        self._is_closed = False
        self.watch()
        self.dispatcher().commands.start(self.adopt())

    def watch(self) -> None:
        """Look for tasks to adopt every half lease."""
        if self._adopting is not None or self._is_closed:
            return
        tools = self._catalog.tools.values()
        leases = (method.terms.lease for method in tools if method.task is not None)
        delay = min(leases, default=30) / 2 * random.uniform(0.5, 1.0)
        self._adopting = asyncio.get_running_loop().call_later(
            delay, self._adopt_soon, context=outside()
        )

    def _adopt_soon(self) -> None:
        self._adopting = None
        self.open()

    async def adopt(self) -> None:
        """Run tasks whose process has died, or that wait for a place."""
        room = self._limits.tasks - len(self.runs)
        if room <= 0:
            return
        try:
            # Tasks that this server cannot run must not hide those that it can.
            found = await (await self.ledger()).orphans(room + len(self._lacking))
            self._lacking &= set(found)
            for id in found:
                self.dispatcher().commands.start(self.resume(id))
        except (LedgerDown, UsageError) as error:
            logger.warning("the ledger was not asked for tasks: %s", error)

    def close(self) -> None:
        """Stop adopting tasks."""
        self._is_closed = True
        if self._adopting is not None:
            self._adopting.cancel()
            self._adopting = None

    async def resume(self, id: str) -> None:
        """Run a leg of a task that no process works on, if there is a place for it."""
        try:
            found = await (await self.ledger()).task(id)
            if found is None or found.is_over or id in self.runs or not self.has_place:
                return
            method = await self._method_of_leg(found)
        except LedgerDown as error:
            logger.warning("task %s was not adopted: %s", id, error)
            return
        if method is not None:
            await self._run_leg(found, method)

    async def _method_of_leg(self, task: Task) -> Method | None:
        """Return the tool that the next leg of a task calls.

        Returns None if there is no next leg now. A task that is cancelled, or whose tool is gone
        for good, ends here.
        """
        document = read_document(task.document)
        record = task.now
        if record is None or (record.state is State.WAITING and not task.is_ready):
            return None
        if document.is_cancelled and not has_acted(task):
            await self.end(task, CANCELLED)
            return None
        method = self._catalog.tools.get(document.tool)
        if method is not None:
            return method
        # During a rolling deployment some servers may have a tool that others lack.
        if not is_late(task, document):
            self._lacking.add(task.id)
            if document.tool not in self._lacking_tools:
                self._lacking_tools.add(document.tool)
                logger.warning(
                    "tasks of %r wait for a server that has this tool: this one has not",
                    document.tool,
                )
            return None
        ran = "unknown" if has_acted(task) else "no"
        gone = InvalidParams(f"there is no tool {document.tool!r} any more", ran=ran)
        await self.end(task, failed(gone))
        return None

    async def _run_leg(self, task: Task, method: Method) -> None:
        """Run the next leg of a task, without a request."""
        document = read_document(task.document)
        id = task.record
        work = TaskRun(self, method, task.id, document, is_adopted=True)
        self.runs[task.id] = work
        self._open.setdefault(id.caller, set()).add(task.id)
        work.peer = TaskPeer(
            Session(REVISIONS[document.revision], document.capabilities, client=document.client),
            NoOutlet(),
            self._questions,
            task.id,
            document.arguments,
            CallTool(name=document.tool, arguments=document.arguments),
            Sender(id.caller, document.identity, receipt=Receipt()),
            answers=document.answers,
            work=work,
        )
        if _waits(task):
            work.peer.continues = f"{task.id}.{document.leg}"
        running = self._calls.run(
            work.peer,
            method,
            document.arguments,
            self._calls.shape(method),
            record=id.method,
            key=id.key,
            task=work,
        )
        await self._follow(work, asyncio.get_running_loop().create_task(running))

    # --- changes ----------------------------------------------------------------------------------

    async def change(self, id: str, edit: Callable[[Document], bool]) -> None:
        """Change the document of a task, unless `edit` returns False, and notify its listeners."""
        ledger = await self.ledger()
        while (found := await ledger.task(id)) is not None:
            document = read_document(found.document)
            if not edit(document):
                return
            document.updated = max(time.time(), document.updated)
            # A cancelled task ends without further answers. Its handler may ask before it is
            # cancelled.
            is_ready = document.is_ready or document.is_cancelled
            written = msgspec.structs.replace(
                found,
                document=encode(document),
                is_ready=is_ready,
                is_over=document.final is not None,
            )
            if await ledger.change_task(written):
                self._hub.notify("task", id)
                return

    async def end(self, task: Task, final: JsonObject) -> None:
        """End a task that no process works on.

        Its record is released unless its effect may have happened.
        """

        def edit(document: Document) -> bool:
            document.final = document.final or final
            return True

        record = task.now
        ledger = await self.ledger()
        if record is None:
            await self.change(task.id, edit)
            return
        # Claim the record first: if another process has claimed it by now, that one ends the task.
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
        if taken.state is not State.RUNNING or taken.nonce != claim.nonce:
            return
        await self.change(task.id, edit)
        if taken.committed:
            await ledger.abandon(taken.token)
        else:
            await ledger.release(taken.token)
        self.leave_place(record.id.caller, task.id)

    async def end_cancelled(self, id: str) -> None:
        """End a cancelled task at once if no process works on it.

        It waits for an answer, or for a place.
        """
        try:
            found = await (await self.ledger()).task(id)
            if found is None or found.now is None or found.is_over:
                return
            is_queued = found.now.lease_left == 0 and not found.now.committed
            if is_queued or _waits(found):
                await self.end(found, CANCELLED)
        except LedgerDown as error:
            logger.warning("task %s was not cancelled yet: %s", id, error)

    def _changed(self, id: str) -> None:
        """Check whether a task of this process was cancelled.

        Another worker, or this one, has changed it.
        """
        work = self.runs.get(id)
        if work is not None and work.run is not None and work.run.stops:
            self.dispatcher().commands.start(self._look(work))

    async def _look(self, work: TaskRun) -> None:
        try:
            await work.look()
        except LedgerDown as error:
            logger.warning("task %s was not looked at: %s", work.id, error)


def _new_document(peer: Peer, method: Method, arguments: Raw) -> Document:
    """Return the document of a call that may become a task."""
    now = time.time()
    identity = peer.identity
    if identity is not None:
        identity = msgspec.structs.replace(identity, claims={})
    return Document(
        tool=method.name,
        # A copy, since the original keeps the whole message in memory.
        arguments=Raw(bytes(arguments)),
        revision=peer.session.revision.name,
        capabilities=peer.session.capabilities,
        ttl_ms=int((method.task_ttl + method.terms.retention) * 1000),
        lasts=method.task_ttl,
        created=now,
        updated=now,
        client=peer.session.client,
        identity=identity,
    )


def _refusal_of(work: TaskRun, error: BaseException | None) -> RpcError | None:
    """Return the error with which a leg was refused for good; None if it was not.

    Such a leg was refused before it had its record: its arguments no longer fit, or its caller may
    not call the tool. It may still succeed if this server is busy or stops, or if another one
    already works on the task.
    """
    if work.run is not None or not isinstance(error, RpcError) or isinstance(error, _PASSING):
        return None
    return error


def _waits(task: Task) -> bool:
    """Return whether the record of a task waits for answers."""
    return task.now is not None and task.now.state is State.WAITING
