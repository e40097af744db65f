"""``report.profile``: a recording of just the updates that a spec names, of each rank."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mtrain.core.interfaces import Capabilities, Progress
from mtrain.errors import SpecError
from mtrain.rank.profiling import Profile
from mtrain.system.runfolder import RunFolder


def recorded_updates(folder, updates, *, total, done=0):
    """Return which updates were computed while a profile was recorded, and the file that was written."""
    now, files = [], []

    @contextmanager
    def record(file):
        now.append(file)
        yield
        files.append(now.pop())

    session = SimpleNamespace(capabilities=Capabilities(profile=record), collective=SimpleNamespace(rank=3))
    profile = Profile(session, updates, RunFolder(folder))
    seen = []
    profile(Progress(update=done))
    for update in range(done + 1, total + 1):
        seen += [update] if now else []
        profile(Progress(update=update))
    profile.close()
    profile.close()
    return seen, files


@pytest.mark.parametrize(
    ("updates", "expected"), [([1, 1], [1]), ([2, 4], [2, 3, 4]), ([5, 9], [5, 6]), ([8, 9], []), (None, [])]
)
def test_the_updates_that_a_spec_names_are_recorded_once(updates, expected, tmp_path):
    seen, files = recorded_updates(tmp_path, updates, total=6)
    assert seen == expected
    assert files == ([tmp_path / "profile/rank-3.json"] if expected else [])


def test_a_job_that_was_resumed_between_them_records_the_rest(tmp_path):
    assert recorded_updates(tmp_path, [2, 5], total=6, done=3)[0] == [4, 5]
    assert recorded_updates(tmp_path, [2, 5], total=6, done=5)[0] == []


def test_a_backend_that_records_no_profile_is_named_before_training(tmp_path):
    session = SimpleNamespace(capabilities=Capabilities(), collective=SimpleNamespace(rank=0))
    Profile(session, None, RunFolder(tmp_path))
    with pytest.raises(SpecError, match=r"report\.profile: this backend records no profile"):
        Profile(session, [1, 2], RunFolder(tmp_path))


def test_a_profile_holds_the_operations_of_its_updates(tmp_path):
    import torch

    from mtrain.backends.solo import Solo

    with Solo(Solo.Options(device="cpu")) as session:
        profile = Profile(session, [2, 3], RunFolder(tmp_path))
        weights = torch.ones(4, 4)
        for update in range(5):
            profile(Progress(update=update))
            weights = weights.sinh() if update in (1, 2) else weights.cos()
        profile.close()
    names = [event.get("name") for event in json.loads((tmp_path / "profile/rank-0.json").read_text())["traceEvents"]]
    assert names.count("aten::sinh") == 2
    assert "aten::cos" not in names
