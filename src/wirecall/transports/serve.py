"""Serving an HTTP application under granian or uvicorn, and stopping it in time.

    bind      one socket keeps the port, so that a taken port is reported in words
    startup   `HttpServer.open`, not the lifespan of the servers, so that the order is the same under both
    serve     until SIGTERM or SIGINT; inside a loop of the user's (`serve_here`) until its task is cancelled
    stop      no new connections; streams are asked to end
    cut       every connection that is left after three quarters of the grace time
    shutdown  `HttpServer.aclose`: the application closes its resources

One worker runs in this process and shares its objects; several are copies of it (`workers`).

Both servers are driven from here because neither stops in time by itself: uvicorn waits for every open stream before it
tells the application to stop, and granian waits for open streams without an end. Neither cuts a client that does not read:
the kernel does that (TCP_USER_TIMEOUT).
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
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from wirecall.errors import UsageError
from wirecall.logs import logger
from wirecall.protocol.messages import Limits
from wirecall.transports.http_server import GRACE, HttpServer
from wirecall.transports.request import FILES, Receive, Scope, Send, open_sockets
from wirecall.transports.workers import SIGNALS, Workers

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

ServerName: TypeAlias = Literal["granian", "granian-asgi", "uvicorn"]
Serving: TypeAlias = Callable[[], None]  # called once, when connections are accepted

BACKLOG = 1024
# Seconds after the application is closed in which threads and handlers that ignore their cancellation can end.
LAST = 1.0


def _print(address: str, how: str) -> None:
    print(f"Serving with {how}. Listening on {address}", file=sys.stderr, flush=True)


def serve(
    app: "HttpServer | Callable[[], HttpServer]",
    host: str = "127.0.0.1",
    port: int = 8420,
    *,
    server: ServerName = "granian",
    workers: int = 1,
    grace: float = GRACE,
    listening: Callable[[str, str], None] = _print,
) -> None:
    """Serve until SIGTERM or SIGINT, then stop within `grace` seconds and return. Port 0 takes a free one.

    `app` is the application, or a function that makes it, called in each worker. `listening` gets the address, and
    the names of the server, its interface and its event loop.
    """
    how = _described(server, loop_name())
    if workers < 1:
        raise UsageError(f"workers must be at least 1, got {workers}.")
    with bind(host, port) as kept:
        address, number = kept.getsockname()[:2]
        url = _url(kept)
        if workers == 1:
            _work(app, host, kept, server, grace, lambda: listening(url, how))
            return

        def work(serving: Serving) -> None:
            from multiprocessing import parent_process

            # Each worker has a socket of its own, and the kernel deals connections out evenly. From one socket that all
            # workers share, the worker that wakes first takes every connection that waits: 64 at once went to one of four.
            with bind(address, number, again=True) as own:
                _work(app, host, own, server, grace, serving, parent_process())

        Workers(work, workers, grace, lambda: listening(url, how)).run()


async def serve_here(
    app: HttpServer,
    host: str,
    port: int,
    *,
    server: ServerName,
    grace: float,
    listening: Callable[[str, str], None] = _print,
) -> None:
    """Serve inside a running event loop until the task is cancelled, then stop within `grace` seconds."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    how = _described(server, type(loop).__module__.partition(".")[0])
    with bind(host, port) as kept:
        app.allow_host(host)
        serving = partial(listening, _url(kept), how)
        # A task of its own: a cancelled task could not stop in peace, since it must not wait any more.
        work = loop.create_task(
            serve_until(app, kept, server=server, grace=grace, stop=stop, serving=serving, signals=False)
        )
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await work  # a second cancel ends the stop as well
            raise
        finally:
            app.abandon()  # else a handler that does not end would stay in the loop, which goes on


def _described(server: ServerName, loop: str) -> str:
    """Return the names of a server, its interface and its event loop. Raises `UsageError` if it cannot serve."""
    if server not in FRONTS:
        raise UsageError(f"server must be one of {', '.join(FRONTS)}, got {server!r}.")
    package = server.partition("-")[0]
    if find_spec(package) is None:
        raise UsageError(f"{package} is not installed.", fix=f"pip install {package}")
    return f"{package} ({'RSGI' if server == 'granian' and FILES else 'ASGI'}, {loop})"


def _url(bound: socket.socket) -> str:
    address, number = bound.getsockname()[:2]
    return f"http://{f'[{address}]' if ':' in address else address}:{number}"


async def serve_until(
    app: HttpServer,
    bound: socket.socket,
    *,
    server: ServerName = "granian",
    grace: float = GRACE,
    stop: asyncio.Event | None = None,
    serving: Serving = lambda: None,
    signals: bool = True,
) -> None:
    """Serve inside a running event loop until a signal, or until `stop` is set. `bound` comes from `bind`."""
    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()

    def ask(number: signal.Signals) -> None:
        if number == signal.SIGINT and stop.is_set():  # the second Ctrl+C: a person does not want to wait
            loop.remove_signal_handler(number)
            signal.raise_signal(number)
        stop.set()

    front = FRONTS[server](app, bound)
    await app.open()
    caught = []
    running = asyncio.create_task(front.serve(serving))
    try:
        # Not in a thread, nor on Windows, where Ctrl+C ends asyncio.run by an exception.
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            for number in SIGNALS if signals else ():
                loop.add_signal_handler(number, ask, number)
                caught.append(number)
        asked = asyncio.create_task(stop.wait())
        await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        app.stop(grace)
        front.stop()
        # HttpServer cuts its streams at three quarters. A moment later the connections that are left have no answer coming.
        for patience, harder in ((grace * 0.75 + 0.1, front.cut), (grace * 0.1, running.cancel)):
            await asyncio.wait({running}, timeout=patience)
            if running.done():
                break
            harder()
        await asyncio.wait({running}, timeout=grace * 0.05)
        if running.done() and not running.cancelled() and (error := running.exception()) is not None:
            raise error
    except asyncio.CancelledError:  # stop at once
        app.stop(grace)
        front.stop()
        for _ in range(2):  # a client that was cut may come again before the server takes no more connections
            app.abandon()
            front.cut()
            await asyncio.wait({running}, timeout=LAST / 2)
        raise
    finally:
        for number in caught:
            loop.remove_signal_handler(number)
        running.cancel()
        await app.aclose()


def _work(
    app: "HttpServer | Callable[[], HttpServer]",
    host: str,
    bound: socket.socket,
    server: ServerName,
    grace: float,
    serving: Serving,
    parent: "BaseProcess | None" = None,
) -> None:
    """Serve in this process."""
    over = threading.Event()

    def leave(error: Exception | None) -> None:
        # A thread, or a handler or a lifespan that ignores its cancellation, cannot be ended: the process ends, and they end
        # with it. The application is closed, so the ledger knows about their commands.
        if not over.wait(LAST):
            logger.error("%s", error or "stopping with handlers at work that do not end")
            logging.shutdown()
            os._exit(1 if error else 0)

    async def work() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        if parent is not None:
            # A parent that was killed says nothing to its workers: they would keep the address forever.
            sentinel = parent.sentinel

            def orphaned() -> None:
                loop.remove_reader(sentinel)
                stop.set()

            loop.add_reader(sentinel, orphaned)
        made = app if isinstance(app, HttpServer) else app()
        made.allow_host(host)
        error: Exception | None = None
        try:
            await serve_until(made, bound, server=server, grace=grace, stop=stop, serving=serving)
        except Exception as failure:
            error = failure
            raise
        finally:
            threading.Thread(target=leave, args=(error,), daemon=True).start()

    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(work())
    finally:
        over.set()


def bind(host: str, port: int, *, again: bool = False) -> socket.socket:
    """Return a socket that keeps the address and does not listen yet; UsageError if the address is taken or not ours.

    `again` makes one more socket at an address that is kept already.
    """
    if type(port) is not int or not 0 <= port <= 65535:  # the system would take it modulo 65536
        raise UsageError(f"port must be a number from 0 to 65535, got {port!r}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"Cannot listen on {host}.", str(error), "use an address of this machine") from error
    try:
        if os.name == "posix":  # elsewhere it would let two servers share a port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port and not again:
                # The workers of one server share its port, but two servers must not: a socket that does not share finds out.
                with socket.socket(family, kind, protocol) as alone:
                    alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    alone.bind(address)
                    alone.listen()
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        fix = "use an address of this machine" if error.errno == errno.EADDRNOTAVAIL else "use another port="
        raise UsageError(f"Cannot listen on {host}:{port}.", error.strerror or str(error), fix) from error
    return bound


def loop_name() -> str:
    """Return the name of the loops that `new_loop` makes."""
    return "asyncio" if find_spec("uvloop") is None else "uvloop"


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: uvloop's where it is installed, else asyncio's own."""
    # A server on stdio stays with asyncio's: its handlers of signals (signal.signal) must run whatever the loop does, and
    # uvloop takes Python's wake-up of signals for itself.
    if loop_name() == "asyncio":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _tune(connection: socket.socket, seconds: float) -> None:
    """Set the options of a connection, or of a listening socket, from which connections inherit them."""
    with contextlib.suppress(OSError):  # a connection that has ended
        # Else the second event of a stream waits 40 ms, until the client's kernel has acknowledged the first.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            # The kernel ends a connection that takes no byte for so long. Measured with a client that never reads: under
            # both servers the connection is gone in time, and their buffers with it.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


# --- granian and uvicorn ---------------------------------------------------------------------------------------------


class Granian:
    """granian's embedded server: HTTP in threads of its own, the application in this loop.

    It makes the listening socket itself, beside the one that keeps the port, and has no option for a client that does not
    read, nor a way to end a connection. But its sockets are files of this process.
    """

    def __init__(self, app: HttpServer, bound: socket.socket, *, native: bool = True) -> None:
        from granian.constants import HTTPModes, Interfaces
        from granian.http import HTTP1Settings
        from granian.log import LogLevels
        from granian.server.embed import Server

        self._limits = app.limits
        address, self._port = bound.getsockname()[:2]
        try:
            import resource

            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        except (ImportError, OSError):
            files = BACKLOG
        self._server: Any = Server(
            app,
            address,
            self._port,
            # Without its files, RSGI has no way to wait for a slow client (`request`).
            interface=Interfaces.RSGI if native and FILES else Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backlog=BACKLOG,
            # Connections side by side: all files of the process but a few. The default is the backlog: so many idle
            # connections would keep out all others.
            backpressure=max(files - 64, 64) if 0 < files < 1 << 20 else 1 << 20,
            http1_settings=HTTP1Settings(
                header_read_timeout=int(app.limits.body_time * 1000), max_buffer_size=max(app.limits.header_bytes, 8192) * 2
            ),
            log_level=LogLevels.error,  # it warns about itself, and reports every client that leaves
            log_dictconfig=_GRANIAN_LOG,
        )

    async def serve(self, serving: Serving) -> None:
        before = _threads()
        tuning = asyncio.create_task(self._tune(serving))
        try:
            await self._server.serve()
        finally:
            tuning.cancel()
        # Its threads end a little later. One that calls Python while the interpreter ends would panic.
        for _ in range(200):
            if not _threads() - before:
                break
            await asyncio.sleep(0.005)

    async def _tune(self, serving: Serving) -> None:
        """Wait for the listening socket, and set its options, and those of connections that it has accepted before."""
        found = not FILES
        while not found:
            await asyncio.sleep(0.001)
            for each in self._sockets():
                _tune(each, self._limits.write_time)
                found = found or bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        for each in self._sockets():
            _tune(each, self._limits.write_time)
        serving()

    def stop(self) -> None:
        self._server.stop()

    def cut(self) -> None:
        for each in self._sockets():
            with contextlib.suppress(OSError):  # it is not connected
                each.getpeername()
                each.shutdown(socket.SHUT_RDWR)

    def _sockets(self) -> Iterator[socket.socket]:
        """Yield every socket of this process at the port of the server, open until the next one."""
        for each in open_sockets():
            address = each.getsockname()
            if isinstance(address, tuple) and address[1:2] == (self._port,):
                yield each


# Its own configuration writes to stdout, which belongs to the program.
_GRANIAN_LOG = {
    "handlers": {
        "console": {"formatter": "generic", "class": "logging.StreamHandler", "stream": "ext://sys.stderr"},
        "access": {"formatter": "access", "class": "logging.StreamHandler", "stream": "ext://sys.stderr"},
    }
}


def _threads() -> set[int]:
    """Return the threads of this process that are not Python's, where the system tells."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")} - {each.native_id for each in threading.enumerate()}
    except OSError:
        return set()


class Uvicorn:
    """uvicorn, with httptools where it is installed.

    It waits forever for a header, and holds one of any length with httptools. So each connection is watched: `HeaderLimit`
    hears of its bytes by asyncio's own callbacks, and of its requests where they reach the application.
    """

    def __init__(self, app: HttpServer, bound: socket.socket) -> None:
        import uvicorn

        class Quiet(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:  # signals are caught by `serve_until`
                yield

        self._app = app
        self._bound = bound
        self._connections: dict[tuple[object, ...], HeaderLimit] = {}  # by address and port of the client
        config = uvicorn.Config(
            self._request,
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
            h11_max_incomplete_event_size=2 * app.limits.header_bytes,
        )
        config.load()
        config.http_protocol_class = self._watched(config.http_protocol_class)
        self._server = Quiet(config)

    async def serve(self, serving: Serving) -> None:
        _tune(self._bound, self._app.limits.write_time)
        listener = self._bound.dup()  # uvicorn closes it
        listener.listen(BACKLOG)
        serving()
        await self._server.serve(sockets=[listener])

    def stop(self) -> None:
        self._server.should_exit = True
        self._bound.close()  # uvicorn closes its own: clients that came to this one would wait until the end

    def cut(self) -> None:
        for connection in list(self._connections.values()):
            connection.transport.abort()

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = self._connections[scope["client"]]
        connection.arrived(scope)
        try:
            await self._app(scope, receive, send)
        finally:
            connection.requests -= 1

    def _watched(self, protocol: Any) -> Any:
        """Return uvicorn's protocol, with each connection watched."""
        connections, limits = self._connections, self._app.limits

        class Watched(protocol):  # type: ignore[misc]
            def connection_made(self, transport: asyncio.Transport) -> None:
                super().connection_made(transport)
                self.connection = HeaderLimit(transport, limits)
                self.peer = (transport.get_extra_info("peername") or ())[:2]
                if not self.peer:  # the client left before its connection was accepted
                    transport.abort()
                connections[self.peer] = self.connection

            def data_received(self, data: bytes) -> None:
                super().data_received(data)
                self.connection.received(len(data))

            def connection_lost(self, error: Exception | None) -> None:
                self.connection.forget_header()
                if connections.get(self.peer) is self.connection:  # else another one has come from the same address
                    del connections[self.peer]
                super().connection_lost(error)

            # Callbacks of httptools; h11 has none.

            def on_url(self, url: bytes) -> None:
                self.connection.target += url
                super().on_url(url)

            def on_headers_complete(self) -> None:
                self.connection.targets.append(self.connection.target)
                self.connection.target = b""
                super().on_headers_complete()

        return Watched


class HeaderLimit:
    """Limits the header of the next request on a connection of uvicorn, in bytes and in seconds."""

    def __init__(self, transport: asyncio.Transport, limits: Limits) -> None:
        self.transport = transport
        self.requests = 0  # that the application has, or has not answered yet
        self.target = b""  # of the header that is being read
        self.targets: deque[bytes] = deque()  # of the requests that come next
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._header_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._check()

    def received(self, size: int) -> None:
        """Count bytes, unless they belong to a request that the application has."""
        if not self.requests:
            self._header_bytes += size
            # If these bytes complete a request, the application gets it in the next turn of the loop, before this check.
            self._loop.call_soon(self._check)

    def _check(self) -> None:
        if self.requests or self.transport.is_closing():
            return
        if self._timer is None:
            self._timer = self._loop.call_later(self._limits.body_time, self.transport.abort)
        if self._header_bytes > 2 * self._limits.header_bytes:
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()

    def arrived(self, scope: Scope) -> None:
        """A whole header has come."""
        self.requests += 1
        self.forget_header()
        if self.targets and not (target := self.targets.popleft()).startswith((b"/", b"*")):
            # The absolute form. httptools leaves its host out of the path, where h11 has it, and `HttpServer` looks at it.
            scope["path"] = target.partition(b"?")[0].decode("latin-1")

    def forget_header(self) -> None:
        self._header_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# Both serve until `stop`, which accepts no further connection, and until every connection has ended; `cut` ends them.
FRONTS: dict[str, Callable[[HttpServer, socket.socket], Granian | Uvicorn]] = {
    "granian": Granian,
    "granian-asgi": partial(Granian, native=False),
    "uvicorn": Uvicorn,
}
