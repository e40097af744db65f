"""The same training in a session of mtrain."""

from common import Points, build
from torch import nn

import mtrain

with mtrain.session() as session:
    model, optimizer = session.prepare(build, optimizer=mtrain.SGD(learning_rate=0.1, momentum=0.9), clip_norm=0.5)
    for inputs, targets in session.batches(Points(), global_batch=24, epochs=8):
        optimizer.update(nn.functional.cross_entropy(model(inputs), targets))
