"""Begin to record in every Python process of a command, without a change of its script.

``mtrain-trace run`` puts this folder first in PYTHONPATH. Python imports ``sitecustomize`` at its start; the one that
the environment has besides, if any, runs afterwards.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _run_next() -> None:
    """Run the ``sitecustomize`` that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("MTRAIN_TRACE"):
    try:
        from mtrain_trace import startup

        startup.connect()
    except ImportError as error:
        print(f"mtrain-trace: this process is not recorded: {error}", file=sys.stderr)
_run_next()
