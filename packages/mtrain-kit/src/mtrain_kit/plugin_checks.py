"""The checks of plugins other than backends: the claim of each, and where to look."""

from collections.abc import Mapping

from mtrain_kit.checks import Check

LIGHT = Check(
    id="plugin.light",
    claim="The class is loaded and constructed without importing a framework, and without writing a file.",
    means="`mtrain plan` gets slow, and two frameworks may meet in one process.",
    look="imports at the top of the plugin's module; move them into its methods",
)
OPTIONS = Check(
    id="options.checked",
    claim="An option that the plugin does not have is refused.",
    means="a typing error in a spec trains with a default, and nobody notices.",
    look='Options: model_config = ConfigDict(extra="forbid")',
)
INITIAL = Check(
    id="model.initial",
    claim="Start values are whole and finite, and depend on the seed and the layer of each array alone.",
    means="the same spec starts from other weights in another process, on another framework or with another class.",
    look="Model.initial: draw each array from a generator made of (seed, name)",
)
READS = Check(
    id="data.reads",
    claim="Both splits can be read, have samples, and name the same classes.",
    means="no job can use the data set.",
    look="Dataset.read",
)
REPEATS = Check(
    id="data.repeats",
    claim="A sample depends on its epoch and number alone, not on what was read before it.",
    means="jobs cannot be repeated or resumed, and ranks train on other samples than one rank would.",
    look="Dataset.read, Source.sample: draw from a generator made of (seed, epoch, index)",
)
SECTIONS = Check(
    id="task.sections",
    claim="Every key that the task adds to a spec has a default and a description.",
    means="specs of the task cannot be read or explained.",
    look="TaskBase.sections",
)
SHOWS = Check(
    id="task.shows",
    claim="The task checks, describes and draws its data, and what a checkpoint stores of it are plain values.",
    means="`mtrain data check` and the first lines of a job fail, or a checkpoint cannot be written.",
    look="TaskData: verify, report, describe, views, labels",
)
PLAN = Check(
    id="launcher.plan",
    claim="`plan` returns the same commands each time, one for each host in order, which run the rank's arguments; it writes "
    "nothing.",
    means="a plan that was printed is not what is run, or a host has no ranks.",
    look="Launcher.plan",
)
DEATHS = Check(
    id="launcher.deaths",
    claim="`deaths` names no rank of a command that succeeded, and pairs of a rank and a status of any other.",
    means="a job that is done counts as failed, or an error of the launcher hides that of the rank.",
    look="Launcher.deaths",
)
TRAINS = Check(
    id="job.trains",
    claim="A short job trains every weight, evaluates and writes its checkpoints.",
    means="no job works.",
    look="the log of rank 0 in the run folder",
)
AGAIN = Check(
    id="job.repeats",
    claim="The same job ends with the same bits a second time.",
    means="results cannot be repeated or compared.",
    look="random numbers that do not come from the job's seed; the order of sets (PYTHONHASHSEED differs here); the clock",
)
RANKS = Check(
    id="job.ranks",
    claim="Two ranks learn what one rank learns, and evaluate to the same metrics.",
    means="the same spec gives other weights or other metrics on another number of ranks.",
    look="a loss that is a sum in place of a mean, or counts over its own rank only (Collective.all_reduce); samples that "
    "depend on the rank; an evaluator that counts a sample twice",
)
WORKERS = Check(
    id="job.workers",
    claim="Samples that worker processes read are those that the rank reads itself, to the bit.",
    means="the number of workers changes what is learnt.",
    look="Source.fill, Source.sample: state that one process keeps from one sample to the next",
)
RESUMES = Check(
    id="job.resumes",
    claim="A job that is resumed half way ends with the same bits as one that was not interrupted.",
    means="a resumed job learns something else.",
    look="numbers that an object keeps outside of weights and buffers",
)
FRAMEWORKS = Check(
    id="job.frameworks",
    claim="torch and Paddle learn the same, where both are installed.",
    means="the same spec gives other weights on another framework.",
    look="native calls in place of core.nn and core.ops; values that the framework's defaults decide",
)
STARTS = Check(
    id="launcher.starts",
    claim="Ranks that it starts meet, each with its own number; when they end, nothing is left of them.",
    means="no job starts, or ranks train on the same samples.",
    look="Launcher.plan: the variables of the rendezvous, and the number of ranks",
)
ENDS = Check(
    id="launcher.ends",
    claim="When a rank is killed the command ends by itself, in time, as failed, and leaves no process behind.",
    means="a failed job blocks its machines until somebody looks.",
    look="Launcher.plan: what the command does when one of its ranks ends",
)
COMMON = (LIGHT, OPTIONS)
CHECKS: Mapping[str, tuple[Check, ...]] = {
    "models": (*COMMON, TRAINS, INITIAL, AGAIN, RANKS, RESUMES, FRAMEWORKS),
    "datasets": (*COMMON, READS, REPEATS, TRAINS, AGAIN, WORKERS, RANKS, RESUMES),
    "tasks": (*COMMON, SECTIONS, SHOWS, REPEATS, TRAINS, AGAIN, WORKERS, RANKS, RESUMES, FRAMEWORKS),
    "launchers": (*COMMON, PLAN, DEATHS, STARTS, ENDS),
}
"""Kind of plugin -> its checks, in the order in which they are reported."""
