"""Test a model, a data set, a task or a launcher: probe it in a process of its own, then run short jobs with it."""

import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtrain.core.checkpoint import store
from mtrain.core.interfaces import Model
from mtrain.core.overriding import override
from mtrain.errors import SpecError, UsageError
from mtrain.spec import config
from mtrain.spec.config import Given, Loaded
from mtrain.spec.registry import Registry
from mtrain.system.runfolder import RunFolder
from mtrain_kit import kit, training
from mtrain_kit import plugin_checks as checks
from mtrain_kit.checks import Check, Finding, Measure, Results, choose_checks, none_of, worst_of_ranks
from mtrain_kit.jobs import JobEnd, PluginTestRequest, run_whole
from mtrain_kit.plugin_partners import PER_RANK, backends_of, frameworks, partners
from mtrain_kit.plugin_probe import MARK

KINDS = tuple(checks.CHECKS)
UPDATES = 4
FIRST_SAVE = 2
BOUND = 1e-6
"""Largest relative difference of weights between two frameworks after the job, in float64."""
BOUND_32 = 1e-2
"""The same in any other precision, which a caller asks for with ``-o train.precision=fp32``."""
FIRST_MOMENTS = ("moments/momentum/", "moments/mean/")
"""How the names of arrays begin that sum up gradients, of SGD and of Adam."""
NO_ROOT = "data.root: not given"
"""How the message begins with which a data set asks for its files (``data.reading.need_root``)."""
SHORT: Mapping[str, Any] = {
    "train.updates": UPDATES,
    "train.epochs": None,
    "train.batch_size": 8,
    "train.precision": "fp64",
    "evaluate.every_epochs": None,
    "checkpoint.every_epochs": None,
    "checkpoint.every_updates": FIRST_SAVE,
    "checkpoint.keep_last": UPDATES,
    "data.workers": 0,
    "cluster.threads": 1,
    # A plugin that fails must fail at once, and be told so.
    "cluster.max_restarts": 0,
    "cluster.nproc_per_node": 1,
    "report.tensorboard": False,
    "report.plots": False,
    "report.display": "quiet",
}
STARTS = ("plugin.enters", "collective.place", "plugin.leaves")
"""Checks of the kit for backends that show whether ranks were started rightly."""


@dataclass(kw_only=True)
class PluginConformance(Results):
    """The results of all checks of one plugin that is no backend."""

    kind: str
    name: str

    @property
    @override
    def has_passed(self) -> bool:
        """Return whether no check failed; one that cannot be made here, for want of a framework, is no failure."""
        return all(finding.verdict != "failed" for finding in self.findings)


def run(kind: str, request: PluginTestRequest, folder: Path) -> PluginConformance:
    """Test the plugin ``request.name`` of ``kind``; run folders go into ``folder``.

    Raises:
        UsageError: the plugin is unknown, or the spec around it is not complete.
    """
    chosen = choose_checks(request.only, checks.CHECKS[kind])
    tested = _Tested(kind, request, folder)
    began = time.monotonic()
    findings = {check: _without_files(tested.finding(check)) for check in chosen}
    return PluginConformance(
        kind=kind,
        name=request.name,
        provider=tested.provider,
        folder=folder,
        seconds=time.monotonic() - began,
        findings=[findings[check] for check in chosen],
    )


def _without_files(finding: Finding) -> Finding:
    """Refuse to test with a data set whose files nobody has named: every further check would fail alike."""
    if NO_ROOT in finding.error:
        raise UsageError(finding.error[finding.error.index(NO_ROOT) :].splitlines()[0])
    return finding


class _Tested:
    """One plugin, with the jobs that were run with it so far."""

    def __init__(self, kind: str, request: PluginTestRequest, folder: Path) -> None:
        self._kind, self._name, self._request, self._folder = kind, request.name, request, folder.absolute()
        self._built_on, self._suited = frameworks(), dict[str, Any]()
        self._loaded = self._load({})
        self._suit_model()
        entry = self._loaded.registry.find(kind, self._name)
        self.provider = str(entry.provider)
        self._probed: dict[str, Any] = {}
        self._ended: dict[str, JobEnd] = {}

    def finding(self, check: Check) -> Finding:
        """Make one check."""
        self._request.tell(f"{check.id}: {check.claim}")
        jobs: Mapping[Check, Callable[[Check], Finding]] = {
            checks.TRAINS: self._trains,
            checks.AGAIN: lambda check: self._same(check, "again", hash_seed="2"),
            checks.WORKERS: lambda check: self._same(check, "workers", {"data.workers": 2}),
            checks.RANKS: self._ranks,
            checks.RESUMES: self._resumes,
            checks.FRAMEWORKS: self._frameworks,
            checks.INITIAL: self._initial,
            checks.STARTS: lambda check: self._through_backend(check, STARTS),
            checks.ENDS: lambda check: self._through_backend(check, ("job.ends",)),
        }
        try:
            return jobs.get(check, self._probe)(check)
        except _JobFailed as error:
            return Finding(check=check, error=str(error))

    # -------------------------------------------------------------------------------------------------------- specs
    def _load(self, more: Mapping[str, Any]) -> Loaded:
        """Return the spec of the jobs.

        Raises:
            SpecError: it is not valid.
            PluginError: a plugin is unknown, or the other half of the job is not named.
        """
        overridden = {text.partition("=")[0].strip() for text in self._request.overrides}
        registry = self._registry()
        values = {
            **SHORT,
            **self._suited,
            **partners(self._kind, self._name, registry=registry, overridden=overridden),
            **self._backend(registry),
            **more,
        }
        flags = {path: Given(value, f"{path} {value}") for path, value in values.items() if path not in overridden}
        return config.load({}, overrides=self._request.overrides, flags=flags)

    def _suit_model(self) -> None:
        """Choose a framework on which the model can be built, and float32 where its losses have no float64."""
        job = self._loaded.job
        if not job.model_class.float64:
            self._suited = {"train.precision": "fp32"}
        # Models that run on every framework are not constructed here, in the kit's own process.
        if job.model_class.check_framework is not Model.check_framework:
            self._built_on = [name for name in self._built_on if _runs_on(job.model, name)] or self._built_on
        self._loaded = self._load({})

    def _registry(self) -> Registry:
        named = [text.partition("=")[2] for text in self._request.overrides if text.startswith("plugins=")]
        return Registry.read(named[-1] if named else None)

    def _backend(self, registry: Registry) -> dict[str, Any]:
        if self._kind != "launchers":
            return {"backend.name": "solo", "backend.options": {"framework": self._built_on[0], "device": "cpu"}}
        return {"backend.name": backends_of(self._name, registry=registry)[0], "backend.options": {"device": "cpu"}}

    # -------------------------------------------------------------------------------------------------------- probes
    def _probe(self, check: Check, weights: str = "") -> Finding:
        """Return what a process of its own finds about the plugin."""
        if check.id not in self._probed:
            place = self._folder / f"probe-{len(self._probed)}"
            for name in ("tmp", "here"):
                (place / name).mkdir(parents=True, exist_ok=True)
            spec = place / "spec.json"
            config.dump(self._loaded.spec, spec)
            line = [
                self._request.python,
                "-m",
                "mtrain_kit.plugin_probe",
                self._kind,
                self._name,
                str(spec),
                weights,
            ]
            environ = {**self._request.environ, "TMPDIR": str(place / "tmp")}
            try:
                ended = subprocess.run(  # noqa: S603 - this interpreter, and words of its own
                    line,
                    cwd=place / "here",
                    env=environ,
                    capture_output=True,
                    text=True,
                    timeout=self._request.limit_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return Finding(check=check, error=f"it was not done after {self._request.limit_s:g} s")
            told = [text for text in ended.stdout.splitlines() if text.startswith(MARK)]
            if not told:
                last = (ended.stderr.strip() or ended.stdout.strip() or "it ended early").splitlines()[-1]
                return Finding(check=check, error=f"the process ended with status {ended.returncode}: {last}")
            self._probed |= json.loads(told[-1].removeprefix(MARK))
        found = self._probed[check.id]
        measures = [Measure(**values) for values in found.get("measures", [])]
        return Finding(check=check, measures=measures, error=found.get("error", ""))

    def _initial(self, check: Check) -> Finding:
        if self._loaded.job.model_class.native:
            return Finding(check=check, reason="the model keeps start values of its own; job.repeats compares them")
        ended = self._job("first")
        newest = store.newest(RunFolder(ended.run_dir).checkpoints)
        if newest is None:
            return Finding(check=check, reason="job.trains failed")
        return self._probe(check, str(newest))

    # ---------------------------------------------------------------------------------------------------------- jobs
    def _job(
        self,
        name: str,
        more: Mapping[str, Any] | None = None,
        *,
        resume: Path | None = None,
        hash_seed: str = "1",
    ) -> JobEnd:
        """Run a job in the run folder ``name``, once. ``hash_seed`` decides the order of sets of texts."""
        if name not in self._ended:
            loaded = self._load(more or {})
            # Plugins that iterate over sets of texts differ from one start to the next.
            request = replace(self._request, environ={**self._request.environ, "PYTHONHASHSEED": hash_seed})
            run_dir = (self._folder / name).absolute()
            if resume is None:
                shutil.rmtree(run_dir, ignore_errors=True)
            self._ended[name] = run_whole(loaded, run_dir, request, resume=resume)
        return self._ended[name]

    def _learnt(self, ended: JobEnd) -> dict[str, Any]:
        newest = store.newest(RunFolder(ended.run_dir).checkpoints)
        if ended.code or newest is None:
            raise _JobFailed(kit.error_of(ended))
        saved = store.load(newest)
        return training.flat(saved.state) | {"update": saved.progress.update}

    def _trains(self, check: Check) -> Finding:
        learnt = self._learnt(self._job("first"))
        infinite = [name for name, array in learnt.items() if name != "update" and not _is_finite(array)]
        wanted = self._loaded.spec.evaluate.enabled
        unscored = ["the evaluation at the end"] if wanted and not self._metrics("first") else []
        untouched = [
            name.rpartition("/")[2] for name, x in learnt.items() if name.startswith(FIRST_MOMENTS) and not x.any()
        ]
        return Finding(
            check=check,
            measures=[
                none_of("weights that are not finite", infinite),
                none_of("evaluations without metrics", unscored),
                none_of("weights that got no gradient in any update", untouched),
                Measure(what="updates that were not made", value=float(UPDATES - learnt["update"]), bound=0.0),
            ],
        )

    def _metrics(self, name: str) -> dict[str, float]:
        """Return the metrics of the last evaluation of a job."""
        summary = json.loads(RunFolder(self._ended[name].run_dir).summary.read_text(encoding="utf-8"))
        return {key: value for key, value in (summary["last"] or {}).items() if isinstance(value, float)}

    def _same(self, check: Check, name: str, more: Mapping[str, Any] | None = None, *, hash_seed: str = "1") -> Finding:
        first, other = self._learnt(self._job("first")), self._learnt(self._job(name, more, hash_seed=hash_seed))
        return Finding(check=check, measures=[none_of("arrays that differ", _differences(first, other))])

    def _ranks(self, check: Check) -> Finding:
        """Compare with a job of two ranks; what BatchNorm normalises by is shared, as on one rank."""
        task = self._loaded.registry.task_of("models", self._loaded.spec.model.name)
        if task in PER_RANK:
            return Finding(check=check, reason=f"losses of {task} may be means over the boxes of each rank")
        backend = {"torch": "ddp", "paddle": "fleet"}[self._built_on[0]]
        more = {"backend.name": backend, "backend.options": {"device": "cpu"}, "cluster.nproc_per_node": 2}
        expected = self._learnt(self._job("first"))
        learnt = self._learnt(self._job("ranks", {**more, "train.sync_batchnorm": True}))
        one, two = self._metrics("first"), self._metrics("ranks")
        differing = [
            f"{name}: {one.get(name)} and {two.get(name)}"
            for name in {*one, *two}
            if not _near(one, two, name, self._bound)
        ]
        return Finding(
            check=check,
            measures=[
                self._apart(expected, learnt, "one rank and two"),
                none_of("metrics that differ between one rank and two", sorted(differing)),
            ],
        )

    @property
    def _bound(self) -> float:
        return BOUND if self._loaded.spec.train.precision == "fp64" else BOUND_32

    def _apart(self, expected: Mapping[str, Any], learnt: Mapping[str, Any], between: str) -> Measure:
        differences = training.differences(_arrays(expected), _arrays(learnt))
        worst = max(differences, key=lambda name: differences[name])
        what = f"weights, averages, moments: largest relative difference between {between}"
        return Measure(what=what, value=differences[worst], bound=self._bound, detail=worst)

    def _resumes(self, check: Check) -> Finding:
        first = self._job("first")
        half_way = f"step-{FIRST_SAVE:08d}"
        source = RunFolder(first.run_dir).checkpoints / half_way
        if first.code or not source.is_dir():
            return Finding(check=check, reason="job.trains failed")
        run_dir = (self._folder / "resumed").absolute()
        shutil.rmtree(run_dir, ignore_errors=True)
        RunFolder(run_dir).make()
        target = RunFolder(run_dir).checkpoints / half_way
        shutil.copytree(source, target)
        expected, learnt = self._learnt(first), self._learnt(self._job("resumed", resume=target))
        return Finding(check=check, measures=[none_of("arrays that differ", _differences(expected, learnt))])

    def _frameworks(self, check: Check) -> Finding:
        first, *others = self._built_on
        if not others:
            return Finding(
                check=check, reason=f"of the frameworks that are installed here, the model runs on {first} alone"
            )
        expected = self._learnt(self._job("first"))
        more = {"backend.options": {"framework": others[0], "device": "cpu"}}
        learnt = self._learnt(self._job(others[0], more))
        return Finding(check=check, measures=[self._apart(expected, learnt, f"{first} and {others[0]}")])

    # ---------------------------------------------------------------------------------------------- ranks of launchers
    def _through_backend(self, check: Check, only: Sequence[str]) -> Finding:
        """Run checks of the kit for backends with ranks that this launcher starts, for each rendezvous it provides."""
        chosen = [text for text in self._request.overrides if text.startswith(("launcher.", "plugins="))]
        measures: list[Measure] = []
        for backend in backends_of(self._name, registry=self._loaded.registry):
            request = replace(
                self._request,
                name=backend,
                overrides=(*chosen, f"launcher.name={self._name}"),
                only=only,
                tell=lambda text: None,  # it has ids of its own, which the caller has not asked for
            )
            findings = kit.run(request, self._folder / f"{check.id}-{backend}").findings
            failed = [finding for finding in findings if finding.verdict != "passed"]
            if failed and (failed[0].error or failed[0].reason):
                told = failed[0].error or failed[0].reason
                return Finding(check=check, error=f"{backend}: {failed[0].check.id}: {told}")
            found = worst_of_ranks([measure for finding in findings for measure in finding.measures])
            measures += [replace(measure, what=f"{backend}: {measure.what}") for measure in found]
        return Finding(check=check, measures=measures)


def _runs_on(model: Model, framework: str) -> bool:
    try:
        model.check_framework(framework)
    except SpecError:
        return False
    return True


class _JobFailed(Exception):
    """A job has ended without what it should have learnt."""


def _arrays(learnt: Mapping[str, Any]) -> dict[str, Any]:
    return {name: array for name, array in learnt.items() if name != "update"}


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return training.differing_names(_arrays(one), _arrays(other))


def _near(one: Mapping[str, float], two: Mapping[str, float], name: str, bound: float) -> bool:
    """Return whether a metric is the same in both, but for the order of additions."""
    return name in one and name in two and math.isclose(one[name], two[name], rel_tol=bound, abs_tol=bound)


def _is_finite(array: Any) -> bool:
    import numpy as np

    return bool(np.isfinite(array).all())
