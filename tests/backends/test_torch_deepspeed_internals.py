"""Every internal name of DeepSpeed that mtrain uses exists, and does what mtrain takes for granted."""

from importlib.util import find_spec

import pytest

from tests.backends.processes import python
from tests.ports import held_port

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

LOAD = """
import os, sys, warnings
warnings.simplefilter("ignore")
from mtrain.backends._deepspeed import library as loading
loading.load("cpu")
from mtrain.backends._deepspeed import internals
from tests.backends.internals import Library
library = Library("deepspeed", internals)
"""


def check(code: str, **env: str) -> None:
    """Run ``code`` in a process that has loaded DeepSpeed; DeepSpeed is not loaded into that of the tests."""
    process = python(LOAD + code + "\nprint('done')\n", **env)
    assert process.stdout.endswith("done\n"), process.stderr


@pytest.mark.job
def test_names_exist_and_functions_take_what_mtrain_passes() -> None:
    check("""
engine = "deepspeed.runtime.engine:DeepSpeedEngine"
for path in (
    "deepspeed.comm.comm:cdb",
    "deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK.clear",
    "deepspeed.utils.groups:_release_process_group_references",
    *(f"{engine}.{name}" for name in ("coalesce_grad_reduction", "set_gradient_accumulation_boundary", "allreduce_gradients")),
    *(f"{engine}.{name}" for name in ("_flush_coalesced_reduction_zero12", "_flush_coalesced_reduction_zero3", "destroy")),
    *(f"{engine}.{name}" for name in ("get_data_types", "communication_data_type", "_do_optimizer_sanity_check")),
    "deepspeed.runtime.base_optimizer:ZeROOptimizer._configure_master_weights",
):
    library.get(path)
operators = library.get("deepspeed.ops:__compatible_ops__")
assert "deepspeed_shm_comm" in operators, library.wrong("there is no operator deepspeed_shm_comm")
patch = "deepspeed.runtime.zero.partition_parameters:InsertPostInitMethodToModuleSubClasses._set_dtype"
library.takes(patch, ["self", "ds_config", "dtype"])
library.takes(f"{engine}._do_optimizer_sanity_check", ["self", "basic_optimizer"])
gather = "deepspeed.runtime.utils:all_gather_dp_groups"
arguments = ["groups_flat", "partitioned_param_groups", "dp_process_group", "start_alignment_factor", "allgather_bucket_size"]
library.takes(gather, arguments)
library.takes("deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups", arguments)
library.reads("deepspeed.runtime.engine", ["scale_wrt_gas=True"])
library.reads("deepspeed.runtime.zero.parameter_offload", ["vars("])
assert callable(library.get("deepspeed.accelerator:get_accelerator")().supported_dtypes)
""")


COMMON = ("clear_backward_seen_flag", "backward_prologue", "enter_backward")
STATES = (
    *("round_robin_bit16_groups", "round_robin_bit16_offsets", "single_partition_of_fp32_groups"),
    *("averaged_gradients", "cpu_offload", "flatten", "update_lp_params"),
)
WEIGHTS = (
    *(
        "fp16_groups",
        "fp32_partitioned_groups_flat",
        "averaged_gradients",
        "offload_optimizer",
        "persistent_parameters",
    ),
    *(
        "_partition_all_parameters",
        "_reassign_or_swap_out_partitioned_parameters",
        "parameter_offload",
        "_get_norm_groups",
    ),
)


@pytest.mark.job
@pytest.mark.parametrize(("stage", "names"), [(1, STATES), (2, STATES), (3, WEIGHTS)])
def test_a_stage_has_the_attributes_that_hold_its_parts(stage: int, names: tuple[str, ...]) -> None:
    check(
        f"""
from mtrain.backends.deepspeed import DeepSpeed
from tests.backends.studies import Whole, recipe
with DeepSpeed(DeepSpeed.Options(device="cpu", stage={stage})) as session:
    model, _ = session.prepare(Whole, recipe())
    ((engine, _),) = session._engines
    library.has(engine.optimizer, {[*COMMON, *names]})
    library.has(engine, ["optimizer", "module"])
    for parameter in model.parameters() if {stage} == 3 else ():
        library.has(parameter, ["ds_tensor", "ds_numel", "ds_shape", "partition_numel", "all_gather"])
        library.same("the shape of a parameter that is split", tuple(parameter.shape), (0,))
        assert internals.whole_shape(parameter) == tuple(parameter.ds_shape)
""",
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(held_port()),
    )


@pytest.mark.job
def test_what_a_layer_returns_may_have_slots() -> None:
    check("""
from dataclasses import make_dataclass
from types import SimpleNamespace
Returned = make_dataclass("Returned", ["scores", "boxes"], frozen=True, slots=True)
assert internals.attributes(Returned(1, 2)) == {"scores": 1, "boxes": 2}
assert internals.attributes(SimpleNamespace(scores=1)) == {"scores": 1}
""")


@pytest.mark.job
def test_shares_are_gathered_in_pieces() -> None:
    check("""
import torch
from deepspeed.comm import comm
whole, sizes = torch.arange(26.0), []
flat = torch.zeros(26)
parts = [flat[:13], flat[13:]]
parts[1].copy_(whole[13:])
comm.get_world_size, comm.get_rank = lambda group: 2, lambda group: 1

def gather(output, own, group):
    sizes.append(output.numel())
    first = int(own[0])
    assert torch.equal(own, whole[first : first + own.numel()])
    output.copy_(torch.cat([whole[first - 13 : first - 13 + own.numel()], own]))

comm.all_gather_into_tensor = gather
internals.prepare_start()
library.get("deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups")([flat], [parts], ["group"], 2, 8)
assert torch.equal(flat, whole), flat
assert sizes == [8, 8, 8, 2], sizes
""")


@pytest.mark.smoke
@pytest.mark.job
def test_what_an_older_version_lacks_is_refused_by_name_or_done_without() -> None:
    check("""
from types import SimpleNamespace
import torch
from mtrain.errors import SpecError

def refusal(**asked):
    try:
        internals.check_version(**asked)
    except SpecError as error:
        return str(error)

for stage in range(4):
    assert refusal(stage=stage, reduction="update", precision="fp64") is None
internals.deepspeed.__version__ = "0.17.6"
del internals.DeepSpeedEngine.coalesce_grad_reduction
assert refusal(stage=0, reduction="update", precision="fp64") is None
assert refusal(stage=3, reduction="micro_batch", precision="fp64") is None
told = refusal(stage=1, reduction="update", precision="fp32")
assert "reduction: update with DeepSpeed 0.17.6" in told and "0.19 or newer" in told and "=micro_batch" in told, told
del internals.ZeROOptimizer._configure_master_weights
assert refusal(stage=3, reduction="micro_batch", precision="fp32") is None
told = refusal(stage=0, reduction="micro_batch", precision="fp64")
assert "precision: fp64 with DeepSpeed 0.17.6" in told and "0.18 or newer" in told, told

zero = {"stage": 3, "compute_grad_norm": True, "enable_sanity_checks": False}
config = {"bf16": {"enabled": False}, "zero_optimization": zero}
assert internals.known_settings(config, {}) == config
field = lambda alias=None: SimpleNamespace(alias=alias)
internals.DeepSpeedZeroConfig = SimpleNamespace(model_fields={"stage": field(), "sanity": field("enable_sanity_checks")})
known = {"stage": 3, "enable_sanity_checks": False}
assert internals.known_settings(config, {}) == {**config, "zero_optimization": known}
# What a user has chosen and DeepSpeed does not know must reach DeepSpeed, which refuses it.
assert internals.known_settings(config, {"zero_optimization": {"compute_grad_norm": True}}) == config

parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 3), (4,), (5,))]
older = SimpleNamespace(round_robin_bit16_groups=[parameters], single_partition_of_fp32_groups=[torch.zeros(8)])
(share,) = internals.shares(older)
assert list(share.offsets) == [0, 6, 10], share.offsets
""")
