"""The training loop of torch's DDP tutorial on mtrain: `mtrain run --nproc-per-node 2 --seed 42 port.py`.

The original is https://github.com/pytorch/examples/tree/main/distributed/ddp-tutorial-series.
"""

import common
from torch.nn.functional import mse_loss

import mtrain


def main() -> None:
    """Train; the weights are in the run folder."""
    with mtrain.session() as session:
        train_set = common.Points()
        model, optimizer = session.prepare(common.network, optimizer=mtrain.SGD(learning_rate=1e-3))
        for inputs, targets in session.batches(
            train_set, global_batch=common.GLOBAL_BATCH, epochs=common.EPOCHS, order=common.ORDER
        ):
            loss = mse_loss(model(inputs), targets)
            optimizer.update(loss)


if __name__ == "__main__":
    main()
