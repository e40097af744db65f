"""Measure the CPU time of ``mtrain --help`` with many distributions of others installed: with its list of verbs kept, and without it.

``python benchmarks/help.py`` makes distributions that bring a verb each, and prints medians; ``--against FOLDER`` runs another
checkout in turn. Beside them stand Python alone and Python with click, which no help can be faster than.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]


def make_distributions(site: Path, count: int) -> None:
    """Write distributions as pip installs them: a package with ``plugins.toml``, and its description with entry points."""
    for number in range(count):
        package, info = site / f"others_{number}", site / f"others_{number}-1.0.dist-info"
        package.mkdir(parents=True)
        info.mkdir()
        (package / "__init__.py").write_text("")
        (package / "verb.py").write_text(f"import click\n@click.command()\ndef verb_{number}():\n    pass\n")
        rows = "".join(f'[models.others_{number}_{row}]\nsummary = "a model"\nneeds = "torch"\n\n' for row in range(20))
        words = f'[commands.verb-{number}]\nheading = "Inspect"\nsummary = "What number {number} does."\n'
        (package / "plugins.toml").write_text(rows + words)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: others-{number}\nVersion: 1.0\n" + "Text.\n" * 200
        )
        (info / "entry_points.txt").write_text(
            f"[mtrain.commands]\nverb-{number} = others_{number}.verb:verb_{number}\n"
        )
        (info / "RECORD").write_text("")


def cpu_seconds(command: list[str], environ: Mapping[str, str]) -> float:
    """Run a command to its end, and return the CPU seconds that it took."""
    out = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    _, status, usage = os.wait4(os.posix_spawn(command[0], command, dict(environ), file_actions=out), 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: status {status}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--distributions", type=int, default=40)
    parser.add_argument("--against", type=Path, help="another checkout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        site, home = Path(folder) / "site", Path(folder) / "home"
        make_distributions(site, options.distributions)
        rows: dict[str, list[float]] = {}
        for _ in range(options.rounds + 1):
            for source in filter(None, (ROOT, options.against)):
                places = [site, source, *sorted(source.glob("packages/*/src"))]
                environ = {**os.environ, "HOME": str(home), "PYTHONPATH": os.pathsep.join(map(str, places))}
                environ["PYTHONSAFEPATH"] = "1"  # not the current folder
                environ.pop("PYTHONDONTWRITEBYTECODE", None)
                help_command = [sys.executable, "-m", "mtrain", "--help"]
                for name, command in (
                    ("python", [sys.executable, "-c", "pass"]),
                    ("python with click", [sys.executable, "-c", "import click"]),
                    ("help, nothing kept", help_command),
                    ("help", help_command),
                ):
                    if name == "help, nothing kept":
                        shutil.rmtree(home, ignore_errors=True)
                        home.mkdir()
                    rows.setdefault(f"{source.name}: {name}", []).append(cpu_seconds(command, environ))
        for name, times in rows.items():
            kept = times[1:]  # the first round compiles modules
            print(f"{name:40} {statistics.median(kept):.3f} s  ({min(kept):.3f} to {max(kept):.3f})")


if __name__ == "__main__":
    main()
