"""The flags that commands share, and their conversion to values of a spec.

``-`` and ``_`` are equivalent in every flag. ``-o a=1 b=2 -o c=3`` sets three values. A flag that is not typed sets
nothing, so the spec's value stays.
"""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mtrain.commands.flags import F, Option, SpecOption, Typed, adds, parameters_of, spec_option
from mtrain.commands.foreign_flags import FOREIGN_FLAGS, LISTS, MEGATRON_FLAGS, check_foreign, config_of
from mtrain.commands.helping import Command

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, RunValues, Source
    from mtrain.spec.request import SpecRequest

R = TypeVar("R")

ASSIGNMENT = re.compile(r"^[A-Za-z_][\w.\-]*=")
_NUMBER = re.compile(r"[0-9]{1,9}")
AUTO_BATCH = -1
"""YOLOv5's value of ``--batch`` for a batch that fills the memory."""
_OVERRIDE_FLAGS = ("-o", "--opt", "--override")


class JobCommand(Command):
    """A command whose flags may be typed with ``-`` or ``_``, and whose ``-o`` and ``--freeze`` take several values."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **settings)
        self.context_settings = {"token_normalize_func": _with_dashes, **self.context_settings}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat ``-o`` before each further ``key=value``, and ``--freeze`` before each further number."""
        return super().parse_args(ctx, spread_values(args))


def _with_dashes(token: str) -> str:
    return token.replace("_", "-")


def spread_values(args: Sequence[str]) -> list[str]:
    """Turn ``-o a=1 b=2`` into ``-o a=1 -o b=2``, and ``--freeze 0 1 2`` into ``--freeze 0 --freeze 1 --freeze 2``."""
    spread = _spread(args, _OVERRIDE_FLAGS, ASSIGNMENT.match, attached=("-o", "--opt=", "--override="))
    return _spread(spread, LISTS, _NUMBER.fullmatch)


def _spread(
    args: Sequence[str], flags: Sequence[str], is_value: Callable[[str], Any], *, attached: tuple[str, ...] = ()
) -> list[str]:
    """Repeat the first of ``flags`` before each further value of one of them; arguments after ``--`` stay as they are.

    ``attached``: how an argument begins that has the first value in it.
    """
    spread: list[str] = []
    in_values = False
    remaining = iter(args)
    for arg in remaining:
        if arg == "--":
            return [*spread, arg, *remaining]
        if _with_dashes(arg) in flags:
            in_values = True
            # The word behind the flag is its value, whatever it looks like; click says what is wrong with it.
            spread.extend((arg, *([value] if (value := next(remaining, None)) is not None else [])))
        elif in_values and is_value(arg):
            spread.extend((flags[0], arg))
        else:
            in_values = arg.startswith(attached)
            spread.append(arg)
    return spread


SPEC_FLAGS: Sequence[Option] = (
    click.option("-c", "--config", metavar="SPEC", help="A YAML file or a shipped config."),
    click.option(
        "-o", "--opt", "--override", "overrides", multiple=True, metavar="PATH=VALUE ...",
        help="Set values of the spec, for example -o train.batch_size=8.",
    ),
)  # fmt: skip
_NATURAL = click.IntRange(min=0)
CLUSTER_FLAGS: Sequence[Option] = (
    spec_option("backend.name", "-b", "--backend", help="The stack that trains: ddp, solo, ..."),
    click.option(
        "-H", "--ips", "--hosts", "ips", metavar="A,B", help="Addresses of the hosts, the master first; A:2,B:4 with ranks."
    ),
    click.option("--hostfile", metavar="FILE", help="The hosts, one a line, as `host`, `host:2` or `host slots=2`."),
    spec_option(
        "cluster.name", "--cluster", metavar="NAME",
        help="ssh: this command starts all hosts. Otherwise the same command is typed on each; manual prints it.",
    ),
    spec_option("launcher.name", "--launcher", metavar="NAME", help="What starts the ranks of a host: torchrun, deepspeed, ..."),
    spec_option("cluster.options.port", "--ssh-port", type=click.IntRange(1, 65535), help="Port of the hosts' ssh servers."),
    spec_option("cluster.options.identity_file", "--ssh-identity-file", metavar="FILE", help="Private key for ssh."),
    spec_option("cluster.control_port", "--control-port", type=click.IntRange(1, 65535), help="Where hosts that are started by hand meet."),
    spec_option(
        "cluster.failure_timeout_s", "--failure-timeout-s", type=click.IntRange(min=4), metavar="SECONDS",
        help="Seconds of silence after which a host counts as lost.",
    ),
    spec_option(
        "cluster.hangs.end_s", "--hang-timeout", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
        help="Seconds after which a job ends in which nothing moves.",
    ),
    click.option(
        "-N", "--nnodes", "--nodes", "--num-nodes", "nnodes", metavar="N",
        help="Number of hosts: to ask a scheduler for; else it must agree with --ips.",
    ),
    spec_option("cluster.node_rank", "--node-rank", type=_NATURAL, help="This host's place in --ips; else found by address."),
    spec_option("cluster.master_addr", "--master-addr", metavar="ADDRESS", help="Where the ranks meet; the first of --ips otherwise."),
    spec_option("cluster.master_port", "--master-port", type=_NATURAL, help="Port of the meeting point."),
    spec_option(
        "cluster.nproc_per_node", "--nproc-per-node", "--ntasks-per-node", "--num-gpus", "nproc_per_node",
        type=click.IntRange(min=1), metavar="N", help="Ranks on each host.",
    ),
    click.option(
        "--devices", "--gpus", "--selected_gpu", "--device", "devices", metavar="0,1",
        help="Devices on every host: numbers, cpu, cuda or all.",
    ),
    spec_option("cluster.start_port", "--start-port", type=_NATURAL, help="First port of the ranks. Environment: FLAGS_START_PORT."),
    spec_option("cluster.log_dir", "--log-dir", metavar="FOLDER", help="Folder of the per-rank logs."),
    spec_option("cluster.max_restarts", "--max-restarts", type=_NATURAL, help="Times a failed job is started again from its checkpoint."),
)  # fmt: skip
PRECISION_FLAGS: Sequence[Option] = (
    click.option(
        "--amp", "amp", is_flag=False, flag_value="bf16", type=click.Choice(["bf16", "fp16"]),
        help="Mixed precision; bf16 unless --amp=fp16.",
    ),
    click.option("--no-amp", is_flag=True, help="Full precision."),
)  # fmt: skip
TRAINING_FLAGS: Sequence[Option] = (
    spec_option("train.epochs", "--epochs", type=int, help="Passes over the training split."),
    spec_option(
        "train.batch_size", "--batch-size", "--batch", "--global-batch-size", "batch_size", type=int,
        help="GLOBAL batch: samples per update over all ranks.",
    ),
    spec_option(
        "optimizer.learning_rate", "--lr", "--learning-rate", "learning_rate", type=float, help="The learning rate, before its schedule."
    ),
    *PRECISION_FLAGS,
    spec_option("train.sync_batchnorm", "--sync-bn/--no-sync-bn", "sync_bn", default=None, help="BatchNorm statistics over all ranks."),
    spec_option("train.seed", "--seed", type=int, help="Of weights, order and augmentation."),
    spec_option("report.name", "--name", metavar="NAME", help="Name of the run folder."),
)  # fmt: skip
RUN_FLAGS: Sequence[Option] = (
    click.option(
        "-r", "--resume", "resume", is_flag=False, flag_value="auto", metavar="[PATH]",
        help="Continue from a checkpoint or run folder; without PATH the newest intact one. `if-any`: continue the run of this "
        "name if it has a checkpoint, else begin it.",
    ),
    click.option("--eval", "eval_too", is_flag=True, help="Evaluate while training too; `mtrain evaluate` evaluates only."),
    click.option("--dry-run", is_flag=True, help="Print the plan and start nothing."),
    click.option("-q", "--quiet", is_flag=True, help="Show no progress, only warnings and the result."),
    click.option("-v", "--verbose", is_flag=True, help="A line for every update, and every fact about the start."),
)  # fmt: skip
_ALL_RANKS = spec_option(
    "report.all_ranks",
    "--all-ranks",
    is_flag=True,
    default=None,
    help="Show what every rank prints, with its number; else what rank 0 prints.",
)
# All of them, also those that a single command has, so that `spec_flags` serves every command.
_SPEC_OPTIONS = [
    option
    for option in parameters_of([*CLUSTER_FLAGS, *TRAINING_FLAGS, _ALL_RANKS, *FOREIGN_FLAGS])
    if isinstance(option, SpecOption)
]

spec_options = adds(*SPEC_FLAGS)
"""Add ``-c`` and ``-o`` to a command that reads a spec and starts nothing on other hosts."""
host_options = adds(*SPEC_FLAGS, *CLUSTER_FLAGS)
"""Add the flags of a spec, and those of hosts and ranks."""
job_options = adds(*SPEC_FLAGS, *CLUSTER_FLAGS, *TRAINING_FLAGS, *FOREIGN_FLAGS, *RUN_FLAGS)
"""Add every flag of a training job to a command, which takes them as keywords and passes them to ``load_job``."""
script_options = adds(*SPEC_FLAGS, *CLUSTER_FLAGS, *TRAINING_FLAGS, *RUN_FLAGS, _ALL_RANKS, *MEGATRON_FLAGS)
"""Add the flags of a job that runs a user's script: the spec, hosts and ranks, and what the script may leave open."""
_SCORING = {"amp", "no_amp", "name", "image_size", "data", "workers", "batch_size"}
evaluation_options = adds(
    *SPEC_FLAGS,
    *CLUSTER_FLAGS,
    *(option for option in (*TRAINING_FLAGS, *FOREIGN_FLAGS) if parameters_of([option])[0].name in _SCORING),
)
"""Add every flag of an evaluation to a command: the spec, hosts and ranks, and what influences the score."""


def _refuse_value(ctx: click.Context, _parameter: click.Parameter, word: str | None) -> str | None:
    if word is not None and ASSIGNMENT.match(word):
        raise click.UsageError(
            f"{word}: not expected here; values of the spec are given with -o: {ctx.command_path} -o {shlex.quote(word)}"
        )
    return word


spec_argument = click.argument("spec_word", metavar="[SPEC]", required=False, callback=_refuse_value)
"""Add the spec as an argument to a command that has ``-c``; ``spec_request`` takes either."""
run_argument = click.argument("run_folder", metavar="[RUN]", required=False)
"""Add a run folder as an argument to a command that has ``--run``; ``named_run`` says which one is meant."""


def named_run(params: dict[str, Any]) -> str | None:
    """Take the run folder out of the parameters of a command, whether an argument or ``--run`` names it.

    Raises:
        click.UsageError: both do.
    """
    argument: str | None = params.pop("run_folder")
    flag: str | None = params.pop("run")
    if argument is not None and flag is not None:
        raise click.UsageError(f"two runs are given: {argument} and --run {flag}; keep one")
    return flag if argument is None else argument


def quiet_job_options(command: F) -> F:
    """Add the flags of ``job_options``, but hide all except ``-c`` and ``-o`` from help.

    For commands that show the spec.
    """
    shown = {"config", "overrides"}
    own = list(getattr(command, "__click_params__", []))
    command = job_options(command)
    # They are taken all the same: a person adds `config show` to the command line of a job to see what it means.
    for parameter in getattr(command, "__click_params__", []):
        if isinstance(parameter, click.Option) and parameter not in own and parameter.name not in shown:
            parameter.hidden = True
    return command


def load_job(params: Mapping[str, Any], *, run: "RunValues | None" = None) -> "Loaded":
    """Return the spec that the parameters of a command describe; ``run``: what was chosen for the run that is resumed.

    Raises: ``SpecError`` for a wrong spec, ``click.UsageError`` for flags that contradict one another.
    """
    from mtrain.spec import config

    def load(flags: Mapping[str, Any]) -> "Loaded":
        return config.load(chosen, overrides=params.get("overrides") or (), flags=flags, run=run)

    chosen, flags = config_of(params), spec_flags(params)
    # Read twice where --eval is typed: only the spec says whether it has an interval of its own, which then stays.
    loaded = load(flags)
    evaluate = loaded.spec.evaluate
    if params.get("eval_too") and evaluate.every_epochs is None and evaluate.every_updates is None:
        loaded = load({**flags, "evaluate.every_epochs": config.Given(1, "--eval")})
    _check_nnodes(params.get("nnodes"), loaded.spec.cluster.ips)
    return loaded


def spec_flags(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the spec that the typed flags stand for: dotted path -> ``Given``.

    Raises: ``click.UsageError`` for flags that contradict one another, and for a value that has no meaning here; the message says
    what to do.
    """
    from mtrain.spec.config import Given

    _check_flags(params)
    typed: Typed = {}
    if amp := params.get("amp"):
        typed["train.precision"] = (amp, f"--amp={amp}")
    elif params.get("no_amp"):
        typed["train.precision"] = ("fp32", "--no-amp")
    for display in ("quiet", "verbose"):
        if params.get(display):
            typed["report.display"] = (display, f"--{display}")
    for option in _SPEC_OPTIONS:
        if (value := params.get(str(option.name))) not in (None, ()):
            typed |= option.values_for(value)
    typed |= _device_flags(params.get("devices"))
    typed |= _host_flags(params.get("ips"), params.get("hostfile"))
    typed |= _number_of_hosts(params.get("nnodes"))
    own = params.get("flags") or {}  # those that a single command has
    return {path: Given(*value) for path, value in typed.items()} | own


def _check_flags(params: Mapping[str, Any]) -> None:
    if params.get("batch_size") == AUTO_BATCH:
        raise click.UsageError(
            f"--batch {AUTO_BATCH}: the batch of an update is a fixed number of samples of the whole job, because what is "
            "learnt depends on it; give it, such as --batch 64, and -o train.max_micro_batch=auto finds how many of them fit "
            "into memory at once"
        )
    for first, second in (("amp", "no_amp"), ("quiet", "verbose")):
        if params.get(first) and params.get(second):
            flags = [f"--{name.replace('_', '-')}" for name in (first, second)]
            raise click.UsageError(f"{flags[0]} and {flags[1]} are both given; keep one")
    check_foreign(params)


def _number_of_hosts(nnodes: str | None) -> Typed:
    """Return the keys of the spec for ``--nnodes N`` or ``MIN:MAX``."""
    if nnodes is None:
        return {}
    low, colon, high = nnodes.partition(":")
    if not _NUMBER.fullmatch(low) or (colon and not _NUMBER.fullmatch(high)) or not int(low):
        raise click.UsageError(
            f"--nnodes {nnodes}: expected a number of hosts, for example 2, or for an elastic job the fewest and all, 2:4"
        )
    if colon and int(low) > int(high):
        raise click.UsageError(f"--nnodes {nnodes}: the fewest hosts come first; {high}:{low}")
    shown = f"--nnodes {nnodes}"
    elastic = {"cluster.min_nodes": (int(low), shown)} if colon and low != high else {}
    return {"cluster.nodes": (int(high or low), shown), **elastic}


def _device_flags(text: str | None) -> Typed:
    if text is None:
        return {}
    shown = f"--devices {text}"
    # A kind of device is an option of the backend; of numbered devices the ranks see no others, whatever the backend is.
    if text in ("cpu", "cuda"):
        return {"backend.options.device": (text, shown)}
    if text in ("all", "auto"):
        return {"cluster.devices": (None, shown)}
    parts = [part.strip().removeprefix("cuda:") for part in text.split(",") if part.strip()]
    if not parts or not all(_NUMBER.fullmatch(part) for part in parts):
        raise click.UsageError(f"--devices {text}: expected numbers such as 0,1, or cpu, cuda, all")
    return {"cluster.devices": ([int(part) for part in parts], shown)}


def _host_flags(ips: str | None, hostfile: str | None) -> Typed:
    if ips is not None and hostfile is not None:
        raise click.UsageError("--ips and --hostfile are both given; keep one")
    if ips is not None:
        shown, entries = f"--ips {ips}", [part.strip() for part in ips.split(",") if part.strip()]
    elif hostfile is not None:
        shown, entries = f"--hostfile {hostfile}", _hosts_of(Path(hostfile))
    else:
        return {}
    if not entries:
        raise click.UsageError(f"{shown}: names no host")
    hosts, slots = zip(*(_host_and_slots(entry, shown) for entry in entries), strict=True)
    flags: Typed = {"cluster.ips": (list(hosts), shown)}
    if any(slots):
        if None in slots:
            raise click.UsageError(f"{shown}: give the number of ranks of every host, or of none")
        if len(set(slots)) > 1:
            flags["cluster.slots"] = (list(slots), shown)
        else:
            # One number for all hosts, which every launcher can do; those with slots per host are few.
            flags["cluster.nproc_per_node"] = (slots[0], shown)
    return flags


def _hosts_of(file: Path) -> list[str]:
    """Read an MPI-style host file: on each line ``host``, ``host:2`` or ``host slots=2``; ``#`` starts a comment."""
    from mtrain.spec.hostnames import bracket_host
    from mtrain.spec.yaml_reader import read_text

    try:
        lines = read_text(file).splitlines()
    except ValueError as error:
        raise click.UsageError(f"--hostfile {file}: {error}") from error
    words = [line.partition("#")[0].split() for line in lines]
    return [
        ":".join([bracket_host(first) if rest else first, *(word.removeprefix("slots=") for word in rest[:1])])
        for first, *rest in filter(None, words)
    ]


def _host_and_slots(entry: str, shown: str) -> tuple[str, int | None]:
    """Split HOST or HOST:RANKS; IPv6 addresses with ranks are in brackets. ``shown``: the flag, for messages."""
    if entry.count(":") > 1 and not entry.startswith("["):
        return entry, None
    if entry.startswith("["):
        host, bracket, rest = entry[1:].partition("]")
        slots = rest.removeprefix(":") if bracket else entry
    else:
        host, _, slots = entry.partition(":")
    if slots and not (_NUMBER.fullmatch(slots) and int(slots)):
        raise click.UsageError(f"{shown}: {entry!r} is not HOST or HOST:RANKS")
    return host, int(slots) if slots else None


def _check_nnodes(nnodes: str | None, ips: Sequence[str]) -> None:
    """Refuse a number of hosts that contradicts the list of hosts. Without a list, a scheduler may know them."""
    from mtrain.spec.hostnames import few

    if nnodes is not None and ips and int(nnodes.rpartition(":")[2]) != len(ips):
        raise click.UsageError(f"--nnodes {nnodes}: --ips names {len(ips)}: {few(ips)}")


def spec_request(params: Mapping[str, Any]) -> "SpecRequest":
    """Return the spec that the parameters of a command ask for, with every typed value."""
    from mtrain.spec.config import Given
    from mtrain.spec.request import NOTHING, SpecRequest

    def read(config: "Source", needed: Mapping[str, Any] = NOTHING, run: "RunValues | None" = None) -> "Loaded":
        # A value with a name of its own stays a flag, so that messages say what was typed.
        typed = {path: value for path, value in needed.items() if isinstance(value, Given)}
        further = [f"{path}={json.dumps(value)}" for path, value in needed.items() if path not in typed]  # JSON is YAML
        overrides, flags = (*(params.get("overrides") or ()), *further), {**(params.get("flags") or {}), **typed}
        return load_job({**params, "config": config, "overrides": overrides, "flags": flags}, run=run)

    word, config = params.get("spec_word"), params.get("config")
    if word is not None and config is not None:
        raise click.UsageError(f"two specs are given: {word} and -c {config}; keep one")
    return SpecRequest(config=word if config is None else config, read=read)


def take_request(kind: type[R], params: dict[str, Any], /, **more: Any) -> R:
    """Return the request of a command, which takes the parameters that have the name of a field; the others are those of the spec.

    Args:
        kind: the request, a dataclass; its field ``spec``, if it has one, is made of what is left.
        params: the parameters of the command; those that the request has are removed.
        more: fields that are not taken as they were typed.
    """
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]  # a dataclass, which no type can say
    taken = {name: params.pop(name) for name in names - set(more) if name in params}
    if "spec" in names - set(more):
        taken["spec"] = spec_request(params)
    return kind(**taken, **more)


def values_and_output(given: Sequence[str] | None, out: str | None) -> tuple[tuple[str, ...], str | None]:
    """Divide what was given with ``-o`` of a command that writes: values of the spec, and what is to be written.

    Raises:
        click.UsageError: two outputs are named.
    """
    overrides = tuple(text for text in given or () if ASSIGNMENT.match(text))
    names = [name for name in (out, *(text for text in given or () if text not in overrides)) if name is not None]
    if len(names) > 1:
        raise click.UsageError(f"two outputs to write: {names[0]} and {names[1]}; give one")
    return overrides, names[0] if names else None
