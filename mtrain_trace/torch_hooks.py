"""Listen to torch: forward passes, backward passes, clipping, and the steps of every optimizer.

Everything is seen from outside, through torch's own global hooks and three functions that are wrapped. The script, the
model and the optimizer stay as they are, and no value is changed. Work is added on the device's own queue; results are
read one update later.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mtrain_trace import mixing, recorder, torch_mixing
from mtrain_trace.recorder import Recorder

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_forward_module.")
"""Parts of parameter names that wrappers (DDP, torch.compile, FSDP, Fabric) put in front; names are compared without."""
TARGET_LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
    "ctc_loss",
)
"""Losses of ``torch.nn.functional`` whose second argument is the target."""

LABELS = ("labels", "label", "targets", "target")
"""Keyword arguments of models that hold the target of the loss."""
EXECUTION_ONLY = ("foreach", "fused", "capturable", "differentiable", "initial_lr")
"""Options of optimizers that say how a step is computed, not which."""

_BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm
_DROPOUT = torch.nn.modules.dropout._DropoutNd


@dataclass
class _Micro:
    """What one forward and backward pass has shown."""

    inputs: list[tuple[int, Any]] = field(default_factory=list)
    """(samples, digests of them) of each forward pass of a whole model."""
    targets: list[Any] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    labelled: bool = False
    """Whether the model itself was given the labels, as models of Hugging Face are."""
    scale: Any = None
    modes: tuple[int, int] | None = None
    """(modules in evaluation mode, modules) of the model."""
    autocast: str | None = None


@dataclass
class _Arrays:
    """Digests, sketches and squared lengths of some arrays, on their way to the host."""

    names: list[str]
    digests: Any
    sketches: Any
    squares: Any

    def read(self) -> dict[str, list[Any]]:
        """Return [digest, length squared, sketch] by name."""
        digests, sketches, squares = self.digests.read(), self.sketches.read(), self.squares.read()
        return {
            name: [f"{digests[i] & mixing.MASK:016x}", squares[i], [float(f"{x:.9g}") for x in sketches[i]]]
            for i, name in enumerate(self.names)
        }


@dataclass
class _Watched:
    """One optimizer, with the names of what it holds."""

    number: int
    names: dict[int, str] = field(default_factory=dict)
    """Names by the identity of the parameters."""
    seeds: dict[str, int] = field(default_factory=dict)
    updates: int = 0
    versions: int | None = None
    """Sum of the counters of writes to the parameters after the last step: a change before the next one is a stranger's."""
    outstanding: Callable[[], None] | None = None
    record: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, _Arrays | None] = field(default_factory=dict)
    micro_batches: list[_Micro] = field(default_factory=list)
    clip: tuple[Any, float] | None = None


class TorchListener:
    """Turns what torch calls into records. One per process."""

    def __init__(self, out: Recorder) -> None:
        self._out = out
        self.depth = 0
        """Calls of modules that are running: at 0, the next one is that of a whole model."""
        self._roots: list[Any] = []
        self._micro = _Micro()
        self._micro_batches: list[_Micro] = []
        self._clip: tuple[Any, float] | None = None
        self._watched: dict[int, _Watched] = {}
        self._kept: list[Any] = []
        out.before_close(self.flush)

    # What the hooks call -------------------------------------------------------------------------------------------

    def enter_module(self, module: Any, arguments: Any, keywords: Any) -> None:
        """Note a forward pass; only that of a whole model, not of its parts, shows samples."""
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return
        if not any(known is module for known in self._roots):
            self._roots.append(module)
        modes = [part.training for part in module.modules()]
        self._micro.modes = (len(modes) - sum(modes), len(modes))
        if torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled():
            self._micro.autocast = "on"
        labels = [value for key, value in keywords.items() if key in LABELS]
        for label in labels:
            self.see_target(label)
        self._micro.labelled = bool(labels)
        found = _samples((arguments, {key: value for key, value in keywords.items() if key not in LABELS}))
        if found is not None:
            self._micro.inputs.append(found)

    def see_target(self, target: Any) -> None:
        """Note the targets of a loss; those that the model was given by name are the samples' own, and count alone."""
        if (
            not self._micro.labelled
            and isinstance(target, torch.Tensor)
            and target.dim() > 0
            and not target.requires_grad
        ):
            self._micro.targets.append(torch_mixing.Late(torch_mixing.rows(target, 1)))

    def see_backward(self, tensors: Any) -> None:
        """Note the loss of a backward pass, which ends a micro batch."""
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        scalars = [loss for loss in losses if isinstance(loss, torch.Tensor) and loss.numel() == 1]
        if not scalars:
            return
        self._micro.losses = [torch_mixing.Late(loss.detach().reshape(()).to(torch.float64)) for loss in scalars]
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
            self._clip = (torch_mixing.Late(norm.detach().reshape(()).to(torch.float64)), float(limit))

    def before_step(self, optimizer: Any) -> None:
        """Record the gradients that an optimizer is about to use."""
        watched = self._watch(optimizer)
        if any(id(parameter) not in watched.names for parameter in _parameters(optimizer)):
            watched.names = self._names(optimizer)  # a parameter group was added
        watched.updates += 1
        update = watched.updates
        if watched.outstanding is not None:
            watched.outstanding()
            watched.outstanding = None
        full = self._out.is_full(update)
        watched.micro_batches, self._micro_batches = self._micro_batches, []
        watched.clip, self._clip = self._clip, None
        versions = _versions(optimizer)
        watched.record = {
            "update": update,
            "optimizer": watched.number,
            "rates": [_options(group) for group in optimizer.param_groups],
            "steps": _steps(optimizer),
            "rng": hashlib.blake2b(bytes(torch.get_rng_state().numpy()), digest_size=6).hexdigest()
            if self._out.is_detailed(update)
            else None,
            "weights_changed_outside": watched.versions is not None and versions != watched.versions,
        }
        watched.parts = {}
        if full:
            gradients = ((watched.names[id(p)], p.grad) for p in _parameters(optimizer) if p.grad is not None)
            watched.parts["gradients"] = _measured(gradients, watched)
            watched.parts["buffers"] = _measured(self._buffers(), watched)

    def after_step(self, optimizer: Any) -> None:
        """Record the weights and moments that a step has left, and hold all back until the next update."""
        watched = self._watched.get(id(optimizer))
        if watched is None or not watched.record:
            return
        watched.versions = _versions(optimizer)
        update, record, parts = watched.updates, watched.record, watched.parts
        if self._out.is_full(update):
            weights = ((watched.names[id(p)], p) for p in _parameters(optimizer))
            parts["weights"] = _measured(weights, watched)
            parts["moments"] = _measured(_moments(optimizer, watched), watched)
        micro_batches, clip = watched.micro_batches, watched.clip
        watched.outstanding = functools.partial(self._write, record, parts, micro_batches, clip)
        watched.record = {}

    def flush(self) -> None:
        """Write the records that are held back."""
        for watched in self._watched.values():
            if watched.outstanding is not None:
                watched.outstanding()
                watched.outstanding = None

    # How it is recorded --------------------------------------------------------------------------------------------

    def _watch(self, optimizer: Any) -> _Watched:
        """Return what is known of an optimizer; at its first step, its names and its weights are recorded."""
        watched = self._watched.get(id(optimizer))
        if watched is not None:
            return watched
        watched = _Watched(number=len(self._watched))
        self._watched[id(optimizer)] = watched
        self._kept.append(optimizer)  # an identity stays one object's while that lives
        watched.names = self._names(optimizer)
        if self._out.nudge:
            _nudge(optimizer)
        groups = [[watched.names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        described = {
            "rule": type(optimizer).__name__,
            "groups": groups,
            "shapes": {watched.names[id(p)]: list(p.shape) for p in _parameters(optimizer)},
            "dtypes": sorted({str(p.dtype).split(".")[-1] for p in _parameters(optimizer)}),
            "sharded": any(hasattr(p, "placements") for p in _parameters(optimizer)),
            "unseen": _unseen(optimizer, self._roots),
        }
        facts = {**recorder.facts_of_process(), **_facts_of_torch(self._roots)}
        facts["optimizers"] = [*getattr(self, "_described", []), described]
        self._described = facts["optimizers"]
        self._out.describe(facts)
        start = _measured(((watched.names[id(p)], p) for p in _parameters(optimizer)), watched)
        if start is not None:
            self._out.write(recorder.ARRAYS, {"update": 0, "optimizer": watched.number, "weights": start.read()})
        return watched

    def _names(self, optimizer: Any) -> dict[int, str]:
        owned = {id(p) for p in _parameters(optimizer)}
        roots = [root for root in self._roots if any(id(p) in owned for p in root.parameters())]
        names: dict[int, str] = {}
        for place, root in enumerate(roots):
            front = f"model{place}." if len(roots) > 1 else ""
            listed = {_plain(name): parameter for name, parameter in root.named_parameters()}
            cut = _common_front(list(listed))
            for name, parameter in listed.items():
                names.setdefault(id(parameter), front + name[cut:])
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                names.setdefault(id(parameter), f"group{number}.{place}")
        return names

    def _buffers(self) -> Iterator[tuple[str, Any]]:
        for place, root in enumerate(self._roots):
            front = f"model{place}." if len(self._roots) > 1 else ""
            cut = _common_front([_plain(name) for name, _ in root.named_parameters()])
            for name, buffer in root.named_buffers():
                if buffer.is_floating_point():
                    yield front + _plain(name)[cut:], buffer

    def _write(
        self,
        record: dict[str, Any],
        parts: dict[str, _Arrays | None],
        micro_batches: list[_Micro],
        clip: tuple[Any, float] | None,
    ) -> None:
        """Write one update to the files; all copies to the host were started an update ago."""
        record["micro_batches"] = [_read_micro(micro) for micro in micro_batches]
        record["clip"] = None if clip is None else {"before": clip[0].read(), "limit": clip[1]}
        arrays: dict[str, Any] = {}
        for part, measured in parts.items():
            if measured is None:
                continue
            arrays[part] = measured.read()
            rows = list(arrays[part].values())
            record[part] = {
                "digest": f"{sum(int(row[0], 16) for row in rows) & mixing.MASK:016x}",
                "norm": math.sqrt(sum(row[1] for row in rows)),
                "sketch": [float(f"{sum(row[2][place] for row in rows):.7g}") for place in range(mixing.LENGTH)],
            }
        self._out.write(recorder.UPDATES, record)
        if arrays and self._out.is_detailed(record["update"]):
            self._out.write(recorder.ARRAYS, {"update": record["update"], "optimizer": record["optimizer"], **arrays})


def install(out: Recorder) -> TorchListener:
    """Connect a recorder to torch: hooks of all optimizers, and the functions that are wrapped."""
    listener = TorchListener(out)
    register_optimizer_step_pre_hook(lambda optimizer, *_: _try(listener.before_step, optimizer))
    register_optimizer_step_post_hook(lambda optimizer, *_: _try(listener.after_step, optimizer))
    _wrap_calls(listener)
    _wrap(torch.autograd, "backward", before=lambda arguments, _: listener.see_backward(arguments[0]))
    for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
        _wrap(owner, "clip_grad_norm_", after=functools.partial(_note_clip, listener))
    for name in TARGET_LOSSES:
        _wrap(torch.nn.functional, name, before=functools.partial(_note_target, listener))
    scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler  # torch before 2.3 has the latter only
    _wrap(scaler, "scale", after=lambda arguments, _, __: listener.see_scale(arguments[0]._scale))
    return listener


def _wrap_calls(listener: TorchListener) -> None:
    """Wrap the call of every module: torch's global hooks are not given keyword arguments, with which many are called."""
    original = torch.nn.Module.__call__

    @functools.wraps(original)
    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not listener.depth and torch.is_grad_enabled():  # evaluation shows no samples of the training
            _try(listener.enter_module, self, arguments, keywords)
        listener.depth += 1
        try:
            return original(self, *arguments, **keywords)
        finally:
            listener.depth -= 1

    torch.nn.Module.__call__ = call  # type: ignore[method-assign]


def _wrap(owner: Any, name: str, *, before: Callable[..., None] | None = None, after: Any = None) -> None:
    """Replace a function by one that also calls ``before(arguments, keywords)`` or ``after(arguments, keywords, result)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if before is not None and torch.is_grad_enabled():
            _try(before, arguments, keywords)
        result = original(*arguments, **keywords)
        if after is not None:
            _try(after, arguments, keywords, result)
        return result

    setattr(owner, name, wrapped)


_failures: list[str] = []


def _try(note: Callable[..., None], *arguments: Any) -> None:
    """Call ``note``; a failure is printed once, and never ends the training that is being recorded."""
    try:
        with torch.no_grad():
            note(*arguments)
    except Exception as error:
        if not _failures:
            print(f"mtrain-trace: cannot record this training: {type(error).__name__}: {error}", file=sys.stderr)
        _failures.append(str(error))


def _note_target(listener: TorchListener, arguments: Any, keywords: Any) -> None:
    listener.see_target(keywords.get("target", arguments[1] if len(arguments) > 1 else None))


def _note_clip(listener: TorchListener, arguments: Any, keywords: Any, norm: Any) -> None:
    listener.see_clip(norm, keywords.get("max_norm", arguments[1] if len(arguments) > 1 else math.inf))


def _parameters(optimizer: Any) -> Iterator[Any]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _plain(name: str) -> str:
    """Return a parameter's name without the parts that wrappers add."""
    for part in WRAPPERS:
        name = name[len(part) :] if name.startswith(part) else name.replace("." + part, ".")
    return name


def _common_front(names: list[str]) -> int:
    """Return the length of what all names begin with: a module that only holds the model, for its loss or its labels.

    Digests and sketches depend on names, so a model and the same model inside such a holder need the same ones.
    """
    cut = 0
    while names and all("." in name[cut:] for name in names) and len({name[cut:].split(".")[0] for name in names}) == 1:
        cut += names[0][cut:].index(".") + 1
    return cut


def _versions(optimizer: Any) -> int:
    """Return the sum of torch's counters of writes to the parameters in place."""
    return sum(parameter._version for parameter in _parameters(optimizer))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group: learning rate, momentum, decay and all else that JSON can hold."""
    options = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        if (
            key != "params"
            and key not in EXECUTION_ONLY
            and isinstance(value, (bool, int, float, str, tuple, type(None)))
        ):
            options[key] = list(value) if isinstance(value, tuple) else value
    return options


def _steps(optimizer: Any) -> int | None:
    """Return how many steps the first parameter's state has counted; None where there is no state, or it is on a device."""
    for parameter in _parameters(optimizer):
        state = optimizer.state.get(parameter, {}) if hasattr(optimizer, "state") else {}
        steps = state.get("step") if isinstance(state, dict) else None
        if isinstance(steps, torch.Tensor):
            steps = int(steps.item()) if steps.device.type == "cpu" else None
        if steps is not None:
            return int(steps)
        if state:
            return None
    return None


def _moments(optimizer: Any, watched: _Watched) -> Iterator[tuple[str, Any]]:
    for parameter in _parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.is_floating_point():
                yield f"{key}/{watched.names[id(parameter)]}", value


def _local(tensor: Any) -> tuple[Any, int]:
    """Return (the part of a tensor that this rank holds, its first flat index in the whole).

    Raises:
        ValueError: the tensor is split otherwise than by rows, so that the part is not one stretch of the whole.
    """
    if not hasattr(tensor, "placements"):
        return tensor, 0
    splits = [placement for placement in tensor.placements if not placement.is_replicate()]
    if not splits:
        return (tensor.to_local(), 0) if tensor.device_mesh.get_rank() == 0 else (tensor.to_local()[:0], 0)
    if len(tensor.placements) > 1 or not splits[0].is_shard(0):
        raise ValueError(f"arrays that are split as {tensor.placements} are not recorded")
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local()
    row = math.prod(tensor.shape[1:])
    return local, int(offset[0]) * row if local.numel() else 0


def _measured(arrays: Iterator[tuple[str, Any]], watched: _Watched) -> _Arrays | None:
    """Digest, sketch and measure arrays on their device; None where there are none."""
    names, digests, sketches, squares = [], [], [], []
    for name, array in arrays:
        if name not in watched.seeds:
            watched.seeds[name] = mixing.name_seed(name)
        local, start = _local(array.detach())
        names.append(name)
        digests.append(torch_mixing.digest(local, watched.seeds[name], start=start))
        sketches.append(torch_mixing.sketch(local, watched.seeds[name], start=start))
        squares.append(torch_mixing.square(local))
    if not names:
        return None
    device = digests[0].device
    late = [torch_mixing.Late(torch.stack([x.to(device) for x in column])) for column in (digests, sketches, squares)]
    return _Arrays(names, *late)


def _samples(values: Any) -> tuple[int, Any] | None:
    """Return (samples, digests of each) of the tensors among the arguments of a model; None where there is no tensor.

    The samples are the rows of the first tensor; other tensors with as many rows belong to them.
    """
    tensors = [tensor for tensor in _flat(values) if tensor.dim() > 0 and tensor.shape[0] > 0]
    if not tensors:
        return None
    count, total = tensors[0].shape[0], None
    for place, tensor in enumerate(tensors):
        if tensor.shape[0] == count and (total is None or tensor.device == total.device):
            rows = torch_mixing.rows(tensor, place + 1)
            total = rows if total is None else total + rows
    return count, torch_mixing.Late(total)


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _flat(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _flat(value)


def _read_micro(micro: _Micro) -> dict[str, Any]:
    scale = micro.scale.read() if micro.scale is not None else 1.0
    inputs = [f"{number & mixing.MASK:016x}" for _, late in micro.inputs for number in late.read()]
    targets = [f"{number & mixing.MASK:016x}" for late in micro.targets for number in late.read()]
    return {
        "loss": sum(late.read() for late in micro.losses) / scale,
        "samples": inputs,
        "targets": targets,
        "modes": micro.modes,
        "autocast": micro.autocast,
    }


def _nudge(optimizer: Any) -> None:
    """Move every weight to the next number of its format: the smallest change, whose growth is that of rounding.

    A single weight would not do: the first step may round the change away.
    """
    for parameter in _parameters(optimizer):
        local, _ = _local(parameter.data)
        if local.is_floating_point():
            local.copy_(torch.nextafter(local, torch.full_like(local, math.inf)))


def _unseen(optimizer: Any, roots: list[Any]) -> list[str]:
    """Return in words what of this training cannot be seen."""
    unseen = []
    if any(type(part).__module__.startswith("deepspeed") for part in (optimizer, *roots)):
        unseen.append("DeepSpeed's engine: its own exchange of gradients, and weights that it splits")
    if any(group.get("capturable") for group in optimizer.param_groups):
        unseen.append("CUDA graphs: steps that are replayed call no hook")
    return unseen


def _facts_of_torch(roots: list[Any]) -> dict[str, Any]:
    dynamo = sys.modules.get("torch._dynamo")
    compiled = dynamo is not None and any(type(root).__name__ == "OptimizedModule" for root in roots)
    return {
        "framework": "torch",
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "models": [_class_name(root) for root in roots],
        "wrapped": sorted({type(root).__name__ for root in roots if hasattr(root, "module")}),
        "compiled": compiled,
        "batch_norms": sum(isinstance(part, _BATCH_NORM) for root in roots for part in root.modules()),
        "dropouts": sum(isinstance(part, _DROPOUT) and part.p > 0 for root in roots for part in root.modules()),
    }


def _class_name(root: Any) -> str:
    inner = getattr(root, "module", None) or getattr(root, "_orig_mod", None)
    return type(inner if isinstance(inner, torch.nn.Module) else root).__name__
