"""Build a network whose layers have other sizes than its code gives them: the sizes that pruning has left.

A model's code computes the sizes of its layers from its options. While it builds its network, the layers' constructors
in ``core.nn`` are replaced by functions that put the pruned sizes in their place. A layer's name is known only once the
network is built, so the network is built twice: first as its code says, to learn which constructor call makes which
layer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from mtrain.core import nn
from mtrain.core.interfaces import Collective, Model, Module, Task
from mtrain.errors import SpecError
from mtrain.spec.suggest import closest

Sizes: TypeAlias = Mapping[str, Sequence[int]]
"""Name of a layer -> its inputs and outputs; for a BatchNorm the number of its channels alone."""
SIZE_ARGUMENTS = {
    "Conv2d": ("in_channels", "out_channels"),
    "ConvTranspose2d": ("in_channels", "out_channels"),
    "Linear": ("in_features", "out_features"),
    "BatchNorm2d": ("num_features",),
}
"""Layer that can have other sizes -> the names of its first arguments, which are the sizes."""
_GROUPS_PLACE = {"Conv2d": 6, "ConvTranspose2d": 6}
Make: TypeAlias = Callable[..., Any]


def build(plugin: Model, task: Task, collective: Collective, sizes: Sizes | None = None) -> Module:
    """Build the network of ``plugin``, with the given sizes of some layers; every other layer is as its code says.

    Raises:
        SpecError: ``sizes`` names a layer that the network does not have, or gives it a wrong number of sizes.
    """
    if not sizes:
        return plugin.build(task, collective)
    names = _names_in_order(plugin, task, collective)
    _check(sizes, names, fused=plugin.fused({}) is not None)
    # Layers are made in the order in which their names were learned: a model builds the same way twice.
    order = iter(names)

    def make_resized(kind: str, make: Make, *args: Any, **kwargs: Any) -> Any:
        given = sizes.get(next(order))
        if given is None:
            return make(*args, **kwargs)
        if len(given) != len(SIZE_ARGUMENTS[kind]):
            raise SpecError(
                f"model.pruned: {list(given)} given for a {kind}, expected {len(SIZE_ARGUMENTS[kind])} numbers: "
                f"{', '.join(SIZE_ARGUMENTS[kind])}"
            )
        return make(*_resize(kind, given, args, kwargs), **kwargs)

    with constructors(make_resized):
        return plugin.build(task, collective)


@contextmanager
def constructors(construct: Callable[..., Any], kinds: Iterable[str] = tuple(SIZE_ARGUMENTS)) -> Iterator[None]:
    """Have every layer of these kinds made by ``construct(kind, make, *args, **kwargs)`` within the context."""
    former = {kind: vars(nn)[kind] for kind in kinds}

    def replacement(kind: str) -> Make:
        return lambda *args, **kwargs: construct(kind, former[kind], *args, **kwargs)

    vars(nn).update({kind: replacement(kind) for kind in former})
    try:
        yield
    finally:
        vars(nn).update(former)


def name_layers(network: Module) -> dict[int, str]:
    """Return the name of each layer of a network by ``id``; a layer with several names has its first."""
    names: dict[int, str] = {}

    def visit(module: Any, prefix: str) -> None:
        for name, child in module.named_children():
            names.setdefault(id(child), prefix + name)
            visit(child, f"{prefix}{name}.")

    visit(network, "")
    return names


def _names_in_order(plugin: Model, task: Task, collective: Collective) -> list[str]:
    """Return the name of each layer with sizes, in the order in which the model's code makes them."""
    made: list[Any] = []

    def note_layer(kind: str, make: Make, *args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    # Built once as its code says, because only the finished network tells which name a layer has.
    with constructors(note_layer):
        network = plugin.build(task, collective)
    names = name_layers(network)
    return [names.get(id(layer), "") for layer in made]


def _check(sizes: Sizes, names: Sequence[str], *, fused: bool) -> None:
    """Refuse sizes of layers that are not there; a model with a form for inference has other layers in that form."""
    unknown = [name for name in sizes if name not in names]
    if unknown and not (fused and len(unknown) < len(sizes)):
        best = closest(unknown[0], [name for name in names if name])
        hint = f"; did you mean {best}?" if best else ""
        raise SpecError(
            f"model.pruned: the model has no convolution, linear layer or BatchNorm named {unknown[0]}{hint}; the sizes "
            "belong to the model and the options that `mtrain prune` was given"
        )


def _resize(kind: str, sizes: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the positional arguments with the new sizes; sizes among ``kwargs`` are replaced in place.

    A depthwise convolution has as many groups as inputs and keeps that; other groups stay as they are.
    """
    changed = list(args)
    place = _GROUPS_PLACE.get(kind)
    former_inputs = args[0] if args else kwargs.get(SIZE_ARGUMENTS[kind][0])
    for i, (name, size) in enumerate(zip(SIZE_ARGUMENTS[kind], sizes, strict=True)):
        _put(changed, kwargs, i, name, size)
    if place is not None:
        groups = kwargs.get("groups", args[place] if len(args) > place else 1)
        # A depthwise convolution has a group for each input, so its groups follow the inputs.
        if groups > 1 and groups == former_inputs:
            _put(changed, kwargs, place, "groups", sizes[0])
    return changed


def _put(args: list[Any], kwargs: dict[str, Any], place: int, name: str, value: int) -> None:
    if place < len(args):
        args[place] = value
    else:
        kwargs[name] = value
