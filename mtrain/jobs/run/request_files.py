"""The files of a run folder that record the request: the spec, what was chosen, the plan and the environment."""

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.record_files import json_text
from mtrain.errors import UsageError
from mtrain.jobs.plan.plan import Plan
from mtrain.jobs.resume import choices
from mtrain.rank.script.settings import describe_script
from mtrain.spec import config, outputs
from mtrain.spec.yaml_reader import dump
from mtrain.system import environment, runfolder
from mtrain.system.runfolder import RunFolder

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded


def write_folder(loaded: "Loaded", plan: Plan) -> dict[str, str]:
    """Write the request files into the run folder; return those that ranks read: name -> text.

    Raises:
        UsageError: the folder cannot be written to.
    """
    run = RunFolder(plan.run_dir, plan.log_dir)
    texts = {
        **_spec_texts(loaded, run),
        run.path / runfolder.CHOSEN: json_text(choices.describe(loaded, plan.files.values())),
        run.path / "plan.txt": plan.text(),
        run.path / "plan.json": json_text(plan.as_json()),
    }
    # Rank 0 puts pending files (``spec.next.yml`` ...) in the place of the run's own once the checkpoint is restored, so a
    # job that is refused before changes nothing.
    is_resumed = plan.resume is not None and run.checkpoints in plan.resume.parents and run.spec_yml.exists()
    place = runfolder.pending if is_resumed else Path
    texts = {place(path): text for path, text in texts.items()}
    runfolder.keep_private()
    run.make()
    _write(texts, plan.run_dir, drops_pending=not is_resumed)
    spec_file = place(run.spec_json)
    return {spec_file.name: texts[spec_file]}


def write_spec(loaded: "Loaded", folder: Path) -> None:
    """Write the spec and the environment into the folder of a run without ranks.

    Raises:
        UsageError: the folder cannot be written to.
    """
    _write(_spec_texts(loaded, RunFolder(folder)), folder)


def _write(texts: Mapping[Path, str], folder: Path, *, drops_pending: bool = False) -> None:
    try:
        for path, text in texts.items():
            if drops_pending:  # What a refused job has left would be read in place of this one.
                runfolder.pending(path).unlink(missing_ok=True)
            outputs.write_text(path, text)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written to: {error.strerror or error}") from error


def _spec_texts(loaded: "Loaded", run: RunFolder) -> dict[Path, str]:
    """Return the text of the files that hold the spec and the environment of the command: path -> text."""
    environ = environment.redact(environment.clean(environment.caller()))
    argv = environment.redacted_words(sys.argv)
    values = loaded.values if loaded.script is None else describe_script(loaded.values)
    return {
        run.spec_json: config.resolved_json(loaded.spec) if loaded.script is None else json_text(values),
        run.spec_yml: dump(values),
        run.path / "environment.json": json_text(describe_environment(environ, argv=argv)),
    }


def _packages() -> list[str]:
    """Return the names of this distribution and of its requirements, those of extras included."""
    try:
        requirements = metadata.requires("mtrain") or []
    except metadata.PackageNotFoundError:  # mtrain runs from a clone that is not installed.
        requirements = []
    matches = (re.match(r"[\w.-]+", line) for line in ["mtrain", *requirements])
    return sorted({match.group() for match in matches if match})


def describe_environment(environ: Mapping[str, str], *, argv: Sequence[str] = ()) -> dict[str, Any]:
    """Return the versions of packages, facts about the machine, and ``environ`` and ``argv``.

    The caller must have removed secrets from ``environ`` and from the command ``argv``.
    """
    versions = {}
    for name in _packages():
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": sys.version,
        "cores": os.cpu_count(),
        "argv": list(argv),
        "versions": versions,
        "environment": dict(environ),
    }
