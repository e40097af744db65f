"""The part of ``core.interfaces.Backend`` that all backends on torch share. Imports torch only when asked to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mtrain.backends.base import DeviceOptions, EngineBackend

if TYPE_CHECKING:
    from mtrain.backends._torch.engine import TorchEngine  # noqa: F401 - named in a string below


class TorchOptions(DeviceOptions):
    """Options of every backend on torch."""


class TorchBackend(EngineBackend["TorchEngine"]):
    """Passes calls on to a ``TorchEngine``."""

    framework = "torch"
