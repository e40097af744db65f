"""What files of data say is printed as text: a terminal obeys nothing of it, and no bracket is taken for a colour."""

from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.core.interfaces import Remark, Table
from tests.data_readers.class_images import image

STRANGE = "\x1b]0;owned\x07[bold]x[/bold]\x9b2J"


def test_a_strange_label_of_a_csv_file_does_not_reach_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "images").mkdir()
    rows = ["path,label"]
    for seed in range(8):
        (tmp_path / f"images/{seed}.png").write_bytes(image("dog", seed))
        rows.append(f"images/{seed}.png,{STRANGE if seed % 2 else 'dog'}")
    (tmp_path / "train.csv").write_text("\n".join(rows))
    monkeypatch.chdir(tmp_path)
    words = [
        "data",
        "check",
        "resnet18_folder",
        "-o",
        "data.format=csv_labels",
        "-o",
        f"data.root={tmp_path}",
        "-o",
        "data.val=train.csv",
    ]
    code = main(words)
    told = "".join(capsys.readouterr())
    assert code == 0, told
    assert "\x1b" not in told
    assert "\x07" not in told
    assert "\x9b" not in told
    assert "\\u001b]0;owned" in told


@pytest.mark.parametrize(
    "part", [Remark(text=STRANGE, good=False), Table(columns=("a", STRANGE), rows=[(STRANGE, "1"), None, ("b", "2")])]
)
def test_tables_and_remarks_are_text(part: Table | Remark, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from mtrain.commands.data import print_part

    print_part(Console(width=200), part)
    told = capsys.readouterr().out
    assert "[bold]x[/bold]" in told
    assert not {"\x1b", "\x07", "\x9b"} & set(told)
