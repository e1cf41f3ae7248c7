"""`wirecall serve`: an app from a file, over HTTP or on stdio. Flags go over wirecall.toml, that over the app's own."""

import logging
import sys
from collections.abc import Sequence
from typing import Any, Literal

import click
from msgspec import Struct

from wirecall import App
from wirecall.cli.durations import DURATION
from wirecall.cli.failures import Failure
from wirecall.cli.overrides import configured, ledger_option, limit_option, read_limits
from wirecall.cli.targets import Target, parse, target_argument

ADDRESS = "127.0.0.1:8420"
GRACE = 10.0
Log = Literal["off", "text", "json"]


class Serving(Struct, frozen=True, kw_only=True):
    """How an app is to be served; the defaults are what is meant if nobody says otherwise."""

    app: str | None = None
    http: str = ADDRESS
    workers: int = 1
    server: Literal["granian", "uvicorn"] = "granian"
    grace: float = GRACE
    ledger: str | None = None
    audit: str | None = None
    hosts: Sequence[str] = ()
    origins: Sequence[str] = ()
    limits: dict[str, float] = {}


@click.command("serve")
@target_argument(required=False)
@click.option("--http", metavar="HOST:PORT", help=f"Address to listen on. [default: {ADDRESS}]")
@click.option("--stdio", is_flag=True, help="Serve on stdin and stdout instead.")
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Processes that share the address. [default: 1]")
@click.option("--server", type=click.Choice(["granian", "uvicorn"]), help="HTTP server. [default: granian]")
@click.option("--grace", type=DURATION, help=f"Time to finish what is under way when told to stop. [default: {GRACE:g}s]")
@ledger_option
@click.option("--audit", metavar="file:PATH", help="Audit trail.")
@click.option(
    "--allow-host", "hosts", multiple=True, metavar="NAME", help="A name the server is called by: api.example.com."
)
@click.option(
    "--allow-origin", "origins", multiple=True, metavar="URL", help="A web page that may call: https://app.example.com."
)
@limit_option
@click.option("--log", type=click.Choice(["off", "text", "json"]), default="off", help="A line per call on stderr.")
def command(target: Target | None, stdio: bool, log: Log, limits: tuple[str, ...], **given: Any) -> None:
    """Serve the app in TARGET, or the one that wirecall.toml names, until SIGTERM or Ctrl-C.

    Over HTTP: JSON-RPC at /rpc, MCP at /mcp, /healthz and /readyz for supervisors. On stdio: both on one pipe.

    \b
    wirecall serve shop.py --http 0.0.0.0:8420 --workers 4 --ledger postgresql://...
    wirecall serve shop.py --stdio
    """
    if stdio and (given["http"] or given["workers"]):
        raise Failure("--stdio serves one client.", "--http and --workers are for HTTP", "drop them, or --stdio")
    how = serving({**given, "limits": read_limits(limits)})
    app = configured((target or named(how)).app(), ledger=how.ledger, audit=how.audit, limits=how.limits)
    app.configure(hosts=how.hosts, origins=how.origins)
    log_calls(log)
    if stdio:
        app.run("stdio", grace=how.grace)
    else:
        _serve_http(app, how)


def serving(given: dict[str, Any]) -> Serving:
    """Flags over wirecall.toml over defaults."""
    from wirecall.cli.settings import serve_settings

    settings = serve_settings()
    limits = {**settings.get("limits", {}), **given.pop("limits", {})}
    return Serving(
        **{**settings, **{name: value for name, value in given.items() if value not in (None, ())}, "limits": limits}
    )


def named(how: Serving) -> Target:
    """The target that wirecall.toml names."""
    if how.app is None:
        raise Failure("Which app?", "no TARGET was given, and no wirecall.toml names one", "wirecall serve app.py")
    return parse(how.app)


def _serve_http(app: App, how: Serving) -> None:
    host, port = host_and_port(how.http)
    app.run("http", host=host, port=port, server=how.server, workers=how.workers, grace=how.grace)


def host_and_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise Failure(f"{text!r} is not an address.", "it is HOST:PORT", f"--http {ADDRESS}")
    return host.strip("[]") or "127.0.0.1", int(port)


# --- the log of calls -----------------------------------------------------------------------------------------------


_SIGNS = {"ok": "✓", "replayed": "↻"}


class _Readable(logging.Formatter):
    """A line for people: when, how it ended, what, how long."""

    def format(self, record: logging.LogRecord) -> str:
        if not hasattr(record, "duration_ms"):
            return super().format(record)
        outcome = str(getattr(record, "outcome", ""))
        code = getattr(record, "code", None)
        sign = _SIGNS.get(outcome, "✗")
        told = f"{outcome} {code}" if code is not None else outcome
        time = self.formatTime(record, "%H:%M:%S")
        return f"{time}  {sign} {record.method:<24} {told:<16} {record.duration_ms:>9.1f} ms"  # type: ignore[attr-defined]


def log_calls(kind: Log) -> None:
    """One record per call on stderr."""
    if kind == "off":
        return
    from wirecall.logs import JsonFormatter, logger

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else _Readable("%(levelname)s  %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
