"""SIGHUP: a new process serves with the configuration, the app and the certificate of now."""

import asyncio
import os
import pty
import signal
import ssl
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.balancer import PATIENCE, Answer, Connection
from tests.calls import batch, call, read
from tests.ports import free_port
from tests.size import sized

APP = """
import asyncio
import os
import sys
from wirecall import App

app = App("shop")

@app.query
def version() -> int:
    return VERSION

@app.query
async def wait(seconds: float) -> int:
    print("waiting", file=sys.stderr, flush=True)
    await asyncio.sleep(seconds)
    return VERSION

@app.command
async def take(order: str) -> str:
    fd = os.open("effects", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{order}\\n".encode())  # one line, one write: whole, even if others write
    os.close(fd)
    return order
"""
CONFIG = '[server]\napp = "app.py"\n\n[ledger]\nurl = "sqlite:ledger.db"\n\n[limits]\nbatch = 9\n'
CLIENTS = 8
CASES = [("granian", 1), ("granian", 2), ("uvicorn", 1), ("uvicorn", 2), ("granian-asgi", 2)]
some_servers = pytest.mark.parametrize(("kind", "workers"), sized(small=CASES[1:3], full=CASES))
# How often a test replaces a server: the second time, a keeper does it.
RELOADS = sized(small=1, full=2)


class Reloading:
    """`wirecall serve` in a folder, whose stderr is read line by line."""

    def __init__(self, folder: Path, port: int, process: Process) -> None:
        self.folder = folder
        self.port = port
        self.process = process
        self.said: list[str] = []

    async def hears(self, words: str) -> str:
        """Return the next line with these words."""
        assert self.process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            while line := (await self.process.stderr.readline()).decode():
                self.said.append(line)
                if words in line:
                    return line
        raise AssertionError(f"{words!r} was never said, but: {self.said}")

    def hang_up(self) -> None:
        self.process.send_signal(signal.SIGHUP)

    async def reload(self) -> None:
        self.hang_up()
        await self.hears("Reloaded")

    async def connect(self, tls: ssl.SSLContext | None = None) -> Connection:
        return Connection(*await asyncio.open_connection("127.0.0.1", self.port, ssl=tls))

    async def ask(
        self,
        body: bytes,
        connection: Connection | None = None,
        path: str = "/rpc",
        fields: Mapping[str, str] = {},
    ) -> Answer:
        """Ask on a connection, or on a new one."""
        own = connection or await self.connect()
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        lines += [f"Content-Length: {len(body)}", "", ""]
        async with asyncio.timeout(PATIENCE):
            answer = await own.ask("\r\n".join(lines).encode() + body)
        if connection is None:
            own.close()
        return answer

    async def result(self, method: str, params: Any = None) -> Any:
        return read((await self.ask(call(method, params))).body)["result"]

    async def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            assert await self.process.wait() == 0


def write_app(folder: Path, version: int, app: str = APP) -> None:
    (folder / "app.py").write_text(app.replace("VERSION", str(version)))


@asynccontextmanager
async def reloading(
    folder: Path, *words: str, config: str = CONFIG, app: str = APP
) -> AsyncIterator[Reloading]:
    write_app(folder, 1, app)
    (folder / "wirecall.toml").write_text(config)
    port = free_port()
    command = ["-m", "wirecall", "serve", "--http", f"127.0.0.1:{port}", "--grace", "20s", *words]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=folder,
        stderr=PIPE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    try:
        server = Reloading(folder, port, process)
        await server.hears("Listening on")
        yield server
        if process.returncode is None:
            await server.end()
    finally:
        if process.returncode is None:
            process.kill()
        assert process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            await process.stderr.read()  # its successors end without it
            await process.wait()


async def client(server: Reloading, number: int, stop: asyncio.Event) -> list[str]:
    """Call until the end; one client in two opens a connection for each call."""
    orders: list[str] = []
    kept: Connection | None = None
    while not stop.is_set():
        order = f"{number}-{len(orders)}"
        message = call("take", {"order": order}, key=f"key-{order}")
        if number % 2:
            answer = await server.ask(message)
        else:
            kept = kept or await server.connect()
            answer = await server.ask(message, kept)
            if answer.headers.get("connection") == "close":
                kept.close()
                kept = None
        assert (answer.status, read(answer.body).get("result")) == (200, order), answer
        orders.append(order)
    if kept is not None:
        kept.close()
    return orders


@some_servers
async def test_sighup_replaces_the_server_without_an_error(
    kind: str, workers: int, tmp_path: Path
) -> None:
    """Twice: the first process replaces its own server, and then, as its keeper, another one."""
    words = ("--server", kind, "--workers", str(workers))
    async with reloading(tmp_path, *words) as server:
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(client(server, number, stop)) for number in range(CLIENTS)]
            for version in (2, 3):
                slow = group.create_task(server.ask(call("wait", {"seconds": 1.5})))
                await server.hears("waiting")
                write_app(tmp_path, version)
                await server.reload()
                assert read((await slow).body)["result"] == version - 1
                assert await server.result("version") == version
            stop.set()
        await server.end()
    orders = Counter(order for each in clients for order in each.result())
    assert Counter((tmp_path / "effects").read_text().split()) == orders
    assert set(orders.values()) == {1}


async def test_bad_configuration_is_refused_with_its_line_and_the_server_continues(
    tmp_path: Path,
) -> None:
    pair = batch(call("version"), call("version", id=2))
    async with reloading(tmp_path) as server:

        async def is_refused(text: str, reason: str) -> None:
            (tmp_path / "wirecall.toml").write_text(CONFIG.replace("batch = 9", text))
            server.hang_up()
            assert reason in await server.hears("✗")
            assert "next:" in await server.hears("next:")
            assert "continues" in await server.hears("the reload has failed")

        await is_refused('batch = "x"', "wirecall.toml:8: limits.batch must be a whole number")
        assert len(read((await server.ask(pair)).body)) == 2
        (tmp_path / "wirecall.toml").write_text(CONFIG.replace("batch = 9", "batch = 1"))
        await server.reload()
        assert "error" in read((await server.ask(pair)).body)
        await is_refused("batsh = 1", "wirecall.toml:8: there is no key limits.batsh")
        assert "error" in read((await server.ask(pair)).body)
        # A reload keeps the ledger.
        (tmp_path / "wirecall.toml").write_text(CONFIG.replace("ledger.db", "other.db"))
        server.hang_up()
        refused = await server.hears("✗")
        assert "The ledger has changed" in refused and "other.db" in refused
        await server.hears("the reload has failed")
        assert await server.result("version") == 1
        assert not (tmp_path / "other.db").exists()


async def test_app_that_cannot_be_loaded_leaves_the_server_as_it_is(tmp_path: Path) -> None:
    async with reloading(tmp_path, "--workers", "2") as server:
        (tmp_path / "app.py").write_text("raise ValueError('not today')")
        server.hang_up()
        await server.hears("not today")
        await server.hears("the reload has failed")
        assert await server.result("version") == 1
        write_app(tmp_path, 2)
        await server.reload()
        assert await server.result("version") == 2


async def test_ledger_in_memory_is_not_handed_over(tmp_path: Path) -> None:
    config = '[server]\napp = "app.py"\n'
    async with reloading(tmp_path, config=config) as server:
        server.hang_up()
        await server.hears("a ledger in memory cannot be handed over")
        assert await server.result("version") == 1


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_session_continues_after_a_reload_without_a_secret(
    workers: str, tmp_path: Path
) -> None:
    """The secret that the first process has made is handed over."""
    async with reloading(tmp_path, "--workers", workers) as server:
        session = await opened(server)
        for _ in range(RELOADS):
            await server.reload()
            assert await listed(server, session) == 200


ACCEPT = {"Accept": "application/json, text/event-stream"}


async def opened(server: Reloading) -> str:
    """Open an MCP session and return it."""
    who = {"name": "test", "version": "1"}
    terms = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": who}
    answer = await server.ask(call("initialize", terms), path="/mcp", fields=ACCEPT)
    return answer.headers["mcp-session-id"]


async def listed(server: Reloading, session: str) -> int:
    """List the tools in a session, and return the status."""
    fields = {"Mcp-Session-Id": session, **ACCEPT}
    return (await server.ask(call("tools/list", id=2), path="/mcp", fields=fields)).status


async def test_secret_is_replaced_by_reloads_without_ending_a_session(tmp_path: Path) -> None:
    """The steps of deploy.md. A session of the old secret ends with the last one."""
    old = "0123456789abcdef" * 4
    new = "fedcba9876543210" * 4
    both = 'secret = "file:secret"\nother_secret = "file:other"\n'
    config = CONFIG.replace("[server]\n", f"[server]\n{both}")
    (tmp_path / "secret").write_text(old)
    (tmp_path / "other").write_text(new)
    async with reloading(tmp_path, "--workers", "2", config=config) as server:
        first = await opened(server)
        (tmp_path / "secret").write_text(new)
        (tmp_path / "other").write_text(old)
        await server.reload()
        second = await opened(server)
        assert [await listed(server, each) for each in (first, second)] == [200, 200]
        without = config.replace('other_secret = "file:other"\n', "")
        (tmp_path / "wirecall.toml").write_text(without)
        await server.reload()
        assert [await listed(server, each) for each in (first, second)] == [404, 200]


@pytest.mark.parametrize("words", sized(small=[("--workers", "2")], full=[(), ("--workers", "2")]))
async def test_sigterm_reaches_the_servers_of_a_reload(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """While a successor starts, and while the one before it leaves."""
    for moment in ("starts", "Listening on"):
        async with reloading(tmp_path, *words) as server:
            server.hang_up()
            if moment != "starts":
                await server.hears(moment)
            await server.end()
            with pytest.raises(ConnectionRefusedError):
                await server.connect()


# An app whose processes say what they do, and wait for files.
GATED = """
from contextlib import asynccontextmanager
from time import sleep

def say(word):
    print(word, VERSION, file=sys.stderr, flush=True)

@asynccontextmanager
async def shop(app):
    yield
    say("closing")

app = App("shop", lifespan=shop)

@app.query
async def hold() -> int:
    say("holding")
    while not os.path.exists("go"):
        await asyncio.sleep(0.01)
    return VERSION

say("loading")
while VERSION == 2 and os.path.exists("gate"):
    sleep(0.01)
"""
WORKERS = pytest.mark.parametrize("workers", ["1", "2"])


@WORKERS
async def test_sigterm_stops_the_successor_while_the_server_before_it_leaves(
    workers: str, tmp_path: Path
) -> None:
    """A supervisor waits for the time of one server to stop, and not of two."""
    async with reloading(tmp_path, "--workers", workers, app=APP + GATED) as server:
        held = asyncio.create_task(server.ask(call("hold")))
        await server.hears("holding 1")
        write_app(tmp_path, 2, APP + GATED)
        server.hang_up()
        await server.hears("Listening on")
        server.process.send_signal(signal.SIGTERM)
        await server.hears("closing 2")
        # Workers without a call in flight have closed.
        closed = [line for line in server.said if "closing 1" in line]
        assert len(closed) < int(workers)
        (tmp_path / "go").touch()
        assert read((await held).body)["result"] == 1
        async with asyncio.timeout(PATIENCE):
            assert await server.process.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            await server.connect()


async def has_ended(process: psutil.Process) -> None:
    """Wait until a process has ended, whose parent has not asked for it yet."""
    while True:
        if process.status() == psutil.STATUS_ZOMBIE:
            return
        await asyncio.sleep(0)


@WORKERS
async def test_sigterm_ends_a_successor_that_starts_before_the_server_has_left(
    workers: str, tmp_path: Path
) -> None:
    """It would take requests, and look ready, while the server goes."""
    async with reloading(tmp_path, "--workers", workers, app=APP + GATED) as server:
        held = asyncio.create_task(server.ask(call("hold")))
        await server.hears("holding 1")
        (tmp_path / "gate").touch()
        write_app(tmp_path, 2, APP + GATED)
        before = psutil.Process(server.process.pid).children()
        server.hang_up()
        await server.hears("loading 2")
        (successor,) = set(psutil.Process(server.process.pid).children()) - set(before)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE):
            await has_ended(successor)
        (tmp_path / "go").touch()
        assert read((await held).body)["result"] == 1
        async with asyncio.timeout(PATIENCE):
            assert await server.process.wait() == 0
        assert server.process.stderr is not None
        rest = (await server.process.stderr.read()).decode()
        assert "closing 2" not in rest
        assert "failed" not in rest


@WORKERS
async def test_sighup_before_the_server_serves_waits_for_it(workers: str, tmp_path: Path) -> None:
    """It would end the process, and systemd takes that for a good end."""
    early = APP + "import signal\nos.kill(os.getpid(), signal.SIGHUP)\n"
    async with reloading(tmp_path, "--workers", workers, app=early) as server:
        await server.hears("Reloaded")
        assert await server.result("version") == 1


async def test_sighup_to_all_processes_keeps_the_workers_if_the_reload_fails(
    tmp_path: Path,
) -> None:
    async with reloading(tmp_path, "--workers", "2") as server:
        parent = psutil.Process(server.process.pid)
        workers = parent.children()
        (tmp_path / "wirecall.toml").write_text(CONFIG.replace("batch = 9", "batsh = 9"))
        for each in workers:
            each.send_signal(signal.SIGHUP)
        for _ in range(3):  # workers that leave would have ended by then
            server.hang_up()
            await server.hears("the reload has failed")
        assert parent.children() == workers
        assert await server.result("version") == 1
        assert not [line for line in server.said if "ended with 0" in line]


# An app that sends SIGTERM to the process whose server was replaced.
WHEN_CLOSING = """
import signal
from contextlib import asynccontextmanager

@asynccontextmanager
async def shop(app):
    yield
    os.kill(os.getpid(), signal.SIGTERM)

app = App("shop", lifespan=shop)
"""
WHEN_SAID = """
import signal

class Signalling:
    def __init__(self, file):
        self.file = file

    def write(self, text):
        if "Reloaded" in text:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.file.write(text)

    def __getattr__(self, name):
        return getattr(self.file, name)

sys.stderr = Signalling(sys.stderr)
"""


@pytest.mark.parametrize(("words", "more"), [((), WHEN_CLOSING), (("--workers", "2"), WHEN_SAID)])
async def test_sigterm_is_passed_on_while_the_first_process_becomes_a_keeper(
    words: tuple[str, ...], more: str, tmp_path: Path
) -> None:
    async with reloading(tmp_path, *words, app=APP + more) as server:
        write_app(tmp_path, 2)
        await server.reload()
        async with asyncio.timeout(PATIENCE):
            assert await server.process.wait() == 0
        with pytest.raises(ConnectionRefusedError):
            await server.connect()


async def test_successor_serves_the_metrics_at_the_same_address(tmp_path: Path) -> None:
    port = free_port()
    async with reloading(tmp_path, "--metrics", f"127.0.0.1:{port}") as server:
        await server.reload()
        while len([line for line in server.said if "Metrics: " in line]) < 2:
            await server.hears("Metrics: ")
        metrics = Connection(*await asyncio.open_connection("127.0.0.1", port))
        answer = await metrics.ask(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        metrics.close()
        assert answer.status == 200
        assert b"wirecall_" in answer.body


# --- certificates ---------------------------------------------------------------------------------


def write_certificate(folder: Path, serial: int) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), serial)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    (folder / "server.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


async def serial_of(server: Reloading) -> int:
    """Return the serial number of the certificate on a new connection, after a call on it."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    connection = await server.connect(tls)
    assert read((await server.ask(call("version"), connection)).body)["result"] == 1
    shown = connection.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    connection.close()
    return x509.load_der_x509_certificate(shown).serial_number


@some_servers
async def test_new_certificate_is_served_after_sighup(
    kind: str, workers: int, tmp_path: Path
) -> None:
    write_certificate(tmp_path, 1)
    files = '[server]\ncertificate = "server.pem"\nkey = "server.key"\n'
    config = CONFIG.replace("[server]\n", files)
    words = ("--server", kind, "--workers", str(workers))
    async with reloading(tmp_path, *words, config=config) as server:
        assert "https://" in server.said[-1]
        assert await serial_of(server) == 1
        write_certificate(tmp_path, 2)
        await server.reload()
        assert await serial_of(server) == 2
        (tmp_path / "server.key").write_text("no key")
        server.hang_up()
        assert "server.pem cannot be used" in await server.hears("✗")
        await server.hears("the reload has failed")
        assert await serial_of(server) == 2


# --- terminals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--workers", "2"), ("--server", "uvicorn")])
async def test_closed_terminal_stops_the_server_with_grace(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    """SIGHUP of `kill` reloads a server in a terminal; SIGHUP of a terminal that closes stops it."""
    write_app(tmp_path, 1)
    (tmp_path / "wirecall.toml").write_text(CONFIG)
    port = free_port()
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "wirecall", "serve", "--http", f"127.0.0.1:{port}", *words]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.dup2(writing, 2)
        os.execv(sys.executable, command)
    os.close(writing)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), os.fdopen(reading, "rb", 0)
    )

    async def hears(words: bytes) -> None:
        async with asyncio.timeout(PATIENCE):
            while words not in (line := await lines.readline()):
                assert line, f"{words!r} was never said"

    await hears(b"Listening on")
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    message = call("wait", {"seconds": 0.5})
    head = f"POST /rpc HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(message)}\r\n"
    asking = asyncio.create_task(
        connection.ask(f"{head}Content-Type: application/json\r\n\r\n".encode() + message)
    )
    await hears(b"waiting")
    os.close(terminal)
    assert read((await asking).body)["result"] == 1
    connection.close()
    async with asyncio.timeout(PATIENCE):
        await lines.read()
        _, status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    transport.close()
