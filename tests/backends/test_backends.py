"""`solo` as a plugin, its batches, its inference and its BatchNorm, on every framework."""

from importlib import import_module
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mtrain.backends.base import tell_version
from mtrain.backends.solo import Solo
from tests.backends.processes import python
from tests.backends.recipes import recipe
from tests.contract.convnet import build
from tests.framework import Framework


@pytest.mark.smoke
@pytest.mark.job
def test_backends_say_what_they_are_without_loading_a_framework() -> None:
    process = python("""
        import sys
        from mtrain.backends.ddp import DDP
        from mtrain.backends.fleet import Fleet
        from mtrain.backends.solo import Solo
        for kind, framework in ((DDP, "torch"), (Fleet, "paddle")):
            backend = kind(kind.Options())
            assert (backend.framework, backend.rendezvous) == (framework, framework)
        for framework in ("torch", "paddle"):
            backend = Solo(Solo.Options(framework=framework))
            assert (backend.framework, backend.rendezvous) == (framework, "none")
        assert not {"torch", "paddle"} & set(sys.modules)
    """)
    assert process.returncode == 0, process.stderr


def test_a_framework_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValidationError, match="framework"):
        Solo.Options(framework="tensorflow")  # type: ignore[arg-type]


@pytest.mark.job
@pytest.mark.parametrize(("name", "extra"), [("torch", "ddp"), ("paddle", "fleet-cpu")])
@pytest.mark.parametrize("way", ["backend.nn", "backend.__enter__()"])
def test_a_framework_that_is_not_installed_is_named_with_the_remedy(name: str, extra: str, way: str) -> None:
    process = python(f"""
        import sys
        from mtrain.backends.solo import Solo
        from mtrain.errors import LaunchError
        sys.path = [folder for folder in sys.path if "-packages" not in folder]
        backend = Solo(Solo.Options(framework="{name}"))
        try:
            {way}
        except LaunchError as error:
            print(error)
    """)
    assert f"{name} is not installed here; install it with: pip install -e " in process.stdout, process.stderr


@pytest.mark.job
def test_cuda_where_there_is_none_is_refused(framework: Framework) -> None:
    process = python(
        f"""
        from mtrain.backends.solo import Solo
        from mtrain.errors import LaunchError
        try:
            with Solo(Solo.Options(device="cuda", framework="{framework.name}")):
                pass
        except LaunchError as error:
            print(error)
    """,
        CUDA_VISIBLE_DEVICES="",
    )
    assert f"{framework.name} sees no CUDA device; use 'cpu' or 'auto'" in process.stdout, process.stderr


def test_batches_on_the_host_share_memory_and_come_in_order(session: Any, framework: Framework) -> None:
    arrays = [{"x": np.full(3, i, np.float32), "index": np.array([i])} for i in range(4)]
    actual = list(session.batches(arrays))
    assert [batch["index"].tolist()[0] for batch in actual] == [0, 1, 2, 3]
    assert actual[1]["x"].data_ptr() == arrays[1]["x"].ctypes.data
    assert framework.ops.dtype(actual[1]["x"]) == "float32"


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32", "float64", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (2, 3)])
def test_arrays_keep_type_and_shape(session: Any, framework: Framework, dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    (batch,) = session.batches([{"x": array}])
    actual = framework.ops.to_numpy(batch["x"])
    assert (actual.dtype, actual.shape) == (array.dtype, shape)
    assert np.array_equal(actual, array)


def test_read_only_and_reversed_arrays_become_tensors_too(session: Any) -> None:
    frozen = np.arange(3)
    frozen.setflags(write=False)
    (batch,) = session.batches([{"frozen": frozen, "reversed": np.arange(3)[::-1]}])
    assert batch["frozen"].tolist() == [0, 1, 2]
    assert batch["reversed"].tolist() == [2, 1, 0]


def test_a_batch_outlives_the_arrays_that_it_was_made_of(session: Any) -> None:
    (batch,) = session.batches({"x": np.full((300, 300), 7.0)} for _ in range(1))
    others = [np.zeros((300, 300)) for _ in range(20)]
    assert float(batch["x"].sum()) == 630_000.0
    del others


def test_no_batch_is_asked_for_before_it_is_needed_on_the_host(session: Any) -> None:
    requests = []

    def loader() -> Any:
        for i in range(3):
            requests.append(i)
            yield {"x": np.array([i])}

    batches = session.batches(loader())
    next(batches)
    assert requests == [0]


def test_inference_takes_no_gradient_and_returns_arrays(session: Any, framework: Framework) -> None:
    model, _ = session.prepare(build, recipe(precision="fp32"))
    model.eval()
    (batch,) = session.batches([{"images": np.ones((2, 3, 8, 8), np.float32), "labels": np.array([0, 1])}])
    output = session.infer(model, batch)
    assert output["logits"].shape == (2, 4)
    assert output["logits"].dtype == np.float32
    assert all(p.grad is None for p in framework.parameters(model).values())


def test_memory_is_that_of_this_process(session: Any) -> None:
    assert 50e6 < session.measure()["memory_bytes"] < 50e9


class TestBatchNormOverOneRank:
    """It must be the plain one, running statistics and gradients included."""

    @pytest.fixture
    def tools(self, framework: Framework) -> Any:
        folder = f"mtrain.backends._{framework.name}"
        return import_module(f"{folder}.syncbn"), import_module("mtrain.backends.engine").LocalCollective()

    @pytest.mark.parametrize("frozen_input", [False, True])
    @pytest.mark.parametrize("unbiased", [True, False])
    def test_is_the_plain_one(self, framework: Framework, tools: Any, unbiased: bool, frozen_input: bool) -> None:
        syncbn, alone = tools
        nn, ops = framework.nn, framework.ops
        generator = np.random.default_rng(0)
        x = generator.normal(size=(5, 3, 4, 4)) * 3 + 100
        target = framework.tensor(generator.normal(size=x.shape))
        start = {"0.weight": generator.uniform(size=3), "0.bias": generator.uniform(size=3)}
        results = []
        for synced in (False, True):
            model = nn.Sequential(nn.BatchNorm2d(3, momentum=0.3, unbiased_variance=unbiased))
            model = framework.to(model, "float64")
            framework.load(model, start)
            if synced:
                names = list(framework.state(model))
                syncbn.synchronize(model, alone)
                assert isinstance(model[0], syncbn.SyncBatchNorm2d)
                assert list(framework.state(model)) == names
            original = framework.tensor(x) if frozen_input else framework.variable(x)
            expected = list(framework.parameters(model).values()) + ([] if frozen_input else [original])
            y = model(original)
            grads = framework.gradients(ops.sum(y * target), expected)
            state = [np.array(ops.to_numpy(tensor)) for tensor in framework.state(model).values()]
            model.eval()
            results.append([ops.to_numpy(y), *grads, *state, ops.to_numpy(model(original))])
        assert len(results[0]) == 9 + (not frozen_input)
        for plain, ours in zip(*results, strict=True):
            assert np.allclose(plain, ours, rtol=1e-11, atol=1e-12)

    def test_a_frozen_one_ignores_the_mode(self, framework: Framework, tools: Any) -> None:
        syncbn, alone = tools
        model = framework.nn.Sequential(framework.nn.BatchNorm2d(3), framework.nn.BatchNorm2d(3))
        weight = model[0].weight
        weight.requires_grad, weight.stop_gradient = False, True
        syncbn.freeze(model)
        syncbn.synchronize(model, alone)
        model.train()
        assert [layer.training for layer in (model, model[0], model[1])] == [True, False, True]
        assert [type(layer).__name__ for layer in model] == ["FrozenBatchNorm2d", "SyncBatchNorm2d"]
        before = np.array(framework.ops.to_numpy(model[0].running_mean))
        model(framework.tensor(np.ones((2, 3, 4, 4), np.float32)))
        assert np.array_equal(framework.ops.to_numpy(model[0].running_mean), before)
        assert not np.array_equal(framework.ops.to_numpy(model[1].running_mean), before)


def test_the_doctor_says_which_versions_of_a_library_were_never_tried() -> None:
    tested = ("2.8.0", "2.13.0")
    assert tell_version("torch", "2.13.1+cu130", tested=tested) == []
    assert tell_version("torch", "2.8.0", tested=tested) == []
    for version in ("2.9.0", "2.1.0", "3.8.0"):
        (finding,) = tell_version("torch", version, tested=tested)
        assert finding["state"] == "warning"
        assert finding["text"] == f"torch {version} was not tried with mtrain; 2.8.0, 2.13.0 were"
