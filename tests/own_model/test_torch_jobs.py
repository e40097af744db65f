"""Jobs on a user's own torch model: the same weights for every number of ranks, resume to the same bits."""

from tests.own_model.runs import EXAMPLE, losses, trained

FP64 = (
    "-o",
    "train.precision=fp64",
    "-o",
    "train.epochs=2",
    "-o",
    "model.options.dropout=0.0",
    "-o",
    "evaluate.metrics=[]",
)
SPEC = EXAMPLE / "own.yml"


def test_one_two_and_three_ranks_have_the_same_losses(tmp_path):
    trained(tmp_path, "one", SPEC, *FP64, "--backend", "solo")
    trained(tmp_path, "two", SPEC, *FP64, "--nproc-per-node", "2", "-o", "train.accumulate=2")
    trained(tmp_path, "three", SPEC, *FP64, "--backend", "horovod", "--nproc-per-node", "3")
    one = losses(tmp_path, "one")
    assert len(one) == 18
    for name in ("two", "three"):
        assert max(abs(a - b) for a, b in zip(one, losses(tmp_path, name), strict=True)) <= 1e-12
