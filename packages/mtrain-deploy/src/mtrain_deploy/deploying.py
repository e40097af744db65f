"""The requests and functions of ``mtrain export``, ``quantise``, ``prune`` and ``serve``."""

from mtrain_deploy.exporting.job import export
from mtrain_deploy.exporting.request import ExportRequest
from mtrain_deploy.pruning.command import PruneRequest, prune
from mtrain_deploy.quantising.job import QuantiseRequest, quantise
from mtrain_deploy.serving import serve

__all__ = ["ExportRequest", "PruneRequest", "QuantiseRequest", "export", "prune", "quantise", "serve"]
