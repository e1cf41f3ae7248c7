"""Which app, which ledger and which limits a verb works with: its options, wirecall.toml and the environment."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Struct

from wirecall.app import App
from wirecall.cli.failures import CliError, Exit, failure_of, no_such
from wirecall.cli.targets import Target, parse
from wirecall.config import Config, load_config
from wirecall.errors import UsageError
from wirecall.ledger.base import Ledger, LedgerDown, check_url, open_ledger
from wirecall.protocol.messages import Limits
from wirecall.server.method import Method

RETENTION = 86_400.0


class Found(Struct, frozen=True):
    """A ledger's URL, the origin of that URL, and the app that uses it, if it is known: loaded, or as a target."""

    url: str
    origin: str
    app: App | str | None = None

    def method(self, name: str) -> Method | None:
        """Return the method of a record. The record of a tool has the method `tools/call:NAME`."""
        app = parse(self.app).app() if isinstance(self.app, str) else self.app
        if app is None:
            return None
        tool = name.removeprefix("tools/call:")
        return app.registry.methods.get(name) if tool == name else app.registry.tools.get(tool)

    def retention(self, method: str) -> float:
        declared = self.method(method)
        return RETENTION if declared is None else declared.terms.retention


def found(text: str | None) -> Found:
    """Return the ledger that a text names; without a text, that of wirecall.toml."""
    if text is None:
        where = configured_ledger(load_config())
        if where is None:
            next_step = "wirecall ledger ... sqlite:ledger.db, or [ledger] url = ... in wirecall.toml"
            raise CliError("Which ledger?", "the command line and wirecall.toml name none", next_step)
        return where
    if text.partition(":")[0].endswith(".py"):
        return _of_app(text)
    if Path(text).is_file():
        raise CliError(f"{text!r} is not a ledger.", "it is the path of a file", f"sqlite:{text}")
    try:
        check_url(text)
    except UsageError:
        next_step = "sqlite:ledger.db, redis://..., postgresql://..., or a file: app.py"
        raise CliError(f"{text!r} is not a ledger.", "expected the URL of a ledger or a Python file", next_step) from None
    return Found(text, "the command line")


def configured_ledger(config: Config) -> Found | None:
    """Return the ledger of a configuration, or of the app that it names."""
    app, url = config.get("server.app"), config.values["ledger.url"]
    if url.value is not None:
        return Found(url.value, url.origin, app)
    return _of_app(app) if app else None


def _of_app(text: str) -> Found:
    app = app_of(parse(text))
    assert app is not None  # it is a file
    stated = load_config().values["ledger.url"]
    return Found(app.ledger_url, text if stated.value is None else stated.origin, app)


@asynccontextmanager
async def opened_ledger(where: Found) -> AsyncIterator[Ledger]:
    """Open a ledger that exists. A store that cannot be reached is exit 4."""
    check_ledger(where.url, named_by=where.origin)
    try:
        ledger = await open_ledger(where.url)
        try:
            yield ledger
        finally:
            await ledger.aclose()
    except LedgerDown as error:
        raise _unreachable(where.url, error) from error


async def ready(app: App) -> None:
    """Open the ledger of an app in this process before a command needs it, so that an error can be explained here."""
    check_ledger(app.ledger_url)
    try:
        await app.ledger()
    except LedgerDown as error:
        raise _unreachable(app.ledger_url, error) from error


# By scheme: the package of its driver, and the extra of wirecall that installs it.
DRIVERS = {
    "redis": ("redis", "redis"),
    "rediss": ("redis", "redis"),
    "valkey": ("redis", "redis"),
    "postgresql": ("psycopg", "postgres"),
    "postgres": ("psycopg", "postgres"),
}


def check_ledger(url: str, *, named_by: str = "") -> None:
    """Refuse a ledger whose driver is not installed, or whose file is a folder; with `named_by`, one that does not exist."""
    scheme, _, path = url.partition(":")
    driver, extra = DRIVERS.get(scheme, ("", ""))
    if driver and find_spec(driver) is None:
        why = f"ledgers of {scheme}: are reached with the package {driver}"
        raise CliError(f"{driver} is not installed.", why, f'pip install "wirecall[{extra}]"', type="ledger")
    if scheme == "sqlite" and Path(path.removeprefix("//")).is_dir():
        raise CliError(f"The ledger {path} is a folder.", "SQLite keeps it in a file", "name a file in it", type="ledger")
    if named_by and scheme == "memory":
        why = "it lives inside the server's process, and ends with it"
        next_step = 'use a ledger that outlives it: ledger="sqlite:PATH", or --ledger of wirecall serve'
        raise CliError("A ledger in memory cannot be looked at.", why, next_step)
    if named_by and scheme == "sqlite" and not Path(path.removeprefix("//")).is_file():
        why = f"named by {named_by}; looked in {Path.cwd()}"
        next_step = "is this the server's folder? The first command with a key creates the ledger"
        raise CliError(f"There is no ledger at {path}.", why, next_step, type="no_ledger")


def _unreachable(url: str, error: Exception) -> CliError:
    failure = failure_of(UsageError(str(error)))
    if not failure.why and not failure.next:  # otherwise the error has a why and a fix of its own
        failure = CliError(f"The ledger {shown(url)} cannot be used.", " ".join(failure.what.split()))
    next_step = failure.next or "is it running, and is this its URL?"
    return CliError(failure.what, failure.why, next_step, exit=Exit.UNREACHABLE, type="ledger_unavailable")


def shown(url: str) -> str:
    """Return a URL without its password."""
    password = urlsplit(url).password if "://" in url else None
    return url.replace(f":{password}@", ":***@") if password else url


# The option `--ledger`, as the parameter `ledger`.
ledger_option = click.option(
    "--ledger", metavar="URL", help="Ledger of an app in a file: sqlite:PATH, redis://..., postgresql://..., memory:"
)

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


def app_of(target: Target, ledger: str | None = None) -> App | None:
    """Return the app in a file, as `wirecall serve` would serve it here; None for a server elsewhere."""
    if target.kind == "file":
        stated = serve_settings()
        chosen = ledger or stated.get("ledger")
        return configured(target.app(), ledger=chosen, audit=stated.get("audit"), limits=stated.get("limits"))
    if ledger is not None:
        raise CliError("--ledger is for an app in a file.", f"{target.text} has a ledger of its own", "drop --ledger")
    return None


def configured(
    app: App, *, ledger: str | None = None, audit: str | None = None, limits: Mapping[str, float] | None = None
) -> App:
    """Return the app with these settings in place of its own."""
    changed: Any = dict(limits or {})
    app.configure(ledger=ledger, audit=audit, limits=msgspec.structs.replace(app.limits, **changed) if changed else None)
    return app


def serve_settings(path: str | None = None) -> dict[str, Any]:
    """Return the settings that the file and the environment state; flags go on top. A mistake raises `ConfigError`."""
    stated = load_config(path).stated()
    settings: dict[str, Any] = {}
    for place, value in stated.items():
        section, _, name = place.partition(".")
        if section == "limits":
            settings.setdefault("limits", {})[name] = value
        else:  # the URL of the ledger and the file of the audit trail have options named after their sections
            settings[name if section == "server" else section] = f"file:{value}" if section == "audit" else value
    return settings
