"""Draw a sweep: each trial as a line over its values, and how much each value matters. matplotlib without a window system."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from optuna.trial import FrozenTrial, TrialState

from mtrain.records.plots import COLOURS, FAINT, INK
from mtrain.spec import outputs
from mtrain_sweep.definition import SweepDefinition
from mtrain_sweep.proposals import DIRECTIONS
from mtrain_sweep.space import Parameter
from mtrain_sweep.table import best_trial, show_cell

PARALLEL, IMPORTANCE = "parallel", "importance"
"""Names of the two plots, without suffix."""
SUFFIXES = ("png", "svg")
COLOUR_MAP = "viridis"
FEWEST_TRIALS = 4
"""Fewer finished trials say nothing about the importance of a value."""
# Optuna's default, 0.1, is one or two trials of a usual sweep: on a known function of which three of five values
# matter, it named the one that matters most in 11 of 24 sweeps of 8 to 40 trials, this share in 21.
BETTER = 0.5
"""Share of the trials that count as good for the importance."""
MOST_LABELS = 9
"""An axis with a step has a label at each value, unless there are more of them."""


def draw(folder: Path, definition: SweepDefinition, trials: Sequence[FrozenTrial]) -> list[Path]:
    """Draw the plots that the trials allow into ``folder``; return their files."""
    metrics = {PARALLEL: parallel(definition, trials), IMPORTANCE: importance(definition, trials)}
    files = []
    for name, figure in metrics.items():
        for suffix in SUFFIXES if figure is not None else ():
            assert figure is not None
            file = folder / f"{name}.{suffix}"
            with warnings.catch_warnings(), outputs.replace(file) as opened:
                warnings.simplefilter("ignore")  # signs that a font lacks
                figure.savefig(opened, format=suffix)
            files.append(file)
    return files


def parallel(definition: SweepDefinition, trials: Sequence[FrozenTrial]) -> Figure | None:
    """Return each trial as a line over one axis per parameter, with the metric last; None without trials that have a value."""
    scored = [trial for trial in trials if trial.value is not None]
    if not scored:
        return None
    axes_count = len(definition.parameters) + 1
    figure = Figure(figsize=(max(7.0, 1.7 * axes_count + 1), 5), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    done = [trial for trial in scored if trial.state == TrialState.COMPLETE]
    pruned = [trial for trial in scored if trial.state != TrialState.COMPLETE]
    values = np.array([trial.value for trial in scored], dtype=float)
    low, high = float(values.min()), float(values.max())
    span = (high - low) or 1.0
    norm = Normalize(low, low + span)
    best = best_trial(definition, trials)
    positions = np.arange(axes_count)
    colours = _colours(norm, [float(trial.value or 0.0) for trial in done], upwards=definition.direction == "max")
    for trial in pruned:
        axes.plot(positions, _heights(definition, trial, low, span), color="#b5b5b5", lw=1, ls=":", zorder=1)
    for trial, colour in zip(done, colours, strict=True):
        is_best = best is not None and trial.number == best.number
        axes.plot(
            positions,
            _heights(definition, trial, low, span),
            color=colour,
            lw=3 if is_best else 1.3,
            zorder=3 if is_best else 2,
        )
    _parameter_axes(axes, definition.parameters)
    _labels_at(axes, axes_count - 1, [(low + span * share, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)])
    names = [parameter.name for parameter in definition.parameters]
    axes.set_xticks(positions, [*(_wrap(name) for name in names), definition.metric], fontsize=8.5, color=INK)
    title = f"{len(done)} trial{'' if len(done) == 1 else 's'} done"
    title += f", {len(pruned)} pruned (dotted)" if pruned else ""
    title += f"; best: trial {best.number}, {definition.metric} {best.value:.4g} (thick)" if best else ""
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    _bare(axes, axes_count)
    return figure


def importance(definition: SweepDefinition, trials: Sequence[FrozenTrial]) -> Figure | None:
    """Return how much each parameter decides whether a trial is in the better half; None where too few trials differ."""
    shares = importances(definition, trials)
    if not shares:
        return None
    names = list(reversed(shares))
    figure = Figure(figsize=(7.5, 0.42 * len(names) + 1.3), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = axes.barh(names, [shares[name] for name in names], color=COLOURS[0], height=0.62)
    axes.bar_label(bars, fmt="%.2f", padding=4, fontsize=9, color=INK)
    axes.set_xlim(0, max(1e-9, *shares.values()) * 1.13)
    done = sum(trial.state == TrialState.COMPLETE for trial in trials)
    axes.set_title(
        f"importance for {definition.metric} (PED-ANOVA), {done} trials", fontsize=10.5, color=INK, loc="left"
    )
    axes.tick_params(colors=INK, labelsize=9, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color=FAINT)
    axes.set_axisbelow(True)
    return figure


def importances(definition: SweepDefinition, trials: Sequence[FrozenTrial]) -> dict[str, float]:
    """Return the importance of each parameter, the largest first (PED-ANOVA); empty where too few trials differ."""
    done = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    differing = {
        name
        for name in (parameter.name for parameter in definition.parameters)
        if len({trial.params[name] for trial in done}) > 1
    }
    if len(done) < FEWEST_TRIALS or len({trial.value for trial in done}) < 2 or not differing:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        study = optuna.create_study(direction=DIRECTIONS[definition.direction])
        study.add_trials(done)
        try:
            evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=BETTER)
            found = optuna.importance.get_param_importances(study, evaluator=evaluator, params=sorted(differing))
        except (ValueError, RuntimeError, ZeroDivisionError):  # too little to compare
            return {}
    return {name: float(share) for name, share in found.items() if np.isfinite(share)}


def _heights(definition: SweepDefinition, trial: FrozenTrial, low: float, span: float) -> list[float]:
    heights = [_share(parameter, trial.params[parameter.name]) for parameter in definition.parameters]
    return [*heights, (float(trial.value or 0.0) - low) / span]


def _share(parameter: Parameter, value: Any) -> float:
    """Return where a value lies on its axis, from 0 to 1."""
    if parameter.kind == "choice":
        return parameter.index(value) / max(1, len(parameter.choices) - 1) if len(parameter.choices) > 1 else 0.5
    low, high = parameter.low, parameter.high
    if parameter.log:
        return float((np.log(value) - np.log(low)) / (np.log(high) - np.log(low)))
    return float((value - low) / (high - low))


def _parameter_axes(axes: Axes, parameters: Sequence[Parameter]) -> None:
    for position, parameter in enumerate(parameters):
        if parameter.kind == "choice":
            ticks = [(choice, _share(parameter, choice)) for choice in parameter.choices]
        else:
            ticks = [(float(value), _share(parameter, value)) for value in _round_values(parameter)]
        _labels_at(axes, position, ticks)


def _round_values(parameter: Parameter) -> Sequence[float]:
    """Return the values that are written on an axis: the ends and, of a logarithmic one, the powers of ten between; all of few."""
    if (parameter.step is not None or parameter.kind == "int") and not parameter.log:
        count = round((parameter.high - parameter.low) // (parameter.step or 1)) + 1
        if count <= MOST_LABELS:
            return [float(value) for value in parameter.grid()]
    if not parameter.log:
        return [float(value) for value in np.linspace(parameter.low, parameter.high, 5)]
    powers = 10.0 ** np.arange(np.ceil(np.log10(parameter.low)), np.floor(np.log10(parameter.high)) + 1)
    return sorted({parameter.low, parameter.high, *(float(f"{power:.6g}") for power in powers)})


def _labels_at(axes: Axes, position: int, ticks: Sequence[tuple[Any, float]]) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}
    for value, height in ticks:
        text = f"{value:.3g}" if isinstance(value, float) else show_cell(value)
        axes.text(position + 0.03, height, text, fontsize=7.5, color=INK, va="center", bbox=box, zorder=4)


def _colours(norm: Normalize, values: Sequence[float], *, upwards: bool) -> list[Any]:
    from matplotlib import colormaps

    scaled = np.asarray(norm(np.asarray(values, dtype=float)))
    # Good trials are dark on white.
    return list(colormaps[COLOUR_MAP](0.92 * (1 - scaled if upwards else scaled)))


def _wrap(name: str) -> str:
    section, dot, key = name.rpartition(".")
    return f"{section}{dot}\n{key}" if dot else name


def _bare(axes: Axes, count: int) -> None:
    axes.set_xlim(-0.15, count - 0.6)
    axes.set_ylim(-0.05, 1.05)
    axes.set_yticks([])
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    for position in range(count):
        axes.axvline(position, color="#9a9a9a", lw=0.8, zorder=0)
    axes.tick_params(length=0)
