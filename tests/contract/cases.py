"""Which cases run on how many ranks."""

from tests.contract.training import FAULTS, Case

SIZES = (1, 2, 3)
EQUAL = (
    *(Case(batchnorm="frozen", accumulate=accumulate) for accumulate in (1, 2)),
    *(Case(batchnorm="synced", accumulate=accumulate) for accumulate in (1, 2)),
    Case(clip_norm=float("inf"), accumulate=2),
    Case(rule="adam", accumulate=2),
    Case(rule="adamw", batchnorm="synced"),
)
FAULTY = tuple(Case(batchnorm="frozen", accumulate=2, fault=fault) for fault in FAULTS)


def reference_of(case: Case) -> Case:
    """What one rank trains to compare ``case`` with: a frozen BatchNorm makes accumulation irrelevant too."""
    accumulate = 1 if case.batchnorm == "frozen" else case.accumulate
    return Case(batchnorm=case.batchnorm, accumulate=accumulate, clip_norm=case.clip_norm, rule=case.rule, fault="none")
