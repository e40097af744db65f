"""The verb, called in this process."""

from pathlib import Path

from click.testing import CliRunner
from mtrain_hello.verb import hello


def test_it_counts_folders_that_have_a_spec(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "spec.yml").write_text("")
    done = CliRunner().invoke(hello, ["--name", "Ada", "--runs", str(tmp_path)])
    assert done.output == f"Hello, Ada: {tmp_path} has 1 run.\n"
