"""Report what the installed Paddle can do on this machine, for ``mtrain doctor``.

``python -m mtrain.backends._paddle.probe`` prints the report as JSON. A process of its own, because it imports Paddle.
"""

import json
from pathlib import Path
from typing import Any

import paddle
from paddle import distributed as dist
from paddle import version

from mtrain.backends._paddle.internals import TESTED
from mtrain.backends.base import tell_version


def look() -> list[dict[str, Any]]:
    """Return one entry per finding: ``state`` ("ok", "warning", "bad"), ``text`` and, where it helps, ``remedy``."""
    on_cuda = paddle.device.is_compiled_with_cuda()
    count = paddle.device.cuda.device_count() if on_cuda else 0
    built = f"built with CUDA {version.cuda()}" if on_cuda else "a build for the CPU"
    gpus = f"{count} x {paddle.device.cuda.get_device_name(0)}" if count else "no GPU"
    findings = [{"state": "ok", "text": f"paddle {version.full_version}, {built}; {gpus}"}]
    if not dist.is_available():
        remedy = "install an official build"
        findings.append({"state": "bad", "text": "paddle was built without paddle.distributed", "remedy": remedy})
    gpu_count = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if gpu_count and not on_cuda:
        remedy = "install paddlepaddle-gpu from Paddle's own index, see https://www.paddlepaddle.org.cn/install/quick"
        findings.append(
            {"state": "warning", "text": f"this machine has {gpu_count} GPUs, but paddle uses none", "remedy": remedy}
        )
    return findings + tell_version("paddle", version.full_version, tested=TESTED)


if __name__ == "__main__":
    print(json.dumps(look()))
