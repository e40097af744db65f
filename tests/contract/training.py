"""How tests of backends train the small network: as the conformance kit does."""

from mtrain.testing.convnet import start_weights
from mtrain.testing.training import Case, differences, disagreements, flat, micro_batches, rates, train

__all__ = ["Case", "differences", "disagreements", "flat", "micro_batches", "rates", "start_weights", "train"]
