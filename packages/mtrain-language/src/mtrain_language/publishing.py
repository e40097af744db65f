"""Write a trained language model as a folder that Hugging Face's transformers, and what reads its models, can load."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mtrain.core.interfaces import Array
from mtrain.core.interfaces.model import WeightsFolder
from mtrain.errors import CheckpointError, SpecError
from mtrain_language import adapters
from mtrain_language.base_weights import BASE
from mtrain_language.chat import template_of
from mtrain_language.section import BYTES
from mtrain_language.tokens import FILE, Bytes, FromFile, Tokenizer
from mtrain_language.weight_files import write_arrays, write_model

END = "<|endoftext|>"
"""How the token after a document is written in the tokenizer of bytes."""


def write_folder(plugin: Any, request: WeightsFolder) -> list[str]:
    """Write config, weights and tokenizer into a folder, or adapters in the form of peft; return the names of the files.

    ``plugin`` is the model plugin with the options of the run. The folder must not exist, or be empty, unless ``request.force``
    is given.

    Raises:
        CheckpointError: The folder cannot be written, or the base of adapters is another one than they were trained on.
        SpecError: transformers cannot make the config.
    """
    folder, merge = request.path, request.merge
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"--to {folder}: exists and is no folder; give another name")
    if folder.is_dir() and any(folder.iterdir()) and not request.force:
        raise CheckpointError(f"--to {folder}: exists already and is not empty; give --force to replace its files")
    if merge and plugin.options.lora is None:
        raise CheckpointError("--merge: the run has trained a whole model and no adapters; leave the flag out")
    tokenizer = _tokenizer(request.labels)
    config = _config(plugin, tokenizer)
    arrays = _merge(plugin, config, request) if merge else request.arrays
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if plugin.options.lora is None or merge:
            config.save_pretrained(folder)
            write_model(folder, _without_copies(config, arrays), max_bytes=request.max_file_bytes)
        else:
            _write_adapters(folder, plugin, config, request)
        _write_tokenizer(folder, tokenizer, _template(request.labels))
    except OSError as error:
        raise CheckpointError(f"--to {folder}: cannot be written: {error.strerror or error}") from error
    return sorted(file.name for file in folder.iterdir())


def _write_adapters(folder: Path, plugin: Any, config: Any, request: WeightsFolder) -> None:
    options, base = plugin.options.lora, plugin.folder()
    assert options is not None, "the caller has asked"
    assert base is not None, "the options refuse adapters without a path"
    adapters.check_installed()
    adapters.write_config(folder, options, arrays=request.arrays, base=base, model_config=config)
    write_arrays(folder / adapters.WEIGHTS, adapters.in_files(request.arrays))


def _merge(plugin: Any, config: Any, request: WeightsFolder) -> Mapping[str, Array]:
    """Return the weights of the whole model, float32.

    Raises:
        CheckpointError: The base is not the one that the adapters were trained on.
    """
    adapters.check_installed()
    plugin.check_resumed({BASE: plugin.digest}, request.labels.get("details") or {})
    with tempfile.TemporaryDirectory() as folder:
        _write_adapters(Path(folder), plugin, config, request)
        return adapters.merge_adapters(plugin.module(config), Path(folder))


def _tokenizer(labels: Mapping[str, Any]) -> Tokenizer:
    name = labels.get("tokenizer") or BYTES
    return Bytes() if name == BYTES else FromFile(Path(name).expanduser(), end_token=labels.get("end_token"))


def _config(plugin: Any, tokenizer: Tokenizer) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = plugin.config(vocabulary=tokenizer.size, end=tokenizer.end)
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING  # its values may be tuples, which its annotation leaves out
    if type(config) not in mapping:
        raise SpecError(f"model.options: {config.model_type} is no causal language model of transformers")
    config.architectures = [_class_of(config).__name__]
    config.eos_token_id = tokenizer.end
    config.bos_token_id = None
    return config


def _class_of(config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _without_copies(config: Any, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Leave out arrays that the model shares with others, as transformers does: the output's weights of many models."""
    tied = getattr(_class_of(config), "_tied_weights_keys", None)
    if not getattr(config, "tie_word_embeddings", False) or not isinstance(tied, Mapping):
        return dict(arrays)
    copies = {
        name
        for name, first in tied.items()
        if name in arrays and first in arrays and np.array_equal(arrays[name], arrays[first])
    }
    return {name: array for name, array in arrays.items() if name not in copies}


def _template(labels: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat template of a run, or of its tokenizer, as an argument of the library's tokenizers."""
    found = template_of(labels.get("tokenizer") or BYTES, labels.get("chat_template"))
    return {} if found is None else {"chat_template": found.source}


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, template: Mapping[str, str]) -> None:
    from transformers import PreTrainedTokenizerFast

    maker: Any = PreTrainedTokenizerFast  # it has no annotations
    if isinstance(tokenizer, FromFile):
        library = tokenizer.library
        end = library.id_to_token(tokenizer.end)
    else:
        library, end = _library_of_bytes(), END
    maker(tokenizer_object=library, eos_token=end, pad_token=end, **template).save_pretrained(folder)
    assert (folder / FILE).is_file(), "transformers writes the file that FromFile reads"


def _library_of_bytes() -> Any:
    """Return a tokenizer of the library that has the tokens of ``Bytes``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return library


def _letters() -> list[str]:
    """Return the letter by which the library's ``ByteLevel`` shows each byte: itself where it is printable in Latin-1,
    else letters from U+0100 on, in the order of the bytes (Radford et al. 2019, the code of GPT-2)."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]
