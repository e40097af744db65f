"""Hand-written loops on torch: DDP, Horovod, DeepSpeed, and the same loop on Accelerate and Lightning Fabric.

Each trains YOLOv5n with SGD in three groups, clipping and an average of the weights, on the same batches as mtrain.
"""

import copy
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import job
from benchmarks.turns import BATCH, CLIP, EMA, EMA_RAMP, GROUPS, MOMENTUM, RANKS, RATE


def network(*, channels_last: bool) -> nn.Module:
    """Build the model with mtrain's start values."""
    inner: nn.Module = job.build(BATCH)
    state = inner.state_dict()
    values = job.start_values({name: tuple(x.shape) for name, x in state.items()}, BATCH)
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(torch.from_numpy(np.asarray(values[name])))
    return (inner.to(memory_format=torch.channels_last) if channels_last else inner).train()


def sgd(inner: nn.Module) -> torch.optim.SGD:
    """Create torch's own optimizer with three groups."""
    groups: list[list[Any]] = [[], [], []]
    for name, parameter in inner.named_parameters():
        groups[next(i for i, (m, _) in enumerate(GROUPS) if re.search(m, name))].append(parameter)
    options = [{"params": p, "weight_decay": d} for p, (_, d) in zip(groups, GROUPS, strict=True)]
    return torch.optim.SGD(options, lr=RATE, momentum=MOMENTUM, nesterov=True)


class Average:
    """EMA over a ``state_dict``, one entry at a time, as is usual."""

    def __init__(self, live: nn.Module) -> None:
        self._live, self._copy, self._update_count = live, copy.deepcopy(live).eval(), 0
        for parameter in self._copy.parameters():
            parameter.requires_grad_(requires_grad=False)

    def follow(self) -> None:
        """Update the average after an update of the weights."""
        decay = next_decay(self)
        live = self._live.state_dict()
        with torch.no_grad():
            for name, value in self._copy.state_dict().items():
                if value.dtype.is_floating_point:
                    value.mul_(decay).add_(live[name], alpha=1 - decay)


class ShardAverage:
    """EMA of ZeRO-3's shards: each rank averages its own shards, and the buffers."""

    def __init__(self, live: nn.Module) -> None:
        self._update_count = 0
        shards = [p.ds_tensor for p in live.parameters()]
        self._live = [*shards, *(b for b in live.buffers() if b.dtype.is_floating_point)]
        self._copy = [x.detach().clone() for x in self._live]

    def follow(self) -> None:
        """Update the average after an update of the weights."""
        decay = next_decay(self)
        with torch.no_grad():
            for value, live in zip(self._copy, self._live, strict=True):
                value.mul_(decay).add_(live, alpha=1 - decay)


def next_decay(average: Any) -> float:
    """Count an update, and return its decay."""
    average._update_count += 1
    return EMA * (1 - math.exp(-average._update_count / EMA_RAMP))


class TorchLoop:
    """The parts that all loops share: batches, a record of every update, and the call of one update."""

    def __init__(self, session: Any, *, channels_last: bool) -> None:
        self.inner = network(channels_last=channels_last)
        self.batches: Iterator[Mapping[str, np.ndarray]] = job.micro_batches(
            BATCH // RANKS, seed=session.collective.rank
        )
        self.records: list[dict[str, float]] = []
        self.wrap()

    def wrap(self) -> None:
        """Create ``model``, ``optimizer`` and ``average``."""
        raise AssertionError("each loop has its own")

    def turn(self, batch: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Any]:
        """Run one update; return losses and the norm of the gradient."""
        raise AssertionError("each loop has its own")

    def updates(self, count: int) -> None:
        for _ in range(count):
            batch = {name: torch.from_numpy(x) for name, x in next(self.batches).items()}
            losses, norm = self.turn(batch)
            self.average.follow()
            self.records.append({name: float(x.detach()) for name, x in losses.items()} | {"norm": float(norm)})

    def whole(self) -> Any:
        """Return a context inside which parameters are whole on every rank."""
        return nullcontext()

    def weights(self) -> Mapping[str, Any]:
        with self.whole():
            return {name: p.detach().numpy().copy() for name, p in self.inner.named_parameters()}


class DDPLoop(TorchLoop):
    """``DistributedDataParallel`` with ``gradient_as_bucket_view`` and ``static_graph``."""

    def wrap(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        self.average, self.optimizer = Average(self.inner), sgd(self.inner)
        self.model = DistributedDataParallel(
            self.inner, forward_sync_buffers=False, gradient_as_bucket_view=True, static_graph=True
        )

    def turn(self, batch: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Any]:
        losses = self.model(batch)
        losses["total"].backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, norm


class HorovodLoop(TorchLoop):
    """``hvd.DistributedOptimizer``: synchronize, clip, step."""

    def wrap(self) -> None:
        import horovod.torch as hvd

        self.average, self.model = Average(self.inner), self.inner
        self.optimizer = hvd.DistributedOptimizer(sgd(self.inner), named_parameters=self.inner.named_parameters())
        hvd.broadcast_parameters(self.inner.state_dict(), root_rank=0)

    def turn(self, batch: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Any]:
        losses = self.model(batch)
        losses["total"].backward()
        self.optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, norm


def zero_config(stage: int) -> dict[str, Any]:
    """Return the configuration that a DeepSpeed user writes."""
    return {
        "train_micro_batch_size_per_gpu": BATCH // RANKS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


class DeepSpeedLoop(TorchLoop):
    """``deepspeed.initialize`` with its own defaults, except those that would replace torch's optimizer."""

    stage = 1

    def wrap(self) -> None:
        import deepspeed

        average = None if self.stage == 3 else Average(self.inner)
        self.model, *_ = deepspeed.initialize(
            model=self.inner, optimizer=sgd(self.inner), config=zero_config(self.stage)
        )
        self.average = average or ShardAverage(self.inner)

    def turn(self, batch: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Any]:
        losses = self.model(batch)
        self.model.backward(losses["total"])
        self.model.step()
        return losses, self.model.get_global_grad_norm() or 0.0

    def whole(self) -> Any:
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(self.inner.parameters())) if self.stage == 3 else nullcontext()


class DeepSpeed3Loop(DeepSpeedLoop):
    """The DeepSpeed loop with the weights split too (ZeRO-3)."""

    stage = 3


class AccelerateLoop(TorchLoop):
    """Accelerate's ``prepare``, ``backward`` and ``clip_grad_norm_``; its own defaults."""

    def options(self) -> dict[str, Any]:
        """Arguments of the ``Accelerator``."""
        return {"cpu": True}

    def wrap(self) -> None:
        from accelerate import Accelerator

        average = Average(self.inner)
        self.accelerator = Accelerator(**self.options())
        self.model, self.optimizer = self.accelerator.prepare(self.inner, sgd(self.inner))
        self.average = average

    def turn(self, batch: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Any]:
        losses = self.model(batch)
        self.accelerator.backward(losses["total"])
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, norm if norm is not None else 0.0


class AccelerateZeroLoop(AccelerateLoop):
    """Accelerate with its DeepSpeed plugin, stage 1."""

    def options(self) -> dict[str, Any]:
        from accelerate import DeepSpeedPlugin, InitProcessGroupKwargs

        # With cpu=True Accelerate would silently leave DeepSpeed out and use DDP.
        return {
            "deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=zero_config(1)),
            "kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")],
        }

    def wrap(self) -> None:
        from deepspeed import DeepSpeedEngine

        super().wrap()
        if not isinstance(self.model, DeepSpeedEngine):
            raise TypeError(f"Accelerate made {type(self.model).__name__} of the model, expected DeepSpeed's engine")


class FabricLoop(TorchLoop):
    """Lightning Fabric's ``setup``, ``backward`` and ``clip_gradients``; its own defaults."""

    def wrap(self) -> None:
        from lightning_fabric import Fabric

        self.average = Average(self.inner)
        self.fabric = Fabric(accelerator="cpu", strategy="ddp", devices=RANKS)
        self.fabric.launch()
        self.model, self.optimizer = self.fabric.setup(self.inner, sgd(self.inner))

    def turn(self, batch: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Any]:
        losses = self.model(batch)
        self.fabric.backward(losses["total"])
        norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, norm
