"""Ranks ask for huge pages, unless the caller's settings of glibc say otherwise."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.system.environment import TUNABLES, join_variables
from mtrain.system.placement import HUGE_PAGES

KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
USED = """
import re
arrays = [bytearray(b"x") * (8 << 20) for _ in range(10)]
pages = open("/proc/self/smaps").read()
print(sum(map(int, re.findall(r"AnonHugePages: +([0-9]+) kB", pages))))
"""


def test_a_plan_asks_for_huge_pages(capsys):
    assert main(["plan", "--json", "-c", "yolov5n", "-b", "solo"]) == 0
    assert json.loads(capsys.readouterr().out)["commands"][0]["env"][TUNABLES] == HUGE_PAGES


@pytest.mark.parametrize(
    ("callers", "expected"),
    [
        ({}, HUGE_PAGES),
        ({TUNABLES: ""}, HUGE_PAGES),
        ({TUNABLES: "glibc.malloc.hugetlb=0"}, f"{HUGE_PAGES}:glibc.malloc.hugetlb=0"),
    ],
)
def test_the_callers_settings_of_glibc_come_last(callers, expected):
    environ = {"KEPT": "yes", "THREADS": "8", **callers}
    assert join_variables(environ, {TUNABLES: HUGE_PAGES, "THREADS": "1"}) == {
        "KEPT": "yes", "THREADS": "1", TUNABLES: expected
    }  # fmt: skip
    assert join_variables(environ, {}) == environ


@pytest.mark.job
def test_a_process_gets_huge_pages_unless_its_caller_refuses_them():
    if not gives_huge_pages():
        pytest.skip("huge pages on request need glibc 2.35 and a kernel that is set to madvise")
    refused = {TUNABLES: "glibc.malloc.hugetlb=0"}
    assert huge_kilobytes(join_variables({}, {TUNABLES: HUGE_PAGES})) > 0
    assert huge_kilobytes(join_variables(refused, {TUNABLES: HUGE_PAGES})) == 0


def gives_huge_pages() -> bool:
    library, version = platform.libc_ver()
    new = library == "glibc" and tuple(map(int, version.split("."))) >= (2, 35)
    return new and KERNEL.exists() and "[madvise]" in KERNEL.read_text(encoding="ascii")


def huge_kilobytes(variables: dict[str, str]) -> int:
    environ = {name: value for name, value in os.environ.items() if name != TUNABLES}
    command = [sys.executable, "-c", USED]
    return int(subprocess.run(command, env=environ | variables, capture_output=True, text=True, check=True).stdout)
