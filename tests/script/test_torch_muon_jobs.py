"""Muon in a script: several ranks train the weights of one, and backends that split arrays refuse it."""

import pytest

from tests.script.runs import SCRIPTS, done, largest_difference, run, weights

SCRIPT = str(SCRIPTS / "train_muon.py")


@pytest.mark.job
@pytest.mark.parametrize(
    "backend",
    [
        ["ddp"],
        pytest.param(["horovod"], marks=pytest.mark.slow),
        pytest.param(["deepspeed", "-o", "backend.options.stage=0"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_two_ranks_train_the_weights_of_one(backend, tmp_path):
    done(tmp_path, "--name", "one", "-b", "solo", SCRIPT)
    done(tmp_path, "--name", "two", "-b", *backend, "--nproc-per-node", "2", SCRIPT)
    difference = largest_difference(weights(tmp_path, "two"), weights(tmp_path, "one"))
    print(f"muon on 2 ranks of {' '.join(backend)}: largest difference after 50 updates {difference:.1e}")
    assert difference <= 1e-12


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.parametrize("words", [("-b", "deepspeed", "-o", "backend.options.stage=1"), ("-b", "fsdp")])
def test_backends_that_split_arrays_refuse_it(words, tmp_path):
    refused = run(tmp_path, *words, SCRIPT)
    assert refused.returncode
    assert "optimizer.rule: muon given with" in refused.stderr
    assert "Traceback" not in refused.stderr
