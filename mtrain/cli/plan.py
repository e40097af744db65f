"""``mtrain plan``: print what would be started, as text or JSON, and start nothing."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.options import JobCommand, job_options, load_job

if TYPE_CHECKING:
    from mtrain.jobs.plan import Plan
    from mtrain.spec.config import Loaded


@click.command("plan", cls=JobCommand)
@job_options
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--diff", nargs=2, metavar="BACKEND BACKEND", help="Compare the plans of two backends.")
def plan(**params: Any) -> None:
    """Print the commands, the environment and the numbers of a job, and start nothing."""
    if params["diff"]:
        click.echo(difference(params, *params["diff"]), nl=False)
        return
    from mtrain.cluster import start

    loaded = load_job({**params, "config": start.resumed_config(params.get("config"), params.get("resume"))})
    request = requested(loaded)
    if request is not None:
        click.echo(request, nl=False)
    elif params["as_json"]:
        import json

        click.echo(json.dumps(planned(loaded, params.get("resume")).as_json(), indent=2))
    else:
        click.echo(planned(loaded, params.get("resume")).text(), nl=False)


def requested(loaded: "Loaded") -> str | None:
    """Return the request for a scheduler, where the spec chooses a cluster with a queue and names no host; else None."""
    from mtrain.cluster import submission
    from mtrain.jobs.chosen import AUTO, made_cluster
    from mtrain.spec import former_keys

    name = loaded.spec.cluster.name
    if name == AUTO or loaded.spec.cluster.ips:
        return None
    cluster = made_cluster(name, former_keys.cluster_options(loaded.spec), policy=loaded.policy)
    return None if cluster.queue() is None else submission.prepare(loaded).request


def planned(loaded: "Loaded", resume: str | None) -> "Plan":
    """Return the plan of a job."""
    from mtrain.cluster import allocated_hosts, start

    loaded = allocated_hosts.completed(loaded)
    for note in loaded.notes:
        click.echo(note, err=True)
    return start.planned(loaded, start.locate(loaded, resume=resume))


def difference(params: Mapping[str, Any], first: str, second: str) -> str:
    """Return a unified diff of the plans of two backends, both with one port, so that only real differences show."""
    import difflib
    from dataclasses import replace

    from mtrain.cluster import allocated_hosts, start

    texts = []
    machine = None
    for backend in (first, second):
        loaded = allocated_hosts.completed(load_job({**params, "backend": backend}))
        machine = machine or start.here(loaded)
        machine = replace(machine, line=_line_for(backend, start.typed_line()))
        where = start.locate(loaded, resume=params.get("resume"))
        text = start.planned(loaded, where, machine=machine).text()
        texts.append(text.replace(" --", "\n    --").splitlines(keepends=True))
    return "".join(difflib.unified_diff(texts[0], texts[1], fromfile=first, tofile=second, n=1))


def _line_for(backend: str, typed: Sequence[str]) -> list[str]:
    """Return the command that would be typed for one of the two backends: ``typed`` without ``--diff``."""
    command: list[str] = []
    words = iter(typed)
    for word in words:
        if word.partition("=")[0] != "--diff":
            command.append(word)
            continue
        next(words)
        if word == "--diff":
            next(words)
    return [*command, "--backend", backend]
