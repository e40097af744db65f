"""The process that leads a job on several hosts: it connects the agents, makes one plan for all, and runs the attempts.

There is one leader per job: on the host that starts the others by ssh, or on the first host where each is started by
hand. The
``Gathering`` is the only difference between the two.
"""

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from mtrain.cluster import late_names
from mtrain.cluster.attempt import Limits
from mtrain.cluster.channel import Message, ask_all
from mtrain.cluster.connected_hosts import ASK_S, ConnectedHosts, ask, end_requested
from mtrain.cluster.elastic_hosts import ElasticHosts
from mtrain.cluster.farewell import Farewell
from mtrain.cluster.hosts import Gathering, Member
from mtrain.cluster.preflight import checks, findings
from mtrain.cluster.preflight.findings import Finding
from mtrain.cluster.supervisor import Result, not_started
from mtrain.errors import MtrainError, UsageError
from mtrain.jobs.plan import Plan
from mtrain.report.display import Display
from mtrain.spec.addresses import is_address
from mtrain.spec.model import Spec
from mtrain.system import processes

CHECK_S = 600.0
"""Seconds that checking the data on the first host may take."""
FETCH_S = 6 * 3600.0
"""Seconds that the first host may take to fetch a checkpoint from its copy. A host that is lost is noticed earlier."""
CHECKED = ("train", "evaluate")
"""Modes in which ranks read data and build a model."""
PREFLIGHT_ONLY = "look"
"""Mode of a job that ends after its preflight."""
TRIAL = "allreduce"
"""Mode of a job whose run folder is deleted once the job has succeeded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The facts about the hosts of a job from which its plan is made."""

    hellos: Sequence[Message]
    """The hello of each host, in the order of the list of hosts."""
    port: int
    """A port that is free on the first host, where the ranks can meet."""
    addresses: Sequence[str]
    """The address of each host. A cluster that chooses the hosts itself may give a lost one another address."""
    present: Sequence[int] = ()
    """Indices of the hosts that take part, in the order of their ranks; empty: all of them in their own order."""


class NotStarted(UsageError):
    """The job was not started because of findings that are shown here already.

    ``whole`` lists them, for the other hosts.
    """

    def __init__(self, bad: Sequence[Finding]) -> None:
        head = f"the job was not started: {len(bad)} thing{'s' if len(bad) > 1 else ''} to mend"
        self.whole = "\n".join([head, *(f"  {finding.line()}" for finding in bad)])
        super().__init__(f"{head}, marked bad above")


class Brief(Protocol):
    """The job that the user asked for, as the command line describes it."""

    @property
    def spec(self) -> Spec: ...  # noqa: D102

    @property
    def hosts(self) -> Sequence[str]:
        """Addresses, the one of rank 0 first."""
        ...

    @property
    def mode(self) -> str:
        """Return what the ranks do: "train", "evaluate" or "allreduce"; with ``PREFLIGHT_ONLY``, no rank is started."""
        ...

    @property
    def base(self) -> Path:
        """Return the absolute path of the folder that contains run folders, the same on every host."""
        ...

    @property
    def name(self) -> str:
        """Return the name of a new run folder."""
        ...

    @property
    def cwd(self) -> Path | None:
        """Return the ranks' working directory on every host; None: each host's own, in which it was started by hand."""
        ...

    def resumed(self) -> str | None:
        """Return the value of ``--resume``: a path, "auto" or "if-any"; None: a new run."""
        ...

    def checkpoint(self) -> Path | None:
        """Return the checkpoint from which a new run starts, or None."""
        ...

    def plan(self, survey: Survey, run_dir: Path, checkpoint: Path | None) -> Plan:
        """Return the plan of an attempt."""
        ...

    def folder(self, plan: Plan) -> Mapping[str, str]:
        """Make the run folder on this host, and return the files to write into it on all hosts: name -> text."""
        ...


@dataclass(kw_only=True)
class Leader:
    """Leads one job from the main thread of its process."""

    brief: Brief
    gathering: Gathering
    display: Display
    forwarded: Mapping[str, str]
    """Environment variables for all hosts; they are sent only where ``gathering.forwards``."""
    stream: IO[str] = field(default_factory=lambda: sys.stderr)
    """Where the reason of a failure is printed."""
    notes: Sequence[str] = ()
    """Notes to show at the beginning."""
    tell: Callable[[Sequence[Finding]], None] | None = None
    """Receives all findings of the preflight; None: they are printed unless all are ok."""
    _members: dict[int, Member] = field(default_factory=dict)

    def run(self) -> Result:
        """Lead the job to its end.

        Raises:
            UsageError: the job cannot be started, and nothing was.
            LaunchError: lost hosts did not come back for another attempt.
        """
        farewell = Farewell.failed("the leader of the job failed; see its own messages", code=1)
        try:
            with processes.Requests() as requests, processes.adopting_orphans():
                result = self._lead(requests)
            discard = result.code == 0 and self.brief.mode == TRIAL
            farewell = Farewell(code=result.code, text=result.text, reason=result.reason, discard=discard)
        except MtrainError as error:
            reason = error.whole if isinstance(error, NotStarted) else str(error)
            farewell = Farewell.failed(reason, code=error.exit_code)
            raise
        finally:
            for member in self._members.values():
                member.channel.send(farewell.message())
            self.gathering.close()
            self.display.close()
        if farewell.discard and result.run_dir is not None:
            shutil.rmtree(result.run_dir, ignore_errors=True)
        if result.text:
            print(result.text, file=self.stream, flush=True)
        return result

    # ------------------------------------------------------------------------------------------------------ preparation
    def _lead(self, requests: processes.Requests) -> Result:
        for note in self.notes:
            self.display.note(note)
        nodes = range(len(self.brief.hosts))
        self._members, missing = self.gathering.gather(
            nodes, timeout_s=self.brief.spec.cluster.joining_s, stop=requests.any
        )
        if self._end_requested(requests):
            return not_started(requests)
        fewest = self.brief.spec.cluster.min_nodes
        enough = 0 in self._members if fewest is None else len(self._members) >= fewest
        if len(self._members) < len(nodes) and not enough:
            self._show(missing)
            raise NotStarted(missing)
        self._await_names(requests)
        if self._end_requested(requests):
            return not_started(requests)
        run_dir, checkpoint = self._place()
        present = list(nodes) if fewest is None else sorted(self._members)
        plan = self.brief.plan(self._survey(present), run_dir, checkpoint)
        if fewest is not None:
            for finding in missing:
                self.display.note(f"the job begins without a host: {finding.line()}")
            missing = []
        self._preflight(plan, present, missing)
        if self.brief.mode == PREFLIGHT_ONLY:
            return Result(code=0, text="")
        if self.brief.mode in CHECKED:
            self._check(plan, requests)
        if self._end_requested(requests):
            return not_started(requests)
        return self._hosts(requests).run(plan)

    def _hosts(self, requests: processes.Requests) -> ConnectedHosts:
        """Return the hosts that are connected, as the supervisor sees them."""
        cluster = self.brief.spec.cluster
        common: dict[str, Any] = {
            "members": self._members,
            "gathering": self.gathering,
            "display": self.display,
            "requests": requests,
            "files": self.brief.folder,
            "replan": self._replanned,
            "forwarded": self.forwarded if self.gathering.forwards else {},
            "limits": Limits.of(cluster.failure_timeout_s, grace_s=cluster.grace_s),
            "back_s": cluster.joining_s,
            "cwd": self._cwd(),
        }
        if cluster.min_nodes is None:
            return ConnectedHosts(**common)
        return ElasticHosts(
            **common,
            all_nodes=self._nodes(),
            names=self.brief.hosts,
            fewest=cluster.min_nodes,
            rejoin_s=cluster.rejoin_s,
            findings_on=self._findings_on,
        )

    def _findings_on(self, member: Member) -> list[Finding]:
        """Return what keeps a host from joining the job that runs. Facts that need other hosts are not compared."""
        nodes = sorted({*self._members, member.node})
        survey = self._survey(nodes, {**self._members, member.node: member})
        required = checks.requirements(self.brief.spec, self._draft(survey), cwd=self.brief.cwd)
        return findings.bad(checks.preflight([member.channel], [required[nodes.index(member.node)]]))

    def _draft(self, survey: Survey) -> Plan:
        return self.brief.plan(survey, self.brief.base / self.brief.name, None)

    def _await_names(self, requests: processes.Requests) -> None:
        """Wait until all hosts that are here know one another by name."""
        cluster = self.brief.spec.cluster
        wanted = [member.host for member in self._members.values()]
        late_names.await_names(
            self._members,
            list(dict.fromkeys([*wanted, *([cluster.master_addr] if cluster.master_addr else [])])),
            timeout_s=cluster.joining_s,
            note=self.display.note,
            stop=lambda: self._end_requested(requests),
        )

    def _replanned(self, plan: Plan, checkpoint: Path | None, nodes: Sequence[int]) -> Plan:
        return self.brief.plan(self._survey(nodes), plan.run_dir, checkpoint or self.brief.checkpoint())

    def _survey(self, nodes: Sequence[int], members: Mapping[int, Member] | None = None) -> Survey:
        """Collect the facts for a plan on hosts, the one of rank 0 first.

        A host that is missing is assumed to be like the first one that is there.
        """
        members = dict(self._members if members is None else members)
        first = next(node for node in nodes if node in members)
        port = self.brief.spec.cluster.master_port
        if port == "auto":  # A port that the spec fixes is checked by the preflight.
            address = self.brief.spec.cluster.master_addr or members[first].host
            port = ask(members, first, "port", address=address, port=0)["port"]
        named = list(self.brief.hosts)
        hellos = [members[node if node in members else first].hello for node in self._nodes()]
        addresses = [members[node].host if node in members else named[node] for node in self._nodes()]
        present = () if list(nodes) == list(self._nodes()) else tuple(nodes)
        return Survey(hellos=hellos, port=int(port), addresses=addresses, present=present)

    def _nodes(self) -> range:
        return range(len(self.brief.hosts))

    def _place(self) -> tuple[Path, Path | None]:
        """Return the run folder, a new one with a name that is free on all hosts, and the checkpoint to start from."""
        resumed = self.brief.resumed()
        base, name = str(self.brief.base), self.brief.name
        if resumed is not None:
            path = None if resumed == "auto" else resumed
            copy_to = self.brief.spec.checkpoint.copy_to
            is_remote = copy_to is not None or is_address(resumed)
            timeout_s = FETCH_S if is_remote else ASK_S
            place: dict[str, Any] = {"given": path, "base": base, "name": name, "copy_to": copy_to, "cwd": self._cwd()}
            answer = ask(self._members, min(self._members), "resume", timeout_s=timeout_s, **place)
            return Path(answer["run"]), Path(answer["checkpoint"]) if answer["checkpoint"] else None
        answers = ask_all(self._channels(), "names", timeout_s=ASK_S, base=base, name=name)
        names_there = {each for answer in answers for each in answer.get("names", ())}
        from mtrain.system import runfolder

        names_here = runfolder.names_like(self.brief.base, name)
        return self.brief.base / runfolder.free_name(name, {*names_there, *names_here}), self.brief.checkpoint()

    def _preflight(self, plan: Plan, nodes: Sequence[int], missing: Sequence[Finding]) -> None:
        """Compare the hosts ``nodes`` before anything is started.

        Raises:
            NotStarted: the job cannot succeed on them.
        """
        channels = [self._members[node].channel if node in self._members else None for node in nodes]
        required = checks.requirements(self.brief.spec, plan, cwd=self.brief.cwd)
        began = time.monotonic()
        results = checks.preflight(channels, required, earlier=missing)
        took = f"preflight of {len(channels)} hosts in {time.monotonic() - began:.1f} s"
        bad = findings.bad(results)
        self._show(results)
        if bad:
            self.display.note(f"{took}: {len(bad)} of {len(results)} findings are in the way")
            raise NotStarted(bad)
        self.display.note(f"{took}: {len(results)} findings, none in the way")

    def _show(self, results: Sequence[Finding]) -> None:
        if self.tell is not None:
            self.tell(results)
        elif findings.worst(results) != "ok":
            findings.show(results, every="all hosts", stream=self.stream)

    def _check(self, plan: Plan, requests: processes.Requests) -> None:
        """Run the checks of a job on one host (``jobs.preflight``) on the first host, where rank 0 will run.

        A request to end the job ends the waiting.
        """
        from mtrain.spec import config

        try:
            answer = ask(
                self._members,
                min(self._members),
                "check",
                timeout_s=CHECK_S,
                stop=lambda: self._end_requested(requests),
                spec=config.resolved_json(self.brief.spec),
                size=plan.size,
                training=self.brief.mode == "train",
                resumed=str(plan.resume) if plan.resume else None,
                cwd=self._cwd(),
            )
        except MtrainError:
            if requests.any():
                return
            raise
        for note in answer["notes"]:
            self.display.note(note)

    def _end_requested(self, requests: processes.Requests) -> bool:
        return end_requested(self._members, requests, self.display)

    def _cwd(self) -> str | None:
        return None if self.brief.cwd is None else str(self.brief.cwd)

    def _channels(self) -> list[Any]:
        return [member.channel for member in self._members.values()]
