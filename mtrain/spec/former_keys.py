"""Former keys of a spec, which keep their meaning beside the keys that have replaced them.

| former key | the key now |
|---|---|
| ``cluster.launcher`` | ``cluster.name`` for a cluster such as ``ssh``, ``launcher.name`` for a launcher such as ``torchrun`` |
| ``cluster.ssh.*`` | ``cluster.options.*`` of the cluster ``ssh`` |

If both a former key and the key now are set, the stronger source counts; two values from the same source are an error.
"""

from collections.abc import Sequence
from typing import Any

from mtrain.spec import plugins
from mtrain.spec.model import Spec, SshSpec
from mtrain.spec.schema import dotted
from mtrain.spec.sources import Sources
from mtrain.spec.yaml_reader import Path

LAUNCHER: Path = ("cluster", "launcher")
AUTO = "auto"
SSH = "ssh"
"""The cluster whose options are also in the section ``cluster.ssh``."""


def settle(sources: Sources, policy: plugins.Policy) -> None:
    """Move the value of ``cluster.launcher`` to the key now, and of each option of ssh keep the stronger value."""
    _settle_launcher(sources, policy)
    if sources.layers.get(("cluster", "name")) == SSH:
        for key, field in SshSpec.model_fields.items():
            _settle_option(sources, ("cluster", "ssh", key), ("cluster", "options", key), default=field.default)


def cluster_options(spec: Spec) -> dict[str, Any]:
    """Return the options of the cluster, for ``ssh`` with those that the section ``cluster.ssh`` sets."""
    former = spec.cluster.ssh.model_dump(exclude_defaults=True) if spec.cluster.name == SSH else {}
    return {**former, **spec.cluster.options}


def sets_option(sources: Sources, path: Path) -> bool:
    """Return whether a former key sets the option at ``path``."""
    return (
        path[:2] == ("cluster", "options")
        and sources.layers.get(("cluster", "name")) == SSH
        and sources.layers.is_set(("cluster", "ssh", *path[2:]))
    )


def keys_now(name: str, policy: plugins.Policy) -> Sequence[Path]:
    """Return the keys that ``name``, as value of ``cluster.launcher``, stands for; empty for an unknown name."""
    kinds = {("cluster", "name"): "clusters", ("launcher", "name"): "launchers"}
    return [
        path
        for path, kind in kinds.items()
        if name == AUTO or name in {entry.name for entry in plugins.names(kind, policy=policy)}
    ]


def _settle_launcher(sources: Sources, policy: plugins.Policy) -> None:
    layers = sources.layers
    name = layers.get(LAUNCHER)
    targets = keys_now(name, policy) if isinstance(name, str) else ()
    if len(targets) > 1 and name != AUTO:
        sources.problems.append(
            f"{layers.origin(LAUNCHER)} cluster.launcher: {name!r} is a cluster and a launcher; "
            "write cluster.name or launcher.name"
        )
    if not targets:
        return  # validation reports it
    for target in targets:
        if _is_stronger(sources, LAUNCHER, target, neutral=name == AUTO):
            layers.history.setdefault(target, []).extend(layers.history.get(LAUNCHER, ()))
            layers.assign(target, name, layers.origin(LAUNCHER), sources.defaults)
    layers.drop(LAUNCHER)


def _settle_option(sources: Sources, former: Path, now: Path, *, default: Any) -> None:
    layers = sources.layers
    if not layers.is_set(former) or not layers.is_set(now):
        return
    if _is_stronger(sources, former, now, neutral=layers.get(former) == default):
        layers.drop(now)
    else:
        layers.drop(former)


def _is_stronger(sources: Sources, former: Path, now: Path, *, neutral: bool) -> bool:
    """Return whether the value at ``former`` replaces the one at ``now``.

    ``neutral``: the former value is the default. It then yields to a value from the same source, because a spec that
    mtrain has written contains all keys.
    """
    layers = sources.layers
    if not layers.is_set(now) or layers.number(former) != layers.number(now):
        return not layers.is_set(now) or layers.number(former) > layers.number(now)
    if not neutral and layers.get(former) != layers.get(now):
        sources.problems.append(
            f"{layers.origin(former)} {dotted(former)}: given {layers.get(former)!r}, but {dotted(now)} is "
            f"{layers.get(now)!r} ({layers.origin(now)}); keep one of them, {dotted(now)} is the name now"
        )
    return False
