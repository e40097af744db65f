"""Base class of all backends on torch. Importing this module does not import torch; using a backend does."""

from mtrain.backends.base import DeviceOptions, EngineBackend


class TorchOptions(DeviceOptions):
    """Options of every backend on torch."""


class TorchBackend(EngineBackend):
    """A backend on torch, whose session is a ``TorchEngine``."""

    framework = "torch"

    def before_script(self) -> None:
        """See ``Backend.before_script``: process groups of the script's own must not hang at its end."""
        from mtrain.backends._torch.scripts.kept_groups import keep_groups

        keep_groups()
