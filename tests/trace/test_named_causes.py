"""Causes that people met: each is named from what two traces hold, here made by hand; what means nothing is no alarm."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mtrain_trace import causes, comparing, data_causes, differences, factors, mixing, rank_checks
from mtrain_trace.reading import ArrayRow, Trace, Update

NAMES = ["first", "middle", "last"]
RANDOM = np.random.default_rng(0)
BEGIN = {name: RANDOM.standard_normal(64) for name in NAMES}
GRADIENTS = {name: RANDOM.standard_normal(64) for name in NAMES}


def rows(arrays: dict[str, np.ndarray], front: str = "") -> dict[str, ArrayRow]:
    found = {}
    for name, array in arrays.items():
        sketch = [float(x) for x in mixing.sketch(array, front + name)]
        found[front + name] = ArrayRow(mixing.digest(array, front + name), float(np.linalg.norm(array)), sketch)
    return found


def whole(found: dict[str, ArrayRow]) -> ArrayRow:
    total = differences.total(found)
    assert total is not None
    return total


def update(number: int, gradients: dict[str, np.ndarray] | None = None, **facts: object) -> Update:
    held = {
        "gradients": rows(gradients or GRADIENTS),
        "weights": rows({n: a - 0.01 * number for n, a in BEGIN.items()}),
    }
    held["moments"] = rows(gradients or GRADIENTS, "exp_avg/")
    fields = {
        "samples": Counter(["a", "b"]),
        "rank_samples": [["a", "b"]],
        "targets": Counter(["s", "t"]),
        "rank_targets": [["s", "t"]],
        "target_sums": [1],
        "losses": [1.0],
        "pass_losses": [1.0],
        "clips": [None],
        "rates": [{"lr": 0.1}],
        "rank_rates": [[{"lr": 0.1}]],
        "groups": [NAMES],
        "steps": number,
        "parts": {part: whole(found) for part, found in held.items()},
        "arrays": held,
        "rng": [None],
        "micro_batches": 1,
    }
    return Update(number, **{**fields, **facts})


def trace(*updates: Update, ranks: int = 1, groups: list[list[str]] | None = None, dropouts: int = 0) -> Trace:
    optimizer = {
        "rule": "AdamW",
        "groups": groups or [NAMES],
        "shapes": {name: [64] for name in NAMES},
        "dtypes": ["float32"],
        "sharded": False,
        "unseen": [],
    }
    process = {
        "ranks": ranks,
        "optimizers": [optimizer],
        "batch_norms": 0,
        "dropouts": dropouts,
        "wrapped": [],
        "stacks": [],
    }
    return Trace(Path("t"), [process], list(updates), rows(BEGIN))


def compared(a: Trace, b: Trace) -> comparing.Comparison:
    result = comparing.compare(a, b)
    result.sentences = causes.explain(result)
    return result


def test_targets_that_the_training_computes_may_be_rounded_otherwise() -> None:
    other = {"targets": Counter(["s", "x"]), "rank_targets": [["s", "x"]], "real_targets": True}
    result = compared(trace(update(1), update(2)), trace(update(1), update(2, **other, losses=[1.0 + 1e-7])))
    assert result.parting is None
    assert any("targets have other bits (first in update 2), but loss and gradient agree" in x for x in result.remarks)


def test_targets_of_another_model_are_no_labels() -> None:
    other = {"targets": Counter(["s", "x"]), "rank_targets": [["s", "x"]], "real_targets": True}
    result = compared(trace(update(1), update(2)), trace(update(1), update(2, **other, losses=[1.1])))
    assert result.parting is not None
    assert (result.parting.what, result.parting.update) == (differences.TARGETS, 2)
    assert "another model computes them (a teacher, a target network)" in result.sentences[0]


def test_targets_that_each_rank_makes_are_not_compared() -> None:
    halves = {name: array / 2 for name, array in GRADIENTS.items()}
    mine = update(1, target_count=16, targets_summed=True, targets=Counter(["s"]))
    other = update(1, halves, target_count=32, targets_summed=True, targets=Counter(["t"]))
    parting = compared(trace(mine), trace(other, ranks=2)).parting
    assert parting is not None
    assert parting.what == differences.GRADIENT


def test_clipping_before_gradients_are_unscaled_is_named() -> None:
    norm = whole(rows(GRADIENTS)).norm
    small = {name: array / norm * 0.5 for name, array in GRADIENTS.items()}
    mine = update(1, small, clips=[{"before": norm, "limit": 0.5}])
    tiny = {name: array / 1024 for name, array in small.items()}
    other = update(1, tiny, clips=[{"before": norm * 1024, "limit": 0.5}])
    assert "while it is 1024 times as large, before it is unscaled" in compared(trace(mine), trace(other)).sentences[0]


def test_the_place_where_the_backward_pass_parts_is_named() -> None:
    broken = {**GRADIENTS, "first": GRADIENTS["first"] * 0.3 + GRADIENTS["last"]}
    sentence = compared(trace(update(1)), trace(update(1, broken))).sentences[0]
    assert "so are the gradients from middle on to the output; those of first and of all before it differ" in sentence


@pytest.mark.parametrize("part", [0.5, 2.0])
def test_a_gather_without_gradient_is_named(part: float) -> None:
    parts = {**GRADIENTS, "first": GRADIENTS["first"] * part, "middle": GRADIENTS["middle"] * part}
    sentence = compared(trace(update(1)), trace(update(1, parts), ranks=2)).sentences[0]
    assert "gradients of first, middle in B are" in sentence
    assert "those of last the same" in sentence
    assert "a gather that is not differentiated" in sentence


def test_moments_that_were_loaded_by_position_into_another_order_are_named() -> None:
    turned = list(reversed(NAMES))
    moments = rows({name: -array for name, array in GRADIENTS.items()}, "exp_avg/")
    other = update(1, groups=[turned])
    other.arrays["moments"], other.parts["moments"] = moments, whole(moments)
    sentence = compared(trace(update(1)), trace(other, groups=[turned])).sentences[0]
    assert "in another order (A first, middle, last; B last, middle, first)" in sentence


@pytest.mark.parametrize(("numbers", "parts"), [((2, 3, 4), True), ((3,), False)])
def test_weights_that_something_else_writes_again_and_again_part_the_trainings(
    numbers: tuple[int, ...], parts: bool
) -> None:
    mine = [update(number) for number in range(1, 5)]
    other = [update(n, losses=[1.0 + 1e-7 * n], changed_outside=n in numbers) for n in range(1, 5)]
    result = compared(trace(*mine), trace(*other))
    assert (result.parting is not None) is parts
    assert not parts or "something else than the optimizer has written to the weights of B" in result.sentences[0]


@pytest.mark.parametrize(("size", "verdict"), [(1e-4, "same up to rounding"), (4e-4, "different")])
def test_the_first_gradient_in_float32_has_a_narrow_limit(size: float, verdict: str) -> None:
    noise = {name: array + size * np.roll(array, 1) for name, array in GRADIENTS.items()}
    assert compared(trace(update(1)), trace(update(1, noise, losses=[1.0 + 1e-7]))).verdict == verdict


def test_what_the_models_do_not_have_is_no_cause() -> None:
    sentence = compared(trace(update(1)), trace(update(1, losses=[1.2]))).sentences[0]
    assert "BatchNorm" not in sentence
    assert "dropout" not in sentence


def test_losses_of_passes_that_one_side_does_not_record_are_no_step_without_a_pass() -> None:
    told = compared(trace(update(1)), trace(update(1, losses=[1.3], pass_losses=[]))).sentences[0]
    assert "without a backward pass" not in told
    none = compared(trace(update(1)), trace(update(1, losses=[0.0], pass_losses=[], micro_batches=0))).sentences[0]
    assert "the optimizer of B steps here without a backward pass" in none


def test_a_resumed_side_with_few_updates_is_looked_up_by_place() -> None:
    def batch(*names: str) -> dict[str, object]:
        return {"samples": Counter(names), "rank_samples": [[*names]]}

    order = ["ab", "cd", "ef", "gh", "ij"]
    whole_run = trace(*(update(number, **batch(*names)) for number, names in enumerate(order, 1)))
    resumed = trace(update(1, **batch(*"ij"), losses=[1.3]))
    resumed.start = whole_run.updates[2].arrays["weights"]
    result = compared(whole_run, resumed)
    assert result.parting is not None
    assert (result.parting.what, result.parting.update) == (differences.SAMPLES, 4)
    assert "B is 1 update(s) ahead in the same order of samples" in result.sentences[0]


def test_a_schedule_is_told_from_another_curve() -> None:
    curve = [0.1 * 0.9**step for step in range(12)]

    def rated(rates: list[float]) -> Trace:
        return trace(
            *(
                update(number, rates=[{"lr": rate}], rank_rates=[[{"lr": rate}]], micro_batches=1)
                for number, rate in enumerate(rates, 1)
            )
        )

    often = compared(rated(curve), rated(curve[::3]))
    assert often.sentences[-1].startswith("the schedule of B is stepped 3 times for each update of the optimizer")
    other = compared(rated(curve), rated([0.1 * 0.8**step for step in range(12)]))
    assert "the schedules differ in length" in other.sentences[-1]


@pytest.mark.parametrize("same_bits", [True, False])
def test_other_hidden_states_are_a_cause_only_where_rounding_has_not_made_them(*, same_bits: bool) -> None:
    def begun(state: str, loss: float) -> Trace:
        return trace(update(1, states=["zeros"]), update(2, states=[state], losses=[loss]))

    mine, other = begun("a" * 16, 1.0), begun("b" * 16, 1.3)
    if not same_bits:
        held = rows({name: array - 0.01 + 1e-9 * (name == "first") for name, array in BEGIN.items()})
        other.updates[0].arrays["weights"], other.updates[0].parts["weights"] = held, whole(held)
    result = compared(mine, other)
    assert result.parting is not None
    assert (result.parting.what, result.parting.update) == (differences.LOSS, 2)
    assert ("begin this update with other hidden states" in " ".join(result.sentences)) == same_bits


def test_a_warm_up_of_one_update_is_not_one_of_many_that_is_stepped_often() -> None:
    def rated(rates: list[float], passes: int) -> Trace:
        facts = {"micro_batches": passes}
        return trace(
            *(update(n, rates=[{"lr": rate}], rank_rates=[[{"lr": rate}]], **facts) for n, rate in enumerate(rates, 1))
        )

    long, short = [min(step / 6, 1.0) for step in range(12)], [0.0] + [1.0] * 11
    assert "is stepped" not in " ".join(compared(rated(long, 1), rated(short, 1)).sentences)
    assert "is stepped 6 times" in " ".join(compared(rated(long, 6), rated(short, 6)).sentences)


@pytest.mark.parametrize("whole_batch", [True, False])
def test_ranks_that_read_the_whole_batch_are_told_from_samples_of_other_bits(*, whole_batch: bool) -> None:
    read = ["a", "b"] if whole_batch else ["x", "y"]
    other = update(1, samples=Counter(read * 2), rank_samples=[read, read])
    result = compared(trace(update(1)), trace(other, ranks=2))
    assert result.parting is None
    told = "samples are those of the other side 2 times" if whole_batch else "samples have other bits"
    assert any(remark.startswith(told) for remark in result.remarks), result.remarks


def test_a_last_batch_is_filled_up_with_samples_of_before_and_not_of_after_where_one_side_is_resumed() -> None:
    def batch(*names: str) -> dict[str, object]:
        return {"samples": Counter(names), "rank_samples": [[*names]]}

    whole_run = trace(
        *(update(number, **batch(*names)) for number, names in enumerate(["ab", "cd", "ef", "gh", "ij", "kl"], 1))
    )
    resumed = trace(update(1, **batch(*"ghij"), losses=[1.3]), update(2, **batch(*"ij")))
    resumed.start = whole_run.updates[2].arrays["weights"]
    sentence = compared(resumed, whole_run).sentences[0]
    assert "an update of A has 4 samples, of B 2" in sentence
    assert "fills the last" not in sentence


def drawn(*, rng: list[str], seeds: list[int | None], micro_batches: int = 1, loss: float = 1.2) -> Trace:
    """A training with dropout on as many ranks as ``rng`` has states."""
    ranks = len(rng)
    samples = [["a", "b"]] if ranks == 1 else [["a"], ["b"]]
    labels = [["s", "t"]] if ranks == 1 else [["s"], ["t"]]
    facts = {
        "rank_samples": samples,
        "rank_targets": labels,
        "rng": rng,
        "seeds": seeds,
        "micro_batches": micro_batches,
    }
    losses = [loss] * ranks
    passes = [each / micro_batches for each in losses for _ in range(micro_batches)]
    return trace(update(1, losses=losses, pass_losses=passes, **facts), ranks=ranks, dropouts=1)


def test_random_numbers_of_dropout_that_follow_from_the_number_of_ranks_are_no_mistake() -> None:
    one = drawn(rng=["x"], seeds=[7], loss=1.0)
    (told,) = compared(one, drawn(rng=["y", "z"], seeds=[7, 8])).sentences
    assert "2 and 1 samples in a pass, on 1 rank in A and on 2 ranks in B" in told
    assert "the first rank of both begins with the seed 7" in told
    assert "which follows from how an update is divided and is no mistake" in told
    assert "All ranks" not in told
    (told,) = compared(one, drawn(rng=["y", "y"], seeds=[7, 7])).sentences
    assert "is no mistake" in told
    assert "All ranks of B draw the same random numbers, though" in told
    (told,) = compared(one, drawn(rng=["y"], seeds=[7], micro_batches=2)).sentences
    assert "on 1 rank in A and on 1 rank, 2 micro batches each in B" in told
    assert "is no mistake" in told


def test_another_seed_of_dropout_is_named_beside_other_ranks_and_alone() -> None:
    one = drawn(rng=["x"], seeds=[7], loss=1.0)
    (told,) = compared(one, drawn(rng=["y", "z"], seeds=[9, 10])).sentences
    assert "another seed (of the first rank 7 in A, 9 in B)" in told
    assert "no mistake" not in told
    (told,) = compared(one, drawn(rng=["y"], seeds=[7])).sentences
    assert "another seed, or draws that one side alone makes" in told
    (unknown,) = compared(drawn(rng=["x"], seeds=[None], loss=1.0), drawn(rng=["y", "z"], seeds=[None, None])).sentences
    assert "is no mistake" in unknown
    assert "begins with the seed" not in unknown


def test_a_loss_that_only_further_ranks_have_otherwise_is_told_so() -> None:
    sides = {"rank_samples": [["a"], ["b"]], "rank_targets": [["s"], ["t"]], "rng": [None, None]}
    mine = trace(update(1, losses=[1.0, 1.0], pass_losses=[1.0, 1.0], **sides), ranks=2)
    (told,) = compared(mine, trace(update(1, losses=[1.0, 1.4], pass_losses=[1.0, 1.4], **sides), ranks=2)).sentences
    assert "the loss of rank 0 is the same, and that of rank 1 is not" in told
    (told,) = compared(mine, trace(update(1, losses=[1.1, 1.4], pass_losses=[1.1, 1.4], **sides), ranks=2)).sentences
    assert "rank 0" not in told


def test_labels_of_a_contrastive_loss_that_forget_the_rank_are_named_beside_one_rank_and_beside_two() -> None:
    numbers = [str(n) for n in range(16)]
    halves = [numbers[:8], numbers[8:]]

    def of(samples: list[list[str]], targets: list[list[str]], losses: list[float]) -> Trace:
        facts: dict[str, object] = {"losses": losses, "pass_losses": losses, "rng": [None] * len(losses)}
        facts |= {"samples": Counter(numbers), "rank_samples": samples}
        facts |= {"targets": Counter(name for rank in targets for name in rank), "rank_targets": targets}
        sums = [sum(int(name) for name in rank) for rank in targets]
        return trace(update(1, target_sums=sums, **facts), ranks=len(losses))

    forgotten = of(halves, [halves[0], halves[0]], [1.0, 1.4])
    for whole in (of([numbers], [numbers], [1.0]), of(halves, halves, [1.0, 1.0])):
        (told,) = compared(whole, forgotten).sentences
        assert "each rank of B has the same labels, 8 of the 16 of the other side" in told
        assert "have to begin at r times the samples of a rank" in told


@pytest.mark.parametrize(
    ("ranks", "updates", "samples", "is_told"),
    [
        (2, 8, 2, True),
        (2, 8, 4, False),
        (2, 6, 2, False),
        (4, 8, 2, False),
        (2, 2, 2, False),
        (1, 8, 2, False),
        (2, 4, 2, False),
    ],
)
def test_steps_that_are_not_divided_by_the_ranks_are_told_only_where_the_ranks_explain_them(
    ranks: int, updates: int, samples: int, *, is_told: bool
) -> None:
    names = [str(number) for number in range(samples)]
    facts: dict[str, object] = {"samples": Counter(names)}
    other = trace(*(update(number, **facts) for number in range(1, updates + 1)), ranks=ranks)
    told = rank_checks.length(trace(*(update(number) for number in range(1, 5))), other)
    assert [f"B makes {updates} updates, A 4, as many times as it has ranks" in words for words in told] == [
        True
    ] * is_told


@pytest.mark.parametrize(
    ("first", "second", "is_told"),
    [
        ("0123", "0123", True),
        ("0123", "3210", True),
        ("0123", "0124", False),  # ranks with other labels
        ("00112233", "00112233", True),
        ("00012233", "00012233", False),  # not each as often: no positions
        ("01", "01", False),  # two classes are no positions
        ("0129", "0129", False),  # one that the other side has not
    ],
)
def test_labels_are_positions_of_one_rank_only_where_each_occurs_as_often_on_each(
    first: str, second: str, *, is_told: bool
) -> None:
    numbers = [*"0123456"]

    def of(*targets: str) -> Update:
        sums = [sum(int(name) for name in rank) for rank in targets]
        return update(
            1, targets=Counter("".join(targets)), rank_targets=[[*rank] for rank in targets], target_sums=sums,
            samples=Counter(numbers), rank_samples=[numbers], losses=[1.0] * len(targets), rng=[None] * len(targets),
        )  # fmt: skip

    one, two = of("0123456"), of(first, second)
    for pair, side in (((one, two), "B"), ((two, one), "A")):
        traces = [trace(each, ranks=len(each.rank_targets)) for each in pair]
        result = comparing.Comparison(*traces, updates=1)
        parting = comparing.Parting(differences.TARGETS, 1, 1.0, place=0)
        told = data_causes.targets(result, parting, *pair)
        assert (f"each rank of {side} has the same labels" in told[0]) is is_told


@pytest.mark.parametrize(
    ("formats", "loss", "verdict"),
    [
        ((None, "bfloat16"), 1.0 + 3e-4, "different"),
        (("float16", None), 1.0 + 3e-4, "different"),
        (("float16", "bfloat16"), 1.0 + 3e-4, "different"),
        (("bfloat16", "bfloat16"), 1.0 + 3e-4, "same up to rounding"),
        ((None, "bfloat16"), 1.0 + 3e-7, "same up to rounding"),
    ],
)
def test_another_precision_is_no_rounding(formats: tuple[str | None, str | None], loss: float, verdict: str) -> None:
    ours, theirs = update(1, autocast=formats[0]), update(1, autocast=formats[1], losses=[loss])
    result = compared(trace(ours), trace(theirs))
    assert result.verdict == verdict
    if verdict == "different":
        assert len(result.sentences) == 1
        assert "the weights, activations and gradients of one side have fewer digits" in result.sentences[0]


def test_what_is_beyond_another_precision_is_told_in_its_place() -> None:
    ours = [update(1), update(2)]
    theirs = [update(1, autocast="bfloat16", losses=[1.0 + 3e-4]), update(2, autocast="bfloat16", losses=[2.0])]
    parting = compared(trace(*ours), trace(*theirs)).parting
    assert parting is not None
    assert parting.update == 2


def test_the_same_narrow_format_by_other_means_is_no_other_precision() -> None:
    mine, other = trace(update(1, autocast="bfloat16")), trace(update(1, losses=[1.0 + 3e-4]))
    for key in ("model_dtypes", "fsdp_dtypes"):
        other.processes[0].update({"model_dtypes": ["float32"], key: ["bfloat16"]})
        assert compared(mine, other).verdict == "same up to rounding"


def test_what_is_divided_alike_and_begins_with_the_same_numbers_draws_no_other_ones() -> None:
    mine, other = drawn(rng=["x"], seeds=[7], loss=1.0), drawn(rng=["x"], seeds=[7])
    (told,) = compared(mine, other).sentences
    assert "divided" not in told
    assert "the loss is computed otherwise" in told
    mine.processes[0]["dropout_rates"], other.processes[0]["dropout_rates"] = [0.1, 0.3], [0.1, 0.2]
    (told,) = compared(mine, other).sentences
    assert "dropout leaves out other shares (p [0.1, 0.3] in A, [0.1, 0.2] in B)" in told
    (unknown,) = compared(drawn(rng=[None], seeds=[None], loss=1.0), drawn(rng=[None], seeds=[None])).sentences
    assert "divided" not in unknown


def read(*batches: str) -> Trace:
    updates = []
    for number, names in enumerate(batches, 1):
        updates.append(update(number, samples=Counter(names), rank_samples=[[*names]], losses=[sum(map(ord, names))]))
    return trace(*updates)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_told"),
    [
        (["ab", "cd", "ef", "ac"], ["ab", "cc", "ef", "ac"], "B reads 1 sample(s) again"),
        (["ab", "cc", "ef", "da"], ["ab", "cd", "ef", "da"], "A reads 1 sample(s) again"),
        (["ab", "cd", "ef", "ac"], ["ab", "ad", "ef", "ac"], "B reads 1 sample(s) again"),
        (["ab", "cd", "ef"], ["ab", "ca", "eb"], "B reads 2 sample(s) again"),
        (["ab", "cd", "ef", "ac"], ["ab", "ce", "df", "ac"], "the same samples in another order"),
        (["ab", "cd", "ef", "ac"], ["ec", "bf", "da", "ac"], "the same samples in another order"),
        (["aab", "abc", "cab", "cca"], ["aab", "bbc", "aaa", "cab"], "the same samples in another order"),
    ],
)
def test_samples_that_come_again_are_no_other_order(ours: list[str], theirs: list[str], is_told: str) -> None:
    result = compared(read(*ours), read(*theirs))
    assert result.parting is not None
    assert result.parting.what == differences.SAMPLES
    assert is_told in result.sentences[0]


def test_a_gradient_of_some_arrays_is_scaled_only_where_a_factor_explains_it() -> None:
    held = trace(update(1))
    halved = {**GRADIENTS, "last": GRADIENTS["last"] * 0.3}
    (told,) = compared(held, trace(update(1, halved))).sentences
    assert "are not (last): a part is detached, frozen, or scaled" in told
    cut = {**GRADIENTS, "last": np.clip(GRADIENTS["last"], -0.5, 0.5)}
    (told,) = compared(held, trace(update(1, cut))).sentences
    assert "frozen" not in told
    assert "are not (last): in no constant factor" in told


def test_a_loss_that_is_a_little_apart_is_not_told_to_be_the_same() -> None:
    noise = {name: array + 3e-3 * np.roll(array, 1) for name, array in GRADIENTS.items()}
    (told,) = compared(trace(update(1)), trace(update(1, noise, losses=[1.0 + 2e-6]))).sentences
    assert told.startswith("the loss is nearly the same (2e-06 apart)")
    assert "an activation" in told
    (told,) = compared(trace(update(1)), trace(update(1, noise, losses=[1.0 + 1e-7]))).sentences
    assert told.startswith("the loss is the same")


def test_the_same_targets_with_other_samples_are_other_targets() -> None:
    swapped = {"rank_targets": [["t", "s"]]}
    parting = compared(trace(update(1)), trace(update(1, **swapped, losses=[1.5]))).parting
    assert parting is not None
    assert (parting.what, parting.update) == (differences.TARGETS, 1)
    both = {"rank_samples": [["b", "a"]], **swapped}
    assert compared(trace(update(1)), trace(update(1, **both))).parting is None, "in another order, each with its own"


def test_clipping_before_the_last_backward_pass_is_named() -> None:
    halves = {name: array / 3 for name, array in GRADIENTS.items()}
    clip = {"before": 4.0, "limit": 100.0}
    mine, other = update(1, clips=[clip]), update(1, halves, clips=[{**clip, "early": True}])
    for a, b, side in ((mine, other, "B"), (other, mine, "A")):
        assert (
            compared(trace(a), trace(b)).sentences[0].startswith(f"{side} clips before the backward pass of the update")
        )


def test_ranks_that_read_the_same_samples_in_one_epoch_are_named() -> None:
    def read(*ranks: list[str]) -> dict[str, object]:
        return {
            "samples": Counter(x for rank in ranks for x in rank),
            "rank_samples": list(ranks),
            "rank_targets": [[], []],
        }

    order = [read(["a", "b"], ["c", "d"]), read(["e", "f"], ["g", "h"])]
    overlap = [read(["a", "b"], ["b", "c"]), read(["d", "e"], ["f", "g"]), read(["h", "c"], ["a", "d"])]
    a, b = (
        trace(*(update(n, losses=[loss], targets=Counter(), **each) for n, each in enumerate(reads, 1)), ranks=2)
        for loss, reads in ((1.0, order), (1.5, overlap))
    )
    for first, second, side in ((a, b, "B"), (b, a, "A")):
        assert f"a rank of {side} reads samples that another rank has read" in compared(first, second).sentences[0]


@pytest.mark.parametrize(
    ("factor", "ours", "theirs", "said"),
    [(0.5, 4, 2, "of B has 2"), (2.0, 2, 4, "of A has 2"), (2.0, 4, 2, ""), (0.5, 2, 4, ""), (2.0, 4, 4, "")],
)
def test_a_short_last_window_is_named_on_the_side_that_has_it(factor, ours, theirs, said) -> None:
    usual = SimpleNamespace(updates=[SimpleNamespace(micro_batches=4)])
    sides = SimpleNamespace(a=usual, b=usual)
    words = factors._short_window(factor, sides, Update(9, micro_batches=ours), Update(9, micro_batches=theirs))
    assert said in words
    assert bool(words) == bool(said)
