"""A place whose uploads go on as fast as a test lets them: addresses ``paced:///folder``, for other processes too."""

import os
import time
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

PARTS = 12
CONTROL, PAUSE = "PACED_CONTROL", "PACED_PAUSE_S"


class Paced(LocalFileSystem):
    """Writes each object in parts, with a pause after each, and not at all while the folder of control has ``closed``."""

    protocol = ("paced",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"auto_mkdir": True})

    def put_file(self, path1: str, path2: str, callback: Any = None, **options: Any) -> None:
        control, content = Path(os.environ[CONTROL]), Path(path1).read_bytes()
        target = Path(self._strip_protocol(path2))
        target.parent.mkdir(parents=True, exist_ok=True)
        (control / "begun").write_text(target.parent.name)
        size = -(-len(content) // PARTS)
        with target.open("wb") as file:
            for part in range(PARTS):
                while (control / "closed").exists():
                    time.sleep(0.01)
                time.sleep(float(os.environ[PAUSE]))
                written = file.write(content[part * size : (part + 1) * size])
                if callback is not None:
                    callback.relative_update(written)


def install(folder: Path, control: Path, *, pause_s: float = 0.0) -> dict[str, str]:
    """Make the place known to processes that have the returned variables."""
    (folder / "paced-1.dist-info").mkdir(parents=True)
    (folder / "paced-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: paced\nVersion: 1\n")
    (folder / "paced-1.dist-info" / "entry_points.txt").write_text("[fsspec.specs]\npaced=paced_place:Paced\n")
    (folder / "paced_place.py").write_text(Path(__file__).read_text())
    control.mkdir()
    return {"PYTHONPATH": str(folder), CONTROL: str(control), PAUSE: str(pause_s)}
