"""``mtrain completion``: print the script that makes a shell complete commands, flags, specs and paths."""

import click
from click.shell_completion import get_completion_class

from mtrain.commands.helping import Command

SHELLS = ("bash", "zsh", "fish")


@click.command(
    cls=Command,
    examples=(("mtrain completion bash >> ~/.bashrc", "complete commands, flags and keys with the tab key"),),
)
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  mtrain completion bash >> ~/.bashrc
    zsh:   mtrain completion zsh >> ~/.zshrc
    fish:  mtrain completion fish > ~/.config/fish/completions/mtrain.fish
    """
    from mtrain.commands import COMPLETE, completing_bash, front

    completing_bash.register()
    completion_class = get_completion_class(shell)
    if completion_class is None:
        raise click.UsageError(f"no completion for {shell!r}; known: {', '.join(SHELLS)}")
    click.echo(completion_class(front, {}, "mtrain", COMPLETE).source())
