"""A job on several hosts from the command line: who leads, who joins, and what they are told."""

import dataclasses
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from mtrain.errors import SpecError, UsageError
from mtrain.jobs.chosen import AUTO, host_names
from mtrain.jobs.machine import SEVERAL_HOSTS_PORT, Machine
from mtrain.jobs.plan import Plan, title_of
from mtrain.system import environment
from mtrain.system.job_secret import CLUSTER_VARIABLE
from mtrain.system.placement import is_own, line_for, resolve

if TYPE_CHECKING:
    from mtrain.cluster.hosts import Gathering
    from mtrain.cluster.leader import Survey
    from mtrain.cluster.micro_batch import Trials
    from mtrain.cluster.preflight.findings import Finding
    from mtrain.cluster.rendezvous import Party
    from mtrain.cluster.supervisor import Result
    from mtrain.report.display import Display
    from mtrain.spec.config import Loaded
    from mtrain.spec.model import Spec


def is_by_hand(loaded: "Loaded") -> bool:
    """Return whether no cluster is chosen: a job on several hosts is then started by hand on each of them."""
    return loaded.spec.cluster.name == AUTO


def joins(loaded: "Loaded") -> bool:
    """Return whether this host serves another one that leads the job: it was started by hand and is not the first.

    Raises:
        UsageError: this machine is none of the hosts.
    """
    from mtrain.cluster import start

    return is_several(loaded) and is_by_hand(loaded) and start.own_node(loaded) > 0


def is_several(loaded: "Loaded") -> bool:
    """Return whether a job runs on several hosts, or on another host than this one."""
    return len(loaded.spec.cluster.ips) > 1 or not is_by_hand(loaded)


LAST_PORT = 65535
"""Highest port number."""


@dataclass(frozen=True, kw_only=True)
class Brief:
    """See ``cluster.leader.Brief``."""

    loaded: "Loaded"
    mode: str
    name: str
    machine: Machine
    resume: str | None = None
    """The value of ``--resume``, which the first host resolves."""
    start_from: Path | None = None
    """A checkpoint from which a new run starts."""
    by_hand: bool = False
    """Whether the same command is started by hand on every host."""
    latest: bool = True
    """Whether ``runs/latest`` will point to the run folder."""
    quiet: bool = False
    """Whether no progress is shown, whatever the spec asks for."""

    trials: "Trials | None" = None
    """Trials that measured micro batches, where the spec leaves the largest one to them."""
    decided: dict[str, "Loaded"] = field(default_factory=dict, compare=False)
    """``loaded``: the spec with what the leader has decided for the whole job."""

    @property
    def spec(self) -> "Spec":
        """Return the spec of the job."""
        return self.loaded.spec

    @property
    def hosts(self) -> Sequence[str]:
        """Return the addresses of the hosts, or the names of those whose address is known once they have connected."""
        return host_names(self.loaded)

    @property
    def base(self) -> Path:
        """Return the folder that contains run folders, the same on every host."""
        return Path(self.loaded.spec.report.dir).absolute()

    @property
    def cwd(self) -> Path | None:
        """Return the working directory of every host; None: hosts started by hand keep their own."""
        return None if self.by_hand else Path.cwd()

    def resumed(self) -> str | None:
        """See ``cluster.leader.Brief``."""
        return self.resume

    def checkpoint(self) -> Path | None:
        """See ``cluster.leader.Brief``."""
        return None if self.start_from is None else self.start_from.absolute()

    def plan(self, survey: "Survey", run_dir: Path, checkpoint: Path | None) -> Plan:
        """Return one plan for all hosts, made from the facts in ``survey``."""
        from mtrain.cluster import late_names, start

        hellos, hosts = survey.hellos, list(survey.addresses)

        def address_of(host: str) -> str:
            node = hosts.index(host) if host in hosts else 0  # cluster.master_addr may be another name of the first
            return late_names.address_of(host, hellos[node], interface=self.spec.cluster.interface)

        machine = dataclasses.replace(
            self.machine,
            cores=min(int(hello["cores"]) for hello in hellos),
            devices=int(hellos[0]["devices"]),
            devices_of=[int(hello["devices"]) for hello in hellos],
            hidden=bool(hellos[0]["hidden"]),
            meeting_port=survey.port,
            hosts=survey.addresses,
            present=survey.present,
            address_of=address_of,
        )
        where = start.Where(run_dir=run_dir, checkpoint=checkpoint)
        plan = start.planned(self.loaded, where, mode=self.mode, machine=machine)
        if self.mode != "train" or self.spec.train.max_micro_batch != "auto":
            return plan
        return start.planned(self._settled(survey, plan), where, mode=self.mode, machine=machine)

    def _settled(self, survey: "Survey", plan: Plan) -> "Loaded":
        """Return the spec with the micro batch that fits on every host; it is decided once in a job."""
        from mtrain.cluster import micro_batch

        if "loaded" not in self.decided:
            if self.trials is not None:
                self.trials.also_on([int(hello["free_bytes"]) for hello in survey.hellos])
            self.decided["loaded"] = micro_batch.settled(
                self.loaded, plan, note=lambda text: click.echo(text, err=True), trials=self.trials
            )
            click.echo(self.decided["loaded"].notes[-1], err=True)
        return self.decided["loaded"]

    def folder(self, plan: Plan) -> Mapping[str, str]:
        """Write all request files into the run folder here.

        Return those that ranks files_for_ranks, for the other hosts: name -> text.
        """
        from mtrain.cluster import start
        from mtrain.system import runfolder

        files_for_ranks = start.write_folder(self.decided.get("loaded", self.loaded), plan)
        if self.latest:
            runfolder.point_latest(plan.run_dir)
        return files_for_ranks


def run(
    brief: Brief,
    *,
    notes: Sequence[str] = (),
    tell: "Callable[[Sequence[Finding]], None] | None" = None,
    stream: IO[str] | None = None,
) -> "Result":
    """Lead the job, or serve the host that does. A host that serves knows exit code and reason of the job only.

    Args:
        brief: the job.
        notes: sentences to show first.
        tell: see ``Leader``.
        stream: receives all messages; None: the terminal.

    Raises:
        UsageError: the job cannot be started.
        LaunchError: a host that is needed is not there.
    """
    from mtrain.cluster import start
    from mtrain.cluster.leader import Leader
    from mtrain.cluster.supervisor import Result
    from mtrain.report.console import make_display

    where = start.Where(run_dir=brief.base / brief.name, checkpoint=None)
    draft = start.planned(brief.loaded, where, machine=brief.machine)
    if draft.cluster is not None and not draft.cluster.starts:
        for host, line in zip(draft.hosts, draft.brought, strict=True):
            click.echo(f"# {host.address}\n{shlex.join(line)}", file=stream)
        return Result(code=0, text="")
    brief = _completed(brief, draft)
    display = make_display(
        "quiet" if brief.quiet else brief.loaded.spec.report.display,
        title=title_of(brief.loaded, name=_display_name(brief)),
        stream=stream,
    )
    environ = environment.caller()
    gathering: Gathering
    if draft.cluster is not None and draft.hosted_job is not None:
        gathering = draft.cluster.gathering(dataclasses.replace(draft.hosted_job, note=display.note), environ)
    else:
        node = start.own_node(brief.loaded, note=display.note)
        if node > 0:
            return _serve(brief, display, node=node, stream=stream)
        gathering = _meeting(brief, display, environ)
    leader = Leader(
        brief=brief,
        gathering=gathering,
        display=display,
        forwarded=_forwarded(draft, environ, brief.loaded.spec.cluster.forward_env),
        notes=notes,
        tell=tell,
        stream=stream or sys.stderr,
    )
    return leader.run()


def _completed(brief: Brief, draft: Plan) -> Brief:
    """Return the brief with all that is decided before hosts are asked: trials of micro batches, and shards.

    Raises:
        SpecError: trials are asked for, and this is not the first host.
    """
    if not (is_by_hand(brief.loaded) and joins(brief.loaded)):
        brief = _with_trials(brief, draft)
    cluster = brief.loaded.spec.cluster
    if cluster.min_nodes is not None and cluster.shards is None:
        return dataclasses.replace(brief, loaded=_with_shards(brief.loaded, draft.size))
    return brief


def _serve(brief: Brief, display: "Display", *, node: int, stream: IO[str] | None) -> "Result":
    """Serve the leader of a job as host number ``node``, and return what it says at the end."""
    from mtrain.cluster.rendezvous import join
    from mtrain.cluster.supervisor import Result

    cluster = brief.loaded.spec.cluster
    display.note(f"host {node} of {len(brief.hosts)}; progress is shown on {brief.hosts[0]}")
    again = cluster.max_restarts > 0 or cluster.min_nodes is not None
    try:
        farewell = join(_party(brief, node=node), timeout_s=cluster.joining_s, note=display.note, again=again)
    finally:
        display.close()
    click.echo(farewell.text, file=stream or sys.stderr, nl=bool(farewell.text))
    return Result(code=farewell.code, text=farewell.text, reason=farewell.reason)


def _meeting(brief: Brief, display: "Display", environ: Mapping[str, str]) -> "Gathering":
    """Return the gathering of hosts that people start by hand, of which this is the first."""
    from mtrain.cluster.rendezvous import Meeting

    return Meeting(
        party=_party(brief, node=0),
        python=sys.executable,
        environ=environ,
        note=display.note,
        timeout_s=brief.loaded.spec.cluster.joining_s,
    )


def _with_trials(brief: Brief, draft: Plan) -> Brief:
    """Return the brief with trials of micro batches, where the spec asks for them and no checkpoint has the answer.

    Raises:
        SpecError: This is not the first host.
    """
    from mtrain.cluster import micro_batch

    loaded = brief.loaded
    if brief.mode != "train" or not micro_batch.is_open(loaded):
        return brief
    micro_batch.check(loaded)
    if brief.resume is not None:
        return brief
    if not is_here(draft.hosts[0].address):
        raise SpecError(
            f"{micro_batch.KEY}: auto is measured on the first host, {draft.hosts[0].address}, which is not this machine; start "
            "the job there, or give a number"
        )
    trials = micro_batch.run_trials(loaded, draft, note=lambda text: click.echo(text, err=True))
    return dataclasses.replace(brief, trials=trials)


def _with_shards(loaded: "Loaded", shards: int) -> "Loaded":
    """Return the spec with the number of shards of an elastic job, so that its run folder keeps it."""
    cluster = loaded.spec.cluster.model_copy(update={"shards": shards})
    values = {**loaded.values, "cluster": {**loaded.values["cluster"], "shards": shards}}
    return dataclasses.replace(loaded, spec=loaded.spec.model_copy(update={"cluster": cluster}), values=values)


def _forwarded(draft: Plan, environ: Mapping[str, str], extra: Sequence[str]) -> dict[str, str]:
    """Return the variables for the other hosts, without those that the cluster sets on each of them."""
    assigned = frozenset() if draft.cluster is None else draft.cluster.assigns
    return {name: value for name, value in environment.forwarded(environ, extra).items() if name not in assigned}


def _display_name(brief: Brief) -> str:
    """Return the name of the run for messages.

    For a resumed run this is its folder's name; otherwise only the first host knows the final name.
    """
    from mtrain.cluster.start import AUTO
    from mtrain.system.runfolder import IF_ANY

    if brief.resume in (None, AUTO, IF_ANY):
        return brief.name
    path = Path(str(brief.resume)).absolute()
    return path.parent.parent.name if path.parent.name == "checkpoints" else path.name


def _party(brief: Brief, *, node: int) -> "Party":
    from mtrain.cluster.rendezvous import Party

    cluster = brief.loaded.spec.cluster
    if cluster.control_port != "auto":
        port = cluster.control_port
    else:
        master = SEVERAL_HOSTS_PORT if cluster.master_port == "auto" else cluster.master_port
        port = master + 1 if master < LAST_PORT else master - 1
    if port == cluster.master_port:
        raise UsageError(
            f"--control-port {port}: the ranks are to meet at cluster.master_port {port} as well; give another"
        )
    return Party(
        hosts=list(brief.hosts),
        node=node,
        port=port,
        mode=brief.mode,
        values={**brief.loaded.values, **_script_values(brief.loaded)},
        line=_line_for(brief.machine.line),
        secret=environment.caller().get(CLUSTER_VARIABLE, ""),
    )


def _script_values(loaded: "Loaded") -> dict[str, Any]:
    """Return what describes the user's script in a hello, beside the values of the spec."""
    script = loaded.script
    return {} if script is None else {"script": {"digest": script.digest, "arguments": list(script.arguments)}}


def _line_for(typed: Sequence[str]) -> Callable[[int], str]:
    return lambda node: shlex.join(line_for(typed, node))


def is_here(host: str) -> bool:
    """Return whether a host of the list is this machine, so that results are here."""
    return any(is_own(address) for address in (host, *resolve(host)))
