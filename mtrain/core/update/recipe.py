"""Derive the recipe of a job from its spec: parameter groups, micro batch, accumulation and scaled learning rates.

All functions are pure and need no framework, because ``mtrain plan`` calls them too. Schedules are in ``schedule.py``.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mtrain.core.interfaces import Collective, Pruning, Quantise, Recipe
from mtrain.core.ranks.meshes import mesh_of
from mtrain.core.samples.sampler import Shares
from mtrain.errors import SpecError, first_few
from mtrain.spec.model import Spec
from mtrain.spec.training import GroupSpec, PruneSpec, QuantiseSpec

Rule = tuple[str, dict[str, float]]
MOMENTS: Mapping[str, Sequence[str]] = {
    "sgd": ("momentum",),
    "adam": ("mean", "square"),
    "adamw": ("mean", "square"),
    "lion": ("mean",),
    "rmsprop": ("square", "momentum"),
    "lamb": ("mean", "square"),
    "muon": ("mean", "square"),
}
"""Maps a rule to its moments, of which each trained parameter has one of its own shape; a matrix of muon has no square."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaled:
    """Factors by which a learning rate-scaling rule multiplies the values that the spec sets for ``reference_batch_size``."""

    learning_rate: float
    weight_decay: float


def scaling(spec: Spec) -> Scaled:
    """Return the factors of ``train.learning_rate_scaling`` for the global batch of the spec.

    linear: Goyal et al. 2017 (arXiv 1706.02677), section 2.1; sqrt: Krizhevsky 2014 (arXiv 1404.5997), section 5;
    yolov5: the learning rate stays, the weight decay grows with the batch.
    """
    ratio = spec.train.batch_size / spec.train.reference_batch_size
    factors = {
        "none": (1.0, 1.0),
        "linear": (ratio, 1.0),
        "sqrt": (math.sqrt(ratio), 1.0),
        "yolov5": (1.0, ratio),
    }
    learning_rate, weight_decay = factors[spec.train.learning_rate_scaling]
    return Scaled(learning_rate=learning_rate, weight_decay=weight_decay)


def group_rules(spec: Spec) -> list[Rule]:
    """Return (regex, options) of each parameter group, with scaled weight decay.

    Options: ``weight_decay`` and, for sgd, ``momentum`` and ``nesterov`` (0 or 1), for rmsprop ``momentum``, ``beta2`` and
    ``eps``; for the others those of ``beta1``, ``beta2`` and ``eps`` that they have.
    """
    return [(group.match, _options(spec, group)) for group in spec.optimizer.groups]


def _options(spec: Spec, group: GroupSpec) -> dict[str, float]:
    rule = spec.optimizer
    decay = rule.weight_decay if group.weight_decay is None else group.weight_decay
    options = {"weight_decay": decay * scaling(spec).weight_decay}
    # torch refuses nesterov without a momentum, where it would change nothing.
    if rule.rule == "sgd":
        return options | {"momentum": rule.momentum, "nesterov": float(rule.nesterov and rule.momentum > 0)}
    if rule.rule == "muon":
        options |= {"momentum": rule.momentum, "nesterov": float(rule.nesterov)}
    first = {"muon": {"beta1": rule.beta1}, "rmsprop": {"momentum": rule.momentum}}.get(
        rule.rule, {"beta1": rule.momentum}
    )
    return options | first | {"beta2": rule.beta2} | ({} if rule.rule == "lion" else {"eps": rule.eps})


def check_parts(recipe: Recipe, *, splits: str) -> None:
    """Refuse a rule that needs whole arrays where a backend splits them over the ranks.

    Args:
        recipe: The recipe.
        splits: What splits them, such as "backend.options.stage 2".

    Raises:
        SpecError: The rule is one of these.
    """
    if recipe.rule in ("lamb", "muon"):
        raise SpecError(
            f"optimizer.rule: {recipe.rule} given with {splits}, which splits arrays over the ranks, but the rule needs "
            "whole ones; use another rule such as adamw, or a backend that keeps arrays whole"
        )


def assign(names: Iterable[str], groups: Sequence[tuple[str, object]]) -> list[list[str]]:
    """Return the parameter names of each group, in the order of ``names``.

    A name belongs to the first group whose regex is found in it. A group may stay empty, because a recipe may also
    serve models that lack such parameters.

    Raises:
        SpecError: a name belongs to no group.
    """
    patterns = [re.compile(match) for match, _ in groups]
    members: list[list[str]] = [[] for _ in patterns]
    orphans = []
    for name in names:
        place = next((i for i, pattern in enumerate(patterns) if pattern.search(name)), None)
        if place is None:
            orphans.append(name)
        else:
            members[place].append(name)
    # A parameter in no group would silently stay at its start value.
    if orphans:
        shown = first_few(orphans, 3)
        raise SpecError(f"optimizer.groups: no group takes {shown}; end the list with a group whose `match` is ''")
    return members


def is_frozen(name: str, frozen: Sequence[str]) -> bool:
    """Return whether one of the regexes ``frozen`` is found in the parameter name."""
    return any(re.search(pattern, name) for pattern in frozen)


def nothing_to_train(recipe: Recipe) -> str:
    """Return the refusal of a model none of whose parameters is trained."""
    if recipe.frozen:
        return f"train.freeze: {list(recipe.frozen)} leaves no parameter to train; freeze fewer"
    return "the model has no parameter that takes a gradient; check that its layers are attributes of it and not frozen"


def check_frozen(names: Iterable[str], frozen: Sequence[str]) -> None:
    """Refuse patterns that freeze nothing.

    Raises:
        SpecError: one of the regexes ``frozen`` matches none of ``names``; the message shows one of the names.
    """
    names = list(names)
    idle = [pattern for pattern in frozen if not any(re.search(pattern, name) for name in names)]
    if idle:
        raise SpecError([f"train.freeze: {p!r} is found in no parameter name; they are like {names[0]}" for p in idle])


def micro_batch(spec: Spec, *, size: int) -> tuple[int, int]:
    """Return (micro batch, rounds) with ``shards * micro batch * rounds == train.batch_size``.

    ``accumulate: auto`` means the fewest rounds that ``max_micro_batch`` allows. There are ``cluster.shards`` shards, or
    one for each of the ``size`` ranks, or for each of their tensor groups.

    Raises:
        SpecError: there is no such pair; the message names the nearest batch sizes that can be divided.
    """
    mesh = mesh_of(spec, size=size)
    among = "ranks"
    if mesh is not None and mesh.data_size < size:
        among = "tensor groups" if mesh.pipeline == 1 else "pipelines"
    size = spec.cluster.shards or (size if mesh is None else mesh.data_size)
    batch, accumulate = spec.train.batch_size, spec.train.accumulate
    # `auto` is decided before ranks start; a plan that is only shown has no limit yet.
    limit = spec.train.max_micro_batch if isinstance(spec.train.max_micro_batch, int) else batch
    if accumulate != "auto":
        if batch % (size * accumulate):
            among = f"{size} {among} x {accumulate} micro batches (train.accumulate)"
            raise SpecError(_indivisible(batch, shares=size * accumulate, among=among))
        return batch // (size * accumulate), accumulate
    if batch % size:
        raise SpecError(_indivisible(batch, shares=size, among=f"{size} {among}"))
    share = batch // size
    # The largest divisor within the limit, which needs the fewest rounds.
    micro = next(micro for micro in range(min(share, limit), 0, -1) if share % micro == 0)
    return micro, share // micro


def passes(shards: int, *, size: int) -> int:
    """Return how many forward passes each of ``size`` ranks makes for ``shards`` shards, empty ones included."""
    return -(-shards // size)


def rounds(recipe: Recipe, *, size: int) -> int:
    """Return how many micro batches of the job an update has; each is divided into the shards."""
    size = recipe.data_size(size)
    return recipe.accumulate // passes(recipe.shards or size, size=size)


def shares_of(recipe: Recipe, collective: Collective) -> Shares:
    """Return which shards of an update the calling rank computes."""
    return Shares(
        rank=recipe.data_rank(collective.rank),
        size=recipe.data_size(collective.size),
        shards=recipe.shards or recipe.data_size(collective.size),
        rounds=rounds(recipe, size=collective.size),
    )


def _indivisible(batch: int, *, shares: int, among: str) -> str:
    below, above = batch // shares * shares, (batch // shares + 1) * shares
    nearest = f"{below} or {above}" if below else f"{above}"
    return f"train.batch_size: {batch} does not divide among {among}; use {nearest}"


def ema_shares(recipe: Recipe, update: int) -> tuple[float, float]:
    """Return (keep, take) for ``average = keep * average + take * weights`` after update ``update`` (1-based).

    Rule "ramp": with d = ``ema_decay * (1 - exp(-update / ema_ramp))``, keep is d and take is 1 - d.

    Rule "threshold", as in PaddleDetection: an average e starts at zero and is updated with d = min(decay, (1 + t) /
    (10 + t)), t = update - 1; its value is read as e / (1 - d ** update), with the last d alone. The shares returned
    are those of the value read, so they need not add up to 1.
    """
    if recipe.ema_rule == "ramp":
        rise = 1 - math.exp(-update / recipe.ema_ramp) if recipe.ema_ramp > 0 else 1.0
        decay = recipe.ema_decay * rise
        return decay, 1 - decay

    def decay_at(update: int) -> float:
        return min(recipe.ema_decay, update / (9 + update))

    decay, before = decay_at(update), decay_at(update - 1) if update > 1 else 0.0
    correction = 1 - decay**update
    # What is read out before the first update is nothing: this average starts at zero.
    read_out = 1 - before ** (update - 1) if update > 1 else 0.0
    return decay * read_out / correction, (1 - decay) / correction


def pruning(section: PruneSpec) -> Pruning:
    """Return the setting ``train.prune`` of a recipe."""
    return Pruning(sparsity=section.sparsity, match=section.match, norm_l1=section.norm_l1)


def quantise(section: QuantiseSpec) -> Quantise:
    """Return the setting ``train.quantise`` of a recipe."""
    return Quantise(start=section.start, freeze=section.freeze, exclude=tuple(section.exclude))


def make_recipe(spec: Spec, *, size: int) -> Recipe:
    """Return every setting of the spec that affects weights or gradients, for ``size`` ranks.

    ``train.precision: auto`` counts as fp32 here: the ranks decide it, before they call (``rank.spec.precision``).

    Raises:
        SpecError: the global batch does not divide among the ranks.
    """
    mesh = mesh_of(spec, size=size)
    micro, each = micro_batch(spec, size=size)
    train, shards = spec.train, spec.cluster.shards
    return Recipe(
        rule=spec.optimizer.rule,
        groups=tuple(group_rules(spec)),
        adamw=tuple(spec.optimizer.adamw) if spec.optimizer.rule == "muon" else (),
        frozen=tuple(train.freeze),
        micro_batch=micro,
        accumulate=each if shards is None else each * passes(shards, size=size if mesh is None else mesh.data_size),
        shards=shards,
        precision="fp32" if train.precision == "auto" else train.precision,
        clip_norm=math.inf if train.clip_norm is None else train.clip_norm,
        ema_decay=train.ema.decay if train.ema else 0.0,
        ema_ramp=train.ema.ramp if train.ema else 0.0,
        ema_rule=train.ema.rule if train.ema else "ramp",
        sync_batchnorm=train.sync_batchnorm,
        quantise=None if train.quantise is None else quantise(train.quantise),
        prune=None if train.prune is None else pruning(train.prune),
        # "auto" means channels-last: measured to be the faster layout on CPU (one thread per rank), and the one that
        # CUDA's tensor cores need.
        channels_last=train.channels_last is not False,
        kernels=train.kernels,
        compile=train.compile is not False,
        seed=train.seed,
        mesh=mesh,
    )
