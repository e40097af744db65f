"""Re-parameterisation: fuse parallel convolutions and their BatchNorms into one convolution, on numpy state arrays."""

from collections.abc import Mapping

import numpy as np

from mtrain.core.interfaces import Array

_FIRST = ".conv1.conv.weight"
_EPS = 1e-5
"""Epsilon of the BatchNorms that are fused."""


def fuse(weights: Mapping[str, Array]) -> dict[str, Array]:
    """Convert the state of a network with ``blocks.RepConv`` to that of the same network with ``deploy``.

    ``<block>.conv1`` (3x3) and ``<block>.conv2`` (1x1) with their BatchNorms become ``<block>.conv.weight`` and
    ``.bias``, computed in float64, with the factor ``<block>.alpha`` of the second where there is one. Everything else
    stays as it is. Ding et al. 2021, RepVGG, section 3.3.
    """
    blocks = [name.removesuffix(_FIRST) for name in weights if name.endswith(_FIRST)]
    blocks = [block for block in blocks if _sides(weights, block) == [3, 1]]
    branches = tuple(f"{block}.{branch}" for block in blocks for branch in ("conv1.", "conv2.", "alpha"))
    fused: dict[str, Array] = {}
    for name, array in weights.items():
        if not name.startswith(branches):
            fused[name] = array
        elif name.endswith(_FIRST):
            block = name.removesuffix(_FIRST)
            kernel, bias = _branch(weights, f"{block}.conv1")
            point, shift = _branch(weights, f"{block}.conv2")
            factor = np.asarray(weights.get(f"{block}.alpha", 1.0), np.float64)
            kernel[:, :, 1:2, 1:2] += factor * point
            fused[f"{block}.conv.weight"] = kernel.astype(array.dtype)
            fused[f"{block}.conv.bias"] = (bias + factor * shift).astype(array.dtype)
    return fused


def _sides(weights: Mapping[str, Array], block: str) -> list[int]:
    """Return the kernel sizes of a block's two convolutions; [] if it is no such block."""
    names = [f"{block}.{branch}.conv.weight" for branch in ("conv1", "conv2")]
    return [weights[name].shape[-1] for name in names] if all(name in weights for name in names) else []


def _branch(weights: Mapping[str, Array], name: str) -> tuple[Array, Array]:
    """Fuse a convolution with the BatchNorm that follows it; return kernel and bias in float64."""
    kernel = np.asarray(weights[f"{name}.conv.weight"], np.float64)
    gamma, beta, mean, variance = (
        np.asarray(weights[f"{name}.bn.{leaf}"], np.float64)
        for leaf in ("weight", "bias", "running_mean", "running_var")
    )
    scale = gamma / np.sqrt(variance + _EPS)
    return kernel * scale[:, None, None, None], beta - mean * scale
