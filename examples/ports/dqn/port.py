"""The deep Q-learning on mtrain: `mtrain run --nproc-per-node 2 --seed 17 port.py`. Every rank plays the same game."""

import common
import torch
from torch.nn.functional import smooth_l1_loss

import mtrain


def main() -> None:
    """Play and learn; the weights of the network and its slow copy are in the run folder."""
    with mtrain.session() as session:
        player = common.Player()
        session.keep("player", player)
        network, optimizer = session.prepare(
            common.network,
            optimizer=mtrain.AdamW(learning_rate=3e-3, weight_decay=0.01),
            clip_norm=0.5,
            name="online",
        )
        target, _ = session.prepare(common.network, name="target")
        session.follow(target, network)
        for _ in session.updates(common.UPDATES, global_batch=common.GLOBAL_BATCH):
            player.play(network)
            batch = player.remember(common.GLOBAL_BATCH)
            states, actions, rewards, next_states, goes_on = session.share(batch)
            values = network(states).gather(1, actions).squeeze(1)
            with torch.no_grad():
                wanted = rewards + common.DISCOUNT * goes_on * target(next_states).max(1).values
            optimizer.update(smooth_l1_loss(values, wanted))
            session.follow(target, network, common.FOLLOWS)


if __name__ == "__main__":
    main()
