"""Serving an ASGI application under granian or uvicorn, and stopping it in time.

    bind      one socket, ours: a dead reader is cut by the kernel, a taken port is told in words
    startup   `HttpServer.open`, not the servers' lifespan, so that the order is the same under both
    serve     until SIGTERM or SIGINT
    stop      no new connections; streams are asked to end
    cut       after three quarters of the grace time, whatever connection is left
    shutdown  `HttpServer.aclose`: the application closes what it has open

One worker runs in this process and shares its objects. Several are copies of this process (fork), each with a socket of its
own on the same address; the parent passes signals on and starts a worker anew that died.

Why not the servers' own ways to stop: uvicorn waits for every open stream before it tells the application that it stops, and
ends with the signal it got; granian waits for open streams without an end. Neither limits how long a header may take to come
under all of its parsers, and neither cuts a client that does not read.
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from wirecall.errors import UsageError, WirecallError
from wirecall.logs import logger
from wirecall.policy import Limits
from wirecall.transports.http_server import GRACE, HttpServer

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

ServerName: TypeAlias = Literal["granian", "uvicorn"]
Told: TypeAlias = Callable[[str], None]

BACKLOG = 1024
SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A worker that dies sooner than this after its start would die again, unless somebody killed it.
SHORT_LIFE = 5.0
# Seconds after the application is closed in which threads and handlers that do not heed their cancellation may end.
LAST = 1.0


def _print(address: str) -> None:
    print(f"Listening on {address}", file=sys.stderr, flush=True)


def serve(
    app: "HttpServer | Callable[[], HttpServer]",
    host: str = "127.0.0.1",
    port: int = 8420,
    *,
    server: ServerName = "granian",
    workers: int = 1,
    grace: float = GRACE,
    listening: Told = _print,
) -> None:
    """Serve until SIGTERM or SIGINT, then stop within `grace` seconds and return. Port 0 takes a free one.

    `app` is the application, or a function that makes it, called in each worker. `listening` is told the address.
    """
    _check_server(server)
    if workers < 1:
        raise UsageError(f"workers={workers} is not possible.", "somebody has to serve", "use workers=1")
    listener = bind(host, port, several=workers > 1)
    with listener:
        listening(_address(listener))
        if workers == 1:
            _worker(app, host, listener, server, grace)
        else:
            listeners = [listener, *siblings(listener, workers - 1)]
            work = partial(_forked, app, host, listeners, server, grace)
            _Workers(work, listeners, grace).run()


def _made(app: "HttpServer | Callable[[], HttpServer]", host: str) -> HttpServer:
    made = app if isinstance(app, HttpServer) else app()
    made.allow_host(host)
    return made


async def serve_until(
    app: HttpServer,
    listener: socket.socket,
    *,
    server: ServerName = "granian",
    grace: float = GRACE,
    stop: asyncio.Event | None = None,
) -> None:
    """The same inside a running event loop: until a signal, or until `stop` is set."""
    stop = stop or asyncio.Event()
    _cut_dead_readers(listener, app.limits.write_time)
    front = _FRONTS[server](app, listener)
    await app.open()
    try:
        with _signals(stop):
            await _run(front, app, stop, grace)
    finally:
        await app.aclose()


async def _run(front: "Front", app: HttpServer, stop: asyncio.Event, grace: float) -> None:
    serving = asyncio.create_task(front.serve())
    asked = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    app.stop(grace)
    front.stop()
    # HttpServer cuts its streams at three quarters; a moment later what is left is connections that answer nobody.
    for patience, harder in ((grace * 0.75 + 0.1, front.cut), (grace * 0.1, serving.cancel)):
        await asyncio.wait({serving}, timeout=patience)
        if serving.done():
            break
        harder()
    await asyncio.wait({serving}, timeout=grace * 0.05)
    if serving.done() and not serving.cancelled() and (error := serving.exception()) is not None:
        raise error


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT ask to stop. A second SIGINT is a person who does not want to wait."""
    loop = asyncio.get_running_loop()

    def ask(number: signal.Signals) -> None:
        if number == signal.SIGINT and stop.is_set():
            loop.remove_signal_handler(number)
            signal.raise_signal(number)
        stop.set()

    added = []
    # Not in a thread, nor on Windows, where Ctrl+C ends asyncio.run by an exception.
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
        for number in SIGNALS:
            loop.add_signal_handler(number, ask, number)
            added.append(number)
    try:
        yield
    finally:
        for number in added:
            loop.remove_signal_handler(number)


# --- the socket --------------------------------------------------------------------------------------------------------


def bind(host: str, port: int, *, several: bool = False) -> socket.socket:
    """A listening socket; `several` may listen on the same address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"Cannot listen on {host}.", str(error), "use an address of this machine") from error
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if several and hasattr(socket, "SO_REUSEPORT"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        fix = "use an address of this machine" if error.errno == errno.EADDRNOTAVAIL else "use another port="
        raise UsageError(f"Cannot listen on {host}:{port}.", error.strerror or str(error), fix) from error
    return listener


def siblings(listener: socket.socket, count: int) -> list[socket.socket]:
    """More sockets on the same address, so that the kernel deals connections out evenly.

    From one socket that all share, the worker that wakes first takes every connection that waits: 64 at once went to one
    of four. Where the system cannot do this, they share.
    """
    if not hasattr(socket, "SO_REUSEPORT"):
        return [listener.dup() for _ in range(count)]
    host, port = listener.getsockname()[:2]
    return [bind(host, port, several=True) for _ in range(count)]


def _cut_dead_readers(listener: socket.socket, seconds: float) -> None:
    """Accepted sockets inherit it: the kernel ends a connection that takes no byte for so long, whoever holds the bytes.

    Measured with a client that never reads: under both servers the connection is gone in time, their buffers with it.
    """
    if sys.platform == "linux":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


# --- the servers -------------------------------------------------------------------------------------------------------


class Front(Protocol):
    """A server as it is driven here."""

    async def serve(self) -> None: ...
    def stop(self) -> None: ...
    def cut(self) -> None: ...


def _check_server(name: str) -> None:
    if name not in _FRONTS:
        raise UsageError(f"{name!r} is not a server.", fix=f"use one of {', '.join(_FRONTS)}")
    if find_spec(name) is None:
        raise UsageError(f"{name} is not installed.", fix=f"pip install {name}")


class Granian:
    """granian's embedded server: HTTP in threads of its own, the application in this loop.

    It has to be given the socket, which it would otherwise make itself (`_init_shared_socket`).
    """

    def __init__(self, app: HttpServer, listener: socket.socket) -> None:
        from granian._granian import SocketHolder
        from granian.constants import HTTPModes, Interfaces
        from granian.http import HTTP1Settings
        from granian.log import LogLevels
        from granian.server.embed import Server

        class Embedded(Server):
            def _init_shared_socket(self) -> None:
                holder: Any = SocketHolder
                self._shd = holder(os.dup(listener.fileno()), False, BACKLOG)

        limits = app.limits
        self._port = listener.getsockname()[1]
        self._server: Any = Embedded(
            app,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            # Connections side by side. The default is the backlog: so many idle connections would keep everybody out.
            backpressure=_files(),
            http1_settings=HTTP1Settings(
                header_read_timeout=int(limits.body_time * 1000), max_buffer_size=max(limits.header_bytes, 8192) * 2
            ),
            log_level=LogLevels.error,  # it warns of itself, and tells of every client that leaves
            log_dictconfig=_GRANIAN_LOG,
        )

    async def serve(self) -> None:
        before = _threads()
        await self._server.serve()
        # Its threads end a little later. One that wants to tell Python something while the interpreter ends would panic.
        for _ in range(200):
            if not _threads() - before:
                break
            await asyncio.sleep(0.005)

    def stop(self) -> None:
        self._server.stop()

    def cut(self) -> None:
        """granian has no way to end a connection, but its connections are files of this process."""
        for number in _open_files():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                name = connection.getsockname()
                if isinstance(name, tuple) and name[1] == self._port and connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)


# Its own configuration writes to stdout, which is nobody's log.
_GRANIAN_LOG = {
    "handlers": {
        "console": {"formatter": "generic", "class": "logging.StreamHandler", "stream": "ext://sys.stderr"},
        "access": {"formatter": "access", "class": "logging.StreamHandler", "stream": "ext://sys.stderr"},
    }
}


def _files() -> int:
    """How many connections this process may have: its files, but for a few of its own."""
    try:
        import resource

        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        return BACKLOG
    return max(allowed - 64, 64) if 0 < allowed < 1 << 20 else 1 << 20


def _threads() -> set[int]:
    """The threads of this process that are not Python's, where the system tells."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")} - {each.native_id for each in threading.enumerate()}
    except OSError:
        return set()


def _open_files() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/dev/fd")]
    except OSError:
        return []


class Uvicorn:
    """uvicorn, with httptools where it is installed."""

    def __init__(self, app: HttpServer, listener: socket.socket) -> None:
        import uvicorn

        class Quiet(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:  # they are ours
                yield

        self._listener = listener
        config = uvicorn.Config(
            app,
            http=_guarded(app.limits),
            loop="asyncio",
            ws="none",
            lifespan="off",
            interface="asgi3",
            backlog=BACKLOG,
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        self._server = Quiet(config)

    async def serve(self) -> None:
        await self._server.serve(sockets=[self._listener.dup()])

    def stop(self) -> None:
        self._server.should_exit = True

    def cut(self) -> None:
        for connection in list(self._server.server_state.connections):
            transport: Any = connection.transport
            transport.abort()


def _guarded(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's protocol with a limit for the header: httptools holds one of any length, and both wait for it for ever."""
    parent: Any = import_module(f"uvicorn.protocols.http.{'httptools' if find_spec('httptools') else 'h11'}_impl")
    parent = getattr(parent, "HttpToolsProtocol", None) or parent.H11Protocol

    class Guarded(parent):  # type: ignore[misc]
        header_bytes = 0
        header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_header()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._forget_header()
                return
            self.header_bytes += len(data)
            if self.header_timer is None:
                self._await_header()
            if self.header_bytes > 2 * limits.header_bytes and not self.transport.is_closing():
                self._refuse_header()

        def connection_lost(self, error: Exception | None) -> None:
            self._forget_header()
            super().connection_lost(error)

        def _await_header(self) -> None:
            self.header_timer = self.loop.call_later(limits.body_time, self.transport.abort)

        def _forget_header(self) -> None:
            self.header_bytes = 0
            if self.header_timer is not None:
                self.header_timer.cancel()
                self.header_timer = None

        def _refuse_header(self) -> None:
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()

    return Guarded


_FRONTS: dict[str, Callable[[HttpServer, socket.socket], Front]] = {"granian": Granian, "uvicorn": Uvicorn}


# --- several workers ---------------------------------------------------------------------------------------------------


def _worker(app: Any, host: str, listener: socket.socket, server: ServerName, grace: float, parent: Any = None) -> None:
    over = threading.Event()

    async def work() -> None:
        stop = asyncio.Event()
        if parent is not None:
            _stop_with(parent, stop)
        await serve_until(_made(app, host), listener, server=server, grace=grace, stop=stop)
        threading.Thread(target=_leave, args=(over,), daemon=True).start()

    try:
        asyncio.run(work())
    finally:
        over.set()


def _forked(app: Any, host: str, listeners: list[socket.socket], server: ServerName, grace: float, place: int) -> None:
    from multiprocessing import parent_process

    _worker(app, host, listeners[place], server, grace, parent_process())


def _stop_with(parent: Any, stop: asyncio.Event) -> None:
    """A parent that was killed tells its workers nothing: they would hold the address for ever."""
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(parent.sentinel)
        stop.set()

    loop.add_reader(parent.sentinel, ended)


def _leave(over: threading.Event) -> None:
    """Nobody can end a thread, or a handler that does not heed its cancellation: the process goes, and they go with it. The
    application is closed, so the ledger knows of their commands."""
    if not over.wait(LAST):
        logger.error("stopping with handlers at work that do not end")
        logging.shutdown()
        os._exit(0)


class _Workers:
    """Copies of this process, each at its place with its own socket."""

    def __init__(self, work: Callable[[int], None], listeners: list[socket.socket], grace: float) -> None:
        from multiprocessing import get_all_start_methods, get_context

        if "fork" not in get_all_start_methods():
            raise UsageError(f"workers={len(listeners)} is not possible.", "several workers need fork", "use workers=1")
        self._context: Any = get_context("fork")
        self._work = work
        self._listeners = listeners
        self._grace = grace
        self._stopping = False
        self._workers: dict[BaseProcess, tuple[int, float]] = {}  # place and start

    def run(self) -> None:
        before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        try:
            for place in range(len(self._listeners)):
                self._start(place)
            failed = self._watch()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)
        if failed:
            raise WirecallError("a worker ended right after its start; its own message is above")

    def _start(self, place: int) -> None:
        worker = self._context.Process(target=self._begin, args=(place,))
        worker.start()
        self._workers[worker] = place, time.monotonic()

    def _begin(self, place: int) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        for other, listener in enumerate(self._listeners):
            if other != place:
                listener.close()
        self._work(place)

    def _ask(self, *_: object) -> None:
        self._stopping = True

    def _watch(self) -> bool:
        """Until somebody asks to stop; True if a worker cannot live."""
        from multiprocessing.connection import wait

        while not self._stopping:
            wait([worker.sentinel for worker in self._workers], timeout=0.2)
            for worker, (place, since) in list(self._workers.items()):
                if worker.is_alive() or self._stopping:
                    continue
                del self._workers[worker]
                if time.monotonic() - since < SHORT_LIFE and worker.exitcode != -signal.SIGKILL:
                    return True
                logger.error("worker %s ended with %s; starting another", worker.pid, worker.exitcode)
                self._start(place)
        return False

    def _end(self) -> None:
        """The grace time is the workers' own; who is still there a little later is killed."""
        for listener in self._listeners:
            listener.close()  # or the kernel would keep new connections waiting for workers that are leaving
        for worker in self._workers:
            worker.terminate()
        deadline = time.monotonic() + self._grace + 1
        for worker in self._workers:
            worker.join(max(deadline - time.monotonic(), 0))
            if worker.is_alive():
                worker.kill()
                worker.join()
