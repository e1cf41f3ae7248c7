"""The options by which a server lets people watch its calls: the console, and `/metrics`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import click
from msgspec import Struct, structs

from wirecall.cli.failures import CliError
from wirecall.config import DEFAULT, Config, without_secrets
from wirecall.protocol.messages import JsonObject

if TYPE_CHECKING:
    from wirecall.app import App

PORT = click.IntRange(0, 65535)
# The settings of wirecall.toml that say the same as an option.
PLACES = {
    "console": "console.enabled",
    "port": "console.port",
    "readonly": "console.readonly",
    "capture": "console.capture",
    "metrics": "metrics.http",
    "metrics_token": "metrics.token",
}
COMMAND_LINE = "the command line"
# Hosts that stand for every address of this machine, and the one of them that it reaches itself at.
_EVERY = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def host_and_port(address: str, example: str) -> tuple[str, int]:
    """Return the host and the port to listen on."""
    host, colon, port = address.rpartition(":")
    is_number = port.isascii() and port.isdigit()
    if not colon or not is_number or int(port) > 65535:
        why = "expected HOST:PORT, the port up to 65535"
        raise CliError(f"{address!r} is not an address.", why, example)
    return host.strip("[]") or "127.0.0.1", int(port)


def local_address(scheme: str, host: str, port: int) -> str:
    """Return the address at which programs of this machine reach a server."""
    host = _EVERY.get(host, host)
    if ":" in host:
        host = f"[{host}]"
    return f"{scheme}://{host}:{port}"


class Watching(Struct, frozen=True):
    """How the calls of a server are watched; None: the command line does not say."""

    console: bool | None = None
    port: int | None = None
    readonly: bool | None = None
    capture: Literal["facts", "bodies"] | None = None
    sessions: str | None = None
    metrics: str | None = None
    metrics_token: str | None = None

    def or_else(self, config: Config) -> "Watching":
        """Return the options with those of wirecall.toml where the command line is silent."""
        merged = {name: getattr(self, name) for name in PLACES}
        for name, place in PLACES.items():
            if merged[name] is None:
                merged[name] = config.get(place)
        whole = structs.replace(self, **merged)
        whole.check(self)
        return whole

    def check(self, given: "Watching") -> None:
        """Refuse options of the command line that have no effect."""
        if not self.console and (given.port is not None or given.readonly):
            name = "--console-readonly" if given.readonly else "--console-port"
            raise CliError(f"{name} is for --console.", "there is no console", f"--console {name}")
        if self.metrics is None and given.metrics_token is not None:
            raise CliError(
                "--metrics-token is for --metrics.",
                "/metrics is not served",
                "--metrics 127.0.0.1:9464",
            )

    def stated(self) -> dict[str, Any]:
        """Return the options that the command line states, by their places in wirecall.toml."""
        found = {place: getattr(self, name) for name, place in PLACES.items()}
        return {place: value for place, value in found.items() if value is not None}

    @contextmanager
    def of(
        self,
        app: "App",
        *,
        target: str,
        address: str,
        settings: list[JsonObject],
        is_successor: bool = False,
    ) -> Iterator[None]:
        """Watch an app while it serves. `settings` are the values in force, for their page.

        A successor shares the addresses of its predecessor.
        """
        if not self.console and self.metrics is None:
            yield
            return
        # Late: a server that is not watched does not load it.
        from wirecall.console.process import Companion, Settings, served_now
        from wirecall.console.source import ListenerSettings

        metrics = None
        if self.metrics is not None:
            metrics = host_and_port(self.metrics, "--metrics 127.0.0.1:9464")
            _check_token(metrics[0], self.metrics_token)
        console = None
        if self.console:
            console = ListenerSettings(
                readonly=bool(self.readonly), sessions=self.sessions, shares=is_successor
            )
            if self.port is not None:
                console = structs.replace(console, port=self.port)
        whole = Settings(
            served_now(app.name, target, address),
            console,
            self.port is not None,
            metrics,
            _secret(self.metrics_token),
            shares=is_successor,
            values=settings,
        )
        companion = Companion(whole, self.capture or "facts")
        try:
            companion.start(app)
            yield
        finally:
            companion.stop()


def settings_in_force(config: Config, given: Mapping[str, Any]) -> list[JsonObject]:
    """Return every value with its origin, without secrets.

    `given` are the values that the command line states, by their places.
    """
    rows: list[JsonObject] = []
    for place, value in config.values.items():
        if place.partition(".")[0] in ("gateway", "upstream") and not config.has_gateway:
            continue
        row: JsonObject = {"name": place, "value": value.value, "origin": value.origin}
        if place in given:
            row |= {"value": given[place], "origin": COMMAND_LINE}
        if row["value"] is not None or row["origin"] != DEFAULT:
            rows.append({**row, "value": without_secrets(row["value"])})
    return rows


def watching_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a verb, which gets them as `watching`."""

    @wraps(command)
    def gathered(
        console: bool | None,
        console_port: int | None,
        console_readonly: bool | None,
        console_sessions: str | None,
        capture: Literal["facts", "bodies"] | None,
        metrics: str | None,
        metrics_token: str | None,
        **given: Any,
    ) -> Any:
        watching = Watching(
            console,
            console_port,
            console_readonly,
            capture,
            console_sessions,
            metrics,
            metrics_token,
        )
        return command(watching=watching, **given)

    options = [
        click.option(
            "--console/--no-console",
            default=None,
            help="Serve the console on the loopback. [default: off]",
        ),
        click.option("--console-port", type=PORT, help="Port of the console. [default: 8421]"),
        click.option(
            "--console-readonly",
            is_flag=True,
            default=None,
            help="The console changes nothing.",
        ),
        click.option("--console-sessions", hidden=True),  # `wirecall dev` sets it
        click.option(
            "--capture",
            type=click.Choice(["facts", "bodies"]),
            help="What the console keeps of a call; bodies are params and results without "
            "secrets. [default: facts]",
        ),
        click.option("--metrics", metavar="HOST:PORT", help="Serve /metrics for Prometheus there."),
        click.option(
            "--metrics-token",
            metavar="env:NAME",
            help="Token that /metrics asks for: env:NAME or file:PATH.",
        ),
    ]
    wrapped: Callable[..., Any] = gathered
    for option in reversed(options):
        wrapped = option(wrapped)
    return wrapped


def _check_token(host: str, token: str | None) -> None:
    from wirecall.transports.headers import is_loopback

    if token is None and not is_loopback(host):
        raise CliError(
            f"/metrics cannot be served on {host} without a token.",
            "the names of methods and their numbers would be open to the network",
            "--metrics-token env:NAME, or --metrics 127.0.0.1:PORT",
        )


def _secret(named: str | None) -> str | None:
    """Return a token from the variable or the file that the command line names."""
    import os
    from pathlib import Path

    if named is None:
        return None
    kind, _, place = named.partition(":")
    value: str | None = None
    if kind == "env":
        value = os.environ.get(place)
    elif kind == "file":
        try:
            value = Path(place).read_text().strip()
        except OSError as error:
            raise CliError(f"The token in {place} cannot be read.", str(error), named) from None
    else:
        raise CliError(
            "A token does not belong on the command line.",
            "every user of this machine can read it there",
            "--metrics-token env:NAME or file:PATH",
        )
    if not value:
        raise CliError(f"The token {named} is empty.", "expected at least one character", named)
    return value
