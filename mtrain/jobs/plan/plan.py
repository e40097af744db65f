"""The plan of a job: the exact command for every host, and the numbers that follow from the spec.

``mtrain plan`` prints a plan, ``mtrain train`` runs it. Nothing here imports a framework or starts a process.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mtrain.core.interfaces import NEUTRAL_FRAMEWORKS, Cluster, Command, Host, HostedJob, Launcher, Recipe
from mtrain.core.ranks import meshes
from mtrain.core.update.recipe import make_recipe
from mtrain.core.update.schedule import total_updates
from mtrain.errors import SpecError
from mtrain.jobs.plan import commands, elastic, means
from mtrain.jobs.plan import rows as plan_rows
from mtrain.jobs.plan.machine import Machine, here
from mtrain.jobs.plan.team import Team, team_of
from mtrain.jobs.run.metrics_place import MetricsPlace
from mtrain.jobs.run.own_code import own_code_of
from mtrain.jobs.watch.rules import Times, Watching
from mtrain.spec.config import Loaded, ScriptCall
from mtrain.spec.model import Spec
from mtrain.spec.references import Reference

END_S = 600.0
"""Seconds after which a spec, or a script with a session, is ended in which nothing moves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every process that a job starts: on which host, with which command and environment."""

    title: str
    source: str
    run_dir: Path
    resume: Path | None
    backend: str
    launcher_name: str
    launcher: Launcher = field(repr=False, compare=False)
    """The plugin that starts the ranks of each host."""
    hosts: Sequence[Host]
    commands: Sequence[Command]
    """One per host, in the order of ``hosts``."""
    cluster_name: str = ""
    """Name of the plugin that brings the commands to the hosts; empty: each command is started on its own host."""
    cluster: Cluster | None = field(default=None, repr=False, compare=False)
    """That plugin."""
    hosted_job: HostedJob | None = None
    """The facts that the plugin receives."""
    brought: Sequence[Sequence[str]] = ()
    """With a cluster: the command it runs for each host, or the one that people type there."""
    max_restarts: int
    log_dir: Path | None
    log_bytes: int | None = None
    """Size above which a piece of the middle of a log is left out; None: logs may grow."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files besides those of the spec that every host needs, equal on all: what each is -> path."""
    own_code: Sequence[Reference] = ()
    """The references of the spec to the user's own code."""
    numbers: Mapping[str, Any]
    """Values derived from the spec (global batch, micro batch, learning rates ...), by name, in the order of printing."""
    on_cpu: bool
    """Whether it is certain that ranks compute on the CPU."""
    metrics: MetricsPlace | None = None
    """Where each host answers Prometheus; None: nowhere."""
    watching: Watching | None = None
    """When something is said of ranks that hang; None: they are not watched."""
    knows_mtrain: bool = True
    """Whether the ranks run what knows mtrain: a spec, or a script that imports it."""
    saves: bool = True
    """Whether the ranks save their state when they are asked to end."""
    shown: Literal["none", "first", "all"] = "none"
    """Whose output the process that started the job shows: that of rank 0, or of all ranks."""

    @property
    def size(self) -> int:
        """Number of ranks on all hosts together."""
        return sum(host.slots for host in self.hosts)

    def first_rank(self, node: int) -> int:
        """Return the lowest rank number on host number ``node``."""
        return sum(host.slots for host in self.hosts[:node])

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values that JSON can hold."""
        return {
            "source": self.source,
            "run_dir": str(self.run_dir),
            "resume": str(self.resume) if self.resume else None,
            "backend": self.backend,
            "launcher": self.launcher_name,
            "cluster": self.cluster_name,
            "brought": [list(argv) for argv in self.brought],
            "max_restarts": self.max_restarts,
            "numbers": dict(self.numbers),
            "commands": [{"host": c.host, "argv": list(c.argv), "env": dict(c.env)} for c in self.commands],
        }

    def text(self) -> str:
        """Return the plan as text for a person. Its commands can be pasted into a shell."""
        head = {"spec": self.source, "run folder": str(self.run_dir), "resumes from": str(self.resume or "")}
        way = f" on each host, brought there by {self.cluster_name}" if self.cluster_name else ""
        head |= {"backend": f"{self.backend}, started by {self.launcher_name}{way}"}
        head |= {name.replace("_", " "): str(value) for name, value in self.numbers.items()}
        width = max(map(len, head)) + 2
        lines = [f"{name:<{width}}{value}" for name, value in head.items() if value]
        commands = [
            HostCommand(
                node=node,
                command=command,
                brought=() if self.cluster is None else self.brought[node],
                starts=self.cluster is not None and self.cluster.starts,
            )
            for node, command in enumerate(self.commands)
        ]
        return "\n".join([*lines, *command_lines(commands)]) + "\n"


def title_of(loaded: Loaded, *, name: str) -> str:
    """Return the title of a job's display; ``name``: the name of the run."""
    subject = loaded.spec.model.name if loaded.script is None else loaded.script.path.name
    return f"{name}: {subject} on {loaded.spec.backend.name}"


def make_plan(
    loaded: Loaded, *, run_dir: Path, resume: Path | None = None, machine: Machine | None = None, mode: str = "train"
) -> Plan:
    """Make the plan of a loaded spec on ``machine``; None: on this one.

    ``mode`` is the task of the ranks, such as "train" or "evaluate"; where there is a script, they run the script.

    Raises:
        SpecError: hosts, ranks and batch do not fit together, or the backend cannot follow the recipe.
        PluginError: backend or launcher is unknown, or they do not fit together.
    """
    machine = machine or here(loaded)
    team = team_of(loaded, machine)
    own_code = own_code_of(loaded, framework=team.backend.framework)
    files = {} if loaded.script is None else {"the script": str(loaded.script.path)}
    files |= {key: str(reference.file) for key, reference in own_code.items() if reference.file is not None}
    recipe = _recipe(loaded, team, mode=mode)
    # The cluster may know where the hosts' interpreter is that has mtrain; else it has the path that it has here.
    python = (None if team.cluster is None else team.cluster.python) or machine.python
    facts = commands.launch_options(team, machine, python=python)
    launcher = means.made_launcher(team.launcher_name, team.launcher_class, facts, loaded.job)
    words = commands.rank_words(loaded, run_dir=run_dir, resume=resume, mode=mode)
    hosted_job = commands.hosted_job_of(team, machine, python=python)
    brought: list[Sequence[str]] = []
    if team.cluster is not None and hosted_job is not None:
        brought = [team.cluster.command(node, hosted_job) for node in range(len(hosted_job.hosts))]
    metrics = MetricsPlace.of(team.spec, mode)
    return Plan(
        title=title_of(loaded, name=run_dir.name),
        source=str(loaded.source),
        run_dir=run_dir,
        resume=resume,
        backend=team.spec.backend.name,
        launcher_name=team.launcher_name,
        launcher=launcher,
        hosts=team.hosts,
        commands=commands.commands_of(team, machine, launcher, words),
        cluster_name="" if team.cluster is None else team.spec.cluster.name,
        cluster=team.cluster,
        hosted_job=hosted_job,
        brought=brought,
        max_restarts=team.spec.cluster.max_restarts,
        log_dir=Path(team.spec.cluster.log_dir).absolute() if team.spec.cluster.log_dir else None,
        log_bytes=None if team.spec.report.log_mb is None else team.spec.report.log_mb << 20,
        files=files,
        own_code=tuple(own_code.values()),
        numbers={key: reference.words for key, reference in own_code.items()}
        | plan_rows.rows_of(loaded, team, recipe, threads=facts["threads"])
        | plan_rows.names_to_come(team, machine)
        | ({} if metrics is None else {"metrics": f"{metrics.url()} on each host"}),
        on_cpu=team.devices.on_cpu,
        metrics=metrics,
        watching=_watching(loaded, team),
        **_of_script(loaded.script, mode=mode, all_ranks=team.spec.report.all_ranks),
    )


def _of_script(script: ScriptCall | None, *, mode: str, all_ranks: bool) -> dict[str, Any]:
    """Return what a plan says of the script, if there is one: how its ranks end, and whose output is shown."""
    if script is None or script.trial is not None:
        return {"saves": script is None and mode == "train"}
    known = script.knows_mtrain
    return {"knows_mtrain": known, "saves": known, "shown": "all" if all_ranks else "first"}


def _watching(loaded: Loaded, team: Team) -> Watching:
    """Return how the ranks of a job are watched for hangs."""
    hangs, backend, script = team.spec.cluster.hangs, team.backend, loaded.script
    option = getattr(loaded.job.backend_options, "timeout_s", None)
    # A class that is not derived from the interface may lack both.
    gives_up_s, waits_asleep = getattr(backend, "gives_up_s", None), getattr(backend, "waits_asleep", True)
    patience_s = min((each for each in (gives_up_s, option) if each is not None), default=None)
    end_s = hangs.end_s
    if end_s == "auto":
        end_s = END_S if script is None or script.knows_mtrain else None
    return Watching(
        times=Times(
            **hangs.model_dump(exclude={"end_s"}),
            asked_s=None if patience_s is None else patience_s / 2,
            cpu_tells=waits_asleep and team.devices.on_cpu,
        ),
        end_s=end_s,
        counts_output=script is not None,
    )


def _recipe(loaded: Loaded, team: Team, *, mode: str) -> Recipe:
    """Return the recipe of the job, after the checks of what it asks of the team.

    Raises:
        SpecError: the ranks cannot follow it.
    """
    spec, size = team.spec, team.size
    if loaded.script is not None:
        # A script names its own batch when it runs; one that divides into the shards stands for it here.
        batch = {"batch_size": spec.cluster.shards or size, "accumulate": 1}
        sized = spec.model_copy(update={"train": spec.train.model_copy(update=batch)})
        recipe = make_recipe(sized, size=size)
        # What the script's own loss needs of all shards is refused when it asks for it, see ``rank.script.in_turn``.
        elastic.check_passes(recipe, size=size, model=loaded.script.path.name, spans_ranks=False)
        _check_script(spec)
    else:
        if team.backend.framework not in NEUTRAL_FRAMEWORKS:
            raise SpecError(
                f"backend.options.framework: {team.backend.framework} given, on which mtrain has no models; it is for scripts of "
                "your own: mtrain run --backend horovod SCRIPT"
            )
        recipe = make_recipe(spec, size=size)
    if loaded.script is None and mode in ("train", "compare"):
        model = loaded.job.model_class if recipe.shards is not None else None
        elastic.check_passes(recipe, size=size, model=spec.model.name, spans_ranks=bool(model and model.spans_ranks))
        if spec.train.precision == "fp64" and not loaded.job.model_class.float64:
            raise SpecError(
                f"train.precision: fp64 given, but the loss of {spec.model.name} is computed in float32; use fp32"
            )
        total_updates(spec, 1)  # The result is not used: this raises if the spec sets no length.
    # A mesh is checked before the backend's own rules, whose messages take for granted that its groups exist.
    meshes.check_backend(spec, takes_meshes=team.backend.takes_meshes)
    meshes.check_hosts(recipe, [host.slots for host in team.hosts])
    team.backend.check(recipe, size=size, on_cpu=team.devices.on_cpu)
    return recipe


def _check_script(spec: Spec) -> None:
    """Refuse what only a loop of mtrain's can do.

    Raises:
        SpecError: the spec asks for such a thing.
    """
    for key in ("tensor", "pipeline"):
        length = getattr(spec.parallel, key)
        if length == 1:
            continue
        raise SpecError(
            f"parallel.{key}: {length} given for a script, whose own loop gives each rank samples of its own; use "
            "parallel.shard and parallel.replicate, or train the model from a spec (model.name, data.format)"
        )
    if spec.train.prune is not None:
        raise SpecError("train.prune: given for a script, whose own loop decides the updates; leave it out")


WRITTEN_OUT = 8
"""Largest number of hosts of which each command is written out; of more, those of the first two and of the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCommand:
    """What is started for one host."""

    node: int
    command: Command
    brought: Sequence[str] = ()
    """The command that a cluster runs to bring ``command`` to the host; empty without a cluster."""
    starts: bool = False
    """Whether that command starts the other one by itself."""

    def lines(self) -> list[str]:
        """Return the commands as lines for a shell: variables first, quoted where needed. For printing only."""
        lines = [f"host {self.node}: {self.command.host}"]
        if self.brought:
            lines += ["  " + shlex.join(self.brought), "  which there starts" if self.starts else "  which starts"]
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.command.env.items())]
        return [*lines, "  " + " ".join(variables) + " \\", "  " + shlex.join(self.command.argv)]


def command_lines(commands: Sequence[HostCommand]) -> list[str]:
    """Return the lines of all hosts, an empty one before each host."""
    if len(commands) <= WRITTEN_OUT:
        return [line for one in commands for line in ("", *one.lines())]
    *ends, last = (commands[0], commands[1], commands[-1])
    between = f"hosts 2 to {last.node - 1}: {commands[2].command.host} ... {commands[-2].command.host}"
    shown = [line for one in ends for line in ("", *one.lines())]
    return [*shown, "", f"{between}; --json prints every command", "", *last.lines()]
