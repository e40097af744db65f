"""Report what the installed Horovod can do on this machine, for ``mtrain doctor``.

``python -m mtrain.backends._horovod.probe`` prints the report as JSON. A process of its own, because it imports Horovod and
the frameworks that it was built for.
"""

import importlib
import json
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from mtrain.backends._horovod import library
from mtrain.errors import PluginError

FRAMEWORKS = ("torch", "tensorflow")


def look() -> list[dict[str, Any]]:
    """Return one entry per finding: ``state`` ("ok", "warning", "bad", "absent"), ``text`` and, where it helps, ``remedy``."""
    installed = [name for name in FRAMEWORKS if find_spec(name) is not None]
    findings = [finding for name in installed or FRAMEWORKS[:1] for finding in _look_at(name)]
    if any(
        finding["state"] == "ok" for finding in findings
    ):  # it was built for one of them, which is what was asked for
        findings = [{**each, "state": "absent"} if each["state"] == "bad" else each for each in findings]
    return findings


def _look_at(framework: str) -> list[dict[str, Any]]:
    try:
        hvd = library.load(framework)
    except PluginError as error:
        return [{"state": "bad", "text": error.problem, "remedy": error.remedy}]
    built = {
        "gloo": hvd.gloo_built(),
        "MPI": hvd.mpi_built(),
        "NCCL": bool(hvd.nccl_built()),
        "CUDA": hvd.cuda_built(),
        "ROCm": hvd.rocm_built(),
    }
    with_it = ", ".join(name for name, present in built.items() if present)
    without = ", ".join(name for name, present in built.items() if not present)
    loaded = importlib.import_module(framework)
    text = f"horovod {metadata.version('horovod')} for {framework} {loaded.__version__}, built with {with_it}; without {without}"
    findings = [{"state": "ok", "text": text}]
    if _sees_gpus(framework, loaded) and not built["NCCL"]:
        text = "this machine has GPUs, but horovod was built without NCCL: gradients are exchanged through host memory"
        remedy = f"build it with HOROVOD_GPU_OPERATIONS=NCCL; {library.remedy(framework)}"
        findings.append({"state": "warning", "text": text, "remedy": remedy})
    return findings


def _sees_gpus(framework: str, loaded: Any) -> bool:
    if framework == "torch":
        return bool(loaded.cuda.is_available())
    return bool(loaded.config.list_physical_devices("GPU"))


if __name__ == "__main__":
    print(json.dumps(look()))
