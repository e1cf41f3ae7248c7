"""`wirecall doctor`: is this machine fit to serve? A list of checks, each with what it found and what to do about it.

A check is a function that gives a `Finding`, or several; an exception of its is a finding too. "warn" is what a server can
live with, "fail" is what would stop it, or break its promises.
"""

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import click
from msgspec import Struct

from wirecall.cli.connecting import run
from wirecall.cli.failures import Exit, failure_of
from wirecall.cli.ledgers import DRIVERS, Found, configured, opened_ledger, shown
from wirecall.cli.output import Output, count_of, json_option
from wirecall.config import Config, ConfigError, check_config

Level = Literal["ok", "warn", "fail"]

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
FILES = 2048  # open files of a process: its connections, and some of its own
TOO_FEW = 256


class Finding(Struct, frozen=True):
    """What one check says."""

    name: str
    level: Level
    what: str
    next: str = ""


@click.command("doctor")
@json_option
def command(as_json: bool) -> Exit | None:
    """Check this installation: Python, packages, wirecall.toml, ledger, port, clock, file limits. Exit code 9 on a fail."""
    config, _ = check_config()
    findings = [finding for check in CHECKS for finding in _findings(check, config)]
    out = Output(as_json)
    problems = [each for each in findings if each.level != "ok"]
    out.result({"checks": findings, "problems": problems}, lambda: _show(out, findings))
    return Exit.FOUND if any(each.level == "fail" for each in findings) else None


def _findings(check: "Check", config: Config) -> Iterator[Finding]:
    name = check.__name__.removeprefix("_")
    try:
        yield from check(config)
    except Exception as error:
        failure = failure_of(error)
        yield Finding(name, "fail", " ".join(f"{failure.what} {failure.why}".split()), failure.next)


def _show(out: Output, findings: list[Finding]) -> None:
    out.table(["CHECK", "", "FOUND"], [(each.name, each.level, each.what) for each in findings])
    for each in findings:
        if each.next and each.level != "ok":
            out.note(f"{each.name}: {each.next}", "failed" if each.level == "fail" else "warning")


# --- what is installed ----------------------------------------------------------------------------------------------

# Packages, and what they are needed for: the ones without a condition come with wirecall.
_NEEDED = ("msgspec", "click", "rich", "aiohttp", "apsw", "granian")


def _python(_: Config) -> Iterator[Finding]:
    found = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    is_new = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if is_new else "fail", found, "" if is_new else "wirecall needs Python 3.11 or newer")


def _packages(config: Config) -> Iterator[Finding]:
    missing = [name for name in _NEEDED if _version(name) is None]
    versions = ", ".join(f"{name} {_version(name)}" for name in ("wirecall", *_NEEDED) if _version(name))
    yield Finding("packages", "fail" if missing else "ok", versions, f"pip install {' '.join(missing)}" if missing else "")
    package, extra = DRIVERS.get((config.get("ledger.url") or "").partition(":")[0], ("", ""))
    if package and _version(package) is None:
        yield Finding(
            "packages", "fail", f"{package} is not installed; the ledger needs it", f'pip install "wirecall[{extra}]"'
        )
    if config.get("server.server") == "uvicorn" and _version("uvicorn") is None:
        yield Finding("packages", "fail", "uvicorn is not installed; server.server names it", "pip install uvicorn")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# --- what is configured ---------------------------------------------------------------------------------------------


def _config(config: Config) -> Iterator[Finding]:
    _, problems = check_config()
    if problems:
        raise ConfigError(problems)
    where = str(config.path) if config.path else "no wirecall.toml: defaults"
    yield Finding("config", "ok", f"{where}, {len(config.stated())} values stated")


def _app(config: Config) -> Iterator[Finding]:
    from wirecall.cli.targets import parse

    if config.get("server.app") is None:
        yield Finding("app", "ok", "none is named in wirecall.toml")
        return
    app = parse(config.get("server.app")).app()
    names = {*app.registry.methods, *app.registry.tools} - {"rpc.discover"}
    yield Finding("app", "ok", f"{app.name} {app.version}, {len(names)} methods, {app.mode} mode")
    if not _is_local(config) and app.mode != "production":
        next = "set WIRECALL_MODE=production"
        yield Finding("app", "warn", "others can reach it in development mode: commands run without keys", next)


def _ledger(config: Config) -> Iterator[Finding]:
    where = configured(config)
    if where is None:
        yield Finding("ledger", "ok", "none is named in wirecall.toml; the app decides")
        return
    scheme, _, path = where.url.partition(":")
    if scheme == "memory":
        yield Finding(
            "ledger", "warn", "memory: ends with the process, and so do its promises", '[ledger] url = "sqlite:..."'
        )
    elif scheme == "sqlite" and not Path(path.removeprefix("//")).exists():
        yield _future_file(Path(path.removeprefix("//")))
    else:
        counts = run(_counted(where))
        yield Finding("ledger", "ok", f"{shown(where.url)}, {count_of(sum(counts.values()), 'record')}")
        if unknown := counts["unknown"]:
            next = "wirecall ledger list --state unknown, then wirecall ledger resolve"
            yield Finding("ledger", "warn", f"the outcome of {count_of(unknown, 'command')} is unknown", next)


async def _counted(where: Found) -> dict[str, int]:
    async with opened_ledger(where) as ledger:
        counts = await ledger.counts()
        await ledger.list(limit=1)
    return {"unknown": 0, **{state.value: count for state, count in counts.items()}}


def _future_file(path: Path) -> Finding:
    """A ledger that the first command makes: can it?"""
    folder = next(each for each in (path.parent, *path.absolute().parents) if each.is_dir())
    if os.access(folder, os.W_OK | os.X_OK):
        return Finding("ledger", "ok", f"{path} is not there yet; it can be made")
    return Finding("ledger", "fail", f"{path} cannot be made: {folder} is not writable", "give it to the server's user")


# --- the machine ----------------------------------------------------------------------------------------------------


def _port(config: Config) -> Iterator[Finding]:
    host, _, port = str(config.get("server.http")).rpartition(":")
    address = f"{host}:{port}"
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
    except OSError as error:
        if _is_ours(host.strip("[]"), int(port)):
            yield Finding("port", "ok", f"a wirecall server answers on {address}")
        else:
            next = "stop what listens there, or choose another: --http HOST:PORT"
            yield Finding("port", "fail", f"{address} cannot be used: {error.strerror or error}", next)
        return
    yield Finding("port", "ok", f"{address} is free")


def _is_ours(host: str, port: int) -> bool:
    from http.client import HTTPConnection, HTTPException

    connection = HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _clock(_: Config) -> Iterator[Finding]:
    """The store measures leases; the wall clock is for people, audit trails, and certificates."""
    import wirecall

    installed = Path(wirecall.__file__).stat().st_mtime
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() < installed - 60:
        yield Finding(
            "clock", "warn", f"it says {now}, before wirecall was installed here", "set it: timedatectl set-ntp true"
        )
    else:
        yield Finding("clock", "ok", now)


def _files(_: Config) -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    level: Level = "ok" if soft == resource.RLIM_INFINITY or soft >= FILES else "warn" if soft >= TOO_FEW else "fail"
    next = f"ulimit -n {FILES if hard == resource.RLIM_INFINITY else min(hard, 65_536)}, or LimitNOFILE= of systemd"
    yield Finding("files", level, f"{allowed} open files per process", "" if level == "ok" else next)


def _secret(config: Config) -> Iterator[Finding]:
    if os.environ.get("WIRECALL_SECRET") or _is_local(config):
        yield Finding(
            "secret", "ok", "WIRECALL_SECRET is set" if os.environ.get("WIRECALL_SECRET") else "not needed on loopback"
        )
        return
    next = "set WIRECALL_SECRET to one random text for all processes and hosts"
    yield Finding("secret", "warn", "WIRECALL_SECRET is not set: MCP sessions end with each restart", next)


def _is_local(config: Config) -> bool:
    return str(config.get("server.http")).rpartition(":")[0] in LOOPBACK


Check = Callable[[Config], Iterator[Finding]]
CHECKS: tuple[Check, ...] = (_python, _packages, _config, _app, _ledger, _port, _clock, _files, _secret)
