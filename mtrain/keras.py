"""``mtrain.keras`` is ``mtrain_tensorflow.keras``, of the package mtrain-tensorflow; scripts may have either name."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return what the package has under this name."""
    import mtrain

    return getattr(mtrain.__getattr__("keras"), name)
