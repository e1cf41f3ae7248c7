"""Tasks: what clients ask about tool calls that continue after their answer.

This is the extension io.modelcontextprotocol/tasks (SEP-2663).

1. A task is a command's run like any other, with a record in the ledger and a second row about it:
   the id that its client has, the arguments, the questions and answers so far
   (`task_state.Document`). So it outlives its request, its client and its process. `task_run` says
   how a call becomes a task, and which process runs it.
2. A client asks for the state of a task (`tasks/get`), answers its questions (`tasks/update`),
   cancels it (`tasks/cancel`), or listens to its changes (`subscriptions/listen`).
3. `tasks/cancel` is a request, not an order. A task that has done nothing ends; one past its commit
   point finishes. The process that runs it learns about the request at once, or, if the bus loses
   the message, when it renews the lease.
4. A task that has ended does not change. Its answer is its record's, unless the record cannot give
   one: then `final` keeps the first answer that a client received.
5. Knowing an id gives no access: the server answers for a task of another caller as for an unknown
   one.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from wirecall.commands.outcome import unavailable
from wirecall.errors import DeadlineExceeded, InvalidParams, RpcError
from wirecall.ledger.base import LedgerDown, State, Task
from wirecall.mcp.server.catalog import Catalog
from wirecall.mcp.server.changes import Hub, Listener
from wirecall.mcp.server.peer import Peer, check_answer
from wirecall.mcp.server.task_run import TaskRunner
from wirecall.mcp.server.task_state import (
    LAST_POLL_MS,
    TASK_ID,
    Document,
    failed,
    has_acted,
    is_unanswered,
    is_undecided,
    members,
    open_questions,
    read_document,
    status_of,
)
from wirecall.protocol.messages import JsonObject, encode

if TYPE_CHECKING:
    from wirecall.auth.access import Access

T = TypeVar("T")


class Tasks:
    """The tasks of a server, as its clients ask for them."""

    def __init__(
        self, catalog: Catalog, hub: Hub, runner: TaskRunner, access: "Access | None"
    ) -> None:
        self._catalog = catalog
        self._hub = hub
        self._runner = runner
        # The rules about tokens; None if callers have none.
        self._access = access

    @property
    def is_needed(self) -> bool:
        """Whether the server has tools that can become tasks."""
        return any(method.task is not None for method in self._catalog.tools.values())

    # --- methods ----------------------------------------------------------------------------------

    async def get(self, peer: Peer) -> object:
        """Answer `tasks/get`."""
        return await self._shown(await self._own(peer, peer.params.task_id))

    async def update(self, peer: Peer) -> object:
        """Answer `tasks/update`: accept answers to the questions of a task."""
        found = await self._own(peer, peer.params.task_id)
        # Step 1: an answer must fit its question. Answers that were not asked for, or are known
        # already, are ignored (SEP-2663, "tasks/update").
        questions = open_questions(found)
        given = {key: reply for key, reply in peer.params.responses.items() if key in questions}
        for key, reply in given.items():
            check_answer(questions[key], reply)

        # Step 2: the next `tasks/get` shows them. The last one makes the next leg ready.
        def edit(document: Document) -> bool:
            fresh = {key: reply for key, reply in given.items() if key not in document.answers}
            document.answers.update(fresh)
            document.is_ready = all(key in document.answers for key in questions)
            return bool(fresh) and document.final is None

        if given:
            await self._reached(self._runner.change(found.id, edit))
            self._runner.dispatcher().commands.start(self._runner.resume(found.id))
        return b"{}"

    async def cancel(self, peer: Peer) -> object:
        """Answer `tasks/cancel`: the task ends if it has done nothing yet."""
        found = await self._own(peer, peer.params.task_id)
        record = found.now
        is_open = record is not None and record.state in (State.RUNNING, State.WAITING)

        def edit(document: Document) -> bool:
            if not is_open or document.is_cancelled or document.final is not None:
                return False
            document.is_cancelled = True
            if has_acted(found):
                document.message = "cancelled after its commit point: it finishes"
            return True

        # The hub notifies every process, this one included.
        await self._reached(self._runner.change(found.id, edit))
        if found.id not in self._runner.runs:
            self._runner.dispatcher().commands.start(self._runner.end_cancelled(found.id))
        return b"{}"

    # --- subscriptions ----------------------------------------------------------------------------

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

    async def listen(
        self,
        ids: frozenset[str],
        caller: str,
        send: Callable[[JsonObject], Coroutine[Any, Any, None]],
    ) -> None:
        """Send the current state of some tasks, then every change, until it is cancelled."""
        changed = set(ids)

        def wants(kind: str, uri: str | None) -> bool:
            if kind != "task" or uri not in ids:
                return False
            changed.add(uri)
            return True

        sent: dict[str, bytes] = {}
        listener = Listener(wants)
        self._hub.add(listener)
        try:
            while True:
                pause = LAST_POLL_MS
                for id in changed.copy():
                    changed.discard(id)
                    try:
                        state = await self._shown(await self._find(caller, id))
                    except RpcError:  # it has expired, or the ledger is down: the client polls
                        continue
                    pause = min(pause, state["pollIntervalMs"])
                    if sent.get(id) != (now := encode(state)):
                        sent[id] = now
                        await send(state)
                try:
                    # Not `wait_for`: until Python 3.12 it drops a cancellation that arrives with a
                    # change.
                    async with asyncio.timeout(pause / 1000):
                        await listener.next()
                except TimeoutError:
                    changed.update(ids)  # a change may be lost between processes
        finally:
            self._hub.remove(listener)

    # --- one task ---------------------------------------------------------------------------------

    async def _own(self, peer: Peer, id: str) -> Task:
        """Return a task of a request's caller. The caller needs the scopes of the task's call."""
        found = await self._find(peer.caller, id)
        if peer.identity is not None and self._access is not None:
            document = read_document(found.document)
            method = self._catalog.tools.get(document.tool)
            scopes: Sequence[str] = ()
            if method is not None and method.scopes is not None:
                scopes = method.scopes.of(document.arguments)
            self._access.permit(peer.identity, scopes)
        return found

    async def _find(self, caller: str, id: str) -> Task:
        """Return a task of a caller.

        The error must not reveal that another caller's task exists.
        """
        unknown = InvalidParams("taskId: there is no such task, or it is no longer kept")
        if not TASK_ID.fullmatch(id):
            raise unknown
        ledger = await self._reached(self._runner.ledger())
        found = await self._reached(ledger.task(id))
        if found is None or found.record.caller != caller:
            raise unknown
        if found.now is not None and found.now.state is State.TOMBSTONE:
            raise unknown
        return found

    async def _reached(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work of the ledger; `LedgerUnavailable` if the ledger cannot be reached."""
        try:
            return await work
        except LedgerDown as error:
            raise unavailable(error) from error

    async def _shown(self, task: Task) -> JsonObject:
        """Return a task as its client sees it, with its result, error or questions."""
        while True:
            if is_unanswered(task):
                late = DeadlineExceeded("the task was not answered in time", ran="no")
                await self._reached(self._runner.end(task, failed(late)))
            elif is_undecided(task):
                await self._freeze(task)
            else:
                break
            task = await self._find(task.record.caller, task.id)
        return {**members(task.id, read_document(task.document)), **status_of(task)}

    async def _freeze(self, task: Task) -> None:
        """Make the error of an unknown outcome the end of its task, before a client sees it.

        The record may be settled later, but an ended task does not change.
        """
        final = status_of(task)

        def edit(document: Document) -> bool:
            is_new = document.final is None
            document.final = document.final or final
            return is_new

        # Unless the record has just been settled.
        if is_undecided(await self._find(task.record.caller, task.id)):
            await self._reached(self._runner.change(task.id, edit))
