"""The torch engine over DeepSpeed, which builds, saves and restores models whose arrays are split over ranks."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtrain.backends._deepspeed import internals, library
from mtrain.backends._deepspeed.settings import Sharding, settings
from mtrain.backends._deepspeed.zero import SplitStates, SplitWeights, WholeWeights, Zero, ZeroExchange, engine_of
from mtrain.backends._torch import compiling, quantising, state
from mtrain.backends._torch.collective import TorchCollective
from mtrain.backends._torch.engine import channels_last
from mtrain.backends._torch.layout import use_channels_last
from mtrain.backends._torch.optimizer import TorchOptimizer
from mtrain.backends._torch.sharded import whole_states
from mtrain.backends._torch.sharded.engine import SplitEngine
from mtrain.backends._torch.sharded.methods import gather_in_methods
from mtrain.backends._torch.sharded.optimizer import Held, PartsOptimizer
from mtrain.backends._torch.sharded.shards import Parts, find_ties, refuse_scalars
from mtrain.backends._torch.sharded.spread import Spread
from mtrain.backends.base import Check
from mtrain.core.interfaces import Array, Rates, Recipe
from mtrain.core.interfaces.capabilities import Prepared
from mtrain.core.overriding import override
from mtrain.core.update.recipe import nothing_to_train
from mtrain.errors import SpecError


class ZeroEngine(SplitEngine):
    """One rank of a job on DeepSpeed. ``prepare`` returns the model that was built, with DeepSpeed's hooks on it."""

    def __init__(self, collective: TorchCollective, target: torch.device, sharding: Sharding, *, check: Check) -> None:
        super().__init__(collective, target, check=check)
        self._sharding = sharding
        self._engines: list[tuple[Any, ZeroExchange]] = []

    @override
    def prepare(self, build: Callable[[], nn.Module], recipe: Recipe) -> tuple[nn.Module, TorchOptimizer]:
        if not recipe.trained:  # whole on every rank, without DeepSpeed
            return super().prepare(build, recipe)
        with self.returning_memory():
            return self._prepare_trained(build, recipe)

    def _prepare_trained(self, build: Callable[[], nn.Module], recipe: Recipe) -> tuple[nn.Module, TorchOptimizer]:
        self.refuse(recipe)
        if recipe.own_order and not self._takes_own_order:
            raise SpecError(
                "backend.options.reduction: micro_batch given for several models, or for overlap=False: DeepSpeed then exchanges gradients "
                "in the backward pass of one model; use update"
            )
        self._seed_start(recipe)
        sharding = self._sharding
        internals.check_version(stage=sharding.stage, reduction=sharding.reduction, precision=recipe.precision)
        config = settings(recipe, sharding, size=self.collective.size, pin_memory=self.target.type == "cuda")
        config = internals.known_settings(config, sharding.extra)
        if self._sharding.extra:
            library.check(config)
        model, recipe = self._place_model(build, recipe, config)
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
        zero.parts |= {alias: zero.parts[name] for alias, name in find_ties(model).items() if name in zero.parts}
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
        if self._sharding.stage > 0:
            # Also in stages 1 and 2: the next update overwrites whole weights that are trained with the parts of all ranks.
            whole_states.refuse(model, lambda weight, value: self._sharding.stage == 3 or weight.requires_grad)
        if self._sharding.stage == 3:
            gather_in_methods(model, nullcontext)
        compiling.attach(model, recipe)
        self._recipe = recipe
        return model, optimizer

    def _place_model(
        self, build: Callable[[], nn.Module], recipe: Recipe, config: dict[str, Any]
    ) -> tuple[nn.Module, Recipe]:
        """Return the model, and the recipe with a script's own optimizer made for it."""
        import deepspeed

        # A float64 model is split afterwards: DeepSpeed's Init would build it in float32.
        # So is a user's own module: inside Init, a parent's own initialisation would be lost.
        split_while_built = self._sharding.stage == 3 and recipe.precision != "fp64" and not recipe.own_model
        if self._sharding.stage == 3 and not split_while_built and self.collective.size > 1:
            return self._spread(build, recipe, config)
        with deepspeed.zero.Init(config_dict_or_path=config) if split_while_built else nullcontext():
            model = build()
        model = self._place(model, replace(recipe, channels_last=False))
        if recipe.channels_last and self._sharding.stage > 0:
            use_channels_last(model)
        if not split_while_built:
            refuse_scalars(model, splits="DeepSpeed")
            state.check_equal_start(model, self.collective)
        return model, self.with_own_optimizer(model, recipe)

    def _spread(
        self, build: Callable[[], nn.Module], recipe: Recipe, config: dict[str, Any]
    ) -> tuple[nn.Module, Recipe]:
        """Build a model of which each rank keeps its part, and split its weights one at a time."""
        spread = Spread(self.collective, self.target)
        with spread:
            model = self._place(build(), replace(recipe, channels_last=False))
            if recipe.channels_last:
                use_channels_last(model)
        refuse_scalars(model, splits="DeepSpeed")
        spread.check_equal_start(model)
        with spread:  # The optimizer may read weights, and choose its groups by their shapes.
            recipe = self.with_own_optimizer(model, recipe)
        spread.fill_rest(model.parameters())
        double = recipe.precision == "fp64"
        with internals.engines_in_float64() if double else nullcontext():
            library.split_weights(model, spread.fill, config)
        return model, recipe

    def _zero(self, engine: Any, model: nn.Module) -> Zero:
        rank, size = self.collective.rank, self.collective.size
        if self._sharding.stage == 0:
            return WholeWeights()
        if self._sharding.stage == 3:
            return SplitWeights(engine.optimizer, model, rank, size)
        return SplitStates(engine.optimizer, {id(p): name for name, p in model.named_parameters()}, rank, size)

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
    def release(self, optimizer: PartsOptimizer) -> None:
        assert isinstance(optimizer, ZeroOptimizer)
        optimizer.zero.release()

    @override
    def publish(self, optimizer: PartsOptimizer) -> None:
        assert isinstance(optimizer, ZeroOptimizer)
        optimizer.zero.publish()

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


class ZeroOptimizer(PartsOptimizer):
    """``core.interfaces.Optimizer`` over DeepSpeed, with the rules, clipping and average of every backend on torch."""

    def __init__(  # noqa: PLR0913 - what TorchOptimizer takes, and the stage
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        exchange: ZeroExchange,
        zero: Zero,
        parts: Parts,
        collective: TorchCollective,
        device: torch.device,
    ) -> None:
        # In stage 0 nothing is split, and a user's own optimizer gets the module itself.
        held_model = Held(model, {name: part.local for name, part in zero.parts.items()}) if zero.parts else model
        super().__init__(cast(nn.Module, held_model), recipe, exchange=exchange, collective=collective, device=device)
        self.parts = parts
        self.zero = zero
        self._zero_exchange = exchange
        if zero.parts:
            self._use_parts(zero.parts, zero.publish)

    @override
    def _differentiate(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        differentiate = self._zero_exchange.backward_alone if self._recipe.own_order else self._zero_exchange.backward
        differentiate(loss, retain_graph=retain_graph)

    @override
    def step(self, rates: Rates, evaluate: Callable[[], float] | None = None) -> float:
        norm = super().step(rates, evaluate)
        self._zero_exchange.publish()
        return norm

    @override
    def step_later(
        self, rates: Rates, numbers: Sequence[float], tensors: Sequence[Tensor]
    ) -> Callable[[], tuple[float, Array]]:
        read = super().step_later(rates, numbers, tensors)
        self._zero_exchange.publish()
        return read
