"""Options by name: a wrong one is a `UsageError` that names the right one.

Python's `TypeError` does not name it.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar, Unpack, get_args, get_origin

from wirecall.errors import UsageError, no_option

P = ParamSpec("P")
R = TypeVar("R")

# Why a function does not have an option, and what to do.
Explained: TypeAlias = tuple[str, str]
Explain: TypeAlias = Callable[[str, str], Explained | None]
# The function itself refuses the option, with a better reason.
ACCEPTED: Explained = ("", "")


def checks_options(
    function: Callable[P, R], explain: Explain | None = None, strings: Collection[str] = ()
) -> Callable[P, R]:
    """Raise `UsageError` for a wrong option of a function.

    `explain` gives details about some: called, name -> (why, fix). `strings` are those that must be
    strings.
    """

    @wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        check(function, args, options, explain, strings)
        return function(*args, **options)

    return checked


def check(
    function: Any,
    args: Sequence[object],
    options: Mapping[str, object],
    explain: Explain | None = None,
    strings: Collection[str] = (),
) -> None:
    """Raise `UsageError` for an unknown option, or one that was passed in a wrong way."""
    known = names(function)
    code = function.__code__
    called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    if len(args) > code.co_argcount and known:
        first = next(name for name in known if name not in code.co_varnames[: code.co_argcount])
        raise UsageError(
            f"{called}() takes its options by name.",
            fix=f"use {first}={args[code.co_argcount]!r:.100}",
        )
    for name, value in options.items():
        if name in strings and name in known and not (value is None or isinstance(value, str)):
            raise UsageError(
                f"{called}(): {name} must be a string, got {type(value).__name__}.",
                fix=f'use {name}="..."',
            )
        if name in known:
            continue
        if name in code.co_varnames[: code.co_posonlyargcount]:
            raise no_option(called, name, known, fix="pass it first, without its name")
        explained = None if explain is None else explain(called, name)
        if explained is None:
            raise no_option(called, name, known)
        if explained is not ACCEPTED:
            raise no_option(called, name, known, *explained)


def names(function: Any) -> Sequence[str]:
    """Return the names of the arguments that a function takes, also of `**options: Unpack[...]`."""
    code = function.__code__
    last = code.co_argcount + code.co_kwonlyargcount
    found = list(code.co_varnames[code.co_posonlyargcount : last])
    for annotation in function.__annotations__.values():
        if get_origin(annotation) is Unpack:
            found += get_args(annotation)[0].__annotations__
    return found
