"""The program that looks at one plugin in a process of its own: what it imports, writes, refuses and returns.

It prints one line of JSON: id of a check -> its measures, or the error that ended it. Started in an empty folder.
"""

import json
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mtrain.core.interfaces import Host, Launcher
from mtrain.core.plugin_classes import with_defaults
from mtrain.spec import config
from mtrain.spec.building import schema_of
from mtrain.spec.model import Spec
from mtrain.spec.resolved import Resolved
from mtrain.spec.schema import dot, field_at, walk
from mtrain_kit import plugin_checks as checks
from mtrain_kit.checks import Check, Measure, none_of

FRAMEWORKS = ("torch", "paddle", "tensorflow", "jax")
MARK = "mtrain-probe: "
UNKNOWN = "no_such_option_of_any_plugin"
SAMPLES = 6
"""Samples of each split that are compared."""


def main(argv: Sequence[str]) -> int:
    """Probe plugin ``argv[1]`` of kind ``argv[0]`` for the spec in file ``argv[2]``; ``argv[3]``: a checkpoint, or empty."""
    kind, name, spec_file, weights = argv
    spec = config.read(spec_file)
    probe = _Probe(kind, name, spec, Path(weights) if weights else None)
    found: dict[str, Any] = {}
    for check, look in probe.looks().items():
        try:
            found[check.id] = {"measures": [asdict(measure) for measure in look()]}
        except BaseException as error:  # A plugin may raise anything, or call sys.exit.
            found[check.id] = {"error": f"{type(error).__name__}: {error}"}
    print(MARK + json.dumps(found))
    return 0


class _Probe:
    def __init__(self, kind: str, name: str, spec: Spec, weights: Path | None) -> None:
        self._kind, self._name, self._spec, self._weights = kind, name, spec, weights
        self._job = Resolved.of(spec)
        self._registry = self._job.registry

    def looks(self) -> dict[Check, Callable[[], list[Measure]]]:
        """Return the checks of this kind of plugin, in the order in which they must be made."""
        if self._weights is not None:
            return {checks.INITIAL: self._initial}
        common = {checks.LIGHT: self._light, checks.OPTIONS: self._refuses}
        own: dict[str, dict[Check, Callable[[], list[Measure]]]] = {
            "datasets": {checks.READS: self._reads, checks.REPEATS: self._repeats},
            "tasks": {checks.SECTIONS: self._sections, checks.SHOWS: self._shows, checks.REPEATS: self._repeats},
            "launchers": {checks.PLAN: self._plans, checks.DEATHS: self._deaths},
        }
        return {**common, **own.get(self._kind, {})}

    # ----------------------------------------------------------------------------------------------------- all kinds
    def _options(self) -> Mapping[str, Any]:
        section = {"models": self._spec.model, "datasets": self._spec.data, "launchers": self._spec.launcher}
        chosen = getattr(section.get(self._kind), "options", {})
        return {**chosen, **(_launch_facts() if self._kind == "launchers" else {})}

    def _make(self) -> Any:
        options = self._registry.options(self._kind, self._name, self._options(), path="options")
        target = self._registry.load(self._kind, self._name)
        if self._kind == "tasks":
            return target
        return self._registry.construct(self._kind, self._name, target, options)

    def _light(self) -> list[Measure]:
        before = _files()
        self._make()
        imported = [name for name in FRAMEWORKS if name in sys.modules]
        return [
            none_of("frameworks imported", imported),
            none_of("files written", sorted(_files() - before)),
        ]

    def _refuses(self) -> list[Measure]:
        target = self._registry.load(self._kind, self._name)
        try:
            target.Options.model_validate({**self._options(), UNKNOWN: 1})
        except ValidationError:
            return [none_of("unknown options that are accepted", [])]
        return [none_of("unknown options that are accepted", [UNKNOWN])]

    # ------------------------------------------------------------------------------------------------------ data sets
    def _splits(self) -> Any:
        from mtrain.tasks.datasets import open_data

        return open_data(self._spec.data, registry=self._registry)

    def _reads(self) -> list[Measure]:
        opened = self._splits()
        splits = {name: getattr(opened, name) for name in ("train", "val")}
        empty = [name for name, split in splits.items() if not len(split)]
        names = [tuple(split.class_names) for split in splits.values()]
        differing = [] if names[0] == names[1] else [f"{names[0]} and {names[1]}"]
        beyond = [f"{label} in {name}" for name, split in splits.items() for label in _labels_beyond(split)]
        return [
            none_of("empty splits", empty),
            none_of("class names that differ between the splits", differing),
            none_of("labels for which there is no class name", beyond),
        ]

    def _repeats(self) -> list[Measure]:
        """Read samples forwards, then backwards from a data set that is opened again; compare them."""
        forwards, backwards = self._samples(reverse=False), self._samples(reverse=True)
        return [none_of("arrays that differ when they are read in another order", _differing(forwards, backwards))]

    def _samples(self, *, reverse: bool) -> dict[str, Any]:
        import numpy as np

        from mtrain.rank.spec.assembly import open_task

        arrays: dict[str, Any] = {}
        for split, source in open_task(self._job).sources().items():
            places = [(epoch, index) for epoch in (0, 1) for index in range(min(SAMPLES, len(source)))]
            for epoch, index in reversed(places) if reverse else places:
                batch: dict[str, Any] = {}
                if hasattr(source, "array"):
                    out = np.zeros(source.shape(epoch, 0), source.array.dtype)
                    rest = source.fill(epoch, index, out, update=0)
                    batch = {source.array.name: out}
                else:
                    rest = source.sample(epoch, index)
                pickle.dumps(rest)  # as a worker process does, to send it
                batch |= source.collate([rest])
                arrays |= {f"{split} {index}, epoch {epoch}: {name}": array for name, array in batch.items()}
        return arrays

    # ----------------------------------------------------------------------------------------------------------- tasks
    def _sections(self) -> list[Measure]:
        schema = schema_of(self._name, registry=self._registry)
        added = [(path, found) for path, found in walk(schema) if field_at(Spec, path) is None]
        silent = [dot(path) for path, found in added if not found.description]
        return [none_of("keys without a description", silent)]

    def _shows(self) -> list[Measure]:
        from mtrain.rank.spec.assembly import open_task

        data = open_task(self._job)
        texts = [data.verify(), *data.report()]
        wrong = [repr(text) for text in texts if not isinstance(text, str) or not text]
        json.dumps(data.labels())
        list(data.describe())
        views = [(name, image) for name, _, image in data.views(limit=2)]
        odd = [name for name, image in views if image.dtype != "uint8" or image.ndim != 3 or image.shape[2] != 3]
        return [
            none_of("sentences that are no text", wrong),
            none_of("views that are no image uint8 (H, W, 3)", odd),
        ]

    # ---------------------------------------------------------------------------------------------------------- models
    def _initial(self) -> list[Measure]:
        import numpy as np

        from mtrain.core.checkpoint import store
        from mtrain.rank.spec.assembly import open_task

        assert self._weights is not None
        data = open_task(self._job)
        plugin = self._job.model
        task = plugin.prepare_task(data.task(), data.statistics())
        shapes = {name: tuple(array.shape) for name, array in store.load(self._weights).state.weights.items()}
        first = plugin.initial(shapes, task, seed=3)
        again = self._job.with_spec(self._spec).model.initial(dict(reversed(shapes.items())), task, seed=3)
        # Layer by layer: the bound of a bias may follow from the shape of the weight beside it.
        layers = {name.rpartition(".")[0] for name in shapes}
        alone: dict[str, Any] = {}
        for layer in layers:
            own = {name: shape for name, shape in shapes.items() if name.rpartition(".")[0] == layer}
            alone |= plugin.initial(own, task, seed=3)
        wrong = [name for name, shape in shapes.items() if name not in first or np.shape(first[name]) != shape]
        infinite = [name for name, array in first.items() if not np.isfinite(array).all()]
        return [
            none_of("arrays that are missing or have another shape", wrong),
            none_of("arrays with values that are not finite", infinite),
            none_of("arrays that differ a second time, in another order", _differing(first, again)),
            none_of("arrays that depend on other layers", _differing(first, alone)),
        ]

    # ------------------------------------------------------------------------------------------------------- launchers
    def _plans(self) -> list[Measure]:
        argv = ("-m", "mtrain.rank.worker", "--run-dir", str(Path.cwd() / "run"))
        hosts = [Host(address="127.0.0.1", slots=2), Host(address="127.0.0.2", slots=2)]
        if "none" in self._launcher().provides:
            hosts = [Host(address="127.0.0.1", slots=1)]
        before = _files()
        first = self._launcher().plan(argv, hosts, hosts[0].slots)
        again = self._launcher().plan(argv, hosts, hosts[0].slots)
        wrong_hosts = [] if [c.host for c in first] == [h.address for h in hosts] else [str([c.host for c in first])]
        lost = [command.host for command in first if not _holds(command.argv, argv)]
        others = [repr(item) for c in first for item in (*c.argv, *c.env, *c.env.values()) if not isinstance(item, str)]
        changed = [one.host for one, other in zip(first, again, strict=False) if one != other]
        return [
            none_of("hosts without their command", wrong_hosts),
            none_of("commands that do not run the arguments of a rank", lost),
            none_of("words and variables that are no text", others),
            none_of("commands that differ a second time", changed),
            none_of("files written", sorted(_files() - before)),
        ]

    def _launcher(self) -> Any:
        target = with_defaults(self._registry.load("launchers", self._name), Launcher)
        options = self._registry.options("launchers", self._name, self._options(), path="options")
        return self._registry.construct("launchers", self._name, target, options)

    def _deaths(self) -> list[Measure]:
        launcher = self._launcher()
        blamed = [str(entry) for entry in launcher.deaths("done\n", 0)]
        told = list(launcher.deaths("no line that a launcher writes\n", 1))
        wrong = [repr(entry) for entry in told if not _is_death(entry)]
        return [
            none_of("ranks blamed for a success", blamed),
            none_of("entries that are no pair of a rank and a status", wrong),
        ]


def _launch_facts() -> dict[str, Any]:
    return {
        "python": sys.executable,
        "master_addr": "127.0.0.1",
        "master_port": 29500,
        "start_port": None,
        "threads": 1,
        "devices": None,
        "interface": None,
    }


def _labels_beyond(split: Any) -> list[int]:
    """Return the labels of a split, where it has an array of them, that are no index of ``class_names``."""
    labels: Any = getattr(split, "labels", None)
    if labels is None or getattr(getattr(labels, "dtype", None), "kind", "") not in ("i", "u"):
        return []
    return sorted({int(label) for label in labels if not 0 <= label < len(split.class_names)})


def _is_death(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and all(isinstance(number, int) for number in entry)


def _holds(words: Sequence[str], part: Sequence[str]) -> bool:
    """Return whether ``part`` occurs in ``words`` as it is, word by word or in one word of a shell."""
    size = len(part)
    whole = any(tuple(words[i : i + size]) == tuple(part) for i in range(len(words) - size + 1))
    return whole or any(all(word in text for word in part) for text in words)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    from mtrain_kit.training import differing_names

    return differing_names(one, other)


def _files() -> set[str]:
    """Return the files of this folder and of the folder for temporary files, which the kit has made for this process."""
    folders = (Path.cwd(), Path(tempfile.gettempdir()))
    found = {str(path) for folder in folders for path in folder.rglob("*") if path.is_file()}
    return {path for path in found if f"{os.sep}__pycache__{os.sep}" not in path}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
