"""A server under test: `wirecall serve`, killed and started again, and the harness's view of it.

Its handlers ask at every point of their run whether they may continue (`shop`). `Stand.hold` keeps
the handler of an order at a point, until the trial has cut its connection there.
"""

import asyncio
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import aiohttp
import apsw
import msgspec
import psycopg
from msgspec import Struct

from tests.lost.senders import ADDRESS, PATIENCE
from tests.lost.shop import LEASE, Asked, Effect, Point, Setting, read_effects
from tests.mcp.asgi import BASIC, request
from tests.ports import free_port
from tests.servers import TRANSACTIONAL, Store
from wirecall.commands.receipts import NOTICED_AFTER
from wirecall.ledger.base import Ledger, RecordId, State, open_ledger

# How callers are identified: by a header, as one user, or by their sessions alone.
Access: TypeAlias = Literal["authenticated", "single user", "anonymous"]
Delivery: TypeAlias = tuple[str, str | None] | None  # state and delivery of a record

SHOP = Path(__file__).with_name("shop.py")
TABLE = 'CREATE TABLE lost_effects ("order" text, sender text, key text, run text, attempt integer)'


class Plan(Struct, frozen=True):
    """Which server, on which ledger, for which callers."""

    server: Literal["granian", "granian-asgi", "uvicorn"]
    ledger: str
    access: Access = "authenticated"
    workers: int = 1

    @property
    def can_be_killed(self) -> bool:
        """Of several workers, one that dies would leave the leases of the others."""
        return self.ledger != "memory" and self.workers == 1

    def __str__(self) -> str:
        many = f" x{self.workers}" if self.workers > 1 else ""
        return f"{self.server}{many}, {self.ledger}, {self.access}"


class Hold:
    """The handler of an order: it stands at a point when it is `reached`, and continues after
    `release`.
    """

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.record: RecordId | None = None
        self._go = asyncio.Event()

    async def keep(self, asked: Asked) -> None:
        self.record = RecordId(*asked.record)
        self.reached.set()
        await self._go.wait()

    def release(self) -> None:
        self._go.set()


class Control:
    """The socket where handlers ask at every point of their run whether they may continue."""

    def __init__(self, path: Path, on_asked: Callable[[Asked], object]) -> None:
        self.path = str(path)
        self._on_asked = on_asked
        self._holds: dict[tuple[str, Point], Hold] = {}
        self._questions: set[asyncio.Task[None]] = set()
        # Done when a connection of a server is closed.
        self._peers: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def opened(self) -> "AsyncIterator[Control]":
        """Answer in this block. The servers have to end in it."""
        control = await asyncio.start_unix_server(self._serve, self.path)
        try:
            yield self
        finally:
            control.close()
            for question in self._questions:
                question.cancel()
            if self._peers:
                # The servers have ended, so their connections do.
                await asyncio.wait(self._peers, timeout=PATIENCE)

    def hold(self, order: str, at: Point) -> Hold:
        """Keep the next handler of this order at a point."""
        held = self._holds[order, at] = Hold()
        return held

    def release(self) -> None:
        """Let every handler continue."""
        for hold in self._holds.values():
            hold.release()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decode = msgspec.json.Decoder(Asked).decode
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._peers.add(closed)

        async def answer(asked: Asked) -> None:
            held = self._holds.pop((asked.order, asked.at), None)
            if held is not None:
                await held.keep(asked)
            with suppress(OSError):
                writer.write(msgspec.json.encode({"id": asked.id}) + b"\n")
                await writer.drain()

        with suppress(OSError):
            while line := await reader.readline():
                asked = decode(line)
                self._on_asked(asked)
                question = asyncio.create_task(answer(asked))
                self._questions.add(question)
                question.add_done_callback(self._questions.discard)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        closed.set_result(None)
        self._peers.discard(closed)


class Stand:
    """One server, its ledger, and the effects of its handlers."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        folder: Path,
        log: IO[bytes],
        *,
        key: Literal["auto", "off"] = "auto",
        noticed_after: float = NOTICED_AFTER,
    ) -> None:
        self.plan = plan
        self.store = store
        self.log = log
        self._key = key
        self._noticed_after = noticed_after
        self.port = free_port()
        self.kills: list[float] = []  # their times
        self._aged: set[tuple[RecordId, int, bytes | None]] = set()
        self.is_up = asyncio.Event()
        # The caller and the method of each order with a running trial.
        self.active: dict[str, tuple[str, str]] = {}
        # Of each order whose handler was entered.
        self.records: defaultdict[str, set[RecordId]] = defaultdict(set)
        self._effects = str(folder / "effects")
        self._control = Control(folder / "control", self._note)
        self.hold = self._control.hold
        self._ledger: Ledger | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._killing = asyncio.Lock()
        self._http: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def opened(self) -> "AsyncIterator[Stand]":
        """Serve in this block; at its end, the server stops gracefully."""
        if self.plan.ledger in TRANSACTIONAL:
            self._ask("DROP TABLE IF EXISTS lost_effects", TABLE)
        if self.store.is_durable:
            self._ledger = await open_ledger(self.store.url)
        try:
            async with self._control.opened(), aiohttp.ClientSession() as self._http:
                await self._start()
                try:
                    yield self
                finally:
                    await self.stop()
        finally:
            if self._ledger is not None:
                await self._ledger.aclose()

    def _note(self, asked: Asked) -> None:
        self.records[asked.order].add(RecordId(*asked.record))

    # --- the process ------------------------------------------------------------------------------

    async def _start(self) -> None:
        plan = self.plan
        is_authenticated = self.plan.access == "authenticated"
        words = [
            sys.executable,
            "-m",
            "wirecall",
            "serve",
            f"{SHOP}:app",
            "--ledger",
            self.store.url,
        ]
        if plan.access == "single user":
            words.append("--single-user")
        elif plan.access == "anonymous":
            # In development, direct requests over the loopback come from a single user.
            words.append("--no-single-user")
        words += [
            "--http",
            f"{ADDRESS}:{self.port}",
            "--server",
            plan.server,
            "--workers",
            str(plan.workers),
        ]
        given = (
            self.store.url,
            self._control.path,
            self._effects,
            is_authenticated,
            self._key,
            self._noticed_after,
        )
        environment = {**os.environ, "LOST": msgspec.json.encode(Setting(*given)).decode()}
        self._process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env=environment,
        )
        async with asyncio.timeout(PATIENCE):
            while not await self._answers():
                assert self._process.returncode is None, "the server ended"
                await asyncio.sleep(0.02)
        self.is_up.set()

    async def _answers(self) -> bool:
        assert self._http is not None
        with suppress(aiohttp.ClientError, OSError):
            async with self._http.get(f"http://{ADDRESS}:{self.port}/healthz") as answer:
                return answer.status == 200
        return False

    async def kill(self) -> None:
        """End the process at any point of its work, and start another.

        Its records outlive their leases.
        """
        self.is_up.clear()
        if self._killing.locked():  # another trial does so
            await self.is_up.wait()
            return
        async with self._killing:
            self.kills.append(time.monotonic())
            assert self._process is not None
            self._process.send_signal(signal.SIGKILL)
            await self._process.wait()
            await self.age()
            await self._start()

    async def stop(self) -> None:
        """Let the server stop gracefully: all handlers end."""
        self._control.release()
        process = self._process
        self._process = None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(PATIENCE):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
                raise

    # --- its records ------------------------------------------------------------------------------

    async def age(self) -> None:
        """Let the leases of a dead process expire, as if the time had passed."""
        assert self._ledger is not None
        dead = {record.id for record in await self._ledger.list(State.RUNNING, limit=1000)}
        for order in self.active:
            dead |= self.records[order]
        for effect in read_effects(self._effects):  # of handlers that cannot ask
            if effect.order in self.active:
                dead.add(RecordId(*self.active[effect.order], effect.key))
        for id in dead:
            found = await self._ledger.get(id)
            if found is None or (found.state is not State.RUNNING and found.delivery != "pending"):
                continue
            # Once for each holder and deliverer: the time since the loss must stay within the
            # window of a repetition.
            if (holder := (id, found.attempts, found.deliverer)) not in self._aged:
                self._aged.add(holder)
                self.store.age(id, LEASE + 1)

    async def delivery(self, id: RecordId) -> Delivery:
        """The state and the delivery of a record, as the server sees them."""
        assert self._http is not None
        headers = {**BASIC, "caller": "harness"}
        message = request("delivery", {"record": msgspec.structs.astuple(id)})
        async with asyncio.timeout(PATIENCE):
            while True:
                await self.is_up.wait()
                with suppress(aiohttp.ClientError, OSError):  # another trial kills the server
                    async with self._http.post(
                        f"http://{ADDRESS}:{self.port}/rpc", json=message, headers=headers
                    ) as answer:
                        found = (await answer.json())["result"]
                        return None if found is None else (found[0], found[1])
                await asyncio.sleep(0.02)

    async def end_of(self, id: RecordId, patience: float) -> Delivery:
        """The same, when its answer is no longer pending; or after so many seconds."""
        deadline = time.monotonic() + patience
        while True:
            found = await self.delivery(id)
            if found is None or found[1] != "pending" or time.monotonic() > deadline:
                return found
            await asyncio.sleep(0.005)

    # --- its effects ------------------------------------------------------------------------------

    def effects(self) -> list[Effect]:
        """All effects so far: those in the file, and those in committed transactions."""
        rows = self._ask("SELECT * FROM lost_effects") if self.plan.ledger in TRANSACTIONAL else []
        return [*read_effects(self._effects), *(Effect(*row) for row in rows)]

    def _ask(self, *statements: str) -> list[Any]:
        """The rows of the last statement."""
        rows: list[Any] = []
        if self.plan.ledger == "sqlite":
            # Not by Python's sqlite3: two copies of SQLite in one process release each other's
            # locks.
            with closing(apsw.Connection(self.store.url.removeprefix("sqlite:"))) as db:
                db.set_busy_timeout(int(PATIENCE * 1000))
                for statement in statements:
                    rows = db.execute(statement).fetchall()
            return rows
        with psycopg.connect(self.store.url, autocommit=True) as session:
            for statement in statements:
                found = session.execute(statement.encode())
                rows = found.fetchall() if found.description else []
        return rows
