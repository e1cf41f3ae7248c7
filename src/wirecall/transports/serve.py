"""Serving an ASGI application under granian or uvicorn, and stopping it in time.

    bind      one socket, ours: a dead reader is cut by the kernel, a taken port is told in words
    startup   `HttpServer.open`, not the servers' lifespan, so that the order is the same under both
    serve     until SIGTERM or SIGINT
    stop      no new connections; streams are asked to end
    cut       after three quarters of the grace time, whatever connection is left
    shutdown  `HttpServer.aclose`: the application closes what it has open

One worker runs in this process and shares its objects; several are copies of it (`http_workers`). Why the servers are not
left to stop in their own ways is told in `http_fronts`.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeAlias

from wirecall.errors import UsageError
from wirecall.logs import logger
from wirecall.transports.asgi import GRACE, HttpServer
from wirecall.transports.fronts import FRONTS, Front, check_server
from wirecall.transports.listeners import address_of, bind, cut_dead_readers
from wirecall.transports.workers import SIGNALS, Workers

ServerName: TypeAlias = Literal["granian", "uvicorn"]
Told: TypeAlias = Callable[[str], None]

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
    check_server(server)
    if workers < 1:
        raise UsageError(f"workers={workers} is not possible.", "somebody has to serve", "use workers=1")
    if workers == 1:
        with bind(host, port) as listener:
            listening(address_of(listener))
            _worker(app, host, listener, server, grace)
        return
    # Workers share the port, but not with another server: a socket that is not shared finds that out.
    if port:
        bind(host, port).close()
    with bind(host, port, shared=True, listening=False) as kept:
        address, port = kept.getsockname()[:2]

        def work(serving: Callable[[], None]) -> None:
            from multiprocessing import parent_process

            # A socket of its own, so that the kernel gives no connection to a worker that is not there.
            with bind(address, port, shared=True) as listener:
                _worker(app, host, listener, server, grace, parent_process(), serving)

        Workers(work, workers, grace, lambda: listening(address_of(kept))).run()


async def serve_until(
    app: HttpServer,
    listener: socket.socket,
    *,
    server: ServerName = "granian",
    grace: float = GRACE,
    stop: asyncio.Event | None = None,
    serving: Callable[[], None] = lambda: None,
) -> None:
    """Serve inside a running event loop, until a signal or until `stop` is set. `serving` is called after the startup."""
    stop = stop or asyncio.Event()
    cut_dead_readers(listener, app.limits.write_time)
    front = FRONTS[server](app, listener)
    await app.open()
    try:
        with _signals(stop):
            serving()
            await _run(front, app, stop, grace)
    finally:
        await app.aclose()


async def _run(front: Front, app: HttpServer, stop: asyncio.Event, grace: float) -> None:
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


# --- one worker ------------------------------------------------------------------------------------------------------


def _worker(
    app: Any,
    host: str,
    listener: socket.socket,
    server: ServerName,
    grace: float,
    parent: Any = None,
    serving: Callable[[], None] = lambda: None,
) -> None:
    over = threading.Event()

    async def work() -> None:
        stop = asyncio.Event()
        if parent is not None:
            _stop_with(parent, stop)
        await serve_until(_made(app, host), listener, server=server, grace=grace, stop=stop, serving=serving)
        threading.Thread(target=_leave, args=(over,), daemon=True).start()

    try:
        asyncio.run(work())
    finally:
        over.set()


def _made(app: "HttpServer | Callable[[], HttpServer]", host: str) -> HttpServer:
    made = app if isinstance(app, HttpServer) else app()
    made.allow_host(host)
    return made


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
