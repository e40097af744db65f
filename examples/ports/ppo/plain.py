"""Proximal policy optimisation, in one process: `python plain.py`. Rollouts, epochs over each, and minibatches."""

import common
import torch


def main() -> None:
    """Play and learn, and save the weights."""
    torch.manual_seed(common.SEED)
    games = common.Games()
    agent = common.Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=common.LEARNING_RATE, fused=True)
    for iteration in range(common.ITERATIONS):
        rollout = common.play(agent, games)
        for _ in range(common.EPOCHS):
            order = games.permutation()
            for number in range(common.ROWS // common.MINIBATCH):
                rows = order[number * common.MINIBATCH :][: common.MINIBATCH]
                minibatch = {name: x[rows] for name, x in rollout.items()}
                loss = common.loss_of(agent, minibatch)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(agent.parameters(), common.CLIP_NORM)
                optimizer.step()
        print(f"iteration {iteration}: reward {rollout['rewards'].mean():.6f}")
    torch.save(agent.state_dict(), "weights.pt")


if __name__ == "__main__":
    main()
