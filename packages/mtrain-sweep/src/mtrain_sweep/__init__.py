"""Searches for good values of a spec: trials that are ordinary jobs, proposed and judged through Optuna."""

from typing import TYPE_CHECKING

from mtrain.spec import faces

if TYPE_CHECKING:
    from mtrain_sweep.commands.sweep import sweep
    from mtrain_sweep.results import SweepResult, SweepTrial, open_sweep

__all__ = ["SweepResult", "SweepTrial", "__version__", "open_sweep", "sweep"]
__version__ = "0.1.0"

if not TYPE_CHECKING:
    __getattr__ = faces.attributes(
        __name__, {"commands.sweep": ("sweep",), "results": ("SweepResult", "SweepTrial", "open_sweep")}
    )
