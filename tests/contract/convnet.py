"""The small network that tests of backends train: the conformance kit's."""

from mtrain.testing.convnet import SAMPLES, SIDE, build, data

__all__ = ["SAMPLES", "SIDE", "build", "data"]
