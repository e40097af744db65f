"""The Python functions of mtrain: what the command line does, called from a script or a notebook.

``import mtrain`` offers them as ``mtrain.train``, ``mtrain.evaluate`` and so on. None imports a framework: training runs in
processes of its own, one for each rank, exactly as the command line starts them.

Every function takes the spec in the same way: ``spec`` is a YAML file, the name of a shipped config, or a dict with the keys of
a YAML file (None: ``mtrain.yml`` in the current folder, else the embedded demo), ``backend`` replaces ``backend.name``, ``ranks`` replaces
``cluster.nproc_per_node``, and ``overrides`` sets any other value, by dotted path or nested::

    mtrain.train("digits", backend="ddp", ranks=2, overrides={"train.epochs": 2, "optimizer": {"rate": 0.005}})

Mistakes raise the errors of ``mtrain.errors``; all of them derive from ``MtrainError``.
"""

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mtrain import results
from mtrain.errors import TrainingError, UsageError
from mtrain.results import EvaluateResult, PredictResult, TrainResult
from mtrain.typed import Spec

if TYPE_CHECKING:
    from mtrain.cluster.doctor import Checkup
    from mtrain.comparing.results import Comparison
    from mtrain.jobs.plan import Plan
    from mtrain.spec.config import Loaded, Source

File = str | os.PathLike[str] | None
SpecSource = File | Spec
FAILED = (1, 2)
"""Exit codes of a job that did not end as it should."""


class JobFailed(TrainingError):
    """A job was started and did not reach its end. The reason was printed; logs are in the run folder."""

    def __init__(self, what: str, *, exit_code: int, run_dir: Path | None) -> None:
        where = f"; logs and failures are in {run_dir}" if run_dir else ""
        super().__init__(f"{what} ended with exit code {exit_code}{where}")
        self.exit_code = exit_code
        self.run_dir = run_dir


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

    return config.load(source_of(spec), flags=_flags(backend=backend, ranks=ranks, overrides=overrides))


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
    from mtrain.cluster import allocated_hosts, start

    loaded = allocated_hosts.completed(load_spec(spec, backend=backend, ranks=ranks, overrides=overrides))
    return start.planned(loaded, start.locate(loaded, resume=text_of(resume)))


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
    from mtrain.cluster import start

    need_main_thread("train")
    source = start.resumed_config(None, text_of(resume)) if spec is None else spec
    loaded = load_spec(source, backend=backend, ranks=ranks, overrides=overrides)
    return _trained(loaded, resume, quiet=quiet)


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
    from mtrain.cluster import script_job
    from mtrain.script.settings import PLAIN

    need_main_thread("run")
    loaded = load_spec(PLAIN if spec is None else spec, backend=backend, ranks=ranks, overrides=overrides)
    words = [os.fspath(word) if isinstance(word, os.PathLike) else str(word) for word in arguments]
    return _trained(script_job.with_script(loaded, Path(script), words), resume, quiet=quiet)


def open_run(run: str | os.PathLike[str]) -> TrainResult:
    """Open the folder of a former run, or of one that still goes on, as the result that ``train`` returns.

    Raises:
        UsageError: it is not the folder of a training run.
    """
    return results.open_run(Path(run))


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
    from mtrain.cluster import allocated_hosts, exported_model, job, start

    need_main_thread("evaluate")
    named = start.TrainedWeights(run=text_of(run), checkpoint=text_of(checkpoint), weights=text_of(weights)).fetched()
    run, checkpoint, weights = named.run, named.checkpoint, named.weights
    source = text_of(checkpoint) or text_of(run)
    values = {**dict(_flat(overrides or {})), **({} if weights is None else {"model.weights": text_of(weights)})}
    own = source_of(start.resumed_config(None, source) if spec is None else spec)
    config: Any = exported_model.config_of(own, text_of(weights))
    loaded = allocated_hosts.completed(load_spec(config, backend=backend, ranks=ranks, overrides=values))
    if run is not None and checkpoint is None:
        if not Path(run).is_dir():
            raise UsageError(f"run={text_of(run)!r}: no such run folder; give one such as runs/digits")
        source = text_of(start.best_of(Path(run))) or source
    outcome = job.evaluate(loaded, resume=source, quiet=quiet)
    if outcome.code != 0:
        raise JobFailed("evaluation", exit_code=outcome.code, run_dir=outcome.run_dir)
    figures = outcome.summary.get("figures", {})
    return EvaluateResult(figures=figures, run_dir=outcome.run_dir, summary=outcome.summary)


def predict(
    pictures: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
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
    """Find objects in pictures, or their classes, with trained weights.

    Args:
        pictures: a picture file, a folder of pictures, or several of either.
        run: a run folder: its spec and its best checkpoint; None: ``runs/latest``.
        checkpoint: a checkpoint in place of the run's best.
        weights: an exported ``.onnx``, or a file of weights, which needs ``spec`` or ``run``, in place of a checkpoint.
        spec: see the module; None: the run's own.
        overrides: further values of the spec.
        out: folder for the results.
        confidence: lowest score that is kept, from 0 to 1.
        draw: also write the pictures with what was found.
        strict: raise at a picture that cannot be read; otherwise it is skipped and listed in the result.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UsageError: there are no such pictures or weights, or the spec does not fit them.
        JobFailed: prediction was started and failed.
    """
    from mtrain.cluster import prediction

    need_main_thread("predict")
    if not 0 <= confidence < 1:
        raise UsageError(f"confidence={confidence}: expected a number from 0 up to, but not including, 1")
    sources = [pictures] if isinstance(pictures, str | os.PathLike) else list(pictures)
    if not sources:
        raise UsageError("predict: no picture was given; give a file, a folder, or a list of them")
    request = prediction.Request(
        sources=[os.fspath(source) for source in sources],
        config=source_of(spec),
        run=text_of(run),
        checkpoint=text_of(checkpoint),
        weights=text_of(weights),
        out=os.fspath(out),
        confidence=confidence,
        draw=draw,
        strict=strict,
        device=device,
    )

    result = prediction.predict(request, lambda path, needed: load_with(path, overrides, needed))
    if result.code != 0:
        raise JobFailed("prediction", exit_code=result.code, run_dir=result.out / prediction.WORK_FOLDER)
    return PredictResult(predictions=result.predictions, skipped=result.skipped, out=result.out)


def load_with(path: "Source", overrides: Mapping[str, Any] | None, needed: Mapping[str, Any]) -> "Loaded":
    """Load a spec with a caller's values, and with values by dotted path that win over them."""
    from mtrain.spec import config

    flags = _flags(backend=None, ranks=None, overrides={**dict(_flat(overrides or {})), **needed})
    return config.load(path, flags=flags)


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
    from mtrain.cluster.doctor import Request, examine

    need_main_thread("doctor")
    flags = _flags(backend=backend, ranks=ranks, overrides=overrides)
    return examine(Request(config=source_of(spec), backend=backend, flags=flags, quick=quick))


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
    from mtrain.comparing import jobs
    from mtrain.comparing.order import Order, parse_variants
    from mtrain.comparing.profiles import PROFILES
    from mtrain.system import runfolder

    need_main_thread("compare_backends")
    if profile not in PROFILES:
        raise UsageError(f"profile={profile!r}: expected one of {', '.join(PROFILES)}")
    if updates < 1 or ranks < 1 or rounds < 0:
        raise UsageError(f"updates={updates}, ranks={ranks}, rounds={rounds}: expected at least 1, 1 and 0")
    if arguments and script is None:
        raise UsageError(f"arguments={list(arguments)!r}: given without a script; name it with script=")
    order = Order(
        config=source_of(spec),
        overrides=[f"{path}={_yaml(value)}" for path, value in _flat(overrides or {})],
        variants=parse_variants(backends if isinstance(backends, str) else ",".join(backends)),
        updates=updates,
        ranks=ranks,
        profile=PROFILES[profile],
        rounds=rounds,
        out=Path(out) if out is not None else runfolder.next_name(Path("runs"), "compare"),
        tell=(lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr)),
        script=None if script is None else Path(script),
        arguments=tuple(arguments),
    )
    result = jobs.compare(order)
    jobs.write(result, order.out)
    return result


def _flags(*, backend: str | None, ranks: int | None, overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values that the arguments set, by dotted path, with the argument that messages name."""
    from mtrain.spec import config

    flags = {path: config.Given(value, f"overrides[{path!r}]") for path, value in _flat(overrides or {})}
    if backend is not None:
        flags["backend.name"] = config.Given(backend, f"backend={backend!r}")
    if ranks is not None:
        flags["cluster.nproc_per_node"] = config.Given(ranks, f"ranks={ranks!r}")
    return flags


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values by dotted path, as YAML would have given them; an empty mapping stays a value."""
    from mtrain.spec.in_code import plain

    for key, value in (plain(values, where="overrides") if not prefix else values).items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


def source_of(spec: SpecSource) -> "Source":
    """Return a spec as ``config.load`` takes it.

    Raises:
        UsageError: it is none.
    """
    if spec is None or isinstance(spec, Mapping):
        return spec
    if not isinstance(spec, str | os.PathLike):
        raise UsageError(
            f"given a spec of type {type(spec).__name__}, expected a file, the name of a config, or a dict"
        )
    return os.fspath(spec)


def text_of(path: File) -> str | None:
    """Return a path as text; None stays None."""
    return None if path is None else os.fspath(path)


def _yaml(value: Any) -> str:
    """A value as ``-o`` takes it: YAML on one line."""
    import json

    return json.dumps(value)


def need_main_thread(name: str) -> None:
    """Refuse other threads: only the main thread of a process can be told of Ctrl-C and SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            f"mtrain.{name} was called from another thread; call it from the main thread, or from a process of its own"
        )


def _trained(loaded: "Loaded", resume: File, *, quiet: bool) -> TrainResult:
    from mtrain.cluster import allocated_hosts, job

    outcome = job.train(allocated_hosts.completed(loaded), resume=text_of(resume), quiet=quiet)
    if loaded.spec.report.plots:  # the import takes a moment
        from mtrain.pages.report import write_after

        write_after(outcome.run_dir, code=outcome.code, warn=lambda text: print(text, file=sys.stderr))
    if outcome.code in FAILED:
        raise JobFailed("training", exit_code=outcome.code, run_dir=outcome.run_dir)
    reason = "interrupted" if outcome.code else results.exit_reason(outcome.summary)
    return results.train_result(outcome.run_dir, outcome.summary, reason=reason)
