"""The reporter ``wandb``: parameters, curves, images and checkpoints of a job as a run of Weights & Biases."""

import io
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from mtrain.core.interfaces.reporter import ReportedRun
from mtrain.core.record_files import write_json
from mtrain.spec.files import MAX_OWN_BYTES, parse_json, read_bytes
from mtrain.system import environment
from mtrain_ui.trackers.tracker import Point, ServiceOptions, Tracker, import_library, parameters

# A resumed job goes on in the run that this file names.
FILE = "wandb.json"
"""File of the run folder that has the run's id."""
# W&B would send its own errors to its makers, also in offline mode.
DEFAULTS = {"WANDB_ERROR_REPORTING": "false"}
"""Variables that are set unless the user has."""
INIT_TIMEOUT_S = 15.0


class WandB(Tracker):
    """Sends the spec, losses, learning rates, metrics and images to Weights & Biases, or keeps them for ``wandb sync``.

    A resumed job goes on in the same run.
    """

    class Options(ServiceOptions):
        """Where the run is kept, and what it is called there."""

        project: str = Field(default="mtrain", description="name of the project")
        entity: str | None = Field(default=None, description="user or team; null: as W&B has it (WANDB_ENTITY)")
        run_name: str | None = Field(default=None, description="null: the name of the run folder")
        mode: Literal["online", "offline"] | None = Field(
            default=None, description="offline: into the run folder, for wandb sync; null: as W&B has it (WANDB_MODE)"
        )

    def __init__(self, options: Options, run: ReportedRun) -> None:
        super().__init__(options, run)
        environment.set_defaults(DEFAULTS)
        self._wandb: Any = import_library("wandb")
        self._run: Any = None
        self._id = self._kept_id()

    def _kept_id(self) -> str:
        """Return the run's id, which is chosen here and kept before anything is sent."""
        file = self.run.folder / FILE
        if not file.is_file():
            write_json(file, {"id": uuid.uuid4().hex[:12], "project": self.options.project})
        return str(parse_json(read_bytes(file, limit=MAX_OWN_BYTES))["id"])

    def open(self) -> None:
        """Make the run, or go on with it."""
        options, wandb = self.options, self._wandb
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=options.run_name or self.run.folder.name,
            id=self._id,
            resume="allow",
            mode=options.mode,
            dir=str(self.run.folder),
            config=dict(parameters(self.run.spec)),
            # A rank's output, the user's code and git repository are not for the service.
            settings=wandb.Settings(
                console="off", save_code=False, disable_git=True, silent=True, init_timeout=INIT_TIMEOUT_S
            ),
        )
        # With an axis of its own, a resumed run may repeat updates: W&B's step can only grow.
        self._run.define_metric("*", step_metric="update")

    def send_points(self, points: Sequence[Point]) -> None:
        """See ``Tracker.send_points``."""
        rows: dict[int, dict[str, float]] = {}
        for name, value, update in points:
            rows.setdefault(update, {})[name] = value
        for update, values in rows.items():
            self._run.log({"update": update, **values})

    def send_image(self, name: str, content: bytes, update: int) -> None:
        """See ``Tracker.send_image``."""
        from PIL import Image

        with Image.open(io.BytesIO(content)) as image:
            self._run.log({"update": update, name: self._wandb.Image(image)})

    def send_checkpoint(self, folder: Path, update: int) -> None:
        """See ``Tracker.send_checkpoint``."""
        artefact = self._wandb.Artifact(f"checkpoint-{self._id}", type="model", metadata={"update": update})
        artefact.add_dir(str(folder))
        self._run.log_artifact(artefact, aliases=["latest", folder.name])

    def send_end(self, reason: str, error: str) -> None:
        """See ``Tracker.send_end``."""
        if error:
            self._run.summary["mtrain.error"] = error
        if reason == "interrupted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if reason == "done" else 1)

    def is_down(self, error: Exception) -> bool:
        """See ``Tracker.is_down``."""
        errors = self._wandb.errors
        refused = isinstance(error, errors.AuthenticationError)
        return (isinstance(error, errors.CommError) and not refused) or super().is_down(error)
