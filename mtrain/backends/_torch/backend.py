"""Base class of all backends on torch. Importing this module does not import torch; using a backend does."""

from typing import Any

from mtrain.backends.base import DeviceOptions, EngineBackend
from mtrain.core.overriding import override


class TorchOptions(DeviceOptions):
    """Options of every backend on torch."""


class TorchBackend(EngineBackend):
    """A backend on torch, whose session is a ``TorchEngine``."""

    framework = "torch"
    _engine: Any = None
    """The session, where ``__exit__`` is to leave torch's default process group."""

    @override
    def __exit__(self, *error: object) -> None:
        from mtrain.backends._torch.ranks import group

        if self._engine is not None:
            self._engine.close()
        self._engine = None
        group.leave(failed=bool(error) and error[0] is not None)

    def before_script(self) -> None:
        """See ``Backend.before_script``: process groups of the script's own must not hang at its end."""
        from mtrain.backends._torch.scripts.kept_groups import keep_groups

        keep_groups()
