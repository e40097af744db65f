"""Annotations in Pascal VOC form (http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/): one XML file a picture.

Corners are taken as they stand: continuous pixel coordinates, no shift by one. (The first VOC releases counted pixels
from 1; the tools that people label with today do not.)
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.errors import DataError
from mtrain.data.header import SUFFIXES, probe
from mtrain.data.reading import Split, first_existing, listed, need_root, need_unique, order_names
from mtrain.data.sample import Annotations, Picture, assemble
from mtrain.data.voc_xml import VocPicture, read_voc_xml, voc_class_names


class Voc:
    """The ``voc`` data set plugin.

    ``Annotations/<id>.xml``, ``JPEGImages/<id>.<any picture suffix>``, and lists of ids
    ``ImageSets/Main/<split>.txt``, which ``data.train`` and ``data.val`` may name otherwise. Classes are
    ``data.names``, or all names found in ``Annotations`` in alphabetical order, whichever split is read.
    """

    kind: ClassVar[str] = "detection"

    class Options(BaseModel):
        """What to do with what only VOC has."""

        model_config = ConfigDict(extra="forbid", frozen=True)
        use_difficult: bool = Field(
            default=True, description="false: what is marked difficult is neither trained on nor scored"
        )
        annotations: str = Field(default="Annotations", description="folder of the XML files")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._found_names: dict[Path, tuple[str, ...]] = {}

    def read(
        self,
        root: Path | None,
        split_value: str | None,
        images: str | None,
        names: Sequence[str] | None,
        *,
        split: Split,
    ) -> Annotations:
        """One split.

        Raises:
            DataError: files are missing or damaged, or ``names`` disagrees with the classes found. All mistakes are
            listed.

        """
        root = need_root(root, "voc")
        default = Path("ImageSets") / "Main" / f"{split}.txt"
        ids_file = first_existing([root / (split_value or default)], what="list of pictures", key=f"data.{split}")
        ids = [line.split()[0] for line in ids_file.read_text("utf-8").splitlines() if line.strip()]
        need_unique(ids, where=str(ids_file), what="picture ids")
        folder = first_existing([root / self.options.annotations], what="XML folder", key="data.options.annotations")
        pictures = _Folder(first_existing([root / (images or "JPEGImages")], what="picture folder", key="data.images"))
        class_names = order_names(self._names(folder), names, where=str(folder))
        labels = {name: label for label, name in enumerate(class_names)}
        return assemble(
            self._read_all(ids, folder, pictures, labels),
            class_names=class_names,
            category_ids=tuple(range(1, len(class_names) + 1)),
        )

    def _names(self, folder: Path) -> tuple[str, ...]:
        if folder not in self._found_names:
            found = set().union(*(voc_class_names(path) for path in folder.glob("*.xml")))
            self._found_names[folder] = tuple(sorted(found))
        return self._found_names[folder]

    def _read_all(
        self, ids: Sequence[str], folder: Path, pictures: "_Folder", labels: Mapping[str, int]
    ) -> list[Picture]:
        read: list[Picture] = []
        wrong: list[str] = []
        damaged = 0
        for picture_id in ids:
            faults: list[str] = []
            file = folder / f"{picture_id}.xml"
            content = read_voc_xml(file, faults)
            faults += [] if content is None else _unknown_classes(content, labels, file)
            if content is not None and not faults:
                read.append(_picture(content, picture_id, pictures, labels, self.options))
            damaged += bool(faults)
            wrong += faults
        if wrong:
            raise DataError(f"{folder}: {damaged} of {len(ids)} annotation files cannot be used:\n{listed(wrong)}")
        return read


class _Folder:
    """A picture folder in which a picture is found by its name without suffix."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _by_stem(self) -> dict[str, Path]:
        return {p.stem: p for p in sorted(self.path.iterdir(), reverse=True) if p.suffix.lower() in SUFFIXES}

    def find(self, stem: str) -> Path:
        return self._by_stem.get(stem, self.path / f"{stem}.jpg")


def _unknown_classes(content: VocPicture, labels: Mapping[str, int], file: Path) -> list[str]:
    unknown = sorted({item.name for item in content.objects} - set(labels))
    return [f"{file}: unknown class {name!r}" for name in unknown]


def _picture(
    content: VocPicture, picture_id: str, pictures: _Folder, labels: Mapping[str, int], options: Voc.Options
) -> Picture:
    path = pictures.find(picture_id)
    known = content.width > 0 and content.height > 0
    width, height = (content.width, content.height) if known else probe(path)
    corners = np.array([item.corners for item in content.objects], dtype=np.float64).reshape(-1, 4)
    boxes_xywh = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    ignored = [item.difficult and not options.use_difficult for item in content.objects]
    return Picture(
        path=path,
        file_name=path.name,
        image_id=picture_id,
        width=width,
        height=height,
        boxes_xywh=boxes_xywh,
        labels=np.array([labels[item.name] for item in content.objects], dtype=np.int64),
        crowd=np.array(ignored, dtype=np.bool_),
        area=boxes_xywh[:, 2] * boxes_xywh[:, 3],
    )
