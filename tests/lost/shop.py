"""The app whose answers are lost: `wirecall serve shop.py`, once for every kind of command.

A handler notes each effect outside of the server: a line in a file, or a row in the transaction of
its record. It stops at points in its run and asks the harness, over a socket, whether it may
continue:

    {"id": 7, "order": "k1-3", "at": "entered", "record": ["alice", "unknown", "auto-..."]}
    {"id": 7}

The first line is the handler's. The second one lets it continue.

Its settings come in the environment: LOST is a `Setting` as JSON.
"""

import asyncio
import os
import secrets
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Struct

from wirecall import App, BatchTool, Context, Done, NotDone
from wirecall.commands import receipts

Point: TypeAlias = Literal["entered", "acted"]

WAIT = 1.0  # seconds that a repetition waits for the first run; it is sent again when they are over
LEASE = 30.0
LONGEST = 16 << 20  # bytes of a result that the ledger keeps


class Setting(Struct, frozen=True):
    """How a shop is set up."""

    ledger: str
    control: str  # the socket of the harness
    effects: str  # the file that stands for a foreign system
    is_authenticated: bool  # callers are named by a header
    key: Literal["auto", "off"]
    noticed_after: float  # seconds within which a transport has to notice that a client has left
    # So that sessions outlive a server that is killed.
    secret: str = "the secret of all servers in this run"


class Asked(Struct):
    """A question of a handler: may it continue?"""

    id: int
    order: str
    at: Point
    record: tuple[str, str, str]


class Effect(Struct, frozen=True):
    """One line of the effects."""

    order: str
    sender: str  # as `_meta` names it, which the server ignores when it compares calls
    key: str
    run: str  # unique to this run
    attempt: int = 1


class Harness:
    """The other end of the socket; opened by the first question."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ids = count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._writer: asyncio.Future[asyncio.StreamWriter] | None = None
        self._listening: asyncio.Task[None] | None = None

    async def ask(self, order: str, at: Point, record: tuple[str, str, str]) -> None:
        loop = asyncio.get_running_loop()
        if self._writer is None:
            self._writer = loop.create_future()
            reader, writer = await asyncio.open_unix_connection(self._path)
            self._listening = loop.create_task(self._listen(reader))
            self._writer.set_result(writer)
        writer = await asyncio.shield(self._writer)
        asked = Asked(next(self._ids), order, at, record)
        answer = self._waiting[asked.id] = loop.create_future()
        writer.write(msgspec.json.encode(asked) + b"\n")
        await answer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = self._waiting.pop(msgspec.json.decode(line, type=dict[str, int])["id"])
            if not answer.done():  # otherwise its handler was cancelled
                answer.set_result(None)


class Shop:
    """The commands, and their effects."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._harness = Harness(setting.control)

    def app(self) -> App:
        ledger = self._setting.ledger
        app = App(
            "shop",
            ledger=ledger,
            secret=self._setting.secret,
            batch_tool=BatchTool(tools="all", destructive="allow"),
            authenticate=self._authenticate if self._setting.is_authenticated else None,
        )
        if self._setting.key == "off":
            app.command(name="unknown", key="off")(self.pay)
            return app
        terms: dict[str, Any] = {
            "key": "auto",
            "wait": WAIT,
            "lease": LEASE,
            "max_stored_result": LONGEST,
            # These senders never give up silently. On a busy machine, calls that they send at once
            # may arrive seconds apart, and must not count as repetitions.
            "resend_after": "off",
        }
        app.command(name="unknown", **terms)(self.pay)
        app.command(name="point", commit_point=True, **terms)(self.pay_after_point)
        app.command(name="rerun", on_crash="rerun", **terms)(self.pay)
        app.command(name="reconcile", on_crash="reconcile", reconcile=self.look, **terms)(self.pay)
        app.command(name="plain", **terms)(self.pay_plainly)
        if ledger.startswith(("sqlite:", "postgresql:")):
            app.command(name="transactional", on_crash="transactional", **terms)(
                self.pay_in_transaction
            )
        app.query(name="delivery")(self._delivery(app))
        return app

    def _authenticate(self, headers: Any) -> str | None:
        name: str | None = headers.get("caller")
        return name

    def _delivery(self, app: App) -> Any:
        async def delivery(record: tuple[str, str, str]) -> list[str | None] | None:
            """The state and the delivery of a record."""
            from wirecall.ledger.base import RecordId

            found = await (await app.ledger()).get(RecordId(*record))
            return None if found is None else [found.state.value, found.delivery]

        return delivery

    # --- the handlers -----------------------------------------------------------------------------

    async def pay(self, order: str, nap: float, size: int, ctx: Context) -> dict[str, str]:
        await self._enter(order, nap, ctx)
        effect = self._append(order, ctx)
        await self._stop(order, "acted", ctx)
        await asyncio.sleep(nap / 2)
        return _result(effect, size)

    async def pay_after_point(
        self, order: str, nap: float, size: int, ctx: Context
    ) -> dict[str, str]:
        await self._enter(order, nap, ctx)
        await ctx.commit_point()
        effect = self._append(order, ctx)
        await self._stop(order, "acted", ctx)
        await asyncio.sleep(nap / 2)
        return _result(effect, size)

    def pay_plainly(self, order: str, nap: float, size: int, ctx: Context) -> dict[str, str]:
        return _result(self._append(order, ctx), size)

    async def pay_in_transaction(
        self, order: str, nap: float, size: int, ctx: Context
    ) -> dict[str, str]:
        await self._enter(order, nap, ctx)
        effect = _effect(order, ctx)
        values = (effect.order, effect.sender, effect.key, effect.run, effect.attempt)
        if self._setting.ledger.startswith("sqlite:"):
            ctx.db.execute("INSERT INTO lost_effects VALUES (?, ?, ?, ?, ?)", values)
        else:
            await ctx.db.execute("INSERT INTO lost_effects VALUES (%s, %s, %s, %s, %s)", values)
        await self._stop(order, "acted", ctx)
        await asyncio.sleep(nap / 2)
        return _result(effect, size)

    def look(self, order: str, nap: float, size: int, ctx: Context) -> Done | NotDone:
        """Truthful: a line in the file was done, and nothing else."""
        found = [
            effect
            for effect in read_effects(self._setting.effects)
            if effect.key == ctx.idempotency_key
        ]
        return Done(_result(found[0], size)) if found else NotDone()

    async def _enter(self, order: str, nap: float, ctx: Context) -> None:
        await self._stop(order, "entered", ctx)
        await ctx.progress(1, 2)  # for a client that asks for progress, the answer becomes a stream
        await asyncio.sleep(nap / 2)

    async def _stop(self, order: str, at: Point, ctx: Context) -> None:
        await self._harness.ask(order, at, (ctx.caller, ctx.record, ctx.idempotency_key or ""))

    def _append(self, order: str, ctx: Context) -> Effect:
        """Take effect.

        One write in append mode is never torn, and with the kernel it is safe from SIGKILL.
        """
        effect = _effect(order, ctx)
        file = os.open(self._setting.effects, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, msgspec.json.encode(effect) + b"\n")
        finally:
            os.close(file)
        return effect


def _effect(order: str, ctx: Context) -> Effect:
    return Effect(
        order,
        str(ctx.meta.get("sender", "")),
        ctx.idempotency_key or "",
        secrets.token_hex(8),
        ctx.attempt,
    )


def _result(effect: Effect, size: int) -> dict[str, str]:
    return {"order": effect.order, "run": effect.run, "filler": "x" * size}


def read_effects(path: str) -> list[Effect]:
    """The effects so far. A line that is being written may have come in part."""
    if not os.path.exists(path):
        return []
    decode = msgspec.json.Decoder(Effect).decode
    whole, _, _ = Path(path).read_bytes().rpartition(b"\n")
    return [decode(line) for line in whole.splitlines()]


if "LOST" in os.environ:
    setting = msgspec.json.decode(os.environ["LOST"], type=Setting)
    receipts.NOTICED_AFTER = setting.noticed_after
    app = Shop(setting).app()
