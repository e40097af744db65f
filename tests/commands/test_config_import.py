"""`mtrain config import`: published configs become the shipped specs, and no key of theirs goes unmentioned."""

import json
import re
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.spec import config
from mtrain.spec.importers.conversion import convert
from mtrain.spec.importers.documents import read
from mtrain.spec.provenance import lookup

DATA = Path(__file__).parents[1] / "data"
PADDLE = DATA / "official_yaml" / "paddledetection"
YOLOV5 = DATA / "official_yaml" / "yolov5"
RESOLVED = json.loads((DATA / "golden_ppyoloe" / "configs_resolved.json").read_text())
FACTS = json.loads((DATA / "golden_yolov5" / "facts.json").read_text())
PPYOLOE_SIZES = tuple("smlx")
YOLOV5_SIZES = tuple("nsmlx")


def ppyoloe(size: str) -> Path:
    return PADDLE / "ppyoloe" / f"ppyoloe_crn_{size}_300e_coco.yml"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(text: str) -> config.Loaded:
    Path("imported_spec.yml").write_text(text, encoding="utf-8")
    return config.load("imported_spec.yml", environ={})


def spec_of(*files: Path, overrides=(), cards=None) -> config.Loaded:
    return load(convert(files, overrides=overrides, cards=cards).text)


def differences(a, b, path=()) -> dict[str, tuple]:
    """Return the differences of two resolved specs: dotted path -> both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return {k: v for key in keys for k, v in differences(a.get(key), b.get(key), (*path, key)).items()}
    return {} if a == b else {".".join(path): (a, b)}


def write(name: str, text: str) -> Path:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def variant_of(file: Path, old: str, new: str) -> Path:
    """A copy of a test file with one place changed; its bases stay where they are."""
    text = file.read_text()
    assert text.count(old) == 1, old
    text = (
        text.replace(old, new).replace("'../", f"'{file.parent.parent}/").replace("'./_base_", f"'{file.parent}/_base_")
    )
    return write(f"changed/{file.name}", text)


def fails(capsys, *arguments: object) -> str:
    """The one line of an import that is refused."""
    assert main(["config", "import", *map(str, arguments)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert len(lines) == 1, output.err
    assert lines[0].startswith("error: ")
    return lines[0]


# PP-YOLOE


@pytest.mark.parametrize("size", "smlx")
def test_the_files_here_say_what_the_published_ones_resolve_to(size):
    document, facts = read(ppyoloe(size)), RESOLVED[size]
    for key, value in facts.items():
        if not key.startswith("_"):
            assert document.get((key,)) == value, key
    assert set(facts) - set(document.values) == {key for key in facts if key.startswith("_")}
    head = document.get(("PPYOLOEHead",))
    for key, value in head.items():
        stated = {k: v for k, v in value.items() if k != "name"} if isinstance(value, dict) else value
        actual = {k: facts["_head"][key][k] for k in stated} if isinstance(value, dict) else facts["_head"][key]
        assert actual == stated, key


SHIPPED_DIFFERS = {
    "data.root": "ours is where we unpack COCO",
    "data.train": "theirs names COCO's file; ours leaves it to the format's usual places, which hold it",
    "data.val": "the same",
    "data.workers": "theirs is 4 a card; ours goes by the cores of the machine",
    "evaluate.batch_size": "theirs is 2 a card; ours is the micro batch",
    "report.dir": "theirs is `output`; ours is mtrain's own run folder",
    "report.every_updates": "theirs is 100, for the console; ours records every update",
}
"""Why the shipped config says otherwise than the published file."""


@pytest.mark.parametrize("size", "smlx")
def test_an_official_file_becomes_the_shipped_config(size):
    imported, shipped = spec_of(ppyoloe(size)), config.load(f"ppyoloe_{size}", environ={})
    actual = differences(imported.values, shipped.values)
    assert set(actual) == set(SHIPPED_DIFFERS)
    assert actual["data.root"] == ("dataset/coco", "data/coco")
    assert imported.spec.model.name == f"ppyoloe_{size}"


@pytest.mark.parametrize(
    "files",
    [(ppyoloe("s"),), (ppyoloe("x"),), (YOLOV5 / "yolov5m.yaml", YOLOV5 / "hyp.VOC.yaml", YOLOV5 / "cells.yaml")],
    ids=str,
)
def test_every_key_is_told_once(files):
    imported = convert(files)
    message = sorted(f"{entry.place} {entry.key}" for entry in (*imported.carried, *imported.dropped))
    original = sorted(
        f"{document.place(leaf)} {'.'.join(map(str, leaf))}"
        for document in map(read, files)
        for leaf in document.leaves()
    )
    assert message == original


def test_what_an_official_file_cannot_carry_over_is_this():
    dropped = {entry.key: entry.remark for entry in convert([ppyoloe("s")]).dropped}
    assert set(dropped) == {
        *(f"TestDataset.{key}" for key in ("name", "dataset_dir", "anno_path")),
        *(f"export.{key}" for key in ("post_process", "nms", "benchmark", "fuse_conv_bn")),
        *("TestReader.batch_size", "custom_black_list", "weights", "num_classes", "pretrain_weights"),
        *("print_flops", "print_params"),
    }
    assert "mtrain weights import FILE --model ppyoloe_s" in dropped["pretrain_weights"]
    assert dropped["print_flops"] == "no counterpart"


def test_cards_say_what_the_batch_per_card_comes_to():
    imported = convert([ppyoloe("s")], cards=2)
    train = load(imported.text).spec.train
    assert (train.batch_size, train.reference_batch_size, train.max_micro_batch) == (16, 16, 8)
    assert train.learning_rate_scaling == "linear"
    assert any("16 = 2 cards x 8: as --cards says" in note for note in imported.notes)
    assert any("64 = 8 cards x 8: PaddleDetection's own files" in note for note in convert([ppyoloe("s")]).notes)


def test_the_distortion_of_later_versions_is_told_and_can_be_taken():
    (note,) = (note for note in convert([ppyoloe("s")]).notes if "September 2023" in note)
    later = convert([ppyoloe("s")], overrides=note.split("-o ")[1].split())
    distort = load(later.text).spec.data.augment.distort
    assert (distort.form, distort.hue) == ("enhance", 25.3125)


def test_comments_say_where_values_are_from(capsys, monkeypatch):
    monkeypatch.chdir(PADDLE)
    assert main(["config", "import", "ppyoloe/ppyoloe_crn_s_300e_coco.yml", "-o", "train.seed=3"]) == 0
    output = capsys.readouterr()
    assert "learning_rate: 0.01  # ppyoloe/_base_/optimizer_300e.yml:8 LearningRate.base_lr" in output.out
    assert "clip_norm: null  # PaddleDetection's default" in output.out
    assert "seed: 3  # -o train.seed=3" in output.out
    assert "  runtime.yml:6 print_flops: false - no counterpart" in output.err.splitlines()
    assert "  train.clip_norm: null - PaddleDetection's default" in output.err.splitlines()
    assert "print_flops" not in output.out


@pytest.mark.parametrize(("kind", "momentum"), [("SGD", 0.0), ("Momentum", 0.9)])
def test_plain_sgd_has_no_momentum(kind, momentum):
    optimizer = "{type: SGD}" if kind == "SGD" else "{type: Momentum, momentum: 0.9}"
    text = f"_BASE_: ['{ppyoloe('m')}']\nOptimizerBuilder:\n  optimizer: {optimizer}\n"
    actual = load(convert([write("plain.yml", text)]).text).spec.optimizer
    assert (actual.rule, actual.momentum) == ("sgd", momentum)


def test_adam_decays_by_the_regularizer_and_no_batchnorm_and_only_adamw_has_a_decay_of_its_own():
    text = f"_BASE_: ['{ppyoloe('m')}']\nOptimizerBuilder:\n  optimizer: {{type: Adam}}\n  regularizer: {{type: L2, factor: 0.0003}}\n"
    actual = load(convert([write("adam.yml", text)]).text).spec.optimizer
    assert (actual.rule, actual.weight_decay) == ("adam", 0.0003)
    assert [(group.match, group.weight_decay) for group in actual.groups] == [
        (r"\.bn\.(weight|bias)$", 0.0),
        ("", None),
    ]


def test_other_optimizers_schedules_and_averages(tmp_path):
    file = write(
        "other.yml",
        f"""
_BASE_: ['{ppyoloe("m")}']
use_ema: false
norm_type: bn
amp: true
use_gpu: false
epoch: 36
LearningRate:
  base_lr: 0.001
  schedulers:
    - name: PiecewiseDecay
      gamma: 0.1
      milestones: [24, 33]
    - name: LinearWarmup
      start_factor: 0.1
      steps: 500
OptimizerBuilder:
  clip_grad_by_norm: 35.0
  regularizer: null
  optimizer: {{type: AdamW, weight_decay: 0.05, beta1: 0.8}}
TrainReader:
  sample_transforms:
    - Decode: {{}}
    - RandomExpand: {{prob: 0.2, ratio: 2.0, fill_value: 114}}
    - Cutmix: {{alpha: 1.5}}
  batch_transforms:
    - BatchRandomResize: {{target_size: 512, random_size: false, random_interp: false, interp: 1, keep_ratio: false}}
pretrain_weights: start/best_model
PPYOLOEHead:
  static_assigner_epoch: -1
  assigner: {{topk: 10}}
  nms: {{keep_top_k: 100}}
""",
    )
    imported = convert([file])
    spec = load(imported.text).spec
    assert spec.train.ema is None
    assert not spec.train.sync_batchnorm
    assert (spec.train.precision, spec.train.clip_norm, spec.train.epochs) == ("fp16", 35.0, 36)
    assert (spec.optimizer.rule, spec.optimizer.learning_rate, spec.optimizer.momentum) == ("adamw", 0.001, 0.8)
    assert spec.optimizer.weight_decay == 0.05
    assert [group.match for group in spec.optimizer.groups] == [""]
    assert (spec.schedule.name, spec.schedule.milestones, spec.schedule.gamma) == ("step", [24, 33], 0.1)
    warmup = spec.schedule.warmup
    assert (warmup.epochs, warmup.updates, warmup.before_curve) == (None, 500, False)
    assert warmup.learning_rate_from == pytest.approx(0.0001)
    augment = spec.data.augment
    assert (augment.expand.probability, augment.expand.ratio, augment.expand.fill) == (0.8, 2.0, [114.0] * 3)
    assert (augment.distort, augment.crop, augment.flip_lr) == (None, None, 0.0)
    assert (augment.sizes, augment.interpolations) == ([512], ["linear"])
    assert spec.backend.options == {"device": "cpu"}
    assert spec.model.weights == "start/best_model.pdparams"
    assert spec.model.options == {"static_assigner_epoch": 0, "max_detections": 100}
    dropped = {entry.key: entry.remark for entry in imported.dropped}
    assert dropped["TrainReader.sample_transforms.2.Cutmix.alpha"] == "mtrain has no such transform"
    assert dropped["PPYOLOEHead.assigner.topk"] == "fixed at 13 in mtrain's PP-YOLOE"


def test_a_steep_schedule_that_no_single_factor_describes_is_told_and_left_out():
    file = variant_of(
        ppyoloe("s"), "snapshot_epoch: 10", "LearningRate: {schedulers: [!PiecewiseDecay {gamma: [0.5, 0.1]}]}"
    )
    imported = convert([file])
    assert load(imported.text).spec.schedule.name == "constant"
    assert any("steps of PiecewiseDecay" in note for note in imported.notes)
    assert any(entry.key.endswith("gamma") for entry in imported.dropped)


def test_what_the_head_leaves_out_is_paddledetections_default_and_minus_one_is_all():
    head = "PPYOLOEHead: !PPYOLOEHead {loss_weight: {class: 1.0, iou: 2.5, dfl: 0.5}}"
    imported = convert([variant_of(ppyoloe("s"), "log_iter: 100", head)])
    assert load(imported.text).spec.model.options == {
        "static_assigner_epoch": 4,
        "max_candidates": 100_000,
        "max_detections": 100,
        "confidence": 0.05,
        "iou_threshold": 0.5,
    }
    assert imported.assumed["model.options.static_assigner_epoch"].source == "PaddleDetection's default"
    limits = "PPYOLOEHead: {nms: {nms_top_k: -1, keep_top_k: -1}}"
    imported = convert([variant_of(ppyoloe("s"), "log_iter: 100", limits)])
    assert load(imported.text).spec.model.options == {"max_candidates": 100_000, "max_detections": 100_000}


@pytest.mark.parametrize(("resize", "note_count"), [("{interp: 2, target_size: 640}", 0), ("{target_size: 640}", 1)])
def test_another_interpolation_in_evaluation_is_noted_stated_or_not(resize, note_count):
    reader = f"EvalReader: {{batch_size: 2, sample_transforms: [Decode: {{}}, Resize: {resize}]}}"
    imported = convert([variant_of(ppyoloe("s"), "log_iter: 100", reader)])
    assert sum("cubic interpolation" in note for note in imported.notes) == note_count


def test_images_in_one_folder_and_a_second_data_root():
    file = variant_of(
        ppyoloe("s"),
        "log_iter: 100",
        "TrainDataset: !COCODataSet {dataset_dir: sets/a, anno_path: train.json, image_dir: images, allow_empty: true}\n"
        "EvalDataset: !COCODataSet {dataset_dir: sets/b, anno_path: val.json, image_dir: images, allow_empty: true}",
    )
    imported = convert([file])
    data = load(imported.text).spec.data
    assert (data.root, data.train, data.val, data.images) == ("sets/a", "train.json", "../b/val.json", "images")
    assert not any("images without boxes" in note for note in imported.notes)
    assert not any(entry.key.startswith("TrainDataset.data_fields") for entry in imported.dropped), "a tag replaces"


# YOLOv5


def test_the_hyper_parameters_here_are_the_published_ones():
    for name in ("scratch-low", "VOC"):
        assert read(YOLOV5 / f"hyp.{name}.yaml").values == FACTS[f"hyp.{name}"]


@pytest.mark.parametrize("size", YOLOV5_SIZES)
def test_model_and_hyper_parameters_become_the_shipped_config(size):
    imported = spec_of(YOLOV5 / f"yolov5{size}.yaml", YOLOV5 / "hyp.scratch-low.yaml")
    shipped = config.load(f"yolov5{size}", environ={})
    assert set(differences(imported.values, shipped.values)) == {"data.format", "data.root"}, "no data YAML was given"


def test_the_published_hyper_parameters_are_the_shipped_recipe():
    imported, shipped = spec_of(YOLOV5 / "hyp.scratch-low.yaml"), config.load("_base_/yolov5.yml", environ={})
    assert differences(imported.values, shipped.values) == {"train.epochs": (300, None)}


def test_other_hyper_parameters_reach_options_and_groups():
    spec = spec_of(YOLOV5 / "yolov5m.yaml", YOLOV5 / "hyp.VOC.yaml").spec
    hyp = FACTS["hyp.VOC"]
    options = {
        "box": "box",
        "cls": "cls",
        "obj": "obj",
        "cls_pw": "cls_pw",
        "obj_pw": "obj_pw",
        "anchor_t": "anchor_threshold",
    }
    assert spec.model.options == {**{ours: hyp[theirs] for theirs, ours in options.items()}, "anchors": "auto"}
    assert spec.optimizer.groups[0].warmup_from == hyp["warmup_bias_lr"]
    assert (spec.schedule.final_factor, spec.schedule.warmup.epochs) == (hyp["lrf"], hyp["warmup_epochs"])
    assert spec.data.augment.mosaic == hyp["mosaic"]


def test_copy_paste_is_told_unless_it_is_off():
    low, high = (convert([write(f"{value}.yaml", f"lr0: 0.01\ncopy_paste: {value}\n")]) for value in ("0.0", "0.1"))
    assert [entry.key for entry in low.dropped] == []
    assert [entry.key for entry in high.dropped] == ["copy_paste"]


@pytest.mark.parametrize("names", ["[platelets, rbc, wbc]", "{0: platelets, 1: rbc, 2: wbc}"])
def test_a_data_yaml_gives_paths_and_names(names):
    file = write("cells.yaml", f"path: /data/cells\ntrain: images/a\nval: images/b\nnc: 3\nnames: {names}\n")
    data = spec_of(file).spec.data
    assert (data.format, data.root, data.train, data.val) == ("yolo", "/data/cells", "images/a", "images/b")
    assert data.names == ["platelets", "rbc", "wbc"]


def test_a_data_yaml_that_names_several_folders_is_read_by_the_data_set_itself():
    file = write("several.yaml", "path: .\ntrain: [images/a, images/b]\nval: images/c\nnames: [x, y]\n")
    data = spec_of(file).spec.data
    assert data.options == {"description": str(file.resolve())}
    assert (data.train, data.val) == (None, None)


def test_what_a_data_yaml_leaves_out_is_assumed_aloud():
    imported = convert([write("bare.yaml", "train: a\nval: b\nnc: 2\n")])
    data = load(imported.text).spec.data
    assert (data.root, data.names) == (".", ["class0", "class1"])
    assert "data.root" in imported.assumed


def test_an_imported_data_yaml_finds_the_images(capsys):
    folder = DATA / "bccd_small" / "yolo"
    imported = convert([folder / "data.yaml"], overrides=[f"data.root={folder}"])
    Path("cells.yml").write_text(imported.text)
    assert main(["data", "check", "-c", "cells.yml"]) == 0
    assert "platelets" in capsys.readouterr().out.lower()


# The command


def test_the_spec_goes_to_the_file_and_an_old_one_is_kept(capsys, tmp_path):
    arguments = ["config", "import", str(YOLOV5 / "hyp.scratch-low.yaml"), "--to", "mine.yml"]
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.endswith("written: mine.yml\n")
    assert main(["config", "validate", "mine.yml"]) == 0
    capsys.readouterr()
    assert "--to mine.yml: exists" in fails(capsys, *arguments[2:])
    assert main([*arguments, "--force"]) == 0
    capsys.readouterr()
    assert "no folder" in fails(capsys, YOLOV5 / "hyp.scratch-low.yaml", "--to", "nowhere/mine.yml")


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("optimizer.groups.0.weight_decay=0.1", "optimizer.groups.0.weight_decay", 0.1),
        ("train.ema=null", "train.ema", None),
        ("train.ema.decay=0.5", "train.ema.decay", 0.5),
        ("data.augment={mosaic: 0.25, mixup: 0.5}", "data.augment.mosaic", 0.25),
        ("model.options.autobalance=true", "model.options.autobalance", True),
        ("train.updates=7", "train.epochs", None),
        ("train.updates=7", "train.updates", 7),
    ],
)
def test_overrides_end_up_in_the_text(override, path, value):
    loaded = spec_of(YOLOV5 / "yolov5s.yaml", YOLOV5 / "hyp.scratch-low.yaml", overrides=[override])
    assert lookup(loaded.values, tuple(path.split("."))) == value


def test_several_overrides_follow_one_flag(capsys):
    assert (
        main(["config", "import", str(ppyoloe("s")), "-o", "train.epochs=3", "data.root=coco", "--set", "train.seed=1"])
        == 0
    )
    spec = load(capsys.readouterr().out).spec
    assert (spec.train.epochs, spec.data.root, spec.train.seed) == (3, "coco", 1)


PLAIN_IMAGES = "{NormalizeImage: {mean: [0., 0., 0.], std: [1., 1., 1.], norm_type: none}}"


@pytest.mark.parametrize(
    ("plain", "backbone", "neck", "model", "factors"),
    [
        (True, True, False, "ppyoloe_plus_s", None),
        (True, False, False, "ppyoloe_plus_s", "none"),  # the files of Objects365
        (True, True, True, "ppyoloe_plus_s", "everywhere"),  # those of SKU-110K
        (False, True, False, "ppyoloe_s", "backbone"),
        (False, False, False, "ppyoloe_s", None),
    ],
)
def test_normalisation_names_the_model_and_factors_are_an_option(plain, backbone, neck, model, factors):
    readers = (
        f"TrainReader: {{batch_transforms: [{PLAIN_IMAGES}]}}\nEvalReader: {{sample_transforms: [{PLAIN_IMAGES}]}}\n"
        f"TestReader: {{sample_transforms: [{PLAIN_IMAGES}]}}\n"
    )
    file = write(
        "mine.yml",
        f"_BASE_: ['{ppyoloe('s')}']\nCSPResNet: {{use_alpha: {backbone}}}\nCustomCSPPAN: {{use_alpha: {neck}}}\n"
        + readers * plain,
    )
    spec = load(convert([file]).text).spec
    assert (spec.model.name, spec.model.options.get("factors")) == (model, factors)


RTDETR = """
_BASE_: [{coco}]
architecture: DETR
norm_type: sync_bn
use_ema: true
ema_decay: 0.9999
ema_decay_type: exponential
ema_filter_no_grad: true
hidden_dim: 256
use_focal_loss: true
eval_size: [640, 640]
epoch: 12
DETR: {{backbone: {backbone}, neck: HybridEncoder, transformer: RTDETRTransformer, detr_head: DINOHead, post_process: DETRPostProcess}}
ResNet:
  {{depth: 34, variant: d, norm_type: bn, freeze_at: 0, freeze_stem_only: true, return_idx: [1, 2, 3], lr_mult_list: [.1, .1, .1, .1]}}
PPHGNetV2: {{arch: X, return_idx: [1, 2, 3], freeze_at: -1, freeze_norm: false, lr_mult_list: [0., .01, .01, .01, .01]}}
SwinTransformer: {{arch: swin_L_384, ape: false, drop_path_rate: 0.1, patch_norm: true, out_indices: [1, 2, 3]}}
HybridEncoder:
  hidden_dim: 384
  use_encoder_idx: [2]
  num_encoder_layers: 2
  encoder_layer: {{name: TransformerLayer, d_model: 384, nhead: 8, dim_feedforward: 2048, dropout: 0., activation: gelu}}
  expansion: 1
RTDETRTransformer:
  {{num_queries: 200, position_embed_type: sine, feat_strides: [8, 16, 32], num_levels: 3, nhead: 8, num_decoder_layers: 4, eval_idx: 2}}
DINOHead:
  loss:
    name: DINOLoss
    loss_coeff: {{class: 1, bbox: 4, giou: 2}}
    use_vfl: true
    matcher: {{name: HungarianMatcher, matcher_coeff: {{class: 3, bbox: 5, giou: 2}}}}
DETRPostProcess: {{num_top_queries: 100}}
LearningRate:
  base_lr: 0.0001
  schedulers: [!PiecewiseDecay {{gamma: 1.0, milestones: [100], use_warmup: true}}, !LinearWarmup {{start_factor: 0.001, steps: 2000}}]
OptimizerBuilder:
  clip_grad_by_norm: 0.1
  regularizer: false
  optimizer: {{type: AdamW, weight_decay: 0.0001{groups}}}
TrainReader:
  batch_size: 4
  sample_transforms: [{{Decode: {{}}}}, {{RandomDistort: {{prob: 0.8}}}}, {{RandomFlip: {{}}}}]
  batch_transforms:
    [{{BatchRandomResize: {{target_size: [480, 640], keep_ratio: false}}}}, {plain}, {{NormalizeBox: {{}}}}, {{Permute: {{}}}}]
EvalReader:
  sample_transforms: [{{Decode: {{}}}}, {{Resize: {{target_size: [640, 640], keep_ratio: false, interp: 2}}}}, {plain}]
"""


def rtdetr(backbone: str, *, change: tuple[str, str] = ("", ""), groups: str = "") -> Path:
    text = RTDETR.format(
        coco=PADDLE / "datasets/coco_detection.yml",
        backbone=backbone,
        plain=PLAIN_IMAGES,
        groups=groups,
    )
    assert change[0] in text
    return write("rtdetr.yml", text.replace(*change) if change[0] else text)


def test_rtdetr_becomes_transformers_configuration_and_the_backbone_a_group():
    loaded = load(convert([rtdetr("ResNet")]).text)
    spec, config_ = loaded.spec, loaded.spec.model.options["config"]
    assert spec.model.name == "rt_detr"
    assert config_["backbone_config"] == {
        "model_type": "rt_detr_resnet", "layer_type": "basic", "embedding_size": 64, "depths": [3, 4, 6, 3],
        "hidden_sizes": [64, 128, 256, 512], "out_features": ["stage2", "stage3", "stage4"],
    }  # fmt: skip
    expected = {
        "encoder_in_channels": [128, 256, 512], "decoder_in_channels": [384] * 3, "encoder_hidden_dim": 384, "d_model": 256,
        "encoder_layers": 2, "encoder_ffn_dim": 2048, "decoder_layers": 4, "num_queries": 200, "hidden_expansion": 1.0,
        "weight_loss_bbox": 4.0, "matcher_class_cost": 3.0, "freeze_backbone_batch_norms": True,
    }  # fmt: skip
    assert {name: config_[name] for name in expected} == expected
    assert isinstance(config_["weight_loss_bbox"], float), "transformers takes no whole number there"
    assert spec.model.options["max_detections"] == 100
    assert (spec.train.batch_size, spec.train.clip_norm, spec.train.freeze) == (
        16,
        0.1,
        [r"^model\.backbone\.model\.embedder\."],
    )
    assert [(group.match, group.learning_rate_factor) for group in spec.optimizer.groups] == [
        (r"^model\.backbone\.", 0.1),
        ("", 1.0),
    ]
    assert (spec.optimizer.rule, spec.optimizer.weight_decay) == ("adamw", 0.0001)
    assert (spec.schedule.name, spec.schedule.gamma, spec.schedule.warmup.updates) == ("step", 1.0, 2000)


def test_other_backbones_of_rtdetr_and_its_groups_without_decay():
    hgnet = load(convert([rtdetr("PPHGNetV2")]).text).spec
    assert hgnet.model.options["config"]["backbone_config"]["stage_num_blocks"] == [1, 2, 5, 2]
    assert hgnet.model.options["config"]["freeze_backbone_batch_norms"] is False
    stem = [r"^model\.backbone\.model\.embedder\."]
    assert (hgnet.train.freeze, hgnet.optimizer.groups[0].learning_rate_factor) == (stem, 0.01), (
        "a factor of 0 is a frozen stem"
    )
    for factors in ("[.1, .01, .01, .01, .01]", "[.01, .01, .1, .01]", "[0., .01, .1, .01, .01]", "[[1], 2]"):
        other = convert([rtdetr("PPHGNetV2", change=("[0., .01, .01, .01, .01]", factors))])
        assert "PPHGNetV2.lr_mult_list" in [entry.key for entry in other.dropped]
    both = convert([rtdetr("ResNet", groups=", param_groups: [{params: [norm], weight_decay: 0.0}]")])
    assert any("param_groups" in entry.key for entry in both.dropped)
    assert load(both.text).spec.optimizer.groups[0].learning_rate_factor == 0.1, "not lost to the groups without decay"
    names = ", param_groups: [{params: [relative_position_bias_table, .norm], weight_decay: 0.0}]"
    swin = load(convert([rtdetr("SwinTransformer", groups=names)]).text).spec
    assert swin.model.options["config"]["encoder_in_channels"] == [384, 768, 1536]
    assert swin.model.options["config"]["backbone_config"]["drop_path_rate"] == 0.1
    assert [(group.match, group.weight_decay) for group in swin.optimizer.groups] == [
        (r"relative_position_bias_table|\.norm", 0.0), ("", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "position_embed_type: sine",
            "query_pos_head_inv_sig: true",
            r"query_pos_head_inv_sig: given true, expected false",
        ),
        ("depth: 34", "depth: 200", r"ResNet\.depth: given 200, expected variant d with one of 18, 34"),
        ("expansion: 1\n", "depth_mult: 2.0\n", r"HybridEncoder\.depth_mult: given 2\.0, expected 1\.0"),
        ("neck: HybridEncoder", "neck: FPN", r"DETR\.neck: given FPN, expected HybridEncoder"),
        ("d_model: 384", "d_model: 256", r"encoder_layer\.d_model: given 256, expected 384"),
        (
            "return_idx: [1, 2, 3], lr_mult",
            "return_idx: [0, 1, 2], lr_mult",
            r"ResNet\.return_idx: .*the last three stages",
        ),
        (
            "transformer: RTDETRTransformer",
            "transformer: DINOTransformer",
            r"architecture: given DETR, which mtrain does not have",
        ),
    ],
)
def test_another_detr_is_refused_where_it_differs(old, new, message, capsys):
    assert re.search(message, fails(capsys, rtdetr("ResNet", change=(old, new))))


def test_lists_and_order_of_classes_of_a_voc_set_are_kept(capsys):
    data = """
TrainDataset: {name: VOCDataSet, dataset_dir: roads, anno_path: trainval.txt, label_list: label_list.txt}
EvalDataset: {name: VOCDataSet, dataset_dir: roads, anno_path: test.txt, label_list: %s}
"""
    file = write("voc.yml", f"_BASE_: ['{ppyoloe('s')}']\n" + data % "label_list.txt")
    spec = load(convert([file]).text).spec
    assert (spec.data.format, spec.data.root, spec.data.train, spec.data.val) == (
        "voc",
        "roads",
        "trainval.txt",
        "test.txt",
    )
    assert spec.data.options == {"label_list": "label_list.txt"}
    write("voc.yml", f"_BASE_: ['{ppyoloe('s')}']\n" + data % "others.txt")
    assert re.search(r"EvalDataset\.label_list: given others\.txt, expected label_list\.txt", fails(capsys, file))


SLIM = """
_BASE_: ['{teacher}']
for_distill: true
pretrain_weights: https://example.org/models/ppyoloe_crn_l_300e_coco.pdparams
slim: Distill
slim_method: PPYOLOEDistill
distill_loss: DistillPPYOLOELoss
DistillPPYOLOELoss: {{loss_weight: {{logits: 4.0, feat: 2.0}}, logits_distill: true, feat_distill: {features}, feat_distiller: fgd}}
"""


@pytest.mark.parametrize(("features", "expected"), [("true", 0.25), ("false", 0.0)])
def test_the_file_of_slim_config_names_the_teacher(features, expected, capsys):
    student = write("student.yml", f"_BASE_: ['{ppyoloe('s')}']\nfor_distill: true\n")
    slim = write("slim.yml", SLIM.format(teacher=ppyoloe("l"), features=features))
    for files in ([student, slim], [slim, student]):
        imported = convert(files)
        spec = load(imported.text).spec
        assert spec.model.name == "ppyoloe_s"
        distil = spec.train.distil
        assert distil is not None
        assert (distil.teacher, distil.model) == ("ppyoloe_crn_l_300e_coco.pdparams", "ppyoloe_l")
        assert (distil.labels, distil.outputs, distil.features) == (0.125, 0.5, expected)
        assert any("fetch https://example.org" in note for note in imported.notes)
    alone = convert([student])
    assert load(alone.text).spec.train.distil is None
    assert any("mtrain config import student.yml SLIM.yml" in note for note in alone.notes)
    assert "import a config of PaddleDetection alone" in fails(capsys, student, slim, slim)


@pytest.mark.parametrize("size", "smlx")
def test_ppyoloe_plus_is_told_by_its_factors(size):
    normalised = "{NormalizeImage: {mean: [0., 0., 0.], std: [1., 1., 1.], norm_type: none}}"
    decoded, stretched = "{Decode: {}}", "{Resize: {target_size: [640, 640], keep_ratio: False, interp: 2}}"
    file = write(
        "plus.yml",
        f"_BASE_: ['{ppyoloe(size)}']\nepoch: 80\nCSPResNet: {{use_alpha: True}}\nPPYOLOEHead: {{static_assigner_epoch: 30}}\n"
        "LearningRate:\n  base_lr: 0.001\n  schedulers:\n"
        "    - {name: CosineDecay, max_epochs: 96}\n    - {name: LinearWarmup, start_factor: 0., epochs: 5}\n"
        f"TrainReader: {{batch_transforms: [{normalised}]}}\n"
        + "".join(
            f"{reader}: {{sample_transforms: [{decoded}, {stretched}, {normalised}]}}\n"
            for reader in ("EvalReader", "TestReader")
        ),
    )
    imported, shipped = load(convert([file]).text).spec, config.load(f"ppyoloe_plus_{size}", environ={}).spec
    assert imported.model == shipped.model
    assert imported.model.options["static_assigner_epoch"] == 30
    assert imported.train.epochs == shipped.train.epochs == 80
    assert imported.optimizer == shipped.optimizer
    assert imported.schedule == shipped.schedule


def test_text_of_a_file_cannot_break_out_of_its_line():
    hostile = "a # b\\n  x: 1"
    file = write("hostile.yaml", f'path: "{hostile}"\ntrain: "t\\rt"\nnames: ["n\\u0085m", "\\e[31m"]\n"k\\ney": 1\n')
    imported = convert([file])
    data = load(imported.text).spec.data
    assert (data.root, data.train, data.names) == ("a # b\n  x: 1", "t\rt", ["n\x85m", "\x1b[31m"])
    assert all(character.isprintable() or character == "\n" for character in imported.text)


REFUSED = {
    "another architecture": (
        "architecture: FasterRCNN\n",
        r"bad\.yml:1 architecture: given FasterRCNN, which mtrain does not have; it imports PP-YOLOE",
    ),
    "another backbone": (
        "architecture: YOLOv3\nYOLOv3: {backbone: DarkNet, neck: CustomCSPPAN, yolo_head: PPYOLOEHead}\n",
        r"bad\.yml:2 YOLOv3\.backbone: given DarkNet",
    ),
    "PP-YOLOE+ with other factors": (
        f"_BASE_: ['{ppyoloe('s')}']\nCSPResNet: {{use_alpha: 2}}\n",
        r"bad\.yml:2 CSPResNet\.use_alpha: given 2",
    ),
    "PP-YOLOE with the normalisation of PP-YOLOE+": (
        f"_BASE_: ['{ppyoloe('s')}']\nCSPResNet: {{use_alpha: False}}\nTrainReader:\n  batch_transforms:\n"
        "    - NormalizeImage: {mean: [0., 0., 0.], std: [1., 1., 1.], norm_type: none}\n",
        r"bad\.yml:5 TrainReader\..*NormalizeImage\.mean: given .*expected \[0\.485, .*mtrain's PP-YOLOE normalises",
    ),
    "the same in evaluation": (
        f"_BASE_: ['{ppyoloe('s')}']\nEvalReader: {{sample_transforms: [NormalizeImage: {{norm_type: none}}]}}\n",
        r"ppyoloe_reader\.yml:\d+ TrainReader\..*NormalizeImage: .*without norm_type",
    ),
    "ImageNet": (
        "path: ../datasets/imagenet\ntrain: train\nval: val\nnames: {0: tench, 1: goldfish}\n",
        r"bad\.yml:1 path: given \.\./datasets/imagenet, which is a data set for classification",
    ),
    "a part of ImageNet": (
        "path: data\ntrain: train\nnames: [a]\ndownload: bash data/scripts/get_imagenet10.sh\n",
        r"bad\.yml:4 download: .*for classification",
    ),
    "another size": (f"_BASE_: ['{ppyoloe('s')}']\nwidth_mult: 0.375\n", r"depth_mult: .*0\.33 x 0\.375: no PP-YOLOE"),
    "an unknown key of the network": (
        f"_BASE_: ['{ppyoloe('s')}']\nCSPResNet: {{wings: 2}}\n",
        r"bad\.yml:2 CSPResNet\.wings",
    ),
    "no architecture": ("epoch: 3\nLearningRate: {base_lr: 1.0}\n", r"and no architecture; give the file"),
    "a value out of range": (
        f"_BASE_: ['{ppyoloe('s')}']\nema_decay: 1.5\n",
        r"bad\.yml:2 ema_decay: train\.ema\.decay: given 1\.5",
    ),
    "a word for a number": (
        f"_BASE_: ['{ppyoloe('s')}']\nepoch: many\n",
        r"bad\.yml:2 epoch: train\.epochs: given 'many'",
    ),
    "a side of no stride": (
        f"_BASE_: ['{ppyoloe('s')}']\nTrainReader: {{batch_transforms: [BatchRandomResize: {{target_size: [300], keep_ratio: false}}]}}\n",
        r"bad\.yml:2 TrainReader\.batch_transforms\.0\.BatchRandomResize\.target_size: .*300",
    ),
    "an unequal side": (
        f"_BASE_: ['{ppyoloe('s')}']\nEvalReader: {{sample_transforms: [Resize: {{target_size: [640, 480], keep_ratio: false}}]}}\n",
        r"bad\.yml:2 EvalReader.*a square",
    ),
    "a Python object": (
        "architecture: !!python/object/apply:os.system ['touch pwned']\n",
        r"bad\.yml:1 architecture: the tag !!python/object/apply:os\.system is not allowed",
    ),
    "a missing base": ("_BASE_: [nowhere.yml]\n", r"bad\.yml:1 _BASE_: no file nowhere\.yml"),
    "a base that is a device": ("_BASE_: [/dev/zero]\n", r"bad\.yml:1 _BASE_: no file /dev/zero"),
    "a circle": ("_BASE_: [bad.yml]\n", r"goes round in a circle: bad\.yml -> bad\.yml"),
    "a key given twice": ("architecture: YOLOv3\narchitecture: YOLOv3\n", r"bad\.yml:2 architecture: given twice"),
    "deep nesting": ("architecture: " + "[" * 100 + "]" * 100 + "\n", r"nested deeper than 40 levels"),
    "aliases without end": (
        "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30)),
        r"aliases expand",
    ),
    "no YAML": ("architecture: [YOLOv3\n", r"bad\.yml:2: not valid YAML"),
    "nothing": ("", r"bad\.yml: holds nothing, which fits no known kind of config"),
    "something else": (
        "fruit: apple\n",
        r"bad\.yml: holds fruit, which fits no known kind of config; expected PaddleDetection",
    ),
    "a spec": ("model: {name: yolov5n}\ntrain: {epochs: 1}\n", r"bad\.yml: seems to be a spec of mtrain already"),
    "an older YOLOv5": (
        (YOLOV5 / "yolov5s.yaml").read_text().replace("Conv, [64, 6, 2, 2]", "Focus, [64, 3]"),
        r"bad\.yml:6 backbone: .*not the layout of YOLOv5 6\.0.*backbone layer 0 is \[-1, 1, Focus, \[64, 3\]\]",
    ),
    "a segmentation head": (
        (YOLOV5 / "yolov5s.yaml").read_text().replace("Detect, [nc, anchors]", "Segment, [nc, anchors, 32, 256]"),
        r"bad\.yml:18 head: .*head layer 14 is .*Segment",
    ),
    "a fourth level": (
        (YOLOV5 / "yolov5s.yaml")
        .read_text()
        .replace("  - [[17, 20, 23], 1, Detect, [nc, anchors]]\n", "  - [-1, 1, Conv, [8, 3, 2]]\n" * 3),
        r"bad\.yml:18 head",
    ),
    "no variant of YOLOv5": (
        (YOLOV5 / "yolov5s.yaml").read_text().replace("0.50", "0.60"),
        r"bad\.yml:2 depth_multiple: .*no variant of YOLOv5; expected one of n 0\.33 x 0\.25",
    ),
    "another activation": (
        (YOLOV5 / "yolov5s.yaml").read_text() + "activation: nn.ReLU()\n",
        r"activation: given 'nn.ReLU\(\)', expected nn\.SiLU\(\)",
    ),
    "odd anchors": (
        re.sub(r"anchors: \[\[10.*", "anchors: [[1, 2, 3]]", (YOLOV5 / "yolov5s.yaml").read_text()),
        r"bad\.yml:4 anchors: given \[\[1, 2, 3\]\]",
    ),
    "a hyper-parameter out of range": (
        "lr0: 0.01\nmosaic: 1.5\n",
        r"bad\.yml:2 mosaic: data\.augment\.mosaic: given 1\.5",
    ),
    "names and nc that disagree": ("nc: 3\nnames: [a, b]\n", r"bad\.yml:1 nc: given 3, but 2 names are listed"),
    "more classes than anyone has": (
        "nc: 9000000000\ntrain: a\n",
        r"bad\.yml:1 nc: given 9000000000, expected 1 to 10000",
    ),
    "a base with an impossible name": (f"_BASE_: [{'a' * 5000}]\n", r"bad\.yml:1 _BASE_: no file aaa"),
    "a base of an unknown user": ("_BASE_: [~nobody-of-this-name/x.yml]\n", r"bad\.yml:1 _BASE_: no file ~nobody"),
    "a base with a null": ('_BASE_: ["a\\0b"]\n', r"bad\.yml:1 _BASE_: no file a"),
    "names with a gap": ("names: {0: a, 2: b}\n", r"bad\.yml:1 names: .*expected the keys 0 to 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_imported_is_one_clear_line(case, capsys):
    text, message = REFUSED[case]
    assert re.search(message, fails(capsys, write("bad.yml", text)))
    assert not Path("pwned").exists()


def test_files_that_do_not_go_together_are_refused(capsys):
    hyp, model = YOLOV5 / "hyp.scratch-low.yaml", YOLOV5 / "yolov5s.yaml"
    assert "is a hyper-parameters YAML of YOLOv5 too" in fails(capsys, hyp, YOLOV5 / "hyp.VOC.yaml")
    assert "import a config of PaddleDetection alone" in fails(capsys, model, ppyoloe("s"))
    assert "import a config of PaddleDetection alone" in fails(capsys, ppyoloe("s"), ppyoloe("m"))
    assert "--cards 4" in fails(capsys, hyp, "--cards", 4)
    assert "no such file" in fails(capsys, "nowhere.yml")
    assert "is no file" in fails(capsys, ".")
    assert "-o nonsense: expected PATH=VALUE" in fails(capsys, hyp, "-o", "nonsense")
    assert "-o train.batch=3: unknown key" in fails(capsys, hyp, "-o", "train.batch=3")
