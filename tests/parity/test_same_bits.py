"""ddp, Horovod and DeepSpeed ZeRO 0 to 3 learn the same from a shipped spec, to the last bit, through the real command line."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.parity import jobs, same_bits
from tests.parity.same_bits import STACKS, Learnt

UPDATES = 6


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Learnt]:
    """By model and stack; each job is run once."""
    folder = tmp_path_factory.mktemp("same-bits")
    data: Path = jobs.make_data(folder / "data")

    @cache
    def learn(model: str, stack: str) -> Learnt:
        if find_spec(stack.partition("-")[0]) is None and stack != "ddp":
            pytest.skip(f"{stack} is not installed here")
        return same_bits.learn(model, stack, folder, data, updates=UPDATES)

    return learn


@pytest.mark.slow
@pytest.mark.parametrize("model", ["ppyoloe_s", "yolov5n"])
@pytest.mark.parametrize("stack", [name for name in STACKS if name != "ddp"])
def test_two_ranks_learn_what_two_ranks_of_ddp_learn(
    learnt: Callable[[str, str], Learnt], model: str, stack: str
) -> None:
    ours = learnt(model, stack)
    assert len(ours.losses) == UPDATES
    assert ours == learnt(model, "ddp")
