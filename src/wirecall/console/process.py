"""The console's process: it reads all workers of one server, and serves the console and `/metrics`.

`Companion` starts it as a child of the server. The child ends when its stdin closes, so it does not
outlive a server that was killed.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from wirecall.console.collect import Collector, open_collector
from wirecall.console.metrics import MetricsListener
from wirecall.console.source import Listener, ListenerSettings
from wirecall.console.tap import Capture, Tap
from wirecall.console.worker import Served, describe, make_folder, remove_folder
from wirecall.errors import UsageError
from wirecall.files import IS_PORTABLE
from wirecall.logs import announce
from wirecall.protocol.messages import JsonObject

if TYPE_CHECKING:
    from wirecall.app import App

LISTENER = "wirecall.console.listener"
# Seconds for the child to end.
PATIENCE = 5.0


class Settings(Struct):
    """What the console's process serves."""

    served: Served
    # None: no console.
    console: ListenerSettings | None = None
    # The port of the console was asked for; otherwise a free one replaces it if it is taken.
    is_port_given: bool = False
    # Where /metrics listens; None: nowhere.
    metrics: tuple[str, int] | None = None
    metrics_token: str | None = None
    # The arguments of the app's audit trail.
    audit: dict[str, Any] | None = None
    # The address of /metrics is still that of the server that this one replaces.
    shares: bool = False
    # The settings in force: name, value and origin of each.
    values: list[JsonObject] = []


class Companion:
    """The console's process, as its server sees it."""

    def __init__(self, settings: Settings, capture: Capture) -> None:
        if IS_PORTABLE:
            raise UsageError(
                "Calls cannot be watched on this system.",
                "it has no Unix sockets for Python's event loop",
                "drop --console and --metrics",
            )
        self._settings = settings
        self._folder = make_folder(settings.served)
        self.tap = Tap(capture, self._folder)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, app: "App") -> None:
        """Watch an app, and start the process."""
        app.configure(tap=self.tap)
        describe(self._settings.served)
        settings = self._settings
        # The app itself may name it, and nothing else.
        settings.audit = app.trail_options
        if settings.console is None and settings.metrics is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "wirecall.console"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        # Not on the command line, which every user can read: there may be a token.
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """End the process, and forget the folder."""
        process = self._process
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        remove_folder(self._folder)


def main() -> None:
    """Run the console's process until stdin closes."""
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=Settings)
    # Ctrl-C reaches the whole group; the server decides when it is over.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        asyncio.run(run(settings))
    except UsageError as error:
        announce(f"There is no console: {error}")
        sys.exit(1)


async def run(settings: Settings) -> None:
    """Serve until stdin closes."""
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(0, 1024):
            loop.remove_reader(0)
            closed.set()

    loop.add_reader(0, read)
    collector = open_collector(
        settings.served,
        readonly=settings.console is not None and settings.console.readonly,
        audit=settings.audit,
        settings=settings.values,
    )
    await collector.open()
    opened: list[Listener | MetricsListener] = []
    try:
        # Without one of them, the other is served.
        if settings.metrics is not None:
            with _without("/metrics", "--metrics HOST:PORT"):
                opened.append(await _open_metrics(collector, settings, *settings.metrics))
        if settings.console is not None:
            with _without("console", "--console-port PORT"):
                listener = await _open_console(collector, settings, settings.console)
                if listener is not None:
                    opened.append(listener)
                    settings.served.console = listener.url
                    announce(f"Console: {listener.link()}")
        # The server may be ending already.
        with suppress(FileNotFoundError):
            describe(settings.served)
        if opened:
            await closed.wait()
    finally:
        await collector.aclose()
        for each in opened:
            await each.aclose()


@contextmanager
def _without(what: str, option: str) -> Iterator[None]:
    """Say why something is not served; the calls are served nevertheless."""
    try:
        yield
    except UsageError as error:
        why = str(error).replace("use another port=", f"name another port: {option}")
        announce(f"There is no {what}: {why}")


async def _open_metrics(
    collector: Collector, settings: Settings, host: str, port: int
) -> MetricsListener:
    metrics = MetricsListener(collector, host, port, settings.metrics_token, shares=settings.shares)
    await metrics.open()
    settings.served.metrics = metrics.url
    announce(f"Metrics: {metrics.url}")
    return metrics


async def _open_console(
    collector: Collector, settings: Settings, wanted: ListenerSettings
) -> Listener | None:
    """Open the console, if its pages are installed."""
    if find_spec(LISTENER) is None:
        announce("Watch the calls: wirecall watch")
        return None
    from importlib import import_module

    open_listener = import_module(LISTENER).open_listener
    try:
        listener: Listener = await open_listener(collector, wanted)
    except UsageError:
        if settings.is_port_given or wanted.port == 0:
            raise
        free = msgspec.structs.replace(wanted, port=0)
        listener = await open_listener(collector, free)
    return listener


def served_now(name: str, target: str, address: str) -> Served:
    """Describe the server of this process."""
    return Served(name, os.getpid(), time.time(), target, address)
