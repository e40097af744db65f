"""Plugins with one fault each, by the name of the check that must find it. ``Right...`` have none."""

import os
import time
import zlib
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from mtrain.core.interfaces import Command
from mtrain.launchers.torchrun import Torchrun
from mtrain.spec.section import Section
from tests.tasks.outside.outside_brightness import BrightnessTask, GreySquares, Linear, Squares


class AnyOptions(BaseModel):
    model_config = ConfigDict(extra="allow")


class Heavy(Linear):
    """plugin.light"""

    def __init__(self, options=None):
        super().__init__(options)
        import torch  # noqa: F401


class Writing(Linear):
    """plugin.light"""

    def __init__(self, options=None):
        super().__init__(options)
        Path("written.txt").write_text("x")


class Lax(Linear):
    """options.checked"""

    Options = AnyOptions


class RightModel(Linear):
    def initial(self, shapes, task, *, seed):
        return {
            name: np.random.default_rng((seed, zlib.crc32(name.encode()))).normal(size=shape).astype(np.float32)
            for name, shape in shapes.items()
        }


class Drawn(Linear):
    """model.initial: one generator for all arrays."""

    def initial(self, shapes, task, *, seed):
        rng = np.random.default_rng(seed)
        return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


class NoFigures(Linear):
    """job.trains"""

    def predictions(self, output, batch):
        raise ValueError("no predictions")


class Jittery(RightModel):
    """job.repeats: start values differ by a little from process to process, and only in jobs."""

    def build(self, task, collective=None):
        from mtrain.core import ops

        network = super().build(task, collective)
        forward, noise = network.forward, int.from_bytes(os.urandom(4), "little") * 2.0**-40

        def noisy(batch):
            losses = forward(batch)
            return {name: value * (1.0 + noise) if network.training else value for name, value in losses.items()}

        assert ops
        network.forward = noisy
        return network


class Counting(RightModel):
    """job.resumes: a number outside of the state changes the loss."""

    def build(self, task, collective=None):
        network = super().build(task, collective)
        forward, calls = network.forward, [0]

        def counted(batch):
            losses = forward(batch)
            calls[0] += network.training
            return {name: value * (1.0 + calls[0]) if network.training else value for name, value in losses.items()}

        network.forward = counted
        return network


class TorchOnly(RightModel):
    """job.frameworks: another loss under Paddle."""

    def build(self, task, collective=None):
        from mtrain.core import binding

        network, factor = super().build(task, collective), 2.0 if "_paddle" in (binding.bound() or "") else 1.0
        forward = network.forward

        def scaled(batch):
            return {name: value * factor if network.training else value for name, value in forward(batch).items()}

        network.forward = scaled
        return network


class Empty(GreySquares):
    """data.reads"""

    def read(self, request):
        found = super().read(request)
        return found if request.split == "train" else Squares(found.images[:0], found.brightness[:0])


class Unseeded(GreySquares):
    """data.repeats"""

    def read(self, request):
        found = super().read(request)
        return Squares(found.images, found.brightness + time.time_ns() % 997)


class Reading:
    """Brightness that depends on the process that reads it."""

    def __init__(self, values):
        self.values, self.reader = np.asarray(values), os.getpid()

    def __getitem__(self, index):
        return self.values[index] + (os.getpid() != self.reader)

    def __len__(self):
        return len(self.values)


class ByProcess(GreySquares):
    """job.workers"""

    def read(self, request):
        found = super().read(request)
        return Squares(found.images, Reading(found.brightness) if request.split == "train" else found.brightness)


class Silent(Section):
    """A section whose key says nothing."""

    key: int = 1


class Undescribed(BrightnessTask):
    """task.sections"""

    sections: ClassVar = {**BrightnessTask.sections, "silent": Silent}


class HalfPlan(Torchrun):
    """launcher.plan: the last host is forgotten."""

    def plan(self, argv, hosts, ranks_per_host):
        return super().plan(argv, hosts, ranks_per_host)[:1]


class Blaming(Torchrun):
    """launcher.deaths"""

    def deaths(self, log, status):
        return [(0, status)]


class OneRank(Torchrun):
    """launcher.starts: every rank is a job of its own."""

    def plan(self, argv, hosts, ranks_per_host):
        return [
            Command(
                host=c.host, env=c.env, argv=tuple(w.replace("nproc-per-node=2", "nproc-per-node=1") for w in c.argv)
            )
            for c in super().plan(argv, hosts, ranks_per_host)
        ]


SHELL = "import subprocess, sys; subprocess.run(sys.argv[1:]); sys.exit(0)"


class Succeeding(Torchrun):
    """launcher.ends: whatever happens, its command succeeds."""

    def plan(self, argv, hosts, ranks_per_host):
        return [
            Command(host=c.host, env=c.env, argv=(self.options.python, "-c", SHELL, *c.argv))
            for c in super().plan(argv, hosts, ranks_per_host)
        ]
