"""Keep the files of a checkpoint until they are copied, whatever ``checkpoint.keep_last`` deletes meanwhile."""

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from mtrain.core.checkpoint import store


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that waits to be copied, or is copied."""

    name: str
    """Name of the checkpoint, for example ``step-00001200``."""
    path: Path
    """The folder to copy from: links to the files, or the checkpoint's own folder where links cannot be made."""

    @classmethod
    def of(cls, checkpoint: Path) -> "Kept":
        """Keep the files of a checkpoint: hard links take no room while the checkpoint exists.

        A folder of links that is left behind is deleted at the next start, as that of a writer that has died.
        """
        holder = f"{socket.gethostname()}@{os.getpid()}"
        folder = checkpoint.with_name(f"{store.TEMPORARY}{checkpoint.name}@{holder}.copy")
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for file in checkpoint.iterdir():
                os.link(file, folder / file.name, follow_symlinks=False)
        except OSError:  # a file system without hard links: the copy has to be quicker than the rotation
            shutil.rmtree(folder, ignore_errors=True)
            return cls(checkpoint.name, checkpoint)
        return cls(checkpoint.name, folder)

    def release(self) -> None:
        """Delete the links."""
        if self.path.name != self.name:
            shutil.rmtree(self.path, ignore_errors=True)
