"""`wirecall serve`: an app from a file, over HTTP or on stdio; `wirecall dev`: the same, restarted when a file changes.

Flags win over wirecall.toml, and that over the app's own settings. The process of `dev` watches; the server is its child,
`wirecall serve --log text`. A child that ends by itself (a syntax error, a port in use) has printed the reason; the next
change starts another.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from msgspec import Struct

from wirecall.cli.failures import CliError, Exit, Unreachable, failure_of, no_such
from wirecall.cli.ledger import check_ledger, ledger_option
from wirecall.cli.targets import Target, configured, duration, optional_target_argument, parse, serve_settings
from wirecall.config import SETTINGS
from wirecall.errors import UsageError
from wirecall.protocol.messages import Limits

DEFAULTS = {place[7:]: setting.default for place, setting in SETTINGS.items() if place.startswith("server.")}
ADDRESS = DEFAULTS["http"]
Log = Literal["off", "text", "json"]


class Serving(Struct, frozen=True, kw_only=True):
    """How an app is served."""

    app: str | None
    http: str
    workers: int
    server: Literal["granian", "granian-asgi", "uvicorn"]
    grace: float
    hosts: Sequence[str] | None
    origins: Sequence[str] | None
    limits: dict[str, float]
    single_user: bool = False
    ledger: str | None = None
    audit: str | None = None
    auth: dict[str, Any] | None = None


# Fixes in the words of Python, and the same as flags.
_FLAGS = {
    "another port=": "another port: --http HOST:PORT",
    'use ledger="sqlite:PATH", "redis://..." or "postgresql://..."': "--ledger sqlite:PATH, redis://... or postgresql://...",
}


# The option `--limit NAME=NUMBER`, as the parameter `limits`, a tuple of texts.
limit_option = click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=NUMBER",
    help=f"One of: {', '.join(Limits.__struct_fields__)}. May be repeated.",
)


def read_limits(words: tuple[str, ...]) -> dict[str, float]:
    """Return the limits that `--limit` states."""
    found: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in Limits.__struct_fields__:
            raise no_such("limit", name, Limits.__struct_fields__, "--limit batch=100")
        try:
            found[name] = msgspec.convert(number, Limits.__annotations__[name], strict=False)
        except msgspec.ValidationError:
            what = f"The limit {name} must be a number, got {number!r}."
            raise CliError(what, "", f"--limit {name}={getattr(Limits(), name)}") from None
    return found


@click.command("serve")
@optional_target_argument
@click.option("--http", metavar="HOST:PORT", help=f"Address to listen on. [default: {ADDRESS}]")
@click.option("--stdio", is_flag=True, help="Serve on stdin and stdout instead.")
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Processes that share the address. [default: 1]")
@click.option("--server", type=click.Choice(["granian", "granian-asgi", "uvicorn"]), help="HTTP server. [default: granian]")
@click.option("--grace", type=duration, help=f"Time for calls in flight at the end. [default: {DEFAULTS['grace']:g}s]")
@ledger_option
@click.option("--audit", metavar="file:PATH", help="Audit trail.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="A name of this server: api.example.com.")
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="URL",
    help="A web page that may call: https://app.example.com.",
)
@click.option("--single-user", is_flag=True, default=None, help="All anonymous calls come from one user: recognise retries.")
@limit_option
@click.option("--log", type=click.Choice(["off", "text", "json"]), default="off", help="Log calls on stderr. [default: off]")
@click.option("--dev", is_flag=True, hidden=True)  # `wirecall dev` sets it
def serve_command(target: Target | None, stdio: bool, log: Log, limits: tuple[str, ...], dev: bool, **given: Any) -> None:
    """Serve the app in TARGET, or the one that wirecall.toml names, until SIGTERM or Ctrl-C.

    Over HTTP: JSON-RPC at /rpc, MCP at /mcp, /healthz and /readyz for supervisors. On stdio: both on one pipe.

    \b
    wirecall serve shop.py --http 0.0.0.0:8420 --workers 4 --ledger postgresql://...
    wirecall serve shop.py --stdio
    """
    if stdio and (given["http"] or given["workers"]):
        raise CliError("--stdio serves one client.", "--http and --workers are for HTTP", "drop them, or --stdio")
    how = serving({**given, "limits": read_limits(limits)})
    app = configured((target or named(how)).app(), ledger=how.ledger, audit=how.audit, limits=how.limits)
    app.configure(hosts=how.hosts or (), origins=how.origins or (), single_user=how.single_user or None, dev=dev)
    if how.auth:
        from wirecall.auth import Jwt

        app.configure(auth=Jwt(**how.auth))

    # Problems that would otherwise show only at the first command.
    check_ledger(app.ledger_url)
    if how.audit:
        text = how.audit.removeprefix("file:")
        path = Path(text).absolute()
        place = next(each for each in (path, *path.parents) if each.exists())
        if path.is_dir() or (place != path and not place.is_dir()) or not os.access(place, os.W_OK):
            why = "it is a folder" if path.is_dir() else f"{place} cannot be written to"
            raise CliError(f"The audit trail {text} cannot be written.", why, "--audit file:audit.jsonl", type="audit")

    log_calls(log)
    if stdio:
        app.run("stdio", grace=how.grace)
        return
    host, colon, port = how.http.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise CliError(f"{how.http!r} is not an address.", "expected HOST:PORT, the port up to 65535", f"--http {ADDRESS}")
    host = host.strip("[]") or "127.0.0.1"
    try:
        app.run("http", host=host, port=int(port), server=how.server, workers=how.workers, grace=how.grace)
    except UsageError as error:
        failure = failure_of(error)
        for python, flag in _FLAGS.items():
            failure.next = failure.next.replace(python, flag)
        raise failure from None


def serving(given: dict[str, Any]) -> Serving:
    """Merge flags, wirecall.toml and defaults, in this order."""
    settings = serve_settings()
    limits = {**settings.get("limits", {}), **given.pop("limits", {})}
    stated = {name: value for name, value in given.items() if value not in (None, ())}
    return Serving(**{**DEFAULTS, **settings, **stated, "limits": limits})


def named(how: Serving) -> Target:
    """Return the target that wirecall.toml names."""
    if how.app is None:
        next_step = "name its file: app.py; or write [server] app = ... into wirecall.toml"
        raise CliError("Which app?", "the command line and wirecall.toml name none", next_step)
    return parse(how.app)


class _Readable(logging.Formatter):
    """A line for people: time, outcome, method, duration."""

    def format(self, record: logging.LogRecord) -> str:
        if not hasattr(record, "duration_ms"):
            return super().format(record)
        outcome, code = str(getattr(record, "outcome", "")), getattr(record, "code", None)
        sign = {"ok": "✓", "replayed": "↻"}.get(outcome, "✗")
        shown = f"{outcome} {code}" if code is not None else outcome
        when = self.formatTime(record, "%H:%M:%S")
        return f"{when}  {sign} {record.method:<24} {shown:<16} {record.duration_ms:>9.1f} ms"  # type: ignore[attr-defined]


def log_calls(kind: Log) -> None:
    """Log one record per call on stderr."""
    if kind == "off":
        return
    from wirecall.logs import JsonFormatter, logger

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else _Readable("%(levelname)s  %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a handler of the app on the root logger would print every line again


# --- dev ------------------------------------------------------------------------------------------------------------

# Files are polled: for a few hundred that costs less than file system events, and works on every file system.
PAUSE = 0.25  # seconds between two polls
RESTART = 3.0  # seconds for the calls in flight when the server restarts
MOST = 5000  # files that are watched
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


@click.command("dev")
@optional_target_argument
@click.option("--http", metavar="HOST:PORT", help=f"Address to listen on. [default: {ADDRESS}]")
@ledger_option
def dev_command(target: Target | None, http: str | None, ledger: str | None) -> int:
    """Serve the app in TARGET with a line per call, and restart when a Python file beside it changes.

    It warns of plain functions that block the event loop for more than 100 ms.

    \b
    wirecall dev shop.py
    """
    how = serving({"http": http, "ledger": ledger})
    target = target or named(how)
    if target.kind != "file" or not Path(target.text).is_file():
        target.app()  # raises the error that explains the target
    name = target.of(target.text)
    words = [
        sys.executable,
        "-m",
        "wirecall",
        "serve",
        name,
        "--http",
        how.http,
        "--log",
        "text",
        f"--grace={RESTART:g}s",
        "--dev",
    ]
    words += ["--ledger", how.ledger] if how.ledger else []
    folder = str(Path(target.text).resolve().parent)
    child: subprocess.Popen[bytes] | None = None
    is_stopping = False

    def stop(*_: object) -> None:
        nonlocal is_stopping
        if is_stopping:  # the second Ctrl-C
            if child is not None:
                child.kill()
            os._exit(Exit.INTERRUPTED)
        is_stopping = True

    def start() -> subprocess.Popen[bytes]:
        # A session of its own: this process passes Ctrl-C on. No byte code: Python judges it by second and size, so a
        # quick edit of equal length would start the old source.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            return subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, env=environment)
        except OSError as error:
            raise Unreachable("The server cannot be started.", error, "run wirecall serve to see more") from error

    def end() -> None:
        if child is None:
            return
        child.terminate()
        try:
            child.wait(RESTART + 2)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def say(text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    seen, child = dict(islice(_python_files(folder), MOST)), start()
    try:
        while not is_stopping:
            time.sleep(PAUSE)
            if child is not None and child.poll() is not None and not is_stopping:
                child = None
                say("the server has ended; it restarts when a file changes")
            now = dict(islice(_python_files(folder), MOST))
            if now != seen:
                say("a file changed, restarting")
                end()
                seen, child = now, start()
    finally:
        end()
    return Exit.DONE


def _python_files(folder: str) -> Iterator[tuple[str, int]]:
    """Yield Python files in a folder and below with the times of their last change, without hidden and installed ones."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:  # deleted meanwhile, or not readable
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _SKIPPED:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                if not os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
                    yield from _python_files(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.path, entry.stat().st_mtime_ns
        except OSError:
            continue
