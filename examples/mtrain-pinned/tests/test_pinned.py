"""The launcher `pinned`: its plan, the cores of its ranks, what it says of failures; and mtrain's own checks."""

import argparse
import subprocess
import sys

import pytest
from mtrain_pinned.launcher import Pinned
from mtrain_pinned.starter import cores_of, variables

from mtrain.core.interfaces import Host
from mtrain.errors import SpecError

HOSTS = (Host(address="10.0.0.1", slots=2), Host(address="10.0.0.2", slots=1))
STARTER = (sys.executable, "-m", "mtrain_pinned.starter", "--first-rank", "0", "--ranks", "2")
PLACE = ("--master", "127.0.0.1", "29500", "--endpoints", "127.0.0.1:29501,127.0.0.1:29502", "--grace-s", "5")
SECOND_FAILS = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(3); time.sleep(60)"


def pinned(**options: object) -> Pinned:
    return Pinned(Pinned.Options(python="python", **options))


def test_ranks_are_counted_over_hosts_with_different_numbers_of_them() -> None:
    first, second = pinned().plan(("-m", "worker"), HOSTS, 2)
    assert [command.host for command in (first, second)] == ["10.0.0.1", "10.0.0.2"]
    assert first.argv[3:7] == ("--first-rank", "0", "--ranks", "2")
    assert second.argv[3:7] == ("--first-rank", "2", "--ranks", "1")
    assert first.argv[-4:] == ("--", "python", "-m", "worker")


def test_every_rank_gets_the_place_that_torch_and_paddle_look_for() -> None:
    endpoints = "10.0.0.1:29501,10.0.0.1:29502,10.0.0.2:29501"
    given = argparse.Namespace(first_rank=2, ranks=1, endpoints=endpoints, master=("10.0.0.1", "29500"))
    place = variables(given, 0)
    assert (place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"]) == ("2", "0", "3")
    assert (place["PADDLE_TRAINER_ID"], place["PADDLE_CURRENT_ENDPOINT"]) == ("2", "10.0.0.2:29501")


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [([0, 1, 2, 3], 2, [{0, 1}, {2, 3}]), ([4, 6, 8], 2, [{4}, {6, 8}]), ([0], 2, [{0}, {0}])],
)
def test_cores_are_shared_out_and_none_is_left_over(cores: list[int], ranks: int, expected: list[set[int]]) -> None:
    assert [cores_of(cores, number, ranks) for number in range(ranks)] == expected


def test_a_rank_that_fails_ends_the_others_and_is_named() -> None:
    line = [*STARTER, *PLACE, "--pin", "--", sys.executable, "-c", SECOND_FAILS]
    process = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    assert process.returncode == 1
    assert pinned().deaths(process.stdout, process.returncode) == [(1, 3)]


def test_ports_beyond_the_last_one_are_refused_with_the_key() -> None:
    with pytest.raises(SpecError, match=r"cluster\.master_port: the ranks take the ports 65535 to 65536"):
        pinned(master_port=65534).plan((), HOSTS, 2)


def test_it_passes_the_checks_of_mtrain(tmp_path) -> None:
    line = [sys.executable, "-m", "mtrain", "plugins", "test", "pinned", "--kind", "launchers"]
    result = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
