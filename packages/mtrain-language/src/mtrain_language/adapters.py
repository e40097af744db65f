"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) in a causal language model, by the library peft.

A layer with weights W computes ``W x + alpha / rank * B A x``, where A has ``rank`` rows and B as many columns. A and B are
trained. W, and everything else of the model, is *the base*: it is read from its folder at each start, and is in no optimizer,
average, exchange or checkpoint.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from mtrain.core.interfaces import Array, PluginOptions
from mtrain.errors import SpecError
from mtrain.spec import remedies

ALL = "all-linear"
NAME = "default"
"""peft's name of the adapters, which is a part of their arrays' names in a module, and left out in files."""
CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""What peft puts before the names of arrays in files: the path of the model in its own wrapper."""
_INSIDE = ".lora_"
"""What follows the name of the adapted layer in the name of an array of an adapter."""


class LoraOptions(PluginOptions):
    """Which adapters are trained in the place of the model's own weights."""

    rank: Annotated[int, Field(ge=1)] = Field(default=8, description="rows of A and columns of B in each adapter")
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=16.0, description="what the adapters add is multiplied by alpha / rank"
    )
    targets: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = Field(
        default="all-linear",
        description="names of the layers that get adapters, or ends of their names, such as [q_proj, v_proj]; all-linear: "
        "every linear layer but the last, which returns the logits",
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="share of an adapter's inputs that is set to 0 in training"
    )


def check_installed() -> None:
    """Refuse adapters where peft is not installed.

    Raises:
        UsageError: It is not; the message says how it is installed.
    """
    remedies.require(["peft"], what="model.options.lora", extra="mtrain-language")


def refuse_folder(folder: Path | None) -> None:
    """Refuse a folder of adapters in the place of a model, and one with both, from which transformers would load both.

    Raises:
        SpecError: It holds adapters.
    """
    if folder is not None and (folder / CONFIG).is_file():
        raise SpecError(
            f"model.options.path: {folder} holds adapters ({CONFIG}); give the folder of a model without them, such as that "
            "of their base, or merge them into it with peft"
        )


def attach(module: Any, options: LoraOptions) -> Any:
    """Put adapters into a causal language model of transformers, in place, and hide its base from its ``state_dict``.

    B starts at 0, so the model computes what it did before.

    Raises:
        SpecError: The model has no such layers, or peft cannot adapt them.
    """
    from peft import inject_adapter_in_model

    _check_targets(module, options)
    try:
        with _quiet():
            inject_adapter_in_model(_config(options), module, adapter_name=NAME)
    except Exception as error:  # peft raises many kinds
        raise SpecError(f"model.options.lora: peft cannot adapt the model: {error}") from error
    # peft leaves only its own arrays trainable, so these are the names of the adapters.
    own = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    module.register_state_dict_post_hook(_KeepTrained(frozenset(own)))
    return module


def _check_targets(module: Any, options: LoraOptions) -> None:
    """Refuse a target that no layer has; peft itself passes over one beside others.

    Raises:
        SpecError: There is one; the message has the ends of all names.
    """
    names = [name for name, _ in module.named_modules() if name]
    idle = [] if options.targets == ALL else [target for target in options.targets if not _is_in(target, names)]
    if idle:
        ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
        raise SpecError(
            f"model.options.lora.targets: no layer is called {', '.join(idle)}; there are "
            f"{', '.join(end for end in ends if not end.isdigit())}"
        )


def _is_in(target: str, names: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


class _KeepTrained:
    """A hook of ``state_dict`` that leaves in it what is trained, so that everything made from it holds nothing else."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def __call__(self, module: Any, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """Remove the base."""
        for name in [name for name in state if name.startswith(prefix) and name[len(prefix) :] not in self._names]:
            del state[name]


def _config(options: LoraOptions, **fields: Any) -> Any:
    """Return the options as peft has them."""
    from peft import LoraConfig

    targets: Any = options.targets
    values = {
        "r": options.rank,
        "lora_alpha": options.alpha,
        "lora_dropout": options.dropout,
        "target_modules": targets,
    }
    return LoraConfig(**{**values, "task_type": "CAUSAL_LM", **fields})


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what peft warns of and puts right itself, such as the layout of GPT-2's weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def list_adapted_layers(names: Sequence[str]) -> list[str]:
    """Return the layers whose adapters have the arrays ``names``, sorted."""
    return sorted({name.partition(_INSIDE)[0] for name in names})


def in_files(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays of adapters under the names that they have in peft's files."""
    return {_PREFIX + name.replace(f".{NAME}.", ".").removesuffix(f".{NAME}"): array for name, array in arrays.items()}


def write_config(
    folder: Path, options: LoraOptions, *, arrays: Mapping[str, Array], base: Path, model_config: Any
) -> None:
    """Write ``adapter_config.json``.

    Args:
        folder: Where it is written.
        options: The adapters.
        arrays: Their arrays by name in the module.
        base: The folder of the model whose layers are adapted.
        model_config: The configuration of that model, as transformers has it.
    """
    layers = list_adapted_layers(list(arrays))
    config = _config(
        options,
        base_model_name_or_path=str(base),
        inference_mode=True,
        fan_in_fan_out=_holds_transposed(model_config, layers),
    )
    targets = layers if options.targets == ALL else sorted(options.targets)
    config.target_modules = targets  # peft makes a set of them, whose order is another each time
    config.save_pretrained(folder)


def _holds_transposed(model_config: Any, layers: Sequence[str]) -> bool:
    """Return whether layers hold their weights as (inputs, outputs), as those of GPT-2 do; peft's files say it."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    library: Any = AutoModelForCausalLM  # parts of it have no annotations
    with init_empty_weights():
        modules = dict(library.from_config(model_config).named_modules())
    return any(type(modules[layer]).__name__ == "Conv1D" for layer in layers)


def merge_adapters(base: Any, folder: Path) -> dict[str, Array]:
    """Return the weights of the model ``base`` with the adapters in ``folder`` added to them; changes ``base``."""
    from peft import PeftModel

    with _quiet():
        module: Any = PeftModel.from_pretrained(base, str(folder))
        whole = module.merge_and_unload()
    return {name: tensor.detach().numpy() for name, tensor in whole.state_dict().items()}
