"""What a plan says of a mesh with a language model: the memory of each rank, and the operations of an update."""

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import Any

from mtrain.core.interfaces import Mesh
from mtrain.core.update.recipe import MOMENTS, micro_batch
from mtrain.errors import SpecError
from mtrain.spec.config import Loaded
from mtrain.spec.model import Spec
from mtrain_language.model import HuggingFaceModel

MIB = 1 << 20
_ESTIMATE_S = 120
"""Seconds within which the process that counts the arrays of a model must answer."""
_BYTE_TOKENS = {"vocabulary": 257, "end": 256}
"""What a model learns of tokens where each is a byte; the size of another vocabulary is in the model's configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What a rank of a mesh holds, without what the framework itself needs."""

    weights_bytes: float
    gradients_bytes: float
    moments_bytes: float
    average_bytes: float
    gathered_bytes: float
    """What is whole at a time: the unit of the whole model, and the largest other one twice, as the next one is fetched ahead."""


def rows(loaded: Loaded, mesh: Mesh, *, size: int) -> dict[str, str]:
    """Return the rows of a plan on a mesh; none where the model's arrays are not known.

    Raises:
        SpecError: The model's layers cannot be shared as the spec says.
    """
    arrays = _arrays(loaded, mesh, size=size)
    if arrays is None:
        return {}
    micro, passes = micro_batch(loaded.spec, size=size)
    return {
        **_operations_words(arrays["operations"], micro=micro, batch=micro * passes * mesh.data_size),
        "memory per rank": _by_stage([_memory_words(each) for each in _estimates(loaded.spec, mesh, arrays)]),
    }


def estimates(loaded: Loaded, mesh: Mesh, *, size: int) -> list[Estimate] | None:
    """Return what a rank of each stage holds; None: the model's arrays are not known before it is built.

    Raises:
        SpecError: The model's layers cannot be shared as the spec says.
    """
    arrays = _arrays(loaded, mesh, size=size)
    return None if arrays is None else _estimates(loaded.spec, mesh, arrays)


def _arrays(loaded: Loaded, mesh: Mesh, *, size: int) -> Mapping[str, Any] | None:
    """Return what ``meshes.estimate`` answers about a model, or None."""
    if not issubclass(loaded.job.model_class, HuggingFaceModel):
        return None
    spec = loaded.spec
    micro, _ = micro_batch(spec, size=size)
    question = {
        "model": spec.model.name,
        "options": spec.model.options,
        "policy": spec.plugins,
        "details": {**_BYTE_TOKENS, "length": _length(spec)},
        "rows": micro,
        "frozen": list(spec.train.freeze),
        "mesh": {**asdict(mesh), "plan": dict(mesh.plan)},
        "unit": spec.backend.options.get("unit", "blocks"),
    }
    return _ask(question, python=spec.backend.python or sys.executable)


def _ask(question: Mapping[str, Any], *, python: str) -> Mapping[str, Any] | None:
    """Let a process that imports torch answer; None where it cannot.

    Raises:
        SpecError: The model cannot be trained on the mesh.
    """
    command = [python, "-m", "mtrain_language.meshes.estimate"]
    try:
        process = subprocess.run(  # noqa: S603  # our own module
            command, input=json.dumps(question), capture_output=True, text=True, timeout=_ESTIMATE_S, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    if process.returncode != 0:
        last = process.stderr.strip().splitlines()[-1:]
        name = f"{SpecError.__module__}.{SpecError.__qualname__}: "
        # A refusal is the answer; any other error means that the model is not known before it is built.
        if last and last[0].startswith(name):
            raise SpecError(last[0].removeprefix(name))
        return None
    found: Mapping[str, Any] | None = json.loads(process.stdout.splitlines()[-1])
    return found


def _estimates(spec: Spec, mesh: Mesh, arrays: Mapping[str, Any]) -> list[Estimate]:
    if mesh.pipeline == 1:
        return [estimate(spec, mesh, arrays["arrays"])]
    return [
        estimate(spec, mesh, [row for row in arrays["arrays"] if stage in row[5]]) for stage in range(mesh.pipeline)
    ]


def _length(spec: Spec) -> int:
    return int(getattr(spec.data, "length", 1))


def _by_stage(words: Sequence[str]) -> str:
    """Return what each stage holds; neighbours for which that is the same are named together."""
    if len(words) == 1:
        return words[0]
    said = []
    for text, group in groupby(enumerate(words, start=1), key=itemgetter(1)):
        first, *others = [number for number, _ in group]
        said.append(f"stages {first}-{others[-1]}: {text}" if others else f"stage {first}: {text}")
    return "; ".join(said)


def _operations_words(of_micro_batch: int | None, *, micro: int, batch: int) -> dict[str, str]:
    """Return the row on the operations of an update of ``batch`` samples, from those of ``micro``; empty where it is not known."""
    if of_micro_batch is None:
        return {}
    return {"operations per update": f"{of_micro_batch * batch / micro / 1e12:,.4g} TFLOP, of the whole job"}


def estimate(spec: Spec, mesh: Mesh, arrays: Sequence[Sequence[Any]]) -> Estimate:
    """Compute what a rank holds.

    Args:
        spec: The spec.
        mesh: Its mesh.
        arrays: (name, shape, whether a tensor group cuts it, whether it is trained, its unit) of each.
    """
    each = 8 if spec.train.precision == "fp64" else 4
    left = {name: prod(shape) / (mesh.tensor if is_cut else 1) for name, shape, is_cut, *_ in arrays}
    trained = sum(left[name] for name, _, _, is_trained, *_ in arrays if is_trained)
    held, learns = sum(left.values()) * each / mesh.shard, trained * each / mesh.shard
    # No average follows what is not trained.
    moments, average = learns * len(MOMENTS[spec.optimizer.rule]), learns if spec.train.ema is not None else 0.0
    return Estimate(
        weights_bytes=held,
        gradients_bytes=learns,
        moments_bytes=moments,
        average_bytes=average,
        gathered_bytes=_whole_at_once(arrays, left) * each,
    )


def _whole_at_once(arrays: Sequence[Sequence[Any]], left: Mapping[str, float]) -> float:
    """Return the number of elements of the whole model's unit and, twice, of the largest other one."""
    sizes: defaultdict[str, float] = defaultdict(float)
    for row in arrays:
        sizes[row[4]] += left[row[0]]
    root = sizes.pop("", 0.0)
    return root + 2 * max(sizes.values(), default=0.0)


def _memory_words(found: Estimate) -> str:
    parts = {
        "weights": found.weights_bytes,
        "gradients": found.gradients_bytes,
        "moments": found.moments_bytes,
        "average": found.average_bytes,
    }
    shown = " + ".join(f"{value / MIB:,.1f} MiB {name}" for name, value in parts.items() if value)
    gathered = f"; {found.gathered_bytes / MIB:,.1f} MiB more while units are whole" if found.gathered_bytes else ""
    return f"{shown}{gathered}; activations besides"
