"""Read the trace of a training: the files of all its processes, joined update by update."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mtrain_trace import files, mixing
from mtrain_trace.files import CannotTell
from mtrain_trace.files import TraceError as TraceError
from mtrain_trace.recorder import ARRAYS, FORM, PROCESS, UPDATES

PARTS = ("gradients", "weights", "moments", "buffers")
"""Parts that the recorder measures; a training that mtrain records has ``AVERAGE`` besides."""
AVERAGE = "averaged weights"


@dataclass(frozen=True)
class ArrayRow:
    """An array, or all arrays of a kind: a digest of the bits, the length, and a sketch."""

    digest: int
    norm: float
    sketch: list[float]

    def plus(self, other: ArrayRow) -> ArrayRow:
        """Return the row of both parts of an array that is split."""
        total = [a + b for a, b in zip(self.sketch, other.sketch)]
        return ArrayRow((self.digest + other.digest) & mixing.MASK, (self.norm**2 + other.norm**2) ** 0.5, total)


@dataclass
class Update:
    """One update of one optimizer, over all ranks."""

    number: int
    samples: Counter[str] = field(default_factory=Counter)
    """Digests of the samples of the update on all ranks, in no order."""
    targets: Counter[str] = field(default_factory=Counter)
    rank_samples: list[list[str]] = field(default_factory=list)
    """Digests in the order of each rank."""
    rank_targets: list[list[str]] = field(default_factory=list)
    target_sums: list[int] = field(default_factory=list)
    """Sum of the digests of all targets of each rank."""
    targets_summed: bool = False
    """Whether some targets have more rows than there are samples: all targets of the update are one digest then, their sum."""
    target_count: int | None = None
    """Targets of all ranks; None where it was not recorded."""
    real_targets: bool = False
    """Whether some targets are floating point numbers, which the training itself may have computed."""
    summed: bool = False
    """Whether a loss was asked for the sum over its targets."""
    cleared: bool = False
    """Whether gradients were cleared after the last backward pass, before the step."""
    losses: list[float] = field(default_factory=list)
    """Sum over the micro batches of each rank."""
    pass_losses: list[float] = field(default_factory=list)
    """Loss of each pass of all ranks."""
    micro_batches: int = 0
    """Passes of the first rank."""
    clips: list[dict[str, float] | None] = field(default_factory=list)
    """How each rank has clipped the gradient; None: it has not; empty: not known."""
    rates: list[dict[str, Any]] = field(default_factory=list)
    """Options of the parameter groups of the first rank."""
    rank_rates: list[list[dict[str, Any]]] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    """Names of the arrays of each parameter group."""
    steps: int | None = None
    changed_outside: bool = False
    renewed: bool = False
    """Whether another optimizer object has made the update before."""
    skipped: bool = False
    """Whether a gradient scaler has made no step of this update."""
    modes: list[int] | None = None
    autocast: str | None = None
    rng: list[str | None] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)
    """Seed that each rank has last given to its random numbers; None where it was not recorded."""
    states: list[str | None] = field(default_factory=list)
    """State with which the recurrent layer that is first called begins the update, of each rank: a digest, or ``recorder.ZEROS``."""
    parts: dict[str, ArrayRow] = field(default_factory=dict)
    """All gradients, weights, moments and buffers."""
    ranks_agree: dict[str, bool] = field(default_factory=dict)
    """By part: whether all ranks have the same bits, where no array is split."""
    arrays: dict[str, dict[str, ArrayRow]] = field(default_factory=dict)
    """By part and name, at updates that were recorded in detail."""
    loss_parts: dict[str, float] = field(default_factory=dict)
    """Losses of which the whole consists, by name, where they were recorded."""
    told_norm: float | None = None
    """Length of the gradient before it was clipped, where the training itself has told it."""
    model_norms: dict[str, float] = field(default_factory=dict)
    """Of several models, the length of the gradient of each; NaN where the update has left one out."""
    trained: frozenset[str] | None = None
    """Of several models, those that the update has trained."""
    decided: list[str] = field(default_factory=list)
    """Digest of what the predictions for each sample have decided, such as the objects with which they are compared."""

    @property
    def loss(self) -> float:
        """Return the mean over ranks of the sum over micro batches: what a training with averaged gradients minimises."""
        return sum(self.losses) / len(self.losses) if self.losses else float("nan")

    @property
    def norm(self) -> float | None:
        """Return the length of the gradient that the optimizer used; None where it was not recorded."""
        return self.parts["gradients"].norm if "gradients" in self.parts else None

    @property
    def norm_before(self) -> float | None:
        """Return the length of the gradient before it was clipped; None where it was not recorded."""
        if self.told_norm is not None:
            return self.told_norm
        return self.norm if self.clip is None else self.clip["before"]

    @property
    def clip(self) -> dict[str, float] | None:
        """Return how the first rank has clipped the gradient: its length ``before`` and the ``limit``; None: not, or not known."""
        return self.clips[0] if self.clips else None


@dataclass(frozen=True)
class RequestedUpdates:
    """What the spec of a training asks of its updates; what was done otherwise can be named by its size."""

    clip: float
    """Largest length of the gradient; infinity where it is not clipped."""
    keep: list[float]
    """Share of itself that the average of the weights keeps, by update."""


@dataclass
class Trace:
    """A training: what its processes say of themselves, and the updates of one optimizer."""

    folder: Path
    processes: list[dict[str, Any]]
    updates: list[Update]
    start: dict[str, ArrayRow]
    """Weights before the first update, by name."""
    optimizer: int = 0
    remarks: list[str] = field(default_factory=list)
    before: dict[str, dict[str, ArrayRow]] = field(default_factory=dict)
    """Further parts of the state before the first update, by part and name."""
    start_agrees: bool = True
    """Whether all ranks began with the same weights, as far as it was recorded here."""
    asked: RequestedUpdates | None = None
    measured: dict[str, str] = field(default_factory=dict)
    """How parts were measured, where it was otherwise than by the recorder; only what was measured alike is compared."""
    models: list[str] = field(default_factory=list)
    """Of several models, that of each parameter group."""
    earlier: list[Update] = field(default_factory=list)
    """Updates before ``updates``, which are not compared because the other training goes on from the last of them."""

    @property
    def framework(self) -> str:
        """Return the framework of a training: ``torch``, ``paddle`` or ``tensorflow``; ``mtrain`` for its runs."""
        return str(self.processes[0].get("framework", "torch")) if self.processes else "torch"

    @property
    def ranks(self) -> int:
        """Return the number of ranks that the training had."""
        return max(int(process.get("ranks", 1)) for process in self.processes)

    @property
    def optimizer_facts(self) -> Mapping[str, Any]:
        """Return what is known of the optimizer: its rule, groups, shapes."""
        return dict(self.processes[0]["optimizers"][self.optimizer])

    @property
    def groups(self) -> dict[str, int]:
        """Return the number of the parameter group of each array."""
        return {name: number for number, group in enumerate(self.optimizer_facts["groups"]) for name in group}

    @property
    def first_drift(self) -> int | None:
        """Return the number of updates after which the ranks first held different weights; None: never."""
        if not self.start_agrees:
            return 0
        agree = [update.ranks_agree.get("weights", True) for update in self.updates]
        return agree.index(False) + 1 if False in agree else None

    def first(self, updates: int) -> Trace:
        """Return the training up to the given number of updates."""
        return self if updates >= len(self.updates) else replace(self, updates=self.updates[:updates])

    def rows(self, part: str, place: int) -> dict[str, ArrayRow]:
        """Return the arrays of a part after the update at an index, which is -1 for before the first; empty: not recorded."""
        if place >= 0:
            return self.updates[place].arrays.get(part, {})
        return self.start if part == "weights" else self.before.get(part, {})

    @property
    def samples_per_update(self) -> int:
        """Return the samples of the first update on all ranks."""
        known = self.processes[0].get("samples_per_update")
        if known is not None:
            return int(known)
        return sum(self.updates[0].samples.values()) if self.updates else 0


def read_all(folder: Path, *, optimizer: int | None = None) -> list[Trace]:
    """Read the traces of all optimizers in ``folder``, or that of the one with a number.

    Raises:
        TraceError: the folder holds none, or a broken one.
    """
    with refusing_what_is_broken(folder):
        processes = _processes(folder)
        count = max(len(process["optimizers"]) for process in processes)
        if not count:
            raise CannotTell(f"{folder}: holds no optimizer, so there is nothing to compare; record the training again")
    return [read(folder, optimizer=number) for number in (range(count) if optimizer is None else [optimizer])]


@contextmanager
def refusing_what_is_broken(folder: object) -> Iterator[None]:
    """Refuse what no recorder has written, wherever it shows."""
    try:
        yield
    except TraceError:
        raise
    except OSError as error:
        raise CannotTell(f"{folder}: cannot be read ({error})") from error
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError) as error:
        raise CannotTell(
            f"{folder}: is not what mtrain-trace writes ({type(error).__name__}: {str(error)[:200]}); record the training again"
        ) from error


def read(folder: Path, *, optimizer: int = 0) -> Trace:
    """Read the trace in ``folder``.

    Raises:
        TraceError: the folder holds none, or a broken one.
    """
    with refusing_what_is_broken(folder):
        return _read(folder, optimizer)


def _read(folder: Path, optimizer: int) -> Trace:
    processes = _processes(folder)
    first = processes[0]
    if optimizer >= len(first["optimizers"]):
        raise TraceError(
            f"{folder}: has {len(first['optimizers'])} optimizers; no number {optimizer} (they count from 0)"
        )
    sharded = bool(first["optimizers"][optimizer]["sharded"])
    start: dict[str, ArrayRow] = {}
    joined: dict[int, Update] = {}
    for process in processes:
        for record in files.read_lines(process["folder"] / UPDATES):
            if record["optimizer"] == optimizer:
                number = operator.index(record["update"])
                _add(joined.setdefault(number, Update(number)), record, sharded=sharded)
        for record in files.read_lines(process["folder"] / ARRAYS):
            if record["optimizer"] == optimizer:
                _add_arrays(joined, start, record, sharded=sharded)
    ranks = max((len(update.losses) for update in joined.values()), default=0)
    # An update that some ranks lack is the last of a training that was killed.
    updates = [joined[number] for number in sorted(joined) if len(joined[number].losses) == ranks]
    if not updates:
        raise CannotTell(f"{folder}: no update was recorded; the training ended before its first optimizer step")
    for update in updates:
        if update.targets_summed:
            update.targets = Counter([f"{sum(update.target_sums) & mixing.MASK:016x}"])
            # Pairs of sample and target cannot be told from a sum.
            update.rank_targets = [[] for _ in update.rank_targets]
        update.groups = update.groups or first["optimizers"][optimizer]["groups"]
    remarks = _remarks(folder, processes)
    if len(updates) < len(joined):
        remarks.append(
            f"{folder}: its ranks have made other numbers of updates; {len(joined) - len(updates)} of {len(joined)}, which some ranks have "
            "not made, are left out (did a rank end early, or has it fewer batches?)"
        )
    return Trace(folder, processes, updates, start, optimizer, remarks)


def _remarks(folder: Path, processes: list[dict[str, Any]]) -> list[str]:
    """Say what of a training is not in its trace."""
    remarks = []
    ranks = max(int(process.get("ranks", 1)) for process in processes)
    held = {int(process["rank"]) for process in processes}
    if missing := [rank for rank in range(min(ranks, len(held) + 8)) if rank not in held]:
        further = " and more" if ranks - len(held) > len(missing) else ""
        remarks.append(
            f"{folder}: ranks {missing}{further} of {ranks} left no trace; what is averaged over ranks is of the others"
        )
    for words in sorted({text for process in processes for kind in process["optimizers"] for text in kind["unseen"]}):
        remarks.append(f"{folder}: not seen: {words}")
    if any(process.get("compiled") for process in processes):
        remarks.append(
            f"{folder}: the model is compiled; kernels round otherwise, and parts of a forward pass are not seen"
        )
    return remarks


def _add_arrays(
    joined: dict[int, Update], start: dict[str, ArrayRow], record: Mapping[str, Any], *, sharded: bool
) -> None:
    """Add one rank's record of each array, of an update or (number 0) of the start."""
    if record["update"] == 0:
        _join(start, _rows(record["weights"]), sharded=sharded)
    elif record["update"] in joined:
        for part in PARTS:
            if part in record:
                arrays = joined[record["update"]].arrays.setdefault(part, {})
                _join(arrays, _rows(record[part]), sharded=sharded and part != "buffers")


def _processes(folder: Path) -> list[dict[str, Any]]:
    files.begin_training()
    if not folder.is_dir():
        raise TraceError(f"{folder}: no such folder; a trace is made by: mtrain-trace run --out {folder} -- COMMAND")
    found = []
    for path in sorted(folder.glob(f"rank-*/{PROCESS}")):
        facts = files.read_json(path)
        files.check_memory(path)
        if facts.get("form", FORM) != FORM:
            raise TraceError(
                f"{folder}: is a trace of form {facts['form']}, and this mtrain-trace reads form {FORM} alone, whose digests "
                "are made otherwise; record the training again, with the same mtrain-trace as the one it is compared with"
            )
        facts["folder"] = path.parent
        found.append(facts)
    if not found and (folder / "metrics.jsonl").is_file():
        raise TraceError(f"{folder}: is a run folder of mtrain; it is compared by: mtrain compare")
    if not found:
        raise TraceError(
            f"{folder}: holds no trace; no process of the command took a step of an optimizer of torch, "
            "Paddle or Keras (is it another framework, or did it end early?)"
        )
    ranks = Counter(int(process["rank"]) for process in found)
    if twice := [rank for rank, count in ranks.items() if count > 1]:
        raise TraceError(
            f"{folder}: rank {twice[0]} has {ranks[twice[0]]} traces, of several starts; record each into a folder of its own"
        )
    return found


def _rows(arrays: Mapping[str, Any]) -> dict[str, ArrayRow]:
    return {name: _row(row[0], math.sqrt(row[1]), row[2]) for name, row in arrays.items()}


def _row(digest: str, norm: float, sketch: list[float]) -> ArrayRow:
    if len(sketch) != mixing.LENGTH:
        raise ValueError(f"a sketch of {len(sketch)} numbers; expected {mixing.LENGTH}")
    sum(sketch)  # of anything but numbers there is none
    return ArrayRow(int(digest, 16), float(norm), sketch)


def _join(into: dict[str, ArrayRow], rows: Mapping[str, ArrayRow], *, sharded: bool) -> None:
    """Add a rank's rows: parts of split arrays add up, and of copies the first rank's counts."""
    for name, row in rows.items():
        if name not in into:
            into[name] = row
        elif sharded:
            into[name] = into[name].plus(row)


def _add(update: Update, record: Mapping[str, Any], *, sharded: bool) -> None:
    """Add one rank's record of an update."""
    first = not update.losses
    micro_batches = record["micro_batches"]
    samples = [digest for micro in micro_batches for digest in micro["samples"]]
    targets = [digest for micro in micro_batches for digest in micro["targets"]]
    update.samples.update(samples)
    update.targets.update(targets)
    update.rank_samples.append(samples)
    update.rank_targets.append(targets)
    sums = [micro["target_sum"] for micro in micro_batches if "target_sum" in micro]
    update.target_sums.append(sum(int(digest, 16) for digest in (*targets, *sums)) & mixing.MASK)
    update.targets_summed = update.targets_summed or bool(sums)
    if all("target_count" in micro for micro in micro_batches):
        update.target_count = (update.target_count or 0) + sum(micro["target_count"] for micro in micro_batches)
    update.real_targets = update.real_targets or any(micro.get("real_targets") for micro in micro_batches)
    update.summed = update.summed or any(micro.get("summed") for micro in micro_batches)
    update.cleared = update.cleared or any(micro.get("cleared") for micro in micro_batches[-1:])
    update.losses.append(sum(micro["loss"] for micro in micro_batches))
    update.pass_losses += [micro["loss"] for micro in micro_batches]
    update.clips.append(record["clip"])
    update.rank_rates.append([dict(options) for options in record["rates"]])
    update.rng.append(record["rng"])
    update.seeds.append(record.get("seed"))
    update.states.append(micro_batches[0].get("state") if micro_batches else None)
    update.changed_outside = update.changed_outside or record["weights_changed_outside"]
    update.skipped = update.skipped or bool(record.get("skipped"))
    for micro in micro_batches:
        update.autocast = update.autocast or micro["autocast"]
        update.modes = update.modes or micro["modes"]
    if first:
        update.micro_batches = len(micro_batches)
        update.rates, update.steps = record["rates"], record["steps"]
        update.groups, update.renewed = record.get("groups", []), bool(record.get("renewed"))
    for part in PARTS:
        if part not in record:
            continue
        row = _row(record[part]["digest"], record[part]["norm"], record[part]["sketch"])
        split = sharded and part != "buffers"
        if part not in update.parts:
            update.parts[part] = row
        elif split:
            update.parts[part] = update.parts[part].plus(row)
        else:
            update.ranks_agree[part] = update.ranks_agree.get(part, True) and row.digest == update.parts[part].digest
