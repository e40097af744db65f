"""Begin to record in every Python process of a command, without a change of its script.

``mtrain-trace run`` puts this folder, and nothing else, first in PYTHONPATH: the command's interpreter need not be the one
in which mtrain_trace is installed, and must not see that one's packages. Python imports ``sitecustomize`` at its start; the
one that the environment has besides, if any, runs afterwards.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _import_beside() -> None:
    """Import ``mtrain_trace`` from the folder above this one, whether or not it is installed here."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = importlib.util.spec_from_file_location(
        "mtrain_trace", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["mtrain_trace"] = module
        spec.loader.exec_module(module)


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
    _import_beside()
    from mtrain_trace import startup

    startup.connect()
_run_next()
