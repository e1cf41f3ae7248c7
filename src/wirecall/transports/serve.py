"""Serving an HTTP application under granian or uvicorn, and stopping it in time.

    bind      one socket reserves the port, so that a taken port gives a clear error
    startup   `HttpServer.open`, not the lifespan of the servers: the order is the same under both
    serve     until SIGTERM, SIGINT or SIGHUP; in the user's loop (`serve_here`) until its task is
              cancelled
    drain     after SIGTERM: not ready, but serving (`leaving`)
    stop      accept no new connections; ask streams to end
    cut       every remaining connection after three quarters of the grace time
    shutdown  `HttpServer.aclose`: the application closes its resources

One worker runs in this process and shares its objects; several are copies of it (`workers`).

This module drives both servers because neither stops in time alone: uvicorn waits for every open
stream before it notifies the application, and granian waits for open streams indefinitely. Neither
cuts a client that does not read: the kernel does that (TCP_USER_TIMEOUT).
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from wirecall.errors import UsageError
from wirecall.limits import Limits
from wirecall.logs import announce, is_json, logger
from wirecall.transports.asgi import Receive, Scope, Send
from wirecall.transports.headers import is_loopback
from wirecall.transports.http_server import GRACE, HttpServer
from wirecall.transports.leaving import LATEST, REPLACED, SETTLE, Signals, time_to_stop
from wirecall.transports.tcp import FILES, ignore_handshakes, is_awaited, open_sockets
from wirecall.transports.websocket import PING_EVERY
from wirecall.transports.workers import STOPPING, Leave, Orders, Workers

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from wirecall.transports.succession import Succession


class Certificate(NamedTuple):
    """The files with which a server speaks TLS: its certificates, its own first, and its key."""

    file: str
    key: str

    def check(self) -> None:
        """UsageError if the files cannot be used."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.file, self.key)
        except OSError as error:
            raise UsageError(
                f"The certificate {self.file} cannot be used with the key {self.key}.",
                str(error.strerror or error),
                "name the files of one certificate and its key, in PEM, which this user can read",
            ) from None


ServerName: TypeAlias = Literal["granian", "granian-asgi", "uvicorn"]
# Called once, when connections are accepted.
Serving: TypeAlias = Callable[[], None]

BACKLOG = 1024
# Seconds that threads and handlers that ignore their cancellation have to end after the application
# is closed.
LAST = 1.0


def print_address(address: str, how: str) -> None:
    """Print the first line of a server."""
    announce(f"Serving with {how}. Listening on {address}")


def serve(
    app: "HttpServer | Callable[[], HttpServer]",
    host: str = "127.0.0.1",
    port: int = 8420,
    *,
    server: ServerName = "granian",
    workers: int = 1,
    grace: float = GRACE,
    drain: float = 0.0,
    certificate: Certificate | None = None,
    listening: Callable[[str, str], None] = print_address,
    succession: "Succession | None" = None,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then stop within `grace` seconds and return.

    After SIGTERM it serves for `drain` more seconds, and is not ready. Port 0 takes a free one.
    With a `succession`, SIGHUP replaces this process by a new one.

    `app` is the application, or a function that makes it, called in each worker. `listening`
    receives the address, and the names of the server, its interface and its event loop.
    """
    how = _described(server, loop_name())
    if workers < 1:
        raise UsageError(f"workers must be at least 1, got {workers}.")
    predecessor = None
    if succession is not None:
        predecessor = succession.predecessor
        succession.plan.patience = time_to_stop(drain, grace)
        port = succession.plan.handover.port or port
    if certificate is not None:
        certificate.check()
    work_here = partial(
        _work, app, host, server=server, grace=grace, drain=drain, certificate=certificate
    )
    with bind(host, port, again=predecessor is not None) as kept:
        address, number = kept.getsockname()[:2]
        url = _url(kept, "https" if certificate else "http")

        def are_serving() -> None:
            listening(url, how)
            if succession is not None:
                succession.serving(number)

        if workers == 1:
            work_here(kept, serving=are_serving, succession=succession)
            return

        def work(serving: Serving, orders: Orders) -> None:
            from multiprocessing import parent_process

            # Each worker has its own socket, and the kernel distributes connections evenly. On one
            # socket that all workers share, the worker that wakes first accepts every pending
            # connection: 64 at once went to one of four.
            with bind(address, number, again=True) as own:
                work_here(own, serving=serving, parent=parent_process(), orders=orders)

        Workers(work, workers, time_to_stop(drain, grace), are_serving, succession).run()


async def serve_here(
    app: HttpServer,
    host: str,
    port: int,
    *,
    server: ServerName,
    grace: float,
    listening: Callable[[str, str], None] = print_address,
) -> None:
    """Serve inside a running event loop until the task is cancelled.

    Then stop within `grace` seconds.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    how = _described(server, type(loop).__module__.partition(".")[0])
    with bind(host, port) as kept:
        app.allow_host(host)
        serving = partial(listening, _url(kept), how)
        # A separate task: a cancelled task cannot stop gracefully, because it must not wait any
        # more.
        work = loop.create_task(
            serve_until(
                app, kept, server=server, grace=grace, stop=stop, serving=serving, signals=False
            )
        )
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            stop.set()
            await work  # a second cancel aborts the shutdown
            raise
        finally:
            # Else a handler that does not end would stay in the loop, which continues.
            app.abandon()


def _described(server: ServerName, loop: str) -> str:
    """Return the names of a server, its interface and its event loop.

    Raises `UsageError` if it cannot serve.
    """
    if server not in FRONTS:
        raise UsageError(f"server must be one of {', '.join(FRONTS)}, got {server!r}.")
    package = server.partition("-")[0]
    if find_spec(package) is None:
        raise UsageError(f"{package} is not installed.", fix=f"pip install {package}")
    interface = "ASGI"
    if server == "granian" and FILES:
        interface = "RSGI"
    return f"{package} ({interface}, {loop})"


def _url(bound: socket.socket, scheme: str = "http") -> str:
    host, port = bound.getsockname()[:2]
    if ":" in host:
        host = f"[{host}]"
    return f"{scheme}://{host}:{port}"


async def serve_until(
    app: HttpServer,
    bound: socket.socket,
    *,
    server: ServerName = "granian",
    grace: float = GRACE,
    drain: float = 0.0,
    certificate: Certificate | None = None,
    stop: asyncio.Event | None = None,
    serving: Serving = lambda: None,
    signals: bool = True,
    orders: Orders | None = None,
    succession: "Succession | None" = None,
) -> None:
    """Serve inside a running event loop until a signal, or until `stop` is set.

    `bound` comes from `bind`. A worker has the `orders` of its parent.
    """
    stop = stop or asyncio.Event()
    app.is_loopback = is_loopback(bound.getsockname()[0])
    front = FRONTS[server](app, bound, certificate)
    await app.open()
    caught = Signals(stop, orders)
    running = asyncio.create_task(front.serve(serving))
    try:
        if signals:
            caught.catch()
        if succession is not None:
            succession.follow(caught)
        asked = asyncio.create_task(stop.wait())
        await asyncio.wait({running, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        await _drain(app, front, running, caught, drain)
        await _stop_in_time(app, front, running, grace)
        if running.done() and not running.cancelled():
            running.result()  # it raises
    except asyncio.CancelledError:  # stop at once
        app.stop(grace)
        front.stop()
        for _ in range(2):  # a client that was cut may reconnect before the server stops accepting
            app.abandon()
            front.cut()
            await asyncio.wait({running}, timeout=LAST / 2)
        raise
    finally:
        is_replaced = succession is not None and succession.is_replaced
        if not is_replaced:  # else these signals are meant for the successor
            caught.release(STOPPING)
        running.cancel()
        await app.aclose()
        # A closed terminal sends SIGHUP repeatedly, even while the application closes.
        if succession is not None and is_replaced:
            succession.hold(caught.release)
        else:
            caught.release()


async def _stop_in_time(
    app: HttpServer, front: "Granian | Uvicorn", running: "asyncio.Task[None]", grace: float
) -> None:
    """Stop a server, and ever harder as its grace time passes."""
    app.stop(grace)
    # HttpServer cuts its streams at three quarters. A moment later, when their last records are
    # written, no remaining connection will get an answer.
    moment = max(0.1, grace * 0.05)
    first = grace * 0.75 + moment
    if front.drops_sockets:
        first -= await app.sockets_closed(first)
    front.stop()
    for patience, harder in ((first, front.cut), (grace * 0.1, running.cancel)):
        await asyncio.wait({running}, timeout=patience)
        if running.done():
            break
        harder()
    await asyncio.wait({running}, timeout=grace * 0.05)


async def _drain(
    app: HttpServer,
    front: "Granian | Uvicorn",
    running: "asyncio.Task[None]",
    signals: Signals,
    seconds: float,
) -> None:
    """Send clients elsewhere for some seconds, and then take no more handshakes."""
    is_replaced = signals.leave is Leave.REPLACED
    if is_replaced:
        seconds = REPLACED
    if signals.leave is Leave.STOP or seconds == 0:
        return
    app.drain(is_replaced=is_replaced)
    hurried = asyncio.create_task(signals.hurried.wait())
    await asyncio.wait({running, hurried}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    # A connection that a listener has not accepted yet is reset when the listener closes. So it
    # gets no new ones for a moment: their clients knock again, and meet another process.
    for each in front.listeners():
        ignore_handshakes(each)
    await _settle(front, running)


async def _settle(front: "Granian | Uvicorn", running: "asyncio.Task[None]") -> None:
    """Wait until no connection has a request that the server has not read, for some seconds.

    A busy machine delivers it later than the handshake.
    """
    loop = asyncio.get_running_loop()
    latest = loop.time() + LATEST
    await asyncio.wait({running}, timeout=SETTLE)
    while not running.done() and loop.time() < latest:
        if not any(is_awaited(each) for each in front.sockets()):
            return
        await asyncio.wait({running}, timeout=SETTLE)


def _work(
    app: "HttpServer | Callable[[], HttpServer]",
    host: str,
    bound: socket.socket,
    *,
    server: ServerName,
    grace: float,
    drain: float,
    certificate: Certificate | None,
    serving: Serving,
    parent: "BaseProcess | None" = None,
    orders: Orders | None = None,
    succession: "Succession | None" = None,
) -> None:
    """Serve in this process."""
    over = threading.Event()

    def leave(error: Exception | None) -> None:
        # A thread, or a handler or a lifespan that ignores its cancellation, cannot be stopped: the
        # process exits, and they end with it. The application is closed, so the ledger knows about
        # their commands.
        if not over.wait(LAST):
            logger.error("%s", error or "stopping with handlers at work that do not end")
            if succession is not None:
                succession.keep()
            logging.shutdown()
            os._exit(int(error is not None))

    async def work() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        if parent is not None:
            # A parent that was killed does not notify its workers: they would keep the address
            # forever.
            sentinel = parent.sentinel

            def orphaned() -> None:
                loop.remove_reader(sentinel)
                stop.set()

            loop.add_reader(sentinel, orphaned)
        made = app
        if not isinstance(made, HttpServer):
            made = made()
        made.allow_host(host)
        error: Exception | None = None
        try:
            await serve_until(
                made,
                bound,
                server=server,
                grace=grace,
                drain=drain,
                certificate=certificate,
                stop=stop,
                serving=serving,
                orders=orders,
                succession=succession,
            )
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
    """Return a socket that reserves the address without listening.

    UsageError if the address is taken, or is not one of this machine. `again` makes another socket
    for an address that is already reserved.
    """
    if type(port) is not int or not 0 <= port <= 65535:  # the system would take it modulo 65536
        raise UsageError(f"port must be a number from 0 to 65535, got {port!r}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(
            f"Cannot listen on {host}.", str(error), "use an address of this machine"
        ) from error
    try:
        if os.name == "posix":  # on other systems it would let two servers share a port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if port and not again:
                # The workers of one server share its port, but two servers must not: a socket that
                # does not share detects it.
                with socket.socket(family, kind, protocol) as alone:
                    alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    alone.bind(address)
                    alone.listen()
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        fix = "use another port="
        if error.errno == errno.EADDRNOTAVAIL:
            fix = "use an address of this machine"
        raise UsageError(
            f"Cannot listen on {host}:{port}.", error.strerror or str(error), fix
        ) from error
    return bound


def loop_name() -> str:
    """Return the name of the loops that `new_loop` makes."""
    if find_spec("uvloop") is None:
        return "asyncio"
    return "uvloop"


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: uvloop's if it is installed, else asyncio's."""
    # A server on stdio uses asyncio's: its signal handlers (signal.signal) must run whatever the
    # user's handlers do, and uvloop takes over Python's signal wakeup. `wrap` has no such handlers.
    if loop_name() == "asyncio":
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


def _tune(connection: socket.socket, seconds: float) -> None:
    """Set the options of a connection, or of a listening socket, whose connections inherit them."""
    with contextlib.suppress(OSError):  # a connection that has ended
        # Else the second event of a stream waits 40 ms, until the client's kernel has acknowledged
        # the first.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":
            # The kernel ends a connection that takes no byte for this long. Measured with a client
            # that never reads: under both servers the connection ends in time, and their buffers
            # are freed.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))


# --- granian and uvicorn --------------------------------------------------------------------------


class Granian:
    """granian's embedded server: HTTP runs in its own threads, the application in this loop.

    It makes the listening socket itself, beside the one that reserves the port. It has no option
    for a client that does not read, and cannot end a connection. But its sockets are files of this
    process.
    """

    # It does not wait for open WebSockets when it stops.
    drops_sockets = True

    def __init__(
        self,
        app: HttpServer,
        bound: socket.socket,
        certificate: Certificate | None = None,
        *,
        native: bool = True,
    ) -> None:
        from granian.constants import HTTPModes, Interfaces, SSLProtocols
        from granian.http import HTTP1Settings
        from granian.log import LogLevels
        from granian.server.embed import Server

        self._limits = app.limits
        address, self._port = bound.getsockname()[:2]
        interface = Interfaces.ASGINL
        # Without the list of its files, RSGI cannot wait for a slow client (`rsgi`).
        if native and FILES:
            interface = Interfaces.RSGI
        tls: dict[str, Any] = {}
        if certificate is not None:
            tls = {
                "ssl_cert": Path(certificate.file),
                "ssl_key": Path(certificate.key),
                "ssl_protocol_min": SSLProtocols.tls12,
            }
        log = _GRANIAN_LOG
        if is_json():
            log = _GRANIAN_LOG | _GRANIAN_JSON
        self._server: Any = Server(
            app,
            address,
            self._port,
            interface=interface,
            http=HTTPModes.http1,
            backlog=BACKLOG,
            backpressure=_max_connections(),
            http1_settings=HTTP1Settings(
                header_read_timeout=int(app.limits.body_time * 1000),
                max_buffer_size=max(app.limits.header_bytes, 8192) * 2,
            ),
            # Else it warns about itself, and reports every client that leaves.
            log_level=LogLevels.error,
            log_dictconfig=log,
            **tls,
        )

    async def serve(self, serving: Serving) -> None:
        before = _threads()
        tuning = asyncio.create_task(self._tune(serving))
        try:
            await self._server.serve()
        finally:
            tuning.cancel()
        # Its threads end a little later. One that calls Python while the interpreter shuts down
        # would panic.
        for _ in range(200):
            if not _threads() - before:
                break
            await asyncio.sleep(0.005)

    async def _tune(self, serving: Serving) -> None:
        """Wait for the listening socket, then set its options.

        Connections that were accepted before get them as well.
        """
        found = not FILES
        while not found:
            await asyncio.sleep(0.001)
            found = any(True for _ in self.listeners())
        for each in self.sockets():
            _tune(each, self._limits.write_time)
        serving()

    def listeners(self) -> Iterator[socket.socket]:
        """Yield the sockets that accept connections, open until the next one."""
        for each in self.sockets():
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield each

    def stop(self) -> None:
        self._server.stop()

    def cut(self) -> None:
        for each in self.sockets():
            with contextlib.suppress(OSError):  # it is not connected
                each.getpeername()
                each.shutdown(socket.SHUT_RDWR)

    def sockets(self) -> Iterator[socket.socket]:
        """Yield its sockets, those of connections too, open until the next one."""
        return _sockets_at(self._port)


def _sockets_at(port: int) -> Iterator[socket.socket]:
    """Yield every socket of this process at a port, open until the next one."""
    for each in open_sockets():
        address = each.getsockname()
        if isinstance(address, tuple) and address[1:2] == (port,):
            yield each


def _max_connections() -> int:
    """Return how many connections granian may hold open: all files of the process but a few.

    Its default is the backlog: so many idle connections would keep out all others.
    """
    most = 1 << 20
    try:
        import resource

        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except (ImportError, OSError):
        files = BACKLOG
    if 0 < files < most:
        return max(files - 64, 64)
    return most


# Its own configuration writes to stdout, which belongs to the program.
_GRANIAN_LOG: dict[str, Any] = {
    "handlers": {
        "console": {
            "formatter": "generic",
            "class": "logging.StreamHandler",
            "stream": "ext://sys.stderr",
        },
        "access": {
            "formatter": "access",
            "class": "logging.StreamHandler",
            "stream": "ext://sys.stderr",
        },
    }
}


_GRANIAN_JSON = {
    "formatters": {name: {"()": "wirecall.logs.JsonFormatter"} for name in ("generic", "access")}
}


def _threads() -> set[int]:
    """Return the threads of this process that are not Python's, if the system reports them."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")} - {
            each.native_id for each in threading.enumerate()
        }
    except OSError:
        return set()


class Uvicorn:
    """uvicorn, with httptools if it is installed.

    It waits forever for a header, and with httptools it buffers a header of any length. So each
    connection is watched: `HeaderLimit` learns of its bytes from asyncio's own callbacks, and of
    its requests when they reach the application.
    """

    drops_sockets = False

    def __init__(
        self, app: HttpServer, bound: socket.socket, certificate: Certificate | None = None
    ) -> None:
        import uvicorn

        class Quiet(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:  # `serve_until` catches signals
                yield

        self._app = app
        self._bound = bound
        # By address and port of the client.
        self._connections: dict[tuple[object, ...], HeaderLimit] = {}
        tls: dict[str, Any] = {}
        if certificate is not None:
            tls = {"ssl_certfile": certificate.file, "ssl_keyfile": certificate.key}
        config = uvicorn.Config(
            self._request,
            loop="asyncio",
            ws="auto",
            ws_max_size=app.limits.bytes_in,
            ws_ping_interval=PING_EVERY,
            ws_ping_timeout=PING_EVERY,
            ws_per_message_deflate=False,
            lifespan="off",
            interface="asgi3",
            backlog=BACKLOG,
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=2 * app.limits.header_bytes,
            **tls,
        )
        config.load()
        config.http_protocol_class = self._watched(config.http_protocol_class)
        if config.ws_protocol_class is not None:  # a package for WebSockets is installed
            config.ws_protocol_class = self._draining(config.ws_protocol_class)
        self._server = Quiet(config)

    async def serve(self, serving: Serving) -> None:
        _tune(self._bound, self._app.limits.write_time)
        listener = self._bound.dup()  # uvicorn closes it
        listener.listen(BACKLOG)
        serving()
        await self._server.serve(sockets=[listener])

    def listeners(self) -> Iterator[socket.socket]:
        """Yield the socket that accepts connections."""
        yield self._bound

    def sockets(self) -> Iterator[socket.socket]:
        """Yield its sockets, those of connections too, open until the next one."""
        return _sockets_at(self._bound.getsockname()[1])

    def stop(self) -> None:
        self._server.should_exit = True
        # Uvicorn closes its own: clients that connect here would wait until the end.
        self._bound.close()

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
        connections = self._connections
        limits = self._app.limits

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
                # Else the same address has connected again.
                if connections.get(self.peer) is self.connection:
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

    def _draining(self, protocol: Any) -> Any:
        """Return uvicorn's protocol of WebSockets, which the application closes when it stops.

        uvicorn itself would end them before the calls in flight are answered.
        """
        connections = self._connections

        class Draining(protocol):  # type: ignore[misc]
            def shutdown(self) -> None:
                """Leave the connection to the application."""

            def connection_lost(self, error: Exception | None) -> None:
                peer = (self.transport.get_extra_info("peername") or ())[:2]
                known = connections.get(peer)
                if known is not None and known.transport is self.transport:
                    known.forget_header()
                    del connections[peer]
                super().connection_lost(error)

        return Draining


class HeaderLimit:
    """Limits the header of the next request on a connection of uvicorn, in bytes and in seconds."""

    def __init__(self, transport: asyncio.Transport, limits: Limits) -> None:
        self.transport = transport
        # The requests that the application has not answered yet.
        self.requests = 0
        # The target of the header that is being read.
        self.target = b""
        # The targets of the next requests.
        self.targets: deque[bytes] = deque()
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._header_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._check()

    def received(self, size: int) -> None:
        """Count bytes, unless they belong to a request that the application has."""
        if not self.requests:
            self._header_bytes += size
            # If these bytes complete a request, the application gets it in the next turn of the
            # loop, before this check.
            self._loop.call_soon(self._check)

    def _check(self) -> None:
        if self.requests or self.transport.is_closing():
            return
        if self._timer is None:
            self._timer = self._loop.call_later(self._limits.body_time, self.transport.abort)
        if self._header_bytes > 2 * self._limits.header_bytes:
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
                b"content-length: 0\r\nconnection: close\r\n\r\n"
            )
            self.transport.close()

    def arrived(self, scope: Scope) -> None:
        """Note that a whole header has arrived."""
        self.requests += 1
        self.forget_header()
        if self.targets and not (target := self.targets.popleft()).startswith((b"/", b"*")):
            # The absolute form. httptools omits its host from the path, h11 includes it, and
            # `HttpServer` checks it.
            scope["path"] = target.partition(b"?")[0].decode("latin-1")

    def forget_header(self) -> None:
        self._header_bytes = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


# Both serve until `stop`, which stops accepting, and until every connection has ended; `cut` ends
# them.
FRONTS: dict[str, Callable[[HttpServer, socket.socket, Certificate | None], Granian | Uvicorn]] = {
    "granian": Granian,
    "granian-asgi": partial(Granian, native=False),
    "uvicorn": Uvicorn,
}
