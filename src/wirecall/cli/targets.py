"""Where a verb finds its server. One grammar for all verbs:

    shop.py, shop.py:app     an app in a Python file, in this process
    http://…, https://…      a server's address; without a path it is a wirecall server: /rpc, or /mcp with --as mcp
    -- command …             a server on the stdin and stdout of a process; all words after `--` are its command line

Verbs are made with `cls=TargetCommand` and take the target first, by `target_argument`. Everything that the user's file
prints goes to stderr: stdout belongs to the verb.
"""

import importlib.util
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlsplit

import click
import msgspec
from msgspec import Struct

from wirecall.app import App
from wirecall.cli.failures import CliError, nearest
from wirecall.config import Config, load_config
from wirecall.errors import UsageError
from wirecall.ledger.base import check_url
from wirecall.server.method import Method

# Stands for the words after `--`; no argument of a program can contain a null character.
_COMMAND = "\0command"


class Target(Struct, frozen=True):
    """A server, as the user named it."""

    kind: Literal["file", "url", "command"]
    text: str  # of a file: the path; of a command: its words, for people
    name: str = ""  # of the app in the file
    command: tuple[str, ...] = ()

    def app(self) -> App:
        """Load the app in the file, for verbs that need one."""
        if self.kind != "file":
            raise CliError(f"{self.text} is not a file.", "this verb needs an app in a Python file", "name one: app.py")
        return load_app(self)

    def address(self, path: str, *, keep_root: bool = True) -> str:
        """Return the URL of an endpoint. An address without a path is a wirecall server, which has its endpoint at `path`.

        A lone slash is a path, where a server of another kind may answer; without `keep_root` it is none.
        """
        parts = urlsplit(self.text)
        return parts._replace(path=path).geturl() if parts.path in ("", "" if keep_root else "/") else self.text

    def of(self, path: str) -> str:
        """Return the target with this path to its file."""
        return f"{path}:{self.name}" if self.name else path

    def line(self, verb: str, *words: str) -> str:
        """Return the command line of another verb on this target, for people."""
        parts = [verb, *words, "--", self.text] if self.kind == "command" else [verb, self.of(self.text), *words]
        return " ".join(["wirecall", *filter(None, parts)])


class TargetCommand(click.Command):
    """A command whose target may be the words after `--`: its first argument, unless `is_last`."""

    is_last = False

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = tuple(args[at + 1 :])
            args = [*args[:at], _COMMAND] if self.is_last else [_COMMAND, *args[:at]]
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("TARGET"):
            formatter.write_dl(
                [
                    ("shop.py, shop.py:app", "an app in a Python file"),
                    ("http://127.0.0.1:8420", "a server; without a path it is a wirecall server"),
                    ("-- COMMAND ...", "the command line of a server on stdio"),
                ]
            )

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND ...]"]


def parse(text: str) -> Target:
    """Return the target that a text names."""
    # 1. The words after `--`.
    if text == _COMMAND:
        command = click.get_current_context().meta[_COMMAND]
        if not command:
            raise CliError("There is no command after `--`.", "it is the command line of a server", "-- python server.py")
        return Target("command", " ".join(command), command=command)
    if not text.strip():
        raise CliError("The target is empty.", "expected a file or an address", "app.py, http://..., or -- command ...")

    # 2. An address that can be split into its parts. Whether a server is there shows later.
    if text.lower().startswith(("http://", "https://")):
        try:
            split = urlsplit(text)
            host, _ = split.hostname, split.port  # both may raise
            why = "" if host else "it has no host"
            why = "there is a space in it" if any(sign.isspace() for sign in text) else why
        except ValueError as error:
            why = str(error)
        if why:
            raise CliError(f"{text!r} is not an address.", why, "http://127.0.0.1:8420, or .../rpc, .../mcp", type="target")
        return Target("url", split._replace(scheme=split.scheme.lower()).geturl())
    if "://" in text:
        raise CliError(f"{text} is not a target.", "servers are reached by http and https", "http://..., or a file: app.py")

    # 3. A file.
    path, _, name = text.partition(":")
    return Target("file", path, name)


# The first argument of a verb, required or not.
target_argument = click.argument("target", type=parse, metavar="TARGET")
optional_target_argument = click.argument("target", type=parse, required=False, metavar="[TARGET]")


# --- files ----------------------------------------------------------------------------------------------------------

_GIVE = "give the path of a Python file"


def load_app(target: Target) -> App:
    """Load the app that a file defines."""
    path, name = target.text, target.name
    if not Path(path).is_file():
        raise _no_file(path, name)
    module = _load(path)
    apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
    if name in apps:
        return apps[name]
    first = next(iter(apps), "")
    if name:
        found = getattr(module, name, None)
        why = "there is no such name in the file" if found is None else f"it is of type {type(found).__name__}"
        next_step = f"name {path}:{first}" if apps else "name a wirecall.App defined in that file"
        raise CliError(f"{path}:{name} is not an app.", why, next_step, type="target")
    if not apps:
        why, next_step = "no wirecall.App is defined at its top level", 'add: app = App("name")'
        raise CliError(f"{path} has no app.", why, next_step, type="target")
    if len(apps) > 1:
        why = f"{path} has {len(apps)} apps: {', '.join(apps)}"
        raise CliError("Which app?", why, f"name one: {path}:{first}", type="target")
    return apps[first]


def _no_file(path: str, name: str) -> CliError:
    if Path(path).exists():
        what = f"{path} is a folder." if Path(path).is_dir() else f"{path} is not a file."
        return CliError(what, "an app is in a Python file", f"{_GIVE}: app.py", type="target")
    what = f"There is no file {path}."
    if name.partition("/")[0].isdecimal():
        return CliError(what, f"{path}:{name} looks like an address", f"http://{path}:{name}", type="target")
    folder = Path(path).parent
    beside = [str(folder / each.name) for each in folder.glob("*.py")] if folder.is_dir() else []
    near = nearest(str(Path(path)), beside)
    why = f"the nearest is {near}" if near else f"looked in {Path.cwd()}"
    return CliError(what, why, f"{_GIVE}: {near or 'app.py'}", type="target")


def _load(path: str) -> ModuleType:
    """Run the user's file as a module; an error in it names the line of that file."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise CliError(f"{path} is not a Python file.", "its name does not end in .py", _GIVE, type="target")
    module = importlib.util.module_from_spec(spec)
    # As `python FILE` would: the file's neighbours can be imported, and pickling finds the module by its name.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        line, trace = None, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename in (path, str(Path(path).resolve())):
                line = trace.tb_lineno
            trace = trace.tb_next
        why, next_step = f"{type(error).__name__}: {error}", "correct the file and try again"
        if isinstance(error, SyntaxError):
            shown = (error.text or "").strip() if "codec" not in error.msg else ""
            line, why = error.lineno, f"{error.msg}\n{shown}".strip()
        elif isinstance(error, ModuleNotFoundError) and error.name:
            next_step = f"install {error.name.partition('.')[0]} for {sys.executable}, or correct the import"
        elif isinstance(error, PermissionError):
            next_step = "let this user read it"
        elif isinstance(error, SystemExit):
            next_step = 'put the code that ends the program under: if __name__ == "__main__":'
        elif isinstance(error, UsageError):
            next_step = "correct it as the text says"
        why = f"line {line}: {why}" if line else why
        raise CliError(f"{path} cannot be loaded.", why, next_step, type="target") from error
    return module


# --- the app as it is served here -----------------------------------------------------------------------------------


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
        if section in ("limits", "auth"):
            settings.setdefault(section, {})[name] = value
        else:  # the URL of the ledger and the file of the audit trail have options named after their sections
            settings[name if section == "server" else section] = f"file:{value}" if section == "audit" else value
    return settings


# --- its ledger -------------------------------------------------------------------------------------------------------

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
