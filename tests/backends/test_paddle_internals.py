"""Every internal name of Paddle that mtrain uses exists, and does what mtrain takes for granted."""

import ctypes
import inspect
import math
import socket
from typing import Any

import numpy as np
import psutil
import pytest

from mtrain.backends._paddle import internals, paddle
from tests.backends.internals import Library
from tests.backends.processes import python

PADDLE = Library("paddlepaddle", internals)
"""Paddle, as the distribution for the CPU."""
LACKS_SWITCHES = not paddle.is_compiled_with_cuda() and paddle.__version__ < "3.3"
SWITCHES = [] if LACKS_SWITCHES else ["set_cublas_switch", "set_cudnn_switch"]
"""Names in ``paddle.base.core`` that Paddle up to 3.2 for the CPU does not have, where nothing uses them."""


@pytest.mark.parametrize(
    "path",
    [
        *(f"paddle:_C_ops.{name}" for name in ("sgd_", "momentum_", "squared_l2_norm", "put_along_axis", "empty_like")),
        *(f"paddle:Tensor.{name}" for name in ("_share_buffer_to", "_slice", "_register_backward_hook")),
        *(f"paddle.base.core:{name}" for name in SWITCHES),
        *(f"paddle.base.core:{name}" for name in internals.EXIT_FUNCTIONS),
        "paddle.distributed:new_group",
        "paddle.distributed:get_group",
    ],
)
def test_a_name_exists(path: str) -> None:
    PADDLE.get(path)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_kernels_do_what_their_names_say(dtype: str) -> None:
    x, y = paddle.to_tensor([1.0, 2.0], dtype), paddle.to_tensor([4.0, -8.0], dtype)
    internals.add_(x, 0.5, y)
    PADDLE.same("_C_ops.sgd_", x.tolist(), [3.0, -2.0])
    PADDLE.same("_C_ops.squared_l2_norm", internals.norm([paddle.to_tensor([3.0, 4.0], dtype)]).item(), 5.0)


@pytest.mark.parametrize(
    ("reduce", "expected"), [("assign", [5.0, 2.0, 1.0]), ("add", [5.0, 3.0, 2.0]), ("amax", [5.0, 2.0, 1.0])]
)
def test_elements_are_put_without_a_look_at_the_indices(reduce: str, expected: list[float]) -> None:
    x, indices = paddle.to_tensor([0.0, 1.0, 1.0]), paddle.to_tensor([0, 1], "int64")
    if reduce == "add":
        indices = paddle.to_tensor([0, 1, 1, 2], "int64")
    values = paddle.to_tensor([5.0, 2.0] if reduce != "add" else [5.0, 1.0, 1.0, 1.0])
    actual = internals.put_along_axis(x, indices, values, 0, reduce)
    PADDLE.same("_C_ops.put_along_axis", actual.tolist(), expected)


def test_a_norm_on_the_device_has_the_bits_of_one_that_the_host_adds_up() -> None:
    tensors = [paddle.to_tensor([0.1 * i, 3.0, -1e-3], "float32") for i in range(5)]
    expected = math.sqrt(sum(internals._KERNELS.squared_l2_norm(tensor).item() for tensor in tensors))
    PADDLE.same("_C_ops.squared_l2_norm", internals.norm(tensors).item(), expected)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_step_with_momentum_is_that_of_the_formula(nesterov: bool) -> None:
    x, velocity, grad = (paddle.to_tensor([value], "float32") for value in (2.0, 4.0, 1.0))
    internals.momentum_(x, velocity, grad, learning_rate=0.25, momentum=0.5, decay=0.5, nesterov=nesterov)
    step = 2.0 + 0.5 * 4.0
    PADDLE.same(
        "_C_ops.momentum_", (x.item(), velocity.item()), (2.0 - 0.25 * (2.0 + 0.5 * step if nesterov else step), step)
    )


def test_tensors_share_memory_without_flags() -> None:
    before = paddle.get_flags("FLAGS_use_stride_kernel")
    paddle.set_flags({"FLAGS_use_stride_kernel": False})
    try:
        memory, tensor = paddle.zeros([5]), paddle.ones([2])
        internals.share_memory(internals.view(memory, 1, 3), tensor)
        memory.scale_(1.0, 7.0)
        PADDLE.same("Tensor._share_buffer_to", tensor.tolist(), [7.0, 7.0])
        PADDLE.same("Tensor._slice", internals.view(memory, 1, 3).data_ptr(), memory.data_ptr() + 4)
    finally:
        paddle.set_flags(before)


def test_a_tensor_shares_the_memory_of_an_array_and_keeps_it_alive() -> None:
    array = np.full(300, 2.0)
    address, tensor = array.ctypes.data, internals.sharing_array(array)
    del array
    PADDLE.same("Tensor(zero_copy=True)", (tensor.data_ptr(), tensor.stop_gradient), (address, True))
    assert float(tensor.sum()) == 600.0


def test_hooks_run_after_a_gradient_is_added_in_the_order_of_registration() -> None:
    parameter: Any = paddle.create_parameter([1], "float32")
    calls: list[tuple[str, float]] = []
    for name in ("first", "second"):
        internals.on_gradients([parameter], lambda name=name: calls.append((name, parameter.grad.item())))
    (parameter.sum() * 2).backward()
    (parameter.sum() * 3).backward()
    PADDLE.same("_register_backward_hook", calls, [("first", 2.0), ("second", 2.0), ("first", 5.0), ("second", 5.0)])


def test_data_parallel_keeps_the_layer_that_it_wraps_under_a_private_name() -> None:
    PADDLE.reads("paddle:DataParallel.__init__", ["self._layers = layers"])
    layer = paddle.nn.Linear(1, 1)
    assert internals.unwrap(layer) is layer


def test_floating_types_alone_are_converted() -> None:
    layer = paddle.nn.Linear(1, 1)
    layer.register_buffer("counter", paddle.to_tensor([1]))
    internals.convert_floats(layer, dtype="float64")
    actual = (layer.weight.dtype, layer.counter.dtype)
    PADDLE.same("Layer._to_impl(floating_only=True)", actual, (paddle.float64, paddle.int64))


def test_tf32_can_be_switched() -> None:
    for allowed in (False, True) if SWITCHES else ():
        internals.use_tf32(allowed)


def test_fleet_finds_new_group_in_its_module() -> None:
    original = paddle.distributed.new_group
    with internals.one_group(2):
        assert paddle.distributed.new_group is not original
    assert paddle.distributed.new_group is original
    names = list(inspect.signature(original).parameters)
    assert names[0] == "ranks", PADDLE.wrong(f"new_group takes ({', '.join(names)})")


def test_the_store_listens_where_these_variables_say() -> None:
    words = ["MASTER_ADDR", "MASTER_PORT", "PADDLE_MASTER"]
    PADDLE.reads("paddle.distributed.parallel", words)
    assert internals.port_of_store({"MASTER_ADDR": "a", "MASTER_PORT": "7"}) == 7
    assert internals.port_of_store({"PADDLE_MASTER": "a:8"}) == 8
    assert internals.port_of_store({"PADDLE_TRAINER_ENDPOINTS": "a:9,b:10"}) == 9
    assert internals.port_of_store({}) is None


def test_a_closed_port_takes_no_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        internals.close_port(port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        assert port not in [c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]


@pytest.mark.job
def test_an_exception_that_c_cannot_pass_on_calls_the_handler() -> None:
    assert hasattr(ctypes.CDLL("libstdc++.so.6"), "_ZSt13set_terminatePFvvE")
    process = python("""
        import ctypes, os
        from mtrain.backends._paddle import internals
        internals.on_terminate(lambda: os._exit(7))
        ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
    """)
    assert process.returncode == 7, process.stderr


@pytest.mark.job
@pytest.mark.parametrize(("call", "works"), [("internals.keep_kernels()", True), ("pass", False)])
def test_kernels_that_are_kept_compute_after_the_exit_functions(call: str, works: bool) -> None:
    program = f"""
        import atexit

        from mtrain.backends._paddle import internals, paddle

        x = paddle.to_tensor([1.0, 2.0])
        {call}
        atexit._run_exitfuncs()
        paddle.disable_static()  # another exit function of Paddle leaves its dynamic mode
        assert (x + x).tolist() == [2.0, 4.0]
    """
    assert (python(program).returncode == 0) is works
