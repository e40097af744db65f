"""Causal language models of Hugging Face's transformers as a model plugin. Nothing is downloaded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from mtrain.core.collective import differing
from mtrain.core.interfaces import Array, Collective, HostBatch, Model, Module, PluginOptions, Task, Variation
from mtrain.core.interfaces.model import WeightsFolder
from mtrain.errors import CheckpointError, DataError, MtrainError, PluginError, SpecError
from mtrain.spec.bounds import bounded_growth, memory_limit
from mtrain.spec.pathnames import PathText
from mtrain.tasks.model_config import check_sizes, entries_for_transformers
from mtrain_language import adapters, folders, known_types, network
from mtrain_language.adapters import LoraOptions
from mtrain_language.base_weights import BASE, digest_of, weight_files
from mtrain_language.loading import array_by_array


class HuggingFaceOptions(PluginOptions):
    """Which model it is."""

    path: PathText | None = Field(
        default=None,
        description="folder of a model, with config.json and, to start from, its weights as .safetensors; or a config.json",
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="entries of config.json, over those of path: model_type, hidden_size... vocab_size is the tokenizer's "
        "if neither gives it",
    )
    from_scratch: bool = Field(default=False, description="ignore the weights in path, and start from random ones")
    attention: Literal["eager", "sdpa"] | None = Field(
        default=None,
        description="implementation of attention: eager computes in steps, sdpa in torch's fused kernels; null: as "
        "transformers chooses",
    )
    lora: LoraOptions | None = Field(
        default=None,
        description="train low-rank adapters beside the weights in path, which stay as they are; null: train them",
    )

    @model_validator(mode="after")
    def _names_a_model(self) -> "HuggingFaceOptions":
        if self.path is None and "model_type" not in self.config:
            raise ValueError(
                "neither path nor config.model_type given; give the folder of a model, or config: {model_type: llama, ...}"
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> "HuggingFaceOptions":
        if self.lora is not None and (self.path is None or self.from_scratch):
            given = "no path" if self.path is None else "from_scratch"
            raise ValueError(
                f"lora given with {given}; adapters are trained on weights, so give the folder of a model in path"
            )
        return self


class HuggingFaceModel(Model):
    """The ``hf`` model plugin: any causal language model of transformers whose attention takes positions.

    It keeps its own start values, those of its folder or of transformers' own initialisation.
    """

    Options: ClassVar[type[BaseModel]] = HuggingFaceOptions
    kind: ClassVar[str] = "language"
    native: ClassVar[bool] = True
    # The layers of a stack are in a list, and have a number for a name: model.layers.3, transformer.h.0.
    recomputable: ClassVar[Sequence[str]] = (r"\.\d+$",)

    options: HuggingFaceOptions

    def check_framework(self, framework: str) -> None:
        """Refuse a backend that is not on torch.

        Raises:
            SpecError: It is not.
        """
        if framework != "torch":
            raise SpecError(
                f"model.name: hf is a model of torch, and the backend is on {framework}; choose one on torch"
            )

    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        """Return ``task``, which has what is known of the tokens in its details, with the digest of an adapter's base.

        Raises:
            SpecError: The model cannot be read, or does not fit the tokens; or there are no weights for adapters.
            UsageError: peft is not installed.
        """
        entries = dict(self.options.config)
        if self.options.path is not None:
            # Without transformers, as far as files say: this runs before a job's folder is made, in a process without
            # torch.
            entries = folders.read_config(self.options.path, from_scratch=self.options.from_scratch) | entries
            adapters.refuse_folder(self.folder())
        folders.check_typed(entries, path=self._where())
        check_sizes(entries, path=self._where())
        self._check_fits(entries.get("vocab_size"), folders.longest(entries), task.details)
        if self.options.lora is None:
            return task
        adapters.check_installed()
        return replace(task, details={**task.details, BASE: self.digest})

    def check_libraries(self) -> None:
        """Refuse a type of model that the transformers of this Python does not know; see ``Model.check_libraries``."""
        entries = dict(self.options.config)
        if self.options.path is not None:
            entries = folders.read_config(self.options.path, from_scratch=True) | entries
        check_sizes(entries, path=self._where())
        known_types.check(entries, path=self._where())

    def check_resumed(self, details: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of adapters that were trained on other weights; see ``Model.check_resumed``."""
        given, before = details.get(BASE), saved.get(BASE)
        if given == before:
            return
        if given is None or before is None:
            now, then = ("adapters", "whole models") if before is None else ("the whole model", "adapters")
            raise CheckpointError(
                f"model.options.lora: the checkpoint is of {then}, and the job trains {now}; go on with the options that it "
                "was trained with, or start a new job"
            )
        raise CheckpointError(
            f"model.options.path: {self.options.path} holds other weights (SHA-256 {given[:12]}) than those on which the "
            f"checkpoint's adapters were trained ({before[:12]}); give the folder with those"
        )

    def build(self, task: Task, collective: Collective) -> Module:
        """Build the model; the session has seeded the framework just before.

        Raises:
            SpecError: The options describe no causal language model, or it does not fit the tokens.
            PluginError: The weights cannot be read.
        """
        config = self.config(vocabulary=task.details["vocabulary"], end=task.details["end"])
        self._check_fits(config.vocab_size, getattr(config, "max_position_embeddings", None), task.details)
        if self.options.lora is not None:
            adapters.check_installed()
            self.check_resumed({BASE: self.digest}, {BASE: task.details.get(BASE, self.digest)})
            # Each host reads its own copy of the base, and nobody exchanges it.
            if differing(collective, self.digest):
                raise DataError(
                    f"model.options.path: {self.options.path}: the ranks have read different weights; give every host the "
                    "same files"
                )
        module = network.adapt(self.module(config), path=self._where())
        # A configuration with sizes of 0 makes a model that computes, and learns nothing.
        if not any(parameter.numel() for parameter in module.parameters()):
            raise SpecError(f"model.options: {self._where()}: has no parameter to train; give sizes above 0")
        network.check_sees_its_own_past_only(module, path=self._where(), vocabulary=config.vocab_size)
        return module if self.options.lora is None else adapters.attach(module, self.options.lora)

    def without_values(self, task: Task) -> Module:
        """Return the network as its configuration describes it, where torch makes arrays without values."""
        from transformers import AutoModelForCausalLM

        library: Any = AutoModelForCausalLM  # parts of it have no annotations
        config = self.config(vocabulary=task.details["vocabulary"], end=task.details["end"])
        module = library.from_config(config, attn_implementation=self.options.attention)
        module = network.adapt(module, path=self._where())
        return module if self.options.lora is None else adapters.attach(module, self.options.lora)

    def operations(self, task: Task, *, rows: int, frozen: Sequence[str]) -> int | None:
        """Return the operations of ``rows`` samples; see ``Model.operations``."""
        from mtrain_language.meshes import flops  # which few jobs need

        return flops.of_plugin(self, task, rows, frozen)

    def blank_batch(self, task: Task, *, rows: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return shape and type of each array of ``RowSource``'s batches."""
        text = ((rows, task.details["length"]), "int64")
        return {"tokens": text, "positions": text, "labels": text, "scale": ((rows,), "float64")}

    def module(self, config: Any) -> Any:
        """Return the model as transformers makes it, with the weights of its folder, without adapters.

        Raises:
            PluginError: The weights cannot be read.
        """
        from transformers import AutoModelForCausalLM

        library: Any = AutoModelForCausalLM  # parts of it have no annotations
        folder = self.folder()
        adapters.refuse_folder(folder)
        try:
            if folder is None or self.options.from_scratch or not weight_files(folder):
                # A configuration of a few bytes may ask for more memory than there is.
                with bounded_growth(memory_limit()):
                    module = library.from_config(config, attn_implementation=self.options.attention)
                # Masters are float32, whatever the type in which a configuration makes weights.
                return module.float()
            with array_by_array():
                module, told = library.from_pretrained(
                    folder,
                    config=config,
                    attn_implementation=self.options.attention,
                    use_safetensors=True,
                    local_files_only=True,
                    # A folder may name code of its own, which is not run.
                    trust_remote_code=False,
                    dtype="float32",
                    output_loading_info=True,
                )
            folders.check_loaded(told, path=self._where())
            return module
        except MtrainError:
            raise
        except Exception as error:  # transformers raises many kinds
            raise PluginError(f"model.options: {self._where()}: transformers cannot build it: {error}") from error

    def joined(self, outputs: Sequence[tuple[Mapping[str, Array], Variation]]) -> Mapping[str, Array]:
        """Refuse: texts are not varied."""
        raise NotImplementedError

    def config(self, *, vocabulary: int, end: int) -> Any:
        """Return the configuration as transformers has it.

        Args:
            vocabulary: Number of tokens, for a configuration that does not say it.
            end: The token that ends a document, likewise.

        Raises:
            SpecError: There is none, or transformers does not know the type of model.
        """
        from transformers import CONFIG_MAPPING, AutoConfig

        given = dict(self.options.config)
        if self.options.path is not None:
            folders.check(self.options.path, from_scratch=self.options.from_scratch)
        adapters.refuse_folder(self.folder())
        try:
            stored: dict[str, Any] = {}
            if self.options.path is not None:
                stored = entries_for_transformers(self.options.path)
            # The tokenizer decides only what neither the folder nor the options say.
            own = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": end}
            entries = {**own, **stored, **given}
            folders.check_typed(entries, path=self._where())
            check_sizes(entries, path=self._where())
            if entries["model_type"] not in CONFIG_MAPPING:
                raise SpecError(known_types.unknown(entries["model_type"], list(CONFIG_MAPPING), path=self._where()))
            folders.check_type(entries["model_type"], entries.get("architectures"), path=self._where())
            return AutoConfig.for_model(entries.pop("model_type"), **entries)
        except SpecError:
            raise
        except Exception as error:  # transformers raises many kinds
            raise SpecError(f"model.options: {self._where()}: {error}") from error

    @cached_property
    def digest(self) -> str:
        """The digest of the weights in the model's folder, see ``base_weights``.

        Raises:
            SpecError: There are none.
        """
        folder = self.folder()
        assert folder is not None, "the options refuse adapters without a path"
        return digest_of(folder)

    def folder(self) -> Path | None:
        """Return the folder of the model; None: it is made from a config alone."""
        if self.options.path is None:
            return None
        path = Path(self.options.path).expanduser()
        return path if path.is_dir() else path.parent

    def write_folder(self, request: WeightsFolder) -> str:
        """Write the weights for transformers, or adapters for peft; see ``Model.write_folder``."""
        from mtrain_language import publishing

        names = publishing.write_folder(self, request)
        reader = "peft" if "adapter_config.json" in names else "transformers"
        return f"({', '.join(names)}), which {reader} and what reads its models can load"

    def _where(self) -> str:
        return str(self.options.path or f"config of type {self.options.config.get('model_type')}")

    def _check_fits(self, vocabulary: Any, longest: Any, details: Mapping[str, Any]) -> None:
        """Refuse a model that takes fewer tokens, or shorter rows, than the data have; None: it is not known yet."""
        problems = []
        if isinstance(vocabulary, int) and vocabulary < details["vocabulary"]:
            problems.append(
                f"model.options: the model has {vocabulary} tokens, and data.tokenizer {details['vocabulary']}; give "
                "the model's own tokenizer"
            )
        if isinstance(longest, int) and longest < details["length"]:
            problems.append(f"data.length: {details['length']} tokens, and the model takes at most {longest}")
        if problems:
            raise SpecError(problems)

    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        """Refuse: the model keeps its own start values, and nobody asks for others."""
        raise PluginError("hf: the model has start values of its own, which only its ranks know")

    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[Any]:
        """Return (sum of losses, labels, right ones) of each row, or the list of tokens that continue each prompt."""
        if "continued" in output:
            return [[int(token) for token in row if token >= 0] for row in output["continued"]]
        return [
            (float(nll), int(count), int(right))
            for nll, count, right in zip(output["nll"], output["count"], output["right"], strict=True)
        ]
