"""Names and shapes in files for other programs: counted in their networks as these build them."""

import numpy as np

from mtrain.spec.registry import Registry
from mtrain.weights.names import export
from mtrain.weights.outline import Question, outlines

PADDLEDETECTION = {
    "ppyoloe_s": (423, 0), "ppyoloe_m": (588, 0), "ppyoloe_l": (753, 0), "ppyoloe_x": (918, 0),
    "ppyoloe_plus_s": (429, 6), "ppyoloe_plus_m": (600, 12), "ppyoloe_plus_l": (771, 18), "ppyoloe_plus_x": (942, 24),
}  # fmt: skip
"""Arrays in the state of each network of PaddleDetection's configurations (October 2024, Paddle 3.3), and of these the factors."""


def test_paddle_files_of_all_variants_have_the_arrays_of_paddledetections_networks():
    states = outlines([Question(model=name, classes=80) for name in PADDLEDETECTION])
    registry = Registry.read()
    for (name, counts), state in zip(PADDLEDETECTION.items(), states, strict=True):
        arrays = {entry: np.zeros(type_.shape, type_.dtype) for entry, type_ in state.items()}
        written = export(arrays, registry.load("models", name).published, layout="paddle")
        factors = [entry for entry in written if entry.endswith(".alpha")]
        assert (len(written), len(factors)) == counts
        assert {written[entry].shape for entry in factors} <= {(1,)}
        assert written["yolo_head.proj_conv.weight"].dtype == np.float32
