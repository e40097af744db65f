"""The plugin ``layers`` of the group ``mtrain.meshes``: how a model lies on a mesh that shares its layers or has stages."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mtrain.backends._fsdp.engine import FsdpEngine, FsdpExchange
from mtrain.backends._fsdp.layout import MeshLayout
from mtrain.backends._fsdp.sharding import OwnParts, shard_unit
from mtrain.core.interfaces import Mesh, Recipe
from mtrain.core.overriding import override
from mtrain_language.meshes import tensor_random, tensor_styles
from mtrain_language.meshes.pipeline import Pipeline, Stage
from mtrain_language.meshes.stages import divide, keep, retie
from mtrain_language.meshes.tensor import share_layers, whole_plan


class Layers:
    """How the layers of a model are shared by tensor groups, and divided into stages."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        """Look at a model before its weights are cut, as long as they are there; every rank must call.

        Raises:
            SpecError: The layers cannot be shared, or the model cannot be divided into stages.
        """
        self._model, self._summed = model, list[str]()
        self._plan = whole_plan(model, mesh) if mesh.tensor > 1 else {}
        length = tensor_styles.short_length(mesh.tensor)
        self._division = divide(model, mesh.pipeline, length=length) if mesh.pipeline > 1 else None
        self.expected: Tensor | None = None
        """What the model computes, with which what its parts compute is compared."""
        if self._division is not None:
            self.expected = self._division.output
        elif self._plan:
            self.expected = tensor_styles.output_of(model, length=length)
        self.holders = None if self._division is None else self._division.holders
        """Parameter -> the stages that hold it; None: there is one stage."""

    def share(self, layout: MeshLayout) -> None:
        """Leave this rank its part of the layers that its group shares, in place; weights are without values."""
        if self._plan:
            self._summed = share_layers(self._model, self._plan, layout)

    def exchange(
        self, engine: FsdpEngine, layout: MeshLayout, recipe: Recipe | None, own: OwnParts, *, prepared: list[nn.Module]
    ) -> FsdpExchange:
        """Split what this rank holds over its shards; return the exchange of gradients. Every rank must call.

        Raises:
            SpecError: With layers shared or in stages the model computes something else.
        """
        model, summed, exchange = self._model, self._summed, None
        if self._division is None:
            engine.shard(model, own)
            if self.expected is not None:
                tensor_styles.check_same(model, self.expected)
            exchange = FsdpExchange(model, prepared)
        else:
            assert recipe is not None, "scripts have no pipeline"
            pipeline = self._in_stages(engine, layout, recipe, own)
            exchange = _StagedExchange(model, prepared, pipeline)
            summed = [name for name in summed if pipeline.stage.number in self._division.holders[name]]
        tensor_random.separate(model, self._plan, place=layout.tensor.get_local_rank(), device=engine.target)
        if summed:
            exchange.add_up(summed, layout.tensor.get_group())
        return exchange

    def _in_stages(self, engine: FsdpEngine, layout: MeshLayout, recipe: Recipe, own: OwnParts) -> Pipeline:
        """Leave this rank the weights of its stage, split over its shards, and let a schedule compute the model."""
        model, division = self._model, self._division
        assert division is not None, "the caller has asked"
        number = layout.mesh.stage(engine.collective.rank)
        keep(model, division, stage=number)
        stage = Stage(model, division, number=number, precision=recipe.precision, group=layout.pipeline.get_group())
        for part in [*stage.units(engine.unit), stage]:
            shard_unit(part, layout, own)
        stage.watch()
        retie(model, division)
        place, shared = layout.tensor.get_local_rank(), layout.mesh.tensor > 1
        stage.check_same(self.expected, place=place, shared=shared, device=engine.target)
        pipeline = Pipeline(stage, accumulate=recipe.accumulate, device=engine.target)
        model.forward = pipeline
        return pipeline


class _StagedExchange(FsdpExchange):
    """The exchange of a stage: the schedule computes all micro batches of an update with the last one's backward pass."""

    def __init__(self, model: nn.Module, prepared: list[nn.Module], pipeline: Pipeline) -> None:
        """Exchange gradients of ``model``, most of whose weights are on other stages."""
        super().__init__(model, prepared)
        self._pipeline = pipeline
        self._last = False
        self._elsewhere = [name for name, x in model.named_parameters(remove_duplicate=False) if x.is_meta]
        for name, x in model.named_parameters(remove_duplicate=False):
            if x.is_meta:
                self.held[name] = torch.empty((0, *x.shape[1:]), dtype=x.dtype, device=pipeline.device)

    @override
    @contextmanager
    def during(self, *, last: bool) -> Iterator[None]:
        self._last = last
        yield

    @override
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        self._pipeline.take(loss, last=self._last)

    @override
    def finish(self) -> None:
        super().finish()
        for name in self._elsewhere:
            part = self.held[name]
            # Ranks must have gradients of the same parameters, and these ones have no element of this.
            part.grad = torch.zeros_like(part) if part.requires_grad else None
        self._pipeline.stage.add_ties(self.held)
