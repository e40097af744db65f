"""Lead a job on several hosts, or join one: who does which, and what the others must know."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from mtrain.errors import SpecError, UsageError
from mtrain.jobs.brief import Brief
from mtrain.jobs.hosts.admission import Party
from mtrain.jobs.hosts.hosts import Gathering
from mtrain.jobs.hosts.joining import join
from mtrain.jobs.hosts.leader import Leader
from mtrain.jobs.hosts.rendezvous import open_meeting
from mtrain.jobs.plan import means, micro_batch
from mtrain.jobs.plan.machine import SEVERAL_HOSTS_PORT, typed_line
from mtrain.jobs.plan.plan import Plan, make_plan, title_of
from mtrain.jobs.preflight.findings import Finding
from mtrain.jobs.resume.find import AUTO, IF_ANY
from mtrain.jobs.run.supervisor import Result
from mtrain.records.console import make_display
from mtrain.records.display import Display
from mtrain.spec import terminal
from mtrain.system import environment
from mtrain.system.job_secret import CLUSTER_VARIABLE
from mtrain.system.placement import is_here, line_for

LAST_PORT = 65535
"""Highest port number."""


def connect(
    brief: Brief,
    *,
    tell: Callable[[Sequence[Finding]], None] | None = None,
    stream: IO[str] | None = None,
) -> Leader | Result:
    """Return the leader of a job; the result of a job that another process leads, or that people start from the lines printed.

    A host that serves knows exit code and reason of the job only.

    Args:
        brief: the job.
        tell: see ``Leader``.
        stream: receives all messages; None: the terminal.

    Raises:
        UsageError: the job cannot be started.
        LaunchError: a host that is needed is not there.
    """
    draft = make_plan(brief.loaded, run_dir=brief.base / brief.name)
    if draft.cluster is not None and not draft.cluster.starts:
        for host, line in zip(draft.hosts, draft.brought, strict=True):
            terminal.say(f"# {host.address}\n{shlex.join(line)}", stream=stream)
        return Result(code=0, text="")
    trials = _run_trials(brief, draft)
    brief = _with_shards(brief, draft.size)
    display = make_display(brief.display, title=title_of(brief.loaded, name=_display_name(brief)), stream=stream)
    environ = environment.caller()
    gathering: Gathering
    if draft.cluster is not None and draft.hosted_job is not None:
        gathering = draft.cluster.gathering(replace(draft.hosted_job, note=display.note), environ)
    else:
        node = means.own_node(brief.loaded, note=display.note)
        if node > 0:
            return _serve(brief, display, node=node, stream=stream)
        gathering = open_meeting(
            _party(brief, node=0),
            python=sys.executable,
            environ=environ,
            note=display.note,
            timeout_s=brief.spec.cluster.joining_s,
        )
    return Leader(
        brief=brief,
        gathering=gathering,
        display=display,
        forwarded=_forward(draft, environ, brief.spec.cluster.forward_env),
        trials=trials,
        tell=tell,
        stream=stream or sys.stderr,
    )


def _serve(brief: Brief, display: Display, *, node: int, stream: IO[str] | None) -> Result:
    """Serve the leader of a job as host number ``node``, and return what it says at the end."""
    cluster = brief.spec.cluster
    display.note(f"host {node} of {len(brief.hosts)}; progress is shown on {brief.hosts[0]}")
    again = cluster.max_restarts > 0 or cluster.min_nodes is not None
    try:
        farewell = join(_party(brief, node=node), timeout_s=cluster.joining_s, note=display.note, again=again)
    finally:
        display.close()
    terminal.say(farewell.text, stream=stream or sys.stderr, nl=bool(farewell.text))
    return Result(code=farewell.code, text=farewell.text, reason=farewell.reason)


def _run_trials(brief: Brief, draft: Plan) -> micro_batch.Trials | None:
    """Run the trials of micro batches, where the spec asks for them, this host leads, and no checkpoint has the answer.

    Raises:
        SpecError: this is not the first host, and none that serves it.
    """
    loaded = brief.loaded
    if brief.mode != "train" or not micro_batch.is_open(loaded) or means.joins(loaded):
        return None
    micro_batch.check(loaded)
    if brief.resume is not None:
        return None
    if not is_here(draft.hosts[0].address):
        raise SpecError(
            f"{micro_batch.KEY}: auto is measured on the first host, {draft.hosts[0].address}, which is not this machine; start "
            "the job there, or give a number"
        )
    return micro_batch.run_trials(loaded, draft, note=lambda text: terminal.say(text, err=True))


def _with_shards(brief: Brief, shards: int) -> Brief:
    """Return the brief of an elastic job with its number of shards."""
    # The run folder keeps the number: a resumed job may begin with fewer hosts, and must compute the same.
    cluster, loaded = brief.spec.cluster, brief.loaded
    if cluster.min_nodes is None or cluster.shards is not None:
        return brief
    spec = loaded.spec.model_copy(update={"cluster": cluster.model_copy(update={"shards": shards})})
    values = {**loaded.values, "cluster": {**loaded.values["cluster"], "shards": shards}}
    return replace(brief, loaded=replace(loaded, spec=spec, values=values))


def _forward(draft: Plan, environ: Mapping[str, str], extra: Sequence[str]) -> dict[str, str]:
    """Return the variables for the other hosts, without those that the cluster sets on each of them."""
    assigned = frozenset() if draft.cluster is None else draft.cluster.assigns
    return {name: value for name, value in environment.forward(environ, extra).items() if name not in assigned}


def _display_name(brief: Brief) -> str:
    """Return the name of the run for messages.

    For a resumed run this is its folder's name; otherwise only the first host knows the final name.
    """
    if brief.resume in (None, AUTO, IF_ANY):
        return brief.name
    path = Path(str(brief.resume)).absolute()
    return path.parent.parent.name if path.parent.name == "checkpoints" else path.name


def _party(brief: Brief, *, node: int) -> Party:
    cluster, script, typed = brief.spec.cluster, brief.loaded.script, typed_line()
    if cluster.control_port != "auto":
        port = cluster.control_port
    else:
        master = SEVERAL_HOSTS_PORT if cluster.master_port == "auto" else cluster.master_port
        # All hosts derive it from the spec, because nobody can tell them before they have met.
        port = master + 1 if master < LAST_PORT else master - 1
    if port == cluster.master_port:
        raise UsageError(
            f"--control-port {port}: the ranks are to meet at cluster.master_port {port} as well; give another"
        )
    of_script = {} if script is None else {"script": {"digest": script.digest, "arguments": list(script.arguments)}}
    return Party(
        hosts=list(brief.hosts),
        node=node,
        port=port,
        mode=brief.mode,
        values={**brief.loaded.values, **of_script},
        line=lambda node: shlex.join(line_for(typed, node)),
        secret=environment.caller().get(CLUSTER_VARIABLE, ""),
    )
