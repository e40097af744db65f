"""What leaves the machine names no host, no person, no path and no secret, and keeps what was trained."""

import json

import pytest

from mtrain.spec import config
from mtrain.spec.disclosure import needed_to_evaluate, scrub, shareable, shorten, without_places

CANARIES = ("hunter2", "bob", "10.9.8.7", "id_rsa", "backup-bucket", "/srv", "tok-123", "/opt/venv", "plug", "acme-lab")
SPEC = {
    "plugins": "/srv/plug/plugins.toml",
    "model": {"name": "/srv/code/nets.py:Net", "options": {"width": 4, "token": "tok-123", "arch": "small"}},
    "data": {"format": "coco", "root": "/srv/acme/cells", "names": ["N/A", "rbc"], "options": {"api_key": "tok-123"}},
    "backend": {"name": "ddp", "python": "/opt/venv/bin/python"},
    "cluster": {"ips": ["10.9.8.7"], "ssh": {"user": "bob", "identity_file": "/home/bob/.ssh/id_rsa"}},
    "checkpoint": {"copy_to": "s3://backup-bucket/x", "keep_last": 3},
    "report": {
        "reporters": {"mlflow": {"tracking_uri": "http://bob:hunter2@mlflow:5000"}, "wandb": {"entity": "acme-lab"}}
    },
    "train": {"epochs": 3, "freeze": [r"^backbone\."]},
}


def test_a_spec_for_others_keeps_what_was_trained_and_nothing_private():
    shared = shareable({**SPEC, "data": {**SPEC["data"], "classes": {"a/b": "c/d"}}})
    text = json.dumps(shared)
    assert [word for word in CANARIES if word in text] == []
    assert shared["train"] == SPEC["train"]
    assert shared["model"] == {"name": "nets.py:Net", "options": {"width": 4, "token": None, "arch": "small"}}
    assert shared["data"]["names"] == ["N/A", "rbc"], "a class may be called so"
    assert shared["data"]["classes"] == {"a/b": "c/d"}
    assert (shared["data"]["root"], shared["backend"], shared["checkpoint"]) == (
        "cells",
        {"name": "ddp"},
        {"keep_last": 3},
    )


def test_the_spec_of_a_checkpoint_has_no_hosts_reporters_and_copies():
    kept = without_places(SPEC)
    assert not {"cluster", "report", "launcher"} & set(kept)
    assert (kept["backend"], kept["checkpoint"]) == ({"name": "ddp"}, {"keep_last": 3})
    assert (kept["model"], kept["data"]) == (SPEC["model"], SPEC["data"]), "a resumed job compares them"


def test_an_exported_model_takes_along_how_images_are_prepared_and_scored_alone(tmp_path):
    values = {
        "model.weights": str(tmp_path / "hunter2.pt"),
        "data.root": str(tmp_path),
        "data.names": ["cat", "dog"],
        "data.classes": {"dog": "hound", "cat": None},
        "data.format": "coco",
        "data.train": "bob/train",
        "data.image_size": 96,
        "data.cache_dir": "/srv/cache",
        "data.augment.albumentations": "/srv/pipe.yml",
        "evaluate.batch_size": 3,
        "report.reporters": {"mlflow": {"tracking_uri": "http://bob:hunter2@mlflow:5000"}},
    }
    needed = needed_to_evaluate(config.load("digits", flags=values).spec)
    assert set(needed) == {"model", "data", "evaluate"}
    assert [word for word in (*CANARIES, str(tmp_path)) if word in json.dumps(needed)] == []
    data = needed["data"]
    assert (data["format"], data["names"], data["image_size"], data["resize"]) == (
        "coco",
        ["cat", "dog"],
        96,
        "letterbox",
    )
    assert data["classes"] == {"dog": "hound", "cat": None}
    assert needed["evaluate"]["batch_size"] == 3
    assert data["augment"]["mosaic"] == 0.3, "resize: stretch refuses the default, so the values of the job are kept"
    read = config.from_json(json.dumps(needed))
    assert (read.data.root, read.data.input_side, read.model.name) == (None, 96, "yolov5n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/bob/nets.py:Net", "nets.py:Net"),
        ("s3://key:secret@bucket/runs/a?token=x", "a"),
        ("http://bob:hunter2@mlflow:5000", "***"),
        ("~/data/", "data"),
        (r"\.bn\d*\.weight$", r"\.bn\d*\.weight$"),
        ("AP50", "AP50"),
    ],
)
def test_a_path_or_address_becomes_its_last_part(text, expected):
    assert shorten(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("saved to /home/bob/runs/a/x.pt, 3 files", "saved to x.pt, 3 files"),
        ("mtrain -o data.root=/srv/acme/cells --ips 10.9.8.7,node7", "mtrain -o data.root=cells --ips ***,***"),
        ('File "/home/bob/nets.py", line 3', 'File "nets.py", line 3'),
        ("cannot reach http://bob:hunter2@mlflow:5000/x", "cannot reach http://***"),
        ("ssh bob@node7.example.org: refused", "ssh ***: refused"),
        ("-o data.options.token=tok-123 --epochs 3", "-o data.options.token=*** --epochs 3"),
        ("AP@50 fell to 1/2 after 10 updates/s", "AP@50 fell to 1/2 after 10 updates/s"),
    ],
)
def test_prose_is_shown_without_places(text, expected):
    assert scrub(text, ["node7"]) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_a_name_that_begins_with_another_is_masked_whole(order: int) -> None:
    hidden = ["node7", "node7.acme.example", "node7.acme", "node7.acme.example.org", "node", "7"][::order]
    for name in hidden:
        assert scrub(f"{name} hung up, then ({name}:29500) {name}.", hidden) == "*** hung up, then (***:29500) ***."
    assert scrub("node7-b and a.node7 and anode7 are other names", ["node7"]) == (
        "node7-b and a.node7 and anode7 are other names"
    )


def test_secrets_are_left_out_at_any_depth() -> None:
    options = {
        "tokens": ["tok-1", "tok-2"],
        "api_key": ["tok-3", ["tok-4"]],
        "keys": {"password": "tok-5", "width": 3},
        "services": [{"auth": "tok-6", "name": "a"}, {"name": "b", "secret": ("tok-7", 7)}],
        "monkey": "kept",
        "names": ["token", "/srv/x"],
        "files": ["/srv/a/b.txt", "c.txt"],
    }
    assert shareable({"model": {"options": options}})["model"]["options"] == {
        "tokens": [None, None],
        "api_key": [None, [None]],
        "keys": {"password": None, "width": 3},
        "services": [{"auth": None, "name": "a"}, {"name": "b", "secret": [None, 7]}],
        "monkey": "kept",
        "names": ["token", "/srv/x"],
        "files": ["b.txt", "c.txt"],
    }


@pytest.mark.parametrize(
    "text", ["a.-", "token", "a", "a@", "/a-", "1.", "x+", "secret ", "~/", "password:", "http", "://", "@", "-"]
)
def test_a_long_text_without_a_break_is_scrubbed_in_one_pass(text):
    """The square of its length would be more than this test may take."""
    assert len(scrub(text * 200_000)) <= len(text) * 200_000
    assert scrub(f"{text * 100} https://user:pw@host.org/x").endswith(" https://***")
