"""The interface of a reader of exported models: files with which a job is evaluated and predicts, without ranks."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.spec.section import PluginOptions

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


class ExportedFiles(ABC):
    """Base class of the plugins of ``mtrain.exported``."""

    class Options(PluginOptions):
        """The options of the plugin; a spec has none for it."""

    def __init__(self, options: Any) -> None:
        self.options = options

    @abstractmethod
    def spec_values(self, path: Path) -> dict[str, Any]:
        """Return the spec in a file as plain values: model, data and what influences a score, which run no code.

        Raises:
            UsageError: the file cannot be used.
        """

    @abstractmethod
    def evaluate(self, loaded: "Loaded", path: Path, *, quiet: bool) -> tuple[Path, Mapping[str, Any]]:
        """Score a file on the evaluation split, in a run folder of its own; return that and the content of its ``summary.json``.

        Raises:
            UsageError: the data do not fit the model, or a file cannot be used.
        """

    @abstractmethod
    def predict(self, loaded: "Loaded", path: Path, *, files: Mapping[Path, str], out: Path, request: Any) -> None:
        """Predict on images (with their names in the results) into ``out``.

        ``request`` has ``confidence``, ``draw``, ``strict`` and ``device``, as that of ``mtrain predict``.

        Raises:
            UsageError: the spec does not fit the model, or no image can be read.
        """
