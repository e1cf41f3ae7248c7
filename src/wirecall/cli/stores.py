"""The store of a ledger, before a verb uses it: its option, its driver, and errors that say what is wrong with it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from wirecall.cli.failures import CliError, Exit, failure_of
from wirecall.errors import UsageError
from wirecall.ledger.base import Ledger, LedgerDown, open_ledger

if TYPE_CHECKING:
    from wirecall.app import App


@asynccontextmanager
async def opened_ledger(url: str, named_by: str) -> AsyncIterator[Ledger]:
    """Open a ledger that exists. A store that cannot be reached is exit 4."""
    check_ledger(url, named_by=named_by)
    try:
        ledger = await open_ledger(url)
        try:
            yield ledger
        finally:
            await ledger.aclose()
    except LedgerDown as error:
        raise _unreachable(url, error) from error


async def ready(app: "App") -> None:
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
    # Found, not imported: a driver takes longer to import than most verbs take to run.
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
