"""A job with the user's own code, or a script, is given to Kubernetes with the files that it imports, under other paths."""

import sys
from pathlib import Path

import pytest
import yaml

from mtrain.commands import main
from mtrain.errors import UsageError

pytest.importorskip("kubernetes_validate", reason="the extra kube is not installed")
from tests.clusters import manifests as made
from tests.clusters.manifests import KINDS

FLAGS = ("--cluster", "kubernetes", "-N", "2", "-o", "cluster.options.image=mtrain:1")
CODE = {
    "train.py": "import helpers\nfrom parts.deep import layer\nimport torch, json\n",
    "helpers.py": "import json\n",
    "parts/__init__.py": "from .first import *\n",
    "parts/first.py": "from ..nowhere import x\n",
    "parts/deep/__init__.py": "",
    "parts/deep/layer.py": "from . import sister\nimport other\n",
    "parts/deep/sister.py": "# größer\n",
    "parts/unused.py": "",
    "unused.py": "",
}
IMPORTED = sorted(set(CODE) - {"parts/unused.py", "unused.py"})
NETS = "from layers import Block\n\nclass Net:\n    def __init__(self, width=4): ...\n"
DATA = "class Points:\n    def __init__(self): ...\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def _planned(capsys, *words: str) -> list[dict]:
    assert main(words) == 0, capsys.readouterr().err
    return list(yaml.safe_load_all(capsys.readouterr().out))


def _refusal(capsys, *words: str) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_takes_along_what_it_imports_and_the_values_that_were_set(folder, capsys, kind):
    _write(folder, CODE)
    (folder / "mine.yml").write_text("train: {batch_size: 16}\n")
    words = ["-c", "mine.yml", "-b", "ddp", "-o", "train.seed=7", "-o", f"cluster.options.kind={kind}", "--name", "one"]
    # The kubelet would replace $(HOME) in the command.
    documents = _planned(capsys, "submit", "--dry-run", *FLAGS, *words, "train.py", "--note", "$(HOME) $$x", "-N", "3")
    for document in documents:
        made.check(document)
    for pod in made.pods(documents):
        assert pod.argv[1:4] == ["-m", "mtrain", "run"]
        assert pod.argv[-5:] == ["/etc/mtrain-code/train.py", "--note", "$(HOME) $$x", "-N", "3"]
        code = {path.removeprefix("/etc/mtrain-code/"): text for path, text in pod.files.items() if "code" in path}
        assert code == {name: CODE[name] for name in IMPORTED}
        spec = yaml.safe_load(pod.files[pod.argv[pod.argv.index("-c") + 1]])
        assert (spec["train"], spec["backend"]) == ({"batch_size": 16, "seed": 7}, {"name": "ddp"})
        assert spec["report"]["dir"] == "/runs"
        assert str(folder) not in str(pod)


def test_own_classes_of_several_folders_keep_their_places_to_one_another(folder, capsys):
    _write(folder, {"a/nets.py": NETS, "a/layers.py": "", "b/points.py": DATA, "b/nets.py": "# not of this job\n"})
    (folder / "spec.yml").write_text(
        "model: {name: './a/nets.py:Net'}\ndata: {format: './b/points.py:Points'}\ntrain: {updates: 2}\n"
        "report: {reporters: {'./b/points.py:Points': false}}\n"
    )
    documents = _planned(capsys, "plan", "-c", "spec.yml", "-b", "ddp", *FLAGS)
    pod, _ = made.pods(documents)
    assert sorted(path for path in pod.files if "code" in path) == [
        f"/etc/mtrain-code/{name}" for name in ("a/layers.py", "a/nets.py", "b/points.py")
    ]
    spec = yaml.safe_load(pod.files["/etc/mtrain/spec.yml"])
    assert spec["model"]["name"] == "/etc/mtrain-code/a/nets.py:Net"
    assert spec["data"]["format"] == "/etc/mtrain-code/b/points.py:Points"


def test_own_code_that_no_config_map_holds_is_refused_with_its_largest_file(folder, capsys):
    _write(folder, {"train.py": "import table\n", "table.py": f"ROWS = '{'x' * (1 << 20)}'\n"})
    message = _refusal(capsys, "submit", "--dry-run", *FLAGS, "train.py")
    assert "table.py" in message
    assert "image" in message


def test_bytes_that_are_no_utf_8_arrive_as_they_are(folder, capsys):
    (folder / "train.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'größe'\n".encode("latin-1"))
    documents = _planned(capsys, "submit", "--dry-run", *FLAGS, "train.py")
    (code,) = [document for document in documents if document["metadata"]["name"].endswith("-code")]
    import base64

    assert [base64.b64decode(text) for text in code["binaryData"].values()] == [(folder / "train.py").read_bytes()]
    made.check(code)


def test_a_module_of_this_folder_and_a_local_plugin_are_refused_with_the_remedy(folder, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    _write(folder, {"nets.py": NETS, "points.py": DATA})
    (folder / "spec.yml").write_text("model: {name: 'nets:Net'}\ndata: {format: './points.py:Points'}\n")
    message = _refusal(capsys, "plan", "-c", "spec.yml", "-b", "ddp", "-o", "train.updates=2", *FLAGS)
    assert "nets:Net" in message
    assert "PATH.py:Name" in message
    for name in ("nets", "points"):
        sys.modules.pop(name, None)
    (folder / "plugins.toml").write_text('[backends.mine]\nmodule = "mtrain.backends.ddp:Ddp"\n')
    message = _refusal(capsys, "plan", "-c", "digits", "-b", "mine", *FLAGS)
    assert "mine" in message
    assert "plugins.toml" in message


def test_a_file_that_vanishes_is_named(folder):
    one = made.submission(arguments=(str(folder / "gone.py"),))
    with pytest.raises(UsageError, match=r"gone\.py"):
        made.documents(one, made.options())
