"""The mean teacher on Accelerate: `torchrun --nproc-per-node 2 peer_accelerate.py`."""

import copy

import common
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


def main() -> None:
    """Train the student, and save its weights and the teacher's."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    torch.manual_seed(common.SEED)
    labelled, unlabelled = common.Digits(labelled=True), common.Digits(labelled=False)
    labelled_loader = DataLoader(labelled, batch_size=common.LABELLED_BATCH)
    unlabelled_loader = DataLoader(unlabelled, batch_size=common.UNLABELLED_BATCH)
    student = common.network()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True)
    teacher = copy.deepcopy(student).to(accelerator.device)
    student, optimizer, labelled_loader, unlabelled_loader = accelerator.prepare(
        student, optimizer, labelled_loader, unlabelled_loader
    )
    for epoch in range(common.EPOCHS):
        labelled.set_epoch(epoch)
        unlabelled.set_epoch(epoch)
        for (images, _, classes), (first, second, _) in zip(labelled_loader, unlabelled_loader, strict=True):
            with torch.no_grad():
                taught = teacher(second)
            loss = cross_entropy(student(images), classes) + 5 * common.disagreement(student(first), taught)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
    accelerator.save(accelerator.unwrap_model(student).state_dict(), "student.pt")
    accelerator.save(teacher.state_dict(), "teacher.pt")


if __name__ == "__main__":
    main()
