"""Flags of other projects' training scripts, so that their command lines work here or are answered.

The projects are YOLOv5, PaddleDetection and Megatron-LM.

Each flag becomes values of the spec, with the flag as their origin, or is refused with a message that names its
replacement.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mtrain.commands.flags import Option, spec_option, switch

LISTS = ("--freeze",)
"""Flags that take several words: ``--freeze 0 1 2``."""
REFUSED: Mapping[str, str] = {
    "--hyp=": "hyper-parameters are part of the spec: mtrain config import {value} MODEL.yaml DATA.yaml --to spec.yml, "
    "then mtrain -c spec.yml",
    "--slim-config=": "pruning, quantisation and distillation are sections of a spec: train.prune, train.quantise, "
    "train.distil; a file with a teacher is imported: mtrain config import STUDENT.yml {value} --to spec.yml",
    "--vdl-log-dir=": "curves are TensorBoard events in the run folder; run folders are made in: -o report.dir={value}",
    "--evolve": "the search is a command of its own: mtrain sweep -c SPEC --space yolov5",
    "--rect": "training images are square here; data.resize says how they become so (letterbox or stretch)",
    "--quad": "mtrain has no such loader; data.image_size is the side that is trained",
    "--nosave": "mtrain always keeps what --resume needs; checkpoint.keep_last=1 keeps least",
    "--exist-ok": "a run never writes into the folder of another; give it another --name",
    "--noautoanchor": "the model says how anchors are made: -o model.options.anchors=[...] gives them",
    "--enable-ce=": "runs of one seed are alike anyway: --seed 0",
    "--to-static": "train.compile compiles the model where the backend can: -o train.compile=true",
    "--save-prediction-only": "`mtrain predict` writes predictions, `mtrain evaluate` scores them",
}  # fmt: skip
"""Refused flag, with ``=`` where it takes a value -> what to do instead, where ``{value}`` is the value that was typed.

Typing one ends the command with a usage error."""


_TENSOR = "-b fsdp -o parallel.tensor={value}"
_STAGES = "-b fsdp -o parallel.pipeline={value}"
_EXPERTS = (
    "no layer is divided by experts or by texts here; ranks can share every layer: -b fsdp -o parallel.tensor={value}"
)
_LOCAL_BATCH = (
    "the batch that is given is that of the whole job, --batch-size; -o train.max_micro_batch={value} limits how many samples a "
    "rank computes at once"
)
MEGATRON: Mapping[str, str] = {
    **dict.fromkeys(("--model-parallel-size=", "--tensor-model-parallel-size=", "--tensor-parallel-size="), _TENSOR),
    **dict.fromkeys(("--pipeline-model-parallel-size=", "--pipeline-parallel-size="), _STAGES),
    "--data-parallel-size=": "each rank trains a part of the batch: --nproc-per-node {value}, or as copies of a mesh "
    "-b fsdp -o parallel.replicate={value}",
    "--context-parallel-size=": _EXPERTS,
    "--expert-model-parallel-size=": _EXPERTS,
    "--sequence-parallel": "-b fsdp -o 'parallel={{tensor: 2, sequence: true}}'",
    "--use-distributed-optimizer": "-b deepspeed -o backend.options.stage=1 divides the optimizer's state among ranks",
    "--micro-batch-size=": _LOCAL_BATCH,
    "--train-iters=": "-o train.updates={value}",
    "--clip-grad=": "-o train.clip_norm={value}",
    "--weight-decay=": "-o optimizer.weight_decay={value}",
    "--lr-warmup-iters=": "-o 'schedule.warmup={{updates: {value}}}'",
    "--lr-decay-style=": "the curve is named by -o schedule.name=cosine, linear or another one",
    "--save=": "run folders are made in: -o report.dir={value}",
    "--load=": "--resume {value}",
    "--save-interval=": "-o checkpoint.every_updates={value}",
    "--eval-interval=": "-o evaluate.every_updates={value}",
    "--fp16": "--amp=fp16",
    "--bf16": "--amp",
    "--recompute-activations": "-o train.recompute=true",
    "--tensorboard-dir=": "curves are written into the run folder; run folders are made in: -o report.dir={value}",
    "--distributed-backend=": "the backend chooses NCCL or gloo by the device; a stack is chosen with -b",
}  # fmt: skip
"""Flags of Megatron-LM and DeepSpeed, as ``REFUSED``; ``mtrain run`` answers them too."""


def _data(file: str) -> Mapping[str, Any]:
    path = Path(file)
    if not path.is_file():
        raise click.UsageError(f"--data {file}: no such file; expected YOLOv5's data YAML (path, train, val, names)")
    # What the file says replaces what a spec says of the same: a path of the spec beside names of the file would be a mixture.
    # It says nothing of `data.classes`: a choice that the set does not have is refused when it is read.
    said_by_file = dict.fromkeys(("data.train", "data.val", "data.images", "data.names"))
    place = {"data.format": "yolo", "data.root": str(path.parent)}
    return {**place, **said_by_file, "data.options.description": path.name}


def _model_of(file: str) -> str:
    """Return the model that is meant by the name of a published file of a network or of its weights."""
    name = Path(file).stem if file.endswith((".yaml", ".yml", ".pt", ".pdparams")) else file
    return re.sub(r"^(ppyoloe(?:_plus)?)_crn_([smlx])_.*", r"\1_\2", name)


def _cfg(file: str) -> Mapping[str, Any]:
    from mtrain.spec.registry import Registry

    name = _model_of(file)
    if name not in {entry.name for entry in Registry.read().names("models")}:
        raise click.UsageError(
            f"--cfg {file}: {name!r} is no model here (mtrain plugins list models); `mtrain config import {shlex.quote(file)}` tells "
            "whether it is one under another name"
        )
    return {"model.name": name}


def _save_period(epochs: int) -> Mapping[str, Any]:
    if epochs < 1:
        raise click.UsageError(
            f"--save-period {epochs}: mtrain always saves; give the epochs between checkpoints, or leave it out"
        )
    return {"checkpoint.every_epochs": epochs}


def _freeze(words: tuple[str, ...]) -> Mapping[str, Any]:
    numbers = [part for word in words for part in word.replace(",", " ").split()]
    if not numbers or not all(part.isascii() and part.isdigit() and len(part) < 5 for part in numbers):
        raise click.UsageError(
            f"--freeze {' '.join(words)}: expected numbers of YOLOv5's layers; train.freeze takes regexes of parameter names: "
            "-o 'train.freeze=[REGEX]'"
        )
    layers = range(int(numbers[0])) if len(numbers) == 1 else sorted({int(part) for part in numbers})
    pattern = (
        # One pattern for all layers: some, such as Upsample, have no parameters, and would match nothing.
        rf"^model\.({'|'.join(map(str, layers))})\."
    )
    return {"train.freeze": [pattern] if layers else []}


YOLOV5: Sequence[Option] = (
    spec_option(_data, "--data", metavar="DATA.yaml", help="YOLOv5's data YAML: data.format yolo, and its paths and names."),
    spec_option(_cfg, "--cfg", metavar="MODEL.yaml", help="YOLOv5's model YAML, for its name: yolov5s.yaml is model.name yolov5s."),
    spec_option(
        lambda file: {"model.weights": file or None}, "--weights", metavar="FILE", help="Weights to start from; '' for none."
    ),
    spec_option(
        "data.image_size", "--img", "--imgsz", "--img-size", "image_size", type=int, metavar="PIXELS",
        help="Side of the network's input.",
    ),
    spec_option("data.workers", "--workers", type=int, metavar="N", help="Loader processes of each rank."),
    spec_option(
        "data.cache", "--cache", is_flag=False, flag_value="ram", type=click.Choice(["ram", "disk"]),
        help="Keep decoded images; in memory unless --cache=disk.",
    ),
    switch(
        {"evaluate.every_epochs": None, "evaluate.every_updates": None}, "--noval", help="Evaluate at the end only."
    ),
    spec_option(
        lambda evaluations: {"train.patience": evaluations or None}, "--patience", type=click.IntRange(min=0), metavar="N",
        help="Stop after N evaluations without a better score; 0: never.",
    ),
    spec_option(
        _freeze, "--freeze", multiple=True, metavar="N ...",
        help="YOLOv5's layers that are not trained: the first N, or those of a list.",
    ),
    spec_option(_save_period, "--save-period", type=int, metavar="N", help="A checkpoint every N epochs."),
    spec_option(
        "model.options.label_smoothing", "--label-smoothing", type=float, metavar="X",
        help="Of the model's loss, where it has that option.",
    ),
    switch({"schedule.name": "cosine"}, "--cos-lr", help="The learning rate follows a cosine."),
    spec_option(
        lambda rule: {"optimizer.rule": rule.lower()}, "--optimizer",
        type=click.Choice(["SGD", "Adam", "AdamW"], case_sensitive=False), help="Rule of the optimizer.",
    ),
    spec_option("report.dir", "--project", metavar="FOLDER", help="Where run folders are made."),
    switch({"report.plots": False}, "--noplots", help="Draw no curves and images."),
    switch({"data.augment.multi_scale": 0.5}, "--multi-scale", help="Another input size for each update: 0.5 to 1.5 of it."),
    switch({"data.classes": {"*": "item"}}, "--single-cls", help="All objects are of one class, called item."),
    switch({"data.image_weights": True}, "--image-weights", help="Train images of rare and badly found classes more often."),
)  # fmt: skip
PADDLEDETECTION: Sequence[Option] = (
    switch({"backend.name": "fleet"}, "--fleet", help="Train with Paddle Fleet: --backend fleet."),
    spec_option(
        "report.reporters.visualdl", "--use-vdl", is_flag=False, flag_value=True, type=bool, metavar="[true|false]",
        help="Write curves for VisualDL: the reporter visualdl.",
    ),
)  # fmt: skip


def _refuse(flag: str, instead: str) -> Option:
    """Return a hidden flag that ends the command with what to do instead."""
    name, takes_value, _ = flag.partition("=")

    def refuse(_ctx: click.Context, _parameter: click.Parameter, value: Any) -> None:
        if value not in (None, False):
            typed = f"{name} {shlex.quote(str(value))}" if takes_value else name
            raise click.UsageError(f"{typed}: {instead.format(value=shlex.quote(str(value)))}")

    parameter = name.strip("-").replace("-", "_")
    return click.option(name, parameter, is_flag=not takes_value, hidden=True, expose_value=False, callback=refuse)


MEGATRON_FLAGS = [_refuse(flag, instead) for flag, instead in MEGATRON.items()]
"""Hidden flags of Megatron-LM, which are refused with advice."""
FOREIGN_FLAGS = [*YOLOV5, *PADDLEDETECTION, *map(_refuse, REFUSED, REFUSED.values()), *MEGATRON_FLAGS]
"""Flags that become values of the spec, and hidden ones that are refused with advice."""


def check_foreign(params: Mapping[str, Any]) -> None:
    """Refuse ``--fleet`` beside another ``--backend``, and ``--noval`` beside ``--eval``."""
    if params.get("fleet") and params.get("backend") not in (None, "fleet"):
        raise click.UsageError(f"--fleet and --backend {params['backend']} are both given; keep one")
    if params.get("noval") and params.get("eval_too"):
        raise click.UsageError("--eval and --noval are both given; keep one")


def config_of(params: Mapping[str, Any]) -> str | None:
    """Return the spec to read: that of ``-c``, else the shipped one that ``--cfg``, or else ``--weights``, names, else None.

    None means the ``mtrain.yml`` of the current folder, which neither replaces, or else the embedded demo.

    Raises: ``click.UsageError`` where ``--data`` or ``--cfg`` would modify the embedded demo.
    """
    from mtrain.spec import config

    file: str | None = params.get("config")
    if file is not None or os.path.exists(config.HERE):
        return file
    # YOLOv5's own command lines name the model by the file of its weights alone.
    if (network := params.get("cfg") or params.get("weights")) and (
        name := _model_of(network)
    ) in config.shipped_names():
        return name
    # The demo's recipe is for digits alone: it would train another network or other images, badly and without a word.
    typed = next((flag for flag in ("data", "cfg") if params.get(flag)), None)
    if typed is not None:
        raise click.UsageError(
            f"--{typed} {shlex.quote(params[typed])}: no spec is given, and the embedded demo's recipe is for digits alone; "
            "say the recipe too, for example -c yolov5s (or --cfg yolov5s.yaml)"
        )
    return None
