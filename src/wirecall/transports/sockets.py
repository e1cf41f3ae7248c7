"""JSON-RPC and MCP over sockets: TCP and Unix sockets, as lines or with `Content-Length`.

Each connection is a `stdio.Session`, with its rules for order, backpressure and shutdown.

1. *A Unix socket belongs to one user.* Only that user may enter its directory. The kernel names the
   user at the other end (SO_PEERCRED), and that name is the caller: `uid:1000`.
2. *A socket file is replaced only if no server listens there.* Servers that start at the same time
   take turns: they lock the directory.
3. *TCP has no header for a token*, so its callers are anonymous. A server listens on the loopback,
   unless the user explicitly allows more.
4. *A web page can send bytes to a port of the loopback*, as an HTTP request. Its first line is not
   JSON and not a field of a header. So the first line decides, and the body is never read.
"""

import asyncio
import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from typing import TypeAlias
from urllib.parse import urlsplit

from msgspec import Struct

from wirecall.errors import CallFailed, ConnectionLost, NotSent, UsageError
from wirecall.files import real_path
from wirecall.limits import Limits
from wirecall.logs import logger
from wirecall.transports.framing import LINES, SOCKET_LINES, Framing
from wirecall.transports.headers import is_loopback
from wirecall.transports.lines import CHUNK
from wirecall.transports.stdio import (
    LAST,
    Cleanup,
    Connect,
    Session,
    Startup,
    Stop,
    serve_work,
    signals,
)

# Returns the function that makes the connection of a socket that was accepted.
Accepted: TypeAlias = Callable[[socket.socket], Connect]
Listening: TypeAlias = Callable[[str], None]

UNIX = "unix:"
TCP = "tcp://"
BACKLOG = 128
# Bytes of the path of a Unix socket that every system accepts.
MAX_PATH = 103
# Seconds between two attempts to accept while the process has no free files.
PAUSE = 0.1
# Seconds for the peer to read the last answers before the connection closes.
LINGER = 0.5
# Messages per loop iteration of a client.
TURN = 200


class Address(Struct, frozen=True):
    """The address of a server: a path, or a host and a port."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"{UNIX}{self.path}"
        host = self.host
        if ":" in host:
            host = f"[{host}]"
        return f"{TCP}{host}:{self.port}"


def address_of(text: str) -> Address:
    """Return the address in `unix:/path` or `tcp://HOST:PORT`."""
    if text.startswith(UNIX):
        path = text.removeprefix(UNIX)
        # Three slashes are the form of a URL.
        if path.startswith("///"):
            path = path[2:]
        if not path.startswith("/"):
            raise UsageError(
                f"{text!r} is not the address of a Unix socket.",
                "expected unix: and an absolute path",
                'use "unix:/run/user/1000/shop/rpc.sock"',
            )
        return Address(path=path)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        port = None
    if port is None or not parts.hostname or parts.path.strip("/") or parts.query or parts.username:
        raise UsageError(
            f"{text!r} is not the address of a TCP server.",
            "expected a host and a port, and nothing else",
            'use "tcp://127.0.0.1:8421"',
        )
    return Address(host=parts.hostname, port=port)


# --- the listening socket -------------------------------------------------------------------------


def check_tcp(host: str, *, allow_remote: bool) -> None:
    """Refuse to serve other machines unless that is allowed explicitly (rule 3)."""
    if not allow_remote and not is_loopback(host):
        raise UsageError(
            f"{host} is not the loopback.",
            "TCP has no header for a token, so every machine that reaches the port could call",
            'use host="127.0.0.1", HTTP with auth=, or allow_remote=True',
        )


@contextlib.contextmanager
def listen_unix(path: str) -> Iterator[socket.socket]:
    """Yield a listening Unix socket, and remove its file at the end."""
    if sys.platform == "win32":
        raise UsageError("Windows has no Unix sockets for Python.", "", "use TCP on the loopback")
    import fcntl

    path = real_path(path, "The socket")
    if len(os.fsencode(path)) > MAX_PATH:
        raise UsageError(
            f"The path of the socket {path} is too long.",
            f"expected at most {MAX_PATH} bytes, got {len(os.fsencode(path))}",
            "use a shorter path",
        )
    folder = _own_folder(os.path.dirname(path))
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # rule 2
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(BACKLOG)
            made = os.stat(path)
        except OSError as error:
            listener.close()
            raise UsageError(
                f"Cannot listen on {UNIX}{path}.", error.strerror or str(error), "use another path"
            ) from error
    finally:
        os.close(folder)
    with listener:
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):  # the file is gone
                now = os.stat(path)
                if (now.st_dev, now.st_ino) == (made.st_dev, made.st_ino):
                    os.unlink(path)


def _own_folder(folder: str) -> int:
    """Open the directory of a socket. Make it if it is missing; refuse one that others can use."""
    try:
        if not os.path.isdir(folder):
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            os.mkdir(folder, 0o700)
        opened = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise UsageError(
            f"The directory {folder} of the socket cannot be used.",
            error.strerror or str(error),
            "use a path in a directory of your own",
        ) from error
    found = os.fstat(opened)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == os.geteuid() and not mode & 0o077:
        return opened
    os.close(opened)
    raise UsageError(
        f"Other users can reach a socket in {folder}.",
        f"expected a directory of user {os.geteuid()} with mode 700, "
        f"got one of user {found.st_uid} with mode {mode:o}",
        f"use another directory, which the server makes itself, or chmod 700 {folder}",
    )


def _remove_stale(path: str) -> None:
    """Remove the file of a server that has ended; refuse any other file."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(
            f"{path} is not a socket.",
            "expected no file, or the socket of a server that has ended",
            "remove the file, or use another path",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:  # its backlog is full, so a server has it
            pass
    raise UsageError(f"Another server listens on {UNIX}{path}.", "", "stop it, or use another path")


def user_of(connection: socket.socket) -> str:
    """Return the user at the other end of a Unix socket, as the name of a caller."""
    if sys.platform == "linux":
        found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        uid: int = struct.unpack("3i", found)[1]
        return f"uid:{uid}"
    # The directory admits only this user.
    return f"uid:{os.geteuid()}"


# --- the server -----------------------------------------------------------------------------------


def serve(
    listener: socket.socket,
    accepted: Accepted,
    *,
    framing: Framing = LINES,
    grace: float = 10.0,
    startup: Startup | None = None,
    cleanup: Cleanup | None = None,
    limits: Limits | None = None,
    listening: Callable[[], None] = lambda: None,
) -> None:
    """Serve a listening socket until SIGTERM, SIGINT or SIGHUP."""
    stop = Stop()
    try:
        with signals(stop), asyncio.Runner() as runner:
            error: Exception | None = None
            work = serve_listener(
                listener,
                accepted,
                framing=framing,
                grace=grace,
                startup=startup,
                cleanup=cleanup,
                limits=limits,
                stop=stop,
                listening=listening,
            )
            try:
                runner.run(work)
            except Exception as failure:
                error = failure
                raise
            finally:
                stop.leave(error)
    finally:
        stop.close()


async def serve_listener(
    listener: socket.socket,
    accepted: Accepted,
    *,
    framing: Framing = LINES,
    grace: float = 10.0,
    startup: Startup | None = None,
    cleanup: Cleanup | None = None,
    limits: Limits | None = None,
    stop: Stop | None = None,
    listening: Callable[[], None] = lambda: None,
) -> None:
    """Serve a listening socket until `stop` is called. `listening` is called after the startup."""
    if framing is LINES:
        framing = SOCKET_LINES

    def server() -> SocketServer:
        return SocketServer(listener, accepted, limits or Limits(), framing, listening)

    await serve_work(server, grace=grace, startup=startup, cleanup=cleanup, stop=stop or Stop())


class SocketServer:
    """Accepts connections, and serves each in its session."""

    def __init__(
        self,
        listener: socket.socket,
        accepted: Accepted,
        limits: Limits,
        framing: Framing,
        listening: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._accepted = accepted
        self._limits = limits
        self._framing = framing
        self._listening = listening
        self._grace = 0.0
        self._sessions: dict[asyncio.Task[None], Session] = {}
        listener.setblocking(False)
        self._accepting = self._loop.create_task(self._accept())

    def stop(self) -> None:
        """Accept no more connections and begin no more calls; the second time, cancel the calls."""
        self._accepting.cancel()
        for session in self._sessions.values():
            session.stop()

    async def serve(self, grace: float) -> float:
        """Serve until `stop`; return the rest of the grace time."""
        self._grace = grace
        self._listening()
        await asyncio.wait({self._accepting})
        if not self._accepting.cancelled():
            self._accepting.result()
        deadline = self._loop.time() + grace
        self._listener.close()
        if self._sessions:
            await asyncio.wait(self._sessions)
        return max(0.0, deadline - self._loop.time())

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # no free files, or the client has left
                logger.error("a connection cannot be accepted: %s", error)
                await asyncio.sleep(PAUSE)
                continue
            task = self._loop.create_task(self._serve(connection))
            task.add_done_callback(self._ended)

    async def _serve(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        with connection:
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            number = connection.fileno()
            session = Session(
                self._accepted(connection), number, number, self._limits, False, self._framing
            )
            self._sessions[task] = session
            if self._accepting.cancelling():  # `stop` did not see this session
                session.stop()
            await session.serve(self._grace)
            await self._linger(connection)

    async def _linger(self, connection: socket.socket) -> None:
        """Let the peer read the last answers.

        The kernel discards them if a connection closes before all bytes of the peer are read.
        """
        with contextlib.suppress(OSError, TimeoutError):
            connection.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(LINGER):
                while await self._loop.sock_recv(connection, CHUNK):
                    pass

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._sessions.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection ended with an error", exc_info=error)


# --- the client -----------------------------------------------------------------------------------


class SocketPipe:
    """A connection to a server on a socket.

    `on_line` receives each message; `on_end` is called once, at the end.
    """

    def __init__(
        self, address: Address, *, max_bytes: int = 10 << 20, framing: Framing = LINES
    ) -> None:
        self._address = address
        self._max_bytes = max_bytes
        self._framing = framing
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        # Why the connection has ended.
        self._reason = "the connection has ended"

    async def open(
        self, on_line: Callable[[bytes], None], on_end: Callable[[CallFailed], None]
    ) -> None:
        """Connect. If this fails or is cancelled, nothing of the connection remains."""
        address = self._address
        try:
            if address.path:
                reader, writer = await asyncio.open_unix_connection(address.path)
            else:
                reader, writer = await asyncio.open_connection(address.host, address.port)
        except (OSError, AttributeError) as error:  # Windows' asyncio has no Unix sockets
            raise NotSent(f"{address} cannot be reached: {error}") from error
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader, on_line, on_end))

    async def write(self, line: bytes) -> None:
        """Write one message. Waits while the server does not read."""
        writer = self._writer
        if writer is None or writer.is_closing():
            raise NotSent(self._reason)
        try:
            writer.write(self._framing.join(line))
            await writer.drain()
        except OSError as error:
            raise ConnectionLost(f"the connection to {self._address} broke: {error}") from error

    async def aclose(self) -> None:
        writer = self._writer
        self._writer = None
        if writer is None:
            return
        assert self._reading is not None
        self._reading.cancel()
        try:
            writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(LAST):
                    await writer.wait_closed()
        finally:
            writer.transport.abort()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(
        self,
        reader: asyncio.StreamReader,
        on_line: Callable[[bytes], None],
        on_end: Callable[[CallFailed], None],
    ) -> None:
        splitter = self._framing.splitter(self._max_bytes)
        self._reason = f"{self._address} closed the connection"
        is_over = False
        while not is_over and splitter.broken is None:
            try:
                data = await reader.read(CHUNK)
            except OSError as error:
                self._reason = f"the connection to {self._address} broke: {error}"
                data = b""
            is_over = not data
            lines = splitter.feed(data)
            if is_over:
                lines = splitter.rest()
            for number, line in enumerate(lines, start=1):
                on_line(line)
                if number % TURN == 0:
                    await asyncio.sleep(0)
        if splitter.broken is not None:
            self._reason = f"{self._address} sent bytes that cannot be read: {splitter.broken}"
        if self._writer is not None:
            self._writer.close()
        on_end(ConnectionLost(self._reason))
