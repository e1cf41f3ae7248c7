"""The options by which a server lets people watch its calls: the console, and `/metrics`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import click
from msgspec import Struct
from msgspec.structs import replace

from wirecall.cli.failures import CliError

if TYPE_CHECKING:
    from wirecall.app import App

PORT = click.IntRange(0, 65535)


def host_and_port(address: str, example: str) -> tuple[str, int]:
    """Return the host and the port to listen on."""
    host, colon, port = address.rpartition(":")
    is_number = port.isascii() and port.isdigit()
    if not colon or not is_number or int(port) > 65535:
        why = "expected HOST:PORT, the port up to 65535"
        raise CliError(f"{address!r} is not an address.", why, example)
    return host.strip("[]") or "127.0.0.1", int(port)


class Watching(Struct, frozen=True):
    """How the calls of a server are watched."""

    console: bool = False
    port: int | None = None
    readonly: bool = False
    capture: Literal["facts", "bodies"] = "facts"
    sessions: str | None = None
    metrics: str | None = None
    metrics_token: str | None = None

    @contextmanager
    def of(
        self,
        app: "App",
        *,
        target: str,
        address: str,
        audit: str | None,
        is_successor: bool = False,
    ) -> Iterator[None]:
        """Watch an app while it serves. A successor shares the addresses of its predecessor."""
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
                readonly=self.readonly, sessions=self.sessions, shares=is_successor
            )
            if self.port is not None:
                console = replace(console, port=self.port)
        settings = Settings(
            served_now(app.name, target, address),
            console,
            self.port is not None,
            metrics,
            _secret(self.metrics_token),
            None if audit is None else audit.removeprefix("file:").partition("?")[0],
            is_successor,
        )
        companion = Companion(settings, self.capture)
        try:
            companion.start(app)
            yield
        finally:
            companion.stop()


def watching_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a verb, which gets them as `watching`."""

    @wraps(command)
    def gathered(
        console: bool,
        console_port: int | None,
        console_readonly: bool,
        console_sessions: str | None,
        capture: Literal["facts", "bodies"],
        metrics: str | None,
        metrics_token: str | None,
        **given: Any,
    ) -> Any:
        _check(console, console_port, console_readonly, metrics, metrics_token)
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
        click.option("--console", is_flag=True, help="Serve the console on the loopback."),
        click.option("--console-port", type=PORT, help="Port of the console. [default: 8421]"),
        click.option("--console-readonly", is_flag=True, help="The console changes nothing."),
        click.option("--console-sessions", hidden=True),  # `wirecall dev` sets it
        click.option(
            "--capture",
            type=click.Choice(["facts", "bodies"]),
            default="facts",
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


def _check(
    console: bool,
    port: int | None,
    readonly: bool,
    metrics: str | None,
    token: str | None,
) -> None:
    """Refuse options that have no effect."""
    if not console and (port is not None or readonly):
        name = "--console-readonly" if readonly else "--console-port"
        raise CliError(f"{name} is for --console.", "there is no console", f"--console {name}")
    if metrics is None and token is not None:
        raise CliError(
            "--metrics-token is for --metrics.",
            "/metrics is not served",
            "--metrics 127.0.0.1:9464",
        )


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
