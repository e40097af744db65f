"""Call a user's class or function with options of a spec, and word what is wrong with them."""

import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mtrain.errors import PluginError, SpecError, UsageError
from mtrain.spec import references
from mtrain.spec.references import Parameters, Reference
from mtrain.spec.suggest import hint


def refuse_unknown(reference: Reference, options: Mapping[str, Any], given: frozenset[str], *, path: str) -> None:
    """Refuse options that the source text of a class or function does not take; nothing is run.

    Args:
        reference: The class or function.
        options: The options of the spec.
        given: Names that mtrain gives if they are taken.
        path: Place of the options in the spec.

    Raises:
        PluginError: the file or the name does not exist.
        SpecError: an option is unknown, or a required one is missing.
    """
    parameters = references.look(reference)
    if parameters is not None:
        _check(reference, parameters, options, given, path=path)


def _check(
    reference: Reference, parameters: Parameters, options: Mapping[str, Any], given: frozenset[str], *, path: str
) -> None:
    problems = [] if parameters.open else [
        f"{path}.{name}: {reference.name} takes no such option{hint(name, list(parameters.names))}"
        for name in options
        if name not in parameters.names
    ]  # fmt: skip
    problems += [
        f"{path}: {reference.name} needs the option {name!r}, which is not given"
        for name in parameters.required
        if name not in options and name not in given
    ]
    if problems:
        raise SpecError(problems)


def make(
    reference: Reference, options: Mapping[str, Any], offered: Mapping[str, Any], *, path: str, seed: int | None = 0
) -> Any:
    """Call what a reference names with ``options``, and with those of ``offered`` that it takes.

    The generators of Python and numpy are seeded just before.

    Raises:
        PluginError: it cannot be imported, or raises an exception.
        SpecError: it does not take these options.
    """
    target = references.import_object(reference)
    parameters = parameters_of(target)
    taken = dict(options)
    if parameters is not None:
        taken |= {name: value for name, value in offered.items() if name in parameters.names and name not in options}
        _check(reference, parameters, taken, frozenset(), path=path)
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
    try:
        return target(**taken)
    except UsageError:
        raise
    except Exception as error:  # A user's code may raise any exception.
        raise PluginError(
            f"{reference.text}: making it failed: {references.tell_error(error, reference.file)}"
        ) from error


def takes(reference: Reference, name: str) -> bool:
    """Return whether what a reference names has a parameter of that name. Imports it."""
    parameters = parameters_of(references.import_object(reference))
    return parameters is not None and name in parameters.names


def parameters_of(target: Callable[..., Any]) -> Parameters | None:
    """Return the parameters of a class or function; None if it does not tell."""
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        return None
    named = [item for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    return Parameters(
        names=tuple(item.name for item in named),
        required=tuple(item.name for item in named if item.default is item.empty),
        open=any(item.kind is item.VAR_KEYWORD for item in parameters),
    )
