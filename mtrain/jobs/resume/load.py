"""The spec of a resumed run: what was chosen for the run stays, unless it is typed anew.

A run folder says which values somebody chose for the run: typed flags and ``-o``, variables of the environment and, for a
user's script, the values of its spec. They are laid over the spec that is read now, below what is typed now. What then
differs from the run is told.

The hosts, and this machine's place, addresses and ports are facts of one start, and are found anew: a run folder on a shared
disk may be resumed on another host, or in another allocation of a scheduler.
"""

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.errors import CheckpointError, UsageError
from mtrain.jobs import place
from mtrain.jobs.hosts import allocation
from mtrain.jobs.plan.host_ranks import TYPED
from mtrain.jobs.resume import compare, find
from mtrain.jobs.resume.choices import HOSTS, NOT_TAKEN, OF_START, PLACE, Chosen, read, value_at
from mtrain.spec.addresses import is_address
from mtrain.spec.config import RunSpec, RunValues
from mtrain.spec.hostnames import few
from mtrain.spec.model import ClusterSpec
from mtrain.spec.resolved import AUTO
from mtrain.spec.schema import leaves
from mtrain.spec.yaml_reader import flow
from mtrain.system import environment, placement, runfolder

if TYPE_CHECKING:
    from mtrain.spec.config import Loaded, Source


def find_spec(config: "Source", resume: str | None) -> "Source":
    """Return the spec to read: ``config``, or the resumed run's own where ``--resume PATH`` is given without ``-c``."""
    if config is not None or resume in (None, find.AUTO, find.IF_ANY):
        return config
    if is_address(str(resume)):
        from mtrain.jobs.resume import fetch

        return RunSpec(fetch.spec_at(str(resume)))
    path = find.near(Path(str(resume)), "spec.yml")
    return None if path is None else RunSpec(path)


def load_spec(
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
    if resume in (find.AUTO, find.IF_ANY):
        first = read_spec(None)
        folder = _named_run(first, resume)
    else:
        spec = find.near(Path(str(find_spec(None, resume)) if is_address(resume) else resume), "spec.json")
        folder = None if spec is None else spec.parent
    chosen = None if folder is None else read(folder)
    if chosen is None:
        return first or read_spec(None)
    shown = resume if is_address(resume) else str(chosen.folder)
    # Another start may be on other hosts, whose addresses and ports are not those of the run.
    stale = _stale_facts(chosen, is_queued=is_queued)
    if first is None and config is None and not chosen.is_of_script:  # the spec of the run is read, with all its values
        values, unknown = _defaults_of(stale), ""
    else:
        chosen, unknown = _with_unknown(chosen, read_spec, first=first, shown=shown)
        values = {path: value for path, value in chosen.chosen_values().items() if path not in (*stale, *PLACE)}
    # Below what is typed now and above the files, so that each choice of the run holds until somebody makes another.
    loaded = read_spec(RunValues(file=str(chosen.folder / "spec.yml"), values=values))
    _check_kind(loaded, chosen)
    if first is None:
        _check_name(loaded, resume)
    notes = [*([unknown] if unknown else []), *_check_hosts(loaded, stale, shown=shown, is_queued=is_queued)]
    return dataclasses.replace(loaded, notes=(*loaded.notes, *notes, *compare.list_notes(loaded, chosen, shown=shown)))


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
    return [f"{path}={flow(value_at(loaded.values, path))}" for path in changed if path not in (*NOT_TAKEN, *OF_START)]


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
    """Refuse to go on with a spec where the run was made by a script, and the other way round."""
    if (loaded.script is not None) == chosen.is_of_script:
        return
    maker, line = "mtrain train, not by a script", f"mtrain train --resume {chosen.folder}"
    if chosen.is_of_script:
        script = chosen.script or "SCRIPT.py"
        maker, line = f"the script {script}", f"mtrain run --resume {chosen.folder} {script}"
    raise UsageError(f"--resume {chosen.folder}: this run was made by {maker}; go on with {line}")


def _check_name(loaded: "Loaded", resume: str) -> None:
    """Refuse a typed name that is not the one of the run: its later checkpoints would be trained over unasked."""
    name = loaded.spec.report.name
    if not name or loaded.origin("report.name").kind not in TYPED:
        return
    run = find.run_of(Path(resume) if is_address(resume) else Path(resume).resolve())
    if not runfolder.is_numbered(run.name, name):
        copied = shlex.join(["cp", "-r", str(run), str(run.parent / name)])
        another = f", or, for another run that begins there, copy it ({copied}) and resume the copy"
        raise UsageError(
            f"--resume {resume} and --name {name}: the run {run.name} goes on in its own folder; leave --name out"
            f"{'' if is_address(resume) else another}"
        )


def _named_run(loaded: "Loaded", resume: str) -> Path | None:
    """Return the folder of the run that ``auto`` or ``if-any`` means; None if there is none yet."""
    base, name = Path(loaded.spec.report.dir), place.run_name_for(loaded, resume=resume)
    try:
        return find.find_resume(None if resume == find.AUTO else resume, base=base, name=name).run
    except CheckpointError:
        return None  # copies may be fetched later, or the job is refused then


def _stale_facts(chosen: Chosen, *, is_queued: bool = False) -> dict[str, Any]:
    """Return what the run says about the hosts of its start and does not hold for another one: dotted path -> value.

    Hosts hold where this machine is one of them, and where the cluster reaches them from any machine. ``is_queued``: a
    scheduler will choose the hosts.
    """
    paths = [*PLACE, *(() if not is_queued and _keeps_hosts(chosen) else HOSTS)]
    if "cluster.name" in chosen.found:
        paths.append("cluster.name")
    defaults = _defaults_of(paths)
    values = {path: value_at(chosen.values, path) for path in paths}
    return {path: value for path, value in values.items() if value not in (None, defaults[path])}


def _defaults_of(paths: Iterable[str]) -> dict[str, Any]:
    """Return the default of each path of the section ``cluster``."""
    section = {"cluster": ClusterSpec().model_dump(mode="json")}
    return {path: value_at(section, path) for path in paths}


def _check_hosts(loaded: "Loaded", stale: Mapping[str, Any], *, shown: str, is_queued: bool = False) -> list[str]:
    """Return a sentence on facts that somebody typed for the run, that are not taken along, and that nothing replaces.

    Raises:
        UsageError: the run was on several hosts, this machine is none of them, and nobody says which hosts there are now.
    """
    ips = stale.get("cluster.ips") or []
    if len(ips) > 1 and not _says_hosts(loaded):
        raise UsageError(
            f"--resume {shown}: the run was on the hosts {few(ips)}, and this machine is none of them; name the hosts of "
            "now with --ips A,B, or go on with this one alone: --nnodes 1"
        )
    now = loaded.values
    left = {
        key: old for key, old in stale.items() if value_at(now, key) != old and loaded.origin(key).kind not in TYPED
    }
    if not left:
        return []
    named = ", ".join(f"{path} {flow(value)}" for path, value in left.items())
    # Where a scheduler chooses the hosts, nobody types them.
    is_chosen = is_queued or _is_allocated(loaded)
    remedy = "they are found anew" if is_chosen else "type those that hold here"
    return [f"not taken from the run {shown}, as facts of its start: {named}; {remedy}"]


def _keeps_hosts(chosen: Chosen) -> bool:
    ips = value_at(chosen.values, "cluster.ips") or []
    if "cluster.ips" in chosen.found:
        return False
    return value_at(chosen.values, "cluster.name") != AUTO or any(placement.is_here(str(host)) for host in ips)


def _says_hosts(loaded: "Loaded") -> bool:
    cluster = loaded.spec.cluster
    if cluster.ips or cluster.name != AUTO or (cluster.nodes == 1 and loaded.origin("cluster.nodes").kind in TYPED):
        return True
    return _is_allocated(loaded)


def _is_allocated(loaded: "Loaded") -> bool:
    """Return whether this process is one of an allocation, whose scheduler has chosen the hosts."""
    return allocation.recognise(environment.caller(), registry=loaded.registry) is not None
