"""Accelerate's vision example on mtrain: `mtrain run --nproc-per-node 2 --seed 42 port.py`.

The original is https://github.com/huggingface/accelerate/blob/main/examples/cv_example.py.
"""

import common
from torch.nn.functional import cross_entropy

import mtrain


def predict(model, batch):
    """Return the predicted and the true classes of a batch."""
    inputs = (batch["image"] - common.MEAN) / common.STD
    return model(inputs).argmax(dim=-1), batch["label"]


def main() -> None:
    """Train and evaluate; the weights are in the run folder."""
    with mtrain.session() as session:
        eval_set = common.Digits(train=False)
        rule = common.optimizer_of if common.ORDER else mtrain.Adam(learning_rate=common.LR)
        model, optimizer = session.prepare(common.network, optimizer=rule, schedule=common.one_cycle)
        for batch in session.batches(
            common.Digits(train=True), global_batch=common.GLOBAL_BATCH, epochs=common.EPOCHS, order=common.ORDER
        ):
            inputs = (batch["image"] - common.MEAN) / common.STD
            loss = cross_entropy(model(inputs), batch["label"])
            optimizer.update(loss)
        metrics = session.evaluate(model, eval_set, step=predict, metric=common.accuracy)
        session.print(f"accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
