"""Open the data set that a spec names and read its splits with the plugin of its format."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtrain.errors import DataError

if TYPE_CHECKING:
    from mtrain.core.interfaces import Dataset, TaskKind
    from mtrain.spec import plugins
    from mtrain.spec.model import DataSpec


class OpenData:
    """The splits of a data set. Each is read at its first use, in the form that the readers of its task have."""

    def __init__(self, spec: "DataSpec", reader: "Dataset", task: "TaskKind") -> None:
        self._spec = spec
        self._reader = reader
        self._task = task
        self.kind = reader.kind

    @cached_property
    def train(self) -> Any:
        """Return the training split.

        Raises:
            DataError: it cannot be read, or holds no picture.

        """
        return self._read("train", self._spec.train) if self._parts is None else self._parts[0]

    @cached_property
    def val(self) -> Any:
        """Return the evaluation split.

        Raises:
            DataError: it cannot be read, holds no picture, or has other classes than the training split.

        """
        if self._parts is not None:
            return self._parts[1]
        split = self._read("val", self._spec.val)
        if split.class_names != self.train.class_names:
            raise DataError(
                f"data.val: its classes are {', '.join(split.class_names)}, but those of data.train are "
                f"{', '.join(self.train.class_names)}; both splits need the same classes"
            )
        return split

    def both(self) -> list[Any]:
        """Return the training and the evaluation split.

        Raises:
            DataError: either split is wrong; the problems of both are reported together.

        """
        splits, problems = [], []
        for split in ("train", "val"):
            try:
                splits.append(getattr(self, split))
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError("\n".join(dict.fromkeys(problems)))
        return splits

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the class names in label order."""
        names: tuple[str, ...] = self.train.class_names
        return names

    @cached_property
    def _parts(self) -> tuple[Any, Any] | None:
        """Return both splits where the task divides one set into them; else None."""
        return self._task.divided(self._spec, lambda: self._read("all", self._spec.train))

    def _read(self, split: Literal["train", "val", "all"], value: str | None) -> Any:
        spec = self._spec
        root = None if spec.root is None else Path(spec.root).expanduser()
        names = list(self.class_names) if split == "val" and self._reader.classes_of_train else spec.names
        content = self._reader.read(root, value, spec.images, names, split=split)
        key = "train" if split == "all" else split
        if not len(content):
            raise DataError(f"data.{key}: the {key} split of {root} holds no picture")
        return self._task.prepared(spec, content)


def open_data(spec: "DataSpec", *, policy: "plugins.Policy | None" = None) -> OpenData:
    """Open the data set that ``spec`` names, with a plugin that ``policy`` allows. No file is read before a split is
    used.

    Raises:
        PluginError: ``spec.format`` names no data set plugin, or one of an unknown task.
        SpecError: ``spec.options`` does not suit it.

    """
    from mtrain.spec import plugins  # imported here so that reading annotations alone needs no plugins

    reader = plugins.load("datasets", spec.format, policy=policy)
    options = plugins.options("datasets", spec.format, spec.options, path="data.options", policy=policy)
    task: Any = plugins.load("tasks", reader.kind, policy=policy)
    return OpenData(spec, plugins.construct("datasets", spec.format, reader, options), task)
