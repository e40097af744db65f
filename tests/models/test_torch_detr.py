"""RT-DETR and D-FINE of transformers: batches, losses, predictions, published weights, refusals."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForObjectDetection

from mtrain.backends._torch import nn, ops
from mtrain.commands.weights import ConvertRequest, import_weights
from mtrain.core.binding import bind
from mtrain.core.collective import OneRank
from mtrain.core.interfaces import Model, Task
from mtrain.core.interfaces.program import Program, ProgramInput
from mtrain.errors import SpecError, UsageError
from mtrain.tasks.detection.detr.model import DetectorOptions, DFine, RTDetr, RTDetrV2, best
from mtrain.weights.matching import entry_types, match
from mtrain.weights.reading import read
from tests.models.detr_specs import CONFIGS

MODELS = {"rt_detr": RTDetr, "rt_detr_v2": RTDetrV2, "d_fine": DFine}
TASK = Task(kind="detection", class_names=("a", "b", "c"), image_size=64, global_batch=2)


@pytest.fixture(autouse=True)
def _bound():
    bind(nn, ops)


def plugin(name: str, **options):
    return MODELS[name](DetectorOptions(config=CONFIGS[name], **options))


def built(name: str, seed: int = 1):
    torch.manual_seed(seed)
    return plugin(name).build(TASK, OneRank())


def original(name: str, classes: int = 3, seed: int = 1):
    """The same network by transformers alone."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **CONFIGS[name], num_labels=classes)
    return AutoModelForObjectDetection.from_config(config)


def batch(rows=((0, 2, 0.5, 0.4, 0.2, 0.3), (0, 0, 0.2, 0.2, 0.1, 0.1), (1, 1, 0.6, 0.6, 0.5, 0.5))):
    images = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (2, 64, 64, 3), dtype=np.uint8)
    targets = np.array(rows, np.float32).reshape(-1, 6)
    return {"images": torch.from_numpy(images), "targets": torch.from_numpy(targets)}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_original_on_its_own_form_of_labels(name):
    module, theirs, given = built(name).train(), original(name).train(), batch()
    rows = given["targets"]
    labels = [
        {"class_labels": rows[[0, 1], 1].long(), "boxes": rows[[0, 1], 2:]},
        {"class_labels": rows[[2], 1].long(), "boxes": rows[[2], 2:]},
    ]
    torch.manual_seed(9)
    losses = module(given)
    losses["total"].backward()
    torch.manual_seed(9)
    output = theirs(pixel_values=given["images"].float().permute(0, 3, 1, 2) / 255, labels=labels)
    output.loss.backward()
    assert losses["total"].item() == output.loss.item()
    assert losses["vfl"].item() == output.loss_dict["loss_vfl"].item()
    gradients = {parameter: x.grad for parameter, x in theirs.named_parameters()}
    for parameter, x in module.named_parameters():
        assert (x.grad is None) == (gradients[parameter] is None), parameter
        if x.grad is not None:
            assert torch.equal(x.grad, gradients[parameter]), parameter


@pytest.mark.parametrize("name", MODELS)
def test_without_objects_every_parameter_that_has_a_gradient_with_them_has_one(name):
    module = built(name).train()
    module(batch())["total"].backward()
    learned = {parameter for parameter, x in module.named_parameters() if x.grad is not None}
    module.zero_grad(set_to_none=True)
    total = module(batch(rows=()))["total"]
    total.backward()
    assert torch.isfinite(total)
    assert {parameter for parameter, x in module.named_parameters() if x.grad is not None} == learned
    assert "model.denoising_class_embed.weight" in learned


def test_predictions_are_those_of_the_original_s_own_decoding():
    module, given = built("rt_detr").eval(), batch()
    with torch.no_grad():
        output = {key: value.numpy() for key, value in module(given).items()}
    found = plugin("rt_detr").predictions(output, {"images": given["images"].numpy()})
    with torch.no_grad():
        raw = original("rt_detr").eval()(pixel_values=given["images"].float().permute(0, 3, 1, 2) / 255)
    scores, index = torch.topk(raw.logits.sigmoid().flatten(1), 20)
    centre, side = raw.pred_boxes[..., :2], raw.pred_boxes[..., 2:]
    corners = torch.cat([centre - side / 2, centre + side / 2], -1) * 64
    for image in range(2):
        expected = torch.cat(
            [corners[image][index[image] // 3], scores[image, :, None], (index[image] % 3)[:, None].float()], 1
        )
        np.testing.assert_allclose(found[image], expected.numpy(), rtol=1e-5, atol=1e-4)


def test_the_best_pairs_of_query_and_class_are_kept():
    boxes = np.arange(8, dtype=np.float32).reshape(2, 4)
    scores = np.array([[0.1, 0.9], [0.8, 0.2]], np.float32)
    assert best(boxes, scores, 300)[:, 4:].tolist() == [[pytest.approx(0.9), 1.0], [pytest.approx(0.8), 0.0]]
    assert best(boxes, scores, 1).tolist() == [[0.0, 1.0, 2.0, 3.0, pytest.approx(0.9), 1.0]]


@pytest.mark.parametrize("name", MODELS)
def test_weights_as_they_are_published_are_taken_by_name_and_of_other_classes_only_the_heads_are_left_out(
    name, tmp_path
):
    theirs = original(name, classes=5)
    theirs.save_pretrained(tmp_path)
    file, module = read(tmp_path / "model.safetensors"), built(name, seed=2)
    assert any(".fc1." in key and "layers" in key for key in file.arrays), "names as files on the hub have them"
    state = {key: value.numpy() for key, value in module.state_dict().items()}
    result = match(file, entry_types(state), MODELS[name].published)
    assert result.unused == result.missing == result.reshaped == []
    assert result.of_classes
    assert all("class_embed" in key or "enc_score_head" in key for key in result.of_classes)
    assert set(result.matched) == set(state) - set(result.of_classes)
    (sentence,) = result.warnings()
    assert sentence.startswith(
        f"the number of classes differs, so the head keeps its start values ({len(result.of_classes)} arrays)"
    )
    same = {key: value.numpy() for key, value in original(name, classes=5, seed=7).state_dict().items()}
    whole = match(file, entry_types(same), MODELS[name].published)
    for key, array in theirs.state_dict().items():
        assert np.array_equal(whole.matched[key], array.numpy()), key


def test_a_published_file_is_imported_for_the_sizes_of_its_folder_and_loads_into_the_original(tmp_path):
    theirs = original("d_fine", classes=5)
    theirs.save_pretrained(tmp_path)
    request = ConvertRequest(
        file=tmp_path / "model.safetensors",
        target=tmp_path / "out.safetensors",
        model="d_fine",
        options=(f"path={tmp_path}",),
    )
    told, warned = [], []
    import_weights(request, tell=told.append, warn=warned.append)
    count = len(theirs.state_dict())
    assert f"d_fine with 5 classes: {count} of {count} arrays taken" in told
    assert warned == []
    other = original("d_fine", classes=5, seed=8)
    other.load_state_dict(load_file(tmp_path / "out.safetensors"))
    for key, array in theirs.state_dict().items():
        assert torch.equal(other.state_dict()[key], array), key
    with pytest.raises(UsageError, match="--option path: expected NAME=VALUE"):
        import_weights(replace(request, options=("path",), force=True), tell=told.append, warn=warned.append)


def test_the_state_that_the_plugin_says_is_that_of_its_module():
    entries = plugin("d_fine").entries(TASK)
    state = built("d_fine").state_dict()
    assert {key: shape for key, (shape, _) in entries.items()} == {key: tuple(x.shape) for key, x in state.items()}
    assert entries["class_embed.0.weight"] == ((3, 16), "float32")


def test_predictions_of_varied_images_are_not_joined():
    assert RTDetr.joined is Model.joined, "`evaluate.augment` is refused for models that do not say how"


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_that_are_recomputed_are_those_of_encoder_and_decoder(name):
    (pattern,) = MODELS[name].recomputable
    found = [key for key, _ in built(name).named_modules() if re.search(pattern, key)]
    assert found == ["model.encoder.aifi.0.layers.0", "model.decoder.layers.0", "model.decoder.layers.1"]


def test_a_folder_gives_the_sizes_and_the_data_the_classes(tmp_path):
    original("rt_detr", classes=5).config.save_pretrained(tmp_path)
    config = RTDetr(DetectorOptions(path=str(tmp_path), config={"num_queries": 7})).config(("x", "y"))
    assert (config.d_model, config.num_queries, config.num_labels, config.id2label) == (16, 7, 2, {0: "x", 1: "y"})


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path):
    original("rt_detr").config.save_pretrained(tmp_path)
    with pytest.raises(SpecError, match=r"is of the model rt_detr, and model\.name is d_fine"):
        DFine(DetectorOptions(path=str(tmp_path))).config(("x",))
    with pytest.raises(SpecError, match=r"84 cells of which they are chosen; give config: \{num_queries: 84\}"):
        RTDetr(DetectorOptions(config={**CONFIGS["rt_detr"], "num_queries": 300})).build(TASK, OneRank())
    with pytest.raises(SpecError, match="not a multiple of 32 as rt_detr needs; use 96"):
        plugin("rt_detr").prepare_task(replace(TASK, image_size=100), {})
    with pytest.raises(SpecError, match="rt_detr is a model of torch, and the backend is on paddle"):
        plugin("rt_detr").check_framework("paddle")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rt_detr", "d_model": "wide"}))
    with pytest.raises(SpecError, match=r"model\.options"):
        RTDetr(DetectorOptions(path=str(tmp_path))).build(TASK, OneRank())


def program(**changes) -> Program:
    inputs = (ProgramInput(key="images", shape=(64, 64, 3)),)
    return Program(**{"format": "onnx", "path": Path("x.onnx"), "inputs": inputs, "batch": 1, **changes})


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("rt_detr", {"batch": None}, "give --no-dynamic-batch or --batch-size N"),
        ("rt_detr", {"size_step": 32}, "--dynamic-size: rt_detr is traced for one size of images"),
        ("rt_detr", {"raw": True}, "--form raw: rt_detr has no outputs before decoding"),
        ("rt_detr", {"half": True}, "--precision fp16: rt_detr is written in float32 only"),
        ("d_fine", {}, "--format onnx: the exporter knows no form of an operator of d_fine; use --format torch"),
    ],
)
def test_programs_that_cannot_be_written_are_refused(name, changes, words):
    with pytest.raises(SpecError, match=words):
        plugin(name).check_program(program(**changes))
    plugin("rt_detr").check_program(program())


@pytest.mark.parametrize("name", MODELS)
def test_a_small_image_has_as_many_queries_as_cells_where_the_spec_gives_no_number(name):
    config = {key: value for key, value in CONFIGS[name].items() if key != "num_queries"}
    torch.manual_seed(1)
    module = MODELS[name](DetectorOptions(config=config)).build(TASK, OneRank())
    assert module.eval()(batch())["boxes"].shape == (2, 8**2 + 4**2 + 2**2, 4)
    large = MODELS[name](DetectorOptions(config=config)).build(replace(TASK, image_size=128), OneRank())
    assert large.config.num_queries == 300
    assert {key: value.shape for key, value in module.state_dict().items()} == {
        key: value.shape for key, value in large.state_dict().items()
    }
    own = {**config, "learn_initial_query": True}
    with pytest.raises(SpecError, match="300 queries, and an image of 64 pixels has 84 cells"):
        MODELS[name](DetectorOptions(config=own)).build(TASK, OneRank())
