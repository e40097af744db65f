"""How often the ranks of a script wait for one another besides the exchange of gradients: once for each update, and at saves."""

import itertools
import json

import pytest

from tests.script.runs import done

pytestmark = pytest.mark.job

SCRIPT = """
import json
import pathlib
import torch
from torch import distributed, nn
import mtrain

calls = []
for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier", "reduce_scatter_tensor"):
    def counted(*words, made=getattr(distributed, name), name=name, **named):
        calls.append(name)
        return made(*words, **named)
    setattr(distributed, name, counted)

with mtrain.session() as session:
    model, optimizer = session.prepare(
        lambda: nn.Linear(3, 1), optimizer=mtrain.SGD(learning_rate=0.1), clip_norm=1.0, ema=0.9, accumulate={accumulate}
    )
    made = []
    for inputs in session.batches(torch.ones(80, 3), global_batch=8, epochs=2):
        made.append(len(calls))
        loss = model(inputs).square().mean()
        optimizer.update(loss)
        session.log(twice=2 * loss)
    pathlib.Path("calls-%d.json" % session.rank).write_text(json.dumps([made, calls]))
"""


@pytest.mark.smoke
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_ranks_agree_once_for_each_global_batch(tmp_path, accumulate):
    (tmp_path / "train.py").write_text(SCRIPT.format(accumulate=accumulate))
    done(tmp_path, "--backend", "ddp", "--nproc-per-node", "2", "train.py")
    for rank in range(2):
        made, calls = json.loads((tmp_path / f"calls-{rank}.json").read_text())
        updates = made[::accumulate]
        assert len(updates) == 20
        # The names of the metrics are new in the first update, so there the ranks agree on them, too.
        each = [after - before for before, after in itertools.pairwise(updates)]
        # How long they have waited for one another rides in the same vector.
        # The save at the end of the first epoch compares what the script keeps.
        assert each == [2] + [1] * 8 + [3] + [1] * 9
        save = slice(updates[9], updates[10])
        assert set(calls[updates[0] : updates[9]] + calls[updates[10] : updates[-1]]) == {"all_reduce"}, calls[save]
        within = [made[place + 1] - made[place] for place in range(0, len(made), accumulate)] if accumulate > 1 else []
        assert set(within) <= {0}, "micro batches of one update do not wait for other ranks"
