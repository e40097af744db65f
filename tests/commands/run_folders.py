"""Folders of runs as jobs leave them, without a job."""

import json
from pathlib import Path

import yaml

from mtrain.core.checkpoint.format import Saved, write
from mtrain.core.interfaces import Progress, State
from mtrain.jobs.resume import choices
from mtrain.spec import config


def make_run(spec: str, name: str, *overrides: str) -> Path:
    """Return the run folder of a job of ``spec`` in the current folder, with a checkpoint, as a command line has started it."""
    loaded = config.load(spec, overrides=[*overrides], environ={})
    folder = Path.cwd() / "runs" / name
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "spec.json").write_text(config.resolved_json(loaded.spec))
    (folder / "spec.yml").write_text(yaml.safe_dump(dict(loaded.values)))
    (folder / "chosen.json").write_text(json.dumps(choices.describe(loaded, ())))
    saved = Saved(state=State(weights={}), progress=Progress(update=1), spec={})
    write(folder / "checkpoints/step-00000001", saved)
    return folder
