"""What functions of Python ask for: every argument arrives where the work is done, and results come back."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mtrain
from mtrain import errors
from mtrain.commands import python_calls
from mtrain.core.interfaces.queue import QueueState
from mtrain_clusters import queued_job, submission
from mtrain_deploy.commands import prune as prune_verb
from mtrain_deploy.commands import quantise as quantise_verb
from mtrain_deploy.exporting import job as export_job
from mtrain_sweep import search as sweeps
from mtrain_sweep import starting
from mtrain_ui.pages import report as report_page
from mtrain_ui.pages import server


class Asked:
    """Keeps the last request, and answers it."""

    def __init__(self, **answer: Any) -> None:
        self.request: Any = None
        self.answer = SimpleNamespace(**answer)

    def __call__(self, request: Any, loader: Any = None) -> Any:
        self.request = request
        return self.answer


def test_export_asks_for_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(code=0, files=(Path("a.onnx"),))
    monkeypatch.setattr(export_job, "export_weights", asked)
    given: dict[str, Any] = {"form": "nms", "batch": 3, "dynamic_size": True, "precision": "fp16", "force": True}
    files = mtrain.export(Path("runs/a"), out="b.onnx", checkpoint="c", weights="w", spec="digits", **given)
    assert files == [Path("a.onnx")]
    expected = {**given, "run": "runs/a", "out": Path("b.onnx"), "checkpoint": "c", "weights": "w"}
    assert {name: getattr(asked.request, name) for name in expected} == expected
    assert (asked.request.format, asked.request.spec.config) == ("onnx", "digits")
    asked.answer.code = 3
    with pytest.raises(mtrain.JobFailed):
        mtrain.export("runs/a")


def test_quantise_asks_for_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(code=0, path=Path("a-int8.onnx"))
    monkeypatch.setattr(quantise_verb, "quantise_model", asked)
    given: dict[str, Any] = {"samples": 7, "seed": 5, "method": "percentile", "force": True}
    assert mtrain.quantise(weights="a.onnx", out="b.onnx", **given) == Path("a-int8.onnx")
    expected = {**given, "weights": "a.onnx", "out": Path("b.onnx"), "run": None}
    assert {name: getattr(asked.request, name) for name in expected} == expected
    asked.answer.path = None
    with pytest.raises(mtrain.JobFailed):
        mtrain.quantise(weights="a.onnx")


def test_prune_asks_for_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(code=0, report={"flops": 3})
    monkeypatch.setattr(prune_verb, "prune_network", asked)
    given: dict[str, Any] = {"target": 0.4, "by": "taylor"}
    assert mtrain.prune("runs/a", out="b", checkpoint="c", **given) == {"flops": 3}
    expected = {**given, "run": "runs/a", "out": "b", "checkpoint": "c", "weights": None}
    assert {name: getattr(asked.request, name) for name in expected} == expected


def test_sweep_asks_for_what_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests: list[Any] = []

    def prepare(request: Any) -> Any:
        requests.append(request)
        raise errors.UsageError("enough")

    monkeypatch.setattr(starting, "prepare", prepare)
    monkeypatch.setattr(sweeps, "run", lambda order: pytest.fail("was run"))
    over = {"backend": ["ddp", "solo"], "ranks": [1, 2]}
    given: dict[str, Any] = {"trials": 4, "jobs": 2, "sampler": "random", "pruner": "median", "metric": "AP:min"}
    for spec, overrides, named in ((None, None, False), (None, {"train.seed": 1}, True), ("digits", None, True)):
        with pytest.raises(errors.UsageError, match="enough"):
            mtrain.sweep(spec, over=over, out=tmp_path, max_failures=1, overrides=overrides, **given)
        assert requests[-1].named is named
    request = requests[-1]
    assert {name: getattr(request, name) for name in given} == given
    assert (request.over, request.out, request.max_failures) == (["backend=ddp,solo", "ranks=1,2"], tmp_path, 1)
    for wrong in ({"sampler": "best"}, {"pruner": "hyper"}):
        with pytest.raises(errors.UsageError, match="expected one of"):
            mtrain.sweep(**wrong)  # type: ignore[arg-type]


def test_pages_are_asked_for_with_their_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: list[Any] = []

    def write(run: Path, out: Path | None) -> Path:
        written.append((run, out))
        return Path("report.html")

    monkeypatch.setattr(report_page, "write", write)
    assert mtrain.write_report(str(tmp_path)) == Path("report.html")
    mtrain.write_report(tmp_path, out="b.html")
    assert written == [(tmp_path, None), (tmp_path, Path("b.html"))]
    served: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda runs, *, host, port, tell: served.append((runs, host, port)))
    mtrain.serve_runs()
    mtrain.serve_runs(tmp_path, host="0.0.0.0", port=7)
    assert served == [(Path("runs"), "127.0.0.1", 8600), (tmp_path, "0.0.0.0", 7)]


class Line:
    """A queue in which the job is in these phases, one after the other."""

    def __init__(self, *phases: str) -> None:
        self._phases = list(phases)
        self.cancelled: list[Any] = []
        self.followed: list[bool] = []

    def state(self, job: Any) -> QueueState:
        phase: Any = self._phases.pop(0) if len(self._phases) > 1 else self._phases[0]
        return QueueState(phase=phase, text=phase)

    def logs(self, job: Any, *, follow: bool) -> Iterator[str]:
        self.followed.append(follow)
        yield "line"

    def cancel(self, job: Any) -> None:
        self.cancelled.append(job)


def test_a_submitted_job_is_waited_for_until_it_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    job: Any = SimpleNamespace(id="7", name="a")
    mine = queued_job.SubmittedJob(job, tmp_path)
    line = Line("waiting", "running", "done")
    monkeypatch.setattr(queued_job.SubmittedJob, "_queue", lambda self: line)
    pauses: list[float] = []
    monkeypatch.setattr(queued_job, "time", SimpleNamespace(monotonic=lambda: float(sum(pauses)), sleep=pauses.append))
    assert mine.wait(every_s=3.0).phase == "done"
    assert pauses == [3.0, 3.0]
    pauses.clear()
    monkeypatch.setattr(queued_job.SubmittedJob, "_queue", lambda self: Line("running"))
    assert mine.wait(timeout_s=10.0, every_s=4.0).phase == "running"
    assert pauses == [4.0, 4.0, 4.0]
    monkeypatch.setattr(queued_job.SubmittedJob, "_queue", lambda self: line)
    assert (list(mine.logs(follow=True)), line.followed) == (["line"], [True])
    mine.cancel()
    assert line.cancelled == [job]


def test_a_submission_has_the_values_that_were_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(submission, "prepare", lambda loaded: loaded)
    monkeypatch.setattr(submission, "submit", lambda loaded: loaded)
    options = {"partition": "gpu", "cpus_per_task": 3}
    values: dict[str, Any] = {"overrides": {"report": {"dir": str(tmp_path)}}, "ranks": 2, "backend": "ddp"}
    mine = mtrain.submit("digits", cluster="slurm", nodes=3, options=options, **values)
    loaded: Any = mine.job
    cluster = loaded.spec.cluster
    assert (cluster.name, cluster.nodes, cluster.nproc_per_node) == ("slurm", 3, 2)
    assert {name: cluster.options[name] for name in options} == options
    assert (loaded.spec.backend.name, mine.base) == ("ddp", tmp_path)


def test_values_become_paths_and_what_is_given_apart_wins() -> None:
    overrides = {"train": {"seed": 3, "ema": {}}, "data.root": "x"}
    flags = {
        path: given.value for path, given in python_calls.flags_of(backend="ddp", ranks=2, overrides=overrides).items()
    }
    assert flags == {
        "train.seed": 3,
        "train.ema": {},
        "data.root": "x",
        "backend.name": "ddp",
        "cluster.nproc_per_node": 2,
    }
    both = python_calls.flags_of(backend="solo", ranks=None, overrides={"backend.name": "ddp"})
    assert {path: given.value for path, given in both.items()} == {"backend.name": "solo"}


def test_errors_of_users_end_with_2_and_others_with_1() -> None:
    users = [errors.SpecError, errors.DataError, errors.PluginError, errors.ScriptError, errors.CheckpointError]
    assert {kind.exit_code for kind in (errors.UsageError, *users)} == {2}
    others = [errors.LaunchError, errors.TrainingError, errors.NonFiniteError, errors.UnboundError]
    assert {kind.exit_code for kind in others} == {1}
    assert errors.Interrupted.exit_code == 143
    assert errors.SpecError(["a", "b"]).problems == ("a", "b")
    assert str(errors.SpecError(["a", "b"])) == "a\nb"
    assert str(errors.PluginError("absent", remedy="install it")) == "absent; install it"
