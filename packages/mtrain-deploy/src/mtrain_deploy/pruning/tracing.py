"""Trace a network: which channels each layer reads and writes, and how often it computes.

The network is built once more on the bound framework, with layers that follow the identities of channels, and runs on
one batch as it evaluates and on one as it trains. Its values do not matter, so its start values are those of the
framework.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mtrain.core import nn, ops
from mtrain.core.interfaces import Collective, HostBatch, Model, Module, Task
from mtrain.core.network import pruned
from mtrain.core.network.pruned import SIZE_ARGUMENTS, Sizes
from mtrain.errors import MtrainError, UsageError
from mtrain_deploy.pruning.channels import Channels, Ids
from mtrain_deploy.pruning.traced import Traced, raw, tracing

_MAPS = ("MaxPool2d", "Upsample")
"""Layers that treat each channel of (B, C, H, W) alone."""
_POINTS = ("Dropout", "GELU", "Identity", "ReLU", "SiLU", "Sigmoid")
"""Layers that treat each element alone."""
_MIXING = ("Embedding", "GroupNorm", "LayerNorm")
"""Layers whose channels must all stay."""


@dataclass(kw_only=True)
class Layer:
    """One layer with sizes, as the trace has seen it."""

    kind: str
    """Its name in ``core.nn``."""
    groups: int
    kernel: int
    """Number of elements of a filter for one input channel."""
    inputs: Ids | None = None
    """Identities of its input channels; None: it was never called."""
    outputs: Ids | None = None
    positions: int = 0
    """Number of positions at which it computes for one sample in evaluation."""
    name: str = ""

    @property
    def depthwise(self) -> bool:
        """Whether each input channel has a filter of its own."""
        return self.inputs is not None and self.groups > 1 and self.groups == len(self.inputs)


@dataclass(kw_only=True)
class Trace:
    """The result of tracing a network."""

    channels: Channels = field(default_factory=Channels)
    layers: dict[str, Layer] = field(default_factory=dict)
    """Layers with sizes that were called, by name."""


def trace(
    plugin: Model,
    task: Task,
    collective: Collective,
    *,
    evaluation: HostBatch,
    training: HostBatch | None,
    sizes: Sizes | None = None,
) -> Trace:
    """Trace the network of ``plugin``.

    Args:
        plugin: the model.
        task: the facts from which it is built.
        collective: that of the job.
        evaluation: a micro batch of the evaluation split.
        training: one of the training split; None: only evaluation is traced, so a layer that only training uses keeps
            its sizes.
        sizes: of a network that was pruned before.

    Raises:
        UsageError: the network cannot be followed.
    """
    tracer = _Tracer()
    with pruned.constructors(tracer.construct, [*SIZE_ARGUMENTS, *_MAPS, *_POINTS, *_MIXING]):
        network = pruned.build(plugin, task, collective, sizes)
    try:
        # Layers that only training uses (auxiliary heads) keep their sizes unless they are seen.
        if training is not None:
            network.train()
            tracer.run(network, training)
        network.eval()
        tracer.run(network, evaluation, counts=True)
    except MtrainError:
        raise
    except Exception as error:
        raise UsageError(
            f"the channels of this model cannot be followed, so it cannot be pruned: {type(error).__name__}: {error}"
        ) from error
    return tracer.trace(network)


class _Tracer:
    """Makes layers that follow channels, and collects what they see."""

    def __init__(self) -> None:
        self._channels = Channels()
        self._seen: dict[int, Layer] = {}
        self._classes: dict[str, type[Any]] = {}
        self._counts = False

    def construct(self, kind: str, make: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a layer that follows channels, see ``pruned.constructors``."""
        if kind not in self._classes:
            self._classes[kind] = type(make.__name__, (make,), {"__call__": self._call(kind, make)})
        layer = self._classes[kind](*args, **kwargs)
        if kind in SIZE_ARGUMENTS:
            groups = kwargs.get("groups", args[6] if len(args) > 6 else 1) if kind.startswith("Conv") else 1
            kernel = math.prod(int(size) for size in layer.weight.shape[2:])
            self._seen[id(layer)] = Layer(kind=kind, groups=groups, kernel=kernel)
        return layer

    def run(self, network: Module, batch: HostBatch, *, counts: bool = False) -> None:
        """Run the network on a batch; what it returns is fixed. ``counts``: whether layers count their positions."""
        self._counts = counts
        like = next(iter(network.state_dict().values()))
        tensors = {name: ops.asarray(array, like=like, dtype=str(array.dtype)) for name, array in batch.items()}
        with tracing(), nn.no_grad():
            raw(list(network(tensors).values()))

    def trace(self, network: Module) -> Trace:
        """Return what was found."""
        names = pruned.name_layers(network)
        layers = {}
        for identity, name in names.items():
            layer = self._seen.get(identity)
            if layer is not None and layer.inputs is not None:
                layer.name = name
                layers[name] = layer
        return Trace(channels=self._channels, layers=layers)

    def _call(self, kind: str, make: Any) -> Callable[..., Any]:
        def call(layer: Any, x: Any, *args: Any) -> Any:
            if kind in SIZE_ARGUMENTS:
                value = make.__call__(layer, x.value if isinstance(x, Traced) else x)
                return self._follow(kind, self._seen[id(layer)], x, value)
            follows = kind in _POINTS or (kind in _MAPS and getattr(x, "axis", 0) == 1)
            if isinstance(x, Traced) and follows:
                return x.with_value(make.__call__(layer, x.value, *raw(args)))
            return make.__call__(layer, raw(x), *raw(args))

        return call

    def _follow(self, kind: str, layer: Layer, x: Any, value: Any) -> Any:
        """Note what ``layer`` reads and writes, and return its output ``value`` with its channels."""
        axis = len(value.shape) - 1 if kind == "Linear" else 1
        inputs = self._inputs(x, axis)
        before, channels = layer.inputs, self._channels
        if before is not None:
            channels.tie(before, inputs)
        layer.inputs = inputs
        if kind == "BatchNorm2d":
            layer.outputs = inputs
        elif layer.outputs is None:
            layer.outputs = channels.new(int(value.shape[axis]))
            self._tie_groups(layer)
        if self._counts and kind != "BatchNorm2d":
            counted = x.shape if kind == "ConvTranspose2d" else value.shape
            layer.positions += math.prod(int(size) for i, size in enumerate(counted) if i not in (0, axis))
        return Traced(value, axis, layer.outputs, channels)

    def _inputs(self, x: Any, axis: int) -> Ids:
        if isinstance(x, Traced) and x.axis == axis:
            return x.ids
        return self._channels.new_fixed(int(raw(x).shape[axis]))

    def _tie_groups(self, layer: Layer) -> None:
        """Tie what the groups of a convolution share: each keeps as many channels, at the same places."""
        inputs, outputs, channels, groups = layer.inputs, layer.outputs, self._channels, layer.groups
        assert inputs is not None
        assert outputs is not None
        if groups == 1:
            return
        if layer.kind == "ConvTranspose2d":
            channels.fix(inputs)
            channels.fix(outputs)
        elif layer.depthwise:
            multiplier = len(outputs) // groups
            channels.tie(inputs.repeat(multiplier), outputs)
            if multiplier > 1:
                channels.fix(outputs)
        else:
            for ids in (inputs, outputs):
                parts = ids.reshape(groups, -1)
                for part in parts[1:]:
                    channels.tie(parts[0], part)


def layer_macs(layer: Layer, *, inputs: int, outputs: int) -> int:
    """Return the multiplications of one sample in a layer with these numbers of channels."""
    if layer.kind == "BatchNorm2d":
        return 0
    groups = inputs if layer.depthwise else layer.groups
    return layer.positions * layer.kernel * (inputs // groups) * outputs
