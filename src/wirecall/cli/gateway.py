"""`wirecall gateway`: a group of verbs, each in a module that is imported when it is used."""

from importlib import import_module

import click

from wirecall.cli.failures import no_such

# By name: the module that has the verb as `<verb>_command`, and its line of help.
VERBS = {
    "run": ("gateway_run", "Serve the upstreams of wirecall.toml."),
    "check": ("gateway_run", "Start each upstream once, and print the plan."),
    "status": ("gateway_run", "Show the state of the gateway that runs."),
    "import": ("gateway_import", "Read the servers of an MCP client into wirecall.toml."),
}


class GatewayVerbs(click.Group):
    """A group that knows its verbs by name and loads the one that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = import_module(f"wirecall.cli.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise no_such("verb", args[0], list(VERBS), "wirecall gateway --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.group("gateway", cls=GatewayVerbs)
def gateway_command() -> None:
    """One place in front of other MCP servers: the sections [gateway] and [upstream.NAME]."""
