"""The word language model on mtrain: `mtrain run --nproc-per-node 2 --seed 31 port.py`. Each rank carries the hidden state of its rows."""

import common
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

import mtrain


def main() -> None:
    """Train; the weights are in the run folder."""
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            common.Model,
            optimizer=mtrain.SGD(learning_rate=common.LEARNING_RATE),
            scheduler=lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.25, patience=0),
            clip_norm=common.CLIP,
        )
        carried = {"hidden": None}
        session.keep("carried", carried, rows=1)
        loader = DataLoader(common.Pieces(common.TRAIN, common.PIECE), batch_size=common.ROWS)
        whole = common.Pieces(common.VAL, common.VAL.shape[1] - 1)
        for epoch in session.epochs(common.EPOCHS):
            for words, targets in session.batches(loader):
                scores, hidden = model(words, carried["hidden"])
                loss = cross_entropy(scores, targets)
                optimizer.update(loss)
                carried["hidden"] = common.detached(hidden)
            carried["hidden"] = None
            metrics = session.evaluate(model, whole, metric=lambda errors, _: {"error": errors.mean()})
            optimizer.scheduler.step(metrics["error"])
            session.print(f"epoch {epoch}: error {metrics['error']:.6f}")


if __name__ == "__main__":
    main()
