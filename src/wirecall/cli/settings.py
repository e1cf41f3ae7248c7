"""The settings of wirecall.toml and the environment for an app in a file, under the names of the options of `serve`."""

from collections.abc import Mapping
from typing import Any

import click
import msgspec

from wirecall import App, Limits
from wirecall.cli.failures import CliError, nearest
from wirecall.cli.targets import Target

# The option `--ledger`, as the parameter `ledger`.
ledger_option = click.option(
    "--ledger", metavar="URL", help="Ledger of an app in a file: sqlite:PATH, redis://..., postgresql://..., memory:"
)

# The option `--limit NAME=NUMBER`, as the parameter `limits`, a tuple of texts.
limit_option = click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=NUMBER",
    help=f"One of: {', '.join(Limits.__struct_fields__)}. May be repeated.",
)


def read_limits(words: tuple[str, ...]) -> dict[str, float]:
    """Return the limits that `--limit` states."""
    found: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in Limits.__struct_fields__:
            near = nearest(name, Limits.__struct_fields__)
            why = f"did you mean {near}?" if near else f"there are {', '.join(Limits.__struct_fields__)}"
            raise CliError(f"There is no limit {name!r}.", why, "--limit batch=100")
        try:
            found[name] = msgspec.convert(number, Limits.__annotations__[name], strict=False)
        except msgspec.ValidationError:
            what = f"The limit {name} must be a number, got {number!r}."
            raise CliError(what, "", f"--limit {name}={getattr(Limits(), name)}") from None
    return found


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
    from wirecall.config import load_config

    stated = load_config(path).stated()
    settings = {place.removeprefix("server."): value for place, value in stated.items() if place.startswith("server.")}
    if "ledger.url" in stated:
        settings["ledger"] = stated["ledger.url"]
    if "audit.file" in stated:
        settings["audit"] = f"file:{stated['audit.file']}"
    limits = {place.removeprefix("limits."): value for place, value in stated.items() if place.startswith("limits.")}
    return settings | ({"limits": limits} if limits else {})
