"""A mounted app, as the methods that it brought see it.

Its methods are in the registry of the outer app, under a prefix. Each of them has a `Home`:

1. The middleware of the outer app runs first, then that of each app on the path to the method.
2. Inside its app, a method has its first name again, and `ctx.state` is the value of that app's
   lifespan.
3. The lifespan of the outer app is entered first, then those of the mounted apps, in the order in
   which they were mounted. They end in reverse order.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import UNSET

from wirecall.server.call import Call
from wirecall.server.context import Context, Middleware, Next, call_of
from wirecall.server.lifespan import manager_of

if TYPE_CHECKING:
    from wirecall.server.method import Method
    from wirecall.server.providers import Providers

Enter: TypeAlias = Callable[[], AbstractAsyncContextManager[object]]
Around: TypeAlias = Callable[[Middleware, Next], Next]


class Home:
    """One mounted app in an outer one. `path` is its name there: "stays", or "travel.stays"."""

    def __init__(
        self,
        path: str,
        layers: Sequence[Middleware],
        enter: Enter | None,
        providers: "Providers | None",
        outer: "Home | None" = None,
    ) -> None:
        self.path = path
        self.layers = layers
        self.enter = enter
        self.providers = providers
        self.outer = outer
        # The number of apps on the path, this one included.
        self.depth: int = 1
        self.has_layers = bool(layers)
        if outer is not None:
            self.depth = outer.depth + 1
            self.has_layers = self.has_layers or outer.has_layers
        self.methods: list[Method] = []
        # The value of the lifespan.
        self.state: object = UNSET

    def prepare(self) -> None:
        """Plan how the provided arguments of the methods are made."""
        if self.providers is not None:
            self.providers.check()
            for method in self.methods:
                method.prepare(self.providers)

    def guard(self, invoke: Next, around: Around) -> Next:
        """Return the middleware of all apps on the path around `invoke`."""
        guarded = invoke
        home: Home | None = self
        while home is not None:
            for layer in reversed(home.layers):
                guarded = around(layer, guarded)
            guarded = _entering(home, guarded)
            home = home.outer
        return guarded


class MountedContext(Context):
    """The call as the middleware and the handlers of a mounted app see it."""

    __slots__ = ("_home",)

    def __init__(self, call: Call, home: Home) -> None:
        super().__init__(call)
        self._home = home
        method = call.method
        for _ in range(home.depth):
            assert method.original is not None
            method = method.original
        self.method = method.name

    @property
    def state(self) -> Any:
        """The value that the lifespan of the mounted app yields; without one it is `values`."""
        if self._home.state is UNSET:
            return self._call.values
        return self._home.state


def context_of(call: Call) -> Context:
    """Return the context that the handler of a call gets."""
    if call.method.home is None:
        return Context(call)
    return MountedContext(call, call.method.home)


def _entering(home: Home, inner: Next) -> Next:
    return lambda context: inner(MountedContext(call_of(context), home))


@asynccontextmanager
async def together(own: Enter | None, homes: Iterable[Home]) -> AsyncIterator[object]:
    """Enter the lifespan of an app and those of its mounted apps; the value is the app's own."""
    async with AsyncExitStack() as stack:
        state: object = UNSET
        if own is not None:
            state = await stack.enter_async_context(manager_of(own()))
        for home in homes:
            if home.enter is not None:
                await stack.enter_async_context(_open(home, home.enter))
        yield state


@asynccontextmanager
async def _open(home: Home, enter: Enter) -> AsyncIterator[None]:
    """Enter the lifespan of one mounted app. An error on the way in or out names the app."""
    try:
        async with manager_of(enter()) as state:
            home.state = state
            yield
    except Exception as error:
        error.add_note(f"in the lifespan of the mounted app {home.path!r}")
        raise
    finally:
        home.state = UNSET
