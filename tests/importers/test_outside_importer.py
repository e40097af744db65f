"""An importer in a folder of its own translates configs of a project that mtrain does not know."""

from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.errors import PluginError, SpecError
from mtrain.spec.importers.conversion import convert

PLUGIN = """
from mtrain.errors import SpecError
from mtrain.spec.importers.importer import Importer
from mtrain.spec.importers.key_report import Book


class Acme(Importer):
    expected = "an Acme job (`acme_version`)"

    def recognises(self, documents):
        return any("acme_version" in document.values for document in documents)

    def translate(self, documents, *, cards):
        if cards is not None:
            raise SpecError(f"--cards {cards}: Acme states no batch per card; leave it out")
        book = Book(documents[0])
        book.same("acme_version", "the only one")
        book.carry("step_size", "optimizer.learning_rate")
        book.assume("train.epochs", 3, "Acme always trains three epochs")
        book.close()
        return [book]
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme_importer.py").write_text(PLUGIN)
    (tmp_path / "plugins.toml").write_text('[importers.acme]\nmodule = "acme_importer:Acme"\n')
    file = tmp_path / "job.yml"
    file.write_text("acme_version: 1\nstep_size: 0.25\ncolour: red\n")
    return file


def test_an_outside_importer_writes_a_spec_where_it_is_named(job, capsys):
    assert main(["config", "import", str(job), "--from", "acme", "--to", "spec.yml"]) == 0
    report = capsys.readouterr().err
    assert "job.yml:2 step_size: 0.25 -> optimizer.learning_rate: 0.25" in report
    assert "job.yml:3 colour: red - no counterpart" in report
    assert main(["config", "explain", "optimizer.learning_rate", "-c", "spec.yml"]) == 0
    assert "optimizer.learning_rate = 0.25" in capsys.readouterr().out


def test_an_outside_importer_is_listed_and_never_chosen_by_itself(job, capsys):
    assert main(["plugins", "list", "importers"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        "acme",
        "paddledetection",
        "yolov5",
    ]
    with pytest.raises(
        SpecError,
        match=r"which fits no known kind of config; expected .*, or files of another project with --from acme",
    ):
        convert([job])


def test_an_importer_that_does_not_exist_is_answered_with_the_known_ones(job):
    with pytest.raises(PluginError, match=r"no importer 'acne' .*did you mean 'acme'"):
        convert([job], importer="acne")


def test_a_plugin_that_lacks_a_member_is_told_where_its_default_is(job):
    text = PLUGIN.replace("(Importer)", "").replace("    expected =", "    wanted =")
    Path("acme_bare.py").write_text(text + "    class Options(__import__('pydantic').BaseModel): ...\n")
    Path("plugins.toml").write_text('[importers.acme]\nmodule = "acme_bare:Acme"\n')
    with pytest.raises(
        PluginError, match=r"has no `expected`: derive the class from mtrain\.spec\.importers\.importer\.Importer"
    ):
        convert([job], importer="acme")
