"""The keys of ``cluster.options`` for Slurm."""

import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from mtrain.spec.section import PluginOptions

# sbatch splits such a line at blanks, reads quotes, and takes ``#`` for a comment.
WORD = re.compile(r"[A-Za-z0-9_.,:/@%+=()\[\]&|*!<>~^-]+")
"""Values of ``#SBATCH`` lines."""
TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
SIGNAL = re.compile(r"([RB]{1,2}:)?[A-Z0-9]+(@\d+)?", re.IGNORECASE)
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]")


def _text(value: object) -> object:
    """Return a number as text: ``time: 30`` is a number in YAML."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _word(text: str) -> str:
    if not WORD.fullmatch(text):
        raise ValueError(f"given {text!r}, expected one word without blanks, quotes, `#`, `$` and line ends")
    return text


def _matching(pattern: re.Pattern[str], expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"given {text!r}, expected {expected}")
        return text

    return AfterValidator(check)


def _line(text: str) -> str:
    if CONTROL.search(text) or not text.strip():
        raise ValueError(f"given {text!r}, expected one line of text; give each line as an entry of the list")
    return text


def _option_line(text: str) -> str:
    if not text.startswith("-"):
        raise ValueError(f"given {text!r}, expected an option of sbatch, such as --mail-type=END")
    return _line(text)


Word = Annotated[str, BeforeValidator(_text), AfterValidator(_word)]
Line = Annotated[str, AfterValidator(_line)]


class SlurmOptions(PluginOptions):
    """The options of sbatch and srun for a job. Options that are not set are left to Slurm's own defaults."""

    time: (
        Annotated[
            str, BeforeValidator(_text), _matching(TIME, "a time limit such as 30 (minutes), 1:30:00 or 2-12:00:00")
        ]
        | None
    ) = Field(default=None, description="time limit: minutes, hours:minutes:seconds or days-hours:minutes:seconds")
    partition: Word | None = Field(default=None, description="partition, or several with commas")
    account: Word | None = Field(default=None, description="account that is charged")
    qos: Word | None = Field(default=None, description="quality of service")
    gres: Word | None = Field(default=None, description="generic resources on each host, such as gpu:4")
    gpus_per_node: Word | None = Field(default=None, description="GPUs on each host: a number, or type:number")
    cpus_per_task: int | None = Field(default=None, gt=0, description="processor cores for each rank")
    mem: Word | None = Field(default=None, description="memory of each host, such as 64G; 0: all")
    requeue: bool | None = Field(
        default=None,
        description="true: Slurm puts the job back into its queue after a preemption or the loss of a host, and the job "
        "does so itself before its time limit; false: never; null: as Slurm is set up, and never at the time limit",
    )
    signal: Annotated[str, _matching(SIGNAL, "a signal and seconds, such as B:USR1@120")] | None = Field(
        default=None,
        description="signal before the time limit; USR1@120: the state is saved 120 s before it; with requeue the "
        "default is B:USR1@60, upon which the job goes back into the queue",
    )
    constraint: Word | None = Field(default=None, description="features that the hosts must have")
    exclusive: bool = Field(default=False, description="whether no other job may use the hosts meanwhile")
    extra: list[Annotated[str, AfterValidator(_option_line)]] = Field(
        default_factory=list, description="further options of sbatch, such as --mail-type=END"
    )
    setup: list[Line] = Field(
        default_factory=list, description="shell lines that run before mtrain, such as module load cuda"
    )
    srun: list[Line] = Field(
        default_factory=list, description="further words for the srun that starts the agent of each host"
    )
    python: Line | None = Field(default=None, description="the hosts' interpreter that has mtrain; null: the one here")
