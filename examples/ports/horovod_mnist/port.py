"""Horovod's MNIST example on mtrain: `mtrain run --backend horovod --nproc-per-node 2 --seed 42 port.py`.

The original is https://github.com/horovod/horovod/blob/master/examples/pytorch/pytorch_mnist.py.
"""

import common
from torch.nn.functional import nll_loss

import mtrain


def main() -> None:
    """Train and evaluate; the weights are in the run folder."""
    with mtrain.session() as session:
        train_set = common.Digits(train=True)
        test_set = common.Digits(train=False)
        model, optimizer = session.prepare(common.network, optimizer=mtrain.SGD(learning_rate=0.01, momentum=0.5))
        for data, target in session.batches(
            train_set, global_batch=common.GLOBAL_BATCH, epochs=common.EPOCHS, order=common.ORDER
        ):
            loss = nll_loss(model(data), target)
            optimizer.update(loss)
        metrics = session.evaluate(model, test_set, metric=common.accuracy)
        session.print(f"accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
