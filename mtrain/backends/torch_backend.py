"""Public base class for plugin backends on torch. A plugin may import it at the top: it imports no framework.

With ``mtrain.backends.torch_engine`` this is the public part of ``mtrain.backends``; ``docs/writing-a-backend.md``
shows its use.
"""

from mtrain.backends._torch.backend import TorchBackend, TorchOptions

__all__ = ["TorchBackend", "TorchOptions"]
