"""Backend ``horovod``: real ranks under horovodrun, compared bit for bit with those of ddp under torchrun."""

import json
import os
import subprocess
import sys
import textwrap
import zlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mtrain.backends.horovod import Horovod
from mtrain.errors import UsageError
from mtrain.spec.model import Spec
from mtrain.spec.resolved import Resolved
from mtrain.system import interpreter
from tests.once import once

ROOT = Path(__file__).parents[2]
RANKS = Path(__file__).with_name("horovod_ranks.py")
EQUAL_TO_DDP = (
    "fifty_updates",
    "adam",
    "synced_batchnorm",
    "frozen",
    "channels_last",
    "channels_last_and_missing",
    "bf16",
    "fp16",
    "not_finite",
    "missing_on_one_rank",
    "missing_in_one_micro_batch",
    "evaluation",
)
OWN = ("resumed", "collectives", "environment")
needs_horovod = pytest.mark.horovod


def starter(backend: str, size: int) -> list[str]:
    if backend == "ddp":
        return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    slots = ["-np", str(size), "-H", f"127.0.0.1:{size}"]
    return ["-m", "horovod.runner.launch", "--gloo", *slots, sys.executable]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(ROOT)}


def start(backend: str, size: int, *arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Ranks that run ``arguments``."""
    argv = [sys.executable, *starter(backend, size), *arguments]
    return subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout_s)


@pytest.fixture(scope="session")
def study_results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return each rank's results of a study on ``size`` ranks."""

    @cache
    def run(backend: str, size: int, studies: tuple[str, ...], options: str) -> Path:
        def study(out: Path) -> None:
            process = start(backend, size, str(RANKS), ",".join(studies), backend, str(out), options)
            assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-6000:]

        number = zlib.crc32(f"{studies} {options}".encode())
        return once(tmp_path_factory, f"horovod-{backend}-{size}-{number:x}", study)

    def read(study: str, backend: str = "horovod", size: int = 2, **options: Any) -> list[Any]:
        compared = EQUAL_TO_DDP if size == 2 else ("fifty_updates",)  # three ranks are compared with ddp in no study
        studies = (study,) if options else (*compared, *(OWN if backend == "horovod" else ()))
        return json.loads((run(backend, size, studies, json.dumps(options)) / f"{study}.json").read_text())

    return read


@pytest.mark.smoke
@pytest.mark.job
@needs_horovod
@pytest.mark.parametrize("study", EQUAL_TO_DDP)
def test_two_ranks_learn_what_two_ranks_of_ddp_learn_bit_for_bit(study_results: Any, study: str) -> None:
    ours, theirs = study_results(study), study_results(study, "ddp")
    print(f"{study}: horovod {ours[0]}, ddp {theirs[0]}")
    assert ours == theirs
    assert study == "evaluation" or ours[0]["weights"] == ours[1]["weights"]


@pytest.mark.job
@needs_horovod
def test_an_update_that_is_not_finite_on_one_rank_is_skipped_on_all(study_results: Any) -> None:
    for rank in study_results("not_finite"):
        assert [norm for norm in rank["norms"] if norm == "nan"] == ["nan"]
        assert (rank["counters"]["updates"], rank["counters"]["skipped"]) == (3, 1)


@pytest.mark.job
@needs_horovod
def test_a_parameter_that_no_rank_uses_is_left_alone(study_results: Any) -> None:
    """With a gradient of zeros weight decay would shrink it."""
    assert [rank["never"] for rank in study_results("missing_in_one_micro_batch")] == [[1.0, 1.0, 1.0]] * 2


@pytest.mark.job
@needs_horovod
def test_a_timeline_names_the_gradients_and_changes_nothing(study_results: Any, tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"
    assert study_results("fifty_updates", timeline=str(file)) == study_results("fifty_updates")
    text = file.read_text()
    assert "NEGOTIATE_ALLREDUCE" in text
    assert "conv1.weight" in text


@pytest.mark.job
@needs_horovod
@pytest.mark.parametrize("size", [2, 3])
def test_a_job_goes_on_bit_for_bit_from_a_state(study_results: Any, size: int) -> None:
    for rank in study_results("resumed", size=size):
        assert rank["whole"] == rank["in two parts"]


@pytest.mark.job
@needs_horovod
def test_three_ranks_learn_the_same_twice(study_results: Any) -> None:
    """A ring of three adds in an order that depends on what is sent together: it must not depend on time."""
    first, second = study_results("fifty_updates", size=3), study_results("fifty_updates", size=3, cycle_ms=3.0)
    assert first == second


@pytest.mark.job
@needs_horovod
def test_how_gradients_are_sent_together_changes_nothing_on_two_ranks(study_results: Any) -> None:
    assert study_results("fifty_updates") == study_results("fifty_updates", fusion_mb=0, cycle_ms=0.5)


@pytest.mark.job
@needs_horovod
def test_gradients_are_cut_into_groups_so_that_some_travel_while_the_backward_pass_runs() -> None:
    """In the order of backward passes; one type each; only an array that is too long by itself makes a group too
    long."""
    process = python("""
        import torch
        from mtrain.backends._horovod.exchange import groups
        lengths = [10] * 12 + [100] + [10] * 11
        parameters = [torch.zeros(n) for n in lengths] + [torch.zeros(5, dtype=torch.float64)]
        for most_bytes in (1e9, 80, 0):
            buckets = groups(parameters, most_bytes)
            assert [id(p) for group in buckets for p in group] == [id(p) for p in reversed(parameters)]
            print([[p.numel() for p in group] for group in buckets])
    """)
    assert process.stdout.splitlines() == [
        "[[5], [10, 10, 10, 10], [10, 10, 10, 10], [10, 10, 10], [100], [10, 10, 10, 10], [10, 10, 10, 10], [10, 10, 10, 10]]",
        "[[5], [10, 10], [10, 10], [10, 10], [10, 10], [10, 10], [10], [100], [10, 10], [10, 10], [10, 10], [10, 10], "
        "[10, 10], [10, 10]]",
        "[[5], " + "[10], " * 11 + "[100], " + ", ".join(["[10]"] * 12) + "]",
    ], process.stderr


@pytest.mark.job
@needs_horovod
def test_gradients_sent_as_fp16_are_nearly_the_same(study_results: Any) -> None:
    whole, half = (
        [float.fromhex(norm) for norm in rank["norms"]]
        for rank in (study_results("frozen")[0], study_results("frozen", compression="fp16")[0])
    )
    assert half != whole
    assert half == pytest.approx(whole, rel=2e-3)


@pytest.mark.job
@needs_horovod
@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_reduce_and_gather(study_results: Any, size: int) -> None:
    total = size * (size + 1) / 2
    everyone = (
        study_results("collectives", size=size) if size > 1 else study_results("collectives", size=1, cycle_ms=2.0)
    )
    for rank, each in enumerate(everyone):
        assert each == {
            "sum": [[total, -total]],
            "gradient": False,
            "untouched": [[rank + 1.0, -(rank + 1.0)]],
            "max": [size, -1],
            "mean": [pytest.approx(total / size)],
            "scalar": total,
            "int": [total],
            "strided": [[0.0, 3.0 * total], [total, 4.0 * total], [2.0 * total, 5.0 * total]],
            "type": "float64",
            "gathered": [[r, 1000 * r] for r in range(size)],
            "stacked": [[r + 1.0, -(r + 1.0)] for r in range(size)],
            "broadcast": [[[1.0, 1.0], [1.0, 1.0]], 1, [1.0, 1.0, 1.0]],
        }


@pytest.mark.job
@needs_horovod
def test_settings_do_not_stay_in_the_environment_and_the_compiler_is_not_imported(study_results: Any) -> None:
    assert study_results("environment") == [{"left": [], "compiler": False}] * 2


# ------------------------------------------------------------------------------------------------------------- endings
def rank_script(folder: Path, body: str, options: str = "") -> str:
    script = folder / "rank.py"
    head = f"""
        import os, signal, sys, time
        from mtrain.backends.horovod import Horovod
        from mtrain.core.collective import barrier
        from mtrain.errors import MtrainError
        options = Horovod.Options(device="cpu", {options})
        """
    script.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return str(script)


@pytest.mark.job
@needs_horovod
@pytest.mark.parametrize(
    "kind",
    [
        "raise RuntimeError('on purpose')",
        pytest.param("os._exit(9)", marks=pytest.mark.slow),  # the others see the same as after SIGKILL
        "os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_a_rank_that_fails_takes_the_job_down_at_once(tmp_path: Path, kind: str) -> None:
    body = f"""
        with Horovod(options) as session:
            if session.collective.rank == 0:  # horovodrun asks it to end as soon as the other has failed
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            barrier(session.collective)
            if session.collective.rank == 1:
                {kind}
            try:
                barrier(session.collective)
            except Exception as error:
                open({str(tmp_path / "noticed")!r}, "w").write(type(error).__name__)
                raise
        """
    process = start("horovod", 2, rank_script(tmp_path, body))
    assert process.returncode == 1
    assert ("on purpose" in process.stderr) is ("purpose" in kind)
    assert (tmp_path / "noticed").read_text() == "HorovodInternalError"


@pytest.mark.job
@needs_horovod
def test_a_collective_that_waits_too_long_for_a_rank_ends_the_job(tmp_path: Path) -> None:
    body = """
        with Horovod(options) as session:
            if session.collective.rank == 1:
                time.sleep(600)
            barrier(session.collective)
        """
    process = start("horovod", 2, rank_script(tmp_path, body, "timeout_s=4"))
    assert process.returncode == 1
    assert "HorovodInternalError" in process.stderr
    assert "stalled for longer than 4 seconds" in process.stderr + process.stdout


@needs_horovod
@pytest.mark.slow
def test_ranks_end_without_aborting_however_often(tmp_path: Path) -> None:
    """Processes of a rank that end while native threads still run can crash."""
    body = """
        with Horovod(options) as session:
            barrier(session.collective)
        """
    script = rank_script(tmp_path, body)
    for _ in range(3):
        process = start("horovod", 3, script)
        assert (process.returncode, process.stderr) == (0, "")


# -------------------------------------------------------------------------------------------------------------- errors
def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    saved = {name: value for name, value in environment().items() if not name.startswith(("HOROVOD_", "OMPI_", "PMI_"))}
    argv = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(argv, cwd=ROOT, env={**saved, **env}, capture_output=True, text=True, timeout=120)


ENTER = """
    from mtrain.backends.horovod import Horovod
    from mtrain.errors import MtrainError
    try:
        with Horovod(Horovod.Options(device="cpu")):
            pass
    except MtrainError as error:
        print(type(error).__name__, error.exit_code, error)
"""


@pytest.mark.job
def test_it_says_what_it_is_without_loading_a_framework() -> None:
    process = python("""
        import sys
        from mtrain.backends.horovod import Horovod
        assert (Horovod(Horovod.Options()).framework, Horovod.rendezvous) == ("torch", "horovod")
        assert "torch" not in sys.modules and "horovod" not in sys.modules
    """)
    assert process.returncode == 0, process.stderr


@pytest.mark.job
@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({}, "Horovod is not installed"),
        ({"horovod/__init__.py": "", "horovod/torch.py": "print('no extension')"}, "Horovod was built without torch"),
        (
            {"horovod/__init__.py": "", "horovod/torch.py": "raise ImportError('undefined symbol: _ZN3c10')"},
            "cannot be loaded",
        ),
        (
            {
                "horovod/__init__.py": "",
                "horovod/torch.py": "def no(): return False\ninit = gloo_built = mpi_built = no",
            },
            "built with neither gloo nor MPI",
        ),
    ],
    ids=["missing", "without torch", "for another torch", "without gloo"],
)
def test_a_horovod_that_cannot_be_used_is_one_error_with_the_command_that_builds_it(
    tmp_path: Path, files: dict[str, str], what: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    hide = "import sys; sys.modules['horovod'] = None\n" if not files else ""
    process = python(hide + textwrap.dedent(ENTER), PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert process.returncode == 0, process.stderr
    assert "PluginError 2 backend horovod: Horovod" in process.stdout
    assert what in process.stdout
    assert f"`{sys.executable} -m mtrain doctor --build-horovod`" in process.stdout


@pytest.mark.job
@pytest.mark.parametrize("python", [None, sys.executable], ids=["here", "in another interpreter"])
def test_a_missing_library_is_told_before_anything_starts_with_the_command_that_builds_it(
    tmp_path: Path, python: str | None
) -> None:
    policy = tmp_path / "plugins.toml"
    policy.write_text(
        textwrap.dedent("""
        [backends.hvd]
        module = "mtrain.backends.horovod:Horovod"
        needs = "torch"
        libraries = ["no_such_library"]
        install = "build it: `scripts/build {python}`"
    """)
    )
    backend = {"name": "hvd", "python": python}
    values = {"backend": backend, "plugins": str(policy), "data": {"format": "digits"}, "model": {"name": "yolov5n"}}
    with pytest.raises(UsageError, match="no_such_library") as error:
        interpreter.check(Resolved.of(Spec.model_validate(values)))
    assert str(error.value).endswith(f"; build it: `scripts/build {sys.executable}`")


@pytest.mark.job
@needs_horovod
def test_without_a_starter_it_says_how_to_start_it() -> None:
    """Started by torchrun, say, every rank would take itself for a job of one."""
    process = python(ENTER)
    assert "LaunchError 1 backend horovod was not started by horovodrun: none of HOROVOD_RANK" in process.stdout, (
        process.stderr
    )


def test_unknown_options_are_refused() -> None:
    for wrong in ({"compression": "bf16"}, {"fusion_mb": -1}, {"cycle_ms": 0}, {"bucket_mb": 3}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            Horovod.Options(**wrong)  # type: ignore[arg-type]
