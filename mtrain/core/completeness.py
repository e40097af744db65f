"""Refuse a session, or another object of a plugin, that lacks members of its interface, before one of them is used."""

from contextlib import suppress
from inspect import get_annotations

from mtrain.core.interfaces import RankSession
from mtrain.errors import PluginError


def check_session(session: object, *, backend: object, name: str) -> None:
    """Refuse what the ``__enter__`` of ``backend`` returned, if it is not a ``RankSession``.

    A backend that defines a method of a session without being the session is refused too: nothing would call it. A
    session without ``capabilities`` is given the default.

    Args:
        session: What ``__enter__`` returned.
        backend: The backend.
        name: The name by which the backend was selected.

    Raises:
        PluginError: Members are missing or misplaced; all are named.
    """
    missing = _without_defaults(session, _missing(session, RankSession))
    if not missing:
        methods = [member for member in vars(RankSession) if not member.startswith("_")]
        misplaced = [] if session is backend else [method for method in methods if hasattr(type(backend), method)]
        if misplaced:
            raise PluginError(
                f"backend {name!r} defines {', '.join(misplaced)}, but is not its own session, so nothing calls that; "
                f"override it in the session that `__enter__` returns, a {type(session).__name__}"
            )
        return
    returned = "None" if session is None else f"a {type(session).__name__} without {', '.join(missing)}"
    remedy = _remedy(missing, RankSession, session, "mtrain.core.interfaces")
    if not all(_has_default(RankSession, member) for member in missing):
        remedy = f"return the session, such as the engine that it makes, and not the backend; {remedy}"
    raise PluginError(f"backend {name!r}: `__enter__` returned {returned}; {remedy}")


def check_members(plugin: object, protocol: type, *, where: str) -> None:
    """Refuse an object that lacks public members of the interface ``protocol``, which plugins import from ``where``.

    Raises:
        PluginError: Members are missing; all are named.
    """
    missing = _missing(plugin, protocol)
    if missing:
        raise PluginError(
            f"{type(plugin).__name__} has no {', '.join(missing)}; {_remedy(missing, protocol, plugin, where)}"
        )


def _missing(plugin: object, protocol: type) -> list[str]:
    members = dict.fromkeys((*get_annotations(protocol), *vars(protocol)))
    names = [name for name in members if not name.startswith("_")]
    return [name for name in names if getattr(plugin, name, None) is None]


def _without_defaults(session: object, missing: list[str]) -> list[str]:
    """Give ``session`` the missing members that have a default; return the members that are still missing."""
    for name in missing:
        if session is not None and not hasattr(session, name) and _has_default(RankSession, name):
            # A class with slots has no room for it, and is refused like one that lacks another member.
            with suppress(AttributeError):
                setattr(session, name, vars(RankSession)[name])
    return [name for name in missing if getattr(session, name, None) is None]


def _remedy(missing: list[str], protocol: type, plugin: object, where: str) -> str:
    """Return the change that supplies the missing members: inherit the default if all of them have one."""
    if all(_has_default(protocol, member) for member in missing):
        return f"derive {type(plugin).__name__} from {protocol.__name__} in {where}, which has a default for it"
    return f"see {protocol.__name__} in {where}"


def _has_default(protocol: type, member: str) -> bool:
    value = vars(protocol).get(member)
    return value is not None and not getattr(value, "__isabstractmethod__", False)
