"""The folder of a project: `wirecall new` writes a first one, `wirecall config` checks and shows its wirecall.toml, and
`wirecall doctor` finds out whether this machine is ready to serve it.

The first project is small, and it runs: a query, a command, and a test that loses an answer. Its files are in the folder
`template` beside this one, with `$name` for its name. They end in .txt, so that no tool takes them for ours.
"""

import ast
import inspect
import os
import platform
import re
import socket
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from string import Template
from typing import Literal

import click
import msgspec
from msgspec import Struct

from wirecall.app import App
from wirecall.cli.failures import CliError, Exit, failure_of
from wirecall.cli.targets import DRIVERS, opened_ledger, parse, without_password
from wirecall.cli.terminal import Printer, count_of, json_option, run
from wirecall.config import FILE, Config, ConfigError, Problem, check_config, load_config, variable
from wirecall.errors import CallFailed
from wirecall.ledger.base import State
from wirecall.server.method import Method
from wirecall.version import __version__

TEMPLATE = Path(__file__).with_name("template")
FILES = ("app.py", "wirecall.toml", "test_app.py", "README.md", ".gitignore")


@click.command("new")
@click.argument("folder", metavar="NAME")
@json_option
def new_command(folder: str, out: Printer) -> None:
    """Create a project in the new folder NAME: a server, a test, a wirecall.toml.

    \b
    wirecall new shop && cd shop && wirecall dev
    """
    if not folder.strip():
        raise CliError("The name is empty.", "it is the folder of the project", "wirecall new shop")
    path = Path(os.path.normpath(folder))  # otherwise `x/..` is looked up before x exists
    name = path.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][\w .-]*", name):
        raise CliError(f"{name!r} is not a name for a project.", "use letters, digits, . _ and -", "wirecall new shop")
    if path.exists() and not path.is_dir():
        raise CliError(f"{path} is a file.", "a project is a folder", f"wirecall new {path}-app")
    if path.is_dir() and (found := sorted(each.name for each in path.iterdir())):
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        why = f"it has {', '.join(found[:3])}{more}"
        raise CliError(f"{path} is not empty.", why, "choose a new folder; nothing was written")
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            text = Template((TEMPLATE / f"{file}.txt").read_text("utf-8")).substitute(name=name)
            (path / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{path} cannot be written.", error.strerror or str(error), "choose another folder") from None
    next_step = f"cd {quote(str(path))} && wirecall dev"
    out.result({"folder": str(path), "files": FILES}, f"Created {path}: {', '.join(FILES)}\n  next: {next_step}")


# --- wirecall.toml --------------------------------------------------------------------------------------------------

_FILE = click.argument("file", required=False, metavar="[FILE]")


@click.group("config")
def config_command() -> None:
    """Check or show wirecall.toml.

    FILE is wirecall.toml in the current folder by default, or the file that WIRECALL_CONFIG names. Flags win over
    variables, and variables over the file.
    """


@config_command.command("check")
@_FILE
@json_option
def check_file(file: str | None, out: Printer) -> Exit | None:
    """List every mistake, with its line. Exit code 9 if there is one."""
    config, problems = check_config(file)
    # A missing app would stop the server at its start; report it now.
    app = config.values["server.app"]
    path = Path(str(app.value).partition(":")[0])
    if app.value is not None and not path.is_file():
        line = int(app.origin.rpartition(":")[2]) if app.origin[-1:].isdigit() else None
        what = f"server.app: there is no file {path}"
        problems.append(Problem(app.origin, what, "name the Python file with the app", line))
    problems.sort(key=lambda each: each.line or 0)

    def show() -> None:
        for each in problems:
            click.echo(f"{each.where}: {each.what}")
            click.echo(f"  next: {each.fix}" if each.fix else "", nl=bool(each.fix))
        sound = f"{config.path or f'no {FILE}'}: {count_of(len(config.stated()), 'value')} stated"
        out.note(count_of(len(problems), "problem") if problems else sound, "failed" if problems else "ok")

    found = [msgspec.to_builtins(each) for each in problems]
    out.result({"file": str(config.path) if config.path else None, "problems": found}, show)
    return Exit.FOUND if problems else None


@config_command.command("show")
@_FILE
@json_option
def show_values(file: str | None, out: Printer) -> None:
    """Show every effective value, and its origin."""
    rows, table = [], []
    for place, each in load_config(file).values.items():
        value = without_password(each.value) if isinstance(each.value, str) else each.value
        rows.append({"name": place, "value": value, "from": each.origin, "variable": variable(place)})
        absent = "-" if place == "server.app" else "the app's own"
        table.append((place, absent if value is None else str(value), each.origin))
    out.result(rows, lambda: out.table(["NAME", "VALUE", "FROM"], table))


# --- doctor ---------------------------------------------------------------------------------------------------------

# A check is a function that yields one or several `Finding`s; an exception in it is a finding too. A server can run in spite
# of a "warn"; a "fail" stops it, or breaks its promises.
Level = Literal["ok", "warn", "fail"]

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
OPEN_FILES = 2048  # open files of a process: its connections, and some of its own
TOO_FEW = 256
SHOWN = 5  # names in a finding

# Members of a context, the features of MCP behind them that 2026-07-28 deprecates (SEP-2577), and their substitutes.
DEPRECATED = {
    "roots": ("roots", "arguments of tools or URIs of resources"),
    "sample": ("sampling", "the API of a model"),
    "log": ("logging", "OpenTelemetry or the server's log"),
}
_PACKAGES = ("msgspec", "click", "rich", "aiohttp", "apsw", "granian")  # they come with wirecall


class Finding(Struct, frozen=True):
    """The result of one check."""

    name: str
    level: Level
    what: str
    next: str = ""


@click.command("doctor")
@json_option
def doctor_command(out: Printer) -> Exit | None:
    """Check Python, packages, wirecall.toml, ledger, port, clock and file limits. Exit code 9 if a check fails."""
    config, _ = check_config()
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        try:
            findings += check(config)
        except Exception as error:
            failure = failure_of(error)
            found = "; ".join(filter(None, (failure.what.rstrip("."), failure.why)))
            findings.append(Finding(name, "fail", " ".join(found.split()), failure.next))

    def show() -> None:
        out.table(["CHECK", "", "FOUND"], [(each.name, each.level, each.what) for each in findings])
        for each in findings:
            if each.next and each.level != "ok":
                out.note(f"{each.name}: {each.next}", "failed" if each.level == "fail" else "warning")

    out.result({"checks": findings, "problems": [each for each in findings if each.level != "ok"]}, show)
    return Exit.FOUND if any(each.level == "fail" for each in findings) else None


def check_python(_: Config) -> Iterator[Finding]:
    found = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("python", "ok", found)  # an older one than wirecall needs does not come here


def check_packages(config: Config) -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version  # late: it takes longer than `wirecall new`

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    missing = [name for name in _PACKAGES if installed(name) is None]
    # Of wirecall the version that runs: a checkout on the path hides the installed one.
    found = {"wirecall": __version__} | {name: installed(name) for name in _PACKAGES}
    versions = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    yield Finding("packages", "fail" if missing else "ok", versions, f"pip install {' '.join(missing)}" if missing else "")
    package, extra = DRIVERS.get((config.get("ledger.url") or "").partition(":")[0], ("", ""))
    if package and installed(package) is None:
        what = f"{package} is not installed; the ledger needs it"
        yield Finding("packages", "fail", what, f'pip install "wirecall[{extra}]"')
    if config.get("server.server") == "uvicorn" and installed("uvicorn") is None:
        yield Finding("packages", "fail", "uvicorn is not installed; server.server names it", "pip install uvicorn")


def check_toml(config: Config) -> Iterator[Finding]:
    _, problems = check_config()
    if problems:
        raise ConfigError(problems)
    where = str(config.path) if config.path else "no wirecall.toml: defaults"
    yield Finding("config", "ok", f"{where}, {len(config.stated())} values stated")


def check_app(config: Config) -> Iterator[Finding]:
    if config.get("server.app") is None:
        yield Finding("app", "ok", "wirecall.toml does not name one")
        return
    app = parse(config.get("server.app")).app()
    names = {*app.registry.methods, *app.registry.tools} - {"rpc.discover"}
    yield Finding("app", "ok", f"{app.name} {app.version}, {len(names)} methods, {app.mode} mode")
    if not _is_local(config) and app.mode != "production":
        what = "other machines can reach it in development mode: commands run without keys"
        yield Finding("app", "warn", what, "set WIRECALL_MODE=production")
    # MCP allows dots in the names of tools, but several model APIs do not (SEP-986).
    if dotted := [name for name in app.registry.tools if "." in name]:
        what = f"some model APIs refuse dots in the names of tools: {listed(dotted)}"
        yield Finding("app", "warn", what, 'rename it: name="orders_create", or leave it out of MCP: expose=("rpc",)')

    # A client keeps the id of a task, and comes back to it after a restart of either side.
    tasks = [name for name, tool in app.registry.tools.items() if tool.task is not None]
    if tasks and app.mode == "production" and (config.get("ledger.url") or app.ledger_url).startswith("memory:"):
        what = f"the ledger is in memory, so tasks end with the process: {listed(tasks)}"
        yield Finding("app", "warn", what, '[ledger] url = "sqlite:..."')

    # A function names what it uses; a context that it passes on is not followed.
    used: dict[str, list[str]] = {}
    for method in app_methods(app):
        for member in sorted(context_members(method) & DEPRECATED.keys()):
            used.setdefault(member, []).append(method.name)
    for member, users in used.items():
        what = f"MCP 2026-07-28 deprecates {DEPRECATED[member][0]}: ctx.{member} in {listed(users)}"
        yield Finding("app", "warn", what, f"it still works; use {DEPRECATED[member][1]} instead")


def app_methods(app: App) -> list[Method]:
    """Return everything that an app has registered."""
    catalog = app.catalog()
    found = [*app.registry.methods.values(), *app.registry.tools.values(), *catalog.completions.values()]
    found += [prompt.method for prompt in catalog.prompts.values()]
    found += [resource.method for resource in (*catalog.resources.values(), *catalog.templates.values())]
    found += [entry.method for entry in catalog.methods.values()]
    return list(dict.fromkeys(found))  # a tool is often a method of JSON-RPC as well


def context_members(method: Method) -> set[str]:
    """Return the members of its context that the source of a function names: `ctx.log(...)` gives "log"."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(method.function, "func", method.function))))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):  # the source is not at hand, or a lambda in the middle of a line
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
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def check_ledger(config: Config) -> Iterator[Finding]:
    url, app = config.get("ledger.url"), config.get("server.app")
    if url is None and app is not None:
        url = parse(app).app().ledger_url
    if url is None:
        yield Finding("ledger", "ok", "wirecall.toml does not name one; the app decides")
        return
    scheme, _, text = url.partition(":")
    path = Path(text.removeprefix("//"))
    if scheme == "memory":
        what = "memory: records are lost when the process ends"
        yield Finding("ledger", "warn", what, '[ledger] url = "sqlite:..."')
    elif scheme == "sqlite" and not path.exists():  # the first command creates it
        folder = next(each for each in (path.parent, *path.absolute().parents) if each.is_dir())
        if os.access(folder, os.W_OK | os.X_OK):
            yield Finding("ledger", "ok", f"{path} does not exist yet; it can be created")
        else:
            what = f"{path} cannot be created: {folder} is not writable"
            yield Finding("ledger", "fail", what, "let the server's user write to it")
    else:

        async def counted() -> dict[State, int]:
            async with opened_ledger(url) as ledger:
                await ledger.list(limit=1)
                return dict(await ledger.counts())

        counts = run(counted())
        yield Finding("ledger", "ok", f"{without_password(url)}, {count_of(sum(counts.values()), 'record')}")
        if unknown := counts.get(State.UNKNOWN):
            next_step = "wirecall ledger list --state unknown, then wirecall ledger resolve"
            yield Finding("ledger", "warn", f"the outcome of {count_of(unknown, 'command')} is unknown", next_step)


def check_port(config: Config) -> Iterator[Finding]:
    from http.client import HTTPConnection, HTTPException

    host, _, text = str(config.get("server.http")).rpartition(":")
    address, bare, port = f"{host}:{text}", host.strip("[]"), int(text)
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            # As servers set it: a port that a server has just left counts as free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
        yield Finding("port", "ok", f"{address} is free")
    except OSError as error:
        connection = HTTPConnection(bare, port, timeout=2)
        try:
            connection.request("GET", "/healthz")
            is_ours = connection.getresponse().status == 200
        except (OSError, HTTPException):
            is_ours = False
        finally:
            connection.close()
        if is_ours:
            yield Finding("port", "ok", f"a wirecall server answers on {address}")
        else:
            next_step = "stop the program that listens there, or choose another: --http HOST:PORT"
            yield Finding("port", "fail", f"{address} cannot be used: {error.strerror or error}", next_step)


def check_auth(config: Config) -> Iterator[Finding]:
    """Fetch the keys of the issuers that wirecall.toml or the app names."""
    from wirecall.auth import Access, Jwt

    stated = config.section("auth")
    access = Access(Jwt(**stated)) if stated else None
    if access is None and config.get("server.app") is not None:
        access = parse(config.get("server.app")).app().access
    for verifier in access.verifiers if access is not None else ():
        try:
            yield Finding("auth", "ok", run(verifier.check()))
        except CallFailed as error:
            next_step = "is the issuer right, and can this machine reach it? Until then every new token gets 503"
            yield Finding("auth", "fail", str(error), next_step)


def check_clock(_: Config) -> Iterator[Finding]:
    """Compare the wall clock with the installation. The store measures leases; people and certificates read the clock."""
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    if time.time() < Path(__file__).stat().st_mtime - 60:
        what = f"it says {now}, before wirecall was installed here"
        yield Finding("clock", "warn", what, "set it: timedatectl set-ntp true")
    else:
        yield Finding("clock", "ok", now)


def check_files(_: Config) -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    level: Level = "ok" if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES else "warn" if soft >= TOO_FEW else "fail"
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    next_step = f"ulimit -n {most}, or LimitNOFILE= of systemd"
    yield Finding("files", level, f"{allowed} open files per process", "" if level == "ok" else next_step)


def check_secret(config: Config) -> Iterator[Finding]:
    if os.environ.get("WIRECALL_SECRET"):
        yield Finding("secret", "ok", "WIRECALL_SECRET is set")
    elif _is_local(config):
        yield Finding("secret", "ok", "not needed on loopback")
    else:
        next_step = "set WIRECALL_SECRET to one random text for all processes and hosts"
        yield Finding("secret", "warn", "WIRECALL_SECRET is not set: MCP sessions end with each restart", next_step)


def _is_local(config: Config) -> bool:
    return str(config.get("server.http")).rpartition(":")[0] in LOOPBACK


CHECKS: dict[str, Callable[[Config], Iterator[Finding]]] = {
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
}
