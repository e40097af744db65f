"""Soft actor-critic, in one process: `python plain.py`. Three optimizers: of the actor, the critic, and the temperature."""

import copy

import common
import torch
from torch.nn.functional import mse_loss


def main() -> None:
    """Play and learn, and save the weights."""
    torch.manual_seed(common.SEED)
    player = common.Player()
    actor = common.Actor()
    of_actor = torch.optim.Adam(actor.parameters(), lr=3e-3, fused=True)
    critic = common.Critic()
    of_critic = torch.optim.Adam(critic.parameters(), lr=3e-3, fused=True)
    target = copy.deepcopy(critic)
    temperature = common.Temperature()
    of_temperature = torch.optim.Adam(temperature.parameters(), lr=3e-3, fused=True)
    for _ in range(common.UPDATES):
        player.play(actor)
        states, forces, rewards, next_states, noise, next_noise = player.remember(common.GLOBAL_BATCH)
        with torch.no_grad():
            next_forces, density = actor(next_states, next_noise)
            worth = torch.min(*target(next_states, next_forces)) - temperature() * density
            wanted = rewards + common.DISCOUNT * worth
        one, other = critic(states, forces)
        of_critic.zero_grad()
        (mse_loss(one, wanted) + mse_loss(other, wanted)).backward()
        of_critic.step()
        own_forces, density = actor(states, noise)
        of_actor.zero_grad()
        (temperature().detach() * density - torch.min(*critic(states, own_forces))).mean().backward()
        of_actor.step()
        of_temperature.zero_grad()
        (-temperature() * (density.detach() + common.WANTED_ENTROPY)).mean().backward()
        of_temperature.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                slow.lerp_(fast, common.FOLLOWS)
    torch.save(actor.state_dict(), "actor.pt")
    torch.save(critic.state_dict(), "critic.pt")
    torch.save(target.state_dict(), "target.pt")
    torch.save(temperature.state_dict(), "temperature.pt")


if __name__ == "__main__":
    main()
