"""Training loops as people write them, with and without a mistake, recorded by ``mtrain_trace``; a program: python loops.py OUT.

Each rank is a copy (fork) of this process. Unlike the trainings of ``zoo.py`` they share no loop: the mistakes are in its shape.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split

import mtrain_trace

UPDATES, ROWS = 5, 8
GENERATOR = torch.Generator().manual_seed(3)
IMAGES, LABELS = torch.randn(64, 8, generator=GENERATOR), torch.randint(0, 4, (64,), generator=GENERATOR)
TOKENS = torch.randint(0, 12, (64, 17), generator=GENERATOR)
SERIES = torch.randn(64, 16, 4, generator=GENERATOR)


def rows(update: int, rank: int, ranks: int) -> torch.Tensor:
    """Return the samples of a rank in an update."""
    return torch.arange(update * ROWS, (update + 1) * ROWS)[rank::ranks]


def net(last: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, last))


def ready(model: nn.Module, ranks: int) -> nn.Module:
    return DistributedDataParallel(model) if ranks > 1 else model


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)


class Language(nn.Module):
    """A small language model that is given its labels and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12))

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.inner(idx)
        return logits, functional.cross_entropy(logits.view(-1, 12), targets.reshape(-1))


class Unnamed(Language):
    """The same with other names of the arguments."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(first, second)


def language(fault: str, rank: int, ranks: int, *, kind: type = Language, named: bool = False) -> None:
    model = ready(kind(), ranks)
    optimizer = sgd(model)
    for update in range(UPDATES):
        chosen = TOKENS[rows(update, rank, ranks)]
        x, y = chosen[:, :-1].contiguous(), chosen[:, 1:].contiguous()
        y = x if fault == "not shifted" else y
        optimizer.zero_grad()
        _, loss = model(x, targets=y) if named else model(x, y)
        loss.backward()
        optimizer.step()


def summed(fault: str, rank: int, ranks: int) -> None:
    model = ready(net(), ranks)
    optimizer = sgd(model, 0.01)
    for update in range(UPDATES):
        chosen = rows(update, rank, ranks)
        optimizer.zero_grad()
        parts = chosen.chunk(2) if fault == "halves" else [chosen]
        for part in parts:
            if fault == "mean":
                loss = functional.cross_entropy(model(IMAGES[part]), LABELS[part])
            elif fault == "by hand":
                loss = functional.cross_entropy(model(IMAGES[part]), LABELS[part], reduction="none").sum()
            else:
                loss = nn.CrossEntropyLoss(reduction="sum")(model(IMAGES[part]), LABELS[part])
            (loss / len(parts)).backward()
        optimizer.step()


def ordered(fault: str, rank: int, ranks: int) -> None:
    """The calls of an update in the right order, or in another one."""
    model = ready(net(), ranks)
    optimizer = sgd(model)
    for update in range(UPDATES):
        optimizer.zero_grad()
        for part in rows(update, rank, ranks).chunk(2):
            if fault == "clip first":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            (functional.cross_entropy(model(IMAGES[part]), LABELS[part]) / 2).backward()
        if fault != "clip first":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if fault.startswith("cleared"):
            optimizer.zero_grad(set_to_none=fault == "cleared")
        optimizer.step()


def headed(fault: str, rank: int, ranks: int) -> None:
    model = net()
    optimizer = sgd(model)
    torch.manual_seed(4)
    model[2] = nn.Linear(16, 4)
    optimizer = optimizer if fault else sgd(model)
    for update in range(UPDATES):
        chosen = rows(update, rank, ranks)
        optimizer.zero_grad()
        functional.cross_entropy(model(IMAGES[chosen]), LABELS[chosen]).backward()
        optimizer.step()


def mixed(fault: str, rank: int, ranks: int) -> None:
    model = ready(net(), ranks)
    optimizer = sgd(model)
    for update in range(UPDATES):
        chosen = rows(update, rank, ranks)
        optimizer.zero_grad()
        shares = torch.softmax(model(IMAGES[chosen]), dim=0 if fault else 1)
        functional.nll_loss(torch.log(shares), LABELS[chosen]).backward()
        optimizer.step()


def split(fault: str, rank: int, ranks: int, *, epochs: int = 1) -> None:
    model = ready(net(), ranks)
    optimizer = sgd(model)
    seed = 11 + rank + (5 if "seed" in fault else 0) if fault else 11
    data, _ = random_split(TensorDataset(IMAGES, LABELS), [48, 16], torch.Generator().manual_seed(seed))
    sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, ROWS // ranks, sampler=sampler):
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()


class TimeMajor(nn.Module):
    """A recurrent network that reads (steps, samples, features), as torch's layers do unless told otherwise."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        if kind == "attention":
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0)
        else:
            self.layer = nn.GRUCell(4, 8) if kind == "cell" else nn.LSTM(4, 8)
        self.head = nn.Linear(4 if kind == "attention" else 8, 4)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        if self.kind == "cell":
            state = None
            for step in steps:
                state = self.layer(step, state)
            return self.head(state)
        out = self.layer(steps)
        return self.head((out if self.kind == "attention" else out[0])[-1])


def time_major(fault: str, rank: int, ranks: int, *, kind: str = "lstm", steps: int = 16) -> None:
    model = ready(TimeMajor(kind), ranks)
    optimizer = sgd(model)
    for update in range(UPDATES):
        chosen = rows(update, rank, ranks)
        series = SERIES[chosen, :steps].transpose(0, 1).contiguous()
        optimizer.zero_grad()
        functional.cross_entropy(model(series), LABELS[chosen]).backward()
        optimizer.step()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.BatchNorm1d(16))
        self.head = nn.Linear(16, 4)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


def started(fault: str, rank: int, ranks: int) -> None:
    torch.manual_seed(2 if fault == "seed" else 1)
    model = Normed()
    if fault == "loaded":
        with torch.no_grad():
            model.body[0].weight.mul_(0.5)
    optimizer = sgd(model)
    for update in range(UPDATES):
        chosen = rows(update, rank, ranks)
        optimizer.zero_grad()
        functional.cross_entropy(model(IMAGES[chosen]), LABELS[chosen]).backward()
        optimizer.step()


def renewed(fault: str, rank: int, ranks: int, *, rule: str = "SGD") -> None:
    """A training whose optimizer is made anew after three updates: as it was, with its state, in other groups, of another rule."""
    model = ready(net(), ranks)
    options = {"lr": 0.01, **({"momentum": 0.9} if rule == "SGD" else {})}
    optimizer = getattr(torch.optim, rule)(model.parameters(), **options)
    for update in range(UPDATES):
        chosen = rows(update, rank, ranks)
        optimizer.zero_grad()
        functional.cross_entropy(model(IMAGES[chosen]), LABELS[chosen]).backward()
        optimizer.step()
        if fault and update == 2:
            held, state = list(model.parameters()), optimizer.state_dict()
            if fault == "groups":
                optimizer = torch.optim.SGD([{"params": held[2:]}, {"params": held[:2], "lr": 0.02}], **options)
            else:
                kind = torch.optim.RMSprop if fault == "rule" else type(optimizer)
                optimizer = kind(held, **options)
            if fault == "loaded":
                optimizer.load_state_dict(state)


def given(train: Callable[..., None], fault: str = "", ranks: int = 1, **options: object) -> Callable[[int], int]:
    return lambda rank: train(fault, rank, ranks, **options) if rank >= 0 else ranks


LOOPS = {
    "language": given(language),
    "language-two": given(language, ranks=2),
    "language-not-shifted": given(language, "not shifted"),
    "named": given(language, named=True),
    "named-not-shifted": given(language, "not shifted", named=True),
    "unnamed": given(language, kind=Unnamed),
    "unnamed-two": given(language, ranks=2, kind=Unnamed),
    "unnamed-not-shifted": given(language, "not shifted", kind=Unnamed),
    "summed": given(summed),
    "meant": given(summed, "mean"),
    "summed-two": given(summed, ranks=2),
    "summed-halves": given(summed, "halves"),
    "summed-by-hand": given(summed, "by hand"),
    "summed-by-hand-two": given(summed, "by hand", ranks=2),
    "ordered": given(ordered),
    "ordered-two": given(ordered, ranks=2),
    "clip-first": given(ordered, "clip first"),
    "clip-first-two": given(ordered, "clip first", ranks=2),
    "cleared": given(ordered, "cleared"),
    "cleared-to-zeros": given(ordered, "cleared to zeros"),
    "headed": given(headed),
    "headed-late": given(headed, "late"),
    "mixed": given(mixed, "dim 0"),
    "unmixed": given(mixed),
    "mixed-two": given(mixed, "dim 0", ranks=2),
    "split": given(split, epochs=2),
    "split-two": given(split, ranks=2, epochs=2),
    "own-splits": given(split, "own", ranks=2, epochs=1),
    "own-splits-long": given(split, "own", ranks=2, epochs=7),
    "split-long": given(split, ranks=2, epochs=7),
    "another-split": given(split, "seed", epochs=2),
    "steps": given(time_major),
    "steps-two": given(time_major, ranks=2),
    "steps-square": given(time_major, steps=8),
    "steps-square-two": given(time_major, steps=8, ranks=2),
    "cell-steps": given(time_major, kind="cell"),
    "cell-steps-two": given(time_major, kind="cell", ranks=2),
    "attention": given(time_major, kind="attention"),
    "attention-two": given(time_major, kind="attention", ranks=2),
    "started": given(started),
    "started-seed": given(started, "seed"),
    "started-loaded": given(started, "loaded"),
    "steady": given(renewed),
    "steady-adam": given(renewed, rule="AdamW"),
    **{f"renewed-{fault}": given(renewed, fault) for fault in ("anew", "loaded", "groups", "rule")},
    "renewed-adam": given(renewed, "anew", rule="AdamW"),
    "renewed-two": given(renewed, "anew", ranks=2),
}
"""Name -> a function that trains as a rank, and returns the number of ranks when it is called with -1."""


def main() -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # imports torch._dynamo, here once for all copies
    out, names = Path(sys.argv[1]), sys.argv[2:] or list(LOOPS)
    for name in names:
        loop, store, children = LOOPS[name], tempfile.mktemp(), []
        for rank in range(loop(-1)):
            children.append(os.fork())
            if children[-1] == 0:
                if loop(-1) > 1:
                    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=loop(-1))
                recorder = mtrain_trace.attach(str(out / name))
                loop(rank)
                recorder.close()
                os._exit(0)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        with contextlib.suppress(FileNotFoundError):
            Path(store).unlink()
        if any(statuses):
            sys.exit(f"{name}: a rank failed")


if __name__ == "__main__":
    main()
