"""The place of a rank, from stacks as they were read from hanging ranks."""

from pathlib import Path

import pytest

from mtrain.jobs.watch import places
from mtrain.jobs.watch.places import missing_ranks, place_of
from mtrain.system.stacks import Frame, Stack

SITE = "/venv/lib/python3.11/site-packages"
OWN = Frame("/home/u/train.py", 41, "main")
MAIN = Frame("/home/u/train.py", 60, "<module>")
BACKWARD = Frame(f"{SITE}/torch/autograd/graph.py", 869, "_engine_run_backward")
WRAPPER = Frame(f"{SITE}/torch/distributed/c10d_logger.py", 83, "wrapper")
MTRAIN = str(Path(places.__file__).parents[2])


def stack(*frames: Frame) -> Stack:
    return Stack("faulthandler", frames)


def torch_call(function: str, file: str = "distributed_c10d.py") -> Frame:
    return Frame(f"{SITE}/torch/distributed/{file}", 2810, function)


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ((torch_call("all_reduce"), WRAPPER), "all_reduce"),
        ((torch_call("barrier"), WRAPPER), "barrier"),
        ((torch_call("all_gather_single"),), "all_gather"),
        ((torch_call("wait_for_unshard", "fsdp/_fully_shard/_fsdp_param_group.py"),), "wait_for_unshard"),
        ((BACKWARD,), "the exchange of the gradients"),
        (
            (
                Frame(f"{SITE}/horovod/torch/mpi_ops.py", 1285, "synchronize"),
                Frame(f"{SITE}/horovod/torch/mpi_ops.py", 200, "allreduce"),
            ),
            "allreduce",
        ),
        (
            (Frame(f"{SITE}/paddle/base/dygraph/tensor_patch_methods.py", 370, "backward"),),
            "the exchange of the gradients",
        ),
        (
            (Frame(f"{SITE}/paddle/distributed/communication/stream/all_reduce.py", 30, "_all_reduce_in_dygraph"),),
            "all_reduce",
        ),
    ],
)
def test_a_rank_in_a_collective_waits(frames, what):
    place = place_of(stack(*frames, OWN, MAIN), idle=True)
    assert (place.kind, place.what, place.where) == ("waits", what, "train.py:41")


def test_a_users_folder_that_is_named_as_a_library_is_the_users():
    assert place_of(stack(Frame("/home/u/horovod/examples/mnist.py", 9, "train")), idle=True).kind == "runs"


def test_a_rank_that_computes_in_backward_does_not_wait():
    assert place_of(stack(BACKWARD, OWN), idle=False).kind == "backward"


SELECT = Frame("/usr/lib/python3.11/selectors.py", 415, "select")
POLL = Frame("/usr/lib/python3.11/multiprocessing/connection.py", 257, "poll")


def test_who_waits_for_a_message_of_another_rank_waits_for_no_child():
    collective = Frame(f"{MTRAIN}/backends/_paddle/channel.py", 158, "receive")
    gathering = Frame(f"{MTRAIN}/backends/_paddle/collective.py", 40, "all_gather")
    agreeing = Frame(f"{MTRAIN}/core/ranks/agreement.py", 9, "agree")
    place = place_of(stack(SELECT, POLL, collective, gathering, agreeing), idle=True)
    assert (place.kind, place.what) == ("waits", "all_gather of what ranks agree on after an update")
    loading = Frame(f"{SITE}/torch/utils/data/dataloader.py", 1200, "_try_get_data")
    assert place_of(stack(SELECT, POLL, loading, OWN), idle=True).kind == "children"
    pool = Frame(f"{MTRAIN}/data/loader/pool.py", 12, "take")
    assert place_of(stack(SELECT, POLL, pool, collective), idle=True).kind == "children"


def test_weights_that_are_gathered_for_an_update_are_no_gradients():
    order = Frame(f"{MTRAIN}/core/update/order.py", 7, "_update")
    unshard = Frame(f"{SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", 300, "unshard")
    assert (
        place_of(stack(torch_call("all_gather_single"), unshard, order), idle=True).what == "all_gather of the weights"
    )
    assert place_of(stack(torch_call("all_gather_single"), order), idle=True).what == "all_gather of the gradients"
    trainer = Frame(f"{MTRAIN}/core/update/trainer.py", 7, "train")
    assert place_of(stack(torch_call("all_gather_single"), trainer), idle=True).what == "all_gather"
    evaluating = Frame(f"{MTRAIN}/core/evaluate.py", 7, "evaluate")
    assert place_of(stack(torch_call("barrier"), evaluating, trainer), idle=True).what == "barrier of an evaluation"


@pytest.mark.parametrize(
    ("file", "purpose"),
    [
        ("core/update/order.py", "all_reduce of the gradients"),
        ("core/ranks/agreement.py", "all_reduce of what ranks agree on after an update"),
        ("core/checkpoint/saving.py", "all_reduce of a checkpoint"),
        ("core/none.py", "all_reduce"),
    ],
)
def test_of_mtrains_own_calls_is_known_what_is_sent(file, purpose):
    frames = (torch_call("all_reduce"), Frame(f"{MTRAIN}/backends/_torch/collective.py", 5, "all_reduce"))
    place = place_of(stack(*frames, Frame(f"{MTRAIN}/{file}", 7, "f")), idle=True)
    assert (place.what, place.where) == (purpose, "")


def test_a_poll_of_mtrains_own_is_an_exchange():
    frames = (
        Frame(f"{MTRAIN}/backends/_horovod/collective.py", 82, "wait"),
        Frame(f"{MTRAIN}/core/update/order.py", 7, "f"),
    )
    assert place_of(stack(*frames), idle=False).what == "the exchange of the gradients"
    assert place_of(stack(frames[0]), idle=False).what == "wait"


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ((Frame(f"{SITE}/torch/utils/file_baton.py", 50, "wait"),), "lock"),
        ((Frame("/usr/lib/python3.11/bdb.py", 90, "trace_dispatch"),), "person"),
        ((Frame(f"{SITE}/debugpy/server/api.py", 90, "wait_for_client"),), "person"),
        ((Frame("/usr/lib/python3.11/selectors.py", 415, "select"),), "children"),
        ((Frame("/usr/lib/python3.11/multiprocessing/queues.py", 103, "get"),), "children"),
        ((), "runs"),
    ],
)
def test_other_places(frames, kind):
    assert place_of(stack(*frames, OWN), idle=True).kind == kind


def test_a_rank_in_input_waits_for_a_person(tmp_path):
    script = tmp_path / "ask.py"
    script.write_text("x = 1\nname = input('which? ')\n")
    place = place_of(stack(Frame(str(script), 2, "<module>")), idle=True)
    assert (place.kind, place.where) == ("person", "ask.py:2")
    assert place_of(stack(Frame(str(script), 1, "<module>")), idle=True).kind == "runs"


def test_without_a_stack_the_reason_is_kept():
    assert place_of(Stack("none", why="it is stopped"), idle=True) == places.Place(kind="unknown", why="it is stopped")


def test_the_children_of_a_rank_that_waits_for_some_are_asked(monkeypatch):
    stacks = {
        10: stack(Frame("/usr/lib/python3.11/selectors.py", 415, "select"), OWN),
        11: stack(torch_call("barrier"), OWN),
        20: stack(Frame("/home/u/data.py", 16, "__getitem__")),
        21: Stack("none", why="it has ended"),
    }
    asked = []
    monkeypatch.setattr(places.stacks, "ask", lambda pids: asked.extend(pids) or {pid: stacks[pid] for pid in pids})
    found = places.ask({0: 10, 1: 11}, idle={0: True, 1: True}, children={10: [20, 21], 11: [30]})
    place = places.Place.of(found["0"])
    assert (place.kind, place.children) == ("children", ((20, "data.py:16"), (21, "unknown: it has ended")))
    assert places.Place.of(found["1"]).what == "barrier"
    assert asked == [10, 11, 20, 21]


STALL = (
    "[2026-01-01 10:00:00.1: W horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be reduced\n"
    "Missing ranks:\n{ranks}\n[2026-01-01 10:00:20.1: W other] x\n"
)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        (STALL.format(ranks="1: [allreduce.x, allreduce.y ...]"), [1]),
        (STALL.format(ranks="1!: [allreduce.x]\n12!: [allreduce.x]"), [1, 12]),
        (STALL.format(ranks="1: [a]") + STALL.format(ranks="2: [a]"), [2]),
        ("Missing ranks:", []),
        ("1: [a]\n", []),
        ("", []),
    ],
)
def test_what_horovod_says_of_missing_ranks_is_read(tmp_path, text, ranks):
    log = tmp_path / "rank-0.log"
    log.write_text(STALL.format(ranks="7: [of an earlier attempt]") + text)
    assert missing_ranks(log, start=len(STALL.format(ranks="7: [of an earlier attempt]"))) == ranks


def test_a_log_that_is_missing_or_endless_names_nobody(tmp_path):
    assert missing_ranks(tmp_path / "none.log", start=0) == []
    (tmp_path / "long.log").write_bytes(b"\xff" * (1 << 20))
    assert missing_ranks(tmp_path / "long.log", start=0) == []
