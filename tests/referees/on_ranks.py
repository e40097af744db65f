"""Run another project's unit tests on the ranks of a job: every rank runs the same tests in the same order.

usage: on_ranks.py LOADER [FOLDER]      without FOLDER: print the names of the tests

LOADER is `torch`, or a file with classes of `unittest`. FOLDER has `names.txt`, the tests in their order, and takes
`rank-N.txt`: a line for each test that has ended, with its name, its outcome and the last line of its error. A rank ends at the
first test that fails, since its partners may be at another place from then on; who started the job starts another for the
tests that are left.
"""

import importlib.util
import os
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path

FAILED = 3  # the exit code of a rank whose test failed


def main(loader: str, folder: Path) -> int:
    """Run the tests of `names.txt`; 3 where one failed."""
    cases = torch_cases(folder) if loader == "torch" else file_cases(Path(loader))
    with (folder / f"rank-{rank()}.txt").open("a", encoding="utf-8", buffering=1) as told:
        for name in (folder / "names.txt").read_text(encoding="utf-8").split():
            told.write(f"{name} begun\n")
            outcome, why = run(cases[name])
            told.write(f"{name} {outcome} {why}\n")
            if outcome == "failed":
                return FAILED
    return 0


def names(loader: str) -> list[str]:
    """The names of all tests."""
    if loader != "torch":
        return sorted(file_cases(Path(loader)))
    os.environ |= {"BACKEND": "gloo", "TEMP_DIR": "/nowhere", "WORLD_SIZE": "2"}
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    return list(unittest.defaultTestLoader.getTestCaseNames(DistributedTest._DistTestBase))  # type: ignore[arg-type]


def rank() -> int:
    """The rank of this process, by the variables of torchrun, horovodrun or mtrain."""
    return int(
        next(os.environ[name] for name in ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
    )


def run(case: unittest.TestCase) -> tuple[str, str]:
    """Whether a test passed, failed or was skipped, and the last line of why."""
    result = unittest.TestResult()
    case.run(result)
    if told := [*result.errors, *result.failures]:
        why = told[0][1].strip().splitlines()[-1]
        if re.fullmatch(r"SystemExit: [78]\d", why):  # PyTorch's decorators leave the process to skip a test.
            return "skipped", why
        print(told[0][1], file=sys.stderr, flush=True)
        return "failed", why
    if result.skipped:
        return "skipped", result.skipped[0][1].splitlines()[0]
    return "passed", ""


def file_cases(path: Path) -> dict[str, unittest.TestCase]:
    """The tests of a file, by the name of their method."""
    sys.path[:0] = [str(path.parent), str(path.parents[1] / "utils")]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return {case.id().rpartition(".")[2]: case for case in each(unittest.defaultTestLoader.loadTestsFromModule(module))}


def each(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """The tests of a suite of suites."""
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from each(item)
        else:
            yield item


def torch_cases(folder: Path) -> dict[str, unittest.TestCase]:
    """PyTorch's tests of collectives and DDP, which come in its wheel, in the process group that this job's launcher describes."""
    for name in ("barrier", "test_dir"):
        (folder / "temp" / name).mkdir(parents=True, exist_ok=True)
    os.environ |= {"BACKEND": "gloo", "TEMP_DIR": str(folder / "temp")}
    import torch.distributed as dist
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

    dist.init_process_group("gloo")

    class OnRank(distributed_test.DistributedTest._DistTestBase, TestCase):  # type: ignore[misc]
        """Their tests, all in one group; where they start processes, each test makes its own."""

        rank = dist.get_rank()
        world_size = str(dist.get_world_size())
        file_name = str(folder / "temp" / "store")

    distributed_test.Barrier.init()
    return {name: OnRank(name) for name in unittest.defaultTestLoader.getTestCaseNames(OnRank)}


if __name__ == "__main__":
    if len(sys.argv) == 2:
        print("\n".join(names(sys.argv[1])))
    else:
        sys.exit(main(sys.argv[1], Path(sys.argv[2])))
