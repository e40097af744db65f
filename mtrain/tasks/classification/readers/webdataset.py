"""Read WebDataset shards: tar files in which ``x.jpg`` and ``x.cls`` or ``x.json`` are one sample.

The library ``webdataset`` streams shards in an order of its own, and cannot say what sample number i is. mtrain needs
that for an order that does not depend on ranks and workers, and to resume exactly. So it lists the members of every shard
once, with the standard library's ``tarfile``, and afterwards reads each image at its position. The list is a few arrays, which the
ranks of one host share.
"""

import io
import os
import re
import tarfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from mtrain.core.interfaces import Dataset, SplitRequest
from mtrain.data.images.header import SMALL_BYTES, SUFFIXES, expected_bytes
from mtrain.data.once_per_host import LEAST_IMAGES, Form, once_per_host
from mtrain.data.reading import listed
from mtrain.data.shards import files_of
from mtrain.data.texts import GrowingTexts, Texts
from mtrain.errors import DataError
from mtrain.spec.files import open_file, parse_json
from mtrain.tasks.classification.images import EncodedImages
from mtrain.tasks.classification.labels import LabelledImages
from mtrain.tasks.classification.readers.numbering import number_classes

MAX_LABEL_BYTES = 1 << 20
"""Largest label of one sample that is read, in bytes."""
_HEAD_BYTES = 4 << 20
"""Bytes at the begin of a large image in which its header is sought."""
_NAME = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)\Z")
"""Key and extension of a member: the extension begins at the first dot of the file name, as in webdataset."""
Place = tuple[int, int]
"""Offset and size of a member in its shard, in bytes."""


class WebDatasetOptions(BaseModel):
    """Extensions of the members of a sample."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    image_extension: str | None = Field(
        default=None, description="extension of the images, without a dot; null: that of any image format"
    )
    label_extension: str | None = Field(
        default=None, description="extension of the labels, without a dot; null: cls, else json"
    )
    label_key: str = Field(default="label", description="key of the label in json")


@dataclass(slots=True)
class _Sample:
    key: str
    members: dict[str, Place] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class TarMembers:
    """Images at known places of tar files. Implements ``Contents``."""

    files: Sequence[Path]
    file_numbers: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, index: int) -> bytes:
        """See ``Contents.read``."""
        file = self.files[int(self.file_numbers[index])]
        place = int(self.offsets[index]), int(self.sizes[index])
        limit = SMALL_BYTES
        if place[1] > limit:  # a sparse shard takes no place on the disk
            head = io.BytesIO(_read_place(file, (place[0], _HEAD_BYTES), limit=_HEAD_BYTES))
            limit = expected_bytes(head) or limit
        return _read_place(file, place, limit=limit)

    def chosen(self, indices: Sequence[int]) -> "TarMembers":
        """See ``Contents.chosen``."""
        rows = np.array(indices, dtype=np.int64)
        return replace(self, file_numbers=self.file_numbers[rows], offsets=self.offsets[rows], sizes=self.sizes[rows])


@dataclass(frozen=True, slots=True, eq=False)
class _Origins(Sequence[str]):
    """Shard and key of each image, put together when somebody asks."""

    files: Sequence[Path]
    file_numbers: NDArray[np.int64]
    keys: Texts

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[each] for each in range(len(self))[index]]
        key = self.keys[index]
        # Keys are unique within a shard alone, so they begin with its name; the path that is shown has that already.
        return f"{self.files[int(self.file_numbers[index])]} {key.partition('/')[2]}"


def _split_of(arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> LabelledImages:
    """Make a split from what all ranks of a host share."""
    files = [Path(file) for file in facts["files"]]
    keys = Texts({"ends": arrays["ends"], "content": arrays["content"]})
    contents = TarMembers(files, arrays["file_numbers"], arrays["offsets"], arrays["sizes"])
    origins = _Origins(files, contents.file_numbers, keys)
    return LabelledImages(
        images=EncodedImages(contents, origins),
        labels=arrays["labels"],
        class_names=tuple(facts["class_names"]),
        origins=origins,
        keys=keys,
    )


def _taken_apart(split: LabelledImages) -> tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]] | None:
    """Return what ``_split_of`` makes the split from; None: it is small."""
    assert isinstance(split.images, EncodedImages)
    contents, keys = split.images.contents, split.keys
    assert isinstance(contents, TarMembers)
    assert isinstance(keys, Texts)
    if len(split) < LEAST_IMAGES:
        return None
    places = {"file_numbers": contents.file_numbers, "offsets": contents.offsets, "sizes": contents.sizes}
    files = [str(file) for file in contents.files]
    return {**places, "labels": split.labels, **keys.arrays}, {"files": files, "class_names": split.class_names}


FORM = Form(take_apart=_taken_apart, put_together=_split_of)


class WebDataset(Dataset):
    """The ``webdataset`` data set plugin.

    ``train*.tar`` and ``val*.tar`` anywhere below ``data.root``; ``data.train`` and ``data.val`` name files, folders or
    patterns (``shards/train-*.tar``); ``data.split`` divides one set. Shards are read in the order of their names. They
    must not be compressed.
    """

    kind: ClassVar[str] = "classification"
    classes_of_train: ClassVar[bool] = True
    Options = WebDatasetOptions

    def __init__(self, options: WebDatasetOptions | None = None) -> None:
        self.options = options or WebDatasetOptions()

    @once_per_host(FORM)
    def read(self, request: SplitRequest) -> LabelledImages:
        """List the samples of one split, and read their labels; images stay on the disk. One rank of each host does it.

        Raises:
            DataError: a shard is compressed or damaged, a sample lacks its image or label, or labels are not among
            ``names``.
        """
        if request.images is not None:
            raise DataError("data.images: given, but the images are in the shards; leave it out")
        files = files_of(request.root, request.value, split=request.split, suffixes=(".tar",), kind="webdataset")
        file_numbers, offsets, sizes = array("q"), array("q"), array("q")
        labels: list[str] = []
        known: dict[str, str] = {}
        """Each label once, however many images have it."""
        keys = GrowingTexts()
        problems: list[str] = []
        for number, file in enumerate(files):
            for sample in _samples(file, problems):
                try:
                    image, label = self._parts(file, sample)
                except (ValueError, OSError) as error:
                    problems.append(f"{file}: {sample.key[:200]}: {error}")
                    continue
                file_numbers.append(number)
                offsets.append(image[0])
                sizes.append(image[1])
                labels.append(known.setdefault(label, label))
                keys.append(f"{file.name}/{sample.key}")
        if problems:
            raise DataError(
                f"{len(problems)} members of {len(files)} shards cannot be used; write the shards anew without "
                f"them:\n{listed(problems)}"
            )
        places = {"file_numbers": file_numbers, "offsets": offsets, "sizes": sizes}
        arrays = {name: np.frombuffer(each, np.int64) for name, each in places.items()} | dict(keys.close().arrays)
        origins = _Origins(files, arrays["file_numbers"], Texts(arrays))
        # Classes are numbered after all shards are read: without data.names, the last one may bring a new class.
        class_names, numbers = number_classes(labels, request.names, origin=lambda place: origins[place])
        facts = {"files": [str(file) for file in files], "class_names": class_names}
        return _split_of({**arrays, "labels": numbers}, facts)

    def _parts(self, file: Path, sample: _Sample) -> tuple[Place, str]:
        """Return the place of a sample's image, and its label. Raises: ``ValueError`` or ``OSError``."""
        options, members = self.options, sample.members
        wanted = options.image_extension
        images = [name for name in members if (name == wanted if wanted else f".{name}" in SUFFIXES)]
        if len(images) != 1:
            found = ", ".join(members)[:200]
            raise ValueError(f"{len(images)} images among its extensions ({found}); set data.options.image_extension")
        extension = options.label_extension or next((name for name in ("cls", "json") if name in members), "cls")
        if extension not in members:
            raise ValueError(f"no label: no .{extension} among {', '.join(members)[:200]}")
        text = _read_place(file, members[extension], limit=MAX_LABEL_BYTES)
        if extension != "json":
            return members[images[0]], _decode(text, extension)
        return members[images[0]], _label_of(parse_json(text), options.label_key)


def _decode(text: bytes, extension: str) -> str:
    try:
        return text.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise ValueError(f".{extension} is no UTF-8 text (byte {error.start})") from None


def _label_of(content: Any, key: str) -> str:
    value = content.get(key) if isinstance(content, dict) else None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"its json has no key {key!r} with text or a whole number; set data.options.label_key")
    return str(value)


def _samples(file: Path, problems: list[str]) -> Iterator[_Sample]:
    """Yield the samples of a shard in its order; members that cannot be used are added to ``problems``."""
    sample, finished = _Sample(""), set()
    for name, place in _members(file):
        match = _NAME.match(name)
        if match is None:
            continue
        key, extension = match[1], match[2].lower()
        if key != sample.key:
            if sample.key:
                yield sample
                finished.add(sample.key)
            sample = _Sample(key)
            # A sample ends where another begins: members that come later would be a second sample with the same name.
            if key in finished:
                problems.append(f"{file}: {key[:200]}: its members are not beside each other")
        if extension in sample.members:
            problems.append(f"{file}: {name[:200]}: there twice")
        sample.members[extension] = place
    if sample.key:
        yield sample


def _members(file: Path) -> Iterator[tuple[str, Place]]:
    """Yield name, offset and size of each regular file of a tar file."""
    if not file.is_file():  # opening a named pipe would wait
        raise DataError(f"{file}: not a regular file; expected a tar file")
    length = file.stat().st_size
    try:
        with tarfile.open(file, "r:") as archive:
            for member in archive:
                # tarfile keeps all members for later, which takes a kilobyte each.
                archive.members = []  # type: ignore[attr-defined]
                if member.isreg() and not member.issparse():
                    if member.offset_data + member.size > length:
                        raise tarfile.ReadError("it ends early")
                    yield member.name, (member.offset_data, member.size)
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        # Extended headers are read by a recursion, and with as many bytes as they say.
        with open_file(file) as start:
            is_compressed = start.read(2) in (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5")
        reason = (
            "compressed, so that its images have no positions; decompress it"
            if is_compressed
            else f"damaged ({error or type(error).__name__})"
        )
        raise DataError(f"{file}: {reason}; expected an uncompressed tar file") from error


def _read_place(file: Path, place: Place, *, limit: int) -> bytes:
    """Return a member's content. Raises: ``OSError`` if it is longer than ``limit``, or the file has become shorter."""
    offset, size = place
    if size > limit:
        raise OSError(None, f"{size} bytes, more than the {limit} that are read")
    # Without O_NONBLOCK, a named pipe in the place of a shard would let this wait for ever.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        content = b""
        # ``pread`` may return less than it was asked for.
        while len(content) < size and (more := os.pread(descriptor, size - len(content), offset + len(content))):
            content += more
    finally:
        os.close(descriptor)
    if len(content) < size:
        raise OSError(None, "the shard ends before this image does")
    return content
