"""Decide ``train.max_micro_batch: auto`` by trials on this host, once, before a job starts.

A trial is a job of one rank and two updates, on the framework and device of the job, whose memory its own record tells. The
number becomes a value of the run's spec. A resumed run has the one of its checkpoint.
"""

import copy
import dataclasses
import io
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.checkpoint.format import read_description
from mtrain.errors import LaunchError, SpecError
from mtrain.jobs.hosts.this_host import run_job
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.plan.solo import one_process
from mtrain.spec import bounds
from mtrain.spec.model import Spec
from mtrain.system import runfolder

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded

KEY = "train.max_micro_batch"
MIB = 1 << 20


# A trial measures the memory of one rank for a micro batch. Trials grow from 1, at least twofold, as long as a straight line
# through the last two measurements stays within the budget, so that none is expected to run out of memory.
SHARE = 0.8
"""Part of the free memory that ranks may use: the rest is for loaders, exchanged gradients and other processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The largest micro batch that fits."""

    micro_batch: int
    """0: not even 1 fits."""
    measured: Mapping[int, int] = field(default_factory=dict)
    """Bytes of each trial that was within the budget, by micro batch."""
    too_large: int | None = None
    """The next larger micro batch that divides a rank's share; None: there is none."""


def divisors(share: int) -> list[int]:
    """Return the micro batches into which a rank's ``share`` of the global batch can be divided, in rising order."""
    return [micro for micro in range(1, share + 1) if share % micro == 0]


def grown(share: int, measure: Callable[[int], int | None], *, budget: Callable[[], float]) -> Choice:
    """Measure growing micro batches and choose the largest one that fits.

    Args:
        share: Samples of one rank in an update.
        measure: Returns the bytes that a rank needs for a micro batch; None: its trial ended without a result. Where that
            is the first, the next one is tried too: statistics of a single sample may not exist.
        budget: Returns the bytes that one rank may use; the first trial may find a device.
    """
    measured: dict[int, int] = {}
    too_large = None
    for number, micro in enumerate(_trials(divisors(share))):
        # A trial that runs out of memory may take other processes of the host with it, so none is started that is expected to.
        expected = expectation(measured, micro)
        too_much = expected is not None and expected > budget()
        needed = None if too_much else measure(micro)
        if needed is None and number == 0:
            continue
        if needed is None or needed > budget():
            too_large = micro
            break
        measured[micro] = int(needed)
    return fitting(share, Choice(micro_batch=0, measured=measured, too_large=too_large), budget_bytes=budget())


def fitting(share: int, found: Choice, *, budget_bytes: float) -> Choice:
    """Choose again from what was measured, for a budget that is not larger than that of the trials."""
    measured = {micro: needed for micro, needed in found.measured.items() if needed <= budget_bytes}
    best, end = max(measured, default=0), found.too_large
    for micro in divisors(share):
        if micro <= best or micro in found.measured or (end is not None and micro >= end):
            continue
        expected = expectation(found.measured, micro)
        if expected is not None and expected <= budget_bytes and measured:
            best = micro
    above = [micro for micro in divisors(share) if micro > best]
    return Choice(micro_batch=best, measured=found.measured, too_large=min(above, default=None))


def _trials(candidates: Sequence[int]) -> list[int]:
    """Return the candidates to measure: each at least twice the one before, and the last."""
    chosen: list[int] = []
    for micro in candidates:
        if not chosen or micro >= 2 * chosen[-1] or micro == candidates[-1]:
            chosen.append(micro)
    return chosen


def expectation(measured: Mapping[int, int], micro: int) -> float | None:
    """Return the bytes for ``micro`` on the line through the two largest measurements; None: there are fewer."""
    if len(measured) < 2:
        return None
    low, high = sorted(measured)[-2:]
    # A slope below 0 is an error of measurement, with which any micro batch would seem to fit.
    slope = max(measured[high] - measured[low], 0) / (high - low)
    return measured[high] + slope * (micro - high)


def is_open(loaded: "Loaded") -> bool:
    """Return whether the spec leaves the largest micro batch to trials."""
    return loaded.spec.train.max_micro_batch == "auto"


def settle(loaded: "Loaded", plan: Plan, *, note: Callable[[str], None], trials: "Trials | None" = None) -> "Loaded":
    """Return the spec with a number in place of ``auto``, and a note that says how it was found.

    Args:
        loaded: The spec of a job that trains.
        plan: Its plan, which says the ranks of each host and the checkpoint.
        note: Receives a sentence before each trial.
        trials: Trials that were run before; None: they are run now.

    Raises:
        SpecError: Trials cannot decide it, or not even one sample fits.
    """
    if not is_open(loaded):
        return loaded
    check(loaded)
    if plan.resume is not None:
        saved = ((read_description(plan.resume).get("spec") or {}).get("train") or {}).get("max_micro_batch")
        saved = None if saved == "auto" else saved
        return change_values(loaded, {KEY: saved}, note=f"{KEY}: {saved or 'no limit'}, as the checkpoint's run has it")
    trials = trials or run_trials(loaded, plan, note=note)
    choice = trials.choice()
    if choice.micro_batch == 0:
        raise SpecError(
            f"{KEY}: auto, but no micro batch fits: {trials.reason or trials.budget_words()}; use fewer ranks on each host, "
            "smaller inputs, or train.recompute: true"
        )
    return change_values(
        loaded, {KEY: choice.micro_batch}, note=f"{KEY}: {words(choice, trials.share, trials.budget_words())}"
    )


def run_trials(loaded: "Loaded", plan: Plan, *, note: Callable[[str], None]) -> "Trials":
    """Run the trials of a job on this host."""
    ranks = max(host.slots for host in plan.hosts)
    trials = Trials(loaded, share=loaded.spec.train.batch_size // plan.size, ranks=ranks, note=note)
    trials.run()
    return trials


def check(loaded: "Loaded") -> None:
    """Refuse a spec whose micro batch trials cannot decide.

    Raises:
        SpecError: It is that of a script, or fixes the number of micro batches.
    """
    train = loaded.spec.train
    if loaded.script is not None:
        raise SpecError(f"{KEY}: auto given for a script, whose own loop decides the micro batch; give a number")
    if loaded.spec.cluster.min_nodes is not None or loaded.spec.cluster.shards is not None:
        raise SpecError(
            f"{KEY}: auto given with cluster.min_nodes or cluster.shards, under which the number of ranks of a host may change; "
            "give a number"
        )
    if loaded.spec.parallel.is_given:
        raise SpecError(f"{KEY}: auto given with parallel, but trials have one rank, which no mesh is; give a number")
    if train.accumulate != "auto":
        raise SpecError(
            f"{KEY}: auto given with train.accumulate: {train.accumulate}, which decides the micro batch itself; set "
            "train.accumulate: auto"
        )


def words(choice: Choice, share: int, budget: str) -> str:
    """Return what was found as a sentence without its beginning."""
    sizes = ", ".join(f"{micro}: {needed / MIB:,.0f} MiB" for micro, needed in choice.measured.items())
    limit = "all of them" if choice.too_large is None else f"{choice.too_large} would be too many"
    return (
        f"{choice.micro_batch} of the {share} samples of a rank in an update fit at once ({limit}; measured {sizes}; {budget}), "
        f"so accumulate is {share // choice.micro_batch}; the run's spec has the number from now on"
    )


class Trials:
    """Jobs of one rank with growing micro batches."""

    def __init__(self, loaded: "Loaded", *, share: int, ranks: int, note: Callable[[str], None]) -> None:
        """``share``: samples of a rank in an update; ``ranks``: the most ranks of a host."""
        self._loaded = loaded
        self.share = share
        self._ranks = ranks
        self._free_bytes: Sequence[int] = [bounds.available_bytes()]
        self._note = note
        self._device_bytes: int | None = None
        self._found = Choice(micro_batch=0)
        self.reason = ""
        """Why the last trial that failed did; empty: none has."""

    def also_on(self, free_bytes: Sequence[int]) -> None:
        """Take the free memory of further hosts into account."""
        self._free_bytes = [self._free_bytes[0], *free_bytes]

    @property
    def budget_bytes(self) -> float:
        """Return the bytes that one rank may use."""
        return SHARE * (min(self._free_bytes) / self._ranks if self._device_bytes is None else self._device_bytes)

    def budget_words(self) -> str:
        """Return where the limit comes from."""
        if self._device_bytes is not None:
            return f"limit {self.budget_bytes / MIB:,.0f} MiB, {SHARE:.0%} of the free memory of the device"
        hosts = len(self._free_bytes)
        where = "here" if hosts == 1 else f"on the fullest of {hosts} hosts"
        return (
            f"limit {self.budget_bytes / MIB:,.0f} MiB, {SHARE:.0%} of the {min(self._free_bytes) / MIB:,.0f} MiB that are free "
            f"{where}, for {self._ranks} rank{'s' if self._ranks > 1 else ''}"
        )

    def run(self) -> None:
        """Run the trials."""
        with tempfile.TemporaryDirectory(prefix="mtrain-micro-batch-") as folder:
            self._found = grown(
                self.share, lambda micro: self.measure(micro, Path(folder)), budget=lambda: self.budget_bytes
            )

    def choice(self) -> Choice:
        """Return the largest micro batch that fits on every host."""
        return fitting(self.share, self._found, budget_bytes=self.budget_bytes)

    def measure(self, micro: int, folder: Path) -> int | None:
        """Return the bytes that a rank needs for a micro batch; None: the trial has failed."""
        self._note(f"{KEY}: tries a micro batch of {micro}")
        run_dir = folder / f"micro-{micro}"
        runfolder.make(run_dir)
        trial = change_values(self._loaded, self._values(micro, folder))
        try:
            result = run_job(trial, run_dir, quiet=True, stream=io.StringIO())
        except LaunchError as error:
            self.reason = str(error)
            return None
        if result.code != 0:
            self.reason = f"its trial ended: {result.reason}"
            return None
        measured = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["measured"][0]
        if "device_free_bytes" in measured:
            self._device_bytes = int(measured["device_free_bytes"])
        return int(measured["memory_bytes"])

    def _values(self, micro: int, folder: Path) -> Mapping[str, Any]:
        """Return the values of a trial's spec, by dotted path."""
        device = str(self._loaded.spec.backend.options.get("device", "auto"))
        one = one_process(self._loaded.job.backend.framework, device=device)
        kept = {"train.distil", "model.weights", "model.weights_key"}
        return {path: value for path, value in one.items() if path not in kept} | {
            "train.batch_size": micro,
            KEY: None,
            "train.epochs": None,
            "train.updates": 2,
            "evaluate.enabled": False,
            "report.name": None,
            "report.dir": str(folder),
            "report.tensorboard": False,
            "report.reporters": {},
            "report.plots": False,
            "report.metrics_port": None,
        }


def change_values(loaded: "Loaded", values: Mapping[str, Any], *, note: str = "") -> "Loaded":
    """Return the spec with other values, by dotted path, and one note more."""
    plain = copy.deepcopy(dict(loaded.values))
    for path, value in values.items():
        section, key = path.split(".")
        plain[section][key] = value
    spec: Spec = type(loaded.spec).model_validate(plain)
    notes = (*loaded.notes, note) if note else loaded.notes
    return dataclasses.replace(loaded, spec=spec, values=plain, notes=notes)
