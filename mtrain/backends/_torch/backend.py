"""Base class of all backends on torch. Importing this module does not import torch; using a backend does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtrain.backends.base import DeviceOptions, EngineBackend

if TYPE_CHECKING:
    from mtrain.backends._torch.engine import TorchEngine  # noqa: F401 - named in a string below


class TorchOptions(DeviceOptions):
    """Options of every backend on torch."""


class TorchBackend(EngineBackend["TorchEngine"]):
    """A backend that forwards its calls to a ``TorchEngine``."""

    framework = "torch"
