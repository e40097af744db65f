"""How the start of a job, and the memory of a rank and a loader process, grow with small images in WebDataset shards.

The shards are synthetic: every image is the same small JPEG, with a name and a label of its own. Each row is a process of its
own, so that its peak of memory is its own.
"""

import io
import json
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.growth import forked

SIZES = (10_000, 100_000, 1_000_000)
IN_A_SHARD = 10_000
CLASSES = 1000
GLOBAL_BATCH = 256
SIDE = 32
ROOT = Path(__file__).parents[2]


def write(folder: Path, *, images: int) -> None:
    """Write shards of ``images`` images, one of which is for evaluation."""
    from PIL import Image

    encoded = io.BytesIO()
    Image.new("RGB", (SIDE, SIDE), (200, 90, 40)).save(encoded, "JPEG")
    _write_shard(folder / "val-000000.tar", range(1), encoded.getvalue())
    for number, first in enumerate(range(0, images, IN_A_SHARD)):
        _write_shard(
            folder / f"train-{number:06d}.tar", range(first, min(first + IN_A_SHARD, images)), encoded.getvalue()
        )


def _write_shard(file: Path, numbers: range, image: bytes) -> None:
    with tarfile.open(file, "w") as archive:
        for number in numbers:
            for extension, content in (("jpg", image), ("cls", str(number % CLASSES).encode())):
                member = tarfile.TarInfo(f"{number:09d}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
            archive.members = []  # type: ignore[attr-defined]


def measure(images: int) -> dict[str, Any]:
    """Open the shards as a rank does, and read the first update, and one in the middle of the epoch as a resume does."""
    from mtrain.core.interfaces import SplitRequest
    from mtrain.core.samples.sampler import Shuffled
    from mtrain.spec.bounds import give_back
    from mtrain.tasks.classification.images import verify
    from mtrain.tasks.classification.readers.webdataset import WebDataset

    with tempfile.TemporaryDirectory() as folder:
        made = f"from benchmarks.growth import tar_shards as m; m.write(m.Path({folder!r}), images={images})"
        subprocess.run([sys.executable, "-c", made], check=True, cwd=ROOT)
        before, began = psutil.Process().memory_info().rss, time.process_time()
        split = WebDataset().read(SplitRequest(root=Path(folder), split="train"))
        give_back()
        row: dict[str, Any] = {"images": len(split), "open_cpu_s": time.process_time() - began}
        row["rank_mib"] = (psutil.Process().memory_info().rss - before) / (1 << 20)
        row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before / (1 << 20)
        row["worker_own_mib"] = forked.own_mib(lambda: _use(split))
        for name, part in (("first", 0), ("resumed", 2)):
            began = time.process_time()
            order = Shuffled(len(split), global_batch=GLOBAL_BATCH, seed=1)
            update = order.updates_per_epoch // part if part else 0
            read = [split.images[int(index)] for index in order.global_batch_indices(0, update)]
            row[f"{name}_update_cpu_s"] = time.process_time() - began
            assert {image.shape for image in read} == {(SIDE, SIDE, 3)}
        began = time.process_time()
        assert verify(split) == images
        row["check_cpu_s"] = time.process_time() - began
    return row


def _use(split: Any) -> None:
    """Use the content, name and label of every sample once."""
    for index in range(len(split)):
        _ = split.images.contents.read(index), split.origins[index], split.labels[index]


def main() -> None:
    """Measure one row: ``python -m benchmarks.growth.tar_shards shards IMAGES``."""
    print(json.dumps(measure(int(sys.argv[2]))))


if __name__ == "__main__":
    main()
