"""Check how exact float32 is: compare loss and gradient norm of one update with float64.

The network of the other checks sees images of 8 px, too small for a sum over pixels to lose digits. Here one
convolution with BatchNorm sees images that are large, smooth, low in contrast and bright, like photographs, so that
an inexact sum over their pixels shows.
"""

import math

import numpy as np

from mtrain.compare.referee import EXACT
from mtrain.core import ops
from mtrain.core.interfaces import Array, Precision, RankSession, Rates, Recipe, State
from mtrain_kit.check_context import FIRST_UPDATE, Reference, Site
from mtrain_kit.checks import Measure

MICRO_BATCH, SIDE, WIDTH = 4, 320, 8
CONTRAST, BRIGHTNESS = 0.03, (0.60, 0.55, 0.50)
"""Amplitude of the light in an image, and the mean of each colour; pixels are between 0 and 1."""


def first_update(session: RankSession, precision: Precision) -> dict[str, Array]:
    """Train one update. Return ``loss`` and ``norm``, the gradient norm before clipping."""
    recipe = Recipe(
        rule="sgd",
        groups=(("", {"momentum": 0.0, "weight_decay": 0.0}),),
        micro_batch=MICRO_BATCH,
        precision=precision,
        channels_last=True,  # the default of every job
        clip_norm=math.inf,
    )
    model, optimizer = session.prepare(_build, recipe)
    session.restore(model, optimizer, State(weights=_weights(precision)))
    # Every rank receives the same images, so that the metrics do not depend on the number of ranks.
    (batch,) = session.batches([{"images": images(), "index": np.arange(MICRO_BATCH)}])
    with optimizer.micro_batch(last=True):
        loss = model(batch)["total"]
        optimizer.backward(loss)
    norm = optimizer.step(Rates(learning_rates=(0.0,)))
    return {"loss": np.array(float(ops.to_numpy(loss))), "norm": np.array(norm)}


def near_float64(site: Site) -> list[Measure]:
    """Check that loss and gradient norm in float32 are those of solo in float64."""
    # Solo's float64 also serves backends without float64; `learns.*` compares a backend's own float64 with solo's.
    exact = Reference(folder=site.references, precision="fp64").arrays(FIRST_UPDATE)
    metrics = first_update(site.session, "fp32")
    words = {"loss": "loss", "norm": "gradient norm"}
    return [_distance(word, float(metrics[name]), float(exact[name])) for name, word in words.items()]


def _distance(word: str, actual: float, exact: float) -> Measure:
    return Measure(
        what=f"{word}: relative distance from float64",
        value=abs(actual / exact - 1),
        bound=EXACT,
        detail=f"{actual:.9g} in float32, {exact:.9g} in float64",
    )


def images() -> Array:
    """Generate images as float32 (B, 3, H, W) between 0 and 1 in steps of 1/255: slow light, a finer texture, some
    noise."""
    generator = np.random.default_rng(17)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    images = np.empty((MICRO_BATCH, 3, SIDE, SIDE))
    for image in images:
        across, down = generator.uniform(0.3, 1.0, 2)
        light = np.cos(2 * np.pi * (across * x + down * y))
        for colour, brightness in enumerate(BRIGHTNESS):
            across, down = generator.uniform(4, 12, 2)
            texture = np.sin(2 * np.pi * (across * x + down * y))
            noise = generator.standard_normal((SIDE, SIDE))
            image[colour] = brightness + CONTRAST * (light + 0.6 * texture + 0.3 * noise)
    return (np.round(np.clip(images, 0, 1) * 255) / 255).astype(np.float32)


def start_weights() -> dict[str, Array]:
    """Return the start value of every entry of the network, float64, keyed by name."""
    generator = np.random.default_rng(11)
    return {
        "conv.weight": generator.normal(0, 0.3, (WIDTH, 3, 3, 3)),
        "bn.weight": generator.uniform(0.5, 1.5, WIDTH),
        "bn.bias": generator.normal(0, 0.3, WIDTH),
        "bn.running_mean": np.zeros(WIDTH),
        "bn.running_var": np.ones(WIDTH),
        "bn.num_batches_tracked": np.zeros((), np.int64),
        "head.weight": generator.normal(0, 0.3, (1, WIDTH, 1, 1)),
        "head.bias": generator.normal(0, 0.3, 1),
    }


def _weights(precision: Precision) -> dict[str, Array]:
    """Return the start weights rounded to float32, also for float64: both precisions start from the same numbers."""
    single = {
        name: array.astype(np.float32) if array.dtype.kind == "f" else array for name, array in start_weights().items()
    }
    if precision != "fp64":
        return single
    return {name: array.astype(np.float64) if array.dtype.kind == "f" else array for name, array in single.items()}


def _build() -> object:
    from mtrain_kit.network import Stem

    return Stem(WIDTH)
