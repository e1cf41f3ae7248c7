"""Mounting: an app inside another one.

1. `app.mount("stays", stays)` copies the methods of an app into the registry and the catalog of the
   outer one. Names of methods, tools and prompts begin with `stays.`; URIs and names of extension
   methods stay as they are.
2. The mounted app keeps its middleware, its lifespan, its providers and the rules of its methods
   (`server.home`). The outer app has everything that belongs to one address: the ledger, the
   verification of tokens, the limits, the audit trail.
3. If a mounted app demands something that the outer one does not have, `mount` raises an error, so
   no rule is weakened silently.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from wirecall.errors import UsageError
from wirecall.ledger.base import without_password
from wirecall.routing import check_transactional
from wirecall.server.context import Middleware
from wirecall.server.home import Enter, Home, together
from wirecall.server.identity import Scopes
from wirecall.server.method import Method

if TYPE_CHECKING:
    from wirecall.app import App

_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


class Mounts:
    """The apps that are mounted in an app."""

    def __init__(self, app: "App") -> None:
        self._app = app
        # By name.
        self.mounted: dict[str, App] = {}
        # The same and those that are mounted in them, by path. An app stands before those inside it.
        self.homes: dict[str, Home] = {}

    def add(self, name: str, app: "App") -> None:
        """Mount an app; `App.mount` has the rules."""
        self._check_mount(name, app)
        self._app._check_open()
        self._check_demands(name, app)
        for id, settings in app._extensions.items():
            if self._app._extensions.setdefault(id, settings) != settings:
                raise self._cannot(
                    name,
                    f"both declare the extension {id!r}, with different settings",
                    "give both the same settings",
                )
        homes = self._make_homes(name, app)

        def moved(method: Method, called: str, *, is_reserved: bool = True) -> Method:
            home = homes[None]
            if method.home is not None:
                home = homes[method.home.path]
            copy = method.under(called, home, app._execution, is_reserved=is_reserved)
            self._add_base_scopes(copy, app)
            home.methods.append(copy)
            return copy

        for method in {**app.registry.methods, **app.registry.tools}.values():
            if method.name.startswith("rpc.") or method.is_batch:
                continue
            check_transactional(method.terms, self._app._ledger_scheme)
            self._app.registry.add(moved(method, f"{name}.{method.name}", is_reserved=False))
        if app._catalog is not None:
            self._app.catalog().take(app._catalog, f"{name}.", moved)
        self.mounted[name] = app
        self.homes.update((home.path, home) for home in homes.values())
        app._outer.append(self._app)

    def _make_homes(self, name: str, app: "App") -> dict[str | None, Home]:
        """Return the homes of an app, at None, and of the apps that are mounted in it."""
        first = Home(name, app._middleware, app._enter_own, app.providers)
        homes: dict[str | None, Home] = {None: first}
        for path, inner in _homes_in(app).items():
            outer = first
            if inner.outer is not None:
                outer = homes[inner.outer.path]
            homes[path] = Home(f"{name}.{path}", inner.layers, inner.enter, inner.providers, outer)
        return homes

    def _add_base_scopes(self, method: Method, app: "App") -> None:
        """Ask for the scopes that every token of a mounted app needs."""
        if app.access is None or app.access is self._app.access or not app.access.scopes:
            return
        scopes = method.scopes or Scopes((), method.function, method.signature, method.name)
        method.scopes = scopes.with_base(app.access.scopes)

    # --- checks -----------------------------------------------------------------------------------

    def _cannot(self, name: str, why: str, fix: str) -> UsageError:
        return UsageError(f"The app {self._app.name!r} cannot mount {name!r}.", why, fix)

    def _check_mount(self, name: str, app: "App") -> None:
        """Raise `UsageError` if an app cannot be mounted here, whatever it declares."""
        called: object = name
        if not isinstance(called, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"mount() takes a name, got {name!r}.",
                "it begins the names of methods, followed by a dot",
                'use letters, digits, _ and -, as in app.mount("stays", stays)',
            )
        if app._unmountable is not None:
            raise self._cannot(name, app._unmountable, "serve it at its own address")
        if self._app._has_begun:
            raise self._cannot(
                name,
                "it is serving already, and the lifespan of the mounted app would not be entered",
                "mount it before the first call",
            )
        if app is self._app or _contains(app, self._app):
            raise self._cannot(
                name, f"{app.name!r} contains {self._app.name!r}", "drop one of the two mounts"
            )
        if name in self.mounted:
            raise self._cannot(
                name,
                f"the app {self.mounted[name].name!r} is mounted under this name",
                "give one of them another name",
            )
        for known, other in self.mounted.items():
            if other is app or _contains(other, app) or _contains(app, other):
                raise self._cannot(
                    name,
                    f"{other.name!r}, mounted as {known!r}, has or is the same app, "
                    "and a lifespan is entered once",
                    "mount it once",
                )

    def _check_demands(self, name: str, app: "App") -> None:
        """Raise `UsageError` if a mounted app demands what the outer one does not have."""
        if app.mode != self._app.mode:
            raise self._cannot(
                name,
                f"one app has one mode: that of {app.name!r} is {app.mode!r}, "
                f"that of {self._app.name!r} is {self._app.mode!r}",
                "give both the same mode=, or set WIRECALL_MODE",
            )
        if app._names_ledger and app.ledger_url != self._app.ledger_url:
            raise self._cannot(
                name,
                f"one app has one ledger: {app.name!r} names "
                f"{without_password(app.ledger_url)}, {self._app.name!r} has "
                f"{without_password(self._app.ledger_url)}",
                f'drop ledger= of {app.name!r}, or name the same one in App("{self._app.name}", ...)',
            )
        if app._trail is not None and app._trail != self._app._trail:
            raise self._cannot(
                name,
                f"one app has one audit trail: {app.name!r} has {_trail_name(app._trail)}, "
                f"{self._app.name!r} has {_trail_name(self._app._trail)}",
                "give both the same audit=, or drop that of the mounted app",
            )
        self._check_callers(name, app)

    def _check_callers(self, name: str, app: "App") -> None:
        """Raise `UsageError` if callers are not verified as a mounted app demands."""
        why: str | None = None
        if app._authenticate is not None and app._authenticate is not self._app._authenticate:
            why = f"{app.name!r} has authenticate=, and {self._app.name!r} does not have the same"
        if app.access is not None and self._app.access is None:
            why = f"{app.name!r} has auth=, and {self._app.name!r} has none"
        if app.access is not None and self._app.access is not None:
            misfit = self._app.access.misfit(app.access)
            if misfit is not None:
                why = f"the auth= of {app.name!r} is another: {misfit}"
        if why is not None:
            raise self._cannot(
                name,
                f"{why}; a caller is verified once, at the address that both share",
                "make one object, verifier = Jwt(...), and pass it to both apps, "
                "or serve the app at its own address",
            )

    def check_callers(self) -> None:
        """Check the mounted apps again: the rules about callers have changed."""
        for name, app in self.mounted.items():
            self._check_callers(name, app)

    def prepare(self) -> None:
        """Plan how the provided arguments of all mounted methods are made."""
        for home in self.homes.values():
            home.prepare()

    def layers(self) -> list[Middleware]:
        """Return the middleware of all mounted apps."""
        return [layer for home in self.homes.values() for layer in home.layers]

    def living(self, enter: Enter | None) -> Enter | None:
        """Return what enters the lifespan of the app and those of the mounted ones."""
        homes = self.homes.values()
        if not any(home.enter is not None for home in homes):
            return enter
        return partial(together, enter, homes)


def _homes_in(app: "App") -> Mapping[str, Home]:
    if app._mounts is None:
        return {}
    return app._mounts.homes


def _contains(app: "App", other: "App") -> bool:
    """Return whether an app is mounted in another one, at any depth."""
    if app._mounts is None:
        return False
    return any(each is other or _contains(each, other) for each in app._mounts.mounted.values())


def _trail_name(trail: "dict[str, Any] | None") -> str:
    if trail is None:
        return "none"
    return f"file:{trail['path']}"
