"""The data set plugin `labelme_groups`: one JSON file an image, as LabelMe writes them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override

from mtrain.core.interfaces import Dataset, Split, SplitRequest
from mtrain.data.reading import FOLDERS_OF, first_existing, listed, need_root, order_names, size_of, walk
from mtrain.errors import DataError
from mtrain.tasks.detection.annotations import AnnotatedImage, Annotations, assemble
from mtrain_labelme.shapes import LabelMeFile, Shape, box_of, objects_of, read_file

ShapeType = Literal["rectangle", "polygon", "circle", "mask", "line", "linestrip", "points", "point"]


class LabelMe(Dataset):
    """Boxes around the shapes of LabelMe files.

    `data.train` and `data.val` name folders below `data.root`; without them the folders are called `train` and `val`.
    With `data.split` one folder is divided. An image is looked for at the path in its file, then beside the file, or
    by its name in `data.images`. Classes are `data.names`, or all labels of the training split in alphabetical order.
    """

    class Options(BaseModel):
        """The keys of `data.options`."""

        model_config = ConfigDict(extra="forbid", frozen=True)

        shapes: tuple[ShapeType, ...] = Field(
            default=("rectangle", "polygon", "circle", "mask"),
            description="kinds of shapes that are objects; others are left out, and a note counts them",
        )
        left_out: tuple[str, ...] = Field(
            default=("__ignore__", "_background_"), description="labels that are no objects"
        )
        crowd_flag: str = Field(
            default="crowd", description="flag of shapes that surround a group: not trained on, and not scored"
        )

    kind: ClassVar[str] = "detection"
    classes_of_train: ClassVar[bool] = True

    def __init__(self, options: Options) -> None:
        self.options = options

    @override
    def read(self, request: SplitRequest) -> Annotations:
        root = need_root(request.root, "labelme_groups")
        contents = self._contents(_folder(root, request.value, request.split))
        kept = {path: self._kept(content.shapes) for path, content in contents.items()}
        found = sorted({shape.label for shapes in kept.values() for shape in shapes})
        if request.split == "val" and request.names is not None:  # some may not occur in this split
            class_names = tuple(request.names)
        else:
            class_names = order_names(found, request.names, where=str(root))
        labels = {name: label for label, name in enumerate(class_names)}
        annotated, problems = [], []
        for path, content in contents.items():
            unknown = sorted({shape.label for shape in kept[path]} - set(labels))
            problems += [f"{path}: unknown class {name!r}" for name in unknown]
            if not unknown:
                annotated.append(self._image(root, path, content, kept[path], images=request.images, labels=labels))
        if problems:
            raise DataError(f"data.{request.split}: classes that data.train does not have:\n{listed(problems)}")
        return assemble(
            annotated,
            class_names=class_names,
            category_ids=range(1, len(class_names) + 1),
            notes=self._notes(contents.values()),
        )

    def _contents(self, folder: Path) -> dict[Path, LabelMeFile]:
        """Read every JSON file below a folder; all damaged ones are named together."""
        contents, problems = {}, []
        for path in walk(folder):
            if path.suffix.lower() != ".json":
                continue
            try:
                contents[path] = read_file(path)
            except DataError as error:
                problems.append(str(error))
        if problems:
            raise DataError(f"{folder}: {len(problems)} files cannot be used:\n{listed(problems)}")
        if not contents:
            raise DataError(f"{folder}: no JSON files; expected those that LabelMe writes, one an image")
        return contents

    def _kept(self, shapes: Sequence[Shape]) -> list[Shape]:
        options = self.options
        return [shape for shape in shapes if shape.shape_type in options.shapes and shape.label not in options.left_out]

    def _notes(self, contents: Iterable[LabelMeFile]) -> list[str]:
        kinds = Counter(shape.shape_type for content in contents for shape in content.shapes)
        return [
            f"{count} shapes of the kind {kind} are left out (data.options.shapes)"
            for kind, count in sorted(kinds.items())
            if kind not in self.options.shapes
        ]

    def _image(
        self,
        root: Path,
        path: Path,
        content: LabelMeFile,
        shapes: Sequence[Shape],
        *,
        images: str | None,
        labels: Mapping[str, int],
    ) -> AnnotatedImage:
        image = _image_file(root, path, content, images)
        known = content.image_width and content.image_height
        width, height = (content.image_width, content.image_height) if known else size_of(image)
        objects = objects_of(shapes)
        return AnnotatedImage(
            path=image,
            file_name=path.relative_to(root).with_suffix(image.suffix).as_posix(),
            image_id=path.relative_to(root).with_suffix("").as_posix(),
            width=width or 0,
            height=height or 0,
            boxes_xywh=np.array([box_of(parts) for parts in objects]).reshape(-1, 4),
            labels=np.array([labels[parts[0].label] for parts in objects], dtype=np.int64),
            crowd=np.array([self._is_crowd(parts) for parts in objects], dtype=np.bool_),
            area=np.array([sum(part.area() for part in parts) for parts in objects], dtype=np.float64),
        )

    def _is_crowd(self, parts: Sequence[Shape]) -> bool:
        return any(part.flags.get(self.options.crowd_flag, False) for part in parts)


def _folder(root: Path, value: str | None, split: Split) -> Path:
    """Return the folder of a split's files."""
    if value is not None or split == "all":
        return first_existing([root / (value or ".")], what="folder", key=f"data.{split}")
    return first_existing([root / name for name in FOLDERS_OF[split]], what="folder", key=f"data.{split}")


def _image_file(root: Path, path: Path, content: LabelMeFile, images: str | None) -> Path:
    """Return the file of an image; one that does not exist is reported by the task."""
    relative = PureWindowsPath(content.image_path)  # reads the paths of both systems
    if images is not None:
        return root / images / relative.name
    stated = path.parent / relative.as_posix()
    return stated if stated.is_file() else path.with_name(relative.name)
