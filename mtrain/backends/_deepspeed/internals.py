"""Everything that mtrain uses of DeepSpeed without a promise of DeepSpeed: attributes, and changes of its behaviour.

DeepSpeed has no public interface to the parts of arrays that ZeRO leaves on a rank, so its stages are read here. What
they are called differs from release to release; ``tests/backends/test_torch_deepspeed_internals.py`` checks all of it.
Importing this module imports DeepSpeed.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import comm
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import parameter_offload, stage_1_and_2
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as ModulePatch
from deepspeed.utils import groups
from torch import Tensor, nn

from mtrain.errors import SpecError

TESTED = ("0.16.9", "0.17.6", "0.18.9", "0.19.8")
"""Versions of DeepSpeed with which these internals were tested; see docs/versions.md."""


# ------------------------------------------------------------------------------------------------- versions of DeepSpeed
def check_version(*, stage: int, reduction: str, precision: str) -> None:
    """Refuse what the installed DeepSpeed has no way to do.

    Raises:
        SpecError: A key of the spec asks for it; the message names the version that has it.
    """
    lacking = {}
    if stage and reduction == "update" and not hasattr(DeepSpeedEngine, "coalesce_grad_reduction"):
        lacking["backend.options.reduction: update"] = "0.19 or newer; give -o backend.options.reduction=micro_batch"
    if precision == "fp64" and not hasattr(ZeROOptimizer, "_configure_master_weights"):
        lacking["train.precision: fp64"] = "0.18 or newer; give another precision"
    if lacking:
        key, remedy = next(iter(lacking.items()))
        raise SpecError(f"{key} with DeepSpeed {deepspeed.__version__}, which cannot do that: it needs {remedy}")


def known_settings(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration without the keys of ZeRO that an older version does not have.

    Args:
        settings: The configuration, with every key of the newest version.
        chosen: The part that the user has given, which stays: DeepSpeed refuses what it does not know.
    """
    # Each of them switches off what the versions without it cannot do, but compute_grad_norm (0.19), which saves a norm.
    known = {name for key, field in DeepSpeedZeroConfig.model_fields.items() for name in (key, field.alias)}
    known.update(chosen.get("zero_optimization", ()))
    zero = {key: value for key, value in settings["zero_optimization"].items() if key in known}
    return {**settings, "zero_optimization": zero}


# ----------------------------------------------------------------------------------------------------- start and end
def prepare_start() -> None:
    """Change what DeepSpeed does at its start and in stage 3, before it is connected to the other ranks."""
    # On the CPU, DeepSpeed would compile this operator for inference at the first start on each machine, which takes
    # minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # In stage 3, DeepSpeed searches a layer's output for weights with vars(), which fails for dataclasses with slots. A
    # module attribute of that name shadows the built-in function.
    vars(parameter_offload)["vars"] = attributes
    vars(stage_1_and_2)["all_gather_dp_groups"] = gather_groups
    # DeepSpeed calls torch's collectives by their deprecated names.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)


def attributes(value: object) -> dict[str, Any]:
    """Return the attributes of ``value`` like ``vars``, but also for objects with slots."""
    if hasattr(value, "__dict__"):
        return vars(value)
    names = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


_GROUPS = (
    *("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GROUP"),
    *("_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu", "mesh_device"),
)
"""Variables of ``deepspeed.utils.groups`` that hold a process group; before 0.19 no function clears them."""


def forget_groups() -> None:
    """Make DeepSpeed forget all process groups, so that the next job of this process starts anew."""
    # DeepSpeed keeps groups in module variables, with no public function that clears them all. A group that is referenced
    # keeps its threads.
    if hasattr(groups, "_release_process_group_references"):  # from 0.19 on
        groups._release_process_group_references()
    else:
        vars(groups).update(dict.fromkeys(_GROUPS))
    comm.cdb = None
    parameter_offload.FWD_MODULE_STACK.clear()


def dissolve(engine: Any) -> None:
    """Take an engine apart, so that nothing of it holds a process group. Its model cannot train afterwards."""
    # engine.destroy() removes DeepSpeed's hooks, but the engine, its optimizer and the parameters still refer to each
    # other and to process groups, and the caller may keep the model.
    parameters = [*engine.module.parameters()]
    zero = engine.optimizer
    engine.destroy()
    for holder in (getattr(zero, "parameter_offload", None), zero, engine):
        if holder is not None:
            vars(holder).clear()
    for parameter in parameters:
        vars(parameter).clear()


# -------------------------------------------------------------------------------------------- one update, in any stage
def before_forward(engine: Any) -> None:
    """Let the stage expect the forward pass of another micro batch."""
    # The engine's own forward does this, but mtrain calls the model itself, without the engine around it.
    if hasattr(engine.optimizer, "clear_backward_seen_flag"):  # from 0.18 on
        engine.optimizer.clear_backward_seen_flag()


def before_backward(engine: Any) -> None:
    """Prepare the stage for a backward pass."""
    # The engine's own forward leaves this to hooks on its output, but mtrain calls the model itself.
    if hasattr(engine.optimizer, "enter_backward"):  # from 0.18 on; before, the engine's backward does both
        engine.optimizer.backward_prologue()
        engine.optimizer.enter_backward()


def leave_norm_out(engine: Any) -> None:
    """Make stage 3 compute no norm of the gradients in ``engine.step``, which would wait for it."""
    # Stages 1 and 2 have a setting for that. A norm that is not finite makes DeepSpeed leave its step out, which is empty:
    # mtrain's rule was applied before, or not.
    engine.optimizer._get_norm_groups = lambda: [torch.zeros(())]


def abandon_reduction(engine: Any) -> None:
    """Make the context of ``engine.coalesce_grad_reduction`` exchange nothing when it is left."""
    # After an error other ranks may never come to the exchange, and the context has no way to be abandoned.
    engine._flush_coalesced_reduction_zero12 = engine._flush_coalesced_reduction_zero3 = _nothing


def _nothing(zero: Any) -> None:
    """Replace DeepSpeed's reduction at the end of an update by nothing."""


# ------------------------------------------------------------------------------------------------------ stages 1 and 2
@dataclass(frozen=True, slots=True)
class Share:
    """One group of parameters in stage 1 or 2, which lie one after the other in a vector that is split evenly."""

    parameters: Sequence[nn.Parameter]
    offsets: Sequence[int]
    """Where each parameter begins in the whole vector."""
    memory: Tensor
    """This rank's share of the vector, in the type of the optimizer."""


def shares(zero: Any) -> list[Share]:
    """Return this rank's shares of the weights that are trained."""
    # Before 0.19 parameters lie close together, and nothing says where.
    offsets = getattr(zero, "round_robin_bit16_offsets", None) or [
        list(accumulate([0, *(parameter.numel() for parameter in parameters[:-1])]))
        for parameters in zero.round_robin_bit16_groups
    ]
    return [
        Share(parameters, offsets[group], zero.single_partition_of_fp32_groups[group].detach())
        for group, parameters in enumerate(zero.round_robin_bit16_groups)
    ]


def share_gradients(zero: Any) -> list[Tensor]:
    """Return this rank's share of the averaged gradients of each group, which may be changed in place."""
    flats = []
    for group, master in enumerate(zero.single_partition_of_fp32_groups):
        if zero.cpu_offload:
            flats.append(master.grad)
            continue
        flat = zero.flatten(zero.averaged_gradients[group])
        assert flat.numel() == master.numel()
        zero.averaged_gradients[group] = [flat]
        flats.append(flat)
    return flats


def gather_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int,
    allgather_bucket_size: int,
) -> None:
    """Gather the shares of all groups of weights in stages 1 and 2, on the CPU in pieces; has DeepSpeed's parameters.

    DeepSpeed leaves ``allgather_bucket_size`` out where torch has one operation for it, and gloo's copies all weights.
    """
    for flat, parts, group in zip(groups_flat, partitioned_param_groups, dp_process_group, strict=True):
        size, own = comm.get_world_size(group), parts[comm.get_rank(group)]
        if size == 1:
            continue
        if flat.is_cuda:
            comm.all_gather_into_tensor(flat, own, group)
            continue
        each = min(max(allgather_bucket_size // size, 1), own.numel())
        room = flat.new_empty(size * each)
        for first in range(0, own.numel(), each):
            pieces = [part[first : first + each] for part in parts]
            gathered = room[: size * pieces[0].numel()]
            comm.all_gather_into_tensor(gathered, own[first : first + each], group)
            for piece, found in zip(pieces, gathered.view(size, -1), strict=True):
                piece.copy_(found)


def publish_shares(zero: Any) -> None:
    """Update the model's weights from the shares of all ranks; every rank must call."""
    # The public way to distribute new weights is step(), which computes them itself.
    zero.update_lp_params()


# ------------------------------------------------------------------------------------------------------------- stage 3
@dataclass(frozen=True, slots=True)
class Slice:
    """This rank's part of one parameter in stage 3; all ranks' parts have one length, and the last ones padding."""

    parameter: nn.Parameter
    group: int
    number: int
    """Its number in the group."""
    place: int
    """Where it begins in the memory of its group."""
    memory: Tensor
    """The memory from that place on, in the type of the optimizer."""


def slices(zero: Any) -> Iterator[Slice]:
    """Yield this rank's parts of the weights that are trained."""
    for group, parameters in enumerate(zero.fp16_groups):
        flat = zero.fp32_partitioned_groups_flat[group].detach()
        lengths = [slice_length(parameter) for parameter in parameters]
        places = accumulate([0, *lengths[:-1]])
        for number, (parameter, place) in enumerate(zip(parameters, places, strict=True)):
            yield Slice(parameter, group, number, place, flat[place:])


def slice_gradient(zero: Any, piece: Slice, *, length: int) -> Tensor:
    """Return the first ``length`` elements of the averaged gradient of ``piece``: without padding, all of it."""
    if zero.offload_optimizer:
        gradient: Tensor = zero.fp32_partitioned_groups_flat[piece.group].grad[piece.place : piece.place + length]
    else:
        gradient = zero.averaged_gradients[piece.group][piece.number].view(-1)[:length]
    return gradient


def slice_length(parameter: Any) -> int:
    """Return the length of the part that each rank has of a parameter, padding included."""
    length: int = parameter.partition_numel()
    return length


def frozen_slice(parameter: Any) -> Tensor:
    """Return this rank's part of a parameter that is not trained."""
    part: Tensor = parameter.ds_tensor.detach()
    return part


def whole_numel(parameter: Any) -> int:
    """Return the number of elements of a parameter that is split."""
    numel: int = parameter.ds_numel
    return numel


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of the whole parameter, of which a rank holds only a part in stage 3."""
    # The shape of a parameter that is split is (0,).
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def drop_whole_weights(zero: Any) -> None:
    """Drop the whole copies of weights that stage 3 keeps between two uses."""
    # Copies that survive would hide a change to the parts.
    zero._partition_all_parameters()


def publish_slices(zero: Any) -> None:
    """Update the model's weights from the parts of all ranks; every rank must call."""
    # The public way to distribute new weights is step(), which computes them itself.
    drop_whole_weights(zero)
    for group in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(group)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


# ------------------------------------------------------------------------------------------------------------- float64
@contextmanager
def engines_in_float64() -> Iterator[None]:
    """Make DeepSpeed engines that keep weights, gradients and messages of a float64 model in float64, while inside."""
    # DeepSpeed has no setting for a type wider than float32, so the methods that choose types are replaced.
    _let_float64_be_reduced()
    master = ZeROOptimizer._configure_master_weights
    init, wrapper = DeepSpeedEngine.__init__, DeepSpeedEngine._do_optimizer_sanity_check
    set_dtype = ModulePatch._set_dtype

    def float64_messages(engine: Any, *args: Any, **kwargs: Any) -> None:
        init(engine, *args, **kwargs)
        engine._config.communication_data_type = torch.float64

    def no_wrapper_in_stage_0(engine: Any, basic_optimizer: Any) -> Any:
        # In stage 0 DeepSpeed treats every type but float32 and float16 as bfloat16. Its wrapper for that type would
        # overwrite the model's weights with its own copies.
        return wrapper(engine, basic_optimizer) if engine.zero_optimization() else None

    def master_weights(zero: Any, **kwargs: Any) -> torch.dtype:
        master(zero, **kwargs)
        return torch.float64

    def accepted_dtype(patch: Any, ds_config: Any, dtype: torch.dtype | None) -> None:
        # Stage 3 refuses float64 on processors that have float16, and ignores the type on others. The type applies to
        # modules that are built later; a model that is split after it was built keeps its own.
        set_dtype(patch, ds_config, torch.float32 if dtype == torch.float64 else dtype)

    replacements = {
        "get_data_types": lambda engine: (torch.float64, torch.float64),
        "communication_data_type": property(lambda engine: torch.float64),
        "__init__": float64_messages,
        "_do_optimizer_sanity_check": no_wrapper_in_stage_0,
    }
    originals = {name: vars(DeepSpeedEngine)[name] for name in replacements}
    for name, value in replacements.items():
        setattr(DeepSpeedEngine, name, value)
    ZeROOptimizer._configure_master_weights = master_weights
    ModulePatch._set_dtype = accepted_dtype
    try:
        yield
    finally:
        ZeROOptimizer._configure_master_weights = master
        ModulePatch._set_dtype = set_dtype
        for name, value in originals.items():
            setattr(DeepSpeedEngine, name, value)


def _let_float64_be_reduced() -> None:
    """Add float64 to the types that the device supports: stage 0 sums gradients of supported types only.

    DeepSpeed asks for them long after the engine was made, so this change stays in place.
    """
    accelerator: Any = get_accelerator()
    supported_dtypes = type(accelerator).supported_dtypes
    accelerator.supported_dtypes = lambda: [*supported_dtypes(accelerator), torch.float64]
