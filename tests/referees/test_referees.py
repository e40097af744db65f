"""What judges other projects' tests blames the test that failed, and nobody's besides."""

from pathlib import Path

import pytest

from tests.referees import __main__ as driver
from tests.referees.cases import CHECKOUTS, Referee, Suite

NAMES = ["test_a", "test_b", "test_c"]
SUITE = Suite("torch", ("theirs",), ("ours",))
REFEREE = Referee("torch", "torch", SUITE)


def tell(folder: Path, *ranks: str) -> None:
    for rank, lines in enumerate(ranks):
        told = [line for name in lines.split(",") for line in (f"{name.split()[0]} begun", name) if line]
        (folder / f"rank-{rank}.txt").write_text("\n".join(dict.fromkeys(told)) + "\n")


def test_a_rank_that_was_further_on_does_not_make_its_next_test_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(_argv: list[str], folder: Path, _environ: dict[str, str]) -> tuple[int, str]:
        asked.append((folder / "names.txt").read_text().split())
        if len(asked) == 1:
            tell(folder, "test_a passed ,test_b begun", "test_a failed AssertionError: 1 is not 2")
        else:
            tell(folder, *["test_b passed ,test_c skipped no GPU"] * 2)
        return 3 if len(asked) == 1 else 0, ""

    monkeypatch.setattr(driver, "run", run)
    outcomes = driver.run_tests(REFEREE, SUITE, NAMES, ("ours",))
    assert outcomes == {
        "test_a": ("failed", "AssertionError: 1 is not 2"),
        "test_b": ("passed", ""),
        "test_c": ("skipped", "no GPU"),
    }
    assert asked == [NAMES, NAMES[1:]]


@pytest.mark.parametrize(("code", "outcome"), [(None, ("hung", "")), (1, ("failed", "RuntimeError: gone"))])
def test_a_test_that_a_rank_began_and_did_not_end_hung_or_failed_with_the_job(
    code: int | None, outcome: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_argv: list[str], folder: Path, _environ: dict[str, str]) -> tuple[int | None, str]:
        if "test_a" in (folder / "names.txt").read_text():
            tell(folder, "test_a passed ", "test_a begun")
            return code, "RuntimeError: gone\nbye"
        return 1, "error: no launcher"

    monkeypatch.setattr(driver, "run", run)
    outcomes = driver.run_tests(REFEREE, SUITE, NAMES, ("ours",))
    assert outcomes["test_a"] == outcome
    # A job that does not start is not asked again for ever.
    assert outcomes["test_b"] == outcomes["test_c"] == ("failed", "error: no launcher")


@pytest.mark.parametrize(
    ("theirs", "ours", "reason"),
    [
        ("passed", "failed", "mend"),
        ("passed", "hung", "mend"),
        ("-", "failed", "mend"),
        ("failed", "failed", "fails there too"),
        ("hung", "failed", "fails there too"),
        ("failed", "passed", ""),
        ("skipped", "skipped", ""),
    ],
)
def test_a_failure_under_mtrain_alone_is_to_be_mended(theirs: str, ours: str, reason: str) -> None:
    assert driver.judge(theirs, "", ours, "")["reason"] == reason


def test_the_page_keeps_what_stands_around_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{driver.BEGIN}\nold\n{driver.END}\nafter\n")
    monkeypatch.setattr(driver, "PAGE", page)
    cases = {"a": driver.judge("passed", "", "passed", ""), "b": driver.judge("passed", "", "failed", "x | y")}
    driver.write({"torch": {"version": "2.13", "seconds": 90, "cases": cases}})
    text = page.read_text()
    assert text.startswith(f"before\n{driver.BEGIN}\n")
    assert text.endswith(f"{driver.END}\nafter\n")
    assert "old" not in text
    assert "| torch 2.13 | 2 | 2 | 1 | 0 | 1.5 |" in text
    assert "| torch | b | passed | failed | mend | x / y |" in text
    assert "| torch | a |" not in text


def test_tests_that_have_both_sides_are_started_once() -> None:
    assert driver.run_tests(REFEREE, SUITE, NAMES, ()) == dict.fromkeys(NAMES, ("-", ""))


def test_a_file_of_this_folder_is_found_and_the_wheel_of_torch_is_no_file() -> None:
    assert Path(Suite("hard_cases.py", (), ()).loader()).is_file()
    assert Suite("torch", (), ()).loader() == "torch"
    assert (
        Suite("horovod/test/parallel/test_torch.py", (), ()).loader().endswith("/horovod/test/parallel/test_torch.py")
    )


@pytest.mark.job
def test_a_command_in_another_folder_finds_the_checkouts(tmp_path: Path) -> None:
    found, output = driver.run(["sh", "-c", "echo $REFEREES; exit 3"], tmp_path, {})
    assert (found, output.strip()) == (3, str(CHECKOUTS))
    assert CHECKOUTS.is_absolute()
