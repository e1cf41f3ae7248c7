"""What wirecall.toml and the environment say of an app in a file, and of serving it; named as the options of `serve`."""

from collections.abc import Callable, Mapping
from typing import Any

import click
import msgspec

from wirecall import App, Limits
from wirecall.cli.failures import Failure, nearest
from wirecall.cli.targets import Target


def ledger_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option `--ledger`, as the parameter `ledger`."""
    text = "Ledger of an app in a file: sqlite:PATH, redis://..., postgresql://..., memory:"
    return click.option("--ledger", metavar="URL", help=text)(function)


def limit_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option `--limit NAME=NUMBER`, as the parameter `limits`, a tuple of texts."""
    text = f"One of: {', '.join(Limits.__struct_fields__)}. May be repeated."
    return click.option("--limit", "limits", multiple=True, metavar="NAME=NUMBER", help=text)(function)


def read_limits(words: tuple[str, ...]) -> dict[str, float]:
    """The limits that were named."""
    found: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in Limits.__struct_fields__:
            near = nearest(name, Limits.__struct_fields__)
            why = f"did you mean {near}?" if near else f"there are {', '.join(Limits.__struct_fields__)}"
            raise Failure(f"There is no limit {name!r}.", why, "--limit batch=100")
        found[name] = _number(name, number)
    return found


def _number(name: str, text: str) -> float:
    try:
        return msgspec.convert(text, Limits.__annotations__[name], strict=False)  # type: ignore[no-any-return]
    except msgspec.ValidationError:
        raise Failure(
            f"{text!r} is not a number for the limit {name}.", "", f"--limit {name}={getattr(Limits(), name)}"
        ) from None


def app_of(target: Target, ledger: str | None = None) -> App | None:
    """The app in a file, as it would be served; None for a server elsewhere, whose ledger is its own."""
    if target.kind == "file":
        stated = serve_settings()
        chosen = ledger or stated.get("ledger")
        return configured(target.app(), ledger=chosen, audit=stated.get("audit"), limits=stated.get("limits"))
    if ledger is not None:
        raise Failure("--ledger is for an app in a file.", f"{target.text} has a ledger of its own", "drop --ledger")
    return None


def configured(
    app: App, *, ledger: str | None = None, audit: str | None = None, limits: Mapping[str, float] | None = None
) -> App:
    """The app with what was said over its own."""
    changed: Any = dict(limits or {})
    app.configure(ledger=ledger, audit=audit, limits=msgspec.structs.replace(app.limits, **changed) if changed else None)
    return app


# The name of an option, by the place of its value in the file.
_OPTIONS = {
    "server.app": "app",
    "server.http": "http",
    "server.workers": "workers",
    "server.server": "server",
    "server.grace": "grace",
    "server.hosts": "hosts",
    "server.origins": "origins",
    "ledger.url": "ledger",
}


def serve_settings(path: str | None = None) -> dict[str, Any]:
    """Only what was stated; flags go on top of it. A mistake is a `UsageError` with the line it stands on."""
    from wirecall.config import load_config

    stated = load_config(path).stated()
    settings = {option: stated[place] for place, option in _OPTIONS.items() if place in stated}
    limits = {place.removeprefix("limits."): value for place, value in stated.items() if place.startswith("limits.")}
    if "audit.file" in stated:
        settings["audit"] = f"file:{stated['audit.file']}"
    return settings | ({"limits": limits} if limits else {})
