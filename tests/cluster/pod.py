"""Become a pod: ``unshare --mount --pid --fork python pod.py SETTINGS`` turns into the pod's command, with its view of a host.

SETTINGS is a JSON file: argv, env, cwd, files {path: text}, links {path: text}, which are files as a mounted ConfigMap has
them, and the folders that are mounted, binds {source: path} and read_only {source: path}. Everything but binds, /tmp and
/dev/shm is read-only, the command is process 1, and it has no capabilities. Paths are below /home, /etc or /tmp, of which
every host of a lab has its own.
"""

import json
import os
import subprocess
import sys
import time
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
    for path, text in settings["links"].items():
        _link(Path(path), text)
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


def _link(path: Path, text: str) -> None:
    """Write a file as the kubelet does for a ConfigMap: behind two links, of which one has the time in its name."""
    version = path.parent / f"..{time.strftime('%Y_%m_%d_%H_%M_%S')}.{os.getpid()}"
    version.mkdir(parents=True, exist_ok=True)
    (version / path.name).write_text(text)
    for link, target in ((path.parent / "..data", version.name), (path, f"..data/{path.name}")):
        link.unlink(missing_ok=True)  # of the pod in whose place this one is
        link.symlink_to(target)


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
