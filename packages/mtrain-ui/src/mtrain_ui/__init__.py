"""Pages about runs, reports, and trackers."""

from typing import TYPE_CHECKING

from mtrain.spec import faces

if TYPE_CHECKING:
    from mtrain_ui.commands.report import write_report
    from mtrain_ui.commands.ui import serve_runs

__all__ = ["__version__", "serve_runs", "write_report"]
__version__ = "0.1.0"

if not TYPE_CHECKING:
    __getattr__ = faces.attributes(__name__, {"commands.report": ("write_report",), "commands.ui": ("serve_runs",)})
