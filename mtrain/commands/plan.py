"""``mtrain plan``: print what would be started, as text or JSON, and start nothing."""

from typing import Any

import click

from mtrain.commands.options import JobCommand, job_options, spec_request
from mtrain.spec import terminal


@click.command("plan", cls=JobCommand)
@job_options
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--diff", nargs=2, metavar="BACKEND BACKEND", help="Compare the plans of two backends.")
def plan(**params: Any) -> None:
    """Print the commands, the environment and the numbers of a job, and start nothing."""
    from mtrain.api import planning
    from mtrain.api.training import TrainRequest

    def request(**chosen: str) -> TrainRequest:
        return TrainRequest(spec=spec_request({**params, **chosen}), resume=params["resume"])

    if params["diff"]:
        difference = planning.difference([(backend, request(backend=backend)) for backend in params["diff"]])
        terminal.say(difference, nl=False)
        return
    found = planning.plan_or_request(request(), tell=lambda note: terminal.say(note, err=True))
    if isinstance(found, str):
        terminal.say(found, nl=False)
    elif params["as_json"]:
        import json

        terminal.say(json.dumps(found.as_json(), indent=2))
    else:
        terminal.say(found.text(), nl=False)
