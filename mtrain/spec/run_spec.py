"""Check the spec in a run folder before it is read: what it lacks would be read as the default job."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mtrain.errors import SpecError
from mtrain.spec.files import parse_json
from mtrain.spec.sources import Files, display
from mtrain.spec.yaml_reader import read_text


def is_of_a_run(file: Path) -> bool:
    """Return whether mtrain wrote the file into a run folder: it lies there beside its form for the ranks."""
    return file.name == "spec.yml" and file.with_suffix(".json").is_file()


def check_whole(files: Files, file: Path) -> None:
    """Refuse the spec of a run that has lost sections: mtrain writes all of them.

    Raises:
        SpecError: It is empty, or lacks sections of the form for the ranks beside it.
    """
    if files.problems:  # they are told, with their lines
        return
    given = files.laid[0].parsed.values
    whole = _for_ranks(file)
    missing = lost_parts(whole, given)
    if given and not missing:
        return
    what = f"lacks {', '.join(missing)}" if given else "is empty"
    name = display(file)
    copied = shlex.join(["cp", str(Path(name).with_suffix(".json")), name])
    remedy = f"take the copy that the ranks read ({copied}), or give" if whole else "give"
    raise SpecError(
        f"{name}: {what}, and the spec of a run has all sections; {remedy} the spec of the job with -c SPEC"
    )


def lost_parts(whole: Mapping[str, Any], given: Any) -> list[str]:
    """Return what a spec lacks of ``whole``, which was written in this order: sections, and keys of the last one."""
    if not isinstance(given, Mapping):
        return list(whole)
    # mtrain writes sections in the schema's order, so a file that ends
    # too early lacks the last ones, or keys of the last that is there.
    missing = [name for name in whole if name not in given]
    last = next(reversed(list(whole)), None)
    if missing or last is None or not isinstance(part := whole[last], Mapping):
        return missing
    return [f"{last}.{name}" for name in lost_parts(part, given[last])]


def _for_ranks(file: Path) -> dict[str, object]:
    """Return the values of the spec beside ``file`` that the ranks read; empty if it cannot be read."""
    try:
        values = parse_json(read_text(file.with_suffix(".json")))
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
