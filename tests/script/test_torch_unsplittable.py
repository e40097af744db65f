"""What a library that splits arrays cannot split is one sentence before training."""

import pytest

from tests.script.runs import SCRIPTS, run

pytestmark = pytest.mark.job

SCRIPT = str(SCRIPTS / "train_unsplittable.py")
ZERO_3 = ("-b", "deepspeed", "-o", "backend.options.stage=3")
AXES = "parameter temperature has no axes (shape ()), which {} does not take; give it the shape (1,)"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("backend", "model", "message"),
    [
        pytest.param(ZERO_3, "scalar", AXES.format("DeepSpeed"), id="deepspeed"),
        pytest.param(("-b", "fsdp"), "scalar", AXES.format("FSDP"), id="fsdp", marks=pytest.mark.slow),
        pytest.param(("-b", "fsdp"), "list", "given a ModuleList, which has no forward method", id="fsdp-list"),
    ],
)
def test_what_cannot_be_split_is_told_in_one_sentence(backend, model, message, tmp_path):
    result = run(tmp_path, *backend, "--nproc-per-node", "2", SCRIPT, model)
    assert result.returncode == 2, result.stdout + result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
