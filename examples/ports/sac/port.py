"""The soft actor-critic on mtrain: `mtrain run --nproc-per-node 2 --seed 19 port.py`. Every rank plays the same game."""

import common
import torch
from torch.nn.functional import mse_loss

import mtrain


def main() -> None:
    """Play and learn; the weights are in the run folder."""
    with mtrain.session() as session:
        player = common.Player()
        session.keep("player", player)
        adam = mtrain.Adam(learning_rate=3e-3)
        actor, of_actor = session.prepare(common.Actor, optimizer=adam, name="actor")
        critic, of_critic = session.prepare(common.Critic, optimizer=adam, name="critic")
        target, _ = session.prepare(common.Critic, name="target")
        session.follow(target, critic)
        temperature, of_temperature = session.prepare(common.Temperature, optimizer=adam, name="temperature")
        for _ in session.updates(common.UPDATES, global_batch=common.GLOBAL_BATCH):
            player.play(actor)
            batch = player.remember(common.GLOBAL_BATCH)
            states, forces, rewards, next_states, noise, next_noise = session.share(batch)
            with torch.no_grad():
                next_forces, density = actor(next_states, next_noise)
                worth = torch.min(*target(next_states, next_forces)) - temperature() * density
                wanted = rewards + common.DISCOUNT * worth
            one, other = critic(states, forces)
            of_critic.update(mse_loss(one, wanted) + mse_loss(other, wanted))
            own_forces, density = actor(states, noise)
            of_actor.update((temperature().detach() * density - torch.min(*critic(states, own_forces))).mean())
            of_temperature.update((-temperature() * (density.detach() + common.WANTED_ENTROPY)).mean())
            session.follow(target, critic, common.FOLLOWS)


if __name__ == "__main__":
    main()
