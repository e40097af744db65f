"""The rows of a plan: values that follow from the spec, each with the calculation that leads to it."""

import shlex
from typing import Any

from mtrain.core.interfaces import Recipe
from mtrain.core.update.recipe import rounds, scaling
from mtrain.core.update.schedule import HAVE_MOMENTUM
from mtrain.jobs.plan import elastic
from mtrain.jobs.plan.machine import Machine
from mtrain.jobs.plan.team import Team
from mtrain.spec.config import Loaded
from mtrain.spec.hostnames import few
from mtrain.spec.model import Spec
from mtrain.system import placement


def rows_of(loaded: Loaded, team: Team, recipe: Recipe, *, threads: int) -> dict[str, Any]:
    """Return the rows of a plan that follow from the spec and the number of ranks, in the order of printing."""
    if loaded.script is None:
        rows = _rows_of_recipe(team, recipe, threads=threads)
    else:
        rows = _rows_of_script(loaded, team, threads=threads)
    return rows | {"devices": team.devices.words()} | _batchnorm_row(recipe, team)


def names_to_come(team: Team, machine: Machine) -> dict[str, str]:
    """Return a remark on hosts whose names the commands still hold, though the launcher takes addresses."""
    if team.launcher_class.takes_names:
        return {}
    hosts = team.as_launcher_takes(team.hosts, machine)
    names = [host.address for host in hosts if not placement.is_address(host.address)]
    if not names:
        return {}
    return {"names": f"{team.launcher_name} takes addresses: {few(names)} become theirs when hosts are asked"}


def _rows_of_script(loaded: Loaded, team: Team, *, threads: int) -> dict[str, Any]:
    """Return the values of a script's job that are known before the script runs."""
    assert loaded.script is not None
    hosts = team.hosts
    slots = [host.slots for host in hosts]
    each = f" x {slots[0]}" if len(set(slots)) == 1 else ": " + " + ".join(map(str, slots))
    return {
        "script": " ".join([str(loaded.script.path), *map(shlex.quote, loaded.script.arguments)]),
        "ranks": f"{sum(slots)} ({len(hosts)} host{'s' if len(hosts) > 1 else ''}{each})",
        "precision": _precision(loaded.spec, team),
        "set_outside": ", ".join(loaded.script.outside_paths)
        or "nothing: optimizer, schedule and batch are the script's",
        "threads": f"{threads} per rank",
    }


def _precision(spec: Spec, team: Team) -> str:
    """Return the precision in words; where GPUs compute, only the ranks learn whether they are fast with bf16."""
    if spec.train.precision != "auto":
        return spec.train.precision
    if team.devices.on_cpu:
        return "fp32 (auto: ranks compute on the CPU, which is no faster with bf16)"
    return "auto: bf16 if the devices of all ranks are faster with it, else fp32; the ranks say which when they start"


def _warmup(spec: Spec) -> str:
    """Return how long the warm-up lasts and what it changes, in words."""
    warmup, momentum = spec.schedule.warmup, f"{spec.optimizer.momentum:g}"
    name = "momentum" if spec.optimizer.rule in HAVE_MOMENTUM else "beta1"
    kept = f"; {name} {momentum}"
    if warmup is None or not (warmup.epochs or warmup.updates):
        return f"none{kept}"
    by_epochs = f"{warmup.epochs:g} x updates_per_epoch" if warmup.epochs else ""
    lengths = [text for text in (by_epochs, str(warmup.updates or "")) if text]
    length = f"max({', '.join(lengths)})" if len(lengths) > 1 else lengths[0]
    if name == "momentum" and warmup.momentum_from is not None:
        kept = f"; momentum from {warmup.momentum_from:g} to {momentum}"
    return f"{length} updates, learning rate from {warmup.learning_rate_from:g}{kept}"


def _batchnorm_row(recipe: Recipe, team: Team) -> dict[str, str]:
    """Say whose layers take the statistics of BatchNorm over ranks, where some do."""
    if not recipe.sync_batchnorm or team.size == 1:
        return {}
    own = f"mtrain's own layers, over {team.size} ranks"
    of_torch = not team.devices.on_cpu and team.backend.framework == "torch"
    return {"sync BatchNorm": f"{own}; torch's own ones on CUDA, over torch's process group" if of_torch else own}


def _largest_micro_batch(spec: Spec) -> dict[str, str]:
    """Return a remark on a micro batch that is not decided yet."""
    if spec.train.max_micro_batch != "auto":
        return {}
    return {"max_micro_batch": "auto: measured when the run starts, so there may be more micro batches than above"}


def _shares(recipe: Recipe, size: int) -> str:
    """Return into how many parts each micro batch of the job is divided, in words."""
    if recipe.shards in (None, recipe.data_size(size)) and recipe.mesh is not None and recipe.mesh.data_size < size:
        groups, kind = recipe.mesh.data_size, "tensor group" if recipe.mesh.pipeline == 1 else "pipeline"
        return f"{groups} {kind}{'s' if groups > 1 else ''}"
    return f"{size} ranks" if recipe.shards in (None, size) else f"{recipe.shards} shards"


def _elastic_numbers(spec: Spec, recipe: Recipe, *, size: int) -> dict[str, Any]:
    """Return what is different in an elastic job, or where ranks compute several shards."""
    said: dict[str, Any] = {}
    if elastic.is_elastic(spec):
        said["elastic"] = f"goes on with {spec.cluster.min_nodes} of its hosts; threads and shards stay"
    if recipe.shards not in (None, recipe.data_size(size)):
        passes = recipe.accumulate // rounds(recipe, size=size)
        said["shards"] = (
            f"{recipe.shards} among {size} ranks: {passes} passes of each rank for a micro batch of the job"
        )
    return said


def _rows_of_recipe(team: Team, recipe: Recipe, *, threads: int) -> dict[str, Any]:
    """Return the values that follow from the spec and the number of ranks, with the calculation that leads to each."""
    spec, hosts = team.spec, team.hosts
    slots = [host.slots for host in hosts]
    size, train, factors = sum(slots), spec.train, scaling(spec)
    each = f" x {slots[0]}" if len(set(slots)) == 1 else ": " + " + ".join(map(str, slots))
    decays = sorted({group[1].get("weight_decay", 0.0) for group in recipe.groups}, reverse=True)
    return {
        "ranks": f"{size} ({len(hosts)} host{'s' if len(hosts) > 1 else ''}{each})",
        "global_batch": f"{train.batch_size} = {_shares(recipe, size)} x {recipe.micro_batch} (micro batch)"
        f" x {rounds(recipe, size=size)} (accumulate)",
        **_largest_micro_batch(spec),
        **_elastic_numbers(spec, recipe, size=size),
        "precision": _precision(spec, team),
        "learning_rate": f"{spec.optimizer.learning_rate * factors.learning_rate:.6g}"
        f" ({train.learning_rate_scaling}: {spec.optimizer.learning_rate:g} x {factors.learning_rate:.6g})",
        "weight_decay": ", ".join(f"{decay:.6g}" for decay in decays)
        + f" ({train.learning_rate_scaling}: x {factors.weight_decay:.6g})",
        "schedule": f"{spec.schedule.name}, final factor {spec.schedule.final_factor:g}",
        "warmup": _warmup(spec),
        "length": f"{train.updates} updates" if train.updates else f"{train.epochs} epochs",
        "updates_per_epoch": f"samples // {train.batch_size}; samples are counted at the start",
        "threads": f"{threads} per rank",
    }
