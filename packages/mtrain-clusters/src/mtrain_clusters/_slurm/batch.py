"""The batch script of a job: a pure function of the job and its options."""

import re
import shlex
from pathlib import Path

from mtrain.core.interfaces.queue import Submission
from mtrain.errors import UsageError
from mtrain_clusters._slurm.options import CONTROL, SlurmOptions

# Slurm forgets a job minutes after its end; a line in its output stays.
CODE_LINE = "mtrain ended with exit code "
"""Beginning of the last line that the script prints."""
REQUEUE_SIGNAL = "B:USR1@60"
"""Slurm may send it up to a minute earlier. ``B:``: to the script alone."""
_JOB = '"$SLURM_JOB_ID"'
"""Shell word for the id of this job."""
_HOSTS = "\0hosts"
_SPEC = "\0spec"
# No word that a user can give contains a NUL character.
_EXPANDED = {_SPEC: '"$spec"', _HOSTS: '"$hosts"'}
"""Words of the command for the shell to expand."""

_SPEC_WRITTEN = """\
# The spec of this job; `mtrain submit` writes it into the folder of its runs instead.
spec={spec_path}
mkdir -p "$(dirname "$spec")"
cat >"$spec" <<'{end}'
{spec}
{end}
"""
_END_OF_SPEC = "END_OF_SPEC"
_RUN = """\
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
{before}
# The end of this shell would end the job, so it must wait for mtrain. Slurm sends SIGTERM to mtrain as well.
trap : TERM
{warning}
# Until mtrain takes SIGUSR1, as a request to save, that signal must not end it.
(trap '' USR1; exec {command}) &
mtrain=$!
while :; do
  wait "$mtrain"
  code=$?
  kill -0 "$mtrain" 2>/dev/null || break
done
wait "$mtrain"
last=$?
[ "$last" = 127 ] || code=$last
echo "{code_line}$code"
{after}
exit "$code"
"""
_PREEMPTED = """\
# At the beginning of a preemption's grace time Slurm sends SIGTERM to steps alone. It would take the end of this shell
# for the end of the job, and not start it again.
if [ "$code" = 143 ]; then
  case $(scontrol --oneliner show job {job}) in
    *JobState=RUNNING*PreemptTime=[0-9]*) {action} ;;
  esac
fi
"""
_HOST_LOST = """\
# mtrain mostly knows before Slurm that a host is lost. Slurm would put the job back into its queue for that. A host that was
# off and is back again answers, but its slurmd was started after this job.
if [ "$code" = 1 ]; then
  lost=
  timeout -k 5 20 srun --overlap --quiet --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 true || lost="does not answer"
  began=$(scontrol --oneliner show job {job} | sed -n 's/.* StartTime=\\([0-9][^ ]*\\).*/\\1/p')
  for started in $(scontrol --oneliner show node "$SLURM_JOB_NODELIST" | sed -n 's/.* SlurmdStartTime=\\([0-9][^ ]*\\).*/\\1/p')
  do
    [[ -n $began && $started > $began ]] && lost="was off for a while"
  done
  if [ -n "$lost" ]; then
    echo "a host of this job $lost: the job goes back into the queue"
    scontrol requeue {job}
  fi
fi
"""


def script(submission: Submission, options: SlurmOptions, *, has_spec: bool = False) -> str:
    """Return the batch script, which starts mtrain once, on the first host.

    ``has_spec``: it runs without any other file. It writes the spec itself, and its output goes into the folder of the job.

    Raises:
        UsageError: a path or name cannot be written into such a script.
    """
    folder = submission.folder if has_spec else submission.spec_path.parent
    lines = ["#!/bin/bash", *(f"#SBATCH {line}" for line in directives(submission, options, folder)), ""]
    lines += ["trap : USR1", *options.setup, ""] if options.setup else ["trap : USR1"]
    body = _RUN.format(
        before=_spec_written(submission) if has_spec else "",
        warning=_warning(options),
        command=command(submission, options, spec=_SPEC if has_spec else None),
        code_line=CODE_LINE,
        after=_after(options),
    )
    return "\n".join(lines) + "\n" + re.sub(r"\n{3,}", "\n\n", body.replace("\n\nexit", "\nexit"))


def _spec_written(submission: Submission) -> str:
    """Return the lines that write the spec of a job."""
    end, lines = _END_OF_SPEC, submission.spec.splitlines()
    while end in lines:
        end += "_"
    path = f'{shlex.quote(str(submission.spec_path.parent))}/spec-"$SLURM_JOB_ID".yml'
    return _SPEC_WRITTEN.format(spec_path=path, end=end, spec="\n".join(lines))


def directives(submission: Submission, options: SlurmOptions, folder: Path) -> list[str]:
    """Return the options of sbatch, one for each ``#SBATCH`` line; ``folder`` takes what the job prints.

    Raises:
        UsageError: a path cannot be written into such a line.
    """
    pattern = f"{str(folder).replace('%', '%%')}/slurm-%j.out"
    values: dict[str, object] = {
        "job-name": job_name(submission.name),
        "nodes": submission.hosts,
        "ntasks-per-node": submission.ranks_per_host or 1,
        "cpus-per-task": options.cpus_per_task,
        "gpus-per-node": options.gpus_per_node,
        "gres": options.gres,
        "mem": options.mem,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "constraint": options.constraint,
        "signal": warning_signal(options),
        "chdir": _quote(str(submission.folder)),
        "output": _quote(pattern),
        "open-mode": "append",  # A job that starts again must not empty the file.
    }
    lines = [f"--{name}={value}" for name, value in values.items() if value is not None]
    lines += ["--exclusive"] if options.exclusive else []
    lines += ["--no-kill"] if submission.elastic else []
    lines += [] if options.requeue is None else ["--requeue" if options.requeue else "--no-requeue"]
    return [*lines, *options.extra]


def job_name(run_name: str) -> str:
    """Return the name of the job of a run."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", run_name)


def warning_signal(options: SlurmOptions) -> str | None:
    """Return the signal that Slurm sends before the time limit, as the option ``--signal`` of sbatch; None: none."""
    return options.signal or (REQUEUE_SIGNAL if options.requeue else None)


def command(submission: Submission, options: SlurmOptions, *, spec: str | None = None) -> str:
    """Return the shell command that starts mtrain, for the hosts in ``$hosts``; ``spec``: see ``Submission.command``."""
    words = submission.command(python=options.python, spec=spec, more=["--cluster", "slurm", "--ips", _HOSTS])
    return " ".join(_EXPANDED.get(word) or _shell_word(word) for word in words)


def _warning(options: SlurmOptions) -> str:
    """Return the line that handles the signal before the time limit, if this script receives it."""
    signal = warning_signal(options) or ""
    place, colon, rest = signal.partition(":")
    if not colon or "B" not in place.upper():
        return ""
    name = rest.partition("@")[0].upper().removeprefix("SIG")
    action = f"scontrol requeue {_JOB}" if options.requeue else f'kill -{name} "$mtrain"'
    return f"trap {shlex.quote(action)} {name}"


def _after(options: SlurmOptions) -> str:
    """Return the lines that follow the end of mtrain."""
    if options.requeue is False:
        return ""
    # Without the option, Slurm does at the end of the grace time what it is set up to do.
    action = f"scontrol requeue {_JOB}" if options.requeue else "sleep infinity"
    return _PREEMPTED.format(job=_JOB, action=action) + (_HOST_LOST.format(job=_JOB) if options.requeue else "")


def _shell_word(word: str) -> str:
    if "\0" in word:
        raise UsageError(f"{word[:80]!r}: holds a NUL character, which no program can be given")
    return shlex.quote(word)


def _quote(path: str) -> str:
    """Return a path for a ``#SBATCH`` line, in which sbatch reads quotes and backslashes as a shell does."""
    if CONTROL.search(path):
        raise UsageError(f"{path!r}: holds a line end or another control character, so it cannot be given to sbatch")
    if re.fullmatch(r"[A-Za-z0-9_./%+=:,@-]+", path):
        return path
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
