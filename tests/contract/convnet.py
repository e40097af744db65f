"""The small network that tests of backends train: the conformance kit's."""

from mtrain_kit.convnet import SAMPLES, SIDE, build, data

__all__ = ["SAMPLES", "SIDE", "build", "data"]
