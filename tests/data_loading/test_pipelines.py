"""albumentations on training images: seeded by sample, the same for any order and number of workers, and refused in words."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mtrain.data.images.pipelines import Pipeline
from mtrain.data.loader.pool import WorkerPool
from mtrain.errors import DataError
from mtrain.tasks.classification.labels import LabelledImages
from mtrain.tasks.classification.section import ClassificationAugmentSpec
from mtrain.tasks.classification.source import ClassificationSource
from mtrain.tasks.datasets import open_data
from mtrain.tasks.detection.section import AugmentSpec, DetectionDataSpec
from mtrain.tasks.detection.source import DetectionSource

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[2]
CODE = (
    "import albumentations as A\n"
    "def make():\n"
    "    return A.Compose([A.RandomResizedCrop(size=(16, 16)), A.HorizontalFlip(), A.VerticalFlip(),\n"
    "                      A.OneOf([A.ColorJitter(), A.GaussNoise()], p=0.9)])\n"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "aug.py").write_text(CODE)
    return tmp_path


def noise(count=12, size=(40, 30)):
    return np.random.default_rng(5).integers(0, 256, (count, size[1], size[0], 3), dtype=np.uint8)


def source_of(reference, *, seed=0, images=None):
    images = noise() if images is None else images
    split = LabelledImages(images, np.arange(len(images)) % 2, ("a", "b"), [f"image {i}" for i in range(len(images))])
    augment = ClassificationAugmentSpec(albumentations=reference)
    return ClassificationSource(split, side=16, resize="crop", crop_share=0.875, augment=augment, seed=seed)


def samples(source, epoch, order):
    return {index: source.sample(epoch, index).image for index in order}


def same(one, other):
    return [np.array_equal(one[index], other[index]) for index in sorted(one)]


def test_a_sample_depends_on_seed_epoch_and_index_alone(here):
    first = samples(source_of("aug.py:make"), 1, range(12))
    assert all(same(first, samples(source_of("aug.py:make"), 1, reversed(range(12)))))
    assert sum(same(first, samples(source_of("aug.py:make"), 2, range(12)))) <= 1
    assert sum(same(first, samples(source_of("aug.py:make", seed=1), 1, range(12)))) <= 1
    repeated = noise(1).repeat(12, axis=0)
    assert (
        len({image.tobytes() for image in samples(source_of("aug.py:make", images=repeated), 1, range(12)).values()})
        > 9
    )


def test_transforms_of_one_pipeline_are_drawn_independently(here):
    """``Compose.set_random_seed`` gives all transforms the same seed, so that both flips would always happen together."""
    (here / "flips.py").write_text(
        "import albumentations as A\ndef make():\n    return A.Compose([A.HorizontalFlip(), A.VerticalFlip()])\n"
    )
    pipeline, image = Pipeline("flips.py:make"), noise(1)[0]
    counts = dict.fromkeys(("plain", "across", "down", "both"), 0)
    forms = {"plain": image, "across": image[:, ::-1], "down": image[::-1], "both": image[::-1, ::-1]}
    for index in range(400):
        result = pipeline.apply(image, (0, 0, index), origin="x")
        counts[next(name for name, form in forms.items() if np.array_equal(result, form))] += 1
    assert all(60 < count < 140 for count in counts.values()), counts


@pytest.mark.job
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_any_number_of_workers_gives_the_same_bits(here, workers):
    expected = samples(source_of("aug.py:make"), 3, range(12))
    pool = WorkerPool({"train": source_of("aug.py:make")}, workers=workers)
    try:
        loader = pool.loader("train", lambda e, u: [np.array([7, 2, 11, 0])], micro_batch=4, updates_per_epoch=3)
        for batch in loader.micro_batches(3):
            np.testing.assert_array_equal(batch["images"], np.stack([expected[i] for i in (7, 2, 11, 0)]))
        loader.close()
    finally:
        pool.close()


def test_saved_pipelines_are_the_one_that_was_saved(here):
    import albumentations as A

    sys.path.insert(0, str(here))
    composed = A.Compose([A.RandomResizedCrop(size=(16, 16)), A.HorizontalFlip(), A.RandomGamma()])
    A.save(composed, "aug.json", data_format="json")
    A.save(composed, "aug.yml", data_format="yaml")
    (here / "three.py").write_text(
        "import albumentations as A\n"
        "def make():\n    return A.Compose([A.RandomResizedCrop(size=(16, 16)), A.HorizontalFlip(), A.RandomGamma()])\n"
    )
    expected = samples(source_of("three.py:make"), 0, range(6))
    for name in ("aug.json", "aug.yml"):
        assert all(same(expected, samples(source_of(name), 0, range(6))))


def test_results_of_another_size_are_fitted_as_in_evaluation_and_inputs_stay_as_they_are(here):
    (here / "still.py").write_text("import albumentations as A\ndef make():\n    return A.Compose([A.NoOp()])\n")
    images = noise()
    before = images.copy()
    source = source_of("still.py:make", images=images)
    plain = ClassificationSource(
        LabelledImages(images, np.zeros(12, np.int64), ("a", "b"), ["x"] * 12),
        side=16,
        resize="crop",
        crop_share=0.875,
    )
    for index in range(3):
        np.testing.assert_array_equal(source.sample(4, index).image, plain.sample(0, index).image)
    (here / "paint.py").write_text(
        "import albumentations as A\n"
        "def paint(image, **_):\n    image[:] = 7\n    return image\n"
        "def make():\n    return A.Compose([A.Lambda(image=paint, p=1.0)])\n"
    )
    assert (source_of("paint.py:make", images=images).sample(0, 0).image == 7).all()
    np.testing.assert_array_equal(images, before)


def test_functions_of_users_may_draw_from_the_global_generators(here):
    (here / "own.py").write_text(
        "import random, numpy as np, albumentations as A\n"
        "def shade(image, **_):\n    return (image // 2 + random.randrange(60) + np.random.randint(60)).astype(np.uint8)\n"
        "def make():\n    return A.Compose([A.Lambda(image=shade, p=1.0)])\n"
    )
    first = samples(source_of("own.py:make"), 0, range(6))
    assert all(same(first, samples(source_of("own.py:make"), 0, reversed(range(6)))))


@pytest.mark.job
def test_the_library_loads_no_framework_and_asks_no_server(here):
    code = (
        "import sys, socket\n"
        "def refuse(*_, **__): raise AssertionError('network')\n"
        "socket.socket.connect = refuse; socket.getaddrinfo = refuse\n"
        "from mtrain.data.images.pipelines import Pipeline\n"
        "Pipeline('aug.py:make')\n"
        "assert not {'torch', 'paddle'} & set(sys.modules), 'framework'\n"
        "import os; assert 'NO_ALBUMENTATIONS_UPDATE' not in os.environ\n"
    )
    environment = {"PATH": "/usr/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


BAD = {
    "gone.yml": (None, r"gone\.yml: No such file or directory; paths are relative to the spec"),
    "gone.py:make": (None, r"gone\.py: no such file or directory; name an existing Python file"),
    "aug.py:mk": (None, "defines no 'mk'"),
    "aug.py": (None, r"given 'aug\.py', expected PATH\.py:Name"),
    "aug.txt": ("", r"expected a \.yml, \.yaml or \.json file"),
    "text.json": ("{", r"text\.json is no pipeline that albumentations 2\S+ can build \(JSONDecodeError"),
    "brackets.json": ("[" * 100_000, "nested too deeply"),
    "tag.yml": ("!!python/object/apply:os.system [ls]", "is no pipeline"),
    "other.json": (json.dumps({"transform": {"__class_fullname__": "os.system", "p": 1.0}}), "KeyError"),
    "part.json": (
        json.dumps({"transform": {"__class_fullname__": "HorizontalFlip", "p": 1.0}}),
        "gives a HorizontalFlip",
    ),
    "raise.py:make": ("def make():\n    raise RuntimeError('no')\n", r"cannot be called \(RuntimeError: no\)"),
    "broken.py:make": ("def make(:\n", "is not valid Python"),
    "normal.py:make": (
        "import albumentations as A\ndef make():\n    return A.Compose([A.Normalize()])\n",
        r"makes float32 \(30, 40, 3\) of image 0; expected a uint8 image .* leave out Normalize",
    ),
    "fails.py:make": (
        "import albumentations as A\ndef make():\n    return A.Compose([A.RandomCrop(90, 90)])\n",
        r"fails on image 0 \(.*correct the pipeline",
    ),
    "counts.py:make": (
        "import albumentations as A\ncalls = []\n"
        "def count(image, **_):\n    calls.append(1)\n    return image + len(calls)\n"
        "def make():\n    return A.Compose([A.Lambda(image=count, p=1.0)])\n",
        "gives two different results for sample 0 with the same seeds",
    ),
}


@pytest.mark.parametrize("reference", BAD)
def test_what_is_no_pipeline_is_refused_in_words(here, reference):
    content, says = BAD[reference]
    if content is not None:
        (here / reference.partition(":")[0]).write_text(content)
    with pytest.raises(DataError) as caught:
        source_of(reference)
    assert re.search(says, str(caught.value)), caught.value
    assert str(caught.value).startswith("data.augment.albumentations: ")


def test_a_missing_library_is_one_sentence_with_the_command(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "albumentations", None)
    with pytest.raises(DataError, match=r"needs albumentations, .*; install it with: pip install .*\[data\]"):
        source_of("aug.py:make")


# -------------------------------------------------------------------------------------------------------------- detection
def detection(reference, *, workers=None, **augment):
    small = ROOT / "tests/data/bccd_small"
    data = DetectionDataSpec(format="voc", root=str(small / "voc"))
    augment = AugmentSpec(albumentations=reference, **{"mosaic": 0.0, "flip_lr": 0.0, **augment})
    return DetectionSource(open_data(data).train, image_size=64, augment=augment, seed=3)


def test_boxes_follow_the_image(here):
    (here / "mirror.py").write_text(
        "import albumentations as A\n"
        "def make():\n    return A.Compose([A.HorizontalFlip(p=1.0)], bbox_params=A.BboxParams(format='yolo', min_area=4))\n"
        "def none():\n    return A.Compose([A.NoOp()])\n"
        "def small():\n    return A.Compose([A.Resize(32, 32)])\n"
    )
    plain, still, mirrored = detection(None), detection("mirror.py:none"), detection("mirror.py:make")
    for index in range(3):
        one, two, other = (source.sample(1, index) for source in (plain, still, mirrored))
        np.testing.assert_array_equal(one.image, two.image)
        np.testing.assert_allclose(one.targets, two.targets, atol=2e-6)
        np.testing.assert_array_equal(one.image[:, ::-1], other.image)
        turned = one.targets.copy()
        turned[:, 1] = 1 - turned[:, 1]
        kept = turned[turned[:, 3] * turned[:, 4] * 64 * 64 >= 4]
        np.testing.assert_allclose(kept, other.targets, atol=1e-3)
    with pytest.raises(DataError, match="makes 32 x 32 pixels of an input of 64 x 64; leave out transforms"):
        detection("mirror.py:small")


def test_mosaics_with_a_pipeline_repeat_too(here):
    (here / "two.py").write_text(
        "import albumentations as A\n"
        "def make():\n    return A.Compose([A.HorizontalFlip(), A.RandomBrightnessContrast(), A.Affine(rotate=(-20, 20))])\n"
    )
    one, other = detection("two.py:make", mosaic=1.0), detection("two.py:make", mosaic=1.0)
    items = [one.sample(2, index) for index in range(4)]
    for index in reversed(range(4)):
        again = other.sample(2, index)
        np.testing.assert_array_equal(items[index].image, again.image)
        np.testing.assert_array_equal(items[index].targets, again.targets)


# -------------------------------------------------------------------------------------------------------------- in a spec
SPEC = "model: {{name: vit}}\ndata: {{format: image_folder, augment: {{albumentations: {}}}}}\n"


@pytest.mark.parametrize(("text", "ending"), [("aug.json", ""), ("./aug.yml", ""), ("aug.py:make", ":make")])
def test_paths_start_at_the_spec_or_on_the_command_line_here(here, text, ending):
    from mtrain.spec import config

    (here / "specs").mkdir()
    (here / "specs/a.yml").write_text(SPEC.format(text))
    file = Path(text.removesuffix(ending)).name
    loaded = config.load("specs/a.yml", overrides=[], flags={}, environ={})
    assert loaded.spec.data.augment.albumentations == f"{here / 'specs' / file}{ending}"
    given = config.load("specs/a.yml", overrides=[f"data.augment.albumentations={text}"], flags={}, environ={})
    assert given.spec.data.augment.albumentations == f"{here / file}{ending}"


def test_a_run_folder_may_name_a_saved_pipeline_but_no_code(here):
    """A run folder may come from somebody else: evaluating or resuming it must not run code that only it names."""
    from mtrain.errors import SpecError
    from mtrain.spec import config

    (here / "spec.json").write_text("{}")  # beside it, a spec.yml is one that mtrain wrote
    (here / "spec.yml").write_text(SPEC.format(here / "aug.json"))
    loaded = config.load("spec.yml", overrides=[], flags={}, environ={})
    assert loaded.spec.data.augment.albumentations == str(here / "aug.json")
    (here / "spec.yml").write_text(SPEC.format(f"{here / 'aug.py'}:make"))
    with pytest.raises(SpecError, match=r"data\.augment\.albumentations: names code, .*a run folder is not trusted"):
        config.load("spec.yml", overrides=[], flags={}, environ={})
    again = ["data.augment.albumentations=aug.py:make"]
    assert config.load("spec.yml", overrides=again, flags={}, environ={}).spec.data.augment.albumentations is not None
