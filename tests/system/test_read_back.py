"""Every file that a command reads back from a folder: whoever wrote it, it is read, refused in words, or taken for absent."""

import ast
import csv
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.sweeping.jobs import TINY

import mtrain
from mtrain.compare import recorded
from mtrain.core.checkpoint import format as checkpoints
from mtrain.core.checkpoint.arrays_file import MappedArrays
from mtrain.errors import MtrainError, UsageError
from mtrain.jobs.hosts.host_log import HostLog, words
from mtrain.jobs.resume import choices
from mtrain.jobs.run import host_collector
from mtrain.jobs.watch import hang_log
from mtrain.records.history import Tail, read_history
from mtrain.records.reporters import csv_table
from mtrain.spec import bounds, config
from mtrain.spec.yaml_reader import dump
from mtrain.system import attempts, failures, runfolder
from mtrain.system.runfolder import RunFolder
from mtrain.weights.backup import form
from mtrain_clusters import submission
from mtrain_clusters._kubernetes import queue as kubernetes
from mtrain_sweep import definition as definitions
from mtrain_sweep import starting, trial_jobs
from mtrain_trace.reading import TraceError
from mtrain_ui.pages.folder import RunFiles
from mtrain_ui.pages.overview import _ends
from mtrain_ui.pages.state import _is_held
from tests.sources import ROOT, nodes, source_files

SPEC = dict(mtrain.load_spec(TINY).values)
STEP = "checkpoints/step-00000004"
DEEP, LONG = b"[" * 100_000, b"9" * 5_000
RECORD = {
    "cluster": "slurm", "id": "7", "name": "first", "folder": "/tmp", "request": "/tmp/job.sh", "options": {}, "submitted": 1.0,
}  # fmt: skip
PARAMETER = {"name": "train.seed", "kind": "int", "low": 0, "high": 9, "start": 0}
SWEEP = {
    "sampler": "random", "pruner": "none", "metric": "score", "direction": "max", "seed": 0, "trials": 2,
    "parameters": [PARAMETER], "folder": "/", "base": SPEC,
}  # fmt: skip
ROWS = [
    {"kind": "start", "update": 0, "time": 1.0},
    {"kind": "update", "update": 0, "losses": {"total": 1.0}, "time": 2.0},
    {"kind": "evaluation", "update": 1, "metrics": {"score": 0.5}, "time": 3.0},
    {"kind": "end", "update": 1, "reason": "done", "time": 4.0},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
HANGS = '{"time": 1.0, "hang": "still", "text": "nothing moves", "ranks": [1]}\n{"time": 2.0, "over": true}\n'
HOSTS = '{"time": 1.0, "hosts": ["a", "b"], "restarts": 0}\n{"time": 2.0, "lost": "b", "why": "power"}\n'


def text(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def spec_of_run(run: Path) -> Any:
    return config.load(config.RunSpec(run / "spec.yml"), environ={}).values


def journal(folder: Path) -> Any:
    (folder / "sweep.json").write_text(text(SWEEP))
    return len(starting.open_sweep(folder).trials)


def parameters_of_job(folder: Path) -> Any:
    job = submission._job({**RECORD, "request": str(folder / "job.yml")})
    return kubernetes._namespace(job)


def former_ranks(run: Path) -> Any:
    attempts.await_former_ranks(run, 0, timeout_s=0.1)


READ: dict[str, tuple[str, str | None, Callable[[Path], Any]]] = {
    "spec of a run": ("spec.yml", dump(SPEC), spec_of_run),
    "spec for the ranks": ("spec.json", text(SPEC), lambda run: (found := choices.read(run)) and found.values),
    "spec of a compared run": ("spec.json", text(SPEC), lambda run: recorded._spec(RunFolder(run), is_script=False)),
    "what was chosen": (
        "chosen.json",
        text({"paths": ["train.seed"], "files": {}}),
        lambda run: ((run / "spec.json").write_text(text(SPEC)), choices.read(run))[1],
    ),
    "records": ("metrics.jsonl", LINES, lambda run: read_history(run / "metrics.jsonl").evaluations),
    "records, followed": (
        "metrics.jsonl",
        LINES,
        lambda run: list(Tail(run / "metrics.jsonl", from_start=True).read()),
    ),
    "records on a page": ("metrics.jsonl", LINES, lambda run: len(_ends(RunFiles(run)).evaluations)),
    "summary": ("summary.json", text({"reason": "done", "updates": 1}), runfolder.read_summary),
    "summary on a page": ("summary.json", text({"reason": "done"}), lambda run: RunFiles(run).json("summary.json")),
    "log on a page": ("logs/rank-0.log", "a\nb\n", lambda run: RunFiles(run).text("logs/rank-0.log", limit=99)),
    "lock": (".lock-0", "1\n", lambda run: _is_held(RunFiles(run))),
    "lock of ranks": (".ranks-0", "1 1\n", former_ranks),
    "hangs": ("hangs.jsonl", HANGS, lambda run: hang_log.words(hang_log.HangLog(run).read())),
    "hosts": ("hosts.jsonl", HOSTS, lambda run: words(HostLog(run).read())),
    "failure": ("failures/rank-0.json", text({"rank": 0, "error": "x"}), lambda run: failures.read_failures(RunFolder(run))),
    "live metrics": ("live/rank-0.json", text({"update": 3}), lambda run: host_collector._read(run / "live/rank-0.json")),
    "table": ("metrics.csv", "epoch,update\r\n0,1\r\n1,2\r\n", lambda run: csv_table._read(run / "metrics.csv")),
    "manifest": (f"{STEP}/MANIFEST.json", None, lambda run: checkpoints.manifest_of(run / STEP)),
    "state": (f"{STEP}/state.json", text({"spec": {}}), lambda run: checkpoints.read_description(run / STEP)),
    "arrays": (f"{STEP}/weights.safetensors", None, lambda run: MappedArrays(run / STEP / "weights.safetensors").outlines),
    "id of a copied run": ("run.json", form.run_content("a" * 32).decode(), form.own_id),
    "submitted job": (".submitted/x/job.json", text(RECORD), submission.jobs),
    "request": ("job.yml", "metadata:\n  namespace: mine\n", parameters_of_job),
    "sweep": ("sweep.json", text(SWEEP), lambda folder: definitions.read(folder).base),
    "log of a trial": ("logs/0000.log", "error: x\n", lambda folder: trial_jobs.end_of(folder / "logs/0000.log", start=0, limit_bytes=99)),
    "journal": ("study.db", None, journal),
}  # fmt: skip
"""What is read back: its file, its text where each line of it counts, and the function that reads it for commands."""
CAUGHT = {
    "spec of a compared run": (OSError, ValueError),
    "state": (OSError, ValueError),
    "arrays": (OSError, ValueError),
}
CAUGHT |= {"table": (OSError, ValueError, csv.Error)}
"""What readers raise beside errors of mtrain, and their callers explain; a reporter that fails is switched off."""


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def sparse(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(1 << 40)


TRAPS: dict[str, Callable[[Path], object]] = {
    "pipe": pipe,
    "device": device,
    "folder": Path.mkdir,
    "sparse": sparse,
    "loop of links": lambda file: file.symlink_to(file.name),
    **{
        name: partial(Path.write_bytes, data=content)
        for name, content in {
            "empty": b"",
            "binary": b"\xff\xfe\0\1" * 99,
            "deep": DEEP,
            "long number": LONG,
            "list": b"[1, 2]",
            "number": b"7\n",
            "nested": b'{"hosts": 3, "time": [1], "lost": [1], "files": [], "kind": ["a"], "paths": 3, "base": [], "format": 1}\n',
            "other types": b'{"spec": 3, "time": "x", "rank": [1], "update": {}, "parameters": [{}], "metadata": 5, "base": {}}\n',
            "endless line": b"x" * (4 << 20),
        }.items()
    },
}


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Let no reader take a gigabyte."""
    with bounds.bounded_growth(1 << 30):
        yield


@pytest.mark.timeout(60)
@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", READ)
def test_a_trap_in_place_of_a_file_is_refused_or_taken_for_none(tmp_path: Path, name: str, trap: str) -> None:
    place, _, read = READ[name]
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    TRAPS[trap](file)
    with suppress(MtrainError, *CAUGHT.get(name, ())):
        read(tmp_path)


@pytest.mark.parametrize("name", [name for name, (_, content, _) in READ.items() if content])
def test_a_file_that_ends_at_any_line_is_not_taken_for_another_whole_one(tmp_path: Path, name: str) -> None:
    place, content, read = READ[name]
    file = tmp_path / place
    file.parent.mkdir(parents=True, exist_ok=True)
    assert content is not None
    if place == "spec.yml":
        (tmp_path / "spec.json").write_text(text(SPEC))
    file.write_text(content)
    whole, lines = read(tmp_path), content.splitlines(keepends=True)
    for count in range(len(lines)):
        cut = "".join(lines[:count])
        within = [cut.removesuffix("\n"), cut + lines[count][: len(lines[count]) // 2]]
        for torn in [cut] if place.endswith("yml") else [cut, *within]:
            file.write_text(torn)
            try:
                found = read(tmp_path)
            except (MtrainError, ValueError):
                continue
            if place.endswith(("jsonl", "csv")):  # it grows line by line
                file.write_text(torn[: torn.rfind("\n") + 1])
                before = read(tmp_path)
                file.write_text(cut)
                assert found in (before, read(tmp_path))
            elif not place.endswith("log"):
                assert not found or found == whole, torn


def test_a_journal_with_a_view_in_place_of_a_table_is_damaged(tmp_path: Path) -> None:
    # A view may have rows without end.
    from mtrain_sweep.journal import Journal

    Journal(tmp_path, direction="max").close()
    with closing(sqlite3.connect(tmp_path / "study.db")) as opened:
        opened.execute(
            "create view endless as with recursive n(i) as (select 1 union all select i + 1 from n) select * from n"
        )
    with pytest.raises(UsageError, match=r"it has a .*view"):
        Journal(tmp_path)


ABOVE = {
    "mtrain_clusters/queued_job": "request", "core/checkpoint/arrays_file": "arrays", "core/checkpoint/format": "manifest",
    "core/checkpoint/sharing": "arrays", "core/checkpoint/store": "manifest",
    "jobs/resume/choices": "what was chosen", "jobs/run/host_collector": "live metrics",
    "jobs/hosts/host_log": "hosts", "jobs/watch/hang_log": "hangs",
    "mtrain_clusters/submission": "submitted job", "mtrain_clusters/_kubernetes/queue": "request",
    "records/history": "records", "mtrain_ui/pages/folder": "summary on a page", "mtrain_ui/pages/overview": "records on a page",
    "mtrain_ui/pages/state": "lock", "records/reporters/csv_table": "table", "spec/config": "spec of a run",
    "spec/run_spec": "spec of a run", "spec/sources": "spec of a run", "spec/yaml_reader": "spec of a run",
    "compare/recorded": "spec of a compared run", "mtrain_sweep/definition": "sweep", "mtrain_sweep/journal": "journal",
    "system/failures": "failure", "system/runfolder": "summary",
    "weights/backup/form": "id of a copied run",
}  # fmt: skip
"""Modules that read files of folders -> what of the list above they read."""
ELSEWHERE = {
    "jobs/resume/fetch": "tests/backup/test_copies.py", "weights/backup/run_copies": "tests/backup/test_copies.py",
    "weights/dcp": "tests/weights/test_torch_dcp.py", "weights/dcp_pieces": "tests/weights/test_torch_dcp.py",
    "weights/zero": "tests/weights/test_torch_checkpoint_forms.py",
    "weights/reading": "tests/weights/test_hostile_safetensors.py",
    "mtrain_ui/pages/content": "packages/mtrain-ui/tests/pages/test_report_page.py",
    "mtrain_deploy/exported/graph_check": "packages/mtrain-deploy/tests/exporting/test_hostile_files.py",
    "spec/plugins": "tests/system/test_security.py",
    "spec/references": "tests/own_model/test_plan.py", "mtrain_sweep/space": "packages/mtrain-sweep/tests/sweeping/test_space.py",
    "jobs/hosts/allocation": "packages/mtrain-clusters/tests/clusters/test_absent_package.py",
    "mtrain_clusters/allocations/schedulers": "tests/cluster/test_allocation.py", "commands/verbs": "tests/commands/test_verbs.py",
    "commands/stacks": "tests/commands/test_stacks.py",
}  # fmt: skip
"""Modules whose files have tests of traps elsewhere."""
OWN = {
    "of this start": (
        "commands/predict", "mtrain_deploy/exporting/job", "mtrain_deploy/exporting/rank", "mtrain_deploy/commands/prune",
        "mtrain_deploy/pruning/worker", "jobs/plan/micro_batch", "launchers/withheld", "rank/spec/predict", "rank/worker",
        "compare/jobs", "records/reporters/tensorboard", "mtrain_ui/trackers/tracker", "mtrain_ui/trackers/visualdl",
        "mtrain_clusters/_slurm/queue", "system/log_limit",
        "system/copied", "core/checkpoint/together",
    ),
    "of the account, the installation or the kernel": (
        "commands/options", "core/compiling", "mtrain_deploy/serving/page", "jobs/preflight/facts",
        "system/interpreter", "system/interpreter_probe", "mtrain_clusters/_kubernetes/client", "mtrain_clusters/_kubernetes/own_code",
        "rank/script/job", "rank/script_mode", "mtrain_ui/pages/app", "mtrain_ui/pages/rendering",
        "mtrain_ui/trackers/mlflow", "mtrain_ui/trackers/weights_and_biases", "spec/bounds", "spec/files", "records/html",
        "system/placement", "system/proc", "system/vectors", "jobs/watch/looks",
    ),
}  # fmt: skip
"""Modules that read what the same command has written, or nobody else can write."""
FED_BY_DATA = ("tasks/", "data/", "models/", "mtrain_kit/", "mtrain_language/", "spec/importers/")
NAMES = {"read_bytes", "read_text", "open_file", "safe_open"}


def test_every_module_that_reads_files_is_on_a_list() -> None:
    found = set()
    for name, file in source_files().items():
        module = name.removesuffix(".py")
        calls = [node.func for node in nodes(file) if isinstance(node, ast.Call)]
        names = {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}
        if names & NAMES and not module.startswith(FED_BY_DATA):
            found.add(module)
    assert found == {*ABOVE, *ELSEWHERE, *(module for modules in OWN.values() for module in modules)}
    assert set(ABOVE.values()) <= set(READ)
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())


def test_plugins_that_only_a_compared_run_declares_are_not_imported(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (tmp_path / "trap.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    (tmp_path / "plugins.toml").write_text('[datasets.trap]\nmodule = "trap:Trap"\n')
    values = {**SPEC, "plugins": str(tmp_path / "plugins.toml"), "data": {**SPEC["data"], "format": "trap"}}
    (tmp_path / "spec.json").write_text(text(values))
    fields = {"learning_rates": [0.1], "gradient_norm": 1.0}
    (tmp_path / "metrics.jsonl").write_text(LINES.replace('"losses"', json.dumps(fields)[1:-1] + ', "losses"'))
    recorded._read_run(RunFolder(tmp_path))
    assert not mark.exists()


@pytest.mark.parametrize("fields", [{}, {"learning_rates": 3}, {"learning_rates": [None], "models": [1]}, {"trace": 7}])
def test_records_that_are_none_of_a_training_are_no_difference(tmp_path: Path, fields: dict[str, Any]) -> None:
    row = {**ROWS[1], **fields}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(TraceError, match="is damaged, or not of a training"):
        recorded._read_run(RunFolder(tmp_path))
