"""The files of events that mtrain writes are those of TensorBoard."""

import time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from mtrain.records import tensorboard
from mtrain.records.tensorboard import EventFile, Events


def test_checksums_are_those_of_tensorboard_for_few_messages_and_many():
    draw = np.random.default_rng(0)
    lengths = [0, 1, 8, 207, 207, 3000, *[8] * 20, *[207] * 30]
    messages = [draw.bytes(length) for length in lengths]
    expected = [masked_crc32c(message).to_bytes(4, "little") for message in messages]
    assert tensorboard.checksums(messages) == expected


def event(step: int) -> Event:
    return Event(step=step, summary=Summary(value=[Summary.Value(tag="loss", simple_value=step / 4)]))


def read(folder) -> list[Event]:
    (file,) = folder.iterdir()
    return list(EventFileLoader(str(file)).Load())


@pytest.mark.parametrize("count", [3, 300])
def test_tensorboard_reads_what_was_added(tmp_path, count):
    file = EventFile(tmp_path)
    for step in range(count):
        file.add(event(step))
    file.flush()
    first, *rest = read(tmp_path)
    assert first.file_version == "brain.Event:2"
    assert [each.step for each in rest] == list(range(count))


def test_records_of_updates_have_their_own_times_and_tags(tmp_path):
    began, events = time.time(), Events(tmp_path)
    for update, losses in enumerate(({"box": 0.5}, {"box": 0.25}, {"box": 0.125, "cls": 1.0}, {})):
        events.update({"kind": "update", "update": update, "losses": losses})
    events.close()
    _, *rest = read(tmp_path)
    assert [each.step for each in rest] == [0, 1, 2, 3]
    assert all(began <= each.wall_time <= time.time() for each in rest)
    shown = [
        {value.tag: value.tensor.float_val[:] or value.simple_value for value in each.summary.value} for each in rest
    ]
    assert [[*one] for one in shown] == [[*shown[0]], [*shown[0]], [*shown[2]], []]
    assert [*map(len, shown)] == [1, 1, 2, 0]


def test_an_event_waits_for_others_some_seconds_and_no_longer(tmp_path):
    now = [0.0]
    file = EventFile(tmp_path, clock=lambda: now[0])
    file.add(event(0))
    assert len(read(tmp_path)) == 1, "only the head, which is written at once"
    now[0] = tensorboard.WRITTEN_EVERY_S
    file.add(event(1))
    assert len(read(tmp_path)) == 3
    file.add(event(2), at_once=True)
    assert len(read(tmp_path)) == 4
