"""Small sets of labelled images on disk, of every size and mode that people have."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"cat": (220, 60, 40), "dog": (40, 90, 200), "emu": (60, 180, 70)}


def noise(size: tuple[int, int], colour: tuple[int, int, int], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    pixels = np.array(colour) + rng.integers(-30, 30, (size[1], size[0], 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


def encoded(image: Image.Image, form: str = "PNG", **options) -> bytes:
    content = io.BytesIO()
    image.save(content, form, **options)
    return content.getvalue()


def image(name: str = "cat", seed: int = 0, *, form: str = "PNG") -> bytes:
    """An image of a class, of a size that depends on ``seed``."""
    rng = np.random.default_rng(seed)
    size = tuple(int(side) for side in rng.integers(20, 60, 2))
    return encoded(Image.fromarray(noise(size, COLOURS.get(name, (128, 128, 128)), seed)), form)


def folders(root: Path, counts: dict[str, int], *, names=("cat", "dog")) -> Path:
    """``counts``: images per class of each folder below ``root``; the name "" means ``root`` itself."""
    seed = 0
    for folder, count in counts.items():
        for name in names:
            for number in range(count):
                file = root / folder / name / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(image(name, seed))
                seed += 1
    return root
