"""Train PaddleDetection's PP-YOLOE with its own ``Trainer`` from one seed, for ``benchmarks/accuracy.py``.

    python benchmarks/peers/ppyoloe_train.py CHECKOUT SET FOLDER [--seed 0] [--side 128] [--epochs 10] ...

Nothing of the original is part of mtrain, and its code is not changed. Its configuration is ``ppyoloe_crn_s_300e_coco.yml``:
network, losses, assigners, optimizer, averages and transforms are those of that file. What a short job on a small set needs
is said in ``CONFIG`` below: one size of images, lengths in proportion, weights from scratch. SET is a folder in COCO form
(``images``, ``annotations/instances_train.json``). The averaged weights are in FOLDER/model_final.pdparams at the end.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ppyoloe_record import Finder

CONFIG = """_BASE_: [{checkout}/configs/ppyoloe/ppyoloe_crn_s_300e_coco.yml]
use_gpu: false
norm_type: bn
weights: ''
pretrain_weights: ''
worker_num: 0
epoch: {epochs}
snapshot_epoch: 10000
save_dir: {folder}
log_iter: 1000
num_classes: {classes}
PPYOLOEHead: {{static_assigner_epoch: {static}}}
LearningRate:
  base_lr: {rate}
  schedulers:
    - {{name: CosineDecay, max_epochs: {horizon}}}
    - {{name: LinearWarmup, start_factor: 0., epochs: 1}}
TrainDataset: !COCODataSet
  {{image_dir: images, anno_path: annotations/instances_train.json, dataset_dir: {data}, data_fields: [image, gt_bbox, gt_class, is_crowd]}}
EvalDataset: !COCODataSet
  {{image_dir: images, anno_path: annotations/instances_train.json, dataset_dir: {data}}}
TrainReader:
  batch_size: {batch}
  batch_transforms:
    - BatchRandomResize: {{target_size: [{side}], random_size: true, random_interp: true, keep_ratio: false}}
    - NormalizeImage: {{mean: [0.485, 0.456, 0.406], std: [0.229, 0.224, 0.225], is_scale: true}}
    - Permute: {{}}
    - PadGT: {{}}
"""


def main() -> None:
    """Write the configuration, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=lambda word: Path(word).resolve(), help="of PaddleDetection")
    parser.add_argument("data", type=lambda word: Path(word).resolve(), metavar="SET")
    parser.add_argument("folder", type=lambda word: Path(word).resolve())
    for name, value in {"seed": 0, "side": 128, "epochs": 10, "horizon": 12, "static": 3, "batch": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument(
        "--adamw", type=float, metavar="DECAY", help="AdamW with this decay, in place of the file's SGD"
    )
    arguments = parser.parse_args()
    train(arguments)


def train(arguments: argparse.Namespace) -> None:
    """Train as the checkout's ``tools/train.py`` does, without evaluation."""
    annotations = json.loads((arguments.data / "annotations" / "instances_train.json").read_text())
    arguments.folder.mkdir(parents=True, exist_ok=True)
    config = arguments.folder / "config.yml"
    classes = len(annotations["categories"])
    config.write_text(CONFIG.format(**vars(arguments), classes=classes))
    sys.meta_path.append(Finder())  # type: ignore[arg-type]
    sys.path.insert(0, str(arguments.checkout))
    import paddle

    paddle.set_device("cpu")
    from ppdet.core.workspace import load_config
    from ppdet.engine import Trainer, set_random_seed

    loaded = load_config(str(config))
    if arguments.adamw is not None:  # a file could add to the entries of its base, but take none away
        loaded["OptimizerBuilder"]["optimizer"] = {"type": "AdamW", "weight_decay": arguments.adamw}
    set_random_seed(arguments.seed)
    trainer = Trainer(loaded, mode="train")
    trainer.train()


if __name__ == "__main__":
    main()
