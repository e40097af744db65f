"""A hand-written loop on Paddle: ``fleet.distributed_model``, ``Momentum`` with ``ClipGradByGlobalNorm``, an
average."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import paddle
from paddle.distributed import fleet

from benchmarks import job
from benchmarks.turns import BATCH, CLIP, EMA, EMA_RAMP, GROUPS, MOMENTUM, RANKS, RATE


class FleetLoop:
    """Trains YOLOv5n with SGD in three groups, on the same batches as mtrain."""

    def __init__(self, session: Any, *, channels_last: bool) -> None:
        self.inner = job.build(BATCH)
        state = self.inner.state_dict()
        values = job.start_values({name: tuple(x.shape) for name, x in state.items()}, BATCH)
        for name, tensor in state.items():
            tensor.set_value(np.asarray(values[name]))
        self.ema = {name: x.clone() for name, x in state.items() if x.dtype == paddle.float32}
        # Fleet takes no plain model on a single rank.
        alone = session.collective.size == 1
        self.model = self.inner if alone else fleet.distributed_model(self.inner)
        groups: list[list[Any]] = [[], [], []]
        for name, parameter in self.inner.named_parameters():
            groups[next(i for i, (m, _) in enumerate(GROUPS) if re.search(m, name))].append(parameter)
        optimizer = paddle.optimizer.Momentum(
            learning_rate=RATE,
            momentum=MOMENTUM,
            use_nesterov=True,
            parameters=[{"params": p, "weight_decay": d} for p, (_, d) in zip(groups, GROUPS, strict=True)],
            grad_clip=paddle.nn.ClipGradByGlobalNorm(CLIP),
        )
        self.optimizer = optimizer if alone else fleet.distributed_optimizer(optimizer)
        self.batches = job.micro_batches(BATCH // RANKS, seed=session.collective.rank)
        self.update_count = 0
        self.records: list[dict[str, float]] = []
        self.model.train()

    def updates(self, count: int) -> None:
        for _ in range(count):
            batch = {name: paddle.to_tensor(x) for name, x in next(self.batches).items()}
            losses = self.model(batch)
            losses["total"].backward()
            self.optimizer.step()
            self.optimizer.clear_grad()
            self.follow()
            self.records.append({name: float(x) for name, x in losses.items()})

    def follow(self) -> None:
        """Update the EMA, one entry at a time, as is usual."""
        self.update_count += 1
        decay = EMA * (1 - math.exp(-self.update_count / EMA_RAMP))
        live = self.inner.state_dict()
        with paddle.no_grad():
            for name, value in self.ema.items():
                self.ema[name] = value * decay + live[name] * (1 - decay)

    def weights(self) -> Mapping[str, Any]:
        return {name: p.numpy() for name, p in self.inner.named_parameters()}
