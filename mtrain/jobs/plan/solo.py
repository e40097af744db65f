"""Jobs of one process on this host that use weights trained elsewhere: predictions, exports, trials."""

from typing import Any


def one_process(framework: str, *, device: str) -> dict[str, Any]:
    """Return the values of a spec, by dotted path, with which one process on this host uses trained weights.

    ``framework``: that of the spec's backend as a rule, since it is installed where the run was made.
    """
    return {
        "backend.name": "solo",
        "backend.options": {"device": device, "framework": framework},
        "cluster.ips": [],
        "cluster.slots": None,
        "cluster.devices": None,
        "cluster.name": "auto",
        "cluster.nproc_per_node": 1,
        "cluster.log_dir": None,
        "cluster.max_restarts": 0,
        "launcher.name": "auto",
        "parallel.replicate": 1,
        "parallel.shard": None,
        "parallel.tensor": 1,
        "parallel.pipeline": 1,
        "parallel.sequence": False,
        "parallel.plan": {},
        "model.weights": None,
        "model.weights_key": None,
        "train.distil": None,
    }
