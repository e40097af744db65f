"""Make the data sets of a user's own class or function."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from mtrain.core.interfaces import Dataset, SplitRequest
from mtrain.data.objects import unusable
from mtrain.errors import DataError, PluginError
from mtrain.spec.references import Reference
from mtrain.tasks.own import calls

OFFERED = frozenset({"split", "root"})
"""Parameters that mtrain gives to a data set that takes them."""


class AnyOptions(BaseModel):
    """The options of a user's own class: its signature checks them."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Referring:
    """Base class of the plugins ``own``: each stands for code of a user, and ``referring`` makes the class for one reference."""

    section: ClassVar[str]
    """Key of the spec that takes the reference."""
    reference: ClassVar[Reference | None] = None

    @classmethod
    def referring(cls, reference: Reference) -> type[Self]:
        """Return the plugin class for what ``reference`` names."""
        # A class for each, because a registry loads classes, and one job may refer to several reporters.
        return type(
            cls.__name__, (cls,), {"reference": reference, "__module__": cls.__module__, "__doc__": cls.__doc__}
        )

    @classmethod
    def _reference_of(cls) -> Reference:
        if cls.reference is None:
            raise PluginError(
                f"{cls.section}: 'own' stands for a class or function of yours; write PATH.py:Name in its place"
            )
        return cls.reference


@dataclass(frozen=True)
class OwnSplit:
    """One split, made by the user's class."""

    dataset: Any
    class_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.dataset)


class OwnData(Referring, Dataset):
    """Stands for a user's own data set."""

    section = "data.format"

    Options: ClassVar[type[BaseModel]] = AnyOptions
    kind = "own"

    def __init__(self, options: AnyOptions) -> None:
        self._options = dict(options.model_extra or {})

    def read(self, request: SplitRequest) -> OwnSplit:
        """Make one split: call the class with the options, and with ``split`` and ``root`` if it takes them.

        Raises:
            DataError: the object is no data set, or there is no evaluation split.
            UsageError: it cannot be made.
        """
        reference = self._reference_of()
        if request.split == "val" and not calls.takes(reference, "split"):
            raise DataError(
                f"data.format: {reference.text} has no parameter `split`, so there is no evaluation split; give it one, with "
                "the values 'train' and 'val', or set evaluate.enabled: false"
            )
        offered: dict[str, Any] = {"split": request.split} | (
            {} if request.root is None else {"root": str(request.root)}
        )
        dataset = calls.make(reference, self._options, offered, path="data.options")
        if problem := unusable(dataset):
            raise DataError(f"data.format: {reference.text}: {problem}")
        if not len(dataset):
            raise DataError(f"data.format: {reference.text}: its {request.split} split is empty; expected samples")
        return OwnSplit(dataset)
