"""Where a verb sends its calls: an app in a Python file, `file.py` or `file.py:name`."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import click

from wirecall import App


class TargetError(click.ClickException):
    """A target that cannot be used: what, why, next. Exit code 2, as for any mistake on the command line."""

    exit_code = 2

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(f"{what}\n  why: {why}\n  fix: {fix}")


def load_app(target: str) -> App:
    """The app that a target names."""
    path, _, name = target.partition(":")
    if not Path(path).is_file():
        raise TargetError(f"There is no file {path}.", f"looked in {Path.cwd()}", "give the path of a Python file: app.py")
    module = _load(path)
    if name:
        return _named(module, path, name)
    apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
    if len(apps) != 1:
        found = f"{path} has {len(apps)} apps{': ' * bool(apps)}{', '.join(apps)}"
        raise TargetError("Which app?", found, f"name one: {path}:{next(iter(apps), 'app')}")
    return next(iter(apps.values()))


def _named(module: ModuleType, path: str, name: str) -> App:
    app = getattr(module, name, None)
    if not isinstance(app, App):
        kind = "does not exist" if app is None else f"is a {type(app).__name__}"
        raise TargetError(f"{path}:{name} is not an app.", f"it {kind}", "name a wirecall.App defined in that file")
    return app


def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is not a Python file.", "its name does not end in .py", "give the path of a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TargetError(f"{path} cannot be loaded.", _where(error, path), "correct the file and try again") from error
    return module


def _where(error: Exception, path: str) -> str:
    """The error and the line of the user's own file that it came from."""
    line = getattr(error, "lineno", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path or trace.tb_frame.f_code.co_filename == str(Path(path).resolve()):
            line = trace.tb_lineno
        trace = trace.tb_next
    text = str(error).replace("\n", "\n       ")
    return f"{type(error).__name__}: {text}" + (f" (line {line})" if line else "")
