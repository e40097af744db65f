"""Write a trained language model as a folder that Hugging Face's transformers, and what reads its models, can load."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Array
from mtrain.errors import CheckpointError, SpecError
from mtrain.spec import outputs
from mtrain.tasks.language.model import HuggingFaceModel, HuggingFaceOptions
from mtrain.tasks.language.section import BYTES
from mtrain.tasks.language.tokens import FILE, Bytes, FromFile, Tokenizer

WEIGHTS = "model.safetensors"
END = "<|endoftext|>"
"""How the token after a document is written in the tokenizer of bytes."""


def write_folder(
    folder: Path, *, options: Mapping[str, Any], labels: Mapping[str, Any], arrays: Mapping[str, Array], force: bool
) -> list[str]:
    """Write config, weights and tokenizer into ``folder``, and return the names of the files.

    Args:
        folder: Where they are written; it must not exist, or be empty, unless ``force`` is given.
        options: The options of the model plugin ``hf``.
        labels: Those of the checkpoint; see ``LanguageTask.labels``.
        arrays: The weights under the names of the module's ``state_dict``.
        force: Whether files in the folder are replaced.

    Raises:
        CheckpointError: The folder cannot be written.
        SpecError: transformers cannot make the config.
    """
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"--to {folder}: exists and is no folder; give another name")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise CheckpointError(f"--to {folder}: exists already and is not empty; give --force to replace its files")
    tokenizer = _tokenizer(labels)
    config = _config(options, tokenizer)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        _write_weights(folder / WEIGHTS, arrays)
        _write_tokenizer(folder, tokenizer)
    except OSError as error:
        raise CheckpointError(f"--to {folder}: cannot be written: {error.strerror or error}") from error
    return sorted(file.name for file in folder.iterdir())


def _tokenizer(labels: Mapping[str, Any]) -> Tokenizer:
    name = labels.get("tokenizer") or BYTES
    return Bytes() if name == BYTES else FromFile(Path(name).expanduser(), end_token=labels.get("end_token"))


def _config(options: Mapping[str, Any], tokenizer: Tokenizer) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = HuggingFaceModel(HuggingFaceOptions(**options)).config(vocabulary=tokenizer.size, end=tokenizer.end)
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING  # its values may be tuples, which its annotation leaves out
    if type(config) not in mapping:
        raise SpecError(f"model.options: {config.model_type} is no causal language model of transformers")
    found = mapping[type(config)]
    config.architectures = [(found[0] if isinstance(found, tuple) else found).__name__]
    config.eos_token_id = tokenizer.end
    config.bos_token_id = None
    return config


def _write_weights(path: Path, arrays: Mapping[str, Array]) -> None:
    from safetensors.numpy import save

    with outputs.replaced(path) as file:
        file.write(save(dict(arrays), metadata={"format": "pt"}))
        file.flush()
        os.fsync(file.fileno())


def _write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    maker: Any = PreTrainedTokenizerFast  # it has no annotations
    if isinstance(tokenizer, FromFile):
        library = tokenizer.library
        end = library.id_to_token(tokenizer.end)
    else:
        library, end = _library_of_bytes(), END
    maker(tokenizer_object=library, eos_token=end, pad_token=end).save_pretrained(folder)
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
