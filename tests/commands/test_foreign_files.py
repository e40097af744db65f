"""A file of another project in the place of a spec is imported on the way, or named for what it is."""

import re
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.errors import SpecError
from mtrain.spec import config
from mtrain.spec.importers.conversion import convert

PADDLE = Path(__file__).parents[1] / "data" / "official_yaml" / "paddledetection"
PPYOLOE = PADDLE / "ppyoloe" / "ppyoloe_crn_s_300e_coco.yml"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_file_that_an_importer_knows_trains_as_its_import_does():
    taken = config.load(str(PPYOLOE), environ={})
    Path("imported.yml").write_text(convert([PPYOLOE]).text)
    assert taken.values == config.load("imported.yml", environ={}).values
    assert taken.name == PPYOLOE.stem
    told = "\n".join(taken.notes)
    assert "not carried over: print_flops, print_params - no counterpart" in told
    assert re.match(
        r"imported from .*: 107 keys carried over, 28 assumed, 14 not .*; each: mtrain config import '?/", told
    )
    assert len(taken.notes) < 20, "each key is told by `config import` alone"
    assert re.search(r"optimizer_300e\.yml:\d+ LearningRate\.base_lr$", str(taken.origin("optimizer.learning_rate")))


def test_flags_and_overrides_of_the_spec_are_above_the_file_and_those_of_its_own_keys_change_it():
    own = ["epoch=3", "TrainReader.batch_size=4", "LearningRate.base_lr=0.5"]
    loaded = config.load(
        str(PPYOLOE),
        overrides=[*own, "data.root=d"],
        flags={"backend.name": config.Given("fleet", "-b fleet")},
        environ={},
    )
    spec = loaded.spec
    assert (spec.train.epochs, spec.train.batch_size, spec.train.max_micro_batch) == (3, 32, 4)
    assert (spec.optimizer.learning_rate, spec.data.root, spec.backend.name) == (0.5, "d", "fleet")
    assert str(loaded.origin("train.epochs")) == "-o epoch=3 epoch"
    assert str(loaded.origin("optimizer.momentum")).endswith("optimizer.momentum"), "the rest of a section stays"


def test_a_mistake_is_told_at_its_place_in_the_file():
    Path("mine.yml").write_text(f"_BASE_: ['{PPYOLOE}']\nema_decay: 1.5\n")
    with pytest.raises(SpecError, match=r"mine\.yml:2 ema_decay: train\.ema\.decay: given 1\.5"):
        config.load("mine.yml", environ={})
    with pytest.raises(SpecError, match=r"sample_transforms: given \[NormalizeImage\], expected a list such as"):
        config.load(str(PPYOLOE), overrides=["EvalReader.sample_transforms=[NormalizeImage]"], environ={})
    with pytest.raises(SpecError, match=r"-o epohc=3: unknown key"):
        config.load(str(PPYOLOE), overrides=["epohc=3"], environ={})


NAMED = {
    "coco.yaml": (
        "path: ../coco\ntrain: train2017.txt\nval: val2017.txt\nnames: {0: a, 1: b}\n",
        "mtrain --data coco.yaml --cfg",
    ),
    "hyp.yaml": ("lr0: 0.01\nlrf: 0.1\n", "mtrain config import MODEL.yaml hyp.yaml DATA.yaml --to spec.yml"),
    "yolov5s.yaml": ("nc: 80\nbackbone: []\nhead: []\n", "mtrain --cfg yolov5s.yaml --data"),
    "rtmdet.py": (
        "_base_ = ['x.py']\nmodel = dict(type='RTMDet')\n",
        "would have to be executed.*mtrain run rtmdet.py",
    ),
    "best.pt": ("PK\x03\x04", "a file of weights: --weights best.pt"),
    "job.toml": ("[model]\nname = 'llama3'\n", "TOML, as torchtitan"),
    "lightning.yaml": (
        "seed_everything: 1\ntrainer: {devices: 2}\nmodel: {class_path: a.B}\n",
        "Lightning's command line",
    ),
    "config.json": (
        '{\n\t"model_type": "llama",\n\t"hidden_size": 64\n}\n',
        "model of Hugging Face: .*model.options.path",
    ),
    "rtdetr.yml": ("__include__: ['../dataset.yml']\nmodel: RTDETR\n", "RT-DETR's repository for PyTorch"),
    "faster.yaml": ("MODEL: {MASK_ON: false}\nSOLVER: {BASE_LR: 0.02}\n", "a config of Detectron2"),
    "args.yaml": ("task: detect\nmode: train\nmodel: yolov8n.pt\nimgsz: 640\n", "settings of an Ultralytics run"),
    "coco.json": (
        '{"images": [], "annotations": [], "categories": []}',
        "COCO's annotations: -o data.format=coco data.train=coco.json",
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_file_that_none_knows_is_named_for_what_it_is_with_what_to_do(name, capsys):
    text, words = NAMED[name]
    Path(name).write_text(text)
    assert main(["train", "-c", name]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1, told
    assert re.match(f"error: {re.escape(name)}: is .*{words}", told[0])


def test_a_plain_spec_asks_no_importer(monkeypatch):
    def fail(*_args, **_kwargs):
        pytest.fail("read a second time")

    monkeypatch.setattr("mtrain.spec.importers.translation.take", fail)
    Path("mine.yml").write_text("_BASE_: yolov5n\ntrain: {epochs: 1}\n")
    assert config.load("mine.yml", environ={}).spec.train.epochs == 1


def test_a_spec_with_a_mistake_is_still_a_spec(capsys):
    for text, message in (
        ("model: {name: yolov5n}\ntrian: {epochs: 1}\n", "bad.yml:2 trian: unknown key"),
        ("train: {epochs: 1}\nnames: [a]\n", "bad.yml:2 names: unknown key"),
        ("train: !Tag {epochs: 1}\n", "bad.yml:1 train: the tag !Tag is not allowed"),
        ("trainer: {epochs: 2}\nmodel: {name: yolov5s}\n", "bad.yml:1 trainer: unknown key; did you mean 'train'?"),
        ("fruit: apple\n", "bad.yml:1 fruit: unknown key"),
    ):
        Path("bad.yml").write_text(text)
        assert main(["config", "validate", "bad.yml"]) == 2
        assert message in capsys.readouterr().err


def test_a_file_without_its_base_is_told_by_its_importer(capsys):
    Path("alone.yml").write_text("_BASE_: ['../runtime.yml']\narchitecture: PPYOLOE\nepoch: 3\n")
    assert main(["train", "-c", "alone.yml"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told == ["error: alone.yml:1 _BASE_: no file ../runtime.yml; bases are named relative to the file"]


def test_a_teacher_alone_is_no_training(capsys):
    Path("slim.yml").write_text(f"_BASE_: ['{PPYOLOE}']\nslim: Distill\n")
    assert main(["train", "-c", "slim.yml"]) == 2
    assert "slim.yml: is what --slim_config takes, a teacher; give its student's file" in capsys.readouterr().err


def test_splits_of_a_voc_set_with_folders_of_their_own_are_told():
    sets = "TrainDataset: {name: VOCDataSet, dataset_dir: d, anno_path: a.txt, image_dir: one, label_list: l.txt}\n"
    for other in ("", "image_dir: two, "):
        own = f"EvalDataset: {{name: VOCDataSet, dataset_dir: d, anno_path: b.txt, {other}label_list: l.txt}}\n"
        Path("voc.yml").write_text(f"_BASE_: ['{PPYOLOE}']\nmetric: VOC\n{sets}{own}")
        loaded = config.load("voc.yml", overrides=["TrainDataset.image_dir=one"], environ={})
        assert loaded.spec.data.images is None
        assert any("images in different folders, which the spec cannot say" in note for note in loaded.notes)
