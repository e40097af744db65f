"""Write what a sweep has found into its folder: table and best spec."""

from collections.abc import Sequence
from pathlib import Path

from optuna.trial import FrozenTrial

from mtrain.errors import UsageError
from mtrain.spec.outputs import write_text
from mtrain.spec.yaml_reader import dump
from mtrain_sweep.definition import SweepDefinition
from mtrain_sweep.table import as_csv, best_trial, shown_params

TABLE, BEST = "trials.csv", "best.yml"


def write(folder: Path, definition: SweepDefinition, trials: Sequence[FrozenTrial]) -> None:
    """Write ``trials.csv``, and where a trial has reached its end ``best.yml``.

    Raises:
        UsageError: the folder cannot be written to.
    """
    try:
        write_text(folder / TABLE, as_csv(definition, trials))
        if (text := best_spec(definition, trials)) is not None:
            write_text(folder / BEST, text)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written to: {error.strerror or error}") from error


def best_spec(definition: SweepDefinition, trials: Sequence[FrozenTrial]) -> str | None:
    """Return the spec of the best trial as YAML that ``mtrain train -c`` runs; None where no trial has reached its end."""
    best = best_trial(definition, trials)
    if best is None:
        return None
    loaded = definition.trial_spec(best.params)
    head = f"# Trial {best.number}, the best of {len(trials)}: {definition.metric} {best.value!r}\n# {shown_params(best.params)}\n"
    return head + dump(loaded.values)
