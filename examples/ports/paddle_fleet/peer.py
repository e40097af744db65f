"""Paddle's fleet example, on digits: `python -m paddle.distributed.launch --nproc_per_node 2 peer.py`.

In the form of the guide "cluster_quick_start_collective" of https://github.com/PaddlePaddle/docs (under
docs/guides/06_distributed_training), evaluated once, at the end. The batch of a rank is its share of the global batch,
so that training is the same for every number of ranks.
"""

import common
import paddle
from paddle.distributed import fleet, get_rank, get_world_size
from paddle.io import DataLoader, DistributedBatchSampler
from paddle.nn.functional import cross_entropy


def main() -> None:
    """Train, evaluate, and save the weights."""
    fleet.init(is_collective=True)
    paddle.seed(common.SEED)
    train_set, test_set = common.Digits(train=True), common.Digits(train=False)
    train_sampler = DistributedBatchSampler(train_set, common.GLOBAL_BATCH // get_world_size(), shuffle=True)
    train_loader = DataLoader(train_set, batch_sampler=train_sampler)
    test_sampler = DistributedBatchSampler(test_set, common.GLOBAL_BATCH)
    test_loader = DataLoader(test_set, batch_sampler=test_sampler)
    model = common.network()
    model = fleet.distributed_model(model)
    optimizer = common.optimizer_of(model)
    optimizer = fleet.distributed_optimizer(optimizer)
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
    print(f"accuracy of rank {get_rank()} on its share {right / test_sampler.num_samples:.3f}")
    if get_rank() == 0:
        paddle.save(model.state_dict(), "weights.pdparams")


if __name__ == "__main__":
    main()
