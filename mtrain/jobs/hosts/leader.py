"""The process that leads a job on several hosts: it connects the agents, makes one plan for all, and runs the attempts.

There is one leader per job: on the host that starts the others by ssh, or on the first host where each is started by
hand. The
``Gathering`` is the only difference between the two.
"""

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mtrain.errors import MtrainError, UsageError
from mtrain.jobs.brief import CHECKED, TRIAL, Brief
from mtrain.jobs.hosts import messages
from mtrain.jobs.hosts.candidates import ExpectedHosts
from mtrain.jobs.hosts.channel import ask_all
from mtrain.jobs.hosts.connected_hosts import ASK_S, ConnectedHosts, ask, end_requested
from mtrain.jobs.hosts.elastic_hosts import ElasticHosts
from mtrain.jobs.hosts.hosts import Gathering, Member
from mtrain.jobs.hosts.messages import NOTHING, Farewell
from mtrain.jobs.hosts.survey import Survey, address_that_others_use, await_names
from mtrain.jobs.plan import means
from mtrain.jobs.plan.machine import here
from mtrain.jobs.plan.plan import Plan, make_plan
from mtrain.jobs.preflight import checks, findings
from mtrain.jobs.preflight.findings import Finding
from mtrain.jobs.resume.find import Where
from mtrain.jobs.run.attempt import Limits
from mtrain.jobs.run.request_files import write_folder
from mtrain.jobs.run.supervisor import Result
from mtrain.records.display import Display
from mtrain.spec import terminal
from mtrain.spec.addresses import is_address
from mtrain.spec.config import Loaded
from mtrain.system import placement, processes, runfolder

if TYPE_CHECKING:
    from mtrain.jobs.plan.micro_batch import Trials

CHECK_S = 600.0
"""Seconds that checking the data on the first host may take."""
FETCH_S = 6 * 3600.0
"""Seconds that the first host may take to fetch a checkpoint from its copy. A host that is lost is noticed earlier."""


class EndRequested(Exception):
    """Somebody has asked for the end of the job before anything was started."""


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
    """Leads one job from the main thread of its process: the steps of ``jobs.job.carry_out`` on several hosts."""

    brief: Brief
    """Replaced by another one once the micro batch of the whole job is decided."""
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
    _present: Sequence[int] = ()
    """The hosts on which the job begins."""
    _missing: Sequence[Finding] = ()
    """Why hosts are missing that the job needs."""
    _requests: processes.Requests = field(default_factory=processes.Requests)

    def __post_init__(self) -> None:
        self._expected = ExpectedHosts(required=self._required_with, address_of=self._address_of)
        self._here = here(self.brief.loaded)

    def lead(self, steps: "Callable[[Leader], Result]") -> Result:
        """Take the steps of the job to its end, and tell all hosts how it ended.

        Raises:
            UsageError: the job cannot be started, and nothing was.
            LaunchError: lost hosts did not come back for another attempt.
        """
        farewell = Farewell.for_error("the leader of the job failed; see its own messages", code=1)
        try:
            with self._requests, processes.adopting_orphans():
                try:
                    result = steps(self)
                except EndRequested:
                    code = processes.EXIT_CODES[self._requests.first or signal.SIGTERM]
                    result = Result(code=code, text=NOTHING, reason=NOTHING)
            discard = result.code == 0 and self.brief.mode == TRIAL
            farewell = Farewell(code=result.code, text=result.text, reason=result.reason, discard=discard)
        except MtrainError as error:
            reason = error.whole if isinstance(error, NotStarted) else str(error)
            farewell = Farewell.for_error(reason, code=error.exit_code)
            raise
        finally:
            # Agents print the reason where people started them, and exit with the code of the job.
            for member in self._members.values():
                member.channel.send(farewell.message())
            self.gathering.close()
            self.display.close()
        if result.text:
            terminal.say(result.text, stream=self.stream)
        return result

    # ------------------------------------------------------------------------------------------- the steps of `carry_out`
    def gather(self) -> Where:
        """Connect the hosts; return the run folder, and the checkpoint to start from.

        Raises:
            NotStarted: a host is missing that the job needs.
        """
        for note in (*self.brief.loaded.notes, *self.brief.notes):
            self.display.note(note)
        cluster = self.brief.spec.cluster
        self._members, missing = self.gathering.gather(
            self._nodes(), timeout_s=cluster.joining_s, stop=self._requests.any
        )
        self._end_if_requested()
        fewest = cluster.min_nodes
        enough = 0 in self._members if fewest is None else len(self._members) >= fewest
        if len(self._members) < len(self.brief.hosts) and not enough:
            self._show(missing)
            raise NotStarted(missing)
        # Names of pods become known one by one, and the preflight would refuse those that are not known yet.
        wanted = [*(member.host for member in self._members.values()), *filter(None, [cluster.master_addr])]
        await_names(
            self._members,
            list(dict.fromkeys(wanted)),
            timeout_s=cluster.joining_s,
            note=self.display.note,
            stop=self._end_requested,
        )
        self._end_if_requested()
        where = self._place()
        self._present = list(self._nodes()) if fewest is None else sorted(self._members)
        # An elastic job begins with the hosts that are there; what keeps the others away is no reason against it.
        if fewest is not None:
            for finding in missing:
                self.display.note(f"the job begins without a host: {finding.line()}")
        self._missing = missing if fewest is None else []
        return where

    def plan(self, where: Where) -> Plan:
        """Return one plan for all hosts that take part."""
        return self._plan(self._survey(self._present), where)

    def check(self, plan: Plan) -> None:
        """Compare the hosts, and check data and options on the first of them, before anything is started.

        Raises:
            NotStarted: the job cannot succeed on them.
            UsageError: nor with these data and options.
        """
        channels = [self._members[node].channel if node in self._members else None for node in self._present]
        required = self._requirements(plan)
        began = time.monotonic()
        results = checks.preflight(channels, required, earlier=self._missing)
        took = f"preflight of {len(channels)} hosts in {time.monotonic() - began:.1f} s"
        bad = findings.bad(results)
        self._show(results)
        if bad:
            self.display.note(f"{took}: {len(bad)} of {len(results)} findings are in the way")
            raise NotStarted(bad)
        self.display.note(f"{took}: {len(results)} findings, none in the way")
        if self.brief.mode in CHECKED:
            self._check_on_first(plan)

    def settle(self, plan: Plan, note: Callable[[str], None]) -> Loaded:
        """Return the spec with the micro batch that fits on every host, see ``micro_batch.settle``."""
        from mtrain.jobs.plan import micro_batch

        if self.trials is not None:
            self.trials.also_on([int(member.hello["free_bytes"]) for member in self._members.values()])
        settled = micro_batch.settle(self.brief.loaded, plan, note=note, trials=self.trials)
        self.display.note(settled.notes[-1])
        return settled

    def create(self, where: Where) -> Where:
        """Return ``where``: each host makes the folder when it prepares, and holds it already if the job goes on in it."""
        return where

    def run(self, plan: Plan, where: Where) -> Result:
        """Run the plan to its end, with all its attempts."""
        del where
        self._end_if_requested()  # The checks may have taken minutes.
        return self._hosts().run(plan)

    # ------------------------------------------------------------------------------------------------------------- parts
    def _hosts(self) -> ConnectedHosts:
        """Return the hosts that are connected, as the supervisor sees them."""
        cluster = self.brief.spec.cluster
        common: dict[str, Any] = {
            "members": self._members,
            "gathering": self.gathering,
            "display": self.display,
            "requests": self._requests,
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
        return self._requirements(self._plan(survey, Where(self.brief.base / self.brief.name, None)))

    def _requirements(self, plan: Plan) -> list[dict[str, Any]]:
        return checks.requirements(self.brief.job, plan, cwd=self.brief.cwd, is_script=self.brief.mode == "script")

    def _address_of(self, member: Member) -> str:
        """Return the address by which ranks know a host: its name, unless their launcher takes none.

        Raises:
            UsageError: its address is not known.
        """
        if means.launcher_of(self.brief.job)[1].takes_names or placement.is_address(member.host):
            return member.host
        return address_that_others_use(member.host, member.hello, interface=self.brief.spec.cluster.interface)

    def _plan(self, survey: Survey, where: Where) -> Plan:
        machine = survey.machine(self._here, interface=self.brief.spec.cluster.interface)
        return make_plan(
            self.brief.loaded, run_dir=where.run, resume=where.checkpoint, machine=machine, mode=self.brief.mode
        )

    def _write_folder(self, plan: Plan) -> Mapping[str, str]:
        """Write all request files into the run folder here; return those that ranks read, for the other hosts."""
        files = write_folder(self.brief.loaded, plan)
        if self.brief.latest:
            runfolder.point_latest(plan.run_dir)
        return files

    def _replan(self, plan: Plan, checkpoint: Path | None, nodes: Sequence[int]) -> Plan:
        where = Where(plan.run_dir, checkpoint or self._start_from())
        return self._plan(self._survey(nodes), where)

    def _survey(
        self, nodes: Sequence[int], members: Mapping[int, Member] | None = None, *, like: Member | None = None
    ) -> Survey:
        """Collect the facts for a plan on hosts, the one of rank 0 first.

        A host that is missing is assumed to be ``like`` a certain one; None: like the first one that is there.
        """
        members = dict(self._members if members is None else members)
        first = next(node for node in nodes if node in members)
        port = self.brief.spec.cluster.master_port
        # The first host knows which port is free there, and looks again for each plan, since ranks of others may take it.
        if port == "auto":  # A port that the spec fixes is checked by the preflight.
            address = self.brief.spec.cluster.master_addr or members[first].host
            port = ask(members, first, "port", address=address)["port"]
        named = list(self.brief.hosts)
        assumed = members[first] if like is None else like
        hellos = [members.get(node, assumed).hello for node in self._nodes()]
        addresses = [members[node].host if node in members else named[node] for node in self._nodes()]
        present = () if list(nodes) == list(self._nodes()) else tuple(nodes)
        missing = frozenset(self._nodes()) - members.keys()
        return Survey(hellos=hellos, port=int(port), addresses=addresses, present=present, missing=missing)

    def _nodes(self) -> range:
        return range(len(self.brief.hosts))

    def _place(self) -> Where:
        """Return the run folder, a new one with a name that is free on all hosts, and the checkpoint to start from."""
        resumed = self.brief.resume
        base, name = str(self.brief.base), self.brief.name
        if resumed is not None:
            path = None if resumed == "auto" else resumed
            copy_to = self.brief.spec.checkpoint.copy_to
            is_remote = copy_to is not None or is_address(resumed)
            timeout_s = FETCH_S if is_remote else ASK_S
            # The host of rank 0 decides: it reads the checkpoint, and the others need none.
            first = min(self._members)
            place: dict[str, Any] = {"given": path, "base": base, "name": name, "copy_to": copy_to, "cwd": self._cwd()}
            answer = ask(self._members, first, "resume", timeout_s=timeout_s, own_node=first, **place)
            messages.show_warnings([(self._members[first].label, answer)], self.display.note)
            checkpoint = Path(answer["checkpoint"]) if answer["checkpoint"] else None
            return Where(Path(answer["run"]), checkpoint)
        answers = ask_all(
            [member.channel for member in self._members.values()], "names", timeout_s=ASK_S, base=base, name=name
        )
        # Hosts that share a disk see the same names; on disks of their own, the folder must have one name on all of them.
        names_there = {each for answer in answers for each in answer.get("names", ())}
        names_here = runfolder.names_like(self.brief.base, name)
        free = runfolder.free_name(name, {*names_there, *names_here})
        return Where(self.brief.base / free, self._start_from())

    def _start_from(self) -> Path | None:
        return None if self.brief.start_from is None else self.brief.start_from.absolute()

    def _show(self, results: Sequence[Finding]) -> None:
        if self.tell is not None:
            self.tell(results)
        elif findings.worst(results) != "ok":
            findings.show(results, every="all hosts", stream=self.stream)

    def _check_on_first(self, plan: Plan) -> None:
        """Run the checks of a job on one host (``preflight.job_checks``) on the first host, where rank 0 will run."""
        from mtrain.spec import config

        first = min(self._members)
        try:
            answer = ask(
                self._members,
                first,
                "check",
                timeout_s=CHECK_S,
                stop=self._end_requested,
                spec=config.resolved_json(self.brief.spec),
                size=plan.size,
                training=self.brief.mode == "train",
                resumed=str(plan.resume) if plan.resume else None,
                cwd=self._cwd(),
            )
        except MtrainError:
            self._end_if_requested()  # A request to end the job ends the waiting, too.
            raise
        messages.show_warnings([(self._members[first].label, answer)], self.display.note)
        for note in answer["notes"]:
            self.display.note(note)

    def _end_if_requested(self) -> None:
        if self._end_requested():
            raise EndRequested

    def _end_requested(self) -> bool:
        return end_requested(self._members, self._requests, self.display)

    def _cwd(self) -> str | None:
        return None if self.brief.cwd is None else str(self.brief.cwd)
