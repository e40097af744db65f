"""Blocks of a model whose inner results are dropped after the forward pass and computed again in the backward pass.

``train.recompute``: Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4. A framework's own function
runs a block twice; the classes here see to it that the second pass finds what the first one found, and leaves no trace:

* It gets copies of the buffers as they were before the first pass. So running statistics move once.
* It exchanges nothing: what the first pass gathered from the other ranks is used again. So ranks need not agree on the order
  in which their backward passes recompute.
* It does not observe the ranges of inputs (``core.network.quantising``).

Dropout of mtrain's models repeats by itself (``core.network.noise``); the frameworks' functions restore the random generators for
the dropout of users' own models.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from mtrain.core import nn
from mtrain.core.interfaces import Module, Recipe, Tensor
from mtrain.core.network.quantising import Quantised
from mtrain.errors import SpecError
from mtrain.spec.training import TrainSpec

COLLECTIVE = "collective"
"""Attribute by which a layer whose statistics are over all ranks reaches the others."""


def choose_blocks(names: Iterable[str], recipe: Recipe) -> list[str]:
    """Return those of a model's submodules ``names`` that ``recipe`` recomputes: the outermost that a pattern finds.

    Raises:
        SpecError: A pattern is found in no name.
    """
    return outermost(names, recipe.recompute, key="train.recompute")


def outermost(names: Iterable[str], chosen_by: Sequence[str], *, key: str) -> list[str]:
    """Return the outermost of the submodules ``names`` in which one of the regexes ``chosen_by`` is found.

    Raises:
        SpecError: A regex is found in no name; ``key`` of the spec has it.
    """
    names = [name for name in names if name]
    for pattern in chosen_by:
        if not any(re.search(pattern, name) for name in names):
            like = f"they are like {', '.join(names[:3])}" if names else "there are none"
            raise SpecError(f"{key}: {pattern!r} is found in no submodule's name; {like}")
    found = [name for name in names if any(re.search(pattern, name) for pattern in chosen_by)]
    chosen = set(found)
    return [name for name in found if not any(above in chosen for above in _above(name))]


def patterns(train: TrainSpec, blocks: Sequence[str], *, model: str) -> tuple[str, ...]:
    """Return ``Recipe.recompute`` for ``train.recompute`` of a spec.

    Args:
        train: The section of the spec.
        blocks: The blocks that the model names, see ``Model.recomputable``.
        model: Name of the model, for the message.

    Raises:
        SpecError: The key is true, but the model names no blocks.
    """
    given = train.recompute
    if given is True and not blocks:
        raise SpecError(
            f"train.recompute: true given, but the model {model} names no blocks; give regexes of names of its submodules, "
            "such as ['^layers\\.\\d+$']"
        )
    return tuple(blocks if given is True else given or ())


def blocks_to_compile(train: TrainSpec, blocks: Sequence[str], *, model: str) -> tuple[str, ...]:
    """Return ``Recipe.compile_blocks`` for ``train.compile`` of a spec; see ``patterns`` for the arguments.

    Raises:
        SpecError: The key is ``blocks``, but the model names none.
    """
    if train.compile != "blocks":
        return ()
    if not blocks:
        raise SpecError(f"train.compile: blocks given, but the model {model} names no blocks; set it to true or false")
    return tuple(blocks)


def _above(name: str) -> Iterator[str]:
    """Yield the names of the submodules that contain the submodule ``name``."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


@dataclass(frozen=True, kw_only=True)
class Block:
    """A submodule that is recomputed, and all that a pass through it reads or changes besides its inputs."""

    forward: Callable[..., Any]
    modules: Sequence[Module]
    """The submodule and all below it."""
    buffers: Sequence[tuple[Module, str]]
    """Each buffer as (module that holds it, name)."""


@dataclass(kw_only=True)
class Pass:
    """One pass through a block: the first call runs it, every further one runs it as the first one was."""

    block: Block
    _ran: bool = False
    _buffers: list[Tensor] = field(default_factory=list)
    """Copies of the buffers before the first call."""
    _gathered: list[list[Tensor]] = field(default_factory=list)
    """What each layer with a collective gathered in the first call."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the block."""
        with self._again() if self._ran else self._first():
            return self.block.forward(*inputs, **named)

    @contextmanager
    def _first(self) -> Iterator[None]:
        self._ran = True
        with nn.no_grad():
            # Copies, because the pass moves running statistics in place.
            self._buffers = [getattr(module, name).clone() for module, name in self.block.buffers]
        layers = self._layers_over_ranks()
        self._gathered = [[] for _ in layers]
        with ExitStack() as restored:
            for layer, results in zip(layers, self._gathered, strict=True):
                _replace(restored, layer, COLLECTIVE, value=RecordingCollective(layer.collective, results))
            yield

    @contextmanager
    def _again(self) -> Iterator[None]:
        with ExitStack() as restored:
            for (module, name), before in zip(self.block.buffers, self._buffers, strict=True):
                # The pass may change what it gets, and there may be a third one.
                with nn.no_grad():
                    _replace(restored, module, name, value=before.clone())
            for layer, results in zip(self._layers_over_ranks(), self._gathered, strict=True):
                _replace(restored, layer, COLLECTIVE, value=RepeatingCollective(layer.collective, results))
            for module in self.block.modules:
                # The first pass has observed the input; a second look would count it twice.
                if isinstance(module, Quantised):
                    _replace(restored, module, "observing", value=False)
            yield

    def _layers_over_ranks(self) -> list[Any]:
        return [module for module in self.block.modules if hasattr(module, COLLECTIVE)]


def _replace(restored: ExitStack, owner: Any, name: str, *, value: Any) -> None:
    """Set an attribute until ``restored`` is closed."""
    restored.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


class RecordingCollective:
    """A collective that keeps what is gathered through it."""

    def __init__(self, collective: Any, results: list[Tensor]) -> None:
        self._collective = collective
        self._results = results

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collective, name)

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """Gather ``x`` from all ranks, and keep the result."""
        gathered = self._collective.all_gather_tensor(x)
        self._results.append(gathered)
        return gathered


class RepeatingCollective:
    """A collective that answers with what was gathered before, in the same order, and asks no other rank."""

    def __init__(self, collective: Any, results: Sequence[Tensor]) -> None:
        self._collective = collective
        # Ranks may recompute their blocks in different orders, so none can be asked again.
        self._results = iter(results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collective, name)

    def all_gather_tensor(self, x: Tensor) -> Tensor:
        """Return the next result."""
        return next(self._results)
