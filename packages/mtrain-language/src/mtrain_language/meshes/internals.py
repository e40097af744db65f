"""Everything that this uses of torch without a promise of torch's: private names."""

from typing import Any

from torch import nn

TESTED = ("2.13.0",)
"""Versions of torch with which these internals were tested."""


def exchange_attention(config: Any, name: str) -> str:
    """Let a model of transformers, by its configuration, use the attention ``name``; return the name of the former one."""
    former: str = config._attn_implementation
    config._attn_implementation = name
    return former


def forget_hooks(module: nn.Module) -> None:
    """Drop what was registered around the forward pass of one module."""
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()
