"""The torch engine over DeepSpeed, which builds, saves and restores models whose arrays are split over ranks."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mtrain.backends._deepspeed import internals, library
from mtrain.backends._deepspeed.optimizer import ZeroOptimizer
from mtrain.backends._deepspeed.settings import Sharding, settings
from mtrain.backends._deepspeed.zero import SplitStates, SplitWeights, WholeWeights, Zero, ZeroExchange, engine_of
from mtrain.backends._torch import native, quantising, state
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.engine import TorchEngine, channels_last
from mtrain.backends._torch.layout import use_channels_last
from mtrain.backends._torch.optimizer import TorchOptimizer
from mtrain.backends._torch.shards import Parts, tied
from mtrain.backends.base import Check
from mtrain.core import state_checks
from mtrain.core.interfaces import Array, Recipe, State
from mtrain.core.interfaces.capabilities import Prepared
from mtrain.core.overriding import override
from mtrain.core.quantising import fitted
from mtrain.core.recipe import nothing_to_train
from mtrain.errors import SpecError


class ZeroEngine(TorchEngine):
    """One rank of a job on DeepSpeed. ``prepare`` returns the model that was built, with DeepSpeed's hooks on it."""

    def __init__(self, collective: TorchCollective, target: torch.device, sharding: Sharding, *, check: Check) -> None:
        super().__init__(collective, target, check=check)
        self._sharding = sharding
        self._engines: list[tuple[Any, ZeroExchange]] = []

    @override
    def prepare(self, build: Callable[[], nn.Module], recipe: Recipe) -> tuple[nn.Module, TorchOptimizer]:
        if not recipe.trained:  # whole on every rank, without DeepSpeed
            return super().prepare(build, recipe)
        self.refuse(recipe)
        if recipe.own_order and not self._takes_own_order:
            raise SpecError(
                "backend.options.reduction: micro_batch given for several models, or for overlap=False: DeepSpeed then exchanges gradients "
                "in the backward pass of one model; use update"
            )
        self._seed_start(recipe)
        config = settings(recipe, self._sharding, size=self.collective.size, pin_memory=self.target.type == "cuda")
        if self._sharding.extra:
            library.check(config)
        model = self._placed(build, recipe, config)
        recipe = native.made(recipe, model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise SpecError(nothing_to_train(recipe))
        double = recipe.precision == "fp64"
        with internals.engines_in_float64() if double else nullcontext():
            engine = engine_of(model, list(trained.values()), config)
        if recipe.channels_last and self._sharding.stage == 0:
            # Only now: the broadcast in DeepSpeed's initialisation accepts contiguous weights only.
            channels_last(model)
        model.train()
        zero = self._zero(engine, model)
        zero.parts |= {alias: zero.parts[name] for alias, name in tied(model).items() if name in zero.parts}
        parts = Parts(zero.parts, self.collective, bucket=config["zero_optimization"]["reduce_bucket_size"])
        exchange = ZeroExchange(engine, zero, trained, self.collective, self._sharding.reduction)
        self._engines.append((engine, exchange))
        optimizer = ZeroOptimizer(
            model, recipe, exchange=exchange, zero=zero, parts=parts, collective=self.collective, device=self.target
        )
        # States that are in host memory cannot wait for a norm that is on the device.
        self.late = self._wants_late() and optimizer.can_be_late and not self._sharding.offload
        if self.late and self._sharding.stage == 3:
            internals.leave_norm_out(engine)
        optimizer.follow_ranges(quantising.ranges(model, recipe, self.collective))
        if recipe.compile:
            model.compile()
        self._recipe = recipe
        return model, optimizer

    def _placed(self, build: Callable[[], nn.Module], recipe: Recipe, config: dict[str, Any]) -> nn.Module:
        import deepspeed

        # A float64 model is built whole and split afterwards: DeepSpeed's Init would build it in float32.
        # So is a user's own module: inside Init, a parent's own initialisation would be lost.
        split_while_built = self._sharding.stage == 3 and recipe.precision != "fp64" and not recipe.own_model
        with deepspeed.zero.Init(config_dict_or_path=config) if split_while_built else nullcontext():
            model = build()
        model = self._place(model, replace(recipe, channels_last=False))
        if recipe.channels_last and self._sharding.stage > 0:
            use_channels_last(model)
        if not split_while_built:
            state.check_equal_start(model, self.collective)
        return model

    def _zero(self, engine: Any, model: nn.Module) -> Zero:
        rank, size = self.collective.rank, self.collective.size
        if self._sharding.stage == 0:
            return WholeWeights()
        if self._sharding.stage == 3:
            return SplitWeights(engine.optimizer, model, rank, size)
        return SplitStates(engine.optimizer, {id(p): name for name, p in model.named_parameters()}, rank, size)

    @override
    def state(self, model: nn.Module, optimizer: TorchOptimizer) -> State:
        if not isinstance(optimizer, ZeroOptimizer):
            return super().state(model, optimizer)
        optimizer.settle()
        parts, ema = optimizer.parts, optimizer.ema()
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.collective.broadcast_([*model.buffers(), *(x for name, x in ema.items() if name not in parameters)])
        tensors = {name: parts[name].local if name in parts else x for name, x in model.state_dict().items()}
        moments = optimizer.moments()
        return State(
            weights=self._arrays(tensors, parts),
            ema=self._arrays(ema, parts),
            moments={
                f"{moment}/{name}": array
                for moment in dict.fromkeys(key.partition("/")[0] for key in moments)
                for name, array in self._arrays(_of_moment(moments, moment), parts).items()
            },
            counters=optimizer.counters(),
        )

    def _arrays(self, tensors: Mapping[str, Tensor], parts: Parts) -> dict[str, Array]:
        """Return whole arrays in the order of ``tensors``, gathering those that are split; every rank must call."""
        # Numbers, such as an optimizer's count of updates, are equal on all ranks.
        split = {name: tensor for name, tensor in tensors.items() if name in parts and tensor.dim() > 0}
        split_arrays = {name: state.to_numpy(whole) for name, whole in parts.whole(split, self.target)}
        return {
            name: split_arrays[name] if name in split_arrays else state.to_numpy(tensor)
            for name, tensor in tensors.items()
        }

    @override
    def restore(self, model: nn.Module, optimizer: TorchOptimizer, saved: State) -> None:
        if not isinstance(optimizer, ZeroOptimizer):
            super().restore(model, optimizer, saved)
            return
        optimizer.settle()
        parts, zero = optimizer.parts, optimizer.zero
        saved = fitted(saved, model.state_dict())
        if saved.weights:
            if self.collective.size > 1:
                # Each rank keeps only its part, so arrays that differ between ranks could not be noticed afterwards.
                ordered = {name: np.ascontiguousarray(saved.weights[name]) for name in sorted(saved.weights)}
                state_checks.check_equal_start(self.collective, state_checks.fingerprint(ordered))
            zero.release()
            tensors = {name: parts[name].local if name in parts else x for name, x in model.state_dict().items()}
            self._fill(tensors, parts, saved.weights, what="weights")
            zero.publish()
            optimizer.ranges_restored()
        if saved.ema and optimizer.ema():
            self._fill(optimizer.ema(), parts, saved.ema, what="averaged weights")
        else:
            optimizer.restart_ema()
        if saved.moments:
            optimizer.expect_moments(saved.moments)
            moments = optimizer.moments()
            names = {key: key.partition("/")[2] for key in moments}
            self._fill(moments, parts, saved.moments, what="optimizer moments", names=names)
        if saved.counters:
            optimizer.set_counters(saved.counters)

    @torch.no_grad()
    def _fill(
        self,
        targets: Mapping[str, Tensor],
        parts: Parts,
        values: Mapping[str, Array],
        *,
        what: str,
        names: Mapping[str, str] | None = None,
    ) -> None:
        """Copy whole arrays ``values`` into ``targets``, taking this rank's part where a target is split.

        Args:
            targets: Tensors to fill, by the same keys as ``values``.
            parts: The arrays that are split, by name of the weight.
            values: Whole arrays.
            what: What the arrays are, for the error message.
            names: Maps a key to the name of its weight; None: the keys are names.

        Raises:
            CheckpointError: Names or shapes differ.
        """
        names_by_key = {key: key if names is None else names[key] for key in targets}
        split = {key for key, x in targets.items() if names_by_key[key] in parts and x.dim() > 0}
        shapes = {key: parts[names_by_key[key]].shape if key in split else tuple(x.shape) for key, x in targets.items()}
        state_checks.check_fit(shapes, values, what=what)
        for key, target in targets.items():
            whole = torch.from_numpy(np.array(values[key]))
            target.copy_(parts.cut(names_by_key[key], whole) if key in split else whole)

    @override
    def held_weights(self, prepared: Prepared, *, whole: bool = False) -> Iterator[tuple[str, Tensor]]:
        model, optimizer = prepared
        if self._sharding.stage < 3 or not isinstance(optimizer, ZeroOptimizer):
            return super().held_weights(prepared)
        held = {name: optimizer.parts[name].local for name, _ in model.named_parameters()}
        return optimizer.parts.whole(held, self.target)

    @property
    @override
    def _takes_own_order(self) -> bool:
        return self._sharding.reduction == "update"

    @override
    def close(self) -> None:
        """Drop DeepSpeed's engines and all process groups. The models cannot train afterwards."""
        for engine, exchange in self._engines:
            exchange.abandon()
            internals.dissolve(engine)
        self._engines.clear()
        # Hooks and engines refer to each other. Until the collector frees them, a process group keeps its threads.
        gc.collect()
        super().close()


def _of_moment(moments: Mapping[str, Tensor], moment: str) -> dict[str, Tensor]:
    """Select the tensors of one moment, by name of the parameter."""
    return {key.partition("/")[2]: x for key, x in moments.items() if key.startswith(f"{moment}/")}
