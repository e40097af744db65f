"""Report what the installed TensorFlow can do on this machine, for ``mtrain doctor``.

``python -m mtrain_tensorflow.probe`` prints the report as JSON. A process of its own, because it imports TensorFlow.
"""

import json
from typing import Any

import tensorflow as tf

NEWEST = (2, 15)
"""Newest TensorFlow with which Horovod 0.28.1 trains: the variables of Keras 3, which comes with 2.16, have no ``ref``."""


def device() -> str:
    """Return the kind of device on which TensorFlow computes here, as records name it."""
    return "cuda" if tf.config.list_physical_devices("GPU") else "cpu"


def look() -> list[dict[str, Any]]:
    """Return one entry per finding: ``state`` ("ok", "warning", "bad"), ``text`` and, where it helps, ``remedy``."""
    cuda = tf.sysconfig.get_build_info().get("cuda_version")
    count = len(tf.config.list_physical_devices("GPU"))
    built = f"built with CUDA {cuda}" if cuda else "a build for the CPU"
    text = (
        f"tensorflow {tf.__version__}, {built}; {f'{count} GPUs' if count else 'no GPU'}; for scripts of Horovod's form"
    )
    findings = [{"state": "ok", "text": text}]
    if tuple(int(part) for part in tf.__version__.split(".")[:2]) > NEWEST:
        text = f"tensorflow {tf.__version__} is too new for Horovod 0.28.1, which trains with 2.15 at most"
        remedy = "make an environment with: pip install 'tensorflow-cpu==2.15.1' 'numpy<2'"
        findings.append({"state": "warning", "text": text, "remedy": remedy})
    return findings


if __name__ == "__main__":
    print(json.dumps(look()))
