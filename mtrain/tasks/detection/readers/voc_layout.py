"""Find the annotation files and images of a Pascal VOC data set.

Tools arrange the same XML files in many ways. Two kinds of layout are supported: a list of image ids
(``ImageSets/Main/train.txt``) beside one folder of XML files, or of images with
their XML files, and a folder per split that is searched for XML files.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mtrain.core.interfaces import Split
from mtrain.data.images.header import SUFFIXES
from mtrain.data.reading import FOLDERS_OF, first_existing, images_in, lines_of, name_some, need_unique, walk

IMAGE_FOLDERS = ("JPEGImages", "images", "Images", "JPEGimages")
"""Folders searched for images that neither ``data.images`` nor a place beside the XML file gives."""


_PAIR = re.compile(rf"(.+?(?:{'|'.join(map(re.escape, sorted(SUFFIXES)))}))\s+(.+\.xml)", re.IGNORECASE)
"""A line of an image and its XML file. Names may have spaces."""


@dataclass(frozen=True, slots=True)
class VocEntry:
    """One image of a split."""

    image_id: str
    xml: Path
    image: Path
    """Image file; it may be missing, which the check of the images reports."""


@dataclass(frozen=True, slots=True)
class VocSplit:
    """The images of one split, and every annotation file whose classes count."""

    entries: Sequence[VocEntry]
    xml_files: Sequence[Path]
    place: Path
    """The list or folder from which the split was read, for messages."""
    notes: Sequence[str] = field(default=())


class ImageFinder:
    """Finds images below a folder by name, with any suffix."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def _by_stem(self) -> Mapping[str, Sequence[Path]]:
        paths_by_stem: dict[str, list[Path]] = {}
        for path in images_in(self.folder):
            paths_by_stem.setdefault(path.stem, []).append(path)
        return paths_by_stem

    def find(self, stem: str, *, near: Path) -> Path | None:
        """Return the image called ``stem``; among several, prefer one in folder ``near``, then one in a folder of
        that name."""
        candidates = self._by_stem.get(stem, ())
        return min(
            candidates, key=lambda path: (path.parent != near, path.parent.name != near.name, path), default=None
        )


def layout_of(root: Path, value: str | None, images: str | None, *, annotations: str, split: Split) -> VocSplit:
    """Find the images of ``split``; ``value`` is ``data.<split>``, ``images`` is ``data.images``.

    Raises:
        DataError: the split is in none of the expected places, or an id occurs twice.
    """
    if value is not None:
        place = first_existing([root / value], what="list or folder of images", key=f"data.{split}")
    elif split == "all":
        place = root / annotations if (root / annotations).is_dir() else root
    else:
        split_names = FOLDERS_OF[split]
        lists = [root / "ImageSets" / "Main" / f"{split_name}.txt" for split_name in split_names] + [
            root / f"{w}.txt" for w in split_names
        ]
        folders = [root / split_name for split_name in split_names] + [
            root / annotations / split_name for split_name in split_names
        ]
        hint = ", or a share of all images with data.split (0.2)"
        place = first_existing([*lists, *folders], what=f"{split} split", key=f"data.{split}", remedy=hint)
    if place.is_dir():
        return _from_folder(root, place, images)
    return _from_list(root, place, images, annotations=annotations)


def _from_list(root: Path, file: Path, images: str | None, *, annotations: str) -> VocSplit:
    lines = lines_of(file)
    pairs = [match.groups() for line in lines if (match := _PAIR.match(line))]
    if pairs and len(pairs) == len(lines):
        return _from_pairs(root, file, pairs, images)
    folder = first_existing([root / annotations], what="folder of XML files", key="data.options.annotations")
    xml_by_name = {path.stem: path for path in _xml_files(folder)}
    found_in = _image_folder(root, images, folder)
    finder = ImageFinder(found_in)
    entries = []
    for line in lines:
        image_id = _image_id(line, xml_by_name)
        stem = Path(image_id).name
        xml = xml_by_name.get(stem, folder / f"{image_id}.xml")
        image = finder.find(stem, near=found_in) or found_in / f"{stem}.jpg"
        entries.append(VocEntry(image_id, xml, image))
    need_unique((entry.image_id for entry in entries), where=str(file), what="image ids")
    return VocSplit(entries, sorted(xml_by_name.values()), file)


def _from_pairs(root: Path, file: Path, pairs: Sequence[tuple[str, ...]], images: str | None) -> VocSplit:
    """Read a list of PaddleDetection, whose lines name an image and its XML file."""
    folders = [root / (images or ""), root]
    folder = next((each for each in folders if (each / pairs[0][1]).is_file()), folders[0])
    entries = [VocEntry(Path(image).with_suffix("").as_posix(), folder / xml, folder / image) for image, xml in pairs]
    need_unique((entry.image_id for entry in entries), where=str(file), what="image ids")
    # All files count, as in a folder: a list of one split may lack a class of the other.
    return VocSplit(entries, _xml_files(root), file)


def _image_id(line: str, xml_by_name: Mapping[str, Path]) -> str:
    """Return the id in a line: the whole line, or its first word if more columns follow, without a suffix."""
    # Lists of VOC's challenges have a second column, 1 or -1; a name may have spaces, so the whole line comes first.
    for text in (line, line.split()[0]):
        path = Path(text.replace("\\", "/"))
        has_suffix = path.suffix.lower() in {*SUFFIXES, ".xml"}
        stem = path.with_suffix("") if has_suffix else path
        if text is not line or stem.name in xml_by_name:
            break
    return stem.as_posix()


def _image_folder(root: Path, images: str | None, beside: Path) -> Path:
    if images is not None:
        return first_existing([root / images], what="folder of images", key="data.images")
    places = [root / name for name in IMAGE_FOLDERS]
    return next((place for place in places if place.is_dir()), beside)


def _from_folder(root: Path, folder: Path, images: str | None) -> VocSplit:
    xml_files = _xml_files(folder)
    # Search the split's folder first: another split may hold an image of the same name.
    finders = [ImageFinder(folder), ImageFinder(root)]
    if images is not None:
        finders = [ImageFinder(first_existing([root / images], what="folder of images", key="data.images"))]
    entries = []
    for xml in xml_files:
        image = next(filter(None, (finder.find(xml.stem, near=xml.parent) for finder in finders)), None)
        image_id = xml.relative_to(folder).with_suffix("").as_posix()
        entries.append(VocEntry(image_id, xml, image or xml.with_suffix(".jpg")))
    need_unique((entry.image_id for entry in entries), where=str(folder), what="names of XML files")
    return VocSplit(entries, _xml_files(root), folder, _find_unlabelled(folder, entries))


def _find_unlabelled(folder: Path, entries: Iterable[VocEntry]) -> list[str]:
    used_images = {entry.image for entry in entries}
    unused_names = [path.name for path in images_in(folder) if path not in used_images]
    return [name_some(unused_names, "images without an XML file (left out)")] if unused_names else []


def _xml_files(folder: Path) -> list[Path]:
    return [path for path in walk(folder) if path.suffix.lower() == ".xml"]
