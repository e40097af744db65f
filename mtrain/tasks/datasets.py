"""Open the data set that a spec names and read its splits with the plugin of its format."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.interfaces.dataset import Split, SplitRequest
from mtrain.data.classes import choose_classes
from mtrain.data.reading import listed
from mtrain.errors import DataError
from mtrain.spec.bounds import bounded_reading, give_back, memory_limit

if TYPE_CHECKING:
    from mtrain.core.interfaces import Dataset, TaskKind
    from mtrain.spec.model import DataSpec
    from mtrain.spec.registry import Registry


_SMALLER = "free some memory, or divide the data set"


class OpenData:
    """The splits of a data set. Each is read at its first use, in the form that the readers of its task have."""

    def __init__(self, spec: "DataSpec", reader: "Dataset", task: "TaskKind") -> None:
        self._spec = spec
        self._reader = reader
        self._task = task
        self._names_of_train: list[str] = []
        self.kind = reader.kind

    @cached_property
    def train(self) -> Any:
        """Return the training split.

        Raises:
            DataError: it cannot be read, or holds no image.

        """
        return self._read("train", self._spec.train) if self._parts is None else self._parts[0]

    @cached_property
    def val(self) -> Any:
        """Return the evaluation split.

        Raises:
            DataError: it cannot be read, holds no image, or has other classes than the training split.

        """
        if self._parts is not None:
            return self._parts[1]
        split = self._read("val", self._spec.val)
        if split.class_names != self.train.class_names:
            raise DataError(
                f"data.val: its classes are {', '.join(split.class_names)}, but those of data.train are "
                f"{', '.join(self.train.class_names)}; both splits need the same classes: data.classes chooses and renames them"
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
            # Both splits may fail for one reason, such as a missing root, which is then said once.
            raise DataError("\n".join(dict.fromkeys(problems)))
        return splits

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the class names in label order."""
        names: tuple[str, ...] = self.train.class_names
        return names

    def _own_names(self) -> list[str]:
        """Return the classes of the training split as its reader numbers them, before ``data.classes`` chooses."""
        split = self.train  # reading it notes its names
        return self._names_of_train or list(split.class_names)

    @cached_property
    def _parts(self) -> tuple[Any, Any] | None:
        """Return both splits where the task divides one set into them; else None."""
        return self._task.divided(self._spec, lambda: self._read("all", self._spec.train))

    def _read(self, split: Split, value: str | None) -> Any:
        spec = self._spec
        root = None if spec.root is None else Path(spec.root).expanduser()
        # A reader that numbers what it finds would number the
        # classes of an evaluation split that lacks one differently.
        names = self._own_names() if split == "val" and self._reader.classes_of_train else spec.names
        request = SplitRequest(split=split, root=root, value=value, images=spec.images, names=names)
        with bounded_reading(f"data.root: {root}", memory_limit(), remedy=_SMALLER):
            content = self._reader.read(request)
        # Readers build objects that are much larger than what they return, and glibc would keep their memory.
        give_back()
        key = "train" if split == "all" else split
        if not len(content):
            raise DataError(f"data.{key}: the {key} split of {root} holds no image")
        _refuse_unwritable_names(getattr(content, "class_names", ()), key=key, root=root)
        if split == "train":
            self._names_of_train = list(getattr(content, "class_names", ()))
        classes = getattr(spec, "classes", None)
        if classes is not None:
            content = content.with_classes(choose_classes(content.class_names, classes, key=f"{request!r} {classes!r}"))
            if not len(content):
                raise DataError(
                    f"data.{key}: the {key} split of {root} holds no image of data.classes ({', '.join(classes)})"
                )
        return self._task.prepared(spec, content)


def _refuse_unwritable_names(names: Sequence[Any], *, key: str, root: Path | None) -> None:
    """Refuse class names that no file or image can hold: those of folders or files whose bytes are not UTF-8.

    Raises:
        DataError: there are such names; all of them are listed.
    """
    # Bytes of a file name that are not UTF-8 become lone surrogates
    # (PEP 383), which neither JSON nor a drawing can hold.
    strange = [str(name) for name in names if any("\ud800" <= letter <= "\udfff" for letter in str(name))]
    if strange:
        raise DataError(
            f"data.{key}: {len(strange)} class names in {root} are not UTF-8; rename these folders or classes:\n"
            f"{listed([ascii(name) for name in strange])}"
        )


def open_data(spec: "DataSpec", *, registry: "Registry | None" = None) -> OpenData:
    """Open the data set that the section ``data`` of a spec names. No file is read before a split is used.

    ``registry``: the plugins that may load; None: those that may load in the current folder.

    Raises:
        PluginError: ``spec.format`` names no data set plugin, or one of an unknown task.
        SpecError: ``spec.options`` does not suit it.

    """
    from mtrain.spec.registry import Registry  # reading annotations alone needs no plugins

    registry = Registry.read() if registry is None else registry
    reader = registry.make("datasets", spec.format, spec.options, path="data.options")
    task: Any = registry.load("tasks", reader.kind)
    return OpenData(spec, reader, task)
