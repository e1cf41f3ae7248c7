"""The `wirecall` command: one module per verb, imported when it is used, so that `--help` answers at once."""

from importlib import import_module

import click

VERBS = {
    "send": "Send raw JSON-RPC messages to an app, one per line, and print the answers.",
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(f"wirecall.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=_Verbs, help="JSON-RPC 2.0 and MCP: many calls in one message, every command takes effect once.")
@click.version_option(package_name="wirecall", message="wirecall %(version)s")
def main() -> None:
    """Entry point of the console script."""
