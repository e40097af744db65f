"""The interfaces between mtrain and its plugins: what plugins implement, and the values that are exchanged.

Read the modules in this order: the values (``recipe``, ``state``), what a backend implements (``collective``,
``optimizer``, ``capabilities``, ``session``, ``backend``), what a task implements (``model``, ``evaluator``, ``dataset``,
and ``task``, which ties them to a job), then what starts the ranks (``launcher`` on one host, ``cluster`` on several).
Their names are imported from here. Interfaces that few plugins implement are imported from their own modules: ``queue``
and ``allocation`` (of schedulers), ``reporter``, ``live`` (predictions on images in memory), ``details`` (charts of an
evaluation), ``program`` (exports) and ``exported`` (readers of them). Nothing here names a particular backend, framework or kind of task.
"""

from mtrain.core.interfaces.backend import NEUTRAL_FRAMEWORKS, Backend
from mtrain.core.interfaces.capabilities import Capabilities
from mtrain.core.interfaces.cluster import Cluster, HostedJob
from mtrain.core.interfaces.collective import Collective
from mtrain.core.interfaces.dataset import Dataset, Loader, Source, Split, SplitRequest
from mtrain.core.interfaces.evaluator import Evaluator
from mtrain.core.interfaces.launcher import Command, Host, Launcher
from mtrain.core.interfaces.model import Imitation, Model, Published, Task, Variation
from mtrain.core.interfaces.optimizer import Optimizer, Rates
from mtrain.core.interfaces.options import PluginOptions
from mtrain.core.interfaces.recipe import Mesh, Pruning, Quantise, Recipe
from mtrain.core.interfaces.session import Narrow, RankSession
from mtrain.core.interfaces.state import Outline, Part, Progress, SplitStream, State, StateStream, Why
from mtrain.core.interfaces.task import ImageData, JobData, Remark, Table, TaskData, TaskKind
from mtrain.core.interfaces.tensors import Array, Batch, HostBatch, Module, Precision, T, Tensor

__all__ = [
    "NEUTRAL_FRAMEWORKS",
    "Array",
    "Backend",
    "Batch",
    "Capabilities",
    "Cluster",
    "Collective",
    "Command",
    "Dataset",
    "Evaluator",
    "Host",
    "HostBatch",
    "HostedJob",
    "ImageData",
    "Imitation",
    "JobData",
    "Launcher",
    "Loader",
    "Mesh",
    "Model",
    "Module",
    "Narrow",
    "Optimizer",
    "Outline",
    "Part",
    "PluginOptions",
    "Precision",
    "Progress",
    "Pruning",
    "Published",
    "Quantise",
    "RankSession",
    "Rates",
    "Recipe",
    "Remark",
    "Source",
    "Split",
    "SplitRequest",
    "SplitStream",
    "State",
    "StateStream",
    "T",
    "Table",
    "Task",
    "TaskData",
    "TaskKind",
    "Tensor",
    "Variation",
    "Why",
]
