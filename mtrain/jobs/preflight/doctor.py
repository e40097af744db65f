"""Check this host, the hosts of a job and every installed backend, before a job is started.

``mtrain doctor`` prints the findings, and ``mtrain.doctor()`` returns them.
"""

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mtrain.core.interfaces import NEUTRAL_FRAMEWORKS
from mtrain.errors import MtrainError, UsageError
from mtrain.jobs import job, place
from mtrain.jobs.brief import PREFLIGHT_ONLY, TRIAL, Brief
from mtrain.jobs.hosts import allocated_hosts
from mtrain.jobs.plan.host_ranks import TYPED
from mtrain.jobs.plan.machine import here
from mtrain.jobs.plan.means import host_names, is_several
from mtrain.jobs.plan.plan import make_plan
from mtrain.jobs.preflight import job_checks
from mtrain.jobs.preflight.findings import Finding, State, worst
from mtrain.jobs.preflight.libraries import extras, libraries, own_packages, this_host
from mtrain.spec import config
from mtrain.spec.hostnames import few
from mtrain.system import environment

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, Source
    from mtrain.spec.plugins import PluginEntry

RANKS = 2
"""Ranks of an all-reduce on this host, unless it has fewer GPUs or another number is requested."""
PLAIN = "digits"
"""The spec for the all-reduce of each backend other than the one that the given spec selects."""
FOLDER = Path("~/.cache/mtrain/doctor")
"""Where all-reduces run, on every host; the folders of failed ones are kept."""
INTERRUPTED = 128
"""Exit codes above this one mean that a signal ended the job."""
RANKS_KEY = "cluster.nproc_per_node"
HERE = "here"
"""Stands for the hosts of a finding about this host."""
Report = Callable[[Sequence[Finding], str], None]
"""Receives findings as soon as they are known, and a word for the hosts where a finding names none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorRequest:
    """A request to check this host, the hosts of a job and the installed backends."""

    config: "Source" = None
    """The spec; None: the default one, of which only the hosts, the ranks and the backend matter."""
    backend: str | None = None
    """The only backend to check; None: all."""
    overrides: Sequence[str] = ()
    """``PATH=VALUE`` settings of the spec."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Further values of the spec by dotted path."""
    quick: bool = False
    """Leave out the all-reduce of each backend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkup:
    """The result of all checks."""

    code: int
    """Exit code: 0, nothing is in the way of a job; 1, something is; above 128, a signal ended the checks."""
    findings: Sequence[Finding]

    @property
    def state(self) -> State:
        """Return the worst state among the findings."""
        return worst(self.findings)

    @property
    def was_ended(self) -> bool:
        """Return whether a signal ended the checks."""
        return self.code > INTERRUPTED


def examine(request: DoctorRequest, *, report: Report = lambda findings, hosts: None) -> Checkup:
    """Run all checks; on several hosts that are started by hand, together with the other hosts.

    Raises:
        UsageError: the spec is wrong, or the hosts cannot be reached at all.
    """
    return _Examination(request, report).run()


class _Examination:
    """One run of the checks."""

    def __init__(self, request: DoctorRequest, report: Report) -> None:
        self._request = request
        self._report_now = report
        self._loaded = self._load(request.config, request.overrides, request.flags)
        self._hosts = host_names(self._loaded.job) if is_several(self._loaded.spec) else []
        self._findings: list[Finding] = []

    def run(self) -> Checkup:
        self._check_this_host()
        code = self._check_hosts() if self._hosts else 0
        # Where hosts do not reach one another, each all-reduce would only wait for its time to pass.
        if code == 0 and not self._request.quick:
            for entry in self._entries():
                code = self._run_all_reduce(entry)
                if code > INTERRUPTED:
                    break
        if code <= INTERRUPTED:
            code = 1 if worst(self._findings) == "bad" or code else 0
        return Checkup(code=code, findings=self._findings)

    def _load(self, file: "Source", overrides: Sequence[str], flags: Mapping[str, Any]) -> "Loaded":
        backend = self._request.backend
        typed = {} if backend is None else {"backend.name": config.Given(backend, f"--backend {backend}")}
        return allocated_hosts.complete(config.load(file, overrides=overrides, flags={**typed, **flags}))

    def _report(self, findings: Sequence[Finding]) -> None:
        self._findings += findings
        self._report_now(findings, HERE)

    def _report_on_hosts(self, findings: Sequence[Finding]) -> None:
        self._findings += findings
        self._report_now(findings, f"all {len(self._hosts)} hosts")

    # ------------------------------------------------------------------------------------------------------- this host
    def _check_this_host(self) -> None:
        """Check this machine, its libraries, and whether it fits the spec."""
        spec, environ = self._loaded.spec, environment.caller()
        self._report(this_host(environ))
        python = spec.backend.python or sys.executable
        cleaned = environment.clean(environ)
        self._report(
            libraries(
                self._backends(),
                chosen=self._requested_backend(),
                python=python,
                environ=cleaned,
                of_scripts=self._frameworks_of_scripts(),
                framework=self._loaded.job.backend.framework,
            )
        )
        registry = self._loaded.registry
        self._report(own_packages())
        self._report(extras(registry))
        if self._request.config is None and Path(config.HERE).is_file():
            text = f"{self._loaded.source} says which hosts, ranks and backend; -c {config.HERE} looks at all of it"
            self._report([Finding(check="spec", state="ok", text=text)])
        elif self._request.config is not None and not self._hosts:
            self._report(self._spec())

    def _requested_backend(self) -> str | None:
        """Return the backend that the user has chosen, by its name or by a spec; None: no choice was made."""
        is_chosen = self._request.config is not None or self._request.backend is not None
        return self._loaded.spec.backend.name if is_chosen else None

    def _backends(self) -> list["PluginEntry"]:
        """Return all enabled backends, or the only one to check."""
        entries = self._loaded.registry.usable("backends")
        return [entry for entry in entries if self._request.backend in (None, entry.name)]

    def _frameworks_of_scripts(self) -> dict[str, "PluginEntry"]:
        """Return the frameworks on which backends run scripts alone, see ``core.interfaces.Backend.framework``."""
        found = {}
        for entry in self._backends():
            if entry.rivals:
                continue
            options = self._loaded.registry.load("backends", entry.name).Options
            field = options.model_fields.get("framework")
            choices = get_args(field.annotation) if field is not None else ()
            found.update({name: entry for name in choices if name not in NEUTRAL_FRAMEWORKS})
        return found

    def _spec(self) -> list[Finding]:
        """Return what keeps the spec from training here, in the words of ``mtrain train``."""
        try:
            plan = make_plan(self._loaded, run_dir=place.locate(self._loaded, resume=None).run)
            notes = job_checks.check(self._loaded.job, size=plan.size)
        except UsageError as error:
            return [Finding(check="spec", state="bad", text=line) for line in str(error).splitlines()]
        text = f"{self._loaded.source}: data, model and {plan.size} rank{'s' if plan.size > 1 else ''} fit together"
        fits = Finding(check="spec", state="ok", text=text)
        return [fits, *(Finding(check="data", state="warning", text=note) for note in notes)]

    # ------------------------------------------------------------------------------------------------------- all hosts
    def _check_hosts(self) -> int:
        """Run the preflight of all hosts.

        Returns the exit code, on a host that serves another one the code of that one.
        """
        loaded = self._loaded if self._request.config is not None else self._job(self._loaded.spec.backend.name)
        brief = self._brief(loaded, PREFLIGHT_ONLY, "preflight")
        try:
            # Notes, such as which host is waited for, are no findings.
            return job.run(brief, tell=self._report_on_hosts, stream=sys.stderr).code
        except UsageError:
            if worst(self._findings) != "bad":
                raise
            return 1

    def _brief(self, loaded: "Loaded", mode: str, name: str) -> Brief:
        return Brief(loaded=loaded, mode=mode, name=name, latest=False)

    # ------------------------------------------------------------------------------------------------------ all-reduces
    def _entries(self) -> Iterator["PluginEntry"]:
        """Yield the backends that can be started here."""
        own = self._loaded.spec.backend
        for entry in self._backends():
            is_here = entry.is_installed or (entry.name == own.name and own.python is not None)
            if is_here and not entry.rivals and (not self._hosts or self._rendezvous(entry.name) != "none"):
                yield entry

    def _rendezvous(self, backend: str) -> str:
        return str(self._loaded.registry.load("backends", backend).rendezvous)

    def _run_all_reduce(self, entry: "PluginEntry") -> int:
        """Run an all-reduce over the ranks of one backend, and report the result; return the exit code of the job."""
        report = self._report_on_hosts if self._hosts else self._report
        try:
            # Nothing of the job itself is shown. Its summary is empty on a host that serves another one.
            result = job.run(self._brief(self._job(entry.name), TRIAL, entry.name), stream=io.StringIO())
            code, reason = result.code, result.reason
        except MtrainError as error:
            result, code, reason = None, error.exit_code, str(error).splitlines()[-1]
        if code:
            text = f"{entry.name}: {reason or f'exit code {code}'}"
            report([Finding(check="all-reduce", state="bad", text=text, remedy=f"see {FOLDER}")])
        elif result is not None and result.summary:
            text = f"{entry.name}: {_in_words(result.summary)}"
            report([Finding(check="all-reduce", state="ok", text=text)])
        return code

    def _job(self, backend: str) -> "Loaded":
        """Return the spec of an all-reduce: the given one for the backend that it selects, else ``PLAIN``.

        The hosts are the same for every backend.
        """
        own = backend == self._loaded.spec.backend.name
        overrides = [text for text in self._request.overrides if own or text.startswith("cluster.")]
        file = self._request.config if own else PLAIN
        chosen = {"backend.name": config.Given(backend, f"--backend {backend}")}
        ranks = self._ranks(self._load(file, overrides, {**self._request.flags, **chosen}), backend)
        slots = self._loaded.spec.cluster.slots
        size = sum(slots) if slots else ranks * max(1, len(self._hosts))
        overrides += [f"{RANKS_KEY}={ranks}", f"train.batch_size={size}", "train.accumulate=1"]
        overrides += ["cluster.max_restarts=0", f"report.dir={FOLDER.expanduser()}", "report.display=quiet"]
        flags = {path: value for path, value in self._request.flags.items() if path != RANKS_KEY}
        return self._load(file, overrides, {**flags, **chosen})

    def _ranks(self, loaded: "Loaded", backend: str) -> int:
        """Return the number of ranks on each host.

        It is the requested number, else one on each of several hosts, else ``RANKS`` here, or fewer where there are
        fewer GPUs.
        """
        requested = loaded.spec.cluster.nproc_per_node
        if self._rendezvous(backend) == "none":
            return 1
        typed = loaded.origin(RANKS_KEY).kind in TYPED or self._request.config is not None
        if typed and requested != "auto":
            return requested
        return 1 if self._hosts else min(RANKS, here(loaded).devices or RANKS)


def _in_words(summary: Mapping[str, Any]) -> str:
    """Word the result of an all-reduce."""
    hosts, ranks = summary["hosts"], summary["ranks"]
    where = f"over {few(hosts)}" if len(hosts) > 1 else "on this host"
    return (
        f"{ranks} rank{'s' if ranks > 1 else ''} {where}, first sum {summary['seconds']:.1f} s after the start of rank 0, "
        f"4 MiB at {summary['mib_per_s']:.0f} MiB/s"
    )
