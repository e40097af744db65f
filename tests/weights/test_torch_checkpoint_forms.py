"""The weights in checkpoints of any program are found by rule: which set is meant, and of folders all their files."""

import json
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mtrain.commands import main
from mtrain.errors import CheckpointError, SpecError
from mtrain.jobs.exported import carried_spec
from mtrain.spec import config
from mtrain.weights.models import check_start
from mtrain.weights.reading import read
from mtrain.weights.writing import write

RIGHT = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.tensor([5.0, 6.0])}
OTHER = {name: -tensor for name, tensor in RIGHT.items()}
STORED = Path(__file__).parents[1] / "data" / "deepspeed" / "two_ranks.tar.xz"


def adam() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.Adam([weight])
    optimizer.step()
    return optimizer.state_dict()


FORMS: dict[str, dict[str, Any]] = {
    "model_state_dict": {
        "epoch": 1,
        "model_state_dict": RIGHT,
        "optimizer_state_dict": adam(),
        "loss": torch.tensor(0.3),
    },
    "module": {"module": RIGHT, "optimizer": adam(), "rng_state": torch.zeros(8, dtype=torch.uint8)},
    "net": {"net": RIGHT, "acc": torch.tensor(93.0), "epoch": 3},
    "params_ema": {"params": OTHER, "params_ema": RIGHT},
    "state_dict_ema": {"state_dict": OTHER, "state_dict_ema": RIGHT, "optimizer": adam()},
    "ema.module": {"model": OTHER, "ema": {"module": RIGHT, "updates": 7}},
    "state_dict": {
        "state_dict": RIGHT,
        "optimizer_states": [adam()],
        "hyper_parameters": {"class_weights": torch.ones(3)},
    },
    "model": {"model": RIGHT, "teacher": OTHER, "optimizer": adam()},
    "model ": {"model": RIGHT, "teacher": {"state_dict": OTHER}},
    "ema": {"ema": {"shadow": {"a.weight": torch.ones(1)}, **RIGHT}, "model": OTHER},
    "my_backbone": {"my_backbone": RIGHT, "step": 3, "loss": torch.tensor(1.0)},
    "payload.weights": {"payload": {"weights": RIGHT, "sampler": {"seed": 3}}},
    "": {**RIGHT, "extra": {"scale": torch.ones(1)}},
}


def holds_right(weights: Any) -> bool:
    return set(weights.arrays) == set(RIGHT) and all(
        np.array_equal(weights.arrays[name], tensor.numpy()) for name, tensor in RIGHT.items()
    )


@pytest.mark.parametrize("key", FORMS)
def test_the_weights_of_a_checkpoint_are_found_and_it_is_said_where(key: str, tmp_path: Path) -> None:
    torch.save(FORMS[key], tmp_path / "w.pt")
    found = read(tmp_path / "w.pt")
    assert holds_right(found)
    assert (f"`{key.strip()}`" if key else "a state dict") in found.description


def test_of_two_sets_neither_is_guessed_and_the_key_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"student": OTHER, "teacher": RIGHT, "optimizer": adam()}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError) as error:
        read(tmp_path / "w.pt")
    assert "several sets of weights: student (2 arrays), teacher (2 arrays)" in str(error.value)
    assert "model.weights_key=KEY" in str(error.value)
    assert holds_right(read(tmp_path / "w.pt", key="teacher"))
    assert main(["weights", "show", str(tmp_path / "w.pt"), "--key", "teacher"]) == 0
    assert "its `teacher`: 2 arrays" in capsys.readouterr().out
    assert main(["weights", "show", str(tmp_path / "w.pt"), "--key", "techer"]) == 2
    assert "no weights under 'techer'; it has: student, teacher" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("inside", "key"),
    [
        ("state_dict", "teacher"),
        ("model", "teacher.model"),
        ("module", "teacher.module"),
        ("teacher_ema", "teacher_ema"),
    ],
)
def test_of_two_sets_under_keys_that_are_as_usual_neither_is_guessed(inside: str, key: str, tmp_path: Path) -> None:
    is_flat = inside == "teacher_ema"
    nested = {"student": {inside: OTHER}, "teacher": {inside: RIGHT}}
    sets = {"student_ema": OTHER, "teacher_ema": RIGHT} if is_flat else nested
    torch.save(sets, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="several sets of weights: "):
        read(tmp_path / "w.pt")
    assert holds_right(read(tmp_path / "w.pt", key=key))
    if not is_flat:
        with pytest.raises(
            CheckpointError, match=f"several sets of weights under '{inside}'.*student.{inside}, teacher"
        ):
            read(tmp_path / "w.pt", key=inside)


@pytest.mark.parametrize("ending", [".pt", ".pdparams", ".safetensors"])
def test_the_key_may_be_the_first_part_of_names(ending: str, tmp_path: Path) -> None:
    sets = {"student": OTHER, "teacher": RIGHT}
    write(
        tmp_path / f"w{ending}", {f"{key}.{name}": a.numpy() for key, each in sets.items() for name, a in each.items()}
    )
    found = read(tmp_path / f"w{ending}", key="teacher")
    assert holds_right(found)
    assert "the part `teacher`" in found.description


def test_a_spec_says_the_key_and_a_wrong_one_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    torch.save({"student": OTHER, "teacher": RIGHT}, tmp_path / "w.pt")

    def check(*more: str) -> None:
        spec = config.load("yolov5n", overrides=[f"model.weights={tmp_path / 'w.pt'}", *more], environ={}).spec
        job: Any = SimpleNamespace(spec=spec, model_class=SimpleNamespace(published=()))
        outline: Any = SimpleNamespace(state=None)
        check_start(job, outline, classes=(), training=True)

    check("model.weights_key=teacher")
    with pytest.raises(CheckpointError, match=r"model\.weights: .*several sets of weights"):
        check()
    with pytest.raises(CheckpointError, match="no weights under 'techer'; it has: student, teacher"):
        check("model.weights_key=techer")
    with pytest.raises(
        SpecError, match=r"model\.weights_key: given 'teacher' without a file; give one with model\.weights"
    ):
        check("model.weights_key=teacher", "model.weights=null")
    check("model.weights=null")


def test_the_spec_that_a_file_carries_has_no_key_of_the_file_that_its_job_began_with() -> None:
    model = {"name": "yolov5n", "weights": "w.pt", "weights_key": "teacher"}
    carried = carried_spec({"model": model}, name="x")["model"]
    assert carried == {"name": "yolov5n", "weights": None, "weights_key": None}


def test_a_key_can_name_what_the_rule_would_not_take(tmp_path: Path) -> None:
    torch.save({"model": OTHER, "ema": {"module": OTHER}, "old": {"net": RIGHT}}, tmp_path / "w.pt")
    assert holds_right(read(tmp_path / "w.pt", key="old.net"))
    assert holds_right(read(tmp_path / "w.pt", key="net"))


def test_of_an_optimizer_alone_it_is_said_that_there_are_no_weights(tmp_path: Path) -> None:
    torch.save({"optimizer": adam(), "epoch": 3}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match="no weights in it"):
        read(tmp_path / "w.pt")


def test_dictionaries_inside_of_each_other_without_end_are_looked_at_once(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"x": {}}
    for _ in range(200):
        inner = {f"key{number}": inner for number in range(30)}
    torch.save({"model": RIGHT, "deep": inner}, tmp_path / "w.pt")
    assert holds_right(read(tmp_path / "w.pt"))


# ------------------------------------------------------------------------------------------------------------ folders
def test_experts_of_deepspeed_beside_the_model_are_not_taken_for_it(tmp_path: Path) -> None:
    for part in ("mp_rank_00", "layer_0_expert_0_mp_rank_00"):
        torch.save({"module": RIGHT}, tmp_path / f"{part}_model_states.pt")
    with pytest.raises(CheckpointError, match=r"layer_0_expert_0.*divided layers or experts among ranks"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("is_divided", [False, True])
def test_folders_of_accelerate_and_transformers_are_read_whole(name: str, is_divided: bool, tmp_path: Path) -> None:
    stem, _, ending = name.rpartition(".")
    places = {key: f"{stem}-0000{number}-of-00002.{ending}" for number, key in enumerate(RIGHT, start=1)}
    files = {file: {key: RIGHT[key] for key, place in places.items() if place == file} for file in places.values()}
    for file, arrays in files.items() if is_divided else [(name, RIGHT)]:
        write(
            tmp_path / f"{file}.pt" if ending == "bin" else tmp_path / file,
            {key: a.numpy() for key, a in arrays.items()},
        )
        if ending == "bin":
            (tmp_path / f"{file}.pt").rename(tmp_path / file)
    if is_divided:
        (tmp_path / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (tmp_path / "optimizer.bin").write_bytes(b"not read")
    assert holds_right(read(tmp_path))
    if is_divided:
        (tmp_path / list(files)[1]).unlink()
        with pytest.raises(CheckpointError, match=f"index.json: names {list(files)[1]}"):
            read(tmp_path)


@pytest.mark.parametrize("place", ["/etc/passwd", "../x.safetensors"])
def test_an_index_that_names_a_file_elsewhere_is_refused(place: str, tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", {"a": np.ones(1)})
    folder = tmp_path / "w"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": place}}))
    with pytest.raises(CheckpointError, match="which is not beside it"):
        read(folder)


# ---------------------------------------------------------------------------------------------------------- DeepSpeed
@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What DeepSpeed 0.19.8 saved on two ranks under each stage, beside the weights that its `zero_to_fp32.py` makes of it."""
    folder = tmp_path_factory.mktemp("zero")
    with tarfile.open(STORED) as archive:
        # Python 3.11.0 to 3.11.3 have no filters.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("s0", "its `module`"),
        ("s1", "ZeRO 1 or 2 on 2 ranks"),
        ("s2bf", "ZeRO 1 or 2 on 2"),
        ("s3", "ZeRO 3 on 2 ranks"),
    ],
)
def test_folders_of_deepspeed_are_the_float32_weights_that_its_own_program_makes(
    name: str, says: str, zero: Path
) -> None:
    expected = dict(np.load(zero / f"{name}.npz"))
    inside = next((zero / name).glob("global_step*"))
    files = [*inside.glob("zero_pp_rank_*"), inside / "mp_rank_00_model_states.pt"]
    for path in (zero / name, inside, *(file for file in files if file.is_file())):
        found = read(path)
        assert says in found.description
        assert set(found.arrays) - set(expected) <= {"tied.weight", "tied.bias", "frozen.weight"}
        for key, array in expected.items():
            assert found.arrays[key].dtype == np.float32
            np.testing.assert_array_equal(found.arrays[key], array)


@pytest.mark.parametrize("name", ["s1", "s2bf", "s3"])
def test_a_frozen_parameter_a_buffer_and_a_tied_one_are_among_them(name: str, zero: Path) -> None:
    arrays = read(zero / name).arrays
    assert {"frozen.weight", "count"} <= set(arrays)
    # DeepSpeed 0.19.8 notes no second name of a parameter, which under ZeRO 3 is lost.
    assert ("tied.weight" in arrays) == (name != "s3")
    if name != "s3":
        np.testing.assert_array_equal(arrays["tied.weight"], arrays["b.weight"])
    np.testing.assert_array_equal(arrays["count"], [0, 1, 2, 3])


@pytest.mark.parametrize("name", ["s1", "s3"])
def test_a_folder_that_lacks_the_file_of_a_rank_is_refused(name: str, zero: Path, tmp_path: Path) -> None:
    shutil.copytree(zero / name, tmp_path / "w")
    next((tmp_path / "w").glob("*/*rank_1_mp_rank_00_optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match=r"files of 1 ranks .*, written by 2; copy those of all"):
        read(tmp_path / "w")


def test_a_job_that_divided_layers_among_ranks_is_refused(zero: Path, tmp_path: Path) -> None:
    shutil.copytree(zero / "s1", tmp_path / "w")
    inside = next((tmp_path / "w").glob("global_step*"))
    shutil.copy(inside / "mp_rank_00_model_states.pt", inside / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match=r"mp_rank_01_model_states\.pt: of a job that divided layers"):
        read(tmp_path / "w")


@pytest.mark.parametrize("tag", ["../elsewhere", "/etc", "", "global_step7"])
def test_a_tag_that_is_no_folder_inside_is_not_followed(tag: str, zero: Path, tmp_path: Path) -> None:
    shutil.copytree(zero / "s1" / "global_step2", tmp_path / "elsewhere")
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "latest").write_text(tag)
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run folder"):
        read(tmp_path / "w")


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("param_shapes", [{"a.weight": torch.Size([700, 500])}], "end before it does"),
        ("param_shapes", [{"a.weight": "wide"}], "a shape that is no list"),
        ("param_shapes", [{}, {}, {"a.weight": torch.Size([1])}], "fewer groups"),
        ("module", [3], "module that is no dictionary"),
    ],
)
def test_parts_that_do_not_make_up_the_weights_are_refused(
    field: str, value: Any, says: str, zero: Path, tmp_path: Path
) -> None:
    shutil.copytree(zero / "s1", tmp_path / "w")
    file = next((tmp_path / "w").glob("*/mp_rank_00_model_states.pt"))
    content = torch.load(file, weights_only=False)  # written by this project
    torch.save({**{key: content[key] for key in ("module", "buffer_names", "shared_params")}, field: value}, file)
    with pytest.raises(CheckpointError, match=says):
        read(tmp_path / "w")


def test_a_file_of_a_rank_that_names_something_else_is_not_executed(zero: Path, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("executed",))

    shutil.copytree(zero / "s1", tmp_path / "w")
    torch.save({"optimizer_state_dict": Hostile()}, next((tmp_path / "w").glob("*/zero_pp_rank_1*")))
    with pytest.raises(CheckpointError, match=r"nothing of it was executed: the name __builtin__\.print"):
        read(tmp_path / "w")
