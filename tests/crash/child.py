"""The processes that the crash tests kill: each runs one command, and dies at a given moment.

As a program this file is a fork server. It imports everything once; then, for every order that it
reads (a line of JSON on stdin), it forks a process, before there is any thread or event loop, and
waits for its end. Reports go to stdout, in lines of a process id, a word and the rest:

    71 sent                     a transition was sent, and its answer will be lost: kill me
    71 reply {"jsonrpc":...     the bytes of the answer; one that dies halfway leaves half a line
    71 facts {"ran":1,...       facts that the answer does not have
    71 ended -9                 from the server: how the process ended

An order without a step is a retry: it lives.
"""

import asyncio
import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Struct

from wirecall import App, Context, Done, NotDone, jsonrpc
from wirecall.ledger.base import Claim, Ledger, Outcome, Record, Token, Transaction, open_ledger
from wirecall.server.method import OnCrash

Step: TypeAlias = Literal[
    "before_claim",
    "claim_sent",
    "claimed",
    "commit_sent",
    "committed",
    "effect_begun",
    "effect_done",
    "completion_sent",
    "completed",
    "half_answered",
    "anytime",
]
T = TypeVar("T")

# What wirecall imports late, and every process needs: imported before the fork.
NEEDED = (
    "wirecall.commands.commands",
    "wirecall.protocol.models",
    "wirecall.server.dispatch",
    "wirecall.ledger.sqlite.ledger",
    "wirecall.ledger.redis.ledger",
    "wirecall.ledger.postgres.ledger",
)

METHOD = "pay"
INSERT = "INSERT INTO crash_effects VALUES "

# Turns of the event loop after which every driver has sent its data; found by experiment.
PASSED_ON = 8

# Seconds after which its alarm ends a process that does not end.
LIFETIME = 60


class Order(Struct, frozen=True, kw_only=True):
    """The orders of a process."""

    url: str
    mode: OnCrash
    key: str
    id: int
    effects: str  # the file that stands for a foreign system
    point: bool = False  # the handler calls ctx.commit_point()
    plain: bool = False  # the handler is a plain function
    lease: float = 30.0
    wait: float = 0.05
    die_at: Step | None = None
    by_parent: bool = False  # the killer at a step that ends in "_sent"
    delay: float = 0.0  # seconds before the death,
    turns: int = 2  # or turns of the event loop, at a step that ends in "_sent"
    rivals: int = 1  # so many processes do the same at once


class Facts(Struct, frozen=True):
    """Facts beside the reply: how often the handler was entered, and whether the answer is a
    replay.
    """

    ran: int
    replayed: bool


def main() -> None:
    logging.getLogger("wirecall").setLevel(logging.ERROR)
    for name in NEEDED:
        import_module(name)
    gc.freeze()  # so that a process need not copy what it never touches
    decode = msgspec.json.Decoder(Order).decode
    for line in sys.stdin.buffer:
        order = decode(line)
        for pid in [_fork(order, number) for number in range(order.rivals)]:
            _, status = os.waitpid(pid, 0)
            os.write(1, b"\n%d ended %d\n" % (pid, os.waitstatus_to_exitcode(status)))


def _fork(order: Order, number: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(LIFETIME)
    try:
        asyncio.run(_run(msgspec.structs.replace(order, id=order.id + number)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


async def _run(order: Order) -> None:
    if order.die_at == "anytime":
        os.write(1, _line("sent"))
    fate = Fate(order)
    shop = Shop(order, fate)
    app = shop.app()
    ledger = await open_ledger(order.url)
    app._ledger = cast(Ledger, WatchedLedger(ledger, fate))
    replayed: list[Any] = []
    request = jsonrpc.make_request(
        METHOD, {"order": order.key, "idempotency_key": order.key}, order.id
    )
    reply = await app.handle(request, replayed=replayed)
    assert reply is not None
    if order.die_at == "half_answered":
        os.write(1, _line("reply", reply)[: -len(reply) // 2])
    fate.at("half_answered")
    os.write(1, _line("reply", reply))
    os.write(1, _line("facts", msgspec.json.encode(Facts(shop.ran, bool(replayed)))))
    await app.aclose()


def _line(word: str, rest: bytes = b"") -> bytes:
    return b"%d %s %s\n" % (os.getpid(), word.encode(), rest)


class Fate:
    """When this process dies, and whether it or its parent kills it."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def at(self, step: Step) -> None:
        if step == self._order.die_at:
            time.sleep(self._order.delay)
            _die()

    async def unheard(self, step: Step, transition: Coroutine[Any, Any, T]) -> T:
        """Hand a transition to the store; if this is the step, the process is killed before the
        answer.
        """
        if step == self._order.die_at:
            await self._die_during(asyncio.ensure_future(transition))
        return await transition

    async def _die_during(self, _: "asyncio.Future[Any]") -> NoReturn:
        for _turn in range(PASSED_ON if self._order.by_parent else self._order.turns):
            await asyncio.sleep(0)
        if self._order.by_parent:
            os.write(1, _line("sent"))
            await asyncio.sleep(LIFETIME)
        _die()


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process is dead")


# --- the ledger, watched --------------------------------------------------------------------------


class WatchedLedger:
    """A ledger that does what the real one does, and knows the steps."""

    def __init__(self, ledger: Ledger, fate: Fate) -> None:
        self._ledger: Any = ledger
        self._fate = fate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def claim(self, claim: Claim) -> Record:
        self._fate.at("before_claim")
        record: Record = await self._fate.unheard("claim_sent", self._ledger.claim(claim))
        if record.nonce == claim.nonce:
            self._fate.at("claimed")
        return record

    async def commit_point(self, token: Token, lease: float) -> bool:
        applied: bool = await self._fate.unheard(
            "commit_sent", self._ledger.commit_point(token, lease)
        )
        return applied

    async def complete(self, token: Token, outcome: Outcome, retention: float) -> bool:
        applied: bool = await self._fate.unheard(
            "completion_sent", self._ledger.complete(token, outcome, retention)
        )
        self._fate.at("completed")
        return applied

    def transaction(self, claim: Claim, wait: float) -> "WatchedTransaction":
        return WatchedTransaction(self._ledger.transaction(claim, wait), claim, self._fate)


class WatchedTransaction:
    """The same for a transaction."""

    def __init__(
        self, block: AbstractAsyncContextManager[Transaction], claim: Claim, fate: Fate
    ) -> None:
        self._block: Any = block
        self._claim = claim
        self._fate = fate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transaction, name)

    async def __aenter__(self) -> "WatchedTransaction":
        self._fate.at("before_claim")
        self._transaction: Transaction = await self._fate.unheard(
            "claim_sent", self._block.__aenter__()
        )
        if self._transaction.record.nonce == self._claim.nonce:
            self._fate.at("claimed")
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        swallowed: bool | None = await self._block.__aexit__(*error)
        return swallowed

    async def complete(self, outcome: Outcome, retention: float, *, undo: bool) -> None:
        await self._fate.unheard("completion_sent", self._complete(outcome, retention, undo))
        self._fate.at("completed")

    async def _complete(self, outcome: Outcome, retention: float, undo: bool) -> None:
        await self._transaction.complete(outcome, retention, undo=undo)


# --- the command ----------------------------------------------------------------------------------


class Shop:
    """A command whose effects can be counted, in every shape that a handler may have."""

    def __init__(self, order: Order, fate: Fate) -> None:
        self._order = order
        self._fate = fate
        self.ran = 0

    def app(self) -> App:
        order = self._order
        app = App("crash", mode="production", ledger=order.url)
        handlers: dict[tuple[bool, bool], Any] = {
            (False, False): self.pay,
            (False, True): self.pay_plainly,
            (True, False): self.pay_after_point,
            (True, True): self.pay_plainly_after_point,
        }
        reconcile = self.look if order.mode == "reconcile" else None
        declare = app.command(
            name=METHOD,
            on_crash=order.mode,
            lease=order.lease,
            wait=order.wait,
            reconcile=reconcile,
        )
        declare(handlers[order.point, order.plain])
        return app

    async def pay(self, order: str, ctx: Context) -> dict[str, str]:
        self.ran += 1
        self._fate.at("committed")  # a handler that names no such point has passed it on entry
        return await self._take_effect(ctx)

    def pay_plainly(self, order: str, ctx: Context) -> dict[str, str]:
        self.ran += 1
        self._fate.at("committed")
        return self._take_effect_at_once(ctx)

    async def pay_after_point(self, order: str, ctx: Context) -> dict[str, str]:
        self.ran += 1
        await ctx.commit_point()
        self._fate.at("committed")
        return await self._take_effect(ctx)

    def pay_plainly_after_point(self, order: str, ctx: Context) -> dict[str, str]:
        self.ran += 1
        ctx.commit_point()
        self._fate.at("committed")
        return self._take_effect_at_once(ctx)

    def look(self, order: str) -> Done | NotDone:
        """Truthful: what is in the effect log was done, and nothing else."""
        found = read_effects(self._order.effects)
        return Done({"effect": found[0]}) if found else NotDone()

    async def _take_effect(self, ctx: Context) -> dict[str, str]:
        if not (self._order.mode == "transactional" and self._order.url.startswith("postgres")):
            return self._take_effect_at_once(ctx)
        self._fate.at("effect_begun")
        await ctx.db.execute(INSERT + "(%s, %s, %s)", _values(ctx))
        self._fate.at("effect_done")
        return _result(ctx)

    def _take_effect_at_once(self, ctx: Context) -> dict[str, str]:
        if self._order.mode != "transactional":
            self._append(ctx)
        else:
            self._fate.at("effect_begun")
            ctx.db.execute(INSERT + "(?, ?, ?)", _values(ctx))
        self._fate.at("effect_done")
        return _result(ctx)

    def _append(self, ctx: Context) -> None:
        log = os.open(self._order.effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._fate.at("effect_begun")
        os.write(log, _result(ctx)["effect"].encode() + b"\n")
        os.fsync(log)
        os.close(log)


def read_effects(path: str) -> list[str]:
    """The effects in a file: a line each, of key, attempt and fence."""
    try:
        with open(path) as log:
            return log.read().splitlines()
    except FileNotFoundError:
        return []


def _values(ctx: Context) -> tuple[str | None, int, int]:
    return ctx.idempotency_key, ctx.attempt, ctx.fence


def _result(ctx: Context) -> dict[str, str]:
    return {"effect": " ".join(map(str, _values(ctx)))}


if __name__ == "__main__":
    main()
