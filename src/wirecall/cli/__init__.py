"""The `wirecall` command.

The modules of its verbs are imported when they are used, so that `--help` answers at once. A verb
is a row of `VERBS`, and a click command `<verb>_command` in the module that the row names. It
prints through `Printer`, raises `CliError` (or lets errors of wirecall pass), and returns its exit
code, or None for 0. All errors reach `Verbs.main`, which prints them in three lines or, with
`--json`, as the one document.
"""

import io
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import click

from wirecall.cli.failures import TEXTS, TRACEBACK_VARIABLE, Exit, failure_of, no_such
from wirecall.version import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

# By name: the module that has the verb, and its line of help.
VERBS = {
    "new": ("project", "Create a project: a server, a test, a wirecall.toml."),
    "dev": ("serve", "Serve with reload and a readable log."),
    "serve": ("serve", "Serve an app over HTTP or on stdio."),
    "wrap": ("wrap", "Serve another MCP server so that it survives, and acts once."),
    "list": ("offers", "List the methods, tools, resources and prompts of a server."),
    "show": ("offers", "Show one method, tool, resource or prompt, and its arguments."),
    "call": ("call", "Make one call."),
    "batch": ("batch", "Make many calls, one JSON object per line."),
    "task": ("task", "Look at a background call, wait for it, or cancel it."),
    "send": ("batch", "Send raw messages unchanged, and print the answers."),
    "login": ("login", "Log in to a server, and keep the login for the other commands."),
    "logout": ("login", "Forget the logins at a server, and revoke their tokens."),
    "auth": ("login", "List the stored logins."),
    "ledger": ("ledger", "Look at the records of commands, and resolve unknown outcomes."),
    "watch": ("watch", "Watch the calls of a running server."),
    "audit": ("audit", "Look at the audit trail, and verify it."),
    "probe": ("probe", "Find out which revisions and features a server supports."),
    "bench": ("bench", "Make calls at a steady rate, and report how long the answers take."),
    "lock": ("contract", "Write the contract of a server into a file."),
    "diff": ("contract", "Compare two contracts, and report the changes that break callers."),
    "client": ("contract", "Write a typed Python client of a server."),
    "install": ("install", "Add a server to an MCP client's configuration."),
    "gateway": ("gateway", "One place in front of other MCP servers."),
    "config": ("project", "Check or show wirecall.toml."),
    "doctor": ("doctor", "Check this installation."),
    "completion": ("", "Print the completion script of a shell."),
}


class Verbs(click.Group):
    """A group that knows its verbs by name and loads the one that is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS or cmd_name in self.commands:
            return self.commands.get(cmd_name)
        module = import_module(f"wirecall.cli.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise no_such("verb", args[0], list(VERBS), "wirecall --help")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run a verb. A mistake that click's parser finds names the help of that verb."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            name = ctx.invoked_subcommand
            # For an option without its value, click does not say whose option it is.
            if error.ctx is None and name is not None:
                command = self.get_command(ctx, name) or self
                error.ctx = click.Context(command, info_name=name, parent=ctx)
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem]":
        """Complete verbs by their names alone.

        click would load all of them for each press of the tab key.
        """
        from click.shell_completion import CompletionItem

        verbs = [
            CompletionItem(name, help=text)
            for name, (_, text) in VERBS.items()
            if name.startswith(incomplete)
        ]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(int(code)), text) for code, text in TEXTS.items()])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        *_: object,
        **__: object,
    ) -> NoReturn:
        """Run the whole command: parse, run the verb, print its error, exit."""
        words = _without_traceback(list(sys.argv[1:] if args is None else args))
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # A terminal without Unicode must not fail the command.
                stream.reconfigure(errors="backslashreplace")
        try:
            # Not standalone: click would print errors in its own format, and exit.
            code = super().main(words, prog_name or "wirecall", standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            code = Exit.USAGE
        except (click.Abort, KeyboardInterrupt):
            code = Exit.INTERRUPTED
        except Exception as error:
            from wirecall.cli.terminal import print_failure

            failure = failure_of(error)
            # The rest is the command line of a server.
            own = words[: words.index("--")] if "--" in words else words
            failure.next = _with_address(failure.next, own)
            print_failure(failure, "--json" in own)
            code = failure.exit
        sys.exit(code if isinstance(code, int) else Exit.DONE)


def _with_address(step: str, words: list[str]) -> str:
    """Return the next step with the address of the server that the command line names."""
    for word in words:
        if word.startswith(("http://", "https://")):
            return step.replace("wirecall login URL", f"wirecall login {shlex.quote(word)}")
    return step


def _without_traceback(words: list[str]) -> list[str]:
    """Return the words of a command line without `--traceback`, which every verb takes.

    The variable is for the processes that a verb starts, too.
    """
    end = words.index("--") if "--" in words else len(words)
    if "--traceback" not in words[:end]:
        return words
    os.environ[TRACEBACK_VARIABLE] = "1"
    words.remove("--traceback")
    return words


@click.group("wirecall", cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="wirecall %(version)s")
@click.option(
    "--traceback",
    is_flag=True,
    expose_value=False,
    help="Print the traceback of an error, with every verb; or WIRECALL_TRACEBACK=1.",
)
def main() -> None:
    """JSON-RPC 2.0 and MCP: many calls in one message, every command takes effect once."""


@main.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]), metavar="SHELL")
def completion_command(shell: str) -> None:
    """Print the completion script of SHELL (bash, zsh or fish), for its startup file.

    \b
    eval "$(wirecall completion bash)"     in ~/.bashrc
    eval "$(wirecall completion zsh)"      in ~/.zshrc, after compinit
    wirecall completion fish | source      in ~/.config/fish/config.fish
    """
    from click.shell_completion import ShellComplete, get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    # Not `kind.source`: bash's starts a shell to ask for its version.
    click.echo(
        ShellComplete.source(kind(click.Command("wirecall"), {}, "wirecall", "_WIRECALL_COMPLETE"))
    )
