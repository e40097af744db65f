"""Which model a file of weights belongs to: known from the outlines of all models, before any network is built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Published
from mtrain.errors import CheckpointError, MtrainError, SpecError
from mtrain.spec import plugins
from mtrain.spec.model import Spec
from mtrain.weights.matching import Match, Wanted, match, refuse_folded, refuse_nothing
from mtrain.weights.names import neutral_names, published_of
from mtrain.weights.outline import Question, SpecOutline, classes_in, outlines
from mtrain.weights.reading import Weights, read

_ENOUGH = 0.5
"""Of the arrays of a file: where fewer fit, another model is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """A model's state as a file of some number of classes would fill it."""

    model: str
    classes: int | None
    """None: nothing in the file depends on it."""
    state: Mapping[str, Wanted]
    published: Published


def expected(file: Weights, model: str, *, options: Mapping[str, Any] | None = None) -> Expected | None:
    """The state of ``model`` for the number of classes that ``file`` shows; None: the model cannot be outlined.

    Raises:
        PluginError: there is no such model.
    """
    published = published_of(plugins.load("models", model, policy=policy_of(file)))
    return _expected_all(file, {model: published}, options=options or {})[0]


def policy_of(file: Weights) -> plugins.Policy:
    """Which plugins may load, and from where, as the run that wrote ``file`` had it; else as for any command here."""
    return plugins.read_policy(_policy_file(file))


def _policy_file(file: Weights) -> str | None:
    return file.plugins if file.plugins and Path(file.plugins).is_file() else None


def fitted(file: Weights, wanted: Expected) -> Match:
    """``file`` matched to a model.

    Raises:
        CheckpointError: it is of another model, which is named where it is known.
    """
    found = refuse_folded(match(file, wanted.state, wanted.published))
    if found.share < _ENOUGH:
        better = closest(file, besides=wanted.model, share=found.share)
        if better is not None or not found.taken:
            raise CheckpointError(
                f"{file.path} ({file.told}): {len(found.taken)} of its {len(file.arrays)} arrays fit {wanted.model} by name "
                f"and shape{better or '; is it of another model?'}"
            )
    return found


def closest(file: Weights, *, besides: str, share: float) -> str | None:
    """``; N fit MODEL: ...`` for the installed model that most arrays of ``file`` fit, if that is most of them."""
    policy = policy_of(file)
    names = [entry.name for entry in plugins.names("models", policy=policy) if entry.enabled and entry.name != besides]
    best: tuple[float, str] = (max(share, _ENOUGH), "")
    for wanted in _expected_all(file, _published(names, policy), options={}):
        if wanted is not None:
            fits = match(file, wanted.state, wanted.published)
            if fits.share > best[0]:
                best = (fits.share, f"; {len(fits.taken)} fit {wanted.model}: use that model, or another file")
    return best[1] or None


def check_start(spec: Spec, outline: SpecOutline, *, training: bool) -> None:
    """Whether ``model.weights`` can be read and is of this model: asked by the starter, before any rank runs.

    Args:
        spec: names model, options and file.
        outline: the model of ``spec``.
        training: where nothing is trained, every entry must come from the file.

    Raises:
        CheckpointError: the file cannot be read.
        SpecError: it is of another model, or leaves entries out that evaluation needs.
    """
    try:
        file = read(Path(str(spec.model.weights)))
    except CheckpointError as error:
        raise CheckpointError(f"model.weights: {error}") from error
    published = published_of(plugins.load("models", spec.model.name, policy=plugins.read_policy(spec.plugins)))
    if outline.state is None:  # a model that cannot be outlined: its ranks will say
        return
    found = match(file, outline.state, published)
    try:
        refuse_folded(found)
    except CheckpointError as error:
        raise CheckpointError(f"model.weights: {error}") from error
    if found.share < _ENOUGH:
        better = closest(file, besides=spec.model.name, share=found.share)
        if better is not None:
            raise SpecError(
                f"model.weights: {file.path} ({file.told}): {len(found.taken)} of its {len(file.arrays)} arrays fit "
                f"{spec.model.name} by name and shape{better}"
            )
        refuse_nothing(found)
    if found.left and not training:
        raise SpecError(f"model.weights: {found.summary()}; evaluation needs all: {'; '.join(found.warnings())}")


def _published(models: Sequence[str], policy: plugins.Policy) -> dict[str, Published]:
    """What each model says; one that cannot be loaded is left out."""
    told: dict[str, Published] = {}
    for model in models:
        try:
            told[model] = published_of(plugins.load("models", model, policy=policy))
        except MtrainError:
            continue
    return told


def _expected_all(
    file: Weights, models: Mapping[str, Published], *, options: Mapping[str, Any]
) -> list[Expected | None]:
    shapes = {name: tuple(array.shape) for name, array in neutral_names(file.arrays).items()}
    pairs = [(model, count) for model in models for count in (1, 2)]
    policy = _policy_file(file)
    found = outlines([Question(model=model, classes=count, options=options, policy=policy) for model, count in pairs])
    states = dict(zip(pairs, found, strict=True))
    return [_expected(model, told, shapes, states[model, 1], states[model, 2]) for model, told in models.items()]


def _expected(
    model: str,
    published: Published,
    shapes: Mapping[str, tuple[int, ...]],
    one: Mapping[str, Wanted] | None,
    two: Mapping[str, Wanted] | None,
) -> Expected | None:
    if one is None or two is None:
        return None
    classes = classes_in(shapes, one, two)
    state = {name: one[name].scaled(two[name], classes or 1) for name in one}
    return Expected(model=model, classes=classes, state=state, published=published)
