"""Read annotations in Pascal VOC form (http://host.robots.ox.ac.uk/pascal/VOC/voc2012/htmldoc/): one XML file an
image.

Corners are used as written: continuous pixel coordinates, not shifted by one. (The first VOC releases counted pixels
from 1; the tools that people label with today do not.)
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from mtrain.core.interfaces import Dataset, PluginOptions, SplitRequest
from mtrain.data.once_per_host import once_per_host
from mtrain.data.reading import lines_of, listed, need_root, need_unique, order_names, size_of
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import SHARED, AnnotatedImage, Annotations, assemble
from mtrain.tasks.detection.readers.voc_layout import VocEntry, VocSplit, layout_of
from mtrain.tasks.detection.readers.voc_xml import VocImage, read_voc_xml, voc_class_names

LABEL_LIST = "label_list.txt"
"""Where PaddleDetection's sets name their classes."""


class Voc(Dataset):
    """The ``voc`` data set plugin.

    Reads ``Annotations/<id>.xml`` with lists of ids ``ImageSets/Main/<split>.txt``, or a folder per split with the XML
    files in it; ``data.train`` and ``data.val`` name a list or a folder. An image has the name of its XML file with
    any image suffix, and lies beside it, in ``data.images``, ``JPEGImages`` or ``images``. <path> in the XML is
    ignored, and <filename> is used only if no image has the name of the XML file. Classes are ``data.names``, those
    of a ``label_list.txt`` in their order, or all names found in alphabetical order, whichever split is read.
    """

    kind: ClassVar[str] = "detection"

    class Options(PluginOptions):
        """How to treat properties that only VOC has."""

        use_difficult: bool = Field(
            default=True, description="false: objects marked difficult are neither trained on nor scored"
        )
        label_list: str | None = Field(
            default=None,
            description="file with one class a line, in the order of the labels, from data.root; classes without an object "
            f"count too; null: {LABEL_LIST}, if it is there",
        )
        annotations: str = Field(default="Annotations", description="folder of the XML files, from data.root")

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or self.Options()
        self._names_by_file: dict[Path, set[str]] = {}

    @once_per_host(SHARED)
    def read(self, request: SplitRequest) -> Annotations:
        """Read one split.

        Raises:
            DataError: files are missing or damaged, or ``names`` disagrees with the classes found. All mistakes
            are listed.

        """
        root = need_root(request.root, "voc")
        layout = layout_of(
            root, request.value, request.images, annotations=self.options.annotations, split=request.split
        )
        if not layout.entries:
            raise DataError(
                f"data.{request.split}: no annotation files in {layout.place}; expected XML files in Pascal VOC form, or a "
                "list of "
                "image ids"
            )
        # The names of all annotation files count, not those of one split: else labels would differ between splits.
        listed_names = self._label_list(root)
        available = listed_names or self._names(layout.xml_files)
        class_names = order_names(available, request.names, where=str(layout.place))
        return assemble(
            self._read_all(layout, {name: label for label, name in enumerate(class_names)}),
            class_names=class_names,
            category_ids=tuple(range(1, len(class_names) + 1)),
            notes=layout.notes,
        )

    def _label_list(self, root: Path) -> tuple[str, ...]:
        """Return the classes of the label list in their order; none where there is no list."""
        file = root / (self.options.label_list or LABEL_LIST)
        if self.options.label_list is None and not file.is_file():
            return ()
        names = lines_of(file)
        need_unique(names, where=str(file), what="class names")
        return tuple(names)

    def _names(self, xml_files: Sequence[Path]) -> tuple[str, ...]:
        """Return the classes of all annotation files, in alphabetical order."""
        for file in xml_files:
            # The second split of a job asks for the same files again.
            if file not in self._names_by_file:
                self._names_by_file[file] = voc_class_names(file)
        return tuple(sorted(set().union(*(self._names_by_file[file] for file in xml_files))))

    def _read_all(self, layout: VocSplit, labels: Mapping[str, int]) -> list[AnnotatedImage]:
        images: list[AnnotatedImage] = []
        problems: list[str] = []
        damaged_count = 0
        for entry in layout.entries:
            faults: list[str] = []
            content = read_voc_xml(entry.xml, faults)
            faults += [] if content is None else _unknown_classes(content, labels, entry.xml)
            if content is not None and not faults:
                images.append(_image(content, entry, labels, self.options))
            damaged_count += bool(faults)
            problems += faults
        if problems:
            raise DataError(
                f"{layout.place}: {damaged_count} of {len(layout.entries)} annotation files cannot be used:\n"
                f"{listed(problems)}"
            )
        return images


def _unknown_classes(content: VocImage, labels: Mapping[str, int], file: Path) -> list[str]:
    unknown = sorted({item.name for item in content.objects} - set(labels))
    return [f"{file}: unknown class {name!r}" for name in unknown]


def _image(content: VocImage, entry: VocEntry, labels: Mapping[str, int], options: Voc.Options) -> AnnotatedImage:
    path = entry.image
    named_path = path.with_name(Path(content.file_name.replace("\\", "/")).name or path.name)
    # Some tools number their XML files, and <filename> names the image.
    if not os.path.isfile(path) and os.path.isfile(named_path):
        path = named_path
    has_size = content.width > 0 and content.height > 0
    size_wh = (content.width, content.height) if has_size else size_of(path)
    corners = np.array([item.corners for item in content.objects], dtype=np.float64).reshape(-1, 4)
    boxes_xywh = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    is_crowd = [item.difficult and not options.use_difficult for item in content.objects]
    numbers = [labels[item.name] for item in content.objects]
    return AnnotatedImage.of(path, entry.image_id, boxes_xywh, numbers, size_wh=size_wh, crowd=is_crowd)
