"""Translate length, optimizer, schedule and average of a PaddleDetection file.

For a key that a file leaves out, PaddleDetection's default is written into the spec, with a comment that says so.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mtrain.spec.importers.key_report import Book, equal, is_number, show_value
from mtrain.spec.yaml_reader import Path

RULES = {"Momentum": "sgd", "SGD": "sgd", "Adam": "adam", "AdamW": "adamw"}
_DEFAULT = "PaddleDetection's default"
_OPTIMIZER = "OptimizerBuilder.optimizer"
_SCHEDULERS = ("LearningRate", "schedulers")
NO_DECAY_ON_BATCHNORM = [{"match": r"\.bn\.(weight|bias)$", "weight_decay": 0.0}, {"match": ""}]
"""Groups of PP-YOLOE: its layers exempt BatchNorm from weight decay, which AdamW ignores."""


def translate(book: Book) -> None:
    """Enter the length of training, the optimizer, the schedule and the average."""
    book.carry("epoch", "train.epochs")
    if not book.has("epoch"):
        book.note("train.epochs: the file gives no `epoch`; say how long with -o train.epochs=N")
    _optimizer(book)
    _schedule(book)
    _average(book)
    if book.get("norm_type") in ("bn", "sync_bn"):
        book.carry("norm_type", "train.sync_batchnorm", book.get("norm_type") == "sync_bn")
    elif book.has("norm_type"):
        raise book.refuse("norm_type", "expected bn or sync_bn: mtrain's PP-YOLOE has no other")


def _optimizer(book: Book) -> None:
    kind = book.word(f"{_OPTIMIZER}.type", "Momentum")
    if kind not in RULES:
        raise book.refuse(f"{_OPTIMIZER}.type", f"expected one of {', '.join(RULES)}")
    book.carry(f"{_OPTIMIZER}.type", "optimizer.rule", RULES[kind])
    book.otherwise("optimizer.rule", RULES[kind], _DEFAULT)
    book.carry("LearningRate.base_lr", "optimizer.learning_rate")
    # Their defaults are written out, because mtrain's own differ.
    book.otherwise("optimizer.learning_rate", 0.01, _DEFAULT)
    if kind == "Momentum":
        book.carry(f"{_OPTIMIZER}.momentum", "optimizer.momentum")
        book.carry(f"{_OPTIMIZER}.use_nesterov", "optimizer.nesterov")
    if RULES[kind] != "sgd":
        for key, target in (("beta1", "momentum"), ("beta2", "beta2"), ("epsilon", "eps")):
            book.carry(f"{_OPTIMIZER}.{key}", f"optimizer.{target}")
    book.otherwise("optimizer.momentum", 0.0 if kind == "SGD" else 0.9, _DEFAULT)
    book.otherwise("optimizer.nesterov", value=False, why=_DEFAULT)
    _decay(book, decoupled=kind == "AdamW")
    book.carry("OptimizerBuilder.clip_grad_by_norm", "train.clip_norm")
    book.otherwise("train.clip_norm", None, _DEFAULT)


def _decay(book: Book, *, decoupled: bool) -> None:
    regularizer = "OptimizerBuilder.regularizer"
    if decoupled:
        book.carry(f"{_OPTIMIZER}.weight_decay", "optimizer.weight_decay")
        book.drop(regularizer, "AdamW has a decay of its own")
        book.otherwise("optimizer.weight_decay", 0.01, _DEFAULT)
        _exempt(book)
        # One group without a rule of its own: mtrain's default groups would spare biases and BatchNorm.
        book.otherwise("optimizer.groups", [{"match": ""}], "PaddleDetection's AdamW decays every parameter")
        return
    setting = book.get(regularizer)
    if isinstance(setting, dict) and setting.get("type", "L2") == "L2":
        book.carry(f"{regularizer}.factor", "optimizer.weight_decay")
        book.same(f"{regularizer}.type", "mtrain's weight decay is L2")
    elif book.has(regularizer):
        off = setting in (None, False, "None")
        book.put("optimizer.weight_decay", 0.0, regularizer)
        book.same(regularizer, "optimizer.weight_decay: 0.0") if off else book.drop(
            regularizer, "mtrain decays by L2 only"
        )
    book.otherwise("optimizer.weight_decay", 0.0001, _DEFAULT)
    book.assume("optimizer.groups", NO_DECAY_ON_BATCHNORM, "PaddleDetection's layers of PP-YOLOE")


def _exempt(book: Book) -> None:
    """Enter parameters that are not decayed, which PaddleDetection lists by parts of their names."""
    source = f"{_OPTIMIZER}.param_groups"
    groups = book.get(source)
    entry = groups[0] if isinstance(groups, list) and len(groups) == 1 else None
    names = entry.get("params") if isinstance(entry, dict) else None
    if (
        "optimizer.groups" in book.values
        or not isinstance(names, list)
        or not isinstance(entry, dict)
        or entry.keys() != {"params", "weight_decay"}
    ):
        book.drop(source, "mtrain takes one list of names with a weight_decay; -o optimizer.groups=[...] says more")
        return
    pattern = "|".join(re.escape(str(name)) for name in names)
    groups = [{"match": pattern, "weight_decay": entry["weight_decay"]}, {"match": ""}]
    book.settle(source, "optimizer.groups", groups, remark=f"optimizer.groups.0: {show_value(groups[0])}")


def _schedule(book: Book) -> None:
    schedulers = book.get(_SCHEDULERS)
    entries = schedulers if isinstance(schedulers, list) else []
    if book.has(_SCHEDULERS) and not all(isinstance(entry, dict) for entry in entries):
        raise book.refuse(
            _SCHEDULERS, "expected a list such as [!CosineDecay {max_epochs: 360}, !LinearWarmup {epochs: 5}]"
        )
    places = {str(entry.get("name")): (*_SCHEDULERS, position) for position, entry in enumerate(entries)}
    if "CosineDecay" in places:
        begins_after_warmup = _cosine(book, places["CosineDecay"])
    elif "PiecewiseDecay" in places:
        begins_after_warmup = _steps(book, places["PiecewiseDecay"])
    else:
        begins_after_warmup = False
        book.assume("schedule.name", "constant", "no scheduler that mtrain has")
        book.note("schedule.name: constant: the file names neither CosineDecay nor PiecewiseDecay")
    book.otherwise("schedule.per", "update", _DEFAULT)
    _warmup(book, places, begins_after_warmup=begins_after_warmup)
    if not book.has(_SCHEDULERS):
        book.note("schedule: the file gives no LearningRate.schedulers; PaddleDetection would take defaults of its own")


def _cosine(book: Book, at: Path) -> bool:
    """Enter a cosine, and return True: it begins after the warm-up."""
    book.carry((*at, "name"), "schedule.name", "cosine")
    book.carry((*at, "max_epochs"), "schedule.horizon_epochs")
    book.otherwise("schedule.horizon_epochs", 1000, _DEFAULT)
    book.carry((*at, "min_lr_ratio"), "schedule.final_factor")
    book.otherwise("schedule.final_factor", 0.0, _DEFAULT)
    if equal(book.get((*at, "last_plateau_epochs")), 0):
        book.same((*at, "last_plateau_epochs"), "none, as always in mtrain")
    book.drop((*at, "last_plateau_epochs"), "mtrain's cosine has no plateau before its end")
    return True


def _steps(book: Book, at: Path) -> bool:
    """Enter steps that all multiply by one factor, and return False: they count from update 0, warm-up included."""
    milestones = book.get((*at, "milestones"), [8, 11])
    if not isinstance(milestones, list):
        raise book.refuse((*at, "milestones"), "expected a list of epochs")
    factors = book.get((*at, "gamma"), [0.1, 0.01])
    if not isinstance(factors, list):
        factors = [book.number((*at, "gamma"), 0.1) * 10.0**-i for i in range(len(milestones))]
    step = factors[0] if factors else 0.1
    if not _is_geometric(factors) or book.get((*at, "values")) is not None:
        book.drop(at, "mtrain's steps all multiply by one factor")
        book.assume("schedule.name", "constant", f"{book.where(at)} has no counterpart")
        book.note("schedule.name: constant: the steps of PiecewiseDecay are not carried over")
        return False
    book.carry((*at, "name"), "schedule.name", "step")
    book.carry((*at, "milestones"), "schedule.milestones")
    book.otherwise("schedule.milestones", milestones, _DEFAULT)
    book.carry((*at, "gamma"), "schedule.gamma", step)
    book.otherwise("schedule.gamma", step, _DEFAULT)
    return False


def _is_geometric(factors: Sequence[Any]) -> bool:
    """Return whether each factor is the first one times the previous one."""
    if not all(map(is_number, factors)):
        return False
    before = 1.0
    for factor in factors:
        if not math.isclose(factor, before * factors[0], rel_tol=1e-9):
            return False
        before = factor
    return True


def _warmup(book: Book, places: Mapping[str, Path], *, begins_after_warmup: bool) -> None:
    """Enter a linear warm-up from ``start_factor`` times the learning rate, over epochs if they are given, else over updates."""
    for name in ("CosineDecay", "PiecewiseDecay"):
        if name in places and not book.truth((*places[name], "use_warmup"), default=True):
            book.put("schedule.warmup", None, (*places[name], "use_warmup"))
            book.same((*places[name], "use_warmup"), "schedule.warmup: null")
            if "LinearWarmup" in places:
                book.drop(places["LinearWarmup"], f"{name}.use_warmup is false")
            return
        if name in places:
            book.same((*places[name], "use_warmup"), "schedule.warmup is there")
    if "LinearWarmup" not in places:
        book.assume("schedule.warmup", None, "no LinearWarmup")
        book.note("schedule.warmup: null: the file names no LinearWarmup, the only warm-up that mtrain has")
        return
    at = places["LinearWarmup"]
    epochs = book.get((*at, "epochs"))
    book.put("schedule.warmup.epochs", epochs, (*at, "epochs"))
    book.put("schedule.warmup.updates", None, at)
    book.same((*at, "epochs"), f"schedule.warmup.epochs: {show_value(epochs)}")
    if epochs is None:
        book.carry((*at, "steps"), "schedule.warmup.updates", book.integer((*at, "steps"), 500))
        if not book.has((*at, "steps")):
            book.assume("schedule.warmup.updates", 500, _DEFAULT)
    book.drop((*at, "steps"), "epochs is given, and counts")
    start, learning_rate = book.number((*at, "start_factor"), 1 / 3), book.number("LearningRate.base_lr", 0.01)
    book.carry(
        (*at, "start_factor"),
        "schedule.warmup.learning_rate_from",
        start * learning_rate,
        remark=f"{show_value(start)} x {show_value(learning_rate)}",
    )
    book.otherwise("schedule.warmup.learning_rate_from", start * learning_rate, _DEFAULT)
    book.assume("schedule.warmup.momentum_from", None, "PaddleDetection warms up the learning rate alone")
    book.assume("schedule.warmup.before_curve", begins_after_warmup, "PaddleDetection's schedulers")
    book.same((*at, "name"), "schedule.warmup")


def _average(book: Book) -> None:
    if not book.truth("use_ema", default=False):
        book.put("train.ema", None, "use_ema")
        book.same("use_ema", "train.ema: null")
        for key in ("ema_decay", "ema_decay_type", "ema_black_list"):
            book.drop(key, "use_ema is not true")
        return
    book.same("use_ema", "train.ema is there")
    book.carry("ema_decay", "train.ema.decay")
    book.otherwise("train.ema.decay", 0.9998, _DEFAULT)
    kind = book.get("ema_decay_type", "threshold")
    if kind == "exponential":
        book.carry("ema_decay_type", "train.ema.rule", "ramp", remark="over 2000 updates")
        book.assume("train.ema.ramp", 2000.0, "PaddleDetection's exponential average")
    elif kind == "threshold":
        book.carry("ema_decay_type", "train.ema.rule")
    else:
        book.drop("ema_decay_type", "mtrain has threshold and exponential; threshold is taken")
        book.note(f"train.ema.rule: threshold, as ema_decay_type {show_value(kind)} has no counterpart")
    book.otherwise("train.ema.rule", "threshold", _DEFAULT)
    book.drop("ema_black_list", "mtrain averages every weight")
