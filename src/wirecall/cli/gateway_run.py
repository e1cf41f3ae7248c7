"""`wirecall gateway run`, `check` and `status`: serve the upstreams, show the plan, show the state."""

import asyncio
from typing import Any

import click
import msgspec

from wirecall.cli.failures import CliError, Exit, Unreachable, failure_of
from wirecall.cli.targets import header_option, http_client
from wirecall.cli.terminal import Printer, count_of, json_option
from wirecall.cli.watching import (
    Watching,
    local_address,
    settings_in_force,
    watching_options,
)
from wirecall.config import FILE_VARIABLE, SETTINGS, check_config, load_config
from wirecall.errors import CallFailed, UsageError
from wirecall.gateway.settings import GatewaySettings, load_settings

_ADDRESS = click.option("--http", metavar="HOST:PORT", help="The address. [default: gateway.http]")
# Seconds that the running gateway may take to say how it is.
STATUS_TIME = 5.0


def _checked(http: str) -> str:
    """Return the address of `--http`, or refuse it."""
    setting = SETTINGS["gateway.http"]
    try:
        setting.read(http)
    except (msgspec.ValidationError, UsageError, ValueError):
        what = f"{http!r} is not an address to serve."
        raise CliError(what, f"expected {setting.expected}", "--http 127.0.0.1:8430") from None
    return http


def _settings(http: str | None = None) -> GatewaySettings:
    flags: dict[str, Any] = {}
    if http is not None:
        flags["gateway.http"] = _checked(http)
    config, problems = check_config()
    if config.path is None and not problems:
        raise CliError(
            "There is no wirecall.toml in this folder.",
            "the servers of a gateway are its sections [upstream.NAME]",
            f"change to its folder, or name it in {FILE_VARIABLE}, "
            "or make one: wirecall gateway import --client claude-desktop --write",
        )
    return load_settings(flags=flags)


@click.command("run")
@_ADDRESS
@click.option("--stdio", is_flag=True, help="Serve /mcp to one client on stdin and stdout instead.")
@watching_options
def run_command(http: str | None, stdio: bool, watching: Watching) -> None:
    """Serve the upstreams of wirecall.toml: /mcp has all of them, /mcp/NAME one.

    A line is printed for each upstream that is ready or fails.
    """
    from wirecall.gateway.gateway import Gateway

    settings = _settings(http)
    config = load_config()
    stated = watching.stated()
    if http is not None:
        stated["gateway.http"] = http
    watching = watching.or_else(config)
    gateway = Gateway(settings)
    host, _, port = settings.http.rpartition(":")
    address = "stdio"
    if not stdio:
        address = local_address("http", host.strip("[]"), int(port))
    with watching.of(
        gateway,
        target="gateway",
        address=address,
        settings=settings_in_force(config, stated),
    ):
        if stdio:
            gateway.run("stdio")
            return
        try:
            gateway.run("http", host=host.strip("[]"), port=int(port))
        except UsageError as error:
            failure = failure_of(error)
            failure.next = failure.next.replace("another port=", "another port: --http HOST:PORT")
            raise failure from None


@click.command("check")
@json_option
def check_command(out: Printer) -> Exit | None:
    """Start each upstream once, and print the plan.

    The plan has each tool, whether it is a query or a command, why, and whether it is recorded.
    Exit code 9 if something is odd.
    """
    from wirecall.gateway.gateway import Gateway
    from wirecall.gateway.plan import Plan, planned

    settings = msgspec.structs.replace(_settings(), ledger="memory:")

    def answered(name: str, tools: int, revision: str) -> None:
        # At once: another server may take a minute.
        out.note(f"{name}: {count_of(tools, 'tool')}, MCP {revision}", "ok")

    async def make() -> Plan:
        gateway = Gateway(settings)
        try:
            return await planned(gateway, None if out.as_json else answered)
        finally:
            await gateway.aclose(1.0)

    plan = asyncio.run(make())
    if out.as_json:
        out.result(msgspec.to_builtins(plan))
    else:
        out.table(
            ("upstream", "tool", "at /mcp", "kind", "why", "recorded"),
            [
                (t.upstream, t.tool, t.name, t.kind, t.why, "yes" if t.recorded else "no")
                for t in plan.tools
            ],
        )
        for finding in plan.findings:
            out.note(finding, "warning")
        out.note(f"{count_of(len(plan.findings), 'finding')}")
    return Exit.FOUND if plan.findings else None


def _reachable(address: str) -> str:
    """Return an address to ask: a gateway that serves all addresses of a machine serves this one."""
    host, _, port = address.rpartition(":")
    own = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    return f"{own}:{port}"


@click.command("status")
@_ADDRESS
@header_option
@json_option
def status_command(http: str | None, headers: dict[str, str], out: Printer) -> None:
    """Show the state of each upstream of the gateway that runs.

    With [auth], it uses the login of `wirecall login http://HOST:PORT/mcp`.
    """
    config = load_config()
    address = _reachable(_checked(http) if http else config.get("gateway.http"))
    url = f"http://{address}/status"
    # Tokens are for the resource that the gateway says it is.
    login = config.get("auth.resource") or f"http://{address}/mcp"

    async def ask() -> Any:
        client = await http_client(url, headers, login=login)
        await client.open()
        try:
            async with asyncio.timeout(STATUS_TIME), client.request("GET") as answer:
                body = await answer.read()
                if answer.status in (401, 403):
                    raise CliError(
                        "The gateway asks for credentials.",
                        f"{url} answered with HTTP {answer.status}",
                        f"wirecall login {login}, or --header 'Authorization: Bearer ...'",
                        exit=Exit.AUTH,
                        type="unauthorized",
                    )
                if answer.status != 200:
                    raise CliError(
                        f"There is no gateway at {url}.",
                        f"it answered with HTTP {answer.status}",
                        "name the address of the gateway: --http HOST:PORT",
                    )
                return msgspec.json.decode(body)
        except (CallFailed, TimeoutError) as error:
            raise Unreachable(
                f"No gateway answers at {url}.", str(error), "start it: wirecall gateway run"
            ) from error
        finally:
            await client.aclose()

    found = asyncio.run(ask())
    if out.as_json:
        out.result(found)
        return
    rows = [
        (
            name,
            "up" if each["up"] else "down",
            each["since"],
            str(each["sessions"]),
            " ".join(map(str, each["pids"])),
            str(each["in_flight"]),
            each["breaker"],
            str(each["starts"]),
            str(each["unknown"]),
        )
        for name, each in found["upstreams"].items()
    ]
    columns = ("upstream", "health", "since", "sessions", "pids", "in flight", "breaker")
    out.table((*columns, "starts", "unknown"), rows)
    for name, each in found["upstreams"].items():
        if not each["up"] and each["reason"]:
            # Last words of a server may have several lines.
            out.note(f"{name}: {' '.join(each['reason'].split())}", "warning")
        if each["unknown"]:
            records = count_of(each["unknown"], "command")
            out.note(f"{name}: {records} with an unknown outcome: wirecall ledger list", "warning")
