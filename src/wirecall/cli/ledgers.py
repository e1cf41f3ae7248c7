"""Which ledger a verb works on: a URL, the one of an app in a file, or the one that wirecall.toml names.

The ledger of an app in a file is the one that it would be served with from this folder: wirecall.toml goes over what the
file says (`overrides.app_of`, for all verbs).

A ledger is opened as it is found. A file that is not there is an error here, where a server would make it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from wirecall import App
from wirecall.cli.failures import Exit, Failure, failure_of
from wirecall.cli.settings import app_of
from wirecall.cli.targets import parse
from wirecall.config import Config, load_config
from wirecall.errors import UsageError
from wirecall.ledger.base import Ledger, LedgerDown, check_url, open_ledger
from wirecall.server.method import Method

RETENTION = 86_400.0


class Found(Struct, frozen=True):
    """A ledger's URL, who named it, and the app it belongs to, if that is known: loaded, or as a target."""

    url: str
    origin: str
    app: App | str | None = None

    def method(self, name: str) -> Method | None:
        """The method of a record, whose tools are called `tools/call:NAME`."""
        app = parse(self.app).app() if isinstance(self.app, str) else self.app
        if app is None:
            return None
        tool = name.removeprefix("tools/call:")
        return app.registry.methods.get(name) if tool == name else app.registry.tools.get(tool)

    def retention(self, method: str) -> float:
        declared = self.method(method)
        return RETENTION if declared is None else declared.terms.retention


def found(text: str | None) -> Found:
    """The ledger that a text means, or, without one, that of wirecall.toml."""
    if text is None:
        where = configured(load_config())
        if where is None:
            next = "wirecall ledger ... sqlite:ledger.db, or [ledger] url = ... in wirecall.toml"
            raise Failure("Which ledger?", "none was named, and wirecall.toml names none", next)
        return where
    path = text.partition(":")[0]
    if path.endswith(".py"):
        return _of_app(text)
    if Path(text).is_file():
        raise Failure(f"{text!r} is not a ledger.", "it is the path of a file", f"sqlite:{text}")
    try:
        check_url(text)
    except UsageError:
        next = "sqlite:ledger.db, redis://..., postgresql://..., or a file: app.py"
        raise Failure(f"{text!r} is not a ledger.", "it is neither a URL of one nor a Python file", next) from None
    return Found(text, "the command line")


def configured(config: Config) -> Found | None:
    """The ledger of a configuration, or of the app that it names."""
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
    """The ledger itself. A store that cannot be reached is exit 4."""
    _refuse_absent(where)
    try:
        ledger = await open_ledger(where.url)
        try:
            yield ledger
        finally:
            await ledger.aclose()
    except LedgerDown as error:
        raise unreachable(where, error) from error


async def ready(app: App) -> None:
    """Open the ledger of an app in this process, before a command needs it: here its user can be told what is wrong."""
    check_ledger(app.ledger_url)
    try:
        await app.ledger()
    except LedgerDown as error:
        raise unreachable(Found(app.ledger_url, app.name, app), error) from error


# By scheme: the package that speaks to the ledger, and the extra of ours that brings it.
DRIVERS = {
    "redis": ("redis", "redis"),
    "rediss": ("redis", "redis"),
    "valkey": ("redis", "redis"),
    "postgresql": ("psycopg", "postgres"),
    "postgres": ("psycopg", "postgres"),
}


def check_ledger(url: str) -> None:
    """What no server can mend by waiting: a driver that is not installed, a folder in the place of a file."""
    scheme, _, path = url.partition(":")
    driver, extra = DRIVERS.get(scheme, ("", ""))
    if driver and find_spec(driver) is None:
        why = f"ledgers of {scheme}: are reached with the package {driver}"
        raise Failure(f"{driver} is not installed.", why, f'pip install "wirecall[{extra}]"', type="ledger")
    if scheme == "sqlite" and Path(path.removeprefix("//")).is_dir():
        raise Failure(f"The ledger {path} is a folder.", "SQLite keeps it in a file", "name a file in it", type="ledger")


def _refuse_absent(where: Found) -> None:
    check_ledger(where.url)
    scheme, _, path = where.url.partition(":")
    if scheme == "memory":
        next = 'use a ledger that outlives it: ledger="sqlite:PATH", or --ledger of wirecall serve'
        raise Failure(
            "A ledger in memory cannot be looked at.", "it lives inside the server's process, and ends with it", next
        )
    if scheme == "sqlite" and not Path(path.removeprefix("//")).is_file():
        next = "is this the server's folder? A ledger is made by the first command with a key"
        raise Failure(
            f"There is no ledger at {path}.", f"named by {where.origin}; looked in {Path.cwd()}", next, type="no_ledger"
        )


def unreachable(where: Found, error: Exception) -> Failure:
    told = failure_of(UsageError(str(error)))  # some of them have their own why and fix
    is_whole = bool(told.why or told.next)
    return Failure(
        told.what if is_whole else f"The ledger {shown(where.url)} cannot be used.",
        told.why if is_whole else " ".join(told.what.split()),
        told.next or "is it running, and is this its URL?",
        exit=Exit.UNREACHABLE,
        type="ledger_unavailable",
    )


def shown(url: str) -> str:
    """A URL without its password."""
    parts: Any = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if "://" in url and parts.password else url
