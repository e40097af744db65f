"""Become a pod: ``unshare --mount --pid --fork python pod.py SETTINGS`` turns into the pod's command, with its view of a host.

SETTINGS is a JSON file: argv, env, cwd, files {path: text}, and the folders that are mounted, binds {source: path} and
read_only {source: path}. Everything but binds, /tmp and /dev/shm is read-only, the command is process 1, and it has no
capabilities. Paths are below /home, /etc or /tmp, of which every host of a lab has its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KERNEL = ("/proc", "/sys", "/dev")
OWN = ("/tmp", "/dev/shm")
"""Folders that are writable and private on every host of a lab already."""


def main(settings: dict[str, Any]) -> None:
    _mount("-t", "proc", "proc", "/proc")
    _mount("-t", "tmpfs", "tmpfs", "/home")
    for path, text in settings["files"].items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    for source, path in {**settings["binds"], **settings["read_only"]}.items():
        Path(path).mkdir(parents=True)
        _mount("--bind", source, path)
    for point in _mount_points():
        if point not in (*OWN, *settings["binds"].values()) and not point.startswith(KERNEL):
            subprocess.run(["mount", "-o", "remount,bind,ro", point], check=False, stderr=subprocess.DEVNULL)
    os.chdir(settings["cwd"])
    for folder in ("/", "/etc", "/usr", "/home", *settings["read_only"].values(), str(Path(__file__).parent)):
        assert not _writable(folder), f"{folder} is writable"
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]
    os.execvpe(drop[0], [*drop, *settings["argv"]], {"PATH": os.environ["PATH"], **settings["env"]})


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def _mount_points() -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        yield line.split()[4]


def _writable(folder: str) -> bool:
    path = Path(folder) / "written-by-a-pod"
    try:
        path.touch()
    except OSError:
        return False
    path.unlink()
    return True


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
