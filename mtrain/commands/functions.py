"""The Python functions of mtrain: what the command line does, called from a script or a notebook.

``import mtrain`` offers them as ``mtrain.train``, ``mtrain.evaluate`` and so on. None imports a framework: training runs in
processes of its own, one for each rank, exactly as the command line starts them.

Every function takes the spec in the same way: ``spec`` is a YAML file, the name of a shipped config, or a dict with the keys of
a YAML file (None: ``mtrain.yml`` in the current folder, else the embedded demo), ``backend`` replaces ``backend.name``, ``ranks`` replaces
``cluster.nproc_per_node``, and ``overrides`` sets any other value, by dotted path or nested::

    mtrain.train("digits", backend="ddp", ranks=2, overrides={"train.epochs": 2, "optimizer": {"learning_rate": 0.005}})

Mistakes raise the errors of ``mtrain.errors``; all of them derive from ``MtrainError``.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtrain.commands import results
from mtrain.commands.python_calls import (
    File,
    SpecSource,
    flags_of,
    flat,
    need_main_thread,
    request_of,
    source_of,
    teller,
)
from mtrain.commands.results import EvaluateResult, PredictResult, TrainResult
from mtrain.commands.training_request import TrainRequest
from mtrain.errors import TrainingError, UsageError
from mtrain.spec.calls import explain_calls

if TYPE_CHECKING:
    from mtrain.compare.results import Comparison
    from mtrain.jobs.plan.plan import Plan
    from mtrain.jobs.preflight.doctor import Checkup
    from mtrain.spec.config import Loaded

FAILED = (1, 2)
"""Exit codes of a job that did not end as it should."""


class JobFailed(TrainingError):
    """A job was started and did not reach its end. The reason was printed; logs are in the run folder."""

    def __init__(self, what: str, *, exit_code: int, run_dir: Path | None) -> None:
        where = f"; logs and failures are in {run_dir}" if run_dir else ""
        super().__init__(f"{what} ended with exit code {exit_code}{where}")
        self.exit_code = exit_code
        self.run_dir = run_dir


@explain_calls
def load_spec(
    spec: SpecSource = None,
    *,
    backend: str | None = None,
    ranks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> "Loaded":
    """Read and validate a spec; ``.spec`` of the result has the values, ``.origin("train.epochs")`` says where one came from.

    Raises:
        SpecError: the spec is wrong; the message has a line for each mistake.
        PluginError: ``plugins.toml`` cannot be used.
    """
    from mtrain.spec import config

    return config.load(source_of(spec), flags=flags_of(backend=backend, ranks=ranks, overrides=overrides))


@explain_calls
def plan(
    spec: SpecSource = None,
    *,
    backend: str | None = None,
    ranks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: File = None,
) -> "Plan":
    """Return the commands, the environment and the numbers of a job without starting anything.

    ``print(plan.text())`` shows what ``mtrain plan`` shows.

    Raises:
        UsageError: the spec is wrong, or there is nothing to resume.
    """
    from mtrain.commands.plan import plan_job

    return plan_job(request_of(TrainRequest, locals()))


@explain_calls
def train(
    spec: SpecSource = None,
    *,
    backend: str | None = None,
    ranks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: File = None,
    quiet: bool = False,
) -> TrainResult:
    """Train a model and wait for the end; progress is shown as on the command line.

    Call it from the main thread: Ctrl-C (a notebook's stop button) asks the ranks to save and end.

    Args:
        spec: see the module; as all parameters up to ``overrides``.
        backend: replaces ``backend.name``.
        ranks: number of ranks on each host.
        overrides: further values of the spec.
        resume: a checkpoint or a run folder to go on from; ``"auto"``: the newest run of this name.
        quiet: show no progress.

    Raises:
        UsageError: the job cannot be started; nothing was changed.
        LaunchError: ranks or hosts did not come up.
        JobFailed: it was started and failed.
    """
    need_main_thread("train")
    return _run_training(request_of(TrainRequest, locals()))


@explain_calls
def run(
    script: str | os.PathLike[str],
    *,
    arguments: Sequence[str] = (),
    spec: SpecSource = None,
    backend: str | None = None,
    ranks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    resume: File = None,
    quiet: bool = False,
) -> TrainResult:
    """Run your own training script, which calls ``mtrain.session()``, on the ranks of a job, and wait for the end.

    Args:
        script: the script, a file of its own: ranks cannot run the cells of a notebook.
        arguments: arguments of the script.
        spec: see the module; None: the values of a plain training loop.
        backend: replaces ``backend.name``.
        ranks: number of ranks on each host.
        overrides: further values of the spec.
        resume: a checkpoint or a run folder to go on from; ``"auto"``: the newest run of this script.
        quiet: show no progress.

    Raises:
        UsageError: the job cannot be started; nothing was changed.
        LaunchError: ranks or hosts did not come up.
        JobFailed: it was started and failed.
    """
    need_main_thread("run")
    words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in arguments]
    return _run_training(request_of(TrainRequest, locals(), arguments=words))


@explain_calls
def open_run(run: str | os.PathLike[str]) -> TrainResult:
    """Open the folder of a former run, or of one that still goes on, as the result that ``train`` returns.

    Raises:
        UsageError: it is not the folder of a training run.
    """
    return results.open_run(Path(run))


@explain_calls
def evaluate(
    spec: SpecSource = None,
    *,
    backend: str | None = None,
    ranks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    run: File = None,
    checkpoint: File = None,
    weights: File = None,
    quiet: bool = False,
) -> EvaluateResult:
    """Score trained weights on the evaluation split.

    Args:
        spec: see the module; None together with ``run`` or ``checkpoint``: the spec of that run.
        backend: replaces ``backend.name``.
        ranks: number of ranks on each host.
        overrides: further values of the spec.
        run: a run folder, whose best checkpoint is taken.
        checkpoint: a checkpoint.
        weights: a file of weights, or an exported ``.onnx``, in place of a checkpoint.
        quiet: show no progress.

    Raises:
        UsageError: there is nothing to evaluate, or the job cannot be started.
        JobFailed: it was started and failed.
    """
    from mtrain.commands.evaluate import EvaluateRequest, score

    need_main_thread("evaluate")
    outcome = score(request_of(EvaluateRequest, locals()))
    if outcome.code != 0:
        raise JobFailed("evaluation", exit_code=outcome.code, run_dir=outcome.run_dir)
    metrics = outcome.summary.get("metrics", {})
    return EvaluateResult(metrics=metrics, run_dir=outcome.run_dir, summary=outcome.summary)


@explain_calls
def predict(
    images: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    run: File = None,
    checkpoint: File = None,
    weights: File = None,
    spec: SpecSource = None,
    overrides: Mapping[str, Any] | None = None,
    out: str | os.PathLike[str] = "predictions",
    confidence: float = 0.25,
    draw: bool = True,
    strict: bool = False,
    device: str = "auto",
) -> PredictResult:
    """Find objects in images, or their classes, with trained weights.

    Args:
        images: an image file, a folder of images, or several of either.
        run: a run folder: its spec and its best checkpoint; None: ``runs/latest``.
        checkpoint: a checkpoint in place of the run's best.
        weights: an exported ``.onnx``, or a file of weights, which needs ``spec`` or ``run``, in place of a checkpoint.
        spec: see the module; None: the run's own.
        overrides: further values of the spec.
        out: folder for the results.
        confidence: lowest score that is kept, from 0 to 1.
        draw: also write the images with what was found.
        strict: raise at an image that cannot be read; otherwise it is skipped and listed in the result.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UsageError: there are no such images or weights, or the spec does not fit them.
        JobFailed: prediction was started and failed.
    """
    from mtrain.commands.predict import WORK_FOLDER, PredictRequest, predict_on

    need_main_thread("predict")
    if not 0 <= confidence < 1:
        raise UsageError(f"confidence={confidence}: expected a number from 0 up to, but not including, 1")
    sources = [images] if isinstance(images, str | os.PathLike) else list(images)
    if not sources:
        raise UsageError("predict: no image was given; give a file, a folder, or a list of them")
    result = predict_on(request_of(PredictRequest, locals(), sources=[os.fspath(source) for source in sources]))
    if result.code != 0:
        raise JobFailed("prediction", exit_code=result.code, run_dir=result.out / WORK_FOLDER)
    return PredictResult(predictions=result.predictions, skipped=result.skipped, out=result.out)


@explain_calls
def doctor(
    spec: SpecSource = None,
    *,
    backend: str | None = None,
    ranks: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    quick: bool = False,
) -> "Checkup":
    """Check this machine, the hosts of a job and every installed backend, before a job is started.

    Args:
        spec: see the module; None: no spec is checked, but the hosts and the backend of the default one count.
        backend: the only backend to check; None: all that are installed.
        ranks: number of ranks on each host that add up numbers.
        overrides: further values of the spec, such as ``{"cluster.ips": [...], "cluster.name": "ssh"}``.
        quick: leave out the all-reduce of each backend.

    Returns:
        The findings; ``.state`` is ``"bad"`` if one of them is in the way of a job.

    Raises:
        UsageError: the spec is wrong.
    """
    from mtrain.commands.doctor import check_hosts
    from mtrain.jobs.preflight.doctor import DoctorRequest

    need_main_thread("doctor")
    flags = flags_of(backend=backend, ranks=ranks, overrides=overrides)
    return check_hosts(DoctorRequest(config=source_of(spec), backend=backend, flags=flags, quick=quick))


@explain_calls
def compare_backends(
    spec: SpecSource = None,
    *,
    backends: str | Sequence[str],
    updates: int = 50,
    ranks: int = 2,
    profile: Literal["bitwise", "float32", "loose"] = "float32",
    rounds: int = 1,
    overrides: Mapping[str, Any] | None = None,
    out: File = None,
    quiet: bool = False,
    script: File = None,
    arguments: Sequence[str] = (),
) -> "Comparison":
    """Train one spec, or run one script, on several backends and compare what they learn, update by update.

    Args:
        spec: see the module.
        backends: the reference first, with options as on the command line: ``["ddp", "deepspeed:stage=3"]``.
        updates: length of each job.
        ranks: ranks of the backends that can have several.
        profile: how far apart two backends may be and still agree.
        rounds: timed jobs of each backend; 0 takes the speed of the compared jobs.
        overrides: further values of the spec.
        out: folder of the jobs, of ``compare.json`` and ``compare.html``; None: ``runs/compare``.
        quiet: print nothing of what is going on.
        script: a script that calls ``mtrain.session()``, which is run in place of training a spec.
        arguments: arguments of the script.

    Returns:
        The comparison; ``.agree`` says whether all agree.

    Raises:
        UsageError: the spec, a backend or an option is wrong; nothing was started.
    """
    from mtrain.compare import jobs
    from mtrain.compare.profiles import PROFILES
    from mtrain.compare.request import CompareRequest

    need_main_thread("compare_backends")
    if profile not in PROFILES:
        raise UsageError(f"profile={profile!r}: expected one of {', '.join(PROFILES)}")
    if updates < 1 or ranks < 1 or rounds < 0:
        raise UsageError(f"updates={updates}, ranks={ranks}, rounds={rounds}: expected at least 1, 1 and 0")
    if arguments and script is None:
        raise UsageError(f"arguments={list(arguments)!r}: given without a script; name it with script=")
    request = request_of(
        CompareRequest,
        locals(),
        config=source_of(spec),
        overrides=[f"{path}={json.dumps(value)}" for path, value in flat(overrides or {})],  # JSON is YAML
        backends=backends if isinstance(backends, str) else ",".join(backends),
        arguments=tuple(arguments),
        tell=teller(quiet=quiet),
    )
    comparison = jobs.compare(request)
    jobs.write(comparison, request.folder)
    return comparison


def _run_training(request: TrainRequest) -> TrainResult:
    from mtrain.commands.train import run_training

    outcome = run_training(request)
    if outcome.code in FAILED:
        raise JobFailed("training", exit_code=outcome.code, run_dir=outcome.run_dir)
    reason = "interrupted" if outcome.code else results.exit_reason(outcome.summary)
    return results.train_result(outcome.run_dir, outcome.summary, reason=reason)
