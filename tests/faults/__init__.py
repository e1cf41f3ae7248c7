"""Faults on purpose: races, lost answers, killed servers, full disks, paused processes.

The tests of this folder share effects that can be counted (`Effects`), a caller that tries again
with the same key and remembers its answers (`Caller`), the rules that its memories must keep
(`check`), and the same app in a separate process (`child`, `serve`).
"""

import asyncio
import json
import os
import random
import resource
import secrets
import signal
import sqlite3
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.calls import call, make_app
from wirecall import App, Context, Done, NotDone

LEASE = 1.0
PATIENCE = 60.0  # seconds after which a test gives up on something that should have happened


# --- effects, and their callers -------------------------------------------------------------------


class Effect(NamedTuple):
    key: str
    attempt: int
    run: str


class Effects:
    """A file with a line per effect: the world outside. One write in append mode is never torn."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    def add(self, context: Context) -> str:
        """Take effect, and give the run a name that no other run has."""
        run = secrets.token_hex(8)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(
                file, f"{context.idempotency_key} {context.meta.get('attempt', 0)} {run}\n".encode()
            )
        finally:
            os.close(file)
        return run

    def all(self) -> list[Effect]:
        lines = Path(self.path).read_text().splitlines() if os.path.exists(self.path) else []
        return [Effect(key, int(attempt), run) for key, attempt, run in map(str.split, lines)]

    def of(self, key: str) -> list[Effect]:
        return [effect for effect in self.all() if effect.key == key]


class Answer(msgspec.Struct):
    """The answer to one attempt of a caller."""

    key: str
    attempt: int
    result: Any = None
    error: dict[str, Any] | None = None
    is_replayed: bool = False

    @property
    def code(self) -> int:
        return self.error["code"] if self.error else 0

    @property
    def ran(self) -> str | None:
        return (self.error.get("data") or {}).get("ran") if self.error else None

    @property
    def is_refused(self) -> bool:
        """The ledger could not be used, and nothing ran."""
        return (self.code, self.ran) == (50310, "no")

    @property
    def is_unknown(self) -> bool:
        """Its outcome is unknown."""
        return (self.code, self.ran) == (50910, "unknown")

    def repeats(self, first: "Answer") -> bool:
        """It came from the ledger, and equals the first caller's answer."""
        return self.is_replayed and self.result == first.result


class Caller:
    """Sends commands.

    Every attempt has a number in `_meta`, which the handler notes with its effect.
    """

    def __init__(self) -> None:
        self.history: list[Answer] = []
        self.most = 1  # how often a command may take effect
        self._attempts = count(os.getpid() * 1_000_000)

    async def call(self, app: App, method: str, key: str) -> Answer:
        attempt = next(self._attempts)
        replayed: list[Any] = []
        message = call(method, {"order": 7, "_meta": {"attempt": attempt}}, id=attempt, key=key)
        async with asyncio.timeout(2 * PATIENCE):
            reply = json.loads(await app.handle(message, replayed=replayed) or b"null")
        answer = Answer(key, attempt, reply.get("result"), reply.get("error"), bool(replayed))
        self.history.append(answer)
        return answer

    async def insist(self, app: App, method: str, key: str, *, seconds: float = PATIENCE) -> Answer:
        """Send the same key until there is a result, as an honest client does."""
        async with asyncio.timeout(seconds):
            while True:
                answer = await self.call(app, method, key)
                if answer.error is None:
                    return answer
                await asyncio.sleep(0.02)


def check(history: Iterable[Answer], done: list[Effect], *, most: int = 1) -> None:
    """Check E1 to E5. `most` is how often a command may take effect."""
    times = Counter(effect.key for effect in done)
    assert all(number <= most for number in times.values()), times.most_common(5)
    by_attempt = {(effect.key, effect.attempt) for effect in done}
    runs = {(effect.key, effect.run) for effect in done}
    results: defaultdict[str, set[str]] = defaultdict(set)
    for answer in history:
        if answer.error is None:
            results[answer.key].add(answer.result)
            assert (answer.key, answer.result) in runs, (
                f"a result of a run that never was: {answer}"
            )
        else:
            assert answer.code != 50310 or answer.ran == "no", answer
            assert answer.ran in ("no", "yes", "unknown"), answer
            assert answer.ran != "no" or (answer.key, answer.attempt) not in by_attempt, (
                f"it did run: {answer}"
            )
            assert answer.code == 50310 or answer.key not in results, (
                f"its result was forgotten: {answer}"
            )
    assert all(len(outcomes) == 1 for outcomes in results.values()), [
        outcomes for outcomes in results.values() if len(outcomes) > 1
    ]


async def eventually(fact: Callable[[], Awaitable[Any]], *, seconds: float = PATIENCE) -> Any:
    """The first value of `fact` that is true."""
    async with asyncio.timeout(seconds):
        while True:
            if value := await fact():
                return value
            await asyncio.sleep(0.01)


# --- the same app, here and in other processes ----------------------------------------------------


async def no_pause() -> None:
    return None


def make_shop(
    url: str, effects: Effects, *, pause: Callable[[], Awaitable[None]] = no_pause, **options: Any
) -> App:
    """A query, a plain command, and three with a short lease that pause after their effect."""
    app = make_app(ledger=url, **options)

    @app.query
    async def read() -> int:
        return 1

    @app.command
    async def charge(order: int, context: Context) -> str:
        return effects.add(context)

    @app.command(lease=LEASE)
    async def hold(order: int, context: Context) -> str:
        run = effects.add(context)
        await pause()
        return run

    @app.command(lease=LEASE, on_crash="rerun")
    async def hold_rerun(order: int, context: Context) -> str:
        return await hold(order, context)

    def find(order: int, context: Context) -> Done | NotDone:
        done = effects.of(context.idempotency_key or "")
        return Done(done[0].run) if done else NotDone()

    @app.command(lease=LEASE, on_crash="reconcile", reconcile=find)
    async def hold_reconcile(order: int, context: Context) -> str:
        return await hold(order, context)

    return app


class Child:
    """The app in another process: words go in by lines, words come out by lines."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.pid = process.pid
        self.is_killed = False
        self._process = process

    async def kill(self) -> None:
        self.is_killed = True
        self._process.kill()
        await self._process.wait()

    async def send(self, word: str, *args: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([word, *args]).encode() + b"\n")
        await self._process.stdin.drain()

    async def next_value(self, word: str) -> Any:
        """Return the value of the next word, which must be this one."""
        assert self._process.stdout is not None
        async with asyncio.timeout(2 * PATIENCE):
            line = await self._process.stdout.readline()
        assert line, f"the child ended before it said {word!r}"
        said, value = json.loads(line)
        assert said == word, line
        return value

    async def ask(self, word: str, *args: Any) -> Any:
        await self.send(word, *args)
        return await self.next_value(word)

    async def call(self, method: str, key: str) -> Answer:
        await self.send("call", method, key)
        return await self.answer()

    async def begin(self, method: str, key: str) -> None:
        """Call, and wait until the handler is inside its pause; `answer` is for later."""
        await self.send("call", method, key)
        await self.next_value("inside")

    async def answer(self) -> Answer:
        return msgspec.convert(await self.next_value("call"), Answer)


@asynccontextmanager
async def child(url: str, effects: Effects) -> AsyncIterator[Child]:
    """A process with its own app on the same ledger and effects.

    It is gone at the end of the block.
    """
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-W",
            "error",
            "-c",
            "from tests.faults import serve; serve()",
            url,
            effects.path,
        ),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        limit=1 << 24,
    )
    try:
        started = Child(process)
        yield started
        assert process.stdin is not None
        process.stdin.close()
        async with asyncio.timeout(PATIENCE):
            assert await process.wait() == 0 or started.is_killed, (
                "the child broke; why is on its standard error"
            )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]  # else it warns that it was not closed


def serve() -> None:
    """The child's side. A line is a word, which names a method of `Served`, and its arguments."""
    asyncio.run(Served(*sys.argv[1:]).run())


class Served:
    """The orders that a child obeys."""

    def __init__(self, url: str, effects: str) -> None:
        self._app = make_shop(url, Effects(effects), pause=self._pause)
        self._caller = Caller()
        self._go = asyncio.Event()
        self._how = "wait"
        self._locks: list[sqlite3.Connection] = []

    async def run(self) -> None:
        lines = asyncio.StreamReader(limit=1 << 24)
        loop = asyncio.get_running_loop()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
        )
        async with asyncio.TaskGroup() as tasks:
            while line := await lines.readline():
                word, *args = json.loads(line)
                tasks.create_task(getattr(self, word)(*args))
        await self._app.aclose()
        pipe.close()

    def _say(self, word: str, value: Any = None) -> None:
        sys.stdout.buffer.write(msgspec.json.encode((word, value)) + b"\n")
        sys.stdout.buffer.flush()

    async def call(self, method: str, key: str) -> None:
        self._say("call", await self._caller.call(self._app, method, key))

    async def read(self) -> None:
        self._say("read", json.loads(await self._app.handle(call("read")) or b"null")["result"])

    async def ready(self) -> None:
        from tests.transports import ask  # late: few children serve HTTP

        self._say("ready", (await ask(self._app.asgi(), "/readyz", method="GET")).status)

    async def go(self) -> None:
        self._go.set()

    async def pause(self, how: str) -> None:
        """What `hold` does after its effect: "wait" for the word `go`, or "stop" the process with
        all its threads.
        """
        self._how = how
        self._say("pause")

    async def _pause(self) -> None:
        self._say("inside")
        if self._how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            await self._go.wait()

    async def race(self, keys: list[str], copies: int, side_by_side: int) -> None:
        """Call every key so many times at once, in our own order, after the word `go`."""
        random.shuffle(keys)
        self._say("ready")
        await self._go.wait()
        answers_by_key: defaultdict[str, Counter[bytes]] = defaultdict(Counter)
        for start in range(0, len(keys), side_by_side):
            now = [key for key in keys[start : start + side_by_side] for _ in range(copies)]
            calls = [call("charge", {"order": 7}, number, key) for number, key in enumerate(now)]
            replies = await asyncio.gather(*map(self._app.handle, calls))
            for key, reply in zip(now, replies, strict=True):
                answers_by_key[key][_without_id(reply or b"")] += 1
        self._say(
            "race",
            {
                key: {answer.decode(): n for answer, n in answers.items()}
                for key, answers in answers_by_key.items()
            },
        )

    async def become(self, user: int, group: int) -> None:
        """Become another user.

        It may not be allowed to import anything, so all late imports happen now.
        """
        with tempfile.TemporaryDirectory() as folder:
            async with make_shop(f"sqlite:{folder}/ledger.db", Effects(f"{folder}/effects")) as app:
                await self._caller.call(app, "charge", "any")
        "".encode("utf-16-be")  # what is logged is escaped with it
        if os.geteuid() == 0:
            os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        self._say("become")

    async def limit(self, size: int) -> None:
        """No file may be written beyond this many bytes; -1 for no limit."""
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        self._say("limit")

    async def lock(self, path: str) -> None:
        """Take the write lock of an SQLite file and keep it."""
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("BEGIN IMMEDIATE")
        self._locks.append(db)
        self._say("lock")

    async def unlock(self) -> None:
        self._locks.pop().close()
        self._say("unlock")


def _without_id(reply: bytes) -> bytes:
    answer = msgspec.json.decode(reply, type=dict[str, msgspec.Raw])
    return b"".join(
        name.encode() + b":" + bytes(value)
        for name, value in sorted(answer.items())
        if name != "id"
    )
