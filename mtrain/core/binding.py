"""Fill ``core.nn`` and ``core.ops`` with one framework's layers and functions, once per process."""

from types import ModuleType

from mtrain.core import nn, ops
from mtrain.errors import PluginError

_MARK = "__bound_to__"


def bound() -> str | None:
    """Return the name of the module whose layers are bound, e.g. ``mtrain.backends._torch.nn``; None if none is."""
    source: ModuleType | None = vars(nn).get(_MARK)
    return None if source is None else source.__name__


def bind(nn_module: ModuleType, ops_module: ModuleType) -> None:
    """Copy the names of the stubs from one framework's modules into ``core.nn`` and ``core.ops``.

    Binding the same modules again changes nothing.

    Raises:
        PluginError: another framework is bound in this process already, or a name of the contract is missing.
    """
    pairs = ((nn, nn_module), (ops, ops_module))
    if bound() is not None:
        if any(vars(target)[_MARK] is not source for target, source in pairs):
            raise PluginError(
                f"{nn_module.__name__}: {bound()} is bound in this process already, and two frameworks never share "
                "one; start another process for the other framework"
            )
        return
    missing = [
        f"{source.__name__}.{name}" for target, source in pairs for name in target.NAMES if name not in vars(source)
    ]
    if missing:
        raise PluginError(
            f"not a complete framework: {', '.join(missing)} missing; core/nn.pyi and core/ops.pyi list all"
        )
    for target, source in pairs:
        # In place: models have imported these modules already, and look names up when they are built.
        vars(target).update({name: vars(source)[name] for name in target.NAMES}, **{_MARK: source})


def unbind() -> None:
    """Empty ``core.nn`` and ``core.ops`` again. For tests: modules that subclass ``nn.Module`` keep their framework."""
    for target in (nn, ops):
        for name in (*target.NAMES, _MARK):
            vars(target).pop(name, None)
