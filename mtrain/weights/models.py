"""Find the model to which a file of weights belongs, from the outlines of all models, before any network is built."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain.core.interfaces import Published
from mtrain.errors import CheckpointError, MtrainError, PluginError, SpecError
from mtrain.spec import plugins
from mtrain.spec.references import is_reference
from mtrain.spec.registry import Registry
from mtrain.spec.resolved import Resolved
from mtrain.weights.matching import EntryType, Match, find_prefix, match, refuse_folded, refuse_nothing
from mtrain.weights.names import neutral_names
from mtrain.weights.outline import Question, SpecOutline, classes_in, outlines
from mtrain.weights.reading import Weights, read

_ENOUGH = 0.5
"""If a smaller share of a file's arrays fits a model, another model is searched for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The state of a model with the number of classes that a file was made for."""

    model: str
    classes: int | None
    """Number of classes; None if nothing in the file depends on it."""
    state: Mapping[str, EntryType]
    published: Published


def expect(
    file: Weights,
    model: str,
    *,
    options: Mapping[str, Any] | None = None,
    pruned: Mapping[str, Sequence[int]] | None = None,
) -> Expected | None:
    """Return the state of ``model`` for the number of classes in ``file``; None if the model cannot be outlined.

    If nothing in the file depends on the number of classes, the state is that for one class. ``pruned``: sizes of
    layers that differ from the model's own, see ``core.network.pruned``.

    Raises:
        PluginError: There is no such model.
    """
    published = registry_for(file).load("models", model).published
    return _expected_all(file, {model: published}, options=options or {}, pruned=pruned)[0]


def registry_for(file: Weights) -> Registry:
    """Return which plugins may load for ``file``: those that any command may load here.

    The ``plugins.toml`` of the run that wrote the file declares classes to import, and the file may come from somebody else.

    Raises:
        PluginError: The model of the file is not among them, and the file names a ``plugins.toml``.
    """
    registry = Registry.read()
    here = Path(plugins.POLICY_FILE)
    is_here = file.plugins is None or (here.is_file() and Path(file.plugins).resolve() == here.resolve())
    known = {entry.name for entry in registry.names("models")}
    if not is_here and file.model is not None and file.model not in known and not is_reference(file.model):
        raise PluginError(
            f"{file.path}: names code, the model {file.model!r} of {file.plugins}, and a file of weights is not trusted to run "
            f"code; run the command in the folder of that {plugins.POLICY_FILE}"
        )
    return registry


def fit(file: Weights, expected_state: Expected) -> Match:
    """Match ``file`` with a model.

    Raises:
        CheckpointError: Less than half of the file fits; a model that fits better is named. Or the BatchNorms of the file are
            folded into its convolutions.
    """
    result = refuse_folded(match(file, expected_state.state, expected_state.published))
    if result.share < _ENOUGH:
        better = closest(file, besides=expected_state.model, share=result.share)
        raise CheckpointError(
            f"{file.path} ({file.description}): {len(result.matched)} of its {len(file.arrays)} arrays fit {expected_state.model} "
            f"by name and shape{better or '; is it of another model, or of one with other options (--option)?'}"
        )
    return result


def closest(file: Weights, *, besides: str, share: float) -> str | None:
    """Word a hint on the installed model that fits most arrays of ``file``: ``; N fit MODEL: ...``.

    Returns:
        The hint; None if no model but ``besides`` fits a larger share than ``share`` and than half of the arrays.
    """
    registry = registry_for(file)
    names = [entry.name for entry in registry.usable("models") if entry.name != besides]
    best: tuple[float, float, str] = (max(share, _ENOUGH), 1.0, "")
    for candidate in _expected_all(file, _find_published(names, registry), options={}):
        if candidate is not None:
            fits = match(file, candidate.state, candidate.published)
            # Of models that take as much of the file, the one that the file fills most of: another may have further arrays.
            filled = len(fits.matched) / len(candidate.state)
            if (fits.share, filled) > best[:2]:
                best = (
                    fits.share,
                    filled,
                    f"; {len(fits.matched)} fit {candidate.model}: use that model, or another file",
                )
    return best[2] or None


def check_start(job: Resolved, outline: SpecOutline, *, classes: Sequence[str], training: bool) -> None:
    """Check, before any rank is started, that ``model.weights``, if it is given, can be read and belongs to the model.

    Args:
        job: Names the model, its options and the file.
        outline: The model of ``job``.
        classes: Names of the classes of the job's data, in label order.
        training: Whether the job trains; if not, every entry must come from the file.

    Raises:
        CheckpointError: The file cannot be read, or its BatchNorms are folded into its convolutions.
        SpecError: It belongs to another model, lacks entries that evaluation needs, or has the classes in another order; or
            there is a key without a file.
    """
    spec = job.spec
    if spec.model.weights is None:
        if spec.model.weights_key is not None:
            raise SpecError(
                f"model.weights_key: given {spec.model.weights_key!r} without a file; give one with model.weights, or drop the key"
            )
        return
    try:
        file = read(Path(spec.model.weights), key=spec.model.weights_key)
    except CheckpointError as error:
        raise CheckpointError(f"model.weights: {error}") from error
    known = file.labels.get("class_names") or classes
    if not training and list(known) != list(classes) and sorted(known) == sorted(classes):
        raise SpecError(
            f"model.weights: {file.path} has the classes of the data in another order, {', '.join(known)}; evaluate with "
            f"-o 'data.classes=[{', '.join(known)}]'"
        )
    published = job.model_class.published
    if outline.state is None:  # the model cannot be outlined without its framework, so its ranks will check
        return
    result = match(file, outline.state, published)
    try:
        refuse_folded(result)
    except CheckpointError as error:
        raise CheckpointError(f"model.weights: {error}") from error
    if result.share < _ENOUGH:
        better = closest(file, besides=spec.model.name, share=result.share)
        if better is not None:
            raise SpecError(
                f"model.weights: {file.path} ({file.description}): {len(result.matched)} of its {len(file.arrays)} arrays "
                f"fit {spec.model.name} by name and shape{better}"
            )
        refuse_nothing(result)
    if result.left_over and not training:
        raise SpecError(f"model.weights: {result.summary()}; evaluation needs all: {'; '.join(result.warnings())}")


def _find_published(models: Sequence[str], registry: Registry) -> dict[str, Published]:
    """Return each model's description of its published files, leaving out models that cannot be loaded, or only beside their
    framework, which takes long."""
    descriptions: dict[str, Published] = {}
    for model in models:
        try:
            plugin = registry.load("models", model)
        except MtrainError:
            continue
        if not plugin.native:
            descriptions[model] = plugin.published
    return descriptions


def _expected_all(
    file: Weights,
    models: Mapping[str, Published],
    *,
    options: Mapping[str, Any],
    pruned: Mapping[str, Sequence[int]] | None = None,
) -> list[Expected | None]:
    shapes = {name: tuple(array.shape) for name, array in neutral_names(file.arrays).items()}
    # Outlined for one and for two classes: from the difference
    # follow the sizes for any number, and the number in the file.
    pairs = [(model, count) for model in models for count in (1, 2)]
    side: dict[str, Any] = {} if file.image_size is None else {"image_size": file.image_size}
    answers = outlines(
        [Question(model=model, classes=count, options=options, pruned=pruned, **side) for model, count in pairs]
    )
    states = dict(zip(pairs, answers, strict=True))
    return [
        _expect(model, published, shapes, states[model, 1], states[model, 2]) for model, published in models.items()
    ]


def _expect(
    model: str,
    published: Published,
    shapes: Mapping[str, tuple[int, ...]],
    one: Mapping[str, EntryType] | None,
    two: Mapping[str, EntryType] | None,
) -> Expected | None:
    if one is None or two is None:
        return None
    classes = classes_in(find_prefix(shapes, one)[0], one, two)
    state = {name: one[name].scale(two[name], classes or 1) for name in one}
    return Expected(model=model, classes=classes, state=state, published=published)
