"""Jobs on meshes through the real command line: they learn what one rank learns, and any backend goes on with them."""

from pathlib import Path

import pytest
from tests.meshes.mesh_jobs import MESHES, largest_difference, learned, prepare, train

from mtrain_kit import training
from tests.own_model.runs import command, losses, refused
from tests.starts import starts_processes

OTHERS = [mesh for mesh in MESHES if mesh not in ("one rank", "pipeline 3", "pipeline 4")]
"""Meshes for models of two blocks."""


@pytest.fixture(scope="module")
@starts_processes
def folder(tmp_path_factory) -> Path:
    """A folder with texts and specs of 8 updates, and the run ``one`` of Qwen3 on one rank."""
    here = tmp_path_factory.mktemp("meshes")
    prepare(here, updates=8)
    train(here, "one", "qwen3", "one rank")
    return here


@pytest.mark.smoke
def test_a_tensor_group_learns_what_one_rank_learns(folder, monkeypatch):
    """Weights, averages and moments; with clipping, accumulation, groups of weight decay and an average."""
    monkeypatch.setenv("MESH_WIDTHS", str(folder / "widths"))
    summary = train(folder, "tensor", "qwen3", "tensor 2", "-o", "train.accumulate=3")
    assert summary["ranks"] == 2
    widths = (folder / "widths").read_text().split()
    assert (widths[0], widths[-1]) == ("64", "32"), "computed whole before it is shared, and then by halves"
    difference = largest_difference(learned(folder, "one"), learned(folder, "tensor"))
    print(f"tensor 2, 8 updates: largest difference {difference:.1e}")
    assert 0 < difference <= 1e-12


@pytest.mark.parametrize("config", ["gemma2", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_a_layer_with_a_buffer_of_its_own_is_shared(folder, config):
    """Gemma's embedding is multiplied by a buffer, which is no array of a checkpoint."""
    train(folder, f"{config}-one", config, "one rank")
    train(folder, f"{config}-tensor", config, "tensor 2")
    difference = largest_difference(learned(folder, f"{config}-one"), learned(folder, f"{config}-tensor"))
    print(f"{config} on tensor 2, 8 updates: largest difference {difference:.1e}")
    assert 0 < difference <= 1e-12


@pytest.mark.smoke
def test_stages_learn_what_one_rank_learns(folder):
    """Weights, averages and moments; each stage sends hidden states to the next one, and gradients back."""
    summary = train(folder, "stages", "qwen3", "pipeline 2", "-o", "train.accumulate=3")
    assert summary["ranks"] == 2
    difference = largest_difference(learned(folder, "one"), learned(folder, "stages"))
    worst = max(abs(a - b) for a, b in zip(losses(folder, "one"), losses(folder, "stages"), strict=True))
    print(f"pipeline 2, 8 updates: largest difference {difference:.1e}, of losses {worst:.1e}")
    assert difference <= 1e-12
    assert worst <= 1e-12


def test_a_mesh_that_does_not_fit_is_refused_before_ranks_start(folder):
    words = ["plan", "-c", "qwen3.yml", "--devices", "cpu"]
    three = [*words, "--backend", "fsdp", "--nproc-per-node", "3"]
    assert "start 2 or 4 ranks" in refused(folder, *three, "-o", "parallel.tensor=2")
    assert "expected 4: start that many" in refused(folder, *three, "-o", "parallel={shard: 2, tensor: 2}")
    assert "the model has 2 blocks" in refused(folder, *three, "-o", "parallel.pipeline=3")
    assert "start 2 or 4 ranks" in refused(folder, *three, "-o", "parallel.pipeline=2")
    several = ["--backend", "fsdp", "--ips", "a,b", "--nproc-per-node", "3", "-o", "parallel.tensor=2"]
    assert "a host of 3 ranks, so a tensor group would lie on two hosts" in refused(folder, *words, *several)
    assert "parallel.plan" in refused(folder, *words, "--backend", "fsdp", "-o", "parallel.plan={a: colwise}")
    elastic = [
        "--backend",
        "fsdp",
        "--ips",
        "a,b",
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "2",
        "-o",
        "parallel.tensor=2",
    ]
    assert "the ranks of a mesh stay the same" in refused(folder, *words, *elastic)


@pytest.mark.parametrize("backend", ["ddp", "deepspeed", "horovod", "solo"])
def test_other_backends_refuse_a_mesh(folder, backend):
    ranks = "1" if backend == "solo" else "2"
    mesh = "parallel.shard=1" if backend == "solo" else "parallel.tensor=2"
    said = refused(
        folder, "plan", "-c", "qwen3.yml", "--devices", "cpu", "-b", backend, "--nproc-per-node", ranks, "-o", mesh
    )
    assert f"parallel: given with backend {backend}" in said
    assert (
        f"use --backend fsdp, or leave it out: -o {'parallel.shard=null' if backend == 'solo' else 'parallel.tensor=1'}"
        in said
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "words", "reason"),
    [
        pytest.param("gpt2", ["parallel.tensor=2"], "GPT2LMHeadModel has no plan of its own", marks=pytest.mark.smoke),
        ("gpt2", ["parallel.tensor=2", "parallel.plan={transformer.h.*.attn.c_attn: colwise}"], "does not compute what it"),
        (
            "gpt2",
            ["parallel.pipeline=2", "parallel.tensor=2", "parallel.plan={transformer.h.*.attn.c_attn: colwise}"],
            "in stages the model does not compute what it computes whole",
        ),
        ("qwen3", ["parallel.tensor=2", "parallel.plan={layers.*.mlp.up: colwise}"], "is the name of no layer"),
        ("tied", ["parallel.tensor=2", "parallel.plan={lm_head: rowwise}"], "have one weight, and are not shared alike"),
        ("qwen3", ["parallel.tensor=3", "train.accumulate=1"], "4 heads (num_attention_heads)"),
        ("qwen3", ["parallel.tensor=2", "parallel.sequence=true", "data.length=25"], "texts of 25 tokens do not divide"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_shared_are_refused_at_the_start(folder, config, words, reason):
    ranks = "3" if "parallel.tensor=3" in words else "4" if "parallel.pipeline=2" in words else "2"
    start = ["train", "-c", f"{config}.yml", "--devices", "cpu", "--backend", "fsdp", "--nproc-per-node", ranks]
    said = refused(folder, *start, *[word for value in words for word in ("-o", value)])
    assert reason in said


@pytest.fixture(scope="module")
def longer(tmp_path_factory) -> Path:
    """A folder with texts and specs of 50 updates."""
    here = tmp_path_factory.mktemp("longer")
    prepare(here, updates=50)
    return here


def _of_one_rank(here: Path, config: str) -> str:
    """Return the name of a run of a configuration on one rank, which is trained once."""
    name = f"{config} one".replace(" ", "-")
    if not (here / "runs" / name).exists():
        train(here, name, config, "one rank")
    return name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        *(("llama", mesh) for mesh in OTHERS),
        *((config, mesh) for config in ("qwen3", "tied", "gpt2") for mesh in ("tensor 2", "shard 2 x tensor 2")),
        *((config, "pipeline 2") for config in ("qwen3", "tied", "gpt2", "lora")),
        ("tied", "pipeline 2 x tensor 2"),
        ("qwen3", "shard 2 x tensor 2, sequence"),
        ("tied", "tensor 2, sequence"),
        ("gpt2", "replicate 2 x shard 2"),
        ("lora", "tensor 2"),
        ("lora", "tensor 2, sequence"),
        ("lora", "shard 2 x tensor 2"),
    ],
)
def test_after_fifty_updates_every_mesh_has_the_state_of_one_rank(longer, config, mesh):
    name = f"{config} {mesh}".replace(" ", "-").replace(",", "")
    train(longer, name, config, mesh, "-o", "train.accumulate=3")
    one = _of_one_rank(longer, config)
    difference = largest_difference(learned(longer, one), learned(longer, name))
    worst = max(abs(a - b) for a, b in zip(losses(longer, one), losses(longer, name), strict=True))
    print(f"{config} on {mesh}: state {difference:.1e}, losses {worst:.1e}")
    assert difference <= 1e-12
    assert worst <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "mesh", "passes"),
    [
        ("4 blocks", "pipeline 4", 6),
        ("4 blocks", "pipeline 4", 3),
        ("5 blocks", "pipeline 4", 4),
        ("5 blocks", "pipeline 3", 6),
    ],
)
def test_after_fifty_updates_many_stages_have_the_state_of_one_rank(longer, config, mesh, passes):
    """Three micro batches on four stages go by GPipe; five blocks do not divide among three or four stages."""
    one, name = _of_one_rank(longer, config), f"{config} {mesh} {passes}".replace(" ", "-")
    train(longer, name, config, mesh, "-o", f"train.accumulate={passes}")
    difference = largest_difference(learned(longer, one), learned(longer, name))
    worst = max(abs(a - b) for a, b in zip(losses(longer, one), losses(longer, name), strict=True))
    print(f"{config} on {mesh}, {passes} micro batches: state {difference:.1e}, losses {worst:.1e}")
    assert difference <= 1e-12
    assert worst <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("pipeline 2", "pipeline 4"), ("pipeline 4", "pipeline 2")])
def test_a_checkpoint_of_stages_is_resumed_on_more_and_on_fewer(folder, first, then):
    one, name = _of_one_rank(folder, "4 blocks"), f"4 blocks {first} {then}".replace(" ", "-")
    train(folder, name, "4 blocks", first, "-o", "train.updates=4", "-o", "train.accumulate=4")
    train(folder, name, "4 blocks", then, "--resume", f"runs/{name}", "-o", "train.updates=8")
    difference = largest_difference(learned(folder, one), learned(folder, name))
    print(f"{first}, then {then}: {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp 2", "shard 2 x tensor 2"])
def test_what_is_gathered_at_a_time_changes_no_bit(folder, mesh):
    """Weights, averages and moments, with clipping and accumulation."""
    states = {}
    for unit in ("blocks", "children", "model"):
        name = f"{mesh}-{unit}".replace(" ", "-")
        train(folder, name, "llama", mesh, "-o", "train.accumulate=3", "-o", f"backend.options.unit={unit}")
        states[unit] = learned(folder, name)
    assert largest_difference(states["blocks"], states["children"]) == 0
    assert largest_difference(states["blocks"], states["model"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("config", ["llama", "qwen3", "gpt2"])
def test_a_mesh_is_as_far_from_one_rank_as_training_carries_a_rounding_error(longer, monkeypatch, config):
    """The yardstick is one rank again, whose weights begin one unit in the last place higher or lower."""
    words = ["-o", "optimizer.learning_rate=0.01"]
    runs = {of: f"{config}-fast-{of}" for of in ("one", "tensor", "nudged")}
    train(longer, runs["one"], config, "one rank", *words)
    train(longer, runs["tensor"], config, "tensor 2", "-o", "train.accumulate=3", *words)
    monkeypatch.setenv("MESH_NUDGE", "1")
    train(longer, runs["nudged"], config, "one rank", *words)
    expected = learned(longer, runs["one"])
    apart, grown = (largest_difference(expected, learned(longer, runs[of])) for of in ("tensor", "nudged"))
    print(f"{config} at 0.01: tensor 2 {apart:.1e}, nudged {grown:.1e}")
    assert grown > 0
    assert apart <= 10 * grown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        *(
            ("shard 2 x tensor 2", mesh)
            for mesh in ("one rank", "ddp 2", "ZeRO-3", "tensor 2", "replicate 2 x shard 2")
        ),
        *((mesh, "shard 2 x tensor 2") for mesh in ("one rank", "ddp 2", "ZeRO-3")),
        *(("pipeline 2", mesh) for mesh in ("one rank", "ddp 2", "ZeRO-3", "pipeline 2")),
        *((mesh, "pipeline 2") for mesh in ("one rank", "ZeRO-3")),
    ],
)
def test_a_checkpoint_of_any_mesh_is_resumed_on_any_other(folder, first, then):
    name = f"{first} then {then}".replace(" ", "-")
    train(folder, name, "qwen3", first, "-o", "train.updates=4")
    train(folder, name, "qwen3", then, "--resume", f"runs/{name}", "-o", "train.updates=8")
    difference = largest_difference(learned(folder, "one"), learned(folder, name))
    print(f"{first}, then {then}: {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "config", "mesh"),
    [
        ("loss", "qwen3", "tensor 2"),
        ("bias", "gpt2", "tensor 2"),
        ("norm", "qwen3", "tensor 2"),
        ("average", "qwen3", "tensor 2"),
        ("ties", "tied", "tensor 2"),
        ("vocabulary", "tied", "tensor 2"),
        ("norm of one stage", "qwen3", "pipeline 2"),
        ("whole loss", "qwen3", "pipeline 2"),
        ("ties of one stage", "tied", "pipeline 2"),
    ],
)
def test_a_planted_fault_is_seen(folder, monkeypatch, fault, config, mesh):
    one = _of_one_rank(folder, config)
    monkeypatch.setenv("MESH_FAULT", fault)
    train(folder, f"fault-{fault}", config, mesh, "-o", "train.accumulate=3")
    expected, found = learned(folder, one), learned(folder, f"fault-{fault}")
    apart = training.differences(expected, found)
    print(f"{fault}: {max(apart.values()):.1e}")
    assert max(apart.values()) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("key", ["tensor", "pipeline"])
def test_compare_finds_that_a_mesh_trains_as_one_rank_does(folder, key):
    """On two ranks each; a key with a dot is of one backend alone."""
    words = ["-c", "qwen3.yml", "--backends", f"ddp,fsdp:parallel.{key}=2", "--updates", "3", "--rounds", "0"]
    result = command(folder, "compare", *words, timeout_s=600)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_evaluation_counts_each_text_once(folder):
    """Ranks of a tensor group have the same samples; metrics are those of one rank."""
    words = ["-o", "evaluate.every_updates=4", "-o", "train.updates=4", "-o", "evaluate.batch_size=5"]
    one = train(folder, "scored-one", "qwen3", "one rank", *words)
    four = train(folder, "scored-four", "qwen3", "shard 2 x tensor 2", *words)
    stages = train(folder, "scored-stages", "qwen3", "pipeline 2", *words)
    assert stages["best"] == pytest.approx(one["best"], abs=1e-12)
    assert four["best"] == pytest.approx(one["best"], abs=1e-12)
    result = command(folder, "evaluate", "runs/scored-four")
    assert result.returncode == 0, result.stdout + result.stderr
