"""Check the content of a COCO annotation file (https://cocodataset.org/#format-data) against a schema."""

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from mtrain.data.reading import LISTED
from mtrain.errors import DataError
from mtrain.spec.files import parse_json, read_bytes

MAX_BYTES = 16 << 30
"""Largest annotation file that is read, in bytes; the largest public ones have about 6 GB."""
LARGEST_PX = 1e9
"""Coordinates of this size or more are refused as wrong, in pixels."""
_BOM = b"\xef\xbb\xbf"
_SHOWN = 60

_Id = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | float | Annotated[str, msgspec.Meta(max_length=1000)]
_Pixel = Annotated[float, msgspec.Meta(gt=-LARGEST_PX, lt=LARGEST_PX)]
_Side = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class CocoImage(msgspec.Struct, gc=False):
    """An entry of the list ``images``."""

    id: _Id
    file_name: Annotated[str, msgspec.Meta(min_length=1, max_length=4000)]
    width: _Side | None = None
    height: _Side | None = None


class CocoAnnotation(msgspec.Struct, gc=False):
    """An entry of the list ``annotations``."""

    image_id: _Id
    category_id: _Id
    bbox: tuple[_Pixel, _Pixel, _Pixel, _Pixel]
    """Left, top, width, height in pixels."""
    area: Annotated[float, msgspec.Meta(gt=-1e18, lt=1e18)] | None = None
    iscrowd: int | bool | None = None
    id: Any = None
    """Used only in error messages; nothing refers to it."""


class CocoCategory(msgspec.Struct, gc=False):
    """An entry of the list ``categories``."""

    id: _Id
    name: Annotated[str, msgspec.Meta(max_length=1000)] | int | float | None = None


class CocoContent(msgspec.Struct, gc=False):
    """The three lists of an annotation file."""

    images: list[CocoImage]
    annotations: list[CocoAnnotation]
    categories: list[CocoCategory]


_LISTS: Mapping[str, tuple[str, type[msgspec.Struct]]] = {
    "images": ("image", CocoImage),
    "annotations": ("annotation", CocoAnnotation),
    "categories": ("category", CocoCategory),
}
_DECODER = msgspec.json.Decoder(CocoContent)


class Faults:
    """A collection of wrong entries: all are counted, the first ones are kept as text."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[str] = []

    def add(self, entry: str, fault: str) -> None:
        """Record a wrong entry: ``entry`` names it, ``fault`` says what is wrong with it."""
        self.count += 1
        if len(self._first) < LISTED:
            self._first.append(f"  {entry}: {fault}")

    def refuse(self, file: Path) -> None:
        """Raise ``DataError`` if there is any fault."""
        if self.count:
            more = [f"  ... and {self.count - len(self._first)} more"] if self.count > len(self._first) else []
            lines = "\n".join([*self._first, *more])
            raise DataError(f"{file}: {self.count} wrong entries; correct or remove them:\n{lines}")


def read_coco_json(file: Path) -> CocoContent:
    """Read and check an annotation file.

    Raises:
        DataError: it cannot be read, is not JSON, lacks a list, or has wrong entries; these are listed.
    """
    content = _bytes_of(file)
    try:
        # A correct file is decoded straight into records. One with faults is read a second
        # time, entry by entry, so that all of them can be reported with their place.
        return _DECODER.decode(content.removeprefix(_BOM))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # JSON in UTF-16, and NaN in an unused field, are accepted here; any fault is reported with its place.
        return check_content(_mapping(content, file), file)


def check_content(content: Mapping[str, Any], file: Path) -> CocoContent:
    """Check the ``content`` of ``file`` against the schema and return its records.

    Raises:
        DataError: entries are wrong; the first are listed with their place, the rest counted.
    """
    faults = Faults()
    lists = {key: list(_entries(content[key], key, faults)) for key in _LISTS}
    if faults.count:  # report dangling references of correct annotations in the same message
        images, categories = _ids_in(content["images"]), _ids_in(content["categories"])
        add_dangling(lists["annotations"], images=images, categories=categories, faults=faults)
    faults.refuse(file)
    return CocoContent(**lists)


def add_dangling(
    annotations: Sequence[CocoAnnotation | None], *, images: Container[Any], categories: Container[Any], faults: Faults
) -> None:
    """Add to ``faults`` each annotation whose image or category is not among these ids; None entries are skipped."""
    for place, annotation in enumerate(annotations):
        if annotation is None:
            continue
        if annotation.image_id not in images:
            fault = f"image_id {show_value(annotation.image_id)} is not among the images"
        elif annotation.category_id not in categories:
            fault = f"category_id {show_value(annotation.category_id)} is not among the categories"
        else:
            continue
        faults.add(entry_name("annotations", place, annotation), fault)


def _ids_in(entries: Sequence[object]) -> set[Any]:
    ids = (entry.get("id") for entry in entries if isinstance(entry, Mapping))
    return {value for value in ids if isinstance(value, int | float | str)}


def entry_name(key: str, place: int, entry: object) -> str:
    """Name entry number ``place`` (from 0) of the list ``key`` for messages: by its id if it has one."""
    entry_id = entry.get("id") if isinstance(entry, Mapping) else getattr(entry, "id", None)
    has_id = isinstance(entry_id, int | float | str)
    return f"{_LISTS[key][0]} {show_value(entry_id)}" if has_id else f"{key}[{place}]"


def show_value(value: object) -> str:
    """Format a value for messages, with bounded length."""
    # Python refuses to print an integer of more than 4,300 digits (``sys.set_int_max_str_digits``).
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**_SHOWN else "a number of more than 60 digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _bytes_of(file: Path) -> bytes:
    try:
        return read_bytes(file, limit=MAX_BYTES)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; expected a COCO annotation file") from error
    except MemoryError as error:
        raise DataError(f"{file}: does not fit into the memory of this machine") from error


def _mapping(content: bytes, file: Path) -> dict[str, Any]:
    try:
        parsed = parse_json(content)
    except ValueError as error:
        raise DataError(f"{file}: no valid JSON ({error}); is the file complete?") from error
    missing_keys = [key for key in _LISTS if not isinstance(parsed, dict) or not isinstance(parsed.get(key), list)]
    if missing_keys:
        raise DataError(
            f"{file}: no list {', '.join(missing_keys)}; a COCO annotation file has images, annotations and categories"
        )
    return dict(parsed)


def _entries(entries: Sequence[object], key: str, faults: Faults) -> Iterator[Any]:
    """Yield the records of the list ``key``; None in the place of a wrong entry."""
    for place, entry in enumerate(entries):
        try:
            yield msgspec.convert(entry, _LISTS[key][1])
        except msgspec.ValidationError as error:
            faults.add(entry_name(key, place, entry), _in_words(str(error), entry))
            yield None


def _in_words(message: str, entry: object) -> str:
    """Rephrase msgspec's message: field first, then the problem and the value. msgspec writes "Expected `float`, got
    `str` - at `$.bbox[2]`"."""
    problem, _, path = message.partition(" - at `$.")
    if problem.startswith("Object missing required field"):
        return f"{problem.split('`')[1]}: missing"
    problem = problem.replace("`", "").replace("array", "list")
    problem = problem[:1].lower() + problem[1:]
    if isinstance(entry, Mapping) and problem.startswith(("expected float > -", "expected float < 1")):
        problem = "expected a finite number"  # a comparison with NaN fails too
    field = path.rstrip("`").partition("[")[0]
    if field and isinstance(entry, Mapping):
        return f"{path.rstrip('`')}: {problem}; {field} is {show_value(entry.get(field))}"
    return problem if isinstance(entry, Mapping) else f"{problem}; it is {show_value(entry)}"
