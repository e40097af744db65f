"""``mtrain run``: start a user's own training script on the ranks of a job."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mtrain.commands.options import (
    ASSIGNMENT,
    JobCommand,
    script_options,
    spec_request,
    spread_values,
)
from mtrain.commands.train import train_job
from mtrain.commands.training_request import TrainRequest


class ScriptCommand(JobCommand):
    """A command whose own flags end at the first word that is none: the script, followed by the script's arguments."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.context_settings = {"allow_interspersed_args": False, **self.context_settings}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse mtrain's flags; the words from the script on stay as they were typed."""
        own, rest = split_at_script(args, self.params)
        return click.Command.parse_args(self, ctx, [*spread_values(own), *rest])


def split_at_script(args: Sequence[str], params: Sequence[click.Parameter]) -> tuple[list[str], list[str]]:
    """Split a command line before the script, which is the first word that is neither a flag nor a flag's value.

    A bare ``--resume`` before a word that ends with ``.py`` has no value: that word is the script.
    """
    options = {name: param for param in params if isinstance(param, click.Option) for name in param.opts}
    switches = {name for param in params if isinstance(param, click.Option) for name in param.secondary_opts}
    own: list[str] = []
    words = list(args)
    while words and words[0].startswith("-") and words[0] != "--":
        flag = words.pop(0)
        option = options.get(flag) or options.get("--" + flag.lstrip("-").replace("_", "-"))
        if option is None or option.is_flag or flag in switches or flag in ("-h", "--help"):
            own.append(flag)
        elif option.name == "resume" and (not words or words[0].endswith(".py") or words[0].startswith("-")):
            own.append("--resume=auto")
        else:
            own += [flag, *words[:1]]
            words = words[1:]
            while option.name == "overrides" and words and ASSIGNMENT.match(words[0]):
                own.append(words.pop(0))
    return own, words[1:] if words[:1] == ["--"] else words


@click.command(
    "run",
    cls=ScriptCommand,
    examples=(
        ("mtrain run --nproc-per-node 2 train.py --lr 0.1", "your script on two ranks, with its own --lr"),
        ("mtrain run -b ddp --name first train.py", "the run folder is runs/first"),
    ),
)
@script_options
@click.option(
    "--accelerate-config", "--config-file", "--deepspeed-config", "launch_config", metavar="FILE",
    help="Accelerate's YAML or DeepSpeed's JSON in the place of a spec: where and how the script runs.",
)  # fmt: skip
@click.argument("script", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ITS ARGUMENTS]")
@click.pass_context
def run(context: click.Context, /, script: str, arguments: tuple[str, ...], **params: Any) -> None:
    """Train with your own script, which calls mtrain.session().

    The first word that is no flag is the script; everything after it belongs to the script.
    """
    from mtrain.spec.config import ScriptSpec

    config, launch_config = params["config"], params.pop("launch_config")
    if config is not None and launch_config is not None:
        raise click.UsageError(f"-c {config} and --accelerate-config {launch_config} are both given; keep one")
    given = launch_config if config is None else config
    if given is not None:
        params["config"] = ScriptSpec(given)
    request = TrainRequest(spec=spec_request(params), resume=params["resume"], script=Path(script), arguments=arguments)
    context.exit(train_job(request, dry_run=params["dry_run"]))
