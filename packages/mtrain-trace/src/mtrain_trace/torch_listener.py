"""Turn what torch calls into records: forward and backward passes, clipping, and the steps of every optimizer.

No value is changed. Work is added on the device's own queue, and results are read one update later.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from mtrain_trace import mixing, naming, recorder, torch_arrays, torch_facts, torch_mixing
from mtrain_trace.recorder import ZEROS, Recorder
from mtrain_trace.torch_arrays import Arrays, Holding, Meter, Piece


@dataclass
class _Inputs:
    """What a model was given in one forward pass: the samples are the rows of the first tensor, or its columns.

    Other tensors with as many rows belong to the samples, but for those that turn out to be targets.
    """

    tensors: dict[int, Any]
    """By their place among the arguments; held until the pass has shown which are targets, and which axis is that of samples."""
    rows: dict[int, Any]
    """Digests of the rows of each."""
    count: int
    is_settled: bool = False

    @classmethod
    def of(cls, values: Any, *, axis: int = 0) -> _Inputs | None:
        """Measure the tensors among the arguments of a model; None where there is none."""
        found = [x for x in naming.tensors_in(values, torch.Tensor) if x.dim() > 0 and x.shape[0] > 0]
        if not found:
            return None
        inputs = cls(dict(enumerate(found)), {}, 0)
        inputs.measure(axis)
        return inputs

    def measure(self, axis: int) -> None:
        """Digest each sample, which lie along an axis."""
        first = self.tensors[0]
        self.count = first.shape[axis]
        self.rows = {
            place: torch_mixing.rows(tensor.detach().transpose(0, axis).contiguous() if axis else tensor, place + 1)
            for place, tensor in self.tensors.items()
            if tensor.dim() > axis and tensor.shape[axis] == self.count and tensor.device == first.device
        }

    def settle(self, count: int, *, is_time_first: bool) -> None:
        """Choose the axis of samples by a layer that is known to see ``count`` of them; where both fit, none is taken."""
        shape = tuple(self.tensors[0].shape[:2]) if self.tensors and not self.is_settled else (0,)
        self.is_settled = True
        if len(shape) > 1 and shape[1] == count != shape[0]:
            self.measure(1)
        elif len(shape) > 1 and shape[0] == shape[1] == count > 1 and is_time_first:
            self.rows = {}

    def leave_out(self, target: Any) -> None:
        """Take a tensor that is the target of a loss out of the samples; the first one may be both, as of an autoencoder."""
        for place, tensor in self.tensors.items():
            if place and tensor.data_ptr() == target.data_ptr() and tensor.numel() == target.numel():
                self.rows.pop(place, None)

    def read_later(self) -> None:
        """Begin to copy the digests to the host, and let go of the tensors."""
        self.tensors, self.rows = {}, {0: torch_mixing.Late(sum(self.rows.values()))} if self.rows else {}


@dataclass
class _Micro:
    """What one forward and backward pass has shown."""

    inputs: list[_Inputs] = field(default_factory=list)
    """What each forward pass of a whole model was given."""
    targets: list[Any] = field(default_factory=list)
    """Digests of the targets of losses that have a row for each sample."""
    target_sums: list[Any] = field(default_factory=list)
    """Sums of the digests of targets that have more: a label for each token, pixel or anchor."""
    target_count: int = 0
    """Targets seen, also those of which the sum alone is kept."""
    real_targets: bool = False
    """Whether some are floating point numbers, which the training itself may have computed."""
    losses: list[Any] = field(default_factory=list)
    summed: bool = False
    """Whether a loss was asked for the sum over its targets and not for their mean."""
    cleared: bool = False
    """Whether gradients were cleared after this pass, before a step has used them."""
    labelled: bool = False
    """Whether the model itself was given the labels, as models of Hugging Face are."""
    scale: Any = None
    modes: tuple[int, int] | None = None
    """(modules in evaluation mode, modules) of the model."""
    autocast: str | None = None
    state: tuple[Any, Any] | None = None
    """(digest, whether any number is not 0) of the state with which the first recurrent layer begins; both None: with none."""


@dataclass
class _Clip:
    """A clipping of the gradient: the norm before, which may still be on the device, and the limit."""

    before: Any
    limit: float
    passes: int | None = None
    """Backward passes of the update before it; None: an engine clips, after all of them."""

    def read(self) -> dict[str, Any]:
        before = self.before.read() if isinstance(self.before, torch_mixing.Late) else self.before
        return {"before": before, "limit": self.limit}


@dataclass
class _Open:
    """An update that has begun and is not yet written."""

    record: dict[str, Any]
    micro_batches: list[_Micro]
    clip: _Clip | None
    full: bool
    stepped: bool = False
    parts: dict[str, Arrays | None] = field(default_factory=dict)


@dataclass
class _TorchOptimizer:
    """One optimizer, with what it holds."""

    number: int
    holding: Holding
    meter: Meter = field(default_factory=Meter)
    updates: int = 0
    depth: int = 0
    """Calls of its step that are running: Horovod's step calls the one that it has wrapped."""
    last: int | None = None
    """Identity of the optimizer that made the update before: a new one may go on with the same parameters."""
    versions: int | None = None
    """Sum of the counters of writes to the parameters after the last step: a change before the next one is a stranger's."""
    open: _Open | None = None
    outstanding: Callable[[], None] | None = None


class TorchListener:
    """What is called while a process trains. One per process."""

    def __init__(self, out: Recorder) -> None:
        self._out = out
        self.depth = 0
        """Calls of modules that are running: at 0, the next one is that of a whole model."""
        self.roots: list[Any] = []
        self.engine_steps = False
        """Whether an engine around the optimizer begins and ends its updates."""
        self.is_paused = False
        """Whether steps are ignored."""
        self.divisor: float | None = 1.0
        """What the next loss is divided by, where an engine divides it behind the script's back; None: ignore losses."""
        self._micro = _Micro()
        self._micro_batches: list[_Micro] = []
        self._clip: _Clip | None = None
        self._watched: dict[int, _TorchOptimizer] = {}
        self._described: list[dict[str, Any]] = []
        self._kept: list[Any] = []
        self._cuts: dict[int, int] = {}
        out.before_close(self.flush)

    # What passes show ----------------------------------------------------------------------------------------------

    def enter_module(self, module: Any, arguments: Any, keywords: Any) -> None:
        """Note a forward pass; only that of a whole model, not of its parts, shows samples."""
        if torch_facts.is_recomputing():
            return  # gradient checkpointing
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        if not any(known is module for known in self.roots):
            self.roots.append(module)
        # A second forward pass of one backward pass has begun: the axis of the first one is decided.
        for earlier in self._micro.inputs[-1:]:
            earlier.read_later()
        modes = [part.training for part in module.modules()]
        self._micro.modes = (len(modes) - sum(modes), len(modes))
        self.see_autocast()
        labels, others = naming.split_labels(keywords)
        found = _Inputs.of((arguments, others))
        if found is not None:
            self._micro.inputs.append(found)
        for label in labels:
            self.see_target(label)
        self._micro.labelled = bool(labels)

    def see_state(self, state: Any) -> None:
        """Note the state that a recurrent layer is given; that of the first one in a pass is what was carried into it."""
        if self._micro.state is not None or torch_facts.is_recomputing():
            return
        parts = [part.detach() for part in naming.tensors_in(state, torch.Tensor) if part.dim() > 0 and part.numel()]
        if not parts:
            self._micro.state = (None, None)
            return
        digest = sum(torch_mixing.rows(part, place + 1).sum() for place, part in enumerate(parts))
        used = torch.stack([(part != 0).any() for part in parts]).any()
        self._micro.state = (torch_mixing.Late(digest), torch_mixing.Late(used))

    def see_batch(self, count: int, *, is_time_first: bool) -> None:
        """Note how many samples a layer sees whose axes are known."""
        if self._micro.inputs and not torch_facts.is_recomputing():
            self._micro.inputs[-1].settle(count, is_time_first=is_time_first)

    @property
    def wants_autocast(self) -> bool:
        """Whether no part of this pass has computed under autocast so far."""
        return self._micro.autocast is None

    def see_autocast(self) -> None:
        """Note the format of autocast, which may be switched on within the model: Accelerate wraps its ``forward``."""
        if not torch_facts.is_recomputing():
            self._micro.autocast = self._micro.autocast or torch_facts.autocast_format()

    def see_target(self, target: Any, *, summed: bool = False) -> None:
        """Note the targets of a loss; those that the model was given by name are the samples' own, and count alone."""
        if (
            not self._micro.labelled
            and not torch_facts.is_recomputing()
            and isinstance(target, torch.Tensor)
            and target.dim() > 0
            and not target.requires_grad
        ):
            rows = torch_mixing.rows(target, 1)
            self._micro.summed = self._micro.summed or summed
            for inputs in self._micro.inputs:
                inputs.leave_out(target)
            self._micro.target_count += len(rows)
            self._micro.real_targets = self._micro.real_targets or target.is_floating_point()
            if len(rows) > sum(inputs.count for inputs in self._micro.inputs):
                self._micro.target_sums.append(torch_mixing.Late(rows.sum()))
            else:
                self._micro.targets.append(torch_mixing.Late(rows))

    def see_backward(self, tensors: Any) -> None:
        """Note the loss of a backward pass, which ends a micro batch; passes within a pass are parts of it."""
        if torch_facts.is_recomputing():
            return
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        scalars = [loss for loss in losses if isinstance(loss, torch.Tensor) and loss.numel() == 1]
        # A backward pass from tensors that are no scalars, such as a stage's outputs, shows no loss.
        if not scalars or self.divisor is None:
            return
        # In float64 the division adds no rounding to that of the loss.
        wide = [loss.detach().reshape(()).to(torch.float64) / self.divisor for loss in scalars]
        self._micro.losses = [torch_mixing.Late(loss) for loss in wide]
        for inputs in self._micro.inputs[-1:]:
            inputs.read_later()
        self._micro_batches.append(self._micro)
        self._micro = _Micro()

    def see_scale(self, scale: Any) -> None:
        """Note the factor by which a gradient scaler multiplies the loss."""
        if isinstance(scale, torch.Tensor):
            self._micro.scale = torch_mixing.Late(scale.detach().reshape(()))

    def see_clip(self, norm: Any, limit: float) -> None:
        """Note the norm before clipping, and its limit."""
        if isinstance(norm, torch.Tensor):
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            norm = torch_mixing.Late(norm.detach().reshape(()).to(torch.float64))
        elif norm is None:
            return
        self._clip = _Clip(norm, float(limit), passes=len(self._micro_batches))

    def see_cleared(self) -> None:
        """Note that gradients are cleared, which those of a pass whose step is still to come should not be."""
        for micro in self._micro_batches[-1:]:
            micro.cleared = True

    # What steps show -----------------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any) -> None:
        """Record the gradients that an optimizer is about to use."""
        if self.is_paused or not (self.roots or self._micro_batches):
            return  # before the first pass: a step on zeros that makes the moments, as Horovod's broadcast takes one
        if self.engine_steps:
            watched = self._watched.get(id(optimizer))
        else:
            watched = self._watch(optimizer)
            watched.depth += 1
            # A step that raised has left its depth behind; the next one begins anew.
            if watched.depth == 1 or watched.open is None:
                watched.depth = 1
                self._renew(watched, optimizer)
                self.begin_update(optimizer)
            if hasattr(optimizer, "skip_synchronize") and watched.depth == 1:
                return  # Horovod exchanges gradients within its own step, before it calls the one of torch
        if watched is None or watched.open is None:
            return
        watched.open.stepped = True
        if not self.engine_steps:
            watched.open.parts.pop("gradients", None)  # a step that calls the one it has wrapped: the inner one's count
        if watched.open.full:
            self._measure(watched, "gradients", _gradients(optimizer, watched.holding))

    def after_step(self, optimizer: Any) -> None:
        """Record the weights and moments that a step has left."""
        watched = self._watched.get(id(optimizer))
        if watched is None or watched.open is None:
            return
        watched.depth -= 1
        if watched.depth > 0 and not self.engine_steps:
            return
        if watched.open.full:
            self._measure(watched, "weights", _weights(torch_arrays.parameters_of(optimizer), watched.holding))
            self._measure(watched, "moments", _moments(optimizer, watched.holding))
        if not self.engine_steps:
            self.end_update(optimizer)

    def note_skip(self, optimizer: Any, updates: int) -> None:
        """Note that a gradient scaler has called no step: its gradients were not finite."""
        if not self.engine_steps and self.updates_of(optimizer) == updates:
            self._renew(self._watch(optimizer), optimizer)
            self.begin_update(optimizer)
            self.end_update(optimizer)

    def updates_of(self, optimizer: Any) -> int:
        """Return how many updates of an optimizer have begun."""
        return self._watched[id(optimizer)].updates if id(optimizer) in self._watched else 0

    def begin_update(self, optimizer: Any) -> None:
        """Open the next update of an optimizer, and write the one before."""
        watched = self._watched[id(optimizer)]
        if watched.outstanding is not None:
            watched.outstanding()
            watched.outstanding = None
        self._out.end_after(watched.updates)
        watched.updates += 1
        update = watched.updates
        micro_batches, self._micro_batches = self._micro_batches, []
        clip, self._clip = self._clip, None
        # torch counts writes in place, so weights are compared without being read.
        versions = _versions(watched.holding)
        record = {
            "update": update,
            "optimizer": watched.number,
            "rates": [torch_facts.options_of(group) for group in optimizer.param_groups],
            "steps": torch_facts.steps_of(optimizer, watched.holding.parameters),
            "rng": _random_state() if self._out.is_detailed(update) else None,
            "seed": torch.initial_seed(),
            "weights_changed_outside": watched.versions is not None and versions != watched.versions,
            **self._changes_of(watched, optimizer),
        }
        watched.last = id(optimizer)
        watched.open = _Open(record, micro_batches, clip, full=self._out.is_full(update))
        if watched.open.full:
            self._measure(watched, "buffers", torch_arrays.buffers_of(self.roots, self._cuts))

    def end_update(self, optimizer: Any) -> None:
        """Close the open update and hold it back until the next one; an engine has told its clipping meanwhile."""
        watched = self._watched.get(id(optimizer))
        if watched is None or watched.open is None:
            return
        done, watched.open = watched.open, None
        watched.versions, watched.depth = _versions(watched.holding), 0
        if self._clip is not None:
            self._clip.passes = None
            done.clip, self._clip = self._clip, None
        done.record["skipped"] = not done.stepped
        # By the next update all copies have arrived: writing then waits for no device.
        watched.outstanding = lambda: self._write(done)

    def flush(self) -> None:
        """Write the records that are held back."""
        for watched in self._watched.values():
            if watched.outstanding is not None:
                watched.outstanding()
                watched.outstanding = None

    # How it is recorded --------------------------------------------------------------------------------------------

    def watch(self, optimizer: Any, holding: Holding) -> None:
        """Begin to watch an optimizer: its names and its weights before the first step are recorded."""
        watched = _TorchOptimizer(len(self._described), holding)
        self._watched[id(optimizer)] = watched
        self._kept.append(optimizer)  # an identity stays one object's while that lives
        if self._out.nudge:
            _nudge(holding.parameters)
        facts = {**recorder.facts_of_process(), **torch_facts.facts_of_torch(self.roots)}
        is_unclear = any(not given.rows for micro in self._micro_batches for given in micro.inputs)
        unseen = (
            ["samples: two axes of the model's input are as long as a batch (steps by samples?)"] if is_unclear else []
        )
        self._described.append(
            {
                "rule": type(optimizer).__name__,
                "groups": holding.groups,
                "shapes": holding.shapes,
                "dtypes": sorted({str(p.dtype).split(".")[-1] for p in holding.parameters}),
                "sharded": holding.sharded,
                "unseen": [*torch_facts.unseen(optimizer, self.roots), *unseen],
            }
        )
        self._out.describe({**facts, "optimizers": self._described})
        start = watched.meter.measure("weights", _weights(holding.parameters, holding), one_by_one=True)
        if start is not None:
            self._out.write(recorder.ARRAYS, {"update": 0, "optimizer": watched.number, "weights": start.read()})

    def is_watched(self, optimizer: Any) -> bool:
        """Return whether an optimizer is known."""
        return id(optimizer) in self._watched

    def _watch(self, optimizer: Any) -> _TorchOptimizer:
        if id(optimizer) not in self._watched:
            # A resume or a scheduler may make another optimizer object of the same parameters.
            held = {id(parameter) for parameter in torch_arrays.parameters_of(optimizer)}
            # One whose step is running is wrapped around this one, and stays another optimizer.
            if known := [one for one in self._watched.values() if one.open is None and held == set(one.holding.names)]:
                self._watched[id(optimizer)] = known[-1]
                self._kept.append(optimizer)
            else:
                self.watch(optimizer, torch_arrays.plain_holding(optimizer, self.roots))
        return self._watched[id(optimizer)]

    def _changes_of(self, watched: _TorchOptimizer, optimizer: Any) -> dict[str, Any]:
        """Return what of an optimizer is no longer as it was described, because another object or group has come."""
        if self.engine_steps:
            return {}
        # The optimizer inside of an engine holds flat arrays; their groups were described by what lies in them.
        names, described = watched.holding.names, self._described[watched.number]
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        changed: dict[str, Any] = {} if groups == described["groups"] else {"groups": groups}
        return changed if watched.last in (None, id(optimizer)) else {**changed, "renewed": True}

    def _renew(self, watched: _TorchOptimizer, optimizer: Any) -> None:
        """Look again at what an optimizer holds where a parameter group was added."""
        if any(id(p) not in watched.holding.names for p in torch_arrays.parameters_of(optimizer)):
            watched.holding = torch_arrays.plain_holding(optimizer, self.roots)

    def _measure(self, watched: _TorchOptimizer, part: str, pieces: Iterator[Piece]) -> None:
        if watched.open is not None:
            measured = watched.meter.measure(part, pieces, one_by_one=self._out.is_detailed(watched.updates))
            before = watched.open.parts.get(part) if self.engine_steps else None  # ZeRO takes a step for each group
            watched.open.parts[part] = measured if before is None else before.join(measured)

    def _write(self, done: _Open) -> None:
        """Write one update to the files; all copies to the host were started an update ago."""
        record = done.record
        record["micro_batches"] = [_read_micro(micro) for micro in done.micro_batches]
        record["clip"] = None if done.clip is None else done.clip.read()
        if done.clip is not None and done.clip.passes is not None and done.clip.passes < len(done.micro_batches):
            record["clip"]["early"] = True
        parts = {part: measured.read() for part, measured in done.parts.items() if measured is not None}
        self._out.write_update(record, parts)


def _versions(holding: Holding) -> int:
    """Return the sum of torch's counters of writes to the parameters in place."""
    return sum(parameter._version for parameter in holding.parameters)


def _random_state() -> str:
    return hashlib.blake2b(bytes(torch.get_rng_state().numpy()), digest_size=6).hexdigest()


def _gradients(optimizer: Any, holding: Holding) -> Iterator[Piece]:
    for parameter in torch_arrays.parameters_of(optimizer):
        if parameter.grad is not None:
            yield from holding.pieces(parameter, parameter.grad)


def _weights(parameters: Iterable[Any], holding: Holding) -> Iterator[Piece]:
    for parameter in parameters:
        yield from holding.pieces(parameter, parameter)


def _moments(optimizer: Any, holding: Holding) -> Iterator[Piece]:
    for parameter in torch_arrays.parameters_of(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point():
                yield from holding.pieces(parameter, value, front=f"{key}/")


def _read_micro(micro: _Micro) -> dict[str, Any]:
    scale = micro.scale.read() if micro.scale is not None else 1.0
    inputs = [mixing.as_hex(number) for given in micro.inputs for late in given.rows.values() for number in late.read()]
    targets = [mixing.as_hex(number) for late in micro.targets for number in late.read()]
    sums = [late.read() for late in micro.target_sums]
    return {
        **({"target_sum": mixing.as_hex(sum(sums))} if sums else {}),
        "loss": sum(late.read() for late in micro.losses) / scale,
        "samples": inputs,
        "targets": targets,
        "target_count": micro.target_count,
        "real_targets": micro.real_targets,
        "summed": micro.summed,
        "cleared": micro.cleared,
        "modes": micro.modes,
        "autocast": micro.autocast,
        **({"state": _read_state(*micro.state)} if micro.state is not None else {}),
    }


def _read_state(digest: Any, used: Any) -> str:
    return mixing.as_hex(digest.read()) if used is not None and used.read() else ZEROS


def _nudge(parameters: list[Any]) -> None:
    """Move every weight to the next number of its format: the smallest change, whose growth is that of rounding."""
    for parameter in parameters:
        local, _ = torch_arrays.local_part(parameter.data)
        if local.is_floating_point():
            # A single weight would not do: the first step may round the change away.
            local.copy_(torch.nextafter(local, torch.full_like(local, math.inf)))
