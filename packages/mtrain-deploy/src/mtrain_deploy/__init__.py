"""Other forms of a trained model: exported, quantised, pruned and served."""

from typing import TYPE_CHECKING

from mtrain.spec import faces

if TYPE_CHECKING:
    from mtrain_deploy.functions import export, prune, quantise
    from mtrain_deploy.serving import serve

__all__ = ["__version__", "export", "prune", "quantise", "serve"]
__version__ = "0.1.0"

if not TYPE_CHECKING:
    __getattr__ = faces.attributes(__name__, {"functions": ("export", "prune", "quantise"), "serving": ("serve",)})
