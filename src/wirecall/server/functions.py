"""What a function tells about itself before it is ever called: its text, and how it will run."""

import types
from collections.abc import Callable
from typing import Any


def documented(function: Callable[..., Any]) -> str:
    """The docstring, as a reader who sees only it would like it."""
    import inspect  # late: `import wirecall` stays light

    return inspect.cleandoc(getattr(function, "__doc__", None) or "")


def is_async(function: Callable[..., Any]) -> bool:
    import inspect  # late: `import wirecall` stays light

    target = getattr(function, "func", function)  # functools.partial
    return inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(type(target).__call__)


def is_generator(function: Callable[..., Any]) -> bool:
    """Return whether a call gives a generator, plain or async, instead of a result."""
    import inspect  # late: `import wirecall` stays light

    target = getattr(function, "func", function)  # functools.partial
    kinds = (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_one(target) or is_one(type(target).__call__) for is_one in kinds)


def code_of(function: Callable[..., Any]) -> types.CodeType | None:
    """What was written in Python; None for a builtin, a partial, an object that is called."""
    code = getattr(function, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def mentions(code: types.CodeType, name: str) -> bool:
    """Whether a name is read in the code, or in a function inside it."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return name in code.co_names or any(mentions(const, name) for const in inner)
