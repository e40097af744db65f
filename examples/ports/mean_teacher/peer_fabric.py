"""The mean teacher on Lightning Fabric: `fabric run --accelerator cpu --devices 2 --strategy ddp peer_fabric.py`."""

import copy

import common
import torch
from lightning_fabric import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    """Train the student, and save its weights and the teacher's."""
    fabric = Fabric()
    torch.manual_seed(common.SEED)
    labelled, unlabelled = common.Digits(labelled=True), common.Digits(labelled=False)
    labelled_loader = DataLoader(labelled, batch_size=common.LABELLED_BATCH // fabric.world_size)
    unlabelled_loader = DataLoader(unlabelled, batch_size=common.UNLABELLED_BATCH // fabric.world_size)
    labelled_loader, unlabelled_loader = fabric.setup_dataloaders(labelled_loader, unlabelled_loader)
    student = common.network()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    teacher = fabric.to_device(copy.deepcopy(student))
    student, optimizer = fabric.setup(student, optimizer)
    for epoch in range(common.EPOCHS):
        labelled.set_epoch(epoch)
        unlabelled.set_epoch(epoch)
        for (images, _, classes), (first, second, _) in zip(labelled_loader, unlabelled_loader, strict=True):
            with torch.no_grad():
                taught = teacher(second)
            loss = cross_entropy(student(images), classes) + 5 * common.disagreement(student(first), taught)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
    fabric.save("student.pt", student.state_dict())
    fabric.save("teacher.pt", teacher.state_dict())


if __name__ == "__main__":
    main()
