"""Public engine for plugin backends on torch, the one that mtrain's own backends share. Importing it imports torch.

With ``mtrain.backends.torch_backend`` this is the public part of ``mtrain.backends``; ``docs/writing-a-backend.md``
shows its use.
"""

from mtrain.backends._torch.collective import DistributedCollective, TorchCollective
from mtrain.backends._torch.device import choose as choose_device
from mtrain.backends._torch.engine import TorchEngine, of_one_rank
from mtrain.backends._torch.layout import use_channels_last
from mtrain.backends._torch.optimizer import TorchOptimizer
from mtrain.backends._torch.ranks.group import join as join_group
from mtrain.backends._torch.ranks.group import leave as leave_group
from mtrain.backends._torch.sharded.engine import SplitEngine
from mtrain.backends._torch.sharded.optimizer import ShardedOptimizer
from mtrain.backends._torch.state import fill, to_numpy
from mtrain.backends.engine import LocalCollective, NoExchange
from mtrain.core.update.order import Exchange

__all__ = [
    "DistributedCollective",
    "Exchange",
    "LocalCollective",
    "NoExchange",
    "ShardedOptimizer",
    "SplitEngine",
    "TorchCollective",
    "TorchEngine",
    "TorchOptimizer",
    "choose_device",
    "fill",
    "join_group",
    "leave_group",
    "of_one_rank",
    "to_numpy",
    "use_channels_last",
]
