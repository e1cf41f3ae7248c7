"""The app of a target: its file or module is loaded, and the app is found in it.

1. A file that is part of a package is loaded as a module of it, so that its relative imports work.
   The folder that contains the package comes first on the path. A module is found from the current
   folder, as with `python -m`.
2. Everything that the user's code prints while it is loaded goes to stderr: stdout belongs to the
   verb.
3. If it fails, the error names the innermost line of the user's own code. The traceback is printed
   with `--traceback`.
"""

import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter, iscoroutine, signature
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from wirecall.app import App
from wirecall.cli.failures import CliError, print_traceback
from wirecall.errors import UsageError, nearest

T = TypeVar("T")

_GIVE = "give the path of a Python file"

# Code that is not the user's.
_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OURS = Path(__file__).resolve().parents[1]


def load_app(text: str, name: str, *, is_module: bool, is_factory: bool) -> App:
    """Return the app that a file or a module defines, or that a function in it makes."""
    module = _module(text) if is_module else _file(text)
    if is_factory:
        return _made(text, name, module)
    apps = {key: value for key, value in vars(module).items() if isinstance(value, App)}
    if name in apps:
        return apps[name]
    first = next(iter(apps), "")
    if name:
        raise _not_an_app(text, name, getattr(module, name, None), first)
    if not apps:
        why = "no wirecall.App is defined at its top level"
        next_step = 'add: app = App("name")'
        makers = [key for key, value in vars(module).items() if _is_factory(value, module)]
        if makers:
            next_step = f"add it, or name a function that makes one: {text}:{makers[0]} --factory"
        raise CliError(f"{text} has no app.", why, next_step, type="target")
    if len(apps) > 1:
        why = f"{text} has {len(apps)} apps: {', '.join(apps)}"
        raise CliError("Which app?", why, f"name one: {text}:{first}", type="target")
    return apps[first]


def _not_an_app(text: str, name: str, found: object, first: str) -> CliError:
    why = "there is no such name in the file"
    next_step = "name a wirecall.App defined in that file"
    if first:
        next_step = f"name {text}:{first}"
    if found is not None:
        why = f"it is of type {type(found).__name__}"
        if callable(found):
            next_step = f"if it makes the app: {text}:{name} --factory"
    return CliError(f"{text}:{name} is not an app.", why, next_step, type="target")


def _is_factory(value: object, module: ModuleType) -> bool:
    """Return whether a value is a function of the module that says that it returns an app."""
    hints = getattr(value, "__annotations__", None) or {}
    own = getattr(value, "__module__", "") == module.__name__
    return own and callable(value) and hints.get("return") in (App, "App", "wirecall.App")


def _made(text: str, name: str, module: ModuleType) -> App:
    """Return the app that a function makes."""
    if not name:
        why = "--factory needs the name of a function"
        raise CliError("Which function?", why, f"{text}:create_app --factory", type="target")
    make = getattr(module, name, None)
    if isinstance(make, App):
        why = "it is an app, and not a function that makes one"
        raise CliError(f"{text}:{name} is not a factory.", why, "drop --factory", type="target")
    if not callable(make):
        why = "there is no such name in the file"
        if make is not None:
            why = f"it is of type {type(make).__name__}"
        next_step = "name a function without parameters that returns a wirecall.App"
        raise CliError(f"{text}:{name} is not a factory.", why, next_step, type="target")
    if needed := _needed(make):
        why = f"it cannot be called without {', '.join(needed)}"
        next_step = "give each of its parameters a default"
        raise CliError(f"{text}:{name} is not a factory.", why, next_step, type="target")
    made = _run(text, make)
    if isinstance(made, App):
        return made
    why = f"it returned {type(made).__name__}, and not an App"
    next_step = "return the app"
    if iscoroutine(made):
        made.close()
        why = "it is an async function, and runs before the event loop"
        next_step = "make it a plain function; open connections in the lifespan of the app"
    raise CliError(f"{text}:{name} made no app.", why, next_step, type="target")


def _needed(make: Callable[..., object]) -> list[str]:
    """Return the parameters of a function that have no default."""
    try:
        parameters = signature(make).parameters.values()
    except (TypeError, ValueError):  # not every callable in C describes itself
        return []
    packed = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [
        each.name
        for each in parameters
        if each.default is Parameter.empty and each.kind not in packed
    ]


# --- files and modules ----------------------------------------------------------------------------


def _file(text: str) -> ModuleType:
    """Load a file, as a module of its package if it is in one."""
    path = Path(text)
    if not path.is_file():
        raise no_file(text)
    root, name = _place(path.resolve())
    # As `python FILE` would: the file's neighbours can be imported.
    _add_path(path.resolve().parent)
    if "." in name or path.name == "__init__.py":
        _add_path(root)
        module = _run(text, lambda: import_module(name))
        if Path(module.__file__ or "").resolve() == path.resolve():
            return module
        raise CliError(
            f"{text} cannot be loaded.",
            f"another module is called {name}: {module.__file__}",
            "rename one of them",
            type="target",
        )
    spec = spec_from_file_location(path.stem, text)
    if spec is None or spec.loader is None:
        raise CliError(
            f"{text} is not a Python file.", "its name does not end in .py", _GIVE, type="target"
        )
    module = module_from_spec(spec)
    # Pickling finds the module by its name.
    sys.modules[spec.name] = module
    load = spec.loader.exec_module
    _run(text, lambda: load(module))
    return module


def _place(path: Path) -> tuple[Path, str]:
    """Return the folder above the package of a file, and the file's name as a module."""
    parts: list[str] = []
    if path.name != "__init__.py":
        parts.append(path.stem)
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder.name.isidentifier():
        parts.insert(0, folder.name)
        folder = folder.parent
    return folder, ".".join(parts)


def _module(name: str) -> ModuleType:
    """Import a module, from the current folder or from an installed package."""
    _add_path(Path.cwd())
    return _run(name, lambda: import_module(name))


def _add_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def no_file(path: str, name: str = "") -> CliError:
    """Return the error about a file that is not there."""
    if Path(path).exists():
        what = f"{path} is not a file."
        next_step = f"{_GIVE}: app.py"
        if Path(path).is_dir():
            what = f"{path} is a folder."
            if Path(path, "__init__.py").is_file():
                next_step = f"name the app in the package: {Path(path).name}:app"
        return CliError(what, "an app is in a Python file", next_step, type="target")
    what = f"There is no file {path}."
    if name.partition("/")[0].isdecimal():
        return CliError(
            what, f"{path}:{name} looks like an address", f"http://{path}:{name}", type="target"
        )
    folder = Path(path).parent
    beside = []
    if folder.is_dir():
        beside = [str(folder / each.name) for each in folder.glob("*.py")]
    near = nearest(str(Path(path)), beside)
    why = f"looked in {Path.cwd()}"
    if near:
        why = f"the nearest is {near}"
    return CliError(what, why, f"{_GIVE}: {near or 'app.py'}", type="target")


# --- errors of the user's code --------------------------------------------------------------------


def _run(text: str, work: Callable[[], T]) -> T:
    """Run the user's code; an error in it names the line."""
    try:
        with redirect_stdout(sys.stderr):
            return work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        failure = _not_loaded(text, error)
        if print_traceback(error):
            raise failure from None
        failure.next += "; --traceback shows the traceback"
        raise failure from error


def _not_loaded(text: str, error: BaseException) -> CliError:
    """Return the error of code that cannot be loaded."""
    if isinstance(error, ModuleNotFoundError) and _is_missing(text, error):
        return _no_module(str(error.name), text)
    place = _place_of(text, error)
    why = f"{type(error).__name__}: {error}"
    next_step = "correct the file and try again"
    if isinstance(error, SyntaxError):
        place = (error.filename or text, error.lineno or 0)
        why = error.msg
        line = (error.text or "").strip()
        # A line that is not UTF-8 shows nothing: Python 3.14 reads it with signs of replacement.
        if "codec" not in error.msg and "\ufffd" not in line:
            why = f"{error.msg}\n{line}".strip()
    elif isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        next_step = f"install {package} for {sys.executable}, or correct the import"
    elif isinstance(error, PermissionError):
        next_step = "let this user read it"
    elif isinstance(error, SystemExit):
        next_step = 'put the code that ends the program under: if __name__ == "__main__":'
    elif isinstance(error, UsageError):
        next_step = "correct it as the text says"
    if place is not None and place[1]:
        why = f"{_shown(text, *place)}: {why}"
    return CliError(f"{text} cannot be loaded.", why, next_step, type="target")


def _is_missing(text: str, error: ModuleNotFoundError) -> bool:
    """Return whether the target itself is missing, and not a module that it imports."""
    name = str(error.name)
    is_part = text == name or text.startswith(f"{name}.")
    return is_part and not any(_is_own(text, Path(path)) for path, _ in _frames(error))


def _no_module(missing: str, text: str) -> CliError:
    parent, _, last = missing.rpartition(".")
    file = Path("src", *text.split(".")).with_suffix(".py")
    if file.is_file():
        why = "it is in the folder src, where Python looks only if the project is installed"
        next_step = f"pip install --editable . or name the file: {file}"
        return CliError(f"There is no module {missing}.", why, next_step, type="target")
    places = [Path.cwd()]
    if parent:
        places = [Path(each) for each in getattr(sys.modules.get(parent), "__path__", [])]
    names = [each.stem for place in places for each in place.glob("*") if _is_module(each)]
    near = nearest(last, names)
    why = f"looked in {Path.cwd()} and in the installed packages"
    if parent and not places:
        why = f"{parent} is a module, and not a package"
    elif near:
        why = f"the nearest is {'.'.join(filter(None, (parent, near)))}"
    next_step = "name it as Python imports it: package.module:app; or give the path of a file"
    return CliError(f"There is no module {missing}.", why, next_step, type="target")


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path / "__init__.py").is_file()


def _frames(error: BaseException) -> Iterator[tuple[str, int]]:
    """Yield the files and lines of a traceback, the outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def _place_of(text: str, error: BaseException) -> tuple[str, int] | None:
    """Return the innermost line of the user's own code."""
    own = [(path, line) for path, line in _frames(error) if _is_own(text, Path(path))]
    return own[-1] if own else None


def _is_own(text: str, path: Path) -> bool:
    """Return whether a file is the user's: the target's, or one that is not installed."""
    if str(path).startswith("<"):
        return False
    resolved = path.resolve()
    if resolved.is_relative_to(_OURS):
        return False
    if resolved == Path(text).resolve():
        return True
    # A target may be an installed package.
    package = sys.modules.get(text.partition(".")[0])
    roots = [Path(each).resolve() for each in getattr(package, "__path__", [])]
    if any(resolved.is_relative_to(root) for root in roots):
        return True
    return not any(resolved.is_relative_to(each) for each in _INSTALLED)


def _shown(text: str, path: str, line: int) -> str:
    """Return a line of a file for people; the file is not repeated if it is the target."""
    if Path(path).resolve() == Path(text).resolve():
        return f"line {line}"
    place = Path(path).resolve()
    if place.is_relative_to(Path.cwd()):
        place = place.relative_to(Path.cwd())
    return f"{place}, line {line}"
