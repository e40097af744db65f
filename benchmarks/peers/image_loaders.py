"""Image loaders of other projects: torchvision's transforms v2 under torch's DataLoader, and SPDL, which decodes by FFmpeg.

Both give uint8 batches, of random windows resized to a side ("crop"), or of whole images letterboxed on grey.
"""

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import spdl.io
import torch
from spdl.pipeline import PipelineBuilder
from torchvision.io import decode_image
from torchvision.transforms import v2

from mtrain.data.images.geometry import FILL, fitted_size, margin

FILTER = "scale={}:{}:flags=bilinear+full_chroma_int+full_chroma_inp+accurate_rnd"
"""Of FFmpeg's scaling, which by default is less exact."""


class TorchvisionDataset(torch.utils.data.Dataset):
    """Images as uint8 (3, S, S) tensors."""

    def __init__(self, paths: Sequence[str], side: int, task: str) -> None:
        resize = v2.RandomResizedCrop(side, antialias=True) if task == "crop" else partial(letterboxed, side=side)
        self.paths, self.change = paths, v2.Compose([resize, v2.RandomHorizontalFlip()])

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.change(decode_image(self.paths[index], mode="RGB"))


def letterboxed(image: torch.Tensor, side: int) -> Any:
    """Scale the longest side of an image to ``side``, and centre it on grey."""
    width, height = fitted_size(image.shape[2], image.shape[1], side)
    left, top = margin((side - width) / 2), margin((side - height) / 2)
    image = v2.functional.resize(image, [height, width], antialias=True)
    return v2.functional.pad(image, [left, top, side - width - left, side - height - top], fill=FILL)


def torchvision_loader(paths: Sequence[str], side: int, task: str, *, batch: int, count: int) -> Any:
    """Return a loader of ``count`` images per pass, with one persistent worker."""
    order = [i % len(paths) for i in range(count)]
    return torch.utils.data.DataLoader(
        TorchvisionDataset(paths, side, task), batch_size=batch, sampler=order, num_workers=1, persistent_workers=True
    )


class SpdlPasses:
    """Passes of ``count`` images by one thread of this process, which decodes, resizes and flips in FFmpeg's filters or as above."""

    def __init__(
        self, paths: Sequence[str], side: int, task: str, *, batch: int, count: int, by_torchvision: bool
    ) -> None:
        self.side, self.task, self.batches = side, task, count // batch
        torch.set_num_threads(1)
        dataset = TorchvisionDataset(paths, side, task)
        source = PipelineBuilder().add_source(cycle(range(len(paths)) if by_torchvision else paths)).aggregate(batch)
        make = (lambda indices: torch.stack([dataset[i] for i in indices])) if by_torchvision else self._decode
        self.pipeline = source.pipe(make).add_sink(2).build(num_threads=1)
        self.pipeline.start()
        self.made = iter(self.pipeline)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.batches):
            yield next(self.made)

    def _decode(self, paths: list[str]) -> Any:
        frames = [spdl.io.decode_packets(packets, filter_desc=self._filter(packets)) for packets in map(_demux, paths)]
        return spdl.io.to_numpy(spdl.io.convert_frames(frames))

    def _filter(self, packets: Any) -> str:
        side, width, height = self.side, packets.codec.width, packets.codec.height
        flip = ["hflip"] if random.random() < 0.5 else []
        if self.task == "crop":
            left, top, wide, high = _window(width, height)
            steps = [f"crop={wide}:{high}:{left}:{top}:exact=1", FILTER.format(side, side)]
        else:
            wide, high = fitted_size(width, height, side)
            left, top = margin((side - wide) / 2), margin((side - high) / 2)
            steps = [FILTER.format(wide, high), f"pad={side}:{side}:{left}:{top}:0x727272"]
        return ",".join([*steps, *flip, "format=pix_fmts=rgb24"])


def _demux(path: str) -> Any:
    return spdl.io.demux_image(path)


def _window(width: int, height: int) -> tuple[int, int, int, int]:
    """Draw a window as torchvision's RandomResizedCrop does."""
    for _ in range(10):
        area, aspect = width * height * random.uniform(0.08, 1), math.exp(random.uniform(-1, 1) * math.log(4 / 3))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            return random.randint(0, width - wide), random.randint(0, height - high), wide, high
    return 0, 0, width, height
