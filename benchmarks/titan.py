"""torchtitan's trainer on the CPU, for ``language_speed``: its model, FSDP2, clipping, optimizer and ``train_step``.

torchtitan (commit b5bcd76c of August 2026) has no CPU among its devices, so this sets what it lacks there, all from outside:

* ``torch.cpu`` with the functions that it asks its device for;
* ``partial_dtensor`` as its SPMD backend, of the two the one whose parameters FSDP2 takes without a larger mesh;
* plain sums of gradients, because gloo has no sum with a factor;
* attention by torch's fused kernel in rows of one document, in the place of FlexAttention, which has no backward pass on a CPU.

It needs a checkout and the packages of its ``pyproject.toml``, with triton.
"""

import dataclasses
import gc
import importlib
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional


class _Device:
    """``torch.cpu`` with what torchtitan asks of an accelerator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one."""

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def get_device_name(self, device: Any = None) -> str:
        """Return a name without a known peak."""
        return "cpu"

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Return a size of memory that nothing depends on."""
        return SimpleNamespace(total_memory=2**34, name="cpu")

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return nothing."""
        return {}

    def reset_peak_memory_stats(self, *_: Any) -> None:
        """Do nothing."""

    def empty_cache(self) -> None:
        """Do nothing."""


class _Made:
    """Stands for a configuration of which the part exists already."""

    def build(self, **_: Any) -> None:
        """Return nothing: rows come from the benchmark."""


def _imported(folder: Path) -> SimpleNamespace:
    """Import torchtitan with the CPU as its device."""
    sys.path.insert(0, str(folder))
    utils: Any = importlib.import_module("torch._utils")
    utils._get_available_device_type = lambda: "cpu"
    utils._get_device_module = lambda kind: _Device()
    names = {
        "trainer": "trainer", "llama3": "models.llama3", "module": "protocols.module", "config": "config",
        "optimizer": "components.optimizer", "loss": "components.loss", "metrics": "components.metrics",
    }  # fmt: skip
    return SimpleNamespace(**{name: importlib.import_module(f"torchtitan.{path}") for name, path in names.items()})


def _attention(titan: SimpleNamespace, length: int) -> Any:
    """Return the configuration of causal attention in rows of ``length`` tokens."""
    base: Any = titan.module.Module

    class Rows(base):  # type: ignore[misc]
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any) -> None:
            super().__init__()

        def forward(
            self, q_TNH: Any, k_TNH: Any, v_TNH: Any, *, scale: Any = None, enable_gqa: bool = False, **_: Any
        ) -> Any:
            rows = [x.reshape(-1, length, *x.shape[-2:]).transpose(1, 2) for x in (q_TNH, k_TNH, v_TNH)]
            made = functional.scaled_dot_product_attention(*rows, scale=scale, is_causal=True, enable_gqa=enable_gqa)
            return made.transpose(1, 2).reshape(q_TNH.shape)

    return Rows.Config()


def _model(titan: SimpleNamespace, config: Mapping[str, Any], length: int) -> Any:
    """Return torchtitan's description of the Llama that ``config`` of transformers describes."""
    llama, width, heads = titan.llama3, config["hidden_size"], config["num_attention_heads"]
    llama.get_attention_config = lambda backend: _attention(titan, length)
    layers = llama._build_llama3_layers(
        n_layers=config["num_hidden_layers"], dim=width, n_heads=heads, n_kv_heads=config["num_key_value_heads"],
        hidden_dim=config["intermediate_size"], attn_backend="",
        rope=llama.ComplexRoPE.Config(dim=width // heads, max_context_length=length, theta=10000, scaling="none"),
    )  # fmt: skip
    count = config["vocab_size"]
    model = llama.Llama3Model.Config(
        dim=width, vocab_size=count, layers=layers,
        tok_embeddings=llama.Embedding.Config(num_embeddings=count, embedding_dim=width, param_init=llama._EMBEDDING_INIT),
        norm=llama.RMSNorm.Config(normalized_shape=width, param_init=llama._NORM_INIT),
        lm_head=llama.Linear.Config(in_features=width, out_features=count, param_init=llama._output_linear_init(width)),
    )  # fmt: skip
    return dataclasses.replace(llama.model_registry("debugmodel"), model=model)


def _trainer(
    titan: SimpleNamespace, config: Mapping[str, Any], *, rows: int, length: int, rate: float, out: Path
) -> Any:
    settings = titan.config
    made = titan.trainer.Trainer.Config(
        model_spec=_model(titan, config, length),
        loss=titan.loss.CrossEntropyLoss.Config(global_vocab_size=config["vocab_size"]),
        optimizer=titan.optimizer.default_adamw(lr=rate, weight_decay=0.01),
        lr_scheduler=titan.optimizer.LRSchedulersContainer.Config(warmup_steps=0),
        training=settings.TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=rows * length, max_context_length=length, mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        metrics=titan.metrics.MetricsProcessor.Config(log_freq=10**6),
        parallelism=settings.ParallelismConfig(data_parallel_shard_degree=-1, spmd_backend="partial_dtensor"),
        activation_checkpoint=None,
        dump_folder=str(out),
    )  # fmt: skip
    made.tokenizer = made.dataloader = _Made()
    titan.trainer.dist_utils.init_distributed = lambda *_, **others: torch.distributed.get_world_size()
    return titan.trainer.Trainer(made)


def loop(folder: Path, config: Mapping[str, Any], source: Iterator[Mapping[str, Any]], **sizes: Any) -> Any:
    """Return a function that trains for some updates with torchtitan's loop, and returns the seconds."""
    from torch.distributed.fsdp import FSDPModule

    trainer = _trainer(_imported(folder), config, **sizes)
    gc.enable()  # the trainer switches it off for the whole process
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    def flat() -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        for batch in source:
            found = {name: torch.from_numpy(batch[name]).reshape(-1) for name in ("tokens", "positions", "labels")}
            yield {"input": found["tokens"], "positions": found["positions"]}, found["labels"]

    batches = trainer.batch_generator(flat())

    def updates(count: int) -> float:
        begun = time.perf_counter()
        for _ in range(count):
            trainer.step += 1
            trainer.train_step(batches)
        return time.perf_counter() - begun

    return updates
