"""The interface of an importer plugin: it translates the configs of one other project.

An importer reads the values of its files through a ``key_report.Book`` for each, and enters every key: as carried over,
as the same anyway, or as dropped with a reason. What it puts into the books becomes the spec.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from pydantic import BaseModel

from mtrain.errors import SpecError
from mtrain.spec.importers.documents import Document
from mtrain.spec.importers.key_report import Book
from mtrain.spec.model import Spec
from mtrain.spec.section import NoOptions
from mtrain.spec.yaml_reader import flow


class Importer(ABC):
    """A translator of another project's configs: the target of one ``mtrain.importers`` entry point.

    A plugin class derives from it and so has the defaults below. Those that mtrain ships are tried one after another;
    any other one is used where ``mtrain config import --from NAME`` names it.
    """

    Options: ClassVar[type[BaseModel]] = NoOptions
    expected: ClassVar[str]
    """Description of its files, as an error message names them: ``X's YAML with `architecture```."""

    of_scripts: ClassVar[bool] = False
    """Whether its files say where a script runs, and not what is trained."""

    def __init__(self, options: BaseModel | None = None) -> None:
        self.options = options

    @abstractmethod
    def recognises(self, documents: Sequence[Document]) -> bool:
        """Return whether one of the files seems to be of its project."""

    def lacking(self, document: Document) -> str:
        """Say what a file is that describes no whole training, and what to do with it; empty: it describes one."""
        return ""

    @abstractmethod
    def translate(self, documents: Sequence[Document], *, cards: int | None) -> Sequence[Book]:
        """Translate the files, and return a book of each.

        ``cards``: value of ``--cards``, the number of devices for which a batch per device is meant. An importer whose
        project states no such batch refuses it.

        Raises:
            SpecError: a file describes something that mtrain does not have.
        """


def sections(document: Document) -> list[str]:
    """Return the names of the document's sections that belong to a spec of mtrain."""
    return [key for key in Spec.model_fields if isinstance(document.values.get(key), dict)]


def refuse_file(document: Document, expected: str) -> SpecError:
    """Return the error for a file that no importer, or not the named one, takes; ``expected`` describes the files."""
    own = sections(document)
    if own:
        content = f"seems to be a spec of mtrain already (it has {', '.join(own)})"
    else:
        keys = ", ".join(map(flow, list(document.values)[:5])) or "nothing"
        content = f"holds {keys}, which fits no known kind of config"
    return SpecError(f"{document.name}: {content}; expected {expected}")
