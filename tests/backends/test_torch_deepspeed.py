"""Backend ``deepspeed``: real ranks under torchrun, at every stage of ZeRO compared bit for bit with those of ddp."""

import json
import os
import subprocess
import sys
import textwrap
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mtrain.backends._deepspeed.settings import Sharding, settings
from mtrain.backends._torch import rules
from mtrain.backends._torch.engine import channels_last as lay_channels_last
from mtrain.backends._torch.layout import channels_last
from mtrain.backends._torch.sharded.rules import ShardRule, vector_width
from mtrain.backends._torch.sharded.shards import Part, spans_of
from mtrain.backends.deepspeed import DeepSpeed
from tests.backends.processes import ROOT, python
from tests.backends.recipes import recipe

EQUAL_TO_DDP = (
    "convnet",
    "yolov5n",
    "fifty_updates",
    "adam",
    "synced_batchnorm",
    "frozen",
    "channels_last",
    "bf16",
    "fp16",
    "not_finite",
    "missing_in_one_micro_batch",
    "evaluation",
)
MISSING = ("missing_on_one_rank", "channels_last_and_missing")
"""Not in stage 3, where every rank must pass through the same layers."""
STAGES = (0, 1, 2, 3)
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None,
    reason="DeepSpeed is not installed: pip install -e packages/mtrain-trace -e '.[deepspeed]'",
)


def start(size: int, *arguments: str, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
    """Ranks that run ``arguments``."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}", *arguments]
    one_thread = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"}
    env = {**os.environ, **one_thread, "PYTHONPATH": str(ROOT)}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s)


@pytest.fixture(scope="session")
def study_results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return each rank's results of a study on ``size`` ranks; all studies of a stage share one start."""

    @cache
    def run(backend: str, size: int, studies: tuple[str, ...], options: str) -> Path:
        out = tmp_path_factory.mktemp(f"{backend}-{size}")
        ranks = ("-m", "tests.backends.deepspeed_ranks")
        process = start(size, *ranks, ",".join(studies), backend, str(out), options)
        assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]
        return out

    def read(study: str, backend: str = "deepspeed", size: int = 2, file: str = "", **options: Any) -> list[Any]:
        everything = size == 2 and set(options) <= {"stage"}
        studies: tuple[str, ...] = (study,)
        if everything:
            missing = MISSING if options.get("stage") != 3 else ()
            studies = (*EQUAL_TO_DDP, *missing, *(("resumed", "exchanged") if backend == "deepspeed" else ()))
        return json.loads((run(backend, size, studies, json.dumps(options)) / f"{file or study}.json").read_text())

    return read


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
class TestEveryStage:
    @pytest.mark.parametrize("study", EQUAL_TO_DDP)
    def test_learns_what_ddp_learns_bit_for_bit(self, study_results: Any, study: str, stage: int) -> None:
        ours, theirs = study_results(study, stage=stage), study_results(study, "ddp")
        print(f"{study}, stage {stage}: {ours[0]}")
        assert ours == theirs

    def test_goes_on_bit_for_bit_from_a_state(self, study_results: Any, stage: int) -> None:
        for rank in study_results("resumed", stage=stage):
            assert rank["whole"] == rank["in two parts"]

    def test_goes_on_from_a_state_of_every_other_stage(self, study_results: Any, stage: int) -> None:
        for rank in study_results("exchanged", stage=stage):
            assert rank["straight"] == rank["through stage 0"] == rank["through stage 1"] == rank["through stage 3"]

    def test_offloaded_states_learn_the_same(self, study_results: Any, stage: int) -> None:
        if stage:
            assert study_results("fifty_updates", stage=stage, offload=True) == study_results("fifty_updates", "ddp")

    def test_three_ranks_go_on_bit_for_bit(self, study_results: Any, stage: int) -> None:
        for rank in study_results("resumed", size=3, stage=stage):
            assert rank["whole"] == rank["in two parts"]

    def test_a_job_of_one_rank_learns_what_ddp_learns(self, study_results: Any, stage: int) -> None:
        ours = study_results("fifty_updates", size=1, stage=stage)
        assert ours == study_results("fifty_updates", "ddp", size=1)

    def test_leaves_no_thread_behind(self, study_results: Any, stage: int) -> None:
        threads = study_results("fifty_updates", size=1, file="threads-0", stage=stage)
        assert [name for name in threads if "gloo" in name] == []


@pytest.mark.smoke
@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", [stage for stage in STAGES if stage != 3]
)  # every rank passes through every layer there
@pytest.mark.parametrize("study", MISSING)
def test_layers_that_a_rank_leaves_out_are_learnt_as_by_ddp(study_results: Any, study: str, stage: int) -> None:
    assert study_results(study, stage=stage) == study_results(study, "ddp")


@pytest.mark.smoke
@needs_deepspeed
@pytest.mark.slow
def test_reducing_in_every_micro_batch_is_rounded_differently_but_hardly(study_results: Any) -> None:
    ours, theirs = (
        [float.fromhex(norm) for norm in rank["norms"]]
        for rank in (
            study_results("adam", stage=2, reduction="micro_batch")[0],
            study_results("adam", stage=2, bucket_mb=1.0)[0],
        )
    )
    assert ours == pytest.approx(theirs, rel=1e-4)


# --------------------------------------------------------------------------------------------------------- rules on parts
@pytest.mark.smoke
@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("shape", [(1003,), (7,), (6, 3, 3, 3), (5, 6, 1, 1)])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("cut", [0.0, 0.31, 0.5, 1.0])
def test_parts_are_rounded_as_the_whole_is(rule: str, shape: tuple[int, ...], last: bool, cut: float) -> None:
    """The fused kernels round the end of an array differently: it must be the end of the whole."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    options = {"weight_decay": 0.01, "momentum": 0.9, "nesterov": 1.0}
    start = torch.randn(shape, generator=generator)
    length = start.numel()
    model = torch.nn.ParameterList([torch.nn.Parameter(start.clone())])
    if last:
        lay_channels_last(model)
    whole = model[0].detach()
    expected = rules.make(rule, [whole], options)
    weights = start.clone().view(-1)
    spans = spans_of(length, [0, int(cut * length), length])
    parts = [Part(shape, spans, weights[first:end]) for first, end in spans]
    shards = [
        ShardRule(rule, [part], rank, options, shapes=[part.local.shape], channels_last=last)
        for rank, part in enumerate(parts)
    ]
    for _ in range(3):
        grad = torch.randn(shape, generator=generator)
        expected.apply(
            [0],
            [grad.to(memory_format=torch.channels_last) if last and len(shape) == 4 else grad],
            learning_rate=0.1,
            momentum=None,
        )
        for (first, end), shard in zip(spans, shards, strict=True):
            shard.apply([0], [grad.view(-1)[first:end].clone()], learning_rate=0.1, momentum=None)
    assert torch.equal(weights.view(shape), whole)
    for name, (moment,) in expected.moments.items():
        assert torch.equal(torch.cat([shard.moments[name][0] for shard in shards]).view(shape), moment)


@pytest.mark.smoke
def test_a_register_holds_a_power_of_two() -> None:
    assert vector_width("sgd", torch.zeros(1)) in (1, 2, 4, 8, 16, 32)


@pytest.mark.smoke
def test_a_weight_channels_last_has_the_strides_of_the_engine() -> None:
    for shape in ((6, 3, 3, 3), (8, 6, 1, 1), (16, 3, 6, 6)):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape))])
        ours = channels_last(model[0].detach().clone())
        lay_channels_last(model)
        assert ours.stride() == model[0].stride()
        assert torch.equal(ours, model[0])


@pytest.mark.smoke
def test_parts_cover_an_array() -> None:
    assert spans_of(10, [0, 4, 8, 12]) == ((0, 4), (4, 8), (8, 10))
    assert spans_of(10, [-20, -8, 4, 16]) == ((0, 0), (0, 4), (4, 10))


# --------------------------------------------------------------------------------------------------------------- settings
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping: mtrain writes this key; use train.clip_norm"),
        (
            {"zero_optimization": {"stage": 2}},
            "zero_optimization.stage: mtrain writes this key; use backend.options.stage",
        ),
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'?"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean 'overlap_comm'?"),
        ({"zero_optimization": 3}, "given 3, expected a mapping"),
    ],
)
def test_keys_that_would_be_ignored_or_change_training_are_refused(config: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as raised:
        DeepSpeed.Options(config=config)
    assert sentence in str(raised.value)


@pytest.mark.smoke
def test_nothing_to_offload_is_refused() -> None:
    with pytest.raises(ValidationError, match="offload: true given with stage 0"):
        DeepSpeed.Options(stage=0, offload=True)


@pytest.mark.smoke
def test_further_keys_are_laid_over_what_mtrain_writes() -> None:
    extra = {"wall_clock_breakdown": True, "zero_optimization": {"overlap_comm": True}}
    sharding = Sharding(stage=2, offload=False, bucket_mb=1.0, reduction="update", extra=extra)
    content = settings(recipe(clip_norm=1.0), sharding, size=2, pin_memory=False)
    assert content["wall_clock_breakdown"]
    assert content["zero_optimization"]["overlap_comm"]
    assert content["zero_optimization"]["stage"] == 2
    assert content["gradient_clipping"] == 0.0


# ----------------------------------------------------------------------------------------------------- errors and endings
ENTER = """
    from mtrain.backends.deepspeed import DeepSpeed
    from mtrain.errors import MtrainError
    try:
        with DeepSpeed(DeepSpeed.Options(device="cpu")):
            pass
    except MtrainError as error:
        print(type(error).__name__, error.exit_code, error)
"""


@pytest.mark.smoke
@pytest.mark.job
def test_it_says_what_it_is_without_loading_a_framework() -> None:
    process = python("""
        import sys
        from mtrain.backends.deepspeed import DeepSpeed
        assert (DeepSpeed(DeepSpeed.Options()).framework, DeepSpeed.rendezvous) == ("torch", "torch")
        assert "torch" not in sys.modules and "deepspeed" not in sys.modules
    """)
    assert process.returncode == 0, process.stderr


@pytest.mark.smoke
@pytest.mark.job
def test_without_deepspeed_there_is_one_error_with_the_command_that_installs_it() -> None:
    hide = "import importlib.util as u; original = u.find_spec\n"
    hide += "u.find_spec = lambda name, *a: None if name == 'deepspeed' else original(name, *a)\n"
    process = python(hide + textwrap.dedent(ENTER))
    message = process.stdout.strip()
    assert message.startswith(
        "PluginError 2 backend deepspeed: DeepSpeed is not installed here; install it with: pip install -e "
    ), process.stderr
    assert message.endswith("[deepspeed]'")


@pytest.mark.smoke
@pytest.mark.job
@needs_deepspeed
def test_gradients_in_float64_are_reduced_in_stage_0() -> None:
    process = python("""
        import warnings
        import torch
        from mtrain.backends._deepspeed import library
        library.load("cpu")
        warnings.simplefilter("ignore")
        from deepspeed.runtime.engine import split_half_float_double_sparse
        from mtrain.backends._deepspeed.internals import engines_in_float64
        with engines_in_float64():
            pass
        _, buckets = split_half_float_double_sparse([torch.zeros(2, dtype=torch.float64), torch.zeros(3)])
        assert sorted(tensor.numel() for _, bucket in buckets for tensor in bucket) == [2, 3]
    """)
    assert process.returncode == 0, process.stderr


@pytest.mark.smoke
@pytest.mark.job
@needs_deepspeed
def test_values_that_deepspeed_cannot_read_are_refused_in_one_sentence() -> None:
    process = python("""
        import warnings
        warnings.simplefilter("ignore")
        from mtrain.backends._deepspeed import library
        from mtrain.backends._deepspeed.settings import Sharding, settings
        from mtrain.errors import SpecError
        from tests.backends.recipes import recipe
        library.load("cpu")
        for extra in ({}, {"zero_optimization": {"overlap_comm": "banana"}}, {"wall_clock_breakdown": "x"}):
            sharding = Sharding(stage=2, offload=False, bucket_mb=1.0, reduction="update", extra=extra)
            try:
                library.check(settings(recipe(), sharding, size=1, pin_memory=False))
            except SpecError as error:
                print(error)
    """)
    assert process.stdout.splitlines() == [
        "backend.options.config: DeepSpeed refuses a value: overlap_comm: Input should be a valid boolean, unable to interpret "
        "input; give a value that DeepSpeed's documentation of its JSON lists",
        "backend.options.config: DeepSpeed refuses a value: unsupported operand type(s) for |: 'str' and 'bool'; "
        "give a value that DeepSpeed's documentation of its JSON lists",
    ], process.stderr


@pytest.mark.job
@needs_deepspeed
def test_without_a_starter_it_says_how_to_start_it() -> None:
    process = python("import warnings; warnings.simplefilter('ignore')\n" + textwrap.dedent(ENTER))
    assert process.stdout.startswith("LaunchError 1 backend deepspeed was not started by torchrun"), process.stderr


@pytest.mark.job
@needs_deepspeed
@pytest.mark.parametrize("kind", ["raises", "dies"])
def test_a_rank_that_fails_takes_the_job_down_at_once(tmp_path: Path, kind: str) -> None:
    failing = "raise RuntimeError('on purpose')" if kind == "raises" else "os._exit(9)"
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(f"""
        import os
        from mtrain.backends.deepspeed import DeepSpeed
        from tests.backends.studies import Whole, recipe, train
        from mtrain.core.collective import barrier
        with DeepSpeed(DeepSpeed.Options(device="cpu", stage=3)) as session:
            train(session, updates=1)
            model, optimizer = session.prepare(Whole, recipe())
            with optimizer.micro_batch(last=False):
                if session.collective.rank == 1:
                    {failing}
            barrier(session.collective)
    """)
    )
    process = start(2, str(script))
    assert process.returncode == 1
    assert ("on purpose" in process.stderr) is (kind == "raises")
    assert "Exception ignored" not in process.stderr


@pytest.mark.job
@needs_deepspeed
def test_ranks_end_without_a_word(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent("""
        from mtrain.backends.deepspeed import DeepSpeed
        from tests.backends.studies import train
        with DeepSpeed(DeepSpeed.Options(device="cpu", stage=3)) as session:
            train(session, updates=2)
    """)
    )
    process = start(3, str(script))
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
