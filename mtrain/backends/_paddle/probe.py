"""What the installed Paddle can do here, for ``mtrain doctor``: ``python -m mtrain.backends._paddle.probe`` prints JSON."""

import json
from pathlib import Path
from typing import Any

import paddle
from paddle import distributed as dist
from paddle import version


def look() -> list[dict[str, Any]]:
    """One entry per thing to tell: ``state`` ("ok", "warning", "bad"), ``text``, ``remedy``."""
    on_cuda = paddle.device.is_compiled_with_cuda()
    count = paddle.device.cuda.device_count() if on_cuda else 0
    built = f"built with CUDA {version.cuda()}" if on_cuda else "a build for the CPU"
    seen = f"{count} x {paddle.device.cuda.get_device_name(0)}" if count else "no GPU"
    found = [{"state": "ok", "text": f"paddle {version.full_version}, {built}; {seen}"}]
    if not dist.is_available():
        remedy = "install an official build"
        found.append({"state": "bad", "text": "paddle was built without paddle.distributed", "remedy": remedy})
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if present and not on_cuda:
        remedy = "install paddlepaddle-gpu from Paddle's own index, see https://www.paddlepaddle.org.cn/install/quick"
        found.append({"state": "warning", "text": f"{present} GPUs are here, and paddle uses none", "remedy": remedy})
    return found


if __name__ == "__main__":
    print(json.dumps(look()))
