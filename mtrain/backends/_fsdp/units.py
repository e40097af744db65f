"""Which parts of a model FSDP gathers one by one: its units.

A rank needs the whole weights of a unit while it is computed, so small units need little memory. What no unit holds belongs to
the unit of the whole model, which is gathered throughout a pass.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Literal

from torch import nn

from mtrain.backends._fsdp.internals import unsplit_kinds

Unit = Literal["blocks", "children", "model"]


def units(model: nn.Module, unit: Unit) -> dict[str, nn.Module]:
    """Return the units of ``model`` but that of the whole model, by name; one inside another comes before it.

    Args:
        model: The model.
        unit: ``model``: there are no others. ``children``: the children that have parameters, members of lists singly.
            ``blocks``: these, and inside them the blocks, see ``blocks``, and what is at least as large as the smallest block,
            such as an embedding. A child stays a unit, so that a script may call it without calling the whole model.
    """
    if unit == "model":
        return {}
    chosen = {id(block): _size(block) for block in (blocks(model) if unit == "blocks" else ())}
    places = _places(model)
    found: list[nn.Module] = []
    for child in _parts(model, places):
        if id(child) not in chosen and _is_around(child, chosen):
            found += _parts(child, places, chosen, least=min(chosen.values()))
        found.append(child)
    names = {id(module): name for name, module in model.named_modules()}
    return {names[id(module)]: module for module in found}


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model; none if it does not say what they are.

    A model of transformers names their classes. Of others they are the members of lists of equal modules, if these hold more
    than half of the parameters.
    """
    kinds = unsplit_kinds(model)
    named = list(_outermost(model, lambda module: type(module).__name__ in kinds and _size(module) > 0))
    if named:
        return named
    listed = [block for group in _outermost(model, _has_equal_members) for block in group.children()]
    return listed if 2 * sum(map(_size, listed)) > _size(model) else []


def _outermost(module: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """Yield the submodules that are wanted, and none below one of them."""
    for child in module.children():
        if is_wanted(child):
            yield child
        else:
            yield from _outermost(child, is_wanted)


def _has_equal_members(module: nn.Module) -> bool:
    """Return whether this is a list of two or more modules of one class, with submodules and the same shapes of parameters."""
    if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
        return False
    first, *others = module
    # A list has no forward method of its own, in which a unit is gathered.
    if isinstance(first, nn.ModuleList | nn.ModuleDict) or not _size(first) or not any(True for _ in first.children()):
        return False
    return all(type(other) is type(first) and _shapes(other) == _shapes(first) for other in others)


def _shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _parts(
    module: nn.Module, places: Counter[int], chosen: Collection[int] = (), *, least: int = 0
) -> Iterator[nn.Module]:
    """Yield the units below ``module``, none of which lies in another.

    A weight can belong to one unit only. A child with a weight that other parts of the model use too is replaced by its own
    children; what none of them holds alone belongs to the unit of the whole model.

    Args:
        module: A model, or a part of it.
        places: See ``_places``, of the whole model.
        chosen: Identities of modules that are to be units; a child around them is replaced by its own children.
        least: Number of parameters that any other unit must have.
    """
    for child in _children(module):
        is_alone = all(count == places[weight] for weight, count in _places(child).items())
        if not is_alone or (id(child) not in chosen and _is_around(child, chosen)):
            yield from _parts(child, places, chosen, least=least)
        elif id(child) in chosen or _size(child) >= least:
            yield child


def _is_around(module: nn.Module, chosen: Collection[int]) -> bool:
    return any(id(part) in chosen for part in module.modules())


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the direct children that have parameters; a list is never called itself, so its members are yielded."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from _children(child)
        elif any(True for _ in child.parameters()):
            yield child


def _places(module: nn.Module) -> Counter[int]:
    """Return the number of places of each weight in ``module``, by the identity of the weight."""
    parts = (part for _, part in module.named_modules(remove_duplicate=False))
    return Counter(id(weight) for part in parts for weight in part.parameters(recurse=False))
