"""Turn what Paddle calls into records: forward and backward passes, clipping, and the steps of every optimizer.

No value is changed. Arrays are measured on the host, so on an accelerator every recorded update waits for their copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

from mtrain_trace import mixing, naming, paddle_arrays, paddle_facts, recorder
from mtrain_trace.recorder import Recorder

Pairs = list[tuple[Any, Any]]
"""Parameters with their gradients, as an optimizer of Paddle is given them."""


@dataclass
class _Micro:
    """What one forward and backward pass has shown."""

    samples: list[str] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    labelled: bool = False
    """Whether the model itself was given the labels."""
    scale: Any = None
    modes: tuple[int, int] | None = None
    """(layers in evaluation mode, layers) of the model."""
    autocast: str | None = None

    def read(self) -> dict[str, Any]:
        """Return the lines of a trace; losses are read now, when the update is complete."""
        scale = 1.0 if self.scale is None else float(self.scale.numpy().reshape(-1)[0])
        return {
            "loss": sum(float(loss.astype("float64").numpy().reshape(-1)[0]) for loss in self.losses) / scale,
            "samples": self.samples,
            "targets": self.targets,
            "modes": self.modes,
            "autocast": self.autocast,
        }


@dataclass
class _PaddleOptimizer:
    """One optimizer, with the arrays that it holds."""

    number: int
    optimizer: Any
    names: paddle_arrays.Names
    groups: list[paddle_facts.ParameterGroup]
    updates: int = 0
    steps: int | None = None
    """Steps that its moments had counted when it was seen first."""
    left: tuple[int, int] | None = None
    """(update, digest of the weights that it has left)."""
    record: dict[str, Any] | None = None
    applied: int = 0
    """Groups of the open update that have been stepped."""
    parts: dict[str, dict[str, list[Any]]] = field(default_factory=dict)

    @property
    def parameters(self) -> Iterator[Any]:
        """Yield the parameters of all groups."""
        for group in self.groups:
            yield from group.parameters

    def name(self, parameter: Any) -> str:
        """Return the name of a parameter; its own where no model that was called has it."""
        return self.names.parameters.get(id(parameter), parameter.name)


class PaddleListener:
    """What is called while a process trains. One per process."""

    def __init__(self, out: Recorder) -> None:
        self._out = out
        self.depth = 0
        """Calls of layers and of backward passes that are running: at 0, the next one is that of a whole model."""
        self.roots: list[Any] = []
        self._micro = _Micro()
        self._micro_batches: list[_Micro] = []
        self._clip: dict[str, float] | None = None
        self._watched: dict[int, _PaddleOptimizer] = {}
        self._described: list[dict[str, Any]] = []
        self._stepping: _PaddleOptimizer | None = None

    # What passes show ----------------------------------------------------------------------------------------------

    def enter_layer(self, layer: Any, arguments: Any, keywords: Any) -> None:
        """Note a forward pass; only that of a whole model, not of its parts, shows samples."""
        if all(parameter.stop_gradient for parameter in layer.parameters()):
            return
        if not any(known is layer for known in self.roots):
            self.roots.append(layer)
        modes = [part.training for part in layer.sublayers(include_self=True)]
        self._micro.modes = (len(modes) - sum(modes), len(modes))
        self._micro.autocast = paddle_facts.autocast_format()
        labels, others = naming.split_labels(keywords)
        for label in labels:
            self.see_target(label)
        self._micro.labelled = bool(labels)
        self._micro.samples += _samples(list(naming.tensors_in((arguments, others), paddle.Tensor)))

    def see_target(self, target: Any) -> None:
        """Note the targets of a loss; those that the model was given by name are the samples' own, and count alone."""
        is_target = isinstance(target, paddle.Tensor) and target.ndim > 0 and target.stop_gradient
        if is_target and not self._micro.labelled:
            self._micro.targets += map(mixing.as_hex, paddle_arrays.rows(target, 1))

    def see_backward(self, losses: Iterable[Any]) -> None:
        """Note the loss of a backward pass, which ends a micro batch."""
        if scalars := [loss for loss in losses if isinstance(loss, paddle.Tensor) and loss.size == 1]:
            self._micro.losses = [loss.detach() for loss in scalars]
            self._micro_batches.append(self._micro)
            self._micro = _Micro()

    def see_scale(self, scale: Any) -> None:
        """Note the factor by which a gradient scaler multiplies the loss."""
        if isinstance(scale, paddle.Tensor):
            self._micro.scale = scale.clone().detach()

    def see_norm(self, norm: Any, limit: float) -> None:
        """Note a clipping that the script does by itself: the norm before, and its limit."""
        self._clip = {"before": float(norm), "limit": float(limit)}

    def before_clip(self, clip: Any, given: Pairs) -> None:
        """Note the norm that the optimizer's own clipping finds; Paddle 3 then clips in place."""
        watched = self._stepping
        if watched is None or watched.record is None:
            return
        # Fleet wraps the clipping that it was given.
        if isinstance(getattr(clip, "_clip", clip), paddle.nn.ClipGradByGlobalNorm):
            counted = [g for p, g in given if g is not None and getattr(p, "need_clip", True)]
            # Paddle does not return the norm; it is computed as its own clipping does.
            before = math.sqrt(sum(paddle_arrays.square(gradient) for gradient in counted))
            watched.record["clip"] = {"before": before, "limit": float(clip.clip_norm)}

    def after_clip(self, clipped: Pairs) -> None:
        """Note the gradients that clipping has left, which are those that the optimizer uses."""
        if self._stepping is not None:
            self._measure_gradients(self._stepping, clipped)

    # What steps show -----------------------------------------------------------------------------------------------

    def before_apply(self, optimizer: Any, pairs: Any) -> None:
        """Record the gradients that an optimizer is about to use; it comes here once for each of its groups."""
        if not (self.roots or self._micro_batches):
            return
        if id(optimizer) not in self._watched:
            self._watch(optimizer)
        watched = self._watched[id(optimizer)]
        if watched.record is None:
            self._begin(watched)
        self._stepping = watched
        given = pairs["params"] if isinstance(pairs, dict) else pairs
        clip = pairs.get("grad_clip") if isinstance(pairs, dict) else optimizer._grad_clip
        if clip is None:
            self._measure_gradients(watched, given)

    def after_apply(self, optimizer: Any) -> None:
        """Record the weights and moments that the step of the last group has left, and write the update."""
        watched, self._stepping = self._stepping, None
        if watched is None:
            return
        watched.applied += 1
        if watched.applied >= paddle_facts.calls_of(optimizer):
            self._end(watched)

    def note_skip(self, optimizer: Any, updates: int) -> None:
        """Note that a gradient scaler has called no step: its gradients were not finite."""
        if self.updates_of(optimizer) == updates and self._micro_batches:
            if id(optimizer) not in self._watched:
                self._watch(optimizer)
            watched = self._watched[id(optimizer)]
            self._begin(watched)
            if watched.record is not None:
                watched.record["skipped"] = True
            self._end(watched)

    def updates_of(self, optimizer: Any) -> int:
        """Return how many updates of an optimizer have begun."""
        return self._watched[id(optimizer)].updates if id(optimizer) in self._watched else 0

    # How it is recorded --------------------------------------------------------------------------------------------

    def _watch(self, optimizer: Any) -> None:
        """Begin to watch an optimizer: its names and its weights before the first step are recorded."""
        names = paddle_arrays.names_of(self.roots)
        held = paddle_facts.groups_of(optimizer, {id(parameter) for _, parameter in names.statistics})
        watched = _PaddleOptimizer(len(self._watched), optimizer, names, held)
        self._watched[id(optimizer)] = watched
        watched.steps = paddle_facts.steps_of(optimizer, watched.parameters)
        if self._out.nudge:
            _nudge(optimizer, watched.parameters)
        shapes = {watched.name(p): self._shape(watched, p) for p in watched.parameters}
        described = paddle_facts.describe_optimizer(
            optimizer, [[watched.name(p) for p in group.parameters] for group in held]
        )
        self._described.append({**described, "shapes": shapes})
        facts = {**recorder.facts_of_process(), **paddle_facts.facts_of_paddle(self.roots)}
        self._out.describe({**facts, "optimizers": self._described})
        start = {"update": 0, "optimizer": watched.number, "weights": self._weights(watched)}
        self._out.write(recorder.ARRAYS, start)

    def _shape(self, watched: _PaddleOptimizer, parameter: Any) -> list[int]:
        shape = [int(size) for size in parameter.shape]
        return shape[::-1] if id(parameter) in watched.names.transposed else shape

    def _begin(self, watched: _PaddleOptimizer) -> None:
        """Open the next update of an optimizer."""
        self._out.end_after(watched.updates)
        watched.updates += 1
        watched.applied = 0
        update = watched.updates
        outside = (
            watched.left is not None and watched.left[0] == update - 1 and watched.left[1] != self._digest(watched)
        )
        micro_batches, self._micro_batches = self._micro_batches, []
        clip, self._clip = self._clip, None
        watched.record = {
            "update": update,
            "optimizer": watched.number,
            "rates": [paddle_facts.options_of(watched.optimizer, group) for group in watched.groups],
            "steps": (watched.steps or 0) + update - 1 or None if paddle_facts.counts(watched.optimizer) else None,
            "rng": paddle_facts.random_state() if self._out.is_detailed(update) else None,
            "weights_changed_outside": outside,
            "skipped": False,
            "micro_batches": [micro.read() for micro in micro_batches],
            "clip": clip,
        }
        watched.parts = {}
        statistics = watched.names.statistics
        if self._out.is_full(update) and statistics:
            watched.parts["buffers"] = {name: paddle_arrays.measure(name, array) for name, array in statistics}

    def _measure_gradients(self, watched: _PaddleOptimizer, pairs: Pairs) -> None:
        if watched.record is None or not self._out.is_full(watched.updates):
            return
        for parameter, gradient in pairs:
            if gradient is not None and gradient.is_dense():
                row = self._measure(watched, parameter, gradient)
                watched.parts.setdefault("gradients", {})[watched.name(parameter)] = row

    def _end(self, watched: _PaddleOptimizer) -> None:
        """Write the update with the weights and moments that its step has left."""
        record, watched.record = watched.record, None
        if record is None:
            return
        if self._out.is_full(watched.updates):
            watched.parts["weights"] = self._weights(watched)
            watched.left = watched.updates, mixing.digest_of_rows(watched.parts["weights"].values())
            if moments := self._moments(watched):
                watched.parts["moments"] = moments
        self._out.write_update(record, watched.parts)

    def _measure(self, watched: _PaddleOptimizer, parameter: Any, tensor: Any, front: str = "") -> list[Any]:
        turned = id(parameter) in watched.names.transposed
        return paddle_arrays.measure(front + watched.name(parameter), tensor, transposed=turned)

    def _weights(self, watched: _PaddleOptimizer) -> dict[str, list[Any]]:
        return {
            watched.name(p): self._measure(watched, p, paddle_facts.master_of(watched.optimizer, p))
            for p in watched.parameters
        }

    def _digest(self, watched: _PaddleOptimizer) -> int:
        """Return the digest of all weights."""
        total = 0
        for parameter in watched.parameters:
            turned = id(parameter) in watched.names.transposed
            array = paddle_arrays.on_host(paddle_facts.master_of(watched.optimizer, parameter), transposed=turned)
            total += mixing.digest(array, watched.name(parameter))
        return total & mixing.MASK

    def _moments(self, watched: _PaddleOptimizer) -> dict[str, list[Any]]:
        found = {}
        for parameter in watched.parameters:
            for key, value in paddle_facts.moments_of(watched.optimizer, parameter):
                row = self._measure(watched, parameter, value, front=f"{key}/")
                found[f"{key}/{watched.name(parameter)}"] = row
        return found


def _samples(values: list[Any]) -> list[str]:
    """Return digests of the samples: the rows of the first tensor, and of others with as many rows."""
    tensors = [tensor for tensor in values if tensor.ndim > 0 and tensor.shape[0] > 0]
    if not tensors:
        return []
    total = np.zeros(tensors[0].shape[0], dtype=np.int64)
    for place, tensor in enumerate(tensors):
        if tensor.shape[0] == len(total):
            total += paddle_arrays.rows(tensor, place + 1)
    return list(map(mixing.as_hex, total))


def _nudge(optimizer: Any, parameters: Iterable[Any]) -> None:
    """Move every weight to the next number of its format, as the recorder of torch does."""
    for parameter in parameters:
        array = parameter.numpy()
        if array.dtype.kind == "f" and paddle_facts.master_of(optimizer, parameter) is parameter:
            parameter.set_value(np.nextafter(array, np.array(np.inf, array.dtype)))
