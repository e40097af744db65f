"""The spec of a resumed run: what was chosen for the run stays, unless it is typed anew.

A run folder says which values somebody chose for the run: typed flags and ``-o``, variables of the environment and, for a
user's script, the values of its spec. They are laid over the spec that is read now, below what is typed now. What then
differs from the run is told.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.errors import CheckpointError, UsageError
from mtrain.jobs import resumed_hosts, start
from mtrain.jobs.choices import (
    HOSTS,
    NOT_TAKEN,
    PLACE,
    Chosen,
    chosen_paths,
    digest_of,
    digest_of_words,
    read,
    value_at,
)
from mtrain.jobs.host_ranks import TYPED
from mtrain.spec.addresses import is_address
from mtrain.spec.config import RunValues
from mtrain.spec.schema import leaves
from mtrain.spec.yaml_reader import flow
from mtrain.system import resuming, runfolder

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, ScriptCall, Source

NOT_TOLD = ("report.", "checkpoint.", "cluster.", "launcher.", "plugins")
"""Beginnings of paths whose changes do not matter for what the job learns."""
TOLD_TOO = ("cluster.nproc_per_node",)
MOST_TOLD = 12
"""Largest number of changed values that are named."""


def load(
    read_spec: "Callable[[RunValues | None], Loaded]",
    *,
    resume: str | None,
    config: "Source",
    is_queued: bool = False,
) -> "Loaded":
    """Return the spec of a job that goes on from ``resume``, with the choices of the run and notes on what differs.

    Args:
        read_spec: reads the spec, with the given values of a run below those that are typed.
        resume: as it was typed; None: a new run, to which nothing is added.
        config: the spec file that was typed; None: the spec of the run is read, which has all its values.
        is_queued: the job is given to a scheduler, which chooses its hosts.

    Raises:
        CheckpointError: the run's files cannot be read.
        UsageError: the run is one of a script, and no script is given, or the other way round; or another name is typed.
    """
    if resume is None:
        return read_spec(None)
    first = None
    if resume in (start.AUTO, resuming.IF_ANY):
        first = read_spec(None)
        folder = _named_run(first, resume)
    else:
        folder = _folder_of(
            Path(str(start.resumed_config(None, resume))).parent if is_address(resume) else Path(resume)
        )
    chosen = None if folder is None else read(folder)
    if chosen is None:
        return first or read_spec(None)
    shown = resume if is_address(resume) else str(chosen.folder)
    stale = resumed_hosts.stale_facts(chosen, is_queued=is_queued)
    if first is None and config is None and not chosen.is_of_script:  # the spec of the run is read, with all its values
        values, unknown = resumed_hosts.defaults_of(stale), ""
    else:
        chosen, unknown = _with_unknown(chosen, read_spec, first=first, shown=shown)
        values = {path: value for path, value in chosen.chosen_values().items() if not _is_of_start(path, stale)}
    loaded = read_spec(RunValues(file=str(chosen.folder / "spec.yml"), values=values))
    _check_kind(loaded, chosen)
    if first is None:
        _check_name(loaded, resume)
    notes = [*([unknown] if unknown else []), *resumed_hosts.check(loaded, stale, shown=shown, is_queued=is_queued)]
    return dataclasses.replace(loaded, notes=(*loaded.notes, *notes, *_notes(loaded, chosen, shown=shown)))


def typed_anew(loaded: "Loaded", folder: Path) -> list[str]:
    """Return ``PATH=VALUE`` for each value of a job that is not the one chosen for the run in ``folder``.

    A start of the job that reads ``loaded`` from a file would take the chosen values of the run instead.

    Raises:
        CheckpointError: a file of the folder cannot be read.
    """
    chosen = read(folder)
    if chosen is None:
        return []
    paths = chosen.paths
    if not chosen.is_known and chosen.is_of_script:
        paths = tuple(path for path, _ in leaves(chosen.values))
    changed = [path for path in paths if value_at(loaded.values, path) != value_at(chosen.values, path)]
    left_out = {*NOT_TAKEN, *(f"cluster.{key}" for key in (*PLACE, *HOSTS, "name"))}
    return [f"{path}={flow(value_at(loaded.values, path))}" for path in changed if path not in left_out]


def _is_of_start(path: str, stale: Mapping[str, Any]) -> bool:
    return path in stale or path in {f"cluster.{key}" for key in PLACE}


def _with_unknown(
    chosen: Chosen, read_spec: "Callable[[RunValues | None], Loaded]", *, first: "Loaded | None", shown: str
) -> "tuple[Chosen, str]":
    """Return what was chosen for the run, and a sentence if its folder does not say so.

    What a script's run has beyond the values that are read now was chosen for it: its script sets nothing in these files.
    Of other runs, somebody may have changed the spec file since.
    """
    if chosen.is_known:
        return chosen, ""
    missing = f"{shown} has no {runfolder.CHOSEN}: what was typed when it was started is unknown"
    now = first or read_spec(None)
    if now.script is None or not chosen.is_of_script:
        return chosen, f"{missing}; type it again where it differs"
    known = dict(leaves(now.values))
    paths = [path for path, value in leaves(chosen.values) if value != known.get(path)]
    taken = [f"{path} {flow(value_at(chosen.values, path))}" for path in paths if path not in NOT_TAKEN]
    what = ", ".join(taken) if taken else "nothing that differs"
    return dataclasses.replace(chosen, paths=tuple(paths)), f"{missing}; taken from its spec.json: {what}"


def _check_kind(loaded: "Loaded", chosen: Chosen) -> None:
    if loaded.script is None and chosen.is_of_script:
        script = chosen.script or "SCRIPT.py"
        raise UsageError(
            f"--resume {chosen.folder}: this run was made by the script {script}; go on with "
            f"mtrain run --resume {chosen.folder} {script}"
        )
    if loaded.script is not None and not chosen.is_of_script:
        raise UsageError(
            f"--resume {chosen.folder}: this run was made by mtrain train, not by a script; go on with "
            f"mtrain train --resume {chosen.folder}"
        )


def _check_name(loaded: "Loaded", resume: str) -> None:
    """Refuse a typed name that is not the one of the run: its later checkpoints would be trained over unasked."""
    from mtrain.core.checkpoint.store import is_checkpoint  # brings numpy with it

    name = loaded.spec.report.name
    if not name or loaded.origin("report.name").kind not in TYPED:
        return
    path = Path(resume) if is_address(resume) else Path(resume).resolve()
    run = path.parent if is_checkpoint(path) or path.name == "checkpoints" else path
    run = run.parent if run.name == "checkpoints" else run
    if not runfolder.is_numbered(run.name, name):
        copied = shlex.join(["cp", "-r", str(run), str(run.parent / name)])
        another = (
            ""
            if is_address(resume)
            else f", or, for another run that begins there, copy it ({copied}) and resume the copy"
        )
        raise UsageError(
            f"--resume {resume} and --name {name}: the run {run.name} goes on in its own folder; leave --name out{another}"
        )


def _named_run(loaded: "Loaded", resume: str) -> Path | None:
    """Return the folder of the run that ``auto`` or ``if-any`` means; None if there is none yet."""
    base, name = Path(loaded.spec.report.dir), start.run_name_for(loaded, resume=resume)
    try:
        return resuming.find_resume(None if resume == start.AUTO else resume, base=base, name=name).run
    except CheckpointError:
        return None  # copies may be fetched later, or the job is refused then


def _folder_of(path: Path) -> Path | None:
    folders = (path, path.parent, path.parent.parent)
    return next((folder for folder in folders if (folder / "spec.json").is_file()), None)


def _notes(loaded: "Loaded", chosen: Chosen, *, shown: str) -> list[str]:
    """Return a sentence on the values, and one on the files, that are not those of the run."""
    notes = []
    before, now = dict(leaves(chosen.values)), dict(leaves(loaded.values))
    paths = sorted(set(before) | set(now))
    if loaded.script is not None:  # the script sets the others
        paths = sorted({*chosen.paths, *chosen_paths(loaded)})
        before, now = ({path: value_at(values, path) for path in paths} for values in (chosen.values, loaded.values))
    changed = [path for path in paths if before.get(path) != now.get(path) and _matters(path)]
    if changed:
        named = [
            f"{path} {flow(before.get(path))} there, {flow(now.get(path))} here ({loaded.origin(path)})"
            for path in changed[:MOST_TOLD]
        ]
        more = f"; and {len(changed) - MOST_TOLD} more" if len(changed) > MOST_TOLD else ""
        notes.append(f"not as in the run {shown}: {'; '.join(named)}{more}")
    stale = [file for file, digest in chosen.files.items() if digest_of(Path(file)) not in (None, digest)]
    if stale:
        notes.append(f"changed since the run {shown} was started: {', '.join(stale)}")
    return notes if loaded.script is None else [*notes, *_script_notes(loaded.script, chosen, shown=shown)]


def _script_notes(script: "ScriptCall", chosen: Chosen, *, shown: str) -> Iterable[str]:
    """Yield a sentence on another script than that of the run, and one on other arguments."""
    if chosen.script not in (None, str(script.path)) and script.digest not in chosen.files.values():
        yield f"another script than that of the run {shown}: {chosen.script} there, {script.path} here"
    if chosen.arguments not in (None, digest_of_words(script.arguments)):
        yield f"the arguments of the script are not those of the run {shown}"


def _matters(path: str) -> bool:
    return path in TOLD_TOO or not path.startswith(NOT_TOLD)
