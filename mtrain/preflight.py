"""What is checked before any rank starts: data, classes, sizes, plugins. Imports no framework."""

from mtrain.assembly import model_plugin, open_task
from mtrain.core.optimizer import make_recipe
from mtrain.core.sampler import Shuffled
from mtrain.core.schedule import total_updates
from mtrain.core.spec import Spec
from mtrain.data.check import verify_pictures


def check(spec: Spec, *, size: int, training: bool = True) -> list[str]:
    """Open the data, look at every picture file, and derive all numbers of the job for ``size`` ranks.

    Returns sentences about bad boxes and the like, to be told once.

    Raises:
        UsageError: something does not fit; the message says what to do. Unreadable pictures are named all at once.
    """
    make_recipe(spec, size=size)
    task = open_task(spec, training=training)
    verify_pictures(*task.splits())
    model_plugin(spec).prepare_task(task.task(), {})
    if training:
        order = Shuffled(task.length("train"), global_batch=spec.train.batch_size, seed=spec.train.seed)
        total_updates(spec, order.updates_per_epoch)
    return task.report()
