"""A training script as a good programmer writes it without mtrain: one file, DDP, a torch DataLoader. Trains YOLOv5n on
a COCO file.

``--library``: torch alone (started by torchrun), Accelerate (``accelerate launch``) or Lightning Fabric (``fabric
run``).

The network and its loss are mtrain's, so that only the training code differs. The script writes the time of its first
update to ``--first``.
"""

import argparse
import json
import os
import time
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from mtrain.backends._torch import nn, ops
from mtrain.core import binding
from mtrain.core.interfaces import Task


class Images(Dataset):
    """Letterboxed images with flips: less work than mtrain's augmentation, to the peer's advantage."""

    def __init__(self, root: Path, side: int):
        content = json.loads((root / "annotations" / "instances_train.json").read_text())
        self.classes = {c["id"]: i for i, c in enumerate(sorted(content["categories"], key=lambda c: c["id"]))}
        self.images = content["images"]
        self.boxes: dict[int, list] = {}
        for a in content["annotations"]:
            self.boxes.setdefault(a["image_id"], []).append((self.classes[a["category_id"]], *a["bbox"]))
        self.root, self.side = root / "images", side

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = cv2.cvtColor(cv2.imread(str(self.root / self.images[i]["file_name"])), cv2.COLOR_BGR2RGB)
        height, width = image.shape[:2]
        ratio = self.side / max(height, width)
        scaled = cv2.resize(image, (round(width * ratio), round(height * ratio)))
        canvas = np.full((self.side, self.side, 3), 114, np.uint8)
        offset_y, offset_x = (self.side - scaled.shape[0]) // 2, (self.side - scaled.shape[1]) // 2
        canvas[offset_y : offset_y + scaled.shape[0], offset_x : offset_x + scaled.shape[1]] = scaled
        rows = np.array(self.boxes.get(self.images[i]["id"], []), np.float32).reshape(-1, 5)
        centres = (rows[:, 1:3] + rows[:, 3:] / 2) * ratio + np.array([offset_x, offset_y])
        targets = np.concatenate([rows[:, :1], centres / self.side, rows[:, 3:] * ratio / self.side], axis=1)
        return torch.from_numpy(canvas), torch.from_numpy(targets.astype(np.float32))


def collate(items):
    rows = [torch.cat([torch.full((len(t), 1), float(i)), t], dim=1) for i, (_, t) in enumerate(items)]
    return {"images": torch.stack([image for image, _ in items]), "targets": torch.cat(rows)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--side", type=int, default=320)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--first", type=Path, required=True)
    parser.add_argument("--library", choices=LIBRARIES, default="torch")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    binding.bind(nn, ops)
    from mtrain.models.yolov5.model import YOLOv5n

    data = Images(arguments.root, arguments.side)
    task = Task(
        kind="detection",
        class_names=[str(i) for i in range(len(data.classes))],
        image_size=arguments.side,
        global_batch=arguments.batch,
    )
    LIBRARIES[arguments.library](arguments, data, YOLOv5n().build(task).train())


def with_torch(arguments, data, model):
    """Train with torchrun, ``DistributedSampler`` and DDP."""
    dist.init_process_group("gloo")
    sampler = DistributedSampler(data, seed=0)
    model = DistributedDataParallel(model)
    optimizer = sgd(model)
    for batch in loader_of(arguments, data, sampler=sampler, size=dist.get_world_size()):
        loss = model(batch)["total"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        finish(arguments, loss)


def with_accelerate(arguments, data, model):
    """Train with the loop of Accelerate's documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = loader_of(arguments, data, shuffle=True, size=accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    for batch in loader:
        loss = model(batch)["total"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        finish(arguments, loss)


def with_fabric(arguments, data, model):
    """Train with the loop of Fabric's documentation."""
    from lightning_fabric import Fabric

    fabric = Fabric()  # `fabric run` has set accelerator, strategy and devices
    model, optimizer = fabric.setup(model, sgd(model))
    loader = fabric.setup_dataloaders(loader_of(arguments, data, shuffle=True, size=fabric.world_size))
    for batch in loader:
        loss = model(batch)["total"]
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=10.0)
        optimizer.step()
        optimizer.zero_grad()
        finish(arguments, loss)


LIBRARIES = {"torch": with_torch, "accelerate": with_accelerate, "fabric": with_fabric}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.937, nesterov=True, weight_decay=5e-4)


def loader_of(arguments, data, *, size, **options):
    return DataLoader(data, arguments.batch // size, num_workers=1, collate_fn=collate, drop_last=True, **options)


def finish(arguments, loss):
    """Write the time after the first update and exit."""
    float(loss.detach())
    if dist.get_rank() == 0:
        arguments.first.write_text(str(time.time()))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
