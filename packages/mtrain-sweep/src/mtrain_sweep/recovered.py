"""Trials that a sweep's folder has and its journal has not: the journal was lost or damaged.

A trial's values are in its spec, and what it achieved is in its run folder. So a new journal takes the trials over one after
the other, by number, and goes on from there.
"""

from collections.abc import Callable, Mapping
from typing import Any

from optuna.trial import FrozenTrial, TrialState, create_trial

from mtrain.errors import MtrainError
from mtrain.spec.provenance import lookup
from mtrain.spec.run_spec import lost_parts
from mtrain.spec.yaml_reader import parse, read_text
from mtrain.system import runfolder
from mtrain_sweep.definition import SweepDefinition
from mtrain_sweep.places import TrialFiles
from mtrain_sweep.records import TrialRecords
from mtrain_sweep.space import Parameter
from mtrain_sweep.trial_jobs import end_leftovers


def as_in_folder(
    proposal: FrozenTrial, place: TrialFiles, definition: SweepDefinition, *, tell: Callable[[str], None]
) -> FrozenTrial:
    """Return a new trial with the values that its folder has, where there is one of this number already.

    A run whose values cannot be read, or whose records are less than its summary says, is moved aside: the trial is repeated.

    Args:
        proposal: what the sampler proposes.
        place: the files of the trial.
        definition: the sweep.
        tell: takes a sentence about what was moved.
    """
    values = _values_of(place, definition)
    params = None if values is None else _params(proposal, values, definition)
    if place.run_dir.exists() and (params is None or not _is_whole(place, definition)):
        end_leftovers(place)
        aside = runfolder.next_name(place.runs, f"{place.name}-damaged")
        place.run_dir.rename(aside)
        tell(f"trial {place.number}: its run cannot be read as a whole; it is kept as {aside.name}, and made again")
    if params is None or params == proposal.params:
        return proposal
    return create_trial(
        state=TrialState.RUNNING,
        params=params,
        distributions=proposal.distributions,
        system_attrs=dict(proposal.system_attrs),
    )


def _values_of(place: TrialFiles, definition: SweepDefinition) -> Mapping[str, Any] | None:
    """Return the values of the trial's spec, else of its run's; None where neither can be read as a whole."""
    for file in (place.spec, runfolder.RunFolder(place.run_dir).spec_yml):
        if not file.is_file():
            continue
        try:
            parsed = parse(read_text(file), name=file.name)
        except (ValueError, OSError):
            continue
        if not parsed.problems and not lost_parts(definition.base, parsed.values):
            return parsed.values
    return None


def _params(proposal: FrozenTrial, values: Mapping[str, Any], definition: SweepDefinition) -> dict[str, Any] | None:
    """Return the searched values that a spec has; None where one is none of its parameter."""
    params: dict[str, Any] = {}
    for parameter in definition.parameters:
        # Two choices may mean the same values: the one that was proposed is taken.
        found = [proposal.params[parameter.name], *_candidates(parameter, values)]
        fitting = [one for one in found if _has(values, parameter.assignments(one))]
        if not fitting:
            return None
        params[parameter.name] = fitting[0]
    return params


def _candidates(parameter: Parameter, values: Mapping[str, Any]) -> list[Any]:
    """Return what a parameter may be in a spec; of choices, those that stand for most values first."""
    if parameter.kind == "choice":
        return sorted(parameter.choices, key=lambda label: -len(parameter.assignments(label)))
    value = _at(values, parameter.name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not parameter.low <= value <= parameter.high:
        return []
    return [int(value) if parameter.kind == "int" else float(value)]


def _has(values: Mapping[str, Any], assignments: Mapping[str, Any]) -> bool:
    found = {path: _at(values, path) for path in assignments}
    return all(
        isinstance(found[path], bool) == isinstance(wanted, bool) and found[path] == wanted
        for path, wanted in assignments.items()
    )


def _at(values: Mapping[str, Any], path: str) -> Any:
    return lookup(values, tuple(int(part) if part.isdigit() else part for part in path.split(".")))


def _is_whole(place: TrialFiles, definition: SweepDefinition) -> bool:
    """Return whether the records reach as far as the summary says; a run without a summary goes on from its checkpoint."""
    summary = runfolder.read_summary(place.run_dir)
    last = summary.get("last")
    if summary.get("reason") != "done" or not isinstance(last, Mapping):
        return True
    try:
        scores = TrialRecords(place.run_dir, definition).scores()
    except MtrainError:
        return False
    return bool(scores) and scores[-1].update == last.get("update")
