"""Accelerate's text example on mtrain: `mtrain run --nproc-per-node 2 --seed 42 port.py`.

The original is https://github.com/huggingface/accelerate/blob/main/examples/nlp_example.py.
"""

import common

import mtrain


def learning_rate(update: int) -> float:
    """Return the learning rate: a linear rise during the warm-up, then a linear fall to 0."""
    return common.LR * min(update / common.WARMUP, (common.UPDATES - update) / (common.UPDATES - common.WARMUP))


def predict(model, batch):
    """Return the predicted and the true labels of a batch."""
    return model(**batch).logits.argmax(dim=-1), batch["labels"]


def main() -> None:
    """Train and evaluate; the weights are in the run folder."""
    with mtrain.session() as session:
        eval_set = common.Pairs(train=False)
        rule = common.optimizer_of if common.ORDER else mtrain.AdamW(learning_rate=common.LR)
        model, optimizer = session.prepare(common.network, optimizer=rule, schedule=learning_rate)
        for batch in session.batches(
            common.Pairs(train=True), global_batch=common.GLOBAL_BATCH, epochs=common.EPOCHS, order=common.ORDER
        ):
            outputs = model(**batch)
            loss = outputs.loss
            optimizer.update(loss)
        metrics = session.evaluate(model, eval_set, step=predict, metric=common.accuracy)
        session.print(f"accuracy {metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
