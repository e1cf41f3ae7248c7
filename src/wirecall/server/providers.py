"""Providers: functions that make the values which handlers take by type.

1. The return annotation identifies a provider: a `def`, an `async def`, or a generator that yields
   one value and then cleans up.
2. Every value is made once per call, after the arguments are bound and, for a command, after the
   ledger has granted it. The clean-ups run when the handler has ended, last value first, and before
   the outcome of a command is recorded: they are part of the handler. A handler's exception is
   raised at the `yield`; a provider cannot turn it into a result.
3. The order of the values is determined when the app starts (`Providers.plan`), not in a call.
"""

import asyncio
import inspect
import types
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from msgspec import Struct

from wirecall.aio import in_thread, settled
from wirecall.errors import UsageError
from wirecall.protocol.params import (
    REQUIRED,
    Signature,
    choices_of,
    name_of,
    place_of,
    read_signature,
)
from wirecall.server.call import Call
from wirecall.server.context import Context

_YIELDS = (Iterator, AsyncIterator, Generator, AsyncGenerator)
# A provider of one of these would fill parameters that callers send.
_COMMON = frozenset(
    {Any, object, str, bytes, int, float, bool, None, type(None), list, dict, tuple, set, Context}
)


class Provider:
    """A function that makes values of one type."""

    def __init__(self, function: Callable[..., Any], *, blocking: bool) -> None:
        self.function = function
        self.blocking = blocking
        is_async_generator = inspect.isasyncgenfunction(function)
        self.cleans_up = is_async_generator or inspect.isgeneratorfunction(function)
        self.is_async = is_async_generator or inspect.iscoroutinefunction(function)
        self.parameters, self.injected, _, returns = read_signature(function, Context)
        if self.cleans_up and typing.get_origin(returns) in _YIELDS:
            returns = typing.get_args(returns)[0]
        self.type = returns
        self.manager: Callable[..., Any] = contextmanager(function)
        if is_async_generator:
            self.manager = asynccontextmanager(function)
        origin = typing.get_origin(returns)
        if (
            returns in _COMMON
            or origin in _COMMON - {None}
            or origin in (typing.Union, types.UnionType, *_YIELDS)
        ):
            raise UsageError(
                f"{self} provides {name_of(returns)}, which is not its own type.",
                "a parameter of this type would no longer be the caller's, in every method",
                "annotate the return with a class or a NewType; "
                "a generator with Iterator[...] or AsyncIterator[...] of it",
            )
        if blocking and self.is_async:
            raise UsageError(
                f"{self} is a coroutine function.",
                "blocking=True is for plain functions",
                "drop blocking=True, or async",
            )

    def __str__(self) -> str:
        return f"{name_of(self.function)} ({place_of(self.function)})"


class Providers:
    """The providers of an app, by type."""

    def __init__(self) -> None:
        self._providers: dict[object, Provider] = {}

    def add(self, provider: Provider) -> None:
        first = self._providers.setdefault(provider.type, provider)
        if first.function is not provider.function:
            raise UsageError(
                f"There are two providers of {name_of(provider.type)}.",
                f"{first} was registered first, then {provider}",
                "keep one of them, or give one its own type: a subclass or a NewType",
            )

    def find(self, hint: object) -> object | None:
        """Return the provided type that a parameter with this annotation takes, if there is one."""
        for each in (hint, *choices_of(hint)):
            if _is_known(each, self._providers):
                return each
        return None

    def check(self) -> None:
        """Raise `UsageError` if a provider takes a value that cannot be made."""
        for type in self._providers:
            self.plan([type])

    def of(self, signature: Signature, function: Callable[..., object]) -> "Provided":
        """Return the caller of a function with this signature that takes provided values."""
        return Provided(signature, function, self)

    def plan(self, types: Sequence[object]) -> "list[Step]":
        """Return the steps that make values of these types, each after the values that it takes."""
        steps: list[Step] = []
        slots: dict[object, int] = {}

        def visit(type: object, chain: list[Provider]) -> int:
            if type in slots:
                return slots[type]
            provider = self._providers[type]
            if provider in chain:
                circle = [*chain[chain.index(provider) :], provider]
                raise UsageError(
                    f"The provider of {name_of(type)} needs its own value.",
                    " -> ".join(map(str, circle)),
                    "take one of them out of the circle",
                )
            takes: dict[str, int] = dict.fromkeys(provider.injected, 0)
            for parameter in provider.parameters:
                found = self.find(parameter.type)
                if found is None and parameter.default is not REQUIRED:
                    continue
                if found is None:
                    raise UsageError(
                        f"{name_of(parameter.type)} is not provided.",
                        " -> ".join(
                            [*map(str, [*chain, provider]), f"the parameter {parameter.name}"]
                        ),
                        "register a provider of it with @app.provide; "
                        "a provider takes provided types and a Context",
                    )
                takes[parameter.name] = visit(found, [*chain, provider])
            steps.append(Step(provider, takes))
            slots[type] = len(steps)
            return len(steps)

        for type in types:
            visit(type, [])
        return steps


class Step(Struct, frozen=True):
    """One provider of a plan.

    `takes` has for each of its parameters the number of the value that it takes; 0 is the context.
    """

    provider: Provider
    takes: dict[str, int]


class Provided:
    """Calls a function with its arguments and with the values of its providers."""

    def __init__(
        self, signature: Signature, function: Callable[..., object], providers: Providers
    ) -> None:
        self._function = function
        self._steps = providers.plan(
            list(dict.fromkeys(type for type, _ in signature.provided.values()))
        )
        numbers = {step.provider.type: number for number, step in enumerate(self._steps, 1)}
        self._places = [
            (name, index, numbers[type]) for name, (type, index) in signature.provided.items()
        ]
        self._is_direct = not any(
            each.provider.is_async or each.provider.cleans_up for each in self._steps
        )
        self._is_direct &= not any(each.provider.blocking for each in self._steps)
        # If nothing waits and no provider takes the context, the function can be called with only
        # its caller's arguments, so that a query still takes the short path.
        needs_context = signature.injected or any(0 in each.takes.values() for each in self._steps)
        is_positional = signature.is_flat and all(index is not None for _, index, _ in self._places)
        self.call_directly: Callable[..., object] | None = None
        if self._is_direct and is_positional and not needs_context:
            self.call_directly = self._completing(function)

    def _completing(self, function: Callable[..., object]) -> Callable[..., object]:
        """Return a function that is called without the provided arguments."""
        # The common case, which needs no list of values.
        if len(self._steps) == 1 and len(self._places) == 1:
            make = self._steps[0].provider.function
            index = self._places[0][1]

            def complete(*given: object) -> object:
                if index == len(given):
                    return function(*given, make())
                return function(*given[:index], make(), *given[index:])

            return complete

        def complete_all(*given: object) -> object:
            args = list(given)
            values = self._values(None)
            for _, index, number in self._places:
                args.insert(index or 0, values[number])
            return function(*args)

        return complete_all

    def call(
        self,
        context: Context,
        args: Sequence[object],
        keywords: Mapping[str, object],
        call: Call | None = None,
        *,
        in_a_thread: bool,
    ) -> object:
        """Make the values and call the function; return its result, or an awaitable of it.

        `args` and `keywords` have a place for each value. `call.begin` is called when its handler
        starts.
        """
        args = list(args)
        keywords = dict(keywords)
        if call is not None:
            call.reached = False  # if a provider raises, the handler has not run

        def run(values: list[Any]) -> object:
            if call is not None:
                call.begin()
            for name, index, number in self._places:
                if index is None:
                    keywords[name] = values[number]
                else:
                    args[index] = values[number]
            if in_a_thread:
                return in_thread(lambda: self._function(*args, **keywords))
            return self._function(*args, **keywords)

        if self._is_direct:
            return run(self._values(context))
        return self._within(context, run)

    def _values(self, context: Context | None) -> list[Any]:
        values: list[Any] = [context]
        for step in self._steps:
            values.append(
                step.provider.function(
                    **{name: values[number] for name, number in step.takes.items()}
                )
            )
        return values

    async def _within(self, context: Context, run: Callable[[list[Any]], object]) -> object:
        values: list[Any] = [context]
        raised: BaseException | None = None
        async with AsyncExitStack() as stack:
            try:
                for step in self._steps:
                    provider = step.provider
                    taken = {name: values[number] for name, number in step.takes.items()}
                    if not provider.cleans_up:
                        if provider.blocking:
                            values.append(await in_thread(partial(provider.function, **taken)))
                        else:
                            made = provider.function(**taken)
                            if provider.is_async:
                                made = await made
                            values.append(made)
                    elif provider.is_async:
                        values.append(await stack.enter_async_context(provider.manager(**taken)))
                    elif provider.blocking:
                        values.append(
                            await stack.enter_async_context(_in_threads(provider.manager(**taken)))
                        )
                    else:
                        values.append(stack.enter_context(provider.manager(**taken)))
                return await settled(run(values))
            except BaseException as error:
                raised = error
                raise
        assert raised is not None
        raise raised  # a provider has swallowed it, so there is no result


@asynccontextmanager
async def _in_threads(manager: Any) -> AsyncIterator[Any]:
    """Enter and leave a blocking context manager in threads beside the loop."""
    entering = asyncio.ensure_future(in_thread(manager.__enter__))
    try:
        value = await asyncio.shield(entering)
    except asyncio.CancelledError:
        # The thread cannot be stopped, but its value is cleaned up.
        await asyncio.wait({entering})
        if entering.exception() is None:
            await in_thread(lambda: manager.__exit__(None, None, None))
        raise
    try:
        yield value
    except BaseException as error:
        leave = error
        await in_thread(lambda: manager.__exit__(type(leave), leave, leave.__traceback__))
        raise
    await in_thread(lambda: manager.__exit__(None, None, None))


def _is_known(hint: object, table: dict[object, Provider]) -> bool:
    try:
        return hint in table
    except TypeError:  # an annotation that is not hashable
        return False
