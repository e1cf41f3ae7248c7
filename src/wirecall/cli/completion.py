"""`wirecall completion`: the script that makes a shell complete our verbs and options. It starts nothing but the command."""

import click
from click.shell_completion import ShellComplete, get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell, to be evaluated in its start file.

    \b
    eval "$(wirecall completion bash)"     in ~/.bashrc
    eval "$(wirecall completion zsh)"      in ~/.zshrc, behind compinit
    wirecall completion fish | source      in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    # Not `kind.source`: bash's starts a shell to ask for its version.
    click.echo(ShellComplete.source(kind(click.Command("wirecall"), {}, "wirecall", "_WIRECALL_COMPLETE")))
