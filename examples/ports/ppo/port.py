"""Proximal policy optimisation on mtrain: `mtrain run --nproc-per-node 2 --seed 37 port.py`. Every rank plays the same games."""

import common

import mtrain


def main() -> None:
    """Play and learn; the weights are in the run folder."""
    with mtrain.session() as session:
        games = common.Games()
        session.keep("games", games)
        adam = mtrain.Adam(learning_rate=common.LEARNING_RATE)
        agent, optimizer = session.prepare(common.Agent, optimizer=adam, clip_norm=common.CLIP_NORM)
        size = {"global_batch": common.MINIBATCH, "total": common.UPDATES}
        for iteration in session.range(common.ITERATIONS):
            rollout = common.play(agent, games)
            for _ in range(common.EPOCHS):
                order = games.permutation()
                for number in session.updates(common.ROWS // common.MINIBATCH, **size):
                    rows = order[number * common.MINIBATCH :][: common.MINIBATCH]
                    minibatch = session.share({name: x[rows] for name, x in rollout.items()})
                    loss = common.loss_of(agent, minibatch)
                    optimizer.update(loss)
            session.print(f"iteration {iteration}: reward {rollout['rewards'].mean():.6f}")


if __name__ == "__main__":
    main()
