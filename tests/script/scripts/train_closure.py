"""A training script whose optimizer computes the loss several times per update, and the plain script that it was."""

import os
import sys

import numpy as np
import torch
from points import Plain
from torch import nn
from torch.nn import functional as F

import mtrain

UPDATES, BATCH = 6, 24
LBFGS = {"lr": 0.5, "max_iter": 4, "history_size": 5}


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def plain(file: str, search: str | None) -> None:
    model = net().double()
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn=search, **LBFGS)
    data = Plain(BATCH, 0)
    inputs, targets = torch.from_numpy(data.inputs).double(), torch.from_numpy(data.targets)
    for _ in range(UPDATES):

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)
    np.savez(file, **{name: value.numpy() for name, value in model.state_dict().items()})


def main(search: str | None) -> None:
    with mtrain.session() as session:
        model, optimizer = session.prepare(
            net,
            optimizer=lambda model: torch.optim.LBFGS(model.parameters(), line_search_fn=search, **LBFGS),
            precision="fp64",
            overlap=False,
        )
        kept = []
        batches = session.batches(
            Plain(BATCH, 0), global_batch=BATCH, updates=UPDATES, order=lambda epoch: range(BATCH)
        )
        for inputs, targets in batches:
            if session.progress.update == int(os.environ.get("KILLED_IN", "-1")):
                os.kill(os.getpid(), 9)

            def closure(inputs=inputs, targets=targets):
                loss = F.cross_entropy(model(inputs), targets)
                optimizer.backward(loss)
                return loss

            kept.append(float(optimizer.step(closure)))
            session.save()
        session.print(f"loss {kept[-1]:.6f} after {len(kept)} updates")


if __name__ == "__main__":
    search_fn = os.environ.get("SEARCH") or None
    if len(sys.argv) > 1:
        plain(sys.argv[1], search_fn)
    else:
        main(search_fn)
