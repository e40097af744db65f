"""The image classifier of Lightning Fabric on mtrain: `mtrain run --nproc-per-node 2 --seed 1 port.py`.

The original is https://github.com/Lightning-AI/pytorch-lightning/tree/master/examples/fabric/image_classifier.
"""

import common
from torch.nn.functional import nll_loss

import mtrain


def main() -> None:
    """Train and evaluate; the weights are in the run folder."""
    with mtrain.session() as session:
        train_set = common.Digits(train=True)
        test_set = common.Digits(train=False)
        steps = mtrain.Step(milestones=range(1, common.EPOCHS), gamma=0.7)
        model, optimizer = session.prepare(common.network, optimizer=mtrain.SGD(learning_rate=0.1), schedule=steps)
        for data, target in session.batches(
            train_set, global_batch=common.GLOBAL_BATCH, epochs=common.EPOCHS, order=common.ORDER
        ):
            loss = nll_loss(model(data), target)
            optimizer.update(loss)
        metrics = session.evaluate(model, test_set, metric=common.accuracy)
        session.print(f"accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
