"""What a user's classes may get wrong: one sentence for each, from the parts that meet it."""

from collections import namedtuple

import numpy as np
import pytest
import torch

from mtrain.core.collective import OneRank
from mtrain.core.interfaces import SplitRequest
from mtrain.data import outcomes
from mtrain.errors import DataError, PluginError, SpecError, UsageError
from mtrain.spec import references
from mtrain.tasks.own import evaluator, layout, model
from mtrain.tasks.own.dataset import AnyOptions, OwnData
from mtrain.tasks.own.model import OwnFacts, OwnModel, rows
from mtrain.tasks.own.source import OwnSource

CODE = """
import random
import numpy as np
from torch import nn

class Net(nn.Linear):
    def __init__(self, width=2): super().__init__(width, 1)

class Scored(Net):
    def predict(self, batch): return batch, batch

def nothing(): return 3
def broken(): raise KeyError("a bug of mine")
def stream(split): return iter([1])
def empty(split): return []
def unsplit(): return [1, 2]
class Unpicklable:
    def __init__(self, split="train"): self.handle = lambda: 0
    def __len__(self): return 4
    def __getitem__(self, index): return np.float32(index)
constant = 3

def order(targets, predictions): return float((targets - predictions).sum())
def unclear(a, b): return 0
def many(predictions): return {"mean": predictions.mean(), "largest": predictions.max()}
def wrong(predictions, targets): return predictions
def fails(predictions, targets): raise ValueError("shapes")
"""
Pair = namedtuple("Pair", "inputs targets")


@pytest.fixture
def code(tmp_path):
    (tmp_path / "mine_of_words.py").write_text(CODE)
    return lambda name: references.parse(f"{tmp_path}/mine_of_words.py:{name}")


class Items:
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index]
        return item() if callable(item) else item


def source(dataset, code, **settings) -> OwnSource:
    return OwnSource(dataset, code("Unpicklable"), split="train", seed=0, **{"floats": None, **settings})


weight = torch.nn.Parameter(torch.ones(3))


# ------------------------------------------------------------------------------------------------------------ the loss
@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (None, "Net.forward(batch) is a NoneType"),
        (3.0, "expected the loss, a tensor with one number, or a dict of such with 'total'"),
        (weight * 2, "has the shape (3,); expected a single number: the mean over the micro batch, loss.mean()"),
        (torch.ones(()), "carries no gradient; compute it from trained parameters"),
        ({"loss": weight.sum()}, "returned a dict with loss; expected the loss to minimise under 'total'"),
        (
            {"total": weight.sum(), "logits": weight * 1},
            "['logits'] is a Tensor of shape (3,); expected a single number to report",
        ),
        ((weight.sum(), weight), "Net.forward(batch) is a tuple"),
    ],
    ids=["nothing", "a float", "a vector", "no gradient", "no total", "a vector beside", "a tuple"],
)
def test_a_wrong_return_of_forward_is_one_sentence(result, sentence):
    with pytest.raises(DataError) as caught:
        model.losses(result, name="Net")
    assert sentence in str(caught.value)


def test_a_loss_may_come_alone_in_a_dict_or_as_an_attribute():
    class Output(dict):
        loss = weight.sum()

    assert list(model.losses(weight.sum().reshape(1), name="Net")) == ["total"]
    assert model.losses(Output(logits=weight), name="Net")["total"].item() == 3
    several = model.losses({"total": weight.sum(), "part": weight.sum(), "number": 2}, name="Net")
    assert [value.item() for value in several.values()] == [3, 3, 2]
    assert [value.requires_grad for value in several.values()] == [True, False, False]


# --------------------------------------------------------------------------------------------------------- predictions
@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (torch.ones(3), "returned a Tensor; expected the pair (predictions, targets)"),
        ((torch.ones(()), torch.ones(3)), "predictions with a single number for a batch"),
        (("a", "b"), "holds a str at '0'"),
    ],
)
def test_a_wrong_return_of_predict_is_one_sentence(result, sentence):
    class Net(torch.nn.Module):
        def predict(self, batch):
            return result

    with pytest.raises(DataError) as caught:
        model.flatten_predictions(Net(), None, name="Net")
    assert sentence in str(caught.value)


def test_predictions_need_one_row_for_each_sample():
    with pytest.raises(DataError, match="targets with 2 rows for a batch of 3 samples"):
        rows((np.ones(3), {"a": np.ones(2)}), 3, name="Net")


def test_a_model_is_called_as_before_with_anything_but_a_flat_batch(code):
    net = model.adapt(torch.nn.Linear(2, 1), name="Net")
    assert net(torch.ones(4, 2)).shape == (4, 1)
    assert sorted(net.state_dict()) == ["bias", "weight"]


# ------------------------------------------------------------------------------------------------------------ the model
@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("Net", {"widht": 2}, "model.options.widht: Net takes no such option; did you mean 'width'?"),
        ("nothing", {}, "gave a int; expected a torch.nn.Module or a paddle.nn.Layer"),
        ("broken", {}, "making it failed: KeyError: 'a bug of mine' (mine_of_words.py:13)"),
        ("constant", {}, "is a int; expected a class or a function"),
        ("absent", {}, "defines no 'absent'"),
        ("Net", {}, "Net has no method predict(batch), and evaluate.metrics asks for predictions"),
    ],
)
def test_a_model_that_cannot_be_built_is_one_sentence(name, options, sentence, code):
    facts = OwnFacts(kind="own", class_names=(), image_size=0, global_batch=1, scored=True)
    with pytest.raises(UsageError) as caught:
        OwnModel.referring(code(name))(AnyOptions(**options)).build(facts, OneRank())
    assert sentence in str(caught.value)


def test_a_class_of_another_framework_is_refused_before_the_ranks_join(code):
    plugin = OwnModel.referring(code("Net"))(AnyOptions())
    plugin.check_framework("torch")
    with pytest.raises(SpecError, match="is a model of torch, and the backend is on paddle"):
        plugin.check_framework("paddle")


def test_the_plugin_of_that_name_needs_a_reference():
    with pytest.raises(PluginError, match=r"write PATH\.py:Name in its place"):
        OwnModel(AnyOptions()).check_framework("torch")


# ------------------------------------------------------------------------------------------------------------- the data
@pytest.mark.parametrize(
    ("name", "split", "sentence"),
    [
        ("stream", "train", "has no __len__; expected an object with a length"),
        ("empty", "train", "its train split is empty; expected samples"),
        ("unsplit", "val", "has no parameter `split`, so there is no evaluation split"),
        ("broken", "train", "making it failed: KeyError"),
    ],
)
def test_a_data_set_that_cannot_be_used_is_one_sentence(name, split, sentence, code):
    reader = OwnData.referring(code(name))(AnyOptions())
    with pytest.raises(UsageError) as caught:
        reader.read(SplitRequest(split=split))
    assert sentence in str(caught.value)


def test_an_object_that_cannot_be_pickled_is_read_all_the_same(code):
    split = OwnData.referring(code("Unpicklable"))(AnyOptions()).read(SplitRequest(split="train"))
    read = source(split.dataset, code)
    assert read.collate([read.sample(0, 1), read.sample(0, 2)])["index"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        (("a", "b"), "holds a str at '0'"),
        ((None, None), "holds no array and no tensor"),
        ((np.ones(2), np.ones(3)), "different shapes"),
        ((lambda: 1 / 0, 1), "sample 0 of the train split cannot be read: ZeroDivisionError"),
        (({"a": 1.0}, {"b": 1.0}), "different keys"),
    ],
)
def test_samples_that_make_no_batch_are_one_sentence(items, sentence, code):
    read = source(Items(*items), code)
    with pytest.raises(DataError) as caught:
        read.collate([read.sample(0, 0), read.sample(0, 1)])
    assert sentence in str(caught.value)


def test_a_data_set_whose_length_changes_is_refused(code):
    items = Items(1, 2)
    read = source(items, code)
    read.sample(0, 0)
    items.items = (1, 2, 3)
    with pytest.raises(DataError, match="had 2 samples at the start and has 3 in epoch 1"):
        read.sample(1, 0)


def test_samples_that_cannot_be_repeated_are_refused(code):
    generator = np.random.default_rng()
    with pytest.raises(DataError, match="sample 0 differs when it is read twice"):
        source(Items(generator.random), code).check_repeatable()
    source(Items(np.random.rand), code).check_repeatable()


def test_a_batch_of_any_shape_comes_back_as_it_was(code):
    batch = {"pair": Pair(np.arange(3), [np.ones(2, np.float32)]), "size": 7, 4: None, "mask": (np.zeros(1, bool),)}
    read = source(Items(1), code, floats="float64")
    read._dataset.collate = lambda samples: batch
    arrays = read.collate([(0, None)])
    back = layout.unpack({name: torch.from_numpy(array) for name, array in arrays.items()})
    assert back["pair"].inputs.tolist() == [0, 1, 2]
    assert back["pair"].targets[0].dtype == torch.float64
    assert (back["size"], back[4], back["mask"][0].dtype) == (7, None, torch.bool)


# ----------------------------------------------------------------------------------------------------------- the metrics
def test_a_function_gets_its_arguments_by_name_whatever_their_order(code):
    predictions, targets = np.array([1.0, 2.0]), np.array([5.0, 5.0])
    assert evaluator.metric(code("order"), {}).compute(predictions, targets) == 7
    f1 = evaluator.metric(references.parse("sklearn.metrics:recall_score"), {"average": "macro"})
    assert f1.compute(np.array([0, 1, 1]), np.array([0, 0, 1])) == 0.75


@pytest.mark.parametrize(
    ("reference", "options"),
    [
        ("torchmetrics.classification:MulticlassAccuracy", {"num_classes": 3, "average": "micro"}),
        ("torchmetrics:Accuracy", {"task": "multiclass", "num_classes": 3}),
    ],
)
def test_metrics_of_torchmetrics_are_made_fed_with_tensors_and_reset(reference, options):
    from mtrain.backends._torch import nn, ops
    from mtrain.core import binding

    binding.bind(nn, ops)
    metric = evaluator.metric(references.parse(reference), options)
    for _ in range(2):
        value = metric.compute(np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2]))
        assert list(outcomes.metrics_of(value, name="accuracy").values()) == [0.75]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "unclear",
            "cannot tell how to call it; expected a function with parameters named like predictions and targets",
        ),
        ("wrong", "the metric wrong returned ndarray of shape (4,) for 'wrong'; expected a number"),
        ("fails", "evaluate.metrics: fails failed: ValueError: shapes"),
    ],
)
def test_a_metric_that_cannot_be_used_is_one_sentence(name, sentence, code):
    with pytest.raises(UsageError) as caught:
        scored(code(name))
    assert sentence in str(caught.value)


def scored(reference, **settings) -> dict:
    collected = evaluator.OwnEvaluator(
        [evaluator.metric(reference, {})], OneRank(), **{"lower_is_better": False, **settings}
    )
    for first in (0, 2, 0):  # a sample that comes twice counts once
        pairs = [(np.float64(first), np.float64(1)), (np.float64(first + 1), np.float64(1))]
        collected.add({"index": np.array([first, first + 1])}, pairs)
    return collected.result([collected.partial()])


def test_the_first_metric_is_the_score_and_may_be_one_to_lower(code):
    assert scored(code("many")) == {"mean": 1.5, "largest": 3, "score": 1.5}
    assert scored(code("many"), lower_is_better=True)["score"] == -1.5
