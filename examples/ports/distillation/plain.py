"""A student that learns from a frozen teacher, in one process: `python plain.py`."""

import common
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader


def main() -> None:
    """Train the student, evaluate it, and save its weights."""
    torch.manual_seed(common.SEED)
    train_loader = DataLoader(common.Digits(train=True), batch_size=common.GLOBAL_BATCH)
    test_set = common.Digits(train=False)
    test_loader = DataLoader(test_set, batch_size=common.GLOBAL_BATCH)
    student = common.student()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2, momentum=0.9, fused=True)
    scheduler = CosineAnnealingLR(optimizer, T_max=common.EPOCHS)
    teacher = common.teacher()
    teacher.eval()
    for _ in range(common.EPOCHS):
        for images, classes in train_loader:
            with torch.no_grad():
                taught = teacher(images)
            logits = student(images)
            loss = 0.3 * cross_entropy(logits, classes) + 0.7 * common.distance(logits, taught)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
    student.eval()
    with torch.no_grad():
        right = sum((student(images).argmax(1) == classes).sum().item() for images, classes in test_loader)
    print(f"accuracy {right / len(test_set):.3f}")
    torch.save(student.state_dict(), "student.pt")


if __name__ == "__main__":
    main()
