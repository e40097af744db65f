"""The check of the first update notices a BatchNorm that loses digits, in one process."""

from pathlib import Path

import numpy as np
from tests.testing.faults import Inexact

from mtrain_kit import accuracy
from mtrain_kit.check_context import FIRST_UPDATE, Reference, Site
from tests.framework import Framework


def test_an_inexact_batchnorm_is_noticed_in_loss_and_norm(framework: Framework, tmp_path: Path) -> None:
    framework.one_thread()
    with framework.solo() as session:
        exact = accuracy.first_update(session, "fp64")
        np.savez(Reference(folder=tmp_path, precision="fp64").file(FIRST_UPDATE), **exact)  # type: ignore[arg-type]
        actual = accuracy.near_float64(Site(session=Inexact(session), ranks=1, references=tmp_path))  # type: ignore[arg-type]
    print({measure.what: measure.value for measure in actual})
    assert not any(measure.ok for measure in actual)
