"""A commit, or the working tree, installed into a folder of its own, and jobs trained with it through its command line."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.parity import jobs as parity_jobs
from tests.parity.fingerprints.jobs import SPECS, Job

ROOT = Path(__file__).parents[3]
IMPORTS = "FINGERPRINT_IMPORTS"
"""Environment variable: the folder in which each process that imports mtrain leaves its process id."""
GUARD = f'''"""Import mtrain and its example plugin from this folder and nowhere else, and leave a note of each process that does."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.metadata import MetadataPathFinder
from pathlib import Path

SITE = str(Path(__file__).parent)


class OnlyHere:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if "." in name or name.partition("_")[0] != "mtrain":
            return None
        spec = PathFinder.find_spec(name, [SITE])
        if spec is None:
            raise ModuleNotFoundError(f"{{name}} is not in {{SITE}}", name=name)
        if folder := os.environ.get("{IMPORTS}"):
            Path(folder, str(os.getpid())).touch()
        return spec


sys.meta_path.insert(0, OnlyHere)
found = MetadataPathFinder.find_distributions


def find_distributions(*arguments):
    for each in found(*arguments):
        if not each.name.startswith("mtrain") or str(each.locate_file("")) == SITE:
            yield each


MetadataPathFinder.find_distributions = find_distributions
'''
"""``sitecustomize.py`` of a build: Python runs it at the start of each process. The environment has the working tree's own mtrain
installed too, and a process that imported that one would make two commits look equal."""


class JobError(Exception):
    """A build cannot be made or a job failed; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """An mtrain that trains jobs, with the folder for its runs."""

    name: str
    folder: Path
    site: Path | None = None
    """Folder that holds the installed packages; None: those of this interpreter."""
    specs: Path = SPECS
    """Folder of the specs as this mtrain reads them: keys may have other names in another commit."""

    def environment(self) -> dict[str, str]:
        """The caller's environment without settings of mtrain; one thread a rank."""
        values = {name: value for name, value in parity_jobs.environment().items() if not name.startswith("MTRAIN_")}
        return values if self.site is None else values | {"PYTHONPATH": str(self.site)}

    def train(self, job: Job) -> Path:
        """Run one job; returns its run folder.

        Raises:
            JobError: it failed, or a rank imported mtrain from elsewhere.
        """
        run = self.folder / "runs" / job.name
        if job.resumes:
            first = min((self.folder / "runs" / job.resumes / "checkpoints").glob("step-*"), default=None)
            if first is None:
                raise JobError(f"{job.resumes} left no checkpoint to resume from")
            shutil.copytree(first, run / "checkpoints" / first.name)
        words = job.command(self.folder, specs=self.specs, resume=run if job.resumes else None)
        notes = self.folder / "imports" / job.name
        notes.mkdir(parents=True)
        self._run([sys.executable, "-m", "mtrain", *words], {IMPORTS: str(notes)})
        processes = len(list(notes.iterdir()))
        # Ranks of one host may be copies of one process, which has imported mtrain for all of them.
        if self.site is not None and processes < 2:
            raise JobError(
                f"only {processes} processes imported mtrain from {self.site}, expected at least 2: the command line and the ranks"
            )
        return run

    def check(self) -> None:
        """Ask Python which mtrain a job of this build imports.

        Raises:
            JobError: not the one of this build.
        """
        question = "import mtrain; from importlib.metadata import distribution as d; print(mtrain.__file__, d('mtrain').locate_file(''))"
        for place in self._run([sys.executable, "-c", question], {}).split():
            if self.site is not None and not Path(place).resolve().is_relative_to(self.site.resolve()):
                raise JobError(f"{self.name}: jobs would use {place}, expected what is in {self.site}")

    def _run(self, command: Sequence[str], variables: Mapping[str, str]) -> str:
        # The folder of the runs is the current one: `python -m` searches the current folder first, and there is no mtrain.
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment() | variables,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        if ended.returncode != 0:
            raise JobError(f"exit code {ended.returncode}: {_last_lines(ended.stderr or ended.stdout)}")
        return ended.stdout


def _last_lines(output: str) -> str:
    return "\n".join(output.strip().splitlines()[-12:])


def build(commit: str | None, *, name: str, folder: Path) -> Build:
    """Install a commit (None: the working tree as it is) into ``folder``, without touching the repository or the environment.

    Both kinds are copied first, and each copy is installed with its own metadata: the entry points of another commit may name
    modules that have since moved, and installing in the working tree would leave stale files in its ``build`` folder.

    Raises:
        JobError: it cannot be installed.
    """
    tree, site = folder / "tree", folder / "site"
    tree.mkdir(parents=True)
    if commit is None:
        _copy_working_tree(tree)
    else:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    sources = [tree, *(file.parent for file in sorted(tree.glob("packages/*/pyproject.toml")))]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
    ]
    ended = subprocess.run([*pip, *map(str, sources)], cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise JobError(f"{name} cannot be installed: {_last_lines(ended.stderr)}")
    (site / "sitecustomize.py").write_text(GUARD, "utf-8")
    made = Build(name=name, folder=folder, site=site, specs=tree / SPECS.relative_to(ROOT))
    made.check()
    return made


def _copy_working_tree(target: Path) -> None:
    """Copy the files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, map(os.fsdecode, listing.split(b"\0"))):
        source, copy = ROOT / name, target / name
        if source.is_file():  # one that was removed and not committed is still listed
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)
