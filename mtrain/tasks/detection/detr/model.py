"""RT-DETR and D-FINE, as Hugging Face's transformers has them, as model plugins. Nothing is downloaded.

The network, the matching of queries with objects and the losses are transformers' own. mtrain feeds them the batches of
the detection task and decodes what they predict.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, Field

from mtrain.core.interfaces import Array, Collective, HostBatch, Model, Module, PluginOptions, Published, Task
from mtrain.core.interfaces.program import Format, Program
from mtrain.errors import PluginError, SpecError
from mtrain.spec.pathnames import PathText
from mtrain.tasks.detection.detr import network
from mtrain.tasks.model_config import check_sizes, entries_for_transformers

STRIDE = 32
"""Pixels of the input per cell of the coarsest feature map."""


class DetectorOptions(PluginOptions):
    """Which network it is, and what of its predictions is kept."""

    path: PathText | None = Field(
        default=None,
        description="config.json of a model, or its folder: the sizes of the network; its weights are given as model.weights",
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="entries of config.json, over those of path, which has transformers' defaults: num_queries, "
        "backbone_config... Classes are those of the data",
    )
    max_detections: int = Field(default=300, ge=1, description="largest number of detections per image, best first")


class TransformersDetector(Model):
    """A detector of transformers. Subclasses name its type.

    It keeps transformers' own start values; weights of others come as ``model.weights``.
    """

    Options: ClassVar[type[BaseModel]] = DetectorOptions
    kind: ClassVar[str] = "detection"
    native: ClassVar[bool] = True
    size_step: int = STRIDE
    # The layers of a stack are in a list, and have a number for a name: model.decoder.layers.3.
    recomputable: ClassVar[Sequence[str]] = (r"^model\.(encoder\.aifi\.\d+|decoder)\.layers\.\d+$",)
    published: ClassVar[Published] = Published(
        per_class=(
            r"(^|\.)class_embed\.\d+\.(weight|bias)$",
            r"\.enc_score_head\.(weight|bias)$",
            r"\.denoising_class_embed\.weight$",
        ),
        renamed=(
            (r"^(class|bbox)_embed\.", r"model.decoder.\1_embed."),
            (r"\.out_proj\.", ".o_proj."),
            (r"\.encoder\.encoder\.(\d+)\.layers\.", r".encoder.aifi.\1.layers."),
        ),
    )
    model_type: ClassVar[str]
    unwritable: ClassVar[Sequence[Format]] = ()
    """Formats of programs that torch cannot write of the network."""

    options: DetectorOptions

    def check_framework(self, framework: str) -> None:
        """Refuse a backend that is not on torch.

        Raises:
            SpecError: It is not.
        """
        if framework != "torch":
            raise SpecError(
                f"model.name: {self.model_type} is a model of torch, and the backend is on {framework}; choose one on torch"
            )

    def prepare_task(self, task: Task, statistics: Mapping[str, Any]) -> Task:
        """Check that the task fits, and return it unchanged: nothing in these models depends on the data.

        Raises:
            SpecError: The image size or the class names do not fit.
        """
        problems = []
        if task.image_size < STRIDE or task.image_size % STRIDE:
            nearest = max(round(task.image_size / STRIDE), 1) * STRIDE
            problems.append(
                f"data.image_size: {task.image_size} is not a multiple of {STRIDE} as {self.model_type} needs; use {nearest}"
            )
        if len(task.class_names) == 0:
            problems.append("data: no class names; a detector needs at least one class")
        if problems:
            raise SpecError(problems)
        return task

    def build(self, task: Task, collective: Collective) -> Module:
        """Build the network; the session has seeded the framework just before.

        Raises:
            SpecError: The options describe no such network.
        """
        return network.adapt(self._module(task))

    def _module(self, task: Task) -> Any:
        from transformers import AutoModelForObjectDetection

        library: Any = AutoModelForObjectDetection  # parts of it have no annotations
        config = self.config(task.class_names)
        self._fit_queries(config, task.image_size)
        try:
            module = library.from_config(config)
        except Exception as error:  # transformers raises many kinds
            raise SpecError(f"model.options: transformers cannot build {self.model_type}: {error}") from error
        return module.float()

    def check_program(self, program: Program) -> None:
        """Refuse what torch cannot trace of these networks, and what was never compared with them.

        Raises:
            SpecError: The program is such a one.
        """
        name, problems = self.model_type, []
        if program.batch is None:
            problems.append(
                f"--dynamic-batch: {name} is traced for one size of batch; give --no-dynamic-batch or --batch-size N"
            )
        if program.size_step:
            problems.append(f"--dynamic-size: {name} is traced for one size of images; leave the flag out")
        if program.raw:
            problems.append(f"--form raw: {name} has no outputs before decoding; use --form decoded")
        if program.half:
            problems.append(f"--precision fp16: {name} is written in float32 only; leave the flag out")
        if program.format in self.unwritable:
            problems.append(
                f"--format {program.format}: the exporter knows no form of an operator of {name}; use --format torch"
            )
        if problems:
            raise SpecError(problems)

    def entries(self, task: Task) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """See ``Model.entries``: those of a module that is built and dropped."""
        return network.entries(self._module(task))

    def config(self, class_names: Sequence[str]) -> Any:
        """Return the configuration as transformers has it, for these classes.

        Raises:
            SpecError: There is none, or it is of another type of model.
        """
        from transformers import AutoConfig

        try:
            entries = self._given_entries()
            self._check_type(entries.pop("model_type", self.model_type))
            labels = dict(enumerate(class_names))
            # Positions are computed for the size of the images at hand, where a config names one size for evaluation.
            own = {"id2label": labels, "label2id": {name: i for i, name in labels.items()}, "eval_size": None}
            # The classes are those of the data, and the precision is
            # the job's: what a file says about them must not win.
            for name in ("num_labels", "dtype", "torch_dtype", "architectures"):
                entries.pop(name, None)
            return AutoConfig.for_model(self.model_type, **{**entries, **own, "anchor_image_size": None})
        except SpecError:
            raise
        except Exception as error:  # transformers raises many kinds
            raise SpecError(f"model.options: {self.options.path or 'config'}: {error}") from error

    def initial(self, shapes: Mapping[str, tuple[int, ...]], task: Task, *, seed: int) -> dict[str, Array]:
        """Refuse: the model keeps its own start values, and nobody asks for others."""
        raise PluginError(f"{self.model_type}: the model has start values of its own, which only its ranks know")

    def predictions(self, output: Mapping[str, Array], batch: HostBatch) -> list[Array]:
        """Return the detections of each image: float32 (K, 6) ``[x1, y1, x2, y2, score, class]``, best first.

        Boxes are in pixels of the network's input.
        """
        height, width = batch["images"].shape[1:3]
        sides = np.array([width, height, width, height], np.float32)
        pairs = zip(output["boxes"], output["scores"], strict=True)
        # Each query may stand for several classes, and none is suppressed: queries are trained to differ.
        return [best(boxes_Q4 * sides, scores_QC, self.options.max_detections) for boxes_Q4, scores_QC in pairs]

    def check_libraries(self) -> None:
        """Refuse a configuration that cannot be read, or is of another model; see ``Model.check_libraries``."""
        self._check_type(self._given_entries().get("model_type", self.model_type))

    def _given_entries(self) -> dict[str, Any]:
        """Return the entries of the configuration that the options name, which are not those of transformers."""
        stored = {} if self.options.path is None else entries_for_transformers(self.options.path)
        entries = {**stored, **self.options.config}
        check_sizes(entries, path=self.options.path or "config")
        return entries

    def _check_type(self, given: str) -> None:
        if given != self.model_type:
            raise SpecError(
                f"model.options: {self.options.path or 'config'} is of the model {given}, and model.name is {self.model_type}; "
                "give a config of that type"
            )

    def _fit_queries(self, config: Any, image_size: int) -> None:
        """Lower the number of queries to that of the image's cells, among which the network chooses them.

        Raises:
            SpecError: The spec says a larger number itself, or each query has a vector of its own.
        """
        cells = sum((image_size // stride) ** 2 for stride in config.feat_strides)
        if config.num_queries <= cells:
            return
        if "num_queries" in self.options.config or config.learn_initial_query:
            raise SpecError(
                f"model.options.config.num_queries: {config.num_queries} queries, and an image of {image_size} pixels has "
                f"{cells} cells of which they are chosen; give config: {{num_queries: {cells}}} or fewer, or larger images"
            )
        # The weights have the same shapes with fewer queries, where no query has a vector of its own.
        config.num_queries = cells


def best(boxes_Q4: Array, scores_QC: Array, most: int) -> Array:
    """Return the ``most`` pairs of a query and a class with the best scores: float32 (K, 6), best first."""
    flat = np.asarray(scores_QC).reshape(-1)
    chosen = np.argsort(-flat, kind="stable")[: min(most, len(scores_QC))]
    query, label = np.divmod(chosen, scores_QC.shape[1])
    return np.concatenate([boxes_Q4[query], flat[chosen, None], label[:, None]], axis=1).astype(np.float32)


class RTDetr(TransformersDetector):
    """RT-DETR: Zhao et al. 2023, "DETRs Beat YOLOs on Real-time Object Detection"."""

    model_type = "rt_detr"
    published: ClassVar[Published] = network.with_layers(TransformersDetector.published, ("mlp.fc1", "mlp.fc2"))


class RTDetrV2(RTDetr):
    """RT-DETRv2: Lv et al. 2024, "RT-DETRv2: Improved Baseline with Bag-of-Freebies"."""

    model_type = "rt_detr_v2"


class DFine(TransformersDetector):
    """D-FINE: Peng et al. 2024, "D-FINE: Redefine Regression Task in DETRs"."""

    model_type = "d_fine"
    float64 = False  # transformers computes its loss in float32
    unwritable: ClassVar[Sequence[Format]] = ("onnx",)
    published: ClassVar[Published] = network.with_layers(
        TransformersDetector.published, ("mlp.layers.0", "mlp.layers.1")
    )
