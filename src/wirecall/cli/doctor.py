"""`wirecall doctor`: checks whether this machine is ready to serve the app of a folder.

A check is a function that yields one or several `Finding`s; an exception in it is a finding too.
"""

import ast
import inspect
import os
import platform
import shlex
import socket
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import click
from msgspec import Struct, field

from wirecall.app import OTHER_SECRET_VARIABLE, SECRET_VARIABLE, App
from wirecall.cli.failures import CliError, Exit, failure_of
from wirecall.cli.targets import DRIVERS, configured, opened_ledger, secrets_of
from wirecall.cli.terminal import Printer, count_of, json_option, run
from wirecall.cli.unit import Unit, read_unit
from wirecall.config import Config, ConfigError, Problem, Value, check_config
from wirecall.errors import CallFailed, extra_fix
from wirecall.ledger.base import (
    LedgerDown,
    OtherTables,
    Risk,
    State,
    risks_of,
    without_password,
)
from wirecall.server.method import Method
from wirecall.version import __version__

# A server can run despite a "warn"; a "fail" stops it, or breaks its promises.
Level = Literal["ok", "warn", "fail"]

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
# Open files of a process: its connections and a few others.
OPEN_FILES = 2048
TOO_FEW = 256
# Names in a finding.
SHOWN = 5

# Members of a context, the features of MCP behind them that 2026-07-28 deprecates (SEP-2577), and
# their substitutes.
DEPRECATED = {
    "roots": ("roots", "arguments of tools or URIs of resources"),
    "sample": ("sampling", "the API of a model"),
    "log": ("logging", "OpenTelemetry or the server's log"),
}
# They come with wirecall.
_PACKAGES = ("msgspec", "click", "rich", "aiohttp", "apsw", "granian")

# Lengths of a secret below which callers could guess it, and sign sessions and the state of calls.
TINY_SECRET = 16
SHORT_SECRET = 32


class Subject(Config, frozen=True):
    """The configuration that is checked, and the problems in it."""

    problems: list[Problem] = field(default_factory=list)
    # The unit that starts the server, if it is known.
    unit: Unit | None = None

    @property
    def is_gateway(self) -> bool:
        """Whether the file describes a gateway and no app."""
        return self.get("server.app") is None and bool(self.members.get("upstream"))

    @property
    def address(self) -> str:
        """The address of the server."""
        return str(self.get("gateway.http" if self.is_gateway else "server.http"))


class Finding(Struct, frozen=True):
    """The result of one check."""

    name: str
    level: Level
    what: str
    next: str = ""


@click.command("doctor")
@click.option(
    "--unit",
    metavar="FILE",
    help="Check the server that this unit of systemd starts, with its environment.",
)
@json_option
def doctor_command(unit: str | None, out: Printer) -> Exit | None:
    """Check Python, packages, wirecall.toml, ledger, port, clock and file limits.

    Exit code 9 if a check fails.

    \b
    wirecall doctor
    wirecall doctor --unit /etc/systemd/system/shop.service
    """
    if unit is None:
        findings = _examined(None)
    else:
        found_unit = read_unit(unit)
        with found_unit.applied():
            findings = _examined(found_unit)

    def show() -> None:
        out.table(["CHECK", "", "FOUND"], [(each.name, each.level, each.what) for each in findings])
        for each in problems:
            if each.next:
                mark = "failed" if each.level == "fail" else "warning"
                out.note(f"{each.name}: {each.next}", mark)

    problems = [each for each in findings if each.level != "ok"]
    out.result({"checks": findings, "problems": problems}, show)
    if any(each.level == "fail" for each in findings):
        return Exit.FOUND
    return None


def _examined(unit: Unit | None) -> list[Finding]:
    """Return the findings of all checks, in this folder and with this environment."""
    flags = {} if unit is None else unit.flags
    config, problems = check_config(flags=flags)
    values = config.values | {place: Value(value, "ExecStart") for place, value in flags.items()}
    subject = Subject(config.path, values, config.members, config.wrong, problems, unit)
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            findings += check(subject)
        except Exception as error:
            failure = failure_of(error)
            found = "; ".join(filter(None, (failure.what.rstrip("."), failure.why)))
            findings.append(Finding(name, "fail", " ".join(found.split()), failure.next))
    return findings


def check_unit(config: Subject) -> Iterator[Finding]:
    unit = config.unit
    if unit is None:
        return
    variables = count_of(len(unit.environment), "variable")
    yield Finding("unit", "ok", f"{unit.path}, {variables}, folder {unit.folder or '/'}")
    for problem in unit.problems:
        yield Finding("unit", "warn", f"{problem.where}: {problem.what}", problem.fix)
    if unit.folder is not None and not unit.folder.is_dir():
        yield Finding(
            "unit", "fail", f"there is no folder {unit.folder}", "correct WorkingDirectory="
        )


def check_python(_: Subject) -> Iterator[Finding]:
    python = f"{platform.python_implementation()} {platform.python_version()}"
    machine = f"{platform.system()} {platform.machine()}"
    # wirecall does not start on one that is too old.
    yield Finding("python", "ok", f"{python} on {machine}")


def check_packages(config: Subject) -> Iterator[Finding]:
    # Late: it takes longer than `wirecall new`.
    from importlib.metadata import PackageNotFoundError, version

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    missing = [name for name in _PACKAGES if installed(name) is None]
    # For wirecall, the running version: a checkout on the path hides the installed one.
    found = {"wirecall": __version__} | {name: installed(name) for name in _PACKAGES}
    versions = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    if missing:
        yield Finding("packages", "fail", versions, f"pip install {' '.join(missing)}")
    else:
        yield Finding("packages", "ok", versions)
    package, extra = DRIVERS.get((config.get("ledger.url") or "").partition(":")[0], ("", ""))
    if package and installed(package) is None:
        what = f"{package} is not installed; the ledger needs it"
        yield Finding("packages", "fail", what, extra_fix(extra))
    if config.get("server.server") == "uvicorn" and installed("uvicorn") is None:
        yield Finding(
            "packages",
            "fail",
            "uvicorn is not installed; server.server names it",
            "pip install uvicorn",
        )


def check_toml(config: Subject) -> Iterator[Finding]:
    if config.problems:
        raise ConfigError(config.problems)
    if config.has_gateway:
        from wirecall.gateway.settings import gateway_problems  # late: few files describe one

        if problems := gateway_problems(config):
            raise ConfigError(problems)
    where = str(config.path) if config.path else "no wirecall.toml: defaults"
    yield Finding("config", "ok", f"{where}, {len(config.stated())} values stated")


def check_app(config: Subject) -> Iterator[Finding]:
    if config.is_gateway:
        upstreams = count_of(len(config.members["upstream"]), "upstream")
        yield Finding("app", "ok", f"a gateway with {upstreams}")
        return
    named = configured(config)
    if named is None:
        yield Finding("app", "ok", "wirecall.toml does not name one")
        return
    app = named.app()
    names = {*app.registry.methods, *app.registry.tools} - {"rpc.discover"}
    yield Finding("app", "ok", f"{app.name} {app.version}, {len(names)} methods, {app.mode} mode")
    if _is_public(config) and app.mode != "production":
        what = "other machines can reach it in development mode: commands run without keys"
        yield Finding("app", "warn", what, "set WIRECALL_MODE=production")
    yield from _check_tools(app, config.get("ledger.url") or app.ledger_url)

    # Only names in the function itself count; a context that it passes on is not followed.
    used: dict[str, list[str]] = {}
    for method in app_methods(app):
        for member in sorted(context_members(method) & DEPRECATED.keys()):
            used.setdefault(member, []).append(method.name)
    for member, users in used.items():
        what = f"MCP 2026-07-28 deprecates {DEPRECATED[member][0]}: ctx.{member} in {listed(users)}"
        yield Finding("app", "warn", what, f"it still works; use {DEPRECATED[member][1]} instead")


def _check_tools(app: App, ledger_url: str) -> Iterator[Finding]:
    # A tool's MCP name has a dot only if `tool_name=` states it. MCP allows dots, but several model
    # APIs do not (SEP-986).
    if dotted := [tool.tool_name for tool in app.registry.tools.values() if "." in tool.tool_name]:
        what = f"some model APIs refuse dots in the names of tools: {listed(dotted)}"
        next_step = 'state a name without dots, tool_name="orders_create", or drop tool_name'
        yield Finding("app", "warn", what, next_step)
    # A client keeps the id of a task, and returns to the task after a restart of either side.
    tasks = [name for name, tool in app.registry.tools.items() if tool.task is not None]
    if tasks and app.mode == "production" and ledger_url.startswith("memory:"):
        what = f"the ledger is in memory, so tasks end with the process: {listed(tasks)}"
        yield Finding("app", "warn", what, '[ledger] url = "sqlite:..."')


def app_methods(app: App) -> list[Method]:
    """Return everything that an app has registered."""
    catalog = app.catalog()
    found = [
        *app.registry.methods.values(),
        *app.registry.tools.values(),
        *catalog.completions.values(),
    ]
    found += [prompt.method for prompt in catalog.prompts.values()]
    found += [
        resource.method for resource in (*catalog.resources.values(), *catalog.templates.values())
    ]
    found += [entry.method for entry in catalog.methods.values()]
    return list(dict.fromkeys(found))  # a tool is often a method of JSON-RPC as well


def context_members(method: Method) -> set[str]:
    """Return the members of its context that the source of a function names.

    `ctx.log(...)` gives "log".
    """
    try:
        source = textwrap.dedent(
            inspect.getsource(inspect.unwrap(getattr(method.function, "func", method.function)))
        )
        tree = ast.parse(source)
    # The source is missing, or a lambda in the middle of a line.
    except (OSError, TypeError, SyntaxError):
        return set()
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in method.signature.injected
    }


def listed(names: list[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    text = ", ".join(names[:SHOWN])
    if len(names) > SHOWN:
        text += f" and {len(names) - SHOWN} more"
    return text


def check_ledger(config: Subject) -> Iterator[Finding]:
    url = config.get("gateway.ledger" if config.is_gateway else "ledger.url")
    named = configured(config)
    if url is None and named is not None:
        url = named.app().ledger_url
    if url is None:
        yield Finding("ledger", "ok", "wirecall.toml does not name one; the app decides")
        return
    scheme, _, text = url.partition(":")
    path = Path(text.removeprefix("//"))
    is_file = scheme == "sqlite"
    if is_file and config.unit is not None and not config.unit.may_write(path.absolute()):
        what = f"the unit does not let its server write to {path.absolute()}"
        next_step = (
            '[ledger] url = "sqlite:/var/lib/shop/ledger.db", in the StateDirectory= of the unit'
        )
        yield Finding("ledger", "fail", what, next_step)
    elif scheme == "memory":
        what = "memory: records are lost when the process ends"
        yield Finding("ledger", "warn", what, '[ledger] url = "sqlite:..."')
    elif is_file and not path.exists():
        yield _new_file(path)
    else:
        yield from _check_records(url)


def _new_file(path: Path) -> Finding:
    """Return whether the first command can create the ledger."""
    folder = next(each for each in (path.parent, *path.absolute().parents) if each.is_dir())
    if os.access(folder, os.W_OK | os.X_OK):
        return Finding("ledger", "ok", f"{path} does not exist yet; it can be created")
    what = f"{path} cannot be created: {folder} is not writable"
    return Finding("ledger", "fail", what, "let the server's user write to it")


def _check_records(url: str) -> Iterator[Finding]:
    """Open a ledger that exists, and count its records."""

    async def counted() -> dict[State, int]:
        async with opened_ledger(url) as ledger:
            await ledger.list(limit=1)
            return dict(await ledger.counts())

    try:
        counts = run(counted())
    except CliError as error:
        yield _before_the_start(url, error)
        return
    records = count_of(sum(counts.values()), "record")
    yield Finding("ledger", "ok", f"{without_password(url)}, {records}")
    for risk in run(_risks(url)):
        yield Finding("ledger", "warn", risk.what, risk.fix)
    if unknown := counts.get(State.UNKNOWN):
        what = f"the outcome of {count_of(unknown, 'command')} is unknown"
        next_step = "wirecall ledger list --state unknown, then wirecall ledger resolve"
        yield Finding("ledger", "warn", what, next_step)


async def _risks(url: str) -> Sequence[Risk]:
    """Return what the store may lose. One that does not answer now has been reported already."""
    with suppress(LedgerDown):
        return await risks_of(url)
    return ()


def _before_the_start(url: str, error: CliError) -> Finding:
    """Return what a starting server will do about the tables of its ledger.

    Other errors are raised again.
    """
    cause = error.__cause__
    if not isinstance(cause, OtherTables) or cause.found > cause.known:
        raise error
    shown = without_password(url)
    if cause.found == 0:
        return Finding(
            "ledger",
            "ok",
            f"{shown} has no tables of wirecall yet; the server makes them when it starts",
        )
    what = (
        f"{shown} has tables of version {cause.found}; "
        f"this wirecall brings them to version {cause.known}"
    )
    return Finding("ledger", "warn", what, f"wirecall ledger migrate {shlex.quote(shown)}")


def check_port(config: Subject) -> Iterator[Finding]:
    host, _, text = config.address.rpartition(":")
    address = f"{host}:{text}"
    bare = host.strip("[]")
    port = int(text)
    try:
        found = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as listener:
            # As servers set it: a port that a server has just released counts as free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
        yield Finding("port", "ok", f"{address} is free")
    except OSError as error:
        if _answers_health(bare, port):
            yield Finding("port", "ok", f"a wirecall server answers on {address}")
        else:
            what = f"{address} cannot be used: {error.strerror or error}"
            next_step = "stop the program that listens there, or choose another: --http HOST:PORT"
            yield Finding("port", "fail", what, next_step)


def _answers_health(host: str, port: int) -> bool:
    """Return whether a wirecall server listens at an address."""
    from http.client import HTTPConnection, HTTPException

    connection = HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def check_auth(config: Subject) -> Iterator[Finding]:
    """Fetch the keys of the issuers that wirecall.toml or the app names."""
    from wirecall.auth import Access, Jwt

    access = None
    if stated := config.section("auth"):
        access = Access(Jwt(**stated))
    elif named := configured(config):
        access = named.app().access
    if access is None:
        return
    for verifier in access.verifiers:
        try:
            yield Finding("auth", "ok", run(verifier.check()))
        except CallFailed as error:
            next_step = (
                "is the issuer right, and can this machine reach it? "
                "Until then every new token gets 503"
            )
            yield Finding("auth", "fail", str(error), next_step)


def check_clock(_: Subject) -> Iterator[Finding]:
    """Compare the wall clock with the installation.

    The store measures leases; people and certificates read the clock.
    """
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() < Path(__file__).stat().st_mtime - 60:
        what = f"it says {now}, before wirecall was installed here"
        yield Finding("clock", "warn", what, "set it: timedatectl set-ntp true")
    else:
        yield Finding("clock", "ok", now)


def check_files(_: Subject) -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        yield Finding("files", "ok", "unlimited open files per process")
        return
    what = f"{soft} open files per process"
    if soft >= OPEN_FILES:
        yield Finding("files", "ok", what)
        return
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    level: Level = "warn" if soft >= TOO_FEW else "fail"
    yield Finding("files", level, what, f"ulimit -n {most}, or LimitNOFILE= of systemd")


def check_secret(config: Subject) -> Iterator[Finding]:
    secrets = _secrets(config)
    for name, secret in secrets.items():
        yield _judged_secret(name, secret)
    if len(set(secrets.values())) < len(secrets):
        what = f"{' and '.join(secrets)} are the same"
        yield Finding("secret", "warn", what, "drop the other one: it changes nothing")
    if secrets:
        return
    if not _is_public(config):
        yield Finding("secret", "ok", "not needed on loopback")
        return
    yield Finding(
        "secret",
        "warn",
        "WIRECALL_SECRET is not set: MCP sessions end with each restart",
        "set WIRECALL_SECRET to one random text for all processes and hosts",
    )


def _secrets(config: Subject) -> dict[str, str]:
    """Return the secrets of the server by their names: the one that signs first."""
    named = (SECRET_VARIABLE, OTHER_SECRET_VARIABLE)
    found = {name: os.environ[name] for name in named if os.environ.get(name)}
    if SECRET_VARIABLE in found:
        return found
    places = [place for place in ("server.secret", "server.other_secret") if config.get(place)]
    return dict(zip(places, secrets_of(config), strict=True))


def _judged_secret(name: str, secret: str) -> Finding:
    next_step = f"set {name} to the output of: openssl rand -hex 32"
    if len(secret) < TINY_SECRET or len(set(secret)) < TINY_SECRET // 4:
        length = count_of(len(secret), "character")
        what = f"{name} can be guessed: it has {length}, {len(set(secret))} different"
        return Finding("secret", "fail", what, next_step)
    if len(secret) < SHORT_SECRET:
        what = f"{name} is short: it has {len(secret)} characters"
        return Finding("secret", "warn", what, next_step)
    return Finding("secret", "ok", f"{name} is set")


def check_proxy(config: Subject) -> Iterator[Finding]:
    """Check a server on a loopback address that other machines use.

    It is behind a proxy, and sees only the proxy.
    """
    if not _is_local(config) or not _is_public(config):
        return
    what = (
        f"{config.address} is a loopback address: "
        "a proxy brings its callers, and must set X-Forwarded-For"
    )
    yield Finding("proxy", "ok", what)
    if config.get("server.single_user"):
        what = (
            "single_user takes all callers of the proxy for one: "
            "a call of one may get the answer of another"
        )
        yield Finding(
            "proxy",
            "warn",
            what,
            "drop single_user, and name callers with auth=, or let them send keys",
        )


def _is_local(config: Subject) -> bool:
    return config.address.rpartition(":")[0] in LOOPBACK


def _is_public(config: Subject) -> bool:
    """Return whether other machines reach the server, as far as its settings show.

    They may reach it directly or through a proxy.
    """
    if not _is_local(config) or config.unit is not None:
        return True
    resource = urlsplit(config.get("auth.resource") or "").hostname
    hosts = [str(name).rpartition(":")[0] or str(name) for name in config.get("server.hosts") or ()]
    return any(name not in LOOPBACK for name in (*hosts, resource or LOOPBACK[0]))


CHECKS: dict[str, Callable[[Subject], Iterator[Finding]]] = {
    "unit": check_unit,
    "python": check_python,
    "packages": check_packages,
    "config": check_toml,
    "app": check_app,
    "ledger": check_ledger,
    "auth": check_auth,
    "port": check_port,
    "clock": check_clock,
    "files": check_files,
    "secret": check_secret,
    "proxy": check_proxy,
}
