"""A plain script on Paddle: three steps a second for ever, or a mistake of its own after ten."""

import itertools
import sys
import time

import paddle
import paddle.distributed as dist

mistake = sys.argv[1]
paddle.device.set_device("cpu")
dist.init_parallel_env()
rank = dist.get_rank()
net = paddle.nn.Linear(8, 1)
model = paddle.DataParallel(net)
for number in itertools.count():
    print("step", number, flush=True)
    if number == 10 and mistake == "calls":
        dist.barrier() if rank == 1 else dist.all_reduce(paddle.ones([1]))
    if number == 10 and mistake == "batches" and rank == 1:
        break
    model(paddle.ones([2, 8])).sum().backward()
    net.clear_gradients()
    time.sleep(0.3)
dist.barrier()
