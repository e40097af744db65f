"""Layers that are the same in every framework. The module is empty until ``core.binding.bind`` fills in a framework's.

The stub ``nn.pyi`` defines them.
"""

from mtrain.errors import UnboundError

NAMES = (
    "GELU",
    "BatchNorm2d",
    "Conv2d",
    "ConvTranspose2d",
    "Dropout",
    "Embedding",
    "GroupNorm",
    "Identity",
    "LayerNorm",
    "Linear",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Upsample",
    "buffer",
    "frozen",
    "no_grad",
    "parameter",
)


def __getattr__(name: str) -> object:
    if name in NAMES:
        raise UnboundError(f"nn.{name}: no framework bound: load a backend first")
    raise AttributeError(f"module 'mtrain.core.nn' has no attribute {name!r}; core/nn.pyi lists what it has")
