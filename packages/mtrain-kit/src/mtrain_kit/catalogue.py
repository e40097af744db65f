"""All checks of the kit, in the order in which they are run and reported."""

from collections.abc import Callable, Mapping

from mtrain_kit import accuracy, collectives, exchanges, lateness, learning, states
from mtrain_kit.check_context import Site
from mtrain_kit.checks import Check, Measure

ORDER_OF_ADDITION = "Samples and weights are those of every other backend; only the order of additions may differ."

LIGHT = Check(
    id="plugin.light",
    claim="The plugin is loaded and constructed without importing a framework.",
    means="`mtrain plan` and `mtrain --help` get slow, and two frameworks may meet in one process.",
    look="imports on top of the plugin's module; move them into __enter__, nn and ops",
)
ENTERS = Check(
    id="plugin.enters",
    claim="Ranks meet inside `with backend as session:`, and bring all of core/nn.pyi and core/ops.pyi.",
    means="no job of this backend starts.",
    look="Backend.__enter__, Backend.nn, Backend.ops, Backend.rendezvous",
)
LEAVES = Check(
    id="plugin.leaves",
    claim="After `with backend:` no process, thread or port is left.",
    means="jobs hang or abort at their end, and ports stay in use.",
    look="Backend.__exit__",
)
ONE = Check(
    id="size.one",
    claim="A job of one rank, started by the same launcher, learns what solo learns.",
    means="specs that work on many ranks cannot be tried on one.",
    look="Backend.__enter__, RankSession.prepare: what is wrapped when collective.size is 1",
)
DIES = Check(
    id="job.ends",
    claim="When a rank is killed the job ends by itself, in time, as failed, and leaves no process and no port behind.",
    means="a failed job blocks its machines until somebody looks.",
    look="timeouts passed to the library in Backend.__enter__; waits in Backend.__exit__; Launcher.plan",
)
TASK = Check(
    id="job.trains",
    claim="A whole job, mtrain's own spec vit_digits, learns and scores the same as under solo.",
    means="parts that work alone fail together: data loading, training, evaluation, checkpoints.",
    look="the log of rank 0 in the run folder",
)

_LEARNS: Mapping[str, tuple[str, str, str]] = {
    "sgd": (
        "Many ranks learn what one rank of solo learns: SGD with momentum, decay, clipping and an average.",
        "the same spec gives other weights under this backend.",
        "Optimizer.backward and step: gradients are averaged over ranks (not summed), then clipped, then applied",
    ),
    "accumulation": (
        "Two micro batches per update learn what one of twice the size learns.",
        "the number of micro batches changes what is learnt.",
        "Optimizer.backward divides by Recipe.accumulate, once; Optimizer.micro_batch(last=...)",
    ),
    "sync_batchnorm": (
        "BatchNorm over all ranks learns what one rank with all samples learns.",
        "train.sync_batchnorm does not do what it says.",
        "RankSession.prepare: Recipe.sync_batchnorm; gradients through the statistics",
    ),
    "sync_batchnorm_accumulation": (
        "The same with two micro batches per update.",
        "train.sync_batchnorm does not do what it says where micro batches are accumulated.",
        "RankSession.prepare: Recipe.sync_batchnorm; what is not exchanged before the last micro batch",
    ),
    "unclipped": (
        "Without a limit nothing is clipped.",
        "a default of the library changes training.",
        "Recipe.clip_norm inf; defaults that the library brings",
    ),
    "adam": (
        "Adam learns what it learns under solo.",
        "the same spec gives other weights under this backend.",
        "Recipe.rule adam: bias correction, decay inside the gradient",
    ),
    "rmsprop": (
        "RMSprop learns what it learns under solo.",
        "the same spec gives other weights under this backend.",
        "Recipe.rule rmsprop: moments of parts of arrays",
    ),
    "quantised": (
        "Ranks that round weights and inputs to 8 bits learn what one rank learns, with its ranges.",
        "train.quantise does not do what it says.",
        "RankSession.prepare: Recipe.quantise; ranges that are not the same on all ranks",
    ),
    "taught": (
        "Ranks that imitate a trained network learn what one rank learns of it.",
        "train.distil does not do what it says.",
        "RankSession.prepare: the module that `build` returns must be the one that runs, because the teacher is given to it",
    ),
    "masked": (
        "Ranks that set small weights to 0 and shrink scales of BatchNorms learn what one rank learns, or refuse to.",
        "train.prune does not do what it says.",
        "Optimizer.step: Recipe.prune and Rates.sparsity, after the update and in the average; masks among the moments",
    ),
    "adamw": (
        "AdamW learns what it learns under solo.",
        "the same spec gives other weights under this backend.",
        "Recipe.rule adamw: decay outside of the gradient",
    ),
}


def _learning() -> dict[Check, Callable[[Site], list[Measure]]]:
    checks = {}
    for name in learning.CASES:
        claim, means, look = _LEARNS[name]
        check = Check(id=f"learns.{name}", claim=claim, means=f"{means} {ORDER_OF_ADDITION}", look=look)
        checks[check] = learning.learns(name)
    return checks


ON_RANKS: Mapping[Check, Callable[[Site], list[Measure]]] = {
    Check(
        id="collective.place",
        claim="Every rank has its own number, and knows how many there are.",
        means="ranks train on the same samples.",
        look="Collective.rank, size",
    ): collectives.place,
    Check(
        id="collective.reduces",
        claim="all_reduce gives sum, mean and maximum of tensors and arrays, equal on every rank, without a gradient.",
        means="losses, stop requests and normalisers of losses are wrong.",
        look="Collective.all_reduce",
    ): collectives.reduces,
    Check(
        id="collective.gathers",
        claim="all_gather gives any values ordered by rank, in turn with other calls.",
        means="metrics of an evaluation, and what follows from them, are wrong.",
        look="Collective.all_gather",
    ): collectives.gathers,
    Check(
        id="collective.agrees",
        claim="A sum of many values has the same bits on every rank.",
        means="ranks decide differently, and wait for each other for ever.",
        look="Collective.all_reduce",
    ): collectives.many_values,
    Check(
        id="data.batches",
        claim="Micro batches come out as the loader yields them, in order.",
        means="images and labels do not belong together.",
        look="RankSession.batches",
    ): collectives.batches,
    Check(
        id="start.equal",
        claim="Ranks start from the given weights, and none continues with others.",
        means="every rank trains a model of its own.",
        look="RankSession.prepare, RankSession.restore (core.state.checks.check_equal_start)",
    ): learning.starts_equal,
    **_learning(),
    Check(
        id="recompute.same_bits",
        claim="Blocks that are computed again in the backward pass learn the same bits.",
        means="train.recompute changes what is learnt.",
        look="RankSession.prepare: Recipe.recompute; statistics that move twice, exchanges in the backward pass",
    ): learning.recomputes,
    Check(
        id="traffic.once",
        claim="Gradients are exchanged once per update, not in every micro batch.",
        means="accumulation learns the same, but sends the gradients once per micro batch.",
        look="Optimizer.micro_batch(last=...): what is exchanged before the last micro batch",
    ): exchanges.exchanges_once,
    Check(
        id="accuracy.first_update",
        claim="Loss and gradient norm of the first update in float32 are those of float64, on images of usual size.",
        means="training loses digits, and backends drift apart for a reason that no spec explains.",
        look="what is summed over pixels: BatchNorm in channels-last layout; TensorFloat-32 on a GPU; docs/accuracy.md",
    ): accuracy.near_float64,
    Check(
        id="clip.norm",
        claim="`step` returns the norm before clipping; longer gradients are cut to the limit, others are unchanged.",
        means="runs under two backends cannot be compared, and clipping changes what it should not.",
        look="Optimizer.step: average over ranks, take the norm, clip, apply",
    ): learning.clips,
    Check(
        id="step.skips",
        claim="An update whose gradient is not finite on one rank changes nothing on any, and is counted.",
        means="one bad image destroys the weights.",
        look="Optimizer.step: what is done where the norm is not finite; State.counters",
    ): learning.skips_nonfinite,
    Check(
        id="step.later",
        claim="Where metrics are read one update later, the updates are those that are read at once, bit for bit.",
        means="jobs on GPUs learn something else than on the CPU.",
        look="Capabilities.late, Optimizer.step_later; RankSession.state: settle what was not counted yet",
    ): lateness.same_bits_later,
    Check(
        id="average.restores",
        claim="Inside `averaged` every rank uses rank 0's averages, afterwards its own weights, bit for bit.",
        means="evaluations score other weights than those that are saved, or change training.",
        look="Optimizer.averaged",
    ): learning.averages,
    Check(
        id="state.whole",
        claim="A state holds copies of whole arrays under neutral names, and comes back as it was.",
        means="checkpoints cannot be read by other backends, or not at all.",
        look="RankSession.state, RankSession.restore",
    ): states.whole,
    Check(
        id="state.continues",
        claim="A job that continues from its state ends with the same bits as one that was never interrupted.",
        means="a resumed job learns something else.",
        look="state that RankSession.restore leaves out; choices that the library makes in its first passes",
    ): states.continues,
    Check(
        id="state.from_solo",
        claim="A checkpoint of solo is resumed, and the job ends as solo would have ended it.",
        means="checkpoints do not travel between backends.",
        look="RankSession.restore: moments, averages and counters",
    ): states.continues_solo,
    Check(
        id="evaluation.once",
        claim="An evaluation sees every image, and all ranks get the metrics of solo.",
        means="scores are wrong.",
        look="RankSession.infer, RankSession.batches, Optimizer.averaged, Collective.all_gather",
    ): states.evaluates,
}
"""The checks that ranks run inside one job of the backend, with their functions."""

CHECKS: tuple[Check, ...] = (LIGHT, ENTERS, *ON_RANKS, LEAVES, ONE, DIES, TASK)
"""All checks, in the order in which they are reported."""
