"""Curves that torch has too, beside torch's own."""

import pytest

from mtrain.core.update.schedule import Schedule
from mtrain.rank.script.rules import OneCycle
from mtrain.spec.model import Spec

CASES = [(total, peak) for total in (1, 2, 10, 37, 100, 1000) for peak in (0.01, 0.1, 0.3, 0.5, 0.9, 1.0)]


# Where the rise takes one update torch divides by zero.
@pytest.mark.parametrize(("total", "peak"), [(total, peak) for total, peak in CASES if total * peak != 1])
@pytest.mark.parametrize("final", [None, 0.02])
def test_one_cycle_has_the_rates_of_torch(total, peak, final):
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    dividers = {} if final is None else {"final_div_factor": 1 / 25 / final}
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.3, total_steps=total, pct_start=peak, cycle_momentum=False, **dividers
    )
    rates = []
    for _ in range(total):
        rates.append(theirs.get_last_lr()[0])
        if len(rates) < total:
            optimizer.step()
            theirs.step()
    curve = OneCycle(peak=peak) if final is None else OneCycle(peak=peak, final_factor=final)
    sections = {"schedule": curve.section(), "optimizer": {"learning_rate": 0.3}, "train": {"updates": total}}
    for updates_per_epoch in (1, 7, total):
        ours = Schedule(Spec.model_validate(sections), updates_per_epoch=updates_per_epoch, total_updates=total)
        assert [ours(update).learning_rates[-1] for update in range(total)] == pytest.approx(rates, rel=1e-9)


def test_one_cycle_per_epoch_has_the_rates_of_torch_stepped_per_epoch():
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=12, cycle_momentum=False)
    rates = []
    for epoch in range(12):
        rates += [theirs.get_last_lr()[0]] * 5
        if epoch < 11:
            optimizer.step()
            theirs.step()
    sections = {
        "schedule": OneCycle(per="epoch").section(),
        "optimizer": {"learning_rate": 0.3},
        "train": {"epochs": 12},
    }
    ours = Schedule(Spec.model_validate(sections), updates_per_epoch=5, total_updates=60)
    assert [ours(update).learning_rates[-1] for update in range(60)] == pytest.approx(rates, rel=1e-9)
