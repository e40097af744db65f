"""The job of a backend trains several times in one start, each time as the first time."""

import json
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.compare.benches import Bench, repeats_in_one_start
from mtrain.compare.request import CompareRequest
from mtrain.spec import config

SPEC = ["data.workers=0", "backend.options.device=cpu", "train.updates=1", "train.epochs=null", "cluster.threads=1"]
COMPARE = [
    *("compare", "-c", "vit_digits", "--backends", "solo,solo:framework=torch", "--updates", "2", "--ranks", "1"),
    *("-o", "data.workers=0", "backend.options.device=cpu", "cluster.threads=1"),
]


def request_and_bench(*overrides: str, **changes: object) -> tuple[CompareRequest, Bench]:
    loaded = config.load("vit_digits", overrides=[*SPEC, *overrides])
    request = CompareRequest(backends="solo,ddp", config="vit_digits", updates=1, ranks=1, **changes)  # type: ignore[arg-type]
    variant, _ = request.variants
    return request, Bench(variant=variant, loaded=loaded, spec=loaded.spec, ranks=1, notes=[])


def test_a_job_whose_start_can_be_put_back_trains_again_in_the_same_start():
    assert repeats_in_one_start(*request_and_bench())


def test_timed_jobs_may_be_started_on_their_own():
    assert not repeats_in_one_start(*request_and_bench(apart=True))


def test_what_cannot_be_put_back_is_started_again():
    assert not repeats_in_one_start(*request_and_bench("train.prune={}"))
    assert not repeats_in_one_start(*request_and_bench("train.quantise={}"))


def runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict, str]:
    code = main([*COMPARE, "--rounds", "2", "--out", str(folder)])
    printed = capsys.readouterr()
    assert code == 0, printed
    return json.loads((folder / "compare.json").read_text()), printed.err


@pytest.mark.slow
def test_three_trainings_of_one_start_end_with_the_same_bits_and_have_their_own_records(tmp_path, capsys):
    actual, told = runs(tmp_path / "out", capsys)
    assert all(row["repeats"] for row in actual["backends"])
    assert [row["speed"]["jobs"] for row in actual["backends"]] == [2, 2]
    assert told.count("2 updates traced, and 2 times timed,") == 2
    folders = sorted(path.name for path in (tmp_path / "out").iterdir() if (path / "metrics.jsonl").is_file())
    assert folders == [
        *("solo", "solo-framework=torch", "solo-framework=torch-timed-1", "solo-framework=torch-timed-2"),
        *("solo-timed-1", "solo-timed-2"),
    ]
    ends = {
        json.loads((tmp_path / "out" / name / "metrics.jsonl").read_text().splitlines()[-1])["weights_sha256"]
        for name in folders
    }
    assert len(ends) == 1
