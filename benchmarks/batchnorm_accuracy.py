"""Measure the accuracy of torch in float32 on the CPU, by memory layout and number of threads.

Run ``python benchmarks/batchnorm_accuracy.py``. It needs torch alone, so that it can accompany a report to torch:
``--minimal`` prints BatchNorm's two lines only. Every metric is the length of the error divided by the length of the
float64 result. ``docs/accuracy.md`` has a table of the results.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
Computed = Callable[..., Tensor]


def error(actual: Tensor, exact: Tensor) -> float:
    """Return the length of the difference divided by the length of ``exact``."""
    actual, exact = actual.detach().double(), exact.detach()
    return float((actual - exact).norm() / exact.norm())


def errors(compute: Computed, tensors: list[Tensor], layout: torch.memory_format) -> list[float]:
    """Return the errors of the result of ``compute`` in float32 and of the gradients of its arguments."""
    results = []
    for dtype, memory_format in ((torch.float32, layout), (torch.float64, torch.contiguous_format)):
        leaves = [x.to(dtype, memory_format=memory_format if x.dim() == 4 else torch.preserve_format) for x in tensors]
        leaves = [x.clone().requires_grad_() for x in leaves]
        result = compute(*leaves)
        seed = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
        seed = seed.to(dtype, memory_format=memory_format if seed.dim() == 4 else torch.preserve_format)
        results.append([result, *torch.autograd.grad(result, leaves, seed)])
    return [error(actual, exact) for actual, exact in zip(*results, strict=True)]


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Apply torch's own BatchNorm in training mode."""
    return F.batch_norm(x, None, None, weight, bias, training=True)


def cases(*, minimal: bool) -> Iterator[tuple[str, Computed, list[Tensor]]]:
    """Yield name, function and arguments of each case."""
    torch.manual_seed(0)
    shapes = ((8, 16, 320, 320),) if minimal else ((4, 32, 40, 40), (4, 16, 160, 160), (8, 16, 320, 320))
    for shape in shapes:
        yield f"BatchNorm {shape}", batch_norm, [torch.randn(shape), torch.ones(shape[1]), torch.zeros(shape[1])]
    if minimal:
        return
    images = torch.randn(4, 32, 80, 80)
    yield "Conv2d 3x3 (4, 32, 80, 80)", lambda x, w: F.conv2d(x, w, padding=1), [images, torch.randn(32, 32, 3, 3)]
    yield "Conv2d 1x1 (4, 32, 80, 80)", F.conv2d, [images, torch.randn(64, 32, 1, 1)]
    yield (
        "GroupNorm (4, 32, 80, 80)",
        lambda x, w, b: F.group_norm(x, 8, w, b),
        [images, torch.ones(32), torch.zeros(32)],
    )
    yield "mean over H and W (4, 32, 80, 80)", lambda x: x.mean((2, 3)), [images]
    yield "mean of all (4, 32, 80, 80)", lambda x: x.mean(), [images + 1]
    rows = torch.randn(4096, 256)
    yield (
        "LayerNorm (4096, 256)",
        lambda x, w, b: F.layer_norm(x, (256,), w, b),
        [rows, torch.ones(256), torch.zeros(256)],
    )
    logits = torch.randn(400_000)
    yield "BCE, mean of 400,000", lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)), [logits]


def main() -> None:
    """Print a line per function, layout and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minimal", action="store_true", help="BatchNorm of one shape at one thread")
    minimal = parser.parse_args().minimal
    print(f"torch {torch.__version__}: relative error of the result, then of the gradient of each argument")
    for threads in (1,) if minimal else (1, 2):
        torch.set_num_threads(threads)
        for name, compute, tensors in cases(minimal=minimal):
            for layout, memory_format in LAYOUTS.items():
                if layout == "NCHW" or tensors[0].dim() == 4:
                    sizes = " / ".join(f"{size:.0e}" for size in errors(compute, tensors, memory_format))
                    print(f"{threads} thread{'s' if threads > 1 else ' '} {name:36} {layout}  {sizes}", flush=True)


if __name__ == "__main__":
    main()
