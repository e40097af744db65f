"""Report what the installed DeepSpeed can do on this machine, for ``mtrain doctor``.

``python -m mtrain.backends._deepspeed.probe`` prints the report as JSON. A process of its own, because it imports
DeepSpeed.
"""

import json
from typing import Any

import torch

from mtrain.backends._deepspeed import library
from mtrain.backends.base import tell_version
from mtrain.errors import PluginError


def look() -> list[dict[str, Any]]:
    """Return one entry per finding: ``state`` ("ok", "warning", "bad"), ``text`` and, where it helps, ``remedy``."""
    try:
        deepspeed = library.load("cuda" if torch.cuda.is_available() else "cpu")
    except PluginError as error:
        return [{"state": "bad", "text": error.problem, "remedy": error.remedy}]
    from deepspeed.accelerator import get_accelerator

    from mtrain.backends._deepspeed.internals import TESTED

    accelerator = get_accelerator()
    text = f"deepspeed {deepspeed.__version__} on {accelerator.device_name()}, over {accelerator.communication_backend_name()}"
    return [{"state": "ok", "text": text}, *tell_version("deepspeed", deepspeed.__version__, tested=TESTED)]


if __name__ == "__main__":
    print(json.dumps(look()))
