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
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import click
import msgspec

from wirecall.cli.failures import CliError, Exit, Unreachable, failure_of, no_such
from wirecall.cli.targets import Target, check_ledger, duration, ledger_option, optional_target_argument, parse
from wirecall.config import SETTINGS, Config, load_config
from wirecall.errors import UsageError
from wirecall.protocol.messages import Limits

ADDRESS, GRACE = SETTINGS["server.http"].default, SETTINGS["server.grace"].default
Log = Literal["off", "text", "json"]

# Fixes in the words of Python, and the same as flags.
_FLAGS = {
    'use audit="file:audit.jsonl"': "--audit file:audit.jsonl",
    "another port=": "another port: --http HOST:PORT",
    'use ledger="sqlite:PATH", "redis://..." or "postgresql://..."': "--ledger sqlite:PATH, redis://... or postgresql://...",
}


def _limits(_context: click.Context, _option: click.Parameter, words: tuple[str, ...]) -> dict[str, float]:
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
@click.option("--grace", type=duration, help=f"Time for calls in flight when the server stops. [default: {GRACE:g}s]")
@ledger_option
@click.option("--audit", metavar="file:PATH", help="Audit trail.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="A host name of this server: api.example.com.")
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="URL",
    help="A web page that may call: https://app.example.com.",
)
@click.option("--single-user", is_flag=True, default=None, help="All anonymous calls come from one user: recognise retries.")
@click.option(
    "--limit",
    "limits",
    multiple=True,
    callback=_limits,
    metavar="NAME=NUMBER",
    help=f"Change a limit: {', '.join(Limits.__struct_fields__)}. May be repeated.",
)
@click.option("--log", type=click.Choice(["off", "text", "json"]), default="off", help="Log calls on stderr. [default: off]")
@click.option("--dev", is_flag=True, hidden=True)  # `wirecall dev` sets it
def serve_command(
    target: Target | None, stdio: bool, limits: dict[str, float], log: Log, dev: bool, audit: str | None, **given: Any
) -> None:
    """Serve the app in TARGET, or the one that wirecall.toml names, until SIGTERM or Ctrl-C.

    Over HTTP: JSON-RPC at /rpc, MCP at /mcp, /healthz and /readyz for supervisors. On stdio: both on one pipe.

    \b
    wirecall serve shop.py --http 0.0.0.0:8420 --workers 4 --ledger postgresql://...
    wirecall serve shop.py --stdio
    """
    if stdio and (given["http"] or given["workers"]):
        raise CliError("--stdio serves one client.", "--http and --workers are for HTTP", "drop them, or --stdio")
    config = load_config()
    places = {name: "ledger.url" if name == "ledger" else f"server.{name}" for name in given}
    how = {name: value or config.get(places[name]) for name, value in given.items()}
    audit = audit or config.audit
    host, colon, port = how["http"].rpartition(":")
    if not stdio and (not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535):
        what, why = f"{how['http']!r} is not an address.", "expected HOST:PORT, the port up to 65535"
        raise CliError(what, why, f"--http {ADDRESS}")
    app = named(target, config).app()
    auth = None
    if stated := config.section("auth"):
        from wirecall.auth import Jwt

        auth = Jwt(**stated)
    try:
        app.configure(
            ledger=how["ledger"],
            audit=audit,
            limits=msgspec.structs.replace(config.limits(app.limits), **limits),
            hosts=how["hosts"] or (),
            origins=how["origins"] or (),
            single_user=how["single_user"] or None,
            auth=auth,
            dev=dev,
        )
        # Problems that would otherwise show only at the first command.
        check_ledger(app.ledger_url)
        if audit:
            check_trail(audit.removeprefix("file:"))
        log_calls(log)
        if stdio:
            app.run("stdio", grace=how["grace"])
        else:
            host = host.strip("[]") or "127.0.0.1"
            served = {name: how[name] for name in ("server", "workers", "grace")}
            app.run("http", host=host, port=int(port), **served)
    except UsageError as error:
        failure = failure_of(error)
        for python, flag in _FLAGS.items():
            failure.next = failure.next.replace(python, flag)
        raise failure from None


def check_trail(text: str) -> None:
    """Refuse an audit trail that cannot be written."""
    path = Path(text).absolute()
    place = next(each for each in (path, *path.parents) if each.exists())
    if path.is_dir() or (place != path and not place.is_dir()) or not os.access(place, os.W_OK):
        why = "it is a folder" if path.is_dir() else f"{place} cannot be written to"
        raise CliError(f"The audit trail {text} cannot be written.", why, "--audit file:audit.jsonl", type="audit")


def named(target: Target | None, config: Config) -> Target:
    """Return the target of the command line, or the one that wirecall.toml names."""
    app = config.get("server.app")
    if target is None and app is None:
        next_step = "name its file: app.py; or write [server] app = ... into wirecall.toml"
        raise CliError("Which app?", "neither the command line nor wirecall.toml names one", next_step)
    return target or parse(app)


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
    """Serve the app in TARGET with a log line per call, and restart when a Python file beside it changes.

    It warns about plain functions that block the event loop for more than 100 ms.

    \b
    wirecall dev shop.py
    """
    config = load_config()
    target = named(target, config)
    ledger = ledger or config.get("ledger.url")
    if target.kind != "file" or not Path(target.text).is_file():
        target.app()  # raises the error that explains the target
    words = [sys.executable, "-m", "wirecall", "serve", target.of(target.text), "--dev", "--log", "text"]
    words += ["--http", http or config.get("server.http"), f"--grace={RESTART:g}s"]
    words += ["--ledger", ledger] if ledger else []
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

    def is_ours(path: str) -> bool:
        name = os.path.basename(path)
        return not (name.startswith(".") or name in _SKIPPED or os.path.exists(os.path.join(path, "pyvenv.cfg")))

    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if is_ours(os.path.join(place, name)))
        for name in sorted(files):
            path = os.path.join(place, name)
            if name.endswith(".py") and is_ours(path):
                with suppress(OSError):  # deleted meanwhile
                    yield path, os.stat(path).st_mtime_ns
