"""Paddle's fleet example in one process, on the digits of scikit-learn: `python plain.py`.

In the form of the guide "cluster_quick_start_collective" of https://github.com/PaddlePaddle/docs (under
docs/guides/06_distributed_training) without fleet. The model is evaluated once, at the end.
"""

import common
import paddle
from paddle.io import DataLoader, DistributedBatchSampler
from paddle.nn.functional import cross_entropy


def main() -> None:
    """Train, evaluate, and save the weights."""
    paddle.seed(common.SEED)
    train_set, test_set = common.Digits(train=True), common.Digits(train=False)
    train_sampler = DistributedBatchSampler(train_set, common.GLOBAL_BATCH, num_replicas=1, rank=0, shuffle=True)
    train_loader = DataLoader(train_set, batch_sampler=train_sampler)
    test_sampler = DistributedBatchSampler(test_set, common.GLOBAL_BATCH, num_replicas=1, rank=0)
    test_loader = DataLoader(test_set, batch_sampler=test_sampler)
    model = common.network()
    optimizer = common.optimizer_of(model)
    for _ in range(common.EPOCHS):
        model.train()
        for data, target in train_loader():
            loss = cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
    model.eval()
    with paddle.no_grad():
        right = sum((model(data).argmax(1) == target).sum().item() for data, target in test_loader())
    print(f"accuracy {right / len(test_set):.3f}")
    paddle.save(model.state_dict(), "weights.pdparams")


if __name__ == "__main__":
    main()
