"""``train.precision: auto``: one choice for all ranks, which the plan, the records and the checkpoints show."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch

from mtrain import load_spec, train
from mtrain.backends._torch import device
from mtrain.commands import main
from mtrain.core.checkpoint import store
from mtrain.core.interfaces import Capabilities
from mtrain.rank.spec.precision import changed_since, choose, settle

SHORT = {"train": {"updates": 2, "epochs": None, "batch_size": 4}, "data.workers": 0, "evaluate.enabled": False}


class Ranks:
    """The collective of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._values: list[object] = [None] * size
        self._all_here = threading.Barrier(size)

    def of(self, rank: int) -> SimpleNamespace:
        def all_gather(value: object) -> list[object]:
            self._values[rank] = value
            self._all_here.wait(10)
            return list(self._values)

        return SimpleNamespace(all_gather=all_gather)


def choices(*fast: bool) -> list[str]:
    """Return what each rank chooses, if their devices are fast with bf16 or not."""
    ranks, found = Ranks(len(fast)), [""] * len(fast)

    def run(rank: int) -> None:
        name = f"cuda:{rank} (NVIDIA GPU)" if fast[rank] else "cpu"
        session = SimpleNamespace(
            collective=ranks.of(rank), device=name, capabilities=Capabilities(fast_bf16=fast[rank])
        )
        found[rank] = ": ".join(choose(session))  # type: ignore[arg-type]

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(len(fast))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_one_slow_device_decides_for_all_ranks():
    assert choices(True, True) == ["bf16: the devices of all ranks are faster with it"] * 2
    assert choices(True, False, True) == ["fp32: rank 1 computes on the CPU, which is no faster with bf16"] * 3


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_gpus_are_fast_with_bf16_from_compute_capability_8_on(monkeypatch, capability, fast):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda target: capability)
    assert device.fast_bf16(torch.device("cuda", 0)) is fast
    assert not device.fast_bf16(torch.device("cpu"))


def test_a_given_precision_is_kept_and_asks_nobody():
    spec = load_spec("digits", overrides={"train.precision": "bf16"}).spec
    assert settle(spec, SimpleNamespace()) == (spec, [])  # type: ignore[arg-type]


def test_a_job_goes_on_in_another_precision_with_a_warning():
    spec = load_spec("digits").spec
    assert changed_since({"train": {"precision": "bf16"}}, spec) == (
        "train.precision: the checkpoint was trained in bf16; the job goes on in fp32"
    )
    assert changed_since({"train": {"precision": "fp32"}}, spec) == changed_since(None, spec) == ""


def test_the_plan_says_what_auto_will_be(capsys, monkeypatch):
    def row(*words: str) -> str:
        assert main(["plan", "--json", "-c", "digits", "-b", "ddp", "-o", "train.precision=auto", *words]) == 0
        return str(json.loads(capsys.readouterr().out)["numbers"]["precision"])

    assert row("--devices", "cpu") == "fp32 (auto: ranks compute on the CPU, which is no faster with bf16)"
    monkeypatch.setattr("mtrain.system.placement.count_devices", lambda environ, **_: 2)
    assert row().startswith("auto: bf16 if the devices of all ranks are faster with it, else fp32")


@pytest.mark.job
def test_records_and_checkpoints_of_a_job_show_what_was_chosen(tmp_path):
    values = {**SHORT, "train.precision": "auto", "report.dir": str(tmp_path), "report.plots": False}
    folder = train("vit_digits", backend="solo", overrides=values, quiet=True).run_dir
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["precision"] == "fp32"
    notes = [record["message"] for record in records if record["kind"] == "note"]
    assert "train.precision: auto is fp32: rank 0 computes on the CPU, which is no faster with bf16" in notes
    assert store.load(store.newest(folder / "checkpoints")).spec["train"]["precision"] == "fp32"
