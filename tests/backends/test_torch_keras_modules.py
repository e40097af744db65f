"""A model of Keras 3 as a module of torch, against the model itself."""

import os
import sys

import pytest
import torch

from mtrain.backends._torch.scripts import keras_modules
from mtrain.errors import ScriptError
from mtrain.rank.script.prepared import Building


@pytest.fixture(autouse=True, scope="module")
def keras_is_imported() -> None:
    """Import it when the first of these tests runs, since every worker collects them: that takes seconds."""
    os.environ["KERAS_BACKEND"] = "torch"
    if (
        getattr(sys.modules.get("keras"), "__file__", None) is None
    ):  # a folder of this name that another test has come upon
        sys.modules.pop("keras", None)
    global keras
    keras = pytest.importorskip("keras", reason="keras is not installed")
    assert hasattr(keras, "Sequential"), f"{keras!r} is not Keras: another test has imported it"


def network(*, dropout: float = 0.0, seed: int | None = None, regularizer: str | None = None) -> "keras.Model":
    return keras.Sequential(
        [
            keras.layers.Input(shape=(6,)),
            keras.layers.Dense(5, name="first", kernel_regularizer=regularizer),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dropout(dropout, seed=seed),
            keras.layers.Dense(2, name="last"),
        ]
    )


def test_it_computes_and_counts_what_the_model_does_under_names_without_the_models_own():
    torch.manual_seed(4)
    module = Building(network)()
    keras.utils.set_random_seed(4)
    model = network()  # the same start weights, since Keras was seeded as torch was
    inputs = torch.randn(8, 6)
    assert list(dict(module.named_parameters())) == [
        "first_kernel", "first_bias", "norm_gamma", "norm_beta", "last_kernel", "last_bias",
    ]  # fmt: skip
    assert list(dict(module.named_buffers())) == ["norm_moving_mean", "norm_moving_variance"]
    module.train()
    assert torch.equal(module(inputs), model(inputs, training=True))
    mean = dict(module.named_buffers())["norm_moving_mean"]
    assert float(mean.abs().max()) > 0
    assert torch.equal(mean, model.get_layer("norm").moving_mean.value)
    before = mean.clone()
    module.eval()
    assert torch.equal(module(inputs), model(inputs, training=False))
    assert torch.equal(mean, before)


def test_it_computes_with_the_array_that_a_backend_has_put_in_a_parameters_place():
    module = Building(network)()
    module.eval()
    inputs = torch.randn(3, 6)
    module.last_kernel = torch.nn.Parameter(torch.zeros(5, 2))
    module.last_bias = torch.nn.Parameter(torch.ones(2))
    assert torch.equal(module(inputs), torch.ones(3, 2))


@pytest.mark.parametrize("own_seed", [None, 3])
def test_dropout_follows_the_seed_of_torch_and_not_a_count_of_its_own(own_seed):
    """Keras gives a layer with a seed a generator of its own; one without draws from torch's."""
    module = Building(lambda: network(dropout=0.5, seed=own_seed))()
    inputs = torch.randn(64, 6)
    outputs = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        outputs.append(module(inputs).detach())
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    assert "seed" not in " ".join(module.state_dict())


def test_models_that_cannot_be_trained_so_are_refused_with_the_remedy():
    with pytest.raises(ScriptError, match=r"keras\.layers\.Input"):
        Building(lambda: keras.Sequential([keras.layers.Dense(2)]))()
    with pytest.raises(ScriptError, match=r"first/kernel has a regularizer of Keras.*weight_decay"):
        Building(lambda: network(regularizer="l2"))()
    module = Building(network)().to(torch.float64)
    with pytest.raises(ScriptError, match=r"keras\.config\.set_floatx\('float64'\)"):
        module(torch.randn(3, 6, dtype=torch.float64))


def test_a_module_of_torch_stays_what_it_is():
    layer = torch.nn.Linear(2, 2)
    assert keras_modules.adapt(layer) is layer
