"""Accelerate's YAML and DeepSpeed's JSON become specs of scripts, key by key, and `auto` is left to the spec or the script."""

import json
import re
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.errors import SpecError
from mtrain.spec import config
from mtrain.spec.importers.conversion import convert

ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "MULTI_GPU", "downcast_bf16": "no", "gpu_ids": "0, 2",
    "machine_rank": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29501, "main_training_function": "main",
    "mixed_precision": "bf16", "num_machines": 2, "num_processes": 4, "rdzv_backend": "static", "same_network": True, "use_cpu": False,
}  # fmt: skip
DEEPSPEED = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": False, "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7, "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "warmup_min_lr": 0, "total_num_steps": 100}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "none"},
        "overlap_comm": True, "sub_group_size": "auto", "reduce_bucket_size": 5e8,
    },
    "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 50,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def spec_of(values: dict, name: str = "ds.json"):
    Path(name).write_text(json.dumps(values, indent="\t"))  # JSON is YAML but for tabs
    imported = convert([Path(name)])
    Path("imported.yml").write_text(imported.text)
    return config.load("imported.yml", environ={}).spec, imported


def test_keys_of_accelerate_become_those_of_the_job():
    spec, _ = spec_of(ACCELERATE, "default_config.yaml".replace("yaml", "json"))
    cluster = spec.cluster
    assert spec.backend.name == "ddp"
    assert (cluster.nproc_per_node, cluster.nodes, cluster.node_rank) == (2, 2, 1), (
        "Accelerate counts the processes of all machines"
    )
    assert (cluster.master_addr, cluster.master_port, cluster.devices) == ("10.0.0.1", 29501, [0, 2])
    assert spec.train.precision == "bf16"
    alone, _ = spec_of(
        {"distributed_type": "NO", "num_processes": 3, "use_cpu": True, "mixed_precision": "no"}, "a.json"
    )
    assert (alone.cluster.nproc_per_node, alone.cluster.node_rank, alone.backend.options) == (
        3,
        None,
        {"device": "cpu"},
    )
    assert alone.train.precision == "fp32"


def test_fsdp_of_accelerate_and_its_mesh():
    keys = {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_activation_checkpointing": True, "fsdp_offload_params": True,
        "fsdp_sharding_strategy": "FULL_SHARD",
    }  # fmt: skip
    mesh = {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
        "parallelism_config_tp_size": 1,
    }
    spec, imported = spec_of({"distributed_type": "FSDP", "fsdp_config": keys, "parallelism_config": mesh}, "a.json")
    assert (spec.backend.name, spec.backend.options, spec.train.recompute) == ("fsdp", {"unit": "blocks"}, True)
    assert (spec.parallel.replicate, spec.parallel.shard, spec.parallel.tensor) == (2, 2, 1)
    assert [entry.key for entry in imported.dropped] == ["fsdp_config.fsdp_offload_params"]


def test_keys_of_deepspeed_become_those_of_the_job_and_auto_is_left_open():
    spec, imported = spec_of(DEEPSPEED)
    assert spec.backend.name == "deepspeed"
    assert spec.backend.options == {
        "stage": 3, "offload": True, "config": {"zero_optimization": {"overlap_comm": True}, "steps_per_print": 50}
    }  # fmt: skip
    train, optimizer, schedule = spec.train, spec.optimizer, spec.schedule
    assert (train.precision, train.accumulate, train.max_micro_batch, train.clip_norm, train.updates) == (
        "bf16",
        2,
        4,
        0.5,
        100,
    )
    assert (optimizer.rule, optimizer.learning_rate, optimizer.momentum, optimizer.beta2) == ("adamw", 3e-4, 0.9, 0.95)
    assert (schedule.name, schedule.final_factor, schedule.warmup.updates, schedule.warmup.before_curve) == (
        "linear",
        0.0,
        10,
        True,
    )
    assert "train.batch_size" not in imported.text, "auto"
    assert "optimizer.weight_decay" not in imported.text, "auto"
    dropped = {entry.key: entry.remark for entry in imported.dropped}
    assert set(dropped) == {
        "fp16.loss_scale", "zero_optimization.offload_optimizer.pin_memory", "zero_optimization.sub_group_size",
        "zero_optimization.reduce_bucket_size",
    }  # fmt: skip
    assert "backend.options.bucket_mb" in dropped["zero_optimization.reduce_bucket_size"]
    assert any("warmup_type is log" in note for note in imported.notes)
    off, _ = spec_of({"train_batch_size": 32, "gradient_clipping": 0})
    assert (off.train.batch_size, off.train.clip_norm, off.train.precision) == (32, None, "fp32")
    assert off.backend.options == {"stage": 0}, "ZeRO is off where nothing is said of it"


def test_an_override_of_a_section_that_a_spec_has_too_is_one_of_the_spec():
    Path("ds.json").write_text(json.dumps(DEEPSPEED))
    imported = convert([Path("ds.json")], overrides=["optimizer.rule=lion", "gradient_clipping=2"])
    assert "rule: lion " in imported.text
    assert "clip_norm: 2 " in imported.text


def test_accelerate_names_the_file_of_deepspeed_or_has_its_keys():
    Path("conf").mkdir()
    Path("conf/zero.json").write_text(json.dumps(DEEPSPEED))
    named = {
        "distributed_type": "DEEPSPEED",
        "num_processes": 2,
        "deepspeed_config": {"deepspeed_config_file": "zero.json"},
    }
    spec, _ = spec_of(named, "conf/acc.json")
    assert (spec.backend.options["stage"], spec.cluster.nproc_per_node) == (3, 2)
    keys = {
        "zero_stage": 2,
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": 4,
        "offload_optimizer_device": "none",
    }
    spec, _ = spec_of({"distributed_type": "DEEPSPEED", "mixed_precision": "fp16", "deepspeed_config": keys}, "a.json")
    assert (spec.backend.options, spec.train.clip_norm, spec.train.accumulate, spec.train.precision) == (
        {"stage": 2},
        1.0,
        4,
        "fp16",
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"distributed_type": "MEGATRON_LM"}, r"distributed_type: given MEGATRON_LM, expected one of NO, MULTI_GPU"),
        (
            {"distributed_type": "NO", "mixed_precision": "fp8"},
            r"mixed_precision: given fp8, expected one of no, bf16, fp16",
        ),
        (
            {"distributed_type": "MULTI_GPU", "num_machines": 2, "num_processes": 3},
            r"num_processes: given 3, expected as many",
        ),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, r"compute_environment: given AMAZON_SAGEMAKER"),
        (
            {"train_batch_size": 8, "optimizer": {"type": "OneBitAdam"}},
            r"optimizer\.type: given OneBitAdam, expected one of Adam, AdamW",
        ),
        ({"train_batch_size": 8, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, r"but bf16 is enabled too"),
        ({"train_batch_size": "many"}, r"train_batch_size: train\.batch_size: given 'many'"),
        ({"train_batch_size": 8, "zero_optimization": {"stage": 7}}, r"backend\.options"),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "gone.json"}},
            r"gone\.json: no such file",
        ),
    ],
)
def test_what_has_no_counterpart_and_would_train_otherwise_is_refused(values, message):
    with pytest.raises(SpecError, match=message):
        spec_of(values, "bad.json")


def test_a_script_runs_with_such_a_file_and_a_training_without_a_script_is_refused(capsys):
    Path("acc.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nmixed_precision: bf16\n")
    Path("train.py").write_text("import mtrain\n")
    for flags in (["--accelerate-config", "acc.yaml"], ["--config_file", "acc.yaml"], ["-c", "acc.yaml"]):
        assert main(["run", *flags, "--dry-run", "train.py"]) == 0
        told = capsys.readouterr()
        assert re.search(r"ranks +3 \(1 host x 3\)", told.out)
        assert re.search(r"precision +bf16", told.out)
        assert "imported from acc.yaml: 3 keys carried over" in told.err
    assert main(["train", "-c", "acc.yaml"]) == 2
    assert "acc.yaml: is a file that says where a script runs" in capsys.readouterr().err
    assert main(["run", "-c", "acc.yaml", "--accelerate-config", "acc.yaml", "train.py"]) == 2
    assert "are both given; keep one" in capsys.readouterr().err
    assert main(["run", "-c", "", "train.py"]) == 2
    assert capsys.readouterr().err.startswith("error: : no such file")


def test_what_accelerate_states_stands_where_the_file_of_deepspeed_says_nothing():
    Path("zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    stated = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "zero.json"}}
    assert spec_of({**stated, "mixed_precision": "bf16"}, "acc.json")[0].train.precision == "bf16"
    assert spec_of(stated, "acc.json")[0].train.precision == "fp32"


@pytest.mark.parametrize("section", ["zero_optimization", "bf16", "fp16", "optimizer", "scheduler"])
def test_a_section_that_is_none_is_refused(section):
    with pytest.raises(SpecError, match=rf"{section}: given 3, expected `key: value` lines"):
        spec_of({"train_batch_size": 8, section: 3})


def test_a_cosine_ends_where_deepspeeds_ends():
    def end(**parameters):
        return spec_of({"train_batch_size": 8, "scheduler": {"type": "WarmupCosineLR", "params": parameters}})[
            0
        ].schedule

    assert (end().final_factor, end(cos_min_ratio=0.1).final_factor) == (0.0001, 0.1)


def test_devices_and_a_batch_that_are_not_known_are_told():
    assert [entry.key for entry in spec_of({"distributed_type": "NO", "gpu_ids": "cuda:1"})[1].dropped] == ["gpu_ids"]
    _, imported = spec_of({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})
    assert imported.notes[0].startswith("train.batch_size: not stated")
