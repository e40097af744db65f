"""Paddle's matrix products use the processor's vector instructions, whoever made the processor."""

from pathlib import Path

import pytest

from mtrain.system import vectors
from tests.backends.processes import python

AMD = "vendor_id\t: AuthenticAMD\nflags\t\t: fpu {}\n\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu\n"
NEEDED = "avx2 fma bmi1 bmi2"


@pytest.mark.parametrize(
    ("described", "code"),
    [
        (AMD.format(NEEDED), "5"),
        (AMD.format("avx2 bmi1 bmi2"), None),
        (AMD.format("avx"), None),
        (AMD.format(NEEDED).replace("AuthenticAMD", "GenuineIntel"), None),
        ("Features : fp asimd\n", None),
    ],
)
def test_the_code_is_that_of_the_processor(described: str, code: str | None, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(described, encoding="utf-8")
    environment: dict[str, str] = {}
    vectors.allow(environment, file)
    assert environment.get(vectors.VARIABLE) == code


def test_a_code_that_somebody_has_set_stays(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(AMD.format(NEEDED), encoding="utf-8")
    environment = {vectors.VARIABLE: "4"}
    vectors.allow(environment, file)
    assert environment == {vectors.VARIABLE: "4"}


def _described() -> str:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""


@pytest.mark.slow
@pytest.mark.skipif(vectors._code(_described()) is None, reason="MKL knows this processor, or it has no AVX2")
def test_products_take_much_less_time_than_without() -> None:
    """CPU time, so that other work on the machine does little; 2.5 times as fast was measured, and 1.4 is required."""
    program = """
    import time
    import mtrain.backends._paddle, paddle
    x = paddle.ones([768, 768])
    times = []
    for _ in range(12):
        started = time.process_time()
        paddle.matmul(x, x)
        times.append(time.process_time() - started)
    print(sorted(times)[6])
    """
    plain, ours = (python(program, **{vectors.VARIABLE: code}) for code in ("0", vectors._code(_described()) or ""))
    assert float(plain.stdout) > 1.4 * float(ours.stdout), (plain, ours)
