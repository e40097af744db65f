"""Divide a language model into the stages of a pipeline, each of which holds and computes some of its blocks.

A stage computes the model's own forward pass, in which blocks of other stages return what they are given, and so do norms and the
output layer before the last stage. Embeddings behind the first one return zeros, in the place of which the first block of a
stage takes what the stage before has computed. So masks and rotations are made as the model makes them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtrain.backends._fsdp.units import blocks
from mtrain.core.overriding import override
from mtrain.errors import SpecError
from mtrain_language import likelihoods
from mtrain_language.likelihoods import Likelihoods
from mtrain_language.meshes.internals import forget_hooks
from mtrain_language.meshes.tensor_styles import output_of


@dataclass(frozen=True, slots=True)
class Division:
    """The parts of a model by stage."""

    parts: Sequence[Sequence[str]]
    """Names of the modules with the weights that a stage holds, in the order of their calls."""
    blocks: Sequence[Sequence[str]]
    """Names of the blocks of each stage, in the same order."""
    holders: Mapping[str, Sequence[int]]
    """The stages that hold a parameter, by each of its names: two if the embedding is tied to the output layer."""
    ties: Sequence[Sequence[str]]
    """The names of each weight that two stages hold."""
    outputs: Mapping[str, Callable[..., Tensor]]
    """What stands for a module with weights on other stages, by its name."""
    width: int
    """Numbers of each token that a stage hands to the next one."""
    output: Tensor | None
    """What the whole model computes, see ``tensor_styles.output_of``."""


@dataclass(frozen=True, slots=True)
class _Call:
    given: tuple[int, ...]
    """Shape of the first input."""
    is_tokens: bool
    """Whether that holds integers."""
    returned: tuple[int, ...]
    """Shape of what is returned."""
    dtype: torch.dtype


def divide(model: nn.Module, count: int, *, length: int = 16) -> Division:
    """Divide a model into ``count`` stages; it computes ``length`` tokens for that, so every rank must call.

    Blocks are divided evenly, and the first stages have one more where they do not divide. What is called before the first
    block belongs to the first stage, what is called after the last one to the last stage.

    Raises:
        SpecError: It cannot be divided.
    """
    if likelihoods.ask(model) is None or not hasattr(model, "config"):
        raise _refusal(
            count,
            f"{type(model).__name__} is no causal language model of transformers (model.name: hf), which alone are",
        )
    names = {id(module): name for name, module in model.named_modules()}
    listed = [names[id(block)] for block in blocks(model)]
    if len(listed) < count:
        raise SpecError(
            f"parallel.pipeline: {count} given, but the model has {len(listed)} blocks, of which each stage needs one; give at most "
            f"{len(listed)}"
        )
    owners = [name for name, module in model.named_modules() if _owns(module) and not _is_within(name, listed)]
    calls, output = _calls(model, [*owners, *listed], length=length)
    _check(count, calls, owners, listed)
    order = [name for name, _ in calls]
    first, last = order.index(listed[0]), order.index(listed[-1])
    outer = {name: 0 if order.index(name) < first else count - 1 for name in owners}
    each, more = divmod(len(listed), count)
    bounds = [stage * each + min(stage, more) for stage in range(count + 1)]
    by_stage = [listed[bounds[stage] : bounds[stage + 1]] for stage in range(count)]
    parts = [list(group) for group in by_stage]
    parts[0] = [*(name for name in order[:first] if name in outer), *parts[0]]
    parts[-1] = [*parts[-1], *(name for name in order[last:] if name in outer)]
    of_module = {name: stage for stage, group in enumerate(parts) for name in group}
    outputs = {name: _pass_on if of_module[name] or name in listed else _stand_in(call) for name, call in calls}
    width = next(call.given[-1] for name, call in calls if name == listed[0])
    holders, ties = _holders(model, of_module)
    trained = {stage for name, x in model.named_parameters() if x.requires_grad for stage in holders[name]}
    if idle := sorted(set(range(count)) - trained):
        raise SpecError(
            f"parallel.pipeline: {count} given, but nothing of stage {idle[0] + 1} is trained; freeze less, or use fewer stages"
        )
    if strange := [names[0] for names in ties if list(holders[names[0]]) != [0, count - 1]]:
        raise _refusal(count, f"{strange[0]} belongs to other stages than the first and the last, so the model is not")
    return Division(parts, by_stage, holders, ties, outputs, width, output)


def _refusal(count: int, reason: str) -> SpecError:
    return SpecError(
        f"parallel.pipeline: {count} given, but {reason} divided into stages; use parallel.pipeline=1, with parallel.shard or "
        "parallel.tensor"
    )


def _owns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _is_within(name: str, listed: Sequence[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in listed)


def _calls(model: nn.Module, names: Sequence[str], *, length: int) -> tuple[list[tuple[str, _Call]], Tensor | None]:
    """Return the calls of the modules ``names`` in a forward pass, in their order, and what it has computed."""
    found: list[tuple[str, _Call]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], keywords: Mapping[str, Any], output: Any) -> None:
            given = inputs[0] if inputs else keywords.get("hidden_states")
            if isinstance(given, Tensor) and isinstance(output, Tensor):
                shape, is_tokens = tuple(given.shape), not given.is_floating_point()
                found.append((name, _Call(shape, is_tokens, tuple(output.shape), output.dtype)))
            else:
                found.append((name, _Call((), is_tokens=False, returned=(), dtype=torch.float32)))

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(note(name), with_kwargs=True) for name in names]
    try:
        output = output_of(model, length=length)
    finally:
        for hook in hooks:
            hook.remove()
    return found, output


def _check(count: int, calls: Sequence[tuple[str, _Call]], owners: Sequence[str], listed: Sequence[str]) -> None:
    order = [name for name, _ in calls]
    if strange := [name for name in (*listed, *owners) if order.count(name) != 1]:
        raise _refusal(count, f"{strange[0]} is not called once in a forward pass, so the model is not")
    if [name for name in order if name in set(listed)] != list(listed):
        raise _refusal(count, "the blocks are not called in their order, so the model is not")
    shapes = {call.given for name, call in calls if name in set(listed)}
    others = {call.returned for name, call in calls if name in set(listed)}
    if len(shapes) != 1 or others != shapes or () in shapes:
        raise _refusal(count, "a block does not return one array of the shape that it is given, so the model is not")
    first, last = order.index(listed[0]), order.index(listed[-1])
    if between := [name for name in owners if first < order.index(name) < last]:
        raise _refusal(count, f"{between[0]} is called between blocks, so the model is not")


def _pass_on(*inputs: Any, **keywords: Any) -> Tensor:
    """Return the first input, as what stands for a block, a norm or an output layer does."""
    given: Tensor = inputs[0] if inputs else keywords["hidden_states"]
    return given


def _stand_in(call: _Call) -> Callable[..., Tensor]:
    """Return a function that returns zeros where a module before the first block returns something."""
    tail = call.returned[len(call.given) if call.is_tokens else len(call.given) - 1 :]

    def zeros(given: Tensor, *inputs: Any, **keywords: Any) -> Tensor:
        lead = given.shape if call.is_tokens else given.shape[:-1]
        return torch.zeros((*lead, *tail), dtype=call.dtype, device=given.device)

    return zeros


def _holders(model: nn.Module, of_module: Mapping[str, int]) -> tuple[dict[str, Sequence[int]], list[list[str]]]:
    """Return the stages of each parameter by name, and the names of those that have several stages."""
    stages: dict[int, set[int]] = {}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stages.setdefault(id(parameter), set()).update(_stage_of(name, of_module))
        names.setdefault(id(parameter), []).append(name)
    holders: dict[str, Sequence[int]] = {name: sorted(stages[key]) for key, group in names.items() for name in group}
    return holders, [group for key, group in names.items() if len(stages[key]) > 1]


def _stage_of(name: str, of_module: Mapping[str, int]) -> Iterator[int]:
    while name := name.rpartition(".")[0]:
        if name in of_module:
            yield of_module[name]
            return


def keep(model: nn.Module, division: Division, *, stage: int) -> None:
    """Leave the weights of one stage in the model, in place; all others keep names and shapes, without values."""
    blank: dict[int, nn.Parameter] = {}
    own = set(division.parts[stage])
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            if any(name == part or name.startswith(f"{part}.") for part in own):
                continue
            if id(parameter) not in blank:
                shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                blank[id(parameter)] = nn.Parameter(shape, requires_grad=parameter.requires_grad)
            module.register_parameter(key, blank[id(parameter)])
    is_block = {name for group in division.blocks for name in group}
    for name, stands in division.outputs.items():
        if name not in own:
            module = model.get_submodule(name)
            # What shares a layer among a tensor group is dropped, and before the last stage what gathers texts behind the blocks. Blocks
            # keep their hooks, by which texts are divided.
            is_last = stage == len(division.parts) - 1
            if name not in is_block and (not is_last or isinstance(module, nn.Embedding | nn.Linear)):
                forget_hooks(module)
            module.forward = stands
    if stage < len(division.parts) - 1:
        likelihoods.answer(model, Elsewhere())


def retie(model: nn.Module, division: Division) -> None:
    """Give all names of a tied weight the part that this stage holds, after it was split."""
    places = dict(model.named_parameters(remove_duplicate=False))
    for names in division.ties:
        held = next((name for name in names if not places[name].is_meta), names[0])
        for name in names:
            parent, _, key = name.rpartition(".")
            model.get_submodule(parent).register_parameter(key, places[held])


class Elsewhere(Likelihoods):
    """Stands for the loss on stages that have no logits."""

    @override
    def nll(self, logits_BLV: Tensor, tokens_BL: Tensor) -> Tensor:
        return torch.zeros_like(tokens_BL, dtype=logits_BLV.dtype)

    @override
    def likeliest(self, logits_BLV: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=logits_BLV.device)
