"""The content of a run's page for people elsewhere: without the hosts, accounts, paths and credentials of its job."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from mtrain.spec.disclosure import HIDDEN_SECTIONS, scrub, shareable
from mtrain.spec.yaml_reader import dump
from mtrain_ui.pages.content import MAX_SPEC_BYTES, Content, Row
from mtrain_ui.pages.folder import RunFiles
from mtrain_ui.pages.timeline import mapping_of

HOST_ROWS = ("host", "hosts of the ranks")
HOST_KEYS = ("ips", "master_addr", "user", "identity_file", "tracking_uri")
"""Keys of the hidden sections whose values are masked wherever they are shown; other values are common words."""


def disclose(content: Content, run: RunFiles) -> Content:
    """Return what ``report.html`` shows of a run."""
    clean = partial(scrub, hidden=list(_private_words(run)))
    failure = content.failure
    if failure is not None:
        failure = dataclasses.replace(
            failure, host="***", message=clean(failure.message), traceback=clean(failure.traceback)
        )
    spec = run.json("spec.json")
    return dataclasses.replace(
        content,
        facts=_rows(content.facts, clean),
        remarks=[clean(text) for text in content.remarks],
        # A hang is told with the names of hosts.
        events=[(kind, clean(text)) for kind, text in content.events if kind != "hang"],
        failure=failure,
        environment=_rows(content.environment, clean),
        command=clean(content.command),
        spec=dump(shareable(spec))[:MAX_SPEC_BYTES] if spec else "",
    )


def _rows(rows: Any, clean: Any) -> list[Row]:
    return [(name, clean(text)) for name, text in rows if name not in HOST_ROWS]


def _private_words(run: RunFiles) -> Iterator[str]:
    """Yield names of hosts and people, and other words that the job's files have in private places."""
    yield str(run.json("environment.json").get("host") or "")
    commands = run.json("plan.json").get("commands")
    for command in commands if isinstance(commands, list) else []:
        yield str(mapping_of(command).get("host") or "")
    spec = run.json("spec.json")
    # Words of hidden sections may stand in messages and commands too.
    for section in HIDDEN_SECTIONS:
        yield from _texts(mapping_of(spec.get(section)), wanted=False)


def _texts(value: Any, *, wanted: bool) -> Iterator[str]:
    """Yield the texts below the keys ``HOST_KEYS``."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, wanted=wanted or key in HOST_KEYS)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, wanted=wanted)
    elif wanted and isinstance(value, str):
        yield value
