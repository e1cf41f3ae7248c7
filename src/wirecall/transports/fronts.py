"""granian and uvicorn, each driven the same way: serve, stop, cut.

Neither is left its own way to stop. uvicorn waits for every open stream before it tells the application that it stops, and
ends with the signal it got; granian waits for open streams without an end. Neither limits how long a header may take to come
under all of its parsers, and neither cuts a client that does not read.
"""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from wirecall.errors import UsageError
from wirecall.protocol.limits import Limits
from wirecall.transports.asgi import HttpServer
from wirecall.transports.listeners import BACKLOG


class Front(Protocol):
    """A server as it is driven here."""

    async def serve(self) -> None: ...
    def stop(self) -> None: ...
    def cut(self) -> None: ...


def check_server(name: str) -> None:
    if name not in FRONTS:
        raise UsageError(f"{name!r} is not a server.", fix=f"use one of {', '.join(FRONTS)}")
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

        def on_headers_complete(self) -> None:  # httptools alone
            super().on_headers_complete()
            if not self.url.startswith((b"/", b"*")) and "path" in self.scope:
                # The absolute form. httptools leaves its host out of the path, where h11 has it; `HttpServer` looks at it.
                self.scope["path"] = self.url.partition(b"?")[0].decode("latin-1")

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


FRONTS: dict[str, Callable[[HttpServer, socket.socket], Front]] = {"granian": Granian, "uvicorn": Uvicorn}
