"""The servers of tasks that the crash tests kill: each serves an app on its stdin and stdout, and
dies at a given step.

As a program this file is a fork server. It imports everything once. An order comes as JSON over a
socket, together with one end of another socket; a process is forked for it, and that end becomes
its stdin and stdout. The process first writes its id, waits for a byte, and then does what
`app.run()` does.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, TypeAlias, TypeVar, cast
from unittest.mock import patch

import msgspec
from msgspec import Struct

# Modules that a process needs sooner or later, imported before the fork.
import wirecall.commands.commands
import wirecall.ledger.postgres.ledger
import wirecall.ledger.redis.ledger
import wirecall.ledger.sqlite.ledger
import wirecall.mcp.server.tasks
import wirecall.transports.stdio  # noqa: F401
from tests.crash.child import INSERT, LIFETIME, read_effects
from wirecall import App, Context, Done, NotDone
from wirecall.ledger.base import (
    Claim,
    Ledger,
    Outcome,
    Record,
    Tables,
    Token,
    Transaction,
    open_ledger,
)
from wirecall.server.method import OnCrash

TaskStep: TypeAlias = Literal[
    "before_row",  # the record is claimed, the row of the task is not there
    "row_written",  # the row is there, the handler has not started
    "begun",  # in the handler, before its commit point
    "committed",  # in the handler, after its commit point
    "effect_done",  # in the handler, after the commit point and the effect
    "waiting",  # the task waits for an answer
    "answered",  # the last answer is there, the next leg has not claimed the record
    "leg_claimed",  # the next leg has the record, its handler has not started
    "completed",  # the outcome is recorded, and no client has asked for it
]

TOOL = "pay"
T = TypeVar("T", bound=Struct)
QUESTION = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}


class TaskOrder(Struct, frozen=True, kw_only=True):
    """The orders of a server."""

    url: str
    mode: OnCrash
    folder: str  # the effects are files in it, one for each task
    point: bool = False  # the handler calls ctx.commit_point()
    asks: bool = False  # the handler asks its client first
    holds: bool = False  # the handler waits before its commit point, indefinitely
    die_at: TaskStep | None = None
    lease: float


def serve_orders(kind: type[T], serve: Callable[[T], None]) -> None:
    """Fork a process for each order, and let it serve."""
    logging.getLogger("wirecall").setLevel(logging.ERROR)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the end of a server is the end of its socket
    gc.freeze()
    orders = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, [*ends], _, _ = socket.recv_fds(orders, 65_536, 1)
        if not data:
            return
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.alarm(LIFETIME)
            orders.close()
            for fd in (0, 1):
                os.dup2(ends[0], fd)
            os.write(1, b"%d\n" % os.getpid())
            os.read(0, 1)
            serve(msgspec.json.decode(data, type=kind))
            os._exit(0)
        os.close(ends[0])


def serve(order: TaskOrder) -> None:
    shop = Shop(order)

    async def opened(url: str, tables: Tables) -> Ledger:
        return cast(Ledger, WatchedLedger(await open_ledger(url, tables), shop))

    app = App("tasks", mode="development", ledger=order.url)
    reconcile = shop.look if order.mode == "reconcile" else None
    declare = app.command(
        name=TOOL, task=True, on_crash=order.mode, lease=order.lease, reconcile=reconcile
    )
    declare(shop.pay_after_point if order.point else shop.pay)
    with patch("wirecall.app.open_ledger", opened):
        app.run(grace=5)


class Shop:
    """A tool whose effects can be counted."""

    def __init__(self, order: TaskOrder) -> None:
        self._order = order

    def at(self, step: TaskStep) -> None:
        if step == self._order.die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    async def pay_after_point(self, name: str, ctx: Context) -> str:
        await self._begin(ctx)
        await ctx.commit_point()
        self.at("committed")
        return await self._take_effect(name, ctx)

    async def pay(self, name: str, ctx: Context) -> str:
        await self._begin(ctx)
        return await self._take_effect(name, ctx)

    def look(self, name: str) -> Done | NotDone:
        """Truthful: what is in the effect log was done, and nothing else."""
        found = read_effects(os.path.join(self._order.folder, name))
        return Done(found[0]) if found else NotDone()

    async def _begin(self, ctx: Context) -> None:
        if self._order.asks:
            await ctx.elicit("Sure?", QUESTION, key="sure")
        self.at("begun")
        if self._order.holds:
            os.close(
                os.open(os.path.join(self._order.folder, f"{ctx.idempotency_key}.held"), os.O_CREAT)
            )
            await asyncio.Event().wait()

    async def _take_effect(self, name: str, ctx: Context) -> str:
        values = ctx.idempotency_key, ctx.attempt, ctx.fence
        effect = " ".join(map(str, values))
        if self._order.mode != "transactional":
            log = os.open(
                os.path.join(self._order.folder, name), os.O_WRONLY | os.O_APPEND | os.O_CREAT
            )
            os.write(log, effect.encode() + b"\n")
            os.fsync(log)
            os.close(log)
        elif self._order.url.startswith("postgres"):
            await ctx.db.execute(INSERT + "(%s, %s, %s)", values)
        else:
            ctx.db.execute(INSERT + "(?, ?, ?)", values)
        self.at("effect_done")
        return effect


class WatchedLedger:
    """A ledger that does what the real one does, and knows the steps."""

    def __init__(self, ledger: Ledger, shop: Shop) -> None:
        self._ledger: Any = ledger
        self._shop = shop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def begin_task(self, token: Token, id: str, document: bytes, ttl: float) -> bool:
        self._shop.at("before_row")
        begun: bool = await self._ledger.begin_task(token, id, document, ttl)
        self._shop.at("row_written")
        return begun

    async def claim(self, claim: Claim) -> Record:
        if claim.continues:
            self._shop.at("answered")
        record: Record = await self._ledger.claim(claim)
        if claim.continues and record.nonce == claim.nonce:
            self._shop.at("leg_claimed")
        return record

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        applied: bool = await self._ledger.complete(token, outcome, retention)
        self._shop.at("completed")
        return applied

    def transaction(self, claim: Claim, wait: float) -> "WatchedTransaction":
        return WatchedTransaction(self._ledger.transaction(claim, wait), self._shop)


class WatchedTransaction:
    """The same for a transaction."""

    def __init__(self, block: AbstractAsyncContextManager[Transaction], shop: Shop) -> None:
        self._block = block
        self._shop = shop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    async def __aenter__(self) -> "WatchedTransaction":
        self._transaction = await self._block.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._block.__aexit__(*error)

    async def complete(self, outcome: Outcome, retention: float, *, undo: bool) -> None:
        await self._transaction.complete(outcome, retention, undo=undo)
        self._shop.at("completed")


if __name__ == "__main__":
    serve_orders(TaskOrder, serve)
