"""The process that leads a job on several hosts: it connects the agents, makes one plan for all, and runs the attempts.

There is one leader per job: on the host that starts the others by ssh, or on the first host where each is started by
hand. The
``Gathering`` is the only difference between the two.
"""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mtrain.errors import MtrainError, UsageError
from mtrain.jobs.brief import CHECKED, PREFLIGHT_ONLY, TRIAL, Brief
from mtrain.jobs.hosts import agent_warnings, late_names
from mtrain.jobs.hosts.channel import ask_all
from mtrain.jobs.hosts.connected_hosts import ASK_S, ConnectedHosts, ask, end_requested
from mtrain.jobs.hosts.elastic_hosts import ElasticHosts
from mtrain.jobs.hosts.farewell import Farewell
from mtrain.jobs.hosts.hosts import Gathering, Member
from mtrain.jobs.hosts.survey import Survey
from mtrain.jobs.plan import means
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.preflight import checks, findings
from mtrain.jobs.preflight.findings import Finding
from mtrain.jobs.run import start
from mtrain.jobs.run.attempt import Limits
from mtrain.jobs.run.supervisor import Result, not_started
from mtrain.records.display import Display
from mtrain.spec import terminal
from mtrain.spec.addresses import is_address
from mtrain.system import placement, processes, runfolder

if TYPE_CHECKING:
    from mtrain.jobs.plan.micro_batch import Trials

CHECK_S = 600.0
"""Seconds that checking the data on the first host may take."""
FETCH_S = 6 * 3600.0
"""Seconds that the first host may take to fetch a checkpoint from its copy. A host that is lost is noticed earlier."""


class NotStarted(UsageError):
    """The job was not started because of findings that are shown here already.

    ``whole`` lists them, for the other hosts.
    """

    def __init__(self, bad: Sequence[Finding]) -> None:
        head = f"the job was not started: {len(bad)} thing{'s' if len(bad) > 1 else ''} to mend"
        self.whole = "\n".join([head, *(f"  {finding.line()}" for finding in bad)])
        super().__init__(f"{head}, marked bad above")


@dataclass(kw_only=True)
class Leader:
    """Leads one job from the main thread of its process."""

    brief: Brief
    """Replaced by another one as soon as the micro batch of the whole job is decided."""
    gathering: Gathering
    display: Display
    forwarded: Mapping[str, str]
    """Environment variables for all hosts; they are sent only where ``gathering.forwards``."""
    stream: IO[str] = field(default_factory=lambda: sys.stderr)
    """Where the reason of a failure is printed."""
    trials: "Trials | None" = None
    """Trials that measured micro batches, where the spec leaves the largest one to them."""
    tell: Callable[[Sequence[Finding]], None] | None = None
    """Receives all findings of the preflight; None: they are printed unless all are ok."""
    _members: dict[int, Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._expected = ExpectedHosts(required=self._required_with, address_of=self._address_of)

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
            terminal.say(result.text, stream=self.stream)
        return result

    # ------------------------------------------------------------------------------------------------------ preparation
    def _lead(self, requests: processes.Requests) -> Result:
        for note in (*self.brief.loaded.notes, *self.brief.notes):
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
        plan = self._plan_on(self._survey(present), run_dir, checkpoint)
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
            "files": self._write_folder,
            "replan": self._replan,
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
        return findings.bad(checks.preflight([member.channel], [self._expected.of(member, among=self._members)]))

    def _required_with(self, members: Mapping[int, Member], come: Member) -> list[dict[str, Any]]:
        """Return the requirements on all hosts where those that are missing are like one that has come."""
        survey = self._survey(self._nodes(), {**members, come.node: come}, like=come)
        draft = self._plan(survey, self.brief.base / self.brief.name, None)
        return checks.requirements(self.brief.job, draft, cwd=self.brief.cwd, is_script=self.brief.mode == "script")

    def _address_of(self, member: Member) -> str:
        """Return the address by which ranks know a host: its name, unless their launcher takes none.

        Raises:
            UsageError: its address is not known.
        """
        if means.launcher_of(self.brief.job)[1].takes_names or placement.is_address(member.host):
            return member.host
        return late_names.address_of(member.host, member.hello, interface=self.brief.spec.cluster.interface)

    def _plan(self, survey: Survey, run_dir: Path, checkpoint: Path | None) -> Plan:
        """Return one plan for all hosts."""
        machine = survey.machine(self.brief.machine, interface=self.brief.spec.cluster.interface)
        where = start.Where(run_dir=run_dir, checkpoint=checkpoint)
        return start.plan_job(self.brief.loaded, where, mode=self.brief.mode, machine=machine)

    def _plan_on(self, survey: Survey, run_dir: Path, checkpoint: Path | None) -> Plan:
        """Return the first plan of the job, once the micro batch that fits on every host is in its spec."""
        from mtrain.jobs.plan import micro_batch

        plan = self._plan(survey, run_dir, checkpoint)
        if self.brief.mode != "train" or not micro_batch.is_open(self.brief.loaded):
            return plan
        if self.trials is not None:
            self.trials.also_on(survey.free_bytes)
        settled = micro_batch.settle(
            self.brief.loaded, plan, note=lambda text: terminal.say(text, err=True), trials=self.trials
        )
        terminal.say(settled.notes[-1], err=True)
        self.brief = replace(self.brief, loaded=settled)
        return self._plan(survey, run_dir, checkpoint)

    def _write_folder(self, plan: Plan) -> Mapping[str, str]:
        """Write all request files into the run folder here; return those that ranks read, for the other hosts."""
        files = start.write_folder(self.brief.loaded, plan)
        if self.brief.latest:
            runfolder.point_latest(plan.run_dir)
        return files

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

    def _replan(self, plan: Plan, checkpoint: Path | None, nodes: Sequence[int]) -> Plan:
        return self._plan(self._survey(nodes), plan.run_dir, checkpoint or self._start_from())

    def _survey(
        self, nodes: Sequence[int], members: Mapping[int, Member] | None = None, *, like: Member | None = None
    ) -> Survey:
        """Collect the facts for a plan on hosts, the one of rank 0 first.

        A host that is missing is assumed to be ``like`` a certain one; None: like the first one that is there.
        """
        members = dict(self._members if members is None else members)
        first = next(node for node in nodes if node in members)
        port = self.brief.spec.cluster.master_port
        if port == "auto":  # A port that the spec fixes is checked by the preflight.
            address = self.brief.spec.cluster.master_addr or members[first].host
            port = ask(members, first, "port", address=address, port=0)["port"]
        named = list(self.brief.hosts)
        assumed = members[first] if like is None else like
        hellos = [members.get(node, assumed).hello for node in self._nodes()]
        addresses = [members[node].host if node in members else named[node] for node in self._nodes()]
        present = () if list(nodes) == list(self._nodes()) else tuple(nodes)
        missing = frozenset(self._nodes()) - members.keys()
        return Survey(hellos=hellos, port=int(port), addresses=addresses, present=present, missing=missing)

    def _nodes(self) -> range:
        return range(len(self.brief.hosts))

    def _place(self) -> tuple[Path, Path | None]:
        """Return the run folder, a new one with a name that is free on all hosts, and the checkpoint to start from."""
        resumed = self.brief.resume
        base, name = str(self.brief.base), self.brief.name
        if resumed is not None:
            path = None if resumed == "auto" else resumed
            copy_to = self.brief.spec.checkpoint.copy_to
            is_remote = copy_to is not None or is_address(resumed)
            timeout_s = FETCH_S if is_remote else ASK_S
            first = min(self._members)
            place: dict[str, Any] = {"given": path, "base": base, "name": name, "copy_to": copy_to, "cwd": self._cwd()}
            answer = ask(self._members, first, "resume", timeout_s=timeout_s, own_node=first, **place)
            agent_warnings.show([(self._members[first].label, answer)], self.display.note)
            return Path(answer["run"]), Path(answer["checkpoint"]) if answer["checkpoint"] else None
        answers = ask_all(self._channels(), "names", timeout_s=ASK_S, base=base, name=name)
        names_there = {each for answer in answers for each in answer.get("names", ())}
        names_here = runfolder.names_like(self.brief.base, name)
        return self.brief.base / runfolder.free_name(name, {*names_there, *names_here}), self._start_from()

    def _start_from(self) -> Path | None:
        return None if self.brief.start_from is None else self.brief.start_from.absolute()

    def _preflight(self, plan: Plan, nodes: Sequence[int], missing: Sequence[Finding]) -> None:
        """Compare the hosts ``nodes`` before anything is started.

        Raises:
            NotStarted: the job cannot succeed on them.
        """
        channels = [self._members[node].channel if node in self._members else None for node in nodes]
        required = checks.requirements(self.brief.job, plan, cwd=self.brief.cwd, is_script=self.brief.mode == "script")
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
        agent_warnings.show([(self._members[min(self._members)].label, answer)], self.display.note)
        for note in answer["notes"]:
            self.display.note(note)

    def _end_requested(self, requests: processes.Requests) -> bool:
        return end_requested(self._members, requests, self.display)

    def _cwd(self) -> str | None:
        return None if self.brief.cwd is None else str(self.brief.cwd)

    def _channels(self) -> list[Any]:
        return [member.channel for member in self._members.values()]


# The requirements on a host follow from a plan of the whole job, and hundreds of hosts may come back together. A plan of
# all hosts for each of them would be the square of their number, so hosts that are alike share one.
Required = Mapping[str, Any]
"""The requirements on one host, as ``preflight.requirements`` returns them."""


REFUSAL_S = 5.0
"""Seconds for which no other plan is tried where there is none: a host that does not answer, or a name that is not known, may be
the reason, and both may pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Refusal:
    """Why there is no plan, and until when that counts."""

    error: MtrainError
    until: float


@dataclass(kw_only=True)
class ExpectedHosts:
    """Knows the requirements on each host of the job; threads may ask."""

    required: Callable[[Mapping[int, Member], Member], Sequence[Required]]
    """Makes a plan of all hosts from those that take part and one that has come; returns the requirements on each. Hosts that
    are missing are taken to be like the one that has come."""
    address_of: Callable[[Member], str] = lambda member: member.host
    """Returns the address by which ranks know a host, which the plan of another does not know; raises ``MtrainError`` where
    nobody knows it."""
    clock: Callable[[], float] = time.monotonic
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taking_part: frozenset[int] = frozenset()
    """The hosts that took part when ``_known`` was found."""
    _known: dict[Any, Sequence[Required] | _Refusal] = field(default_factory=dict)
    """By what a plan uses of a host: the requirements on all, or why there is no plan."""

    def of(self, member: Member, *, among: Mapping[int, Member]) -> Required:
        """Return the requirements on a host that has come to those that take part.

        Raises:
            MtrainError: there is no plan with this host.
        """
        address = self.address_of(member)
        members = dict(among)
        with self._lock:  # Those that come together wait for the one plan that all of them need.
            if self._taking_part != members.keys():
                self._taking_part = frozenset(members)
                self._known.clear()
            kind = _what_a_plan_uses(member)
            known = self._known.get(kind)
            if known is None or (isinstance(known, _Refusal) and self.clock() >= known.until):
                known = self._known[kind] = self._require(members, member)
        if isinstance(known, _Refusal):
            raise known.error
        here = {member.host, *(each.host for each in members.values())}
        required = known[member.node]
        # Names of hosts that are not there may mean nothing at present, and the host would wait for them.
        names = [name for name in required["names"] if name in here]
        return {**required, "address": address, "names": list(dict.fromkeys([*names, address]))}

    def _require(self, members: Mapping[int, Member], member: Member) -> Sequence[Required] | _Refusal:
        try:
            return self.required(members, member)
        except MtrainError as error:
            return _Refusal(error=error, until=self.clock() + REFUSAL_S)


def _what_a_plan_uses(member: Member) -> Any:
    """Return what a plan of all hosts uses of what one of them has told, beside its addresses."""
    return int(member.hello["devices"]), bool(member.hello["hidden"])
