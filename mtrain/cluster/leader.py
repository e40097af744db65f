"""The process that leads a job on several hosts: brings the agents together, makes one plan for all, starts, watches, starts again.

It is started once: on a host that reaches the others by ssh, or on the first of hosts that are each started by hand. Which of the
two is a ``Gathering``; all else is the same.
"""

import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from mtrain.cluster.attempt import Limits
from mtrain.cluster.channel import Message, ask_all
from mtrain.cluster.hosts import Gathering, Member
from mtrain.cluster.preflight import checks, findings
from mtrain.cluster.preflight.findings import Finding
from mtrain.cluster.restarts import ASK_S, Attempts, Result, ask, asked, interrupted
from mtrain.errors import MtrainError, UsageError
from mtrain.jobs.plan import Plan
from mtrain.report.console import Display
from mtrain.spec.model import Spec
from mtrain.system import processes

CHECK_S = 600.0
"""For looking at all of the data on the first host."""
CHECKED = ("train", "evaluate")
"""The modes in which ranks read data and build a model."""
LOOK = "look"
"""The mode of a job that ends behind its preflight."""
TRIAL = "allreduce"
"""The mode of a job whose run folder is of no use once it has gone well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What the hosts of a job are like, before there is a plan."""

    hellos: Sequence[Message]
    port: int
    """Free on the first of them."""


class NotStarted(UsageError):
    """Findings, shown here already, are in the way; ``whole`` names them for hosts that have not seen them."""

    def __init__(self, bad: Sequence[Finding]) -> None:
        head = f"the job was not started: {len(bad)} thing{'s' if len(bad) > 1 else ''} to mend"
        self.whole = "\n".join([head, *(f"  {finding.line()}" for finding in bad)])
        super().__init__(f"{head}, marked bad above")


class Brief(Protocol):
    """What is to be done, as the command line has it."""

    @property
    def spec(self) -> Spec: ...  # noqa: D102

    @property
    def hosts(self) -> Sequence[str]:
        """Addresses, the one of rank 0 first."""
        ...

    @property
    def mode(self) -> str:
        """What the ranks do: "train", "evaluate", "allreduce"; ``LOOK``: there are none, the hosts are looked at alone."""
        ...

    @property
    def base(self) -> Path:
        """Where run folders are, on every host; absolute."""
        ...

    @property
    def name(self) -> str:
        """Of a new run folder."""
        ...

    @property
    def cwd(self) -> Path | None:
        """Of the ranks on every host; None: the folder in which each was started by hand."""
        ...

    def resumed(self) -> str | None:
        """``--resume``: a path, or "auto"; None: a new run."""
        ...

    def checkpoint(self) -> Path | None:
        """A checkpoint to start a new run folder from."""
        ...

    def plan(self, survey: Survey, run_dir: Path, checkpoint: Path | None) -> Plan:
        """The plan of an attempt."""
        ...

    def folder(self, plan: Plan) -> Mapping[str, str]:
        """Make the run folder on this host, and return what is to be written into it on all of them: name -> text."""
        ...


@dataclass(kw_only=True)
class Leader:
    """Leads one job; lives in the main thread."""

    brief: Brief
    gathering: Gathering
    display: Display
    forwarded: Mapping[str, str]
    """Variables for all hosts, where the gathering forwards any."""
    stream: IO[str] = field(default_factory=lambda: sys.stderr)
    """Where the reason of a failure is printed."""
    notes: Sequence[str] = ()
    tell: Callable[[Sequence[Finding]], None] | None = None
    """Given everything that preflight finds; None: it is printed where something is to be mended."""
    _members: dict[int, Member] = field(default_factory=dict)

    def run(self) -> Result:
        """Lead the job to its end.

        Raises:
            UsageError: it cannot be started; nothing was.
            LaunchError: hosts that it was to be started on again did not come back.
        """
        code, text = 1, "error: the leader of the job failed; see its own messages"
        try:
            with processes.Requests() as requests, processes.adopting_orphans():
                result = self._lead(requests)
            code, text = result.code, result.text
        except MtrainError as error:
            code, text = error.exit_code, f"error: {error.whole if isinstance(error, NotStarted) else error}"
            raise
        finally:
            discard = code == 0 and self.brief.mode == TRIAL
            for member in self._members.values():
                member.channel.send({"do": "bye", "code": code, "text": text, "discard": discard})
            self.gathering.close()
            self.display.close()
        if discard and result.run_dir is not None:
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
            nodes, timeout_s=self.brief.spec.cluster.failure_timeout_s, stop=requests.any
        )
        if self._asked(requests):
            return interrupted(requests)
        if len(self._members) < len(nodes) and 0 not in self._members:
            self._show(missing)
            raise NotStarted(missing)
        run_dir, checkpoint = self._place()
        plan = self.brief.plan(self._survey(), run_dir, checkpoint)
        self._preflight(plan, missing)
        if self.brief.mode == LOOK:
            return Result(code=0, text="")
        if self.brief.mode in CHECKED:
            self._check(plan, requests)
        if self._asked(requests):
            return interrupted(requests)
        return Attempts(
            members=self._members,
            gathering=self.gathering,
            display=self.display,
            requests=requests,
            replan=self,
            forwarded=self.forwarded if self.gathering.forwards else {},
            limits=Limits.of(self.brief.spec.cluster.failure_timeout_s),
            back_s=self.brief.spec.cluster.failure_timeout_s,
            cwd=self._cwd(),
        ).run(plan)

    def folder(self, plan: Plan) -> Mapping[str, str]:
        """See ``Replan``."""
        return self.brief.folder(plan)

    def again(self, members: dict[int, Member], plan: Plan, checkpoint: Path | None) -> Plan:
        """See ``Replan``."""
        self._members = members
        return self.brief.plan(self._survey(), plan.run_dir, checkpoint or self.brief.checkpoint())

    def _survey(self) -> Survey:
        members = [self._members[node] for node in sorted(self._members)]
        port = self.brief.spec.cluster.master_port
        if port == "auto":  # one that is given is looked at in preflight, with everything else
            address = self.brief.spec.cluster.master_addr or members[0].host
            port = ask(self._members, 0, "port", address=address, port=0)["port"]
        hellos = [self._members[node].hello if node in self._members else members[0].hello for node in self._nodes()]
        return Survey(hellos=hellos, port=int(port))

    def _nodes(self) -> range:
        return range(len(self.brief.hosts))

    def _place(self) -> tuple[Path, Path | None]:
        """The run folder, and the checkpoint to start from."""
        resumed = self.brief.resumed()
        base, name = str(self.brief.base), self.brief.name
        if resumed is not None:
            given = None if resumed == "auto" else resumed
            found = ask(self._members, 0, "resume", given=given, base=base, name=name, cwd=self._cwd())
            return Path(found["run"]), Path(found["checkpoint"])
        answers = ask_all(self._channels(), "names", timeout_s=ASK_S, base=base, name=name)
        taken = {each for answer in answers for each in answer.get("names", ())}
        from mtrain.system import runfolder

        here = runfolder.names_like(self.brief.base, name)
        return self.brief.base / runfolder.free_name(name, {*taken, *here}), self.brief.checkpoint()

    def _preflight(self, plan: Plan, missing: Sequence[Finding]) -> None:
        """Refuse what cannot go well; nothing was started yet."""
        channels = [self._members[node].channel if node in self._members else None for node in self._nodes()]
        wanted = checks.wanted(self.brief.spec, plan, cwd=self.brief.cwd)
        began = time.monotonic()
        found = checks.preflight(channels, wanted, known=missing)
        took = f"preflight of {len(channels)} hosts in {time.monotonic() - began:.1f} s"
        bad = findings.bad(found)
        self._show(found)
        if bad:
            self.display.note(f"{took}: {len(bad)} of {len(found)} findings are in the way")
            raise NotStarted(bad)
        self.display.note(f"{took}: {len(found)} findings, none in the way")

    def _show(self, found: Sequence[Finding]) -> None:
        if self.tell is not None:
            self.tell(found)
        elif findings.worst(found) != "ok":
            findings.show(found, every="all hosts", stream=self.stream)

    def _check(self, plan: Plan, requests: processes.Requests) -> None:
        """The checks that any job gets, on the first host, where rank 0 will be; until somebody asks for the end."""
        from mtrain.spec import config

        try:
            answer = ask(
                self._members,
                0,
                "check",
                timeout_s=CHECK_S,
                stop=lambda: self._asked(requests),
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

    def _asked(self, requests: processes.Requests) -> bool:
        return asked(self._members, requests, self.display)

    def _cwd(self) -> str | None:
        return None if self.brief.cwd is None else str(self.brief.cwd)

    def _channels(self) -> list[Any]:
        return [member.channel for member in self._members.values()]
