"""The actor-critic on mtrain: `mtrain run --nproc-per-node 2 --seed 23 port.py`. Each rank plays its share of the games."""

import common
from torch.utils.data import DataLoader

import mtrain


def main() -> None:
    """Play and learn; the weights are in the run folder."""
    with mtrain.session() as session:
        games = common.Numbers()
        loader = DataLoader(games, batch_size=common.GLOBAL_BATCH)
        model, optimizer = session.prepare(
            common.ActorCritic, optimizer=mtrain.Adam(learning_rate=1e-2), clip_norm=0.05
        )
        for numbers in session.batches(loader, epochs=common.EPOCHS):
            logarithms, worths, returns = common.play(model, numbers)
            loss = common.loss_of(logarithms, worths, returns)
            optimizer.update(loss)


if __name__ == "__main__":
    main()
