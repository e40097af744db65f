"""A plain loop of torch: RATE [UPDATE WHOSE LOSS IS DOUBLED]."""

import sys

import torch
from common import Points, build
from torch import nn

rate, doubled = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
torch.set_num_threads(1)
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
for update in range(1, 9):
    for inputs, targets in torch.utils.data.DataLoader(Points(), batch_size=24):
        loss = nn.functional.cross_entropy(model(inputs), targets) * (2 if update == doubled else 1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
