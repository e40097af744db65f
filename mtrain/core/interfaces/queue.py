"""The interface between mtrain and the queue of a scheduler: what is submitted, and what is known about it later."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from mtrain.spec.identifiers import checked_job_id, checked_run_name

Phase: TypeAlias = Literal["waiting", "running", "done", "failed", "cancelled", "unknown"]
"""What a queued job does now, or how it ended."""
ENDED: tuple[Phase, ...] = ("done", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job as it is given to the queue of a scheduler.

    The scheduler runs ``command``, on every host or on the first one. The command continues the run if it has a
    checkpoint, so a job that is put back into the queue goes on where it was.
    """

    name: str
    """Name of the run."""
    spec: str
    """The spec as YAML: the complete one, or for a user's script the values that its user has set."""
    spec_path: Path
    """Absolute path of the file that contains ``spec``."""
    hosts: int
    """Number of hosts."""
    ranks_per_host: int | None
    """None: decided on the hosts, one per device, or one on the CPU."""
    backend: str
    """Name of the backend."""
    python: str
    """Path of the interpreter that has mtrain."""
    folder: Path
    """Working directory of the job, absolute."""
    elastic: bool = False
    """Whether the job goes on when a host is lost, so that its scheduler must not end it then."""
    arguments: Sequence[str] = ()
    """For a user's script: its absolute path and its arguments."""
    code: Mapping[str, Path | None] = field(default_factory=dict)
    """The texts in the spec that name the user's own code -> the file of each; None: a module is imported by its name."""
    typed: Sequence[str] = ()
    """Values (``PATH=VALUE``) that were typed for the job and replace those that were chosen for the run it continues."""
    local_plugins: Sequence[str] = ()
    """Names of the job's plugins that only a ``plugins.toml`` of the submitter declares."""

    def command(self, *, python: str | None = None, spec: str | None = None, more: Sequence[str] = ()) -> list[str]:
        """Return the command that the scheduler runs, word by word.

        Args:
            python: the interpreter on the hosts; None: ``self.python``.
            spec: path of the spec there; None: ``spec_path``.
            more: further words, such as ``--ips A,B``.
        """
        start = [python or self.python, "-m", "mtrain"]
        verb = "run" if self.arguments else "train"
        chosen = ["-c", spec or str(self.spec_path), "--resume", "if-any", "--name", self.name]
        chosen += [word for text in self.typed for word in ("-o", text)]
        return [*start, verb, *chosen, *more, *self.arguments]


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuedJob:
    """A job that was given to a scheduler, as its record on disk describes it."""

    cluster: str
    """Name of the cluster plugin."""
    id: str
    """The scheduler's id of the job."""
    name: str
    """Name of the run."""
    folder: Path
    """Working directory of the job, absolute."""
    request: Path
    """The file that was handed to the scheduler."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options of the cluster plugin."""
    submitted: float = 0.0
    """Time of the submission, in seconds since 1970."""

    def __post_init__(self) -> None:
        """Check the names, which become words of commands and parts of paths: a record may be damaged, or a stranger's.

        Raises:
            UsageError: one of them is no such name.
        """
        checked_job_id(self.id)
        checked_run_name(self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueState:
    """The state of a queued job."""

    phase: Phase
    text: str
    """The state in the scheduler's own words, for example "PENDING (Resources)"."""
    hosts: Sequence[str] = ()
    """Names of the hosts on which it runs, where known."""
    code: int | None = None
    """Exit code of the job, once it has ended and where known."""

    @property
    def ended(self) -> bool:
        """Return whether the job has ended."""
        return self.phase in ENDED


class Queue(Protocol):
    """The queue of a scheduler, see ``Cluster.queue``.

    Every method raises ``UsageError`` if the scheduler refuses or cannot be reached, with the scheduler's own words.
    """

    @abstractmethod
    def request(self, submission: Submission) -> str:
        """Return the text of the file that is handed to the scheduler, without asking the scheduler anything."""
        ...

    def standalone_request(self, submission: Submission) -> str:
        """Return that text for ``--dry-run``: it must run without any file that ``submit`` would write."""
        return self.request(submission)

    @property
    def suffix(self) -> str:
        """Return the suffix of the request's file."""
        return ".txt"

    @abstractmethod
    def submit(self, submission: Submission, request: Path) -> str:
        """Hand the file ``request`` to the scheduler, and return the id of the job."""
        ...

    @abstractmethod
    def state(self, job: QueuedJob) -> QueueState:
        """Return the state of a job."""
        ...

    @abstractmethod
    def logs(self, job: QueuedJob, *, follow: bool) -> Iterator[str]:
        """Yield the lines that the job has printed. ``follow``: also those to come, until the job ends."""
        ...

    @abstractmethod
    def cancel(self, job: QueuedJob) -> None:
        """Ask the scheduler to end a job, which then saves its state. A job that has ended already is no error."""
        ...
