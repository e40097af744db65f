"""The data set that a spec names, opened: its splits, read by the plugin of its format."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtrain.errors import DataError, SpecError

if TYPE_CHECKING:
    from mtrain.core.interfaces import Dataset
    from mtrain.spec import plugins
    from mtrain.spec.model import DataSpec


class OpenData:
    """The splits of a data set, each read when first asked for, in the form of its kind: for detection
    ``sample.Annotations``, for classification ``labelled.LabelledPictures``."""

    def __init__(self, spec: "DataSpec", reader: "Dataset") -> None:
        self._spec = spec
        self._reader = reader
        self.kind = reader.kind

    @cached_property
    def train(self) -> Any:
        """The training split.

        Raises:
            DataError: it cannot be read, or holds no picture.

        """
        return self._read("train", self._spec.train) if self._spec.split is None else self._parts[0]

    @cached_property
    def val(self) -> Any:
        """The evaluation split.

        Raises:
            DataError: it cannot be read, holds no picture, or has other classes than the training split.

        """
        if self._spec.split is not None:
            return self._parts[1]
        found = self._read("val", self._spec.val)
        if found.class_names != self.train.class_names:
            raise DataError(
                f"data.val: its classes are {', '.join(found.class_names)}, but those of data.train are "
                f"{', '.join(self.train.class_names)}; both splits need the same classes"
            )
        return found

    def both(self) -> list[Any]:
        """The training and the evaluation split.

        Raises:
            DataError: what is wrong with either, told together.

        """
        found, problems = [], []
        for split in ("train", "val"):
            try:
                found.append(getattr(self, split))
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError("\n".join(dict.fromkeys(problems)))
        return found

    @property
    def class_names(self) -> tuple[str, ...]:
        """In label order."""
        names: tuple[str, ...] = self.train.class_names
        return names

    @cached_property
    def _parts(self) -> tuple[Any, Any]:
        """All pictures, divided by ``data.split``."""
        from mtrain.tasks.detection.selection import divided  # not at the top: see `open_data`

        spec = self._spec
        assert spec.split is not None
        if self.kind != "detection":
            raise SpecError(f"data.split: not known to data sets for {self.kind}; set it to null")
        return divided(self._read("all", spec.train), spec.split, seed=spec.split_seed)

    def _read(self, split: Literal["train", "val", "all"], value: str | None) -> Any:
        from mtrain.tasks.detection.selection import (
            need_bounded_pictures,
            need_sizes,
            without_missing,
        )  # not at the top: see `open_data`

        spec = self._spec
        root = None if spec.root is None else Path(spec.root).expanduser()
        found = self._reader.read(root, value, spec.images, spec.names, split=split)
        key = "train" if split == "all" else split
        if not len(found):
            raise DataError(f"data.{key}: the {key} split of {root} holds no picture")
        if self.kind != "detection":
            return found
        if spec.skip_missing:
            found = without_missing(found)
        need_sizes(found)
        need_bounded_pictures(found, max_pixels=spec.max_pixels)
        return found


def open_data(spec: "DataSpec", *, policy: "plugins.Policy | None" = None) -> OpenData:
    """The data set that ``spec`` names, a plugin as ``policy`` allows. Nothing is read before a split is asked for.

    Raises:
        PluginError: ``spec.format`` names no data set plugin.
        SpecError: ``spec.options`` does not suit it.

    """
    from mtrain.spec import plugins  # not at the top: who only reads annotations needs no plugins

    reader = plugins.load("datasets", spec.format, policy=policy)
    options = plugins.options("datasets", spec.format, spec.options, path="data.options", policy=policy)
    return OpenData(spec, reader(options))
