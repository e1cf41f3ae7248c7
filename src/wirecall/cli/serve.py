"""`wirecall serve` and `wirecall dev`: an app from a file, over HTTP or on stdio.

Flags override wirecall.toml, which overrides the app's own settings. `dev` restarts the server when
a file changes. Its process watches; the server is its child, `wirecall serve --log text`. A child
that exits early (a syntax error, a port in use) has printed the reason; the next change starts
another.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import msgspec

from wirecall.cli.failures import CliError, Exit, Unreachable, failure_of, no_such, not_named
from wirecall.cli.targets import (
    Target,
    check_ledger,
    check_tables,
    configured,
    duration,
    flags_of,
    ledger_option,
    optional_target_argument,
    pause,
    secrets_of,
)
from wirecall.cli.watching import (
    PORT,
    Watching,
    host_and_port,
    local_address,
    settings_in_force,
    watching_options,
)
from wirecall.config import SETTINGS, Config, ledger_itself, load_config
from wirecall.errors import UsageError
from wirecall.files import IS_PORTABLE
from wirecall.limits import Limits
from wirecall.transports.workers import stopping_signals, unused_signals

if TYPE_CHECKING:
    from wirecall.auth import Jwt
    from wirecall.transports.framing import FramingName
    from wirecall.transports.succession import Succession

ADDRESS = SETTINGS["server.http"].default
GRACE = SETTINGS["server.grace"].default
Log = Literal["off", "text", "json"]

# Fixes as Python code, and the same as flags.
_FLAGS = {
    'use audit="file:audit.jsonl"': "--audit file:audit.jsonl",
    "another port=": "another port: --http HOST:PORT",
    'use host="127.0.0.1", HTTP with auth=, or allow_remote=True': (
        "--tcp 127.0.0.1:PORT, --http with auth=, or --allow-remote"
    ),
    'use ledger="sqlite:PATH", "redis://..." or "postgresql://..."': (
        "--ledger sqlite:PATH, redis://... or postgresql://..."
    ),
}


def _limits(
    _context: click.Context, _option: click.Parameter, words: tuple[str, ...]
) -> dict[str, float]:
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


def _in_json(run: Callable[..., None]) -> Callable[..., int]:
    """Make all output of a server with `--log json` JSON.

    This includes logs, and failures of loading the app.
    """

    @wraps(run)
    def running(log: Log, **given: Any) -> int:
        if log != "json":
            run(log=log, **given)
            return Exit.DONE
        log_calls(log)
        try:
            run(log=log, **given)
        except Exception as error:
            from wirecall.logs import logger

            failure = failure_of(error)
            logger.critical(
                "%s", " ".join(failure.text().split()), extra={"reason": failure.why or None}
            )
            return failure.exit
        return Exit.DONE

    return running


def _refuse_parts(ctx: click.Context, _param: click.Parameter, given: str | None) -> None:
    """Refuse --host and --port, which other servers have."""
    if given is not None:
        raise CliError(
            f"{ctx.command_path} has no --host and no --port.",
            "one option has both: --http HOST:PORT",
            f"{ctx.command_path} TARGET --http {ADDRESS}",
        )


def http_option(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Give a verb the option of its address."""
    parts = click.option(
        "--host", "--port", hidden=True, expose_value=False, callback=_refuse_parts
    )
    address = click.option(
        "--http", metavar="HOST:PORT", help=f"Address to listen on. [default: {ADDRESS}]"
    )
    return address(parts(verb))


batch_tool_option = click.option(
    "--batch-tool",
    type=click.Choice(["queries", "all"]),
    help="Give MCP clients a tool that calls other tools: those that only read, or all.",
)


@click.command("serve")
@optional_target_argument
@http_option
@click.option("--stdio", is_flag=True, help="Serve on stdin and stdout instead.")
@click.option("--tcp", metavar="HOST:PORT", help="Serve on a TCP port instead, without HTTP.")
@click.option("--unix", metavar="PATH", help="Serve on a Unix socket instead, without HTTP.")
@click.option(
    "--framing",
    type=click.Choice(["lines", "content-length"]),
    help="How stdio, TCP and Unix sockets separate messages. [default: lines]",
)
@click.option(
    "--allow-remote", is_flag=True, help="Let --tcp serve other machines, without authentication."
)
@click.option(
    "--workers",
    type=click.IntRange(1),
    metavar="N",
    help="Processes that share the address. [default: 1]",
)
@click.option(
    "--server",
    type=click.Choice(["granian", "granian-asgi", "uvicorn"]),
    help="HTTP server. [default: granian]",
)
@click.option(
    "--grace",
    type=duration,
    help=f"Time for calls in flight when the server stops. [default: {GRACE:g}s]",
)
@click.option(
    "--drain",
    type=pause,
    help="Time after SIGTERM in which the server is not ready and still serves, so that load "
    "balancers send requests elsewhere. [default: 5s in production, else 0]",
)
@ledger_option
@click.option("--audit", metavar="file:PATH", help="Audit trail.")
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A host name of this server: api.example.com.",
)
@click.option(
    "--allow-origin",
    "origins",
    multiple=True,
    metavar="URL",
    help="A web page that may call: https://app.example.com.",
)
@click.option(
    "--single-user/--no-single-user",
    default=None,
    help="All anonymous calls come from one user, or not. "
    "[default: in development, on the loopback]",
)
@batch_tool_option
@click.option(
    "--limit",
    "limits",
    multiple=True,
    callback=_limits,
    metavar="NAME=NUMBER",
    help=f"Change a limit: {', '.join(Limits.__struct_fields__)}. May be repeated.",
)
@click.option(
    "--log",
    type=click.Choice(["off", "text", "json"]),
    default="off",
    help="Log calls on stderr. [default: off]",
)
@watching_options
@click.option("--dev", is_flag=True, hidden=True)  # `wirecall dev` sets it
@_in_json
def serve_command(
    target: Target | None,
    stdio: bool,
    tcp: str | None,
    unix: str | None,
    framing: "FramingName | None",
    allow_remote: bool,
    limits: dict[str, float],
    log: Log,
    dev: bool,
    audit: str | None,
    watching: Watching,
    **given: Any,
) -> None:
    """Serve the app in TARGET, or the one that wirecall.toml names.

    It serves until SIGTERM or Ctrl-C. SIGHUP reloads the configuration and the app of a server over
    HTTP; a terminal that is closed stops it. Over HTTP: JSON-RPC at /rpc, MCP at /mcp, /healthz
    and /readyz for supervisors. On stdio, TCP and Unix sockets: both on one connection.

    \b
    wirecall serve shop.py --http 0.0.0.0:8420 --workers 4 --ledger postgresql://...
    wirecall serve shop.py --stdio
    wirecall serve shop.py --stdio --framing content-length
    wirecall serve shop.py --tcp 127.0.0.1:8421
    wirecall serve shop.py --unix /run/user/1000/shop/rpc.sock
    """
    way = _transport(stdio, tcp, unix, given)
    _check_transport(way, framing, allow_remote)
    succession = _succession(way, dev=dev)
    config = load_config(flags=flags_of(given["ledger"]))
    how = _settings(given, config)
    from_flags = _stated(given, audit, limits, watching)
    watching = watching.or_else(config)
    audit = audit or config.audit
    host = ""
    port = 0
    if way == "http":
        host, port = host_and_port(how["http"], f"--http {ADDRESS}")
    elif tcp is not None:
        host, port = host_and_port(tcp, "--tcp 127.0.0.1:8421")
    app = named(target, config).app()
    certificate = _certificate(config)
    try:
        app.configure(
            ledger=how["ledger"],
            migrate=config.get("ledger.migrate"),
            audit=audit,
            limits=msgspec.structs.replace(config.limits(app.limits), **limits),
            hosts=how["hosts"] or (),
            origins=how["origins"] or (),
            single_user=how["single_user"],
            batch_tool=how["batch_tool"],
            stream=config.get("server.stream"),
            auth=_auth(config),
            secret=secrets_of(config) or None,
            dev=dev,
            succession=succession,
        )
        if succession is not None:
            succession.check(how["http"], ledger_itself(app.ledger_url))
        # Problems that would otherwise appear only at the first command.
        check_ledger(app.ledger_url)
        check_tables(app)
        if audit:
            check_trail(audit.removeprefix("file:").partition("?")[0])
        log_calls(log)
        with watching.of(
            app,
            target=named(target, config).text,
            address=_address(way, host, port, unix, is_secure=certificate is not None),
            settings=settings_in_force(config, from_flags),
            is_successor=succession is not None and succession.predecessor is not None,
        ):
            if way == "http":
                served = {name: how[name] for name in ("server", "workers", "grace", "drain")}
                app.run("http", host=host, port=port, certificate=certificate, **served)
            else:
                app.run(
                    way,
                    host=host,
                    port=port,
                    path=(unix or "").removeprefix("unix:"),
                    framing=framing or "lines",
                    allow_remote=allow_remote,
                    grace=how["grace"],
                )
    except UsageError as error:
        failure = failure_of(error)
        for python, flag in _FLAGS.items():
            failure.next = failure.next.replace(python, flag)
        raise failure from None
    finally:
        if succession is not None:
            succession.close()
    if succession is not None:
        succession.keep()


def _succession(way: str, *, dev: bool) -> "Succession | None":
    """Return what lets SIGHUP replace this process, if it serves HTTP."""
    if way != "http" or dev or IS_PORTABLE:
        return None
    from wirecall.transports.succession import Succession  # late: other servers do not need it

    return Succession(os.environ)


def _certificate(config: Config) -> tuple[str, str] | None:
    """Return the files of the certificate and its key, if the server speaks TLS."""
    if config.get("server.certificate") is None:
        return None
    return config.get("server.certificate"), config.get("server.key")


def _auth(config: Config) -> "Jwt | None":
    """Return the rules about tokens in wirecall.toml."""
    stated = config.section("auth")
    if not stated:
        return None
    from wirecall.auth import Jwt  # late: few servers need it

    return Jwt(**stated)


def _settings(given: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Return the options of the command line; those that are not given come from wirecall.toml."""
    how = {}
    for name, value in given.items():
        place = "ledger.url" if name == "ledger" else f"server.{name}"
        how[name] = value or config.get(place)
    if given["single_user"] is not None:  # `--no-single-user` wins over wirecall.toml, too
        how["single_user"] = given["single_user"]
    if given["drain"] is not None:  # it may be 0
        how["drain"] = given["drain"]
    return how


def _stated(
    given: Mapping[str, Any],
    audit: str | None,
    limits: Mapping[str, float],
    watching: Watching,
) -> dict[str, Any]:
    """Return the values that the command line states, by their places in wirecall.toml."""
    stated = {
        "ledger.url" if name == "ledger" else f"server.{name}": value
        for name, value in given.items()
        if value not in (None, ())
    }
    if audit is not None:
        stated["audit.file"] = audit
    stated |= {f"limits.{name}": value for name, value in limits.items()}
    return stated | watching.stated()


def _address(way: str, host: str, port: int, unix: str | None, *, is_secure: bool) -> str:
    """Return where a server is, for those who watch it; "stdio" has no address."""
    if unix is not None:
        return f"unix:{Path(unix.removeprefix('unix:')).absolute()}"
    if way == "stdio":
        return way
    scheme = way
    if is_secure:
        scheme = "https"
    return local_address(scheme, host, port)


def _transport(
    stdio: bool, tcp: str | None, unix: str | None, given: Mapping[str, Any]
) -> Literal["stdio", "http", "tcp", "unix"]:
    """Return the transport of the flags; refuse two of them."""
    if stdio and (given["http"] or given["workers"]):
        raise CliError(
            "--stdio serves one client.",
            "--http and --workers are for HTTP",
            "drop them, or --stdio",
        )
    flags = {
        "--http": given["http"],
        "--stdio": stdio,
        "--tcp": tcp,
        "--unix": unix,
    }
    names = [name for name, value in flags.items() if value]
    if len(names) > 1:
        raise CliError(
            f"{' and '.join(names)} exclude each other.",
            "a server has one transport",
            f"drop all but one of them; {names[0]} for example",
        )
    if (tcp or unix) and given["workers"]:
        raise CliError(
            "--workers is for HTTP.", "a socket is served by one process", "drop --workers"
        )
    if stdio:
        return "stdio"
    if tcp:
        return "tcp"
    if unix:
        return "unix"
    return "http"


def _check_transport(way: str, framing: str | None, allow_remote: bool) -> None:
    """Refuse flags that the transport does not have."""
    if way == "http" and framing is not None:
        raise CliError(
            "--framing is for --stdio, --tcp and --unix.",
            "a request over HTTP has its own Content-Length",
            "drop it, or add --stdio",
        )
    if allow_remote and way != "tcp":
        raise CliError(
            "--allow-remote is for --tcp.", "--http serves the address that it is given", "drop it"
        )


def check_trail(text: str) -> None:
    """Refuse an audit trail that cannot be written."""
    path = Path(text).absolute()
    place = next(each for each in (path, *path.parents) if each.exists())
    if path.is_dir() or (place != path and not place.is_dir()) or not os.access(place, os.W_OK):
        why = f"{place} cannot be written to"
        if path.is_dir():
            why = "it is a folder"
        raise CliError(
            f"The audit trail {text} cannot be written.",
            why,
            "--audit file:audit.jsonl",
            type="audit",
        )


def named(target: Target | None, config: Config) -> Target:
    """Return the target of the command line, or the one that wirecall.toml names."""
    target = target or configured(config)
    if target is None:
        next_step = "name its file: app.py; or write [server] app = ... into wirecall.toml"
        raise not_named("Which app?", next_step)
    return target


class _Readable(logging.Formatter):
    """A line for people: time, outcome, method, duration."""

    def format(self, record: logging.LogRecord) -> str:
        if not hasattr(record, "duration_ms"):
            return super().format(record)
        outcome = str(getattr(record, "outcome", ""))
        code = getattr(record, "code", None)
        sign = {"ok": "✓", "replayed": "↻"}.get(outcome, "✗")
        if code is not None:
            outcome += f" {code}"
        when = self.formatTime(record, "%H:%M:%S")
        method = getattr(record, "method", "")
        line = f"{when}  {sign} {method:<24} {outcome:<16} {record.duration_ms:>9.1f} ms"
        more = [getattr(record, name, None) for name in ("call_id", "reason")]
        return "  ".join([line, *filter(None, more)])


def log_calls(kind: Log) -> None:
    """Log one record per call on stderr.

    As JSON, everything that this process logs is on stderr, and is JSON.
    """
    if kind == "off":
        return
    from wirecall.logs import JsonFormatter, is_json, logger

    if kind == "json" and is_json():
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Readable("%(levelname)s  %(message)s"))
    if kind == "json":
        handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False  # a handler of the app on the root logger would print every line again
    if kind == "json":
        logging.captureWarnings(True)
        if not logging.getLogger().handlers:
            logging.getLogger().addHandler(handler)


# --- dev ------------------------------------------------------------------------------------------

# Files are polled: for a few hundred that costs less than file system events, and works on every
# file system.
# Seconds between two polls.
PAUSE = 0.25
# Seconds for the calls in flight when the server restarts.
RESTART = 3.0
# Files that are watched.
MOST = 5000
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}


@click.command("dev")
@optional_target_argument
@http_option
@ledger_option
@batch_tool_option
@click.option(
    "--console/--no-console",
    default=True,
    help="Serve the console, and print the link to it. [default: on]",
)
@click.option("--console-port", type=PORT, help="Port of the console. [default: 8421]")
def dev_command(
    target: Target | None,
    http: str | None,
    ledger: str | None,
    batch_tool: str | None,
    console: bool,
    console_port: int | None,
) -> int:
    """Serve the app in TARGET with a log line per call, and restart when a file changes.

    It watches the Python files beside the app, or in the current folder if TARGET is a module.
    It warns about plain functions that block the event loop for more than 100 ms. The console shows
    every call with its params and its result.

    \b
    wirecall dev shop.py
    """
    config = load_config(flags=flags_of(ledger))
    target = named(target, config)
    ledger = ledger or config.get("ledger.url")
    if target.kind != "file" or not (target.is_module or Path(target.text).is_file()):
        target.app()  # raises the error that explains the target
    words = [sys.executable, "-m", "wirecall", "serve", *target.words()]
    words += ["--dev", "--log", "text"]
    words += ["--http", http or config.get("server.http"), f"--grace={RESTART:g}s"]
    if ledger:
        words += ["--ledger", ledger]
    if batch_tool:
        words += ["--batch-tool", batch_tool]
    # A restarted server knows the sessions of its console.
    kept = tempfile.TemporaryDirectory(prefix="wirecall-dev-")
    words += _console_words(console, console_port, kept.name)
    folder = _watched(target)
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
        # A separate session: this process passes Ctrl-C on. No byte code: Python checks it by
        # second and size, so a quick edit of equal length would start the old source.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            return subprocess.Popen(
                words, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
            )
        except OSError as error:
            raise Unreachable(
                "The server cannot be started.", error, "run wirecall serve to see more"
            ) from error

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

    # The server is in a separate session: it would outlive this process, and keep its port.
    for number in stopping_signals():
        signal.signal(number, stop)
    for number in unused_signals():
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the server would inherit
    seen = dict(islice(_python_files(folder), MOST))
    child = start()
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
                seen = now
                child = start()
    finally:
        end()
        kept.cleanup()
    return Exit.DONE


def _watched(target: Target) -> str:
    """Return the folder whose files are watched."""
    if target.is_module:
        return str(Path.cwd())
    return str(Path(target.text).resolve().parent)


def _console_words(console: bool, port: int | None, folder: str) -> list[str]:
    """Return the options of the server that serve its console."""
    if not console or IS_PORTABLE:
        return []
    words = ["--console", "--capture", "bodies"]
    words += ["--console-sessions", os.path.join(folder, "sessions")]
    if port is not None:
        words += ["--console-port", str(port)]
    return words


def _python_files(folder: str) -> Iterator[tuple[str, int]]:
    """Yield Python files below a folder with their modification times.

    It skips hidden and installed files.
    """

    def is_ours(path: str) -> bool:
        name = os.path.basename(path)
        return not (
            name.startswith(".")
            or name in _SKIPPED
            or os.path.exists(os.path.join(path, "pyvenv.cfg"))
        )

    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if is_ours(os.path.join(place, name)))
        for name in sorted(files):
            path = os.path.join(place, name)
            if name.endswith(".py") and is_ours(path):
                with suppress(OSError):  # deleted since it was listed
                    yield path, os.stat(path).st_mtime_ns
