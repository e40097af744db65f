"""Small trainings by Paddle with one planted mistake each, recorded by ``mtrain_trace``; a program: python paddle_zoo.py OUT.

Paddle is imported once; each training, and each rank of it, is a copy (fork) of this process. Nothing of mtrain but the
recorder is used.
"""

import contextlib
import os
import socket
import sys
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paddle
from paddle import nn
from paddle.distributed import fleet

import mtrain_trace
from tests.trace import twins

AT_A_TIME = 8
"""Trainings that run at the same time."""


@dataclass(frozen=True)
class Case:
    """One training: how many ranks and micro batches, what the model has, and the mistake."""

    ranks: int = 1
    micro_batches: int = 1
    fault: str = ""
    norm: float | None = None
    """Momentum of BatchNorm, in Paddle's sense; None: the model has none."""
    rule: str = "momentum"
    clip: float | None = 0.5
    fleet: bool = False
    """The model and the optimizer are given to Fleet, in place of DataParallel."""
    groups: bool = False


PLAIN = Case()
TWO = Case(ranks=2)
HALVES = Case(micro_batches=2)
TWO_HALVES = Case(ranks=2, micro_batches=2)
ADAM = Case(rule="adamw")
NORM = Case(norm=0.9)

CASES: dict[str, Case] = {
    "plain": PLAIN,
    "again": PLAIN,
    "two": TWO,
    "halves": HALVES,
    "two-halves": TWO_HALVES,
    "fleet": replace(TWO, fleet=True),
    "minimized": replace(PLAIN, fault="minimized"),
    "groups": replace(PLAIN, groups=True),
    "held": replace(PLAIN, fault="held"),
    "adam": ADAM,
    "adam-two": replace(ADAM, ranks=2),
    "adam-groups": replace(ADAM, groups=True),
    "adam-halves": replace(ADAM, micro_batches=2),
    "norm": NORM,
    "norm-again": NORM,
    "norm-momentum": replace(NORM, norm=0.1),
    "undivided": replace(HALVES, fault="undivided"),
    "no-sync": replace(TWO_HALVES, fault="no-sync"),
    "unwrapped": replace(TWO, fault="unwrapped"),
    "unclipped": replace(PLAIN, clip=None),
    "clipped": replace(PLAIN, clip=0.25),
    "labels-of-a-rank": replace(TWO, fault="labels-of-a-rank"),
    "set-epoch": replace(TWO, fault="set-epoch"),
    "same-shard": replace(TWO, fault="same-shard"),
    "summed": replace(TWO, fault="summed"),
    "not-cleared": replace(PLAIN, fault="not-cleared"),
    "schedule": replace(PLAIN, fault="schedule"),
    "rate-of-one-rank": replace(TWO, fault="rate-of-one-rank"),
    "rmsprop": replace(PLAIN, rule="rmsprop"),
    "decay": replace(ADAM, fault="decay"),
    "eval-mode": replace(NORM, fault="eval-mode"),
    "average-stays": replace(PLAIN, fault="average-stays"),
    "frozen": replace(PLAIN, fault="frozen"),
}


class Holder(nn.Layer):
    """A layer that only holds the model and computes its loss; it is called by keyword."""

    def __init__(self, net: nn.Layer) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Any, labels: Any) -> Any:
        return nn.functional.cross_entropy(self.net(images), labels)


def build(case: Case) -> nn.Sequential:
    norm = [] if case.norm is None else [nn.BatchNorm1D(16, momentum=case.norm)]
    layers = [nn.Linear(*sizes) for sizes in twins.LAYERS]
    for layer, (weight, bias) in zip(layers, twins.start(), strict=True):
        layer.weight.set_value(weight.T)
        layer.bias.set_value(bias)
    if case.fault == "frozen":
        layers[0].weight.stop_gradient = True
    return nn.Sequential(layers[0], *norm, nn.ReLU(), layers[1], nn.ReLU(), layers[2])


def optimizer_of(case: Case, net: nn.Layer) -> paddle.optimizer.Optimizer:
    parameters: list[Any] = list(net.parameters())
    if case.groups:
        parameters = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    clip = nn.ClipGradByGlobalNorm(case.clip) if case.clip and not case.groups else None
    if case.rule == "adamw":
        decay = 0.2 if case.fault == "decay" else 0.1
        return paddle.optimizer.AdamW(0.01, parameters=parameters, weight_decay=decay, grad_clip=clip)
    if case.rule == "rmsprop":
        return paddle.optimizer.RMSProp(0.1, momentum=0.9, parameters=parameters, weight_decay=0.01, grad_clip=clip)
    rate: Any = 0.1
    if case.fault == "schedule":
        rate = paddle.optimizer.lr.StepDecay(0.1, step_size=6)
    return paddle.optimizer.Momentum(rate, 0.9, parameters=parameters, weight_decay=0.01, grad_clip=clip)


def step(case: Case, net: nn.Layer, optimizer: Any, loss: Any, *, update: int, rank: int) -> None:
    if case.groups:  # Paddle clips each group by itself, so this script clips all of them
        nn.utils.clip_grad_norm_(net.parameters(), case.clip)
    if case.fault == "summed":
        for parameter in net.parameters():
            parameter.grad.set_value(parameter.grad * 2)
    if case.fault == "rate-of-one-rank" and update == 6 and rank == 1:
        optimizer.set_lr(0.01)
    optimizer.minimize(loss) if case.fault == "minimized" else optimizer.step()
    if case.fault == "schedule":
        optimizer._learning_rate.step()
    if case.fault != "not-cleared":
        optimizer.clear_grad()
    if case.fault == "average-stays" and update == 5:
        for parameter in net.parameters():
            parameter.set_value(parameter * 0.9)


def train(case: Case, *, rank: int) -> None:
    """Train one rank, as a plain script does."""
    images, labels = twins.data()
    if case.fault == "labels-of-a-rank" and rank == 1:
        labels = labels * 0 + 3
    net: Any = build(case)
    optimizer: Any = optimizer_of(case, net)
    model = net
    if case.fleet:
        model, optimizer = fleet.distributed_model(net), fleet.distributed_optimizer(optimizer)
    elif case.ranks > 1 and case.fault != "unwrapped":
        model = paddle.DataParallel(net)
    held = Holder(model) if case.fault == "held" else None
    for update in range(twins.UPDATES):
        if case.fault == "eval-mode" and update == 4:
            net.eval()
        mine = twins.chosen(update, shuffled_anew=case.fault != "set-epoch")
        mine = mine[:: case.ranks] if case.fault == "same-shard" else mine[rank :: case.ranks]
        for number in range(case.micro_batches):
            part = mine[number :: case.micro_batches]
            waits = case.ranks > 1 and (case.fault == "no-sync" or number < case.micro_batches - 1)
            batch, target = paddle.to_tensor(images[part]), paddle.to_tensor(labels[part])
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = held(images=batch, labels=target) if held else nn.functional.cross_entropy(model(batch), target)
                (loss if case.fault == "undivided" else loss / case.micro_batches).backward()
        step(case, net, optimizer, loss, update=update, rank=rank)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def join(case: Case, endpoints: list[str], rank: int) -> None:
    os.environ.update(
        PADDLE_TRAINER_ID=str(rank),
        PADDLE_TRAINERS_NUM=str(case.ranks),
        PADDLE_TRAINER_ENDPOINTS=",".join(endpoints),
        PADDLE_CURRENT_ENDPOINT=endpoints[rank],
        PADDLE_DISTRI_BACKEND="gloo",
    )
    if case.fleet:
        fleet.init(is_collective=True)
    else:
        paddle.distributed.init_parallel_env()


def run(name: str, out: Path) -> list[int]:
    """Start the ranks of a case as copies of this process; return their process ids."""
    case, children = CASES[name], []
    endpoints = [f"127.0.0.1:{port}" for port in free_ports(case.ranks)]
    for rank in range(case.ranks):
        child = os.fork()
        if child == 0:
            try:
                if case.ranks > 1:
                    join(case, endpoints, rank)
                recorder = mtrain_trace.attach(str(out / name))
                train(case, rank=rank)
                recorder.close()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return children


def main() -> None:
    paddle.set_device("cpu")
    out, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    # Several at a time: ranks that join wait for one another, for seconds that cost nothing.
    for first in range(0, len(names), AT_A_TIME):
        started = {name: run(name, out) for name in names[first : first + AT_A_TIME]}
        for name, children in started.items():
            ended = [os.waitpid(child, 0)[1] for child in children]
            if any(ended):
                sys.exit(f"{name}: a rank failed")


if __name__ == "__main__":
    main()
