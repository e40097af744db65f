"""Deep Q-learning, in one process: `python plain.py`. A slow copy of the network says what the next state is worth."""

import copy

import common
import torch
from torch.nn.functional import smooth_l1_loss


def main() -> None:
    """Play and learn, and save the weights of the network and its slow copy."""
    torch.manual_seed(common.SEED)
    player = common.Player()
    network = common.network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.01, fused=True)
    target = copy.deepcopy(network)
    for _ in range(common.UPDATES):
        player.play(network)
        states, actions, rewards, next_states, goes_on = player.remember(common.GLOBAL_BATCH)
        values = network(states).gather(1, actions).squeeze(1)
        with torch.no_grad():
            wanted = rewards + common.DISCOUNT * goes_on * target(next_states).max(1).values
        optimizer.zero_grad()
        smooth_l1_loss(values, wanted).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
                slow.lerp_(fast, common.FOLLOWS)
    torch.save(network.state_dict(), "online.pt")
    torch.save(target.state_dict(), "target.pt")


if __name__ == "__main__":
    main()
