"""The shipped BCCD specs read the data set as it is published; its samples are those of the COCO form of the same images.

`tests/data/bccd_small` holds seven of its images in both forms: the publisher's own XML in `voc`, and COCO's JSON.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtrain.commands import main
from mtrain.rank.spec.assembly import open_task
from mtrain.spec import config
from mtrain.spec.resolved import Resolved

SMALL = Path(__file__).parents[1] / "data" / "bccd_small"
SPECS = ("yolov5n_bccd", "ppyoloe_s_bccd", "yolov5n_bccd_reference")
PUBLISHED: dict[str, Any] = {"data.root": SMALL / "voc"}
COCO: dict[str, Any] = {
    "data.format": "coco",
    "data.root": SMALL,
    "data.train": "annotations/instances_train.json",
    "data.val": "annotations/instances_val.json",
    "data.images": "images",
    "data.names": "null",
}
"""What makes COCO's JSON of such a spec: docs/results.md measured with it."""


def opened(name: str, values: dict[str, Any]) -> Any:
    overrides = [f"{path}={value}" for path, value in (values | {"data.cache": "none"}).items()]
    spec = config.load({"_BASE_": name}, overrides=overrides, environ={}).spec
    return open_task(Resolved.of(spec))


def arrays(data: Any, split: str, *, epochs: int) -> list[dict[str, Any]]:
    source = data.sources()[split]
    return [source.collate([source.sample(epoch, index) for index in range(len(source))]) for epoch in range(epochs)]


@pytest.mark.parametrize("name", SPECS)
def test_the_published_folders_give_the_samples_of_the_coco_form(name: str) -> None:
    published, coco = opened(name, PUBLISHED), opened(name, COCO)
    assert published.task().class_names == coco.task().class_names == ("RBC", "WBC", "Platelets")
    for split, count in (("train", 4), ("val", 3)):
        mine, other = arrays(published, split, epochs=2), arrays(coco, split, epochs=2)
        for batch, expected in zip(mine, other, strict=True):
            assert len(batch["index"]) == count
            assert batch.keys() == expected.keys()
            for key, array in batch.items():
                np.testing.assert_array_equal(array, expected[key], err_msg=f"{split}: {key}")
        assert len(mine[0]["targets"]) > count
    # Augmentation of another epoch differs, so the equality above is no equality of constants.
    first, second = arrays(published, "train", epochs=2)
    assert not np.array_equal(first["images"], second["images"])


def test_the_spec_finds_a_clone_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "BCCD_Dataset").mkdir()
    (tmp_path / "BCCD_Dataset" / "BCCD").symlink_to(SMALL / "voc")
    monkeypatch.chdir(tmp_path)
    assert main(["data", "check", "-c", "yolov5n_bccd", "--output", str(tmp_path)]) == 0
    assert "7 image files, all whole" in capsys.readouterr().out
