"""The requests and functions of ``mtrain export``, ``quantise``, ``prune`` and ``serve``."""

from mtrain.deploy.export.job import export
from mtrain.deploy.export.request import ExportRequest
from mtrain.deploy.prune.command import PruneRequest, prune
from mtrain.deploy.quantise.job import QuantiseRequest, quantise
from mtrain.deploy.serve import serve

__all__ = ["ExportRequest", "PruneRequest", "QuantiseRequest", "export", "prune", "quantise", "serve"]
