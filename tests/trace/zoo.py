"""Small trainings with one planted mistake each, recorded by ``mtrain_trace``; a program: python zoo.py OUT [NAME ...].

torch is imported once; each training, and each rank of it, is a copy (fork) of this process. Nothing of mtrain but the
recorder is used: the trainings are plain torch, as a script's author writes them.
"""

import contextlib
import os
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mtrain_trace

SAMPLES, BATCH, UPDATES = 64, 8, 12
SHORT = ("last-batch-dropped", "last-batch-kept", "short-window", "filled-up")
"""Mistakes at the end of an epoch that does not fill its last batch."""


@dataclass(frozen=True)
class Case:
    """One training: how many ranks and micro batches, what the model has, and the mistake."""

    ranks: int = 1
    micro_batches: int = 1
    fault: str = ""
    batch_norm: bool = False
    dropout: bool = False
    rule: str = "sgd"
    model_options: dict[str, Any] = field(default_factory=dict)
    rule_options: dict[str, Any] = field(default_factory=dict)
    updates: int = UPDATES
    clip: float | None = 0.5
    recurrent: str = ""
    """The layer that carries a state from update to update, ``lstm`` or ``cell``; empty: none."""
    splits: bool = False
    """FSDP2 splits weights, gradients and moments among the ranks."""


PLAIN = Case()
TWO = Case(ranks=2)
HALVES = Case(micro_batches=2)
TWO_HALVES = Case(ranks=2, micro_batches=2)
NORM = Case(batch_norm=True)
ADAM = Case(rule="adamw")
DROP = Case(ranks=2, dropout=True)

CASES: dict[str, Case] = {
    "plain": PLAIN,
    "again": PLAIN,
    "two": TWO,
    "halves": HALVES,
    "two-halves": TWO_HALVES,
    "norm": NORM,
    "adam": ADAM,
    "drop": DROP,
    "foreach": replace(PLAIN, rule_options={"foreach": True}),
    "one-by-one": replace(PLAIN, rule_options={"foreach": False}),
    "held": replace(PLAIN, fault="held"),
    "split": replace(TWO, splits=True),
    "adam-split": replace(ADAM, ranks=2, splits=True),
    "adam-two": replace(ADAM, ranks=2),
    "four": replace(PLAIN, ranks=4),
    "quarters": replace(PLAIN, micro_batches=4),
    "four-split": replace(PLAIN, ranks=4, splits=True),
    "recomputed": replace(PLAIN, fault="recomputed"),
    "recomputed-reentrant": replace(PLAIN, fault="recomputed-reentrant"),
    "autocast": replace(PLAIN, fault="autocast"),
    "reversed": replace(PLAIN, fault="reversed"),
    "kept-zeros": replace(PLAIN, fault="kept-zeros"),
    "threads": replace(PLAIN, fault="threads"),
    "fused": replace(PLAIN, rule_options={"fused": True}),
    "held-two": replace(TWO, fault="held"),
    "views": replace(TWO, fault="views"),
    "small-buckets": replace(TWO, fault="small-buckets"),
    "scaled-two": replace(TWO, fault="scaled"),
    "unclipped-two": replace(TWO, clip=None),
    "unclipped-halves": replace(HALVES, clip=None),
    "nesterov-two": replace(TWO, rule_options={"nesterov": True}),
    "nesterov-split": replace(TWO, rule_options={"nesterov": True}, splits=True),
    "rmsprop-two": replace(TWO, rule="rmsprop"),
    "rmsprop-quarters": replace(PLAIN, rule="rmsprop", micro_batches=4),
    "adam-again": ADAM,
    "adam-four": replace(ADAM, ranks=4),
    "adam-halves": replace(ADAM, micro_batches=2),
    "adam-fused": replace(ADAM, rule_options={"fused": True}),
    "adam-foreach": replace(ADAM, rule_options={"foreach": True}),
    "adam-two-halves": replace(ADAM, ranks=2, micro_batches=2),
    "norm-again": NORM,
    "drop-again": DROP,
    "tied-two": replace(TWO, fault="tied"),
    "untied-halves": replace(HALVES, fault="untied"),
    "undivided": replace(HALVES, fault="undivided"),
    "no-sync": replace(TWO_HALVES, fault="no-sync"),
    "same-shard": replace(TWO, fault="same-shard"),
    "set-epoch": replace(TWO, fault="set-epoch"),
    "clipped": replace(PLAIN, clip=0.25),
    "unclipped": replace(PLAIN, clip=None),
    "clip-before-exchange": replace(TWO, fault="clip-before-exchange"),
    "rate-scaled": replace(TWO, rule_options={"lr": 0.2}),
    "batch-norm-of-a-rank": replace(NORM, ranks=2),
    "same-dropout": replace(DROP, fault="same-dropout"),
    "decay-on-biases": replace(ADAM, fault="decay-on-biases"),
    "average-stays": replace(PLAIN, fault="average-stays"),
    "resumed": replace(ADAM, fault="resumed"),
    "resumed-without-moments": replace(ADAM, fault="resumed-without-moments"),
    "eval-mode": replace(NORM, fault="eval-mode"),
    "last-batch-kept": replace(PLAIN, fault="last-batch-kept"),
    "last-batch-dropped": replace(PLAIN, fault="last-batch-dropped"),
    "frozen": replace(PLAIN, fault="frozen"),
    "norm-momentum": replace(NORM, model_options={"momentum": 0.01}),
    "nesterov": replace(PLAIN, rule_options={"nesterov": True}),
    "epsilon": replace(ADAM, rule_options={"eps": 1e-3}),
    "averaged-twice": replace(TWO, fault="averaged-twice"),
    "summed": replace(TWO, fault="summed"),
    "loss-times-ranks": replace(TWO, fault="loss-times-ranks"),
    "labels-of-a-rank": replace(TWO, fault="labels-of-a-rank"),
    "labels-against-samples": replace(PLAIN, fault="labels-against-samples"),
    "smoothing": replace(PLAIN, fault="smoothing"),
    "head-without-bias": replace(PLAIN, fault="head-without-bias"),
    "zero-grad": replace(PLAIN, fault="zero-grad"),
    "seed": replace(PLAIN, fault="seed"),
    "normalisation": replace(PLAIN, fault="normalisation"),
    "batch-skipped": replace(PLAIN, fault="batch-skipped"),
    "batch-per-rank": replace(TWO, fault="batch-per-rank"),
    "rate-of-one-rank": replace(TWO, fault="rate-of-one-rank"),
    "schedule": replace(PLAIN, fault="schedule"),
    "another-rule": replace(PLAIN, rule="rmsprop"),
    "scaled": replace(PLAIN, fault="scaled"),
    "scaler-skips": replace(PLAIN, fault="scaler-skips"),
    "untied": replace(PLAIN, fault="untied"),
    "tied": replace(PLAIN, fault="tied"),
    "padded": replace(PLAIN, fault="padded"),
    "padding-counted": replace(PLAIN, fault="padding-counted"),
    "few-labels": replace(PLAIN, fault="few-labels"),
    "few-labels-halves": replace(HALVES, fault="few-labels"),
    "few-labels-two": replace(TWO, fault="few-labels"),
    "filled-up": replace(TWO, fault="filled-up"),
    "short-window": replace(PLAIN, micro_batches=4, fault="short-window"),
    "last-alone": replace(HALVES, fault="last-alone"),
    "curved": replace(PLAIN, fault="curved"),
    "curved-halves": replace(HALVES, fault="curved"),
    "curved-per-pass": replace(HALVES, fault="curved-per-pass"),
    "curved-per-epoch": replace(PLAIN, fault="curved-per-epoch"),
    "curved-early": replace(PLAIN, fault="curved-early"),
    "resumed-curved-anew": replace(ADAM, fault="resumed-curved-anew"),
    "adam-curved": replace(ADAM, fault="curved"),
    "resumed-data-anew": replace(ADAM, fault="resumed-data-anew"),
    "read-twice": replace(PLAIN, fault="read-twice"),
    "step-twice": replace(PLAIN, fault="step-twice"),
    "one-more-counted": replace(PLAIN, fault="one-more-counted"),
    "whole-batch-on-each": replace(TWO, fault="whole-batch-on-each"),
    "carried": replace(PLAIN, recurrent="lstm"),
    "carried-two": replace(TWO, recurrent="lstm"),
    "not-carried": replace(PLAIN, recurrent="lstm", fault="not-carried"),
    "cell-carried": replace(PLAIN, recurrent="cell"),
    "cell-reset": replace(PLAIN, recurrent="cell", fault="reset"),
    "pairs": replace(PLAIN, fault="pairs"),
    "pairs-of-a-rank": replace(TWO, fault="pairs"),
    "large-epsilon": replace(ADAM, rule_options={"eps": 1e-3}),
    "epsilon-inside": replace(ADAM, rule="adam-inside", rule_options={"eps": 1e-3}),
}


class AdamInside(torch.optim.AdamW):
    """AdamW whose epsilon stands inside of the root, as some frameworks have it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, beta1, beta2 = self.state[p], *group["betas"]
                if not state:
                    state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                mean = state["exp_avg"] / (1 - beta1 ** state["step"].item())
                square = state["exp_avg_sq"] / (1 - beta2 ** state["step"].item())
                p.sub_(group["lr"] * mean / (square + group["eps"]).sqrt())


class Holder(nn.Module):
    """A module that only holds the model, as scripts write it for a loss or labels; it is called by keyword."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.net(images), labels)


class Recomputed(nn.Module):
    """A model that keeps the activations of its first layer alone, and computes the others again in the backward pass."""

    def __init__(self, net: nn.Sequential, *, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = net, reentrant

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.net[0](images)
        return checkpoint(lambda values: self.net[1:](values), first, use_reentrant=self.reentrant)


class Autocast(nn.Module):
    """A model that switches autocast on within its forward pass, as Accelerate makes it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.net(images).float()


class Recurrent(nn.Module):
    """A model that reads each sample as two steps, and keeps its state for the next update unless it is a mistake not to."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.fault, self.state, self.passes = case.fault, None, 0
        self.layer = nn.LSTM(4, 8, batch_first=True) if case.recurrent == "lstm" else nn.GRUCell(4, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        steps = images.view(len(images), 2, 4)
        self.passes += 1
        if self.fault == "not-carried" or (self.fault == "reset" and self.passes == 5):
            self.state = None
        if isinstance(self.layer, nn.LSTM):
            out, state = self.layer(steps, self.state)
            self.state = tuple(part.detach() for part in state)
            return self.head(out[:, -1])
        state = self.state
        for step in range(2):
            state = self.layer(steps[:, step], hx=state)
        self.state = state.detach()
        return self.head(state)


def build(case: Case) -> nn.Module:
    torch.manual_seed(1 if case.fault == "seed" else 0)
    if case.recurrent:
        return Recurrent(case)
    first, last = nn.Linear(8, 16), nn.Linear(16, 16)
    parts: list[nn.Module] = [first]
    parts += [nn.BatchNorm1d(16, **case.model_options)] if case.batch_norm else []
    parts += [nn.ReLU(), *([nn.Dropout(0.5)] if case.dropout else []), last, nn.ReLU(), nn.Linear(16, 4)]
    model = nn.Sequential(*parts)
    if case.fault in ("tied", "untied"):
        second = nn.Linear(16, 16)
        second.load_state_dict(last.state_dict())
        second.weight = last.weight if case.fault == "tied" else second.weight
        model = nn.Sequential(first, nn.ReLU(), last, nn.ReLU(), second, nn.ReLU(), model[-1])
    if case.fault == "frozen":
        first.weight.requires_grad_(False)
    if case.fault == "head-without-bias":
        model[-1] = nn.Linear(16, 4, bias=False)
    return model


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.rule.startswith("adam"):
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
        decay = 0.1 if case.fault == "decay-on-biases" else 0.0
        groups = [{"params": others}, {"params": biases, "weight_decay": decay}]
        rule = AdamInside if case.rule == "adam-inside" else torch.optim.AdamW
        return rule(groups, **{"lr": 0.01, "weight_decay": 0.1, **case.rule_options})
    if case.rule == "rmsprop":
        return torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **case.rule_options})


def indices(case: Case, update: int, *, rank: int) -> torch.Tensor:
    """Return the samples of a rank in an update; an epoch has SAMPLES // BATCH updates, or one more for what is left."""
    batch = BATCH * case.ranks if case.fault == "batch-per-rank" else BATCH
    # 60 samples are seven full batches and a rest of four.
    samples = SAMPLES - 4 if case.fault in SHORT else SAMPLES
    if case.fault == "read-twice":  # two workers that read the same stream
        update //= 2
    if case.fault == "batch-skipped" and update >= 5:
        update += 1
    length = samples // batch + (1 if samples % batch and case.fault != "last-batch-dropped" else 0)
    epoch, place = divmod(update, length)
    generator = torch.Generator().manual_seed(7 if case.fault == "set-epoch" else 7 + epoch)
    chosen = torch.randperm(samples, generator=generator)[place * batch : (place + 1) * batch]
    chosen = chosen.flip(0) if case.fault == "reversed" else chosen
    if case.fault == "filled-up":  # with samples of the epoch's beginning
        first = torch.randperm(samples, generator=torch.Generator().manual_seed(7 + epoch))[: batch - len(chosen)]
        chosen = torch.cat([chosen, first])
    if case.fault == "whole-batch-on-each":
        return chosen
    return chosen[:: case.ranks] if case.fault == "same-shard" else chosen[rank :: case.ranks]


def loss_of(case: Case, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if case.fault == "pairs":  # each sample against those of its rank
        return functional.cross_entropy(logits @ logits.T.detach(), torch.arange(len(logits)))
    if case.fault == "one-more-counted":
        return functional.cross_entropy(logits, labels, reduction="sum") / (len(labels) + 1)
    if case.fault in ("padded", "padding-counted"):  # the last sample of a batch stands for padding
        labels = torch.cat([labels[:-1], torch.full((1,), -100)])
        summed = functional.cross_entropy(logits, labels, reduction="sum")
        return summed / (len(labels) if case.fault == "padding-counted" else (labels >= 0).sum())
    smoothing = 0.1 if case.fault == "smoothing" else 0.0
    loss = functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    loss = loss * case.ranks if case.fault == "loss-times-ranks" else loss
    return loss if case.fault == "undivided" else loss / case.micro_batches


def exchange_and_clip(case: Case, net: nn.Module, *, manual: bool) -> None:
    if case.fault == "clip-before-exchange":
        nn.utils.clip_grad_norm_(net.parameters(), case.clip or 1.0)
    if manual:
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= {"summed": 1, "averaged-twice": 4}.get(case.fault, 2)
    if case.clip and case.fault != "clip-before-exchange":
        nn.utils.clip_grad_norm_(net.parameters(), case.clip)


def change_the_rate(case: Case, optimizer: torch.optim.Optimizer, update: int, *, rank: int) -> None:
    if case.fault == "rate-of-one-rank" and update == 6 and rank == 1:
        optimizer.param_groups[0]["lr"] /= 10
    if case.fault == "schedule" and update >= 6:
        optimizer.param_groups[0]["lr"] *= 0.9
    steps = {
        "curved": update,
        "curved-per-pass": 2 * update,
        "curved-per-epoch": update // 4,
        "curved-early": update + 1,
    }
    if case.fault in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.95 ** steps[case.fault]


def unscale(case: Case, scaler: Any, optimizer: torch.optim.Optimizer, net: nn.Module, update: int) -> None:
    if case.fault == "scaler-skips" and update == 2:
        next(net.parameters()).grad.fill_(float("inf"))  # what float16 makes of a large gradient
    if scaler.is_enabled():
        scaler.unscale_(optimizer)


def after_a_step(case: Case, optimizer: torch.optim.Optimizer, net: nn.Module) -> None:
    if case.fault == "step-twice":
        optimizer.step()
    if case.fault == "average-stays":
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.9)


def data_of(case: Case, *, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.randn(SAMPLES, 8, generator=generator), torch.randint(0, 4, (SAMPLES,), generator=generator)
    if case.fault == "normalisation":
        images = images / 0.5
    if case.fault == "labels-of-a-rank" and rank == 1:
        labels = labels.roll(1)
    if case.fault == "few-labels":  # the mean is over those that are left, whose number differs from pass to pass
        labels[torch.arange(SAMPLES) % 3 == 0] = -100
    return images, labels


def train(case: Case, *, rank: int) -> None:
    """Train one rank, as a plain script does."""
    images, labels = data_of(case, rank=rank)
    if case.fault == "threads":
        torch.set_num_threads(2)
    net = build(case)
    manual = case.fault in ("clip-before-exchange", "summed", "averaged-twice")
    if case.splits:
        model = fully_shard(net, mesh=init_device_mesh("cpu", (case.ranks,)))
    else:
        options = {"views": {"gradient_as_bucket_view": True}, "small-buckets": {"bucket_cap_mb": 1e-4}}.get(
            case.fault, {}
        )
        model = nn.parallel.DistributedDataParallel(net, **options) if case.ranks > 1 and not manual else net
    optimizer = optimizer_of(case, net)
    if case.fault.startswith("recomputed"):
        model = Recomputed(net, reentrant=case.fault == "recomputed-reentrant")
    model = Autocast(net) if case.fault == "autocast" else model
    held = Holder(model) if case.fault == "held" else None
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=case.fault in ("scaled", "scaler-skips"))
    torch.manual_seed(5 if case.fault == "same-dropout" else 5 + rank)
    for update in range(case.updates):
        if case.fault == "eval-mode" and update == 4:
            net.eval()
        chosen = indices(case, update, rank=rank)
        if case.fault != "zero-grad":
            optimizer.zero_grad(set_to_none=case.fault != "kept-zeros")
        # Of a short last batch the micro batches are as long as always, and fewer.
        parts = chosen.split(2) if case.fault == "short-window" else chosen.chunk(case.micro_batches)
        for number, part in enumerate(parts):
            if case.fault == "last-alone":  # what ZeRO 1 and 2 do where each backward pass counts as an update
                net.zero_grad()
            waits = case.ranks > 1 and not manual and (case.fault == "no-sync" or number < case.micro_batches - 1)
            with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                targets = labels[part].roll(1) if case.fault == "labels-against-samples" else labels[part]
                if held:
                    held(images=images[part], labels=targets).backward()
                else:
                    scaler.scale(loss_of(case, model(images[part]), targets)).backward()
        unscale(case, scaler, optimizer, net, update)
        exchange_and_clip(case, net, manual=manual)
        change_the_rate(case, optimizer, update, rank=rank)
        scaler.step(optimizer)
        scaler.update()
        if update == 5:
            after_a_step(case, optimizer, net)


def train_in_two_starts(case: Case, out: Path) -> None:
    """Train half, then go on in another process from saved weights, with or without the optimizer's state."""
    state = tempfile.mktemp()
    for part in (0, 1):
        if os.fork() == 0:
            if part:
                mtrain_trace.attach(str(out))
            generator = torch.Generator().manual_seed(3)
            images = torch.randn(SAMPLES, 8, generator=generator)
            labels = torch.randint(0, 4, (SAMPLES,), generator=generator)
            net = build(case)
            optimizer = optimizer_of(case, net)
            if part:
                saved = torch.load(state)
                net.load_state_dict(saved[0])
                if case.fault != "resumed-without-moments":
                    optimizer.load_state_dict(saved[1])
            for update in range(part * 6, part * 6 + 6):
                chosen = indices(case, update - 6 if part and case.fault == "resumed-data-anew" else update, rank=0)
                if case.fault == "resumed-curved-anew":
                    for group in optimizer.param_groups:
                        group["lr"] = 0.01 * 0.95 ** (update % 6)
                optimizer.zero_grad()
                functional.cross_entropy(net(images[chosen]), labels[chosen]).backward()
                nn.utils.clip_grad_norm_(net.parameters(), case.clip or 1.0)
                optimizer.step()
            if not part:
                torch.save((net.state_dict(), optimizer.state_dict()), state)
            sys.exit(0)
        os.wait()
    Path(state).unlink()


def run(name: str, out: Path) -> list[int]:
    """Start the ranks of a case as copies of this process; return their process ids."""
    case, store, children = CASES[name], tempfile.mktemp(), []
    if case.fault.startswith("resumed"):
        train_in_two_starts(case, out / name)
        return []
    for rank in range(case.ranks):
        child = os.fork()
        if child == 0:
            if case.ranks > 1:
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.ranks)
            recorder = mtrain_trace.attach(str(out / name))
            train(case, rank=rank)
            recorder.close()
            os._exit(0)
        children.append(child)
    return children


def main() -> None:
    torch.set_num_threads(1)
    # The first optimizer imports torch._dynamo, for a second and more: here once, for all copies.
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    out, names = Path(sys.argv[1]), sys.argv[2:] or list(CASES)
    for name in names:
        for child in run(name, out):
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"{name}: a rank failed")


if __name__ == "__main__":
    main()
