"""Reduce the values of a job to what others may see: no credentials, hosts, users, key files or paths of this machine.

Exported models go to customers, reports to colleagues, and parameters to tracking services. The files of a run folder
itself (``spec.yml``, ``plan.json``) are whole, because a job is resumed from them.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from mtrain.spec.model import Spec
from mtrain.spec.references import is_reference
from mtrain.spec.schema import literals

HIDDEN_SECTIONS = ("cluster", "launcher", "report")
"""Sections about where a job runs and whom it tells; nothing of them says what was trained."""
HIDDEN_KEYS = {"backend": ("python",), "checkpoint": ("copy_to",)}
SECRET = re.compile(r"(^|[_-])(tokens?|secrets?|password|passwd|pwd|keys?|credentials?|auth)$", re.IGNORECASE)
"""Names of values that are left out if they are text."""
MASK = "***"

# No part of these is tried again from within what it has read: a text without a break would take the square of its length.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}://[^\s'\"<>]*")
_ACCOUNT = re.compile(r"(?<![\w.-])[\w.-]++@(?:[A-Za-z][\w-]*\.[\w.-]+|\d{1,3}(?:\.\d{1,3}){3})")
_IP = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_GIVEN_SECRET = re.compile(
    r"((?:token|secret|password|passwd|credential)\w{0,128}['\"]?\s{0,8}[=:]\s{0,8})\S+", re.IGNORECASE
)
_PATH = re.compile(r"(?<![\w.:/])~?/(?:[^\s/'\",:;()<>=]+/)+([^\s/'\",:;()<>=]*)")


def shareable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved spec without what names a place, a person or a secret; a path is reduced to its last part."""
    return {name: _disclose(content, name) for name, content in without_places(values).items() if name != "plugins"}


def without_places(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved spec without the sections and keys about hosts, reporters and copies.

    A checkpoint holds this: its files are copied, and sent to services, on their own.
    """
    kept = {name: content for name, content in values.items() if name not in HIDDEN_SECTIONS}
    for section, keys in HIDDEN_KEYS.items():
        if isinstance(content := kept.get(section), Mapping):
            kept[section] = {name: value for name, value in content.items() if name not in keys}
    return kept


def needed_to_evaluate(spec: Spec) -> dict[str, Any]:
    """Return the part of a spec that an exported model carries: how samples are prepared and scored, no paths."""
    data = _without_text(spec.data)
    named = {"format": shorten(spec.data.format), "names": spec.data.names}
    if hasattr(spec.data, "classes"):  # of tasks on images
        named["classes"] = spec.data.classes
    # The name of a user's own class means nothing without the file, whose path is nobody's business.
    if is_reference(spec.data.format):
        named.pop("format")
    model = {"name": shorten(spec.model.name), "options": shared_options(spec.model.options, spec.model.name)}
    evaluate = _disclose(spec.evaluate.model_dump(mode="json"), "evaluate")
    return {"model": {**model, "pruned": spec.model.pruned}, "data": {**data, **named}, "evaluate": evaluate}


def shared_options(options: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Return the options of a model for others; none of a user's own class, which others do not have."""
    shared: dict[str, Any] = {} if is_reference(model) else _disclose(options, "options")
    return shared


def shorten(text: str) -> str:
    """Return a value of a spec with a path or address reduced to its last part; other text is unchanged."""
    if "://" in text:
        try:
            text = urlsplit(text).path
        except ValueError:
            return MASK
        return text.rstrip("/").rpartition("/")[2] or MASK
    return text.rstrip("/").rpartition("/")[2] if "/" in text else text


def scrub(text: str, hidden: Iterable[str] = ()) -> str:
    """Return prose, a command or a traceback with addresses, accounts and secrets masked, and paths reduced to names.

    Args:
        text: What is shown.
        hidden: Words that are masked too, such as the names of the job's hosts.
    """
    # Addresses first: the other patterns would take them apart, and leave the name of a bucket.
    text = _ADDRESS.sub(lambda found: found[0].partition("://")[0] + "://" + MASK, text)
    text = _GIVEN_SECRET.sub(r"\1" + MASK, text)
    text = _IP.sub(MASK, _ACCOUNT.sub(MASK, text))
    # Longest first, so that of gpu1.lab and gpu1 nothing is left over.
    words = sorted({word for word in hidden if word}, key=len, reverse=True)
    if words:
        text = re.sub(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, words))})(?![\w-])", MASK, text)
    return _PATH.sub(r"\1", text)


def _disclose(value: Any, name: str) -> Any:
    """Return one value for others; None in place of a secret."""
    if name in ("names", "classes"):  # Names of classes are what they are.
        return value
    if isinstance(value, Mapping):
        return {key: _disclose(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_disclose(item, name) for item in value]
    if isinstance(value, str):
        return None if SECRET.search(name) else shorten(value)
    return value


def _without_text(section: BaseModel) -> dict[str, Any]:
    """Return the values of a section but its texts, unless the schema lists them as choices."""
    kept = {}
    for name, field in type(section).model_fields.items():
        # Any text may be a path, an address or a token, in whichever section a task declares; a choice is none of them.
        content, found = _plain(getattr(section, name), choices=set(literals(field.annotation)))
        if found:
            kept[name] = content
    return kept


def _plain(value: Any, *, choices: set[Any]) -> tuple[Any, bool]:
    """Return a value without its texts, and whether anything is left of it."""
    if isinstance(value, BaseModel):
        return _without_text(value), True
    if isinstance(value, Mapping):
        items = {key: _plain(item, choices=choices) for key, item in value.items()}
        return {key: content for key, (content, found) in items.items() if found}, True
    if isinstance(value, list | tuple):
        parts = [_plain(item, choices=choices) for item in value]
        return [content for content, _ in parts], all(found for _, found in parts)
    return value, not isinstance(value, str) or value in choices
