"""Which optimizers of a script may step parts of arrays: a trial decides, and not a list of names."""

import itertools
import logging
import math

import numpy as np
import pytest
import torch

from mtrain.backends._torch.native import Made, NativeRule
from mtrain.backends._torch.scripts.native_parts import decide, rule_for_parts
from mtrain.backends._torch.scripts.native_trial import Trials, check_resumes
from mtrain.backends._torch.sharded.shards import Part
from mtrain.backends._torch.state import to_numpy
from mtrain.errors import SpecError
from tests.backends.test_torch_native_optimizers import OPTIMIZERS, Counting, network


class Rule(torch.optim.Optimizer):
    """A rule of a script: subclasses change one parameter."""

    def __init__(self, parameters, lr=0.05, **settings):
        super().__init__(parameters, {"lr": lr, **settings})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter, parameter.grad, self.state[parameter], group)
        return self.after()

    def after(self):
        return None


class Lion(Rule):
    """Steps are signs."""

    def change(self, parameter, gradient, state, group):
        mean = state.setdefault("exp_avg", torch.zeros_like(parameter))
        parameter.mul_(1 - group["lr"] * 0.1).add_((0.9 * mean + 0.1 * gradient).sign(), alpha=-group["lr"])
        mean.mul_(0.99).add_(gradient, alpha=0.01)


class Lookahead(Rule):
    """Goes back half of the way in every sixth update, to slow weights that each parameter keeps."""

    def change(self, parameter, gradient, state, group):
        state["step"] = state.get("step", 0) + 1
        slow = state.setdefault("slow", parameter.clone())
        parameter.sub_(gradient, alpha=group["lr"])
        if state["step"] % 6 == 0:
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)


class Lars(Rule):
    """Steps are as long as the array."""

    def change(self, parameter, gradient, state, group):
        parameter.sub_(gradient * parameter.norm() / gradient.norm().clamp(min=1e-9), alpha=group["lr"])


class ByGlobalNorm(Rule):
    """Steps are divided by the norm over all arrays."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        self.norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        return super().step()

    def change(self, parameter, gradient, state, group):
        parameter.sub_(gradient / self.norm, alpha=group["lr"])


class Late(Lars):
    """Is elementwise in the first eight updates."""

    def change(self, parameter, gradient, state, group):
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 8:
            super().change(parameter, gradient, state, group)
        else:
            parameter.sub_(gradient, alpha=group["lr"])


class OfLargeArrays(Lars):
    """Is elementwise for small arrays."""

    def change(self, parameter, gradient, state, group):
        if parameter.numel() >= 4096:
            super().change(parameter, gradient, state, group)
        else:
            parameter.sub_(gradient, alpha=group["lr"])


class ByShape(Rule):
    """Decays matrices alone."""

    def change(self, parameter, gradient, state, group):
        if parameter.dim() > 1:
            parameter.mul_(1 - 0.1 * group["lr"])
        parameter.sub_(gradient, alpha=group["lr"])


class PerRow(Rule):
    """Keeps a number for each row."""

    def change(self, parameter, gradient, state, group):
        rows = state.setdefault("rows", torch.zeros(len(parameter)))
        rows.add_(1)
        parameter.sub_(gradient, alpha=group["lr"])


class Noisy(Rule):
    """Adds noise, of which a part of an array gets another part."""

    def change(self, parameter, gradient, state, group):
        parameter.sub_(gradient + torch.randn_like(gradient), alpha=group["lr"])


class NeedsClosure(Rule):
    """Computes the loss itself."""

    def step(self, closure):
        closure()


class Remembers(Rule):
    """Steps the parameters that it was made for."""

    def __init__(self, parameters, lr=0.05):
        self.own = list(parameters)
        super().__init__(self.own, lr)

    def step(self, closure=None):
        with torch.no_grad():
            for parameter in self.own:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.param_groups[0]["lr"])


class CountsBeside(Rule):
    """Counts in an attribute, which no checkpoint holds."""

    count = 0

    def change(self, parameter, gradient, state, group):
        parameter.sub_(gradient, alpha=group["lr"] / (1 + self.count))

    def after(self):
        self.count += 1


class CountsInGroup(Rule):
    """Counts in its parameter groups, as schedule-free optimizers do."""

    def change(self, parameter, gradient, state, group):
        parameter.sub_(gradient, alpha=group["lr"] / (1 + group.get("k", 0)))

    def after(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["shrinks"] = group.get("shrinks", 1.0) * 0.5


class Large(torch.nn.Module):
    """Arrays of one to four axes, some of them large."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(90, 80)
        self.convolution = torch.nn.Conv2d(3, 7, 3)
        self.body = torch.nn.Linear(5, 1)


def of(kind, module=Large, **settings):
    """Return an optimizer of a class, made for a model of one group."""
    return Made(lambda model: kind(model.parameters(), **settings), module())


ELEMENTWISE = [
    *((getattr(torch.optim, name), settings) for name, settings in OPTIMIZERS.items()),
    (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"foreach": True, "weight_decay": 0.1, "maximize": True}),
    (Counting, {}),
    (Lion, {}),
    (Lookahead, {}),
    (Remembers, {}),
    (CountsInGroup, {}),
]


@pytest.mark.parametrize(("kind", "settings"), ELEMENTWISE, ids=lambda x: getattr(x, "__name__", ""))
def test_elementwise_rules_step_parts_to_the_same_bits(kind, settings):
    verdict = decide(of(kind, lr=0.05, **settings))
    assert verdict.problem == ""
    assert verdict.same_bits


NOT_ELEMENTWISE = [
    (torch.optim.Adafactor, {"lr": 0.05}, "Adafactor fails on parts of arrays"),
    *(
        [(lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.05), {}, "Muon fails on parts of arrays")]
        if hasattr(torch.optim, "Muon")  # torch 2.8 has none
        else []
    ),
    (torch.optim.LBFGS, {}, "LBFGS joins all arrays into one vector"),
    (Lars, {}, "computes other values on parts"),
    (ByGlobalNorm, {}, "computes other values on parts"),
    (Late, {}, "computes other values on parts"),
    (OfLargeArrays, {}, "computes other values on parts"),
    (ByShape, {}, "computes other values on parts"),
    (Noisy, {}, "computes other values on parts"),
    (NeedsClosure, {}, "NeedsClosure could not be tried: TypeError"),
    (PerRow, {}, r"keeps 'rows' of shape \(72,\) for a parameter of shape \(72, 72\)"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "reason"), NOT_ELEMENTWISE, ids=lambda x: getattr(x, "__name__", ""))
def test_other_rules_are_refused_where_arrays_are_split_and_the_reason_is_told(kind, settings, reason):
    with pytest.raises(SpecError, match=f"splits arrays over the ranks, but .*{reason}.*; use backend solo, ddp"):
        decide(of(kind, **settings))


def test_fused_kernels_may_differ_in_the_last_bits_and_say_so(caplog):
    verdict = Trials(of(torch.optim.AdamW, lr=0.05, fused=True)).try_parts()
    assert verdict.problem == ""
    if verdict.same_bits:
        pytest.skip("this processor rounds all elements alike")
    made = of(torch.optim.AdamW, lr=0.05, fused=True)
    names, parts, held = cut(made, rank=0)
    with caplog.at_level(logging.WARNING):
        rule_for_parts(made, names, parts, held, rank=0)
    assert "AdamW rounds the last elements of an array otherwise" in caplog.text


def test_a_trial_changes_neither_weights_nor_random_numbers():
    made = of(torch.optim.Adagrad, lr=0.05)
    before = [parameter.detach().clone() for parameter in made.parameters.values()]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    decide(made)
    check_resumes(made)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters.values(), strict=True))
    assert all(float(state["step"]) == 0 for state in made.optimizer.state.values())


def test_what_changes_beside_the_state_is_refused_on_every_backend():
    with pytest.raises(
        SpecError, match="a job with CountsBeside cannot be resumed exactly: with a restored state it goes on to other"
    ):
        check_resumes(of(CountsBeside))
    for kind in (CountsInGroup, torch.optim.NAdam, torch.optim.Adafactor, Noisy):
        check_resumes(of(kind))


def cut(made, *, rank, size=3):
    """Return the names of all parameters, where their parts lie, and those of a rank, as one vector is cut evenly."""
    lengths = [parameter.numel() for parameter in made.parameters.values()]
    share = math.ceil(sum(lengths) / size)
    parts, offset = {}, 0
    for (name, parameter), length in zip(made.parameters.items(), lengths, strict=True):
        bounds = [min(max(share * r - offset, 0), length) for r in range(size + 1)]
        spans = tuple(itertools.pairwise(bounds))
        first, end = spans[rank]
        local = parameter.detach().reshape(-1)[first:end].clone().requires_grad_()
        parts[name] = Part(tuple(parameter.shape), spans, local)
        offset += length
    return list(parts), parts, [part.local for part in parts.values()]


def give_gradients(parameters, update, spans=None):
    generator = torch.Generator().manual_seed(update)
    for place, (shape, parameter) in enumerate(parameters):
        whole = torch.randn(shape, generator=generator)
        if spans is not None:
            first, end = spans[place]
            whole = whole.reshape(-1)[first:end]
        parameter.grad = whole.clone()


def made_in_groups(name, model):
    """Return an optimizer with a learning rate and a decay for each of two groups."""

    def make(model):
        first, *others = model.parameters()
        groups = [{"params": others, "weight_decay": 0.0}, {"params": [first], "lr": 0.02}]
        if name == "Counting":
            return Counting(groups, lr=0.05)
        return getattr(torch.optim, name)(groups, lr=0.05, **OPTIMIZERS[name])

    return Made(make, model)


class Ranks:
    """The rules of three ranks, which hold parts of a copy of a model and of the state of its optimizer."""

    def __init__(self, name, whole, saved):
        self.each = []
        for rank in range(3):
            model = network()
            model.load_state_dict(whole.state_dict())
            made = made_in_groups(name, model)
            names, parts, held = cut(made, rank=rank)
            rule = rule_for_parts(made, names, parts, held, rank=rank)
            assert not made.parameters, "whole parameters would stay in memory"
            rule.expect(names, saved)
            for moment, tensors in rule.moments.items():
                for name_of, tensor in zip(names, tensors, strict=True):
                    if tensor is not None and tensor.dim() > 0:
                        first, end = parts[name_of].spans[rank]
                        tensor.copy_(torch.from_numpy(saved[f"{moment}/{name_of}"].reshape(-1)[first:end]))
            self.each.append((rule, parts))

    def update(self, update):
        for rank, (rule, parts) in enumerate(self.each):
            spans = [part.spans[rank] for part in parts.values()]
            give_gradients([(part.shape, part.local) for part in parts.values()], update, spans)
            rule.apply([], [], learning_rate=0.05 / (1 + update), momentum=None)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "Counting"])
def test_the_parts_of_three_ranks_are_those_of_whole_arrays_and_so_is_their_state(name):
    """Groups, learning rates, and a state that goes from whole arrays to parts in mid-training."""
    whole = network()
    made = made_in_groups(name, whole)
    names, parameters = list(made.parameters), [(p.shape, p) for p in made.parameters.values()]
    rule = NativeRule(made.optimizer, list(made.parameters.values()))
    ranks = None
    for update in range(6):
        if update == 3:
            ranks = Ranks(name, whole, named(rule.moments, names))
        give_gradients(parameters, update)
        rule.apply([], [], learning_rate=0.05 / (1 + update), momentum=None)
        if ranks is not None:
            ranks.update(update)
    for name_of, parameter in made.parameters.items():
        joined = torch.cat([parts[name_of].local.detach() for _, parts in ranks.each])
        assert torch.equal(joined, parameter.detach().reshape(-1))
    others = [named(of_rank.moments, names) for of_rank, _ in ranks.each]
    for key, array in named(rule.moments, names).items():
        pieces = [other[key] for other in others]
        if array.ndim > 0:
            assert np.array_equal(np.concatenate(pieces), array.reshape(-1))
        else:
            assert all(piece == array for piece in pieces)


def named(moments, names):
    """Return moments as a checkpoint holds them."""
    return {
        f"{moment}/{name}": to_numpy(tensor)
        for moment, tensors in moments.items()
        for name, tensor in zip(names, tensors, strict=True)
        if tensor is not None
    }


def test_parts_take_their_part_of_a_state_that_the_optimizer_begins_with():
    made = Made(lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1), network())
    for parameter, state in made.optimizer.state.items():
        state["sum"] = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)
    names, parts, held = cut(made, rank=1)
    rule = rule_for_parts(made, names, parts, held, rank=1)
    for name, total in zip(names, rule.moments["native.sum"], strict=True):
        first, end = parts[name].spans[1]
        assert total.tolist() == list(range(first, end))


def test_an_optimizer_that_was_made_by_name_keeps_the_names_of_the_parts_it_has():
    made = Made(lambda model: torch.optim.SGD(model.named_parameters(), lr=0.1), network())
    names, parts, held = cut(made, rank=1)
    rule = rule_for_parts(made, names[:2], parts, held[:2], rank=1)
    assert rule._optimizer.param_groups[0]["param_names"] == names[:2]
