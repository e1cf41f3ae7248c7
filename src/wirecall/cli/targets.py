"""Where a verb finds its server. One grammar for all verbs:

    shop.py, shop.py:app     an app in a Python file, in this process
    http://…, https://…      a server's address; without a path it is one of ours: /rpc, or /mcp with --as mcp
    -- command …             a server on the stdin and stdout of a process; all words after `--` are its command line

Verbs are made with `cls=TargetCommand` and take the target first, by `target_argument`. Whatever the user's file prints goes
to stderr: stdout is the verb's.
"""

import importlib.util
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from urllib.parse import urlsplit

import click
from msgspec import Struct

from wirecall import App
from wirecall.cli.failures import Failure, nearest
from wirecall.errors import UsageError

# Stands for the words after `--`; no argument of a program can hold it.
_COMMAND = "\0command"


class Target(Struct, frozen=True):
    """A server, as it was named."""

    kind: Literal["file", "url", "command"]
    text: str  # of a file: the path; of a command: the words, for people
    name: str = ""  # of the app in the file
    command: tuple[str, ...] = ()

    def app(self) -> App:
        """The app in the file, for verbs that need one."""
        if self.kind != "file":
            raise Failure(f"{self.text} is not a file.", "this verb needs an app in a Python file", "name one: app.py")
        return load_app(self)

    def line(self, verb: str, *words: str) -> str:
        """The command line of another verb on this target, for people."""
        where = f"{self.text}:{self.name}" if self.name else self.text
        parts = [verb, *words, "--", self.text] if self.kind == "command" else [verb, where, *words]
        return " ".join(["wirecall", *filter(None, parts)])


class TargetCommand(click.Command):
    """A command whose target may be the words after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_COMMAND] = tuple(args[at + 1 :])
            args = [_COMMAND, *args[:at]]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND ...]"]


def target_argument(required: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The first argument of a verb."""
    return click.argument("target", type=parse, required=required, metavar="TARGET" if required else "[TARGET]")


def parse(text: str) -> Target:
    """A target from its text."""
    if text == _COMMAND:
        return _of_command(click.get_current_context().meta[_COMMAND])
    if not text.strip():
        raise Failure("The target is empty.", "it names no file and no address", "app.py, http://..., or -- command ...")
    if text.lower().startswith(("http://", "https://")):
        return Target("url", _checked(text))
    if "://" in text:
        raise Failure(f"{text} is not a target.", "servers are reached by http and https", "http://..., or a file: app.py")
    path, _, name = text.partition(":")
    return Target("file", path, name)


def _checked(url: str) -> str:
    """An address that can be split into its parts; whether somebody is there is found out later."""
    try:
        split = urlsplit(url)
        host, _ = split.hostname, split.port  # either of them may raise
        why = "" if host else "it has no host"
        why = "there is a space in it" if any(sign.isspace() for sign in url) else why
    except ValueError as error:
        why = str(error)
    if why:
        raise Failure(f"{url!r} is not an address.", why, "http://127.0.0.1:8420, or .../rpc, .../mcp", type="target")
    return split._replace(scheme=split.scheme.lower()).geturl()


def _of_command(command: tuple[str, ...]) -> Target:
    if not command:
        raise Failure("There is no command after `--`.", "it is the command line of a server", "-- python server.py")
    return Target("command", " ".join(command), command=command)


# --- files ----------------------------------------------------------------------------------------------------------


def load_app(target: Target) -> App:
    """The app that a file defines."""
    path = target.text
    if not Path(path).is_file():
        raise _no_file(path, target.name)
    module = _load(path)
    if target.name:
        return _named(module, path, target.name)
    apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
    if not apps:
        raise Failure(
            f"{path} has no app.", "no wirecall.App is defined at its top level", 'add: app = App("name")', type="target"
        )
    if len(apps) > 1:
        raise Failure(
            "Which app?",
            f"{path} has {len(apps)} apps: {', '.join(apps)}",
            f"name one: {path}:{next(iter(apps))}",
            type="target",
        )
    return next(iter(apps.values()))


def _no_file(path: str, name: str) -> Failure:
    if Path(path).exists():
        what = f"{path} is a folder." if Path(path).is_dir() else f"{path} is not a file."
        return Failure(what, "an app is in a Python file", "give the path of a Python file: app.py", type="target")
    if name.partition("/")[0].isdecimal():
        return Failure(
            f"There is no file {path}.", f"{path}:{name} looks like an address", f"http://{path}:{name}", type="target"
        )
    folder = Path(path).parent
    beside = [str(folder / each.name) for each in folder.glob("*.py")] if folder.is_dir() else []
    near = nearest(str(Path(path)), beside)
    why = f"the nearest is {near}" if near else f"looked in {Path.cwd()}"
    return Failure(f"There is no file {path}.", why, f"give the path of a Python file: {near or 'app.py'}", type="target")


def _named(module: ModuleType, path: str, name: str) -> App:
    app = getattr(module, name, None)
    if isinstance(app, App):
        return app
    apps = [key for key, value in vars(module).items() if isinstance(value, App)]
    why = "there is no such name in the file" if app is None else f"it is of type {type(app).__name__}"
    found = f"{path}:{apps[0]}" if apps else "a wirecall.App defined in that file"
    raise Failure(f"{path}:{name} is not an app.", why, f"name {found}", type="target")


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise Failure(
            f"{path} is not a Python file.", "its name does not end in .py", "give the path of a Python file", type="target"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise Failure(f"{path} cannot be loaded.", _where(error, path), _remedy(error), type="target") from error
    return module


def _where(error: BaseException, path: str) -> str:
    """The error and the line of the user's own file that it came from."""
    if isinstance(error, SyntaxError):
        shown = (error.text or "").strip() if "codec" not in error.msg else ""
        return (f"line {error.lineno}: " if error.lineno else "") + error.msg + (f"\n{shown}" if shown else "")
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in (path, str(Path(path).resolve())):
            line = trace.tb_lineno
        trace = trace.tb_next
    return (f"line {line}: " if line else "") + f"{type(error).__name__}: {error}"


def _remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"install {error.name.partition('.')[0]} for {sys.executable}, or correct the import"
    if isinstance(error, PermissionError):
        return "see that this user may read it"
    if isinstance(error, SystemExit):
        return 'put what ends the program under: if __name__ == "__main__":'
    if isinstance(error, UsageError):
        return "correct it as the text says"
    return "correct the file and try again"
