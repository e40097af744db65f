"""Damaged run folders, as a disk, another program or another person may leave them: every command says so in words."""

import os
import shutil

import pytest

import mtrain
from mtrain.commands import main
from mtrain.errors import MtrainError
from tests.system.test_links import contents, mask, trained  # noqa: F401  # fixtures

pytestmark = pytest.mark.smoke

DEEP = "[" * 100000


def written(name, content):
    def write(run):
        path = run / name
        if path.is_dir():
            shutil.rmtree(path)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


DAMAGES = {
    "metrics binary": written("metrics.jsonl", b"\xff\xfe\0\1" * 100),
    "metrics deep": written("metrics.jsonl", DEEP),
    "metrics list": written("metrics.jsonl", "[1]\n2\nnull\n"),
    "metrics kinds": written(
        "metrics.jsonl", '{"kind": "update"}\n{"kind": "evaluation"}\n{"kind": "start"}\n{"kind": "end"}\n'
    ),
    "metrics tables": written(
        "metrics.jsonl",
        '{"kind":"start","update":"x"}\n{"kind":"evaluation","update":1,"metrics":[1]}\n{"kind":"update","update":0,"losses":3}\n',
    ),
    "metrics types": written(
        "metrics.jsonl",
        '{"kind": "update","update":"x","losses":3,"time":"y"}\n{"kind":"evaluation","metrics":[1],"update":null}\n'
        '{"kind":["a"],"time":1}\n'
        '{"kind":"start","total_updates":"many","headline":7}\n',
    ),
    "metrics big numbers": written(
        "metrics.jsonl",
        '{"kind":"update","update":1e999,"losses":{"total":1e400},"time":-1e300,"learning_rate":1e999,"updates_per_epoch":0,"total_updates":-5}\n',
    ),
    "metrics huge int": written(
        "metrics.jsonl", '{"kind":"update","update":' + "9" * 5000 + ',"losses":{"total":1},"time":1}\n'
    ),
    "metrics folder": lambda run: ((run / "metrics.jsonl").unlink(), (run / "metrics.jsonl").mkdir()),
    "metrics pipe": lambda run: ((run / "metrics.jsonl").unlink(), os.mkfifo(run / "metrics.jsonl")),
    "summary list": written("summary.json", "[1,2]"),
    "summary deep": written("summary.json", DEEP),
    "summary types": written("summary.json", '{"best":[1],"metrics":3,"headline":"x","updates":"y"}'),
    "summary pipe": lambda run: ((run / "summary.json").unlink(), os.mkfifo(run / "summary.json")),
    "spec binary": written("spec.yml", b"\xff\xfe\0"),
    "spec deep": written("spec.yml", DEEP),
    "spec pipe": lambda run: ((run / "spec.yml").unlink(), os.mkfifo(run / "spec.yml")),
    "spec missing": lambda run: (run / "spec.yml").unlink(),
    "spec folder": lambda run: ((run / "spec.yml").unlink(), (run / "spec.yml").mkdir()),
    "checkpoints file": written("checkpoints", "x"),
    "manifest deep": written("checkpoints/step-00000004/MANIFEST.json", DEEP),
    "manifest types": written(
        "checkpoints/step-00000004/MANIFEST.json", '{"files":[1],"serial":"x","update":[],"score":{}}'
    ),
    "manifest escape": written(
        "checkpoints/step-00000004/MANIFEST.json",
        '{"format":1,"files":{"../../../../etc/passwd":{"size_bytes":1,"sha256":"x"}}}',
    ),
    "manifest pipe": lambda run: (
        (run / "checkpoints/step-00000004/MANIFEST.json").unlink(),
        os.mkfifo(run / "checkpoints/step-00000004/MANIFEST.json"),
    ),
    "lock pipe": lambda run: ((run / ".lock-0").unlink(), os.mkfifo(run / ".lock-0")),
    "details types": written("details.json", '{"details":[{"kind":3}],"update":"x"}'),
    "details deep": written("details.json", DEEP),
    "environment types": written("environment.json", "[[[]]]"),
    "logs file": lambda run: (shutil.rmtree(run / "logs"), (run / "logs").write_text("x")),
    "hosts types": written("hosts.jsonl", '{"hosts":3,"restarts":"x"}\n{"lost":[1]}\n'),
    "hosts pipe": lambda run: os.mkfifo(run / "hosts.jsonl"),
    "failures types": written("failures/rank-0.json", '{"time":"x","rank":[1]}'),
    "chosen deep": written("chosen.json", DEEP),
    "chosen types": written("chosen.json", '{"paths":[1,["a"],{}],"files":[1],"script":3,"arguments":[]}'),
    "chosen list": written("chosen.json", "[1]"),
    "chosen unknown": written(
        "chosen.json", '{"paths":["no.such.key","train.seed.x","","model"],"files":{"/etc/shadow":1}}'
    ),
    "chosen code": written("chosen.json", '{"paths":["backend.python","plugins"],"files":{},"script":"/bin/sh"}'),
    "chosen pipe": lambda run: ((run / "chosen.json").unlink(missing_ok=True), os.mkfifo(run / "chosen.json")),
    "chosen folder": lambda run: ((run / "chosen.json").unlink(missing_ok=True), (run / "chosen.json").mkdir()),
    "step name": lambda run: os.rename(run / "checkpoints/step-00000004", run / "checkpoints/step-\x1b[2J"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_run_folder_is_read_or_refused_in_words(trained, tmp_path, monkeypatch, name, capfd):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("kept")
    run = shutil.copytree(trained, tmp_path / "runs" / "small", symlinks=True)
    DAMAGES[name](run)
    for words in (["plan", "--resume"], ["report"], ["checkpoint", "list"], ["train", "--dry-run", "--resume"]):
        code = main([*words, str(run)])
        error = capfd.readouterr().err
        assert code in (0, 2), (words, code, error)
        assert "Traceback" not in error, (words, error)
    try:
        result = mtrain.open_run(run)
        assert isinstance(repr(result) + result._repr_html_(), str)
        assert len(result.records) >= 0
        result.plot()
    except MtrainError as refusal:
        assert str(run) in str(refusal)  # noqa: PT017
    assert contents(tmp_path / "outside") == {"file": (b"kept", 0o100000)}
