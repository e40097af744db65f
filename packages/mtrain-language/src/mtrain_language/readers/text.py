"""Read documents from files of text, JSON lines, Parquet and Arrow."""

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from mtrain.core.interfaces import Dataset, PluginOptions, SplitRequest
from mtrain.data.reading import text_of
from mtrain.data.shards import files_of
from mtrain.errors import DataError
from mtrain.spec.bounds import bounded_reading, limit_of
from mtrain.spec.files import parse_json
from mtrain.spec.remedies import install
from mtrain_language.documents import Document, Documents
from mtrain_language.rendering import ASSISTANT

PLAIN = (".txt", ".md", ".rst", ".py")
"""Suffixes of files that are one document each."""
LINES = (".jsonl", ".ndjson")
TABLES = (".parquet", ".arrow")
MAX_BYTES = 4 << 30
"""Largest file that is read."""
_SMALLER = "divide the file"


class TextOptions(PluginOptions):
    """Where a document stands in files with several fields."""

    text: str = Field(default="text", description="field or column of the text")
    prompt: str | None = Field(
        default=None,
        description="field or column of what stands before the text: it is read, but not learned. null: none",
    )
    messages: str | None = Field(
        default=None,
        description="field or column of a conversation, in the place of text and prompt: a list of {role, content}, of which "
        "what the assistant says is learned; see data.chat_template. null: none",
    )

    @model_validator(mode="after")
    def _text_is_given_once(self) -> "TextOptions":
        if self.messages is not None and self.prompt is not None:
            raise ValueError(
                "messages and prompt are both given; a conversation has its prompts in it, so leave prompt out"
            )
        return self


class TextFiles(Dataset):
    """The ``text`` data set plugin.

    ``.txt``, ``.md``, ``.rst`` and ``.py`` files are one document each; ``.jsonl``, ``.parquet`` and ``.arrow`` (also the
    folders that ``save_to_disk`` of Hugging Face's datasets writes) hold a document in each row. A file belongs to the
    split that its name or folder begins with; ``data.train`` and ``data.val`` name files, folders or patterns; and
    ``data.split`` divides one set.
    """

    kind: ClassVar[str] = "language"
    Options = TextOptions

    options: TextOptions

    def read(self, request: SplitRequest) -> Documents:
        """Read one split into memory.

        Raises:
            DataError: Files are missing, damaged, no text, or lack a field.
        """
        suffixes = (*PLAIN, *LINES, *TABLES)
        files = files_of(request.root, request.value, split=request.split, suffixes=suffixes, kind="text")
        with bounded_reading(files[0], limit_of(sum(file.stat().st_size for file in files)), remedy=_SMALLER):
            found = [document for file in files for document in self._documents(file)]
        if not found:
            raise DataError(f"data: {files[0]} and its neighbours hold no text")
        return Documents(found)

    def _documents(self, file: Path) -> Iterator[Document]:
        if not file.is_file():  # opening a named pipe would wait
            raise DataError(f"{file}: not a regular file; expected a text")
        suffix = file.suffix.lower()
        if suffix in PLAIN:
            if self.options.messages is not None:
                raise DataError(
                    f"{file}: holds no conversation, which data.options.messages asks for; leave the file out"
                )
            text = text_of(file, expected="a text", limit=MAX_BYTES)
            return iter([Document(text)] if text.strip() else [])
        rows = _lines(file) if suffix in LINES else _table(file, self._columns())
        return (self._document(row, where) for where, row in rows)

    def _columns(self) -> list[str]:
        if self.options.messages is not None:
            return [self.options.messages]
        return [self.options.text, *([self.options.prompt] if self.options.prompt else [])]

    def _document(self, row: Any, where: str) -> Document:
        if self.options.messages is not None:
            found = row.get(self.options.messages) if isinstance(row, Mapping) else None
            return Document("", messages=_conversation(found, where=f"{where}: field {self.options.messages!r}"))
        values = [row.get(name) if isinstance(row, Mapping) else None for name in self._columns()]
        for name, value in zip(self._columns(), values, strict=True):
            if not isinstance(value, str):
                has = f"it has {', '.join(map(str, row))}" if isinstance(row, Mapping) else "it is no object"
                given = "no" if value is None else f"a {type(value).__name__} as"
                raise DataError(
                    f"{where}: {given} field {name!r}; {has[:300]}; name the field of the text with data.options.text"
                )
        text, *prompt = map(str, values)
        return Document(text, "".join(prompt))


def _conversation(found: Any, *, where: str) -> tuple[Mapping[str, str], ...]:
    """Return the turns of a conversation.

    Raises:
        DataError: It is none, or the assistant says nothing.
    """
    expected = "expected a list of turns such as {role: user, content: text}"
    if not isinstance(found, list) or not found:
        raise DataError(f"{where}: {'nothing' if found is None else type(found).__name__} given, {expected}")
    for number, turn in enumerate(found, start=1):
        if not isinstance(turn, Mapping) or not all(isinstance(turn.get(key), str) for key in ("role", "content")):
            raise DataError(f"{where}, turn {number}: {str(turn)[:80]} given, {expected}")
    if not any(turn["role"] == ASSISTANT for turn in found):
        raise DataError(f"{where}: no turn has the role {ASSISTANT!r}, so there is nothing to learn; leave the row out")
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in found)


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text_of(file, expected="a text", limit=MAX_BYTES).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{file}:{number}", parse_json(line)
        except ValueError as error:  # also integers of more digits than Python reads
            raise DataError(f"{file}:{number}: no JSON ({error}); correct the line") from error


def _table(file: Path, columns: list[str]) -> Iterator[tuple[str, Any]]:
    try:
        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{file}: reading it needs pyarrow; install it with: {install('data')}") from error
    try:
        if file.suffix.lower() == ".parquet":
            names = parquet.read_schema(file).names
            wanted = [name for name in columns if name in names]
            rows = parquet.read_table(file, columns=wanted or None, use_threads=False).to_pylist()
        else:
            with pyarrow.memory_map(str(file)) as mapped:
                rows = pyarrow.ipc.open_stream(mapped).read_all().to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: damaged, or no such file: {error}") from error
    yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, start=1))
