"""How tests of backends train the small network: as the conformance kit does."""

from mtrain_kit.convnet import start_weights
from mtrain_kit.training import Case, differences, flat, micro_batches, rates, train

__all__ = ["Case", "differences", "flat", "micro_batches", "rates", "start_weights", "train"]
